//! The kernels of gated delta nets, compiled once per instruction set.
//!
//! They are not in [`crate::dispatch`], whose modules take minutes to compile.

use super::{Chains, accumulate, taps};
use crate::InstructionSet;

/// Kernels of one instruction set. Calling one is safe only under its contract and on a machine
/// that has the features.
#[derive(Debug)]
pub(crate) struct DeltaKernels {
    pub(crate) accumulate: unsafe fn(Chains),
    pub(crate) taps: unsafe fn(&[f32], &[f32], &mut [f32]),
}

/// A module `$name` with the kernels under the given target features.
macro_rules! table {
    ($(#[$cfg:meta])* $name:ident, $isa:ty, $($feature:literal)?) => {
        $(#[$cfg])*
        mod $name {
            use super::{Chains, DeltaKernels};

            /// # Safety
            /// The CPU has the features; the contract of the inlined function.
            $(#[target_feature(enable = $feature)])?
            unsafe fn accumulate(chains: Chains) {
                // SAFETY: passed on.
                unsafe { super::accumulate::<$isa>(chains) }
            }

            /// # Safety
            /// See `accumulate`.
            $(#[target_feature(enable = $feature)])?
            unsafe fn taps(taps: &[f32], x: &[f32], out: &mut [f32]) {
                // SAFETY: passed on.
                unsafe { super::taps::<$isa>(taps, x, out) }
            }

            pub(super) static TABLE: DeltaKernels = DeltaKernels { accumulate, taps };
        }
    };
}

table!(scalar, crate::isa::Scalar,);
table!(
    #[cfg(target_arch = "x86_64")]
    avx2,
    crate::isa::Avx2,
    "avx2,fma,f16c"
);
table!(
    #[cfg(target_arch = "x86_64")]
    avx512,
    crate::isa::Avx512,
    "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c"
);
table!(
    #[cfg(target_arch = "aarch64")]
    neon,
    crate::isa::Neon,
    "neon,dotprod"
);

/// The kernels for a set that this machine has.
pub(crate) fn table(set: InstructionSet) -> &'static DeltaKernels {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 | InstructionSet::AvxVnni => &avx2::TABLE,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni => &avx512::TABLE,
        // Emulated tiles need no instruction set.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::AmxInt8 if InstructionSet::Avx512Vnni.table().is_some() => &avx512::TABLE,
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => &neon::TABLE,
        _ => &scalar::TABLE,
    }
}
