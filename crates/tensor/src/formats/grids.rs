//! Packed form of weights that are rows of a grid: indices and signs.
//!
//! ```text
//! indices   64 B of eights, 128 B of fours: the lowest 8 bits of each, in the order below
//! high      8 B (16 B) for each further bit of an index, bit i for index i
//! signs     64 B  a bit plane: quad g is the u64 at byte 8 g, bit i for byte i
//! ```
//!
//! Index `16 b + i` of eights is columns `8 b..` of row [`ROWS`]`[i]`. Two loads of eight rows and
//! a shuffle within 16 bytes give two quads ([`Isa::split`]). Index `64 h + 16 l + 4 g + r` of
//! fours is quad `4 h + g` of row `4 l + r`. Interleaved columns give quads.

use std::marker::PhantomData;

use paceline_base::BlockType;

use super::{BIT_PLANE, Planes, Scales, WORDS};
use crate::isa::{Isa, LANES};
use crate::storage::grids::{self, Eights, Fours, GRID_OFFSET, GridChunk};

/// Rows of a group in the order of indices of eights.
pub(crate) const ROWS: [usize; LANES] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];

/// Bytes of the nibbles of sixteen rows.
const NIBBLES: usize = LANES / 2;

/// A grid of `N` rows of eight values.
pub(crate) trait GridEights<const N: usize> {
    const GRID: &'static Eights<N>;
}

/// A grid of `N` rows of four values.
pub(crate) trait GridFours<const N: usize> {
    const GRID: &'static Fours<N>;
}

/// Types that stand for grids.
macro_rules! grids {
    ($($name:ident = $of:ident<$n:literal>, $form:ident $grid:ident;)*) => {
        $(#[derive(Debug)]
        pub(crate) struct $name;
        impl $of<$n> for $name {
            const GRID: &'static $form<$n> = &grids::$grid;
        })*
    };
}

grids! {
    Iq2Xxs = GridEights<256>, Eights IQ2_XXS;
    Iq2Xs = GridEights<512>, Eights IQ2_XS;
    Iq2S = GridEights<1024>, Eights IQ2_S;
    Iq3Xxs = GridFours<256>, Fours IQ3_XXS;
    Iq3S = GridFours<512>, Fours IQ3_S;
}

/// Rows of eight values of grid `G`.
#[derive(Debug)]
pub(crate) struct GridOfEights<G, const N: usize>(PhantomData<G>);
/// Rows of four values of grid `G`.
#[derive(Debug)]
pub(crate) struct GridOfFours<G, const N: usize>(PhantomData<G>);

/// Bytes of `count` indices below `n`.
pub(crate) const fn index_bytes(count: usize, n: usize) -> usize {
    count + (n.ilog2() as usize - 8) * count / 8
}

/// Index `i` of `count` below `N` at `plane`.
///
/// # Safety
/// The indices are there.
#[inline(always)]
pub(crate) unsafe fn index<const N: usize>(plane: *const u8, count: usize, i: usize) -> usize {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut index = usize::from(*plane.add(i));
        let mut bit = 8;
        while 1 << bit < N {
            let byte = *plane.add(count + (bit - 8) * count / 8 + i / 8);
            index |= usize::from(byte >> (i % 8) & 1) << bit;
            bit += 1;
        }
        index
    }
}

/// The quads, with the signs of the bit plane at `signs`.
#[inline(always)]
unsafe fn with_signs<S: Isa>(mut quads: [S::W; 8], signs: *const u8) -> [S::W; 8] {
    let mut g = 0;
    while g < 8 {
        // SAFETY: a bit plane of 64 bytes starts at `signs`. Twice the offset less a byte is the
        // offset less its value.
        quads[g] = unsafe { S::mirrored(quads[g], signs.add(8 * g)) };
        g += 1;
    }
    quads
}

impl<G: GridEights<N>, const N: usize> Planes for GridOfEights<G, N> {
    const BYTES: usize = index_bytes(64, N) + BIT_PLANE;
    const OFFSET: i32 = GRID_OFFSET as i32;
    const SIGNED: bool = false;
    const LARGEST: i32 = 43;
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: the signs follow the indices.
        unsafe { with_signs::<S>(S::eights(G::GRID, chunk), chunk.add(index_bytes(64, N))) }
    }
}

impl<G: GridFours<N>, const N: usize> Planes for GridOfFours<G, N> {
    const BYTES: usize = index_bytes(128, N) + BIT_PLANE;
    const OFFSET: i32 = GRID_OFFSET as i32;
    const SIGNED: bool = false;
    const LARGEST: i32 = 62;
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: the signs follow the indices.
        unsafe { with_signs::<S>(S::fours(G::GRID, chunk), chunk.add(index_bytes(128, N))) }
    }
}

/// Four bits `s` per row, and half if `HALVES`, that stand for `2 s + 1`. Steps are a `PART`th of
/// the header's halves.
#[derive(Debug)]
pub(crate) struct Odd<const HALVES: bool, const PART: u32>;

impl<const HALVES: bool, const PART: u32> Scales for Odd<HALVES, PART> {
    const NEVER_NEGATIVE: bool = true;
    const BYTES: usize = if HALVES { 2 * NIBBLES } else { NIBBLES };
    const HEADER: usize = WORDS;
    const HALVES: bool = HALVES;
    no_multipliers!();
    no_mins!();
    #[inline(always)]
    unsafe fn step<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 halves.
        unsafe { S::mul(S::load_f16(header.cast()), S::splat(1.0 / PART as f32)) }
    }
    #[inline(always)]
    unsafe fn scales<S: Isa>((): (), scales: *const u8) -> [S::I; 2] {
        // SAFETY: 16 nibbles, or twice as many.
        unsafe {
            let first = odd::<S>(scales);
            [
                first,
                if HALVES {
                    odd::<S>(scales.add(NIBBLES))
                } else {
                    first
                },
            ]
        }
    }
}

/// `2 s + 1` of sixteen nibbles.
#[inline(always)]
unsafe fn odd<S: Isa>(nibbles: *const u8) -> S::I {
    // SAFETY: passed on.
    unsafe {
        let s = S::load_nibbles(nibbles);
        S::add_i(S::add_i(s, s), S::splat_i(1))
    }
}

/// Number of indices of a chunk of a group, and of rows of the grid.
///
/// # Panics
/// On a bug of the caller: a type without a grid.
pub(crate) const fn indices(block_type: BlockType) -> (usize, usize) {
    match block_type {
        BlockType::IQ2_XXS => (64, 256),
        BlockType::IQ2_XS => (64, 512),
        BlockType::IQ2_S => (64, 1024),
        BlockType::IQ3_XXS => (128, 256),
        BlockType::IQ3_S => (128, 512),
        _ => panic!("no grid"),
    }
}

/// Writes the indices and signs of a chunk into lane `lane`; `out` is zero there.
pub(crate) fn pack_grid(
    chunk: &GridChunk,
    (count, n): (usize, usize),
    lane: usize,
    out: &mut [u8],
) {
    let rank = ROWS
        .iter()
        .position(|&row| row == lane)
        .expect("a lane of 16");
    for (i, &index) in chunk.indices[..count / LANES].iter().enumerate() {
        let at = match count {
            64 => LANES * i + rank,
            _ => i / 4 * 64 + lane / 4 * 16 + i % 4 * 4 + lane % 4,
        };
        out[at] = index as u8;
        for bit in 8..n.ilog2() as usize {
            let set = (index >> bit & 1) as u8;
            out[count + (bit - 8) * count / 8 + at / 8] |= set << (at % 8);
        }
    }
    let signs: [u8; 32] = std::array::from_fn(|k| (chunk.signs >> k & 1) as u8);
    crate::packing::put_bits(&mut out[index_bytes(count, n)..], lane, &signs);
}

/// Writes the scale of each half that has one into nibble `lane`; `out` is zero there.
pub(crate) fn pack_odd(chunk: &GridChunk, lane: usize, out: &mut [u8]) {
    for (half, out) in out.chunks_exact_mut(NIBBLES).enumerate() {
        out[lane / 2] |= chunk.scales[half] << (4 * (lane % 2));
    }
}
