//! An adapter that machines of the cluster get with a model.

use std::path::PathBuf;

use serde_json::json;

use super::shared::{MODEL, up};
use super::{TestMachine, until};
use crate::nodes::adapted::write_adapter;
use crate::nodes::http;
use crate::nodes::tiny::FAMILIES;

/// Files of other machines that a machine has.
fn copies(machine: &TestMachine) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(machine.home.path().join("copies"));
    let files = folder
        .into_iter()
        .flatten()
        .map(|file| file.unwrap().path());
    files
        .filter(|file| file.extension().is_some_and(|end| end == "gguf"))
        .collect()
}

#[test]
fn an_adapter_goes_to_the_machines_that_compute_with_it() {
    let one = up("one", None);
    let two = up("two", Some(&one));
    write_adapter(FAMILIES[0], &one.home.path().join("poet"), 1);
    let (base, _) = one.answer(MODEL, &["--local"]);
    let (poet, _) = one.answer(MODEL, &["--local", "--adapter", "poet"]);
    assert_ne!(base["text"], poet["text"]);
    let load = ["load", MODEL, "--nodes", "2", "--threads", "1"];
    one.told(&[&load[..], &["--adapter", "poet=poet"]].concat());
    assert_eq!(copies(&one).len(), 1, "the adapter as one file");
    assert!(!copies(&two).is_empty(), "the same from the other");

    let port = one.port();
    let adapted = format!("{MODEL}:poet");
    let names = || {
        let list = http::ask(port, "/v1/models", None).body;
        let list = list["data"].as_array().cloned().unwrap_or_default();
        let ids = list.into_iter().map(|model| model["id"].clone());
        ids.collect::<Vec<_>>()
    };
    until("both names answer", || {
        names() == [json!(MODEL), json!(adapted)]
    });
    for (model, expected) in [(MODEL, &base), (&*adapted, &poet)] {
        let body = json!({
            "model": model, "temperature": 0, "max_tokens": 24,
            "messages": [{"role": "user", "content": "once"}],
        });
        let answer = http::ask(port, "/v1/chat/completions", Some(&body));
        assert_eq!(answer.status, 200, "{}", answer.body);
        let text = &answer.body["choices"][0]["message"]["content"];
        assert_eq!(*text, expected["text"], "{model}");
    }
    one.told(&["unload", MODEL]);
    until("no name answers", || names().is_empty());
}
