//! Gated delta nets: what a row reads from a state and from the rows of its page, to the bit.
//!
//! A value head has a state S, `(head_dim, value_dim)`, that changes at multiples of [`PAGE`] only.
//! Row t of a page has key k, query q, value v, a step b and a logarithm of its decay g, all f32.
//! `G[t]` is the sum of the page's g up to t, in f64, in order. With S as it was before the page:
//!
//! ```text
//! e    = exp(f32(G[t]))             c[i] = exp(f32(G[t] - G[i]))
//! w[i] = sum over d of k[i][d] k[t][d]          u[i] = sum over d of k[i][d] q[t][d]
//! p    = e * (sum over d of S[d] k[t][d]), then + c[i] w[i] delta[i] for i < t in order
//! delta[t] = b (v - p)
//! o    = e * (sum over d of S[d] q[t][d]), then + c[i] u[i] delta[i] for i <= t in order
//! ```
//!
//! In Kimi delta attention ([`StateRule::Channels`](crate::StateRule)) `G[t]` has a sum for each
//! element d of a key. Then `e[d]` and `c[i][d]` belong to the terms of the sums over d. These
//! terms are `(e[d] k[t][d]) S[d]` and `(c[i][d] k[i][d]) k[t][d]`, and the same with q.
//!
//! Mamba 2 ([`StateRule::Sum`](crate::StateRule)) is this with `p = 0` and q and k as they are.
//! Last, a factor of the value is added to o (Dao and Gu 2024, section 6).
//!
//! At the end of a page `S[d]` becomes `exp(f32(G[63])) S[d]`, then `+ c[i] k[i][d] delta[i]` for
//! each i in order, with c of row 63. Every sum is one chain of fused multiply-adds from 0, or from
//! the value before it. So a row's bits depend on the rows before it alone: neither on the rest of
//! the batch, nor on where a prompt was cut. [`naive`] is this as plain loops.
//!
//! All of these sums are of one form, [`accumulate`]: lanes are the elements of a value, or the
//! rows of a page. Rows of a prompt go through it together, one row of a decode step alone.
//! Source of the net: Yang, Kautz and Hatamizadeh 2024; its chunked form: Yang et al. 2024.
//!
//! [`PAGE`]: crate::PAGE

use crate::isa::{Isa, LANES};

pub mod naive;
mod table;

pub(crate) use table::table;

/// `out = fma(taps, x, out)`, all `(n,)`: one input of a convolution of each channel.
///
/// # Safety
/// Features of `S`; equal lengths that are multiples of 16.
#[inline(always)]
pub(crate) unsafe fn taps<S: Isa>(taps: &[f32], x: &[f32], out: &mut [f32]) {
    debug_assert!(taps.len() == x.len() && x.len() == out.len());
    let mut at = 0;
    // SAFETY: runs of 16 within the slices.
    unsafe {
        while at < out.len() {
            let to = out.as_mut_ptr().add(at);
            let tap = S::load(taps.as_ptr().add(at));
            let x = S::load(x.as_ptr().add(at));
            S::store(to, S::fma(tap, x, S::load(to)));
            at += LANES;
        }
    }
}

/// `acc[n][j] = fma(coefficients[n][i], x[i][j], acc[n][j])` for i in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chains {
    /// `(rows, count)`, rows `coefficient_stride` apart.
    pub(crate) coefficients: *const f32,
    pub(crate) coefficient_stride: usize,
    /// `(count, width)`, rows `x_stride` apart.
    pub(crate) x: *const f32,
    pub(crate) x_stride: usize,
    pub(crate) count: usize,
    /// `(rows, width)`, rows `acc_stride` apart.
    pub(crate) acc: *mut f32,
    pub(crate) acc_stride: usize,
    pub(crate) rows: usize,
    /// A multiple of 16.
    pub(crate) width: usize,
}

/// Computes `chains`, as many rows and registers at a time as there are registers for.
///
/// # Safety
/// Features of `S`; the memory that `chains` describes, which `acc` alone may write.
#[inline(always)]
pub(crate) unsafe fn accumulate<S: Isa>(chains: Chains) {
    // SAFETY: passed on; `at` rows are left of.
    unsafe {
        let mut at = 0;
        while at < chains.rows {
            let left = chains.rows - at;
            if left >= 4 && S::REGISTERS >= 24 {
                across::<S, 4, 4>(chains, at);
                at += 4;
            } else if left >= 2 {
                if S::REGISTERS >= 24 {
                    across::<S, 2, 8>(chains, at);
                } else {
                    across::<S, 2, 2>(chains, at);
                }
                at += 2;
            } else {
                if S::REGISTERS >= 24 {
                    across::<S, 1, 8>(chains, at);
                } else {
                    across::<S, 1, 4>(chains, at);
                }
                at += 1;
            }
        }
    }
}

/// All of the width for `N` rows from `first` on, `R` registers of it at a time.
#[inline(always)]
unsafe fn across<S: Isa, const N: usize, const R: usize>(chains: Chains, first: usize) {
    // SAFETY: runs of 16 within the width.
    unsafe {
        let mut j = 0;
        while j + R * LANES <= chains.width {
            run::<S, N, R>(chains, first, j);
            j += R * LANES;
        }
        while j < chains.width {
            run::<S, N, 1>(chains, first, j);
            j += LANES;
        }
    }
}

#[inline(always)]
unsafe fn run<S: Isa, const N: usize, const R: usize>(chains: Chains, first: usize, j: usize) {
    // SAFETY: `N` rows from `first` on and `R` registers from `j` on lie within.
    unsafe {
        let mut sums = [[S::splat(0.0); R]; N];
        let acc = chains.acc.add(first * chains.acc_stride + j);
        let mut n = 0;
        while n < N {
            let mut r = 0;
            while r < R {
                sums[n][r] = S::load(acc.add(n * chains.acc_stride + r * LANES));
                r += 1;
            }
            n += 1;
        }
        let stride = chains.coefficient_stride;
        let coefficients = chains.coefficients.add(first * stride);
        for i in 0..chains.count {
            let row = chains.x.add(i * chains.x_stride + j);
            let mut x = [S::splat(0.0); R];
            let mut r = 0;
            while r < R {
                x[r] = S::load(row.add(r * LANES));
                r += 1;
            }
            let mut n = 0;
            while n < N {
                let c = S::splat(*coefficients.add(n * stride + i));
                let mut r = 0;
                while r < R {
                    sums[n][r] = S::fma(c, x[r], sums[n][r]);
                    r += 1;
                }
                n += 1;
            }
        }
        let mut n = 0;
        while n < N {
            let mut r = 0;
            while r < R {
                S::store(acc.add(n * chains.acc_stride + r * LANES), sums[n][r]);
                r += 1;
            }
            n += 1;
        }
    }
}
