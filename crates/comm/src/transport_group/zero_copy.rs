//! Zero-copy calls on a transport that may not support them. Without support, bytes are copied.

use std::sync::Arc;

use crate::peer_bytes::{PeerBytes, PeerBytesMut};
use crate::transport::{Closed, Transport, VirtualLane, WriteBack};
use crate::{MemoryRegistration, Pages};

/// The transport, if it supports writing results back.
fn write_back<T: Transport>(transport: &T) -> Option<&dyn WriteBack> {
    transport.zero_copy()?.write_back()
}

/// See [`ZeroCopy::write_whole`](crate::transport::Lend::write_whole).
pub(super) fn write_whole<T: Transport>(
    transport: &T,
    lane: VirtualLane,
    peer: usize,
    (head, body): (&[u8], &[u8]),
) -> Result<usize, Closed> {
    match transport.zero_copy() {
        Some(lending) => lending.write_whole(lane, peer, head, body),
        None => transport.write(lane, peer, head, body),
    }
}

/// See [`WriteBack::write_to_come_back`].
pub(super) fn write_reducible<T: Transport>(
    transport: &T,
    lane: VirtualLane,
    peer: usize,
    (head, body): (&[u8], &[u8]),
    whole: &[u8],
) -> Result<usize, Closed> {
    match write_back(transport) {
        Some(returning) => returning.write_reducible(lane, peer, (head, body), whole),
        None => transport.write(lane, peer, head, body),
    }
}

/// See [`WriteBack::has_come_back`].
pub(super) fn is_written_back<T: Transport>(transport: &T, peer: usize) -> bool {
    write_back(transport).is_some_and(|returning| returning.is_written_back(peer))
}

/// See [`ZeroCopy::expect`](crate::transport::Lend::expect).
pub(super) fn expect<T: Transport>(transport: &T, peer: usize, memory: &[u8]) {
    if let Some(lending) = transport.zero_copy() {
        lending.expect(peer, memory);
    }
}

/// See [`ZeroCopy::lends`](crate::transport::Lend::lends).
pub(super) fn reads_in_place<T: Transport>(transport: &T, lane: VirtualLane, peer: usize) -> bool {
    let lending = transport.zero_copy();
    lending.is_some_and(|lending| lending.reads_in_place(lane, peer))
}

/// See [`ZeroCopy::lend`](crate::transport::Lend::lend).
pub(super) fn read_in_place<T: Transport>(
    transport: &T,
    peer: usize,
    take: &mut dyn FnMut(PeerBytes<'_>) -> usize,
) -> Result<usize, Closed> {
    let lending = transport.zero_copy();
    lending.map_or(Ok(0), |lending| lending.read_in_place(peer, take))
}

/// See [`WriteBack::lend_to_come_back`].
pub(super) fn reduce_in_place<T: Transport>(
    transport: &T,
    peer: usize,
    take: &mut dyn FnMut(PeerBytesMut<'_>) -> usize,
) -> Result<Option<usize>, Closed> {
    let returning = write_back(transport);
    returning.map_or(Ok(None), |returning| returning.reduce_in_place(peer, take))
}

/// See [`ZeroCopy::placed`](crate::transport::Lend::placed).
pub(super) fn placed<T: Transport>(transport: &T) -> u64 {
    let lending = transport.zero_copy();
    lending.map_or(0, |lending| lending.placed())
}

/// See [`ZeroCopy::register_pages`](crate::transport::Lend::register_pages).
pub(super) fn register_pages<T: Transport>(
    transport: &T,
    pages: &Arc<Pages>,
) -> Option<MemoryRegistration> {
    transport.zero_copy()?.register_pages(pages)
}

/// See [`ZeroCopy::holds`](crate::transport::Lend::holds).
pub(super) fn holds<T: Transport>(transport: &T, lane: VirtualLane, peer: usize) -> bool {
    let lending = transport.zero_copy();
    lending.is_some_and(|lending| lending.holds(lane, peer))
}

/// See [`ZeroCopy::let_go`](crate::transport::Lend::let_go).
pub(super) fn release_memory<T: Transport>(transport: &T, lane: VirtualLane) {
    if let Some(lending) = transport.zero_copy() {
        lending.release_memory(lane);
    }
}

/// See [`ZeroCopy::let_go_of`](crate::transport::Lend::let_go_of).
pub(super) fn release_peer_memory<T: Transport>(transport: &T, lane: VirtualLane, peer: usize) {
    if let Some(lending) = transport.zero_copy() {
        lending.release_peer_memory(lane, peer);
    }
}
