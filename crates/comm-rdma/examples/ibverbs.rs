//! A verbs library in software: a shared library with the functions and names of the real one.
//!
//! The loading tests, `src/tests/loaded.rs`, build it under the name that the system looks for. Its
//! devices `soft0` to `soft7` reach each other within a process. They also reach other processes
//! that share the folder named by `IBV_SOFT_FOLDER`. `IBV_SOFT_DEVICES` names other devices with
//! their addresses: `soft0=10.77.0.1,soft1=10.78.0.1`.

#![allow(
    clippy::missing_safety_doc,
    reason = "the functions are those of verbs.h, which has their rules"
)]

#[path = "../src/abi.rs"]
mod abi;
#[path = "../src/soft/mod.rs"]
mod soft;

use std::ffi::{c_char, c_int, c_void};
use std::sync::Once;

use abi::{Gid, IbvContext, IbvCq, IbvDevice, IbvMr, IbvPd, IbvQp, PortAttr, QpAttr, QpInitAttr};

/// Creates the devices, once. They stay until the process ends.
fn prepare() {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| {
        let outside =
            std::env::var_os("IBV_SOFT_FOLDER").map(|folder| soft::ProcessFabric(folder.into()));
        let (faults, caps) = (soft::Faults::default(), soft::Caps::APPLE);
        let fabric = soft::Fabric::with(faults, caps, outside);
        match std::env::var("IBV_SOFT_DEVICES") {
            Ok(devices) => devices.split(',').for_each(|device| add(&fabric, device)),
            Err(_) => (0..8).for_each(|index| fabric.device(&format!("soft{index}"))),
        }
        std::mem::forget(fabric);
    });
}

/// Adds a device by its name and address.
fn add(fabric: &soft::Fabric, device: &str) {
    let address = device.split_once('=').and_then(|(name, address)| {
        let address: std::net::Ipv4Addr = address.parse().ok()?;
        Some((name, address.octets()))
    });
    if let Some((name, address)) = address {
        fabric.device_at(name, address);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut IbvDevice {
    prepare();
    // SAFETY: the caller follows the rules of verbs.h, here as in all functions below.
    unsafe { soft::get_device_list(count) }
}

/// Exports a function under its name in the header.
macro_rules! export {
    ($($name:ident = $function:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller follows the rules of verbs.h.
                unsafe { soft::$function($($arg),*) }
            }
        )*
    };
}

export! {
    ibv_free_device_list = free_device_list(list: *mut *mut IbvDevice);
    ibv_get_device_name = get_device_name(device: *mut IbvDevice) -> *const c_char;
    ibv_open_device = open_device(device: *mut IbvDevice) -> *mut IbvContext;
    ibv_close_device = close_device(context: *mut IbvContext) -> c_int;
    ibv_alloc_pd = alloc_pd(context: *mut IbvContext) -> *mut IbvPd;
    ibv_dealloc_pd = dealloc_pd(pd: *mut IbvPd) -> c_int;
    ibv_create_cq = create_cq(
        context: *mut IbvContext, length: c_int, own: *mut c_void, channel: *mut c_void,
        vector: c_int
    ) -> *mut IbvCq;
    ibv_destroy_cq = destroy_cq(cq: *mut IbvCq) -> c_int;
    ibv_create_qp = create_qp(pd: *mut IbvPd, wanted: *mut QpInitAttr) -> *mut IbvQp;
    ibv_destroy_qp = destroy_qp(qp: *mut IbvQp) -> c_int;
    ibv_query_port = query_port(context: *mut IbvContext, port: u8, into: *mut PortAttr) -> c_int;
    ibv_query_gid = query_gid(
        context: *mut IbvContext, port: u8, index: c_int, into: *mut Gid
    ) -> c_int;
    ibv_modify_qp = modify_qp(qp: *mut IbvQp, to: *mut QpAttr, mask: c_int) -> c_int;
    ibv_reg_mr = reg_mr(
        pd: *mut IbvPd, start: *mut c_void, bytes: usize, access: c_int
    ) -> *mut IbvMr;
    ibv_dereg_mr = dereg_mr(mr: *mut IbvMr) -> c_int;
}
