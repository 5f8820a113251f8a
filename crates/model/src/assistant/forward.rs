//! The passes of an assistant: keys and values of captured rows, and a draft token.

use std::sync::Arc;

use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{
    Activations, AttentionRows, AttentionScratch, AttentionStep, KvCache, PackedMatrix, vector,
};

use super::{AssistantHead, AssistantLayer, Keeper, Output};
use crate::draft_head::rows::{HeadTurn, attention_rows, norm_rows, product, scatter, turn};
use crate::{DraftHeadCompute, DraftPlace, Error, HeadRows, PassKind};

/// An assistant with its cache and buffers. T captured rows, S sequences; other letters as in
/// [`AssistantHead`].
///
/// The cache position of a token has the keys of the position before it, turned by its own
/// position. A query is turned by one position more, so that distances are those of the model.
#[derive(Debug)]
pub(super) struct AssistantCompute {
    head: Arc<AssistantHead>,
    cache: KvCache,
    /// `(T, C)`, quantised
    captured: Activations,
    /// `(T, K D)` each
    k: Vec<f32>,
    v: Vec<f32>,
    /// `(S, 2 C)`, quantised
    input: Activations,
    /// `(S, A)` each
    residual: Vec<f32>,
    delta: Vec<f32>,
    normed: Activations,
    /// `(S, H D)`, and quantised for the layers of each keeper
    q: Vec<f32>,
    attended: Vec<Activations>,
    /// `(S, F)` each
    gate: Vec<f32>,
    up: Vec<f32>,
    hidden: Activations,
    /// `(S, A)`, quantised
    last: Activations,
    /// `(S, C)`: the state behind each draft token.
    states: Vec<f32>,
    /// `(S, V)`, or `(S, clusters)`
    scores: Vec<f32>,
    /// `(S, scored)`: tokens of the chosen clusters, and their logits.
    chosen: Vec<u32>,
    logits: Vec<f32>,
    angles: Vec<(f32, f32)>,
    scratch: AttentionScratch,
}

impl AssistantCompute {
    pub(super) fn new(
        head: Arc<AssistantHead>,
        cache: KvCache,
        (rows, sequences, positions): (usize, usize, usize),
    ) -> Self {
        let (a, c) = (head.config.width, head.width);
        let shapes = &head.config.layers;
        let (q, f, dim) = (
            shapes.iter().map(|of| of.heads * of.head_dim).max(),
            shapes.iter().map(|of| of.ffn).max(),
            shapes.iter().map(|of| of.head_dim).max(),
        );
        let (q, f, dim) = (q.unwrap_or(0), f.unwrap_or(0), dim.unwrap_or(0));
        let keys = head.keepers.iter().map(|of| of.key.rows()).max();
        let keys = rows * keys.unwrap_or(0);
        let buffer = |rows, cols, of: &[&PackedMatrix]| {
            (head.kernels).activations(rows, cols, head.precision(), of.iter().copied())
        };
        let each = |of: fn(&AssistantLayer) -> [&PackedMatrix; 3]| -> Vec<&PackedMatrix> {
            head.layers.iter().flat_map(of).collect()
        };
        let attended = head.keepers.iter().enumerate().map(|(keeper, of)| {
            let own = head.layers.iter().filter(|layer| layer.keeper == keeper);
            let own: Vec<&PackedMatrix> = own.map(|layer| &layer.attention_output).collect();
            buffer(sequences, of.shape.head_dim * head.config.heads, &own)
        });
        let kept: Vec<&PackedMatrix> = head.keepers.iter().flat_map(Keeper::matrices).collect();
        let heads = shapes.iter().map(|of| of.heads).max().unwrap_or(0);
        let is_ordered = matches!(head.output, Output::Ordered(_));
        let scored = if is_ordered { head.output.scored() } else { 0 };
        Self {
            captured: buffer(rows, c, &kept),
            k: vec![0.0; keys],
            v: vec![0.0; keys],
            input: buffer(sequences, 2 * c, &[&head.input]),
            residual: vec![0.0; sequences * a],
            delta: vec![0.0; sequences * a],
            normed: buffer(sequences, a, &each(|of| [&of.query, &of.gate, &of.up])),
            q: vec![0.0; sequences * q],
            attended: attended.collect(),
            gate: vec![0.0; sequences * f],
            up: vec![0.0; sequences * f],
            hidden: buffer(sequences, f, &each(|of| [&of.down; 3])),
            last: buffer(sequences, a, &[&head.state, head.output.matrix()]),
            states: vec![0.0; sequences * c],
            scores: vec![0.0; sequences * head.output.matrix().rows()],
            chosen: vec![0; sequences * scored],
            logits: vec![0.0; sequences * scored],
            angles: Vec::new(),
            scratch: (head.kernels).attention_scratch(sequences, heads, (dim, dim), positions),
            cache,
            head,
        }
    }

    /// Writes keys and values of captured rows `(T, captures, C)`.
    fn read(&mut self, sequences: &[HeadRows<'_>]) {
        let head = Arc::clone(&self.head);
        let (kernels, c) = (&*head.kernels, head.width);
        let rows: usize = sequences.iter().map(|s| s.tokens.len()).sum();
        let features = sequences.iter().flat_map(|s| s.features.chunks_exact(c));
        let features: Vec<&[f32]> = features.collect();
        let written = attention_rows(sequences, |s| (s.tokens.len(), s.position));
        self.captured.resize(rows);
        for (i, of) in head.keepers.iter().enumerate() {
            kernels.fill_rows(&mut self.captured, |t, out| {
                let row = features[t * head.captures.len() + i];
                kernels.rms_norm(row, &of.norm, of.eps, out);
            });
            let key = product(&mut self.k, &of.key, rows);
            let value = of.value.as_ref();
            let value = value.map(|value| product(&mut self.v, value, rows));
            kernels.products(&self.captured, [key].into_iter().chain(value));
            let (width, dim) = (of.key.rows(), of.shape.head_dim);
            let (k, v) = (&mut self.k[..rows * width], &mut self.v[..rows * width]);
            if of.value.is_none() {
                v.copy_from_slice(k);
            }
            for value in v.chunks_exact_mut(dim) {
                kernels.rms_norm_in_place(value, &of.value_norm, of.eps);
            }
            self.angles.clear();
            for s in sequences {
                let positions = s.position..s.position + s.tokens.len();
                of.rope.angles(positions, &mut self.angles);
            }
            let turned = HeadTurn {
                norm: (&of.key_norm, of.eps),
                rope: &of.rope,
                angles: &self.angles,
                scale: 1.0,
            };
            turn(kernels, k, width, turned);
            kernels.write_kv(&mut self.cache, i, &written, &self.k, &self.v);
        }
    }

    /// The next draft token of each sequence: its logits and the state behind it.
    fn draft(&mut self, sequences: &[HeadRows<'_>]) {
        let head = Arc::clone(&self.head);
        let (kernels, c, n) = (&*head.kernels, head.width, sequences.len());
        self.input.resize(n);
        kernels.fill_rows(&mut self.input, |i, out| {
            let (token, state) = out.split_at_mut(c);
            let s = &sequences[i];
            head.embedding.row(s.tokens[s.tokens.len() - 1], token);
            token.iter_mut().for_each(|x| *x *= head.embedding_scale);
            state.copy_from_slice(&s.features[s.features.len() - c..]);
        });
        let mixed = product(&mut self.residual, &head.input, n);
        kernels.products(&self.input, [mixed]);
        for x in [&mut self.normed, &mut self.hidden, &mut self.last] {
            x.resize(n);
        }
        let read = attention_rows(sequences, |s| (1, s.pending));
        for (i, layer) in head.layers.iter().enumerate() {
            self.attend((i, layer), &read);
            self.feed_forward(layer, n);
            let rows = &mut self.residual[..n * head.config.width];
            rows.iter_mut().for_each(|x| *x *= layer.scale);
        }
        let norm = (&head.output_norm[..], head.config.norm_eps);
        norm_rows(kernels, &self.residual, norm, &mut self.last);
        let products = [
            product(&mut self.states, &head.state, n),
            product(&mut self.scores, head.output.matrix(), n),
        ];
        kernels.products(&self.last, products);
        self.score_chosen(n);
    }

    /// residual -> residual, by attention to the model's keys and values
    fn attend(&mut self, (i, layer): (usize, &AssistantLayer), read: &[AttentionRows<'_>]) {
        let (head, n) = (&*self.head, read.len());
        let (kernels, shape) = (&*head.kernels, &head.config.layers[i]);
        let (eps, keeper) = (head.config.norm_eps, &head.keepers[layer.keeper]);
        norm_rows(
            kernels,
            &self.residual,
            (&layer.norms[0], eps),
            &mut self.normed,
        );
        let query = product(&mut self.q, &layer.query, n);
        kernels.products(&self.normed, [query]);
        let (rope, width) = (&head.config.ropes[shape.rope], layer.query.rows());
        self.angles.clear();
        for row in read {
            let at = row.position + 1;
            rope.angles(at..at + 1, &mut self.angles);
        }
        let turned = HeadTurn {
            norm: (&layer.query_norm, eps),
            rope,
            angles: &self.angles,
            scale: shape.query_scale,
        };
        turn(kernels, &mut self.q[..n * width], width, turned);
        let attended = &mut self.attended[layer.keeper];
        attended.resize(n);
        let step = AttentionStep {
            cache: &self.cache,
            layer: layer.keeper,
            heads: shape.heads,
            group: shape.heads / keeper.shape.kv_heads,
            skipped: 0,
            // The query's own position, which has no key, counts too.
            window: shape.window.map(|window| (window - 1).max(1)),
            sinks: None,
            cap: None,
            queries: &self.q,
            sequences: read,
        };
        kernels.attention(&step, &mut self.scratch, attended.values_mut());
        kernels.quantise(attended);
        let out = product(&mut self.delta, &layer.attention_output, n);
        kernels.products(attended, [out]);
        self.add_delta(&layer.norms[1], n);
    }

    fn feed_forward(&mut self, layer: &AssistantLayer, n: usize) {
        let head = &*self.head;
        let (kernels, norm) = (&*head.kernels, (&layer.norms[2][..], head.config.norm_eps));
        norm_rows(kernels, &self.residual, norm, &mut self.normed);
        let products = [
            product(&mut self.gate, &layer.gate, n),
            product(&mut self.up, &layer.up, n),
        ];
        kernels.products(&self.normed, products);
        let (f, gate, up) = (layer.gate.rows(), &self.gate, &self.up);
        kernels.fill_rows(&mut self.hidden, |i, out| {
            let row = i * f..(i + 1) * f;
            kernels.gelu_mul(&gate[row.clone()], &up[row], out);
        });
        kernels.products(&self.hidden, [product(&mut self.delta, &layer.down, n)]);
        self.add_delta(&layer.norms[3], n);
    }

    /// residual += norm(delta)
    fn add_delta(&mut self, norm: &[f32], n: usize) {
        let (kernels, eps) = (&*self.head.kernels, self.head.config.norm_eps);
        let delta = &mut self.delta[..n * norm.len()];
        for row in delta.chunks_exact_mut(norm.len()) {
            kernels.rms_norm_in_place(row, norm, eps);
        }
        vector::add_assign(&mut self.residual[..delta.len()], delta);
    }

    /// With ordered logits: those of the tokens of each sequence's likeliest clusters.
    fn score_chosen(&mut self, n: usize) {
        let head = &*self.head;
        let Output::Ordered(of) = &head.output else {
            return;
        };
        let (each, scored) = (of.each(), head.output.scored());
        let scores = self.scores.chunks_exact(of.clusters.rows()).take(n);
        for (scores, own) in scores.zip(self.chosen.chunks_exact_mut(scored)) {
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            for (cluster, own) in order.iter().zip(own.chunks_exact_mut(each)) {
                own.copy_from_slice(&of.tokens[cluster * each..(cluster + 1) * each]);
            }
        }
        let (a, last, chosen) = (head.config.width, self.last.values(), &self.chosen);
        let logits = DisjointMut::new(&mut self.logits, each);
        head.kernels.for_rows(n * scored / each, |part| {
            // SAFETY: each part is visited once.
            let logits = unsafe { logits.part(part) };
            let (mut row, x) = (vec![0.0; a], &last[part * each / scored * a..][..a]);
            for (logit, token) in logits.iter_mut().zip(&chosen[part * each..]) {
                of.rows.row(*token, &mut row);
                *logit = row.iter().zip(x).map(|(w, x)| w * x).sum();
            }
        });
    }
}

impl DraftHeadCompute for AssistantCompute {
    fn pages(&self) -> usize {
        self.cache.pages()
    }

    fn forward(&mut self, sequences: &[HeadRows<'_>], pass: PassKind) -> Result<(), Error> {
        if pass != PassKind::Next {
            self.read(sequences);
        }
        if pass != PassKind::Read {
            self.draft(sequences);
        }
        Ok(())
    }

    fn write_logits(&mut self, i: usize, _: DraftPlace, out: &mut [f32]) {
        match &self.head.output {
            Output::All(matrix) => {
                let n = matrix.rows();
                out.copy_from_slice(&self.scores[i * n..(i + 1) * n]);
            }
            ordered @ Output::Ordered(_) => {
                let n = ordered.scored();
                let of = i * n..(i + 1) * n;
                scatter(&self.chosen[of.clone()], &self.logits[of], out);
            }
        }
    }

    fn output(&self, i: usize) -> &[f32] {
        let c = self.head.width;
        &self.states[i * c..(i + 1) * c]
    }
}
