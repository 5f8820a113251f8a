//! Rows of a self-test, as text and as JSON. A report is made to be posted: it has no host names,
//! addresses, user names or paths.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Columns of a line: those of a terminal that nobody has widened.
pub const COLUMNS: usize = 80;

/// Column at which notes begin that have lines of their own.
const INDENT: usize = 9;

/// Width of the name of a check.
const NAME: usize = 32;

/// Width of a figure with its unit.
const FIGURE: usize = 16;

/// Digits shown of a figure.
const DIGITS: i32 = 3;

paceline_base::named_enum! {
    /// How a check ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Outcome {
        Passed = "passed",
        Failed = "failed",
        /// The machine or the caller has nothing to check.
        Skipped = "skipped",
    }
}

/// A measured number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub value: f64,
    pub unit: String,
}

impl Figure {
    fn text(&self) -> String {
        let Self { value, unit } = self;
        format!("{} {unit}", number(*value)).trim_end().to_owned()
    }
}

/// Integers as they are, other numbers with [`DIGITS`] digits.
fn number(value: f64) -> String {
    if value.fract() == 0.0 {
        return format!("{value:.0}");
    }
    let exponent = value.abs().log10().floor() as i32;
    match exponent {
        -3..=5 => format!("{value:.0$}", (DIGITS - 1 - exponent).max(0) as usize),
        _ => format!("{value:.1e}"),
    }
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub check: String,
    pub outcome: Outcome,
    pub figure: Option<Figure>,
    /// Reason of a failure or a skip, or what the figure is about; may be empty.
    pub note: String,
}

impl Row {
    fn new(check: &str, outcome: Outcome, note: impl Into<String>) -> Self {
        Self {
            check: check.to_owned(),
            outcome,
            figure: None,
            note: note.into(),
        }
    }

    pub fn passed(check: &str, note: impl Into<String>) -> Self {
        Self::new(check, Outcome::Passed, note)
    }

    /// A check that failed; `note` says why.
    pub fn failed(check: &str, note: impl Into<String>) -> Self {
        Self::new(check, Outcome::Failed, note)
    }

    /// A check without anything to check; `note` says why.
    pub fn skipped(check: &str, note: impl Into<String>) -> Self {
        Self::new(check, Outcome::Skipped, note)
    }

    #[must_use]
    pub fn with(mut self, value: f64, unit: &str) -> Self {
        let unit = unit.to_owned();
        self.figure = Some(Figure { value, unit });
        self
    }

    /// Without private words in its note.
    #[must_use]
    pub fn without(mut self, private: &PrivateWords) -> Self {
        self.note = private.hide(&self.note);
        self
    }

    /// The row in lines of at most [`COLUMNS`]; a long note has lines of its own.
    pub fn text(&self) -> String {
        let (name, outcome) = (cut(&self.check, NAME), self.outcome.name());
        let mut line = format!("{outcome:8} {name:NAME$}");
        if let Some(figure) = &self.figure {
            line = format!("{line} {:>FIGURE$}", cut(&figure.text(), FIGURE));
        }
        let note = self.note.split_whitespace().collect::<Vec<_>>().join(" ");
        if line.chars().count() + 2 + note.chars().count() <= COLUMNS {
            return format!("{line}  {note}").trim_end().to_owned();
        }
        for part in wrapped(&note, COLUMNS - INDENT) {
            line = format!("{}\n{:INDENT$}{part}", line.trim_end(), "");
        }
        line
    }
}

/// The first `width` characters.
fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

/// `text` in lines of at most `width` characters, cut between words where possible.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let mut rest: Vec<char> = word.chars().collect();
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + rest.len() <= width => {
                line.push(' ');
                line.push_str(word);
                continue;
            }
            _ => {}
        }
        while rest.len() > width {
            lines.push(rest.drain(..width).collect());
        }
        lines.push(rest.into_iter().collect());
    }
    lines
}

/// Names that a report must not show: of this machine, of its user, of other machines.
#[derive(Clone, Debug, Default)]
pub struct PrivateWords(Vec<String>);

/// Shorter names would hide parts of other words.
const NAME_CHARS_MIN: usize = 3;

impl PrivateWords {
    /// Hides `names`. Of a host's full name the first label is hidden by itself, too.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let mut words = Vec::new();
        for name in names {
            let name = name.to_lowercase();
            let label = name.split('.').next().unwrap_or_default().to_owned();
            words.extend([name, label]);
        }
        words.retain(|word| word.chars().count() >= NAME_CHARS_MIN);
        Self(words)
    }

    /// `text` with a placeholder for each word that is an address, part of a path, or has one of
    /// the names in it.
    pub fn hide(&self, text: &str) -> String {
        let words = text.split_whitespace().map(|word| self.hidden(word));
        words.collect::<Vec<_>>().join(" ")
    }

    fn hidden<'a>(&self, word: &'a str) -> &'a str {
        let lower = word.to_lowercase();
        if word.contains(['/', '\\']) {
            return "<path>";
        }
        if is_address(word) {
            return "<address>";
        }
        let has_name = self.0.iter().any(|name| lower.contains(name));
        if has_name || word.contains('@') {
            return "<name>";
        }
        word
    }
}

/// Whether a word is an IP address, one with a port, or an address of a device.
fn is_address(word: &str) -> bool {
    let word = word.trim_matches(|c: char| !c.is_ascii_hexdigit() && !matches!(c, '[' | ']' | ':'));
    let word = word.trim_end_matches(':');
    let octets = word.split([':', '-']);
    let is_octet = |part: &str| part.len() == 2 && part.chars().all(|c| c.is_ascii_hexdigit());
    word.parse::<IpAddr>().is_ok()
        || word.parse::<SocketAddr>().is_ok()
        || (octets.clone().count() >= 6 && octets.clone().all(is_octet))
}

/// The system that was tested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TestedSystem {
    pub version: &'static str,
    /// Operating system and processor architecture.
    pub os: &'static str,
    pub arch: &'static str,
    /// The best instruction set.
    pub instructions: &'static str,
    pub threads: usize,
}

impl TestedSystem {
    /// The first line of a report.
    pub fn heading(&self) -> String {
        let Self {
            version,
            os,
            arch,
            instructions,
            threads,
        } = self;
        format!("paceline {version} on {os} {arch}, {instructions}, {threads} threads")
    }
}

/// All results.
#[derive(Clone, Debug)]
pub struct Report {
    pub system: TestedSystem,
    pub rows: Vec<Row>,
    /// Duration of the test.
    pub seconds: f64,
}

impl Report {
    /// Number of rows that ended like this.
    pub fn count(&self, outcome: Outcome) -> usize {
        let ended = self.rows.iter().filter(|row| row.outcome == outcome);
        ended.count()
    }

    /// The last line: counts and duration.
    pub fn summary(&self) -> String {
        let [passed, failed, skipped] =
            [Outcome::Passed, Outcome::Failed, Outcome::Skipped].map(|of| self.count(of));
        format!(
            "{passed} passed, {failed} failed, {skipped} skipped in {:.0} s",
            self.seconds
        )
    }

    /// Heading, a row for each check, and the counts.
    pub fn text(&self) -> String {
        let rows = self.rows.iter().map(Row::text);
        let lines = std::iter::once(self.system.heading()).chain(rows);
        lines.chain([self.summary()]).collect::<Vec<_>>().join("\n")
    }

    /// The report as one JSON object.
    pub fn json(&self) -> Value {
        json!({
            "system": self.system,
            "seconds": self.seconds,
            "passed": self.count(Outcome::Passed),
            "failed": self.count(Outcome::Failed),
            "skipped": self.count(Outcome::Skipped),
            "rows": self.rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rows: Vec<Row>) -> Report {
        let system = TestedSystem {
            version: "0.1.0",
            os: "linux",
            arch: "x86_64",
            instructions: "avx512vnni",
            threads: 1024,
        };
        Report {
            system,
            rows,
            seconds: 12.4,
        }
    }

    #[test]
    fn a_table_fits_its_columns_and_keeps_every_word() {
        let long = "word ".repeat(60) + &"z".repeat(200);
        let rows = vec![
            Row::passed("a", "short").with(123.456, "tokens/s"),
            Row::failed(&"check ".repeat(20), &long).with(1.5e9, "a unit that is too long"),
            Row::skipped("c", "nothing here"),
        ];
        let text = report(rows).text();
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines {
            assert!(line.chars().count() <= COLUMNS, "{line}");
        }
        assert_eq!(text.matches("word").count(), 60);
        assert_eq!(text.matches('z').count(), 200);
        assert_eq!(
            lines[1],
            format!("passed   {:32} {:>16}  short", "a", "123 tokens/s")
        );
        let last = "1 passed, 1 failed, 1 skipped in 12 s";
        assert_eq!(lines.last(), Some(&last));
    }

    #[test]
    fn figures_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (24.0, "24"),
            (1234.5, "1234"),
            (123.45, "123"),
            (12.345, "12.3"),
            (0.012345, "0.0123"),
            (0.00012345, "1.2e-4"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_report_names_no_machine_user_address_or_path() {
        let names = ["tower.lan", "ada", "me"].map(str::to_owned);
        let private = PrivateWords::new(names);
        let secrets = [
            "tower.lan",
            "Tower:9090",
            "ada",
            "\"ada\"",
            "ada@box",
            "10.0.0.7",
            "10.0.0.7:52415",
            "[fe80::1]:80",
            "fe80::1",
            "aa:bb:cc:dd:ee:ff",
            "/home/eve/x",
            "C:\\Users\\eve",
            "eve/x",
        ];
        for secret in secrets {
            let note = format!("mlx: cannot read ({secret}), at 12:30: some reason");
            let row = Row::failed("mlx: library", note).without(&private);
            let text = report(vec![row.clone()]).text() + &report(vec![row]).json().to_string();
            assert!(!text.contains(secret), "{text}");
            for kept in ["mlx: cannot read", "at 12:30: some reason"] {
                assert!(text.contains(kept), "{secret}: {text}");
            }
        }
    }

    #[test]
    fn a_row_comes_back_from_its_line() {
        let row = Row::passed("mlx: one evaluation", "cuda").with(179.5, "us");
        let line = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&line).unwrap(), row);
        let json = report(vec![row, Row::failed("x", "")]).json();
        assert_eq!([&json["passed"], &json["failed"]], [1, 1]);
        assert_eq!(json["rows"][0]["outcome"], "passed");
    }
}
