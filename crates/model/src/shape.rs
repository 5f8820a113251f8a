//! A model's sizes for the planner. [`of`] converts a configuration that a backend computes.
//! [`from_files`] reads a GGUF header or a `config.json` without weights. It accepts more models
//! than the backends compute, since a plan only needs sizes.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use paceline_plan::{AttentionKind, Bits, Caches, Indexer, ModelShape, Moe, Sliding};
use paceline_weights::gguf::{self, Gguf};
use paceline_weights::hf::{self, HfFolder};
use serde_json::Value;

use crate::families::class_default;
use crate::{Config, LayerCache, LayerShape, ModelSource, Role, Selection};
use fields::{LayerCacheKind, ShapeFields};

mod fields;
mod packed;

/// Maximum size of a `config.json`; those of the largest families have some 100 KB.
const CONFIG_BYTES_MAX: u64 = 8 << 20;

/// Paths of DBRX's `config.json` for the fields that other families have under these names.
const DBRX: [(&str, &str); 8] = [
    ("hidden_size", "/d_model"),
    ("num_attention_heads", "/n_heads"),
    ("num_hidden_layers", "/n_layers"),
    ("num_key_value_heads", "/attn_config/kv_n_heads"),
    ("intermediate_size", "/ffn_config/ffn_hidden_size"),
    ("moe_intermediate_size", "/ffn_config/ffn_hidden_size"),
    ("num_experts", "/ffn_config/moe_num_experts"),
    ("num_experts_per_tok", "/ffn_config/moe_top_k"),
];

/// The same of Kimi Linear.
const KIMI: [(&str, &str); 8] = [
    ("linear_key_head_dim", "/linear_attn_config/head_dim"),
    ("linear_num_key_heads", "/linear_attn_config/num_heads"),
    ("linear_num_value_heads", "/linear_attn_config/num_heads"),
    ("linear_value_head_dim", "/linear_attn_config/head_dim"),
    ("max_position_embeddings", "/model_max_length"),
    ("n_shared_experts", "/num_shared_experts"),
    ("num_experts_per_tok", "/num_experts_per_token"),
    ("n_routed_experts", "/num_experts"),
];

/// The same of Nemotron-H, for the fields of a gated delta net and of experts.
const NEMOTRON: [(&str, &str); 4] = [
    ("linear_key_head_dim", "/ssm_state_size"),
    ("linear_num_key_heads", "/n_groups"),
    ("linear_num_value_heads", "/mamba_num_heads"),
    ("linear_value_head_dim", "/mamba_head_dim"),
];

/// Why a model's shape cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A size that a plan needs is missing.
    #[error("the model's files do not say {gguf} ({hf} in config.json)")]
    Field {
        /// Key in GGUF files.
        gguf: String,
        /// Key in `config.json`.
        hf: String,
    },
    /// Not a readable GGUF file.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// Not a readable model folder.
    #[error(transparent)]
    Hf(#[from] hf::Error),
    #[error("{} is no JSON", path.display())]
    Json {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Plan(#[from] paceline_plan::Error),
}

/// Reads the shape of the model at `path`. A folder is read in the Hugging Face layout, a `.json`
/// file as its configuration alone, anything else as GGUF. `bits` replaces the bits that the file
/// stores.
///
/// # Errors
/// Names the field or the file.
pub fn from_files(path: &Path, bits: Option<f64>) -> Result<ModelShape, Error> {
    let mut shape = if path.is_dir() {
        from_folder(path)?
    } else if path.extension().is_some_and(|ext| ext == "json") {
        from_config(&name_of(path), &json_at(path)?)?
    } else {
        from_gguf(&name_of(path), &Gguf::open(path)?)?
    };
    if let Some(bits) = bits {
        shape.bits = Bits::uniform(bits);
    }
    shape.check()?;
    Ok(shape)
}

/// Reads a JSON file of bounded size.
fn json_at(path: &Path) -> Result<Value, Error> {
    let read = || {
        let mut text = String::new();
        let file = File::open(path)?;
        file.take(CONFIG_BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|source| Error::Json {
        path: path.to_owned(),
        source,
    })
}

fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// The planner's shape of a computable model; `source` has the bytes.
pub fn of(source: &ModelSource, config: &Config) -> ModelShape {
    let mut shape = ModelShape {
        name: "local".to_owned(),
        layers: number(config.layers.len()),
        width: number(config.width),
        vocab: number(config.vocab),
        tied: config
            .tied
            .unwrap_or_else(|| matches!(source.opt_weight(config.family, Role::Output), Ok(None))),
        attention: attention_of(config),
        sliding: windows_of(config),
        indexer: indexer_of(config),
        caches: caches_of(config),
        ffn: ffn_of(config),
        moe: moe_of(config),
        bits: Bits::uniform(8.0),
    };
    let more = match source {
        ModelSource::Gguf(file) => packed::beyond_file(file),
        ModelSource::Hf(folder) => packed::beyond_folder(folder),
    };
    let bits = (source.file_bytes().0 as f64 + more) * 8.0 / shape.params();
    shape.bits = match source {
        ModelSource::Gguf(file) if shape.moe.is_some() => stored_bits(file),
        _ => Bits::uniform(bits),
    };
    for bits in [&mut shape.bits.rest, &mut shape.bits.experts] {
        *bits = bits.clamp(1.0, 32.0);
    }
    shape
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn attention_of(config: &Config) -> AttentionKind {
    match config.latent {
        None => AttentionKind::Gqa {
            heads: number(config.heads),
            kv_heads: number(config.kv_heads),
            head_dim: number(config.head_dim),
        },
        Some(latent) => AttentionKind::Mla {
            heads: number(config.heads),
            q_rank: number(latent.query_rank.unwrap_or(0)),
            kv_rank: number(latent.rank),
            nope_dim: number(latent.plain),
            rope_dim: number(latent.turned),
            value_dim: number(latent.value_dim),
        },
    }
}

/// Mixture of experts: leading dense layers, then experts in every layer or in every n-th.
fn moe_of(config: &Config) -> Option<Moe> {
    let has_experts = |index: &usize| config.layers[*index].experts.is_some();
    let mut mixtures = (0..config.layers.len()).filter(has_experts);
    let first = mixtures.next()?;
    let of = config.layers[first].experts?;
    let every = mixtures.next().map_or(1, |second| second - first);
    // If every n-th layer has experts, the n - 1 dense layers before the first are part of the
    // pattern. More leading layers are dense.
    let is_pattern = every > 1 && first + 1 == every;
    let dense = if is_pattern { 0 } else { first };
    Some(Moe {
        experts: number(of.count),
        active: number(of.used),
        shared: number(of.shared.div_ceil(of.width.max(1))),
        ffn: as_gated(config, of.width),
        dense_layers: number(dense),
        every: number(every),
        groups: number(of.groups.map_or(1, |groups| groups.count)),
    })
}

/// Width of the mean dense feed-forward; some layers of Nemotron-H have none.
fn ffn_of(config: &Config) -> u32 {
    let dense = config.layers.iter().filter(|layer| layer.experts.is_none());
    match dense.clone().count() {
        0 => number(config.ffn),
        n => as_gated(config, dense.map(|layer| layer.ffn).sum::<usize>() / n),
    }
}

/// The width at which a feed-forward with a gate has as many weights.
fn as_gated(config: &Config, width: usize) -> u32 {
    match config.family.has_gates() {
        true => number(width),
        false => number(2 * width / 3),
    }
}

/// Layers without keys and values of their own.
fn caches_of(config: &Config) -> Caches {
    let layers = &config.layers;
    let is_borrower = |shape: &&LayerShape| matches!(shape.cache, LayerCache::Of(_));
    let states = layers.iter().filter_map(LayerShape::state_bytes);
    let params = layers.iter().find_map(|layer| delta_params(config, layer));
    let last_cut = (0..layers.len()).rev().find(|at| config.can_cut(*at));
    Caches {
        borrowed: number(layers.iter().filter(is_borrower).count()),
        states: number(states.clone().count()),
        state_bytes: states.max().unwrap_or(0) as f64,
        state_params: params.unwrap_or(0.0),
        together: number(layers.len() - last_cut.unwrap_or(0)),
        kept: 0.0,
    }
}

/// Weights of a short convolution, of a gated delta net or of Mamba 2. Of the last two: queries,
/// keys, values, gates and output, and two numbers per head.
fn delta_params(config: &Config, layer: &LayerShape) -> Option<f64> {
    let rows = match layer.cache {
        LayerCache::Delta(_) => {
            let heads = layer.heads * (3 * layer.value_dim + 2);
            heads + 2 * layer.kv_heads * layer.head_dim
        }
        LayerCache::Conv(_) => 4 * layer.heads * layer.head_dim,
        _ => return None,
    };
    Some(config.width as f64 * rows as f64)
}

/// The lightning indexer, and the layers with one of their own.
fn indexer_of(config: &Config) -> Option<Indexer> {
    let own = |layer: &LayerShape| match layer.latent?.selection {
        Selection::Own(indexer) => Some(indexer),
        Selection::All | Selection::Before => None,
    };
    let own = config.layers.iter().filter_map(own);
    let first = own.clone().next()?;
    Some(Indexer {
        layers: number(own.count()),
        top_k: number(first.top_k),
        heads: number(first.heads),
        dim: number(first.dim),
    })
}

/// Layers with a sliding window. If windows differ, which no model has yet, the widest counts.
fn windows_of(config: &Config) -> Option<Sliding> {
    let windows = config.layers.iter().filter_map(|layer| layer.window);
    Some(Sliding {
        layers: number(windows.clone().count()),
        window: number(windows.max()?),
    })
}

fn from_gguf(name: &str, file: &Gguf) -> Result<ModelShape, Error> {
    let meta = file.metadata();
    let arch = meta.str("general.architecture")?.to_owned();
    // Some files have a list with one value per layer; the largest counts for every layer.
    let number = |gguf: &str, _: &str| {
        let key = format!("{arch}.{gguf}");
        match meta.get(&key)? {
            paceline_weights::gguf::MetadataValue::Array(list) => list.to_u64s()?.into_iter().max(),
            value => value.as_u64(),
        }
    };
    // Layers of LFM2 without KV heads are short convolutions.
    let convs = arch.starts_with("lfm2").then(|| {
        let heads = meta.u64s(&format!("{arch}.attention.head_count_kv")).ok()?;
        let kind = |heads: &u64| match heads {
            0 => LayerCacheKind::State,
            _ => LayerCacheKind::All,
        };
        Some(heads.iter().map(kind).collect())
    });
    let windows = meta.opt_bools(&format!("{arch}.attention.sliding_window_pattern"));
    let keeps = |is_windowed: &bool| match is_windowed {
        true => LayerCacheKind::Window,
        false => LayerCacheKind::All,
    };
    // A scalar is a period, which `sliding` reads.
    let windows = windows.ok().flatten();
    let windows = windows.map(|list| list.iter().map(keeps).collect());
    let fields = ShapeFields {
        number: &number,
        family: &arch,
        kinds: windows.or_else(|| convs.flatten()),
    };
    let vocab = file.info("token_embd.weight");
    let vocab = vocab.and_then(|info| info.shape().first().copied());
    let vocab = vocab.and_then(|rows| u32::try_from(rows).ok()).unwrap_or(0);
    let mut shape = fields.shape(name, vocab, !file.has("output.weight"))?;
    shape.bits = stored_bits(file);
    Ok(shape)
}

/// Bits per weight in memory of routed experts and of the rest, from the tensor table.
fn stored_bits(file: &Gguf) -> Bits {
    let mut experts = (0.0, 0.0);
    let mut rest = (0.0, 0.0);
    for info in file.tensors() {
        let Some(bytes) = packed::of_tensor(file, info) else {
            continue;
        };
        let part = match info.name().contains("_exps") {
            true => &mut experts,
            false => &mut rest,
        };
        *part = (part.0 + bytes as f64 * 8.0, part.1 + info.values() as f64);
    }
    let mean = |(bits, values): (f64, f64)| if values > 0.0 { bits / values } else { 16.0 };
    let rest = mean(rest);
    Bits {
        experts: if experts.1 > 0.0 { mean(experts) } else { rest },
        rest,
        kv: 16.0,
    }
}

fn from_folder(path: &Path) -> Result<ModelShape, Error> {
    let config = path.join("config.json");
    let stated = name_of(path);
    match HfFolder::open(path) {
        Ok(folder) => {
            let mut shape = from_config(&stated, folder.config())?;
            let bytes = folder.file_bytes().0 as f64 + packed::beyond_folder(&folder);
            let bits = bytes * 8.0 / shape.params();
            shape.bits = Bits::uniform(bits.clamp(1.0, 32.0));
            Ok(shape)
        }
        // A folder without weights still has the shape in its configuration.
        Err(_) if config.is_file() => from_config(&stated, &json_at(&config)?),
        Err(error) => Err(error.into()),
    }
}

fn from_config(name: &str, config: &Value) -> Result<ModelShape, Error> {
    // Multimodal models have the text part in an object of its own.
    let text = config.get("text_config").unwrap_or(config);
    let family = text.get("model_type").and_then(Value::as_str);
    // Blocks of Nemotron-H without a cache are the second halves of layers.
    let blocks = text.get("hybrid_override_pattern").and_then(Value::as_str);
    let blocks: Option<Vec<LayerCacheKind>> = blocks.map(|blocks| {
        let kinds = blocks.chars().filter_map(|block| match block {
            'M' => Some(LayerCacheKind::State),
            '*' => Some(LayerCacheKind::All),
            _ => None,
        });
        kinds.collect()
    });
    let number = |_: &str, hf: &str| {
        if let ("num_hidden_layers", Some(blocks)) = (hf, &blocks) {
            return Some(blocks.len() as u64);
        }
        let own: &[(&str, &str)] = match family {
            Some("dbrx") => &DBRX,
            Some("kimi_linear") => &KIMI,
            Some("nemotron_h") => &NEMOTRON,
            _ => &[],
        };
        let mut own = own.iter();
        let value = match own.find(|(usual, _)| *usual == hf) {
            Some((_, place)) => text.pointer(place).or_else(|| text.get(hf)),
            None => text.get(hf).or_else(|| class_default(family, hf)),
        };
        value.and_then(Value::as_u64)
    };
    let kinds = text.get("layer_types").and_then(Value::as_array);
    let keeps = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => LayerCacheKind::Window,
        Some("linear_attention" | "conv") => LayerCacheKind::State,
        _ => LayerCacheKind::All,
    };
    let kinds = kinds.map(|kinds| kinds.iter().map(keeps).collect());
    let fields = ShapeFields {
        number: &number,
        family: family.unwrap_or_default(),
        kinds: blocks.clone().or(kinds),
    };
    let vocab = fields.need("vocab_size", "vocab_size")?;
    let mut both = [text, config].into_iter();
    let tied = both.find_map(|c| c.get("tie_word_embeddings")?.as_bool());
    fields.shape(name, vocab, tied.unwrap_or(false))
}

#[cfg(test)]
mod tests;
