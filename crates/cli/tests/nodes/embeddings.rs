//! `paceline up` with an encoder, alone and together with a model that generates.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::http;
use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, finish, text};

/// A folder of `tests-data/golden/encoder`.
pub(crate) fn encoder(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/encoder");
    fs::canonicalize(root.join(name))
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned()
}

/// The first text and its vector, as `transformers` has it.
fn first(name: &str) -> (Value, Vec<f64>) {
    let file = encoder(&format!("{name}.golden.json"));
    let golden: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let case = &golden["cases"][0];
    (case["text"].clone(), numbers(&case["vector"]))
}

fn numbers(vector: &Value) -> Vec<f64> {
    let vector = vector.as_array().unwrap().iter();
    vector.map(|x| x.as_f64().unwrap()).collect()
}

fn check(port: u16, name: &str) {
    check_as(port, name, name);
}

/// Asks for the first vector of the golden `name` by what the server calls the model.
pub(crate) fn check_as(port: u16, model: &str, name: &str) {
    let (input, expected) = first(name);
    let body = json!({"model": model, "input": input});
    let answer = http::ask(port, "/v1/embeddings", Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let got = numbers(&answer.body["data"][0]["embedding"]);
    assert_eq!(got.len(), expected.len());
    let off = got.iter().zip(&expected).map(|(x, y)| (x - y).abs());
    assert!(off.fold(0.0, f64::max) < 1e-6, "{got:?}");
}

fn ids(list: &Value, key: &str) -> Vec<String> {
    let list = list.as_array().unwrap().iter();
    list.map(|model| model[key].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_chat_model_and_an_encoder_share_a_port() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = NodeServer::start(&world, &model, &["--embed", &encoder("bert-mean")]);
    check(server.port, "bert-mean");
    let body = chat(&model, "hi", &json!({"max_tokens": 2}));
    let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let chats = FAMILIES[0].family;
    let list = http::ask(server.port, "/v1/models", None).body;
    assert_eq!(ids(&list["data"], "id"), [chats, "bert-mean"]);
    let tags = http::ask(server.port, "/api/tags", None).body;
    assert!(ids(&tags["models"], "name").contains(&"bert-mean:latest".to_owned()));
    let one = http::ask(server.port, "/v1/models/bert-mean", None);
    assert_eq!((one.status, &one.body["id"]), (200, &json!("bert-mean")));
    let show = json!({"name": "bert-mean"});
    let shown = http::ask(server.port, "/api/show", Some(&show)).body;
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    let wrong = json!({"model": model, "input": "a"});
    let refused = http::ask(server.port, "/v1/embeddings", Some(&wrong));
    assert_eq!(refused.status, 501, "{}", refused.body);
    server.stop(1);
}

#[test]
fn an_encoder_is_served_alone() {
    let world = TestHome::new();
    let folder = encoder("qwen3-last");
    let server = NodeServer::start(&world, &folder, &["--threads", "1"]);
    check(server.port, "qwen3-last");
    server.stop(0);
    let folder = encoder("roberta-first");
    let server = NodeServer::start(&world, &folder, &["--threads", "1"]);
    check(server.port, "roberta-first");
    let running = http::ask(server.port, "/api/ps", None).body;
    assert_eq!(running["models"][0]["details"]["family"], "roberta");
    let said = server.stop(0).stderr;
    assert!(
        said.contains("embeddings of 40 numbers, texts of at most 64 tokens"),
        "{said}"
    );
}

#[test]
fn options_without_effect_on_encoders_are_refused() {
    let world = TestHome::new();
    let (folder, model) = (encoder("bert-mean"), world.write_model(FAMILIES[0]));
    for (args, expected) in [
        (
            ["--model", &folder, "--nodes", "2"],
            "--nodes has no effect",
        ),
        (
            ["--model", &folder, "--context", "9"],
            "--context has no effect",
        ),
        (
            ["--model", &model, "--embed", &model],
            "makes no embeddings",
        ),
    ] {
        let up = ["up", "--no-beacons", "--port", "0"].into_iter();
        let output = finish(&mut world.paceline(up.chain(args)));
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.contains(expected), "{said}");
    }
}
