//! A loaded model.

use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{Kernels, KvCache, KvShape, KvType, PAGE, Precision};

use crate::step::{Batch, Step, Workspace};
use crate::weights::{self, Embedding, IntegerInputs, Layer, Linear, Loader};
use crate::{Config, Error, Source};

/// How a model is loaded.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// The definition of the numbers.
    pub class: KernelClass,
}

/// Packed weights, ready to compute.
#[derive(Debug)]
pub struct Model {
    config: Config,
    class: KernelClass,
    kernels: Arc<Kernels>,
    embedding: Embedding,
    layers: Vec<Layer>,
    output_norm: Vec<f32>,
    output: Linear,
    tied: bool,
    integer_inputs: IntegerInputs,
}

impl Model {
    /// Packs all weights of `source` for `kernels`; `progress(done, of)` is called after each
    /// layer. Blocks for one pass over the file on all threads.
    ///
    /// # Errors
    /// Names the field or tensor that is missing, of another shape or type. Nothing is kept.
    pub fn load(
        source: &Source,
        options: LoadOptions,
        kernels: Arc<Kernels>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let mut config = Config::read(source)?;
        if let Some(factors) = weights::rope_factors(source, &config)? {
            config.ropes[0] = config.ropes[0].clone().with_factors(&factors);
        }
        let loader = Loader {
            source,
            config: &config,
            class: options.class,
            pool: kernels.pool(),
        };
        let embedding = loader.embedding()?;
        let output_norm = loader.output_norm()?;
        let n = config.layers.len();
        let mut layers = Vec::with_capacity(n);
        for i in 0..n {
            layers.push(loader.layer(i)?);
            progress(i + 1, n + 1);
        }
        let (output, tied) = loader.output()?;
        progress(n + 1, n + 1);
        Ok(Self {
            integer_inputs: IntegerInputs::of(&layers, &output),
            embedding,
            output_norm,
            class: options.class,
            config,
            kernels,
            layers,
            output,
            tied,
        })
    }

    /// The shape.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The definition of the numbers.
    pub const fn class(&self) -> KernelClass {
        self.class
    }

    /// How finely activations are rounded for quantised weights.
    pub(crate) const fn precision(&self) -> Precision {
        match self.class {
            KernelClass::CpuQ8 => Precision::Eight,
            KernelClass::Cpu | KernelClass::CpuF32 => Precision::Fifteen,
        }
    }

    /// The kernels it was packed for.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Bytes of packed weights.
    pub fn weight_bytes(&self) -> Bytes {
        let layers: u64 = self.layers.iter().map(|l| l.bytes().0).sum();
        Bytes(layers + self.output.matrix.bytes().0)
    }

    /// Number of weights, norms left out.
    pub const fn parameters(&self) -> u64 {
        self.config.parameters(self.tied)
    }

    pub(crate) const fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    #[cfg(test)]
    pub(crate) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    pub(crate) const fn integer_inputs(&self) -> IntegerInputs {
        self.integer_inputs
    }

    /// A cache for `positions` positions in all, over any number of sequences (each takes whole
    /// pages of [`PAGE`]).
    ///
    /// # Errors
    /// [`Error::Cache`] when the memory cannot be reserved.
    pub fn new_cache(&self, positions: usize) -> Result<KvCache, Error> {
        let kv_type = match self.class {
            KernelClass::Cpu | KernelClass::CpuQ8 => KvType::F16,
            KernelClass::CpuF32 => KvType::F32,
        };
        let shape = KvShape {
            layers: self.layers.len(),
            heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
            kv_type,
        };
        KvCache::new(shape, positions.div_ceil(PAGE)).map_err(Error::Cache)
    }

    /// Runs one step: writes keys and values of all rows to `cache` and leaves the wanted logits
    /// in `ws` ([`Workspace::logits_mut`]). Returns the number of rows of logits.
    ///
    /// Allocates a few words per layer for the batch's description and nothing per row.
    ///
    /// # Panics
    /// If the batch exceeds the workspace or a token the vocabulary, or a sequence has fewer
    /// pages than positions: the caller's duty.
    pub fn forward(&self, batch: &Batch<'_>, ws: &mut Workspace, cache: &mut KvCache) -> usize {
        let mut step = Step::new(self, batch, ws, cache);
        for (i, layer) in self.layers.iter().enumerate() {
            self.config.family.layer(&mut step, layer, i);
        }
        step.finish(&self.output_norm, &self.output)
    }
}
