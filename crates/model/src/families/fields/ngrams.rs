//! Fields of memories of n-grams: Qwen4-Exp's per-layer embeddings, DeepSeek V4.1's engrams.

use serde_json::Value;

use super::{ConfigFields, wrong_value};
use crate::config::{
    MAX_LEAST_ROWS, MAX_LONGEST, MAX_NGRAM_HEADS, MAX_TABLES, MAX_TAPS, MAX_WIDTH, NgramTable,
    Ngrams, pcg_factors, primes_from, split_mix_factors,
};
use crate::{Config, Error, LayerCache};

/// Most rows of a table: positions of rows have 32 bits.
const MAX_ROWS: u64 = u32::MAX as u64;

impl ConfigFields<'_> {
    /// Embeddings of n-grams of Qwen4-Exp; `None` without.
    pub(crate) fn ngram_embeddings(&self, config: &Config) -> Result<Option<Ngrams>, Error> {
        const LAYERS: &str = "ple_layer_ids";
        const WIDTH: &str = "ple_embed_dim";
        let size = |name, usual: u64, low, high| {
            let said = self.opt_size("", name, low, high)?;
            Ok::<_, Error>(said.unwrap_or(usual as usize)) // defaults of the class
        };
        // They count from 1.
        let mut layers = self.memory_layers(LAYERS, (1, config.layers.len()))?;
        layers.sort_unstable();
        layers.dedup();
        if layers.is_empty() {
            return Ok(None);
        }
        let is_net = |layer: &usize| matches!(config.layers[*layer].cache, LayerCache::Delta(_));
        if let Some(other) = layers.iter().find(|layer| !is_net(layer)) {
            return Err(wrong_value(LAYERS, other + 1, "layers of linear attention"));
        }
        let longest = size("ngram_size", 3, 2, MAX_LONGEST)?;
        let heads = size("heads_per_ngram", 8, 1, MAX_NGRAM_HEADS)?;
        let columns = (longest - 1) * heads;
        let width = size(WIDTH, config.width as u64, 1, MAX_WIDTH)?;
        if !width.is_multiple_of(columns) {
            return Err(wrong_value(
                WIDTH,
                width,
                format!("a multiple of {columns}"),
            ));
        }
        let stop = self.stop_token(config.vocab)?;
        let least = size("ngram_vocab_size_base", 20_000_000, 2, MAX_LEAST_ROWS)?;
        let of = size("make_ngram_vocab_size_divisible_by", 128, 1, 1 << 20)?;
        let seed = self.hf("seed", "a number", Value::as_u64)?.unwrap_or(1234);
        let factors = |nth, _| split_mix_factors(seed, nth, longest, config.vocab);
        let mut tables = tables(&layers, (least, columns), factors);
        for table in &mut tables {
            table.rows = table.rows.next_multiple_of(of);
        }
        Ok(Some(Ngrams {
            longest,
            heads,
            dim: width / columns,
            taps: size("ple_conv_kernel_size", 4, 1, MAX_TAPS as u64)?,
            stop: Some(stop),
            blank: stop,
            keys: None,
            tables,
        }))
    }

    /// Memory of n-grams of DeepSeek V4.1; `None` without.
    pub(crate) fn engrams(&self, config: &Config) -> Result<Option<Ngrams>, Error> {
        const LAYERS: &str = "engram_layer_ids";
        const ROWS: &str = "engram_num_embeddings";
        const BLANK: &str = "engram_pad_token_id";
        let layers = self.memory_layers(LAYERS, (0, config.layers.len()))?;
        if layers.is_empty() {
            return Ok(None);
        }
        if let Some(pair) = layers.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(wrong_value(LAYERS, pair[1], "layers in ascending order"));
        }
        let size = |name, low, high| self.size("", name, low, high);
        let longest = size("engram_max_ngram_size", 2, MAX_LONGEST)?;
        let heads = size("engram_n_heads", 1, MAX_NGRAM_HEADS)?;
        let keys = size("engram_compressed_vocab_size", 1, config.vocab as u64)?;
        let least = size("engram_vocab_size", 2, MAX_LEAST_ROWS)?;
        let blank = |name| self.opt_size("", name, 0, config.vocab as u64 - 1);
        let blank = match blank(BLANK)? {
            None => blank("engram_pad_id")?, // as transformers saves it
            said => said,
        };
        let blank = blank.ok_or_else(|| self.missing(BLANK, BLANK))?;
        let factors = |_, layer| pcg_factors(layer, longest, keys);
        let mut tables = tables(&layers, (least, (longest - 1) * heads), factors);
        let rows = self.hf(ROWS, "a list", Value::as_array)?;
        let rows = rows.ok_or_else(|| self.missing(ROWS, ROWS))?;
        for (nth, table) in tables.iter_mut().enumerate() {
            let said = rows.get(nth).and_then(Value::as_u64);
            let fits = |rows: &u64| (table.rows as u64..=MAX_ROWS).contains(rows);
            let said = said.filter(fits).ok_or_else(|| {
                let expected = format!("{} or more of table {nth}", table.rows);
                wrong_value(ROWS, Value::Array(rows.clone()), expected)
            });
            table.rows = said? as usize;
        }
        Ok(Some(Ngrams {
            longest,
            heads,
            dim: size("engram_head_dim", 1, MAX_WIDTH)?,
            taps: 0,
            stop: None,
            blank: blank as u32,
            keys: Some(keys),
            tables,
        }))
    }

    /// Layers of a list that counts from `first`, in its order.
    fn memory_layers(
        &self,
        field: &'static str,
        (first, layers): (usize, usize),
    ) -> Result<Vec<usize>, Error> {
        let list = self.hf(field, "a list", Value::as_array)?;
        let layer = |n: &Value| {
            let layer = n
                .as_u64()
                .and_then(|n| usize::try_from(n).ok()?.checked_sub(first));
            let layer = layer.filter(|layer| *layer < layers);
            let expected = || format!("numbers of layers, {first} to {}", first + layers - 1);
            layer.ok_or_else(|| wrong_value(field, n, expected()))
        };
        let all = list
            .into_iter()
            .flatten()
            .map(layer)
            .collect::<Result<Vec<_>, _>>()?;
        match all.len() {
            ..=MAX_TABLES => Ok(all),
            n => Err(wrong_value(field, n, format!("up to {MAX_TABLES} layers"))),
        }
    }

    /// The first token that ends a text.
    fn stop_token(&self, vocab: usize) -> Result<u32, Error> {
        const FIELD: &str = "eos_token_id";
        let said = self.hf(FIELD, "a token or a list", |value| match value {
            Value::Array(list) => list.first().map(Value::as_u64),
            one => Some(one.as_u64()),
        })?;
        let token = said.flatten().filter(|token| *token < vocab as u64);
        let token = token.ok_or_else(|| self.missing(FIELD, FIELD))?;
        Ok(token as u32)
    }
}

/// Tables of `layers` whose heads have the primes from `least` on as numbers of rows.
fn tables(
    layers: &[usize],
    (least, columns): (usize, usize),
    factors: impl Fn(usize, usize) -> Vec<u64>,
) -> Vec<NgramTable> {
    let primes = primes_from(least as u64, layers.len() * columns);
    let parts = layers.iter().zip(primes.chunks_exact(columns)).enumerate();
    let table = |(nth, (layer, primes)): (usize, (&usize, &[u64]))| NgramTable {
        layer: *layer,
        rows: primes.iter().sum::<u64>() as usize,
        factors: factors(nth, *layer),
        primes: primes.to_vec(),
    };
    parts.map(table).collect()
}
