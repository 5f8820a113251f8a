//! The progress and the results that a run reports.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::class::TrainingClass;
use crate::metrics::Measured;

/// Events of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum TrainingProgress {
    /// Everything is read, and the next step is this, from 0.
    Begun {
        /// Steps that were done before.
        step: u64,
        /// Steps of the whole run.
        steps: u64,
        examples: usize,
        /// Rows that they are put into.
        rows: usize,
        /// Examples that were cut to the longest length.
        cut: usize,
        /// Examples of text with names of control tokens.
        rendered: usize,
        /// Numbers that are trained.
        numbers: usize,
    },
    /// The held-out data was evaluated before the first step.
    HeldOut {
        /// Negative log likelihood of a token.
        loss: f64,
    },
    /// A step is done.
    Step(Measured),
    /// A note about the engine, sent once.
    Note { line: String },
    /// A worker was lost, and its leaves are computed by others.
    Lost {
        /// Reason for the loss.
        why: String,
    },
}

/// Results of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Steps that are done.
    pub steps: u64,
    /// Loss of the first step of all and of the last.
    pub loss: [f64; 2],
    /// Held-out loss before the first step of all, by the metrics.
    pub val_loss_before: Option<f64>,
    /// Held-out loss at the end.
    pub val_loss: Option<f64>,
    /// SHA-256 of values and moments.
    pub digest: String,
    /// Workers that were lost.
    pub lost: u32,
    /// Examples of text with names of control tokens, also of what is held out.
    pub rendered: usize,
    /// Files of the result.
    pub files: Vec<PathBuf>,
}

/// Execution of a run, and its output.
#[derive(Clone, Copy, Debug)]
pub struct RunInfo<'a> {
    /// Folder of the result.
    pub output: &'a Path,
    /// Arithmetic.
    pub class: TrainingClass,
    /// Worker processes.
    pub nodes: usize,
    /// Stages that the model was cut into.
    pub stages: u32,
    /// Threads of each node; those of other machines are not known.
    pub threads: Option<usize>,
}

impl Report {
    /// The report as one object.
    pub fn json(&self, about: &RunInfo<'_>) -> serde_json::Value {
        json!({
            "output": about.output,
            "class": about.class.name(),
            "steps": self.steps,
            "first_loss": self.loss[0],
            "loss": self.loss[1],
            "first_val_loss": self.val_loss_before,
            "val_loss": self.val_loss,
            "digest": self.digest,
            "nodes": about.nodes,
            "stages": about.stages,
            "threads": about.threads,
            "lost": self.lost,
            "rendered": self.rendered,
            "files": self.files,
        })
    }
}
