//! Rows of data: those that are counted, and those that are refused.

use std::path::Path;

use paceline_tensor::Kernels;
use paceline_train::{StepReporter, TrainingProgress, TrainingRun};
use serde_json::json;

use crate::runs::{job, nodes, train};

/// Rows that a template has rendered before have names of control tokens in their text.
#[test]
fn rendered_text_is_counted_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let (path, output) = (folder.path().join("data.jsonl"), folder.path().join("out"));
    let texts = ["<bos>ride on<eos>", "a line of riders", "front <eos> turn"];
    let lines = texts.map(|text| json!({ "text": text }).to_string() + "\n");
    std::fs::write(&path, lines.concat()).unwrap();
    let mut job = job(&path, 1);
    (job.batch, job.leaf) = (2, 1);
    let (mut watch, mut told) = (StepReporter::new(1, Some(1)), Vec::new());
    let hear = |progress: &TrainingProgress, _: &[u32]| {
        told.extend(watch.lines_for(progress.clone(), 0.0))
    };
    let report = train(&job, nodes(1), &output, (false, &|| false), hear).unwrap();
    assert_eq!(report.rendered, 4, "two rows, which are held out too");
    let said = "4 examples of text with names of control tokens";
    assert!(told.iter().any(|line| line.contains(said)), "{told:?}");
    // The base's name in the adapter is what PEFT opens: the folder with its weights.
    let config = std::fs::read(output.join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let base = config["base_model_name_or_path"].as_str().unwrap();
    assert_eq!(Path::new(base), job.trained.model);
}

#[test]
fn a_file_that_lies_is_named_with_line_and_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    let good = "{\"text\": \"a line of riders\"}\n\n";
    let turns = |turns: &str| format!("{{\"messages\": {turns}}}");
    let cases = [
        ("{\"text\": ".to_owned(), "no JSON"),
        ("[1]".to_owned(), "no JSON object"),
        ("{\"txt\": \"x\"}".to_owned(), "[\"txt\"]"),
        ("{\"text\": 5}".to_owned(), "text is a number"),
        (
            "{\"prompt\": \"x\", \"completion\": null}".to_owned(),
            "completion is null",
        ),
        (turns("\"x\""), "the conversation is a text"),
        (turns("[]"), "no turns"),
        (
            turns("[{\"role\": \"user\", \"content\": \"x\"}]"),
            "no turn of an assistant",
        ),
        (turns("[{\"role\": \"king\", \"content\": \"x\"}]"), "king"),
        (
            "{\"conversations\": [{\"from\": \"gpt\"}]}".to_owned(),
            "turn 1: value is null",
        ),
    ];
    let open = |text: &str| {
        std::fs::write(&path, text).unwrap();
        TrainingRun::open(&job(&path, 1), Kernels::new(1).unwrap(), true).map(|_| ())
    };
    for (line, reason) in cases {
        let error = open(&format!("{good}{line}\n")).unwrap_err().to_string();
        assert!(
            error.contains("data.jsonl:3: ") && error.contains(reason),
            "{line}: {error}"
        );
    }
    let error = open("\n").unwrap_err().to_string();
    assert!(error.contains("has no examples"), "{error}");
    // Files that are no lines of JSON, and what Windows puts before them.
    std::fs::write(&path, b"\xff\xfe{\0}\0").unwrap();
    for (text, reason) in [
        (None, "UTF-16"),
        (Some("[\n {\"text\": \"a b c\"}\n]"), "JSON array"),
    ] {
        text.iter()
            .for_each(|text| std::fs::write(&path, text).unwrap());
        let error = TrainingRun::open(&job(&path, 1), Kernels::new(1).unwrap(), true);
        let error = error.map(|_| ()).unwrap_err().to_string();
        assert!(
            error.contains("data.jsonl:1: ") && error.contains(reason),
            "{error}"
        );
    }
    open(&format!(
        "\u{feff}{good}{{\"text\": \"a\\ud83d \u{2028} riders\"}}\r\n\r\n"
    ))
    .unwrap();
    // Forms that are read.
    let chat = json!({"messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]});
    let share_gpt = json!({"conversations": [
        {"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]});
    let alpaca = json!({"instruction": "x", "input": "z", "output": "y"});
    let forms = [
        chat,
        share_gpt,
        alpaca,
        json!({"prompt": "x", "completion": "y"}),
    ];
    for form in forms {
        open(&form.to_string()).unwrap_or_else(|error| panic!("{form}: {error}"));
    }
}
