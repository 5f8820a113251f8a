//! A cluster that computes on the engines its machines have: MLX, the CPU, and both in one model.
//!
//! Runs where `PACELINE_MLXC` names a `libmlxc`, which `cargo xtask mlx` builds.

use std::io::Read as _;

use serde_json::Value;

use super::{TestMachine, live::join_by_token, machines, said, until, until_ready};
use crate::common::namespaces::NamespaceNetwork;
use crate::nodes::tiny::{FAMILIES, TinyModelSpec};

const MODEL: &str = "deep.gguf";

/// Long enough an answer that a machine can die within it.
const DEEP: TinyModelSpec = TinyModelSpec {
    layers: 6,
    ..FAMILIES[0]
};

/// Kernel classes of the only instance, as `host` lists it.
fn classes(host: &TestMachine) -> String {
    let all: Value = serde_json::from_str(&host.told(&["ps", "--json"])).unwrap();
    all[0]["classes"].as_str().unwrap().to_owned()
}

/// Loads the model and waits until `host` may ask it.
fn load(loader: &TestMachine, host: &TestMachine, options: &[&str]) {
    let load = ["load", MODEL, "--threads", "1", "--context", "2048"];
    loader.told(&[&load[..], options].concat());
    until_ready(loader, host);
}

/// Machines n0, n1 and n2 with MLX, and n3 without.
fn cluster(network: &NamespaceNetwork, library: &str, test: &str) -> Option<Vec<TestMachine>> {
    let mut hosts = machines(network, test)?;
    DEEP.write(&hosts[0].home.path().join(MODEL));
    for (number, host) in hosts.iter_mut().enumerate() {
        if number < 3 {
            host.variables.push(format!("PACELINE_MLXC={library}"));
        }
        host.up(&[]);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    hosts[1..]
        .iter()
        .for_each(|host| join_by_token(host, &token));
    let lists = |node: &Value| {
        node["devices"]
            .as_array()
            .is_some_and(|all| !all.is_empty())
    };
    until("all list their engines", || {
        let nodes = hosts[0].nodes();
        nodes.len() == hosts.len() && nodes.iter().all(lists)
    });
    Some(hosts)
}

#[test]
fn instances_compute_on_the_engines_of_their_machines() {
    let test = "engines of machines";
    let Ok(library) = std::env::var("PACELINE_MLXC") else {
        return eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    };
    let name = format!("pe{}x", std::process::id());
    let Some(network) = NamespaceNetwork::new(&name, 4, test) else {
        return;
    };
    let Some(mut hosts) = cluster(&network, &library, test) else {
        return;
    };
    let near = ["--local", "--engine", "mlx", "--class", "mlx-f32"];
    let (alone, _) = hosts[0].answer(MODEL, &near);

    let refused = hosts[0].run(&["load", MODEL, "--nodes", "n0,n3", "--engine", "mlx"]);
    let reason = said(&refused);
    assert!(reason.contains("n3 has no engine mlx"), "{reason}");
    for (engines, split, class) in [
        ("mlx", "auto", "mlx-f32"),
        ("cpu,mlx,mlx", "pipeline", "cpu+mlx-f32"),
    ] {
        let options = ["--nodes", "n0,n1,n2", "--engine", engines, "--split", split];
        load(
            &hosts[0],
            &hosts[1],
            &[&options[..], &["--class", "mlx-f32"]].concat(),
        );
        assert_eq!(classes(&hosts[1]), class);
        let (answer, line) = hosts[1].answer(MODEL, &[]);
        assert!(line.contains("asking the instance"), "{line}");
        assert_eq!(answer["tokens"], alone["tokens"], "{engines}");
        hosts[0].told(&["unload", MODEL]);
    }
    continues_on_the_machines_left(&mut hosts);
}

/// The answer of a pipeline of three machines continues after the death of one, and says so.
fn continues_on_the_machines_left(hosts: &mut [TestMachine]) {
    let options = ["--nodes", "3", "--engine", "mlx", "--class", "mlx-f32"];
    load(&hosts[0], &hosts[1], &options);
    assert_eq!(hosts[0].nodes().len(), 4);
    let run = ["run", MODEL, "once", "--temperature", "0", "--max-tokens"];
    let mut asking = hosts[1]
        .command(&[&run[..], &["1200"]].concat())
        .spawn()
        .unwrap();
    let mut output = asking.stdout.take().unwrap();
    let mut begun = [0; 64];
    output.read_exact(&mut begun).unwrap();
    hosts[2].kill();
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    let ended = asking.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", said(&ended));
    let log = std::fs::read_to_string(hosts[0].home.path().join("log")).unwrap();
    assert!(
        log.contains("1 answer continues from the tokens so far"),
        "{log}"
    );
    assert_eq!(classes(&hosts[1]), "mlx-f32");
}
