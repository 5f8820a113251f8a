//! Measures the network paths to other nodes: reachability, latency and bandwidth.
//!
//! ```text
//! measurer -> a session of its own to one address of the node, service "paths"
//!          -> "e" and 8 bytes      the node sends them back; the shortest of some round trips
//!          counts -> "b" and bytes        any number, for BURST at most -> "f"                  <-
//!          bytes since the first "b" (u64), nanoseconds (u64) -> "m" or "l"           the node
//!          measures its own ways now, with bandwidth or without; <- the same when it has
//! ```
//! One thread measures one path at a time: concurrent measurements would disturb each other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::lock;

use super::super::member::{Event, Life};
use super::super::paths::{
    DueMeasurement, Path, PathChange, PathProbe, PathSample, is_link_local, is_news,
};
use super::super::reach::{self, BrokenPairs};
use super::super::session::{self, Purpose};
use super::super::{NodeId, RegisterKey};
use super::channel::{self, ServiceChannel};
use super::{Agent, Error, Inner, facts};

/// The service's name.
pub(super) const SERVICE: &str = "paths";

/// Time limit of one measurement without its burst. A slower path is useless for a group.
const LIMIT: Duration = Duration::from_millis(1500);

/// Round trips of a measurement.
const ROUNDS: u64 = 4;

/// Longest burst, and most bytes of one: a tenth of a second of Gigabit Ethernet has 12 MB.
const BURST: Duration = Duration::from_millis(100);
const BURST_BYTES_MAX: usize = 8 << 20;

/// Bytes of a message of a burst.
const PIECE_BYTES: usize = 64 << 10;

/// Poll interval of the measuring thread.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Interval of refreshing other nodes' addresses: a refresh parses all of their facts.
const REFRESH_EVERY: Duration = Duration::from_secs(1);

/// Longest session of one measuring node, which sends one request.
const SERVE_LIMIT: Duration = Duration::from_secs(10);

/// Longest wait for another node to measure all its paths.
const MEASURE_LIMIT: Duration = Duration::from_secs(8);

/// Least interval of publishing small changes to the cluster.
const TELL_EVERY: Duration = Duration::from_secs(30);

impl Agent {
    /// The paths from a node to others, as that node measured them.
    pub fn paths(&self, from: NodeId) -> Vec<Path> {
        lock(&self.inner.state).paths(from)
    }

    /// The best address at which `from` connects to `to`, with `to`'s control port. Uses the
    /// preferred path measured by `from`, else the reverse of the one measured by `to`. Excludes
    /// interfaces that either does not use for data
    /// ([`Config::data_interface`](super::Config::data_interface)). `None` without measurements.
    pub fn route(&self, from: NodeId, to: NodeId) -> Option<SocketAddr> {
        lock(&self.inner.state).route(from, to)
    }

    /// The pairs of `nodes` without a path, by the measurements of both nodes.
    pub fn broken_pairs(&self, nodes: &[NodeId]) -> BrokenPairs {
        lock(&self.inner.state).broken_pairs(nodes)
    }

    /// Makes `nodes` measure their paths now, and waits for it, at most some seconds. Skips nodes
    /// that do not answer.
    pub fn measure(&self, nodes: &[NodeId], wanted: PathProbe) {
        self.measure_within(nodes, wanted, MEASURE_LIMIT + LIMIT * 3);
    }

    /// As [`measure`](Self::measure), but waits at most `limit`. Slower measurements continue, and
    /// are published in the shared map.
    pub fn measure_within(&self, nodes: &[NodeId], wanted: PathProbe, limit: Duration) {
        let own = self.id();
        thread::scope(|scope| {
            for id in nodes.iter().copied() {
                scope.spawn(move || match id == own {
                    true => self.inner.measure_now(wanted, limit.min(MEASURE_LIMIT)),
                    false => drop(self.ask_to_measure(id, wanted, limit)),
                });
            }
        });
    }

    fn ask_to_measure(&self, id: NodeId, wanted: PathProbe, limit: Duration) -> Result<(), Error> {
        let until = Instant::now() + limit;
        let channel = self.open(id, SERVICE, limit.min(LIMIT * 2))?;
        channel.send(match wanted {
            PathProbe::Latency => b"l",
            PathProbe::Bandwidth => b"m",
        })?;
        let left = until.saturating_duration_since(Instant::now());
        channel.recv(1, left).map(drop)
    }
}

impl Inner {
    /// Measures due paths until the agent stops.
    pub(super) fn run_measurer(self: &Arc<Self>) {
        let (mut told, mut told_at) = (Vec::new(), None::<Instant>);
        let mut refreshed = None::<Instant>;
        while !self.is_stopped() {
            if refreshed.is_none_or(|at| at.elapsed() >= REFRESH_EVERY) {
                refreshed = Some(Instant::now());
                let now = self.now().since_start;
                lock(&self.state).refresh_paths(now);
            }
            let Some((due, era)) = self.next_due() else {
                thread::sleep(LOOK_EVERY);
                self.publish(&mut told, &mut told_at);
                continue;
            };
            let sample = self.measure_one(due).ok();
            self.take_sample(due, sample.as_ref(), era);
            self.publish(&mut told, &mut told_at);
        }
    }

    fn next_due(&self) -> Option<(DueMeasurement, u64)> {
        let state = lock(&self.state);
        let living = state.living();
        let due = state.paths.due(&living, self.now().since_start)?;
        Some((due, state.era))
    }

    fn measure_one(&self, due: DueMeasurement) -> Result<PathSample, Error> {
        let deadline = Instant::now() + LIMIT;
        // An outdated key must not count as a miss: after two misses a new path is not measured for
        // minutes.
        let open = || self.open_way(due, deadline);
        let (channel, local) = self.with_newest_key(deadline, open)?;
        let latency = round_trip(&channel)?;
        let bytes_per_s = due.bandwidth.then(|| burst(&channel)).transpose()?;
        channel.close();
        Ok(PathSample {
            local: local.ip().to_canonical(),
            interface: interface_of(local),
            latency,
            bytes_per_s: bytes_per_s.flatten(),
        })
    }

    /// A channel over a path, and this end's address.
    fn open_way(
        &self,
        due: DueMeasurement,
        deadline: Instant,
    ) -> Result<(ServiceChannel, SocketAddr), Error> {
        let session = self.dial_at(due.remote, Some(due.to), Purpose::Service, deadline)?;
        let local = session.own_addr().map_err(session::Error::Broken)?;
        Ok((channel::ask(session, SERVICE, LIMIT)?, local))
    }

    fn take_sample(self: &Arc<Self>, due: DueMeasurement, sample: Option<&PathSample>, era: u64) {
        let now = self.now().since_start;
        let mut state = lock(&self.state);
        if state.era != era {
            return;
        }
        let news = state.paths.measured((due.to, due.remote), sample, now);
        let name = state.name(due.to);
        let about = format!("path to {name}");
        match &news {
            Some(PathChange::Fell { now, before }) => {
                let line = format!("over {}: {} does not answer", now.told(), before.told());
                state.note(&about, Some(line.clone()));
                self.tell(&format!("warning: {name} is reached {line}"));
            }
            Some(PathChange::Returned(path)) => {
                state.note(&about, None);
                self.tell(&format!("{name} is reached over {} again", path.told()));
            }
            None => {}
        }
        Self::move_link(&state, due.to);
        self.measured.notify_all();
    }

    /// Ends a link over a path that is down, so that it is established again over another one.
    fn move_link(state: &super::state::State, to: NodeId) {
        let Some(link) = state.links.get(&to) else {
            return;
        };
        let Ok(at) = link.session.peer_addr() else {
            return;
        };
        let is_down = state.paths.at(to, at.ip()).is_some_and(|path| !path.up);
        if is_down && state.paths.preferred(to).is_some() {
            link.session.close();
        }
    }

    /// Publishes this node's paths if they changed.
    fn publish(self: &Arc<Self>, told: &mut Vec<Path>, told_at: &mut Option<Instant>) {
        let mut state = lock(&self.state);
        let (own, paths) = (state.member.own(), state.paths.paths());
        let states = |paths: &[Path]| -> Vec<(SocketAddr, [bool; 3])> {
            let of = |path: &Path| {
                let states = [path.up, path.preferred, path.bytes_per_s.is_some()];
                (path.remote, states)
            };
            paths.iter().map(of).collect()
        };
        let is_urgent = states(told) != states(&paths);
        let is_time = told_at.is_none_or(|at| at.elapsed() >= TELL_EVERY);
        let is_missing = !paths.is_empty() && state.member.map().get(&key_of(own)).is_none();
        if !is_missing && !(is_news(told, &paths) && (is_urgent || is_time)) {
            return;
        }
        let value = serde_json::to_string(&paths).expect("paths are JSON");
        let (key, epoch) = (key_of(own), 0);
        let value = (!paths.is_empty()).then_some(value);
        self.step(&mut state, Event::Write { key, epoch, value });
        (*told, *told_at) = (paths, Some(Instant::now()));
    }

    /// Measures all paths of this node again, and waits for it, at most `limit`.
    fn measure_now(&self, wanted: PathProbe, limit: Duration) {
        let deadline = Instant::now() + limit;
        let now = self.now().since_start;
        let mut state = lock(&self.state);
        state.refresh_paths(now);
        let before = state.paths.counts();
        for id in state.living() {
            state.paths.hurry(id, wanted, now);
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let living = state.living();
            if state.paths.is_settled(&living, &before) || left.is_zero() || state.stopped {
                return;
            }
            let waited = self.measured.wait_timeout(state, left.min(LOOK_EVERY));
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    pub(super) fn answer_measurer(&self, channel: &ServiceChannel) {
        let deadline = Instant::now() + SERVE_LIMIT;
        let mut begun = None;
        let mut bytes = 0_u64;
        while Instant::now() < deadline && !self.is_stopped() {
            let Ok(Some(message)) = channel.recv(PIECE_BYTES + 1, LIMIT) else {
                return;
            };
            let sent = match message.first() {
                Some(b'e') if message.len() == 9 => channel.send(&message),
                Some(b'b') => {
                    match begun {
                        None => begun = Some(Instant::now()),
                        Some(_) => bytes += message.len() as u64,
                    }
                    Ok(())
                }
                Some(b'f') => {
                    let took = begun.map_or(Duration::ZERO, |at: Instant| at.elapsed());
                    let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                    let answer = [bytes.to_le_bytes(), nanos.to_le_bytes()].concat();
                    channel.send(&answer)
                }
                Some(b'm') => {
                    self.measure_now(PathProbe::Bandwidth, MEASURE_LIMIT);
                    channel.send(b"m")
                }
                Some(b'l') => {
                    self.measure_now(PathProbe::Latency, MEASURE_LIMIT);
                    channel.send(b"l")
                }
                _ => return,
            };
            if sent.is_err() {
                return;
            }
        }
    }
}

impl super::state::State {
    /// Other live nodes.
    pub(super) fn living(&self) -> Vec<NodeId> {
        let peers = self.member.peers();
        let living = peers.filter(|peer| matches!(peer.life, Life::Alive | Life::Suspect));
        living.map(|peer| peer.id).collect()
    }

    /// Updates the addresses at which other nodes may be reached.
    pub(super) fn refresh_paths(&mut self, now: Duration) {
        let living = self.living();
        let known: Vec<NodeId> = self.member.peers().map(|peer| peer.id).collect();
        self.paths.keep(&known);
        // Networks of containers have the same addresses on every machine.
        let own = facts::of(self.member.map(), self.member.own()).unwrap_or_default();
        let is_own = |place: &SocketAddr| {
            place.port() == own.port && own.addresses.contains(&place.ip().to_canonical())
        };
        for id in living {
            let mut places = self.known_places(id);
            places.retain(|place| !is_own(place));
            self.paths.set_places(id, &places, now);
        }
    }

    /// As of [`Agent::paths`].
    pub(super) fn paths(&self, from: NodeId) -> Vec<Path> {
        if from == self.member.own() {
            return self.paths.paths();
        }
        let told = self.member.map().get(&key_of(from));
        told.and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    /// As of [`Agent::broken_pairs`].
    fn broken_pairs(&self, nodes: &[NodeId]) -> BrokenPairs {
        let nodes: BTreeSet<NodeId> = nodes.iter().copied().collect();
        let known = nodes
            .iter()
            .map(|id| (*id, (self.paths(*id), self.data(*id))));
        let known: BTreeMap<NodeId, (Vec<Path>, Vec<IpAddr>)> = known.collect();
        let is_broken = |from: &NodeId, to: &NodeId| {
            let ((paths, own), (_, other)) = (&known[from], &known[to]);
            let carries = |path: &&Path| may(own, path.local) && may(other, path.remote.ip());
            reach::is_broken(paths.iter().filter(carries), *to)
        };
        let pairs = nodes
            .iter()
            .flat_map(|from| nodes.iter().map(move |to| (from, to)));
        let broken = pairs.filter(|(from, to)| from != to && is_broken(from, to));
        broken.map(|(from, to)| (*from, *to)).collect()
    }

    /// The only addresses of a node for data; empty for all.
    fn data(&self, id: NodeId) -> Vec<IpAddr> {
        facts::of(self.member.map(), id).map_or_else(Vec::new, |it| it.data)
    }

    fn route(&self, from: NodeId, to: NodeId) -> Option<SocketAddr> {
        let (own, other) = (self.data(from), self.data(to));
        let port = facts::of(self.member.map(), to).map_or(0, |facts| facts.port);
        let best = |paths: Vec<Path>, local: &[IpAddr], remote: &[IpAddr]| {
            let paths = paths.into_iter().filter(|path| path.up);
            let paths =
                paths.filter(|path| may(local, path.local) && may(remote, path.remote.ip()));
            // The preferred one first: a small gain does not replace it.
            let cost = |path: &Path| match path.preferred {
                true => path.cost() * 0.67,
                false => path.cost(),
            };
            paths.min_by(|a, b| cost(a).total_cmp(&cost(b)))
        };
        let there = self.paths(from).into_iter().filter(|path| path.to == to);
        if let Some(path) = best(there.collect(), &own, &other) {
            return Some(path.remote);
        }
        let back = self.paths(to).into_iter();
        let back = back.filter(|path| path.to == from && path.is_routable());
        let path = best(back.collect(), &other, &own)?;
        Some(SocketAddr::new(path.local, port))
    }
}

/// Whether an address of a node whose addresses for data are `only` carries data.
fn may(only: &[IpAddr], ip: IpAddr) -> bool {
    only.is_empty() || only.contains(&ip.to_canonical()) || is_link_local(ip)
}

/// Key of a node's paths in the shared map.
pub(super) fn key_of(id: NodeId) -> RegisterKey {
    RegisterKey::Named(format!("paths/{id}"))
}

fn round_trip(channel: &ServiceChannel) -> Result<Duration, Error> {
    let mut shortest = Duration::MAX;
    for round in 0..ROUNDS {
        let began = Instant::now();
        let mut message = vec![b'e'];
        message.extend(round.to_le_bytes());
        channel.send(&message)?;
        match channel.recv(message.len(), LIMIT)? {
            Some(answer) if answer == message => shortest = shortest.min(began.elapsed()),
            Some(_) => return Err(session::Error::Protocol.into()),
            None => return Err(session::Error::Late { limit: LIMIT }.into()),
        }
    }
    Ok(shortest)
}

/// Bytes a second as counted by the other end; `None` if the burst was too short.
fn burst(channel: &ServiceChannel) -> Result<Option<u64>, Error> {
    let piece = vec![b'b'; PIECE_BYTES];
    let (began, mut sent) = (Instant::now(), 0);
    while began.elapsed() < BURST && sent < BURST_BYTES_MAX {
        channel.send(&piece)?;
        sent += piece.len();
    }
    channel.send(b"f")?;
    let answer = channel.recv(16, BURST + LIMIT * 2)?;
    let answer = answer.ok_or(session::Error::Late { limit: LIMIT * 2 })?;
    let (Some(bytes), Some(nanos)) = (answer.first_chunk::<8>(), answer.last_chunk::<8>()) else {
        return Err(session::Error::Protocol.into());
    };
    let (bytes, nanos) = (u64::from_le_bytes(*bytes), u64::from_le_bytes(*nanos));
    let is_telling = bytes > 0 && nanos > 0;
    Ok(is_telling.then(|| (bytes as f64 * 1e9 / nanos as f64) as u64))
}

/// Name of the interface that has an address of this machine; empty if none has.
pub(super) fn interface_of(local: SocketAddr) -> String {
    let ip = local.ip().to_canonical();
    let index = match local {
        SocketAddr::V6(addr) if addr.scope_id() != 0 => Some(addr.scope_id()),
        _ => None,
    };
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    let has_it =
        |one: &&if_addrs::Interface| one.ip() == ip && (index.is_none() || one.index == index);
    all.iter()
        .find(has_it)
        .map_or_else(String::new, |one| one.name.clone())
}
