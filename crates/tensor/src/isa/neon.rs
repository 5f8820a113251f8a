//! NEON with the dot-product extension: four registers of four lanes.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one contract for all: the trait's callers guarantee features and pointers"
)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Bytes, Isa};

/// Needs neon, dotprod and fp16 conversion (every Apple silicon Mac and ARMv8.2 server has them).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon;

type F = [float32x4_t; 4];
type I = [int32x4_t; 4];
type W = [uint8x16_t; 4];

/// Applies an intrinsic to the four registers.
macro_rules! each {
    ($f:expr, $a:expr) => {
        unsafe { [$f($a[0]), $f($a[1]), $f($a[2]), $f($a[3])] }
    };
    ($f:expr, $a:expr, $b:expr) => {
        unsafe {
            [
                $f($a[0], $b[0]),
                $f($a[1], $b[1]),
                $f($a[2], $b[2]),
                $f($a[3], $b[3]),
            ]
        }
    };
}

/// An instruction that adds products of signed bytes to `acc`. Their intrinsics are not stable in
/// Rust 1.95, so they are written as text.
macro_rules! byte_products {
    ($(#[$doc:meta])* $visibility:vis $name:ident of $extension:literal) => {
        $(#[$doc])*
        #[inline(always)]
        $visibility unsafe fn $name(
            mut acc: int32x4_t,
            a: int8x16_t,
            b: int8x16_t,
        ) -> int32x4_t {
            unsafe {
                asm!(
                    concat!(".arch_extension ", $extension),
                    concat!(stringify!($name), " {acc:v}.4s, {a:v}.16b, {b:v}.16b"),
                    acc = inout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            acc
        }
    };
}

byte_products! {
    /// The sum of four products per lane.
    sdot of "dotprod"
}
byte_products! {
    /// `a b^T` for two rows of eight bytes each.
    ///
    /// # Safety
    /// The CPU has i8mm.
    pub(crate) smmla of "i8mm"
}

/// Four f16 to f32; `fcvtl` is part of base ARMv8.
#[inline(always)]
unsafe fn widen_f16(half: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    unsafe {
        asm!("fcvtl {out:v}.4s, {half:v}.4h", out = lateout(vreg) out, half = in(vreg) half,
             options(pure, nomem, nostack, preserves_flags));
    }
    out
}

impl Isa for Neon {
    type F = F;
    type I = I;
    type W = W;
    const REGISTERS: usize = 8;
    const SIGNED_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn load_w(p: *const u8) -> W {
        unsafe {
            [
                vld1q_u8(p),
                vld1q_u8(p.add(16)),
                vld1q_u8(p.add(32)),
                vld1q_u8(p.add(48)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_w(p: *mut u8, w: W) {
        for (i, part) in w.into_iter().enumerate() {
            unsafe { vst1q_u8(p.add(16 * i), part) }
        }
    }
    #[inline(always)]
    unsafe fn low_nibble(w: W) -> W {
        let mask = unsafe { [vdupq_n_u8(15); 4] };
        each!(vandq_u8, w, mask)
    }
    #[inline(always)]
    unsafe fn crumb<const INDEX: u32>(w: W) -> W {
        let (count, mask) = unsafe { ([vdupq_n_s8(-(2 * INDEX as i8)); 4], [vdupq_n_u8(3); 4]) };
        let shifted = each!(vshlq_u8, w, count);
        each!(vandq_u8, shifted, mask)
    }
    #[inline(always)]
    unsafe fn spread_bits(p: *const u8, value: u8) -> W {
        const SELECT: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
        unsafe {
            let (select, value) = (vld1q_u8(SELECT.as_ptr()), vdupq_n_u8(value));
            let pick = |i: usize| {
                let bytes = vcombine_u8(vdup_n_u8(*p.add(2 * i)), vdup_n_u8(*p.add(2 * i + 1)));
                vandq_u8(vtstq_u8(bytes, select), value)
            };
            [pick(0), pick(1), pick(2), pick(3)]
        }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], w: W) -> W {
        let table = unsafe { [vld1q_u8(table.as_ptr().cast()); 4] };
        each!(vqtbl1q_u8, table, w)
    }
    #[inline(always)]
    unsafe fn mirrored(w: W, p: *const u8) -> W {
        unsafe {
            let set = Self::spread_bits(p, 255);
            let less = |i: usize| vsubq_u8(vdupq_n_u8(128), w[i]);
            let pick = |i: usize| vbslq_u8(set[i], less(i), w[i]);
            [pick(0), pick(1), pick(2), pick(3)]
        }
    }
    #[inline(always)]
    unsafe fn split(a: W, b: W) -> [W; 2] {
        let (a, b) = (
            each!(vreinterpretq_u32_u8, a),
            each!(vreinterpretq_u32_u8, b),
        );
        let (even, odd) = (each!(vuzp1q_u32, a, b), each!(vuzp2q_u32, a, b));
        [
            each!(vreinterpretq_u8_u32, even),
            each!(vreinterpretq_u8_u32, odd),
        ]
    }
    #[inline(always)]
    unsafe fn dot_unsigned(acc: I, w: W, x: *const i8) -> I {
        // At most 127, so the bytes are the same read as signed.
        unsafe { Self::dot_signed(acc, w, x) }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: I, w: W, x: *const i8) -> I {
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned()));
            let dot = |i: usize| sdot(acc[i], vreinterpretq_s8_u8(w[i]), x);
            [dot(0), dot(1), dot(2), dot(3)]
        }
    }

    #[inline(always)]
    unsafe fn mul_add_small(acc: I, a: I, b: I) -> I {
        let one = |i: usize| unsafe { vmlaq_s32(acc[i], a[i], b[i]) };
        [one(0), one(1), one(2), one(3)]
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> I {
        unsafe {
            let bytes = vld1q_s8(p.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> I {
        let mask = unsafe { [vdupq_n_s32(255); 4] };
        let signed = unsafe { Self::load_i8(p) };
        each!(vandq_s32, signed, mask)
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> I {
        unsafe {
            let bytes = vld1_u8(p);
            let (low, high) = (vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
            let nibbles = vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
            let mut all = [0u8; 16];
            vst1q_u8(all.as_mut_ptr(), nibbles);
            Self::load_i8(all.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn load_i16(p: *const u8) -> I {
        let p = p.cast::<i16>();
        let words = unsafe {
            [
                vld1_s16(p),
                vld1_s16(p.add(4)),
                vld1_s16(p.add(8)),
                vld1_s16(p.add(12)),
            ]
        };
        each!(vmovl_s16, words)
    }
    #[inline(always)]
    unsafe fn load_i(p: *const i32) -> I {
        unsafe {
            [
                vld1q_s32(p),
                vld1q_s32(p.add(4)),
                vld1q_s32(p.add(8)),
                vld1q_s32(p.add(12)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut i32, x: I) {
        unsafe {
            vst1q_s32(p, x[0]);
            vst1q_s32(p.add(4), x[1]);
            vst1q_s32(p.add(8), x[2]);
            vst1q_s32(p.add(12), x[3]);
        }
    }
    #[inline(always)]
    unsafe fn shr4_i(a: I) -> I {
        let shift =
            |x| unsafe { vreinterpretq_s32_u32(vshrq_n_u32::<4>(vreinterpretq_u32_s32(x))) };
        a.map(shift)
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        unsafe {
            [
                vld1q_f32(p),
                vld1q_f32(p.add(4)),
                vld1q_f32(p.add(8)),
                vld1q_f32(p.add(12)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F) {
        unsafe {
            vst1q_f32(p, x[0]);
            vst1q_f32(p.add(4), x[1]);
            vst1q_f32(p.add(8), x[2]);
            vst1q_f32(p.add(12), x[3]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        let halves = unsafe {
            [
                vld1_u16(p),
                vld1_u16(p.add(4)),
                vld1_u16(p.add(8)),
                vld1_u16(p.add(12)),
            ]
        };
        each!(widen_f16, halves)
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> F {
        unsafe {
            let bytes = vld1q_s8(p.cast());
            let half = |wide: int16x8_t| {
                let moved = vreinterpretq_u16_s16(vshlq_n_s16::<7>(wide));
                vandq_u16(moved, vdupq_n_u16(0xbfff))
            };
            let low = half(vmovl_s8(vget_low_s8(bytes)));
            let high = half(vmovl_high_s8(bytes));
            [
                widen_f16(vget_low_u16(low)),
                widen_f16(vget_high_u16(low)),
                widen_f16(vget_low_u16(high)),
                widen_f16(vget_high_u16(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        let widen = |i: usize| unsafe {
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(p.add(4 * i)))))
        };
        [widen(0), widen(1), widen(2), widen(3)]
    }
    #[inline(always)]
    unsafe fn splat_bf16s(p: *const u16) -> [F; 2] {
        unsafe {
            let pair = vdupq_n_u32(p.cast::<u32>().read_unaligned());
            let odd = vandq_u32(pair, vdupq_n_u32(!0xffff));
            [vshlq_n_u32::<16>(pair), odd].map(|x| [vreinterpretq_f32_u32(x); 4])
        }
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        let one = |i: usize| unsafe { vfmaq_f32(c[i], a[i], b[i]) };
        [one(0), one(1), one(2), one(3)]
    }
    #[inline(always)]
    unsafe fn keep_if_ge(a: F, b: F, value: F) -> F {
        let one = |i: usize| unsafe {
            let bits = vandq_u32(vcgeq_f32(a[i], b[i]), vreinterpretq_u32_f32(value[i]));
            vreinterpretq_f32_u32(bits)
        };
        [one(0), one(1), one(2), one(3)]
    }
    #[inline(always)]
    unsafe fn scale_by_bits(x: F, n: F) -> F {
        let one = |i: usize| unsafe {
            let shifted = vshlq_n_u32::<23>(vreinterpretq_u32_f32(n[i]));
            vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x[i]), shifted))
        };
        [one(0), one(1), one(2), one(3)]
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: I) {
        let words = each!(vmovn_s32, x);
        unsafe {
            let low = vmovn_s16(vcombine_s16(words[0], words[1]));
            let high = vmovn_s16(vcombine_s16(words[2], words[3]));
            vst1q_s8(p, vcombine_s8(low, high));
        }
    }
    operations! {
        high_nibble(w: W) -> W = each!(vshrq_n_u8::<4>, w);
        shl4(w: W) -> W = each!(vshlq_n_u8::<4>, w);
        or(a: W, b: W) -> W = each!(vorrq_u8, a, b);
        splat_i(x: i32) -> I = [vdupq_n_s32(x); 4];
        add_i(a: I, b: I) -> I = each!(vaddq_s32, a, b);
        mul_i(a: I, b: I) -> I = each!(vmulq_s32, a, b);
        small(x: I) -> I = x;
        shl3_i(a: I) -> I = each!(vshlq_n_s32::<3>, a);
        shl7_i(a: I) -> I = each!(vshlq_n_s32::<7>, a);
        sar7_i(a: I) -> I = each!(vshrq_n_s32::<7>, a);
        and_i(a: I, b: I) -> I = each!(vandq_s32, a, b);
        to_f(a: I) -> F = each!(vcvtq_f32_s32, a);
        splat(x: f32) -> F = [vdupq_n_f32(x); 4];
        add(a: F, b: F) -> F = each!(vaddq_f32, a, b);
        sub(a: F, b: F) -> F = each!(vsubq_f32, a, b);
        mul(a: F, b: F) -> F = each!(vmulq_f32, a, b);
        div(a: F, b: F) -> F = each!(vdivq_f32, a, b);
        max(a: F, b: F) -> F = each!(vmaxq_f32, a, b);
        min(a: F, b: F) -> F = each!(vminq_f32, a, b);
        abs(a: F) -> F = each!(vabsq_f32, a);
        round(x: F) -> I = each!(vcvtnq_s32_f32, x);
        reduce_max(x: F) -> f32 =
            vmaxvq_f32(vmaxq_f32(vmaxq_f32(x[0], x[1]), vmaxq_f32(x[2], x[3])));
        reduce_add_i(x: I) -> i32 =
            vaddvq_s32(vaddq_s32(vaddq_s32(x[0], x[1]), vaddq_s32(x[2], x[3])));
    }
}

impl Bytes for Neon {
    #[inline(always)]
    unsafe fn less(w: W, offset: u8) -> W {
        let offset = unsafe { [vdupq_n_u8(offset); 4] };
        each!(vsubq_u8, w, offset)
    }

    /// Operand order for `smmla`, which takes eight columns of two rows. Row by row come the four
    /// columns of quad `2 p` and the four of quad `2 p + 1`.
    #[inline(always)]
    unsafe fn arranged(quads: [W; 8]) -> [W; 8] {
        let zip = |a: uint8x16_t, b: uint8x16_t| unsafe {
            let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
            [vzip1q_u32(a, b), vzip2q_u32(a, b)].map(|x| vreinterpretq_u8_u32(x))
        };
        let mut out = quads;
        for pair in 0..4 {
            let (a, b) = (quads[2 * pair], quads[2 * pair + 1]);
            for half in 0..2 {
                let ([w, x], [y, z]) = (
                    zip(a[2 * half], b[2 * half]),
                    zip(a[2 * half + 1], b[2 * half + 1]),
                );
                out[2 * pair + half] = [w, x, y, z];
            }
        }
        out
    }
}
