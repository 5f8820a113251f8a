//! Hugging Face folders that lie.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::{check, refusal};
use crate::common::golden;

/// A Hugging Face folder whose configuration is rewritten again and again.
pub(super) struct Folder {
    dir: tempfile::TempDir,
    pub(super) config: Value,
}

impl Folder {
    /// A copy of `tests-data/golden/hf/NAME` without the tokenizer.
    pub(super) fn copy(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let from = golden(&format!("hf/{name}"));
        let to = dir.path().join("model.safetensors");
        std::fs::copy(from.join("model.safetensors"), to).unwrap();
        let text = std::fs::read(from.join("config.json")).unwrap();
        Self {
            dir,
            config: serde_json::from_slice(&text).unwrap(),
        }
    }

    pub(super) fn write(&self, config: &Value) -> &Path {
        std::fs::write(self.dir.path().join("config.json"), config.to_string()).unwrap();
        self.dir.path()
    }

    /// Checks what is said about a configuration with one field changed; null takes it away. Dots
    /// lead to fields of objects.
    fn check(&self, field: &str, value: Value, expected: &str) {
        let title = format!("{field} = {value}");
        let mut config = self.config.clone();
        let (objects, field) = field.rsplit_once('.').unwrap_or(("", field));
        let path = objects.split('.').filter(|it| !it.is_empty());
        let within = path.fold(&mut config, |object, name| &mut object[name]);
        let fields = within.as_object_mut().unwrap();
        match value {
            Value::Null => drop(fields.shift_remove(field)),
            value => drop(fields.insert(field.to_owned(), value)),
        }
        check(self.write(&config), &title, expected);
    }
}

#[test]
fn sizes_that_lie_are_refused() {
    let folder = Folder::copy("llama-tied");
    let sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads \
        num_key_value_heads vocab_size max_position_embeddings head_dim";
    for field in sizes.split(' ') {
        let check =
            |wrong: Value, said: &str| folder.check(field, wrong, &format!("{field} {said}"));
        let wrong = json!(["64", -1, 64.5, [64], {}, true, 0]);
        for wrong in wrong.as_array().unwrap() {
            check(wrong.clone(), &format!("is {wrong}, expected"));
        }
        check(json!(u64::MAX), "is 18446744073709551615");
        check(json!(1e30), "is 1e");
    }
    let needed = "hidden_size num_hidden_layers vocab_size rms_norm_eps model_type";
    for field in needed.split(' ') {
        folder.check(field, Value::Null, &format!("no {field}"));
    }
}

/// Possible values, but not those of the weights.
#[test]
fn sizes_that_the_weights_do_not_have_are_refused() {
    let mut folder = Folder::copy("llama-tied");
    folder.config["head_dim"] = json!(16);
    for (field, value, expected) in [
        ("hidden_size", 96, "tensor model.embed_tokens.weight"),
        ("intermediate_size", 1 << 18, "tensor model.layers.0.mlp."),
        ("num_hidden_layers", 1 << 10, "tensor model.layers."),
        (
            "num_attention_heads",
            1 << 12,
            "tensor model.layers.0.self_",
        ),
        ("vocab_size", 1 << 24, "tensor model.embed_tokens.weight"),
        ("head_dim", 64, "tensor model.layers.0.self_attn.q_proj."),
    ] {
        folder.check(field, json!(value), expected);
    }
}

/// Sizes and settings of every family, each with a value that is impossible, is not that of the
/// weights, or changes the arithmetic.
#[test]
fn fields_that_lie_are_refused() {
    let (mut checked, mut folders) = (0, BTreeMap::new());
    for row in include_str!("hf.tsv").lines().skip(1) {
        let columns: Vec<&str> = row.split('\t').collect();
        let [name, field, value, expected] = columns[..] else {
            panic!("{row:?}");
        };
        let folder = folders.entry(name).or_insert_with(|| Folder::copy(name));
        folder.check(field, serde_json::from_str(value).unwrap(), expected);
        checked += 1;
    }
    assert!(checked > 130, "{checked} rows");
    let llama = Folder::copy("llama-tied");
    let long = json!("x".repeat(100_000));
    llama.check("model_type", long, "xxx...\" is not supported");
    let types = json!(vec!["full_attention"; 1000]);
    Folder::copy("gemma3-bf16").check("layer_types", types, "layer_types is");
}

#[test]
fn a_configuration_that_is_no_object_is_refused() {
    let folder = Folder::copy("llama-tied");
    for config in [json!([]), json!(null), json!("llama"), json!(3), json!({})] {
        let text = refusal(folder.write(&config), "config");
        assert!(text.contains("no model_type"), "{config}: {text:?}");
    }
}
