//! Obstacles to connections from other machines, each with its remedy.

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, SystemTime};

use paceline_cluster::network::{self, ClockSync, Firewall, Guard, Interface, SOCKETFILTERFW};
use paceline_cluster::nodes::agent::DEFAULT_PORT as CONTROL_PORT;
use paceline_cluster::nodes::discovery::{BEACON_PORT, Probe};
use paceline_serve::DEFAULT_PORT as API_PORT;

use super::HealthCheck;

/// Ethernet's standard MTU.
const MTU_USUAL: u32 = 1500;

/// Listening time for multicast, which is sent several times a second.
const HEAR: Duration = Duration::from_millis(1200);

/// The error of macOS for a program that may not use the local network (`EHOSTUNREACH`).
const NOT_ALLOWED: i32 = 65;

/// All checks of networks; takes about a second.
pub(super) fn checks(is_up: bool) -> Vec<HealthCheck> {
    let interfaces = network::interfaces();
    vec![
        ports(&taken(), is_up),
        firewall(network::firewall().as_ref()),
        multicast(hears_itself()),
        tunnels(&interfaces),
        mtu(&interfaces),
        clock(network::clock()),
    ]
}

/// A node's ports that are in use.
fn taken() -> Vec<u16> {
    let is_taken = |port: &u16| {
        let bound = TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port));
        bound.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
    };
    [API_PORT, CONTROL_PORT]
        .into_iter()
        .filter(is_taken)
        .collect()
}

fn ports(taken: &[u16], is_up: bool) -> HealthCheck {
    let all = format!("{API_PORT} (API), {CONTROL_PORT} (control), {BEACON_PORT} (beacons, UDP)");
    match taken {
        [] => HealthCheck::ok("ports", format!("{all} are free")),
        _ if is_up => HealthCheck::ok(
            "ports",
            format!("this machine's node runs; by default it has {all}"),
        ),
        [port, ..] => {
            let option = if *port == API_PORT {
                "--port"
            } else {
                "--control-port"
            };
            HealthCheck::doubtful(
                "ports",
                format!("another program has port {port}"),
                format!(
                    "paceline up {option} {}, or end it: lsof -i :{port}",
                    port + 1000
                ),
            )
        }
    }
}

fn firewall(guard: Option<&Guard>) -> HealthCheck {
    let Some(guard) = guard else {
        return HealthCheck::ok("firewall", "none is seen to be on");
    };
    let name = match guard.firewall {
        Firewall::Ufw => "ufw",
        Firewall::Firewalld => "firewalld",
        Firewall::Nft => "nftables",
        Firewall::Mac => "the application firewall",
    };
    let is_named = match guard.firewall {
        Firewall::Mac => guard.rules.as_ref().map(|rules| rules.contains("paceline")),
        _ => guard.names_port(CONTROL_PORT),
    };
    let found = match is_named {
        Some(true) => {
            return HealthCheck::ok("firewall", format!("{name} is on and lets paceline in"));
        }
        Some(false) => format!("{name} is on, and no rule lets other machines in"),
        None => format!("{name} is on; only root sees whether it lets other machines in"),
    };
    HealthCheck::doubtful("firewall", found, let_in(guard.firewall))
}

/// The command that opens a firewall to other machines.
fn let_in(firewall: Firewall) -> String {
    match firewall {
        Firewall::Ufw => format!(
            "sudo ufw allow {CONTROL_PORT}/tcp && sudo ufw allow {BEACON_PORT}/udp, and a range for \
             paceline up --data-ports"
        ),
        Firewall::Firewalld => format!(
            "sudo firewall-cmd --permanent --add-port={CONTROL_PORT}/tcp \
             --add-port={BEACON_PORT}/udp && sudo firewall-cmd --reload, and a range for paceline up \
             --data-ports"
        ),
        Firewall::Nft => format!(
            "sudo nft insert rule inet filter input tcp dport {CONTROL_PORT} accept && sudo nft \
             insert rule inet filter input udp dport {BEACON_PORT} accept, and a range for paceline \
             up --data-ports"
        ),
        Firewall::Mac => {
            format!(
                "sudo {SOCKETFILTERFW} --add \"$(which paceline)\" --unblockapp \"$(which paceline)\""
            )
        }
    }
}

/// Networks that deliver this machine's own multicast, or why it cannot send any.
fn hears_itself() -> std::io::Result<Vec<String>> {
    let mut listener = Probe::open()?;
    let mut speaker = Probe::open()?;
    if let Some(error) = speaker.refused() {
        return Err(error);
    }
    let since = SystemTime::UNIX_EPOCH.elapsed();
    let nonce = since.map_or(1, |since| since.as_nanos() as u64);
    let speaking = std::thread::Builder::new().spawn(move || speaker.say(nonce))?;
    let heard = listener.hear(nonce, HEAR);
    let _ = speaking.join(); // it has no result
    Ok(heard)
}

fn multicast(heard: std::io::Result<Vec<String>>) -> HealthCheck {
    let by_name = "paceline up --peer HOST, which needs no multicast";
    match heard {
        Ok(heard) if heard.is_empty() => HealthCheck::doubtful(
            "multicast",
            "this machine does not hear its own: it is blocked, or there is no network",
            format!("sudo ufw allow {BEACON_PORT}/udp; or {by_name}"),
        ),
        Ok(heard) => HealthCheck::ok("multicast", format!("passes over {}", heard.join(", "))),
        Err(error) if cfg!(target_os = "macos") && error.raw_os_error() == Some(NOT_ALLOWED) => {
            HealthCheck::doubtful(
                "multicast",
                "macOS keeps this program from the local network",
                "System Settings, Privacy & Security, Local Network: allow the terminal, or \
                 paceline where it runs by itself; then start it again",
            )
        }
        Err(error) => {
            HealthCheck::doubtful("multicast", format!("cannot be sent: {error}"), by_name)
        }
    }
}

fn tunnels(all: &[Interface]) -> HealthCheck {
    let tunnels: Vec<&str> = all.iter().filter(|one| one.is_tunnel).map(name).collect();
    let other = all.iter().find(|one| !one.is_tunnel).map(name);
    if tunnels.is_empty() {
        return HealthCheck::ok("vpn", "no tunnel is up");
    }
    HealthCheck::doubtful(
        "vpn",
        format!(
            "{}: other machines may be reached through it, slowly",
            tunnels.join(", ")
        ),
        format!(
            "paceline up --data-interface {} keeps data off it",
            other.unwrap_or("eth0")
        ),
    )
}

fn mtu(all: &[Interface]) -> HealthCheck {
    let usual = all.iter().filter(|one| !one.is_tunnel);
    let mut small =
        usual.filter_map(|one| Some((name(one), one.mtu.filter(|mtu| *mtu < MTU_USUAL)?)));
    if let Some((name, mtu)) = small.next() {
        let found = format!("{name} takes packets of {mtu} bytes, usual are {MTU_USUAL}");
        let mend = match cfg!(target_os = "macos") {
            true => format!("sudo ifconfig {name} mtu {MTU_USUAL}"),
            false => format!("sudo ip link set {name} mtu {MTU_USUAL}"),
        };
        return HealthCheck::doubtful("packet size", found, mend);
    }
    let told = all
        .iter()
        .filter_map(|one| Some(format!("{} {}", one.name, one.mtu?)));
    let told: Vec<String> = told.collect();
    match told.is_empty() {
        true => HealthCheck::absent("packet size", "the system does not say"),
        false => HealthCheck::ok("packet size", told.join(", ")),
    }
}

fn clock(clock: Option<ClockSync>) -> HealthCheck {
    let mend = match cfg!(target_os = "macos") {
        true => "sudo sntp -sS time.apple.com",
        false => "sudo timedatectl set-ntp true",
    };
    match clock {
        None => HealthCheck::absent("clock", "the system does not say who keeps it"),
        Some(ClockSync::Kept) => HealthCheck::ok("clock", "kept by time servers"),
        Some(ClockSync::Free) => HealthCheck::doubtful(
            "clock",
            "kept by no time server: machines whose clocks are over 60 s apart refuse each other",
            mend,
        ),
        Some(ClockSync::Off(ms)) => {
            HealthCheck::doubtful("clock", format!("{:.1} s off", ms as f64 / 1e3), mend)
        }
    }
}

fn name(one: &Interface) -> &str {
    &one.name
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn interface(name: &str, mtu: u32, is_tunnel: bool) -> Interface {
        Interface {
            name: name.to_owned(),
            mtu: Some(mtu),
            is_tunnel,
        }
    }

    fn mend(check: HealthCheck) -> String {
        assert_eq!(check.state, State::Doubtful, "{check:?}");
        check.mend.unwrap()
    }

    #[test]
    fn each_finding_comes_with_a_command() {
        assert_eq!(ports(&[], false).state, State::Ok);
        assert_eq!(
            ports(&[CONTROL_PORT], true).state,
            State::Ok,
            "the node's own"
        );
        assert!(mend(ports(&[CONTROL_PORT], false)).contains("--control-port 53416"));
        assert!(mend(ports(&[API_PORT], false)).contains("--port 53415"));
        let both = [interface("eth0", 1500, false), interface("wg0", 1420, true)];
        assert!(mend(tunnels(&both)).contains("--data-interface eth0"));
        assert_eq!(tunnels(&both[..1]).state, State::Ok);
        assert_eq!(mtu(&both).state, State::Ok, "tunnels are smaller");
        assert!(mend(mtu(&[interface("eth0", 1280, false)])).contains("eth0 mtu 1500"));
        assert_eq!(mtu(&[]).state, State::Absent);
        assert_eq!(clock(Some(ClockSync::Kept)).state, State::Ok);
        assert_eq!(clock(None).state, State::Absent);
        for off in [ClockSync::Free, ClockSync::Off(7500)] {
            assert!(mend(clock(Some(off))).starts_with("sudo "));
        }
        assert_eq!(multicast(Ok(vec!["IPv4".to_owned()])).state, State::Ok);
        for blocked in [
            Ok(Vec::new()),
            Err(std::io::ErrorKind::NetworkUnreachable.into()),
        ] {
            assert!(mend(multicast(blocked)).contains("--peer HOST"));
        }
    }

    #[test]
    fn a_firewall_is_let_in_by_its_own_command() {
        assert_eq!(firewall(None).state, State::Ok);
        for (of, rule, command) in [
            (Firewall::Ufw, "52416/tcp", "ufw allow 52416/tcp"),
            (Firewall::Firewalld, "52416/tcp", "--add-port=52416/tcp"),
            (Firewall::Nft, "dport 52416", "tcp dport 52416 accept"),
            (Firewall::Mac, "1 : /usr/local/bin/paceline", "--unblockapp"),
        ] {
            let guard = |rules: Option<&str>| Guard {
                firewall: of,
                rules: rules.map(str::to_owned),
            };
            assert_eq!(firewall(Some(&guard(Some(rule)))).state, State::Ok);
            for unknown in [Some("22/tcp"), None] {
                assert!(mend(firewall(Some(&guard(unknown)))).contains(command));
            }
        }
    }
}
