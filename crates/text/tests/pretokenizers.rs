//! Ten thousand random strings by every pre-tokenizer of the families that are computed, against
//! llama.cpp (`scripts/golden/pretokenizers.py`).

#![allow(clippy::unwrap_used, reason = "tests, and functions of tests")]

use crate::support::golden;
use paceline_text::tokenizer::{Specials, Tokenizer};
use paceline_weights::gguf::testing::GgufWriter;
use paceline_weights::gguf::{Gguf, MetadataValue};

/// Recording of `scripts/golden/pretokenizers.py`: settings, a vocabulary, and hashes under the
/// name of each pretokenizer.
type Recorded = serde_json::Value;

/// SplitMix64 (Steele, Lea and Flood 2014).
struct TextRng(u64);

impl TextRng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }
}

fn texts(recorded: &Recorded) -> Vec<String> {
    let alphabet = recorded["alphabet"].as_array().unwrap();
    let alphabet: Vec<&str> = alphabet.iter().map(|part| part.as_str().unwrap()).collect();
    let mut random = TextRng(recorded["seed"].as_u64().unwrap());
    let text = |_| {
        let parts = random.below(24);
        (0..parts)
            .map(|_| alphabet[random.below(alphabet.len())])
            .collect()
    };
    (0..recorded["strings"].as_u64().unwrap())
        .map(text)
        .collect()
}

fn tokenizer(recorded: &Recorded, name: &str) -> Tokenizer {
    let list = |key: &str, between: char| -> MetadataValue {
        let text = recorded[key].as_str().unwrap();
        let list: Vec<String> = text.split(between).map(str::to_owned).collect();
        list.into()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vocabulary.gguf");
    GgufWriter::new()
        .meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", name)
        .meta("tokenizer.ggml.tokens", list("tokens", ' '))
        .meta("tokenizer.ggml.merges", list("merges", '\n'))
        .write(&path);
    Tokenizer::from_gguf(Gguf::open(&path).unwrap().metadata()).unwrap()
}

/// FNV-1a of 64 bits over the ids, and one more value that ends them.
fn fnv(ids: &[u32], hash: u64) -> u64 {
    let ids = ids.iter().copied().chain([u32::MAX]);
    let bytes = ids.flat_map(u32::to_le_bytes);
    bytes.fold(hash, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[test]
fn random_strings_equal_llama_cpp() {
    let recorded: Recorded = golden("pretokenizers.json");
    let texts = texts(&recorded);
    let group = recorded["group"].as_u64().unwrap() as usize;
    for name in [
        "kimi-k2",
        "deepseek-llm",
        "deepseek-v3",
        "llama-bpe",
        "qwen2",
        "glm4",
        "dbrx",
        "gpt-2",
        "smollm",
    ] {
        let tokenizer = tokenizer(&recorded, name);
        let expected = recorded[name].as_array().unwrap();
        assert_eq!(expected.len() * group, texts.len(), "{name}");
        for (i, (texts, expected)) in texts.chunks(group).zip(expected).enumerate() {
            let hash = texts.iter().fold(0xcbf2_9ce4_8422_2325, |hash, text| {
                let ids = tokenizer.encode(text, Specials::AsText, false);
                fnv(&ids.unwrap(), hash)
            });
            let got = format!("{hash:016x}");
            assert_eq!(
                got,
                expected.as_str().unwrap(),
                "{name}, strings from {}",
                i * group
            );
        }
    }
}
