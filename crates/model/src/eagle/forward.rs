//! The forward pass of a draft head over rows of several sequences.

use std::sync::Arc;

use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{
    Activations, AttentionScratch, AttentionStep, KvCache, PackedMatrix, vector,
};

use super::EagleHead;
use crate::draft_head::rows::{attention_rows, norm_rows, product, scatter};
use crate::{DraftHeadCompute, DraftPlace, Error, HeadRows, PassKind};

/// A draft head with its cache and buffers. T rows, S sequences; other letters as in
/// [`EagleHead`].
#[derive(Debug)]
pub(super) struct EagleCompute {
    head: Arc<EagleHead>,
    cache: KvCache,
    /// `(T, n C)`, quantised: captured rows.
    captured: Activations,
    /// `(T, 2 C)`, quantised
    input: Activations,
    /// `(T, C)`: features, then the residual stream.
    residual: Vec<f32>,
    /// `(T, C)`
    delta: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `(T, H D)`, quantised
    attended: Activations,
    /// `(T, C)`, quantised
    normed: Activations,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `(T, F)`, quantised
    hidden: Activations,
    /// `(S, C)`, quantised
    last: Activations,
    /// `(S, C)`: the residual stream after the last row of each sequence.
    outputs: Vec<f32>,
    /// `(S, draft vocabulary)`
    logits: Vec<f32>,
    angles: Vec<(f32, f32)>,
    scratch: AttentionScratch,
}

impl EagleCompute {
    pub(super) fn new(
        head: Arc<EagleHead>,
        cache: KvCache,
        (rows, sequences, positions): (usize, usize, usize),
    ) -> Self {
        let config = &head.config;
        let (c, n) = (config.width, config.captures.len());
        let (q, k) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        let buffer = |rows: usize, cols: usize, matrices: &[&PackedMatrix]| {
            let matrices = matrices.iter().copied();
            head.kernels
                .activations(rows, cols, head.precision(), matrices)
        };
        let scratch = head.kernels.attention_scratch(
            sequences,
            config.heads,
            (config.head_dim, config.head_dim),
            positions,
        );
        Self {
            captured: buffer(rows, n * c, &[&head.fuse]),
            input: buffer(rows, 2 * c, &[&head.query, &head.key, &head.value]),
            residual: vec![0.0; rows * c],
            delta: vec![0.0; rows * c],
            q: vec![0.0; rows * q],
            k: vec![0.0; rows * k],
            v: vec![0.0; rows * k],
            attended: buffer(rows, q, &[&head.attention_output]),
            normed: buffer(rows, c, &[&head.gate, &head.up]),
            gate: vec![0.0; rows * config.ffn],
            up: vec![0.0; rows * config.ffn],
            hidden: buffer(rows, config.ffn, &[&head.down]),
            last: buffer(sequences, c, &[&head.output]),
            outputs: vec![0.0; sequences * c],
            logits: vec![0.0; sequences * config.draft_vocab],
            angles: Vec::new(),
            scratch,
            cache,
            head,
        }
    }

    /// features -> residual (T, C)
    fn take_features(&mut self, sequences: &[HeadRows<'_>], rows: usize, is_captured: bool) {
        let features = sequences.iter().flat_map(|s| s.features.iter().copied());
        if !is_captured {
            self.residual
                .iter_mut()
                .zip(features)
                .for_each(|(to, x)| *to = x);
            return;
        }
        self.captured.resize(rows);
        let values = self.captured.values_mut().iter_mut();
        values.zip(features).for_each(|(to, x)| *to = x);
        let kernels = &*self.head.kernels;
        kernels.quantise(&mut self.captured);
        let out = product(&mut self.residual, &self.head.fuse, rows);
        kernels.products(&self.captured, [out]);
    }

    /// tokens, residual -> input (T, 2 C)
    fn mix(&mut self, sequences: &[HeadRows<'_>]) {
        let (head, c) = (&*self.head, self.head.config.width);
        let (kernels, eps) = (&*head.kernels, head.config.norm_eps);
        let tokens: Vec<u32> = sequences.iter().flat_map(|s| s.tokens).copied().collect();
        let residual = &self.residual;
        kernels.fill_rows(&mut self.input, |t, out| {
            let (token, feature) = out.split_at_mut(c);
            head.embedding.row(tokens[t], token);
            kernels.rms_norm_in_place(token, &head.token_norm, eps);
            kernels.rms_norm(
                &residual[t * c..(t + 1) * c],
                &head.feature_norm,
                eps,
                feature,
            );
        });
        if head.config.norms_residual {
            let rows = self
                .residual
                .chunks_mut(c)
                .zip(self.input.values().chunks(2 * c));
            rows.for_each(|(to, input)| to.copy_from_slice(&input[c..]));
        }
    }

    /// input -> residual, by attention
    fn attend(&mut self, sequences: &[HeadRows<'_>], rows: usize) {
        let head = &*self.head;
        let (config, kernels) = (&head.config, &*head.kernels);
        let products = [
            product(&mut self.q, &head.query, rows),
            product(&mut self.k, &head.key, rows),
            product(&mut self.v, &head.value, rows),
        ];
        kernels.products(&self.input, products);
        self.angles.clear();
        for s in sequences {
            let positions = s.position..s.position + s.tokens.len();
            config.rope.angles(positions, &mut self.angles);
        }
        let (dim, pairs) = (config.head_dim, config.rope.frequencies.len());
        let q = DisjointMut::new(&mut self.q, config.heads * dim);
        let k = DisjointMut::new(&mut self.k, config.kv_heads * dim);
        let (angles, scale) = (&self.angles, 1.0 / (dim as f32).sqrt());
        kernels.for_rows(rows, |t| {
            let angles = &angles[t * pairs..(t + 1) * pairs];
            // SAFETY: each row is visited once.
            let (q, k) = unsafe { (q.part(t), k.part(t)) };
            kernels.rope(q, dim, angles, config.rope.pairs);
            q.iter_mut().for_each(|x| *x *= scale);
            kernels.rope(k, dim, angles, config.rope.pairs);
        });
        let sequences = attention_rows(sequences, |s| (s.tokens.len(), s.position));
        kernels.write_kv(&mut self.cache, 0, &sequences, &self.k, &self.v);
        let step = AttentionStep {
            cache: &self.cache,
            layer: 0,
            heads: config.heads,
            group: config.heads / config.kv_heads,
            skipped: 0,
            window: None,
            sinks: None,
            cap: None,
            queries: &self.q,
            sequences: &sequences,
        };
        kernels.attention(&step, &mut self.scratch, self.attended.values_mut());
        kernels.quantise(&mut self.attended);
        let out = product(&mut self.delta, &head.attention_output, rows);
        kernels.products(&self.attended, [out]);
        self.add_delta(rows);
    }

    /// residual -> residual, by the feed-forward
    fn feed_forward(&mut self, rows: usize) {
        let (head, kernels) = (&*self.head, &*self.head.kernels);
        let norm = (&head.ffn_norm[..], head.config.norm_eps);
        norm_rows(kernels, &self.residual, norm, &mut self.normed);
        let products = [
            product(&mut self.gate, &head.gate, rows),
            product(&mut self.up, &head.up, rows),
        ];
        kernels.products(&self.normed, products);
        let (f, gate, up) = (head.config.ffn, &self.gate, &self.up);
        kernels.fill_rows(&mut self.hidden, |t, out| {
            let row = t * f..(t + 1) * f;
            kernels.silu_mul(&gate[row.clone()], &up[row], out);
        });
        let out = product(&mut self.delta, &head.down, rows);
        kernels.products(&self.hidden, [out]);
        self.add_delta(rows);
    }

    fn add_delta(&mut self, rows: usize) {
        let n = rows * self.head.config.width;
        vector::add_assign(&mut self.residual[..n], &self.delta[..n]);
    }

    /// residual -> outputs (S, C) and logits (S, draft vocabulary), of the last rows
    fn finish(&mut self, sequences: &[HeadRows<'_>]) {
        let (head, c) = (&*self.head, self.head.config.width);
        let mut end = 0;
        for (s, out) in sequences.iter().zip(self.outputs.chunks_exact_mut(c)) {
            end += s.tokens.len();
            out.copy_from_slice(&self.residual[(end - 1) * c..end * c]);
        }
        let n = sequences.len();
        self.last.resize(n);
        let norm = (&head.output_norm[..], head.config.norm_eps);
        norm_rows(&head.kernels, &self.outputs, norm, &mut self.last);
        let out = product(&mut self.logits, &head.output, n);
        head.kernels.products(&self.last, [out]);
    }
}

impl DraftHeadCompute for EagleCompute {
    fn pages(&self) -> usize {
        self.cache.pages()
    }

    fn forward(&mut self, sequences: &[HeadRows<'_>], pass: PassKind) -> Result<(), Error> {
        let rows: usize = sequences.iter().map(|s| s.tokens.len()).sum();
        for x in [
            &mut self.input,
            &mut self.attended,
            &mut self.normed,
            &mut self.hidden,
        ] {
            x.resize(rows);
        }
        self.take_features(sequences, rows, pass != PassKind::Next);
        self.mix(sequences);
        self.attend(sequences, rows);
        self.feed_forward(rows);
        self.finish(sequences);
        Ok(())
    }

    fn write_logits(&mut self, i: usize, _: DraftPlace, out: &mut [f32]) {
        let n = self.head.config.draft_vocab;
        scatter(&self.head.tokens, &self.logits[i * n..(i + 1) * n], out);
    }

    fn output(&self, i: usize) -> &[f32] {
        let c = self.head.config.width;
        &self.outputs[i * c..(i + 1) * c]
    }
}
