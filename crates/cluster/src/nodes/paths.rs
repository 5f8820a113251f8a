//! Network paths to other nodes, as measured by one node: an entry for each address of each other
//! node.
//!
//! [`PathTable`] is pure: it schedules measurements, takes their results, and chooses the best
//! path. [`agent`](super::agent) does the measuring. A table is published in the shared map, so
//! that every node has the paths of every pair.
//!
//! ```text
//! unknown --answers--> up --two misses--> down --answers--> up      a miss is measured again at
//! once
//! ```
//! The *preferred* path of a node is kept until another one costs less than [`GAIN`] of it, so that
//! noise changes nothing. Its loss, and the return to it, are logged.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::NodeId;
use super::member::PEERS_MAX;

/// Most measured addresses of a node. Twice as many as the address book stores: discovered
/// addresses, and addresses in the node's facts.
const ADDRESSES_MAX: usize = 16;

/// Interval of measurements of a path that is up: some twenty packets a minute.
pub const EVERY: Duration = Duration::from_secs(60);

/// Pauses of a path that is down. A path that was up before may be a cable to be plugged in again.
/// A path that was never connected is an unreachable address.
const AGAIN: Duration = Duration::from_secs(5);
const NEVER_YET: Duration = Duration::from_secs(300);

/// Misses after which a path is down.
const MISSES: u32 = 2;

/// Another path is preferred if it costs less than this fraction of the preferred one.
const GAIN: f64 = 0.67;

/// Stored round trips: the shortest counts, because other programs on the two machines only add
/// delay.
const KEPT: usize = 5;

/// Bytes of the exchange whose time is a path's cost: some hundred rows of a
/// few kilobytes.
const EXCHANGE_BYTES: f64 = 262_144.0;

/// Assumed bytes a second of a path without measured bandwidth: Fast Ethernet's.
const UNMEASURED: f64 = 12.5e6;

/// A measured network path from one node to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Path {
    pub to: NodeId,
    /// Name of the outgoing interface; empty if unknown.
    pub interface: String,
    pub local: IpAddr,
    /// Address of the other node, with its control port.
    pub remote: SocketAddr,
    /// Shortest round trip in microseconds, of the last [`KEPT`] measurements.
    pub latency_us: u64,
    /// Bytes a second towards the other node over an encrypted session; `None` if not measured.
    pub bytes_per_s: Option<u64>,
    /// Whether it answers.
    pub up: bool,
    /// Whether it is the one in use.
    pub preferred: bool,
}

impl Path {
    /// Seconds of an exchange over it, by which paths are compared.
    pub fn cost(&self) -> f64 {
        self.latency_us as f64 / 1e6 + EXCHANGE_BYTES / self.rate()
    }

    /// Bytes a second, 1 or more; a guess before a measurement.
    pub fn rate(&self) -> f64 {
        let bytes_per_s = self.bytes_per_s.map_or(UNMEASURED, |rate| rate as f64);
        bytes_per_s.max(1.0)
    }

    /// For people: `eth1 (0.12 ms, 940 MB/s)`.
    pub fn told(&self) -> String {
        let name = match self.interface.as_str() {
            "" => self.local.to_string(),
            name => name.to_owned(),
        };
        let milliseconds = self.latency_us as f64 / 1000.0;
        match self.bytes_per_s {
            Some(rate) => format!(
                "{name} ({milliseconds:.2} ms, {:.0} MB/s)",
                rate as f64 / 1e6
            ),
            None => format!("{name} ({milliseconds:.2} ms)"),
        }
    }

    /// Whether neither of its addresses needs an interface.
    pub fn is_routable(&self) -> bool {
        !is_link_local(self.local) && !is_link_local(self.remote.ip())
    }
}

/// Whether an address needs an interface.
pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Result of one measurement of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSample {
    pub local: IpAddr,
    pub interface: String,
    /// Shortest round trip.
    pub latency: Duration,
    /// Bytes a second, if they were measured.
    pub bytes_per_s: Option<u64>,
}

/// Something to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueMeasurement {
    pub to: NodeId,
    /// At which address.
    pub remote: SocketAddr,
    /// Whether to measure its bandwidth too.
    pub bandwidth: bool,
}

/// A quantity to measure of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathProbe {
    /// Reachability and latency.
    Latency,
    /// Bandwidth, too.
    Bandwidth,
}

/// A change of the preferred path, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathChange {
    /// The preferred path does not answer: another one is used.
    Fell {
        now: Path,
        /// The previous one.
        before: Path,
    },
    /// The best path is used again.
    Returned(Path),
}

#[derive(Clone, Debug)]
struct PathEntry {
    path: Path,
    round_trips: Vec<u64>,
    misses: u32,
    was_up: bool,
    next: Duration,
    wants_bandwidth: bool,
    /// Counts measurements, for threads that wait for one.
    count: u64,
}

impl PathEntry {
    fn new(to: NodeId, remote: SocketAddr, now: Duration) -> Self {
        let unspecified = IpAddr::from([0, 0, 0, 0]);
        let path = Path {
            to,
            interface: String::new(),
            local: unspecified,
            remote,
            latency_us: 0,
            bytes_per_s: None,
            up: false,
            preferred: false,
        };
        Self {
            path,
            round_trips: Vec::new(),
            misses: 0,
            was_up: false,
            next: now,
            wants_bandwidth: true,
            count: 0,
        }
    }

    fn answered(&mut self, sample: &PathSample, now: Duration) {
        let micros = u64::try_from(sample.latency.as_micros()).unwrap_or(u64::MAX);
        self.round_trips.truncate(KEPT - 1);
        self.round_trips.insert(0, micros.max(1));
        self.path.latency_us = self.round_trips.iter().copied().min().unwrap_or(1);
        self.path.local = sample.local;
        self.path.interface.clone_from(&sample.interface);
        if sample.bytes_per_s.is_some() {
            self.path.bytes_per_s = sample.bytes_per_s;
            self.wants_bandwidth = false;
        }
        self.path.up = true;
        (self.misses, self.was_up, self.next) = (0, true, now + EVERY);
    }

    fn missed(&mut self, now: Duration) {
        self.misses = self.misses.saturating_add(1);
        if self.misses < MISSES {
            self.next = now;
            return;
        }
        self.path.up = false;
        self.round_trips.clear();
        self.next = now + if self.was_up { AGAIN } else { NEVER_YET };
    }
}

/// The paths of one node.
#[derive(Clone, Debug, Default)]
pub struct PathTable {
    entries: BTreeMap<(NodeId, SocketAddr), PathEntry>,
    preferred: BTreeMap<NodeId, SocketAddr>,
    /// The interface of the preferred path before its loss.
    lost: BTreeMap<NodeId, String>,
}

impl PathTable {
    /// Sets the addresses of a node. Drops paths at other addresses.
    pub fn set_places(&mut self, to: NodeId, places: &[SocketAddr], now: Duration) {
        let places = &places[..places.len().min(ADDRESSES_MAX)];
        self.entries
            .retain(|(id, remote), _| *id != to || places.contains(remote));
        if self.entries.len() >= PEERS_MAX * ADDRESSES_MAX {
            return;
        }
        for remote in places {
            let key = (to, *remote);
            let new = || PathEntry::new(to, *remote, now);
            self.entries.entry(key).or_insert_with(new);
        }
    }

    /// Drops nodes that are not among `known`.
    pub fn keep(&mut self, known: &[NodeId]) {
        self.entries.retain(|(id, _), _| known.contains(id));
        self.preferred.retain(|id, _| known.contains(id));
        self.lost.retain(|id, _| known.contains(id));
    }

    /// Schedules measurements of a node's paths now, except those that never answered.
    pub fn hurry(&mut self, to: NodeId, wanted: PathProbe, now: Duration) {
        let may_answer = |entry: &&mut PathEntry| entry.was_up || entry.misses < MISSES;
        for entry in self.of_mut(to).filter(may_answer) {
            entry.next = now;
            entry.wants_bandwidth |= wanted == PathProbe::Bandwidth;
        }
    }

    /// A node did not answer: measures the paths to it that are up, so that one that is down is
    /// known within some seconds. Slow links answer late at all times, so a path is measured at
    /// most as often as one that is down.
    pub fn doubt(&mut self, id: NodeId, now: Duration) {
        for entry in self.of_mut(id).filter(|entry| entry.path.up) {
            let soonest = (entry.next + AGAIN).saturating_sub(EVERY);
            entry.next = entry.next.min(now.max(soonest));
        }
    }

    /// A node is dead: all its paths are down, and none is preferred when it returns. The one that
    /// was used is measured first.
    pub fn died(&mut self, id: NodeId) {
        let used = self.preferred.remove(&id);
        let used = used.and_then(|remote| self.entries.get(&(id, remote)));
        if let Some(interface) = used.map(|entry| entry.path.interface.clone()) {
            self.lost.entry(id).or_insert(interface);
        }
        for entry in self.of_mut(id) {
            entry.path.up = false;
            entry.misses = MISSES;
            entry.round_trips.clear();
        }
    }

    /// The next due measurement of a node of `living`, the longest overdue first.
    pub fn due(&self, living: &[NodeId], now: Duration) -> Option<DueMeasurement> {
        let lives = |entry: &&PathEntry| living.contains(&entry.path.to);
        let due = self.entries.values().filter(|entry| entry.next <= now);
        let due = due.filter(lives);
        let first = due.min_by_key(|entry| entry.next)?;
        Some(DueMeasurement {
            to: first.path.to,
            remote: first.path.remote,
            bandwidth: first.wants_bandwidth,
        })
    }

    /// Measurements so far of each path, for [`is_settled`](Self::is_settled).
    pub fn counts(&self) -> BTreeMap<(NodeId, SocketAddr), u64> {
        let counts = self.entries.iter();
        counts.map(|(key, entry)| (*key, entry.count)).collect()
    }

    /// Whether every path to nodes of `living` was measured since `counts` and is either up or
    /// down.
    pub fn is_settled(
        &self,
        living: &[NodeId],
        counts: &BTreeMap<(NodeId, SocketAddr), u64>,
    ) -> bool {
        let mut own = self
            .entries
            .iter()
            .filter(|(key, _)| living.contains(&key.0));
        own.all(|(key, entry)| {
            let is_fresh = counts.get(key).is_none_or(|before| entry.count > *before);
            let is_down = entry.misses >= MISSES;
            is_down || (is_fresh && entry.misses == 0)
        })
    }

    /// Records a measurement: a sample, or `None` if the path did not answer.
    pub fn measured(
        &mut self,
        (to, remote): (NodeId, SocketAddr),
        sample: Option<&PathSample>,
        now: Duration,
    ) -> Option<PathChange> {
        let entry = self.entries.get_mut(&(to, remote))?;
        entry.count += 1;
        match sample {
            Some(sample) => entry.answered(sample, now),
            None => entry.missed(now),
        }
        self.choose(to)
    }

    fn choose(&mut self, to: NodeId) -> Option<PathChange> {
        let usable = self.usable(to);
        let best = usable
            .iter()
            .min_by(|a, b| a.cost().total_cmp(&b.cost()))?
            .clone();
        let is_usable = |path: &Path| usable.iter().any(|other| other.remote == path.remote);
        let key = |remote: &SocketAddr| (to, *remote);
        let before = self.preferred.get(&to).copied();
        let known = before.and_then(|remote| self.entries.get(&key(&remote)));
        let before = known.map(|entry| entry.path.clone());
        // The lost path is restored even for a small gain, because it was chosen before.
        let lost = self.lost.get(&to).and_then(|interface| {
            let own = usable.iter().filter(|path| path.interface == *interface);
            own.min_by(|a, b| a.cost().total_cmp(&b.cost()))
        });
        let best = match (&before, lost) {
            (Some(it), Some(lost)) if lost.cost() * GAIN <= it.cost() => lost.clone(),
            _ => best,
        };
        let is_lost = lost.is_some_and(|lost| lost.remote == best.remote);
        let keeps = before
            .as_ref()
            .is_some_and(|it| is_usable(it) && !is_lost && best.cost() >= it.cost() * GAIN);
        if keeps || before.as_ref().is_some_and(|it| it.remote == best.remote) {
            return None;
        }
        self.preferred.insert(to, best.remote);
        match before {
            Some(before) if before.interface == best.interface => None,
            Some(before) if !before.up => {
                if is_lost {
                    self.lost.remove(&to);
                } else {
                    let interface = before.interface.clone();
                    self.lost.entry(to).or_insert(interface);
                }
                Some(PathChange::Fell { now: best, before })
            }
            Some(_) if is_lost => {
                self.lost.remove(&to);
                Some(PathChange::Returned(best))
            }
            _ => None,
        }
    }

    fn of_mut(&mut self, to: NodeId) -> impl Iterator<Item = &mut PathEntry> {
        let own = self
            .entries
            .iter_mut()
            .filter(move |((id, _), _)| *id == to);
        own.map(|(_, entry)| entry)
    }

    /// Paths to a node that are up, without link-local ones if their interface has another.
    fn usable(&self, to: NodeId) -> Vec<Path> {
        let own = self.entries.values().map(|entry| &entry.path);
        let up: Vec<&Path> = own.filter(|path| path.to == to && path.up).collect();
        let has_other = |path: &Path| {
            let mut others = up.iter();
            others.any(|other| other.is_routable() && other.interface == path.interface)
        };
        let usable = up
            .iter()
            .filter(|path| path.is_routable() || !has_other(path));
        usable.map(|path| (*path).clone()).collect()
    }

    /// The path in use to a node; `None` while none is up.
    pub fn preferred(&self, to: NodeId) -> Option<&Path> {
        let remote = self.preferred.get(&to)?;
        let entry = self.entries.get(&(to, *remote))?;
        entry.path.up.then_some(&entry.path)
    }

    /// The path at an address, if it was ever measured.
    pub fn at(&self, to: NodeId, remote: IpAddr) -> Option<&Path> {
        let own = self.entries.values().map(|entry| &entry.path);
        let is_it = |path: &&Path| {
            path.to == to && path.remote.ip().to_canonical() == remote.to_canonical()
        };
        own.filter(|path| path.up || path.latency_us > 0)
            .find(is_it)
    }

    /// Whether an address was measured and is down.
    pub fn is_down(&self, to: NodeId, remote: SocketAddr) -> bool {
        let entry = self.entries.get(&(to, remote));
        entry.is_some_and(|entry| !entry.path.up && entry.misses >= MISSES)
    }

    /// All paths that are or were up, in order of nodes. Excludes a link-local one if its interface
    /// has another.
    pub fn paths(&self) -> Vec<Path> {
        let seen = self.entries.values().filter(|entry| entry.was_up);
        let mut paths: Vec<Path> = seen.map(|entry| entry.path.clone()).collect();
        for path in &mut paths {
            path.preferred = path.up && self.preferred.get(&path.to) == Some(&path.remote);
        }
        let routable: Vec<(NodeId, String)> = paths
            .iter()
            .filter(|path| path.up && path.is_routable())
            .map(|path| (path.to, path.interface.clone()))
            .collect();
        paths.retain(|path| {
            let own = (path.to, path.interface.clone());
            path.preferred || path.is_routable() || !routable.contains(&own)
        });
        paths
    }
}

/// Whether `new` differs enough from `old` to be published to the cluster.
pub fn is_news(old: &[Path], new: &[Path]) -> bool {
    let alike = |a: u64, b: u64| a.max(b) <= a.min(b).saturating_mul(3) / 2 + 200;
    let same = |(old, new): (&Path, &Path)| {
        let rates = (old.bytes_per_s.unwrap_or(0), new.bytes_per_s.unwrap_or(0));
        (old.to, old.remote, old.up, old.preferred) == (new.to, new.remote, new.up, new.preferred)
            && alike(old.latency_us, new.latency_us)
            && alike(rates.0, rates.1)
    };
    old.len() != new.len() || !old.iter().zip(new).all(same)
}

/// Factor by which a latency or bandwidth counts as changed. Other programs on the two machines
/// change both by half at times; another cable or a halved link changes them by this.
pub const MOVED_TIMES: u64 = 2;

/// Latencies closer than this count as equal: [`is_news`] treats the difference as noise.
const MOVED_US_MIN: u64 = 200;

/// Whether a pair of nodes has another path than before, or its latency or bandwidth changed by
/// [`MOVED_TIMES`]. A first bandwidth measurement is no change.
pub fn has_moved(old: &Path, new: &Path) -> bool {
    let moved = |old: u64, new: u64| old.max(new) > old.min(new).saturating_mul(MOVED_TIMES);
    let is_other = (&old.interface, old.remote) != (&new.interface, new.remote);
    let latency = moved(old.latency_us, new.latency_us)
        && old.latency_us.abs_diff(new.latency_us) > MOVED_US_MIN;
    let rates = old.bytes_per_s.zip(new.bytes_per_s);
    is_other || latency || rates.is_some_and(|(old, new)| moved(old, new))
}

#[cfg(test)]
mod tests;
