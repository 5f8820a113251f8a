//! Folders whose matrices have separate scales, made in the test from a golden folder.

use std::path::Path;

use paceline_base::SplitMix64;
use paceline_weights::hf::HfFolder;
use serde_json::{Value, json};

use super::{decoded, golden};

/// Rows and columns of a tile. Tiles end within the rows of a rank.
const TILE: [usize; 2] = [48, 32];

/// Name, dtype, shape and bytes.
type Part = (String, &'static str, Vec<usize>, Vec<u8>);

/// Layout of a matrix with scales, as DeepSeek (tiles) and compressed-tensors (the others) have it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    Fp8Tiles,
    Fp8Rows,
    Fp8Whole,
    Mxfp8,
    Nvfp4,
    Int4,
    /// As `Fp8Tiles`, with scales in BF16 (Qwen).
    HalfTiles,
    /// As `Fp8Tiles`, with scales of another name, in F32 (DeepSeek V4 Base).
    NamedTiles,
    /// As `NamedTiles`, with powers of two (DeepSeek V4).
    PowerTiles,
    /// As `Mxfp8`, with scales of another name (MiniMax M3).
    InverseMxfp8,
    /// Of compressed-tensors (Kimi K3).
    Mxfp4,
    /// As `Mxfp4`, with other names and types (DeepSeek V4).
    NamedMxfp4,
}

impl Layout {
    /// `quantization_config` of a model in this layout.
    fn config(self, tile: [usize; 2]) -> Value {
        let (format, kind, bits, strategy, group) = match self {
            Self::Fp8Rows => ("float-quantized", "float", 8, "channel", None),
            Self::Fp8Whole => ("float-quantized", "float", 8, "tensor", None),
            Self::Mxfp8 => ("mxfp8-quantized", "float", 8, "group", Some(32)),
            Self::Mxfp4 => ("mxfp4-pack-quantized", "float", 4, "group", Some(32)),
            Self::Nvfp4 => ("nvfp4-pack-quantized", "float", 4, "tensor_group", Some(16)),
            Self::Int4 => ("pack-quantized", "int", 4, "group", Some(32)),
            _ => return json!({"quant_method": "fp8", "weight_block_size": tile}),
        };
        let weights = json!({"num_bits": bits, "type": kind, "strategy": strategy,
            "group_size": group, "symmetric": true, "dynamic": false});
        let all = json!({"targets": ["Linear"], "weights": weights});
        json!({"quant_method": "compressed-tensors", "quantization_status": "compressed",
            "format": format, "ignore": [], "config_groups": {"group_0": all}})
    }

    /// Random tensors of the module `name`.
    fn parts(
        self,
        name: &str,
        ([rows, cols], tile): ([usize; 2], [usize; 2]),
        random: &mut SplitMix64,
    ) -> Vec<Part> {
        let mut bytes = |n: usize, of: &dyn Fn(u8) -> Vec<u8>| -> Vec<u8> {
            (0..n).flat_map(|_| of(random.next() as u8)).collect()
        };
        let part = |suffix: &str, dtype, shape: &[usize], bytes| {
            (format!("{name}.{suffix}"), dtype, shape.to_vec(), bytes)
        };
        let tiles = vec![rows.div_ceil(tile[0]), cols.div_ceil(tile[1])];
        let groups = |columns: usize| vec![rows, cols / columns];
        let single = |byte: u8| vec![byte & 0x7f, 0, byte & 0x7f, 0x3d];
        let half = |byte: u8| vec![byte & 0x7f, 0x3d];
        let power = |byte: u8| vec![121 + byte % 3];
        let (suffix, dtype, shape, one): (_, _, _, &dyn Fn(u8) -> Vec<u8>) = match self {
            Self::Fp8Tiles => ("weight_scale_inv", "F32", tiles, &single),
            Self::HalfTiles => ("weight_scale_inv", "BF16", tiles, &half),
            Self::NamedTiles => ("scale", "F32", tiles, &single),
            Self::PowerTiles => ("scale", "F8_E8M0", tiles, &power),
            Self::Fp8Rows => ("weight_scale", "BF16", vec![rows, 1], &half),
            Self::Fp8Whole => {
                let scale = 0.04f32.to_le_bytes().to_vec();
                return vec![
                    part("weight_scale", "F32", &[1], scale),
                    part(
                        "weight",
                        "F8_E4M3",
                        &[rows, cols],
                        bytes(rows * cols, &small),
                    ),
                ];
            }
            Self::Mxfp8 | Self::Mxfp4 => ("weight_scale", "U8", groups(32), &power),
            Self::InverseMxfp8 => ("weight_scale_inv", "U8", groups(32), &power),
            Self::NamedMxfp4 => ("scale", "F8_E8M0", groups(32), &power),
            Self::Nvfp4 => ("weight_scale", "F8_E4M3", groups(16), &|byte| {
                vec![0x38 + byte % 16]
            }),
            Self::Int4 => ("weight_scale", "BF16", groups(32), &|byte| {
                vec![byte & 0x7f, 0x3c]
            }),
        };
        let scales = bytes(shape.iter().product(), one);
        let mut parts = vec![part(suffix, dtype, &shape, scales)];
        let packed = [rows, cols / 2];
        let (suffix, dtype, shape) = match self {
            Self::Nvfp4 | Self::Mxfp4 => ("weight_packed", "U8", packed),
            Self::NamedMxfp4 => ("weight", "I8", packed),
            Self::Int4 => ("weight_packed", "I32", [rows, cols / 8]),
            _ => {
                let weight = bytes(rows * cols, &small);
                parts.push(part("weight", "F8_E4M3", &[rows, cols], weight));
                return parts;
            }
        };
        parts.push(part(
            suffix,
            dtype,
            &shape,
            bytes(rows * cols / 2, &|byte| vec![byte]),
        ));
        match self {
            Self::Nvfp4 => {
                let global = 50f32.to_le_bytes().to_vec();
                parts.push(part("weight_global_scale", "F32", &[1], global));
            }
            Self::Int4 => {
                let shape = [rows, cols].map(|n| (n as u64).to_le_bytes()).concat();
                parts.push(part("weight_shape", "I64", &[2], shape));
            }
            _ => {}
        }
        parts
    }
}

/// An E4M3 of a magnitude up to 15 / 8.
fn small(byte: u8) -> Vec<u8> {
    vec![byte & 0x9f | 0x20]
}

fn save(dir: &Path, config: &Value, parts: &[Part]) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in parts {
        let offsets = [data.len(), data.len() + bytes.len()];
        data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), entry);
    }
    let header = Value::from(header).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
}

/// The folder `llama-untied-bf16` with random matrices in its head and layers, one layout for each
/// in turn.
pub(crate) fn write(dir: &Path, layouts: &[Layout]) {
    write_as(dir, layouts, TILE, &Layout::Fp8Tiles.config(TILE));
}

/// As [`write`], in one layout, with the configuration that models of this layout have.
pub(crate) fn write_one(dir: &Path, layout: Layout) {
    // transformers divides rows by rows of scales, so that tiles have to be whole.
    const WHOLE: [usize; 2] = [4, 32];
    write_as(dir, &[layout], WHOLE, &layout.config(WHOLE));
}

fn write_as(dir: &Path, layouts: &[Layout], tile: [usize; 2], quantisation: &Value) {
    let mut turns = layouts.iter().cycle();
    let of = |module: &str| {
        let quantised = module.ends_with("_proj") || module == "lm_head";
        quantised.then(|| *turns.next().unwrap())
    };
    write_source("llama-untied-bf16", dir, of, (tile, quantisation));
}

/// As [`write`], from the golden folder `name`. A module whose name contains a part in `layouts`
/// has the layout of the first such part; others stay.
pub(crate) fn write_published(name: &str, dir: &Path, layouts: &[(&str, Layout)]) {
    let mut n = 0;
    let of = |module: &str| {
        let found = layouts.iter().find(|(part, _)| module.contains(part));
        n += usize::from(found.is_some());
        found.map(|(_, layout)| *layout)
    };
    write_source(name, dir, of, (TILE, &Layout::Fp8Tiles.config(TILE)));
    assert!(n > 20, "{name}: {n} matrices with scales");
}

fn write_source(
    name: &str,
    dir: &Path,
    mut layout: impl FnMut(&str) -> Option<Layout>,
    (tile, quantisation): ([usize; 2], &Value),
) {
    let source = HfFolder::open(golden(&format!("hf/{name}"))).unwrap();
    let mut config = source.config().clone();
    config["quantization_config"] = quantisation.clone();
    let mut random = SplitMix64::new(5);
    let mut parts = Vec::new();
    for name in source.names() {
        let info = source.info(name).unwrap();
        let matrix = name
            .strip_suffix(".weight")
            .zip(info.shape().try_into().ok());
        let own = matrix.and_then(|(module, shape)| Some((module, shape, layout(module)?)));
        match own {
            Some((module, shape, layout)) => {
                parts.extend(layout.parts(module, (shape, tile), &mut random));
            }
            None => parts.push(stored(&source, name)),
        }
    }
    save(dir, &config, &parts);
}

/// A tensor as it is.
fn stored(source: &HfFolder, name: &str) -> Part {
    let info = source.info(name).unwrap();
    let dtype = ["BF16", "F32", "I64"]
        .into_iter()
        .find(|dtype| *dtype == info.dtype());
    let bytes = source.bytes_of(name).unwrap().to_vec();
    (
        name.to_owned(),
        dtype.unwrap(),
        info.shape().to_vec(),
        bytes,
    )
}

/// The values of the folder `from` as F32, and its other tensors.
pub(crate) fn write_values(dir: &Path, from: &Path) {
    let source = HfFolder::open(from).unwrap();
    let mut config = source.config().clone();
    let fields = config.as_object_mut().unwrap();
    fields.remove("quantization_config");
    let mut parts = Vec::new();
    for name in source.names() {
        let (module, part) = name.rsplit_once('.').unwrap_or((name, ""));
        match source.quantised(module).unwrap() {
            None => parts.push(stored(&source, name)),
            Some(matrix) if part == "weight" || part == "weight_packed" => {
                let values = decoded(&matrix.joined().unwrap());
                let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
                let shape = vec![matrix.rows, matrix.cols];
                parts.push((format!("{module}.weight"), "F32", shape, bytes));
            }
            Some(_) => {}
        }
    }
    save(dir, &config, &parts);
}
