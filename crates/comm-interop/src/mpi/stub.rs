//! In place of MPI, in a build without it.

use std::sync::Arc;

use super::StartError;
use paceline_comm::Group;

/// MPI, started. There is none in this build.
#[derive(Debug)]
pub enum Session {}

impl Session {
    /// Says that there is no MPI.
    ///
    /// # Errors
    /// [`StartError::Unavailable`].
    pub const fn start() -> Result<Arc<Self>, StartError> {
        Err(StartError::Unavailable)
    }

    /// All ranks that `mpirun` started.
    pub fn world(self: &Arc<Self>) -> Box<dyn Group> {
        match **self {}
    }
}
