//! The kernels compiled once per instruction set, as tables of functions.
//!
//! The `kernels!` macro makes a module per instruction set whose functions carry the target
//! features and inline the generic code. A [`KernelTable`] is chosen once, after detection.
//! `batch_kernels!` makes one for a set that differs from another in its products of many rows
//! only.

use half::{bf16, f16};
use paceline_base::BlockType;

use crate::activations::{ActivationWriter, Precision};
use crate::attention::{self, FiveBitKey, FourBitValue, PageView, Query};
#[cfg(target_arch = "x86_64")]
use crate::batch::amx::{AmxState, state as amx_state};
#[cfg(target_arch = "aarch64")]
use crate::batch::bytes;
use crate::batch::rows::{PanelWriter, RowFormat};
#[cfg(target_arch = "x86_64")]
use crate::batch::tiles;
use crate::batch::{Batch, Segment, Sums, Unpack, no_panel, nothing, words};
use crate::formats;
use crate::isa::{self, Isa};
#[cfg(target_arch = "x86_64")]
use crate::kernels;
use crate::limits;
use crate::matmul::{self, GroupArgs};
use crate::sparse::{self, IndexQueries};
use crate::vector::{self, RopePairs};

paceline_base::named_enum! {
    /// The instruction set that kernels were compiled for.
    ///
    /// All give the same bits ([`crate::isa`]); they differ in speed only, the slowest first.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum InstructionSet {
        /// Portable loops; any CPU, very slow.
        Scalar = "scalar",
        /// x86-64 with AVX2, FMA and F16C.
        Avx2 = "avx2",
        /// The same with AVX-VNNI: Intel's Core from Alder Lake (2021) on, AMD's Zen 5.
        AvxVnni = "avx-vnni",
        /// x86-64 with AVX-512 F, BW, VL and VNNI, and BF16's dot products where it has them.
        Avx512Vnni = "avx512-vnni",
        /// AVX-512 as above, and products of many rows by AMX's tiles of bytes.
        AmxInt8 = "amx-int8",
        /// AArch64 with the dot-product extension.
        NeonDotprod = "neon-dotprod",
        /// The same, and products of many rows by the matrix instructions of the i8mm extension.
        NeonI8mm = "neon-i8mm",
    }
}

impl InstructionSet {
    /// The sets that this machine can run, slowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL
            .into_iter()
            .filter(|set| set.table().is_some())
            .collect()
    }

    /// Whether AMX can be used here. The first call requests permission from the system and
    /// compares AMX products with those of AVX-512 (some ms).
    #[cfg(target_arch = "x86_64")]
    pub fn amx() -> AmxState {
        if !has_avx512() {
            return AmxState::Absent;
        }
        amx_state(|| kernels::same_products(&amx::TABLE, &avx512::TABLE))
    }

    /// The kernels, if this machine can run them.
    pub(crate) fn table(self) -> Option<&'static KernelTable> {
        match self {
            Self::Scalar => Some(&scalar::TABLE),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has_avx2().then_some(&avx2::TABLE),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => {
                let has = has_avx2() && is_x86_feature_detected!("avxvnni");
                has.then_some(&avx_vnni::TABLE)
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => has_avx512().then_some(&avx512::TABLE),
            #[cfg(target_arch = "x86_64")]
            Self::AmxInt8 => (Self::amx() == AmxState::Ready).then_some(&amx::TABLE),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => has_dotprod().then_some(&neon::TABLE),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => {
                let has = has_dotprod() && std::arch::is_aarch64_feature_detected!("i8mm");
                has.then_some(&i8mm::TABLE)
            }
            #[allow(unreachable_patterns, reason = "the sets of other architectures")]
            _ => None,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(target_arch = "aarch64")]
fn has_dotprod() -> bool {
    std::arch::is_aarch64_feature_detected!("dotprod")
}

/// Rotates heads, as [`vector::rope`].
type Rotate = unsafe fn(&mut [f32], usize, &[(f32, f32)], RopePairs);

/// Kernels of one instruction set. Calling one is safe only under its contract and on a machine
/// that has the features; tables are handed out after detection only.
#[derive(Debug)]
pub(crate) struct KernelTable {
    pub(crate) set: InstructionSet,
    /// By weight type, for [`Precision::Eight`] and for [`Precision::Fifteen`].
    groups: [[unsafe fn(GroupArgs<'_>); BlockType::COMPUTED]; 2],
    /// For BF16 weights and activations rounded to bf16.
    pairs: unsafe fn(GroupArgs<'_>),
    /// For weights of FP8.
    fp8: unsafe fn(GroupArgs<'_>),
    pub(crate) quantise_row: unsafe fn(&ActivationWriter<'_>, usize),
    pub(crate) rms_norm: unsafe fn(*const f32, &[f32], f32, *mut f32),
    pub(crate) dot: unsafe fn(&[f32], &[f32]) -> f32,
    pub(crate) silu_mul: unsafe fn(&[f32], &[f32], &mut [f32]),
    pub(crate) gelu_mul: unsafe fn(&[f32], &[f32], &mut [f32]),
    pub(crate) exp_scaled: unsafe fn(&[f32], f32, f32, &mut [f32]),
    pub(crate) rope: Rotate,
    pub(crate) attend_f16: unsafe fn(PageView, &[Query]),
    pub(crate) attend_f32: unsafe fn(PageView, &[Query]),
    pub(crate) attend_q8: unsafe fn(PageView, &[Query]),
    pub(crate) attend_q4: unsafe fn(PageView, &[Query]),
    pub(crate) index_f16: unsafe fn(PageView, IndexQueries, *mut f32),
    pub(crate) index_f32: unsafe fn(PageView, IndexQueries, *mut f32),
    pub(crate) index_q8: unsafe fn(PageView, IndexQueries, *mut f32),
    pub(crate) merge: unsafe fn(&mut [f32], &[f32]),
    pub(crate) sink: unsafe fn(&mut [f32], f32),
    pub(crate) finish: unsafe fn(&[f32], &mut [f32]),
    pub(crate) exp: unsafe fn(&[f32; isa::LANES], &mut [f32; isa::LANES]),
    pub(crate) read: unsafe fn(&[u8], usize) -> u64,
    pub(crate) dots: unsafe fn(u64) -> u64,
    /// For many rows, where the set has something better than its rows a few at a time.
    pub(crate) batch: Option<&'static Batch>,
}

impl KernelTable {
    /// The product kernel of a weight type; `precision` is that of the activations, and does not
    /// matter for float weights.
    pub(crate) fn group(
        &self,
        block_type: BlockType,
        precision: Option<Precision>,
    ) -> unsafe fn(GroupArgs<'_>) {
        let fifteen = usize::from(precision == Some(Precision::Fifteen));
        #[cfg(target_arch = "x86_64")]
        if let Some(grid) = (block_type as usize).checked_sub(BlockType::IQ2_XXS as usize)
            && grid < GRIDS
            && self.has_vbmi()
        {
            return [eight_vbmi::GROUPS, fifteen_vbmi::GROUPS][fifteen][grid];
        }
        self.groups[fifteen][block_type as usize]
    }

    /// Whether the registers are those of AVX-512.
    #[cfg(target_arch = "x86_64")]
    fn is_avx512(&self) -> bool {
        [InstructionSet::Avx512Vnni, InstructionSet::AmxInt8].contains(&self.set)
    }

    /// Whether the kernels of few rows are those of AVX-512 VBMI where there are some.
    #[cfg(target_arch = "x86_64")]
    fn has_vbmi(&self) -> bool {
        self.is_avx512() && is_x86_feature_detected!("avx512vbmi")
    }

    /// The product kernel of FP8 weights.
    pub(crate) fn fp8(&self) -> unsafe fn(GroupArgs<'_>) {
        #[cfg(target_arch = "x86_64")]
        if self.has_vbmi() {
            return fp8_vbmi;
        }
        self.fp8
    }

    /// The product kernel of BF16 weights for activations rounded to bf16; `tiny` says whether
    /// there are weights below [`SMALLEST`](crate::rounded::SMALLEST).
    pub(crate) fn pairs(&self, tiny: bool) -> unsafe fn(GroupArgs<'_>) {
        #[cfg(target_arch = "x86_64")]
        {
            if self.is_avx512() && is_x86_feature_detected!("avx512bf16") && !tiny {
                return dpbf16_group;
            }
        }
        let _ = tiny; // elsewhere all are multiplied alike
        self.pairs
    }
}

#[inline(always)]
unsafe fn exp_lanes<S: Isa>(x: &[f32; isa::LANES], out: &mut [f32; isa::LANES]) {
    // SAFETY: sixteen lanes each.
    unsafe { S::store(out.as_mut_ptr(), isa::exp::<S>(S::load(x.as_ptr()))) }
}

/// A function with the given target features around an inlined generic one.
macro_rules! kernel {
    ([$($feature:literal)?] $name:ident($($arg:ident: $t:ty),*) $(-> $out:ty)? = $body:expr) => {
        /// # Safety
        /// The CPU has the features; the contract of the inlined function.
        $(#[target_feature(enable = $feature)])?
        unsafe fn $name($($arg: $t),*) $(-> $out)? {
            // SAFETY: passed on.
            unsafe { $body($($arg),*) }
        }
    };
}

/// Hands two lists to another macro behind what it gets. The first has the packed formats, each
/// with a name for its function. The second has the function of each integer type, in the order
/// of `BlockType`. Types that are packed alike share a function.
macro_rules! integer_types {
    ($then:ident! $($first:tt)*) => {
        $then!($($first)*
            [q4_0 Q4_0, q4_1 Q4_1, q5_0 Q5_0, q5_1 Q5_1, q8_0 Q8_0, q2_k Q2_K, q3_k Q3_K,
             q4_k Q4_K, q5_k Q5_K, q6_k Q6_K, iq4_nl IQ4_NL, iq4_xs IQ4_XS, affine2 AFFINE2,
             affine3 AFFINE3, affine6 AFFINE6, affine8 AFFINE8, iq2_xxs IQ2_XXS, iq2_xs IQ2_XS,
             iq2_s IQ2_S, iq3_xxs IQ3_XXS, iq3_s IQ3_S, mxfp4 MXFP4]
            [q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs,
             affine2, affine2, affine3, affine3, q4_1, q4_1, q5_1, q5_1, affine6, affine6,
             affine8, affine8, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, mxfp4]);
    };
}

/// The product kernels of all types for activations of `$terms` bytes, in the order of
/// `BlockType`.
macro_rules! integer_groups {
    ([$($feature:literal)?] $isa:ty, $terms:literal) => {
        integer_types!(integer_groups! @each [$($feature)?] $isa, $terms,);
    };
    (@each $feature:tt $isa:ty, $terms:literal,
     [$($name:ident $format:ident),*] [$($of_type:ident),*]) => {
        integer_groups!(@functions $isa, $terms, $feature, $($name $format),*);
        pub(super) const GROUPS: [unsafe fn(GroupArgs<'_>); BlockType::COMPUTED] =
            [f32_group, f16_group, bf16_group, $($of_type),*];
    };
    (@functions $isa:ty, $terms:literal, $feature:tt, $($name:ident $format:ident),*) => {
        $(kernel!($feature $name(args: GroupArgs<'_>)
            = matmul::group::<$isa, formats::$format, $terms>);)*
    };
}

/// A module `$name` with the product of a panel for each [`formats::Kind`], in their order.
macro_rules! multiply {
    ($feature:tt $name:ident $plain:expr, $min:expr, $halves:expr, $halves_min:expr,
     $wide:expr, $wide_min:expr) => {
        mod $name {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;
            kernel!($feature plain(segment: &Segment<'_>) = $plain);
            kernel!($feature min(segment: &Segment<'_>) = $min);
            kernel!($feature halves(segment: &Segment<'_>) = $halves);
            kernel!($feature halves_min(segment: &Segment<'_>) = $halves_min);
            kernel!($feature wide(segment: &Segment<'_>) = $wide);
            kernel!($feature wide_min(segment: &Segment<'_>) = $wide_min);
            pub(super) const ALL: [unsafe fn(&Segment<'_>); formats::Kind::COUNT] =
                [plain, min, halves, halves_min, wide, wide_min];
        }
    };
}

/// The batch functions for panels that `$unpack` makes. The arguments are the least number of rows
/// that pays, the forms and products for each [`Precision`], and the functions that make rows, by
/// [`RowFormat`]. The places of a chunk and the functions that are called around products follow.
macro_rules! batch {
    ($feature:tt $isa:ty, $unpack:ident, $from:expr, $forms:expr,
     $multiply:expr, $make_row:expr, $places:expr, $around:expr,
     $fold:expr) => {
        integer_types!(batch! @unpack $feature $isa, $unpack,);
        kernel!($feature store(sums: Sums, args: &GroupArgs<'_>, leaves: usize)
            = crate::batch::store::<$isa>);
        pub(super) static BATCH: Batch = Batch {
            from: $from,
            forms: $forms,
            make_row: $make_row,
            unpack: UNPACK,
            multiply: $multiply,
            places: $places,
            around: $around,
            fold: $fold,
            store,
        };
    };
    (@unpack $feature:tt $isa:ty, $unpack:ident,
     [$($name:ident $format:ident),*] [$($of_type:ident),*]) => {
        batch!(@unpack_each $feature $isa, $unpack, $($name $format),*);
        const UNPACK: [unsafe fn(Unpack); BlockType::COMPUTED] =
            [no_panel, no_panel, no_panel, $($of_type),*];
    };
    (@unpack_each $feature:tt $isa:ty, $unpack:ident, $($name:ident $format:ident),*) => {
        $(kernel!($feature $name(args: Unpack) = $unpack::unpack::<$isa, formats::$format>);)*
    };
}

/// A batch over panels of words, with `$rows` activation rows to a tile.
macro_rules! words_batch {
    ($feature:tt $isa:ty, $rows:literal) => {
        mod many {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;
            kernel!($feature fold(sums: Sums, leaf: usize) = crate::batch::fold::<$isa>);
            kernel!($feature make_row(writer: &PanelWriter<'_>, t: usize)
                = PanelWriter::words::<$isa>);
            multiply!($feature by_words
                words::multiply::<$isa, $rows, false, false, false>,
                words::multiply::<$isa, $rows, false, true, false>,
                words::multiply::<$isa, $rows, true, false, false>,
                words::multiply::<$isa, $rows, true, true, false>,
                words::multiply::<$isa, $rows, false, false, true>,
                words::multiply::<$isa, $rows, false, true, true>
            );
            batch!($feature $isa, words, words::FROM, [None, Some(RowFormat::Words)],
                [by_words::ALL; 2], [None, Some(make_row), None, None],
                1, [nothing; 2], Some(fold));
        }
    };
}

/// Products of panels of bytes for matrix instructions.
#[cfg(target_arch = "aarch64")]
macro_rules! multiply_bytes {
    ($feature:tt $isa:ty, $tiles:ty) => {
        kernel!($feature copy_bytes(writer: &PanelWriter<'_>, t: usize) = PanelWriter::bytes);
        multiply!($feature by_bytes
            bytes::multiply::<$isa, $tiles, false, false, false>,
            bytes::multiply::<$isa, $tiles, false, true, false>,
            bytes::multiply::<$isa, $tiles, true, false, false>,
            bytes::multiply::<$isa, $tiles, true, true, false>,
            bytes::multiply::<$isa, $tiles, false, false, true>,
            bytes::multiply::<$isa, $tiles, false, true, true>
        );
    };
}

/// A batch over panels of bytes.
#[cfg(target_arch = "aarch64")]
macro_rules! bytes_batch {
    ($feature:tt $isa:ty, $tiles:ty) => {
        mod many {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;
            multiply_bytes!($feature $isa, $tiles);
            kernel!($feature fold(sums: Sums, leaf: usize) = crate::batch::fold::<$isa>);
            batch!($feature $isa, bytes, <$tiles as bytes::Tiles>::FROM,
                [None, Some(RowFormat::Bytes)], [by_bytes::ALL; 2],
                [Some(copy_bytes), None, None, None], 1, [nothing; 2], Some(fold));
        }
    };
}

/// A batch over panels of tiles, whose products are the same for all types but the wide.
#[cfg(target_arch = "x86_64")]
macro_rules! tiles_batch {
    ($feature:tt $isa:ty, $registers:ty) => {
        mod many {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;
            kernel!($feature begin() = tiles::begin::<$registers>);
            kernel!($feature end() = tiles::end::<$registers>);
            kernel!($feature tile_row(writer: &PanelWriter<'_>, t: usize)
                = PanelWriter::tiles::<$isa, 2>);
            kernel!($feature small_tile_row(writer: &PanelWriter<'_>, t: usize)
                = PanelWriter::tiles::<$isa, 1>);
            kernel!($feature two(segment: &Segment<'_>)
                = tiles::multiply::<$isa, $registers, 2, false>);
            kernel!($feature one(segment: &Segment<'_>)
                = tiles::multiply::<$isa, $registers, 1, false>);
            kernel!($feature two_wide(segment: &Segment<'_>)
                = tiles::multiply::<$isa, $registers, 2, true>);
            kernel!($feature one_wide(segment: &Segment<'_>)
                = tiles::multiply::<$isa, $registers, 1, true>);
            batch!($feature $isa, tiles, tiles::FROM,
                [Some(RowFormat::SmallTiles), Some(RowFormat::Tiles)],
                [
                    [one, one, one, one, one_wide, one_wide],
                    [two, two, two, two, two_wide, two_wide],
                ],
                [None, None, Some(tile_row), Some(small_tile_row)], tiles::PLACES,
                [begin, end], None);
        }
    };
}

macro_rules! kernels {
    ($(#[$cfg:meta])? $module:ident, $isa:ty, $set:expr, $($feature:literal)?; $($batch:tt)*) => {
        $(#[$cfg])?
        mod $module {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;

            macro_rules! group {
                ($name:ident = $body:expr) => {
                    kernel!([$($feature)?] $name(args: GroupArgs<'_>) = $body);
                };
            }

            group!(f32_group = matmul::group_floats::<$isa, f32>);
            group!(f16_group = matmul::group_floats::<$isa, f16>);
            group!(bf16_group = matmul::group_floats::<$isa, bf16>);
            group!(pairs = matmul::pairs::group::<$isa, isa::InTurn>);
            group!(fp8 = matmul::fp8::group::<$isa>);

            mod eight {
                #[allow(clippy::wildcard_imports, reason = "a macro's module")]
                use super::*;
                integer_groups!([$($feature)?] $isa, 1);
            }
            mod fifteen {
                #[allow(clippy::wildcard_imports, reason = "a macro's module")]
                use super::*;
                integer_groups!([$($feature)?] $isa, 2);
            }

            kernel!([$($feature)?] quantise_row(writer: &ActivationWriter<'_>, t: usize)
                = ActivationWriter::quantise_row::<$isa>);
            kernel!([$($feature)?] rms_norm(x: *const f32, w: &[f32], eps: f32, out: *mut f32)
                = vector::rms_norm::<$isa>);
            kernel!([$($feature)?] dot(x: &[f32], y: &[f32]) -> f32 = vector::dot::<$isa>);
            kernel!([$($feature)?] silu_mul(gate: &[f32], up: &[f32], out: &mut [f32])
                = vector::silu_mul::<$isa>);
            kernel!([$($feature)?] gelu_mul(gate: &[f32], up: &[f32], out: &mut [f32])
                = vector::gelu_mul::<$isa>);
            kernel!([$($feature)?] rope(x: &mut [f32], dim: usize, angles: &[(f32, f32)],
                pairs: RopePairs) = vector::rope);
            kernel!([$($feature)?] exp_scaled(x: &[f32], shift: f32, scale: f32, out: &mut [f32])
                = vector::exp_scaled::<$isa>);
            kernel!([$($feature)?] attend_f16(page: PageView, queries: &[Query])
                = attention::attend::<$isa, f16, f16>);
            kernel!([$($feature)?] attend_f32(page: PageView, queries: &[Query])
                = attention::attend::<$isa, f32, f32>);
            kernel!([$($feature)?] attend_q8(page: PageView, queries: &[Query])
                = attention::attend::<$isa, i8, i8>);
            kernel!([$($feature)?] attend_q4(page: PageView, queries: &[Query])
                = attention::attend::<$isa, FiveBitKey, FourBitValue>);
            kernel!([$($feature)?] index_f16(page: PageView, row: IndexQueries, out: *mut f32)
                = sparse::index::<$isa, f16>);
            kernel!([$($feature)?] index_f32(page: PageView, row: IndexQueries, out: *mut f32)
                = sparse::index::<$isa, f32>);
            kernel!([$($feature)?] index_q8(page: PageView, row: IndexQueries, out: *mut f32)
                = sparse::index::<$isa, i8>);
            kernel!([$($feature)?] merge(into: &mut [f32], next: &[f32])
                = attention::merge::<$isa>);
            kernel!([$($feature)?] sink(into: &mut [f32], score: f32)
                = attention::sink::<$isa>);
            kernel!([$($feature)?] finish(partial: &[f32], out: &mut [f32])
                = attention::finish::<$isa>);
            kernel!([$($feature)?] exp(x: &[f32; isa::LANES], out: &mut [f32; isa::LANES])
                = exp_lanes::<$isa>);
            kernel!([$($feature)?] read(bytes: &[u8], ahead: usize) -> u64 = limits::read::<$isa>);

            kernels!(@batch [$($feature)?] $isa, $($batch)*);

            pub(super) static TABLE: KernelTable = KernelTable {
                set: $set,
                groups: [eight::GROUPS, fifteen::GROUPS],
                pairs,
                fp8,
                quantise_row,
                rms_norm,
                dot,
                silu_mul,
                gelu_mul,
                exp_scaled,
                rope,
                attend_f16,
                attend_f32,
                attend_q8,
                attend_q4,
                index_f16,
                index_f32,
                index_q8,
                merge,
                sink,
                finish,
                exp,
                read,
                dots,
                batch: BATCH_TABLE,
            };
        }
    };
    (@batch $feature:tt $isa:ty,) => {
        kernel!($feature dots(count: u64) -> u64 = limits::dots::<$isa>);
        const BATCH_TABLE: Option<&Batch> = None;
    };
    (@batch $feature:tt $isa:ty, tiles $tiles:ty) => {
        kernel!($feature dots(count: u64) -> u64 = limits::dots::<$isa>);
        bytes_batch!($feature $isa, $tiles);
        const BATCH_TABLE: Option<&Batch> = Some(&many::BATCH);
    };
    (@batch $feature:tt $isa:ty, registers $registers:ty) => {
        kernel!($feature dots(count: u64) -> u64 = tiles::dots::<$registers>);
        tiles_batch!($feature $isa, $registers);
        const BATCH_TABLE: Option<&Batch> = Some(&many::BATCH);
    };
    (@batch $feature:tt $isa:ty, words $rows:literal) => {
        kernel!($feature dots(count: u64) -> u64 = limits::dots::<$isa>);
        words_batch!($feature $isa, $rows);
        const BATCH_TABLE: Option<&Batch> = Some(&many::BATCH);
    };
}

/// Like `kernels!`, with the kernels of module `$like` except for products of many rows. Both sets
/// have the same lanes, so a second copy would be the same code, and minutes of the compiler's
/// time.
macro_rules! batch_kernels {
    ($(#[$cfg:meta])? $module:ident like $like:ident, $isa:ty, $set:expr, $($feature:literal)?;
     $($batch:tt)*) => {
        $(#[$cfg])?
        mod $module {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;

            kernels!(@batch [$($feature)?] $isa, $($batch)*);

            pub(super) static TABLE: KernelTable = KernelTable {
                set: $set,
                dots,
                batch: BATCH_TABLE,
                ..super::$like::TABLE
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(["avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c"]
    dpbf16_group(args: GroupArgs<'_>) = matmul::pairs::group::<isa::Avx512, isa::Dpbf16>);

/// Types with grids, which follow one another in `BlockType`.
#[cfg(target_arch = "x86_64")]
const GRIDS: usize = BlockType::IQ3_S as usize - BlockType::IQ2_XXS as usize + 1;

/// A module with the product kernels of [`GRIDS`] for processors with VBMI, which look rows up in
/// registers.
#[cfg(target_arch = "x86_64")]
macro_rules! grid_groups {
    ($module:ident, $terms:literal, $($name:ident $format:ident),*) => {
        mod $module {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;
            $(kernel!(["avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c"]
                $name(args: GroupArgs<'_>)
                = matmul::group::<isa::Avx512Vbmi, formats::$format, $terms>);)*
            pub(super) const GROUPS: [unsafe fn(GroupArgs<'_>); GRIDS] = [$($name),*];
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(["avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c"]
    fp8_vbmi(args: GroupArgs<'_>) = matmul::fp8::group::<isa::Avx512Vbmi>);
#[cfg(target_arch = "x86_64")]
grid_groups!(eight_vbmi, 1, iq2_xxs IQ2_XXS, iq2_xs IQ2_XS, iq2_s IQ2_S, iq3_xxs IQ3_XXS,
    iq3_s IQ3_S);
#[cfg(target_arch = "x86_64")]
grid_groups!(fifteen_vbmi, 2, iq2_xxs IQ2_XXS, iq2_xs IQ2_XS, iq2_s IQ2_S, iq3_xxs IQ3_XXS,
    iq3_s IQ3_S);

// Rows to a tile of words: sums of two rows and two groups are half of AVX2's registers and of
// AVX-512's those of four. With twice as many 0.67 to 0.88 and 0.89 to 1 of the speed (Intel Xeon).
kernels!(scalar, isa::Scalar, InstructionSet::Scalar,; words 2);
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx2,
    isa::Avx2,
    InstructionSet::Avx2,
    "avx2,fma,f16c"; words 2
);
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx_vnni,
    isa::AvxVnni,
    InstructionSet::AvxVnni,
    "avx2,fma,f16c,avxvnni"; words 2
);
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx512,
    isa::Avx512,
    InstructionSet::Avx512Vnni,
    "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c"; words 4
);
batch_kernels!(
    #[cfg(target_arch = "x86_64")]
    amx like avx512,
    isa::Avx512,
    InstructionSet::AmxInt8,
    "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c"; registers crate::batch::amx::Amx
);
batch_kernels!(
    #[cfg(all(test, target_arch = "x86_64"))]
    emulated like scalar,
    isa::Called,
    InstructionSet::AmxInt8,; registers crate::batch::emulated::Emulated
);

/// AMX's kernels over emulated tiles.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) static EMULATED: &KernelTable = &emulated::TABLE;

kernels!(
    #[cfg(target_arch = "aarch64")]
    neon,
    isa::Neon,
    InstructionSet::NeonDotprod,
    "neon,dotprod";
);
batch_kernels!(
    #[cfg(target_arch = "aarch64")]
    i8mm like neon,
    isa::Neon,
    InstructionSet::NeonI8mm,
    "neon,dotprod,i8mm"; tiles crate::batch::smmla::Smmla
);
