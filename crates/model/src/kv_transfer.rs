//! KV transfer between splits: the byte ranges of a cache page that one rank sends a rank of
//! another split.
//!
//! The prefill nodes of disaggregated prefill send pages to the decoding nodes this way. This
//! module only plans ranges; the node crate moves the bytes.
//!
//! ```text
//! giver, stage of layers 0..2    layer 0: heads 0 1 2 3 | layer 1: heads 0 1 2 3
//! taker, half of each layer              heads     2 3 |          heads     2 3 | layer 2 ...
//! runs (from, to, bytes)                 (2, 0, 2)       (6, 2, 2)
//! ```
//!
//! By the numerics rule a head of a layer has the same bytes on every rank that computes it. So
//! pages computed by one split serve another. If several source ranks have a head, the first of
//! them sends it. A gated delta net occupies one contiguous range of a page: source and destination
//! must have the same heads of it.

use std::ops::Range;

use paceline_base::Rank;
use paceline_tensor::{KvType, LayerStore};

use crate::config::{entries, store};
use crate::{Config, Error, Kinds, Split};

/// Bytes that are contiguous in the source page and in the destination page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Offset in the source page.
    pub from: usize,
    /// Offset in the destination page.
    pub to: usize,
    /// Bytes.
    pub len: usize,
}

/// The bytes of each page that one rank sends another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvTransferPlan {
    /// Per page pool, in order of the destination's bytes.
    pub runs: Vec<Vec<CopyRange>>,
    /// Bytes of a destination page, per pool.
    pub page_bytes: Vec<usize>,
}

impl KvTransferPlan {
    /// Bytes sent per page of `pool`.
    ///
    /// # Panics
    /// If there is no such pool.
    pub fn bytes(&self, pool: usize) -> usize {
        self.runs[pool].iter().map(|run| run.len).sum()
    }

    /// The bytes of a source `page` of `pool` to send, in order.
    ///
    /// # Panics
    /// If there is no such pool, or the page is shorter than the source's.
    pub fn gather(&self, pool: usize, page: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes(pool));
        for run in &self.runs[pool] {
            bytes.extend_from_slice(&page[run.from..run.from + run.len]);
        }
        bytes
    }

    /// Writes `bytes` from [`gather`](Self::gather) into the destination's `page`.
    ///
    /// # Panics
    /// If a length differs from the pool's.
    pub fn scatter(&self, pool: usize, bytes: &[u8], page: &mut [u8]) {
        let mut rest = bytes;
        for run in &self.runs[pool] {
            let (own, behind) = rest.split_at(run.len);
            page[run.to..run.to + run.len].copy_from_slice(own);
            rest = behind;
        }
        assert!(rest.is_empty(), "{} bytes too many", rest.len());
    }
}

/// Kinds of rows of a layer in a slice, in their order in a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SliceKind {
    Cache,
    /// Compressed keys.
    Entries,
    /// Memory of n-grams.
    Ngrams,
}

/// A rank's part of one layer within the pages of a pool.
struct PageSlice {
    layer: usize,
    kind: SliceKind,
    pool: usize,
    start: usize,
    head_bytes: usize,
    /// Consecutive heads; a slice that is not divided by heads counts as one.
    heads: Range<usize>,
    /// Query and KV heads of a slice that is not divided by heads.
    whole: Option<(Range<usize>, Range<usize>)>,
}

/// A rank's slices of a page, and the page size of each pool.
fn pieces(
    config: &Config,
    kv: KvType,
    (split, rank): (&Split, Rank),
) -> (Vec<PageSlice>, Vec<usize>) {
    let (shard, kinds) = (split.shard(config, rank), Kinds::new(config));
    let mut page_bytes = vec![0; kinds.len()];
    let mut pieces = Vec::new();
    let kinds_of = [SliceKind::Cache, SliceKind::Entries, SliceKind::Ngrams];
    let all = kinds_of.into_iter();
    let all = all.flat_map(|kind| shard.layers.clone().map(move |layer| (layer, kind)));
    for (layer, kind) in all {
        let (cut, shape) = (shard.layer(layer), &config.layers[layer]);
        let held = (cut.heads.len(), cut.kv_heads.len());
        let (store, pool) = match kind {
            SliceKind::Cache => (store(shape, held, kv), kinds.of(layer)),
            SliceKind::Entries => (entries(shape, held.1), 0),
            SliceKind::Ngrams => (config.ngram_store(layer), kinds.of(layer)),
        };
        let (start, bytes) = (page_bytes[pool], store.page_bytes());
        page_bytes[pool] += bytes;
        let (heads, whole) = match store {
            LayerStore::Nothing => continue,
            _ if kind == SliceKind::Ngrams => (0..1, None), // whole on every rank
            LayerStore::Delta(_) | LayerStore::Pooled(..) => {
                (0..1, Some((cut.heads.clone(), cut.kv_heads.clone())))
            }
            _ => (cut.kv_heads.clone(), None),
        };
        pieces.push(PageSlice {
            layer,
            kind,
            pool,
            start,
            head_bytes: bytes / heads.len().max(1),
            heads,
            whole,
        });
    }
    (pieces, page_bytes)
}

/// Plans the bytes that source rank `from` sends rank `to` of another split. Both store keys and
/// values as `kv`.
///
/// # Errors
/// [`Error::NotHanded`] for a layer of the destination that no source rank has with the same heads.
pub fn kv_transfer_plan(
    config: &Config,
    kv: KvType,
    (givers, from): (&Split, Rank),
    to: (&Split, Rank),
) -> Result<KvTransferPlan, Error> {
    let all: Vec<Vec<PageSlice>> = (0..givers.ranks())
        .map(|rank| pieces(config, kv, (givers, Rank(rank))).0)
        .collect();
    let (own, page_bytes) = pieces(config, kv, to);
    let mut runs = vec![Vec::new(); page_bytes.len()];
    for piece in &own {
        for head in piece.heads.clone() {
            let holds = |other: &&PageSlice| {
                let part = |of: &PageSlice| (of.layer, of.kind);
                let is_it = part(other) == part(piece) && other.whole == piece.whole;
                is_it && other.heads.contains(&head)
            };
            let giver = all.iter().enumerate();
            let mut giver =
                giver.filter_map(|(rank, pieces)| Some((rank, pieces.iter().find(holds)?)));
            let (rank, theirs) = giver
                .next()
                .ok_or(Error::NotHanded { layer: piece.layer })?;
            if rank == from.0 as usize {
                let place = |of: &PageSlice| of.start + (head - of.heads.start) * of.head_bytes;
                push(
                    &mut runs[piece.pool],
                    CopyRange {
                        from: place(theirs),
                        to: place(piece),
                        len: piece.head_bytes,
                    },
                );
            }
        }
    }
    Ok(KvTransferPlan { runs, page_bytes })
}

/// Appends a range, merged into the last one if contiguous in both pages.
fn push(runs: &mut Vec<CopyRange>, run: CopyRange) {
    match runs.last_mut() {
        Some(last) if (last.from + last.len, last.to + last.len) == (run.from, run.to) => {
            last.len += run.len;
        }
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SplitKind;
    use crate::split::tests::smollm2;

    /// A page whose bytes encode layer, head and offset.
    fn page(config: &Config, of: (&Split, Rank)) -> Vec<u8> {
        let (pieces, bytes) = pieces(config, KvType::F16, of);
        let mut page = vec![0; bytes[0]];
        for piece in pieces {
            for (at, head) in piece.heads.clone().enumerate() {
                let start = piece.start + at * piece.head_bytes;
                let of = (piece.layer * 3 + head) as u8;
                for (i, byte) in page[start..start + piece.head_bytes].iter_mut().enumerate() {
                    *byte = of.wrapping_mul(7).wrapping_add(i as u8);
                }
            }
        }
        page
    }

    #[test]
    fn every_rank_gets_the_bytes_that_it_would_have_computed() {
        let config = smollm2();
        let plan = |kind, ranks| Split::plan(&config, kind, ranks, &[]).unwrap();
        let splits = [
            plan(SplitKind::Tensor, 1),
            plan(SplitKind::Tensor, 2),
            plan(SplitKind::Tensor, 3),
            plan(SplitKind::Pipeline, 4),
            plan(
                SplitKind::Grid {
                    tensor: 2,
                    pipeline: 2,
                },
                4,
            ),
        ];
        for (givers, takers) in splits
            .iter()
            .flat_map(|a| splits.iter().map(move |b| (a, b)))
        {
            for to in (0..takers.ranks()).map(Rank) {
                let expected = page(&config, (takers, to));
                let (mut got, mut bytes) = (vec![0; expected.len()], 0);
                for from in (0..givers.ranks()).map(Rank) {
                    let given =
                        kv_transfer_plan(&config, KvType::F16, (givers, from), (takers, to))
                            .unwrap();
                    let parcel = given.gather(0, &page(&config, (givers, from)));
                    given.scatter(0, &parcel, &mut got);
                    bytes += parcel.len();
                }
                assert_eq!(got, expected, "{givers} to {to} of {takers}");
                assert_eq!(bytes, expected.len(), "each byte travels once");
            }
        }
    }
}
