//! Journals of streamed responses, from which a disconnected client resumes its stream.
//!
//! ```text
//! stream --replies--> Journal --pieces--> Mirror (a second node), before the client has them
//!                        |
//! Last-Event-ID ---------+--> replayed through the same writer without the events that the client
//!                             has; then the engine continues after the tokens
//! ```
//! A journal is text: a line with the request, then a line for each reply. The same lines give the
//! same events, so an event's number in its stream is all that a client has to say. A stream that
//! another one follows gives nothing more out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paceline_engine::Reply;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use crate::access::ClientIdentity;
use crate::endpoint::Endpoint;
use crate::store::StoredResponse;

/// Timeout of mirroring: as long as the silence after which a node counts as dead.
pub const MIRROR_LIMIT: Duration = Duration::from_secs(2);

/// Pause between attempts to mirror after no node accepted a part. By then a silent node counts as
/// dead, and the next attempt goes to another.
const ALONE: Duration = MIRROR_LIMIT;

/// A single journal may take this fraction of the byte limit.
const SHARE_OF_ONE: usize = 4;

/// A part of a journal to mirror. The mirroring node does not parse the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalPart {
    /// The journal's id, which cannot be guessed.
    pub id: String,
    /// Offset in the journal; 0 starts it anew.
    pub at: u64,
    /// Empty to keep the copy alive.
    pub bytes: Vec<u8>,
}

/// Result of mirroring a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MirrorOutcome {
    /// Another node stored it.
    Yes,
    /// The other node lacks the bytes before it.
    Gap,
    /// No node stored it; the reason.
    No(String),
}

/// Result of looking up a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalMatch {
    /// The longest copy received in time.
    Copy(Vec<u8>),
    /// All live nodes answered; none has it.
    Nowhere,
    /// No answering node has it; a node that may have it did not answer.
    Unsure,
}

/// Called with the result; not called if it stays unknown.
pub type MirrorCallback = Box<dyn FnOnce(MirrorOutcome) + Send>;

/// Access to other nodes, which keep copies of journals for
/// [`Times::reconnect`](crate::Times::reconnect) after the last part. Ids that begin with `resp_`
/// name stored responses.
pub trait Mirror: Send + Sync {
    /// Sends a part to another node. Must not block.
    fn put(&self, piece: JournalPart, done: MirrorCallback);

    /// Looks up the longest copy of a journal, for the key with this id. The node that produces
    /// this journal stops. For a response, asks each node's
    /// [`ModelRegistry::response`](crate::Doors::response). Blocks for at most [`MIRROR_LIMIT`].
    fn find(&self, id: &str, key: Option<&str>) -> JournalMatch;

    /// As [`find`](Self::find), but only copies of more than `than` bytes. Waits for slow nodes if
    /// faster ones have shorter copies.
    fn find_longer(&self, id: &str, key: Option<&str>, than: usize) -> Option<Vec<u8>> {
        self.find(id, key).copy().filter(|copy| copy.len() > than)
    }
}

impl JournalMatch {
    /// The copy, if there is one.
    pub fn copy(self) -> Option<Vec<u8>> {
        match self {
            Self::Copy(bytes) => Some(bytes),
            Self::Nowhere | Self::Unsure => None,
        }
    }
}

/// Why a journal was not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JournalAbsence {
    /// No node has it.
    Nowhere,
    /// A node that may have it did not answer.
    Unsure,
}

/// First line of a journal: the request and all that is needed to parse it again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JournalHead {
    /// Id of the journal and the response: 128 random bits.
    pub(crate) id: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) body: String,
    /// Seed for requests without one.
    pub(crate) seed: u64,
    pub(crate) unix_s: u64,
    pub(crate) model: String,
    /// Id of the request's API key.
    pub(crate) key: Option<String>,
    /// The previous response that the body names.
    pub(crate) earlier: Option<StoredResponse>,
}

/// A reply with its choice's index.
pub(crate) type ChoiceReply = (usize, Reply);

/// The request and the replies of one streamed response.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) head: JournalHead,
    state: Mutex<State>,
    /// Number of the current reader.
    life: watch::Sender<u64>,
    /// Bytes of all journals of the node, shared.
    total: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct State {
    text: Vec<u8>,
    /// Bytes of `text` included in `total`.
    counted: usize,
    /// Bytes mirrored to another node.
    mirrored: usize,
    /// Whether a node confirmed `mirrored` since the last reader began; the earlier mirror may be
    /// gone.
    is_sure: bool,
    /// Choices whose prefill reply is recorded.
    read: Vec<usize>,
    /// Since when it has no reader.
    left: Option<Instant>,
    /// No mirroring before this time.
    alone_until: Option<Instant>,
    /// It exceeded its limit, and its text is gone.
    is_cut: bool,
}

/// Another stream continues this response now.
#[derive(Debug)]
pub(crate) struct Superseded;

impl Journal {
    /// # Errors
    /// Only by a bug: the head is valid JSON.
    fn new(head: JournalHead, now: Instant) -> Result<Self, serde_json::Error> {
        let mut text = serde_json::to_vec(&head)?;
        text.push(b'\n');
        Ok(Self::of(head, text, Vec::new(), now))
    }

    fn of(head: JournalHead, text: Vec<u8>, read: Vec<usize>, now: Instant) -> Self {
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

    /// Updates the node's total with the text's current size.
    fn count(&self, state: &mut State) {
        self.total.fetch_add(state.text.len(), Relaxed);
        self.total.fetch_sub(state.counted, Relaxed);
        state.counted = state.text.len();
    }

    /// Discards the text: clients can no longer resume it, and mirroring stops.
    fn cut(&self, state: &mut State) {
        (state.text, state.is_cut) = (Vec::new(), true);
        self.count(state);
    }

    /// Whether it has all replies so far.
    pub(crate) fn is_whole(&self) -> bool {
        !self.state().is_cut
    }

    /// Parses a mirrored copy. Its last line may be truncated.
    fn parse(mut text: Vec<u8>, now: Instant) -> Option<Self> {
        let end = text.iter().rposition(|byte| *byte == b'\n')? + 1;
        text.truncate(end);
        let mut lines = text.split(|byte| *byte == b'\n');
        let head: JournalHead = serde_json::from_slice(lines.next()?).ok()?;
        let lines = parsed(lines).ok()?;
        let read = lines.iter().filter(|(_, reply)| is_read(reply));
        let read = read.map(|(choice, _)| *choice).collect();
        Some(Self::of(head, text, read, now))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the key with this id may read it. Without keys, knowing the id is enough.
    fn is_of(&self, key: Option<&str>) -> bool {
        self.head.key.as_deref() == key
    }

    /// Registers a new reader; the previous one stops. Returns the reader and the replies so far.
    pub(crate) fn take_over(&self) -> Result<(JournalReader, Vec<ChoiceReply>), serde_json::Error> {
        let mut state = self.state();
        (state.left, state.is_sure) = (None, false);
        let life = *self.life.borrow() + 1;
        self.life.send_replace(life);
        let superseded = self.life.subscribe();
        let lines = parsed(state.text.split(|byte| *byte == b'\n').skip(1))?;
        Ok((JournalReader { life, superseded }, lines))
    }

    /// Appends replies. Repeated prefill replies are removed from `lines` too.
    pub(crate) fn append(
        &self,
        life: u64,
        lines: &mut Vec<ChoiceReply>,
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
            // Writing JSON to memory cannot fail.
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

    /// Mirrors the new bytes; returns the reason of a failure, once. Takes at most
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
                _ => MirrorOutcome::No(format!("no node has answered within {MIRROR_LIMIT:?}")),
            };
            match kept {
                MirrorOutcome::Yes => {
                    let mut state = self.state();
                    (state.mirrored, state.is_sure) = (end, true);
                    state.alone_until = None;
                    return None;
                }
                MirrorOutcome::Gap => self.state().mirrored = 0,
                MirrorOutcome::No(reason) => return self.alone(reason, now()),
            }
        }
        self.alone("the other node forgets it".to_owned(), now())
    }

    /// Pauses mirroring for [`ALONE`]; returns the reason unless it was paused before.
    fn alone(&self, reason: String, now: Instant) -> Option<String> {
        let before = self.state().alone_until.replace(now + ALONE);
        before.is_none().then_some(reason)
    }

    /// The bytes to mirror; `None` if there are none, or mirroring is paused.
    fn next_piece(&self, now: Instant) -> Option<JournalPart> {
        let state = self.state();
        let waits = state.alone_until.is_some_and(|until| now < until);
        let lacks_nothing = state.is_sure && state.mirrored == state.text.len();
        if state.is_cut || waits || lacks_nothing {
            return None;
        }
        // Shorter after the journal was released to another node.
        let bytes = state.text.get(state.mirrored..)?.to_vec();
        Some(JournalPart {
            id: self.head.id.clone(),
            at: state.mirrored as u64,
            bytes,
        })
    }

    /// Keeps the mirrored copy alive.
    pub(crate) fn touch(&self, mirror: &dyn Mirror) {
        let at = self.state().mirrored as u64;
        if at > 0 {
            let (id, bytes) = (self.head.id.clone(), Vec::new());
            mirror.put(JournalPart { id, at, bytes }, Box::new(|_| {}));
        }
    }

    /// Unregisters a reader; the journal stays for [`JournalBounds::stay`].
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

#[derive(Debug)]
pub(crate) struct JournalReader {
    pub(crate) life: u64,
    /// Changes when another reader replaces it.
    pub(crate) superseded: watch::Receiver<u64>,
}

const fn is_read(reply: &Reply) -> bool {
    matches!(reply, Reply::PromptRead { .. })
}

fn parsed<'a>(
    lines: impl Iterator<Item = &'a [u8]>,
) -> Result<Vec<ChoiceReply>, serde_json::Error> {
    let lines = lines.filter(|line| !line.is_empty());
    lines.map(serde_json::from_slice).collect()
}

/// Parses `bytes` as a journal and as a stored response, for fuzzing. An accepted journal must be
/// readable.
pub(crate) fn parse(bytes: &[u8], now: Instant) {
    if let Some(journal) = Journal::parse(bytes.to_vec(), now) {
        assert!(journal.take_over().is_ok(), "its lines were read before");
    }
    let _ = serde_json::from_slice::<StoredResponse>(bytes);
}

/// The journals of a node. Clones share them.
#[derive(Clone, derive_more::Debug)]
#[debug("{} journals", self.all().len())]
pub struct Journals(Arc<JournalsState>);

struct JournalsState {
    all: Mutex<VecDeque<Arc<Journal>>>,
    /// Bytes of all journals, with released ones that a stream still writes.
    total: Arc<AtomicUsize>,
    mirror: Mutex<Option<Arc<dyn Mirror>>>,
}

/// Limits on count, bytes and age of journals.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JournalBounds {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
    /// How long a journal stays without a reader.
    pub(crate) stay: Duration,
}

impl JournalBounds {
    /// Maximum bytes of one journal.
    pub(crate) const fn bytes_of_one(&self) -> usize {
        self.bytes / SHARE_OF_ONE
    }
}

impl Default for Journals {
    fn default() -> Self {
        let (all, mirror) = (Mutex::default(), Mutex::default());
        let total = Arc::default();
        Self(Arc::new(JournalsState { all, total, mirror }))
    }
}

impl Journals {
    /// Mirrors journals from now on.
    pub fn mirror_to(&self, mirror: Arc<dyn Mirror>) {
        let mut own = self.0.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        *own = Some(mirror);
    }

    /// The mirror; `None` before [`mirror_to`](Self::mirror_to).
    pub(crate) fn mirror(&self) -> Option<Arc<dyn Mirror>> {
        let own = self.0.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        own.clone()
    }

    /// Releases a journal to the node that the client reconnected to; this node stops the response.
    /// `None` if the key with this id has no such journal.
    pub fn release(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>> {
        let journal = self.get(id, key)?;
        self.all().retain(|other| !Arc::ptr_eq(other, &journal));
        let mut state = journal.state();
        let life = *journal.life.borrow() + 1;
        journal.life.send_replace(life);
        let text = (!state.is_cut).then(|| std::mem::take(&mut state.text));
        journal.count(&mut state);
        text
    }

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

    /// Starts a journal; `None` if the limits leave no room.
    pub(crate) fn begin(
        &self,
        head: JournalHead,
        bounds: JournalBounds,
        now: Instant,
    ) -> Option<Arc<Journal>> {
        let journal = Journal::new(head, now).ok()?;
        self.add(journal, bounds, now)
    }

    /// Finds a journal here or at another node.
    pub(crate) async fn find(
        &self,
        id: &str,
        client: &ClientIdentity,
        bounds: JournalBounds,
        now: fn() -> Instant,
    ) -> Result<Arc<Journal>, JournalAbsence> {
        let key = key_of(client);
        self.forget_old(bounds, now());
        if let Some(own) = self.get(id, key.as_deref()) {
            return Ok(own);
        }
        let mirror = self.mirror().ok_or(JournalAbsence::Nowhere)?;
        let (name, asked) = (id.to_owned(), key.clone());
        let find = tokio::task::spawn_blocking(move || mirror.find(&name, asked.as_deref()));
        match find.await {
            Ok(JournalMatch::Copy(copy)) => {
                let here = self.store_copy(copy, (id, key.as_deref()), (bounds, now()));
                here.ok_or(JournalAbsence::Nowhere)
            }
            Ok(JournalMatch::Nowhere) => Err(JournalAbsence::Nowhere),
            Ok(JournalMatch::Unsure) | Err(_) => Err(JournalAbsence::Unsure),
        }
    }

    /// Finds a longer copy of `short` at another node.
    pub(crate) async fn find_longer(
        &self,
        short: &Journal,
        bounds: JournalBounds,
        now: fn() -> Instant,
    ) -> Option<Arc<Journal>> {
        let JournalHead { id, key, .. } = &short.head;
        let (mirror, name, asked) = (self.mirror()?, id.clone(), key.clone());
        let than = short.state().text.len();
        let find = move || mirror.find_longer(&name, asked.as_deref(), than);
        let copy = tokio::task::spawn_blocking(find).await.ok()??;
        self.store_copy(copy, (id, key.as_deref()), (bounds, now()))
    }

    /// Stores a mirrored copy here, if it matches and the limits allow.
    fn store_copy(
        &self,
        copy: Vec<u8>,
        (id, key): (&str, Option<&str>),
        (bounds, now): (JournalBounds, Instant),
    ) -> Option<Arc<Journal>> {
        let journal = Journal::parse(copy, now)?;
        let is_right = journal.head.id == id && journal.is_of(key);
        is_right.then(|| self.add(journal, bounds, now))?
    }

    /// Enforces the byte limit after `grown` became longer. Removes journals without readers,
    /// oldest first; if that is not enough, discards `grown`.
    pub(crate) fn settle(&self, grown: &Journal, bounds: JournalBounds) {
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

    fn add(
        &self,
        mut journal: Journal,
        bounds: JournalBounds,
        now: Instant,
    ) -> Option<Arc<Journal>> {
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

    fn forget_old(&self, bounds: JournalBounds, now: Instant) {
        let is_old = |journal: &Arc<Journal>| {
            let left = journal.state().left;
            left.is_some_and(|left| now.saturating_duration_since(left) > bounds.stay)
        };
        self.all().retain(|journal| !is_old(journal));
    }
}

pub(crate) fn key_of(client: &ClientIdentity) -> Option<String> {
    match client {
        ClientIdentity::Key(id) => Some(id.clone()),
        ClientIdentity::Anybody | ClientIdentity::Address(_) => None,
    }
}

#[cfg(test)]
mod tests;
