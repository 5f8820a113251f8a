//! Summary of an instance for the dashboard: each rank's part, predicted and measured speed.

use paceline_engine::DraftCounts;
use serde::Serialize;

use crate::Instance;

/// Most recent changes of the split in a summary.
const CHANGES_TOLD: usize = 8;

/// Current state of an instance's computation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InstanceSummary {
    /// The current split.
    pub split: String,
    /// Predicted decode tokens a second of this split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_tok_s: Option<f64>,
    /// Measured decode tokens a second of the last single answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_tok_s: Option<f64>,
    /// Draft tokens since the workers started, as measured last; `None` without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafts: Option<DraftCounts>,
    /// Restarts of the workers after a failure.
    pub restarts: u64,
    /// Changes of the split so far, refused ones included.
    pub n_changes: usize,
    /// The last changes of the split, a line each.
    pub changes: Vec<String>,
    /// Parts of the model in rank order; empty before the workers are ready.
    pub shards: Vec<Shard>,
    /// The prefill nodes, if there are some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<Prompts>,
}

/// Prefill nodes of an instance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prompts {
    /// Number of nodes.
    pub nodes: u32,
    /// The split over them.
    pub split: String,
    /// Whether they are connected to the decode nodes now.
    pub up: bool,
    /// Prompts computed and transferred.
    pub handed: u64,
    /// Prompts meant for them that the decode nodes computed.
    pub fell_back: u64,
    /// Prefill tokens a second of these nodes; predicted until one was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tok_s: Option<f64>,
    /// The same for the decode nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others_tok_s: Option<f64>,
    /// Parts of the model in rank order, as in the instance.
    pub shards: Vec<Shard>,
}

/// The part of a model that a rank holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shard {
    pub rank: usize,
    /// First layer of its stage.
    pub first_layer: usize,
    /// Layer after the last one of its stage.
    pub end_layer: usize,
    /// Its share of these layers, 0 to 1.
    pub share: f64,
    /// Bytes of packed weights.
    pub weight_bytes: u64,
    /// How often its process packed weights.
    pub packings: u64,
    /// Threads that it computes with.
    pub threads: usize,
    /// Instruction set of its kernels, or its device.
    pub device: String,
}

impl Instance {
    /// The summary of this instance. Does not wait for the workers.
    pub fn portrait(&self) -> InstanceSummary {
        let changes = self.changes();
        let last = changes.len().saturating_sub(CHANGES_TOLD);
        InstanceSummary {
            split: self.split().to_string(),
            predicted_tok_s: self.predicted(),
            measured_tok_s: self.measured(),
            drafts: Some(self.drafts()).filter(|drafts| drafts.steps > 0),
            restarts: self.restarts(),
            n_changes: changes.len(),
            changes: changes[last..].iter().map(|change| change.line()).collect(),
            shards: self.shards(),
            prompts: self.prompts_portrait(),
        }
    }

    fn prompts_portrait(&self) -> Option<Prompts> {
        let (instance, (up, counts, readers)) = self.prompts()?;
        Some(Prompts {
            nodes: instance.split().ranks(),
            split: instance.split().to_string(),
            up,
            handed: counts.handed,
            fell_back: counts.fell_back,
            tok_s: readers.there_tok_s(),
            others_tok_s: readers.here_tok_s(),
            shards: instance.shards(),
        })
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
