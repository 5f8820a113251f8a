//! Scores of a lightning indexer, generic over instruction set and element type.
//!
//! A row has `heads` queries and as many weights. For one page of index keys:
//!
//! ```text
//! s[h][i]  = sum over d, in order: fma(q[h][d], k[i][d], s[h][i])
//! score[i] = sum over h, in order: fma(w[h], max(s[h][i], 0), score[i])
//! ```
//!
//! Nothing depends on which other rows are scored. Source: DeepSeek-AI 2025 (DeepSeek-V3.2),
//! section 2.1; `DeepseekV32Indexer` of transformers.

use crate::attention::{self, KvElement, PAGE, PageView, Query};
use crate::isa::{Isa, LANES};

/// Queries of a row that share one pass over a page.
const TILE: usize = 4;

const RUNS: usize = PAGE / LANES;

/// The queries of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexQueries {
    /// `(heads, dim)`, for keys of `dim` elements.
    pub(crate) queries: *const f32,
    /// `(heads,)`
    pub(crate) weights: *const f32,
    pub(crate) heads: usize,
}

/// Scores of all positions of a page for one row.
///
/// # Safety
/// Features of `S`; pointers as documented; the keys are elements `E`; `out` is good for 64 floats.
#[inline(always)]
pub(crate) unsafe fn index<S: Isa, E: KvElement>(page: PageView, row: IndexQueries, out: *mut f32) {
    // SAFETY: passed on; heads are within the row.
    unsafe {
        let mut score = [S::splat(0.0); RUNS];
        let mut head = 0;
        while head + TILE <= row.heads {
            add::<S, E, TILE>(page, row, head, &mut score);
            head += TILE;
        }
        while head < row.heads {
            add::<S, E, 1>(page, row, head, &mut score);
            head += 1;
        }
        let mut r = 0;
        while r < RUNS {
            S::store(out.add(r * LANES), score[r]);
            r += 1;
        }
    }
}

/// Adds the heads `first..first + N`.
#[inline(always)]
unsafe fn add<S: Isa, E: KvElement, const N: usize>(
    page: PageView,
    row: IndexQueries,
    first: usize,
    score: &mut [S::F; RUNS],
) {
    // SAFETY: passed on.
    unsafe {
        let query = |i: usize| Query {
            q: row.queries.add((first + i) * page.head_dim),
            lo: 0,
            hi: PAGE,
            out: std::ptr::null_mut(), // scores only
        };
        let queries: [Query; N] = std::array::from_fn(query);
        let mut s = [[0.0f32; PAGE]; N];
        attention::page_scores::<S, E, N>(page, &queries, &mut s);
        let mut i = 0;
        while i < N {
            let weight = S::splat(*row.weights.add(first + i));
            let mut r = 0;
            while r < RUNS {
                let x = S::load(s[i].as_ptr().add(r * LANES));
                score[r] = S::fma(weight, S::max(x, S::splat(0.0)), score[r]);
                r += 1;
            }
            i += 1;
        }
    }
}
