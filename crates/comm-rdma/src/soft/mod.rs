//! A verbs library in software: the functions that a device's library exports, over memory.
//!
//! It keeps the rules that matter to a user of UC:
//!
//! - a pair goes through its states;
//! - sends are read from registered memory only;
//! - a message that meets no posted receive is dropped without a word, one that is too long breaks
//!   its receiver;
//! - completions have to be polled before a queue is full;
//! - a device has only so many regions, pairs and requests.
//!
//! The faults of a link come from a seed ([`Faults`]). Nothing of the crate is used but the
//! layouts. So `examples/ibverbs.rs` can make a library of these files that is loaded as the real
//! one.
//!
//! - `fabric`: devices, pairs, and what happens to a message;
//! - `outside`: pairs in other processes, for the library;
//! - `calls`: the C functions, with all that is about pointers.

mod calls;
mod fabric;
mod outside;

#[cfg(test)]
pub(crate) use self::calls::NO_LIST;
pub(crate) use self::calls::{
    alloc_pd, close_device, create_cq, create_qp, dealloc_pd, dereg_mr, destroy_cq, destroy_qp,
    free_device_list, get_device_list, get_device_name, modify_qp, open_device, query_gid,
    query_port, reg_mr,
};
#[cfg(test)]
pub(crate) use self::fabric::{Break, Failure, devices, mix, number};
pub(crate) use self::fabric::{Caps, Fabric, Faults};
#[allow(unused_imports, reason = "the library's")]
pub(crate) use self::outside::Outside;
