//! All cables between two ranks, as two lanes of ordered bytes.
//!
//! UC drops a message that is damaged, or meets no posted receive, and tells nobody. So messages
//! of a lane are numbered; cables take turns, and whatever order messages come in, they are handed
//! on in the order of their numbers, each once. The receiver says in every
//! message of its own what it has (`received`) and what it has read (`consumed`, which is the
//! sender's credit); if it has nothing to say it sends a *state*: at once when a message is missing
//! or came twice or much has been read, else a little later. The sender repeats what a state says
//! is missing, and the oldest message when nothing is heard for [`REPEAT_FIRST`], then twice as
//! long, and so on.
//!
//! A cable that fails, or loses message after message, is given up at both ends, and what was under
//! way on it goes over the others. Only with the last one the link breaks.
//!
//! This is a state machine without threads: whoever looks at a link moves it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::Rank;

use super::abi::{WC_SUCCESS, Wc};
use super::bulk::{Bulk, NUMBER_BYTES, WORDS};
use super::cable::{Body, Cable, Done, WINDOW};
use super::error::RdmaError;
use super::join::{DESTINATION_BYTES, decode};
use super::memory::Registry;
use super::message::{HEAD_BYTES, Head, Kind, STATE_BYTES};
use super::track::Track;
use crate::deadline;
use crate::transport::{Closed, Lane};

/// Cables of a link: four Thunderbolt cables between two machines are what JACCL allows; and the
/// messages of a lane under way have to fit into the 64 bits of a state.
pub const CABLES_MAX: usize = 4;

/// How long the sender waits before it repeats: against some 10 us that an answer takes, and some
/// ms that a rank without a core may be away.
pub(super) const REPEAT_FIRST: Duration = Duration::from_millis(3);

/// And at most. A peer that computes looks every 100 ms (`tcp::control`).
pub(super) const REPEAT_LAST: Duration = Duration::from_millis(200);

/// A living peer that acknowledges nothing for so long has lost its cable: many times
/// `REPEAT_LAST`, and what a person would wait.
pub(super) const GIVE_UP: Duration = Duration::from_secs(5);

/// A message that was sent so often and is missing goes over another cable.
const MOVED_AFTER: u32 = 1;

/// Messages in a row that are lost on a cable and arrive over another: then it is dead. A peer
/// without a core may look like it for some messages; so many take 50 ms.
const LOST_MOST: u32 = 16;

/// In what a state says, the bits of cables that are dead.
const DEAD_AT: u32 = 8;

/// How long an acknowledgement may wait for a message to travel with.
const STATE_AFTER: Duration = Duration::from_micros(200);

/// How soon something may be repeated again because the receiver says that it is missing.
const AGAIN_AFTER: Duration = Duration::from_micros(300);

/// Shortest part of a caller's memory that is sent in place: below, copying costs less than the
/// device's second read (4 KiB at 10 GB/s: 0.4 us).
const IN_PLACE_BYTES: usize = 4 << 10;

/// Completions taken at once.
const POLLED: usize = 16;

const LANES: [Lane; 2] = [Lane::Calls, Lane::Messages];

/// The end of a link.
pub(super) struct Link {
    pub(super) peer: Rank,
    pub(super) session: u64,
    pub(super) slot_bytes: usize,
    pub(super) cables: Vec<Cable>,
    outgoing: [Outgoing; 2],
    incoming: [Incoming; 2],
    pub(super) bulk: Bulk,
    pub(super) registry: Arc<Registry>,
    polled: [Wc; POLLED],
    /// A state is due now.
    pub(super) urgent: bool,
    /// Something came that is not the next: unless the rest follows at once, it is missing.
    suspect: bool,
    /// Something was received that no message has acknowledged yet, since then.
    owed: Option<Instant>,
    next_state: usize,
    /// When a state was asked for last, for want of credit.
    asked: Instant,
    /// Sends in place that the device may still read.
    pub(super) reading: usize,
    gone: bool,
    broken: Option<Arc<RdmaError>>,
    /// Why the first of several cables is dead.
    lost: Option<Arc<RdmaError>>,
}

/// What is sent on a lane.
#[derive(Default)]
struct Outgoing {
    /// Number of the next message.
    next: u64,
    /// All below have been received.
    received: u64,
    /// All below have been read.
    consumed: u64,
    /// `received..next`
    flights: VecDeque<Flight>,
    /// Of those, how many are in place.
    in_place: usize,
    /// A write found no room.
    starved: bool,
}

/// A message under way.
pub(super) struct Flight {
    kind: Kind,
    /// The sender waits for its memory behind it.
    asks: bool,
    cable: usize,
    slot: usize,
    /// Over which cable it was sent first.
    first_cable: usize,
    /// Bytes in the slot.
    bytes: usize,
    body: Option<Body>,
    first: Instant,
    last: Instant,
    tries: u32,
    /// The receiver has it, but not all before it.
    held: bool,
}

/// What comes on a lane.
#[derive(Default)]
struct Incoming {
    /// All below have been read.
    consumed: u64,
    /// All below are there.
    received: u64,
    /// `consumed..`
    held: VecDeque<Option<Held>>,
    /// Bytes of the first that have been read.
    at: usize,
    told_consumed: u64,
    told_received: u64,
}

/// A message that waits to be read.
#[derive(Clone, Copy)]
pub(super) struct Held {
    kind: Kind,
    pub(super) cable: usize,
    pub(super) slot: usize,
    pub(super) bytes: usize,
}

impl Flight {
    pub(super) const fn new(kind: Kind, bytes: usize, body: Option<Body>, now: Instant) -> Self {
        Self {
            kind,
            asks: false,
            cable: 0,
            slot: 0,
            first_cable: 0,
            bytes,
            body,
            first: now,
            last: now,
            tries: 0,
            held: false,
        }
    }
}

impl Link {
    pub(super) fn new(
        peer: Rank,
        session: u64,
        slot_bytes: usize,
        cables: Vec<Cable>,
        bulk: Bulk,
        registry: Arc<Registry>,
    ) -> Self {
        assert!((1..=CABLES_MAX).contains(&cables.len()));
        Self {
            peer,
            session,
            slot_bytes,
            cables,
            outgoing: Default::default(),
            incoming: Default::default(),
            bulk,
            registry,
            polled: [Wc::default(); POLLED],
            urgent: false,
            suspect: false,
            owed: None,
            next_state: 0,
            asked: deadline::now(),
            reading: 0,
            gone: false,
            broken: None,
            lost: None,
        }
    }

    pub(super) fn cables(&self) -> &[Cable] {
        &self.cables
    }

    pub(super) fn tracks(&self) -> &[Track] {
        &self.bulk.tracks
    }

    /// Connects the tracks, if the peer has some as well.
    pub(super) fn connect_tracks(
        &mut self,
        entries: &[[u8; DESTINATION_BYTES]],
    ) -> Result<(), RdmaError> {
        let tracks = &mut self.bulk.tracks;
        if entries
            .iter()
            .take(tracks.len())
            .any(|entry| *entry == [0; DESTINATION_BYTES])
        {
            tracks.clear();
        }
        let mut pairs = tracks.iter().zip(entries);
        pairs.try_for_each(|(track, entry)| track.connect(&decode(entry)))
    }

    /// Why it carries nothing any more.
    pub(super) fn broken(&self) -> Option<&Arc<RdmaError>> {
        self.broken.as_ref()
    }

    /// Why a cable carries nothing any more, although others do.
    pub(super) fn lost(&self) -> Option<&Arc<RdmaError>> {
        self.lost.as_ref()
    }

    /// Why it, or one of its cables, is broken; for a link that is thrown away.
    pub(super) fn take_broken(&mut self) -> Option<RdmaError> {
        Arc::into_inner(self.broken.take().or(self.lost.take())?)
    }

    /// The other process has ended: nothing more will come, and nothing has to be repeated.
    pub(super) fn end(&mut self) {
        self.gone = true;
        for outgoing in &mut self.outgoing {
            outgoing.flights.clear();
            outgoing.in_place = 0;
            outgoing.received = outgoing.next;
        }
        self.bulk.out = None;
    }

    /// Messages of a lane that may be under way.
    fn window(&self, lane: usize) -> u64 {
        (WINDOW[lane] * self.live()) as u64
    }

    /// Cables that carry something.
    pub(super) fn live(&self) -> usize {
        self.cables.iter().filter(|cable| !cable.dead).count()
    }

    /// A cable and a slot for a message, on the cables from `first` on.
    fn place(&self, lane: usize, first: usize) -> Option<(usize, usize)> {
        let all = self.cables.len();
        let mut cables = (first..first + all).map(|cable| cable % all);
        cables.find_map(|cable| Some((cable, self.cables[cable].free_slot(lane)?)))
    }

    /// Goes on without a cable, if there is another: what was under way there goes elsewhere.
    fn lose(&mut self, cable: usize, error: RdmaError) -> Result<(), RdmaError> {
        if self.cables[cable].dead {
            self.reading -= self.cables[cable].forget();
            return Ok(());
        }
        if self.live() == 1 {
            return Err(error);
        }
        let _ = self.cables[cable].pair().fail();
        self.cables[cable].dead = true;
        self.lost.get_or_insert(Arc::new(error));
        self.urgent = true;
        self.abandon();
        let now = deadline::now();
        for lane in 0..LANES.len() {
            for index in 0..self.outgoing[lane].flights.len() {
                let flight = &self.outgoing[lane].flights[index];
                if flight.cable == cable && !flight.held {
                    self.transmit(lane, self.outgoing[lane].received + index as u64, now)?;
                }
            }
        }
        Ok(())
    }

    /// Gives up cables that lose message after message.
    fn judge(&mut self) -> Result<(), RdmaError> {
        let peer = self.peer;
        for cable in 0..self.cables.len() {
            let suspect = &self.cables[cable];
            if !suspect.dead && suspect.lost >= LOST_MOST && self.live() > 1 {
                self.lose(cable, RdmaError::Silent { peer, cable })?;
            }
        }
        Ok(())
    }

    /// Cables that are lost, a bit each.
    fn dead(&self) -> u64 {
        let bit = |(index, cable): (usize, &Cable)| u64::from(cable.dead) << index;
        self.cables.iter().enumerate().map(bit).sum()
    }

    /// Gives up the cables that the peer has given up.
    fn lose_all(&mut self, dead: u64) -> Result<(), RdmaError> {
        let peer = self.peer;
        for cable in 0..self.cables.len() {
            if dead & (1 << cable) != 0 && !self.cables[cable].dead {
                self.lose(cable, RdmaError::GivenUp { peer, cable })?;
            }
        }
        Ok(())
    }

    pub(super) fn result(&mut self, result: Result<(), RdmaError>) {
        if let Err(error) = result {
            self.break_with(error);
        }
    }

    fn break_with(&mut self, error: RdmaError) {
        self.broken.get_or_insert(Arc::new(error));
        // What is under way completes with an error, or never; it is not waited for.
        for cable in &self.cables {
            let _ = cable.pair().fail();
        }
        self.end();
        self.gone = false;
        self.reading = 0;
    }

    /// Says on every cable who this is.
    pub(super) fn greet(&mut self) {
        for cable in 0..self.cables.len() {
            let greeted = self.send_state(cable, Kind::Hello);
            self.result(greeted.map(|_| ()));
        }
    }

    /// Takes in what has come, repeats what was lost, says what is owed.
    pub(super) fn look(&mut self) {
        if self.broken.is_none() {
            let moved = self.poll().and_then(|moved| {
                self.pump()?;
                self.tend(moved)
            });
            self.result(moved);
        }
    }

    /// True if something came.
    fn poll(&mut self) -> Result<bool, RdmaError> {
        let mut moved = self.poll_tracks()?;
        for cable in 0..self.cables.len() {
            loop {
                let count = match self.cables[cable].poll(&mut self.polled) {
                    Ok(count) => count,
                    Err(error) => {
                        self.lose(cable, error)?;
                        break;
                    }
                };
                for index in 0..count {
                    let wc = self.polled[index];
                    self.completed(cable, &wc)?;
                }
                moved |= count > 0;
                if count < POLLED {
                    break;
                }
            }
        }
        Ok(moved)
    }

    fn completed(&mut self, cable: usize, wc: &Wc) -> Result<(), RdmaError> {
        let peer = self.peer;
        if wc.status != WC_SUCCESS {
            let is_send = wc.wr_id >> 16 == 1;
            if is_send && let Done::Sent { in_place } = self.cables[cable].completed(wc) {
                self.reading -= usize::from(in_place);
            }
            let error = RdmaError::Completion {
                peer,
                cable,
                what: if is_send { "send" } else { "receive" },
                status: wc.status,
                vendor: wc.vendor_err,
            };
            return match self.cables[cable].dead {
                true => Ok(()),
                false => self.lose(cable, error),
            };
        }
        match self.cables[cable].completed(wc) {
            Done::Sent { in_place } => {
                self.reading -= usize::from(in_place);
                Ok(())
            }
            Done::Received { slot, bytes } => {
                if self.arrived(cable, slot, bytes)? {
                    return Ok(());
                }
                self.cables[cable].post_receive(slot)
            }
            Done::Stray => Err(RdmaError::Stray {
                peer,
                cable,
                id: wc.wr_id,
                bytes: wc.byte_len,
            }),
        }
    }

    /// Takes a message in; true if its slot is kept.
    fn arrived(&mut self, cable: usize, slot: usize, bytes: usize) -> Result<bool, RdmaError> {
        let message = self.cables[cable].received(slot, 0, bytes);
        let head = message.first_chunk().and_then(Head::decode);
        // Whatever else has found its way here is not for this link.
        let Some(head) = head.filter(|head| head.session == self.session) else {
            return Ok(false);
        };
        let garbled = |lane: Lane| RdmaError::Garbled {
            peer: self.peer,
            cable,
            lane: lane as u8,
            sequence: head.sequence,
        };
        if head.bytes as usize != bytes - HEAD_BYTES {
            return Err(garbled(Lane::Calls));
        }
        let states = message[HEAD_BYTES..].first_chunk::<STATE_BYTES>().copied();
        for lane in LANES {
            if !self.outgoing[lane as usize].acknowledged(lane, &head, &mut self.cables) {
                return Err(garbled(lane));
            }
        }
        self.cables[cable].heard = true;
        self.judge()?;
        self.bulk_done(head.done);
        self.urgent |= head.asks;
        match (head.kind, states) {
            (Kind::Data(lane), _) => self.data(lane, cable, slot, &head),
            (Kind::Offer | Kind::Patch, _) => self.data(Lane::Calls, cable, slot, &head),
            (Kind::State | Kind::Ask, Some(states)) => {
                self.urgent |= head.kind == Kind::Ask;
                self.states(&head, &states).map(|()| false)
            }
            _ => Ok(false),
        }
    }

    /// Keeps a message of a lane, unless it is there already.
    fn data(
        &mut self,
        lane: Lane,
        cable: usize,
        slot: usize,
        head: &Head,
    ) -> Result<bool, RdmaError> {
        let fits = head.sequence
            < self.incoming[lane as usize].consumed
                + (WINDOW[lane as usize] * self.cables.len()) as u64
            && head.bytes as usize
                > if matches!(head.kind, Kind::Data(_)) {
                    0
                } else {
                    NUMBER_BYTES - 1
                };
        let incoming = &mut self.incoming[lane as usize];
        if !fits {
            return Err(RdmaError::Garbled {
                peer: self.peer,
                cable,
                lane: lane as u8,
                sequence: head.sequence,
            });
        }
        let held = Held {
            kind: head.kind,
            cable,
            slot,
            bytes: head.bytes as usize,
        };
        let kept = incoming.keep(head.sequence, held);
        // What came twice was repeated because no acknowledgement was heard.
        self.urgent |= !kept;
        self.suspect |= head.sequence >= incoming.received;
        if self.owed.is_none() {
            self.owed = Some(deadline::now());
        }
        Ok(kept)
    }

    /// Repeats what the peer has not got, although it has got what was sent later.
    fn states(&mut self, head: &Head, bytes: &[u8; STATE_BYTES]) -> Result<(), RdmaError> {
        let (words, _) = bytes.as_chunks::<8>();
        let mut of_bulk = [0; WORDS];
        for (slot, word) in of_bulk.iter_mut().zip(&words[LANES.len()..]) {
            *slot = u64::from_le_bytes(*word);
        }
        self.bulk_states(of_bulk);
        self.lose_all(of_bulk[0] >> DEAD_AT)?;
        for (lane, word) in words[..LANES.len()].iter().enumerate() {
            let there = u64::from_le_bytes(*word);
            let first = self.outgoing[lane].received;
            // A state that was overtaken by another one is out of date.
            if there == 0 || head.received[lane] != first {
                continue;
            }
            let now = deadline::now();
            let count = self.outgoing[lane].flights.len();
            let last = 64 - there.leading_zeros() as usize;
            for index in 0..count.min(last + 1) {
                let flight = &mut self.outgoing[lane].flights[index];
                // Bit 0 is for the one behind the first missing.
                flight.held |= index > 0 && there & (1 << (index - 1)) != 0;
                let missing = !flight.held && index < last;
                if missing && now.saturating_duration_since(flight.last) > AGAIN_AFTER {
                    self.transmit(lane, first + index as u64, now)?;
                }
            }
        }
        Ok(())
    }

    /// What time brings: repetitions and acknowledgements.
    fn tend(&mut self, moved: bool) -> Result<(), RdmaError> {
        let missing = std::mem::take(&mut self.suspect)
            && self.incoming.iter().any(|incoming| incoming.bits() != 0);
        let owes = LANES.into_iter().any(|lane| self.owes_credit(lane)) || self.bulk.owes();
        if self.urgent || missing || owes {
            return self.tell();
        }
        let under_way = |outgoing: &Outgoing| !outgoing.flights.is_empty();
        let starves = self.starves();
        let quiet = self.owed.is_none() && !self.outgoing.iter().any(under_way);
        if moved || (quiet && !starves) {
            return Ok(());
        }
        let now = deadline::now();
        if self
            .owed
            .is_some_and(|since| now.saturating_duration_since(since) > STATE_AFTER)
        {
            self.tell()?;
        }
        // Credit that was given and lost is not given again by itself.
        if starves && now.saturating_duration_since(self.asked) > REPEAT_FIRST {
            self.asked = now;
            self.ask()?;
        }
        (0..LANES.len()).try_for_each(|lane| self.repeat(lane, now))
    }

    /// Whether somebody wants to send and has no credit.
    fn starves(&self) -> bool {
        let starves = |lane: Lane| {
            let outgoing = &self.outgoing[lane as usize];
            let wants = outgoing.starved || (lane == Lane::Calls && self.bulk.copies());
            wants && outgoing.next - outgoing.consumed >= self.window(lane as usize)
        };
        LANES.into_iter().any(starves)
    }

    /// Sends the oldest message again if nothing was heard of it for long.
    fn repeat(&mut self, lane: usize, now: Instant) -> Result<(), RdmaError> {
        let outgoing = &self.outgoing[lane];
        let Some(index) = outgoing.flights.iter().position(|flight| !flight.held) else {
            return Ok(());
        };
        let (flight, sequence) = (&outgoing.flights[index], outgoing.received + index as u64);
        let patience = REPEAT_FIRST * (1 << (flight.tries.clamp(1, 8) - 1));
        if now.saturating_duration_since(flight.last) <= patience.min(REPEAT_LAST) {
            return Ok(());
        }
        let since = now.saturating_duration_since(flight.first);
        if since > GIVE_UP {
            return Err(RdmaError::Unheard {
                peer: self.peer,
                sequence,
                tries: flight.tries,
                millis: since.as_millis(),
            });
        }
        self.transmit(lane, sequence, now)
    }

    fn head(&mut self, kind: Kind, sequence: u64, bytes: usize) -> Head {
        for incoming in &mut self.incoming {
            incoming.told_consumed = incoming.consumed;
            incoming.told_received = incoming.received;
        }
        self.owed = None;
        let [a, b] = &self.incoming;
        Head {
            kind,
            session: self.session,
            sequence,
            received: [a.received, b.received],
            consumed: [a.consumed, b.consumed],
            bytes: u32::try_from(bytes).expect("less than a slot"),
            asks: false,
            done: self.bulk.done,
        }
    }

    /// Asks for a state.
    pub(super) fn ask(&mut self) -> Result<(), RdmaError> {
        self.say(Kind::Ask)
    }

    /// Sends a state over the next cable that has room for one.
    fn tell(&mut self) -> Result<(), RdmaError> {
        self.say(Kind::State)
    }

    fn say(&mut self, kind: Kind) -> Result<(), RdmaError> {
        for _ in 0..self.cables.len() {
            let cable = self.next_state;
            self.next_state = (cable + 1) % self.cables.len();
            if !self.cables[cable].dead && self.send_state(cable, kind)? {
                self.urgent = false;
                break;
            }
        }
        Ok(())
    }

    /// False if there is no room.
    fn send_state(&mut self, cable: usize, kind: Kind) -> Result<bool, RdmaError> {
        let Some(slot) = self.cables[cable].state_slot() else {
            return Ok(false);
        };
        let head = self.head(kind, 0, STATE_BYTES).encode();
        let bits = self.incoming.each_ref().map(Incoming::bits);
        let mut of_bulk = self.bulk.words();
        of_bulk[0] |= self.dead() << DEAD_AT;
        let words = bits.into_iter().chain(of_bulk);
        let words: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let cable = &mut self.cables[cable];
        cable.fill(slot, 0, &[&head, &words]);
        // SAFETY: nothing is sent in place.
        unsafe { cable.send(slot, HEAD_BYTES + STATE_BYTES, None) }?;
        Ok(true)
    }

    /// Sends message `sequence`, which is under way, unless the device still sends it. What was
    /// lost twice, or on a cable that is dead, goes over another.
    fn transmit(&mut self, lane: usize, sequence: u64, now: Instant) -> Result<(), RdmaError> {
        let index = small(sequence - self.outgoing[lane].received);
        let flight = &self.outgoing[lane].flights[index];
        let (from, tries) = (flight.cable, flight.tries);
        if self.cables[from].dead || (tries >= MOVED_AFTER && self.live() > 1) {
            self.shift(lane, index);
        }
        let flight = &mut self.outgoing[lane].flights[index];
        let (cable, slot) = (flight.cable, flight.slot);
        if self.cables[cable].dead || !self.cables[cable].is_free(slot) {
            return Ok(());
        }
        (flight.last, flight.tries) = (now, flight.tries + 1);
        let (bytes, body, kind, asks) = (flight.bytes, flight.body, flight.kind, flight.asks);
        let payload = bytes - HEAD_BYTES + body.map_or(0, |body| body.bytes);
        let head = Head {
            asks,
            ..self.head(kind, sequence, payload)
        };
        self.cables[cable].fill(slot, 0, &[&head.encode()]);
        // SAFETY: who writes to a link keeps the body as it is while the link `holds` it.
        match unsafe { self.cables[cable].send(slot, bytes, body) } {
            Ok(()) => {
                self.reading += usize::from(body.is_some());
                Ok(())
            }
            Err(error) => self.lose(cable, error),
        }
    }

    /// Puts a message into a slot of another cable, if one is free. It is copied there.
    fn shift(&mut self, lane: usize, index: usize) {
        let flight = &self.outgoing[lane].flights[index];
        let (from, old, end, body) = (flight.cable, flight.slot, flight.bytes, flight.body);
        let room = self
            .place(lane, from + 1)
            .filter(|(cable, _)| *cable != from);
        let Some((cable, slot)) = room else { return };
        let mut payload = self.cables[from].payload(old, end);
        if let Some(body) = body {
            // SAFETY: who writes to a link keeps the body as it is while the link `holds` it.
            payload.extend(unsafe { std::slice::from_raw_parts(body.start, body.bytes) });
            self.outgoing[lane].in_place -= 1;
        }
        self.cables[from].own(old, false);
        self.cables[cable].own(slot, true);
        self.cables[cable].fill(slot, HEAD_BYTES, &[&payload]);
        let flight = &mut self.outgoing[lane].flights[index];
        (flight.cable, flight.slot) = (cable, slot);
        (flight.bytes, flight.body) = (HEAD_BYTES + payload.len(), None);
    }

    /// Whether a new message of this lane may be sent: none overtakes a body that was offered.
    pub(super) fn has_room(&self, lane: Lane) -> bool {
        let behind = lane == Lane::Calls && self.bulk.out.is_some();
        !behind && self.has_slot(lane)
    }

    /// Whether there is a place for a message of this lane.
    pub(super) fn has_slot(&self, lane: Lane) -> bool {
        let outgoing = &self.outgoing[lane as usize];
        outgoing.next - outgoing.consumed < self.window(lane as usize)
            && self.place(lane as usize, 0).is_some()
    }

    /// Whether bytes wait to be read.
    pub(super) fn has_bytes(&self, lane: Lane) -> bool {
        matches!(self.incoming[lane as usize].held.front(), Some(Some(_)))
            || (lane == Lane::Calls && self.bulk.has_news())
    }

    /// Whether nothing more will come, or go.
    pub(super) const fn is_closed(&self) -> bool {
        self.gone || self.broken.is_some()
    }

    /// Whether a writer of this lane has something to do: there is room again, or everything that
    /// was sent in place may be used again.
    pub(super) fn is_writable(&self, lane: Lane) -> bool {
        match self.outgoing[lane as usize].starved {
            true => self.has_room(lane),
            false => !self.holds(lane),
        }
    }

    /// Whether memory that was sent in place must stay as it is.
    pub(super) fn holds(&self, lane: Lane) -> bool {
        let of_calls = self.reading > 0 || self.outgoing[0].in_place > 0;
        lane == Lane::Calls && (of_calls || self.bulk.out.is_some())
    }

    /// Whether a device may read or write memory of callers.
    pub(super) fn uses_memory(&self, lane: Lane) -> bool {
        self.holds(lane) || (lane == Lane::Calls && self.bulk.into.is_some())
    }

    /// Whether everything that was sent has been received.
    pub(super) fn is_settled(&self) -> bool {
        self.outgoing.iter().all(|o| o.flights.is_empty()) || self.is_closed()
    }

    /// Sends what is owed, before this end goes.
    pub(super) fn settle(&mut self) {
        self.look();
        if self.broken.is_none() && self.owed.is_some() {
            let told = self.tell();
            self.result(told);
        }
    }

    /// Stops using memory of callers: what is under way from there is copied. The device is given
    /// a moment to be done with it, then the link is broken.
    pub(super) fn let_go(&mut self) {
        let until = deadline::now() + Duration::from_millis(100);
        let let_go = self.let_tracks_go(until);
        while self.reading > 0 && self.broken.is_none() && deadline::now() < until {
            self.look();
        }
        if self.reading > 0 || !let_go {
            let (peer, what) = (self.peer, "send");
            self.break_with(RdmaError::Completion {
                peer,
                cable: 0,
                what,
                status: u32::MAX,
                vendor: 0,
            });
        }
        for flight in &mut self.outgoing[0].flights {
            if let Some(body) = flight.body.take() {
                // SAFETY: the caller has not had it back yet.
                let bytes = unsafe { std::slice::from_raw_parts(body.start, body.bytes) };
                self.cables[flight.cable].fill(flight.slot, flight.bytes, &[bytes]);
                flight.bytes += body.bytes;
            }
        }
        self.outgoing[0].in_place = 0;
    }

    /// Sends what fits of `head` followed by `body`; how many bytes that is.
    pub(super) fn write(&mut self, lane: Lane, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let (mut head, mut body) = (head, body);
        let total = head.len() + body.len();
        let mut looked = false;
        while !(self.is_closed() || head.is_empty() && body.is_empty()) {
            if !self.has_room(lane) {
                if std::mem::replace(&mut looked, true) {
                    break;
                }
                self.look();
                continue;
            }
            let room = self.slot_bytes - HEAD_BYTES;
            let (first, second) = (
                head.len().min(room),
                body.len().min(room - head.len().min(room)),
            );
            self.put(lane, &head[..first], &body[..second], second == body.len());
            (head, body) = (&head[first..], &body[second..]);
        }
        let left = head.len() + body.len();
        self.outgoing[lane as usize].starved = left > 0;
        // Whoever only waits for its memory has that back when the peer is gone, and no error: the
        // peer may have left because it was through, and its last acknowledgement may be lost.
        match self.broken.is_some() || (self.gone && total > 0) {
            true => Err(Closed),
            false => Ok(total - left),
        }
    }

    /// As [`write`](Self::write) for calls; the peer has a place for the body, which may then go
    /// there without a copy.
    pub(super) fn write_whole(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        if head.is_empty() && body.is_empty() {
            // Its memory is what the caller waits for.
            self.look();
        }
        let offered = match self.has_room(Lane::Calls) && !self.is_closed() {
            true => self.offer(head, body),
            false => 0,
        };
        match offered {
            0 => self.write(Lane::Calls, head, body),
            offered => {
                self.outgoing[0].starved = offered < head.len() + body.len();
                Ok(offered)
            }
        }
    }

    /// Sends a new message, the last of a body or not.
    pub(super) fn put(&mut self, lane: Lane, head: &[u8], body: &[u8], last: bool) {
        let now = deadline::now();
        let Some((cable, slot)) = self.next_place(lane) else {
            return;
        };
        let key = (lane == Lane::Calls && body.len() >= IN_PLACE_BYTES)
            .then(|| self.registry.key(self.cables[cable].pair().adapter(), body))
            .flatten();
        let copied = if key.is_some() { &[] } else { body };
        let body = key.map(|key| Body {
            start: body.as_ptr(),
            bytes: body.len(),
            key,
        });
        let bytes = HEAD_BYTES + head.len() + copied.len();
        let flight = Flight {
            asks: last && (body.is_some() || self.outgoing[lane as usize].in_place > 0),
            ..Flight::new(Kind::Data(lane), bytes, body, now)
        };
        let sent = self.fly(lane, (cable, slot), &[head, copied], flight);
        self.result(sent);
    }

    /// Sends a new message, of which `parts` are copied.
    pub(super) fn fly(
        &mut self,
        lane: Lane,
        (cable, slot): (usize, usize),
        parts: &[&[u8]],
        flight: Flight,
    ) -> Result<(), RdmaError> {
        let (index, now) = (lane as usize, flight.first);
        let sequence = self.outgoing[index].next;
        self.cables[cable].fill(slot, HEAD_BYTES, parts);
        self.cables[cable].own(slot, true);
        let outgoing = &mut self.outgoing[index];
        outgoing.next += 1;
        outgoing.in_place += usize::from(flight.body.is_some());
        outgoing.flights.push_back(Flight {
            cable,
            slot,
            first_cable: cable,
            ..flight
        });
        self.transmit(index, sequence, now)
    }

    /// Where the next message of a lane goes: cables take turns.
    pub(super) fn next_place(&self, lane: Lane) -> Option<(usize, usize)> {
        let next = self.outgoing[lane as usize].next;
        self.place(lane as usize, small(next % self.cables.len() as u64))
    }

    /// Reads what is there of a lane.
    pub(super) fn read(&mut self, lane: Lane, into: &mut [u8]) -> Result<usize, Closed> {
        // Also if bytes wait: what a peer sent before it told somebody else has to be seen.
        self.look();
        let mut count = 0;
        while count < into.len() {
            if lane == Lane::Calls && self.in_transfer() {
                count += self.read_transfer(count, into);
                break;
            }
            let Some(Some(held)) = self.incoming[lane as usize].held.front().copied() else {
                break;
            };
            count += self.read_held(lane, held, &mut into[count..]);
        }
        if count == 0 && self.is_closed() && !into.is_empty() {
            return Err(Closed);
        }
        self.look_after_reading(lane);
        Ok(count)
    }

    /// Whether what comes next is no ordinary message.
    fn in_transfer(&self) -> bool {
        self.bulk.offer.is_some() || self.bulk.into.is_some()
    }

    /// Goes on with a transfer into `into`, if nothing of that has been `read`; how many bytes it
    /// has brought.
    fn read_transfer(&mut self, read: usize, into: &mut [u8]) -> usize {
        if let Some(bytes) = self
            .bulk
            .offer
            .filter(|_| read == 0 && self.broken.is_none())
        {
            self.answer(bytes, into);
        }
        while self.bulk.into.is_some()
            && let Some(Some(held)) = self.incoming[0].held.front().copied()
        {
            self.patch(held);
            self.release(Lane::Calls, held);
        }
        self.finish().unwrap_or(0)
    }

    /// Reads of the first message of a lane.
    fn read_held(&mut self, lane: Lane, held: Held, into: &mut [u8]) -> usize {
        let at = match (held.kind, self.incoming[lane as usize].at) {
            (Kind::Offer, 0) => NUMBER_BYTES,
            (_, at) => at,
        };
        let count = (held.bytes - at).min(into.len());
        let from = HEAD_BYTES + at;
        let bytes = self.cables[held.cable].received(held.slot, from, from + count);
        into[..count].copy_from_slice(bytes);
        self.incoming[lane as usize].at = at + count;
        if at + count == held.bytes {
            if held.kind == Kind::Offer {
                let number =
                    self.cables[held.cable].received(held.slot, HEAD_BYTES, HEAD_BYTES + 8);
                let bytes = number.first_chunk().map_or(0, |n| u64::from_le_bytes(*n));
                self.bulk.offer = Some(usize::try_from(bytes).unwrap_or(usize::MAX));
            }
            self.release(lane, held);
        }
        count
    }

    /// The first message of a lane has been read: its memory is for another.
    fn release(&mut self, lane: Lane, held: Held) {
        let incoming = &mut self.incoming[lane as usize];
        incoming.held.pop_front();
        (incoming.consumed, incoming.at) = (incoming.consumed + 1, 0);
        if self.broken.is_none() {
            let posted = self.cables[held.cable].post_receive(held.slot);
            self.result(posted);
        }
    }

    /// Gives credit back once much has been read.
    fn look_after_reading(&mut self, lane: Lane) {
        if (self.urgent || self.owes_credit(lane)) && !self.is_closed() {
            let told = self.tell();
            self.result(told);
        }
    }

    /// Whether a quarter of the window has been read that the peer does not know of.
    fn owes_credit(&self, lane: Lane) -> bool {
        let incoming = &self.incoming[lane as usize];
        let unsaid = incoming.consumed - incoming.told_consumed;
        unsaid * 4 >= self.window(lane as usize)
    }
}

/// A number that is below a window, or below the number of cables, as an index.
pub(super) fn small(number: u64) -> usize {
    usize::try_from(number).expect("windows are small")
}

impl Outgoing {
    /// Takes note of what the peer has; false if it cannot have it.
    fn acknowledged(&mut self, lane: Lane, head: &Head, cables: &mut [Cable]) -> bool {
        let (received, consumed) = (head.received[lane as usize], head.consumed[lane as usize]);
        if received > self.next || consumed > received {
            return false;
        }
        while self.received < received {
            let flight = self.flights.pop_front().expect("all of received..next");
            self.in_place -= usize::from(flight.body.is_some());
            cables[flight.cable].own(flight.slot, false);
            // Whichever cable it came over in the end works; the one that lost it may not.
            if flight.first_cable != flight.cable {
                cables[flight.first_cable].lost += 1;
            }
            cables[flight.cable].lost = 0;
            self.received += 1;
        }
        self.consumed = self.consumed.max(consumed);
        true
    }
}

impl Incoming {
    /// Keeps a message unless it is there already.
    fn keep(&mut self, sequence: u64, held: Held) -> bool {
        if sequence < self.received {
            return false;
        }
        let index = small(sequence - self.consumed);
        if self.held.len() <= index {
            self.held.resize(index + 1, None);
        }
        if self.held[index].is_some() {
            return false;
        }
        self.held[index] = Some(held);
        let there = |sequence: u64| {
            let index = small(sequence - self.consumed);
            matches!(self.held.get(index), Some(Some(_)))
        };
        let mut received = self.received;
        while there(received) {
            received += 1;
        }
        self.received = received;
        true
    }

    /// Which messages behind the first missing one are there.
    fn bits(&self) -> u64 {
        let first = small(self.received - self.consumed) + 1;
        let later = self.held.iter().skip(first).take(64);
        let bit = |(index, held): (usize, &Option<Held>)| u64::from(held.is_some()) << index;
        later.enumerate().map(bit).fold(0, |bits, bit| bits | bit)
    }
}
