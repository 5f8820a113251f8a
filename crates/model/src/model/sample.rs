//! A sampled model: some layers and some rows of the head, loaded as a model of its own. The
//! forecaster measures it to estimate the step time of the whole model.
//!
//! Its steps use the same layers, weights and kernels as the model's. Its tokens mean nothing.

use std::ops::Range;
use std::sync::Arc;

use paceline_base::{KernelClass, Rank};
use paceline_tensor::{Kernels, KvType, PackedMatrix};

use super::{LoadOptions, Model};
use crate::adapter::Adapters;
use crate::expert_usage::LayerUses;
use crate::split::Split;
use crate::weights::{self, LayerShard, Linear, ShardLoader, WeightReader};
use crate::{Config, Error, Kinds, LayerCache, ModelSource};

/// Selection of a model's layers and head rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSample {
    /// Ascending. A layer that uses another's cache must come after it.
    pub layers: Vec<usize>,
    /// Rows of the output head, from the first; at least 1.
    pub head_rows: usize,
}

impl ModelSample {
    /// The shape of the sampled model, without per-layer embeddings.
    fn of(&self, config: &Config) -> Config {
        let place = |of| self.layers.iter().position(|layer| *layer == of);
        let layer = |index: &usize| {
            let mut shape = config.layers[*index];
            if let LayerCache::Of(of) = shape.cache {
                // The shape check refuses a layer whose cache layer is not sampled.
                shape.cache = LayerCache::Of(place(of).unwrap_or(usize::MAX));
            }
            shape
        };
        Config {
            layers: self.layers.iter().map(layer).collect(),
            vocab: self.head_rows,
            ..config.clone()
        }
    }
}

impl Model {
    /// Layer `at` of `config` alone, with the norm and the output head of `head` behind it, or with
    /// the model's output head.
    pub(crate) fn one_layer(
        source: &ModelSource,
        config: &Config,
        (at, (norm, output)): (usize, (Vec<f32>, Option<PackedMatrix>)),
        class: KernelClass,
        kernels: Arc<Kernels>,
    ) -> Result<Self, Error> {
        let own = Config {
            layers: vec![config.layers[at]],
            ngrams: None, // of other layers
            ..config.clone()
        };
        own.check_layers()?;
        let whole = Split::whole(config).shard(config, Rank(0));
        let loader = ShardLoader {
            names: WeightReader { source, config },
            config,
            shard: &whole,
            class,
            pool: kernels.pool(),
            few_experts: false,
            packed: None,
        };
        let tied = loader.names.is_tied()?;
        let output = match output {
            Some(matrix) => Linear { matrix, bias: None },
            None => loader.output(tied)?,
        };
        let split = Split::whole(&own);
        let shard = split.shard(&own, Rank(0));
        Ok(Self {
            leader: split.leader(),
            links: None,
            class,
            kv_type: KvType::of(class),
            kinds: Kinds::new(&own),
            uses: LayerUses::of(&own, shard.layers.clone()),
            embedding: Some(loader.embedding()?),
            per_layer: None,
            layers: vec![loader.layer(at)?],
            head_streams: None, // heads read one stream
            first_streams: Vec::new(),
            token_keys: None,
            head: Some((norm, output)),
            tied,
            captures: Vec::new(),
            streamer: None,
            adapters: Adapters::default(),
            config: own,
            shard,
            kernels,
        })
    }
}

impl Model {
    /// Packs the sampled layers and head rows. Of each layer's experts it packs only as many as a
    /// row uses, evenly spaced over the layer, and every row is routed to these. Per-layer
    /// embeddings are left out.
    ///
    /// # Errors
    /// As [`load_config`](Self::load_config).
    ///
    /// # Panics
    /// If the model has fewer layers or rows than the sample.
    pub fn sample(
        source: &ModelSource,
        config: &Config,
        sample: &ModelSample,
        options: LoadOptions,
        kernels: Arc<Kernels>,
    ) -> Result<Self, Error> {
        if options.class.is_mlx() {
            let (class, engine) = (options.class, "cpu");
            return Err(Error::Class { class, engine });
        }
        let mut config = Config {
            per_layer: 0, // a table of all layers
            ngrams: None, // tables too
            ..config.clone()
        };
        weights::read_rope_factors(source, &mut config)?;
        config.check_layers()?;
        let own = sample.of(&config);
        own.check_layers()?;
        let whole = Split::whole(&config).shard(&config, Rank(0));
        let loader = ShardLoader {
            names: WeightReader {
                source,
                config: &config,
            },
            config: &config,
            shard: &whole,
            class: options.class,
            pool: kernels.pool(),
            few_experts: true,
            packed: None,
        };
        let embedding = Some(loader.embedding()?);
        let layers = sample.layers.iter().map(|index| loader.layer(*index));
        let layers = layers.collect::<Result<Vec<LayerShard>, Error>>()?;
        let tied = loader.names.is_tied()?;
        let rows: Range<usize> = 0..sample.head_rows;
        let head = Some((loader.output_norm()?, loader.output_rows(tied, rows)?));
        let split = Split::whole(&own);
        let shard = split.shard(&own, Rank(0));
        Ok(Self {
            leader: split.leader(),
            links: None,
            class: options.class,
            kv_type: KvType::of(options.class),
            kinds: Kinds::new(&own),
            uses: LayerUses::of(&own, shard.layers.clone()),
            embedding,
            per_layer: None,
            kernels: Arc::clone(&kernels),
            layers,
            head_streams: loader.head_streams()?,
            first_streams: loader.first_streams()?,
            token_keys: None,
            head,
            tied,
            captures: Vec::new(),
            streamer: None,
            adapters: Adapters::default(),
            config: own,
            shard,
        })
    }
}
