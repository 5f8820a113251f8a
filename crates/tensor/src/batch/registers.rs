//! Tile registers of AMX.
//!
//! [`TileRegisters`] is what AMX offers of them, one method for each instruction.
//! `crate::batch::amx` is the processor's, and a test's emulation proves everything but the
//! encodings. Weights of 64 columns are a tile, all bytes. Column `k` of weight row `n` is byte `4
//! n + k % 4` of the tile's row `k / 4`. Activations of row `t` are row `t` of a tile, column `k`
//! at byte `k`. Results are i32, `(t, n)`.

use crate::batch::rows::{TILE_COLS, TILE_ROWS};

/// Bytes of a tile's row.
pub(crate) const LINE: usize = TILE_COLS;
pub(crate) const TILE_BYTES: usize = TILE_ROWS * LINE;

/// The eight tile registers of AMX, of 16 rows of 64 bytes, and what can be done with them.
///
/// # Safety
/// Every method requires that the CPU and the system allow it, and that pointers are good for a
/// tile.
pub(crate) trait TileRegisters {
    /// Configures all of them.
    unsafe fn configured() -> Self;
    /// Registers as [`configured`](Self::configured) left them, for a caller that
    /// [`forgot`](std::mem::forget) them.
    unsafe fn left() -> Self;
    /// Loads tile `T` from rows one behind the other, `N` times `UNIT` bytes from here. A place
    /// that is in the instruction needs no register of its own.
    unsafe fn load<const T: u8, const N: usize, const UNIT: usize>(&mut self, from: *const u8);
    /// Tile `T` to its place in results, `(tiles, 16, 16)`.
    unsafe fn store<const T: u8>(&self, results: *mut i32);
    /// Clears tile `T`.
    unsafe fn zero<const T: u8>(&mut self);
    /// Adds to the i32 of tile `C` the products of signed bytes of `A`, activations, and signed
    /// bytes of `B`, weights.
    unsafe fn dot_signed<const C: u8, const A: u8, const B: u8>(&mut self);
    /// The same of unsigned bytes of `B`.
    unsafe fn dot_unsigned<const C: u8, const A: u8, const B: u8>(&mut self);
    /// Gives the registers back.
    unsafe fn release(self);
}
