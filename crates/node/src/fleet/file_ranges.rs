//! Transfer of byte ranges of a model file between nodes, from several sources at once.
//!
//! ```text
//! fetcher -> source: {"Model":{"name":..,"sha256":..}}
//! fetcher <- {"Offer":[[first,end],..]} the groups that the source has, or {"Refused":"why"}
//! fetcher -> {"Leaves":[first,end]} or {"Groups":[first,end]}, any number
//! fetcher <- the bytes; none if the source lacks them
//! ```
//! A fetcher verifies each group by the tree before it stores it. A source that sends wrong bytes,
//! falls silent or disconnects is logged and dropped; another source gets its ranges.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::{Agent, ServiceChannel};
use serde::{Deserialize, Serialize};

use super::PIECES;
use super::hosts::NodeConnection;
use crate::workers::connection::{receive_message, send_message};
use crate::workers::host::ModelName;
use paceline_store::verified::partial_file::{GroupRun, VerifiedPartial};
use paceline_store::verified::tree::{HashGroups, LEAF_BYTES};

/// Most bytes of one request: a hundredth of a second at 1 Gbit/s, so that a round trip costs
/// little in comparison.
const PIECE_BYTES: u64 = 1 << 20;

/// Longest wait for a range: the source may read a cold disk and send over a slow link.
const LIMIT: Duration = Duration::from_secs(10);

/// How long a source waits for the next request.
const IDLE: Duration = Duration::from_secs(60);

/// Longest wait for a channel to a source.
const OPEN_LIMIT: Duration = Duration::from_secs(3);

/// Interval at which an idle source checks for ranges returned by another one.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Most sources of one fetch: more do not add speed on one machine's link.
pub(super) const SOURCES_MAX: usize = 8;

/// Most runs of an offer: more than any split produces. Further ones are not offered.
const RUNS_MAX: usize = 4096;

#[derive(Debug, Serialize, Deserialize)]
enum ToSource {
    /// The first message.
    Model(ModelName),
    Leaves(u64, u64),
    Groups(u64, u64),
}

#[derive(Debug, Serialize, Deserialize)]
enum FromSource {
    Offer(Vec<GroupRun>),
    Refused(String),
}

/// Reads `bytes` as messages about byte ranges, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToSource>(bytes);
    if let Ok(FromSource::Offer(runs)) = serde_json::from_slice(bytes) {
        let groups = HashGroups::of(1 << 30);
        let mut queue = FetchQueue::new(groups, std::slice::from_ref(&(0..groups.count())));
        let _ = queue.next(NodeId([0; 16]), &runs);
    }
}

/// The groups of a file that a node can serve.
pub(super) trait FileInventory {
    fn runs(&self) -> Vec<GroupRun>;

    /// All leaves, concatenated.
    ///
    /// # Errors
    /// What the system says.
    fn leaves(&self) -> io::Result<Vec<u8>>;

    /// The bytes of groups; `None` if one is missing.
    ///
    /// # Errors
    /// What the system says.
    fn give(&self, groups: &Range<u64>) -> io::Result<Option<Vec<u8>>>;

    /// How the file is divided into groups.
    fn groups(&self) -> HashGroups;
}

/// Most groups of a request.
fn groups_max(groups: HashGroups) -> u64 {
    (PIECE_BYTES / groups.each).max(1)
}

/// Most leaves of a request.
const LEAVES_MAX: u64 = PIECE_BYTES / LEAF_BYTES as u64;

/// Serves a fetcher until it closes or is idle for [`IDLE`]. `find` returns this node's groups of a
/// model.
pub(super) fn answer(
    channel: &ServiceChannel,
    find: impl Fn(&ModelName) -> Result<Box<dyn FileInventory>, String>,
) {
    let line = NodeConnection(channel.clone());
    let Ok(Some(ToSource::Model(model))) = receive_message(&line, OPEN_LIMIT) else {
        return channel.close();
    };
    let stock = match find(&model) {
        Ok(stock) => stock,
        Err(reason) => {
            // A lost fetcher does not receive the answer.
            let _: Result<(), _> = send_message(&line, &FromSource::Refused(reason));
            return channel.close();
        }
    };
    let mut runs = stock.runs();
    runs.truncate(RUNS_MAX);
    if send_message(&line, &FromSource::Offer(runs)).is_ok() {
        while let Ok(Some(asked)) = receive_message(&line, IDLE) {
            let bytes = of(&*stock, &asked);
            let sent = bytes.map(|bytes| channel.send(&bytes.unwrap_or_default()));
            if !matches!(sent, Ok(Ok(()))) {
                break;
            }
        }
    }
    channel.close();
}

/// The requested bytes; `None` if they are missing or exceed [`PIECE_BYTES`].
fn of(stock: &dyn FileInventory, asked: &ToSource) -> io::Result<Option<Vec<u8>>> {
    match *asked {
        ToSource::Groups(start, end) => {
            let is_piece = end.saturating_sub(start) <= groups_max(stock.groups());
            match is_piece {
                true => stock.give(&(start..end)),
                false => Ok(None),
            }
        }
        ToSource::Leaves(start, end) => {
            if end.saturating_sub(start) > LEAVES_MAX {
                return Ok(None);
            }
            let at = |leaf: u64| usize::try_from(leaf).ok()?.checked_mul(LEAF_BYTES);
            let range = at(start).zip(at(end));
            let leaves = stock.leaves()?;
            let own = range.and_then(|(start, end)| leaves.get(start..end));
            Ok(own.map(<[u8]>::to_vec))
        }
        ToSource::Model(_) => Ok(None),
    }
}

/// A node that may have parts of a file.
#[derive(Clone, Debug)]
pub(super) struct RangeSource {
    pub(super) id: NodeId,
    /// The node's name for people.
    pub(super) name: String,
}

/// A connection to a source, and its offer.
struct SourceConnection {
    wire: NodeConnection,
    has: Vec<GroupRun>,
}

impl SourceConnection {
    fn open(agent: &Agent, source: &RangeSource, model: &ModelName) -> Result<Self, String> {
        let opened = agent.open(source.id, PIECES, OPEN_LIMIT);
        let wire = NodeConnection(opened.map_err(|error| error.to_string())?);
        let asked = send_message(&wire, &ToSource::Model(model.clone()));
        asked.map_err(|broken| broken.to_string())?;
        match receive_message(&wire, LIMIT).map_err(|broken| broken.to_string())? {
            Some(FromSource::Offer(has)) => Ok(Self { wire, has }),
            Some(FromSource::Refused(reason)) => Err(reason),
            None => Err(format!("no answer within {} s", LIMIT.as_secs())),
        }
    }

    /// Sends a request; returns the answer, which must have `bytes` bytes.
    fn ask(&self, asked: &ToSource, bytes: u64) -> Result<Vec<u8>, String> {
        send_message(&self.wire, asked).map_err(|broken| broken.to_string())?;
        let came = self.wire.0.recv(bytes as usize, LIMIT);
        match came.map_err(|error| error.to_string())? {
            Some(came) if came.len() as u64 == bytes => Ok(came),
            Some(came) if came.is_empty() => Err("it has no such part any more".to_owned()),
            Some(came) => Err(format!("{} bytes came, expected {bytes}", came.len())),
            None => Err(format!("nothing came within {} s", LIMIT.as_secs())),
        }
    }
}

/// The leaves of a file's tree, from the first source whose leaves `accept` accepts.
pub(super) fn leaves<T>(
    agent: &Agent,
    (model, groups): (&ModelName, HashGroups),
    sources: &[RangeSource],
    accept: impl Fn(&[u8]) -> Option<T>,
) -> Result<T, String> {
    let all = |source: &RangeSource| {
        let line = SourceConnection::open(agent, source, model)?;
        let mut leaves = Vec::new();
        for start in (0..groups.count()).step_by(LEAVES_MAX as usize) {
            let end = groups.count().min(start + LEAVES_MAX);
            let bytes = (end - start) * LEAF_BYTES as u64;
            leaves.extend(line.ask(&ToSource::Leaves(start, end), bytes)?);
        }
        accept(&leaves).ok_or_else(|| "its hashes do not make up the signed root".to_owned())
    };
    let mut faults = Vec::new();
    for source in sources {
        match all(source) {
            Ok(accepted) => return Ok(accepted),
            Err(fault) => faults.push(format!("{}: {fault}", source.name)),
        }
    }
    Err(no_source(faults))
}

fn no_source(faults: Vec<String>) -> String {
    match faults.is_empty() {
        true => "no node that lives has it".to_owned(),
        false => faults.join("; "),
    }
}

/// A run of groups to fetch, and the sources that failed at it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GroupRange {
    groups: Range<u64>,
    tried: BTreeSet<NodeId>,
}

/// The next action of a source.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Fetch(GroupRange),
    /// Ranges that other sources fetch now may be returned.
    Wait,
    /// No range is left for this source.
    Over,
}

/// Queue of ranges to fetch. Pure.
#[derive(Debug)]
struct FetchQueue {
    open: Vec<GroupRange>,
    under_way: usize,
}

impl FetchQueue {
    /// Divides runs of groups into requests, in order.
    fn new(groups: HashGroups, wanted: &[Range<u64>]) -> Self {
        let most = groups_max(groups);
        let cut = |run: &Range<u64>| {
            let run = run.clone();
            let starts = run.clone().step_by(most as usize);
            starts.map(move |start| GroupRange {
                groups: start..run.end.min(start + most),
                tried: BTreeSet::new(),
            })
        };
        let mut open: Vec<GroupRange> = wanted.iter().flat_map(cut).collect();
        open.reverse(); // taken from the end
        Self { open, under_way: 0 }
    }

    fn next(&mut self, source: NodeId, has: &[GroupRun]) -> Next {
        let has_all = |groups: &Range<u64>| {
            let mut has = has.iter();
            has.any(|(start, end)| *start <= groups.start && groups.end <= *end)
        };
        let fits = |piece: &GroupRange| !piece.tried.contains(&source) && has_all(&piece.groups);
        match self.open.iter().rposition(fits) {
            Some(at) => {
                self.under_way += 1;
                Next::Fetch(self.open.remove(at))
            }
            None if self.under_way > 0 => Next::Wait,
            None => Next::Over,
        }
    }

    /// A range was fetched, or returns to the queue for another source.
    fn done(&mut self, failed: Option<(GroupRange, NodeId)>) {
        self.under_way -= 1;
        if let Some((mut piece, source)) = failed {
            piece.tried.insert(source);
            self.open.push(piece);
        }
    }
}

/// Why a range was not fetched.
enum FetchError {
    /// The source failed and is dropped.
    Source(String),
    /// This machine cannot store the bytes.
    Own(io::Error),
}

pub(super) struct FileFetch<'a> {
    pub(super) agent: &'a Agent,
    pub(super) model: &'a ModelName,
    pub(super) partial: &'a VerifiedPartial,
    pub(super) sources: &'a [RangeSource],
    /// Receives the number of bytes fetched; false ends the fetch.
    pub(super) told: &'a (dyn Fn(u64) -> bool + Sync),
    /// Called for a source that sent wrong bytes.
    pub(super) lied: &'a (dyn Fn(&RangeSource, &str) + Sync),
}

/// Why groups were not fetched.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Short {
    /// No node supplied these bytes; the failure of each.
    Lacking(String),
    /// This machine cannot store the bytes, or the fetch was cancelled: another source would not
    /// help.
    Ended(String),
}

struct FetchState {
    progress: Mutex<FetchStatus>,
    changed: Condvar,
}

/// State of a fetch, shared by its threads.
struct FetchStatus {
    queue: FetchQueue,
    /// By source.
    faults: BTreeMap<String, String>,
    /// This machine's own failure, or the cancellation.
    ended: Option<String>,
}

impl FileFetch<'_> {
    /// Fetches runs of groups from all sources in parallel; returns once they are stored.
    ///
    /// # Errors
    /// [`Short`]. Verified ranges stay stored.
    pub(super) fn run(&self, wanted: &[Range<u64>]) -> Result<(), Short> {
        let shared = FetchState {
            progress: Mutex::new(FetchStatus {
                queue: FetchQueue::new(self.partial.groups(), wanted),
                faults: BTreeMap::new(),
                ended: None,
            }),
            changed: Condvar::new(),
        };
        std::thread::scope(|scope| {
            for source in self.sources {
                let shared = &shared;
                scope.spawn(move || self.drain(source, shared));
            }
        });
        let status = shared.progress.into_inner();
        let FetchStatus {
            queue,
            faults,
            ended,
        } = status.unwrap_or_else(PoisonError::into_inner);
        if let Some(ended) = ended {
            return Err(Short::Ended(ended));
        }
        let Some(left) = queue
            .open
            .iter()
            .map(|piece| piece.groups.clone())
            .reduce(around)
        else {
            return Ok(());
        };
        let left = self.partial.groups().span(&left);
        let faults = faults
            .into_iter()
            .map(|(name, fault)| format!("{name}: {fault}"));
        let why = no_source(faults.collect());
        Err(Short::Lacking(format!(
            "bytes {}..{} cannot be had: {why}",
            left.start, left.end
        )))
    }

    /// Fetches ranges from one source until none is left for it.
    fn drain(&self, source: &RangeSource, shared: &FetchState) {
        let line = match SourceConnection::open(self.agent, source, self.model) {
            Ok(line) => line,
            Err(fault) => {
                lock(&shared.progress)
                    .faults
                    .insert(source.name.clone(), fault);
                return;
            }
        };
        while lock(&shared.progress).ended.is_none() {
            let next = lock(&shared.progress).queue.next(source.id, &line.has);
            let piece = match next {
                Next::Over => break,
                Next::Wait => {
                    let status = lock(&shared.progress);
                    drop(shared.changed.wait_timeout(status, LOOK_EVERY));
                    continue;
                }
                Next::Fetch(piece) => piece,
            };
            let fetched = self.fetch(&line, source, &piece.groups);
            let failed = fetched.is_err().then_some((piece, source.id));
            lock(&shared.progress).queue.done(failed);
            shared.changed.notify_all();
            match fetched {
                Ok(bytes) if (self.told)(bytes) => {}
                Ok(_) => end(shared, "nobody waits for it any more".to_owned()),
                Err(FetchError::Own(error)) => {
                    end(shared, format!("{}: {error}", self.partial.path.display()));
                }
                Err(FetchError::Source(fault)) => {
                    lock(&shared.progress)
                        .faults
                        .insert(source.name.clone(), fault);
                    break;
                }
            }
        }
        line.wire.0.close();
    }

    /// Fetches one range; returns its bytes.
    fn fetch(
        &self,
        line: &SourceConnection,
        source: &RangeSource,
        groups: &Range<u64>,
    ) -> Result<u64, FetchError> {
        let cut = self.partial.groups();
        let span = cut.span(groups);
        let bytes = span.end - span.start;
        let asked = ToSource::Groups(groups.start, groups.end);
        let came = line.ask(&asked, bytes).map_err(FetchError::Source)?;
        for (index, group) in groups.clone().zip(came.chunks(cut.each as usize)) {
            if !self.partial.take(index, group).map_err(FetchError::Own)? {
                let at = cut.span(&(index..index + 1));
                let lie = format!("it gave wrong bytes at {}..{}", at.start, at.end);
                (self.lied)(source, &lie);
                return Err(FetchError::Source(lie));
            }
        }
        Ok(bytes)
    }
}

/// Ends the fetch on all sources; the first reason counts.
fn end(shared: &FetchState, reason: String) {
    lock(&shared.progress).ended.get_or_insert(reason);
}

/// The smallest run that contains both.
fn around(a: Range<u64>, b: Range<u64>) -> Range<u64> {
    a.start.min(b.start)..a.end.max(b.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeId = NodeId([1; 16]);
    const TWO: NodeId = NodeId([2; 16]);

    fn groups() -> HashGroups {
        HashGroups::of(100 * (64 << 10))
    }

    fn fetched(next: Next) -> Range<u64> {
        match next {
            Next::Fetch(piece) => piece.groups,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn pieces_are_bounded_and_go_to_sources_that_have_them() {
        let mut queue = FetchQueue::new(groups(), &[0..20, 50..51]);
        assert_eq!(fetched(queue.next(ONE, &[(0, 100)])), 0..16);
        assert_eq!(fetched(queue.next(TWO, &[(50, 60)])), 50..51);
        assert_eq!(queue.next(TWO, &[(50, 60)]), Next::Wait);
        queue.done(None);
        queue.done(None);
        assert_eq!(
            queue.next(TWO, &[(50, 60)]),
            Next::Over,
            "16..20 is not there"
        );
        assert_eq!(fetched(queue.next(ONE, &[(0, 100)])), 16..20);
        queue.done(None);
        assert_eq!(queue.next(ONE, &[(0, 100)]), Next::Over);
    }

    #[test]
    fn what_one_source_fails_at_is_asked_of_another() {
        let all = [(0, 100)];
        let mut queue = FetchQueue::new(groups(), std::slice::from_ref(&(0..4)));
        let Next::Fetch(piece) = queue.next(ONE, &all) else {
            panic!("a piece is open");
        };
        assert_eq!(queue.next(TWO, &all), Next::Wait);
        queue.done(Some((piece, ONE)));
        assert_eq!(queue.next(ONE, &all), Next::Over, "not again");
        assert_eq!(fetched(queue.next(TWO, &all)), 0..4);
        queue.done(None);
        assert!(queue.open.is_empty());
    }

    #[test]
    fn a_source_gives_no_more_than_a_piece() {
        struct All(Vec<u8>);
        impl FileInventory for All {
            fn runs(&self) -> Vec<GroupRun> {
                vec![(0, 100)]
            }

            fn leaves(&self) -> io::Result<Vec<u8>> {
                Ok(vec![7; 100 * LEAF_BYTES])
            }

            fn give(&self, groups: &Range<u64>) -> io::Result<Option<Vec<u8>>> {
                let span = self.groups().span(groups);
                Ok(self
                    .0
                    .get(span.start as usize..span.end as usize)
                    .map(<[u8]>::to_vec))
            }

            fn groups(&self) -> HashGroups {
                groups()
            }
        }
        let stock = All(vec![5; groups().bytes as usize]);
        let len = |asked| of(&stock, &asked).unwrap().map(|bytes| bytes.len());
        assert_eq!(len(ToSource::Groups(3, 19)), Some(1 << 20));
        assert_eq!(len(ToSource::Groups(3, 20)), None);
        assert_eq!(len(ToSource::Groups(0, u64::MAX)), None);
        assert_eq!(len(ToSource::Leaves(2, 4)), Some(64));
        for (start, end) in [(90, 101), (4, 2), (0, u64::MAX), (u64::MAX, u64::MAX)] {
            assert_eq!(len(ToSource::Leaves(start, end)), None, "{start} {end}");
        }
    }
}
