//! Attention of a step, by keys and values of heads or by latents.

use paceline_base::lock;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{AttentionRows, AttentionStep, Recurrence, Recurrent};

use super::compressed::CompressedInputs;
use super::pooled::PoolInputs;
use super::{ForwardStep, both_ways};
use crate::LayerCache;
use crate::weights::{self, LayerShard};

impl ForwardStep<'_, '_> {
    /// Rotates the query and key heads, and scales the queries.
    pub(super) fn rotate_heads(&mut self) {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return;
        }
        let rope = &self.model.config().ropes[shape.rope];
        let (angles, pairs) = (&self.ws.angles[shape.rope], rope.frequencies.len());
        let (dim, has_kv) = (shape.head_dim, shape.has_kv());
        let (q_len, k_len) = (cut.heads.len() * dim, cut.kv_heads.len() * dim);
        let q = DisjointMut::new(&mut self.ws.q, q_len.max(1));
        let k = DisjointMut::new(&mut self.ws.k, k_len.max(1));
        let (kernels, growth) = (self.model.kernels(), self.model.config().query_growth);
        let sequences = &self.sequences[..self.batch.sequences.len()];
        kernels.for_rows(self.rows, |t| {
            let angles = &angles[t * pairs..(t + 1) * pairs];
            // SAFETY: each row is visited once.
            let q = unsafe { q.part(t) };
            kernels.rope(q, dim, angles, rope.pairs);
            let scale = growth.map_or(shape.query_scale, |growth| {
                shape.query_scale * growth.at(position_of(sequences, t))
            });
            q.iter_mut().for_each(|x| *x *= scale);
            if has_kv {
                // SAFETY: as above.
                kernels.rope(unsafe { k.part(t) }, dim, angles, rope.pairs);
            }
        });
    }

    /// q, k, v -> attended (T, H E), by keys and values in the cache or by recurrent states
    pub(super) fn attend_rows(&mut self, w: &LayerShard, layer: usize) {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return;
        }
        let held = self.held(layer);
        let keeper = match shape.cache {
            LayerCache::State(recurrence) => {
                return self.recur(recurrence);
            }
            LayerCache::Of(of) => self.held(of),
            LayerCache::Rows
            | LayerCache::Delta(_)
            | LayerCache::Conv(_)
            | LayerCache::Compressed(_) => held,
        };
        let mut cache = lock(self.cache);
        let kernels = self.model.kernels();
        let kept = cache.rows(keeper);
        let heads = [cut.heads.len(), cut.kv_heads.len()];
        if let Some(part) = kept.rotated() {
            let of = [heads[0] * kept.head_dim, heads[1] * kept.head_dim];
            let rows = self.rows;
            let rotate = |x: &mut [f32], len: usize| {
                kernels.rotate_heads(&mut x[..rows * len], len, part);
            };
            rotate(&mut self.ws.q, of[0]);
            if keeper == held {
                rotate(&mut self.ws.k, of[1]);
                rotate(&mut self.ws.v, heads[1] * kept.value_dim);
            }
        }
        let sequences = &self.sequences[self.sequences()];
        let (k, v) = (&self.ws.k, &self.ws.v);
        if keeper == held {
            kernels.write_kv(&mut cache, held, sequences, k, v);
        }
        let group = shape.heads / shape.kv_heads;
        let step = AttentionStep {
            cache: &cache,
            layer: keeper,
            heads: cut.heads.len(),
            group,
            skipped: cut.heads.start % group,
            window: shape.window,
            sinks: w.sinks.as_deref(),
            cap: self.model.config().attention_cap,
            queries: &self.ws.q,
            sequences,
        };
        let out = self.ws.attended.of(held).values_mut();
        let scratch = &mut self.ws.scratch;
        if self.model.config().bidirectional {
            let query_len = cut.heads.len() * shape.head_dim;
            let out = &mut out[..self.rows * cut.heads.len() * shape.value_dim];
            both_ways::attention(kernels, &step, query_len, scratch, out);
        } else if let Some(blocks) = self.ws.blocks.as_mut().filter(|_| shape.pooled.is_some()) {
            blocks.attend(kernels, &step, cut.kv_heads.clone(), scratch, out);
        } else {
            let pools = self.ws.pools.as_mut().filter(|_| shape.pooled.is_some());
            let selected = pools.and_then(|pools| pools.selected.as_mut());
            match selected.filter(|own| own.is_sparse(sequences)) {
                Some(own) => own.attend(kernels, &step, scratch, out),
                None => kernels.attention(&step, scratch, out),
            }
        }
        if let Some(part) = kept.rotated() {
            let len = heads[0] * kept.value_dim;
            kernels.rotate_heads(&mut out[..self.rows * len], len, part);
        }
    }

    /// q, k -> attended (T, H E), by latents in the cache
    pub(super) fn attend_latents(&mut self, w: &LayerShard, layer: usize) {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return;
        }
        let held = self.held(layer);
        let sequences = &self.sequences[self.sequences()];
        let kernels = self.model.kernels();
        let ws = &mut *self.ws;
        let latents = ws.latents.as_mut().expect("made for this family");
        {
            let mut cache = lock(self.cache);
            let kept = cache.rows(held);
            let dims = [kept.head_dim, kept.value_dim].map(|dim| cut.heads.len() * dim);
            let rotate = |x: &mut [f32], len: usize| {
                if let Some(part) = kept.rotated() {
                    kernels.rotate_heads(&mut x[..self.rows * len], len, part);
                }
            };
            rotate(&mut ws.k, kept.head_dim);
            rotate(&mut ws.q, dims[0]);
            kernels.write_kv(&mut cache, held, sequences, &ws.k, &[]);
            let step = AttentionStep {
                cache: &cache,
                layer: held,
                heads: cut.heads.len(),
                group: shape.heads,
                skipped: cut.heads.start,
                window: shape.window,
                sinks: None,
                cap: None,
                queries: &ws.q,
                sequences,
            };
            let out = latents.read(self.rows);
            let selected = ws.index.as_mut().and_then(|index| index.selected.as_mut());
            match selected.filter(|own| own.is_sparse(sequences)) {
                Some(own) => own.attend(kernels, &step, &mut ws.scratch, out),
                None => kernels.attention(&step, &mut ws.scratch, out),
            }
            rotate(out, dims[1]);
        }
        latents.expand(kernels, w, ws.attended.of(held).values_mut());
    }

    /// x (T, C) -> q (T, H D), and keys to the cache; q, cache -> attended (T, G R)
    pub(super) fn attend_compressed_keys(&mut self, w: &LayerShard, layer: usize) {
        let (shape, cut) = self.layer();
        let LayerCache::Compressed(of) = shape.cache else {
            unreachable!("the family asked")
        };
        if cut.heads.is_empty() {
            return;
        }
        let (held, n) = (self.held(layer), self.batch.sequences.len());
        let earlier = of.runs.and_then(|runs| runs.of);
        let entries = earlier.map_or(held, |layer| self.held(layer));
        let ws = &mut *self.ws;
        let place = CompressedInputs {
            kernels: self.model.kernels(),
            eps: self.model.config().norm_eps,
            shape,
            of,
            heads: cut.heads.clone(),
            rope: &ws.ropes[shape.rope],
            angles: &ws.angles[shape.rope],
            layers: [held, self.model.shard().layers.len() + entries],
            sequences: [
                &self.sequences[self.model.kinds().of(layer) * n..][..n],
                &self.sequences[..n],
            ],
        };
        let own = w.compressed.as_deref().expect("loaded for this family");
        let rows = ws.compressed.as_mut().expect("made for this family");
        rows.project(&place, (w, own), &ws.x, &mut ws.q, self.cache);
        let out = ws.attended.of(held).values_mut();
        rows.attend(&place, (w, own), &ws.q, self.cache, out);
    }

    /// q, k, v -> attended (T, H E), by recurrent states
    fn recur(&mut self, recurrence: &'static dyn Recurrence) {
        let (shape, cut) = self.layer();
        let (held, sequences) = (self.held(self.index), self.sequences());
        let (group, ws) = (shape.heads / shape.kv_heads, &mut *self.ws);
        let step = Recurrent {
            recurrence,
            layer: held,
            heads: cut.heads.len(),
            group,
            skipped: cut.heads.start % group,
            queries: &ws.q,
            keys: &ws.k,
            values: &ws.v,
            sequences: &self.sequences[sequences],
        };
        let out = ws.attended.of(held).values_mut();
        let mut cache = lock(self.cache);
        self.model.kernels().recurrent(&step, &mut cache, out);
    }

    /// x (T, C) -> index queries and rows, to the cache, and the positions that rows attend to
    pub(super) fn select_pools(&mut self, w: &weights::PoolIndexer, layer: usize) {
        let (shape, held) = (self.layer().0, self.held(layer));
        let sequences = &self.sequences[self.sequences()];
        let ws = &mut *self.ws;
        let place = PoolInputs {
            kernels: self.model.kernels(),
            eps: self.model.config().norm_eps,
            rope: &ws.ropes[shape.rope],
            angles: &ws.angles[shape.rope],
            sequences,
        };
        match &mut ws.blocks {
            Some(blocks) => blocks.project(&place, w, &ws.x, (self.cache, held)),
            None => {
                let pools = ws.pools.as_mut().expect("made for this family");
                pools.select(&place, w, &ws.x, (self.cache, held));
            }
        }
    }
}

/// Position of row `t` of a batch.
fn position_of(sequences: &[AttentionRows<'_>], mut t: usize) -> usize {
    for sequence in sequences {
        if t < sequence.rows {
            return sequence.position + t;
        }
        t -= sequence.rows;
    }
    unreachable!("row {t} behind all sequences")
}
