//! All cables between two ranks, as two lanes of ordered bytes.
//!
//! UC drops a message that is damaged, or meets no posted receive, and tells nobody. So messages of
//! a lane are numbered. Cables take turns. Messages are handed on in the order of their numbers,
//! each once, whatever order they come in.
//!
//! The receiver says in every message of its own what it has (`received`) and what it has read
//! (`consumed`, which is the sender's credit). If it has nothing to say it sends a *state*. It does
//! so at once when a message is missing or came twice or much has been read, else a little later.
//! The sender repeats what a state says is missing. It repeats the oldest message when nothing is
//! heard for [`REPEAT_FIRST`], then twice as long, and so on.
//!
//! A cable that fails, or loses message after message, is given up at both ends. Messages that were
//! under way on it go over the others. The link breaks only with the last cable.
//!
//! This is a state machine without threads: whoever looks at a link moves it.

mod failover;
pub(super) mod lane;
mod stream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::provider::{self, Lane};

use self::lane::{Held, Incoming, Outgoing, small};
use super::abi::{WC_SUCCESS, Wc};
use super::bulk::{Bulk, NUMBER_BYTES};
use super::cable::{Cable, Done, WINDOW};
use super::destination::{DESTINATION_BYTES, decode};
use super::error::RdmaError;
use super::matrix::CABLES_MAX;
use super::memory::Registry;
use super::message::{HEAD_BYTES, Head, Kind, STATE_BYTES, WORDS};
use super::track::Track;

/// How long the sender waits before it repeats. An answer takes some 10 us, and a rank without a
/// core may be away for some ms.
pub(super) const REPEAT_FIRST: Duration = Duration::from_millis(3);

/// And at most. A peer that computes looks every 100 ms (comm's `keeping::control`).
pub(super) const REPEAT_LAST: Duration = Duration::from_millis(200);

/// A living peer that acknowledges nothing for so long has lost its cable: many times
/// `REPEAT_LAST`, and what a person would wait.
pub(super) const GIVE_UP: Duration = Duration::from_secs(5);

/// A message that was sent so often and is missing goes over another cable.
const MOVED_AFTER: u32 = 1;

/// In what a state says, the bits of cables that are dead.
const DEAD_AT: u32 = 8;

/// How long an acknowledgement may wait for a message to travel with.
const STATE_AFTER: Duration = Duration::from_micros(200);

/// How soon something may be repeated again because the receiver says that it is missing.
const AGAIN_AFTER: Duration = Duration::from_micros(300);

/// Completions taken at once.
const POLLED: usize = 16;

const LANES: [Lane; 2] = [Lane::Calls, Lane::Messages];

/// Bytes of callers' that were sent from where they are, and that came to where they belong or
/// were reduced where they came to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Placed {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// The end of a link.
pub(super) struct Link {
    pub(super) peer: Rank,
    pub(super) session: u64,
    pub(super) slot_bytes: usize,
    /// Shortest body that is offered.
    pub(super) in_place_bytes: usize,
    pub(super) cables: Vec<Cable>,
    outgoing: [Outgoing; 2],
    incoming: [Incoming; 2],
    pub(super) bulk: Bulk,
    pub(super) registry: Arc<Registry>,
    /// Bytes of callers' that were not copied.
    pub(super) placed: Placed,
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
    /// A long message was sent in place, and its memory may still be read.
    mailed: bool,
    /// The thread that waits for a message has read all that came, and has a place for a long one.
    waiting: bool,
    /// The same at the other end, once it had read so many messages of the lane.
    hungry: Option<u64>,
    gone: bool,
    broken: Option<Arc<RdmaError>>,
    /// It broke with messages under way: the peer may wait for them.
    cut: bool,
    /// Why the first of several cables is dead.
    lost: Option<Arc<RdmaError>>,
}

impl Link {
    pub(super) fn new(
        peer: Rank,
        session: u64,
        (slot_bytes, in_place_bytes): (usize, usize),
        cables: Vec<Cable>,
        bulk: Bulk,
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
            placed: Placed::default(),
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

    /// Whether it broke before the peer had all that was sent.
    pub(super) const fn is_cut(&self) -> bool {
        self.cut
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
        self.mailed = false;
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

    pub(super) fn result(&mut self, result: Result<(), RdmaError>) {
        if let Err(error) = result {
            self.break_with(error);
        }
    }

    fn break_with(&mut self, error: RdmaError) {
        self.broken.get_or_insert(Arc::new(error));
        self.cut |= self.outgoing.iter().any(|lane| !lane.flights.is_empty());
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
            self.mailed &= self.bulk.sends(Lane::Messages) || self.reading > 0;
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
        if head.waits {
            self.hungry = self
                .hungry
                .max(Some(head.consumed[Lane::Messages as usize]));
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
            self.owed = Some(provider::now());
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
            let now = provider::now();
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

    /// Does what is due by time: repetitions and acknowledgements.
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
        let now = provider::now();
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
            let wants = outgoing.starved || self.bulk.copies(lane);
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
            waits: self.waiting,
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
    pub(super) fn let_go(&mut self, lane: Lane) {
        let until = provider::now() + Duration::from_millis(100);
        let let_go = self.let_tracks_go(lane, until);
        while self.reading > 0 && self.broken.is_none() && provider::now() < until {
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
        if lane == Lane::Messages {
            self.mailed = false;
            return;
        }
        for flight in &mut self.outgoing[0].flights {
            if let Some(body) = flight.body.take() {
                // SAFETY: the caller has not had it back yet.
                let bytes = unsafe { std::slice::from_raw_parts(body.start, body.bytes) };
                self.placed.sent -= body.bytes as u64;
                self.cables[flight.cable].fill(flight.slot, flight.bytes, &[bytes]);
                flight.bytes += body.bytes;
            }
        }
        self.outgoing[0].in_place = 0;
    }
}
