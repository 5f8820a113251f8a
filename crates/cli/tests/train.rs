//! `paceline train` and `paceline adapter`, as a script uses them.

use std::fs;

use crate::common::home::{TestHome, object};
use crate::common::{finish, text, until, words};

/// The tiny model of these tests.
fn model() -> String {
    let golden = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests-data/golden/hf/llama-tied"
    );
    golden.to_owned()
}

pub(crate) fn data(world: &TestHome) -> String {
    let line = |i: usize| {
        let answer = ["the front", "a line of riders", "one machine alone"][i % 3];
        format!("{{\"prompt\": \"who rides at {i}\", \"completion\": \"{answer}\"}}\n")
    };
    let path = world.path("models").join("data.jsonl");
    fs::write(&path, (0..12).map(line).collect::<String>()).unwrap();
    path.display().to_string()
}

pub(crate) fn args<'a>(data: &'a str, output: &'a str, more: &[&'a str]) -> Vec<String> {
    let model = model();
    let method: &[&str] = if more.contains(&"--method") {
        &[]
    } else {
        &["--method", "lora"]
    };
    let fixed = ["--rank", "4", "--batch", "6", "--seed", "3"];
    let rate: &[&str] = if more.contains(&"--lr") {
        &[]
    } else {
        &["--lr", "1e-2"]
    };
    let all = ["train", &model, "--data", data, "--output", output];
    let all = all
        .iter()
        .chain(method)
        .chain(&fixed)
        .chain(rate)
        .chain(more);
    all.map(|arg| (*arg).to_owned()).collect()
}

#[test]
fn an_adapter_is_shown_converted_and_run() {
    let world = TestHome::new();
    let data = data(&world);
    let more = ["--steps", "40", "--json"];
    object(&finish(&mut world.paceline(args(&data, "own", &more))));
    let paceline = |args: &[&str]| finish(&mut world.paceline(args));
    let shown = object(&paceline(&["adapter", "show", "own", "--json"]));
    assert_eq!(
        (&shown["form"], &shown["rank"]),
        (&"peft".into(), &4.into())
    );
    assert_eq!(
        (&shown["matrices"], &shown["scale"]),
        (&21.into(), &2.0.into())
    );
    let convert = paceline(&words("adapter convert own --to mlx --output mlx"));
    assert!(convert.status.success());
    let shown = object(&paceline(&words(
        "adapter show mlx/adapters.safetensors --json",
    )));
    assert_eq!(shown["form"], "mlx");
    let (model, prompt) = (model(), "who rides at 4");
    let to = |from: &str, form: &str, output: &str| {
        let convert = ["adapter", "convert", from, "--to", form, "--output", output];
        let done = paceline(&[&convert[..], &["--base", &model]].concat());
        assert!(done.status.success(), "{}", text(&done.stderr));
    };
    to("mlx", "gguf", "gguf");
    to("gguf/adapter.gguf", "peft", "back");
    let bytes = |folder: &str| {
        let path = world.path("models").join(folder);
        fs::read(path.join("adapter_model.safetensors")).unwrap()
    };
    assert!(bytes("own") == bytes("back"), "PEFT, MLX, GGUF, PEFT");
    let unnamed = ["adapter", "convert", "own", "--to", "gguf", "--output", "x"];
    assert!(text(&paceline(&unnamed).stderr).contains("--base"));
    let answer = |more: &[&str]| {
        let fixed = ["run", &model, prompt];
        let short = words("--temperature 0 --max-tokens 12 --json");
        object(&paceline(&[&fixed[..], &short, more].concat()))["tokens"].clone()
    };
    let (plain, own) = (answer(&[]), answer(&["--adapter", "own"]));
    assert_ne!(plain, own);
    assert_eq!(own, answer(&["--adapter", "mlx"]));
    assert_eq!(own, answer(&["--adapter", "gguf"]));
    assert_eq!(
        own,
        answer(&["--adapter", "own", "--nodes", "2", "--threads", "1"])
    );
    let fuse = [
        &["adapter", "fuse", &model][..],
        &words("--adapter own --output fused"),
    ]
    .concat();
    assert!(paceline(&fuse).status.success());
    let refused = paceline(&fuse);
    assert!(
        text(&refused.stderr).contains("fused is there already"),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn what_cannot_be_trained_is_told_before_the_first_step() {
    let world = TestHome::new();
    let data = data(&world);
    let complaint = |more: &[&str]| {
        let output = finish(&mut world.paceline(args(&data, "out", more)));
        assert!(!output.status.success());
        text(&output.stderr)
    };
    for (more, said) in [
        (&["--targets", "q_proj,head"][..], "--targets is head"),
        (&["--leaf", "7"], "--leaf is 7, expected 1 to the batch"),
        (&["--lr", "nan"], "--lr is NaN"),
        (
            &["--method", "dora"],
            "expected one of `lora`, `qlora`, `full`",
        ),
        (&["--valid", "missing.jsonl"], "missing.jsonl"),
    ] {
        let told = complaint(more);
        assert!(told.contains(said), "{more:?}: {told}");
    }
}

/// Hosts, stages and a configuration of mlx-lm all lead to the same bytes. Of nodes and a killed
/// run: `crate::golden`.
#[test]
fn hosts_stages_and_a_foreign_configuration() {
    let world = TestHome::new();
    let data = data(&world);
    let adapter = |output: &str| {
        let folder = world.path("models").join(output);
        fs::read(folder.join("adapter_model.safetensors")).unwrap()
    };
    let run = |output: &str, more: &[&str]| {
        let more = [&["--steps", "8", "--json"][..], more].concat();
        object(&finish(&mut world.paceline(args(&data, output, &more))))
    };
    let report = run("one", &[]);
    assert_eq!(report["steps"], 8);
    let losses = ["loss", "first_loss"].map(|name| report[name].as_f64());
    assert!(losses[0] < losses[1], "{report}");
    let curve = fs::read_to_string(world.path("models").join("one/loss.svg")).unwrap();
    assert!(curve.starts_with("<svg"));
    let again = finish(&mut world.paceline(args(&data, "one", &["--steps", "8"])));
    let said = text(&again.stderr);
    assert!(
        !again.status.success() && said.contains("--resume"),
        "{said}"
    );
    let hosts = run(
        "hosts",
        &["--hosts", "127.0.0.1,localhost", "--threads", "1"],
    );
    assert_eq!((&hosts["nodes"], &hosts["lost"]), (&2.into(), &0.into()));
    let stages = run(
        "stages",
        &["--nodes", "2", "--stages", "2", "--threads", "1"],
    );
    assert_eq!(stages["stages"], 2);
    assert!(adapter("one") == adapter("hosts") && adapter("one") == adapter("stages"));
    // What mlx-lm would have trained, but for what is said here.
    let model = model();
    let config = format!(
        "model: \"{model}\"\ndata: \"{data}\"\nbatch_size: 6\nseed: 3\niters: 4\n\
         learning_rate: 1e-3\nnum_layers: 2\nlora_parameters:\n  rank: 2\n  scale: 4.0\n"
    );
    let path = world.path("models").join("lora.yaml");
    fs::write(&path, config).unwrap();
    let path = path.display().to_string();
    let foreign = ["train", "--from-mlx-lm", &path];
    let more = words("--output mlx --rank 3 --json");
    let report = object(&finish(&mut world.paceline([&foreign[..], &more].concat())));
    assert_eq!(report["steps"], 4);
    let shown = ["adapter", "show", "mlx", "--json"];
    let shown = object(&finish(&mut world.paceline(shown)));
    assert_eq!(
        (&shown["rank"], &shown["matrices"]),
        (&3.into(), &14.into())
    );
    let refused = finish(&mut world.paceline(["train", "--from-mlx-lm", &path]));
    assert!(
        text(&refused.stderr).contains("--output"),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn a_plan_of_a_training_has_energy_and_what_would_fit() {
    let world = TestHome::new();
    let model = model();
    let plan = |more: &[&str]| {
        let fixed = ["plan", &model, "--train", "--json"];
        object(&finish(&mut world.paceline([&fixed[..], more].concat())))
    };
    let here = plan(&["--watts", "30", "--kwh-usd", "0.4", "--steps", "100"]);
    let number = |key: &str| here[key].as_f64().unwrap();
    assert!((number("joules") - 30.0 * number("step_s")).abs() < 1e-6 * number("joules"));
    assert!((number("training_s") - 100.0 * number("step_s")).abs() < 1e-6 * number("training_s"));
    assert!(
        number("usd_per_million_tokens") > 0.0 && here["fits"] == true,
        "{here}"
    );
    let crowded = plan(&["--nodes", "64", "--row", "100000000", "--batch", "64"]);
    assert_eq!(crowded["fits"], false);
    let would = crowded["would_fit"].to_string();
    assert!(would.contains("--row"), "{would}");
    // A model that is not here, by its published sizes.
    let args = "plan DeepSeek-V3.1-671B --train --method full --nodes 4 --shard all --json";
    let listed = object(&finish(&mut world.paceline(words(args))));
    let numbers = listed["numbers"].as_f64().unwrap();
    assert!((numbers / 671.0e9 - 1.0).abs() < 1e-3, "{listed}");
}

/// A head from the model's own answers. Any number of nodes and a killed run give the same bytes.
/// No answer changes, on one node and over the stages of a pipeline.
/// Answers with a head are those without, on one node and over stages.
fn same_with_head(world: &TestHome, model: &str, head: &str, more: &[&str]) {
    for sampling in [["--temperature", "0"], ["--temperature", "1.5"]] {
        let answer = |own: &[&str]| {
            let fixed = ["who rides at 3", "--max-tokens", "60", "--seed", "5"];
            world.json(model, &[&fixed[..], &sampling, more, own].concat())["tokens"].clone()
        };
        let plain = answer(&[]);
        assert_eq!(answer(&["--drafter", head]), plain);
        let split = ["--nodes", "3", "--split", "pipeline", "--drafter", head];
        assert_eq!(answer(&split), plain, "{head} {more:?}");
    }
}

#[test]
fn a_draft_head_is_trained_and_changes_no_answer() {
    let world = TestHome::new();
    let (model, data) = (model(), data(&world));
    let args = |output: &str, more: &[&str]| -> Vec<String> {
        let fixed = ["train", &model, "--drafter", "--output", output];
        // A random model's other answers cannot be foreseen: the same ones are judged.
        let files = ["--data", &data, "--valid", &data];
        let sizes = words("--max-tokens-per-row 48 --batch 4");
        let rest = words("--lr 3e-3 --steps 40 --save-every 2 --json");
        let all = fixed
            .iter()
            .chain(&files)
            .chain(&sizes)
            .chain(&rest)
            .chain(more);
        all.map(|arg| (*arg).to_owned()).collect()
    };
    let report = object(&finish(&mut world.paceline(args("head", &[]))));
    let loss = |i: usize| report["loss"][i].as_f64().unwrap();
    assert!(loss(1) < loss(0), "{report}");
    assert!(report["accepted"].as_f64() > Some(0.3), "{report}");
    let folder = |output: &str| world.path("models").join(output);
    let nodes = ["--nodes", "2", "--threads", "1"];
    let mut killed = world.paceline(args("killed", &nodes)).spawn().unwrap();
    until("a checkpoint", || {
        folder("killed/step-0000004").exists() || killed.try_wait().unwrap().is_some()
    });
    let _ = killed.kill();
    killed.wait().unwrap();
    let more = ["--resume", "--nodes", "3", "--threads", "1"];
    object(&finish(&mut world.paceline(args("killed", &more))));
    let weights = |output: &str| fs::read(folder(output).join("model.safetensors")).unwrap();
    assert!(weights("head") == weights("killed"));

    let adapter = self::args(&data, "own", &["--steps", "4"]);
    assert!(finish(&mut world.paceline(adapter)).status.success());
    for own in [&[][..], &["--adapter", "own"]] {
        same_with_head(&world, &model, "head", own);
    }
    let gemma = model.replace("llama-tied", "gemma4-e-bf16");
    let assistant = model.replace("hf/llama-tied", "heads/assistant");
    same_with_head(&world, &gemma, &assistant, &[]);
    let refused = |more: &[&str]| {
        let output = finish(&mut world.paceline(args("other", more)));
        assert!(!output.status.success());
        text(&output.stderr)
    };
    assert!(refused(&["--draft-vocab", "0"]).contains("--draft-vocab is 0, expected 1 or more"));
    assert!(refused(&["--leaf", "2"]).contains("--leaf"));
}
