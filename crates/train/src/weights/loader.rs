//! Reads a stage's weights from a model's files, and lays out what is trained.

use std::ops::Range;

use paceline_model::adapter::files::TARGETS;
use paceline_model::{Config, Experts, LayerRole, ModelFamily, ModelSource, Nth, Role};
use paceline_tensor::{Kernels, RopePairs, storage};
use paceline_weights::tensor::Tensor;

use super::{
    ATTENTION, AdapterFactors, ExpertWeights, FirstTensor, LayerWeights, Matrix, MatrixStorage,
    Method, Parts, StageWeights, VectorParameter, sizes,
};
use crate::error::Error;
use crate::params::{Layout, Lora};
use crate::stage::ModelStage;

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
    /// Whether fixed matrices are read by the engine's device, and not here.
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

    /// What is read from here on is of the next part.
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
            let heads = self.turned(i, part).then_some(shape.head_dim);
            let name = format!("model.layers.{i}.{block}.{name}");
            matrices.push(self.matrix(role(part), size, &name, heads)?);
        }
        let experts = shape.experts.map(|of| self.experts(i, of)).transpose()?;
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
            experts,
        })
    }

    /// The experts of a layer, under the names of their family's files.
    fn experts(&mut self, i: usize, of: Experts) -> Result<ExpertWeights, Error> {
        let (block, names) = match self.config.family {
            ModelFamily::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let (c, stem) = (self.config.width, format!("model.layers.{i}.{block}"));
        let role = Role::Layer(i, LayerRole::Router);
        let router = self.matrix(role, [of.count, c], &format!("{stem}.gate"), None)?;
        let mut experts = Vec::with_capacity(of.count);
        for index in 0..of.count {
            let nth = Nth {
                index,
                of: of.count,
            };
            let mut own = |part, size, name: &str| {
                let name = format!("{stem}.experts.{index}.{name}");
                self.matrix(Role::Layer(i, part), size, &name, None)
            };
            let [gate, up, down] = names;
            experts.push([
                own(LayerRole::ExpertGate(nth), [of.width, c], gate)?,
                own(LayerRole::ExpertUp(nth), [of.width, c], up)?,
                own(LayerRole::ExpertDown(nth), [c, of.width], down)?,
            ]);
        }
        Ok(ExpertWeights { router, experts })
    }

    /// Whether a file's rows lie by neighbours and ours by halves.
    fn turned(&self, layer: usize, part: LayerRole) -> bool {
        let pairs = self.config.ropes[self.config.layers[layer].rope].pairs;
        pairs == RopePairs::Adjacent && matches!(part, LayerRole::Query | LayerRole::Key)
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
                    self.first.push(FirstTensor { tensor, heads });
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
        let nth = TARGETS.iter().position(|(of, _, _)| *of == part)?;
        let is_target = self.targets.iter().any(|name| name == TARGETS[nth].2);
        let is_adapted = self.method != Method::Full && is_target && layer >= self.adapted_from;
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
        self.of_tensor(FirstTensor { tensor, heads }, n, name)
            .map(Some)
    }

    fn vector(&mut self, role: Role, n: usize, name: &str) -> Result<VectorParameter, Error> {
        let tensor = self.source.weight(self.config.family, role)?;
        let heads = None;
        self.of_tensor(FirstTensor { tensor, heads }, n, name.to_owned())
    }

    /// A norm or a bias of `n` numbers, trained or not.
    fn of_tensor(
        &mut self,
        stored: FirstTensor,
        n: usize,
        name: String,
    ) -> Result<VectorParameter, Error> {
        check(&stored.tensor, &[n])?;
        if self.method != Method::Full {
            return Ok(VectorParameter::Fixed(stored.values()));
        }
        let range = self.slot(name, vec![n]);
        self.first.push(stored);
        Ok(VectorParameter::Trained(range))
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
