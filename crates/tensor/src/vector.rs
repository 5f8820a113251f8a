//! Row-wise operations: norms and gated activations, generic over the instruction set.
//!
//! Element-wise operations that need no exponential (residual sums, rotations) are plain Rust. The
//! compiler may vectorise them but never reorders or fuses float operations, so they give the same
//! bits everywhere. Rotations are compiled for each set, as most of theirs is shuffling.

use crate::isa::{self, Isa, LANES};

/// Runs the block for `$at`, `$len` over runs of 16 and what is left. A macro, because a closure
/// would be compiled without the target features of the function around it.
macro_rules! for_runs {
    ($n:expr, |$at:ident, $len:ident| $body:block) => {
        let mut $at = 0;
        while $at < $n {
            let $len = ($n - $at).min(LANES);
            $body
            $at += LANES;
        }
    };
}

/// Loads `len` values, zeros behind them.
#[inline(always)]
unsafe fn load_some<S: Isa>(p: *const f32, len: usize) -> S::F {
    // SAFETY: `len` values at `p`.
    unsafe {
        if len == LANES {
            return S::load(p);
        }
        let mut whole = [0.0f32; LANES];
        std::ptr::copy_nonoverlapping(p, whole.as_mut_ptr(), len);
        S::load(whole.as_ptr())
    }
}

/// Stores the first `len` lanes.
#[inline(always)]
unsafe fn store_some<S: Isa>(p: *mut f32, len: usize, x: S::F) {
    // SAFETY: room for `len` values at `p`.
    unsafe {
        if len == LANES {
            return S::store(p, x);
        }
        let mut whole = [0.0f32; LANES];
        S::store(whole.as_mut_ptr(), x);
        std::ptr::copy_nonoverlapping(whole.as_ptr(), p, len);
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, all `(n,)`; `out` may be `x`.
///
/// The sum of squares runs in 16 lanes (element `i` in lane `i % 16`). Then lane `i` is added to
/// lane `i + 8`, 4, 2, 1.
///
/// # Safety
/// Features of `S`; `x` and `out` are good for `weight.len()` floats.
#[inline(always)]
pub(crate) unsafe fn rms_norm<S: Isa>(x: *const f32, weight: &[f32], eps: f32, out: *mut f32) {
    // SAFETY: runs stay within `n`; each run is read before it is written.
    unsafe {
        let mut squares = S::splat(0.0);
        for_runs!(weight.len(), |at, len| {
            let v = load_some::<S>(x.add(at), len);
            squares = S::fma(v, v, squares);
        });
        let mean = isa::reduce_add::<S>(squares) / weight.len() as f32;
        let scale = S::splat(1.0 / (mean + eps).sqrt());
        for_runs!(weight.len(), |at, len| {
            let v = load_some::<S>(x.add(at), len);
            let w = load_some::<S>(weight.as_ptr().add(at), len);
            store_some::<S>(out.add(at), len, S::mul(S::mul(v, scale), w));
        });
    }
}

/// The sum of the products of `x` and `y`, as [`rms_norm`] adds squares.
///
/// # Safety
/// Features of `S`; equal lengths.
#[inline(always)]
pub(crate) unsafe fn dot<S: Isa>(x: &[f32], y: &[f32]) -> f32 {
    // SAFETY: runs stay within the slices.
    unsafe {
        let mut sums = S::splat(0.0);
        for_runs!(x.len(), |at, len| {
            let v = load_some::<S>(x.as_ptr().add(at), len);
            sums = S::fma(v, load_some::<S>(y.as_ptr().add(at), len), sums);
        });
        isa::reduce_add::<S>(sums)
    }
}

/// `out = silu(gate) * up` with `silu(g) = g / (1 + exp(-g))`.
///
/// # Safety
/// Features of `S`; equal lengths.
#[inline(always)]
pub(crate) unsafe fn silu_mul<S: Isa>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: runs stay within the slices.
    unsafe {
        for_runs!(gate.len(), |at, len| {
            let g = load_some::<S>(gate.as_ptr().add(at), len);
            let e = isa::exp::<S>(S::sub(S::splat(0.0), g));
            let u = load_some::<S>(up.as_ptr().add(at), len);
            let silu = S::div(g, S::add(S::splat(1.0), e));
            store_some::<S>(out.as_mut_ptr().add(at), len, S::mul(silu, u));
        });
    }
}

/// `out = gelu(gate) * up` with the tanh form of GELU.
///
/// `gelu(g) = g / (1 + exp(-2 z))` with `z = sqrt(2/pi) (g + 0.044715 g^3)`. This equals
/// `0.5 g (1 + tanh z)`. Source: Hendrycks and Gimpel 2016, "gelu_pytorch_tanh".
///
/// # Safety
/// Features of `S`; equal lengths.
#[inline(always)]
pub(crate) unsafe fn gelu_mul<S: Isa>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    const MINUS_TWO_ROOT: f32 = -1.595_769_2; // -2 sqrt(2 / pi)
    const CUBE: f32 = 0.044_715;
    // SAFETY: runs stay within the slices.
    unsafe {
        for_runs!(gate.len(), |at, len| {
            let g = load_some::<S>(gate.as_ptr().add(at), len);
            let cube = S::mul(S::mul(g, g), S::mul(g, S::splat(CUBE)));
            let e = isa::exp::<S>(S::mul(S::add(g, cube), S::splat(MINUS_TWO_ROOT)));
            let u = load_some::<S>(up.as_ptr().add(at), len);
            let gelu = S::div(g, S::add(S::splat(1.0), e));
            store_some::<S>(out.as_mut_ptr().add(at), len, S::mul(gelu, u));
        });
    }
}

/// `out = exp((x - shift) * scale)`, all `(n,)`: the weights of a softmax with temperature.
///
/// # Safety
/// Features of `S`; equal lengths.
#[inline(always)]
pub(crate) unsafe fn exp_scaled<S: Isa>(x: &[f32], shift: f32, scale: f32, out: &mut [f32]) {
    // SAFETY: runs stay within the slices.
    unsafe {
        let (shift, scale) = (S::splat(shift), S::splat(scale));
        for_runs!(x.len(), |at, len| {
            let v = S::sub(load_some::<S>(x.as_ptr().add(at), len), shift);
            store_some::<S>(
                out.as_mut_ptr().add(at),
                len,
                isa::exp::<S>(S::mul(v, scale)),
            );
        });
    }
}

/// Adds `delta` to `x`, element-wise.
pub fn add_assign(x: &mut [f32], delta: &[f32]) {
    for (x, d) in x.iter_mut().zip(delta) {
        *x += d;
    }
}

/// Elements of a head that a rotary embedding rotates together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Elements `2 i` and `2 i + 1` (GGUF files of the llama family).
    Adjacent,
    /// Elements `i` and `i + d / 2` (Hugging Face layout, qwen, gemma).
    Halves,
}

/// Rotates every head of `x`, `(heads, head_dim)`, in place, as [`Kernels::rope`] says.
///
/// # Safety
/// The features that it is compiled with.
///
/// [`Kernels::rope`]: crate::Kernels::rope
#[inline(always)]
pub(crate) unsafe fn rope(x: &mut [f32], head_dim: usize, angles: &[(f32, f32)], pairs: RopePairs) {
    for head in x.chunks_exact_mut(head_dim) {
        let turned = &mut head[..2 * angles.len()];
        match pairs {
            RopePairs::Adjacent => {
                for ([a, b], angle) in turned.as_chunks_mut().0.iter_mut().zip(angles) {
                    [*a, *b] = turned_by([*a, *b], *angle);
                }
            }
            RopePairs::Halves => {
                let (first, second) = turned.split_at_mut(angles.len());
                for ((a, b), angle) in first.iter_mut().zip(second).zip(angles) {
                    [*a, *b] = turned_by([*a, *b], *angle);
                }
            }
        }
    }
}

/// A pair of elements turned by an angle, `(cos, sin)`.
#[inline(always)]
fn turned_by([a, b]: [f32; 2], (cos, sin): (f32, f32)) -> [f32; 2] {
    [a * cos - b * sin, a * sin + b * cos]
}
