//! Weights of latent attention: parts that every rank of a stage has, and the expansions of its own
//! heads.

use std::ops::Range;

use paceline_base::{BlockType, KernelClass};
use paceline_tensor::{PackOptions, PackedMatrix, StoredMatrix};

use super::{Indexer, Linear, ShardLoader, StoredTensor, pack_error};
use crate::{Error, LayerRole, Nth, Role, config};

/// Projections to keys and values, and each head's expansions; [`Part`] has the shapes.
#[derive(Debug)]
pub(crate) struct Latent {
    /// Compression of queries, with its norm.
    pub(crate) query_down: Option<(Linear, Vec<f32>)>,
    pub(crate) down: Linear,
    pub(crate) norm: Vec<f32>,
    /// `(latent, plain)` of each of this rank's heads.
    pub(crate) keys: Vec<PackedMatrix>,
    /// `(value, latent)` of each of this rank's heads.
    pub(crate) values: Vec<PackedMatrix>,
    /// Where the layer has one of its own.
    pub(crate) indexer: Option<Indexer>,
    /// `(H V, C)`: gates of the attention output, of this rank's heads.
    pub(crate) gate: Option<Linear>,
}

impl ShardLoader<'_> {
    /// This rank's query heads.
    pub(super) fn latent_query(
        &self,
        layer: usize,
        latent: config::Latent,
    ) -> Result<Linear, Error> {
        let (shape, heads) = (&self.config.layers[layer], &self.shard.layer(layer).heads);
        let dim = latent.query_dim();
        let (part, cols) = match latent.query_rank {
            Some(rank) => (LayerRole::QueryUp, rank),
            None => (LayerRole::Query, self.config.width),
        };
        let all = [shape.heads * dim, cols];
        let mine = heads.start * dim..heads.end * dim;
        self.rows(Role::Layer(layer, part), all, mine)
    }

    /// Loads the shared parts, and the expansions of this rank's heads.
    pub(super) fn latent(&self, layer: usize, latent: config::Latent) -> Result<Latent, Error> {
        let heads = self.shard.layer(layer).heads.clone();
        let rows = |part, rows| {
            let shape = [rows, self.config.width];
            self.rows(Role::Layer(layer, part), shape, 0..rows)
        };
        let norm = |part, n| self.names.norm(Role::Layer(layer, part), n);
        let gate = || {
            let dim = latent.value_dim;
            let all = [self.config.layers[layer].heads * dim, self.config.width];
            let mine = heads.start * dim..heads.end * dim;
            self.rows(Role::Layer(layer, LayerRole::AttentionGate), all, mine)
        };
        let query_down = latent.query_rank.map(|rank| {
            let down = rows(LayerRole::QueryDown, rank)?;
            Ok::<_, Error>((down, norm(LayerRole::QueryDownNorm, rank)?))
        });
        let keys = heads.clone().map(|head| self.key_up(layer, latent, head));
        let values = heads.clone().map(|head| self.value_up(layer, latent, head));
        Ok(Latent {
            query_down: query_down.transpose()?,
            down: rows(LayerRole::LatentDown, latent.key_dim())?,
            norm: norm(LayerRole::LatentNorm, latent.rank)?,
            keys: keys.collect::<Result<_, Error>>()?,
            values: values.collect::<Result<_, Error>>()?,
            indexer: self.indexer(layer, latent)?,
            gate: latent.gated.then(gate).transpose()?,
        })
    }

    /// A head's map of queries into the latent space, `(latent, plain)`.
    fn key_up(
        &self,
        layer: usize,
        latent: config::Latent,
        head: usize,
    ) -> Result<PackedMatrix, Error> {
        let (heads, shape) = (self.config.layers[layer].heads, [latent.rank, latent.plain]);
        let role = Role::Layer(
            layer,
            LayerRole::KeyUp(Nth {
                index: head,
                of: heads,
            }),
        );
        if !self.is_joined(layer) {
            return self.of_head(role, shape, 0..shape[0]);
        }
        let role = Role::Layer(layer, LayerRole::LatentUp);
        let dim = latent.plain + latent.value_dim;
        let both = self.names.located(role, [heads * dim, latent.rank])?;
        let rows = head * dim..head * dim + latent.plain;
        let own = both.row_range(rows).arrived()?;
        let (block_type, bytes) = own.turned(shape);
        let stored = StoredMatrix {
            block_type,
            rows: shape[0],
            cols: shape[1],
            bytes: &bytes,
        };
        let options = PackOptions {
            leaf_cols: latent.plain,
            as_f32: self.class == KernelClass::CpuF32,
        };
        let packed = PackedMatrix::new(stored, options, self.pool);
        packed.map_err(|source| pack_error(own.name(), source))
    }

    /// A head's expansion of the latent space to a value, `(value, latent)`.
    fn value_up(
        &self,
        layer: usize,
        latent: config::Latent,
        head: usize,
    ) -> Result<PackedMatrix, Error> {
        let (heads, shape) = (
            self.config.layers[layer].heads,
            [latent.value_dim, latent.rank],
        );
        let role = Role::Layer(
            layer,
            LayerRole::ValueUp(Nth {
                index: head,
                of: heads,
            }),
        );
        if !self.is_joined(layer) {
            return self.of_head(role, shape, 0..shape[0]);
        }
        let role = Role::Layer(layer, LayerRole::LatentUp);
        let dim = latent.plain + latent.value_dim;
        let mine = head * dim + latent.plain..(head + 1) * dim;
        self.of_head(role, [heads * dim, latent.rank], mine)
    }

    /// Whether a layer's expansions to keys and values are one matrix.
    fn is_joined(&self, layer: usize) -> bool {
        let role = Role::Layer(layer, LayerRole::LatentUp);
        self.names.source.has_any(self.config.family, role)
    }

    /// Packs rows of a matrix, with all columns as one leaf.
    pub(super) fn of_head(
        &self,
        role: Role,
        shape: [usize; 2],
        rows: Range<usize>,
    ) -> Result<PackedMatrix, Error> {
        self.packed(role, shape, (rows, 0..shape[1]), |stored, mut options| {
            options.leaf_cols = shape[1];
            self.matrix(stored, 0..stored.cols, options)
        })
    }
}

impl StoredTensor {
    /// Transposes a matrix of `rows` rows and `cols` columns. `[cols, rows]` is the shape of the
    /// result. Floats keep their type, other types become f32.
    fn turned(&self, [cols, rows]: [usize; 2]) -> (BlockType, Vec<u8>) {
        if let Self::Whole(tensor) = self
            && tensor.block_type.is_float()
        {
            let size = tensor.block_type.bytes();
            let mut out = vec![0; tensor.bytes.len()];
            for (i, element) in tensor.bytes.chunks_exact(size).enumerate() {
                let at = (i % cols * rows + i / cols) * size;
                out[at..at + size].copy_from_slice(element);
            }
            return (tensor.block_type, out);
        }
        let (mut out, mut row) = (vec![0; 4 * rows * cols], vec![0.0; cols]);
        for i in 0..rows {
            self.row(i as u32, &mut row);
            for (j, x) in row.iter().enumerate() {
                let at = 4 * (j * rows + i);
                out[at..at + 4].copy_from_slice(&x.to_le_bytes());
            }
        }
        (BlockType::F32, out)
    }
}
