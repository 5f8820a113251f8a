//! The packed forms of MLX's types: the planes of the others, scales of their own.

use super::{Codebook, HALVES, Scales};
use crate::isa::Isa;
use crate::stored::E2M1_DOUBLED;

/// The table of e2m1 codes, as twice their values.
#[derive(Debug)]
pub(crate) struct Floats4;

/// Scale and bias, as bfloat16 or as halves. `OFFSET` is what was taken off the integers, see
/// [`crate::stored`].
#[derive(Debug)]
pub(crate) struct Affine<const OFFSET: i32, const BRAIN: bool>;

/// A scale in bfloat16.
#[derive(Debug)]
pub(crate) struct Brain;

impl Codebook for Floats4 {
    const VALUES: [i8; 16] = E2M1_DOUBLED;
}

/// Sixteen scales of two bytes.
#[inline(always)]
unsafe fn load<S: Isa, const BRAIN: bool>(p: *const u8) -> S::F {
    // SAFETY: 32 bytes at `p`.
    unsafe {
        if BRAIN {
            S::load_bf16(p.cast())
        } else {
            S::load_f16(p.cast())
        }
    }
}

impl<const OFFSET: i32, const BRAIN: bool> Scales for Affine<OFFSET, BRAIN> {
    const BYTES: usize = 2 * HALVES;
    const HALVES: bool = false;
    const HAS_MIN: bool = true;
    no_header!();
    #[inline(always)]
    unsafe fn scale<S: Isa>(_header: (), scales: *const u8) -> S::F {
        // SAFETY: 16 scales at `scales`.
        unsafe { load::<S, BRAIN>(scales) }
    }
    #[inline(always)]
    unsafe fn min<S: Isa>(_header: (), scales: *const u8) -> S::F {
        // SAFETY: 16 biases behind them.
        unsafe {
            let bias = load::<S, BRAIN>(scales.add(HALVES));
            if OFFSET == 0 {
                return bias;
            }
            S::fma(S::splat(OFFSET as f32), load::<S, BRAIN>(scales), bias)
        }
    }
    unused_scale! {
        sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
        min_sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
    }
}

impl Scales for Brain {
    const BYTES: usize = HALVES;
    const HALVES: bool = false;
    const HAS_MIN: bool = false;
    no_header!();
    #[inline(always)]
    unsafe fn scale<S: Isa>(_header: (), scales: *const u8) -> S::F {
        // SAFETY: 16 scales at `scales`.
        unsafe { S::load_bf16(scales.cast()) }
    }
    unused_scale! {
        min(_a: Self::Header<S>, _b: *const u8) -> S::F, S::splat(0.0);
        sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
        min_sub(_a: *const u8) -> [S::I; 2], [S::splat_i(0); 2];
    }
}
