//! Replication of the journals of streamed answers to other nodes, so that a client can resume at
//! another node.
//!
//! ```text
//! entry --keep:    {"id":..,"at":..}\n BYTES--> another node: Shelf
//!       <-"Yes" | "Gap" | {"No":why}-
//! any   --journal: {"id":..,"key":..}--> every node: the longest of its own and its shelf's
//!       <-BYTES, none for nothing-
//! ```
//! The longest copy of all nodes counts. A node that stored copies for a while, before another was
//! chosen, has the beginning only.
//!
//! One thread sends all segments of this node's streams. Segments that queue up during a round trip
//! go out together, so the token rate does not depend on the round trip. If the storing node is
//! dead or silent, another one is chosen; it answers `Gap` and gets everything.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::member::Life;
use serde::{Deserialize, Serialize};

use super::hosts::NodeConnection;
use super::{Fleet, Inner, LOOK_EVERY};
use crate::workers::connection::{
    ConnectionError, MESSAGE_BYTES_MAX, MessageConnection, receive_message, send_message,
};

/// Services of a node.
pub(super) const KEEP: &str = "keep";
pub(super) const JOURNAL: &str = "journal";

/// How long a journal is stored after its last segment: the time for clients to reconnect.
pub(super) const STAY: Duration = Duration::from_secs(60);

/// Maximum stored journals of other nodes: four ingress nodes with all their streams.
pub(super) const COPIES_MAX: usize = 1024;

/// Their maximum bytes of memory.
pub(super) const COPIES_BYTES_MAX: usize = 256 << 20;

/// Longest wait for a node to store a segment: half of the clients' wait, so that one more node can
/// be tried.
const KEEP_LIMIT: Duration = Duration::from_secs(1);

/// Time for which a dead or silent node is not used again. By then membership declares a silent
/// node dead; a node that was only busy is used again.
const SHUN: Duration = Duration::from_secs(2);

/// Longest wait for the copy of a journal that another node has.
const FIND_LIMIT: Duration = Duration::from_secs(2);

/// After a first copy, wait this much longer for a longer one: live nodes answer in some
/// milliseconds. A shorter copy gives the same answer, recomputed from its end.
const FIND_MORE: Duration = Duration::from_millis(100);

/// Maximum nodes queried for a copy.
const NODES_MAX: usize = 64;

/// Maximum queued segments: some of each stream of a node.
pub(super) const QUEUE_MAX: usize = 1024;

/// A segment of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicatedSegment {
    /// The journal's name.
    pub id: String,
    /// Offset of this segment in bytes; 0 starts the journal again.
    pub at: u64,
    /// Empty to keep the copy from expiring.
    pub bytes: Vec<u8>,
}

/// Result of the request to store a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JournalStored {
    /// Another node has it.
    Yes,
    /// The other node lacks the bytes before it.
    Gap,
    /// No node stores it; the reason.
    No(String),
}

/// Outcome of a search for a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalSearch {
    /// The longest copy received in time.
    Copy(Vec<u8>),
    /// All live nodes have answered, and none has it.
    Nowhere,
    /// No node that answered has it. Another node, which may have it, has not answered, or died a
    /// moment ago.
    Unsure,
}

/// Receives the result for a segment.
pub type JournalCallback = Box<dyn FnOnce(JournalStored) + Send>;

/// Header of a segment: a line of JSON before its bytes.
#[derive(Serialize, Deserialize)]
struct Label {
    id: String,
    at: u64,
}

/// Request for a journal, sent to every live node, at most [`NODES_MAX`].
#[derive(Serialize, Deserialize)]
struct JournalRequest {
    id: String,
    key: Option<String>,
}

/// Journals of other nodes.
#[derive(Default)]
pub(super) struct JournalStore(Mutex<BTreeMap<String, StoredJournal>>);

struct StoredJournal {
    bytes: Vec<u8>,
    touched: Instant,
}

impl JournalStore {
    pub(super) fn put(&self, piece: ReplicatedSegment, now: Instant) -> JournalStored {
        let mut all = lock(&self.0);
        all.retain(|_, copy| now.saturating_duration_since(copy.touched) <= STAY);
        let sum: usize = all.values().map(|copy| copy.bytes.len()).sum();
        if sum + piece.bytes.len() > COPIES_BYTES_MAX {
            return JournalStored::No("it has no room for more".to_owned());
        }
        if piece.at == 0 && !all.contains_key(&piece.id) && all.len() >= COPIES_MAX {
            return JournalStored::No(format!("it keeps {COPIES_MAX} answers already"));
        }
        let copy = match piece.at {
            0 => all.entry(piece.id).or_insert_with(|| StoredJournal {
                bytes: Vec::new(),
                touched: now,
            }),
            _ => match all.get_mut(&piece.id) {
                Some(copy) => copy,
                None => return JournalStored::Gap,
            },
        };
        if piece.at > copy.bytes.len() as u64 {
            return JournalStored::Gap;
        }
        copy.touched = now;
        if !piece.bytes.is_empty() {
            copy.bytes.truncate(piece.at as usize); // it is sent again
            copy.bytes.extend_from_slice(&piece.bytes);
        }
        JournalStored::Yes
    }

    pub(super) fn find(&self, id: &str, now: Instant) -> Option<Vec<u8>> {
        let all = lock(&self.0);
        let copy = all.get(id)?;
        let is_fresh = now.saturating_duration_since(copy.touched) <= STAY;
        is_fresh.then(|| copy.bytes.clone())
    }
}

/// Sends journals of this node to another.
pub(super) struct JournalCopier {
    queue: SyncSender<(ReplicatedSegment, JournalCallback)>,
}

impl JournalCopier {
    /// Starts the sending thread, which ends with this value.
    pub(super) fn start(agent: Agent) -> std::io::Result<Self> {
        let (queue, pieces) = sync_channel(QUEUE_MAX);
        let mut sender = Sender {
            agent,
            pieces,
            to: None,
            shunned: BTreeMap::new(),
        };
        let thread = std::thread::Builder::new().name("journals".to_owned());
        thread.spawn(move || sender.run())?;
        Ok(Self { queue })
    }

    pub(super) fn put(&self, piece: ReplicatedSegment, done: JournalCallback) {
        let refused = match self.queue.try_send((piece, done)) {
            Ok(()) => return,
            Err(TrySendError::Full((_, done)) | TrySendError::Disconnected((_, done))) => done,
        };
        refused(JournalStored::No("too much waits to be kept".to_owned()));
    }
}

struct Sender {
    agent: Agent,
    pieces: Receiver<(ReplicatedSegment, JournalCallback)>,
    to: Option<(NodeId, NodeConnection)>,
    /// By node: until when it is not used.
    shunned: BTreeMap<NodeId, Instant>,
}

impl Sender {
    fn run(&mut self) {
        loop {
            match self.pieces.recv_timeout(LOOK_EVERY) {
                Ok(first) => {
                    let mut all = vec![first];
                    all.extend(self.pieces.try_iter().take(QUEUE_MAX));
                    self.keep(all);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Sends the segments to the current storing node, or to the next that accepts them.
    fn keep(&mut self, mut all: Vec<(ReplicatedSegment, JournalCallback)>) {
        let mut reason = "no other node lives".to_owned();
        while let Some((node, line)) = self.reach(&mut reason) {
            match exchange(&line, &mut all) {
                Ok(()) => {
                    self.to = Some((node, line));
                    return;
                }
                Err(broken) => {
                    reason = broken.to_string();
                    line.close();
                    self.shunned.insert(node, Instant::now() + SHUN);
                }
            }
        }
        for (_, done) in all {
            done(JournalStored::No(reason.clone()));
        }
    }

    fn reach(&mut self, reason: &mut String) -> Option<(NodeId, NodeConnection)> {
        if let Some((node, line)) = self.to.take()
            && self.agent.life(node) == Life::Alive
        {
            return Some((node, line));
        }
        self.shunned.retain(|_, until| Instant::now() < *until);
        for node in others(&self.agent, &[Life::Alive]) {
            if self.shunned.contains_key(&node) {
                continue;
            }
            match self.agent.open(node, KEEP, KEEP_LIMIT) {
                Ok(channel) => return Some((node, NodeConnection(channel))),
                Err(error) => {
                    *reason = error.to_string();
                    self.shunned.insert(node, Instant::now() + SHUN);
                }
            }
        }
        None
    }
}

/// The other nodes in one of `states`, in order after this one, so that each node stores for a
/// different one.
fn others(agent: &Agent, states: &[Life]) -> Vec<NodeId> {
    let own = agent.id();
    let all = agent.nodes().into_iter();
    let wanted = all.filter(|node| states.contains(&node.state) && node.id != own);
    let mut ids: Vec<NodeId> = wanted.map(|node| node.id).collect();
    ids.sort_by_key(|id| (*id < own, *id));
    ids
}

/// Sends segments and delivers each result; removes the answered ones from `all`.
fn exchange(
    line: &dyn MessageConnection,
    all: &mut Vec<(ReplicatedSegment, JournalCallback)>,
) -> Result<(), ConnectionError> {
    let end = Instant::now() + KEEP_LIMIT;
    let mut sent = 0;
    while sent < all.len() {
        let message = packed(&all[sent].0);
        if message.len() > MESSAGE_BYTES_MAX {
            let (_, done) = all.remove(sent);
            done(JournalStored::No(format!(
                "{} bytes at once are more than {MESSAGE_BYTES_MAX}",
                message.len()
            )));
            continue;
        }
        line.send(&message)?;
        sent += 1;
    }
    while !all.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        let kept: Option<JournalStored> = receive_message(line, left)?;
        let kept =
            kept.ok_or_else(|| ConnectionError::new(format!("silent for {KEEP_LIMIT:?}")))?;
        let (_, done) = all.remove(0);
        done(kept);
    }
    Ok(())
}

fn packed(piece: &ReplicatedSegment) -> Vec<u8> {
    let label = Label {
        id: piece.id.clone(),
        at: piece.at,
    };
    let mut message = serde_json::to_vec(&label).expect("a label is JSON");
    message.push(b'\n');
    message.extend_from_slice(&piece.bytes);
    message
}

fn unpacked(message: &[u8]) -> Option<ReplicatedSegment> {
    let end = message.iter().position(|byte| *byte == b'\n')?;
    let Label { id, at } = serde_json::from_slice(&message[..end]).ok()?;
    let bytes = message[end + 1..].to_vec();
    Some(ReplicatedSegment { id, at, bytes })
}

/// Reads `bytes` as messages about journals, for fuzzing. Asserts that a parsed segment packs to
/// the same bytes.
pub(super) fn parse(bytes: &[u8]) {
    if let Some(piece) = unpacked(bytes) {
        assert_eq!(unpacked(&packed(&piece)), Some(piece));
    }
    let _ = serde_json::from_slice::<JournalRequest>(bytes);
    let _ = serde_json::from_slice::<JournalStored>(bytes);
}

/// Stores segments from another node until its channel closes.
pub(super) fn answer_keep(inner: &Inner, line: &dyn MessageConnection) {
    let keep = || -> Result<(), ConnectionError> {
        loop {
            let Some(message) = line.receive(LOOK_EVERY)? else {
                if inner.is_over() {
                    return Ok(());
                }
                continue;
            };
            let piece =
                unpacked(&message).ok_or_else(|| ConnectionError::new("no piece of a journal"))?;
            send_message(line, &inner.shelf.put(piece, Instant::now()))?;
        }
    };
    // The other end sees the closed connection.
    let _: Result<(), ConnectionError> = keep();
    line.close();
}

/// Serves a journal to another node.
pub(super) fn answer_journal(inner: &Inner, line: &dyn MessageConnection) {
    let Ok(Some(JournalRequest { id, key })) = receive_message(line, FIND_LIMIT) else {
        return line.close();
    };
    let own = inner.spec.doors.journal(&id, key.as_deref());
    // This node's own journal may predate the resumption at another node.
    let kept = inner.shelf.find(&id, Instant::now());
    let found = own.into_iter().chain(kept).max_by_key(Vec::len);
    // After a failed send it asks another node.
    let _: Result<(), ConnectionError> = line.send(&found.unwrap_or_default());
}

/// The longest copy of a journal that arrives soon. A node that just froze delays nothing if
/// another node has a copy.
pub(super) fn find(inner: &Arc<Inner>, id: &str, key: Option<&str>) -> JournalSearch {
    search(inner, id, key, 0)
}

impl Fleet {
    /// As [`find_journal`](Self::find_journal), but a copy of more than `than` bytes: waits for a
    /// slow node while faster ones have shorter copies.
    pub fn find_longer_journal(&self, id: &str, key: Option<&str>, than: usize) -> Option<Vec<u8>> {
        match search(&self.inner, id, key, than) {
            JournalSearch::Copy(bytes) => Some(bytes),
            JournalSearch::Nowhere | JournalSearch::Unsure => None,
        }
    }
}

fn search(inner: &Arc<Inner>, id: &str, key: Option<&str>, than: usize) -> JournalSearch {
    let own = inner.shelf.find(id, Instant::now());
    let told = ask_others(inner, id, key);
    match longest(&told, own.unwrap_or_default(), than) {
        JournalSearch::Nowhere if inner.has_lost_some() || inner.is_newly_back() => {
            JournalSearch::Unsure
        }
        found => found,
    }
}

/// Since when this node sees others as dead. They may be alive and this node partitioned off.
#[derive(Default)]
pub(super) struct Deaths(Mutex<BTreeMap<NodeId, Instant>>);

impl Deaths {
    /// Updates the dead nodes; returns whether one may still have journals out of this node's
    /// reach.
    fn look(&self, dead: &[NodeId], now: Instant) -> bool {
        let mut all = lock(&self.0);
        all.retain(|id, _| dead.contains(id));
        dead.iter().for_each(|id| {
            all.entry(*id).or_insert(now);
        });
        let mut since = all.values();
        since.any(|at| now.saturating_duration_since(*at) <= STAY)
    }
}

impl Inner {
    /// Whether a node died so recently that its stored journals would not have expired. Called
    /// regularly as well, to record deaths.
    pub(super) fn has_lost_some(&self) -> bool {
        let dead = others(&self.agent, &[Life::Dead]);
        self.deaths.look(&dead, Instant::now())
    }
}

/// A node's answer: its copy, empty if it has none; `None` without an answer.
type JournalReply = Option<Vec<u8>>;

/// Queries all other nodes at once for a journal, including suspected ones, which may just be busy.
/// The channel closes when all have answered.
fn ask_others(inner: &Arc<Inner>, id: &str, key: Option<&str>) -> Receiver<JournalReply> {
    let (tell, told) = sync_channel(NODES_MAX);
    let all = others(&inner.agent, &[Life::Alive, Life::Suspect]);
    for node in all.into_iter().take(NODES_MAX) {
        let (inner, tell) = (Arc::clone(inner), tell.clone());
        let wish = JournalRequest {
            id: id.to_owned(),
            key: key.map(str::to_owned),
        };
        let ask = move || {
            // The receiver may have continued with another copy.
            let _ = tell.send(ask(&inner.agent, node, &wish));
        };
        let thread = std::thread::Builder::new().name("journal".to_owned());
        if thread.spawn(ask).is_err() {
            break; // no further threads: the queried nodes must do
        }
    }
    told
}

/// The longest of this node's own copy and those received in time, if longer than `than` bytes.
fn longest(told: &Receiver<JournalReply>, own: Vec<u8>, than: usize) -> JournalSearch {
    let is_long = own.len() > than;
    let mut end = Instant::now() + if is_long { FIND_MORE } else { FIND_LIMIT };
    let (mut best, mut all_answered) = (own, true);
    loop {
        match told.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Some(copy)) if copy.len() > best.len() => {
                best = copy;
                if best.len() > than {
                    end = end.min(Instant::now() + FIND_MORE);
                }
            }
            Ok(answer) => all_answered &= answer.is_some(),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                all_answered = false;
                break;
            }
        }
    }
    match (best.len() > than, all_answered) {
        (true, _) => JournalSearch::Copy(best),
        (false, true) => JournalSearch::Nowhere,
        (false, false) => JournalSearch::Unsure,
    }
}

/// Queries one node.
fn ask(agent: &Agent, node: NodeId, wish: &JournalRequest) -> JournalReply {
    let line = NodeConnection(agent.open(node, JOURNAL, FIND_LIMIT).ok()?);
    send_message(&line, wish).ok()?;
    line.receive(FIND_LIMIT).ok()?
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::fleet) fn piece(id: &str, at: u64, text: &str) -> ReplicatedSegment {
        ReplicatedSegment {
            id: id.to_owned(),
            at,
            bytes: text.as_bytes().to_vec(),
        }
    }

    #[test]
    fn a_piece_travels_whole() {
        let sent = piece("ab", 7, "line\nline\n");
        assert_eq!(unpacked(&packed(&sent)), Some(sent));
        assert_eq!(unpacked(b"{}\n"), None);
        assert_eq!(unpacked(b"no line"), None);
    }

    #[test]
    fn a_node_that_died_may_have_journals_for_as_long_as_they_stay() {
        let (deaths, start) = (Deaths::default(), Instant::now());
        let node = |number: u8| NodeId([number; 16]);
        let at = |s| start + Duration::from_secs(s);
        assert!(!deaths.look(&[], at(0)));
        assert!(deaths.look(&[node(1)], at(10)));
        assert!(deaths.look(&[node(1)], at(70)));
        assert!(!deaths.look(&[node(1)], at(71)));
        assert!(deaths.look(&[node(1), node(2)], at(80)));
        assert!(!deaths.look(&[node(1)], at(90)), "2 is back");
        assert!(deaths.look(&[node(2), node(1)], at(100)));
    }

    #[test]
    fn pieces_are_joined_and_a_gap_is_told() {
        let (shelf, now) = (JournalStore::default(), Instant::now());
        assert_eq!(shelf.put(piece("a", 3, "x"), now), JournalStored::Gap);
        assert_eq!(shelf.put(piece("a", 0, "one"), now), JournalStored::Yes);
        assert_eq!(shelf.put(piece("a", 3, "two"), now), JournalStored::Yes);
        assert_eq!(
            shelf.put(piece("a", 3, "two"), now),
            JournalStored::Yes,
            "again"
        );
        assert_eq!(shelf.put(piece("a", 7, "x"), now), JournalStored::Gap);
        assert_eq!(shelf.find("a", now), Some(b"onetwo".to_vec()));
        assert_eq!(shelf.put(piece("a", 0, "new"), now), JournalStored::Yes);
        assert_eq!(shelf.find("a", now), Some(b"new".to_vec()));
        assert_eq!(shelf.find("b", now), None);
    }

    #[test]
    fn a_copy_stays_a_minute_after_its_last_sign() {
        let (shelf, now) = (JournalStore::default(), Instant::now());
        shelf.put(piece("a", 0, "one"), now);
        let later = now + STAY;
        assert_eq!(shelf.put(piece("a", 3, ""), later), JournalStored::Yes);
        let last = later + STAY;
        assert_eq!(shelf.find("a", last), Some(b"one".to_vec()));
        let after = last + Duration::from_millis(1);
        assert_eq!(shelf.find("a", after), None);
        assert_eq!(shelf.put(piece("a", 3, "x"), after), JournalStored::Gap);
    }

    #[test]
    fn the_longest_copy_is_taken_and_this_nodes_own_is_one_of_them() {
        let of = |bytes: usize| vec![b'x'; bytes];
        let found = |own: usize, others: &[Option<usize>], than: usize| {
            let (tell, told) = sync_channel(NODES_MAX);
            others.iter().for_each(|it| tell.send(it.map(of)).unwrap());
            drop(tell);
            longest(&told, of(own), than)
        };
        let copy = |bytes: usize| JournalSearch::Copy(of(bytes));
        assert_eq!(found(0, &[], 0), JournalSearch::Nowhere);
        assert_eq!(found(0, &[Some(0), None], 0), JournalSearch::Unsure);
        assert_eq!(found(5, &[], 0), copy(5));
        assert_eq!(found(5, &[Some(0), Some(9), None, Some(7)], 0), copy(9));
        assert_eq!(found(9, &[Some(0), Some(5)], 0), copy(9));
        assert_eq!(found(5, &[Some(6), Some(0)], 6), JournalSearch::Nowhere);
        assert_eq!(found(5, &[Some(6), Some(7)], 6), copy(7));
    }

    #[test]
    fn the_shelf_is_bounded() {
        let (shelf, now) = (JournalStore::default(), Instant::now());
        for number in 0..COPIES_MAX {
            assert_eq!(
                shelf.put(piece(&number.to_string(), 0, "x"), now),
                JournalStored::Yes
            );
        }
        assert!(matches!(
            shelf.put(piece("y", 0, "x"), now),
            JournalStored::No(_)
        ));
        assert_eq!(shelf.put(piece("0", 1, "x"), now), JournalStored::Yes);
    }
}
