//! Small pictures as SVG text: bars, lines and nets.
//!
//! The pictures have no scripts, load nothing, and follow the reader's light or dark colours. The
//! same values give the same bytes. Colours are Okabe and Ito's, which most colour-blind people can
//! distinguish (2008); a predicted series is dashed as well.
//!
//! ```
//! use paceline_plan::draw::{Bar, BarChart};
//!
//! let bars = BarChart {
//!     title: "Decode speed".to_owned(),
//!     series: vec!["measured".to_owned(), "predicted".to_owned()],
//!     rows: vec![Bar {
//!         label: "2 nodes".to_owned(),
//!         values: vec![Some(31.0), Some(29.5)],
//!         note: "tokens/s".to_owned(),
//!     }],
//! };
//! assert!(bars.svg().starts_with("<svg"));
//! ```

mod bars;
mod lines;
mod net;

use std::fmt::Write;

pub use bars::{Bar, BarChart};
pub use lines::{Axis, LineChart, Scale, Series};
pub use net::{Edge, NetworkDiagram};

/// Colours of series, in order; more series begin again. Okabe and Ito, without black and yellow.
const COLOURS: [&str; 6] = [
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9",
];

/// Text and background in light and in dark.
const STYLE: &str = "<style>\
    .b{fill:#fff}.t{fill:#1a1a1a}.g{fill:#5c5c5c}.l{stroke:#d8d8d8}.e{stroke:#8a8a8a}\
    .n{fill:#eef3f8;stroke:#0072b2}\
    @media (prefers-color-scheme:dark){.b{fill:#15181c}.t{fill:#ececec}.g{fill:#a5a5a5}\
    .l{stroke:#363b41}.e{stroke:#80868c}.n{fill:#1d2a36;stroke:#56b4e9}}\
    </style>";

/// Height of a line of text, in pixels.
const LINE: f64 = 18.0;

/// Mean width of a character of 13 pixels, in pixels: sans-serif fonts are from 6 to 7.5.
const CHAR: f64 = 7.0;

/// A picture that grows.
#[derive(Debug)]
struct Canvas(String);

impl Canvas {
    /// An empty picture with its title, which screen readers say.
    fn new(width: f64, height: f64, title: &str) -> Self {
        let title = escaped(title);
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             width=\"{width:.0}\" height=\"{height:.0}\" role=\"img\" aria-label=\"{title}\" \
             font-family=\"system-ui,sans-serif\" font-size=\"13\">\n{STYLE}\n\
             <rect class=\"b\" width=\"100%\" height=\"100%\"/>\n\
             <text class=\"t\" x=\"16\" y=\"26\" font-size=\"16\">{title}</text>\n"
        ))
    }

    /// Text that begins, is centred or ends at a place, by `anchor`.
    fn text(&mut self, (x, y): (f64, f64), class: &str, anchor: &str, text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.0,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        );
    }

    fn add(&mut self, element: &str) {
        self.0.push_str(element);
        self.0.push('\n');
    }

    /// Names of series with their colours, in a line from a place on; nothing for one alone.
    fn legend(&mut self, (mut x, y): (f64, f64), names: &[(String, bool)]) {
        if names.len() < 2 {
            return;
        }
        for (i, (name, dashed)) in names.iter().enumerate() {
            let (colour, dash) = (colour(i), dash(*dashed));
            self.add(&format!(
                "<path d=\"M{x:.1} {:.1}h18\" stroke=\"{colour}\" stroke-width=\"4\"{dash}/>",
                y - 4.0
            ));
            self.text((x + 24.0, y), "t", "start", name);
            x += 40.0 + CHAR * width_of(name);
        }
    }

    fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// The colour of series `i`.
const fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

const fn dash(dashed: bool) -> &'static str {
    if dashed {
        " stroke-dasharray=\"5 4\""
    } else {
        ""
    }
}

/// Characters of a text.
fn width_of(text: &str) -> f64 {
    text.chars().count() as f64
}

/// Text of any origin as text of XML: what XML cannot hold is replaced.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A number in three digits, with k, M or G for thousands: `1.23`, `45.6`, `789`, `1.2k`.
pub fn short(value: f64) -> String {
    let size = value.abs();
    let (value, unit) = match size {
        _ if size >= 999.5e6 => (value / 1e9, "G"),
        _ if size >= 999.5e3 => (value / 1e6, "M"),
        _ if size >= 9_999.5 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let size = value.abs();
    let digits = match size {
        _ if size >= 99.95 || size == 0.0 => 0,
        _ if size >= 9.995 => 1,
        _ if size >= 0.0995 => 2,
        _ => return format!("{value:.1e}{unit}"),
    };
    let text = format!("{value:.digits$}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (1.234, "1.23"),
            (45.67, "45.7"),
            (789.4, "789"),
            (1234.0, "1234"),
            (12_345.0, "12.3k"),
            (2.5e6, "2.5M"),
            (7e9, "7G"),
            (-45.67, "-45.7"),
            (0.00012, "1.2e-4"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    /// Names come from users and other machines.
    #[test]
    fn text_cannot_leave_its_place() {
        let evil = "a<script>\"&'\u{0}\u{1b}";
        assert_eq!(escaped(evil), "a&lt;script&gt;&quot;&amp;'\u{fffd}\u{fffd}");
        let bars = BarChart {
            title: evil.to_owned(),
            series: vec![evil.to_owned(); 2],
            rows: vec![Bar {
                label: evil.to_owned(),
                values: vec![Some(1.0), None],
                note: evil.to_owned(),
            }],
        };
        let svg = bars.svg();
        assert!(!svg.contains("<script") && !svg.contains('\u{1b}'), "{svg}");
    }
}
