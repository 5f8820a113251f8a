//! The reading of configurations: facts in a model's files become these numbers. Covered are the
//! parts that no golden model has, in both layouts.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::sync::Arc;

use crate::common::runner::Runner;
use crate::common::tiny::{Tiny, TinyTensor};
use crate::common::{golden, golden_json, kernels, load};
use paceline_base::{BlockType, KernelClass};
use paceline_model::{BatchSize, Config, LoadedModel, ModelFamily, ModelSource, Selection};
use paceline_tensor::{Choice, KvType, RopePairs};
use paceline_weights::gguf::MetadataValue as Entry;
use serde_json::{Value, json};

/// The configuration of a GGUF file of `family` with these entries changed.
fn gguf(family: ModelFamily, entries: &[(&str, Entry)]) -> Config {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut file = Tiny::new(family, BlockType::F16).file();
    file.tensors.truncate(1);
    for (key, value) in entries {
        file.set(&format!("{}.{key}", family.name()), Some(value.clone()));
    }
    file.write(&path);
    Config::read(&ModelSource::open(&path).unwrap()).unwrap()
}

/// As [`gguf`], with one entry changed.
fn gguf_with(family: ModelFamily, key: &str, value: impl Into<Entry>) -> Config {
    gguf(family, &[(key, value.into())])
}

/// The configuration of a golden Hugging Face folder with these fields changed; null takes away.
fn hf(name: &str, changes: &Value) -> Config {
    let dir = folder(name, changes);
    Config::read(&ModelSource::open(dir.path()).unwrap()).unwrap()
}

fn folder(name: &str, changes: &Value) -> tempfile::TempDir {
    let (dir, from) = (tempfile::tempdir().unwrap(), golden(&format!("hf/{name}")));
    let weights = "model.safetensors";
    std::fs::copy(from.join(weights), dir.path().join(weights)).unwrap();
    let text = std::fs::read(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

/// Radians per position of the second pair, which tells base and size, times that of the first,
/// which tells the scaling.
fn turns(config: &Config, rope: usize) -> (f64, f64) {
    let frequencies = &config.ropes[rope].frequencies;
    (frequencies[0], frequencies[1])
}

/// `base^(-2 / rotated)`
fn second(base: f64, rotated: f64) -> f64 {
    base.powf(-2.0 / rotated)
}

fn assert_turns(got: (f64, f64), first: f64, second: f64) {
    let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
    assert!(
        close(got.0, first) && close(got.1, second),
        "{got:?}, expected {first} {second}"
    );
}

#[test]
fn ropes_of_gguf_files() {
    let llama = gguf(ModelFamily::Llama, &[]);
    assert_eq!(llama.ropes[0].pairs, RopePairs::Adjacent);
    assert_turns(turns(&llama, 0), 1.0, second(1e4, 32.0));

    // A part of the head turns, in two halves of that part.
    let partial = gguf_with(ModelFamily::Qwen3, "rope.dimension_count", 16u32);
    assert_eq!(partial.ropes[0].pairs, RopePairs::Halves);
    assert_eq!(partial.ropes[0].frequencies.len(), 8);
    assert_turns(turns(&partial, 0), 1.0, second(1e4, 16.0));

    // Gemma's scaling leaves windowed layers alone; a factor without a type is linear.
    let factor = ("rope.scaling.factor", Entry::from(8f32));
    let base = ("rope.freq_base", Entry::from(1e6f32));
    for kind in [None, Some("linear"), Some("none")] {
        let mut entries = vec![factor.clone(), base.clone()];
        entries.extend(kind.map(|kind| ("rope.scaling.type", Entry::from(kind))));
        let gemma = gguf(ModelFamily::Gemma3, &entries);
        let scale = if kind == Some("none") { 1.0 } else { 1.0 / 8.0 };
        assert_turns(turns(&gemma, 0), scale, scale * second(1e6, 128.0));
        assert_turns(turns(&gemma, 1), 1.0, second(1e4, 128.0));
    }
    let local = gguf_with(ModelFamily::Gemma3, "rope.freq_base_swa", 5e4f32);
    assert_turns(turns(&local, 1), 1.0, second(5e4, 128.0));
}

#[test]
fn ropes_of_hugging_face_folders() {
    let linear = json!({"type": "linear", "factor": 4});
    let old = hf(
        "qwen2-f16",
        &json!({"rope_theta": null, "rope_scaling": linear}),
    );
    assert_turns(turns(&old, 0), 0.25, 0.25 * second(1e4, 16.0));

    // One object for all layers, as new files of other families have it.
    let flat = json!({"rope_type": "default", "rope_theta": 500.0});
    let new = hf("qwen2-f16", &json!({"rope_parameters": flat}));
    assert_turns(turns(&new, 0), 1.0, second(500.0, 16.0));

    // Gemma's defaults are a million and ten thousand.
    let gemma = hf(
        "gemma3-bf16",
        &json!({"rope_theta": null, "rope_local_base_freq": null}),
    );
    assert_turns(turns(&gemma, 0), 1.0, second(1e6, 32.0));
    assert_turns(turns(&gemma, 1), 1.0, second(1e4, 32.0));
}

/// Old, newer and newest names of the fields; contexts of 0.5, 1 and 3 times the original one.
#[test]
fn scaled_ropes_are_those_of_transformers() {
    for case in golden_json("ropes.json")["cases"].as_array().unwrap() {
        let context = case["context"].as_u64().unwrap() as usize;
        let config = hf("llama-tied", &case["fields"]);
        let rope = config.ropes[0].for_context(context);
        let expected = case["frequencies"].as_array().unwrap();
        let title = format!("{}, context {context}", case["name"]);
        assert_eq!(rope.frequencies.len(), expected.len(), "{title}");
        let magnitude = case["magnitude"].as_f64().unwrap();
        let of_pairs = rope.frequencies.iter().zip(expected);
        let pairs = of_pairs.map(|(got, expected)| (*got, expected.as_f64().unwrap()));
        for (got, expected) in pairs.chain([(rope.magnitude, magnitude)]) {
            // Theirs are single precision.
            assert!(
                (got / expected - 1.0).abs() < 1e-6,
                "{title}: {got}, not {expected}"
            );
        }
    }
}

/// Qwen's advice leaves the stated context as it is; the factor extends it.
#[test]
fn scaling_extends_the_context() {
    let context = |fields: Value| hf("qwen2-f16", &fields).context;
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    for stated in [32768, 40960, 131_072] {
        let fields = json!({"rope_scaling": yarn, "max_position_embeddings": stated});
        assert_eq!(context(fields), 131_072);
    }
    let dynamic = json!({"type": "dynamic", "factor": 2.0});
    let fields = json!({"rope_scaling": dynamic, "max_position_embeddings": 4096});
    assert_eq!(context(fields), 8192);
    let yarn = [
        ("rope.scaling.type", Entry::from("yarn")),
        ("rope.scaling.factor", 4f32.into()),
        ("rope.scaling.original_context_length", 100_000u32.into()),
    ];
    let llama = gguf(ModelFamily::Llama, &yarn);
    assert_eq!(llama.context, 400_000);
    assert_eq!(llama.ropes[0].pairs, RopePairs::Adjacent);
    assert_turns(turns(&llama, 0), 1.0, second(1e4, 32.0));
    assert!((llama.ropes[0].magnitude - 1.138_629_436_111_989).abs() < 1e-12);
}

/// The text part of a multimodal folder, and fields under the names of transformers 5.
#[test]
fn folders_of_this_year_read() {
    let renamed = json!({"num_experts": null, "num_local_experts": 6});
    let moe = hf("qwen3moe-bf16", &renamed);
    assert_eq!(moe.layers[1].experts.unwrap().count, 6);

    // As the published Gemma 3 4B: only what is not its class's default.
    let dir = folder("gemma3-bf16", &json!({}));
    let text = json!({
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}
    });
    let config = json!({"model_type": "gemma3", "text_config": text});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let gemma = Config::read(&ModelSource::open(dir.path()).unwrap()).unwrap();
    let heads = (gemma.heads, gemma.kv_heads, gemma.head_dim);
    assert_eq!((gemma.width, heads), (2560, (8, 4, 256)));
    assert_eq!((gemma.vocab, gemma.context), (262_208, 131_072));
    assert_eq!(gemma.tied, Some(true));
    assert_turns(turns(&gemma, 0), 0.125, 0.125 * second(1e6, 256.0));
    assert_turns(turns(&gemma, 1), 1.0, second(1e4, 256.0));
    assert_eq!(windows(&gemma)[4..6], [Some(1024), None]);
}

/// The table of families names what the golden tests read.
#[test]
fn families_are_checked_by_folders_of_their_own() {
    for family in ModelFamily::ALL {
        let folders = family.checked_by();
        assert!(!folders.is_empty(), "{family:?}");
        for name in folders {
            let source = ModelSource::open(&golden(&format!("hf/{name}"))).unwrap();
            assert_eq!(Config::read(&source).unwrap().family, family, "{name}");
        }
    }
}

/// The refusal of an architecture lists each known name once.
#[test]
fn an_unknown_architecture_gets_all_names() {
    let dir = folder("llama-tied", &json!({"model_type": "mamba"}));
    let error = Config::read(&ModelSource::open(dir.path()).unwrap()).unwrap_err();
    let error = error.to_string();
    let (_, names) = error.split_once("expected one of ").unwrap();
    let names: Vec<&str> = names.split(", ").collect();
    for name in [
        "llama",
        "deepseek_v2",
        "kimi_k2",
        "glm4_moe_lite",
        "gemma4_text",
        "mistral4",
    ] {
        let n = names.iter().filter(|other| **other == name).count();
        assert_eq!(n, 1, "{name} in {error}");
    }
}

fn windows(config: &Config) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.window).collect()
}

#[test]
fn windows_of_layers() {
    let (full, near) = (None, Some(70));
    let gemma = gguf(ModelFamily::Gemma3, &[]);
    assert_eq!(windows(&gemma), [near, near, near, near, near, full]);
    let gemma = gguf_with(
        ModelFamily::Gemma3,
        "attention.sliding_window_pattern",
        2u32,
    );
    assert_eq!(windows(&gemma), [near, full, near, full, near, full]);
    assert_eq!(
        gemma.layers.iter().map(|l| l.rope).collect::<Vec<_>>(),
        [1, 0, 1, 0, 1, 0]
    );

    // Rows that see later ones too: half to each side, and their own.
    let gemma = gguf_with(ModelFamily::Gemma3, "attention.causal", false);
    assert!(gemma.bidirectional);
    assert_eq!(windows(&gemma)[0], Some(36));

    let qwen = hf("qwen2-f16", &json!({"use_sliding_window": true}));
    assert_eq!(windows(&qwen), [full, Some(8), Some(8)]);
    // With experts, all layers of Qwen 3, and every second one of Qwen 2 up to a bound.
    let fields = json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2});
    assert_eq!(windows(&hf("qwen3moe-bf16", &fields)), [Some(8); 3]);
    assert_eq!(
        windows(&hf("qwen2moe-bf16", &fields)),
        [Some(8), full, full]
    );
    let types = json!(["sliding_attention", "full_attention", "full_attention"]);
    let qwen = hf(
        "qwen2-f16",
        &json!({"use_sliding_window": true, "layer_types": types}),
    );
    assert_eq!(windows(&qwen), [Some(8), full, full]);
}

#[test]
fn scales_of_gemma() {
    let root = |x: f32| 1.0 / x.sqrt();
    let plain = gguf(ModelFamily::Gemma3, &[]);
    assert_eq!(
        (plain.layers[0].query_scale, plain.embedding_scale),
        (root(128.0), 16.0)
    );
    let scalar = gguf_with(ModelFamily::Gemma3, "attention.query_scalar", 24f32);
    assert_eq!(scalar.layers[0].query_scale, root(24.0));
    // The 27B model: 62 layers, scores by the width per head.
    let large = gguf_with(ModelFamily::Gemma3, "block_count", 62u32);
    assert_eq!(large.layers[0].query_scale, root(256.0 / 4.0));
}

/// Keys that only some programs read change nothing where they ask for what is computed.
#[test]
fn keys_that_say_what_is_computed_pass() {
    for family in [
        ModelFamily::Llama,
        ModelFamily::Gemma3,
        ModelFamily::Qwen3Moe,
    ] {
        let plain = gguf(family, &[]);
        let numbers = [
            ("attention.scale", plain.layers[0].query_scale),
            ("embedding_scale", plain.embedding_scale),
            ("logit_scale", 1.0),
            ("residual_scale", 0.0),
            ("final_logit_softcapping", 0.0),
            ("attention.clamp_kqv", 0.0),
            ("rope.scale_linear", 1.0),
            ("rope.scaling.attn_factor", 1.0),
        ];
        let mut entries = vec![("attention.causal", Entry::from(true))];
        entries.extend(numbers.map(|(key, value)| (key, value.into())));
        entries.extend([
            ("expert_gating_func", Entry::from(1u32)),
            ("expert_weights_norm", true.into()),
        ]);
        assert_eq!(gguf(family, &entries), plain, "{family:?}");
    }
    let plain = gguf(ModelFamily::Llama, &[]);
    let window = gguf_with(
        ModelFamily::Llama,
        "attention.sliding_window",
        plain.context as u32,
    );
    assert_eq!(window, plain);

    let plain = hf("llama-tied", &json!({}));
    let same = json!({
        "is_causal": true, "use_bidirectional_attention": null, "use_qk_norm": false,
        "logit_scale": 1, "logits_scaling": 1.0, "residual_multiplier": 1, "clip_qkv": null,
        "attention_multiplier": plain.layers[0].query_scale, "final_logit_softcapping": null,
        "scale_attn_by_inverse_layer_idx": false, "attn_output_gate": false,
    });
    assert_eq!(hf("llama-tied", &same), plain);
}

/// Most layers see 512 positions, and keep little more than those.
#[test]
fn windows_keep_a_third_of_the_cache_at_32768_positions() {
    let entries = ["block_count", "attention.sliding_window"].into_iter();
    let entries: Vec<_> = entries.zip([18u32, 512].map(Entry::from)).collect();
    let gemma = gguf(ModelFamily::Gemma3, &entries);
    let mut full = gemma.clone();
    full.layers.iter_mut().for_each(|layer| layer.window = None);
    let bytes = |config: &Config| {
        let size = BatchSize::single(512, 32_768);
        config.cache_bytes(KvType::F16, size, 32_768).0 as f64
    };
    let share = bytes(&gemma) / bytes(&full);
    assert!((0.29..0.31).contains(&share), "{share}");
}

/// A folder that says its head is tied uses the embedding even when the file holds another head.
#[test]
fn the_word_of_the_folder_decides_whether_the_head_is_tied() {
    let tokens = [5, 6, 7];
    let logits = |tied: bool| {
        let dir = folder("llama-untied-bf16", &json!({"tie_word_embeddings": tied}));
        let model = load(dir.path(), KernelClass::CpuF32, &kernels());
        let parameters = model.parameters();
        (parameters, Runner::new(model, tokens.len()).all(&tokens))
    };
    let ((own_size, own), (tied_size, tied)) = (logits(false), logits(true));
    assert_eq!(own_size - tied_size, 300 * 64);
    assert_ne!(own, tied);
}

/// Early files of Mixtral have a tensor for each expert, some have gate and up behind each other.
#[test]
fn experts_in_other_tensors_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let whole = Tiny::new(ModelFamily::Mixtral, BlockType::Q4_0).file();
    let mut apart = whole.clone();
    let mut joined = whole.clone();
    let stacks = ["gate", "up", "down"].map(|part| format!(".ffn_{part}_exps."));
    apart
        .tensors
        .retain(|t| !stacks.iter().any(|s| t.name.contains(s)));
    joined
        .tensors
        .retain(|t| !stacks[..2].iter().any(|s| t.name.contains(s)));
    for stack in &whole.tensors {
        if let Some(at) = stack.name.find("_exps.") {
            let (stem, of) = (&stack.name[..at], stack.shape[0]);
            let each = stack.bytes.chunks_exact(stack.bytes.len() / of).enumerate();
            apart.tensors.extend(each.map(|(e, bytes)| TinyTensor {
                name: format!("{stem}.{e}.weight"),
                shape: stack.shape[1..].to_vec(),
                bytes: bytes.to_vec(),
                ..stack.clone()
            }));
        }
        if stack.name.contains(&stacks[0]) {
            let up = stack.name.replace("_gate_", "_up_");
            let up = whole.tensors.iter().find(|t| t.name == up).unwrap();
            let half = stack.bytes.len() / stack.shape[0];
            let pairs = stack
                .bytes
                .chunks_exact(half)
                .zip(up.bytes.chunks_exact(half));
            joined.tensors.push(TinyTensor {
                name: stack.name.replace("_gate_", "_gate_up_"),
                shape: vec![stack.shape[0], 2 * stack.shape[1], stack.shape[2]],
                bytes: pairs.flat_map(|(gate, up)| [gate, up].concat()).collect(),
                ..stack.clone()
            });
        }
    }
    let logits = [whole, apart, joined].map(|file| {
        file.write(&path);
        let model = load(&path, KernelClass::Cpu, &kernels());
        Runner::new(model, 5).all(&[1, 2, 3, 4, 5])
    });
    assert!(logits[0] == logits[1], "a tensor for each expert");
    assert!(logits[0] == logits[2], "gate and up in one");
}

/// `rope_freqs` divides the frequencies, so equal factors do what linear scaling does.
#[test]
fn rope_factors_divide() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = Tiny::new(ModelFamily::Llama, BlockType::F16);
    let tokens = tiny.tokens(20, 1);
    let logits = |name: &str, linear: Option<f32>, factors: Option<f32>| {
        let path = dir.path().join(name);
        let mut file = tiny.file();
        file.set("llama.rope.scaling.factor", linear.map(Entry::from));
        if let Some(factor) = factors {
            file.put_f32("rope_freqs.weight", &[factor; 16]);
        }
        file.write(&path);
        let model = load(&path, KernelClass::CpuF32, &kernels());
        Runner::new(model, tokens.len()).all(&tokens)
    };
    let scaled = logits("linear", Some(4.0), None);
    assert_eq!(logits("factors", None, Some(4.0)), scaled);
    let plain = logits("plain", None, None);
    assert_ne!(plain, scaled);

    // LongRoPE's factors are those of the context served.
    for (original, expected) in [(20u32, &plain), (19, &scaled)] {
        let path = dir.path().join("long");
        let mut file = tiny.file();
        let key = "llama.rope.scaling.original_context_length";
        file.set(key, Some(original.into()));
        file.put_f32("rope_factors_short.weight", &[1.0; 16]);
        file.put_f32("rope_factors_long.weight", &[4.0; 16]);
        file.write(&path);
        let model = load(&path, KernelClass::CpuF32, &kernels());
        let got = Runner::new(model, tokens.len()).all(&tokens);
        assert_eq!(&got, expected, "original context {original}");
    }
}

/// The sizes of latent attention, in both layouts; of a query's parts and of what is kept.
#[test]
fn latent_attention_and_groups() {
    let v3 = hf("deepseek-v3-bf16", &json!({}));
    let latent = v3.latent.unwrap();
    assert_eq!((latent.rank, latent.turned, latent.plain), (32, 16, 32));
    assert_eq!(
        (v3.kv_heads, v3.head_dim, v3.layers[0].value_dim),
        (1, 48, 32)
    );
    let mixtures = v3.layers.iter().filter(|layer| layer.experts.is_some());
    assert_eq!(mixtures.count(), 2);
    let groups = v3.layers[1].experts.unwrap().groups.unwrap();
    assert_eq!((groups.count, groups.used, groups.largest), (4, 2, 2));
    // 1 + 0.1 ln 40 squared, over the root of 48.
    let scale = f64::from(v3.layers[0].query_scale);
    let expected = (1.0 + 0.1 * 40f64.ln()).powi(2) / 48f64.sqrt();
    assert!(
        (scale - expected).abs() < 1e-7,
        "{scale}, expected {expected}"
    );

    let old = hf("deepseek-v2", &json!({"topk_method": "greedy"}));
    assert_eq!(old.layers[1].experts.unwrap().groups, None);
    assert_eq!(old.latent.unwrap().query_rank, None);
    let fields = json!({"model_type": "kimi_k2", "n_group": 1});
    let kimi = hf("deepseek-v3-bf16", &fields);
    assert_eq!(kimi.family, ModelFamily::DeepSeek);
    assert_eq!(kimi.layers[1].experts.unwrap().groups, None);
    let latent = hf("mistral4-bf16", &json!({})).latent.unwrap();
    let growth = latent.growth.unwrap();
    assert_eq!((growth.rate, growth.length), (0.1, 16.0));

    let file = gguf_with(ModelFamily::DeepSeek, "attention.temperature_scale", 0.5f32);
    let latent = file.latent.unwrap();
    assert_eq!(
        (latent.plain, latent.turned, latent.value_dim),
        (64, 16, 16)
    );
    assert_eq!(latent.growth.unwrap().length, 512.0);
    // Keys alone, in f16: 80 numbers a position and layer.
    let size = BatchSize::single(1, 64);
    assert_eq!(file.cache_bytes(KvType::F16, size, 64).0, 3 * 64 * 80 * 2);
}

/// Which layers have an indexer of their own, in all forms of folders.
#[test]
fn layers_with_indexers() {
    let own = |changes: &Value| {
        let layers = hf("glm-dsa-sparse-bf16", changes).layers.into_iter();
        let selections = layers.map(|layer| layer.latent.unwrap().selection);
        let own = selections.map(|of| matches!(of, Selection::Own(_)));
        own.collect::<Vec<_>>()
    };
    assert_eq!(own(&json!({})), [true, false, true]);
    let pattern = |text| json!({"indexer_types": null, "index_topk_pattern": text});
    assert_eq!(own(&pattern("FFS")), [true, true, false]);
    let period = |every, offset| json!({"indexer_types": null, "index_topk_freq": every, "index_skip_topk_offset": offset});
    assert_eq!(own(&period(4, 2)), [true, true, false]);
    assert_eq!(own(&json!({"indexer_types": null})), [true; 3]);
    let config = hf("glm-dsa-sparse-bf16", &json!({}));
    assert!(
        config.can_cut(2) && !config.can_cut(1),
        "a selection is used in the next layer"
    );
}

/// A file without the weights of its model's indexer.
#[test]
fn an_absent_indexer_bounds_the_context() {
    let config = hf("deepseek-v32-bf16", &json!({}));
    assert_eq!((config.context, config.indexed), (256, None));
    let whole = golden("hf/deepseek-v32-bf16");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bare");
    std::fs::create_dir(&path).unwrap();
    std::fs::copy(whole.join("config.json"), path.join("config.json")).unwrap();
    let weights = std::fs::read(whole.join("model.safetensors")).unwrap();
    // Another name of equal length hides a tensor.
    let [from, to] = [b"0.self_attn.indexer.wk", b"0.self_attn.indexer.no"];
    let mut places = weights.windows(from.len());
    let at = places.position(|part| part == from).unwrap();
    let bare = [&weights[..at], to, &weights[at + to.len()..]].concat();
    std::fs::write(path.join("model.safetensors"), bare).unwrap();
    let model = Arc::new(load(&path, KernelClass::Cpu, &kernels()));
    let config = model.config();
    assert_eq!((config.context, config.indexed), (64, Some(64)));
    let error = model.reserve(BatchSize::single(1, 65), 128).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("context is 65, expected at most 64: beyond, the model's indexer"),
        "{text}"
    );
}

/// The indexer of blocks, by the names of published folders and by those of transformers.
#[test]
fn an_indexer_of_blocks_has_two_names() {
    let stated = golden_json("hf/minimax-m3-bf16/config.json")["text_config"].clone();
    let config = |changes: Value| {
        let mut text = stated.clone();
        for (field, value) in changes.as_object().unwrap() {
            text[field] = value.clone();
        }
        hf("minimax-m3-bf16", &json!({"text_config": text}))
    };
    let choices = |config: &Config| -> Vec<_> {
        let choices = config.layers.iter().map(|layer| layer.pooled);
        choices.map(|own| own.map(|own| own.choice)).collect()
    };
    let (pool, local) = (16, 1);
    let choice = |top_k| Some(Choice { top_k, pool, local });
    let own = config(json!({"index_topk_blocks": 3}));
    assert_eq!(choices(&own), [None, choice(48), choice(48)]);
    let published = config(json!({
        "layer_types": null, "mlp_layer_types": null, "moe_layer_freq": [0, 1, 1],
        "index_topk_blocks": null, "index_block_size": null, "hidden_act": "swigluoai",
        "index_local_blocks": null, "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1], "sparse_topk_blocks": 2, "sparse_block_size": 16,
            "sparse_local_block": 1
        }
    }));
    assert_eq!(choices(&published), [None, choice(32), choice(32)]);
    let has_experts = |layer: usize| published.layers[layer].experts.is_some();
    assert_eq!([0, 1, 2].map(has_experts), [false, true, true]);
}

/// Rows that chose each expert, of layers that have some; a shared expert is not among them.
#[test]
fn uses_of_experts_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for (family, layers, experts) in [
        (ModelFamily::DeepSeek, 1..3, 8),
        (ModelFamily::Qwen2Moe, 0..2, 7),
        (ModelFamily::Llama, 0..0, 0),
    ] {
        let tiny = Tiny::new(family, BlockType::Q8_0);
        tiny.write(&path);
        let model: Arc<dyn LoadedModel> = Arc::new(load(&path, KernelClass::Cpu, &kernels()));
        let mut runner = Runner::of(Arc::clone(&model), 70);
        runner.all(&tiny.tokens(70, 1));
        let uses = model.expert_uses();
        assert_eq!(
            uses.iter().map(|uses| uses.layer).collect::<Vec<_>>(),
            Vec::from_iter(layers)
        );
        for uses in uses {
            let rows = uses.rows;
            let sizes = (rows.len(), rows.iter().sum::<u64>());
            assert_eq!(sizes, (experts, 70 * 3), "{family:?}");
            let is_within = rows.iter().all(|rows| *rows <= 70);
            assert!(is_within, "{family:?} {rows:?}");
        }
    }
}
