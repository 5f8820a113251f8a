//! Weights that travel once: each machine gets what it computes with, and what it says of that.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::{TestMachine, live::join_by_token, machines, said, until, until_ready};
use crate::common::namespaces::NamespaceNetwork;
use crate::nodes::tiny::{FAMILIES, TinyModelSpec};

const MODEL: &str = "deep.gguf";

/// Some 28 MB, so that a third of it is far more than what tells a file from others.
const DEEP: TinyModelSpec = TinyModelSpec {
    layers: 4,
    ffn: 8192, // matrices of many pieces
    ..FAMILIES[0]
};

/// Share of a model's bytes that each machine has, as `host` tells; those without it have none.
fn shares(host: &TestMachine, model: &str) -> Vec<(String, f64)> {
    let told: Value = serde_json::from_str(&host.told(&["models", "--nodes", "--json"])).unwrap();
    let nodes = told["nodes"].as_array().unwrap().iter();
    let share = |node: &Value| {
        let models = node["models"].as_array().unwrap();
        let own = models.iter().find(|it| it["name"] == model);
        let number = |model: &Value, name: &str| model[name].as_f64().unwrap();
        let share = own.map_or(0.0, |it| number(it, "here_bytes") / number(it, "bytes"));
        (node["node"].as_str().unwrap().to_owned(), share)
    };
    let mut shares: Vec<_> = nodes.map(share).collect();
    shares.sort_by(|a, b| a.0.cmp(&b.0));
    shares
}

#[test]
fn each_machine_gets_what_it_computes_with() {
    let test = "weights between namespaces";
    let name = format!("pg{}x", std::process::id());
    let Some(network) = NamespaceNetwork::new(&name, 3, test) else {
        return;
    };
    let Some(mut hosts) = machines(&network, test) else {
        return;
    };
    DEEP.write(&hosts[0].home.path().join(MODEL));
    let library = std::env::var("PACELINE_MLXC").ok();
    let _hub = folder_hub(&hosts[0]);
    for (number, host) in hosts.iter_mut().enumerate() {
        let library = library.iter().map(|path| format!("PACELINE_MLXC={path}"));
        let own = library.chain([format!("HF_ENDPOINT={FOLDER_HUB}")]);
        host.variables.extend(own);
        // n2 has room for a part of the model, and not for all of it.
        let budget = if number == 2 { "24M" } else { "1G" };
        host.up_at("52415", &["--disk-budget", budget]);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    for host in &hosts[1..] {
        join_by_token(host, &token);
    }
    until("all see all", || hosts[0].sees("alive").len() == 3);

    let (alone, _) = hosts[0].answer(MODEL, &["--local"]);
    for split in ["pipeline", "tensor"] {
        let load = ["load", MODEL, "--nodes", "3", "--split", split];
        hosts[0].told(&[&load[..], &["--weights", "shard", "--threads", "1"]].concat());
        until_ready(&hosts[0], &hosts[2]);
        let (answer, line) = hosts[2].answer(MODEL, &[]);
        assert!(line.contains("asking the instance"), "{line}");
        assert_eq!(answer["tokens"], alone["tokens"], "{split}");
        let shares = shares(&hosts[1], MODEL);
        assert_eq!(shares[0].1, 0.0, "its own file is in no store: {shares:?}");
        // 4 MB of 28 tell the file from others. Tensor splits read columns of whole matrices.
        let most = if split == "pipeline" { 0.7 } else { 0.85 };
        for (node, share) in &shares[1..] {
            assert!((0.15..most).contains(share), "{split}: {node}: {shares:?}");
        }
        let kept = hosts[0].run(&["rm", MODEL, "--everywhere"]);
        assert!(said(&kept).contains("is loaded"), "{}", said(&kept));
        hosts[0].told(&["unload", MODEL]);
        until("it is unloaded", || {
            hosts[0].told(&["ps", "--json"]) == "[]"
        });
        hosts[0].told(&["rm", MODEL, "--everywhere"]);
        assert!(
            self::shares(&hosts[0], MODEL)
                .iter()
                .all(|(_, share)| *share == 0.0)
        );
    }
    of_several_files(&hosts, library.is_some());
    sent(&hosts, &alone);
    continues_after_a_kill(&network, &mut hosts);
}

/// Address of the hub of [`folder_hub`], in a namespace of its own.
const FOLDER_HUB: &str = "http://127.0.0.1:8000";

/// Serves the files of a folder as the hub does.
const SERVE: &str = "\
import http.server
handler = http.server.SimpleHTTPRequestHandler
server = http.server.ThreadingHTTPServer(('127.0.0.1', 8000), handler)
print('listening', flush=True)
server.serve_forever()
";

fn copy_golden(folder: &str, to: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden");
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(golden.join(folder)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

/// A hub that only this machine reaches, with a sharded folder as `own/repo`.
fn folder_hub(host: &TestMachine) -> Hub {
    let root = host.home.path().join("hub");
    let (api, revision) = (root.join("api/models/own"), "ab".repeat(20));
    let files = root.join("own/repo/resolve").join(&revision);
    copy_golden("hf/llama-rope3-sharded", &files);
    let siblings = fs::read_dir(&files).unwrap().map(|file| {
        let file = file.unwrap();
        json!({ "rfilename": file.file_name().to_str(), "size": file.metadata().unwrap().len() })
    });
    let list = json!({ "sha": revision, "siblings": siblings.collect::<Vec<_>>() });
    fs::create_dir_all(&api).unwrap();
    fs::write(api.join("repo"), list.to_string()).unwrap();
    // Its path: a machine has no PATH.
    let mut python = Command::new("python3");
    python.args(["-c", "import sys; print(sys.executable, end='')"]);
    let python = crate::common::text(&python.output().unwrap().stdout);
    let mut server = host.program(&python, &["-c", SERVE]);
    let mut server = Hub(server.current_dir(root).spawn().unwrap());
    let mut line = String::new();
    let mut told = BufReader::new(server.0.stdout.take().unwrap());
    told.read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "listening");
    server
}

/// A server that ends with the test.
struct Hub(Child);

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// A split file, and folders of this machine and of the hub, reach machines that lack them. They
/// answer there as on one machine.
fn of_several_files(hosts: &[TestMachine], has_mlx: bool) {
    let home = hosts[0].home.path();
    let split = DEEP.write_split(home, 3);
    copy_golden("mlx/llama-4bit", &home.join("llama-4bit"));
    let mlx = ["--engine", "mlx", "--class", "mlx-f32"];
    let mut cases = vec![
        (&*split, "n0,n1", &[][..]),
        ("own/repo", "n0,n1,n2", &[]),
        ("llama-4bit", "n0,n1", &[]),
    ];
    if has_mlx {
        cases.push((&split, "n0,n1", &mlx));
        until("all list their engines", || {
            let nodes = hosts[0].nodes();
            nodes
                .iter()
                .all(|node| node["devices"].as_array().is_some_and(|it| !it.is_empty()))
        });
    }
    for (model, nodes, engine) in cases {
        let load = ["load", model, "--nodes", nodes, "--split", "pipeline"];
        let load = [&load[..], &["--weights", "shard", "--threads", "1"], engine].concat();
        hosts[0].told(&load);
        until_ready(&hosts[0], &hosts[2]);
        let (answer, line) = hosts[2].answer(model, &[]);
        assert!(line.contains("asking the instance"), "{model}: {line}");
        let (alone, _) = hosts[0].answer(model, &[&["--local"][..], engine].concat());
        assert_eq!(answer["tokens"], alone["tokens"], "{model} {engine:?}");
        let shares = shares(&hosts[1], model);
        assert!(shares[1].1 > 0.1, "{model}: {shares:?}");
        if model == split {
            // Half of the layers, and 4 MB of 28 that tell its files from others.
            assert!(shares[1].1 < 0.65, "a part of each file: {shares:?}");
        }
        hosts[0].told(&["unload", model]);
        until("it is unloaded", || {
            hosts[0].told(&["ps", "--json"]) == "[]"
        });
        hosts[0].told(&["rm", model, "--everywhere"]);
        let left = fs::read_dir(hosts[1].home.path().join("copies")).unwrap();
        assert_eq!(left.count(), 0, "{model}");
    }
    let told = hosts[0].told(&["pull", &split, "--to", "n1"]);
    assert!(told.contains("m-00001-of-00003.gguf is on n1"), "{told}");
    assert_eq!(self::shares(&hosts[0], &split)[1].1, 1.0);
    let load = ["load", &split, "--nodes", "n1", "--threads", "1"];
    hosts[0].told(&load);
    let (alone, _) = hosts[0].answer(&split, &["--local"]);
    let (answer, line) = hosts[0].answer(&split, &[]);
    assert!(line.contains("asking the instance on n1"), "{line}");
    assert_eq!(answer["tokens"], alone["tokens"]);
    hosts[0].told(&["unload", &split]);
    until("it is unloaded", || {
        hosts[0].told(&["ps", "--json"]) == "[]"
    });
    hosts[0].told(&["rm", &split, "--everywhere"]);
}

fn received(host: &TestMachine) -> u64 {
    let own = host.namespace.as_deref().unwrap();
    let show = ["-n", own, "-s", "-j", "link", "show", "eth0"];
    let told = Command::new("ip").args(show).output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    told[0]["stats64"]["rx"]["bytes"].as_u64().unwrap()
}

/// A machine that is killed while it receives a model continues where it ended.
fn continues_after_a_kill(network: &NamespaceNetwork, hosts: &mut [TestMachine]) {
    if let Err(why) = network.slow_down() {
        return eprintln!("SKIPPED a receiver is killed: {why}");
    }
    let bytes = fs::metadata(hosts[0].home.path().join(MODEL))
        .unwrap()
        .len();
    let before = received(&hosts[1]);
    let mut pull = hosts[0].command(&["pull", MODEL, "--to", "n1"]);
    let mut pull = pull.spawn().unwrap();
    until("a part is here", || {
        received(&hosts[1]) - before > bytes / 3
    });
    hosts[1].kill();
    pull.wait().unwrap(); // failed, unless this test slept for long
    hosts[1].up_at("52415", &[]);
    // It fails until n0 has a connection to n1 again.
    let pulled = || hosts[0].run(&["pull", MODEL, "--to", "n1"]).status;
    until("the rest is here", || pulled().success());
    // A request of 1 MiB was under way; headers of packets and messages are some hundredths.
    let all = received(&hosts[1]) - before;
    assert!(all < bytes + bytes / 12 + (1 << 20), "{all} of {bytes}");
}

fn whole_copies(host: &TestMachine) -> Vec<PathBuf> {
    let files = fs::read_dir(host.home.path().join("copies"));
    let files = files.into_iter().flatten().flatten();
    let files = files.map(|file| file.path());
    let is_whole = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "gguf");
    files.filter(is_whole).collect()
}

/// Overwrites a copy as a program or a disk does, with its length and its time of change as before.
fn damage(copy: &Path, bytes: &[u8], at: u64) {
    let file = fs::File::options().write(true).open(copy).unwrap();
    let changed = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.set_modified(changed).unwrap();
}

/// A damaged copy of `n1` gives the right answer once it is loaded, and `pull` completes a cut one.
fn mended(hosts: &[TestMachine], alone: &Value) {
    let copies = whole_copies(&hosts[1]);
    let [copy] = copies.as_slice() else {
        panic!("{copies:?}");
    };
    let right = fs::read(copy).unwrap();
    damage(copy, &vec![0; 8 << 20], 12 << 20);
    let load = ["load", MODEL, "--nodes", "n1", "--threads", "1"];
    hosts[0].told(&[&load[..], &["--weights", "whole"]].concat());
    let (answer, line) = hosts[0].answer(MODEL, &[]);
    assert!(line.contains("asking the instance on n1"), "{line}");
    assert_eq!(answer["tokens"], alone["tokens"]);
    assert!(fs::read(copy).unwrap() == right, "it is mended on the disk");
    hosts[0].told(&["unload", MODEL]);

    let file = fs::File::options().write(true).open(copy).unwrap();
    file.set_len(right.len() as u64 - (1 << 20)).unwrap();
    let told = hosts[0].told(&["pull", MODEL, "--to", "n1"]);
    assert!(
        told.contains("deep.gguf is on n1 (") && told.contains("), mended 1"),
        "{told}"
    );
    assert!(fs::read(copy).unwrap() == right, "it is complete again");
    let told = hosts[0].told(&["pull", MODEL, "--to", "n1"]);
    assert!(!told.contains("mended"), "{told}");
}

/// The model is sent to the machine that has room for it, and refused by the other one.
fn sent(hosts: &[TestMachine], alone: &Value) {
    let sent = hosts[0].run(&["pull", MODEL, "--to", "n1,n2"]);
    assert!(!sent.status.success(), "n2 has no room for it");
    let said = said(&sent);
    assert!(
        said.contains("n2: ") && said.contains("over the disk budget"),
        "{said}"
    );
    let shares = shares(&hosts[2], MODEL);
    assert_eq!((shares[1].1, shares[2].1), (1.0, 0.0), "{shares:?}");
    let table = hosts[2].told(&["models", "--nodes"]);
    assert!(
        table.contains("n2: ") && table.contains("disk budget"),
        "{table}"
    );
    mended(hosts, alone);
    until("it is unloaded", || {
        hosts[2].told(&["ps", "--json"]) == "[]"
    });
    let freed = hosts[2].told(&["rm", MODEL, "--node", "n1"]);
    assert!(freed.contains("removed deep.gguf on n1"), "{freed}");
    let none = hosts[2].run(&["rm", MODEL, "--node", "n1"]);
    assert!(
        super::said(&none).contains("n1: it has no model"),
        "{}",
        super::said(&none)
    );
}

/// A hub that has one file, `own/repo:m.gguf`.
struct TestHub {
    address: String,
    /// How often the file is still given; the hub breaks off what comes then.
    left: Arc<AtomicUsize>,
}

impl TestHub {
    fn start(file: Vec<u8>, times: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let left = Arc::new(AtomicUsize::new(times));
        let own = Arc::clone(&left);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                give(&stream, &file, &own);
            }
        });
        Self { address, left }
    }

    /// A program of a machine that reaches this hub.
    fn beside(&self, host: &TestMachine, args: &[&str]) -> std::process::Command {
        let hub = format!("HF_ENDPOINT={}", self.address);
        let own = [hub.as_str(), env!("CARGO_BIN_EXE_paceline")];
        host.program("/usr/bin/env", &[&own[..], args].concat())
    }

    /// Starts the machine's node without a file of the model.
    fn up_anew(&self, host: &mut TestMachine) {
        if host.node.is_some() {
            host.kill();
        }
        for folder in ["models", "copies"] {
            let _ = fs::remove_dir_all(host.home.path().join(folder));
        }
        self.up(host);
    }

    /// Starts the machine's node.
    fn up(&self, host: &mut TestMachine) {
        let log = fs::File::create(host.home.path().join("log")).unwrap();
        let up = ["up", "--port", "0", "--control-port", "0", "--no-beacons"];
        let mut command = self.beside(host, &[&up[..], &["--name", "alone"]].concat());
        let command = command.stdout(Stdio::null()).stderr(log);
        host.node = Some(command.spawn().unwrap());
        until("it is up", || !host.nodes().is_empty());
    }
}

/// Answers one request, for the list of files or for the file; a broken stream is the client's.
fn give(mut stream: &TcpStream, file: &[u8], left: &AtomicUsize) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let request = lines.next().unwrap_or_default();
    let _ = lines.find(String::is_empty);
    let list = json!({
        "sha": "ab".repeat(20),
        "siblings": [{ "rfilename": "m.gguf", "size": file.len() }],
    });
    let is_list = request.starts_with("GET /api/");
    let body = match is_list {
        true => list.to_string().into_bytes(),
        false => file.to_vec(),
    };
    // Requests come one after the other.
    let times = left.load(Ordering::SeqCst);
    match (is_list, times) {
        (true, _) => {}
        (false, 0) => return,
        (false, _) => left.store(times - 1, Ordering::SeqCst),
    }
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(&body);
}

/// A file of the store with wrong bytes answers nothing, and is fetched again by `pull`.
fn mended_by_pull(hub: &TestHub, host: &TestMachine, right: &[u8]) {
    let stored = host.home.path().join("models/own--repo--m.gguf/m.gguf");
    damage(&stored, b"wrong", right.len() as u64 / 2);
    let run = ["run", "own/repo", "a", "--raw", "--local"];
    let refused = hub.beside(host, &run).output().unwrap();
    assert!(!refused.status.success(), "{}", said(&refused));
    assert!(
        said(&refused).contains("the file is damaged there"),
        "{}",
        said(&refused)
    );
    let again = hub.beside(host, &["pull", "own/repo"]).output().unwrap();
    let told = crate::common::text(&again.stdout);
    assert!(
        told.contains("own/repo: was damaged, fetched again"),
        "{}",
        said(&again)
    );
    assert!(
        fs::read(&stored).unwrap() == right,
        "it is the file of before"
    );
}

/// `pull` of a damaged file; another machine has a copy. The hub gives the file once.
#[test]
fn pull_mends_a_file_from_another_machine() {
    let mut alone = TestMachine::new("alone", None);
    let file = alone.home.path().join("file");
    FAMILIES[0].write(&file);
    let right = fs::read(&file).unwrap();
    let hub = TestHub::start(right.clone(), 1);
    hub.up_anew(&mut alone);
    let pull = ["pull", "own/repo"];
    let pulled = hub.beside(&alone, &pull).output().unwrap();
    assert!(pulled.status.success(), "{}", said(&pulled));
    let _other = super::shared::up("other", Some(&alone));
    alone.told(&[&pull[..], &["--to", "other"]].concat());

    let stored = alone.home.path().join("models/own--repo--m.gguf/m.gguf");
    damage(&stored, b"wrong", 9);
    let cut = fs::OpenOptions::new().write(true).open(&stored).unwrap();
    cut.set_len(right.len() as u64 - 1).unwrap();
    let again = hub.beside(&alone, &pull).output().unwrap();
    assert!(again.status.success(), "{}", said(&again));
    let ranges = said(&again);
    assert!(
        ranges.contains("m.gguf was damaged at bytes 0..65536, "),
        "{ranges}"
    );
    assert!(fs::read(&stored).unwrap() == right);
}

/// `paceline ps --json` of the only instance.
fn only(host: &TestMachine) -> Value {
    host.ps()[0].clone()
}

#[test]
fn a_model_that_no_machine_has_comes_from_the_hub_it_came_from() {
    const HUB_MODEL: &str = "own/repo";
    let mut alone = TestMachine::new("alone", None);
    let file = alone.home.path().join("file");
    FAMILIES[0].write(&file);
    let right = fs::read(&file).unwrap();
    let hub = TestHub::start(right.clone(), 3);
    hub.up_anew(&mut alone);
    let pulled = hub.beside(&alone, &["pull", HUB_MODEL]).output().unwrap();
    assert!(pulled.status.success(), "{}", said(&pulled));
    mended_by_pull(&hub, &alone, &right);
    alone.told(&["load", HUB_MODEL, "--threads", "1"]);
    let (before, _) = alone.answer(HUB_MODEL, &[]);

    hub.up_anew(&mut alone);
    until("it has come", || !whole_copies(&alone).is_empty());
    until("it answers", || only(&alone)["state"] == "ready");
    let (after, line) = alone.answer(HUB_MODEL, &[]);
    assert!(line.contains("asking the instance on alone"), "{line}");
    assert_eq!(after["tokens"], before["tokens"]);
    assert_eq!(hub.left.load(Ordering::SeqCst), 0, "once for each time");

    // Where nobody has the right bytes, the damaged file is named.
    alone.kill();
    let copies = whole_copies(&alone);
    damage(
        &copies[0],
        b"wrong",
        fs::metadata(&copies[0]).unwrap().len() / 2,
    );
    hub.up(&mut alone);
    let path = copies[0].display().to_string();
    until_refused(
        &alone,
        &[path.as_str(), " is damaged", "`paceline rm own/repo`"],
    );

    hub.up_anew(&mut alone);
    until_refused(
        &alone,
        &[
            "cannot reach 127.0.0.1",
            "`paceline pull own/repo --to alone`",
        ],
    );
}

/// Waits until the only instance cannot answer, for a reason with these parts. Whether it will be
/// tried again depends on what its node had written before it was killed.
fn until_refused(host: &TestMachine, parts: &[&str]) {
    let is_refused = || {
        let instance = only(host);
        let told = instance["reason"].as_str().unwrap_or_default();
        instance["state"] != "ready" && parts.iter().all(|part| told.contains(part))
    };
    until(&format!("it is refused: {parts:?}"), is_refused);
}
