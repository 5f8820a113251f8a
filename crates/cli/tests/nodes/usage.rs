//! Splits that cannot be, and workers that nobody asked for.

use std::process::{Command, Output, Stdio};

use super::processes::assert_gone;
use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, finish, text};
use super::{alone, http, until};
use crate::common::terminal::Terminal;
use crate::common::{assert_parts, rows, words};

/// Wrong for every model.
const OPTIONS: &str = "\
--nodes 0 | '0' | --nodes | 1..=64
--nodes 65 | '65' | --nodes | 1..=64
--nodes -1 | '-1' | --nodes
--nodes two | 'two' | --nodes
--nodes 3 --split 2x2 | --split 2x2 is for | 4 nodes | --nodes is 3 | hint: | --nodes 4
--split 2x2 | --nodes is 1 | hint: | --nodes 4
--nodes 2 --split diagonal | \"diagonal\" | auto, tensor, pipeline
--nodes 2 --split 0x2 | \"0x2\"
--nodes 3 --shares 1,2 | --shares has 2 | --nodes is 3 | hint: | --shares 2,1,1
--shares 3,1 | --shares has 2 | hint: | --nodes 2
--nodes 2 --shares 0,1 | '0' | --shares";

/// Wrong for a model of four layers and fewer than 64 heads.
const SPLITS: &str = "\
--nodes 5 --split pipeline | 5 pipeline stages for 4 layers | hint: | --nodes
--nodes 2 --split experts | layers 0..4 have no experts | hint: | --split tensor
--nodes 64 --split tensor | gets nothing | hint: | --split pipeline";

/// Every command that computes over nodes says so, ends with this code, and leaves nothing.
fn assert_refused(wrong: &str, code: i32) {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let commands: [&[&str]; 3] = [
        &["run", &model, "hi"],
        &["up", "--no-beacons", "--port", "0", "--model", &model],
        &["bench", "model", &model],
    ];
    for (args, says) in rows(wrong) {
        for command in commands {
            let output = finish(&mut world.paceline(command.iter().chain(&args)));
            let said = text(&output.stderr);
            let got = output.status.code();
            assert_eq!(got, Some(code), "{command:?} {args:?}: {said}");
            assert_eq!(text(&output.stdout), "", "{args:?}");
            assert_parts(&args, &said, &says);
        }
    }
    world.assert_clean();
}

#[test]
fn options_that_cannot_be_are_said_with_advice() {
    assert_refused(OPTIONS, 2);
}

#[test]
fn what_a_model_cannot_be_split_into_is_said_with_advice() {
    assert_refused(SPLITS, 1);
}

/// Options that are wrong for every model are refused before a model is fetched.
#[test]
fn nothing_is_fetched_for_a_split_that_cannot_be() {
    let world = TestHome::new();
    for args in [
        ["--nodes=3", "--split=2x2"],
        ["--nodes=2", "--shares=1,2,3"],
    ] {
        let output = world.run("smollm2", &["hi", args[0], args[1]]);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        world.assert_clean();
    }
}

/// The output of `paceline run MODEL hi ARGS` under a limit of the shell's `ulimit`.
fn limited(world: &TestHome, limit: &str, model: &str, args: &str) -> Output {
    let paceline = world.paceline([""; 0]).get_program().to_owned();
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &format!("ulimit {limit}; exec \"$0\" \"$@\"")])
        .arg(paceline)
        .args(["run", model, "hi"])
        .args(words(args))
        .env_clear()
        .env("PACELINE_HOME", world.path("home"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    finish(&mut shell)
}

#[test]
fn workers_that_cannot_have_memory_say_so() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = "--context 1000000000 --nodes 2";
    let output = limited(&world, "-v 4000000", &model, args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(text(&output.stdout), "");
    for part in ["cannot start", "rank ", "cannot reserve", "memory"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
}

/// So few open files that ranks start, and then cannot share memory: the cause is named, and not
/// that a rank left. How many those are depends on what the system opens for a program.
#[test]
fn files_that_cannot_be_opened_are_named() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let mut refused = 0;
    for (files, nodes) in [(22, "2"), (24, "2"), (30, "4"), (32, "4")] {
        let args = format!("--max-tokens 2 --nodes {nodes}");
        let output = limited(&world, &format!("-n {files}"), &model, &args);
        let said = text(&output.stderr);
        if output.status.success() {
            continue;
        }
        refused += 1;
        assert!(said.contains("Too many open files"), "{files}: {said}");
    }
    assert!(refused > 0, "every limit was enough");
}

#[test]
fn a_worker_started_by_hand_says_what_it_is() {
    let world = TestHome::new();
    let fits = |said: &str| {
        said.contains("error: `paceline worker` is a part of a model")
            && said.contains("hint: `paceline run MODEL --nodes 2`")
    };
    for input in ["null", "pipe"] {
        let mut command = world.paceline(["worker"]);
        if input == "pipe" {
            command.stdin(Stdio::piped());
        }
        let output = finish(&mut command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(fits(&said), "{said}");
    }
    let mut terminal = Terminal::start(&mut world.paceline(["worker"]));
    let status = terminal.child.wait().unwrap();
    let said = terminal.rest();
    assert_eq!(status.code(), Some(2), "{said}");
    assert!(fits(&said), "{said}");
    terminal.assert_usable();
}

/// A pipe that closes early is no failure of a split either, and leaves no worker.
#[test]
fn a_reader_that_leaves_ends_all() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = ["run", &model, "go", "--context", "60000", "--nodes", "2"];
    let mut child = world.paceline(args).spawn().unwrap();
    drop(child.stdout.take());
    let mut stderr = child.stderr.take().unwrap();
    let mut workers = Vec::new();
    super::until("it ends", || {
        let now = super::processes::children(child.id());
        if now.len() >= workers.len() {
            workers = now;
        }
        child.try_wait().unwrap().is_some()
    });
    let mut said = String::new();
    std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{said}");
    assert!(!said.contains("error"), "{said}");
    assert_gone(&workers);
}

/// Addresses that cannot be listened on, with what helps.
#[test]
fn an_address_that_cannot_be_had_comes_with_advice() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().port().to_string();
    for (args, parts) in [
        (
            &["--port", &taken][..],
            &[
                "error: listening on 127.0.0.1",
                "hint: another program",
                "--port N",
            ][..],
        ),
        (
            &["--host", "0.0.0.0", "--port", "0"],
            &[
                "can be reached from other machines",
                "hint: `paceline key api new",
                "--no-keys",
            ],
        ),
        (
            // An address for documents, which no machine has (RFC 5737).
            &["--host", "192.0.2.1", "--port", "0", "--no-keys"],
            &[
                "error: listening on 192.0.2.1",
                "hint: --host is an address of this machine",
            ],
        ),
    ] {
        let up = ["up", "--no-beacons", &model]
            .into_iter()
            .chain(args.iter().copied());
        let output = finish(&mut world.paceline(up));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert_parts(&args, &said, parts);
    }
}

#[test]
fn a_certificate_that_cannot_be_used_is_named() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    for (file, parts) in [
        ("/nonexistent/c", &["error: reading /nonexistent/c"][..]),
        (
            model.as_str(),
            &["no certificate in PEM form", "hint: a certificate"],
        ),
    ] {
        let args = ["--tls-cert", file, "--tls-key", file];
        let up = ["up", "--no-beacons", "--port", "0", &model];
        let output = finish(&mut world.paceline(up.into_iter().chain(args)));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{file}: {said}");
        assert_parts(&args, &said, parts);
    }
}

#[test]
fn clients_may_use_other_names_and_ports() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let names = ["--alias", "gpt-4o", "--alias", "claude"];
    let ports = ["--port", "0", "--port", "0", "--lenient"];
    let args = ["up", "--no-beacons", &model]
        .into_iter()
        .chain(names)
        .chain(ports);
    let server = NodeServer::of(&mut world.paceline(args));
    let mut listening = Vec::new();
    until("both ports", || {
        let said = server.running.said();
        let whole = said.rsplit_once('\n').map_or("", |(lines, _)| lines);
        let lines = whole.lines();
        listening = lines
            .filter_map(|line| line.strip_prefix("listening on http://127.0.0.1:"))
            .map(|port| port.parse::<u16>().unwrap())
            .collect();
        listening.len() == 2
    });
    for (port, name) in listening.into_iter().zip(["gpt-4o", "claude"]) {
        // A field of nobody's specification passes where --lenient was given.
        let more = serde_json::json!({"max_tokens": 2, "no_such_field": 1});
        let body = chat(name, "hi", &more);
        let answer = http::ask(port, "/v1/chat/completions", Some(&body));
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    // Trained for a million positions: room for a coding agent, which begins with 14,000 tokens.
    let running = http::ask(server.port, "/api/ps", None).body;
    let context = running["models"][0]["context_length"].as_u64();
    assert!(context > Some(14_000), "{running}");
    let said = server.stop(1).stderr;
    assert!(
        said.contains("1 node, ") && !said.contains("1 nodes"),
        "{said}"
    );
}

#[test]
fn several_models_stand_behind_one_server() {
    let _alone = alone();
    let world = TestHome::new();
    let models = [FAMILIES[0], FAMILIES[1]].map(|family| world.write_model(family));
    let args = ["up", "--no-beacons", "--port", "0", "--context", "256"];
    let args = args.into_iter().chain(models.iter().map(String::as_str));
    let server = NodeServer::of(&mut world.paceline(args));
    let list = http::ask(server.port, "/v1/models", None);
    let listed: Vec<&str> = list.body["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert_eq!(listed.len(), 2, "{}", list.body);
    for name in listed {
        let body = chat(name, "hi", &serde_json::json!({"max_tokens": 2}));
        let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.body["model"], name, "{}", answer.body);
    }
    // They are instances as all others.
    let own = |args: &[&str]| {
        let output = finish(&mut world.paceline(args));
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let ps: serde_json::Value = serde_json::from_str(&own(&["ps", "--json"])).unwrap();
    assert_eq!(ps.as_array().unwrap().len(), 2, "{ps}");
    assert!(ps[0]["since_unix_s"].as_u64().is_some(), "{ps}");
    own(&["unload", FAMILIES[0].family]);
    until("one is left", || {
        let list = http::ask(server.port, "/v1/models", None).body;
        list["data"].as_array().unwrap().len() == 1
    });
    own(&["load", &models[0], "--threads", "1"]);
    let body = chat(&models[0], "hi", &serde_json::json!({"max_tokens": 2}));
    let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    server.stop(2);
}
