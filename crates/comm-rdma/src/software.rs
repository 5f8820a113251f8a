//! Opens the software verbs library in-process, without loading a file.

use super::abi::VerbsTable;
use super::limits::DeviceLimits;
use super::soft;
use super::verbs::Verbs;

/// The library, with these limits on its users.
pub(super) fn verbs(limits: DeviceLimits) -> Verbs {
    let table = VerbsTable {
        get_device_list: soft::get_device_list,
        free_device_list: soft::free_device_list,
        get_device_name: soft::get_device_name,
        open_device: soft::open_device,
        close_device: soft::close_device,
        alloc_pd: soft::alloc_pd,
        dealloc_pd: soft::dealloc_pd,
        create_cq: soft::create_cq,
        destroy_cq: soft::destroy_cq,
        create_qp: soft::create_qp,
        destroy_qp: soft::destroy_qp,
        query_port: soft::query_port,
        query_gid: soft::query_gid,
        modify_qp: soft::modify_qp,
        reg_mr: soft::reg_mr,
        dereg_mr: soft::dereg_mr,
    };
    Verbs { table, limits }
}
