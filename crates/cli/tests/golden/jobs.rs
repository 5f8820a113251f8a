//! Rows of training and of array jobs.

use rustix::process::{Pid, Signal, kill_process};

use super::{GoldenRow, RowOrigin, RowSelection, check, sha256};
use crate::common::home::{TestHome, object};
use crate::common::{finish, until};
use crate::{mapreduce, train};

fn row(model: &str, split: &str, fault: &str, bytes: &[u8]) -> GoldenRow {
    let origin = RowOrigin {
        model: model.into(),
        split: split.into(),
        seed: "3".into(),
        fault: fault.into(),
        ..RowOrigin::default()
    };
    (origin, sha256(bytes))
}

/// Adapters of two methods and two batches over processes; in the gate one.
#[test]
fn training() {
    let extent = RowSelection::of_this_run();
    let world = TestHome::new();
    let data = train::data(&world);
    let mut rows = Vec::new();
    for (number, more) in [
        "--steps 12",
        "--steps 6 --method qlora",
        "--steps 8 --dropout 0.1 --pack --leaf 2",
        "--steps 4 --method full",
    ]
    .into_iter()
    .enumerate()
    {
        for nodes in ["1", "3"] {
            if extent.is_part() && (number, nodes) != (0, "3") {
                continue;
            }
            let split = format!("{nodes} nodes");
            let output = format!("{number}-{nodes}");
            let args: Vec<&str> = more
                .split(' ')
                .chain(["--nodes", nodes, "--json"])
                .collect();
            object(&finish(
                &mut world.paceline(train::args(&data, &output, &args)),
            ));
            rows.push(row(
                &format!("llama-tied {more}"),
                &split,
                "",
                &trained(&world, &output),
            ));
        }
    }
    rows.push(row(
        "llama-tied --steps 12",
        "2 nodes",
        "killed, resumed",
        &killed(&world, &data),
    ));
    check("training", extent, &rows);
}

/// The tensors that a run wrote: its adapter, or its model.
fn trained(world: &TestHome, output: &str) -> Vec<u8> {
    let folder = world.path("models").join(output);
    ["adapter_model.safetensors", "model.safetensors"]
        .iter()
        .find_map(|name| std::fs::read(folder.join(name)).ok())
        .unwrap_or_else(|| panic!("{}: no tensors", folder.display()))
}

/// The adapter of a run that is killed after a checkpoint, and resumed.
fn killed(world: &TestHome, data: &str) -> Vec<u8> {
    let more = ["--steps", "12", "--save-every", "2", "--nodes", "2"];
    let mut run = world
        .paceline(train::args(data, "killed", &more))
        .spawn()
        .unwrap();
    let saved = world.path("models").join("killed/step-0000004");
    until("a checkpoint", || {
        saved.exists() || run.try_wait().unwrap().is_some()
    });
    let _ = kill_process(Pid::from_child(&run), Signal::KILL);
    run.wait().unwrap();
    let resume = [&more[..], &["--resume", "--json"]].concat();
    object(&finish(
        &mut world.paceline(train::args(data, "killed", &resume)),
    ));
    trained(world, "killed")
}

/// Array jobs over one and three processes; in the gate some over two.
#[test]
fn arrays() {
    let extent = RowSelection::of_this_run();
    let world = mapreduce::stocked();
    let mut rows = Vec::new();
    for (number, job) in [
        "reduce sum values.npy",
        "reduce var values.npy --map x/2",
        "hist values.npy --bins 20",
        "topk values.npy -k 30",
        "groupby sum keys.npy values.npy",
        "groupby mean keys.npy values.npy",
        "kmeans points.npy -k 5 --iterations 4",
        "kmeans points.npy -k 3 --iterations 2 --seed 9",
        "montecarlo select(x*x+y*y<1,4,0) --samples 1000000",
    ]
    .into_iter()
    .enumerate()
    {
        for nodes in ["1", "3"] {
            if extent.is_part() && (number % 3 != 0 || nodes == "1") {
                continue;
            }
            let args: Vec<&str> = job.split(' ').collect();
            let result = mapreduce::json(&world, &args, nodes).to_string();
            rows.push(row(job, &format!("{nodes} nodes"), "", result.as_bytes()));
        }
    }
    check("arrays", extent, &rows);
}
