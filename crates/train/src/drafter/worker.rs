//! A worker of a draft head's training: it answers prompts until it gets all answers, and computes
//! leaves from then on.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

use super::answers::group;
use super::{DrafterRun, split};
use crate::error::Error;
use crate::messages::{ANSWERS_FILE, FromWorker, ToWorker};
use crate::worker::{LeafWorker, RunChannel, unexpected};

/// Does the work of `run` that its parent asks for. Returns only with an error.
pub(crate) fn work(
    channel: &RunChannel,
    run: &DrafterRun,
    exchange: PathBuf,
) -> Result<Infallible, Error> {
    let (prompts, _) = run.prompts()?;
    let mut answering = run.answering()?;
    loop {
        match channel.recv(Duration::MAX)? {
            Some(ToWorker::Answer { first, start, end }) => {
                let prompts = prompts.get(first..).unwrap_or_default();
                let mut answers = Vec::new();
                for nth in start..end {
                    answers.extend(answering.answer(group(prompts, nth))?);
                }
                channel.send(&FromWorker::Answered {
                    start,
                    end,
                    answers,
                })?;
            }
            Some(ToWorker::Learn) => break,
            None => {}
            other => return Err(unexpected(other.as_ref(), "Answer")),
        }
    }
    drop(answering); // its memory is the head's now
    let (answers, n) = run.known_answers(&exchange.join(ANSWERS_FILE))?;
    let (train, _) = split(answers.into_answers(), n);
    LeafWorker::new(channel, run.training(train)?, exchange).serve()
}
