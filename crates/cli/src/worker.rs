//! `paceline worker`: one rank of an instance. Started by `run`, `up` and `bench`, not by people.

use crate::error::Error;
use crate::home;
use crate::load;
use std::io::Error as IoError;

/// Runs the worker; the parent is told what fails, so nothing is printed.
///
/// # Errors
/// What failed; [`Error::WorkerByHand`] when there is no parent to tell.
pub(crate) fn run() -> anyhow::Result<()> {
    let kernels = |threads| load::kernels(threads).map_err(IoError::other);
    match paceline_node::worker::run(kernels, home::mlx_places()?) {
        Ok(never) => match never {},
        Err(error) if error.is_by_hand() => Err(Error::WorkerByHand.into()),
        Err(error) => Err(error.into()),
    }
}
