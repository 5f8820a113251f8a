//! A laptop on battery: its work moves to another machine before the charge is gone, and it takes
//! work again with the current. Its node sees files of ours in place of the kernel's batteries.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{TestMachine, live::join_by_token, machines, said, until};
use crate::common::namespaces::NamespaceNetwork;
use crate::nodes::tiny::FAMILIES;

const MODEL: &str = "llama.gguf";

/// Runs a program that sees the folder of its first argument as all power supplies.
const SEES: &str = "mount --bind \"$0\" /sys/class/power_supply && exec \"$@\"";

/// A battery as Linux shows it, in a machine's home.
struct FakeBattery {
    supplies: PathBuf,
}

impl FakeBattery {
    fn new(home: &Path) -> Self {
        let supplies = home.join("supplies");
        fs::create_dir_all(supplies.join("BAT0")).unwrap();
        let battery = Self { supplies };
        battery.write("type", "Battery");
        battery.set("Discharging", "50");
        battery
    }

    fn set(&self, status: &str, percent: &str) {
        self.write("capacity", percent);
        self.write("status", status);
    }

    /// Never half a file.
    fn write(&self, name: &str, text: &str) {
        let new = self.supplies.join("new");
        fs::write(&new, text).unwrap();
        fs::rename(&new, self.supplies.join("BAT0").join(name)).unwrap();
    }

    /// Why a program of this machine cannot see it.
    fn hidden(&self, machine: &TestMachine) -> Option<String> {
        let supplies = self.supplies.to_str().unwrap();
        let args = [
            "-c",
            SEES,
            supplies,
            "cat",
            "/sys/class/power_supply/BAT0/type",
        ];
        let output = machine.program("sh", &args).output().unwrap();
        (!output.status.success()).then(|| said(&output).trim().to_owned())
    }

    /// Starts the machine's node, which sees it.
    fn up(&self, machine: &mut TestMachine) {
        let log = fs::File::create(machine.home.path().join("log")).unwrap();
        let program = env!("CARGO_BIN_EXE_paceline");
        let sees = ["-c", SEES, self.supplies.to_str().unwrap(), program];
        let up = ["up", "--port", "52415", "--name", &machine.name];
        let mut command = machine.program("sh", &[&sees[..], &up].concat());
        machine.node = Some(command.stderr(log).spawn().unwrap());
        until("it is up", || !machine.nodes().is_empty());
    }
}

/// Whether the only model is ready on this node alone.
fn is_at(host: &TestMachine, name: &str) -> bool {
    let all = host.ps();
    all[0]["state"] == "ready" && all[0]["nodes"] == Value::from(vec![name])
}

#[test]
fn a_laptop_gives_its_work_away_before_its_battery_is_empty() {
    let test = "a battery in a namespace";
    let name = format!("pb{}x", std::process::id());
    let Some(network) = NamespaceNetwork::new(&name, 2, test) else {
        return;
    };
    let Some(mut hosts) = machines(&network, test) else {
        return;
    };
    let battery = FakeBattery::new(hosts[0].home.path());
    if let Some(why) = battery.hidden(&hosts[0]) {
        eprintln!("SKIPPED {test}: {why}");
        return;
    }
    FAMILIES[0].write(&hosts[0].home.path().join(MODEL));
    battery.up(&mut hosts[0]);
    hosts[1].up_at("52415", &[]);
    let [laptop, other] = &hosts[..] else {
        unreachable!("there are two")
    };
    join_by_token(other, &laptop.told(&["key", "cluster", "show"]));
    until("both see both", || laptop.sees("alive").len() == 2);
    let load = ["load", MODEL, "--nodes", "n0", "--threads", "1"];
    laptop.told(&load);
    let (before, _) = laptop.answer(MODEL, &[]);

    battery.set("Discharging", "8");
    until("the work has moved", || is_at(other, "n1"));
    let (after, line) = laptop.answer(MODEL, &[]);
    assert!(line.contains("asking the instance on n1"), "{line}");
    assert_eq!(after["tokens"], before["tokens"]);
    let refused = said(&laptop.run(&load));
    assert!(refused.contains("n0 takes no work"), "{refused}");

    other.told(&["unload", MODEL]);
    until("it is unloaded", || laptop.told(&["ps", "--json"]) == "[]");
    battery.set("Charging", "9");
    until("it takes work again", || {
        let log = fs::read_to_string(laptop.home.path().join("log")).unwrap();
        log.contains("the current is back")
    });
    laptop.told(&load);
    until("it has work again", || is_at(other, "n0"));
}
