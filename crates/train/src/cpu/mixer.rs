//! The first half of a layer without its norms and its output. It is attention, in some models with
//! latent elements or gated heads, or a gated delta net.
//!
//! Letters: T tokens, C width, H query heads, K KV heads, D and E elements of a key and a value.

use paceline_model::LayerCache;

use super::attention::LeafAttention;
use super::delta::{DeltaKept, DeltaLayer};
use super::latent::{self, LatentKept, LatentLayer};
use super::{Cpu, KEY, QUERY, VALUE};
use crate::engine::LeafRows;
use crate::ops;

/// Values that the forward pass leaves for the backward one.
#[derive(Debug)]
pub(super) enum MixerKept {
    Attention(Box<AttentionKept>),
    Delta(Box<DeltaKept>),
}

#[derive(Debug)]
pub(super) struct AttentionKept {
    /// Queries, keys and values as attention had them.
    inputs: [Vec<f32>; 3],
    /// (T, H D) and (T, K D) before norms of heads, if there are any.
    raw: Option<[Vec<f32>; 2]>,
    latent: Option<LatentKept>,
    /// (T, H D): gates of heads before their sigmoid, and what attention gave.
    gates: Option<[Vec<f32>; 2]>,
}

impl Cpu<'_> {
    /// x (T, C) -> attended (T, H E)
    pub(super) fn mix(
        &self,
        (layer, rows): (usize, &LeafRows),
        params: &[f32],
        x: &[f32],
    ) -> (Vec<f32>, MixerKept) {
        if let Some(at) = self.delta_layer(layer, rows) {
            let (attended, kept) = self.delta_net(at, params, x);
            return (attended, MixerKept::Delta(Box::new(kept)));
        }
        let attention = self.attention(layer, params, rows);
        let mut kept = match self.latent_layer(layer, rows) {
            Some(at) => {
                let (inputs, latent) = self.latent(at, params, x);
                AttentionKept {
                    inputs,
                    raw: None,
                    latent: Some(latent),
                    gates: None,
                }
            }
            None => self.heads((layer, &attention), params, x),
        };
        let [query, key, value] = &kept.inputs;
        let mut attended = attention.forward(query, key, value);
        if let Some([gates, before]) = &mut kept.gates {
            before.clone_from(&attended);
            let both = attended.iter_mut().zip(gates);
            both.for_each(|(x, gate)| *x *= ops::sigmoid(*gate));
        }
        (attended, MixerKept::Attention(Box::new(kept)))
    }

    /// d attended (T, H E) -> dx (T, C), at the input `x`.
    pub(super) fn mix_back(
        &self,
        (layer, rows): (usize, &LeafRows),
        params: &[f32],
        (x, kept): (&[f32], MixerKept),
        mut d_attended: Vec<f32>,
        grads: &mut [f32],
    ) -> Vec<f32> {
        let kept = match (kept, self.delta_layer(layer, rows)) {
            (MixerKept::Delta(kept), Some(at)) => {
                return self.delta_net_back(at, params, (x, &kept, &d_attended), grads);
            }
            (MixerKept::Attention(kept), _) => kept,
            (MixerKept::Delta(_), None) => unreachable!("the layer has a delta net"),
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
        let [query, key, value] = &kept.inputs;
        let sinks = self.weights.layer(layer).sinks.as_ref();
        let d_sinks = sinks.and_then(|sinks| sinks.grads(grads));
        let d = attention.backward([query, key, value], &d_attended, d_sinks);
        match (self.latent_layer(layer, rows), &kept.latent) {
            (Some(at), Some(latent)) => self.latent_back(at, params, (x, latent), d, grads),
            _ => self.heads_back((layer, &attention), params, (x, &kept, d_gates), d, grads),
        }
    }

    /// x (T, C) -> q (T, H D), k, v (T, K D)
    fn heads(
        &self,
        (layer, attention): (usize, &LeafAttention<'_>),
        params: &[f32],
        x: &[f32],
    ) -> AttentionKept {
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
        AttentionKept {
            inputs: [query, key, value],
            raw,
            latent: None,
            gates,
        }
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
        rows: &'a LeafRows,
    ) -> LeafAttention<'a> {
        let sinks = self.weights.layer(layer).sinks.as_ref();
        LeafAttention {
            kernels: self.kernels,
            shape: latent::expanded(self.config.layers[layer]),
            rows,
            sinks: sinks.map(|sinks| sinks.get(params)),
        }
    }

    fn latent_layer<'a>(&'a self, layer: usize, rows: &'a LeafRows) -> Option<LatentLayer<'a>> {
        let (shape, weights) = (self.config.layers[layer], self.weights.layer(layer));
        Some(LatentLayer {
            of: shape.latent?,
            shape,
            weights: (weights, weights.latent.as_ref()?),
            rows,
            pairs: self.config.ropes[shape.rope].pairs,
        })
    }

    fn delta_layer<'a>(&'a self, layer: usize, rows: &'a LeafRows) -> Option<DeltaLayer<'a>> {
        let (shape, weights) = (self.config.layers[layer], self.weights.layer(layer));
        let LayerCache::Delta(net) = shape.cache else {
            return None;
        };
        Some(DeltaLayer {
            net,
            shape,
            weights: (weights, weights.delta.as_ref()?),
            rows,
        })
    }
}
