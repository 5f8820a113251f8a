//! The portable implementation: plain loops, the definition of every lane operation.

use half::{bf16, f16};

use super::{Isa, LANES, Words};

/// Arrays and loops; runs everywhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

/// The same as functions that are called, for emulated tiles in tests. Inlined into every unpacker
/// of every format, the loops took the compiler ten minutes.
#[cfg(all(test, target_arch = "x86_64"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called;

type F = [f32; LANES];
type I = [i32; LANES];
type W = [u8; 64];

#[inline(always)]
fn map<T: Copy + Default, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut out = [T::default(); N];
    for (i, value) in out.iter_mut().enumerate() {
        *value = f(i);
    }
    out
}

#[inline(always)]
unsafe fn four(x: *const i8) -> [i32; 4] {
    // SAFETY: the caller passes a pointer to four bytes.
    map(|j| i32::from(unsafe { *x.add(j) }))
}

macro_rules! scalar {
    ($isa:ty, $inline:meta, $bytes:meta) => {
        // SAFETY (whole impl): reads and writes stay within the byte counts that the trait names.
        #[allow(
            clippy::undocumented_unsafe_blocks,
            reason = "every block is one in-bounds pointer access, see above"
        )]
        impl Isa for $isa {
            type F = F;
            type I = I;
            type W = W;
            const REGISTERS: usize = 8;
            const SIGNED_BIAS: i32 = 0;

            #[$inline]
            unsafe fn store_w(p: *mut u8, w: W) {
                unsafe { p.cast::<W>().write_unaligned(w) }
            }
            #[$bytes]
            unsafe fn crumb<const INDEX: u32>(w: W) -> W {
                w.map(|b| (b >> (2 * INDEX)) & 3)
            }
            #[$bytes]
            unsafe fn spread_bits(p: *const u8, value: u8) -> W {
                let bits = u64::from_le_bytes(unsafe { p.cast::<[u8; 8]>().read_unaligned() });
                map(|i| if bits >> i & 1 == 1 { value } else { 0 })
            }
            #[$bytes]
            unsafe fn mirrored(w: W, p: *const u8) -> W {
                let bits = u64::from_le_bytes(unsafe { p.cast::<[u8; 8]>().read_unaligned() });
                map(|i| if bits >> i & 1 == 1 { 128 - w[i] } else { w[i] })
            }
            #[$bytes]
            unsafe fn split(a: W, b: W) -> [W; 2] {
                let byte = |i: usize, odd: usize| {
                    let from = if i % 16 < 8 { a } else { b };
                    from[i / 16 * 16 + i / 4 % 2 * 8 + 4 * odd + i % 4]
                };
                [0, 1].map(|odd| map(|i| byte(i, odd)))
            }
            #[$bytes]
            unsafe fn dot_unsigned(acc: I, w: W, x: *const i8) -> I {
                let x = unsafe { four(x) };
                map(|i| acc[i] + (0..4).map(|j| i32::from(w[4 * i + j]) * x[j]).sum::<i32>())
            }
            #[$bytes]
            unsafe fn dot_signed(acc: I, w: W, x: *const i8) -> I {
                let x = unsafe { four(x) };
                map(|i| {
                    acc[i]
                        + (0..4)
                            .map(|j| i32::from(w[4 * i + j] as i8) * x[j])
                            .sum::<i32>()
                })
            }

            #[$inline]
            unsafe fn store_i(p: *mut i32, x: I) {
                unsafe { p.cast::<I>().write_unaligned(x) }
            }

            #[$inline]
            unsafe fn store(p: *mut f32, x: F) {
                unsafe { p.cast::<F>().write_unaligned(x) }
            }
            #[$inline]
            unsafe fn load_e4m3(p: *const u8) -> F {
                map(|i| {
                    let wide = i16::from(unsafe { *p.add(i) } as i8) << 7;
                    f16::from_bits(wide as u16 & 0xbfff).to_f32()
                })
            }
            #[$inline]
            unsafe fn splat_bf16s(p: *const u16) -> [F; 2] {
                [0, 1].map(|i| {
                    [bf16::from_bits(unsafe { p.add(i).read_unaligned() }).to_f32(); LANES]
                })
            }
            #[$inline]
            unsafe fn store_i8(p: *mut i8, x: I) {
                for (i, value) in x.iter().enumerate() {
                    unsafe { *p.add(i) = *value as i8 };
                }
            }
            operations! {
                #[$bytes]
                low_nibble(w: W) -> W = w.map(|b| b & 15);
                high_nibble(w: W) -> W = w.map(|b| b >> 4);
                shl4(w: W) -> W = w.map(|b| b << 4);
                or(a: W, b: W) -> W = map(|i| a[i] | b[i]);
                lookup(table: &[i8; 16], w: W) -> W = w.map(|b| table[usize::from(b & 15)] as u8);
            }
            operations! {
                #[$inline]
                load_w(p: *const u8) -> W = p.cast::<W>().read_unaligned();
                splat_i(x: i32) -> I = [x; LANES];
                add_i(a: I, b: I) -> I = map(|i| a[i].wrapping_add(b[i]));
                mul_i(a: I, b: I) -> I = map(|i| a[i].wrapping_mul(b[i]));
                small(x: I) -> I = x;
                mul_add_small(acc: I, a: I, b: I) -> I =
                    map(|i| acc[i].wrapping_add(a[i].wrapping_mul(b[i])));
                load_i8(p: *const u8) -> I = map(|i| i32::from(unsafe { *p.add(i) } as i8));
                load_u8(p: *const u8) -> I = map(|i| i32::from(unsafe { *p.add(i) }));
                load_nibbles(p: *const u8) -> I =
                    map(|i| i32::from(unsafe { *p.add(i / 2) } >> (4 * (i % 2)) & 15));
                load_i16(p: *const u8) -> I =
                    map(|i| i32::from(unsafe { p.cast::<i16>().add(i).read_unaligned() }));
                load_i(p: *const i32) -> I = p.cast::<I>().read_unaligned();
                shr4_i(a: I) -> I = a.map(|x| ((x as u32) >> 4) as i32);
                shl3_i(a: I) -> I = a.map(|x| x << 3);
                shl7_i(a: I) -> I = a.map(|x| x << 7);
                sar7_i(a: I) -> I = a.map(|x| x >> 7);
                and_i(a: I, b: I) -> I = map(|i| a[i] & b[i]);
                to_f(a: I) -> F = a.map(|x| x as f32);
                splat(x: f32) -> F = [x; LANES];
                load(p: *const f32) -> F = p.cast::<F>().read_unaligned();
                load_f16(p: *const u16) -> F =
                    map(|i| f16::from_bits(unsafe { p.add(i).read_unaligned() }).to_f32());
                load_bf16(p: *const u16) -> F =
                    map(|i| bf16::from_bits(unsafe { p.add(i).read_unaligned() }).to_f32());
                add(a: F, b: F) -> F = map(|i| a[i] + b[i]);
                sub(a: F, b: F) -> F = map(|i| a[i] - b[i]);
                mul(a: F, b: F) -> F = map(|i| a[i] * b[i]);
                div(a: F, b: F) -> F = map(|i| a[i] / b[i]);
                fma(a: F, b: F, c: F) -> F = map(|i| a[i].mul_add(b[i], c[i]));
                max(a: F, b: F) -> F = map(|i| if a[i] > b[i] { a[i] } else { b[i] });
                min(a: F, b: F) -> F = map(|i| if a[i] < b[i] { a[i] } else { b[i] });
                abs(a: F) -> F = a.map(f32::abs);
                keep_if_ge(a: F, b: F, value: F) -> F =
                    map(|i| if a[i] >= b[i] { value[i] } else { 0.0 });
                scale_by_bits(x: F, n: F) -> F =
                    map(|i| f32::from_bits(x[i].to_bits().wrapping_add(n[i].to_bits() << 23)));
                round(x: F) -> I = x.map(|x| x.round_ties_even() as i32);
                reduce_max(x: F) -> f32 =
                    x.into_iter().fold(x[0], |a, b| if a > b { a } else { b });
                reduce_add_i(x: I) -> i32 = x.into_iter().fold(0, i32::wrapping_add);
            }
        }

        #[cfg(all(test, target_arch = "x86_64"))]
        impl super::BytePlanes for $isa {
            #[$inline]
            unsafe fn mul_add_wide(a: W, b: W, c: [W; 2]) -> [W; 2] {
                let (a, b, c) = (words(a), words(b), c.map(words));
                let sum = |i: usize| {
                    let c = i32::from(c[1][i]) << 16 | i32::from(c[0][i]) & 0xffff;
                    i32::from(a[i]) * i32::from(b[i]) + c
                };
                [
                    bytes(map(|i| sum(i) as i16)),
                    bytes(map(|i| (sum(i) >> 16) as i16)),
                ]
            }
            #[$inline]
            unsafe fn mul_words(a: W, b: W) -> W {
                let (a, b) = (words(a), words(b));
                bytes(map(|i| a[i].wrapping_mul(b[i])))
            }
            #[$inline]
            unsafe fn add_words(a: W, b: W) -> W {
                let (a, b) = (words(a), words(b));
                bytes(map(|i| a[i].wrapping_add(b[i])))
            }
            #[$inline]
            unsafe fn narrow(pair: [W; 2]) -> [W; 2] {
                let word = |i: usize, byte: usize| pair[i % 2][i / 2 * 2 + byte];
                [map(|i| word(i, 1)), map(|i| word(i, 0))] // little-endian, as x86 is
            }
            #[$inline]
            unsafe fn sar16_i(a: I) -> I {
                a.map(|x| x >> 16)
            }
        }

        // SAFETY (whole impl): as above.
        #[allow(
            clippy::undocumented_unsafe_blocks,
            reason = "every block is one in-bounds pointer access, see above"
        )]
        impl Words for $isa {
            #[$inline]
            unsafe fn widen(w: W, signed: bool) -> [W; 2] {
                let byte = |b: u8| {
                    if signed {
                        i16::from(b as i8)
                    } else {
                        i16::from(b)
                    }
                };
                [0, 1].map(|odd| bytes(map(|i| byte(w[2 * i + odd]))))
            }
            #[$inline]
            unsafe fn sub_words(a: W, b: W) -> W {
                let (a, b) = (words(a), words(b));
                bytes(map(|i| a[i].wrapping_sub(b[i])))
            }
            #[$inline]
            unsafe fn dot_words(acc: I, w: W, x: *const i16) -> I {
                let (w, x) = (
                    words(w),
                    [0, 1].map(|j| i32::from(unsafe { x.add(j).read_unaligned() })),
                );
                map(|i| acc[i] + i32::from(w[2 * i]) * x[0] + i32::from(w[2 * i + 1]) * x[1])
            }
            #[$inline]
            unsafe fn dot_lanes(acc: I, a: I, b: I) -> I {
                let low = |x: I, i: usize| i32::from(x[i] as i16);
                map(|i| acc[i] + low(a, i) * low(b, i) + (a[i] >> 16) * (b[i] >> 16))
            }
            #[$inline]
            unsafe fn shl_i<const N: u32>(a: I) -> I {
                a.map(|x| x << N)
            }
            #[$inline]
            unsafe fn store_words(p: *mut i16, x: I) {
                for (i, value) in x.iter().enumerate() {
                    let at = i & !3 | [0, 2, 1, 3][i % 4];
                    unsafe { p.add(at).write_unaligned(*value as i16) };
                }
            }
            operations! {
                #[$inline]
                twice(x: I) -> W = bytes(map(|i| x[i / 2] as i16));
                merge(low: I, high: I) -> I = map(|i| low[i] & 0xffff | high[i] & !0xffff);
            }
        }
    };
}

scalar!(Scalar, inline(always), inline(never));
#[cfg(all(test, target_arch = "x86_64"))]
scalar!(Called, inline(never), inline(never));

/// Bytes as the words that they hold.
#[inline(always)]
fn words(w: W) -> [i16; 32] {
    map(|i| i16::from_ne_bytes([w[2 * i], w[2 * i + 1]]))
}

#[inline(always)]
fn bytes(words: [i16; 32]) -> W {
    map(|i| words[i / 2].to_ne_bytes()[i % 2])
}
