//! Tokenizers and templates that lie. The inputs are cuts and flipped bits of a small
//! `tokenizer.json`, all of them, files made to break its reader, and metadata that contradicts
//! itself. Each is refused or read, without a panic, and with memory in proportion to the file.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use crate::counting::peak_bytes;
use crate::support::metadata;
use paceline_text::tokenizer::{Specials, Tokenizer};
use paceline_weights::gguf::{Array, MetadataValue};
use serde_json::{Value as Json, json};
use std::cell::Cell;
use std::sync::Once;
use std::time::Duration;

use paceline_base::SplitMix64;
use paceline_base::testing::{Stopwatch, mutations};

/// Memory for a file of a few kilobytes. The classes of letters of a compiled pattern take 1 to 5
/// MB for any file. Everything else grows with the file.
const ALLOWED_BYTES: usize = 32 << 20;

/// A byte-level vocabulary with one of everything.
fn small() -> Json {
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
        "added_tokens": [
            {"id": 4, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": true,
             "normalized": false, "special": true},
            {"id": 5, "content": "<t>", "single_word": true, "lstrip": true, "rstrip": false,
             "normalized": true, "special": false}
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|\\s+|\\S+"}, "behavior": "Isolated",
             "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
             "use_regex": false}
        ]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                  "byte_fallback": false, "ignore_merges": false,
                  "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3}, "merges": [["a", "b"]]}
    })
}

/// Reads the file and encodes a little; says what went wrong.
fn outcome(file: &[u8]) -> Result<Vec<u32>, String> {
    let read = || {
        let tokenizer = Tokenizer::from_json_bytes(file).map_err(|e| e.to_string())?;
        for id in [0, 4, 6, u32::MAX] {
            tokenizer.token_bytes(id);
        }
        let ids = tokenizer.encode(" ab <s> <t> ab<t>ab", Specials::Parse, true);
        ids.map_err(|e| e.to_string())
    };
    let (result, peak) = without_backtraces(|| peak_bytes(read));
    assert!(
        peak <= ALLOWED_BYTES,
        "{peak} bytes for {}: {result:?}",
        file.len()
    );
    result
}

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs without panic reports of this thread. The library catches the panics of the crate that
/// reads tokenizers. But with RUST_BACKTRACE set the report is printed first, and takes 60 MB for
/// the symbols of this test program.
fn without_backtraces<T>(run: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                usual(panic);
            }
        }));
    });
    IS_QUIET.set(true);
    let result = run();
    IS_QUIET.set(false);
    result
}

/// The small file with one place replaced.
fn with(pointer: &str, value: Json) -> Vec<u8> {
    let mut file = small();
    *file.pointer_mut(pointer).unwrap() = value;
    serde_json::to_vec(&file).unwrap()
}

#[test]
fn the_small_file_is_read_and_neither_padded_nor_cut() {
    let ids = outcome(&serde_json::to_vec(&small()).unwrap());
    assert_eq!(ids.unwrap(), [4, 3, 2, 3, 4, 5, 3, 2, 2]);
}

#[test]
fn every_cut_and_every_flipped_bit() {
    let file = serde_json::to_vec(&small()).unwrap();
    for len in 0..file.len() {
        assert!(outcome(&file[..len]).is_err(), "cut at {len}");
    }
    let mut n_read = 0;
    for at in 0..file.len() {
        // All bits of every byte would take a minute for nothing new.
        let mut bad = file.clone();
        bad[at] ^= 1 << (at % 8);
        n_read += usize::from(outcome(&bad).is_ok());
    }
    assert!(
        n_read > 0 && n_read < file.len(),
        "{n_read} of {} were read",
        file.len()
    );
}

#[test]
fn files_that_contradict_themselves_are_errors() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let nested = (0..200).fold(
        json!({"type": "Fuse"}),
        |inner, _| json!({"type": "Sequence", "decoders": [inner]}),
    );
    for (what, file) in [
        ("nothing", Vec::new()),
        ("not UTF-8", vec![0xff; 64]),
        ("deep", deep.into_bytes()),
        ("deep decoder", with("/decoder", nested)),
        ("no decoder", with("/decoder", Json::Null)),
    ] {
        assert!(outcome(&file).is_err(), "{what}: {:?}", outcome(&file));
    }
    for (pointer, value) in pointed(CONTRADICTIONS) {
        let outcome = outcome(&with(pointer, value.clone()));
        assert!(outcome.is_err(), "{pointer} {value}: {outcome:?}");
    }
}

/// Places of the small file, and values that make it contradict itself.
const CONTRADICTIONS: &str = r#"/decoder {"type": "WordPiece", "prefix": "@@", "cleanup": true}
/model/vocab/ab 4294967295
/model/vocab/ab 5000000
/model/vocab/ab 1099511627776
/model/vocab/ab -1
/model/merges [["a", "x"]]
/model/merges [["b", "a"]]
/model/merges [["ab", "ab"]]
/model/continuing_subword_prefix "abcdefgh"
/pre_tokenizer/pretokenizers/0/pattern/Regex "("
/model/dropout 7.5
/normalizer {"type": "Precompiled", "precompiled_charsmap": "////"}
/post_processor/single [{"SpecialToken": {"id": "?", "type_id": 0}}]
/model/vocab {}"#;

/// Places of the small file, and values that ask for much.
const MUCH: &str = r#"/padding/strategy {"Fixed": 1099511627776}
/padding/pad_to_multiple_of 1099511627776
/truncation/max_length 0
/truncation/stride 1099511627776
/pre_tokenizer/pretokenizers/0/pattern/Regex "(?:(?:(?:a{99}){99}){99}){99}"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(a|a|aa)+(?!b)$|\\1"
/pre_tokenizer/pretokenizers/0/pattern/Regex ""
/added_tokens/0/content ""
/added_tokens/0/id 4000000000"#;

/// The rows of a table of places and values.
fn pointed(table: &str) -> impl Iterator<Item = (&str, Json)> {
    table.lines().map(|row| {
        let (pointer, value) = row.split_once(' ').unwrap();
        (pointer, serde_json::from_str(value).unwrap())
    })
}

#[test]
fn files_that_ask_for_much_get_little() {
    for (pointer, value) in pointed(MUCH) {
        let _ = outcome(&with(pointer, value));
    }
}

#[test]
fn a_vocabulary_of_control_tokens_still_spells_text() {
    // `<s>` is in the model's own vocabulary and its merges lead there.
    let model = json!({"type": "BPE", "vocab": {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "Ġ": 5},
                       "merges": [["<", "s"], ["<s", ">"]]});
    let tokenizer = Tokenizer::from_json_bytes(&with("/model", model)).unwrap();
    let ids = |specials| tokenizer.encode("<s>", specials, false).unwrap();
    assert_eq!(ids(Specials::Parse), [4]);
    assert_eq!(ids(Specials::AsText), [0, 1, 2]);
}

fn strings(list: &[&str]) -> MetadataValue {
    MetadataValue::Array(Array::String(
        list.iter().map(|s| (*s).to_owned()).collect(),
    ))
}

/// A tokenizer model, its other entries, and what is said of them.
const METADATA: &str = "\
rwkv | | tokenizer model rwkv is not supported, expected gpt2, llama, bert or gemma4
gpt2 | pre=x | pre-tokenizer x is not supported
gpt2 | | metadata key tokenizer.ggml.tokens is missing
gpt2 | tokens= | the vocabulary is empty
gpt2 | tokens=a,b,ab | metadata key tokenizer.ggml.merges is missing
gpt2 | tokens=a,b,ab merges=a+b,b+b | merge 1 \"b b\" does not join two tokens to a third
gpt2 | tokens=a,b,ab token_type=2 merges= | \
metadata key tokenizer.ggml.token_type: 2 entries, expected 3, one per token
gemma4 | tokens=a,b,ab merges=a+b | the vocabulary has no token for byte 0x00
llama | tokens=a,b,ab | metadata key tokenizer.ggml.scores is missing
llama | tokens=a,b,ab scores=4 | \
metadata key tokenizer.ggml.scores: 4 entries, expected 3, one per token";

/// An entry of [`METADATA`]: a list of texts, or a number of equal values.
fn entry(text: &str) -> (String, MetadataValue) {
    let (key, value) = text.split_once('=').unwrap();
    let list: Vec<String> = value
        .split_terminator(',')
        .map(|it| it.replace('+', " "))
        .collect();
    let value = match key {
        "pre" => MetadataValue::String(value.to_owned()),
        "token_type" => MetadataValue::Array(Array::I32(vec![1; value.parse().unwrap()])),
        "scores" => MetadataValue::Array(Array::F32(vec![0.0; value.parse().unwrap()])),
        _ => MetadataValue::Array(Array::String(list)),
    };
    (format!("tokenizer.ggml.{key}"), value)
}

#[test]
fn metadata_that_contradicts_itself_is_an_error() {
    let said = |entries: &[(String, MetadataValue)]| {
        let entries = entries.iter().map(|(key, value)| (&**key, value.clone()));
        let error = Tokenizer::from_gguf(&metadata(entries.collect())).unwrap_err();
        error.to_string()
    };
    assert_eq!(said(&[]), "metadata key tokenizer.ggml.model is missing");
    for row in METADATA.lines() {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        let [model, more, expected] = columns[..] else {
            panic!("{row}");
        };
        let model = MetadataValue::String(model.to_owned());
        let mut entries = vec![("tokenizer.ggml.model".to_owned(), model)];
        entries.extend(more.split_whitespace().map(entry));
        assert_eq!(said(&entries), expected);
    }
}

#[test]
fn ids_outside_the_vocabulary_are_none() {
    for id in [
        MetadataValue::I32(-1),
        MetadataValue::U32(u32::MAX),
        MetadataValue::U64(1 << 40),
        MetadataValue::U32(3),
    ] {
        let tokenizer = Tokenizer::from_gguf(&metadata(vec![
            ("tokenizer.ggml.model", MetadataValue::String("gpt2".into())),
            ("tokenizer.ggml.tokens", strings(&["a", "b", "ab"])),
            ("tokenizer.ggml.merges", strings(&["a b"])),
            ("tokenizer.ggml.bos_token_id", id.clone()),
            ("tokenizer.ggml.eos_token_id", id),
            ("tokenizer.ggml.add_bos_token", MetadataValue::Bool(true)),
        ]));
        let tokenizer = tokenizer.unwrap();
        assert_eq!(
            (tokenizer.bos(), tokenizer.eos(), tokenizer.adds_bos()),
            (None, None, false)
        );
        assert_eq!(tokenizer.encode("ab", Specials::Parse, true).unwrap(), [2]);
    }
}

/// A normaliser that doubles each "a" `times` times.
fn doubled(times: usize) -> Json {
    let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    json!({"type": "Sequence", "normalizers": vec![double; times]})
}

#[test]
fn steps_that_grow_or_stall_are_errors() {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false});
    let bytes = json!({"type": "Sequence", "pretokenizers": vec![bytes; 30]});
    let words = json!({"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a",
                       "max_input_chars_per_word": u32::MAX, "continuing_subword_prefix": "##"});
    for (file, expected) in [
        (with("/normalizer", doubled(30)), "8 times as long"),
        (with("/normalizer", doubled(1000)), "normalizers: 1000"),
        (with("/pre_tokenizer", bytes), "growth by pre_tokenizers"),
        (with("/model", words), "max_input_chars_per_word"),
    ] {
        let error = outcome(&file).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// Values that a place of a tokenizer may lie with.
fn lies() -> Vec<Json> {
    let long = "a".repeat(5000);
    vec![
        Json::Null,
        json!(true),
        json!(0),
        json!(-1),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("<s>"),
        json!("(a*)*b"),
        json!(long),
        json!([]),
        json!({}),
        json!(["a", "b"]),
        json!({"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "Lowercase"}]}),
        json!({"type": "Prepend", "prepend": long}),
        doubled(30),
        json!({"type": "Replace", "pattern": {"Regex": "a?a?a?a?aaaa"}, "content": "aa"}),
        json!({"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": true}),
        json!({"type": "Unigram", "vocab": [["a", 0.5], ["b", -1e308]], "unk_id": 7}),
        json!({"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b",
               "max_input_chars_per_word": 1, "continuing_subword_prefix": "##"}),
    ]
}

/// Changes one place of `json`, found by walking down at random.
fn mutate(json: &mut Json, random: &mut SplitMix64, lies: &[Json]) {
    let size = match json {
        Json::Array(items) => items.len(),
        Json::Object(fields) => fields.len(),
        _ => 0,
    };
    if size == 0 || random.below(5) == 0 {
        *json = lies[random.below(lies.len())].clone();
        return;
    }
    let at = random.below(size);
    match (json, random.below(8)) {
        (Json::Array(items), 0) => drop(items.remove(at)),
        (Json::Array(items), 1) => items.push(items[at].clone()),
        (Json::Array(items), _) => mutate(&mut items[at], random, lies),
        (Json::Object(fields), choice) => {
            let name = fields.keys().nth(at).unwrap().clone();
            if choice == 0 {
                fields.remove(&name);
            } else {
                mutate(&mut fields[&name], random, lies);
            }
        }
        _ => unreachable!("only these have a size"),
    }
}

/// Longest time for one tokenizer, measured on an idle machine.
const TIME_MAX: Duration = Duration::from_secs(2);

/// Memory of each is bounded by [`outcome`].
#[test]
fn mutated_tokenizers_neither_abort_nor_hang() {
    let (lies, count) = (lies(), mutations(300));
    let (mut slowest, mut n_read) = (Duration::ZERO, 0);
    for seed in 0..count {
        let mut random = SplitMix64::new(seed);
        let mut file = small();
        for _ in 0..=random.below(4) {
            mutate(&mut file, &mut random, &lies);
        }
        let bytes = serde_json::to_vec(&file).unwrap();
        let watch = Stopwatch::start();
        n_read += u64::from(outcome(&bytes).is_ok());
        let took = watch.elapsed();
        assert!(took <= TIME_MAX, "seed {seed}: {took:?}");
        slowest = slowest.max(took);
    }
    eprintln!("{count} mutated tokenizers, {n_read} read, slowest {slowest:?}");
    assert!(n_read > 0 && n_read < count);
}
