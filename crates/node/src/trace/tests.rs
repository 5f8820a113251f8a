//! Timelines of constructed traces, whose parts can be computed by hand.

use super::*;

const fn span(kind: Kind, step: u64, n: u32, begin_ns: u64, end_ns: u64) -> TraceSpan {
    TraceSpan {
        kind,
        lane: 0,
        step,
        n,
        begin_ns,
        end_ns,
    }
}

fn trace(start_unix_ns: u64, spans: Vec<TraceSpan>) -> RankTrace {
    RankTrace {
        start_unix_ns,
        spans,
        dropped: 0,
    }
}

/// A step of the leader and of a follower that is late for the sum.
fn two() -> Vec<Vec<Aligned>> {
    let leader = trace(
        1000,
        vec![
            span(Kind::Schedule, 0, 1, 0, 10),
            span(Kind::Plan, 1, 0, 10, 20),
            span(Kind::Sum, 1, 0, 50, 90),
            span(Kind::Step, 1, 4, 10, 120),
            span(Kind::Choose, 1, 1, 120, 150),
            span(Kind::Between, 1, 0, 150, 160),
        ],
    );
    let follower = trace(
        1000,
        vec![
            span(Kind::Plan, 1, 0, 5, 25),
            span(Kind::Sum, 1, 0, 80, 95),
            span(Kind::Step, 1, 0, 25, 110),
        ],
    );
    [leader, follower].iter().map(|t| aligned(t, 0)).collect()
}

#[test]
fn ranks_wait_until_the_last_one_is_there() {
    let mut ranks = two();
    assert_eq!(align(&mut ranks, 0), [0, 0]);
    meet(&mut ranks, &[0..2, 0..2], 0);
    let leader = shares(&ranks[0], 200, true).within(&Moments::new([(0, 200)]), 200);
    let expected = TimeBreakdown {
        compute_ns: 30 + 30,
        exchange_ns: 10 + 10,
        wait_ns: 30,
        choose_ns: 30,
        plan_ns: 20,
        way_ns: 40,
        rest_ns: 0,
        hidden_ns: 0,
    };
    assert_eq!(leader, expected);
    let follower = shares(&ranks[1], 200, false).within(&Moments::new([(0, 200)]), 200);
    let expected = TimeBreakdown {
        compute_ns: 55 + 15,
        exchange_ns: 15 + 15,
        // For the first plan, twice, and for the next one.
        wait_ns: 5 + 5 + 90,
        ..TimeBreakdown::default()
    };
    assert_eq!(follower, expected);
}

/// A skewed clock is shifted no farther than the order of messages requires.
#[test]
fn clocks_are_moved_as_far_as_messages_tell() {
    for (off, expected) in [(0, 0), (-300, 285), (300, -260), (4, 0)] {
        let mut ranks = two();
        for span in &mut ranks[1] {
            (span.begin, span.end) = (span.begin + off, span.end + off);
        }
        let moved = align(&mut ranks, 0)[1];
        assert_eq!(moved, expected, "{off}");
        let plan = ranks[1].iter().find(|span| span.kind == Kind::Plan);
        assert!(plan.unwrap().end >= 10, "a plan before it was sent");
    }
}

/// One of two halves exchanges while the other computes.
#[test]
fn exchanges_behind_computing_are_hidden() {
    let half = |lane, kind, n, begin_ns, end_ns| TraceSpan {
        lane,
        ..span(kind, 1, n, begin_ns, end_ns)
    };
    let spans = vec![
        half(0, Kind::Half, 9, 0, 90),
        half(0, Kind::Turn, 3, 20, 60),
        half(0, Kind::Sum, 3, 20, 50),
        half(1, Kind::Half, 9, 20, 80),
        half(1, Kind::Turn, 3, 40, 80),
        half(1, Kind::Sum, 3, 50, 70),
        span(Kind::Step, 1, 18, 0, 100),
    ];
    let spans = aligned(&trace(0, spans), 0);
    let parts = shares(&spans, 100, true).within(&Moments::new([(0, 100)]), 100);
    // 0-20 and 60-90 on one thread, 20-40 on the other; behind the halves the step has 10 more.
    assert_eq!(parts.compute_ns, 20 + 30 + 20 + 10);
    assert_eq!(parts.hidden_ns, 20 + 10);
    // 40-50 of the first sum and 50-60 of the second are not overlapped; nothing is left.
    assert_eq!(parts.exchange_ns, 20);
    assert_eq!(parts.recorded_ns(), 100);
}

#[test]
fn residuals_come_from_the_same_place_in_the_stage_before() {
    let stages = [0..2, 0..2, 2..4, 2..4];
    let of = |rank| source(&stages, rank);
    assert_eq!([of(0), of(1), of(2), of(3)], [None, None, Some(0), Some(1)]);
}

#[test]
fn an_answer_without_spans_is_all_way() {
    let shares = shares(&[], 50, true);
    let parts = shares.within(&Moments::new([(0, 50)]), 50);
    assert_eq!((parts.way_ns, parts.rest_ns), (50, 0));
}
