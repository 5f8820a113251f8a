//! Files of adapters: PEFT's form, MLX's and GGUF's.
//!
//! ```text
//! PEFT  adapter_config.json, adapter_model.safetensors
//!       base_model.model.model.layers.I.BLOCK.NAME.lora_A.weight (r, in), .lora_B.weight (out, r)
//! MLX   adapter_config.json, adapters.safetensors
//!       model.layers.I.BLOCK.NAME.lora_a (in, r), .lora_b (r, out); scale for alpha / r
//! GGUF  adapter.gguf, see `gguf`
//! ```
//!
//! Values are never changed by a conversion, only turned: f32 both ways.

mod base;
mod error;
mod gguf;
pub mod tensors;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use self::tensors::Named;
use crate::{AdapterId, AdapterPair, LayerRole, Nth};

pub use base::base_name;
pub use error::Error;
pub use gguf::Base;

/// Matrices of a layer that may have an adapter: their part and their name in PEFT's files.
pub const TARGETS: [(LayerRole, &str, &str); 7] = [
    (LayerRole::Query, "self_attn", "q_proj"),
    (LayerRole::Key, "self_attn", "k_proj"),
    (LayerRole::Value, "self_attn", "v_proj"),
    (LayerRole::AttentionOutput, "self_attn", "o_proj"),
    (LayerRole::Gate, "mlp", "gate_proj"),
    (LayerRole::Up, "mlp", "up_proj"),
    (LayerRole::Down, "mlp", "down_proj"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Hugging Face's.
    Peft,
    /// That of `mlx_lm.lora`.
    Mlx,
    /// That of llama.cpp.
    Gguf,
}

/// File names of weights, by form.
const PEFT_FILE: &str = "adapter_model.safetensors";
const MLX_FILE: &str = "adapters.safetensors";
const GGUF_FILE: &str = "adapter.gguf";
const CONFIG: &str = "adapter_config.json";

/// Prefix of tensor names in PEFT's form.
const PREFIX: &str = "base_model.model.";

/// An adapter, its tensors under PEFT's names.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Inner dimension of every pair.
    pub rank: usize,
    /// Factor of a pair's product, times the rank.
    pub alpha: f64,
    /// The model that it is for, as the file says it.
    pub base: Option<String>,
    /// Share of inputs that were left out while it was trained.
    pub dropout: f64,
    tensors: Vec<Named>,
}

#[derive(Clone, Copy, Debug)]
pub struct PairOf<'a> {
    /// Name of the matrix, such as `model.layers.0.mlp.up_proj`.
    pub matrix: &'a str,
    /// Outputs of the matrix.
    pub rows: usize,
    /// Inputs of the matrix.
    pub cols: usize,
    /// (rank, cols)
    pub a: &'a [f32],
    /// (rows, rank)
    pub b: &'a [f32],
}

impl Adapter {
    /// An adapter of these tensors, with PEFT's names.
    pub fn new(rank: usize, alpha: f64, base: Option<String>, mut tensors: Vec<Named>) -> Self {
        tensors.sort_by(|a, b| order(&a.0).cmp(&order(&b.0)));
        Self {
            rank,
            alpha,
            base,
            dropout: 0.0,
            tensors,
        }
    }

    /// Factor of a pair's product.
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    pub fn numbers(&self) -> usize {
        self.tensors.iter().map(|(_, _, values)| values.len()).sum()
    }

    /// Reads a folder, or the file of weights in one.
    ///
    /// # Errors
    /// [`Error::Malformed`] with what is wrong or not supported; [`Error::File`].
    pub fn read(path: &Path) -> Result<(Self, Form), Error> {
        Self::read_for(path, None)
    }

    /// The same of an adapter for a known model, which GGUF files of others are read by.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn read_for(path: &Path, base: Option<Base>) -> Result<(Self, Form), Error> {
        std::fs::metadata(path).map_err(Error::file("read", path))?;
        let of_folder = path.join(GGUF_FILE);
        let is_gguf = |path: &Path| path.extension().is_some_and(|end| end == "gguf");
        if !path.is_dir() && is_gguf(path) {
            return Ok((gguf::read(path, base)?, Form::Gguf));
        }
        if !path.join(CONFIG).exists() && of_folder.is_file() {
            return Ok((gguf::read(&of_folder, base)?, Form::Gguf));
        }
        let folder = match path.is_dir() {
            true => path,
            false => path.parent().unwrap_or(Path::new(".")),
        };
        let config_path = folder.join(CONFIG);
        let malformed = |reason: String| Error::malformed(&config_path, reason);
        let text = std::fs::read(&config_path).map_err(Error::file("read", &config_path))?;
        let config: Value = serde_json::from_slice(&text).map_err(|e| malformed(e.to_string()))?;
        let form = match config.get("peft_type") {
            Some(_) => Form::Peft,
            None if config.get("fine_tune_type").is_some() => Form::Mlx,
            None => {
                let reason = "has neither peft_type (PEFT) nor fine_tune_type (MLX)";
                return Err(malformed(reason.to_owned()));
            }
        };
        let weights = weights_file(folder, form);
        let (sizes, base, dropout) = match form {
            Form::Mlx => {
                let dropout = &config["lora_parameters"]["dropout"];
                (mlx_sizes(&config), &config["model"], dropout)
            }
            Form::Peft | Form::Gguf => {
                let (base, dropout) = (&config["base_model_name_or_path"], &config["lora_dropout"]);
                (peft_sizes(&config), base, dropout)
            }
        };
        let (rank, alpha) = sizes.map_err(malformed)?;
        let tensors = tensors::read(&weights)?;
        let tensors = match form {
            Form::Mlx => Ok(tensors.into_iter().map(from_mlx).collect()),
            Form::Peft | Form::Gguf => without_adapter_name(tensors),
        };
        let tensors = tensors.map_err(|reason| Error::malformed(&weights, reason))?;
        let adapter = Self {
            dropout: dropout.as_f64().unwrap_or(0.0),
            ..Self::new(rank, alpha, base.as_str().map(str::to_owned), tensors)
        };
        adapter.check(&weights)?;
        Ok((adapter, form))
    }

    /// Writes a GGUF file into `folder`, which is made.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a matrix that has no name there; [`Error::File`].
    pub fn write_gguf(&self, folder: &Path, base: Base) -> Result<(), Error> {
        std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        gguf::write(self, &folder.join(GGUF_FILE), base)
    }

    /// Writes both files of PEFT's or MLX's form into `folder`, which is made.
    ///
    /// # Errors
    /// [`Error::File`].
    ///
    /// # Panics
    /// For GGUF's form, which needs a base: [`write_gguf`](Self::write_gguf).
    pub fn write(&self, folder: &Path, form: Form) -> Result<(), Error> {
        std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        let (file, config, turned): (_, _, Vec<Named>) = match form {
            Form::Gguf => panic!("GGUF's form is written by `write_gguf`"),
            Form::Peft => (PEFT_FILE, self.peft_config(), self.tensors.clone()),
            Form::Mlx => {
                let turned = self.tensors.iter().map(to_mlx).collect();
                (MLX_FILE, self.mlx_config(), turned)
            }
        };
        let borrowed = turned
            .iter()
            .map(|(name, shape, x)| (&**name, &**shape, &**x));
        tensors::write(&folder.join(file), &borrowed.collect::<Vec<_>>())?;
        let config = serde_json::to_string_pretty(&config).unwrap_or_default();
        let config = config.as_bytes();
        tensors::replace(&folder.join(CONFIG), |file| file.write_all(config))
    }

    /// The pairs, in order of layers.
    pub fn pairs<'a>(&'a self) -> Vec<PairOf<'a>> {
        let (twos, _) = self.tensors.as_chunks::<2>();
        let pair = |two: &'a [Named; 2]| {
            let [a, b] = two;
            PairOf {
                matrix: matrix_of(&a.0).unwrap_or_default(),
                rows: b.1[0],
                cols: a.1[1],
                a: &a.2,
                b: &b.2,
            }
        };
        twos.iter().map(pair).collect()
    }

    /// SHA-256 of its scale and pairs: the same in every form.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.scale().to_le_bytes());
        for pair in self.pairs() {
            for len in [pair.matrix.len(), pair.a.len(), pair.b.len()] {
                hash.update((len as u64).to_le_bytes());
            }
            hash.update(pair.matrix);
            for values in [pair.a, pair.b] {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                hash.update(bytes);
            }
        }
        hash.finalize().into()
    }

    /// The adapter as a model holds it, under a name. `from` is the path it was read from.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a matrix that no model has. Whether a certain model has it is for
    /// [`crate::Adapter::check`] to say.
    pub fn beside(&self, name: &str, from: &Path) -> Result<crate::Adapter, Error> {
        let pair = |pair: PairOf<'_>| {
            let none = || Error::malformed(from, format!("no model has a matrix {}", pair.matrix));
            let (layer, part) = role_of(pair.matrix).ok_or_else(none)?;
            Ok::<_, Error>(AdapterPair {
                layer,
                part,
                rank: self.rank,
                a: pair.a.to_vec(),
                b: pair.b.to_vec(),
            })
        };
        let pairs = self.pairs().into_iter().map(pair);
        let (name, digest) = (name.to_owned(), self.digest());
        Ok(crate::Adapter {
            id: AdapterId { name, digest },
            scale: self.scale(),
            pairs: pairs.collect::<Result<_, Error>>()?,
        })
    }

    /// Short names of the matrices that have pairs.
    pub fn targets(&self) -> Vec<String> {
        let short = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
        let matrices = self.tensors.iter().filter_map(|t| matrix_of(&t.0));
        let mut names: Vec<String> = matrices.map(short).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Numbers of layers that have pairs, where the first ones have none.
    fn layers(&self) -> Option<Vec<usize>> {
        let layers = self.tensors.iter().map(|(name, _, _)| order(name).0);
        let mut layers: Vec<usize> = layers.collect();
        layers.dedup();
        (layers.first() != Some(&0)).then_some(layers)
    }

    /// Whether all tensors are pairs that fit each other.
    fn check(&self, path: &Path) -> Result<(), Error> {
        let mut names = self.tensors.iter().map(|(name, ..)| name);
        if let Some(name) = names.find(|name| matrix_of(name).is_none()) {
            let reason = format!(
                "tensor {name} is not supported: an adapter has pairs of \
                 {PREFIX}MATRIX.lora_A.weight and .lora_B.weight"
            );
            return Err(Error::malformed(path, reason));
        }
        let (twos, rest) = self.tensors.as_chunks::<2>();
        if let Some((name, _, _)) = rest.first() {
            let reason = format!("tensor {name} has no other half");
            return Err(Error::malformed(path, reason));
        }
        for [a, b] in twos {
            let halves = a.0.ends_with("lora_A.weight") && b.0.ends_with("lora_B.weight");
            if !halves || matrix_of(&a.0) != matrix_of(&b.0) {
                let reason = format!("tensors {} and {} are of different matrices", a.0, b.0);
                return Err(Error::malformed(path, reason));
            }
            let fits =
                a.1.len() == 2 && b.1.len() == 2 && a.1[0] == self.rank && b.1[1] == self.rank;
            if !fits {
                let reason = format!(
                    "{} is {:?} and {} is {:?}, expected rank {}",
                    a.0, a.1, b.0, b.1, self.rank
                );
                return Err(Error::malformed(path, reason));
            }
        }
        Ok(())
    }

    /// The base, unless it is a GGUF file: PEFT and MLX take a folder or a repository.
    pub fn base_with_weights(&self) -> Option<&str> {
        let base = self.base.as_deref();
        base.filter(|base| Path::new(base).extension().is_none_or(|end| end != "gguf"))
    }

    fn peft_config(&self) -> Value {
        json!({
            "base_model_name_or_path": self.base_with_weights(),
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": number(self.alpha),
            "layers_to_transform": self.layers(),
            "lora_dropout": self.dropout,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": self.targets(),
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": false,
        })
    }

    fn mlx_config(&self) -> Value {
        let mut keys: Vec<String> = self.pairs().iter().map(|p| mlx_key(p.matrix)).collect();
        keys.sort_unstable();
        keys.dedup();
        json!({
            "fine_tune_type": "lora",
            "model": self.base_with_weights(),
            "num_layers": -1,
            "lora_parameters": {
                "rank": self.rank,
                "dropout": self.dropout,
                "scale": self.alpha / self.rank as f64,
                "keys": keys,
            },
        })
    }
}

/// A JSON number; integers without a fraction, as PEFT writes them.
fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e9 {
        json!(x as i64)
    } else {
        json!(x)
    }
}

/// `BLOCK.NAME` of a matrix.
fn mlx_key(matrix: &str) -> String {
    matrix.splitn(4, '.').last().unwrap_or_default().to_owned()
}

/// The matrix of a tensor with PEFT's name.
fn matrix_of(name: &str) -> Option<&str> {
    let stem = name.strip_prefix(PREFIX)?;
    stem.strip_suffix(".lora_A.weight")
        .or_else(|| stem.strip_suffix(".lora_B.weight"))
}

/// Tensors by PEFT's names. `state_dict()` and DeepSpeed leave the adapter's own name in them, such
/// as `lora_A.default.weight`.
///
/// # Errors
/// Adapters of several names.
fn without_adapter_name(tensors: Vec<Named>) -> Result<Vec<Named>, String> {
    let own_name = |name: &str| {
        let mut halves = [".lora_A.", ".lora_B."].into_iter();
        let (_, rest) = halves.find_map(|half| name.split_once(half))?;
        Some(rest.strip_suffix(".weight")?.to_owned())
    };
    let mut names: Vec<String> = tensors.iter().filter_map(|t| own_name(&t.0)).collect();
    names.sort_unstable();
    names.dedup();
    let [own] = names.as_slice() else {
        return match names.is_empty() {
            true => Ok(tensors),
            false => Err(format!(
                "has the adapters {}, expected one",
                names.join(", ")
            )),
        };
    };
    let shorter = |name: String| match name.strip_suffix(&format!(".{own}.weight")) {
        Some(stem) => format!("{stem}.weight"),
        None => name,
    };
    let tensors = tensors.into_iter();
    let renamed = tensors.map(|(name, shape, values)| (shorter(name), shape, values));
    Ok(renamed.collect())
}

/// Layers by number, and in them the order of names.
fn order(name: &str) -> (usize, &str) {
    let layer = name.split('.').find_map(|part| part.parse().ok());
    (layer.unwrap_or(usize::MAX), name)
}

fn turned(shape: &[usize], values: &[f32]) -> (Vec<usize>, Vec<f32>) {
    let [rows, cols] = *shape else {
        return (shape.to_vec(), values.to_vec());
    };
    let mut out = Vec::with_capacity(values.len());
    for col in 0..cols {
        out.extend((0..rows).map(|row| values[row * cols + col]));
    }
    (vec![cols, rows], out)
}

fn from_mlx((name, shape, values): Named) -> Named {
    let name = match name.rsplit_once('.') {
        Some((stem, "lora_a")) => format!("{PREFIX}{stem}.lora_A.weight"),
        Some((stem, "lora_b")) => format!("{PREFIX}{stem}.lora_B.weight"),
        _ => name,
    };
    let (shape, values) = turned(&shape, &values);
    (name, shape, values)
}

fn to_mlx((name, shape, values): &Named) -> Named {
    let half = match name.ends_with("lora_A.weight") {
        true => "lora_a",
        false => "lora_b",
    };
    let name = format!("{}.{half}", matrix_of(name).unwrap_or(name));
    let (shape, values) = turned(shape, values);
    (name, shape, values)
}

/// Rank and alpha of PEFT's configuration.
fn peft_sizes(config: &Value) -> Result<(usize, f64), String> {
    let kind = &config["peft_type"];
    if kind != "LORA" {
        return Err(format!("peft_type is {kind}, expected \"LORA\""));
    }
    for field in ["use_dora", "fan_in_fan_out"] {
        if config[field] == true {
            return Err(format!("{field} is not supported"));
        }
    }
    for field in ["rank_pattern", "alpha_pattern", "modules_to_save"] {
        let value = &config[field];
        let is_empty = value.is_null()
            || value.as_object().is_some_and(serde_json::Map::is_empty)
            || value.as_array().is_some_and(Vec::is_empty);
        if !is_empty {
            return Err(format!("{field} is {value}, which is not supported"));
        }
    }
    let rank = rank(&config["r"])?;
    let alpha = config["lora_alpha"].as_f64();
    let alpha = alpha.ok_or("lora_alpha is missing")?;
    let factor = match config["use_rslora"] == true {
        true => libm::sqrt(rank as f64),
        false => 1.0,
    };
    Ok((rank, alpha * factor))
}

/// Rank and alpha of MLX's configuration.
fn mlx_sizes(config: &Value) -> Result<(usize, f64), String> {
    let kind = &config["fine_tune_type"];
    if kind != "lora" {
        return Err(format!("fine_tune_type is {kind}, expected \"lora\""));
    }
    let parameters = &config["lora_parameters"];
    let rank = rank(&parameters["rank"])?;
    let scale = parameters["scale"].as_f64();
    let scale = scale.ok_or("lora_parameters.scale is missing")?;
    Ok((rank, scale * rank as f64))
}

fn rank(value: &Value) -> Result<usize, String> {
    let rank = value.as_u64().filter(|rank| (1..=1 << 16).contains(rank));
    let rank = rank.and_then(|rank| usize::try_from(rank).ok());
    rank.ok_or_else(|| format!("the rank is {value}, expected 1 to 65536"))
}

/// Path of an adapter's weights in a folder.
pub fn weights_file(folder: &Path, form: Form) -> PathBuf {
    folder.join(match form {
        Form::Peft => PEFT_FILE,
        Form::Mlx => MLX_FILE,
        Form::Gguf => GGUF_FILE,
    })
}

/// The layer and the part of a matrix with a name of Hugging Face's. Of experts the number alone is
/// known, and not how many there are.
pub fn role_of(matrix: &str) -> Option<(usize, LayerRole)> {
    let (layer, rest) = matrix.strip_prefix("model.layers.")?.split_once('.')?;
    let (block, name) = rest.rsplit_once('.')?;
    let found = TARGETS.iter().find(|(_, b, n)| *b == block && *n == name);
    let role = found.map_or_else(|| expert_role(block, name), |found| Some(found.0));
    Some((layer.parse().ok()?, role?))
}

/// The part of a matrix of an expert.
fn expert_role(block: &str, name: &str) -> Option<LayerRole> {
    use LayerRole::{ExpertDown, ExpertGate, ExpertUp, SharedDown, SharedGate, SharedUp};
    let names = [["gate_proj", "w1"], ["up_proj", "w3"], ["down_proj", "w2"]];
    let kind = names.iter().position(|names| names.contains(&name))?;
    if let "mlp.shared_expert" | "mlp.shared_experts" = block {
        return Some([SharedGate, SharedUp, SharedDown][kind]);
    }
    let routed = ["mlp.experts.", "block_sparse_moe.experts."];
    let index = routed.iter().find_map(|stem| block.strip_prefix(stem))?;
    let (index, of) = (index.parse().ok()?, 0);
    Some([ExpertGate, ExpertUp, ExpertDown][kind](Nth { index, of }))
}

/// Row of a file whose heads have pairs of neighbours (`heads` is their size), for a row of heads
/// by halves: llama.cpp's `permute`.
pub fn file_row(row: usize, heads: Option<usize>) -> usize {
    let Some(size) = heads else { return row };
    let (head, i) = (row / size, row % size);
    let half = size / 2;
    head * size + 2 * (i % half) + i / half
}
