//! All cables between two ranks, as two lanes of ordered bytes.
//!
//! UC drops a message that is damaged, or meets no posted receive, and tells nobody. So messages
//! of a lane are numbered; message n goes over cable n mod (cables), and whatever order they come
//! in, they are handed on in the order of their numbers, each once. The receiver says in every
//! message of its own what it has (`received`) and what it has read (`consumed`, which is the
//! sender's credit); if it has nothing to say it sends a *state*: at once when a message is missing
//! or came twice or much has been read, else a little later. The sender repeats what a state says
//! is missing, and the oldest message when nothing is heard for [`REPEAT_FIRST`], then twice as
//! long, and so on.
//!
//! This is a state machine without threads: whoever looks at a link moves it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::Rank;

use super::abi::{WC_SUCCESS, Wc};
use super::cable::{Body, Cable, Done, WINDOW};
use super::error::RdmaError;
use super::memory::Registry;
use super::message::{HEAD_BYTES, Head, Kind, STATE_BYTES};
use crate::deadline;
use crate::transport::{Closed, Lane};

/// Cables of a link: four Thunderbolt cables between two machines are what JACCL allows; and the
/// messages of a lane under way have to fit into the 64 bits of a state.
pub const CABLES_MAX: usize = 4;

/// How long the sender waits before it repeats: against some 10 us that an answer takes, and some
/// ms that a rank without a core may be away.
const REPEAT_FIRST: Duration = Duration::from_millis(3);

/// And at most. A peer that computes looks every 100 ms (`tcp::control`).
const REPEAT_LAST: Duration = Duration::from_millis(200);

/// A living peer that acknowledges nothing for so long has lost its cable: many times
/// `REPEAT_LAST`, and what a person would wait.
const GIVE_UP: Duration = Duration::from_secs(5);

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
    peer: Rank,
    session: u64,
    slot_bytes: usize,
    cables: Vec<Cable>,
    outgoing: [Outgoing; 2],
    incoming: [Incoming; 2],
    registry: Arc<Registry>,
    polled: [Wc; POLLED],
    /// A state is due now.
    urgent: bool,
    /// Something came that is not the next: unless the rest follows at once, it is missing.
    suspect: bool,
    /// Something was received that no message has acknowledged yet, since then.
    owed: Option<Instant>,
    next_state: usize,
    /// Sends in place that the device may still read.
    reading: usize,
    gone: bool,
    broken: Option<Arc<RdmaError>>,
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
struct Flight {
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

#[derive(Clone, Copy)]
struct Held {
    slot: usize,
    bytes: usize,
}

impl Link {
    pub(super) fn new(
        peer: Rank,
        session: u64,
        slot_bytes: usize,
        cables: Vec<Cable>,
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
            registry,
            polled: [Wc::default(); POLLED],
            urgent: false,
            suspect: false,
            owed: None,
            next_state: 0,
            reading: 0,
            gone: false,
            broken: None,
        }
    }

    pub(super) fn cables(&self) -> &[Cable] {
        &self.cables
    }

    /// Why it carries nothing any more.
    pub(super) fn broken(&self) -> Option<&Arc<RdmaError>> {
        self.broken.as_ref()
    }

    /// As [`broken`](Self::broken), for a link that is thrown away.
    pub(super) fn take_broken(&mut self) -> Option<RdmaError> {
        Arc::into_inner(self.broken.take()?)
    }

    /// The other process has ended: nothing more will come, and nothing has to be repeated.
    pub(super) fn end(&mut self) {
        self.gone = true;
        for outgoing in &mut self.outgoing {
            outgoing.flights.clear();
            outgoing.in_place = 0;
            outgoing.received = outgoing.next;
        }
    }

    /// Messages of a lane that may be under way.
    fn window(&self, lane: usize) -> u64 {
        (WINDOW[lane] * self.cables.len()) as u64
    }

    fn cable_of(&self, sequence: u64) -> usize {
        small(sequence % self.cables.len() as u64)
    }

    fn slot_of(&self, lane: usize, sequence: u64) -> usize {
        Cable::send_slot(lane, sequence / self.cables.len() as u64)
    }

    fn result(&mut self, result: Result<(), RdmaError>) {
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
            let moved = self.poll().and_then(|moved| self.tend(moved));
            self.result(moved);
        }
    }

    /// True if something came.
    fn poll(&mut self) -> Result<bool, RdmaError> {
        let mut moved = false;
        for cable in 0..self.cables.len() {
            loop {
                let count = self.cables[cable].poll(&mut self.polled)?;
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
            let what = if wc.wr_id >> 16 == 1 {
                "send"
            } else {
                "receive"
            };
            return Err(RdmaError::Completion {
                peer,
                cable,
                what,
                status: wc.status,
                vendor: wc.vendor_err,
            });
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
            if !self.outgoing[lane as usize].acknowledged(lane, &head) {
                return Err(garbled(lane));
            }
        }
        self.cables[cable].heard = true;
        match (head.kind, states) {
            (Kind::Data(lane), _) => self.data(lane, cable, slot, &head),
            (Kind::State, Some(states)) => self.states(&head, &states).map(|()| false),
            (Kind::State | Kind::Hello, _) => Ok(false),
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
            < self.incoming[lane as usize].consumed + self.window(lane as usize)
            && self.cable_of(head.sequence) == cable
            && head.bytes > 0;
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
        for (lane, word) in words.iter().enumerate() {
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
        if self.urgent || missing || LANES.into_iter().any(|lane| self.owes_credit(lane)) {
            return self.tell();
        }
        let under_way = |outgoing: &Outgoing| !outgoing.flights.is_empty();
        if moved || (self.owed.is_none() && !self.outgoing.iter().any(under_way)) {
            return Ok(());
        }
        let now = deadline::now();
        if self
            .owed
            .is_some_and(|since| now.saturating_duration_since(since) > STATE_AFTER)
        {
            self.tell()?;
        }
        (0..LANES.len()).try_for_each(|lane| self.repeat(lane, now))
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
        }
    }

    /// Sends a state over the next cable that has room for one.
    fn tell(&mut self) -> Result<(), RdmaError> {
        for _ in 0..self.cables.len() {
            let cable = self.next_state;
            self.next_state = (cable + 1) % self.cables.len();
            if self.send_state(cable, Kind::State)? {
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
        let [a, b] = self.incoming.each_ref().map(Incoming::bits);
        let cable = &mut self.cables[cable];
        cable.fill(slot, 0, &[&head, &a.to_le_bytes(), &b.to_le_bytes()]);
        // SAFETY: nothing is sent in place.
        unsafe { cable.send(slot, HEAD_BYTES + STATE_BYTES, None) }?;
        Ok(true)
    }

    /// Sends message `sequence`, which is under way, unless the device still sends it.
    fn transmit(&mut self, lane: usize, sequence: u64, now: Instant) -> Result<(), RdmaError> {
        let (cable, slot) = (self.cable_of(sequence), self.slot_of(lane, sequence));
        if !self.cables[cable].is_free(slot) {
            return Ok(());
        }
        let index = small(sequence - self.outgoing[lane].received);
        let flight = &mut self.outgoing[lane].flights[index];
        (flight.last, flight.tries) = (now, flight.tries + 1);
        let (bytes, body) = (flight.bytes, flight.body);
        let payload = bytes - HEAD_BYTES + body.map_or(0, |body| body.bytes);
        let head = self.head(Kind::Data(LANES[lane]), sequence, payload);
        let cable = &mut self.cables[cable];
        cable.fill(slot, 0, &[&head.encode()]);
        // SAFETY: who writes to a link keeps the body as it is while the link `holds` it.
        unsafe { cable.send(slot, bytes, body) }?;
        self.reading += usize::from(body.is_some());
        Ok(())
    }

    /// Whether a new message of this lane may be sent.
    pub(super) fn has_room(&self, lane: Lane) -> bool {
        let outgoing = &self.outgoing[lane as usize];
        let slot = self.slot_of(lane as usize, outgoing.next);
        outgoing.next - outgoing.consumed < self.window(lane as usize)
            && self.cables[self.cable_of(outgoing.next)].is_free(slot)
    }

    /// Whether bytes wait to be read.
    pub(super) fn has_bytes(&self, lane: Lane) -> bool {
        matches!(self.incoming[lane as usize].held.front(), Some(Some(_)))
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
        lane == Lane::Calls && (self.reading > 0 || self.outgoing[0].in_place > 0)
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
        while self.reading > 0 && self.broken.is_none() && deadline::now() < until {
            self.look();
        }
        if self.reading > 0 {
            let (peer, what) = (self.peer, "send");
            self.break_with(RdmaError::Completion {
                peer,
                cable: 0,
                what,
                status: u32::MAX,
                vendor: 0,
            });
        }
        let first = self.outgoing[0].received;
        for index in 0..self.outgoing[0].flights.len() {
            let sequence = first + index as u64;
            let (cable, slot) = (self.cable_of(sequence), self.slot_of(0, sequence));
            let flight = &mut self.outgoing[0].flights[index];
            if let Some(body) = flight.body.take() {
                // SAFETY: the caller has not had it back yet.
                let bytes = unsafe { std::slice::from_raw_parts(body.start, body.bytes) };
                self.cables[cable].fill(slot, flight.bytes, &[bytes]);
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
            self.launch(lane, &head[..first], &body[..second]);
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

    /// Sends a new message.
    fn launch(&mut self, lane: Lane, head: &[u8], body: &[u8]) {
        let (index, now) = (lane as usize, deadline::now());
        let sequence = self.outgoing[index].next;
        let (cable, slot) = (self.cable_of(sequence), self.slot_of(index, sequence));
        let key = (lane == Lane::Calls && body.len() >= IN_PLACE_BYTES)
            .then(|| self.registry.key(self.cables[cable].pair().adapter(), body))
            .flatten();
        let copied = if key.is_some() { &[] } else { body };
        self.cables[cable].fill(slot, HEAD_BYTES, &[head, copied]);
        let outgoing = &mut self.outgoing[index];
        outgoing.next += 1;
        outgoing.in_place += usize::from(key.is_some());
        outgoing.flights.push_back(Flight {
            bytes: HEAD_BYTES + head.len() + copied.len(),
            body: key.map(|key| Body {
                start: body.as_ptr(),
                bytes: body.len(),
                key,
            }),
            first: now,
            last: now,
            tries: 0,
            held: false,
        });
        let sent = self.transmit(index, sequence, now);
        self.result(sent);
    }

    /// Reads what is there of a lane.
    pub(super) fn read(&mut self, lane: Lane, into: &mut [u8]) -> Result<usize, Closed> {
        // Also if bytes wait: what a peer sent before it told somebody else has to be seen.
        self.look();
        let mut count = 0;
        while count < into.len()
            && let Some(Some(held)) = self.incoming[lane as usize].held.front().copied()
        {
            let incoming = &mut self.incoming[lane as usize];
            let cable = small(incoming.consumed % self.cables.len() as u64);
            let part = (held.bytes - incoming.at).min(into.len() - count);
            let from = HEAD_BYTES + incoming.at;
            let bytes = self.cables[cable].received(held.slot, from, from + part);
            into[count..count + part].copy_from_slice(bytes);
            (count, incoming.at) = (count + part, incoming.at + part);
            if incoming.at == held.bytes {
                incoming.held.pop_front();
                (incoming.consumed, incoming.at) = (incoming.consumed + 1, 0);
                if self.broken.is_none() {
                    let posted = self.cables[cable].post_receive(held.slot);
                    self.result(posted);
                }
            }
        }
        if count == 0 && self.is_closed() && !into.is_empty() {
            return Err(Closed);
        }
        self.look_after_reading(lane);
        Ok(count)
    }

    /// Gives credit back once much has been read.
    fn look_after_reading(&mut self, lane: Lane) {
        if self.owes_credit(lane) && !self.is_closed() {
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
fn small(number: u64) -> usize {
    usize::try_from(number).expect("windows are small")
}

impl Outgoing {
    /// Takes note of what the peer has; false if it cannot have it.
    fn acknowledged(&mut self, lane: Lane, head: &Head) -> bool {
        let (received, consumed) = (head.received[lane as usize], head.consumed[lane as usize]);
        if received > self.next || consumed > received {
            return false;
        }
        while self.received < received {
            let flight = self.flights.pop_front().expect("all of received..next");
            self.in_place -= usize::from(flight.body.is_some());
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
