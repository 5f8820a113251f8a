//! Connecting to other nodes.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::lock;

use super::super::discovery::DiscoveryMethod;
use super::super::member::DialTarget;
use super::super::session::{self, Hello, NodeSession, Purpose};
use super::super::{ClusterKey, NodeId};
use super::links::NewLink;
use super::{DEFAULT_PORT, Error, Inner};

/// Time limit for all addresses of a target together.
const DIAL_LIMIT: Duration = Duration::from_secs(5);

/// Time limit for one address, so that a dead one leaves time for the others. A handshake takes one
/// or two milliseconds plus three round trips.
pub(super) const ADDRESS_LIMIT: Duration = Duration::from_millis(1500);

impl Inner {
    /// Tries to make a link; the member requests it again after a failure.
    pub(super) fn dial(self: &Arc<Self>, target: &DialTarget, era: u64) {
        let deadline = Instant::now() + DIAL_LIMIT;
        let reached = match target {
            DialTarget::Node(id) => self.reach(*id, Purpose::Control, deadline),
            DialTarget::Peer(text) => self.reach_peer(text, deadline),
        };
        lock(&self.state).dialled(target);
        self.judge_dial(target, reached.as_ref().err());
        if let Ok(session) = reached {
            let target = Some(target.clone());
            self.link(NewLink {
                session,
                target,
                era,
            });
        }
    }

    /// Records why a target cannot be reached, for `paceline nodes`.
    fn judge_dial(&self, target: &DialTarget, error: Option<&Error>) {
        if let Some(Error::Session(error)) = error {
            self.refused(error);
        }
        if let DialTarget::Peer(text) = target {
            let problem = error.map(|error| format!("{error}; {}", advice(error)));
            lock(&self.state).note(&format!("peer {text}"), problem);
        }
    }

    /// A session with a node at any of its addresses.
    pub(super) fn reach(
        &self,
        id: NodeId,
        purpose: Purpose,
        deadline: Instant,
    ) -> Result<NodeSession, Error> {
        let places = lock(&self.state).places(id);
        let mut last = Error::NoAddress { id };
        for place in places {
            match self.dial_at(place, Some(id), purpose, deadline) {
                Ok(session) => {
                    let mut state = lock(&self.state);
                    let how = state.book.how(id);
                    state.book.worked(id, place, how);
                    return Ok(session);
                }
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    fn reach_peer(&self, text: &str, deadline: Instant) -> Result<NodeSession, Error> {
        let mut last = Error::Peer {
            text: text.to_owned(),
            reason: "it has no address".to_owned(),
        };
        for place in resolve(text)? {
            match self.dial_at(place, None, Purpose::Control, deadline) {
                Ok(session) => {
                    let id = session.peer();
                    lock(&self.state)
                        .book
                        .worked(id, place, DiscoveryMethod::Peer);
                    return Ok(session);
                }
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    /// A session with the node at `place`, which must have the id `wanted` if one is given.
    pub(super) fn dial_at(
        &self,
        place: SocketAddr,
        wanted: Option<NodeId>,
        purpose: Purpose,
        deadline: Instant,
    ) -> Result<NodeSession, session::Error> {
        let era = lock(&self.state).era;
        let keys = self.keys();
        let dialled = self.dial_with(&keys[0], (place, wanted, purpose), deadline);
        let Err(error) = dialled else { return dialled };
        // A node that was offline during a key change does not accept the present key.
        if !matches!(error, session::Error::Closed | session::Error::Broken(_)) {
            return Err(error);
        }
        match self.hand_former(&keys[1..], (place, wanted), (era, deadline)) {
            true => self.dial_with(&keys[0], (place, wanted, purpose), deadline),
            false => Err(error),
        }
    }

    /// A session by one of the keys; former keys are used with known members only.
    pub(super) fn dial_with(
        &self,
        key: &ClusterKey,
        (place, wanted, purpose): (SocketAddr, Option<NodeId>, Purpose),
        deadline: Instant,
    ) -> Result<NodeSession, session::Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(session::Error::Late { limit: DIAL_LIMIT });
        }
        let judge = |id: NodeId, hello: &Hello| match wanted {
            Some(wanted) if wanted != id => Some("another node has this address now".to_owned()),
            _ => {
                let refused = self.judge(id, hello);
                refused.or_else(|| self.judge_former(id, key))
            }
        };
        let session = self.with_own(key, &judge, |own| {
            session::dial(own, place, purpose, left.min(ADDRESS_LIMIT))
        })?;
        // The peer's verdict may have arrived after this node's check.
        match judge(session.peer(), session.hello()) {
            Some(reason) => {
                let name = session.hello().name.clone();
                Err(session::Error::Refusing { name, reason })
            }
            None => Ok(session),
        }
    }
}

/// Advice for a peer that cannot be reached.
fn advice(error: &Error) -> &'static str {
    match error {
        Error::Session(session::Error::Connect { .. }) => {
            "does `paceline up` run there, and does its firewall let the control port in?"
        }
        Error::Session(session::Error::Closed | session::Error::Broken(_)) => {
            "is it in this cluster? `paceline join` lets it in"
        }
        Error::Session(session::Error::Stranger) => "it needs `paceline join`",
        _ => "it is tried again",
    }
}

/// Addresses of `host` or `host:port`; an IPv6 address with a port has brackets.
pub(super) fn resolve(text: &str) -> Result<Vec<SocketAddr>, Error> {
    let bad = |reason: String| Error::Peer {
        text: text.to_owned(),
        reason,
    };
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, DEFAULT_PORT)]);
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (
            host,
            port.parse()
                .map_err(|_| bad(format!("{port:?} is no port, expected host or host:port")))?,
        ),
        None => (text, DEFAULT_PORT),
    };
    let host = host.trim_matches(['[', ']']);
    let found = (host, port).to_socket_addrs();
    Ok(found.map_err(|error| bad(error.to_string()))?.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_may_have_a_port() {
        let only = |text: &str| resolve(text).unwrap()[0].to_string();
        assert_eq!(only("10.0.0.7"), "10.0.0.7:52416");
        assert_eq!(only("10.0.0.7:99"), "10.0.0.7:99");
        assert_eq!(only("::1"), "[::1]:52416");
        assert_eq!(only("[::1]:99"), "[::1]:99");
        let error = resolve("10.0.0.7:x").unwrap_err().to_string();
        assert_eq!(
            error,
            "peer \"10.0.0.7:x\": \"x\" is no port, expected host or host:port"
        );
    }
}
