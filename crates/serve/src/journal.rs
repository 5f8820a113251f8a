//! Journals of streamed answers, from which a client that was cut off resumes its stream.
//!
//! ```text
//! stream --replies--> Journal --pieces--> Mirror (a second node), before the client has them
//!                        |
//! Last-Event-ID ---------+--> replayed through the same writer without the events that the client
//!                             has; then the service goes on after the tokens
//! ```
//! A journal is text: a line with the request, then a line for each reply. The same lines give the
//! same events, so an event's number in its stream is all that a client has to say. A stream that
//! another one follows gives nothing more out.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paceline_engine::Reply;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use crate::access::Client;
use crate::endpoint::Endpoint;
use crate::store::Stored;

/// Longest wait for a second node: as long as the silence after which a node counts as gone.
pub const MIRROR_LIMIT: Duration = Duration::from_secs(2);

/// After no node kept a piece, tokens go on alone for so long before one is asked again. By then a
/// silent node counts as gone, and another one is asked.
const ALONE: Duration = MIRROR_LIMIT;

/// Of all room for journals one may take this part.
const SHARE_OF_ONE: usize = 4;

/// More of a journal. The node that keeps its bytes need not read them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The journal's name, which cannot be guessed.
    pub id: String,
    /// Bytes of the journal before this piece; 0 begins it anew.
    pub at: u64,
    /// None are a sign that the journal is still needed.
    pub bytes: Vec<u8>,
}

/// Outcome of mirroring a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Another node has it.
    Yes,
    /// The other node lacks what came before.
    Gap,
    /// No node keeps it, and why.
    No(String),
}

/// Outcome of a search for a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The longest copy that was told in time.
    Copy(Vec<u8>),
    /// All nodes that live have answered, and none has it.
    Nowhere,
    /// No node that answered has it. Another node, which may have it, has not answered.
    Unsure,
}

/// Hears what became of a piece; not called where nobody knows.
pub type Done = Box<dyn FnOnce(Kept) + Send>;

/// Other nodes that keep copies of journals for [`Times::reconnect`](crate::Times::reconnect) after
/// the last piece. Ids that begin with `resp_` are of responses that the nodes store.
pub trait Mirror: Send + Sync {
    /// Has another node keep a piece. Must not block.
    fn put(&self, piece: Piece, done: Done);

    /// The longest copy of a journal that any node has, for the holder of the key with this id. The
    /// node that answers this journal stops. For a response what any node's
    /// [`Doors::response`](crate::Doors::response) says. May block for as long as [`MIRROR_LIMIT`].
    fn find(&self, id: &str, key: Option<&str>) -> Found;

    /// As [`find`](Self::find), a copy of more than `than` bytes. A node that is slow is waited for
    /// where faster ones have shorter copies.
    fn find_longer(&self, id: &str, key: Option<&str>, than: usize) -> Option<Vec<u8>> {
        self.find(id, key).copy().filter(|copy| copy.len() > than)
    }
}

impl Found {
    /// The copy, if there is one.
    pub fn copy(self) -> Option<Vec<u8>> {
        match self {
            Self::Copy(bytes) => Some(bytes),
            Self::Nowhere | Self::Unsure => None,
        }
    }
}

/// The reason why a journal cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// No node has it.
    Nowhere,
    /// A node that may have it has not answered.
    Unsure,
}

/// A request, as it can be understood again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Head {
    /// Names the journal and the answer: 128 random bits.
    pub(crate) id: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) body: String,
    /// For requests that give no seed.
    pub(crate) seed: u64,
    pub(crate) unix_s: u64,
    pub(crate) model: String,
    /// The id of the API key that asked.
    pub(crate) key: Option<String>,
    /// The response that the body names.
    pub(crate) earlier: Option<Stored>,
}

/// A reply and its choice.
pub(crate) type Line = (usize, Reply);

/// A request and the replies to it.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) head: Head,
    state: Mutex<State>,
    /// Number of the stream that reads it.
    life: watch::Sender<u64>,
    /// Bytes of all journals of the node.
    total: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct State {
    text: Vec<u8>,
    /// Bytes of the text that `total` has.
    counted: usize,
    /// Bytes that another node has.
    mirrored: usize,
    /// Whether a node has said so since the last reader began: the one that had them may be gone.
    is_sure: bool,
    /// Choices whose prompt was read.
    read: Vec<usize>,
    /// Since when nobody reads it.
    left: Option<Instant>,
    /// Until when no other node is asked.
    alone_until: Option<Instant>,
    /// It grew too long, and is good for nothing.
    is_cut: bool,
}

/// Another stream answers this request now.
#[derive(Debug)]
pub(crate) struct Superseded;

impl Journal {
    /// # Errors
    /// None but for a defect of ours: what is kept is JSON.
    fn new(head: Head, now: Instant) -> Result<Self, serde_json::Error> {
        let mut text = serde_json::to_vec(&head)?;
        text.push(b'\n');
        Ok(Self::of(head, text, Vec::new(), now))
    }

    fn of(head: Head, text: Vec<u8>, read: Vec<usize>, now: Instant) -> Self {
        let state = State {
            text,
            counted: 0,
            mirrored: 0,
            is_sure: false,
            read,
            left: Some(now),
            alone_until: None,
            is_cut: false,
        };
        Self {
            head,
            state: Mutex::new(state),
            life: watch::channel(0).0,
            total: Arc::default(),
        }
    }

    /// Adds the text's present size to the node's total, in place of the size before.
    fn count(&self, state: &mut State) {
        self.total.fetch_add(state.text.len(), Relaxed);
        self.total.fetch_sub(state.counted, Relaxed);
        state.counted = state.text.len();
    }

    /// Gives up the text: nobody can come back to it, and no other node gets more of it.
    fn cut(&self, state: &mut State) {
        (state.text, state.is_cut) = (Vec::new(), true);
        self.count(state);
    }

    /// Whether it has every reply so far.
    pub(crate) fn is_whole(&self) -> bool {
        !self.state().is_cut
    }

    /// A journal that another node kept. Its last line may be cut off.
    fn parse(mut text: Vec<u8>, now: Instant) -> Option<Self> {
        let end = text.iter().rposition(|byte| *byte == b'\n')? + 1;
        text.truncate(end);
        let mut lines = text.split(|byte| *byte == b'\n');
        let head: Head = serde_json::from_slice(lines.next()?).ok()?;
        let lines = parsed(lines).ok()?;
        let read = lines.iter().filter(|(_, reply)| is_read(reply));
        let read = read.map(|(choice, _)| *choice).collect();
        Some(Self::of(head, text, read, now))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a client may read it: the holder of the key that asked. Without keys to know the id
    /// is enough.
    fn is_of(&self, key: Option<&str>) -> bool {
        self.head.key.as_deref() == key
    }

    /// Begins to read it; the reader before stops. Gives the number of the new reader, its signal
    /// to stop, and the replies so far.
    ///
    /// # Errors
    /// A defect of ours, or of the node that kept it.
    pub(crate) fn take_over(&self) -> Result<(Reader, Vec<Line>), serde_json::Error> {
        let mut state = self.state();
        (state.left, state.is_sure) = (None, false);
        let life = *self.life.borrow() + 1;
        self.life.send_replace(life);
        let superseded = self.life.subscribe();
        let lines = parsed(state.text.split(|byte| *byte == b'\n').skip(1))?;
        Ok((Reader { life, superseded }, lines))
    }

    /// Adds replies. Those that say again that a prompt was read are left out of `lines` too.
    ///
    /// # Errors
    /// [`Superseded`].
    pub(crate) fn append(
        &self,
        life: u64,
        lines: &mut Vec<Line>,
        bytes_max: usize,
    ) -> Result<(), Superseded> {
        let mut state = self.state();
        if *self.life.borrow() != life {
            return Err(Superseded);
        }
        lines.retain(|(choice, reply)| !(is_read(reply) && state.read.contains(choice)));
        for line in lines.iter() {
            if is_read(&line.1) {
                state.read.push(line.0);
            }
            if state.is_cut {
                continue;
            }
            // Memory takes all that is written; a reply is JSON.
            let written = serde_json::to_writer(&mut state.text, line);
            state.is_cut |= written.is_err();
            state.text.push(b'\n');
        }
        match state.is_cut || state.text.len() > bytes_max {
            true => self.cut(&mut state),
            false => self.count(&mut state),
        }
        Ok(())
    }

    /// Has another node keep what was added; why none does, the first time. Takes at most
    /// [`MIRROR_LIMIT`].
    pub(crate) async fn protect(
        &self,
        mirror: &dyn Mirror,
        now: fn() -> Instant,
    ) -> Option<String> {
        for _ in 0..2 {
            let piece = self.next_piece(now())?;
            let end = piece.at as usize + piece.bytes.len();
            let (tell, told) = oneshot::channel();
            let done = move |kept| drop(tell.send(kept)); // it may have waited too long
            mirror.put(piece, Box::new(done));
            let kept = match timeout(MIRROR_LIMIT, told).await {
                Ok(Ok(kept)) => kept,
                _ => Kept::No(format!("no node has answered within {MIRROR_LIMIT:?}")),
            };
            match kept {
                Kept::Yes => {
                    let mut state = self.state();
                    (state.mirrored, state.is_sure) = (end, true);
                    state.alone_until = None;
                    return None;
                }
                Kept::Gap => self.state().mirrored = 0,
                Kept::No(reason) => return self.alone(reason, now()),
            }
        }
        self.alone("the other node forgets it".to_owned(), now())
    }

    /// Goes on unprotected for a while; the reason where it did not do so before.
    fn alone(&self, reason: String, now: Instant) -> Option<String> {
        let before = self.state().alone_until.replace(now + ALONE);
        before.is_none().then_some(reason)
    }

    /// The bytes that another node lacks; `None` where it lacks nothing or is not asked.
    fn next_piece(&self, now: Instant) -> Option<Piece> {
        let state = self.state();
        let waits = state.alone_until.is_some_and(|until| now < until);
        let lacks_nothing = state.is_sure && state.mirrored == state.text.len();
        if state.is_cut || waits || lacks_nothing {
            return None;
        }
        // There is less where the journal was given to another node meanwhile.
        let bytes = state.text.get(state.mirrored..)?.to_vec();
        Some(Piece {
            id: self.head.id.clone(),
            at: state.mirrored as u64,
            bytes,
        })
    }

    /// Tells the other node that the journal is still needed.
    pub(crate) fn touch(&self, mirror: &dyn Mirror) {
        let at = self.state().mirrored as u64;
        if at > 0 {
            let (id, bytes) = (self.head.id.clone(), Vec::new());
            mirror.put(Piece { id, at, bytes }, Box::new(|_| {}));
        }
    }

    /// A reader leaves; it stays readable for a while.
    pub(crate) fn leave(&self, life: u64, now: Instant) {
        let mut state = self.state();
        if *self.life.borrow() == life {
            state.left = Some(now);
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let counted = self.state().counted;
        self.total.fetch_sub(counted, Relaxed);
    }
}

/// A stream that reads a journal.
#[derive(Debug)]
pub(crate) struct Reader {
    /// Its number among those of this journal.
    pub(crate) life: u64,
    /// Changes when another stream follows it.
    pub(crate) superseded: watch::Receiver<u64>,
}

const fn is_read(reply: &Reply) -> bool {
    matches!(reply, Reply::PromptRead { .. })
}

fn parsed<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Result<Vec<Line>, serde_json::Error> {
    let lines = lines.filter(|line| !line.is_empty());
    lines.map(serde_json::from_slice).collect()
}

/// Reads `bytes` as a journal and as a response that other nodes keep, for fuzzing. A journal that
/// is taken can be read.
pub(crate) fn parse(bytes: &[u8], now: Instant) {
    if let Some(journal) = Journal::parse(bytes.to_vec(), now) {
        assert!(journal.take_over().is_ok(), "its lines were read before");
    }
    let _ = serde_json::from_slice::<Stored>(bytes);
}

/// The journals of a node. Clones are the same ones.
#[derive(Clone)]
pub struct Journals(Arc<Shared>);

struct Shared {
    all: Mutex<VecDeque<Arc<Journal>>>,
    /// Bytes of all of them, and of those that a stream still writes after they were given away.
    total: Arc<AtomicUsize>,
    mirror: Mutex<Option<Arc<dyn Mirror>>>,
}

/// How many journals, how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
    /// How long one stays after its reader left.
    pub(crate) stay: Duration,
}

impl Bounds {
    /// Most bytes of one.
    pub(crate) const fn bytes_of_one(&self) -> usize {
        self.bytes / SHARE_OF_ONE
    }
}

impl Default for Journals {
    fn default() -> Self {
        let (all, mirror) = (Mutex::default(), Mutex::default());
        let total = Arc::default();
        Self(Arc::new(Shared { all, total, mirror }))
    }
}

impl Journals {
    /// Has other nodes keep copies from now on.
    pub fn mirror_to(&self, mirror: Arc<dyn Mirror>) {
        let mut own = self.0.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        *own = Some(mirror);
    }

    /// The mirror that keeps copies; `None` before [`mirror_to`](Self::mirror_to).
    pub(crate) fn mirror(&self) -> Option<Arc<dyn Mirror>> {
        let own = self.0.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        own.clone()
    }

    /// Gives a journal to another node, with which its client goes on: this node stops answering
    /// it. `None` where there is none of this name for the holder of the key with this id.
    pub fn give(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>> {
        let journal = self.get(id, key)?;
        self.all().retain(|other| !Arc::ptr_eq(other, &journal));
        let mut state = journal.state();
        let life = *journal.life.borrow() + 1;
        journal.life.send_replace(life);
        let text = (!state.is_cut).then(|| std::mem::take(&mut state.text));
        journal.count(&mut state);
        text
    }

    /// The model that answers a journal of this node.
    pub(crate) fn model_of(&self, id: &str) -> Option<String> {
        let all = self.all();
        let found = all.iter().find(|journal| journal.head.id == id)?;
        Some(found.head.model.clone())
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Arc<Journal>>> {
        self.0.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, id: &str, key: Option<&str>) -> Option<Arc<Journal>> {
        let all = self.all();
        let found = all.iter().find(|journal| journal.head.id == id);
        let found = found.filter(|journal| journal.is_of(key))?;
        let is_whole = !found.state().is_cut;
        is_whole.then(|| Arc::clone(found))
    }

    /// Begins a journal. `None` where there is no room.
    pub(crate) fn begin(&self, head: Head, bounds: Bounds, now: Instant) -> Option<Arc<Journal>> {
        let journal = Journal::new(head, now).ok()?;
        self.add(journal, bounds, now)
    }

    /// The journal of this name, of this node or another.
    ///
    /// # Errors
    /// [`Absent`].
    pub(crate) async fn find(
        &self,
        id: &str,
        client: &Client,
        bounds: Bounds,
        now: fn() -> Instant,
    ) -> Result<Arc<Journal>, Absent> {
        let key = key_of(client);
        self.forget_old(bounds, now());
        if let Some(own) = self.get(id, key.as_deref()) {
            return Ok(own);
        }
        let mirror = self.mirror().ok_or(Absent::Nowhere)?;
        let (name, asked) = (id.to_owned(), key.clone());
        let find = tokio::task::spawn_blocking(move || mirror.find(&name, asked.as_deref()));
        match find.await {
            Ok(Found::Copy(copy)) => {
                let here = self.take_in(copy, (id, key.as_deref()), (bounds, now()));
                here.ok_or(Absent::Nowhere)
            }
            Ok(Found::Nowhere) => Err(Absent::Nowhere),
            Ok(Found::Unsure) | Err(_) => Err(Absent::Unsure),
        }
    }

    /// The same journal as `short` with more replies, of another node.
    pub(crate) async fn find_longer(
        &self,
        short: &Journal,
        bounds: Bounds,
        now: fn() -> Instant,
    ) -> Option<Arc<Journal>> {
        let Head { id, key, .. } = &short.head;
        let (mirror, name, asked) = (self.mirror()?, id.clone(), key.clone());
        let than = short.state().text.len();
        let find = move || mirror.find_longer(&name, asked.as_deref(), than);
        let copy = tokio::task::spawn_blocking(find).await.ok()??;
        self.take_in(copy, (id, key.as_deref()), (bounds, now()))
    }

    /// Keeps another node's copy here, if it is the right one and there is room.
    fn take_in(
        &self,
        copy: Vec<u8>,
        (id, key): (&str, Option<&str>),
        (bounds, now): (Bounds, Instant),
    ) -> Option<Arc<Journal>> {
        let journal = Journal::parse(copy, now)?;
        let is_right = journal.head.id == id && journal.is_of(key);
        is_right.then(|| self.add(journal, bounds, now))?
    }

    /// Holds the journals to their bytes after `grown` has become longer. Those that nobody reads
    /// make room, the oldest first; where that is not enough, `grown` is cut.
    pub(crate) fn settle(&self, grown: &Journal, bounds: Bounds) {
        if self.bytes() <= bounds.bytes {
            return;
        }
        let mut all = self.all();
        while self.bytes() > bounds.bytes {
            let idle = all.iter().position(|other| other.state().left.is_some());
            let Some(gone) = idle.and_then(|idle| all.remove(idle)) else {
                break;
            };
            drop(gone);
        }
        drop(all);
        if self.bytes() > bounds.bytes {
            grown.cut(&mut grown.state());
        }
    }

    fn bytes(&self) -> usize {
        self.0.total.load(Relaxed)
    }

    fn add(&self, mut journal: Journal, bounds: Bounds, now: Instant) -> Option<Arc<Journal>> {
        self.forget_old(bounds, now);
        let size = |journal: &Journal| journal.state().text.len();
        let own = size(&journal);
        journal.total = Arc::clone(&self.0.total);
        let journal = Arc::new(journal);
        let mut all = self.all();
        all.retain(|other| other.head.id != journal.head.id); // given away before
        let mut sum: usize = all.iter().map(|journal| size(journal)).sum();
        while all.len() >= bounds.count || sum + own > bounds.bytes {
            let idle = all.iter().position(|other| other.state().left.is_some())?;
            let gone = all.remove(idle)?;
            sum -= size(&gone);
        }
        if own > bounds.bytes_of_one() {
            return None;
        }
        journal.count(&mut journal.state());
        all.push_back(Arc::clone(&journal));
        Some(journal)
    }

    fn forget_old(&self, bounds: Bounds, now: Instant) {
        let is_old = |journal: &Arc<Journal>| {
            let left = journal.state().left;
            left.is_some_and(|left| now.saturating_duration_since(left) > bounds.stay)
        };
        self.all().retain(|journal| !is_old(journal));
    }
}

impl fmt::Debug for Journals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} journals", self.all().len())
    }
}

/// The id of a client's key.
pub(crate) fn key_of(client: &Client) -> Option<String> {
    match client {
        Client::Key(id) => Some(id.clone()),
        Client::Anybody | Client::Address(_) => None,
    }
}

#[cfg(test)]
mod tests;
