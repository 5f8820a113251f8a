//! A verbs library in software: the functions of a device's library, over memory.
//!
//! It enforces the rules that matter to a user of UC:
//!
//! - a queue pair passes through its states;
//! - sends read registered memory only;
//! - a message that meets no posted receive is dropped silently; one that is too long breaks its
//!   receiver;
//! - completions must be polled before a queue is full;
//! - a device has limited regions, pairs and requests.
//!
//! The faults of a link come from a seed ([`Faults`]). Only `abi` of the crate is used, so that
//! `examples/ibverbs.rs` can build a library from these files that is loaded like the real one.
//!
//! - `fabric`: devices, pairs, and delivery of messages;
//! - `process_fabric`: pairs in other processes, for the library;
//! - `calls`: the C functions, with all pointer handling.

mod calls;
mod fabric;
mod process_fabric;

#[cfg(test)]
pub(crate) use self::calls::NO_LIST;
pub(crate) use self::calls::{
    alloc_pd, close_device, create_cq, create_qp, dealloc_pd, dereg_mr, destroy_cq, destroy_qp,
    free_device_list, get_device_list, get_device_name, modify_qp, open_device, query_gid,
    query_port, reg_mr,
};
#[cfg(test)]
pub(crate) use self::fabric::{Break, DeviceFailure, devices, mix, number};
pub(crate) use self::fabric::{Caps, Fabric, Faults};
#[allow(unused_imports, reason = "the library's")]
pub(crate) use self::process_fabric::ProcessFabric;
