//! Chooses the layers that a probe measures, and packs each rank's part of their matrices as the
//! model does.
//!
//! At least one layer of each kind is packed. A layer with experts has as many of them as a row
//! uses, spread over the layer, as a decode step reads them.

use std::ops::Range;

use paceline_base::{KernelClass, Rank};
use paceline_model::{
    Compressed, Config, Experts, Latent, LayerCache, LayerRole, LayerShape, LeafCut, ModelSample,
    Nth, Role, Shard, Split, shape,
};
use paceline_plan::ModelShape;
use paceline_tensor::{Kernels, PackOptions, PackedMatrix, StoredMatrix};

use super::{Result, Setting};
use crate::Error;

/// Bytes of weights packed for a probe, or all of a smaller model. Several times the last-level
/// cache of the machines at hand (32 MiB), so that they are read from memory as the model's are.
const PROBED_BYTES: u64 = 160 << 20;

/// Products with one input.
pub(super) struct ProductGroup {
    /// Columns of the input, and of a leaf of it; 0 for one leaf.
    pub(super) input: (usize, usize),
    /// Each matrix with its first column in the input.
    pub(super) matrices: Vec<(usize, PackedMatrix)>,
}

impl ProductGroup {
    /// Rows of all matrices: outputs per row of the input.
    pub(super) fn outputs(&self) -> usize {
        self.matrices.iter().map(|(_, matrix)| matrix.rows()).sum()
    }

    fn by_width(matrices: Vec<PackedMatrix>) -> Vec<Self> {
        let mut jobs: Vec<Self> = Vec::new();
        for matrix in matrices {
            let input = (matrix.cols(), 0);
            match jobs.iter_mut().find(|job| job.input == input) {
                Some(job) => job.matrices.push((0, matrix)),
                None => jobs.push(Self {
                    input,
                    matrices: vec![(0, matrix)],
                }),
            }
        }
        jobs
    }
}

/// Half of a layer: the operations before its all-reduce, and that sum.
pub(super) struct Half {
    pub(super) jobs: Vec<ProductGroup>,
    /// The products of each root of this rank's leaves; empty if experts are summed.
    pub(super) sum: ProductGroup,
    pub(super) cut: LeafCut,
    /// This rank's roots.
    pub(super) roots: usize,
}

/// Matrices of one expert.
pub(super) struct Expert {
    /// Gate and up, or the only matrix of an expert without a gate.
    pub(super) wide: Vec<PackedMatrix>,
    pub(super) down: PackedMatrix,
}

/// A rank's part of the matrices of a layer.
pub(super) struct RankLayer {
    pub(super) attention: Half,
    pub(super) feed_forward: Half,
    /// This rank's share of a row's experts.
    pub(super) experts: Vec<Expert>,
    /// A rank's average number of a row's experts, divided by the number packed.
    pub(super) even: f64,
    /// Number of layers of the shard that it represents.
    pub(super) weight: f64,
}

impl RankLayer {
    /// All groups but those of experts.
    pub(super) fn jobs(&self) -> impl Iterator<Item = &ProductGroup> {
        let halves = [&self.attention, &self.feed_forward].into_iter();
        halves.flat_map(|half| half.jobs.iter().chain([&half.sum]))
    }
}

/// Packed weights, read in the order of a step. Measured alone, a head that fits in the last-level
/// cache would be faster than it is between layers.
pub(super) struct ProbeWeights {
    pub(super) layers: Vec<RankLayer>,
    /// Rows of the head, as many as [`PROBED_BYTES`] allows for all ranks.
    pub(super) head: PackedMatrix,
    /// The rank's rows of the head, divided by the packed ones.
    pub(super) head_share: f64,
}

impl ProbeWeights {
    pub(super) fn head_rows(&self) -> usize {
        self.head.rows()
    }

    /// Packs the part of a rank.
    pub(super) fn pack(setting: Setting<'_>, kernels: &Kernels, shard: &Shard) -> Result<Self> {
        let Setting { source, config, .. } = setting;
        let (own, ranks) = (shard.vocab(), shard.stage_ranks().len());
        let (role, rows) = head_rows(setting, own.len(), ranks)?;
        let packing = Packing {
            setting,
            kernels,
            shard,
        };
        let layers = probed(&shape::of(source, config), config, shard).into_iter();
        Ok(Self {
            layers: layers
                .map(|(index, weight)| packing.layer(index, weight))
                .collect::<Result<_>>()?,
            head: packing.rows(role, own.start..own.start + rows)?,
            head_share: own.len() as f64 / rows.max(1) as f64,
        })
    }
}

/// The properties that determine a layer's matrices: layers equal in these take equally long.
fn kind(layer: &LayerShape) -> LayerShape {
    LayerShape {
        window: None,
        rope: 0,
        query_scale: 1.0,
        value_norm: false,
        ..*layer
    }
}

/// The role of the head, and the probed number of its `own` rows: as many as [`PROBED_BYTES`]
/// allows for all `ranks`.
fn head_rows(setting: Setting<'_>, own: usize, ranks: usize) -> Result<(Role, usize)> {
    let Setting { source, config, .. } = setting;
    let (role, tensor) = match source.opt_weight(config.family, Role::Output)? {
        Some(tensor) => (Role::Output, tensor),
        None => {
            let role = Role::TokenEmbedding;
            (role, source.weight(config.family, role)?)
        }
    };
    let row = (tensor.bytes.len() / tensor.rows().max(1)).max(1);
    Ok((role, own.min((PROBED_BYTES as usize / ranks / row).max(16))))
}

/// The sample of a model for one rank, and the number of layers that each of its layers represents.
pub(super) fn sampled(setting: Setting<'_>) -> Result<(ModelSample, Vec<f64>)> {
    let Setting { source, config, .. } = setting;
    let shard = Split::whole(config).shard(config, Rank(0));
    let mut layers = chosen(&shape::of(source, config), config, &shard);
    let of = |index: &usize| match config.layers[*index].cache {
        LayerCache::Of(of) => Some(of),
        _ => None,
    };
    let used: Vec<usize> = layers.iter().filter_map(of).collect();
    layers.extend(used);
    layers.sort_unstable();
    layers.dedup();
    let stands = stands(&layers, config, &shard);
    let (_, head_rows) = head_rows(setting, config.vocab, 1)?;
    Ok((ModelSample { layers, head_rows }, stands))
}

/// Probed layers of a shard, each with the number of layers it represents. Ranks of a stage choose
/// the same.
fn probed(shape: &ModelShape, config: &Config, shard: &Shard) -> Vec<(usize, f64)> {
    let chosen = chosen(shape, config, shard);
    let stands = stands(&chosen, config, shard);
    chosen.into_iter().zip(stands).collect()
}

/// The first layers of a shard, as many as [`PROBED_BYTES`] allows for all stages, but at least
/// one. The first layer of each other kind comes on top.
fn chosen(shape: &ModelShape, config: &Config, shard: &Shard) -> Vec<usize> {
    let most = (PROBED_BYTES / shard.stages as u64) as f64;
    let of = |index: usize| kind(&config.layers[index]);
    let mut chosen: Vec<usize> = Vec::new();
    let mut bytes = 0.0;
    for index in shard.layers.clone() {
        let is_new = chosen.iter().all(|other| of(*other) != of(index));
        if bytes < most || is_new {
            chosen.push(index);
            bytes += shape.read_bytes(u32::try_from(index).unwrap_or(u32::MAX));
        }
    }
    chosen
}

/// How many layers of a shard each of `chosen` represents: all of its kind, divided evenly.
fn stands(chosen: &[usize], config: &Config, shard: &Shard) -> Vec<f64> {
    let of = |index: usize| kind(&config.layers[index]);
    let weight = |index: &usize| {
        let all = shard
            .layers
            .clone()
            .filter(|other| of(*other) == of(*index));
        let probed = chosen.iter().filter(|other| of(**other) == of(*index));
        all.count() as f64 / probed.count() as f64
    };
    chosen.iter().map(weight).collect()
}

/// Packs a rank's part of a model as the model does.
struct Packing<'a> {
    setting: Setting<'a>,
    kernels: &'a Kernels,
    shard: &'a Shard,
}

impl Packing<'_> {
    /// The result of `cut` on a tensor with at least the rows and columns `least`. Releases the
    /// file's pages, as the model's loader does, so that a probe needs no more memory than the
    /// model.
    fn packed<T>(
        &self,
        role: Role,
        least: [usize; 2],
        cut: impl FnOnce(StoredMatrix<'_>, PackOptions) -> Result<T, paceline_tensor::Error>,
    ) -> Result<T> {
        let Setting { source, config, .. } = self.setting;
        let tensor = source.weight(config.family, role)?;
        if tensor.rows() < least[0] || tensor.cols() < least[1] {
            let what = "a matrix is smaller than the configuration says";
            return Err(Error::NotMeasured { what });
        }
        let whole = StoredMatrix {
            block_type: tensor.block_type,
            rows: tensor.rows(),
            cols: tensor.cols(),
            bytes: &tensor.bytes,
        };
        let options = PackOptions {
            as_f32: self.setting.class == KernelClass::CpuF32,
            leaf_cols: 0,
        };
        let packed = cut(whole, options)?;
        tensor.bytes.discard();
        Ok(packed)
    }

    fn rows(&self, role: Role, rows: Range<usize>) -> Result<PackedMatrix> {
        self.packed(role, [rows.end, 0], |whole, options| {
            PackedMatrix::new(whole.row_range(rows), options, self.kernels.pool())
        })
    }

    /// All of a matrix, in f32.
    fn in_f32(&self, role: Role) -> Result<PackedMatrix> {
        self.packed(role, [0, 0], |whole, mut options| {
            options.as_f32 = true;
            PackedMatrix::new(whole, options, self.kernels.pool())
        })
    }

    /// This rank's columns of a matrix, separately for each root of its leaves.
    fn summed(&self, role: Role, cut: &LeafCut) -> Result<ProductGroup> {
        let (first, width) = (cut.columns().start, self.setting.config.width);
        let least = [width, cut.columns().end];
        let matrices = self.packed(role, least, |whole, mut options| {
            options.leaf_cols = cut.leaf_cols;
            let whole = whole.row_range(0..width);
            let root = |columns: Range<usize>| {
                let first_col = columns.start - first;
                let packed =
                    PackedMatrix::of_columns(whole, columns, options, self.kernels.pool())?;
                Ok((first_col, packed))
            };
            cut.root_columns().into_iter().map(root).collect()
        })?;
        Ok(ProductGroup {
            input: (cut.columns().len(), cut.leaf_cols),
            matrices,
        })
    }

    fn layer(&self, index: usize, weight: f64) -> Result<RankLayer> {
        let (layer, cut) = (&self.setting.config.layers[index], self.shard.layer(index));
        let half = |jobs, sum, cut: &LeafCut| Half {
            jobs,
            sum,
            roots: cut.root_columns().len(),
            cut: cut.clone(),
        };
        let inputs = match (layer.cache, layer.latent) {
            (LayerCache::Delta(_), _) => self.delta(index)?,
            (_, Some(latent)) => self.latent(index, latent)?,
            (LayerCache::Compressed(of), _) => self.compressed(index, of)?,
            _ => self.heads(index)?,
        };
        let output = self.summed(Role::Layer(index, layer.output_role()), &cut.attention)?;
        let (wide, down) = self.feed_forward(index)?;
        let (experts, even) = match layer.experts {
            Some(of) => self.experts(index, of, cut.ffn())?,
            None => (Vec::new(), 1.0),
        };
        Ok(RankLayer {
            attention: half(ProductGroup::by_width(inputs), output, &cut.attention),
            feed_forward: half(wide, down, &cut.feed_forward),
            experts,
            even,
            weight,
        })
    }

    /// Queries, keys and values.
    fn heads(&self, index: usize) -> Result<Vec<PackedMatrix>> {
        let (layer, cut) = (&self.setting.config.layers[index], self.shard.layer(index));
        let of = |heads: &Range<usize>, dim: usize| heads.start * dim..heads.end * dim;
        let rows = |part, rows| self.rows(Role::Layer(index, part), rows);
        let queries = (1 + usize::from(layer.gated)) * layer.head_dim;
        let [query, key, value] = layer.input_roles();
        let mut all = vec![rows(query, of(&cut.heads, queries))?];
        if !matches!(layer.cache, LayerCache::Of(_)) {
            all.push(rows(key, of(&cut.kv_heads, layer.head_dim))?);
            if !layer.keys_as_values {
                all.push(rows(value, of(&cut.kv_heads, layer.value_dim))?);
            }
        }
        Ok(all)
    }

    /// The projections of attention to compressed keys, with queries and outputs of this rank's
    /// heads.
    fn compressed(&self, index: usize, of: Compressed) -> Result<Vec<PackedMatrix>> {
        let (layer, heads) = (
            &self.setting.config.layers[index],
            &self.shard.layer(index).heads,
        );
        let (dim, each) = (layer.head_dim, layer.heads / of.groups);
        let groups = heads.start / each * of.group_rank..heads.end / each * of.group_rank;
        let mut parts = vec![
            (LayerRole::QueryDown, 0..of.query_rank),
            (LayerRole::QueryUp, heads.start * dim..heads.end * dim),
            (LayerRole::Key, 0..dim),
            (LayerRole::GroupOutput, groups),
        ];
        if let Some(runs) = of.runs {
            let series = if runs.overlaps { 2 } else { 1 };
            let mut add = |is_index, dim: usize| {
                let both = [LayerRole::RunInput(is_index), LayerRole::RunGate(is_index)];
                parts.extend(both.map(|part| (part, 0..series * dim)));
            };
            add(false, dim);
            if let Some(own) = runs.indexer {
                add(true, own.dim);
                parts.push((LayerRole::IndexerQuery, 0..own.heads * own.dim));
            }
        }
        let rows = |(part, rows)| self.rows(Role::Layer(index, part), rows);
        parts.into_iter().map(rows).collect()
    }

    /// The projections of latent attention, and the expansions of this rank's heads.
    fn latent(&self, index: usize, latent: Latent) -> Result<Vec<PackedMatrix>> {
        let (layer, heads) = (
            &self.setting.config.layers[index],
            self.shard.layer(index).heads.clone(),
        );
        let role = |part| Role::Layer(index, part);
        let dim = latent.plain + latent.turned;
        let queries = heads.start * dim..heads.end * dim;
        let shared = self.rows(role(LayerRole::LatentDown), 0..latent.rank + latent.turned)?;
        let mut all = match latent.query_rank {
            Some(rank) => vec![
                self.rows(role(LayerRole::QueryDown), 0..rank)?,
                shared,
                self.rows(role(LayerRole::QueryUp), queries)?,
            ],
            None => vec![self.rows(role(LayerRole::Query), queries)?, shared],
        };
        let Setting { source, config, .. } = self.setting;
        if source
            .opt_weight(config.family, role(LayerRole::LatentUp))?
            .is_some()
        {
            // Each head's keys and values in sequence: as many bytes as separately.
            let dim = latent.plain + latent.value_dim;
            let own = heads.start * dim..heads.end * dim;
            all.push(self.rows(role(LayerRole::LatentUp), own)?);
            return Ok(all);
        }
        for head in heads {
            let nth = Nth {
                index: head,
                of: layer.heads,
            };
            all.push(self.rows(role(LayerRole::KeyUp(nth)), 0..latent.rank)?);
            all.push(self.rows(role(LayerRole::ValueUp(nth)), 0..latent.value_dim)?);
        }
        Ok(all)
    }

    /// Queries, keys, values and gates of a gated delta net or of Mamba 2, in any layout. This
    /// rank's share of the rows.
    fn delta(&self, index: usize) -> Result<Vec<PackedMatrix>> {
        let (layer, heads) = (
            &self.setting.config.layers[index],
            self.shard.layer(index).heads.clone(),
        );
        let (keys, values) = (
            layer.kv_heads * layer.head_dim,
            layer.heads * layer.value_dim,
        );
        let own = |all: usize| {
            let row = |head: usize| all * head / layer.heads.max(1);
            row(heads.start)..row(heads.end)
        };
        let decays = match layer.cache {
            LayerCache::Delta(net) => layer.heads * net.rule.decays(layer.head_dim),
            _ => layer.heads,
        };
        let mut all = Vec::new();
        for (part, rows, is_gate) in [
            (LayerRole::Query, keys, false),
            (LayerRole::Key, keys, false),
            (LayerRole::Value, values, false),
            (LayerRole::DeltaQkvGate, 2 * (keys + values), false),
            (LayerRole::DeltaQkv, 2 * keys + values, false),
            (LayerRole::DeltaGate, values, false),
            (
                LayerRole::MambaInput,
                2 * (keys + values) + layer.heads,
                false,
            ),
            (LayerRole::DeltaStepDecay, 2 * layer.heads, true),
            (LayerRole::DeltaStep, layer.heads, true),
            (LayerRole::DeltaDecay, decays, true),
        ] {
            let Setting { source, config, .. } = self.setting;
            let role = Role::Layer(index, part);
            if source.opt_weight(config.family, role)?.is_none() {
                continue;
            }
            let (rows, pool) = (own(rows), self.kernels.pool());
            all.push(self.packed(role, [rows.end, 0], |whole, mut options| {
                options.as_f32 |= is_gate;
                PackedMatrix::new(whole.row_range(rows), options, pool)
            })?);
        }
        Ok(all)
    }

    /// The groups of a feed-forward and of a router, and the group of its all-reduce, which is
    /// empty with experts.
    fn feed_forward(&self, index: usize) -> Result<(Vec<ProductGroup>, ProductGroup)> {
        let (layer, cut) = (&self.setting.config.layers[index], self.shard.layer(index));
        let role = |part| Role::Layer(index, part);
        let nothing = ProductGroup {
            input: (self.setting.config.width, 0),
            matrices: Vec::new(),
        };
        let (mut wide, mut down) = (Vec::new(), None);
        if layer.has_dense() {
            let columns = cut.dense().columns();
            wide.push(self.rows(role(LayerRole::Gate), columns.clone())?);
            if self.setting.config.family.has_gates() {
                wide.push(self.rows(role(LayerRole::Up), columns)?);
            }
            down = Some(self.summed(role(LayerRole::Down), cut.dense())?);
        }
        if layer.experts.is_some() {
            wide.push(self.in_f32(role(LayerRole::Router))?);
        }
        let mut jobs = ProductGroup::by_width(wide);
        if layer.dense_beside {
            // Its sum is separate from that of the experts, which is exchanged.
            jobs.extend(down.take());
        }
        Ok((jobs, down.unwrap_or(nothing)))
    }

    /// Experts among this rank's `leaves`, as many as its average of a row's, and that average
    /// divided by their number. A single rank of a stage also has the shared expert.
    fn experts(
        &self,
        index: usize,
        of: Experts,
        leaves: Range<usize>,
    ) -> Result<(Vec<Expert>, f64)> {
        let ranks = self.shard.stage_ranks().len();
        let routed = leaves.start.min(of.count)..leaves.end.min(of.count);
        let expert = |parts: [LayerRole; 3], ffn: usize| {
            let [gate, up, down] = parts.map(|part| Role::Layer(index, part));
            let config = self.setting.config;
            let mut wide = vec![self.rows(gate, 0..ffn)?];
            if config.family.has_gates() {
                wide.push(self.rows(up, 0..ffn)?);
            }
            let down = self.rows(down, 0..config.width)?;
            Ok::<_, Error>(Expert { wide, down })
        };
        let (n, even) = some_of(of, ranks, routed.len());
        let mut all = Vec::new();
        for i in 0..n {
            let nth = Nth {
                index: routed.start + i * routed.len() / n,
                of: of.count,
            };
            let parts = [
                LayerRole::ExpertGate,
                LayerRole::ExpertUp,
                LayerRole::ExpertDown,
            ]
            .map(|part| part(nth));
            all.push(expert(parts, of.width)?);
        }
        if ranks == 1 && of.shared > 0 {
            let parts = [
                LayerRole::SharedGate,
                LayerRole::SharedUp,
                LayerRole::SharedDown,
            ];
            all.push(expert(parts, of.shared)?);
        }
        Ok((all, even))
    }
}

/// The packed number of a rank's `own` routed experts, and its average number of a row's experts
/// divided by that. One rank has all of a row's experts. Several ranks divide them as whole
/// experts; the shared one counts by its width.
fn some_of(of: Experts, ranks: usize, own: usize) -> (usize, f64) {
    if ranks == 1 {
        return (of.used.min(own), 1.0);
    }
    let shared = of.shared as f64 / of.width.max(1) as f64;
    let mean = (of.used as f64 + shared) / ranks as f64;
    match (mean.round() as usize).max(1).min(own) {
        0 => (0, 1.0),
        n => (n, mean / n as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_model::Gating;

    #[test]
    fn ranks_are_measured_with_their_part_of_a_rows_experts() {
        let of = Experts {
            count: 128,
            used: 8,
            width: 768,
            gating: Gating::Softmax,
            normalised: true,
            scale: 1.0,
            corrected: false,
            shared: 0,
            shared_gate: false,
            clamp: None,
            groups: None,
            scaled: false,
            compressed: None,
        };
        assert_eq!(some_of(of, 1, 128), (8, 1.0));
        assert_eq!(some_of(of, 2, 64), (4, 1.0));
        let (n, even) = some_of(of, 3, 43);
        assert_eq!(n, 3);
        assert!((even - 8.0 / 9.0).abs() < 1e-12, "{even}");
        assert_eq!(some_of(of, 16, 8), (1, 0.5));
        assert_eq!(some_of(of, 200, 0), (0, 1.0), "ranks without experts");
        let shared = Experts { shared: 1536, ..of };
        assert_eq!(some_of(shared, 2, 64), (5, 1.0), "twice as wide as one");
    }
}
