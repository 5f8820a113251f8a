//! The operations of a family's layer on the CPU kernels.

use paceline_base::lock;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{DeltaStep, ShortConvStep, StateRule, vector};

use super::adapter_products::AdapterProducts;
use super::latent::LatentInputs;
use super::ngrams::NgramInputs;
use super::projections::Projected;
use super::rows::{add_bias, multiply, norm_in_place, norm_row, product};
use super::{ForwardStep, experts, per_layer};
use crate::families::{Half, LayerStep};
use crate::weights::{self, LayerShard};
use crate::{Error, LayerRole};

impl<'b> LayerStep for ForwardStep<'_, 'b> {
    type Layer = LayerShard;

    fn norm(&mut self, w: &LayerShard, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.attention_norm.as_deref(),
            Half::FeedForward => w.ffn_norm.as_deref(),
            Half::ParallelExperts => Some(&*beside(w).before),
        };
        let weight = weight.expect("loaded for this family");
        let model = self.model;
        let (width, ws) = (weight.len(), &mut *self.ws);
        let alternating = ws.alternating.as_ref();
        let residual = alternating.map_or(&ws.residual, |streams| &streams.active);
        model.kernels().fill_rows(&mut ws.x, |t, out| {
            norm_row(model, &residual[t * width..(t + 1) * width], weight, out);
        });
        Ok(())
    }

    fn add_ngrams(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (model, config) = (self.model, self.model.config());
        let ngrams = config.ngrams.as_ref();
        let of = ngrams.and_then(|of| Some((of, of.table(layer)?)));
        let (Some(of), Some(weights)) = (of, w.ngrams.as_deref()) else {
            return Ok(());
        };
        let behind = 2 * model.shard().layers.len(); // the layers and their compressed keys
        let place = NgramInputs {
            kernels: model.kernels(),
            eps: config.norm_eps,
            of,
            keys: of.0.keys.map(|_| model.token_keys()),
            weights,
            sequences: &self.sequences[self.sequences()],
            cache: (self.cache, behind + self.held(layer)),
        };
        let ws = &mut *self.ws;
        let rows = ws.ngrams.as_mut().expect("made for such memories");
        let tokens = self.batch.sequences.iter().flat_map(|s| s.tokens);
        let residual = &mut ws.residual[..self.rows * config.residual_width()];
        rows.add(&place, tokens, residual);
        Ok(())
    }

    fn mix_streams(&mut self, w: &LayerShard, half: Half) -> Result<(), Error> {
        let Some(own) = &w.streams else {
            return self.norm(w, half);
        };
        if let Some(streams) = self.ws.attended_streams {
            self.attend_streams(w, streams, half);
            return Ok(());
        }
        let which = usize::from(half != Half::Attention);
        let (config, ws) = (self.model.config(), &mut *self.ws);
        let (width, residual) = (config.residual_width(), &ws.residual);
        let row = |t: usize| &residual[t * width..(t + 1) * width];
        let place = (self.model.kernels(), config.norm_eps);
        if let Some(streams) = &mut ws.constrained {
            let norm = [&w.attention_norm, &w.ffn_norm][which].as_deref();
            let norm = norm.expect("loaded for this family");
            let mix = &own.constrained()[which];
            streams.mix(place, (Some(mix), norm), row, &mut ws.x);
            return Ok(());
        }
        let streams = ws.streams.as_mut().expect("made for several streams");
        streams.mix(place, &own.mixes()[which], row, &mut ws.x);
        Ok(())
    }

    fn add_to_streams(&mut self) -> Result<(), Error> {
        let (config, ws) = (self.model.config(), &mut *self.ws);
        if config.streams.is_none() {
            return self.add_delta();
        }
        let delta = &ws.sums.delta[..self.rows * config.width];
        let residual = &mut ws.residual[..self.rows * config.residual_width()];
        let kernels = self.model.kernels();
        match (ws.attended_streams, &ws.constrained, &ws.streams) {
            (Some(streams), _, _) => streams.add(kernels, delta, residual),
            (None, Some(streams), _) => streams.add(kernels, delta, residual),
            (None, None, Some(streams)) => streams.add(kernels, delta, residual),
            (None, None, None) => unreachable!("the residual is one stream"),
        }
        Ok(())
    }

    fn predict_streams(&mut self, w: &LayerShard) -> Result<(), Error> {
        self.alternate(w, |streams, place, w, residual, x| {
            streams.predict(place, w, residual, x);
        });
        Ok(())
    }

    fn project_laurel(&mut self, w: &LayerShard) -> Result<(), Error> {
        self.alternate(w, |streams, place, w, _, x| {
            streams.project_laurel(place, w, x)
        });
        Ok(())
    }

    fn add_laurel(&mut self) -> Result<(), Error> {
        let n = self.rows * self.model.config().width;
        let streams = self.ws.alternating.as_mut();
        streams.expect("made for these streams").add_laurel(n);
        Ok(())
    }

    fn correct_streams(&mut self, w: &LayerShard) -> Result<(), Error> {
        self.alternate(w, |streams, place, w, residual, x| {
            streams.correct(place, w, residual, x);
        });
        Ok(())
    }

    fn take_residual(&mut self) -> Result<(), Error> {
        let (width, residual) = (self.model.config().width, &self.ws.residual);
        self.model.kernels().fill_rows(&mut self.ws.x, |t, out| {
            out.copy_from_slice(&residual[t * width..(t + 1) * width]);
        });
        Ok(())
    }

    fn project_qkv(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (rows, shape) = (self.rows, self.layer().0);
        let ws = &mut *self.ws;
        let gates = ws.mixer.as_mut().filter(|_| shape.gated);
        let linears = [Some(&w.query), w.key.as_ref(), w.value.as_ref()];
        let q = match gates {
            Some(mixer) => &mut mixer.wide,
            None => &mut ws.q,
        };
        let outs = [&mut *q, &mut ws.k, &mut ws.v].into_iter().zip(linears);
        let products = outs.filter_map(|(out, linear)| Some(product(out, linear?, rows)));
        self.model.kernels().products(&ws.x, products);
        let parts = [LayerRole::Query, LayerRole::Key, LayerRole::Value];
        let outs = [q, &mut ws.k, &mut ws.v].into_iter().zip(linears);
        for ((out, linear), part) in outs.zip(parts) {
            add_bias(out, linear.and_then(|linear| linear.bias.as_deref()), rows);
            if let Some(beside) = AdapterProducts::of(self.model, (self.index, part), &self.adapted)
            {
                beside.add(&ws.x, out);
            }
        }
        if let (Some(key), None) = (&w.key, &w.value) {
            let n = rows * key.matrix.rows();
            ws.v[..n].copy_from_slice(&ws.k[..n]); // keys as values
        }
        if let Some(mixer) = ws.mixer.as_ref().filter(|_| shape.gated) {
            mixer.take_queries(shape.head_dim, rows, &w.query, &mut ws.q);
        }
        Ok(())
    }

    fn clamp_qkv(&mut self) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        let limit = self.model.config().clamp_qkv;
        let Some(limit) = limit.filter(|_| !cut.heads.is_empty()) else {
            return Ok(());
        };
        let (rows, kernels) = (self.rows, self.model.kernels());
        let ws = &mut *self.ws;
        for (values, n) in [
            (&mut ws.q, cut.heads.len() * shape.head_dim),
            (&mut ws.k, cut.kv_heads.len() * shape.head_dim),
            (&mut ws.v, cut.kv_heads.len() * shape.value_dim),
        ] {
            let values = DisjointMut::new(&mut values[..rows * n], n);
            kernels.for_rows(rows, |t| {
                // SAFETY: each row is visited once.
                let row = unsafe { values.part(t) };
                row.iter_mut().for_each(|x| *x = x.clamp(-limit, limit));
            });
        }
        Ok(())
    }

    fn norm_heads(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        let dim = shape.head_dim;
        let pairs = [
            (&mut self.ws.q, &w.query_norm, cut.heads.len()),
            (&mut self.ws.k, &w.key_norm, cut.kv_heads.len()),
        ];
        for (x, weight, heads) in pairs.into_iter().take(1 + usize::from(shape.has_kv())) {
            let weight = weight.as_deref().expect("loaded for this family");
            let x = &mut x[..self.rows * heads * dim];
            norm_in_place(self.model, x, weight);
        }
        Ok(())
    }

    fn norm_values(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if let Some(weight) = w.value_norm.as_deref().filter(|_| shape.has_kv()) {
            let n = self.rows * cut.kv_heads.len() * shape.value_dim;
            norm_in_place(self.model, &mut self.ws.v[..n], weight);
        }
        Ok(())
    }

    fn norms_heads(&self, w: &LayerShard) -> bool {
        w.query_norm.is_some()
    }

    fn norm_projections(&mut self, w: &LayerShard) -> Result<(), Error> {
        let ws = &mut *self.ws;
        let projections = ws.projections.as_mut().expect("made for this family");
        let parts = [(&mut ws.q, &w.query_norm), (&mut ws.k, &w.key_norm)];
        let parts = parts.map(|(values, norm)| Projected {
            values,
            weight: norm.as_deref().expect("loaded for this family"),
        });
        let place = (self.model, self.index);
        projections.norm(place, self.rows, parts, self.turn.as_mut())
    }

    fn rotate(&mut self, _: usize) -> Result<(), Error> {
        self.rotate_heads();
        Ok(())
    }

    fn attend(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        self.attend_rows(w, layer);
        Ok(())
    }

    fn project_latent(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let config = self.model.config();
        let rope = &config.ropes[shape.rope];
        let ws = &mut *self.ws;
        let place = LatentInputs {
            kernels: self.model.kernels(),
            shape,
            rope,
            angles: &ws.angles[shape.rope],
            batch: self.batch,
        };
        let latents = ws.latents.as_mut().expect("made for this family");
        latents.project(&place, w, &ws.x, [&mut ws.q, &mut ws.k]);
        Ok(())
    }

    fn select_positions(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if let Some(own) = w.pooled.as_deref().filter(|_| !cut.heads.is_empty()) {
            self.select_pools(own, layer);
        }
        let own = w.latent.as_deref().and_then(|own| own.indexer.as_ref());
        let Some(own) = own.filter(|_| !cut.heads.is_empty()) else {
            return Ok(());
        };
        let (held, sequences) = (self.held(layer), &self.sequences[self.sequences()]);
        let ws = &mut *self.ws;
        let place = LatentInputs {
            kernels: self.model.kernels(),
            shape,
            rope: &ws.ropes[shape.rope],
            angles: &ws.angles[shape.rope],
            batch: self.batch,
        };
        let latents = ws.latents.as_ref().expect("made for this family");
        let index = ws.index.as_mut().expect("made for this family");
        index.project(&place, own, &ws.x, latents.compressed());
        index.select(&place, own, (self.cache, held), sequences);
        Ok(())
    }

    fn attend_latent(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        self.attend_latents(w, layer);
        Ok(())
    }

    fn attend_compressed(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        self.attend_compressed_keys(w, layer);
        Ok(())
    }

    fn gate_attention(&mut self, _: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let held = self.held(self.index);
        let mixer = self.ws.mixer.as_mut().expect("made for gated heads");
        let out = self.ws.attended.of(held).values_mut();
        mixer.gate(self.model.kernels(), shape.head_dim, self.rows, out);
        Ok(())
    }

    fn is_short_conv(&self, w: &LayerShard) -> bool {
        w.conv_taps.is_some()
    }

    fn short_conv(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        let n = cut.heads.len() * shape.head_dim;
        if n == 0 {
            return Ok(());
        }
        let (held, rows) = (self.held(layer), self.rows);
        let sequences = &self.sequences[self.sequences()];
        let (kernels, ws) = (self.model.kernels(), &mut *self.ws);
        multiply(&mut ws.v[..rows * n], &ws.k);
        let step = ShortConvStep {
            layer: held,
            taps: w.conv_taps.as_deref().expect("the family asked"),
            stride: 1,
            inputs: &ws.v[..rows * n],
            sequences,
        };
        let out = ws.attended.of(held).values_mut();
        kernels.short_conv(&step, &mut lock(self.cache), out);
        multiply(&mut out[..rows * n], &ws.q);
        Ok(())
    }

    fn is_delta_net(&self, w: &LayerShard) -> bool {
        w.delta_net.is_some()
    }

    fn project_delta_net(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (rows, ws) = (self.rows, &mut *self.ws);
        let net = w.delta_net.as_ref().expect("the family asked");
        let mixer = ws.mixer.as_mut().expect("made for delta nets");
        let [key, value] = [&w.key, &w.value].map(|linear| linear.as_ref().expect("loaded"));
        let qkv = [
            product(&mut ws.q, &w.query, rows),
            product(&mut ws.k, key, rows),
            product(&mut ws.v, value, rows),
        ];
        let kernels = self.model.kernels();
        let gates = mixer.products(net, rows);
        kernels.products(&ws.x, qkv.into_iter().chain(gates));
        mixer.finish_gates(kernels, net, rows);
        Ok(())
    }

    fn delta_net(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let held = self.held(layer);
        let sequences = &self.sequences[self.sequences()];
        let ws = &mut *self.ws;
        let mixer = ws.mixer.as_mut().expect("made for delta nets");
        let net = w.delta_net.as_ref().expect("the family asked");
        let (kernels, out) = (self.model.kernels(), ws.attended.of(held).values_mut());
        let step = DeltaStep {
            layer: held,
            key_heads: &net.key_heads,
            rule: net.rule,
            conv: &net.vectors.conv,
            conv_bias: &net.vectors.conv_bias,
            skip: &net.vectors.skip,
            queries: &ws.q,
            keys: &ws.k,
            values: &ws.v,
            steps: &mixer.steps,
            decays: &mixer.decays,
            sequences,
        };
        kernels.delta(&step, &mut lock(self.cache), &mut mixer.mixed, out);
        let eps = self.model.config().norm_eps;
        let group = shape.value_dim * (shape.heads / shape.kv_heads);
        let out = &mut out[..self.rows * cut.heads.len() * shape.value_dim];
        match net.rule {
            StateRule::Difference | StateRule::Channels => {
                mixer.norm_and_gate((kernels, eps), net, shape.value_dim, out);
            }
            StateRule::Sum => mixer.gate_and_norm((kernels, eps), net, group, out),
        }
        Ok(())
    }

    fn project_attention(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (held, cut) = (self.held(self.index), &self.layer().1.attention);
        let ws = &mut *self.ws;
        let attended = ws.attended.of(held);
        self.model.kernels().quantise(attended);
        let place = (self.model, self.index, &*self.adapted);
        let weights = (&w.attention_output, LayerRole::AttentionOutput);
        ws.sums
            .compute(place, weights, cut, attended, self.turn.as_mut())
    }

    fn norm_delta(&mut self, w: &LayerShard, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.post_attention_norm.as_deref(),
            Half::FeedForward => w.post_ffn_norm.as_deref(),
            Half::ParallelExperts => Some(&*beside(w).after),
        };
        let weight = weight.expect("loaded for this family");
        let delta = &mut self.ws.sums.delta[..self.rows * weight.len()];
        norm_in_place(self.model, delta, weight);
        Ok(())
    }

    fn scale_delta(&mut self) -> Result<(), Error> {
        let scale = self.model.config().residual_scale;
        if scale != 1.0 {
            let n = self.rows * self.model.config().width;
            let delta = self.ws.sums.delta[..n].iter_mut();
            delta.for_each(|x| *x *= scale);
        }
        Ok(())
    }

    fn add_delta(&mut self) -> Result<(), Error> {
        let (rows, width) = (self.rows, self.model.config().width);
        let ws = &mut *self.ws;
        let delta = &ws.sums.delta;
        let alternating = ws.alternating.as_mut();
        let residual = alternating.map_or(&mut ws.residual, |streams| &mut streams.active);
        let residual = DisjointMut::new(&mut residual[..rows * width], width);
        self.model.kernels().for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { residual.part(t) };
            vector::add_assign(row, &delta[t * width..(t + 1) * width]);
        });
        Ok(())
    }

    fn project_gate_up(&mut self, w: &LayerShard) -> Result<(), Error> {
        let w = w.feed_forward.dense();
        let (ws, rows) = (&mut *self.ws, self.rows);
        let outs = [product(&mut ws.gate, &w.gate, rows)].into_iter();
        let up = w.up.as_ref().map(|up| product(&mut ws.up, up, rows));
        self.model.kernels().products(&ws.x, outs.chain(up));
        let both = [
            (&mut ws.gate, Some(&w.gate), LayerRole::Gate),
            (&mut ws.up, w.up.as_ref(), LayerRole::Up),
        ];
        for (out, linear, part) in both {
            let Some(linear) = linear else { continue };
            add_bias(out, linear.bias.as_deref(), rows);
            if let Some(beside) = AdapterProducts::of(self.model, (self.index, part), &self.adapted)
            {
                beside.add(&ws.x, out);
            }
        }
        Ok(())
    }

    fn has_feed_forward(&self, w: &LayerShard) -> bool {
        !matches!(w.feed_forward, weights::FeedForward::Nothing)
    }

    fn has_experts(&self, w: &LayerShard) -> bool {
        w.feed_forward.experts().is_some()
    }

    fn has_dense_beside(&self, w: &LayerShard) -> bool {
        matches!(w.feed_forward, weights::FeedForward::Both(..))
    }

    fn experts(&mut self, w: &LayerShard) -> Result<(), Error> {
        let weights = w.feed_forward.experts().expect("the family asked");
        let (shape, cut) = self.layer();
        let (of, cut) = (shape.experts.expect("the family asked"), &cut.feed_forward);
        let (rows, ws) = (self.rows, &mut *self.ws);
        let routed = ws.experts.as_mut().expect("the model has experts");
        let width = self.model.config().width;
        routed.norm(self.model, weights, &ws.residual[..rows * width]);
        let first = self.model.links().map_or(0, |_| cut.roots_before());
        let n = rows * of.row_width(width);
        let delta = &mut ws.sums.delta[first * n..];
        let place = (self.model, self.index);
        let x = (&ws.x, &ws.residual[..rows * width]);
        routed.take_tokens(weights, self.batch);
        let routed_place = (place.0, place.1, &*self.adapted);
        routed.compute(routed_place, (weights, cut), x, delta)?;
        ws.sums.exchange(place, cut, n, self.turn.as_mut())?;
        let eps = (self.model.kernels(), self.model.config().norm_eps);
        routed.expand(eps, weights, rows, &mut ws.sums.delta);
        Ok(())
    }

    fn activate(&mut self) -> Result<(), Error> {
        let cutoff = self.layer().0.gate_cutoff;
        let (kernels, held) = (self.model.kernels(), self.held(self.index));
        let ws = &mut *self.ws;
        if let (Some(cutoff), Some(cutoffs)) = (cutoff, &mut ws.cutoffs) {
            let place = (self.model, self.index);
            cutoffs.cut(place, (cutoff, &mut ws.gate), self.rows, self.turn.as_mut())?;
        }
        let hidden = ws.hidden.of(held);
        let ffn = hidden.cols();
        let (gate, up, config) = (&ws.gate, &ws.up, self.model.config());
        let function = experts::GateFunction::new(config, config.dense_clamp);
        kernels.fill_rows(hidden, |t, out| {
            let part = t * ffn..(t + 1) * ffn;
            let (gate, up) = (&gate[part.clone()], up.get(part).unwrap_or_default());
            experts::activate(kernels, function, [gate, up], out);
        });
        Ok(())
    }

    fn project_down(&mut self, w: &LayerShard) -> Result<(), Error> {
        let down = &w.feed_forward.dense().down;
        let (held, cut) = (self.held(self.index), self.layer().1.dense());
        let place = (self.model, self.index, &*self.adapted);
        let (weights, turn) = ((down, LayerRole::Down), self.turn.as_mut());
        let ws = &mut *self.ws;
        ws.sums
            .compute(place, weights, cut, ws.hidden.of(held), turn)
    }

    fn set_aside(&mut self, w: &LayerShard) -> Result<(), Error> {
        let n = self.rows * self.model.config().width;
        let ws = &mut *self.ws;
        ws.aside[..n].copy_from_slice(&ws.sums.delta[..n]);
        if let Some(norms) = &w.beside {
            norm_in_place(self.model, &mut ws.aside[..n], &norms.dense);
        }
        Ok(())
    }

    fn add_aside(&mut self) -> Result<(), Error> {
        let n = self.rows * self.model.config().width;
        let ws = &mut *self.ws;
        vector::add_assign(&mut ws.sums.delta[..n], &ws.aside[..n]);
        Ok(())
    }

    fn add_per_layer(&mut self, w: &LayerShard, index: usize) -> Result<(), Error> {
        let Some(weights) = &w.per_layer else {
            return Ok(());
        };
        let (held, model, width) = (self.held(index), self.model, self.model.config().width);
        let (n, ws) = (self.rows * width, &mut *self.ws);
        let (residual, all) = (&ws.residual, model.config().residual_width());
        let alternation = w.streams.as_ref().and_then(|streams| streams.alternation());
        let kernels = model.kernels();
        kernels.fill_rows(&mut ws.x, |t, out| {
            out.copy_from_slice(&residual[t * all..][..width]);
            if let Some(own) = alternation {
                multiply(out, &own.scale);
            }
        });
        let buffers = ws
            .per_layer
            .as_mut()
            .expect("the model has such embeddings");
        let delta = &mut ws.sums.delta[..n];
        buffers.layer(kernels, weights, held, &ws.x, delta);
        per_layer::norm(model, weights, delta);
        if alternation.is_none() {
            return self.add_delta();
        }
        let rows = ws.residual[..self.rows * all].chunks_exact_mut(all);
        for (row, delta) in rows.zip(ws.sums.delta.chunks_exact(width)) {
            let further = row[width..].chunks_exact_mut(width);
            further.for_each(|stream| vector::add_assign(stream, delta));
        }
        Ok(())
    }

    fn scale_residual(&mut self, w: &LayerShard) -> Result<(), Error> {
        if let Some(scale) = w.output_scale {
            let n = self.rows * self.model.config().width;
            let residual = self.ws.residual[..n].iter_mut();
            residual.for_each(|x| *x *= scale);
        }
        Ok(())
    }
}

/// # Panics
/// If the layer has no parallel experts.
const fn beside(w: &LayerShard) -> &weights::ParallelExpertNorms {
    w.beside.as_ref().expect("loaded for this family")
}
