//! Panels of two planes of bytes, for AMX's products of these.
//!
//! A weight's integer of 16 bits ([`crate::stored::units`]) is a signed high byte and an unsigned
//! low one. An activation's of 15 bits is two signed bytes. That makes four products of tiles of 16
//! rows of 64 bytes, each with sums of its own, over a whole span. Below 2^31 all are exact; their
//! combination is `T` of [`crate::matmul`].
//!
//! Wide types have weights of 20 bits, so a third byte and six products; two pairs of these share
//! their sums. Two of the four could too. But a product takes 16 cycles and waits 52 for the one
//! before into the same tile (Intel's optimization manual).
//!
//! A *turn* is a span of a group with a tile of activation rows. While its first products run, the
//! results of the previous turn are stored. Between the other products those results are summed:
//! processors do both at once. A result stored behind the last product of another result needs no
//! wait. A panel's last turn stays [`PendingProducts`] until the first of the next panel, which is
//! unpacked meanwhile.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::batch::registers::{TILE_BYTES, TileRegisters};
use crate::batch::rows::{TILE_ROWS, step_of, steps};
use crate::batch::{
    CHUNK_BYTES, GROUP_SUMS, LEVEL_LEN, MOST, Segment, Unpack, carries, prefetch_chunk,
};
use crate::formats::{Format, Layout, Planes, Scales};
use crate::isa::{BytePlanes, LANES};
use crate::matmul::total;
use crate::quantisation::CHUNK;
use crate::storage::units::WIDE_MIN;

/// Rows from which panels pay: half a tile. Of the 1B model 8 rows take 153 ms without them, or 200
/// (Q4_0, Q4_K_M). With them 16 rows take 134 and 140 (`bench model --prompt`).
pub(crate) const FROM: usize = TILE_ROWS / 2;

/// Place of the rows' steps in the weights of 64 columns in a panel. They lie behind a tile of the
/// weights' highest bytes and the tiles of the lower ones.
const fn steps_at(wide: bool) -> usize {
    (2 + wide as usize) * TILE_BYTES
}

/// Bytes of the weights of 64 columns. (With room for three tiles everywhere the two of most types
/// took half of the first cache's sets.)
const fn step_bytes(wide: bool) -> usize {
    steps_at(wide) + LANES * size_of::<f32>()
}

const STEP_BYTES: usize = step_bytes(false);
const WIDE_STEP_BYTES: usize = step_bytes(true);

/// Places of a panel that a chunk takes at most: its own tiles, where spans have no more columns.
pub(crate) const PLACES: usize = 3;

const _: () = assert!(WIDE_STEP_BYTES <= PLACES * CHUNK_BYTES);

/// Unpacks chunks of a group of format `F`.
///
/// # Safety
/// Features of `S`; the pointers of `args` cover the chunks.
#[inline(always)]
pub(crate) unsafe fn unpack<S: BytePlanes, F: Format>(args: Unpack) {
    let layout: Layout = F::LAYOUT;
    for c in 0..args.chunks {
        let (step, half) = step_of(c, args.span * CHUNK);
        let place = layout.place(args.first + c);
        // SAFETY: by the caller's promise.
        unsafe {
            let out = args.out.add(step * step_bytes(F::S::WIDE));
            let header = args.header(layout, c);
            let planes = args.weights.add(place.planes);
            let scales = args.weights.add(place.scales);
            let to = out.add(half * TILE_BYTES / 2);
            unpack_planes::<S, F>(planes, scales, header, to);
            prefetch_chunk::<S>(&args, layout, c);
            if half == 0 {
                S::store(
                    out.add(steps_at(F::S::WIDE)).cast(),
                    F::S::step::<S>(header),
                );
                // The span's last tile has no second chunk: zeros.
                if (c + 1) % args.span == 0 || c + 1 == args.chunks {
                    for plane in 0..2 + usize::from(F::S::WIDE) {
                        let rest = out.add(plane * TILE_BYTES + TILE_BYTES / 2);
                        rest.write_bytes(0, TILE_BYTES / 2);
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn unpack_planes<S: BytePlanes, F: Format>(
    planes: *const u8,
    scales: *const u8,
    header: *const u8,
    mut to: *mut u8,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let quads = F::P::quads::<S>(planes);
        let multipliers = F::S::multipliers::<S>(header);
        let [first, second] = F::S::scales::<S>(multipliers, scales);
        let offset = S::splat_i(-F::P::OFFSET);
        let mut all = [S::mul_i(first, offset), S::mul_i(second, offset)];
        if F::S::HAS_MIN {
            let grain = S::splat_i(if F::S::WIDE { WIDE_MIN } else { 1 });
            let [first, second] = F::S::mins::<S>(multipliers, scales);
            all = [
                S::add_i(all[0], S::mul_i(first, grain)),
                S::add_i(all[1], S::mul_i(second, grain)),
            ];
        }
        let scales_of = [S::twice(first), S::twice(second)];
        let mins = [S::twice(all[0]), S::twice(all[1])];
        let high_mins = [S::twice(S::sar16_i(all[0])), S::twice(S::sar16_i(all[1]))];
        let mut g = 0;
        while g < quads.len() {
            let (pair, scale) = (S::widen(quads[g], F::P::SIGNED), scales_of[g / 4]);
            if F::S::WIDE {
                let min = [mins[g / 4], high_mins[g / 4]];
                let even = S::mul_add_wide(pair[0], scale, min);
                let odd = S::mul_add_wide(pair[1], scale, min);
                let [_, high] = S::narrow([even[1], odd[1]]);
                let [middle, low] = S::narrow([even[0], odd[0]]);
                S::store_w(to, high);
                S::store_w(to.add(TILE_BYTES), middle);
                S::store_w(to.add(2 * TILE_BYTES), low);
            } else {
                let mut words = [S::mul_words(pair[0], scale), S::mul_words(pair[1], scale)];
                if F::S::HAS_MIN || F::P::OFFSET != 0 {
                    let min = mins[g / 4];
                    words = [S::add_words(words[0], min), S::add_words(words[1], min)];
                }
                let [high, low] = S::narrow(words);
                S::store_w(to, high);
                S::store_w(to.add(TILE_BYTES), low);
            }
            to = to.add(4 * LANES);
            g += 1;
        }
    }
}

/// Configures the registers for products of panels: once for many of them, since the first product
/// behind a configuration waits for it.
///
/// # Safety
/// Features of `R`.
#[inline(always)]
pub(crate) unsafe fn begin<R: TileRegisters>() {
    // SAFETY: passed on. What is forgotten is in the processor, or nothing.
    std::mem::forget(unsafe { R::configured() });
}

/// Gives them back.
///
/// # Safety
/// Features of `R`; behind [`begin`].
#[inline(always)]
pub(crate) unsafe fn end<R: TileRegisters>() {
    // SAFETY: passed on.
    unsafe { R::left().release() };
}

/// For [`crate::limits`]: products of tiles of ones, as many as take about the time of `count` dot
/// products of vectors, rounded up to four. Returns the sum of the products. A product of tiles is
/// 256 of those and takes 16 cycles.
///
/// # Safety
/// Features of `R`.
#[inline(always)]
pub(crate) unsafe fn dots<R: TileRegisters>(count: u64) -> u64 {
    const CYCLES: u64 = 16;
    let ones = Ones([1; TILE_BYTES]);
    let mut results = TileResults(MaybeUninit::uninit());
    let out: *mut i32 = (&raw mut results).cast();
    // SAFETY: tiles that are there; four of the results are stored.
    unsafe {
        let mut registers = R::configured();
        let ones = std::hint::black_box(&ones).0.as_ptr();
        registers.load::<4, 0, 0>(ones);
        registers.load::<5, 0, 0>(ones);
        registers.load::<6, 0, 0>(ones);
        registers.load::<7, 0, 0>(ones);
        registers.zero::<0>();
        registers.zero::<1>();
        registers.zero::<2>();
        registers.zero::<3>();
        for _ in 0..count.div_ceil(4 * CYCLES) {
            registers.dot_signed::<0, 4, 6>();
            registers.dot_signed::<1, 4, 7>();
            registers.dot_signed::<2, 5, 6>();
            registers.dot_signed::<3, 5, 7>();
        }
        registers.store::<0>(out);
        registers.store::<1>(out);
        registers.store::<2>(out);
        registers.store::<3>(out);
        registers.release();
        let sums = std::slice::from_raw_parts(out, 4 * TILE_ROWS * LANES);
        sums.iter().map(|&sum| u64::from(sum.unsigned_abs())).sum()
    }
}

#[repr(C, align(64))]
struct Ones([u8; TILE_BYTES]);

/// Multiplies a panel, of a wide type if `WIDE`, with activations of `BYTES` bytes. A last tile is
/// a whole one too: activations have room for it, and so have sums.
///
/// # Safety
/// Features of `S`, and `R`; between [`begin`] and [`end`] of `R`; the segment's pointers cover its
/// chunks, rows and sums.
#[inline(always)]
pub(crate) unsafe fn multiply<
    S: BytePlanes,
    R: TileRegisters,
    const BYTES: usize,
    const WIDE: bool,
>(
    segment: &Segment<'_>,
) {
    // SAFETY: passed on.
    unsafe {
        let tiles = Tiles::<S, R, BYTES, WIDE>::new(segment);
        match steps(segment.chunks.min(segment.span) * CHUNK) {
            1 => tiles.run::<1>(),
            2 => tiles.run::<2>(),
            3 => tiles.run::<3>(),
            _ => tiles.run::<4>(),
        }
    }
}

/// Does the block for each row of a tile, `$i` being a constant. Sums stay in registers, where a
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

/// A span of a group with a tile of rows, and where its operands lie.
#[derive(Clone, Copy, Debug)]
struct TileStep {
    row: usize,
    group: usize,
    span: usize,
    bytes: *const u8,
    scales: *const f32,
    weights: *const u8,
    /// The steps of the group's rows.
    step: *const f32,
    sums: *mut f32,
    /// Whether it is a leaf's first, before which there are no sums.
    fresh: bool,
    /// The leaf's number, if it is its last.
    ends: Option<usize>,
}

/// The turn whose products are in the tiles, and room for the results.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct PendingProducts {
    results: TileResults,
    /// That turn's, whose panel is overwritten.
    step: [f32; LANES],
    turn: Option<TileStep>,
}

impl PendingProducts {
    /// No turn.
    pub(crate) const fn new() -> Self {
        Self {
            results: TileResults(MaybeUninit::uninit()),
            step: [0.0; LANES],
            turn: None,
        }
    }
}

/// Configured tiles and their way through the rows, a tile of them at a time.
struct Tiles<'a, S, R, const BYTES: usize, const WIDE: bool> {
    registers: R,
    segment: &'a Segment<'a>,
    /// Spans of the segment.
    spans: usize,
    _isa: PhantomData<S>,
}

/// Activations are 2^8 `p` + `q` and weights 2^8 `h` + `l`. The sums are those of `p h`, `p l`,
/// `q h` and `q l`. Wide weights are 2^16 `h` + 2^8 `m` + `l`. Their sums are those of `p h`,
/// `p m + q h`, `p l + q m` and `q l`.
#[derive(Debug)]
#[repr(C, align(64))]
struct TileResults(MaybeUninit<[[[i32; LANES]; TILE_ROWS]; 4]>);

impl<'a, S: BytePlanes, R: TileRegisters, const BYTES: usize, const WIDE: bool>
    Tiles<'a, S, R, BYTES, WIDE>
{
    /// Bytes of the activations of 64 columns of a tile.
    const ACTIVATIONS: usize = BYTES * TILE_BYTES;

    #[inline(always)]
    unsafe fn new(segment: &'a Segment<'a>) -> Self {
        Self {
            // SAFETY: passed on.
            registers: unsafe { R::left() },
            spans: segment.chunks.div_ceil(segment.span),
            segment,
            _isa: PhantomData,
        }
    }

    /// All turns, of `STEPS` times 64 columns each.
    #[inline(always)]
    unsafe fn run<const STEPS: usize>(mut self) {
        // SAFETY: by the caller's promise; sums are made of what was stored.
        unsafe {
            let mut turn = self.first();
            match (*self.segment.waiting).turn.take() {
                Some(before) => self.follow::<STEPS>(before, turn),
                None => self.start::<STEPS>(turn),
            }
            loop {
                let next = self.after::<STEPS>(turn);
                if next.row >= self.segment.rows {
                    break;
                }
                self.follow::<STEPS>(turn, next);
                turn = next;
            }
            if self.segment.is_last {
                self.store();
                let mut sums = self.sums(turn);
                self.add::<0, TILE_ROWS>(turn, &mut sums);
                self.keep(turn, sums);
            } else {
                let waiting = &mut *self.segment.waiting;
                S::store(waiting.step.as_mut_ptr(), S::load(turn.step));
                turn.step = waiting.step.as_ptr();
                waiting.turn = Some(turn);
            }
        }
    }

    /// Starts the products of a turn that has none before it.
    #[inline(always)]
    unsafe fn start<const STEPS: usize>(&mut self, turn: TileStep) {
        // SAFETY: passed on.
        unsafe {
            self.step::<0, false>(turn);
            if STEPS > 1 {
                self.step::<1, false>(turn);
            }
            if STEPS > 2 {
                self.step::<2, false>(turn);
            }
            if STEPS > 3 {
                self.step::<3, false>(turn);
            }
        }
    }

    /// Starts the products of the turn behind `turn` and makes its sums.
    #[inline(always)]
    unsafe fn follow<const STEPS: usize>(&mut self, turn: TileStep, next: TileStep) {
        // SAFETY: passed on.
        unsafe {
            let mut sums = self.sums(turn);
            self.step::<0, true>(next);
            match STEPS {
                1 => self.add::<0, 16>(turn, &mut sums),
                2 => {
                    self.add::<0, 8>(turn, &mut sums);
                    self.step::<1, false>(next);
                    self.add::<8, 16>(turn, &mut sums);
                }
                3 => {
                    self.add::<0, 5>(turn, &mut sums);
                    self.step::<1, false>(next);
                    self.add::<5, 10>(turn, &mut sums);
                    self.step::<2, false>(next);
                    self.add::<10, 16>(turn, &mut sums);
                }
                _ => {
                    self.add::<0, 4>(turn, &mut sums);
                    self.step::<1, false>(next);
                    self.add::<4, 8>(turn, &mut sums);
                    self.step::<2, false>(next);
                    self.add::<8, 12>(turn, &mut sums);
                    self.step::<3, false>(next);
                    self.add::<12, 16>(turn, &mut sums);
                }
            }
            self.keep(turn, sums);
        }
    }

    #[inline(always)]
    unsafe fn first(&self) -> TileStep {
        let segment = self.segment;
        let span = segment.span * CHUNK;
        // SAFETY: the segment's pointers cover its chunks and rows, as `multiply` is promised.
        let (bytes, scales) = unsafe { segment.x.tiles(segment.first, segment.first_chunk, span) };
        self.whole(TileStep {
            row: 0,
            group: 0,
            span: 0,
            bytes,
            scales,
            weights: segment.panel,
            step: segment.panel.cast(),
            sums: segment.sums,
            fresh: false,
            ends: None,
        })
    }

    /// With what follows from its place.
    #[inline(always)]
    fn whole(&self, turn: TileStep) -> TileStep {
        TileStep {
            step: turn.weights.wrapping_add(steps_at(WIDE)).cast(),
            fresh: self.segment.fresh && turn.span == 0,
            ends: self.segment.ends.filter(|_| turn.span + 1 == self.spans),
            ..turn
        }
    }

    /// The turn after `turn`: over spans, then groups, then tiles of rows. Behind the last one its
    /// row is none of the segment's, and its pointers lead nowhere.
    #[inline(always)]
    fn after<const STEPS: usize>(&self, mut turn: TileStep) -> TileStep {
        let segment = self.segment;
        turn.span += 1;
        turn.bytes = turn.bytes.wrapping_add(STEPS * Self::ACTIVATIONS);
        turn.scales = turn.scales.wrapping_add(TILE_ROWS);
        turn.weights = turn.weights.wrapping_add(STEPS * step_bytes(WIDE));
        if turn.span == self.spans {
            turn.span = 0;
            turn.group += 1;
            let steps = self.spans * STEPS;
            turn.bytes = turn.bytes.wrapping_sub(steps * Self::ACTIVATIONS);
            turn.scales = turn.scales.wrapping_sub(self.spans * TILE_ROWS);
            let unused = MOST * PLACES * CHUNK_BYTES - steps * step_bytes(WIDE);
            turn.weights = turn.weights.wrapping_add(unused);
            turn.sums = turn.sums.wrapping_add(GROUP_SUMS);
        }
        if turn.group == segment.groups {
            turn.group = 0;
            turn.row += TILE_ROWS;
            turn.bytes = turn
                .bytes
                .wrapping_add(segment.x.stride * Self::ACTIVATIONS);
            turn.scales = turn.scales.wrapping_add(segment.x.spans * TILE_ROWS);
            turn.weights = segment.panel;
            turn.sums = segment.sums.wrapping_add(turn.row * LANES);
        }
        self.whole(turn)
    }

    /// Starts the products of 64 columns of a turn, its first if `K` is 0. With these the results
    /// from the turn before are stored if `STORE`.
    #[inline(always)]
    unsafe fn step<const K: usize, const STORE: bool>(&mut self, turn: TileStep) {
        // SAFETY: by the caller's promise.
        unsafe {
            if WIDE {
                return self.wide_step::<K, STORE>(turn);
            }
            self.activations::<4, K>(turn.bytes);
            self.registers.load::<6, K, STEP_BYTES>(turn.weights);
            self.renew::<0, K, STORE>();
            self.registers.dot_signed::<0, 4, 6>();
            let low = turn.weights.add(TILE_BYTES);
            self.registers.load::<7, K, STEP_BYTES>(low);
            self.renew::<1, K, STORE>();
            self.registers.dot_unsigned::<1, 4, 7>();
            if BYTES == 1 {
                return;
            }
            self.activations::<5, K>(turn.bytes.add(TILE_BYTES));
            self.renew::<2, K, STORE>();
            self.registers.dot_signed::<2, 5, 6>();
            self.renew::<3, K, STORE>();
            self.registers.dot_unsigned::<3, 5, 7>();
        }
    }

    /// Like [`step`](Self::step) with weights of three bytes, and so with two products into the
    /// second and the third tile, far enough apart.
    #[inline(always)]
    unsafe fn wide_step<const K: usize, const STORE: bool>(&mut self, turn: TileStep) {
        let middle = turn.weights.wrapping_add(TILE_BYTES);
        let low = turn.weights.wrapping_add(2 * TILE_BYTES);
        // SAFETY: by the caller's promise.
        unsafe {
            self.activations::<4, K>(turn.bytes);
            self.registers.load::<6, K, WIDE_STEP_BYTES>(middle);
            self.renew::<1, K, STORE>();
            self.registers.dot_unsigned::<1, 4, 6>();
            self.registers.load::<7, K, WIDE_STEP_BYTES>(low);
            self.renew::<2, K, STORE>();
            self.registers.dot_unsigned::<2, 4, 7>();
            self.registers.load::<5, K, WIDE_STEP_BYTES>(turn.weights);
            self.renew::<0, K, STORE>();
            self.registers.dot_signed::<0, 4, 5>();
            if BYTES == 1 {
                return;
            }
            self.activations::<4, K>(turn.bytes.add(TILE_BYTES));
            self.registers.dot_signed::<1, 4, 5>();
            self.registers.dot_unsigned::<2, 4, 6>();
            self.renew::<3, K, STORE>();
            self.registers.dot_unsigned::<3, 4, 7>();
        }
    }

    /// Loads activations of step `K`.
    #[inline(always)]
    unsafe fn activations<const T: u8, const K: usize>(&mut self, bytes: *const u8) {
        // SAFETY: by the caller's promise.
        unsafe {
            if BYTES == 1 {
                self.registers.load::<T, K, TILE_BYTES>(bytes);
            } else {
                self.registers.load::<T, K, { 2 * TILE_BYTES }>(bytes);
            }
        }
    }

    /// Stores tile `T` if `STORE` and clears it if `K` is 0.
    #[inline(always)]
    unsafe fn renew<const T: u8, const K: usize, const STORE: bool>(&mut self) {
        let results = self.results();
        // SAFETY: by the caller's promise.
        unsafe {
            if STORE {
                self.registers.store::<T>(results);
            }
            if K == 0 {
                self.registers.zero::<T>();
            }
        }
    }

    /// Stores the last results.
    #[inline(always)]
    unsafe fn store(&mut self) {
        let results = self.results();
        // SAFETY: by the caller's promise.
        unsafe {
            self.registers.store::<0>(results);
            self.registers.store::<1>(results);
            if BYTES == 2 || WIDE {
                self.registers.store::<2>(results);
            }
            if BYTES == 2 {
                self.registers.store::<3>(results);
            }
        }
    }

    /// The sums before a turn.
    #[inline(always)]
    unsafe fn sums(&self, turn: TileStep) -> [S::F; TILE_ROWS] {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [S::splat(0.0); TILE_ROWS];
            if !turn.fresh {
                each_row!(I { sums[I] = S::load(turn.sums.add(I * LANES)) });
            }
            sums
        }
    }

    /// Writes those behind it: as the leaf's, or, at its end, into the tree as
    /// [`fold`](crate::batch::fold) does.
    #[inline(always)]
    unsafe fn keep(&self, turn: TileStep, mut sums: [S::F; TILE_ROWS]) {
        let mut to = turn.sums;
        // SAFETY: by the caller's promise; levels before the leaf's own were written.
        unsafe {
            if let Some(leaf) = turn.ends {
                for _ in 0..carries(leaf) {
                    to = to.add(LEVEL_LEN);
                    each_row!(I { sums[I] = S::add(S::load(to.add(I * LANES)), sums[I]) });
                }
                to = to.add(LEVEL_LEN);
            }
            each_row!(I { S::store(to.add(I * LANES), sums[I]) });
        }
    }

    /// Adds the stored results of rows `FIRST..END` to their turn's sums.
    #[inline(always)]
    unsafe fn add<const FIRST: usize, const END: usize>(
        &mut self,
        turn: TileStep,
        sums: &mut [S::F; TILE_ROWS],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            let step = S::load(turn.step);
            each_row!(I {
                if (FIRST..END).contains(&I) {
                    let terms = self.terms(I);
                    let inner = S::mul(total::<S, BYTES>(terms, WIDE), step);
                    sums[I] = S::fma(inner, S::splat(*turn.scales.add(I)), sums[I]);
                }
            });
        }
    }

    /// `T` of [`crate::matmul`] for row `i` of the stored results, in two terms.
    #[inline(always)]
    unsafe fn terms(&mut self, i: usize) -> [S::I; 2] {
        let results = self.results();
        // SAFETY: by the caller's promise.
        unsafe {
            let at = |tile: usize| S::load_i(results.add((tile * TILE_ROWS + i) * LANES));
            match (WIDE, BYTES) {
                (false, 1) => [S::add_i(S::shl_i::<8>(at(0)), at(1)); 2],
                // 2^16 a + 2^8 (b + c) + d: what is a multiple of 2^7, and the rest.
                (false, _) => {
                    let middle = S::add_i(at(1), at(2));
                    [S::add_i(S::shl_i::<9>(at(0)), S::shl_i::<1>(middle)), at(3)]
                }
                (true, 1) => [S::shl_i::<2>(at(0)), S::add_i(S::shl_i::<8>(at(1)), at(2))],
                // 2^24 a + 2^16 b + 2^8 c + d: what is a multiple of 2^14, and the rest, of at most
                // 2^24.
                (true, _) => {
                    let c = at(2);
                    let rest = S::and_i(c, S::splat_i(63));
                    let high = S::add_i(S::shl_i::<10>(at(0)), S::shl_i::<2>(at(1)));
                    let carry = S::sar7_i(S::shl_i::<1>(c));
                    [S::add_i(high, carry), S::add_i(S::shl_i::<8>(rest), at(3))]
                }
            }
        }
    }

    /// Results, `(4, TILE_ROWS, 16)`.
    #[inline(always)]
    fn results(&mut self) -> *mut i32 {
        // SAFETY: the segment's, as `multiply` is promised.
        unsafe { (&raw mut (*self.segment.waiting).results).cast() }
    }
}
