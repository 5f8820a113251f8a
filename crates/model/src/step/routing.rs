//! Routes of rows to experts: weights from the router's scores, and the choice among them.

use paceline_tensor::Kernels;

use super::rows::sigmoid;
use crate::config::{self, ExpertGroups, Gating, LEAST_SUM, MAX_GROUPS, MAX_USED};

/// A row's route to one expert.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ExpertRoute {
    pub(super) expert: usize,
    pub(super) weight: f32,
    /// Index in the results.
    pub(super) slot: usize,
}

impl ExpertRoute {
    /// To an expert, of `weights` `(E,)`.
    pub(super) const fn to(expert: usize, weights: &[f32]) -> Self {
        Self {
            expert,
            weight: weights[expert],
            slot: 0,
        }
    }
}

/// Converts scores to weights, `(experts,)` each.
pub(super) fn weigh(kernels: &Kernels, gating: Gating, scores: &[f32], weights: &mut [f32]) {
    match gating {
        Gating::OfChosen => weights.copy_from_slice(scores),
        Gating::Sigmoid => sigmoid(kernels, scores, 1.0, weights),
        Gating::SqrtSoftplus | Gating::OfToken => {
            for (weight, score) in weights.iter_mut().zip(scores) {
                let softplus = libm::log1p(libm::exp(f64::from(*score)));
                let softplus = if *score > 40.0 {
                    f64::from(*score)
                } else {
                    softplus
                };
                *weight = libm::sqrt(softplus) as f32;
            }
        }
        Gating::Softmax => {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            kernels.exp_scaled(scores, largest, 1.0, weights);
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
    }
}

/// Selects the experts with the largest weights, the lower index among equals. `choice` is a bias
/// for the selection only. The result is in order of index.
pub(super) fn choose_row(
    (kernels, of): (&Kernels, &config::Experts),
    scores: &[f32],
    choice: Option<&[f32]>,
    weights: &mut [f32],
    choices: &mut [ExpertRoute],
) {
    weigh(kernels, of.gating, scores, weights);
    let rank = |e: usize| weights[e] + choice.map_or(0.0, |choice| choice[e]);
    let open = of
        .groups
        .map(|groups| (of.count / groups.count, groups.open(of.count, rank)));
    let is_open = |e: usize| open.is_none_or(|(each, open)| open >> (e / each) & 1 == 1);
    for n in 0..choices.len() {
        let taken = &choices[..n];
        let is_free = |e: &usize| is_open(*e) && taken.iter().all(|choice| choice.expert != *e);
        // The first among equals: `max_by` takes the last.
        let free = (0..weights.len()).filter(is_free).rev();
        let best = free.max_by(|a, b| rank(*a).total_cmp(&rank(*b)));
        let expert = best.expect("no more are used than there are");
        choices[n] = ExpertRoute::to(expert, weights);
    }
    finish_row((kernels, of), choices);
}

/// Weights of the chosen experts from their scores' ones, in order of index.
pub(super) fn finish_row((kernels, of): (&Kernels, &config::Experts), choices: &mut [ExpertRoute]) {
    if of.gating == Gating::OfChosen {
        soften(kernels, choices);
    }
    if of.normalised {
        let sum: f32 = choices.iter().map(|choice| choice.weight).sum();
        choices
            .iter_mut()
            .for_each(|choice| choice.weight /= sum.max(LEAST_SUM));
    }
    choices
        .iter_mut()
        .for_each(|choice| choice.weight *= of.scale);
    choices.sort_unstable_by_key(|choice| choice.expert);
}

impl ExpertGroups {
    /// Groups with the largest scores as a bit set, the lower index among equals. A group's score
    /// is the sum of its largest `rank`s, added in descending order.
    pub fn open(self, experts: usize, rank: impl Fn(usize) -> f32) -> u64 {
        let each = experts / self.count;
        let score = |group: usize| {
            let mut sum = 0.0;
            let mut before = (f32::INFINITY, 0); // rank and index of the last one added
            for n in 0..self.largest {
                let behind = |e: &usize| {
                    let order = rank(*e).total_cmp(&before.0);
                    n == 0 || order.is_lt() || order.is_eq() && *e > before.1
                };
                let rest = (group * each..(group + 1) * each).filter(behind).rev();
                let best = rest.max_by(|a, b| rank(*a).total_cmp(&rank(*b)));
                let best = best.expect("a group has more experts than count for its score");
                before = (rank(best), best);
                sum += before.0;
            }
            sum
        };
        let mut scores = [0.0; MAX_GROUPS];
        let each_score = scores.iter_mut().enumerate().take(self.count);
        each_score.for_each(|(group, to)| *to = score(group));
        let mut open = 0u64;
        for _ in 0..self.used {
            let closed = (0..self.count).filter(|group| open >> group & 1 == 0).rev();
            let best = closed.max_by(|a, b| scores[*a].total_cmp(&scores[*b]));
            open |= 1 << best.expect("no more are used than there are");
        }
        open
    }
}

/// Softmax over the scores of `choices`; the first score must be the largest.
fn soften(kernels: &Kernels, choices: &mut [ExpertRoute]) {
    let (mut scores, mut exp) = ([0.0; MAX_USED], [0.0; MAX_USED]);
    let n = choices.len();
    let each = scores.iter_mut().zip(&*choices);
    each.for_each(|(score, choice)| *score = choice.weight);
    kernels.exp_scaled(&scores[..n], scores[0], 1.0, &mut exp[..n]);
    let sum: f32 = exp[..n].iter().sum();
    let each = choices.iter_mut().zip(exp);
    each.for_each(|(choice, exp)| choice.weight = exp / sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against sorting, with many equal values.
    #[test]
    fn groups_are_those_of_the_largest_sums() {
        let mut seed = 1u32;
        for round in 0..2000 {
            let (count, each) = [(4, 2), (8, 4), (3, 5), (1, 6), (64, 2)][round % 5];
            let ranks: Vec<f32> = (0..count * each)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 28) as f32 / 8.0 - 0.5
                })
                .collect();
            for (used, largest) in [(1, 1), (count.min(2), 2), (count, 1)] {
                let groups = ExpertGroups {
                    count,
                    used,
                    largest,
                };
                let score = |group: usize| {
                    let mut own = ranks[group * each..(group + 1) * each].to_vec();
                    own.sort_by(|a, b| b.total_cmp(a));
                    own[..largest].iter().sum::<f32>()
                };
                let mut order: Vec<usize> = (0..count).collect();
                order.sort_by(|a, b| score(*b).total_cmp(&score(*a))); // stable
                let expected = order[..used]
                    .iter()
                    .fold(0, |open, group| open | 1u64 << group);
                let got = groups.open(ranks.len(), |e| ranks[e]);
                assert_eq!(got, expected, "{groups:?} {ranks:?}");
            }
        }
    }

    /// Non-finite scores are ordered by `total_cmp` too.
    #[test]
    fn groups_of_no_numbers_are_chosen() {
        let groups = ExpertGroups {
            count: 2,
            used: 2,
            largest: 2,
        };
        assert_eq!(groups.open(4, |_| f32::NAN), 0b11);
    }
}
