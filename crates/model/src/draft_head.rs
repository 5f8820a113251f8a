//! Draft heads: small networks that propose tokens from a model's residual stream.
//!
//! ```text
//! model      ... t u         rows of t and u computed; v is chosen
//! head       (h_t, u) (h_u, v) -> w        h: captured rows of the model
//!            (o, w) -> x                   o: the head's own output after w
//! ```
//!
//! - [`EagleHead`](crate::EagleHead): EAGLE-3, a folder of its own.
//! - [`BlockHead`](crate::BlockHead): DFlash and DSpark, which draft a block in a pass.
//! - [`AssistantHead`](crate::AssistantHead): Gemma 4's, which reads keys and values of the model.
//! - [`NextTokenHead`](crate::NextTokenHead): multi-token prediction, a layer in the model's files.
//!
//! Answers never depend on a head, so its bits have no class.

pub(crate) mod rows;

use std::fmt;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::Kernels;
use serde_json::Value;

use crate::{
    AssistantHead, BlockConfig, BlockHead, Config, EagleHead, Error, HeadConfig, ModelSource,
    NextTokenHead,
};

/// A loaded draft head.
pub trait DraftHead: fmt::Debug + Send + Sync {
    /// Layers of the model whose input it reads, in ascending order; see
    /// [`Model::with_captures`](crate::Model::with_captures).
    fn captures(&self) -> &[usize];

    /// C: width of the model's residual stream.
    fn width(&self) -> usize;

    /// The blocks that it drafts; `None` if it drafts a token in a pass.
    fn block(&self) -> Option<DraftBlock> {
        None
    }

    /// Kernels that its weights are packed for.
    fn kernels(&self) -> &Kernels;

    /// Bytes of its packed weights.
    fn weight_bytes(&self) -> Bytes;

    /// Memory for passes of up to `rows` rows of `sequences` sequences, with a cache of `positions`
    /// positions over all of them.
    ///
    /// # Errors
    /// [`Error::Cache`] if the memory cannot be reserved.
    fn reserve(
        self: Arc<Self>,
        rows: usize,
        sequences: usize,
        positions: usize,
    ) -> Result<Box<dyn DraftHeadCompute>, Error>;
}

/// The layers that the draft head in `draft` captures; `None` if there is no head. `is_own`: these
/// are the files of the model itself, whose prediction layer is a head.
///
/// # Errors
/// A head that does not fit the model.
pub fn draft_captures(
    draft: &ModelSource,
    model: &Config,
    is_own: bool,
) -> Result<Option<Vec<usize>>, Error> {
    let own = || {
        let has_layer = is_own && model.streams.is_none() && NextTokenHead::is_in(draft, model);
        has_layer.then(|| vec![model.layers.len()])
    };
    let block = BlockConfig::of(draft, model)?.map(|block| block.shape);
    let head = block.or(HeadConfig::of(draft, model)?);
    let captures = head.map(|head| head.captures);
    if let Some(captures) = captures.or(AssistantHead::captures_of(draft, model)?) {
        return match model.streams {
            None => Ok(Some(captures)),
            Some(streams) => Err(Error::Value {
                field: "draft head",
                got: format!("a head for a model of {} residual streams", streams.count),
                expected: "a small model".into(),
            }),
        };
    }
    let other = match draft {
        ModelSource::Hf(folder) => other_head(folder.config()),
        ModelSource::Gguf(_) => None,
    };
    match other {
        None => Ok(own()),
        Some(got) => Err(Error::Value {
            field: "draft head",
            got,
            expected:
                "EAGLE-3, DFlash, DSpark, an assistant of Gemma 4, the model's own layer, or a \
                       small model"
                    .into(),
        }),
    }
}

/// Parts of the names of heads that are not computed, in small letters, and why.
const OTHER_HEADS: [(&str, &str); 4] = [
    ("dflash2", "another network than DFlash"),
    ("eagle", "EAGLE 1 and 2 read the last layer"),
    ("medusa", "it reads the last layer"),
    (
        "speculator",
        "another network than EAGLE-3, DFlash and DSpark",
    ),
];

/// The name of a head's architecture that is not computed, and why.
fn other_head(config: &Value) -> Option<String> {
    let names = config["architectures"].as_array().into_iter().flatten();
    let names = names.chain([&config["speculators_model_type"], &config["model_type"]]);
    let mut names = names.filter_map(Value::as_str);
    names.find_map(|name| {
        let small = name.to_lowercase();
        let (_, why) = OTHER_HEADS.iter().find(|(part, _)| small.contains(part))?;
        let name: String = name.chars().take(100).collect();
        Some(format!("{name} ({why})"))
    })
}

/// Loads the draft head in `draft` for the model in `model`: a folder's, or the prediction layer of
/// the model's own files. It computes on the CPU, also for a model on MLX.
///
/// # Errors
/// Names the tensor or field that is missing or does not fit.
pub fn load_draft_head(
    draft: &ModelSource,
    model: &ModelSource,
    class: KernelClass,
    kernels: Arc<Kernels>,
) -> Result<Arc<dyn DraftHead>, Error> {
    let class = if class.is_mlx() {
        KernelClass::Cpu
    } else {
        class
    };
    let config = Config::read(model)?;
    if HeadConfig::of(draft, &config)?.is_some() {
        return Ok(Arc::new(EagleHead::load(draft, model, class, kernels)?));
    }
    if BlockConfig::of(draft, &config)?.is_some() {
        return Ok(Arc::new(BlockHead::load(draft, model, class, kernels)?));
    }
    if AssistantHead::captures_of(draft, &config)?.is_some() {
        return Ok(Arc::new(AssistantHead::load(draft, model, class, kernels)?));
    }
    match NextTokenHead::load(draft, class, kernels)? {
        Some(head) => Ok(Arc::new(head)),
        None => Err(Error::Value {
            field: "draft head",
            got: "a model without a prediction layer".to_owned(),
            expected: "an EAGLE-3 head, or a model with such a layer".into(),
        }),
    }
}

/// A block of tokens that a head drafts in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftBlock {
    /// Draft tokens, at least one.
    pub drafts: usize,
    /// Positions of the cache that it takes, from that of the last token on.
    pub positions: usize,
}

/// The purpose of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    /// Features are captured rows, and no logits are read.
    Read,
    /// Features are captured rows, and a draft begins.
    First,
    /// Features are outputs of the head: of the token before.
    Next,
}

/// The place of a token in the draft of a pass.
#[derive(Clone, Copy, Debug)]
pub struct DraftPlace {
    /// From 0; always 0 in a head without [blocks](DraftHead::block).
    pub nth: usize,
    /// The token before it.
    pub previous: u32,
}

/// Rows of one sequence in a pass.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows<'a> {
    pub tokens: &'a [u32],
    /// Of the position before each token: captured rows of the model, `(rows, captures, C)`, or
    /// outputs of this head, `(rows, C)`.
    pub features: &'a [f32],
    /// Position of the first token in the head's cache.
    pub position: usize,
    /// Position there of the last token that is no draft.
    pub pending: usize,
    /// Cache pages of its positions.
    pub pages: &'a [u32],
}

/// A draft head with its cache and buffers.
pub trait DraftHeadCompute: fmt::Debug + Send {
    /// Cache pages.
    fn pages(&self) -> usize;

    /// Computes a pass. Blocks for it.
    ///
    /// # Errors
    /// None on the CPU.
    ///
    /// # Panics
    /// If rows exceed the reserved sizes, tokens the vocabulary, or positions the pages.
    fn forward(&mut self, sequences: &[HeadRows<'_>], pass: PassKind) -> Result<(), Error>;

    /// Writes the logits of a draft token of sequence `i` of the last pass, by tokens of the model.
    /// Tokens that the head cannot propose have minus infinity.
    fn write_logits(&mut self, i: usize, place: DraftPlace, out: &mut [f32]);

    /// The output of the last row of sequence `i` of the last pass, `(C,)`. It is the feature of
    /// the token after that row; empty in a head with [blocks](DraftHead::block).
    fn output(&self, i: usize) -> &[f32];
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn heads_of_other_forms_are_found_by_their_names() {
        for (config, found) in [
            (json!({ "architectures": ["DFlash2DraftModel"] }), true),
            (json!({ "speculators_model_type": "eagle" }), true),
            (
                json!({ "architectures": ["LlamaForCausalLM"], "model_type": "llama" }),
                false,
            ),
            (json!({}), false),
        ] {
            assert_eq!(other_head(&config).is_some(), found, "{config}");
        }
    }
}
