//! JACCL's side channel: TCP through rank 0, by which ranks exchange their queue pairs.
//!
//! Rank 0 listens at the coordinator's address; every other rank connects and sends its rank, an
//! `int` of 4 bytes. All numbers are little-endian.
//!
//! - A gather of n bytes: every rank sends n bytes to rank 0. It reads them in rank order and sends
//!   all of them to each.
//! - A container: its length (4 bytes) is gathered first, then the elements of each, padded to the
//!   longest.
//! - A barrier: two gathers of 4 bytes.
//!
//! There is no frame and no version: a disagreement shows as a wrong length only.
//!
//! This implementation differs where peers cannot notice: every wait has a deadline, and
//! connections that do not send a missing rank are turned away.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use paceline_base::Rank;
use paceline_comm::{Deadline, provider};

use super::error::RdmaError;

/// Delay before dialling again. JACCL makes four attempts, 1 s apart and doubling.
const DIAL_AGAIN: Duration = Duration::from_millis(20);

/// Limit of one attempt.
const DIAL_WAIT: Duration = Duration::from_millis(500);

/// How long a connection may take to send its rank: JACCL sends it at once.
const STRANGER_WAIT: Duration = Duration::from_millis(500);

/// Longest accepted container: a thousand times the usual content, a group id and an address.
const CONTAINER_BYTES_MAX: usize = 64 << 10;

/// The connections of one rank: on rank 0 to all others, on others to rank 0. Calls fail with
/// [`RdmaError::Side`].
#[derive(Debug)]
pub struct SideChannel {
    rank: usize,
    size: usize,
    /// By rank, without rank 0; on other ranks only that to rank 0.
    streams: Vec<TcpStream>,
    here: IpAddr,
}

impl SideChannel {
    /// Connects `size` ranks through the first one, which listens at `coordinator`. Collective.
    pub fn open(
        coordinator: SocketAddr,
        rank: Rank,
        size: usize,
        deadline: Deadline,
    ) -> Result<Self, RdmaError> {
        let opened = match rank.0 {
            0 => accept(coordinator, size, deadline),
            own => dial(coordinator, own, deadline).map(|stream| vec![stream]),
        };
        let (rank, here) = (rank.0 as usize, coordinator.ip());
        let streams =
            opened.map_err(|(peer, what, source)| RdmaError::Side { peer, what, source })?;
        let here = match (rank, streams.first()) {
            (1.., Some(stream)) => stream.local_addr().map_or(here, |addr| addr.ip()),
            _ => here,
        };
        Ok(Self {
            rank,
            size,
            streams,
            here,
        })
    }

    /// This rank's address as seen by the coordinator.
    pub const fn here(&self) -> IpAddr {
        self.here
    }

    fn peer(&self, index: usize) -> Rank {
        let rank = if self.rank == 0 { index + 1 } else { 0 };
        u32::try_from(rank).map_or(Rank(u32::MAX), Rank)
    }

    fn send(&mut self, index: usize, bytes: &[u8], by: Deadline) -> Result<(), RdmaError> {
        let peer = self.peer(index);
        let stream = &mut self.streams[index];
        let sent = timed(by).and_then(|left| {
            stream.set_write_timeout(Some(left))?;
            stream.write_all(bytes)
        });
        let what = "send to";
        sent.map_err(|source| RdmaError::Side { peer, what, source })
    }

    fn receive(&mut self, index: usize, into: &mut [u8], by: Deadline) -> Result<(), RdmaError> {
        let peer = self.peer(index);
        let stream = &mut self.streams[index];
        let got = receive(stream, into, by);
        let what = "receive from";
        got.map_err(|source| RdmaError::Side { peer, what, source })
    }

    /// Gathers the same number of bytes from every rank, in rank order. Collective.
    pub fn all_gather(&mut self, own: &[u8], by: Deadline) -> Result<Vec<u8>, RdmaError> {
        let mut all = vec![0; own.len() * self.size];
        if own.is_empty() {
            return Ok(all);
        }
        if self.rank > 0 {
            self.send(0, own, by)?;
            self.receive(0, &mut all, by)?;
            return Ok(all);
        }
        let (first, others) = all.split_at_mut(own.len());
        first.copy_from_slice(own);
        for (index, part) in others.chunks_mut(own.len()).enumerate() {
            self.receive(index, part, by)?;
        }
        (0..self.streams.len()).try_for_each(|index| self.send(index, &all, by))?;
        Ok(all)
    }

    /// Gathers byte strings of different lengths from every rank, in rank order. Collective.
    pub fn gather_containers(
        &mut self,
        own: &[u8],
        by: Deadline,
    ) -> Result<Vec<Vec<u8>>, RdmaError> {
        let length = u32::try_from(own.len()).unwrap_or(u32::MAX);
        let words = self.all_gather(&length.to_le_bytes(), by)?;
        let announced = ContainerLengths::read(&words)?;
        let mut padded = own.to_vec();
        padded.resize(announced.longest, 0);
        let all = self.all_gather(&padded, by)?;
        Ok(announced.cut(&all))
    }

    /// Returns when all ranks have called it. Collective.
    pub fn barrier(&mut self, by: Deadline) -> Result<(), RdmaError> {
        (0..2).try_for_each(|_| self.all_gather(&[0; 4], by).map(drop))
    }
}

/// Announced lengths of containers, by rank.
struct ContainerLengths {
    lengths: Vec<usize>,
    /// Bytes that each rank sends, padding included.
    longest: usize,
}

impl ContainerLengths {
    /// Parses the announced lengths, 4 bytes each.
    fn read(words: &[u8]) -> Result<Self, RdmaError> {
        let words = words.as_chunks().0.iter();
        let lengths: Vec<usize> = words.map(|w| u32::from_le_bytes(*w) as usize).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest <= CONTAINER_BYTES_MAX {
            return Ok(Self { lengths, longest });
        }
        let rank = lengths.iter().position(|length| *length == longest);
        let rank = rank.and_then(|rank| u32::try_from(rank).ok());
        Err(RdmaError::Side {
            peer: Rank(rank.unwrap_or(u32::MAX)),
            what: "receive a container from",
            source: io::ErrorKind::FileTooLarge.into(),
        })
    }

    /// Cuts `all` into containers; each was padded to the longest.
    fn cut(&self, all: &[u8]) -> Vec<Vec<u8>> {
        let lengths = self.lengths.iter().enumerate();
        let container = |(rank, length): (usize, &usize)| {
            let start = rank * self.longest;
            all[start..start + length].to_vec()
        };
        lengths.map(container).collect()
    }
}

/// For fuzzing: parses `bytes` as containers: number of ranks, announced lengths, contents. `None`
/// if invalid or incomplete.
pub(super) fn parse(bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (size, rest) = bytes.split_first()?;
    let (words, rest) = rest.split_at_checked(4 * usize::from(*size))?;
    let announced = ContainerLengths::read(words).ok()?;
    let all = rest.get(..announced.longest * usize::from(*size))?;
    let containers = announced.cut(all);
    let lengths: Vec<usize> = containers.iter().map(Vec::len).collect();
    assert_eq!(lengths, announced.lengths);
    Some(containers)
}

type SideFailure = (Rank, &'static str, io::Error);

/// Time left; an error if there is none.
fn timed(by: Deadline) -> io::Result<Duration> {
    let left = by.left(provider::now());
    match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

fn receive(stream: &mut TcpStream, into: &mut [u8], by: Deadline) -> io::Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        stream.set_read_timeout(Some(timed(by)?))?;
        match stream.read(&mut into[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Rank 0: accepts one connection for each other rank, in rank order.
fn accept(at: SocketAddr, size: usize, by: Deadline) -> Result<Vec<TcpStream>, SideFailure> {
    let listener = TcpListener::bind(at).map_err(|error| (Rank(0), "listen as", error))?;
    let mut streams: Vec<Option<TcpStream>> = (1..size).map(|_| None).collect();
    let failed = |error| (Rank(0), "accept as", error);
    listener.set_nonblocking(true).map_err(failed)?;
    while let Some(missing) = (1..).zip(&streams).find(|(_, s)| s.is_none()) {
        let (rank, _) = missing;
        match listener.accept() {
            Ok((stream, _)) => {
                if let Ok((rank, stream)) = introduced(stream, by) {
                    let place = streams.get_mut((rank as usize).wrapping_sub(1));
                    // A rank that is out of range or connected already is no member.
                    if let Some(place @ None) = place {
                        *place = Some(stream);
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                timed(by).map_err(|error| (Rank(rank), "wait for", error))?;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(streams.into_iter().flatten().collect())
}

/// Reads the rank that a connection sends first.
fn introduced(mut stream: TcpStream, by: Deadline) -> io::Result<(u32, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let mut word = [0; 4];
    let soon = Deadline::at(provider::now() + STRANGER_WAIT).min(by);
    receive(&mut stream, &mut word, soon)?;
    Ok((u32::from_le_bytes(word), stream))
}

fn dial(to: SocketAddr, own: u32, by: Deadline) -> Result<TcpStream, SideFailure> {
    let failed = |error| (Rank(0), "connect to", error);
    loop {
        let left = timed(by).map_err(failed)?;
        let connected = TcpStream::connect_timeout(&to, left.min(DIAL_WAIT));
        let introduced = connected.and_then(|mut stream| {
            stream.set_nodelay(true)?;
            stream.write_all(&own.to_le_bytes())?;
            Ok(stream)
        });
        match introduced {
            Ok(stream) => return Ok(stream),
            Err(error) if by.left(provider::now()) <= DIAL_AGAIN => return Err(failed(error)),
            Err(_) => std::thread::sleep(DIAL_AGAIN),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::free::free;

    fn soon() -> Deadline {
        Deadline::at(Instant::now() + Duration::from_secs(60))
    }

    #[test]
    fn ranks_gather_and_meet() {
        let at = free();
        let ranks = [2_u8, 0, 1].map(|rank| {
            thread::spawn(move || {
                let mut side = SideChannel::open(at, Rank(rank.into()), 3, soon()).unwrap();
                let all = side.all_gather(&[rank; 2], soon()).unwrap();
                assert_eq!(all, [0, 0, 1, 1, 2, 2]);
                let own = vec![rank; rank.into()];
                let all = side.gather_containers(&own, soon()).unwrap();
                assert_eq!(all, [vec![], vec![1], vec![2, 2]]);
                side.barrier(soon()).unwrap();
            })
        });
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }

    #[test]
    fn containers_are_bounded_and_as_long_as_announced() {
        let words = |lengths: &[u32]| lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
        let sent = |lengths: &[u32], rest: &[u8]| {
            let words: Vec<u8> = words(lengths);
            let size = u8::try_from(lengths.len()).unwrap();
            parse(&[&[size], &words[..], rest].concat())
        };
        let two = vec![vec![1, 2, 3], vec![4]];
        assert_eq!(sent(&[3, 1], &[1, 2, 3, 4, 0, 0]), Some(two));
        assert_eq!(sent(&[3, 1], &[1, 2, 3, 4, 0]), None, "one byte is missing");
        assert_eq!(sent(&[0, 0], &[]), Some(vec![vec![]; 2]));
        let most = u32::try_from(CONTAINER_BYTES_MAX).unwrap();
        assert!(sent(&[most], &vec![7; CONTAINER_BYTES_MAX]).is_some());
        for too_long in [most + 1, u32::MAX] {
            let error = ContainerLengths::read(&words(&[1, too_long]))
                .err()
                .unwrap();
            let text = error.to_string();
            let expected = "side channel: receive a container from rank 1: ";
            assert!(text.starts_with(expected), "{text}");
        }
    }

    /// A JACCL rank's bytes, one by one, and a stranger's connection.
    #[test]
    fn a_rank_of_jaccl_is_understood() {
        let at = free();
        let ours = thread::spawn(move || {
            let mut side = SideChannel::open(at, Rank(0), 2, soon()).unwrap();
            let all = side.all_gather(&[7; 32], soon()).unwrap();
            side.barrier(soon()).unwrap();
            all
        });
        let connect = || loop {
            if let Ok(stream) = TcpStream::connect(at) {
                return stream;
            }
            thread::yield_now();
        };
        let mut stranger = connect();
        stranger.write_all(&9_u32.to_le_bytes()).unwrap();
        let mut theirs = connect();
        theirs.write_all(&1_u32.to_le_bytes()).unwrap();
        theirs.write_all(&[9; 32]).unwrap();
        let mut all = [0; 64];
        theirs.read_exact(&mut all).unwrap();
        assert_eq!(all, [[7; 32], [9; 32]].concat().as_slice());
        for _ in 0..2 {
            theirs.write_all(&[0; 4]).unwrap();
            theirs.read_exact(&mut [0; 8]).unwrap();
        }
        assert_eq!(ours.join().unwrap(), all);
    }

    #[test]
    fn who_is_missing_or_gone_is_named_in_time() {
        let past = Deadline::at(Instant::now() + Duration::from_millis(50));
        let error = SideChannel::open(free(), Rank(0), 2, past)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("side channel: wait for rank 1: "),
            "{error}"
        );
        let error = SideChannel::open(free(), Rank(1), 2, past)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("side channel: connect to rank 0: "),
            "{error}"
        );

        let at = free();
        let gone = thread::spawn(move || drop(SideChannel::open(at, Rank(1), 2, soon()).unwrap()));
        let mut side = SideChannel::open(at, Rank(0), 2, soon()).unwrap();
        gone.join().unwrap();
        let error = side.all_gather(&[0; 4], soon()).unwrap_err().to_string();
        assert!(
            error.starts_with("side channel: receive from rank 1: "),
            "{error}"
        );
    }
}
