//! A comparison as bars: one row per cluster, tokens a second, with power and price beside.

use std::fmt::Write;

use super::compare::Row;
use super::or_dash;

const ROW: usize = 46; // height of a row, px
const LEFT: f64 = 300.0; // where bars start
const LONGEST: f64 = 220.0; // px of the fastest
const WIDTH: f64 = 760.0;

/// The picture as SVG text.
pub(super) fn bars(model: &str, rows: &[Row]) -> String {
    let most = |f: &dyn Fn(&Row) -> f64| rows.iter().map(f).fold(f64::MIN_POSITIVE, f64::max);
    let all = |row: &Row| {
        row.found
            .as_ref()
            .map_or(0.0, |c| c.prediction.throughput_tok_s)
    };
    let longest = most(&all);
    let height = 60 + rows.len() * ROW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"16\" y=\"28\" font-size=\"16\">{}: tokens a second, light: all</text>\n",
        escaped(model)
    );
    for (i, row) in rows.iter().enumerate() {
        let y = 50 + i * ROW;
        let _ = writeln!(
            svg,
            "<text x=\"16\" y=\"{}\">{}</text>",
            y + 20,
            escaped(&row.name)
        );
        match &row.found {
            Err(_) => {
                let _ = writeln!(
                    svg,
                    "<text x=\"{LEFT}\" y=\"{}\" fill=\"gray\">no plan</text>",
                    y + 20
                );
            }
            Ok(found) => {
                let said = &found.prediction;
                bar(&mut svg, y, said.throughput_tok_s / longest, "#b7d3ea");
                bar(&mut svg, y, said.decode_tok_s / longest, "#2f6f9f");
                let x = LEFT + LONGEST * said.throughput_tok_s / longest + 8.0;
                let (watts, usd) = (or_dash(said.watts, 0), or_dash(said.price_usd, 0));
                let _ = writeln!(
                    svg,
                    "<text x=\"{x:.1}\" y=\"{}\">{:.1} / {:.1} · {watts} W · {usd} USD</text>",
                    y + 20,
                    said.decode_tok_s,
                    said.throughput_tok_s
                );
            }
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn bar(svg: &mut String, y: usize, share: f64, colour: &str) {
    let width = LONGEST * share;
    let _ = writeln!(
        svg,
        "<rect x=\"{LEFT}\" y=\"{}\" width=\"{width:.1}\" height=\"24\" fill=\"{colour}\"/>",
        y + 4
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
