//! Adapters as GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them.
//!
//! ```text
//! general.type "adapter", general.architecture, adapter.type "lora", adapter.lora.alpha (f32)
//! blk.I.attn_q.weight.lora_a (r, in), .lora_b (out, r)
//! blk.I.ffn_up_exps.weight.lora_a (experts, r, in), .lora_b (experts, out, r)
//! ```
//! Experts without a pair are zeros in stacks.
//! Files of the architecture `llama` have the rows of queries and keys, and so of their `lora_b`,
//! as pairs of neighbours. They are turned both ways, by the size of the base's heads. Our files
//! say it (`paceline.head_dim`); for others the base is needed.

use std::collections::BTreeMap;
use std::path::Path;

use paceline_tensor::storage;
use paceline_weights::gguf::{Gguf, MetadataValue, testing::GgufWriter};

use super::tensors::{self, Named};
use super::{Adapter, Error, PREFIX, file_row, matrix_of, order, role_of};
use crate::{Config, ModelFamily};

/// Name in GGUF files of each of our matrices, by block and name.
const NAMES: [(&str, &str); 13] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
];

/// Names of a routed expert's matrices in PEFT's files and in Mixtral's, and of their stack here.
const STACKS: [([&str; 2], &str); 3] = [
    (["gate_proj", "w1"], "ffn_gate_exps"),
    (["up_proj", "w3"], "ffn_up_exps"),
    (["down_proj", "w2"], "ffn_down_exps"),
];

const ALPHA: &str = "adapter.lora.alpha";
const HEAD_DIM: &str = "paceline.head_dim";
const BASE: &str = "general.base_model.0.name";

/// Facts about the base model that an adapter file in GGUF depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    family: ModelFamily,
    head_dim: usize,
    /// Of a layer.
    experts: usize,
}

impl Base {
    /// That of a model.
    pub fn of(config: &Config) -> Self {
        Self {
            family: config.family,
            head_dim: config.layers.first().map_or(0, |layer| layer.head_dim),
            experts: config.experts().map_or(0, |experts| experts.count),
        }
    }
}

/// Reads a file. `base` is needed where its rows are turned and it does not say by what.
pub(super) fn read(path: &Path, base: Option<Base>) -> Result<Adapter, Error> {
    let bad = |error: paceline_weights::gguf::Error| Error::malformed(path, error);
    let file = Gguf::open(path).map_err(bad)?;
    let about = file.metadata();
    let text = |key: &str| about.opt_str(key).map_err(bad);
    for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let got = text(key)?.unwrap_or("absent");
        if got != expected {
            let reason = format!("{key} is {got}, expected {expected}");
            return Err(Error::malformed(path, reason));
        }
    }
    let is_turned = text("general.architecture")? == Some("llama");
    let own = about.opt_u32(HEAD_DIM).map_err(bad)?;
    let heads = own.map(|n| n as usize).or(base.map(|base| base.head_dim));
    if is_turned && heads.is_none_or(|n| n == 0 || !n.is_multiple_of(2)) {
        let reason = "the order of rows of queries and keys follows from the base: --base MODEL";
        return Err(Error::malformed(path, reason));
    }
    let heads = heads.filter(|_| is_turned);
    let alpha = about.f32(ALPHA).map_err(bad)?;
    let mut found: Vec<Named> = Vec::new();
    for info in file.tensors() {
        let tensor = file.tensor(info.name()).map_err(bad)?;
        let mut values = vec![0.0; tensor.shape.iter().product()];
        storage::dequantise(tensor.block_type, &tensor.bytes, &mut values);
        if let ([count, shape @ ..], Some(stack)) = (&*tensor.shape, Halves::named(info.name())) {
            found.extend(stack.split((*count, shape), &values));
            continue;
        }
        let ours = ours(info.name());
        let (name, is_query_or_key) = ours.ok_or_else(|| {
            let reason = format!("tensor {} is no half of a pair of LoRA", info.name());
            Error::malformed(path, reason)
        })?;
        if is_query_or_key && name.ends_with("lora_B.weight") {
            values = turned(&tensor.shape, &values, heads, path)?.from_file;
        }
        found.push((name, tensor.shape.clone(), values));
    }
    found.sort_by(|a, b| order(&a.0).cmp(&order(&b.0)));
    drop_zeros(&mut found);
    let rank = found
        .first()
        .and_then(|(_, shape, _)| shape.first().copied());
    let adapter = Adapter {
        rank: rank.unwrap_or(0),
        alpha: f64::from(alpha),
        base: text(BASE)?.map(str::to_owned),
        dropout: 0.0,
        tensors: found,
    };
    adapter.check(path)?;
    Ok(adapter)
}

/// Writes a file.
pub(super) fn write(adapter: &Adapter, path: &Path, base: Base) -> Result<(), Error> {
    let is_turned = base.family == ModelFamily::Llama;
    let mut writer = GgufWriter::new()
        .meta("general.type", MetadataValue::String("adapter".to_owned()))
        .meta(
            "general.architecture",
            MetadataValue::String(base.family.name().to_owned()),
        )
        .meta("adapter.type", MetadataValue::String("lora".to_owned()))
        .meta(ALPHA, MetadataValue::F32(adapter.alpha as f32));
    if let Some(name) = adapter.base_with_weights() {
        writer = writer.meta(BASE, MetadataValue::String(name.to_owned()));
    }
    if is_turned {
        writer = writer.meta(HEAD_DIM, MetadataValue::U32(base.head_dim as u32));
    }
    let mut stacks: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (name, shape, values) in &adapter.tensors {
        if let Some((stack, index)) = Halves::of(name).filter(|(_, index)| *index < base.experts) {
            let sizes = [&[base.experts], &**shape].concat();
            let zeros = || (sizes, vec![0.0; base.experts * values.len()]);
            let (_, all) = stacks.entry(stack.name()).or_insert_with(zeros);
            if let Some(place) = all.chunks_mut(values.len()).nth(index) {
                place.copy_from_slice(values);
            }
            continue;
        }
        let (theirs, is_query_or_key) = theirs(name).ok_or_else(|| {
            let reason = format!("tensor {name} has no name in GGUF files");
            Error::malformed(path, reason)
        })?;
        let is_b = name.ends_with("lora_B.weight");
        let heads = Some(base.head_dim).filter(|_| is_turned);
        writer = match is_query_or_key && is_b {
            true => {
                let rows = turned(shape, values, heads, path)?;
                writer.f32s(&theirs, shape, &rows.to_file)
            }
            false => writer.f32s(&theirs, shape, values),
        };
    }
    for (name, (shape, values)) in &stacks {
        writer = writer.f32s(name, shape, values);
    }
    let bytes = writer.to_bytes();
    tensors::replace(path, |file| file.write_all(&bytes))
}

/// The A or the B matrices of all pairs of a layer's experts.
struct Halves {
    layer: usize,
    /// Index into [`STACKS`].
    kind: usize,
    is_a: bool,
}

impl Halves {
    /// The stack of an expert's half by PEFT's name, and the expert.
    fn of(name: &str) -> Option<(Self, usize)> {
        let (layer, part) = role_of(matrix_of(name)?)?;
        let index = part
            .expert_among(usize::MAX)
            .filter(|own| *own < usize::MAX)?;
        let last = matrix_of(name)?.rsplit('.').next()?;
        let kind = STACKS.iter().position(|(names, _)| names.contains(&last))?;
        let is_a = name.ends_with("lora_A.weight");
        Some((Self { layer, kind, is_a }, index))
    }

    /// The stack by a tensor's name in a file.
    fn named(name: &str) -> Option<Self> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (matrix, half) = rest.split_once(".weight.")?;
        let kind = STACKS.iter().position(|(_, theirs)| *theirs == matrix)?;
        let (layer, is_a) = (layer.parse().ok()?, half == "lora_a");
        (is_a || half == "lora_b").then_some(Self { layer, kind, is_a })
    }

    fn name(&self) -> String {
        let half = if self.is_a { "lora_a" } else { "lora_b" };
        format!("blk.{}.{}.weight.{half}", self.layer, STACKS[self.kind].1)
    }

    /// The halves of `count` experts, under PEFT's names.
    fn split(&self, (count, shape): (usize, &[usize]), values: &[f32]) -> Vec<Named> {
        let ([name, _], half) = (
            STACKS[self.kind].0,
            if self.is_a { "lora_A" } else { "lora_B" },
        );
        let stem = format!("{PREFIX}model.layers.{}.mlp.experts", self.layer);
        let own = values.chunks((values.len() / count.max(1)).max(1));
        let each = own.enumerate().map(|(index, own)| {
            let name = format!("{stem}.{index}.{name}.{half}.weight");
            (name, shape.to_vec(), own.to_vec())
        });
        each.collect()
    }
}

/// Leaves out the pairs of experts that have none: both halves are zeros.
fn drop_zeros(tensors: &mut Vec<Named>) {
    let is_zero = |t: &Named| Halves::of(&t.0).is_some() && t.2.iter().all(|x| *x == 0.0);
    let is_left_out = |pair: &[Named]| pair.len() == 2 && pair.iter().all(is_zero);
    let kept = tensors.chunks(2).filter(|pair| !is_left_out(pair));
    *tensors = kept.flatten().cloned().collect();
}

/// Rows in both orders.
struct Turned {
    from_file: Vec<f32>,
    to_file: Vec<f32>,
}

fn turned(
    shape: &[usize],
    values: &[f32],
    heads: Option<usize>,
    path: &Path,
) -> Result<Turned, Error> {
    let [rows, cols] = *shape else {
        return Err(Error::malformed(
            path,
            format!("a factor of sizes {shape:?}"),
        ));
    };
    if heads.is_some_and(|size| size == 0 || !rows.is_multiple_of(size)) {
        let reason = format!("{rows} rows are no whole number of heads of {heads:?}");
        return Err(Error::malformed(path, reason));
    }
    let mut both = Turned {
        from_file: vec![0.0; values.len()],
        to_file: vec![0.0; values.len()],
    };
    for ours in 0..rows {
        let theirs = file_row(ours, heads) * cols;
        let ours = ours * cols;
        both.from_file[ours..ours + cols].copy_from_slice(&values[theirs..theirs + cols]);
        both.to_file[theirs..theirs + cols].copy_from_slice(&values[ours..ours + cols]);
    }
    Ok(both)
}

/// PEFT's name of a tensor of a GGUF file, and whether it is of a query or a key.
fn ours(name: &str) -> Option<(String, bool)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (matrix, half) = rest.split_once(".weight.")?;
    let (place, _) = NAMES.iter().find(|(_, theirs)| *theirs == matrix)?;
    let half = match half {
        "lora_a" => "lora_A",
        "lora_b" => "lora_B",
        _ => return None,
    };
    let layer: usize = layer.parse().ok()?;
    let name = format!("{PREFIX}model.layers.{layer}.{place}.{half}.weight");
    Some((name, matches!(matrix, "attn_q" | "attn_k")))
}

/// The other way.
fn theirs(name: &str) -> Option<(String, bool)> {
    let matrix = matrix_of(name)?;
    let (layer, place) = matrix.strip_prefix("model.layers.")?.split_once('.')?;
    let (_, theirs) = NAMES.iter().find(|(ours, _)| *ours == place)?;
    let half = if name.ends_with("lora_A.weight") {
        "lora_a"
    } else {
        "lora_b"
    };
    let name = format!("blk.{layer}.{theirs}.weight.{half}");
    Some((name, matches!(*theirs, "attn_q" | "attn_k")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter() -> Adapter {
        let tensor = |name: &str, half: &str, shape: [usize; 2]| -> Named {
            let values = (0..shape[0] * shape[1]).map(|i| i as f32 * 0.37).collect();
            let name = format!("{PREFIX}model.layers.1.self_attn.{name}.{half}.weight");
            (name, shape.to_vec(), values)
        };
        let tensors = vec![
            tensor("q_proj", "lora_A", [2, 12]),
            tensor("q_proj", "lora_B", [8, 2]),
            tensor("v_proj", "lora_A", [2, 12]),
            tensor("v_proj", "lora_B", [4, 2]),
        ];
        let of_expert = |(name, shape, values): Named| {
            let name = name.replace("self_attn", "mlp.experts.2");
            (name.replace("v_proj", "up_proj"), shape, values)
        };
        let experts: Vec<Named> = tensors[2..].iter().cloned().map(of_expert).collect();
        let tensors = [tensors, experts].concat();
        Adapter::new(2, 5.0, Some("base".to_owned()), tensors)
    }

    #[test]
    fn files_come_back_and_rows_of_queries_are_turned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter.gguf");
        let base = Base {
            family: ModelFamily::Llama,
            head_dim: 4,
            experts: 3,
        };
        write(&adapter(), &path, base).unwrap();
        assert_eq!(read(&path, None).unwrap(), adapter());
        let file = Gguf::open(&path).unwrap();
        let values = |name: &str| {
            let tensor = file.tensor(name).unwrap();
            let mut values = vec![0.0; tensor.shape.iter().product()];
            storage::dequantise(tensor.block_type, &tensor.bytes, &mut values);
            values
        };
        let (turned, plain) = (
            values("blk.1.attn_q.weight.lora_b"),
            values("blk.1.attn_v.weight.lora_b"),
        );
        // Heads of four: rows 0, 1, 2, 3 lie as 0, 2, 1, 3.
        let of = |name: &str| {
            let mut all = adapter().tensors.into_iter();
            all.find(|t| t.0.contains(name) && t.1[1] == 2).unwrap().2
        };
        assert_eq!(turned[2..4], of("q_proj")[4..6]);
        assert_eq!(plain, of("v_proj"));
        let stack = file.tensor("blk.1.ffn_up_exps.weight.lora_b").unwrap();
        assert_eq!(stack.shape, [3, 4, 2]);
        let qwen = Base {
            family: ModelFamily::Qwen3,
            ..base
        };
        write(&adapter(), &path, qwen).unwrap();
        assert_eq!(read(&path, None).unwrap(), adapter());
    }

    #[test]
    fn files_of_others_need_the_base_and_those_that_lie_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter.gguf");
        let writer = || {
            GgufWriter::new()
                .meta("general.type", MetadataValue::String("adapter".to_owned()))
                .meta(
                    "general.architecture",
                    MetadataValue::String("llama".to_owned()),
                )
                .meta("adapter.type", MetadataValue::String("lora".to_owned()))
                .meta(ALPHA, MetadataValue::F32(4.0))
        };
        let half = |half: &str, shape: &[usize]| {
            let n = shape.iter().product();
            (
                format!("blk.0.attn_k.weight.{half}"),
                shape.to_vec(),
                vec![1.0; n],
            )
        };
        let (a, b) = (half("lora_a", &[2, 4]), half("lora_b", &[4, 2]));
        writer()
            .f32s(&a.0, &a.1, &a.2)
            .f32s(&b.0, &b.1, &b.2)
            .write(&path);
        let error = read(&path, None).unwrap_err().to_string();
        assert!(error.contains("--base"), "{error}");
        let base = Base {
            family: ModelFamily::Llama,
            head_dim: 4,
            experts: 3,
        };
        assert_eq!(read(&path, Some(base)).unwrap().rank, 2);
        let odd = Base {
            head_dim: 8,
            ..base
        };
        assert!(read(&path, Some(odd)).is_err());
        writer()
            .f32s("blk.0.ffn_norm.weight", &[4], &[1.0; 4])
            .write(&path);
        let error = read(&path, Some(base)).unwrap_err().to_string();
        assert!(error.contains("ffn_norm"), "{error}");
    }
}
