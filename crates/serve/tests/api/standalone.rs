//! The HTTP API in front of a "model" that says what a script has, for clients of tools.
//!
//! Usage: `scripted`. It prints
//! `listening on URL` to stderr and ends when its standard input does.
//!
//! Tokenizer, chat template, readers and grammars are the real ones; only the choice of tokens is
//! not. The answer follows from the prompt:
//!
//! | the prompt | the answer |
//! |---|---|
//! | asks for a round trip, of a tool that runs commands | a call of it; after that `Done: RESULT`
//! |
//! | ends with a tool's result | `It has RESULT degrees.` |
//! | has the tool `look` | a thought, a word and a call of `look` |
//! | is held to a schema | `{"name": "Ada", "age": 36}` |
//! | has a hole to fill (`/infill`) | `Hello, world.` |
//! | else | `Hello, world.` |

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a program for tests: it fails as a test does"
)]

use std::collections::BTreeSet;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use paceline_engine::{
    Finish, GenerationRequest, Reply, RequestFailure, Service, ServiceStatus, Sink, State,
    Submission, Ticket,
};
use paceline_serve::{Config, HttpServer, ServedModel, TimeSource};
use paceline_text::grammar::Start;
use serde_json::{Value, json};

#[allow(dead_code, reason = "tests use more of it")]
#[path = "tiny.rs"]
mod tiny;

/// Pages of the prefix cache that it pretends to have.
const PAGE: usize = 64;

/// A thought, a word and a call, in pieces that cut markers and characters' names.
const CALL: [&str; 8] = [
    "<think>I must <tool_call> look",
    " it up.</think>\n\nI loo",
    "k.\n<tool_",
    "call>\n{\"name\": \"lo",
    "ok\", \"arguments\": {\"city\":",
    " \"Köln\", \"da",
    "ys\": 3}}\n</tool_cal",
    "l>",
];

/// Words of a user's message that have a coding agent run [`COMMAND`].
const ROUND_TRIP: &str = "make a round trip";
const COMMAND: &str = "echo round-trip-$((40+2))";

/// Tools of coding agents that run a command: Claude Code's, OpenCode's, and those that Codex has
/// had; their arguments.
fn runners() -> [(&'static str, Value); 5] {
    let described = json!({"command": COMMAND, "description": "Says something"});
    [
        ("Bash", described.clone()),
        ("bash", described),
        ("exec_command", json!({"cmd": COMMAND})),
        ("shell_command", json!({"command": COMMAND})),
        ("shell", json!({"command": ["bash", "-lc", COMMAND]})),
    ]
}

/// The answer to a coding agent that was told to make a round trip.
fn round_trip(prompt: &str) -> Option<Vec<String>> {
    let (before, after) = prompt.rsplit_once(ROUND_TRIP)?;
    if let Some((_, result)) = after.split_once("tool\n") {
        let told = result
            .split_whitespace()
            .find(|word| word.contains("round-trip-"));
        return Some(vec![format!(
            "Done: {}",
            told.unwrap_or("nothing came back")
        )]);
    }
    let is_there = |name: &str| {
        let spelt = [
            format!("\"name\": \"{name}\""),
            format!("\"name\":\"{name}\""),
        ];
        spelt.iter().any(|name| before.contains(name))
    };
    let (name, arguments) = runners().into_iter().find(|(name, _)| is_there(name))?;
    let call = json!({"name": name, "arguments": arguments});
    Some(vec![
        "I run it.\n<tool_".to_owned(),
        format!("call>\n{call}\n</tool_call>"),
    ])
}

/// Says what the module's table has.
#[derive(Debug, Default)]
struct TableService {
    /// Prompts so far, as the cache that it pretends to have.
    seen: Mutex<BTreeSet<Vec<u32>>>,
}

impl TableService {
    /// Whole pages of the prompt that an earlier one began with.
    fn reused(&self, prompt: &[u32]) -> usize {
        let mut seen = self.seen.lock().unwrap();
        let common = |old: &Vec<u32>| old.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let most = seen.iter().map(common).max().unwrap_or(0);
        seen.insert(prompt.to_vec());
        most.min(prompt.len() - 1) / PAGE * PAGE
    }
}

impl Service for TableService {
    fn accept(&self, submission: Submission, mut sink: Sink) -> Result<(), RequestFailure> {
        let Submission {
            request, tokens, ..
        } = submission;
        let reused = self.reused(&request.prompt);
        std::thread::spawn(move || {
            sink(Reply::PromptRead {
                reused,
                logprobs: None,
                read_by: None,
            });
            let pieces = pieces(&request).into_iter().take(request.max_tokens);
            for text in pieces.skip(tokens.len()) {
                sink(Reply::Token {
                    token: u32::from(text.bytes().next().unwrap_or(b' ')),
                    text,
                    logprobs: None,
                });
            }
            sink(Reply::Finished {
                text: String::new(),
                reason: Finish::EndOfText,
                drafts: paceline_engine::DraftCounts::default(),
            });
        });
        Ok(())
    }

    fn cancel(&self, _ticket: Ticket) {}

    fn status(&self) -> ServiceStatus {
        ServiceStatus {
            state: State::Ready,
            running: 0,
            waiting: 0,
        }
    }
}

fn pieces(request: &GenerationRequest) -> Vec<String> {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let bytes = request
        .prompt
        .iter()
        .filter_map(|id| u8::try_from(*id).ok());
    let prompt = String::from_utf8(bytes.collect()).unwrap_or_default();
    if let Some(said) = round_trip(&prompt) {
        return said;
    }
    let last = prompt.trim_end_matches("assistant\n");
    match last.rsplit_once("tool\n") {
        Some((_, result)) if !result.contains("user\n") => {
            owned(&["It has ", result.trim(), " degrees."])
        }
        _ if prompt.contains("\"name\": \"look\"") || prompt.contains("\"name\":\"look\"") => {
            owned(&CALL)
        }
        _ if is_held(request) => owned(&["{\"name\": \"Ada\"", ", \"age\": 36}"]),
        _ => owned(&["Hello, ", "world."]),
    }
}

/// Whether all of the answer is held to a schema: tools that may be called bind calls alone.
fn is_held(request: &GenerationRequest) -> bool {
    let constraint = request.constraint.as_ref();
    constraint.is_some_and(|it| !matches!(it.start, Start::Lazily { .. }))
}

fn main() {
    let clock = TimeSource {
        now: Instant::now,
        unix_s: || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs(),
    };
    let config = Config::new(0, clock);
    // A token is a byte, and the prompts of coding agents have 100 KB.
    let model = ServedModel {
        context: 1 << 20,
        template: tiny::tool_model().template,
        ..tiny::hole_model()
    };
    let server = HttpServer::bind(config, model, Arc::new(TableService::default())).unwrap();
    let handle = server.handle();
    eprintln!("listening on http://{}", server.addresses()[0]);
    std::thread::spawn(move || {
        // Until the process that started this one is gone.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        handle.shutdown();
    });
    server.run();
}
