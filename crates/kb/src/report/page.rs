//! Text for people: wrapped to the terminal, bold and faint only where a terminal shows it.

use std::ops::Range;

use paceline_base::printable;
use unicode_width::UnicodeWidthStr;

/// Largest width of text, in columns: longer lines are hard to read in any window.
const WIDTH_MAX: usize = 100;
/// Narrowest: below this nearly every line would be one word.
const WIDTH_MIN: usize = 30;

const BOLD: &str = "\x1b[1m";
const FAINT: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Text that grows line by line.
#[derive(Debug)]
pub struct Page {
    text: String,
    width: usize,
    colour: bool,
}

/// A word with what its place in a line takes.
struct Piece {
    shown: String,
    width: usize,
}

impl Page {
    /// A page of `width` columns, clamped to readable widths. `colour` is for terminals that show
    /// bold.
    pub fn new(width: usize, colour: bool) -> Self {
        Self {
            text: String::new(),
            width: width.clamp(WIDTH_MIN, WIDTH_MAX),
            colour,
        }
    }

    /// All of it, without the last newline.
    pub fn into_text(self) -> String {
        self.text.trim_end_matches('\n').to_owned()
    }

    /// An empty line, except at the top and after another.
    pub fn gap(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }

    /// A line in bold.
    pub fn heading(&mut self, text: &str) {
        self.gap();
        self.emphasised("", text);
    }

    /// `lead`, then `text` wrapped below itself.
    pub fn paragraph(&mut self, lead: &str, text: &str) {
        self.marked(lead, text, &[]);
    }

    /// Like [`Self::paragraph`], in bold.
    pub fn emphasised(&mut self, lead: &str, text: &str) {
        let text = printable(text);
        let all = 0..text.len();
        self.marked(lead, &text, &[all]);
    }

    /// Like [`Self::paragraph`], faint.
    pub fn aside(&mut self, lead: &str, text: &str) {
        let text = printable(text);
        let all = 0..text.len();
        let pieces = pieces(&text, &[all], self.style(FAINT));
        self.lay(lead, &pieces);
    }

    /// Like [`Self::paragraph`], with the byte ranges `marks` of `text` in bold.
    pub fn marked(&mut self, lead: &str, text: &str, marks: &[Range<usize>]) {
        // Replacing characters would move the marks; what is marked has none to replace.
        let clean = printable(text);
        let marks = if clean == text { marks } else { &[] };
        let pieces = pieces(&clean, marks, self.style(BOLD));
        self.lay(lead, &pieces);
    }

    fn style(&self, code: &'static str) -> Option<&'static str> {
        self.colour.then_some(code)
    }

    fn lay(&mut self, lead: &str, pieces: &[Piece]) {
        let indent = lead.width();
        self.text.push_str(lead);
        let mut used = indent;
        let mut first = true;
        for piece in pieces {
            if !first && used + 1 + piece.width > self.width {
                self.text.push('\n');
                self.text.push_str(&" ".repeat(indent));
                used = indent;
                first = true;
            }
            if !first {
                self.text.push(' ');
                used += 1;
            }
            self.text.push_str(&piece.shown);
            used += piece.width;
            first = false;
        }
        self.text.truncate(self.text.trim_end_matches(' ').len());
        self.text.push('\n');
    }
}

/// The words of `text`, with `style` where `marks` say.
fn pieces(text: &str, marks: &[Range<usize>], style: Option<&str>) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for word in text.split(char::is_whitespace) {
        let range = start..start + word.len();
        // Every white space that is split at is one character of at least one byte.
        let space = text[range.end..].chars().next().map_or(0, char::len_utf8);
        start = range.end + space;
        if !word.is_empty() {
            pieces.push(Piece {
                shown: styled(text, &range, marks, style),
                width: word.width(),
            });
        }
    }
    pieces
}

fn styled(text: &str, range: &Range<usize>, marks: &[Range<usize>], style: Option<&str>) -> String {
    let Some(style) = style else {
        return text[range.clone()].to_owned();
    };
    let mut shown = String::new();
    let mut at = range.start;
    for mark in marks {
        let (start, end) = (mark.start.max(at), mark.end.min(range.end));
        if start < end {
            shown += &text[at..start];
            shown += style;
            shown += &text[start..end];
            shown += PLAIN;
            at = end;
        }
    }
    shown += &text[at..range.end];
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(width: usize, colour: bool, fill: impl Fn(&mut Page)) -> String {
        let mut page = Page::new(width, colour);
        fill(&mut page);
        page.into_text()
    }

    #[test]
    fn text_is_wrapped_below_itself() {
        for (lead, text, laid) in [
            ("", "", ""),
            ("a  ", "", "a"),
            ("  ", "one", "  one"),
            (
                "note  ",
                "one two three four five six",
                "note  one two three four five\n      six",
            ),
            (
                "",
                "a-very-long-word-that-does-not-fit-anywhere and more",
                "a-very-long-word-that-does-not-fit-anywhere\nand more",
            ),
            ("", "  two\n\nlines\t and  spaces ", "two lines and spaces"),
            (
                "",
                "日本語日本語日本語 日本語日本語日本語",
                "日本語日本語日本語\n日本語日本語日本語",
            ),
        ] {
            assert_eq!(
                page(30, false, |page| page.paragraph(lead, text)),
                laid,
                "{text}"
            );
        }
    }

    #[test]
    fn colour_takes_no_room_and_only_goes_where_it_is_shown() {
        let text = "one two three four five six";
        let marks = [4..7, 19..23];
        let plain = page(30, false, |page| page.marked("> ", text, &marks));
        let bold = page(30, true, |page| page.marked("> ", text, &marks));
        assert_eq!(plain, "> one two three four five six");
        assert_eq!(bold.replace(BOLD, "").replace(PLAIN, ""), plain);
        assert_eq!(
            bold,
            "> one \x1b[1mtwo\x1b[0m three four \x1b[1mfive\x1b[0m six"
        );
        let wide = page(30, true, |page| page.emphasised("", "one two"));
        assert_eq!(wide, "\x1b[1mone\x1b[0m \x1b[1mtwo\x1b[0m");
        assert_eq!(
            page(30, true, |page| page.aside("", "x")),
            "\x1b[2mx\x1b[0m"
        );
    }

    #[test]
    fn terminals_are_not_given_orders() {
        let text = "a\x1b[2Jb";
        let first = 0..1;
        let shown = page(30, true, |page| {
            page.marked("", text, std::slice::from_ref(&first))
        });
        assert_eq!(shown, "a\u{fffd}[2Jb");
    }

    #[test]
    fn gaps_are_single_and_not_at_the_top() {
        let text = page(30, false, |page| {
            page.gap();
            page.paragraph("", "a");
            page.gap();
            page.heading("b");
        });
        assert_eq!(text, "a\n\nb");
    }

    #[test]
    fn widths_are_kept_readable() {
        for (width, used) in [(0, WIDTH_MIN), (72, 72), (500, WIDTH_MAX)] {
            assert_eq!(Page::new(width, false).width, used);
        }
    }
}
