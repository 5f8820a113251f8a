//! Discovery by multicast DNS. Networks that filter unknown multicast groups often allow this one,
//! because printers and televisions need it.
//!
//! Each node announces the service [`SERVICE`] by its id. The record's text has a beacon (see
//! [`discovery`](super::discovery)), so that members can verify it. The record only reveals that a
//! cluster exists. Link-local addresses are left to beacons, whose interface is known.

use std::io;
use std::net::{IpAddr, SocketAddr};

use mdns_sd::{Receiver, ServiceDaemon, ServiceEvent, ServiceInfo};
use paceline_base::{hex, unhex};

use super::discovery::{DiscoveredNode, DiscoveryMethod, beacon, read_beacon};
use super::paths::is_link_local;
use super::{ClusterKey, NodeId};

/// The service that nodes announce.
pub const SERVICE: &str = "_paceline._tcp.local.";

const TEXT: &str = "beacon";

/// Most events read in one poll, and most addresses of each.
const EVENTS_MAX: usize = 64;
const ADDRESSES_MAX: usize = 8;

/// Unread events of a flooded network. The library ends a search with 1,000 of them.
/// [`Mdns::heard`] reads some 300 a second.
const FLOOD: usize = 500;

/// This node on multicast DNS. Its threads end when it is dropped.
#[derive(derive_more::Debug)]
#[debug("{SERVICE} as {}", self.id)]
pub struct Mdns {
    daemon: ServiceDaemon,
    events: Receiver<ServiceEvent>,
    id: NodeId,
    port: u16,
}

impl Mdns {
    /// Announces the node `id` with its control port, and listens for others. Starts a thread.
    pub fn open(key: &ClusterKey, nonce: u64, id: NodeId, port: u16) -> io::Result<Self> {
        let daemon = ServiceDaemon::new().map_err(io::Error::other)?;
        let events = daemon.browse(SERVICE).map_err(io::Error::other)?;
        let mdns = Self {
            daemon,
            events,
            id,
            port,
        };
        mdns.announce(key, nonce)?;
        Ok(mdns)
    }

    /// Announces the node as one of the cluster of `key` from now on.
    pub fn announce(&self, key: &ClusterKey, nonce: u64) -> io::Result<()> {
        let name = self.id.to_string();
        let asks = false;
        let text = [(TEXT, hex(&beacon(key, nonce, self.id, self.port, asks)))];
        let host = format!("{name}.local.");
        let info = ServiceInfo::new(SERVICE, &name, &host, "", self.port, &text[..]);
        let info = info.map_err(io::Error::other)?.enable_addr_auto();
        self.daemon.register(info).map_err(io::Error::other)
    }

    /// Whether others announce more services than [`heard`](Self::heard) reads, or the library
    /// ended the search for that reason. The caller then drops this and all announcements.
    pub fn is_flooded(&self) -> bool {
        self.events.len() >= FLOOD || self.events.is_disconnected()
    }

    /// Nodes of the cluster of `key` discovered since the last call. Does not wait.
    pub fn heard(&self, key: &ClusterKey) -> Vec<DiscoveredNode> {
        let events = self.events.try_iter().take(EVENTS_MAX);
        let resolved = events.filter_map(|event| match event {
            ServiceEvent::ServiceResolved(service) => Some(service),
            _ => None,
        });
        resolved
            .flat_map(|service| {
                let text = service.get_property_val_str(TEXT).map(str::to_owned);
                let found = text.and_then(|text| read_beacon(key, &unhex(&text)?));
                let found = found.filter(|(id, ..)| *id != self.id);
                let addresses = service
                    .get_addresses()
                    .iter()
                    .map(mdns_sd::ScopedIp::to_ip_addr);
                let addresses: Vec<IpAddr> = addresses
                    .filter(|ip| !ip.is_loopback() && !is_link_local(*ip))
                    .take(ADDRESSES_MAX)
                    .collect();
                addresses.into_iter().filter_map(move |ip| {
                    let (id, port, asks) = found?;
                    Some(DiscoveredNode {
                        id,
                        addr: SocketAddr::new(ip, port),
                        how: DiscoveryMethod::Mdns,
                        asks,
                    })
                })
            })
            .collect()
    }
}

impl Drop for Mdns {
    fn drop(&mut self) {
        // Its thread withdraws the announcement by itself.
        let _ = self.daemon.shutdown();
    }
}
