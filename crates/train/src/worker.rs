//! What a worker process runs: leaves for its parent.

use std::convert::Infallible;
use std::time::Duration;

use paceline_cluster::Control;
use paceline_tensor::Kernels;

use crate::crew::{compute, publish};
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker, params_file, roots_file};
use crate::run::Run;
use crate::tensors;

/// Longest wait for the first message.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How long a worker that cannot go on waits to be ended, so that the parent reads why first.
const LAST_WORDS: Duration = Duration::from_millis(200);

type Channel = Control<ToWorker, FromWorker>;

/// Runs a worker on the control channel that is this process's standard input, until the parent
/// ends it or is gone; returns only when something failed, which the parent has been told.
///
/// # Errors
/// What failed; [`Error::Cluster`] when there is no parent.
pub fn run(kernels: impl FnOnce(usize) -> std::io::Result<Kernels>) -> Result<Infallible, Error> {
    let channel = Channel::from_stdin()?;
    let error = match work(&channel, kernels) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    let reason = said(&error);
    if channel.send(&FromWorker::Failed { reason }).is_ok() {
        std::thread::sleep(LAST_WORDS);
    }
    Err(error)
}

fn work(
    channel: &Channel,
    kernels: impl FnOnce(usize) -> std::io::Result<Kernels>,
) -> Result<Infallible, Error> {
    let (job, threads, exchange) = match channel.recv(START_LIMIT)? {
        Some(ToWorker::Start {
            job,
            threads,
            exchange,
        }) => (job, threads, exchange),
        other => return Err(unexpected(other.as_ref(), "Start")),
    };
    let kernels = kernels(threads).map_err(|source| Error::Threads { threads, source })?;
    let run = Run::open(&job, kernels, true)?;
    channel.send(&FromWorker::Ready)?;
    let mut values = (None, Vec::new());
    loop {
        let (step, start, end) = match channel.recv(Duration::MAX)? {
            Some(ToWorker::Compute { step, start, end }) => (step, start, end),
            None => continue,
            other => return Err(unexpected(other.as_ref(), "Compute")),
        };
        if values.0 != Some(step) {
            let path = params_file(&exchange, step);
            match std::fs::read(&path) {
                Ok(bytes) => values = (Some(step), tensors::floats(&bytes)),
                // The step is over: its leaves were others' before this message was read.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::file("read", &path)(error)),
            }
        }
        let (losses, roots) = compute(&run, &values.1, step, start..end);
        let losses = losses.into_iter().map(f64::to_bits).collect();
        let digest = publish(&roots_file(&exchange, step, start, end), &roots)?;
        channel.send(&FromWorker::Done {
            step,
            start,
            end,
            losses,
            digest,
        })?;
    }
}

const fn unexpected(message: Option<&ToWorker>, expected: &'static str) -> Error {
    let got = match message {
        Some(ToWorker::Start { .. }) => "Start",
        Some(ToWorker::Compute { .. }) => "Compute",
        None => "nothing",
    };
    Error::Protocol { got, expected }
}

/// An error with its causes, as one line.
fn said(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
