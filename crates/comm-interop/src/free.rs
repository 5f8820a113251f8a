//! Free addresses, for ranks of tests that bind them later.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

/// An address of this machine with a free port.
///
/// On Linux each call gets its own address in 127.0.0.0/8, so the port stays free. On an address
/// shared with other processes, one of them may take the port before the caller binds it.
pub(crate) fn free() -> SocketAddr {
    let any = SocketAddr::from((address(), 0));
    TcpListener::bind(any).unwrap().local_addr().unwrap()
}

#[cfg(target_os = "linux")]
fn address() -> Ipv4Addr {
    use std::sync::atomic::{AtomicU32, Ordering};
    static CALLS: AtomicU32 = AtomicU32::new(1);
    // Within 127.64.0.0/10: ten bits from the process id, twelve from the call counter.
    let call = CALLS.fetch_add(1, Ordering::Relaxed) & 0xfff;
    let process = std::process::id() & 0x3ff;
    Ipv4Addr::from_bits(0x7f40_0000 | process << 12 | call)
}

#[cfg(not(target_os = "linux"))]
fn address() -> Ipv4Addr {
    Ipv4Addr::LOCALHOST
}
