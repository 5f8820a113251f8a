//! A single prompt, a single answer.

use std::io::{Read, Write};
use std::process::Stdio;

use paceline_tensor::InstructionSet;
use serde_json::Value;

use super::tiny::{ALPHABET, IM_END, TinyChatModel, decode};
use super::{TestHome, finish, numbers, object, text, wait};
use crate::common::complaints;

#[test]
fn help_is_short_and_has_examples() {
    let world = TestHome::new();
    let output = finish(world.paceline(["run", "--help"]).stdout(Stdio::piped()));
    assert_eq!(output.status.code(), Some(0));
    let help = text(&output.stdout);
    for part in [
        "Usage: paceline run",
        "[default: 0.7]",
        "Examples:",
        "Exit codes: 0 ok",
    ] {
        assert!(help.contains(part), "{part:?} in {help}");
    }
    assert!(help.lines().count() <= 52, "{help}");
}

/// Greedy: the tiny model's answer is known then.
const GREEDY: [&str; 2] = ["--temperature", "0"];

#[test]
fn an_answer_goes_to_stdout_and_its_figures_to_stderr() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let output = world.run(&model, &["hi"]);
    assert_eq!(text(&output.stdout), format!("{ALPHABET}\n"));
    let said = text(&output.stderr);
    // <|im_start|> user \n h i <|im_end|> \n <|im_start|> assistant \n, a token per byte.
    let start = "[prompt 21 tokens, answer 29 tokens; first token after ";
    assert!(
        said.starts_with(start) && said.ends_with(" predicted)]\n"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(output.status.code(), Some(0));
    world.assert_clean();
}

/// The fields that `run --json` prints, in the order of the alphabet.
const FIELDS: [&str; 26] = [
    "array_bytes_per_token",
    "context",
    "decode_tok_s",
    "expert_uses",
    "finish_reason",
    "guesses",
    "instruction_set",
    "kernel_class",
    "kv_type",
    "load_ms",
    "model",
    "n_generated",
    "n_prompt",
    "nodes",
    "peak_memory_bytes",
    "predicted_decode_tok_s",
    "prefill_tok_s",
    "seed",
    "split",
    "split_changes",
    "text",
    "threads",
    "tokens",
    "ttft_ms",
    "weight_bytes",
    "wire_bytes_per_token",
];

#[test]
fn json_is_one_object_with_all_fields() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let output = world.run(&model, &["hi", "--json", "--threads", "1", "--seed", "7"]);
    let json = object(&output);
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    let mut keys: Vec<&str> = json
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    assert_eq!(keys, FIELDS);
    let tokens = numbers(&json, "tokens");
    assert_eq!(json["text"], ALPHABET);
    assert_eq!(decode(&tokens), ALPHABET);
    assert_eq!(
        tokens.last(),
        Some(&u64::from(IM_END)),
        "the end token is one of them"
    );
    let expected = [
        ("model", Value::from(model)),
        ("finish_reason", "stop".into()),
        ("n_prompt", 21.into()),
        ("n_generated", tokens.len().into()),
        ("nodes", 1.into()),
        ("split", "none".into()),
        ("threads", 1.into()),
        ("seed", 7.into()),
        ("context", 512.into()),
        ("kernel_class", "cpu".into()),
    ];
    assert!(
        json["predicted_decode_tok_s"]
            .as_f64()
            .is_some_and(|speed| speed > 0.0)
    );
    for (key, value) in expected {
        assert_eq!(json[key], value, "{key}");
    }
}

#[test]
fn figures_fit_together() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let json = world.json(&model, &["hi"]);
    let number = |key: &str| {
        json[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key} in {json}"))
    };
    let prefill = number("n_prompt") / (number("ttft_ms") / 1e3);
    assert!(
        (number("prefill_tok_s") / prefill - 1.0).abs() < 1e-6,
        "{json}"
    );
    assert!(
        number("decode_tok_s") > 0.0 && number("load_ms") > 0.0,
        "{json}"
    );
    if cfg!(target_os = "linux") {
        assert!(number("peak_memory_bytes") > f64::from(1 << 20), "{json}");
    } else {
        assert_eq!(json["peak_memory_bytes"], Value::Null);
    }
}

#[test]
fn what_was_not_measured_is_null() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    for (max, text, reason) in [
        ("0", "", "length"),
        ("1", "a", "length"),
        ("29", ALPHABET, "stop"),
    ] {
        let json = world.json(&model, &["hi", "--max-tokens", max]);
        let n: u64 = max.parse().unwrap();
        assert_eq!(json["text"], text);
        assert_eq!(
            (&json["n_generated"], &json["finish_reason"]),
            (&n.into(), &reason.into())
        );
        assert_eq!(json["ttft_ms"].is_null(), n == 0, "{json}");
        assert_eq!(json["decode_tok_s"].is_null(), n < 2, "{json}");
        assert!(json["prefill_tok_s"].is_f64(), "{json}");
    }
    let output = world.run(&model, &["hi", "--max-tokens", "0"]);
    assert_eq!(text(&output.stdout), "\n");
    let said = text(&output.stderr);
    assert!(said.contains("answer 0 tokens; prefill"), "{said}");
    assert!(said.ends_with("; ended by --max-tokens]\n"), "{said}");
}

#[test]
fn a_full_context_ends_the_answer_and_is_told() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let output = world.run(&model, &["hi", "--context", "24"]);
    assert_eq!(text(&output.stdout), "abc\n");
    let said = text(&output.stderr);
    assert!(said.ends_with("; ended by the full --context]\n"), "{said}");
}

#[test]
fn no_part_of_a_stop_string_leaks() {
    let world = TestHome::new();
    let endless = TinyChatModel {
        ends: false,
        ..TinyChatModel::default()
    };
    let model = world.tiny_model(endless);
    let twice = format!("{ALPHABET}{ALPHABET}");
    // More of them: `what_is_held_back_comes_out_at_the_end` of the engine.
    for stops in [&["m\u{e9}n"][..], &["xyz", "fgX", "fghij"]] {
        let first = stops
            .iter()
            .filter_map(|stop| twice.find(stop))
            .min()
            .unwrap();
        let mut args = vec!["go", "--max-tokens", "80"];
        stops.iter().for_each(|stop| args.extend(["--stop", stop]));
        let output = world.run(&model, &args);
        assert_eq!(
            text(&output.stdout),
            format!("{}\n", &twice[..first]),
            "{stops:?}"
        );
        let json = world.json(&model, &args);
        assert_eq!(
            (&json["text"], &json["finish_reason"]),
            (&twice[..first].into(), &"stop".into())
        );
    }
    // What looked like a stop string and was none comes out at the end.
    let output = world.run(&model, &["go", "--max-tokens", "7", "--stop", "fgX"]);
    assert_eq!(text(&output.stdout), "abcdefg\n");
    // A value may begin with a dash.
    let output = world.run(&model, &["go", "--max-tokens", "3", "--stop", "-x"]);
    assert_eq!(text(&output.stdout), "abc\n");
}

#[test]
fn control_tokens_are_read_in_raw_prompts_alone() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let n = |args: &[&str]| world.json(&model, args)["n_prompt"].as_u64().unwrap();
    let plain = n(&["hi"]);
    let trick = "<|im_end|>";
    assert_eq!(n(&[&format!("hi{trick}")]), plain + trick.len() as u64);
    assert_eq!(n(&[trick, "--raw"]), 1);
    // <|im_start|> system \n be brief <|im_end|> \n
    assert_eq!(n(&["hi", "--system", "be brief"]), plain + 18);
}

#[test]
fn a_model_without_template_continues_the_text() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel {
        chats: false,
        ..TinyChatModel::default()
    });
    let output = world.run(&model, &["abc"]);
    assert_eq!(text(&output.stdout), format!("{}\n", &ALPHABET[3..]));
    assert!(text(&output.stderr).starts_with("[prompt 3 tokens, "));
}

#[test]
fn a_folder_of_safetensors_answers() {
    let world = TestHome::new();
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests-data/golden/hf/qwen2-f16"
    );
    let json = world.json(
        folder,
        &["once upon", "--max-tokens", "5", "--temperature", "0"],
    );
    assert_eq!(numbers(&json, "tokens").len() as u64, json["n_generated"]);
    assert!(json["n_prompt"].as_u64() > Some(1), "{json}");
    assert_eq!(json["model"], folder);
    // A field that no reader knows may change what is computed.
    let other = world.path("other");
    std::fs::create_dir(&other).unwrap();
    for name in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(format!("{folder}/{name}"), other.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(format!("{folder}/config.json")).unwrap();
    let config = config.replacen('{', "{\"new_gate\": true,", 1);
    std::fs::write(other.join("config.json"), config).unwrap();
    let output = world.run(other.to_str().unwrap(), &["hi", "--max-tokens", "1"]);
    let expected = "config.json has unknown fields that may change answers: new_gate\n";
    assert!(text(&output.stderr).starts_with(expected));
}

#[test]
fn the_prompt_may_come_through_a_pipe() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let mut command = world.paceline(["run", &model, "--raw", "--json"]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all("\u{fc}xy".as_bytes())
        .unwrap();
    let json = object(&child.wait_with_output().unwrap());
    assert_eq!((&json["text"], &json["n_prompt"]), (&"z".into(), &4.into()));
}

#[test]
fn seed_and_threads_settle_the_answer() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    // At this temperature the next letter of the alphabet has a chance of about one in three.
    let hot = ["hi", "--temperature", "6", "--max-tokens", "40"];
    let tokens = |more: &[&str]| numbers(&world.json(&model, &[&hot, more].concat()), "tokens");
    let one = tokens(&["--seed", "1", "--threads", "1"]);
    assert_eq!(one, tokens(&["--seed", "1", "--threads", "2"]));
    assert_ne!(one, tokens(&["--seed", "2"]));
    assert_ne!(tokens(&[]), tokens(&[]), "seeds are different each time");
    let greedy = |more: &[&str]| {
        let args = [&["hi"][..], &GREEDY, more].concat();
        numbers(&world.json(&model, &args), "tokens")
    };
    assert_eq!(greedy(&[]), greedy(&["--seed", "5"]));
}

/// How near they are is tested in `crates/model/tests`.
#[test]
fn instruction_sets_and_types_of_keys_are_chosen() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let expected = world.json(&model, &[&["hi"][..], &GREEDY].concat());
    let mut sets = 0;
    for set in InstructionSet::ALL.map(InstructionSet::name) {
        let mut command = world.paceline(["run", &model, "hi", "--json"]);
        command.args(GREEDY).env("PACELINE_CPU", set);
        let output = finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        if text(&output.stderr).contains("but this machine has") {
            continue; // no machine has all of them
        }
        let json = object(&output);
        assert_eq!(json["instruction_set"], set);
        assert_eq!(json["tokens"], expected["tokens"], "{set}");
        sets += 1;
    }
    assert!(sets > 0, "every machine has the first");
    for (kv, more) in [("f16", "--pin"), ("q8", "--raw"), ("q4", "--raw")] {
        let json = world.json(&model, &[&["hi", "--kv", kv, more], &GREEDY[..]].concat());
        assert_eq!(json["kv_type"], kv);
    }
}

#[test]
fn packed_weights_are_kept_and_give_the_same_answer() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let expected = world.json(&model, &[&["hi"][..], &GREEDY].concat());
    let files = || {
        let folders = std::fs::read_dir(world.path("home").join("packed")).unwrap();
        let files = folders.flat_map(|own| std::fs::read_dir(own.unwrap().path()).unwrap());
        let names = files.map(|file| file.unwrap().file_name());
        let packed = names.filter(|name| name.to_string_lossy().ends_with(".packed"));
        packed.count()
    };
    for more in [&["--context", "max"][..], &[]] {
        let json = world.json(&model, &[&["hi", "--packed"], more, &GREEDY].concat());
        assert_eq!(json["tokens"], expected["tokens"], "{more:?}");
        assert_eq!(json["context"], expected["context"], "{more:?}");
        assert_eq!(files(), 1, "{more:?}");
    }
}

#[test]
fn text_comes_while_it_is_made_and_a_reader_may_leave() {
    let world = TestHome::new();
    let mut command = world.paceline(world.endless());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut start = [0; 100];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut start).unwrap();
    assert!(start.starts_with(ALPHABET.as_bytes()));
    assert!(child.try_wait().unwrap().is_none(), "it goes on for hours");
    drop(stdout);
    let status = wait(&mut child);
    assert_eq!(status.code(), Some(0));
    let said = complaints(&mut child);
    assert_eq!(said, "");
}

#[test]
fn a_reader_of_both_streams_may_leave() {
    let world = TestHome::new();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut command = world.paceline(world.endless());
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut child = command.spawn().unwrap();
    drop(command); // its ends of the pipe
    reader.read_exact(&mut [0; 10]).unwrap();
    drop(reader);
    assert_eq!(wait(&mut child).code(), Some(0));
}

#[test]
#[cfg(target_os = "linux")]
fn full_disks_are_told_where_that_is_possible() {
    use std::fs::File;

    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let full = || File::options().write(true).open("/dev/full").unwrap();
    for json in [&["--json"][..], &[]] {
        let args = ["run", &model, "hi"]
            .into_iter()
            .chain(json.iter().copied());
        let mut command = world.paceline(args.clone());
        let output = finish(command.stdout(full()).stderr(Stdio::piped()));
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(
            said.starts_with("error: cannot write to standard output: No space"),
            "{said}"
        );
        // Lost figures do not spoil an answer.
        let mut command = world.paceline(args);
        let output = finish(command.stdout(Stdio::piped()).stderr(full()));
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains(ALPHABET));
    }
}
