//! ChunkFactors of a panel's chunk, next to its integers, and their accumulation.

use crate::formats::{Format, Scales};
use crate::isa::{Isa, LANES};
use crate::matmul::{cut, wide_terms};
use crate::quantisation::joined;

/// Integer scales and mins of a chunk of 16 rows, for each half of 16 columns, and the step of its
/// unit: see [`crate::storage::units`].
#[repr(C, align(64))]
pub(crate) struct ChunkFactors {
    scales: [[i32; LANES]; 2],
    /// Only for types with a min.
    mins: [[i32; LANES]; 2],
    step: [f32; LANES],
}

impl ChunkFactors {
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
            let multipliers = F::S::multipliers::<S>(header);
            let [first, second] = F::S::scales::<S>(multipliers, scales);
            S::store_i((&raw mut (*out).scales[0]).cast(), first);
            S::store_i((&raw mut (*out).scales[1]).cast(), second);
            if F::S::HAS_MIN {
                let [first, second] = F::S::mins::<S>(multipliers, scales);
                S::store_i((&raw mut (*out).mins[0]).cast(), first);
                S::store_i((&raw mut (*out).mins[1]).cast(), second);
            }
            S::store((&raw mut (*out).step).cast(), F::S::step::<S>(header));
        }
    }

    /// The steps of the rows.
    ///
    /// # Safety
    /// Features of `S`; factors that were unpacked.
    #[inline(always)]
    pub(crate) unsafe fn step<S: Isa>(this: *const Self) -> S::F {
        // SAFETY: by the caller's promise.
        unsafe { S::load((&raw const (*this).step).cast()) }
    }

    /// Adds to `totals` the dot products of a half, or of a chunk whose halves have the same
    /// factors. `sums` are the sums of the bytes of its activations.
    ///
    /// # Safety
    /// See [`step`](Self::step), of a format that has a min if `MIN` and is wide if `WIDE`.
    #[inline(always)]
    pub(crate) unsafe fn add<S: Isa, const MIN: bool, const WIDE: bool>(
        this: *const Self,
        half: usize,
        dots: S::I,
        sums: [i32; 2],
        totals: &mut [S::I; 2],
    ) {
        let sums = if WIDE {
            wide_terms(joined::<2>(sums))
        } else {
            sums
        };
        // SAFETY: by the caller's promise.
        unsafe {
            let dots = if WIDE {
                cut::<S>(dots)
            } else {
                [S::sar7_i(dots), S::and_i(dots, S::splat_i(127))]
            };
            let scales = S::load_i((&raw const (*this).scales[half]).cast());
            let mut term = 0;
            while term < 2 {
                let mut dot = S::mul_i(dots[term], scales);
                if MIN {
                    let mins = S::load_i((&raw const (*this).mins[half]).cast());
                    dot = S::add_i(dot, S::mul_i(mins, S::splat_i(sums[term])));
                }
                totals[term] = S::add_i(totals[term], dot);
                term += 1;
            }
        }
    }
}
