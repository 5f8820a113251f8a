//! Rendezvous: how ranks find each other, and again after a failure.
//!
//! No rank is special. A *round* begins with the first rank that arrives. Each rank publishes its
//! address. The set of addresses is the group when it has not changed for a while, or has the
//! requested size. Ranks are numbered in the order of their addresses. The kinds of rendezvous
//! differ only in how addresses are exchanged:
//!
//! - [`RendezvousPoint::List`]: all addresses are known beforehand; nothing is exchanged.
//! - [`RendezvousPoint::Folder`]: a shared folder; each rank writes a file.
//! - [`RendezvousPoint::Address`]: the first rank binds this address and serves the others until
//!   the round is over. If it dies, another rank replaces it.
//!
//! With a group key all messages and files are encrypted and authenticated with it. A process
//! without the key can neither join, nor learn the members, nor forge them. It can prevent a
//! rendezvous, by taking the address or removing files.

use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use paceline_base::Rank;

use crate::join::{
    GroupId, GroupKey, LIST_BYTES, Listener, Refusal, RendezvousFailure, RendezvousHost,
    fetch_members, open_note, parse_list, print_list, random, seal_note,
};
use crate::{Deadline, deadline};

/// Where ranks exchange their addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RendezvousPoint {
    /// All addresses, by name; [`RequiredRanks`] decides which may be missing.
    List(Vec<SocketAddr>),
    /// A folder, empty at first, that all ranks can write to. With a group key, only files with the
    /// same key and round count.
    Folder(PathBuf),
    /// An unused address of one of the machines.
    Address(SocketAddr),
}

/// Number of ranks that completes a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredRanks {
    /// Exactly this many.
    Exactly(u32),
    /// All ranks that arrived before a pause of `settled` without arrivals; at least `ranks`.
    AtLeast {
        ranks: u32,
        /// Length of the pause.
        settled: Duration,
    },
}

/// The members of a group, the same on all its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    pub rank: Rank,
    /// All addresses in rank order.
    pub addrs: Vec<SocketAddr>,
    /// Differs between rounds, so that a straggler of an earlier round is turned away.
    pub id: GroupId,
}

/// Why a rendezvous failed.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    #[error(
        "round {round}: {came} ranks came before the deadline, expected {wanted}{}",
        because(.turned_away)
    )]
    TooFew {
        round: u64,
        /// Ranks that arrived, this one included.
        came: u32,
        /// Ranks required.
        wanted: u32,
        /// Why another process was turned away, if that happened.
        turned_away: Option<Refusal>,
    },
    /// The host at the address refuses this rank.
    #[error("the meeting at {at} refuses this rank: {why}")]
    Refused {
        at: SocketAddr,
        /// The reason: what is wrong with this rank.
        why: Refusal,
    },
    /// The own address is not in the list.
    #[error("{addr} is not in the list of {size} ranks")]
    Unlisted {
        /// The own address.
        addr: SocketAddr,
        /// Addresses in the list.
        size: usize,
    },
    /// A file or socket could not be used.
    #[error("{what}: {source}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Polling interval.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Runs round `round`. All ranks count rounds alike: 0 for the first group, one more for each group
/// after a failure. `addr` is where this rank listens. `key` is the group's key, if it has one: all
/// ranks or none.
///
/// Blocks until the group is complete. Pass the result to [`crate::tcp::join`].
///
/// # Errors
/// [`RendezvousError`]; nothing remains that would disturb the next round.
pub fn rendezvous(
    place: &RendezvousPoint,
    addr: SocketAddr,
    round: u64,
    wanted: RequiredRanks,
    key: Option<&GroupKey>,
    deadline: Deadline,
) -> Result<Members, RendezvousError> {
    let order = RoundSpec { round, wanted, key };
    let mut addrs = match place {
        RendezvousPoint::List(list) => list.clone(),
        RendezvousPoint::Folder(folder) => folder_round(folder, addr, &order, deadline)?,
        RendezvousPoint::Address(at) => address_round(*at, addr, &order, deadline)?,
    };
    addrs.sort_unstable();
    addrs.dedup();
    let size = addrs.len();
    let own = (0..).zip(&addrs).find(|(_, other)| **other == addr);
    let (rank, _) = own.ok_or(RendezvousError::Unlisted { addr, size })?;
    let id = id_of(&addrs, round);
    let rank = Rank(rank);
    Ok(Members { rank, addrs, id })
}

/// Equal for all ranks with the same members and round.
fn id_of(addrs: &[SocketAddr], round: u64) -> GroupId {
    let mut id = GroupId(*b"paceline round  ").derive(round, 0);
    for addr in addrs {
        let text = addr.to_string();
        let sum = text
            .bytes()
            .fold(0, |sum: u64, byte| sum.rotate_left(7) ^ u64::from(byte));
        id = id.derive(sum, u32::from(addr.port()));
    }
    id
}

/// The round to run, and its required ranks.
struct RoundSpec<'a> {
    round: u64,
    wanted: RequiredRanks,
    key: Option<&'a GroupKey>,
}

impl RoundSpec<'_> {
    /// Whether the `came` ranks are the group; `changed` is when the last of them arrived.
    fn is_settled(&self, came: usize, changed: Instant) -> bool {
        match self.wanted {
            RequiredRanks::Exactly(ranks) => came == ranks as usize,
            RequiredRanks::AtLeast { ranks, settled } => {
                let quiet = deadline::now().saturating_duration_since(changed);
                came >= ranks as usize && quiet >= settled
            }
        }
    }

    fn too_few(&self, came: usize, turned_away: Option<Refusal>) -> RendezvousError {
        let (RequiredRanks::Exactly(wanted) | RequiredRanks::AtLeast { ranks: wanted, .. }) =
            self.wanted;
        RendezvousError::TooFew {
            round: self.round,
            came: u32::try_from(came).unwrap_or(u32::MAX),
            wanted,
            turned_away,
        }
    }
}

fn because(turned_away: &Option<Refusal>) -> String {
    turned_away.map_or(String::new(), |why| {
        format!("; another was turned away: {why}")
    })
}

/// Every rank writes a file. The first that finds the round settled writes the list, which is
/// final: creating it succeeds only once.
fn folder_round(
    folder: &Path,
    addr: SocketAddr,
    order: &RoundSpec<'_>,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    let system = |what| move |source| RendezvousError::System { what, source };
    let folder = folder.join(format!("round-{}", order.round));
    std::fs::create_dir_all(&folder).map_err(system("make the round's folder"))?;
    let notes = FolderRound { folder, order };
    // With a key, file names must not reveal addresses.
    let name = match order.key {
        Some(_) => format!("{:016x}", random()),
        None => addr.to_string().replace([':', '[', ']'], "_"),
    };
    let own = notes.pack(RANK, &addr.to_string());
    own.and_then(|own| std::fs::write(notes.folder.join(format!("{name}.{RANK}")), own))
        .map_err(system("leave a file"))?;
    let (mut came, mut changed) = (Vec::new(), deadline::now());
    loop {
        if let Some(members) = notes.list() {
            return Ok(members);
        }
        let (now, odd) = notes
            .arrived_members()
            .map_err(system("read the round's folder"))?;
        if now != came {
            (came, changed) = (now, deadline::now());
        }
        if deadline.left(deadline::now()).is_zero() {
            return Err(order.too_few(came.len(), odd));
        }
        if order.is_settled(came.len(), changed) {
            notes
                .publish(&name, &came)
                .map_err(system("write the list of members"))?;
        } else {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// File extensions: of a rank's address, and of the list.
const RANK: &str = "rank";
const MEMBERS: &str = "members";

/// The files of a round.
struct FolderRound<'a> {
    folder: PathBuf,
    order: &'a RoundSpec<'a>,
}

impl FolderRound<'_> {
    /// The context that a file is encrypted for; it is valid in no other.
    fn context(&self, kind: &str) -> String {
        format!("paceline meeting {} {kind}", self.order.round)
    }

    fn pack(&self, kind: &str, text: &str) -> io::Result<Vec<u8>> {
        match self.order.key {
            None => Ok(text.into()),
            Some(key) => seal_note(key, self.context(kind).as_bytes(), text.as_bytes()),
        }
    }

    /// The addresses in a file, or why it is none of this group. A file that is being written is
    /// read again at the next poll.
    fn read(&self, kind: &str, path: &Path) -> Result<Vec<SocketAddr>, Refusal> {
        let (mut bytes, why) = (
            Vec::new(),
            self.order.key.map_or(Refusal::UnknownKey, |_| Refusal::Key),
        );
        let file = File::open(path).map_err(|_| why)?;
        let most = LIST_BYTES as u64;
        file.take(most).read_to_end(&mut bytes).map_err(|_| why)?;
        let Some(key) = self.order.key else {
            return parse_list(&bytes).ok_or(why);
        };
        match open_note(key, self.context(kind).as_bytes(), &bytes) {
            Some(text) => parse_list(&text).ok_or(why),
            None if parse_list(&bytes).is_some() => Err(Refusal::NoKey),
            None => Err(why),
        }
    }

    /// The ranks that arrived, in order, and why another process was refused.
    fn arrived_members(&self) -> io::Result<(Vec<SocketAddr>, Option<Refusal>)> {
        let (mut comers, mut odd) = (Vec::new(), None);
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == RANK) {
                match self.read(RANK, &path) {
                    Ok(addrs) => comers.extend(addrs.first()),
                    Err(why) => odd = Some(why),
                }
            }
        }
        comers.sort_unstable();
        comers.dedup();
        Ok((comers, odd))
    }

    /// The members, once the list exists. It appears atomically: see `publish`.
    fn list(&self) -> Option<Vec<SocketAddr>> {
        self.read(MEMBERS, &self.folder.join(MEMBERS)).ok()
    }

    /// Publishes the list atomically, unless another rank was faster. An invalid file of that name
    /// is removed.
    fn publish(&self, name: &str, members: &[SocketAddr]) -> io::Result<()> {
        let (list, draft) = (
            self.folder.join(MEMBERS),
            self.folder.join(format!("{name}.draft")),
        );
        std::fs::write(&draft, self.pack(MEMBERS, &print_list(members))?)?;
        match std::fs::hard_link(&draft, &list) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) if self.list().is_none() => {
                let _ = std::fs::remove_file(&list); // another may have been faster
            }
            _ => {}
        }
        std::fs::remove_file(&draft)
    }
}

/// Binds the address if it is free, else connects to its host, until there is a list.
fn address_round(
    at: SocketAddr,
    addr: SocketAddr,
    order: &RoundSpec<'_>,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    let round = GroupId(*b"paceline meeting").derive(order.round, 0);
    loop {
        if let Ok(listener) = Listener::bind(at) {
            return host(
                RendezvousHost::new(&listener, round, order.key),
                addr,
                order,
                deadline,
            );
        }
        match fetch_members(at, round, order.key, addr, deadline) {
            Ok(members) => return Ok(members),
            Err(RendezvousFailure::Refused(why)) => {
                return Err(RendezvousError::Refused { at, why });
            }
            Err(RendezvousFailure::Gone) => {}
        }
        if deadline.left(deadline::now()).is_zero() {
            return Err(order.too_few(1, None));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Accepts members until the round is settled, then sends all of them the list.
fn host(
    mut hall: RendezvousHost<'_>,
    addr: SocketAddr,
    order: &RoundSpec<'_>,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    let (mut came, mut changed) = (Vec::new(), deadline::now());
    loop {
        hall.poll_members();
        let mut now: Vec<SocketAddr> = hall.member_addresses().chain([addr]).collect();
        now.sort_unstable();
        now.dedup();
        if now != came {
            (came, changed) = (now, deadline::now());
        }
        if order.is_settled(came.len(), changed) {
            hall.send_list(&came);
            return Ok(came);
        }
        if deadline.left(deadline::now()).is_zero() {
            return Err(order.too_few(came.len(), hall.turned_away()));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;
    use std::thread;

    use super::*;

    fn soon() -> Deadline {
        Deadline::at(Instant::now() + Duration::from_secs(60))
    }

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn key(byte: u8) -> GroupKey {
        GroupKey::new([byte; crate::join::KEY_BYTES])
    }

    /// A folder and an address, twice; each with the guard that keeps it alive.
    fn places() -> [(RendezvousPoint, Option<tempfile::TempDir>); 4] {
        let folder = || {
            let folder = tempfile::tempdir().unwrap();
            (RendezvousPoint::Folder(folder.path().into()), Some(folder))
        };
        let address = || (RendezvousPoint::Address(crate::free::free()), None);
        [folder(), address(), folder(), address()]
    }

    /// Runs a round with ranks at these ports and checks that all get the same members.
    fn meet_all(
        place: &RendezvousPoint,
        ports: &[u16],
        round: u64,
        wanted: RequiredRanks,
        key: Option<&GroupKey>,
    ) -> GroupId {
        let comers = ports.iter().map(|port| {
            let (place, own, key) = (place.clone(), addr(*port), key.cloned());
            thread::spawn(move || {
                rendezvous(&place, own, round, wanted, key.as_ref(), soon()).unwrap()
            })
        });
        let members: Vec<_> = comers
            .collect::<Vec<_>>()
            .into_iter()
            .map(|t| t.join().unwrap())
            .collect();
        let mut sorted: Vec<_> = ports.iter().map(|port| addr(*port)).collect();
        sorted.sort_unstable();
        for (port, member) in ports.iter().zip(&members) {
            assert_eq!(member.addrs, sorted);
            assert_eq!(member.addrs[member.rank.0 as usize], addr(*port));
            assert_eq!(member.id, members[0].id);
        }
        members[0].id
    }

    #[test]
    fn ranks_meet_in_every_place_and_meet_again() {
        let settled = Duration::from_millis(300);
        for (place, key) in places()
            .iter()
            .zip([None, None, Some(key(1)), Some(key(1))])
        {
            let key = key.as_ref();
            let place = &place.0;
            let first = meet_all(place, &[7, 3, 5], 0, RequiredRanks::Exactly(3), key);
            // The rank with the lowest name, which was rank 0, does not return.
            let wanted = RequiredRanks::AtLeast { ranks: 2, settled };
            let second = meet_all(place, &[5, 7], 1, wanted, key);
            assert_ne!(first, second);
            meet_all(place, &[9, 7, 5, 1], 2, RequiredRanks::Exactly(4), key);
        }
        let list = RendezvousPoint::List(vec![addr(1), addr(2)]);
        meet_all(&list, &[2, 1], 0, RequiredRanks::Exactly(2), None);
    }

    #[test]
    fn too_few_and_unlisted_ranks_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let past = Deadline::at(Instant::now());
        let place = RendezvousPoint::Folder(folder.path().into());
        let error =
            rendezvous(&place, addr(1), 0, RequiredRanks::Exactly(2), None, past).unwrap_err();
        assert_eq!(
            error.to_string(),
            "round 0: 1 ranks came before the deadline, expected 2"
        );
        let list = RendezvousPoint::List(vec![addr(1)]);
        let error =
            rendezvous(&list, addr(2), 0, RequiredRanks::Exactly(1), None, past).unwrap_err();
        assert!(
            error.to_string().contains("not in the list of 1"),
            "{error}"
        );
    }

    /// A rank that is turned away learns why, and so do the ranks that refuse it.
    #[test]
    fn keys_that_differ_are_named_on_both_sides() {
        type Keys = [Option<u8>; 2];
        let cases: [(Keys, [Refusal; 2]); 2] = [
            ([Some(1), Some(2)], [Refusal::Key, Refusal::Key]),
            ([Some(1), None], [Refusal::NoKey, Refusal::UnknownKey]),
        ];
        for (keys, whys) in cases {
            for (place, _folder) in &places()[..2] {
                let by = Deadline::at(Instant::now() + Duration::from_millis(700));
                let ranks = keys.iter().zip(1..).map(|(byte, port)| {
                    let (place, key) = (place.clone(), byte.map(key));
                    thread::spawn(move || {
                        let wanted = RequiredRanks::Exactly(2);
                        rendezvous(&place, addr(port), 0, wanted, key.as_ref(), by).unwrap_err()
                    })
                });
                for thread in ranks.collect::<Vec<_>>() {
                    let error = thread.join().unwrap();
                    let why = match &error {
                        RendezvousError::TooFew { turned_away, .. } => *turned_away,
                        RendezvousError::Refused { why, .. } => Some(*why),
                        _ => None,
                    };
                    // Which of them hosts the address is random; the error takes that rank's view.
                    let why = why.unwrap_or_else(|| panic!("{place:?}, {keys:?}: {error}"));
                    assert!(whys.contains(&why), "{place:?}, {keys:?}: {error}");
                }
            }
        }
    }

    /// Files and connections of a process without the key change nothing.
    #[test]
    fn strangers_neither_come_nor_learn_who_comes() {
        let key = key(3);
        let [(place, folder), (address, _), ..] = places();
        let round = folder.as_ref().unwrap().path().join("round-0");
        std::fs::create_dir_all(&round).unwrap();
        std::fs::write(round.join("x.rank"), "127.0.0.1:99").unwrap();
        std::fs::write(round.join("y.rank"), [7; 100]).unwrap();
        std::fs::write(round.join(MEMBERS), "127.0.0.1:99\n").unwrap();
        meet_all(&place, &[7, 5], 0, RequiredRanks::Exactly(2), Some(&key));
        for entry in std::fs::read_dir(&round).unwrap() {
            let path = entry.unwrap().path();
            let (name, bytes) = (path.to_string_lossy(), std::fs::read(&path).unwrap());
            let tells = |text: &[u8]| text.windows(9).any(|part| part == b"127.0.0.1");
            assert!(
                name.ends_with("x.rank") || !tells(&bytes),
                "{name} tells an address"
            );
            assert!(!tells(name.as_bytes()), "{name} tells an address");
        }

        let RendezvousPoint::Address(at) = address else {
            unreachable!("the second is one")
        };
        let flood = thread::spawn(move || {
            for turn in 0..100_usize {
                if let Ok(mut stream) = TcpStream::connect(at) {
                    let plain: &[u8] =
                        [&b"0 127.0.0.1:99\n"[..], b"paceline", &[0x5a; 90]][turn % 3];
                    let _ = stream.write_all(plain);
                }
                thread::sleep(Duration::from_millis(2));
            }
        });
        meet_all(
            &address,
            &[7, 5, 9],
            0,
            RequiredRanks::Exactly(3),
            Some(&key),
        );
        flood.join().unwrap();
    }
}
