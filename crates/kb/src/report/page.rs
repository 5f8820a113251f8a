//! Text for people: wrapped to the terminal, bold and faint only where a terminal shows it.

use std::ops::Range;

use paceline_base::printable;
use unicode_width::UnicodeWidthStr;

/// Smallest and largest width of text in columns: one word a line is as hard to read as long lines.
const WIDTH_MIN: usize = 30;
const WIDTH_MAX: usize = 100;

const BOLD: &str = "\x1b[1m";
const FAINT: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Text that grows line by line.
#[derive(Debug)]
pub struct TextPage {
    text: String,
    width: usize,
    colour: bool,
}

impl TextPage {
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

    /// A line in bold after a gap.
    pub fn heading(&mut self, text: &str) {
        self.gap();
        self.bold("", text);
    }

    /// `lead`, then `text` wrapped below itself.
    pub fn paragraph(&mut self, lead: &str, text: &str) {
        self.marked(lead, text, &[]);
    }

    /// Like [`Self::paragraph`], in bold.
    pub fn bold(&mut self, lead: &str, text: &str) {
        let text = printable(text);
        self.lay(lead, &text, std::slice::from_ref(&(0..text.len())), BOLD);
    }

    /// Like [`Self::paragraph`], faint.
    pub fn aside(&mut self, lead: &str, text: &str) {
        let text = printable(text);
        self.lay(lead, &text, std::slice::from_ref(&(0..text.len())), FAINT);
    }

    /// Like [`Self::paragraph`], with the byte ranges `marks` of `text` in bold.
    pub fn marked(&mut self, lead: &str, text: &str, marks: &[Range<usize>]) {
        // Replacing characters would move the marks.
        let clean = printable(text);
        let marks = if clean == text { marks } else { &[] };
        self.lay(lead, &clean, marks, BOLD);
    }

    fn lay(&mut self, lead: &str, text: &str, marks: &[Range<usize>], style: &str) {
        let indent = lead.width();
        let marks = if self.colour { marks } else { &[] };
        self.text.push_str(lead);
        let (mut used, mut at) = (indent, 0);
        for word in text.split_whitespace() {
            at += text[at..].len() - text[at..].trim_start().len();
            if used > indent && used + 1 + word.width() > self.width {
                self.text.push('\n');
                self.text.push_str(&" ".repeat(indent));
                used = indent;
            } else if used > indent {
                self.text.push(' ');
                used += 1;
            }
            self.push_styled(text, at..at + word.len(), marks, style);
            at += word.len();
            used += word.width();
        }
        self.text.truncate(self.text.trim_end_matches(' ').len());
        self.text.push('\n');
    }

    fn push_styled(&mut self, text: &str, word: Range<usize>, marks: &[Range<usize>], style: &str) {
        let mut at = word.start;
        for mark in marks {
            let (start, end) = (mark.start.max(at), mark.end.min(word.end));
            if start < end {
                self.text
                    .extend([&text[at..start], style, &text[start..end], PLAIN]);
                at = end;
            }
        }
        self.text.push_str(&text[at..word.end]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(colour: bool, fill: impl Fn(&mut TextPage)) -> String {
        let mut page = TextPage::new(30, colour);
        fill(&mut page);
        page.into_text()
    }

    #[test]
    fn text_is_wrapped_below_itself() {
        for (lead, text, laid) in [
            ("", "", ""),
            ("a  ", "", "a"),
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
                page(false, |page| page.paragraph(lead, text)),
                laid,
                "{text}"
            );
        }
        for (width, used) in [(0, WIDTH_MIN), (72, 72), (500, WIDTH_MAX)] {
            assert_eq!(TextPage::new(width, false).width, used);
        }
    }

    #[test]
    fn colour_takes_no_room_and_only_goes_where_it_is_shown() {
        let text = "one two three four five six";
        let marks = [4..7, 19..23];
        let plain = page(false, |page| page.marked("> ", text, &marks));
        assert_eq!(plain, "> one two three four five six");
        let bold = page(true, |page| page.marked("> ", text, &marks));
        assert_eq!(
            bold,
            "> one \x1b[1mtwo\x1b[0m three four \x1b[1mfive\x1b[0m six"
        );
        let all = page(true, |page| page.bold("", "one two"));
        assert_eq!(all, "\x1b[1mone\x1b[0m \x1b[1mtwo\x1b[0m");
        assert_eq!(page(true, |page| page.aside("", "x")), "\x1b[2mx\x1b[0m");
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        let shown = page(true, |page| page.marked("", "a\x1b[2Jb", &[0..1, 0..1]));
        assert_eq!(shown, "a\u{fffd}[2Jb");
    }
}
