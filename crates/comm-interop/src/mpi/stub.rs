//! The stub of MPI for builds without it.

use std::sync::Arc;

use super::StartError;
use paceline_comm::Group;

/// A started MPI; uninhabited in this build.
#[derive(Debug)]
pub enum MpiSession {}

impl MpiSession {
    /// Always fails: this build has no MPI.
    pub const fn start() -> Result<Arc<Self>, StartError> {
        Err(StartError::Unavailable)
    }

    /// All ranks that `mpirun` started.
    pub fn world(self: &Arc<Self>) -> Box<dyn Group> {
        match **self {}
    }
}
