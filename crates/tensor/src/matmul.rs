//! Matrix products, generic over instruction set and weight format.
//!
//! For output row `r` and activation row `t`, the kernel class `cpu` computes
//!
//! ```text
//! leaf  = 0
//! for each chunk c of the leaf, in order:
//!     D = sum over k of sub[k/16] * w[k] * q[k]         (i32, exact)
//!     M = sum over k of min_sub[k/16] * q[k]            (i32, exact; types with a min)
//!     inner = fma(D, scale, min * M)   or   D * scale   (types without)
//!     leaf  = fma(inner, activation scale, leaf)
//! y = canonical tree over the leaves (paceline_base::tree)
//! ```
//!
//! and float weights: `a[k % 4] = fma(w[k], x[k], a[k % 4])` over the columns of a leaf, then
//! `(a0 + a1) + (a2 + a3)`, then the tree (BF16 in class `cpu-q8`: `pairs`). Each lane of a
//! register is one row, so these orders hold for any register width, any number of activation rows
//! at once and any distribution of rows over threads. [`crate::naive`] computes the same from the
//! stored blocks.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use crate::activations::{Meta, View};
use crate::formats::{Format, Layout, Planes, Scales};
use crate::isa::{Isa, LANES};
use crate::stored::Chunk;

pub(crate) mod pairs;

/// Activation rows that share one unpacking of the weights. With four, the accumulators and the
/// eight unpacked quads fit the 32 registers of AVX-512; AVX2 spills either way. Counted, not
/// measured.
const TILE: usize = 4;

/// Deepest tree: 2^16 leaves.
pub(crate) const LEVELS: usize = 17;

/// One group of 16 rows of a packed matrix, and the activation rows to multiply it with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupArgs<'a> {
    /// The group's packed bytes.
    pub(crate) weights: *const u8,
    /// Chunks of the group before that of column 0; 0 for floats.
    pub(crate) first_chunk: usize,
    /// Columns of the matrix.
    pub(crate) cols: usize,
    /// Columns of a leaf, at least 1.
    pub(crate) leaf_cols: usize,
    /// `(rows, cols)`.
    pub(crate) x: View<'a>,
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
    unsafe { tiles::<S>(args, Quantised::<F, TERMS>(std::marker::PhantomData)) }
}

/// As [`group`] for float weights.
///
/// # Safety
/// As [`group`].
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
    // SAFETY: leaf ranges lie within 0..cols; a level is read only while the bit that its writing
    // set in the counter stands.
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
        // What is left of the counter, lowest level first: each is the right child of the next.
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
struct Quantised<F, const TERMS: usize>(std::marker::PhantomData<F>);

impl<F, const TERMS: usize> Clone for Quantised<F, TERMS> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<F, const TERMS: usize> Copy for Quantised<F, TERMS> {}

/// Vectors from which on a block's header stays in registers. With 8 (AVX2, NEON) it costs more
/// instructions to keep than to read again: Q6_K 7 %.
const MANY: usize = 32;

/// How far ahead of a single row's product weights are asked for, into the first cache and into
/// the second. `paceline bench kernels` on an Intel Xeon with AMX, of plain reads: Q4_0 0.57 ->
/// 0.92, Q8_0 0.60 -> 0.94, Q4_K 0.52 -> 0.90. Zen 4 fetches as much by itself.
const NEAR: usize = 512;
const FAR: usize = 4096;

/// Asks for `bytes` bytes of weights [`NEAR`] and [`FAR`] behind `at`, which may lie behind all.
#[inline(always)]
pub(crate) unsafe fn ask_ahead<S: Isa>(at: *const u8, bytes: usize) {
    let mut line = 0;
    while line < bytes {
        // SAFETY: hints; any address may be given.
        unsafe {
            S::prefetch(at.wrapping_add(NEAR + line));
            S::prefetch_far(at.wrapping_add(FAR + line));
        }
        line += 64;
    }
}

impl<S: Isa, F: Format, const TERMS: usize> Leaf<S> for Quantised<F, TERMS> {
    #[inline(always)]
    unsafe fn leaf<const N: usize>(
        self,
        args: &GroupArgs<'_>,
        t: usize,
        cols: Range<usize>,
    ) -> [S::F; N] {
        let layout: Layout = F::LAYOUT;
        let (mut c, end) = (cols.start / Chunk::LEN, cols.end / Chunk::LEN);
        // SAFETY: chunks of `cols` lie within the group and the activations.
        unsafe {
            let mut acc = [S::splat(0.0); N];
            while c < end {
                // A block's chunks at a time where registers hold its header.
                let by_block = F::S::HEADER > 0 && S::REGISTERS >= MANY;
                let first = args.first_chunk + c;
                let stop = match layout.per_block - first % layout.per_block {
                    left if by_block => end.min(c + left),
                    _ => end,
                };
                let held = F::S::header::<S>(args.weights.add(layout.place(first).header));
                while c < stop {
                    let place = layout.place(args.first_chunk + c);
                    if N == 1 {
                        let bytes = layout.chunk_bytes();
                        let at = (args.first_chunk + c) * bytes;
                        ask_ahead::<S>(args.weights.wrapping_add(at), bytes);
                    }
                    let header = if by_block {
                        held
                    } else {
                        F::S::header::<S>(args.weights.add(place.header))
                    };
                    let weights = ChunkWeights::<S>::load::<F>(
                        header,
                        args.weights.add(place.planes),
                        args.weights.add(place.scales),
                    );
                    let mut i = 0;
                    while i < N {
                        let (q, meta) = args.x.chunk::<TERMS>(t + i, c);
                        let inner = weights.dot::<F, TERMS>(q, meta);
                        acc[i] = S::fma(inner, S::splat(meta.scale), acc[i]);
                        i += 1;
                    }
                    c += 1;
                }
            }
            acc
        }
    }
}

/// A chunk of 16 rows in registers.
struct ChunkWeights<S: Isa> {
    quads: [S::W; 8],
    scale: S::F,
    min: S::F,
    sub: [S::I; 2],
    min_sub: [S::I; 2],
}

impl<S: Isa> ChunkWeights<S> {
    #[inline(always)]
    unsafe fn load<F: Format>(
        header: <F::S as Scales>::Header<S>,
        chunk: *const u8,
        scales: *const u8,
    ) -> Self {
        // SAFETY: passed on.
        unsafe {
            Self {
                quads: F::P::quads::<S>(chunk),
                scale: F::S::scale::<S>(header, scales),
                min: F::S::min::<S>(header, scales),
                sub: F::S::sub::<S>(scales),
                min_sub: F::S::min_sub::<S>(scales),
            }
        }
    }

    /// `inner` of the module's formula, for 32 activations.
    #[inline(always)]
    unsafe fn dot<F: Format, const TERMS: usize>(&self, q: [*const i8; TERMS], meta: Meta) -> S::F {
        // SAFETY: register arithmetic and 32 bytes for each term.
        unsafe {
            let [low, high] = [
                self.half::<F, TERMS>(0, q, meta.sums),
                self.half::<F, TERMS>(1, q, meta.sums),
            ];
            let dot = if F::S::HALVES {
                let parts = [join::<S, TERMS>(low), join::<S, TERMS>(high)];
                S::add_i(
                    S::mul_i(self.sub[0], parts[0]),
                    S::mul_i(self.sub[1], parts[1]),
                )
            } else {
                let mut both = low;
                let mut term = 0;
                while term < TERMS {
                    both[term] = S::add_i(low[term], high[term]);
                    term += 1;
                }
                join::<S, TERMS>(both)
            };
            let dot = S::to_f(dot);
            if F::S::HAS_MIN {
                S::fma(dot, self.scale, S::mul(self.min, self.min_sum::<F>(meta)))
            } else {
                S::mul(dot, self.scale)
            }
        }
    }

    /// The dot products of columns `16 * half..` with each term. The zero offset and the sign bias
    /// are taken off at the start, from the last term.
    #[inline(always)]
    unsafe fn half<F: Format, const TERMS: usize>(
        &self,
        half: usize,
        q: [*const i8; TERMS],
        sums: [i32; 2],
    ) -> [S::I; TERMS] {
        let offset = if F::P::SIGNED {
            S::SIGNED_BIAS
        } else {
            F::P::OFFSET
        };
        // SAFETY: register arithmetic and 16 bytes at `16 * half` of each term.
        unsafe {
            let mut acc = [S::splat_i(0); TERMS];
            acc[TERMS - 1] = S::splat_i(-offset * sums[half]);
            let mut g = 4 * half;
            while g < 4 * half + 4 {
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

    /// `M` of the module's formula.
    #[inline(always)]
    unsafe fn min_sum<F: Format>(&self, meta: Meta) -> S::F {
        // SAFETY: register arithmetic.
        unsafe {
            if F::S::HALVES {
                let low = S::mul_i(self.min_sub[0], S::splat_i(meta.sums[0]));
                let high = S::mul_i(self.min_sub[1], S::splat_i(meta.sums[1]));
                S::to_f(S::add_i(low, high))
            } else {
                S::splat(meta.sum)
            }
        }
    }
}

/// One integer from its terms: `128 high + low`, or the only one.
#[inline(always)]
unsafe fn join<S: Isa, const TERMS: usize>(terms: [S::I; TERMS]) -> S::I {
    if TERMS == 1 {
        return terms[0];
    }
    // SAFETY: register arithmetic.
    unsafe { S::add_i(S::shl7_i(terms[0]), terms[TERMS - 1]) }
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

/// Float weights.
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
                if N == 1 {
                    let bytes = LANES * T::SIZE;
                    ask_ahead::<S>(args.weights.add(k * bytes), steps * bytes);
                }
                let mut j = 0;
                while j < steps {
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
