//! Launches as sequences of events and times.

use super::*;

/// A launch of `ranks` ranks on two hosts, the current time, and the actions so far.
struct LaunchFixture {
    course: LaunchMachine,
    now: Instant,
    orders: Vec<SessionAction>,
}

impl LaunchFixture {
    fn new(ranks: usize) -> Self {
        let hosts = vec!["a".to_owned(), "b".to_owned()];
        let host_of: Vec<usize> = (0..ranks).map(|rank| rank % 2).collect();
        let now = Instant::now();
        Self {
            course: LaunchMachine::new(hosts, &host_of, LaunchLimits::default(), now),
            now,
            orders: Vec::new(),
        }
    }

    fn on(&mut self, event: Event) -> &mut Self {
        let orders = self.course.step(self.now, event);
        self.orders.extend(orders);
        self
    }

    fn later(&mut self, seconds: u64) -> &mut Self {
        self.now += Duration::from_secs(seconds);
        let orders = self.course.tick(self.now);
        self.orders.extend(orders);
        self
    }

    fn running(ranks: usize) -> Self {
        let mut told = Self::new(ranks);
        told.on(Event::HostReady(0)).on(Event::HostReady(1));
        for rank in 0..ranks {
            told.on(Event::Ready(rank)).on(Event::Guarded(rank));
        }
        told.orders.clear();
        told
    }

    fn ordered(&mut self) -> Vec<SessionAction> {
        std::mem::take(&mut self.orders)
    }

    fn failed(self) -> String {
        assert!(self.course.is_over());
        self.course.outcome().unwrap_err().to_string()
    }
}

#[test]
fn no_program_starts_before_all_can() {
    let mut told = LaunchFixture::new(2);
    told.on(Event::HostReady(0))
        .on(Event::Ready(0))
        .on(Event::Guarded(0));
    assert_eq!(
        told.ordered(),
        [SessionAction::Start(0), SessionAction::Guard(0)]
    );
    told.on(Event::HostReady(1)).on(Event::Ready(1));
    assert_eq!(
        told.ordered(),
        [SessionAction::Start(1), SessionAction::Guard(1)]
    );
    told.on(Event::Guarded(1));
    assert_eq!(told.ordered(), [SessionAction::Go(0), SessionAction::Go(1)]);
    for rank in 0..2 {
        told.on(Event::Exited(rank, 0))
            .on(Event::Closed(rank, Ending::Code(0)));
    }
    assert!(told.course.is_over());
    told.course.outcome().unwrap();
}

#[test]
fn a_session_that_hangs_after_its_program_is_ended() {
    let mut told = LaunchFixture::running(1);
    told.on(Event::Exited(0, 0)).later(1);
    assert_eq!(told.ordered(), [SessionAction::Release(0)]);
    told.later(1);
    assert_eq!(told.ordered(), [SessionAction::Abandon(0)]);
    told.on(Event::Closed(0, Ending::Signal(9)));
    told.course.outcome().unwrap();
}

#[test]
fn a_rank_that_ends_early_does_not_leave_the_others_for_ever() {
    let mut told = LaunchFixture::running(2);
    told.on(Event::Exited(0, 0))
        .on(Event::Closed(0, Ending::Signal(9)))
        .later(599);
    assert_eq!(told.ordered(), [SessionAction::Release(0)]);
    told.later(1);
    assert_eq!(told.ordered(), [SessionAction::Signal(1, Signal::TERM)]);
    told.on(Event::Exited(1, 143))
        .on(Event::Closed(1, Ending::Signal(9)));
    assert_eq!(
        told.failed(),
        "rank 0 ended with code 0, and 600s later rank 1 still ran"
    );
}

#[test]
fn ctrl_c_asks_three_times() {
    let mut told = LaunchFixture::running(1);
    told.on(Event::Cancel)
        .on(Event::Cancel)
        .later(2)
        .later(1)
        .later(2)
        .later(2);
    let signal = |signal| SessionAction::Signal(0, signal);
    assert_eq!(
        told.ordered(),
        [
            signal(Signal::INT),
            signal(Signal::TERM),
            signal(Signal::KILL),
            SessionAction::Abandon(0)
        ]
    );
    told.on(Event::Closed(0, Ending::Signal(9)));
    assert_eq!(told.failed(), "interrupted");
}

#[test]
fn what_cannot_start_starts_nowhere() {
    let mut told = LaunchFixture::new(2);
    told.on(Event::HostReady(0))
        .on(Event::Ready(0))
        .on(Event::Guarded(0))
        .ordered();
    told.on(Event::HostLost(1, "Connection refused".to_owned()));
    assert_eq!(
        told.ordered(),
        [SessionAction::Abandon(0), SessionAction::Abandon(1)]
    );
    told.on(Event::Closed(0, Ending::Signal(9)));
    assert_eq!(told.failed(), "cannot reach b: Connection refused");

    let mut told = LaunchFixture::new(2);
    told.on(Event::HostReady(0))
        .on(Event::Ready(0))
        .on(Event::Guarded(0))
        .later(30);
    told.on(Event::Closed(0, Ending::Signal(9)));
    assert_eq!(told.failed(), "not ready within 30s: b");

    let mut told = LaunchFixture::new(1);
    told.on(Event::HostReady(0))
        .on(Event::Closed(0, Ending::Code(125)));
    assert_eq!(
        told.failed(),
        "cannot start rank 0 on a: its shell exited with code 125"
    );

    let mut told = LaunchFixture::new(1);
    told.on(Event::HostReady(0))
        .on(Event::Shared(0))
        .on(Event::Closed(0, Ending::Code(125)));
    assert_eq!(
        told.failed(),
        "a does not give a session a process group of its own"
    );
}

#[test]
fn programs_that_end_with_their_host_are_its_consequence() {
    // The host agent ends its programs, which may be reported first.
    for (signal, cause) in [
        (15, "the connection to b is lost: Timeout"),
        (11, "rank 1 on b was ended by SIGSEGV"),
    ] {
        let mut told = LaunchFixture::running(2);
        told.on(Event::Exited(1, 128 + signal));
        told.on(Event::HostLost(1, "Timeout".to_owned()));
        told.on(Event::Closed(1, Ending::Signal(9))).ordered();
        told.on(Event::Exited(0, 143));
        told.on(Event::Closed(0, Ending::Signal(9)));
        assert_eq!(told.failed(), cause);
    }
}
