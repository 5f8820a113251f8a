//! NCCL and the CUDA driver in one small library, for tests of the real loader. Its "GPUs" are host
//! memory, ranks are threads of one process, and a stream counts pending work.
//!
//! Compiled by the test with `rustc --crate-type cdylib`. `--cfg old` reports another version,
//! `--cfg bare` has no GPU, `--cfg lacking` has no `ncclSend`.

#![allow(non_snake_case, missing_docs, reason = "the names are NCCL's and CUDA's")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

type Parts = Vec<Option<Vec<u8>>>;

/// Shared state of a communicator: every rank's input of each call.
#[derive(Default)]
struct Room {
    calls: Mutex<HashMap<u64, Parts>>,
    changed: Condvar,
}

pub struct Comm {
    room: Arc<Room>,
    rank: usize,
    size: usize,
    calls: AtomicU64,
    aborted: Arc<AtomicBool>,
}

static IDS: AtomicU64 = AtomicU64::new(1);
static ROOMS: Mutex<Option<HashMap<[u8; 128], Arc<Room>>>> = Mutex::new(None);

thread_local! {
    /// Messages posted since `ncclGroupStart`: peer, address, bytes, whether it is sent.
    static POSTED: RefCell<Vec<(usize, u64, usize, bool)>> = const { RefCell::new(Vec::new()) };
    static WHERE: RefCell<Option<(usize, usize)>> = const { RefCell::new(None) };
}

/// Contributes `own` to call `number` and waits for all ranks; `None` if aborted.
fn meet(
    room: &Room,
    number: u64,
    rank: usize,
    size: usize,
    own: Vec<u8>,
    aborted: &AtomicBool,
) -> Option<Vec<Vec<u8>>> {
    let mut calls = room.calls.lock().unwrap();
    calls.entry(number).or_insert_with(|| vec![None; size])[rank] = Some(own);
    room.changed.notify_all();
    loop {
        if let Some(parts) = calls
            .get(&number)
            .and_then(|parts| parts.iter().cloned().collect())
        {
            return Some(parts);
        }
        if aborted.load(Ordering::SeqCst) {
            return None;
        }
        calls = room
            .changed
            .wait_timeout(calls, Duration::from_millis(5))
            .unwrap()
            .0;
    }
}

/// Enqueues a call; `finish` gets all ranks' inputs.
unsafe fn put(
    comm: *mut Comm,
    stream: *mut c_void,
    own: Vec<u8>,
    finish: impl FnOnce(Vec<Vec<u8>>) + Send + 'static,
) -> c_int {
    let comm = unsafe { &*comm };
    let pending = unsafe { Arc::clone(&*stream.cast::<Arc<AtomicUsize>>()) };
    let number = comm.calls.fetch_add(1, Ordering::SeqCst);
    let (room, rank, size) = (Arc::clone(&comm.room), comm.rank, comm.size);
    let aborted = Arc::clone(&comm.aborted);
    pending.fetch_add(1, Ordering::SeqCst);
    std::thread::spawn(move || {
        if let Some(parts) = meet(&room, number, rank, size, own, &aborted) {
            finish(parts);
        }
        pending.fetch_sub(1, Ordering::SeqCst);
    });
    0
}

unsafe fn bytes(start: u64, len: usize) -> Vec<u8> {
    unsafe { std::slice::from_raw_parts(start as *const u8, len).to_vec() }
}

unsafe fn write(start: u64, bytes: &[u8]) {
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start as *mut u8, bytes.len()) }
}

/// A number with NCCL's addition and multiplication.
trait Number: Copy + PartialOrd {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
}

macro_rules! number {
    ($type:ty, $x:ident, $y:ident, $sum:expr, $product:expr) => {
        impl Number for $type {
            fn plus(self, other: Self) -> Self {
                let ($x, $y) = (self, other);
                $sum
            }

            fn times(self, other: Self) -> Self {
                let ($x, $y) = (self, other);
                $product
            }
        }
    };
}

macro_rules! whole {
    ($($type:ty)*) => {$(number!($type, x, y, x.wrapping_add(y), x.wrapping_mul(y));)*};
}

whole!(i8 u8 i32 u32 i64 u64);
number!(f32, x, y, x + y, x * y);
number!(f64, x, y, x + y, x * y);

/// Reduces `part` into `total`, both of whole `T`s.
fn reduce<T: Number>(op: c_int, total: &mut [u8], part: &[u8]) {
    let size = size_of::<T>();
    for (a, b) in total.chunks_exact_mut(size).zip(part.chunks_exact(size)) {
        let (a, b) = (a.as_mut_ptr().cast::<T>(), b.as_ptr().cast::<T>());
        let (x, y) = unsafe { (a.read_unaligned(), b.read_unaligned()) };
        let z = match op {
            0 => x.plus(y),
            1 => x.times(y),
            2 if x > y => x,
            3 if x < y => x,
            _ => y,
        };
        unsafe { a.write_unaligned(z) };
    }
}

fn size_of_type(dtype: c_int) -> Option<usize> {
    [1, 1, 4, 4, 8, 8, 0, 4, 8]
        .get(dtype as usize)
        .copied()
        .filter(|size| *size > 0)
}

fn reduced(parts: &[Vec<u8>], dtype: c_int, op: c_int) -> Vec<u8> {
    let reduce = match dtype {
        0 => reduce::<i8>,
        1 => reduce::<u8>,
        2 => reduce::<i32>,
        3 => reduce::<u32>,
        4 => reduce::<i64>,
        5 => reduce::<u64>,
        7 => reduce::<f32>,
        _ => reduce::<f64>,
    };
    let mut total = parts[0].clone();
    for part in &parts[1..] {
        reduce(op, &mut total, part);
    }
    total
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = if cfg!(old) { 2708 } else { 22_703 } };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    let number = IDS.fetch_add(1, Ordering::SeqCst).to_ne_bytes();
    unsafe {
        *id = UniqueId([7; 128]);
        (&mut (*id).0)[..8].copy_from_slice(&number);
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut *mut Comm,
    size: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    let mut rooms = ROOMS.lock().unwrap();
    let room = Arc::clone(
        rooms
            .get_or_insert_with(HashMap::new)
            .entry(id.0)
            .or_default(),
    );
    drop(rooms);
    let (rank, size) = (rank as usize, size as usize);
    // Like the real one, this returns when all ranks have arrived.
    meet(&room, 0, rank, size, Vec::new(), &AtomicBool::new(false));
    let new = Comm {
        room,
        rank,
        size,
        calls: AtomicU64::new(1),
        aborted: Arc::default(),
    };
    unsafe { *comm = Box::into_raw(Box::new(new)) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Comm) -> c_int {
    unsafe { ncclCommAbort(comm) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Comm) -> c_int {
    let comm = unsafe { Box::from_raw(comm) };
    comm.aborted.store(true, Ordering::SeqCst);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(_: *mut Comm, code: *mut c_int) -> c_int {
    unsafe { *code = 0 };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    len: usize,
    dtype: c_int,
    op: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    let Some(size) = size_of_type(dtype) else {
        return 4;
    };
    unsafe {
        put(comm, stream, bytes(from, len * size), move |parts| {
            write(to, &reduced(&parts, dtype, op))
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    from: u64,
    to: u64,
    len: usize,
    dtype: c_int,
    op: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    let Some(size) = size_of_type(dtype) else {
        return 4;
    };
    let (rank, ranks) = unsafe { ((*comm).rank, (*comm).size) };
    let own = unsafe { bytes(from, len * size * ranks) };
    let finish = move |parts: Vec<Vec<u8>>| unsafe {
        write(
            to,
            &reduced(&parts, dtype, op)[rank * len * size..][..len * size],
        );
    };
    unsafe { put(comm, stream, own, finish) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: u64,
    to: u64,
    len: usize,
    _: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    unsafe {
        put(comm, stream, bytes(from, len), move |parts| {
            write(to, &parts.concat())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    len: usize,
    _: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    unsafe {
        put(comm, stream, bytes(from, len), move |parts| {
            write(to, &parts[root as usize])
        })
    }
}

fn post(
    peer: c_int,
    start: u64,
    len: usize,
    sends: bool,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    WHERE.set(Some((comm as usize, stream as usize)));
    POSTED.with_borrow_mut(|posted| posted.push((peer as usize, start, len, sends)));
    0
}

#[cfg(not(lacking))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: u64,
    len: usize,
    _: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    post(peer, from, len, true, comm, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: u64,
    len: usize,
    _: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    post(peer, to, len, false, comm, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    POSTED.set(Vec::new());
    0
}

/// Contributes the data for each rank as its length and bytes, in rank order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    let (posted, Some((comm, stream))) = (POSTED.take(), WHERE.take()) else {
        return 5;
    };
    let comm = comm as *mut Comm;
    let (rank, size) = unsafe { ((*comm).rank, (*comm).size) };
    let mut own = Vec::new();
    for peer in 0..size {
        let sent = posted
            .iter()
            .find(|p| p.0 == peer && p.3)
            .map_or(Vec::new(), |p| unsafe { bytes(p.1, p.2) });
        own.extend(sent.len().to_ne_bytes());
        own.extend(sent);
    }
    let finish = move |parts: Vec<Vec<u8>>| {
        for (peer, start, len, _) in posted.iter().filter(|p| !p.3) {
            let mut part = &parts[*peer][..];
            for _ in 0..rank {
                let skip = usize::from_ne_bytes(part[..8].try_into().unwrap());
                part = &part[8 + skip..];
            }
            let came = usize::from_ne_bytes(part[..8].try_into().unwrap());
            assert_eq!(came, *len, "bytes from {peer} to {rank}");
            unsafe { write(*start, &part[8..8 + came]) };
        }
    };
    unsafe { put(comm, stream as *mut c_void, own, finish) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: u32) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    unsafe { *count = if cfg!(bare) { 0 } else { 2 } };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, index: c_int) -> c_int {
    unsafe { *device = index };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _: c_int) -> c_int {
    unsafe { *context = std::ptr::without_provenance_mut(64) };
    0
}

thread_local! {
    static ENTERED: RefCell<bool> = const { RefCell::new(false) };
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    ENTERED.set(!context.is_null());
    0
}

/// Code 201: no context on this thread, as from the real driver.
fn entered() -> c_int {
    if ENTERED.with_borrow(|entered| *entered) {
        0
    } else {
        201
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(start: *mut u64, len: usize) -> c_int {
    unsafe { *start = Box::leak(vec![0_u8; len + 8].into_boxed_slice()).as_mut_ptr() as u64 };
    entered()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(_: u64) -> c_int {
    entered() // leaked: the test is over soon
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, len: usize) -> c_int {
    unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, len) };
    entered()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, len: usize) -> c_int {
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, len) };
    entered()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _: u32) -> c_int {
    let pending: Arc<AtomicUsize> = Arc::default();
    unsafe { *stream = Box::into_raw(Box::new(pending)).cast() };
    entered()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(stream: *mut c_void) -> c_int {
    let pending = unsafe { &*stream.cast::<Arc<AtomicUsize>>() };
    if pending.load(Ordering::SeqCst) > 0 {
        600
    } else {
        entered()
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    drop(unsafe { Box::from_raw(stream.cast::<Arc<AtomicUsize>>()) });
    0
}
