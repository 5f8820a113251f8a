//! This machine's networks, and what blocks other machines: firewalls, tunnels, settings. Read from
//! the system's files and programs; every value may be absent.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use crate::machine::{ask, first_line};

/// Folder of Linux's device information.
const SYS: &str = "/sys";

/// Name prefixes of tunnels.
const TUNNELS: [&str; 9] = [
    "tun",
    "tap",
    "utun",
    "wg",
    "ppp",
    "ipsec",
    "tailscale",
    "zt",
    "nordlynx",
];

/// Kind of a device without hardware addresses in the kernel of Linux, such as a tunnel
/// (`ARPHRD_NONE`, linux/if_arp.h).
const NO_HARDWARE: &str = "65534";

/// A network interface with addresses, loopback not among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    /// Largest packet in bytes, if the system reports it.
    pub mtu: Option<u32>,
    /// Whether it is a tunnel, such as that of a VPN.
    pub is_tunnel: bool,
}

/// The interfaces of this machine, by name.
pub fn interfaces() -> Vec<Interface> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    let mut addresses: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for one in all.iter().filter(|one| !one.is_loopback()) {
        addresses
            .entry(one.name.clone())
            .or_default()
            .push(one.ip());
    }
    let interface = |(name, addresses): (String, Vec<IpAddr>)| Interface {
        mtu: mtu(Path::new(SYS), &name),
        is_tunnel: is_tunnel(Path::new(SYS), &name, &addresses),
        name,
    };
    addresses.into_iter().map(interface).collect()
}

/// This machine's addresses that other machines may reach: no loopback ones, and none that are
/// valid on one link only.
pub fn addresses() -> Vec<IpAddr> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    let is_wide = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    let mut found: Vec<IpAddr> = all.iter().map(|one| one.ip()).filter(is_wide).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The interface with this address.
pub fn interface_of(address: IpAddr) -> Option<String> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    all.into_iter()
        .find(|one| one.ip() == address)
        .map(|one| one.name)
}

fn mtu(sys: &Path, name: &str) -> Option<u32> {
    let file = sys.join("class/net").join(name).join("mtu");
    if let Ok(text) = fs::read_to_string(file) {
        return text.trim().parse().ok();
    }
    let text = first_line("ifconfig", &[name])?;
    let (_, rest) = text.split_once(" mtu ")?;
    rest.split_whitespace().next()?.parse().ok()
}

/// macOS has its own tunnels, `utun0` and on, without an IPv4 address.
fn is_tunnel(sys: &Path, name: &str, addresses: &[IpAddr]) -> bool {
    let kind = fs::read_to_string(sys.join("class/net").join(name).join("type"));
    let is_one = TUNNELS.iter().any(|tunnel| name.starts_with(tunnel));
    let is_used = !name.starts_with("utun") || addresses.iter().any(IpAddr::is_ipv4);
    kind.is_ok_and(|kind| kind.trim() == NO_HARDWARE) || (is_one && is_used)
}

/// A firewall that may block other machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firewall {
    /// Ubuntu's.
    Ufw,
    /// Fedora's.
    Firewalld,
    /// nftables rules that drop packets by default.
    Nft,
    Mac,
}

/// The macOS program that shows and sets its firewall.
pub const SOCKETFILTERFW: &str = "/usr/libexec/ApplicationFirewall/socketfilterfw";

/// An active firewall, and its rules if this user may read them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    pub firewall: Firewall,
    /// Its rules; `None` if only root may read them.
    pub rules: Option<String>,
}

impl Guard {
    /// Whether a rule names this port; `None` if only root may read the rules.
    pub fn names_port(&self, port: u16) -> Option<bool> {
        let rules = self.rules.as_ref()?;
        let number = port.to_string();
        let is_it = |word: &str| match word.split_once(['-', ':']) {
            Some((first, last)) => {
                let ends = first.parse::<u16>().ok().zip(last.parse::<u16>().ok());
                ends.is_some_and(|(first, last)| (first..=last).contains(&port))
            }
            None => word == number,
        };
        let mut words =
            rules.split(|c: char| c.is_whitespace() || matches!(c, '/' | ',' | '{' | '}'));
        Some(words.any(is_it))
    }
}

/// The active firewall, if there is one.
pub fn firewall() -> Option<Guard> {
    if cfg!(target_os = "macos") {
        let state = first_line(SOCKETFILTERFW, &["--getglobalstate"])?;
        let rules = ask(SOCKETFILTERFW, &["--listapps"]);
        let firewall = Firewall::Mac;
        return state
            .contains("enabled")
            .then_some(Guard { firewall, rules });
    }
    let ufw = fs::read_to_string("/etc/ufw/ufw.conf").unwrap_or_default();
    if has_ufw(&ufw) {
        let rules = ask("ufw", &["status"]).filter(|text| text.contains("Status: active"));
        let firewall = Firewall::Ufw;
        return Some(Guard { firewall, rules });
    }
    if first_line("firewall-cmd", &["--state"]).is_some_and(|state| state == "running") {
        let rules = ask("firewall-cmd", &["--list-ports"]);
        let firewall = Firewall::Firewalld;
        return Some(Guard { firewall, rules });
    }
    let rules = ask("nft", &["list", "ruleset"]).filter(|rules| drops_input(rules))?;
    Some(Guard {
        firewall: Firewall::Nft,
        rules: Some(rules),
    })
}

fn has_ufw(settings: &str) -> bool {
    settings.lines().any(|line| line.trim() == "ENABLED=yes")
}

/// Whether an input chain drops packets by default.
fn drops_input(rules: &str) -> bool {
    let mut lines = rules.lines();
    lines.any(|line| line.contains("hook input") && line.contains("policy drop"))
}

/// Synchronisation of this machine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockSync {
    /// Synchronised by time servers.
    Kept,
    /// Not synchronised.
    Free,
    /// Synchronisation unknown; this many milliseconds off a time server.
    Off(u64),
}

/// Largest offset of a synchronised Mac's clock, in milliseconds.
const KEPT_MS: u64 = 1000;

/// Synchronisation of the clock; `None` if the system does not report it.
pub fn clock() -> Option<ClockSync> {
    if cfg!(target_os = "macos") {
        return offset(&first_line("sntp", &["-t", "2", "time.apple.com"])?);
    }
    let kept = first_line("timedatectl", &["show", "-p", "NTPSynchronized", "--value"])?;
    match kept.as_str() {
        "yes" => Some(ClockSync::Kept),
        "no" => Some(ClockSync::Free),
        _ => None,
    }
}

/// `+0.012345 +/- 0.020000 time.apple.com 17.253.4.253`
fn offset(line: &str) -> Option<ClockSync> {
    let seconds: f64 = line.split_whitespace().next()?.parse().ok()?;
    let ms = (seconds.abs() * 1e3) as u64;
    Some(match ms {
        0..=KEPT_MS => ClockSync::Kept,
        ms => ClockSync::Off(ms),
    })
}

/// RDMA ports without a link, such as `mlx5_0 port 1: DOWN` (Linux).
pub fn idle_rdma_ports() -> Vec<String> {
    idle_rdma_ports_in(Path::new(SYS))
}

fn idle_rdma_ports_in(sys: &Path) -> Vec<String> {
    let mut idle = Vec::new();
    for device in names(&sys.join("class/infiniband")) {
        let ports = sys.join("class/infiniband").join(&device).join("ports");
        for port in names(&ports) {
            let state = fs::read_to_string(ports.join(&port).join("state"));
            let state = state.unwrap_or_default();
            // A number, and its name.
            let state = state.trim().rsplit(' ').next().unwrap_or_default();
            if state != "ACTIVE" {
                idle.push(format!("{device} port {port}: {state}"));
            }
        }
    }
    idle
}

/// Counters of a port's errors (linux/drivers/infiniband/core/sysfs.c). Dropped links are not among
/// them: pulling a cable is no fault.
const ERROR_COUNTERS: [&str; 3] = ["symbol_error", "link_error_recovery", "port_rcv_errors"];

/// Errors of an RDMA device's first port since the system started (Linux).
pub fn rdma_errors(device: &str) -> Option<u64> {
    rdma_errors_in(Path::new(SYS), device)
}

fn rdma_errors_in(sys: &Path, device: &str) -> Option<u64> {
    let folder = sys
        .join("class/infiniband")
        .join(device)
        .join("ports/1/counters");
    let counts = ERROR_COUNTERS.iter().filter_map(|name| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    });
    counts.reduce(u64::saturating_add)
}

/// Errors of an interface since the system started (macOS).
pub fn interface_errors(name: &str) -> Option<u64> {
    let is_mac = cfg!(target_os = "macos") && !name.is_empty();
    errors_of_netstat(&is_mac.then(|| ask("netstat", &["-I", name]))??)
}

/// `en5  9000 <Link#9> 36:..  120 0 130 2 0`: packets and errors in, packets and errors out,
/// collisions; the address may be missing.
fn errors_of_netstat(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("<Link#"))?;
    let mut counts = line.split_whitespace().rev().skip(1).step_by(2).take(2);
    let (sent, received) = (counts.next()?, counts.next()?);
    Some(
        sent.parse::<u64>()
            .ok()?
            .saturating_add(received.parse().ok()?),
    )
}

/// Connected Thunderbolt devices that this machine has not authorised, by their numbers (Linux).
pub fn unauthorised_thunderbolt() -> Vec<String> {
    unauthorised_in(Path::new(SYS))
}

fn unauthorised_in(sys: &Path) -> Vec<String> {
    let folder = sys.join("bus/thunderbolt/devices");
    let is_refused = |name: &String| {
        let told = fs::read_to_string(folder.join(name).join("authorized"));
        told.is_ok_and(|told| told.trim() == "0")
    };
    let devices = names(&folder).into_iter().filter(is_refused);
    let number = |name: String| {
        let uuid = fs::read_to_string(folder.join(&name).join("unique_id"));
        uuid.map_or(name, |uuid| uuid.trim().to_owned())
    };
    devices.map(number).collect()
}

/// Whether macOS has made all Thunderbolt ports one bridge, over which RDMA does not work.
pub fn has_thunderbolt_bridge() -> bool {
    let services = ask("networksetup", &["-listallnetworkservices"]).unwrap_or_default();
    // A disabled one begins with a star.
    services.lines().any(|line| line == "Thunderbolt Bridge")
}

/// Names in a folder, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn tunnels_are_known_by_kind_or_name() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path();
        write(sys, "class/net/office/type", "65534\n");
        write(sys, "class/net/eth0/type", "1\n");
        write(sys, "class/net/eth0/mtu", "1280\n");
        let four: [IpAddr; 1] = ["10.0.0.1".parse().unwrap()];
        let six: [IpAddr; 1] = ["fe80::1".parse().unwrap()];
        for (name, addresses, expected) in [
            ("office", &four, true),
            ("wg0", &four, true),
            ("utun3", &four, true),
            ("utun3", &six, false),
            ("eth0", &four, false),
        ] {
            assert_eq!(is_tunnel(sys, name, addresses), expected, "{name}");
        }
        assert_eq!(mtu(sys, "eth0"), Some(1280));
        let all = interfaces();
        assert!(all.iter().all(|one| one.name != "lo"), "{all:?}");
    }

    #[test]
    fn a_firewalls_rules_name_ports() {
        let guard = |rules: Option<&str>| Guard {
            firewall: Firewall::Ufw,
            rules: rules.map(str::to_owned),
        };
        for (rules, expected) in [
            (Some("52416/tcp  ALLOW  Anywhere"), Some(true)),
            (Some("52400:52420/tcp ALLOW"), Some(true)),
            (Some("52415-52417/tcp 22/tcp"), Some(true)),
            (Some("tcp dport { 22, 52416 } accept"), Some(true)),
            (Some("22/tcp ALLOW 152416"), Some(false)),
            (Some(""), Some(false)),
            (None, None),
        ] {
            assert_eq!(guard(rules).names_port(52416), expected, "{rules:?}");
        }
        assert!(has_ufw("# x\nENABLED=yes\n") && !has_ufw("ENABLED=no\n"));
        let chain = "type filter hook input priority filter; policy drop;";
        assert!(drops_input(chain) && !drops_input(&chain.replace("drop", "accept")));
    }

    #[test]
    fn clocks_are_kept_or_off() {
        let told = |line| offset(line);
        assert_eq!(
            told("+0.012345 +/- 0.02 time.apple.com"),
            Some(ClockSync::Kept)
        );
        assert_eq!(
            told("-7.5 +/- 0.02 time.apple.com"),
            Some(ClockSync::Off(7500))
        );
        assert_eq!(told("sntp: no answer"), None);
    }

    #[test]
    fn devices_that_carry_nothing_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path();
        write(sys, "class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
        write(sys, "class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
        assert_eq!(idle_rdma_ports_in(sys), ["mlx5_1 port 1: DOWN"]);
        let counters = "class/infiniband/mlx5_0/ports/1/counters";
        write(sys, &format!("{counters}/symbol_error"), "3\n");
        write(sys, &format!("{counters}/port_rcv_errors"), "4\n");
        assert_eq!(rdma_errors_in(sys, "mlx5_0"), Some(7));
        assert_eq!(rdma_errors_in(sys, "mlx5_1"), None);
        let netstat = "Name  Mtu   Network  Address            Ipkts Ierrs Opkts Oerrs  Coll\n\
                       en5   9000  <Link#9> 36:aa:bb:cc:dd:00    120     5   130     2     0\n";
        assert_eq!(errors_of_netstat(netstat), Some(7));
        assert_eq!(errors_of_netstat("Name  Mtu\n"), None);
        write(sys, "bus/thunderbolt/devices/0-1/authorized", "0\n");
        write(sys, "bus/thunderbolt/devices/0-1/unique_id", "c0ffee\n");
        write(sys, "bus/thunderbolt/devices/0-0/authorized", "1\n");
        write(sys, "bus/thunderbolt/devices/domain0/security", "user\n");
        assert_eq!(unauthorised_in(sys), ["c0ffee"]);
        assert_eq!(unauthorised_in(Path::new("/nonexistent")), [""; 0]);
    }
}
