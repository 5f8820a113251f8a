"""Macs that are not there: folders with commands that print what a Mac would, for the stand-in for
`ssh` in tests-data/topology.

The texts have the form that macOS 26 prints, as far as MLX and paceline read it; they were written
from MLX's parser and Apple's manual pages, not recorded on a machine.
"""

import json
import os
import uuid

PRINT = '#!/bin/sh\ncat "$HOME/%s"\n'
SCRIPTS = {
    "system_profiler": PRINT % "profiler.json",
    "networksetup": PRINT % "hardware.txt",
    "ibv_devices": PRINT % "devices.txt",
    "ifconfig": PRINT % "ifconfig.txt",
    "ipconfig": '#!/bin/sh\ncat "$HOME/address.$2" 2>/dev/null\n',
    "ip": "#!/bin/sh\nexit 127\n",
    # Notes what an administrator is asked to do.
    "sudo": '#!/bin/sh\n[ "$1" != -n ] || shift\n'
    'case $1 in ls) ;; echo) shift; echo "$@" ;; *) echo "$*" >>"$HOME/done" ;; esac\n',
}


def identifier(*words):
    return str(uuid.uuid5(uuid.NAMESPACE_OID, " ".join(map(str, words)))).upper()


def macs(names, cables, rdma=True, interfaces=None, addresses=None, ports=4, networks=""):
    """Texts of each host: `cables` are pairs of (host, port), ports count from 1. `interfaces` says
    what the interface of a port is called, `addresses` what en0 and en1 have."""
    interfaces = interfaces or (lambda port: f"en{port + 1}")
    peers = {}
    for a, b in cables:
        peers[a], peers[b] = b, a
    hosts = {}
    for number, name in enumerate(names):
        entries = [
            entry(number, port, peers.get((number, port))) for port in range(1, ports + 1)
        ]
        entries.append({"_name": "thunderboltusb4_bus_9", "vendor_name_key": "Apple Inc."})
        hosts[name] = {
            "profiler.json": json.dumps({"SPThunderboltDataType": entries}),
            "hardware.txt": hardware(ports, interfaces),
            "devices.txt": devices(ports, interfaces) if rdma else "",
            "ifconfig.txt": f"en0: flags=8863<UP> mtu 1500\n\tinet 10.0.0.{number + 1} "
            f"netmask 0xffffff00 broadcast 10.0.0.255\n{networks}",
        }
        own = addresses[number] if addresses else {"en0": f"10.0.0.{number + 1}"}
        for interface, address in own.items():
            hosts[name][f"address.{interface}"] = f"{address}\n"
    return hosts


def entry(host, port, peer):
    found = {
        "_name": f"thunderboltusb4_bus_{port}",
        "device_name_key": "Mac Studio",
        "domain_uuid_key": identifier(host, port),
        "receptacle_1_tag": {
            "link_status_key": "0x2" if peer else "0x7",
            "receptacle_id_key": str(port),
            "receptacle_status_key": "receptacle_connected" if peer else "receptacle_no_devices_connected",
        },
        "route_string_key": "0",
        "switch_uid_key": f"0x05AC{host:04X}{port:04X}",
        "vendor_name_key": "Apple Inc.",
    }
    if peer:
        found["_items"] = [
            {"_name": "a disk", "device_name_key": "Disk"},
            {
                "_name": "Mac Studio",
                "device_name_key": "Mac Studio",
                "domain_uuid_key": identifier(*peer),
                "mode_key": "usb_four",
            },
        ]
    return found


def hardware(ports, interfaces):
    lines = ["", "Hardware Port: Ethernet", "Device: en0", "Ethernet Address: 02:00:00:00:00:01", ""]
    for port in range(1, ports + 1):
        lines += [f"Hardware Port: Thunderbolt {port}", f"Device: {interfaces(port)}"]
        lines += [f"Ethernet Address: 36:00:00:00:00:{port:02x}", ""]
    lines += ["Hardware Port: Thunderbolt Bridge", "Device: bridge0", "Ethernet Address: 36:00:00:00:00:01"]
    return "\n".join(lines + ["", "VLAN Configurations", "===================", ""])


def devices(ports, interfaces):
    lines = ["    device          \t   node GUID", "    ------          \t----------------"]
    lines += [f"    rdma_{interfaces(port)}        \t{port:016x}" for port in range(1, ports + 1)]
    return "\n".join(lines) + "\n"


def install(folder, hosts):
    """Makes the hosts' folders."""
    for name, files in hosts.items():
        for file, text in files.items():
            write(os.path.join(folder, name, file), text)
        for command, text in SCRIPTS.items():
            write(os.path.join(folder, name, "bin", command), text, 0o755)


def write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)
