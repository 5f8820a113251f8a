//! Tokens and their log-probabilities in JSON.

/// A token as text; byte by byte as `\xe4\xb8` if it is not valid text.
pub(super) fn escaped(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect(),
    }
}

/// A log-probability as finite JSON number. OpenAI writes -9999 for extremely improbable tokens.
pub(super) fn number(logprob: f32) -> f64 {
    const IMPROBABLE: f64 = -9999.0;
    if logprob.is_nan() {
        return IMPROBABLE;
    }
    f64::from(logprob).clamp(IMPROBABLE, 0.0)
}

/// Number of characters that begin in these bytes.
pub(super) fn starts(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte & 0xc0 != 0x80).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_and_logprob_can_be_written() {
        for (bytes, text, n) in [
            (&b"ab"[..], "ab", 2),
            ("中".as_bytes(), "中", 1),
            (b"\xe4\xb8", "\\xe4\\xb8", 1),
            (b"\xad", "\\xad", 0),
            (b"", "", 0),
        ] {
            assert_eq!((escaped(bytes).as_str(), starts(bytes)), (text, n));
        }
        for (logprob, expected) in [
            (-0.5, -0.5),
            (0.0, 0.0),
            (1e-7, 0.0),
            (f32::NEG_INFINITY, -9999.0),
            (f32::NAN, -9999.0),
        ] {
            assert_eq!(number(logprob), expected);
        }
    }
}
