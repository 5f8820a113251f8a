//! A model with an adapter in its matrices: `W + s B A`, as f32.
//!
//! Matrices without an adapter stay as they are stored. A folder gives a folder, a GGUF file a
//! GGUF file. Of an MLX folder the changed matrices lose their scales, and so are plain ones.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

use paceline_base::BlockType;
use paceline_model::LayerRole::{ExpertDown, ExpertGate, ExpertUp};
use paceline_model::adapter::files::{Adapter, PairOf, file_row, role_of, tensors};
use paceline_model::{Config, LayerRole, LayerShape, ModelSource, Nth, Role};
use paceline_tensor::chain::{ProductOutput, Sizes, Strided};
use paceline_tensor::{Kernels, RopePairs, storage};
use paceline_weights::gguf::{Gguf, testing::GgufWriter};
use paceline_weights::hf::HfFolder;
use paceline_weights::tensor::Tensor;
use serde_json::{Map, json};

use crate::error::Error;

/// Largest file besides weights that is copied: a tokenizer has at most some ten megabytes.
const BESIDE_MAX: u64 = 64 << 20;

/// Replacements of a file's tensors.
type Changed = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Writes the model at `model` with `adapter` in it to `output`: a folder, or a GGUF file. Gives
/// the path to open.
///
/// # Errors
/// [`Error::Files`], also when the adapter does not fit the model; what is wrong with the model.
pub fn fuse(
    model: &Path,
    (adapter, from): (&Adapter, &Path),
    output: &Path,
    kernels: &Kernels,
) -> Result<PathBuf, Error> {
    let source = ModelSource::open(model)?;
    let config = Config::read(&source)?;
    if config.family.joins_qkv() {
        let reason = "the model has queries, keys and values in one matrix";
        return Err(Error::malformed(from, reason));
    }
    let mut changed = Changed::new();
    for pair in adapter.pairs() {
        let (layer, part) = role_of(pair.matrix)
            .filter(|(layer, _)| *layer < config.layers.len())
            .ok_or_else(|| {
                Error::malformed(from, format!("the model has no matrix {}", pair.matrix))
            })?;
        let part = of_model(part, &config.layers[layer]);
        let tensor = source.weight(config.family, Role::Layer(layer, part))?;
        if tensor.shape != [pair.rows, pair.cols] {
            let reason = format!(
                "{} is {:?} in the model, and [{}, {}] in the adapter",
                pair.matrix, tensor.shape, pair.rows, pair.cols
            );
            return Err(Error::malformed(from, reason));
        }
        let shape = config.layers[layer];
        let turned = config.ropes[shape.rope].pairs == RopePairs::Adjacent
            && matches!(part, LayerRole::Query | LayerRole::Key);
        let heads = turned.then_some(shape.head_dim);
        let Some((name, of)) = stored(&source, &pair, (&tensor, part)) else {
            let reason = format!(
                "{} lies in one tensor with those of other experts, and only stacks of GGUF files \
                 are changed: the CPU serves such adapters without a copy",
                pair.matrix
            );
            return Err(Error::malformed(from, reason));
        };
        let place = of.map_or(0, |nth| nth.index * pair.rows * pair.cols);
        let (_, values) = match changed.entry(name) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(new) => new.insert(whole(&source, &config, (layer, part), of)?),
        };
        add(&pair, adapter.scale(), heads, kernels, &mut values[place..]);
    }
    match &source {
        ModelSource::Hf(folder) => {
            std::fs::create_dir_all(output).map_err(Error::file("make", output))?;
            copy_other_files(folder.path(), output)?;
            write_folder(folder, &changed, &output.join("model.safetensors"))?;
        }
        ModelSource::Gguf(file) => write_gguf(file, &changed, output)?,
    }
    Ok(output.to_owned())
}

/// The name of the tensor that has a pair's matrix, and the matrix's place in a stack of experts.
/// `None` where other matrices are in it too.
fn stored(
    source: &ModelSource,
    pair: &PairOf<'_>,
    (tensor, part): (&Tensor, LayerRole),
) -> Option<(String, Option<Nth>)> {
    let file = match source {
        ModelSource::Gguf(file) => file,
        ModelSource::Hf(folder) => {
            let name = format!("{}.weight", pair.matrix);
            return folder.info(&name).is_some().then_some((name, None));
        }
    };
    let (ExpertGate(nth) | ExpertUp(nth) | ExpertDown(nth)) = part else {
        return Some((tensor.name.clone(), None));
    };
    let stored = file.tensor(&tensor.name).ok()?.shape;
    let is_stack = stored == [nth.of, pair.rows, pair.cols];
    let fits = is_stack || stored == [pair.rows, pair.cols];
    fits.then(|| (tensor.name.clone(), is_stack.then_some(nth)))
}

/// The values of a matrix, or with `of` of all experts' in its place; and their shape.
fn whole(
    source: &ModelSource,
    config: &Config,
    (layer, part): (usize, LayerRole),
    of: Option<Nth>,
) -> Result<(Vec<usize>, Vec<f32>), Error> {
    let (mut shape, mut all) = (Vec::new(), Vec::new());
    for index in 0..of.map_or(1, |nth| nth.of) {
        let own = part.of_other(|nth| {
            if of.is_some() {
                Nth { index, ..nth }
            } else {
                nth
            }
        });
        let tensor = source.weight(config.family, Role::Layer(layer, own))?;
        let start = all.len();
        all.resize(start + tensor.shape.iter().product::<usize>(), 0.0);
        storage::dequantise(tensor.block_type, &tensor.bytes, &mut all[start..]);
        shape = tensor.shape;
    }
    let stack = of.map(|nth| nth.of);
    Ok((stack.into_iter().chain(shape).collect(), all))
}

/// A part of a model's layer, by that of an adapter's name, which does not say how many experts
/// there are.
fn of_model(part: LayerRole, shape: &LayerShape) -> LayerRole {
    let of = shape.experts.map_or(0, |experts| experts.count);
    part.of_other(|nth| Nth { of, ..nth })
}

/// Writes all tensors of a trained model into `output`, with copies of the folder's other files.
pub(crate) fn write_model(
    model: &Path,
    output: &Path,
    found: &[(String, &[usize], &[f32])],
) -> Result<Vec<PathBuf>, Error> {
    copy_other_files(model, output)?;
    let path = output.join("model.safetensors");
    let borrowed = found
        .iter()
        .map(|(name, shape, values)| (name.as_str(), *shape, *values));
    tensors::write(&path, &borrowed.collect::<Vec<_>>())?;
    Ok(vec![path, output.join("config.json")])
}

/// The same, of a file that has all tensors.
pub(crate) fn copy_model(
    model: &Path,
    output: &Path,
    tensors: &Path,
) -> Result<Vec<PathBuf>, Error> {
    copy_other_files(model, output)?;
    let path = output.join("model.safetensors");
    std::fs::copy(tensors, &path).map_err(Error::file("copy", tensors))?;
    Ok(vec![path, output.join("config.json")])
}

/// W + s (B A), each element of B A one chain over the rank.
fn add(pair: &PairOf<'_>, scale: f32, heads: Option<usize>, kernels: &Kernels, values: &mut [f32]) {
    let (m, n, k) = (pair.rows, pair.cols, pair.a.len() / pair.cols);
    let mut delta = vec![0.0; m * n];
    let (a, b) = (Strided::rows(pair.a, n), Strided::rows(pair.b, k));
    kernels.chains(Sizes { m, n, k }, b, a, ProductOutput::rows(&mut delta, n));
    for (row, delta) in delta.chunks(n).enumerate() {
        let at = file_row(row, heads) * n;
        values[at..at + n]
            .iter_mut()
            .zip(delta)
            .for_each(|(w, d)| *w += scale * d);
    }
}

/// Copies a model folder's files other than weights: JSON, templates, tokenizers, texts.
fn copy_other_files(from: &Path, to: &Path) -> Result<(), Error> {
    const ENDINGS: [&str; 4] = ["json", "jinja", "model", "txt"];
    for entry in std::fs::read_dir(from).map_err(Error::file("list", from))? {
        let path = entry.map_err(Error::file("list", from))?.path();
        let ending = path
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default();
        let name = path.file_name().unwrap_or_default();
        let is_index = name.to_string_lossy().ends_with(".index.json");
        let small = path
            .metadata()
            .is_ok_and(|m| m.is_file() && m.len() <= BESIDE_MAX);
        if small && !is_index && ENDINGS.contains(&ending) {
            std::fs::copy(&path, to.join(name)).map_err(Error::file("copy", &path))?;
        }
    }
    Ok(())
}

fn write_folder(folder: &HfFolder, changed: &Changed, path: &Path) -> Result<(), Error> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let (mut start, mut parts) = (0, Vec::new());
    let stems: Vec<&str> = changed
        .keys()
        .filter_map(|name| name.strip_suffix(".weight"))
        .collect();
    for name in folder.names() {
        let is_scale = [".scales", ".biases"].iter().any(|end| {
            name.strip_suffix(end)
                .is_some_and(|stem| stems.contains(&stem))
        });
        if is_scale {
            continue;
        }
        let (dtype, shape, len) = match changed.get(name) {
            Some((shape, values)) => ("F32".to_owned(), shape.clone(), size_of_val(&**values)),
            None => {
                let info = folder.info(name).expect("a name of the folder");
                (
                    info.dtype().to_owned(),
                    info.shape().to_vec(),
                    info.range().len(),
                )
            }
        };
        let range = [start, start + len];
        start += len;
        let of = json!({ "dtype": dtype, "shape": shape, "data_offsets": range });
        header.insert(name.to_owned(), of);
        parts.push(name.to_owned());
    }
    let mut header = serde_json::Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let kept: Vec<_> = parts.iter().map(|name| folder.bytes_of(name)).collect();
    let written = tensors::replace(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        for (name, bytes) in parts.iter().zip(&kept) {
            match (changed.get(name), bytes) {
                (Some((_, values)), _) => tensors::write_floats(file, values)?,
                (None, bytes) => file.write_all(bytes.as_deref().unwrap_or_default())?,
            }
        }
        Ok(())
    });
    Ok(written?)
}

/// Writes a GGUF file. It is made in memory, so it takes as much of that as of the disk.
fn write_gguf(file: &Gguf, changed: &Changed, path: &Path) -> Result<(), Error> {
    let in_model = |error| Error::Model(paceline_model::Error::Gguf(error));
    let mut writer = GgufWriter::new();
    for (key, value) in file
        .metadata()
        .iter()
        .filter(|(key, _)| !key.starts_with("split."))
    {
        writer = writer.meta(key, value.clone());
    }
    for info in file.tensors() {
        writer = match changed.get(info.name()) {
            Some((shape, values)) => writer.f32s(info.name(), shape, values),
            None => {
                let tensor = file.tensor(info.name()).map_err(in_model)?;
                let kind: BlockType = tensor.block_type;
                writer.tensor(info.name(), kind, &tensor.shape, tensor.bytes.to_vec())
            }
        };
    }
    let bytes = writer.to_bytes();
    Ok(tensors::replace(path, |file| file.write_all(&bytes))?)
}
