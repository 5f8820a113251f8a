//! Lifecycle phase of a server.

use tokio::sync::watch;

/// A server from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ServerPhase {
    /// Accepting requests.
    Running,
    /// Completing responses in progress.
    Draining,
    /// Aborting responses in progress.
    Ending,
}

/// Waits until the server reaches `phase`, or is gone.
pub(crate) async fn reach(seen: &mut watch::Receiver<ServerPhase>, phase: ServerPhase) {
    // Drops the borrowed value, which holds a lock.
    drop(seen.wait_for(|now| *now >= phase).await);
}
