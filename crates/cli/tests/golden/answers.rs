//! Rows of answers: tokens of servers and of `paceline run`.

use rustix::process::Signal;
use serde_json::{Value, json};

use super::{GoldenRow, RowOrigin, RowSelection, check, sha256};
use crate::common::home::TestHome;
use crate::nodes::adapted::write_adapter;
use crate::nodes::http;
use crate::nodes::processes::signal;
use crate::nodes::server::{NodeServer, chat};
use crate::nodes::tiny::FAMILIES;

/// Splits of a server, `NODES ARGUMENTS`.
const CUTS: [&str; 5] = [
    "1",
    "2 --split tensor",
    "3 --split pipeline",
    "4 --split 2x2",
    "2 --shares 3,1",
];

/// A server over a split; its adapter answers as `poet`.
fn serve(world: &TestHome, model: &str, cut: &str, more: &[&str]) -> NodeServer {
    let args = format!("--context 1024 --parallel 8 --threads 1 --nodes {cut}");
    let args: Vec<&str> = args.split(' ').chain(more.iter().copied()).collect();
    NodeServer::start(world, model, &args)
}

fn stop(server: NodeServer, cut: &str) {
    server.stop(cut[..1].parse().unwrap());
}

/// A request of every kind, and the columns that differ.
fn requests(adapters: &[&str], tokens: u32) -> Vec<(RowOrigin, Value)> {
    let schema = json!({
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
        "required": ["place", "size"],
        "additionalProperties": false,
    });
    let schema = json!({"type": "json_schema", "json_schema": {"name": "it", "schema": schema}});
    let kinds = [
        ("-", "-", json!({"temperature": 0})),
        ("1", "-", json!({"temperature": 1, "seed": 1})),
        (
            "2",
            "-",
            json!({"temperature": 1.3, "seed": 2, "top_k": 40, "top_p": 0.9}),
        ),
        (
            "3",
            "-",
            json!({"temperature": 0.8, "seed": 3, "min_p": 0.02, "frequency_penalty": 0.5}),
        ),
        (
            "4",
            "regex",
            json!({"temperature": 1, "seed": 4,
            "guided_regex": "[a-f]{4}-[0-9]{2}( yes| no){3}"}),
        ),
        (
            "5",
            "choice",
            json!({"temperature": 1, "seed": 5,
            "guided_choice": ["the sea", "the sky", "a mountain lake"]}),
        ),
        (
            "6",
            "json",
            json!({"temperature": 1, "seed": 6, "response_format": schema}),
        ),
    ];
    let row = |adapter: &str, (seed, grammar, fields): &(&str, &str, Value)| {
        let origin = RowOrigin {
            seed: (*seed).into(),
            adapter: adapter.into(),
            grammar: (*grammar).into(),
            ..RowOrigin::default()
        };
        let mut fields = fields.clone();
        fields["max_tokens"] = tokens.into();
        fields["logprobs"] = true.into();
        (origin, fields)
    };
    let of_adapter = adapters
        .iter()
        .flat_map(|adapter| kinds[..2].iter().map(|kind| row(adapter, kind)));
    kinds
        .iter()
        .map(|kind| row("", kind))
        .chain(of_adapter)
        .collect()
}

/// The hash of a chat's tokens, each by its bytes, and of the reason of its end.
fn hash(choice: &Value) -> String {
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    let tokens: Vec<&Value> = tokens.iter().map(|token| &token["bytes"]).collect();
    sha256(
        json!([tokens, choice["finish_reason"]])
            .to_string()
            .as_bytes(),
    )
}

/// Sends all `requests` together and gives the rows of `model` over `cut`.
fn asked(
    server: &NodeServer,
    (model, cut): (&str, &str),
    requests: Vec<(RowOrigin, Value)>,
) -> Vec<GoldenRow> {
    let port = server.port;
    std::thread::scope(|scope| {
        let asked: Vec<_> = requests
            .into_iter()
            .map(|(origin, fields)| {
                let name = if origin.adapter.is_empty() {
                    model
                } else {
                    "poet"
                };
                let body = chat(name, "Why is the sky blue?", &fields);
                let answer =
                    scope.spawn(move || http::ask(port, "/v1/chat/completions", Some(&body)));
                (origin, answer)
            })
            .collect();
        let rows = asked.into_iter().map(|(origin, answer)| {
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 200, "{origin:?}: {}", answer.body);
            (of(origin, model, cut), hash(&answer.body["choices"][0]))
        });
        rows.collect()
    })
}

fn of(origin: RowOrigin, model: &str, cut: &str) -> RowOrigin {
    RowOrigin {
        model: model.into(),
        split: cut.into(),
        ..origin
    }
}

/// Random models of four families, over every split; in the gate each over one.
#[test]
fn tiny() {
    let extent = RowSelection::of_this_run();
    let world = TestHome::new();
    let mut rows = Vec::new();
    for (number, tiny) in FAMILIES.into_iter().enumerate() {
        let path = world.write_model(tiny);
        write_adapter(tiny, &world.path("models/poet"), 1);
        for (at, cut) in CUTS.into_iter().enumerate() {
            if extent.is_part() && at != (number + 1) % CUTS.len() {
                continue;
            }
            let server = serve(&world, &path, cut, &["--adapter", "poet=poet"]);
            rows.extend(asked(&server, (tiny.family, cut), requests(&["poet"], 40)));
            stop(server, cut);
        }
    }
    check("tiny", extent, &rows);
}

/// Answers whose server loses a worker, each rank in turn; in the gate one model loses one.
#[test]
fn faults() {
    let extent = RowSelection::of_this_run();
    let world = TestHome::new();
    let mut rows = Vec::new();
    for (number, tiny) in FAMILIES.into_iter().enumerate() {
        let path = world.write_model(tiny);
        for (at, cut) in [CUTS[1], CUTS[3]].into_iter().enumerate() {
            let victim = (number + at) % 2;
            if extent.is_part() && (number, at) != (0, 1) {
                continue;
            }
            let server = serve(&world, &path, cut, &[]);
            for (seed, fields) in [
                ("-", json!({"temperature": 0})),
                ("7", json!({"temperature": 1, "seed": 7})),
            ] {
                let origin = RowOrigin {
                    seed: seed.into(),
                    fault: format!("rank {victim} killed"),
                    ..RowOrigin::default()
                };
                let workers = server.running.workers(cut[..1].parse().unwrap());
                let lose = || signal(workers[victim], Signal::KILL);
                let hash = streamed(&server, tiny.family, fields, lose);
                rows.push((of(origin, tiny.family, cut), hash));
            }
            stop(server, cut);
        }
    }
    check("faults", extent, &rows);
}

/// The hash of a streamed answer of 400 tokens; `fault` happens after the twentieth.
fn streamed(server: &NodeServer, model: &str, mut fields: Value, fault: impl FnOnce()) -> String {
    fields["max_tokens"] = 400.into();
    fields["stream"] = true.into();
    fields["logprobs"] = true.into();
    let body = chat(model, "Why is the sky blue?", &fields);
    let mut stream = http::stream(server.port, "/v1/chat/completions", &body);
    let (mut fault, mut tokens, mut end) = (Some(fault), Vec::new(), Value::Null);
    while let Some(event) = stream.event().filter(|event| event != "[DONE]") {
        assert!(event.get("error").is_none(), "{event}");
        let choice = &event["choices"][0];
        let new = choice["logprobs"]["content"].as_array().cloned();
        tokens.extend(new.unwrap_or_default());
        if choice["finish_reason"].is_string() {
            end = choice["finish_reason"].clone();
        }
        if tokens.len() >= 20 {
            fault.take().into_iter().for_each(|fault| fault());
        }
    }
    assert!(fault.is_none(), "the answer ended before its fault");
    hash(&json!({"logprobs": {"content": tokens}, "finish_reason": end}))
}

/// SmolLM2 over three splits; in the gate over one.
#[test]
fn smollm2() {
    let extent = RowSelection::of_this_run();
    let Some(path) = crate::common::smollm2("golden::answers::smollm2") else {
        return;
    };
    let world = TestHome::new();
    let mut rows = Vec::new();
    for cut in &CUTS[..3] {
        if extent.is_part() && *cut != CUTS[1] {
            continue;
        }
        let server = serve(&world, &path, cut, &[]);
        let served = asked(&server, (&path, cut), requests(&[], 24));
        let named = |(origin, hash)| (of(origin, "smollm2", cut), hash);
        rows.extend(served.into_iter().map(named));
        stop(server, cut);
    }
    check("smollm2", extent, &rows);
}

/// Folders of every family by `paceline run`; in the gate every fifth over one split.
#[test]
fn families() {
    let extent = RowSelection::of_this_run();
    let world = TestHome::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/golden/hf");
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    models.sort();
    let mut rows = Vec::new();
    for (number, model) in models.iter().enumerate() {
        let name = model.file_name().unwrap().to_str().unwrap();
        for (at, cut) in CUTS[..3].iter().enumerate() {
            if extent.is_part() && (number % 5 != 0 || at != number / 5 % 3) {
                continue;
            }
            for (seed, sampling) in [("-", "--temperature 0"), ("5", "--seed 5")] {
                let cut = if at == 2 { "2 --split pipeline" } else { cut };
                let args = format!("--raw --max-tokens 24 --threads 1 {sampling} --nodes {cut}");
                let args: Vec<&str> = ["the sky is"].into_iter().chain(args.split(' ')).collect();
                let answer = world.json(model.to_str().unwrap(), &args);
                let origin = RowOrigin {
                    seed: seed.into(),
                    ..RowOrigin::default()
                };
                let tokens = answer["tokens"].to_string();
                rows.push((of(origin, name, cut), sha256(tokens.as_bytes())));
            }
        }
    }
    check("families", extent, &rows);
}
