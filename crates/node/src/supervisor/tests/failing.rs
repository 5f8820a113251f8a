//! A failing worker: waits, requests that crash it, and changes of the split.

use super::*;
use paceline_engine::Ticket;

/// An instance of one worker, to measure its waits after failures.
struct Failing {
    supervisor: Supervisor,
    now: Duration,
}

impl Failing {
    fn new(resume: bool) -> Self {
        Self::of(1, resume)
    }

    /// Whose numbers in another epoch are near, not the same.
    fn near() -> Self {
        let mut failing = Self::new(true);
        failing.supervisor.policy.near = true;
        failing
    }

    /// An instance with `ways` possible splits.
    fn of(ways: usize, resume: bool) -> Self {
        let policy = Policy {
            restart: true,
            resume,
            near: false,
            reads_near: false,
            held_max: 4,
            held_limit: HELD_LIMIT,
            holds: ways > 1,
            goes_on: false,
        };
        let way = SplitCandidate {
            name: "none".to_owned(),
            leader: Rank(0),
            tok_s: 1.0,
            key_s: 0.0,
            change: None,
        };
        let mut supervisor = Supervisor::new(vec![way; ways], 0, 1, policy).unwrap();
        supervisor.step(Duration::ZERO, Event::Begin);
        Self {
            supervisor,
            now: Duration::ZERO,
        }
    }

    fn step(&mut self, event: Event) -> Vec<Action> {
        self.supervisor.step(self.now, event)
    }

    fn said(&mut self, message: FromWorker) -> Vec<Action> {
        let rank = Rank(0);
        self.step(Event::Worker(CrewEvent::Message { rank, message }))
    }

    fn become_ready(&mut self) {
        self.said(FromWorker::Listening { addr: addr() });
        self.said(FromWorker::Ready(facts()));
    }

    fn ask(&mut self, ticket: Ticket) {
        self.step(submit(ticket, request(Ticket(4)), Vec::new()));
    }

    /// Kills the worker; returns the actions.
    fn fail(&mut self) -> Vec<Action> {
        let exited = CrewEvent::Exited {
            rank: Rank(0),
            ending: Ending::Signal(9),
            tail: Vec::new(),
        };
        self.step(Event::Worker(exited));
        self.now += SIGNS_WITHIN;
        let actions = self.step(Event::Tick);
        self.now += LONGEST_WAIT;
        self.step(Event::Tick);
        actions
    }
}

/// Waits after four failures, in ms, with an answer before the third.
fn waits(resume: bool) -> Vec<u128> {
    let mut failing = Failing::new(resume);
    let wait_after = |answered: bool| {
        failing.become_ready();
        if answered {
            failing.ask(Ticket(1));
            let reply = Reply::Finished {
                text: String::new(),
                reason: Finish::Length,
                drafts: paceline_engine::DraftCounts::default(),
            };
            let ticket = Ticket(1);
            failing.said(FromWorker::Reply {
                ticket,
                at_us: None,
                reply,
            });
        }
        let told = failing.fail().into_iter().find_map(|action| match action {
            Action::Tell(Notice::Failed { again_in, .. }) => again_in,
            _ => None,
        });
        told.unwrap().as_millis()
    };
    [false, false, true, false]
        .into_iter()
        .map(wait_after)
        .collect()
}

#[test]
fn the_first_wait_is_short_and_comes_back_after_an_answer() {
    assert_eq!(waits(false), [250, 500, 250, 500]);
    assert_eq!(waits(true), [0, 250, 0, 250]);
}

/// Whether one of these actions fails the first request.
fn loses(actions: &[Action]) -> bool {
    let lost = |action: &Action| {
        matches!(
            action,
            Action::Deliver(Ticket(1), Reply::Failed(RequestFailure::Lost { .. }))
        )
    };
    actions.iter().any(lost)
}

#[test]
fn a_request_that_ends_its_workers_is_given_up() {
    let mut failing = Failing::new(true);
    failing.become_ready();
    failing.ask(Ticket(1));
    for failures in 1..=FAILURES_MAX {
        assert_eq!(loses(&failing.fail()), failures == FAILURES_MAX);
        failing.become_ready();
    }
}

/// How many epochs begin until the first load has failed, where each fails by this event.
fn first_loads(event: impl Fn(u64) -> CrewEvent<FromWorker>) -> u64 {
    let mut failing = Failing::new(true);
    loop {
        let epoch = failing.supervisor.epoch();
        failing.step(Event::Worker(event(epoch)));
        failing.now += SIGNS_WITHIN;
        failing.step(Event::Tick);
        // It leaves the epoch, then waits for the next one.
        while failing.supervisor.epoch() == epoch {
            let Some(due) = failing.supervisor.due() else {
                return epoch;
            };
            failing.now = failing.now.max(due);
            failing.step(Event::Tick);
        }
    }
}

#[test]
fn a_first_load_outlives_losses_and_no_reason_of_its_own() {
    let rank = Rank(0);
    let exited = |ending| {
        first_loads(|_| CrewEvent::Exited {
            rank,
            ending,
            tail: Vec::new(),
        })
    };
    let said = |blamed| {
        first_loads(|epoch| CrewEvent::Message {
            rank,
            message: FromWorker::Failed {
                epoch,
                reason: "it broke".to_owned(),
                blamed,
                interrupted: false,
            },
        })
    };
    let most = u64::from(FIRST_LOSSES_MAX);
    assert_eq!(exited(Ending::Signal(9)), most);
    assert_eq!(said(Some(0)), most);
    assert_eq!((exited(Ending::Code(1)), said(None)), (1, 1));

    let mut failing = Failing::new(true);
    failing.fail();
    failing.become_ready();
    assert_eq!(failing.supervisor.health(), Health::Ready);
    assert!(failing.supervisor.epoch() == 2 && failing.supervisor.restarts() == 1);
}

/// Workers that end before they have a request do not count against it.
#[test]
fn a_request_waits_for_workers_that_cannot_start() {
    let mut failing = Failing::new(true);
    failing.become_ready();
    failing.ask(Ticket(1));
    let mut rounds = 0;
    let begun = failing.now;
    while !loses(&failing.fail()) {
        rounds += 1;
        assert!(failing.now - begun < HELD_LIMIT * 2, "it waits for ever");
    }
    assert!(failing.now - begun >= HELD_LIMIT);
    assert!(rounds >= 2, "{rounds}");
}

/// A device that interrupts a step has smaller ones in the next epoch. Its worker keeps its process
/// and weights, and the answer continues.
#[test]
fn an_interrupted_step_makes_later_steps_smaller() {
    let mut instance = Failing::near();
    instance.become_ready();
    instance.ask(Ticket(1));
    instance.said(FromWorker::Failed {
        epoch: 1,
        reason: "the system interrupted the GPU".to_owned(),
        blamed: None,
        interrupted: true,
    });
    instance.now += SIGNS_WITHIN;
    let actions = instance.step(Event::Tick);
    assert_eq!(actions[0], Action::ShrinkSteps);
    let Action::Tell(Notice::Failed {
        reason, again_in, ..
    }) = &actions[1]
    else {
        panic!("{actions:?}");
    };
    assert_eq!(reason, "rank 0: the system interrupted the GPU");
    assert_eq!(*again_in, Some(Duration::ZERO));
    assert_eq!(actions[2..], [Action::Leave(Rank(0))]);
    let (epoch, moved) = (1, RankTraffic::default());
    instance.said(FromWorker::Left { epoch, moved });
    let (rank, epoch, way) = (Rank(0), 2, 0);
    let assigned = instance.step(Event::Tick);
    assert_eq!(assigned, [Action::Assign { rank, epoch, way }]);
}

/// A move is one change of the split: open requests continue in the next epoch.
#[test]
fn a_better_way_is_moved_to_and_answers_go_on() {
    let mut instance = Failing::of(2, true);
    let to = 1;
    assert_eq!(instance.step(Event::Move { to, gain: 2.0 }), [], "loading");
    instance.become_ready();
    instance.ask(Ticket(1));
    let actions = instance.step(Event::Move { to, gain: 2.0 });
    assert_eq!(actions, [Action::Leave(Rank(0))]);
    assert_eq!(
        instance.step(Event::Move { to, gain: 2.0 }),
        [],
        "it is leaving"
    );
    let (epoch, moved) = (1, RankTraffic::default());
    let assigned = instance.said(FromWorker::Left { epoch, moved });
    let rank = Rank(0);
    let expected = Action::Assign {
        rank,
        epoch: 2,
        way: to,
    };
    assert_eq!(assigned, [expected]);
    instance.said(FromWorker::Listening { addr: addr() });
    let ready = instance.said(FromWorker::Ready(facts()));
    let is_told = |action: &Action| matches!(action, Action::Tell(Notice::Changed(_)));
    assert!(ready.iter().any(is_told), "{ready:?}");
    let goes_on = |action: &Action| {
        matches!(
            action,
            Action::Request {
                message: RequestMessage::Submit(Submission {
                    ticket: Ticket(1),
                    ..
                }),
                ..
            }
        )
    };
    assert!(ready.iter().any(goes_on), "{ready:?}");
    assert_eq!(
        (instance.supervisor.way(), instance.supervisor.changes()),
        (1, 1)
    );
}

/// Another split is predicted to give ten tokens a second. One that computes a token for three
/// seconds is left, where the numbers are near after the answer.
#[test]
fn a_slow_split_is_left_within_a_step_and_near_numbers_between_answers() {
    for near in [false, true] {
        let mut instance = Failing::of(2, true);
        (
            instance.supervisor.policy.holds,
            instance.supervisor.policy.near,
        ) = (false, near);
        instance.supervisor.candidates[1].tok_s = 10.0;
        instance.become_ready();
        instance.ask(Ticket(1));
        assert_eq!(instance.supervisor.due(), None);
        let said = |reply| FromWorker::Reply {
            ticket: Ticket(1),
            at_us: Some(1),
            reply,
        };
        instance.said(said(Reply::Token {
            token: 1,
            text: String::new(),
            logprobs: None,
        }));
        instance.now += Duration::from_secs(3);
        assert_eq!(instance.supervisor.due(), Some(instance.now));
        let leaves = |actions: &[Action]| actions.contains(&Action::Leave(Rank(0)));
        assert_eq!(leaves(&instance.step(Event::Tick)), !near);
        assert_eq!(instance.step(Event::Tick), [], "once");
        let finished = instance.said(said(Reply::Finished {
            text: String::new(),
            reason: Finish::Length,
            drafts: paceline_engine::DraftCounts::default(),
        }));
        assert_eq!(leaves(&finished), near);
    }
}

/// Tokens arrive in bursts: several of one step with accepted drafts, or delayed by a slow
/// connection. The measured speed is that of the steps, before and after a failure.
#[test]
fn the_measured_speed_is_that_of_steps_however_tokens_arrive() {
    let mut instance = Failing::new(true);
    instance.become_ready();
    instance.ask(Ticket(1));
    for _ in 0..2 {
        // Each leader has its own clock.
        for at_us in (1..=40).map(|step| step * 100_000) {
            instance.now += Duration::from_millis(100);
            for _ in 0..4 {
                instance.now += Duration::from_micros(1); // as fast as they can be received
                let reply = Reply::Token {
                    token: 1,
                    text: String::new(),
                    logprobs: None,
                };
                instance.said(FromWorker::Reply {
                    ticket: Ticket(1),
                    at_us: Some(at_us),
                    reply,
                });
            }
        }
        let measured = instance.supervisor.measured().unwrap();
        assert!((measured - 40.0).abs() < 0.1, "{measured} tokens/s");
        instance.fail();
        instance.become_ready();
    }
}

/// An answer that has begun is marked before its next token; one that has not is not.
#[test]
fn answers_that_continue_with_near_numbers_are_marked() {
    let mut failing = Failing::near();
    failing.become_ready();
    let tickets = [Ticket(1), Ticket(2)];
    tickets.iter().for_each(|ticket| failing.ask(*ticket));
    let reply = Reply::Token {
        token: 7,
        text: String::new(),
        logprobs: None,
    };
    failing.said(FromWorker::Reply {
        ticket: tickets[0],
        at_us: None,
        reply,
    });
    for times in 1..3 {
        failing.fail();
        failing.said(FromWorker::Listening { addr: addr() });
        let actions = failing.said(FromWorker::Ready(facts()));
        let marked = actions.iter().filter_map(|action| match action {
            Action::Deliver(ticket, Reply::Continued) => Some(*ticket),
            _ => None,
        });
        assert_eq!(marked.collect::<Vec<_>>(), tickets[..1]);
        let notice = Action::Tell(Notice::Continued { answers: 1 });
        assert!(actions.contains(&notice), "{actions:?}");
        let tokens = actions.iter().filter_map(|action| match action {
            Action::Request {
                message: RequestMessage::Submit(it),
                ..
            } => Some(it.tokens.clone()),
            _ => None,
        });
        assert_eq!(tokens.collect::<Vec<_>>(), [vec![7], vec![]]);
        assert_eq!(failing.supervisor.continued(), times);
    }
}

/// An answer that began with another owner is marked, and refused where only equal bits are
/// wanted.
#[test]
fn answers_that_began_elsewhere_are_marked_or_refused() {
    for (near, resume, tokens, is_marked, is_refused) in [
        (true, true, vec![7], true, false),
        (true, false, vec![7], false, true),
        (true, false, vec![], false, false),
        (false, false, vec![7], false, false),
    ] {
        let mut failing = Failing::new(resume);
        failing.supervisor.policy.near = near;
        failing.become_ready();
        let ticket = Ticket(1);
        let actions = failing.step(submit(ticket, request(Ticket(4)), tokens));
        let marked = Action::Deliver(ticket, Reply::Continued);
        assert_eq!(actions.contains(&marked), is_marked, "{actions:?}");
        let refused = actions.iter().any(|action| {
            matches!(
                action,
                Action::Deliver(_, Reply::Failed(RequestFailure::Lost { .. }))
            )
        });
        assert_eq!(refused, is_refused, "{actions:?}");
    }
}
