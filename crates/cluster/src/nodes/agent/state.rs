//! State of a node and the actions of its [`Membership`], under one mutex.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::TrySendError;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::lock;

use super::super::member::{Action, DialTarget, Event, Life, Pace};
use super::super::pairing::Invitation;
use super::super::paths::{PathProbe, PathTable};
use super::super::rdma::RdmaDevice;
use super::super::session::NodeSession;
use super::super::signature::Signer;
use super::super::{ClusterKey, Membership, NodeId, Now, RegisterKey, Registers};
use super::addresses::AddressBook;
use super::channel::ServiceChannel;
use super::facts::{self, EngineDevice, NodeView};
use super::files::{NodeNames, TrustedCables};
use super::links::PeerLink;
use super::refusals::Refusals;
use super::rekey::{Drawn, OutdatedNodes};
use super::{ClusterAct, Error, Inner, NodeFacts, random};

/// Most concurrent attempts to connect.
const DIALS_MAX: usize = 32;

/// Most concurrent channels, including those opened by this node.
pub(super) const CHANNELS_MAX: usize = 512;

const PROBLEMS_MAX: usize = 64;

/// Most names of nodes that are kept. Then those of forgotten nodes go: a cluster has at most some
/// hundred nodes.
const NAMES_MAX: usize = 1024;

/// Longest sleep of the timer, so that it notices the agent's stop.
const WAKE_MAX: Duration = Duration::from_millis(500);

pub(super) struct State {
    pub(super) key: ClusterKey,
    /// Replaced keys, the latest first.
    pub(super) former: Vec<ClusterKey>,
    /// Count of the present key, which grows with each replacement: 0, or the time it was drawn.
    pub(super) generation: u64,
    /// The present key, where it was drawn here.
    pub(super) drawn: Option<Drawn>,
    /// Nodes that need the present key, and when to send it.
    pub(super) stale: OutdatedNodes,
    pub(super) member: Membership,
    /// Counts clusters that this node was in; handshakes of earlier ones are dropped.
    pub(super) era: u64,
    pub(super) links: BTreeMap<NodeId, PeerLink>,
    pub(super) book: AddressBook,
    /// Measured paths to other nodes.
    pub(super) paths: PathTable,
    dialling: BTreeSet<DialTarget>,
    channels: Vec<(NodeId, Weak<NodeSession>)>,
    /// The last problem with a target or a peer, by its name.
    problems: BTreeMap<String, String>,
    /// Names of nodes by their last facts, also of forgotten nodes.
    pub(super) known_names: NodeNames,
    /// Interfaces on which beacons cannot be sent.
    pub(super) blocked: Vec<String>,
    pub(super) invitation: Option<Invitation>,
    pub(super) api: Vec<SocketAddr>,
    /// Whether this node is draining.
    pub(super) leaving: bool,
    pub(super) devices: Vec<EngineDevice>,
    pub(super) rdma: Vec<RdmaDevice>,
    pub(super) trusted: TrustedCables,
    /// Counts changes for watchers.
    pub(super) version: u64,
    /// Whether the map differs from the saved one.
    pub(super) is_dirty: bool,
    pub(super) stopped: bool,
    pub(super) next_link: u64,
    /// Refused connections and acts of members that wait for the log.
    pub(super) refusals: Refusals,
    pub(super) acts: VecDeque<ClusterAct>,
    pub(super) threads: Vec<JoinHandle<()>>,
}

impl State {
    pub(super) fn new(
        signer: Arc<dyn Signer>,
        key: ClusterKey,
        (map, known_names): (Registers, NodeNames),
        pace: Pace,
        now: Now,
    ) -> Self {
        let known: Vec<RegisterKey> = map.iter().map(|(key, _)| key.clone()).collect();
        let mut state = Self {
            key,
            former: Vec::new(),
            generation: 0,
            drawn: None,
            stale: OutdatedNodes::new(),
            member: Membership::new(signer, map, pace, random(), now),
            era: 0,
            links: BTreeMap::new(),
            book: AddressBook::default(),
            paths: PathTable::default(),
            dialling: BTreeSet::new(),
            channels: Vec::new(),
            problems: BTreeMap::new(),
            known_names,
            blocked: Vec::new(),
            invitation: None,
            api: Vec::new(),
            leaving: false,
            devices: Vec::new(),
            rdma: Vec::new(),
            trusted: TrustedCables::new(),
            version: 0,
            is_dirty: false,
            stopped: false,
            next_link: 0,
            refusals: Refusals::default(),
            acts: VecDeque::new(),
            threads: Vec::new(),
        };
        state.learn_names(known);
        state
    }

    /// Enters another cluster, with its key and the first entries of its map.
    pub(super) fn enter(&mut self, (key, map): (ClusterKey, Registers), pace: Pace, now: Now) {
        self.cut_all();
        self.era += 1;
        let signer = self.member.signer();
        self.member = Membership::new(signer, map, pace, random(), now);
        self.key = key;
        (self.former, self.generation) = (Vec::new(), 0);
        self.drawn = None;
        self.stale.clear();
        self.book = AddressBook::default();
        self.paths = PathTable::default();
        self.problems.clear();
        self.known_names.clear();
        self.invitation = None;
        self.leaving = false;
        self.dialling.clear();
        self.is_dirty = true;
        self.version += 1;
    }

    /// Closes all links and channels.
    pub(super) fn cut_all(&mut self) {
        self.links.clear();
        for session in self
            .channels
            .drain(..)
            .filter_map(|(_, weak)| weak.upgrade())
        {
            session.close();
        }
    }

    /// Whether a channel belongs to this cluster and is open.
    pub(super) fn keeps(&self, channel: &ServiceChannel) -> bool {
        let weak = Arc::downgrade(&channel.session);
        self.channels.iter().any(|(_, kept)| kept.ptr_eq(&weak))
    }

    fn close_channels(&mut self, id: NodeId) {
        self.channels.retain(|(peer, weak)| {
            let Some(session) = weak.upgrade() else {
                return false;
            };
            if *peer == id {
                session.close();
            }
            *peer != id
        });
    }

    /// Records a problem; true if it is new.
    pub(super) fn note(&mut self, about: &str, problem: Option<String>) -> bool {
        let Some(problem) = problem else {
            return self.problems.remove(about).is_some();
        };
        let has_room = self.problems.len() < PROBLEMS_MAX || self.problems.contains_key(about);
        has_room && self.problems.insert(about.to_owned(), problem.clone()) != Some(problem)
    }

    pub(super) fn problems(&self) -> Vec<String> {
        let noted = self.problems.iter();
        let noted = noted.map(|(about, problem)| format!("{about}: {problem}"));
        noted.chain(self.blocked.iter().cloned()).collect()
    }

    /// All nodes, this one first, then by name.
    pub(super) fn views(&self, own: NodeId) -> Vec<NodeView> {
        let mut facts = facts::all(self.member.map());
        let mut ids: BTreeSet<NodeId> = facts.keys().copied().collect();
        ids.insert(own);
        let stays = self.member.peers().filter(|peer| peer.life != Life::Left);
        ids.extend(stays.map(|peer| peer.id));
        for id in &ids {
            facts.entry(*id).or_default();
        }
        let mut names = facts::names(&facts);
        let slow = self.member.peers().filter_map(|peer| {
            let took = peer.slow.filter(|_| peer.life == Life::Alive)?;
            Some((peer.id, u64::try_from(took.as_millis()).unwrap_or(u64::MAX)))
        });
        let slow: BTreeMap<NodeId, u64> = slow.collect();
        let view = |id: NodeId| NodeView {
            id,
            state: self.member.life(id),
            found_by: match id == own {
                true => "self".to_owned(),
                false => facts::word(self.book.how(id)).to_owned(),
            },
            heard_by: self.book.heard_by(id),
            linked: id == own || self.links.contains_key(&id),
            slow_ms: slow.get(&id).copied(),
            facts: NodeFacts {
                name: names.remove(&id).unwrap_or_default(),
                ..facts.remove(&id).unwrap_or_default()
            },
        };
        let mut views: Vec<NodeView> = ids.into_iter().map(view).collect();
        views.sort_by_key(|view| (view.id != own, view.facts.name.clone()));
        views
    }

    /// Revoked nodes, which [`views`](Self::views) does not have, with their last facts.
    pub(super) fn revoked_views(&self) -> Vec<NodeView> {
        let map = self.member.map();
        let view = |id: &NodeId| {
            let text = map.facts_of_revoked(*id)?;
            let facts: NodeFacts = serde_json::from_str(text).unwrap_or_default();
            Some(NodeView {
                id: *id,
                state: Life::Dead,
                found_by: facts::word(self.book.how(*id)).to_owned(),
                heard_by: Vec::new(),
                linked: false,
                slow_ms: None,
                facts: NodeFacts {
                    name: facts::shown(&facts.name, *id),
                    ..facts
                },
            })
        };
        map.revoked().iter().filter_map(view).collect()
    }

    /// Displayed names of all nodes that have sent facts, also of forgotten ones.
    pub(super) fn names(&self) -> NodeNames {
        let facts = facts::all(self.member.map());
        let present = facts.iter().map(|(id, facts)| (*id, &*facts.name));
        let known = self.known_names.iter();
        let forgotten = known.filter(|(id, _)| !facts.contains_key(id));
        facts::distinct(present.chain(forgotten.map(|(id, name)| (*id, &**name))))
    }

    /// Stores the names in those of the entries `keys` that are nodes' facts.
    fn learn_names(&mut self, keys: Vec<RegisterKey>) {
        let map = self.member.map();
        for key in keys {
            let RegisterKey::Node(id) = key else { continue };
            let Some(facts) = facts::of(map, id) else {
                continue;
            };
            if self.known_names.len() >= NAMES_MAX {
                let is_present = |id: &NodeId| map.get(&RegisterKey::Node(*id)).is_some();
                self.known_names.retain(|id, _| is_present(id));
            }
            self.known_names.insert(id, facts::shown(&facts.name, id));
        }
    }

    pub(super) fn name(&self, id: NodeId) -> String {
        let name = self.names().remove(&id);
        let name = name.or_else(|| {
            let revoked = self.revoked_views().into_iter();
            revoked
                .filter(|view| view.id == id)
                .map(|view| view.facts.name)
                .next()
        });
        name.unwrap_or_else(|| facts::shown("", id))
    }

    /// Addresses for dialling a node: the best path first, those that are down last.
    pub(super) fn places(&self, id: NodeId) -> Vec<SocketAddr> {
        let mut places = self.known_places(id);
        let best = self.paths.preferred(id).map(|path| path.remote);
        places.sort_by_key(|place| (Some(*place) != best, self.paths.is_down(id, *place)));
        places
    }

    /// Addresses of a node, from discovery and its own facts.
    pub(super) fn known_places(&self, id: NodeId) -> Vec<SocketAddr> {
        let mut places = self.book.addresses(id);
        if let Some(facts) = facts::of(self.member.map(), id) {
            let told = facts.addresses.iter().take(16);
            places.extend(told.map(|ip| SocketAddr::new(*ip, facts.port)));
        }
        let mut seen = BTreeSet::new();
        places.retain(|place| seen.insert(*place));
        places
    }

    pub(super) fn dialled(&mut self, target: &DialTarget) {
        self.dialling.remove(target);
    }
}

impl Inner {
    /// Runs the member's ticks until the agent stops.
    pub(super) fn run_timer(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        while !state.stopped {
            let due = state.member.next_wake();
            let now = self.now().since_start;
            if now >= due {
                self.step(&mut state, Event::Tick);
            }
            let due = state.member.next_wake();
            let wait = due.saturating_sub(self.now().since_start);
            let wait = wait.clamp(Duration::from_millis(1), WAKE_MAX);
            let waited = self.timer.wait_timeout(state, wait);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Passes an event to the member and executes its actions. Never blocks.
    pub(super) fn step(self: &Arc<Self>, state: &mut State, event: Event) {
        let due = state.member.next_wake();
        let own = state.member.own();
        let mut must_write = false;
        for action in state.member.step(self.now(), event) {
            must_write |= action == Action::Life(own, Life::Alive);
            self.act(state, action);
        }
        if must_write {
            let facts = self.facts(state);
            self.step(state, facts);
        }
        if state.member.next_wake() < due {
            self.timer.notify_one();
        }
    }

    fn act(self: &Arc<Self>, state: &mut State, action: Action) {
        match action {
            Action::Dial(target) => self.start_dial(state, target),
            Action::Send { to, message } => {
                let Some(link) = state.links.get(&to) else {
                    return;
                };
                // A full queue drops the message, like a network; the member sends it again.
                if let Err(TrySendError::Disconnected(_)) = link.queue.try_send(message) {
                    link.session.close();
                }
            }
            Action::Unlink(id) => {
                state.links.remove(&id);
                if state.member.life(id) == Life::Left {
                    // The member drops it now.
                    self.step(state, Event::Unlinked(id));
                }
            }
            Action::Changed(keys) => {
                state.learn_names(keys);
                state.is_dirty = true;
                self.bump(state);
            }
            Action::Life(id, life) => self.lived(state, id, life),
            Action::Late(id) => state.paths.doubt(id, self.now().since_start),
        }
    }

    fn lived(&self, state: &mut State, id: NodeId, life: Life) {
        if id == state.member.own() {
            return;
        }
        let name = state.name(id);
        match life {
            Life::Dead | Life::Left => state.paths.died(id),
            Life::Alive | Life::Suspect => {
                let now = self.now().since_start;
                state.paths.hurry(id, PathProbe::Latency, now);
            }
        }
        match life {
            Life::Alive => self.tell(&format!("{name} is back")),
            Life::Suspect => {}
            Life::Dead => self.tell(&format!("{name} does not answer any more")),
            Life::Left => self.tell(&format!("{name} left the cluster")),
        }
        if matches!(life, Life::Dead | Life::Left) {
            state.close_channels(id);
        }
        self.bump(state);
    }

    /// Wakes watchers.
    pub(super) fn bump(&self, state: &mut State) {
        state.version += 1;
        self.changed.notify_all();
    }

    fn start_dial(self: &Arc<Self>, state: &mut State, target: DialTarget) {
        if state.dialling.len() >= DIALS_MAX || !state.dialling.insert(target.clone()) {
            return;
        }
        let (inner, era, aim) = (Arc::clone(self), state.era, target.clone());
        if self.spawn("dial", move || inner.dial(&aim, era)).is_err() {
            state.dialling.remove(&target); // the member dials again
        }
    }

    /// Addresses of the dedicated data interface; empty if any may be used.
    fn data_addresses(&self) -> Vec<IpAddr> {
        let Some(name) = &self.config.data_interface else {
            return Vec::new();
        };
        let all = if_addrs::get_if_addrs().unwrap_or_default();
        let own = all.iter().filter(|one| one.name == *name);
        let mut own: Vec<IpAddr> = own.map(if_addrs::Interface::ip).collect();
        own.sort_unstable();
        own
    }

    /// Facts of this node, as an event that writes them.
    pub(super) fn facts(&self, state: &State) -> Event {
        let facts = NodeFacts {
            // The program may state its own: a test has one of another release.
            protocol: match self.config.facts.protocol {
                0 => facts::PROTOCOL,
                own => own,
            },
            port: self.port,
            boot: self.boot,
            addresses: super::super::discovery::addresses(),
            api: state.api.clone(),
            leaving: state.leaving,
            devices: state.devices.clone(),
            rdma: state.rdma_facts(),
            data: self.data_addresses(),
            ..self.config.facts.clone()
        };
        Event::Write {
            key: RegisterKey::Node(state.member.own()),
            epoch: 0,
            value: Some(serde_json::to_string(&facts).expect("facts are JSON")),
        }
    }

    /// Writes this node's facts if they differ from the map.
    pub(super) fn write_facts(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        let event = self.facts(&state);
        let Event::Write { key, value, .. } = &event else {
            return;
        };
        if state.member.map().get(key) != value.as_deref() {
            self.step(&mut state, event);
        }
    }

    /// Adds the peers that the user named to the member.
    pub(super) fn know_peers(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        for peer in &self.config.peers {
            let target = DialTarget::Peer(peer.clone());
            self.step(&mut state, Event::Found(target));
        }
    }

    /// Registers a channel, so that it is closed when its peer dies.
    ///
    /// # Errors
    /// [`Error::Session`] if there are too many, or its peer was revoked meanwhile.
    pub(super) fn keep_channel(&self, channel: &ServiceChannel) -> Result<(), Error> {
        let mut state = lock(&self.state);
        state.channels.retain(|(_, weak)| weak.strong_count() > 0);
        let revoked = RegisterKey::Revoked(channel.peer());
        let is_revoked = state.member.map().get(&revoked).is_some();
        if is_revoked || state.channels.len() >= CHANNELS_MAX || state.stopped {
            return Err(super::super::session::Error::Closed.into());
        }
        let weak = Arc::downgrade(&channel.session);
        state.channels.push((channel.peer(), weak));
        Ok(())
    }

    /// Whether a link received a message recently, to detect a second process with its node's
    /// identity.
    pub(super) fn is_fresh(link: &PeerLink) -> bool {
        let heard = *lock(&link.heard);
        Instant::now().saturating_duration_since(heard) < Duration::from_secs(2)
    }
}
