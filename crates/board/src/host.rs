//! Facts about a node's machine from the program around it: rates, health, printed lines.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use paceline_base::CallbackError;
use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::{Agent, ServiceChannel};
use serde::{Deserialize, Serialize};

use crate::CommandError;
use crate::commands::unix_s;
use crate::dashboard::Inner;
use crate::doctor::HealthCheck;
use crate::own_cluster::MeasuredRates;

/// Name of the service of a node's lines.
pub(crate) const LINES: &str = "lines";

/// Maximum kept lines; a busy node prints some a minute.
const LINES_MAX: usize = 400;

/// Maximum bytes of a line; longer ones are cut.
const LINE_BYTES_MAX: usize = 1 << 10;

/// Maximum bytes of a node's lines as JSON: each byte may take six.
const TOLD_BYTES_MAX: usize = 6 * LINES_MAX * (LINE_BYTES_MAX + 64);

/// Timeout of opening a channel to another node, and of its lines.
const LIMIT: Duration = Duration::from_secs(3);

/// Sources of facts about this machine. Clones share them.
#[derive(Clone, derive_more::Debug)]
#[debug("HostProbes(..)")]
pub struct HostProbes(Arc<Probes>);

struct Probes {
    rates: Box<dyn Fn() -> Result<MeasuredRates, CallbackError> + Send + Sync>,
    health: Box<dyn Fn() -> Result<Vec<HealthCheck>, CallbackError> + Send + Sync>,
    lines: &'static LogLines,
}

impl HostProbes {
    /// Probes by callbacks: `rates` measures the memory and the processor for half a second,
    /// `health` runs the checks of `doctor`.
    pub fn new(
        rates: impl Fn() -> Result<MeasuredRates, CallbackError> + Send + Sync + 'static,
        health: impl Fn() -> Result<Vec<HealthCheck>, CallbackError> + Send + Sync + 'static,
        lines: &'static LogLines,
    ) -> Self {
        let (rates, health) = (Box::new(rates), Box::new(health));
        Self(Arc::new(Probes {
            rates,
            health,
            lines,
        }))
    }

    /// Bandwidth and integer operations of this machine.
    pub(crate) fn rates(&self) -> Result<MeasuredRates, CallbackError> {
        (self.0.rates)()
    }

    pub(crate) fn health(&self) -> Result<Vec<HealthCheck>, CallbackError> {
        (self.0.health)()
    }

    /// The last printed lines, oldest first.
    pub(crate) fn lines(&self) -> Vec<LogLine> {
        lock(&self.0.lines.0).iter().cloned().collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LogLine {
    unix_s: u64,
    text: String,
}

/// The last lines that a program has printed for people.
#[derive(Debug)]
pub struct LogLines(Mutex<VecDeque<LogLine>>);

impl LogLines {
    /// Without lines.
    #[expect(clippy::new_without_default, reason = "a static needs a constant")]
    pub const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Adds a line; drops the oldest of too many.
    pub fn put(&self, text: &str) {
        let mut end = text.len().min(LINE_BYTES_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let line = LogLine {
            unix_s: unix_s(),
            text: text[..end].to_owned(),
        };
        let mut lines = lock(&self.0);
        if lines.len() == LINES_MAX {
            lines.pop_front();
        }
        lines.push_back(line);
    }
}

/// Sends this node's lines to another node of the cluster.
pub(crate) fn answer(inner: &Weak<Inner>, channel: &ServiceChannel) {
    let host = inner.upgrade().and_then(|inner| inner.host.get().cloned());
    let lines = host.map_or_else(Vec::new, |host| host.lines());
    let told = serde_json::to_vec(&lines).expect("lines are JSON");
    let _ = channel.send(&told); // a node that is gone needs none
    // Waits until the other end has read them and closes.
    let _ = channel.recv(1, LIMIT);
    channel.close();
}

pub(crate) fn lines_of(agent: &Agent, node: NodeId) -> Result<Vec<LogLine>, CommandError> {
    let channel = agent.open(node, LINES, LIMIT);
    let channel = channel.map_err(CommandError::other)?;
    let told = channel.recv(TOLD_BYTES_MAX, LIMIT);
    channel.close();
    let told = told.map_err(CommandError::other)?;
    let told = told.ok_or(CommandError::NoLines)?;
    Ok(serde_json::from_slice(&told)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_the_last_stay() {
        static KEPT: LogLines = LogLines::new();
        for i in 0..LINES_MAX {
            KEPT.put(&i.to_string());
        }
        KEPT.put(&"é".repeat(LINE_BYTES_MAX));
        let host = HostProbes::new(|| Err("".into()), || Ok(Vec::new()), &KEPT);
        let lines = host.lines();
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(lines[0].text, "1");
        assert_eq!(lines.last().unwrap().text.len(), LINE_BYTES_MAX);
    }
}
