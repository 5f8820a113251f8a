//! Delimiters of response templates, texts or regular expressions, matched in text that arrives in
//! fragments.

use std::collections::BTreeMap;
use std::sync::Arc;

use regex::{Regex, RegexBuilder};
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input as Search};

use super::super::input::{MarkerMatch, UnreadText};

/// Most bytes that a compiled expression may take. The largest known takes some 10 KiB.
pub(super) const MAX_COMPILED_BYTES: usize = 1 << 20;

/// The separator of regions.
#[derive(Debug)]
pub(super) enum Delimiter {
    /// Any of these texts; of two at one place the longer.
    Texts(Vec<String>),
    Pattern(Pattern),
}

/// A regular expression. `.` matches line ends too.
#[derive(Debug)]
pub(super) struct Pattern {
    /// For captures and whole texts.
    regex: Regex,
    /// Reports the byte at which a match is certain, which [`Regex`] does not.
    dfa: Arc<DFA>,
}

/// The part of a delimiter that the front of unread text has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DelimiterMatch {
    /// It lies there; further text changes nothing.
    At { start: usize, end: usize },
    /// Nothing before this place, where one may begin; the text's end when none may.
    NotBefore(usize),
}

impl Delimiter {
    pub(super) fn pattern(pattern: &str) -> Result<Self, String> {
        // The end of a text in Python's spelling.
        let pattern = pattern.replace("\\Z", "\\z");
        let mut builder = RegexBuilder::new(&pattern);
        builder.dot_matches_new_line(true);
        builder.size_limit(MAX_COMPILED_BYTES);
        let regex = builder.build().map_err(|error| error.to_string())?;
        let dfa = DFA::builder()
            .configure(DFA::config().skip_cache_capacity_check(true))
            .syntax(syntax::Config::new().dot_matches_new_line(true))
            .thompson(thompson::Config::new().nfa_size_limit(Some(MAX_COMPILED_BYTES)))
            .build(&pattern)
            .map_err(|error| error.to_string())?;
        let dfa = Arc::new(dfa);
        Ok(Self::Pattern(Pattern { regex, dfa }))
    }

    /// Working memory of [`find`](Self::find), for one answer.
    pub(super) fn cache(&self) -> Option<Cache> {
        match self {
            Self::Texts(_) => None,
            Self::Pattern(pattern) => Some(pattern.dfa.create_cache()),
        }
    }

    /// The first place in the unread text. `cache` is one of its own.
    pub(super) fn find(&self, input: &UnreadText, cache: Option<&mut Cache>) -> DelimiterMatch {
        match (self, cache) {
            (Self::Texts(texts), _) => {
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                match input.find(&texts) {
                    MarkerMatch::Marker { before, which } => DelimiterMatch::At {
                        start: before,
                        end: before + texts[which].len(),
                    },
                    MarkerMatch::None { clear } => DelimiterMatch::NotBefore(clear),
                }
            }
            (Self::Pattern(pattern), Some(cache)) => {
                let places = input.rest().char_indices().map(|(at, _)| at);
                pattern.find(input.rest(), places, input.is_ended, cache)
            }
            (Self::Pattern(_), None) => DelimiterMatch::NotBefore(input.rest().len()),
        }
    }

    /// Named groups of the delimiter that lies at `start`.
    pub(super) fn captures(&self, text: &str, start: usize) -> BTreeMap<String, String> {
        let Self::Pattern(pattern) = self else {
            return BTreeMap::new();
        };
        let Some(found) = pattern.regex.captures_at(text, start) else {
            return BTreeMap::new();
        };
        let names = pattern.regex.capture_names().flatten();
        let groups = names.filter_map(|name| Some((name, found.name(name)?.as_str())));
        groups
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .collect()
    }

    /// End of the last match in a whole text.
    pub(super) fn last_end(&self, text: &str) -> Option<usize> {
        match self {
            Self::Texts(texts) => {
                let ends = texts
                    .iter()
                    .filter_map(|it| Some(text.rfind(it.as_str())? + it.len()));
                ends.max()
            }
            Self::Pattern(pattern) => pattern.regex.find_iter(text).last().map(|it| it.end()),
        }
    }
}

impl Pattern {
    /// The first of `places` with a match, or with a possible one. Of matches at one place, the one
    /// of a backtracking engine.
    ///
    /// Cost: the text from each place to where no match can begin there, a byte or two mostly.
    fn find(
        &self,
        text: &str,
        places: impl Iterator<Item = usize>,
        is_ended: bool,
        cache: &mut Cache,
    ) -> DelimiterMatch {
        for start in places {
            match self.match_at(text, start, is_ended, cache) {
                // An empty match separates nothing.
                Verdict::Match(end) if end > start => return DelimiterMatch::At { start, end },
                Verdict::Open => return DelimiterMatch::NotBefore(start),
                Verdict::Match(_) | Verdict::None => {}
            }
        }
        DelimiterMatch::NotBefore(text.len())
    }

    fn match_at(&self, text: &str, start: usize, is_ended: bool, cache: &mut Cache) -> Verdict {
        // The automaton fails only where its memory is not enough for one state.
        self.walk(text, start, is_ended, cache)
            .unwrap_or(Verdict::None)
    }

    /// Runs the automaton from `start`. It reports a match one byte late, and dies when no further
    /// text can change the match, at the latest with the byte after that.
    fn walk(&self, text: &str, start: usize, is_ended: bool, cache: &mut Cache) -> Option<Verdict> {
        let search = Search::new(text).range(start..).anchored(Anchored::Yes);
        let mut state = self.dfa.start_state_forward(cache, &search).ok()?;
        let mut end = None;
        for (at, byte) in text.bytes().enumerate().skip(start) {
            state = self.dfa.next_state(cache, state, byte).ok()?;
            if state.is_match() {
                end = Some(at);
            }
            if state.is_dead() || state.is_quit() {
                return Some(end.map_or(Verdict::None, Verdict::Match));
            }
        }
        if !is_ended {
            return Some(Verdict::Open);
        }
        let last = self.dfa.next_eoi_state(cache, state).ok()?;
        if last.is_match() {
            end = Some(text.len());
        }
        Some(end.map_or(Verdict::None, Verdict::Match))
    }
}

/// Result of an expression at one place.
enum Verdict {
    /// A match, which ends here.
    Match(usize),
    /// Not certain without more text.
    Open,
    None,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pattern: &str, text: &str, is_ended: bool) -> DelimiterMatch {
        let delimiter = Delimiter::pattern(pattern).unwrap();
        let mut input = UnreadText::default();
        input.push(text);
        input.is_ended = is_ended;
        delimiter.find(&input, delimiter.cache().as_mut())
    }

    #[test]
    fn a_match_is_told_when_it_is_certain() {
        let at = |start, end| DelimiterMatch::At { start, end };
        for (pattern, text, is_ended, expected) in [
            (r"\s*<call>", "ab", false, DelimiterMatch::NotBefore(2)),
            (r"\s*<call>", "ab \n", false, DelimiterMatch::NotBefore(2)),
            (
                r"\s*<call>",
                "ab \n<ca",
                false,
                DelimiterMatch::NotBefore(2),
            ),
            (
                r"\s*<call>",
                "ab \n<call>",
                false,
                DelimiterMatch::NotBefore(2),
            ),
            (
                r"\s*<call>",
                "ab \n<call>x",
                false,
                DelimiterMatch::NotBefore(2),
            ),
            (r"\s*<call>", "ab \n<call>xy", false, at(2, 10)),
            (r"\s*<call>", "ab \n<call>", true, at(2, 10)),
            (
                r"\s*<call>",
                "ab \n<can",
                false,
                DelimiterMatch::NotBefore(8),
            ),
            (r"a+", "xaa", false, DelimiterMatch::NotBefore(1)),
            (r"a+", "xaabb", false, at(1, 3)),
            (r"a+?", "xaab", false, at(1, 2)),
            (r"ab|a", "xacc", false, at(1, 2)),
            (r"</x>|\Z", "abc", true, DelimiterMatch::NotBefore(3)),
            (r"(é|.)y", "éé", false, DelimiterMatch::NotBefore(2)),
        ] {
            assert_eq!(
                seen(pattern, text, is_ended),
                expected,
                "{pattern} {text:?}"
            );
        }
    }

    #[test]
    fn expressions_that_cannot_be_used_are_refused() {
        for pattern in ["(", r"a(?=b)", r"(a)\1", r"a{1000}{1000}"] {
            assert!(Delimiter::pattern(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn the_last_anchor_counts() {
        let texts = |texts: &[&str]| Delimiter::Texts(texts.iter().map(|t| (*t).into()).collect());
        assert_eq!(texts(&["<a>", "<bb>"]).last_end("<a>x<bb>y<a>z"), Some(12));
        assert_eq!(texts(&["<c>"]).last_end("<a>"), None);
        let pattern = Delimiter::pattern(r"<a\d*>").unwrap();
        assert_eq!(pattern.last_end("<a>x<a12>y"), Some(9));
    }
}
