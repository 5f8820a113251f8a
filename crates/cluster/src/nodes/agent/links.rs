//! Links: the control session with each other node, with its queue and its two threads.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;

use super::super::NodeId;
use super::super::member::{DialTarget, Event, GossipMessage};
use super::super::session::NodeSession;
use super::Inner;

/// Queue length of a link. A node sends some four messages a second to each other node, more when
/// maps differ.
const QUEUE_MAX: usize = 256;

/// Longest message: 64 entries of 16 KiB, as JSON within JSON.
const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// Interval at which a reader checks whether its link is still current.
const READ_LIMIT: Duration = Duration::from_secs(30);

/// The session with a node. Dropping it sends what is queued, then closes the session.
pub(super) struct PeerLink {
    pub(super) session: Arc<NodeSession>,
    pub(super) queue: SyncSender<GossipMessage>,
    /// Time of the last message.
    pub(super) heard: Arc<Mutex<Instant>>,
    number: u64,
    /// Whether the node with the lower id connected.
    is_preferred: bool,
}

/// A newly established session.
pub(super) struct NewLink {
    pub(super) session: NodeSession,
    /// The dialled target; `None` if the other node connected.
    pub(super) target: Option<DialTarget>,
    /// The era in which its handshake began.
    pub(super) era: u64,
}

impl Inner {
    /// Makes a session the link with its node. Of two sessions made at the same time, both nodes
    /// keep the one that the lower id made.
    pub(super) fn link(self: &Arc<Self>, fresh: NewLink) {
        let NewLink {
            session,
            target,
            era,
        } = fresh;
        let mut state = lock(&self.state);
        let (own, id) = (state.member.own(), session.peer());
        if era != state.era || state.stopped || id == own {
            return;
        }
        let is_preferred = (own < id) == target.is_some();
        let boot = session.hello().boot;
        let keeps_old = state.links.get(&id).is_some_and(|old| {
            old.session.hello().boot == boot && old.is_preferred && !is_preferred
        });
        if !keeps_old {
            let number = state.next_link;
            state.next_link += 1;
            let Some(link) = self.start_link(session, number, is_preferred) else {
                return;
            };
            state.note(&link.session.hello().name.clone(), None);
            state.links.insert(id, link);
        }
        self.step(&mut state, Event::Linked { id, target });
    }

    fn start_link(
        self: &Arc<Self>,
        session: NodeSession,
        number: u64,
        is_preferred: bool,
    ) -> Option<PeerLink> {
        let session = Arc::new(session);
        let (queue, messages) = sync_channel(QUEUE_MAX);
        let heard = Arc::new(Mutex::new(Instant::now()));
        let writing = Arc::clone(&session);
        self.spawn("write", move || write(&writing, &messages))
            .ok()?;
        let (inner, reading) = (Arc::clone(self), Arc::clone(&session));
        let noted = Arc::clone(&heard);
        let read = move || inner.read(&reading, number, &noted);
        self.spawn("read", read).ok()?;
        Some(PeerLink {
            session,
            queue,
            heard,
            number,
            is_preferred,
        })
    }

    /// Passes messages to the member until the session ends or is replaced. Its writer closes it
    /// once the queue is sent, including the last message of a leaving node.
    fn read(self: &Arc<Self>, session: &NodeSession, number: u64, heard: &Mutex<Instant>) {
        let from = session.peer();
        loop {
            let message = match session.recv(MESSAGE_BYTES_MAX, READ_LIMIT) {
                Ok(Some(bytes)) => match GossipMessage::read(&bytes) {
                    Ok(Some(message)) => Some(message),
                    Ok(None) if self.is_link(from, number) => continue,
                    Ok(None) => return,
                    Err(_) => None,
                },
                Ok(None) if self.is_link(from, number) => continue,
                Ok(None) => return,
                Err(_) => None,
            };
            let Some(message) = message else { break };
            *lock(heard) = Instant::now();
            let mut state = lock(&self.state);
            if state
                .links
                .get(&from)
                .is_none_or(|link| link.number != number)
            {
                return;
            }
            self.step(&mut state, Event::Received { from, message });
        }
        session.close();
        self.lost(from, number);
    }

    fn is_link(&self, id: NodeId, number: u64) -> bool {
        let state = lock(&self.state);
        let link = state.links.get(&id);
        link.is_some_and(|link| link.number == number)
    }

    fn lost(self: &Arc<Self>, id: NodeId, number: u64) {
        let mut state = lock(&self.state);
        if state
            .links
            .get(&id)
            .is_some_and(|link| link.number == number)
        {
            state.links.remove(&id);
            self.step(&mut state, Event::Unlinked(id));
        }
    }
}

/// Sends queued messages; closes the session when the link is dropped or a send fails.
fn write(session: &NodeSession, messages: &Receiver<GossipMessage>) {
    while let Ok(message) = messages.recv() {
        let bytes = serde_json::to_vec(&message).expect("a message is JSON");
        if session.send(&bytes).is_err() {
            break;
        }
    }
    session.close();
}
