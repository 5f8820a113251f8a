//! A link: all cables between two ranks, as two lanes of ordered bytes.
//!
//! UC drops a message that is damaged, or meets no posted receive, silently. So messages of a lane
//! are numbered. They use the cables in turn. The receiver delivers each once, in the order of
//! their numbers, regardless of arrival order.
//!
//! Each message acknowledges the messages received (`received`) and read (`consumed`, the sender's
//! credit) on this side. Without a message to send the receiver sends a *state*. It does so at once
//! when a message is missing or was repeated or much has been read, else a little later. The sender
//! repeats the messages that a state reports missing. Without any state it repeats the oldest
//! message after [`REPEAT_FIRST`], then after twice as long, and so on.
//!
//! Both ends give up a cable that fails or loses many consecutive messages. Its messages in flight
//! move to the other cables. The link breaks only with the last cable.
//!
//! This is a state machine without threads. Any caller's poll drives it.

mod failover;
pub(super) mod lane;
mod stream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::provider::{self, VirtualLane};

use self::lane::{ReceiveWindow, SendWindow, UnreadMessage, small};
use super::abi::{WC_SUCCESS, Wc};
use super::bulk::{BulkTransfers, NUMBER_BYTES};
use super::bulk_pair::BulkQueuePair;
use super::destination::{DESTINATION_BYTES, decode};
use super::error::RdmaError;
use super::matrix::CABLES_MAX;
use super::memory::Registry;
use super::message::{HEAD_BYTES, Kind, MessageHead, STATE_BYTES, WORDS};
use super::message_pair::{MessageCompletion, MessageQueuePair, WINDOW};

/// Delay before the first repetition. A reply takes some 10 us, and a rank without a core may be
/// away for some ms.
pub(super) const REPEAT_FIRST: Duration = Duration::from_millis(3);

/// Longest delay between repetitions. A computing peer polls every 100 ms (comm's
/// `keeping::control`).
pub(super) const REPEAT_LAST: Duration = Duration::from_millis(200);

/// A living peer that acknowledges nothing for this long has lost its cable: many times
/// `REPEAT_LAST`, and within a person's patience.
pub(super) const GIVE_UP: Duration = Duration::from_secs(5);

/// Repetitions after which a missing message moves to another cable.
const MOVED_AFTER: u32 = 1;

/// Position of the dead cables' bits in a state.
const DEAD_AT: u32 = 8;

/// How long an acknowledgement may wait for a message that carries it.
const STATE_AFTER: Duration = Duration::from_micros(200);

/// Shortest interval between repetitions of a message that the receiver reports missing.
const AGAIN_AFTER: Duration = Duration::from_micros(300);

/// Most completions per poll.
const POLLED: usize = 16;

const LANES: [VirtualLane; 2] = [VirtualLane::Calls, VirtualLane::Messages];

/// Payload bytes of callers that were not copied: sent in place, and received or reduced in place.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ZeroCopyBytes {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// This rank's end of a link.
pub(super) struct CableLink {
    pub(super) peer: Rank,
    pub(super) session: u64,
    pub(super) slot_bytes: usize,
    /// Shortest body that is offered for a zero-copy transfer.
    pub(super) in_place_bytes: usize,
    pub(super) cables: Vec<MessageQueuePair>,
    outgoing: [SendWindow; 2],
    incoming: [ReceiveWindow; 2],
    pub(super) bulk: BulkTransfers,
    pub(super) registry: Arc<Registry>,
    /// Payload bytes that were not copied.
    pub(super) placed: ZeroCopyBytes,
    polled: [Wc; POLLED],
    /// A state must be sent now.
    pub(super) urgent: bool,
    /// A later message arrived before the next one: unless that follows at once, it is missing.
    suspect: bool,
    /// Start of the time in which a received message was not acknowledged.
    owed: Option<Instant>,
    next_state: usize,
    /// When a state was last requested, for want of credit.
    asked: Instant,
    /// Sends in place that the device may still read.
    pub(super) reading: usize,
    /// A long message was sent in place, and its memory may still be read.
    mailed: bool,
    /// The waiting receiver has read all messages, and has registered memory for a long one.
    waiting: bool,
    /// The same of the peer, and the number of messages of the lane it had read then.
    hungry: Option<u64>,
    gone: bool,
    broken: Option<Arc<RdmaError>>,
    /// It broke with messages in flight: the peer may wait for them.
    cut: bool,
    /// The error of the first dead cable, while others work.
    lost: Option<Arc<RdmaError>>,
}

impl CableLink {
    pub(super) fn new(
        peer: Rank,
        session: u64,
        (slot_bytes, in_place_bytes): (usize, usize),
        cables: Vec<MessageQueuePair>,
        bulk: BulkTransfers,
        registry: Arc<Registry>,
    ) -> Self {
        assert!((1..=CABLES_MAX).contains(&cables.len()));
        Self {
            peer,
            session,
            slot_bytes,
            in_place_bytes,
            cables,
            outgoing: Default::default(),
            incoming: Default::default(),
            bulk,
            registry,
            placed: ZeroCopyBytes::default(),
            polled: [Wc::default(); POLLED],
            urgent: false,
            suspect: false,
            owed: None,
            next_state: 0,
            asked: provider::now(),
            reading: 0,
            mailed: false,
            waiting: false,
            hungry: None,
            gone: false,
            broken: None,
            cut: false,
            lost: None,
        }
    }

    pub(super) fn cables(&self) -> &[MessageQueuePair] {
        &self.cables
    }

    pub(super) fn tracks(&self) -> &[BulkQueuePair] {
        &self.bulk.tracks
    }

    /// Connects the bulk pairs, if the peer has some as well.
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

    pub(super) fn broken(&self) -> Option<&Arc<RdmaError>> {
        self.broken.as_ref()
    }

    /// Whether it broke before the peer had received all messages.
    pub(super) const fn is_cut(&self) -> bool {
        self.cut
    }

    /// Why a cable is dead, although others work.
    pub(super) fn lost(&self) -> Option<&Arc<RdmaError>> {
        self.lost.as_ref()
    }

    /// Why the link, or one of its cables, is broken; for a link that is discarded.
    pub(super) fn take_broken(&mut self) -> Option<RdmaError> {
        Arc::into_inner(self.broken.take().or(self.lost.take())?)
    }

    /// The peer's process has ended: no message will arrive, and none must be repeated.
    pub(super) fn end(&mut self) {
        self.gone = true;
        for outgoing in &mut self.outgoing {
            outgoing.flights.clear();
            outgoing.in_place = 0;
            outgoing.received = outgoing.next;
        }
        self.bulk.out = None;
        self.mailed = false;
    }

    /// Most messages of a lane in flight.
    fn window(&self, lane: usize) -> u64 {
        (WINDOW[lane] * self.live()) as u64
    }

    /// Number of working cables.
    pub(super) fn live(&self) -> usize {
        self.cables.iter().filter(|cable| !cable.dead).count()
    }

    /// A cable and a slot for a message, tried from cable `first` on.
    fn place(&self, lane: usize, first: usize) -> Option<(usize, usize)> {
        let all = self.cables.len();
        let mut cables = (first..first + all).map(|cable| cable % all);
        cables.find_map(|cable| Some((cable, self.cables[cable].free_slot(lane)?)))
    }

    pub(super) fn result(&mut self, result: Result<(), RdmaError>) {
        if let Err(error) = result {
            self.break_with(error);
        }
    }

    fn break_with(&mut self, error: RdmaError) {
        self.broken.get_or_insert(Arc::new(error));
        self.cut |= self.outgoing.iter().any(|lane| !lane.flights.is_empty());
        // Posted requests complete with an error, or never; nothing waits for them.
        for cable in &self.cables {
            let _ = cable.pair().fail();
        }
        self.end();
        self.gone = false;
        self.reading = 0;
    }

    /// Sends a hello on every cable.
    pub(super) fn greet(&mut self) {
        for cable in 0..self.cables.len() {
            let greeted = self.send_state(cable, Kind::Hello);
            self.result(greeted.map(|_| ()));
        }
    }

    /// Receives, repeats lost messages, and sends due acknowledgements.
    pub(super) fn progress(&mut self) {
        if self.broken.is_none() {
            let moved = self.poll().and_then(|moved| {
                self.pump()?;
                self.tend(moved)
            });
            self.result(moved);
            self.mailed &= self.bulk.sends(VirtualLane::Messages) || self.reading > 0;
        }
    }

    /// True if something arrived.
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
            if is_send
                && let MessageCompletion::Sent { in_place } = self.cables[cable].completed(wc)
            {
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
            MessageCompletion::Sent { in_place } => {
                self.reading -= usize::from(in_place);
                Ok(())
            }
            MessageCompletion::Received { slot, bytes } => {
                if self.arrived(cable, slot, bytes)? {
                    return Ok(());
                }
                self.cables[cable].post_receive(slot)
            }
            MessageCompletion::Stray => Err(RdmaError::Stray {
                peer,
                cable,
                id: wc.wr_id,
                bytes: wc.byte_len,
            }),
        }
    }

    /// Handles a message; true if its slot is kept.
    fn arrived(&mut self, cable: usize, slot: usize, bytes: usize) -> Result<bool, RdmaError> {
        let message = self.cables[cable].received(slot, 0, bytes);
        let head = message.first_chunk().and_then(MessageHead::decode);
        // Messages of other sessions are dropped.
        let Some(head) = head.filter(|head| head.session == self.session) else {
            return Ok(false);
        };
        let garbled = |lane: VirtualLane| RdmaError::Garbled {
            peer: self.peer,
            cable,
            lane: lane as u8,
            sequence: head.sequence,
        };
        if head.bytes as usize != bytes - HEAD_BYTES {
            return Err(garbled(VirtualLane::Calls));
        }
        let states = message[HEAD_BYTES..].first_chunk::<STATE_BYTES>().copied();
        for lane in LANES {
            if !self.outgoing[lane as usize].acknowledged(lane, &head, &mut self.cables) {
                return Err(garbled(lane));
            }
        }
        self.cables[cable].heard = true;
        self.judge()?;
        if head.waits {
            self.hungry = self
                .hungry
                .max(Some(head.consumed[VirtualLane::Messages as usize]));
        }
        self.bulk_done(head.done);
        self.urgent |= head.asks;
        match (head.kind, states) {
            (Kind::Data(lane), _) => self.data(lane, cable, slot, &head),
            (Kind::Offer(lane) | Kind::Patch(lane), _) => self.data(lane, cable, slot, &head),
            (Kind::State | Kind::Ask, Some(states)) => {
                self.urgent |= head.kind == Kind::Ask;
                self.states(&head, &states).map(|()| false)
            }
            _ => Ok(false),
        }
    }

    /// Stores a message of a lane, unless it is a duplicate.
    fn data(
        &mut self,
        lane: VirtualLane,
        cable: usize,
        slot: usize,
        head: &MessageHead,
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
        let held = UnreadMessage {
            kind: head.kind,
            cable,
            slot,
            bytes: head.bytes as usize,
        };
        let kept = incoming.keep(head.sequence, held);
        // A duplicate was sent because its acknowledgement was lost.
        self.urgent |= !kept;
        self.suspect |= head.sequence >= incoming.received;
        if self.owed.is_none() {
            self.owed = Some(provider::now());
        }
        Ok(kept)
    }

    /// Repeats messages that the peer lacks, although it has later ones.
    fn states(&mut self, head: &MessageHead, bytes: &[u8; STATE_BYTES]) -> Result<(), RdmaError> {
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
            // A state overtaken by a later one is outdated.
            if there == 0 || head.received[lane] != first {
                continue;
            }
            let now = provider::now();
            let count = self.outgoing[lane].flights.len();
            let last = 64 - there.leading_zeros() as usize;
            for index in 0..count.min(last + 1) {
                let flight = &mut self.outgoing[lane].flights[index];
                // Bit 0 stands for the message behind the first missing one.
                flight.held |= index > 0 && there & (1 << (index - 1)) != 0;
                let missing = !flight.held && index < last;
                if missing && now.saturating_duration_since(flight.last) > AGAIN_AFTER {
                    self.transmit(lane, first + index as u64, now)?;
                }
            }
        }
        Ok(())
    }

    /// Timed work: repetitions and acknowledgements.
    fn tend(&mut self, moved: bool) -> Result<(), RdmaError> {
        let missing = std::mem::take(&mut self.suspect)
            && self.incoming.iter().any(|incoming| incoming.bits() != 0);
        let owes = LANES.into_iter().any(|lane| self.owes_credit(lane)) || self.bulk.owes();
        if self.urgent || missing || owes {
            return self.tell();
        }
        let under_way = |outgoing: &SendWindow| !outgoing.flights.is_empty();
        let starves = self.starves();
        let quiet = self.owed.is_none() && !self.outgoing.iter().any(under_way);
        if moved || (quiet && !starves) {
            return Ok(());
        }
        let now = provider::now();
        if self
            .owed
            .is_some_and(|since| now.saturating_duration_since(since) > STATE_AFTER)
        {
            self.tell()?;
        }
        // A lost credit update is not repeated by itself.
        if starves && now.saturating_duration_since(self.asked) > REPEAT_FIRST {
            self.asked = now;
            self.request_state()?;
        }
        (0..LANES.len()).try_for_each(|lane| self.repeat(lane, now))
    }

    /// Whether a writer waits for credit.
    fn starves(&self) -> bool {
        let starves = |lane: VirtualLane| {
            let outgoing = &self.outgoing[lane as usize];
            let wants = outgoing.starved || self.bulk.copies(lane);
            wants && outgoing.next - outgoing.consumed >= self.window(lane as usize)
        };
        LANES.into_iter().any(starves)
    }

    /// Repeats the oldest message if it was unacknowledged for long.
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

    fn head(&mut self, kind: Kind, sequence: u64, bytes: usize) -> MessageHead {
        for incoming in &mut self.incoming {
            incoming.told_consumed = incoming.consumed;
            incoming.told_received = incoming.received;
        }
        self.owed = None;
        let [a, b] = &self.incoming;
        MessageHead {
            kind,
            session: self.session,
            sequence,
            received: [a.received, b.received],
            consumed: [a.consumed, b.consumed],
            bytes: u32::try_from(bytes).expect("less than a slot"),
            asks: false,
            waits: self.waiting,
            done: self.bulk.done,
        }
    }

    pub(super) fn request_state(&mut self) -> Result<(), RdmaError> {
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
        let bits = self.incoming.each_ref().map(ReceiveWindow::bits);
        let mut of_bulk = self.bulk.words();
        of_bulk[0] |= self.dead() << DEAD_AT;
        let words = bits.into_iter().chain(of_bulk);
        let words: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let cable = &mut self.cables[cable];
        cable.fill(slot, 0, &[&head, &words]);
        // SAFETY: no body is sent in place.
        unsafe { cable.send(slot, HEAD_BYTES + STATE_BYTES, None) }?;
        Ok(true)
    }

    /// Sends message `sequence`, which is in flight, unless the device still reads it. A message
    /// that was lost twice, or on a dead cable, moves to another.
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
        let head = MessageHead {
            asks,
            ..self.head(kind, sequence, payload)
        };
        self.cables[cable].fill(slot, 0, &[&head.encode()]);
        // SAFETY: the writer keeps the body unchanged while the link `holds` it.
        match unsafe { self.cables[cable].send(slot, bytes, body) } {
            Ok(()) => {
                self.reading += usize::from(body.is_some());
                Ok(())
            }
            Err(error) => self.lose(cable, error),
        }
    }

    /// Whether every message was acknowledged.
    pub(super) fn is_settled(&self) -> bool {
        self.outgoing.iter().all(|o| o.flights.is_empty()) || self.is_closed()
    }

    /// Sends due acknowledgements, before this end closes.
    pub(super) fn settle(&mut self) {
        self.progress();
        if self.broken.is_none() && self.owed.is_some() {
            let told = self.tell();
            self.result(told);
        }
    }

    /// Stops using callers' memory: bodies in flight are copied to slots. Waits briefly for the
    /// device to release it, then breaks the link.
    pub(super) fn release_memory(&mut self, lane: VirtualLane) {
        let until = provider::now() + Duration::from_millis(100);
        let let_go = self.let_tracks_go(lane, until);
        while self.reading > 0 && self.broken.is_none() && provider::now() < until {
            self.progress();
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
        if lane == VirtualLane::Messages {
            self.mailed = false;
            return;
        }
        for flight in &mut self.outgoing[0].flights {
            if let Some(body) = flight.body.take() {
                // SAFETY: the caller has not regained it yet.
                let bytes = unsafe { std::slice::from_raw_parts(body.start, body.bytes) };
                self.placed.sent -= body.bytes as u64;
                self.cables[flight.cable].fill(flight.slot, flight.bytes, &[bytes]);
                flight.bytes += body.bytes;
            }
        }
        self.outgoing[0].in_place = 0;
    }
}
