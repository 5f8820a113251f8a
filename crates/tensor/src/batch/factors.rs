//! What a chunk of a panel has beside its integers, and how the two become a float.

use crate::activations::Meta;
use crate::formats::{Format, Scales};
use crate::isa::{Isa, LANES};

/// Scales of a chunk of 16 rows.
#[repr(C, align(64))]
pub(crate) struct Factors {
    scale: [f32; LANES],
    /// Where the type has a min.
    min: [f32; LANES],
    /// Of the min, where its halves have factors of their own.
    min_sub: [[i32; LANES]; 2],
}

impl Factors {
    /// Writes those of a chunk of format `F`.
    ///
    /// # Safety
    /// Features of `S`; `header` and `scales` are the chunk's; `out` can be written.
    #[inline(always)]
    pub(crate) unsafe fn unpack<S: Isa, F: Format>(
        out: *mut Self,
        header: *const u8,
        scales: *const u8,
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            let header = F::S::header::<S>(header);
            let scale = F::S::scale::<S>(header, scales);
            S::store((&raw mut (*out).scale).cast(), scale);
            if F::S::HAS_MIN {
                S::store((&raw mut (*out).min).cast(), F::S::min::<S>(header, scales));
            }
            if F::S::HAS_MIN && F::S::HALVES {
                store_halves::<S>(&raw mut (*out).min_sub, F::S::min_sub::<S>(scales));
            }
        }
    }

    #[inline(always)]
    unsafe fn scale<S: Isa>(this: *const Self) -> S::F {
        // SAFETY: the caller passes factors that were unpacked.
        unsafe { S::load((&raw const (*this).scale).cast()) }
    }

    #[inline(always)]
    unsafe fn min<S: Isa>(this: *const Self) -> S::F {
        // SAFETY: as `scale`, of a type with a min.
        unsafe { S::load((&raw const (*this).min).cast()) }
    }
}

/// Integer factors for each half of a chunk.
pub(crate) type Halves = [[i32; LANES]; 2];

/// Writes them.
///
/// # Safety
/// Features of `S`; `to` can be written.
#[inline(always)]
pub(crate) unsafe fn store_halves<S: Isa>(to: *mut Halves, factors: [S::I; 2]) {
    let to = to.cast::<i32>();
    // SAFETY: two times sixteen factors.
    unsafe {
        S::store_i(to, factors[0]);
        S::store_i(to.add(LANES), factors[1]);
    }
}

/// The sum of two halves, each times its factor.
///
/// # Safety
/// Features of `S`; `factors` can be read.
#[inline(always)]
pub(crate) unsafe fn weighted<S: Isa>(factors: *const Halves, halves: [S::I; 2]) -> S::I {
    let factors = factors.cast::<i32>();
    // SAFETY: two times sixteen factors.
    unsafe {
        S::add_i(
            S::mul_i(S::load_i(factors), halves[0]),
            S::mul_i(S::load_i(factors.add(LANES)), halves[1]),
        )
    }
}

/// How a chunk's min is added.
pub(crate) trait Min {
    /// `inner` of [`crate::matmul`] for one row of activations.
    ///
    /// # Safety
    /// Features of `S`; factors that were unpacked from a format with such a min.
    unsafe fn inner<S: Isa>(dot: S::F, factors: *const Factors, meta: Meta) -> S::F;
}

/// None.
#[derive(Debug)]
pub(crate) struct NoMin;
/// One for the chunk.
#[derive(Debug)]
pub(crate) struct OneMin;
/// With a factor for each half.
#[derive(Debug)]
pub(crate) struct HalfMins;

impl Min for NoMin {
    #[inline(always)]
    unsafe fn inner<S: Isa>(dot: S::F, factors: *const Factors, _meta: Meta) -> S::F {
        // SAFETY: passed on.
        unsafe { S::mul(dot, Factors::scale::<S>(factors)) }
    }
}

impl Min for OneMin {
    #[inline(always)]
    unsafe fn inner<S: Isa>(dot: S::F, factors: *const Factors, meta: Meta) -> S::F {
        // SAFETY: passed on.
        unsafe {
            let min = S::mul(Factors::min::<S>(factors), S::splat(meta.sum));
            S::fma(dot, Factors::scale::<S>(factors), min)
        }
    }
}

impl Min for HalfMins {
    #[inline(always)]
    unsafe fn inner<S: Isa>(dot: S::F, factors: *const Factors, meta: Meta) -> S::F {
        // SAFETY: passed on.
        unsafe {
            let sums = meta.sums.map(|sum| S::splat_i(sum));
            let sum = S::to_f(weighted::<S>(&raw const (*factors).min_sub, sums));
            let min = S::mul(Factors::min::<S>(factors), sum);
            S::fma(dot, Factors::scale::<S>(factors), min)
        }
    }
}
