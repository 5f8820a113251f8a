//! Panels of signed bytes, for instructions that multiply small matrices of them.
//!
//! High and low bytes of activations are multiplied apart, and so are the halves of types whose
//! halves have scales of their own. [`Tiles`] multiplies: i8mm ([`crate::batch::smmla`]) two rows
//! of activations at once. The work on the integers is the same for all of them:
//!
//! ```text
//! for each tile of rows, each group, each span:      totals in registers, (rows, 2, 16)
//!   for each chunk
//!     high, low = the products of the two bytes                     Tiles::step
//!     for each row: totals += scale * (128 high + low)              Factors::add
//!   for each row: sum = fma(total * step, scale of the span, sum)
//! ```

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::batch::factors::ChunkFactors;
use crate::batch::{CHUNK_BYTES, Segment, Unpack, prefetch_chunk};
use crate::formats::{Format, Layout, Planes};
use crate::isa::{Bytes, Isa, LANES};
use crate::matmul::total;
use crate::quantisation::Meta;
use crate::storage::Chunk;

/// Most rows of activations to a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Bytes of a quad.
pub(crate) const LINE: usize = 4 * LANES;

/// The integers of a chunk: by byte of the activations (high, low), and once more for the second
/// half where it counts apart. Within each they lie by row. Only values that were stored are read.
#[repr(C, align(64))]
pub(crate) struct ByteResults(pub(crate) [[[i32; LANES]; TILE_ROWS]; 4]);

/// Activations of a tile: high and low bytes of its first row, and the way to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteRows {
    pub(crate) bytes: [*const i8; 2],
    pub(crate) stride: usize,
}

/// A way to multiply matrices of bytes.
///
/// # Safety
/// Every method requires that the CPU and the system allow it; see there for pointers.
pub(crate) trait Tiles {
    /// Rows of a whole tile, at most [`TILE_ROWS`].
    const ROWS: usize;
    /// Fewest rows for which panels pay.
    const FROM: usize;
    /// For tiles of `rows` rows, at most [`ROWS`](Self::ROWS), and `depth` columns.
    unsafe fn configured(rows: usize, depth: usize) -> Self;
    /// Multiplies rows of activations by the quads of a chunk as [`Bytes::arranged`] left them, in
    /// halves if `HALVES`. Writes the results, for as many rows as were configured.
    unsafe fn step<const HALVES: bool>(
        &mut self,
        x: ByteRows,
        quads: *const u8,
        out: *mut ByteResults,
    );
    /// Gives registers back.
    unsafe fn release(self);
}

/// A chunk of one group in a panel.
#[repr(C, align(64))]
struct PanelChunk {
    quads: [[i8; LINE]; 8],
    factors: ChunkFactors,
    _rest: [u8; 512],
}

const _: () = assert!(size_of::<PanelChunk>() == CHUNK_BYTES);

/// Unpacks chunks of a group of format `F`.
///
/// # Safety
/// Features of `S`; the pointers of `args` cover the chunks.
#[inline(always)]
pub(crate) unsafe fn unpack<S: Bytes, F: Format>(args: Unpack) {
    let layout: Layout = F::LAYOUT;
    for c in 0..args.chunks {
        let place = layout.place(args.first + c);
        // SAFETY: by the caller's promise.
        unsafe {
            prefetch_chunk::<S>(&args, layout, c);
            let out = args.out.add(c * CHUNK_BYTES).cast::<PanelChunk>();
            let mut quads = F::P::quads::<S>(args.weights.add(place.planes));
            let mut g = 0;
            while F::P::OFFSET != 0 && g < quads.len() {
                quads[g] = S::less(quads[g], F::P::OFFSET as u8);
                g += 1;
            }
            let (quads, mut g) = (S::arranged(quads), 0);
            while g < quads.len() {
                S::store_w((&raw mut (*out).quads[g]).cast(), quads[g]);
                g += 1;
            }
            let header = args.header(layout, c);
            let scales = args.weights.add(place.scales);
            ChunkFactors::unpack::<S, F>(&raw mut (*out).factors, header, scales);
        }
    }
}

/// Multiplies a panel, whose type has scales for its halves if `HALVES`, mins if `MIN`, and is wide
/// if `WIDE`.
///
/// # Safety
/// Features of `S`, and `T`; the segment's pointers cover its chunks, rows and sums.
#[inline(always)]
pub(crate) unsafe fn multiply<
    S: Isa,
    T: Tiles,
    const HALVES: bool,
    const MIN: bool,
    const WIDE: bool,
>(
    segment: &Segment<'_>,
) {
    let whole = segment.rows / T::ROWS * T::ROWS;
    // SAFETY: tiles stay within the rows.
    unsafe {
        if whole > 0 {
            TileProduct::<S, T, HALVES, MIN, WIDE>::new(segment, 0..whole, T::ROWS)
                .blocks::<true>();
        }
        if whole < segment.rows {
            let rest = whole..segment.rows;
            TileProduct::<S, T, HALVES, MIN, WIDE>::new(segment, rest.clone(), rest.len())
                .blocks::<false>();
        }
    }
}

/// Blocks that are started before the floats of one are computed: its integers are in memory by
/// then, and nothing waits for the other.
const AHEAD: usize = 2;

/// Room for results, a power of two: of blocks ahead, and of the one that is read.
const SLOTS: usize = (AHEAD + 1).next_power_of_two();

/// Configured tiles and their way over *blocks*: chunks of a group with a tile of rows. Over
/// chunks, then groups, then tiles.
struct TileProduct<'a, S, T, const HALVES: bool, const MIN: bool, const WIDE: bool> {
    tiles: T,
    segment: &'a Segment<'a>,
    range: Range<usize>,
    rows: usize,
    /// The next block to start: first row, group, chunk.
    next: (usize, usize, usize),
    /// Blocks that were started.
    started: usize,
    results: [MaybeUninit<ByteResults>; SLOTS],
    _isa: PhantomData<S>,
}

impl<'a, S: Isa, T: Tiles, const HALVES: bool, const MIN: bool, const WIDE: bool>
    TileProduct<'a, S, T, HALVES, MIN, WIDE>
{
    #[inline(always)]
    unsafe fn new(segment: &'a Segment<'a>, range: Range<usize>, rows: usize) -> Self {
        let depth = if HALVES { Chunk::LEN / 2 } else { Chunk::LEN };
        Self {
            // SAFETY: passed on.
            tiles: unsafe { T::configured(rows, depth) },
            segment,
            next: (range.start, 0, 0),
            range,
            rows,
            started: 0,
            results: [const { MaybeUninit::uninit() }; SLOTS],
            _isa: PhantomData,
        }
    }

    /// All blocks; `FULL` when tiles are whole ones.
    #[inline(always)]
    unsafe fn blocks<const FULL: bool>(mut self) {
        // SAFETY: by the caller's promise.
        unsafe {
            for _ in 0..AHEAD {
                self.start();
            }
            let (mut t, mut slot) = (self.range.start, 0);
            while t < self.range.end {
                for g in 0..self.segment.groups {
                    slot = self.group::<FULL>(t, g, slot);
                }
                t += self.rows;
            }
            self.tiles.release();
        }
    }

    /// The floats of all chunks of a group with the tile at row `t`. The first chunk's results are
    /// in `slot`. Returns the slot after the last.
    #[inline(always)]
    unsafe fn group<const FULL: bool>(&mut self, t: usize, g: usize, mut slot: usize) -> usize {
        let segment = self.segment;
        let rows = if FULL { T::ROWS } else { self.rows };
        // SAFETY: by the caller's promise.
        unsafe {
            let at = |i: usize| segment.sums_of(t + i, g);
            let mut sums = [S::splat(0.0); TILE_ROWS];
            for (i, sum) in sums.iter_mut().enumerate().take(rows) {
                *sum = segment.sum::<S>(at(i));
            }
            for first in (0..segment.chunks).step_by(segment.span) {
                let mut totals = [[S::splat_i(0); 2]; TILE_ROWS];
                for c in first..segment.chunks.min(first + segment.span) {
                    self.start();
                    let results = self.results[slot].as_ptr();
                    for (i, totals) in totals.iter_mut().enumerate().take(rows) {
                        let meta = segment
                            .x
                            .meta(segment.first + t + i, segment.first_chunk + c);
                        Self::add(factors(segment, g, c), results, i, meta, totals);
                    }
                    slot = (slot + 1) % SLOTS;
                }
                let step = ChunkFactors::step::<S>(factors(segment, g, first));
                for (i, sum) in sums.iter_mut().enumerate().take(rows) {
                    let meta = segment
                        .x
                        .meta(segment.first + t + i, segment.first_chunk + first);
                    let inner = S::mul(total::<S, 2>(totals[i], WIDE), step);
                    *sum = S::fma(inner, S::splat(meta.scale), *sum);
                }
            }
            for (i, &sum) in sums.iter().enumerate().take(rows) {
                S::store(at(i), sum);
            }
        }
        slot
    }

    /// Multiplies the next block, if there is one.
    #[inline(always)]
    unsafe fn start(&mut self) {
        let segment = self.segment;
        let slot = self.started % SLOTS;
        let out = self.results[slot].as_mut_ptr();
        self.started += 1;
        let (t, g, c) = self.next;
        // SAFETY: by the caller's promise.
        unsafe {
            if t >= self.range.end {
                return;
            }
            let rows = ByteRows {
                bytes: segment.x.bytes(segment.first + t, segment.first_chunk + c),
                stride: segment.x.stride,
            };
            let chunk = segment.chunk(g, c).cast::<PanelChunk>();
            let quads = (&raw const (*chunk).quads).cast();
            self.tiles.step::<HALVES>(rows, quads, out);
        }
        self.next = match (g + 1 == segment.groups, c + 1 == segment.chunks) {
            (_, false) => (t, g, c + 1),
            (false, true) => (t, g + 1, 0),
            (true, true) => (t + self.rows, 0, 0),
        };
    }

    /// Adds row `i` of the results to its totals.
    #[inline(always)]
    unsafe fn add(
        factors: *const ChunkFactors,
        results: *const ByteResults,
        i: usize,
        meta: Meta,
        totals: &mut [S::I; 2],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            let result = |tile: usize| S::load_i((&raw const (*results).0[tile][i]).cast());
            let joined = |first: usize| S::add_i(S::shl7_i(result(first)), result(first + 1));
            if HALVES {
                ChunkFactors::add::<S, MIN, WIDE>(factors, 0, joined(0), meta.sums[0], totals);
                ChunkFactors::add::<S, MIN, WIDE>(factors, 1, joined(2), meta.sums[1], totals);
            } else {
                ChunkFactors::add::<S, MIN, WIDE>(factors, 0, joined(0), meta.whole(), totals);
            }
        }
    }
}

/// The factors of chunk `c` of group `g`.
#[inline(always)]
unsafe fn factors(segment: &Segment<'_>, g: usize, c: usize) -> *const ChunkFactors {
    // SAFETY: the caller names a chunk of the panel.
    unsafe { &raw const (*segment.chunk(g, c).cast::<PanelChunk>()).factors }
}
