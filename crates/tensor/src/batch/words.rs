//! Panels of 16-bit integers: weights widened and times their integer scales.
//!
//! A weight's `sub * w` fits 16 bits (Q6_K: 128 * 32 at most), and so do the 15 bits of an
//! activation: one multiplication does what takes two of bytes, at half their rate, and nothing is
//! left to put together per row. 16 pairs of columns of 16 rows make a chunk; pair `2 g + odd`
//! is columns `4 g + odd` and `4 g + odd + 2` ([`Words::widen`]).

use crate::batch::factors::{Factors, Min};
use crate::batch::{CHUNK_BYTES, Segment, Unpack, ask_for};
use crate::formats::{Format, Layout, Planes, Scales};
use crate::isa::{LANES, Words};
use crate::stored::Chunk;

/// Rows from which unpacking into a panel pays, where a product of bytes takes several
/// instructions. With 512 rows AVX2 gains 1.22 (Q4_1) to 1.71 (Q8_0).
pub(crate) const FROM: usize = 8;

/// The same where it takes one. Zen 4: Q4_K has 0.88 of its speed with 8 rows, 1.02 with 512 (so as
/// many from about 50 on), Q6_K 1.01 and 1.20, Q5_0 0.97 and 1.17.
#[cfg(target_arch = "x86_64")]
pub(crate) const FROM_VNNI: usize = 32;

/// Pairs of columns in a chunk.
const PAIRS: usize = Chunk::LEN / 2;

/// A chunk of one group in a panel.
#[repr(C, align(64))]
pub(crate) struct PanelChunk {
    /// `(pair, row, 2)`
    pub(crate) words: [[i16; 2 * LANES]; PAIRS],
    pub(crate) factors: Factors,
}

const _: () = assert!(size_of::<PanelChunk>() == CHUNK_BYTES);

/// Unpacks chunks of a group of format `F`.
///
/// # Safety
/// Features of `S`; the pointers of `args` cover the chunks.
#[inline(always)]
pub(crate) unsafe fn unpack<S: Words, F: Format>(args: Unpack) {
    // SAFETY: passed on.
    unsafe { unpack_as::<S, F, 1>(args, |words| [words]) }
}

/// As [`unpack`], with words that `form` makes of them, `N` of each: the second in the place of
/// the chunk behind, and so on.
///
/// # Safety
/// As [`unpack`]; room for `N` times as many chunks.
#[inline(always)]
pub(crate) unsafe fn unpack_as<S: Words, F: Format, const N: usize>(
    args: Unpack,
    form: impl Fn(S::W) -> [S::W; N],
) {
    let layout: Layout = F::LAYOUT;
    for c in 0..args.chunks {
        let place = layout.place(args.first + c);
        // SAFETY: by the caller's promise.
        unsafe {
            let out = args.out.add(N * c * CHUNK_BYTES).cast::<PanelChunk>();
            let scales = args.weights.add(place.scales);
            let header = args.weights.add(place.header);
            unpack_planes::<S, F, N>(args.weights.add(place.planes), scales, out, &form);
            ask_for::<S>(&args, layout, c);
            Factors::unpack::<S, F>(&raw mut (*out).factors, header, scales);
        }
    }
}

#[inline(always)]
unsafe fn unpack_planes<S: Words, F: Format, const N: usize>(
    planes: *const u8,
    scales: *const u8,
    out: *mut PanelChunk,
    form: &impl Fn(S::W) -> [S::W; N],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let quads = F::P::quads::<S>(planes);
        let sub = F::S::sub::<S>(scales);
        let factors = [S::twice(sub[0]), S::twice(sub[1])];
        let offset = S::twice(S::splat_i(F::P::OFFSET));
        let mut to = (&raw mut (*out).words).cast::<u8>();
        let mut g = 0;
        while g < quads.len() {
            let mut pair = S::widen(quads[g], F::P::SIGNED);
            let mut odd = 0;
            while odd < 2 {
                if F::P::OFFSET != 0 {
                    pair[odd] = S::sub_words(pair[odd], offset);
                }
                if F::S::HALVES {
                    pair[odd] = S::mul_words(pair[odd], factors[g / 4]);
                }
                let words = form(pair[odd]);
                let mut n = 0;
                while n < N {
                    S::store_w(to.add(n * CHUNK_BYTES), words[n]);
                    n += 1;
                }
                to = to.add(4 * LANES);
                odd += 1;
            }
            g += 1;
        }
    }
}

/// Multiplies a panel, `N` activation rows to a tile.
///
/// # Safety
/// Features of `S`; the segment's pointers cover its chunks, rows and sums.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Words, M: Min, const N: usize>(segment: &Segment<'_>) {
    // SAFETY: passed on.
    unsafe {
        if segment.groups == 2 {
            tiles::<S, M, 2, N>(segment);
        } else {
            tiles::<S, M, 1, N>(segment);
        }
    }
}

#[inline(always)]
unsafe fn tiles<S: Words, M: Min, const G: usize, const N: usize>(segment: &Segment<'_>) {
    let mut t = 0;
    // SAFETY: tiles stay within the rows.
    unsafe {
        while t + N <= segment.rows {
            tile::<S, M, G, N>(segment, t);
            t += N;
        }
        while t + 2 <= segment.rows {
            tile::<S, M, G, 2>(segment, t);
            t += 2;
        }
        if t < segment.rows {
            tile::<S, M, G, 1>(segment, t);
        }
    }
}

/// `N` rows from `t` of the segment.
#[inline(always)]
unsafe fn tile<S: Words, M: Min, const G: usize, const N: usize>(segment: &Segment<'_>, t: usize) {
    // SAFETY: chunks and rows lie within the segment, and sums for each row and group.
    unsafe {
        let at = |i: usize, g: usize| segment.sums_of(t + i, g);
        let mut sums = [[S::splat(0.0); G]; N];
        each::<G, N>(|i, g| sums[i][g] = segment.sum::<S>(at(i, g), 0));
        for c in 0..segment.chunks {
            let dots = dots::<S, G, N>(segment, t, c);
            each::<G, N>(|i, g| {
                let meta = segment
                    .x
                    .meta(segment.first + t + i, segment.first_chunk + c);
                let factors = &raw const (*segment.chunk(g, c).cast::<PanelChunk>()).factors;
                let inner = M::inner::<S>(S::to_f(dots[i][g]), factors, meta);
                sums[i][g] = S::fma(inner, S::splat(meta.scale), sums[i][g]);
            });
        }
        each::<G, N>(|i, g| S::store(at(i, g), sums[i][g]));
    }
}

/// Calls `f` for every row and group.
#[inline(always)]
fn each<const G: usize, const N: usize>(mut f: impl FnMut(usize, usize)) {
    let mut i = 0;
    while i < N {
        let mut g = 0;
        while g < G {
            f(i, g);
            g += 1;
        }
        i += 1;
    }
}

/// The dot products of a chunk.
#[inline(always)]
unsafe fn dots<S: Words, const G: usize, const N: usize>(
    segment: &Segment<'_>,
    t: usize,
    c: usize,
) -> [[S::I; G]; N] {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut dots = [[S::splat_i(0); G]; N];
        let x = segment.x.words(segment.first + t, segment.first_chunk + c);
        let weights = [0, G - 1].map(|g| segment.chunk(g, c));
        for pair in 0..PAIRS {
            let mut w = [S::load_w(weights[0].add(pair * 4 * LANES)); G];
            w[G - 1] = S::load_w(weights[1].add(pair * 4 * LANES));
            each::<G, N>(|i, g| {
                let x = x.add(i * segment.x.stride + 2 * pair);
                dots[i][g] = S::dot_words(dots[i][g], w[g], x);
            });
        }
        dots
    }
}
