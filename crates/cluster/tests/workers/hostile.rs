//! Children that do not speak the protocol.

use super::*;
use paceline_cluster::{Error, Garbage, LINE_BYTES_MAX};

fn run(script: &str) -> Ours {
    let mut spec = scripts(&[script]);
    spec.limits = unlimited();
    Workers::spawn(spec).unwrap()
}

fn garbage(workers: &Ours) -> Garbage {
    match next(workers) {
        Event::Garbled {
            rank: Rank(0),
            garbage,
        } => garbage,
        event => panic!("{event}"),
    }
}

#[test]
fn garbage_is_the_last_word_of_a_channel() {
    for line in [
        "hello",
        r"\000\377\376",
        "{}",
        r#"{"Number":-1}"#,
        r#"{"Number":1} {"Number":1}"#,
        &"[".repeat(100_000),
    ] {
        let script =
            format!(r#"printf '\n\n"Done"\n' >&0; printf '{line}\n"Done"\n' >&0; read x; exit 4"#);
        let workers = run(&script);
        assert_eq!(answer(&workers), (Rank(0), RoleReply::Done));
        let text = garbage(&workers).to_string();
        assert!(text.len() < 500, "{text}");
        workers.send(Rank(0), &RoleCommand::Look).unwrap();
        assert_eq!(exit(&workers).1, Ending::Code(4), "{text}");
    }
}

#[test]
fn a_line_without_end_is_garbage() {
    let workers = run("head -c 80000000 /dev/zero >&0; exec sleep 1000");
    let expected = LINE_BYTES_MAX;
    let garbage = garbage(&workers);
    assert!(
        matches!(garbage, Garbage::TooLong { bytes_max, .. } if bytes_max == expected),
        "{garbage}"
    );
    assert!(garbage.to_string().len() < 500);
}

#[test]
fn half_a_message_at_the_end_is_nothing() {
    let workers = run(r#"printf '"Done"\n"Do' >&0; exit 3"#);
    assert_eq!(answer(&workers), (Rank(0), RoleReply::Done));
    assert_eq!(exit(&workers).1, Ending::Code(3));
}

#[test]
fn a_child_that_closes_its_channel_and_stays_is_reported() {
    let workers = run("exec 0<&-; exec sleep 1000");
    assert!(matches!(garbage(&workers), Garbage::Closed { .. }));
    // SIGTERM comes after half of it. The child has the other half to end before SIGKILL.
    workers.stop(Duration::from_secs(2));
    assert_eq!(exit(&workers).1, Ending::Signal(15));
}

#[test]
fn a_child_that_does_not_read_holds_nobody_up() {
    let mut spec = spec(2);
    spec.limits.write = Duration::from_millis(300);
    let workers: Ours = Workers::spawn(spec).unwrap();
    assert_eq!(
        ask(&workers, 1, &RoleCommand::Echo(String::new())),
        RoleReply::Echo(String::new())
    );
    kill(workers.ids()[1], Signal::STOP);
    let (start, watch) = (Instant::now(), Stopwatch::start());
    let error = workers
        .send(Rank(1), &RoleCommand::Echo("x".repeat(10 << 20)))
        .unwrap_err();
    let took = start.elapsed();
    assert!(
        matches!(error, Error::Stuck { rank: Rank(1), .. }),
        "{error}"
    );
    assert!(
        took >= Duration::from_millis(300) && watch.without_withheld(took) < Duration::from_secs(1),
        "{took:?}"
    );
    let error = workers.send(Rank(1), &RoleCommand::Look).unwrap_err();
    assert!(
        matches!(error, Error::Stuck { rank: Rank(1), .. }),
        "half a line is out: {error}"
    );
    assert_eq!(
        ask(&workers, 0, &RoleCommand::Echo("a".into())),
        RoleReply::Echo("a".into())
    );
}

#[test]
fn a_child_that_never_says_anything_is_silent_after_its_start() {
    let mut spec = scripts(&["exec sleep 1000"]);
    let limit = Duration::from_millis(300);
    spec.limits.start = limit;
    let workers: Ours = Workers::spawn(spec).unwrap();
    let start = Stopwatch::start();
    let Event::Silent { rank, silence } = next(&workers) else {
        panic!("not silent");
    };
    assert!(start.elapsed() < Duration::from_secs(1));
    assert_eq!(rank, Rank(0));
    check_silence(silence, limit);
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let spec = WorkerSpec::new("/no/such/program", vec![Vec::new(); 3]);
    let error = Ours::spawn(spec).unwrap_err();
    let expected = "cannot start /no/such/program for rank 0: ";
    assert!(error.to_string().starts_with(expected), "{error}");
}
