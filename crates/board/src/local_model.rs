//! Loads a model for a local program: from files to a service.
//!
//! [`SplitModel`] has read the files and chosen a split; errors of the model are known, and no
//! weights are loaded. It becomes a [`ReadyModel`] in this process ([`SplitModel::load_here`]),
//! over workers ([`SplitModel::start`]), or on other nodes ([`SplitModel::with_service`]).

use std::convert::Infallible;
use std::ffi::OsString;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_engine::{EngineConfig, Service};
use paceline_mlx::{Library, LibraryPaths};
use paceline_model::{Config, ModelSource};
use paceline_node::worker_notices::split_lines;
use paceline_node::workers::{LocalInstanceWorkers, LocalSpec};
use paceline_node::{
    Error, Instance, Observer, Options, PrefillOptions, PreparedModel, ServingModel,
};
use paceline_tensor::{Kernels, KvType, Pinning};
use paceline_text::chat::{ChatTemplate, Error as ChatError};
use paceline_text::tokenizer::Tokenizer;
use paceline_worker::interpreter::ChildProgram;
use paceline_worker::load::PackedPlace;
use paceline_worker::texts;

use crate::MessageSink;
use crate::api_model::fingerprint;

/// Options of loading a model.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Options of the instance.
    pub options: Options,
    /// Whether threads are pinned to cores.
    pub pin: bool,
    /// Prefill workers, if there are some.
    pub prompts: PrefillOptions,
    /// Start of opening the model, for the load time.
    pub since: Instant,
}

/// Program, environment and output of local workers.
#[derive(Clone, derive_more::Debug)]
#[debug("workers of {}", self.program.display())]
pub struct WorkerLaunch {
    pub program: PathBuf,
    /// The program's arguments.
    pub args: Vec<OsString>,
    /// Complete environment.
    pub env: Vec<(OsString, OsString)>,
    /// Folders below which workers may write.
    pub writable: Vec<PathBuf>,
    /// Receives the workers' output lines, with their ranks.
    pub tell: MessageSink,
}

/// A model with files read and split chosen, not loaded yet: a [`PreparedModel`] with its texts.
#[derive(Debug)]
pub struct SplitModel {
    path: PathBuf,
    pin: bool,
    since: Instant,
    prepared: PreparedModel,
    /// Path of the draft model.
    draft: Option<PathBuf>,
    pub tokenizer: Arc<Tokenizer>,
    /// `None` if the model has none. An error matters only to callers that need the template.
    pub template: Option<Result<ChatTemplate, ChatError>>,
}

impl SplitModel {
    /// Opens the model at the absolute `path` and splits it. `sizes` computes the engine's sizes
    /// from the shape. `templates` runs its chat template.
    ///
    /// # Errors
    /// An unusable model, or an impossible split.
    pub fn new(
        (source, path): (Arc<ModelSource>, PathBuf),
        asked: LocalOptions,
        templates: &ChildProgram,
        sizes: impl FnOnce(&Config) -> EngineConfig,
    ) -> Result<Self, Error> {
        let mut prepared = PreparedModel::new(Arc::clone(&source), asked.options, sizes)?;
        if asked.prompts.nodes > 0 {
            prepared.read_prompts_on(asked.prompts)?;
        }
        Ok(Self {
            tokenizer: Arc::new(texts::tokenizer(&source)?),
            template: texts::template(&source, templates),
            path,
            pin: asked.pin,
            since: asked.since,
            prepared,
            draft: None,
        })
    }

    /// Uses the small model at `path` as draft model. Call before [`forecast`](Self::forecast).
    ///
    /// # Errors
    /// An unusable draft model, such as one with another vocabulary.
    pub fn set_draft(&mut self, source: Arc<ModelSource>, path: PathBuf) -> Result<(), Error> {
        self.prepared.guess_with(source)?;
        self.draft = Some(path);
        Ok(())
    }

    /// Uses the prediction layer of the model's own files, if they have one and there is no other
    /// draft, on the CPU. Call before [`forecast`](Self::forecast).
    ///
    /// # Errors
    /// An unusable layer.
    pub fn set_own_draft(&mut self) -> Result<(), Error> {
        if self.prepared.guess_with_own_layer()? {
            self.draft = Some(self.path.clone());
        }
        Ok(())
    }

    /// Keeps packed weights on disk below `folder` when [loaded here](Self::load_here).
    ///
    /// # Errors
    /// As [`PreparedModel::keep_packed`].
    pub fn keep_packed(&mut self, folder: PathBuf) -> Result<(), Error> {
        let model = self.path.clone();
        self.prepared.keep_packed(PackedPlace { folder, model })
    }

    /// Whether packed weights are kept on disk.
    pub const fn keeps_packed(&self) -> bool {
        self.prepared.keeps_packed()
    }

    /// Path of the model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Kernel classes, version and model identity. With request and seed they determine an answer's
    /// bits.
    pub fn fingerprint(&self) -> String {
        let (classes, kv) = (self.options().classes.to_string(), self.options().kv);
        fingerprint((&classes, kv.map(KvType::name)), self.identity())
    }

    /// Whether it needs no workers: one node and no prefill workers.
    pub fn is_alone(&self) -> bool {
        self.nodes() == 1 && self.prompts().is_none()
    }

    /// Threads and pinning of the kernels for [`load_here`](Self::load_here). With MLX they
    /// only sample tokens.
    pub fn own_threads(&self) -> (usize, Pinning) {
        let pinning = match self.pin {
            true => Pinning::Cores { first: 0 },
            false => Pinning::Free,
        };
        match self.options().classes.first().is_mlx() {
            true => (1, pinning),
            false => (self.options().threads, pinning),
        }
    }

    /// Loads it into this process; `progress` receives (loaded, total) layers.
    ///
    /// # Errors
    /// An unusable model, or missing MLX.
    pub fn load_here(
        self,
        mlx: &LibraryPaths,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<ReadyModel, Error> {
        let tokenizer = Arc::clone(&self.tokenizer);
        self.into_ready(|prepared| prepared.here(tokenizer, mlx, kernels, progress))
    }

    /// Serves by an instance from [`start`](Self::start).
    pub fn loaded(self, instance: Instance) -> ReadyModel {
        let Ok(ready) = self.into_ready(|prepared| Ok::<_, Infallible>(prepared.loaded(instance)));
        ready
    }

    /// Serves by a service of this machine's node; `on` names the nodes.
    pub fn with_service(self, service: Arc<dyn Service>, on: String) -> ReadyModel {
        let elsewhere =
            |prepared: PreparedModel| Ok::<_, Infallible>(prepared.elsewhere(service, on));
        let Ok(ready) = self.into_ready(elsewhere);
        ready
    }

    fn into_ready<E>(
        self,
        load: impl FnOnce(PreparedModel) -> Result<ServingModel, E>,
    ) -> Result<ReadyModel, E> {
        Ok(ReadyModel {
            model: load(self.prepared)?,
            tokenizer: self.tokenizer,
            template: self.template,
            load_time: self.since.elapsed(),
        })
    }

    /// Checks that MLX opens from `places`, if needed: workers' errors arrive only as text.
    ///
    /// # Errors
    /// Why not.
    pub fn check_mlx(&self, places: &LibraryPaths) -> Result<(), Error> {
        match Library::open(places) {
            Err(error) => Err(paceline_model::Error::from(error).into()),
            Ok(_) => Ok(()),
        }
    }

    /// Starts the workers; `restart` restarts them after failures. `observer` receives their
    /// notices. Does not wait until they are ready.
    ///
    /// # Errors
    /// The system refuses a process or thread.
    pub fn start(
        &self,
        workers: &WorkerLaunch,
        restart: bool,
        observer: Observer,
    ) -> Result<Instance, Error> {
        let options = self.options();
        // Computed before the workers start, as they would wait for it.
        self.identity()?;
        let pin = self.pin.then_some(options.threads);
        let own = self.crew(workers, options.nodes, pin, "")?;
        match self.prompts() {
            None => self.over(own, restart, observer),
            Some(prompts) => {
                // Not pinned: the decode workers occupy the first cores.
                let prompts = self.crew(workers, prompts.options().nodes, None, "prompts ")?;
                self.over_apart(own, prompts, restart, observer)
            }
        }
    }

    /// `of` prefixes the ranks in output lines.
    fn crew(
        &self,
        workers: &WorkerLaunch,
        ranks: u32,
        pin: Option<usize>,
        of: &'static str,
    ) -> Result<Box<LocalInstanceWorkers>, Error> {
        let (workers, tell) = (workers.clone(), Arc::clone(&workers.tell));
        let crew = LocalInstanceWorkers::spawn(LocalSpec {
            program: workers.program,
            args: workers.args,
            env: workers.env,
            writable: workers.writable,
            model: self.path.clone(),
            draft: self.draft.clone(),
            adapters: Vec::new(),
            ranks,
            pin,
            on_line: Some(Box::new(move |rank, line| {
                tell(&format!("[{of}{rank}] {line}"));
            })),
        });
        crew.map(Box::new)
    }
}

impl Deref for SplitModel {
    type Target = PreparedModel;

    fn deref(&self) -> &PreparedModel {
        &self.prepared
    }
}

impl DerefMut for SplitModel {
    fn deref_mut(&mut self) -> &mut PreparedModel {
        &mut self.prepared
    }
}

/// A loaded model, with the facts that programs report.
#[derive(Debug)]
pub struct ReadyModel {
    model: ServingModel,
    pub tokenizer: Arc<Tokenizer>,
    /// As of [`SplitModel`].
    pub template: Option<Result<ChatTemplate, ChatError>>,
    /// Time from opening the files until ready for a prompt.
    pub load_time: Duration,
}

impl Deref for ReadyModel {
    type Target = ServingModel;

    fn deref(&self) -> &Self::Target {
        &self.model
    }
}

impl ReadyModel {
    /// Each node's share: a heading, and a line each.
    pub fn split_lines(&self) -> Vec<String> {
        let (threads, weights) = (self.options().threads, self.weights());
        split_lines(self.config(), self.split(), threads, &weights)
    }
}
