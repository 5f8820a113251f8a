//! Bytes as hexadecimal digits.

/// Two lower-case digits for each byte.
///
/// ```
/// assert_eq!(paceline_base::hex(&[0x0a, 0xff]), "0aff");
/// ```
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of pairs of digits, in either case; `None` for other text.
///
/// ```
/// assert_eq!(paceline_base::unhex("0aFF"), Some(vec![0x0a, 0xff]));
/// assert_eq!(paceline_base::unhex("0af"), None);
/// ```
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: &u8| (*byte as char).to_digit(16).map(|digit| digit as u8);
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(pair).collect()
}
