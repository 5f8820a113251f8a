//! Loads one rank's weights: which matrices, norms and biases a layer has.

use std::ops::Range;
use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_tensor::ThreadPool;

use super::reader::WeightReader;
use super::stored::StoredTensor;
use super::{
    Dense, Expert, ExpertCompression, Experts, FeedForward, LayerShard, Linear,
    ParallelExpertNorms, PerLayer, PerLayerInputs, sampled_experts,
};
use crate::config::{Gating, StreamRule};
use crate::packed_file::PackedFile;
use crate::split::Shard;
use crate::streaming::StreamUnit;
use crate::{Config, Error, LayerCache, LayerRole, Nth, Role, config};

/// Loads and packs one rank's weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardLoader<'a> {
    pub(crate) names: WeightReader<'a>,
    pub(crate) config: &'a Config,
    pub(crate) shard: &'a Shard,
    pub(crate) class: KernelClass,
    pub(crate) pool: &'a ThreadPool,
    /// Whether only as many experts of a layer are packed as a row uses; every row is then routed
    /// to these.
    pub(crate) few_experts: bool,
    /// Packed weights on disk.
    pub(crate) packed: Option<&'a PackedFile>,
}

impl ShardLoader<'_> {
    pub(crate) fn embedding(&self) -> Result<StoredTensor, Error> {
        let shape = [self.config.vocab, self.config.width];
        self.names.as_stored(Role::TokenEmbedding, shape)
    }

    /// Per-layer embeddings of the model, with the projection for this rank's layers; `None`
    /// without.
    pub(crate) fn per_layer_inputs(&self) -> Result<Option<PerLayerInputs>, Error> {
        let (c, held) = (self.config, &self.shard.layers);
        let (p, all) = (c.per_layer, c.per_layer * c.layers.len());
        if p == 0 {
            return Ok(None);
        }
        let mine = held.start * p..held.end * p;
        let projection = self.rows(Role::PerLayerProjection, [all, c.width], mine)?;
        Ok(Some(PerLayerInputs {
            embedding: self
                .names
                .as_stored(Role::PerLayerEmbedding, [c.per_layer_vocab, all])?,
            projection: projection.matrix,
            norm: self.names.norm(Role::PerLayerNorm, p)?,
        }))
    }

    /// Per-layer embedding weights of a layer.
    fn per_layer(&self, layer: usize) -> Result<Option<PerLayer>, Error> {
        let (p, width) = (self.config.per_layer, self.config.width);
        if p == 0 {
            return Ok(None);
        }
        let role = |part| Role::Layer(layer, part);
        Ok(Some(PerLayer {
            gate: self.whole(role(LayerRole::PerLayerGate), [p, width], false)?,
            output: self.whole(role(LayerRole::PerLayerOutput), [width, p], false)?,
            norm: self.names.norm(role(LayerRole::PostPerLayerNorm), width)?,
        }))
    }

    /// Norms of a dense feed-forward with parallel experts.
    fn beside(&self, layer: usize) -> Result<Option<ParallelExpertNorms>, Error> {
        let shape = &self.config.layers[layer];
        let compressed = shape.experts.and_then(|experts| experts.compressed);
        if !shape.dense_beside || compressed.is_some() {
            return Ok(None);
        }
        let norm = |part| self.names.norm(Role::Layer(layer, part), self.config.width);
        Ok(Some(ParallelExpertNorms {
            dense: norm(LayerRole::DenseNorm)?,
            before: norm(LayerRole::BesideNorm)?,
            after: norm(LayerRole::PostBesideNorm)?,
        }))
    }

    fn feed_forward(&self, layer: usize) -> Result<FeedForward, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        if !shape.has_feed_forward() {
            return Ok(FeedForward::Nothing);
        }
        let experts = shape.experts;
        let experts = experts.map(|of| self.experts(layer, of, cut.ffn()));
        Ok(match experts.transpose()?.map(Box::new) {
            None => FeedForward::Dense(self.dense(layer)?),
            Some(experts) if shape.dense_beside => FeedForward::Both(self.dense(layer)?, experts),
            Some(experts) => FeedForward::Experts(experts),
        })
    }

    /// Gate, up and down of a layer.
    fn dense(&self, layer: usize) -> Result<Dense, Error> {
        let (width, ffn) = (self.config.width, self.config.layers[layer].ffn);
        let cut = self.shard.layer(layer).dense();
        let role = |part| Role::Layer(layer, part);
        let rows = |part| self.rows(role(part), [ffn, width], cut.columns());
        let [gate, up, down] = self.config.layers[layer].dense_roles();
        Ok(Dense {
            gate: rows(gate)?,
            up: self.gated(|| rows(up))?,
            down: self.summed(role(down), ffn, cut)?,
        })
    }

    /// `up` of a feed-forward or expert, in families with gates.
    fn gated(&self, up: impl FnOnce() -> Result<Linear, Error>) -> Result<Option<Linear>, Error> {
        self.config.family.has_gates().then(up).transpose()
    }

    pub(crate) fn output(&self, tied: bool) -> Result<Linear, Error> {
        self.output_rows(tied, self.shard.vocab())
    }

    pub(crate) fn output_rows(&self, tied: bool, rows: Range<usize>) -> Result<Linear, Error> {
        let role = if tied {
            Role::TokenEmbedding
        } else {
            Role::Output
        };
        let shape = [self.config.vocab, self.config.width];
        self.rows(role, shape, rows)
    }

    /// Norm before the output head; empty in models of gated residual streams.
    pub(crate) fn output_norm(&self) -> Result<Vec<f32>, Error> {
        match self.config.streams {
            // The mix of gated streams has norms.
            Some(of) if of.rule == StreamRule::Gated => Ok(Vec::new()),
            _ => self.names.norm(Role::OutputNorm, self.config.width),
        }
    }

    /// Says what the next matrices belong to, for streaming.
    fn set_unit(&self, unit: Option<StreamUnit>) {
        if let Some(packed) = self.packed {
            packed.set_unit(unit);
        }
    }

    pub(crate) fn layer(&self, i: usize) -> Result<LayerShard, Error> {
        self.set_unit(Some(StreamUnit::Layer(i)));
        let layer = self.layer_matrices(i);
        self.set_unit(None);
        layer
    }

    fn layer_matrices(&self, i: usize) -> Result<LayerShard, Error> {
        let (c, shape, cut) = (self.config, &self.config.layers[i], self.shard.layer(i));
        let k = shape.kv_heads * shape.head_dim;
        let (out, v) = (
            shape.heads * shape.output_dim(),
            shape.kv_heads * shape.value_dim,
        );
        let role = |part| Role::Layer(i, part);
        let rows = |part, all, mine| self.rows(role(part), [all, c.width], mine);
        let latent = shape.latent.map(|latent| self.latent(i, latent));
        let of_heads = |heads: &Range<usize>, dim| heads.start * dim..heads.end * dim;
        let of_kv = |there: bool, part, all, dim| {
            let mine = || rows(part, all, of_heads(&cut.kv_heads, dim));
            there.then(mine).transpose()
        };
        let opt_norm = |there: bool, of, n| there.then(|| self.names.norm(role(of), n)).transpose();
        let [before, after] = [
            c.family.norms_before_halves(),
            c.family.norms_after_halves(),
        ];
        let [query_norm, key_norm] = self.query_key_norms(i)?;
        let ([query, key, value], delta_net) = match (shape.cache, shape.latent) {
            (LayerCache::Delta(net), _) => {
                let ([q, k, v], net) = self.delta_net(i, net)?;
                ([Some(q), Some(k), Some(v)], Some(Box::new(net)))
            }
            (_, Some(latent)) => ([Some(self.latent_query(i, latent)?), None, None], None),
            (LayerCache::Compressed(of), _) => {
                ([Some(self.compressed_query(i, of)?), None, None], None)
            }
            _ => {
                let [query, key, value] = shape.input_roles();
                let each = (1 + usize::from(shape.gated)) * shape.head_dim;
                let all = shape.heads * each;
                let of = [
                    Some(rows(query, all, of_heads(&cut.heads, each))?),
                    of_kv(shape.has_keys(), key, k, shape.head_dim)?,
                    of_kv(shape.has_values(), value, v, shape.value_dim)?,
                ];
                (of, None)
            }
        };
        Ok(LayerShard {
            streams: self.layer_streams(i)?.map(Box::new),
            attention_norm: opt_norm(before, LayerRole::AttentionNorm, c.width)?,
            query: query.expect("every layer has queries"),
            key,
            value,
            latent: latent.transpose()?.map(Box::new),
            compressed: self.compressed(i)?,
            pooled: self.pool_indexer(i)?.map(Box::new),
            delta_net,
            conv_taps: self.names.short_conv_taps(i, cut)?,
            attention_output: self.summed(role(shape.output_role()), out, &cut.attention)?,
            query_norm,
            key_norm,
            sinks: self.sinks(i)?,
            post_attention_norm: opt_norm(after, LayerRole::PostAttentionNorm, c.width)?,
            ffn_norm: opt_norm(
                before && shape.has_feed_forward(),
                LayerRole::FfnNorm,
                c.width,
            )?,
            feed_forward: self.feed_forward(i)?,
            post_ffn_norm: opt_norm(after, LayerRole::PostFfnNorm, c.width)?,
            value_norm: shape.value_norm.then(|| vec![1.0; shape.value_dim]),
            beside: self.beside(i)?,
            per_layer: self.per_layer(i)?,
            ngrams: self.ngram_memory(i)?.map(Box::new),
            output_scale: self.names.output_scale(i)?,
        })
    }

    /// Norms of queries and keys: per head, or this rank's part of a norm over all heads.
    fn query_key_norms(&self, layer: usize) -> Result<[Option<Vec<f32>>; 2], Error> {
        let (c, shape, cut) = (
            self.config,
            &self.config.layers[layer],
            self.shard.layer(layer),
        );
        let norm = |part, n| self.names.norm(Role::Layer(layer, part), n);
        let dim = shape.head_dim;
        if c.family.norms_projections() {
            let of = |part, all: usize, mine: &Range<usize>| {
                let whole = norm(part, all * dim)?;
                Ok::<_, Error>(Some(whole[mine.start * dim..mine.end * dim].to_vec()))
            };
            return Ok([
                of(LayerRole::QueryNorm, shape.heads, &cut.heads)?,
                of(LayerRole::KeyNorm, shape.kv_heads, &cut.kv_heads)?,
            ]);
        }
        if matches!(shape.cache, LayerCache::Delta(_) | LayerCache::Conv(_)) {
            return Ok([None, None]);
        }
        let there = self.names.norms_heads(layer)?;
        let of = |there: bool, part| there.then(|| norm(part, dim)).transpose();
        Ok([
            of(there, LayerRole::QueryNorm)?,
            of(there && shape.has_kv(), LayerRole::KeyNorm)?,
        ])
    }

    /// Attention sinks of this rank's heads.
    fn sinks(&self, layer: usize) -> Result<Option<Vec<f32>>, Error> {
        if !self.config.family.has_sinks() {
            return Ok(None);
        }
        let heads = self.shard.layer(layer).heads.clone();
        let role = Role::Layer(layer, LayerRole::Sinks);
        let all = self.names.finite(role, self.config.layers[layer].heads)?;
        Ok(Some(all[heads].to_vec()))
    }

    /// Expert `e` of a layer; the index after the last is the shared one.
    fn expert(&self, layer: usize, of: config::Experts, e: usize) -> Result<Expert, Error> {
        let width = of.row_width(self.config.width);
        let nth = Nth {
            index: e,
            of: of.count,
        };
        let routed = (e < of.count).then_some(nth);
        let linear = |part, shape: [usize; 2]| {
            let role = Role::Layer(layer, part);
            let bias = routed.map(|nth| self.names.expert_bias(role, nth, shape[0]));
            self.check_finite(role, shape)?;
            Ok::<_, Error>(Linear {
                matrix: self.whole(role, shape, false)?,
                bias: bias.transpose()?.flatten(),
            })
        };
        let ([gate, up, down], ffn) = match routed {
            Some(nth) => (
                [
                    LayerRole::ExpertGate,
                    LayerRole::ExpertUp,
                    LayerRole::ExpertDown,
                ]
                .map(|part| part(nth)),
                of.width,
            ),
            None => (
                [
                    LayerRole::SharedGate,
                    LayerRole::SharedUp,
                    LayerRole::SharedDown,
                ],
                of.shared,
            ),
        };
        Ok(Expert {
            gate: linear(gate, [ffn, width])?,
            up: self.gated(|| linear(up, [ffn, width]))?,
            down: linear(down, [width, ffn])?,
        })
    }

    /// Experts `mine` of a layer; the index after the last is the shared one.
    fn experts(
        &self,
        layer: usize,
        of: config::Experts,
        mine: Range<usize>,
    ) -> Result<Experts, Error> {
        let width = self.config.width;
        let role = |part| Role::Layer(layer, part);
        let router = |part, rows| {
            let shape = [rows, width];
            self.names.check_router(role(part), shape)?;
            self.whole(role(part), shape, true)
        };
        let expert = |e| {
            self.set_unit(Some(StreamUnit::Expert(layer, e)));
            let expert = self.expert(layer, of, e);
            self.set_unit(Some(StreamUnit::Layer(layer)));
            expert
        };
        let gated = of.shared > 0 && of.shared_gate;
        let has_gate = gated && mine.end == of.leaves() && !mine.is_empty();
        Ok(Experts {
            router: Linear {
                matrix: router(LayerRole::Router, of.count)?,
                bias: match self.few_experts {
                    false => self.names.bias(role(LayerRole::Router), of.count)?,
                    true => Some(sampled_experts::preferring(of)),
                },
            },
            // It could outweigh the bias that selects the packed few.
            choice: (of.corrected && !self.few_experts)
                .then(|| self.names.finite(role(LayerRole::RouterChoice), of.count))
                .transpose()?,
            router_norm: of
                .scaled
                .then(|| self.names.router_norm(layer))
                .transpose()?,
            table: match of.gating == Gating::OfToken && !self.few_experts {
                true => Some(self.names.expert_table(layer, of)?),
                false => None,
            },
            scales: of
                .scaled
                .then(|| self.names.finite(role(LayerRole::ExpertScales), of.count))
                .transpose()?,
            shared_router: has_gate
                .then(|| router(LayerRole::SharedRouter, 1))
                .transpose()?,
            compression: self.compression(layer, of)?.map(Box::new),
            first: mine.start,
            experts: match self.few_experts {
                false => mine
                    .map(|e| expert(e).map(Arc::new))
                    .collect::<Result<_, _>>()?,
                true => sampled_experts::experts(of, mine, expert)?,
            },
        })
    }

    /// Matrices around a layer's experts of compressed rows.
    fn compression(
        &self,
        layer: usize,
        of: config::Experts,
    ) -> Result<Option<ExpertCompression>, Error> {
        let Some(compressed) = of.compressed else {
            return Ok(None);
        };
        let ([width, row], role) = ([self.config.width, compressed.width], |part| {
            Role::Layer(layer, part)
        });
        let norm = || self.names.norm(role(LayerRole::ExpertsNorm), row);
        Ok(Some(ExpertCompression {
            down: self.whole(role(LayerRole::ExpertsDown), [row, width], false)?,
            norm: compressed.normed.then(norm).transpose()?,
            up: self.whole(role(LayerRole::ExpertsUp), [width, row], false)?,
        }))
    }
}
