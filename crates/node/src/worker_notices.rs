//! Notices of an instance's workers as lines: shares, failures, changes.

use paceline_base::{Bytes, Rank};
use paceline_model::{Config, Shard, Split};

use crate::PlannedSplit;
use crate::supervisor::Notice;

/// A notice as lines. Loading has none, nor an end, which the waiting caller reports. `cuts` are
/// the instance's split candidates, for a model of this shape and `threads` threads each.
pub fn lines(
    notice: &Notice,
    cuts: &[PlannedSplit],
    (config, threads): (&Config, usize),
) -> Vec<String> {
    match notice {
        Notice::Ready {
            way, facts, again, ..
        } => {
            let cut = &cuts[*way];
            let weights = facts.iter().map(|rank| Bytes(rank.weight_bytes));
            let weights: Vec<Bytes> = weights.collect();
            let mut lines = split_lines(config, &cut.split, threads, &weights);
            if let Some(tok_s) = cut.tok_s {
                lines.push(format!(
                    "an answer alone is predicted to get {tok_s:.1} tokens/s"
                ));
            }
            lines.extend(unknown_fields(config));
            if *again {
                lines.push("the workers are ready again".to_owned());
            }
            lines
        }
        Notice::Changed(change) => vec![change.line()],
        Notice::Prompts(news) => vec![news.line()],
        Notice::Failed {
            reason,
            again_in: Some(wait),
            ..
        } if wait.is_zero() => vec![format!(
            "error: {reason}; starting the workers again, answers wait"
        )],
        Notice::Failed {
            reason,
            again_in: Some(wait),
            ..
        } => vec![format!(
            "error: {reason}; starting the workers again in {:.1} s",
            wait.as_secs_f64()
        )],
        Notice::Continued { answers } => vec![Notice::continued(*answers)],
        Notice::Loading { .. } | Notice::Failed { again_in: None, .. } => Vec::new(),
    }
}

/// Warns of fields of `config.json` that no reader knows.
pub fn unknown_fields(config: &Config) -> Option<String> {
    let names = config.unknown_fields.join(", ");
    let line = || format!("config.json has unknown fields that may change answers: {names}");
    (!names.is_empty()).then(line)
}

/// Each node's share of a model: a heading, and a line each.
pub fn split_lines(
    config: &Config,
    split: &Split,
    threads: usize,
    weights: &[Bytes],
) -> Vec<String> {
    let (nodes, plural) = (split.ranks(), if threads == 1 { "" } else { "s" });
    let mut lines = vec![match nodes {
        1 => format!("1 node, {threads} thread{plural}:"),
        _ => format!("{nodes} nodes, split {split}, {threads} thread{plural} each:"),
    }];
    for (rank, weights) in (0..nodes).map(Rank).zip(weights) {
        lines.push(shard_line(config, &split.shard(config, rank), *weights));
    }
    lines
}

fn shard_line(config: &Config, shard: &Shard, weights: Bytes) -> String {
    let percent = |part: usize, all: usize| (100.0 * part as f64 / all as f64).round();
    let mut line = format!(
        "  {}: layers {}-{}, heads {} of {}, feed-forward {} %",
        shard.rank,
        shard.layers.start,
        shard.layers.end - 1,
        shard.usual.heads.len(),
        config.heads,
        percent(shard.ffn().len(), config.ffn),
    );
    if shard.has_head() {
        let vocab = percent(shard.vocab().len(), config.vocab);
        line += &format!(", vocabulary {vocab} %");
    }
    line += &format!(", {weights}");
    line + if shard.leads() { ", leads" } else { "" }
}
