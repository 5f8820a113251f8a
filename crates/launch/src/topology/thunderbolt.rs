//! Parses macOS's description of Thunderbolt ports.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Error;

/// A Thunderbolt port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its network interface, such as `en3`.
    pub interface: String,
    /// Its globally unique identifier.
    pub uuid: String,
    /// The identifier of the port at the other end of its cable.
    pub peer: Option<String>,
}

/// The ports of `host`, sorted by interface name.
///
/// `profiler` is the output of `system_profiler SPThunderboltDataType -json`, `hardware` that of
/// `networksetup -listallhardwareports`. Peers behind hubs are found too.
///
/// # Errors
/// If a connected port cannot be identified. An unconnected port without a service is left out: a
/// person may have deleted it.
pub fn ports(host: &str, profiler: &str, hardware: &str) -> Result<Vec<Port>, Error> {
    let silent = |why: String| Error::NoThunderbolt {
        host: host.to_owned(),
        why,
    };
    let value: Value = serde_json::from_str(profiler)
        .map_err(|e| silent(format!("system_profiler prints no JSON: {e}")))?;
    let entries = value["SPThunderboltDataType"].as_array();
    let entries = entries.ok_or_else(|| silent("no SPThunderboltDataType".to_owned()))?;
    let interfaces = interfaces(hardware);
    let mut ports = Vec::new();
    for entry in entries {
        if let Some(uuid) = entry["domain_uuid_key"].as_str() {
            ports.extend(port(host, entry, uuid, &interfaces)?);
        }
    }
    ports.sort_by(|a, b| a.interface.cmp(&b.interface));
    Ok(ports)
}

/// A Thunderbolt port with a cable to another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectedPort {
    /// The own machine's product, such as `Mac Studio`.
    pub machine: String,
    pub interface: String,
    /// The rate that both ends have agreed on, if the system reports it.
    pub gbit_per_s: Option<u32>,
}

/// The ports with a cable to another machine, from the same outputs as for [`ports`]. Ports that
/// cannot be identified are left out.
pub fn connected_ports(profiler: &str, hardware: &str) -> Vec<ConnectedPort> {
    let value: Value = serde_json::from_str(profiler).unwrap_or_default();
    let entries = value["SPThunderboltDataType"].as_array();
    let interfaces = interfaces(hardware);
    let connected = |entry: &Value| {
        items(entry).iter().find_map(peer)?;
        let uuid = entry["domain_uuid_key"].as_str()?;
        let port = port("", entry, uuid, &interfaces).ok().flatten()?;
        // "80 Gb/s"; an idle port has "Up to 120 Gb/s".
        let speed = entry["receptacle_1_tag"]["current_speed_key"].as_str();
        let speed = speed.and_then(|text| text.split_whitespace().next()?.parse().ok());
        Some(ConnectedPort {
            machine: entry["device_name_key"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            interface: port.interface,
            gbit_per_s: speed,
        })
    };
    entries
        .into_iter()
        .flatten()
        .filter_map(connected)
        .collect()
}

fn port(
    host: &str,
    entry: &Value,
    uuid: &str,
    interfaces: &BTreeMap<&str, &str>,
) -> Result<Option<Port>, Error> {
    let peer = items(entry).iter().find_map(peer);
    let receptacle = match &entry["receptacle_1_tag"]["receptacle_id_key"] {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ if peer.is_none() => return Ok(None),
        _ => {
            return Err(Error::Port {
                host: host.to_owned(),
                port: uuid.to_owned(),
                what: "receptacle_id_key",
            });
        }
    };
    let service = format!("Thunderbolt {receptacle}");
    match interfaces.get(service.as_str()) {
        Some(interface) => Ok(Some(Port {
            interface: (*interface).to_owned(),
            uuid: uuid.to_owned(),
            peer,
        })),
        None if peer.is_none() => Ok(None),
        None => Err(Error::NoService {
            host: host.to_owned(),
            receptacle,
        }),
    }
}

fn items(entry: &Value) -> &[Value] {
    entry["_items"].as_array().map_or(&[], Vec::as_slice)
}

/// The first port of another machine at or below an item. A hub has none itself, but the items
/// behind it do.
fn peer(item: &Value) -> Option<String> {
    let own = item["domain_uuid_key"].as_str().map(str::to_owned);
    own.or_else(|| items(item).iter().find_map(peer))
}

/// Interfaces by service name.
fn interfaces(hardware: &str) -> BTreeMap<&str, &str> {
    let mut found = BTreeMap::new();
    let mut service = None;
    for line in hardware.lines() {
        if let Some(name) = line.strip_prefix("Hardware Port:") {
            service = Some(name.trim());
        } else if let Some(device) = line.strip_prefix("Device:") {
            service
                .take()
                .map(|service| found.insert(service, device.trim()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HARDWARE: &str = "\nHardware Port: Thunderbolt 2\nDevice: en10\nEthernet Address: x\n\n\
                            Hardware Port: Thunderbolt 1\nDevice: en3\n";

    fn profiler(entries: &str) -> String {
        format!("{{\"SPThunderboltDataType\": [{entries}]}}")
    }

    #[test]
    fn ports_have_interfaces_and_peers() {
        let text = profiler(
            r#"{"_name": "bus", "device_name_key": "Mac", "domain_uuid_key": "A1",
                "receptacle_1_tag": {"receptacle_id_key": "1"},
                "_items": [{"_name": "disk"}, {"domain_uuid_key": "B1"}]},
               {"domain_uuid_key": "A2", "receptacle_1_tag": {"receptacle_id_key": "2"}},
               {"_name": "no port of this machine"}"#,
        );
        let port = |interface: &str, uuid: &str, peer: Option<&str>| Port {
            interface: interface.to_owned(),
            uuid: uuid.to_owned(),
            peer: peer.map(str::to_owned),
        };
        let expected = [port("en10", "A2", None), port("en3", "A1", Some("B1"))];
        assert_eq!(ports("h", &text, HARDWARE).unwrap(), expected);
    }

    /// The fields of exo-explore/exo #1390 (Mac mini, macOS 26), in the form of `-json`.
    #[test]
    fn a_cable_to_another_machine_has_its_rate() {
        let text = profiler(
            r#"{"_name": "thunderboltusb4_bus_2", "device_name_key": "Mac mini",
                "domain_uuid_key": "7F158861", "receptacle_1_tag": {"receptacle_id_key": "1",
                "current_speed_key": "80 Gb/s", "link_status_key": "0x2",
                "receptacle_status_key": "receptacle_connected"},
                "_items": [{"_name": "Mac Studio", "domain_uuid_key": "88F10ACA"}]},
               {"device_name_key": "Mac mini", "domain_uuid_key": "0A3248FD",
                "receptacle_1_tag": {"receptacle_id_key": "2",
                "current_speed_key": "Up to 120 Gb/s",
                "receptacle_status_key": "receptacle_no_devices_connected"}}"#,
        );
        let cable = ConnectedPort {
            machine: "Mac mini".to_owned(),
            interface: "en3".to_owned(),
            gbit_per_s: Some(80),
        };
        assert_eq!(connected_ports(&text, HARDWARE), [cable]);
        assert_eq!(connected_ports("no JSON", HARDWARE), []);
    }

    #[test]
    fn peers_behind_hubs_are_found() {
        let text = profiler(
            r#"{"domain_uuid_key": "A1", "receptacle_1_tag": {"receptacle_id_key": "1"}, "_items":
                [{"_name": "hub", "_items": [{"_name": "disk"}, {"domain_uuid_key": "B1"}]}]}"#,
        );
        let found = ports("h", &text, HARDWARE).unwrap();
        assert_eq!(found[0].peer.as_deref(), Some("B1"));
    }

    #[test]
    fn what_is_missing_is_named() {
        for (text, hardware, message) in [
            (
                "",
                HARDWARE,
                "h says nothing about Thunderbolt: system_profiler prints no JSON: EOF while parsing a value at line 1 column 0",
            ),
            (
                "{}",
                HARDWARE,
                "h says nothing about Thunderbolt: no SPThunderboltDataType",
            ),
            (
                &profiler(r#"{"domain_uuid_key": "A", "_items": [{"domain_uuid_key": "B"}]}"#),
                HARDWARE,
                "h: receptacle_id_key is missing from what system_profiler says of A",
            ),
            (
                &profiler(
                    r#"{"domain_uuid_key": "A", "receptacle_1_tag": {"receptacle_id_key": "3"},
                        "_items": [{"domain_uuid_key": "B"}]}"#,
                ),
                HARDWARE,
                "h has a cable in Thunderbolt 3, but no network service of that name",
            ),
        ] {
            assert_eq!(ports("h", text, hardware).unwrap_err().to_string(), message);
        }
        let unused = r#"{"domain_uuid_key": "A", "receptacle_1_tag": {"receptacle_id_key": "3"}}"#;
        assert_eq!(ports("h", &profiler(unused), HARDWARE).unwrap(), []);
    }

    proptest! {
        #[test]
        fn any_description_is_read_or_refused(
            profiler in r#"[\[\]{}":,a-z_ ]{0,60}"#,
            hardware in "(Hardware Port:|Device:|[a-z \n]){0,20}",
        ) {
            let _ = ports("h", &profiler, &hardware);
        }
    }
}
