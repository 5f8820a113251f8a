//! The tile instructions as plain loops, after the pseudo-code of the Intel SDM, volume 2.

use crate::batch::registers::Registers;
use crate::isa::LANES;

/// 16 rows of 64 bytes.
type Tile = [[u8; 64]; 16];

/// The registers.
#[derive(Debug)]
pub(crate) struct Emulated([Tile; 8]);

fn i32_at(tile: &Tile, row: usize, col: usize) -> i32 {
    let four = tile[row][4 * col..].first_chunk().expect("16 columns");
    i32::from_ne_bytes(*four)
}

impl Emulated {
    /// Adds the products of signed bytes of `a` and bytes of `b`, as `weight` reads them, to `c`.
    fn dot(&mut self, [c, a, b]: [u8; 3], weight: fn(u8) -> i32) {
        let [mut to, a, b] = [c, a, b].map(|tile| self.0[usize::from(tile)]);
        for m in 0..16 {
            for n in 0..16 {
                let product = |k: usize| i32::from(a[m][k] as i8) * weight(b[k / 4][4 * n + k % 4]);
                let sum = i32_at(&to, m, n) + (0..64).map(product).sum::<i32>();
                to[m][4 * n..4 * n + 4].copy_from_slice(&sum.to_ne_bytes());
            }
        }
        self.0[usize::from(c)] = to;
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

    unsafe fn store<const T: u8>(&self, results: *mut i32) {
        let tile = usize::from(T);
        unsafe {
            let to = results.add(tile * 16 * LANES).cast::<Tile>();
            to.write(self.0[tile]);
        }
    }

    unsafe fn zero<const T: u8>(&mut self) {
        self.0[usize::from(T)] = [[0; 64]; 16];
    }

    unsafe fn dot_signed<const C: u8, const A: u8, const B: u8>(&mut self) {
        self.dot([C, A, B], |weight| i32::from(weight as i8));
    }

    unsafe fn dot_unsigned<const C: u8, const A: u8, const B: u8>(&mut self) {
        self.dot([C, A, B], i32::from);
    }

    unsafe fn release(self) {}
}
