//! Tile registers and how a chunk goes through them.
//!
//! [`Registers`] is what AMX offers, one method for each instruction: `crate::batch::amx` is the
//! processor's, and a test's emulation proves everything but the encodings. Weights of a chunk are
//! a tile as they lie in a quad (row `k / 4`, bytes `4 n + k % 4`), activations as they lie in
//! memory (row `t`, bytes `k`), and the results are i32, `(t, n)`. Of bf16 a row has half as many
//! (weights in row `k / 2`, at `2 n + k % 2`), and the results are f32.

use crate::batch::bytes::{LINE, Results, Rows, TILE_ROWS, Tiles};
use crate::stored::Chunk;

/// The eight tile registers of AMX and what can be done with them.
///
/// # Safety
/// Every method requires that the CPU and the system allow it, and that pointers are good for the
/// rows and bytes that [`configured`](Self::configured) gave the tile.
pub(crate) trait Registers {
    /// Tiles 0 to 3 are results of `rows` rows, 4 and 5 activations of `rows` rows of `depth`
    /// bytes, 6 and 7 weights of `depth / 4` lines of 64 bytes.
    unsafe fn configured(rows: usize, depth: usize) -> Self;
    /// Registers as [`configured`](Self::configured) for 16 rows of 64 bytes left them, by whoever
    /// [`forgot`](std::mem::forget) them.
    unsafe fn left() -> Self;
    /// Tile `T` from rows `stride` bytes apart.
    unsafe fn load<const T: u8>(&mut self, from: *const u8, stride: usize);
    /// Tile `T` from rows of 64 bytes, one behind the other, `N` times `UNIT` bytes from here. (With
    /// places that instructions have in themselves a prompt of Q4_0 takes 0.93 of the time.)
    unsafe fn load_nth<const T: u8, const N: usize, const UNIT: usize>(&mut self, from: *const u8);
    /// Tile `T` to its place in results, `(4, 16, 16)`.
    unsafe fn store<const T: u8>(&self, results: *mut i32);
    /// As [`store`](Self::store) for the tile behind `T`.
    unsafe fn store_next<const T: u8>(&self, results: *mut i32);
    /// Clears tile `T`.
    unsafe fn zero<const T: u8>(&mut self);
    /// Adds to tile `C` the products of signed bytes of `A`, activations, and `B`, weights.
    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self);
    /// Adds to the f32 of tile `C` the products of bf16 of `A`, activations, and `B`, weights.
    unsafe fn dot_floats<const C: u8, const A: u8, const B: u8>(&mut self);
    /// Gives the registers back.
    unsafe fn release(self);
}

/// Rows and bytes of a row of `tile` in a configuration for `rows` and `depth`.
pub(crate) const fn shape(tile: usize, rows: usize, depth: usize) -> (usize, usize) {
    match tile {
        0..=3 => (rows, LINE),
        4 | 5 => (rows, depth),
        _ => (depth / 4, LINE),
    }
}

impl<R: Registers> Tiles for R {
    const ROWS: usize = TILE_ROWS;
    const FROM: usize = TILE_ROWS;
    /// A tile that is stored right behind its product holds up the next one: 57 cycles each instead
    /// of 19, measured on an Intel Xeon with AMX. Before its next product is soon enough.
    const LAG: usize = 1;

    #[inline(always)]
    unsafe fn configured(rows: usize, depth: usize) -> Self {
        // SAFETY: passed on.
        unsafe { R::configured(rows, depth) }
    }

    #[inline(always)]
    unsafe fn step<const HALVES: bool>(&mut self, x: Rows, quads: *const u8, out: *mut Results) {
        // SAFETY: by the caller's promise; a half is 16 bytes of a row, and four quads.
        unsafe {
            let [high, low] = x.bytes.map(|bytes| bytes.cast::<u8>());
            let results = out.cast::<i32>();
            self.load::<6>(quads, LINE);
            self.load::<4>(high, x.stride);
            self.store::<0>(results);
            self.zero::<0>();
            self.dot::<0, 4, 6>();
            self.load::<5>(low, x.stride);
            self.store::<1>(results);
            self.zero::<1>();
            self.dot::<1, 5, 6>();
            if HALVES {
                let half = Chunk::LEN / 2;
                self.load::<7>(quads.add(4 * LINE), LINE);
                self.load::<4>(high.add(half), x.stride);
                self.store::<2>(results);
                self.zero::<2>();
                self.dot::<2, 4, 7>();
                self.load::<5>(low.add(half), x.stride);
                self.store::<3>(results);
                self.zero::<3>();
                self.dot::<3, 5, 7>();
            }
        }
    }

    #[inline(always)]
    unsafe fn write<const HALVES: bool>(&mut self, out: *mut Results) {
        // SAFETY: by the caller's promise.
        unsafe {
            let results = out.cast::<i32>();
            self.store::<0>(results);
            self.store::<1>(results);
            if HALVES {
                self.store::<2>(results);
                self.store::<3>(results);
            }
        }
    }

    #[inline(always)]
    unsafe fn release(self) {
        // SAFETY: passed on.
        unsafe { R::release(self) }
    }
}
