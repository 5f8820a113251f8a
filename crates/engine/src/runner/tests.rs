//! A runner with a scripted engine, and with a real one.

mod fake;
mod real;

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::{DraftCounts, Finish, GenerationRequest, Reply, Sink};

/// Generous for any machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(60);

fn request(prompt: Vec<u32>, max_tokens: usize) -> GenerationRequest {
    GenerationRequest {
        prompt,
        max_tokens,
        ..GenerationRequest::default()
    }
}

/// The replies to one request.
struct Replies(Receiver<Reply>);

fn sink() -> (Sink, Replies) {
    let (sender, receiver) = channel();
    // The test may have stopped receiving.
    let sink = Box::new(move |reply| drop(sender.send(reply)));
    (sink, Replies(receiver))
}

impl Replies {
    /// All replies until the sink is dropped.
    fn rest(&self) -> Vec<Reply> {
        let mut all = Vec::new();
        loop {
            match self.0.recv_timeout(PATIENCE) {
                Ok(reply) => all.push(reply),
                Err(RecvTimeoutError::Disconnected) => return all,
                Err(RecvTimeoutError::Timeout) => panic!("no end after {all:?}"),
            }
        }
    }
}

fn token(token: u32) -> Reply {
    Reply::Token {
        token,
        text: String::new(),
        logprobs: None,
    }
}

fn finished() -> Reply {
    Reply::Finished {
        text: String::new(),
        reason: Finish::Length,
        drafts: DraftCounts::default(),
    }
}
