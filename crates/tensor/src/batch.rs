//! Products with many activation rows: weights unpacked once for all of them.
//!
//! With one row a product waits for memory; with many it waits for arithmetic, and any other work
//! is lost time. So some chunks of neighbouring groups of 16 weight rows are unpacked into a
//! *panel*. It has the layout of the dot products, and fits L1. Every row of a block of [`ROWS`] is
//! multiplied with it before the next panel:
//!
//! ```text
//! for each block of rows        sums of leaves and of the tree in memory, (groups, rows, 16)
//!   for each leaf, for each run of chunks within it
//!     unpack the run of all groups                                       Batch::unpack, by type
//!     for each tile of rows, for each span:   sum = fma(inner, scale, sum)     Batch::multiply
//!   fold the leaf's sums into the tree                                         Batch::fold
//! ```
//!
//! The order of float operations for one output is that of [`crate::matmul`]; only the work between
//! them differs. The panels of [`words`] hold 16-bit integers, those of `bytes` bytes and those of
//! `tiles` two planes of bytes for matrix instructions. Activations are copied into the panels'
//! layout ([`rows`]): the path for few rows is unchanged.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "aarch64")]
pub(crate) mod bytes;
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) mod emulated;
#[cfg(target_arch = "aarch64")]
pub(crate) mod factors;
#[cfg(target_arch = "x86_64")]
mod registers;
pub(crate) mod rows;
#[cfg(target_arch = "aarch64")]
pub(crate) mod smmla;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;
pub(crate) mod words;

use std::mem::MaybeUninit;

use paceline_base::BlockType;

use crate::batch::rows::{PanelView, PanelWriter, RowFormat};
use crate::formats::{self, Kind};
use crate::isa::{Isa, LANES};
use crate::matmul::{GroupArgs, LEVELS, store_lanes};
use crate::quantisation::{CHUNK, Precision};

#[cfg(target_arch = "x86_64")]
pub(crate) use tiles::PendingProducts;

/// Products that are not in their sums yet: only tiles have any.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Debug)]
pub(crate) struct PendingProducts;

#[cfg(not(target_arch = "x86_64"))]
impl PendingProducts {
    const fn new() -> Self {
        Self
    }
}

/// Most activation rows that are multiplied with a panel before the next one. Against 64 the speed
/// is 1.02 to 1.03 times as high, 256 another 1.01 (Zen 4, Q4_0, Q8_0, Q4_K, Q6_K). Sums take
/// memory of a thread's stack: 648 KiB with 128; two groups and one leaf touch 16 KiB.
pub(crate) const ROWS: usize = 128;
/// Chunks of a panel, of all its groups: as many as fit into L1 together with activations. With 8
/// it is 0.5 to 2 % slower (Zen 4).
const PANEL_CHUNKS: usize = 16;
/// Groups to a panel: each activation that is loaded meets all of them. With one more or less
/// tiles lose 4 to 10 % (Intel Xeon): their activations and two groups fill the first cache.
pub(crate) const TOGETHER: usize = 2;
/// Chunks of a panel of one group: a unit.
pub(crate) const MOST: usize = PANEL_CHUNKS / TOGETHER;
/// Bytes of a panel's chunk of one group, for every flavour.
pub(crate) const CHUNK_BYTES: usize = 1344;
/// Most places of [`CHUNK_BYTES`] that a chunk takes.
const MOST_PLACES: usize = 3;

/// Products of a panel, by [`Kind`].
pub(crate) type Multiply = [unsafe fn(&Segment<'_>); Kind::COUNT];

/// Makes a row of activations in a form.
pub(crate) type MakeRow = unsafe fn(&PanelWriter<'_>, usize);

/// Functions of an instruction set for many rows.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Rows from which this pays.
    pub(crate) from: usize,
    /// Form of activations for each [`Precision`]; `None` where there are no panels.
    pub(crate) forms: [Option<RowFormat>; 2],
    /// The functions that make rows, by [`RowFormat`]; `None` for forms that are not read.
    pub(crate) make_row: [Option<MakeRow>; RowFormat::ALL.len()],
    pub(crate) unpack: [unsafe fn(Unpack); BlockType::COMPUTED],
    /// By [`Precision`].
    pub(crate) multiply: [Multiply; 2],
    /// Places of a panel that a chunk takes, at most [`MOST_PLACES`].
    pub(crate) places: usize,
    /// Called before the first product of a task and behind its last one.
    pub(crate) around: [unsafe fn(); 2],
    /// Adds a leaf to the tree; `None` where products do.
    pub(crate) fold: Option<unsafe fn(Sums, usize)>,
    pub(crate) store: unsafe fn(Sums, &GroupArgs<'_>, usize),
}

/// A panel: memory that is written before it is read.
#[repr(C, align(64))]
struct Panel(MaybeUninit<[[u8; CHUNK_BYTES]; MOST_PLACES * PANEL_CHUNKS]>);

/// A task's buffers: taken once, as each page of the stack is touched for them.
struct TaskBuffers {
    panel: Panel,
    sums: SumsBuffer,
    waiting: PendingProducts,
}

impl TaskBuffers {
    #[inline(always)]
    const fn new() -> Self {
        Self {
            panel: Panel(MaybeUninit::uninit()),
            sums: SumsBuffer(MaybeUninit::uninit()),
            waiting: PendingProducts::new(),
        }
    }
}

/// A run of chunks of one group to unpack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unpack {
    /// The group's packed bytes, from its first block on.
    pub(crate) weights: *const u8,
    /// First chunk of the group.
    pub(crate) first: usize,
    /// Chunks of its first unit that the group lacks.
    pub(crate) lacks: usize,
    pub(crate) chunks: usize,
    /// Range of chunks; the first one starts a span.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    pub(crate) span: usize,
    /// Room for as many chunks of a panel, at a cache line.
    pub(crate) out: *mut u8,
}

impl Unpack {
    /// The header of the unit of chunk `c` of the run.
    ///
    /// # Safety
    /// The chunk is there.
    #[inline(always)]
    unsafe fn header(&self, layout: formats::Layout, c: usize) -> *const u8 {
        // SAFETY: headers lie before the first block.
        unsafe {
            self.weights
                .sub(layout.header_before(self.lacks + self.first + c))
        }
    }
}

/// Prefetches chunk `c` of the next panel while this one is multiplied. A group's last chunks
/// prefetch those of its neighbour, and a matrix's last nothing.
#[inline(always)]
unsafe fn prefetch_chunk<S: Isa>(args: &Unpack, layout: formats::Layout, c: usize) {
    let place = layout.place(args.first + args.chunks + c);
    let line = |at: usize| {
        // SAFETY: a hint; any address may be given.
        unsafe { S::prefetch(args.weights.wrapping_add(at)) };
    };
    line(place.scales);
    (0..layout.planes)
        .step_by(64)
        .for_each(|at| line(place.planes + at));
}

/// For storage types that have no panels: floats.
///
/// # Safety
/// None is needed.
pub(crate) unsafe fn no_panel(_: Unpack) {
    unreachable!("floats are multiplied as they are")
}

/// No action, for products that need nothing around them.
///
/// # Safety
/// None is needed.
pub(crate) const unsafe fn nothing() {}

/// A panel and the rows to multiply it with.
#[derive(Debug)]
pub(crate) struct Segment<'a> {
    /// Chunk `c` of group `g` lies [`CHUNK_BYTES`] times `g * MOST + c` from here; of tiles see
    /// there.
    pub(crate) panel: *const u8,
    /// Groups of the panel.
    pub(crate) groups: usize,
    /// Chunks of the panel, at most [`MOST`].
    pub(crate) chunks: usize,
    /// Chunks of a span; the panel has whole ones, or one that is the leaf's last.
    pub(crate) span: usize,
    /// Activations, and the chunk of theirs that meets the panel's first.
    pub(crate) x: PanelView<'a>,
    pub(crate) first_chunk: usize,
    /// Rows `first..first + rows`.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    /// Sums of the leaf so far, `(groups, rows, 16)`; not written yet if `fresh`, and 0.
    pub(crate) sums: *mut f32,
    pub(crate) fresh: bool,
    /// The leaf's number, if this is its end and there are others.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "other panels have their leaves folded")
    )]
    pub(crate) ends: Option<usize>,
    /// Whether it is the last with these sums, so that none of its products may stay
    /// [`waiting`](Self::waiting).
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "other panels leave none")
    )]
    pub(crate) is_last: bool,
    /// Products of the segment before.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "other panels leave none")
    )]
    pub(crate) waiting: *mut PendingProducts,
}

impl Segment<'_> {
    /// The sum at `at`, one of [`sums`](Self::sums), before the segment.
    ///
    /// # Safety
    /// Features of `S`; it is one of them.
    #[inline(always)]
    pub(crate) unsafe fn sum<S: Isa>(&self, at: *const f32) -> S::F {
        // SAFETY: by the caller's promise; it was written where it is not fresh.
        unsafe {
            if self.fresh {
                S::splat(0.0)
            } else {
                S::load(at)
            }
        }
    }

    /// The sums of row `t` of the segment and group `g`.
    ///
    /// # Safety
    /// Both lie within the segment.
    #[inline(always)]
    pub(crate) unsafe fn sums_of(&self, t: usize, g: usize) -> *mut f32 {
        // SAFETY: by the caller's promise.
        unsafe { self.sums.add(g * GROUP_SUMS + t * LANES) }
    }

    /// Chunk `c` of group `g`.
    ///
    /// # Safety
    /// Both lie within the panel.
    #[inline(always)]
    pub(crate) unsafe fn chunk(&self, g: usize, c: usize) -> *const u8 {
        // SAFETY: by the caller's promise.
        unsafe { self.panel.add((g * MOST + c) * CHUNK_BYTES) }
    }
}

/// Floats from the sums of a group to those of the next. The distance is not a multiple of 4 KiB: a
/// processor would take a group's loads for those just stored for the one before.
pub(crate) const GROUP_SUMS: usize = (ROWS + 16) * LANES;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Floats of one level of sums.
pub(crate) const LEVEL_LEN: usize = TOGETHER * GROUP_SUMS;

/// Sums of the current leaf, then of each level of the tree.
#[repr(C, align(64))]
struct SumsBuffer(MaybeUninit<[[f32; LEVEL_LEN]; 1 + LEVELS]>);

/// Access to the sums: vectors of 16, one for each row and group, groups [`GROUP_SUMS`] apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums {
    start: *mut f32,
    rows: usize,
    groups: usize,
}

impl Sums {
    /// The vector of row `t` and group `g`.
    #[inline(always)]
    const fn vector(t: usize, g: usize) -> usize {
        g * GROUP_SUMS / LANES + t
    }

    /// Vector `v` of the current leaf.
    #[inline(always)]
    unsafe fn leaf(self, v: usize) -> *mut f32 {
        // SAFETY: by the caller's promise.
        unsafe { self.start.add(v * LANES) }
    }

    /// Vector `v` of a level of the tree.
    #[inline(always)]
    unsafe fn level(self, level: usize, v: usize) -> *mut f32 {
        // SAFETY: by the caller's promise.
        unsafe { self.start.add((1 + level) * LEVEL_LEN + v * LANES) }
    }
}

/// Levels that leaf number `leaf` is added to before it is a level's itself.
pub(crate) const fn carries(leaf: usize) -> usize {
    leaf.trailing_ones() as usize
}

/// Adds leaf number `leaf` to the tree: the binary counter of [`crate::matmul`].
///
/// # Safety
/// Features of `S`; leaves come in order, so that a level is read only after it was written.
#[inline(always)]
pub(crate) unsafe fn fold<S: Isa>(sums: Sums, leaf: usize) {
    let end = carries(leaf);
    for g in 0..sums.groups {
        let first = Sums::vector(0, g);
        for v in first..first + sums.rows {
            // SAFETY: by the caller's promise.
            unsafe {
                let mut sum = S::load(sums.leaf(v));
                for level in 0..end {
                    sum = S::add(S::load(sums.level(level, v)), sum);
                }
                S::store(sums.level(end, v), sum);
            }
        }
    }
}

/// Floats between rows of outputs that share sets of the first cache.
const SHARED: usize = 4096 / size_of::<f32>();

/// Ends the tree over `leaves` leaves and writes the outputs. Where rows of outputs share sets of
/// the caches and drive each other out, they are written past the caches. Each store would wait for
/// its line otherwise (12 % of a prompt's time on an Intel Xeon). Elsewhere writing past the caches
/// costs 5 %. A single leaf need not have been folded.
///
/// # Safety
/// Features of `S`; all leaves were folded; the outputs of `args` are there, `args.lanes` being
/// those of all groups together.
#[inline(always)]
pub(crate) unsafe fn store<S: Isa>(sums: Sums, args: &GroupArgs<'_>, leaves: usize) {
    let groups = args.lanes.div_ceil(LANES);
    let past = args.out_stride.is_multiple_of(SHARED);
    for t in args.first..args.end {
        for g in 0..groups {
            let v = Sums::vector(t - args.first, g);
            // SAFETY: by the caller's promise.
            unsafe {
                let sum = match leaves {
                    1 => S::load(sums.leaf(v)),
                    _ => ended::<S>(sums, v, leaves),
                };
                let out = args.out.add(t * args.out_stride + g * LANES);
                let lanes = LANES.min(args.lanes - g * LANES);
                if past && lanes == LANES && out.addr().is_multiple_of(LINE) {
                    S::store_past(out, sum);
                } else {
                    store_lanes::<S>(out, sum, lanes);
                }
            }
        }
    }
    // SAFETY: features by the caller.
    unsafe { S::fence() };
}

/// Sum of the nodes left in the tree's counter for vector `v`, lowest level first.
#[inline(always)]
unsafe fn ended<S: Isa>(sums: Sums, v: usize, leaves: usize) -> S::F {
    let mut level = leaves.trailing_zeros() as usize;
    // SAFETY: passed on; the levels of set bits were written.
    unsafe {
        let mut sum = S::splat(-0.0); // -0 + x is x, to the bit
        while leaves >> level != 0 {
            if leaves >> level & 1 == 1 {
                sum = S::add(S::load(sums.level(level, v)), sum);
            }
            level += 1;
        }
        sum
    }
}

impl Batch {
    /// Functions for products of `count` rows of a precision with a storage type. `None` for
    /// floats, for types that do better without panels, and for rows that are few.
    pub(crate) fn functions(
        &'static self,
        block_type: BlockType,
        precision: Precision,
        count: usize,
    ) -> Option<Functions> {
        self.form(block_type, precision, count)?;
        let kind = formats::kind(block_type)?;
        Some(Functions {
            batch: self,
            unpack: self.unpack[block_type as usize],
            multiply: self.multiply[index(precision)][kind as usize],
        })
    }

    /// Form of activations for products of `count` rows of a precision with a storage type. `None`
    /// where panels are not faster.
    pub(crate) fn form(
        &self,
        block_type: BlockType,
        precision: Precision,
        count: usize,
    ) -> Option<RowFormat> {
        let pays = count >= self.from;
        self.forms[index(precision)].filter(|_| pays && !block_type.is_float())
    }
}

/// Index of a precision in tables.
pub(crate) const fn index(precision: Precision) -> usize {
    match precision {
        Precision::Eight => 0,
        Precision::Fifteen => 1,
    }
}

/// A [`Batch`] for one storage type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Functions {
    batch: &'static Batch,
    unpack: unsafe fn(Unpack),
    multiply: unsafe fn(&Segment<'_>),
}

impl Functions {
    /// Multiplies parts of a matrix, `(neighbouring groups, how many)`, at most [`TOGETHER`] and
    /// `group_bytes` apart, with their rows `first..end` of `x`, at most [`ROWS`].
    ///
    /// # Safety
    /// Features of the table; the pointers of each part cover its groups and outputs; `x` has the
    /// rows, in the form of the batch.
    #[inline(never)] // its buffers would be on the stack of products with few rows too
    pub(crate) unsafe fn run<'a>(
        &self,
        parts: impl Iterator<Item = (GroupArgs<'a>, usize)>,
        x: PanelView<'_>,
        group_bytes: usize,
    ) {
        let mut room = TaskBuffers::new();
        let [begin, end] = self.batch.around;
        // SAFETY: passed on.
        unsafe {
            begin();
            for (args, groups) in parts {
                self.part(&args, x, groups, group_bytes, &mut room);
            }
            end();
        }
    }

    unsafe fn part(
        &self,
        args: &GroupArgs<'_>,
        x: PanelView<'_>,
        groups: usize,
        group_bytes: usize,
        room: &mut TaskBuffers,
    ) {
        let panel: *mut u8 = room.panel.0.as_mut_ptr().cast();
        let rows = args.end - args.first;
        let sums = Sums {
            start: room.sums.0.as_mut_ptr().cast(),
            rows,
            groups,
        };
        let (chunks, per_leaf) = (args.cols / CHUNK, args.leaf_cols / CHUNK);
        let leaves = args.cols.div_ceil(args.leaf_cols);
        let span = args.span / CHUNK;
        // SAFETY: chunks lie within the groups and rows; vectors within their buffers.
        unsafe {
            for leaf in 0..leaves {
                let last = chunks.min((leaf + 1) * per_leaf);
                for c in (leaf * per_leaf..last).step_by(MOST) {
                    let run = MOST.min(last - c);
                    for g in 0..groups {
                        (self.unpack)(Unpack {
                            weights: args.weights.add(g * group_bytes),
                            first: args.first_chunk + c,
                            lacks: args.lacks,
                            chunks: run,
                            span,
                            out: panel.add(g * MOST * self.batch.places * CHUNK_BYTES),
                        });
                    }
                    (self.multiply)(&Segment {
                        panel,
                        groups,
                        chunks: run,
                        span,
                        x,
                        first_chunk: c,
                        first: args.first,
                        rows,
                        fresh: c == leaf * per_leaf,
                        ends: (leaves > 1 && c + run == last).then_some(leaf),
                        is_last: c + run == chunks,
                        sums: sums.start,
                        waiting: &raw mut room.waiting,
                    });
                }
                if let Some(fold) = self.batch.fold.filter(|_| leaves > 1) {
                    fold(sums, leaf);
                }
            }
            (self.batch.store)(sums, args, leaves);
        }
    }
}
