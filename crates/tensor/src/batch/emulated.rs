//! The tile instructions as plain loops, after the pseudo-code of the Intel SDM, volume 2.

use crate::batch::registers::{Registers, shape};

/// A tile: its shape, and 16 rows of 64 bytes.
#[derive(Clone, Copy, Debug)]
struct Tile {
    rows: usize,
    row_bytes: usize,
    data: [[u8; 64]; 16],
}

/// The registers.
#[derive(Debug)]
pub(crate) struct Emulated([Tile; 8]);

impl Tile {
    fn i32_at(&self, row: usize, col: usize) -> i32 {
        let four = self.data[row][4 * col..].first_chunk().expect("16 columns");
        i32::from_ne_bytes(*four)
    }
}

impl Emulated {
    /// As [`Registers::store`].
    unsafe fn store_tile(&self, tile: usize, results: *mut i32) {
        let to = results.wrapping_add(256 * tile);
        let tile = &self.0[tile];
        for row in 0..tile.rows {
            let (from, to) = (tile.data[row].as_ptr(), to.cast::<u8>());
            unsafe { std::ptr::copy_nonoverlapping(from, to.add(64 * row), tile.row_bytes) };
        }
    }
}

// SAFETY (whole impl): rows and bytes are those of the configuration.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block is one in-bounds copy under the trait's contract, see above"
)]
impl Registers for Emulated {
    unsafe fn configured(rows: usize, depth: usize) -> Self {
        assert!(
            (1..=16).contains(&rows) && depth <= 64,
            "{rows} rows of {depth} bytes"
        );
        Self(std::array::from_fn(|tile| {
            let (rows, row_bytes) = shape(tile, rows, depth);
            Tile {
                rows,
                row_bytes,
                data: [[0; 64]; 16],
            }
        }))
    }

    unsafe fn left() -> Self {
        unsafe { Self::configured(16, 64) }
    }

    unsafe fn load<const T: u8>(&mut self, from: *const u8, stride: usize) {
        let tile = &mut self.0[usize::from(T)];
        tile.data = [[0; 64]; 16];
        for row in 0..tile.rows {
            let to = tile.data[row].as_mut_ptr();
            unsafe { std::ptr::copy_nonoverlapping(from.add(row * stride), to, tile.row_bytes) };
        }
    }

    unsafe fn load_nth<const T: u8, const N: usize, const UNIT: usize>(&mut self, from: *const u8) {
        unsafe { self.load::<T>(from.add(N * UNIT), 64) }
    }

    unsafe fn store<const T: u8>(&self, results: *mut i32) {
        unsafe { self.store_tile(usize::from(T), results) }
    }

    unsafe fn store_next<const T: u8>(&self, results: *mut i32) {
        unsafe { self.store_tile(usize::from(T) + 1, results) }
    }
    unsafe fn zero<const T: u8>(&mut self) {
        self.0[usize::from(T)].data = [[0; 64]; 16];
    }

    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self) {
        let [mut c, a, b] = [C, A, B].map(|tile| self.0[usize::from(tile)]);
        assert_eq!((c.rows, a.row_bytes), (a.rows, 4 * b.rows), "shapes");
        assert_eq!(c.row_bytes, b.row_bytes, "shapes");
        for m in 0..c.rows {
            for n in 0..c.row_bytes / 4 {
                let product = |k: usize| {
                    let (a, b) = (a.data[m][k], b.data[k / 4][4 * n + k % 4]);
                    i32::from(a as i8) * i32::from(b as i8)
                };
                let sum = (0..a.row_bytes).fold(c.i32_at(m, n), |sum, k| sum + product(k));
                c.data[m][4 * n..4 * n + 4].copy_from_slice(&sum.to_ne_bytes());
            }
        }
        self.0[usize::from(C)] = c;
    }

    /// Even columns, then odd ones, then both, as the manual adds them; only whole numbers are
    /// tested, whose sums are exact in any order.
    unsafe fn dot_floats<const C: u8, const A: u8, const B: u8>(&mut self) {
        let [mut c, a, b] = [C, A, B].map(|tile| self.0[usize::from(tile)]);
        assert_eq!((c.rows, a.row_bytes), (a.rows, 4 * b.rows), "shapes");
        assert_eq!(c.row_bytes, b.row_bytes, "shapes");
        let float = |tile: &Tile, row: usize, at: usize| {
            let bits = u16::from_ne_bytes([tile.data[row][2 * at], tile.data[row][2 * at + 1]]);
            f32::from_bits(u32::from(bits) << 16)
        };
        for m in 0..c.rows {
            for n in 0..c.row_bytes / 4 {
                let sums = [0, 1].map(|odd| {
                    let products = (0..a.row_bytes / 4)
                        .map(|k| (float(&a, m, 2 * k + odd), float(&b, k, 2 * n + odd)));
                    products.fold(0.0f32, |sum, (a, b)| a.mul_add(b, sum))
                });
                let sum = f32::from_bits(c.i32_at(m, n) as u32) + (sums[0] + sums[1]);
                c.data[m][4 * n..4 * n + 4].copy_from_slice(&sum.to_ne_bytes());
            }
        }
        self.0[usize::from(C)] = c;
    }

    unsafe fn release(self) {}
}
