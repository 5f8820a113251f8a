//! `paceline bench model`, as short as it can be: the numbers mean nothing, their shape does.

use std::process::Stdio;

use serde_json::Value;

use super::tiny::TinyChatModel;
use super::{TestHome, finish, object, text};
use crate::common::words;

#[test]
fn bench_model_reports_speeds() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let small = words("--prompt 40 --gen 3 --runs 2 --threads 1");
    let run = |more: &[&str]| {
        let args = ["bench", "model", &model]
            .into_iter()
            .chain(small.iter().copied())
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
    for key in [
        "load_s",
        "predicted_decode_tok_s",
        "weight_bytes",
        "weights_gb_s",
        "of_read_limit",
    ] {
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
    for (line, start) in table.lines().skip(2).zip([
        "paceline    prefill ",
        "predicted   decode ",
        "read limit  ",
    ]) {
        assert!(line.starts_with(start), "{table}");
    }
    assert_eq!(table.lines().count(), 5, "{table}");
}

#[test]
fn bench_kernels_stands_beside_the_limits() {
    let world = TestHome::new();
    let run = |more: &[&str]| {
        let args = ["bench", "kernels", "--types", "q8_0,F16", "--mib", "4"];
        let small = ["--prompt", "8", "--runs", "2", "--threads", "1"];
        let args = args.into_iter().chain(small).chain(more.iter().copied());
        let mut command = world.paceline(args);
        finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let json = object(&run(&["--json"]));
    for limit in [
        &json["read_limit_gb_s"]["median"],
        &json["integer_peak_gop_s"],
    ] {
        assert!(limit.as_f64().is_some_and(|n| n > 0.0), "{json}");
    }
    let types: Vec<_> = json["rows"].as_array().unwrap().iter().collect();
    assert_eq!([&types[0]["type"], &types[1]["type"]], ["Q8_0", "F16"]);
    assert!(types[0]["prompt_of_peak"].as_f64().is_some_and(|n| n > 0.0));
    assert!(types[1]["prompt_of_peak"].is_null());
    assert!(text(&run(&[]).stdout).contains("of limit"));
}

/// Each bench with `--plot`: the picture is there, whole, and names what it was measured for. The
/// settings are the least that a bench takes.
#[test]
fn pictures_of_benches_name_their_series() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let cases: [(&[&str], &[&str]); 3] = [
        (
            &["comm", "--transport", "local", "--max-bytes", "64"],
            &[
                "all_reduce",
                "all_gather",
                "send_recv",
                "send_recv, cost model",
            ],
        ),
        (
            &["model", &model, "--prompt", "40", "--gen", "3"],
            &["decode", "decode, predicted", "prompt"],
        ),
        (
            &["kernels", "--types", "q8_0,F16", "--mib", "4"],
            &["Q8_0", "F16", "plain reads"],
        ),
    ];
    for (bench, series) in cases {
        let few: &[&str] = match bench[0] {
            "comm" => &[],
            _ => &["--runs", "2", "--threads", "1"],
        };
        let file = world.path(&format!("{}.svg", bench[0]));
        let plot = ["--plot", file.to_str().unwrap()];
        let args = [&["bench"][..], bench, few, &plot[..]].concat();
        let ended = finish(&mut world.paceline(args));
        assert!(ended.status.success(), "{bench:?}: {ended:?}");
        let svg = std::fs::read_to_string(&file).unwrap();
        assert!(
            svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
            "{bench:?}: {svg}"
        );
        for name in series {
            assert!(svg.contains(&format!(">{name}<")), "{name} in {svg}");
        }
    }
}
