//! Weights by role, checked against the configuration and not yet packed.
//!
//! All backends read their files with [`WeightReader`].

use std::borrow::Cow;

use paceline_tensor::storage;
use paceline_weights::tensor::Tensor;

use super::stored::StoredTensor;
use crate::rope::{LongContext, LongFrequencies, MIN_DIVISOR};
use crate::{Config, Error, Experts, LayerRole, ModelFamily, ModelSource, Nth, Role};

/// Reads a model's weights by role, checked against its configuration.
#[derive(Clone, Copy, Debug)]
pub struct WeightReader<'a> {
    pub source: &'a ModelSource,
    pub config: &'a Config,
}

impl WeightReader<'_> {
    fn family(&self) -> ModelFamily {
        self.config.family
    }

    /// A matrix `(out, in)` without a copy. Waits until all of it is downloaded, so that later
    /// reads do not block.
    pub fn as_stored(&self, role: Role, shape: [usize; 2]) -> Result<StoredTensor, Error> {
        self.located(role, shape)?.arrived()
    }

    /// As [`as_stored`](Self::as_stored), without waiting for a download.
    pub fn located(&self, role: Role, shape: [usize; 2]) -> Result<StoredTensor, Error> {
        if let Some(matrix) = self.source.quantised(self.family(), role)? {
            let got = [matrix.rows, matrix.cols];
            check_sizes(&matrix.name, &got, &shape)?;
            return Ok(StoredTensor::Mlx(matrix));
        }
        self.matrix(role, shape).map(StoredTensor::Whole)
    }

    /// A matrix `(out, in)` as one tensor; MLX's parts are joined in memory.
    pub(crate) fn matrix(&self, role: Role, shape: [usize; 2]) -> Result<Tensor, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        check_shape(&tensor, &shape)?;
        Ok(tensor)
    }

    /// Bias `(n,)` of a matrix. Required for queries, keys and values of qwen2 and for more of
    /// gpt-oss; optional in other files.
    pub fn bias(&self, role: Role, n: usize) -> Result<Option<Vec<f32>>, Error> {
        let needed = match role {
            Role::Layer(_, LayerRole::Query | LayerRole::Key | LayerRole::Value) => {
                self.family().has_qkv_biases()
            }
            // Its name is that of the choice bias.
            Role::Layer(_, LayerRole::Router) if self.family() == ModelFamily::DeepSeek4 => {
                return Ok(None);
            }
            Role::Layer(_, LayerRole::AttentionOutput | LayerRole::Router) => {
                self.family().has_sinks_and_biases()
            }
            _ => false,
        };
        let bias = if needed {
            Some(self.source.bias(self.family(), role)?)
        } else {
            self.source.opt_bias(self.family(), role)?
        };
        bias.map(|bias| vector(&bias, n)).transpose()
    }

    /// Bias `(n,)` of one expert's matrix.
    pub fn expert_bias(&self, role: Role, nth: Nth, n: usize) -> Result<Option<Vec<f32>>, Error> {
        let Some((biases, first, step)) = self.source.expert_biases(self.family(), role)? else {
            return match self.family().has_sinks_and_biases() {
                true => self.source.bias(self.family(), role).map(|_| None),
                false => Ok(None),
            };
        };
        check_shape(&biases, &[nth.of, n * step])?;
        let mut all = vec![0.0; n * step];
        let row = biases.bytes.len() / nth.of;
        let own = biases.bytes.slice(nth.index * row..(nth.index + 1) * row);
        let own = own.expect("a row of the matrix").arrived()?;
        storage::dequantise(biases.block_type, &own, &mut all);
        Ok(Some(all.into_iter().skip(first).step_by(step).collect()))
    }

    /// A vector `(n,)` of finite numbers.
    pub fn finite(&self, role: Role, n: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        finite_vector(&tensor, n)
    }

    /// A matrix of finite numbers, unpacked.
    pub fn table(&self, role: Role, shape: [usize; 2]) -> Result<Vec<f32>, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        check_shape(&tensor, &shape)?;
        let n = shape[0] * shape[1];
        let shape = vec![n];
        finite_vector(&Tensor { shape, ..tensor }, n)
    }

    /// The experts of each token, `(vocabulary, k)`, different ones for a token.
    pub fn expert_table(&self, layer: usize, of: Experts) -> Result<Vec<u32>, Error> {
        let role = Role::Layer(layer, LayerRole::ExpertTable);
        let (name, bytes) = self.source.integers(self.family(), role)?;
        let n = self.config.vocab * of.used;
        let ids: Option<Vec<u32>> = match bytes.len() / n {
            8 => {
                let ids = bytes.as_chunks().0.iter();
                ids.map(|id| u32::try_from(i64::from_le_bytes(*id)).ok())
                    .collect()
            }
            4 => {
                let ids = bytes.as_chunks().0.iter();
                Some(ids.map(|id| u32::from_le_bytes(*id)).collect())
            }
            _ => None,
        };
        let fits = |row: &[u32]| {
            let is_new = |i: usize| row[..i].iter().all(|id| *id != row[i]);
            (0..row.len()).all(|i| (row[i] as usize) < of.count && is_new(i))
        };
        let fit = |ids: &Vec<u32>| ids.len() == n && ids.chunks_exact(of.used).all(fits);
        ids.filter(fit).ok_or_else(|| Error::Value {
            field: "experts of each token",
            got: name,
            expected: format!("{} different ones of {} for each", of.used, of.count).into(),
        })
    }

    /// Refuses a router `(experts, C)` with weights or biases that are not finite: its choice would
    /// depend on the processor.
    pub fn check_router(&self, role: Role, shape: [usize; 2]) -> Result<(), Error> {
        let stored = self.as_stored(role, shape)?;
        let bad = |values: &[f32]| values.iter().copied().find(|x| !x.is_finite());
        let mut row = vec![0.0; shape[1]];
        let rows = (0..shape[0] as u32).map(|expert| {
            stored.row(expert, &mut row);
            bad(&row)
        });
        let weight = rows.flatten().next();
        let bias = self.bias(role, shape[0])?;
        match weight.or_else(|| bad(bias.as_deref().unwrap_or(&[]))) {
            None => Ok(()),
            Some(got) => Err(Error::NotFinite {
                name: stored.name().to_owned(),
                got,
            }),
        }
    }

    /// Whether heads have norms.
    pub fn norms_heads(&self, layer: usize) -> Result<bool, Error> {
        match self.config.head_norms {
            Some(norms) => Ok(norms),
            None => {
                let role = Role::Layer(layer, LayerRole::QueryNorm);
                Ok(self.source.opt_weight(self.family(), role)?.is_some())
            }
        }
    }

    /// Weights `(n,)` of a norm.
    pub fn norm(&self, role: Role, n: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        let mut weights = vector(&tensor, n)?;
        if self.config.norm_offset != 0.0 {
            weights
                .iter_mut()
                .for_each(|w| *w += self.config.norm_offset);
        }
        if role == Role::OutputNorm && self.config.logit_scale != 1.0 {
            let scale = self.config.logit_scale;
            weights.iter_mut().for_each(|w| *w *= scale);
        }
        Ok(weights)
    }

    /// Weights and biases `(n,)` of a norm that subtracts the mean.
    pub fn layer_norm(&self, role: Role, n: usize) -> Result<[Vec<f32>; 2], Error> {
        let bias = self.bias(role, n)?.unwrap_or_else(|| vec![0.0; n]);
        Ok([self.norm(role, n)?, bias])
    }

    /// Weights of the router's own norm, with its divisor.
    pub fn router_norm(&self, layer: usize) -> Result<Vec<f32>, Error> {
        let width = self.config.width;
        let scale = self.finite(Role::Layer(layer, LayerRole::RouterScale), width)?;
        let root = 1.0 / (width as f32).sqrt();
        Ok(scale.into_iter().map(|x| x * root).collect())
    }

    /// Factor of a layer's residual, if the file has one.
    pub fn output_scale(&self, layer: usize) -> Result<Option<f32>, Error> {
        let role = Role::Layer(layer, LayerRole::OutputScale);
        match self.source.opt_weight(self.family(), role)? {
            None => Ok(None),
            Some(_) => Ok(self.finite(role, 1)?.first().copied()),
        }
    }

    /// Whether the output head is the embedding.
    pub fn is_tied(&self) -> Result<bool, Error> {
        match self.config.tied {
            Some(tied) => Ok(tied),
            None => {
                let own = self.source.opt_weight(self.family(), Role::Output)?;
                Ok(own.is_none())
            }
        }
    }
}

/// Divides the frequencies of full attention by the file's factors, if it has them: `rope_freqs`,
/// or `LongRoPE`'s factors of short and of long contexts.
pub fn read_rope_factors(source: &ModelSource, config: &mut Config) -> Result<(), Error> {
    let [usual, short, long] = [
        Role::RopeFactors,
        Role::ShortRopeFactors,
        Role::LongRopeFactors,
    ]
    .map(|role| rope_factors(source, config, role));
    let mut rope = config.ropes[0].clone();
    if let (Some(short), Some(long), Some(context)) = (short?, long?, rope.long.take()) {
        let frequencies = rope.clone().with_factors(&long).frequencies;
        rope = rope.with_factors(&short);
        rope.long = Some(LongContext {
            frequencies: LongFrequencies::Fixed(frequencies),
            ..context
        });
        config.ropes[0] = rope;
    } else if let Some(factors) = usual? {
        config.ropes[0] = rope.with_factors(&factors);
    }
    Ok(())
}

/// Factors of the frequencies of full attention, if the file has them.
fn rope_factors(
    source: &ModelSource,
    config: &Config,
    role: Role,
) -> Result<Option<Vec<f32>>, Error> {
    let Some(tensor) = source.opt_weight(config.family, role)? else {
        return Ok(None);
    };
    let pairs = config.ropes[0].frequencies.len();
    let factors = vector(&tensor, pairs)?;
    let usable = |factor: &f32| factor.is_finite() && f64::from(*factor) >= MIN_DIVISOR;
    if let Some(bad) = factors.iter().find(|factor| !usable(factor)) {
        return Err(Error::Value {
            field: "rope factor",
            got: bad.to_string(),
            expected: Cow::Borrowed("0.001 or more"),
        });
    }
    Ok(Some(factors))
}

pub(crate) fn check_shape(tensor: &Tensor, expected: &[usize]) -> Result<(), Error> {
    check_sizes(&tensor.name, &tensor.shape, expected)
}

fn check_sizes(name: &str, got: &[usize], expected: &[usize]) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape {
        name: name.to_owned(),
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}

/// As [`vector`], of finite numbers.
pub(super) fn finite_vector(tensor: &Tensor, n: usize) -> Result<Vec<f32>, Error> {
    let values = vector(tensor, n)?;
    match values.iter().find(|value| !value.is_finite()) {
        None => Ok(values),
        Some(bad) => Err(Error::NotFinite {
            name: tensor.name.clone(),
            got: *bad,
        }),
    }
}

pub(crate) fn vector(tensor: &Tensor, n: usize) -> Result<Vec<f32>, Error> {
    check_shape(tensor, &[n])?;
    let bytes = tensor.bytes.clone().arrived()?;
    let mut out = vec![0.0; n];
    storage::dequantise(tensor.block_type, &bytes, &mut out);
    Ok(out)
}
