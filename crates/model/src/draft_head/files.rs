//! Draft heads in files: the form of one, which layers of the model it captures, and loading it.

use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_tensor::Kernels;
use serde_json::Value;

use super::DraftHead;
use crate::{
    AssistantHead, BlockConfig, BlockHead, Config, EagleHead, Error, HeadConfig, ModelSource,
    NextTokenHead,
};

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
            expected: COMPUTED.into(),
        }),
    }
}

const COMPUTED: &str =
    "EAGLE-3, DFlash, DSpark, an assistant of Gemma 4, the model's own layer, or a small model";

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
    let class = match class.is_mlx() {
        true => KernelClass::Cpu,
        false => class,
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn heads_of_other_forms_are_found_by_their_names() {
        let llama = json!({ "architectures": ["LlamaForCausalLM"], "model_type": "llama" });
        for (config, found) in [
            (json!({ "architectures": ["DFlash2DraftModel"] }), true),
            (json!({ "speculators_model_type": "eagle" }), true),
            (llama, false),
            (json!({}), false),
        ] {
            assert_eq!(other_head(&config).is_some(), found, "{config}");
        }
    }
}
