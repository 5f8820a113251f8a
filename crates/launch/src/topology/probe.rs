//! Probes all machines at once, in one session each, for their ports, devices and addresses.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use super::{Error, InterfaceNetwork, Port, ports};
use crate::hostfile::Host;
use crate::marks::{Marks, StreamPart, token};
use crate::remote::{Error as RemoteError, SshClient};

/// Interfaces of containers and virtual machines: their networks are the same on every host, and
/// lead nowhere.
const VIRTUAL: [&str; 7] = ["lo", "docker", "br-", "veth", "virbr", "cni", "flannel"];

/// The facts to probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeScope {
    /// Addresses only.
    Ethernet,
    /// Ports, devices and addresses.
    Thunderbolt,
}

/// The facts of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProbedMachine {
    pub ports: Vec<Port>,
    /// Whether it lists RDMA devices.
    pub has_rdma: bool,
    /// Its address on the ordinary network: of `en0`, else `en1`; on Linux of the network that all
    /// hosts share, else of the default route.
    pub address: Option<String>,
    pub networks: Vec<InterfaceNetwork>,
    /// Whether `sudo` runs without a password.
    pub can_sudo: bool,
    /// On Linux the interface of the default route.
    pub route: Option<String>,
}

/// Probes all `hosts`; results are in their order. Takes at most `limit`.
pub fn probe(
    reach: &SshClient,
    hosts: &[String],
    wanted: ProbeScope,
    limit: Duration,
) -> Vec<Result<ProbedMachine, Error>> {
    let mut answers = thread::scope(|scope| {
        let each = hosts.iter();
        let asked: Vec<_> = each
            .map(|host| scope.spawn(move || one(reach, host, wanted, limit)))
            .collect();
        let answers = asked.into_iter().map(|thread| {
            let answer = thread.join();
            answer.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        answers.collect::<Vec<_>>()
    });
    let mut linux: Vec<&mut ProbedMachine> = answers
        .iter_mut()
        .flatten()
        .filter(|machine| machine.address.is_none())
        .collect();
    choose_addresses(&mut linux);
    answers
}

/// Probed hosts; errors of hosts that are left out; errors that count.
pub type ProbeResults = (Vec<(Host, ProbedMachine)>, Vec<Error>, Vec<Error>);

/// Sorts `answers` of `hosts`. With `ignores`, hosts without an answer are left out.
pub fn sorted(
    hosts: Vec<Host>,
    answers: Vec<Result<ProbedMachine, Error>>,
    ignores: bool,
) -> ProbeResults {
    let (mut both, mut left_out, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    for (host, answer) in hosts.into_iter().zip(answers) {
        match answer {
            Ok(machine) => both.push((host, machine)),
            Err(error @ (Error::Unreachable { .. } | Error::Late { .. })) if ignores => {
                left_out.push(error);
            }
            Err(error) => failed.push(error),
        }
    }
    (both, left_out, failed)
}

fn one(
    reach: &SshClient,
    host: &str,
    wanted: ProbeScope,
    limit: Duration,
) -> Result<ProbedMachine, Error> {
    let name = || host.to_owned();
    let token = token();
    let answer = reach.run_script(host, &script(&token, wanted), limit);
    let answer = answer.map_err(|error| match error {
        RemoteError::Late { limit } => Error::Late {
            host: name(),
            limit,
        },
        error @ RemoteError::Start { .. } => Error::Unreachable {
            host: name(),
            why: error.to_string(),
        },
    })?;
    let said = sections(&token, &answer.stdout);
    if !said.contains_key("end") {
        let text = String::from_utf8_lossy(&answer.stderr);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        let why = last.map(|line| line.trim().to_owned());
        return Err(Error::Unreachable {
            host: name(),
            why: why.unwrap_or_else(|| format!("its shell {}", answer.ending)),
        });
    }
    machine(host, wanted, &said)
}

/// A script that prints each fact between marks; `end` comes last.
fn script(token: &str, wanted: ProbeScope) -> String {
    let mut text = format!(
        "{{\nask() {{ n=$1; shift; printf '\\036{token} %s\\n' \"$n\"; \
         \"$@\" 2>/dev/null </dev/null; }}\n"
    );
    let mut ask = |name: &str, command: &str| text += &format!("ask {name} {command}\n");
    if wanted == ProbeScope::Thunderbolt {
        ask("profiler", "system_profiler SPThunderboltDataType -json");
        ask("hardware", "networksetup -listallhardwareports");
        ask("devices", "ibv_devices");
        ask("sudo", "sudo -n echo yes");
    }
    ask("en0", "ipconfig getifaddr en0");
    ask("en1", "ipconfig getifaddr en1");
    ask("ifconfig", "ifconfig -a");
    ask("ip", "ip -4 -o addr show");
    ask("route", "ip -4 route show default");
    text + &format!("printf '\\036{token} end\\n'\nexit 0\n}}\n")
}

/// The facts by name.
fn sections(token: &str, stdout: &[u8]) -> BTreeMap<String, String> {
    let mut found: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut current = None;
    let mut note = |piece: StreamPart<'_>| match piece {
        StreamPart::Mark(name) => {
            found.entry(name.to_owned()).or_default();
            current = Some(name.to_owned());
        }
        StreamPart::Text(bytes) => {
            let entry = current.as_ref().and_then(|name| found.get_mut(name));
            entry
                .into_iter()
                .for_each(|text| text.extend_from_slice(bytes));
        }
    };
    let mut marks = Marks::new(token);
    marks.feed(stdout, &mut note);
    marks.finish(note);
    let text = |(name, bytes): (String, Vec<u8>)| (name, String::from_utf8_lossy(&bytes).into());
    found.into_iter().map(text).collect()
}

fn machine(
    host: &str,
    wanted: ProbeScope,
    said: &BTreeMap<String, String>,
) -> Result<ProbedMachine, Error> {
    let text = |name: &str| said.get(name).map_or("", String::as_str);
    let first = |name: &str| {
        let text = text(name).trim();
        (!text.is_empty()).then(|| text.to_owned())
    };
    let mut networks = InterfaceNetwork::of_ifconfig(text("ifconfig"));
    networks.extend(InterfaceNetwork::of_ip(text("ip")));
    let mut machine = ProbedMachine {
        address: first("en0").or_else(|| first("en1")),
        networks,
        can_sudo: text("sudo").trim() == "yes",
        route: after(text("route"), "dev"),
        ..ProbedMachine::default()
    };
    if wanted == ProbeScope::Thunderbolt {
        machine.ports = ports(host, text("profiler"), text("hardware"))?;
        let mut devices = text("devices").split_whitespace();
        machine.has_rdma = devices.any(|word| word.starts_with("rdma_"));
    }
    Ok(machine)
}

/// For fuzzing: parses `bytes` as a machine's output.
pub(super) fn parse(bytes: &[u8]) {
    let said = sections("token", bytes);
    let asked = [ProbeScope::Ethernet, ProbeScope::Thunderbolt]
        .map(|wanted| machine("host", wanted, &said));
    let mut machines: Vec<ProbedMachine> = asked.into_iter().flatten().collect();
    choose_addresses(&mut machines.iter_mut().collect::<Vec<_>>());
}

fn after(text: &str, word: &str) -> Option<String> {
    let mut words = text.split_whitespace().skip_while(|found| *found != word);
    words.nth(1).map(str::to_owned)
}

/// Chooses addresses of machines without `ipconfig`.
fn choose_addresses(machines: &mut [&mut ProbedMachine]) {
    let candidates = |machine: &ProbedMachine| -> Vec<InterfaceNetwork> {
        let real = |network: &&InterfaceNetwork| {
            let name = &network.interface;
            !VIRTUAL.iter().any(|prefix| name.starts_with(prefix)) && !network.address.is_loopback()
        };
        machine.networks.iter().filter(real).cloned().collect()
    };
    let all: Vec<Vec<InterfaceNetwork>> =
        machines.iter().map(|machine| candidates(machine)).collect();
    let Some(first) = all.first() else {
        return;
    };
    let in_same = |of: &InterfaceNetwork, list: &[InterfaceNetwork]| {
        let same = |other: &&InterfaceNetwork| other.prefix == of.prefix && of.shares(other);
        list.iter().find(same).map(|network| network.address)
    };
    let shared = first
        .iter()
        .find(|network| all.iter().all(|list| in_same(network, list).is_some()));
    for (machine, list) in machines.iter_mut().zip(&all) {
        let by_route = || {
            let route = machine.route.as_ref();
            list.iter()
                .find(|network| route == Some(&network.interface))
        };
        let address = shared.and_then(|network| in_same(network, list));
        let address = address.or_else(|| by_route().or(list.first()).map(|n| n.address));
        machine.address = address.map(|address| address.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        let entries = entries
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        entries.collect()
    }

    fn linux(ip: &str, route: &str) -> ProbedMachine {
        machine(
            "h",
            ProbeScope::Ethernet,
            &said(&[("ip", ip), ("route", route)]),
        )
        .unwrap()
    }

    fn addresses(machines: Vec<ProbedMachine>) -> Vec<Option<String>> {
        let mut machines = machines;
        let mut all: Vec<&mut ProbedMachine> = machines.iter_mut().collect();
        choose_addresses(&mut all);
        machines
            .into_iter()
            .map(|machine| machine.address)
            .collect()
    }

    #[test]
    fn macs_have_the_address_of_en0_or_en1() {
        let address = |entries| {
            machine("h", ProbeScope::Ethernet, &said(entries))
                .unwrap()
                .address
        };
        assert_eq!(
            address(&[("en0", "10.0.0.1\n"), ("en1", "10.0.0.2\n")]).unwrap(),
            "10.0.0.1"
        );
        assert_eq!(
            address(&[("en0", "\n"), ("en1", "10.0.0.2\n")]).unwrap(),
            "10.0.0.2"
        );
        assert_eq!(address(&[]), None);
    }

    #[test]
    fn linux_hosts_have_the_address_of_the_network_they_share() {
        let docker = "3: docker0    inet 172.17.0.1/16 scope global docker0\n";
        let a = linux(
            &format!(
                "1: lo    inet 127.0.0.1/8 scope host lo\n{docker}2: wlan0 inet 10.9.0.1/24 x\n4: eth1 inet 10.0.5.1/24 x\n"
            ),
            "default via 10.9.0.254 dev wlan0\n",
        );
        let b = linux(&format!("{docker}4: eth1    inet 10.0.5.2/24 x\n"), "");
        let found = addresses(vec![a.clone(), b]);
        assert_eq!(
            found,
            [Some("10.0.5.1".to_owned()), Some("10.0.5.2".to_owned())]
        );
        let elsewhere = linux("2: eth0    inet 192.0.2.7/24 x\n", "");
        let found = addresses(vec![a, elsewhere]);
        assert_eq!(
            found,
            [Some("10.9.0.1".to_owned()), Some("192.0.2.7".to_owned())]
        );
        assert_eq!(addresses(vec![linux(docker, "")]), [None]);
    }

    #[test]
    fn answers_are_told_apart() {
        let text = b"motd\n\x1etok en0\n10.0.0.1\n\x1etok en1\n\x1etok ip\nx\x1etok end\n";
        let found = sections("tok", text);
        let expected = [("en0", "10.0.0.1\n"), ("en1", ""), ("ip", "x"), ("end", "")];
        assert_eq!(found, said(&expected));
    }

    #[test]
    fn a_host_that_is_no_mac_is_named() {
        let limit = Duration::from_secs(20);
        let reach = SshClient::new("/nonexistent/ssh", None);
        let hosts = ["127.0.0.1".to_owned(), "elsewhere".to_owned()];
        let found = probe(&reach, &hosts, ProbeScope::Thunderbolt, limit);
        if !cfg!(target_os = "macos") {
            let error = found[0].as_ref().unwrap_err().to_string();
            assert!(
                error.starts_with("127.0.0.1 says nothing about Thunderbolt: "),
                "{error}"
            );
        }
        assert!(matches!(&found[1], Err(Error::Unreachable { host, .. }) if host == "elsewhere"));
    }
}
