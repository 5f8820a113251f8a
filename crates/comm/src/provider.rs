//! The interface of backends above this crate.
//!
//! [`init`](crate::init) takes a list of [`Provider`]s, one for each backend. This module, and no
//! other, publishes the parts that they share with the backends of this crate:
//!
//! - for any provider: [`now`] (the clock), [`SpinPolicy`] (how to wait), [`outcome`] and
//!   [`poll_until`] (sockets), [`fold`] (reductions of bytes), and [`members`] (splits of a group);
//! - to build a group on a [`Transport`]:
//!   - [`JoinRecord`]: how the rank joined;
//!   - [`connect`]: joins the ranks by TCP and links them;
//!   - [`gather`]: exchanges facts over those links;
//!   - [`TransportGroup`]: collectives and messages over any links;
//!   - [`MonitoredGroup`]: the same with a thread that detects the end of a peer;
//! - for zero-copy links: [`ZeroCopy`], [`WriteBack`], [`PeerBytes`], and [`Mapping`] (memory that
//!   a device accepts).
//!
//! [`testing`](crate::testing) has the suite that a provider's groups pass.

use std::fmt;

pub use crate::deadline::now;
pub use crate::heartbeat::{Controls, MonitoredGroup, MonitoredLinks, gather};
pub use crate::join::{JoinRecord, outcome, poll_until, random};
pub use crate::mapping::Mapping;
pub use crate::peer_bytes::{PeerBytes, PeerBytesMut};
pub use crate::reduce::{OperandSide, fold};
pub use crate::sockets::{Sockets, connect};
pub use crate::split::{SplitMember, members};
pub use crate::status::FailureNotice;
pub use crate::transport::{
    Closed, GULP_BYTES, Pause, SpinPolicy, Transport, VirtualLane, WaitInterest, WriteBack,
    ZeroCopy,
};
pub use crate::transport_group::TransportGroup;

use crate::tcp::Addrs;
use crate::{Backend, Deadline, Group, InitError, JoinParams, Plaintext};

/// A backend that joins ranks into a group.
pub trait Provider: fmt::Debug + Sync {
    fn backend(&self) -> Backend;

    /// Joins ranks whose `seat` differs only in rank and listener. Collective.
    ///
    /// # Errors
    /// [`InitError::Plaintext`] if the backend cannot encrypt and plaintext is not allowed;
    /// [`InitError::Join`] if the ranks do not meet by TCP; [`InitError::Wire`] otherwise.
    fn join(
        &self,
        seat: JoinParams<'_, Addrs>,
        deadline: Deadline,
    ) -> Result<Box<dyn Group>, InitError>;
}

/// A backend whose launcher assigns the ranks, so that no [`JoinParams`] is needed.
pub trait LaunchedProvider: fmt::Debug + Sync {
    /// Joins the ranks that the launcher started with this one. Collective.
    fn join_placed(&self, deadline: Deadline) -> Result<Box<dyn Group>, InitError>;
}

/// Whether a backend that cannot encrypt may be used.
///
/// # Errors
/// [`InitError::Plaintext`].
pub fn allowed(backend: Backend, plaintext: Plaintext) -> Result<(), InitError> {
    match plaintext {
        Plaintext::Allowed => Ok(()),
        Plaintext::Refused => Err(InitError::Plaintext { backend }),
    }
}
