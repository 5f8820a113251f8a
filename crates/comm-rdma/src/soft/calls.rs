//! The functions of the library, with their C types.
//!
//! Every object is a box that begins with its C structure. Callers follow the rules of verbs: an
//! object is used while it lives, and destroyed once, after all objects made with it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::abi::{self, Gid, Sge, Wc};
use super::fabric::{
    DeviceCore, EBUSY, EINVAL, EIO, ENOMEM, EOPNOTSUPP, GatherSegment, PairCore, QueueCore,
    devices, lock, number,
};

unsafe extern "C" {
    #[cfg_attr(target_os = "macos", link_name = "__error")]
    fn __errno_location() -> *mut c_int;
}

fn set_errno(code: c_int) {
    // SAFETY: the C library returns this thread's own variable.
    unsafe { *__errno_location() = code };
}

fn null<T>(code: c_int) -> *mut T {
    set_errno(code);
    ptr::null_mut()
}

#[repr(C)]
struct SoftContext {
    shown: abi::IbvContext,
    device: Arc<DeviceCore>,
}

#[repr(C)]
struct SoftPd {
    shown: abi::IbvPd,
    device: Arc<DeviceCore>,
}

#[repr(C)]
struct SoftMr {
    shown: abi::IbvMr,
    device: Arc<DeviceCore>,
}

#[repr(C)]
struct SoftCq {
    shown: abi::IbvCq,
    core: Arc<QueueCore>,
    device: Arc<DeviceCore>,
}

#[repr(C)]
struct SoftQp {
    shown: abi::IbvQp,
    core: Arc<PairCore>,
}

/// Device lists in use, by address: the array, and its devices.
type Lists = BTreeMap<usize, (Vec<usize>, Vec<Arc<DeviceCore>>)>;
static LISTS: Mutex<Lists> = Mutex::new(BTreeMap::new());

thread_local! {
    /// If set, this thread gets no device list, as without InfiniBand in the kernel.
    pub(crate) static NO_LIST: Cell<bool> = const { Cell::new(false) };
}

const ENOSYS: i32 = 38;

/// Page size: the shortest of all systems.
const PAGE_BYTES: usize = 4 << 10;

/// Boxes an object and counts it.
fn hand_out<T>(device: &DeviceCore, object: T) -> *mut T {
    device.fabric.live.fetch_add(1, Ordering::AcqRel);
    Box::into_raw(Box::new(object))
}

/// Destroys an object.
///
/// # Safety
/// It was made as `T` and is not used any more.
unsafe fn take_back<T>(device: &DeviceCore, object: *mut T) {
    device.fabric.live.fetch_sub(1, Ordering::AcqRel);
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(object) });
}

/// The return value of a destroying function.
fn given_back(device: &DeviceCore, call: &str) -> c_int {
    match device.fabric.is_refused(call) {
        true => EBUSY,
        false => 0,
    }
}

/// An object by the caller's pointer.
///
/// # Safety
/// It was made as `T` and lives.
unsafe fn object<'a, T>(shown: *mut impl Sized) -> &'a T {
    // SAFETY: the caller's promise.
    unsafe { &*shown.cast::<T>() }
}

pub(crate) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut abi::IbvDevice {
    let devices = devices();
    if NO_LIST.get() {
        return null(ENOSYS);
    }
    let mut list: Vec<usize> = devices.iter().map(|d| Arc::as_ptr(d) as usize).collect();
    if !count.is_null() {
        // SAFETY: not null, so it is the caller's variable.
        unsafe { *count = c_int::try_from(list.len()).unwrap_or(c_int::MAX) };
    }
    list.push(0);
    let first = list.as_mut_ptr();
    lock(&LISTS).insert(first as usize, (list, devices));
    first.cast()
}

pub(crate) unsafe extern "C" fn free_device_list(list: *mut *mut abi::IbvDevice) {
    lock(&LISTS).remove(&(list as usize));
}

pub(crate) unsafe extern "C" fn get_device_name(device: *mut abi::IbvDevice) -> *const c_char {
    // SAFETY: the devices of a list are the cores, which the list keeps.
    let device = unsafe { &*device.cast::<DeviceCore>() };
    match device.fabric.is_refused("ibv_get_device_name") {
        true => ptr::null(),
        false => device.name.as_ptr(),
    }
}

pub(crate) unsafe extern "C" fn open_device(device: *mut abi::IbvDevice) -> *mut abi::IbvContext {
    let core = devices()
        .into_iter()
        .find(|core| std::ptr::eq(Arc::as_ptr(core), device.cast()));
    let Some(core) = core else {
        return null(EINVAL);
    };
    if core.fabric.refuses("ibv_open_device") {
        return null(EIO);
    }
    // A second context of one of Apple's devices hangs (ml-explore/mlx #3245).
    if core.contexts.fetch_add(1, Ordering::AcqRel) > 0 {
        core.contexts.fetch_sub(1, Ordering::AcqRel);
        return null(EBUSY);
    }
    let ops = abi::ContextOps {
        before_poll: [None; 11],
        poll_cq: Some(poll_cq),
        before_post: [None; 13],
        post_send: Some(post_send),
        post_recv: Some(post_recv),
        after_post: [None; 5],
    };
    let shown = abi::IbvContext { device, ops };
    let context = SoftContext {
        shown,
        device: Arc::clone(&core),
    };
    hand_out(&core, context).cast()
}

pub(crate) unsafe extern "C" fn close_device(context: *mut abi::IbvContext) -> c_int {
    // SAFETY: the rules of verbs, as in all that follow.
    let device = unsafe { object::<SoftContext>(context) }.device.clone();
    device.contexts.fetch_sub(1, Ordering::AcqRel);
    // SAFETY: likewise.
    unsafe { take_back(&device, context.cast::<SoftContext>()) };
    given_back(&device, "ibv_close_device")
}

pub(crate) unsafe extern "C" fn query_port(
    context: *mut abi::IbvContext,
    port: u8,
    into: *mut abi::PortAttr,
) -> c_int {
    // SAFETY: the rules of verbs.
    let device = &unsafe { object::<SoftContext>(context) }.device;
    if port != 1 || device.fabric.refuses("ibv_query_port") {
        return EINVAL;
    }
    // SAFETY: the caller's structure.
    let into = unsafe { &mut *into };
    (into.state, into.active_mtu) = (abi::PORT_ACTIVE, abi::MTU_1024);
    into.gid_tbl_len = c_int::try_from(device.gids.len()).unwrap_or(c_int::MAX);
    into.link_layer = abi::LINK_LAYER_ETHERNET;
    (into.active_width, into.active_speed) = (1, 32); // one lane of 25 Gbit/s
    0
}

pub(crate) unsafe extern "C" fn query_gid(
    context: *mut abi::IbvContext,
    port: u8,
    index: c_int,
    into: *mut Gid,
) -> c_int {
    // SAFETY: the rules of verbs.
    let device = &unsafe { object::<SoftContext>(context) }.device;
    let gid = usize::try_from(index)
        .ok()
        .and_then(|index| device.gids.get(index));
    match gid {
        Some(gid) if port == 1 && !device.fabric.refuses("ibv_query_gid") => {
            // SAFETY: the caller's variable.
            unsafe { *into = *gid };
            0
        }
        _ => {
            set_errno(EINVAL);
            -1
        }
    }
}

pub(crate) unsafe extern "C" fn alloc_pd(context: *mut abi::IbvContext) -> *mut abi::IbvPd {
    // SAFETY: the rules of verbs.
    let device = unsafe { object::<SoftContext>(context) }.device.clone();
    if device.fabric.refuses("ibv_alloc_pd") {
        return null(ENOMEM);
    }
    let shown = abi::IbvPd {
        context,
        handle: number(),
    };
    let pd = SoftPd {
        shown,
        device: device.clone(),
    };
    hand_out(&device, pd).cast()
}

pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut abi::IbvPd) -> c_int {
    // SAFETY: the rules of verbs.
    let device = unsafe { object::<SoftPd>(pd) }.device.clone();
    // SAFETY: likewise.
    unsafe { take_back(&device, pd.cast::<SoftPd>()) };
    given_back(&device, "ibv_dealloc_pd")
}

pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut abi::IbvPd,
    start: *mut c_void,
    bytes: usize,
    access: c_int,
) -> *mut abi::IbvMr {
    // SAFETY: the rules of verbs.
    let (device, context) = unsafe { (object::<SoftPd>(pd).device.clone(), (*pd).context) };
    let mut regions = device
        .regions
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    if device.fabric.refuses("ibv_reg_mr") || regions.len() >= device.fabric.caps.regions {
        return null(ENOMEM);
    }
    let whole = (start as usize).is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES);
    let usable = whole || !device.fabric.caps.pages;
    if bytes == 0 || access & abi::ACCESS_LOCAL_WRITE == 0 || !usable {
        return null(EINVAL);
    }
    let key = number();
    regions.insert(key, (start as u64, bytes as u64));
    drop(regions);
    let shown = abi::IbvMr {
        context,
        pd,
        addr: start,
        length: bytes,
        handle: key,
        lkey: key,
        rkey: key,
    };
    let mr = SoftMr {
        shown,
        device: device.clone(),
    };
    hand_out(&device, mr).cast()
}

pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut abi::IbvMr) -> c_int {
    // SAFETY: the rules of verbs.
    let (device, key) = unsafe { (object::<SoftMr>(mr).device.clone(), (*mr).lkey) };
    let mut regions = device
        .regions
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    regions.remove(&key);
    drop(regions);
    // SAFETY: the rules of verbs.
    unsafe { take_back(&device, mr.cast::<SoftMr>()) };
    given_back(&device, "ibv_dereg_mr")
}

pub(crate) unsafe extern "C" fn create_cq(
    context: *mut abi::IbvContext,
    length: c_int,
    cq_context: *mut c_void,
    channel: *mut c_void,
    _vector: c_int,
) -> *mut abi::IbvCq {
    // SAFETY: the rules of verbs.
    let device = unsafe { object::<SoftContext>(context) }.device.clone();
    let room = usize::try_from(length).unwrap_or(0);
    if device.fabric.refuses("ibv_create_cq") || room == 0 || !channel.is_null() {
        return null(EINVAL);
    }
    let shown = abi::IbvCq {
        context,
        channel,
        cq_context,
        handle: number(),
        cqe: length,
    };
    let core = Arc::new(QueueCore::new(room));
    let cq = SoftCq {
        shown,
        core,
        device: device.clone(),
    };
    hand_out(&device, cq).cast()
}

pub(crate) unsafe extern "C" fn destroy_cq(cq: *mut abi::IbvCq) -> c_int {
    // SAFETY: the rules of verbs.
    let device = unsafe { object::<SoftCq>(cq) }.device.clone();
    // SAFETY: likewise.
    unsafe { take_back(&device, cq.cast::<SoftCq>()) };
    given_back(&device, "ibv_destroy_cq")
}

unsafe extern "C" fn poll_cq(cq: *mut abi::IbvCq, count: c_int, into: *mut Wc) -> c_int {
    // SAFETY: the rules of verbs.
    let cq = unsafe { object::<SoftCq>(cq) };
    let core = &cq.core;
    if cq.device.fabric.is_refused("ibv_poll_cq") {
        return -1;
    }
    let Ok(count) = usize::try_from(count) else {
        return -1;
    };
    // SAFETY: the caller's array has room for `count`.
    core.poll(unsafe { std::slice::from_raw_parts_mut(into, count) })
}

pub(crate) unsafe extern "C" fn create_qp(
    pd: *mut abi::IbvPd,
    wanted: *mut abi::QpInitAttr,
) -> *mut abi::IbvQp {
    // SAFETY: the rules of verbs; the structure is the caller's.
    let (device, wanted) = unsafe { (object::<SoftPd>(pd).device.clone(), &mut *wanted) };
    let (caps, cap) = (device.fabric.caps, wanted.cap);
    if device.fabric.refuses("ibv_create_qp") {
        return null(ENOMEM);
    }
    if wanted.qp_type != abi::QPT_UC {
        return null(EOPNOTSUPP);
    }
    let most = cap.max_send_wr.max(cap.max_recv_wr);
    if most > caps.requests || cap.max_send_sge.max(cap.max_recv_sge) > caps.gathers {
        return null(EINVAL);
    }
    if device.pairs.load(Ordering::Acquire) >= caps.pairs {
        return null(EBUSY);
    }
    // SAFETY: the rules of verbs.
    let queues =
        [wanted.send_cq, wanted.recv_cq].map(|cq| unsafe { object::<SoftCq>(cq) }.core.clone());
    let [send_queue, recv_queue] = queues;
    let requests = [cap.max_send_wr, cap.max_recv_wr];
    let core = Arc::new(PairCore::new(&device, send_queue, recv_queue, requests));
    device.pairs.fetch_add(1, Ordering::AcqRel);
    device.fabric.add(&core);
    let shown = abi::IbvQp {
        // SAFETY: the domain lives.
        context: unsafe { (*pd).context },
        qp_context: wanted.qp_context,
        pd,
        send_cq: wanted.send_cq,
        recv_cq: wanted.recv_cq,
        srq: ptr::null_mut(),
        handle: core.number,
        qp_num: core.number,
        state: 0,
        qp_type: wanted.qp_type,
    };
    hand_out(&device, SoftQp { shown, core }).cast()
}

pub(crate) unsafe extern "C" fn destroy_qp(qp: *mut abi::IbvQp) -> c_int {
    // SAFETY: the rules of verbs.
    let core = unsafe { object::<SoftQp>(qp) }.core.clone();
    core.device.fabric.remove(core.number);
    core.device.pairs.fetch_sub(1, Ordering::AcqRel);
    core.end();
    // SAFETY: the rules of verbs.
    unsafe { take_back(&core.device, qp.cast::<SoftQp>()) };
    given_back(&core.device, "ibv_destroy_qp")
}

pub(crate) unsafe extern "C" fn modify_qp(
    qp: *mut abi::IbvQp,
    to: *mut abi::QpAttr,
    mask: c_int,
) -> c_int {
    // SAFETY: the rules of verbs; the structure is the caller's.
    let (core, to) = unsafe { (&object::<SoftQp>(qp).core, &*to) };
    if core.device.fabric.refuses("ibv_modify_qp") || mask & abi::QP_STATE == 0 {
        return EINVAL;
    }
    // Attributes required by each change of state, from the table in ibv_modify_qp(3).
    let (from, needed) = match to.qp_state {
        abi::QPS_INIT => (0, abi::QP_PKEY_INDEX | abi::QP_PORT | abi::QP_ACCESS_FLAGS),
        abi::QPS_RTR => (
            abi::QPS_INIT,
            abi::QP_AV | abi::QP_PATH_MTU | abi::QP_DEST_QPN | abi::QP_RQ_PSN,
        ),
        abi::QPS_RTS => (abi::QPS_RTR, abi::QP_SQ_PSN),
        abi::QPS_ERR => {
            core.fail();
            return 0;
        }
        _ => return EINVAL,
    };
    let grh = &to.ah_attr.grh;
    let own = usize::from(grh.sgid_index) == core.device.address_at;
    let route = to.ah_attr.is_global == 1 && own && grh.hop_limit > 0;
    let fits = match to.qp_state {
        abi::QPS_INIT => to.port_num == 1,
        abi::QPS_RTR => route && to.path_mtu == abi::MTU_1024 && to.ah_attr.port_num == 1,
        _ => true,
    };
    let known = core.state.load(Ordering::Acquire);
    if mask != needed | abi::QP_STATE || known != from || !fits {
        return EINVAL;
    }
    if to.qp_state == abi::QPS_RTR {
        core.connect(grh.dgid, to.dest_qp_num);
    }
    core.state.store(to.qp_state, Ordering::Release);
    0
}

/// The memory of a segment, if it is registered.
fn registered(device: &DeviceCore, piece: &Sge) -> Option<GatherSegment> {
    let regions = device
        .regions
        .read()
        .unwrap_or_else(PoisonError::into_inner);
    let (start, bytes) = *regions.get(&piece.lkey)?;
    let end = piece.addr.checked_add(piece.length.into())?;
    let within = piece.addr >= start && end <= start + bytes;
    within.then(|| GatherSegment {
        start: ptr::with_exposed_provenance(usize::try_from(piece.addr).unwrap_or(0)),
        bytes: piece.length as usize,
    })
}

/// The segments of a request.
///
/// # Safety
/// `first` points to `count` of them.
unsafe fn pieces<'a>(first: *mut Sge, count: c_int) -> &'a [Sge] {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(first, count) }
}

unsafe extern "C" fn post_send(
    qp: *mut abi::IbvQp,
    request: *mut abi::SendWr,
    bad: *mut *mut abi::SendWr,
) -> c_int {
    // SAFETY: the rules of verbs; the request is the caller's.
    let (core, wr) = unsafe { (&object::<SoftQp>(qp).core, &*request) };
    // SAFETY: the rules of verbs.
    let list = unsafe { pieces(wr.sg_list, wr.num_sge) };
    let mut memory = [GatherSegment {
        start: ptr::null(),
        bytes: 0,
    }; 2];
    let usable = wr.opcode == abi::WR_SEND
        && wr.next.is_null()
        && wr.send_flags & abi::SEND_SIGNALED != 0
        && (1..=memory.len()).contains(&list.len());
    let refused = core.device.fabric.is_refused("ibv_post_send");
    let mut result = if usable && !refused {
        Ok(())
    } else {
        Err(EINVAL)
    };
    for (piece, slot) in list.iter().zip(&mut memory) {
        match registered(&core.device, piece) {
            Some(piece) => *slot = piece,
            None => result = Err(EINVAL),
        }
    }
    let result = result.and_then(|()| core.post_send(wr.wr_id, &memory[..list.len()]));
    result.map_or_else(
        |code| {
            // SAFETY: the caller's variable.
            unsafe { *bad = request };
            code
        },
        |()| 0,
    )
}

unsafe extern "C" fn post_recv(
    qp: *mut abi::IbvQp,
    request: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
) -> c_int {
    // SAFETY: the rules of verbs; the request is the caller's.
    let (core, wr) = unsafe { (&object::<SoftQp>(qp).core, &*request) };
    // SAFETY: the rules of verbs.
    let list = unsafe { pieces(wr.sg_list, wr.num_sge) };
    let refused = core.device.fabric.is_refused("ibv_post_recv");
    let memory = match list {
        [_] | [_, _] if !refused && wr.next.is_null() => list
            .iter()
            .map(|piece| registered(&core.device, piece))
            .collect(),
        _ => None,
    };
    let posted = memory
        .ok_or(EINVAL)
        .and_then(|memory| core.post_receive(wr.wr_id, memory));
    posted.map_or_else(
        |code| {
            // SAFETY: the caller's variable.
            unsafe { *bad = request };
            code
        },
        |()| 0,
    )
}
