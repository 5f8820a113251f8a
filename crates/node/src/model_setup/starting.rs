//! The start of a prepared model's workers, here or on other machines.

use std::sync::Arc;
use std::time::Instant;

use paceline_base::{Rank, lock};
use paceline_engine::{Draft, DraftNetwork, Engine, Runner, Service};
use paceline_model::{Split, load_draft_head};
use paceline_model_mlx::MlxPlaces;
use paceline_plan::prefill_offload::PrefillOffload;
use paceline_tensor::Kernels;
use paceline_text::tokenizer::Tokenizer;
use paceline_worker::adapters::read_all;
use paceline_worker::load::ShardSpec;
use paceline_worker::load_whole;
use tracing::warn;

use super::serving_model::{Computing, ServingModel};
use super::{DraftModel, PREDICTED_PROMPT, PreparedModel};
use crate::forecast::Forecast;
use crate::instance::prefill::{GroupEventSender, group_events};
use crate::instance::rebalancing::lighter;
use crate::workers::InstanceWorkers;
use crate::{Error, Instance, InstanceConfig, Observer, PlannedSplit};

impl PreparedModel {
    /// The possible splits: all if the split is steered, or variants with less for one rank if
    /// shares are rebalanced.
    pub(super) fn cuts(&self) -> Vec<PlannedSplit> {
        let forecast = self.forecast.as_ref().map(|forecast| lock(forecast));
        let mut cuts = Vec::new();
        if let (true, Some(forecast)) = (self.steers, &forecast) {
            let (nodes, shares) = (self.options.nodes, &self.options.shares);
            cuts.extend(forecast.ways(&self.config, nodes, shares));
            cuts.retain(|cut| self.options.check(&self.config, &cut.split).is_ok());
        }
        if cuts.is_empty() {
            let known = |all: &Forecast| all.predict(&self.config, &self.cut.split).ok();
            let first = PlannedSplit {
                tok_s: forecast.as_deref().and_then(known).or(self.cut.tok_s),
                ..self.cut.clone()
            };
            let shares = &self.options.shares;
            let lighter = self.follows.then(|| lighter(&self.config, &first, shares));
            cuts.push(first);
            cuts.extend(lighter.into_iter().flatten());
            if !self.follows && self.draft.is_none() && self.prompts.is_none() {
                cuts.extend(self.rivals.iter().cloned());
            }
        }
        for cut in &mut cuts {
            if let Some(streamed) = forecast
                .as_ref()
                .and_then(|it| it.streamed(&self.config, &cut.split))
            {
                cut.placement = streamed;
            }
            cut.placement.successors.clone_from(&self.successors);
        }
        cuts
    }

    /// Starts it on the workers of `workers`, one for each node; with `restart` a new epoch follows
    /// a failure. Returns at once: [`Instance::ready`] waits.
    ///
    /// # Errors
    /// [`Error::MixedStage`]; what the system refuses.
    pub fn over(
        &self,
        crew: Box<dyn InstanceWorkers>,
        restart: bool,
        observer: Observer,
    ) -> Result<Instance, Error> {
        self.begin(crew, restart, observer, None)
    }

    /// As [`over`](Self::over), with the workers of `prompts` as prefill nodes. These are restarted
    /// after any failure; meanwhile the decode nodes answer without them.
    ///
    /// # Errors
    /// As there.
    pub fn over_apart(
        &self,
        crew: Box<dyn InstanceWorkers>,
        prompts: Box<dyn InstanceWorkers>,
        restart: bool,
        observer: Observer,
    ) -> Result<Instance, Error> {
        let Some(of_prompts) = &self.prompts else {
            return self.over(crew, restart, observer);
        };
        let (here, there, heard) = group_events();
        // The decode instance reports their state.
        let quiet: Observer = Box::new(|_, _| {});
        let prompts = of_prompts.begin(prompts, true, quiet, Some(there))?;
        let instance = self.begin(crew, restart, observer, Some(here))?;
        // An instance that was started before answers even without them.
        let readers = (self.readers(of_prompts), !self.goes_on, self.engine.strict);
        instance.with_prompts(prompts, heard, readers)
    }

    /// The predicted prefill speeds of the decode and prefill ranks, until prompts are measured.
    /// They hold for nodes of one machine, which are measured.
    pub(super) fn readers(&self, of_prompts: &Self) -> PrefillOffload {
        let forecast = self.forecast.as_ref().map(|forecast| lock(forecast));
        let tok_s = |split: &Split| {
            let seconds = forecast.as_ref()?;
            let seconds = seconds.predict_prompt(&self.config, split, PREDICTED_PROMPT);
            Some(f64::from(PREDICTED_PROMPT) / seconds.ok()?)
        };
        // The forecast is of one class.
        let of_prompts = &of_prompts.cut.split;
        let there = tok_s(of_prompts).filter(|_| self.unlike.is_none());
        let predicted = PrefillOffload::predicted(tok_s(&self.cut.split), there);
        predicted.with_least(self.prompts_from)
    }

    pub(super) fn begin(
        &self,
        crew: Box<dyn InstanceWorkers>,
        restart: bool,
        observer: Observer,
        hears: Option<GroupEventSender>,
    ) -> Result<Instance, Error> {
        let cuts = self.cuts();
        let first = best(&cuts);
        self.options.check(&self.config, &cuts[first].split)?;
        let spec = InstanceConfig {
            identity: self.identity()?.to_owned(),
            config: self.config.clone(),
            classes: self.options.classes.each().to_vec(),
            threads: self.options.threads,
            kv: self.options.kv,
            memory: self.memory,
            backend: self.options.backend,
            engine: self.engine.clone(),
            cuts,
            first,
            forecast: self.forecast.clone(),
            observer: self.observer.clone(),
            restart,
            spares: self.spares,
            draft: self.draft.as_ref().map(|draft| draft.identity.clone()),
            captures: self.captures(),
            adapters: self.adapters.clone(),
            follows: self.follows,
            goes_on: self.goes_on,
            hears,
            unlike: self.unlike.clone(),
        };
        Instance::begin(spec, crew, observer)
    }

    /// Wraps an instance of this model, ready to answer.
    pub fn loaded(self, instance: Instance) -> ServingModel {
        self.serving(Computing::Crew(instance))
    }

    /// Wraps a service on another machine or process as this model; `device` is its device.
    pub fn elsewhere(self, service: Arc<dyn Service>, device: String) -> ServingModel {
        ServingModel {
            forecast: None,
            ..self.serving(Computing::Elsewhere { service, device })
        }
    }

    fn serving(self, computing: Computing) -> ServingModel {
        ServingModel {
            computing,
            forecast: self.forecast,
            options: self.options,
            engine: self.engine,
            config: self.config,
            split: self.cut.split,
        }
    }

    /// Loads it whole, into this process.
    ///
    /// # Errors
    /// The model cannot be loaded, or MLX is not available for its class.
    pub fn here(
        mut self,
        tokenizer: Arc<Tokenizer>,
        mlx: &MlxPlaces,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<ServingModel, Error> {
        let split = Split::whole(&self.config);
        let wanted = ShardSpec {
            source: &self.source,
            split: &split,
            rank: Rank(0),
            class: self.options.classes.first(),
            kv: self.options.kv,
            engine: &self.engine,
            mlx,
            adapters: &read_all(&self.adapters, &self.config)?,
            captures: &self.captures(),
            packed: self.packed.as_ref(),
            memory: self.memory,
        };
        let model = wanted.load(None, Arc::clone(&kernels), progress)?;
        let (device, weights) = (model.device(), model.weight_bytes());
        let mut engine = Engine::new(model, tokenizer, self.engine.clone())?;
        if let Some(draft) = self.draft.take() {
            let loaded = self.load_draft(&draft, mlx, kernels);
            match loaded {
                Err(error) if Arc::ptr_eq(&draft.source, &self.source) => {
                    warn!(%error, "the model's prediction layer is not used");
                }
                loaded => engine.set_draft_model(&loaded?)?,
            }
        }
        Ok(self.serving(Computing::Here {
            tracer: engine.tracer().clone(),
            guesses: engine.draft_counters().clone(),
            runner: Runner::start(engine, Instant::now),
            weights,
            device,
        }))
    }

    /// Loads a draft on the device of the first rank.
    fn load_draft(
        &self,
        draft: &DraftModel,
        mlx: &MlxPlaces,
        kernels: Arc<Kernels>,
    ) -> Result<Draft, Error> {
        let class = self.options.classes.first();
        let network = match &draft.tokenizer {
            Some(tokenizer) => DraftNetwork::Model {
                model: {
                    let (source, numbers) = (&draft.source, (class, None));
                    load_whole(source, numbers, &self.engine, mlx, kernels, |_, _| {})?
                },
                tokenizer: Arc::clone(tokenizer),
            },
            None => {
                let (head, source) = (&*draft.source, &*self.source);
                DraftNetwork::Head(load_draft_head(head, source, class, kernels)?)
            }
        };
        let now = Instant::now;
        Ok(Draft { network, now })
    }
}

/// Index of the split with the best prediction, the first among equals; the first if nothing is
/// predicted.
pub(super) fn best(cuts: &[PlannedSplit]) -> usize {
    let speed = |i: usize| cuts[i].tok_s.unwrap_or(0.0);
    (0..cuts.len()).fold(0, |best, i| if speed(i) > speed(best) { i } else { best })
}
