//! Progress of a training run as text.

use paceline_base::{Bytes, counted};

use crate::TrainingProgress;

/// Least seconds between two lines about steps, so that a short step's do not flood.
const LINE_EVERY_S: f64 = 2.0;

/// Reports steps at intervals. Times are seconds of any clock.
#[derive(Clone, Debug)]
pub struct StepReporter {
    steps: u64,
    nodes: usize,
    /// Threads of each node; `None` where unknown, as on other machines.
    threads: Option<usize>,
    told: Option<f64>,
    /// Steps and moment since which the time left is estimated.
    since: (u64, f64),
    waiting: Option<String>,
}

impl StepReporter {
    /// For a run on `nodes` nodes, with `threads` threads each where that is known.
    pub const fn new(nodes: usize, threads: Option<usize>) -> Self {
        Self {
            steps: 0,
            nodes,
            threads,
            told: None,
            since: (0, 0.0),
            waiting: None,
        }
    }

    /// The lines for `progress` at `now_s` seconds.
    #[expect(clippy::too_many_lines, reason = "a line for each event")]
    pub fn lines_for(&mut self, progress: TrainingProgress, now_s: f64) -> Vec<String> {
        match progress {
            TrainingProgress::Begun {
                step,
                steps,
                examples,
                rows,
                cut,
                rendered,
                numbers,
            } => {
                self.steps = steps;
                self.since = (step, now_s);
                let nodes = counted(self.nodes, "node");
                let rows = match rows == examples {
                    true => String::new(),
                    false => format!(" in {}", counted(rows, "row")),
                };
                let of = |threads| format!(" of {}", counted(threads, "thread"));
                let threads = self.threads.map_or_else(String::new, of);
                let mut lines = vec![format!(
                    "{}{rows}, {numbers} trained numbers, {nodes}{threads}, \
                     step {step} of {} done",
                    counted(examples, "example"),
                    self.steps
                )];
                if cut > 0 {
                    let were = if cut == 1 { "was" } else { "were" };
                    let cut = counted(cut, "example");
                    lines.push(format!("warning: {cut} {were} cut to --max-tokens-per-row"));
                }
                if rendered > 0 {
                    let rendered = counted(rendered, "example");
                    lines.push(format!(
                        "warning: {rendered} of text with names of control tokens: these are \
                         trained on as ordinary text; conversations belong under messages"
                    ));
                }
                lines
            }
            TrainingProgress::Note { line } => vec![line],
            TrainingProgress::Lost { why } => {
                vec![format!(
                    "a worker was lost ({why}): others compute its leaves"
                )]
            }
            TrainingProgress::HeldOut { loss } => vec![format!(
                "held out before the first step: {loss:.4} (perplexity {:.2})",
                loss.exp()
            )],
            TrainingProgress::Step(m) => {
                let gone = now_s - self.since.1;
                let each = gone / m.step.saturating_sub(self.since.0).max(1) as f64;
                let left = each * self.steps.saturating_sub(m.step) as f64;
                let held_out = m.val_loss.map_or(String::new(), |loss| {
                    format!(", held out {loss:.4} (perplexity {:.2})", loss.exp())
                });
                let share = m.flop_share.map_or(String::new(), |share| {
                    format!(
                        " ({:.0} % of the arithmetic measured before)",
                        share * 100.0
                    )
                });
                let memory = m.memory_bytes.map_or(String::new(), |bytes| {
                    format!(", {} in memory", Bytes(bytes))
                });
                let line = format!(
                    "step {}/{}: loss {:.4}, lr {:.2e}, {:.0} tok/s{share}{memory}, {left:.0} s \
                     left{held_out}",
                    m.step, self.steps, m.loss, m.lr, m.tok_s
                );
                let is_due = self.told.is_none_or(|told| now_s - told >= LINE_EVERY_S);
                if is_due || m.val_loss.is_some() {
                    self.told = Some(now_s);
                    self.waiting = None;
                    vec![line]
                } else {
                    self.waiting = Some(line);
                    Vec::new()
                }
            }
        }
    }

    /// The line that was held back last.
    pub const fn end(&mut self) -> Option<String> {
        self.waiting.take()
    }
}
