//! Reads the experts of a layer: with a tensor for each matrix, or from stacks of all.

use std::ops::Range;

use paceline_model::{Experts, LayerRole, LayerShape, ModelFamily, Nth, Role};

use super::super::{
    ExpertWeights, FirstTensor, Matrix, MatrixStorage, Method, VectorParameter, values_of,
};
use super::{WeightLoader, check};
use crate::error::Error;
use crate::shard::share;

/// Numbers of adapters of experts begin here, behind those of any other matrices.
pub(super) const FIRST_OF_EXPERTS: u64 = 1 << 63;

/// The number of an expert's matrix in its layer; the shared one is behind the others.
pub(super) fn expert_number(shape: &LayerShape, part: LayerRole) -> Option<u64> {
    let of = shape.experts?.count;
    let index = part.expert_among(of)?;
    let parts = LayerRole::of_expert(Nth { index, of });
    let kind = parts.iter().position(|own| *own == part)?;
    Some((3 * index + kind) as u64)
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
        let mut experts = match (family, self.method) {
            (ModelFamily::GptOss, Method::Full) => self.stacked_experts(i, of, &stem)?,
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

    /// Experts under a name for each matrix, also where a file has stacks of them.
    fn separate_experts(
        &mut self,
        i: usize,
        of: Experts,
        stem: &str,
        names: [&str; 3],
    ) -> Result<Vec<[Matrix; 3]>, Error> {
        let mut experts = Vec::with_capacity(of.count + 1);
        let has_biases = self.config.family.has_sinks_and_biases();
        let of_kind = |kind| has_biases.then(|| self.expert_biases(i, of, kind));
        let biases = [
            of_kind(0).transpose()?,
            of_kind(1).transpose()?,
            of_kind(2).transpose()?,
        ];
        let here = !self.elsewhere;
        let held = match self.experts {
            Some((rank, ranks)) => share(0..of.count, rank, ranks),
            None => 0..of.count,
        };
        for index in 0..of.count {
            self.elsewhere = !(here && held.contains(&index));
            let parts = expert_parts(self.config.width, of, index);
            let mut own = |n: usize| {
                let (part, [rows, cols]) = parts[n];
                let name = format!("{stem}.experts.{index}.{}", names[n]);
                let mut own = self.matrix(Role::Layer(i, part), [rows, cols], &name, None)?;
                if let Some(biases) = &biases[n] {
                    let bias = biases[index * rows..][..rows].to_vec();
                    own.bias = Some(VectorParameter::Fixed(bias));
                }
                Ok::<_, Error>(own)
            };
            experts.push([own(0)?, own(1)?, own(2)?]);
        }
        self.elsewhere = !here;
        Ok(experts)
    }

    /// The biases of the gates, ups or downs of all experts: (E, rows).
    fn expert_biases(&self, i: usize, of: Experts, kind: usize) -> Result<Vec<f32>, Error> {
        let (first, [rows, _]) = expert_parts(self.config.width, of, 0)[kind];
        let (family, role) = (self.config.family, Role::Layer(i, first));
        let (biases, start, step) = match self.source.expert_biases(family, role)? {
            Some(found) => found,
            None => (self.source.bias(family, role)?, 0, 1),
        };
        check(&biases, &[of.count, rows * step])?;
        let biases = values_of(&biases, None).into_iter();
        Ok(biases.skip(start).step_by(step).collect())
    }

    /// Trained experts with biases: a tensor for all of a kind, as in folders that MLX wrote.
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
        let (_, [rows, cols]) = expert_parts(self.config.width, of, 0)[kind];
        let biases = self.expert_biases(i, of, kind)?;
        let mut tensors = Vec::with_capacity(of.count);
        for index in 0..of.count {
            let (part, size) = expert_parts(self.config.width, of, index)[kind];
            let tensor = self.source.weight(family, Role::Layer(i, part))?;
            check(&tensor, &size)?;
            tensors.push(tensor);
        }
        let all = self.slot(format!("{name}.weight"), vec![of.count, rows, cols]);
        self.first.push(FirstTensor::Stack(tensors));
        let bias = self.slot(format!("{name}.bias"), vec![of.count, rows]);
        self.first.push(FirstTensor::Plain(biases));
        let part = |range: &Range<usize>, n: usize, index: usize| {
            range.start + index * n..range.start + (index + 1) * n
        };
        let own = (0..of.count).map(|index| Matrix {
            kept: MatrixStorage::Trained(part(&all, rows * cols, index)),
            rows,
            cols,
            bias: Some(VectorParameter::Trained(part(&bias, rows, index))),
            pair: None,
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
    let [gate, up, down] = LayerRole::of_expert(nth);
    let wide = [of.width, width];
    [(gate, wide), (up, wide), (down, [width, of.width])]
}
