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
//! Pages are merged in order of position ([`merge`]), then the head's [`sink`] where the model has
//! some, and the result is `o / l`. Nothing depends on
//! how many queries share a page or on which thread takes which page, so prefill and decode agree
//! to the bit. Source: Dao et al., FlashAttention (2022) and flash-decoding (2023).

use half::f16;

use crate::isa::{self, Isa, LANES};
use crate::kv::{Q4_RUN, Q8_RUN};

/// Positions in a page. Sixty-four keys are four registers of 16 scores; with 32 the merges cost
/// twice as much, with 128 a short sequence wastes memory.
pub const PAGE: usize = 64;

const RUNS: usize = PAGE / LANES;

/// Queries that share one pass over a page, where registers are many and where they are few.
const TILES: [usize; 2] = [6, 4];

/// Bytes of a cache line, the unit of a prefetch.
const LINE: usize = 64;

/// Prefetch distance in bytes into L1; L2 has the lines by then. A decoded row takes 0.75 to 0.92
/// of the time of one prefetch of the next page (the bench `attention`, Intel Xeon).
const NEAR: usize = 512;

/// A form of the elements of keys or values.
pub(crate) trait KvElement: Copy {
    /// Elements of a position that share a scale; 0 without scales.
    const RUN: usize = 0;
    /// Bits of an element at its first address: whole bytes, or a part of one.
    const BITS: usize;
    /// Bytes of `n` elements.
    #[inline(always)]
    fn bytes(n: usize) -> usize {
        match Self::BITS {
            bits @ 8.. => n * (bits / 8),
            bits => n / (8 / bits),
        }
    }
    /// Sixteen of `len` elements at `p`, from element `at` on.
    unsafe fn load<S: Isa>(p: *const u8, at: usize, len: usize) -> S::F;
}

impl KvElement for i8 {
    const RUN: usize = Q8_RUN;
    const BITS: usize = 8;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8, at: usize, _: usize) -> S::F {
        // SAFETY: passed on.
        unsafe { S::to_f(S::load_i8(p.add(at))) }
    }
}

impl KvElement for f16 {
    const BITS: usize = 16;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8, at: usize, _: usize) -> S::F {
        // SAFETY: passed on; f16 is a transparent u16.
        unsafe { S::load_f16(p.cast::<u16>().add(at)) }
    }
}

impl KvElement for f32 {
    const BITS: usize = 32;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8, at: usize, _: usize) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load(p.cast::<f32>().add(at)) }
    }
}

/// Keys of five bits ([`crate::kv`]): rows of 64 nibbles in pairs, and rows of bits in eights.
#[derive(Clone, Copy)]
pub(crate) struct FiveBitKey;

impl KvElement for FiveBitKey {
    const RUN: usize = Q4_RUN;
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8, at: usize, len: usize) -> S::F {
        let (d, slot) = (at / PAGE, at % PAGE);
        // SAFETY: the bytes of sixteen positions in a row of nibbles, and in one of bits.
        unsafe {
            let pair = S::load_u8(p.add(d / 2 * PAGE + slot));
            let low = match d % 2 {
                0 => S::and_i(pair, S::splat_i(15)),
                _ => S::shr4_i(pair),
            };
            let eight = S::load_u8(p.add(len / 2 + d / 8 * PAGE + slot));
            let bit = S::to_f(S::and_i(eight, S::splat_i(1 << (d % 8))));
            let one = S::splat(16.0 / (1 << (d % 8)) as f32); // a bit that is set is 16
            S::fma(bit, one, S::sub(S::to_f(low), S::splat(15.5))) // exact
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct FourBitValue;

impl KvElement for FourBitValue {
    const RUN: usize = Q4_RUN;
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8, at: usize, _: usize) -> S::F {
        // SAFETY: the bytes of sixteen nibbles.
        unsafe { S::sub(S::to_f(S::load_nibbles(p.add(at / 2))), S::splat(7.5)) }
    }
}

/// A single query against one page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    /// `(head_dim,)`, scaled.
    pub(crate) q: *const f32,
    /// First visible position in the page.
    pub(crate) lo: usize,
    /// End of the visible positions, above `lo`, at most 64.
    pub(crate) hi: usize,
    /// Result: `m`, `l`, then `o` `(value_dim,)`.
    pub(crate) out: *mut f32,
}

/// Floats that [`Query::out`] takes.
pub(crate) const fn partial_len(value_dim: usize) -> usize {
    2 + value_dim
}

/// The keys and values of one page and KV head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageView {
    /// `(head_dim, 64)`: transposed, so that a register holds 16 positions.
    pub(crate) keys: *const u8,
    /// `(ceil(head_dim / run), 64)` f16, where there are scales.
    pub(crate) key_scales: *const u16,
    /// `(64, value_dim)`.
    pub(crate) values: *const u8,
    pub(crate) value_scales: *const u16,
    /// Elements of a key, a multiple of 16.
    pub(crate) head_dim: usize,
    /// Elements of a value, a multiple of 16.
    pub(crate) value_dim: usize,
    /// Bytes from `keys` to the keys of the next page; 0 when none follows. Its lines are
    /// prefetched into L2 while this page is computed. A page is too short for the hardware
    /// prefetcher to detect the stream.
    pub(crate) to_next: isize,
    /// `to_next` for the values; 0 where the values were transposed from the keys.
    pub(crate) values_to_next: isize,
    /// Scores become `cap * tanh(score / cap)`; 0 for no cap.
    pub(crate) cap: f32,
}

impl PageView {
    /// Prefetches `bytes` bytes from [`NEAR`] behind `p` into L1, and the same part of the next
    /// page into L2.
    #[inline(always)]
    unsafe fn prefetch<S: Isa>(p: *const u8, bytes: usize, to_next: isize) {
        let mut at = 0;
        while at < bytes {
            // SAFETY: a hint; any address will do.
            unsafe {
                S::prefetch(p.wrapping_add(NEAR + at));
                S::prefetch_far(p.wrapping_offset(to_next).wrapping_add(at));
            }
            at += LINE;
        }
    }
}

/// Attends `queries` to one page.
///
/// # Safety
/// Features of `S`; pointers as documented; pages hold keys of elements `K` and values of
/// elements `V`.
#[inline(always)]
pub(crate) unsafe fn attend<S: Isa, K: KvElement, V: KvElement>(page: PageView, queries: &[Query]) {
    // SAFETY: passed on.
    unsafe {
        if S::REGISTERS >= 32 {
            attend_tiles::<S, K, V, { TILES[0] }>(page, queries);
        } else {
            attend_tiles::<S, K, V, { TILES[1] }>(page, queries);
        }
    }
}

#[inline(always)]
unsafe fn attend_tiles<S: Isa, K: KvElement, V: KvElement, const TILE: usize>(
    mut page: PageView,
    queries: &[Query],
) {
    let mut rest = queries;
    // SAFETY: passed on; each call gets exactly its number of queries.
    unsafe {
        while rest.len() >= TILE {
            attend_some::<S, K, V, TILE>(page, rest);
            rest = &rest[TILE..];
            (page.to_next, page.values_to_next) = (0, 0); // asked for once
        }
        match rest.len() {
            5 => attend_some::<S, K, V, 5>(page, rest),
            4 => attend_some::<S, K, V, 4>(page, rest),
            3 => attend_some::<S, K, V, 3>(page, rest),
            2 => attend_some::<S, K, V, 2>(page, rest),
            1 => attend_some::<S, K, V, 1>(page, rest),
            _ => {}
        }
    }
}

#[inline(always)]
unsafe fn attend_some<S: Isa, K: KvElement, V: KvElement, const N: usize>(
    page: PageView,
    queries: &[Query],
) {
    // SAFETY: at least N queries.
    unsafe {
        let mut p = [[0.0f32; PAGE]; N];
        page_scores::<S, K, N>(page, queries, &mut p);
        let mut i = 0;
        while i < N {
            if page.cap != 0.0 {
                capped::<S>(&mut p[i], page.cap);
            }
            softmax::<S>(queries.get_unchecked(i), &mut p[i]);
            i += 1;
        }
        weigh_all::<S, V, N>(page, queries, &p);
    }
}

/// `s[i]` of all 64 positions for each query.
///
/// # Safety
/// As [`attend`], for N queries.
#[inline(always)]
pub(crate) unsafe fn page_scores<S: Isa, E: KvElement, const N: usize>(
    page: PageView,
    queries: &[Query],
    out: &mut [[f32; PAGE]; N],
) {
    // SAFETY: passed on.
    unsafe {
        // N accumulators and a register of keys for each run that is computed at once.
        if (N + 1) * 4 < S::REGISTERS {
            scores::<S, E, N, 4>(page, queries, out);
        } else if (N + 1) * 2 < S::REGISTERS {
            scores::<S, E, N, 2>(page, queries, out);
        } else {
            scores::<S, E, N, 1>(page, queries, out);
        }
    }
}

/// `R` registers of `len` elements at `p`, from element `at` on.
#[inline(always)]
unsafe fn load_run<S: Isa, E: KvElement, const R: usize>(
    p: *const u8,
    at: usize,
    len: usize,
) -> [S::F; R] {
    // SAFETY: 16 R elements from `at` on.
    unsafe {
        // All loads have the same address.
        let (p, at) = match E::BITS {
            8.. => (p.add(E::bytes(at)), 0),
            _ => (p, at),
        };
        let mut x = [S::splat(0.0); R];
        let mut r = 0;
        while r < R {
            x[r] = E::load::<S>(p, at + r * LANES, len);
            r += 1;
        }
        x
    }
}

/// `x * scale`, where there are scales.
#[inline(always)]
unsafe fn scaled<S: Isa, E: KvElement, const R: usize>(
    mut x: [S::F; R],
    scales: [S::F; R],
) -> [S::F; R] {
    let mut r = 0;
    while E::RUN > 0 && r < R {
        // SAFETY: register arithmetic.
        x[r] = unsafe { S::mul(x[r], scales[r]) };
        r += 1;
    }
    x
}

/// `s[i]` of all 64 positions for each query, `R` runs of 16 at a time.
#[inline(always)]
unsafe fn scores<S: Isa, E: KvElement, const N: usize, const R: usize>(
    page: PageView,
    queries: &[Query],
    out: &mut [[f32; PAGE]; N],
) {
    // SAFETY: the keys are (head_dim, 64) elements, each query head_dim floats; `first` stays
    // below four runs.
    unsafe {
        let (keys, len) = (page.keys, page.head_dim * PAGE);
        let mut first = 0;
        while first < PAGE {
            let mut s = [[S::splat(0.0); R]; N];
            let mut scales = [S::splat(1.0); R];
            for d in 0..page.head_dim {
                if E::RUN > 0 && d % E::RUN == 0 {
                    let row = page.key_scales.add(d / E::RUN * PAGE + first);
                    scales = load_run::<S, f16, R>(row.cast(), 0, R * LANES);
                }
                let at = d * PAGE + first;
                let bytes = E::bytes(R * LANES);
                PageView::prefetch::<S>(keys.add(E::bytes(at)), bytes, page.to_next);
                let k = scaled::<S, E, R>(load_run::<S, E, R>(keys, at, len), scales);
                let mut i = 0;
                while i < N {
                    let q = S::splat(*queries.get_unchecked(i).q.add(d));
                    let mut r = 0;
                    while r < R {
                        s[i][r] = S::fma(q, k[r], s[i][r]);
                        r += 1;
                    }
                    i += 1;
                }
            }
            let mut i = 0;
            while i < N {
                let mut r = 0;
                while r < R {
                    S::store(out[i].as_mut_ptr().add(first + r * LANES), s[i][r]);
                    r += 1;
                }
                i += 1;
            }
            first += R * LANES;
        }
    }
}

/// `cap * tanh(s / cap)` of all scores, with `tanh y = (1 - e) / (1 + e)` and `e = exp(-2 |y|)`.
#[inline(always)]
unsafe fn capped<S: Isa>(p: &mut [f32; PAGE], cap: f32) {
    let mut e = [0.0f32; PAGE];
    for (e, s) in e.iter_mut().zip(&*p) {
        *e = -2.0 * (s / cap).abs();
    }
    let mut r = 0;
    while r < RUNS {
        // SAFETY: four runs in `e`.
        unsafe {
            let at = e.as_mut_ptr().add(r * LANES);
            S::store(at, isa::exp::<S>(S::load(at)));
        }
        r += 1;
    }
    for (s, e) in p.iter_mut().zip(&e) {
        *s = (cap * ((1.0 - e) / (1.0 + e))).copysign(*s);
    }
}

/// Turns the scores in `p` into weights and writes `m` and `l`.
#[inline(always)]
unsafe fn softmax<S: Isa>(query: &Query, p: &mut [f32; PAGE]) {
    // SAFETY: `p` holds four runs; `out` holds at least two floats.
    unsafe {
        if query.lo > 0 {
            p[..query.lo].fill(f32::NEG_INFINITY);
        }
        if query.hi < PAGE {
            p[query.hi..].fill(f32::NEG_INFINITY);
        }
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

/// `o` of each query.
#[inline(always)]
unsafe fn weigh_all<S: Isa, E: KvElement, const N: usize>(
    page: PageView,
    queries: &[Query],
    p: &[[f32; PAGE]; N],
) {
    let range = Ranges::of(&queries[..N]);
    // SAFETY: at least N queries; d + 16 R <= value_dim.
    unsafe {
        let mut d = 0;
        while d < page.value_dim {
            // The most registers at a time that fit, so that multiply-adds are independent.
            if (N + 1) * 4 < S::REGISTERS && d + 4 * LANES <= page.value_dim {
                weigh::<S, E, N, 4>(page, queries, p, d, range);
                d += 4 * LANES;
            } else if (N + 1) * 2 < S::REGISTERS && d + 2 * LANES <= page.value_dim {
                weigh::<S, E, N, 2>(page, queries, p, d, range);
                d += 2 * LANES;
            } else {
                weigh::<S, E, N, 1>(page, queries, p, d, range);
                d += LANES;
            }
        }
    }
}

/// Positions that some of the queries see, and those that all see.
#[derive(Clone, Copy)]
struct Ranges {
    some: (usize, usize),
    all: (usize, usize),
}

impl Ranges {
    #[inline(always)]
    fn of(queries: &[Query]) -> Self {
        let (mut some, mut all) = ((PAGE, 0), (0, PAGE));
        for query in queries {
            some = (some.0.min(query.lo), some.1.max(query.hi));
            all = (all.0.max(query.lo), all.1.min(query.hi));
        }
        if all.0 >= all.1 {
            all = (some.1, some.1); // none
        }
        Self { some, all }
    }
}

/// `o[d..d + 16 R]` of each query.
#[inline(always)]
unsafe fn weigh<S: Isa, E: KvElement, const N: usize, const R: usize>(
    page: PageView,
    queries: &[Query],
    p: &[[f32; PAGE]; N],
    d: usize,
    range: Ranges,
) {
    // SAFETY: ranges lie within the page; d + 16 R <= value_dim.
    unsafe {
        let mut o = [[S::splat(0.0); R]; N];
        weigh_some::<S, E, N, R, false>(page, queries, p, d, (range.some.0, range.all.0), &mut o);
        weigh_some::<S, E, N, R, true>(page, queries, p, d, range.all, &mut o);
        weigh_some::<S, E, N, R, false>(page, queries, p, d, (range.all.1, range.some.1), &mut o);
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

/// Adds the positions `lo..hi` to `o`; with `ALL`, every query sees them.
#[inline(always)]
unsafe fn weigh_some<S: Isa, E: KvElement, const N: usize, const R: usize, const ALL: bool>(
    page: PageView,
    queries: &[Query],
    p: &[[f32; PAGE]; N],
    d: usize,
    (lo, hi): (usize, usize),
    o: &mut [[S::F; R]; N],
) {
    // SAFETY: the values are (64, value_dim) elements; d + 16 R <= value_dim.
    unsafe {
        let (values, len) = (page.values, page.value_dim * PAGE);
        for pos in lo..hi {
            let at = pos * page.value_dim + d;
            let row = values.add(E::bytes(at));
            PageView::prefetch::<S>(row, E::bytes(R * LANES), page.values_to_next);
            let scales = if E::RUN > 0 {
                value_scales::<S, E, R>(page.value_scales.add(pos), d)
            } else {
                [S::splat(1.0); R]
            };
            let v = scaled::<S, E, R>(load_run::<S, E, R>(values, at, len), scales);
            let mut i = 0;
            while i < N {
                let query = queries.get_unchecked(i);
                if ALL || (pos >= query.lo && pos < query.hi) {
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
    }
}

/// The scales of elements `d..d + 16 R` at the position that `p` points to.
#[inline(always)]
unsafe fn value_scales<S: Isa, E: KvElement, const R: usize>(p: *const u16, d: usize) -> [S::F; R] {
    // SAFETY: scales lie in rows of 64 positions.
    unsafe {
        let mut scales = [S::splat(1.0); R];
        let mut r = 0;
        while r < R {
            let at = p.add((d + r * LANES) / E::RUN * PAGE);
            scales[r] = S::splat_f16(at);
            r += 1;
        }
        scales
    }
}

/// Elements that [`turn`] reads of each of as many rows: a register of them, or two.
const SIDE: usize = 8;

/// Transposes a matrix `(rows, cols)` into `(cols, rows)`: keys into values, or values into keys,
/// for pages whose values are part of their keys.
///
/// # Safety
/// Both sizes are multiples of 8. The pointers are valid for that many elements and do not overlap.
#[allow(
    clippy::needless_range_loop,
    reason = "a column of the block, not a row of it"
)]
pub(crate) unsafe fn turn<E: Copy + Default>(
    from: *const E,
    (rows, cols): (usize, usize),
    out: *mut E,
) {
    for d in (0..rows).step_by(SIDE) {
        for first in (0..cols).step_by(SIDE) {
            let mut block = [[E::default(); SIDE]; SIDE];
            // SAFETY: d + 8 <= rows and first + 8 <= cols, both ways.
            unsafe {
                for (i, row) in block.iter_mut().enumerate() {
                    *row = from
                        .add((d + i) * cols + first)
                        .cast::<[E; SIDE]>()
                        .read_unaligned();
                }
                for j in 0..SIDE {
                    let row: [E; SIDE] = std::array::from_fn(|i| block[i][j]);
                    out.add((first + j) * rows + d)
                        .cast::<[E; SIDE]>()
                        .write_unaligned(row);
                }
            }
        }
    }
}

/// Merges the partial result of the next page into `into`; both are `m`, `l`, `o`.
///
/// `m' = max(m, m2)`, `a = exp(m - m')` and `b = exp(m2 - m')`. Then `l' = fma(l, a, l2 b)` and the
/// same for every `o`.
///
/// # Safety
/// Features of `S`; both hold `2 + value_dim` floats, value_dim a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn merge<S: Isa>(into: &mut [f32], next: &[f32]) {
    // SAFETY: lengths by the contract.
    unsafe {
        let m = if into[0] > next[0] { into[0] } else { next[0] };
        let (a, b) = (weight::<S>(into[0] - m), weight::<S>(next[0] - m));
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

/// Merges a sink into `into`, as a page whose only score is `score` and whose value is 0.
///
/// # Safety
/// See [`merge`].
#[inline(always)]
pub(crate) unsafe fn sink<S: Isa>(into: &mut [f32], score: f32) {
    // SAFETY: lengths by the contract.
    unsafe {
        let m = if into[0] > score { into[0] } else { score };
        let (a, b) = (weight::<S>(into[0] - m), weight::<S>(score - m));
        let l = S::fma(S::splat(into[1]), a, b);
        into[0] = m;
        into[1] = first_lane::<S>(l);
        let mut at = 2;
        while at < into.len() {
            let p = into.as_mut_ptr().add(at);
            S::store(p, S::mul(S::load(p), a));
            at += LANES;
        }
    }
}

/// `exp(x)` in every lane; of the two pages that are merged, one has x = 0 and the weight 1.
#[inline(always)]
unsafe fn weight<S: Isa>(x: f32) -> S::F {
    // SAFETY: register arithmetic.
    unsafe {
        if x == 0.0 {
            S::splat(1.0)
        } else {
            isa::exp::<S>(S::splat(x))
        }
    }
}

/// `out = o / l`.
///
/// # Safety
/// See [`merge`]; `out` is `(value_dim,)`.
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
