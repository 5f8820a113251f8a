//! A timeline as tables of the parts of each rank's time.

use std::fmt::Write;

use paceline_model::trace::Kind;
use serde_json::{Value, json};

use super::{TimeBreakdown, Timeline, count};

/// Name and value of a part.
type Column = (&'static str, fn(&TimeBreakdown) -> i64);

/// In the order of the table.
const COLUMNS: [Column; 7] = [
    ("compute", |parts| parts.compute_ns),
    ("exchange", |parts| parts.exchange_ns),
    ("wait", |parts| parts.wait_ns),
    ("choose", |parts| parts.choose_ns),
    ("plan", |parts| parts.plan_ns),
    ("way", |parts| parts.way_ns),
    ("rest", |parts| parts.rest_ns),
];

impl Timeline {
    /// Tables for the prompt, the answer and the whole, for people.
    pub fn text(&self) -> String {
        let [prompt, answer] = self.phases();
        let mut out = String::new();
        phase(&mut out, "until the first token", self.first, &prompt);
        phase(&mut out, "answer", self.whole - self.first, &answer);
        phase(&mut out, "whole", self.whole, &self.parts());
        for line in [self.exchanges(), self.hidden(), self.clocks(), self.lost()] {
            out.extend(line.map(|line| format!("{line}\n")));
        }
        out.trim_end().to_owned()
    }

    /// The tables as one object, for programs; times in milliseconds.
    pub fn summary(&self) -> Value {
        let ranks = |parts: &[TimeBreakdown]| -> Vec<Value> {
            let rank = |parts: &TimeBreakdown| {
                let columns = COLUMNS.iter();
                let told = columns.map(|(name, of)| (format!("{name}_ms"), json!(ms(of(parts)))));
                let mut told: serde_json::Map<String, Value> = told.collect();
                told.insert("hidden_exchange_ms".to_owned(), json!(ms(parts.hidden_ns)));
                Value::Object(told)
            };
            parts.iter().map(rank).collect()
        };
        let [prompt, answer] = self.phases();
        json!({
            "split": self.split,
            "whole_ms": ms(self.whole),
            "first_token_ms": ms(self.first),
            "steps": self.steps(),
            "ranks": ranks(&self.parts()),
            "prompt": ranks(&prompt),
            "answer": ranks(&answer),
            "dropped_spans": self.ranks.iter().map(|rank| rank.dropped).sum::<u64>(),
        })
    }

    /// Number of exchanges per step, and the cost of each without waiting.
    fn exchanges(&self) -> Option<String> {
        let steps = self.steps().max(1);
        let leader = self.ranks.iter().find(|rank| rank.leads)?;
        let n = count(&leader.spans, |kind| kind == Kind::Sum);
        let sums = leader.spans.iter().filter(|span| span.kind == Kind::Sum);
        let ns: i64 = sums.map(|span| span.end - span.met).sum();
        (n > 0).then(|| {
            let us = ns as f64 / 1e3 / n as f64;
            let each = n as f64 / steps as f64;
            format!("{steps} steps with {each:.0} sums over ranks each; a sum moves in {us:.0} us")
        })
    }

    /// Overlapped exchanges, if there are some.
    fn hidden(&self) -> Option<String> {
        let ns = self.parts().iter().map(|parts| parts.hidden_ns).max()?;
        (ns > 0).then(|| format!("{:.1} ms of exchanges were hidden behind computing", ms(ns)))
    }

    /// Clocks that were shifted by more than a hundredth of the whole.
    fn clocks(&self) -> Option<String> {
        let far = self.ranks.iter().map(|rank| rank.moved_ns.abs()).max()?;
        (far > self.whole / 100).then(|| {
            let far = ms(far);
            format!("clocks of the machines differ by {far:.1} ms: waits are known no better")
        })
    }

    fn lost(&self) -> Option<String> {
        let dropped: u64 = self.ranks.iter().map(|rank| rank.dropped).sum();
        (dropped > 0).then(|| format!("{dropped} spans were not kept: trace a shorter answer"))
    }
}

fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

/// A table of 80 columns: the rank, then time and share of each part.
fn phase(out: &mut String, title: &str, whole: i64, ranks: &[TimeBreakdown]) {
    let (unit, digits, per_ms) = if ms(whole) < 1e3 {
        ("ms", 1, 1.0)
    } else if ms(whole) < 1e4 {
        ("ms", 0, 1.0)
    } else {
        ("s", 1, 1e3)
    };
    let time = |ns: i64| format!("{:.digits$}", ms(ns) / per_ms);
    let _ = writeln!(out, "{title}: {} {unit}", time(whole));
    let names = COLUMNS.iter().map(|(name, _)| format!("{name:>11}"));
    let _ = writeln!(out, "  #{}", names.collect::<String>());
    for (rank, parts) in ranks.iter().enumerate() {
        let cell = |(_, of): &Column| {
            let percent = 100.0 * of(parts) as f64 / whole.max(1) as f64;
            format!(" {:>5} {percent:>3.0}%", time(of(parts)))
        };
        let cells: String = COLUMNS.iter().map(cell).collect();
        let _ = writeln!(out, "{rank:>3}{cells}");
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_80_columns_whatever_the_time() {
        for (whole, title) in [
            (12_345_678, "answer: 12.3 ms"),
            (5_000_400_000, "answer: 5000 ms"),
            (240_000_000_000, "answer: 240.0 s"),
        ] {
            let parts = TimeBreakdown {
                compute_ns: whole,
                ..TimeBreakdown::default()
            };
            let mut out = String::new();
            phase(&mut out, "answer", whole, &[parts, parts]);
            let lines: Vec<&str> = out.trim_end().lines().collect();
            assert_eq!((lines.len(), lines[0]), (4, title));
            assert!(lines[1..].iter().all(|line| line.len() == 80), "{out}");
            assert!(lines[2].contains(" 100%"), "{out}");
        }
    }
}
