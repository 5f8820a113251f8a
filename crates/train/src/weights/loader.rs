//! Reads a stage's weights from a model's files, and lays out what is trained.

mod experts;

use std::ops::Range;

use paceline_model::adapter::files::TARGETS;
use paceline_model::{Config, Latent, LayerCache, LayerRole, LayerShape, ModelSource, Role};
use paceline_tensor::{Kernels, RopePairs, storage};
use paceline_weights::tensor::Tensor;

use super::{
    ATTENTION, AdapterFactors, DeltaWeights, EXPERTS, FirstTensor, LatentWeights, LayerWeights,
    Matrix, MatrixStorage, Method, Parts, StageWeights, VectorParameter, delta_channels, sizes,
    takes_adapter,
};
use crate::error::Error;
use crate::params::{Layout, Lora};
use crate::stage::ModelStage;
use experts::{FIRST_OF_EXPERTS, expert_number};

/// Reads weights.
pub(crate) struct WeightLoader<'a> {
    pub(crate) source: &'a ModelSource,
    pub(crate) config: &'a Config,
    pub(crate) kernels: &'a Kernels,
    pub(crate) method: Method,
    pub(crate) lora: Lora,
    /// Names out of [`TARGETS`].
    pub(crate) targets: &'a [String],
    /// The first layer with adapters.
    pub(crate) adapted_from: usize,
    pub(crate) stage: ModelStage,
    /// The rank that has its part of the routed experts alone, and the number of ranks.
    pub(crate) experts: Option<(usize, usize)>,
    /// Whether fixed matrices are read by the engine's device or another rank, and not here.
    pub(crate) elsewhere: bool,
    pub(crate) layout: Layout,
    /// Where the part that is read begins in the layout.
    pub(crate) part: usize,
    pub(crate) first: Vec<FirstTensor>,
}

impl WeightLoader<'_> {
    pub(crate) fn load(mut self) -> Result<StageWeights, Error> {
        let c = self.config;
        let (stage, table) = (self.stage, [c.vocab, c.width]);
        let (numbers, tied) = (stage.layers(c)?, self.is_tied()?);
        let mut ends = vec![0];
        let mut embedding = None;
        if stage.is_first() {
            let role = Role::TokenEmbedding;
            embedding = Some(self.matrix(role, table, "model.embed_tokens", None)?);
        }
        self.end_part(&mut ends);
        let mut layers = Vec::with_capacity(numbers.len());
        for i in numbers.clone() {
            layers.push(self.layer(i)?);
            self.end_part(&mut ends);
        }
        let mut output_norm = None;
        if stage.is_last() {
            output_norm = Some(self.vector(Role::OutputNorm, c.width, "model.norm.weight")?);
        }
        self.end_part(&mut ends);
        let shares_table = tied && stage.is_first();
        let mut output = None;
        if stage.is_last() && !shares_table {
            let (role, name) = match tied {
                true => (Role::TokenEmbedding, "model.embed_tokens"),
                false => (Role::Output, "lm_head"),
            };
            output = Some(self.matrix(role, table, name, None)?);
        }
        self.end_part(&mut ends);
        Ok(StageWeights {
            embedding,
            first_layer: numbers.start,
            layers,
            output_norm,
            output,
            layout: self.layout,
            parts: Parts::new(&ends, shares_table && stage.is_last()),
            first: self.first,
        })
    }

    /// Matrices read from here on are of the next part.
    fn end_part(&mut self, ends: &mut Vec<usize>) {
        self.part = self.layout.len();
        ends.push(self.part);
    }

    fn layer(&mut self, i: usize) -> Result<LayerWeights, Error> {
        let (c, shape) = (self.config, self.config.layers[i]);
        let sizes = sizes(c.width, &shape);
        let norm_name = |name: &str| format!("model.layers.{i}.{name}.weight");
        let sandwich = c.family.norms_after_halves();
        let before_ffn = match sandwich {
            true => "pre_feedforward_layernorm",
            false => "post_attention_layernorm",
        };
        let role = |part| Role::Layer(i, part);
        let head_norms = c.family.norms_heads();
        let norm = role(LayerRole::AttentionNorm);
        let attention_norm = self.vector(norm, c.width, &norm_name("input_layernorm"))?;
        let mut matrices = Vec::with_capacity(TARGETS.len());
        let count = if shape.experts.is_some() {
            ATTENTION
        } else {
            TARGETS.len()
        };
        for ((part, block, name), size) in TARGETS.into_iter().zip(sizes).take(count) {
            let (part, block, name) = own_part(&shape, part, (block, name));
            let heads = self.turned(i, part).then_some(shape.head_dim);
            let name = format!("model.layers.{i}.{block}.{name}");
            matrices.push(self.matrix(role(part), size, &name, heads)?);
        }
        let latent = shape.latent.map(|of| self.latent(i, of)).transpose()?;
        let delta = match shape.cache {
            LayerCache::Delta(net) => Some(self.delta_net(i, net.taps)?),
            _ => None,
        };
        let experts = shape.experts.map(|of| self.experts(i, of)).transpose()?;
        let head_norms = head_norms && delta.is_none();
        let sinks = match c.family.has_sinks_and_biases() {
            true => Some(self.sinks(i, shape.heads)?),
            false => None,
        };
        let mut opt = |there: bool, part, n, name: &str| {
            there
                .then(|| self.vector(role(part), n, &norm_name(name)))
                .transpose()
        };
        let dim = shape.head_dim;
        Ok(LayerWeights {
            query_norm: opt(head_norms, LayerRole::QueryNorm, dim, "self_attn.q_norm")?,
            key_norm: opt(head_norms, LayerRole::KeyNorm, dim, "self_attn.k_norm")?,
            post_attention_norm: opt(
                sandwich,
                LayerRole::PostAttentionNorm,
                c.width,
                "post_attention_layernorm",
            )?,
            post_ffn_norm: opt(
                sandwich,
                LayerRole::PostFfnNorm,
                c.width,
                "post_feedforward_layernorm",
            )?,
            ffn_norm: self.vector(role(LayerRole::FfnNorm), c.width, &norm_name(before_ffn))?,
            attention_norm,
            matrices,
            latent,
            delta,
            experts,
            sinks,
        })
    }

    fn sinks(&mut self, i: usize, heads: usize) -> Result<VectorParameter, Error> {
        let role = Role::Layer(i, LayerRole::Sinks);
        self.vector(role, heads, &format!("model.layers.{i}.self_attn.sinks"))
    }

    fn delta_net(&mut self, i: usize, taps: usize) -> Result<DeltaWeights, Error> {
        let (width, shape) = (self.config.width, self.config.layers[i]);
        let stem = format!("model.layers.{i}.linear_attn");
        let role = |part| Role::Layer(i, part);
        let name = format!("{stem}.in_proj_a");
        let decay = self.matrix(
            role(LayerRole::DeltaDecay),
            [shape.heads, width],
            &name,
            None,
        )?;
        let conv = self
            .source
            .weight(self.config.family, role(LayerRole::DeltaConv))?;
        let channels = delta_channels(&shape);
        let sizes: Vec<usize> = conv
            .shape
            .iter()
            .copied()
            .filter(|size| *size != 1)
            .collect();
        if sizes != [channels, taps] {
            check(&conv, &[channels, taps])?;
        }
        let sizes = (format!("{stem}.conv1d.weight"), conv.shape.clone());
        let conv = self.parameter(FirstTensor::Stored(conv, None), sizes);
        let scale = self
            .source
            .weight(self.config.family, role(LayerRole::DeltaScale))?;
        check(&scale, &[shape.heads])?;
        let scale = match self.source {
            ModelSource::Hf(_) => FirstTensor::Stored(scale, None),
            // The factor itself.
            ModelSource::Gguf(_) => {
                let factors = super::values_of(&scale, None).into_iter();
                FirstTensor::Plain(factors.map(|x| libm::logf(-x)).collect())
            }
        };
        let norm = format!("{stem}.norm.weight");
        Ok(DeltaWeights {
            decay,
            conv,
            bias: self.vector(
                role(LayerRole::DeltaBias),
                shape.heads,
                &format!("{stem}.dt_bias"),
            )?,
            scale: self.parameter(scale, (format!("{stem}.A_log"), vec![shape.heads])),
            norm: self.vector(role(LayerRole::DeltaNorm), shape.value_dim, &norm)?,
        })
    }

    fn latent(&mut self, i: usize, of: Latent) -> Result<LatentWeights, Error> {
        let (width, stem) = (self.config.width, format!("model.layers.{i}.self_attn"));
        let role = |part| Role::Layer(i, part);
        let query_down = of.query_rank.map(|rank| {
            let (name, norm) = (format!("{stem}.q_a_proj"), LayerRole::QueryDownNorm);
            let matrix = self.matrix(role(LayerRole::QueryDown), [rank, width], &name, None)?;
            let name = format!("{stem}.q_a_layernorm.weight");
            Ok::<_, Error>((matrix, self.vector(role(norm), rank, &name)?))
        });
        let query_down = query_down.transpose()?;
        let name = format!("{stem}.kv_a_layernorm.weight");
        let norm = self.vector(role(LayerRole::LatentNorm), of.rank, &name)?;
        Ok(LatentWeights { query_down, norm })
    }

    /// Whether a file's rows lie by neighbours and ours by halves.
    fn turned(&self, layer: usize, part: LayerRole) -> bool {
        let shape = &self.config.layers[layer];
        let pairs = self.config.ropes[shape.rope].pairs;
        let is_rotated = matches!(part, LayerRole::Query | LayerRole::Key);
        pairs == RopePairs::Adjacent && is_rotated && shape.latent.is_none()
    }

    fn matrix(
        &mut self,
        role: Role,
        [rows, cols]: [usize; 2],
        name: &str,
        heads: Option<usize>,
    ) -> Result<Matrix, Error> {
        // Tokens' rows are read here by every engine.
        let is_read = role == Role::TokenEmbedding || self.method == Method::Full;
        let kept = if self.elsewhere && !is_read {
            MatrixStorage::Elsewhere(heads)
        } else {
            let tensor = self.source.weight(self.config.family, role)?;
            check(&tensor, &[rows, cols])?;
            MatrixStorage::Stored(tensor, heads)
        };
        let mut matrix = Matrix {
            kept,
            rows,
            cols,
            bias: self.bias(role, rows, name, heads)?,
            pair: None,
        };
        match self.method {
            Method::Qlora => {}
            Method::Lora if self.elsewhere => {}
            // Few rows of a table that is no head are used, and those by their number.
            Method::Lora if role == Role::TokenEmbedding && !self.is_head()? => {}
            Method::Lora => matrix.kept = MatrixStorage::Fixed(self.unpacked(&matrix)),
            Method::Full => {
                let range = self.slot(format!("{name}.weight"), vec![rows, cols]);
                let stored = std::mem::replace(&mut matrix.kept, MatrixStorage::Trained(range));
                if let MatrixStorage::Stored(tensor, heads) = stored {
                    self.first.push(FirstTensor::Stored(tensor, heads));
                }
            }
        }
        if let Some(number) = self.adapted(role) {
            let of = |part| format!("base_model.model.{name}.{part}.weight");
            let a = self.slot(of("lora_A"), vec![self.lora.rank, cols]);
            let b = self.slot(of("lora_B"), vec![rows, self.lora.rank]);
            matrix.pair = Some(AdapterFactors { number, a, b });
        }
        Ok(matrix)
    }

    /// The number of a matrix that has an adapter.
    fn adapted(&self, role: Role) -> Option<u64> {
        let Role::Layer(layer, part) = role else {
            return None;
        };
        if self.method == Method::Full || layer < self.adapted_from {
            return None;
        }
        let has = |target: &str| self.targets.iter().any(|name| name == target);
        let shape = &self.config.layers[layer];
        let Some(nth) = TARGETS.iter().position(|(of, _, _)| *of == part) else {
            let number = expert_number(shape, part).filter(|_| has(EXPERTS))?;
            return Some(FIRST_OF_EXPERTS + ((layer as u64) << 32) + number);
        };
        let is_adapted = has(TARGETS[nth].2) && takes_adapter(shape, nth);
        is_adapted.then_some((layer * TARGETS.len() + nth) as u64)
    }

    /// Whether the token embedding is the output head here.
    fn is_head(&self) -> Result<bool, Error> {
        Ok(self.stage.is_last() && self.is_tied()?)
    }

    fn is_tied(&self) -> Result<bool, Error> {
        Ok(match self.config.tied {
            Some(tied) => tied,
            None => self
                .source
                .opt_weight(self.config.family, Role::Output)?
                .is_none(),
        })
    }

    fn unpacked(&self, matrix: &Matrix) -> Vec<f32> {
        let mut values = Vec::with_capacity(matrix.rows * matrix.cols);
        matrix.tiles(&[], self.kernels, |_, tile| values.extend_from_slice(tile));
        if let MatrixStorage::Stored(tensor, _) = &matrix.kept {
            tensor.bytes.discard();
        }
        values
    }

    fn bias(
        &mut self,
        role: Role,
        n: usize,
        name: &str,
        heads: Option<usize>,
    ) -> Result<Option<VectorParameter>, Error> {
        let family = self.config.family;
        use LayerRole::{ExpertDown, ExpertGate, ExpertUp};
        if let Role::Layer(_, ExpertGate(_) | ExpertUp(_) | ExpertDown(_)) = role {
            return Ok(None); // stacks have theirs together
        }
        let needed = family.has_qkv_biases()
            && matches!(
                role,
                Role::Layer(_, LayerRole::Query | LayerRole::Key | LayerRole::Value)
            );
        let bias = match needed {
            true => Some(self.source.bias(family, role)?),
            false => self.source.opt_bias(family, role)?,
        };
        let Some(tensor) = bias else { return Ok(None) };
        let name = format!("{name}.bias");
        self.of_tensor((tensor, heads), n, name).map(Some)
    }

    fn vector(&mut self, role: Role, n: usize, name: &str) -> Result<VectorParameter, Error> {
        let tensor = self.source.weight(self.config.family, role)?;
        self.of_tensor((tensor, None), n, name.to_owned())
    }

    /// A norm or a bias of `n` numbers, trained or not.
    fn of_tensor(
        &mut self,
        (tensor, heads): (Tensor, Option<usize>),
        n: usize,
        name: String,
    ) -> Result<VectorParameter, Error> {
        check(&tensor, &[n])?;
        Ok(self.parameter(FirstTensor::Stored(tensor, heads), (name, vec![n])))
    }

    /// Numbers that are trained with whole models, and fixed with adapters.
    fn parameter(
        &mut self,
        stored: FirstTensor,
        (name, shape): (String, Vec<usize>),
    ) -> VectorParameter {
        if self.method != Method::Full {
            return VectorParameter::Fixed(stored.values());
        }
        let range = self.slot(name, shape);
        self.first.push(stored);
        VectorParameter::Trained(range)
    }

    /// A trained tensor's range in its part.
    fn slot(&mut self, name: String, shape: Vec<usize>) -> Range<usize> {
        let range = self.layout.add(name, shape);
        range.start - self.part..range.end - self.part
    }
}

pub(crate) fn numbers(tensor: &Tensor, n: usize) -> Result<Vec<f32>, Error> {
    check(tensor, &[n])?;
    let mut values = vec![0.0; n];
    storage::dequantise(tensor.block_type, &tensor.bytes, &mut values);
    Ok(values)
}

fn check(tensor: &Tensor, expected: &[usize]) -> Result<(), Error> {
    if tensor.shape == expected {
        return Ok(());
    }
    Err(Error::Model(paceline_model::Error::Shape {
        name: tensor.name.clone(),
        got: tensor.shape.clone(),
        expected: expected.to_vec(),
    }))
}

/// The matrix of a layer in place of one of attention, with its names in files.
fn own_part(
    shape: &LayerShape,
    part: LayerRole,
    (block, name): (&'static str, &'static str),
) -> (LayerRole, &'static str, &'static str) {
    const NET: &str = "linear_attn";
    let compressed = shape.latent.is_some_and(|of| of.query_rank.is_some());
    let (has_latent, is_net) = (
        shape.latent.is_some(),
        matches!(shape.cache, LayerCache::Delta(_)),
    );
    match part {
        LayerRole::Query if is_net => (LayerRole::DeltaQkv, NET, "in_proj_qkv"),
        LayerRole::Key if is_net => (LayerRole::DeltaGate, NET, "in_proj_z"),
        LayerRole::Value if is_net => (LayerRole::DeltaStep, NET, "in_proj_b"),
        LayerRole::AttentionOutput if is_net => (LayerRole::DeltaOutput, NET, "out_proj"),
        LayerRole::Query if compressed => (LayerRole::QueryUp, block, "q_b_proj"),
        LayerRole::Key if has_latent => (LayerRole::LatentDown, block, "kv_a_proj_with_mqa"),
        LayerRole::Value if has_latent => (LayerRole::LatentUp, block, "kv_b_proj"),
        _ => (part, block, name),
    }
}
