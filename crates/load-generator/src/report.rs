//! Statistics of a run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::client::{LoadOutcome, ResponseTimes};

/// Latency limits of goodput, which counts only responses within all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GoodputLimits {
    /// Maximum time to first token.
    pub ttft: Option<Duration>,
    /// Maximum mean time between tokens.
    pub gap: Option<Duration>,
}

impl GoodputLimits {
    fn are_kept(&self, answer: &ResponseTimes) -> bool {
        let within = |time: Option<f64>, limit: Option<Duration>| match (time, limit) {
            (Some(ms), Some(limit)) => ms <= limit.as_secs_f64() * 1e3,
            (None, Some(_)) => false,
            (_, None) => true,
        };
        let gaps: Vec<f64> = gaps_ms(answer).collect();
        // A response of one token has no gaps.
        let mean = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
        within(ttft_ms(answer), self.ttft) && within(Some(mean), self.gap)
    }
}

/// Distribution of a latency, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Number of values.
    pub n: usize,
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    pub max: f64,
}

impl LatencySummary {
    /// `None` without values. Quantiles are nearest ranks.
    fn of(mut ms: Vec<f64>) -> Option<Self> {
        ms.sort_by(f64::total_cmp);
        let n = ms.len();
        let max = *ms.last()?;
        let at = |percent: usize| ms[(n * percent).div_ceil(100).max(1) - 1];
        Some(Self {
            n,
            mean: ms.iter().sum::<f64>() / n as f64,
            p50: at(50),
            p95: at(95),
            p99: at(99),
            max,
        })
    }
}

/// Statistics of a run. Rates are over the whole run, from the first request to the last response.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Requests sent or planned.
    pub requests: usize,
    /// Completed requests.
    pub answered: usize,
    /// Failed requests, by error.
    pub errors: BTreeMap<String, usize>,
    /// Seconds of the run.
    pub duration_s: f64,
    /// Prompt tokens of completed requests, as counted by the server.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Responses a second.
    pub answers_per_s: f64,
    /// Response tokens a second, in total.
    pub output_tok_s: f64,
    /// Prompt and response tokens a second.
    pub total_tok_s: f64,
    /// Responses within the [`GoodputLimits`].
    pub good: usize,
    /// Goodput: such responses a second.
    pub goodput_per_s: f64,
    /// Time to first token.
    pub ttft_ms: Option<LatencySummary>,
    /// Time between two chunks of a response, over all responses.
    pub gap_ms: Option<LatencySummary>,
    /// Time to the end of the response.
    pub whole_ms: Option<LatencySummary>,
}

impl Report {
    pub(super) fn of(outcomes: &[LoadOutcome], duration: Duration, goals: GoodputLimits) -> Self {
        let answers: Vec<&ResponseTimes> = outcomes.iter().flatten().collect();
        let mut errors = BTreeMap::new();
        for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
            *errors.entry(error.clone()).or_insert(0) += 1;
        }
        let sum = |part: fn(&ResponseTimes) -> u64| answers.iter().map(|a| part(a)).sum::<u64>();
        let (prompt_tokens, output_tokens) = (sum(|a| a.prompt_tokens), sum(|a| a.output_tokens));
        let good = answers.iter().filter(|a| goals.are_kept(a)).count();
        let duration_s = duration.as_secs_f64();
        let a_second = |n: u64| {
            if duration_s > 0.0 {
                n as f64 / duration_s
            } else {
                0.0
            }
        };
        Self {
            requests: outcomes.len(),
            answered: answers.len(),
            errors,
            duration_s,
            prompt_tokens,
            cached_tokens: sum(|a| a.cached_tokens),
            output_tokens,
            answers_per_s: a_second(answers.len() as u64),
            output_tok_s: a_second(output_tokens),
            total_tok_s: a_second(prompt_tokens + output_tokens),
            good,
            goodput_per_s: a_second(good as u64),
            ttft_ms: LatencySummary::of(answers.iter().filter_map(|a| ttft_ms(a)).collect()),
            gap_ms: LatencySummary::of(answers.iter().flat_map(|a| gaps_ms(a)).collect()),
            whole_ms: LatencySummary::of(answers.iter().map(|a| ms(a.sent, a.ended)).collect()),
        }
    }
}

fn ms(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

fn ttft_ms(answer: &ResponseTimes) -> Option<f64> {
    answer.pieces.first().map(|first| ms(answer.sent, *first))
}

fn gaps_ms(answer: &ResponseTimes) -> impl Iterator<Item = f64> {
    answer.pieces.windows(2).map(|pair| ms(pair[0], pair[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(sent: Instant, pieces_ms: &[u64]) -> LoadOutcome {
        let at = |ms: &u64| sent + Duration::from_millis(*ms);
        let pieces: Vec<Instant> = pieces_ms.iter().map(at).collect();
        Ok(ResponseTimes {
            sent,
            ended: pieces.last().copied().unwrap_or(sent),
            prompt_tokens: 10,
            output_tokens: pieces.len() as u64,
            cached_tokens: 3,
            pieces,
        })
    }

    #[test]
    fn figures_are_those_of_a_hand_calculation() {
        let sent = Instant::now();
        let outcomes = [
            answered(sent, &[100, 110, 140]),
            answered(sent, &[300, 310]),
            answered(sent, &[]),
            Err("429".to_owned()),
            Err("429".to_owned()),
        ];
        let ms = |ms| Some(Duration::from_millis(ms));
        let goals = GoodputLimits {
            ttft: ms(200),
            gap: ms(20),
        };
        let report = Report::of(&outcomes, Duration::from_secs(2), goals);
        assert_eq!((report.requests, report.answered, report.good), (5, 3, 1));
        assert_eq!(report.errors, BTreeMap::from([("429".to_owned(), 2)]));
        assert_eq!((report.prompt_tokens, report.output_tokens), (30, 5));
        assert_eq!((report.cached_tokens, report.goodput_per_s), (9, 0.5));
        assert_eq!((report.output_tok_s, report.total_tok_s), (2.5, 17.5));
        let gaps = report.gap_ms.unwrap();
        assert_eq!(
            (gaps.n, gaps.p50, gaps.p99, gaps.max),
            (3, 10.0, 30.0, 30.0)
        );
        assert!((gaps.mean - 50.0 / 3.0).abs() < 1e-9);
        assert_eq!(report.ttft_ms.unwrap().p95, 300.0);
    }

    #[test]
    fn quantiles_are_nearest_ranks() {
        let times = LatencySummary::of((1..=200).map(f64::from).collect()).unwrap();
        assert_eq!(
            (times.p50, times.p95, times.p99, times.max),
            (100.0, 190.0, 198.0, 200.0)
        );
        assert_eq!(LatencySummary::of(Vec::new()), None);
        assert_eq!(LatencySummary::of(vec![7.0]).unwrap().p50, 7.0);
    }

    #[test]
    fn nothing_at_all_is_no_division_by_nothing() {
        let report = Report::of(&[], Duration::ZERO, GoodputLimits::default());
        assert_eq!((report.output_tok_s, report.ttft_ms), (0.0, None));
    }
}
