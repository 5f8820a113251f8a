//! A rank's weights on the engine of its kernel class.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_engine::EngineConfig;
use paceline_model::{
    Adapter, BatchSize, Config, Error, Links, LoadOptions, LoadedModel, MemoryLimit, Model,
    ModelSource, PackedFile, Split,
};
use paceline_model_mlx::{MlxModel, MlxOptions, MlxPlaces, MlxRankBytes};
use paceline_tensor::{Kernels, KvType};
use tracing::warn;

use crate::stamp::WeightsStamp;
use crate::texts::tokenizer;

/// Longest wait for a file that another process writes and that does not grow. A matrix takes
/// seconds to pack at most, and the last flush to a disk some ten.
const BUSY_LIMIT: Duration = Duration::from_secs(60);

/// Time between two looks at such a file.
const BUSY_EVERY: Duration = Duration::from_millis(200);

/// Where packed weights are kept on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedPlace {
    /// Folder of those of all models.
    pub folder: PathBuf,
    /// Path of the model's file or folder.
    pub model: PathBuf,
}

impl PackedPlace {
    /// The file of a shard; `None` if the model's files cannot be looked at.
    fn open(&self, shard: &str) -> Option<PackedFile> {
        let stamp = WeightsStamp::read(&self.model).ok()?;
        let stamp = format!("{stamp:?}");
        Some(PackedFile::open(&self.folder, &self.model, shard, &stamp))
    }

    /// As [`open`](Self::open), for a model that cannot do without the file. Waits for another
    /// process that writes it, as long as it grows.
    fn open_streamed(&self, shard: &str) -> Option<PackedFile> {
        let (mut last, mut since) = (0, Instant::now());
        loop {
            let packed = self.open(shard)?;
            let Some(bytes) = packed.busy_bytes() else {
                return Some(packed);
            };
            if bytes != last {
                (last, since) = (bytes, Instant::now());
            } else if since.elapsed() >= BUSY_LIMIT {
                return Some(packed);
            }
            thread::sleep(BUSY_EVERY);
        }
    }
}

/// Specification of the shard to load.
#[derive(Clone, Copy, Debug)]
pub struct ShardSpec<'a> {
    pub source: &'a Arc<ModelSource>,
    pub split: &'a Split,
    pub rank: Rank,
    pub class: KernelClass,
    /// Type of keys and values, if not that of the class; on MLX of 8 or 4 bits alone.
    pub kv: Option<KvType>,
    /// Sizes of the engine, to check before loading whether all fits.
    pub engine: &'a EngineConfig,
    /// Search paths of MLX.
    pub mlx: &'a MlxPlaces,
    /// Adapters of the model; not on MLX.
    pub adapters: &'a [Adapter],
    /// Layers whose input a draft head reads.
    pub captures: &'a [usize],
    /// Place of packed weights; on MLX with a limit of memory only.
    pub packed: Option<&'a PackedPlace>,
    /// Most memory of this process. Weights that do not fit are then read from `packed` while steps
    /// compute. On MLX, experts are read from the model's files.
    pub memory: Option<Bytes>,
}

impl ShardSpec<'_> {
    /// Loads it and connects it with the other ranks, if there are some.
    pub fn load(
        self,
        links: Option<Links>,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        let (split, rank, class) = (self.split, self.rank, self.class);
        if class.is_mlx() {
            if !self.adapters.is_empty() {
                return Err(Error::AdapterEngine { engine: "mlx" });
            }
            let options = MlxOptions {
                places: self.mlx.clone(),
                class,
                kv: self.kv,
                positions: self.engine.cache_positions,
                rows: self.engine.max_rows,
                sequences: self.engine.max_running,
                captures: self.captures.to_vec(),
                memory: self.memory.map(MemoryLimit::Process),
                patience: MlxOptions::PATIENCE,
                last_words: MlxOptions::LAST_WORDS,
            };
            let packed = match self.memory {
                Some(_) => self.packed(&self.shard_name()?),
                None => None,
            };
            let (source, options) = (Arc::clone(self.source), (options, packed));
            let model = MlxModel::load(source, split, rank, options, kernels, progress)?;
            for note in model.notes() {
                warn!(rank = rank.0, "{note}");
            }
            return Ok(match links {
                Some(links) => Arc::new(model.link(links)),
                None => Arc::new(model),
            });
        }
        let model = self.load_packed(kernels, progress)?;
        let model = match model.lacks_token_keys() {
            true => model.with_token_keys(token_keys(self.source)?)?,
            false => model,
        };
        let model = model.with_adapters(self.source, self.adapters)?;
        let model = model.with_captures(self.captures);
        let model = match self.kv {
            Some(kv) => model.with_kv(kv),
            None => model,
        };
        Ok(match links {
            Some(links) => Arc::new(model.link(links)),
            None => Arc::new(model),
        })
    }

    /// Name of its packed file.
    fn shard_name(&self) -> Result<String, Error> {
        let shard = self.split.shard(&Config::read(self.source)?, self.rank);
        Ok(format!("{} {shard:?}", self.class))
    }

    /// Its packed file, where there is a place for it.
    fn packed(&self, name: &str) -> Option<PackedFile> {
        self.packed.and_then(|place| match self.memory {
            Some(_) => place.open_streamed(name),
            None => place.open(name),
        })
    }

    /// Its weights on the CPU: from packed ones, streamed or not, or packed now.
    fn load_packed(
        self,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Model, Error> {
        let (split, rank) = (self.split, self.rank);
        let (part, options) = ((split, rank), LoadOptions { class: self.class });
        let packed = self.packed(&self.shard_name()?);
        match (packed, self.memory) {
            (Some(packed), Some(memory)) => {
                let (options, limit) = ((options, packed), MemoryLimit::Process(memory));
                Model::load_streamed(self.source, part, options, limit, kernels, progress)
            }
            (None, Some(_)) => Err(Error::StreamPlace),
            (Some(packed), None) => {
                let options = (options, &packed);
                let model = Model::load_packed(self.source, part, options, kernels, progress)?;
                if let Some(fault) = packed.take_fault() {
                    warn!(rank = rank.0, "{fault}");
                }
                Ok(model)
            }
            (None, None) => Model::load_shard(self.source, split, rank, options, kernels, progress),
        }
    }
}

/// Keys of the tokens of a model, for its memory of n-grams.
fn token_keys(source: &ModelSource) -> Result<Vec<u32>, Error> {
    let keys = tokenizer(source).and_then(|tokenizer| tokenizer.token_keys());
    keys.map_err(|why| Error::Value {
        field: "tokenizer",
        got: why.to_string(),
        expected: "one that gives the keys of n-grams".into(),
    })
}

/// Bytes that a rank on MLX takes for an engine of these sizes, by the sum by which its worker
/// admits it. Reads headers only.
pub fn mlx_rank_bytes(
    (source, config): (&ModelSource, &Config),
    (split, rank, class): (&Split, Rank, (KernelClass, Option<KvType>)),
    (engine, captures): (&EngineConfig, &[usize]),
) -> Result<MlxRankBytes, Error> {
    let size = BatchSize {
        rows: engine.max_rows,
        logit_rows: engine.max_running,
        sequences: engine.max_running,
        context: engine.cache_positions,
    };
    MlxRankBytes::planned(
        (source, config),
        &split.shard(config, rank),
        class,
        (size, captures),
    )
}

/// Loads a whole model on the engine of `class`. `engine` has the sizes it must support. `kv` is
/// the type of keys and values, if not that of the class.
///
/// # Errors
/// The model cannot be loaded, or MLX is not available for its class.
pub fn load_whole(
    source: &Arc<ModelSource>,
    (class, kv): (KernelClass, Option<KvType>),
    engine: &EngineConfig,
    mlx: &MlxPlaces,
    kernels: Arc<Kernels>,
    progress: impl FnMut(usize, usize),
) -> Result<Arc<dyn LoadedModel>, Error> {
    let split = Split::whole(&Config::read(source)?);
    let wanted = ShardSpec {
        source,
        split: &split,
        rank: Rank(0),
        class,
        kv,
        engine,
        mlx,
        adapters: &[],
        captures: &[],
        packed: None,
        memory: None,
    };
    wanted.load(None, kernels, progress)
}

#[cfg(test)]
mod tests {
    use paceline_model::AdapterId;

    use super::*;

    /// Without MLX: what it refuses is known before it is opened.
    #[test]
    fn what_mlx_does_not_load_is_refused_by_name() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests-data/golden/hf/llama-tied"
        );
        let source = Arc::new(ModelSource::open(folder.as_ref()).unwrap());
        let split = Split::whole(&Config::read(&source).unwrap());
        let adapter = Adapter {
            id: AdapterId {
                name: "a".to_owned(),
                digest: [0; 32],
            },
            scale: 1.0,
            pairs: Vec::new(),
        };
        let told = "engine mlx adds no adapters to its weights: fuse them";
        let wanted = ShardSpec {
            source: &source,
            split: &split,
            rank: Rank(0),
            class: KernelClass::Mlx,
            kv: None,
            engine: &EngineConfig::single("llama", 64),
            mlx: &MlxPlaces::default(),
            adapters: &[adapter],
            captures: &[],
            packed: None,
            memory: None,
        };
        let kernels = Arc::new(Kernels::new(1).unwrap());
        let error = wanted.load(None, kernels, |_, _| {}).err().unwrap();
        assert!(error.to_string().starts_with(told), "{error}");
    }
}
