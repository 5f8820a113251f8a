//! Spans of a traced rank: what it did, and when. `paceline trace` draws them for all ranks.
//!
//! ```text
//! leader    Schedule | Step: Plan, compute, Sum, compute, ... Logits | Choose | Between | ...
//! follower  Plan (waits for the leader) | Step: compute, Sum, compute, ...            | Plan ...
//! ```
//!
//! An inactive [`Tracer`] costs a relaxed load and a branch per span, and reads no clock. Compute
//! time is not recorded: it is the time of a [`Kind::Step`] minus the spans within it. Times count
//! from the start of the trace. [`RankTrace::start_unix_ns`] maps that to the machine's clock, so
//! that traces of several processes can be aligned.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use paceline_base::lock;
use serde::{Deserialize, Serialize};

/// Maximum spans of a trace; later ones are counted and dropped. An 80-layer model in a tensor
/// split records some 165 per token: this is room for 1,500 tokens, in 12 MB.
pub const SPANS_MAX: usize = 1 << 18;

/// Name of the thread that computes the second half of a step.
pub(crate) const SECOND_HALF: &str = "second half";

/// Activity of a rank during a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// The leader decides which rows a step computes.
    Schedule,
    /// A step through this rank's layers, exchanges included. On a follower it starts when the plan
    /// arrives. The span's number is the rows, 0 if unknown.
    Step,
    /// The leader samples tokens and decodes them to text.
    Choose,
    /// The leader sends replies and admits requests between two steps.
    Between,
    /// The plan of a step is sent, or awaited.
    Plan,
    /// Sums of a layer are exchanged within the stage. The span's number is the layer.
    Sum,
    /// The residual stream arrives from the previous stage.
    Receive,
    /// The residual stream is sent to the next stage.
    Send,
    /// Logits are sent to the leader.
    Logits,
    /// A half of a step, from its first turn to its end.
    Half,
    /// An exchange of a half, with the waits for its turn.
    Turn,
}

impl Kind {
    /// Whether ranks exchange data in such a span, or wait to do so.
    pub const fn is_exchange(self) -> bool {
        matches!(
            self,
            Self::Plan | Self::Sum | Self::Receive | Self::Send | Self::Logits
        )
    }
}

/// A traced interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SpanRow", into = "SpanRow")]
pub struct TraceSpan {
    pub kind: Kind,
    /// 1 on the thread of a step's second half, else 0.
    pub lane: u8,
    /// Plans that the leader has announced in this epoch, this one included; equal on all ranks.
    pub step: u64,
    /// Layer of a sum; rows of a step.
    pub n: u32,
    /// Nanoseconds since the start of the trace.
    pub begin_ns: u64,
    /// Nanoseconds since the start of the trace.
    pub end_ns: u64,
}

/// Serialised form of a [`Span`]: without field names, since a trace has thousands.
type SpanRow = (Kind, u8, u64, u32, u64, u64);

impl From<SpanRow> for TraceSpan {
    fn from((kind, lane, step, n, begin_ns, end_ns): SpanRow) -> Self {
        Self {
            kind,
            lane,
            step,
            n,
            begin_ns,
            end_ns,
        }
    }
}

impl From<TraceSpan> for SpanRow {
    fn from(span: TraceSpan) -> Self {
        let TraceSpan {
            kind,
            lane,
            step,
            n,
            begin_ns,
            end_ns,
        } = span;
        (kind, lane, step, n, begin_ns, end_ns)
    }
}

/// Spans of a rank from the start of a trace to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTrace {
    /// Start by the machine's clock, in nanoseconds since 1970.
    pub start_unix_ns: u64,
    /// Ordered by their ends.
    pub spans: Vec<TraceSpan>,
    /// Spans beyond [`SPANS_MAX`].
    pub dropped: u64,
}

/// Records the spans of a rank. Clones share the record.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    is_on: AtomicBool,
    /// Announced plans so far.
    step: AtomicU64,
    book: Mutex<SpanLog>,
}

#[derive(Debug, Default)]
struct SpanLog {
    start: Option<Instant>,
    /// When this follower received its plan.
    planned: Option<Instant>,
    trace: RankTrace,
}

impl Tracer {
    /// Starts recording and clears earlier spans.
    pub fn start(&self) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut book = lock(&self.0.book);
        book.start = Some(Instant::now());
        book.planned = None;
        book.trace = RankTrace {
            start_unix_ns: since.map_or(0, |since| since.as_nanos() as u64),
            ..RankTrace::default()
        };
        self.0.is_on.store(true, Ordering::Relaxed);
    }

    /// Stops recording and returns the spans since [`start`](Self::start).
    pub fn stop(&self) -> RankTrace {
        self.0.is_on.store(false, Ordering::Relaxed);
        std::mem::take(&mut *lock(&self.0.book)).trace
    }

    /// Start time of a span; `None` while no trace runs.
    pub fn begin(&self) -> Option<Instant> {
        self.0.is_on.load(Ordering::Relaxed).then(Instant::now)
    }

    /// Records a span that [`begin`](Self::begin) started and that ends now.
    pub fn end(&self, began: Option<Instant>, kind: Kind, n: usize) {
        if let Some(began) = began {
            self.record((began, kind, n), 0);
        }
    }

    /// As [`end`](Self::end), for a span of the step `ahead` steps after the last counted one.
    pub(crate) fn end_ahead(&self, began: Option<Instant>, kind: Kind, ahead: u64) {
        if let Some(began) = began {
            self.record((began, kind, 0), ahead);
        }
    }

    /// Marks that this follower has received the plan of a step, which starts now.
    pub fn begin_step(&self) {
        if let Some(now) = self.begin() {
            lock(&self.0.book).planned = Some(now);
        }
    }

    /// Records the step that [`begin_step`](Self::begin_step) started; no effect without one.
    pub fn end_step(&self) {
        if self.begin().is_some() {
            let planned = lock(&self.0.book).planned.take();
            self.end(planned, Kind::Step, 0);
        }
    }

    /// Counts a plan: later spans belong to the next step.
    pub fn next_step(&self) {
        self.0.step.fetch_add(1, Ordering::Relaxed);
    }

    #[cold]
    fn record(&self, (began, kind, n): (Instant, Kind, usize), ahead: u64) {
        let now = Instant::now();
        let mut book = lock(&self.0.book);
        let Some(start) = book.start else {
            return; // stopped concurrently
        };
        if book.trace.spans.len() == SPANS_MAX {
            book.trace.dropped += 1;
            return;
        }
        let since = |at: Instant| at.saturating_duration_since(start).as_nanos() as u64;
        let is_second = std::thread::current().name() == Some(SECOND_HALF);
        book.trace.spans.push(TraceSpan {
            kind,
            lane: is_second.into(),
            step: self.0.step.load(Ordering::Relaxed) + ahead,
            n: u32::try_from(n).unwrap_or(u32::MAX),
            begin_ns: since(began),
            end_ns: since(now),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracer_records_between_start_and_stop_only() {
        let tracer = Tracer::default();
        tracer.end(tracer.begin(), Kind::Sum, 1);
        tracer.start();
        let late = tracer.begin();
        tracer.next_step();
        tracer.end(tracer.begin(), Kind::Sum, 2);
        let trace = tracer.stop();
        let told: Vec<_> = trace.spans.iter().map(|s| (s.kind, s.step, s.n)).collect();
        assert_eq!(told, [(Kind::Sum, 1, 2)]);
        assert!(trace.start_unix_ns > 0 && trace.spans[0].begin_ns <= trace.spans[0].end_ns);
        tracer.end(late, Kind::Sum, 3);
        assert_eq!(tracer.stop(), RankTrace::default(), "stopped meanwhile");
    }

    #[test]
    fn what_is_announced_belongs_to_a_later_step() {
        let tracer = Tracer::default();
        tracer.start();
        tracer.end_ahead(tracer.begin(), Kind::Plan, 1);
        tracer.end_ahead(tracer.begin(), Kind::Plan, 2);
        tracer.next_step();
        tracer.end(tracer.begin(), Kind::Step, 9);
        let trace = tracer.stop();
        let steps: Vec<_> = trace.spans.iter().map(|s| (s.kind, s.step)).collect();
        assert_eq!(steps, [(Kind::Plan, 1), (Kind::Plan, 2), (Kind::Step, 1)]);
    }

    /// A follower waits a long time for its plan before the trace starts.
    #[test]
    fn a_step_is_recorded_from_its_plan_on() {
        let tracer = Tracer::default();
        tracer.begin_step();
        tracer.start();
        tracer.end_step();
        tracer.begin_step();
        tracer.end_step();
        let trace = tracer.stop();
        let kinds: Vec<Kind> = trace.spans.iter().map(|span| span.kind).collect();
        assert_eq!(kinds, [Kind::Step], "not of the plan that came before");
    }

    #[test]
    fn spans_beyond_the_bound_are_counted() {
        let tracer = Tracer::default();
        tracer.start();
        let began = tracer.begin();
        (0..SPANS_MAX + 3).for_each(|_| tracer.end(began, Kind::Plan, 0));
        let trace = tracer.stop();
        assert_eq!((trace.spans.len(), trace.dropped), (SPANS_MAX, 3));
    }

    #[test]
    fn spans_travel_as_rows() {
        let span = TraceSpan {
            kind: Kind::Logits,
            lane: 1,
            step: 7,
            n: 0,
            begin_ns: 5,
            end_ns: 9,
        };
        let json = serde_json::to_string(&span).unwrap();
        assert_eq!(json, r#"["Logits",1,7,0,5,9]"#);
        assert_eq!(serde_json::from_str::<TraceSpan>(&json).unwrap(), span);
    }
}
