//! Bytes of matrices in memory: as the CPU's kernels pack them, which is not as files store them.

use paceline_base::BlockType;
use paceline_tensor::PackedMatrix;
use paceline_weights::gguf::{Gguf, TensorInfo};
use paceline_weights::hf::HfFolder;
use paceline_weights::safetensors;
use paceline_weights::scaled::SCALES;

/// Columns of FP8 that share a scale at least.
const SCALE_COLS: usize = 32;

/// Bytes of a tensor in memory, `None` where it has no place in the file.
pub(super) fn of_tensor(file: &Gguf, info: &TensorInfo) -> Option<u64> {
    let stored = info.range()?.len() as u64;
    let Some((&cols, outer @ [_, ..])) = info.shape().split_last() else {
        return Some(stored); // a vector
    };
    // A factor of NVFP4 goes into scales of f32.
    let stem = info.name().strip_suffix("weight");
    let has_factor = stem.is_some_and(|stem| file.has(&format!("{stem}scale")));
    let block_type = match info.block_type().ok()? {
        BlockType::NVFP4 if has_factor => BlockType::FP4,
        other => other,
    };
    let shape = [outer.iter().product(), cols];
    Some(PackedMatrix::planned_bytes(block_type, shape, SCALE_COLS).0)
}

/// Bytes in memory beyond those of the file.
pub(super) fn beyond_file(file: &Gguf) -> f64 {
    let more = file.tensors().filter_map(|info| {
        let stored = info.range()?.len();
        Some(of_tensor(file, info)? as f64 - stored as f64)
    });
    more.sum()
}

/// Whether a tensor is of a table of n-grams. These stay in the files.
fn is_of_table(name: &&str) -> bool {
    name.contains(".ngram_embedding.") || name.contains(".engram.embed.")
}

/// Bytes in memory beyond those of the folder's files: more for matrices with scales in FP8 and
/// NVFP4, less for tables of n-grams.
pub(super) fn beyond_folder(folder: &HfFolder) -> f64 {
    let tables = folder.names().filter(is_of_table);
    let tables = tables.filter_map(|name| Some(folder.info(name)?.range().len() as f64));
    let tables: f64 = tables.sum();
    let matrices = folder.names().filter(|name| !is_of_table(name));
    let modules = matrices.filter_map(|name| {
        let packed = name.strip_suffix(".weight_packed");
        Some((name, packed.or_else(|| name.strip_suffix(".weight"))?))
    });
    let more = modules.filter_map(|(name, module)| {
        let mut scales = SCALES
            .iter()
            .filter_map(|part| folder.info(&format!("{module}.{part}")));
        let (weight, scales) = (folder.info(name)?, scales.next()?);
        let stored = weight.range().len() + scales.range().len();
        Some(of_module(weight, scales)? as f64 - stored as f64)
    });
    more.sum::<f64>() - tables
}

/// Bytes of a matrix with scales; `None` for other types and for shapes that are refused.
fn of_module(weight: &safetensors::TensorInfo, scales: &safetensors::TensorInfo) -> Option<u64> {
    let [rows, bytes] = *weight.shape() else {
        return None;
    };
    let (block_type, cols) = match (weight.dtype(), scales.dtype()) {
        ("F8_E4M3", _) => (BlockType::FP8, bytes),
        ("U8" | "I8", "F8_E4M3") => (BlockType::FP4, bytes.checked_mul(2)?),
        _ => return None,
    };
    block_type.row_bytes(cols)?;
    let scale_cols = match *scales.shape() {
        [_, groups] if groups > 1 => cols.div_ceil(groups).next_multiple_of(SCALE_COLS),
        _ => cols.max(SCALE_COLS),
    };
    Some(PackedMatrix::planned_bytes(block_type, [rows, cols], scale_cols).0)
}
