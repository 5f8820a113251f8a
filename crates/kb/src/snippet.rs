//! The part of a text that shows why it was found.

use std::ops::Range;

use crate::words::{Word, words};

/// A piece of a text in one line, with the places of what was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snippet {
    /// The excerpt, with `…` where the text continues. Line breaks are spaces.
    pub text: String,
    /// Byte ranges of `text` that were looked for, ascending, apart from each other.
    pub marks: Vec<Range<usize>>,
}

/// The piece of `text`, at most about `width` bytes, with the heaviest words by `weight`; `None`
/// where no word has a weight. Of equal pieces the first.
pub(crate) fn snippet(text: &str, width: usize, weight: impl Fn(&Word) -> f32) -> Option<Snippet> {
    let found: Vec<(Range<usize>, String, f32)> = words(text)
        .into_iter()
        .map(|word| (word.range.clone(), word.plain.clone(), weight(&word)))
        .filter(|(_, _, weight)| *weight > 0.0)
        .collect();
    let best = heaviest(&found, width)?;
    let first = found[best.start].0.start;
    let last = found[best.end - 1].0.end;
    let piece = widen(text, first..last, width);
    let mut shown = Shown::new(text, &piece);
    for (range, _, _) in &found[..] {
        if piece.start <= range.start && range.end <= piece.end {
            shown.mark(range);
        }
    }
    Some(shown.snippet)
}

/// The run of words within `width` bytes that weighs most; a word counts once in it.
fn heaviest(found: &[(Range<usize>, String, f32)], width: usize) -> Option<Range<usize>> {
    let mut best: Option<(f32, Range<usize>)> = None;
    for start in 0..found.len() {
        let mut seen: Vec<&str> = Vec::new();
        let mut sum = 0.0;
        let mut end = start;
        while end < found.len() && found[end].0.end - found[start].0.start <= width {
            let (_, plain, weight) = &found[end];
            if !seen.contains(&plain.as_str()) {
                seen.push(plain);
                sum += weight;
            }
            end += 1;
        }
        // A single word wider than the whole piece is still shown.
        let end = end.max(start + 1);
        if best.as_ref().is_none_or(|(most, _)| sum > *most) {
            best = Some((sum, start..end));
        }
    }
    best.map(|(_, range)| range)
}

/// Grows `core` on both sides to `width` bytes, cut where words begin and end.
fn widen(text: &str, core: Range<usize>, width: usize) -> Range<usize> {
    let spare = width.saturating_sub(core.len());
    // A third before, the rest after: what follows a word explains it more often.
    let mut start = core.start.saturating_sub(spare / 3);
    let mut end = (core.start.max(start) + width - (core.start - start)).min(text.len());
    if text.len() - end == 0 {
        start = start.min(text.len().saturating_sub(width));
    }
    end = end.max(core.end);
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    while !text.is_char_boundary(end) {
        end += 1;
    }
    let start = if start == 0 {
        0
    } else {
        let gap = text[start..core.start].find(char::is_whitespace);
        gap.map_or(core.start, |gap| {
            let rest = &text[start + gap..];
            start + gap + (rest.len() - rest.trim_start().len())
        })
    };
    let end = if end == text.len() {
        end
    } else {
        let gap = text[core.end..end].rfind(char::is_whitespace);
        gap.map_or(core.end, |gap| core.end + gap)
    };
    start.min(core.start)..end
}

/// A piece on its way to a [`Snippet`].
struct Shown {
    snippet: Snippet,
    /// Difference to take from a place in the text to have its place in the piece.
    from: usize,
    lead: usize,
}

impl Shown {
    fn new(text: &str, piece: &Range<usize>) -> Self {
        let lead = if piece.start > 0 { "…" } else { "" };
        let tail = if piece.end < text.len() { "…" } else { "" };
        let flat = text[piece.clone()].replace(['\n', '\t', '\r'], " ");
        Self {
            snippet: Snippet {
                text: format!("{lead}{flat}{tail}"),
                marks: Vec::new(),
            },
            from: piece.start,
            lead: lead.len(),
        }
    }

    fn mark(&mut self, range: &Range<usize>) {
        let place = |at: usize| at - self.from + self.lead;
        let mark = place(range.start)..place(range.end);
        self.snippet.marks.push(mark);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(text: &str, width: usize, wanted: &[&str]) -> Option<String> {
        let weight = |word: &Word| {
            if wanted.contains(&word.plain.as_str()) {
                1.0
            } else {
                0.0
            }
        };
        let snippet = snippet(text, width, weight)?;
        let mut shown = snippet.text;
        for mark in snippet.marks.iter().rev() {
            shown.insert(mark.end, ']');
            shown.insert(mark.start, '[');
        }
        Some(shown)
    }

    #[test]
    fn the_piece_with_most_of_the_words_is_shown() {
        let text = "A ring of cables. Nothing here at all, really nothing to see. A mesh of cables \
                    and ports, with a µ in it.\nThe end of the text is here.";
        for (width, wanted, shown) in [
            (
                500,
                &["mesh"][..],
                text.replace('\n', " ").replace("mesh", "[mesh]"),
            ),
            (30, &["ring"], "A [ring] of cables. Nothing…".to_owned()),
            (
                30,
                &["mesh", "cables"],
                "…A [mesh] of [cables] and…".to_owned(),
            ),
            (20, &["text"], "…the [text] is here.".to_owned()),
            (1, &["mesh"], "…[mesh]…".to_owned()),
            (0, &["mesh"], "…[mesh]…".to_owned()),
        ] {
            assert_eq!(
                marked(text, width, wanted),
                Some(shown),
                "{width} {wanted:?}"
            );
        }
        assert_eq!(marked(text, 30, &["zebra"]), None);
        assert_eq!(marked("", 30, &["zebra"]), None);
    }

    proptest::proptest! {
        #[test]
        fn marks_lie_in_the_piece(text in "[a-dµ🙂 \n]{0,120}", width in 0usize..60) {
            let piece = snippet(&text, width, |word| word.plain.len() as f32 - 1.0);
            if let Some(piece) = piece {
                let mut end = 0;
                for mark in &piece.marks {
                    assert!(mark.start >= end && piece.text.get(mark.clone()).is_some());
                    end = mark.end;
                }
                assert!(!piece.marks.is_empty() && !piece.text.contains('\n'));
            }
        }
    }
}
