//! A model from its files to something that answers, as programs of one machine start it.
//!
//! [`Opened`] is read and cut: what can be wrong with the model is known, and nothing is loaded.
//! It becomes a [`Loaded`] in this process ([`Opened::here`]), over workers ([`Opened::start`]) or
//! by what answers elsewhere ([`Opened::elsewhere`]).

use std::convert::Infallible;
use std::ffi::OsString;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_engine::{AdaptedService, EngineConfig, Service};
use paceline_formats::chat::{ChatTemplate, Error as ChatError};
use paceline_formats::tokenizer::Tokenizer;
use paceline_mlx::{Library, Places};
use paceline_model::{Config, Source};
use paceline_node::classes::Classes;
use paceline_node::crew::{LocalCrew, LocalSpec};
use paceline_node::interpreter::Program;
use paceline_node::{AdapterOf, Error, Instance, Observer, Options, Prepared, texts};
use paceline_serve::{About, Model};
use paceline_tensor::{Kernels, KvType, Pinning};

use crate::Tell;
use crate::holds::split_lines;
use crate::served::{changed_unix_s, fingerprint, sampling, size};

/// What is asked of a model.
#[derive(Clone, Debug)]
pub struct Asked {
    /// How it is computed, with the class of each node.
    pub options: Options,
    /// The same classes.
    pub classes: Classes,
    /// Whether each thread stays on a core of its own.
    pub pin: bool,
    /// How many more nodes there are that only read prompts, perhaps none. Then the number of new
    /// tokens from which on they read a prompt; `None` where their speed decides that.
    pub prompts: (u32, Option<u32>),
    /// When opening the model began.
    pub since: Instant,
}

/// How workers of this machine are started.
#[derive(Clone)]
pub struct Workers {
    pub program: PathBuf,
    /// Its arguments as a worker.
    pub args: Vec<OsString>,
    /// All of its environment.
    pub env: Vec<(OsString, OsString)>,
    /// Folders below which workers may write.
    pub writable: Vec<PathBuf>,
    /// Takes the lines that workers say, with their ranks.
    pub tell: Tell,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "workers of {}", self.program.display())
    }
}

/// A model that was opened and cut, and is not loaded yet: what can be wrong with it is known.
#[derive(Debug)]
pub struct Opened {
    path: PathBuf,
    asked: Asked,
    prepared: Prepared,
    /// The model that guesses for it.
    draft: Option<PathBuf>,
    pub tokenizer: Arc<Tokenizer>,
    /// Nothing when the model has none. What is wrong with one matters only to those who use it.
    pub template: Option<Result<ChatTemplate, ChatError>>,
}

impl Opened {
    /// Reads the shape of the model at `path`, which is absolute, and cuts it; `sizes` says what
    /// for, by that shape. `templates` runs its chat template.
    ///
    /// # Errors
    /// What is wrong with the model; why it cannot be cut like that.
    pub fn new(
        (source, path): (Arc<Source>, PathBuf),
        asked: Asked,
        templates: &Program,
        sizes: impl FnOnce(&Config) -> EngineConfig,
    ) -> Result<Self, Error> {
        let mut prepared = Prepared::new(Arc::clone(&source), asked.options.clone(), sizes)?;
        let (nodes, from) = asked.prompts;
        if nodes > 0 {
            prepared.read_prompts_on(nodes, from)?;
        }
        Ok(Self {
            tokenizer: Arc::new(texts::tokenizer(&source)?),
            template: texts::template(&source, templates),
            path,
            asked,
            prepared,
            draft: None,
        })
    }

    /// Has the small model at `path` guess what this one will answer. Before
    /// [`forecast`](Self::forecast).
    ///
    /// # Errors
    /// What is wrong with it, such as another vocabulary.
    pub fn guess_with(&mut self, source: Arc<Source>, path: PathBuf) -> Result<(), Error> {
        self.prepared.guess_with(source)?;
        self.draft = Some(path);
        Ok(())
    }

    /// Has an adapter beside the model, which requests choose by `name`.
    ///
    /// # Errors
    /// What is wrong with it, or that it does not fit the model.
    pub fn adapt(&mut self, name: &str, path: &Path) -> Result<(), Error> {
        self.prepared.adapt(name, path)
    }

    /// Adapters beside the model.
    pub fn adapters(&self) -> &[AdapterOf] {
        self.prepared.adapters()
    }

    /// Where the model is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model as it is to be computed.
    pub const fn prepared(&self) -> &Prepared {
        &self.prepared
    }

    /// The same, to be changed.
    pub const fn prepared_mut(&mut self) -> &mut Prepared {
        &mut self.prepared
    }

    /// Kernel classes, version and the model's identity. With request and seed they determine the
    /// bits of an answer.
    pub fn fingerprint(&self) -> String {
        let classes = self.asked.classes.to_string();
        fingerprint(&classes, self.prepared.identity())
    }

    /// The shape.
    pub const fn config(&self) -> &Config {
        self.prepared.config()
    }

    /// Sizes of the engine.
    pub const fn engine(&self) -> &EngineConfig {
        self.prepared.engine()
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.prepared.split().ranks()
    }

    /// How numbers are computed.
    pub const fn classes(&self) -> &Classes {
        &self.asked.classes
    }

    /// Threads of each node.
    pub const fn threads(&self) -> usize {
        self.prepared.options().threads
    }

    /// How nodes on the CPU keep keys and values; `None` where there is none.
    fn kv(&self) -> Option<KvType> {
        let class = self.classes().each().iter().find(|class| !class.is_mlx())?;
        Some(self.asked.options.kv.unwrap_or(KvType::of(*class)))
    }

    /// Whether it needs no workers: one node, none more for prompts.
    pub fn is_alone(&self) -> bool {
        self.nodes() == 1 && self.prepared.prompts().is_none()
    }

    /// Threads of the kernels that [`here`](Self::here) needs, and where they stay. Where MLX
    /// computes, they only choose tokens.
    pub fn own_threads(&self) -> (usize, Pinning) {
        let pinning = match self.asked.pin {
            true => Pinning::Cores { first: 0 },
            false => Pinning::Free,
        };
        match self.classes().first().is_mlx() {
            true => (1, pinning),
            false => (self.threads(), pinning),
        }
    }

    /// Loads it into this process; `progress` hears of layers.
    ///
    /// # Errors
    /// What is wrong with the model, or with MLX where it is to compute.
    pub fn here(
        self,
        mlx: &Places,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Loaded, Error> {
        let tokenizer = Arc::clone(&self.tokenizer);
        self.into_loaded(|prepared| prepared.here(tokenizer, mlx, kernels, progress))
    }

    /// Takes an instance that [`start`](Self::start) has started as what answers.
    pub fn loaded(self, instance: Instance) -> Loaded {
        match self.into_loaded(|prepared| Ok::<_, Infallible>(prepared.loaded(instance))) {
            Ok(loaded) => loaded,
            Err(never) => match never {},
        }
    }

    /// Takes a service of this machine's node as what answers; `on` names its nodes.
    pub fn elsewhere(self, service: Arc<dyn Service>, on: String) -> Loaded {
        match self.into_loaded(|prepared| Ok::<_, Infallible>(prepared.elsewhere(service, on))) {
            Ok(loaded) => loaded,
            Err(never) => match never {},
        }
    }

    fn into_loaded<E>(
        self,
        load: impl FnOnce(Prepared) -> Result<paceline_node::Loaded, E>,
    ) -> Result<Loaded, E> {
        let (threads, engine, kv) = (self.threads(), self.engine().clone(), self.kv());
        Ok(Loaded {
            model: load(self.prepared)?,
            tokenizer: self.tokenizer,
            template: self.template,
            classes: self.asked.classes,
            engine,
            threads,
            kv,
            load_time: self.asked.since.elapsed(),
        })
    }

    /// Whether MLX can be opened at `places`, where it is to compute: of a worker's error only the
    /// text arrives.
    ///
    /// # Errors
    /// Why not.
    pub fn check_mlx(&self, places: &Places) -> Result<(), Error> {
        match Library::open(places) {
            Err(error) => Err(paceline_model::Error::from(error).into()),
            Ok(_) => Ok(()),
        }
    }

    /// Starts the workers; with `restart` again after failures. `observer` hears what becomes of
    /// them. Does not wait until they are ready.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn start(
        &self,
        workers: &Workers,
        restart: bool,
        observer: Observer,
    ) -> Result<Instance, Error> {
        let options = self.prepared.options();
        // Before there are workers, which would wait for it.
        self.prepared.identity()?;
        let pin = self.asked.pin.then_some(options.threads);
        let own = self.crew(workers, options.nodes, pin, "")?;
        match self.prepared.prompts() {
            None => self.prepared.over(own, restart, observer),
            Some(prompts) => {
                // The others have the first cores, which these would share.
                let prompts = self.crew(workers, prompts.options().nodes, None, "prompts ")?;
                self.prepared.over_apart(own, prompts, restart, observer)
            }
        }
    }

    /// `of` stands before ranks in what workers say.
    fn crew(
        &self,
        workers: &Workers,
        ranks: u32,
        pin: Option<usize>,
        of: &'static str,
    ) -> Result<Box<LocalCrew>, Error> {
        let (workers, tell) = (workers.clone(), Arc::clone(&workers.tell));
        let crew = LocalCrew::spawn(LocalSpec {
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

    /// The model as clients see it, by its id and further names; `tell` hears of a template that
    /// cannot be used. Takes the template.
    pub fn served(
        &mut self,
        (id, aliases): (String, Vec<String>),
        path: &Path,
        tell: &dyn Fn(&str),
    ) -> Model {
        let template = match self.template.take() {
            Some(Ok(template)) => Some(Arc::new(template)),
            Some(Err(error)) => {
                tell(&format!(
                    "warning: no chat, the model's template cannot be used: {error}"
                ));
                None
            }
            None => None,
        };
        Model {
            id,
            aliases,
            created_unix_s: changed_unix_s(path),
            fingerprint: self.fingerprint(),
            tokenizer: Arc::clone(&self.tokenizer),
            template,
            context: self.engine().context,
            sampling: sampling(path),
            about: About {
                architecture: self.config().family.name().to_owned(),
                bytes: size(path),
                parameters: 0,
                quantization: String::new(),
            },
        }
    }

    /// Each model of an API and what answers with it: the model, and every adapter beside it. An
    /// adapter that is `alone` answers in place of the model.
    pub fn answering(
        &self,
        (model, service): (Model, Arc<dyn Service>),
        alone: bool,
    ) -> Vec<(Model, Arc<dyn Service>)> {
        let adapted = |adapter: &AdapterOf| -> Arc<dyn Service> {
            Arc::new(AdaptedService::new(Arc::clone(&service), &*adapter.name))
        };
        let fingerprint = |adapter: &AdapterOf| {
            let (base, own) = (&model.fingerprint, adapter.short());
            format!("{base}-{own}")
        };
        let all = self.adapters();
        if let (true, [only]) = (alone, all) {
            let model = Model {
                fingerprint: fingerprint(only),
                ..model.clone()
            };
            return vec![(model, adapted(only))];
        }
        let beside = |adapter: &AdapterOf| {
            let of_model = Model {
                id: adapter.name.clone(),
                aliases: vec![format!("{}:{}", model.id, adapter.name)],
                fingerprint: fingerprint(adapter),
                ..model.clone()
            };
            (of_model, adapted(adapter))
        };
        let beside: Vec<_> = all.iter().map(beside).collect();
        std::iter::once((model, service)).chain(beside).collect()
    }
}

/// A model that is ready to answer, with what programs tell about it.
#[derive(Debug)]
pub struct Loaded {
    model: paceline_node::Loaded,
    pub tokenizer: Arc<Tokenizer>,
    /// As of [`Opened`].
    pub template: Option<Result<ChatTemplate, ChatError>>,
    /// How numbers are computed.
    pub classes: Classes,
    /// Sizes of the engine.
    pub engine: EngineConfig,
    /// Of each node.
    pub threads: usize,
    /// How the CPU's nodes keep keys and values; `None` where all are on MLX.
    pub kv: Option<KvType>,
    /// From opening the model's files to being ready for a prompt.
    pub load_time: Duration,
}

impl Deref for Loaded {
    type Target = paceline_node::Loaded;

    fn deref(&self) -> &Self::Target {
        &self.model
    }
}

impl Loaded {
    /// What each node holds: a heading, then a line each.
    pub fn split_lines(&self) -> Vec<String> {
        let weights = self.weights();
        split_lines(self.config(), self.split(), self.threads, &weights)
    }
}
