//! Addresses for ranks that bind them themselves, later.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

/// An address of this machine with a port that is free.
///
/// It stays free where the system has so many addresses that each call gets its own (Linux: all of
/// 127.0.0.0/8). On an address that other processes use too, any of them may be given the port in
/// between.
pub(crate) fn free() -> SocketAddr {
    let any = SocketAddr::from((address(), 0));
    TcpListener::bind(any).unwrap().local_addr().unwrap()
}

#[cfg(target_os = "linux")]
fn address() -> Ipv4Addr {
    use std::sync::atomic::{AtomicU32, Ordering};
    static CALLS: AtomicU32 = AtomicU32::new(1);
    // Within 127.64.0.0/10: ten bits of the process, twelve of the call.
    let call = CALLS.fetch_add(1, Ordering::Relaxed) & 0xfff;
    let process = std::process::id() & 0x3ff;
    Ipv4Addr::from_bits(0x7f40_0000 | process << 12 | call)
}

#[cfg(not(target_os = "linux"))]
fn address() -> Ipv4Addr {
    Ipv4Addr::LOCALHOST
}
