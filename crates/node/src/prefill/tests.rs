//! Disaggregated prefill: each request reaches the decode ranks exactly once, under any loss.

use std::collections::BTreeSet;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

const NOTHING: [PrefillAction; 0] = [];

fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Two decode ranks and one prefill rank, connected at time 0.
fn up() -> PrefillScheduler {
    let mut apart = PrefillScheduler::new(PrefillOffload::predicted(Some(100.0), Some(200.0)));
    let zero = Duration::ZERO;
    assert_eq!(apart.step(zero, Event::DecodeReady(2)), NOTHING);
    assert_eq!(
        apart.step(zero, Event::PrefillReady(1)),
        [PrefillAction::Listen(1)]
    );
    for (rank, port) in [(0, 5), (1, 6)] {
        let actions = apart.step(
            zero,
            Event::Receives {
                rank: Rank(rank),
                round: 1,
                addrs: vec![addr(port)],
            },
        );
        let addrs = vec![vec![addr(5), addr(6)]];
        let connect = PrefillAction::Connect { round: 1, addrs };
        assert_eq!(actions.contains(&connect), rank == 1);
    }
    let joined = Event::HandsOver {
        rank: Rank(0),
        round: 1,
    };
    assert_eq!(
        apart.step(zero, joined),
        [PrefillAction::Tell(PrefillUpdate::Up)]
    );
    assert!(apart.is_up());
    apart
}

const fn submit(ticket: u64, tokens: u32) -> Event {
    Event::Prompt {
        ticket: Ticket(ticket),
        tokens,
    }
}

const fn arrived(ticket: u64, rank: u32) -> Event {
    Event::Arrived(Ticket(ticket), Rank(rank))
}

#[test]
fn what_is_read_sooner_here_is_read_here() {
    let mut apart = up();
    let went: Vec<bool> = (1..6)
        .map(|i| {
            !apart
                .step(SECOND, submit(i, 1000))
                .contains(&PrefillAction::Go(Ticket(i)))
        })
        .collect();
    // The second prompt queues behind the first and still costs no more there than here; the third
    // does.
    assert_eq!(went, [true, true, false, false, false]);
}

#[test]
fn pages_that_do_not_come_are_not_waited_for() {
    let mut apart = up();
    apart.step(SECOND, submit(1, 1000));
    assert_eq!(apart.due(), Some(SECOND + 30 * SECOND), "4 x 5 s and 10 s");
    apart.step(2 * SECOND, Event::Read(Ticket(1), Ok(())));
    apart.step(2 * SECOND, arrived(1, 1));
    let due = apart.due().unwrap();
    assert_eq!(due, 2 * SECOND + HAND_LIMIT);
    let late = apart.step(due, Event::Tick);
    assert!(late.contains(&PrefillAction::Go(Ticket(1))), "{late:?}");
    assert_eq!(apart.counts().fell_back, 1);
    let next = apart.step(due, submit(2, 1000));
    assert_eq!(
        next,
        [PrefillAction::Go(Ticket(2))],
        "90.9 tok/s there, 100 here"
    );
}

#[test]
fn a_prompt_that_is_refused_is_read_here() {
    let mut apart = up();
    let refused = Event::Read(Ticket(2), Err(RequestFailure::Busy { waiting: 1 }));
    apart.step(SECOND, submit(2, 1000));
    assert_eq!(
        apart.step(SECOND, refused),
        [
            PrefillAction::Stop(Ticket(2)),
            PrefillAction::Go(Ticket(2)),
            PrefillAction::Tell(PrefillUpdate::Late {
                reason: RequestFailure::Busy { waiting: 1 }.to_string()
            })
        ]
    );
    assert_eq!(apart.counts().fell_back, 1);
}

/// Random events in any order: each request is submitted once or forgotten, and every wait has a
/// deadline.
#[expect(
    clippy::too_many_lines,
    reason = "one world, its events and what must hold of each"
)]
#[test]
fn every_request_goes_on_once() {
    for seed in 1..2000_u64 {
        let mut random = seed;
        let mut below = |n: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(seed);
            (random >> 33) % n
        };
        let mut apart = up();
        let (mut now, mut last, mut open) = (SECOND, 0, BTreeSet::new());
        let mut rounds = 1;
        for _ in 0..200 {
            now += Duration::from_millis(below(2000));
            let any = Ticket(1 + below(last + 1));
            let event = match below(12) {
                0..=3 => {
                    last += 1;
                    open.insert(Ticket(last));
                    submit(last, 200 + below(2000) as u32)
                }
                4 => Event::Cancel(any),
                5 => Event::Read(
                    any,
                    if below(3) == 0 {
                        Err(RequestFailure::Busy { waiting: 1 })
                    } else {
                        Ok(())
                    },
                ),
                6 | 7 => Event::Arrived(any, Rank(below(3) as u32)),
                8 => match below(4) {
                    0 => Event::DecodeLost,
                    1 => Event::PrefillLost(String::new()),
                    2 => Event::DecodeReady(2),
                    _ => Event::PrefillReady(1),
                },
                9 => Event::Receives {
                    rank: Rank(below(3) as u32),
                    round: rounds,
                    addrs: vec![addr(1); 1 + below(8) as usize / 7],
                },
                10 => Event::HandsOver {
                    rank: Rank(0),
                    round: rounds,
                },
                _ => Event::Tick,
            };
            for action in apart.step(now, event) {
                match action {
                    PrefillAction::Go(ticket) | PrefillAction::Forget(ticket) => {
                        assert!(open.remove(&ticket), "seed {seed}: {ticket:?} twice");
                    }
                    PrefillAction::Listen(round) => rounds = round,
                    _ => {}
                }
            }
            assert_eq!(apart.held(), open.len(), "seed {seed}");
            assert!(apart.held() <= UNDER_WAY_MAX + WAITING_MAX);
        }
        while let Some(due) = apart.due() {
            if open.is_empty() {
                break;
            }
            now = now.max(due);
            for action in apart.step(now, Event::Tick) {
                if let PrefillAction::Go(ticket) = action {
                    assert!(open.remove(&ticket), "seed {seed}");
                }
            }
        }
        assert!(open.is_empty(), "seed {seed}: {open:?}");
    }
}
