//! Key rotation: a new cluster key when a node is revoked, so that the node's key admits no other
//! identity.
//!
//! ```text
//! revoker         writes the revocation, draws a key, and uses it from now on
//! revoker         -> key, revocations   to each living node, over a session by the key before
//! node            takes the revocations in first, then the key
//! node that was away  comes with a key of before: a member that is not revoked gets the new one
//! ```
//! A session by a former key opens only the service that receives the new key: no link, no map, no
//! other service. Its peer gets no name, and must prove that it is a known member.
//!
//! Existing sessions continue: only handshakes use the key. Each node keeps the last [`FORMER_MAX`]
//! keys to recognise nodes that were offline, which must be known members. Of two keys drawn at the
//! same time the higher one stays. Its node draws one more if it did not know the other key's
//! revocation, since it may have sent its key to that revoked node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::lock;
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

use super::super::clock::SKEW_MAX;
use super::super::member::{DialTarget, ENTRIES_MAX, Event, Life, PEERS_MAX};
use super::super::registers::SignedEntry;
use super::super::session::{self, Hello, NodeSession, Purpose};
use super::super::{ClusterKey, NodeId, RegisterKey};
use super::channel::{self, ServiceChannel};
use super::dial::ADDRESS_LIMIT;
use super::files::FORMER_MAX;
use super::state::State;
use super::{Error, HANDSHAKE_LIMIT, Inner};

/// Service that takes the new key.
pub(super) const SERVICE: &str = "key";

/// The reason for refusing a session by a former key; its node gets the new key soon.
pub(super) const OUTDATED: &str = "the cluster's key has changed, and this node has not got it yet";

/// How far a key's count may be ahead of this machine's clock, and of the present key's count, in
/// milliseconds.
const AHEAD_MAX: u64 = SKEW_MAX.as_millis() as u64;

/// Most nodes updated at a time.
const TOLD_MAX: usize = 64;

/// Time before another attempt at a node that did not get the key.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// How long a key stays that a revoked node may have received: the revoking node has drawn another
/// one, which is on its way.
const SHORT_MAX: Duration = Duration::from_secs(10);

/// Longest message in bytes: a key, a thousand revocations of 500 bytes, and facts of their
/// signers.
const NEWS_BYTES_MAX: usize = 1 << 20;

/// A key that replaces others.
#[derive(Serialize, Deserialize)]
struct KeyUpdate {
    /// As of [`State::next_generation`].
    generation: u64,
    token: String,
    /// Revocations of the nodes that must not get it, after the facts of their signers.
    revoked: Vec<SignedEntry>,
}

/// Nodes with an earlier key, and the time of the next attempt to update each.
pub(super) type OutdatedNodes = BTreeMap<NodeId, Instant>;

/// Set if the present key was drawn by this node.
pub(super) struct Drawn {
    /// Nodes known as revoked at that time.
    without: BTreeSet<NodeId>,
    /// Since when a further revoked node is known.
    short: Option<Instant>,
}

impl Drop for KeyUpdate {
    fn drop(&mut self) {
        self.token.zeroize();
    }
}

/// Reads `bytes` as a new key, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<KeyUpdate>(bytes);
}

impl State {
    /// Records that a node has an earlier key; it gets the present one soon.
    pub(super) fn note_stale(&mut self, id: NodeId) {
        if self.stale.len() < PEERS_MAX {
            self.stale.entry(id).or_insert_with(Instant::now);
        }
    }

    fn due_stale(&mut self, now: Instant) -> Vec<NodeId> {
        let due = self.stale.iter_mut().filter(|(_, at)| **at <= now);
        let told = due.take(TOLD_MAX).map(|(id, at)| {
            *at = now + TELL_AGAIN;
            *id
        });
        told.collect()
    }

    fn revoked(&self) -> impl Iterator<Item = NodeId> {
        self.member.map().revoked().iter().copied()
    }

    /// The present key, for a node that has an earlier one.
    fn news(&self) -> KeyUpdate {
        KeyUpdate {
            generation: self.generation,
            token: self.key.token().to_string(),
            revoked: self.member.map().revocations(),
        }
    }

    /// Whether the present key was drawn here without knowledge of a revocation, and no other key
    /// has replaced it for [`SHORT_MAX`]. True at most once in that time.
    fn is_short(&mut self, now: Instant) -> bool {
        let Some(drawn) = &self.drawn else {
            return false;
        };
        let is_short = self.revoked().any(|id| !drawn.without.contains(&id));
        let since = drawn.short.filter(|_| is_short);
        let is_due = since.is_some_and(|since| now.saturating_duration_since(since) >= SHORT_MAX);
        if let Some(drawn) = &mut self.drawn {
            drawn.short = match is_due {
                true => Some(now),
                false => since.or_else(|| is_short.then_some(now)),
            };
        }
        is_due
    }

    /// The count of a new key: the time, in milliseconds since 1970, and more than the present
    /// one's. A recently joined node does not know that count, and draws a later key anyway.
    fn next_generation(&self, wall_ms: u64) -> u64 {
        self.generation.saturating_add(1).max(wall_ms)
    }

    /// Whether another key replaces the present one. A count far ahead is invalid.
    fn is_older(&self, generation: u64, key: &ClusterKey, wall_ms: u64) -> bool {
        let latest = self.generation.max(wall_ms).saturating_add(AHEAD_MAX);
        generation <= latest && (self.generation, self.key.bytes()) < (generation, key.bytes())
    }
}

impl Inner {
    /// The present key, then the former ones, the latest first.
    pub(super) fn keys(&self) -> Vec<ClusterKey> {
        let state = lock(&self.state);
        let present = std::iter::once(&state.key);
        present.chain(&state.former).cloned().collect()
    }

    /// Whether a key is not the present one.
    pub(super) fn is_former(&self, key: &ClusterKey) -> bool {
        lock(&self.state).key != *key
    }

    /// The reason to refuse a peer with a former key: only known members are admitted. The key of a
    /// handshake may be replaced while its peer is silent.
    pub(super) fn judge_former(&self, id: NodeId, key: &ClusterKey) -> Option<String> {
        let state = lock(&self.state);
        let is_known = state.member.map().get(&RegisterKey::Node(id)).is_some();
        (state.key != *key && !is_known).then(|| {
            "the cluster's key has changed: `paceline join` with a new code or token lets it in"
                .to_owned()
        })
    }

    /// The reason why a session by `key` may not open a service, if there is one. A member with a
    /// former key may send a key, and gets the present one soon.
    pub(super) fn refuse_former(
        &self,
        id: NodeId,
        key: &ClusterKey,
        service: &str,
    ) -> Option<String> {
        let stranger = self.judge_former(id, key);
        if stranger.is_some() || service == SERVICE || !self.is_former(key) {
            return stranger;
        }
        lock(&self.state).note_stale(id);
        Some(OUTDATED.to_owned())
    }

    /// Runs `open` towards another node. If that node refuses the present key as outdated, it sends
    /// the newer key, and this function runs `open` again with it.
    pub(super) fn with_newest_key<T>(
        &self,
        deadline: Instant,
        open: impl Fn() -> Result<T, Error>,
    ) -> Result<T, Error> {
        loop {
            let generation = lock(&self.state).generation;
            let opened = open();
            let is_outdated = matches!(&opened, Err(Error::NoService { reason, .. })
                if reason == OUTDATED);
            if !is_outdated || !self.await_key(generation, deadline) {
                return opened;
            }
        }
    }

    /// Waits until this node's key has another count than `before`, at most until `deadline`;
    /// returns whether it has.
    fn await_key(&self, before: u64, deadline: Instant) -> bool {
        let mut state = lock(&self.state);
        while state.generation == before && !state.stopped {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        !state.stopped
    }

    /// Signs revocations whose signer is no longer known, so that newcomers accept them.
    pub(super) fn sign_revocations(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        let own = state.member.own();
        if !state.member.map().has_met(own) {
            return; // its own signature would not count
        }
        for id in state.member.map().orphans() {
            self.step(&mut state, revocation(id));
        }
    }

    /// Draws a new key and sends it to all live nodes.
    ///
    /// # Errors
    /// No random numbers, or files that cannot be written: the key stays.
    pub(super) fn renew_key(&self) -> Result<(), Error> {
        let key = ClusterKey::random()?;
        self.save(); // after a restart the node must know the revocations of its key
        let _turn = self.files.turn();
        let generation = lock(&self.state).next_generation(self.now().wall_ms);
        self.take_key(generation, key)?;
        let mut state = lock(&self.state);
        let without = state.revoked().collect();
        state.drawn = Some(Drawn {
            without,
            short: None,
        });
        let lives = |life: Life| matches!(life, Life::Alive | Life::Suspect);
        let living = state.member.peers().filter(|peer| lives(peer.life));
        let living: Vec<NodeId> = living.map(|peer| peer.id).collect();
        let now = Instant::now();
        state.stale.extend(living.into_iter().map(|id| (id, now)));
        Ok(())
    }

    /// Replaces the present key, on disk first. The caller has the files' turn.
    fn take_key(&self, generation: u64, key: ClusterKey) -> Result<(), Error> {
        let mut former = self.keys();
        former.retain(|known| *known != key);
        former.truncate(FORMER_MAX);
        self.files.save_renewed(&key, generation, &former)?;
        let mut state = lock(&self.state);
        (state.key, state.generation, state.former) = (key, generation, former);
        state.drawn = None;
        state.invitation = None; // the revoked machine may have seen the code
        self.bump(&mut state);
        Ok(())
    }

    /// Draws a new key if a revoked node may have received the present one.
    pub(super) fn cover_revocations(&self) {
        let is_short = lock(&self.state).is_short(Instant::now());
        if is_short && let Err(error) = self.renew_key() {
            self.tell(&format!("warning: the cluster's key stays: {error}"));
        }
    }

    /// Sends the present key to nodes with an earlier one, each on its own thread.
    pub(super) fn hand_keys(self: &Arc<Self>) {
        let (due, era) = {
            let mut state = lock(&self.state);
            (state.due_stale(Instant::now()), state.era)
        };
        for id in due {
            let inner = Arc::clone(self);
            // Without a thread it is tried later.
            let _ = self.spawn("key", move || inner.hand_key(id, era));
        }
    }

    fn hand_key(self: &Arc<Self>, id: NodeId, era: u64) {
        let deadline = Instant::now() + HANDSHAKE_LIMIT;
        let mut places = lock(&self.state).places(id).into_iter();
        let told = places.find_map(|place| self.hand_key_at(place, id, (era, deadline)));
        let mut state = lock(&self.state);
        let lives = matches!(state.member.life(id), Life::Alive | Life::Suspect);
        let is_met = lives || state.links.contains_key(&id);
        let has_it = told == Some(state.generation);
        // Otherwise the node shows its key at the next session.
        if has_it || !is_met {
            state.stale.remove(&id);
        }
        if has_it && state.era == era {
            self.step(&mut state, Event::Found(DialTarget::Node(id)));
        }
    }

    /// Sends the present key to the node at an address, over a session by a key that the node has.
    /// Returns the count of the key sent.
    fn hand_key_at(
        &self,
        place: SocketAddr,
        id: NodeId,
        (era, deadline): (u64, Instant),
    ) -> Option<u64> {
        let judge = |found: NodeId, hello: &Hello| match found == id {
            true => self.judge(id, hello),
            false => Some("another node has this address now".to_owned()),
        };
        let mut keys = self.keys();
        keys.rotate_left(1); // the present one last: it may have it by now
        for key in &keys {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let dialled = self.with_own(key, &judge, |own| {
                session::dial(own, place, Purpose::Service, left.min(ADDRESS_LIMIT))
            });
            match dialled {
                Ok(session) => {
                    let deadline = Instant::now() + HANDSHAKE_LIMIT;
                    return self.hand_key_over(session, era, deadline);
                }
                Err(session::Error::Closed | session::Error::Broken(_)) => {} // it has another key
                Err(_) => return None,
            }
        }
        None
    }

    /// Sends the present key to the node at an address, which has a former one; returns whether the
    /// node has it now.
    pub(super) fn hand_former(
        &self,
        former: &[ClusterKey],
        (place, wanted): (SocketAddr, Option<NodeId>),
        (era, deadline): (u64, Instant),
    ) -> bool {
        let aim = (place, wanted, Purpose::Service);
        let mut sessions = former
            .iter()
            .filter_map(|key| self.dial_with(key, aim, deadline).ok());
        let Some(session) = sessions.next() else {
            return false;
        };
        let id = session.peer();
        let told = self.hand_key_over(session, era, deadline);
        if told.is_none() {
            lock(&self.state).note_stale(id);
        }
        told.is_some()
    }

    fn hand_key_over(&self, session: NodeSession, era: u64, deadline: Instant) -> Option<u64> {
        let left = || {
            let left = deadline.saturating_duration_since(Instant::now());
            left.max(Duration::from_millis(1))
        };
        match channel::ask(session, SERVICE, left()) {
            Ok(channel) => self.tell_key(&channel, era, left()),
            // An earlier version: it shows its key again after an update.
            Err(Error::NoService { .. }) => Some(lock(&self.state).generation),
            Err(_) => None,
        }
    }

    /// Sends the present key; its count once the other node has it.
    fn tell_key(&self, channel: &ServiceChannel, era: u64, limit: Duration) -> Option<u64> {
        let news = {
            let state = lock(&self.state);
            let revoked = RegisterKey::Revoked(channel.peer());
            let is_revoked = state.member.map().get(&revoked).is_some();
            // The peer may answer late: the earlier check may be outdated.
            if is_revoked || state.era != era {
                return None;
            }
            state.news()
        };
        let mut message = serde_json::to_vec(&news).expect("a key is JSON");
        let sent = channel.send(&message).is_ok();
        message.zeroize();
        let has_it = sent && matches!(channel.recv(1, limit), Ok(Some(_)));
        has_it.then_some(news.generation)
    }

    /// Serves another node that sends a new key.
    pub(super) fn answer_key(self: &Arc<Self>, channel: &ServiceChannel) {
        let Ok(Some(mut message)) = channel.recv(NEWS_BYTES_MAX, HANDSHAKE_LIMIT) else {
            return;
        };
        let news = serde_json::from_slice::<KeyUpdate>(&message);
        message.zeroize();
        let Ok(news) = news else { return };
        let Ok(key) = ClusterKey::from_token(&news.token) else {
            return;
        };
        match self.learn_key(&news, &key, channel) {
            Ok(true) => self.tell("a node was revoked: the cluster has a new key and token"),
            Ok(false) => {}
            Err(error) => return self.tell(&format!("warning: the cluster's key stays: {error}")),
        }
        let _ = channel.send(&[1]);
    }

    /// Merges the revocations, then the key if it replaces the present one: a revoked node must not
    /// get it from this node.
    fn learn_key(
        self: &Arc<Self>,
        news: &KeyUpdate,
        key: &ClusterKey,
        channel: &ServiceChannel,
    ) -> Result<bool, Error> {
        self.learn_revocations(news, channel);
        self.save();
        let _turn = self.files.turn();
        let is_other = {
            let mut state = lock(&self.state);
            if !state.keeps(channel) {
                return Ok(false); // another cluster by now, or a revoked sender
            }
            if !state.is_older(news.generation, key, self.now().wall_ms) {
                if (news.generation, key.bytes()) < (state.generation, state.key.bytes()) {
                    state.note_stale(channel.peer());
                }
                return Ok(false);
            }
            state.key != *key
        };
        self.take_key(news.generation, key.clone())?;
        Ok(is_other)
    }

    /// Merges the revocations that another member knows, by their signatures.
    fn learn_revocations(self: &Arc<Self>, news: &KeyUpdate, channel: &ServiceChannel) {
        let mut state = lock(&self.state);
        for entries in news.revoked.chunks(ENTRIES_MAX) {
            if state.keeps(channel) {
                self.step(&mut state, Event::Learned(entries.to_vec()));
            }
        }
    }
}

/// The event by which this node revokes another one.
pub(super) fn revocation(id: NodeId) -> Event {
    Event::Write {
        key: RegisterKey::Revoked(id),
        epoch: 0,
        value: Some("{}".to_owned()),
    }
}
