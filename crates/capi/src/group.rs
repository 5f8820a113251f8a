//! Groups of ranks for C: the collectives of `paceline_comm`.

use std::ffi::c_char;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::tcp::{Config, GroupId, GroupKey, Listener, Protection};
use paceline_comm::{
    Backend, Collective, Data, DataMut, Deadline, Dtype, ElementCounts, Group, JoinParams, Reduce,
    Strict, init,
};

use crate::status::{PacelineStatus, StatusError, guarded, text};

/// Longest deadline in seconds: a year means "for ever".
const SECONDS_MAX: f64 = 3.2e7;

/// A rank's handle to a group.
#[derive(Debug)]
pub struct PacelineGroup(Box<dyn Group>);

/// Type of elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacelineDtype {
    /// 8 bits, unsigned.
    U8 = 0,
    /// 32 bits, signed.
    I32 = 1,
    /// 64 bits, signed.
    I64 = 2,
    /// IEEE half precision.
    F16 = 3,
    /// bfloat16.
    Bf16 = 4,
    /// IEEE single precision.
    F32 = 5,
    /// IEEE double precision.
    F64 = 6,
}

/// Decodes an element type; C may pass any number.
fn element(number: u32) -> Result<Dtype, StatusError> {
    use PacelineDtype as Named;
    let all = [
        (Named::U8 as u32, Dtype::U8),
        (Named::I32 as u32, Dtype::I32),
        (Named::I64 as u32, Dtype::I64),
        (Named::F16 as u32, Dtype::F16),
        (Named::Bf16 as u32, Dtype::Bf16),
        (Named::F32 as u32, Dtype::F32),
        (Named::F64 as u32, Dtype::F64),
    ];
    meant(&all, number, "PacelineDtype")
}

/// Looks up `number` in the enumeration `name`.
fn meant<T: Copy>(all: &[(u32, T)], number: u32, name: &str) -> Result<T, StatusError> {
    let found = all.iter().find(|(named, _)| *named == number);
    let found = found.map(|(_, value)| *value);
    found.ok_or_else(|| StatusError::invalid(format!("no {name} is {number}")))
}

/// How the elements of all ranks are combined.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacelineReduce {
    /// Their sum.
    Sum = 0,
    /// The largest.
    Max = 1,
    /// The smallest.
    Min = 2,
    /// Their product.
    Product = 3,
}

/// Decodes a reduction; C may pass any number.
fn reduction(number: u32) -> Result<Reduce, StatusError> {
    use PacelineReduce as Named;
    let all = [
        (Named::Sum as u32, Reduce::Sum),
        (Named::Max as u32, Reduce::Max),
        (Named::Min as u32, Reduce::Min),
        (Named::Product as u32, Reduce::Prod),
    ];
    meant(&all, number, "PacelineReduce")
}

/// Joins the ranks at `addrs`, `size` strings `host:port` in rank order: by shared memory on one
/// machine, else by TCP. Collective: returns when all ranks have joined, or after `seconds`.
/// This rank listens at `addrs[rank]`.
///
/// `key` is null or 32 bytes, the same on all ranks; without it all addresses must be loopback.
/// `*out` receives the group, which `paceline_group_free` releases.
///
/// # Safety
/// `addrs` points to `size` strings, `key` to 32 bytes if it is not null, `out` to a writable
/// pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_group_join(
    rank: u32,
    size: u32,
    addrs: *const *const c_char,
    key: *const u8,
    seconds: f64,
    out: *mut *mut PacelineGroup,
) -> PacelineStatus {
    guarded(|| {
        if addrs.is_null() || out.is_null() {
            return Err(StatusError::invalid("addrs or out is null"));
        }
        let addrs: Vec<SocketAddr> = (0..size as usize)
            .map(|at| {
                // SAFETY: the caller's promise: `size` texts.
                let addr = unsafe { text(*addrs.add(at), "an address") }?;
                resolve(addr)
            })
            .collect::<Result<_, _>>()?;
        // SAFETY: the caller's promise.
        let key = (!key.is_null()).then(|| unsafe { *key.cast::<[u8; 32]>() });
        let group = join(rank, &addrs, key, deadline(seconds)?)?;
        // SAFETY: not null, and the caller's promise.
        unsafe { *out = Box::into_raw(Box::new(PacelineGroup(group))) };
        Ok(())
    })
}

fn join(
    rank: u32,
    addrs: &[SocketAddr],
    key: Option<[u8; 32]>,
    by: Deadline,
) -> Result<Box<dyn Group>, StatusError> {
    let size = addrs.len();
    let Some(own) = addrs.get(rank as usize) else {
        return Err(StatusError::invalid(format!(
            "rank {rank} is not below the size {size}"
        )));
    };
    let listener = Listener::bind(*own);
    let listener =
        listener.map_err(|error| StatusError::other(format!("listen at {own}: {error}")))?;
    let config = Config {
        protection: key.map_or(Protection::Loopback, |key| {
            Protection::Key(GroupKey::new(key))
        }),
        ..Config::default()
    };
    let addrs: Vec<Vec<SocketAddr>> = addrs.iter().map(|addr| vec![*addr]).collect();
    let seat = JoinParams {
        listener,
        rank: Rank(rank),
        addrs: &addrs,
        id: GroupId(*b"paceline's C API"),
        config,
    };
    init(Backend::Any, Strict::Yes, seat, &[], by).map_err(StatusError::other)
}

fn resolve(addr: &str) -> Result<SocketAddr, StatusError> {
    paceline_comm::resolve(addr)
        .map_err(|why| StatusError::invalid(format!("cannot use address {addr:?}: {why}")))
}

fn deadline(seconds: f64) -> Result<Deadline, StatusError> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(StatusError::invalid(format!(
            "the deadline is {seconds} s, expected 0 or more"
        )));
    }
    Ok(Deadline::at(
        Instant::now() + Duration::from_secs_f64(seconds.min(SECONDS_MAX)),
    ))
}

/// This rank's number; `UINT32_MAX` for a null pointer.
///
/// # Safety
/// `group` is null or a group that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_group_rank(group: *const PacelineGroup) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { group.as_ref() }.map_or(u32::MAX, |group| group.0.rank().0)
}

/// Number of ranks; 0 for a null pointer.
///
/// # Safety
/// `group` is null or a group that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_group_size(group: *const PacelineGroup) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { group.as_ref() }.map_or(0, |group| group.0.size())
}

/// Leaves the group: other ranks' calls fail from now on. Null is allowed.
///
/// # Safety
/// `group` is null or a group that was not freed and that no other thread uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_group_free(group: *mut PacelineGroup) {
    if !group.is_null() {
        // SAFETY: the caller's promise; it came from a box.
        let group = unsafe { Box::from_raw(group) };
        guarded(|| {
            drop(group);
            Ok(())
        });
    }
}

/// Runs a collective on a group.
///
/// # Safety
/// `group` is null or a group that was not freed.
unsafe fn call<'a>(
    group: *const PacelineGroup,
    seconds: f64,
    make: impl FnOnce(&dyn Group) -> Result<Collective<'a>, StatusError>,
) -> PacelineStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let group =
            unsafe { group.as_ref() }.ok_or_else(|| StatusError::invalid("the group is null"))?;
        let by = deadline(seconds)?;
        Ok(group.0.run(make(&*group.0)?, by)?)
    })
}

/// Bytes of `count` elements at a pointer of C.
///
/// # Safety
/// `data` points to that many bytes, which nothing else changes as long as the slice lives.
unsafe fn bytes<'a>(data: *const u8, count: usize, dtype: Dtype) -> Result<&'a [u8], StatusError> {
    let length = length(data, count, dtype)?;
    match length {
        0 => Ok(&[]),
        // SAFETY: the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts(data, length) }),
    }
}

/// As [`bytes`], to write to.
///
/// # Safety
/// `data` points to that many bytes, which nothing else uses as long as the slice lives.
unsafe fn bytes_mut<'a>(
    data: *mut u8,
    count: usize,
    dtype: Dtype,
) -> Result<&'a mut [u8], StatusError> {
    let length = length(data, count, dtype)?;
    match length {
        0 => Ok(&mut []),
        // SAFETY: the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(data, length) }),
    }
}

fn length(data: *const u8, count: usize, dtype: Dtype) -> Result<usize, StatusError> {
    let length = count
        .checked_mul(dtype.bytes())
        .filter(|length| isize::try_from(*length).is_ok());
    let length =
        length.ok_or_else(|| StatusError::invalid(format!("{count} elements are too many")))?;
    if data.is_null() && length > 0 {
        return Err(StatusError::invalid("a buffer is null"));
    }
    if !data.addr().is_multiple_of(dtype.bytes()) {
        let text = format!(
            "a buffer of {dtype} is not aligned to {} bytes",
            dtype.bytes()
        );
        return Err(StatusError::invalid(text));
    }
    Ok(length)
}

/// Returns when all ranks have called it. Collective.
///
/// # Safety
/// `group` is a group that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_barrier(
    group: *const PacelineGroup,
    seconds: f64,
) -> PacelineStatus {
    // SAFETY: the caller's promise.
    unsafe { call(group, seconds, |_| Ok(Collective::Barrier)) }
}

/// Reduces `count` elements at `data` over all ranks, in place: all ranks get the same bits.
/// Collective.
///
/// # Safety
/// `group` is a group that was not freed; `data` points to `count` elements that nothing else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_all_reduce(
    group: *const PacelineGroup,
    data: *mut u8,
    count: usize,
    dtype: u32,
    op: u32,
    seconds: f64,
) -> PacelineStatus {
    // SAFETY: the caller's promises.
    unsafe {
        call(group, seconds, |_| {
            let dtype = element(dtype)?;
            let data = DataMut::of_bytes(dtype, bytes_mut(data, count, dtype)?);
            let op = reduction(op)?;
            Ok(Collective::AllReduce { data, op })
        })
    }
}

/// Gathers `count` elements of every rank into `output`, which has room for `size * count`, in rank
/// order. Collective.
///
/// # Safety
/// `group` is a group that was not freed; `input` points to `count` elements, `output` to its room,
/// and they do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_all_gather(
    group: *const PacelineGroup,
    input: *const u8,
    output: *mut u8,
    count: usize,
    dtype: u32,
    seconds: f64,
) -> PacelineStatus {
    // SAFETY: the caller's promises.
    unsafe {
        call(group, seconds, |group| {
            let dtype = element(dtype)?;
            let all = count.saturating_mul(group.size() as usize);
            Ok(Collective::AllGather {
                counts: ElementCounts::Even(count),
                input: Some(Data::of_bytes(dtype, bytes(input, count, dtype)?)),
                output: DataMut::of_bytes(dtype, bytes_mut(output, all, dtype)?),
            })
        })
    }
}

/// Overwrites `count` elements at `data` with those of rank `root`. Collective.
///
/// # Safety
/// `group` is a group that was not freed; `data` points to `count` elements that nothing else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_broadcast(
    group: *const PacelineGroup,
    data: *mut u8,
    count: usize,
    dtype: u32,
    root: u32,
    seconds: f64,
) -> PacelineStatus {
    // SAFETY: the caller's promises.
    unsafe {
        call(group, seconds, |_| {
            let dtype = element(dtype)?;
            let data = DataMut::of_bytes(dtype, bytes_mut(data, count, dtype)?);
            Ok(Collective::Broadcast {
                data,
                root: Rank(root),
            })
        })
    }
}

/// Sends `count` elements to rank `to`; `tag` distinguishes messages. `data` may be reused when it
/// returns.
///
/// # Safety
/// `group` is a group that was not freed; `data` points to `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_send(
    group: *const PacelineGroup,
    data: *const u8,
    count: usize,
    dtype: u32,
    to: u32,
    tag: u32,
    seconds: f64,
) -> PacelineStatus {
    guarded(|| {
        let dtype = element(dtype)?;
        // SAFETY: the caller's promise.
        let group =
            unsafe { group.as_ref() }.ok_or_else(|| StatusError::invalid("the group is null"))?;
        // SAFETY: the caller's promise.
        let data = Data::of_bytes(dtype, unsafe { bytes(data, count, dtype) }?);
        Ok(group.0.send_data(data, Rank(to), tag, deadline(seconds)?)?)
    })
}

/// Receives `count` elements from rank `from`, sent with the same `tag`.
///
/// # Safety
/// `group` is a group that was not freed; `data` points to `count` elements that nothing else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_recv(
    group: *const PacelineGroup,
    data: *mut u8,
    count: usize,
    dtype: u32,
    from: u32,
    tag: u32,
    seconds: f64,
) -> PacelineStatus {
    guarded(|| {
        let dtype = element(dtype)?;
        // SAFETY: the caller's promise.
        let group =
            unsafe { group.as_ref() }.ok_or_else(|| StatusError::invalid("the group is null"))?;
        // SAFETY: the caller's promise.
        let data = DataMut::of_bytes(dtype, unsafe { bytes_mut(data, count, dtype) }?);
        Ok(group
            .0
            .recv_data(data, Rank(from), tag, deadline(seconds)?)?)
    })
}
