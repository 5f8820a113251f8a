//! Death, silence, disagreement and bad arguments: every rank gets an error that names the culprit,
//! in time.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_base::testing::Stopwatch;

use super::steps::{CollectiveCase, LONG};
use super::{AT_ONCE, Case, CaseContext, patient};
use crate::{Call, Deadline, Error, Group, Kind, MESSAGES_HELD, Reduce};

pub(super) const CASES: &[Case] = &[
    ("a rank leaves before each call", 2, rank_leaves),
    ("a rank panics before each call", 2, rank_panics),
    (
        "a rank leaves while another waits for messages",
        2,
        rank_leaves_messages,
    ),
    ("one rank makes another call", 2, another_call),
    ("one rank swaps two calls", 2, swapped_calls),
    ("one rank skips a call before one alike", 2, skipped_call),
    ("one rank skips a turn of a loop", 2, skipped_turn),
    ("a message of another length or type", 2, another_message),
    ("one rank never calls", 2, one_rank_is_silent),
    ("nobody sends, nobody receives", 2, message_deadlines),
    ("lengths that do not fit", 1, bad_lengths),
    ("ranks that do not exist", 1, bad_ranks),
];

type GroupCall = fn(&dyn Group, Deadline) -> Result<(), Error>;

/// Short enough to wait for in tests. Longer than one of eight ranks waits for one of two cores
/// that other tests use too. A rank that is late itself would be blamed.
fn soon() -> Deadline {
    Deadline::at(Instant::now() + Duration::from_millis(250))
}

/// A late rank makes the call that the others made and abandoned. It has received all of their
/// data, and may succeed if that arrives before their failure notice. Any other call must fail, and
/// so must the next.
fn come_late(group: &dyn Group, step: &CollectiveCase) {
    let barrier = at_once(|by| group.barrier(by));
    let same = matches!(step, CollectiveCase::Barrier);
    assert!(same || barrier.is_err(), "a barrier met {step:?}");
}

/// Runs `work` with a distant deadline and checks that it returns within [`AT_ONCE`].
fn at_once<R>(work: impl FnOnce(Deadline) -> R) -> R {
    let started = Stopwatch::start();
    let result = work(patient());
    let elapsed = started.elapsed();
    assert!(elapsed < AT_ONCE, "waited {elapsed:?} for an error");
    result
}

/// Checks that every kind of call fails at once with an error that `expected` accepts.
fn check_poisoned(group: &dyn Group, expected: impl Fn(Error) -> bool) {
    for step in CollectiveCase::each(group.size()) {
        let error = at_once(|by| step.run(group, 0, by)).expect_err("the group is poisoned");
        assert!(expected(error), "{step:?} on a poisoned group: {error}");
    }
    if group.size() > 1 {
        let peer = Rank((group.rank().0 + 1) % group.size());
        let sent = at_once(|by| group.send(&[0_u8], peer, 77, by));
        let received = at_once(|by| group.recv(&mut [0_u8], peer, 77, by));
        for error in [sent, received].map(|result| result.expect_err("the group is poisoned")) {
            assert!(expected(error), "message on a poisoned group: {error}");
        }
    }
}

fn all_equal<T: PartialEq + Debug>(values: &[T]) -> &T {
    assert!(
        values.iter().all(|value| *value == values[0]),
        "ranks disagree: {values:?}"
    );
    &values[0]
}

/// `victim` makes `collectives` calls and then runs `die` with its handle; the others must notice.
fn check_death(lab: &CaseContext<'_>, victim: Rank, calls: usize, die: fn(Box<dyn Group>)) {
    let steps = CollectiveCase::each(lab.size);
    lab.on_each(move |group| {
        if group.rank() == victim {
            for step in &steps[..calls] {
                step.run(&*group, 0, patient()).expect("all ranks live");
            }
            die(group);
            return;
        }
        for (i, step) in steps.iter().enumerate() {
            let result = at_once(|by| step.run(&*group, 0, by));
            match result {
                Ok(()) => assert!(i < calls, "{step:?} succeeded without {victim}"),
                Err(Error::PeerLost { rank, call }) => {
                    assert_eq!((rank, call.sequence), (victim, i as u64 + 1), "{step:?}");
                    assert_eq!(i, calls, "{victim} left after {calls} calls");
                    break;
                }
                Err(error) => panic!("{step:?}: {error}"),
            }
        }
        check_poisoned(
            &*group,
            |e| matches!(e, Error::PeerLost { rank, .. } if rank == victim),
        );
    });
}

fn rank_leaves(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    for calls in 0..CollectiveCase::each(lab.size).len() {
        for victim in [Rank(0), random.rank(lab.size)] {
            check_death(lab, victim, calls, drop);
        }
    }
}

fn rank_panics(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    for calls in 0..CollectiveCase::each(lab.size).len() {
        check_death(lab, random.rank(lab.size), calls, |group| {
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                let _group = group;
                // Unwinds as a panic does, without a message on the test's output.
                resume_unwind(Box::new("a rank dies"));
            }));
            assert!(unwound.is_err());
        });
    }
}

/// Rank 0 waits for a message that never arrives, or for credits that never return, while the last
/// rank leaves.
fn rank_leaves_messages(lab: &CaseContext<'_>) {
    let last = Rank(lab.size - 1);
    let receive: fn(&dyn Group, Rank, Deadline) -> Result<(), Error> =
        |group, last, by| group.recv(&mut [0_u8], last, 2, by);
    let send: fn(&dyn Group, Rank, Deadline) -> Result<(), Error> =
        |group, last, by| (0..=MESSAGES_HELD).try_for_each(|_| group.send(&[0_u8], last, 2, by));
    for wait in [receive, send] {
        lab.on_each(move |group| {
            if group.rank() == last {
                group
                    .recv(&mut [0_u8], Rank(0), 1, patient())
                    .expect("the sender lives");
                // Most likely rank 0 sleeps by then; if not, it must notice all the same. (Yields
                // took seconds, as each may cost a time slice of a busy machine.)
                std::thread::sleep(Duration::from_millis(2));
                return;
            }
            let result = if group.rank() == Rank(0) {
                group
                    .send(&[0_u8], last, 1, patient())
                    .expect("the receiver lives");
                at_once(|by| wait(&*group, last, by))
            } else {
                at_once(|by| group.barrier(by))
            };
            let error = result.expect_err("a rank left");
            assert!(
                matches!(error, Error::PeerLost { rank, .. } if rank == last),
                "{error}"
            );
        });
    }
}

/// Calls that one rank may mistake for each other: the call of most ranks, the call of one.
const MISTAKES: &[(GroupCall, GroupCall)] = &[
    (
        |g, by| g.barrier(by),
        |g, by| g.all_reduce(&mut [1.0_f32], Reduce::Sum, by),
    ),
    (
        |g, by| g.all_reduce(&mut [1_u8; 4], Reduce::Sum, by),
        |g, by| g.all_reduce(&mut [1.0_f32; 4], Reduce::Sum, by),
    ),
    (
        |g, by| g.all_reduce(&mut [1.0_f32; 4], Reduce::Sum, by),
        |g, by| g.all_reduce(&mut [1.0_f32; 5], Reduce::Sum, by),
    ),
    (
        |g, by| g.all_reduce(&mut vec![1.0_f32; LONG], Reduce::Sum, by),
        |g, by| g.all_reduce(&mut [1.0_f32], Reduce::Sum, by),
    ),
    (
        |g, by| g.all_reduce(&mut [1.0_f32; 4], Reduce::Min, by),
        |g, by| g.all_reduce(&mut [1.0_f32; 4], Reduce::Max, by),
    ),
    (
        |g, by| g.broadcast(&mut [1.0_f32; 4], Rank(0), by),
        |g, by| g.broadcast(&mut [1.0_f32; 4], Rank(1), by),
    ),
    (|g, by| gather(g, 2, by), |g, by| gather(g, 3, by)),
    (
        |g, by| staircase(g, false, by),
        |g, by| staircase(g, true, by),
    ),
];

fn gather(group: &dyn Group, length: usize, by: Deadline) -> Result<(), Error> {
    let mut output = vec![0_u8; length * group.size() as usize];
    group.all_gather(&vec![0_u8; length], &mut output, by)
}

/// A gather of counts 0, 1, 2, ... or of the same counts in reverse.
fn staircase(group: &dyn Group, down: bool, by: Deadline) -> Result<(), Error> {
    let mut counts: Vec<usize> = (0..group.size() as usize).collect();
    if down {
        counts.reverse();
    }
    let input = vec![0.0_f32; counts[group.rank().0 as usize]];
    group.all_gather_v(&input, &mut vec![0.0; counts.iter().sum()], &counts, by)
}

fn another_call(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    for (usual, odd) in MISTAKES {
        let odd_one = random.rank(lab.size);
        let errors = lab.on_each(move |group| {
            group.barrier(patient()).expect("all ranks agree so far");
            let work = if group.rank() == odd_one { odd } else { usual };
            let error = at_once(|by| work(&*group, by)).expect_err("the ranks disagree");
            check_poisoned(&*group, |later| later == error);
            error
        });
        check_mismatch(*all_equal(&errors), odd_one, lab.size);
    }
}

fn check_mismatch(error: Error, odd_one: Rank, size: u32) {
    // With two ranks the culprit is undecidable: the first counts as right.
    let named = if size == 2 { Rank(1) } else { odd_one };
    let Error::Mismatch {
        rank,
        expected,
        got,
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(rank, named, "{error}");
    assert_ne!(expected, got);
    assert_eq!((expected.sequence, got.sequence), (2, 2), "{error}");
}

fn swapped_calls(lab: &CaseContext<'_>) {
    let odd_one = lab.random().rank(lab.size);
    let errors = lab.on_each(move |group| {
        let reduce = || group.all_reduce(&mut [1.0_f32; 3], Reduce::Sum, patient());
        let barrier = || group.barrier(patient());
        barrier().expect("all ranks agree so far");
        let (first, second) = if group.rank() == odd_one {
            (at_once(|_| barrier()), at_once(|_| reduce()))
        } else {
            (at_once(|_| reduce()), at_once(|_| barrier()))
        };
        assert_eq!(first, second, "the first cause is reported again");
        first.expect_err("the ranks disagree")
    });
    check_mismatch(*all_equal(&errors), odd_one, lab.size);
}

/// A rank omits a call that is followed by one of the same kind, type and length.
fn skipped_call(lab: &CaseContext<'_>) {
    type Skip = fn(&dyn Group, bool) -> Result<(), Error>;
    let skips: [Skip; 2] = [
        |group, skips| {
            if !skips {
                group.all_reduce(&mut [1.0_f32; 3], Reduce::Sum, patient())?;
            }
            group.all_reduce(&mut [2.0_f32; 3], Reduce::Sum, patient())
        },
        |group, skips| {
            if !skips {
                gather_here(group)?;
            }
            gather_here(group)
        },
    ];
    for skip in skips {
        let odd_one = lab.random().rank(lab.size);
        let errors = lab.on_each(move |group| {
            group.barrier(patient()).expect("all ranks agree so far");
            let error = at_once(|_| skip(&*group, group.rank() == odd_one));
            error.expect_err("a rank skipped a call")
        });
        check_mismatch(*all_equal(&errors), odd_one, lab.size);
    }
}

#[track_caller]
fn gather_here(group: &dyn Group) -> Result<(), Error> {
    let mut all = vec![0_u8; 4 * group.size() as usize];
    group.all_gather(&[1_u8; 4], &mut all, patient())
}

/// A rank omits an iteration of a loop. It is named in that iteration if iterations are marked,
/// else at the first call that differs.
fn skipped_turn(lab: &CaseContext<'_>) {
    for marks in [false, true] {
        let odd_one = lab.random().rank(lab.size);
        let errors = lab.on_each(move |group| {
            let turns = |turn: u64| {
                group.mark(if marks { turn } else { 0 });
                match (group.rank() == odd_one, turn) {
                    (true, 3) => Ok(()),
                    _ => group.all_reduce(&mut [1_u32; 5], Reduce::Sum, patient()),
                }
            };
            at_once(|_| {
                (1..=6)
                    .try_for_each(turns)
                    .and_then(|()| group.barrier(patient()))
            })
            .expect_err("a rank skipped a turn")
        });
        let error = *all_equal(&errors);
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let expected = if marks { 3 } else { 6 };
        assert_eq!(error.call().sequence, expected, "{error}");
    }
}

fn another_message(lab: &CaseContext<'_>) {
    let receives: [GroupCall; 2] = [
        |g, by| g.recv(&mut [0.0_f32; 3], Rank(0), 4, by),
        |g, by| g.recv(&mut [0_u8; 2], Rank(0), 4, by),
    ];
    for receive in receives {
        let errors = lab.on_each(move |group| match group.rank() {
            Rank(0) => {
                group
                    .send(&[0.0_f32; 2], Rank(1), 4, patient())
                    .expect("the receiver lives");
                at_once(|by| group.barrier(by)).expect_err("the receiver expected another message")
            }
            Rank(1) => at_once(|by| receive(&*group, by)).expect_err("the messages differ"),
            _ => at_once(|by| group.barrier(by)).expect_err("the receiver poisons the group"),
        });
        let error = *all_equal(&errors);
        let Error::Mismatch {
            rank,
            expected,
            got,
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(rank, Rank(0));
        assert_eq!(
            expected.kind,
            Kind::Recv {
                from: Rank(0),
                tag: 4
            }
        );
        assert_eq!(
            (got.kind, got.length),
            (
                Kind::Send {
                    to: Rank(1),
                    tag: 4
                },
                2
            )
        );
    }
}

fn one_rank_is_silent(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    for step in CollectiveCase::each(lab.size) {
        let (silent, meet) = (random.rank(lab.size), Barrier::new(lab.size as usize));
        let errors = lab.on_each(move |group| {
            let named = |e| matches!(e, Error::Timeout { rank, .. } if rank == silent);
            meet.wait();
            if group.rank() == silent {
                meet.wait();
                come_late(&*group, &step);
                check_poisoned(&*group, named);
                return None;
            }
            let error = step
                .run(&*group, 0, soon())
                .expect_err("one rank is silent");
            assert!(named(error), "{step:?}: {error}");
            meet.wait();
            check_poisoned(&*group, |later| later == error);
            Some(error)
        });
        all_equal(&errors.into_iter().flatten().collect::<Vec<_>>());
    }
}

fn message_deadlines(lab: &CaseContext<'_>) {
    let full: GroupCall =
        |group, by| (0..=MESSAGES_HELD).try_for_each(|_| group.send(&[1_u8], Rank(1), 0, by));
    let empty: GroupCall = |group, by| group.recv(&mut [1_u8], Rank(1), 0, by);
    let other_tag: GroupCall = |group, by| group.recv(&mut [1_u8], Rank(1), 1, by);
    for wait in [full, empty, other_tag] {
        let meet = Barrier::new(lab.size as usize);
        lab.on_each(move |group| {
            let named = |e| matches!(e, Error::Timeout { rank: Rank(1), call } if is_message(call));
            if group.rank() == Rank(0) {
                meet.wait();
                let error = wait(&*group, soon()).expect_err("nobody is on the other side");
                assert!(named(error), "{error}");
            } else {
                if group.rank() == Rank(1) {
                    group
                        .send(&[1_u8], Rank(0), 2, patient())
                        .expect("there is room");
                }
                meet.wait();
                let error = at_once(|by| group.barrier(by)).expect_err("the group is poisoned");
                assert!(named(error), "{error}");
            }
            check_poisoned(&*group, named);
        });
    }
}

fn is_message(call: Call) -> bool {
    matches!(call.kind, Kind::Send { .. } | Kind::Recv { .. })
}

fn bad_lengths(lab: &CaseContext<'_>) {
    let bad: [GroupCall; 3] = [
        |g, by| g.all_gather_v(&[0.0_f32], &mut [], &vec![0; g.size() as usize], by),
        |g, by| g.all_gather_v(&[], &mut [0.0_f32], &vec![0; g.size() as usize], by),
        |g, by| g.all_gather_v::<f32>(&[], &mut [], &vec![0; g.size() as usize + 1], by),
    ];
    for work in bad {
        check_argument(lab, work, |error| match error {
            Error::Length { rank, .. } => Some(rank),
            _ => None,
        });
    }
}

fn bad_ranks(lab: &CaseContext<'_>) {
    let bad: [GroupCall; 4] = [
        |g, by| g.broadcast(&mut [0.0_f32], Rank(g.size()), by),
        |g, by| g.send(&[0.0_f32], Rank(g.size()), 0, by),
        |g, by| g.send(&[0.0_f32], g.rank(), 0, by),
        |g, by| g.recv(&mut [0.0_f32], g.rank(), 0, by),
    ];
    for work in bad {
        check_argument(lab, work, |error| match error {
            Error::NoSuchRank { rank, .. } => Some(rank),
            _ => None,
        });
    }
}

/// A rank makes a call with bad arguments; all ranks learn which rank that was.
fn check_argument(lab: &CaseContext<'_>, work: GroupCall, blamed: fn(Error) -> Option<Rank>) {
    let odd_one = lab.random().rank(lab.size);
    let errors = lab.on_each(move |group| {
        let own = group.rank() == odd_one;
        let result = at_once(|by| {
            if own {
                work(&*group, by)
            } else {
                group.barrier(by)
            }
        });
        let error = result.expect_err("one rank had bad arguments");
        check_poisoned(&*group, |later| later == error);
        error
    });
    assert_eq!(blamed(*all_equal(&errors)), Some(odd_one));
}
