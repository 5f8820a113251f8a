//! Gemma 4's assistant: a few layers with queries only, which read keys and values of the model.
//!
//! ```text
//! token (C), state of the position before (C) --> (2 C) --project--> (A)
//!   --layers, which attend to the model's keys and values--> norm --+--project--> next state (C)
//!                                                                   +--> draft logits
//! ```
//!
//! A layer with a window reads the model's last layer that has a window and its own cache. Other
//! layers read the last one without a window. The head computes these keys and values again, from
//! the captured inputs of both layers. So it works over stages, splits and devices. All tokens of a
//! draft have the position of the first, since no keys of later ones exist.
//!
//! E2B and E4B have *ordered* logits: the likeliest clusters of tokens are found first, and only
//! their tokens are scored.
//!
//! Source: `modeling_gemma4_assistant.py` and `SinglePositionMultiTokenCandidateGenerator` of
//! transformers.

mod forward;

use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{
    Kernels, KvCache, KvShape, KvType, LayerStore, PAGE, PackedMatrix, Precision,
};
use serde_json::{Value, json};

use crate::config::LayerCache;
use crate::eagle::{HeadReader, MAX_SIZE, check_fixed, pack, wrong};
use crate::families::ConfigFields;
use crate::weights::{self, StoredTensor, WeightReader};
use crate::{
    Config, DraftHead, DraftHeadCompute, Error, LayerRole, LayerShape, ModelFamily, ModelSource,
    Role,
};
use forward::AssistantCompute;

/// A loaded assistant. A is the width of its residual stream, V the vocabulary.
#[derive(Debug)]
pub struct AssistantHead {
    /// Of its own layers.
    config: Config,
    class: KernelClass,
    kernels: Arc<Kernels>,
    /// Of the model: `(V, C)` and its factor.
    embedding: StoredTensor,
    embedding_scale: f32,
    captures: Vec<usize>,
    keepers: Vec<Keeper>,
    /// `(A, 2 C)` and `(C, A)`
    input: PackedMatrix,
    state: PackedMatrix,
    layers: Vec<AssistantLayer>,
    /// `(A,)`
    output_norm: Vec<f32>,
    output: Output,
    /// C
    width: usize,
}

/// The part of a layer of the model that makes its keys and values.
#[derive(Debug)]
struct Keeper {
    shape: LayerShape,
    rope: crate::Rope,
    eps: f32,
    /// `(C,)`, `(D,)` and ones
    norm: Vec<f32>,
    key_norm: Vec<f32>,
    value_norm: Vec<f32>,
    /// `(K D, C)`; without the second, values are keys before their norm.
    key: PackedMatrix,
    value: Option<PackedMatrix>,
}

#[derive(Debug)]
struct AssistantLayer {
    /// Index in [`AssistantHead::keepers`].
    keeper: usize,
    /// `(A,)` each: before and after attention and feed-forward.
    norms: [Vec<f32>; 4],
    /// `(D,)`
    query_norm: Vec<f32>,
    /// `(H D, A)` and `(A, H D)`
    query: PackedMatrix,
    attention_output: PackedMatrix,
    /// `(F, A)`, `(F, A)`, `(A, F)`
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    /// Factor of the residual stream behind it.
    scale: f32,
}

/// The output head.
#[derive(Debug)]
enum Output {
    /// `(V, A)`
    All(PackedMatrix),
    Ordered(Box<Ordered>),
}

/// Logits of the tokens of the likeliest clusters.
#[derive(Debug)]
struct Ordered {
    /// `(clusters, A)`
    clusters: PackedMatrix,
    /// Clusters whose tokens are scored.
    chosen: usize,
    /// `(clusters, V / clusters)`: the tokens of each.
    tokens: Vec<u32>,
    /// `(V, A)`
    rows: StoredTensor,
}

impl Ordered {
    /// Tokens of a cluster.
    const fn each(&self) -> usize {
        self.tokens.len() / self.clusters.rows()
    }
}

impl Output {
    const fn matrix(&self) -> &PackedMatrix {
        match self {
            Self::All(matrix) => matrix,
            Self::Ordered(of) => &of.clusters,
        }
    }

    /// Tokens with a logit.
    const fn scored(&self) -> usize {
        match self {
            Self::All(matrix) => matrix.rows(),
            Self::Ordered(of) => of.chosen * of.each(),
        }
    }
}

/// AssistantSizes of an assistant, from its `config.json`.
#[derive(Clone, Debug, PartialEq)]
struct AssistantSizes {
    config: Config,
    /// Layers of the model with the keys and values that it reads, in ascending order.
    keepers: Vec<usize>,
    /// For each of its layers the index of its keeper.
    reads: Vec<usize>,
    /// Clusters, and those whose tokens are scored, with ordered logits.
    ordered: Option<(usize, usize)>,
}

impl AssistantSizes {
    fn read(json: &Value, model: &Config) -> Result<Self, Error> {
        if model.family != ModelFamily::Gemma4 {
            let expected = "a draft head for this model's family";
            return Err(wrong("model_type", &json["model_type"], expected));
        }
        let backbone = &json["backbone_hidden_size"];
        if *backbone != json!(model.width) {
            let expected = format!("{}, as of the model", model.width);
            return Err(wrong("backbone_hidden_size", backbone, expected));
        }
        let mut text = json["text_config"].clone();
        check_fixed(&[
            ("hidden_size_per_layer_input", &text, 0.into()),
            ("enable_moe_block", &text, false.into()),
            ("use_double_wide_mlp", &text, false.into()),
            ("vocab_size", &text, model.vocab.into()),
        ])?;
        // Its layers share the model's caches, and none among each other.
        text["num_kv_shared_layers"] = json!(0);
        let config = ModelFamily::Gemma4.config(&ConfigFields::Hf(&text))?;
        config.check_layers()?;
        let of = config.layers.iter().map(|layer| keeper_of(layer, model));
        let of = of.collect::<Result<Vec<usize>, Error>>()?;
        let mut keepers = of.clone();
        keepers.sort_unstable();
        keepers.dedup();
        let reads = of.iter().map(|of| keepers.partition_point(|it| it < of));
        Ok(Self {
            reads: reads.collect(),
            keepers,
            ordered: ordered(json, model.vocab)?,
            config,
        })
    }

    fn captures(&self, model: &Config) -> Vec<usize> {
        let last = [model.layers.len()];
        self.keepers.iter().copied().chain(last).collect()
    }
}

/// The layer of the model whose keys and values a layer of an assistant reads.
fn keeper_of(layer: &LayerShape, model: &Config) -> Result<usize, Error> {
    let is_kind = |of: &&(usize, &LayerShape)| {
        of.1.cache == LayerCache::Rows && of.1.window.is_some() == layer.window.is_some()
    };
    let all: Vec<(usize, &LayerShape)> = model.layers.iter().enumerate().collect();
    let found = all.iter().rev().find(is_kind);
    let fits = |of: &&(usize, &LayerShape)| {
        of.1.head_dim == layer.head_dim && layer.heads.is_multiple_of(of.1.kv_heads)
    };
    found.filter(fits).map(|(index, _)| *index).ok_or_else(|| {
        let got = format!("{} heads of {}", layer.heads, layer.head_dim);
        wrong(
            "heads of the draft head",
            got,
            "those of a layer of the model",
        )
    })
}

fn ordered(json: &Value, vocab: usize) -> Result<Option<(usize, usize)>, Error> {
    if json["use_ordered_embeddings"] != json!(true) {
        return Ok(None);
    }
    let number = |field: &'static str, most: u64| {
        let got = json[field].as_u64().filter(|n| (1..=most).contains(n));
        got.ok_or_else(|| wrong(field, &json[field], format!("1 to {most}")))
    };
    let clusters = number("num_centroids", MAX_SIZE)?;
    if !vocab.is_multiple_of(clusters as usize) {
        let expected = format!("a divisor of {vocab}");
        return Err(wrong("num_centroids", clusters, expected));
    }
    let chosen = number("centroid_intermediate_top_k", clusters)?;
    Ok(Some((clusters as usize, chosen as usize)))
}

impl AssistantHead {
    /// The layers that the assistant in `source` captures; `None` if that is no assistant.
    ///
    /// # Errors
    /// Names the field that is missing or does not fit.
    pub fn captures_of(source: &ModelSource, model: &Config) -> Result<Option<Vec<usize>>, Error> {
        let ModelSource::Hf(folder) = source else {
            return Ok(None);
        };
        let names = ["gemma4_assistant", "gemma4_unified_assistant"];
        let name = folder.config()["model_type"].as_str();
        if !name.is_some_and(|name| names.contains(&name)) {
            return Ok(None);
        }
        let sizes = AssistantSizes::read(folder.config(), model)?;
        Ok(Some(sizes.captures(model)))
    }

    /// Reads the assistant in `head` for the model in `source`.
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
        let mut model = Config::read(source)?;
        weights::read_rope_factors(source, &mut model)?;
        let sizes = AssistantSizes::read(reader.folder.config(), &model)?;
        let (a, c) = (sizes.config.width, model.width);
        let captures = sizes.captures(&model);
        let keeper = |layer: &usize| Keeper::read(source, &model, *layer, (class, &kernels));
        let reads = sizes.reads.iter().enumerate();
        let layers = reads.map(|(i, of)| AssistantLayer::read(reader, &sizes.config, (i, *of)));
        Ok(Self {
            class,
            embedding: reader.embedding(source, &model)?,
            embedding_scale: model.embedding_scale,
            keepers: (sizes.keepers.iter().map(keeper)).collect::<Result<_, _>>()?,
            input: reader.matrix("pre_projection", a, 2 * c)?,
            state: reader.matrix("post_projection", c, a)?,
            layers: layers.collect::<Result<_, _>>()?,
            output_norm: reader.vector("model.norm", a)?,
            output: output(reader, sizes.ordered, [model.vocab, a])?,
            config: sizes.config,
            width: c,
            captures,
            kernels,
        })
    }

    fn precision(&self) -> Precision {
        Precision::of(self.class)
    }
}

/// Reads the output head, whose rows are those of the assistant's own embedding if tied.
fn output(
    reader: HeadReader<'_>,
    ordered: Option<(usize, usize)>,
    [vocab, a]: [usize; 2],
) -> Result<Output, Error> {
    let stem = match reader.folder.has("lm_head.weight") {
        true => "lm_head",
        false => "model.embed_tokens",
    };
    let Some((clusters, chosen)) = ordered else {
        return Ok(Output::All(reader.matrix(stem, vocab, a)?));
    };
    const ORDER: &str = "masked_embedding.token_ordering";
    let tokens = reader.integers(ORDER, vocab)?.into_iter();
    let tokens = tokens.map(|got| {
        let token = usize::try_from(got).ok().filter(|token| *token < vocab);
        let token = token.ok_or_else(|| wrong(ORDER, got, format!("0 to {}", vocab - 1)));
        Ok::<_, Error>(token? as u32)
    });
    Ok(Output::Ordered(Box::new(Ordered {
        clusters: reader.matrix("masked_embedding.centroids", clusters, a)?,
        chosen,
        tokens: tokens.collect::<Result<_, _>>()?,
        rows: StoredTensor::Whole(reader.tensor(stem, &[vocab, a])?),
    })))
}

impl Keeper {
    fn read(
        source: &ModelSource,
        model: &Config,
        layer: usize,
        packed_for: (KernelClass, &Kernels),
    ) -> Result<Self, Error> {
        let (config, shape) = (model, model.layers[layer]);
        let reader = WeightReader { source, config };
        let role = |part| Role::Layer(layer, part);
        let n = shape.kv_heads * shape.head_dim;
        let matrix = |part| pack(reader.matrix(role(part), [n, model.width])?, packed_for);
        let has_values = !shape.keys_as_values;
        Ok(Self {
            rope: model.ropes[shape.rope].clone(),
            eps: model.norm_eps,
            norm: reader.norm(role(LayerRole::AttentionNorm), model.width)?,
            key_norm: reader.norm(role(LayerRole::KeyNorm), shape.head_dim)?,
            value_norm: vec![1.0; shape.head_dim],
            key: matrix(LayerRole::Key)?,
            value: has_values.then(|| matrix(LayerRole::Value)).transpose()?,
            shape,
        })
    }

    fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        [&self.key].into_iter().chain(&self.value)
    }

    /// Layout of its cache.
    const fn store(&self, kv_type: KvType) -> LayerStore {
        LayerStore::Rows(KvShape {
            heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
            value_dim: self.shape.head_dim,
            kv_type,
        })
    }
}

impl AssistantLayer {
    fn read(
        reader: HeadReader<'_>,
        config: &Config,
        (i, keeper): (usize, usize),
    ) -> Result<Self, Error> {
        let (shape, a) = (&config.layers[i], config.width);
        let (q, f) = (shape.heads * shape.head_dim, shape.ffn);
        let name = |name: &str| format!("model.layers.{i}.{name}");
        let matrix = |stem: &str, rows, cols| reader.matrix(&name(stem), rows, cols);
        let norm = |stem: &str| reader.vector(&name(stem), a);
        let scale = reader.folder.tensor(&name("layer_scalar"))?;
        Ok(Self {
            keeper,
            norms: [
                norm("input_layernorm")?,
                norm("post_attention_layernorm")?,
                norm("pre_feedforward_layernorm")?,
                norm("post_feedforward_layernorm")?,
            ],
            query_norm: reader.vector(&name("self_attn.q_norm"), shape.head_dim)?,
            query: matrix("self_attn.q_proj", q, a)?,
            attention_output: matrix("self_attn.o_proj", a, q)?,
            gate: matrix("mlp.gate_proj", f, a)?,
            up: matrix("mlp.up_proj", f, a)?,
            down: matrix("mlp.down_proj", a, f)?,
            scale: weights::vector(&scale, 1)?[0],
        })
    }

    fn matrices(&self) -> [&PackedMatrix; 5] {
        [
            &self.query,
            &self.attention_output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }
}

impl DraftHead for AssistantHead {
    fn captures(&self) -> &[usize] {
        &self.captures
    }

    fn width(&self) -> usize {
        self.width
    }

    fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    fn weight_bytes(&self) -> Bytes {
        let layers = self.layers.iter().flat_map(AssistantLayer::matrices);
        let keys = self.keepers.iter().flat_map(Keeper::matrices);
        let ends = [&self.input, &self.state, self.output.matrix()];
        let all = layers.chain(keys).chain(ends);
        Bytes(all.map(|matrix| matrix.bytes().0).sum())
    }

    fn reserve(
        self: Arc<Self>,
        rows: usize,
        sequences: usize,
        positions: usize,
    ) -> Result<Box<dyn DraftHeadCompute>, Error> {
        let kv_type = KvType::of(self.class);
        let layers = self.keepers.iter().map(|of| (0, of.store(kv_type)));
        let layers: Vec<(usize, LayerStore)> = layers.collect();
        let cache = KvCache::new(&layers, &[positions.div_ceil(PAGE)]).map_err(Error::Cache)?;
        let sizes = (rows, sequences, positions);
        Ok(Box::new(AssistantCompute::new(self, cache, sizes)))
    }
}

#[cfg(test)]
mod tests;
