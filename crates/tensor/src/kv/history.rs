//! Tokens of positions, which memories of n-grams look back at.

use super::{KvCache, LayerStore};
use crate::attention::PAGE;
use crate::kernels::AttentionRows;

/// Stands for the tokens before the first position.
pub const NO_TOKEN: u32 = u32::MAX;

impl KvCache {
    /// Keeps the token of each row of a step in a layer of states without length, whose keys have
    /// one element. Gives each row the `n` newest tokens, its own first: `out` is `(rows, n)`. They
    /// come from pages, so they depend neither on the rest of the batch nor on where a prompt was
    /// cut.
    ///
    /// # Panics
    /// On lengths that do not fit, another store, or pages that a sequence lacks.
    pub fn token_history(
        &mut self,
        layer: usize,
        (sequences, tokens): (&[AttentionRows<'_>], &[u32]),
        n: usize,
        out: &mut [u32],
    ) {
        let place = self.layers[layer];
        let is_kept =
            matches!(place.store, LayerStore::State(of) if (of.len, of.head_dim) == (0, 1));
        assert!(
            is_kept && out.len() == n * tokens.len(),
            "{} tokens of {} rows in {:?}",
            out.len(),
            tokens.len(),
            place.store
        );
        let mut rows = tokens.iter().zip(out.chunks_exact_mut(n.max(1)));
        for sequence in sequences {
            let positions = sequence.position..sequence.position + sequence.rows;
            for (position, (token, out)) in positions.zip(&mut rows) {
                let start = |cache: &Self, at: usize| {
                    cache.offset(layer, sequence.page(at / PAGE), 0) + 4 * (at % PAGE)
                };
                let own = start(self, position);
                self.pools[place.pool].data[own..own + 4].copy_from_slice(&token.to_ne_bytes());
                for (back, out) in out.iter_mut().enumerate() {
                    *out = position.checked_sub(back).map_or(NO_TOKEN, |at| {
                        let start = start(self, at);
                        let kept = self.pools[place.pool].data[start..].first_chunk();
                        u32::from_ne_bytes(*kept.expect("within the page"))
                    });
                }
            }
        }
    }
}
