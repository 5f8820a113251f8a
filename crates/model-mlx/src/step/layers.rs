//! The operations of the families' layers.

use paceline_mlx::Array;
use paceline_model::backend::{Half, LayerStep};
use paceline_model::{Error, LayerCache, LayerShape};

use super::weights::{self, Layer, Mixer};
use super::{Linear, Step, Turned};

impl LayerStep for Step<'_> {
    type Layer = Layer;

    fn norm(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.attention_norm.as_ref(),
            Half::FeedForward => w.ffn_norm.as_ref(),
            Half::ParallelExperts => Some(&beside(w).before),
        };
        let weight = weight.expect("loaded for this family");
        self.x = self.normed(self.active(), weight)?;
        Ok(())
    }

    fn add_ngrams(&mut self, _: &Layer, _: usize) -> Result<(), Error> {
        Ok(()) // models with a memory of these are refused
    }

    fn mix_streams(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        if w.streams.is_none() {
            return self.norm(w, half);
        }
        self.x = self.mixed(w, half)?;
        Ok(())
    }

    fn add_to_streams(&mut self) -> Result<(), Error> {
        match self.parts.model.config.streams {
            None => self.add_delta(),
            Some(_) => self.add_to_mixed(),
        }
    }

    fn predict_streams(&mut self, w: &Layer) -> Result<(), Error> {
        self.predicted(w)
    }

    fn project_laurel(&mut self, w: &Layer) -> Result<(), Error> {
        self.laurel_rows(w)
    }

    fn add_laurel(&mut self) -> Result<(), Error> {
        self.with_laurel()
    }

    fn correct_streams(&mut self, w: &Layer) -> Result<(), Error> {
        self.corrected(w)
    }

    fn take_residual(&mut self) -> Result<(), Error> {
        self.x = self.residual.clone();
        Ok(())
    }

    fn project_qkv(&mut self, w: &Layer) -> Result<(), Error> {
        (self.query, self.key_value, self.gates) = (None, None, None);
        let Some(own) = attention(w) else {
            return Ok(());
        };
        let (shape, stream) = (self.layer().0, self.parts.stream);
        let project = |linear: &Linear, x: &Array, dim: usize| {
            let product = self.product(linear, x)?;
            let rows = product.shape()[0];
            Ok::<_, Error>(stream.reshape(&product, &[rows, -1, dim as i32])?)
        };
        let both = project(&own.query, &self.query_input()?, query_dim(shape))?;
        let key_value = own.key.as_ref().map(|key| {
            let key = project(key, &self.x, shape.head_dim)?;
            let value = match &own.value {
                Some(value) => project(value, &self.x, shape.value_dim)?,
                None => key.clone(), // keys as values
            };
            Ok::<_, Error>([key, value])
        });
        self.key_value = key_value.transpose()?;
        self.take_queries(both)
    }

    fn clamp_qkv(&mut self) -> Result<(), Error> {
        let Some(limit) = self.parts.model.config.clamp_qkv else {
            return Ok(());
        };
        let stream = self.parts.stream;
        let key_value = self.key_value.iter_mut().flatten();
        for x in self.query.iter_mut().chain(key_value) {
            let low = stream.scalar(-limit, x.dtype())?;
            let high = stream.scalar(limit, x.dtype())?;
            *x = stream.maximum(&stream.minimum(x, &high)?, &low)?;
        }
        Ok(())
    }

    fn norm_heads(&mut self, w: &Layer) -> Result<(), Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let Some(own) = attention(w) else {
            return Ok(());
        };
        let keys = self.key_value.as_mut().map(|[key, _]| key);
        let pairs = [
            (self.query.as_mut(), &own.query_norm),
            (keys, &own.key_norm),
        ];
        for (x, weight) in pairs {
            if let (Some(x), Some(weight)) = (x, weight) {
                *x = stream.rms_norm(x, weight, eps)?;
            }
        }
        Ok(())
    }

    fn norms_heads(&self, w: &Layer) -> bool {
        attention(w).is_some_and(|own| own.query_norm.is_some())
    }

    fn norm_values(&mut self, w: &Layer) -> Result<(), Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let weight = attention(w).and_then(|own| own.value_norm.as_ref());
        if let (Some([_, value]), Some(weight)) = (&mut self.key_value, weight) {
            *value = stream.rms_norm(value, weight, eps)?;
        }
        Ok(())
    }

    fn norm_projections(&mut self, w: &Layer) -> Result<(), Error> {
        self.norm_over_heads(attention(w))
    }

    fn rotate(&mut self, _: usize) -> Result<(), Error> {
        self.turned.clear();
        let Some(query) = self.query.take() else {
            return Ok(());
        };
        let query = self.grown(query)?;
        let key_value = self.key_value.take();
        self.decoded = match self.decoding() {
            Some(decoding) => {
                let (stream, at) = (self.parts.stream, &decoding.positions);
                let roped = |x: &Array| self.roped_each(&decoding.turned(stream, x)?, at);
                let both = |[key, value]: &[Array; 2]| {
                    Ok::<_, Error>([roped(key)?, decoding.turned(stream, value)?])
                };
                Some(Turned {
                    query: Some(roped(&query)?),
                    key_value: key_value.as_ref().map(both).transpose()?,
                })
            }
            None => None,
        };
        let (mut first, mut first_query) = (0, 0);
        for (i, s) in self.batch.sequences.iter().enumerate() {
            let (n, at) = (s.tokens.len() as i32, s.position as i32);
            let queries = self.n_queries(i) as i32;
            if !self.decoding().is_some_and(|decoding| decoding.has(i)) {
                let own = || self.turned(&query, first_query, queries);
                let own = || self.roped(&own()?, at + n - queries);
                let query = (queries > 0).then(own).transpose()?;
                let own = key_value.as_ref().map(|[key, value]| {
                    let key = self.roped(&self.turned(key, first, n)?, at)?;
                    Ok::<_, Error>([key, self.turned(value, first, n)?])
                });
                let key_value = own.transpose()?;
                self.turned.push((i, Turned { query, key_value }));
            }
            first += n;
            first_query += queries;
        }
        Ok(())
    }

    fn attend(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let turned = std::mem::take(&mut self.turned);
        let (stream, held) = (self.parts.stream, self.held(index));
        let keeper = match self.layer().0.cache {
            LayerCache::Of(of) => self.held(of),
            _ => held,
        };
        let kind = self.parts.constants.span_kind_of[index];
        for (i, own) in &turned {
            if let Some([k, v]) = &own.key_value {
                let span = &self.spans[*i][kind];
                self.parts.cache.write(stream, held, span, [k, v])?;
            }
        }
        let sinks = attention(w).and_then(|own| own.sinks.as_ref());
        let decoded = self.decoded.take();
        let decoded = decoded.map(|decoded| self.decoded_attention(decoded, keeper, sinks));
        let of = |(i, own): &(usize, Turned)| {
            let query = own.query.as_ref();
            query.map(|query| self.attention(*i, keeper, query, sinks))
        };
        let parts = decoded.into_iter().chain(turned.iter().filter_map(of));
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        self.attended = match (self.as_rows(&parts)?, self.decoding()) {
            (Some(rows), Some(decoding)) => Some(decoding.in_order(stream, rows)?),
            (rows, _) => rows,
        };
        self.keep_output_rows()
    }

    fn project_latent(&mut self, w: &Layer) -> Result<(), Error> {
        self.latent_queries(w)
    }

    fn select_positions(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.pool_rows(w, index)?;
        self.index_rows(w, index)
    }

    fn attend_latent(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.latent_attention(w, index)?;
        self.keep_output_rows()
    }

    fn attend_compressed(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.compressed_attention(w, index)
    }

    fn gate_attention(&mut self, _: &Layer) -> Result<(), Error> {
        let stream = self.parts.stream;
        let Some(gates) = self.gates.take() else {
            return Ok(());
        };
        if let Some(attended) = self.attended.take() {
            let gates = stream.reshape(&stream.sigmoid(&gates)?, &attended.shape())?;
            self.attended = Some(stream.multiply(&attended, &gates)?);
        }
        Ok(())
    }

    fn is_short_conv(&self, _: &Layer) -> bool {
        matches!(self.layer().0.cache, LayerCache::Conv(_))
    }

    fn short_conv(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.short_convolution(w, index)?;
        self.keep_output_rows()
    }

    fn is_delta_net(&self, _: &Layer) -> bool {
        matches!(self.layer().0.cache, LayerCache::Delta(_))
    }

    fn project_delta_net(&mut self, w: &Layer) -> Result<(), Error> {
        self.net_rows(w)
    }

    fn delta_net(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.read_net(w, index)?;
        self.keep_output_rows()
    }

    fn project_attention(&mut self, w: &Layer) -> Result<(), Error> {
        let attended = self.attended.take();
        let cut = &self.layer().1.attention;
        self.sum(attended.as_ref(), &w.attention_output, cut)
    }

    fn norm_delta(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.post_attention_norm.as_ref(),
            Half::FeedForward => w.post_ffn_norm.as_ref(),
            Half::ParallelExperts => Some(&beside(w).after),
        };
        let weight = weight.expect("loaded for this family");
        let eps = self.parts.model.config.norm_eps;
        self.delta = self.parts.stream.rms_norm(&self.delta, weight, eps)?;
        Ok(())
    }

    fn scale_delta(&mut self) -> Result<(), Error> {
        let scale = self.parts.model.config.residual_scale;
        if scale != 1.0 {
            let scale = self.parts.stream.scalar(scale, self.delta.dtype())?;
            self.delta = self.parts.stream.multiply(&self.delta, &scale)?;
        }
        Ok(())
    }

    fn add_delta(&mut self) -> Result<(), Error> {
        let sum = self.parts.stream.add(self.active(), &self.delta)?;
        *self.streams.active.as_mut().unwrap_or(&mut self.residual) = sum;
        Ok(())
    }

    fn has_feed_forward(&self, _: &Layer) -> bool {
        self.layer().0.has_feed_forward()
    }

    fn has_dense_beside(&self, _: &Layer) -> bool {
        self.layer().0.dense_beside
    }

    fn has_experts(&self, w: &Layer) -> bool {
        w.experts.is_some()
    }

    fn experts(&mut self, w: &Layer) -> Result<(), Error> {
        let own = w.experts.as_ref().expect("the family asked");
        if own.slots.is_some() {
            self.settle()?; // the choice is evaluated within the step
        }
        let part = self.expert_part(own)?;
        let sum = self.sum_parts(&part)?;
        self.delta = self.expanded(own, sum)?;
        Ok(())
    }

    fn set_aside(&mut self, w: &Layer) -> Result<(), Error> {
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        self.aside = Some(match &w.beside {
            Some(norms) => stream.rms_norm(&self.delta, &norms.dense, eps)?,
            None => self.delta.clone(),
        });
        Ok(())
    }

    fn add_aside(&mut self) -> Result<(), Error> {
        if let Some(aside) = self.aside.take() {
            self.delta = self.parts.stream.add(&self.delta, &aside)?;
        }
        Ok(())
    }

    fn add_per_layer(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.add_own_embeddings(w, index)
    }

    fn scale_residual(&mut self, w: &Layer) -> Result<(), Error> {
        if let Some(scale) = &w.output_scale {
            self.residual = self.parts.stream.multiply(&self.residual, scale)?;
        }
        Ok(())
    }

    fn project_gate_up(&mut self, w: &Layer) -> Result<(), Error> {
        self.gate_up = match &dense(w).gate_up {
            Some((gate, up)) => {
                let up = up.as_ref().map(|up| self.product(up, &self.x));
                Some((self.product(gate, &self.x)?, up.transpose()?))
            }
            None => None,
        };
        Ok(())
    }

    fn activate(&mut self) -> Result<(), Error> {
        self.cut_gates()?;
        let Some((gate, up)) = self.gate_up.take() else {
            return Ok(());
        };
        let (gates, stream) = (&self.parts.constants.gates, self.parts.stream);
        self.hidden = Some(gates.hidden(stream, &gate, up.as_ref())?);
        Ok(())
    }

    fn project_down(&mut self, w: &Layer) -> Result<(), Error> {
        let hidden = self.hidden.take();
        let cut = self.layer().1.dense();
        self.sum(hidden.as_ref(), &dense(w).down, cut)
    }
}

/// Elements of a head's query, with its gate where it has one.
const fn query_dim(shape: &LayerShape) -> usize {
    if shape.gated {
        2 * shape.head_dim
    } else {
        shape.head_dim
    }
}

/// The weights of attention; none for a rank without heads.
const fn attention(w: &Layer) -> Option<&weights::Attention> {
    match &w.mixer {
        Mixer::Attention(own) => Some(own),
        _ => None,
    }
}

/// # Panics
/// If the layer has experts only.
const fn dense(w: &Layer) -> &weights::Dense {
    w.dense.as_ref().expect("a layer with experts only")
}

/// # Panics
/// If the layer has no experts parallel to its feed-forward.
const fn beside(w: &Layer) -> &weights::Beside {
    w.beside.as_ref().expect("loaded for this family")
}
