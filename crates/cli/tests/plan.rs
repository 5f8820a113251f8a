//! `paceline plan` as a user calls it; the commands of docs/questions.md and what they print.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::path::Path;
use std::process::Output;

use crate::common::{assert_parts, rows, smollm2, text};

fn plan(args: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    let mut command = crate::common::paceline(home.path());
    command.arg("plan").args(args).output().unwrap()
}

/// Words of a command line, with single quotes as a shell reads them.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![];
    for (i, part) in line.split('\'').enumerate() {
        if i % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

#[test]
fn the_questions_have_the_answers_that_the_page_shows() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/questions.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut seen = 0;
    for block in page.split("```console\n").skip(1) {
        let block = block.split("\n```").next().unwrap();
        let (command, shown) = block.split_once('\n').unwrap();
        let words = words(command.strip_prefix("$ paceline plan ").unwrap());
        let got = plan(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let got = text(&got.stdout) + &text(&got.stderr);
        assert_eq!(got.trim_end(), shown, "{command}");
        seen += 1;
    }
    assert!(seen >= 6, "{seen} commands on the page");
}

/// Cluster files, and what is said of them. `NODE` and `LINK` begin tables of known kinds, and
/// `\n` ends a line.
const CLUSTERS: &str = r#" | the cluster has no nodes
[[node]]\nkind = "nope" | machine "nope" is not in the catalogue
NODE\ncount = 10000 | 10000 nodes, at most 512
NODE\nmemory_gb = -5 | memory_gb is -5
NODE\nmemory_gb = inf | memory_gb is inf
NODE\nmemory_bandwidth_gb_s = nan | bandwidth in B/s is NaN
NODE\nmemory_bandwidth_gb_s = 0 | bandwidth in B/s is 0
NODE\nfp16_tflops = -1 | is -1
NODE\nload_w = nan | is NaN
NODE\ncount = 2 | no link joins "n0" with "n1"
NODE\ncount = 2\nLINK\nbandwidth_gbit_s = 0 | bandwidth in B/s is 0
NODE\ncount = 2\nLINK\nlatency_us = -1 | is -
NODE\nLINK\nbetween = ["n0", "x"] | no node named "x"
NODE\ncount = 512\nLINK\nLINK\nLINK\nLINK\nLINK\nLINK\nLINK\nLINK\nLINK | links, at most 523264
[[node]]\nkind = 5 | invalid type
[[nodes]] | unknown field
\0 | TOML parse error"#;

#[test]
fn absurd_clusters_are_refused_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for row in CLUSTERS.lines() {
        let (toml, said) = row.split_once(" | ").unwrap();
        let toml = toml.replace("NODE", "[[node]]\\nkind = \"rtx-3090-24\"");
        let toml = toml.replace("LINK", "[[link]]\\nkind = \"10gbe\"");
        let toml = toml.replace("\\n", "\n").replace("\\0", "\0");
        std::fs::write(file.path(), &toml).unwrap();
        let out = plan(&["Llama-3.1-8B", "--cluster", file.path().to_str().unwrap()]);
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{toml}: {error}");
        assert!(error.contains(said), "{toml}: {error}");
    }
}

/// A cluster file with machines, links and a model that the catalogue lacks.
const OWN: &str = r#"
name = "studio and box"

[[node]]
name = "a"
kind = "mac-studio-m3-ultra-512"

[[node]]
name = "box"
kind = "my-box"
load_w = 300

[[link]]
kind = "my-wire"
between = ["a", "box"]
latency_us = 9

[[hardware]]
kind = "my-box"
memory_gb = 64
memory_bandwidth_gb_s = 80
fp16_tflops = 20
backend = "cpu"
source = "own measurement"

[[link_kind]]
kind = "my-wire"
bandwidth_gbit_s_theoretical = 40

[[model]]
name = "Mine-8B"
layers = 32
hidden = 4096
heads = 32
kv_heads = 8
head_dim = 128
ffn = 14336
vocab = 128256
"#;

/// The same shape as [`OWN`]'s model and the catalogue's Llama-3.1-8B.
const CONFIG: &str = r#"{ "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256 }"#;

#[test]
fn clusters_and_models_of_ones_own_are_planned_like_those_of_the_catalogue() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (cluster, config) = (file("own.toml", OWN), file("config.json", CONFIG));
    let ask = |model: &str| {
        let out = plan(&[model, "--bits", "4.5", "--cluster", &cluster, "--json"]);
        assert!(out.status.success(), "{model}: {}", text(&out.stderr));
        serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap()["plan"].clone()
    };
    let known = ask("Llama-3.1-8B");
    assert!(known["prediction"]["decode_tok_s"].as_f64().unwrap() > 50.0);
    assert_eq!(ask("mine-8b"), known);
    assert_eq!(ask(&config), known);
    assert_eq!(ask(folder.path().to_str().unwrap()), known);
    let shown = text(&plan(&["Mine", "--cluster", &cluster]).stdout);
    assert!(shown.contains("studio and box: 2 nodes"), "{shown}");
}

#[test]
fn a_file_of_weights_says_its_own_shape_and_bits() {
    let Some(model) = smollm2("a_file_of_weights_says_its_own_shape_and_bits") else {
        return;
    };
    let ask = |args: &[&str]| {
        let out = plan(&[args, &["--cluster", "raspberry-pi-5-8", "--json"]].concat());
        let object: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        object["plan"]["prediction"]["decode_tok_s"]
            .as_f64()
            .unwrap()
    };
    // Q4_1 has 5 bits, its head 8: 5.8 on average.
    let (file, named) = (ask(&[&model]), ask(&["SmolLM2-135M", "--bits", "5.8"]));
    assert!((file / named - 1.0).abs() < 0.05, "{file} {named}");
}

const ABSURD: &str = "\
nonsense --cluster rtx-3090-24 | model \"nonsense\" is not
Llama-3.1-8B --bits nan --cluster rtx-3090-24 | is NaN
Llama-3.1-8B --bits -4 --cluster rtx-3090-24 | '-4'
Llama-3.1-8B --prompt 0 --cluster rtx-3090-24 | prompt tokens is 0
Llama-3.1-8B --hosted 0 --cluster rtx-3090-24 | dollars for a million tokens is 0
Llama-3.1-8B --engine x --cluster rtx-3090-24 | engine \"x\" is not
Llama-3.1-8B --cluster rtx-3090-24 --cluster h100-sxm-80 | 2 clusters are given
Llama-3.1-8B --concurrency 0 --cluster rtx-3090-24 | requests at a time is 0
Llama-3.1-405B --cluster rtx-3090-24 | hint: it fits with
 | required";

#[test]
fn absurd_options_are_refused() {
    let check = |args: &[&str], said: &str| {
        let out = plan(args);
        assert!(!out.status.success(), "{args:?}");
        let error = text(&out.stderr);
        assert!(error.contains(said), "{args:?}: {error}");
    };
    for (args, said) in rows(ABSURD) {
        check(&args, &said[0]);
    }
    let many = ["--cluster", "10000 x rtx-3090-24 @ 10gbe"];
    check(
        &[&["Llama-3.1-8B"], &many[..]].concat(),
        "10000 nodes, at most 512",
    );
}

#[test]
fn json_is_one_object_with_placement_and_prediction() {
    let out = plan(&[
        "Qwen3-235B-A22B",
        "--bits",
        "8.5",
        "--cluster",
        "2 x mac-studio-m3-ultra-512 @ tb5-rdma",
        "--hosted",
        "2",
        "--json",
    ]);
    let object: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let stage = &object["plan"]["placement"]["replicas"][0][0];
    assert_eq!(stage["split"], "tensor");
    assert_eq!(stage["layers"], serde_json::json!([0, 94]));
    let said = &object["plan"]["prediction"];
    // Published: 26.2 tok/s.
    assert!((20.0..32.0).contains(&said["decode_tok_s"].as_f64().unwrap()));
    assert!(said["nodes"][0]["headroom_bytes"].as_i64().unwrap() > 0);
    assert!(!object["alternatives"].as_array().unwrap().is_empty());
    // 23,398 dollars at 2 dollars a million tokens.
    assert_eq!(object["price_date"], "2025-12");
    let hosted = &object["hosted"];
    assert_eq!(hosted["break_even_tokens"], 11_699e6);
    let months = 11_699e6 / said["throughput_tok_s"].as_f64().unwrap() / 2_629_800.0;
    assert!((hosted["break_even_months"].as_f64().unwrap() / months - 1.0).abs() < 1e-9);
}

#[test]
fn a_file_of_published_rows_is_scored() {
    let out = plan(&["--validate", "--json"]);
    let object: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let sets = object["sets"].as_array().unwrap();
    let held = sets
        .iter()
        .find(|set| set["set"] == "held_out, high")
        .unwrap();
    assert!(held["median_abs_error"].as_f64().unwrap() < 0.1);
    let rows = object["rows"].as_array().unwrap();
    // Rows that are not complete give no error figure.
    assert!(
        rows.iter()
            .filter(|r| r["complete"] == false)
            .all(|r| r["error"].is_null())
    );
    let out = plan(&["--validate", "/nowhere.toml"]);
    assert!(text(&out.stderr).contains("cannot read /nowhere.toml"));
}

#[test]
fn a_comparison_draws_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bars.svg");
    let out = plan(&[
        "Llama-3.3-70B",
        "--compare",
        "--cluster",
        "mac-studio-m3-ultra-256",
        "--cluster",
        "rtx-3090-24",
        "--plot",
        path.to_str().unwrap(),
    ]);
    let table = text(&out.stdout);
    assert!(
        table.contains("one node") && table.contains("no plan:"),
        "{table}"
    );
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
}

#[test]
fn a_model_that_is_not_here_is_planned_for_this_machine_by_its_shape() {
    let out = plan(&["qwen3:0.6b"]);
    let said = text(&out.stdout);
    assert_parts(
        &"plan",
        &said,
        &["Qwen3-0.6B", "this machine: 1 node", "decode"],
    );
}

/// A home whose store has SmolLM2 under its alias.
fn with_smollm2(test: &str) -> Option<tempfile::TempDir> {
    let model = smollm2(test)?;
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("models/smollm2");
    std::fs::create_dir_all(&dir).unwrap();
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    std::fs::copy(&model, dir.join(file)).unwrap();
    let bytes = std::fs::metadata(&model).unwrap().len();
    let sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
    let record = format!(
        r#"{{"version":1,"name":"smollm2","kind":"gguf","source":"test","files":
        [{{"path":"{file}","bytes":{bytes},"sha256":"{sha256}"}}],"pulled_at":5,"last_used":null}}"#
    );
    std::fs::write(dir.join("paceline.json"), record).unwrap();
    Some(home)
}

#[test]
fn a_model_of_the_store_is_planned_by_the_name_it_runs_by() {
    let Some(home) = with_smollm2("a_model_of_the_store_is_planned_by_the_name_it_runs_by") else {
        return;
    };
    let run = |args: &[&str]| {
        let mut command = crate::common::paceline(home.path());
        let output = command.args(args).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.success(), "{args:?}: {said}");
        text(&output.stdout)
    };
    let runs = || {
        let table = run(&["plan", "smollm2", "--concurrency", "8", "--json"]);
        let table: serde_json::Value = serde_json::from_str(&table).unwrap();
        table["runs"].as_array().unwrap().clone()
    };
    let speed = |run: &serde_json::Value, name: &str| run[name].as_f64().unwrap();
    // The machine is measured once: the numbers stay, but for the last digit that JSON may lose.
    let (first, again) = (runs(), runs());
    assert!(
        first
            .iter()
            .any(|run| run["nodes"] == 4 && run["split"] == "2x2")
    );
    for (one, two) in first.iter().zip(&again) {
        let [one_tok_s, two_tok_s] = [one, two].map(|run| speed(run, "predicted_decode_tok_s"));
        assert!(
            one_tok_s > 0.0 && (one_tok_s / two_tok_s - 1.0).abs() < 1e-9,
            "{one} {two}"
        );
        assert!(one["measured_decode_tok_s"].is_null(), "{one}");
        // Eight answers read the weights together.
        let all = speed(one, "corrected_throughput_tok_s");
        assert!(all > speed(one, "corrected_decode_tok_s"), "{one}");
    }
    // The files that `run` would take are what is planned, not a namesake in the catalogue.
    let path = home
        .path()
        .join("models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = path.to_str().unwrap();
    let cluster = ["--cluster", "2 x raspberry-pi-5-8 @ 10gbe", "--json"];
    let planned = |name| run(&[&["plan", name][..], &cluster].concat());
    assert_eq!(planned("smollm2"), planned(path));
    let shown = run(&["show", "smollm2"]);
    for part in [
        "computes here          yes",
        "family                 llama",
        "Apache-2.0",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
}

#[test]
fn names_that_run_would_fetch_are_planned_by_their_shape() {
    let cluster = ["--cluster", "2 x mac-studio-m3-ultra-512 @ tb5-rdma"];
    for (name, shape) in [("qwen3:8b", "Qwen3-8B"), ("llama3.2", "Llama-3.2-3B")] {
        let got = plan(&[&[name][..], &cluster].concat());
        let said = text(&got.stdout);
        assert!(
            said.starts_with(shape),
            "{name}: {said}{}",
            text(&got.stderr)
        );
    }
}
