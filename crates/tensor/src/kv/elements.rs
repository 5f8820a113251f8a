//! Elements of keys and values as a page stores them, rounded to integers with a scale in the
//! quantised types.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{KvShape, KvType, Q4_RUN, Q8_RUN, key_elements};
use crate::attention::PAGE;

/// Stores a key, `x`, in the column of its position.
///
/// # Safety
/// `out` is good for the keys of one head of a page.
pub(super) unsafe fn write_key(kv_type: KvType, x: &[f32], out: *mut u8, slot: usize) {
    let column = |d: usize| slot + d * PAGE;
    // SAFETY: elements and scales lie within the head.
    unsafe {
        let scales = out.add(key_elements(kv_type, x.len())).cast::<f16>();
        if kv_type != KvType::Q4 {
            return write_elements(kv_type, x, out, (column, scales.add(slot)));
        }
        let bits = out.add(PAGE * x.len() / 2);
        for (run, x) in x.chunks(Q4_RUN).enumerate() {
            let (scale, q) = quantise::<KEY_LEVELS>(x);
            for (i, pair) in q[..x.len()].chunks_exact(2).enumerate() {
                let row = run * Q4_RUN / 2 + i;
                out.add(row * PAGE + slot)
                    .write(pair[0] & 15 | pair[1] << 4);
            }
            for (i, eight) in q[..x.len()].chunks_exact(8).enumerate() {
                let row = run * Q4_RUN / 8 + i;
                let byte = eight.iter().rev().fold(0, |byte, q| byte << 1 | q >> 4);
                bits.add(row * PAGE + slot).write(byte);
            }
            scales.add(run * PAGE + slot).write_unaligned(scale);
        }
    }
}

/// Stores a key, `x`, in the two runs of its position; see [`LayerStore::Indexed`].
///
/// # Safety
/// `out` is good for the keys of one head of a page.
pub(super) unsafe fn write_runs(shape: KvShape, x: &[f32], out: *mut u8, slot: usize) {
    let (first, second) = (shape.value_dim, x.len() - shape.value_dim);
    let runs = |d: usize| match d.checked_sub(first) {
        None => slot * first + d,
        Some(d) => PAGE * first + slot * second + d,
    };
    // SAFETY: elements and scales lie within the head.
    unsafe {
        let scales = out.add(key_elements(shape.kv_type, x.len())).cast::<f16>();
        write_elements(shape.kv_type, x, out, (runs, scales.add(slot)));
    }
}

/// Stores a value, `x`, in the row of its position.
///
/// # Safety
/// `out` is good for the values of one head of a page.
pub(super) unsafe fn write_value(shape: KvShape, x: &[f32], out: *mut u8, slot: usize) {
    let row = |d: usize| slot * x.len() + d;
    // SAFETY: elements and scales lie within the head.
    unsafe {
        let scales = out.add(shape.value_elements()).cast::<f16>();
        if shape.kv_type != KvType::Q4 {
            let scales = scales.add(slot);
            return write_elements(shape.kv_type, x, out, (row, scales));
        }
        for (run, x) in x.chunks(Q4_RUN).enumerate() {
            let (scale, q) = quantise::<VALUE_LEVELS>(x);
            let to = out.add((slot * shape.value_dim + run * Q4_RUN) / 2);
            for (i, pair) in q[..x.len()].chunks_exact(2).enumerate() {
                to.add(i).write(pair[0] | pair[1] << 4);
            }
            scales.add(run * PAGE + slot).write_unaligned(scale);
        }
    }
}

/// Stores one position of a head in whole bytes, element `d` at `to(d)`; `scales` points to the
/// position's first.
///
/// # Safety
/// `out` is good for the keys or the values of one head of a page.
pub(super) unsafe fn write_elements(
    kv_type: KvType,
    x: &[f32],
    out: *mut u8,
    (to, scales): (impl Fn(usize) -> usize, *mut f16),
) {
    for (run, x) in x.chunks(Q8_RUN).enumerate() {
        let at = |d: usize| to(run * Q8_RUN + d);
        // SAFETY: element and scale lie within the head.
        unsafe {
            match kv_type {
                KvType::F16 => {
                    let mut halves = [f16::ZERO; Q8_RUN];
                    halves[..x.len()].convert_from_f32_slice(x);
                    for (d, half) in halves[..x.len()].iter().enumerate() {
                        out.cast::<f16>().add(at(d)).write_unaligned(*half);
                    }
                }
                KvType::F32 => {
                    for (d, value) in x.iter().enumerate() {
                        out.cast::<f32>().add(at(d)).write_unaligned(*value);
                    }
                }
                KvType::Q8 => {
                    let (scale, q) = quantise_bytes(x);
                    for (d, q) in q[..x.len()].iter().enumerate() {
                        out.cast::<i8>().add(at(d)).write(*q);
                    }
                    scales.add(run * PAGE).write_unaligned(scale);
                }
                KvType::Q4 => unreachable!("no whole bytes"),
            }
        }
    }
}

/// Its addition to a float rounds that to the nearest integer: 1.5 * 2^23.
const ROUND: f32 = 12_582_912.0;

fn largest(x: &[f32]) -> f32 {
    x.iter()
        .fold(0.0f32, |m, x| if x.abs() > m { x.abs() } else { m })
}

/// Up to 32 elements as bytes and their scale.
fn quantise_bytes(x: &[f32]) -> (f16, [i8; Q8_RUN]) {
    let scale = f16::from_f32(largest(x) / 127.0);
    let step = scale.to_f32();
    let mut q = [0i8; Q8_RUN];
    if step > 0.0 && step.is_finite() {
        for (q, x) in q.iter_mut().zip(x) {
            // A scale that was rounded down may leave the largest element above 127.
            *q = ((x / step).clamp(-127.0, 127.0) + ROUND - ROUND) as i8;
        }
    }
    (scale, q)
}

/// Levels of a key of [`KvType::Q4`]: `scale * (q - 15.5)`.
pub(crate) const KEY_LEVELS: u8 = 32;

/// Levels of its values: `scale * (q - 7.5)`.
pub(crate) const VALUE_LEVELS: u8 = 16;

/// Parts of a run's largest element that the outermost level is tried at. Of 64 rotated elements
/// few are near the largest one, so that finer steps are worth what they cut off.
pub(crate) const CUTS: [f32; 5] = [1.0, 0.94, 0.88, 0.82, 0.76];

/// Up to 64 elements as integers below `LEVELS` and their scale: of [`CUTS`] the first with the
/// least sum of squared errors.
fn quantise<const LEVELS: u8>(x: &[f32]) -> (f16, [u8; Q4_RUN]) {
    let (most, middle) = (f32::from(LEVELS - 1), f32::from(LEVELS - 1) / 2.0);
    let largest = largest(x);
    let mut best = (f16::from_f32(largest / middle), [0u8; Q4_RUN]);
    let mut least = f32::INFINITY;
    for cut in CUTS {
        let scale = f16::from_f32(largest * cut / middle);
        let step = scale.to_f32();
        if !(step > 0.0 && step.is_finite()) {
            continue;
        }
        let (mut q, mut error) = ([0u8; Q4_RUN], 0.0f32);
        for (q, x) in q.iter_mut().zip(x) {
            let level = (x / step + middle).clamp(0.0, most) + ROUND - ROUND;
            let off = (level - middle) * step - x;
            error += off * off;
            *q = level as u8;
        }
        if error < least {
            (best, least) = ((scale, q), error);
        }
    }
    best
}
