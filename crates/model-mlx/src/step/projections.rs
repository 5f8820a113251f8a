//! Norms over all query heads and over all key heads, whichever ranks hold them.
//!
//! Ranks of a stage gather the sums of squares of each head that they hold, in f32. A KV head that
//! two ranks hold counts once.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::backend::HeadRanges;
use paceline_model::{Error, Links};

use super::{Step, weights};

impl Step<'_> {
    /// Norms this rank's queries and keys in place; collective where ranks share the layer.
    pub(super) fn norm_over_heads(
        &mut self,
        own: Option<&weights::Attention>,
    ) -> Result<(), Error> {
        let cut = self.layer().1;
        let links = self.parts.model.links.as_ref();
        let Some(links) = links.filter(|_| cut.heads_by_rank.len() > 1) else {
            return self.norm_whole(own);
        };
        let squares = self.gathered_squares(links, &cut.heads_by_rank)?;
        let (Some(own), Some(query)) = (own, self.query.take()) else {
            return Ok(());
        };
        let shape = self.layer().0;
        let places = places(&cut.heads_by_rank);
        let [of_heads, of_keys] = &places;
        let query_factor = self.factor(&squares, of_heads, shape.head_dim)?;
        self.query = Some(self.scaled(&query, &query_factor, own.query_norm.as_ref())?);
        if let Some([key, value]) = self.key_value.take() {
            let factor = self.factor(&squares, of_keys, shape.head_dim)?;
            let key = self.scaled(&key, &factor, own.key_norm.as_ref())?;
            self.key_value = Some([key, value]);
        }
        Ok(())
    }

    /// The same on a rank that has all heads.
    fn norm_whole(&mut self, own: Option<&weights::Attention>) -> Result<(), Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let Some(own) = own else { return Ok(()) };
        let keys = self.key_value.as_mut().map(|[key, _]| key);
        let pairs = [
            (self.query.as_mut(), &own.query_norm),
            (keys, &own.key_norm),
        ];
        for (x, weight) in pairs {
            if let (Some(x), Some(weight)) = (x, weight) {
                let shape = x.shape();
                let flat = stream.reshape(x, &[shape[0], -1])?;
                let normed = stream.rms_norm(&flat, weight, eps)?;
                *x = stream.reshape(&normed, &shape)?;
            }
        }
        Ok(())
    }

    /// Sums of squares (T, all that ranks hold): of each rank its heads, then its KV heads.
    fn gathered_squares(&mut self, links: &Links, by_rank: &[HeadRanges]) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let squares = |x: &Array| {
            let (wide, shape) = (stream.astype(x, Dtype::F32)?, x.shape());
            let sums = stream.sum_along(&stream.multiply(&wide, &wide)?, 2)?;
            stream.reshape(&sums, &[shape[0], shape[1]])
        };
        let mine = match (&self.query, &self.key_value) {
            (Some(query), Some([key, _])) => {
                let parts = [squares(query)?, squares(key)?];
                Some(joined(stream, &parts)?)
            }
            _ => None,
        };
        let columns: Vec<usize> = by_rank.iter().map(HeadRanges::total).collect();
        let parts = self.gather_columns(links, mine.as_ref(), &columns, Dtype::F32)?;
        joined(stream, &parts)
    }

    /// `1 / sqrt(mean + eps)` of each row over the heads whose sums are in these `columns`,
    /// `(T, 1, 1)`.
    fn factor(&self, squares: &Array, columns: &[u32], dim: usize) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let elements = (columns.len() * dim) as f32;
        let indices = stream.array_u32(columns, &[columns.len() as i32])?;
        let sum = stream.sum_along(&stream.take(squares, &indices, 1)?, 1)?;
        let mean = stream.divide(&sum, &stream.scalar(elements, Dtype::F32)?)?;
        let eps = stream.scalar(self.parts.model.config.norm_eps, Dtype::F32)?;
        let factor = stream.rsqrt(&stream.add(&mean, &eps)?)?;
        Ok(stream.reshape(&factor, &[-1, 1, 1])?)
    }

    /// `x (T, heads, D)` times its factor and the weights `(heads D,)`, in the type of x.
    fn scaled(&self, x: &Array, factor: &Array, weight: Option<&Array>) -> Result<Array, Error> {
        let (stream, shape) = (self.parts.stream, x.shape());
        let wide = stream.astype(x, Dtype::F32)?;
        let mut scaled = stream.multiply(&wide, factor)?;
        if let Some(weight) = weight {
            let weight = stream.reshape(weight, &[1, shape[1], shape[2]])?;
            scaled = stream.multiply(&scaled, &weight)?;
        }
        Ok(stream.astype(&scaled, x.dtype())?)
    }
}

/// Where the sums of all heads, and of all KV heads, are among those that ranks hold: each head's
/// first holder.
fn places(by_rank: &[HeadRanges]) -> [Vec<u32>; 2] {
    let (mut heads, mut kv_heads) = (Vec::new(), Vec::new());
    let mut first = 0;
    for held in by_rank {
        for (i, head) in held.heads.clone().enumerate() {
            if head == heads.len() {
                heads.push((first + i) as u32);
            }
        }
        let behind = first + held.heads.len();
        for (i, head) in held.kv_heads.clone().enumerate() {
            if head == kv_heads.len() {
                kv_heads.push((behind + i) as u32);
            }
        }
        first += held.total();
    }
    [heads, kv_heads]
}

/// Parts `(T, n)` side by side.
pub(super) fn joined(stream: &Stream, parts: &[Array]) -> Result<Array, Error> {
    let parts: Vec<&Array> = parts.iter().collect();
    Ok(stream.concatenate(&parts, 1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kv_head_that_two_ranks_hold_counts_once() {
        let held = |heads, kv_heads| HeadRanges { heads, kv_heads };
        let by_rank = [held(0..3, 0..2), held(0..0, 0..0), held(3..6, 1..3)];
        let [heads, kv_heads] = places(&by_rank);
        assert_eq!(heads, [0, 1, 2, 5, 6, 7]);
        assert_eq!(kv_heads, [3, 4, 9]);
    }
}
