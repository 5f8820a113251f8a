//! Encoders against what `transformers` computes with them (`tests-data/golden/encoder`, made by
//! `scripts/golden/encoder_tiny.py`).

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_model::encoder::{Encoder, EncoderConfig, Pooling};
use paceline_model::{Error, ModelSource};
use paceline_tensor::{InstructionSet, Kernels};
use paceline_weights::gguf::testing::GgufWriter;
use paceline_weights::hf::HfFolder;
use serde_json::{Value, json};

use crate::common::compare::largest;
use crate::common::runner::Runner;
use crate::common::{golden, golden_json, kernels, test_model};

const TINY: [&str; 4] = ["bert-mean", "roberta-first", "qwen3-last", "gemma3-mean"];

fn folder(name: &str) -> PathBuf {
    golden(&format!("encoder/{name}"))
}

fn load(folder: &Path, kernels: Kernels) -> Encoder {
    Encoder::load(&ModelSource::open(folder).unwrap(), Arc::new(kernels)).unwrap()
}

/// Texts of a golden file with their ids and vectors.
fn cases(name: &str) -> Vec<(String, Vec<u32>, Vec<f64>)> {
    let json = golden_json(&format!("encoder/{name}.golden.json"));
    let case = |case: &Value| {
        let ids = case["ids"].as_array().unwrap().iter();
        let vector = case["vector"].as_array().unwrap().iter();
        (
            case["text"].as_str().unwrap().to_owned(),
            ids.map(|id| id.as_u64().unwrap() as u32).collect(),
            vector.map(|x| x.as_f64().unwrap()).collect(),
        )
    };
    json["cases"].as_array().unwrap().iter().map(case).collect()
}

fn one_step(encoder: &Encoder, texts: &[&[u32]]) -> Vec<Vec<f32>> {
    encoder.embed(texts, &|| false).unwrap().unwrap()
}

fn embed(encoder: &Encoder, texts: &[&[u32]]) -> Vec<Vec<f32>> {
    let lengths: Vec<usize> = texts.iter().map(|text| text.len()).collect();
    let steps = Encoder::steps(&lengths).into_iter();
    let vectors = |step: std::ops::Range<usize>| one_step(encoder, &texts[step]);
    steps.flat_map(vectors).collect()
}

/// Ids and vectors of `transformers`: both in float32, in another order. 1e-6 is several times the
/// distance seen, in vectors of length 1.
fn check(name: &str, folder: &Path) {
    let encoder = load(folder, Kernels::new(2).unwrap());
    let cases = cases(name);
    let texts: Vec<&[u32]> = cases.iter().map(|(_, ids, _)| ids.as_slice()).collect();
    for (got, (text, _, expected)) in embed(&encoder, &texts).iter().zip(&cases) {
        let pairs = got.iter().zip(expected);
        let worst = largest(pairs.map(|(x, y)| (f64::from(*x) - y).abs()));
        assert!(worst <= 1e-6, "{name} {text:?}: {worst:.2e}");
        assert_eq!(got.len(), expected.len(), "{name}");
    }
}

#[test]
fn vectors_are_those_of_transformers() {
    for name in TINY {
        check(name, &folder(name));
    }
}

#[test]
fn minilm_is_that_of_transformers() {
    if let Some(folder) = test_model("minilm", "all-minilm-l6-v2") {
        check("minilm", &folder);
    }
}

/// The same bits alone and among others, on any number of threads and with every instruction set.
#[test]
fn a_vector_depends_on_its_own_text_only() {
    for name in TINY {
        let folder = folder(name);
        let cases = cases(name);
        let mut texts: Vec<&[u32]> = cases.iter().map(|(_, ids, _)| ids.as_slice()).collect();
        let alone = load(&folder, Kernels::new(1).unwrap());
        let expected = texts.iter().flat_map(|text| one_step(&alone, &[text]));
        let expected: Vec<Vec<f32>> = expected.collect();
        for set in InstructionSet::available() {
            let encoder = load(&folder, Kernels::with_set(set, 3).unwrap());
            assert_eq!(embed(&encoder, &texts), expected, "{name} {}", set.name());
        }
        let encoder = load(&folder, Kernels::new(2).unwrap());
        texts.reverse();
        let mut turned = embed(&encoder, &texts);
        turned.reverse();
        assert_eq!(turned, expected, "{name} in another order");
    }
}

#[test]
fn folders_say_how_rows_are_pooled_and_how_long_texts_are() {
    for (name, pooling, context) in [
        ("bert-mean", Pooling::Mean, 60),
        ("roberta-first", Pooling::First, 64),
        ("qwen3-last", Pooling::Last, 2048),
        ("gemma3-mean", Pooling::Mean, 2048),
    ] {
        let source = ModelSource::open(&folder(name)).unwrap();
        assert!(EncoderConfig::is_encoder(&source));
        let config = EncoderConfig::read(&source).unwrap();
        assert_eq!((config.pooling, config.context), (pooling, context));
    }
    let decoder = ModelSource::open(&golden("hf/llama-tied")).unwrap();
    assert!(!EncoderConfig::is_encoder(&decoder));
}

/// Rows of EmbeddingGemma see later ones, so it has no next token to choose.
#[test]
fn a_bidirectional_model_generates_no_text() {
    let model = crate::common::load(&folder("gemma3-mean"), KernelClass::Cpu, &kernels());
    let Err(error) = Runner::try_new(model, 5) else {
        panic!("it has a cache for text");
    };
    let expected = "use_bidirectional_attention is true, expected false";
    assert!(error.to_string().contains(expected), "{error}");
}

/// Modules behind the pooling are computed or named.
#[test]
fn an_unknown_module_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let from = folder("bert-mean");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    let read = |module: Value| {
        let modules = json!([{"type": "sentence_transformers.models.Pooling"}, module]);
        std::fs::write(dir.path().join("modules.json"), modules.to_string()).unwrap();
        EncoderConfig::read(&ModelSource::open(dir.path()).unwrap()).map(|config| config.width)
    };
    let dense = json!({"type": "sentence_transformers.models.Dense", "path": "2_Dense"});
    let cnn = json!({"type": "sentence_transformers.models.CNN", "path": "1_CNN"});
    for (module, expected) in [(dense, "no 2_Dense/config.json"), (cnn, "CNN at \"1_CNN\"")] {
        let error = read(module).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let normalize = json!({"type": "sentence_transformers.models.Normalize"});
    assert_eq!(read(normalize).unwrap(), 48);
}

/// A text longer than a step goes through a decoder in parts.
#[test]
fn a_long_text_is_computed_in_parts() {
    let encoder = load(&folder("qwen3-last"), Kernels::new(2).unwrap());
    let ids: Vec<u32> = (0..1100).map(|i| 3 + i * 7 % 290).collect();
    let whole = one_step(&encoder, &[&ids]);
    assert_ne!(whole, one_step(&encoder, &[&ids[..1099]]));
    let among = embed(&encoder, &[&ids[..300], &ids, &ids[..9]]);
    assert_eq!(whole, among[1..2]);
    let asked = std::cell::Cell::new(0);
    let is_over = || {
        asked.set(asked.get() + 1);
        asked.get() == 3
    };
    assert_eq!(encoder.embed(&[&ids], &is_over).unwrap(), None);
}

/// The names of BERT's weights in a folder and in a GGUF file (`gguf-py/gguf/constants.py`).
const NAMES: [(&str, &str); 11] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.LayerNorm", "layer_output_norm"),
];

fn gguf_name(name: &str) -> String {
    let (stem, kind) = name.rsplit_once('.').unwrap();
    let Some(inner) = stem.strip_prefix("encoder.layer.") else {
        let known = NAMES.iter().find(|(known, _)| *known == stem).unwrap();
        return format!("{}.{kind}", known.1);
    };
    let (layer, part) = inner.split_once('.').unwrap();
    let known = NAMES.iter().find(|(known, _)| *known == part);
    let part = known.map_or("ffn_down", |(_, part)| part); // output.dense
    format!("blk.{layer}.{part}.{kind}")
}

/// The folder as `convert_hf_to_gguf.py` of llama.cpp would convert it.
fn converted(folder: &Path, out: &Path) {
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
    };
    let (config, tokenizer) = (read("config.json"), read("tokenizer.json"));
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (text, id) in vocab {
        let is_name = text.starts_with('[') && text.ends_with(']');
        let piece = text.strip_prefix("##").map(str::to_owned);
        let written = piece.unwrap_or_else(|| format!("\u{2581}{text}"));
        tokens[id.as_u64().unwrap() as usize] = if is_name { text.clone() } else { written };
    }
    let mut kinds = vec![1; tokens.len()];
    kinds[..5].fill(3);
    let number = |field: &str| config[field].as_u64().unwrap() as u32;
    let mut file = GgufWriter::new()
        .meta("general.architecture", "bert")
        .meta("bert.context_length", number("max_position_embeddings"))
        .meta("bert.embedding_length", number("hidden_size"))
        .meta("bert.feed_forward_length", number("intermediate_size"))
        .meta("bert.block_count", number("num_hidden_layers"))
        .meta("bert.attention.head_count", number("num_attention_heads"))
        .meta("bert.attention.layer_norm_epsilon", 1e-12f32)
        .meta("bert.attention.causal", false)
        .meta("bert.pooling_type", 1u32)
        .meta("tokenizer.ggml.model", "bert")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.unknown_token_id", 1u32)
        .meta("tokenizer.ggml.seperator_token_id", 3u32)
        .meta("tokenizer.ggml.cls_token_id", 2u32);
    let folder = HfFolder::open(folder).unwrap();
    for name in folder.names() {
        let tensor = folder.tensor(name).unwrap();
        let (kind, name) = (tensor.block_type, gguf_name(name));
        file = file.tensor(&name, kind, &tensor.shape, &tensor.bytes[..]);
    }
    file.write(out);
}

#[test]
fn a_gguf_file_of_bert_makes_the_vectors_of_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bert.gguf");
    converted(&folder("bert-mean"), &path);
    let source = ModelSource::open(&path).unwrap();
    assert!(EncoderConfig::is_encoder(&source));
    let encoder = Encoder::load(&source, Arc::new(Kernels::new(2).unwrap())).unwrap();
    let of_folder = load(&folder("bert-mean"), Kernels::new(2).unwrap());
    for (text, ids, _) in &cases("bert-mean") {
        let vectors = [&encoder, &of_folder].map(|encoder| one_step(encoder, &[ids]));
        assert_eq!(vectors[0], vectors[1], "{text:?}");
    }
}

/// Reads the tiny model with one field of one file changed.
fn changed(file: &str, field: &str, value: Value) -> Result<Encoder, Error> {
    let copy = tempfile::tempdir().unwrap();
    let from = folder("bert-mean");
    std::fs::create_dir(copy.path().join("1_Pooling")).unwrap();
    for name in ["config.json", "model.safetensors", "1_Pooling/config.json"] {
        std::fs::copy(from.join(name), copy.path().join(name)).unwrap();
    }
    let path = copy.path().join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config[field] = value;
    std::fs::write(&path, config.to_string()).unwrap();
    let source = ModelSource::open(copy.path()).unwrap();
    Encoder::load(&source, kernels())
}

#[test]
fn what_would_be_computed_wrongly_is_refused_by_name() {
    for (field, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!("48")),
        ("hidden_size", json!(1_u64 << 40)),
        ("num_attention_heads", json!(5)),
        ("num_hidden_layers", json!(null)),
        ("hidden_act", json!("swish")),
        ("hidden_act", json!(7)),
        ("layer_norm_eps", json!(-1.0)),
        ("max_position_embeddings", json!(1)),
        ("position_embedding_type", json!("relative_key")),
        ("is_decoder", json!(true)),
    ] {
        let error = changed("config.json", field, value.clone()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(field), "{field} = {value}: {text}");
    }
    for (field, value, expected) in [
        ("intermediate_size", json!(95), "intermediate.dense"),
        ("num_hidden_layers", json!(4), "encoder.layer.3"),
        ("vocab_size", json!(301), "word_embeddings"),
        ("max_position_embeddings", json!(63), "position_embeddings"),
        ("model_type", json!("deberta"), "deberta"),
    ] {
        let error = changed("config.json", field, value).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected), "{field}: {text}");
    }
    let file = "1_Pooling/config.json";
    let field = "pooling_mode_max_tokens";
    let error = changed(file, field, json!(true)).unwrap_err();
    assert!(error.to_string().contains(field), "{error}");
}
