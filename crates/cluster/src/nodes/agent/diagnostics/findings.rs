//! Findings of a diagnosis of two nodes: the results of its tests, in words for people.

use std::io;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::super::channel::ServiceChannel;
use super::super::paths::interface_of;
use super::connect;

/// Headers of a segment without and with its usual option: IPv4 or IPv6, TCP, timestamps.
const HEADERS_V4: u32 = 20 + 20 + 12;
const HEADERS_V6: u32 = 40 + 20 + 12;

/// Default packet size of Ethernet; less indicates a tunnel or a wrong setting.
const MTU_USUAL: u32 = 1500;

/// A test of the diagnosis, named by its subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Test {
    /// The name has an address.
    Address,
    /// The other node's control port, from here.
    Control,
    /// This node's control port, from there.
    ControlBack,
    /// Both are members of one cluster, and not revoked.
    Membership,
    /// The clocks of the two machines.
    Clock,
    /// A data port there, from here.
    Data,
    /// A data port here, from there.
    DataBack,
    /// Multicast from there to here.
    Multicast,
    /// Multicast from here to there.
    MulticastBack,
    /// Large packets, and their largest size.
    Mtu,
}

/// Result of a [`Test`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub test: Test,
    /// Whether all is well.
    pub ok: bool,
    /// Description of the result, for people.
    pub found: String,
    pub port: Option<u16>,
    /// The interface whose setting is to blame, and whether it is on this machine.
    pub interface: Option<(String, bool)>,
}

impl Finding {
    pub(super) fn new(test: Test, ok: bool, found: impl Into<String>) -> Self {
        Self {
            test,
            ok,
            found: found.into(),
            port: None,
            interface: None,
        }
    }

    pub(super) fn at(self, port: u16) -> Self {
        let port = Some(port);
        Self { port, ..self }
    }
}

/// Whether a data port of the node with this name answers.
pub(super) fn test_place(place: SocketAddr, name: &str) -> Finding {
    let port = place.port();
    let reached = connect(place);
    let text = match &reached {
        Ok(()) => format!("data port {port} of {name} answers"),
        Err(why) => format!("data port {port} of {name} does not answer: {why}"),
    };
    Finding::new(Test::Data, reached.is_ok(), text).at(port)
}

/// Message for a failed connection, with its meaning.
pub(super) fn unreached(addr: SocketAddr, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            format!("{addr} says nothing: packets are dropped, as a firewall does")
        }
        io::ErrorKind::ConnectionRefused => {
            format!("{addr} refuses: nothing listens there, or a firewall rejects it")
        }
        _ => format!("{addr}: {error}"),
    }
}

pub(super) fn multicast(test: Test, heard: &[String], way: &str) -> Finding {
    match heard.is_empty() {
        true => Finding::new(test, false, format!("no multicast comes {way}")),
        false => {
            let networks = heard.join(", ");
            Finding::new(test, true, format!("multicast comes {way} over {networks}"))
        }
    }
}

/// MSS of one end's connection in bytes, and its outgoing interface and MTU.
pub(super) type PathEnd = (Option<u32>, String, Option<u32>);

pub(super) fn segment(channel: &ServiceChannel) -> PathEnd {
    let interface = channel.own_addr().map(interface_of).unwrap_or_default();
    let file = format!("/sys/class/net/{interface}/mtu");
    let mtu = std::fs::read_to_string(file).ok();
    let mtu = mtu.and_then(|text| text.trim().parse().ok());
    (channel.session.segment_bytes(), interface, mtu)
}

pub(super) fn judge_mtu(
    channel: &ServiceChannel,
    name: &str,
    sides: [(bool, PathEnd); 2],
) -> Finding {
    let is_v4 = channel
        .peer_addr()
        .is_ok_and(|addr| addr.ip().to_canonical().is_ipv4());
    let headers = if is_v4 { HEADERS_V4 } else { HEADERS_V6 };
    let packets = sides.iter().filter_map(|(_, side)| side.0);
    let packet = packets.min().map(|segment| segment + headers);
    for (here, (_, interface, mtu)) in sides {
        if let Some(mtu) = mtu.filter(|mtu| *mtu < MTU_USUAL) {
            let whose = if here { "this machine" } else { name };
            let found =
                format!("{interface} of {whose} has an MTU of {mtu}, usual are {MTU_USUAL}");
            let interface = Some((interface, here));
            return Finding {
                interface,
                ..Finding::new(Test::Mtu, false, found)
            };
        }
    }
    match packet {
        Some(packet) if packet < MTU_USUAL => {
            let found = format!("packets of {packet} bytes pass, usual are {MTU_USUAL}: a tunnel?");
            Finding::new(Test::Mtu, false, found)
        }
        Some(packet) => Finding::new(Test::Mtu, true, format!("packets of {packet} bytes pass")),
        None => Finding::new(Test::Mtu, true, "large packets pass"),
    }
}
