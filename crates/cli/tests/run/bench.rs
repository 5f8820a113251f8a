//! `paceline bench model`, as short as it can be: the numbers mean nothing, their shape does.

use std::process::Stdio;

use serde_json::Value;

use crate::tiny::Tiny;
use crate::{World, finish, object, text};

#[test]
fn bench_model_reports_speeds() {
    let world = World::new();
    let model = world.model(Tiny::default());
    let small = [
        "--prompt",
        "40",
        "--gen",
        "3",
        "--runs",
        "2",
        "--threads",
        "1",
    ];
    let run = |more: &[&str]| {
        let args = ["bench", "model", &model]
            .into_iter()
            .chain(small)
            .chain(more.iter().copied());
        finish(
            world
                .paceline(args)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        )
    };
    let json = object(&run(&["--json"]));
    for (key, value) in [("prompt", 40), ("gen", 3), ("depth", 40), ("threads", 1)] {
        assert_eq!(json[key], value, "{key}");
    }
    assert_eq!(
        (&json["llama_cpp"], &json["ratio"]),
        (&Value::Null, &Value::Null)
    );
    for speed in ["prefill_tok_s", "decode_tok_s"] {
        let speed = &json["paceline"][speed];
        assert_eq!(speed["runs"].as_array().map(Vec::len), Some(2), "{speed}");
        for key in ["median", "p10", "p90"] {
            assert!(
                speed[key].as_f64().is_some_and(|n| n > 0.0),
                "{key} of {speed}"
            );
        }
    }
    for key in ["load_s", "weight_bytes", "weights_gb_s"] {
        assert!(
            json[key].as_f64().is_some_and(|n| n > 0.0),
            "{key} in {json}"
        );
    }
    let table = text(&run(&["--depth", "0"]).stdout);
    assert!(
        table.contains("decode 3 from position 0, 2 runs"),
        "{table}"
    );
    assert!(
        table
            .lines()
            .last()
            .unwrap()
            .starts_with("paceline    prefill "),
        "{table}"
    );
}
