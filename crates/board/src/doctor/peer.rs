//! Obstacles between this machine and another, in both directions, with remedies.

use paceline_base::printable;
use paceline_cluster::nodes::agent::{Finding, Test};

use super::{HealthCheck, State};

/// Converts a finding about `host` into a check.
pub fn check(finding: &Finding, host: &str) -> HealthCheck {
    HealthCheck {
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
            "here: paceline nodes invite; on {host}: paceline join CODE (the other way round, if the \
             cluster of {host} is to stay)"
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
            // A token would take this machine out of its own cluster.
            (
                Test::Membership,
                None,
                "here: paceline nodes invite; on mini: paceline join CODE",
            ),
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
