//! A service whose replies are written in advance, and which remembers what it was asked.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use paceline_engine::{
    Finish, GenerationRequest, Reply, RequestFailure, Service, ServiceStatus, Sink, State,
    Submission, Ticket, TokenLogprobs,
};

use crate::client::PATIENCE;

/// The replies to each request.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Tokens with these ids and texts, then the end.
    Say(Vec<(u32, &'static str)>, Finish),
    /// Tokens, and then nothing until it is cancelled.
    Halt(Vec<(u32, &'static str)>),
    /// A text after a while.
    Late(Duration, &'static str),
    /// This many tokens "x", then a failure.
    Fail(usize, RequestFailure),
    /// Refuses at once.
    Refuse(RequestFailure),
    /// Nothing until it is cancelled.
    Silence,
    /// Tokens "x" without end, as fast as they are taken, until cancelled.
    Endless,
    /// Goes away without a last reply.
    Vanish,
}

#[derive(Default)]
struct RecordedCalls {
    requests: Vec<GenerationRequest>,
    /// Tokens that each came with.
    after: Vec<Vec<u32>>,
    cancelled: BTreeSet<Ticket>,
    /// Threads that reply.
    replying: usize,
}

#[derive(Clone, derive_more::Debug)]
#[debug("Scripted")]
pub(crate) struct ScriptedService {
    shared: Arc<ScriptState>,
}

struct ScriptState {
    script: Mutex<Script>,
    status: Mutex<ServiceStatus>,
    seen: Mutex<RecordedCalls>,
    changed: Condvar,
}

impl ScriptedService {
    pub(crate) fn new(script: Script) -> Self {
        let (running, waiting) = (0, 0);
        let status = ServiceStatus {
            state: State::Ready,
            running,
            waiting,
        };
        let shared = ScriptState {
            script: Mutex::new(script),
            status: Mutex::new(status),
            seen: Mutex::default(),
            changed: Condvar::new(),
        };
        let shared = Arc::new(shared);
        Self { shared }
    }

    pub(crate) fn script(&self, script: Script) {
        *self.shared.script.lock().unwrap() = script;
    }

    pub(crate) fn state(&self, state: State) {
        self.shared.status.lock().unwrap().state = state;
    }

    /// Reports these numbers of running and waiting requests.
    pub(crate) fn queue(&self, running: usize, waiting: usize) {
        let mut status = self.shared.status.lock().unwrap();
        (status.running, status.waiting) = (running, waiting);
    }

    pub(crate) fn requests(&self) -> Vec<GenerationRequest> {
        self.seen().requests.clone()
    }

    pub(crate) fn last(&self) -> GenerationRequest {
        self.seen()
            .requests
            .last()
            .expect("there was a request")
            .clone()
    }

    /// Tokens that the last request came with.
    pub(crate) fn last_after(&self) -> Vec<u32> {
        self.seen().after.last().cloned().unwrap_or_default()
    }

    pub(crate) fn cancelled(&self) -> usize {
        self.seen().cancelled.len()
    }

    /// Waits until `is_so` holds for the numbers of requests, cancelled ones and replying threads.
    pub(crate) fn wait(&self, what: &str, is_so: impl Fn(usize, usize, usize) -> bool) {
        let is_other = |seen: &mut RecordedCalls| {
            !is_so(seen.requests.len(), seen.cancelled.len(), seen.replying)
        };
        let waited = self
            .shared
            .changed
            .wait_timeout_while(self.seen(), PATIENCE, is_other);
        assert!(!waited.unwrap().1.timed_out(), "{what} did not happen");
    }

    fn seen(&self) -> MutexGuard<'_, RecordedCalls> {
        self.shared.seen.lock().unwrap()
    }

    fn is_cancelled(&self, ticket: Ticket) -> bool {
        self.seen().cancelled.contains(&ticket)
    }

    fn play(
        &self,
        script: Script,
        (request, had): (&GenerationRequest, usize),
        ticket: Ticket,
        mut sink: Sink,
    ) {
        let text = |token: u32, text: &str| {
            let logprobs = request.logprobs.map(|n| TokenLogprobs {
                logprob: -0.5,
                top: (0..n as u32)
                    .map(|i| (token + i, -0.5 - i as f32))
                    .collect(),
            });
            let text = text.to_owned();
            Reply::Token {
                token,
                text,
                logprobs,
            }
        };
        let finished = |reason| Reply::Finished {
            text: String::new(),
            reason,
            drafts: paceline_engine::DraftCounts::default(),
        };
        let prompt_read = || Reply::PromptRead {
            reused: 0,
            logprobs: None,
            read_by: None,
        };
        match script {
            Script::Say(tokens, reason) => {
                sink(prompt_read());
                tokens
                    .iter()
                    .skip(had)
                    .for_each(|(token, said)| sink(text(*token, said)));
                sink(finished(reason));
            }
            Script::Halt(tokens) => {
                sink(prompt_read());
                let said = tokens.iter().skip(had);
                said.for_each(|(token, said)| sink(text(*token, said)));
                self.until_cancelled(ticket);
            }
            Script::Late(after, said) => {
                thread::park_timeout(after);
                sink(text(97, said));
                sink(finished(Finish::EndOfText));
            }
            Script::Fail(n, failure) => {
                sink(prompt_read());
                (0..n).for_each(|_| sink(text(97, "x")));
                sink(Reply::Failed(failure));
            }
            Script::Silence => self.until_cancelled(ticket),
            Script::Endless => {
                sink(prompt_read());
                // Long, so that sockets fill soon where this thread gets its core late too.
                let long = "x".repeat(1000);
                while !self.is_cancelled(ticket) {
                    sink(text(97, &long));
                    // About as fast as a small model.
                    thread::park_timeout(Duration::from_micros(100));
                }
            }
            Script::Vanish | Script::Refuse(_) => {}
        }
    }

    fn until_cancelled(&self, ticket: Ticket) {
        let is_left = |seen: &mut RecordedCalls| !seen.cancelled.contains(&ticket);
        drop(
            self.shared
                .changed
                .wait_timeout_while(self.seen(), PATIENCE, is_left),
        );
    }
}

impl Service for ScriptedService {
    /// The script's replies after `tokens` depend on the number of tokens only.
    fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        let Submission {
            ticket,
            request,
            tokens,
        } = submission;
        let script = self.shared.script.lock().unwrap().clone();
        let mut seen = self.seen();
        seen.requests.push((*request).clone());
        seen.after.push(tokens.clone());
        seen.replying += 1;
        drop(seen);
        if let Script::Refuse(failure) = script {
            self.seen().replying -= 1;
            self.shared.changed.notify_all();
            return Err(failure);
        }
        let this = self.clone();
        thread::spawn(move || {
            this.shared.changed.notify_all();
            this.play(script, (&request, tokens.len()), ticket, sink);
            this.seen().replying -= 1;
            this.shared.changed.notify_all();
        });
        Ok(())
    }

    fn cancel(&self, ticket: Ticket) {
        self.seen().cancelled.insert(ticket);
        self.shared.changed.notify_all();
    }

    fn status(&self) -> ServiceStatus {
        self.shared.status.lock().unwrap().clone()
    }
}
