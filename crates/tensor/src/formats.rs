//! The packed weight formats: how sixteen rows of a stored type lie in memory for the kernels.
//!
//! A *group* is 16 rows. Its chunks (32 columns each) follow one another in blocks ([`Layout`]), so
//! a kernel reads one stream. Within a chunk, *quad* `g` (of 8) is 64 bytes: byte `4 * row + j` is
//! column `4 g + j`.
//! Values below 8 bits are cut into planes:
//!
//! ```text
//! nibbles   256 B  4 bits  : quads g and g + 4 in the low and high halves of bytes 64 g..
//! crumbs    128 B  2 bits  : quad g at bits 2 (g / 2).. of bytes 64 (g % 2)..
//! bits       64 B  1 bit   : quad g is the u64 at byte 8 g, bit i for byte i
//! bytes     512 B  8 bits  : quad g at bytes 64 g..
//! ```
//!
//! Rows of a grid (IQ2, IQ3) are kept as indices and signs: see [`grids`].
//!
//! | type | planes (value) | per chunk, 16 each | per 8 chunks | packed / stored |
//! |---|---|---|---|---|
//! | Q4_0 | nibbles (q + 8) | scale i16 | step bf16 | 1.01 |
//! | Q4_1 | nibbles | scale, min i16 | step bf16 | 1.01 |
//! | Q5_0 | nibbles, bits (q + 16) | scale i16 | step bf16 | 1.01 |
//! | Q5_1 | nibbles, bits | scale, min i16 | step bf16 | 1.01 |
//! | Q8_0 | bytes | scale i16 | step bf16 | 1.01 |
//! | IQ4_NL | nibbles (code) | scale i16 | step bf16 | 1.01 |
//! | Q2_K | crumbs | scale + 16 min, u8 x 2 | step f32, multipliers i16 x 2 | 1.02 |
//! | Q3_K | crumbs, bits (q + 4) | scale i8 x 2 | step f16 | 1.03 |
//! | Q4_K | nibbles | scale u8, min u8 | step f32, multipliers i16 x 2 | 1.04 |
//! | Q5_K | nibbles, bits | scale u8, min u8 | step f32, multipliers i16 x 2 | 1.03 |
//! | Q6_K | nibbles, crumbs (q + 32) | scale i8 x 2 | step f16 | 1.00 |
//! | IQ4_XS | nibbles (code) | scale i8 | step f16 | 1.01 |
//! | AFFINE2..8 | of as many bits (8 bits: q - 128) | scale, min i16 | step bf16 | 1.01 |
//! | IQ2_XXS | indices, signs | scale, 4 bits | step f16 | 1.06 |
//! | IQ2_XS, IQ2_S | indices, signs | scale, 4 bits x 2 | step f16 | 1.05, 1.00 |
//! | IQ3_XXS, IQ3_S | indices, signs | scale, 4 bits | step f16 | 1.04, 1.00 |
//! | MXFP4 | nibbles (code) | scale i16 | step bf16 | 1.07 |
//!
//! Scales, mins, multipliers and steps are those of [`crate::stored::units`].
//!
//! [`Format`] says how a kernel reads one chunk; [`crate::packed`] writes it.

/// For [`Scales`] that need no multipliers.
macro_rules! no_multipliers {
    () => {
        type Multipliers<S: Isa> = ();
        #[inline(always)]
        unsafe fn multipliers<S: Isa>(_header: *const u8) {}
    };
}

/// For [`Scales`] without mins.
macro_rules! no_mins {
    () => {
        const HAS_MIN: bool = false;
        #[inline(always)]
        unsafe fn mins<S: Isa>(_: Self::Multipliers<S>, _: *const u8) -> [S::I; 2] {
            // SAFETY: register arithmetic only.
            unsafe { [S::splat_i(0); 2] }
        }
    };
}

pub(crate) mod grids;
mod mlx;

use std::marker::PhantomData;

use crate::isa::Isa;
use crate::storage::CODEBOOK;
use crate::storage::units::UNIT_CHUNKS;
use grids::{GridOfEights, GridOfFours, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Odd};
use mlx::Floats4;

/// Bytes of sixteen scales of 16 bits.
pub(crate) const WORDS: usize = 32;
/// Bytes of sixteen byte-sized scales.
pub(crate) const BYTES: usize = 16;
pub(crate) const NIBBLE_PLANE: usize = 256;
pub(crate) const CRUMB_PLANE: usize = 128;
pub(crate) const BIT_PLANE: usize = 64;
pub(crate) const BYTE_PLANE: usize = 512;
/// Bytes of a cache line, and of the widest load. Apple's lines have 128: two of these.
pub(crate) const LINE: usize = 64;

/// Memory layout of a group; the same for the packer and the kernels:
///
/// ```text
/// .. | header of unit 1 | of unit 0 || block of chunks | block | ..    ||: places count from here
/// block:  scales of chunk 0, 1, .. | planes of chunk 0, 1, ..
/// ```
///
/// Planes begin at cache lines, so that no load touches two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Chunks of a block: as many as fill a cache line with their scales. The last may have fewer.
    pub(crate) per_block: usize,
    /// Bytes that the chunks of a unit have in common.
    pub(crate) header: usize,
    /// Bytes of a chunk's scales.
    pub(crate) scales: usize,
    /// Bytes of a chunk's planes.
    pub(crate) planes: usize,
}

/// Offsets of a chunk's parts from the first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkOffsets {
    pub(crate) scales: usize,
    pub(crate) planes: usize,
}

impl Layout {
    const fn new(planes: usize, scales: usize, header: usize) -> Self {
        Self {
            per_block: LINE.div_ceil(scales),
            header,
            scales,
            planes,
        }
    }

    /// Bytes before the planes of a block.
    const fn front(self) -> usize {
        (self.per_block * self.scales).next_multiple_of(LINE)
    }

    /// Bytes from one block to the next.
    const fn stride(self) -> usize {
        self.front() + self.per_block * self.planes
    }

    /// Offsets of chunk `c` of a group.
    #[inline(always)]
    pub(crate) const fn place(self, c: usize) -> ChunkOffsets {
        let (block, within) = (c / self.per_block * self.stride(), c % self.per_block);
        ChunkOffsets {
            scales: block + within * self.scales,
            planes: block + self.front() + within * self.planes,
        }
    }

    /// Bytes before the first block from which the header of chunk `c`'s unit begins, counted from
    /// the start of the first unit.
    #[inline(always)]
    pub(crate) const fn header_before(self, c: usize) -> usize {
        (c / UNIT_CHUNKS + 1) * self.header
    }

    /// Bytes of a chunk with its share of what its block has in common.
    pub(crate) const fn chunk_bytes(self) -> usize {
        self.stride() / self.per_block
    }

    /// Bytes before the first block of a group, of units of `chunks` chunks.
    pub(crate) const fn headers(self, chunks: usize) -> usize {
        (chunks.div_ceil(UNIT_CHUNKS) * self.header).next_multiple_of(LINE)
    }

    /// Bytes of the blocks of a group of `chunks` chunks.
    pub(crate) const fn blocks(self, chunks: usize) -> usize {
        let blocks = chunks / self.per_block * self.stride();
        let last = match chunks % self.per_block {
            0 => 0,
            rest => self.front() + rest * self.planes,
        };
        blocks + last
    }
}

/// Unpacking of the eight quads of a chunk.
pub(crate) trait Planes {
    /// Bytes at the start of a chunk.
    const BYTES: usize;
    /// Subtracted from each unpacked byte to give the weight.
    const OFFSET: i32;
    /// Whether unpacked bytes are signed (then `OFFSET` is 0), or unsigned and at most 127.
    const SIGNED: bool;
    /// The largest magnitude of a weight, less the offset.
    const LARGEST: i32;
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8];
}

/// Nibbles, with a zero offset.
#[derive(Debug)]
pub(crate) struct Nibbles<const OFFSET: i32>;
/// Nibbles that are codes of a table.
#[derive(Debug)]
pub(crate) struct Codes<T>(PhantomData<T>);

/// The largest magnitude of `bits` bits less `offset`.
const fn largest(bits: u32, offset: i32) -> i32 {
    let above = (1 << bits) - 1 - offset;
    if above > offset { above } else { offset }
}

/// The values of the 16 codes of [`Codes`].
pub(crate) trait Codebook {
    const VALUES: [i8; 16];
}

/// The table of the IQ4 types.
#[derive(Debug)]
pub(crate) struct Iq4;

impl Codebook for Iq4 {
    const VALUES: [i8; 16] = CODEBOOK;
}

/// Nibbles and a fifth bit.
#[derive(Debug)]
pub(crate) struct FiveBits<const OFFSET: i32>;
/// Nibbles and two more bits.
#[derive(Debug)]
pub(crate) struct SixBits;
#[derive(Debug)]
pub(crate) struct TwoBits;
/// Two bits and a third.
#[derive(Debug)]
pub(crate) struct ThreeBits;
/// Signed bytes.
#[derive(Debug)]
pub(crate) struct EightBits;

#[inline(always)]
unsafe fn nibbles<S: Isa>(chunk: *const u8) -> [S::W; 8] {
    // SAFETY: a nibble plane starts at `chunk`.
    unsafe {
        let w = [
            S::load_w(chunk),
            S::load_w(chunk.add(64)),
            S::load_w(chunk.add(128)),
            S::load_w(chunk.add(192)),
        ];
        [
            S::low_nibble(w[0]),
            S::low_nibble(w[1]),
            S::low_nibble(w[2]),
            S::low_nibble(w[3]),
            S::high_nibble(w[0]),
            S::high_nibble(w[1]),
            S::high_nibble(w[2]),
            S::high_nibble(w[3]),
        ]
    }
}

#[inline(always)]
unsafe fn crumbs<S: Isa>(plane: *const u8) -> [S::W; 8] {
    // SAFETY: a crumb plane starts at `plane`.
    unsafe {
        let (a, b) = (S::load_w(plane), S::load_w(plane.add(64)));
        [
            S::crumb::<0>(a),
            S::crumb::<0>(b),
            S::crumb::<1>(a),
            S::crumb::<1>(b),
            S::crumb::<2>(a),
            S::crumb::<2>(b),
            S::crumb::<3>(a),
            S::crumb::<3>(b),
        ]
    }
}

/// Ors bit plane `plane`, as `value`, into the quads.
#[inline(always)]
unsafe fn with_bits<S: Isa>(mut quads: [S::W; 8], plane: *const u8, value: u8) -> [S::W; 8] {
    let mut g = 0;
    while g < 8 {
        // SAFETY: a bit plane of 64 bytes starts at `plane`.
        quads[g] = unsafe { S::or(quads[g], S::spread_bits(plane.add(8 * g), value)) };
        g += 1;
    }
    quads
}

impl<const OFFSET: i32> Planes for Nibbles<OFFSET> {
    const BYTES: usize = NIBBLE_PLANE;
    const OFFSET: i32 = OFFSET;
    const SIGNED: bool = false;
    const LARGEST: i32 = largest(4, OFFSET);
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: passed on.
        unsafe { nibbles::<S>(chunk) }
    }
}

impl<T: Codebook> Planes for Codes<T> {
    const BYTES: usize = NIBBLE_PLANE;
    const OFFSET: i32 = 0;
    const SIGNED: bool = true;
    const LARGEST: i32 = 128;
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: passed on.
        unsafe {
            let mut quads = nibbles::<S>(chunk);
            let mut g = 0;
            while g < 8 {
                quads[g] = S::lookup(&T::VALUES, quads[g]);
                g += 1;
            }
            quads
        }
    }
}

impl<const OFFSET: i32> Planes for FiveBits<OFFSET> {
    const BYTES: usize = NIBBLE_PLANE + BIT_PLANE;
    const OFFSET: i32 = OFFSET;
    const SIGNED: bool = false;
    const LARGEST: i32 = largest(5, OFFSET);
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: the bit plane follows the nibble plane.
        unsafe { with_bits::<S>(nibbles::<S>(chunk), chunk.add(NIBBLE_PLANE), 16) }
    }
}

impl Planes for SixBits {
    const BYTES: usize = NIBBLE_PLANE + CRUMB_PLANE;
    const OFFSET: i32 = 32;
    const SIGNED: bool = false;
    const LARGEST: i32 = largest(6, 32);
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: the crumb plane follows the nibble plane.
        unsafe {
            let (mut low, plane) = (nibbles::<S>(chunk), chunk.add(NIBBLE_PLANE));
            let (a, b) = (S::load_w(plane), S::load_w(plane.add(64)));
            let high = [
                S::high_crumb::<0>(a),
                S::high_crumb::<0>(b),
                S::high_crumb::<1>(a),
                S::high_crumb::<1>(b),
                S::high_crumb::<2>(a),
                S::high_crumb::<2>(b),
                S::high_crumb::<3>(a),
                S::high_crumb::<3>(b),
            ];
            let mut g = 0;
            while g < 8 {
                low[g] = S::or(low[g], high[g]);
                g += 1;
            }
            low
        }
    }
}

impl Planes for TwoBits {
    const BYTES: usize = CRUMB_PLANE;
    const OFFSET: i32 = 0;
    const SIGNED: bool = false;
    const LARGEST: i32 = largest(2, 0);
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: passed on.
        unsafe { crumbs::<S>(chunk) }
    }
}

impl Planes for ThreeBits {
    const BYTES: usize = CRUMB_PLANE + BIT_PLANE;
    const OFFSET: i32 = 4;
    const SIGNED: bool = false;
    const LARGEST: i32 = largest(3, 4);
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: the bit plane follows the crumb plane.
        unsafe { with_bits::<S>(crumbs::<S>(chunk), chunk.add(CRUMB_PLANE), 4) }
    }
}

impl Planes for EightBits {
    const BYTES: usize = BYTE_PLANE;
    const OFFSET: i32 = 0;
    const SIGNED: bool = true;
    const LARGEST: i32 = 128;
    #[inline(always)]
    unsafe fn quads<S: Isa>(chunk: *const u8) -> [S::W; 8] {
        // SAFETY: the byte plane is 512 bytes.
        unsafe {
            let mut quads = [S::load_w(chunk); 8];
            let mut g = 1;
            while g < 8 {
                quads[g] = S::load_w(chunk.add(64 * g));
                g += 1;
            }
            quads
        }
    }
}

/// Reading of a chunk's integer scales and its unit's step ([`crate::stored::units`]).
pub(crate) trait Scales {
    /// Bytes of the scales in a chunk.
    const BYTES: usize;
    /// Bytes of the header of a unit.
    const HEADER: usize;
    /// Whether the two halves of 16 columns have scales of their own.
    const HALVES: bool;
    /// Whether something is added to each weight.
    const HAS_MIN: bool;
    /// Whether no scale is below 0.
    const NEVER_NEGATIVE: bool = false;
    /// Whether weights have 20 bits, and mins are 64 times what is read.
    const WIDE: bool = false;
    /// The factors in a header that scales are multiplied by.
    type Multipliers<S: Isa>: Copy;
    /// Reads them.
    unsafe fn multipliers<S: Isa>(header: *const u8) -> Self::Multipliers<S>;
    /// The steps of the 16 rows.
    unsafe fn step<S: Isa>(header: *const u8) -> S::F;
    /// The scales of the 16 rows for each half, which are the same where not `HALVES`.
    unsafe fn scales<S: Isa>(multipliers: Self::Multipliers<S>, scales: *const u8) -> [S::I; 2];
    /// The mins of the 16 rows, so too; called where `HAS_MIN`.
    unsafe fn mins<S: Isa>(multipliers: Self::Multipliers<S>, scales: *const u8) -> [S::I; 2];
    /// Whether there are [`factors`](Self::factors), which products whose planes are never negative
    /// can use.
    const PAIRED: bool = false;
    /// The multipliers as [`factors`](Self::factors) takes them.
    #[inline(always)]
    unsafe fn paired<S: Isa>(multipliers: Self::Multipliers<S>) -> Self::Multipliers<S> {
        multipliers
    }
    /// The scales for each half and the mins as [`Isa::dot_scaled`] takes them; mins for weights
    /// from which nothing is taken off.
    #[inline(always)]
    unsafe fn factors<S: Isa>(
        multipliers: Self::Multipliers<S>,
        scales: *const u8,
    ) -> ([S::I; 2], S::I) {
        // SAFETY: passed on.
        unsafe {
            let [first, second] = Self::scales::<S>(multipliers, scales);
            let [min, _] = Self::mins::<S>(multipliers, scales);
            ([S::factor(first), S::factor(second)], S::factor(min))
        }
    }
}

/// A scale of 16 bits per row.
#[derive(Debug)]
pub(crate) struct One<const WIDE: bool = false>;
/// A scale and a min of 16 bits per row.
#[derive(Debug)]
pub(crate) struct OneMin<const WIDE: bool = false>;
/// A signed byte per row (IQ4_XS).
#[derive(Debug)]
pub(crate) struct SignedScale;
/// A signed byte per row and half (Q3_K, Q6_K).
#[derive(Debug)]
pub(crate) struct SignedHalves;
/// A byte each of scale and min per row, times multipliers (Q4_K, Q5_K), and `CENTER` times the
/// scale added to the min ([`center`]).
#[derive(Debug)]
pub(crate) struct ScaleMin<const CENTER: i32>;
/// Nibbles of scale and min per row and half, times multipliers (Q2_K).
#[derive(Debug)]
pub(crate) struct NibbleHalves;

impl<const WIDE: bool> Scales for One<WIDE> {
    const WIDE: bool = WIDE;
    const BYTES: usize = WORDS;
    const HEADER: usize = WORDS;
    const HALVES: bool = false;
    no_multipliers!();
    no_mins!();
    #[inline(always)]
    unsafe fn step<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 steps.
        unsafe { S::load_bf16(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scales<S: Isa>((): (), scales: *const u8) -> [S::I; 2] {
        // SAFETY: 16 scales.
        unsafe { [S::load_i16(scales); 2] }
    }
}

impl<const WIDE: bool> Scales for OneMin<WIDE> {
    const WIDE: bool = WIDE;
    const BYTES: usize = 2 * WORDS;
    const HEADER: usize = WORDS;
    const HALVES: bool = false;
    const HAS_MIN: bool = true;
    no_multipliers!();
    #[inline(always)]
    unsafe fn step<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 steps.
        unsafe { S::load_bf16(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scales<S: Isa>((): (), scales: *const u8) -> [S::I; 2] {
        // SAFETY: 16 scales.
        unsafe { [S::load_i16(scales); 2] }
    }
    #[inline(always)]
    unsafe fn mins<S: Isa>((): (), scales: *const u8) -> [S::I; 2] {
        // SAFETY: 16 mins behind them.
        unsafe { [S::load_i16(scales.add(WORDS)); 2] }
    }
}

impl Scales for SignedScale {
    const BYTES: usize = BYTES;
    const HEADER: usize = WORDS;
    const HALVES: bool = false;
    no_multipliers!();
    no_mins!();
    #[inline(always)]
    unsafe fn step<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 halves.
        unsafe { S::load_f16(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scales<S: Isa>((): (), scales: *const u8) -> [S::I; 2] {
        // SAFETY: 16 bytes.
        unsafe { [S::load_i8(scales); 2] }
    }
}

impl Scales for SignedHalves {
    const PAIRED: bool = true;
    const BYTES: usize = 2 * BYTES;
    const HEADER: usize = WORDS;
    const HALVES: bool = true;
    no_multipliers!();
    no_mins!();
    #[inline(always)]
    unsafe fn factors<S: Isa>((): (), scales: *const u8) -> ([S::I; 2], S::I) {
        // SAFETY: 32 bytes.
        unsafe {
            let halves = [S::load_factor(scales), S::load_factor(scales.add(BYTES))];
            (halves, S::splat_i(0))
        }
    }
    #[inline(always)]
    unsafe fn step<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 halves.
        unsafe { S::load_f16(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scales<S: Isa>((): (), scales: *const u8) -> [S::I; 2] {
        // SAFETY: 32 bytes.
        unsafe { [S::load_i8(scales), S::load_i8(scales.add(BYTES))] }
    }
}

/// The multipliers of scales and of mins, behind the steps.
#[inline(always)]
unsafe fn two_multipliers<S: Isa>(header: *const u8) -> [S::I; 2] {
    // SAFETY: two times 16 words behind the steps.
    unsafe {
        let mins = S::load_i16(header.add(3 * WORDS));
        [S::load_i16(header.add(2 * WORDS)), mins]
    }
}

/// `byte * multiplier / 128`, to the nearest, half up.
#[inline(always)]
unsafe fn multiplied<S: Isa>(byte: S::I, multiplier: S::I) -> S::I {
    // SAFETY: register arithmetic.
    unsafe { S::sar7_i(S::mul_add_small(S::splat_i(64), multiplier, byte)) }
}

impl<const CENTER: i32> Scales for ScaleMin<CENTER> {
    const PAIRED: bool = true;
    const NEVER_NEGATIVE: bool = true;
    const BYTES: usize = 2 * BYTES;
    const HEADER: usize = 4 * WORDS;
    const HALVES: bool = false;
    const HAS_MIN: bool = true;
    type Multipliers<S: Isa> = [S::I; 2];
    #[inline(always)]
    unsafe fn paired<S: Isa>([scale, min]: [S::I; 2]) -> [S::I; 2] {
        // SAFETY: register arithmetic.
        unsafe { [S::factor(scale), S::factor(min)] }
    }
    #[inline(always)]
    unsafe fn factors<S: Isa>([scale, min]: [S::I; 2], scales: *const u8) -> ([S::I; 2], S::I) {
        // SAFETY: 16 bytes of scales, of 6 bits, and 16 of mins.
        unsafe {
            let scale = S::multiplied_factor(scales, scale);
            let min = S::multiplied_factor(scales.add(BYTES), min);
            ([scale; 2], min)
        }
    }
    #[inline(always)]
    unsafe fn multipliers<S: Isa>(header: *const u8) -> [S::I; 2] {
        // SAFETY: passed on.
        unsafe { two_multipliers::<S>(header) }
    }
    #[inline(always)]
    unsafe fn step<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 steps.
        unsafe { S::load(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scales<S: Isa>([multiplier, _]: [S::I; 2], scales: *const u8) -> [S::I; 2] {
        // SAFETY: 16 bytes.
        unsafe { [multiplied::<S>(S::load_u8(scales), multiplier); 2] }
    }
    #[inline(always)]
    unsafe fn mins<S: Isa>(multipliers: [S::I; 2], scales: *const u8) -> [S::I; 2] {
        // SAFETY: 16 more bytes.
        unsafe {
            let min = multiplied::<S>(S::load_u8(scales.add(BYTES)), multipliers[1]);
            if CENTER == 0 {
                return [min; 2];
            }
            let [scale, _] = Self::scales::<S>(multipliers, scales);
            [S::add_i(min, S::shl3_i(scale)); 2]
        }
    }
}

impl Scales for NibbleHalves {
    const NEVER_NEGATIVE: bool = true;
    const BYTES: usize = 2 * BYTES;
    const HEADER: usize = 4 * WORDS;
    const HALVES: bool = true;
    const HAS_MIN: bool = true;
    type Multipliers<S: Isa> = [S::I; 2];
    #[inline(always)]
    unsafe fn multipliers<S: Isa>(header: *const u8) -> [S::I; 2] {
        // SAFETY: passed on.
        unsafe { two_multipliers::<S>(header) }
    }
    #[inline(always)]
    unsafe fn step<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 steps.
        unsafe { S::load(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scales<S: Isa>([multiplier, _]: [S::I; 2], scales: *const u8) -> [S::I; 2] {
        // SAFETY: 32 bytes.
        unsafe {
            let mask = S::splat_i(15);
            let [first, second] = [S::load_u8(scales), S::load_u8(scales.add(BYTES))];
            [
                multiplied::<S>(S::and_i(first, mask), multiplier),
                multiplied::<S>(S::and_i(second, mask), multiplier),
            ]
        }
    }
    #[inline(always)]
    unsafe fn mins<S: Isa>([_, multiplier]: [S::I; 2], scales: *const u8) -> [S::I; 2] {
        // SAFETY: 32 bytes.
        unsafe {
            let [first, second] = [S::load_u8(scales), S::load_u8(scales.add(BYTES))];
            [
                multiplied::<S>(S::shr4_i(first), multiplier),
                multiplied::<S>(S::shr4_i(second), multiplier),
            ]
        }
    }
}

/// Extra work of a product of a packed type, apart from one scale for a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Min,
    Halves,
    HalvesMin,
    Wide,
    WideMin,
}

impl Kind {
    /// Number of variants.
    pub(crate) const COUNT: usize = 6;

    const fn of<F: Format>() -> Self {
        match (F::S::WIDE, F::S::HALVES, F::S::HAS_MIN) {
            (true, _, false) => Self::Wide,
            (true, _, true) => Self::WideMin,
            (_, false, false) => Self::Plain,
            (_, false, true) => Self::Min,
            (_, true, false) => Self::Halves,
            (_, true, true) => Self::HalvesMin,
        }
    }
}

/// A packed type: its planes and its scales.
pub(crate) trait Format {
    type P: Planes;
    type S: Scales;
    /// Whether the dot product of a chunk, or of each half where these have scales, with either
    /// byte of activations has 16 bits.
    const SMALL: bool = {
        let columns = if Self::S::HALVES { 16 } else { 32 };
        !Self::S::WIDE && Self::P::LARGEST * 127 * columns <= i16::MAX as i32
    };
    /// Whether products can take pairs of columns times their scales ([`Isa::dot_scaled`]): of
    /// weights that are never negative as they are stored.
    const PAIRED: bool = Self::S::PAIRED && !Self::P::SIGNED;
    const LAYOUT: Layout = Layout::new(Self::P::BYTES, Self::S::BYTES, Self::S::HEADER);
}

/// Amount that kernels take off the integers of planes beyond the offset in
/// [`Chunk`](crate::stored::Chunk). Where nibbles are never negative 8 is taken off all the same,
/// so that dot products have 16 bits. Then 8 times the scale is added to the min.
pub(crate) const fn center(block_type: paceline_base::BlockType) -> i32 {
    use paceline_base::BlockType;
    match block_type {
        BlockType::Q4_1 | BlockType::AFFINE4_F16 | BlockType::AFFINE4_BF16 | BlockType::Q4_K => 8,
        _ => 0,
    }
}

/// A type per packed format, and the block types that are packed so.
macro_rules! formats {
    ($($name:ident = $($block:ident)|+: $planes:ty, $scales:ty;)*) => {
        $(#[derive(Debug)]
        #[allow(non_camel_case_types, reason = "the names are the formats' own")]
        pub(crate) struct $name;
        impl Format for $name {
            type P = $planes;
            type S = $scales;
        })*

        /// The kind of a quantised type, `None` for floats.
        pub(crate) fn kind(block_type: paceline_base::BlockType) -> Option<Kind> {
            use paceline_base::BlockType;
            match block_type.computed() {
                $($(BlockType::$block)|+ => Some(Kind::of::<$name>()),)*
                _ => None,
            }
        }

        /// The layout of a quantised type, `None` for floats.
        pub(crate) fn layout(block_type: paceline_base::BlockType) -> Option<Layout> {
            use paceline_base::BlockType;
            match block_type.computed() {
                $($(BlockType::$block)|+ => Some($name::LAYOUT),)*
                _ => None,
            }
        }
    };
}

formats! {
    Q4_0 = Q4_0: Nibbles<8>, One;
    Q4_1 = Q4_1 | AFFINE4_F16 | AFFINE4_BF16: Nibbles<8>, OneMin;
    Q5_0 = Q5_0: FiveBits<16>, One;
    Q5_1 = Q5_1 | AFFINE5_F16 | AFFINE5_BF16: FiveBits<0>, OneMin;
    Q8_0 = Q8_0: EightBits, One<true>;
    IQ4_NL = IQ4_NL: Codes<Iq4>, One<true>;
    Q2_K = Q2_K: TwoBits, NibbleHalves;
    Q3_K = Q3_K: ThreeBits, SignedHalves;
    Q4_K = Q4_K: Nibbles<8>, ScaleMin<8>;
    Q5_K = Q5_K: FiveBits<0>, ScaleMin<0>;
    Q6_K = Q6_K: SixBits, SignedHalves;
    IQ4_XS = IQ4_XS: Codes<Iq4>, SignedScale;
    AFFINE2 = AFFINE2_F16 | AFFINE2_BF16: TwoBits, OneMin;
    AFFINE3 = AFFINE3_F16 | AFFINE3_BF16: ThreeBits, OneMin;
    AFFINE6 = AFFINE6_F16 | AFFINE6_BF16: SixBits, OneMin<true>;
    AFFINE8 = AFFINE8_F16 | AFFINE8_BF16: EightBits, OneMin<true>;
    IQ2_XXS = IQ2_XXS: GridOfEights<Iq2Xxs, 256>, Odd<false, 8>;
    IQ2_XS = IQ2_XS: GridOfEights<Iq2Xs, 512>, Odd<true, 8>;
    IQ2_S = IQ2_S: GridOfEights<Iq2S, 1024>, Odd<true, 8>;
    IQ3_XXS = IQ3_XXS: GridOfFours<Iq3Xxs, 256>, Odd<false, 4>;
    IQ3_S = IQ3_S: GridOfFours<Iq3S, 512>, Odd<false, 1>;
    MXFP4 = MXFP4: Codes<Floats4>, One;
}
