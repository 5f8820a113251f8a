//! How far a server is, and waiting for it.

use tokio::sync::watch;

/// A server from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Accepting requests.
    Running,
    /// Answers that are under way are completed.
    Draining,
    /// They are ended.
    Ending,
}

/// Waits until the server has come to `phase`, or is gone.
pub(crate) async fn reach(seen: &mut watch::Receiver<Phase>, phase: Phase) {
    // The value is borrowed under a lock, which must not be kept.
    drop(seen.wait_for(|now| *now >= phase).await);
}
