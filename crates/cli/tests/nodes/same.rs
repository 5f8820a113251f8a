//! Kernel classes and RDMA reach the nodes of a split: the answers are those of one node. The
//! golden tables (`crate::golden`) have the same for every split, `crates/model/tests/splits.rs`
//! for logits.

use std::process::Stdio;

use serde_json::{Value, json};

use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, alone, http};
use crate::library;

#[test]
fn a_kernel_class_reaches_every_node() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let fields = json!({"max_tokens": 48, "logprobs": true, "top_logprobs": 3});
    let request = chat(&model, "hi", &fields);
    let served = |nodes: usize, args: &[&str]| {
        let count = nodes.to_string();
        let own = ["--context", "512", "--threads", "1", "--nodes", &count];
        let server = NodeServer::start(&world, &model, &[&own[..], args].concat());
        let answer = http::ask(server.port, "/v1/chat/completions", Some(&request));
        server.stop(nodes);
        answer.body["choices"].clone()
    };
    let quick = served(1, &["--class", "cpu-q8"]);
    assert_ne!(served(1, &[]), quick, "the classes differ");
    assert_eq!(served(3, &["--class", "cpu-q8"]), quick);
}

/// A model over RDMA: the library is opened by its name, the devices come from JACCL's device file.
#[test]
fn nodes_over_rdma_say_the_same() {
    let _alone = alone();
    let world = TestHome::new();
    let folder = world.path("home");
    if library::build(&folder).is_none() {
        eprintln!("SKIPPED nodes_over_rdma_say_the_same: no rustc");
        return;
    }
    let model = world.write_model(FAMILIES[0]);
    let devices = world.path("devices.json");
    std::fs::write(&devices, r#"[[null, "soft0"], ["soft1", null]]"#).unwrap();
    let run = |more: &[&str]| {
        let own = [
            "run",
            &model,
            "Once upon a time",
            "--max-tokens",
            "12",
            "--temperature",
            "0",
        ];
        let mut command = world.paceline(
            own.into_iter()
                .chain(["--json"])
                .chain(more.iter().copied()),
        );
        command
            .env("LD_LIBRARY_PATH", &folder)
            .env("IBV_SOFT_FOLDER", &folder);
        command.env("MLX_IBV_DEVICES", &devices);
        super::finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let tokens = |more: &[&str]| {
        let output = run(more);
        assert!(output.status.success(), "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["tokens"].clone()
    };
    let expected = tokens(&[]);
    assert!(expected.as_array().is_some_and(|tokens| !tokens.is_empty()));
    for split in ["tensor", "pipeline"] {
        let over = ["--nodes", "2", "--split", split, "--transport", "rdma"];
        let refused = run(&over);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        let over = [&over[..], &["--plaintext"]].concat();
        assert_eq!(tokens(&over), expected, "{split}");
    }
}
