//! A training from start to end: checkpoints, metrics and the steps between.
//!
//! Workers and the run exchange values and roots as files in the run's folder, a folder for each
//! step. The roots of a layer are written while the layer before it is computed.
//!
//! `run.json` names the run's class. A worker whose class, version or device differs ends the run.

mod files;

use std::path::{Path, PathBuf};

use paceline_model::{LayerCache, LayerShape};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, State};
use crate::class::{Means, TrainingClass};
use crate::data::{ExampleReader, Examples, TrainOn};
use crate::dropout::Dropout;
use crate::error::Error;
use crate::events::EventFile;
use crate::metrics::{Measured, Metrics};
use crate::net::{Leaf, TrainableModel, Trained};
use crate::optimiser::{Optimiser, OptimiserOptions};
use crate::options::RunOptions;
use crate::order::ExampleOrder;
use crate::report::{Report, TrainingProgress};
use crate::shard::{ShardRole, Sharding};
use crate::stage::{LeafSet, ModelStage};
use crate::weights::Method;
use crate::workers::TrainingWorkers;
use crate::{forecast, fuse};

/// All that the bits of a result depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingJob {
    /// The model, and its trained part.
    pub trained: Trained,
    /// A file of examples, or a folder with `train.jsonl`.
    pub data: PathBuf,
    /// A file of examples that are held out, if there is one.
    pub valid: Option<PathBuf>,
    /// Tokens that the loss covers.
    pub train_on: TrainOn,
    /// Longest row.
    pub tokens_max: usize,
    /// Whether a row has as many examples as fit, which do not see each other.
    pub pack: bool,
    /// Rows of a step.
    pub batch: usize,
    /// Rows of a leaf.
    pub leaf: usize,
    /// Chooses first values, order and what is left out.
    pub seed: u64,
    /// Passes over the data, in place of a number of steps.
    pub epochs: Option<u64>,
    /// The rule of updates.
    pub optimiser: OptimiserOptions,
}

/// A job that was read: its model, its data and its order.
#[derive(Debug)]
pub struct TrainingRun {
    pub(crate) job: TrainingJob,
    pub(crate) net: TrainableModel,
    pub(crate) examples: Examples,
    valid: Option<Examples>,
    pub(crate) order: ExampleOrder,
    base: Option<String>,
}

/// Largest step that is accepted: a day's worth of a small model's tokens.
const BATCH_MAX: usize = 1 << 16;

impl TrainingJob {
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
        if self.epochs == Some(0) {
            return option("--epochs", "0".to_owned(), "1 or more");
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
        // On MLX nothing is copied before it computes, and judging needs the workers' arithmetic.
        if trained.method == Method::Lora && trained.class == TrainingClass::Cpu {
            trained.method = Method::Qlora;
        }
        trained
    }
}

impl TrainingRun {
    /// Reads a job. `computes`: whether leaves are computed in this process.
    ///
    /// # Errors
    /// Errors of its model, its data or its options.
    pub fn open(job: &TrainingJob, means: impl Into<Means>, computes: bool) -> Result<Self, Error> {
        let trained = if computes {
            job.trained.clone()
        } else {
            job.without_copies()
        };
        let run = Self::read(job, || TrainableModel::load(&trained, means))?;
        if computes {
            run.net.ready()?;
        }
        Ok(run)
    }

    /// Reads a job for a worker that has a stage of the model, or a part of its experts.
    pub(crate) fn open_stage(
        job: &TrainingJob,
        means: impl Into<Means>,
        (stage, shard): (ModelStage, Option<ShardRole>),
    ) -> Result<Self, Error> {
        let experts = shard.and_then(ShardRole::of_experts);
        Self::read(job, || {
            TrainableModel::load_part(&job.trained, means, (stage, experts))
        })
    }

    fn read(
        job: &TrainingJob,
        net: impl FnOnce() -> Result<TrainableModel, Error>,
    ) -> Result<Self, Error> {
        job.check()?;
        let rows = (job.tokens_max, job.pack);
        let reader = ExampleReader::new(&job.trained.model, job.train_on, rows)?;
        let examples = reader.read(&job.data, "train")?;
        let beside = job.data.join("valid.jsonl");
        let valid = match &job.valid {
            Some(path) => Some(path.as_path()),
            None => beside.is_file().then_some(beside.as_path()),
        };
        let valid = valid.map(|path| reader.read(path, "valid")).transpose()?;
        let net = net()?;
        // The bias of a router's choice has no gradient, and must stay.
        let corrected = net.config().experts().is_some_and(|of| of.corrected);
        if corrected && job.trained.method == Method::Full && job.optimiser.decay > 0.0 {
            return Err(Error::Option {
                option: "--weight-decay",
                got: job.optimiser.decay.to_string(),
                expected: "0 for routers with a bias of the choice".to_owned(),
            });
        }
        let vocab = net.config().vocab;
        for examples in [Some(&examples), valid.as_ref()].into_iter().flatten() {
            let largest = examples.largest_token();
            if largest as usize >= vocab {
                let reason = format!("the tokenizer gives token {largest} of a table of {vocab}");
                return Err(Error::malformed(&job.trained.model, reason));
            }
        }
        let order = ExampleOrder {
            seed: job.seed,
            examples: examples.count(),
            batch: job.batch,
            leaf: job.leaf,
        };
        let mut job = job.clone();
        if let Some(epochs) = job.epochs {
            let rows = epochs.saturating_mul(examples.count() as u64);
            job.optimiser.steps = rows.div_ceil(job.batch as u64);
        }
        Ok(Self {
            job,
            net,
            examples,
            valid,
            order,
            base: None,
        })
    }

    /// The same with a name of the base model, which its adapter's files have: a repository of the
    /// hub or a folder. Without one it is [`base_name`] of the model.
    pub fn with_base(mut self, base: Option<String>) -> Self {
        self.base = base;
        self
    }

    /// Examples of text with names of control tokens, also of what is held out.
    fn rendered(&self) -> usize {
        let held_out = self.valid.as_ref().map_or(0, |valid| valid.rendered);
        self.examples.rendered + held_out
    }

    /// The model.
    pub fn net(&self) -> &TrainableModel {
        &self.net
    }

    /// A leaf of a step, and what chance leaves out of it.
    pub(crate) fn leaf(&self, step: u64, leaf: usize) -> (Leaf, Option<Dropout>) {
        let rows = self.order.step(step);
        let chance = [self.job.seed, step, leaf as u64];
        (
            self.examples.leaf(&rows[self.order.places(leaf)]),
            Dropout::of(self.job.trained.dropout, chance),
        )
    }

    /// Leaves of a step, or rows that are held out.
    pub(crate) fn leaves_of(&self, set: LeafSet) -> usize {
        match set {
            LeafSet::Train => self.order.leaves(),
            LeafSet::Valid => self.held_out(),
        }
    }

    /// Tokens of a step that the loss covers.
    pub(crate) fn judged(&self, step: u64) -> u64 {
        self.examples.judged(&self.order.step(step))
    }

    /// Whether the rows of leaves, and with [`Sharding::Experts`] the experts, can be cut over
    /// workers.
    ///
    /// # Errors
    /// [`Error::Option`] with the reason against it.
    pub(crate) fn check_cut_rows(&self, sharding: Sharding) -> Result<(), Error> {
        let (class, config) = (self.job.trained.class, self.net.config());
        let is_net = |layer: &LayerShape| matches!(layer.cache, LayerCache::Delta(_));
        let expected = if class != TrainingClass::Cpu {
            "state or all: MLX computes whole rows"
        } else if config.layers.iter().any(is_net) {
            "state or all: states of delta nets go from token to token"
        } else if sharding == Sharding::Experts && config.experts().is_none() {
            "state, all or rows: the model has no experts"
        } else {
            return Ok(());
        };
        Err(Error::Option {
            option: "--shard",
            got: format!("{sharding:?}").to_lowercase(),
            expected: expected.to_owned(),
        })
    }

    pub(crate) fn held_out(&self) -> usize {
        self.valid.as_ref().map_or(0, Examples::count)
    }

    pub(crate) fn held_out_row(&self, row: usize) -> Leaf {
        let valid = self.valid.as_ref();
        valid.map_or_else(Leaf::default, |valid| valid.leaf(&[row]))
    }

    /// The loss of each row that is held out, computed here.
    pub(crate) fn losses(&self, params: &[f32]) -> Result<Vec<f64>, Error> {
        let rows = 0..self.held_out();
        rows.map(|row| self.net.loss(params, &self.held_out_row(row)))
            .collect()
    }

    /// Ranges of each of `of` stages in the trained vector. The last one has the table of tokens
    /// behind its own, where that is its head.
    pub(crate) fn stages(&self, of: usize) -> Result<Vec<Vec<std::ops::Range<usize>>>, Error> {
        let parts = self.net.parts();
        let ranges = |index: usize| {
            let stage = ModelStage { index, of };
            let layers = stage.layers(self.net.config())?;
            let first = if stage.is_first() {
                0
            } else {
                layers.start + 1
            };
            let own = parts.values[first].start..parts.values[layers.end].end;
            let mut ranges = Vec::from([own]);
            if stage.is_last() {
                ranges.push(parts.values[parts.norm()].clone());
                ranges.push(parts.values[parts.head()].clone());
            }
            Ok(ranges)
        };
        (0..of).map(ranges).collect()
    }

    /// Trains, and writes the result. `reporter` receives the progress.
    ///
    /// # Errors
    /// [`Error::RunThere`], [`Error::OtherRun`]; [`Error::Diverged`]; [`Error::Lost`] when no
    /// worker is left; [`Error::Stopped`] after a request to stop; [`Error::Files`].
    pub fn train(
        &self,
        crew: &mut TrainingWorkers,
        options: RunOptions<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Report, Error> {
        let output = options.output;
        std::fs::create_dir_all(output).map_err(Error::file("make", output))?;
        self.claim(output, options.resume)?;
        let mut state = self.state(output, crew)?;
        let mut metrics = Metrics::open(&output.join("metrics.jsonl"), state.step())?;
        let now = || options.figures.epoch_s + (options.clock)();
        let events = EventFile::start(&output.join("tensorboard"), state.step(), now())?;
        for line in self.net.notes() {
            watch(TrainingProgress::Note { line: line.clone() });
        }
        watch(self.begun(state.step()));
        let val_loss_before = match state.step() {
            0 => self.validation_loss(&state, crew, &options, watch)?,
            _ => None, // it is in the metrics
        };
        if let Some(loss) = val_loss_before {
            watch(TrainingProgress::HeldOut { loss });
        }
        let steps = self.job.optimiser.steps;
        let mut saved = state.step();
        while state.step() < steps {
            if (options.stop)() {
                if saved < state.step() {
                    self.save(&mut state, crew, output, watch)?;
                }
                let step = state.step() + 1;
                return Err(Error::Stopped { step });
            }
            let measured = self.step(&mut state, crew, &options, watch);
            if let (Err(Error::ShardLost { .. }), RunState::Sharded { step, from }) =
                (&measured, &mut state)
            {
                *step = from.as_ref().map_or(0, |from| from.step);
                saved = *step;
                metrics = Metrics::open(&output.join("metrics.jsonl"), saved)?;
                let line = format!("two ranks were lost at once: back to step {saved}");
                watch(TrainingProgress::Note { line });
                continue;
            }
            let mut measured = measured?;
            measured.val_loss_before = val_loss_before.filter(|_| measured.step == 1);
            metrics.add(&measured)?;
            events.add(&measured, now())?;
            watch(TrainingProgress::Step(measured));
            let step = state.step();
            if step.is_multiple_of(options.save_every.max(1)) && step < steps {
                self.save(&mut state, crew, output, watch)?;
                saved = step;
            }
        }
        self.save(&mut state, crew, output, watch)?;
        let (digest, files) = self.finish(output, state)?;
        Ok(Report {
            steps,
            loss: metrics.ends(),
            val_loss_before: metrics.first.as_ref().and_then(|m| m.val_loss_before),
            val_loss: metrics.last.as_ref().and_then(|m| m.val_loss),
            digest,
            lost: crew.lost(),
            rendered: self.rendered(),
            files,
        })
    }

    /// The newest state of the folder, or the first one.
    fn state(&self, output: &Path, crew: &mut TrainingWorkers) -> Result<RunState, Error> {
        let newest = Checkpoint::newest(output)?;
        if crew.sharded().is_some() {
            let step = newest.as_ref().map_or(0, |newest| newest.step);
            return Ok(RunState::Sharded { step, from: newest });
        }
        let layout = self.net.layout();
        let fresh = Optimiser::new(self.job.optimiser, layout.len());
        let state = match newest {
            Some(newest) => State::of(&newest, layout, fresh)?,
            None => State {
                step: 0,
                params: self.net.first_values(self.job.seed),
                optimiser: fresh,
            },
        };
        Ok(RunState::Here(state))
    }

    /// Writes a checkpoint.
    fn save(
        &self,
        state: &mut RunState,
        crew: &mut TrainingWorkers,
        output: &Path,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(), Error> {
        match (state, crew.sharded()) {
            (RunState::Here(state), _) => state.save(output, self.net.layout()),
            (RunState::Sharded { step, from }, Some(mut ranks)) => {
                ranks.save(self, (*step, from.as_ref()), output, watch)?;
                *from = Checkpoint::newest(output)?;
                Ok(())
            }
            (RunState::Sharded { .. }, None) => Ok(()),
        }
    }

    /// Writes the result of a run whose last state is saved. Gives the state's digest, and files.
    fn finish(&self, output: &Path, state: RunState) -> Result<(String, Vec<PathBuf>), Error> {
        let saved = match state {
            RunState::Here(state) => {
                return Ok((state.digest(), self.write(output, &state.params)?));
            }
            RunState::Sharded { .. } => Checkpoint::newest(output)?,
        };
        let Some(saved) = saved else {
            return Err(Error::malformed(
                output,
                "has no checkpoint of the last step",
            ));
        };
        let digest = saved.digest()?;
        let trained = &self.job.trained;
        if trained.method == Method::Full {
            return Ok((
                digest,
                fuse::copy_model(&trained.model, output, &saved.params())?,
            ));
        }
        let layout = self.net.layout();
        let fresh = Optimiser::new(self.job.optimiser, layout.len());
        let state = State::of(&saved, layout, fresh)?;
        Ok((digest, self.write(output, &state.params)?))
    }

    /// The event that everything is read, before a step.
    fn begun(&self, step: u64) -> TrainingProgress {
        TrainingProgress::Begun {
            step,
            steps: self.job.optimiser.steps,
            examples: self.examples.examples(),
            rows: self.examples.count(),
            cut: self.examples.cut,
            rendered: self.rendered(),
            numbers: self.net.layout().len(),
        }
    }

    fn step(
        &self,
        state: &mut RunState,
        crew: &mut TrainingWorkers,
        options: &RunOptions<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Measured, Error> {
        let start = (options.clock)();
        let step = state.step();
        let judged = self.judged(step);
        let tokens = self.examples.computed(&self.order.step(step));
        let lr = Optimiser::new(self.job.optimiser, 0).rate(step);
        let mut most = None;
        let (loss, grad_norm) = match state {
            RunState::Here(state) => self.step_here(state, crew, options, watch)?,
            RunState::Sharded { step, from } => {
                let ranks = crew.sharded();
                let mut ranks = ranks.expect("a sharded state has ranks");
                let done = ranks.step(self, (*step, from.as_ref()), watch)?;
                let loss = mean(done.losses.iter().sum(), judged, *step)?;
                *step += 1;
                most = Some(done.most);
                (loss, done.norm)
            }
        };
        let (step_s, figures) = ((options.clock)() - start, options.figures);
        let step = state.step();
        let looks =
            step.is_multiple_of(options.eval_every.max(1)) || step == self.job.optimiser.steps;
        let val_loss = match looks {
            false => None,
            true => self.validation_loss(state, crew, options, watch)?,
        };
        let flop = forecast::step_flop(&self.net, self.job.trained.method, tokens);
        Ok(Measured {
            step,
            loss,
            lr,
            grad_norm,
            judged,
            tokens,
            val_loss_before: None,
            val_loss,
            val_ppl: val_loss.map(libm::exp),
            step_s,
            tok_s: tokens as f64 / step_s.max(1e-9),
            flop_share: forecast::flop_share(flop, figures.flops, step_s),
            memory_bytes: (figures.memory)().max(most.and_then(|most| most.memory_bytes)),
            sent_bytes: most.map(|most| most.sent_bytes),
            busy_share: crew.busy_s().map(|busy| busy / step_s.max(1e-9)),
            nodes: crew.nodes(),
        })
    }

    /// A step whose update is this process's: the mean loss, and the norm of the gradient.
    fn step_here(
        &self,
        state: &mut State,
        crew: &mut TrainingWorkers,
        options: &RunOptions<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(f64, f64), Error> {
        let step = state.step;
        let (loss, mut grads) = crew.step(self, &state.params, step, options.clock, watch)?;
        let loss = mean(loss, self.judged(step), step)?;
        let (layout, params) = (self.net.layout(), &mut state.params);
        let grad_norm = state.optimiser.apply(step, layout, &mut grads, params);
        state.step += 1;
        Ok((loss, grad_norm))
    }

    /// Negative log likelihood of a held-out token, if any is held out.
    fn validation_loss(
        &self,
        state: &RunState,
        crew: &mut TrainingWorkers,
        options: &RunOptions<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Option<f64>, Error> {
        let Some(valid) = &self.valid else {
            return Ok(None);
        };
        let losses = match (state, crew.sharded()) {
            (RunState::Sharded { step, from }, Some(mut ranks)) => {
                ranks.judge(self, (*step, from.as_ref()), watch)?
            }
            (RunState::Here(state), _) => {
                crew.judge(self, &state.params, state.step, options.clock, watch)?
            }
            (RunState::Sharded { .. }, None) => return Ok(None),
        };
        let all: Vec<usize> = (0..losses.len()).collect();
        Ok(Some(losses.iter().sum::<f64>() / valid.judged(&all) as f64))
    }
}

/// The mean loss of `judged` targets.
fn mean(loss: f64, judged: u64, step: u64) -> Result<f64, Error> {
    let loss = loss / judged as f64;
    match loss.is_finite() {
        true => Ok(loss),
        false => Err(Error::Diverged {
            step: step + 1,
            loss,
        }),
    }
}

/// The state of a run between steps.
enum RunState {
    Here(State),
    /// Ranks have it, or get it from the newest checkpoint or the first values.
    Sharded {
        step: u64,
        from: Option<Checkpoint>,
    },
}

impl RunState {
    /// Steps that are done.
    const fn step(&self) -> u64 {
        match self {
            Self::Here(state) => state.step,
            Self::Sharded { step, .. } => *step,
        }
    }
}
