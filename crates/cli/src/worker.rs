//! `paceline worker`: one rank of an instance. Started by `run`, `up` and `bench`, not by people.

use crate::load;
use std::io::Error as IoError;

/// Runs the worker; the parent is told what fails, so nothing is printed.
///
/// # Errors
/// What failed.
pub(crate) fn run() -> anyhow::Result<()> {
    let kernels = |threads| load::kernels(threads).map_err(IoError::other);
    match paceline_node::worker::run(kernels) {
        Ok(never) => match never {},
        Err(error) => Err(error.into()),
    }
}
