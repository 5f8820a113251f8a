//! Draft heads: small networks that propose tokens from a model's residual stream.
//!
//! ```text
//! model      ... t u         rows of t and u computed; v is chosen
//! head       (h_t, u) (h_u, v) -> w        h: captured rows of the model
//!            (o, w) -> x                   o: the head's own output after w
//! ```
//!
//! - [`EagleHead`](crate::EagleHead): EAGLE-3, a folder of its own.
//! - [`NextTokenHead`](crate::NextTokenHead): multi-token prediction, a layer in the model's files.
//!
//! Answers never depend on a head, so its bits have no class.

use std::fmt;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::Kernels;
use serde_json::Value;

use crate::{Config, EagleHead, Error, HeadConfig, ModelSource, NextTokenHead};

/// A loaded draft head.
pub trait DraftHead: fmt::Debug + Send + Sync {
    /// Layers of the model whose input it reads, in ascending order; see
    /// [`Model::with_captures`](crate::Model::with_captures).
    fn captures(&self) -> &[usize];

    /// C: width of the model's residual stream.
    fn width(&self) -> usize;

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
    if let Some(head) = HeadConfig::of(draft, model)? {
        return match model.streams {
            None => Ok(Some(head.captures)),
            Some(streams) => Err(Error::Value {
                field: "draft head",
                got: format!("EAGLE-3 for a model of {} residual streams", streams.count),
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
            expected: "EAGLE-3, a prediction layer of the model, or a small model".into(),
        }),
    }
}

/// Parts of the names of heads that are not computed, in small letters. DFlash and DSpark draft
/// blocks at once. EAGLE 1 and 2 and Medusa read the last layer. The assistants of Gemma 4 read
/// keys and values of the model.
const OTHER_HEADS: [&str; 6] = [
    "dflash",
    "dspark",
    "eagle",
    "medusa",
    "assistant",
    "speculator",
];

/// The name of a head's architecture that is not computed.
fn other_head(config: &Value) -> Option<String> {
    let names = config["architectures"].as_array().into_iter().flatten();
    let names = names.chain([&config["speculators_model_type"], &config["model_type"]]);
    let mut names = names.filter_map(Value::as_str);
    let is_other = |name: &&str| {
        let name = name.to_lowercase();
        OTHER_HEADS.iter().any(|part| name.contains(part))
    };
    names
        .find(is_other)
        .map(|name| name.chars().take(100).collect())
}

/// Loads the draft head in `draft` for the model in `model`: an EAGLE-3 head, or the prediction
/// layer of the model's own files.
///
/// # Errors
/// Names the tensor or field that is missing or does not fit.
pub fn load_draft_head(
    draft: &ModelSource,
    model: &ModelSource,
    class: KernelClass,
    kernels: Arc<Kernels>,
) -> Result<Arc<dyn DraftHead>, Error> {
    if HeadConfig::of(draft, &Config::read(model)?)?.is_some() {
        return Ok(Arc::new(EagleHead::load(draft, model, class, kernels)?));
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

/// Rows of one sequence in a pass.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows<'a> {
    pub tokens: &'a [u32],
    /// Of the position before each token: captured rows of the model, `(rows, captures, C)`, or
    /// outputs of this head, `(rows, C)`.
    pub features: &'a [f32],
    /// Position of the first token in the head's cache.
    pub position: usize,
    /// Cache pages of its positions.
    pub pages: &'a [u32],
}

/// A draft head with its cache and buffers.
pub trait DraftHeadCompute: fmt::Debug + Send {
    /// Cache pages.
    fn pages(&self) -> usize;

    /// Computes a pass. `is_captured`: features are captured rows of the model. Blocks for the
    /// pass.
    ///
    /// # Errors
    /// None on the CPU.
    ///
    /// # Panics
    /// If rows exceed the reserved sizes, tokens the vocabulary, or positions the pages.
    fn forward(&mut self, sequences: &[HeadRows<'_>], is_captured: bool) -> Result<(), Error>;

    /// Writes the logits after the last row of sequence `i` of the last pass, by tokens of the
    /// model. Tokens that the head cannot propose have minus infinity.
    fn write_logits(&mut self, i: usize, out: &mut [f32]);

    /// The output of the last row of sequence `i` of the last pass, `(C,)`. It is the feature of
    /// the token after that row.
    fn output(&self, i: usize) -> &[f32];
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn heads_of_other_forms_are_found_by_their_names() {
        for (config, found) in [
            (json!({ "architectures": ["DFlashDraftModel"] }), true),
            (json!({ "model_type": "gemma4_assistant" }), true),
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
