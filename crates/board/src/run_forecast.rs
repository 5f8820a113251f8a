//! Speed forecast for a model on this machine, with its past runs.

use std::fmt::Write;

use paceline_base::counted;
use paceline_model::{Config, Split, SplitKind};
use paceline_node::forecast::Forecast;
use paceline_node::sharding::ways;
use serde_json::{Value, json};

/// Maximum nodes of a row: more are rarely started on one machine.
pub const MOST: u32 = 4;

/// A configuration to run the model on this machine.
#[derive(Clone, Debug)]
pub struct ForecastRow {
    nodes: u32,
    split: String,
    /// Tokens a second: from measured facts, corrected by earlier runs, and as last measured.
    facts: f64,
    corrected: f64,
    measured: Option<f64>,
    /// Corrected total of all answers, if several are requested.
    together: Option<f64>,
}

/// Predictions for 1 to [`MOST`] nodes in every split, for one answer and for `answers` concurrent
/// ones.
pub fn rows(local: &Forecast, config: &Config, answers: u32) -> Vec<ForecastRow> {
    let together = |split: &Split| local.predict_together(config, split, answers).ok();
    let row = |(_, split): (SplitKind, Split)| {
        Some(ForecastRow {
            nodes: split.ranks(),
            split: split.to_string(),
            facts: local.facts(config, &split).ok()?,
            corrected: local.predict(config, &split).ok()?,
            measured: local.last(&split),
            together: (answers > 1).then(|| together(&split)).flatten(),
        })
    };
    ways(config, MOST).into_iter().filter_map(row).collect()
}

/// The rows as a table, for `threads` threads a node.
pub fn table((threads, answers): (usize, u32), rows: &[ForecastRow]) -> String {
    let threads = counted(threads, "thread");
    let mut text = format!("decode tok/s here, {threads} per node\n");
    let together = match answers {
        0 | 1 => String::new(),
        _ => format!("  {answers} at once"),
    };
    let _ = writeln!(
        text,
        "nodes  split       predicted  corrected  measured   error{together}"
    );
    for row in rows {
        let measured = row
            .measured
            .map_or_else(|| "-".to_owned(), |m| format!("{m:.1}"));
        let error = row
            .measured
            .map(|m| format!("{:+.0} %", (row.facts / m - 1.0) * 100.0));
        let _ = writeln!(
            text,
            "{:>5}  {:<11} {:>8.1} {:>10.1} {:>9} {:>7}{}",
            row.nodes,
            row.split,
            row.facts,
            row.corrected,
            measured,
            error.unwrap_or_default(),
            row.together.map_or_else(String::new, |tok_s| format!(
                "{tok_s:>width$.1}",
                width = together.len()
            )),
        );
    }
    text
}

/// The rows as one object.
pub fn json((threads, answers): (usize, u32), rows: &[ForecastRow]) -> Value {
    let rows: Vec<Value> = rows.iter().map(row_json).collect();
    json!({ "threads": threads, "concurrency": answers, "runs": rows })
}

fn row_json(row: &ForecastRow) -> Value {
    json!({
        "nodes": row.nodes,
        "split": row.split,
        "predicted_decode_tok_s": row.facts,
        "corrected_decode_tok_s": row.corrected,
        "measured_decode_tok_s": row.measured,
        "corrected_throughput_tok_s": row.together,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_how_many_threads() {
        let head = |threads, answers| table((threads, answers), &[]);
        assert!(head(1, 1).starts_with("decode tok/s here, 1 thread per node\n"));
        assert!(head(2, 1).starts_with("decode tok/s here, 2 threads per node\n"));
        assert!(head(1, 1).ends_with("   error\n"));
        assert!(head(1, 8).ends_with("   error  8 at once\n"));
    }
}
