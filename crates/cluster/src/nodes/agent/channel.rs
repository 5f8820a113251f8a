//! Channels between nodes: encrypted message streams to named services.
//!
//! ```text
//! opener    -> session for Purpose::Service (Noise, as of session)
//! opener    -> {"service":"NAME"}
//! acceptor  <- {"refused":null} or {"refused":"why"}
//! both      -> messages, in both directions, until either closes
//! ```
//! Each channel is a separate TCP connection: a full one does not block others, and the receiver's
//! window bounds the bytes in flight.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::lock;
use serde::{Deserialize, Serialize};

use super::super::NodeId;
use super::super::session::{self, NodeSession};
use super::Error;

/// Longest opening message or answer.
pub(super) const OPENING_BYTES_MAX: usize = 1024;

#[derive(Serialize, Deserialize)]
pub(super) struct ServiceOpen {
    pub(super) service: String,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ServiceOpenReply {
    pub(super) refused: Option<String>,
}

/// Messages to and from a service of another node, encrypted, in order, each delivered once.
///
/// Clones are the same channel. All methods may be called from any thread. The channel is closed
/// when its last clone is dropped, and when the other node is declared dead.
#[derive(Clone, derive_more::Debug)]
#[debug("channel to {} of {}", self.service, self.session.peer())]
pub struct ServiceChannel {
    pub(super) session: Arc<NodeSession>,
    pub(super) service: String,
}

impl ServiceChannel {
    /// The node at the other end, proven by its static key.
    pub fn peer(&self) -> NodeId {
        self.session.peer()
    }

    /// The service of this channel.
    pub fn service(&self) -> &str {
        &self.service
    }

    /// The other end's address, which names the interface that the two nodes share.
    pub fn peer_addr(&self) -> Result<SocketAddr, Error> {
        Ok(self.session.peer_addr().map_err(session::Error::Broken)?)
    }

    /// This end's address.
    pub fn own_addr(&self) -> Result<SocketAddr, Error> {
        Ok(self.session.own_addr().map_err(session::Error::Broken)?)
    }

    /// Sends a message. Blocks while the receiver is behind, for at most five seconds.
    ///
    /// # Errors
    /// [`Error::Session`]: the channel is lost.
    pub fn send(&self, message: &[u8]) -> Result<(), Error> {
        Ok(self.session.send(message)?)
    }

    /// The next message, of at most `bytes_max`; `None` when none is complete within `timeout`.
    /// The next call continues a partial message.
    ///
    /// # Errors
    /// [`Error::Session`]: the channel is closed, broken, or the message is too long.
    pub fn recv(&self, bytes_max: usize, timeout: Duration) -> Result<Option<Vec<u8>>, Error> {
        Ok(self.session.recv(bytes_max, timeout)?)
    }

    /// Closes both directions. A receive that waits returns an error.
    pub fn close(&self) {
        self.session.close();
    }
}

/// Serves one channel on its own thread; the channel may outlive the call.
pub type Handler = Arc<dyn Fn(ServiceChannel) + Send + Sync>;

/// Handlers by name of their service.
#[derive(Default)]
pub(super) struct Services(Mutex<BTreeMap<String, Handler>>);

impl Services {
    pub(super) fn add(&self, service: &str, handler: Handler) {
        lock(&self.0).insert(service.to_owned(), handler);
    }

    fn get(&self, service: &str) -> Option<Handler> {
        lock(&self.0).get(service).cloned()
    }

    /// Answers an opening message on a new session; returns the handler if it is accepted. `refuse`
    /// returns the reason if the session may not open a service.
    pub(super) fn answer(
        &self,
        session: &NodeSession,
        refuse: &dyn Fn(&str) -> Option<String>,
        limit: Duration,
    ) -> Result<(String, Handler), session::Error> {
        let opening = session.recv(OPENING_BYTES_MAX, limit)?;
        let opening = opening.ok_or(session::Error::Late { limit })?;
        let opening: ServiceOpen =
            serde_json::from_slice(&opening).map_err(|_| session::Error::Protocol)?;
        let service = &opening.service;
        let refused = refuse(service);
        let handler = self.get(service).filter(|_| refused.is_none());
        let none = || format!("this node has no service {service:?}");
        let refused = refused.or_else(|| handler.is_none().then(none));
        session
            .send(&serde_json::to_vec(&ServiceOpenReply { refused }).expect("an answer is JSON"))?;
        let handler = handler.ok_or(session::Error::Closed)?;
        Ok((opening.service, handler))
    }
}

/// Requests a service on a new session.
pub(super) fn ask(
    session: NodeSession,
    service: &str,
    limit: Duration,
) -> Result<ServiceChannel, Error> {
    let service = service.to_owned();
    let opening = ServiceOpen {
        service: service.clone(),
    };
    session.send(&serde_json::to_vec(&opening).expect("an opening is JSON"))?;
    let answer = session.recv(OPENING_BYTES_MAX, limit)?;
    let answer = answer.ok_or(session::Error::Late { limit })?;
    let answer: ServiceOpenReply =
        serde_json::from_slice(&answer).map_err(|_| session::Error::Protocol)?;
    match answer.refused {
        Some(reason) => Err(Error::NoService {
            node: session.hello().name.clone(),
            reason,
        }),
        None => Ok(ServiceChannel {
            session: Arc::new(session),
            service,
        }),
    }
}
