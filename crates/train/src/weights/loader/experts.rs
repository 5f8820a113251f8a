//! Reads the experts of a layer: with a tensor for each matrix, or from stacks of all.

use std::ops::Range;

use paceline_model::{Experts, LayerRole, LayerShape, ModelFamily, ModelSource, Nth, Role};

use super::super::{
    EXPERTS, ExpertWeights, FirstTensor, Matrix, MatrixStorage, Method, VectorParameter, values_of,
};
use super::{WeightLoader, check};
use crate::error::Error;

/// Numbers of adapters of experts begin here, behind those of any other matrices.
pub(super) const FIRST_OF_EXPERTS: u64 = 1 << 63;

/// The number of an expert's matrix in its layer; the shared one is behind the others.
pub(super) fn expert_number(shape: &LayerShape, part: LayerRole) -> Option<u64> {
    let shared = shape.experts?.count;
    let (expert, kind) = match part {
        LayerRole::ExpertGate(nth) => (nth.index, 0),
        LayerRole::ExpertUp(nth) => (nth.index, 1),
        LayerRole::ExpertDown(nth) => (nth.index, 2),
        LayerRole::SharedGate => (shared, 0),
        LayerRole::SharedUp => (shared, 1),
        LayerRole::SharedDown => (shared, 2),
        _ => return None,
    };
    Some((3 * expert + kind) as u64)
}

impl WeightLoader<'_> {
    /// The experts of a layer, under the names of their family's files.
    pub(super) fn experts(&mut self, i: usize, of: Experts) -> Result<ExpertWeights, Error> {
        let family = self.config.family;
        let (block, router, names) = match family {
            ModelFamily::Mixtral => ("block_sparse_moe", "gate", ["w1", "w3", "w2"]),
            ModelFamily::GptOss => ("mlp", "router", ["gate_proj", "up_proj", "down_proj"]),
            _ => ("mlp", "gate", ["gate_proj", "up_proj", "down_proj"]),
        };
        let (c, stem) = (self.config.width, format!("model.layers.{i}.{block}"));
        let role = |part| Role::Layer(i, part);
        let name = format!("{stem}.{router}");
        let router = self.matrix(role(LayerRole::Router), [of.count, c], &name, None)?;
        let choice = match of.corrected {
            true => {
                let name = format!("{name}.e_score_correction_bias");
                Some(self.vector(role(LayerRole::RouterChoice), of.count, &name)?)
            }
            false => None,
        };
        self.check_adapters(&format!("{stem}.experts.0.{}.weight", names[0]))?;
        let mut experts = match family {
            ModelFamily::GptOss => self.stacked_experts(i, of, &stem)?,
            _ => self.separate_experts(i, of, &stem, names)?,
        };
        let mut shared_gate = None;
        if of.shared > 0 {
            let deepseek = family == ModelFamily::DeepSeek;
            let name = if deepseek {
                "shared_experts"
            } else {
                "shared_expert"
            };
            let mut own = |part, size, last: &str| {
                self.matrix(role(part), size, &format!("{stem}.{name}.{last}"), None)
            };
            experts.push([
                own(LayerRole::SharedGate, [of.shared, c], "gate_proj")?,
                own(LayerRole::SharedUp, [of.shared, c], "up_proj")?,
                own(LayerRole::SharedDown, [c, of.shared], "down_proj")?,
            ]);
            if of.shared_gate {
                let name = format!("{stem}.shared_expert_gate");
                let part = LayerRole::SharedRouter;
                shared_gate = Some(self.matrix(role(part), [1, c], &name, None)?);
            }
        }
        Ok(ExpertWeights {
            router,
            choice,
            experts,
            shared_gate,
        })
    }

    /// Whether experts can have adapters: each matrix has a tensor of its own, as the first one of
    /// the name `first`.
    fn check_adapters(&self, first: &str) -> Result<(), Error> {
        let is_asked = self.targets.iter().any(|name| name == EXPERTS);
        let is_apart = match self.source {
            ModelSource::Hf(folder) => folder.info(first).is_some(),
            ModelSource::Gguf(_) => false,
        };
        if !is_asked || is_apart || self.method == Method::Full {
            return Ok(());
        }
        let expected = format!("others: the model has no {first}, and stacks have no adapters");
        Err(Error::Option {
            option: "--targets",
            got: EXPERTS.to_owned(),
            expected,
        })
    }

    /// Experts with a tensor for each matrix.
    fn separate_experts(
        &mut self,
        i: usize,
        of: Experts,
        stem: &str,
        names: [&str; 3],
    ) -> Result<Vec<[Matrix; 3]>, Error> {
        let mut experts = Vec::with_capacity(of.count + 1);
        for index in 0..of.count {
            let parts = expert_parts(self.config.width, of, index);
            let mut own = |n: usize| {
                let (part, size) = parts[n];
                let name = format!("{stem}.experts.{index}.{}", names[n]);
                self.matrix(Role::Layer(i, part), size, &name, None)
            };
            experts.push([own(0)?, own(1)?, own(2)?]);
        }
        Ok(experts)
    }

    /// Experts with biases, whose trained values are a tensor for all of a kind, as in folders that
    /// MLX wrote.
    fn stacked_experts(
        &mut self,
        i: usize,
        of: Experts,
        stem: &str,
    ) -> Result<Vec<[Matrix; 3]>, Error> {
        let mut kinds = Vec::with_capacity(3);
        for (kind, name) in ["gate_proj", "up_proj", "down_proj"].iter().enumerate() {
            let name = format!("{stem}.experts.{name}");
            kinds.push(self.stack(i, of, kind, &name)?.into_iter());
        }
        let mut next = |kind: usize| kinds[kind].next();
        let all = (0..of.count).map(|_| Some([next(0)?, next(1)?, next(2)?]));
        Ok(all.map(|own| own.expect("a matrix of each kind")).collect())
    }

    /// The gates, ups or downs of all experts, with their biases.
    fn stack(
        &mut self,
        i: usize,
        of: Experts,
        kind: usize,
        name: &str,
    ) -> Result<Vec<Matrix>, Error> {
        let family = self.config.family;
        let (first, [rows, cols]) = expert_parts(self.config.width, of, 0)[kind];
        let biases = self.source.expert_biases(family, Role::Layer(i, first))?;
        let (biases, start, step) = match biases {
            Some(found) => found,
            None => (self.source.bias(family, Role::Layer(i, first))?, 0, 1),
        };
        check(&biases, &[of.count, rows * step])?;
        let biases = values_of(&biases, None);
        let biases: Vec<f32> = biases.into_iter().skip(start).step_by(step).collect();
        let mut tensors = Vec::with_capacity(of.count);
        for index in 0..of.count {
            let (part, size) = expert_parts(self.config.width, of, index)[kind];
            let tensor = self.source.weight(family, Role::Layer(i, part))?;
            check(&tensor, &size)?;
            tensors.push(tensor);
        }
        let matrix = |kept, bias| Matrix {
            kept,
            rows,
            cols,
            bias: Some(bias),
            pair: None,
        };
        if self.method != Method::Full {
            let own = tensors.into_iter().zip(biases.chunks(rows));
            let own = own.map(|(tensor, bias)| {
                let bias = VectorParameter::Fixed(bias.to_vec());
                let mut own = matrix(MatrixStorage::Stored(tensor, None), bias);
                if self.method == Method::Lora {
                    own.kept = MatrixStorage::Fixed(self.unpacked(&own));
                }
                own
            });
            return Ok(own.collect());
        }
        let all = self.slot(format!("{name}.weight"), vec![of.count, rows, cols]);
        self.first.push(FirstTensor::Stack(tensors));
        let bias = self.slot(format!("{name}.bias"), vec![of.count, rows]);
        self.first.push(FirstTensor::Plain(biases));
        let part = |range: &Range<usize>, n: usize, index: usize| {
            range.start + index * n..range.start + (index + 1) * n
        };
        let own = (0..of.count).map(|index| {
            let own_bias = VectorParameter::Trained(part(&bias, rows, index));
            let own = MatrixStorage::Trained(part(&all, rows * cols, index));
            matrix(own, own_bias)
        });
        Ok(own.collect())
    }
}

/// Gate, up and down of an expert, and their sizes.
fn expert_parts(width: usize, of: Experts, index: usize) -> [(LayerRole, [usize; 2]); 3] {
    let nth = Nth {
        index,
        of: of.count,
    };
    [
        (LayerRole::ExpertGate(nth), [of.width, width]),
        (LayerRole::ExpertUp(nth), [of.width, width]),
        (LayerRole::ExpertDown(nth), [width, of.width]),
    ]
}
