//! The API for wires that stand above this crate.
//!
//! [`init`](crate::init) takes a list of [`Provider`]s, each of which joins ranks by one wire. What
//! they share with the wires of this crate is published here, and nowhere else:
//!
//! - for any provider: [`now`] (the clock), [`Patience`] (how to wait), [`outcome`] and
//!   [`poll_until`] (sockets), [`fold`] (reductions of bytes), and [`members`] (parts of a group);
//! - to make a group of links that a [`Transport`] has:
//!   - [`Origin`]: what a rank was told;
//!   - [`connect`]: the ranks meet by TCP, and have links over it;
//!   - [`gather`]: what they tell each other over those links;
//!   - [`Linked`]: collectives and messages over any links;
//!   - [`Keeping`]: the same with a thread that notices when a peer ends;
//! - for links that do not copy: [`Lend`], [`ComeBack`], [`Lent`], and [`Mapping`] (memory that a
//!   device takes).
//!
//! [`testing`](crate::testing) has the suite that a provider's groups pass.

use std::fmt;

pub use crate::deadline::now;
pub use crate::join::{Origin, outcome, poll_until, random};
pub use crate::keeping::{Controls, Keeping, Kept, gather};
pub use crate::lent::{Lent, LentMut};
pub use crate::linked::Linked;
pub use crate::mapping::Mapping;
pub use crate::reduce::{Side, fold};
pub use crate::sockets::{Sockets, connect};
pub use crate::split::{Member, members};
pub use crate::status::News;
pub use crate::transport::{
    Closed, ComeBack, GULP_BYTES, Lane, Lend, Patience, Pause, Transport, Want,
};

use crate::tcp::Addrs;
use crate::{Backend, Deadline, Group, InitError, Plaintext, Seat};

/// A wire by which ranks become a group.
pub trait Provider: fmt::Debug + Sync {
    /// Which one.
    fn backend(&self) -> Backend;

    /// Joins the ranks that have the same `seat` but for their own part of it. Collective.
    ///
    /// # Errors
    /// [`InitError::Plaintext`] where the wire cannot encrypt and nobody has allowed that;
    /// [`InitError::Join`] where the ranks do not meet by TCP; [`InitError::Wire`] otherwise.
    fn join(&self, seat: Seat<'_, Addrs>, deadline: Deadline) -> Result<Box<dyn Group>, InitError>;
}

/// A wire whose ranks have their places from a launcher, and need no [`Seat`].
pub trait Placed: fmt::Debug + Sync {
    /// Joins the ranks that the launcher started with this one. Collective.
    ///
    /// # Errors
    /// As [`Provider::join`].
    fn join_placed(&self, deadline: Deadline) -> Result<Box<dyn Group>, InitError>;
}

/// Whether a wire that cannot encrypt may be used.
///
/// # Errors
/// [`InitError::Plaintext`].
pub fn allowed(backend: Backend, plaintext: Plaintext) -> Result<(), InitError> {
    match plaintext {
        Plaintext::Allowed => Ok(()),
        Plaintext::Refused => Err(InitError::Plaintext { backend }),
    }
}
