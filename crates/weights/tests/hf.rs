//! Safetensors files and model folders, written by the `safetensors` crate.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::Path;

use paceline_base::BlockType;
use paceline_weights::hf::HfFolder;
use paceline_weights::safetensors::Safetensors;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

type TensorData<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

fn write_weights(path: &Path, tensors: &[TensorData<'_>]) {
    let views = tensors.iter().map(|&(name, dtype, shape, data)| {
        (name, TensorView::new(dtype, shape.to_vec(), data).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

const A: TensorData<'_> = ("a", Dtype::F32, &[2], &[0, 0, 128, 63, 0, 0, 0, 64]);
const B: TensorData<'_> = (
    "b",
    Dtype::BF16,
    &[3, 2],
    &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
);
const IDS: TensorData<'_> = ("ids", Dtype::I64, &[1], &[7; 8]);
const EMPTY: TensorData<'_> = ("empty", Dtype::F16, &[4, 0], &[]);
const SCALAR: TensorData<'_> = ("scalar", Dtype::F16, &[], &[0, 0x3c]);

/// A folder with a config and one file of weights.
fn folder(tensors: &[TensorData<'_>]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    put(
        dir.path(),
        "config.json",
        r#"{"model_type": "llama", "hidden_size": 64}"#,
    );
    write_weights(&dir.path().join("model.safetensors"), tensors);
    dir
}

/// A folder with a config and an index, but no shards.
fn indexed(weight_map: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "config.json", "{}");
    let index = format!(r#"{{"metadata": {{"total_size": 1}}, "weight_map": {weight_map}}}"#);
    put(dir.path(), "model.safetensors.index.json", &index);
    dir
}

fn put(dir: &Path, name: &str, content: &str) {
    std::fs::write(dir.join(name), content).unwrap();
}

fn error_of(dir: &TempDir) -> String {
    let error = HfFolder::open(dir.path())
        .expect_err("the folder is broken")
        .to_string();
    error.replace(&format!("{}/", dir.path().display()), "")
}

#[test]
fn written_tensors_read_back() {
    let dir = folder(&[A, B, IDS, EMPTY, SCALAR]);
    let model = HfFolder::open(dir.path()).unwrap();
    assert_eq!(model.config()["hidden_size"], 64);
    let mut names: Vec<&str> = model.names().collect();
    names.sort_unstable();
    assert_eq!(names, ["a", "b", "empty", "ids", "scalar"]);
    for (name, block_type, (_, _, shape, data)) in [
        ("a", BlockType::F32, A),
        ("b", BlockType::BF16, B),
        ("scalar", BlockType::F16, SCALAR),
    ] {
        let tensor = model.tensor(name).unwrap();
        assert_eq!(tensor.name, name);
        assert_eq!(tensor.block_type, block_type);
        assert_eq!(tensor.shape, shape);
        assert_eq!(&*tensor.bytes, data);
    }
    assert!(model.has("ids") && !model.has("absent"));
    assert_eq!(model.info("ids").unwrap().dtype(), "I64");
    let bytes = std::fs::metadata(dir.path().join("model.safetensors"))
        .unwrap()
        .len();
    assert_eq!(model.file_bytes().0, bytes);
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let dir = folder(&[IDS, EMPTY]);
    let model = HfFolder::open(dir.path()).unwrap();
    for (name, text) in [
        (
            "ids",
            "tensor ids: dtype I64 is not supported, expected F32, F16 or BF16",
        ),
        ("empty", "tensor empty: shape [4, 0] is empty or too large"),
        ("absent", "tensor absent is missing"),
    ] {
        let error = model.tensor(name).unwrap_err().to_string();
        assert!(error.ends_with(text), "{error}");
    }
}

#[test]
fn shards_are_found_by_the_index() {
    let dir = indexed(r#"{"b": "two.safetensors", "a": "sub/one.safetensors"}"#);
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    write_weights(&dir.path().join("sub/one.safetensors"), &[A, IDS]);
    write_weights(&dir.path().join("two.safetensors"), &[B]);
    let model = HfFolder::open(dir.path()).unwrap();
    assert_eq!(model.names().collect::<Vec<_>>(), ["b", "a"]);
    assert_eq!(&*model.tensor("a").unwrap().bytes, A.3);
    assert_eq!(&*model.tensor("b").unwrap().bytes, B.3);
    assert!(!model.has("ids"), "the index does not name it");
}

#[test]
fn the_single_file_goes_before_the_index() {
    let dir = indexed(r#"{"b": "../outside.safetensors"}"#);
    write_weights(&dir.path().join("model.safetensors"), &[A]);
    assert!(HfFolder::open(dir.path()).unwrap().has("a"));
}

#[test]
fn an_index_cannot_leave_the_folder() {
    for file in [
        "../m.safetensors",
        "/m.safetensors",
        "s/../../m.safetensors",
        "",
        "..\\\\m",
    ] {
        let dir = indexed(&format!(r#"{{"a": "{file}"}}"#));
        let error = error_of(&dir);
        assert!(
            error.contains("tensor a is in") && error.contains("not inside"),
            "{error}"
        );
    }
}

#[test]
fn broken_indices_are_refused() {
    for (weight_map, text) in [
        (
            r#"{"a": "absent.safetensors"}"#,
            "absent.safetensors: cannot read",
        ),
        (
            r#"{"c": "here.safetensors"}"#,
            "here.safetensors: tensor c is missing",
        ),
        (
            r#"{"a": "here.safetensors", "a": "here.safetensors"}"#,
            "tensor a occurs twice",
        ),
        (
            r#"{"a": 3}"#,
            "model.safetensors.index.json: invalid type: integer `3`",
        ),
        (
            r#"["a"]"#,
            "model.safetensors.index.json: invalid type: sequence",
        ),
        (&"[".repeat(100_000), "model.safetensors.index.json: "),
    ] {
        let dir = indexed(weight_map);
        write_weights(&dir.path().join("here.safetensors"), &[A]);
        let error = error_of(&dir);
        assert!(error.contains(text), "expected {text:?} in: {error}");
    }
}

#[test]
fn folders_that_are_no_models_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let absent = HfFolder::open(dir.path().join("absent"))
        .unwrap_err()
        .to_string();
    assert!(absent.ends_with("absent: not a folder"), "{absent}");
    assert!(
        error_of(&dir).starts_with("config.json: cannot read"),
        "{}",
        error_of(&dir)
    );
    put(dir.path(), "config.json", "{");
    assert!(
        error_of(&dir).starts_with("config.json: EOF while parsing"),
        "{}",
        error_of(&dir)
    );
    put(dir.path(), "config.json", &"[".repeat(10_000));
    assert!(
        error_of(&dir).contains("recursion limit exceeded"),
        "{}",
        error_of(&dir)
    );
    put(dir.path(), "config.json", "{}");
    assert!(
        error_of(&dir).contains("holds no model.safetensors or"),
        "{}",
        error_of(&dir)
    );
    put(dir.path(), "config.json", &" ".repeat((8 << 20) + 1));
    assert_eq!(error_of(&dir), "config.json: larger than 8.0 MiB");
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    std::fs::create_dir(dir.path().join("config.json")).unwrap();
    assert_eq!(error_of(&dir), "config.json: not a regular file");
}

#[test]
fn weights_of_other_formats_are_named() {
    for (content, text) in [
        (
            &b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0"[..],
            "it looks like a GGUF file",
        ),
        (
            b"PK\x03\x04aaaaaaaaaaaa",
            "it looks like a zip archive or PyTorch checkpoint",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "it looks like a git-lfs pointer",
        ),
        (b"<html><body>Sign in", "it looks like a web page"),
        (b"", "it is empty"),
    ] {
        let dir = folder(&[A]);
        std::fs::write(dir.path().join("model.safetensors"), content).unwrap();
        let error = error_of(&dir);
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn the_chat_template_comes_from_its_file_or_the_settings() {
    let dir = folder(&[A]);
    let template =
        || HfFolder::open(dir.path()).map(|model| model.chat_template().map(str::to_owned));
    assert_eq!(template().unwrap(), None);
    for (config, expected) in [
        (r#"{"chat_template": "T"}"#, Some("T")),
        (r#"{"chat_template": null}"#, None),
        (
            r#"{"chat_template": [{"name": "default", "template": "D"}]}"#,
            Some("D"),
        ),
        (
            r#"{"chat_template": [{"name": "rag", "template": "R"}]}"#,
            None,
        ),
    ] {
        put(dir.path(), "tokenizer_config.json", config);
        assert_eq!(template().unwrap().as_deref(), expected, "{config}");
    }
    put(
        dir.path(),
        "tokenizer_config.json",
        r#"{"chat_template": 3}"#,
    );
    let error = template().unwrap_err().to_string();
    assert!(
        error.ends_with("chat_template: expected a string or a list"),
        "{error}"
    );
    put(dir.path(), "chat_template.jinja", "J");
    assert_eq!(template().unwrap().as_deref(), Some("J"));
    std::fs::write(dir.path().join("chat_template.jinja"), [0xff]).unwrap();
    assert!(
        template()
            .unwrap_err()
            .to_string()
            .ends_with("chat_template.jinja: not UTF-8")
    );
}

#[test]
fn settings_files_are_optional_and_kept() {
    let dir = folder(&[A]);
    put(
        dir.path(),
        "generation_config.json",
        r#"{"eos_token_id": [1, 2]}"#,
    );
    let model = HfFolder::open(dir.path()).unwrap();
    assert!(model.tokenizer_config().is_none());
    assert_eq!(model.generation_config().unwrap()["eos_token_id"][1], 2);
}

#[test]
fn our_reader_agrees_with_the_reference() {
    let dir = folder(&[B, A, SCALAR, IDS]);
    let path = dir.path().join("model.safetensors");
    let content = std::fs::read(&path).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&content).unwrap();
    let ours = Safetensors::open(&path).unwrap();
    assert_eq!(ours.tensors().len(), reference.len());
    for info in ours.tensors() {
        let expected = reference.tensor(info.name()).unwrap();
        assert_eq!(info.shape(), expected.shape());
        assert_eq!(&content[info.range()], expected.data());
    }
}
