//! Some layers of a model and some rows of its head, as a model of its own. It serves to measure
//! what a step of the whole model costs.
//!
//! Its steps are the model's: the same layers, weights and kernels. Its tokens mean nothing.

use std::ops::Range;
use std::sync::Arc;

use paceline_base::Rank;
use paceline_tensor::{Kernels, KvType};

use super::{LoadOptions, Model};
use crate::adapter::Adapters;
use crate::split::Split;
use crate::uses::LayerUses;
use crate::weights::{self, Layer, Loader, Names};
use crate::{Config, Error, Kinds, LayerCache, Source};

/// A part of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its layers, ascending. One that uses another's cache is behind that.
    pub layers: Vec<usize>,
    /// Rows of the output head, from the first on; at least 1.
    pub head_rows: usize,
}

impl Sample {
    /// The shape of the part of `config`, which has no embeddings of layers.
    fn of(&self, config: &Config) -> Config {
        let place = |of| self.layers.iter().position(|layer| *layer == of);
        let layer = |index: &usize| {
            let mut shape = config.layers[*index];
            if let LayerCache::Of(of) = shape.cache {
                // A layer that is not here is refused with the shape.
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
    /// Packs a part of a model of this shape. Of a layer's experts as many are packed as a row
    /// uses, from all over the layer, and every row chooses these. Embeddings of layers are left
    /// out.
    ///
    /// # Errors
    /// As [`load_config`](Self::load_config).
    ///
    /// # Panics
    /// If the model has not so many layers or rows.
    pub fn sample(
        source: &Source,
        config: &Config,
        sample: &Sample,
        options: LoadOptions,
        kernels: Arc<Kernels>,
    ) -> Result<Self, Error> {
        if options.class.is_mlx() {
            let (class, engine) = (options.class, "cpu");
            return Err(Error::Class { class, engine });
        }
        let mut config = Config {
            per_layer: 0, // a table of all layers
            ..config.clone()
        };
        if let Some(factors) = weights::rope_factors(source, &config)? {
            config.ropes[0] = config.ropes[0].clone().with_factors(&factors);
        }
        config.check_layers()?;
        let own = sample.of(&config);
        own.check_layers()?;
        let whole = Split::whole(&config).shard(&config, Rank(0));
        let loader = Loader {
            names: Names {
                source,
                config: &config,
            },
            config: &config,
            shard: &whole,
            class: options.class,
            pool: kernels.pool(),
            few_experts: true,
        };
        let embedding = Some(loader.embedding()?);
        let layers = sample.layers.iter().map(|index| loader.layer(*index));
        let layers = layers.collect::<Result<Vec<Layer>, Error>>()?;
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
            head,
            tied,
            adapters: Adapters::default(),
            config: own,
            shard,
        })
    }
}
