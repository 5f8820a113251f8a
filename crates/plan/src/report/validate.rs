//! Predictions against published measurements.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::validate::{Report, Scored, Set};

/// All rows, sets and orderings, for people.
pub fn scores(report: &Report) -> String {
    let mut text = String::new();
    for (title, split, complete) in [
        ("fit rows", "fit", true),
        ("held-out rows, complete", "held_out", true),
        (
            "rows that are not complete: for orderings only, no error figures",
            "held_out",
            false,
        ),
    ] {
        let rows = report.rows.iter();
        let rows: Vec<&Scored> = rows
            .filter(|s| s.row.split == split && s.row.complete == complete)
            .collect();
        if rows.is_empty() {
            continue;
        }
        let _ = writeln!(
            text,
            "{title}\n  {:<30} {:<12} {:<6} {:>10} {:>10} {:>8}",
            "row", "metric", "conf.", "predicted", "published", "error"
        );
        for scored in rows {
            text.push_str(&line(scored));
        }
        text.push('\n');
    }
    text.push_str(&sets(report));
    text.push_str(&orderings(report));
    text
}

fn line(scored: &Scored) -> String {
    let row = &scored.row;
    let confidence: String = row.confidence.chars().take(6).collect();
    let start = format!("  {:<30} {:<12} {:<6}", row.id, row.metric, confidence);
    match (&scored.said, scored.error()) {
        (Ok(said), Some(error)) if row.complete => {
            let error = format!("{:+.1} %", error * 100.0);
            format!(
                "{start} {:>10.2} {:>10.2} {error:>8}\n",
                said.value, row.value
            )
        }
        (Ok(said), _) => format!("{start} {:>10.2} {:>10.2}\n", said.value, row.value),
        (Err(why), _) => format!("{start} {:>10} {:>10.2}  {why}\n", "-", row.value),
    }
}

fn sets(report: &Report) -> String {
    let mut text = String::from("set                   rows  median  worst ratio  not predicted\n");
    for set in &report.sets {
        let _ = writeln!(
            text,
            "{:<20} {:>5} {:>5.1} % {:>11.2}x {:>14}",
            set.name,
            set.rows,
            set.median * 100.0,
            set.worst,
            set.skipped
        );
    }
    text
}

fn orderings(report: &Report) -> String {
    let all = &report.orderings;
    let kept = all
        .iter()
        .filter(|ordering| ordering.predicted > 1.0)
        .count();
    let mut text = format!(
        "\norderings: {kept} of {} pairs in the published order\n",
        all.len()
    );
    for ordering in all.iter().filter(|ordering| ordering.predicted <= 1.0) {
        let _ = writeln!(
            text,
            "  not: {} above {}: published {:.2}x, predicted {:.2}x",
            ordering.more, ordering.less, ordering.published, ordering.predicted
        );
    }
    text
}

/// The same for programs.
pub fn scores_json(report: &Report) -> Value {
    let row = |s: &Scored| {
        json!({
            "id": s.row.id,
            "set": s.row.split,
            "complete": s.row.complete,
            "confidence": s.row.confidence,
            "metric": s.row.metric,
            "published": s.row.value,
            "predicted": s.said.as_ref().ok().map(|said| said.value),
            "error": s.error().filter(|_| s.row.complete),
            "why_not": s.said.as_ref().err().map(ToString::to_string),
        })
    };
    let set = |s: &Set| {
        json!({
            "set": s.name, "rows": s.rows, "not_predicted": s.skipped,
            "median_abs_error": s.median, "worst_ratio": s.worst,
        })
    };
    let kept = report
        .orderings
        .iter()
        .filter(|o| o.predicted > 1.0)
        .count();
    json!({
        "rows": report.rows.iter().map(row).collect::<Vec<_>>(),
        "sets": report.sets.iter().map(set).collect::<Vec<_>>(),
        "orderings": { "kept": kept, "of": report.orderings.len() },
    })
}
