//! The first half of a layer without its norms and its output. It is attention, in some models with
//! latent elements or gated heads, or a gated delta net.
//!
//! Letters: T tokens, C width, H query heads, K KV heads, D and E elements of a key and a value.

use paceline_model::LayerCache;

use super::attention::LeafAttention;
use super::delta::{DeltaKept, DeltaLayer};
use super::latent::{self, LatentKept, LatentLayer};
use super::{Cpu, KEY, QUERY, VALUE};
use crate::ops;
use crate::rows::BlockRows;

/// Values that the forward pass leaves for the backward one.
#[derive(Debug)]
pub(super) enum MixerKept {
    Attention(Box<AttentionKept>),
    Delta(Box<DeltaKept>),
}

#[derive(Debug)]
pub(super) struct AttentionKept {
    /// Queries as attention had them.
    query: Vec<f32>,
    /// (T, H D) and (T, K D) before norms of heads, if there are any.
    raw: Option<[Vec<f32>; 2]>,
    latent: Option<LatentKept>,
    /// (T, H D): gates of heads before their sigmoid, and what attention gave.
    gates: Option<[Vec<f32>; 2]>,
}

/// The inputs of attention of a block's rows, or the result of a delta net.
pub(super) struct Mixed {
    pub(super) kept: MixerKept,
    /// (T, K D) and (T, K E).
    pub(super) keys: [Vec<f32>; 2],
    /// (T, H E) of a delta net.
    attended: Option<Vec<f32>>,
}

/// Gradients of attention's queries and gates, or of a delta net's result.
pub(super) struct MixerGradients {
    query: Vec<f32>,
    gates: Option<Vec<f32>>,
}

impl Cpu<'_> {
    /// Numbers of a row of keys, and of values.
    pub(super) fn key_widths(&self, layer: usize) -> [usize; 2] {
        let shape = latent::expanded(self.config.layers[layer]);
        [shape.head_dim, shape.value_dim].map(|dim| shape.kv_heads * dim)
    }

    /// x (T, C) -> what attention takes.
    pub(super) fn mix(
        &self,
        (layer, rows): (usize, &BlockRows<'_>),
        params: &[f32],
        x: &[f32],
    ) -> Mixed {
        if let Some(at) = self.delta_layer(layer, rows) {
            let (attended, kept) = self.delta_net(at, params, x);
            return Mixed {
                kept: MixerKept::Delta(Box::new(kept)),
                keys: [Vec::new(), Vec::new()],
                attended: Some(attended),
            };
        }
        let attention = self.attention(layer, params, rows);
        let (kept, keys) = match self.latent_layer(layer, rows) {
            Some(at) => {
                let ([query, key, value], latent) = self.latent(&at, params, x);
                let kept = AttentionKept {
                    query,
                    raw: None,
                    latent: Some(latent),
                    gates: None,
                };
                (kept, [key, value])
            }
            None => self.heads((layer, &attention), params, x),
        };
        Mixed {
            kept: MixerKept::Attention(Box::new(kept)),
            keys,
            attended: None,
        }
    }

    /// Keys and values of the leaf -> attended (T, H E)
    pub(super) fn attend(
        &self,
        (layer, rows): (usize, &BlockRows<'_>),
        params: &[f32],
        mixed: Mixed,
        [key, value]: &[Vec<f32>; 2],
    ) -> (Vec<f32>, MixerKept) {
        let kept = match (mixed.kept, mixed.attended) {
            (MixerKept::Attention(kept), _) => kept,
            (kept, attended) => return (attended.unwrap_or_default(), kept),
        };
        let mut kept = kept;
        let attention = self.attention(layer, params, rows);
        let mut attended = attention.forward(&kept.query, key, value);
        if let Some([gates, before]) = &mut kept.gates {
            before.clone_from(&attended);
            let both = attended.iter_mut().zip(gates);
            both.for_each(|(x, gate)| *x *= ops::sigmoid(*gate));
        }
        (attended, MixerKept::Attention(kept))
    }

    /// d attended (T, H E) -> gradients of queries, and of all keys and values of the leaf.
    pub(super) fn attend_back(
        &self,
        (layer, rows): (usize, &BlockRows<'_>),
        params: &[f32],
        (kept, [key, value]): (&MixerKept, &[Vec<f32>; 2]),
        mut d_attended: Vec<f32>,
        grads: &mut [f32],
    ) -> (MixerGradients, [Vec<f32>; 2]) {
        let MixerKept::Attention(kept) = kept else {
            let (query, gates) = (d_attended, None);
            return (MixerGradients { query, gates }, [Vec::new(), Vec::new()]);
        };
        let mut d_gates = None;
        if let Some([gates, before]) = &kept.gates {
            let mut found = Vec::with_capacity(gates.len());
            for ((d, gate), before) in d_attended.iter_mut().zip(gates).zip(before) {
                let s = ops::sigmoid(*gate);
                found.push(*d * before * s * (1.0 - s));
                *d *= s;
            }
            d_gates = Some(found);
        }
        let attention = self.attention(layer, params, rows);
        let sinks = self.weights.layer(layer).sinks.as_ref();
        let d_sinks = sinks.and_then(|sinks| sinks.grads(grads));
        let [query, keys, values] =
            attention.backward([&kept.query, key, value], &d_attended, d_sinks);
        let gates = d_gates;
        (MixerGradients { query, gates }, [keys, values])
    }

    /// Gradients of queries, and of this block's keys and values -> dx (T, C), at the input `x`.
    pub(super) fn mix_back(
        &self,
        (layer, rows): (usize, &BlockRows<'_>),
        params: &[f32],
        (x, kept): (&[f32], &MixerKept),
        (d, [dk, dv]): (MixerGradients, [Vec<f32>; 2]),
        grads: &mut [f32],
    ) -> Vec<f32> {
        let kept = match (kept, self.delta_layer(layer, rows)) {
            (MixerKept::Delta(kept), Some(at)) => {
                return self.delta_net_back(at, params, (x, kept, &d.query), grads);
            }
            (MixerKept::Attention(kept), _) => kept,
            (MixerKept::Delta(_), None) => unreachable!("the layer has a delta net"),
        };
        let attention = self.attention(layer, params, rows);
        let of_inputs = [d.query, dk, dv];
        match (self.latent_layer(layer, rows), &kept.latent) {
            (Some(at), Some(latent)) => {
                self.latent_back(&at, params, (x, latent), of_inputs, grads)
            }
            _ => {
                let at = (x, kept.as_ref(), d.gates);
                self.heads_back((layer, &attention), params, at, of_inputs, grads)
            }
        }
    }

    /// x (T, C) -> q (T, H D), k, v (T, K D)
    fn heads(
        &self,
        (layer, attention): (usize, &LeafAttention<'_>),
        params: &[f32],
        x: &[f32],
    ) -> (AttentionKept, [Vec<f32>; 2]) {
        let (w, shape) = (self.weights.layer(layer), self.config.layers[layer]);
        let mut query = self.linear(&w.matrices[QUERY], params, x);
        let mut gates = None;
        if shape.gated {
            let [own, of_heads] = latent::split(&query, [shape.head_dim; 2]);
            query = own;
            gates = Some([of_heads, Vec::new()]);
        }
        let mut key = self.linear(&w.matrices[KEY], params, x);
        let value = self.linear(&w.matrices[VALUE], params, x);
        let mut raw = None;
        if let (Some(q), Some(k)) = (&w.query_norm, &w.key_norm) {
            let (q, k) = (self.norm(q, params, &query), self.norm(k, params, &key));
            raw = Some([
                std::mem::replace(&mut query, q),
                std::mem::replace(&mut key, k),
            ]);
        }
        attention.rotate(&mut query, &mut key, false);
        let kept = AttentionKept {
            query,
            raw,
            latent: None,
            gates,
        };
        (kept, [key, value])
    }

    /// Gradients of q, k, v and the gates -> dx (T, C)
    fn heads_back(
        &self,
        (layer, attention): (usize, &LeafAttention<'_>),
        params: &[f32],
        (x, kept, d_gates): (&[f32], &AttentionKept, Option<Vec<f32>>),
        [mut dq, mut dk, dv]: [Vec<f32>; 3],
        grads: &mut [f32],
    ) -> Vec<f32> {
        let w = self.weights.layer(layer);
        attention.rotate(&mut dq, &mut dk, true);
        if let (Some(q), Some(k), Some([raw_q, raw_k])) = (&w.query_norm, &w.key_norm, &kept.raw) {
            let zeros = |like: &[f32]| vec![0.0; like.len()];
            let (mut before_q, mut before_k) = (zeros(&dq), zeros(&dk));
            self.norm_back(q, params, (raw_q, &dq), &mut before_q, grads);
            self.norm_back(k, params, (raw_k, &dk), &mut before_k, grads);
            (dq, dk) = (before_q, before_k);
        }
        if let Some(d_gates) = d_gates {
            dq = latent::join([&dq, &d_gates], [attention.shape.head_dim; 2]);
        }
        let mut dx = vec![0.0; x.len()];
        for (n, d) in [(QUERY, &dq), (KEY, &dk), (VALUE, &dv)] {
            let at = (&w.matrices[n], x);
            self.linear_back(at, params, d, (&mut dx, n != QUERY), grads);
        }
        dx
    }

    fn attention<'a>(
        &'a self,
        layer: usize,
        params: &'a [f32],
        rows: &BlockRows<'a>,
    ) -> LeafAttention<'a> {
        let sinks = self.weights.layer(layer).sinks.as_ref();
        LeafAttention {
            kernels: self.kernels,
            shape: latent::expanded(self.config.layers[layer]),
            rows: rows.clone(),
            sinks: sinks.map(|sinks| sinks.get(params)),
        }
    }

    fn latent_layer<'a>(&'a self, layer: usize, rows: &BlockRows<'a>) -> Option<LatentLayer<'a>> {
        let (shape, weights) = (self.config.layers[layer], self.weights.layer(layer));
        Some(LatentLayer {
            of: shape.latent?,
            shape,
            weights: (weights, weights.latent.as_ref()?),
            rows: rows.clone(),
            pairs: self.config.ropes[shape.rope].pairs,
        })
    }

    fn delta_layer<'a>(&'a self, layer: usize, rows: &BlockRows<'a>) -> Option<DeltaLayer<'a>> {
        let (shape, weights) = (self.config.layers[layer], self.weights.layer(layer));
        let LayerCache::Delta(net) = shape.cache else {
            return None;
        };
        Some(DeltaLayer {
            net,
            shape,
            weights: (weights, weights.delta.as_ref()?),
            rows: rows.leaf(),
        })
    }
}
