//! A release for three machines while they answer. The second release is a copy of the program with
//! other bytes for its version and its protocol (`src/release.rs`), which takes no second build.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blake2::{Blake2b512, Digest as _};
use flate2::Compression;
use flate2::write::GzEncoder;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::Value;
use sha2::Sha256;

use super::models::python;
use super::{TestMachine, said, until, until_ready};
use crate::common::namespaces::NamespaceNetwork;
use crate::common::{collect, text};
use crate::nodes::tiny::FAMILIES;

const MODEL: &str = "llama.gguf";

/// Identity of the key in its signatures.
const KEY_ID: [u8; 8] = *b"a key id";

fn key() -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap()
}

/// The public key as a file of minisign's.
fn public_key() -> String {
    let bytes = [b"Ed", &KEY_ID[..], key().public_key().as_ref()].concat();
    format!("untrusted comment: a key\n{}\n", STANDARD.encode(bytes))
}

/// The signature of `bytes` as a file of minisign's.
fn signature(bytes: &[u8]) -> String {
    let own = key().sign(&Blake2b512::digest(bytes));
    let comment = "a release";
    let whole = key().sign(&[own.as_ref(), comment.as_bytes()].concat());
    let own = STANDARD.encode([b"ED", &KEY_ID[..], own.as_ref()].concat());
    let whole = STANDARD.encode(whole);
    format!("untrusted comment: signature\n{own}\ntrusted comment: {comment}\n{whole}\n")
}

fn release_program(target: &Path, version: &str, protocol: u8) {
    let own = env!("CARGO_BIN_EXE_paceline");
    let mark = "paceline-release:";
    let found = Command::new("grep")
        .args(["-obUaF", mark, own])
        .output()
        .unwrap();
    let found = text(&found.stdout);
    let at: usize = found.split(':').next().unwrap().parse().unwrap();
    assert_eq!(found.lines().count(), 1, "the program has its release once");
    fs::copy(own, target).unwrap();
    let file = fs::File::options().write(true).open(target).unwrap();
    let at = (at + mark.len()) as u64;
    file.write_all_at(format!("{version:15}").as_bytes(), at)
        .unwrap();
    file.write_all_at(&[protocol], at + 16).unwrap();
}

fn release(folder: &Path, program: &Path, version: &str) {
    let name = format!("paceline-{version}-linux-{}.tar.gz", std::env::consts::ARCH);
    fs::create_dir(folder).unwrap();
    let archive = folder.join(&name);
    // Without compression, which takes seconds.
    let gzip = GzEncoder::new(fs::File::create(&archive).unwrap(), Compression::none());
    let mut files = tar::Builder::new(gzip);
    files
        .append_path_with_name(program, "paceline/bin/paceline")
        .unwrap();
    let key = folder.join("release.pub");
    fs::write(&key, public_key()).unwrap();
    files
        .append_path_with_name(&key, "paceline/lib/paceline/release.pub")
        .unwrap();
    files.into_inner().unwrap().finish().unwrap();
    let hash = Sha256::digest(fs::read(&archive).unwrap());
    let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    let sums = format!("{hash}  {name}\n");
    fs::write(
        folder.join("SHA256SUMS.minisig"),
        signature(sums.as_bytes()),
    )
    .unwrap();
    fs::write(folder.join("SHA256SUMS"), sums).unwrap();
}

/// Gives a machine an installation of `program`, as install.sh makes it.
fn install(machine: &mut TestMachine, program: &Path) {
    let prefix = machine.home.path().join("prefix");
    for folder in ["bin", "lib/paceline"] {
        fs::create_dir_all(prefix.join(folder)).unwrap();
    }
    let own = prefix.join("bin/paceline");
    fs::hard_link(program, &own).unwrap();
    fs::write(prefix.join("lib/paceline/release.pub"), public_key()).unwrap();
    let list = "bin/paceline\nlib/paceline/release.pub\n";
    fs::write(prefix.join("lib/paceline/installed"), list).unwrap();
    machine.paceline = own.to_str().unwrap().to_owned();
}

/// A client that streams answers in a machine's namespace until its input is closed.
fn client(machine: &TestMachine) -> Child {
    let client = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/cluster/upgrading_client.py"
    );
    let mut command = machine.program(&python(), &[client, MODEL]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut out = BufReader::with_capacity(1, child.stdout.as_mut().unwrap());
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "begun\n");
    child
}

fn versions(host: &TestMachine) -> Vec<String> {
    let nodes = host.nodes().into_iter();
    nodes
        .filter(|node| node["state"] == "alive")
        .map(|node| node["build"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn three_machines_get_a_release_while_they_answer() {
    let test = "a release over namespaces";
    let name = format!("pu{}", std::process::id());
    let Some(network) = NamespaceNetwork::new(&name, 3, test) else {
        return;
    };
    let Some(mut hosts) = super::machines(&network, test) else {
        return;
    };
    let files = tempfile::tempdir_in(hosts[0].home.path()).unwrap();
    let [former, next] = ["former", "next"].map(|name| files.path().join(name));
    let own = env!("CARGO_PKG_VERSION");
    release_program(&former, own, 5);
    release_program(&next, "9.1.0", 6);
    let [back, folder] = ["back", "release"].map(|name| files.path().join(name));
    release(&folder, &next, "9.1.0");
    for host in &mut hosts {
        install(host, &former);
    }
    FAMILIES[0].write(&hosts[0].home.path().join(MODEL));
    for host in &mut hosts {
        host.up_at("52415", &[]);
    }
    let token = hosts[0].told(&["key", "cluster", "show"]);
    for host in &hosts[1..] {
        super::live::join_by_token(host, &token);
    }
    until("all see all", || hosts[0].sees("alive").len() == 3);
    let few = ["--threads", "1", "--context", "4096", "--nodes", "3"];
    hosts[0].told(&[&["load", MODEL][..], &few].concat());
    for host in &hosts[1..] {
        until_ready(&hosts[0], host);
    }

    refuses_what_is_changed(&hosts[0], &folder);
    let clients: Vec<Child> = hosts.iter().map(client).collect();
    let output = hosts[0].run(&["upgrade", folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", said(&output));
    // The upgrading machine restarted last: others learn its version with its next record.
    until("all versions are seen", || {
        versions(&hosts[1]) == ["9.1.0"; 3]
    });
    let mut texts = Vec::new();
    for mut client in clients {
        drop(client.stdin.take());
        let output = collect(client);
        let told: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
        assert_eq!(told["errors"], Value::Array(Vec::new()), "{told}");
        println!(
            "{} answers, {} reconnects",
            told["answers"], told["reconnects"]
        );
        texts.push(told["texts"].clone());
    }
    assert_eq!(texts[0].as_array().unwrap().len(), 1, "{texts:?}");
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");

    // Back: refused for the cluster, done for one machine where its user says so.
    release(&back, &former, own);
    let output = hosts[0].run(&["upgrade", back.to_str().unwrap()]);
    assert!(!output.status.success());
    let older = format!("{own} is older than its 9.1.0");
    assert!(said(&output).contains(&older), "{}", said(&output));
    let args = ["upgrade", "--local", "--downgrade", back.to_str().unwrap()];
    assert_eq!(hosts[0].told(&args), format!("this machine has {own}"));
    let mut client = client(&hosts[0]);
    drop(client.stdin.take());
    let told: Value = serde_json::from_str(&text(&collect(client).stdout)).unwrap();
    assert_eq!(
        told["texts"], texts[0],
        "machines of two protocols answer together"
    );
}

/// An archive with another hash, and checksums with another signature, change nothing.
fn refuses_what_is_changed(host: &TestMachine, release: &Path) {
    let bad = release.with_file_name("bad");
    fs::create_dir(&bad).unwrap();
    for entry in fs::read_dir(release).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::hard_link(&path, bad.join(path.file_name().unwrap())).unwrap();
        }
    }
    let upgrade = ["upgrade", bad.to_str().unwrap()];
    let archive = fs::read_dir(&bad).unwrap();
    let mut archive = archive.map(|entry| entry.unwrap().path());
    let archive = archive.find(|path| path.to_str().unwrap().ends_with("gz"));
    let archive = archive.unwrap();
    fs::remove_file(&archive).unwrap();
    fs::write(&archive, "other").unwrap();
    let output = host.run(&upgrade);
    assert!(
        !output.status.success() && said(&output).contains("sha256 is"),
        "{}",
        said(&output)
    );
    let sums = bad.join("SHA256SUMS");
    let text = fs::read_to_string(&sums).unwrap();
    fs::remove_file(&sums).unwrap();
    fs::write(&sums, format!("{text}{}  x\n", "0".repeat(64))).unwrap();
    let output = host.run(&upgrade);
    let told = said(&output);
    assert!(
        !output.status.success() && told.contains("signature"),
        "{told}"
    );
    assert!(
        versions(host)
            .iter()
            .all(|it| it == env!("CARGO_PKG_VERSION"))
    );
}
