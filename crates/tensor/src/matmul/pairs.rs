//! BF16 weights with activations rounded to bf16: the kernel class `cpu-q8`.
//!
//! Over the pairs of columns of a leaf, `p = k / 2`, from 0, with `x` rounded by
//! [`round`](crate::rounded::round):
//!
//! ```text
//! a[p % 4] = fma(w[k], x[k], fma(w[k + 1], x[k + 1], a[p % 4]))       leaf = (a0 + a1) + (a2 + a3)
//! ```
//!
//! and `fma(w[k], x[k], a)` for a last column without a neighbour. That is what `vdpbf16ps` does,
//! two for the time of one. Intel SDM volume 2 says: the odd element first, each sum rounded once,
//! to nearest even. On Zen 4 the results were equal to the bit for 22 million random inputs. But
//! the instruction takes denormal numbers for zeros. So it is used where there can be none
//! ([`SMALLEST`](crate::rounded::SMALLEST)); elsewhere and on other machines one `fma` follows the
//! other.

use std::marker::PhantomData;
use std::ops::Range;

use crate::isa::{BF16_COLUMN, Isa, Pairs};
use crate::matmul::{GroupArgs, Leaf, Prefetch, tiles};

/// [`crate::matmul::group`] for BF16 weights and rounded activations.
///
/// # Safety
/// See [`crate::matmul::group`], with the features of `P`; the activations have bf16.
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
                let ahead = Prefetch {
                    at: args.weights.add(k * BF16_COLUMN),
                    bytes: 2 * SUMS * BF16_COLUMN,
                };
                let mut p = 0;
                while p < SUMS {
                    ahead.prefetch::<S>(p, SUMS);
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
