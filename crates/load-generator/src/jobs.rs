//! Requests and arrival times, drawn from a seed before the run.

use std::str::FromStr;
use std::time::Duration;

use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::{Arrivals, Error, LoadProfile};

/// Maximum tokens of a prompt or a response: the longest contexts there are.
const TOKENS_MAX: u32 = 10_000_000;

/// Words that are one token in common vocabularies.
const WORDS: [&str; 32] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
];

/// A number of tokens, or a uniform range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRange {
    least: u32,
    most: u32,
}

impl FromStr for TokenRange {
    type Err = Error;

    /// `N`, or `A..B`, both ends included.
    fn from_str(text: &str) -> Result<Self, Error> {
        let (least, most) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| text.parse().ok().filter(|n| (1..=TOKENS_MAX).contains(n));
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least <= most => Ok(Self { least, most }),
            _ => Err(Error::Length {
                got: text.chars().take(40).collect(),
                most: TOKENS_MAX,
            }),
        }
    }
}

/// Lengths of prompts and answers, in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestLengths {
    Drawn {
        prompt: TokenRange,
        /// Maximum length of responses.
        output: TokenRange,
    },
    /// Pairs of prompt and response lengths, used in turn; not empty.
    Listed(Vec<(u32, u32)>),
}

impl RequestLengths {
    /// Parses a line `PROMPT OUTPUT` per pair. Empty lines and lines that begin with `#` are
    /// skipped.
    ///
    /// # Errors
    /// [`Error::Line`], [`Error::NoLengths`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        let lines = text.lines().map(str::trim).zip(1..);
        let lines = lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'));
        let pairs: Vec<(u32, u32)> = lines.map(pair).collect::<Result<_, _>>()?;
        if pairs.is_empty() {
            return Err(Error::NoLengths);
        }
        Ok(Self::Listed(pairs))
    }

    fn of(&self, i: usize, random: &mut Pcg64Mcg) -> (u32, u32) {
        match self {
            Self::Drawn { prompt, output } => (draw_in(*prompt, random), draw_in(*output, random)),
            Self::Listed(pairs) => pairs[i % pairs.len()],
        }
    }
}

fn pair((line, number): (&str, usize)) -> Result<(u32, u32), Error> {
    let parts: Vec<Option<u32>> = line
        .split_whitespace()
        .map(|part| part.parse().ok())
        .collect();
    let is_fine = |n: u32| (1..=TOKENS_MAX).contains(&n);
    match parts[..] {
        [Some(prompt), Some(output)] if is_fine(prompt) && is_fine(output) => Ok((prompt, output)),
        _ => Err(Error::Line {
            line: number,
            got: line.chars().take(40).collect(),
        }),
    }
}

fn draw_in(span: TokenRange, random: &mut Pcg64Mcg) -> u32 {
    let n = u64::from(span.most - span.least) + 1;
    span.least + (random.next_u64() % n) as u32
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TimedRequest {
    /// Send time since the start of the run; zero in a closed loop.
    pub(super) at: Duration,
    pub(super) prompt: String,
    /// Maximum tokens of the response.
    pub(super) output: u32,
}

/// Draws all requests of a run. Their prompts are in memory together: 6 bytes a token.
pub(super) fn draw(load: &LoadProfile) -> Vec<TimedRequest> {
    let mut random = Pcg64Mcg::seed_from_u64(load.seed);
    let shared = words(load.shared_prefix, &mut random);
    let mut at = Duration::ZERO;
    let job = |i| {
        if let Arrivals::Poisson { per_s } = load.arrivals {
            at += gap(per_s, &mut random);
        }
        let (prompt, output) = load.lengths.of(i, &mut random);
        let prompt = words(prompt, &mut random);
        TimedRequest {
            at,
            prompt: format!("{shared}{prompt}"),
            output,
        }
    };
    (0..load.requests).map(job).collect()
}

/// Time between two arrivals of a Poisson process: exponentially distributed, at most a day.
fn gap(per_s: f64, random: &mut Pcg64Mcg) -> Duration {
    let uniform = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64; // [0, 1)
    let seconds = -(1.0 - uniform).ln() / per_s;
    Duration::from_secs_f64(seconds.min(86_400.0))
}

fn words(n: u32, random: &mut Pcg64Mcg) -> String {
    let mut text = String::new();
    for _ in 0..n {
        text.push_str(WORDS[random.next_u64() as usize % WORDS.len()]);
        text.push(' ');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::{GoodputLimits, TargetServer};
    use super::*;

    fn load(arrivals: Arrivals) -> LoadProfile {
        LoadProfile {
            server: TargetServer::new("http://127.0.0.1:1", None, "m"),
            arrivals,
            requests: 4000,
            lengths: RequestLengths::Drawn {
                prompt: "3..5".parse().unwrap(),
                output: "7".parse().unwrap(),
            },
            shared_prefix: 2,
            ignore_eos: false,
            seed: 1,
            goals: GoodputLimits::default(),
            timeout: Duration::from_secs(1),
        }
    }

    #[test]
    fn a_seed_decides_everything() {
        let load = load(Arrivals::Poisson { per_s: 20.0 });
        let jobs = draw(&load);
        assert_eq!(jobs, draw(&load));
        let shared = jobs[0]
            .prompt
            .split_inclusive(' ')
            .take(2)
            .collect::<String>();
        for job in &jobs {
            assert!(job.prompt.starts_with(&shared));
            assert!(
                (5..=7).contains(&job.prompt.split_whitespace().count()),
                "{job:?}"
            );
            assert_eq!(job.output, 7);
        }
        // 4000 gaps of 50 ms on average: the sum's standard deviation is 1.6 %.
        let last_s = jobs.last().unwrap().at.as_secs_f64();
        assert!((190.0..210.0).contains(&last_s), "{last_s} s");
        assert!(jobs.is_sorted_by_key(|job| job.at));
    }

    #[test]
    fn closed_loops_have_no_times() {
        let jobs = draw(&load(Arrivals::Closed { clients: 2 }));
        assert!(jobs.iter().all(|job| job.at.is_zero()));
    }

    #[test]
    fn lengths_are_read() {
        let span = |text: &str| {
            text.parse::<TokenRange>()
                .map(|span| (span.least, span.most))
        };
        assert_eq!(span("20").unwrap(), (20, 20));
        assert_eq!(span("1..300").unwrap(), (1, 300));
        for bad in ["", "0", "5..4", "1..", "..3", "a", "-1", "10000001", "1.5"] {
            let error = span(bad).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("length is {bad:?}, expected N")),
                "{error}"
            );
        }
        let listed = RequestLengths::parse("# prompt output\n10 20\n\n 4000   1 \n").unwrap();
        assert_eq!(listed, RequestLengths::Listed(vec![(10, 20), (4000, 1)]));
        for (text, expected) in [
            ("", "the list of lengths is empty"),
            (
                "1 2\n3",
                "line 2 is \"3\", expected PROMPT OUTPUT, two numbers of tokens",
            ),
            (
                "1 0",
                "line 1 is \"1 0\", expected PROMPT OUTPUT, two numbers of tokens",
            ),
            (
                "1 2 3",
                "line 1 is \"1 2 3\", expected PROMPT OUTPUT, two numbers of tokens",
            ),
        ] {
            assert_eq!(
                RequestLengths::parse(text).unwrap_err().to_string(),
                expected
            );
        }
    }
}
