//! A cluster that computes on the engines its machines have: MLX, the CPU, and both in one model.
//!
//! Runs where `PACELINE_MLXC` names a `libmlxc`, which `cargo xtask mlx` builds.

use std::io::Read as _;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use paceline_cluster::nodes::agent::local;
use serde_json::{Value, json};

use super::{TestMachine, live::join_by_token, machines, said, until, until_ready};
use crate::common::namespaces::NamespaceNetwork;
use crate::nodes::tiny::{FAMILIES, TinyModelSpec};

const MODEL: &str = "deep.gguf";

const ENGINE: &str = "engine";

/// Long enough an answer that a machine can die within it.
const DEEP: TinyModelSpec = TinyModelSpec {
    layers: 6,
    ..FAMILIES[0]
};

/// Name of the numbers of the only instance, as `host` lists it, without its layers: measured
/// speeds may decide them. A name of several parts ends with the last of [`DEEP`].
fn numbers(host: &TestMachine) -> String {
    let all = host.ps();
    let name = all[0]["numbers"].as_str().unwrap();
    assert!(!name.contains('+') || name.ends_with("-5"), "{name}");
    let parts = name.split('+').map(|part| part.split(':').next().unwrap());
    parts.collect::<Vec<_>>().join("+")
}

/// Loads the model and waits until `host` may ask it.
fn load(loader: &TestMachine, host: &TestMachine, options: &[&str]) {
    let load = ["load", MODEL, "--threads", "1", "--context", "2048"];
    loader.told(&[&load[..], options].concat());
    until_ready(loader, host);
}

/// Machines n0, n1 and n2 with MLX, and n3 whose folder [`ENGINE`] is to have it later.
fn cluster(network: &NamespaceNetwork, library: &str, test: &str) -> Option<Vec<TestMachine>> {
    let mut hosts = machines(network, test)?;
    DEEP.write(&hosts[0].home.path().join(MODEL));
    for (number, host) in hosts.iter_mut().enumerate() {
        let library = match number {
            3 => host.home.path().join(ENGINE).join("libmlxc.so"),
            _ => library.into(),
        };
        let library = library.display();
        host.variables.push(format!("PACELINE_MLXC={library}"));
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

    lists_its_engines_again(&hosts, &library);
    // The automatic split follows measured rates.
    let pipeline = [
        "--nodes", "n0,n1,n2", "--class", "mlx-f32", "--split", "pipeline",
    ];
    for (engines, name) in [("mlx", "mlx-f32(cpu)"), ("cpu,mlx,mlx", "cpu+mlx-f32(cpu)")] {
        let options = [&pipeline[..], &["--engine", engines]].concat();
        load(&hosts[0], &hosts[1], &options);
        assert_eq!(numbers(&hosts[1]), name);
        let (answer, line) = hosts[1].answer(MODEL, &[]);
        assert!(line.contains("asking the instance"), "{line}");
        assert_eq!(answer["tokens"], alone["tokens"], "{engines}");
        hosts[0].told(&["unload", MODEL]);
    }
    continues_on_the_machines_left(&mut hosts);
}

/// n3 is refused without MLX, then for a file that is none, and has the engine once it is there.
fn lists_its_engines_again(hosts: &[TestMachine], library: &str) {
    let (home, engine) = (hosts[3].home.path(), hosts[3].home.path().join(ENGINE));
    let refused = |reason: &str| {
        let refused = hosts[0].run(&["load", MODEL, "--nodes", "n0,n3", "--engine", "mlx"]);
        assert!(said(&refused).contains(reason), "{}", said(&refused));
    };
    let lists = |is_it: &dyn Fn(&Value) -> bool| {
        local::ask(home, "engines", json!({}), Duration::from_secs(30), |_| ()).unwrap();
        until("n3 lists its engines", || {
            let nodes = hosts[0].nodes();
            let n3 = nodes.iter().find(|node| node["name"] == "n3").unwrap();
            n3["devices"].as_array().unwrap().iter().any(is_it)
        });
    };
    refused("n3 has no engine mlx");
    std::fs::create_dir(&engine).unwrap();
    std::fs::write(engine.join("libmlxc.so"), "no library").unwrap();
    lists(&|device| device["problem"].is_string());
    refused("n3 cannot use its engine mlx");
    std::fs::remove_dir_all(&engine).unwrap();
    std::os::unix::fs::symlink(Path::new(library).parent().unwrap(), &engine).unwrap();
    lists(&|device| device["engine"] == "mlx" && device["problem"].is_null());
}

/// How a long answer of `asker` ends when machine `lost` of `hosts` dies within it.
fn answer_over_a_loss(hosts: &mut [TestMachine], asker: usize, lost: usize) -> Output {
    let run = ["run", MODEL, "once", "--temperature", "0", "--max-tokens"];
    let run = [&run[..], &["1200"]].concat();
    let mut asking = hosts[asker].command(&run).spawn().unwrap();
    let mut output = asking.stdout.take().unwrap();
    let mut begun = [0; 64];
    output.read_exact(&mut begun).unwrap();
    hosts[lost].kill();
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    asking.wait_with_output().unwrap()
}

/// The answer of a pipeline of three machines continues after the death of one, and says so. With
/// `--strict` it ends. The lost stage moves to a machine that computes the other one on its CPU and
/// has its engine too.
fn continues_on_the_machines_left(hosts: &mut [TestMachine]) {
    let options = [
        "--nodes", "n0,n1,n2", "--engine", "mlx", "--class", "mlx-f32", "--split", "pipeline",
    ];
    load(&hosts[0], &hosts[1], &options);
    assert_eq!(hosts[0].nodes().len(), 4);
    let ended = answer_over_a_loss(hosts, 1, 2);
    assert!(ended.status.success(), "{}", said(&ended));
    let log = std::fs::read_to_string(hosts[0].home.path().join("log")).unwrap();
    assert!(
        log.contains("1 answer continues from the tokens so far"),
        "{log}"
    );
    assert_eq!(numbers(&hosts[1]), "mlx-f32(cpu)");
    hosts[0].told(&["unload", MODEL]);

    let options = ["--nodes", "n0,n1", "--engine", "cpu,mlx", "--strict"];
    load(&hosts[0], &hosts[0], &options);
    let ended = answer_over_a_loss(hosts, 0, 1);
    assert!(!ended.status.success(), "{}", said(&ended));
    let again = ["run", MODEL, "once", "--max-tokens", "4"];
    until("n0 answers alone", || hosts[0].run(&again).status.success());
    assert_eq!(numbers(&hosts[0]), "cpu+mlx(cpu)");
}
