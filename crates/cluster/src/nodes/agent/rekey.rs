//! A new cluster key when a node is revoked, so that the old one lets in no other identity of it.
//!
//! ```text
//! revoker         writes the revocation, draws a key, and uses it from now on
//! revoker         -> key, revocations   to each living node, over a session by the key before
//! node            takes the revocations in first, then the key
//! node that was away  comes with a key of before: a member that is not revoked gets the new one
//! ```
//! Sessions go on: only handshakes use the key. Each node keeps the last [`FORMER_MAX`] keys to
//! know nodes that were away, which must be members that it knows. Of two keys that were drawn at
//! the same time the higher one stays.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use paceline_base::lock;
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

use super::super::member::{Event, Life};
use super::super::session::{self, Hello, Purpose};
use super::super::{ClusterKey, Key, NodeId};
use super::channel::{self, Channel};
use super::state::State;
use super::{Error, HANDSHAKE_LIMIT, Inner};

/// Service that takes the new key.
pub(super) const SERVICE: &str = "key";

/// Keys of before that are kept. A node that was away for more revocations has to join again.
pub(super) const FORMER_MAX: usize = 4;

/// Most changes of the key that a node may have missed: a cluster has at most a hundred nodes, and
/// one change for each revocation.
const AHEAD_MAX: u64 = 1024;

/// Nodes that are told at a time; others come again.
const STALE_MAX: usize = 64;

/// Longest message: a key, and the revocations that a map has room for.
const NEWS_BYTES_MAX: usize = 512 << 10;

/// A key that replaces others.
#[derive(Serialize, Deserialize)]
struct News {
    /// Counts changes of the key.
    generation: u64,
    token: String,
    /// Nodes that must not have it.
    revoked: Vec<NodeId>,
}

/// Nodes with an earlier key, and which.
pub(super) type Stale = BTreeMap<NodeId, ClusterKey>;

impl Drop for News {
    fn drop(&mut self) {
        self.token.zeroize();
    }
}

impl State {
    /// Remembers that a node has an earlier key; it is told the present one soon.
    pub(super) fn note_stale(&mut self, id: NodeId, key: &ClusterKey) {
        if self.stale.len() < STALE_MAX {
            self.stale.insert(id, key.clone());
        }
    }

    /// Whether another key replaces the present one. A count that is far ahead is nobody's.
    fn is_older(&self, generation: u64, key: &ClusterKey) -> bool {
        let is_near = generation.saturating_sub(self.generation) <= AHEAD_MAX;
        is_near && (self.generation, self.key.bytes()) < (generation, key.bytes())
    }
}

impl Inner {
    /// The present key, then those of before, the last one first.
    pub(super) fn keys(&self) -> Vec<ClusterKey> {
        let state = lock(&self.state);
        let present = std::iter::once(&state.key);
        present.chain(&state.former).cloned().collect()
    }

    /// Says why somebody with a key of before is refused: only members that were away are let in.
    pub(super) fn judge_former(&self, id: NodeId) -> Option<String> {
        let state = lock(&self.state);
        let is_known = state.member.map().get(&Key::Node(id)).is_some();
        (!is_known).then(|| {
            "the cluster's key has changed: `paceline join` with a new code or token lets it in"
                .to_owned()
        })
    }

    /// Draws a new key and has all living nodes told.
    ///
    /// # Errors
    /// No random numbers, or files that cannot be written: the key stays.
    pub(super) fn renew_key(&self) -> Result<(), Error> {
        let key = ClusterKey::random()?;
        let mut state = lock(&self.state);
        let (before, generation) = (state.key.clone(), state.generation.saturating_add(1));
        self.take_key(&mut state, generation, key)?;
        let lives = |life: Life| matches!(life, Life::Alive | Life::Suspect);
        let living = state.member.peers().filter(|peer| lives(peer.life));
        let living: Vec<NodeId> = living.map(|peer| peer.id).collect();
        for id in living {
            state.note_stale(id, &before);
        }
        Ok(())
    }

    /// Puts a key in the place of the present one, on disk first.
    fn take_key(&self, state: &mut State, generation: u64, key: ClusterKey) -> Result<(), Error> {
        let mut former = state.former.clone();
        former.retain(|known| *known != key);
        former.insert(0, state.key.clone());
        former.truncate(FORMER_MAX);
        self.files.save_renewed(&key, generation, &former)?;
        (state.key, state.generation, state.former) = (key, generation, former);
        state.invitation = None; // a machine that was cut off may have seen the code
        Ok(())
    }

    /// Tells nodes with an earlier key the present one, each on a thread of its own.
    pub(super) fn hand_keys(self: &Arc<Self>) {
        let stale = std::mem::take(&mut lock(&self.state).stale);
        for (id, key) in stale {
            let inner = Arc::clone(self);
            // A node that is not told now shows its key again when it is met next.
            let _ = self.spawn("key", move || inner.hand_key(id, &key));
        }
    }

    fn hand_key(&self, id: NodeId, key: &ClusterKey) {
        let deadline = Instant::now() + HANDSHAKE_LIMIT;
        let places = lock(&self.state).places(id);
        for place in places {
            let judge = |found: NodeId, hello: &Hello| match found == id {
                true => self.judge(id, hello),
                false => Some("another node has this address now".to_owned()),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let dialled = self.with_own(key, &judge, |own| {
                session::dial(own, place, Purpose::Service, left)
            });
            let channel = dialled.map_err(Error::from);
            let channel = channel.and_then(|it| channel::ask(it, SERVICE, HANDSHAKE_LIMIT));
            if channel.is_ok_and(|channel| self.tell_key(&channel)) {
                return;
            }
        }
    }

    /// Sends the present key; whether the other node has it.
    fn tell_key(&self, channel: &Channel) -> bool {
        let news = {
            let state = lock(&self.state);
            let revoked = state
                .member
                .map()
                .iter()
                .filter_map(|(key, register)| match key {
                    Key::Revoked(id) if register.value.is_some() => Some(*id),
                    _ => None,
                });
            News {
                generation: state.generation,
                token: state.key.token().to_string(),
                revoked: revoked.collect(),
            }
        };
        let mut message = serde_json::to_vec(&news).expect("a key is JSON");
        let sent = channel.send(&message).is_ok();
        message.zeroize();
        sent && matches!(channel.recv(1, HANDSHAKE_LIMIT), Ok(Some(_)))
    }

    /// Takes a new key from another node.
    pub(super) fn answer_key(self: &Arc<Self>, channel: &Channel) {
        let Ok(Some(mut message)) = channel.recv(NEWS_BYTES_MAX, HANDSHAKE_LIMIT) else {
            return;
        };
        let news = serde_json::from_slice::<News>(&message);
        message.zeroize();
        let Ok(news) = news else { return };
        let Ok(key) = ClusterKey::from_token(&news.token) else {
            return;
        };
        match self.learn_key(&news, key) {
            Ok(true) => self.tell("a node was revoked: the cluster has a new key and token"),
            Ok(false) => {}
            Err(error) => return self.tell(&format!("warning: the cluster's key stays: {error}")),
        }
        let _ = channel.send(&[1]);
    }

    /// Takes revocations in, then the key if it replaces the present one: whoever is revoked must
    /// not get it from this node.
    fn learn_key(self: &Arc<Self>, news: &News, key: ClusterKey) -> Result<bool, Error> {
        let mut state = lock(&self.state);
        for id in &news.revoked {
            let revoked = Key::Revoked(*id);
            if state.member.map().get(&revoked).is_none() {
                let (key, epoch, value) = (revoked, 0, Some("{}".to_owned()));
                self.step(&mut state, Event::Write { key, epoch, value });
            }
        }
        if !state.is_older(news.generation, &key) {
            return Ok(false);
        }
        self.take_key(&mut state, news.generation, key)?;
        Ok(true)
    }
}
