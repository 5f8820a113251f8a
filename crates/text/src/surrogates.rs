//! Lone surrogates in JSON texts.
//!
//! JavaScript cuts texts by UTF-16 units and writes half of a character as `\ud83d`. RFC 8259
//! (section 8.2) allows such an escape, and it is no Unicode text. Strict parsers refuse it.

use std::borrow::Cow;

/// Bytes of an escape such as `\ud83d`.
const ESCAPE: usize = 6;

/// `json` with each escape of a lone surrogate replaced by that of U+FFFD. Escaped pairs stay.
/// Text that is no JSON stays no JSON.
///
/// Cost: one pass; a copy only where there is such an escape.
pub fn replace_lone_surrogates(json: &[u8]) -> Cow<'_, [u8]> {
    let mut changed = Cow::Borrowed(json);
    let mut at = 0;
    while let Some(found) = json[at..].iter().position(|byte| *byte == b'\\') {
        at += found;
        match (unit(json, at), unit(json, at + ESCAPE)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => at += 2 * ESCAPE,
            (Some(0xd800..=0xdfff), _) => {
                changed.to_mut()[at..at + ESCAPE].copy_from_slice(b"\\ufffd");
                at += ESCAPE;
            }
            // An escaped backslash must not begin the next escape.
            _ => at = json.len().min(at + 2),
        }
    }
    changed
}

/// The UTF-16 unit of the escape at byte `at`.
fn unit(json: &[u8], at: usize) -> Option<u16> {
    let digits = json.get(at..at + ESCAPE)?.strip_prefix(b"\\u")?;
    let digits = digits.iter().map(|digit| char::from(*digit).to_digit(16));
    digits
        .map(|digit| digit.and_then(|digit| u16::try_from(digit).ok()))
        .try_fold(0, |unit, digit| Some(unit << 4 | digit?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_replaced_and_pairs_stay() {
        for (json, expected) in [
            (r#""cut \ud83d""#, r#""cut \ufffd""#),
            (
                r#""a \ude00 b \ud83d\ude00 c""#,
                r#""a \ufffd b \ud83d\ude00 c""#,
            ),
            (r#""\uD83D\ud83d\uDE00""#, r#""\ufffd\ud83d\uDE00""#),
            (r#""\\ud83d \\\ud83d""#, r#""\\ud83d \\\ufffd""#),
            (r#""\u00e9 \ud8""#, r#""\u00e9 \ud8""#),
            (r#""\ud83d\n\udfff"#, r#""\ufffd\n\ufffd"#),
            ("\\", "\\"),
            ("\"é\"", "\"é\""),
        ] {
            let got = replace_lone_surrogates(json.as_bytes());
            assert_eq!(std::str::from_utf8(&got), Ok(expected));
        }
    }
}
