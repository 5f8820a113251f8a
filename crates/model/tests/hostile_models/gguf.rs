//! GGUF files that lie.

use std::collections::BTreeSet;
use std::path::Path;

use paceline_base::testing::long;
use paceline_base::{BlockType, KernelClass, SplitMix64};
use paceline_model::{Config, Error, ModelFamily, ModelSource};
use paceline_weights::gguf::MetadataValue;

use super::{check, refusal};
use crate::common::runner::Runner;
use crate::common::tiny::{NEMOTRON, Tiny, TinyFile, value_of};
use crate::common::{gemma4, kernels, try_load};

/// A model of one layer or two, small enough to be written hundreds of times.
pub(super) fn small(family: ModelFamily) -> Tiny {
    Tiny {
        width: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn: 96,
        vocab: 50,
        layers: match family {
            ModelFamily::Glm4Moe | ModelFamily::DeepSeek => 2, // the first is dense
            ModelFamily::Lfm2 | ModelFamily::Lfm2Moe => 2,     // the second is attention
            ModelFamily::NemotronH => NEMOTRON.len(),
            ModelFamily::Gemma4 => 4, // two use the caches of the others
            // One of four layers with states is attention.
            ModelFamily::Qwen3Next | ModelFamily::Qwen35 | ModelFamily::Qwen35Moe => 4,
            _ => 1,
        },
        window: 8,
        experts: 7,
        family,
        block_type: BlockType::F16,
    }
}

/// Writes the model of `family` with one entry changed, and checks what is said about it. Keys
/// without a prefix are the architecture's.
fn check_entry(
    dir: &Path,
    family: ModelFamily,
    key: &str,
    value: Option<MetadataValue>,
    expected: &str,
) {
    let key = match key.split_once('.') {
        Some(("general" | "tokenizer", _)) => key.to_owned(),
        _ => format!("{}.{key}", family.name()),
    };
    let title = format!("{key} = {value:?}");
    let path = dir.join("lies.gguf");
    let mut file = small(family).file();
    file.set(&key, value);
    file.write(&path);
    check(&path, &title, expected);
}

#[test]
fn integers_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "embedding_length block_count feed_forward_length context_length \
        attention.head_count attention.head_count_kv attention.key_length attention.value_length \
        rope.dimension_count vocab_size";
    for key in keys.split(' ') {
        let check = |value, expected: &str| {
            let expected = format!("{key}{expected}");
            check_entry(dir.path(), ModelFamily::Llama, key, Some(value), &expected);
        };
        check(0u32.into(), " is 0, expected ");
        check((1u64 << 40).into(), " is 1099511627776, expected");
        check(u64::MAX.into(), " is 18446744073709551615, expected");
        check((-64i32).into(), ": expected");
        check("64".into(), ": expected");
        check(64f32.into(), ": expected");
        // Of these a file may have a list, one for each layer.
        let list = match key {
            "feed_forward_length" | "attention.head_count_kv" => " is a list of 2, expected one",
            _ => ": expected",
        };
        check(vec![64i32; 2].into(), list);
    }
}

/// Sizes, settings and keys of every family, each with a value that is impossible, is not that of
/// the weights, or changes the arithmetic.
#[test]
fn entries_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut checked = 0;
    for row in include_str!("gguf.tsv").lines().skip(1) {
        let columns: Vec<&str> = row.split('\t').collect();
        let [family, key, kind, text, expected] = columns[..] else {
            panic!("{row:?}");
        };
        let named = |it: &&ModelFamily| format!("{it:?}") == family;
        let family = *ModelFamily::ALL.iter().find(named).unwrap();
        let value = (kind != "-").then(|| value_of(kind, text));
        check_entry(dir.path(), family, key, value, expected);
        checked += 1;
    }
    assert!(checked > 130, "{checked} rows");
    let long = Some("x".repeat(100_000).into());
    let expected = "xxx...\" is not supported";
    let key = "general.architecture";
    check_entry(dir.path(), ModelFamily::Llama, key, long, expected);
}

/// Whether a model computes without a tensor: the embedding is the head then, and some GLM have
/// neither biases nor norms on heads.
fn may_lack(family: ModelFamily, name: &str) -> bool {
    let of_glm = name.ends_with(".bias") && name.contains(".attn_") || name.contains("attn_q_norm");
    let of_deepseek = name.ends_with("exp_probs_b.bias");
    name == "output.weight"
        || family == ModelFamily::Glm4Moe && of_glm
        || family == ModelFamily::DeepSeek && of_deepseek
        || family == ModelFamily::Gemma4 && gemma4::may_lack(name)
}

fn is_number(part: &str) -> bool {
    part.bytes().all(|byte| byte.is_ascii_digit())
}

/// Every tensor of every family: absent, of other shapes, of a type that is not read. By default
/// one layer of each role, with half of the lies in turn.
#[test]
fn tensors_that_lie_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lies.gguf");
    // The writer has no residual streams.
    let is_written = |it: &ModelFamily| it.has_gguf() && *it != ModelFamily::Gemma3n;
    for family in ModelFamily::ALL.into_iter().filter(is_written) {
        let whole = small(family).file();
        let mut roles = BTreeSet::new();
        for (i, tensor) in whole.tensors.iter().enumerate() {
            let role: String = tensor.name.split('.').filter(|it| !is_number(it)).collect();
            if !roles.insert(role) && !long() {
                continue;
            }
            for (turn, lie) in LIES.into_iter().enumerate() {
                let is_due = long() || turn == 0 || (i + turn) % 2 == 0;
                if !is_due {
                    continue;
                }
                if lie.0 == "absent" && may_lack(family, &tensor.name) {
                    continue;
                }
                let mut file = whole.clone();
                (lie.1)(&mut file, i);
                file.write(&path);
                let title = format!("{family:?} {} {}", tensor.name, lie.0);
                let text = refusal(&path, &title);
                let named = format!("tensor {}", tensor.name);
                assert!(text.contains(&named), "{title}: {text:?}");
            }
        }
    }
}

/// Checks the refusal of a model whose tensor `name` has `bytes`, which are `bad`, at `at`.
fn check_bytes(mut file: TinyFile, name: &str, at: usize, bytes: &[u8], bad: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lies.gguf");
    let tensor = file.tensors.iter_mut().find(|t| t.name == name).unwrap();
    tensor.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    file.write(&path);
    check(&path, name, &format!("tensor {name} holds {bad}"));
}

/// Such biases, sinks and routers would turn every choice of experts, or every score of a head.
#[test]
fn tensors_that_are_not_numbers_are_refused() {
    const ROUTER: &str = "blk.0.ffn_gate_inp.weight";
    for (family, name) in [
        (ModelFamily::DeepSeek, "blk.1.exp_probs_b.bias"),
        (ModelFamily::MiniMaxM2, "blk.0.exp_probs_b.bias"),
        (ModelFamily::Glm4Moe, "blk.1.exp_probs_b.bias"),
        (ModelFamily::GptOss, "blk.0.attn_sinks.weight"),
        (ModelFamily::Qwen35, "blk.0.ssm_a"),
        (ModelFamily::Qwen35, "blk.1.ssm_dt.bias"),
    ] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let file = small(family).file();
            check_bytes(file, name, 4, &bad.to_le_bytes(), &bad.to_string());
        }
    }
    for family in [
        ModelFamily::Mixtral,
        ModelFamily::GptOss,
        ModelFamily::MiniMaxM2,
        ModelFamily::Gemma4,
    ] {
        let file = small(family).file();
        check_bytes(file, ROUTER, 400, &f32::NAN.to_le_bytes(), "NaN");
    }
}

/// A scale that is infinite or NaN, in one block of one expert.
#[test]
fn experts_that_are_not_numbers_are_refused() {
    for (block_type, at) in [
        (BlockType::Q8_0, 0),
        (BlockType::Q4_K, 2),
        (BlockType::Q6_K, 208),
        (BlockType::F16, 6),
        (BlockType::MXFP4_SPLIT, 0),
    ] {
        let tiny = Tiny {
            layers: 2,
            ..Tiny::new(ModelFamily::DeepSeek, block_type)
        };
        for part in ["gate", "up", "down"] {
            let file = tiny.file();
            let name = format!("blk.1.ffn_{part}_exps.weight");
            let tensor = file.tensors.iter().find(|t| t.name == name).unwrap();
            let block = tensor.bytes.len() / block_type.bytes() / 2 * block_type.bytes();
            check_bytes(file, &name, block + at, &[0xff; 2], "NaN");
        }
    }
}

/// Name of the fault, and how tensor `i` is given it.
type Lie = (&'static str, fn(&mut TinyFile, usize));

const LIES: [Lie; 6] = [
    ("absent", |file, i| drop(file.tensors.remove(i))),
    ("a row more", |file, i| {
        let t = &mut file.tensors[i];
        let row = t.bytes.len() / t.shape[0];
        t.shape[0] += 1;
        t.bytes.extend(vec![0; row]);
    }),
    ("a row less", |file, i| {
        let t = &mut file.tensors[i];
        let row = t.bytes.len() / t.shape[0];
        t.shape[0] -= 1;
        t.bytes.truncate(t.bytes.len() - row);
    }),
    ("flat or deep", |file, i| {
        let t = &mut file.tensors[i];
        let n = t.shape.iter().product();
        t.shape = match t.shape.len() {
            1 => vec![n / 2, 2],
            _ => vec![n],
        };
    }),
    ("transposed or single", |file, i| {
        let t = &mut file.tensors[i];
        t.shape.reverse();
        if t.shape[0] == *t.shape.last().unwrap() {
            t.shape.insert(0, 1);
        }
    }),
    ("integers", |file, i| {
        let t = &mut file.tensors[i];
        t.type_id = 24; // I8
        t.bytes.truncate(t.shape.iter().product());
    }),
];

/// An integer matrix among floats whose rows are not whole runs of 32, as a file may have.
#[test]
fn odd_widths_beside_integer_weights_compute() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.gguf");
    let odd = Tiny {
        width: 48,
        heads: 1,
        kv_heads: 1,
        ffn: 80,
        ..small(ModelFamily::Llama)
    };
    for (tiny, name, cols) in [
        (Tiny { ffn: 64, ..odd }, "blk.0.ffn_down.weight", 64),
        (Tiny { heads: 6, ..odd }, "blk.0.attn_output.weight", 96),
    ] {
        let mut file = tiny.file();
        file.put(name, BlockType::Q8_0, &[tiny.width, cols]);
        file.write(&path);
        for class in [KernelClass::Cpu, KernelClass::CpuF32] {
            let model = try_load(&path, class, &kernels()).unwrap();
            let logits = Runner::new(model, 3).all(&[1, 2, 3]).concat();
            assert!(logits.iter().all(|x| x.is_finite()), "{name} {class}");
        }
    }
}

#[test]
fn rope_factors_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lies.gguf");
    let short = "tensor rope_freqs.weight: shape [7], expected [8]";
    for (factors, expected) in [
        (vec![1.0; 7], short),
        (vec![f32::NAN; 8], "rope factor is NaN"),
        (vec![-1.0; 8], "rope factor is -1"),
        (vec![0.0; 8], "rope factor is 0"),
        (vec![1e-40; 8], "rope factor is"),
    ] {
        let mut file = small(ModelFamily::Llama).file();
        file.put_f32("rope_freqs.weight", &factors);
        file.write(&path);
        check(&path, expected, expected);
    }
}

/// Scales that are infinite or NaN give such logits, but no panic.
#[test]
fn weights_of_random_bits_compute() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bits.gguf");
    for block_type in BlockType::GGUF {
        let tiny = Tiny {
            layers: 1,
            ..Tiny::new(ModelFamily::Qwen3, block_type)
        };
        let mut file = tiny.file();
        let mut random = SplitMix64::new(block_type as u64);
        for tensor in &mut file.tensors {
            tensor.bytes.fill_with(|| random.next() as u8);
        }
        file.write(&path);
        let model = try_load(&path, KernelClass::Cpu, &kernels()).unwrap();
        assert_eq!(Runner::new(model, 70).all(&tiny.tokens(70, 1)).len(), 70);
    }
}

/// Reading the configuration alone does not touch the weights.
#[test]
fn a_configuration_reads_without_weights() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bare.gguf");
    for family in ModelFamily::DENSE {
        let mut file = small(family).file();
        file.tensors.truncate(1);
        file.write(&path);
        let config = Config::read(&ModelSource::open(&path).unwrap()).unwrap();
        assert_eq!((config.width, config.vocab), (64, 50));
        assert_eq!(config.family, family);
        let error = try_load(&path, KernelClass::Cpu, &kernels()).unwrap_err();
        assert!(matches!(error, Error::Gguf(_)), "{error}");
    }
}
