//! Cuts text at special and added tokens.

use aho_corasick::{AhoCorasick, MatchKind};

use super::Error;

/// A part of a text on its way to ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'a> {
    /// A token; its text is not encoded.
    Token {
        id: u32,
        text: &'a str,
    },
    Text(&'a str),
}

impl<'a> Fragment<'a> {
    /// The text it was found as, or is.
    pub(crate) fn text(&self) -> &'a str {
        match *self {
            Self::Token { text, .. } | Self::Text(text) => text,
        }
    }
}

/// A token that is cut out of text before everything else.
#[derive(Clone, Debug)]
pub(super) struct Special {
    pub(super) id: u32,
    pub(super) text: String,
    /// It takes the white space before it along.
    pub(super) strip_left: bool,
    /// It takes the white space after it along.
    pub(super) strip_right: bool,
    /// It counts only between characters that are no letters and digits.
    pub(super) whole_word: bool,
}

impl Special {
    pub(super) fn plain(id: u32, text: &str) -> Self {
        Self {
            id,
            text: text.to_owned(),
            strip_left: false,
            strip_right: false,
            whole_word: false,
        }
    }
}

/// Finds a set of tokens in text: the leftmost, and of those that begin there the longest.
///
/// The `tokenizers` crate does the same. Unlike it, llama.cpp looks for the longest token of all
/// first, which differs only where two tokens overlap in a text.
#[derive(Debug)]
pub(super) struct Cutter {
    automaton: AhoCorasick,
    specials: Vec<Special>,
}

impl Cutter {
    /// Builds the automaton; memory and time are linear in the texts of `specials`. Tokens without
    /// text are left out.
    pub(super) fn new(mut specials: Vec<Special>) -> Result<Self, Error> {
        specials.retain(|s| !s.text.is_empty());
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(specials.iter().map(|s| &s.text))
            .map_err(|_| Error::TooManySpecials {
                count: specials.len(),
            })?;
        Ok(Self {
            automaton,
            specials,
        })
    }

    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        self.specials.iter().map(|s| s.text.as_str())
    }

    /// Cuts `text`; no fragment is empty. Cost: linear.
    pub(super) fn cut<'a>(&self, text: &'a str) -> Vec<Fragment<'a>> {
        let mut out = Vec::new();
        let mut from = 0;
        for found in self.automaton.find_iter(text) {
            let special = &self.specials[found.pattern().as_usize()];
            if found.start() < from || !special.fits(text, found.start(), found.end()) {
                continue; // eaten by the white space of the one before, or inside a word
            }
            let before = &text[from..found.start()];
            let before = if special.strip_left {
                before.trim_end()
            } else {
                before
            };
            if !before.is_empty() {
                out.push(Fragment::Text(before));
            }
            out.push(Fragment::Token {
                id: special.id,
                text: &text[found.range()],
            });
            from = found.end();
            if special.strip_right {
                from = text.len() - text[from..].trim_start().len();
            }
        }
        if from < text.len() {
            out.push(Fragment::Text(&text[from..]));
        }
        out
    }
}

impl Special {
    fn fits(&self, text: &str, start: usize, end: usize) -> bool {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        !self.whole_word || !text[..start].ends_with(is_word) && !text[end..].starts_with(is_word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cutter(edit: impl Fn(&mut Special)) -> Cutter {
        let specials = ["<a>", "<a><b>", "", "\n\n"]
            .iter()
            .zip(0..)
            .map(|(t, id)| {
                let mut special = Special::plain(id, t);
                edit(&mut special);
                special
            });
        Cutter::new(specials.collect()).unwrap()
    }

    fn ids_and_texts(cutter: &Cutter, text: &str) -> Vec<String> {
        let fragments = cutter.cut(text).into_iter();
        fragments
            .map(|f| match f {
                Fragment::Token { id, .. } => format!("#{id}"),
                Fragment::Text(t) => t.to_owned(),
            })
            .collect()
    }

    #[test]
    fn cuts_leftmost_longest() {
        let cutter = cutter(|_| ());
        for (text, expected) in [
            ("", &[] as &[&str]),
            ("x", &["x"]),
            ("<a>", &["#0"]),
            ("x<a>y", &["x", "#0", "y"]),
            ("<a><a><b><b>", &["#0", "#1", "<b>"]),
            ("<<a>\n\n\n", &["<", "#0", "#3", "\n"]),
        ] {
            assert_eq!(ids_and_texts(&cutter, text), expected, "{text:?}");
        }
    }

    #[test]
    fn white_space_and_words() {
        let strip = cutter(|s| (s.strip_left, s.strip_right) = (true, true));
        assert_eq!(
            ids_and_texts(&strip, "x \n\n <a> \n\n y "),
            ["x", "#3", "#0", "y "]
        );
        let word = cutter(|s| s.whole_word = true);
        assert_eq!(ids_and_texts(&word, "x<a> <a>y <a>"), ["x<a> <a>y ", "#0"]);
    }
}
