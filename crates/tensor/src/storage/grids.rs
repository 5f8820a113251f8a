//! Types whose weights are rows of a codebook, the *grid*, with signs apart: IQ2 and IQ3.
//!
//! ```text
//! IQ2_XXS   d: f16, { index: [u8; 4], word: u32 } of 32 columns    d / 8 (2 s + 1) * grid
//! IQ2_XS    d: f16, { u16 } of 8, scales: [u8; 8]                  the same
//! IQ2_S     d: f16, index: [u8; 32], signs: [u8; 32], high: [u8; 8], scales: [u8; 8]   the same
//! IQ3_XXS   d: f16, index: [u8; 64], { word: u32 } of 32           d / 4 (2 s + 1) * grid
//! IQ3_S     d: f16, index: [u8; 64], high: [u8; 8], signs: [u8; 32], scales: [u8; 4]
//!                                                                  d (2 s + 1) * grid
//! ```
//!
//! A row of a grid is 8 values (IQ3: 4). A word holds four sign codes of 7 bits and a scale `s` of
//! 4. A sign code is the signs of seven columns, and that of the eighth makes their number even.
//!
//! **Exactness.** The factors of a weight have at most 22 bits together, so products are exact in
//! f32 in any order.
//!
//! Source: `ggml/src/ggml-common.h` and `dequantize_row_*` in `ggml/src/ggml-quants.c` of
//! llama.cpp. `scripts/golden/grids.py` writes the grids.

use paceline_base::BlockType;

use super::{Chunk, bytes_at, half_at};

/// Packed grids in hexadecimal digits, in the order of the constants below.
const HEX: &[u8] = include_bytes!("grids.hex");

/// Added to the values of grids in tables for kernels: bytes are never negative with either sign.
pub(crate) const GRID_OFFSET: u8 = 64;

pub(crate) static IQ2_XXS: Eights<256> = Eights::new(0);
pub(crate) static IQ2_XS: Eights<512> = Eights::new(256);
pub(crate) static IQ2_S: Eights<1024> = Eights::new(768);
/// Eight times the values.
pub(super) static IQ1: [[i8; 8]; 2048] = eights(1792, [-8, 0, 8, 0]);
pub(crate) static IQ3_XXS: Fours<256> = Fours::new(3840, [4, 12, 20, 28, 36, 44, 52, 62]);
pub(crate) static IQ3_S: Fours<512> = Fours::new(4096, [1, 3, 5, 7, 9, 11, 13, 15]);

/// Values of the grids of IQ2.
const LEVELS: [i8; 4] = [8, 25, 43, 0];

/// A grid of rows of eight values of 2 bits, [`GRID_OFFSET`] added, in two forms.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Eights<const N: usize> {
    pub(crate) rows: [[u8; 8]; N],
    /// Codes of the first and of the last four values of each row, the first value lowest.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "of AVX-512"))]
    pub(crate) codes: [[u8; N]; 2],
    /// The value of a code, by the lowest two of six bits.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "of AVX-512"))]
    pub(crate) values: [u8; 64],
}

/// A grid of rows of four values, [`GRID_OFFSET`] added, in two forms.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Fours<const N: usize> {
    pub(crate) rows: [[u8; 4]; N],
    /// The same by columns.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "of AVX-512"))]
    pub(crate) columns: [[u8; N]; 4],
}

impl<const N: usize> Eights<N> {
    /// From packed row `first` on.
    const fn new(first: usize) -> Self {
        let grid = eights::<N>(first, LEVELS);
        let mut this = Self {
            rows: [[0; 8]; N],
            codes: [[0; N]; 2],
            values: [0; 64],
        };
        let mut row = 0;
        while row < N {
            [this.codes[0][row], this.codes[1][row]] = packed(first + row).to_le_bytes();
            let mut k = 0;
            while k < 8 {
                this.rows[row][k] = grid[row][k] as u8 + GRID_OFFSET;
                k += 1;
            }
            row += 1;
        }
        let mut code = 0;
        while code < 64 {
            this.values[code] = LEVELS[code & 3] as u8 + GRID_OFFSET;
            code += 1;
        }
        this
    }
}

impl<const N: usize> Fours<N> {
    /// From packed row `first` on: values have 4 bits, the highest unused.
    const fn new(first: usize, values: [i8; 8]) -> Self {
        let mut this = Self {
            rows: [[0; 4]; N],
            columns: [[0; N]; 4],
        };
        let mut row = 0;
        while row < N {
            let bits = packed(first + row);
            let mut k = 0;
            while k < 4 {
                let value = values[(bits >> (4 * k)) as usize & 7] as u8 + GRID_OFFSET;
                this.rows[row][k] = value;
                this.columns[k][row] = value;
                k += 1;
            }
            row += 1;
        }
        this
    }
}

/// Packed row `row` of all grids: 16 bits, the first element lowest.
const fn packed(row: usize) -> u16 {
    const fn byte(index: usize) -> u16 {
        const fn digit(at: usize) -> u16 {
            let digit = HEX[at / 64 * 65 + at % 64]; // a line end behind 64 digits
            let letter = digit >= b'a';
            (digit - if letter { b'a' - 10 } else { b'0' }) as u16
        }
        digit(2 * index) << 4 | digit(2 * index + 1)
    }
    byte(2 * row) | byte(2 * row + 1) << 8
}

/// A grid of 8 values of 2 bits, from packed row `first` on.
const fn eights<const N: usize>(first: usize, values: [i8; 4]) -> [[i8; 8]; N] {
    let mut grid = [[0; 8]; N];
    let mut row = 0;
    while row < N {
        let bits = packed(first + row);
        let mut k = 0;
        while k < 8 {
            grid[row][k] = values[(bits >> (2 * k)) as usize & 3];
            k += 1;
        }
        row += 1;
    }
    grid
}

/// 32 weights as their block has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GridChunk {
    /// Rows of the grid; of the types with rows of eight the first four count.
    pub(crate) indices: [u16; 8],
    /// Bit `k` is the sign of column `k`.
    pub(crate) signs: u32,
    /// `s` of each half.
    pub(crate) scales: [u8; 2],
}

impl GridChunk {
    /// Part `part`, 0..8, of a block.
    ///
    /// # Panics
    /// On a bug of the caller: a type without a grid, or a block of another size.
    pub(crate) fn of(block_type: BlockType, block: &[u8], part: usize) -> Self {
        let byte = |at: usize| u16::from(block[at]);
        let word = |at: usize| u32::from_le_bytes(*bytes_at(block, at));
        let halves = |at: usize| [block[at] & 15, block[at] >> 4];
        let coded = |word: u32| (sign_codes(word), [(word >> 28) as u8; 2]);
        let mut indices = [0; 8];
        let mut fill = |index: &dyn Fn(usize) -> u16| {
            let count = if has_eights(block_type) { 4 } else { 8 };
            (0..count).for_each(|i| indices[i] = index(i));
        };
        let (signs, scales) = match block_type {
            BlockType::IQ2_XXS => {
                fill(&|i| byte(2 + 8 * part + i));
                coded(word(6 + 8 * part))
            }
            BlockType::IQ2_XS => {
                let code = |i: usize| byte(2 + 8 * part + 2 * i) | byte(3 + 8 * part + 2 * i) << 8;
                fill(&|i| code(i) & 511);
                let codes = (0..4).map(|i| u32::from(code(i) >> 9) << (7 * i));
                (sign_codes(codes.sum()), halves(66 + part))
            }
            BlockType::IQ2_S => {
                let high = |i: usize| byte(66 + part) >> (2 * i) & 3;
                fill(&|i| byte(2 + 4 * part + i) | high(i) << 8);
                (word(34 + 4 * part), halves(74 + part))
            }
            BlockType::IQ3_XXS => {
                fill(&|i| byte(2 + 8 * part + i));
                coded(word(66 + 4 * part))
            }
            BlockType::IQ3_S => {
                let high = |i: usize| byte(66 + part) >> i & 1;
                fill(&|i| byte(2 + 8 * part + i) | high(i) << 8);
                let scale = block[106 + part / 2] >> (4 * (part % 2)) & 15;
                (word(74 + 4 * part), [scale; 2])
            }
            other => unreachable!("{other} has no grid"),
        };
        Self {
            indices,
            signs,
            scales,
        }
    }

    /// The factors of the step: `2 s + 1` of each half.
    pub(crate) fn factors(&self) -> [u8; 2] {
        self.scales.map(|scale| 2 * scale + 1)
    }

    /// The values with their signs.
    fn values(&self, block_type: BlockType) -> [i8; Chunk::LEN] {
        let value = |k: usize| {
            let [eight, four] = [8, 4].map(|len| usize::from(self.indices[k / len]));
            match block_type {
                BlockType::IQ2_XXS => IQ2_XXS.rows[eight][k % 8],
                BlockType::IQ2_XS => IQ2_XS.rows[eight][k % 8],
                BlockType::IQ2_S => IQ2_S.rows[eight][k % 8],
                BlockType::IQ3_XXS => IQ3_XXS.rows[four][k % 4],
                _ => IQ3_S.rows[four][k % 4],
            }
        };
        std::array::from_fn(|k| {
            let value = (value(k) - GRID_OFFSET) as i8;
            if self.signs >> k & 1 == 1 {
                -value
            } else {
                value
            }
        })
    }
}

/// Whether rows of the grid have eight values and not four.
const fn has_eights(block_type: BlockType) -> bool {
    matches!(
        block_type,
        BlockType::IQ2_XXS | BlockType::IQ2_XS | BlockType::IQ2_S
    )
}

/// The part of a block's `d` that weights are whole multiples of; `None` for types without a grid.
pub(crate) const fn grid_step(block_type: BlockType) -> Option<f32> {
    match block_type {
        BlockType::IQ2_XXS | BlockType::IQ2_XS | BlockType::IQ2_S => Some(0.125),
        BlockType::IQ3_XXS => Some(0.25),
        BlockType::IQ3_S => Some(1.0),
        _ => None,
    }
}

/// Chunk `index` of a row.
pub(super) fn chunk(block_type: BlockType, row: &[u8], index: usize) -> Chunk {
    let grid = super::grid_chunk(block_type, row, index);
    let (grid, step) = grid.zip(grid_step(block_type)).expect("a type with a grid");
    let d = half_at(row, index / 8 * block_type.bytes());
    let scales = grid.factors().map(i32::from);
    Chunk::sub_scaled(d * step, scales, grid.values(block_type))
}

/// The signs of the four sign codes of a word.
const fn sign_codes(word: u32) -> u32 {
    let mut signs = 0;
    let mut i = 0;
    while i < 4 {
        let seven = word >> (7 * i) & 127;
        signs |= (seven | (seven.count_ones() & 1) << 7) << (8 * i);
        i += 1;
    }
    signs
}
