//! Sparse attention to pools and to blocks of positions, as on the CPU (`model/src/step`:
//! `pooled.rs`, `blocks.rs`).
//!
//! - A pool has one key, in the place of its last index row. A row attends to the positions of the
//!   best pools, and to those behind the last whole pool.
//! - A block has the score of its best position, by a query for each KV head. A row attends to the
//!   best blocks, always to the last ones.
//!
//! I queries of a row of X elements, n rows of a sequence, m positions in P pools or blocks.

use paceline_mlx::{Array, Dtype};
use paceline_model::{Error, PoolIndexer};
use paceline_tensor::Choice;

use super::Step;
use super::indexer::{FAR, Selected, causal};
use super::weights::{self, Layer, Mixer};

impl Step<'_> {
    /// x (T, C) -> index rows, to the cache, and the positions of each sequence.
    pub(super) fn pool_rows(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let Mixer::Attention(own) = &w.mixer else {
            return Ok(());
        };
        let (Some(own), Some(of)) = (&own.pooled, self.layer().0.pooled) else {
            return Ok(());
        };
        let (queries, keys) = self.index_inputs(own, of)?;
        self.selected.clear();
        let mut first = 0;
        for (i, s) in self.batch.sequences.iter().enumerate() {
            let (n, at) = (s.tokens.len() as i32, s.position as i32);
            let place = (i, self.held(index));
            let query = self.roped(&self.turned(&queries, first, n)?, at)?;
            let key = self.turned(&keys, first, n)?;
            let end = s.position + s.tokens.len();
            let selected = if of.choice.local > 0 {
                let key = self.roped(&key, at)?;
                self.write_pools(place, (1, &key), |_, keys, _| Ok(keys.clone()))?;
                let is_sparse = of.choice.is_sparse(end);
                let select = || self.select_blocks(of.choice, place, &query);
                is_sparse.then(select).transpose()?
            } else {
                let finish = |step: &Self, rows: &Array, first| step.pool_keys(own, rows, first);
                self.write_pools(place, (of.choice.pool, &key), finish)?;
                let stream = self.parts.stream;
                let ones = vec![1.0; s.tokens.len() * of.heads];
                let ones = stream.array_f32(&ones, &[n, of.heads as i32])?;
                self.select_pools(of.choice, place, (&query, &ones), of.dim)?
            };
            self.selected.push(selected.unwrap_or(Selected::All));
            first += n;
        }
        Ok(())
    }

    /// x (T, C) -> index queries (T, I, X), normed, and rows (T, 1, X) in f32
    fn index_inputs(
        &self,
        own: &weights::PoolIndexer,
        of: PoolIndexer,
    ) -> Result<(Array, Array), Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let (rows, dim, heads) = (self.batch.rows() as i32, of.dim as i32, of.heads as i32);
        let product = |linear| {
            let product = self.product(linear, &self.x)?;
            let wide = stream.astype(&product, Dtype::F32)?;
            Ok::<_, Error>(stream.reshape(&wide, &[rows, -1, dim])?)
        };
        let both = product(&own.query_key)?;
        let queries = stream.slice(&both, &[0; 3], &[rows, heads, dim])?;
        let queries = stream.rms_norm(&queries, &own.query_norm, eps)?;
        let keys = match &own.key {
            Some(key) => stream.rms_norm(&product(key)?, &own.key_norm, eps)?,
            None => stream.slice(&both, &[0, heads, 0], &[rows, heads + 1, dim])?,
        };
        Ok((queries, keys))
    }

    /// Keys (1, P, 1, X) of the pools from `first` on, whose rows are (1, P, pool, X): the mean,
    /// normed. It is rotated by the pool's first position.
    fn pool_keys(
        &self,
        own: &weights::PoolIndexer,
        rows: &Array,
        first: usize,
    ) -> Result<Array, Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let [_, pools, pool, dim] = rows.shape()[..] else {
            unreachable!("rows of pools");
        };
        let pool = stream.scalar(pool as f32, Dtype::F32)?;
        let mean = stream.divide(&stream.sum_along(rows, 2)?, &pool)?;
        let mean = stream.reshape(&mean, &[1, 1, pools, dim])?;
        let normed = stream.rms_norm(&mean, &own.key_norm, eps)?;
        // A pool is as many positions further: its period in pools is that much shorter.
        let key = self.roped_by(&normed, |periods, neighbours| {
            let periods = stream.divide(periods, &pool)?;
            stream.rope(&normed, &periods, neighbours, first as i32)
        })?;
        Ok(stream.reshape(&key, &[1, pools, 1, dim])?)
    }

    /// Writes the index rows (1, 1, n, X) of sequence `i` to layer `held`. The last row of each
    /// pool that ends in the step becomes the pool's key. `finish` makes it of the pools' rows
    /// (1, P, pool, X) and the number of the first pool.
    pub(super) fn write_pools(
        &mut self,
        (i, held): (usize, usize),
        (pool, rows): (usize, &Array),
        finish: impl Fn(&Self, &Array, usize) -> Result<Array, Error>,
    ) -> Result<(), Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let kind = self.parts.constants.span_kind_of[self.index];
        let span = &self.spans[i][kind];
        self.parts.cache.write_index(stream, held, span, rows)?;
        let (at, end) = (sequence.position, sequence.position + sequence.tokens.len());
        let ended = at / pool * pool..end / pool * pool;
        if pool == 1 || ended.is_empty() {
            return Ok(());
        }
        let in_pages = sequence.rows_of(self.parts.constants.span_kinds[kind].kind);
        let span = span.part(stream, &in_pages, ended)?;
        let whole = self.parts.cache.read_index_rows(stream, held, &span.view)?;
        let (sizes, pool) = (whole.shape(), pool as i32);
        let (pools, dim) = (sizes[2] / pool, sizes[3]);
        let whole = stream.reshape(&whole, &[1, pools, pool, dim])?;
        let keys = finish(self, &whole, at / pool as usize)?;
        let others = stream.slice(&whole, &[0; 4], &[1, pools, pool - 1, dim])?;
        let new = stream.concatenate(&[&others, &keys], 2)?;
        let new = stream.reshape(&new, &sizes)?;
        drop((whole, others)); // so that the update is done in place
        self.parts.cache.write_index(stream, held, &span, &new)
    }

    /// The positions that rows of sequence `i` attend to, by queries (1, I, n, X) with weights
    /// (n, I). `None` means all. Keys are the first `dim` elements of the pools' rows.
    pub(super) fn select_pools(
        &self,
        choice: Choice,
        (i, held): (usize, usize),
        (query, weights): (&Array, &Array),
        dim: usize,
    ) -> Result<Option<Selected>, Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let (at, n) = (sequence.position, sequence.tokens.len());
        if !choice.is_sparse(at + n) {
            return Ok(None);
        }
        let keys = self.pool_rows_of(choice, (i, held), dim)?;
        let scores = self.index_scores([query, &keys, weights])?;
        let (pools, pool) = (keys.shape()[2], choice.pool as i32);
        let wanted = (choice.top_k / choice.pool) as i32;
        if n == 1 {
            let best = self.best(&scores, wanted)?;
            let first = stream.reshape(&best, &[wanted, 1])?;
            let each = stream.scalar(pool as f32, Dtype::U32)?;
            let within: Vec<u32> = (0..pool as u32).collect();
            let within = stream.array_u32(&within, &[1, pool])?;
            let chosen = stream.add(&stream.multiply(&first, &each)?, &within)?;
            let chosen = stream.reshape(&chosen, &[wanted * pool])?;
            let behind: Vec<u32> = ((pools * pool) as u32..=at as u32).collect();
            let behind = stream.array_u32(&behind, &[behind.len() as i32])?;
            let all = stream.concatenate(&[&chosen, &behind], 0)?;
            return Ok(Some(Selected::Positions(all)));
        }
        let ends: Vec<f32> = (at + 1..=at + n).map(|end| end as f32).collect();
        let whole = ends.iter().map(|end| end - end % pool as f32);
        let whole: Vec<f32> = whole.collect();
        let last = (1..=pools)
            .map(|i| (i * pool - 1) as f32)
            .collect::<Vec<_>>();
        let rows = [1, 1, n as i32, 1];
        let (ends, whole) = (
            stream.array_f32(&ends, &rows)?,
            stream.array_f32(&whole, &rows)?,
        );
        let last = stream.array_f32(&last, &[1, 1, 1, pools])?;
        let seen = stream.astype(&stream.less(&last, &ends)?, Dtype::F32)?;
        let chosen = self.chosen(&scores, &seen, wanted)?;
        let m = (at + n) as i32;
        let chosen = self.each_position(&chosen, pool, m)?;
        let positions: Vec<f32> = (0..m).map(|i| i as f32).collect();
        let positions = stream.array_f32(&positions, &[1, 1, 1, m])?;
        let below = |x: &Array| stream.astype(&stream.less(&positions, x)?, Dtype::F32);
        let behind = stream.subtract(&below(&ends)?, &below(&whole)?)?;
        let half = stream.scalar(0.5, Dtype::F32)?;
        let mask = stream.less(&half, &stream.add(&chosen, &behind)?)?;
        Ok(Some(Selected::Mask(mask)))
    }

    /// The keys (1, 1, P, dim) of the whole pools of sequence `i`.
    fn pool_rows_of(
        &self,
        choice: Choice,
        (i, held): (usize, usize),
        dim: usize,
    ) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let kind = self.parts.constants.span_kind_of[self.index];
        let view = &self.spans[i][kind].view;
        let rows = self.parts.cache.read_index_rows(stream, held, view)?;
        let (sizes, pool) = (rows.shape(), choice.pool as i32);
        let (pools, all) = (sizes[2] / pool, sizes[3]);
        let whole = stream.slice(&rows, &[0; 4], &[1, 1, pools * pool, all])?;
        let whole = stream.reshape(&whole, &[1, pools, pool, all])?;
        let (start, stop) = ([0, 0, pool - 1, 0], [1, pools, pool, dim as i32]);
        let keys = stream.slice(&whole, &start, &stop)?;
        Ok(stream.reshape(&keys, &[1, 1, pools, -1])?)
    }

    /// The positions in blocks that rows of sequence `i` attend to, for each query head of this
    /// rank, by index queries (1, I, n, X).
    fn select_blocks(
        &self,
        choice: Choice,
        (i, held): (usize, usize),
        query: &Array,
    ) -> Result<Selected, Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let kind = self.parts.constants.span_kind_of[self.index];
        let view = &self.spans[i][kind].view;
        let keys = self.parts.cache.read_index_rows(stream, held, view)?;
        let (shape, cut) = self.layer();
        let (n, m, block) = (query.shape()[2], keys.shape()[2], choice.pool as i32);
        let kv_heads = cut.kv_heads.start as i32..cut.kv_heads.end as i32;
        let (start, stop) = (
            [0, kv_heads.start, 0, 0],
            [1, kv_heads.end, n, query.shape()[3]],
        );
        let query = stream.slice(query, &start, &stop)?;
        let seen = causal(self, n, m)?;
        let best = self.block_scores((&query, &keys), seen.as_ref(), block)?;
        let rows = sequence.position as i32..sequence.position as i32 + n;
        let own: Vec<f32> = rows.map(|row| (row / block) as f32).collect();
        let local: Vec<f32> = own.iter().map(|own| own - choice.local as f32).collect();
        let numbers: Vec<f32> = (0..best.shape()[3]).map(|i| i as f32).collect();
        let numbers = stream.array_f32(&numbers, &[1, 1, 1, numbers.len() as i32])?;
        let behind = |of_rows: &[f32]| {
            let of_rows = stream.array_f32(of_rows, &[1, 1, n, 1])?;
            stream.astype(&stream.less(&of_rows, &numbers)?, Dtype::F32)
        };
        let (behind, beyond) = (behind(&local)?, behind(&own)?);
        let [one, far, half] = [1.0, FAR, 0.5].map(|x| stream.scalar(x, Dtype::F32));
        let (one, far, half) = (one?, far?, half?);
        let is_local = stream.subtract(&behind, &beyond)?;
        let others = stream.multiply(&best, &stream.subtract(&one, &is_local)?)?;
        let best = stream.add(&others, &stream.multiply(&is_local, &far)?)?;
        let wanted = (choice.top_k / choice.pool) as i32;
        let chosen = self.chosen(&best, &stream.subtract(&one, &beyond)?, wanted)?;
        let mut chosen = self.each_position(&chosen, block, m)?;
        if let Some(seen) = &seen {
            chosen = stream.multiply(&chosen, seen)?;
        }
        let group = shape.heads / shape.kv_heads;
        let kv_head = |head: usize| (head / group - cut.kv_heads.start) as u32;
        let heads: Vec<u32> = cut.heads.clone().map(kv_head).collect();
        let heads = stream.array_u32(&heads, &[heads.len() as i32])?;
        let mask = stream.less(&half, &chosen)?;
        Ok(Selected::Mask(stream.take(&mask, &heads, 1)?))
    }

    /// The best score of each block, `(1, K, n, P)`, by queries (1, K, n, X) and keys (1, 1, m, X).
    fn block_scores(
        &self,
        (query, keys): (&Array, &Array),
        seen: Option<&Array>,
        block: i32,
    ) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let turned = stream.transpose(keys, &[0, 1, 3, 2])?;
        let mut scores = stream.matmul(query, &turned)?;
        if let Some(seen) = seen {
            scores = self.seen_only(&scores, seen)?;
        }
        let sizes = scores.shape();
        let (heads, n, m) = (sizes[1], sizes[2], sizes[3]);
        let blocks = (m + block - 1) / block;
        if blocks * block > m {
            let behind = stream.zeros(&[1, heads, n, blocks * block - m], Dtype::F32)?;
            let behind = stream.subtract(&behind, &stream.scalar(FAR, Dtype::F32)?)?;
            scores = stream.concatenate(&[&scores, &behind], 3)?;
        }
        let scores = stream.reshape(&scores, &[1, heads, n, blocks, block])?;
        let best = stream.max_along(&scores, 4)?;
        Ok(stream.reshape(&best, &[1, heads, n, blocks])?)
    }

    /// The places `(.., n)` of the `n` best `scores` along the last axis of four.
    fn best(&self, scores: &Array, n: i32) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let order = stream.argpartition(&stream.negative(scores)?, n - 1, 3)?;
        let mut stop = order.shape();
        stop[3] = n;
        Ok(stream.slice(&order, &[0; 4], &stop)?)
    }

    /// 1 at the `wanted` best `scores (1, K, n, P)` among those `seen (1, 1, n, P)`, else 0.
    pub(super) fn chosen(&self, scores: &Array, seen: &Array, wanted: i32) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let scores = self.seen_only(scores, seen)?;
        let best = self.best(&scores, wanted)?;
        let one = stream.reshape(&stream.scalar(1.0, Dtype::F32)?, &[1, 1, 1, 1])?;
        let zeros = stream.zeros(&scores.shape(), Dtype::F32)?;
        let chosen = stream.put_along(&zeros, &best, &one, 3)?;
        Ok(stream.multiply(&chosen, seen)?)
    }

    /// Numbers (1, K, n, P) of pools or blocks as those of their positions, (1, K, n, m); 0 behind.
    fn each_position(&self, of: &Array, pool: i32, m: i32) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let [one, heads, n, pools] = of.shape()[..] else {
            unreachable!("numbers of pools of rows");
        };
        let column = stream.reshape(of, &[one, heads, n, pools, 1])?;
        let zeros = stream.zeros(&[1, 1, 1, 1, pool], Dtype::F32)?;
        let each = stream.add(&column, &zeros)?;
        let each = stream.reshape(&each, &[one, heads, n, pools * pool])?;
        if pools * pool >= m {
            return Ok(stream.slice(&each, &[0; 4], &[one, heads, n, m])?);
        }
        let rest = stream.zeros(&[one, heads, n, m - pools * pool], Dtype::F32)?;
        Ok(stream.concatenate(&[&each, &rest], 3)?)
    }
}
