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

#[test]
fn schemes_that_are_not_read_are_refused_by_name() {
    let long = "x".repeat(500);
    for (quantization, want) in [
        (
            json!(null),
            "DIR/config.json: m: quantization is null, expected how the matrix is quantised",
        ),
        (
            json!({"m": false}),
            "DIR/config.json: m: quantization is false, expected bits and group_size",
        ),
        (
            json!({"m": [4]}),
            "DIR/config.json: m: quantization is [4], expected bits and group_size",
        ),
        (
            json!({"mode": "nvfp4"}),
            "DIR/config.json: m: mode is \"nvfp4\", expected affine or mxfp4",
        ),
        (
            json!({"mode": 4}),
            "DIR/config.json: m: mode is 4, expected affine or mxfp4",
        ),
        (
            json!({"bits": 7}),
            "DIR/config.json: m: bits is 7, expected 2, 3, 4, 5, 6 or 8",
        ),
        (
            json!({"bits": -4}),
            "DIR/config.json: m: bits is -4, expected 2, 3, 4, 5, 6 or 8",
        ),
        (
            json!({"bits": 4.5}),
            "DIR/config.json: m: bits is 4.5, expected 2, 3, 4, 5, 6 or 8",
        ),
        (
            json!({"bits": 8, "mode": "mxfp4"}),
            "DIR/config.json: m: bits is 8, expected 4",
        ),
        (
            json!({"group_size": 16}),
            "DIR/config.json: m: group_size is 16, expected 32, 64 or 128",
        ),
        (
            json!({"group_size": "64"}),
            "DIR/config.json: m: group_size is \"64\", expected 32, 64 or 128",
        ),
        (
            json!({"group_size": u64::MAX}),
            "DIR/config.json: m: group_size is 18446744073709551615, expected 32, 64 or 128",
        ),
        (
            json!({"mode": "mxfp4", "group_size": 64}),
            "DIR/config.json: m: group_size is 64, expected 32",
        ),
    ] {
        let config = json!({"quantization": quantization});
        assert_eq!(refusal(&config, &[WEIGHT, SCALES, BIASES]), want);
    }
    let long = refusal(
        &json!({"quantization": {"mode": long}}),
        &[WEIGHT, SCALES, BIASES],
    );
    assert!(long.len() < 200, "{long}");
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    const F32: TensorSpec<'_> = ("m.scales", Dtype::F32, &[2, 2]);
    const FLAT: TensorSpec<'_> = ("m.scales", Dtype::BF16, &[4]);
    const THREE: TensorSpec<'_> = ("m.scales", Dtype::BF16, &[2, 2, 1]);
    const MORE: TensorSpec<'_> = ("m.scales", Dtype::BF16, &[2, 3]);
    const ROWS: TensorSpec<'_> = ("m.scales", Dtype::BF16, &[3, 2]);
    const NONE: TensorSpec<'_> = ("m.scales", Dtype::BF16, &[0, 2]);
    const EMPTY: TensorSpec<'_> = ("m.scales", Dtype::BF16, &[2, 0]);
    const SIGNED: TensorSpec<'_> = ("m.weight", Dtype::I32, &[2, 16]);
    const NARROW: TensorSpec<'_> = ("m.weight", Dtype::U32, &[2, 15]);
    const OTHER: TensorSpec<'_> = ("m.biases", Dtype::F16, &[2, 2]);
    const SHORT: TensorSpec<'_> = ("m.biases", Dtype::BF16, &[2, 1]);
    let fit = |part, got, scales| {
        format!(
            "DIR: tensor m.{part}: shape {got} does not fit scales {scales} at 4 bits in groups of 64"
        )
    };
    for (tensors, want) in [
        (
            vec![WEIGHT, F32, BIASES],
            "DIR: tensor m.scales: dtype F32, expected F16 or BF16".into(),
        ),
        (
            vec![SIGNED, SCALES, BIASES],
            "DIR: tensor m.weight: dtype I32, expected U32".into(),
        ),
        (
            vec![WEIGHT, SCALES, OTHER],
            "DIR: tensor m.biases: dtype F16, expected that of the scales".into(),
        ),
        (
            vec![WEIGHT, SCALES],
            "DIR: tensor m.biases is missing".into(),
        ),
        (
            vec![SCALES, BIASES],
            "DIR: tensor m.weight is missing".into(),
        ),
        (vec![WEIGHT, FLAT, BIASES], fit("scales", "[4]", "[4]")),
        (
            vec![WEIGHT, THREE, BIASES],
            fit("scales", "[2, 2, 1]", "[2, 2, 1]"),
        ),
        (
            vec![WEIGHT, MORE, BIASES],
            fit("weight", "[2, 16]", "[2, 3]"),
        ),
        (
            vec![WEIGHT, ROWS, BIASES],
            fit("weight", "[2, 16]", "[3, 2]"),
        ),
        (
            vec![WEIGHT, NONE, BIASES],
            fit("scales", "[0, 2]", "[0, 2]"),
        ),
        (
            vec![WEIGHT, EMPTY, BIASES],
            fit("scales", "[2, 0]", "[2, 0]"),
        ),
        (
            vec![NARROW, SCALES, BIASES],
            fit("weight", "[2, 15]", "[2, 2]"),
        ),
        (
            vec![WEIGHT, SCALES, SHORT],
            fit("biases", "[2, 1]", "[2, 2]"),
        ),
    ] {
        assert_eq!(refusal(&bits4(), &tensors), want);
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
