//! A training from start to end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use paceline_tensor::Kernels;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::adapter::{Adapter, Form};
use crate::checkpoint::{State, named};
use crate::crew::Crew;
use crate::data::{Examples, Reader, TrainOn};
use crate::error::Error;
use crate::net::{Net, Trained};
use crate::optimiser::{Optimiser, OptimiserOptions};
use crate::order::Order;
use crate::weights::Method;
use crate::{fuse, tensors};

/// All that the bits of a result depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// What is trained.
    pub trained: Trained,
    /// A file of examples, or a folder with `train.jsonl`.
    pub data: PathBuf,
    /// A file of examples that are held out, if there is one.
    pub valid: Option<PathBuf>,
    /// Which tokens are judged.
    pub train_on: TrainOn,
    /// Longest example.
    pub tokens_max: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Sequences of a leaf.
    pub leaf: usize,
    /// Chooses first values and order.
    pub seed: u64,
    /// The rule of updates.
    pub optimiser: OptimiserOptions,
}

/// How a run is done, which no bit of its result depends on.
#[derive(Clone, Copy)]
#[allow(
    missing_debug_implementations,
    reason = "functions have nothing to show"
)]
pub struct RunOptions<'a> {
    /// Folder of everything that it writes.
    pub output: &'a Path,
    /// Goes on with what is there.
    pub resume: bool,
    /// Steps between checkpoints.
    pub save_every: u64,
    /// Steps between looks at what is held out.
    pub eval_every: u64,
    /// Seconds since some moment.
    pub clock: &'a dyn Fn() -> f64,
    /// Whether to end after the step under way.
    pub stop: &'a dyn Fn() -> bool,
}

/// What happens in a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// Everything is read, and the next step is this, from 0.
    Begun {
        /// Steps that were done before.
        step: u64,
        /// Examples.
        examples: usize,
        /// Examples that were cut to the longest length.
        cut: usize,
        /// Numbers that are trained.
        numbers: usize,
    },
    /// A step is done.
    Step(Measured),
    /// A worker was lost, and its leaves are computed by others.
    Lost {
        /// What became of it.
        why: String,
    },
}

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// From 1.
    pub step: u64,
    /// Negative log likelihood of a judged token, before the step's update.
    pub loss: f64,
    /// Learning rate.
    pub lr: f64,
    /// Of the gradient, before it was shortened.
    pub grad_norm: f64,
    /// Tokens that were judged.
    pub judged: u64,
    /// Tokens that went through the model.
    pub tokens: u64,
    /// Negative log likelihood of a held-out token after the update.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// Seconds of the step.
    pub step_s: f64,
    /// Tokens a second.
    pub tok_s: f64,
    /// Workers that computed.
    pub nodes: u32,
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Steps that are done.
    pub steps: u64,
    /// Loss of the first step of all and of the last.
    pub loss: [f64; 2],
    /// Held-out loss at the end.
    pub val_loss: Option<f64>,
    /// SHA-256 of values and moments.
    pub digest: String,
    /// Workers that were lost.
    pub lost: u32,
    /// Files of the result.
    pub files: Vec<PathBuf>,
}

/// A job that was read: its model, its data and its order.
#[derive(Debug)]
pub struct Run {
    pub(crate) job: Job,
    pub(crate) net: Net,
    pub(crate) examples: Examples,
    valid: Option<Examples>,
    pub(crate) order: Order,
}

/// Largest step that is accepted: a day's worth of a small model's tokens.
const BATCH_MAX: usize = 1 << 16;

impl Job {
    fn check(&self) -> Result<(), Error> {
        let option = |option, got: String, expected: &str| {
            let expected = expected.to_owned();
            Err(Error::Option {
                option,
                got,
                expected,
            })
        };
        if !(1..=BATCH_MAX).contains(&self.batch) {
            return option("--batch", self.batch.to_string(), "1 to 65536");
        }
        if !(1..=self.batch).contains(&self.leaf) {
            return option("--leaf", self.leaf.to_string(), "1 to the batch");
        }
        if self.tokens_max < 2 {
            return option(
                "--max-tokens-per-row",
                self.tokens_max.to_string(),
                "2 or more",
            );
        }
        if self.trained.method == Method::Full && !self.trained.model.is_dir() {
            let expected = "lora or qlora: only folders of safetensors are trained whole";
            return option("--method", "full".to_owned(), expected);
        }
        let o = &self.optimiser;
        if o.steps == 0 {
            return option("--steps", o.steps.to_string(), "1 or more");
        }
        let numbers = [
            ("--lr", o.lr),
            ("--clip", o.clip),
            ("--weight-decay", o.decay),
        ];
        for (name, value) in numbers {
            if !(value.is_finite() && value >= 0.0) {
                return option(name, value.to_string(), "0 or more");
            }
        }
        Ok(())
    }

    /// The same for a process that computes no leaves: its matrices stay in the file.
    pub(crate) fn without_copies(&self) -> Trained {
        let mut trained = self.trained.clone();
        if trained.method == Method::Lora {
            trained.method = Method::Qlora;
        }
        trained
    }
}

impl Run {
    /// Reads a job. `computes`: whether leaves are computed in this process.
    ///
    /// # Errors
    /// What is wrong with its model, its data or its options.
    pub fn open(job: &Job, kernels: Kernels, computes: bool) -> Result<Self, Error> {
        job.check()?;
        let reader = Reader::new(&job.trained.model, job.train_on, job.tokens_max)?;
        let examples = reader.read(&job.data, "train")?;
        let beside = job.data.join("valid.jsonl");
        let valid = match &job.valid {
            Some(path) => Some(path.as_path()),
            None => beside.is_file().then_some(beside.as_path()),
        };
        let valid = valid.map(|path| reader.read(path, "valid")).transpose()?;
        let trained = if computes {
            job.trained.clone()
        } else {
            job.without_copies()
        };
        let net = Net::load(&trained, kernels)?;
        let vocab = net.config().vocab;
        for examples in [Some(&examples), valid.as_ref()].into_iter().flatten() {
            let largest = examples.largest_token();
            if largest as usize >= vocab {
                let reason = format!("the tokenizer gives token {largest} of a table of {vocab}");
                return Err(Error::malformed(&job.trained.model, reason));
            }
        }
        let order = Order {
            seed: job.seed,
            examples: examples.count(),
            batch: job.batch,
            leaf: job.leaf,
        };
        Ok(Self {
            job: job.clone(),
            net,
            examples,
            valid,
            order,
        })
    }

    /// The model.
    pub fn net(&self) -> &Net {
        &self.net
    }

    /// Gradient and loss of leaf `leaf` of a step.
    pub(crate) fn leaf(&self, params: &[f32], step: u64, leaf: usize) -> (f64, Vec<f32>) {
        let examples = self.order.step(step);
        let judged = self.examples.judged(&examples);
        let leaf = self.examples.leaf(&examples[self.order.places(leaf)]);
        self.net.gradient(params, &leaf, judged)
    }

    /// Trains, and writes the result. `watch` hears how it goes.
    ///
    /// # Errors
    /// [`Error::RunThere`], [`Error::OtherRun`]; [`Error::Diverged`]; [`Error::Lost`] when no
    /// worker is left; [`Error::Stopped`] when it was asked to; [`Error::File`].
    pub fn train(
        &self,
        crew: &mut Crew,
        options: RunOptions<'_>,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<Report, Error> {
        let output = options.output;
        std::fs::create_dir_all(output).map_err(Error::file("make", output))?;
        self.claim(output, options.resume)?;
        let layout = self.net.layout();
        let fresh = Optimiser::new(self.job.optimiser, layout.len());
        let newest = State::newest(output, layout, fresh.clone())?;
        let mut state = newest.unwrap_or_else(|| State {
            step: 0,
            params: self.net.first_values(self.job.seed),
            optimiser: fresh,
        });
        let mut metrics = Metrics::open(&output.join("metrics.jsonl"), state.step)?;
        watch(Progress::Begun {
            step: state.step,
            examples: self.examples.count(),
            cut: self.examples.cut,
            numbers: layout.len(),
        });
        let steps = self.job.optimiser.steps;
        let mut saved = state.step;
        while state.step < steps {
            if (options.stop)() {
                if saved < state.step {
                    state.save(output, layout)?;
                }
                let step = state.step + 1;
                return Err(Error::Stopped { step });
            }
            let measured = self.step(&mut state, crew, &options, watch)?;
            metrics.add(&measured)?;
            watch(Progress::Step(measured));
            if state.step.is_multiple_of(options.save_every.max(1)) && state.step < steps {
                state.save(output, layout)?;
                saved = state.step;
            }
        }
        state.save(output, layout)?;
        let files = self.write(output, &state.params)?;
        Ok(Report {
            steps,
            loss: metrics.ends(),
            val_loss: metrics.last.as_ref().and_then(|m| m.val_loss),
            digest: state.digest(),
            lost: crew.lost(),
            files,
        })
    }

    fn step(
        &self,
        state: &mut State,
        crew: &mut Crew,
        options: &RunOptions<'_>,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<Measured, Error> {
        let start = (options.clock)();
        let step = state.step;
        let which = self.order.step(step);
        let judged = self.examples.judged(&which);
        let tokens = self.examples.leaf(&which).tokens.len() as u64;
        let (loss, mut grads) = crew.step(self, &state.params, step, options.clock, watch)?;
        let loss = loss / judged as f64;
        if !loss.is_finite() {
            let step = step + 1;
            return Err(Error::Diverged { step, loss });
        }
        let lr = state.optimiser.rate(step);
        let layout = self.net.layout();
        let grad_norm = state
            .optimiser
            .apply(step, layout, &mut grads, &mut state.params);
        state.step += 1;
        let step_s = (options.clock)() - start;
        let looks = state.step.is_multiple_of(options.eval_every.max(1))
            || state.step == self.job.optimiser.steps;
        let valid = self.valid.as_ref().filter(|_| looks);
        Ok(Measured {
            step: state.step,
            loss,
            lr,
            grad_norm,
            judged,
            tokens,
            val_loss: valid.map(|valid| self.held_out(valid, &state.params)),
            step_s,
            tok_s: tokens as f64 / step_s.max(1e-9),
            nodes: crew.nodes(),
        })
    }

    /// Mean negative log likelihood of the judged tokens, example by example.
    fn held_out(&self, valid: &Examples, params: &[f32]) -> f64 {
        let all: Vec<usize> = (0..valid.count()).collect();
        let losses = all
            .iter()
            .map(|i| self.net.loss(params, &valid.leaf(&[*i])));
        losses.sum::<f64>() / valid.judged(&all) as f64
    }

    /// Says in the folder what its run is, or checks that it says the same.
    fn claim(&self, output: &Path, resume: bool) -> Result<(), Error> {
        let path = output.join("run.json");
        let mut here = serde_json::to_value(&self.job).unwrap_or_default();
        here["data_sha256"] = json!(self.examples.digest);
        here["leaves"] = json!(self.order.leaves());
        match std::fs::read(&path) {
            Ok(_) if !resume => Err(Error::RunThere {
                path: output.to_owned(),
            }),
            Ok(there) => {
                let there: Value =
                    serde_json::from_slice(&there).map_err(|e| Error::malformed(&path, e))?;
                // Through text, as what is there: reading a number may round it.
                let here = serde_json::from_str(&here.to_string()).unwrap_or_default();
                let (there, here) = (flat(&there), flat(&here));
                let differs = here
                    .iter()
                    .find(|(field, value)| there.get(*field) != Some(value));
                match differs {
                    None => Ok(()),
                    Some((field, value)) => Err(Error::OtherRun {
                        path: output.to_owned(),
                        there: there
                            .get(field)
                            .map_or("nothing".to_owned(), Value::to_string),
                        field: field.clone(),
                        here: value.to_string(),
                    }),
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let text = serde_json::to_string_pretty(&here).unwrap_or_default();
                tensors::replace(&path, |file| file.write_all(text.as_bytes()))
            }
            Err(error) => Err(Error::file("read", &path)(error)),
        }
    }

    /// Writes the adapter, or the model.
    fn write(&self, output: &Path, params: &[f32]) -> Result<Vec<PathBuf>, Error> {
        let trained = &self.job.trained;
        let found = named(self.net.layout(), params);
        if trained.method == Method::Full {
            return fuse::write_model(&trained.model, output, &found);
        }
        let owned = found
            .into_iter()
            .map(|(name, shape, v)| (name, shape.to_vec(), v.to_vec()));
        let base = trained.model.display().to_string();
        let lora = trained.lora;
        let adapter = Adapter::new(lora.rank, f64::from(lora.alpha), base, owned.collect());
        adapter.write(output, Form::Peft)?;
        let files = ["adapter_model.safetensors", "adapter_config.json"];
        Ok(files.map(|name| output.join(name)).to_vec())
    }
}

/// A JSON value's leaves by their paths.
fn flat(value: &Value) -> BTreeMap<String, Value> {
    let mut out = BTreeMap::new();
    let mut waiting = vec![(String::new(), value)];
    while let Some((path, value)) = waiting.pop() {
        match value.as_object() {
            Some(object) => waiting.extend(object.iter().map(|(key, value)| {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                (path, value)
            })),
            None => drop(out.insert(path, value.clone())),
        }
    }
    out
}

/// The file of measured steps.
struct Metrics {
    path: PathBuf,
    first: Option<Measured>,
    last: Option<Measured>,
}

impl Metrics {
    /// Keeps the lines of the first `step` steps, as they are: what came after was not saved.
    fn open(path: &Path, step: u64) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let read = |line: &str| serde_json::from_str::<Measured>(line).ok();
        let kept = text.lines().map_while(|line| Some((line, read(line)?)));
        let kept: Vec<_> = kept.filter(|(_, measured)| measured.step <= step).collect();
        tensors::replace(path, |file| {
            kept.iter()
                .try_for_each(|(line, _)| writeln!(file, "{line}"))
        })?;
        Ok(Self {
            path: path.to_owned(),
            first: kept.first().map(|(_, measured)| measured.clone()),
            last: kept.last().map(|(_, measured)| measured.clone()),
        })
    }

    fn add(&mut self, measured: &Measured) -> Result<(), Error> {
        use std::io::Write;
        let file = std::fs::OpenOptions::new().append(true).open(&self.path);
        let written = file.and_then(|mut file| file.write_all(line(measured).as_bytes()));
        written.map_err(Error::file("write", &self.path))?;
        self.first.get_or_insert_with(|| measured.clone());
        self.last = Some(measured.clone());
        Ok(())
    }

    fn ends(&self) -> [f64; 2] {
        [&self.first, &self.last].map(|end| end.as_ref().map_or(f64::NAN, |m| m.loss))
    }
}

fn line(measured: &Measured) -> String {
    let mut line = serde_json::to_string(measured).unwrap_or_default();
    line.push('\n');
    line
}

/// The lines of `metrics.jsonl`; one that was cut off by a kill is left out, as are those behind.
///
/// # Errors
/// [`Error::File`], unless there is none.
pub fn read_metrics(path: &Path) -> Result<Vec<Measured>, Error> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text
            .lines()
            .map_while(|line| serde_json::from_str(line).ok())
            .collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::file("read", path)(error)),
    }
}
