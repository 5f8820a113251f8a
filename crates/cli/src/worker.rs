//! `paceline worker`: one rank of an instance. Started by `run`, `up` and `bench`, not by people.

use paceline_comm::mlx_ring::Plaintext;

use crate::error::Error;
use crate::{home, load, wires};
use std::io::Error as IoError;

/// Runs the worker; the parent is told what fails, so nothing is printed.
///
/// # Errors
/// What failed; [`Error::WorkerByHand`] when there is no parent to tell.
pub(crate) fn run() -> anyhow::Result<()> {
    let kernels = |threads, pinning| load::kernels_at(threads, pinning).map_err(IoError::other);
    // Whoever started this has asked for plaintext, or not been given such a wire.
    let wires = |backend| wires::of(backend, Plaintext::Allowed).map_err(IoError::other);
    match paceline_node::worker::run(kernels, wires, home::mlx_places()?) {
        Ok(never) => match never {},
        Err(error) if error.is_by_hand() => Err(Error::WorkerByHand.into()),
        Err(error) => Err(error.into()),
    }
}

/// `paceline template`: the chat template of one model, within limits.
///
/// # Errors
/// As of [`run`].
pub(crate) fn template() -> anyhow::Result<()> {
    match paceline_node::interpreter::run() {
        Ok(never) => match never {},
        Err(error) if error.is_by_hand() => Err(Error::WorkerByHand.into()),
        Err(error) => Err(error.into()),
    }
}
