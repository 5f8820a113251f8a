//! The passes of a head that drafts blocks: of context, and of a block.

use std::sync::Arc;

use paceline_tensor::{
    Activations, AttentionRows, AttentionScratch, AttentionStep, KvCache, PackedMatrix, vector,
};

use super::markov::MarkovRow;
use super::{BlockHead, BlockLayer};
use crate::draft_head::rows::{attention_rows, norm_rows, product, scatter, turn};
use crate::{DraftHeadCompute, DraftPlace, Error, HeadRows, PassKind};

/// A head with its cache and buffers. T rows of context, S sequences, B places of a block; other
/// letters as in [`BlockHead`].
#[derive(Debug)]
pub(super) struct BlockCompute {
    head: Arc<BlockHead>,
    cache: KvCache,
    /// `(T, n C)` and `(T, C)`, quantised
    captured: Activations,
    context: Activations,
    /// `(T, C)`
    fused: Vec<f32>,
    /// `(T or S B, K D)` each
    k: Vec<f32>,
    v: Vec<f32>,
    /// `(S B, H D)`
    q: Vec<f32>,
    /// `(S B, C)` each
    residual: Vec<f32>,
    delta: Vec<f32>,
    normed: Activations,
    /// `(S B, H D)`, quantised
    attended: Activations,
    /// `(S B, F)` each
    gate: Vec<f32>,
    up: Vec<f32>,
    hidden: Activations,
    /// `(B, C)`, quantised, and `(B, draft vocabulary)`: of one sequence.
    last: Activations,
    logits: Vec<f32>,
    /// That sequence.
    logits_of: Option<usize>,
    markov: Option<MarkovRow>,
    angles: Vec<(f32, f32)>,
    scratch: AttentionScratch,
}

impl BlockCompute {
    pub(super) fn new(
        head: Arc<BlockHead>,
        cache: KvCache,
        (rows, sequences, positions): (usize, usize, usize),
    ) -> Self {
        let (config, shape) = (&head.config, &head.config.shape);
        let (c, f, dim) = (shape.width, shape.ffn, shape.head_dim);
        let (q, k) = (shape.heads * dim, shape.kv_heads * dim);
        let block = sequences * config.block;
        let buffer = |rows, cols, of: &dyn Fn(&BlockLayer) -> Vec<&PackedMatrix>| {
            let matrices = head.layers.iter().flat_map(of);
            (head.kernels).activations(rows, cols, head.precision(), matrices)
        };
        let alone = |rows, cols, matrix: &PackedMatrix| {
            (head.kernels).activations(rows, cols, head.precision(), [matrix])
        };
        let n = shape.draft_vocab;
        let markov = head.markov.as_ref();
        Self {
            captured: alone(rows, shape.captures.len() * c, &head.fuse),
            context: buffer(rows, c, &|of| vec![&of.key, &of.value]),
            fused: vec![0.0; rows * c],
            k: vec![0.0; rows.max(block) * k],
            v: vec![0.0; rows.max(block) * k],
            q: vec![0.0; block * q],
            residual: vec![0.0; block * c],
            delta: vec![0.0; block * c],
            normed: buffer(block, c, &|of| {
                vec![&of.query, &of.key, &of.value, &of.gate, &of.up]
            }),
            attended: buffer(block, q, &|of| vec![&of.attention_output]),
            gate: vec![0.0; block * f],
            up: vec![0.0; block * f],
            hidden: buffer(block, f, &|of| vec![&of.down]),
            last: alone(config.block, c, &head.output),
            logits: vec![0.0; config.block * n],
            logits_of: None,
            markov: markov.map(|of| MarkovRow::new(of, |bias| alone(1, bias.cols(), bias))),
            angles: Vec::new(),
            scratch: (head.kernels).attention_scratch(block, shape.heads, (dim, dim), positions),
            cache,
            head,
        }
    }

    /// Writes the keys and values of captured rows.
    fn read(&mut self, sequences: &[HeadRows<'_>]) {
        let head = Arc::clone(&self.head);
        let (kernels, shape) = (&*head.kernels, &head.config.shape);
        let rows = sequences.iter().map(|s| s.tokens.len()).sum();
        self.captured.resize(rows);
        let features = sequences.iter().flat_map(|s| s.features.iter());
        let values = self.captured.values_mut().iter_mut();
        values.zip(features).for_each(|(to, x)| *to = *x);
        kernels.quantise(&mut self.captured);
        kernels.products(&self.captured, [product(&mut self.fused, &head.fuse, rows)]);
        self.context.resize(rows);
        let norm = (&head.context_norm[..], shape.norm_eps);
        norm_rows(kernels, &self.fused, norm, &mut self.context);
        self.angles.clear();
        for s in sequences {
            let positions = s.position..s.position + s.tokens.len();
            shape.rope.angles(positions, &mut self.angles);
        }
        let of = |s: &HeadRows<'_>| (s.tokens.len(), s.position);
        let attended = attention_rows(sequences, of);
        for (i, layer) in head.layers.iter().enumerate() {
            let products = [
                product(&mut self.k, &layer.key, rows),
                product(&mut self.v, &layer.value, rows),
            ];
            kernels.products(&self.context, products);
            let width = shape.kv_heads * shape.head_dim;
            let of = head.turn(&layer.key_norm, 1.0, &self.angles);
            turn(kernels, &mut self.k[..rows * width], width, of);
            kernels.write_kv(&mut self.cache, i, &attended, &self.k, &self.v);
        }
    }

    /// Computes a block behind each sequence.
    fn draft(&mut self, sequences: &[HeadRows<'_>]) {
        let head = Arc::clone(&self.head);
        let (config, shape) = (&head.config, &head.config.shape);
        let (c, block) = (shape.width, config.block);
        self.angles.clear();
        let begin = |s: &HeadRows<'_>| s.position + s.tokens.len();
        for (s, rows) in sequences.iter().zip(self.residual.chunks_mut(block * c)) {
            shape
                .rope
                .angles(begin(s)..begin(s) + block, &mut self.angles);
            for (place, row) in rows.chunks_mut(c).enumerate() {
                let last = s.tokens.last().copied().filter(|_| place == 0);
                head.embedding.row(last.unwrap_or(config.mask), row);
                row.iter_mut().for_each(|x| *x *= head.embedding_scale);
            }
        }
        let rows = sequences.len() * block;
        for x in [&mut self.normed, &mut self.attended, &mut self.hidden] {
            x.resize(rows);
        }
        let written = attention_rows(sequences, |s| (block, begin(s)));
        let each = sequences.iter().flat_map(|s| std::iter::repeat_n(s, block));
        let each: Vec<HeadRows<'_>> = each.copied().collect();
        let read = attention_rows(&each, |s| (1, begin(s) + block - 1));
        for (i, layer) in head.layers.iter().enumerate() {
            self.project((i, layer), &written, rows);
            self.attend((i, layer), &read);
            self.feed_forward(&head, layer, rows);
        }
        self.logits_of = None;
    }

    /// residual -> q, and keys and values of the block in the cache
    fn project(
        &mut self,
        (i, layer): (usize, &BlockLayer),
        written: &[AttentionRows<'_>],
        rows: usize,
    ) {
        let head = Arc::clone(&self.head);
        let (kernels, shape) = (&*head.kernels, &head.config.shape);
        let norm = (&layer.norm[..], shape.norm_eps);
        norm_rows(kernels, &self.residual, norm, &mut self.normed);
        let products = [
            product(&mut self.q, &layer.query, rows),
            product(&mut self.k, &layer.key, rows),
            product(&mut self.v, &layer.value, rows),
        ];
        kernels.products(&self.normed, products);
        let (dim, angles) = (shape.head_dim, &self.angles);
        let scale = 1.0 / (dim as f32).sqrt();
        let [q, k] = [shape.heads * dim, shape.kv_heads * dim];
        let of = head.turn(&layer.query_norm, scale, angles);
        turn(kernels, &mut self.q[..rows * q], q, of);
        let of = head.turn(&layer.key_norm, 1.0, angles);
        turn(kernels, &mut self.k[..rows * k], k, of);
        kernels.write_kv(&mut self.cache, i, written, &self.k, &self.v);
    }

    /// q, cache -> residual. `read` has a row for each place, which sees the whole block.
    fn attend(&mut self, (i, layer): (usize, &BlockLayer), read: &[AttentionRows<'_>]) {
        let head = Arc::clone(&self.head);
        let (kernels, shape, rows) = (&*head.kernels, &head.config.shape, read.len());
        let (block, window) = (head.config.block, head.config.windows[i]);
        let is_causal = window.is_some() && head.config.is_causal;
        let width = shape.heads * shape.head_dim;
        // A place that sees those before it only has a window of its own.
        let together = if is_causal { 1 } else { rows };
        for (first, part) in (0..).step_by(together).zip(read.chunks(together)) {
            let behind = if is_causal {
                block - 1 - first % block
            } else {
                0
            };
            let own = part.iter().map(|row| AttentionRows {
                position: row.position - behind,
                ..*row
            });
            let step = AttentionStep {
                cache: &self.cache,
                layer: i,
                heads: shape.heads,
                group: shape.heads / shape.kv_heads,
                skipped: 0,
                window: window.map(|window| window + block - behind),
                sinks: None,
                cap: None,
                queries: &self.q[first * width..],
                sequences: &own.collect::<Vec<_>>(),
            };
            let out = &mut self.attended.values_mut()[first * width..];
            kernels.attention(&step, &mut self.scratch, &mut out[..part.len() * width]);
        }
        kernels.quantise(&mut self.attended);
        let out = product(&mut self.delta, &layer.attention_output, rows);
        kernels.products(&self.attended, [out]);
        vector::add_assign(&mut self.residual[..rows * shape.width], &self.delta);
    }

    fn feed_forward(&mut self, head: &BlockHead, layer: &BlockLayer, rows: usize) {
        let (kernels, shape) = (&*head.kernels, &head.config.shape);
        let norm = (&layer.ffn_norm[..], shape.norm_eps);
        norm_rows(kernels, &self.residual, norm, &mut self.normed);
        let products = [
            product(&mut self.gate, &layer.gate, rows),
            product(&mut self.up, &layer.up, rows),
        ];
        kernels.products(&self.normed, products);
        let (f, gate, up) = (shape.ffn, &self.gate, &self.up);
        kernels.fill_rows(&mut self.hidden, |t, out| {
            let row = t * f..(t + 1) * f;
            kernels.silu_mul(&gate[row.clone()], &up[row], out);
        });
        kernels.products(&self.hidden, [product(&mut self.delta, &layer.down, rows)]);
        vector::add_assign(&mut self.residual[..rows * shape.width], &self.delta);
    }

    /// The logits of all places of sequence `i`.
    fn fill_logits(&mut self, i: usize) {
        let head = &*self.head;
        let (block, shape) = (head.config.block, &head.config.shape);
        self.last.resize(block);
        let rows = &self.residual[i * block * shape.width..];
        let norm = (&head.output_norm[..], shape.norm_eps);
        norm_rows(&head.kernels, rows, norm, &mut self.last);
        let out = product(&mut self.logits, &head.output, block);
        head.kernels.products(&self.last, [out]);
        self.logits_of = Some(i);
    }
}

impl DraftHeadCompute for BlockCompute {
    fn pages(&self) -> usize {
        self.cache.pages()
    }

    fn forward(&mut self, sequences: &[HeadRows<'_>], pass: PassKind) -> Result<(), Error> {
        self.read(sequences);
        if pass == PassKind::First {
            self.draft(sequences);
        }
        Ok(())
    }

    fn write_logits(&mut self, i: usize, place: DraftPlace, out: &mut [f32]) {
        if self.logits_of != Some(i) {
            self.fill_logits(i);
        }
        let head = &*self.head;
        let (n, c) = (head.config.shape.draft_vocab, head.config.shape.width);
        let at = head.config.first() + place.nth;
        let logits = &self.logits[at * n..(at + 1) * n];
        let (Some(of), Some(row)) = (&head.markov, &mut self.markov) else {
            return scatter(&head.tokens, logits, out);
        };
        let hidden = |at: usize| &self.last.values()[at * c..(at + 1) * c];
        if place.nth == 0 {
            row.begin();
            if of.has_state() && at > 0 {
                row.bias(of, &head.kernels, (place.previous, hidden(0)));
            }
        }
        let sum = row.bias(of, &head.kernels, (place.previous, hidden(at)));
        vector::add_assign(sum, logits);
        scatter(&head.tokens, sum, out);
    }

    fn output(&self, _: usize) -> &[f32] {
        &[]
    }
}
