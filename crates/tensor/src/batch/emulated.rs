//! The tile instructions as plain loops, after the pseudo-code of the Intel SDM, volume 2.

use crate::batch::registers::Registers;
use crate::isa::LANES;

/// 16 rows of 64 bytes.
type Tile = [[u8; 64]; 16];

/// The registers.
#[derive(Debug)]
pub(crate) struct Emulated([Tile; 8]);

fn f32_at(tile: &Tile, row: usize, col: usize) -> f32 {
    let four = tile[row][4 * col..].first_chunk().expect("16 columns");
    f32::from_ne_bytes(*four)
}

fn bf16_at(tile: &Tile, row: usize, col: usize) -> f32 {
    let two = tile[row][2 * col..].first_chunk().expect("32 columns");
    f32::from_bits(u32::from(u16::from_ne_bytes(*two)) << 16)
}

impl Emulated {
    /// As [`Registers::store`].
    unsafe fn store_tile(&self, tile: usize, results: *mut f32) {
        // SAFETY: room for the tile at its place.
        unsafe {
            results
                .add(tile * 16 * LANES)
                .cast::<Tile>()
                .write(self.0[tile])
        }
    }
}

// SAFETY (whole impl): pointers are good for a tile.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block is one copy under the trait's contract, see above"
)]
impl Registers for Emulated {
    unsafe fn configured() -> Self {
        Self([[[0; 64]; 16]; 8])
    }

    unsafe fn left() -> Self {
        unsafe { Self::configured() }
    }

    unsafe fn load<const T: u8, const N: usize, const UNIT: usize>(&mut self, from: *const u8) {
        self.0[usize::from(T)] = unsafe { from.add(N * UNIT).cast::<Tile>().read_unaligned() };
    }

    unsafe fn store<const T: u8>(&self, results: *mut f32) {
        unsafe { self.store_tile(usize::from(T), results) }
    }

    unsafe fn store_next<const T: u8>(&self, results: *mut f32) {
        unsafe { self.store_tile(usize::from(T) + 1, results) }
    }

    unsafe fn zero<const T: u8>(&mut self) {
        self.0[usize::from(T)] = [[0; 64]; 16];
    }

    /// Even columns, then odd ones, then both, as the manual adds them; only whole numbers are
    /// tested, whose sums are exact in any order.
    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self) {
        let [mut c, a, b] = [C, A, B].map(|tile| self.0[usize::from(tile)]);
        for m in 0..16 {
            for n in 0..16 {
                let sums = [0, 1].map(|odd| {
                    let products =
                        (0..16).map(|k| (bf16_at(&a, m, 2 * k + odd), bf16_at(&b, k, 2 * n + odd)));
                    products.fold(0.0f32, |sum, (a, b)| a.mul_add(b, sum))
                });
                let sum = f32_at(&c, m, n) + (sums[0] + sums[1]);
                c[m][4 * n..4 * n + 4].copy_from_slice(&sum.to_ne_bytes());
            }
        }
        self.0[usize::from(C)] = c;
    }

    unsafe fn release(self) {}
}
