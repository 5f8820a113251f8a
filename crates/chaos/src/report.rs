//! Outcomes of the rounds, as a table and as JSON.

use std::time::Duration;

use anyhow::{Result, bail};
use paceline_base::printable;
use serde_json::{Value, json};

use super::faults::Round;
use super::streams::ClientResponse;

#[derive(Debug)]
pub(crate) struct RoundResult {
    pub(crate) round: Round,
    pub(crate) victim: String,
    /// From the fault to the first report of the ingress node. `None` if the state was over before
    /// the next poll.
    pub(crate) detected: Option<Duration>,
    /// Longest wait of a client for its next token.
    pub(crate) pause: Option<Duration>,
    /// From the report of the fault to the next token of the client that waited longest. Counts
    /// clients that had tokens before the fault, and whose node stayed.
    pub(crate) resumed: Option<Duration>,
    /// The same of clients that continued at another node. Includes their timeout at a silent node.
    pub(crate) moved_resumed: Option<Duration>,
    /// Tokens of the answers at the fault, which recovery prefills.
    pub(crate) tokens: usize,
    pub(crate) answers: usize,
    /// How often clients continued at another node.
    pub(crate) moved: u32,
    pub(crate) lost: usize,
    pub(crate) altered: usize,
    /// Answers, or a load, with a pause of over 30 s.
    pub(crate) hung: usize,
    /// The reason in the first lost answer.
    pub(crate) reason: Option<String>,
}

/// All rounds.
#[derive(Debug)]
pub struct Report {
    seed: u64,
    nodes: usize,
    rounds: Vec<RoundResult>,
}

impl Report {
    pub(crate) const fn new(seed: u64, nodes: usize) -> Self {
        let rounds = Vec::new();
        Self {
            seed,
            nodes,
            rounds,
        }
    }

    pub(crate) fn add(&mut self, seen: RoundResult) {
        self.rounds.push(seen);
    }

    /// A line of the table, with the heading before the first one.
    pub(crate) fn line(&self, seen: &RoundResult) -> String {
        let mut text = String::new();
        if self.rounds.is_empty() {
            text.push_str(
                "FAULT          SECOND         VICTIM  AT TOKEN  DETECTED AFTER  NEXT TOKEN AFTER  \
                 LONGEST PAUSE  MOVED  LOST  ALTERED  HUNG\n",
            );
        }
        text += &format!(
            "{:<13}  {:<13}  {:<6}  {:>8}  {:>14}  {:>16}  {:>13}  {:>5}  {:>4}  {:>7}  {:>4}",
            seen.round.fault,
            second(&seen.round),
            printable(&seen.victim),
            seen.round.at_token,
            seconds(seen.detected),
            seconds(seen.resumed),
            seconds(seen.pause),
            seen.moved,
            seen.lost,
            seen.altered,
            seen.hung,
        );
        if let Some(reason) = &seen.reason {
            text += &format!("\n  {}", printable(reason));
        }
        text
    }

    /// The totals as a sentence.
    pub fn total(&self) -> String {
        let [answers, lost, altered, hung] = self.totals();
        format!(
            "{} faults, {answers} answers: {lost} lost, {altered} altered, {hung} hung over 30 s; \
             median pause {}, longest {} (seed {})",
            self.rounds.len(),
            seconds(median(self.pauses())),
            seconds(self.pauses().into_iter().max()),
            self.seed,
        )
    }

    /// All rounds and the totals, as JSON.
    pub fn json(&self) -> Value {
        let [answers, lost, altered, hung] = self.totals();
        let rounds: Vec<Value> = self.rounds.iter().map(RoundResult::json).collect();
        json!({
            "seed": self.seed,
            "nodes": self.nodes,
            "answers": answers,
            "lost": lost,
            "altered": altered,
            "hung": hung,
            "pause_median_s": median(self.pauses()).map(|pause| pause.as_secs_f64()),
            "rounds": rounds,
        })
    }

    /// Checks that the faults only delayed clients.
    ///
    /// # Errors
    /// Answers were lost, hung, or differ from those of an undisturbed cluster.
    pub fn verdict(&self) -> Result<()> {
        match self.totals() {
            [_, 0, 0, 0] => Ok(()),
            [answers, lost, altered, hung] => {
                let reason = self.rounds.iter().find_map(|it| it.reason.as_deref());
                let first = reason.map_or_else(String::new, |it| format!("; first: {it}"));
                bail!(
                    "of {answers} answers {lost} were lost, {altered} altered, and {hung} hung \
                     over 30 s{first}"
                )
            }
        }
    }

    fn totals(&self) -> [usize; 4] {
        let sum = |of: fn(&RoundResult) -> usize| self.rounds.iter().map(of).sum();
        [
            sum(|it| it.answers),
            sum(|it| it.lost),
            sum(|it| it.altered),
            sum(|it| it.hung),
        ]
    }

    fn pauses(&self) -> Vec<Duration> {
        self.rounds.iter().filter_map(|seen| seen.pause).collect()
    }
}

impl RoundResult {
    /// The outcome of answers, without times.
    pub(crate) fn of(
        round: Round,
        victim: String,
        found: &[ClientResponse],
        undisturbed: &[ClientResponse],
    ) -> Self {
        let pairs = found.iter().zip(undisturbed);
        let altered = pairs.filter(|(answer, right)| answer.is_altered(right));
        Self {
            round,
            victim,
            detected: None,
            pause: None,
            resumed: None,
            moved_resumed: None,
            tokens: 0,
            answers: found.len(),
            moved: found.iter().map(|answer| answer.moves).sum(),
            lost: found.iter().filter(|answer| answer.is_lost()).count(),
            altered: altered.count(),
            hung: 0,
            reason: found.iter().find_map(|answer| answer.error.clone()),
        }
    }

    fn json(&self) -> Value {
        json!({
            "fault": self.round.fault.to_string(),
            "second": self.round.second.map(|_| second(&self.round)),
            "victim": self.victim,
            "at_token": self.round.at_token,
            "detected_s": self.detected.map(|time| time.as_secs_f64()),
            "resumed_s": self.resumed.map(|time| time.as_secs_f64()),
            "moved_resumed_s": self.moved_resumed.map(|time| time.as_secs_f64()),
            "pause_s": self.pause.map(|time| time.as_secs_f64()),
            "tokens": self.tokens,
            "answers": self.answers,
            "moved": self.moved,
            "lost": self.lost,
            "altered": self.altered,
            "hung": self.hung,
            "reason": self.reason,
        })
    }
}

/// The second fault, with a `+` if it comes during the recovery from the first.
fn second(round: &Round) -> String {
    match round.second {
        Some((fault, after)) if after.is_zero() => fault.to_string(),
        Some((fault, _)) => format!("+{fault}"),
        None => "-".to_owned(),
    }
}

fn median(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

fn seconds(time: Option<Duration>) -> String {
    time.map_or_else(
        || "-".to_owned(),
        |time| format!("{:.2} s", time.as_secs_f64()),
    )
}
