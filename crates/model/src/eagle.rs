//! EAGLE-3 draft heads: one layer that proposes the next tokens from a model's residual stream.
//!
//! ```text
//! captured rows of the model, position p - 1 (n C) --fuse--> feature (C)    n = 3 layers
//! token p --embedding--> norm --+
//! feature ------------> norm ---+-> (2 C) attention, feed-forward -> hidden (C) -> draft logits
//! ```
//!
//! The row of token p predicts token p + 1. In a draft of several tokens, `hidden` of a row is the
//! feature of the next one. The head has its own cache. Its vocabulary may be a part of the
//! model's.
//!
//! - [`EagleHead`]: weights of a folder as vLLM and `speculators` have them.
//! - [`DraftHeadCompute`]: a head with its cache and buffers.
//!
//! Source: Li et al. 2025 (EAGLE-3); `llama_eagle3.py` of vLLM; `eagle3` of `speculators`.

mod config;
mod forward;

use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{
    Kernels, KvCache, KvShape, KvType, LayerStore, PAGE, PackOptions, PackedMatrix, Precision,
    StoredMatrix, storage,
};
use paceline_weights::hf::HfFolder;
use paceline_weights::tensor::Tensor;

use crate::weights::{StoredTensor, WeightReader, pack_error};
use crate::{Config, DraftHead, DraftHeadCompute, Error, ModelSource, Role};

pub use config::HeadConfig;
pub(crate) use config::{MAX_SIZE, check_fixed, layer_of, wrong};
use forward::EagleCompute;

/// A loaded draft head.
#[derive(Debug)]
pub struct EagleHead {
    config: HeadConfig,
    kernels: Arc<Kernels>,
    class: KernelClass,
    /// `(vocabulary of the model, C)`: the head's, or the model's.
    embedding: StoredTensor,
    /// `(C, n C)`
    fuse: PackedMatrix,
    /// `(C,)`: norms of the token's embedding, of the feature, before the feed-forward, and before
    /// the draft logits.
    token_norm: Vec<f32>,
    feature_norm: Vec<f32>,
    ffn_norm: Vec<f32>,
    output_norm: Vec<f32>,
    /// `(H D, 2 C)`, `(K D, 2 C)`, `(K D, 2 C)`, `(C, H D)`
    query: PackedMatrix,
    key: PackedMatrix,
    value: PackedMatrix,
    attention_output: PackedMatrix,
    /// `(F, C)`, `(F, C)`, `(C, F)`
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    /// `(draft vocabulary, C)`
    output: PackedMatrix,
    /// `(draft vocabulary,)`: token of the model for each draft token.
    tokens: Vec<u32>,
}

impl EagleHead {
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
        let folder = reader.folder;
        let model = Config::read(source)?;
        let config = HeadConfig::read(folder.config(), &model)?;
        let (c, v) = (config.width, model.vocab);
        let (q, k) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        let layer = ["layers.0", "midlayer"];
        let layer = layer.into_iter().find(|layer| {
            let name = format!("{layer}.self_attn.q_proj.weight");
            folder.has(&name)
        });
        let layer = layer.unwrap_or("layers.0");
        let matrix = |name: &str, rows, cols| reader.matrix(&format!("{layer}.{name}"), rows, cols);
        let norm = |name: &str| reader.vector(&format!("{layer}.{name}"), c);
        Ok(Self {
            embedding: reader.embedding(source, &model)?,
            fuse: reader.matrix("fc", c, config.captures.len() * c)?,
            token_norm: norm("input_layernorm")?,
            feature_norm: norm("hidden_norm")?,
            ffn_norm: norm("post_attention_layernorm")?,
            output_norm: reader.vector("norm", c)?,
            query: matrix("self_attn.q_proj", q, 2 * c)?,
            key: matrix("self_attn.k_proj", k, 2 * c)?,
            value: matrix("self_attn.v_proj", k, 2 * c)?,
            attention_output: matrix("self_attn.o_proj", c, q)?,
            gate: matrix("mlp.gate_proj", config.ffn, c)?,
            up: matrix("mlp.up_proj", config.ffn, c)?,
            down: matrix("mlp.down_proj", c, config.ffn)?,
            output: reader.matrix("lm_head", config.draft_vocab, c)?,
            tokens: reader.tokens(config.draft_vocab, v)?,
            config,
            class,
            kernels,
        })
    }

    /// Its shape.
    pub fn config(&self) -> &HeadConfig {
        &self.config
    }

    /// The matrices of the layer.
    fn inner_matrices(&self) -> [&PackedMatrix; 7] {
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

    fn precision(&self) -> Precision {
        Precision::of(self.class)
    }
}

impl DraftHead for EagleHead {
    fn captures(&self) -> &[usize] {
        &self.config.captures
    }

    fn width(&self) -> usize {
        self.config.width
    }

    fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    fn weight_bytes(&self) -> Bytes {
        let all = self.inner_matrices();
        let all = all.into_iter().chain([&self.fuse, &self.output]);
        Bytes(all.map(|matrix| matrix.bytes().0).sum())
    }

    fn reserve(
        self: Arc<Self>,
        rows: usize,
        sequences: usize,
        positions: usize,
    ) -> Result<Box<dyn DraftHeadCompute>, Error> {
        let heads = (self.config.kv_heads, self.config.head_dim);
        let cache = head_cache(1, heads, self.class, positions)?;
        let sizes = (rows, sequences, positions);
        Ok(Box::new(EagleCompute::new(self, cache, sizes)))
    }
}

/// Keys and values of a head's layers, with `heads` KV heads of `head_dim` numbers each, for
/// `positions` positions over all sequences.
pub(crate) fn head_cache(
    layers: usize,
    (heads, head_dim): (usize, usize),
    class: KernelClass,
    positions: usize,
) -> Result<KvCache, Error> {
    let shape = KvShape {
        heads,
        head_dim,
        value_dim: head_dim,
        kv_type: KvType::of(class),
    };
    let layers = vec![(0, LayerStore::Rows(shape)); layers];
    KvCache::new(&layers, &[positions.div_ceil(PAGE)]).map_err(Error::Cache)
}

/// Reads the weights of a head's folder.
#[derive(Clone, Copy)]
pub(crate) struct HeadReader<'a> {
    pub(crate) folder: &'a HfFolder,
    pub(crate) kernels: &'a Kernels,
    pub(crate) class: KernelClass,
}

impl<'a> HeadReader<'a> {
    /// Of a head in a folder.
    ///
    /// # Errors
    /// A GGUF file.
    pub(crate) fn new(
        head: &'a ModelSource,
        kernels: &'a Kernels,
        class: KernelClass,
    ) -> Result<Self, Error> {
        match head {
            ModelSource::Hf(folder) => Ok(Self {
                folder,
                kernels,
                class,
            }),
            ModelSource::Gguf(_) => Err(Error::Value {
                field: "draft head",
                got: "a GGUF file".to_owned(),
                expected: "a folder of safetensors".into(),
            }),
        }
    }

    /// The table of tokens: the head's, or the model's.
    pub(crate) fn embedding(
        &self,
        source: &ModelSource,
        model: &Config,
    ) -> Result<StoredTensor, Error> {
        let shape = [model.vocab, model.width];
        if self.folder.has("embed_tokens.weight") {
            return Ok(StoredTensor::Whole(self.tensor("embed_tokens", &shape)?));
        }
        let config = model;
        WeightReader { source, config }.as_stored(Role::TokenEmbedding, shape)
    }

    pub(crate) fn tensor(&self, stem: &str, shape: &[usize]) -> Result<Tensor, Error> {
        let tensor = self.folder.tensor(&format!("{stem}.weight"))?;
        crate::weights::check_shape(&tensor, shape)?;
        Ok(tensor)
    }

    pub(crate) fn matrix(
        &self,
        stem: &str,
        rows: usize,
        cols: usize,
    ) -> Result<PackedMatrix, Error> {
        pack(
            self.tensor(stem, &[rows, cols])?,
            (self.class, self.kernels),
        )
    }

    pub(crate) fn vector(&self, stem: &str, n: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.tensor(stem, &[n])?;
        crate::weights::vector(&tensor, n)
    }

    /// Tokens of the model for each of `draft` draft tokens: `d2t` has the differences. Without it
    /// both vocabularies are one.
    pub(crate) fn tokens(&self, draft: usize, vocab: usize) -> Result<Vec<u32>, Error> {
        if !self.folder.has("d2t") {
            return Ok((0..draft as u32).collect());
        }
        let token = |(i, difference): (usize, i64)| {
            let token = difference.saturating_add(i as i64);
            let fits = usize::try_from(token).is_ok_and(|token| token < vocab);
            fits.then_some(token as u32)
                .ok_or_else(|| wrong("token of d2t", token, format!("0 to {}", vocab - 1)))
        };
        let differences = self.integers("d2t", draft)?.into_iter();
        differences.enumerate().map(token).collect()
    }

    /// A tensor of `n` integers of 64 bits.
    pub(crate) fn integers(&self, name: &str, n: usize) -> Result<Vec<i64>, Error> {
        let info = self.folder.info(name);
        let fits = info.is_some_and(|info| info.dtype() == "I64" && info.shape() == [n]);
        let bytes = self.folder.bytes_of(name).filter(|_| fits);
        let Some(bytes) = bytes else {
            return Err(Error::Shape {
                name: name.to_owned(),
                got: info.map_or(vec![], |info| info.shape().to_vec()),
                expected: vec![n],
            });
        };
        let bytes = bytes.arrived()?;
        let words = bytes.as_chunks::<8>().0.iter();
        Ok(words.map(|word| i64::from_le_bytes(*word)).collect())
    }
}

pub(crate) fn pack(
    tensor: Tensor,
    (class, kernels): (KernelClass, &Kernels),
) -> Result<PackedMatrix, Error> {
    let bytes = tensor.bytes.arrived()?;
    let name = tensor.name;
    if let Some(got) = storage::not_finite(tensor.block_type, &bytes) {
        return Err(Error::NotFinite { name, got });
    }
    let stored = StoredMatrix {
        block_type: tensor.block_type,
        rows: tensor.shape[0],
        cols: tensor.shape[1],
        bytes: &bytes,
    };
    let options = PackOptions {
        leaf_cols: 0,
        as_f32: class == KernelClass::CpuF32,
    };
    let packed = PackedMatrix::new(stored, options, kernels.pool());
    packed.map_err(|source| pack_error(&name, source))
}

#[cfg(test)]
pub(crate) mod tests;
