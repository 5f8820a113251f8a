//! Token ids against llama.cpp and the `tokenizers` crate of Python, recorded by
//! `scripts/golden_text.py`.

#![allow(clippy::unwrap_used, reason = "tests, and functions of tests")]

use crate::support::{byte_level_metadata, golden, model, npm_tokenizer, strings};
use paceline_text::tokenizer::{Specials, Tokenizer};
use paceline_weights::gguf::{Array, Metadata, MetadataValue};
use serde::Deserialize;

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GEMMA: &str = "gemma-3-270m-q4_k_m.gguf";
const AUSTEN: &str = include_str!("../../../tests-data/austen-1056.txt");

#[derive(Deserialize)]
struct Ids {
    #[serde(default)]
    eog: Vec<u32>,
    as_text: Vec<Vec<u32>>,
    parse: Vec<Vec<u32>>,
}

/// Compares all strings but those for which `differs(string, mode)` holds, where ours must differ:
/// an exception that is no longer one fails as well.
fn check(name: &str, tokenizer: &Tokenizer, differs: impl Fn(&str, Specials) -> bool) {
    let expected: Ids = golden(name);
    let mut wrong = Vec::new();
    for (specials, rows) in [
        (Specials::AsText, &expected.as_text),
        (Specials::Parse, &expected.parse),
    ] {
        let strings = strings();
        assert_eq!(rows.len(), strings.len());
        for (text, row) in strings.iter().zip(rows) {
            let ids = tokenizer.encode(text, specials, false).unwrap();
            if (ids == *row) == differs(text, specials) {
                wrong.push(format!(
                    "{specials:?} {text:?}\n  got {ids:?}\n expected {row:?}"
                ));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{name}: {}\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// Ordinary text gives no control token, and what it gives spells the text, if the vocabulary has
/// all bytes.
fn check_round_trip(tokenizer: &Tokenizer, lossless: bool) {
    for text in strings() {
        let ids = tokenizer.encode(&text, Specials::AsText, false).unwrap();
        assert!(
            !ids.iter().any(|id| tokenizer.is_control(*id)),
            "{text:?}: {ids:?}"
        );
        // SentencePiece writes U+2581 for a space, and so maps both to one.
        if lossless && !text.contains('\u{2581}') {
            assert_eq!(tokenizer.decode_all(&ids), text);
        }
    }
}

#[test]
fn smollm2_equals_llama_cpp() {
    let Some(file) = model("smollm2_equals_llama_cpp", SMOLLM2) else {
        return;
    };
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    check("smollm2.json", &tokenizer, |_, _| false);
    let expected: Ids = golden("smollm2.json");
    assert_eq!(tokenizer.end_of_generation(), expected.eog);
    assert_eq!(
        (tokenizer.bos(), tokenizer.eos(), tokenizer.adds_bos()),
        (Some(1), Some(2), false)
    );
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(tokenizer.token_text(2), Some("<|im_end|>"));
    assert_eq!(tokenizer.token_bytes(2), Some(&b""[..]));
    assert_eq!(tokenizer.token_bytes(7042), Some(&b" Paris"[..]));
    assert_eq!(tokenizer.token_bytes(49152), None);
    check_round_trip(&tokenizer, false);
}

#[test]
fn smollm2_cuts_austen_into_256() {
    let Some(file) = model("smollm2_cuts_austen_into_256", SMOLLM2) else {
        return;
    };
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    let ids = tokenizer.encode(AUSTEN, Specials::AsText, true).unwrap();
    let first = [
        3709, 7227, 198, 198, 3087, 12405, 33015, 22342, 198, 70, 7113, 69, 3945, 339, 16506, 198,
    ];
    assert_eq!((&ids[..16], ids.len()), (&first[..], 256));
    assert_eq!(tokenizer.decode_all(&ids), AUSTEN);
}

#[test]
fn gemma_equals_llama_cpp() {
    let Some(file) = model("gemma_equals_llama_cpp", GEMMA) else {
        return;
    };
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    // llama.cpp takes `</s>`, which is markup in this vocabulary, for a control token.
    check("gemma3.json", &tokenizer, |text, specials| {
        specials == Specials::AsText && text.starts_with("</s>")
    });
    assert_eq!(tokenizer.end_of_generation(), [1, 106]);
    assert_eq!(
        (tokenizer.bos(), tokenizer.eos(), tokenizer.adds_bos()),
        (Some(2), Some(1), true)
    );
    let ids = tokenizer
        .encode("The capital of France is", Specials::AsText, true)
        .unwrap();
    assert_eq!(ids, [2, 818, 5279, 529, 7001, 563]);
    check_round_trip(&tokenizer, true);
    let ids = tokenizer.encode(AUSTEN, Specials::AsText, true).unwrap();
    assert_eq!(
        (ids.len(), tokenizer.decode_all(&ids)),
        (243, AUSTEN.to_owned())
    );
}

#[test]
fn byte_level_gguf_vocabularies_equal_llama_cpp() {
    for (name, pre) in [("qwen3", "qwen2"), ("llama3", "llama-bpe")] {
        let test = "byte_level_gguf_vocabularies_equal_llama_cpp";
        let Some(dir) = npm_tokenizer(test, name) else {
            continue;
        };
        let tokenizer = Tokenizer::from_gguf(&byte_level_metadata(&dir, pre)).unwrap();
        // llama.cpp takes Qwen's ordinary token `</s>` for a control token.
        check(&format!("{name}.json"), &tokenizer, |text, specials| {
            name == "qwen3" && specials == Specials::Parse && text.starts_with("</s>")
        });
        check_round_trip(&tokenizer, true);
    }
}

/// A tiny vocabulary in the form of Gemma 4's.
#[derive(Deserialize)]
struct Gemma4 {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    merges: Vec<String>,
}

fn gemma4() -> Tokenizer {
    let vocab: Gemma4 = golden("gemma4-tiny.json");
    let entries = [
        ("model", MetadataValue::from("gemma4")),
        ("tokens", MetadataValue::from(vocab.tokens)),
        ("token_type", MetadataValue::Array(Array::I32(vocab.kinds))),
        ("merges", MetadataValue::from(vocab.merges)),
        ("bos_token_id", MetadataValue::U32(2)),
        ("eos_token_id", MetadataValue::U32(1)),
        ("unknown_token_id", MetadataValue::U32(3)),
        ("add_bos_token", MetadataValue::Bool(false)),
    ];
    let entries = entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value));
    let metadata = Metadata::from_entries(entries.to_vec()).unwrap();
    Tokenizer::from_gguf(&metadata).unwrap()
}

#[test]
fn gemma4_gguf_vocabularies_equal_llama_cpp() {
    let tokenizer = gemma4();
    check("gemma4-tiny.json", &tokenizer, |_, _| false);
    check_round_trip(&tokenizer, true);
    assert!(tokenizer.adds_bos(), "whatever the file says");
}

#[test]
fn a_prompt_gets_the_first_token_that_it_lacks() {
    let tokenizer = gemma4();
    let bos = tokenizer.bos().unwrap();
    let name = tokenizer.token_text(bos).unwrap().to_owned();
    let plain = tokenizer.encode("a", Specials::Parse, false).unwrap();
    for (written, expected) in [(0, 1), (1, 1), (2, 2)] {
        let prompt = name.repeat(written) + "a";
        let ids = tokenizer.encode_prompt(&prompt, usize::MAX).unwrap();
        assert_eq!(
            ids,
            [vec![bos; expected], plain.clone()].concat(),
            "{prompt}"
        );
    }
}

#[test]
fn tokenizer_json_equals_the_python_crate() {
    for (name, bos, eos) in [
        ("qwen3", None, Some(151_645)),
        ("llama3", Some(128_000), Some(128_001)),
        ("gemma3", Some(2), Some(106)),
    ] {
        let test = "tokenizer_json_equals_the_python_crate";
        let Some(dir) = npm_tokenizer(test, name) else {
            continue;
        };
        let tokenizer = Tokenizer::from_hf_dir(&dir).unwrap();
        check(&format!("{name}-hf.json"), &tokenizer, |_, _| false);
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (bos, eos), "{name}");
        assert_eq!(tokenizer.adds_bos(), name == "gemma3", "{name}");
        check_round_trip(&tokenizer, name != "qwen3"); // Qwen composes accents
    }
}

/// Prints how long loading and encoding take; `--nocapture` shows it.
#[test]
fn loading_is_quick() {
    let text = AUSTEN.repeat(100);
    for (file, limit_ms) in [(SMOLLM2, 200), (GEMMA, 1000)] {
        let Some(gguf) = model("loading_is_quick", file) else {
            continue;
        };
        let start = std::time::Instant::now();
        let tokenizer = Tokenizer::from_gguf(gguf.metadata()).unwrap();
        let load = start.elapsed();
        let start = std::time::Instant::now();
        let n = tokenizer
            .encode(&text, Specials::AsText, false)
            .unwrap()
            .len();
        println!(
            "{file}: loaded in {load:?}; {} bytes, {n} ids in {:?}",
            text.len(),
            start.elapsed()
        );
        // Ten times what is measured: only a wrong algorithm takes longer.
        assert!(load.as_millis() < 10 * limit_ms, "{file}: {load:?}");
    }
}
