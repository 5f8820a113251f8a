//! The checks of an engine, run in a process of their own. A library that aborts or a device that
//! hangs costs the missing rows, not the report.

use std::ops::Deref;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use paceline_base::{Bytes, KernelClass};
use paceline_engine::{EngineConfig, GenerationRequest, Reply, SamplingParams};
use paceline_mlx::{EVALUATIONS, Error as MlxError, Library, LibraryPaths, evaluation_us};
use paceline_node::{ReplyStream, ServingModel};

use super::report::Row;
use super::tiny_model::prompt;

/// Names of the checks of class `cpu`, in their order.
pub const CPU: [&str; 2] = ["cpu: recorded bits", "cpu: two answers at once"];

/// Names of the checks of MLX, in their order.
pub const MLX: [&str; 6] = [
    "mlx: library",
    "mlx: memory for a model",
    "mlx: one evaluation",
    "mlx-f32: distance to cpu-f32",
    "mlx: distance to cpu-f32",
    "mlx: two answers at once",
];

/// Name of the check over the nodes of a cluster.
pub const CLUSTER: &str = "cluster: recorded bits";

/// Tokens of a prompt. From 256 on, MLX's CUDA build decodes by another kernel, which once read the
/// memory before a second sequence.
const KEYS: usize = 300;

/// Tokens decoded behind it.
const DECODED: usize = 16;

/// The token that is next in answers that are compared: any.
const GIVEN: u32 = 1;

/// Positions of a sequence, and of the cache. MLX takes that kernel where the cache has whole runs
/// of 256.
const CONTEXT: usize = 512;
const POSITIONS: usize = 2048;

/// A reply later than this is a hang. MLX compiles kernels in its first step; on CUDA that took up
/// to 40 s (H100, November 2026).
const SILENCE: Duration = Duration::from_secs(120);

/// Largest accepted distance of two log-probabilities in class `mlx-f32`: sums of f32 in another
/// order. On MLX's CPU build it is 4e-5.
const NEAR_F32: f32 = 1e-3;

/// The same of class `mlx`, whose activations have 8 to 11 bits. On MLX's CPU build it is 0.07;
/// behind another prompt the decoded tokens are 1.9 away.
const NEAR: f32 = 0.25;

/// Tokens that class `cpu` answers to [`prompt`]`(KEYS, 1)`, greedily.
const RECORDED_TOKENS: [u32; DECODED] = [
    80, 159, 117, 194, 74, 108, 81, 231, 201, 66, 135, 163, 28, 151, 194, 160,
];

/// Hash of their log-probabilities and those of the prompt, to the bit.
const RECORDED_HASH: u64 = 0xe7d1_7774_cb2e_576b;

/// Loads the tiny model in a class, on an engine of these sizes.
pub type Load<'a, M> = &'a dyn Fn(KernelClass, EngineConfig) -> Result<M>;

/// Sizes of the engine that the checks need.
pub fn sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: POSITIONS,
        max_running: 2,
        max_waiting: 2,
        ..EngineConfig::single("selftest", CONTEXT)
    }
}

/// The checks of class `cpu`: [`CPU`].
pub fn cpu<M: Deref<Target = ServingModel>>(load: Load<'_, M>, show: &mut dyn FnMut(Row)) {
    let [bits, pair] = CPU;
    let recorded = load(KernelClass::Cpu, sizes()).and_then(|model| recorded(bits, &model));
    show(recorded.unwrap_or_else(|error| failed(bits, &error)));
    let alone = answer(load, KernelClass::Cpu, 1);
    let far = alone.and_then(|alone| together(load, KernelClass::Cpu, &alone));
    show(far.map_or_else(|error| failed(pair, &error), |far| near(pair, far, 0.0)));
}

/// Compares the greedy answer of `model`, which computes in class `cpu`, with the recorded one.
pub fn recorded(check: &str, model: &ServingModel) -> Result<Row> {
    let answer = Answer::read(&start(model, 1, None)?)?;
    let (got, hash) = (&answer.tokens[..], answer.hash());
    let pairs = got.iter().zip(RECORDED_TOKENS).enumerate();
    let mut other = pairs.filter(|(_, (got, recorded))| **got != *recorded);
    if let Some((i, (got, recorded))) = other.next() {
        let note = format!("token {i} is {got}, recorded {recorded}");
        return Ok(Row::failed(check, note));
    }
    if hash != RECORDED_HASH || got.len() != DECODED {
        let note =
            format!("log-probabilities have hash {hash:016x}, recorded {RECORDED_HASH:016x}");
        return Ok(Row::failed(check, note));
    }
    Ok(Row::passed(check, "").with((KEYS + DECODED) as f64, "tokens"))
}

/// The checks of MLX: [`MLX`]. Without a library all are skipped, or fail where `is_demanded`.
pub fn mlx<M: Deref<Target = ServingModel>>(
    load: Load<'_, M>,
    places: &LibraryPaths,
    is_demanded: bool,
    show: &mut dyn FnMut(Row),
) {
    let library = match Library::open(places) {
        Ok(library) => library,
        Err(error) => return unopened(&error, is_demanded, show),
    };
    let [opens, memory, evaluation, f32_class, class, pair] = MLX;
    let mut row = |check, row: Result<Row>| {
        show(row.unwrap_or_else(|error| failed(check, &error)));
    };
    row(opens, facts(opens, &library));
    row(memory, available(memory, &library));
    row(evaluation, evaluated((evaluation, EVALUATIONS), &library));
    let exact = answer(load, KernelClass::CpuF32, 1);
    let of_f32 = answer(load, KernelClass::MlxF32, 1);
    row(
        f32_class,
        apart(&of_f32, &exact).map(|far| near(f32_class, far, NEAR_F32)),
    );
    let alone = answer(load, KernelClass::Mlx, 1);
    row(
        class,
        apart(&alone, &exact).map(|far| near(class, far, NEAR)),
    );
    let far = alone.and_then(|alone| together(load, KernelClass::Mlx, &alone));
    row(pair, far.map(|far| near(pair, far, NEAR)));
}

/// The median time of `n` evaluations, as the check `name`.
pub fn evaluations((name, n): (&str, usize), places: &LibraryPaths) -> Row {
    let library = Library::open(places).map_err(anyhow::Error::from);
    let row = library.and_then(|library| evaluated((name, n), &library));
    row.unwrap_or_else(|error| failed(name, &error))
}

fn failed(check: &str, error: &anyhow::Error) -> Row {
    Row::failed(check, format!("{error:#}"))
}

/// Rows where MLX cannot be opened.
fn unopened(error: &MlxError, is_demanded: bool, show: &mut dyn FnMut(Row)) {
    let is_absent = matches!(error, MlxError::NotFound { .. });
    let note = match is_absent {
        true => "MLX is not installed".to_owned(),
        false => error.to_string(),
    };
    let [first, rest @ ..] = MLX;
    show(match is_absent && !is_demanded {
        true => Row::skipped(first, note),
        false => Row::failed(first, note),
    });
    rest.iter()
        .for_each(|check| show(Row::skipped(check, "no library")));
}

fn facts(check: &str, library: &Library) -> Result<Row> {
    let device = library.best_device()?;
    let backend = library.backend(device)?;
    let name = library.stream(device)?.device_name().unwrap_or_default();
    let version = library.version();
    Ok(Row::passed(check, format!("{version} {backend} {name}")))
}

fn available(check: &str, library: &Library) -> Result<Row> {
    let Bytes(bytes) = library.stream(library.best_device()?)?.available()?;
    Ok(Row::passed(check, "").with(gib(bytes), "GiB"))
}

/// Bytes in GiB.
pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

fn evaluated((check, n): (&str, usize), library: &Library) -> Result<Row> {
    let device = library.best_device()?;
    let took = evaluation_us(library, device, n)?;
    let backend = library.backend(device)?;
    Ok(Row::passed(check, format!("of one sum, on {backend}")).with(took, "us"))
}

/// A distance that must not exceed `most`.
fn near(check: &str, far: f32, most: f32) -> Row {
    let row = match far <= most {
        true => Row::passed(check, format!("at most {most}")),
        false => Row::failed(
            check,
            format!("log-probabilities are {far} apart, at most {most}"),
        ),
    };
    match far.is_finite() {
        true => row.with(f64::from(far), "nats"),
        false => row, // JSON has no such number
    }
}

/// The answer of a new model to the prompt of a seed, where each next token is given.
fn answer<M: Deref<Target = ServingModel>>(
    load: Load<'_, M>,
    class: KernelClass,
    seed: u64,
) -> Result<Answer> {
    let model = load(class, sizes())?;
    Answer::read(&start(&model, seed, Some(GIVEN))?)
}

/// The distance of two answers, or the error of the first that has one.
fn apart(one: &Result<Answer>, other: &Result<Answer>) -> Result<f32> {
    match (one, other) {
        (Ok(one), Ok(other)) => Ok(one.distance(other)),
        (Err(error), _) | (_, Err(error)) => bail!("{error:#}"),
    }
}

/// The largest distance between two answers computed at once and the same computed alone. The
/// seeds are 1 and 2; `first` is the answer to seed 1 alone.
fn together<M: Deref<Target = ServingModel>>(
    load: Load<'_, M>,
    class: KernelClass,
    first: &Answer,
) -> Result<f32> {
    let second = answer(load, class, 2)?;
    let model = load(class, sizes())?;
    let replies = [
        start(&model, 1, Some(GIVEN))?,
        start(&model, 2, Some(GIVEN))?,
    ];
    let mut worst = 0.0f32;
    for (replies, alone) in replies.iter().zip([first, &second]) {
        worst = worst.max(Answer::read(replies)?.distance(alone));
    }
    Ok(worst)
}

/// A model's answer to a prompt, with its probabilities of both.
#[derive(Clone, Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    /// Of the prompt's tokens from the second on, then of [`tokens`](Self::tokens).
    logprobs: Vec<f32>,
}

/// Starts an answer to the prompt of a seed; `given` is the token that is always next, so that
/// answers of unlike classes stay comparable.
fn start(model: &ServingModel, seed: u64, given: Option<u32>) -> Result<ReplyStream<'_>> {
    let bias = given.map(|token| (token, 100.0)); // the most there may be, and far above any logit
    let request = GenerationRequest {
        prompt: prompt(KEYS, seed),
        max_tokens: DECODED,
        sampling: SamplingParams {
            logit_bias: bias.into_iter().collect(),
            ..SamplingParams::default()
        },
        logprobs: Some(0),
        prompt_logprobs: true,
        ..GenerationRequest::default()
    };
    Ok(model.submit(request)?)
}

impl Answer {
    /// Waits until it is complete.
    fn read(replies: &ReplyStream<'_>) -> Result<Self> {
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        loop {
            let reply = replies.next_within(SILENCE)?;
            let (_, reply) = reply.with_context(|| format!("no reply within {SILENCE:?}"))?;
            match reply {
                Reply::PromptRead { logprobs: all, .. } => {
                    logprobs.extend(all.into_iter().flatten().map(|of| of.logprob));
                }
                Reply::Token {
                    token,
                    logprobs: of,
                    ..
                } => {
                    tokens.push(token);
                    logprobs.extend(of.map(|of| of.logprob));
                }
                Reply::Continued => {}
                Reply::Finished { .. } => return Ok(Self { tokens, logprobs }),
                Reply::Failed(failure) => return Err(failure.into()),
            }
        }
    }

    /// The largest distance of two log-probabilities; infinite for answers of unlike lengths, and
    /// where one is no number.
    fn distance(&self, other: &Self) -> f32 {
        if self.tokens != other.tokens || self.logprobs.len() != other.logprobs.len() {
            return f32::INFINITY;
        }
        let pairs = self.logprobs.iter().zip(&other.logprobs);
        pairs
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, |worst, far| match far.is_nan() {
                true => f32::INFINITY,
                false => far.max(worst),
            })
    }

    /// FNV-1a over the bits of the log-probabilities.
    fn hash(&self) -> u64 {
        let bytes = self.logprobs.iter().flat_map(|p| p.to_bits().to_le_bytes());
        let start = 0xcbf2_9ce4_8422_2325u64;
        bytes.fold(start, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::report::Outcome;

    fn answer(logprobs: &[f32]) -> Answer {
        Answer {
            tokens: vec![1],
            logprobs: logprobs.to_vec(),
        }
    }

    #[test]
    fn a_distance_sees_every_difference() {
        let one = answer(&[-1.0, -2.0]);
        assert_eq!(one.distance(&one), 0.0);
        assert_eq!(one.distance(&answer(&[-1.5, -2.25])), 0.5);
        for other in [answer(&[-1.0]), answer(&[f32::NAN, -2.0])] {
            assert_eq!(one.distance(&other), f32::INFINITY);
        }
        assert_ne!(one.hash(), answer(&[-1.0, -2.000_000_2]).hash());
    }

    #[test]
    fn a_distance_fails_above_its_bound() {
        for (far, outcome) in [
            (0.25, Outcome::Passed),
            (0.2501, Outcome::Failed),
            (f32::INFINITY, Outcome::Failed),
        ] {
            let row = near("x", far, 0.25);
            let line = serde_json::to_string(&row).unwrap();
            assert_eq!(serde_json::from_str::<Row>(&line).unwrap(), row, "{far}");
            assert_eq!(row.outcome, outcome, "{far}");
        }
    }

    #[test]
    fn a_missing_library_fails_where_it_is_demanded() {
        for (is_demanded, first) in [(false, Outcome::Skipped), (true, Outcome::Failed)] {
            let error = MlxError::NotFound {
                name: "libmlxc.so",
                looked: Vec::new(),
            };
            let mut rows = Vec::new();
            unopened(&error, is_demanded, &mut |row| rows.push(row));
            let checks: Vec<&str> = rows.iter().map(|row| &*row.check).collect();
            assert_eq!(checks, MLX);
            assert_eq!(rows[0].outcome, first);
            assert!(rows[1..].iter().all(|row| row.outcome == Outcome::Skipped));
        }
    }
}
