//! A rank's weights on the engine of its kernel class.

use std::sync::Arc;

use paceline_base::{KernelClass, Rank};
use paceline_engine::EngineConfig;
use paceline_model::{
    Adapter, Config, Error, Links, LoadOptions, MlxModel, MlxOptions, MlxPlaces, Model, Source,
    Split, Weights,
};
use paceline_tensor::{Kernels, KvType};
use tracing::warn;

/// The part of a model to load, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) source: &'a Arc<Source>,
    pub(crate) split: &'a Split,
    pub(crate) rank: Rank,
    pub(crate) class: KernelClass,
    /// How keys and values are kept if not as the class does; not on MLX.
    pub(crate) kv: Option<KvType>,
    /// Sizes of the engine, to know before loading whether all fits.
    pub(crate) engine: &'a EngineConfig,
    /// Where MLX is looked for.
    pub(crate) mlx: &'a MlxPlaces,
    /// Beside its weights; not on MLX.
    pub(crate) adapters: &'a [Adapter],
}

impl Wanted<'_> {
    /// Loads it, linked with the other ranks where there are some.
    pub(crate) fn load(
        self,
        links: Option<Links>,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Arc<dyn Weights>, Error> {
        let (split, rank, class) = (self.split, self.rank, self.class);
        if class.is_mlx() {
            if !self.adapters.is_empty() {
                return Err(Error::AdapterEngine { engine: "mlx" });
            }
            let options = MlxOptions {
                places: self.mlx.clone(),
                class,
                positions: self.engine.cache_positions,
                rows: self.engine.max_rows,
                sequences: self.engine.max_running,
                patience: MlxOptions::PATIENCE,
                last_words: MlxOptions::LAST_WORDS,
            };
            let source = Arc::clone(self.source);
            let model = MlxModel::load(source, split, rank, options, kernels, progress)?;
            for note in model.notes() {
                warn!(rank = rank.0, "{note}");
            }
            return Ok(match links {
                Some(links) => Arc::new(model.link(links)),
                None => Arc::new(model),
            });
        }
        let options = LoadOptions { class };
        let model = Model::load_shard(self.source, split, rank, options, kernels, progress)?;
        let model = model.with_adapters(self.source, self.adapters)?;
        let model = match self.kv {
            Some(kv) => model.with_kv(kv),
            None => model,
        };
        Ok(match links {
            Some(links) => Arc::new(model.link(links)),
            None => Arc::new(model),
        })
    }
}

/// Loads a whole model on the engine of `class`. `engine` is what it will be asked for. `kv` is how
/// it keeps keys and values, if not as its class does.
///
/// # Errors
/// What is wrong with the model, or with MLX where it is to compute.
pub fn load_whole(
    source: &Arc<Source>,
    (class, kv): (KernelClass, Option<KvType>),
    engine: &EngineConfig,
    mlx: &MlxPlaces,
    kernels: Arc<Kernels>,
    progress: impl FnMut(usize, usize),
) -> Result<Arc<dyn Weights>, Error> {
    let split = Split::whole(&Config::read(source)?);
    let wanted = Wanted {
        source,
        split: &split,
        rank: Rank(0),
        class,
        kv,
        engine,
        mlx,
        adapters: &[],
    };
    wanted.load(None, kernels, progress)
}
