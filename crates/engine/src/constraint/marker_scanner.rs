//! Finds the start of a grammar in generated text.

use paceline_text::grammar::Start;

/// Searches for markers in streamed text.
#[derive(Clone, Debug)]
pub(super) struct MarkerScanner {
    markers: Vec<Vec<u8>>,
    /// Markers between these two do not count.
    except: Option<(Vec<u8>, Vec<u8>)>,
    is_inside: bool,
    /// End of the text, shorter than the longest marker.
    tail: Vec<u8>,
}

impl MarkerScanner {
    /// `None` if the grammar starts with the answer.
    pub(super) fn of(start: &Start) -> Option<Self> {
        let bytes = |text: &String| text.clone().into_bytes();
        match start {
            Start::Now => None,
            Start::After { marker } => Some(Self {
                markers: vec![bytes(marker)],
                except: None,
                is_inside: false,
                tail: Vec::new(),
            }),
            Start::Lazily { markers, except } => Some(Self {
                markers: markers.iter().map(bytes).collect(),
                except: except
                    .as_ref()
                    .map(|span| (bytes(&span.open), bytes(&span.close))),
                is_inside: except.as_ref().is_some_and(|span| span.is_open),
                tail: Vec::new(),
            }),
        }
    }

    /// Reads the bytes of the next token. If a marker ends in it, returns the bytes after the
    /// marker and restarts the search.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        for (at, byte) in bytes.iter().enumerate() {
            self.tail.push(*byte);
            if self.is_inside {
                let close = self.except.as_ref().map(|(_, close)| close);
                if close.is_some_and(|close| self.tail.ends_with(close)) {
                    self.is_inside = false;
                    self.tail.clear();
                }
            } else if self
                .markers
                .iter()
                .any(|marker| self.tail.ends_with(marker))
            {
                self.tail.clear();
                return Some(bytes[at + 1..].to_vec());
            } else if self
                .except
                .as_ref()
                .is_some_and(|(open, _)| self.tail.ends_with(open))
            {
                self.is_inside = true;
                self.tail.clear();
            }
        }
        self.forget();
        None
    }

    /// Drops text in which no marker can begin.
    fn forget(&mut self) {
        let span = self.except.iter().flat_map(|(open, close)| [open, close]);
        let longest = self.markers.iter().chain(span).map(Vec::len).max();
        let kept = longest.unwrap_or(1).saturating_sub(1);
        let surplus = self.tail.len().saturating_sub(kept);
        self.tail.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_text::grammar::DelimitedSpan;

    fn rests(start: &Start, pieces: &[&str]) -> Vec<(usize, String)> {
        let mut watch = MarkerScanner::of(start).unwrap();
        let push = |(i, piece): (usize, &&str)| {
            let rest = watch.push(piece.as_bytes())?;
            Some((i, String::from_utf8(rest).unwrap()))
        };
        pieces.iter().enumerate().filter_map(push).collect()
    }

    #[test]
    fn markers_inside_a_span_do_not_count() {
        let lazily = |is_open| Start::Lazily {
            markers: vec!["<call>".into(), "<f=".into()],
            except: Some(DelimitedSpan {
                open: "<think>".into(),
                close: "</think>".into(),
                is_open,
            }),
        };
        let pieces = ["<think>a<call>", "b</think>", "<call>{", "}", "<f=", "x"];
        let found = [(2, "{".to_owned()), (4, String::new())];
        assert_eq!(rests(&lazily(false), &pieces), found);
        assert_eq!(
            rests(&lazily(true), &["<call></think><call>"]),
            [(0, String::new())]
        );
        assert_eq!(rests(&lazily(true), &["<call>", "<call>"]), []);
    }
}
