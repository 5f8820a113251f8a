//! Folders whose matrices have separate scales, made in the test from a golden folder.

use std::path::Path;

use paceline_base::{BlockType, SplitMix64};
use paceline_weights::hf::HfFolder;
use serde_json::{Value, json};

use super::{decoded, golden};

/// Rows and columns of a tile. Tiles end within the rows of a rank.
const TILE: [usize; 2] = [48, 32];

/// Name, dtype, shape and bytes.
type Part = (String, &'static str, Vec<usize>, Vec<u8>);

/// Layout of a matrix with scales, as DeepSeek (tiles) and compressed-tensors (all others) have it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    Fp8Tiles,
    Fp8Rows,
    Fp8Whole,
    Mxfp8,
    Nvfp4,
    Int4,
}

impl Layout {
    /// `quantization_config` of a model in this layout.
    fn config(self, tile: [usize; 2]) -> Value {
        let (format, kind, bits, strategy, group) = match self {
            Self::Fp8Tiles => return json!({"quant_method": "fp8", "weight_block_size": tile}),
            Self::Fp8Rows => ("float-quantized", "float", 8, "channel", None),
            Self::Fp8Whole => ("float-quantized", "float", 8, "tensor", None),
            Self::Mxfp8 => ("mxfp8-quantized", "float", 8, "group", Some(32)),
            Self::Nvfp4 => ("nvfp4-pack-quantized", "float", 4, "tensor_group", Some(16)),
            Self::Int4 => ("pack-quantized", "int", 4, "group", Some(32)),
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
        let mut bytes = |n: usize, of: &dyn Fn(u8) -> u8| -> Vec<u8> {
            (0..n).map(|_| of(random.next() as u8)).collect()
        };
        let fp8 = |byte: u8| byte & 0x9f | 0x20; // magnitudes up to 15 / 8
        let low = |byte: u8| byte & 0x7f;
        let part = |suffix: &str, dtype, shape: &[usize], bytes| {
            (format!("{name}.{suffix}"), dtype, shape.to_vec(), bytes)
        };
        match self {
            Self::Fp8Tiles => {
                let tiles = [rows.div_ceil(tile[0]), cols.div_ceil(tile[1])];
                let scales = bytes(tiles[0] * tiles[1], &low);
                let scales = scales.into_iter().flat_map(|byte| [byte, 0, byte, 0x3d]);
                vec![
                    part("weight_scale_inv", "F32", &tiles, scales.collect()),
                    part("weight", "F8_E4M3", &[rows, cols], bytes(rows * cols, &fp8)),
                ]
            }
            Self::Fp8Rows => {
                let scales = bytes(rows, &low).into_iter().flat_map(|byte| [byte, 0x3d]);
                vec![
                    part("weight_scale", "BF16", &[rows, 1], scales.collect()),
                    part("weight", "F8_E4M3", &[rows, cols], bytes(rows * cols, &fp8)),
                ]
            }
            Self::Fp8Whole => vec![
                part("weight_scale", "F32", &[1], 0.04f32.to_le_bytes().to_vec()),
                part("weight", "F8_E4M3", &[rows, cols], bytes(rows * cols, &fp8)),
            ],
            Self::Mxfp8 => {
                let groups = rows * cols / 32;
                let scales = bytes(groups, &|byte| 121 + byte % 3);
                vec![
                    part("weight_scale", "U8", &[rows, cols / 32], scales),
                    part("weight", "F8_E4M3", &[rows, cols], bytes(rows * cols, &fp8)),
                ]
            }
            Self::Nvfp4 => {
                let scales = bytes(rows * cols / 16, &|byte| 0x38 + byte % 16);
                let packed = bytes(rows * cols / 2, &|b| b);
                let global = 50f32.to_le_bytes().to_vec();
                vec![
                    part("weight_scale", "F8_E4M3", &[rows, cols / 16], scales),
                    part("weight_global_scale", "F32", &[1], global),
                    part("weight_packed", "U8", &[rows, cols / 2], packed),
                ]
            }
            Self::Int4 => {
                let shape = [rows, cols].map(|n| (n as u64).to_le_bytes()).concat();
                let scales = bytes(rows * cols / 32, &low);
                let scales = scales.into_iter().flat_map(|byte| [byte, 0x3c]).collect();
                let packed = bytes(rows * cols / 2, &|b| b);
                vec![
                    part("weight_shape", "I64", &[2], shape),
                    part("weight_scale", "BF16", &[rows, cols / 32], scales),
                    part("weight_packed", "I32", &[rows, cols / 8], packed),
                ]
            }
        }
    }
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
    let source = HfFolder::open(golden("hf/llama-untied-bf16")).unwrap();
    let mut config = source.config().clone();
    config["quantization_config"] = quantisation.clone();
    let (mut random, mut turns) = (SplitMix64::new(5), layouts.iter().cycle());
    let mut parts = Vec::new();
    for name in source.names() {
        let tensor = source.tensor(name).unwrap();
        let quantised = name.ends_with("_proj.weight") || name == "lm_head.weight";
        match &tensor.shape[..] {
            &[rows, cols] if quantised => {
                let module = name.strip_suffix(".weight").unwrap();
                let layout = turns.next().unwrap();
                parts.extend(layout.parts(module, ([rows, cols], tile), &mut random));
            }
            _ => {
                let (shape, bytes) = (tensor.shape.clone(), tensor.bytes.to_vec());
                parts.push((name.to_owned(), "BF16", shape, bytes));
            }
        }
    }
    save(dir, &config, &parts);
}

/// The values of the folder `from` as F32.
pub(crate) fn write_values(dir: &Path, from: &Path) {
    let source = HfFolder::open(from).unwrap();
    let mut config = source.config().clone();
    let fields = config.as_object_mut().unwrap();
    fields.remove("quantization_config");
    let names = source.names().filter_map(|name| {
        let module = name.strip_suffix("_packed").unwrap_or(name);
        module.ends_with(".weight").then_some(module)
    });
    let parts = names.map(|name| {
        let tensor = source.tensor(name).unwrap();
        let (dtype, bytes) = match tensor.block_type {
            BlockType::BF16 => ("BF16", tensor.bytes.to_vec()),
            _ => {
                let bytes = decoded(&tensor).into_iter().flat_map(f32::to_le_bytes);
                ("F32", bytes.collect())
            }
        };
        (name.to_owned(), dtype, tensor.shape, bytes)
    });
    let parts: Vec<Part> = parts.collect();
    save(dir, &config, &parts);
}
