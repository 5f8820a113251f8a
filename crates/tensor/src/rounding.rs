//! Activations rounded to bf16, and which weights such products take.

/// 2^-56. Weights and activations that are 0 or at least this are whole multiples of 2^-63, since
/// they have 8 bits. Their products, and sums of these however rounded, are whole multiples of
/// 2^-126, the smallest normal f32. So nothing on the way is denormal. Activations below it are
/// taken as 0; a matrix with weights below it is multiplied without `vdpbf16ps`.
pub(crate) const SMALLEST: f32 = f32::from_bits((127 - 56) << 23);

/// The bf16 of an activation: the nearest, ties to even, or 0.
///
/// Without branches, so that the compiler does many at once.
#[inline(always)]
pub(crate) const fn round(x: f32) -> u16 {
    const QUIET: u32 = 1 << 22;
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let nearest = if x.is_nan() { bits | QUIET } else { nearest };
    let kept = if x.abs() < SMALLEST { 0 } else { nearest };
    (kept >> 16) as u16
}

/// Whether a stored weight is below [`SMALLEST`] and not 0.
pub(crate) const fn is_tiny(bits: u16) -> bool {
    let magnitude = bits & 0x7fff;
    magnitude != 0 && magnitude < (SMALLEST.to_bits() >> 16) as u16
}
