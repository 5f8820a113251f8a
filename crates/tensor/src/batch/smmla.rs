//! i8mm: `smmla` multiplies two rows of eight bytes by two rows of eight bytes into four i32, twice
//! the products of `sdot`.

use std::arch::aarch64::*;

use crate::batch::bytes::{ByteResults, ByteRows, LINE, Tiles};
use crate::isa::smmla;

/// Columns that one instruction takes.
const DEPTH: usize = 8;

/// Two rows of activations, or one and its copy.
#[derive(Debug)]
pub(crate) struct Smmla {
    rows: usize,
}

impl Smmla {
    /// Multiplies `columns` columns of both rows with the 16 rows of weights. Returns high and low
    /// products as `[row 0: n, n + 1; row 1: n, n + 1]`, for every two weight rows.
    #[inline(always)]
    unsafe fn products(
        &self,
        x: ByteRows,
        quads: *const u8,
        columns: usize,
    ) -> [[int32x4_t; 8]; 2] {
        let second = if self.rows == 2 { x.stride } else { 0 };
        // SAFETY: eight bytes of each row for every pair of quads; features by the caller.
        unsafe {
            let mut acc = [[vdupq_n_s32(0); 8]; 2];
            for pair in 0..columns / DEPTH {
                let x = x.bytes.map(|from| {
                    let from = from.add(DEPTH * pair);
                    vcombine_s8(vld1_s8(from), vld1_s8(from.add(second)))
                });
                for n in 0..8 {
                    let w = vld1q_s8(quads.add(2 * LINE * pair + 16 * n).cast());
                    acc[0][n] = smmla(acc[0][n], x[0], w);
                    acc[1][n] = smmla(acc[1][n], x[1], w);
                }
            }
            acc
        }
    }
}

impl Tiles for Smmla {
    const ROWS: usize = 2;
    /// Two tiles. An estimate: the emulator that this was tested in has no times.
    const FROM: usize = 4;

    #[inline(always)]
    unsafe fn configured(rows: usize, _depth: usize) -> Self {
        Self { rows }
    }

    #[inline(always)]
    unsafe fn step<const HALVES: bool>(
        &mut self,
        x: ByteRows,
        quads: *const u8,
        out: *mut ByteResults,
    ) {
        let (halves, columns) = if HALVES { (2, 16) } else { (1, 32) };
        for half in 0..halves {
            // SAFETY: a half is 16 columns of a row and four quads; results of two rows.
            unsafe {
                let from = ByteRows {
                    bytes: x.bytes.map(|bytes| bytes.add(16 * half)),
                    stride: x.stride,
                };
                let acc = self.products(from, quads.add(4 * LINE * half), columns);
                for (term, acc) in acc.into_iter().enumerate() {
                    let rows = &raw mut (*out).0[2 * half + term];
                    store(acc, rows.cast());
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn release(self) {}
}

/// Stores products as two rows of 16.
#[inline(always)]
unsafe fn store(acc: [int32x4_t; 8], to: *mut i32) {
    for n in 0..4 {
        // SAFETY: two rows of 16.
        unsafe {
            let (a, b) = (
                vreinterpretq_s64_s32(acc[2 * n]),
                vreinterpretq_s64_s32(acc[2 * n + 1]),
            );
            vst1q_s32(to.add(4 * n), vreinterpretq_s32_s64(vtrn1q_s64(a, b)));
            vst1q_s32(to.add(16 + 4 * n), vreinterpretq_s32_s64(vtrn2q_s64(a, b)));
        }
    }
}
