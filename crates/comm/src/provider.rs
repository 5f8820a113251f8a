//! What wires are made of that stand above this crate.
//!
//! [`init`](crate::init) takes a list of [`Provider`]s, each of which joins ranks by one wire. What
//! they share with the wires of this crate is published here: the clock, how to wait, what a socket
//! did, reductions of bytes, and who becomes a member of a part. [`testing`](crate::testing) has
//! the suite that a provider's groups pass.

use std::fmt;

pub use crate::deadline::now;
pub use crate::reduce::{Side, fold};
pub use crate::split::{Member, members};
pub use crate::tcp::sockets::{outcome, poll_until};
pub use crate::transport::{Closed, Patience, Pause};

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
