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
//! | type | planes (value) | per chunk, 16 each | header per 8 chunks | packed / stored |
//! |---|---|---|---|---|
//! | Q4_0 | nibbles (q + 8) | d f16 | | 1.00 |
//! | Q4_1 | nibbles | d, m f16 | | 1.00 |
//! | Q5_0 | nibbles, bits (q + 16) | d f16 | | 1.00 |
//! | Q5_1 | nibbles, bits | d, m f16 | | 1.00 |
//! | Q8_0 | bytes | d f16 | | 1.00 |
//! | IQ4_NL | nibbles (code) | d f16 | | 1.00 |
//! | Q2_K | crumbs | scale + 16 min, u8 x 2 | d, dmin f16 | 1.00 |
//! | Q3_K | crumbs, bits (q + 4) | scale i8 x 2 | d f16 | 1.05 |
//! | Q4_K | nibbles | scale u8, min u8 | d, dmin f16 | 1.03 |
//! | Q5_K | nibbles, bits | scale u8, min u8 | d, dmin f16 | 1.02 |
//! | Q6_K | nibbles, crumbs (q + 32) | scale i8 x 2 | d f16 | 1.01 |
//! | IQ4_XS | nibbles (code) | scale i8 | d f16 | 1.03 |
//! | AFFINE2..8 | of as many bits (8 bits: q - 128) | scale, bias f16 or bf16 | | 1.00 |
//! | MXFP4 | nibbles (code) | scale bf16 | | 1.06 |
//!
//! [`Format`] says how a kernel reads one chunk; [`crate::packed`] writes it.

/// For the methods of [`Scales`] that a format never calls.
macro_rules! unused_scale {
    ($($name:ident($($arg:ident: $in:ty),*) -> $t:ty, $value:expr;)*) => {
        $(#[inline(always)]
        unsafe fn $name<S: Isa>($($arg: $in),*) -> $t {
            // SAFETY: register arithmetic only.
            unsafe { $value }
        })*
    };
}

/// For implementations of [`Scales`] whose blocks have no header.
macro_rules! no_header {
    () => {
        const HEADER: usize = 0;
        type Header<S: Isa> = ();
        #[inline(always)]
        unsafe fn header<S: Isa>(_header: *const u8) {}
    };
}

mod mlx;

use std::marker::PhantomData;

use crate::isa::Isa;
use crate::stored::{CODEBOOK, Chunk};
use mlx::{Affine, Brain, Floats4};

/// Bytes of sixteen halves.
pub(crate) const HALVES: usize = 32;
/// Bytes of sixteen byte-sized scales.
pub(crate) const BYTES: usize = 16;
pub(crate) const NIBBLE_PLANE: usize = 256;
pub(crate) const CRUMB_PLANE: usize = 128;
pub(crate) const BIT_PLANE: usize = 64;
pub(crate) const BYTE_PLANE: usize = 512;
/// Bytes of a cache line, and of the widest load. Apple's lines have 128: two of these.
const LINE: usize = 64;

/// Where the parts of a block of chunks lie; the same for the packer and the kernels:
///
/// ```text
/// header | scales of chunk 0, 1, .. | padding to a cache line | planes of chunk 0, 1, ..
/// ```
///
/// Planes begin at cache lines, so that no load touches two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Chunks of a block; the last block of a group may have fewer.
    pub(crate) per_block: usize,
    /// Bytes that all chunks of a block have in common.
    pub(crate) header: usize,
    /// Bytes of a chunk's scales.
    pub(crate) scales: usize,
    /// Bytes of a chunk's planes.
    pub(crate) planes: usize,
}

/// Offsets within a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) header: usize,
    pub(crate) scales: usize,
    pub(crate) planes: usize,
}

impl Layout {
    /// As many chunks to a block as fill a cache line with their scales.
    const fn legacy(planes: usize, scales: usize) -> Self {
        Self {
            per_block: LINE.div_ceil(scales),
            header: 0,
            scales,
            planes,
        }
    }

    /// A super-block of 256 columns.
    const fn k(planes: usize, scales: usize, header: usize) -> Self {
        Self {
            per_block: 8,
            header,
            scales,
            planes,
        }
    }

    /// Bytes before the planes of a block.
    const fn front(self) -> usize {
        (self.header + self.per_block * self.scales).next_multiple_of(LINE)
    }

    /// Bytes from one block to the next.
    const fn stride(self) -> usize {
        self.front() + self.per_block * self.planes
    }

    /// Where chunk `c` of a group lies.
    #[inline(always)]
    pub(crate) const fn place(self, c: usize) -> Place {
        let (block, within) = (c / self.per_block * self.stride(), c % self.per_block);
        Place {
            header: block,
            scales: block + self.header + within * self.scales,
            planes: block + self.front() + within * self.planes,
        }
    }

    /// Bytes of a chunk with its share of what its block has in common.
    pub(crate) const fn chunk_bytes(self) -> usize {
        self.stride() / self.per_block
    }

    /// Bytes of a group of `chunks` chunks.
    pub(crate) const fn group_bytes(self, chunks: usize) -> usize {
        match chunks % self.per_block {
            0 => chunks / self.per_block * self.stride(),
            rest => chunks / self.per_block * self.stride() + self.front() + rest * self.planes,
        }
    }
}

/// How the eight quads of a chunk are unpacked.
pub(crate) trait Planes {
    /// Bytes at the start of a chunk.
    const BYTES: usize;
    /// Subtracted from each unpacked byte to give the weight.
    const OFFSET: i32;
    /// Whether unpacked bytes are signed (then `OFFSET` is 0), or unsigned and at most 127.
    const SIGNED: bool;
    /// The largest magnitude of a weight, less the offset.
    const LARGEST: i32;
    /// The quads.
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

/// The largest magnitude of some values.
const fn largest_of(values: &[i8]) -> i32 {
    let (mut largest, mut i) = (0, 0);
    while i < values.len() {
        if (values[i] as i32).abs() > largest {
            largest = (values[i] as i32).abs();
        }
        i += 1;
    }
    largest
}

/// What the codes of [`Codes`] stand for.
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
/// Two bits.
#[derive(Debug)]
pub(crate) struct TwoBits;
/// Two bits and a third.
#[derive(Debug)]
pub(crate) struct ThreeBits;
/// Whole signed bytes.
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
    const LARGEST: i32 = largest_of(&T::VALUES);
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
            let (mut low, high) = (nibbles::<S>(chunk), crumbs::<S>(chunk.add(NIBBLE_PLANE)));
            let mut g = 0;
            while g < 8 {
                low[g] = S::or(low[g], S::shl4(high[g]));
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

/// How the scales of a chunk are read.
pub(crate) trait Scales {
    /// Bytes of the scales in a chunk.
    const BYTES: usize;
    /// Bytes of the header of every eight chunks, 0 for none.
    const HEADER: usize;
    /// Whether the two halves of 16 columns have integer scales of their own.
    const HALVES: bool;
    /// The largest magnitude of an integer scale.
    const LARGEST: i32 = 1;
    /// Whether something is added to each weight.
    const HAS_MIN: bool;
    /// What a header holds, as floats: read once for all its chunks.
    type Header<S: Isa>: Copy;
    /// Reads a header.
    unsafe fn header<S: Isa>(header: *const u8) -> Self::Header<S>;
    /// `Chunk::scale` of the 16 rows.
    unsafe fn scale<S: Isa>(header: Self::Header<S>, scales: *const u8) -> S::F;
    /// `Chunk::min` of the 16 rows; called where `HAS_MIN`.
    unsafe fn min<S: Isa>(header: Self::Header<S>, scales: *const u8) -> S::F;
    /// `Chunk::sub` of the 16 rows; called where `HALVES`.
    unsafe fn sub<S: Isa>(scales: *const u8) -> [S::I; 2];
    /// `Chunk::min_sub` of the 16 rows; called where `HALVES` and `HAS_MIN`.
    unsafe fn min_sub<S: Isa>(scales: *const u8) -> [S::I; 2];
}

/// A half per row (`d`).
#[derive(Debug)]
pub(crate) struct D;
/// Two halves per row (`d`, `m`).
#[derive(Debug)]
pub(crate) struct DM;
/// `d * scale` and `-(dmin * min)`, a byte each per row (Q4_K, Q5_K).
#[derive(Debug)]
pub(crate) struct ScaleMin;
/// `d * scale`, a signed byte per row (IQ4_XS).
#[derive(Debug)]
pub(crate) struct SignedScale;
/// `d`, and a signed byte of a magnitude up to `LARGEST` per row and half (Q3_K, Q6_K).
#[derive(Debug)]
pub(crate) struct SignedHalves<const LARGEST: i32>;
/// `d` and `-dmin`, and nibbles of scale and min per row and half (Q2_K).
#[derive(Debug)]
pub(crate) struct NibbleHalves;

/// `d` and `-dmin`, as the packer stores it.
#[inline(always)]
unsafe fn two_halves<S: Isa>(header: *const u8) -> [S::F; 2] {
    // SAFETY: two times 16 halves at `header`.
    unsafe {
        let dmin = S::load_f16(header.add(HALVES).cast());
        [S::load_f16(header.cast()), dmin]
    }
}

impl Scales for D {
    const BYTES: usize = HALVES;
    const HALVES: bool = false;
    const HAS_MIN: bool = false;
    no_header!();
    #[inline(always)]
    unsafe fn scale<S: Isa>(_header: (), scales: *const u8) -> S::F {
        // SAFETY: 16 halves at `scales`.
        unsafe { S::load_f16(scales.cast()) }
    }
    unused_scale! {
        min(_a: Self::Header<S>, _b: *const u8) -> S::F, S::splat(0.0);
        sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
        min_sub(_a: *const u8) -> [S::I; 2], [S::splat_i(0); 2];
    }
}

impl Scales for DM {
    const BYTES: usize = 2 * HALVES;
    const HALVES: bool = false;
    const HAS_MIN: bool = true;
    no_header!();
    #[inline(always)]
    unsafe fn scale<S: Isa>(_header: (), scales: *const u8) -> S::F {
        // SAFETY: 16 halves at `scales`.
        unsafe { S::load_f16(scales.cast()) }
    }
    #[inline(always)]
    unsafe fn min<S: Isa>(_header: (), scales: *const u8) -> S::F {
        // SAFETY: 16 more halves.
        unsafe { S::load_f16(scales.add(HALVES).cast()) }
    }
    unused_scale! {
        sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
        min_sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
    }
}

impl Scales for ScaleMin {
    const BYTES: usize = 2 * BYTES;
    const HEADER: usize = 2 * HALVES;
    const HALVES: bool = false;
    const HAS_MIN: bool = true;
    type Header<S: Isa> = [S::F; 2];
    #[inline(always)]
    unsafe fn header<S: Isa>(header: *const u8) -> [S::F; 2] {
        // SAFETY: passed on.
        unsafe { two_halves::<S>(header) }
    }
    #[inline(always)]
    unsafe fn scale<S: Isa>([d, _]: [S::F; 2], scales: *const u8) -> S::F {
        // SAFETY: 16 bytes at `scales`.
        unsafe { S::mul(d, S::to_f(S::load_u8(scales))) }
    }
    #[inline(always)]
    unsafe fn min<S: Isa>([_, dmin]: [S::F; 2], scales: *const u8) -> S::F {
        // SAFETY: 16 more bytes.
        unsafe { S::mul(dmin, S::to_f(S::load_u8(scales.add(BYTES)))) }
    }
    unused_scale! {
        sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
        min_sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
    }
}

impl Scales for SignedScale {
    const BYTES: usize = BYTES;
    const HEADER: usize = HALVES;
    const HALVES: bool = false;
    const HAS_MIN: bool = false;
    type Header<S: Isa> = S::F;
    #[inline(always)]
    unsafe fn header<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 halves at `header`.
        unsafe { S::load_f16(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scale<S: Isa>(d: S::F, scales: *const u8) -> S::F {
        // SAFETY: 16 bytes at `scales`.
        unsafe { S::mul(d, S::to_f(S::load_i8(scales))) }
    }
    unused_scale! {
        min(_a: Self::Header<S>, _b: *const u8) -> S::F, S::splat(0.0);
        sub(_a: *const u8) -> [S::I; 2], [S::splat_i(1); 2];
        min_sub(_a: *const u8) -> [S::I; 2], [S::splat_i(0); 2];
    }
}

impl<const LARGEST: i32> Scales for SignedHalves<LARGEST> {
    const LARGEST: i32 = LARGEST;
    const BYTES: usize = 2 * BYTES;
    const HEADER: usize = HALVES;
    const HALVES: bool = true;
    const HAS_MIN: bool = false;
    type Header<S: Isa> = S::F;
    #[inline(always)]
    unsafe fn header<S: Isa>(header: *const u8) -> S::F {
        // SAFETY: 16 halves at `header`.
        unsafe { S::load_f16(header.cast()) }
    }
    #[inline(always)]
    unsafe fn scale<S: Isa>(d: S::F, _scales: *const u8) -> S::F {
        d
    }
    #[inline(always)]
    unsafe fn sub<S: Isa>(scales: *const u8) -> [S::I; 2] {
        // SAFETY: 32 bytes at `scales`.
        unsafe { [S::load_i8(scales), S::load_i8(scales.add(BYTES))] }
    }
    unused_scale! {
        min(_a: Self::Header<S>, _b: *const u8) -> S::F, S::splat(0.0);
        min_sub(_a: *const u8) -> [S::I; 2], [S::splat_i(0); 2];
    }
}

impl Scales for NibbleHalves {
    const LARGEST: i32 = 15;
    const BYTES: usize = 2 * BYTES;
    const HEADER: usize = 2 * HALVES;
    const HALVES: bool = true;
    const HAS_MIN: bool = true;
    type Header<S: Isa> = [S::F; 2];
    #[inline(always)]
    unsafe fn header<S: Isa>(header: *const u8) -> [S::F; 2] {
        // SAFETY: passed on.
        unsafe { two_halves::<S>(header) }
    }
    #[inline(always)]
    unsafe fn scale<S: Isa>([d, _]: [S::F; 2], _scales: *const u8) -> S::F {
        d
    }
    #[inline(always)]
    unsafe fn min<S: Isa>([_, dmin]: [S::F; 2], _scales: *const u8) -> S::F {
        dmin
    }
    #[inline(always)]
    unsafe fn sub<S: Isa>(scales: *const u8) -> [S::I; 2] {
        // SAFETY: 32 bytes at `scales`.
        unsafe {
            let mask = S::splat_i(15);
            let [low, high] = [S::load_u8(scales), S::load_u8(scales.add(BYTES))];
            [S::and_i(low, mask), S::and_i(high, mask)]
        }
    }
    #[inline(always)]
    unsafe fn min_sub<S: Isa>(scales: *const u8) -> [S::I; 2] {
        // SAFETY: 32 bytes at `scales`.
        unsafe {
            let [low, high] = [S::load_u8(scales), S::load_u8(scales.add(BYTES))];
            [S::shr4_i(low), S::shr4_i(high)]
        }
    }
}

/// What a product of a packed type has to do beside one scale for a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Min,
    Halves,
    HalvesMin,
}

impl Kind {
    /// How many there are.
    pub(crate) const COUNT: usize = 4;

    const fn of<F: Format>() -> Self {
        match (F::S::HALVES, F::S::HAS_MIN) {
            (false, false) => Self::Plain,
            (false, true) => Self::Min,
            (true, false) => Self::Halves,
            (true, true) => Self::HalvesMin,
        }
    }
}

/// How far products of bf16, added in f32, are exact: as long as all sums stay below 2^24. An
/// activation is 128 times its high byte and its low byte, at most 128 * 127 + 64 together
/// ([`crate::activations`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exact {
    /// Over a chunk.
    Chunk,
    /// Over a chunk for each byte of the activations by itself.
    Byte,
    /// A weight is, with its integer scale, no bf16, but two: `128 u` and `v`, of at most 32 and
    /// 127 by magnitude. Over a chunk low bytes times `v` are exact, and all else together, whose
    /// terms are multiples of 128: those are at most 32 * (128 * 32 * 127 + 32 * 64) where `u` is
    /// 32 and `v` is 0, and less where `u` is less.
    Parts,
}

impl Exact {
    /// How many there are.
    pub(crate) const COUNT: usize = 3;

    /// Of a format.
    pub(crate) const fn of<F: Format>() -> Self {
        let largest = F::P::LARGEST * F::S::LARGEST;
        match () {
            () if Chunk::LEN as i32 * (128 * 127 + 64) * largest < 1 << 24 => Self::Chunk,
            () if largest <= 256 => Self::Byte,
            () if largest <= 128 * 32 => Self::Parts,
            () => panic!("weights of more than 12 bits"),
        }
    }
}

/// A packed type: its planes and its scales.
pub(crate) trait Format {
    type P: Planes;
    type S: Scales;
    const LAYOUT: Layout = if Self::S::HEADER == 0 {
        Layout::legacy(Self::P::BYTES, Self::S::BYTES)
    } else {
        Layout::k(Self::P::BYTES, Self::S::BYTES, Self::S::HEADER)
    };
}

macro_rules! formats {
    ($($name:ident: $planes:ty, $scales:ty;)*) => {
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
            match block_type {
                $(BlockType::$name => Some(Kind::of::<$name>()),)*
                BlockType::F32 | BlockType::F16 | BlockType::BF16 => None,
            }
        }

        /// How far products of a quantised type are exact in bf16, `None` for floats.
        pub(crate) fn exact(block_type: paceline_base::BlockType) -> Option<Exact> {
            use paceline_base::BlockType;
            match block_type {
                $(BlockType::$name => Some(Exact::of::<$name>()),)*
                BlockType::F32 | BlockType::F16 | BlockType::BF16 => None,
            }
        }

        /// The layout of a quantised type, `None` for floats.
        pub(crate) fn layout(block_type: paceline_base::BlockType) -> Option<Layout> {
            use paceline_base::BlockType;
            match block_type {
                $(BlockType::$name => Some($name::LAYOUT),)*
                BlockType::F32 | BlockType::F16 | BlockType::BF16 => None,
            }
        }
    };
}

formats! {
    Q4_0: Nibbles<8>, D;
    Q4_1: Nibbles<0>, DM;
    Q5_0: FiveBits<16>, D;
    Q5_1: FiveBits<0>, DM;
    Q8_0: EightBits, D;
    IQ4_NL: Codes<Iq4>, D;
    Q2_K: TwoBits, NibbleHalves;
    Q3_K: ThreeBits, SignedHalves<32>;
    Q4_K: Nibbles<0>, ScaleMin;
    Q5_K: FiveBits<0>, ScaleMin;
    Q6_K: SixBits, SignedHalves<128>;
    IQ4_XS: Codes<Iq4>, SignedScale;
    AFFINE2_F16: TwoBits, Affine<0, false>;
    AFFINE2_BF16: TwoBits, Affine<0, true>;
    AFFINE3_F16: ThreeBits, Affine<4, false>;
    AFFINE3_BF16: ThreeBits, Affine<4, true>;
    AFFINE4_F16: Nibbles<0>, Affine<0, false>;
    AFFINE4_BF16: Nibbles<0>, Affine<0, true>;
    AFFINE5_F16: FiveBits<0>, Affine<0, false>;
    AFFINE5_BF16: FiveBits<0>, Affine<0, true>;
    AFFINE6_F16: SixBits, Affine<32, false>;
    AFFINE6_BF16: SixBits, Affine<32, true>;
    AFFINE8_F16: EightBits, Affine<128, false>;
    AFFINE8_BF16: EightBits, Affine<128, true>;
    MXFP4: Codes<Floats4>, Brain;
}
