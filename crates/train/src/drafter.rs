//! Trains an EAGLE-3 head for a model from the model's own answers.
//!
//! ```text
//! prompts --model, greedy--> answers.jsonl --model--> captured rows --HeadNetwork--> head
//! ```
//!
//! 1. [`answers`]: the model answers the prompts of the data. Answers in the data are not read.
//! 2. The draft vocabulary has the most frequent tokens of these answers.
//! 3. Each step captures rows of some answers again, which is cheaper than to store them, and
//!    applies the gradient of [`network`].
//! 4. The report has the accepted draft tokens per position of held-out answers.
//!
//! Both phases continue after a stop with the same bits. Workers, here or on other machines, answer
//! prompts and compute leaves of one answer each: any number of them gives the same bits.

pub(crate) mod answers;
mod attention;
mod capture;
pub(crate) mod job;
mod network;
mod save;
mod worker;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use paceline_base::hex;
use paceline_base::tree::Stack;
use paceline_model::{
    Config, HeadConfig, LayerCache, LayerShape, LoadOptions, Model, ModelSource, Role,
};
use paceline_tensor::{Kernels, storage};
use paceline_weights::tensor::Tensor;
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::checkpoint::{Checkpoint, State};
use crate::data::{ExampleReader, TrainOn};
use crate::error::Error;
use crate::fingerprint::fingerprint;
use crate::messages::FromWorker;
use crate::optimiser::Optimiser;
use crate::options::RunOptions;
use crate::order::ExampleOrder;
use crate::report::TrainingProgress;
use crate::weights::Parts;
use crate::workers::{LeafModel, PartSink, TrainingWorkers};
use answers::{Answer, Answering, Answers};
use capture::Captures;
use network::{DraftRows, HeadNetwork, HeadShape};

pub use job::DrafterJob;
pub(crate) use worker::work;

/// Draft tokens of a position that the head is trained on.
const TRAINED_DEPTH: usize = 4;

/// Draft tokens of a position that the report judges: as many as a step verifies by default.
pub const JUDGED_DEPTH: usize = 8;

/// File of answers in the output folder.
const ANSWERS: &str = "answers.jsonl";

/// Without a file of held-out prompts, one in this many prompts is held out.
const HELD_OUT_EVERY: usize = 20;

/// Events of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum DrafterProgress {
    /// The model has answered `done` of its prompts.
    Answers {
        done: usize,
        of: usize,
        /// Tokens of these answers.
        tokens: usize,
    },
    /// Training begins.
    Begun {
        /// Steps that were done before.
        step: u64,
        steps: u64,
        /// Tokens of the draft vocabulary, and the share of held-out answers that they cover.
        draft_vocab: usize,
        covered: f64,
        /// Trained numbers.
        numbers: usize,
    },
    Step {
        /// From 1.
        step: u64,
        loss: f64,
        /// Tokens of answers, without prompts, a second.
        tok_s: f64,
    },
    /// A worker was lost, and others do its work.
    Lost { why: String },
    /// Held-out answers were judged after a step.
    Accepted {
        step: u64,
        /// Mean draft tokens that are right in a row, of [`JUDGED_DEPTH`].
        accepted: f64,
    },
}

/// Results of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DrafterReport {
    pub steps: u64,
    /// Loss of this process's first step and of the last.
    pub loss: [f64; 2],
    /// Mean draft tokens that are right in a row after a position of held-out answers, of
    /// [`JUDGED_DEPTH`]; the bonus token is not counted.
    pub accepted: f64,
    /// Held-out positions.
    pub judged: usize,
    /// Answers and their tokens, held-out ones included.
    pub answers: usize,
    pub answer_tokens: usize,
    pub draft_vocab: usize,
    /// Seconds of answering and of training in this process.
    pub answer_s: f64,
    pub train_s: f64,
    /// Bytes of the head's weights.
    pub bytes: u64,
}

/// A job that was read.
#[derive(Debug)]
pub struct DrafterRun {
    job: DrafterJob,
    source: ModelSource,
    model: Arc<Model>,
    kernels: Arc<Kernels>,
    reader: ExampleReader,
}

impl DrafterRun {
    /// Loads the model of a job.
    ///
    /// # Errors
    /// Errors of the model and its options; [`Error::Family`] for a model whose layers have
    /// windows or states.
    pub fn open(job: &DrafterJob, kernels: Arc<Kernels>) -> Result<Self, Error> {
        let option = |option, got: usize, expected: &str| Error::Option {
            option,
            got: got.to_string(),
            expected: expected.to_owned(),
        };
        if job.batch == 0 || job.tokens_max < 4 {
            let given = (job.batch, job.tokens_max);
            return Err(match given {
                (0, _) => option("--batch", 0, "1 or more"),
                (_, n) => option("--max-tokens-per-row", n, "4 or more"),
            });
        }
        let source = ModelSource::open(&job.model)?;
        let options = LoadOptions::default();
        let model = Model::load(&source, options, Arc::clone(&kernels), |_, _| {})?;
        let config = model.config();
        if job.draft_vocab == 0 {
            return Err(option("--draft-vocab", 0, "1 or more"));
        }
        let is_plain = |layer: &LayerShape| {
            layer.window.is_none() && layer.cache == LayerCache::Rows && layer.latent.is_none()
        };
        if !config.layers.iter().all(is_plain) {
            let family = format!("{:?}", config.family).to_lowercase();
            let why = "its layers have windows or states, whose heads are to come";
            return Err(Error::Family { family, why });
        }
        let captures = HeadConfig::usual_captures(config.layers.len());
        let reader = ExampleReader::new(&job.model, TrainOn::Last, (job.tokens_max, false))?;
        Ok(Self {
            job: job.clone(),
            model: Arc::new(model.with_captures(&captures)),
            source,
            kernels,
            reader,
        })
    }

    pub(crate) const fn job(&self) -> &DrafterJob {
        &self.job
    }

    /// Fingerprints of the model and of the prompts.
    pub(crate) fn fingerprints(&self) -> Result<(String, String), Error> {
        let mut hash = Sha256::new();
        for prompt in self.prompts()?.0 {
            hash.update(prompt.len().to_le_bytes());
            prompt.iter().for_each(|t| hash.update(t.to_le_bytes()));
        }
        Ok((fingerprint(&self.source)?, hex(&hash.finalize())))
    }

    /// The message of a worker that has loaded the model.
    pub(crate) fn ready(&self) -> Result<FromWorker, Error> {
        let (model, data) = self.fingerprints()?;
        Ok(FromWorker::Ready {
            model,
            data,
            engine: "cpu".to_owned(),
            notes: Vec::new(),
        })
    }

    /// Answers, trains, and writes the head to the folder of `options`.
    ///
    /// # Errors
    /// [`Error::RunThere`], [`Error::OtherRun`]; errors of the data; [`Error::Diverged`];
    /// [`Error::Lost`] when no worker is left; [`Error::Stopped`] after a request to stop;
    /// [`Error::Files`].
    pub fn train(
        &self,
        crew: &mut TrainingWorkers,
        options: RunOptions<'_>,
        watch: &mut dyn FnMut(DrafterProgress),
    ) -> Result<DrafterReport, Error> {
        let output = options.output;
        std::fs::create_dir_all(output).map_err(Error::file("make", output))?;
        self.claim(output, options.resume)?;
        let began = (options.clock)();
        let (train, valid) = self.answers(crew, &options, watch)?;
        let answered = (options.clock)();
        crew.learn(&output.join(ANSWERS))?;
        let mut training = self.training(train)?;
        let (state, loss) = training.steps(crew, &valid, options, watch)?;
        let (accepted, judged) = training.judge(&state.params, &valid)?;
        let bytes = save::write(output, &training, &state.params)?;
        let all = training.train.iter().chain(&valid);
        Ok(DrafterReport {
            steps: state.step,
            loss,
            accepted,
            judged,
            answers: training.train.len() + valid.len(),
            answer_tokens: all.map(Answer::own_tokens).sum(),
            draft_vocab: training.vocabulary.len(),
            answer_s: answered - began,
            train_s: (options.clock)() - answered,
            bytes,
        })
    }

    /// A training on these answers.
    fn training(&self, train: Vec<Answer>) -> Result<Training<'_>, Error> {
        let vocabulary = vocabulary(&train, self.job.draft_vocab);
        let network = HeadNetwork::new(&self.kernels, self.shape(vocabulary.len()));
        Ok(Training {
            parts: Parts::new(&[0, network.layout.len()], false),
            order: ExampleOrder {
                seed: self.job.seed,
                examples: train.len(),
                batch: self.job.batch,
                leaf: 1,
            },
            run: self,
            network,
            captures: Captures::new(&self.model, self.job.tokens_max)?,
            table: Table::new(&self.source, self.model.config(), Role::TokenEmbedding)?,
            places: places(&vocabulary),
            vocabulary,
            train: train.into(),
        })
    }

    /// All prompts, held-out ones last, and the number of the others.
    fn prompts(&self) -> Result<(Vec<Vec<u32>>, usize), Error> {
        let mut prompts = self.reader.read(&self.job.data, "train")?.prompts();
        let held_out = match &self.job.valid {
            Some(path) => self.reader.read(path, "valid")?.prompts(),
            None => {
                let last = prompts.len().saturating_sub(1);
                let is_out = |i: usize| i % HELD_OUT_EVERY == last.min(HELD_OUT_EVERY - 1);
                let numbered = prompts.into_iter().enumerate();
                let (out, rest): (Vec<_>, Vec<_>) = numbered.partition(|(i, _)| is_out(*i));
                prompts = rest.into_iter().map(|(_, prompt)| prompt).collect();
                out.into_iter().map(|(_, prompt)| prompt).collect()
            }
        };
        let n = prompts.len();
        prompts.extend(held_out);
        // Room for two tokens at least: one is read, one is predicted.
        let longest = self.job.tokens_max - 2;
        prompts
            .iter_mut()
            .for_each(|prompt| prompt.truncate(longest));
        Ok((prompts, n))
    }

    /// Answers to train on, and held-out ones, as far as the file `path` has them.
    fn known_answers(&self, path: &Path) -> Result<(Answers, usize), Error> {
        let (prompts, n) = self.prompts()?;
        let answers = Answers::open(path, prompts, self.job.tokens_max)?;
        Ok((answers, n))
    }

    /// Answers to train on, and held-out ones, made here or by workers.
    fn answers(
        &self,
        crew: &mut TrainingWorkers,
        options: &RunOptions<'_>,
        watch: &mut dyn FnMut(DrafterProgress),
    ) -> Result<(Vec<Answer>, Vec<Answer>), Error> {
        let (mut answers, n) = self.known_answers(&options.output.join(ANSWERS))?;
        let (clock, groups) = (options.clock, crew.groups());
        let watch = std::cell::RefCell::new(watch);
        let mut here = None;
        let answering = |first: usize, prompts: &[Vec<u32>]| {
            let lost = &mut |progress| lost(progress, &mut **watch.borrow_mut());
            if let Some(made) = crew.answer((first, prompts), clock, lost)? {
                return Ok(made);
            }
            let here = match &mut here {
                Some(here) => here,
                none => none.insert(self.answering()?),
            };
            here.answer(prompts)
        };
        let mut progress = |answers: &[Answer], of| {
            (*watch.borrow_mut())(DrafterProgress::Answers {
                done: answers.len(),
                of,
                tokens: answers.iter().map(Answer::own_tokens).sum(),
            });
        };
        answers.complete(answering, groups, options.stop, &mut progress)?;
        let (train, valid) = split(answers.into_answers(), n);
        if train.is_empty() || valid.is_empty() {
            let path = self.job.data.clone();
            return Err(Error::NoExamples { path });
        }
        Ok((train, valid))
    }

    fn answering(&self) -> Result<Answering, Error> {
        let of = (&self.model, self.reader.tokenizer());
        Answering::new(of, self.job.tokens_max)
    }

    fn shape(&self, draft_vocab: usize) -> HeadShape {
        let config = self.model.config();
        let layer = &config.layers[config.layers.len() - 1];
        HeadShape {
            width: config.width,
            captures: self.model.captures().len(),
            heads: layer.heads,
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            ffn: layer.ffn,
            draft_vocab,
            norm_eps: config.norm_eps,
        }
    }

    /// Writes the run's description to the folder, or checks that the folder has the same.
    fn claim(&self, output: &Path, resume: bool) -> Result<(), Error> {
        let path = output.join("run.json");
        let here = json!({ "drafter": self.job });
        let there = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let text = serde_json::to_string_pretty(&here).unwrap_or_default();
                return std::fs::write(&path, text).map_err(Error::file("write", &path));
            }
            Err(error) => return Err(Error::file("read", &path)(error)),
            Ok(_) if !resume => {
                let path = output.to_owned();
                return Err(Error::RunThere { path });
            }
            Ok(there) => there,
        };
        let there: serde_json::Value =
            serde_json::from_slice(&there).map_err(|e| Error::malformed(&path, e))?;
        let here = serde_json::from_str(&here.to_string()).unwrap_or(here);
        let differs = here["drafter"].as_object().and_then(|fields| {
            let mut fields = fields.iter();
            fields.find(|(name, value)| there["drafter"].get(name) != Some(value))
        });
        match differs {
            None => Ok(()),
            Some((field, value)) => Err(Error::OtherRun {
                path: output.to_owned(),
                there: there["drafter"][field].to_string(),
                field: field.clone(),
                here: value.to_string(),
            }),
        }
    }
}

/// Cuts answers after the first `n`, without those that are too short to learn from.
fn split(mut answers: Vec<Answer>, n: usize) -> (Vec<Answer>, Vec<Answer>) {
    let mut rest = answers.split_off(n);
    for answers in [&mut answers, &mut rest] {
        answers.retain(|answer| answer.own_tokens() > 1);
    }
    (answers, rest)
}

/// Reports workers that were lost.
fn lost(progress: TrainingProgress, watch: &mut dyn FnMut(DrafterProgress)) {
    if let TrainingProgress::Lost { why } = progress {
        watch(DrafterProgress::Lost { why });
    }
}

/// The most frequent tokens of answers, at most `most`, in ascending order.
fn vocabulary(answers: &[Answer], most: usize) -> Vec<u32> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    let tokens = answers
        .iter()
        .flat_map(|answer| &answer.tokens[answer.prompt..]);
    tokens.for_each(|token| *counts.entry(*token).or_default() += 1);
    let mut all: Vec<(u32, usize)> = counts.into_iter().collect();
    all.sort_by_key(|(token, count)| (std::cmp::Reverse(*count), *token));
    all.truncate(most);
    let mut tokens: Vec<u32> = all.into_iter().map(|(token, _)| token).collect();
    tokens.sort_unstable();
    tokens
}

/// Index of each token in a draft vocabulary.
fn places(vocabulary: &[u32]) -> BTreeMap<u32, u32> {
    vocabulary.iter().copied().zip(0..).collect()
}

/// A table of the model's file, read row by row.
#[derive(Debug)]
struct Table(Tensor);

impl Table {
    fn new(source: &ModelSource, config: &Config, role: Role) -> Result<Self, Error> {
        let table = source.weight(config.family, role)?;
        let expected = vec![config.vocab, config.width];
        match table.shape == expected {
            true => Ok(Self(table)),
            false => Err(Error::Model(paceline_model::Error::Shape {
                name: table.name,
                got: table.shape,
                expected,
            })),
        }
    }

    /// The model's head: that of its file, or the table of tokens.
    fn of_output(source: &ModelSource, config: &Config) -> Result<Self, Error> {
        let own =
            config.tied != Some(true) && source.opt_weight(config.family, Role::Output)?.is_some();
        let role = if own {
            Role::Output
        } else {
            Role::TokenEmbedding
        };
        Self::new(source, config, role)
    }

    /// The rows of `tokens`, (tokens, C).
    fn rows(&self, tokens: &[u32]) -> Vec<f32> {
        let (width, bytes) = (self.0.cols(), self.0.bytes.len() / self.0.rows().max(1));
        let mut out = vec![0.0; tokens.len() * width];
        for (out, token) in out.chunks_mut(width).zip(tokens) {
            let at = *token as usize * bytes;
            storage::dequantise(self.0.block_type, &self.0.bytes[at..at + bytes], out);
        }
        out
    }
}

/// A training under way.
struct Training<'a> {
    run: &'a DrafterRun,
    network: HeadNetwork<'a>,
    /// A single part: all numbers of the head.
    parts: Parts,
    train: Arc<[Answer]>,
    order: ExampleOrder,
    captures: Captures,
    table: Table,
    vocabulary: Vec<u32>,
    places: BTreeMap<u32, u32>,
}

impl LeafModel for Training<'_> {
    fn shape(&self) -> (usize, &Parts) {
        (self.order.leaves(), &self.parts)
    }

    fn compute(
        &mut self,
        params: &[f32],
        (step, leaves): (u64, Range<usize>),
        done: &mut PartSink<'_>,
    ) -> Result<Vec<f64>, Error> {
        let (train, judged) = (Arc::clone(&self.train), self.judged(step));
        let (places, n) = (self.order.step(step), self.network.layout.len());
        let mut roots = Stack::new(self.order.leaves(), n);
        roots.reset(leaves.start);
        let mut losses = Vec::with_capacity(leaves.len());
        for leaf in leaves {
            let rows = self.rows(&train[places[leaf]])?;
            let mut grads = vec![0.0; n];
            let at = (TRAINED_DEPTH, judged);
            losses.push(self.network.gradient(params, &rows, at, &mut grads));
            roots.push(&grads);
        }
        done(0, roots.values())?;
        Ok(losses)
    }
}

impl Training<'_> {
    /// Runs the steps that are left. Gives the last state, and the losses of the first and the last
    /// step.
    fn steps(
        &mut self,
        crew: &mut TrainingWorkers,
        valid: &[Answer],
        options: RunOptions<'_>,
        watch: &mut dyn FnMut(DrafterProgress),
    ) -> Result<(State, [f64; 2]), Error> {
        let (output, job) = (options.output, &self.run.job);
        let mut state = self.state(output)?;
        watch(self.begun(state.step, valid));
        let mut losses = [f64::NAN; 2];
        while state.step < job.optimiser.steps {
            if (options.stop)() {
                state.save(output, &self.network.layout)?;
                let step = state.step + 1;
                return Err(Error::Stopped { step });
            }
            let began = (options.clock)();
            let tokens = self.judged(state.step);
            let at = (&state.params[..], state.step);
            let lost = &mut |progress| lost(progress, &mut *watch);
            let (loss, mut grads) = crew.step_of_head(self, at, options.clock, lost)?;
            let step = state.step + 1;
            if !loss.is_finite() {
                return Err(Error::Diverged { step, loss });
            }
            let (params, optimiser) = (&mut state.params, &mut state.optimiser);
            optimiser.apply(state.step, &self.network.layout, &mut grads, params);
            state.step = step;
            losses = [if losses[0].is_nan() { loss } else { losses[0] }, loss];
            let tok_s = tokens as f64 / ((options.clock)() - began).max(1e-9);
            watch(DrafterProgress::Step { step, loss, tok_s });
            if step.is_multiple_of(options.eval_every.max(1)) {
                let (accepted, _) = self.judge(&state.params, valid)?;
                watch(DrafterProgress::Accepted { step, accepted });
            }
            if step.is_multiple_of(options.save_every.max(1)) || step == job.optimiser.steps {
                state.save(output, &self.network.layout)?;
            }
        }
        Ok((state, losses))
    }

    /// Tokens of the answers of a step.
    fn judged(&self, step: u64) -> usize {
        let answers = self.order.step(step).into_iter();
        answers.map(|i| self.train[i].own_tokens()).sum()
    }

    /// The newest checkpoint, or the values before the first step.
    fn state(&self, output: &Path) -> Result<State, Error> {
        let (run, network) = (self.run, &self.network);
        let fresh = Optimiser::new(run.job.optimiser, network.layout.len());
        if let Some(checkpoint) = Checkpoint::newest(output)? {
            return State::of(&checkpoint, &network.layout, fresh);
        }
        let config = run.model.config();
        let output = Table::of_output(&run.source, config)?.rows(&self.vocabulary);
        let norm = run.source.weight(config.family, Role::OutputNorm)?;
        let mut norm = crate::weights::numbers(&norm, config.width)?;
        norm.iter_mut().for_each(|w| *w += config.norm_offset);
        Ok(State {
            step: 0,
            params: network.first_values(run.job.seed, (&norm, &output)),
            optimiser: fresh,
        })
    }

    fn begun(&self, step: u64, valid: &[Answer]) -> DrafterProgress {
        let tokens = valid
            .iter()
            .flat_map(|answer| &answer.tokens[answer.prompt..]);
        let (known, all) = tokens.fold((0, 0), |(known, all), token| {
            (
                known + usize::from(self.places.contains_key(token)),
                all + 1,
            )
        });
        DrafterProgress::Begun {
            step,
            steps: self.run.job.optimiser.steps,
            draft_vocab: self.vocabulary.len(),
            covered: known as f64 / f64::from(all.max(1)),
            numbers: self.network.layout.len(),
        }
    }

    /// The rows of an answer. Its last token is only a target.
    fn rows(&mut self, answer: &Answer) -> Result<DraftRows, Error> {
        let n = answer.tokens.len() - 1;
        let target = |i: usize| {
            let place = || self.places.get(&answer.tokens[i + 1]).copied();
            (i + 1 >= answer.prompt).then(place)
        };
        Ok(DraftRows {
            targets: (0..n).map(target).collect(),
            captured: self.captures.rows(&answer.tokens[..n])?,
            embedded: self.table.rows(&answer.tokens[..n]),
            tokens: answer.tokens[..n].to_vec(),
        })
    }

    /// Mean draft tokens that are right in a row after a position of these answers, and the number
    /// of positions.
    fn judge(&mut self, params: &[f32], answers: &[Answer]) -> Result<(f64, usize), Error> {
        let (mut right, mut judged) = (0, 0);
        for answer in answers {
            let rows = self.rows(answer)?;
            let accepted = self.network.accepted(params, &rows, JUDGED_DEPTH);
            right += accepted.iter().sum::<usize>();
            judged += accepted.len();
        }
        Ok((right as f64 / judged.max(1) as f64, judged))
    }
}
