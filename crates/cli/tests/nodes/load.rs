//! `paceline bench api` against `paceline up`.

use std::process::Stdio;

use serde_json::Value;

use super::server::NodeServer;
use super::tiny::FAMILIES;
use super::{TestHome, finish, text};
use crate::common::words;

fn bench(world: &TestHome, args: &[&str]) -> std::process::Output {
    let args = ["bench", "api"].iter().chain(args).copied();
    let mut command = world.paceline(args);
    finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn a_server_is_measured() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = NodeServer::start(&world, &model, &["--context", "512", "--pace", "50"]);
    let url = format!("http://127.0.0.1:{}/v1", server.port);
    let own = words("--requests 6 --prompt 10..20 --output 8 --ignore-eos");
    let args = [&["--url", &url][..], &own, &["--clients", "2", "--json"]].concat();
    let output = bench(&world, &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let report = &json["report"];
    assert_eq!(
        (&report["requests"], &report["answered"]),
        (&6.into(), &6.into()),
        "{json}"
    );
    assert_eq!(report["output_tokens"], 48, "{json}");
    assert!(report["prompt_tokens"].as_u64().unwrap() >= 60, "{json}");
    let [one, both] = ["predicted_decode_tok_s", "predicted_output_tok_s"]
        .map(|name| json[name].as_f64().unwrap_or_default());
    assert!(one > 0.0 && both > one, "{json}");
    for name in ["ttft_ms", "whole_ms"] {
        assert_eq!(report[name]["n"], 6, "{json}");
    }
    let args = [
        &["--url", &url][..],
        &own,
        &["--rate", "100", "--ttft-limit", "1"],
    ]
    .concat();
    let output = bench(&world, &args);
    let table = text(&output.stdout);
    for part in [
        "Poisson arrivals, 100 a second",
        "6 of 6 requests",
        "tokens/s of an answer alone",
        "between two tokens",
        "p99",
    ] {
        assert!(table.contains(part), "{table}");
    }
    server.stop(1);
    let output = bench(&world, &["--url", &url]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("no answer from http") && said.contains("hint: start it"),
        "{said}"
    );
}

#[test]
fn loads_that_cannot_be_are_refused() {
    let world = TestHome::new();
    for (args, expected) in [
        (["--rate", "0"], "expected 0.001 to 10000 requests a second"),
        (
            ["--prompt", "9..3"],
            "length is \"9..3\", expected N or A..B",
        ),
        (["--clients", "0"], "1..=512"),
    ] {
        let output = bench(&world, &args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(
            text(&output.stderr).contains(expected),
            "{}",
            text(&output.stderr)
        );
    }
}
