//! Panels of bf16, for AMX's products of these: exact, so the same bits as products of integers.
//!
//! A weight with its integer scale and either byte of an activation are whole numbers of 8 bits, so
//! they are bf16; their products and sums are whole too, and f32 has them exactly as long as they
//! stay below 2^24 ([`Exact`]). One accumulator then takes both bytes, and what comes out is
//! `f32(D)` of [`crate::matmul`]: neither integers to put together nor to convert, which with tiles
//! of bytes costs more than the products. Where only the sums of each byte are exact they have an
//! accumulator each, and one addition rounds their sum once, as the conversion of `D` does. So too
//! for weights of up to 13 bits, which are two bf16: there the second times low bytes is apart.
//!
//! Up to four tiles of results are *in turn*: chunks of a group with a tile of rows. With each
//! product that is started the tile from half a turn before is stored, and sums are made of the one
//! from a whole turn before: a tile that is stored right behind its product holds up the next one
//! (57 cycles a product instead of 19, measured on an Intel Xeon), and so do results that are read
//! right behind their store, or while others are stored a multiple of 4 KiB away.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::batch::factors::Min;
use crate::batch::registers::{Registers, TILE_BYTES};
use crate::batch::rows::{TILE_ROWS, TileMeta};
use crate::batch::words::{self, PanelChunk};
use crate::batch::{CHUNK_BYTES, GROUP_SUMS, LEVEL_LEN, Segment, Unpack, carries};
use crate::formats::{Exact, Format, Planes, Scales};
use crate::isa::{Floats, Isa, LANES};

/// Rows from which panels pay: a whole tile.
pub(crate) const FROM: usize = TILE_ROWS;
/// Tiles of results.
const TILES: usize = 4;

/// Unpacks chunks of a group of format `F`, each in one place or, in [`Exact::Parts`], in two.
///
/// # Safety
/// Features of `S`; the pointers of `args` cover the chunks.
#[inline(always)]
pub(crate) unsafe fn unpack<S: Floats, F: Format>(args: Unpack) {
    // SAFETY: passed on.
    unsafe {
        match const { (Exact::of::<F>(), small::<F>()) } {
            (Exact::Parts, _) => {
                words::unpack_as::<S, F, 2>(args, |w| S::parts(w).map(|w| S::as_bf16(w)));
            }
            (_, true) => {
                words::unpack_as::<S, F, 1>(args, |w| [S::small_as_bf16(w, F::P::OFFSET > 0)])
            }
            _ => words::unpack_as::<S, F, 1>(args, |w| [S::as_bf16(w)]),
        }
    }
}

/// Whether weights of a format, with their integer scales, have 5 bits, of either kind that
/// [`Floats::small_as_bf16`] takes.
const fn small<F: Format>() -> bool {
    let most = if F::P::OFFSET > 0 { 16 } else { 31 };
    !F::P::SIGNED && !F::S::HALVES && F::P::LARGEST <= most
}

/// Takes the registers for products of panels: once for many of them, since the first product
/// behind a configuration waits for it.
///
/// # Safety
/// Features of `R`.
#[inline(always)]
pub(crate) unsafe fn begin<R: Registers>() {
    // SAFETY: passed on. What is forgotten is in the processor, or nothing.
    std::mem::forget(unsafe { R::configured() });
}

/// Gives them back.
///
/// # Safety
/// Features of `R`; behind [`begin`].
#[inline(always)]
pub(crate) unsafe fn end<R: Registers>() {
    // SAFETY: passed on.
    unsafe { R::left().release() };
}

/// Multiplies a panel with activations of `BYTES` bytes, two of which are added `APART` or
/// together, by weights in `PARTS` parts, of which the second times low bytes is apart. A last tile
/// is a whole one too: activations have room for it, and so have sums.
///
/// # Safety
/// Features of `S`, and `R`; between [`begin`] and [`end`] of `R`; the segment's pointers cover its
/// chunks, rows and sums.
#[inline(always)]
pub(crate) unsafe fn multiply<
    S: Isa,
    R: Registers,
    M: Min,
    const BYTES: usize,
    const PARTS: usize,
    const APART: bool,
>(
    segment: &Segment<'_>,
) {
    // SAFETY: passed on.
    unsafe {
        let tiles = Tiles::<S, R, M, BYTES, PARTS, APART>::new(segment);
        match segment.chunks % TILES {
            0 if !APART => tiles.run::<TILES>(),
            0 | 2 => tiles.run::<2>(),
            _ => tiles.run::<1>(),
        }
    }
}

/// Does the block for each row of a tile, `$i` being a constant: sums stay in registers, where a
/// loop that is not unrolled keeps them in memory.
macro_rules! each_row {
    ($i:ident $do:block) => {
        each_row!(@ $i $do, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident $do:block, $($row:literal)*) => {
        $({
            const $i: usize = $row;
            $do
        })*
    };
}

/// Neighbouring chunks of a group with a tile of rows, and where their operands lie.
#[derive(Clone, Copy)]
struct Turn {
    row: usize,
    group: usize,
    first: usize,
    floats: *const u8,
    metas: *const TileMeta,
    weights: *const u8,
    sums: *mut f32,
}

/// Configured tiles and their way through the rows, a tile of them at a time.
struct Tiles<'a, S, R, M, const BYTES: usize, const PARTS: usize, const APART: bool> {
    registers: R,
    segment: &'a Segment<'a>,
    results: Results,
    _types: PhantomData<(S, M)>,
}

#[repr(C, align(64))]
struct Results(MaybeUninit<[[[f32; LANES]; TILE_ROWS]; TILES]>);

impl<'a, S, R, M, const BYTES: usize, const PARTS: usize, const APART: bool>
    Tiles<'a, S, R, M, BYTES, PARTS, APART>
where
    S: Isa,
    R: Registers,
    M: Min,
{
    /// Bytes of a chunk's activations of a tile.
    const FLOATS: usize = BYTES * TILE_BYTES;
    /// Bytes of its weights.
    const WEIGHTS: usize = PARTS * CHUNK_BYTES;

    #[inline(always)]
    unsafe fn new(segment: &'a Segment<'a>) -> Self {
        Self {
            // SAFETY: passed on.
            registers: unsafe { R::left() },
            segment,
            results: Results(MaybeUninit::uninit()),
            _types: PhantomData,
        }
    }

    /// All turns, of `C` chunks each.
    #[inline(always)]
    unsafe fn run<const C: usize>(mut self) {
        let mut turn = self.first();
        // SAFETY: by the caller's promise; sums are made of what was stored.
        unsafe {
            self.start::<C, 0, false>(turn);
            if C == 2 {
                self.start::<C, 1, true>(turn);
            }
            if C == 4 {
                self.start::<C, 1, false>(turn);
                self.start::<C, 2, true>(turn);
                self.start::<C, 3, true>(turn);
            }
            loop {
                let next = self.after::<C>(turn);
                if next.row >= self.segment.rows {
                    break;
                }
                self.follow::<C>(turn, next);
                turn = next;
            }
            self.store_last::<C>();
            let mut sums = self.sums(turn);
            self.add::<C, 0>(turn, &mut sums);
            if C > 1 {
                self.add::<C, 1>(turn, &mut sums);
            }
            if C > 2 {
                self.add::<C, 2>(turn, &mut sums);
                self.add::<C, 3>(turn, &mut sums);
            }
            self.keep::<C>(turn, sums);
        }
    }

    /// Starts the products of the turn behind `turn` and makes its sums.
    #[inline(always)]
    unsafe fn follow<const C: usize>(&mut self, turn: Turn, next: Turn) {
        // SAFETY: passed on.
        unsafe {
            let mut sums = self.sums(turn);
            self.start::<C, 0, true>(next);
            self.add::<C, 0>(turn, &mut sums);
            if C > 1 {
                self.start::<C, 1, true>(next);
                self.add::<C, 1>(turn, &mut sums);
            }
            if C > 2 {
                self.start::<C, 2, true>(next);
                self.add::<C, 2>(turn, &mut sums);
                self.start::<C, 3, true>(next);
                self.add::<C, 3>(turn, &mut sums);
            }
            self.keep::<C>(turn, sums);
        }
    }

    #[inline(always)]
    fn first(&self) -> Turn {
        let segment = self.segment;
        // SAFETY: the segment's pointers cover its chunks and rows, as `multiply` is promised.
        let (floats, metas) = unsafe { segment.x.floats(segment.first, segment.first_chunk) };
        Turn {
            row: 0,
            group: 0,
            first: 0,
            floats,
            metas,
            weights: segment.panel,
            sums: segment.sums,
        }
    }

    /// The turn after `turn`: over chunks, then groups, then tiles of rows. Behind the last one its
    /// row is none of the segment's, and its pointers lead nowhere.
    #[inline(always)]
    fn after<const C: usize>(&self, mut turn: Turn) -> Turn {
        let segment = self.segment;
        turn.first += C;
        turn.floats = turn.floats.wrapping_add(C * Self::FLOATS);
        turn.metas = turn.metas.wrapping_add(C);
        turn.weights = turn.weights.wrapping_add(C * Self::WEIGHTS);
        if turn.first == segment.chunks {
            turn.first = 0;
            turn.group += 1;
            turn.floats = turn.floats.wrapping_sub(segment.chunks * Self::FLOATS);
            turn.metas = turn.metas.wrapping_sub(segment.chunks);
            let unused = segment.most - segment.chunks;
            turn.weights = turn.weights.wrapping_add(unused * Self::WEIGHTS);
            turn.sums = turn.sums.wrapping_add(GROUP_SUMS);
        }
        if turn.group == segment.groups {
            let chunks = segment.x.tile_chunks();
            turn.group = 0;
            turn.row += TILE_ROWS;
            turn.floats = turn.floats.wrapping_add(chunks * Self::FLOATS);
            turn.metas = turn.metas.wrapping_add(chunks);
            turn.weights = segment.panel;
            turn.sums = segment.sums.wrapping_add(turn.row * LANES);
        }
        turn
    }

    /// Starts the products of chunk `K` of a turn, and stores the results from half a turn before
    /// if there are any.
    #[inline(always)]
    unsafe fn start<const C: usize, const K: usize, const STORE: bool>(&mut self, turn: Turn) {
        // SAFETY: passed on.
        unsafe {
            match (APART, C, K) {
                (false, 4, 0) => self.chunk::<K, 0, 0, 2, STORE>(turn),
                (false, 4, 1) => self.chunk::<K, 1, 1, 3, STORE>(turn),
                (false, 4, 2) => self.chunk::<K, 2, 2, 0, STORE>(turn),
                (false, 4, _) => self.chunk::<K, 3, 3, 1, STORE>(turn),
                (false, 2, 0) => self.chunk::<K, 0, 0, 2, STORE>(turn),
                (false, 2, _) => self.chunk::<K, 2, 2, 0, STORE>(turn),
                (true, 2, 0) => self.chunk::<K, 0, 1, 2, STORE>(turn),
                (true, 2, _) => self.chunk::<K, 2, 3, 0, STORE>(turn),
                (false, ..) => self.chunk::<K, 0, 0, 0, STORE>(turn),
                (true, ..) => self.chunk::<K, 0, 1, 0, STORE>(turn),
            }
        }
    }

    /// Starts the products of chunk `K`, whose bytes have tiles `H` and `L`, and stores from tile
    /// `O` on as many.
    #[inline(always)]
    unsafe fn chunk<const K: usize, const H: u8, const L: u8, const O: u8, const STORE: bool>(
        &mut self,
        turn: Turn,
    ) {
        let results = self.results();
        let registers = &mut self.registers;
        // SAFETY: by the caller's promise.
        unsafe {
            if PARTS == 1 {
                registers.load::<6, K, CHUNK_BYTES>(turn.weights);
            } else {
                registers.load::<6, K, { 2 * CHUNK_BYTES }>(turn.weights);
            }
            if BYTES == 1 {
                registers.load::<4, K, TILE_BYTES>(turn.floats);
            } else {
                registers.load::<4, K, { 2 * TILE_BYTES }>(turn.floats);
            }
            if STORE {
                registers.store::<O>(results);
                if H != L {
                    registers.store_next::<O>(results);
                }
            }
            registers.zero::<H>();
            registers.dot::<H, 4, 6>();
            if PARTS == 2 {
                registers.load::<7, K, { 2 * CHUNK_BYTES }>(turn.weights.add(CHUNK_BYTES));
                registers.dot::<H, 4, 7>();
            }
            if BYTES == 1 {
                return;
            }
            registers.load::<5, K, { 2 * TILE_BYTES }>(turn.floats.add(TILE_BYTES));
            if PARTS == 2 {
                registers.dot::<H, 5, 6>();
            }
            if H != L {
                registers.zero::<L>();
            }
            if PARTS == 1 {
                registers.dot::<L, 5, 6>();
            } else {
                registers.dot::<L, 5, 7>();
            }
        }
    }

    /// Stores the last half.
    #[inline(always)]
    unsafe fn store_last<const C: usize>(&mut self) {
        let results = self.results();
        // SAFETY: by the caller's promise.
        unsafe {
            match (APART, C) {
                (true, 1) => {
                    self.registers.store::<0>(results);
                    self.registers.store::<1>(results);
                }
                (false, 1) => self.registers.store::<0>(results),
                (false, 2) => self.registers.store::<2>(results),
                _ => {
                    self.registers.store::<2>(results);
                    self.registers.store::<3>(results);
                }
            }
        }
    }

    /// The sums before a turn.
    #[inline(always)]
    unsafe fn sums(&self, turn: Turn) -> [S::F; TILE_ROWS] {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [S::splat(0.0); TILE_ROWS];
            if !self.segment.fresh || turn.first > 0 {
                each_row!(I { sums[I] = S::load(turn.sums.add(I * LANES)) });
            }
            sums
        }
    }

    /// Writes those behind it: as the leaf's, or, at its end, into the tree as
    /// [`fold`](crate::batch::fold) does.
    #[inline(always)]
    unsafe fn keep<const C: usize>(&self, turn: Turn, mut sums: [S::F; TILE_ROWS]) {
        let mut to = turn.sums;
        // SAFETY: by the caller's promise; levels before the leaf's own were written.
        unsafe {
            if let Some(leaf) = self.segment.ends
                && turn.first + C == self.segment.chunks
            {
                for _ in 0..carries(leaf) {
                    to = to.add(LEVEL_LEN);
                    each_row!(I { sums[I] = S::add(S::load(to.add(I * LANES)), sums[I]) });
                }
                to = to.add(LEVEL_LEN);
            }
            each_row!(I { S::store(to.add(I * LANES), sums[I]) });
        }
    }

    /// Adds the stored results of chunk `K` to its turn's sums.
    #[inline(always)]
    unsafe fn add<const C: usize, const K: usize>(
        &mut self,
        turn: Turn,
        sums: &mut [S::F; TILE_ROWS],
    ) {
        let tile = if C == TILES { K } else { 2 * K };
        // SAFETY: by the caller's promise.
        unsafe {
            let results = self.results().add(tile * TILE_ROWS * LANES);
            let chunk = turn.weights.add(K * Self::WEIGHTS).cast::<PanelChunk>();
            let metas = turn.metas.add(K);
            each_row!(I {
                let meta = (*metas).of(I);
                let mut dot = S::load(results.add(I * LANES));
                if APART {
                    dot = S::add(dot, S::load(results.add((TILE_ROWS + I) * LANES)));
                }
                let inner = M::inner::<S>(dot, &raw const (*chunk).factors, meta);
                sums[I] = S::fma(inner, S::splat(meta.scale), sums[I]);
            });
        }
    }

    /// Results, `(TILES, TILE_ROWS, 16)`.
    #[inline(always)]
    fn results(&mut self) -> *mut f32 {
        (&raw mut self.results).cast()
    }
}
