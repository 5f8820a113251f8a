//! Children that exit, are stopped, or are ordered to end.

use super::*;
use paceline_cluster::EXIT_CODE_PARENT_GONE;

#[test]
fn endings_come_with_code_and_last_lines() {
    let workers = spawn(3);
    assert_eq!(
        ask(&workers, 1, &RoleCommand::Say("first\nsecond".into())),
        RoleReply::Done
    );
    workers.send(Rank(1), &RoleCommand::Exit(7)).unwrap();
    let lines = vec!["first".to_owned(), "second".to_owned()];
    assert_eq!(exit(&workers), (Rank(1), Ending::Code(7), lines));
    workers.send(Rank(0), &RoleCommand::Abort).unwrap();
    let (rank, ending, _) = exit(&workers);
    assert_eq!(
        (rank, ending.to_string().as_str()),
        (Rank(0), "was ended by SIGABRT")
    );
    workers.send(Rank(2), &RoleCommand::Exit(0)).unwrap();
    assert_eq!(exit(&workers), (Rank(2), Ending::Code(0), vec![]));
    assert!(workers.send(Rank(0), &RoleCommand::Look).is_err());
    assert_eq!(workers.recv(Duration::ZERO), None);
}

#[test]
fn what_was_sent_before_an_ending_arrives_before_it() {
    for _ in 0..50 {
        let workers = spawn(1);
        workers
            .send(Rank(0), &RoleCommand::CountAndExit(100, 5))
            .unwrap();
        for i in 0..100 {
            assert_eq!(answer(&workers), (Rank(0), RoleReply::Number(i)));
        }
        assert_eq!(exit(&workers), (Rank(0), Ending::Code(5), vec![]));
    }
}

#[test]
fn a_killed_child_is_reported_within_a_tenth_of_a_second() {
    let mut times = Vec::new();
    for i in 0..50 {
        let workers = spawn(2);
        let rank = Rank(i % 2);
        if i % 3 == 0 {
            assert_eq!(ask(&workers, rank.0, &RoleCommand::Busy), RoleReply::Done);
        }
        let start = Stopwatch::start();
        kill(workers.ids()[rank.0 as usize], Signal::KILL);
        let (from, ending, _) = exit(&workers);
        times.push(start.elapsed());
        assert_eq!((from, ending), (rank, Ending::Signal(9)));
    }
    times.sort_unstable();
    // Other processes may delay some; the fast half shows that exits are not polled.
    assert!(times[45] < Duration::from_millis(100), "{times:?}");
    assert!(times[25] < Duration::from_millis(25), "{times:?}");
}

#[test]
fn a_stopped_child_is_reported_within_two_seconds_and_ended() {
    let workers = spawn(2);
    assert_eq!(
        ask(&workers, 1, &RoleCommand::Echo(String::new())),
        RoleReply::Echo(String::new())
    );
    kill(workers.ids()[1], Signal::STOP);
    let start = Stopwatch::start();
    let Event::Silent { rank, silence } = next(&workers) else {
        panic!("not silent");
    };
    let took = start.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(rank, Rank(1));
    check_silence(silence, WorkerLimits::default().silence);
    let start = Stopwatch::start();
    workers.stop(GRACE);
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "the silent one is not waited for"
    );
    let endings = [exit(&workers), exit(&workers)].map(|(rank, ending, _)| (rank, ending));
    assert!(
        endings.contains(&(Rank(0), Ending::Code(EXIT_CODE_PARENT_GONE))),
        "{endings:?}"
    );
    assert!(
        endings.contains(&(Rank(1), Ending::Signal(9))),
        "{endings:?}"
    );
    assert!(workers.ids().iter().all(|id| is_gone(*id)));
}

/// The start limit does not matter.
#[test]
fn a_child_that_is_stopped_before_its_first_word_is_reported_within_two_seconds() {
    let mut spec = scripts(&["kill -STOP $$"]);
    spec.limits = unlimited();
    let start = Stopwatch::start();
    let workers: Ours = Workers::spawn(spec).unwrap();
    let Event::Silent { rank, .. } = next(&workers) else {
        panic!("not silent");
    };
    let took = start.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(rank, Rank(0));
}

#[test]
fn a_child_that_is_continued_is_heard_again() {
    let workers = spawn(1);
    assert_eq!(
        ask(&workers, 0, &RoleCommand::Echo(String::new())),
        RoleReply::Echo(String::new())
    );
    for _ in 0..2 {
        kill(workers.ids()[0], Signal::STOP);
        assert!(matches!(next(&workers), Event::Silent { .. }));
        kill(workers.ids()[0], Signal::CONT);
        assert_eq!(
            ask(&workers, 0, &RoleCommand::Echo("a".into())),
            RoleReply::Echo("a".into())
        );
    }
}

#[test]
fn asking_is_enough_even_for_one_that_computes_or_does_not_listen() {
    let mut spec = spec(3);
    // A slow reader must not count as stuck.
    spec.limits.write = Duration::from_secs(2);
    let workers: Ours = Workers::spawn(spec).unwrap();
    assert_eq!(ask(&workers, 0, &RoleCommand::Busy), RoleReply::Done);
    roles::deafen(&workers, 1);
    let start = Stopwatch::start();
    workers.stop(GRACE);
    assert!(start.elapsed() < PATIENCE / 4, "{:?}", start.elapsed());
    for _ in 0..3 {
        assert_eq!(exit(&workers).1, Ending::Code(EXIT_CODE_PARENT_GONE));
    }
    workers.stop(PATIENCE);
    assert_eq!(workers.recv(Duration::ZERO), None);
}

#[test]
fn ending_gets_harder() {
    let stubborn = "trap '' TERM; echo ready >&2; while :; do sleep 1000; done";
    let mut spec = scripts(&["echo ready >&2; exec sleep 1000", stubborn]);
    let (say, said) = std::sync::mpsc::channel();
    spec.on_line = Some(Box::new(move |_, _| say.send(()).unwrap()));
    spec.limits = unlimited();
    let workers: Ours = Workers::spawn(spec).unwrap();
    for _ in 0..2 {
        said.recv_timeout(PATIENCE).unwrap();
    }
    let grace = Duration::from_millis(600);
    let (start, watch) = (Instant::now(), Stopwatch::start());
    workers.stop(grace);
    let took = start.elapsed();
    assert!(
        took >= grace && watch.without_withheld(took) < grace * 3,
        "{took:?}"
    );
    let (rank, ending, _) = exit(&workers);
    assert_eq!(
        (rank, ending),
        (Rank(0), Ending::Signal(15)),
        "half of the time"
    );
    let (rank, ending, _) = exit(&workers);
    assert_eq!((rank, ending), (Rank(1), Ending::Signal(9)), "all of it");
}

#[test]
fn what_a_child_started_ends_with_it() {
    for script in [
        "sleep 1000 & echo $! >&2; exit 4",
        "sleep 1000 & echo $! >&2; wait",
    ] {
        let mut spec = scripts(&[script]);
        let (say, said) = std::sync::mpsc::channel();
        spec.on_line = Some(Box::new(move |_, line| say.send(line.to_owned()).unwrap()));
        let workers: Ours = Workers::spawn(spec).unwrap();
        let id: u32 = said.recv_timeout(PATIENCE).unwrap().parse().unwrap();
        if script.ends_with("exit 4") {
            assert_eq!(
                exit(&workers).1,
                Ending::Code(4),
                "though its channel is held open"
            );
        }
        drop(workers);
        wait_until(PATIENCE, script, || is_gone(id));
    }
}

#[test]
fn a_hook_runs_and_cannot_hold_up_the_end() {
    for hangs in [false, true] {
        let workers = spawn(1);
        assert_eq!(
            ask(&workers, 0, &RoleCommand::Hook { hangs }),
            RoleReply::Done
        );
        let start = Stopwatch::start();
        workers.stop(GRACE);
        assert!(start.elapsed() < PATIENCE / 4, "{:?}", start.elapsed());
        let (_, ending, tail) = exit(&workers);
        assert_eq!(tail, ["hook"]);
        let expected = if hangs {
            Ending::Signal(9)
        } else {
            Ending::Code(EXIT_CODE_PARENT_GONE)
        };
        assert_eq!(ending, expected);
    }
}

#[test]
fn nothing_is_left_after_many_starts_and_ends() {
    roles::run("tidy");
}
