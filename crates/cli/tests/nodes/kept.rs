//! Prompts that were read, on disk: known after a restart and after a kill at any time, over any
//! split.

use std::fs;

use paceline_base::SplitMix64;
use paceline_base::testing::{Stopwatch, long};
use rustix::process::Signal;
use serde_json::json;

use super::processes::{signal, wait_gone};
use super::server::NodeServer;
use super::tiny::FAMILIES;
use super::{TestHome, http, until};

/// Tokens of a greedy answer.
const TOKENS: u32 = 6;

/// The text of the answer, and the tokens of the prompt that were known.
fn answer(port: u16, model: &str, prompt: &str) -> (String, u64) {
    let body = json!({"model": model, "prompt": prompt, "temperature": 0, "max_tokens": TOKENS});
    let answer = http::ask(port, "/v1/completions", Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let cached = &answer.body["usage"]["prompt_tokens_details"]["cached_tokens"];
    let text = answer.body["choices"][0]["text"].as_str().unwrap();
    (text.to_owned(), cached.as_u64().unwrap())
}

/// Files of whole pages on disk.
fn pages(world: &TestHome) -> usize {
    let spaces = fs::read_dir(world.path("home/prefixes"));
    let files = spaces.into_iter().flatten().flatten();
    let files = files.filter_map(|space| fs::read_dir(space.path()).ok());
    let names = files.flatten().flatten().map(|file| file.file_name());
    let is_whole = |name: &std::ffi::OsString| !name.to_string_lossy().ends_with(".part");
    names.filter(is_whole).count()
}

fn letters(n: usize, seed: u64) -> String {
    let mut random = SplitMix64::new(seed);
    (0..n)
        .map(|_| char::from(b'a' + random.below(26) as u8))
        .collect()
}

#[test]
fn prompts_are_known_after_a_restart() {
    // Windows and all positions, in one process, two stages, and two halves of each layer.
    for (tiny, split) in [
        (FAMILIES[3], &["--nodes", "1"][..]),
        (FAMILIES[3], &["--nodes", "2", "--split", "pipeline"][..]),
        (FAMILIES[0], &["--nodes", "2", "--split", "tensor"][..]),
    ] {
        let nodes = split[1].parse().unwrap();
        let world = TestHome::new();
        let model = world.write_model(tiny);
        let args = [&["--context", "1024"][..], split].concat();
        let prompt = letters(400, 1);
        let server = NodeServer::start(&world, &model, &args);
        let first = answer(server.port, &model, &prompt);
        assert_eq!(first.1, 0);
        // Six pages of each kind of layers that a rank has, which gemma3 has two of.
        let kinds = if tiny.family == "gemma3" { 2 } else { 1 };
        until("pages are on disk", || pages(&world) == 6 * kinds * nodes);
        server.stop(nodes);
        let server = NodeServer::start(&world, &model, &args);
        let again = answer(server.port, &model, &prompt);
        assert_eq!(again.0, first.0, "{split:?}");
        assert_eq!(again.1, 6 * 64, "{split:?}");
        // What only one rank has lost is computed again.
        server.stop(nodes);
        let spaces = fs::read_dir(world.path("home/prefixes")).unwrap();
        let space = spaces.flatten().next().unwrap().path();
        for file in fs::read_dir(space).unwrap().flatten() {
            fs::write(file.path(), b"no page").unwrap();
        }
        let server = NodeServer::start(&world, &model, &args);
        let third = answer(server.port, &model, &prompt);
        assert_eq!(third, (first.0, 0), "{split:?}");
        server.stop(nodes);
    }
}

#[test]
fn nothing_is_written_when_it_is_off() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = ["--context", "1024", "--prefix-cache", "off"];
    let server = NodeServer::start(&world, &model, &args);
    answer(server.port, &model, &letters(200, 1));
    server.stop(1);
    assert!(!world.path("home/prefixes").exists());
}

/// Kills the process that writes, again and again, while it has pages to write. No answer after it
/// differs from one without pages on disk. The test kills 20 times, 300 with `--long`.
#[test]
fn no_kill_gives_a_wrong_token() {
    let rounds: u32 = if long() { 300 } else { 20 };
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = ["--context", "1024", "--parallel", "2"];
    let base = letters(600, 1);
    let prompts = (0..8).map(|i| format!("{}{}", &base[..70 * i], letters(150, 100 + i as u64)));
    let prompts: Vec<String> = prompts.collect();
    let off = [&args[..], &["--prefix-cache", "off"]].concat();
    let server = NodeServer::start(&world, &model, &off);
    let expected = prompts.iter().map(|p| answer(server.port, &model, p).0);
    let expected: Vec<String> = expected.collect();
    server.stop(1);
    let (mut random, mut known) = (SplitMix64::new(5), 0);
    for round in 0..rounds {
        let server = NodeServer::start(&world, &model, &args);
        for _ in 0..=random.below(3) {
            let which = random.below(8);
            let (text, cached) = answer(server.port, &model, &prompts[which]);
            assert_eq!(
                text, expected[which],
                "round {round}, {cached} tokens known"
            );
            known += cached;
        }
        let workers = server.running.workers(1);
        signal(workers[0], Signal::KILL);
        server.running.signal(Signal::KILL);
        wait_gone(&workers, Stopwatch::start());
        if random.below(3) == 0 {
            fs::remove_dir_all(world.path("home/prefixes")).unwrap(); // much to write again
        }
    }
    assert!(known >= 64 * u64::from(rounds), "{known} tokens were known");
}
