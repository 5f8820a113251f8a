//! Weights of a memory of n-grams; whole on every rank. Tables stay in the files.

use paceline_tensor::PackedMatrix;

use super::loader::ShardLoader;
use super::stored::StoredTensor;
use crate::config::{NgramTable, Ngrams};
use crate::{Error, LayerRole, ModelFamily, Role};

/// Letters: S streams of C elements, E elements of the rows of a position.
#[derive(Debug)]
pub(crate) struct NgramMemory {
    /// Parts of the table, each with its first row.
    parts: Vec<(usize, StoredTensor)>,
    /// `(S C, E)`
    pub(crate) keys: PackedMatrix,
    /// `(C, E)`
    pub(crate) values: PackedMatrix,
    /// `(S C,)`: norms of streams.
    pub(crate) query_norm: Vec<f32>,
    /// `(S C,)`: norms of keys.
    pub(crate) key_norm: Vec<f32>,
    /// Norms `(S C,)` of the convolution's inputs, and its taps `(taps, S C)`.
    pub(crate) conv: Option<(Vec<f32>, Vec<f32>)>,
}

impl NgramMemory {
    pub(crate) fn matrices(&self) -> [&PackedMatrix; 2] {
        [&self.keys, &self.values]
    }

    /// Row `row` of the table, `(D,)`.
    pub(crate) fn row(&self, row: u32, out: &mut [f32]) {
        let row = row as usize;
        let part = self.parts.partition_point(|(first, _)| *first <= row) - 1;
        let (first, part) = &self.parts[part];
        part.row((row - first) as u32, out);
    }
}

impl ShardLoader<'_> {
    /// The memory of a layer; `None` where it has none.
    pub(super) fn ngram_memory(&self, layer: usize) -> Result<Option<NgramMemory>, Error> {
        let Some(of) = &self.config.ngrams else {
            return Ok(None);
        };
        let Some(table) = of.table(layer) else {
            return Ok(None);
        };
        let (width, all, e) = (self.config.width, self.config.residual_width(), of.width());
        let role = |part| Role::Layer(layer, part);
        let is_joined = self.config.family == ModelFamily::DeepSeek4;
        let (keys, values) = match is_joined {
            true => (all + width, all..all + width),
            false => (all, 0..width),
        };
        let value_rows = if is_joined { keys } else { width };
        let norm = |part| match is_joined {
            true => self.names.table(role(part), [all / width, width]),
            false => self.names.norm(role(part), all),
        };
        let conv = || {
            let channels: Vec<usize> = (0..all).collect();
            let taps = role(LayerRole::NgramTaps);
            let taps = self.names.taps_of(taps, [all, of.taps], &channels)?;
            Ok::<_, Error>((norm(LayerRole::NgramConvNorm)?, taps))
        };
        let key = self.rows(role(LayerRole::NgramKey), [keys, e], 0..all)?;
        let value = self.rows(role(LayerRole::NgramValue), [value_rows, e], values)?;
        Ok(Some(NgramMemory {
            parts: self.ngram_table(of, table)?,
            keys: key.matrix,
            values: value.matrix,
            query_norm: norm(LayerRole::NgramQueryNorm)?,
            key_norm: norm(LayerRole::NgramKeyNorm)?,
            conv: (of.taps > 0).then(conv).transpose()?,
        }))
    }

    /// The parts of a table: one, or as many as the folder has, of equal heights but for the last.
    fn ngram_table(
        &self,
        of: &Ngrams,
        table: &NgramTable,
    ) -> Result<Vec<(usize, StoredTensor)>, Error> {
        let (source, family) = (self.names.source, self.config.family);
        let part = |i| Role::Layer(table.layer, LayerRole::NgramTablePart(i));
        if !source.has_any(family, part(0)) {
            let role = Role::Layer(table.layer, LayerRole::NgramTable);
            let whole = self.names.as_stored(role, [table.rows, of.dim])?;
            return Ok(vec![(0, whole)]);
        }
        let (mut parts, mut first) = (Vec::new(), 0);
        while first < table.rows {
            let role = part(parts.len());
            let rows = match source.quantised(family, role)? {
                Some(matrix) => matrix.rows,
                None => *source.weight(family, role)?.shape.first().unwrap_or(&0),
            };
            let rows = rows.clamp(1, table.rows - first);
            parts.push((first, self.names.as_stored(role, [rows, of.dim])?));
            first += rows;
        }
        Ok(parts)
    }
}
