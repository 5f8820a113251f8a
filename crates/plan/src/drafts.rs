//! Predicts decoding with drafts: several tokens of a sequence verified in one step.
//!
//! ```text
//! seconds of a step of d + 1 rows + d passes of the draft head
//! tokens  1 + a + a^2 + .. + a^d      a: chance that a draft token is right after right ones
//! ```
//!
//! A step over slow links takes as long with d + 1 rows as with one. There drafts gain most.

use crate::check::finite_in;
use crate::cost::kernels::StepRows;
use crate::{Costs, Error, Pipeline};

/// Longest draft, as the engine's default. Accepted tokens are of drafts of this length.
const DEPTH: u32 = 8;

/// Time of a pass of a draft head, in layers of its model: one for its own layer, one for its
/// output head. That head has a part of the vocabulary.
const PASS_LAYERS: f64 = 2.0;

/// Decoding of one request with drafts of the best length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drafted {
    /// Accepted draft tokens of a draft of 8, as asked.
    pub accepted: f64,
    /// Draft tokens of a step; 0 where none gains.
    pub depth: u32,
    /// Tokens of a step.
    pub per_step: f64,
    /// Tokens a second.
    pub tok_s: f64,
}

/// Predicts decoding with drafts on `pipeline`. `accepted` is the mean of accepted draft tokens of
/// a draft of 8, as `paceline ps` tells it.
///
/// # Errors
/// [`Error::Value`] for `accepted` outside 0 to 8; the errors of [`Costs::pipeline`].
pub fn drafted(costs: &Costs<'_>, pipeline: &Pipeline, accepted: f64) -> Result<Drafted, Error> {
    check(accepted)?;
    let right = acceptance(accepted);
    let one = costs.decode_rows(1.0);
    let alone = costs.pipeline(pipeline, one)?;
    let computed = (alone.total() - alone.comm()).max(0.0);
    let pass = computed * PASS_LAYERS / f64::from(costs.model.layers.max(1));
    let mut best = Drafted {
        accepted,
        depth: 0,
        per_step: 1.0,
        tok_s: 1.0 / alone.total(),
    };
    for depth in 1..=DEPTH {
        let rows = StepRows {
            rows: f64::from(depth + 1),
            ..one
        };
        let per_step = 1.0 + sum(right, depth);
        let seconds = costs.pipeline(pipeline, rows)?.total() + f64::from(depth) * pass;
        if per_step / seconds > best.tok_s {
            best = Drafted {
                accepted,
                depth,
                per_step,
                tok_s: per_step / seconds,
            };
        }
    }
    Ok(best)
}

/// Refuses numbers of accepted tokens that no draft has.
pub(crate) fn check(accepted: f64) -> Result<(), Error> {
    finite_in(
        "drafts",
        "accepted tokens",
        accepted,
        0.0,
        f64::from(DEPTH),
        "0 to 8",
    )
}

/// Mean accepted tokens of a draft of `depth`.
fn sum(right: f64, depth: u32) -> f64 {
    (1..=depth).map(|n| right.powi(n as i32)).sum()
}

/// The chance of a draft token with which `accepted` of [`DEPTH`] are right in a row, by halving.
fn acceptance(accepted: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        match sum(middle, DEPTH) < accepted {
            true => low = middle,
            false => high = middle,
        }
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::short_cluster;
    use crate::{Calibration, Catalogue, Workload};

    /// Two machines on a fast and on a slow link, a stage each.
    fn gain(link: &str, accepted: f64) -> (f64, u32) {
        let (catalogue, calibration) = (Catalogue::builtin().unwrap(), Calibration::builtin());
        let model = catalogue.model("Llama-3.2-1B").unwrap().shape(8.5).unwrap();
        let machines = format!("2 x mac-studio-m3-ultra-512 @ {link}");
        let cluster = short_cluster(&machines, &catalogue).unwrap();
        let calibration = calibration.unwrap();
        let costs = Costs::new(&cluster, &model, Workload::ONE, &calibration).unwrap();
        let stages = Pipeline::even(model.layers, &[0, 1]);
        let plain = costs.pipeline(&stages, costs.decode_rows(1.0)).unwrap();
        let with = drafted(&costs, &stages, accepted).unwrap();
        (with.tok_s * plain.total(), with.depth)
    }

    #[test]
    fn slow_links_gain_most_and_wrong_drafts_nothing() {
        let (fast, slow) = (gain("tb5-rdma", 3.0), gain("wifi", 3.0));
        assert!(
            1.1 < fast.0 && fast.0 < slow.0 && slow.0 < 4.0,
            "{fast:?} {slow:?}"
        );
        let (none, depth) = gain("wifi", 0.0);
        assert!((none - 1.0).abs() < 1e-9 && depth == 0, "{none} {depth}");
    }

    #[test]
    fn a_chance_gives_its_mean() {
        for accepted in [0.5, 3.0, 7.5] {
            assert!((sum(acceptance(accepted), DEPTH) - accepted).abs() < 1e-6);
        }
        assert!(check(8.5).is_err() && check(f64::NAN).is_err());
    }
}
