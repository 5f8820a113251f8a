//! Floats of 8 bits: FP8's E4M3 and the powers of two of MX formats.

/// The value of FP8's E4M3: a sign, 4 bits of exponent, 3 of fraction, no infinity; 127 and 255 are
/// NaN. Source: OCP 8-bit Floating Point Specification 1.0, section 5.
pub const fn e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = ((byte >> 3 & 15) as u32, (byte & 7) as f32);
    let magnitude = match exponent {
        _ if byte & 127 == 127 => f32::NAN,
        0 => fraction * power(-9),
        _ => (8.0 + fraction) * power(exponent as i32 - 10),
    };
    if byte < 128 { magnitude } else { -magnitude }
}

/// The value of the unsigned E4M3 of GGUF's NVFP4: the highest bit is not read, and 127 is 0.
/// Source: `ggml_ue4m3_to_fp32` in `ggml-impl.h` of llama.cpp.
pub const fn ue4m3(byte: u8) -> f32 {
    match byte {
        127 => 0.0,
        255 => 480.0,
        _ => e4m3(byte & 127),
    }
}

/// The power of two of E8M0: `2^(byte - 127)`; 255 is NaN. Source: OCP Microscaling Formats 1.0,
/// section 5.4.1.
pub const fn e8m0(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 22), // subnormal
        _ => power(byte as i32 - 127),
    }
}

/// `2^exponent`, a normal number.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_has_the_values_of_the_specification() {
        let largest = e4m3(0x7e);
        assert_eq!(
            (largest, e4m3(0x08), e4m3(0x01)),
            (448.0, 2f32.powi(-6), 2f32.powi(-9))
        );
        assert_eq!((e4m3(0x38), e4m3(0xb9)), (1.0, -1.125));
        assert_eq!(e4m3(0x80).to_bits(), (-0.0f32).to_bits());
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let finite = (0..0x7f).map(e4m3);
        assert!(finite.clone().zip(finite.skip(1)).all(|(a, b)| a < b));
    }

    #[test]
    fn ue4m3_has_no_sign_and_no_nan() {
        assert!((0..127).all(|byte| ue4m3(byte) == e4m3(byte) && ue4m3(byte | 128) == e4m3(byte)));
        assert_eq!((ue4m3(127), ue4m3(255)), (0.0, 480.0));
    }

    #[test]
    fn e8m0_doubles() {
        assert_eq!((e8m0(127), e8m0(254)), (1.0, 2f32.powi(127)));
        assert!((0..254).all(|byte| e8m0(byte) * 2.0 == e8m0(byte + 1)));
        assert!(e8m0(255).is_nan());
    }
}
