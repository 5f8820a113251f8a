//! Matrix products, generic over instruction set and weight format.
//!
//! For output row `r` and activation row `t`, the kernel class `cpu` computes
//!
//! ```text
//! leaf  = 0
//! for each span of the leaf, in order:
//!     T = sum over k of (scale[k] * w[k] + min[k]) * q[k]      (an integer, exact)
//!     H, L = T >> 7, T & 127                                   (wide types: by 14 bits)
//!     inner = fma(f32(H), 128, f32(L))                         (`cpu-q8`, but for these: f32(T))
//!     leaf  = fma(inner * step, activation scale, leaf)
//! y = canonical tree over the leaves (paceline_base::tree)
//! ```
//!
//! where a weight is `step * (scale * w + min)` ([`crate::stored::units`]) and a span has one step
//! and one activation scale ([`crate::activations`]). `T` has up to 38 bits. It is accumulated as
//! `128 high + low`, both i32: the high and the low bytes of activations have a sum each.
//! `|high| <= 2^15 * 2^7 * 2^8 / 2`, and the low sums have the same bound. Only the final value
//! must fit, so offsets may be subtracted before or afterwards. The intermediate split of `T` does
//! not matter: `H` and `L` do not depend on it. Wide types have weights of 20 bits: each chunk's
//! sum is split at 14 bits before it is multiplied by its scale.
//!
//! For float weights the sum is `a[k % 4] = fma(w[k], x[k], a[k % 4])` over the columns of a leaf.
//! Then come `(a0 + a1) + (a2 + a3)` and the tree (BF16 in class `cpu-q8`: `pairs`).
//!
//! Each lane of a register is one row. So these orders hold for any register width, any number of
//! activation rows at once and any distribution of rows over threads. [`crate::naive`] computes the
//! same from the stored blocks.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use crate::formats::{Format, LINE, Layout, Planes, Scales};
use crate::isa::{Isa, LANES};
use crate::quantisation::{CHUNK, Meta, QuantisedView, joined};

pub(crate) mod fp8;
pub(crate) mod pairs;

/// Activation rows that share one unpacking of the weights. With four, the accumulators and the
/// eight unpacked quads fit the 32 registers of AVX-512; AVX2 spills either way. Counted, not
/// measured.
const TILE: usize = 4;

/// Deepest tree: 2^16 leaves.
pub(crate) const LEVELS: usize = 17;

/// A group of 16 rows of a packed matrix, and the activation rows to multiply it with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupArgs<'a> {
    /// The group's packed bytes, from its first block on.
    pub(crate) weights: *const u8,
    /// Chunks of the group before that of column 0; 0 for floats.
    pub(crate) first_chunk: usize,
    /// Chunks of its first unit that the group lacks.
    pub(crate) lacks: usize,
    /// Columns of a span: whole chunks.
    pub(crate) span: usize,
    /// Of FP8: columns that share scales; 0 of other types.
    pub(crate) scale_cols: usize,
    /// Columns of the matrix.
    pub(crate) cols: usize,
    /// Columns of a leaf, at least 1.
    pub(crate) leaf_cols: usize,
    /// `(rows, cols)`.
    pub(crate) x: QuantisedView<'a>,
    /// First activation row.
    pub(crate) first: usize,
    /// End of the activation rows.
    pub(crate) end: usize,
    /// Output of row 0 of the group for activation row 0.
    pub(crate) out: *mut f32,
    /// Distance between activation rows in the output.
    pub(crate) out_stride: usize,
    /// Rows of the group that exist, 1..=16; in a batch, of all its groups.
    pub(crate) lanes: usize,
}

/// Multiplies a group with activation rows `first..end`, weights of format `F`, activations of
/// `TERMS` bytes.
///
/// # Safety
/// Features of `S`; the pointers of `args` cover the group, the activation rows, and `lanes`
/// outputs for each.
#[inline(always)]
pub(crate) unsafe fn group<S: Isa, F: Format, const TERMS: usize>(args: GroupArgs<'_>) {
    // SAFETY: passed on.
    unsafe { tiles::<S>(args, QuantisedLeaf::<F, TERMS>(std::marker::PhantomData)) }
}

/// Like [`group`] for float weights.
///
/// # Safety
/// See [`group`].
#[inline(always)]
pub(crate) unsafe fn group_floats<S: Isa, T: FloatWeight>(args: GroupArgs<'_>) {
    // SAFETY: passed on.
    unsafe { tiles::<S>(args, Floats::<T>(std::marker::PhantomData)) }
}

/// The sum over the columns of one leaf.
trait Leaf<S: Isa>: Copy {
    unsafe fn leaf<const N: usize>(
        self,
        args: &GroupArgs<'_>,
        t: usize,
        cols: Range<usize>,
    ) -> [S::F; N];
}

#[inline(always)]
unsafe fn tiles<S: Isa>(args: GroupArgs<'_>, kernel: impl Leaf<S>) {
    let mut t = args.first;
    // SAFETY: tiles stay within first..end.
    unsafe {
        while t + TILE <= args.end {
            tile::<S, TILE>(&args, kernel, t);
            t += TILE;
        }
        while t < args.end {
            tile::<S, 1>(&args, kernel, t);
            t += 1;
        }
    }
}

/// `N` activation rows from `t`.
#[inline(always)]
unsafe fn tile<S: Isa, const N: usize>(args: &GroupArgs<'_>, kernel: impl Leaf<S>, t: usize) {
    // SAFETY: the leaves make up 0..cols; outputs are those of rows t..t + N.
    unsafe {
        let sums = if args.leaf_cols >= args.cols {
            kernel.leaf::<N>(args, t, 0..args.cols)
        } else {
            tree::<S, N>(args, kernel, t)
        };
        let mut i = 0;
        while i < N {
            store_lanes::<S>(args.out.add((t + i) * args.out_stride), sums[i], args.lanes);
            i += 1;
        }
    }
}

/// The canonical tree: a binary counter of partial sums, level `l` holding 2^l leaves.
///
/// The counter lives in memory, written before it is read, so that nothing is cleared or copied.
#[inline(always)]
unsafe fn tree<S: Isa, const N: usize>(
    args: &GroupArgs<'_>,
    kernel: impl Leaf<S>,
    t: usize,
) -> [S::F; N] {
    let leaves = args.cols.div_ceil(args.leaf_cols);
    let mut levels = [const { MaybeUninit::<[[f32; LANES]; TILE]>::uninit() }; LEVELS];
    // SAFETY: leaf ranges lie within 0..cols; a level is read only while its bit in the counter is
    // set, which its write sets.
    unsafe {
        for leaf in 0..leaves {
            let start = leaf * args.leaf_cols;
            let end = (start + args.leaf_cols).min(args.cols);
            let mut sum = kernel.leaf::<N>(args, t, start..end);
            let mut level = 0;
            while leaf >> level & 1 == 1 {
                add_level::<S, N>(levels[level].as_ptr(), &mut sum);
                level += 1;
            }
            store_level::<S, N>(levels[level].as_mut_ptr(), &sum);
        }
        // The rest of the counter, lowest level first: each is the right child of the next.
        let mut level = leaves.trailing_zeros() as usize;
        let mut sum = [S::splat(-0.0); N]; // -0 + x is x, to the bit
        while leaves >> level != 0 {
            if leaves >> level & 1 == 1 {
                add_level::<S, N>(levels[level].as_ptr(), &mut sum);
            }
            level += 1;
        }
        sum
    }
}

/// `sum = level + sum`.
#[inline(always)]
unsafe fn add_level<S: Isa, const N: usize>(
    level: *const [[f32; LANES]; TILE],
    sum: &mut [S::F; N],
) {
    let mut i = 0;
    while i < N {
        // SAFETY: the level was written; N <= TILE.
        sum[i] = unsafe { S::add(S::load(level.cast::<f32>().add(i * LANES)), sum[i]) };
        i += 1;
    }
}

#[inline(always)]
unsafe fn store_level<S: Isa, const N: usize>(level: *mut [[f32; LANES]; TILE], sum: &[S::F; N]) {
    let mut i = 0;
    while i < N {
        // SAFETY: N <= TILE.
        unsafe { S::store(level.cast::<f32>().add(i * LANES), sum[i]) };
        i += 1;
    }
}

#[inline(always)]
pub(crate) unsafe fn store_lanes<S: Isa>(out: *mut f32, sum: S::F, lanes: usize) {
    // SAFETY: `lanes` outputs exist; a partial group goes through a whole buffer.
    unsafe {
        if lanes == LANES {
            S::store(out, sum);
        } else {
            let mut whole = [0.0f32; LANES];
            S::store(whole.as_mut_ptr(), sum);
            std::ptr::copy_nonoverlapping(whole.as_ptr(), out, lanes);
        }
    }
}

/// Integer weights of format `F`.
#[derive(Debug)]
struct QuantisedLeaf<F, const TERMS: usize>(std::marker::PhantomData<F>);

impl<F, const TERMS: usize> Clone for QuantisedLeaf<F, TERMS> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<F, const TERMS: usize> Copy for QuantisedLeaf<F, TERMS> {}

/// Prefetch distance in bytes into L1 (NEAR) and L2 (FAR), for products of few rows. `paceline
/// bench kernels` on an Intel Xeon with AMX, relative to plain reads: Q4_0 0.57 -> 0.92, Q8_0 0.60
/// -> 0.94, Q4_K 0.52 -> 0.90. Zen 4's own prefetcher does as well.
const PREFETCH_L1_BYTES: usize = 512;
const PREFETCH_L2_BYTES: usize = 4096;

/// Weights of the next products, prefetched a line at a time between the steps of this one. All at
/// once would fill the core's line fill buffers and stall the loads behind them. (There, one row:
/// Q4_K 0.87, Q6_K 0.92 of the speed; four rows without prefetch: 0.6 to 0.75.)
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefetch {
    /// Address of the current weights.
    pub(crate) at: *const u8,
    /// Bytes that it reads in these steps.
    pub(crate) bytes: usize,
}

impl Prefetch {
    /// Prefetches at distances [`NEAR`] and [`FAR`] for step `step` of `steps`; may exceed the end.
    #[inline(always)]
    pub(crate) unsafe fn prefetch<S: Isa>(self, step: usize, steps: usize) {
        let lines = self.bytes.div_ceil(LINE);
        let mut line = lines * step / steps;
        while line < lines * (step + 1) / steps {
            // SAFETY: a hint; any address may be given.
            unsafe {
                S::prefetch_ahead::<PREFETCH_L1_BYTES, PREFETCH_L2_BYTES>(
                    self.at.wrapping_add(LINE * line),
                )
            };
            line += 1;
        }
    }
}

impl<S: Isa, F: Format, const TERMS: usize> Leaf<S> for QuantisedLeaf<F, TERMS> {
    #[inline(always)]
    unsafe fn leaf<const N: usize>(
        self,
        args: &GroupArgs<'_>,
        t: usize,
        cols: Range<usize>,
    ) -> [S::F; N] {
        let (mut c, end) = (cols.start / CHUNK, cols.end / CHUNK);
        // SAFETY: chunks of `cols` lie within the group and the activations.
        unsafe {
            if c == 0 {
                // The previous group's prefetches end before this group's headers, which precede
                // `weights`.
                let layout: Layout = F::LAYOUT;
                let bytes = layout.headers(args.lacks + args.first_chunk + args.cols / CHUNK);
                let at = args.weights.wrapping_sub(bytes);
                Prefetch { at, bytes }.prefetch::<S>(0, 1);
            }
            let mut sums = [S::splat(0.0); N];
            while c < end {
                let stop = end.min(c + args.span / CHUNK);
                let totals = span::<S, F, TERMS, N>(args, t, c..stop);
                let step = F::S::step::<S>(header::<F>(args, c));
                let mut i = 0;
                while i < N {
                    let (_, meta) = args.x.chunk::<TERMS>(t + i, c);
                    let inner = S::mul(total::<S, TERMS>(totals[i], F::S::WIDE), step);
                    sums[i] = S::fma(inner, S::splat(meta.scale), sums[i]);
                    i += 1;
                }
                c = stop;
            }
            sums
        }
    }
}

/// The header of the unit of chunk `c`.
#[inline(always)]
unsafe fn header<F: Format>(args: &GroupArgs<'_>, c: usize) -> *const u8 {
    let layout: Layout = F::LAYOUT;
    // SAFETY: headers lie before the first block.
    unsafe {
        args.weights
            .sub(layout.header_before(args.lacks + args.first_chunk + c))
    }
}

/// `T` of the module for the chunks of a span and `N` activation rows from `t`, by bytes.
#[inline(always)]
unsafe fn span<S: Isa, F: Format, const TERMS: usize, const N: usize>(
    args: &GroupArgs<'_>,
    t: usize,
    chunks: Range<usize>,
) -> [[S::I; 2]; N] {
    if S::PAIRED && F::PAIRED {
        // SAFETY: passed on.
        return unsafe { paired_span::<S, F, TERMS, N>(args, t, chunks) };
    }
    let layout: Layout = F::LAYOUT;
    // SAFETY: by the caller's promise.
    unsafe {
        let multipliers = F::S::multipliers::<S>(header::<F>(args, chunks.start));
        let mut totals = [[S::splat_i(0); 2]; N];
        for c in chunks {
            let place = layout.place(args.first_chunk + c);
            let bytes = layout.chunk_bytes();
            let at = args.weights.wrapping_add((args.first_chunk + c) * bytes);
            let ahead = Prefetch { at, bytes };
            let weights = ChunkWeights::<S>::load::<F>(
                multipliers,
                args.weights.add(place.planes),
                args.weights.add(place.scales),
            );
            let mut i = 0;
            while i < N {
                let (q, meta) = args.x.chunk::<TERMS>(t + i, c);
                weights.add::<F, TERMS>(q, meta, &mut totals[i], ahead);
                i += 1;
            }
        }
        totals
    }
}

/// Like [`span`], for formats that multiply pairs of columns by their scales. No lanes are summed
/// before that. Where no min has the offset, it is subtracted behind each chunk.
#[inline(always)]
unsafe fn paired_span<S: Isa, F: Format, const TERMS: usize, const N: usize>(
    args: &GroupArgs<'_>,
    t: usize,
    chunks: Range<usize>,
) -> [[S::I; 2]; N] {
    let layout: Layout = F::LAYOUT;
    // SAFETY: by the caller's promise.
    unsafe {
        let multipliers = F::S::multipliers::<S>(header::<F>(args, chunks.start));
        let multipliers = F::S::paired::<S>(multipliers);
        let mut totals = [[S::splat_i(0); 2]; N];
        for c in chunks {
            let place = layout.place(args.first_chunk + c);
            let bytes = layout.chunk_bytes();
            let at = args.weights.wrapping_add((args.first_chunk + c) * bytes);
            let ahead = Prefetch { at, bytes };
            let quads = F::P::quads::<S>(args.weights.add(place.planes));
            let factors = F::S::factors::<S>(multipliers, args.weights.add(place.scales));
            let mut i = 0;
            while i < N {
                let activations = args.x.chunk::<TERMS>(t + i, c);
                add_paired::<S, F, TERMS>((&quads, factors), activations, &mut totals[i], ahead);
                i += 1;
            }
        }
        totals
    }
}

/// Scales of both halves of a chunk, and its minimum.
type PairedFactors<S> = ([<S as Isa>::I; 2], <S as Isa>::I);

/// Adds the products of a chunk with 32 activations to `totals`, and prefetches `ahead`.
#[inline(always)]
unsafe fn add_paired<S: Isa, F: Format, const TERMS: usize>(
    (quads, factors): (&[S::W; 8], PairedFactors<S>),
    (q, meta): ([*const i8; TERMS], Meta),
    totals: &mut [S::I; 2],
    ahead: Prefetch,
) {
    let (scales, min) = factors;
    let most = (F::P::OFFSET + F::P::LARGEST, F::S::HALVES);
    let mut term = 0;
    while term < TERMS {
        // SAFETY: register arithmetic and 32 bytes of each term.
        unsafe {
            ahead.prefetch::<S>(2 * term, 2 * TERMS);
            let mut total = S::dot_scaled(totals[term], quads, q[term], most, scales);
            ahead.prefetch::<S>(2 * term + 1, 2 * TERMS);
            if F::S::HAS_MIN {
                total = S::mul_add_small(total, min, S::splat_i(meta.small[term]));
            } else {
                let sums = [meta.sums[0][term], meta.sums[1][term]];
                total = S::less_offset(total, scales, F::P::OFFSET, sums);
            }
            totals[term] = total;
        }
        term += 1;
    }
}

/// A chunk of 16 rows in registers.
struct ChunkWeights<S: Isa> {
    quads: [S::W; 8],
    scales: [S::I; 2],
    mins: [S::I; 2],
}

impl<S: Isa> ChunkWeights<S> {
    #[inline(always)]
    unsafe fn load<F: Format>(
        multipliers: <F::S as Scales>::Multipliers<S>,
        chunk: *const u8,
        scales: *const u8,
    ) -> Self {
        // SAFETY: passed on.
        unsafe {
            Self {
                quads: F::P::quads::<S>(chunk),
                scales: F::S::scales::<S>(multipliers, scales),
                mins: if F::S::HAS_MIN {
                    F::S::mins::<S>(multipliers, scales)
                } else {
                    [S::splat_i(0); 2]
                },
            }
        }
    }

    /// Adds the products with 32 activations to `totals`, and prefetches `ahead`.
    #[inline(always)]
    unsafe fn add<F: Format, const TERMS: usize>(
        &self,
        q: [*const i8; TERMS],
        meta: Meta,
        totals: &mut [S::I; 2],
        ahead: Prefetch,
    ) {
        // SAFETY: register arithmetic and 32 bytes for each term.
        unsafe {
            if F::S::HALVES {
                let mut half = 0;
                while half < 2 {
                    let less = less::<S, F, TERMS>(meta.sums[half]);
                    let dots = self.half::<F, TERMS>(half, q, less, ahead);
                    let factors = (self.scales[half], self.mins[half]);
                    let small = meta.sums[half].map(|sum| sum & S::SMALL);
                    let sums = [meta.sums[half], small];
                    scaled::<S, F, TERMS>(totals, dots, factors, sums);
                    half += 1;
                }
            } else {
                let sums = meta.whole();
                let less = if !F::P::SIGNED && F::P::OFFSET == 8 {
                    [
                        S::splat_i(meta.eight_less[0]),
                        S::splat_i(meta.eight_less[1]),
                    ]
                } else {
                    less::<S, F, TERMS>(sums)
                };
                let mut dots = self.half::<F, TERMS>(0, q, less, ahead);
                let second = self.half::<F, TERMS>(1, q, [S::splat_i(0); 2], ahead);
                let mut term = 0;
                while term < TERMS {
                    dots[term] = S::add_i(dots[term], second[term]);
                    term += 1;
                }
                let factors = (self.scales[0], self.mins[0]);
                scaled::<S, F, TERMS>(totals, dots, factors, [sums, meta.small]);
            }
        }
    }

    /// The dot products of columns `16 * half..` with each term, added to `less`.
    #[inline(always)]
    unsafe fn half<F: Format, const TERMS: usize>(
        &self,
        half: usize,
        q: [*const i8; TERMS],
        less: [S::I; 2],
        ahead: Prefetch,
    ) -> [S::I; TERMS] {
        // SAFETY: register arithmetic and 16 bytes at `16 * half` of each term.
        unsafe {
            let mut acc = [less[0]; TERMS];
            acc[TERMS - 1] = less[TERMS - 1];
            if S::FOURS && !F::P::SIGNED {
                let quads = &*self.quads.as_ptr().add(4 * half).cast();
                let mut term = 0;
                while term < TERMS {
                    ahead.prefetch::<S>(half * TERMS + term, 2 * TERMS);
                    let x = q[term].add(16 * half);
                    let most = F::P::OFFSET + F::P::LARGEST;
                    acc[term] = S::dot_fours(acc[term], quads, x, most);
                    term += 1;
                }
                return acc;
            }
            let mut g = 4 * half;
            while g < 4 * half + 4 {
                ahead.prefetch::<S>(g, 8);
                let mut term = 0;
                while term < TERMS {
                    let x = q[term].add(4 * g);
                    acc[term] = if F::P::SIGNED {
                        S::dot_signed(acc[term], self.quads[g], x)
                    } else {
                        S::dot_unsigned(acc[term], self.quads[g], x)
                    };
                    term += 1;
                }
                g += 1;
            }
            acc
        }
    }
}

/// The amount, negative, that zero offset and sign bias add to dot products with activations of
/// these sums.
#[inline(always)]
unsafe fn less<S: Isa, F: Format, const TERMS: usize>(sums: [i32; 2]) -> [S::I; 2] {
    let offset = if F::P::SIGNED {
        S::SIGNED_BIAS
    } else {
        F::P::OFFSET
    };
    // SAFETY: register arithmetic.
    unsafe {
        [
            S::splat_i(-offset * sums[0]),
            S::splat_i(-offset * sums[TERMS - 1]),
        ]
    }
}

/// Adds to `totals` the dot products times their scale, and the sums of activations, which are
/// there as they are and [small](Isa::small), times their min.
#[inline(always)]
unsafe fn scaled<S: Isa, F: Format, const TERMS: usize>(
    totals: &mut [S::I; 2],
    dots: [S::I; TERMS],
    (scale, min): (S::I, S::I),
    [sums, small]: [[i32; 2]; 2],
) {
    // SAFETY: register arithmetic.
    unsafe {
        if F::S::WIDE {
            let terms = cut::<S>(join::<S, TERMS>(dots));
            let sums = wide_terms(joined::<TERMS>(sums));
            return add_wide::<S, F>(totals, terms, (scale, min), sums);
        }
        let mut term = 0;
        while term < TERMS {
            totals[term] = if F::SMALL {
                let scale = if F::S::NEVER_NEGATIVE {
                    scale
                } else {
                    S::small(scale)
                };
                S::mul_add_small(totals[term], dots[term], scale)
            } else {
                S::add_i(totals[term], S::mul_i(dots[term], scale))
            };
            if F::S::HAS_MIN {
                let sum = S::splat_i(small[term]);
                totals[term] = S::mul_add_small(totals[term], min, sum);
            }
            term += 1;
        }
    }
}

/// Like [`scaled`], for wide types: the split terms have 16 bits.
#[inline(always)]
unsafe fn add_wide<S: Isa, F: Format>(
    totals: &mut [S::I; 2],
    terms: [S::I; 2],
    (scale, min): (S::I, S::I),
    sums: [i32; 2],
) {
    let mut term = 0;
    while term < 2 {
        // SAFETY: register arithmetic.
        unsafe {
            totals[term] = S::mul_add_small(totals[term], terms[term], S::small(scale));
            if F::S::HAS_MIN {
                let sum = S::splat_i(sums[term] & S::SMALL);
                totals[term] = S::mul_add_small(totals[term], min, sum);
            }
        }
        term += 1;
    }
}

/// Joins terms to an integer: `128 high + low`, or the only one.
#[inline(always)]
unsafe fn join<S: Isa, const TERMS: usize>(terms: [S::I; TERMS]) -> S::I {
    if TERMS == 1 {
        return terms[0];
    }
    // SAFETY: register arithmetic.
    unsafe { S::add_i(S::shl7_i(terms[0]), terms[TERMS - 1]) }
}

/// Bits from which on integers of wide types are cut.
const WIDE_BITS: u32 = 14;

/// An integer as `[x >> 14, x & 16383]`.
#[inline(always)]
pub(crate) unsafe fn cut<S: Isa>(x: S::I) -> [S::I; 2] {
    // SAFETY: register arithmetic.
    unsafe {
        let low = S::splat_i((1 << WIDE_BITS) - 1);
        [S::sar7_i(S::sar7_i(x)), S::and_i(x, low)]
    }
}

/// 64 times a sum ([`WIDE_MIN`](crate::stored::units::WIDE_MIN)), cut as [`cut`] does.
#[inline(always)]
pub(crate) const fn wide_terms(sum: i32) -> [i32; 2] {
    [sum >> 8, (sum & 255) << 6]
}

/// `inner` of the module: from `[high, low]`, or the first one alone.
#[inline(always)]
pub(crate) unsafe fn total<S: Isa, const TERMS: usize>(terms: [S::I; 2], wide: bool) -> S::F {
    // SAFETY: register arithmetic.
    unsafe {
        if wide {
            let [carry, low] = cut::<S>(terms[1]);
            let high = S::to_f(S::add_i(terms[0], carry));
            return S::fma(high, S::splat((1 << WIDE_BITS) as f32), S::to_f(low));
        }
        if TERMS == 1 {
            return S::to_f(terms[0]);
        }
        let high = S::add_i(terms[0], S::sar7_i(terms[1]));
        let low = S::and_i(terms[1], S::splat_i(127));
        S::fma(S::to_f(high), S::splat(128.0), S::to_f(low))
    }
}

/// A float weight type.
pub(crate) trait FloatWeight {
    /// Bytes of one value.
    const SIZE: usize;
    /// Sixteen values.
    unsafe fn load<S: Isa>(p: *const u8) -> S::F;
}

impl FloatWeight for f32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load(p.cast()) }
    }
}

impl FloatWeight for f16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl FloatWeight for bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Isa>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load_bf16(p.cast()) }
    }
}

#[derive(Debug)]
struct Floats<T>(std::marker::PhantomData<T>);

impl<T> Clone for Floats<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Floats<T> {}

impl<S: Isa, T: FloatWeight> Leaf<S> for Floats<T> {
    #[inline(always)]
    unsafe fn leaf<const N: usize>(
        self,
        args: &GroupArgs<'_>,
        t: usize,
        cols: Range<usize>,
    ) -> [S::F; N] {
        // SAFETY: columns lie within the group and the activations. Leaves start at multiples of
        // 4, so `k % 4` counts from the start of the leaf and of the row alike.
        unsafe {
            let mut acc = [[S::splat(0.0); 4]; N];
            let mut k = cols.start;
            while k < cols.end {
                let steps = (cols.end - k).min(4);
                let bytes = LANES * T::SIZE;
                let at = args.weights.add(k * bytes);
                let ahead = Prefetch {
                    at,
                    bytes: 4 * bytes,
                };
                let mut j = 0;
                while j < steps {
                    ahead.prefetch::<S>(j, 4);
                    let w = T::load::<S>(args.weights.add((k + j) * LANES * T::SIZE));
                    let mut i = 0;
                    while i < N {
                        let x = *args.x.values(t + i).add(k + j);
                        acc[i][j] = S::fma(w, S::splat(x), acc[i][j]);
                        i += 1;
                    }
                    j += 1;
                }
                k += 4;
            }
            let mut out = [S::splat(0.0); N];
            let mut i = 0;
            while i < N {
                let [a, b, c, d] = acc[i];
                out[i] = S::add(S::add(a, b), S::add(c, d));
                i += 1;
            }
            out
        }
    }
}
