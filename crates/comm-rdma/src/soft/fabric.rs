//! Software devices, and delivery of messages between them.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, c_uint};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use super::super::abi::{self, Gid, Wc};
use super::process_fabric::{Inbox, ProcessFabric};

/// Denominator of probabilities.
pub(crate) const OUT_OF: u64 = 1000;

/// Linux's `errno` values; macOS has other numbers above 34, but only this software uses these.
pub(crate) const EINVAL: i32 = 22;
pub(crate) const ENOMEM: i32 = 12;
pub(crate) const EBUSY: i32 = 16;
pub(crate) const EIO: i32 = 5;
pub(crate) const EOPNOTSUPP: i32 = 95;

/// Faults, drawn from a seed for each pair and message.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) seed: u64,
    /// Probability that a message is lost, of [`OUT_OF`].
    pub(crate) lose: u64,
    /// Probability that a message arrives behind later ones, of [`OUT_OF`].
    pub(crate) delay: u64,
    /// A permanent failure of a queue pair.
    pub(crate) failure: Option<DeviceFailure>,
}

/// A failure: its symptom, the device of the fabric, and the number of its message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceFailure {
    pub(crate) device: usize,
    pub(crate) after: u64,
    pub(crate) what: Break,
}

/// How a pair fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    /// A send completes with an error.
    Send,
    /// A receive completes with an error.
    Receive,
    /// Polling returns a negative number.
    Poll,
    /// No message leaves or reaches the device any more, without an error.
    Mute,
}

/// The capacity of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caps {
    pub(crate) regions: usize,
    pub(crate) pairs: usize,
    pub(crate) requests: u32,
    pub(crate) gathers: u32,
    /// Whether memory can be registered only in whole pages.
    pub(crate) pages: bool,
}

impl Caps {
    /// Apple's devices as reported; of the 63 requests that some count, 32 are safe.
    pub(crate) const APPLE: Self = Self {
        regions: 100,
        pairs: 10,
        requests: 32,
        gathers: 2,
        pages: false,
    };
}

/// Devices that can reach each other.
pub(crate) struct Fabric {
    pub(crate) core: Arc<Core>,
}

pub(crate) struct Core {
    pub(crate) faults: Faults,
    pub(crate) caps: Caps,
    pairs: RwLock<BTreeMap<u32, Arc<PairCore>>>,
    /// The function that fails once, and its successful calls before that.
    refused_once: Mutex<Option<(&'static str, usize)>>,
    /// The function that always fails, if any.
    refused: Mutex<Option<&'static str>>,
    refusing: AtomicBool,
    /// Objects that were made and not destroyed.
    pub(crate) live: AtomicUsize,
    /// Messages that met no posted receive.
    pub(crate) dropped: AtomicU64,
    /// Messages that were sent from more than one segment.
    pub(crate) gathered: AtomicU64,
    /// Gathered messages that were also received into more than one segment.
    pub(crate) scattered: AtomicU64,
    /// Queue pairs of other processes.
    outside: Option<ProcessFabric>,
    /// Whether the failure may occur.
    armed: AtomicBool,
}

/// All devices of all fabrics, for the library's list.
static DEVICES: Mutex<Vec<Arc<DeviceCore>>> = Mutex::new(Vec::new());

/// Numbers of pairs, keys and devices, unique in this process.
static NUMBERS: AtomicU32 = AtomicU32::new(1);

pub(crate) fn number() -> u32 {
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

pub(crate) struct DeviceCore {
    pub(crate) name: CString,
    /// The device's GIDs; its address is at index `address_at`.
    pub(crate) gids: Vec<Gid>,
    pub(crate) address_at: usize,
    /// Number of open contexts.
    pub(crate) contexts: AtomicUsize,
    pub(crate) fabric: Arc<Core>,
    index: usize,
    /// The only device that this one is cabled to, if any.
    reaches: Mutex<Option<Gid>>,
    mute: AtomicBool,
    sent: AtomicU64,
    /// Bytes of messages sent from it.
    pub(crate) bytes: AtomicU64,
    /// Registered memory by key: first byte, bytes.
    pub(crate) regions: RwLock<BTreeMap<u32, (u64, u64)>>,
    pub(crate) pairs: AtomicUsize,
}

// Takes over a lock whose holder panicked. Not `base`'s: `examples/ibverbs.rs` is compiled from
// these files alone.
pub(crate) fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn devices() -> Vec<Arc<DeviceCore>> {
    lock(&DEVICES).clone()
}

impl Fabric {
    #[allow(dead_code, reason = "the library goes on in other processes")]
    pub(crate) fn new(faults: Faults, caps: Caps) -> Self {
        Self::with(faults, caps, None)
    }

    /// A fabric that extends to other processes.
    pub(crate) fn with(faults: Faults, caps: Caps, outside: Option<ProcessFabric>) -> Self {
        let core = Core {
            faults,
            caps,
            pairs: RwLock::default(),
            refused_once: Mutex::new(None),
            refused: Mutex::new(None),
            refusing: AtomicBool::new(false),
            live: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            gathered: AtomicU64::new(0),
            scattered: AtomicU64::new(0),
            outside,
            armed: AtomicBool::new(true),
        };
        let core = Arc::new(core);
        Self { core }
    }

    /// Objects that were made and not destroyed.
    #[allow(dead_code, reason = "the library does not ask")]
    pub(crate) fn live(&self) -> usize {
        self.core.live.load(Ordering::Acquire)
    }

    /// Enables or disables the failure: messages are counted from here.
    #[allow(dead_code, reason = "the library has no faults")]
    pub(crate) fn arm(&self, armed: bool) {
        let own = |device: &Arc<DeviceCore>| Arc::ptr_eq(&device.fabric, &self.core);
        let devices = devices().into_iter().filter(own);
        devices.for_each(|device| device.sent.store(0, Ordering::Relaxed));
        self.core.armed.store(armed, Ordering::Release);
    }

    /// Adds a device. A duplicate name finds the first device.
    pub(crate) fn device(&self, name: &str) {
        let [_, b, c, d] = number().to_be_bytes();
        self.device_at(name, [10, b, c, d]);
    }

    /// Adds a device with this IPv4 address.
    pub(crate) fn device_at(&self, name: &str, address: [u8; 4]) {
        self.device_with(name, address, 1);
    }

    /// Adds a device with this IPv4 address at index `at` of its GID table.
    pub(crate) fn device_with(&self, name: &str, address: [u8; 4], at: usize) {
        let mut local = Gid([0; 16]);
        local.0[..2].copy_from_slice(&[0xfe, 0x80]);
        local.0[12..].copy_from_slice(&address);
        let mut mapped = Gid([0; 16]);
        mapped.0[10..12].copy_from_slice(&[0xff; 2]);
        mapped.0[12..].copy_from_slice(&address);
        let mut gids = vec![local; at.max(1) + 1];
        gids[at] = mapped;
        let mut devices = lock(&DEVICES);
        let own = |device: &&Arc<DeviceCore>| Arc::ptr_eq(&device.fabric, &self.core);
        let index = devices.iter().filter(own).count();
        devices.push(Arc::new(DeviceCore {
            name: CString::new(name).expect("a name has no zero byte"),
            gids,
            address_at: at,
            contexts: AtomicUsize::new(0),
            fabric: Arc::clone(&self.core),
            index,
            reaches: Mutex::new(None),
            mute: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            regions: RwLock::default(),
            pairs: AtomicUsize::new(0),
        }));
    }

    /// Connects two devices by a cable: neither reaches any other from then on.
    #[allow(dead_code, reason = "the library has no cables")]
    pub(crate) fn cable(&self, a: &str, b: &str) {
        let find = |name: &str| {
            let named = |device: &Arc<DeviceCore>| device.name.to_bytes() == name.as_bytes();
            devices().into_iter().find(named).expect("it was added")
        };
        let (a, b) = (find(a), find(b));
        *lock(&a.reaches) = Some(b.gids[b.address_at]);
        *lock(&b.reaches) = Some(a.gids[a.address_at]);
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        lock(&DEVICES).retain(|device| !Arc::ptr_eq(&device.fabric, &self.core));
    }
}

impl Core {
    /// Makes every call of this function fail, or none.
    #[allow(dead_code, reason = "the library has no faults")]
    pub(crate) fn refuse(&self, call: Option<&'static str>) {
        *lock(&self.refused) = call;
        self.refusing.store(call.is_some(), Ordering::Release);
    }

    /// Whether the call that was to fail once occurred.
    #[allow(dead_code, reason = "the library has no faults")]
    pub(crate) fn has_refused(&self) -> bool {
        lock(&self.refused_once).is_none()
    }

    /// Makes one call of this function fail, after `before` successful ones. Counted for each
    /// function: the interleaving of several ranks' calls differs from run to run.
    #[allow(dead_code, reason = "the library has no faults")]
    pub(crate) fn refuse_once(&self, call: &'static str, before: usize) {
        *lock(&self.refused_once) = Some((call, before));
    }

    /// Whether all calls of this function fail.
    pub(crate) fn is_refused(&self, call: &str) -> bool {
        // Checked for every request, so without the lock at first.
        self.refusing.load(Ordering::Acquire)
            && lock(&self.refused).is_some_and(|refused| refused == call)
    }

    /// Whether this call is the one that fails.
    pub(crate) fn refuses(&self, call: &str) -> bool {
        self.is_refused(call) || self.is_refused_once(call)
    }

    fn is_refused_once(&self, call: &str) -> bool {
        let mut once = lock(&self.refused_once);
        match once.as_mut() {
            Some((refused, before)) if *refused == call && *before > 0 => *before -= 1,
            Some((refused, _)) if *refused == call => {
                *once = None;
                return true;
            }
            _ => {}
        }
        false
    }

    fn pair(&self, number: u32) -> Option<Arc<PairCore>> {
        let pairs = self.pairs.read().unwrap_or_else(PoisonError::into_inner);
        pairs.get(&number).cloned()
    }

    pub(crate) fn add(&self, pair: &Arc<PairCore>) {
        if pair.inbox.is_some() {
            lock(&pair.recv_queue.outside).push(Arc::downgrade(pair));
        }
        let mut pairs = self.pairs.write().unwrap_or_else(PoisonError::into_inner);
        pairs.insert(pair.number, Arc::clone(pair));
    }

    pub(crate) fn remove(&self, number: u32) {
        let mut pairs = self.pairs.write().unwrap_or_else(PoisonError::into_inner);
        pairs.remove(&number);
    }
}

/// splitmix64 (Steele, Lea, Flood, 2014).
pub(crate) fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

pub(crate) struct QueueCore {
    room: usize,
    waiting: AtomicUsize,
    entries: Mutex<VecDeque<QueuedCompletion>>,
    broken: AtomicBool,
    /// Queue pairs that receive from other processes.
    outside: Mutex<Vec<Weak<PairCore>>>,
}

struct QueuedCompletion {
    wc: Wc,
    /// The pair's count of posted requests of this kind.
    open: Arc<AtomicU32>,
}

impl QueueCore {
    pub(crate) fn new(room: usize) -> Self {
        Self {
            room,
            waiting: AtomicUsize::new(0),
            entries: Mutex::default(),
            broken: AtomicBool::new(false),
            outside: Mutex::default(),
        }
    }

    /// A queue that overflows breaks, as the specification demands.
    fn push(&self, wc: Wc, open: &Arc<AtomicU32>) {
        let mut entries = lock(&self.entries);
        if entries.len() == self.room {
            self.broken.store(true, Ordering::Release);
            return;
        }
        let open = Arc::clone(open);
        entries.push_back(QueuedCompletion { wc, open });
        self.waiting.store(entries.len(), Ordering::Release);
    }

    /// Number of completions written to `into`; negative if the queue is broken.
    pub(crate) fn poll(&self, into: &mut [Wc]) -> i32 {
        for pair in &*lock(&self.outside) {
            pair.upgrade().iter().for_each(|pair| pair.hear());
        }
        if self.waiting.load(Ordering::Acquire) == 0 {
            return if self.broken.load(Ordering::Acquire) {
                -1
            } else {
                0
            };
        }
        let mut entries = lock(&self.entries);
        let count = entries.len().min(into.len());
        for (slot, entry) in into.iter_mut().zip(entries.drain(..count)) {
            *slot = entry.wc;
            entry.open.fetch_sub(1, Ordering::AcqRel);
        }
        self.waiting.store(entries.len(), Ordering::Release);
        i32::try_from(count).unwrap_or(i32::MAX)
    }
}

pub(crate) struct PairCore {
    pub(crate) number: u32,
    pub(crate) device: Arc<DeviceCore>,
    pub(crate) state: AtomicU32,
    pub(crate) send_queue: Arc<QueueCore>,
    pub(crate) recv_queue: Arc<QueueCore>,
    pub(crate) requests: [u32; 2],
    /// Locked to post a send; taken before `receiving` of the other end, never after.
    sending: Mutex<SendSide>,
    receiving: Mutex<VecDeque<Receive>>,
    open: [Arc<AtomicU32>; 2],
    inbox: Option<Inbox>,
}

#[derive(Default)]
struct SendSide {
    random: u64,
    /// Destination of messages.
    to: Gid,
    pair: u32,
    peer: Weak<PairCore>,
    late: Vec<(u64, Vec<u8>)>,
}

struct Receive {
    id: u64,
    pieces: Vec<GatherSegment>,
}

// SAFETY: by the rules of verbs the device owns the memory until the request completes.
unsafe impl Send for Receive {}

#[derive(Clone, Copy)]
pub(crate) struct GatherSegment {
    pub(crate) start: *const u8,
    pub(crate) bytes: usize,
}

impl Default for GatherSegment {
    fn default() -> Self {
        let (start, bytes) = (std::ptr::null(), 0);
        Self { start, bytes }
    }
}

impl GatherSegment {
    fn after(self, count: usize) -> Self {
        Self {
            start: self.start.wrapping_add(count),
            bytes: self.bytes - count,
        }
    }
}

/// The directions, as array indices.
const SENDS: usize = 0;
const RECEIVES: usize = 1;

impl PairCore {
    pub(crate) fn new(
        device: &Arc<DeviceCore>,
        send_queue: Arc<QueueCore>,
        recv_queue: Arc<QueueCore>,
        requests: [u32; 2],
    ) -> Self {
        let (number, inbox) = named(device.fabric.outside.as_ref());
        // Randomness must not depend on the number of pairs that other tests have made.
        let seed = device.fabric.faults.seed ^ (device.index as u64) << 32;
        let nth = device.pairs.load(Ordering::Relaxed) as u64;
        let sending = SendSide {
            random: seed ^ nth.wrapping_mul(0xa076_1d64_78bd_642f),
            ..SendSide::default()
        };
        Self {
            number,
            device: Arc::clone(device),
            state: AtomicU32::new(0),
            send_queue,
            recv_queue,
            requests,
            sending: Mutex::new(sending),
            receiving: Mutex::default(),
            open: Default::default(),
            inbox,
        }
    }

    /// Receives messages of other processes.
    fn hear(&self) {
        let mut bytes = lock(&HEARD);
        bytes.resize(MESSAGE_BYTES_MAX, 0);
        while let Some(count) = self.inbox.as_ref().and_then(|inbox| inbox.next(&mut bytes)) {
            let piece = GatherSegment {
                start: bytes.as_ptr(),
                bytes: count,
            };
            self.deliver(self, &[piece]);
        }
    }

    pub(crate) fn connect(&self, to: Gid, pair: u32) {
        let mut sending = lock(&self.sending);
        (sending.to, sending.pair, sending.peer) = (to, pair, Weak::new());
    }

    fn state(&self) -> c_uint {
        self.state.load(Ordering::Acquire)
    }

    fn completion(&self, id: u64, opcode: c_uint, status: c_uint, bytes: usize) -> Wc {
        Wc {
            wr_id: id,
            status,
            opcode,
            byte_len: u32::try_from(bytes).unwrap_or(u32::MAX),
            qp_num: self.number,
            ..Wc::default()
        }
    }

    pub(crate) fn post_receive(&self, id: u64, pieces: Vec<GatherSegment>) -> Result<(), i32> {
        if self.state() == 0 {
            return Err(EINVAL);
        }
        if self.open[RECEIVES].fetch_add(1, Ordering::AcqRel) >= self.requests[RECEIVES] {
            self.open[RECEIVES].fetch_sub(1, Ordering::AcqRel);
            return Err(ENOMEM);
        }
        let mut receiving = lock(&self.receiving);
        receiving.push_back(Receive { id, pieces });
        drop(receiving);
        if self.state() == abi::QPS_ERR {
            self.fail();
        }
        Ok(())
    }

    /// Sends a message, or applies a fault to it.
    pub(crate) fn post_send(&self, id: u64, pieces: &[GatherSegment]) -> Result<(), i32> {
        let flushed = self.state() == abi::QPS_ERR;
        if !flushed && self.state() != abi::QPS_RTS {
            return Err(EINVAL);
        }
        if self.open[SENDS].fetch_add(1, Ordering::AcqRel) >= self.requests[SENDS] {
            self.open[SENDS].fetch_sub(1, Ordering::AcqRel);
            return Err(ENOMEM);
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        self.device.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if pieces.len() > 1 {
            self.device.fabric.gathered.fetch_add(1, Ordering::Relaxed);
        }
        let status = match flushed {
            true => abi::WC_WR_FLUSH_ERR,
            false => self.transmit(pieces),
        };
        let wc = self.completion(id, abi::WC_SEND, status, bytes);
        self.send_queue.push(wc, &self.open[SENDS]);
        if status != abi::WC_SUCCESS {
            self.fail();
        }
        Ok(())
    }

    fn transmit(&self, pieces: &[GatherSegment]) -> c_uint {
        let faults = &self.device.fabric.faults;
        let count = self.device.sent.fetch_add(1, Ordering::Relaxed);
        let hit = |what| {
            faults.failure.is_some_and(|failure| {
                self.device.fabric.armed.load(Ordering::Acquire)
                    && failure.device == self.device.index
                    && failure.what == what
                    && count >= failure.after
            })
        };
        if hit(Break::Send) {
            return abi::WC_GENERAL_ERR;
        }
        if hit(Break::Poll) {
            self.send_queue.broken.store(true, Ordering::Release);
        }
        if hit(Break::Mute) {
            self.device.mute.store(true, Ordering::Release);
        }
        let mut sending = lock(&self.sending);
        let Some(peer) = self.peer(&mut sending) else {
            if let (Some(outside), Some(inbox)) = (&self.device.fabric.outside, &self.inbox) {
                outside.send(inbox, sending.pair, &gather(pieces));
            }
            return abi::WC_SUCCESS;
        };
        if hit(Break::Receive) {
            peer.break_receive();
        }
        let chance = mix(&mut sending.random) % OUT_OF;
        if chance < faults.lose {
            // Lost, without an error.
        } else if chance < faults.lose + faults.delay {
            let behind = 1 + mix(&mut sending.random) % 4;
            sending.late.push((behind, gather(pieces)));
        } else {
            self.deliver(&peer, pieces);
        }
        for (behind, _) in &mut sending.late {
            *behind = behind.saturating_sub(1);
        }
        while let Some(due) = sending.late.iter().position(|(behind, _)| *behind == 0) {
            let (_, bytes) = sending.late.swap_remove(due);
            let piece = GatherSegment {
                start: bytes.as_ptr(),
                bytes: bytes.len(),
            };
            self.deliver(&peer, &[piece]);
        }
        abi::WC_SUCCESS
    }

    /// The other end, if a cable leads there.
    fn peer(&self, sending: &mut SendSide) -> Option<Arc<Self>> {
        let known = sending.peer.upgrade();
        let peer = known.or_else(|| self.device.fabric.pair(sending.pair))?;
        sending.peer = Arc::downgrade(&peer);
        let there = peer.device.gids.contains(&sending.to);
        let cabled = lock(&self.device.reaches).is_none_or(|only| only == sending.to);
        let alive = |device: &DeviceCore| !device.mute.load(Ordering::Acquire);
        (there && cabled && alive(&self.device) && alive(&peer.device)).then_some(peer)
    }

    /// Delivers a message to a posted receive of `peer`.
    fn deliver(&self, peer: &Self, pieces: &[GatherSegment]) {
        let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let mut receiving = lock(&peer.receiving);
        // RTR or RTS: a pair in error has no receives left.
        if peer.state() < abi::QPS_RTR {
            return;
        }
        let Some(receive) = receiving.pop_front() else {
            self.device.fabric.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let room: usize = receive.pieces.iter().map(|piece| piece.bytes).sum();
        if receive.pieces.len() > 1 && pieces.len() > 1 {
            self.device.fabric.scattered.fetch_add(1, Ordering::Relaxed);
        }
        let status = match bytes > room {
            true => abi::WC_LOC_LEN_ERR,
            false => abi::WC_SUCCESS,
        };
        if status == abi::WC_SUCCESS {
            scatter(pieces, &receive.pieces);
        }
        // Pushed under the lock, so that completions have the order of the receives.
        let wc = peer.completion(receive.id, abi::WC_RECV, status, bytes);
        peer.recv_queue.push(wc, &peer.open[RECEIVES]);
        drop(receiving);
        if status != abi::WC_SUCCESS {
            peer.fail();
        }
    }

    fn break_receive(&self) {
        let first = lock(&self.receiving).pop_front();
        if let Some(receive) = first {
            let wc = self.completion(receive.id, abi::WC_RECV, abi::WC_LOC_PROT_ERR, 0);
            self.recv_queue.push(wc, &self.open[RECEIVES]);
        }
        self.fail();
    }

    /// Moves to the error state; all receives complete with an error.
    pub(crate) fn fail(&self) {
        self.state.store(abi::QPS_ERR, Ordering::Release);
        let mut receiving = lock(&self.receiving);
        for receive in receiving.drain(..) {
            let wc = self.completion(receive.id, abi::WC_RECV, abi::WC_WR_FLUSH_ERR, 0);
            self.recv_queue.push(wc, &self.open[RECEIVES]);
        }
    }

    /// Touches no memory from now on.
    pub(crate) fn end(&self) {
        self.state.store(0, Ordering::Release);
        lock(&self.receiving).clear();
        lock(&self.sending).late.clear();
    }
}

/// Buffer for received datagrams, one pair at a time.
static HEARD: Mutex<Vec<u8>> = Mutex::new(Vec::new());

/// Longest accepted message of another process: more than any link sends.
const MESSAGE_BYTES_MAX: usize = 128 << 10;

/// A number for a pair that no other process uses.
fn named(outside: Option<&ProcessFabric>) -> (u32, Option<Inbox>) {
    let Some(outside) = outside else {
        return (number(), None);
    };
    // Numbers of this process rarely collide; in a deleted folder every number fails.
    let mut numbers = std::iter::repeat_with(number).take(1000);
    let named = numbers.find_map(|number| Some((number, outside.inbox(number).ok()?)));
    named.map_or_else(|| (number(), None), |(number, inbox)| (number, Some(inbox)))
}

/// Copies `from` to `to`, segment by segment.
fn scatter(from: &[GatherSegment], to: &[GatherSegment]) {
    let (mut to, mut at) = (to.iter(), GatherSegment::default());
    for piece in from {
        let mut rest = *piece;
        while rest.bytes > 0 {
            if at.bytes == 0 {
                let Some(next) = to.next() else { return };
                at = *next;
            }
            let count = rest.bytes.min(at.bytes);
            // SAFETY: both are in registered memory: the sender's until its request completes, the
            // receiver's because this request has not completed.
            unsafe {
                rest.start
                    .copy_to_nonoverlapping(at.start.cast_mut(), count)
            };
            (rest, at) = (rest.after(count), at.after(count));
        }
    }
}

fn gather(pieces: &[GatherSegment]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        // SAFETY: the sender's memory is readable until its request completes.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.start, piece.bytes) });
    }
    bytes
}
