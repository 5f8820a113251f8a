//! Array jobs over machines of a cluster. Results have the bits of one machine. A machine that is
//! lost costs its parts, and one that does not lend the inputs is left out by name.

use std::fs;
use std::process::{Child, Output};

use serde_json::Value;

use super::{TestMachine, said, shared, until};
use crate::common::{collect, text};
use crate::nodes::processes::all_children;

/// Raw values of some 30 binary orders: seven parts.
const ROWS: u64 = 400_000;

/// Samples of a job that is long enough to lose a machine in the middle: a second or more.
const SAMPLES: &str = "60000000";

/// Processor time that a worker in the middle of a job has used, in units of 10 ms.
const TICKS: u64 = 10;

fn start(machine: &TestMachine, args: &[&str]) -> Child {
    let all = [&["mapreduce"], args, &["--json", "--threads", "1"]].concat();
    machine.command(&all).spawn().unwrap()
}

/// The object that a job printed, which ended well.
fn object(output: &Output) -> Value {
    assert!(output.status.success(), "{}", said(output));
    serde_json::from_str(&text(&output.stdout)).unwrap()
}

/// The result of a job on two machines, and its messages.
fn on_both(machine: &TestMachine, args: &[&str]) -> (Value, String) {
    let output = collect(start(machine, &[args, &["--nodes", "2"]].concat()));
    (object(&output), said(&output))
}

fn alone(machine: &TestMachine, args: &[&str]) -> Value {
    object(&collect(start(machine, &[args, &["--local"]].concat())))
}

#[test]
fn machines_of_the_cluster_compute_with_the_bits_of_one() {
    let one = shared::up("one", None);
    let home = one.home.path();
    let lent = home.join("lent");
    fs::create_dir(&lent).unwrap();
    let value = |i: u64| {
        let bits = i.wrapping_mul(6364136223846793005).rotate_left(29);
        (bits >> 11) as f64 * ((bits % 61) as f64 - 30.0).exp2()
    };
    let bytes: Vec<u8> = (0..ROWS).flat_map(|i| value(i).to_le_bytes()).collect();
    fs::write(lent.join("x.raw"), bytes).unwrap();
    let mut two = shared::up_with("two", Some(&one), &["--arrays", lent.to_str().unwrap()]);
    until("two starts workers", || {
        two.run(&["ps", "--json"]).status.success()
    });
    for job in [
        &["sort", "lent/x.raw", "--memory", "4M"][..],
        &["map", "lent/x.raw", "--map", "x / 3"],
    ] {
        let [here, both] = ["here.npy", "both.npy"].map(|name| {
            let to = [job, &["--raw", "f64", "-o", name]].concat();
            if name == "both.npy" {
                let (object, line) = on_both(&one, &to);
                assert!(line.contains("workers on one, two"), "{line}");
                assert_eq!((&object["nodes"], &object["lost"]), (&2.into(), &0.into()));
            } else {
                alone(&one, &to);
            }
            fs::read(home.join(name)).unwrap()
        });
        assert!(both == here, "{job:?}");
    }
    what_is_not_lent_is_computed_here(&one);
    a_machine_is_lost_in_the_middle(&one, &mut two);
}

/// The other machine lends another folder.
fn what_is_not_lent_is_computed_here(one: &TestMachine) {
    let bytes: Vec<u8> = (0..20_000_000).map(|i: u32| (i % 251) as u8).collect();
    fs::write(one.home.path().join("own.raw"), bytes).unwrap();
    let map = "sin(x) * sin(i) + cos(x + i)";
    let job = ["reduce", "sum", "own.raw", "--raw", "u8", "--map", map];
    let (both, line) = on_both(one, &job);
    assert_eq!(both["value"], alone(one, &job)["value"]);
    assert_eq!(both["lost"], 1);
    let named = line.contains("two: ") && line.contains("own.raw is not there, or in no folder");
    assert!(named, "{line}");
}

fn a_machine_is_lost_in_the_middle(one: &TestMachine, two: &mut TestMachine) {
    let job = ["montecarlo", "sin(x) * y", "--samples", SAMPLES];
    let expected = alone(one, &job);
    let mut both = start(one, &[&job[..], &["--nodes", "2"]].concat());
    let node = two.node.as_ref().unwrap().id();
    until("the other machine computes", || {
        let ended = both.try_wait().unwrap();
        assert!(ended.is_none(), "it was over too early");
        all_children(node)
            .into_iter()
            .any(|pid| ticks(pid) >= TICKS)
    });
    two.kill();
    let output = collect(both);
    let (got, line) = (object(&output), said(&output));
    assert_eq!(got["value"], expected["value"]);
    assert_eq!(got["lost"], 1);
    assert_eq!(got["node_threads"], serde_json::json!([1, 1]));
    let named = line.contains("two: ") && line.contains("the others compute its");
    assert!(named, "{line}");
}

/// Processor time of a worker of an array job, in units of 10 ms; 0 of other processes.
fn ticks(pid: u32) -> u64 {
    let about = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    if !about("cmdline").contains("mapreduce") {
        return 0;
    }
    let stat = about("stat");
    let fields = stat.rsplit_once(')').map_or("", |it| it.1);
    let ticks = fields.split_whitespace().nth(11);
    ticks.and_then(|ticks| ticks.parse().ok()).unwrap_or(0)
}
