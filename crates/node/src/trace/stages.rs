//! A short sample of where the time of an instance's ranks goes, while it computes for any client.
//!
//! A sample begins and ends with steps of the leader. Steps that began before or end after it are
//! left out, so its parts add up as those of an answer do.

use std::time::Duration;

use paceline_model::trace::{Kind, RankTrace};
use serde::{Deserialize, Serialize};

use super::intervals::{Interval, Moments};
use super::{AnswerTimes, RankLine, Recording, Shares, TimeBreakdown, Timeline};
use crate::{Error, Instance};

/// Target number of steps of a sample, and its least and longest time. A second has some 30 steps
/// of a small model; a step of a large model on a slow machine takes seconds.
const LOOK_STEPS: f64 = 3.0;
const LOOK_MIN: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(8);

/// Cells of a [`StageTime::lane`]: on a phone each has three pixels.
const LANE_PIECES: i64 = 120;

/// Steps that a lane shows: one token through all stages, and the next one.
const LANE_STEPS: usize = 2;

/// Breakdown of the ranks' time in a sample of whole steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// The split of the model.
    pub split: String,
    /// Milliseconds of the sample; 0 if no step was computed.
    pub whole_ms: f64,
    pub steps: usize,
    /// Tokens of answers and prompts that these steps computed.
    pub tokens: u64,
    /// Milliseconds that the lanes show.
    pub lane_ms: f64,
    /// In rank order.
    pub ranks: Vec<StageTime>,
}

/// A rank's part of [`Stages`]; the four times add up to the whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageTime {
    /// Label for people: the layers that the rank holds.
    pub name: String,
    /// Whether it leads.
    pub leads: bool,
    /// Milliseconds in which it computed.
    pub compute_ms: f64,
    /// Milliseconds in which it exchanged values with ranks that were there.
    pub exchange_ms: f64,
    /// Milliseconds in which it waited for other ranks.
    pub wait_ms: f64,
    /// All others: the leader samples tokens and plans steps, or the rank is idle.
    pub other_ms: f64,
    /// The last steps in equal cells, each with the letter of its main activity: `c` compute, `x`
    /// exchange, `w` wait, `-` others. Empty if no step was computed.
    pub lane: String,
}

impl Stages {
    /// Samples an instance. Blocks for one to eight seconds, depending on its step times, plus the
    /// ranks' reports.
    ///
    /// # Errors
    /// Another trace of it is running, or a rank returned no trace.
    pub fn look(instance: &Instance) -> Result<Self, Error> {
        let wanted = instance.measured().map_or(0.0, |tok_s| LOOK_STEPS / tok_s);
        let time = Duration::try_from_secs_f64(wanted).unwrap_or(LOOK_MAX);
        let recording = Recording::watch(instance, time.clamp(LOOK_MIN, LOOK_MAX))?;
        Ok(Timeline::new(&recording).stages())
    }
}

/// Start and end of the whole steps that a leader recorded.
pub(super) fn stretch(leader: &RankTrace) -> AnswerTimes {
    let whole = || {
        let all = leader.spans.iter();
        all.filter(|span| {
            matches!(
                span.kind,
                Kind::Schedule | Kind::Step | Kind::Choose | Kind::Between
            )
        })
    };
    let begin = whole().map(|span| span.begin_ns).min().unwrap_or(0);
    let end = whole().map(|span| span.end_ns).max().unwrap_or(begin);
    AnswerTimes {
        asked_unix_ns: leader.start_unix_ns + begin,
        first_unix_ns: leader.start_unix_ns + end,
        ended_unix_ns: leader.start_unix_ns + end,
    }
}

impl Timeline {
    /// The parts of each rank's time, and its last steps cell by cell.
    pub fn stages(&self) -> Stages {
        let leader = self.ranks.iter().find(|rank| rank.leads);
        let spans = leader.map_or(&[][..], |rank| &rank.spans[..]);
        let steps: Vec<_> = spans.iter().filter(|it| it.kind == Kind::Step).collect();
        let ends: Vec<i64> = steps.iter().map(|step| step.end).collect();
        let last = last_steps(&ends);
        let ranks = self.ranks.iter().zip(self.parts());
        Stages {
            split: self.split.clone(),
            whole_ms: ms(self.whole),
            steps: steps.len(),
            tokens: steps.iter().map(|step| u64::from(step.n)).sum(),
            lane_ms: ms(last.1 - last.0),
            ranks: ranks.map(|(rank, parts)| rank.stage(parts, last)).collect(),
        }
    }
}

fn last_steps(ends: &[i64]) -> Interval {
    let to = ends.last().copied().unwrap_or(0);
    let before = ends.len().checked_sub(1 + LANE_STEPS);
    (before.map_or(0, |at| ends[at]), to)
}

impl RankLine {
    fn stage(&self, parts: TimeBreakdown, last: Interval) -> StageTime {
        let others = parts.choose_ns + parts.plan_ns + parts.way_ns + parts.rest_ns;
        StageTime {
            name: self.name.clone(),
            leads: self.leads,
            compute_ms: ms(parts.compute_ns),
            exchange_ms: ms(parts.exchange_ns),
            wait_ms: ms(parts.wait_ns),
            other_ms: ms(others),
            lane: self.shares.lane(last),
        }
    }
}

impl Shares {
    /// The main activity in each cell of `within`.
    fn lane(&self, within: Interval) -> String {
        let (from, to) = within;
        if from >= to {
            return String::new();
        }
        let all = Moments::new([within]);
        let parts = [
            ('c', self.compute.and(&all)),
            ('x', self.exchange.and(&all)),
            ('w', self.wait.and(&all)),
        ];
        let edge = |at: i64| from + (to - from) * at / LANE_PIECES;
        let pieces = (0..LANE_PIECES).map(|at| most(&parts, (edge(at), edge(at + 1))));
        pieces.collect()
    }
}

/// The letter of the part that takes most of a cell.
fn most(parts: &[(char, Moments); 3], piece: Interval) -> char {
    let own = Moments::new([piece]);
    let mut found = ('-', piece.1 - piece.0);
    let known = parts
        .each_ref()
        .map(|(letter, of)| (*letter, of.and(&own).total()));
    found.1 -= known.iter().map(|(_, ns)| ns).sum::<i64>();
    for part in known {
        if part.1 > found.1 {
            found = part;
        }
    }
    found.0
}

fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::super::{Aligned, shares};
    use super::*;

    fn span(kind: Kind, n: u32, begin: i64, end: i64) -> Aligned {
        Aligned {
            kind,
            lane: 0,
            step: 1,
            n,
            begin,
            end,
            met: begin,
        }
    }

    /// A leader that receives a value in the last third of each of `steps` steps of 30 ms.
    fn timeline(steps: i64) -> Timeline {
        const STEP: i64 = 30_000_000;
        let of = |at: i64| {
            let begin = at * STEP;
            let step = span(Kind::Step, 3, begin, begin + STEP);
            let receive = span(Kind::Receive, 0, begin + 2 * STEP / 3, begin + STEP);
            [step, receive]
        };
        let spans: Vec<Aligned> = (0..steps).flat_map(of).collect();
        let whole = steps * STEP;
        let line = RankLine {
            name: "layers 0-3".into(),
            leads: true,
            shares: shares(&spans, whole, true),
            moved_ns: 0,
            dropped: 0,
            spans,
        };
        Timeline {
            ranks: vec![line],
            first: whole,
            whole,
            split: "pipeline".into(),
        }
    }

    #[test]
    fn times_add_up_and_lanes_show_the_last_steps() {
        let told = timeline(5).stages();
        assert_eq!((told.steps, told.tokens, told.whole_ms), (5, 15, 150.0));
        assert_eq!(told.lane_ms, 60.0);
        let rank = &told.ranks[0];
        assert_eq!((rank.compute_ms, rank.exchange_ms), (100.0, 50.0));
        assert_eq!((rank.wait_ms, rank.other_ms), (0.0, 0.0));
        let step = format!("{}{}", "c".repeat(40), "x".repeat(20));
        assert_eq!(rank.lane, step.repeat(2));
    }

    #[test]
    fn fewer_steps_than_a_lane_shows_and_none_at_all() {
        let told = timeline(1).stages();
        assert_eq!((told.steps, told.lane_ms), (1, 30.0));
        assert_eq!(told.ranks[0].lane.len(), 120);
        let told = timeline(0).stages();
        assert_eq!((told.steps, told.whole_ms, told.lane_ms), (0, 0.0, 0.0));
        assert_eq!(told.ranks[0].lane, "");
    }

    #[test]
    fn what_no_part_has_is_a_dash() {
        let parts = [
            ('c', Moments::new([(0, 4)])),
            ('x', Moments::new([(4, 5)])),
            ('w', Moments::default()),
        ];
        assert_eq!(most(&parts, (0, 6)), 'c');
        assert_eq!(most(&parts, (3, 9)), '-');
        assert_eq!(most(&parts, (4, 6)), '-', "a tie");
        assert_eq!(most(&parts, (20, 30)), '-');
    }

    /// The steps in progress at the start and the end of the sample are not whole.
    #[test]
    fn a_stretch_has_whole_steps_only() {
        let spans = [
            (Kind::Sum, 5, 9),
            (Kind::Choose, 10, 12),
            (Kind::Between, 12, 13),
            (Kind::Schedule, 13, 14),
            (Kind::Plan, 14, 15),
            (Kind::Step, 14, 40),
            (Kind::Plan, 44, 45),
            (Kind::Sum, 46, 49),
        ];
        let of = |(kind, begin_ns, end_ns)| paceline_model::trace::TraceSpan {
            kind,
            lane: 0,
            step: 1,
            n: 1,
            begin_ns,
            end_ns,
        };
        let leader = RankTrace {
            start_unix_ns: 1000,
            spans: spans.map(of).to_vec(),
            dropped: 0,
        };
        let times = stretch(&leader);
        assert_eq!((times.asked_unix_ns, times.ended_unix_ns), (1010, 1040));
        let times = stretch(&RankTrace::default());
        assert_eq!((times.asked_unix_ns, times.ended_unix_ns), (0, 0));
    }
}
