//! Machines that form a cluster: network namespaces with addresses, homes and processes of their
//! own, joined by a bridge.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod adapted;
mod alone;
mod apart;
mod arrays;
mod asleep;
mod battery;
mod chaos;
mod engines;
mod live;
mod models;
mod programs;
mod replicas;
mod shared;
mod traced;
mod train;
mod upgrade;
mod ways;
mod weights;
mod wires;

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::common::namespaces::NamespaceNetwork;
use crate::common::{finish, text, words};

/// A home, and the namespace of its host where it has one.
struct TestMachine {
    name: String,
    paceline: String,
    namespace: Option<String>,
    home: TempDir,
    /// Its environment, as `NAME=VALUE`, besides its home.
    variables: Vec<String>,
    node: Option<Child>,
}

impl TestMachine {
    fn new(name: &str, namespace: Option<&str>) -> Self {
        Self {
            name: name.to_owned(),
            paceline: env!("CARGO_BIN_EXE_paceline").to_owned(),
            namespace: namespace.map(str::to_owned),
            home: tempfile::tempdir().unwrap(),
            variables: Vec::new(),
            node: None,
        }
    }

    /// A command of this machine, in its namespaces, with nothing of the tester's environment.
    fn command(&self, args: &[&str]) -> Command {
        self.program(&self.paceline, args)
    }

    fn program(&self, program: &str, args: &[&str]) -> Command {
        let home = format!("PACELINE_HOME={}", self.home.path().display());
        let variables = self.variables.iter().map(String::as_str);
        let program = ["env", "-i", &home]
            .into_iter()
            .chain(variables)
            .chain([program]);
        let own = "unshare --pid --mount --fork --kill-child --mount-proc";
        let around: Vec<&str> = match &self.namespace {
            Some(namespace) => ["ip", "netns", "exec", namespace]
                .into_iter()
                .chain(own.split(' '))
                .collect(),
            None => Vec::new(),
        };
        let all: Vec<&str> = around.into_iter().chain(program).collect();
        let mut command = Command::new(all[0]);
        command.args(&all[1..]).args(args).stdin(Stdio::null());
        command.current_dir(self.home.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        finish(&mut self.command(args))
    }

    /// The output of a command, which must end well.
    fn told(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", said(&output));
        text(&output.stdout).trim().to_owned()
    }

    /// A greedy answer of 24 tokens by `paceline run`, and its messages.
    fn answer(&self, model: &str, more: &[&str]) -> (Value, String) {
        let run = ["run", model, "once", "--json"];
        let short = words("--temperature 0 --max-tokens 24");
        let output = self.run(&[&run[..], &short, more].concat());
        assert!(output.status.success(), "{}", said(&output));
        let answer = serde_json::from_str(&text(&output.stdout)).unwrap();
        (answer, said(&output))
    }

    /// Starts its node, and waits until it answers.
    fn up(&mut self, args: &[&str]) {
        self.up_at("0", args);
    }

    /// As [`up`](Self::up), with its API at a port.
    fn up_at(&mut self, port: &str, args: &[&str]) {
        let up = ["up", "--port", port, "--name", &self.name];
        let log = std::fs::File::create(self.home.path().join("log")).unwrap();
        let mut command = self.command(&up);
        command.args(args).stdout(Stdio::null()).stderr(log);
        if self.namespace.is_none() {
            command.arg("--no-beacons"); // tests are nobody's business on a real network
        }
        self.node = Some(command.spawn().unwrap());
        until(&format!("{} is up", self.name), || !self.nodes().is_empty());
    }

    /// Kills its node as a crash does.
    fn kill(&mut self) {
        let mut node = self.node.take().unwrap();
        node.kill().unwrap();
        node.wait().unwrap();
        // Within a namespace of processes the node ends a moment after the program that made it.
        until("its socket is dead", || self.nodes().is_empty());
    }

    /// `paceline nodes --json`, empty while its node does not answer.
    fn nodes(&self) -> Vec<Value> {
        let output = self.run(&["nodes", "--json"]);
        let nodes = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        nodes.as_array().cloned().unwrap_or_default()
    }

    /// `paceline ps --json`.
    fn ps(&self) -> Vec<Value> {
        serde_json::from_str(&self.told(&["ps", "--json"])).unwrap()
    }

    fn api(&self) -> String {
        let mut api = None;
        until("the API listens", || {
            api = self.nodes()[0]["api"][0].as_str().map(str::to_owned);
            api.is_some()
        });
        api.unwrap()
    }

    fn port(&self) -> u16 {
        let api = self.api();
        api.rsplit_once(':').unwrap().1.parse().unwrap()
    }

    /// Names of the nodes in this state, as this machine sees them.
    fn sees(&self, state: &str) -> Vec<String> {
        let nodes = self.nodes().into_iter();
        let name = |node: Value| node["name"].as_str().unwrap().to_owned();
        let mut names: Vec<String> = nodes
            .filter(|node| node["state"] == state)
            .map(name)
            .collect();
        names.sort_unstable();
        names
    }
}

impl Drop for TestMachine {
    fn drop(&mut self) {
        if self.node.is_some() {
            if std::thread::panicking() {
                let log = std::fs::read_to_string(self.home.path().join("log"));
                eprintln!("{}: {}", self.name, log.unwrap_or_default());
            }
            let node = self.node.as_mut();
            let _ = node.map(|node| (node.kill(), node.wait()));
        }
    }
}

/// A machine n0, n1 ... for each host; `None` with a line where the system does not let us.
fn machines(network: &NamespaceNetwork, test: &str) -> Option<Vec<TestMachine>> {
    let hosts: Vec<TestMachine> = network
        .hosts()
        .iter()
        .enumerate()
        .map(|(number, namespace)| TestMachine::new(&format!("n{number}"), Some(namespace)))
        .collect();
    let probe = hosts[0].run(&["--version"]);
    if probe.status.success() {
        return Some(hosts);
    }
    let said = said(&probe);
    eprintln!("SKIPPED {test}: no namespaces of processes: {said}");
    None
}

/// Waits until `host` lists the instances that `loader` has loaded, all of them ready. `load`
/// returns when its own node knows that, and the others hear of it a moment later.
fn until_ready(loader: &TestMachine, host: &TestMachine) {
    let listed = |machine: &TestMachine| -> Vec<(Value, bool)> {
        let all = machine.ps().into_iter();
        all.map(|it| (it["id"].clone(), it["state"] == "ready"))
            .collect()
    };
    until(&format!("{} knows the instance", host.name), || {
        let seen = listed(host);
        !seen.is_empty() && seen.iter().all(|(_, is_ready)| *is_ready) && seen == listed(loader)
    });
}

fn said(output: &Output) -> String {
    text(&output.stderr)
}

/// Waits until `done`, which takes a few seconds at most on a machine that is not busy.
fn until(what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        let waited = start.elapsed();
        assert!(
            waited < Duration::from_secs(40),
            "{what}: not within {waited:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    start.elapsed()
}
