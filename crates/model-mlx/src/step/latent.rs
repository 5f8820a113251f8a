//! Latent attention in its absorbed form, as on the CPU. Queries are brought to the latent numbers
//! that all heads share. The latent numbers that a head reads are expanded to its value.
//!
//! H heads of this rank, N plain elements of a query, P that turn, R latent numbers, V elements of
//! a value.

use paceline_mlx::Array;
use paceline_model::{BatchSequence, Error, Latent};

use super::Step;
use super::weights::{self, Layer, Mixer};

impl Step<'_> {
    /// x (T, C) -> of each sequence q (1, H, n, R + P) and k (1, 1, n, R + P).
    pub(super) fn latent_queries(&mut self, w: &Layer) -> Result<(), Error> {
        self.latent.clear();
        let (Mixer::Latent(own), Some(of)) = (&w.mixer, self.layer().0.latent) else {
            return Ok(());
        };
        let own: &weights::Latent = own;
        let (stream, rows) = (self.parts.stream, self.batch.rows() as i32);
        let compressed = match &own.query_down {
            Some((down, norm)) => {
                let compressed = self.product(down, &self.x)?;
                stream.rms_norm(&compressed, norm, of.norm_eps)?
            }
            None => self.x.clone(),
        };
        let queries = self.product(&own.query, &compressed)?;
        self.compressed = Some(compressed);
        let queries = stream.reshape(&queries, &[rows, -1, of.query_dim() as i32])?;
        let both = self.product(&own.down, &self.x)?;
        let (rank, all) = (of.rank as i32, of.key_dim() as i32);
        let latent = stream.slice(&both, &[0, 0], &[rows, rank])?;
        let latent = stream.rms_norm(&latent, &own.norm, of.norm_eps)?;
        let turned = stream.slice(&both, &[0, rank], &[rows, all])?;
        let mut first = 0;
        for s in self.batch.sequences {
            let n = s.tokens.len();
            let query = self.turned(&queries, first as i32, n as i32)?;
            let query = self.latent_query((own, of), s, &query)?;
            let parts = [&latent, &turned].map(|x| self.rows_of(x, first, n));
            let [latent, turned] = parts;
            let key = self.latent_key(s, &latent?, &turned?)?;
            self.latent.push([query, key]);
            first += n;
        }
        Ok(())
    }

    /// A sequence's queries (1, H, n, N + P) as they meet latent numbers, (1, H, n, R + P).
    fn latent_query(
        &self,
        (own, of): (&weights::Latent, Latent),
        s: &BatchSequence<'_>,
        query: &Array,
    ) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let sizes = query.shape();
        let (heads, n, plain) = (sizes[1], sizes[2], of.plain as i32);
        let of_latent = stream.slice(query, &[0, 0, 0, 0], &[1, heads, n, plain])?;
        let of_latent = stream.reshape(&of_latent, &[heads, n, plain])?;
        let of_latent = own.keys.apply(stream, &of_latent)?;
        let of_latent = stream.reshape(&of_latent, &[1, heads, n, -1])?;
        let turned = stream.slice(query, &[0, 0, 0, plain], &[1, heads, n, sizes[3]])?;
        let turned = self.roped(&turned, s.position as i32)?;
        let query = stream.concatenate(&[&of_latent, &turned], 3)?;
        let Some(growth) = of.growth else {
            return Ok(query);
        };
        let positions = s.position..s.position + s.tokens.len();
        let factors: Vec<f32> = positions.map(|position| growth.at(position)).collect();
        let factors = stream.array_f32(&factors, &[1, 1, n, 1])?;
        let factors = stream.astype(&factors, query.dtype())?;
        Ok(stream.multiply(&query, &factors)?)
    }

    /// A sequence's keys (1, 1, n, R + P) of its normed latent numbers (n, R) and those that turn,
    /// (n, P).
    fn latent_key(
        &self,
        s: &BatchSequence<'_>,
        latent: &Array,
        turned: &Array,
    ) -> Result<Array, Error> {
        let (stream, n) = (self.parts.stream, s.tokens.len() as i32);
        let latent = stream.reshape(latent, &[1, 1, n, -1])?;
        let turned = stream.reshape(turned, &[1, 1, n, -1])?;
        let turned = self.roped(&turned, s.position as i32)?;
        Ok(stream.concatenate(&[&latent, &turned], 3)?)
    }

    /// Writes keys to the cache, then queries -> attended (T, H V).
    pub(super) fn latent_attention(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        let Mixer::Latent(own) = &w.mixer else {
            return Ok(());
        };
        let (stream, held) = (self.parts.stream, self.held(index));
        let latent = std::mem::take(&mut self.latent);
        let kind = self.parts.constants.span_kind_of[index];
        // Keys with index keys are written already.
        let plain = latent.iter().filter(|_| own.indexer.is_none());
        for ([_, key], spans) in plain.zip(&self.spans) {
            let span = &spans[kind];
            self.parts.cache.write_latent(stream, held, span, key)?;
        }
        let expand = |(i, [query, _]): (usize, &[Array; 2])| {
            let read = self.selected_attention(i, held, query)?;
            let sizes = read.shape();
            let read = stream.reshape(&read, &sizes[1..])?;
            let values = own.values.apply(stream, &read)?;
            Ok::<_, Error>(stream.reshape(&values, &[1, sizes[1], sizes[2], -1])?)
        };
        let parts = latent.iter().enumerate().map(expand);
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        self.attended = self.as_rows(&parts)?;
        if let (Some(gate), Some(attended)) = (&own.gate, &self.attended) {
            let gates = stream.sigmoid(&self.product(gate, &self.x)?)?;
            self.attended = Some(stream.multiply(attended, &gates)?);
        }
        Ok(())
    }
}
