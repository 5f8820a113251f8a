//! DFlash and DSpark draft heads: a few layers that propose a block of tokens in one pass.
//!
//! ```text
//! captured rows (n C) --fuse--> norm --> context (C) --k, v of each layer--> cache
//! last token, mask, mask ..  --embedding--> layers, which see the context and the whole block
//!                            --norm--> logits of each place
//! ```
//!
//! DFlash predicts the places of the masks, DSpark the token after each place. DSpark also adds a
//! bias of low rank by the tokens before ([`markov`]). Its confidence head is not read: the engine
//! knows how often drafts are accepted. A layer with a window sees the end of the context, and of
//! the block the places before its own or all.
//!
//! A row of context has the cache position of the token behind it. The keys of a block are
//! overwritten by the next context.
//!
//! Source: Chen et al. 2026 (DFlash), `dflash/model.py` of z-lab; DSpark and its `modeling.py` of
//! DeepSpec; `dflash` and `dspark` of `speculators`.

mod config;
mod forward;
mod markov;

use std::sync::Arc;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_tensor::{Kernels, PackedMatrix, Precision};

use crate::draft_head::rows::HeadTurn;
use crate::eagle::{HeadReader, head_cache};
use crate::split::Split;
use crate::weights::{ShardLoader, StoredTensor, WeightReader};
use crate::{Config, DraftBlock, DraftHead, DraftHeadCompute, Error, ModelSource};

pub use config::BlockConfig;
use forward::BlockCompute;
use markov::Markov;

/// A loaded head that drafts blocks.
#[derive(Debug)]
pub struct BlockHead {
    config: BlockConfig,
    kernels: Arc<Kernels>,
    class: KernelClass,
    /// `(vocabulary of the model, C)`: the head's, or the model's; with the model's factor.
    embedding: StoredTensor,
    embedding_scale: f32,
    /// `(C, n C)`
    fuse: PackedMatrix,
    /// `(C,)` each: norms of the context and before the logits.
    context_norm: Vec<f32>,
    output_norm: Vec<f32>,
    layers: Vec<BlockLayer>,
    /// `(draft vocabulary, C)`: the head's, or the model's.
    output: PackedMatrix,
    /// `(draft vocabulary,)`: token of the model for each draft token.
    tokens: Vec<u32>,
    markov: Option<Markov>,
}

/// A layer, shaped like one of Qwen 3.
#[derive(Debug)]
struct BlockLayer {
    /// `(C,)` each
    norm: Vec<f32>,
    ffn_norm: Vec<f32>,
    /// `(D,)` each
    query_norm: Vec<f32>,
    key_norm: Vec<f32>,
    /// `(H D, C)`, `(K D, C)`, `(K D, C)`, `(C, H D)`
    query: PackedMatrix,
    key: PackedMatrix,
    value: PackedMatrix,
    attention_output: PackedMatrix,
    /// `(F, C)`, `(F, C)`, `(C, F)`
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
}

impl BlockLayer {
    fn read(reader: HeadReader<'_>, config: &BlockConfig, i: usize) -> Result<Self, Error> {
        let shape = &config.shape;
        let (c, f, dim) = (shape.width, shape.ffn, shape.head_dim);
        let (q, k) = (shape.heads * dim, shape.kv_heads * dim);
        let name = |name: &str| format!("layers.{i}.{name}");
        let matrix = |stem: &str, rows, cols| reader.matrix(&name(stem), rows, cols);
        let norm = |stem: &str, n| reader.vector(&name(stem), n);
        Ok(Self {
            norm: norm("input_layernorm", c)?,
            ffn_norm: norm("post_attention_layernorm", c)?,
            query_norm: norm("self_attn.q_norm", dim)?,
            key_norm: norm("self_attn.k_norm", dim)?,
            query: matrix("self_attn.q_proj", q, c)?,
            key: matrix("self_attn.k_proj", k, c)?,
            value: matrix("self_attn.v_proj", k, c)?,
            attention_output: matrix("self_attn.o_proj", c, q)?,
            gate: matrix("mlp.gate_proj", f, c)?,
            up: matrix("mlp.up_proj", f, c)?,
            down: matrix("mlp.down_proj", c, f)?,
        })
    }

    fn matrices(&self) -> [&PackedMatrix; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.attention_output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }
}

impl BlockHead {
    /// Reads the head in `head` for the model in `source`.
    ///
    /// # Errors
    /// Names the field or tensor that is missing, or does not fit the model.
    pub fn load(
        head: &ModelSource,
        source: &ModelSource,
        class: KernelClass,
        kernels: Arc<Kernels>,
    ) -> Result<Self, Error> {
        let reader = HeadReader::new(head, &kernels, class)?;
        let model = Config::read(source)?;
        let config = BlockConfig::read(reader.folder.config(), &model)?;
        let shape = &config.shape;
        let (c, v, n) = (shape.width, model.vocab, shape.draft_vocab);
        let output = match reader.folder.has("lm_head.weight") {
            true => reader.matrix("lm_head", n, c)?,
            false => output_of(source, &model, class, &kernels)?,
        };
        if output.rows() != n {
            return Err(Error::Value {
                field: "draft_vocab_size",
                got: n.to_string(),
                expected: format!("{v} in a draft head without lm_head").into(),
            });
        }
        let markov = |of| Markov::read(reader, of, shape, v);
        let layers = 0..config.layers;
        let layers = layers.map(|i| BlockLayer::read(reader, &config, i));
        Ok(Self {
            embedding: reader.embedding(source, &model)?,
            embedding_scale: model.embedding_scale,
            fuse: reader.matrix("fc", c, shape.captures.len() * c)?,
            context_norm: reader.vector("hidden_norm", c)?,
            output_norm: reader.vector("norm", c)?,
            layers: layers.collect::<Result<_, _>>()?,
            output,
            tokens: reader.tokens(n, v)?,
            markov: config.markov.map(markov).transpose()?,
            config,
            class,
            kernels,
        })
    }

    fn precision(&self) -> Precision {
        Precision::of(self.class)
    }

    fn turn<'a>(&'a self, norm: &'a [f32], scale: f32, angles: &'a [(f32, f32)]) -> HeadTurn<'a> {
        let shape = &self.config.shape;
        HeadTurn {
            norm: (norm, shape.norm_eps),
            rope: &shape.rope,
            angles,
            scale,
        }
    }
}

/// The model's output head.
fn output_of(
    source: &ModelSource,
    config: &Config,
    class: KernelClass,
    kernels: &Kernels,
) -> Result<PackedMatrix, Error> {
    let shard = Split::whole(config).shard(config, Rank(0));
    let loader = ShardLoader {
        names: WeightReader { source, config },
        config,
        shard: &shard,
        class,
        pool: kernels.pool(),
        few_experts: false,
        packed: None,
    };
    Ok(loader.output(loader.names.is_tied()?)?.matrix)
}

impl DraftHead for BlockHead {
    fn captures(&self) -> &[usize] {
        &self.config.shape.captures
    }

    fn width(&self) -> usize {
        self.config.shape.width
    }

    fn block(&self) -> Option<DraftBlock> {
        Some(DraftBlock {
            drafts: self.config.drafts(),
            positions: self.config.block,
        })
    }

    fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    fn weight_bytes(&self) -> Bytes {
        let layers = self.layers.iter().flat_map(BlockLayer::matrices);
        let bias = self.markov.iter().flat_map(Markov::matrices);
        let all = layers.chain([&self.fuse, &self.output]).chain(bias);
        Bytes(all.map(|matrix| matrix.bytes().0).sum())
    }

    fn reserve(
        self: Arc<Self>,
        rows: usize,
        sequences: usize,
        positions: usize,
    ) -> Result<Box<dyn DraftHeadCompute>, Error> {
        let (shape, layers) = (&self.config.shape, self.config.layers);
        let heads = (shape.kv_heads, shape.head_dim);
        let cache = head_cache(layers, heads, self.class, positions)?;
        let sizes = (rows, sequences, positions);
        Ok(Box::new(BlockCompute::new(self, cache, sizes)))
    }
}

#[cfg(test)]
mod tests;
