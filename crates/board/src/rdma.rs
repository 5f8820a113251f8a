//! RDMA devices of this machine, as facts of its node.

use std::net::IpAddr;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use paceline_cluster::machine;
use paceline_cluster::network::interface_of;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::agent::local::CommandProgress;
use paceline_cluster::nodes::rdma::RdmaDevice;
use paceline_comm_rdma::{DevicePort, RdmaError, Verbs};
use serde_json::Value;

/// Local command that makes a node list its RDMA devices again.
pub const LIST_RDMA: &str = "rdma";

/// Interval of listing the devices again: a cable is plugged in or pulled. It costs a child of some
/// milliseconds.
const LIST_EVERY: Duration = Duration::from_mins(1);

/// Prefix of Apple's devices before the name of their interface.
const APPLE: &str = "rdma_";

/// The RDMA devices of this machine. Opens the verbs library, and each device for a moment.
///
/// # Errors
/// There is no library, or the system has no RDMA.
pub fn devices() -> Result<Vec<RdmaDevice>, RdmaError> {
    Ok(Verbs::load()?.ports()?.into_iter().map(device).collect())
}

fn device(port: DevicePort) -> RdmaDevice {
    let by_address = port.address.and_then(|it| interface_of(IpAddr::V4(it)));
    let by_name = || port.device.strip_prefix(APPLE).map(str::to_owned);
    let problem = port
        .problem
        .map(|error| match error.setting(std::env::consts::OS) {
            Some(setting) => format!("{error}: {setting}"),
            None => error.to_string(),
        });
    RdmaDevice {
        interface: by_address.or_else(by_name).unwrap_or_default(),
        address: port.address,
        mbit_per_s: port.gbit_per_s.map(|rate| (rate * 1000.0) as u32),
        problem,
        trusted: Vec::new(),
        name: port.device,
    }
}

/// A device for people: `rdma_en5 on en5, 40 Gbit/s`, and its problem.
pub fn told(device: &RdmaDevice) -> String {
    let interface = match device.interface.as_str() {
        "" => String::new(),
        name => format!(" on {name}"),
    };
    let rate = device.mbit_per_s.map(|rate| f64::from(rate) / 1000.0);
    let rate = rate.map_or_else(String::new, |rate| format!(", {rate} Gbit/s"));
    let problem = device.problem.as_ref();
    let problem = problem.map_or_else(String::new, |problem| format!(": {problem}"));
    format!("{}{interface}{rate}{problem}", device.name)
}

/// Keeps the devices published as facts of the node `agent`. Lists them now, at each command
/// [`LIST_RDMA`] of a program of this machine, and every [`LIST_EVERY`]. A child, the program at
/// `program`, lists them, so that the node opens no driver. Returns where there are none, or when
/// the node drops the command.
pub fn keep_published(agent: &Agent, program: &Path) {
    // A single request is enough: the list that it starts is newer than all requests before it.
    let (ask, asked) = sync_channel(1);
    agent.serve_local(LIST_RDMA, move |_: &Value, _: &mut CommandProgress<'_>| {
        let _ = ask.try_send(()); // one waits already
        Ok(Value::Null)
    });
    let mut is_first = true;
    loop {
        let devices = listed(program);
        if is_first && devices.as_ref().is_none_or(Vec::is_empty) {
            return;
        }
        is_first = false;
        if let Some(devices) = devices {
            agent.set_rdma(devices);
        }
        if asked.recv_timeout(LIST_EVERY) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

fn listed(program: &Path) -> Option<Vec<RdmaDevice>> {
    let text = machine::ask(program.to_str()?, &["rdma"])?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_down_has_its_interface_by_name_and_says_what_to_do() {
        let problem = RdmaError::PortDown {
            device: "rdma_en5".to_owned(),
            state: 1,
        };
        let port = DevicePort {
            device: "rdma_en5".to_owned(),
            address: None,
            gbit_per_s: None,
            problem: Some(problem),
        };
        let device = device(port);
        assert_eq!(device.interface, "en5");
        assert_eq!(
            told(&device),
            "rdma_en5 on en5: device rdma_en5: port 1 is in state 1, expected 4 (active): plug \
             the cable in at both ends"
        );
        let up = RdmaDevice {
            mbit_per_s: Some(40_000),
            problem: None,
            ..device
        };
        assert_eq!(told(&up), "rdma_en5 on en5, 40 Gbit/s");
    }
}
