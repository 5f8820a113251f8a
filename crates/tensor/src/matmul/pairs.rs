//! BF16 weights with activations rounded to bf16: the kernel class `cpu-q8`.
//!
//! Over the pairs of columns of a leaf, `p = k / 2`, from 0, with `x` rounded by [`round`]:
//!
//! ```text
//! a[p % 4] = fma(w[k], x[k], fma(w[k + 1], x[k + 1], a[p % 4]))       leaf = (a0 + a1) + (a2 + a3)
//! ```
//!
//! A last column without a neighbour is `fma(w[k], x[k], a)`. The instruction `vdpbf16ps` does the
//! same, two for the time of one, except that it takes denormal numbers for zeros. By the Intel
//! SDM, volume 2, the odd element is first, each sum rounded once, to nearest even. On Zen 4 it is
//! equal to the bit for 22 million random numbers. So it is used where there can be no denormal
//! numbers ([`SMALLEST`]). Elsewhere and on other machines one `fma` follows the other.

use std::marker::PhantomData;
use std::ops::Range;

use crate::isa::{BF16_COLUMN, Isa, Pairs};
use crate::matmul::{Ahead, GroupArgs, Leaf, tiles};

/// 2^-56. Weights and activations that are 0 or at least this are whole multiples of 2^-63, having
/// 8 bits. Products, and sums of them however rounded, are whole multiples of 2^-126, the smallest
/// normal f32. So nothing on the way is denormal. Activations below it are taken as 0; a matrix
/// with weights below it is multiplied without `vdpbf16ps`.
pub(crate) const SMALLEST: f32 = f32::from_bits((127 - 56) << 23);

/// The bits of the bf16 that stands for an activation: the nearest, ties to even, or 0.
///
/// Without branches, so that the compiler does many at once.
#[inline(always)]
pub(crate) const fn round(x: f32) -> u16 {
    const QUIET: u32 = 1 << 22;
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let nearest = if x.is_nan() { bits | QUIET } else { nearest };
    let kept = if x.abs() < SMALLEST { 0 } else { nearest };
    (kept >> 16) as u16
}

/// Whether a stored weight is below [`SMALLEST`] and not 0.
pub(crate) const fn is_tiny(bits: u16) -> bool {
    let magnitude = bits & 0x7fff;
    magnitude != 0 && magnitude < (SMALLEST.to_bits() >> 16) as u16
}

/// [`crate::matmul::group`] for BF16 weights and rounded activations.
///
/// # Safety
/// As there, with the features of `P`; the activations have bf16.
#[inline(always)]
pub(crate) unsafe fn group<S: Isa, P: Pairs<S>>(args: GroupArgs<'_>) {
    // SAFETY: passed on.
    unsafe { tiles::<S>(args, Rounded::<P>(PhantomData)) }
}

/// The sum over a leaf, two columns at a time.
#[derive(Clone, Copy, Debug)]
struct Rounded<P>(PhantomData<P>);

/// Running sums of a leaf.
const SUMS: usize = 4;

impl<S: Isa, P: Pairs<S>> Leaf<S> for Rounded<P> {
    #[inline(always)]
    unsafe fn leaf<const N: usize>(
        self,
        args: &GroupArgs<'_>,
        t: usize,
        cols: Range<usize>,
    ) -> [S::F; N] {
        // SAFETY: columns lie within the group and the activations. Leaves start at multiples of 8,
        // so pairs count from the start of the leaf and of the row alike.
        unsafe {
            let mut acc = [[S::splat(0.0); SUMS]; N];
            let whole = cols.end - cols.len() % (2 * SUMS);
            for k in (cols.start..whole).step_by(2 * SUMS) {
                let ahead = Ahead {
                    at: args.weights.add(k * BF16_COLUMN),
                    bytes: 2 * SUMS * BF16_COLUMN,
                };
                let mut p = 0;
                while p < SUMS {
                    ahead.ask::<S>(p, SUMS);
                    pair::<S, P, N>(args, t, k + 2 * p, &mut acc, p);
                    p += 1;
                }
            }
            let mut p = 0;
            while p < SUMS {
                let k = whole + 2 * p;
                if k + 1 < cols.end {
                    pair::<S, P, N>(args, t, k, &mut acc, p);
                } else if k < cols.end {
                    last::<S, N>(args, t, k, &mut acc, p);
                }
                p += 1;
            }
            acc.map(|[a, b, c, d]| S::add(S::add(a, b), S::add(c, d)))
        }
    }
}

/// Adds columns `k` and `k + 1` to sum `p` of `N` rows from `t`.
#[inline(always)]
unsafe fn pair<S: Isa, P: Pairs<S>, const N: usize>(
    args: &GroupArgs<'_>,
    t: usize,
    k: usize,
    acc: &mut [[S::F; SUMS]; N],
    p: usize,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let w = P::load(args.weights.add(k * BF16_COLUMN));
        let mut i = 0;
        while i < N {
            acc[i][p] = P::dot(acc[i][p], w, args.x.rounded(t + i).add(k));
            i += 1;
        }
    }
}

/// Adds column `k`, which has no neighbour.
#[inline(always)]
unsafe fn last<S: Isa, const N: usize>(
    args: &GroupArgs<'_>,
    t: usize,
    k: usize,
    acc: &mut [[S::F; SUMS]; N],
    p: usize,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let w = S::load_bf16(args.weights.add(k * BF16_COLUMN).cast());
        let mut i = 0;
        while i < N {
            let x = f32::from_bits(u32::from(*args.x.rounded(t + i).add(k)) << 16);
            acc[i][p] = S::fma(w, S::splat(x), acc[i][p]);
            i += 1;
        }
    }
}
