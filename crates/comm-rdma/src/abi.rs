//! Rust declarations of the used part of `infiniband/verbs.h`.
//!
//! Layouts are those of rdma-core; Apple's `librdma.dylib` has the same header. Sixteen functions
//! are symbols of the library ([`VerbsTable`]). `ibv_post_send`, `ibv_post_recv` and `ibv_poll_cq`
//! are inline functions of the header, on both systems, and go through [`ContextOps`]. Fields
//! beyond those declared here are private to the library: these structures are only ever pointed
//! to, unless they are arguments. `layout.rs` compares all offsets with the header, if it is
//! installed.

#![allow(
    dead_code,
    reason = "the software provider and the library built of it use what the transport does not"
)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `struct ibv_device`: opaque.
#[repr(C)]
pub(crate) struct IbvDevice {
    opaque: [u8; 0],
}

/// An entry of the table that is never called.
pub(crate) type Unused = Option<unsafe extern "C" fn()>;

/// `struct ibv_context_ops`: 32 functions; three are used.
#[repr(C)]
pub(crate) struct ContextOps {
    pub(crate) before_poll: [Unused; 11],
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut IbvCq, c_int, *mut Wc) -> c_int>,
    pub(crate) before_post: [Unused; 13],
    pub(crate) post_send:
        Option<unsafe extern "C" fn(*mut IbvQp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(crate) post_recv:
        Option<unsafe extern "C" fn(*mut IbvQp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub(crate) after_post: [Unused; 5],
}

/// `struct ibv_context`, its beginning.
#[repr(C)]
pub(crate) struct IbvContext {
    pub(crate) device: *mut IbvDevice,
    pub(crate) ops: ContextOps,
}

/// `struct ibv_pd`, its beginning.
#[repr(C)]
pub(crate) struct IbvPd {
    pub(crate) context: *mut IbvContext,
    pub(crate) handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct IbvMr {
    pub(crate) context: *mut IbvContext,
    pub(crate) pd: *mut IbvPd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_cq`, its beginning.
#[repr(C)]
pub(crate) struct IbvCq {
    pub(crate) context: *mut IbvContext,
    pub(crate) channel: *mut c_void,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: c_int,
}

/// `struct ibv_qp`, its beginning.
#[repr(C)]
pub(crate) struct IbvQp {
    pub(crate) context: *mut IbvContext,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *mut IbvPd,
    pub(crate) send_cq: *mut IbvCq,
    pub(crate) recv_cq: *mut IbvCq,
    pub(crate) srq: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
    pub(crate) state: c_uint,
    pub(crate) qp_type: c_uint,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut IbvCq,
    pub(crate) recv_cq: *mut IbvCq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

/// `union ibv_gid`: an IPv6 address.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: Gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// `struct ibv_port_attr`. The symbol `ibv_query_port` fills an older, shorter one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// `struct ibv_send_wr`. `rest` belongs to other operations than sends.
#[repr(C)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) rest: [u64; 11],
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut RecvWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

// Values of the header's enumerations.

pub(crate) const QPS_INIT: c_uint = 1;
pub(crate) const QPS_RTR: c_uint = 2;
pub(crate) const QPS_RTS: c_uint = 3;
pub(crate) const QPS_ERR: c_uint = 6;

pub(crate) const QPT_UC: c_uint = 3;

pub(crate) const MTU_1024: c_uint = 3;

pub(crate) const PORT_ACTIVE: c_uint = 4;
pub(crate) const LINK_LAYER_ETHERNET: u8 = 2;

pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub(crate) const ACCESS_REMOTE_READ: c_int = 1 << 2;

pub(crate) const QP_STATE: c_int = 1;
pub(crate) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(crate) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(crate) const QP_PORT: c_int = 1 << 5;
pub(crate) const QP_AV: c_int = 1 << 7;
pub(crate) const QP_PATH_MTU: c_int = 1 << 8;
pub(crate) const QP_RQ_PSN: c_int = 1 << 12;
pub(crate) const QP_SQ_PSN: c_int = 1 << 16;
pub(crate) const QP_DEST_QPN: c_int = 1 << 20;

pub(crate) const WR_SEND: c_uint = 2;
pub(crate) const SEND_SIGNALED: c_uint = 1 << 1;

pub(crate) const WC_SEND: c_uint = 0;
pub(crate) const WC_RECV: c_uint = 1 << 7;

pub(crate) const WC_SUCCESS: c_uint = 0;
pub(crate) const WC_LOC_LEN_ERR: c_uint = 1;
pub(crate) const WC_LOC_PROT_ERR: c_uint = 4;
pub(crate) const WC_WR_FLUSH_ERR: c_uint = 5;
pub(crate) const WC_GENERAL_ERR: c_uint = 21;

/// The sixteen symbols. Each may fail: pointers are null with `errno` set, numbers are an error.
#[derive(Clone, Copy)]
pub(crate) struct VerbsTable {
    pub(crate) get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut IbvDevice,
    pub(crate) free_device_list: unsafe extern "C" fn(*mut *mut IbvDevice),
    pub(crate) get_device_name: unsafe extern "C" fn(*mut IbvDevice) -> *const c_char,
    pub(crate) open_device: unsafe extern "C" fn(*mut IbvDevice) -> *mut IbvContext,
    pub(crate) close_device: unsafe extern "C" fn(*mut IbvContext) -> c_int,
    pub(crate) alloc_pd: unsafe extern "C" fn(*mut IbvContext) -> *mut IbvPd,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut IbvPd) -> c_int,
    pub(crate) create_cq:
        unsafe extern "C" fn(*mut IbvContext, c_int, *mut c_void, *mut c_void, c_int) -> *mut IbvCq,
    pub(crate) destroy_cq: unsafe extern "C" fn(*mut IbvCq) -> c_int,
    pub(crate) create_qp: unsafe extern "C" fn(*mut IbvPd, *mut QpInitAttr) -> *mut IbvQp,
    pub(crate) destroy_qp: unsafe extern "C" fn(*mut IbvQp) -> c_int,
    pub(crate) query_port: unsafe extern "C" fn(*mut IbvContext, u8, *mut PortAttr) -> c_int,
    pub(crate) query_gid: unsafe extern "C" fn(*mut IbvContext, u8, c_int, *mut Gid) -> c_int,
    pub(crate) modify_qp: unsafe extern "C" fn(*mut IbvQp, *mut QpAttr, c_int) -> c_int,
    pub(crate) reg_mr: unsafe extern "C" fn(*mut IbvPd, *mut c_void, usize, c_int) -> *mut IbvMr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut IbvMr) -> c_int,
}
