//! Weights of FP8: a byte of E4M3 times the scale of its run, as f32.
//!
//! The product is that of f32 weights, which are `scale * value`, rounded once. Bytes are read as
//! f16, 256 times too small, and scales are stored 256 times too large: both are exact.

use std::ops::Range;

use crate::isa::{Isa, LANES};
use crate::matmul::{GroupArgs, Leaf, Prefetch, tiles};
use crate::packing::fp8::SCALES;

/// [`crate::matmul::group`] for weights of FP8.
///
/// # Safety
/// See [`crate::matmul::group`].
#[inline(always)]
pub(crate) unsafe fn group<S: Isa>(args: GroupArgs<'_>) {
    // SAFETY: passed on.
    unsafe { tiles::<S>(args, Fp8) }
}

#[derive(Clone, Copy, Debug)]
struct Fp8;

/// The scales of the run of column `k`, and the run's end.
#[inline(always)]
unsafe fn run_of<S: Isa>(weights: *const u8, scale_cols: usize, k: usize) -> (S::F, usize) {
    let run = k / scale_cols;
    // SAFETY: scales lie before the first column, the last run's first.
    let scales = unsafe { S::load(weights.sub((run + 1) * SCALES).cast()) };
    (scales, (run + 1) * scale_cols)
}

impl<S: Isa> Leaf<S> for Fp8 {
    #[inline(always)]
    unsafe fn leaf<const N: usize>(
        self,
        args: &GroupArgs<'_>,
        t: usize,
        cols: Range<usize>,
    ) -> [S::F; N] {
        // SAFETY: columns lie within the group and the activations. Leaves and runs are whole
        // chunks, so `k % 4` counts from the start of each and of the row alike.
        unsafe {
            let mut acc = [[S::splat(0.0); 4]; N];
            let mut k = cols.start;
            while k < cols.end {
                let (scales, end) = run_of::<S>(args.weights, args.scale_cols, k);
                let end = end.min(cols.end);
                while k < end {
                    let at = args.weights.add(k * LANES);
                    let bytes = 4 * LANES;
                    let ahead = Prefetch { at, bytes };
                    ahead.prefetch::<S>(0, 1);
                    let values = S::load_e4m3s(at);
                    let mut j = 0;
                    while j < 4 {
                        let w = S::mul(values[j], scales);
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
