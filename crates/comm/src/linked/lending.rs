//! Zero-copy calls on a transport that may not support them. Without support, bytes are copied.

use std::sync::Arc;

use crate::lent::{Lent, LentMut};
use crate::transport::{Closed, ComeBack, Lane, Transport};
use crate::{Pages, Registered};

/// The transport, if it supports writing results back.
fn come_back<T: Transport>(transport: &T) -> Option<&dyn ComeBack> {
    transport.lending()?.come_back()
}

/// See [`Lend::write_whole`](crate::transport::Lend::write_whole).
pub(super) fn write_whole<T: Transport>(
    transport: &T,
    lane: Lane,
    peer: usize,
    (head, body): (&[u8], &[u8]),
) -> Result<usize, Closed> {
    match transport.lending() {
        Some(lending) => lending.write_whole(lane, peer, head, body),
        None => transport.write(lane, peer, head, body),
    }
}

/// See [`ComeBack::write_to_come_back`].
pub(super) fn write_to_come_back<T: Transport>(
    transport: &T,
    lane: Lane,
    peer: usize,
    (head, body): (&[u8], &[u8]),
    whole: &[u8],
) -> Result<usize, Closed> {
    match come_back(transport) {
        Some(returning) => returning.write_to_come_back(lane, peer, (head, body), whole),
        None => transport.write(lane, peer, head, body),
    }
}

/// See [`ComeBack::has_come_back`].
pub(super) fn has_come_back<T: Transport>(transport: &T, peer: usize) -> bool {
    come_back(transport).is_some_and(|returning| returning.has_come_back(peer))
}

/// See [`Lend::expect`](crate::transport::Lend::expect).
pub(super) fn expect<T: Transport>(transport: &T, peer: usize, memory: &[u8]) {
    if let Some(lending) = transport.lending() {
        lending.expect(peer, memory);
    }
}

/// See [`Lend::lends`](crate::transport::Lend::lends).
pub(super) fn lends<T: Transport>(transport: &T, lane: Lane, peer: usize) -> bool {
    let lending = transport.lending();
    lending.is_some_and(|lending| lending.lends(lane, peer))
}

/// See [`Lend::lend`](crate::transport::Lend::lend).
pub(super) fn lend<T: Transport>(
    transport: &T,
    peer: usize,
    take: &mut dyn FnMut(Lent<'_>) -> usize,
) -> Result<usize, Closed> {
    let lending = transport.lending();
    lending.map_or(Ok(0), |lending| lending.lend(peer, take))
}

/// See [`ComeBack::lend_to_come_back`].
pub(super) fn lend_to_come_back<T: Transport>(
    transport: &T,
    peer: usize,
    take: &mut dyn FnMut(LentMut<'_>) -> usize,
) -> Result<Option<usize>, Closed> {
    let returning = come_back(transport);
    returning.map_or(Ok(None), |returning| {
        returning.lend_to_come_back(peer, take)
    })
}

/// See [`Lend::placed`](crate::transport::Lend::placed).
pub(super) fn placed<T: Transport>(transport: &T) -> u64 {
    let lending = transport.lending();
    lending.map_or(0, |lending| lending.placed())
}

/// See [`Lend::register_pages`](crate::transport::Lend::register_pages).
pub(super) fn register_pages<T: Transport>(
    transport: &T,
    pages: &Arc<Pages>,
) -> Option<Registered> {
    transport.lending()?.register_pages(pages)
}

/// See [`Lend::holds`](crate::transport::Lend::holds).
pub(super) fn holds<T: Transport>(transport: &T, lane: Lane, peer: usize) -> bool {
    let lending = transport.lending();
    lending.is_some_and(|lending| lending.holds(lane, peer))
}

/// See [`Lend::let_go`](crate::transport::Lend::let_go).
pub(super) fn let_go<T: Transport>(transport: &T, lane: Lane) {
    if let Some(lending) = transport.lending() {
        lending.let_go(lane);
    }
}

/// See [`Lend::let_go_of`](crate::transport::Lend::let_go_of).
pub(super) fn let_go_of<T: Transport>(transport: &T, lane: Lane, peer: usize) {
    if let Some(lending) = transport.lending() {
        lending.let_go_of(lane, peer);
    }
}
