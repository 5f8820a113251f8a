//! Joins ranks into a group over RDMA.
//!
//! The ranks meet over TCP, which also stays for control. Each further step is a gather of all
//! ranks, so that all learn at once when one fails:
//!
//! 1. *facts*: the addresses of each rank's devices, a random number, a check word over matrix and
//!    options. Two ranks with several cables then pair their ends. They do so by subnet if every
//!    cable has one of its own (`mlx.distributed_config` makes it so), else by order.
//! 2. *destinations*: a queue pair for each cable, encoded as by JACCL, in 32 bytes.
//! 3. *connected*: every queue pair is ready to receive; only now may a rank send.
//! 4. *hellos*, in rounds, until every rank has received one over every cable. A cable that leads
//!    elsewhere is found and named here, not later by a call that waits for ever.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use paceline_base::Rank;
use paceline_comm::provider::{self, MonitoredLinks, SpinPolicy, random};
use paceline_comm::tcp::JoinError;
use paceline_comm::{Deadline, local};

use super::abi::Gid;
use super::bulk::BulkTransfers;
use super::bulk_pair::BulkQueuePair;
use super::cabling::Cabling;
use super::destination::{DESTINATION_BYTES, decode, encode};
use super::error::RdmaError;
use super::link::CableLink;
use super::links::{Devices, Links};
use super::matrix::{CABLES_MAX, Matrix, MatrixError};
use super::memory::Registry;
use super::message_pair::MessageQueuePair;
use super::slab::Slab;
use super::verbs::RdmaAdapter;

/// Destinations for each peer: of message pairs, then of bulk pairs.
const DESTINATIONS: usize = 2 * CABLES_MAX;

/// Bytes of facts before the addresses: whether this rank can continue, check word, random number.
const FACT_BYTES: usize = 24;
const GID_BYTES: usize = 16;

/// Length of the first round of hellos: many times a round trip. Doubled up to the last.
const ROUND_FIRST: Duration = Duration::from_millis(1);
const ROUND_LAST: Duration = Duration::from_millis(50);

/// Fewest rounds before a cable counts as silent: as many as [`UNWIRED`] has where processors are
/// free. On a busy machine a round lasts until its slowest rank has had one.
const ROUNDS_MIN: u32 = 40;

/// How long a cable may be silent before the join fails. Hellos are lost by chance only, and by
/// then some fifty were sent.
const UNWIRED: Duration = Duration::from_secs(2);

/// In a round of hellos: a link of this rank broke.
const BROKEN: u32 = 2;

/// Gathers the same number of bytes from every rank, in rank order. Collective.
pub(super) type Gather<'a> = &'a mut dyn FnMut(&[u8]) -> Result<Vec<u8>, RdmaError>;

/// The joining rank and its device matrix.
pub(super) struct CableJoin<'a> {
    pub(super) rank: usize,
    pub(super) cabling: &'a Cabling,
    pub(super) matrix: &'a Matrix,
    pub(super) deadline: Deadline,
}

/// The result: links, devices and slabs.
pub(super) struct ConnectedCables {
    pub(super) links: Vec<Option<CableLink>>,
    pub(super) adapters: Vec<Arc<RdmaAdapter>>,
    pub(super) slabs: Vec<Slab>,
}

impl CableJoin<'_> {
    fn size(&self) -> usize {
        self.matrix.size()
    }

    /// Sets all cables of this rank up. Collective.
    pub(super) fn wire(&self, gather: Gather<'_>) -> Result<ConnectedCables, RdmaError> {
        let opened = self.open();
        let facts = gather(&self.facts(opened.as_ref().ok()))?;
        let facts = self.read_facts(&facts, opened.as_ref().map(|_| ()))?;
        let adapters = opened?;

        let made = self.make(&adapters, &facts);
        let all = gather(&self.destinations(made.as_ref().ok()))?;
        let bytes = self.destination_bytes();
        self.verdicts(&all, bytes, made.as_ref().map(|_| ()))?;
        let mut wired = made?;

        let connected = self.connect(&mut wired, &all);
        let word = u64::from(connected.is_ok()).to_le_bytes();
        let all = gather(&word)?;
        self.verdicts(&all, word.len(), connected.as_ref().copied())?;
        connected?;
        self.hellos(&mut wired, gather)?;
        Ok(wired)
    }

    /// Opens the devices of this rank, each once for all groups.
    fn open(&self) -> Result<Vec<Arc<RdmaAdapter>>, RdmaError> {
        let names = self.matrix.of(self.rank);
        names
            .into_iter()
            .map(|name| self.cabling.host.adapter(name))
            .collect()
    }

    fn facts(&self, adapters: Option<&Vec<Arc<RdmaAdapter>>>) -> Vec<u8> {
        let mut bytes = u64::from(adapters.is_some()).to_le_bytes().to_vec();
        bytes.extend(self.check_word().to_le_bytes());
        bytes.extend(random().to_le_bytes());
        for peer in 0..self.size() {
            for cable in 0..CABLES_MAX {
                let name = self.matrix.devices(self.rank, peer).get(cable);
                let named =
                    |adapter: &&Arc<RdmaAdapter>| Some(adapter.name()) == name.map(|n| &**n);
                let adapter = adapters.and_then(|all| all.iter().find(named));
                bytes.extend(adapter.map_or([0; GID_BYTES], |adapter| adapter.gid().0));
            }
        }
        bytes
    }

    /// FNV-1a over the values that must be the same on all ranks.
    fn check_word(&self) -> u64 {
        let text = self.matrix.to_json();
        let options = self.cabling.config.message_bytes.to_le_bytes();
        let bytes = text.bytes().chain(options);
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    fn read_facts<'f>(
        &self,
        all: &'f [u8],
        own: Result<(), &RdmaError>,
    ) -> Result<JoinFacts<'f>, RdmaError> {
        let bytes = FACT_BYTES + self.size() * CABLES_MAX * GID_BYTES;
        self.verdicts(all, bytes, own)?;
        let facts = JoinFacts { all, bytes };
        let mut others = (0..).zip(0..self.size());
        match others.find(|(_, rank)| facts.word(*rank, 1) != facts.word(0, 1)) {
            Some((rank, _)) => Err(RdmaError::Different { rank: Rank(rank) }),
            None => Ok(facts),
        }
    }

    /// Whether all ranks can continue: the first word of each. A rank that cannot reports its own
    /// error.
    fn verdicts(
        &self,
        all: &[u8],
        bytes: usize,
        own: Result<(), &RdmaError>,
    ) -> Result<(), RdmaError> {
        let mut ranks = (0..).zip(all.chunks(bytes));
        match ranks.find(|(_, said)| said[..8] == [0; 8]) {
            Some((rank, _)) if own.is_ok() => Err(RdmaError::Elsewhere { rank: Rank(rank) }),
            _ => Ok(()),
        }
    }

    /// The devices that lead to `peer`, in the order of the lower rank of the two.
    fn order(&self, peer: usize, facts: &JoinFacts<'_>) -> Vec<usize> {
        let cables = self.matrix.devices(self.rank, peer).len();
        let (low, high) = (self.rank.min(peer), self.rank.max(peer));
        let first: Vec<Gid> = (0..cables).map(|c| facts.gid(low, high, c)).collect();
        let second: Vec<Gid> = (0..cables).map(|c| facts.gid(high, low, c)).collect();
        match self.rank == low {
            true => (0..cables).collect(),
            false => pairing(&first, &second),
        }
    }

    fn make(
        &self,
        adapters: &[Arc<RdmaAdapter>],
        facts: &JoinFacts<'_>,
    ) -> Result<ConnectedCables, RdmaError> {
        let slot_bytes = self.cabling.config.message_bytes as usize;
        let peers = 0..self.size();
        let cables: Vec<Vec<&str>> = peers
            .map(|peer| {
                let names = self.matrix.devices(self.rank, peer);
                let order = self.order(peer, facts);
                order
                    .into_iter()
                    .map(|cable| names[cable].as_str())
                    .collect()
            })
            .collect();
        let mut wired = ConnectedCables {
            links: (0..self.size()).map(|_| None).collect(),
            adapters: adapters.to_vec(),
            slabs: Vec::new(),
        };
        for adapter in adapters {
            let own = cables
                .iter()
                .flatten()
                .filter(|name| **name == adapter.name());
            let own = own.count();
            wired.slabs.push(Slab::new(
                adapter,
                own,
                MessageQueuePair::bytes(slot_bytes) + BulkQueuePair::BYTES,
            )?);
        }
        let mut parts = vec![0; adapters.len()];
        let mut places = Vec::new();
        for (peer, names) in cables
            .iter()
            .enumerate()
            .filter(|(_, names)| !names.is_empty())
        {
            let (mut made, mut tracks) = (Vec::new(), Vec::new());
            for name in names {
                let find = adapters.iter().position(|adapter| adapter.name() == *name);
                let index = find.expect("all devices of the rank are open");
                let (slab, at) = (&wired.slabs[index], parts[index]);
                made.push(MessageQueuePair::new(slab, at, slot_bytes)?);
                tracks.push((index, at + MessageQueuePair::bytes(slot_bytes)));
                parts[index] = at + MessageQueuePair::bytes(slot_bytes) + BulkQueuePair::BYTES;
            }
            places.push((peer, made, tracks));
        }
        // Queue pairs left over after all message pairs become bulk pairs.
        for (peer, made, tracks) in places {
            let track = |(index, at): (usize, usize)| self.track(&wired.slabs[index], at);
            let tracks: Option<Vec<BulkQueuePair>> = tracks.into_iter().map(track).collect();
            let bulk = BulkTransfers::new(tracks.unwrap_or_default());
            let (low, high) = (self.rank.min(peer), self.rank.max(peer));
            let session = facts.word(low, 2) ^ facts.word(high, 2).rotate_left(32);
            let registry = Arc::clone(&self.cabling.host.registry);
            let number = u32::try_from(peer).map_or(Rank(u32::MAX), Rank);
            let lengths = (slot_bytes, self.cabling.config.in_place_bytes.max(1));
            wired.links[peer] = Some(CableLink::new(
                number, session, lengths, made, bulk, registry,
            ));
        }
        Ok(wired)
    }

    /// A bulk pair, if its device has queue pairs to spare: half of them stay for groups split off
    /// this one.
    fn track(&self, slab: &Slab, at: usize) -> Option<BulkQueuePair> {
        let adapter = slab.adapter();
        let spare = adapter.pairs_made() < adapter.pairs_most() / 2;
        spare.then(|| BulkQueuePair::new(slab, at).ok()).flatten()
    }

    /// Bytes of a rank's destinations.
    fn destination_bytes(&self) -> usize {
        8 + self.size() * DESTINATIONS * DESTINATION_BYTES
    }

    fn destinations(&self, wired: Option<&ConnectedCables>) -> Vec<u8> {
        let mut bytes = u64::from(wired.is_some()).to_le_bytes().to_vec();
        for peer in 0..self.size() {
            let link = wired.and_then(|wired| wired.links[peer].as_ref());
            let cables = (0..CABLES_MAX).map(|index| Some(link?.cables().get(index)?.pair()));
            let tracks = (0..CABLES_MAX).map(|index| Some(link?.tracks().get(index)?.pair()));
            for pair in cables.chain(tracks) {
                let entry = pair.map(|pair| encode(&pair.destination()));
                bytes.extend(entry.unwrap_or([0; DESTINATION_BYTES]));
            }
        }
        bytes
    }

    fn connect(&self, wired: &mut ConnectedCables, all: &[u8]) -> Result<(), RdmaError> {
        let own = self.destination_bytes();
        for (peer, link) in wired.links.iter_mut().enumerate() {
            let entries = &all[peer * own + 8..(peer + 1) * own];
            let (entries, _) = entries.as_chunks::<DESTINATION_BYTES>();
            let entries = &entries[self.rank * DESTINATIONS..][..DESTINATIONS];
            let Some(link) = link else { continue };
            for (cable, entry) in link.cables().iter().zip(entries) {
                cable.connect(&decode(entry))?;
            }
            link.connect_tracks(&entries[CABLES_MAX..])?;
        }
        Ok(())
    }

    /// Rounds of hellos until every rank has received every other.
    fn hellos(&self, wired: &mut ConnectedCables, gather: Gather<'_>) -> Result<(), RdmaError> {
        let until = Deadline::at(provider::now() + UNWIRED).min(self.deadline);
        let (mut round, mut rounds) = (ROUND_FIRST, 0);
        loop {
            self.hello(wired, round);
            rounds += 1;
            let silent = silent(wired);
            let late = rounds >= ROUNDS_MIN && until.left(provider::now()).is_zero();
            let mut said = silent.map_or([u32::MAX; 2], |(peer, cable)| [peer, cable]);
            let broken = broken(wired);
            let verdict = if broken.is_some() {
                BROKEN
            } else {
                u32::from(late)
            };
            let all = gather(&words([said[0], said[1], verdict]))?;
            let (all, _) = all.as_chunks::<12>();
            if let Some(error) = broken {
                return Err(error);
            }
            let is_broken = |said: &[u8; 12]| said[8..] == BROKEN.to_le_bytes();
            if let Some((rank, _)) = (0..).zip(all).find(|(_, said)| is_broken(said)) {
                return Err(RdmaError::Elsewhere { rank: Rank(rank) });
            }
            let heard = |said: &&[u8; 12]| said[..4] != u32::MAX.to_le_bytes();
            let Some(rank) = all.iter().position(|said| heard(&said)) else {
                return Ok(());
            };
            if all.iter().any(|said| said[8] != 0) {
                let word = |at: usize| {
                    let word = all[rank][at..].first_chunk();
                    word.map_or(0, |word| u32::from_le_bytes(*word))
                };
                said = [word(0), word(4)];
                return Err(self.unwired(rank, said));
            }
            round = ROUND_LAST.min(2 * round);
        }
    }

    /// Sends hellos, and polls for the length of a round.
    fn hello(&self, wired: &mut ConnectedCables, round: Duration) {
        let until = provider::now() + round;
        let mut links: Vec<&mut CableLink> = wired.links.iter_mut().flatten().collect();
        links.iter_mut().for_each(|link| link.greet());
        loop {
            links.iter_mut().for_each(|link| link.progress());
            let heard = |link: &&mut CableLink| link.cables().iter().all(|cable| cable.heard);
            if links.iter().all(heard) || provider::now() >= until {
                return;
            }
            std::thread::yield_now();
        }
    }

    fn unwired(&self, rank: usize, [peer, cable]: [u32; 2]) -> RdmaError {
        let (to, index) = (peer as usize, cable as usize);
        let names = match rank < self.size() && to < self.size() {
            true => self.matrix.devices(rank, to),
            false => &[],
        };
        RdmaError::Unwired {
            rank: u32::try_from(rank).map_or(Rank(u32::MAX), Rank),
            peer: Rank(peer),
            cable: index,
            device: names.get(index).cloned().unwrap_or_default(),
        }
    }
}

fn words(words: [u32; 3]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The first silent cable: peer and number.
fn silent(wired: &ConnectedCables) -> Option<(u32, u32)> {
    let links = (0..).zip(&wired.links);
    let mut cables = links.flat_map(|(peer, link)| {
        let cables = (0..).zip(link.iter().flat_map(CableLink::cables));
        cables.map(move |(number, cable)| (peer, number, cable.heard))
    });
    let silent = cables.find(|(_, _, heard)| !heard);
    silent.map(|(peer, cable, _)| (peer, cable))
}

/// The error of a broken link, if there is one.
fn broken(wired: &mut ConnectedCables) -> Option<RdmaError> {
    let mut links = wired.links.iter_mut().flatten();
    links.find_map(CableLink::take_broken)
}

/// The gathered facts of all ranks.
struct JoinFacts<'a> {
    all: &'a [u8],
    bytes: usize,
}

impl JoinFacts<'_> {
    fn word(&self, rank: usize, index: usize) -> u64 {
        let word = self.all[rank * self.bytes + 8 * index..].first_chunk();
        word.map_or(0, |word| u64::from_le_bytes(*word))
    }

    /// The address of the device of `from` at entry `message_pair` of its list for `to`.
    fn gid(&self, from: usize, to: usize, cable: usize) -> Gid {
        let at = from * self.bytes + FACT_BYTES + (to * CABLES_MAX + cable) * GID_BYTES;
        let gid = self.all[at..].first_chunk();
        gid.copied().map_or(Gid::default(), Gid)
    }
}

/// The pairing of cables: for each cable of the first rank the index at the second. Cables are
/// paired by network (four addresses), if that is unambiguous for all, else by index.
fn pairing(first: &[Gid], second: &[Gid]) -> Vec<usize> {
    let network = |gid: &Gid| (gid.0[..15].to_vec(), gid.0[15] & !3);
    let place = |gid: &Gid| {
        let mut same = (0..second.len()).filter(|at| network(&second[*at]) == network(gid));
        same.next().filter(|_| same.next().is_none())
    };
    let mut places: Vec<usize> = first.iter().filter_map(place).collect();
    let found = places.clone();
    places.sort_unstable();
    places.dedup();
    match places.len() == first.len() {
        true => found,
        false => (0..first.len()).collect(),
    }
}

/// For fuzzing: parses `bytes` as a destination, and as addresses of two ranks' devices.
pub(super) fn parse(bytes: &[u8]) {
    let destination = bytes.first_chunk().map(decode);
    assert!(destination.is_none_or(|there| decode(&encode(&there)) == there));
    let gids: Vec<Gid> = bytes.as_chunks().0.iter().copied().map(Gid).collect();
    let (first, second) = gids.split_at(gids.len() / 2);
    let second = &second[..first.len()];
    let mut places = pairing(first, second);
    places.sort_unstable();
    assert!(places.into_iter().eq(0..first.len()), "a cable twice");
}

/// The spin policy for ranks at these addresses: as for threads if they share a machine.
fn patience(addrs: &[Vec<SocketAddr>], rank: usize) -> SpinPolicy {
    let own: Vec<IpAddr> = addrs[rank].iter().map(SocketAddr::ip).collect();
    let here = |addrs: &&Vec<SocketAddr>| addrs.iter().any(|addr| own.contains(&addr.ip()));
    local::patience(addrs.iter().filter(here).count())
}

impl ConnectedCables {
    /// The links, with sockets between ranks without a cable.
    pub(super) fn links(
        &mut self,
        sockets: (Box<dyn MonitoredLinks>, Vec<Vec<u8>>),
        addrs: &[Vec<SocketAddr>],
        rank: usize,
        registry: Arc<Registry>,
    ) -> Links {
        let devices = Devices {
            adapters: std::mem::take(&mut self.adapters),
            registry,
        };
        let links = std::mem::take(&mut self.links);
        Links::new(links, sockets, patience(addrs, rank), devices)
    }
}

/// Checks that matrix and list of addresses have the same size.
pub(super) fn fits(
    matrix: &Matrix,
    addrs: &[Vec<SocketAddr>],
    rank: Rank,
) -> Result<(), RdmaError> {
    let (expected, got) = (addrs.len(), matrix.size());
    if rank.0 as usize >= expected {
        let size = expected;
        return Err(JoinError::NoSuchRank { rank, size }.into());
    }
    if expected != got {
        return Err(MatrixError::Size { expected, got }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: [u8; 4]) -> Gid {
        let mut gid = [0; 16];
        gid[10..12].copy_from_slice(&[0xff; 2]);
        gid[12..].copy_from_slice(&last);
        Gid(gid)
    }

    #[test]
    fn cables_are_paired_by_their_networks_or_their_order() {
        let first = [at([192, 168, 0, 1]), at([192, 168, 0, 5])];
        let crossed = [at([192, 168, 0, 6]), at([192, 168, 0, 2])];
        assert_eq!(pairing(&first, &crossed), [1, 0]);
        let switched = [at([10, 0, 0, 2]), at([10, 0, 0, 3])];
        assert_eq!(pairing(&first, &switched), [0, 1]);
        let same = [at([192, 168, 0, 2]), at([192, 168, 0, 3])];
        assert_eq!(pairing(&first, &same), [0, 1]);
    }
}
