//! The tile instructions as plain loops, after the pseudo-code of the Intel SDM, volume 2.

use std::cell::RefCell;

use crate::batch::registers::TileRegisters;
use crate::isa::LANES;

/// 16 rows of 64 bytes.
type TileRegister = [[u8; 64]; 16];

thread_local! {
    /// A thread's registers.
    static TILES: RefCell<[TileRegister; 8]> = const { RefCell::new([[[0; 64]; 16]; 8]) };
}

/// The registers of the thread.
#[derive(Debug)]
pub(crate) struct Emulated;

fn tile(t: u8) -> TileRegister {
    TILES.with_borrow(|tiles| tiles[usize::from(t)])
}

fn set(t: u8, tile: TileRegister) {
    TILES.with_borrow_mut(|tiles| tiles[usize::from(t)] = tile);
}

fn i32_at(tile: &TileRegister, row: usize, col: usize) -> i32 {
    let four = tile[row][4 * col..].first_chunk().expect("16 columns");
    i32::from_ne_bytes(*four)
}

impl Emulated {
    /// Adds the products of signed bytes of `a` and bytes of `b`, as `weight` reads them, to `c`.
    fn dot([c, a, b]: [u8; 3], weight: fn(u8) -> i32) {
        let [mut to, a, b] = [c, a, b].map(tile);
        for m in 0..16 {
            for n in 0..16 {
                let product = |k: usize| i32::from(a[m][k] as i8) * weight(b[k / 4][4 * n + k % 4]);
                let sum = i32_at(&to, m, n) + (0..64).map(product).sum::<i32>();
                to[m][4 * n..4 * n + 4].copy_from_slice(&sum.to_ne_bytes());
            }
        }
        set(c, to);
    }
}

// SAFETY (whole impl): pointers are good for a tile.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block is one copy under the trait's contract, see above"
)]
impl TileRegisters for Emulated {
    unsafe fn configured() -> Self {
        (0..8).for_each(|t| set(t, [[0; 64]; 16]));
        Self
    }

    unsafe fn left() -> Self {
        Self
    }

    unsafe fn load<const T: u8, const N: usize, const UNIT: usize>(&mut self, from: *const u8) {
        set(T, unsafe {
            from.add(N * UNIT).cast::<TileRegister>().read_unaligned()
        });
    }

    unsafe fn store<const T: u8>(&self, results: *mut i32) {
        unsafe {
            let to = results
                .add(usize::from(T) * 16 * LANES)
                .cast::<TileRegister>();
            to.write(tile(T));
        }
    }

    unsafe fn zero<const T: u8>(&mut self) {
        set(T, [[0; 64]; 16]);
    }

    unsafe fn dot_signed<const C: u8, const A: u8, const B: u8>(&mut self) {
        Self::dot([C, A, B], |weight| i32::from(weight as i8));
    }

    unsafe fn dot_unsigned<const C: u8, const A: u8, const B: u8>(&mut self) {
        Self::dot([C, A, B], i32::from);
    }

    unsafe fn release(self) {}
}
