//! A model's sizes for the planner. [`of`] converts a configuration that a backend computes.
//! [`from_files`] reads a GGUF header or a `config.json` without weights. It accepts more models
//! than the backends compute, since a plan only needs sizes.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use paceline_plan::{AttentionKind, Bits, Caches, DeltaNet, Indexer, ModelShape, Moe, Sliding};
use paceline_weights::gguf::{self, Gguf};
use paceline_weights::hf::{self, HfFolder};
use serde_json::Value;

use crate::families::class_default;
use crate::{Config, LayerCache, LayerShape, ModelSource, Role, Selection};

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
    path.file_stem()
        .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
}

/// Field lookup by the names of both formats.
struct ShapeFields<'a> {
    number: &'a dyn Fn(&str, &str) -> Option<u64>,
    /// Family name in the file's format.
    family: &'a str,
    /// Cache kind of each layer, if the file lists its layers.
    kinds: Option<Vec<LayerCacheKind>>,
}

/// Cache of a layer: all positions before, a sliding window of them, or a recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerCacheKind {
    All,
    Window,
    State,
}

impl ShapeFields<'_> {
    fn get(&self, gguf: &str, hf: &str) -> Option<u32> {
        (self.number)(gguf, hf).and_then(|value| u32::try_from(value).ok())
    }

    fn need(&self, gguf: &str, hf: &str) -> Result<u32, Error> {
        self.get(gguf, hf).ok_or_else(|| Error::Field {
            gguf: gguf.to_owned(),
            hf: hf.to_owned(),
        })
    }

    fn shape(&self, name: &str, vocab: u32, tied: bool) -> Result<ModelShape, Error> {
        let heads = self.need("attention.head_count", "num_attention_heads")?;
        let width = self.need("embedding_length", "hidden_size")?;
        let layers = self.need("block_count", "num_hidden_layers")?;
        Ok(ModelShape {
            name: name.to_owned(),
            layers,
            width,
            vocab,
            tied,
            attention: self.attention(heads, width),
            sliding: self.sliding(layers),
            indexer: self.indexer(layers),
            caches: self.caches(layers, width),
            ffn: self
                .get("feed_forward_length", "intermediate_size")
                .unwrap_or(0),
            moe: self.moe()?,
            bits: Bits::uniform(16.0),
        })
    }

    /// Sliding-window attention: every n-th of `layers` attends to all positions, as the file says
    /// or by the family's default. Other families that state a window do not use it, or use it
    /// nowhere here.
    fn sliding(&self, layers: u32) -> Option<Sliding> {
        let window = self.get("attention.sliding_window", "sliding_window");
        let every = self.get("attention.sliding_window_pattern", "sliding_window_pattern");
        let family = match self.family {
            "mistral" | "phi3" => Some(u32::MAX), // in every layer
            "olmo3" => Some(4),
            "gemma2" | "gpt-oss" | "gpt_oss" => Some(2),
            "gemma3" | "gemma3_text" => Some(6),
            _ => None,
        };
        let every = every.filter(|&n| n > 1).or(family);
        let listed = self.listed(LayerCacheKind::Window);
        let count = listed.or(every.map(|every| layers - layers / every))?;
        let window = window.filter(|&positions| positions > 0 && count > 0)?;
        Some(Sliding {
            layers: count,
            window,
        })
    }

    /// A lightning indexer; layers that use another one's choice are not counted apart.
    fn indexer(&self, layers: u32) -> Option<Indexer> {
        Some(Indexer {
            layers,
            top_k: self.get("attention.indexer.top_k", "index_topk")?,
            heads: self.get("attention.indexer.head_count", "index_n_heads")?,
            dim: self.get("attention.indexer.key_length", "index_head_dim")?,
        })
    }

    /// Number of listed layers with this cache kind.
    fn listed(&self, keeps: LayerCacheKind) -> Option<u32> {
        let kinds = self.kinds.as_ref()?.iter();
        u32::try_from(kinds.filter(|kind| **kind == keeps).count()).ok()
    }

    /// Layers that share other layers' caches, and layers with recurrent states.
    fn caches(&self, layers: u32, width: u32) -> Caches {
        let borrowed = self.get("attention.shared_kv_layers", "num_kv_shared_layers");
        let borrowed = borrowed.unwrap_or(0).min(layers.saturating_sub(1));
        let net = self.delta_net();
        let conv = self.get("shortconv.l_cache", "conv_L_cache");
        let (state_bytes, state_params) = match (net, conv) {
            (Some(net), _) => (net.state_bytes(), net.params(f64::from(width))),
            (None, Some(_)) => short_conv(f64::from(width)),
            (None, None) => (0.0, 0.0),
        };
        let every = self.get("full_attention_interval", "full_attention_interval");
        let states = match every.filter(|n| state_bytes > 0.0 && *n > 1) {
            Some(every) => layers - layers / every,
            None if state_bytes > 0.0 => {
                let usual = layers - layers / 4; // the default in all models without the field
                self.listed(LayerCacheKind::State).unwrap_or(usual)
            }
            None => 0,
        };
        Caches {
            borrowed,
            states: states.min(layers - borrowed),
            state_bytes,
            state_params,
            together: if borrowed == 0 {
                0
            } else {
                layers - self.first_keeper(layers - borrowed)
            },
            kept: 0.0,
        }
    }

    /// First layer whose cache later layers use. Layers from `own` on use the cache of the last
    /// earlier layer of their kind.
    fn first_keeper(&self, own: u32) -> u32 {
        let Some(kinds) = &self.kinds else {
            return own.saturating_sub(2); // one of each kind, as in all models with shared caches
        };
        let (own_kinds, others) = kinds.split_at((own as usize).min(kinds.len()));
        let keeper = |kind: &LayerCacheKind| own_kinds.iter().rposition(|own| own == kind);
        let first = others.iter().filter_map(keeper).min();
        first
            .and_then(|first| u32::try_from(first).ok())
            .unwrap_or(own)
    }

    fn delta_net(&self) -> Option<DeltaNet> {
        let size = |gguf, hf| self.get(gguf, hf).map(f64::from);
        let key = size("ssm.state_size", "linear_key_head_dim")?;
        let heads = size("ssm.time_step_rank", "linear_num_value_heads")?;
        let key_heads = size("ssm.group_count", "linear_num_key_heads")?;
        let value = size("", "linear_value_head_dim").unwrap_or(key);
        Some(DeltaNet {
            key,
            key_heads,
            value,
            heads,
        })
    }

    fn attention(&self, heads: u32, width: u32) -> AttentionKind {
        let rank = self
            .get("attention.kv_lora_rank", "kv_lora_rank")
            .unwrap_or(0);
        let head_dim = self.get("attention.key_length", "head_dim");
        let head_dim = head_dim.unwrap_or_else(|| width / heads.max(1));
        if rank == 0 {
            let kv = self.get("attention.head_count_kv", "num_key_value_heads");
            return AttentionKind::Gqa {
                heads,
                kv_heads: kv.unwrap_or(heads),
                head_dim,
            };
        }
        let rope = self
            .get("rope.dimension_count", "qk_rope_head_dim")
            .unwrap_or(64);
        // GGUF files of absorbed models give latent sizes in key_length, and head sizes in other
        // keys.
        let key = self.get("attention.key_length_mla", "").unwrap_or(head_dim);
        let value = self
            .get("attention.value_length_mla", "v_head_dim")
            .unwrap_or(128);
        AttentionKind::Mla {
            heads,
            q_rank: self
                .get("attention.q_lora_rank", "q_lora_rank")
                .unwrap_or(0),
            kv_rank: rank,
            nope_dim: self
                .get("", "qk_nope_head_dim")
                .unwrap_or(key.saturating_sub(rope)),
            rope_dim: rope,
            value_dim: value,
        }
    }

    /// Shared experts: the number in the file, or the shared width in multiples of `width`.
    fn shared_experts(&self, width: u32) -> u32 {
        let names = (
            "expert_shared_feed_forward_length",
            "shared_expert_intermediate_size",
        );
        let count = self.get("expert_shared_count", "n_shared_experts");
        let wide = self.get(names.0, names.1);
        let wide = wide.map(|wide| wide.div_ceil(width.max(1)));
        count.or(wide).unwrap_or(0)
    }

    /// Families name expert fields differently; the first present field counts.
    fn moe(&self) -> Result<Option<Moe>, Error> {
        let first = |names: [(&str, &str); 3]| names.iter().find_map(|(g, h)| self.get(g, h));
        let experts = first([
            ("expert_count", "num_experts"),
            ("", "n_routed_experts"),
            ("", "num_local_experts"),
        ]);
        let Some(experts) = experts.filter(|&n| n > 0) else {
            return Ok(None);
        };
        let active = first([
            ("expert_used_count", "num_experts_per_tok"),
            ("", "experts_per_token"),
            ("", "moe_topk"),
        ]);
        let width = first([
            ("expert_feed_forward_length", "moe_intermediate_size"),
            ("feed_forward_length", "intermediate_size"),
            ("", "expert_dim"),
        ]);
        let missing = |name: &str| Error::Field {
            gguf: name.to_owned(),
            hf: name.to_owned(),
        };
        let width = width.ok_or_else(|| missing("expert_feed_forward_length"))?;
        Ok(Some(Moe {
            experts,
            active: active.ok_or_else(|| missing("expert_used_count"))?,
            shared: self.shared_experts(width),
            ffn: width,
            dense_layers: self
                .get("leading_dense_block_count", "first_k_dense_replace")
                .unwrap_or(0),
            every: self
                .get("interleave_moe_layer_step", "decoder_sparse_step")
                .unwrap_or(1)
                .max(1),
            groups: self
                .get("expert_group_count", "n_group")
                .unwrap_or(1)
                .max(1),
        }))
    }
}

/// Bytes of the inputs of a short convolution of width `c`, two pages per sequence. Its weights:
/// three inputs and the output.
fn short_conv(c: f64) -> (f64, f64) {
    const PAGE: f64 = 64.0;
    (2.0 * PAGE * 4.0 * c, 4.0 * c * c)
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
    let dense = if every > 1 && first + 1 == every {
        0
    } else {
        first
    };
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
    let last_cut = (0..layers.len()).rev().find(|at| config.can_cut(*at));
    Caches {
        borrowed: number(layers.iter().filter(is_borrower).count()),
        states: number(states.clone().count()),
        state_bytes: states.max().unwrap_or(0) as f64,
        state_params: layers
            .iter()
            .find_map(|layer| delta_params(config, layer))
            .unwrap_or(0.0),
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
    let own = config
        .layers
        .iter()
        .filter_map(|layer| match layer.latent?.selection {
            Selection::Own(indexer) => Some(indexer),
            Selection::All | Selection::Before => None,
        });
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
    let keeps = |is_windowed: &bool| {
        if *is_windowed {
            LayerCacheKind::Window
        } else {
            LayerCacheKind::All
        }
    };
    let fields = ShapeFields {
        number: &number,
        family: &arch,
        // A scalar is a period, which `sliding` reads.
        kinds: windows
            .ok()
            .flatten()
            .map(|list| list.iter().map(keeps).collect())
            .or_else(|| convs.flatten()),
    };
    let vocab = file
        .info("token_embd.weight")
        .and_then(|info| info.shape().first().copied());
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
        let part = if info.name().contains("_exps") {
            &mut experts
        } else {
            &mut rest
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
            Some((_, place)) => text.pointer(place),
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
    let fields = ShapeFields {
        number: &number,
        family: family.unwrap_or_default(),
        kinds: blocks
            .clone()
            .or_else(|| kinds.map(|kinds| kinds.iter().map(keeps).collect())),
    };
    let vocab = fields.need("vocab_size", "vocab_size")?;
    let tied = [text, config]
        .iter()
        .find_map(|c| c.get("tie_word_embeddings")?.as_bool());
    fields.shape(name, vocab, tied.unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_with_experts_and_low_ranks_reads() {
        let config = serde_json::json!({
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129_280,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "tie_word_embeddings": false
        });
        let shape = from_config("deepseek", &config).unwrap();
        let catalogue = paceline_plan::Catalogue::builtin().unwrap();
        let known = catalogue
            .model("DeepSeek-V3.1-671B")
            .unwrap()
            .shape(16.0)
            .unwrap();
        assert_eq!((shape.attention, shape.moe), (known.attention, known.moe));
        assert!(
            (shape.params() / 671e9 - 1.0).abs() < 0.01,
            "{}",
            shape.params()
        );
    }

    #[test]
    fn a_configuration_with_names_of_its_own_reads() {
        let config = serde_json::json!({
            "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
            "vocab_size": 100_352, "attn_config": { "kv_n_heads": 8 },
            "ffn_config": { "ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4 }
        });
        let shape = from_config("dbrx", &config).unwrap();
        let catalogue = paceline_plan::Catalogue::builtin().unwrap();
        let known = catalogue.model("DBRX-132B").unwrap().shape(16.0).unwrap();
        assert_eq!((shape.attention, shape.moe), (known.attention, known.moe));
        assert_eq!((shape.layers, shape.width), (known.layers, known.width));
    }

    #[test]
    fn layers_with_a_window_are_counted() {
        let with = |more: Value| {
            let mut config = serde_json::json!({
                "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4,
                "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
                "vocab_size": 262_144, "sliding_window": 512
            });
            let fields = config.as_object_mut().unwrap();
            fields.extend(more.as_object().unwrap().clone());
            let sliding = from_config("x", &config).unwrap().sliding;
            sliding.map(|sliding| (sliding.layers, sliding.window))
        };
        let kinds = ["sliding_attention", "full_attention", "sliding_attention"];
        for (more, expected) in [
            (
                serde_json::json!({ "model_type": "gemma3_text" }),
                Some((15, 512)),
            ),
            (
                serde_json::json!({ "sliding_window_pattern": 3 }),
                Some((12, 512)),
            ),
            (serde_json::json!({ "layer_types": kinds }), Some((2, 512))),
            (
                serde_json::json!({ "layer_types": ["full_attention"] }),
                None,
            ),
            (serde_json::json!({ "model_type": "qwen2" }), None),
            (
                serde_json::json!({ "model_type": "gemma3", "sliding_window": null }),
                None,
            ),
        ] {
            assert_eq!(with(more.clone()), expected, "{more}");
        }
    }

    #[test]
    fn layers_without_a_cache_of_their_own_are_counted() {
        let kinds: Vec<&str> = (1..=35)
            .map(|i| {
                if i % 5 == 0 {
                    "full_attention"
                } else {
                    "sliding_attention"
                }
            })
            .collect();
        let config = serde_json::json!({ "text_config": {
            "model_type": "gemma4_text", "hidden_size": 1536, "num_hidden_layers": 35,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
            "intermediate_size": 6144, "vocab_size": 262_144, "sliding_window": 512,
            "num_kv_shared_layers": 20, "layer_types": kinds
        }});
        let shape = from_config("e2b", &config).unwrap();
        let expected = Caches {
            borrowed: 20,
            together: 22, // from layer 13, the last windowed one with a cache
            ..Caches::default()
        };
        assert_eq!(shape.caches, expected);
        assert_eq!(shape.row_layers(0..35), 15.0);
        assert!(shape.can_cut(13) && !shape.can_cut(14));
    }

    /// Of 40 layers ten have keys and values. A page of the others has 2 MiB of state, 2.5 MiB of
    /// inputs and keys, and 1 MiB of differences.
    #[test]
    fn states_are_counted() {
        let config = serde_json::json!({
            "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120,
            "vocab_size": 248_320, "full_attention_interval": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4
        });
        let shape = from_config("delta", &config).unwrap();
        assert_eq!((shape.caches.states, shape.row_layers(0..40)), (30, 10.0));
        let bytes = shape.state_bytes(0..40);
        assert!((345e6..349e6).contains(&bytes), "{bytes}");
    }

    /// Mamba 2 and short convolutions, whose layers the files list in their own ways.
    #[test]
    fn other_states_are_counted() {
        let usual = serde_json::json!({
            "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 64, "intermediate_size": 5632, "vocab_size": 65_536
        });
        for (more, expected) in [
            (
                serde_json::json!({
                    "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M*-M-",
                    "num_hidden_layers": 9, "ssm_state_size": 128, "n_groups": 8,
                    "mamba_num_heads": 64, "mamba_head_dim": 64
                }),
                (5, 4),
            ),
            (
                serde_json::json!({
                    "model_type": "lfm2", "num_hidden_layers": 3, "conv_L_cache": 3,
                    "layer_types": ["conv", "conv", "full_attention"]
                }),
                (3, 2),
            ),
        ] {
            let mut config = usual.clone();
            let fields = config.as_object_mut().unwrap();
            fields.extend(more.as_object().unwrap().clone());
            let shape = from_config("x", &config).unwrap();
            assert_eq!((shape.layers, shape.caches.states), expected, "{more}");
            assert!(shape.caches.state_bytes > 0.0 && shape.caches.state_params > 0.0);
        }
    }

    /// Qwen1.5-MoE with every second layer dense; its shared expert is four times as wide as
    /// another.
    #[test]
    fn interleaved_mixtures_and_wide_shared_experts_read() {
        let config = serde_json::json!({
            "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 5632, "vocab_size": 151_936,
            "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 2
        });
        let shape = from_config("x", &config).unwrap();
        let moe = shape.moe.unwrap();
        assert_eq!(
            (moe.shared, moe.every, shape.mixtures(&(0..24))),
            (4, 2, 12)
        );
        shape.check().unwrap();
    }

    #[test]
    fn a_missing_field_is_named() {
        let error = from_config("x", &serde_json::json!({ "vocab_size": 5 })).unwrap_err();
        assert!(error.to_string().contains("num_attention_heads"), "{error}");
    }
}
