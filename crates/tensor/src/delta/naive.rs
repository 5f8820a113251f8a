//! The definition of a gated delta net as plain loops, from a sequence's first row on.

use crate::StateRule;
use crate::attention::PAGE;
use crate::naive::exp;

/// A row of one value head.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRow<'a> {
    /// `(head_dim,)`, of length 1 over the root of `head_dim`.
    pub query: &'a [f32],
    /// `(head_dim,)`, of length 1.
    pub key: &'a [f32],
    /// `(value_dim,)`
    pub value: &'a [f32],
    /// Share of the difference that enters the state, 0 to 1.
    pub step: f32,
    /// Logarithms of the state's decay, 0 or less: one, or one for each element of a key.
    pub decays: &'a [f32],
    /// Factor of the value that is added to the result.
    pub skip: f32,
}

/// The sum over one channel's last inputs and its present one, from `bias` on, then `silu`. `taps`
/// has the newest last. `inputs` are the inputs that there are, in order, at most as many as taps.
pub fn conv(taps: &[f32], bias: f32, inputs: &[f32]) -> f32 {
    let taps = &taps[taps.len() - inputs.len()..];
    let sum = taps
        .iter()
        .zip(inputs)
        .fold(bias, |sum, (w, x)| w.mul_add(*x, sum));
    sum / (1.0 + exp(-sum))
}

/// The value that each of `rows` reads, `(value_dim,)` each.
pub fn read(rule: StateRule, rows: &[DeltaRow<'_>]) -> Vec<Vec<f32>> {
    let (d, e) = (rows[0].key.len(), rows[0].value.len());
    let mut state = vec![vec![0.0f32; e]; d];
    let mut out = Vec::new();
    for page in rows.chunks(PAGE) {
        let mut deltas: Vec<Vec<f32>> = Vec::new();
        let mut sums: Vec<Vec<f64>> = Vec::new();
        for (t, row) in page.iter().enumerate() {
            let before = |d: usize| sums.last().map_or(0.0, |sums| sums[d]);
            let decays = row.decays.iter().enumerate();
            let own = decays.map(|(d, decay)| before(d) + f64::from(*decay));
            let own = own.collect();
            sums.push(own);
            let far = |d: usize| exp(sums[t][d] as f32);
            let since = |i: usize, d: usize| exp((sums[t][d] - sums[i][d]) as f32);
            let by_channel = rule == StateRule::Channels;
            let from_state = |x: &[f32]| -> Vec<f32> {
                let own = |i: usize| if by_channel { far(i) * x[i] } else { x[i] };
                let sum = |j: usize| (0..d).fold(0.0f32, |sum, i| own(i).mul_add(state[i][j], sum));
                let all = if by_channel { 1.0 } else { far(0) };
                (0..e).map(|j| all * sum(j)).collect()
            };
            let weight = |i: usize, x: &[f32]| {
                let key = |d: usize| match by_channel {
                    true => since(i, d) * page[i].key[d],
                    false => page[i].key[d],
                };
                let score = (0..d).fold(0.0f32, |sum, d| x[d].mul_add(key(d), sum));
                if by_channel {
                    score
                } else {
                    since(i, 0) * score
                }
            };
            let mut p = from_state(row.key);
            for (i, delta) in deltas.iter().enumerate() {
                add(&mut p, weight(i, row.key), delta);
            }
            if rule == StateRule::Sum {
                p.fill(0.0);
            }
            let delta = row.value.iter().zip(&p).map(|(v, p)| row.step * (v - p));
            deltas.push(delta.collect());
            let mut o = from_state(row.query);
            for (i, delta) in deltas.iter().enumerate() {
                add(&mut o, weight(i, row.query), delta);
            }
            if row.skip != 0.0 {
                o.iter_mut()
                    .zip(row.value)
                    .for_each(|(o, v)| *o += row.skip * v);
            }
            out.push(o);
        }
        if page.len() == PAGE {
            advance(&mut state, page, &deltas, &sums);
        }
    }
    out
}

/// `sum += factor * x`, fused.
fn add(sum: &mut [f32], factor: f32, x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum = factor.mul_add(*x, *sum);
    }
}

fn advance(state: &mut [Vec<f32>], page: &[DeltaRow<'_>], deltas: &[Vec<f32>], sums: &[Vec<f64>]) {
    for (d, state) in state.iter_mut().enumerate() {
        let sum = |i: usize| sums[i][d % sums[i].len()];
        let last = sum(PAGE - 1);
        state.iter_mut().for_each(|s| *s *= exp(last as f32));
        for (i, delta) in deltas.iter().enumerate() {
            let factor = exp((last - sum(i)) as f32) * page[i].key[d];
            add(state, factor, delta);
        }
    }
}
