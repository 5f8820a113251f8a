//! Spans of time that a rank records while it is traced: what it did, and when.
//!
//! ```text
//! leader    Schedule | Step: Plan, compute, Sum, compute, ... Logits | Choose | Between | ...
//! follower  Plan (waits for the leader) | Step: compute, Sum, compute, ...            | Plan ...
//! ```
//!
//! A [`Tracer`] that is off costs a relaxed load and a branch for each span, and reads no clock.
//! Compute time is not recorded: it is the time of a [`Kind::Step`] beside the spans within it.
//! Times count from the start of the trace. [`RankTrace::start_unix_ns`] places that on the
//! machine's clock, so that the traces of several processes can be put side by side.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use paceline_base::lock;
use serde::{Deserialize, Serialize};

/// Most spans of a trace; later ones are counted and dropped. An 80-layer model in a tensor split
/// records some 165 for each token: this is room for 1,500 tokens, in 12 MB.
pub const SPANS_MAX: usize = 1 << 18;

/// Name of the thread that computes the second half of a step.
pub(crate) const SECOND_HALF: &str = "second half";

/// Activity of a rank during a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// The leader decides which rows a step computes.
    Schedule,
    /// A step through this rank's layers, exchanges included; of a follower, from the moment at
    /// which it has the plan. The number of the span is that of the rows, 0 where it is not known.
    Step,
    /// The leader chooses tokens and makes text of them.
    Choose,
    /// The leader hands out replies and takes in requests between two steps.
    Between,
    /// The plan of a step is sent, or waited for.
    Plan,
    /// Sums of a layer are exchanged within the stage. The number of the span is the layer.
    Sum,
    /// The residual stream comes from the stage before.
    Receive,
    /// The residual stream goes to the next stage.
    Send,
    /// Logits go to the leader.
    Logits,
    /// A half of a step, from its first turn to its end.
    Half,
    /// A half exchanges, and waits for its turn before and after.
    Turn,
}

impl Kind {
    /// Whether ranks exchange something, or wait for each other to do so.
    pub const fn is_exchange(self) -> bool {
        matches!(
            self,
            Self::Plan | Self::Sum | Self::Receive | Self::Send | Self::Logits
        )
    }
}

/// Something that took time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
pub struct Span {
    /// The rank's activity.
    pub kind: Kind,
    /// 1 on the thread of a step's second half, else 0.
    pub lane: u8,
    /// Plans that the leader had announced in this epoch, this one included: the same number on
    /// all ranks.
    pub step: u64,
    /// The layer of a sum; the rows of a step.
    pub n: u32,
    /// Nanoseconds after the start of the trace.
    pub begin_ns: u64,
    /// The same of its end.
    pub end_ns: u64,
}

/// A [`Span`] as it travels: no names, since there are thousands.
type Row = (Kind, u8, u64, u32, u64, u64);

impl From<Row> for Span {
    fn from((kind, lane, step, n, begin_ns, end_ns): Row) -> Self {
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

impl From<Span> for Row {
    fn from(span: Span) -> Self {
        let Span {
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

/// Spans that a rank recorded from the start of a trace to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTrace {
    /// The start by the machine's clock, in nanoseconds since 1970.
    pub start_unix_ns: u64,
    /// In the order in which they ended.
    pub spans: Vec<Span>,
    /// Spans beyond [`SPANS_MAX`].
    pub dropped: u64,
}

/// Records spans of a rank. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    is_on: AtomicBool,
    /// Plans that were announced so far.
    step: AtomicU64,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    start: Option<Instant>,
    /// When this follower had its plan.
    planned: Option<Instant>,
    trace: RankTrace,
}

impl Tracer {
    /// Records from now on, and forgets what was recorded before.
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

    /// Records no more; what was recorded since [`start`](Self::start).
    pub fn stop(&self) -> RankTrace {
        self.0.is_on.store(false, Ordering::Relaxed);
        std::mem::take(&mut *lock(&self.0.book)).trace
    }

    /// The begin of a span; `None` while nothing is traced.
    pub fn begin(&self) -> Option<Instant> {
        self.0.is_on.load(Ordering::Relaxed).then(Instant::now)
    }

    /// Records a span that [`begin`](Self::begin) began and that ends now.
    pub fn end(&self, began: Option<Instant>, kind: Kind, n: usize) {
        if let Some(began) = began {
            self.record((began, kind, n), 0);
        }
    }

    /// As [`end`](Self::end), of something that belongs to a step so many `ahead` of the last one
    /// that was counted.
    pub(crate) fn end_ahead(&self, began: Option<Instant>, kind: Kind, ahead: u64) {
        if let Some(began) = began {
            self.record((began, kind, 0), ahead);
        }
    }

    /// Notes that this follower has the plan of a step, which begins.
    pub fn begin_step(&self) {
        if let Some(now) = self.begin() {
            lock(&self.0.book).planned = Some(now);
        }
    }

    /// Records the step that [`begin_step`](Self::begin_step) began; nothing where none did.
    pub fn end_step(&self) {
        if self.begin().is_some() {
            let planned = lock(&self.0.book).planned.take();
            self.end(planned, Kind::Step, 0);
        }
    }

    /// Counts a plan: what is recorded from now on belongs to the next step.
    pub fn next_step(&self) {
        self.0.step.fetch_add(1, Ordering::Relaxed);
    }

    #[cold]
    fn record(&self, (began, kind, n): (Instant, Kind, usize), ahead: u64) {
        let now = Instant::now();
        let mut book = lock(&self.0.book);
        let Some(start) = book.start else {
            return; // stopped meanwhile
        };
        if book.trace.spans.len() == SPANS_MAX {
            book.trace.dropped += 1;
            return;
        }
        let since = |at: Instant| at.saturating_duration_since(start).as_nanos() as u64;
        let is_second = std::thread::current().name() == Some(SECOND_HALF);
        book.trace.spans.push(Span {
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

    /// A follower waits for its plan for long before a trace begins.
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
        let span = Span {
            kind: Kind::Logits,
            lane: 1,
            step: 7,
            n: 0,
            begin_ns: 5,
            end_ns: 9,
        };
        let json = serde_json::to_string(&span).unwrap();
        assert_eq!(json, r#"["Logits",1,7,0,5,9]"#);
        assert_eq!(serde_json::from_str::<Span>(&json).unwrap(), span);
    }
}
