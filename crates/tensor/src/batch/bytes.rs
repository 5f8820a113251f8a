//! Panels of signed bytes, for instructions that multiply small matrices of them.
//!
//! High and low bytes of activations are multiplied apart, and so are the halves of types whose
//! halves have factors of their own. [`Tiles`] multiplies: AMX ([`crate::batch::amx`]) 16 rows of
//! activations at once, i8mm (`crate::batch::smmla`) two. What is done with the integers is the
//! same:
//!
//! ```text
//! for each tile of rows, each group:      sums in registers, (rows, 16)
//!   for each chunk
//!     high, low = the products of the two bytes                     Tiles::dots
//!     for each row: D = 128 high + low; sum = fma(inner, scale, sum)     lanes
//! ```

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::activations::Meta;
use crate::batch::factors::{Factors, Halves, Min, store_halves, weighted};
use crate::batch::{CHUNK_BYTES, Segment, Unpack, ask_for};
use crate::formats::{Format, Layout, Planes, Scales};
use crate::isa::{Bytes, Isa, LANES};
use crate::stored::Chunk;

/// Most rows of activations to a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Bytes of a quad.
pub(crate) const LINE: usize = 4 * LANES;

/// The integers of a chunk: by byte of the activations (high, low), and once more for the second
/// half where it counts apart; then by row. Only what was stored is read.
#[repr(C, align(64))]
pub(crate) struct Results(pub(crate) [[[i32; LANES]; TILE_ROWS]; 4]);

/// Activations of a tile: high and low bytes of its first row, and the way to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
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
    /// Multiplies rows of activations by the quads of a chunk as [`Bytes::arranged`] left them; in
    /// halves if `HALVES`. Writes results of as many rows as were configured.
    unsafe fn dots<const HALVES: bool>(&mut self, x: Rows, quads: *const u8, out: *mut Results);
    /// Gives registers back.
    unsafe fn release(self);
}

/// A chunk of one group in a panel.
#[repr(C, align(64))]
struct PanelChunk {
    quads: [[i8; LINE]; 8],
    factors: Factors,
    /// Where the type's halves have factors of their own.
    sub: Halves,
    _rest: [u8; 384],
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
            ask_for::<S>(&args, layout, c);
            let out = args.out.add(c * CHUNK_BYTES).cast::<PanelChunk>();
            let mut quads = F::P::quads::<S>(args.weights.add(place.planes));
            if F::P::OFFSET != 0 {
                quads = quads.map(|quad| S::less(quad, F::P::OFFSET as u8));
            }
            for (g, &quad) in S::arranged(quads).iter().enumerate() {
                S::store_w((&raw mut (*out).quads[g]).cast(), quad);
            }
            let (header, scales) = (
                args.weights.add(place.header),
                args.weights.add(place.scales),
            );
            Factors::unpack::<S, F>(&raw mut (*out).factors, header, scales);
            if F::S::HALVES {
                store_halves::<S>(&raw mut (*out).sub, F::S::sub::<S>(scales));
            }
        }
    }
}

/// Multiplies a panel, whose type has factors for its halves if `HALVES`.
///
/// # Safety
/// Features of `S`, and `T`; the segment's pointers cover its chunks, rows and sums.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Isa, T: Tiles, M: Min, const HALVES: bool>(segment: &Segment<'_>) {
    let whole = segment.rows / T::ROWS * T::ROWS;
    let depth = if HALVES { Chunk::LEN / 2 } else { Chunk::LEN };
    // SAFETY: tiles stay within the rows.
    unsafe {
        if whole > 0 {
            let mut tiles = Tile::<S, T, M, HALVES>(T::configured(T::ROWS, depth), PhantomData);
            for t in (0..whole).step_by(T::ROWS) {
                tiles.groups::<true>(segment, t, T::ROWS);
            }
            tiles.0.release();
        }
        if whole < segment.rows {
            let rest = segment.rows - whole;
            let mut tiles = Tile::<S, T, M, HALVES>(T::configured(rest, depth), PhantomData);
            tiles.groups::<false>(segment, whole, rest);
            tiles.0.release();
        }
    }
}

/// Configured tiles.
struct Tile<S, T, M, const HALVES: bool>(T, PhantomData<(S, M)>);

impl<S: Isa, T: Tiles, M: Min, const HALVES: bool> Tile<S, T, M, HALVES> {
    /// `rows` rows from `t` of the segment with each group; `FULL` when they are a whole tile.
    #[inline(always)]
    unsafe fn groups<const FULL: bool>(&mut self, segment: &Segment<'_>, t: usize, rows: usize) {
        let rows = if FULL { T::ROWS } else { rows };
        for g in 0..segment.groups {
            // SAFETY: by the caller's promise.
            unsafe {
                let at = |i: usize| segment.sums.add(((t + i) * segment.groups + g) * LANES);
                let mut sums = [S::splat(0.0); TILE_ROWS];
                for (i, sum) in sums.iter_mut().enumerate().take(rows) {
                    *sum = S::load(at(i));
                }
                // Two buffers in turn: the next chunk's tiles need not wait for this one's lanes.
                let mut buffers = [const { MaybeUninit::<Results>::uninit() }; 2];
                for c in 0..segment.chunks {
                    let (x, row) = (segment.x, segment.first + t);
                    let bytes = x.bytes(row, segment.first_chunk + c);
                    let stride = x.stride;
                    let chunk = segment.chunk(g, c).cast::<PanelChunk>();
                    let results = buffers[c % 2].as_mut_ptr();
                    let quads = (&raw const (*chunk).quads).cast();
                    self.0
                        .dots::<HALVES>(Rows { bytes, stride }, quads, results);
                    for (i, sum) in sums.iter_mut().enumerate().take(rows) {
                        let meta = x.meta(row + i, segment.first_chunk + c);
                        let inner = Self::inner(chunk, results, i, meta);
                        *sum = S::fma(inner, S::splat(meta.scale), *sum);
                    }
                }
                for (i, &sum) in sums.iter().enumerate().take(rows) {
                    S::store(at(i), sum);
                }
            }
        }
    }

    /// `inner` of [`crate::matmul`] for row `i` of the results.
    #[inline(always)]
    unsafe fn inner(
        chunk: *const PanelChunk,
        results: *const Results,
        i: usize,
        meta: Meta,
    ) -> S::F {
        // SAFETY: by the caller's promise.
        unsafe {
            let result = |tile: usize| S::load_i((&raw const (*results).0[tile][i]).cast());
            let joined = |first: usize| S::add_i(S::shl7_i(result(first)), result(first + 1));
            let dot = if HALVES {
                weighted::<S>(&raw const (*chunk).sub, [joined(0), joined(2)])
            } else {
                joined(0)
            };
            M::inner::<S>(S::to_f(dot), &raw const (*chunk).factors, meta)
        }
    }
}
