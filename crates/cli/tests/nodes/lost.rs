//! Processes that are killed, crash, are stopped or end: the rest ends or reports within 2 s, names
//! the rank, and leaves nothing behind.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline_base::SplitMix64;
use paceline_base::testing::{Stopwatch, long};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::processes::{
    RunningCommand, assert_gone, children, lives, signal, signal_if_there, wait_gone,
};
use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{REPORTED, TestHome, alone, http, smollm2, until};
use crate::common::words;

/// Ways to fail, and what the error says of each.
const KINDS: [(Signal, &str); 5] = [
    (Signal::KILL, "was ended by SIGKILL"),
    (Signal::SEGV, "was ended by SIGSEGV"),
    (Signal::ABORT, "was ended by SIGABRT"),
    (Signal::STOP, ""), // the parent or a rank that waits for it may notice first
    (Signal::TERM, "exited with code 1"),
];

/// Splits with the leader first, and last but one.
const SPLITS: [(&str, usize); 2] = [("3x1", 3), ("2x2", 4)];

/// The arguments of an answer that would take minutes.
fn endless<'a>(model: &'a str, split: &'a str, nodes: &'a str) -> [&'a str; 13] {
    [
        "run",
        model,
        "Write a very long story about a dragon and a princess.",
        "--temperature",
        "0",
        "--context",
        "200000",
        "--nodes",
        nodes,
        "--split",
        split,
        "--threads",
        "1",
    ]
}

/// Times from a signal to the end, told at the end of a test.
#[derive(Default)]
struct ShutdownTimes(Vec<(String, Duration)>);

impl ShutdownTimes {
    fn add(&mut self, kind: &str, time: Duration) {
        assert!(time < REPORTED, "{kind}: {time:?}");
        self.0.push((kind.to_owned(), time));
    }

    /// Median and worst of each kind, for people who look at a test's output.
    fn tell(mut self, what: &str) {
        self.0.sort();
        for same in self.0.chunk_by(|a, b| a.0 == b.0) {
            let ms = |i: usize| same[i].1.as_millis();
            let (n, kind) = (same.len(), &same[0].0);
            eprintln!(
                "{what}, {kind}: median {} ms, worst {} ms of {n}",
                ms(n / 2),
                ms(n - 1)
            );
        }
    }
}

fn fail(worker: u32, kind: Signal) {
    signal(worker, kind);
    crash(kind, worker);
}

/// Sends SIGSEGV again every 50 ms while the process lives, 40 times at most. Rust's handler, which
/// looks for stacks that are full, takes the first one from outside for a fault that will come
/// again. So it only steps aside, and a second signal that comes before that is lost. Where tiles
/// of AMX are in use the first one ends the process: they leave no room on the handler's stack.
fn crash(kind: Signal, id: u32) {
    if kind != Signal::SEGV {
        return;
    }
    for _ in 0..40 {
        let sent = Instant::now();
        while sent.elapsed() < Duration::from_millis(50) {
            if !lives(id) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        signal_if_there(id, kind);
    }
}

fn name(signal: Signal) -> String {
    format!("{signal:?}").trim_matches('"').to_owned()
}

/// Whether the first rank in `error` is this one, with what happened to it.
fn names(error: &str, rank: usize, how: &str) -> bool {
    let first = error.find("rank ").map(|at| &error[at..]);
    first.is_some_and(|first| first.starts_with(&format!("rank {rank} {how}")))
}

/// Checks that there is one error, which names the rank, and no other complaint.
fn check_error(said: &str, rank: usize, how: &str) {
    let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("error")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(names(errors[0], rank, how), "{rank} {how:?}: {said}");
    assert!(
        !said.contains("panicked") && !said.contains("[rank"),
        "{said}"
    );
}

/// With the first split every signal goes to one rank in turn, with the second one signal. In a
/// long run every signal goes to every rank of both.
#[test]
fn an_answer_ends_when_a_rank_fails() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let mut times = ShutdownTimes::default();
    for (split, nodes) in SPLITS {
        let all = long() || split == SPLITS[0].0;
        let kinds = &KINDS[..if all { KINDS.len() } else { 1 }];
        for (number, (kind, how)) in kinds.iter().enumerate() {
            let kind = *kind;
            let turn = number % nodes;
            let victims = if long() { 0..nodes } else { turn..turn + 1 };
            for victim in victims {
                let count = nodes.to_string();
                let args = endless(&model, split, &count);
                let mut running = RunningCommand::start(&mut world.paceline(args));
                running.wait_for_answer(50);
                let workers = running.workers(nodes);
                fail(workers[victim], kind);
                times.add(&name(kind), running.wait());
                assert_gone(&workers);
                let ended = running.end();
                assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
                check_error(&ended.stderr, victim, how);
                assert!(ended.stdout.len() > 50 && ended.stdout.ends_with('\n'));
                assert_eq!(ended.stdout.lines().count(), 1, "{}", ended.stdout);
            }
        }
    }
    times.tell("run ends");
    world.assert_clean();
}

/// Nothing half is printed as JSON.
#[test]
fn an_object_is_whole_or_not_there() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = endless(&model, "2x1", "2");
    let mut running = RunningCommand::start(&mut world.paceline(args.iter().chain(&["--json"])));
    let workers = running.workers(2);
    std::thread::sleep(Duration::from_millis(800));
    signal(workers[1], Signal::KILL);
    running.wait();
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(1));
    assert_eq!(ended.stdout, "");
    check_error(&ended.stderr, 1, "was ended by SIGKILL");
    assert_gone(&workers);
}

/// A worker that is stopped shortly is waited for. Where this test itself was held up meanwhile the
/// pause was not short, and another worker is stopped in its place.
#[test]
fn a_short_pause_is_no_failure() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let start = || RunningCommand::start(&mut world.paceline(endless(&model, "3x1", "3")));
    let (mut running, mut rank) = (start(), 0);
    for _ in 0..20 {
        running.wait_for_answer(50);
        let worker = running.workers(3)[rank];
        let stopped = Instant::now();
        signal(worker, Signal::STOP);
        std::thread::sleep(Duration::from_millis(600));
        signal(worker, Signal::CONT);
        if stopped.elapsed() > Duration::from_millis(1200) {
            running = start();
            continue;
        }
        let before = running.answered().len();
        running.wait_for_answer(before + 100);
        rank += 1;
        if rank == 3 {
            return;
        }
    }
    panic!("no pause of this test is short");
}

/// No worker outlives its parent, which any signal may end. A stopped worker does not either,
/// which is tried with all signals in a long run.
#[test]
fn workers_end_with_their_parent() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let mut times = ShutdownTimes::default();
    for kind in [
        Signal::KILL,
        Signal::SEGV,
        Signal::INT,
        Signal::TERM,
        Signal::HUP,
    ] {
        let both = long() || [Signal::KILL, Signal::TERM].contains(&kind);
        for stopped in &[None, Some(1)][..if both { 2 } else { 1 }] {
            let mut running =
                RunningCommand::start(&mut world.paceline(endless(&model, "3x1", "3")));
            running.wait_for_answer(50);
            let workers = running.workers(3);
            if let Some(rank) = stopped {
                signal(workers[*rank], Signal::STOP);
            }
            let start = Stopwatch::start();
            running.signal(kind);
            crash(kind, running.id());
            let took = wait_gone(&workers, start);
            times.add(&name(kind), took);
            let ended = running.end();
            assert_eq!(
                ended.stderr.lines().filter(|l| l.contains("rror")).count(),
                0
            );
            let handled = !matches!(kind, Signal::KILL | Signal::SEGV);
            assert_eq!(ended.status.code(), handled.then_some(1));
        }
    }
    times.tell("workers end with their parent");
}

/// Seeded random moments from the first sign of a worker to deep in an answer. A real model has all
/// of them: it takes a while to load. Four moments, twenty in a long run.
#[test]
fn any_moment_will_do() {
    let _alone = alone();
    let world = TestHome::new();
    let tiny = world.write_model(FAMILIES[0]);
    let real = smollm2("any_moment_will_do");
    let mut random = SplitMix64::new(20);
    let mut times = ShutdownTimes::default();
    for round in 0..if long() { 20 } else { 4 } {
        let model = real.as_ref().filter(|_| round % 2 == 0).unwrap_or(&tiny);
        let (kind, _) = KINDS[random.below(5)];
        let victim = random.below(3);
        let moment = Duration::from_millis(random.below(900) as u64);
        let args = endless(model, ["3x1", "1x3"][round / 2 % 2], "3");
        let running = RunningCommand::start(&mut world.paceline(args));
        let workers = running.workers(3);
        std::thread::sleep(moment);
        let kind_name = name(kind);
        let what = format!("round {round}: {kind_name} to rank {victim} after {moment:?}");
        eprintln!("{what}");
        fail(workers[victim], kind);
        let start = Stopwatch::start();
        let ended = running.end();
        times.add(&name(kind), start.elapsed());
        assert_eq!(ended.status.code(), Some(1), "{what}: {}", ended.stderr);
        check_error(&ended.stderr, victim, "");
        assert_gone(&workers);
    }
    times.tell("any moment");
    world.assert_clean();
}

/// Tokens of an answer that loses a worker: a second or more of this model.
const LONG_ANSWER: u32 = 2000;

/// A worker of four that fails while two answers are computed:
///
/// - the answers continue and are those of an undisturbed run;
/// - a request that comes meanwhile is answered;
/// - the other workers keep their processes and the weights that they have packed.
///
/// By default one victim is killed and one is stopped; in a long run each signal goes to two.
#[test]
fn answers_of_a_server_go_on() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let mut times = ShutdownTimes::default();
    let args = words("--nodes 4 --split 2x2 --context 200000 --threads 1");
    for (number, (kind, how)) in KINDS.into_iter().enumerate() {
        if !long() && ![Signal::KILL, Signal::STOP].contains(&kind) {
            continue;
        }
        let victims = &[0, 2];
        let one = number % 2;
        for victim in if long() {
            &victims[..]
        } else {
            &victims[one..=one]
        } {
            let victim = *victim;
            let server = NodeServer::start(&world, &model, &args);
            times.add(&name(kind), lose(&server, &model, victim, kind));
            let ended = server.stop(4);
            check_error(&ended.stderr, victim, how);
            assert!(
                ended.stderr.contains("the workers are ready again"),
                "{}",
                ended.stderr
            );
            assert!(ended.stderr.ends_with("stopping\n"), "{}", ended.stderr);
        }
    }
    times.tell("answers of up go on");
    world.assert_clean();
}

/// Loses a worker of a server with two answers under way; how long the stream stood still.
fn lose(server: &NodeServer, model: &str, victim: usize, kind: Signal) -> Duration {
    let (port, path) = (server.port, "/v1/chat/completions");
    let before = server.running.workers(4);
    assert_eq!(packings(server), [1; 4], "{kind:?}: before it");
    let whole = chat(
        model,
        "go",
        &json!({"max_tokens": LONG_ANSWER, "ignore_eos": true, "logprobs": true, "top_logprobs": 2}),
    );
    let sampled = chat(
        model,
        "on",
        &json!({"max_tokens": LONG_ANSWER, "ignore_eos": true, "stream": true, "temperature": 0.8, "seed": 7}),
    );
    let expected = http::ask(port, path, Some(&whole)).body["choices"].clone();
    assert!(expected[0]["logprobs"]["content"].is_array(), "{expected}");
    let expected_stream = pieces(http::stream(port, path, &sampled), |_| {});

    let waiting = std::thread::spawn(move || http::ask(port, path, Some(&whole)));
    let mut late = None;
    let (mut last, mut longest, mut n) = (Instant::now(), Duration::ZERO, 0);
    let watch = Stopwatch::start();
    let streamed = pieces(http::stream(port, path, &sampled), |_| {
        n += 1;
        if n == 20 {
            until("both are under way", || {
                http::ask(port, "/health", None).body["running"] == 2
            });
            fail(before[victim], kind);
            let short = chat(model, "go", &json!({"max_tokens": 5}));
            late = Some(std::thread::spawn(move || {
                http::ask(port, path, Some(&short))
            }));
            last = Instant::now();
        }
        longest = longest.max(last.elapsed());
        last = Instant::now();
    });
    assert_eq!(streamed, expected_stream, "{kind:?} of rank {victim}");
    let answer = waiting.join().unwrap();
    assert_eq!(
        answer.body["choices"], expected,
        "{kind:?} of rank {victim}"
    );
    let late = late.unwrap().join().unwrap();
    assert_eq!(late.status, 200, "{}", late.body);
    assert_eq!(late.body["usage"]["completion_tokens"], 5);

    http::health(port, 200);
    assert_gone(&before[victim..=victim]);
    let after = server.running.workers(4);
    let kept = before.iter().filter(|id| after.contains(id)).count();
    assert_eq!(kept, 3, "{kind:?}: {before:?} became {after:?}");
    assert_eq!(packings(server), [1; 4], "{kind:?}: none packed twice");
    watch.without_withheld(longest)
}

/// How often each rank's process has packed weights.
fn packings(server: &NodeServer) -> Vec<u64> {
    let told = http::ask(server.port, "/v1/paceline/status", None).body;
    let shards = &told["instances"][0]["portrait"]["shards"];
    let shards = shards.as_array().unwrap_or_else(|| panic!("{told}"));
    let packings = shards.iter().map(|it| it["packings"].as_u64().unwrap());
    packings.collect()
}

/// The texts of a stream, each shown to `look`; fails for one that does not end well.
fn pieces(mut stream: http::StreamedResponse, mut look: impl FnMut(&str)) -> Vec<String> {
    let mut texts = Vec::new();
    while let Some(event) = stream.event() {
        assert!(event.get("error").is_none(), "{event}");
        if event == "[DONE]" {
            return texts;
        }
        if let Some(text) = event["choices"][0]["delta"]["content"].as_str() {
            look(text);
            texts.push(text.to_owned());
        }
    }
    panic!("the stream ended before its end");
}

/// Workers that cannot start again are tried again until they can; a model file that is damaged
/// or gone is named.
#[test]
fn a_server_waits_for_its_model() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let whole = fs::read(&model).unwrap();
    let server = NodeServer::start(&world, &model, &["--nodes", "2", "--context", "512"]);
    for (content, says) in [
        (None, "No such file"),
        (Some(&whole[..whole.len() / 2]), ""),
    ] {
        let (old, new) = (world.path("models/old"), world.path("models/new"));
        fs::rename(&model, &old).unwrap(); // what is mapped may not change
        if let Some(content) = content {
            fs::write(&new, content).unwrap();
            fs::rename(&new, &model).unwrap();
        }
        signal(server.running.workers(2)[0], Signal::KILL);
        let mut reason = String::new();
        until("the failure to start again", || {
            let health = http::ask(server.port, "/health", None);
            let said = health.body["reason"].as_str();
            reason = said.unwrap_or_default().to_owned();
            reason.contains("cannot start")
        });
        assert!(
            reason.contains("rank ") && reason.contains(says),
            "{reason}"
        );
        assert!(reason.contains("llama.gguf"), "{reason}");
        until("no worker is left", || {
            children(server.running.id()).is_empty()
        });
        fs::rename(&old, &model).unwrap();
        http::health(server.port, 200);
    }
    let body = chat(&model, "hi", &json!({"max_tokens": 3}));
    let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
    assert_eq!(answer.body["usage"]["completion_tokens"], Value::from(3));
    server.stop(2);
}

/// An update puts another file in the program's place while it runs.
#[test]
fn a_program_that_was_replaced_still_starts_workers() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let program = world.path("models/paceline");
    // Another process writes it: a child that another test starts would hold it open for writing.
    let mut copy = Command::new("cp");
    copy.arg(env!("CARGO_BIN_EXE_paceline")).arg(&program);
    assert!(copy.status().unwrap().success());
    let mut command = Command::new(&program);
    command
        .args(["up", "--no-beacons", "--model", &model, "--port", "0"])
        .args(["--nodes", "2"])
        .env("PACELINE_HOME", world.path("home"))
        .env("TMPDIR", world.path("tmp"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let server = NodeServer::of(&mut command);
    let update = world.path("models/update");
    fs::write(&update, "#!/bin/sh\nexit 7\n").unwrap();
    fs::rename(&update, &program).unwrap();
    let before = server.running.workers(2);
    signal(before[0], Signal::KILL);
    until("another worker", || {
        let now = children(server.running.id());
        now.len() == 2 && !now.contains(&before[0])
    });
    http::health(server.port, 200);
    let body = chat(&model, "hi", &json!({"max_tokens": 3}));
    let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
    assert_eq!(answer.body["usage"]["completion_tokens"], Value::from(3));
    server.stop(2);
}
