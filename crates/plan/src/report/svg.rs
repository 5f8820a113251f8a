//! A comparison as bars: a row for each cluster, tokens a second, with power and price beside.

use crate::draw::{Bar, Bars};

use super::compare::Row;
use super::or_dash;

/// The picture as SVG text.
pub(super) fn bars(model: &str, rows: &[Row]) -> String {
    let row = |row: &Row| {
        let label = row.name.clone();
        let Ok(found) = &row.found else {
            let (values, note) = (vec![None, None], "no plan".to_owned());
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
            values: vec![Some(said.decode_tok_s), Some(said.throughput_tok_s)],
            note: format!("{watts} W, {usd} USD"),
        }
    };
    let bars = Bars {
        title: format!("{model}: tokens a second, predicted"),
        series: vec!["one request".to_owned(), "all requests".to_owned()],
        rows: rows.iter().map(row).collect(),
    };
    bars.svg()
}
