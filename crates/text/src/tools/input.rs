//! Buffer of received text that is not parsed yet.

/// The unread end of a text that arrives in pieces.
#[derive(Clone, Debug, Default)]
pub(super) struct UnreadText {
    text: String,
    at: usize,
    /// Nothing will follow.
    pub(super) is_ended: bool,
    /// All that was read since [`remember`](Self::remember).
    read: Option<String>,
}

/// Result of a search for markers at the front of the unread text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkerMatch {
    /// The marker with index `which`, behind `before` bytes.
    Marker { before: usize, which: usize },
    /// The first `clear` bytes belong to no marker; one may have begun behind them.
    None { clear: usize },
}

impl UnreadText {
    pub(super) fn push(&mut self, piece: &str) {
        self.text.drain(..self.at);
        self.at = 0;
        self.text.push_str(piece);
    }

    pub(super) fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest().is_empty()
    }

    /// Reads `n` bytes, which end at a character border.
    pub(super) fn take(&mut self, n: usize) -> String {
        let taken = self.text[self.at..self.at + n].to_owned();
        self.skip(n);
        taken
    }

    pub(super) fn skip(&mut self, n: usize) {
        if let Some(read) = &mut self.read {
            read.push_str(&self.text[self.at..self.at + n]);
        }
        self.at += n;
    }

    /// Keeps what is read from here on.
    pub(super) fn remember(&mut self) {
        self.read = Some(String::new());
    }

    /// Text that was read since [`remember`](Self::remember); keeps no more.
    pub(super) fn recall(&mut self) -> String {
        self.read.take().unwrap_or_default()
    }

    /// Reads white space.
    pub(super) fn skip_space(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start().len());
    }

    /// Whether the text continues with `marker`; `None` until that is certain.
    pub(super) fn starts_with(&self, marker: &str) -> Option<bool> {
        let rest = self.rest();
        if rest.starts_with(marker) {
            return Some(true);
        }
        if !self.is_ended && marker.starts_with(rest) {
            return None;
        }
        Some(false)
    }

    /// The first of `markers` in the unread text; of two that begin at one place the longer.
    pub(super) fn find(&self, markers: &[&str]) -> MarkerMatch {
        let rest = self.rest();
        for (at, _) in rest.char_indices() {
            let tail = &rest[at..];
            let fits = |(_, marker): &(usize, &&str)| tail.starts_with(**marker);
            let found = markers.iter().enumerate().filter(fits);
            let longest = found.max_by_key(|(_, marker)| marker.len());
            let length = longest.map_or(0, |(_, marker)| marker.len());
            let may_grow = |marker: &&str| marker.len() > tail.len() && marker.starts_with(tail);
            if !self.is_ended && markers.iter().any(|m| m.len() > length && may_grow(m)) {
                return MarkerMatch::None { clear: at };
            }
            if let Some((which, _)) = longest {
                return MarkerMatch::Marker { before: at, which };
            }
        }
        MarkerMatch::None { clear: rest.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(text: &str, is_ended: bool) -> UnreadText {
        let mut input = UnreadText::default();
        input.push(text);
        input.is_ended = is_ended;
        input
    }

    #[test]
    fn markers_are_held_back_until_they_are_certain() {
        let none = |clear| MarkerMatch::None { clear };
        let marker = |before, which| MarkerMatch::Marker { before, which };
        for (text, is_ended, expected) in [
            ("", false, none(0)),
            ("abc", false, none(3)),
            ("ab<", false, none(2)),
            ("ab<", true, none(3)),
            ("ab<tool>c", false, marker(2, 0)),
            ("ab<tool>", false, none(2)),
            ("ab<tool>", true, marker(2, 0)),
            ("ab<tool>s", false, marker(2, 1)),
            ("<too<tool>x", false, marker(4, 0)),
            ("é<x", false, none(4)),
        ] {
            let found = input(text, is_ended).find(&["<tool>", "<tool>s"]);
            assert_eq!(found, expected, "{text:?} {is_ended}");
        }
    }

    #[test]
    fn what_is_read_can_be_had_back() {
        let mut input = input(" ab", false);
        input.remember();
        input.skip_space();
        assert_eq!(input.take(1), "a");
        input.push("cd");
        input.skip(2);
        assert_eq!((input.recall().as_str(), input.rest()), (" abc", "d"));
        assert_eq!(input.starts_with("de"), None);
        assert_eq!(input.starts_with("x"), Some(false));
    }
}
