//! How ranks find each other, and find each other again after a failure.
//!
//! Nobody is special: a *round* of meeting begins with whoever comes, and the members are those who
//! came. Each comer publishes its address; when the set of addresses has not changed for a while,
//! or has the size that was asked for, it is the group, numbered in the order of the comers' names.
//! Which of the places is used makes no difference to that:
//!
//! - [`Meeting::List`]: all addresses are known beforehand, nobody has to be asked.
//! - [`Meeting::Folder`]: a folder that all see; each comer leaves a file.
//! - [`Meeting::Address`]: an address that the first comer who can binds, whoever that is: it
//!   listens for the others until the round is over. If it dies, another takes its place.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use paceline_base::Rank;

use crate::tcp::GroupId;
use crate::{Deadline, deadline};

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// Everybody's address, by name; those who do not come are left out by [`Wanted`].
    List(Vec<SocketAddr>),
    /// A folder, empty at first, that all ranks can write to.
    Folder(PathBuf),
    /// An address of one of the machines, free until somebody listens there.
    Address(SocketAddr),
}

/// How many ranks make a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Exactly so many.
    Exactly(u32),
    /// Whoever has come when nobody new came for so long, at least this many.
    AtLeast {
        /// Ranks.
        ranks: u32,
        /// How long nobody new may come.
        settled: Duration,
    },
}

/// Who a group consists of, the same on all its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// This rank.
    pub rank: Rank,
    /// All addresses in rank order.
    pub addrs: Vec<SocketAddr>,
    /// Differs between rounds, so that a straggler of an earlier one is turned away.
    pub id: GroupId,
}

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
pub enum MeetingError {
    /// Too few came before the deadline.
    #[error("round {round}: {came} ranks came before the deadline, expected {wanted}")]
    TooFew {
        /// The round.
        round: u64,
        /// Ranks that came, this one included.
        came: u32,
        /// Ranks wanted.
        wanted: u32,
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
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// How often a comer looks whether something has changed.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Comers that an address takes in at most.
const COMERS: usize = 1024;

/// How long a comer waits for one answer of the one that listens.
const ANSWER_WAIT: Duration = Duration::from_millis(500);

/// Meets for round `round`, which all who are to meet count alike: 0 for the first group, one more
/// for each group after a failure. `addr` is where this rank listens.
///
/// Blocks until the group is complete. Then [`crate::tcp::join`] with what it returns.
///
/// # Errors
/// [`MeetingError`]; nothing is left behind that would disturb the next round.
pub fn meet(
    place: &Meeting,
    addr: SocketAddr,
    round: u64,
    wanted: Wanted,
    deadline: Deadline,
) -> Result<Members, MeetingError> {
    let mut addrs = match place {
        Meeting::List(list) => list.clone(),
        Meeting::Folder(folder) => folder_round(folder, addr, round, wanted, deadline)?,
        Meeting::Address(at) => address_round(*at, addr, round, wanted, deadline)?,
    };
    addrs.sort_unstable();
    addrs.dedup();
    let size = addrs.len();
    let own = (0..).zip(&addrs).find(|(_, other)| **other == addr);
    let (rank, _) = own.ok_or(MeetingError::Unlisted { addr, size })?;
    let id = id_of(&addrs, round);
    let rank = Rank(rank);
    Ok(Members { rank, addrs, id })
}

/// The same for all who have the same members in the same round.
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

/// Whether those who came are the group: `changed` is when the last of them came.
fn settled(wanted: Wanted, came: usize, changed: Instant) -> bool {
    match wanted {
        Wanted::Exactly(ranks) => came == ranks as usize,
        Wanted::AtLeast { ranks, settled } => {
            came >= ranks as usize && deadline::now().saturating_duration_since(changed) >= settled
        }
    }
}

fn too_few(round: u64, came: usize, wanted: Wanted) -> MeetingError {
    let (Wanted::Exactly(ranks) | Wanted::AtLeast { ranks, .. }) = wanted;
    MeetingError::TooFew {
        round,
        came: u32::try_from(came).unwrap_or(u32::MAX),
        wanted: ranks,
    }
}

/// Every comer leaves a file; the first who finds the round settled writes the list, and that
/// list counts: creating it succeeds for one only.
fn folder_round(
    folder: &Path,
    addr: SocketAddr,
    round: u64,
    wanted: Wanted,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, MeetingError> {
    let system = |what| move |source| MeetingError::System { what, source };
    let folder = folder.join(format!("round-{round}"));
    std::fs::create_dir_all(&folder).map_err(system("make the round's folder"))?;
    let name = addr.to_string().replace([':', '[', ']'], "_");
    std::fs::write(folder.join(format!("{name}.rank")), addr.to_string())
        .map_err(system("leave a file"))?;
    let list = folder.join("members");
    let (mut came, mut changed) = (Vec::new(), deadline::now());
    loop {
        if let Some(members) = read_list(&list) {
            return Ok(members);
        }
        let now = read_comers(&folder).map_err(system("read the round's folder"))?;
        if now != came {
            (came, changed) = (now, deadline::now());
        }
        if settled(wanted, came.len(), changed) {
            publish(&folder, &list, &name, &came).map_err(system("write the list of members"))?;
        } else if deadline.left(deadline::now()).is_zero() {
            return Err(too_few(round, came.len(), wanted));
        } else {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

fn read_comers(folder: &Path) -> io::Result<Vec<SocketAddr>> {
    let mut comers = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "rank")
        {
            // A file that is being written is read again at the next look.
            let addr = std::fs::read_to_string(&path).ok();
            comers.extend(addr.and_then(|addr| addr.parse::<SocketAddr>().ok()));
        }
    }
    comers.sort_unstable();
    Ok(comers)
}

/// The members, once the list is there. It appears whole: see `publish`.
fn read_list(list: &Path) -> Option<Vec<SocketAddr>> {
    let text = std::fs::read_to_string(list).ok()?;
    text.lines().map(|line| line.parse().ok()).collect()
}

/// Makes the list appear whole, unless another has been faster.
fn publish(folder: &Path, list: &Path, name: &str, members: &[SocketAddr]) -> io::Result<()> {
    let draft = folder.join(format!("{name}.draft"));
    let lines: Vec<String> = members.iter().map(SocketAddr::to_string).collect();
    std::fs::write(&draft, lines.join("\n"))?;
    match std::fs::hard_link(&draft, list) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => std::fs::remove_file(&draft),
    }
}

/// Listens at the address if nobody does, else says hello to who does, until there is a list.
fn address_round(
    at: SocketAddr,
    addr: SocketAddr,
    round: u64,
    wanted: Wanted,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, MeetingError> {
    loop {
        if let Ok(listener) = TcpListener::bind(at) {
            return host(&listener, addr, round, wanted, deadline);
        }
        if let Some(members) = ask(at, addr, round, deadline) {
            return Ok(members);
        }
        if deadline.left(deadline::now()).is_zero() {
            return Err(too_few(round, 1, wanted));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Takes in comers until the round is settled, then tells them all.
fn host(
    listener: &TcpListener,
    addr: SocketAddr,
    round: u64,
    wanted: Wanted,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, MeetingError> {
    let _ = listener.set_nonblocking(true);
    let mut came = vec![addr];
    let mut open: Vec<(SocketAddr, TcpStream)> = Vec::new();
    let mut changed = deadline::now();
    loop {
        while let Ok((stream, _)) = listener.accept() {
            if let Some(comer) = hear(&stream, round).filter(|_| came.len() < COMERS) {
                open.push((comer, stream));
                if !came.contains(&comer) {
                    came.push(comer);
                    changed = deadline::now();
                }
            }
        }
        // Who has gone again, perhaps to come back, does not count.
        open.retain(|(_, stream)| is_open(stream));
        let before = came.len();
        came.retain(|comer| *comer == addr || open.iter().any(|(other, _)| other == comer));
        if came.len() < before {
            changed = deadline::now();
        }
        if settled(wanted, came.len(), changed) {
            let lines: Vec<String> = came.iter().map(SocketAddr::to_string).collect();
            for (_, mut stream) in open {
                let _ = stream.write_all(format!("{}\n\n", lines.join("\n")).as_bytes());
            }
            return Ok(came);
        }
        if deadline.left(deadline::now()).is_zero() {
            return Err(too_few(round, came.len(), wanted));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// What a comer says: `round address`. Strangers get a moment and a line.
fn hear(stream: &TcpStream, round: u64) -> Option<SocketAddr> {
    stream.set_nonblocking(false).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_millis(50)))
        .ok()?;
    let mut line = String::new();
    BufReader::new(stream.take(100)).read_line(&mut line).ok()?;
    let (said, addr) = line.trim().split_once(' ')?;
    (said.parse() == Ok(round)).then(|| addr.parse().ok())?
}

fn is_open(stream: &TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    let open = match stream.peek(&mut [0]) {
        Ok(count) => count > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    };
    let _ = stream.set_nonblocking(false);
    open
}

/// Says hello and waits for the list; `None` if whoever listens goes away.
fn ask(
    at: SocketAddr,
    addr: SocketAddr,
    round: u64,
    deadline: Deadline,
) -> Option<Vec<SocketAddr>> {
    let mut stream = TcpStream::connect_timeout(&at, ANSWER_WAIT).ok()?;
    stream
        .write_all(format!("{round} {addr}\n").as_bytes())
        .ok()?;
    let left = deadline.left(deadline::now()).max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left)).ok()?;
    let mut members = Vec::new();
    for line in BufReader::new(stream).take(64 << 10).lines() {
        match line.ok()?.as_str() {
            "" => return Some(members),
            line => members.push(line.parse().ok()?),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn soon() -> Deadline {
        Deadline::at(Instant::now() + Duration::from_secs(20))
    }

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    /// Lets ranks with these ports meet and checks that all see the same.
    fn meet_all(place: &Meeting, ports: &[u16], round: u64, wanted: Wanted) -> GroupId {
        let comers = ports.iter().map(|port| {
            let (place, own) = (place.clone(), addr(*port));
            thread::spawn(move || meet(&place, own, round, wanted, soon()).unwrap())
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
        let folder = tempfile::tempdir().unwrap();
        let free = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let settled = Duration::from_millis(300);
        for place in [
            Meeting::Folder(folder.path().into()),
            Meeting::Address(free),
        ] {
            let first = meet_all(&place, &[7, 3, 5], 0, Wanted::Exactly(3));
            // The one with the lowest name, which was rank 0, does not come back.
            let wanted = Wanted::AtLeast { ranks: 2, settled };
            let second = meet_all(&place, &[5, 7], 1, wanted);
            assert_ne!(first, second);
            meet_all(&place, &[9, 7, 5, 1], 2, Wanted::Exactly(4));
        }
        let list = Meeting::List(vec![addr(1), addr(2)]);
        meet_all(&list, &[2, 1], 0, Wanted::Exactly(2));
    }

    #[test]
    fn too_few_and_unlisted_ranks_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let past = Deadline::at(Instant::now());
        let place = Meeting::Folder(folder.path().into());
        let error = meet(&place, addr(1), 0, Wanted::Exactly(2), past).unwrap_err();
        assert_eq!(
            error.to_string(),
            "round 0: 1 ranks came before the deadline, expected 2"
        );
        let list = Meeting::List(vec![addr(1)]);
        let error = meet(&list, addr(2), 0, Wanted::Exactly(1), past).unwrap_err();
        assert!(
            error.to_string().contains("not in the list of 1"),
            "{error}"
        );
    }
}
