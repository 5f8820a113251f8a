//! Rows of a grid fetched one by one, through memory.

use std::mem::MaybeUninit;

use super::{Isa, LANES};
use crate::formats::grids::index;
use crate::storage::grids::{Eights, Fours};

/// Indices of eights in a chunk of a group.
const EIGHTS: usize = 4 * LANES;
/// Indices of fours.
const FOURS: usize = 8 * LANES;

/// See [`Isa::eights`].
///
/// # Safety
/// Features of `S`; the plane is there.
#[inline(always)]
pub(super) unsafe fn eights<S: Isa, const N: usize>(
    grid: &'static Eights<N>,
    plane: *const u8,
) -> [S::W; 8] {
    let mut rows = MaybeUninit::<[[u8; 8]; EIGHTS]>::uninit();
    let to = rows.as_mut_ptr().cast::<[u8; 8]>();
    // SAFETY: indices are below `N`, and all rows are written before they are read.
    unsafe {
        let mut i = 0;
        while i < EIGHTS {
            let row = grid.rows.as_ptr().add(index::<N>(plane, EIGHTS, i));
            to.add(i).write(*row);
            i += 1;
        }
        let from = to.cast::<u8>();
        let mut quads = [S::load_w(from); 8];
        let mut b = 0;
        while b < 4 {
            let (first, second) = (from.add(128 * b), from.add(128 * b + 64));
            let [even, odd] = S::split(S::load_w(first), S::load_w(second));
            (quads[2 * b], quads[2 * b + 1]) = (even, odd);
            b += 1;
        }
        quads
    }
}

/// See [`Isa::fours`].
///
/// # Safety
/// Features of `S`; the plane is there.
#[inline(always)]
pub(super) unsafe fn fours<S: Isa, const N: usize>(
    grid: &'static Fours<N>,
    plane: *const u8,
) -> [S::W; 8] {
    let mut rows = MaybeUninit::<[[u8; 4]; FOURS]>::uninit();
    let to = rows.as_mut_ptr().cast::<[u8; 4]>();
    // SAFETY: indices are below `N`, and all rows are written before they are read.
    unsafe {
        let mut i = 0;
        while i < FOURS {
            let row = grid.rows.as_ptr().add(index::<N>(plane, FOURS, i));
            // Index 64 h + 16 l + 4 g + r is quad 4 h + g of row 4 l + r.
            let (quad, row_of) = (i / 64 * 4 + i / 4 % 4, i / 16 % 4 * 4 + i % 4);
            to.add(LANES * quad + row_of).write(*row);
            i += 1;
        }
        let from = to.cast::<u8>();
        let mut quads = [S::load_w(from); 8];
        let mut g = 1;
        while g < 8 {
            quads[g] = S::load_w(from.add(64 * g));
            g += 1;
        }
        quads
    }
}
