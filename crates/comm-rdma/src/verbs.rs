//! The verbs library, opened at run time, and owners of its objects, which destroy them on drop.
//!
//! - [`RdmaAdapter`]: an open device with its one protection domain;
//! - [`MemoryRegion`]: registered memory;
//! - [`CompletionQueue`]: a completion queue;
//! - [`QueuePair`]: a queue pair of an unreliable connection (UC).
//!
//! Nothing here blocks.

use std::ffi::{CStr, c_int, c_void};
use std::net::Ipv4Addr;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::abi::{self, Gid, Sge, VerbsTable, Wc};
use super::error::RdmaError;
use super::limits::DeviceLimits;

/// File name of the library that the system looks for.
pub const LIBRARY: &str = if cfg!(target_os = "macos") {
    "librdma.dylib"
} else {
    "libibverbs.so.1"
};

/// The only port used, as by JACCL: Apple's devices have no other.
const PORT: u8 = 1;

/// Access rights of registered memory. JACCL registers with all three; sends and receives need the
/// first.
const ACCESS: c_int = abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_WRITE;

/// First packet number in either direction. It must only be the same on both sides; JACCL uses 7.
const FIRST_PACKET: u32 = 7;

/// Hop limit of a packet. JACCL: 1, a cable. Routed networks are out of scope.
const HOPS: u8 = 1;

/// A verbs library.
#[derive(Clone, derive_more::Debug)]
#[debug("verbs, limited to {limits:?}")]
pub struct Verbs {
    pub(super) table: VerbsTable,
    /// Limits on queue pairs, regions and requests.
    pub limits: DeviceLimits,
}

impl Verbs {
    /// Opens the system's library.
    ///
    /// # Errors
    /// [`RdmaError::Library`] or [`RdmaError::Symbol`].
    pub fn load() -> Result<Self, RdmaError> {
        Self::load_from(LIBRARY)
    }

    /// Opens the library of this name or path. It stays open until the process ends: drivers may
    /// not survive unloading.
    pub fn load_from(name: &str) -> Result<Self, RdmaError> {
        // SAFETY: runs the initialisers of a library that the caller names, by default the system's
        // own; nothing else of this process depends on them.
        let library = unsafe { libloading::Library::new(name) }.map_err(|source| {
            let name = name.to_string();
            RdmaError::Library { name, source }
        })?;
        let table = table_of(&library, name)?;
        std::mem::forget(library);
        Ok(Self {
            table,
            limits: DeviceLimits::of_this_system(),
        })
    }

    /// Names of all devices.
    pub fn devices(&self) -> Result<Vec<String>, RdmaError> {
        DeviceList::get(self).map(|list| list.names())
    }

    /// The ports of all devices. Opens each device for a moment.
    pub fn ports(&self) -> Result<Vec<DevicePort>, RdmaError> {
        let devices = self.devices()?.into_iter();
        Ok(devices.map(|name| DevicePort::of(self, name)).collect())
    }
}

/// The port of a device, as its driver describes it.
#[derive(Debug)]
pub struct DevicePort {
    /// The device's name.
    pub device: String,
    /// The IPv4 address by which peers reach it; `None` if it is unusable, or addressed by LID.
    pub address: Option<Ipv4Addr>,
    /// Its rate in Gbit/s, if the driver reports one.
    pub gbit_per_s: Option<f64>,
    /// Why it is unusable, if it is.
    pub problem: Option<RdmaError>,
}

impl DevicePort {
    fn of(verbs: &Verbs, device: String) -> Self {
        let described = OpenContext::open(verbs, &device).and_then(|opened| {
            let port = opened.port()?;
            let (_, gid) = opened.address(&port)?;
            Ok((gid, rate(port.active_width, port.active_speed)))
        });
        match described {
            Ok((Gid(gid), gbit_per_s)) => Self {
                device,
                address: is_ipv4(Gid(gid)).then(|| [gid[12], gid[13], gid[14], gid[15]].into()),
                gbit_per_s,
                problem: None,
            },
            Err(problem) => Self {
                device,
                address: None,
                gbit_per_s: None,
                problem: Some(problem),
            },
        }
    }
}

/// Gbit/s by the codes of `enum ibv_port_width` and `ibv_port_speed` (verbs.h).
fn rate(width: u8, speed: u8) -> Option<f64> {
    let lanes = match width {
        1 => 1.0,
        2 => 4.0,
        4 => 8.0,
        8 => 12.0,
        16 => 2.0,
        _ => return None,
    };
    let lane = match speed {
        1 => 2.5,
        2 => 5.0,
        4 | 8 => 10.0,
        16 => 14.0,
        32 => 25.0,
        64 => 50.0,
        128 => 100.0,
        _ => return None,
    };
    Some(lanes * lane)
}

/// All functions, by their names without the prefix.
fn table_of(library: &libloading::Library, name: &str) -> Result<VerbsTable, RdmaError> {
    macro_rules! table {
        ($($field:ident: $symbol:literal),* $(,)?) => {
            VerbsTable { $($field: {
                let missing = |_| RdmaError::Symbol { library: name.to_string(), symbol: $symbol };
                // SAFETY: a function of this name has this signature in every verbs library; the
                // library is never closed, so the pointer stays valid.
                *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(missing)?
            }),* }
        };
    }
    Ok(table! {
        get_device_list: "ibv_get_device_list",
        free_device_list: "ibv_free_device_list",
        get_device_name: "ibv_get_device_name",
        open_device: "ibv_open_device",
        close_device: "ibv_close_device",
        alloc_pd: "ibv_alloc_pd",
        dealloc_pd: "ibv_dealloc_pd",
        create_cq: "ibv_create_cq",
        destroy_cq: "ibv_destroy_cq",
        create_qp: "ibv_create_qp",
        destroy_qp: "ibv_destroy_qp",
        query_port: "ibv_query_port",
        query_gid: "ibv_query_gid",
        modify_qp: "ibv_modify_qp",
        reg_mr: "ibv_reg_mr",
        dereg_mr: "ibv_dereg_mr",
    })
}

/// The list of devices, freed on drop.
struct DeviceList<'a> {
    verbs: &'a Verbs,
    first: NonNull<*mut abi::IbvDevice>,
}

impl<'a> DeviceList<'a> {
    fn get(verbs: &'a Verbs) -> Result<Self, RdmaError> {
        // SAFETY: a null count is allowed: the list ends with a null pointer.
        let first = unsafe { (verbs.table.get_device_list)(ptr::null_mut()) };
        let none = || RdmaError::NoList {
            source: std::io::Error::last_os_error(),
        };
        let first = NonNull::new(first).ok_or_else(none)?;
        Ok(Self { verbs, first })
    }

    fn iter(&self) -> impl Iterator<Item = (*mut abi::IbvDevice, String)> {
        let entry = |index| {
            // SAFETY: the list ends with a null entry, and reading ends there.
            let device = unsafe { *self.first.as_ptr().add(index) };
            (!device.is_null()).then_some(device)
        };
        (0..).map_while(entry).map(|device| {
            // SAFETY: the device is of this list, which owns the name; it is copied at once.
            let name = unsafe { (self.verbs.table.get_device_name)(device) };
            let name = match name.is_null() {
                true => String::new(),
                // SAFETY: not null, and a C string by the library's contract.
                false => unsafe { CStr::from_ptr(name) }
                    .to_string_lossy()
                    .into_owned(),
            };
            (device, name)
        })
    }

    fn names(&self) -> Vec<String> {
        self.iter().map(|(_, name)| name).collect()
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: the list came from this library and is freed once.
        unsafe { (self.verbs.table.free_device_list)(self.first.as_ptr()) };
    }
}

/// An open device and its address.
#[derive(derive_more::Debug)]
#[debug("device {}", self.name())]
pub(crate) struct RdmaAdapter {
    opened: OpenContext,
    domain: NonNull<abi::IbvPd>,
    gid_index: u8,
    gid: Gid,
    lid: u16,
    limits: DeviceLimits,
    regions: AtomicUsize,
    pairs: AtomicUsize,
}

/// A context, closed on drop.
struct OpenContext {
    table: VerbsTable,
    name: String,
    context: NonNull<abi::IbvContext>,
}

// SAFETY: verbs objects may be used from any thread, and by several at once; the library locks.
unsafe impl Send for OpenContext {}
// SAFETY: as for `Send`.
unsafe impl Sync for OpenContext {}
// SAFETY: the domain is usable from any thread, like its context.
unsafe impl Send for RdmaAdapter {}
// SAFETY: as for `Send`.
unsafe impl Sync for RdmaAdapter {}

impl Drop for OpenContext {
    fn drop(&mut self) {
        // SAFETY: opened by this library, closed once, after everything made with it. A failure
        // leaks a descriptor; nothing can be done about it.
        let _ = unsafe { (self.table.close_device)(self.context.as_ptr()) };
    }
}

impl Drop for RdmaAdapter {
    fn drop(&mut self) {
        // SAFETY: as for the context; regions and pairs hold the adapter, so all were destroyed.
        let _ = unsafe { (self.opened.table.dealloc_pd)(self.domain.as_ptr()) };
    }
}

impl RdmaAdapter {
    /// Opens the device of this name and finds its address.
    pub(crate) fn open(verbs: &Verbs, name: &str) -> Result<Arc<Self>, RdmaError> {
        let opened = OpenContext::open(verbs, name)?;
        let port = opened.port()?;
        let (gid_index, gid) = opened.address(&port)?;
        // SAFETY: the context is open.
        let domain = unsafe { (opened.table.alloc_pd)(opened.context.as_ptr()) };
        let domain = NonNull::new(domain)
            .ok_or_else(|| RdmaError::verb(name, "ibv_alloc_pd", String::new()))?;
        Ok(Arc::new(Self {
            opened,
            domain,
            gid_index,
            gid,
            lid: port.lid,
            limits: verbs.limits,
            regions: AtomicUsize::new(0),
            pairs: AtomicUsize::new(0),
        }))
    }

    pub(crate) fn name(&self) -> &str {
        &self.opened.name
    }

    pub(crate) const fn gid(&self) -> Gid {
        self.gid
    }

    fn table(&self) -> &VerbsTable {
        &self.opened.table
    }

    /// Current number of queue pairs, of all groups.
    pub(crate) fn pairs_made(&self) -> usize {
        self.pairs.load(Ordering::Acquire)
    }

    pub(crate) const fn pairs_most(&self) -> usize {
        self.limits.queue_pairs.0
    }

    /// Counts one more object, of at most `limit`.
    fn count(
        &self,
        places: &AtomicUsize,
        what: &'static str,
        limit: usize,
    ) -> Result<(), RdmaError> {
        let taken = places.fetch_add(1, Ordering::AcqRel);
        if taken < limit {
            return Ok(());
        }
        places.fetch_sub(1, Ordering::AcqRel);
        let (device, wanted) = (self.name().to_string(), taken + 1);
        Err(RdmaError::Limit {
            device,
            what,
            wanted,
            limit,
        })
    }
}

impl OpenContext {
    fn open(verbs: &Verbs, name: &str) -> Result<Self, RdmaError> {
        let list = DeviceList::get(verbs)?;
        let Some((device, _)) = list.iter().find(|(_, n)| n == name) else {
            let (wanted, there) = (name.to_string(), list.names());
            return Err(RdmaError::NoSuchDevice { wanted, there });
        };
        // SAFETY: the device is of a list that is not freed yet.
        let context = unsafe { (verbs.table.open_device)(device) };
        let context = NonNull::new(context)
            .ok_or_else(|| RdmaError::verb(name, "ibv_open_device", String::new()))?;
        let opened = Self {
            table: verbs.table,
            name: name.to_string(),
            context,
        };
        opened.operations()?;
        Ok(opened)
    }

    /// Checks that the context has the functions which the header's inline functions call.
    fn operations(&self) -> Result<(), RdmaError> {
        // SAFETY: the context is open; the library sets its table before it returns it.
        let ops = unsafe { &(*self.context.as_ptr()).ops };
        let there = [
            (ops.post_send.is_some(), "post_send"),
            (ops.post_recv.is_some(), "post_recv"),
            (ops.poll_cq.is_some(), "poll_cq"),
        ];
        let missing = there.iter().find(|(there, _)| !there);
        missing.map_or(Ok(()), |(_, symbol)| {
            let device = self.name.clone();
            Err(RdmaError::Operation { device, symbol })
        })
    }

    fn port(&self) -> Result<abi::PortAttr, RdmaError> {
        let mut port = abi::PortAttr::default();
        // SAFETY: the context is open and the structure at least as long as what is written.
        let code = unsafe { (self.table.query_port)(self.context.as_ptr(), PORT, &mut port) };
        if code != 0 {
            let operands = format!("port {PORT}");
            return Err(RdmaError::code(
                &self.name,
                "ibv_query_port",
                operands,
                code,
            ));
        }
        match port.state {
            abi::PORT_ACTIVE => Ok(port),
            state => Err(RdmaError::PortDown {
                device: self.name.clone(),
                state,
            }),
        }
    }

    /// The first IPv4 address among the GIDs, with its index. A port without Ethernet is addressed
    /// by LID and needs none.
    fn address(&self, port: &abi::PortAttr) -> Result<(u8, Gid), RdmaError> {
        for index in 0..port.gid_tbl_len.min(u8::MAX.into()) {
            let mut gid = Gid::default();
            // SAFETY: as in `port`.
            let code =
                unsafe { (self.table.query_gid)(self.context.as_ptr(), PORT, index, &mut gid) };
            if code != 0 {
                let operands = format!("port {PORT}, index {index}");
                return Err(RdmaError::code(&self.name, "ibv_query_gid", operands, code));
            }
            if is_ipv4(gid) {
                return Ok((u8::try_from(index).unwrap_or(u8::MAX), gid));
            }
        }
        if port.link_layer != abi::LINK_LAYER_ETHERNET && port.lid != 0 {
            return Ok((0, Gid::default()));
        }
        Err(RdmaError::NoAddress {
            device: self.name.clone(),
            entries: port.gid_tbl_len,
        })
    }
}

/// `::ffff:a.b.c.d`
pub(crate) fn is_ipv4(gid: Gid) -> bool {
    gid.0[..10] == [0; 10] && gid.0[10..12] == [0xff; 2]
}

#[derive(derive_more::Debug)]
#[debug("{} bytes on {:?}", self.bytes, self.adapter)]
pub(crate) struct MemoryRegion {
    adapter: Arc<RdmaAdapter>,
    mr: NonNull<abi::IbvMr>,
    start: usize,
    bytes: usize,
}

// SAFETY: as for `OpenContext`.
unsafe impl Send for MemoryRegion {}
// SAFETY: as for `OpenContext`.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers `bytes` bytes from `start` on.
    ///
    /// # Safety
    /// The memory stays mapped while the region lives.
    pub(crate) unsafe fn new(
        adapter: &Arc<RdmaAdapter>,
        start: *mut u8,
        bytes: usize,
    ) -> Result<Self, RdmaError> {
        adapter.count(
            &adapter.regions,
            "memory regions",
            adapter.limits.memory_regions.0,
        )?;
        // SAFETY: the domain lives; the caller vouches for the memory.
        let mr = unsafe {
            (adapter.table().reg_mr)(adapter.domain.as_ptr(), start.cast(), bytes, ACCESS)
        };
        let Some(mr) = NonNull::new(mr) else {
            let operands = format!("{bytes} bytes at {start:p}");
            let error = RdmaError::verb(adapter.name(), "ibv_reg_mr", operands);
            adapter.regions.fetch_sub(1, Ordering::AcqRel);
            return Err(error);
        };
        Ok(Self {
            adapter: Arc::clone(adapter),
            mr,
            start: start as usize,
            bytes,
        })
    }

    pub(crate) fn adapter(&self) -> &Arc<RdmaAdapter> {
        &self.adapter
    }

    /// The local key for work requests.
    pub(crate) fn key(&self) -> u32 {
        // SAFETY: the region is registered.
        unsafe { (*self.mr.as_ptr()).lkey }
    }

    /// Whether the region contains these bytes.
    pub(crate) fn holds(&self, start: usize, bytes: usize) -> bool {
        start >= self.start && start + bytes <= self.start + self.bytes
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered with this library, deregistered once.
        let _ = unsafe { (self.adapter.table().dereg_mr)(self.mr.as_ptr()) };
        self.adapter.regions.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(crate) struct CompletionQueue {
    adapter: Arc<RdmaAdapter>,
    cq: NonNull<abi::IbvCq>,
    poll: unsafe extern "C" fn(*mut abi::IbvCq, c_int, *mut Wc) -> c_int,
}

// SAFETY: as for `OpenContext`.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    /// A queue for this many completions.
    pub(crate) fn new(adapter: &Arc<RdmaAdapter>, length: c_int) -> Result<Self, RdmaError> {
        let context = adapter.opened.context.as_ptr();
        let (none, vector) = (ptr::null_mut::<c_void>(), 0);
        // SAFETY: the context is open; the queue has no user value and no channel.
        let cq = unsafe { (adapter.table().create_cq)(context, length, none, none, vector) };
        let operands = || format!("{length} entries");
        let cq = NonNull::new(cq)
            .ok_or_else(|| RdmaError::verb(adapter.name(), "ibv_create_cq", operands()))?;
        // SAFETY: the context is open.
        let poll = unsafe { (*context).ops.poll_cq };
        Ok(Self {
            adapter: Arc::clone(adapter),
            cq,
            poll: poll.expect("looked at when the device was opened"),
        })
    }

    /// Polls completions; returns their number.
    pub(crate) fn poll(&self, into: &mut [Wc]) -> Result<usize, RdmaError> {
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue lives and the array has room for that many.
        let count = unsafe { (self.poll)(self.cq.as_ptr(), most, into.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) if count <= into.len() => Ok(count),
            _ => {
                let (name, operands) = (self.adapter.name(), format!("{most} entries"));
                Err(RdmaError::code(name, "ibv_poll_cq", operands, count))
            }
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once; its pair was destroyed before.
        let _ = unsafe { (self.adapter.table().destroy_cq)(self.cq.as_ptr()) };
    }
}

/// The address of a queue pair: what JACCL exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) lid: u16,
    pub(crate) pair: u32,
    pub(crate) packet: u32,
    pub(crate) gid: Gid,
}

/// A queue pair of kind UC, with its completion queue.
pub(crate) struct QueuePair {
    qp: NonNull<abi::IbvQp>,
    post_send:
        unsafe extern "C" fn(*mut abi::IbvQp, *mut abi::SendWr, *mut *mut abi::SendWr) -> c_int,
    post_recv:
        unsafe extern "C" fn(*mut abi::IbvQp, *mut abi::RecvWr, *mut *mut abi::RecvWr) -> c_int,
    queue: CompletionQueue,
}

// SAFETY: as for `OpenContext`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// A pair with room for `requests` sends and as many receives, of up to `pieces` segments each.
    /// It is unusable before [`connect`](Self::connect).
    pub(crate) fn new(
        adapter: &Arc<RdmaAdapter>,
        requests: u32,
        [gathers, scatters]: [u32; 2],
    ) -> Result<Self, RdmaError> {
        let most = adapter.limits.work_requests.0;
        if requests > most {
            return Err(RdmaError::Limit {
                device: adapter.name().to_string(),
                what: "work requests",
                wanted: requests as usize,
                limit: most as usize,
            });
        }
        let length = c_int::try_from(2 * requests).unwrap_or(c_int::MAX);
        let queue = CompletionQueue::new(adapter, length)?;
        adapter.count(&adapter.pairs, "queue pairs", adapter.limits.queue_pairs.0)?;
        let mut wanted = abi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: queue.cq.as_ptr(),
            recv_cq: queue.cq.as_ptr(),
            srq: ptr::null_mut(),
            cap: abi::QpCap {
                max_send_wr: requests,
                max_recv_wr: requests,
                max_send_sge: gathers,
                max_recv_sge: scatters,
                max_inline_data: 0,
            },
            qp_type: abi::QPT_UC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue live, and the structure matches the header.
        let qp = unsafe { (adapter.table().create_qp)(adapter.domain.as_ptr(), &mut wanted) };
        let Some(qp) = NonNull::new(qp) else {
            let operands = format!("UC, {requests} requests of {gathers} pieces");
            let error = RdmaError::verb(adapter.name(), "ibv_create_qp", operands);
            adapter.pairs.fetch_sub(1, Ordering::AcqRel);
            return Err(error);
        };
        // SAFETY: the context is open.
        let ops = unsafe { &(*adapter.opened.context.as_ptr()).ops };
        let known = "looked at when the device was opened";
        let pair = Self {
            qp,
            post_send: ops.post_send.expect(known),
            post_recv: ops.post_recv.expect(known),
            queue,
        };
        pair.initialise()?;
        Ok(pair)
    }

    pub(crate) fn adapter(&self) -> &Arc<RdmaAdapter> {
        &self.queue.adapter
    }

    pub(crate) const fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    /// The address for peers.
    pub(crate) fn destination(&self) -> Destination {
        // SAFETY: the pair lives.
        let pair = unsafe { (*self.qp.as_ptr()).qp_num };
        Destination {
            lid: self.adapter().lid,
            pair,
            packet: FIRST_PACKET,
            gid: self.adapter().gid,
        }
    }

    fn modify(&self, mut to: abi::QpAttr, mask: c_int, operands: String) -> Result<(), RdmaError> {
        // SAFETY: the pair lives, and the structure matches the header.
        let code = unsafe { (self.adapter().table().modify_qp)(self.qp.as_ptr(), &mut to, mask) };
        match code {
            0 => Ok(()),
            code => {
                let name = self.adapter().name();
                Err(RdmaError::code(name, "ibv_modify_qp", operands, code))
            }
        }
    }

    fn initialise(&self) -> Result<(), RdmaError> {
        let to = abi::QpAttr {
            qp_state: abi::QPS_INIT,
            port_num: PORT,
            qp_access_flags: ACCESS.unsigned_abs(),
            ..Default::default()
        };
        let mask = abi::QP_STATE | abi::QP_PKEY_INDEX | abi::QP_PORT | abi::QP_ACCESS_FLAGS;
        self.modify(to, mask, format!("INIT, port {PORT}"))
    }

    /// Moves the pair to ready to receive from `peer`, then to ready to send.
    pub(crate) fn connect(&self, peer: &Destination) -> Result<(), RdmaError> {
        let mut to = abi::QpAttr {
            qp_state: abi::QPS_RTR,
            path_mtu: abi::MTU_1024,
            rq_psn: peer.packet,
            dest_qp_num: peer.pair,
            ..Default::default()
        };
        to.ah_attr.dlid = peer.lid;
        to.ah_attr.port_num = PORT;
        if peer.gid != Gid::default() {
            to.ah_attr.is_global = 1;
            to.ah_attr.grh.dgid = peer.gid;
            to.ah_attr.grh.hop_limit = HOPS;
            to.ah_attr.grh.sgid_index = self.adapter().gid_index;
        }
        let mask =
            abi::QP_STATE | abi::QP_AV | abi::QP_PATH_MTU | abi::QP_DEST_QPN | abi::QP_RQ_PSN;
        let gid = std::net::Ipv6Addr::from(peer.gid.0);
        self.modify(to, mask, format!("RTR, pair {} of {gid}", peer.pair))?;
        let to = abi::QpAttr {
            qp_state: abi::QPS_RTS,
            sq_psn: FIRST_PACKET,
            ..Default::default()
        };
        self.modify(to, abi::QP_STATE | abi::QP_SQ_PSN, "RTS".to_string())
    }

    /// Flushes all requests, which complete with an error.
    pub(crate) fn fail(&self) -> Result<(), RdmaError> {
        let to = abi::QpAttr {
            qp_state: abi::QPS_ERR,
            ..Default::default()
        };
        self.modify(to, abi::QP_STATE, "ERR".to_string())
    }

    /// Sends `pieces` as one message. They are read until the request completes.
    ///
    /// # Safety
    /// Until then the memory stays registered and unchanged.
    pub(crate) unsafe fn send(&self, id: u64, pieces: &mut [Sge]) -> Result<(), RdmaError> {
        let mut request = abi::SendWr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: pieces.as_mut_ptr(),
            num_sge: c_int::try_from(pieces.len()).unwrap_or(c_int::MAX),
            opcode: abi::WR_SEND,
            send_flags: abi::SEND_SIGNALED,
            imm_data: 0,
            rest: [0; 11],
        };
        let mut bad = ptr::null_mut();
        // SAFETY: pair and request live; the memory of the segments is the caller's promise.
        let code = unsafe { (self.post_send)(self.qp.as_ptr(), &mut request, &mut bad) };
        self.posted(code, "ibv_post_send", id)
    }

    /// Receives the next message into `pieces`, in order.
    ///
    /// # Safety
    /// Until the request completes the memory stays registered and unused.
    pub(crate) unsafe fn receive(&self, id: u64, pieces: &mut [Sge]) -> Result<(), RdmaError> {
        let mut request = abi::RecvWr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: pieces.as_mut_ptr(),
            num_sge: c_int::try_from(pieces.len()).unwrap_or(c_int::MAX),
        };
        let mut bad = ptr::null_mut();
        // SAFETY: as in `send`.
        let code = unsafe { (self.post_recv)(self.qp.as_ptr(), &mut request, &mut bad) };
        self.posted(code, "ibv_post_recv", id)
    }

    fn posted(&self, code: c_int, call: &'static str, id: u64) -> Result<(), RdmaError> {
        match code {
            0 => Ok(()),
            code => {
                let operands = format!("work request {id:#x}");
                Err(RdmaError::code(self.adapter().name(), call, operands, code))
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once. Afterwards the device touches no memory on
        // its behalf.
        let _ = unsafe { (self.adapter().table().destroy_qp)(self.qp.as_ptr()) };
        self.adapter().pairs.fetch_sub(1, Ordering::AcqRel);
    }
}
