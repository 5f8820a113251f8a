//! Attention over pages of keys and values, generic over instruction set and element type.
//!
//! A *page* holds [`PAGE`] positions of one layer, aligned to absolute positions (page `b` covers
//! positions `64 b .. 64 b + 64`). For one query `q` (already scaled) and one page with the visible
//! positions `lo..hi`:
//!
//! ```text
//! s[i] = sum over d, in order: fma(q[d], k[i][d], s[i])
//! m    = max s[lo..hi]         p[i] = exp(s[i] - m), 0 outside lo..hi
//! l    = ((p0 + p1) + (p2 + p3)) over runs of 16, then lane i plus lane i + 8, 4, 2, 1
//! o[d] = for i in lo..hi, in order: fma(p[i], v[i][d], o[d])
//! ```
//!
//! Pages are merged in order of position ([`merge`]) and the result is `o / l`. Nothing depends on
//! how many queries share a page or on which thread takes which page, so prefill and decode agree
//! to the bit. Source: Dao et al., FlashAttention (2022) and flash-decoding (2023).

use half::f16;

use crate::isa::{self, Isa, LANES};

/// Positions in a page. Sixty-four keys are four registers of 16 scores; with 32 the merges cost
/// twice as much, with 128 a short sequence wastes memory.
pub const PAGE: usize = 64;

const RUNS: usize = PAGE / LANES;

/// Queries that share one pass over a page.
const TILE: usize = 4;

/// An element of the key/value cache.
pub(crate) trait KvElement: Copy {
    unsafe fn load<S: Isa>(p: *const Self) -> S::F;
}

impl KvElement for f16 {
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const Self) -> S::F {
        // SAFETY: passed on; f16 is a transparent u16.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl KvElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const Self) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load(p) }
    }
}

/// One query against one page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    /// `(head_dim,)`, scaled.
    pub(crate) q: *const f32,
    /// First visible position in the page.
    pub(crate) lo: usize,
    /// End of the visible positions, above `lo`, at most 64.
    pub(crate) hi: usize,
    /// Result: `m`, `l`, then `o` `(head_dim,)`.
    pub(crate) out: *mut f32,
}

/// Floats that [`Query::out`] takes.
pub(crate) const fn partial_len(head_dim: usize) -> usize {
    2 + head_dim
}

/// The keys and values of one page and KV head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageView {
    /// `(head_dim, 64)`: transposed, so that a register holds 16 positions.
    pub(crate) keys: *const u8,
    /// `(64, head_dim)`.
    pub(crate) values: *const u8,
    /// A multiple of 16.
    pub(crate) head_dim: usize,
}

/// Attends `queries` to one page.
///
/// # Safety
/// Features of `S`; pointers as documented; pages hold elements `E`.
#[inline(always)]
pub(crate) unsafe fn attend<S: Isa, E: KvElement>(page: PageView, queries: &[Query]) {
    let mut rest = queries;
    // SAFETY: passed on; each call gets exactly its number of queries.
    unsafe {
        while rest.len() >= TILE {
            attend_some::<S, E, TILE>(page, rest);
            rest = &rest[TILE..];
        }
        match rest.len() {
            3 => attend_some::<S, E, 3>(page, rest),
            2 => attend_some::<S, E, 2>(page, rest),
            1 => attend_some::<S, E, 1>(page, rest),
            _ => {}
        }
    }
}

#[inline(always)]
unsafe fn attend_some<S: Isa, E: KvElement, const N: usize>(page: PageView, queries: &[Query]) {
    // SAFETY: at least N queries.
    unsafe {
        let scores = scores::<S, E, N>(page, queries);
        let mut p = [[0.0f32; PAGE]; N];
        let mut i = 0;
        while i < N {
            softmax::<S>(scores[i], &queries[i], &mut p[i]);
            i += 1;
        }
        let mut d = 0;
        while d < page.head_dim {
            // Four registers at a time keep the fused multiply-adds independent.
            if d + 4 * LANES <= page.head_dim {
                weigh::<S, E, N, 4>(page, queries, &p, d);
                d += 4 * LANES;
            } else {
                weigh::<S, E, N, 1>(page, queries, &p, d);
                d += LANES;
            }
        }
    }
}

/// `s[i]` of all 64 positions for each query.
#[inline(always)]
unsafe fn scores<S: Isa, E: KvElement, const N: usize>(
    page: PageView,
    queries: &[Query],
) -> [[S::F; RUNS]; N] {
    // SAFETY: the keys are (head_dim, 64) elements, each query head_dim floats.
    unsafe {
        let keys = page.keys.cast::<E>();
        let mut s = [[S::splat(0.0); RUNS]; N];
        for d in 0..page.head_dim {
            let mut k = [S::splat(0.0); RUNS];
            let mut r = 0;
            while r < RUNS {
                k[r] = E::load::<S>(keys.add(d * PAGE + r * LANES));
                r += 1;
            }
            let mut i = 0;
            while i < N {
                let q = S::splat(*queries.get_unchecked(i).q.add(d));
                let mut r = 0;
                while r < RUNS {
                    s[i][r] = S::fma(q, k[r], s[i][r]);
                    r += 1;
                }
                i += 1;
            }
        }
        s
    }
}

/// Turns scores into weights `p` and writes `m` and `l`.
#[inline(always)]
unsafe fn softmax<S: Isa>(s: [S::F; RUNS], query: &Query, p: &mut [f32; PAGE]) {
    // SAFETY: `p` holds four runs; `out` holds at least two floats.
    unsafe {
        let mut r = 0;
        while r < RUNS {
            S::store(p.as_mut_ptr().add(r * LANES), s[r]);
            r += 1;
        }
        p[..query.lo].fill(f32::NEG_INFINITY);
        p[query.hi..].fill(f32::NEG_INFINITY);
        let m = largest::<S>(p);
        let mut e = [S::splat(0.0); RUNS];
        let mut r = 0;
        while r < RUNS {
            let at = p.as_mut_ptr().add(r * LANES);
            e[r] = isa::exp::<S>(S::sub(S::load(at), S::splat(m)));
            S::store(at, e[r]);
            r += 1;
        }
        *query.out = m;
        *query.out.add(1) = isa::reduce_add::<S>(S::add(S::add(e[0], e[1]), S::add(e[2], e[3])));
    }
}

#[inline(always)]
unsafe fn largest<S: Isa>(p: &[f32; PAGE]) -> f32 {
    // SAFETY: four runs in `p`.
    unsafe {
        let p = p.as_ptr();
        let a = S::max(S::load(p), S::load(p.add(LANES)));
        let b = S::max(S::load(p.add(2 * LANES)), S::load(p.add(3 * LANES)));
        S::reduce_max(S::max(a, b))
    }
}

/// `o[d..d + 16 R]` of each query.
#[inline(always)]
unsafe fn weigh<S: Isa, E: KvElement, const N: usize, const R: usize>(
    page: PageView,
    queries: &[Query],
    p: &[[f32; PAGE]; N],
    d: usize,
) {
    // SAFETY: the values are (64, head_dim) elements; d + 16 R <= head_dim.
    unsafe {
        let values = page.values.cast::<E>();
        let (mut lo, mut hi) = (PAGE, 0);
        let mut i = 0;
        while i < N {
            lo = lo.min(queries.get_unchecked(i).lo);
            hi = hi.max(queries.get_unchecked(i).hi);
            i += 1;
        }
        let mut o = [[S::splat(0.0); R]; N];
        for pos in lo..hi {
            let mut v = [S::splat(0.0); R];
            let mut r = 0;
            while r < R {
                v[r] = E::load::<S>(values.add(pos * page.head_dim + d + r * LANES));
                r += 1;
            }
            let mut i = 0;
            while i < N {
                let query = queries.get_unchecked(i);
                if pos >= query.lo && pos < query.hi {
                    let weight = S::splat(*p[i].get_unchecked(pos));
                    let mut r = 0;
                    while r < R {
                        o[i][r] = S::fma(weight, v[r], o[i][r]);
                        r += 1;
                    }
                }
                i += 1;
            }
        }
        let mut i = 0;
        while i < N {
            let out = queries.get_unchecked(i).out.add(2 + d);
            let mut r = 0;
            while r < R {
                S::store(out.add(r * LANES), o[i][r]);
                r += 1;
            }
            i += 1;
        }
    }
}

/// Merges the partial result of the next page into `into`; both are `m`, `l`, `o`.
///
/// `m' = max(m, m2)`, `a = exp(m - m')`, `b = exp(m2 - m')`, then `l' = fma(l, a, l2 b)` and the
/// same for every `o`.
///
/// # Safety
/// Features of `S`; both hold `2 + head_dim` floats, head_dim a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn merge<S: Isa>(into: &mut [f32], next: &[f32]) {
    // SAFETY: lengths by the contract.
    unsafe {
        let m = if into[0] > next[0] { into[0] } else { next[0] };
        let a = isa::exp::<S>(S::splat(into[0] - m));
        let b = isa::exp::<S>(S::splat(next[0] - m));
        let l = S::fma(S::splat(into[1]), a, S::mul(S::splat(next[1]), b));
        into[0] = m;
        into[1] = first_lane::<S>(l);
        let mut at = 2;
        while at < into.len() {
            let o = S::mul(S::load(next.as_ptr().add(at)), b);
            let p = into.as_mut_ptr().add(at);
            S::store(p, S::fma(S::load(p), a, o));
            at += LANES;
        }
    }
}

/// `out = o / l`.
///
/// # Safety
/// As [`merge`]; `out` is `(head_dim,)`.
#[inline(always)]
pub(crate) unsafe fn finish<S: Isa>(partial: &[f32], out: &mut [f32]) {
    // SAFETY: lengths by the contract.
    unsafe {
        let l = S::splat(partial[1]);
        let mut at = 0;
        while at < out.len() {
            let o = S::load(partial.as_ptr().add(2 + at));
            S::store(out.as_mut_ptr().add(at), S::div(o, l));
            at += LANES;
        }
    }
}

#[inline(always)]
unsafe fn first_lane<S: Isa>(x: S::F) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: 16 floats.
    unsafe { S::store(lanes.as_mut_ptr(), x) };
    lanes[0]
}
