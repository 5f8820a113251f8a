//! Panels of bf16, for AMX's products of these: exact, so the same bits as products of integers.
//!
//! A weight with its integer scale and either byte of an activation are whole numbers of 8 bits, so
//! they are bf16; their products and sums are whole too, and f32 has them exactly as long as they
//! stay below 2^24 ([`Exact`]). One accumulator then takes both bytes, and what comes out is
//! `f32(D)` of [`crate::matmul`]: neither integers to put together nor to convert, which with tiles
//! of bytes costs more than the products. Where only the sums of each byte are exact they have an
//! accumulator each, and one addition rounds their sum once, as the conversion of `D` does.
//!
//! Up to four tiles of results are *in turn*: chunks of a group with a tile of rows. While one turn
//! is multiplied the one before is stored, tile by tile, since a tile that is stored right behind
//! its product holds up the next one (57 cycles a product instead of 19, measured on an Intel
//! Xeon).

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::batch::bytes::{self, LINE, TILE_ROWS};
use crate::batch::factors::Min;
use crate::batch::registers::Registers;
use crate::batch::words::{self, PanelChunk};
use crate::batch::{Segment, Unpack};
use crate::formats::{Exact, Format, Planes, Scales};
use crate::isa::{Bytes, Floats, Isa, LANES};

/// Tiles of results.
const TILES: usize = 4;

/// Unpacks chunks of a group of format `F`, as bytes where bf16 is not exact.
///
/// # Safety
/// Features of `S`; the pointers of `args` cover the chunks.
#[inline(always)]
pub(crate) unsafe fn unpack<S: Floats + Bytes, F: Format>(args: Unpack) {
    // SAFETY: passed on.
    unsafe {
        match const { (Exact::of::<F>(), small::<F>()) } {
            (Exact::No, _) => bytes::unpack::<S, F>(args),
            (_, true) => {
                words::unpack_as::<S, F>(args, |w| S::small_as_bf16(w, F::P::OFFSET > 0));
            }
            _ => words::unpack_as::<S, F>(args, |w| S::as_bf16(w)),
        }
    }
}

/// Whether weights of a format, with their integer scales, have 5 bits, of either kind that
/// [`Floats::small_as_bf16`] takes.
const fn small<F: Format>() -> bool {
    let most = if F::P::OFFSET > 0 { 16 } else { 31 };
    !F::P::SIGNED && !F::S::HALVES && F::P::LARGEST <= most
}

/// Multiplies a panel with activations of `BYTES` bytes, two of which are added `APART` or
/// together.
///
/// # Safety
/// Features of `S`, and `R`; the segment's pointers cover its chunks, rows and sums.
#[inline(always)]
pub(crate) unsafe fn multiply<
    S: Isa,
    R: Registers,
    M: Min,
    const BYTES: usize,
    const APART: bool,
>(
    segment: &Segment<'_>,
) {
    let whole = segment.rows / TILE_ROWS * TILE_ROWS;
    // SAFETY: tiles stay within the rows.
    unsafe {
        if whole > 0 {
            Tiles::<S, R, M, BYTES, APART>::new(segment, 0..whole, TILE_ROWS).run::<true>();
        }
        if whole < segment.rows {
            let rest = whole..segment.rows;
            Tiles::<S, R, M, BYTES, APART>::new(segment, rest.clone(), rest.len()).run::<false>();
        }
    }
}

/// Neighbouring chunks of a group with a tile of rows.
#[derive(Clone, Copy)]
struct Turn {
    row: usize,
    group: usize,
    first: usize,
    chunks: usize,
}

/// Configured tiles and their way through rows `rows`, `tile_rows` at a time.
struct Tiles<'a, S, R, M, const BYTES: usize, const APART: bool> {
    registers: R,
    segment: &'a Segment<'a>,
    rows: Range<usize>,
    tile_rows: usize,
    results: Results,
    _types: PhantomData<(S, M)>,
}

#[repr(C, align(64))]
struct Results(MaybeUninit<[[[f32; LANES]; TILE_ROWS]; TILES]>);

impl<'a, S: Isa, R: Registers, M: Min, const BYTES: usize, const APART: bool>
    Tiles<'a, S, R, M, BYTES, APART>
{
    /// Tiles of results to a chunk.
    const EACH: usize = if APART { 2 } else { 1 };

    #[inline(always)]
    unsafe fn new(segment: &'a Segment<'a>, rows: Range<usize>, tile_rows: usize) -> Self {
        Self {
            // SAFETY: passed on.
            registers: unsafe { R::configured(tile_rows, LINE) },
            segment,
            rows,
            tile_rows,
            results: Results(MaybeUninit::uninit()),
            _types: PhantomData,
        }
    }

    /// All turns; `FULL` when tiles are whole ones.
    #[inline(always)]
    unsafe fn run<const FULL: bool>(mut self) {
        let mut turn = self.turn(self.rows.start, 0, 0);
        // SAFETY: by the caller's promise.
        unsafe {
            self.start(Some(turn), 0);
            loop {
                let next = self.after(turn);
                self.start(next, turn.chunks);
                self.finish::<FULL>(turn);
                match next {
                    Some(next) => turn = next,
                    None => break,
                }
            }
            self.registers.release();
        }
    }

    #[inline(always)]
    fn turn(&self, row: usize, group: usize, first: usize) -> Turn {
        let chunks = (self.segment.chunks - first).min(TILES / Self::EACH);
        Turn {
            row,
            group,
            first,
            chunks,
        }
    }

    /// The turn after `turn`: over chunks, then groups, then tiles of rows.
    #[inline(always)]
    fn after(&self, turn: Turn) -> Option<Turn> {
        let first = turn.first + turn.chunks;
        if first < self.segment.chunks {
            return Some(self.turn(turn.row, turn.group, first));
        }
        if turn.group + 1 < self.segment.groups {
            return Some(self.turn(turn.row, turn.group + 1, 0));
        }
        let row = turn.row + self.tile_rows;
        (row < self.rows.end).then(|| self.turn(row, 0, 0))
    }

    /// Stores the tiles of `stored` chunks and starts the products of `turn`.
    #[inline(always)]
    unsafe fn start(&mut self, turn: Option<Turn>, stored: usize) {
        // SAFETY: passed on.
        unsafe {
            if APART {
                self.chunk::<0, 1>(0, turn, stored);
                self.chunk::<2, 3>(1, turn, stored);
            } else {
                self.chunk::<0, 0>(0, turn, stored);
                self.chunk::<1, 1>(1, turn, stored);
                self.chunk::<2, 2>(2, turn, stored);
                self.chunk::<3, 3>(3, turn, stored);
            }
        }
    }

    /// As [`start`](Self::start) for chunk `k` of either, whose bytes have tiles `H` and `L`.
    #[inline(always)]
    unsafe fn chunk<const H: u8, const L: u8>(
        &mut self,
        k: usize,
        turn: Option<Turn>,
        stored: usize,
    ) {
        let x = self.segment.x;
        let (high, low) = (self.result(H), self.result(L));
        // SAFETY: by the caller's promise.
        unsafe {
            let Some(turn) = turn.filter(|turn| k < turn.chunks) else {
                if k < stored {
                    self.registers.store::<H>(high);
                    self.registers.store::<L>(low);
                }
                return;
            };
            let c = turn.first + k;
            let (from, _) = x.floats(self.segment.first + turn.row, self.segment.first_chunk + c);
            let weights = self.segment.chunk(turn.group, c);
            self.registers.load::<6>(weights, LINE);
            self.registers.load::<4>(from, LINE);
            if k < stored {
                self.registers.store::<H>(high);
            }
            self.registers.zero::<H>();
            self.registers.dot_floats::<H, 4, 6>();
            if BYTES == 1 {
                return;
            }
            self.registers.load::<5>(from.add(TILE_ROWS * LINE), LINE);
            if H != L {
                if k < stored {
                    self.registers.store::<L>(low);
                }
                self.registers.zero::<L>();
            }
            self.registers.dot_floats::<L, 5, 6>();
        }
    }

    /// The floats of a turn whose results were stored.
    #[inline(always)]
    unsafe fn finish<const FULL: bool>(&mut self, turn: Turn) {
        let rows = if FULL { TILE_ROWS } else { self.tile_rows };
        let segment = self.segment;
        // SAFETY: by the caller's promise.
        unsafe {
            let first = segment
                .sums
                .add((turn.row * segment.groups + turn.group) * LANES);
            let mut sums = [S::splat(0.0); TILE_ROWS];
            let (mut i, mut at) = (0, first);
            while i < rows {
                sums[i] = segment.sum::<S>(at, turn.first);
                at = at.add(segment.groups * LANES);
                i += 1;
            }
            for k in 0..turn.chunks {
                let c = turn.first + k;
                let chunk = segment.chunk(turn.group, c).cast::<PanelChunk>();
                let row = segment.first + turn.row;
                let (_, metas) = segment.x.floats(row, segment.first_chunk + c);
                let mut i = 0;
                while i < rows {
                    let meta = *metas.add(i);
                    let dot = self.dot(k, i);
                    let inner = M::inner::<S>(dot, &raw const (*chunk).factors, meta);
                    sums[i] = S::fma(inner, S::splat(meta.scale), sums[i]);
                    i += 1;
                }
            }
            let (mut i, mut at) = (0, first);
            while i < rows {
                S::store(at, sums[i]);
                at = at.add(segment.groups * LANES);
                i += 1;
            }
        }
    }

    /// `f32(D)` of chunk `k` and row `i` of the results.
    #[inline(always)]
    unsafe fn dot(&mut self, k: usize, i: usize) -> S::F {
        // SAFETY: by the caller's promise.
        unsafe {
            let of = |tile: *mut f32| S::load(tile.add(i * LANES));
            if APART {
                let (high, low) = (self.result(2 * k as u8), self.result(2 * k as u8 + 1));
                S::add(of(high.cast()), of(low.cast()))
            } else {
                of(self.result(k as u8).cast())
            }
        }
    }

    /// Where tile `tile` is stored.
    #[inline(always)]
    fn result(&mut self, tile: u8) -> *mut i32 {
        let start: *mut [[f32; LANES]; TILE_ROWS] = self.results.0.as_mut_ptr().cast();
        start.wrapping_add(usize::from(tile)).cast()
    }
}
