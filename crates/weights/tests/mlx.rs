//! Matrices in MLX's quantised form: what is read, and what is refused.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::Path;

use paceline_base::BlockType;
use paceline_weights::hf::HfFolder;
use paceline_weights::mlx::{Mode, Scheme};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Name, type and shape of a tensor; its bytes count up.
type TensorSpec<'a> = (&'a str, Dtype, &'a [usize]);

/// Two rows of 128 columns, 4 bits, groups of 64.
const WEIGHT: TensorSpec<'_> = ("m.weight", Dtype::U32, &[2, 16]);
const SCALES: TensorSpec<'_> = ("m.scales", Dtype::BF16, &[2, 2]);
const BIASES: TensorSpec<'_> = ("m.biases", Dtype::BF16, &[2, 2]);

fn bits4() -> Value {
    json!({"quantization": {"bits": 4, "group_size": 64}})
}

fn counting(n: usize, from: usize) -> Vec<u8> {
    (from..from + n).map(|i| i as u8).collect()
}

fn write(dir: &Path, config: &Value, tensors: &[TensorSpec<'_>]) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .enumerate()
        .map(|(i, (_, dtype, shape))| {
            let bits = dtype.bitsize() * shape.iter().product::<usize>();
            counting(bits / 8, 100 * i)
        })
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|(&(name, dtype, shape), data)| {
            (name, TensorView::new(dtype, shape.to_vec(), data).unwrap())
        });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
}

fn folder(config: &Value, tensors: &[TensorSpec<'_>]) -> (TempDir, HfFolder) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config, tensors);
    let folder = HfFolder::open(dir.path()).unwrap();
    (dir, folder)
}

/// The error of reading `m.weight`.
fn refusal(config: &Value, tensors: &[TensorSpec<'_>]) -> String {
    let (dir, folder) = folder(config, tensors);
    let error = folder
        .tensor("m.weight")
        .expect_err("is refused")
        .to_string();
    error.replace(&format!("{}", dir.path().display()), "DIR")
}

#[test]
fn a_matrix_is_joined_block_by_block() {
    let (_dir, folder) = folder(&bits4(), &[WEIGHT, SCALES, BIASES]);
    let joined = folder.tensor("m.weight").unwrap();
    assert_eq!(joined.name, "m.weight");
    assert_eq!(joined.block_type, BlockType::AFFINE4_BF16);
    assert_eq!(joined.shape, [2, 128]);
    let weight = counting(128, 0);
    let (scales, biases) = (counting(8, 100), counting(8, 200));
    let mut want: Vec<u8> = Vec::new();
    for block in 0..8 {
        let group = block / 2; // 64 columns, and rows follow one another
        want.extend(&scales[2 * group..][..2]);
        want.extend(&biases[2 * group..][..2]);
        want.extend(&weight[16 * block..][..16]);
    }
    assert_eq!(&*joined.bytes, want);

    let parts = folder.quantised("m").unwrap().unwrap();
    let mut block = [0; 20];
    parts.block(1, 2, &mut block);
    assert_eq!(block, want[20 * 6..20 * 7]);
}

#[test]
fn what_has_no_scales_is_not_quantised() {
    let plain = ("m.weight", Dtype::F16, &[2, 16][..]);
    let (_dir, folder) = folder(&bits4(), &[plain]);
    assert!(folder.quantised("m").unwrap().is_none());
    assert_eq!(
        folder.tensor("m.weight").unwrap().block_type,
        BlockType::F16
    );
    assert!(folder.quantised("absent").unwrap().is_none());
}

#[test]
fn the_scheme_is_that_of_the_matrix_before_that_of_all() {
    let affine = |bits, group_size| Scheme {
        mode: Mode::Affine,
        bits,
        group_size,
    };
    let mxfp4 = Scheme {
        mode: Mode::Mxfp4,
        bits: 4,
        group_size: 32,
    };
    let all = json!({"bits": 4, "group_size": 64});
    let own = |own: Value| json!({"bits": 8, "group_size": 32, "m": own});
    for (config, scheme) in [
        (json!({"quantization": all}), affine(4, 64)),
        (json!({"quantization_config": all}), affine(4, 64)),
        (
            json!({"quantization": all, "quantization_config": {"bits": 2}}),
            affine(4, 64),
        ),
        (
            json!({"quantization": null, "quantization_config": all}),
            affine(4, 64),
        ),
        (json!({"quantization": own(all.clone())}), affine(4, 64)),
        (
            json!({"quantization": own(json!({"bits": 4}))}),
            affine(4, 64),
        ), // MLX's default
        (
            json!({"quantization": {"bits": 4, "group_size": 64, "m": true}}),
            affine(4, 64),
        ),
        (json!({"quantization": {}}), affine(4, 64)),
    ] {
        let (_dir, folder) = folder(&config, &[WEIGHT, SCALES, BIASES]);
        assert_eq!(
            folder.quantised("m").unwrap().unwrap().scheme,
            scheme,
            "{config}"
        );
    }
    let config = json!({"quantization": {"mode": "mxfp4"}});
    let (_dir, folder) = folder(&config, &[WEIGHT, ("m.scales", Dtype::U8, &[2, 4])]);
    let matrix = folder.quantised("m").unwrap().unwrap();
    assert_eq!(
        (matrix.scheme, matrix.block_type),
        (mxfp4, BlockType::MXFP4)
    );
    assert_eq!(folder.tensor("m.weight").unwrap().bytes.len(), 2 * 4 * 17);
}

/// Entries of `config.json` for the matrix `m`, and the error that each gives.
const SCHEMES: &str = r#"null | quantization is null, expected how the matrix is quantised
{"m": false} | quantization is false, expected bits and group_size
{"m": [4]} | quantization is [4], expected bits and group_size
{"mode": "nvfp4"} | mode is "nvfp4", expected affine or mxfp4
{"mode": 4} | mode is 4, expected affine or mxfp4
{"bits": 7} | bits is 7, expected 2, 3, 4, 5, 6 or 8
{"bits": -4} | bits is -4, expected 2, 3, 4, 5, 6 or 8
{"bits": 4.5} | bits is 4.5, expected 2, 3, 4, 5, 6 or 8
{"bits": 8, "mode": "mxfp4"} | bits is 8, expected 4
{"group_size": 16} | group_size is 16, expected 32, 64 or 128
{"group_size": "64"} | group_size is "64", expected 32, 64 or 128
{"group_size": 18446744073709551615} | group_size is 18446744073709551615, expected 32, 64 or 128
{"mode": "mxfp4", "group_size": 64} | group_size is 64, expected 32"#;

#[test]
fn schemes_that_are_not_read_are_refused_by_name() {
    for row in SCHEMES.lines() {
        let (quantization, want) = row.split_once(" | ").unwrap();
        let quantization: Value = serde_json::from_str(quantization).unwrap();
        let said = refusal(
            &json!({"quantization": quantization}),
            &[WEIGHT, SCALES, BIASES],
        );
        assert_eq!(said, format!("DIR/config.json: m: {want}"));
    }
    let mode = "x".repeat(500);
    let long = json!({"quantization": {"mode": mode}});
    let long = refusal(&long, &[WEIGHT, SCALES, BIASES]);
    assert!(long.len() < 200, "{long}");
}

/// Tensors in place of those that fit, or without a type none of that name, and what is said.
const PARTS: &str = "\
m.scales F32 [2, 2] | m.scales: dtype F32, expected F16 or BF16
m.weight I32 [2, 16] | m.weight: dtype I32, expected U32
m.biases F16 [2, 2] | m.biases: dtype F16, expected that of the scales
m.biases | m.biases is missing
m.weight | m.weight is missing
m.scales BF16 [4] | m.scales: shape [4] does not fit scales [4] at 4 bits
m.scales BF16 [2, 2, 1] | m.scales: shape [2, 2, 1] does not fit scales [2, 2, 1] at 4 bits
m.scales BF16 [2, 3] | m.weight: shape [2, 16] does not fit scales [2, 3] at 4 bits
m.scales BF16 [3, 2] | m.weight: shape [2, 16] does not fit scales [3, 2] at 4 bits
m.scales BF16 [0, 2] | m.scales: shape [0, 2] does not fit scales [0, 2] at 4 bits
m.scales BF16 [2, 0] | m.scales: shape [2, 0] does not fit scales [2, 0] at 4 bits
m.weight U32 [2, 15] | m.weight: shape [2, 15] does not fit scales [2, 2] at 4 bits
m.biases BF16 [2, 1] | m.biases: shape [2, 1] does not fit scales [2, 2] at 4 bits";

#[test]
fn parts_that_do_not_fit_are_refused() {
    for row in PARTS.lines() {
        let (part, want) = row.split_once(" | ").unwrap();
        let mut words = part.splitn(3, ' ');
        let name = words.next().unwrap();
        let dtype = words.next().map(|dtype| match dtype {
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            "BF16" => Dtype::BF16,
            "I32" => Dtype::I32,
            _ => Dtype::U32,
        });
        let shape: Vec<usize> = serde_json::from_str(words.next().unwrap_or("[]")).unwrap();
        let mut tensors = [WEIGHT, SCALES, BIASES].to_vec();
        tensors.retain(|tensor| tensor.0 != name);
        tensors.extend(dtype.map(|dtype| (name, dtype, &shape[..])));
        let said = refusal(&bits4(), &tensors);
        let whole = format!("DIR: tensor {want}");
        assert!(said.starts_with(&whole), "{said}, expected {whole}");
    }
}

/// Sizes whose products overflow, in a file that has no bytes for them.
#[test]
fn huge_shapes_are_refused_without_memory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), bits4().to_string()).unwrap();
    let huge = (1_u64 << 60).to_string();
    let entry = |dtype: &str, shape: &str| {
        format!(r#"{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [0, 0]}}"#)
    };
    let header = format!(
        r#"{{"m.weight": {}, "m.scales": {}, "m.biases": {}}}"#,
        entry("U32", &format!("[0, {huge}]")),
        entry("BF16", &format!("[0, {huge}]")),
        entry("BF16", &format!("[0, {huge}]")),
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let folder = HfFolder::open(dir.path()).unwrap();
    let error = folder.tensor("m.weight").unwrap_err().to_string();
    assert!(
        error.contains("m.scales: shape [0, 1152921504606846976]"),
        "{error}"
    );
}
