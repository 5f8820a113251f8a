//! Metrics of each step: `metrics.jsonl`.

use std::path::{Path, PathBuf};

use paceline_model::adapter::files::tensors;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// From 1.
    pub step: u64,
    /// Mean negative log likelihood of the tokens that the loss covers, before the step's update.
    pub loss: f64,
    /// Learning rate.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens that the loss covers.
    pub judged: u64,
    /// Tokens that went through the model.
    pub tokens: u64,
    /// First step only: negative log likelihood of a held-out token before it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_loss_before: Option<f64>,
    /// Negative log likelihood of a held-out token after the update.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// Perplexity of what is held out: e to the power of that.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_ppl: Option<f64>,
    /// Seconds of the step.
    pub step_s: f64,
    /// Tokens a second.
    pub tok_s: f64,
    /// Share of the rate of arithmetic that was measured before the first step. `None` where that
    /// is not known, and of a step that was faster.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub flop_share: Option<f64>,
    /// Most bytes that the run's own process, or a rank that shares out the state, had in memory so
    /// far.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub memory_bytes: Option<u64>,
    /// Most bytes that a rank sent to others in the step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sent_bytes: Option<u64>,
    /// Share of the step in which the least busy worker of a stage, or of cut rows, did not wait
    /// for others.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub busy_share: Option<f64>,
    /// Workers that computed.
    pub nodes: u32,
}

/// The file of measured steps.
pub(crate) struct Metrics {
    path: PathBuf,
    pub(crate) first: Option<Measured>,
    pub(crate) last: Option<Measured>,
}

impl Metrics {
    /// Retains the lines of the first `step` steps unchanged; later ones have no checkpoint.
    pub(crate) fn open(path: &Path, step: u64) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let read = |line: &str| serde_json::from_str::<Measured>(line).ok();
        let kept = text.lines().map_while(|line| Some((line, read(line)?)));
        let kept: Vec<_> = kept.filter(|(_, measured)| measured.step <= step).collect();
        tensors::replace(path, |file| {
            kept.iter()
                .try_for_each(|(line, _)| writeln!(file, "{line}"))
        })?;
        Ok(Self {
            path: path.to_owned(),
            first: kept.first().map(|(_, measured)| measured.clone()),
            last: kept.last().map(|(_, measured)| measured.clone()),
        })
    }

    pub(crate) fn add(&mut self, measured: &Measured) -> Result<(), Error> {
        use std::io::Write;
        let file = std::fs::OpenOptions::new().append(true).open(&self.path);
        let written = file.and_then(|mut file| file.write_all(line(measured).as_bytes()));
        written.map_err(Error::file("write", &self.path))?;
        self.first.get_or_insert_with(|| measured.clone());
        self.last = Some(measured.clone());
        Ok(())
    }

    pub(crate) fn ends(&self) -> [f64; 2] {
        [&self.first, &self.last].map(|end| end.as_ref().map_or(f64::NAN, |m| m.loss))
    }
}

fn line(measured: &Measured) -> String {
    let mut line = serde_json::to_string(measured).unwrap_or_default();
    line.push('\n');
    line
}

/// The lines of `metrics.jsonl`; one that was cut off by a kill is left out, as are those behind.
///
/// # Errors
/// [`Error::Files`], unless there is none.
pub fn read_metrics(path: &Path) -> Result<Vec<Measured>, Error> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text
            .lines()
            .map_while(|line| serde_json::from_str(line).ok())
            .collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::file("read", path)(error)),
    }
}
