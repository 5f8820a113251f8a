//! Zero-copy transfers of large bodies, from the sender's registered memory into the receiver's.
//!
//! ```text
//! sender                                       receiver
//! OFFER, a message of the lane: "n bytes" ---> has the reader of the lane registered memory?
//!          <--- states: granted k  (receives for chunks 0..k are posted), or refused (copy them)
//! chunk 0, 1, .. k on the bulk pairs --------> straight into the memory of chunk 0, 1, ..
//!          <--- states: granted more, used: completed receives
//!          <--- heads: done
//! ```
//!
//! All chunks of a transfer have one length ([`chunks`](super::chunks)) and use the cables in turn.
//! UC loses messages silently, and each later chunk then arrives in the receive of an earlier one.
//! So each chunk has its number in its head. A misplaced chunk is copied aside, and to its own
//! place once that is free. The last two chunks overlap, so they are not copied: they are requested
//! again.
//!
//! The CPU touches memory only after its receive has completed. A sender without progress sends
//! *drains*, heads without a chunk, which complete receives whose messages were lost. When all
//! receives are complete, the receiver requests the missing chunks. They arrive as *patches*,
//! messages of the lane that are copied. A late message of an earlier transfer is detected by its
//! number.
//!
//! There is one transfer at a time in each direction, on either lane. Both ends of a call expect
//! its transfer. A message is offered only to a peer that has announced a waiting receive with
//! registered memory (*hungry*). Such a peer is polling, so it answers the offer at once, and a
//! sender never waits for a receiver that computes.
//!
//! If a bulk queue pair fails, or drains do not arrive, both ends stop using bulk pairs for good
//! (*abandoned*). Receives are flushed, the rest of the transfer is sent as patches, and later
//! bodies are copied.

use std::collections::BTreeMap;
use std::time::Instant;

use paceline_comm::provider::{self, VirtualLane};

use super::abi::{WC_SUCCESS, Wc};
use super::bulk_pair::{BulkQueuePair, ChunkCompletion};
use super::chunks::Chunks;
use super::error::RdmaError;
use super::link::lane::{UnackedMessage, UnreadMessage, small};
use super::link::{CableLink, GIVE_UP, REPEAT_FIRST, REPEAT_LAST};
use super::message::{HEAD_BYTES, Kind, MessageHead, WORDS};
use super::message_pair::{REQUESTS, RegisteredBody};

/// Drains without progress before the bulk pairs are abandoned: some 0.2 s.
const TRIES: u32 = 5;

/// Most completions per poll.
const POLLED: usize = 16;

/// Bytes before the content: of an offer its length, of a patch its chunk number.
pub(super) const NUMBER_BYTES: usize = 8;

/// The transfers of a link, in both directions.
#[derive(Default)]
pub(super) struct BulkTransfers {
    /// A bulk pair for each cable; none if a device has no queue pairs to spare.
    pub(super) tracks: Vec<BulkQueuePair>,
    abandoned: bool,
    /// Offers sent and offers accepted; the last one may be in progress.
    offered: u32,
    taken: u32,
    /// The last accepted one that is complete, and the last that was refused.
    pub(super) done: u32,
    refused: u32,
    /// Chunks of all transfers before the current one, by direction.
    sent_before: u64,
    received_before: u64,
    pub(super) out: Option<BulkSend>,
    pub(super) into: Option<BulkReceive>,
    /// An unanswered offer: its lane and bytes.
    pub(super) offer: Option<(VirtualLane, usize)>,
}

/// A body that is being sent.
pub(super) struct BulkSend {
    lane: VirtualLane,
    start: *const u8,
    cut: Chunks,
    /// By bulk pair.
    keys: Vec<u32>,
    /// Chunks sent, granted, and known to be received.
    sent: u64,
    granted: u64,
    used: u64,
    /// Chunks that were repeated as patches.
    patched: Vec<bool>,
    wanted: Vec<u64>,
    /// If refused: bytes copied so far.
    copied: Option<usize>,
    first: Instant,
    last: Instant,
    tries: u32,
    /// Time of the peer's last state.
    heard: Instant,
}

/// A body that is being received.
pub(super) struct BulkReceive {
    pub(super) lane: VirtualLane,
    start: *mut u8,
    cut: Chunks,
    /// Bytes that were copied to their place.
    copied: usize,
    keys: Vec<u32>,
    posted: u64,
    told: u64,
    used: u64,
    got: Vec<bool>,
    missing: usize,
    /// Chunks whose receive has completed.
    over: Vec<bool>,
    /// Chunks that arrived in the place of another.
    aside: BTreeMap<usize, Vec<u8>>,
}

// SAFETY: addresses of memory that the callers of `write` and `read` leave alone until the link
// releases it; the link is behind a lock.
unsafe impl Send for BulkSend {}
// SAFETY: as above.
unsafe impl Send for BulkReceive {}

impl BulkTransfers {
    pub(super) fn new(tracks: Vec<BulkQueuePair>) -> Self {
        Self {
            tracks,
            ..Self::default()
        }
    }

    fn is_usable(&self) -> bool {
        !self.tracks.is_empty() && !self.abandoned
    }

    /// The words of a state: abandoned, refused, granted, used, and the requested patches as the
    /// first chunk and a bit for each from there on.
    pub(super) fn words(&mut self) -> [u64; WORDS] {
        let (granted, used, first, bits) = match &mut self.into {
            Some(into) => {
                into.told = into.posted;
                let (first, bits) = into.wanted(self.abandoned, &self.tracks);
                (into.posted, into.used, first, bits)
            }
            None => (0, 0, 0, 0),
        };
        let of = u64::from(self.taken) << 32;
        let flags = u64::from(self.abandoned);
        [
            flags,
            u64::from(self.refused),
            of | granted,
            of | used,
            first,
            bits,
        ]
    }

    /// Whether a body of this lane is being sent.
    pub(super) fn sends(&self, lane: VirtualLane) -> bool {
        self.out.as_ref().is_some_and(|out| out.lane == lane)
    }

    /// Whether a body of this lane is being received.
    pub(super) fn receives(&self, lane: VirtualLane) -> bool {
        self.into.as_ref().is_some_and(|into| into.lane == lane)
    }

    /// Whether a refused body waits for slots.
    pub(super) fn copies(&self, lane: VirtualLane) -> bool {
        let copies = |out: &BulkSend| out.lane == lane && out.copied.is_some();
        self.out.as_ref().is_some_and(copies)
    }

    /// Whether a reader of this lane can make progress.
    pub(super) fn has_news(&self, lane: VirtualLane) -> bool {
        let is_whole = |into: &BulkReceive| into.lane == lane && into.missing == 0;
        self.offer.is_some_and(|(offered, _)| offered == lane)
            || self.into.as_ref().is_some_and(is_whole)
    }

    /// Whether the peer waits for an unsent state.
    pub(super) fn owes(&self) -> bool {
        let quarter = (REQUESTS * self.tracks.len() / 4) as u64;
        self.into.as_ref().is_some_and(|into| {
            let untold = into.posted - into.told;
            let is_last = into.posted == into.got.len() as u64;
            untold > 0 && (untold >= quarter || is_last)
        })
    }
}

impl BulkSend {
    /// Bytes that a device read in place.
    fn in_place(&self) -> u64 {
        let patched = self
            .patched
            .iter()
            .enumerate()
            .filter(|(_, patched)| **patched);
        let copied: usize = patched.map(|(index, _)| self.cut.fresh(index)).sum();
        (self.cut.bytes() - copied) as u64
    }

    fn progressed(&mut self) {
        (self.tries, self.last) = (0, provider::now());
    }

    fn body(&self, index: u64, track: usize) -> RegisteredBody {
        RegisteredBody {
            start: self.start.wrapping_add(self.cut.range(small(index)).start),
            bytes: self.cut.size(),
            key: self.keys[track],
        }
    }
}

impl BulkReceive {
    /// The chunks to request as patches, once no receive is posted: the first, and 64 from there
    /// on.
    fn wanted(&self, abandoned: bool, tracks: &[BulkQueuePair]) -> (u64, u64) {
        let over = self.used == self.got.len() as u64 || abandoned;
        if !over || tracks.iter().any(BulkQueuePair::is_posted) {
            return (0, 0);
        }
        let first = self.got.iter().position(|got| !got).unwrap_or(0);
        let from = self.got.iter().skip(first).take(64).enumerate();
        let bits = from.fold(0, |bits, (at, got)| bits | u64::from(!got) << at);
        (first as u64, bits)
    }

    /// Records that a chunk is in its place.
    fn place(&mut self, index: usize) {
        self.missing -= usize::from(!std::mem::replace(&mut self.got[index], true));
    }

    /// Handles the completed receive of place `index`. It contains chunk `came`, or none of this
    /// transfer.
    fn sort(&mut self, index: usize, came: Option<usize>) {
        self.over[index] = true;
        match came.filter(|came| *came < self.got.len() && !self.got[*came]) {
            Some(came) if came == index => self.place(index),
            // Its neighbour may have overwritten a part of it since.
            Some(_) if self.cut.overlaps(index) => {}
            Some(came) => {
                let from = self.at(index);
                // SAFETY: within the memory of the transfer, and its receive has completed.
                let chunk = unsafe { std::slice::from_raw_parts(from, self.cut.size()) }.to_vec();
                self.aside.insert(came, chunk);
                self.put_back(came);
            }
            None => {}
        }
        self.put_back(index);
    }

    /// Address of a chunk.
    fn at(&self, index: usize) -> *mut u8 {
        self.start.wrapping_add(self.cut.range(index).start)
    }

    /// Copies a chunk to its place.
    ///
    /// # Safety
    /// The receive into that place has completed.
    unsafe fn put(&mut self, index: usize, chunk: &[u8]) {
        let place = self.at(index);
        // SAFETY: within the memory of the transfer, and not posted to a device: the caller's
        // promise.
        unsafe {
            chunk
                .as_ptr()
                .copy_to_nonoverlapping(place, self.cut.size())
        };
        self.copied += self.cut.fresh(index);
        self.place(index);
    }

    /// Copies a misplaced chunk to its own place, if that is free.
    fn put_back(&mut self, index: usize) {
        if !self.over[index] || self.got[index] {
            return;
        }
        if let Some(chunk) = self.aside.remove(&index) {
            // SAFETY: checked above.
            unsafe { self.put(index, &chunk) };
        }
    }
}

impl CableLink {
    /// Cuts a body into chunks of at most half a message.
    fn cut(&self, bytes: usize) -> Chunks {
        Chunks::new(bytes, self.slot_bytes / 2)
    }

    /// The memory keys of these bytes, by bulk pair.
    fn keys(&self, bytes: &[u8]) -> Option<Vec<u32>> {
        let key = |track: &BulkQueuePair| self.registry.key(track.pair().adapter(), bytes);
        self.bulk.tracks.iter().map(key).collect()
    }

    /// Whether bodies can be received in `memory` without a copy.
    pub(super) fn can_place(&self, memory: &[u8]) -> bool {
        let is_long = memory.len() >= self.in_place_bytes;
        is_long && self.bulk.is_usable() && self.keys(memory).is_some()
    }

    /// Offers `body`, behind `head`; false if it cannot be offered. Needs room for a message.
    pub(super) fn offer(&mut self, lane: VirtualLane, head: &[u8], body: &[u8]) -> bool {
        let fits = body.len() >= self.in_place_bytes
            && head.len() + NUMBER_BYTES + HEAD_BYTES <= self.slot_bytes;
        if !fits || !self.bulk.is_usable() || self.bulk.out.is_some() {
            return false;
        }
        let (Some(keys), Some(place)) = (self.keys(body), self.next_place(lane)) else {
            return false;
        };
        let (cut, bytes) = (self.cut(body.len()), body.len() as u64);
        let now = provider::now();
        self.bulk.offered = self.bulk.offered.wrapping_add(1);
        self.bulk.out = Some(BulkSend {
            lane,
            start: body.as_ptr(),
            cut,
            keys,
            sent: 0,
            granted: 0,
            used: 0,
            patched: vec![false; cut.count()],
            wanted: Vec::new(),
            copied: None,
            first: now,
            last: now,
            tries: 0,
            heard: now,
        });
        self.launch(
            lane,
            place,
            Kind::Offer(lane),
            &[&bytes.to_le_bytes(), head],
        );
        true
    }

    /// Sends a message that is copied.
    fn launch(&mut self, lane: VirtualLane, place: (usize, usize), kind: Kind, parts: &[&[u8]]) {
        let now = provider::now();
        let bytes = HEAD_BYTES + parts.iter().map(|part| part.len()).sum::<usize>();
        let sent = self.fly(
            lane,
            place,
            parts,
            UnackedMessage::new(kind, bytes, None, now),
        );
        self.result(sent);
    }

    /// Polls the bulk pairs; true if something completed.
    pub(super) fn poll_tracks(&mut self) -> Result<bool, RdmaError> {
        let mut moved = false;
        for index in 0..self.bulk.tracks.len() {
            if self.bulk.tracks[index].is_idle() {
                continue;
            }
            let mut polled = [Wc::default(); POLLED];
            loop {
                let Ok(count) = self.bulk.tracks[index].pair().queue().poll(&mut polled) else {
                    self.forget(index);
                    break;
                };
                for wc in &polled[..count] {
                    self.landed(index, wc);
                }
                moved |= count > 0;
                if count < POLLED {
                    break;
                }
            }
        }
        self.post()?;
        Ok(moved)
    }

    fn landed(&mut self, track: usize, wc: &Wc) {
        let failed = wc.status != WC_SUCCESS;
        match self.bulk.tracks[track].completed(wc, failed) {
            ChunkCompletion::Sent { in_place } => self.reading -= usize::from(in_place),
            ChunkCompletion::Received { chunk, head, bytes } => self.received(chunk, &head, bytes),
            ChunkCompletion::Stray => self.abandon(),
        }
        if failed {
            self.abandon();
        }
    }

    /// Handles the completed receive for `chunk`: whether it contains that chunk.
    fn received(&mut self, chunk: u64, head: &[u8; HEAD_BYTES], bytes: usize) {
        let before = self.bulk.received_before;
        let size = self.bulk.into.as_ref().map_or(0, |into| into.cut.size());
        let head = MessageHead::decode(head).filter(|head| head.session == self.session);
        let is_chunk = |head: &MessageHead| head.kind == Kind::Chunk && bytes == HEAD_BYTES + size;
        let came = head.filter(is_chunk).and_then(|head| {
            let index = head.sequence.checked_sub(before)?;
            usize::try_from(index).ok()
        });
        if let Some(into) = &mut self.bulk.into {
            into.used += 1;
            into.sort(small(chunk - before), came);
            let over = into.used == into.got.len() as u64;
            self.urgent |= over && into.missing > 0;
        }
    }

    /// Posts receives for the next chunks.
    fn post(&mut self) -> Result<(), RdmaError> {
        let before = self.bulk.received_before;
        let count = self.bulk.tracks.len() as u64;
        let Some(into) = self.bulk.into.as_mut().filter(|_| !self.bulk.abandoned) else {
            return Ok(());
        };
        while into.posted < into.got.len() as u64 {
            let track = small(into.posted % count);
            let body = RegisteredBody {
                start: into.at(small(into.posted)),
                bytes: into.cut.size(),
                key: into.keys[track],
            };
            // SAFETY: the reader leaves its memory alone until the transfer is complete or the link
            // releases it.
            match unsafe { self.bulk.tracks[track].post(before + into.posted, body) } {
                Ok(true) => into.posted += 1,
                Ok(false) => break,
                Err(_) => {
                    self.abandon();
                    break;
                }
            }
        }
        Ok(())
    }

    /// Abandons the bulk pairs: their requests complete with an error.
    pub(super) fn abandon(&mut self) {
        if std::mem::replace(&mut self.bulk.abandoned, true) || self.bulk.tracks.is_empty() {
            return;
        }
        for index in 0..self.bulk.tracks.len() {
            if self.bulk.tracks[index].pair().fail().is_err() {
                self.forget(index);
            }
        }
        self.urgent = true;
    }

    /// Treats all requests of a bulk pair as failed, after a failed poll.
    fn forget(&mut self, track: usize) {
        self.abandon();
        let (sends, receives) = self.bulk.tracks[track].forget();
        self.reading -= sends;
        if let Some(into) = &mut self.bulk.into {
            into.used += receives as u64;
        }
        self.urgent = true;
    }

    /// Handles the part of a peer's state about transfers.
    pub(super) fn bulk_states(
        &mut self,
        [flags, refused, granted, used, first, bits]: [u64; WORDS],
    ) {
        if flags & 1 != 0 {
            self.abandon();
        }
        let of = u64::from(self.bulk.offered);
        let now = provider::now();
        let Some(out) = &mut self.bulk.out else {
            return;
        };
        out.heard = now;
        if refused == of && out.copied.is_none() {
            out.copied = Some(0);
        }
        // States of an earlier transfer do not apply to this one.
        if granted >> 32 != of {
            return;
        }
        let low = |word: u64| word & 0xffff_ffff;
        let more = low(granted) > out.granted || low(used) > out.used;
        out.granted = low(granted).max(out.granted).min(out.patched.len() as u64);
        out.used = low(used).max(out.used);
        let bit = |at: &u64| bits & (1 << at) != 0 && first + at < out.patched.len() as u64;
        let wanted = (0..64).filter(bit).map(|at| first + at);
        let fresh: Vec<u64> = wanted.filter(|at| !out.patched[small(*at)]).collect();
        fresh.iter().for_each(|at| out.patched[small(*at)] = true);
        if more || !fresh.is_empty() {
            out.progressed();
        }
        out.wanted.extend(fresh);
    }

    /// Handles the peer's count of completed transfers.
    pub(super) fn bulk_done(&mut self, done: u32) {
        if let Some(out) = self.bulk.out.take_if(|_| done == self.bulk.offered) {
            self.bulk.sent_before += out.cut.count() as u64;
            self.placed.sent += out.in_place();
        }
    }

    /// Sends the chunks of a body that are granted.
    pub(super) fn pump(&mut self) -> Result<(), RdmaError> {
        let Some(out) = self.bulk.out.take() else {
            return Ok(());
        };
        let kept = match out.copied {
            Some(at) => Ok(self.pump_copied(out, at)),
            None => self.pump_chunks(out).map(Some),
        };
        self.bulk.out = kept?;
        Ok(())
    }

    /// Sends a refused body in ordinary messages; `None` once all of it is sent.
    fn pump_copied(&mut self, mut out: BulkSend, mut at: usize) -> Option<BulkSend> {
        let lane = out.lane;
        // SAFETY: the writer keeps the body unchanged while the link holds it.
        let body = unsafe { std::slice::from_raw_parts(out.start, out.cut.bytes()) };
        while at < body.len() && self.has_slot(lane) && !self.is_closed() {
            let end = body.len().min(at + self.slot_bytes - HEAD_BYTES);
            self.put(lane, &[], &body[at..end], end == body.len());
            at = end;
        }
        out.copied = Some(at);
        (at < body.len()).then_some(out)
    }

    fn pump_chunks(&mut self, mut out: BulkSend) -> Result<BulkSend, RdmaError> {
        let (size, tracks) = (out.cut.size(), self.bulk.tracks.len());
        while out.sent < out.granted && !self.bulk.abandoned {
            let track = small(out.sent % tracks as u64);
            let body = out.body(out.sent, track);
            let head = self.track_head(Kind::Chunk, self.bulk.sent_before + out.sent, size);
            // SAFETY: the writer keeps the body unchanged while the link holds it.
            match unsafe { self.bulk.tracks[track].send(&head, Some(body)) } {
                Ok(true) => {
                    self.reading += 1;
                    out.sent += 1;
                    out.progressed();
                }
                Ok(false) => break,
                Err(_) => self.abandon(),
            }
        }
        while self.has_slot(out.lane)
            && let Some(place) = self.next_place(out.lane)
            && let Some(index) = out.wanted.pop()
        {
            let body = out.body(index, 0);
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(body.start, body.bytes) };
            self.launch(
                out.lane,
                place,
                Kind::Patch(out.lane),
                &[&index.to_le_bytes(), bytes],
            );
        }
        self.pump_late(&mut out)?;
        Ok(out)
    }

    /// After a time without progress: requests a state, and drains receives whose messages were
    /// lost.
    fn pump_late(&mut self, out: &mut BulkSend) -> Result<(), RdmaError> {
        let now = provider::now();
        let patience = REPEAT_FIRST * (1 << out.tries.min(7));
        if now.saturating_duration_since(out.last) <= patience.min(REPEAT_LAST) {
            return Ok(());
        }
        let since = now.saturating_duration_since(out.heard);
        if since > GIVE_UP {
            return Err(RdmaError::Unheard {
                peer: self.peer,
                sequence: out.sent,
                tries: out.tries,
                millis: now.saturating_duration_since(out.first).as_millis(),
            });
        }
        // A state received after the request is current; an earlier one may be outdated.
        let is_answered = out.tries > 0 && out.heard > out.last;
        (out.last, out.tries) = (now, out.tries + 1);
        let open = out.sent.saturating_sub(out.used);
        if is_answered && open > 0 && out.sent == out.granted {
            if out.tries > TRIES {
                self.abandon();
            }
            self.drain(open)?;
        }
        self.request_state()
    }

    fn drain(&mut self, open: u64) -> Result<(), RdmaError> {
        let head = self.track_head(Kind::Drain, 0, 0);
        let each = 1 + small(open) / self.bulk.tracks.len();
        for track in &mut self.bulk.tracks {
            for _ in 0..each.min(REQUESTS) {
                // SAFETY: there is no body.
                if self.bulk.abandoned || !unsafe { track.send(&head, None) }.unwrap_or(false) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The head of a message on a bulk pair: it acknowledges nothing.
    fn track_head(&self, kind: Kind, sequence: u64, bytes: usize) -> [u8; HEAD_BYTES] {
        let head = MessageHead {
            kind,
            session: self.session,
            sequence,
            received: [0; 2],
            consumed: [0; 2],
            bytes: u32::try_from(bytes).expect("less than a slot"),
            asks: false,
            waits: false,
            done: 0,
        };
        head.encode()
    }

    /// Answers an offer of this lane, if there is one: posts receives in `into`, or refuses it.
    pub(super) fn answer(&mut self, lane: VirtualLane, into: &mut [u8]) {
        let offer = self.bulk.offer.take_if(|(offered, _)| *offered == lane);
        let Some((_, bytes)) = offer else {
            return;
        };
        self.bulk.taken = self.bulk.taken.wrapping_add(1);
        self.urgent = true;
        let keys = ((1..=into.len()).contains(&bytes) && self.bulk.is_usable())
            .then(|| self.keys(&into[..bytes]))
            .flatten();
        let Some(keys) = keys else {
            self.bulk.refused = self.bulk.taken;
            return;
        };
        let cut = self.cut(bytes);
        self.bulk.into = Some(BulkReceive {
            lane,
            start: into.as_mut_ptr(),
            cut,
            copied: 0,
            keys,
            posted: 0,
            told: 0,
            used: 0,
            got: vec![false; cut.count()],
            missing: cut.count(),
            over: vec![false; cut.count()],
            aside: BTreeMap::new(),
        });
        let posted = self.post();
        self.result(posted);
    }

    /// The bytes of the transfer, if all of it is in place.
    pub(super) fn finish(&mut self) -> Option<usize> {
        let into = self.bulk.into.take_if(|into| into.missing == 0)?;
        self.bulk.received_before += into.got.len() as u64;
        self.bulk.done = self.bulk.taken;
        self.urgent = true;
        self.placed.received += (into.cut.bytes() - into.copied) as u64;
        Some(into.cut.bytes())
    }

    /// Copies a patch to its place.
    pub(super) fn patch(&mut self, held: UnreadMessage) {
        let message =
            self.cables[held.cable].received(held.slot, HEAD_BYTES, HEAD_BYTES + held.bytes);
        let (number, chunk) = message.split_at(NUMBER_BYTES.min(message.len()));
        let index = number
            .first_chunk()
            .map_or(u64::MAX, |n| u64::from_le_bytes(*n));
        let Some(into) = &mut self.bulk.into else {
            return;
        };
        let known = usize::try_from(index)
            .ok()
            .filter(|index| *index < into.got.len());
        if let Some(index) = known.filter(|_| chunk.len() == into.cut.size()) {
            // SAFETY: all receives have completed: patches are requested only then.
            unsafe { into.put(index, chunk) };
        }
    }

    /// Ends all use of this lane's callers' memory by bulk pairs; false if a device still uses it.
    pub(super) fn let_tracks_go(&mut self, lane: VirtualLane, until: Instant) -> bool {
        let busy = |link: &Self| link.bulk.tracks.iter().any(|track| !track.is_idle());
        if self.bulk.sends(lane) || self.bulk.receives(lane) || busy(self) {
            self.abandon();
        }
        while busy(self) && provider::now() < until {
            let polled = self.poll_tracks();
            self.result(polled.map(|_| ()));
        }
        self.bulk.out.take_if(|out| out.lane == lane);
        self.bulk.into.take_if(|into| into.lane == lane);
        !busy(self)
    }
}
