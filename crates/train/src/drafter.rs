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
//! Both phases continue after a stop with the same bits. One process computes; workers of other
//! machines are not used.

mod answers;
mod attention;
mod capture;
mod network;
mod save;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_model::{
    Config, HeadConfig, LayerCache, LayerShape, LoadOptions, Model, ModelSource, Role,
};
use paceline_tensor::{Kernels, storage};
use paceline_weights::tensor::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::checkpoint::{Checkpoint, State};
use crate::data::{ExampleReader, TrainOn};
use crate::error::Error;
use crate::optimiser::{Optimiser, OptimiserOptions};
use crate::options::RunOptions;
use crate::order::ExampleOrder;
use answers::{Answer, Answers};
use capture::Captures;
use network::{DraftRows, HeadNetwork, HeadShape};

/// Draft tokens of a position that the head is trained on.
const TRAINED_DEPTH: usize = 4;

/// Draft tokens of a position that the report judges: as many as a step verifies by default.
pub const JUDGED_DEPTH: usize = 8;

/// Without a file of held-out prompts, one in this many prompts is held out.
const HELD_OUT_EVERY: usize = 20;

/// All that the bits of a head depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrafterJob {
    /// A GGUF file or a Hugging Face folder.
    pub model: PathBuf,
    /// A file of prompts, in any form of training data.
    pub data: PathBuf,
    /// Prompts that are held out; without, one in 20 of `data`.
    pub valid: Option<PathBuf>,
    /// Longest prompt with its answer, in tokens.
    pub tokens_max: usize,
    /// Answers of a step.
    pub batch: usize,
    pub seed: u64,
    /// Most tokens of the draft vocabulary.
    pub draft_vocab: usize,
    pub optimiser: OptimiserOptions,
}

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

    /// Answers, trains, and writes the head to the folder of `options`.
    ///
    /// # Errors
    /// [`Error::RunThere`], [`Error::OtherRun`]; errors of the data; [`Error::Diverged`];
    /// [`Error::Stopped`] after a request to stop; [`Error::Files`].
    pub fn train(
        &self,
        options: RunOptions<'_>,
        watch: &mut dyn FnMut(DrafterProgress),
    ) -> Result<DrafterReport, Error> {
        let output = options.output;
        std::fs::create_dir_all(output).map_err(Error::file("make", output))?;
        self.claim(output, options.resume)?;
        let began = (options.clock)();
        let (train, valid) = self.answers(&options, watch)?;
        let answered = (options.clock)();
        let vocabulary = vocabulary(&train, self.job.draft_vocab);
        let network = HeadNetwork::new(&self.kernels, self.shape(vocabulary.len()));
        let mut training = Training {
            run: self,
            network: &network,
            captures: Captures::new(&self.model, self.job.tokens_max)?,
            table: Table::new(&self.source, self.model.config(), Role::TokenEmbedding)?,
            places: places(&vocabulary),
            vocabulary,
        };
        let (state, loss) = training.steps((&train, &valid), options, watch)?;
        let (accepted, judged) = training.judge(&state.params, &valid)?;
        let bytes = save::write(output, &training, &state.params)?;
        let all = train.iter().chain(&valid);
        Ok(DrafterReport {
            steps: state.step,
            loss,
            accepted,
            judged,
            answers: train.len() + valid.len(),
            answer_tokens: all.map(Answer::own_tokens).sum(),
            draft_vocab: training.vocabulary.len(),
            answer_s: answered - began,
            train_s: (options.clock)() - answered,
            bytes,
        })
    }

    /// Answers to train on, and held-out ones.
    fn answers(
        &self,
        options: &RunOptions<'_>,
        watch: &mut dyn FnMut(DrafterProgress),
    ) -> Result<(Vec<Answer>, Vec<Answer>), Error> {
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
        let mut answers = Answers::open(
            &options.output.join("answers.jsonl"),
            prompts,
            self.job.tokens_max,
        )?;
        answers.complete((&self.model, self.reader.tokenizer()), options.stop, watch)?;
        let mut train = answers.into_answers();
        let mut valid = train.split_off(n);
        for answers in [&mut train, &mut valid] {
            answers.retain(|answer| answer.own_tokens() > 1);
        }
        if train.is_empty() || valid.is_empty() {
            let path = self.job.data.clone();
            return Err(Error::NoExamples { path });
        }
        Ok((train, valid))
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
    network: &'a HeadNetwork<'a>,
    captures: Captures,
    table: Table,
    vocabulary: Vec<u32>,
    places: BTreeMap<u32, u32>,
}

impl Training<'_> {
    /// Runs the steps that are left. Gives the last state, and the losses of the first and the last
    /// step.
    fn steps(
        &mut self,
        (train, valid): (&[Answer], &[Answer]),
        options: RunOptions<'_>,
        watch: &mut dyn FnMut(DrafterProgress),
    ) -> Result<(State, [f64; 2]), Error> {
        let (output, job, network) = (options.output, &self.run.job, self.network);
        let mut state = self.state(output)?;
        watch(self.begun(state.step, valid));
        let order = ExampleOrder {
            seed: job.seed,
            examples: train.len(),
            batch: job.batch,
            leaf: job.batch,
        };
        let mut losses = [f64::NAN; 2];
        while state.step < job.optimiser.steps {
            if (options.stop)() {
                state.save(output, &network.layout)?;
                let step = state.step + 1;
                return Err(Error::Stopped { step });
            }
            let began = (options.clock)();
            let answers: Vec<&Answer> = order
                .step(state.step)
                .into_iter()
                .map(|i| &train[i])
                .collect();
            let tokens: usize = answers.iter().map(|answer| answer.own_tokens()).sum();
            let rows = self.rows(&answers)?;
            let mut grads = vec![0.0; network.layout.len()];
            let loss = network.gradient(&state.params, &rows, (TRAINED_DEPTH, tokens), &mut grads);
            let step = state.step + 1;
            if !loss.is_finite() {
                return Err(Error::Diverged { step, loss });
            }
            let (params, optimiser) = (&mut state.params, &mut state.optimiser);
            optimiser.apply(state.step, &network.layout, &mut grads, params);
            state.step = step;
            losses = [if losses[0].is_nan() { loss } else { losses[0] }, loss];
            let tok_s = tokens as f64 / ((options.clock)() - began).max(1e-9);
            watch(DrafterProgress::Step { step, loss, tok_s });
            if step.is_multiple_of(options.eval_every.max(1)) {
                let (accepted, _) = self.judge(&state.params, valid)?;
                watch(DrafterProgress::Accepted { step, accepted });
            }
            if step.is_multiple_of(options.save_every.max(1)) || step == job.optimiser.steps {
                state.save(output, &network.layout)?;
            }
        }
        Ok((state, losses))
    }

    /// The newest checkpoint, or the values before the first step.
    fn state(&self, output: &Path) -> Result<State, Error> {
        let (run, network) = (self.run, self.network);
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

    /// The rows of answers. The last token of each is only a target.
    fn rows(&mut self, answers: &[&Answer]) -> Result<DraftRows, Error> {
        let mut rows = DraftRows::default();
        for answer in answers {
            let n = answer.tokens.len() - 1;
            rows.captured
                .extend(self.captures.rows(&answer.tokens[..n])?);
            rows.tokens.extend(&answer.tokens[..n]);
            let target = |i: usize| {
                let place = || self.places.get(&answer.tokens[i + 1]).copied();
                (i + 1 >= answer.prompt).then(place)
            };
            rows.targets.extend((0..n).map(target));
            rows.lengths.push(n);
        }
        rows.embedded = self.table.rows(&rows.tokens);
        Ok(rows)
    }

    /// Mean draft tokens that are right in a row after a position of these answers, and the number
    /// of positions.
    fn judge(&mut self, params: &[f32], answers: &[Answer]) -> Result<(f64, usize), Error> {
        let (mut right, mut judged) = (0, 0);
        for answer in answers {
            let rows = self.rows(&[answer])?;
            let accepted = self.network.accepted(params, &rows, JUDGED_DEPTH);
            right += accepted.iter().sum::<usize>();
            judged += accepted.len();
        }
        Ok((right as f64 / judged.max(1) as f64, judged))
    }
}
