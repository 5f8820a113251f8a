//! Panels of 16-bit integers: weights widened.
//!
//! 16 bits hold the 15 of an activation. So one multiplication does the work of two multiplications
//! of bytes, at half their rate. A chunk is 16 pairs of columns of 16 rows. Pair `2 g + odd` is
//! columns `4 g + odd` and `4 g + odd + 2` ([`Words::widen`]).
//!
//! Scales stay apart. With them in the words, high and low bytes of activations would have to be
//! multiplied apart, which takes more than multiplying each chunk's sums.

use std::ops::Range;

use crate::batch::{CHUNK_BYTES, Segment, Unpack, prefetch_chunk};
use crate::formats::{Format, Layout, Planes, Scales};
use crate::isa::{LANES, Words};
use crate::matmul::total;
use crate::quantisation::{Meta, joined};
use crate::storage::Chunk;
use crate::storage::units::WIDE_MIN;

/// Rows from which unpacking into a panel pays. With 8 rows AVX-512 has 1.01 (a 1B of Q4_K_M) to
/// 1.15 (Q8_0) of the speed, with 16 1.19 to 1.35 (Intel Xeon).
pub(crate) const FROM: usize = 8;

/// Pairs of columns in a chunk.
const PAIRS: usize = Chunk::LEN / 2;

/// A chunk of one group in a panel.
#[repr(C, align(64))]
pub(crate) struct PanelChunk {
    /// `(pair, row, 2)`
    pub(crate) words: [[i16; 2 * LANES]; PAIRS],
    pub(crate) factors: WordFactors,
}

const _: () = assert!(size_of::<PanelChunk>() == CHUNK_BYTES);

/// Factors of a chunk, next to its integers, as pairs of words to be multiplied by pairs. The low
/// part of a dot product and that of the sum of activations are multiplied by scale and min of each
/// half. The high parts, in reverse order, are multiplied by min and scale. The step of the chunk's
/// unit is here too: see [`crate::stored::units`].
#[repr(C, align(64))]
pub(crate) struct WordFactors {
    low: [[i32; LANES]; 2],
    high: [[i32; LANES]; 2],
    step: [f32; LANES],
}

impl WordFactors {
    /// Writes those of a chunk of format `F`.
    #[inline(always)]
    unsafe fn unpack<S: Words, F: Format>(out: *mut Self, header: *const u8, scales: *const u8) {
        // SAFETY: by the caller's promise.
        unsafe {
            let multipliers = F::S::multipliers::<S>(header);
            let mins = if F::S::HAS_MIN {
                F::S::mins::<S>(multipliers, scales)
            } else {
                [S::splat_i(0); 2]
            };
            let scales = F::S::scales::<S>(multipliers, scales);
            let mut half = 0;
            while half < if F::S::HALVES { 2 } else { 1 } {
                let pairs = |low: S::I, high: S::I| S::merge(low, S::shl_i::<16>(high));
                let (scale, min) = (scales[half], mins[half]);
                S::store_i((&raw mut (*out).low[half]).cast(), pairs(scale, min));
                S::store_i((&raw mut (*out).high[half]).cast(), pairs(min, scale));
                half += 1;
            }
            S::store((&raw mut (*out).step).cast(), F::S::step::<S>(header));
        }
    }
}

/// Unpacks chunks of a group of format `F`.
///
/// # Safety
/// Features of `S`; the pointers of `args` cover the chunks.
#[inline(always)]
pub(crate) unsafe fn unpack<S: Words, F: Format>(args: Unpack) {
    let layout: Layout = F::LAYOUT;
    for c in 0..args.chunks {
        let place = layout.place(args.first + c);
        // SAFETY: by the caller's promise.
        unsafe {
            let out = args.out.add(c * CHUNK_BYTES).cast::<PanelChunk>();
            let to = (&raw mut (*out).words).cast::<u8>();
            unpack_planes::<S, F>(args.weights.add(place.planes), to);
            prefetch_chunk::<S>(&args, layout, c);
            let header = args.header(layout, c);
            let scales = args.weights.add(place.scales);
            WordFactors::unpack::<S, F>(&raw mut (*out).factors, header, scales);
        }
    }
}

#[inline(always)]
unsafe fn unpack_planes<S: Words, F: Format>(planes: *const u8, mut to: *mut u8) {
    // SAFETY: by the caller's promise.
    unsafe {
        let quads = F::P::quads::<S>(planes);
        let offset = S::twice(S::splat_i(F::P::OFFSET));
        let mut g = 0;
        while g < quads.len() {
            let pair = S::widen(quads[g], F::P::SIGNED);
            let mut odd = 0;
            while odd < 2 {
                let words = if F::P::OFFSET == 0 {
                    pair[odd]
                } else {
                    S::sub_words(pair[odd], offset)
                };
                S::store_w(to, words);
                to = to.add(4 * LANES);
                odd += 1;
            }
            g += 1;
        }
    }
}

/// Multiplies a panel, `N` activation rows to a tile. The type's halves have scales of their own if
/// `HALVES`; it has mins if `MIN` and is wide if `WIDE`.
///
/// # Safety
/// Features of `S`; the segment's pointers cover its chunks, rows and sums.
#[inline(always)]
pub(crate) unsafe fn multiply<
    S: Words,
    const N: usize,
    const HALVES: bool,
    const MIN: bool,
    const WIDE: bool,
>(
    segment: &Segment<'_>,
) {
    // SAFETY: passed on.
    unsafe {
        if segment.groups == 2 {
            tiles::<S, 2, N, HALVES, MIN, WIDE>(segment);
        } else {
            tiles::<S, 1, N, HALVES, MIN, WIDE>(segment);
        }
    }
}

#[inline(always)]
unsafe fn tiles<
    S: Words,
    const G: usize,
    const N: usize,
    const HALVES: bool,
    const MIN: bool,
    const WIDE: bool,
>(
    segment: &Segment<'_>,
) {
    let mut t = 0;
    // SAFETY: tiles stay within the rows.
    unsafe {
        while t + N <= segment.rows {
            tile::<S, G, N, HALVES, MIN, WIDE>(segment, t);
            t += N;
        }
        while t + 2 <= segment.rows {
            tile::<S, G, 2, HALVES, MIN, WIDE>(segment, t);
            t += 2;
        }
        if t < segment.rows {
            tile::<S, G, 1, HALVES, MIN, WIDE>(segment, t);
        }
    }
}

/// `N` rows from `t` of the segment.
#[inline(always)]
unsafe fn tile<
    S: Words,
    const G: usize,
    const N: usize,
    const HALVES: bool,
    const MIN: bool,
    const WIDE: bool,
>(
    segment: &Segment<'_>,
    t: usize,
) {
    // SAFETY: chunks and rows lie within the segment, and sums for each row and group.
    unsafe {
        let mut first = 0;
        while first < segment.chunks {
            let end = segment.chunks.min(first + segment.span);
            let totals = span::<S, G, N, HALVES, MIN, WIDE>(segment, t, first..end);
            let mut i = 0;
            while i < N {
                let row = segment.first + t + i;
                let meta = segment.x.meta(row, segment.first_chunk + first);
                let mut g = 0;
                while g < G {
                    let step = S::load((&raw const (*factors(segment, g, first)).step).cast());
                    let inner = S::mul(DotSplit::<HALVES, WIDE>::total::<S>(totals[i][g]), step);
                    let at = segment.sums_of(t + i, g);
                    let sum = if first == 0 {
                        segment.sum::<S>(at)
                    } else {
                        S::load(at)
                    };
                    S::store(at, S::fma(inner, S::splat(meta.scale), sum));
                    g += 1;
                }
                i += 1;
            }
            first = end;
        }
    }
}

/// The totals of `N` rows over the chunks of a span.
#[inline(always)]
unsafe fn span<
    S: Words,
    const G: usize,
    const N: usize,
    const HALVES: bool,
    const MIN: bool,
    const WIDE: bool,
>(
    segment: &Segment<'_>,
    t: usize,
    chunks: Range<usize>,
) -> [[[S::I; 2]; G]; N] {
    let parts = if HALVES { 2 } else { 1 };
    let count = PAIRS / parts;
    // SAFETY: by the caller's promise.
    unsafe {
        let mut totals = [[[S::splat_i(0); 2]; G]; N];
        for c in chunks {
            let parts = if HALVES && S::ROLLED {
                std::hint::black_box(parts)
            } else {
                parts
            };
            let mut part = 0;
            while part < parts {
                let pairs = part * count..(part + 1) * count;
                let dots = dots::<S, G, N>(segment, t, c, pairs);
                let mut i = 0;
                while i < N {
                    let row = segment.first + t + i;
                    let sums = if MIN {
                        let meta = segment.x.meta(row, segment.first_chunk + c);
                        DotSplit::<HALVES, WIDE>::sum(meta, part)
                    } else {
                        [0; 2]
                    };
                    let mut g = 0;
                    while g < G {
                        let factors = factors(segment, g, c);
                        let totals = &mut totals[i][g];
                        DotSplit::<HALVES, WIDE>::add::<S, MIN>(
                            factors, part, dots[i][g], sums, totals,
                        );
                        g += 1;
                    }
                    i += 1;
                }
                part += 1;
            }
        }
        totals
    }
}

/// The factors of chunk `c` of group `g`.
#[inline(always)]
unsafe fn factors(segment: &Segment<'_>, g: usize, c: usize) -> *const WordFactors {
    // SAFETY: the caller names a chunk of the panel.
    unsafe { &raw const (*segment.chunk(g, c).cast::<PanelChunk>()).factors }
}

/// The dot products of some pairs of a chunk.
#[inline(always)]
unsafe fn dots<S: Words, const G: usize, const N: usize>(
    segment: &Segment<'_>,
    t: usize,
    c: usize,
    pairs: Range<usize>,
) -> [[S::I; G]; N] {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut dots = [[S::splat_i(0); G]; N];
        let x = segment.x.words(segment.first + t, segment.first_chunk + c);
        let weights = [0, G - 1].map(|g| segment.chunk(g, c));
        for pair in pairs {
            let mut w = [S::load_w(weights[0].add(pair * 4 * LANES)); G];
            w[G - 1] = S::load_w(weights[1].add(pair * 4 * LANES));
            let mut i = 0;
            while i < N {
                let x = x.add(i * segment.x.stride + 2 * pair);
                let mut g = 0;
                while g < G {
                    dots[i][g] = S::dot_words(dots[i][g], w[g], x);
                    g += 1;
                }
                i += 1;
            }
        }
        dots
    }
}

/// The sums of a chunk of activations as panels read them, next to its integers: both halves' sums
/// as words, ready to be multiplied.
#[inline(always)]
pub(crate) fn copied(meta: Meta) -> Meta {
    Meta {
        small: DotSplit::<false, false>::words(joined::<2>(meta.whole())),
        ..meta
    }
}

/// The cut of dot products into a high and a low part. The type's halves have scales of their own
/// if `HALVES`; it is wide if `WIDE`. Both parts have 16 bits. The sums over a span of the low ones
/// times their factors have 31 bits. Of these factors, scale and min together have as many bits as
/// a weight.
struct DotSplit<const HALVES: bool, const WIDE: bool>;

impl<const HALVES: bool, const WIDE: bool> DotSplit<HALVES, WIDE> {
    /// Bits of the low part.
    const BITS: u32 = match (WIDE, HALVES) {
        (true, _) => 14, // as `total` wants them; scales have 12 bits, mins 14
        (_, false) => 13,
        (_, true) => 12,
    };
    const LOW: i32 = (1 << Self::BITS) - 1;

    /// The sum of activations of a half, or of a chunk, as `add` wants it, from what
    /// [`copied`] made of it.
    #[inline(always)]
    fn sum(meta: Meta, half: usize) -> [i32; 2] {
        match (HALVES, WIDE) {
            (false, false) => meta.small,
            (true, _) => Self::words(joined::<2>(meta.sums[half])),
            (false, true) => Self::words(joined::<2>(meta.whole()) * WIDE_MIN),
        }
    }

    /// The high part as the low word, the low part as the high one.
    #[inline(always)]
    const fn words(sum: i32) -> [i32; 2] {
        [sum >> Self::BITS & 0xffff, (sum & Self::LOW) << 16]
    }

    /// Adds to `totals`, high and low, the dot products of a half, or of a chunk whose halves have
    /// the same factors.
    ///
    /// # Safety
    /// Features of `S`; factors that were unpacked, of a format that has a min if `MIN`.
    #[inline(always)]
    unsafe fn add<S: Words, const MIN: bool>(
        factors: *const WordFactors,
        half: usize,
        dots: S::I,
        sums: [i32; 2],
        totals: &mut [S::I; 2],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            // The high part is the high word.
            let mut high = match Self::BITS {
                12 => S::shl_i::<4>(dots),
                13 => S::shl_i::<3>(dots),
                _ => S::shl_i::<2>(dots),
            };
            let mut low = S::and_i(dots, S::splat_i(Self::LOW));
            if MIN {
                high = S::merge(S::splat_i(sums[0]), high);
                low = S::add_i(low, S::splat_i(sums[1]));
            }
            let factor = |of: &[[i32; LANES]; 2]| S::load_i((&raw const of[half]).cast());
            totals[0] = S::dot_lanes(totals[0], high, factor(&(*factors).high));
            totals[1] = S::dot_lanes(totals[1], low, factor(&(*factors).low));
        }
    }

    /// The float that totals are.
    ///
    /// # Safety
    /// Features of `S`.
    #[inline(always)]
    unsafe fn total<S: Words>([high, low]: [S::I; 2]) -> S::F {
        // SAFETY: register arithmetic.
        unsafe {
            let high = match Self::BITS {
                12 => S::shl_i::<5>(high),
                13 => S::shl_i::<6>(high),
                _ => high,
            };
            total::<S, 2>([high, low], WIDE)
        }
    }
}
