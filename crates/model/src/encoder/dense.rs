//! Dense modules of sentence-transformers behind the pooling: EmbeddingGemma has two.

use paceline_tensor::storage;
use paceline_weights::hf::{self, HfFolder};
use paceline_weights::safetensors::Safetensors;
use paceline_weights::tensor::Tensor;
use serde_json::Value;

use super::config::wrong;
use crate::{Error, ModelSource};

/// Modules whose files are downloaded and copied with a model: `config.json` and the weights.
const FOLDERS: [(&str, &str, &str); 2] = [
    (
        "2_Dense",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    ),
    (
        "3_Dense",
        "3_Dense/config.json",
        "3_Dense/model.safetensors",
    ),
];

/// The same modules in GGUF files of llama.cpp.
const TENSORS: [&str; 2] = ["dense_2.weight", "dense_3.weight"];

/// A product and an activation on the pooled vector.
#[derive(Debug)]
pub(super) struct EncoderDense {
    /// `(outputs, inputs)`
    weights: Vec<f32>,
    /// `(outputs,)`; empty without.
    bias: Vec<f32>,
    inputs: usize,
    has_tanh: bool,
}

/// The modules behind the pooling of a vector of `width`.
///
/// # Errors
/// A module of another kind, by name, or one without its files.
pub(super) fn read(source: &ModelSource, width: usize) -> Result<Vec<EncoderDense>, Error> {
    let mut all: Vec<EncoderDense> = Vec::new();
    match source {
        ModelSource::Hf(folder) => {
            for place in places(folder)? {
                let inputs = all.last().map_or(width, EncoderDense::outputs);
                all.push(EncoderDense::of_folder(folder, place, inputs)?);
            }
        }
        ModelSource::Gguf(file) => {
            for name in TENSORS.into_iter().filter(|name| file.has(name)) {
                let inputs = all.last().map_or(width, EncoderDense::outputs);
                all.push(EncoderDense::new(&file.tensor(name)?, inputs)?);
            }
        }
    }
    Ok(all)
}

/// Folders of a model's dense modules, by `modules.json`.
fn places(folder: &HfFolder) -> Result<Vec<(&'static str, &'static str)>, Error> {
    const FIELD: &str = "modules.json";
    const PLAIN: [&str; 3] = ["Transformer", "Pooling", "Normalize"];
    let modules = folder.settings(FIELD)?;
    let modules = modules.as_ref().and_then(Value::as_array);
    let mut places = Vec::new();
    for module in modules.into_iter().flatten() {
        let text = |name: &str| module[name].as_str().unwrap_or_default();
        let (kind, path) = (text("type"), text("path"));
        let kind = kind.rsplit('.').next().unwrap_or_default();
        if PLAIN.contains(&kind) {
            continue;
        }
        let place = FOLDERS
            .iter()
            .find(|(name, ..)| kind == "Dense" && *name == path);
        let Some((_, config, weights)) = place else {
            let got = format!("{kind} at {path:?}");
            let expected =
                "Transformer, Pooling, Normalize, or EncoderDense at 2_Dense and 3_Dense";
            return Err(wrong(FIELD, got, expected));
        };
        places.push((*config, *weights));
    }
    Ok(places)
}

impl EncoderDense {
    fn of_folder(
        folder: &HfFolder,
        (config, weights): (&'static str, &'static str),
        inputs: usize,
    ) -> Result<Self, Error> {
        const ACTIVATION: &str = "activation_function";
        let settings = folder.settings(config)?;
        let settings = settings.ok_or(Error::MissingField { field: config })?;
        let activation = settings[ACTIVATION].as_str().unwrap_or_default();
        let has_tanh = match activation.rsplit('.').next() {
            Some("Identity") => false,
            Some("Tanh") => true,
            _ => return Err(wrong(ACTIVATION, activation, "Identity or Tanh")),
        };
        let file = Safetensors::open(folder.path().join(weights)).map_err(hf::Error::from)?;
        let tensor = |name| file.tensor(name).map_err(hf::Error::from);
        let mut dense = Self::new(&tensor("linear.weight")?, inputs)?;
        if settings["bias"] == true {
            let bias = tensor("linear.bias")?;
            dense.bias = floats(&bias, &[dense.outputs()])?;
        }
        dense.has_tanh = has_tanh;
        Ok(dense)
    }

    fn new(matrix: &Tensor, inputs: usize) -> Result<Self, Error> {
        let outputs = matrix.shape.first().copied().unwrap_or(0);
        Ok(Self {
            weights: floats(matrix, &[outputs, inputs])?,
            bias: Vec::new(),
            inputs,
            has_tanh: false,
        })
    }

    pub(super) fn outputs(&self) -> usize {
        self.weights.len() / self.inputs
    }

    /// The output for a vector of `inputs`, in f64.
    pub(super) fn apply(&self, vector: &[f64]) -> Vec<f64> {
        let row = |(i, weights): (usize, &[f32])| {
            let bias = self.bias.get(i).map_or(0.0, |bias| f64::from(*bias));
            let products = weights.iter().zip(vector);
            let sum = products.fold(bias, |sum, (w, x)| sum + f64::from(*w) * x);
            if self.has_tanh { libm::tanh(sum) } else { sum }
        };
        let rows = self.weights.chunks_exact(self.inputs);
        rows.enumerate().map(row).collect()
    }
}

/// Values of a tensor of this shape.
fn floats(tensor: &Tensor, shape: &[usize]) -> Result<Vec<f32>, Error> {
    if tensor.shape != shape || shape.contains(&0) {
        return Err(Error::Shape {
            name: tensor.name.clone(),
            got: tensor.shape.clone(),
            expected: shape.to_vec(),
        });
    }
    let bytes = tensor.bytes.clone().arrived()?;
    let mut values = vec![0.0; shape.iter().product()];
    storage::dequantise(tensor.block_type, &bytes, &mut values);
    Ok(values)
}
