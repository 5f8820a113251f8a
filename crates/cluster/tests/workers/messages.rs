//! Messages and lines, as they should be.

use std::sync::{Arc, Mutex};

use super::*;

#[test]
fn messages_go_both_ways_in_order() {
    let workers = spawn(3);
    for i in 0..100 {
        for rank in 0..3 {
            let text = format!("{i} to {rank}\n\u{1f600}");
            workers.send(Rank(rank), &RoleCommand::Echo(text)).unwrap();
        }
    }
    let mut seen = [0; 3];
    for _ in 0..300 {
        let (rank, answer) = answer(&workers);
        let i = &mut seen[rank.0 as usize];
        assert_eq!(
            answer,
            RoleReply::Echo(format!("{i} to {}\n\u{1f600}", rank.0))
        );
        *i += 1;
    }
    assert_eq!(workers.recv(Duration::ZERO), None);
}

#[test]
fn a_long_message_goes_both_ways() {
    let workers = spawn(1);
    let text = "x".repeat(10 << 20);
    let answer = ask(&workers, 0, &RoleCommand::Echo(text.clone()));
    assert!(answer == RoleReply::Echo(text), "10 MiB came back changed");
}

#[test]
fn a_child_that_is_not_listened_to_waits_and_is_not_silent() {
    let workers = spawn(2);
    let count = 20_000;
    workers.send(Rank(0), &RoleCommand::Count(count)).unwrap();
    // Longer than the silence that is allowed.
    std::thread::sleep(Duration::from_millis(2500));
    for i in 0..count {
        assert_eq!(answer(&workers), (Rank(0), RoleReply::Number(i)));
    }
    assert_eq!(workers.recv(Duration::from_secs(2)), None);
}

#[test]
fn lines_of_standard_error_are_whole_and_named() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut spec = spec(2);
    let kept = Arc::clone(&seen);
    spec.on_line = Some(Box::new(move |rank, line| {
        kept.lock().unwrap().push((rank.0, line.to_owned()));
    }));
    let workers: Ours = Workers::spawn(spec).unwrap();
    for text in ["ha", "lf\nsecond\n", "no end"] {
        for rank in 0..2 {
            assert_eq!(
                ask(&workers, rank, &RoleCommand::Say(text.into())),
                RoleReply::Done
            );
        }
    }
    workers.stop(PATIENCE);
    let seen = seen.lock().unwrap();
    for rank in 0..2 {
        let lines = seen
            .iter()
            .filter(|(from, _)| *from == rank)
            .map(|(_, line)| line.as_str());
        assert_eq!(lines.collect::<Vec<_>>(), ["half", "second", "no end"]);
    }
}

#[test]
fn children_have_their_own_group_and_no_strange_socket() {
    let workers = spawn(3);
    for rank in 0..3 {
        let RoleReply::Look {
            group,
            sockets,
            stdin,
        } = ask(&workers, rank, &RoleCommand::Look)
        else {
            panic!("no look");
        };
        assert_eq!(group, i32::try_from(workers.ids()[rank as usize]).unwrap());
        assert_eq!(stdin, b"", "standard input is not the channel any more");
        if cfg!(target_os = "linux") {
            assert_eq!(sockets, 2, "its own channel, for reading and for writing");
        }
    }
}

#[test]
fn a_rank_that_is_not_there_is_refused() {
    let workers = spawn(1);
    let error = workers.send(Rank(1), &RoleCommand::Look).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 is not one of 1 workers");
    let nobody: Ours = Workers::spawn(WorkerSpec::new("sh", Vec::new())).unwrap();
    assert_eq!(nobody.count(), 0);
    assert_eq!(nobody.recv(Duration::ZERO), None);
    nobody.stop(PATIENCE);
}

#[test]
fn a_program_that_a_person_starts_is_refused_a_channel() {
    roles::run("by hand");
}
