//! A comparison as a bar chart: a row for each cluster, in tokens per second, with power and price.

use crate::draw::{Bar, BarChart};

use super::compare::ClusterRow;
use super::or_dash;

/// The picture as SVG text.
pub(super) fn bars(model: &str, rows: &[ClusterRow]) -> String {
    // Latency of one request equals throughput: one bar for both.
    let same = |row: &ClusterRow| {
        let said = row.found.as_ref().map(|found| &found.prediction);
        said.is_ok_and(|said| said.decode_tok_s == said.throughput_tok_s)
    };
    let n = if rows.iter().filter(|row| row.found.is_ok()).all(same) {
        1
    } else {
        2
    };
    let row = |row: &ClusterRow| {
        let label = row.name.clone();
        let Ok(found) = &row.found else {
            let (values, note) = (vec![None; n], "no plan".to_owned());
            return Bar {
                label,
                values,
                note,
            };
        };
        let said = &found.prediction;
        let (watts, usd) = (or_dash(said.watts, 0), or_dash(said.price_usd, 0));
        Bar {
            label,
            values: [said.decode_tok_s, said.throughput_tok_s][..n]
                .iter()
                .copied()
                .map(Some)
                .collect(),
            note: format!("{watts} W, {usd} USD"),
        }
    };
    let bars = BarChart {
        title: format!("{model}: tokens a second, predicted"),
        series: ["one request", "all requests"][..n]
            .iter()
            .map(ToString::to_string)
            .collect(),
        rows: rows.iter().map(row).collect(),
    };
    bars.svg()
}
