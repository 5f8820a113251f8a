//! An address of this rank, and the callers that have come to it.
//!
//! MLX's wire has no handshake, so any caller that connects is taken for the neighbour. Two signs
//! tell callers apart:
//! - A caller that went without a word does not count: a port scan, a health check.
//! - A caller that spoke and went may be a stranger, or a neighbour that sent a message and was
//!   done. It waits a while for another, which would be the neighbour.
//!
//! If two stay, one is a stranger, and which cannot be told.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use paceline_base::Rank;

use super::connect::{JoinError, prepare, system};
use super::run::{has_ended, is_closed};
use paceline_comm::provider::now;

/// How long another is waited for after one that spoke and went. Long beside what ranks that are
/// started together differ by on one machine, and short for a person.
const ANOTHER: Duration = Duration::from_secs(1);

/// Most callers held at a time; further ones wait in the system's queue.
const CALLERS_MAX: usize = 16;

pub(super) struct Door<'a> {
    listener: &'a TcpListener,
    pub(super) addr: SocketAddr,
    callers: Vec<TcpStream>,
    /// Since when only callers that have gone are here.
    gone_since: Option<Instant>,
}

impl<'a> Door<'a> {
    pub(super) fn open(listener: &'a TcpListener, addr: SocketAddr) -> Result<Self, JoinError> {
        let set = listener.set_nonblocking(true);
        set.map_err(system("listen at", addr))?;
        Ok(Self {
            listener,
            addr,
            callers: Vec::new(),
            gone_since: None,
        })
    }

    /// Lets in callers that have come, and out those that do not count.
    pub(super) fn look(&mut self) {
        while self.callers.len() < CALLERS_MAX
            && let Ok((stream, _)) = self.listener.accept()
        {
            self.callers.extend(prepare(stream));
        }
        self.callers.retain(|caller| !is_closed(caller));
        let stays = |caller: &TcpStream| !has_ended(caller);
        if self.callers.iter().any(stays) {
            self.callers.retain(stays);
            self.gone_since = None;
        } else if self.callers.is_empty() {
            self.gone_since = None;
        } else {
            self.gone_since.get_or_insert_with(now);
        }
    }

    /// Whether the neighbour seems to be here.
    pub(super) fn is_filled(&self) -> bool {
        let has_waited = |since: Instant| now().saturating_duration_since(since) >= ANOTHER;
        !self.callers.is_empty() && self.gone_since.is_none_or(has_waited)
    }

    /// The connection of `neighbour`, the only one that is here.
    pub(super) fn into_caller(mut self, neighbour: Rank) -> Result<TcpStream, JoinError> {
        match (self.callers.pop(), &self.callers[..]) {
            (Some(caller), []) => Ok(caller),
            (last, others) => Err(JoinError::Strangers {
                rank: neighbour,
                addr: self.addr,
                callers: others
                    .iter()
                    .chain(&last)
                    .filter_map(|caller| caller.peer_addr().ok())
                    .collect(),
            }),
        }
    }
}
