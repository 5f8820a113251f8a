//! An instance as a dashboard shows it: who holds what, and the prediction beside the measurement.

use serde::Serialize;

use crate::Instance;

/// Changes of the split that a portrait tells, the last ones.
const CHANGES_TOLD: usize = 8;

/// How an instance computes at the moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Portrait {
    /// How the model is cut now.
    pub split: String,
    /// Decode tokens a second that were expected of this split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_tok_s: Option<f64>,
    /// Decode tokens a second of the last answers that were alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_tok_s: Option<f64>,
    /// Times that the workers were started again after a failure.
    pub restarts: u64,
    /// Changes of the split so far, refused ones included.
    pub n_changes: usize,
    /// The last changes of the split, a line each.
    pub changes: Vec<String>,
    /// Parts of the model in rank order; empty before the workers are ready.
    pub shards: Vec<Shard>,
}

/// What a rank holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shard {
    /// The rank.
    pub rank: usize,
    /// First layer of its stage.
    pub first_layer: usize,
    /// Layer after the last one of its stage.
    pub end_layer: usize,
    /// Its share of these layers, 0 to 1.
    pub share: f64,
    /// Bytes of packed weights.
    pub weight_bytes: u64,
    /// Times that its process has packed weights.
    pub packings: u64,
    /// Threads that it computes with.
    pub threads: usize,
    /// Instruction set of its kernels, or its device.
    pub device: String,
}

impl Instance {
    /// The instance as a dashboard shows it. Does not wait for the workers.
    pub fn portrait(&self) -> Portrait {
        let changes = self.changes();
        let last = changes.len().saturating_sub(CHANGES_TOLD);
        Portrait {
            split: self.split().to_string(),
            predicted_tok_s: self.predicted(),
            measured_tok_s: self.measured(),
            restarts: self.restarts(),
            n_changes: changes.len(),
            changes: changes[last..].iter().map(|change| change.line()).collect(),
            shards: self.shards(),
        }
    }

    fn shards(&self) -> Vec<Shard> {
        let split = self.split();
        let ranks = split.each_stage().flat_map(|(layers, shares)| {
            let all: u32 = shares.iter().sum();
            let of = move |share: &u32| f64::from(*share) / f64::from(all.max(1));
            shares.iter().map(move |share| (layers.clone(), of(share)))
        });
        let facts = self.facts();
        let told = facts.into_iter().zip(ranks).enumerate();
        told.map(|(rank, (facts, (layers, share)))| Shard {
            rank,
            first_layer: layers.start,
            end_layer: layers.end,
            share,
            weight_bytes: facts.weight_bytes,
            packings: facts.packings,
            threads: facts.threads,
            device: facts.instruction_set,
        })
        .collect()
    }
}
