//! Stop strings: end a response at the first one, also if it spans tokens.

use serde::{Deserialize, Serialize};

/// Why a [`StopMatcher`] could not be made or restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An empty stop string would end every text before its first character.
    #[error("stop string {index} is empty")]
    Empty {
        /// Position in the list of stop strings.
        index: usize,
    },
    /// A serialised state that no text leads to.
    #[error("state of a stop matcher: {held:?} would not be held back")]
    State {
        /// The text that was held back.
        held: String,
    },
}

/// Output of a step of a [`StopMatcher`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// Text that is no part of a stop string, to be shown now.
    pub text: String,
    /// Index of the stop string that has ended the text. The text before it has been returned;
    /// later calls return nothing.
    pub stopped: Option<usize>,
}

/// Finds stop strings in text that arrives in pieces, and never lets a part of one out.
///
/// The text ends where the match with the *earliest beginning* begins, wherever the pieces were
/// cut. Of several stop strings that begin there, the shortest counts. The text held back is
/// exactly the longest end of the text that may still become a stop string.
///
/// Each stop string is followed by a Knuth-Morris-Pratt automaton. Its state is the length of the
/// longest end of the text that is a beginning of the stop string. Cost: O(stop strings) per byte,
/// for any strings. Memory: two words per byte of stop string, and the text held back, at most the
/// longest stop string and one piece.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "State", into = "State")]
pub struct StopMatcher {
    stops: Vec<Automaton>,
    /// Text that has not been given out; all automata have read it.
    held: String,
    /// The best match so far: where in `held` it begins, and which stop string it is.
    found: Option<Match>,
    /// The stop string that ended the text.
    stopped: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Match {
    start: usize,
    which: usize,
}

/// Serialised fields; the rest follows from them.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    stops: Vec<String>,
    held: String,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// A matcher at the start of a text; with no stop string everything passes.
    pub fn new(stops: Vec<String>) -> Result<Self, Error> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(Error::Empty { index });
        }
        Ok(Self {
            stops: stops.into_iter().map(Automaton::new).collect(),
            held: String::new(),
            found: None,
            stopped: None,
        })
    }

    /// Adds text; returns what may be shown, and whether the text has ended.
    pub fn push(&mut self, text: &str) -> StopOutput {
        if self.stopped.is_some() {
            return self.conclude();
        }
        let read = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            self.advance(byte, read + at + 1);
            if self.is_decided(read + at + 1) {
                return self.conclude();
            }
        }
        StopOutput {
            text: self.release(),
            stopped: None,
        }
    }

    /// Ends the text: returns the text held back, or the stop string that the end decides.
    pub fn finish(&mut self) -> StopOutput {
        self.conclude()
    }

    /// Lets all automata read `byte`, which ends at offset `end` of `held`.
    fn advance(&mut self, byte: u8, end: usize) {
        for (which, stop) in self.stops.iter_mut().enumerate() {
            if !stop.advance(byte) {
                continue;
            }
            let start = end - stop.text.len();
            if self.found.is_none_or(|best| start < best.start) {
                self.found = Some(Match { start, which });
            }
        }
    }

    /// Whether there is a match and no stop string can still be found that begins before it, after
    /// `end` bytes of `held`.
    fn is_decided(&self, end: usize) -> bool {
        self.found
            .is_some_and(|best| self.stops.iter().all(|s| end - s.n_matched >= best.start))
    }

    /// Ends the text at the match if there is one; after the end it gives nothing.
    fn conclude(&mut self) -> StopOutput {
        let mut text = std::mem::take(&mut self.held);
        if let Some(best) = self.found.take() {
            text.truncate(best.start);
            self.stopped = Some(best.which);
        }
        StopOutput {
            text,
            stopped: self.stopped,
        }
    }

    /// Removes from `held` the text that no stop string can reach. A match that is found but not
    /// decided begins after a beginning of another stop string, so it stays.
    fn release(&mut self) -> String {
        let keep = self.stops.iter().map(|s| s.n_matched).max().unwrap_or(0);
        let n_safe = self.held.len() - keep;
        let rest = self.held.split_off(n_safe);
        if let Some(best) = &mut self.found {
            best.start -= n_safe;
        }
        std::mem::replace(&mut self.held, rest)
    }
}

impl From<StopMatcher> for State {
    fn from(matcher: StopMatcher) -> Self {
        Self {
            stops: matcher.stops.into_iter().map(|s| s.text).collect(),
            held: matcher.held,
            stopped: matcher.stopped,
        }
    }
}

impl TryFrom<State> for StopMatcher {
    type Error = Error;

    /// Reading the held text again brings the automata to where they were: a longer beginning of a
    /// stop string would be held as well.
    fn try_from(state: State) -> Result<Self, Error> {
        let mut matcher = Self::new(state.stops)?;
        if state.stopped.is_none() && matcher.push(&state.held) != StopOutput::default() {
            return Err(Error::State { held: state.held });
        }
        matcher.stopped = state.stopped;
        Ok(matcher)
    }
}

/// The Knuth-Morris-Pratt automaton of one stop string.
#[derive(Clone, Debug)]
struct Automaton {
    text: String,
    /// `borders[n]`: length of the longest proper beginning of `text[..=n]` that also ends it.
    borders: Vec<usize>,
    /// Length of the longest end of what was read that is a proper beginning of `text`.
    n_matched: usize,
}

impl Automaton {
    fn new(text: String) -> Self {
        let mut automaton = Self {
            borders: vec![0],
            text,
            n_matched: 0,
        };
        // The borders are the states of the automaton when it reads its own text, one byte late.
        for at in 1..automaton.text.len() {
            automaton.n_matched = automaton.next(automaton.text.as_bytes()[at]);
            automaton.borders.push(automaton.n_matched);
        }
        automaton.n_matched = 0;
        automaton
    }

    fn next(&self, byte: u8) -> usize {
        let text = self.text.as_bytes();
        let mut n = self.n_matched;
        while n > 0 && text[n] != byte {
            n = self.borders[n - 1];
        }
        n + usize::from(text[n] == byte)
    }

    /// Reads a byte; true if the stop string ends here.
    fn advance(&mut self, byte: u8) -> bool {
        self.n_matched = self.next(byte);
        let is_match = self.n_matched == self.text.len();
        if is_match {
            self.n_matched = self.borders[self.n_matched - 1];
        }
        is_match
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: (text before the earliest beginning of a stop string, which one).
    fn naive(text: &str, stops: &[String]) -> (String, Option<usize>) {
        let best = stops
            .iter()
            .enumerate()
            .filter_map(|(which, stop)| Some((text.find(stop)?, stop.len(), which)))
            .min();
        match best {
            Some((start, _, which)) => (text[..start].to_owned(), Some(which)),
            None => (text.to_owned(), None),
        }
    }

    /// Length of the longest end of `text` that is a proper beginning of a stop string.
    fn naive_held(text: &str, stops: &[String]) -> usize {
        let is_beginning = |end: &str| {
            stops
                .iter()
                .any(|s| s.len() > end.len() && s.starts_with(end))
        };
        (0..=text.len())
            .find(|&from| text.is_char_boundary(from) && is_beginning(&text[from..]))
            .map_or(0, |from| text.len() - from)
    }

    fn run(pieces: &[String], stops: &[String]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.to_vec()).unwrap();
        let mut text = String::new();
        let mut read = String::new();
        for piece in pieces {
            read.push_str(piece);
            let out = matcher.push(piece);
            text.push_str(&out.text);
            if out.stopped.is_some() {
                assert_eq!(
                    matcher.push("more"),
                    StopOutput {
                        text: String::new(),
                        stopped: out.stopped
                    }
                );
                return (text, out.stopped);
            }
            assert_eq!(
                matcher.held.len(),
                naive_held(&read, stops),
                "{read:?} {stops:?}"
            );
            let state = serde_json::to_string(&matcher).unwrap();
            matcher = serde_json::from_str(&state).unwrap();
        }
        let out = matcher.finish();
        text.push_str(&out.text);
        (text, out.stopped)
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn edge_cases() {
        for (pieces, stops, text, stopped) in [
            (&["hello"] as &[&str], &[] as &[&str], "hello", None),
            (&["hel", "lo"], &["lo"], "hel", Some(0)),
            (&["hel"], &["lo"], "hel", None),
            (&["ab", "ab"], &["abc"], "abab", None),
            (&["aab"], &["ab"], "a", Some(0)),
            (&["abcd"], &["abcd", "bc"], "", Some(0)),
            (&["abc", "x"], &["abcd", "bc"], "a", Some(1)),
            (&["abc"], &["abcd", "bc"], "a", Some(1)),
            (&["abcd"], &["abc", "ab"], "", Some(1)),
            (&["x", "\n", "\n", "User:"], &["\n\nUser:"], "x", Some(0)),
            (&["中", "文"], &["文"], "中", Some(0)),
            (&["", ""], &["a"], "", None),
        ] {
            let expected = (text.to_owned(), stopped);
            assert_eq!(
                run(&strings(pieces), &strings(stops)),
                expected,
                "{pieces:?} {stops:?}"
            );
        }
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let error = StopMatcher::new(strings(&["a", ""])).unwrap_err();
        assert_eq!(error.to_string(), "stop string 1 is empty");
        assert!(
            serde_json::from_str::<StopMatcher>(r#"{"stops":[""],"held":"","stopped":null}"#)
                .is_err()
        );
    }

    #[test]
    fn text_is_shown_as_soon_as_it_cannot_matter() {
        let mut matcher = StopMatcher::new(strings(&["stop"])).unwrap();
        let shown: Vec<String> = ["s", "t", "o", "x", "s"]
            .iter()
            .map(|p| matcher.push(p).text)
            .collect();
        assert_eq!(shown, ["", "", "", "stox", ""]);
        assert_eq!(matcher.finish().text, "s");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Few letters and short stop strings, so that matches overlap; every text, cut anywhere.
        #[test]
        fn equals_the_definition(
            pieces in prop::collection::vec("[ab中]{0,4}", 0..8),
            stops in prop::collection::vec("[ab中]{1,4}", 0..4),
        ) {
            prop_assert_eq!(run(&pieces, &stops), naive(&pieces.concat(), &stops));
        }
    }
}
