//! `paceline doctor --peer HOST`: what keeps this machine and another one apart, in both
//! directions.

use std::time::Duration;

use paceline_cluster::nodes::agent::{Agent, Finding, Test, local};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Check, State, line};
use crate::output::{print, printable};
use crate::{home, member};

/// Longest silence of a node that tests: each test has a few seconds.
const SILENCE: Duration = Duration::from_secs(30);

/// Tests and prints each finding as it is made. What is found is no failure.
///
/// # Errors
/// A node that can be neither asked nor started.
pub(super) fn run(host: &str, as_json: bool) -> anyhow::Result<()> {
    let mut checks = Vec::new();
    let mut told = |finding: &Finding| {
        let check = check(finding, host);
        if !as_json {
            // A reader that is gone is told at the end.
            let _ = print(&line(&check));
        }
        checks.push(check);
    };
    let home = home::folder()?;
    let asked = local::ask(
        &home,
        "examine",
        json!({ "peer": host }),
        SILENCE,
        |value| {
            if let Ok(finding) = Finding::deserialize(&value) {
                told(&finding);
            }
        },
    );
    match asked {
        Err(local::Error::NotUp) => {
            let agent = Agent::start(member::at_rest()?)?;
            agent.examine(host, |finding| told(&finding));
            agent.stop();
        }
        asked => drop::<Value>(asked?),
    }
    match as_json {
        true => print(&json!({ "peer": host, "checks": checks }).to_string()),
        false => Ok(()),
    }
}

fn check(finding: &Finding, host: &str) -> Check {
    Check {
        name: name(finding.test),
        state: match finding.ok {
            true => State::Ok,
            false => State::Blocked,
        },
        found: printable(&finding.found).into_owned(),
        mend: (!finding.ok).then(|| mend(finding, host)),
    }
}

const fn name(test: Test) -> &'static str {
    match test {
        Test::Address => "address",
        Test::Control => "control port there",
        Test::ControlBack => "control port here",
        Test::Membership => "cluster",
        Test::Clock => "clock",
        Test::Data => "data port there",
        Test::DataBack => "data port here",
        Test::Multicast => "multicast from there",
        Test::MulticastBack => "multicast from here",
        Test::Mtu => "packet size",
    }
}

/// The command that mends a finding, and the machine to run it on.
fn mend(finding: &Finding, host: &str) -> String {
    let port = finding.port.unwrap_or(0);
    let open = |on: &str| match cfg!(target_os = "macos") {
        true => format!(
            "on {on}: System Settings, Network, Firewall: allow paceline; Privacy, Local Network: \
             allow it too"
        ),
        false => format!(
            "on {on}: ufw allow {port}/tcp, or nft insert rule inet filter input tcp dport {port} \
             accept"
        ),
    };
    let data = |on: &str| {
        format!(
            "{} (paceline up --data-ports 52500-52599 keeps to ports that can be opened)",
            open(on)
        )
    };
    match finding.test {
        Test::Address => "name it by its IP address, or add it to /etc/hosts".to_owned(),
        Test::Control if finding.found.contains("refuses") => {
            format!("on {host}: paceline up")
        }
        Test::Control => open(host),
        Test::ControlBack => open("this machine"),
        Test::Membership => format!(
            "on {host}: paceline key cluster show > token; here: paceline join --token-file token"
        ),
        Test::Clock => "on both machines: timedatectl set-ntp true (macOS: sudo sntp -sS \
                        time.apple.com)"
            .to_owned(),
        Test::Data => data(host),
        Test::DataBack => data("this machine"),
        Test::Multicast | Test::MulticastBack => format!(
            "here: paceline up --peer {host}, which needs no multicast; or let UDP port 52417 in on \
             both machines: ufw allow 52417/udp"
        ),
        Test::Mtu => match &finding.interface {
            Some((interface, here)) => {
                let on = if *here { "this machine" } else { host };
                format!("on {on}: ip link set {interface} mtu 1500, unless it is a tunnel")
            }
            None => "nothing, if a VPN is between: transfers are a little slower".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_comes_with_a_command() {
        let finding = |test, port| Finding {
            test,
            ok: false,
            found: "it is not".to_owned(),
            port,
            interface: Some(("eth0".to_owned(), false)),
        };
        for (test, port, part) in [
            (Test::Control, Some(52416), "on mini: ufw allow 52416/tcp"),
            (
                Test::ControlBack,
                Some(1),
                "on this machine: ufw allow 1/tcp",
            ),
            (Test::Data, Some(7), "--data-ports"),
            (Test::Clock, None, "timedatectl"),
            (Test::Multicast, None, "paceline up --peer mini"),
            (Test::Mtu, None, "on mini: ip link set eth0 mtu 1500"),
        ] {
            let check = check(&finding(test, port), "mini");
            assert_eq!(check.state, State::Blocked);
            let mend = check.mend.unwrap();
            assert!(cfg!(target_os = "macos") || mend.contains(part), "{mend}");
        }
    }
}
