//! Matrices with separate scales: layouts that are read, and those that are refused.
//! `paceline-model` compares their values.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use paceline_base::BlockType;
use paceline_weights::hf::HfFolder;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Last part of a name, dtype and shape of a tensor of the module `m`; its bytes count up.
type Spec = (&'static str, &'static str, &'static [usize]);

const FP8: Spec = ("weight", "F8_E4M3", &[3, 96]);
const PACKED: Spec = ("weight_packed", "I32", &[3, 12]);
const INT_SCALES: Spec = ("weight_scale", "BF16", &[3, 3]);
const SHAPE: Spec = ("weight_shape", "I64", &[2]);
const FP4: Spec = ("weight_packed", "U8", &[3, 48]);
const FP4_SCALES: Spec = ("weight_scale", "F8_E4M3", &[3, 6]);

/// Writes a folder; `weight_shape` says `columns`.
fn folder(config: &Value, specs: &[Spec], columns: u64) -> (TempDir, HfFolder) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (suffix, dtype, shape) in specs {
        let size = match *dtype {
            "I64" => 8,
            "F32" | "I32" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let start = data.len();
        match *suffix {
            "weight_shape" => data.extend([3, columns].map(u64::to_le_bytes).concat()),
            _ => data.extend((0..size * shape.iter().product::<usize>()).map(|i| i as u8)),
        }
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(format!("m.{suffix}"), entry);
    }
    let header = Value::from(header).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let folder = HfFolder::open(dir.path()).unwrap();
    (dir, folder)
}

fn refusal(config: &Value, specs: &[Spec], columns: u64) -> String {
    let (dir, folder) = folder(config, specs, columns);
    let error = folder.tensor("m.weight").expect_err("is refused");
    error
        .to_string()
        .replace(&format!("{}", dir.path().display()), "DIR")
}

/// Layouts whose values nothing records: `paceline-model` compares the others'.
#[test]
fn layouts_are_recognised_by_their_tensors() {
    let tiles = json!({"quantization_config": {"weight_block_size": [2, 64]}});
    let structure = json!({"text_config": {"quantization_config": {"config_groups": {
        "group_0": {"weights": {"block_structure": [2, 64]}}}}}});
    let packed = ("weight", "I8", &[3, 48][..]);
    for (config, specs, block_type) in [
        (
            &structure,
            [FP8, ("weight_scale", "BF16", &[2, 2])],
            BlockType::FP8,
        ),
        (&tiles, [FP8, ("scale", "F8_E8M0", &[2, 2])], BlockType::FP8),
        (
            &tiles,
            [packed, ("scale", "F8_E8M0", &[3, 3])],
            BlockType::MXFP4,
        ),
    ] {
        let (_dir, folder) = folder(config, &specs, 96);
        let joined = folder.tensor("m.weight").unwrap();
        assert_eq!(
            (joined.block_type, &joined.shape[..]),
            (block_type, &[3, 96][..]),
            "{specs:?}"
        );
    }
}

/// Qwen 3.8 has one for all shards of a table of n-grams.
#[test]
fn shards_have_the_scale_of_their_table() {
    let specs = [
        ("shard_7.weight", "F8_E4M3", &[3, 96][..]),
        ("weight_scale", "BF16", &[1]),
    ];
    let (_dir, folder) = folder(&json!({}), &specs, 0);
    let shard = folder.tensor("m.shard_7.weight").unwrap();
    assert_eq!(
        (shard.block_type, &shard.shape[..]),
        (BlockType::FP8, &[3, 96][..])
    );
}

#[test]
fn tiles_of_128_are_the_default() {
    let scales = ("weight_scale_inv", "F32", &[2, 3][..]);
    let (_dir, folder) = folder(&json!({}), &[("weight", "F8_E4M3", &[130, 288]), scales], 0);
    let joined = folder.tensor("m.weight").unwrap();
    let scale = |row: usize, block: usize| joined.bytes[(row * 9 + block) * 36];
    // Scale i starts with byte 4 i.
    let first = [(0, 0), (127, 3), (0, 4), (127, 8), (128, 0), (129, 8)];
    assert_eq!(
        first.map(|(row, block)| scale(row, block)),
        [0, 0, 4, 8, 12, 20]
    );
}

#[test]
fn scales_and_shapes_that_do_not_fit_are_refused() {
    let fit = "expected a scale for each tile, row or group of 32, 64, .. columns";
    for (specs, columns, want) in [
        (
            vec![FP8, ("weight_scale", "F32", &[3, 2][..])],
            96,
            format!("DIR: tensor m.weight_scale: shape [3, 2], {fit}"),
        ),
        (
            vec![FP8, ("weight_scale", "F32", &[3, 0][..])],
            96,
            format!("DIR: tensor m.weight_scale: shape [3, 0], {fit}"),
        ),
        (
            vec![FP8, ("weight_scale", "F32", &[2][..])],
            96,
            format!("DIR: tensor m.weight_scale: shape [2], {fit}"),
        ),
        (
            vec![FP8, ("weight_scale", "F16", &[1][..])],
            96,
            "DIR: tensor m.weight_scale: dtype F16, expected F32, BF16, U8 or F8_E8M0".into(),
        ),
        (
            vec![
                ("weight", "F8_E4M3", &[3, 40]),
                ("weight_scale", "F32", &[1][..]),
            ],
            96,
            "DIR: tensor m.weight: shape [3, 40], expected rows of a multiple of 32 values".into(),
        ),
        (
            vec![
                ("weight", "F8_E4M3", &[96]),
                ("weight_scale", "F32", &[1][..]),
            ],
            96,
            "DIR: tensor m.weight: shape [96], expected two sizes".into(),
        ),
        (
            vec![
                ("weight", "F8_E5M2", &[3, 96]),
                ("weight_scale", "F32", &[1][..]),
            ],
            96,
            "DIR: tensor m.weight: dtype F8_E5M2, expected F8_E4M3, or U8, I8 or I32 for packed \
             values"
                .into(),
        ),
        (
            vec![("weight_scale", "F32", &[1][..])],
            96,
            "DIR: tensor m.weight is missing".into(),
        ),
    ] {
        assert_eq!(refusal(&json!({}), &specs, columns), want);
    }
}

#[test]
fn packed_values_that_do_not_fit_are_refused() {
    for (specs, columns, want) in [
        (
            vec![PACKED, INT_SCALES],
            96,
            "DIR: tensor m.weight_shape is missing",
        ),
        (
            vec![PACKED, INT_SCALES, SHAPE],
            1 << 40,
            "DIR: tensor m.weight_packed: shape [3, 12], expected 2, 3, 4, 5, 6 or 8 bits for each \
             value of weight_shape",
        ),
        (
            vec![
                PACKED,
                INT_SCALES,
                SHAPE,
                ("weight_zero_point", "I32", &[1, 3]),
            ],
            96,
            "DIR: m: weight_zero_point is a tensor, expected none: symmetric integers in order",
        ),
        (
            vec![PACKED, ("weight_scale", "F32", &[3, 3]), SHAPE],
            96,
            "DIR: tensor m.weight_scale: dtype F32, expected F16 or BF16",
        ),
        (
            vec![FP4, FP4_SCALES],
            96,
            "DIR: tensor m.weight_global_scale is missing",
        ),
        (
            vec![FP4, FP4_SCALES, ("weight_scale_2", "F32", &[3][..])],
            96,
            "DIR: tensor m.weight_scale_2: shape [3], expected one value",
        ),
        (
            vec![FP4, ("weight_scale", "F8_E4M3", &[3, 3][..])],
            96,
            "DIR: tensor m.weight_scale: shape [3, 3], expected one scale for 16 columns",
        ),
    ] {
        assert_eq!(refusal(&json!({}), &specs, columns), want);
    }
}

#[test]
fn sizes_of_tiles_that_do_not_fit_are_refused() {
    for size in [
        json!([0, 32]),
        json!([128, 48]),
        json!([128]),
        json!("128"),
        json!([-1, 32]),
    ] {
        let config = json!({"quantization_config": {"weight_block_size": size}});
        let specs = [FP8, ("weight_scale", "F32", &[1][..])];
        let want = format!("DIR: m: weight_block_size is {size}, expected rows, and columns by 32");
        assert_eq!(refusal(&config, &specs, 96), want);
    }
}
