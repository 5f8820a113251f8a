//! Untrusted text for a terminal.

use std::borrow::Cow;

/// Text of a model or a file, safe for a terminal. Replaces all control characters but newline and
/// tab: they could move the cursor, change settings of the terminal or reach the clipboard.
pub fn printable(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(harmful) {
        text.replace('\r', "").replace(harmful, "\u{fffd}").into()
    } else {
        text.into()
    }
}

/// `1 node`, `2 nodes`.
pub fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        for (text, shown) in [
            ("plain\n\ttext ü 🙂", "plain\n\ttext ü 🙂"),
            ("a\r\nb", "a\nb"),
            ("\x1b]52;c;eA==\x07", "\u{fffd}]52;c;eA==\u{fffd}"),
            ("\u{9b}31m\x7f\0", "\u{fffd}31m\u{fffd}\u{fffd}"),
        ] {
            assert_eq!(printable(text), shown, "{text:?}");
        }
    }

    #[test]
    fn only_one_is_singular() {
        assert_eq!(counted(0, "core"), "0 cores");
        assert_eq!(counted(1, "core"), "1 core");
        assert_eq!(counted(2, "core"), "2 cores");
    }
}
