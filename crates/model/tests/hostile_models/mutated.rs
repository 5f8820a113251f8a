//! Configurations changed at random, the same for a seed, in both layouts. Each is refused or the
//! model computes, without a panic, in bounded time and memory.

use std::process::Command;
use std::time::Duration;

use paceline_base::testing::{Stopwatch, mutations};
use paceline_base::{KernelClass, SplitMix64};
use paceline_model::{Error, ModelFamily};
use paceline_weights::gguf::{Array, MetadataValue as Entry};
use serde_json::{Map, Value, json};

use super::gguf::small;
use super::hf::Folder;
use crate::common::runner::Runner;
use crate::common::{kernels, try_load};

/// Longest time for one, measured on an idle machine.
const TIME_MAX: Duration = Duration::from_secs(2);

/// Most memory of a process that tries all of them, one after the other. The models have half a
/// megabyte, this program's own pages count too.
#[cfg(target_os = "linux")]
const MEMORY_MAX: u64 = 256 << 20;

/// Set for the process that tries them.
const IS_CHILD: &str = "PACELINE_MUTATED_CONFIGURATIONS";

/// All golden folders of one weights file.
const FOLDERS: &str = "
    dbrx-bf16 deepseek-v2 deepseek-v3-bf16 deepseek-v32-bf16 gemma3-bf16 gemma3-linear-bf16
    gemma4-e-bf16 gemma4-moe-bf16 glm4-moe-lite-bf16 glm4moe-air-bf16 glm4moe-bf16 gpt-oss-bf16
    gpt-oss-mxfp4 llama-tied llama-untied-bf16 minimax-m2-bf16 mistral4-bf16 mixtral qwen2-f16
    qwen2moe-bf16 qwen3-bf16 qwen3moe-bf16 qwen3next-bf16 qwen35-bf16 qwen35moe-bf16";

/// The trials run in a process of their own. Its memory is theirs alone, and a trial that aborts is
/// a failure of this test and of no other.
#[test]
fn mutated_configurations_are_refused_or_compute() {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", "hostile_models::mutated::child", "--nocapture"]);
    let output = process.env(IS_CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(said.contains("mutated configurations"), "{said}");
    eprintln!("{said}");
}

/// The trials of the process; nothing among the other tests.
#[test]
fn child() {
    if std::env::var_os(IS_CHILD).is_some() {
        try_all(mutations(128));
    }
}

fn try_all(count: u64) {
    let folders: Vec<_> = FOLDERS.split_whitespace().map(Folder::copy).collect();
    let kernels = kernels();
    let room = tempfile::tempdir().unwrap();
    let families = ModelFamily::ALL.into_iter();
    let is_written = |it: &ModelFamily| it.has_gguf() && *it != ModelFamily::Gemma3n;
    let families: Vec<_> = families.filter(is_written).collect(); // no streams in Tiny
    let (mut slowest, mut computed) = (Duration::ZERO, 0);
    for seed in 0..count {
        let mut random = SplitMix64::new(seed);
        let path = match random.below(2) {
            0 => {
                let folder = &folders[random.below(folders.len())];
                let mut config = folder.config.clone();
                (0..=random.below(3)).for_each(|_| mutate(&mut config, &mut random, 0));
                folder.write(&config).to_owned()
            }
            _ => {
                let path = room.path().join("lies.gguf");
                let mut file = small(families[random.below(families.len())]).file();
                (0..=random.below(3)).for_each(|_| mutate_entries(&mut file.entries, &mut random));
                file.write(&path);
                path
            }
        };
        let watch = Stopwatch::start();
        if let Ok(model) = try_load(&path, KernelClass::Cpu, &kernels) {
            match Runner::try_new(model, 20) {
                Ok(mut runner) => {
                    assert_eq!(runner.all(&[5; 20]).len(), 20, "{seed}");
                    computed += 1;
                }
                // Such a model answers prompts of up to `top_k` tokens.
                Err(Error::Indexer { .. }) => {}
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        let took = watch.elapsed();
        assert!(took <= TIME_MAX, "seed {seed}: {took:?}");
        slowest = slowest.max(took);
    }
    eprintln!("{count} mutated configurations, {computed} computed, slowest {slowest:?}");
    assert!(computed > 0 && computed < count);
    check_memory();
}

#[cfg(target_os = "linux")]
fn check_memory() {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().strip_suffix(" kB").unwrap();
    let peak = kib.parse::<u64>().unwrap() << 10;
    eprintln!("most memory of the process: {peak} bytes");
    assert!(peak <= MEMORY_MAX, "{peak} bytes");
}

#[cfg(not(target_os = "linux"))]
fn check_memory() {
    eprintln!("SKIPPED memory of mutated configurations: this system does not tell its peak");
}

/// Changes one place of `json`, found by walking down at random.
fn mutate(json: &mut Value, random: &mut SplitMix64, depth: usize) {
    let size = match json {
        Value::Array(items) => items.len(),
        Value::Object(fields) => fields.len(),
        _ => 0,
    };
    if size == 0 || (depth > 0 && random.below(4) == 0) {
        *json = lie(random);
        return;
    }
    let (at, choice) = (random.below(size), random.below(8));
    match json {
        Value::Array(items) if choice == 0 => drop(items.remove(at)),
        Value::Array(items) if choice == 1 => items.push(items[at].clone()),
        Value::Array(items) => mutate(&mut items[at], random, depth + 1),
        Value::Object(fields) if choice == 0 => remove(fields, at),
        Value::Object(fields) => {
            let value = fields.values_mut().nth(at).unwrap();
            mutate(value, random, depth + 1);
        }
        _ => unreachable!("only these have a size"),
    }
}

fn remove(fields: &mut Map<String, Value>, at: usize) {
    let name = fields.keys().nth(at).unwrap().clone();
    fields.shift_remove(&name);
}

/// A value that a field of any type may lie with.
fn lie(random: &mut SplitMix64) -> Value {
    match random.below(14) {
        0 => Value::Null,
        1 => json!(random.below(2) == 0),
        2..6 => json!(random.below(300)),
        6 => json!(random.next()),
        7 => json!(random.next().cast_signed()),
        // No number where these bits are none.
        8 => json!(f64::from_bits(random.next())),
        9 => json!("x".repeat(random.below(9))),
        10 => json!({"rope_type": "linear", "factor": random.below(5)}),
        11 => json!({"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 0}),
        12 => json!([1, "full_attention"]),
        _ => json!([]),
    }
}

/// Changes or removes one entry.
fn mutate_entries(entries: &mut Vec<(String, Entry)>, random: &mut SplitMix64) {
    if entries.is_empty() {
        return;
    }
    let at = random.below(entries.len());
    match random.below(8) {
        0 => drop(entries.remove(at)),
        _ => entries[at].1 = entry(random),
    }
}

/// A value that an entry of any type may lie with.
fn entry(random: &mut SplitMix64) -> Entry {
    let number = u32::try_from(random.below(300)).unwrap();
    match random.below(16) {
        0 => Entry::U8(3),
        1..5 => Entry::U32(number),
        5 => Entry::U32(u32::MAX),
        6 => Entry::U64(random.next()),
        7 => Entry::I32(-1),
        8 => Entry::F32(f32::from_bits(number << 22)),
        9 => Entry::F32(f32::NAN),
        10 => Entry::F64(-1.0),
        11 => Entry::Bool(number.is_multiple_of(2)),
        12 => Entry::String("yarn".to_owned()),
        13 => Entry::Array(Array::U32(vec![number; 3])),
        14 => Entry::Array(Array::Bool(vec![true, false])),
        _ => Entry::Array(Array::F32(Vec::new())),
    }
}
