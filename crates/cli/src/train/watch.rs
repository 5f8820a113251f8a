//! How a training goes, on stderr.

use std::time::{Duration, Instant};

use paceline_base::Bytes;
use paceline_train::Progress;

use crate::output::{counted, tell};

/// Least time between two lines about steps, so that a short step's do not flood.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Tells of steps now and then.
pub(super) struct Watch {
    steps: u64,
    nodes: usize,
    /// Of each node; those of other machines are not known.
    threads: Option<usize>,
    told: Option<Instant>,
    /// Steps and moment since which the time left is estimated.
    since: (u64, Instant),
    waiting: Option<String>,
}

impl Watch {
    pub(super) fn new(nodes: usize, threads: Option<usize>) -> Self {
        Self {
            steps: 0,
            nodes,
            threads,
            told: None,
            since: (0, Instant::now()),
            waiting: None,
        }
    }

    pub(super) fn hear(&mut self, progress: Progress) {
        match progress {
            Progress::Begun {
                step,
                steps,
                examples,
                rows,
                cut,
                numbers,
            } => {
                self.steps = steps;
                self.since = (step, Instant::now());
                let nodes = counted(self.nodes, "node");
                let rows = match rows == examples {
                    true => String::new(),
                    false => format!(" in {}", counted(rows, "row")),
                };
                let of = |threads| format!(" of {}", counted(threads, "thread"));
                let threads = self.threads.map_or_else(String::new, of);
                tell(format_args!(
                    "{examples} examples{rows}, {numbers} trained numbers, {nodes}{threads}, \
                     step {step} of {} done",
                    self.steps
                ));
                if cut > 0 {
                    tell(format_args!(
                        "warning: {cut} examples were cut to --max-tokens-per-row"
                    ));
                }
            }
            Progress::Note { line } => tell(line),
            Progress::Lost { why } => {
                tell(format_args!(
                    "a worker was lost ({why}): others compute its leaves"
                ));
            }
            Progress::HeldOut { loss } => tell(format_args!(
                "held out before the first step: {loss:.4} (perplexity {:.2})",
                loss.exp()
            )),
            Progress::Step(m) => {
                let gone = self.since.1.elapsed().as_secs_f64();
                let each = gone / m.step.saturating_sub(self.since.0).max(1) as f64;
                let left = each * self.steps.saturating_sub(m.step) as f64;
                let held_out = m.val_loss.map_or(String::new(), |loss| {
                    format!(", held out {loss:.4} (perplexity {:.2})", loss.exp())
                });
                let share = m.flop_share.map_or(String::new(), |share| {
                    format!(" ({:.0} % of the machine's arithmetic)", share * 100.0)
                });
                let memory = m.memory_bytes.map_or(String::new(), |bytes| {
                    format!(", {} in memory", Bytes(bytes))
                });
                let line = format!(
                    "step {}/{}: loss {:.4}, lr {:.2e}, {:.0} tok/s{share}{memory}, {left:.0} s \
                     left{held_out}",
                    m.step, self.steps, m.loss, m.lr, m.tok_s
                );
                let is_due = self.told.is_none_or(|told| told.elapsed() >= LINE_EVERY);
                if is_due || m.val_loss.is_some() {
                    self.told = Some(Instant::now());
                    self.waiting = None;
                    tell(line);
                } else {
                    self.waiting = Some(line);
                }
            }
        }
    }

    /// Tells what was held back last.
    pub(super) fn end(&mut self) {
        if let Some(line) = self.waiting.take() {
            tell(line);
        }
    }
}
