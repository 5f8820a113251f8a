//! Multi-token prediction: a decoder layer in the model's own files, trained to predict one token
//! more.
//!
//! ```text
//! h (C), the model's last residual stream after the output norm --norm--+
//! token --embedding--> norm --------------------------------------------+-> (2 C) --> layer --> o
//! o --norm--> the model's output head --> logits;   o is the next row's h
//! ```
//!
//! Of several such layers only the first is used; it reads its own outputs.
//!
//! Source: DeepSeek V3's report, 2.2; `deepseek_mtp.py`, `glm4_moe_mtp.py` and `qwen3_next_mtp.py`
//! of vLLM. GGUF names: llama.cpp's `nextn` tensors.

use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{Activations, Kernels, KvCache, PackedMatrix, Product};
use paceline_weights::tensor::Tensor;

use crate::eagle::pack;
use crate::model::Model;
use crate::step::{Batch, BatchSequence, BatchSize, Logits, Workspace, embed_token};
use crate::weights;
use crate::{
    Config, DraftHead, DraftHeadCompute, DraftPlace, Error, HeadRows, ModelSource, PassKind, Role,
};

/// Names of the tensors that are not of the layer itself, without `.weight`.
struct TensorNames {
    /// `(C, 2 C)`
    mix: String,
    token_norm: String,
    feature_norm: String,
    /// The model's if the file lacks it.
    output_norm: Option<String>,
    /// `(vocabulary, C)`; the model's output head if the file lacks it.
    output: Option<String>,
}

impl TensorNames {
    /// Of the layer behind the model's last, if it is one of multi-token prediction. Those of
    /// several residual streams are not used.
    fn find(source: &ModelSource, config: &Config) -> Option<Self> {
        if config.streams.is_some() {
            return None;
        }
        let layer = config.layers.len();
        let of = |mix: String, [token, feature, output_norm, output]: [&str; 4], stem: &str| Self {
            mix,
            token_norm: format!("{stem}{token}"),
            feature_norm: format!("{stem}{feature}"),
            output_norm: Some(format!("{stem}{output_norm}")).filter(|name| has(source, name)),
            output: Some(format!("{stem}{output}")).filter(|name| has(source, name)),
        };
        const NAMES: [&str; 4] = ["enorm", "hnorm", "shared_head.norm", "shared_head.head"];
        const GGUF: [&str; 4] = ["enorm", "hnorm", "shared_head_norm", "shared_head_head"];
        const QWEN: [&str; 4] = [
            "pre_fc_norm_embedding",
            "pre_fc_norm_hidden",
            "norm",
            "lm_head",
        ];
        let (gguf, hf) = (
            format!("blk.{layer}.nextn."),
            format!("model.layers.{layer}."),
        );
        let found = [
            of(format!("{gguf}eh_proj"), GGUF, &gguf),
            of(format!("{hf}eh_proj"), NAMES, &hf),
            of("mtp.fc".to_owned(), QWEN, "mtp."),
        ];
        found.into_iter().find(|names| has(source, &names.mix))
    }
}

fn has(source: &ModelSource, stem: &str) -> bool {
    match source {
        ModelSource::Gguf(file) => file.has(&format!("{stem}.weight")),
        ModelSource::Hf(folder) => folder.has(&format!("{stem}.weight")),
    }
}

fn tensor(source: &ModelSource, stem: &str, shape: &[usize]) -> Result<Tensor, Error> {
    let name = format!("{stem}.weight");
    let tensor = match source {
        ModelSource::Gguf(file) => file.tensor(&name)?,
        ModelSource::Hf(folder) => folder.tensor(&name)?,
    };
    weights::check_shape(&tensor, shape)?;
    Ok(tensor)
}

/// The multi-token prediction layer of a model, on one rank.
#[derive(Debug)]
pub struct NextTokenHead {
    /// A layer, with the norm and the output head behind it.
    model: Arc<Model>,
    mix: PackedMatrix,
    token_norm: Vec<f32>,
    feature_norm: Vec<f32>,
    captures: [usize; 1],
}

impl NextTokenHead {
    /// Whether the files of a model have such a layer.
    pub fn is_in(source: &ModelSource, config: &Config) -> bool {
        TensorNames::find(source, config).is_some()
    }

    /// Loads the layer from the model's files; `None` if they have none.
    ///
    /// # Errors
    /// Names the tensor that is missing or has another shape.
    pub fn load(
        source: &ModelSource,
        class: KernelClass,
        kernels: Arc<Kernels>,
    ) -> Result<Option<Self>, Error> {
        let mut config = Config::read(source)?;
        let at = config.layers.len();
        let Some(names) = TensorNames::find(source, &config) else {
            return Ok(None);
        };
        weights::read_rope_factors(source, &mut config)?;
        let shape = config.layers[at - 1];
        config.layers.push(shape); // the prediction layer is like the last one
        config.check_layers()?;
        let c = config.width;
        let centred = |tensor: &Tensor| {
            let mut norm = weights::vector(tensor, c)?;
            norm.iter_mut().for_each(|w| *w += config.norm_offset);
            Ok::<_, Error>(norm)
        };
        let norm = |stem: &str| centred(&tensor(source, stem, &[c])?);
        let pack = |stem: &str, rows, cols| {
            let matrix = tensor(source, stem, &[rows, cols])?;
            pack(matrix, (class, &kernels))
        };
        let (mix, token_norm) = (pack(&names.mix, c, 2 * c)?, norm(&names.token_norm)?);
        let feature_norm = norm(&names.feature_norm)?;
        let output_norm = match &names.output_norm {
            Some(stem) => norm(stem)?,
            None => centred(&source.weight(config.family, Role::OutputNorm)?)?,
        };
        let output = match &names.output {
            Some(stem) => Some(pack(stem, config.vocab, c)?),
            None => None,
        };
        let head = (output_norm, output);
        let model = Model::one_layer(source, &config, (at, head), class, kernels)?;
        Ok(Some(Self {
            model: Arc::new(model),
            mix,
            token_norm,
            feature_norm,
            captures: [at],
        }))
    }
}

impl DraftHead for NextTokenHead {
    fn captures(&self) -> &[usize] {
        &self.captures
    }

    fn width(&self) -> usize {
        self.model.config().width
    }

    fn kernels(&self) -> &Kernels {
        self.model.kernels()
    }

    fn weight_bytes(&self) -> Bytes {
        Bytes(self.model.weight_bytes().0 + self.mix.bytes().0)
    }

    fn reserve(
        self: Arc<Self>,
        rows: usize,
        sequences: usize,
        positions: usize,
    ) -> Result<Box<dyn DraftHeadCompute>, Error> {
        let model = &self.model;
        let size = BatchSize {
            rows,
            logit_rows: sequences,
            sequences,
            context: positions,
        };
        let (c, precision) = (model.config().width, model.precision());
        let input = model
            .kernels()
            .activations(rows, 2 * c, precision, [&self.mix]);
        Ok(Box::new(NextTokenCompute {
            cache: model.new_cache(size, positions)?,
            workspace: Workspace::given(model, size),
            outputs: vec![0.0; sequences * c],
            input,
            head: self,
        }))
    }
}

/// A prediction layer with its cache and buffers.
#[derive(Debug)]
struct NextTokenCompute {
    head: Arc<NextTokenHead>,
    cache: KvCache,
    workspace: Workspace,
    /// `(T, 2 C)`, quantised
    input: Activations,
    /// `(S, C)`: the residual stream after the last row of each sequence.
    outputs: Vec<f32>,
}

impl DraftHeadCompute for NextTokenCompute {
    fn pages(&self) -> usize {
        self.cache.pages()
    }

    fn forward(&mut self, sequences: &[HeadRows<'_>], _: PassKind) -> Result<(), Error> {
        let (head, model) = (&*self.head, &*self.head.model);
        let (kernels, config) = (model.kernels(), model.config());
        let (c, eps) = (config.width, config.norm_eps);
        let tokens: Vec<u32> = sequences.iter().flat_map(|s| s.tokens).copied().collect();
        let features = sequences.iter().flat_map(|s| s.features.chunks_exact(c));
        let features: Vec<&[f32]> = features.collect();
        self.input.resize(tokens.len());
        kernels.fill_rows(&mut self.input, |t, out| {
            let (token, feature) = out.split_at_mut(c);
            embed_token(model, tokens[t], token);
            kernels.rms_norm_in_place(token, &head.token_norm, eps);
            kernels.rms_norm(features[t], &head.feature_norm, eps, feature);
        });
        let mixed = Product {
            weights: &head.mix,
            first_col: 0,
            out: &mut self.workspace.residual_mut()[..tokens.len() * c],
        };
        kernels.products(&self.input, [mixed]);
        let rows = sequences
            .iter()
            .map(|s| BatchSequence::plain(s.tokens, s.position, s.pages, Logits::Last));
        let rows: Vec<BatchSequence<'_>> = rows.collect();
        let batch = Batch::new(&rows);
        model.forward(&batch, &mut self.workspace, &mut self.cache)?;
        let mut end = 0;
        for (s, out) in sequences.iter().zip(self.outputs.chunks_exact_mut(c)) {
            end += s.tokens.len();
            out.copy_from_slice(&self.workspace.residual_mut()[(end - 1) * c..end * c]);
        }
        Ok(())
    }

    fn write_logits(&mut self, i: usize, _: DraftPlace, out: &mut [f32]) {
        let vocab = self.head.model.config().vocab;
        out.copy_from_slice(self.workspace.logits_mut(i, vocab));
    }

    fn output(&self, i: usize) -> &[f32] {
        let c = self.head.model.config().width;
        &self.outputs[i * c..(i + 1) * c]
    }
}

#[cfg(test)]
mod tests;
