//! Checks of RDMA ports, their cables and the heat of a Mac.

use paceline_cluster::machine;
use paceline_cluster::network::{has_thunderbolt_bridge, interface_errors, rdma_errors};
use paceline_cluster::nodes::rdma::RdmaDevice;
use paceline_comm_rdma::{ENABLE_RDMA, RdmaError};
use paceline_launch::topology::{ConnectedPort, connected_ports};

use super::HealthCheck;
use crate::rdma::told;

/// Slowest link of Thunderbolt 5 in Gbit/s. macOS lists RDMA devices on Thunderbolt 4 too, at 40,
/// which carry nothing (exo-explore/exo #1813).
const THUNDERBOLT_5: u32 = 80;

/// Interface of a Mac Studio's port next to Ethernet, without RDMA (exo-explore/exo #1543).
const NEXT_TO_ETHERNET: &str = "en2";

pub(super) fn rdma(devices: Result<Vec<RdmaDevice>, RdmaError>) -> HealthCheck {
    const MAC: bool = cfg!(target_os = "macos");
    match devices {
        Ok(devices) if devices.is_empty() => HealthCheck::absent("rdma", "no device"),
        Ok(_) if MAC && has_thunderbolt_bridge() => HealthCheck::doubtful(
            "rdma",
            "the Thunderbolt ports are one bridge, over which RDMA does not work",
            "sudo networksetup -setnetworkserviceenabled \"Thunderbolt Bridge\" off",
        ),
        Ok(devices) => of_ports(&devices, |device| {
            rdma_errors(&device.name).or_else(|| interface_errors(&device.interface))
        }),
        Err(error) if MAC => HealthCheck::missing("rdma", error.to_string(), ENABLE_RDMA),
        // The library exists, but the kernel has no devices.
        Err(error @ RdmaError::NoList { .. }) => HealthCheck::absent("rdma", error.to_string()),
        Err(error) => HealthCheck::missing(
            "rdma",
            error.to_string(),
            "apt install libibverbs1 ibverbs-providers",
        ),
    }
}

/// Checks ports; `errors` counts those of a device since the system started.
fn of_ports(devices: &[RdmaDevice], errors: impl Fn(&RdmaDevice) -> Option<u64>) -> HealthCheck {
    let all: Vec<String> = devices.iter().map(told).collect();
    let found = all.join("; ");
    let mut active = devices.iter().filter(|it| it.problem.is_none()).peekable();
    if active.peek().is_none() {
        let mend = "plug the cable in, and `sudo ip link set IF up` for its interface, which `rdma \
                    link` names";
        return HealthCheck::doubtful("rdma", found, mend);
    }
    let faulty = active.find_map(|it| Some((it, errors(it).filter(|count| *count > 0)?)));
    match faulty {
        None => HealthCheck::ok("rdma", found),
        Some((device, count)) => HealthCheck::doubtful(
            "rdma",
            format!("{found}; {} has counted {count} errors", device.name),
            "try another cable",
        ),
    }
}

/// Checks of a Mac's Thunderbolt cables and of its heat; none on other systems.
pub(super) fn of_mac() -> Vec<HealthCheck> {
    if !cfg!(target_os = "macos") {
        return Vec::new();
    }
    let profiler = machine::ask("system_profiler", &["SPThunderboltDataType", "-json"]);
    let hardware = machine::ask("networksetup", &["-listallhardwareports"]);
    let ports = profiler.zip(hardware);
    let ports = ports.map(|(profiler, hardware)| connected_ports(&profiler, &hardware));
    let heat = machine::ask("pmset", &["-g", "therm"]);
    let heat = heat.map(|text| heat_of(&text));
    cable(&ports.unwrap_or_default())
        .into_iter()
        .chain(heat)
        .collect()
}

/// Check of the cables to other machines; `None` without any.
fn cable(ports: &[ConnectedPort]) -> Option<HealthCheck> {
    if ports.is_empty() {
        return None;
    }
    let rate = |port: &ConnectedPort| match port.gbit_per_s {
        Some(rate) => format!("{} at {rate} Gbit/s", port.interface),
        None => port.interface.clone(),
    };
    let found: Vec<String> = ports.iter().map(rate).collect();
    let found = found.join(", ");
    let is_beside =
        |port: &&ConnectedPort| port.machine == "Mac Studio" && port.interface == NEXT_TO_ETHERNET;
    if ports.iter().any(|port| is_beside(&port)) {
        return Some(HealthCheck::doubtful(
            "cables",
            format!("{found}: {NEXT_TO_ETHERNET} is the port next to Ethernet, which has no RDMA"),
            "move that cable to another Thunderbolt port",
        ));
    }
    let is_slow = |port: &ConnectedPort| port.gbit_per_s.is_some_and(|it| it < THUNDERBOLT_5);
    if ports.iter().any(is_slow) {
        return Some(HealthCheck::doubtful(
            "cables",
            format!("{found}: RDMA needs Thunderbolt 5, {THUNDERBOLT_5} Gbit/s"),
            "take a Thunderbolt 5 cable, and such ports at both ends",
        ));
    }
    Some(HealthCheck::ok("cables", found))
}

/// Check of the output of `pmset -g therm`.
fn heat_of(text: &str) -> HealthCheck {
    let limit = text.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let value: u32 = value.trim().parse().ok()?;
        (name.trim() == "CPU_Speed_Limit").then_some(value)
    });
    match limit {
        Some(limit) if limit < 100 => HealthCheck::doubtful(
            "heat",
            format!("macOS holds the processor at {limit} % of its speed"),
            "let it cool: a slow machine slows all of an instance",
        ),
        _ => HealthCheck::ok("heat", "macOS reports no limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn device(problem: Option<&str>) -> RdmaDevice {
        RdmaDevice {
            name: "mlx5_0".to_owned(),
            problem: problem.map(str::to_owned),
            ..RdmaDevice::default()
        }
    }

    #[test]
    fn a_port_that_is_active_and_without_errors_is_ok() {
        assert_eq!(rdma(Ok(vec![])).state, State::Absent);
        let (up, down) = (device(None), device(Some("port 1 is down")));
        let of = |devices: &[RdmaDevice], errors| of_ports(devices, |_| errors);
        assert_eq!(of(&[up.clone(), down.clone()], None).state, State::Ok);
        assert_eq!(of(std::slice::from_ref(&up), Some(0)).state, State::Ok);
        let faulty = of(&[up], Some(3));
        assert_eq!(faulty.state, State::Doubtful);
        assert_eq!(faulty.found, "mlx5_0; mlx5_0 has counted 3 errors");
        assert_eq!(of(&[down], None).state, State::Doubtful);
    }

    #[test]
    fn cables_are_fast_and_in_a_port_with_rdma() {
        let port = |machine: &str, interface: &str, gbit_per_s| ConnectedPort {
            machine: machine.to_owned(),
            interface: interface.to_owned(),
            gbit_per_s: Some(gbit_per_s),
        };
        assert!(cable(&[]).is_none());
        let check = |ports: &[ConnectedPort]| cable(ports).unwrap();
        let good = check(&[
            port("Mac Studio", "en3", 80),
            port("Mac Studio", "en4", 120),
        ]);
        assert_eq!(good.found, "en3 at 80 Gbit/s, en4 at 120 Gbit/s");
        assert_eq!(good.state, State::Ok);
        let beside = check(&[port("Mac Studio", "en2", 80)]);
        assert!(
            beside.found.contains("next to Ethernet"),
            "{}",
            beside.found
        );
        assert_eq!(check(&[port("Mac mini", "en2", 80)]).state, State::Ok);
        let slow = check(&[port("Mac mini", "en2", 40)]);
        assert!(slow.found.contains("Thunderbolt 5"), "{}", slow.found);
    }

    /// Outputs of an Intel Mac that is hot, and of Apple silicon (Apple's `pmset` prints both).
    #[test]
    fn heat_is_read() {
        let hot = "Note: No thermal warning level has been recorded\n2026-07-01 10:00:00 +0000 CPU \
                   Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= \
                   12\n\tCPU_Speed_Limit \t= 78\n";
        assert!(heat_of(hot).found.contains("78 %"));
        let cool = "Note: No thermal warning level has been recorded\nNote: No performance warning \
                    level has been recorded\nNote: No CPU power status has been recorded\n";
        assert_eq!(heat_of(cool).state, State::Ok);
    }
}
