//! Addresses of cables: a subnet for each.

use std::net::Ipv4Addr;

use super::{Cable, CableEnd, Error, Graph, ProbedMachine};

/// Address range of the cables: 192.168.0.0/16, as in MLX.
const FIRST: u32 = u32::from_be_bytes([192, 168, 0, 0]);

/// Subnets of four addresses, two of them usable, in 192.168.0.0/16.
const BLOCKS: u32 = 1 << 14;

/// An interface's address and subnet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceNetwork {
    pub interface: String,
    pub address: Ipv4Addr,
    /// Prefix length, 0 to 32.
    pub prefix: u8,
}

impl InterfaceNetwork {
    fn contains(&self, address: u32) -> bool {
        let mask = u32::MAX
            .checked_shl(32 - u32::from(self.prefix))
            .unwrap_or(0);
        u32::from(self.address) & mask == address & mask
    }

    /// Whether another address of its size is in this subnet.
    pub(super) fn shares(&self, other: &Self) -> bool {
        self.contains(other.address.into())
    }

    /// Whether it overlaps the four addresses from `block` on.
    fn overlaps(&self, block: u32) -> bool {
        let own = u32::from(self.address) & !3;
        self.contains(block) || own == block
    }

    /// Parses networks of `ifconfig`, with masks such as `0xffffff00`.
    pub(super) fn of_ifconfig(text: &str) -> Vec<Self> {
        let mut interface = "";
        let mut found = Vec::new();
        for line in text.lines() {
            if !line.starts_with(char::is_whitespace) {
                interface = line.split(':').next().unwrap_or("");
            }
            let mut words = line.split_whitespace();
            if words.next() != Some("inet") {
                continue;
            }
            let address = words.next().and_then(|word| word.parse().ok());
            let mask = words.skip_while(|word| *word != "netmask").nth(1);
            let hex = mask.and_then(|mask| mask.strip_prefix("0x"));
            let bits = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok());
            if let (Some(address), Some(bits)) = (address, bits) {
                let prefix = u8::try_from(bits.leading_ones()).expect("at most 32");
                found.push(Self {
                    interface: interface.to_owned(),
                    address,
                    prefix,
                });
            }
        }
        found
    }

    /// Parses networks of Linux's `ip -4 -o addr show`: `2: eth0    inet 10.0.0.1/24 ...`.
    pub(super) fn of_ip(text: &str) -> Vec<Self> {
        let parse = |line: &str| {
            let mut words = line.split_whitespace();
            let interface = words.nth(1)?.to_owned();
            let (address, prefix) = words.nth(1)?.split_once('/')?;
            Some(Self {
                interface,
                address: address.parse().ok()?,
                prefix: prefix.parse().ok().filter(|prefix| *prefix <= 32)?,
            })
        };
        text.lines().filter_map(parse).collect()
    }
}

/// Addresses of both ends of all cables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Cables in their order, with the addresses of `from` and `to`.
    pub cables: Vec<(Cable, Ipv4Addr, Ipv4Addr)>,
}

impl Addresses {
    /// Assigns each cable the first free subnet of 192.168.0.0/16, four addresses each: `from` gets
    /// the second of them, `to` the third.
    ///
    /// A subnet is free if no machine uses it on an interface that stays unchanged. MLX does not
    /// check, and uses 192.168.0.1 and following even if the home's router has them; its setup then
    /// disconnects machines.
    pub fn assign(graph: &Graph, machines: &[ProbedMachine]) -> Result<Self, Error> {
        let ends = graph.cables.iter().flat_map(|cable| [cable.from, cable.to]);
        let ours: Vec<(usize, &str)> = ends.map(|end| (end.host, graph.interface(end))).collect();
        let mut used: Vec<&InterfaceNetwork> = Vec::new();
        for (host, machine) in machines.iter().enumerate() {
            // The bridge over all Thunderbolt ports is removed.
            let stays = |network: &&InterfaceNetwork| {
                network.interface != "bridge0" && !ours.contains(&(host, &network.interface))
            };
            used.extend(machine.networks.iter().filter(stays));
        }
        let blocks = (0..BLOCKS).map(|block| FIRST + 4 * block);
        let mut free = blocks.filter(|block| !used.iter().any(|network| network.overlaps(*block)));
        let give = |cable: &Cable| {
            let block = free.next()?;
            Some((*cable, Ipv4Addr::from(block + 1), Ipv4Addr::from(block + 2)))
        };
        let cables: Option<Vec<_>> = graph.cables.iter().map(give).collect();
        let cables = cables.ok_or(Error::NoNetworks {
            cables: graph.cables.len(),
        })?;
        Ok(Self { cables })
    }

    /// Ends at `host` of its cables to `peer`, with their addresses and the other end's.
    pub fn between(&self, host: usize, peer: usize) -> Vec<(CableEnd, Ipv4Addr, Ipv4Addr)> {
        let facing = |(cable, from, to): &(Cable, Ipv4Addr, Ipv4Addr)| {
            if (cable.from.host, cable.to.host) == (host, peer) {
                Some((cable.from, *from, *to))
            } else if (cable.to.host, cable.from.host) == (host, peer) {
                Some((cable.to, *to, *from))
            } else {
                None
            }
        };
        self.cables.iter().filter_map(facing).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    fn network(interface: &str, address: [u8; 4], prefix: u8) -> InterfaceNetwork {
        InterfaceNetwork {
            interface: interface.to_owned(),
            address: address.into(),
            prefix,
        }
    }

    fn machines(networks: &[&[InterfaceNetwork]]) -> Vec<ProbedMachine> {
        let machine = |networks: &&[InterfaceNetwork]| ProbedMachine {
            networks: networks.to_vec(),
            ..ProbedMachine::default()
        };
        networks.iter().map(machine).collect()
    }

    fn first_addresses(cables: usize, networks: &[&[InterfaceNetwork]]) -> Vec<String> {
        let graph = graph(2, &vec![(0, 1); cables]);
        let given = Addresses::assign(&graph, &machines(networks)).unwrap();
        given
            .cables
            .iter()
            .map(|(_, from, to)| format!("{from} {to}"))
            .collect()
    }

    #[test]
    fn each_cable_has_a_network() {
        let found = first_addresses(65, &[]);
        assert_eq!(found[0], "192.168.0.1 192.168.0.2");
        assert_eq!(found[1], "192.168.0.5 192.168.0.6");
        assert_eq!(found[63], "192.168.0.253 192.168.0.254");
        assert_eq!(found[64], "192.168.1.1 192.168.1.2");
    }

    #[test]
    fn networks_in_use_are_left_alone() {
        let home = network("en0", [192, 168, 0, 17], 24);
        let guest = network("en1", [192, 168, 1, 6], 32);
        assert_eq!(
            first_addresses(1, &[&[], std::slice::from_ref(&home)]),
            ["192.168.1.1 192.168.1.2"]
        );
        assert_eq!(
            first_addresses(2, &[&[home, guest]]),
            ["192.168.1.1 192.168.1.2", "192.168.1.9 192.168.1.10"]
        );
        // Addresses of the last setup, and of the removed bridge, do not block.
        let ours = network("en2", [192, 168, 0, 1], 30);
        let bridge = network("bridge0", [192, 168, 0, 1], 16);
        assert_eq!(
            first_addresses(1, &[&[ours, bridge]]),
            ["192.168.0.1 192.168.0.2"]
        );
        let all = network("en0", [192, 168, 3, 4], 16);
        let error = Addresses::assign(&graph(2, &[(0, 1)]), &machines(&[&[all]])).unwrap_err();
        assert_eq!(error, Error::NoNetworks { cables: 1 });
    }

    #[test]
    fn networks_are_read() {
        let mac = "lo0: flags=8049<UP> mtu 16384\n\tinet 127.0.0.1 netmask 0xff000000\n\
                   en0: flags=8863<UP>\n\tether x\n\tinet6 fe80::1%en0 prefixlen 64\n\
                   \tinet 10.0.0.7 netmask 0xffffff00 broadcast 10.0.0.255\n\
                   utun4: flags=8051<UP>\n\tinet 100.64.0.1 --> 100.64.0.1 netmask 0xffffffff\n";
        assert_eq!(
            InterfaceNetwork::of_ifconfig(mac),
            [
                network("lo0", [127, 0, 0, 1], 8),
                network("en0", [10, 0, 0, 7], 24),
                network("utun4", [100, 64, 0, 1], 32),
            ]
        );
        let linux = "1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever\n\
                     2: eth0    inet 10.0.0.7/24 brd 10.0.0.255 scope global eth0\nnonsense\n";
        assert_eq!(
            InterfaceNetwork::of_ip(linux),
            [
                network("lo", [127, 0, 0, 1], 8),
                network("eth0", [10, 0, 0, 7], 24),
            ]
        );
    }
}
