//! AMX: eight tile registers of 16 rows of 64 bytes, and a product of two of them.
//!
//! The intrinsics are not stable in Rust 1.95, so instructions are written as assembly. A process
//! must request permission for the registers once. Some machines grant it and then compute wrong
//! products: AMX is not used there ([`state`]).

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use crate::batch::registers::{LINE, TILE_BYTES, TileRegisters};
use crate::batch::rows::TILE_ROWS;

/// Whether this process may use AMX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmxState {
    /// The CPU lacks AMX for bytes, or the system does not keep its registers.
    Absent,
    /// The system refused the permission.
    Refused,
    /// It gave other bits than AVX-512 in a test at the start, and is not used.
    Wrong,
    /// It is used.
    Ready,
}

/// State of AMX on this machine. The first call requests permission and runs `is_right`, which
/// compares products; later calls return the same.
pub(crate) fn state(is_right: fn() -> bool) -> AmxState {
    static STATE: OnceLock<AmxState> = OnceLock::new();
    *STATE.get_or_init(|| match () {
        () if !detected() => AmxState::Absent,
        () if !permitted() => AmxState::Refused,
        () if !is_right() => AmxState::Wrong,
        () => AmxState::Ready,
    })
}

/// CPUID leaf 7: AMX-INT8 and AMX-TILE; XCR0: the system keeps tile configuration and
/// data (Intel SDM volume 1, section 18.2).
fn detected() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const PARTS: u32 = 1 << 24 | 1 << 25;
    const TILE_STATE: u32 = 1 << 17 | 1 << 18;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: OSXSAVE says that the instruction is there.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack));
    }
    __cpuid_count(7, 0).edx & PARTS == PARTS && low & TILE_STATE == TILE_STATE
}

/// Requests the permission for tiles of this process's threads.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XTILE_DATA: i64 = 18;
    let result: i64;
    // SAFETY: the call changes what the process may use, and no memory of ours.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM,
             in("rsi") XTILE_DATA, out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false // no other system is known to us
}

/// The processor's tiles.
#[derive(Debug)]
pub(crate) struct Amx;

/// The configuration that `ldtilecfg` reads (Intel SDM volume 1, table 18-2).
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Configuration>() == 64);

impl Configuration {
    /// Configuration of all eight tiles at full size.
    const fn new() -> Self {
        let mut this = Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let mut tile = 0;
        while tile < 8 {
            this.rows[tile] = TILE_ROWS as u8;
            this.row_bytes[tile] = LINE as u16;
            tile += 1;
        }
        this
    }
}

/// A single instruction with its operands. The compiler must assume that each reads and writes
/// memory, which keeps them in order.
macro_rules! tile {
    (configure $cfg:expr) => {
        asm!("ldtilecfg [{cfg}]", cfg = in(reg) $cfg, options(nostack))
    };
    (load $t:expr, $from:expr, $at:expr) => {
        asm!("tileloadd tmm{t}, [{from} + {stride}*1 + {at}]", t = const $t, from = in(reg) $from,
             stride = in(reg) LINE, at = const $at, options(nostack))
    };
    (store $t:expr, $to:expr) => {
        asm!("tilestored [{to} + {stride}*1 + {at}], tmm{t}", t = const $t, to = in(reg) $to,
             stride = in(reg) LINE, at = const $t as usize * TILE_BYTES, options(nostack))
    };
    (zero $t:ident) => {
        asm!("tilezero tmm{t}", t = const $t, options(nostack))
    };
    ($dot:literal $c:ident, $a:ident, $b:ident) => {
        asm!(concat!($dot, " tmm{c}, tmm{a}, tmm{b}"), c = const $c, a = const $a, b = const $b,
             options(nostack))
    };
    (release) => {
        asm!("tilerelease", options(nostack))
    };
}

// SAFETY (whole impl): the trait's callers guarantee that AMX may be used and what pointers cover.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block is one instruction under the trait's contract, see above"
)]
impl TileRegisters for Amx {
    #[inline(always)]
    unsafe fn configured() -> Self {
        const WHOLE: Configuration = Configuration::new();
        let configuration = WHOLE;
        unsafe { tile!(configure & raw const configuration) };
        Self
    }
    #[inline(always)]
    unsafe fn left() -> Self {
        Self
    }
    #[inline(always)]
    unsafe fn load<const T: u8, const N: usize, const UNIT: usize>(&mut self, from: *const u8) {
        unsafe { tile!(load T, from, N * UNIT) }
    }
    #[inline(always)]
    unsafe fn store<const T: u8>(&self, results: *mut i32) {
        unsafe { tile!(store T, results) }
    }
    #[inline(always)]
    unsafe fn zero<const T: u8>(&mut self) {
        unsafe { tile!(zero T) }
    }
    #[inline(always)]
    unsafe fn dot_signed<const C: u8, const A: u8, const B: u8>(&mut self) {
        unsafe { tile!("tdpbssd" C, A, B) }
    }
    #[inline(always)]
    unsafe fn dot_unsigned<const C: u8, const A: u8, const B: u8>(&mut self) {
        unsafe { tile!("tdpbsud" C, A, B) }
    }
    #[inline(always)]
    unsafe fn release(self) {
        unsafe { tile!(release) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Never run: its bytes are read. Ends with a return, as every function.
    #[inline(never)]
    unsafe extern "C" fn all(pointer: *const u8, stride: usize) {
        // SAFETY: never called.
        unsafe {
            let mut tiles = Amx;
            asm!("/* {0} {1} */", in(reg) pointer, in(reg) stride);
            tiles.dot_signed::<0, 4, 6>();
            tiles.dot_unsigned::<3, 5, 7>();
            tiles.zero::<0>();
            tiles.zero::<3>();
            tiles.release();
            asm!(
                "tileloadd tmm4, [rsi + rdx*1]",
                "tilestored [rsi + rdx*1], tmm1",
                "ldtilecfg [rdi]"
            );
        }
    }

    /// Encodings by hand from the opcode tables of the Intel SDM, volume 2: VEX prefix, opcode,
    /// register byte. In products the middle operand, the activations, is in the register byte
    /// and the last one in the prefix.
    #[test]
    fn instructions_are_encoded_as_the_manual_says() {
        const EXPECTED: [(&str, &[u8]); 8] = [
            ("tdpbssd tmm0, tmm4, tmm6", &[0xc4, 0xe2, 0x4b, 0x5e, 0xc4]),
            ("tdpbsud tmm3, tmm5, tmm7", &[0xc4, 0xe2, 0x42, 0x5e, 0xdd]),
            ("tilezero tmm0", &[0xc4, 0xe2, 0x7b, 0x49, 0xc0]),
            ("tilezero tmm3", &[0xc4, 0xe2, 0x7b, 0x49, 0xd8]),
            ("tilerelease", &[0xc4, 0xe2, 0x78, 0x49, 0xc0]),
            (
                "tileloadd tmm4, [rsi + rdx]",
                &[0xc4, 0xe2, 0x7b, 0x4b, 0x24, 0x16],
            ),
            (
                "tilestored [rsi + rdx], tmm1",
                &[0xc4, 0xe2, 0x7a, 0x4b, 0x0c, 0x16],
            ),
            ("ldtilecfg [rdi]", &[0xc4, 0xe2, 0x78, 0x49, 0x07]),
        ];
        let code = std::hint::black_box(all as *const u8);
        // SAFETY: the function is longer than this many bytes with what follows it in the binary.
        let code = unsafe { std::slice::from_raw_parts(code, 96) };
        for (text, bytes) in EXPECTED {
            let found = code.windows(bytes.len()).any(|window| window == bytes);
            assert!(found, "{text}: no {bytes:x?} in {code:x?}");
        }
    }

    #[test]
    fn a_configuration_is_what_the_manual_says() {
        let Configuration {
            rows,
            row_bytes,
            palette,
            start_row,
            ..
        } = Configuration::new();
        assert_eq!((palette, start_row), (1, 0));
        assert_eq!(
            rows,
            [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(row_bytes[..9], [64, 64, 64, 64, 64, 64, 64, 64, 0]);
    }

    #[test]
    fn amx_is_ready_here_or_skipped_by_name() {
        match crate::InstructionSet::amx() {
            AmxState::Ready => {}
            state => eprintln!("SKIPPED AMX products on the processor: {state:?}"),
        }
    }
}
