//! Accounts for the time of an answer: the spans of all ranks on one clock, and their sums.
//!
//! ```text
//! Recording: RankTrace of every rank --align--> one clock --match exchanges--> Timeline
//!    Timeline::json    Chrome's trace format, for Perfetto
//!    Timeline::text    a table: parts of the answer's time, rank by rank
//! Timeline::stages  the same for a short sample of running requests, for the dashboard
//! ```
//!
//! Each moment of an answer belongs to one part of a rank's time:
//!
//! | part | what the rank does |
//! |---|---|
//! | compute | its share of a step, outside of exchanges |
//! | exchange | moves values that all ranks concerned have ready |
//! | wait | waits for another rank that is not there yet |
//! | choose | the leader chooses tokens and makes text |
//! | plan | the leader plans steps, delivers replies, accepts requests |
//! | way | request and replies travel between the caller and the leader |
//! | rest | none of these: what was not recorded |
//!
//! An exchange is split at the start of its last rank: before that the others wait. Ranks on
//! several machines have different clocks. A rank's times are shifted by the least amount for which
//! no message arrives before it was sent.

mod chrome;
mod intervals;
mod recording;
mod stages;
mod table;

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use paceline_model::trace::{Kind, RankTrace, TraceSpan};
use serde::{Deserialize, Serialize};

use intervals::{Interval, Moments};
pub use recording::{RankRecording, Recording};
pub use stages::{StageTime, Stages};

/// Start and end of an answer, by the caller's clock, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerTimes {
    /// The request was submitted.
    pub asked_unix_ns: u64,
    /// Prefill ended.
    pub first_unix_ns: u64,
    /// The answer was complete.
    pub ended_unix_ns: u64,
}

/// Converts times of the monotonic clock to the machine's wall clock.
#[derive(Clone, Copy, Debug)]
pub struct UnixClock(Instant, u64);

impl UnixClock {
    /// Reads both clocks.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self(Instant::now(), since.map_or(0, |at| at.as_nanos() as u64))
    }

    /// Nanoseconds since 1970 of a time after this clock was read.
    pub fn unix_ns(&self, at: Instant) -> u64 {
        self.1 + at.saturating_duration_since(self.0).as_nanos() as u64
    }
}

/// Breakdown of a rank's time, in nanoseconds; all parts but `hidden_ns` add up to the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TimeBreakdown {
    pub compute_ns: i64,
    /// Exchanging values with ranks that were ready.
    pub exchange_ns: i64,
    /// Waiting for other ranks.
    pub wait_ns: i64,
    /// Sampling tokens.
    pub choose_ns: i64,
    /// Planning steps and delivering replies.
    pub plan_ns: i64,
    /// Travel of the request to the leader, and of the answer's end to the caller.
    pub way_ns: i64,
    /// Not recorded.
    pub rest_ns: i64,
    /// Exchange time overlapped by the other half's computation: part of `compute_ns`.
    pub hidden_ns: i64,
}

/// Parts of a rank's time, as sets of intervals.
#[derive(Clone, Debug, Default)]
struct Shares {
    compute: Moments,
    exchange: Moments,
    wait: Moments,
    choose: Moments,
    plan: Moments,
    way: Moments,
    /// Exchanges overlapped by computation.
    hidden: Moments,
}

/// A rank's part of the timeline.
#[derive(Clone, Debug)]
struct RankLine {
    /// Label for people: the layers that the rank holds.
    name: String,
    leads: bool,
    /// Spans relative to the submission of the request.
    spans: Vec<Aligned>,
    shares: Shares,
    moved_ns: i64,
    dropped: u64,
}

/// A span on the caller's clock.
#[derive(Clone, Copy, Debug)]
struct Aligned {
    kind: Kind,
    lane: u8,
    step: u64,
    n: u32,
    begin: i64,
    end: i64,
    /// Start of the last participating rank.
    met: i64,
}

/// The timeline of an answer over all ranks.
#[derive(Clone, Debug)]
pub struct Timeline {
    ranks: Vec<RankLine>,
    /// End of prefill.
    first: i64,
    whole: i64,
    split: String,
}

impl Timeline {
    /// Aligns the traces of all ranks to one clock.
    ///
    /// # Panics
    /// If the leader of the recording is none of its ranks.
    pub fn new(recording: &Recording) -> Self {
        let (times, leader) = (&recording.times, recording.leader as usize);
        assert!(leader < recording.ranks.len(), "the leader is a rank");
        let since = |unix_ns: u64| unix_ns as i64 - times.asked_unix_ns as i64;
        let whole = since(times.ended_unix_ns).max(0);
        let records = recording.ranks.iter();
        let stages: Vec<Range<u32>> = records.clone().map(|it| it.stage.clone()).collect();
        let mut spans: Vec<Vec<Aligned>> = records
            .map(|it| aligned(&it.trace, since(it.trace.start_unix_ns)))
            .collect();
        let moved = align(&mut spans, leader);
        meet(&mut spans, &stages, leader);
        let lines = spans.into_iter().zip(&recording.ranks).enumerate();
        let line = |(rank, (spans, record)): (usize, (Vec<Aligned>, &RankRecording))| {
            let (first, end) = (record.layers.start, record.layers.end);
            RankLine {
                name: format!("layers {first}-{}", end.saturating_sub(1)),
                leads: rank == leader,
                shares: shares(&spans, whole, rank == leader),
                moved_ns: moved[rank],
                dropped: record.trace.dropped,
                spans,
            }
        };
        Self {
            ranks: lines.map(line).collect(),
            first: since(times.first_unix_ns).clamp(0, whole),
            whole,
            split: recording.split.clone(),
        }
    }

    /// Parts of each rank's time over the whole answer, in rank order.
    pub fn parts(&self) -> Vec<TimeBreakdown> {
        self.parts_of((0, self.whole))
    }

    /// The same for prefill (from the request on), and for the rest.
    pub fn phases(&self) -> [Vec<TimeBreakdown>; 2] {
        [(0, self.first), (self.first, self.whole)].map(|phase| self.parts_of(phase))
    }

    fn parts_of(&self, phase: Interval) -> Vec<TimeBreakdown> {
        let within = Moments::new([phase]);
        let of = |rank: &RankLine| rank.shares.within(&within, phase.1 - phase.0);
        self.ranks.iter().map(of).collect()
    }

    /// Steps that the leader computed.
    fn steps(&self) -> usize {
        let leader = self.ranks.iter().find(|rank| rank.leads);
        leader.map_or(0, |rank| count(&rank.spans, |kind| kind == Kind::Step))
    }
}

fn count(spans: &[Aligned], of: impl Fn(Kind) -> bool) -> usize {
    spans.iter().filter(|span| of(span.kind)).count()
}

impl Shares {
    /// Parts of the rank's time within a phase of `whole` nanoseconds.
    fn within(&self, phase: &Moments, whole: i64) -> TimeBreakdown {
        let total = |of: &Moments| of.and(phase).total();
        let mut parts = TimeBreakdown {
            compute_ns: total(&self.compute),
            exchange_ns: total(&self.exchange),
            wait_ns: total(&self.wait),
            choose_ns: total(&self.choose),
            plan_ns: total(&self.plan),
            way_ns: total(&self.way),
            rest_ns: 0,
            hidden_ns: total(&self.hidden),
        };
        parts.rest_ns = whole - parts.recorded_ns();
        parts
    }
}

impl TimeBreakdown {
    /// Sum of all parts but the rest.
    pub const fn recorded_ns(&self) -> i64 {
        self.compute_ns
            + self.exchange_ns
            + self.wait_ns
            + self.choose_ns
            + self.plan_ns
            + self.way_ns
    }
}

/// The spans of a trace that starts `start` after the request, in order of their start.
fn aligned(trace: &RankTrace, start: i64) -> Vec<Aligned> {
    let of = |span: &TraceSpan| Aligned {
        kind: span.kind,
        lane: span.lane,
        step: span.step,
        n: span.n,
        begin: start + span.begin_ns as i64,
        end: start + span.end_ns as i64,
        met: start + span.begin_ns as i64,
    };
    let mut spans: Vec<Aligned> = trace.spans.iter().map(of).collect();
    spans.sort_by_key(|span| (span.begin, std::cmp::Reverse(span.end)));
    spans
}

/// Shifts each rank's times by the least amount for which no message from or to the leader arrives
/// before it was sent. Returns the shift of each rank in nanoseconds.
///
/// For each step: a rank has its plan after the leader began to announce it, and started its last
/// exchange before the leader's step ended.
fn align(ranks: &mut [Vec<Aligned>], leader: usize) -> Vec<i64> {
    let announced: HashMap<u64, i64> = ranks[leader]
        .iter()
        .filter(|span| span.kind == Kind::Plan)
        .map(|span| (span.step, span.begin))
        .collect();
    let computed: HashMap<u64, i64> = ranks[leader]
        .iter()
        .filter(|span| span.kind == Kind::Step)
        .map(|span| (span.step, span.end))
        .collect();
    let mut moved = vec![0; ranks.len()];
    for (rank, spans) in ranks
        .iter_mut()
        .enumerate()
        .filter(|(rank, _)| *rank != leader)
    {
        let (mut least, mut most) = (i64::MIN, i64::MAX);
        for span in spans.iter() {
            if let (Kind::Plan, Some(sent)) = (span.kind, announced.get(&span.step)) {
                least = least.max(sent - span.end);
            } else if let (true, Some(end)) = (span.kind.is_exchange(), computed.get(&span.step)) {
                most = most.min(end - span.begin);
            }
        }
        // Contradicting bounds come from drifting clocks: the middle has the least error.
        let by = if least > most {
            least.midpoint(most)
        } else {
            0_i64.clamp(least, most)
        };
        moved[rank] = by;
        for span in spans {
            (span.begin, span.end, span.met) = (span.begin + by, span.end + by, span.met + by);
        }
    }
    moved
}

/// Key of an exchange between ranks: step, kind, layer, and its index among those with the same.
type Meeting = (u64, Kind, u32, u32);

/// Finds for every exchange when its last participating rank started it.
fn meet(ranks: &mut [Vec<Aligned>], stages: &[Range<u32>], leader: usize) {
    let began: Vec<HashMap<Meeting, i64>> = ranks.iter().map(|spans| begins(spans)).collect();
    for (rank, spans) in ranks.iter_mut().enumerate() {
        let own = &stages[rank];
        let peers = |kind: Kind| -> (Kind, Vec<usize>) {
            let stage = |of: &Range<u32>| (of.start as usize..of.end as usize).collect();
            match kind {
                Kind::Sum => (Kind::Sum, stage(own)),
                Kind::Plan if rank != leader => (Kind::Plan, vec![leader]),
                Kind::Logits if rank == leader => (Kind::Logits, stage(own)),
                Kind::Receive => (Kind::Send, source(stages, rank).into_iter().collect()),
                _ => (kind, Vec::new()),
            }
        };
        let mut seen: HashMap<(u64, Kind, u32), u32> = HashMap::new();
        for span in spans.iter_mut().filter(|span| span.kind.is_exchange()) {
            let nth = seen.entry((span.step, span.kind, span.n)).or_default();
            let (kind, peers) = peers(span.kind);
            let key = (span.step, kind, span.n, *nth);
            *nth += 1;
            let last = peers.into_iter().filter_map(|peer| began[peer].get(&key));
            let met = last.copied().max().unwrap_or(span.begin);
            span.met = met.clamp(span.begin, span.end);
        }
    }
}

fn begins(spans: &[Aligned]) -> HashMap<Meeting, i64> {
    let mut seen: HashMap<(u64, Kind, u32), u32> = HashMap::new();
    let mut out = HashMap::new();
    for span in spans.iter().filter(|span| span.kind.is_exchange()) {
        let nth = seen.entry((span.step, span.kind, span.n)).or_default();
        out.insert((span.step, span.kind, span.n, *nth), span.begin);
        *nth += 1;
    }
    out
}

/// The rank of the previous stage that sends its residual stream to `rank`.
fn source(stages: &[Range<u32>], rank: usize) -> Option<usize> {
    let own = &stages[rank];
    let before = stages.iter().find(|stage| stage.end == own.start)?;
    let index = rank as u32 - own.start;
    Some((before.start + index % (before.end - before.start)) as usize)
}

/// Activity of a rank over time, in an answer that took `whole` nanoseconds.
fn shares(spans: &[Aligned], whole: i64, leads: bool) -> Shares {
    let all = Moments::new([(0, whole)]);
    let of = |kinds: &[Kind]| {
        let chosen = spans.iter().filter(|span| kinds.contains(&span.kind));
        Moments::new(chosen.map(|span| (span.begin, span.end))).and(&all)
    };
    let exchanges = || spans.iter().filter(|span| span.kind.is_exchange());
    let moves = Moments::new(exchanges().map(|span| (span.met, span.end))).and(&all);
    let mut waits = Moments::new(exchanges().map(|span| (span.begin, span.met))).and(&all);
    let (from, to) = (spans.first(), spans.iter().map(|span| span.end).max());
    let ends = [
        (0, from.map_or(whole, |span| span.begin)),
        (to.unwrap_or(whole), whole),
    ];
    let ends = Moments::new(ends).and(&all);
    let mut way = Moments::default();
    if leads {
        way = ends;
    } else {
        waits = waits.or(&ends); // for a plan, also before and after the trace
    }
    let steps = of(&[Kind::Step]);
    let halved = halves(spans).and(&steps);
    let plain = steps.without(&of(&[Kind::Half]));
    let compute = plain.without(&moves).without(&waits).or(&halved);
    let hidden = moves.and(&halved);
    let exchange = moves.without(&compute);
    let wait = waits.without(&compute).without(&exchange);
    let busy = compute.or(&exchange).or(&wait);
    let choose = of(&[Kind::Choose]).without(&busy);
    let plan = of(&[Kind::Schedule, Kind::Between])
        .without(&busy)
        .without(&choose);
    Shares {
        way: way.without(&busy),
        compute,
        exchange,
        wait,
        choose,
        plan,
        hidden,
    }
}

/// Intervals in which a half of a step computes.
fn halves(spans: &[Aligned]) -> Moments {
    let lane = |lane: u8| {
        let of = |is: fn(Kind) -> bool| {
            let chosen = spans.iter().filter(|s| s.lane == lane && is(s.kind));
            Moments::new(chosen.map(|span| (span.begin, span.end)))
        };
        let halves = of(|kind| kind == Kind::Half);
        halves.without(&of(|kind| kind == Kind::Turn || kind.is_exchange()))
    };
    lane(0).or(&lane(1))
}

#[cfg(test)]
mod tests;
