//! GGUF files from the tests' own writer: they are read back unchanged, and invalid files are
//! refused with the invalid values.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::Path;

use paceline_base::{BlockType, Bytes};
use paceline_weights::gguf::testing::GgufWriter;
use paceline_weights::gguf::{Array, Error, Gguf, Header, MetadataValue};
use proptest::prelude::*;

fn sample() -> GgufWriter {
    GgufWriter::new()
        .meta("general.architecture", "llama")
        .meta("llama.block_count", 2_u32)
        .meta("tokenizer.ggml.tokens", ["a", "", "é"])
        .f32s("norm", &[3], &[1.0, 2.0, 3.0])
        .tensor(
            "weight",
            BlockType::Q8_0,
            &[2, 64],
            (0..136).collect::<Vec<u8>>(),
        )
        .raw_tensor("exotic", 15, &[2, 64], vec![7; 72])
        .tensor("scalar", BlockType::F16, &[], vec![0, 0x3c])
}

fn error_of(file: &[u8]) -> String {
    Header::parse(file)
        .expect_err("the file is broken")
        .to_string()
}

#[test]
fn a_written_file_reads_back() {
    for version in [2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        sample().version(version).write(&path);
        let model = Gguf::open(&path).unwrap();
        assert_eq!(
            model.metadata().str("general.architecture").unwrap(),
            "llama"
        );
        assert_eq!(model.metadata().u64("llama.block_count").unwrap(), 2);
        assert_eq!(
            model.metadata().strs("tokenizer.ggml.tokens").unwrap(),
            ["a", "", "é"]
        );
        let names: Vec<&str> = model.tensors().map(|t| t.name()).collect();
        assert_eq!(names, ["norm", "weight", "exotic", "scalar"]);
        assert_eq!(
            model.file_bytes(),
            Bytes(std::fs::metadata(&path).unwrap().len())
        );

        let norm = model.tensor("norm").unwrap();
        assert_eq!(
            (norm.block_type, norm.shape.as_slice()),
            (BlockType::F32, &[3][..])
        );
        assert_eq!(*norm.bytes, [0, 0, 128, 63, 0, 0, 0, 64, 0, 0, 64, 64]);
        let weight = model.tensor("weight").unwrap();
        assert_eq!((weight.rows(), weight.cols()), (2, 64));
        assert_eq!(*weight.bytes, (0..136).collect::<Vec<u8>>());
        let scalar = model.tensor("scalar").unwrap();
        assert_eq!(
            (scalar.rows(), scalar.cols(), scalar.bytes.len()),
            (1, 1, 2)
        );
        assert_eq!(
            Header::parse(&std::fs::read(&path).unwrap())
                .unwrap()
                .version(),
            version
        );
    }
}

#[test]
fn tensors_outlive_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    sample().write(&path);
    let weight = Gguf::open(&path).unwrap().tensor("weight").unwrap();
    weight.bytes.discard();
    assert_eq!(weight.bytes[135], 135);
}

#[test]
fn unsupported_tensors_are_refused_when_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    sample().write(&path);
    let model = Gguf::open(&path).unwrap();
    assert!(model.has("exotic") && !model.has("absent"));
    let shown = path.display();
    assert_eq!(
        model.tensor("exotic").unwrap_err().to_string(),
        format!("{shown}: tensor exotic: storage type Q8_K (GGUF type number 15) is not supported")
    );
    assert_eq!(
        model.tensor("absent").unwrap_err().to_string(),
        format!("{shown}: tensor absent is missing")
    );
}

#[test]
fn every_supported_type_has_its_size() {
    for t in BlockType::GGUF {
        let bytes: Vec<u8> = (0..3 * t.bytes()).map(|i| i as u8).collect();
        let file = GgufWriter::new()
            .tensor("t", t, &[3, t.len()], bytes.clone())
            .to_bytes();
        let header = Header::parse(&file).unwrap();
        let range = header.tensors()[0].range().unwrap();
        assert_eq!(file[range.clone()], bytes, "{t}");
        assert!(
            Header::parse(&file[..range.end]).is_ok(),
            "{t} without padding at the end"
        );
        assert!(Header::parse(&file[..range.end - 1]).is_err(), "{t}");
    }
}

#[test]
fn alignment_is_that_of_the_file() {
    for alignment in [1_u32, 8, 32, 64, 4096] {
        let file = GgufWriter::new()
            .alignment(alignment)
            .f32s("a", &[1], &[1.0])
            .f32s("b", &[1], &[2.0])
            .to_bytes();
        let header = Header::parse(&file).unwrap();
        let range = header.tensors()[1].range().unwrap();
        assert_eq!(range.start % alignment as usize, 0);
        assert_eq!(file[range], 2_f32.to_le_bytes());
    }
}

#[test]
fn other_formats_are_named() {
    for (content, text) in [
        (&b""[..], "not a GGUF file: it is empty"),
        (&[0; 100], "not a GGUF file: it begins with zeros only"),
        (
            b"PK\x03\x04....",
            "not a GGUF file: it looks like a zip archive or PyTorch checkpoint",
        ),
        (
            b"<!doctype html><title>Sign in",
            "not a GGUF file: it looks like a web page",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:",
            "not a GGUF file: it looks like a git-lfs pointer, not the file it stands for",
        ),
        (
            b"\x20\0\0\0\0\0\0\0{\"w\":{}}",
            "not a GGUF file: it looks like a safetensors file",
        ),
        (
            b"tjgg\x01\0\0\0",
            "not a GGUF file: it looks like a GGML file from before GGUF",
        ),
        (
            b"{\"error\": 404}",
            "not a GGUF file: it looks like JSON text",
        ),
        (
            b"GGUF\x01\0\0\0",
            "GGUF version 1 is not supported, expected 2 or 3",
        ),
        (
            b"GGUF\x04\0\0\0",
            "GGUF version 4 is not supported, expected 2 or 3",
        ),
        (
            b"GGUF\0\0\0\x03",
            "GGUF version 3 in big-endian byte order is not supported",
        ),
        (
            b"GG",
            "magic at byte 0 needs at least 4 bytes, but the file has 2: truncated, or the \
             header lies",
        ),
    ] {
        assert_eq!(error_of(content), text);
    }
}

#[test]
fn contradictions_are_named() {
    let f32s = |name| GgufWriter::new().f32s(name, &[1], &[1.0]);
    let mut unaligned = f32s("a").to_bytes();
    let offset_at = f32s("a").header_bytes().len() - 8;
    unaligned[offset_at] = 4;
    let mut overlapping = f32s("a").f32s("b", &[1], &[2.0]).to_bytes();
    let offset_at = f32s("a").f32s("b", &[1], &[2.0]).header_bytes().len() - 8;
    overlapping[offset_at] = 0;
    for (file, text) in [
        (
            f32s("t").f32s("t", &[1], &[1.0]).to_bytes(),
            "tensor t occurs twice",
        ),
        (
            GgufWriter::new()
                .meta("k", 1_u32)
                .meta("k", 2_u32)
                .to_bytes(),
            "metadata key k occurs twice",
        ),
        (
            GgufWriter::new()
                .tensor("t", BlockType::Q4_K, &[2, 64], vec![0; 144])
                .to_bytes(),
            "tensor t: rows of shape [2, 64] are not whole blocks of 256 values (Q4_K)",
        ),
        (
            GgufWriter::new()
                .tensor("t", BlockType::F32, &[0, 4], vec![])
                .to_bytes(),
            "tensor t: shape [0, 4] is empty or too large",
        ),
        (
            GgufWriter::new()
                .tensor("t", BlockType::F32, &[1; 5], vec![0; 4])
                .to_bytes(),
            "tensor t has 5 dimensions, at most 4 are allowed",
        ),
        (
            unaligned,
            "tensor a: offset 4 is not a multiple of the alignment 32",
        ),
        (overlapping, "tensors a and b overlap"),
        (
            GgufWriter::new().meta("general.alignment", "32").to_bytes(),
            "metadata key general.alignment: expected non-negative integer, got string",
        ),
        (
            GgufWriter::new().meta("", 1_u32).to_bytes(),
            "metadata key at byte 24 has 0 bytes, expected 1 to 65535",
        ),
    ] {
        assert_eq!(error_of(&file), text);
    }
}

#[test]
fn a_cut_file_says_what_was_expected() {
    let file = GgufWriter::new().f32s("w", &[64], &[0.5; 64]).to_bytes();
    let cut = file.len() - 100;
    assert_eq!(
        error_of(&file[..cut]),
        format!(
            "file has {cut} bytes, expected {} for tensor w: truncated, or the header lies",
            file.len()
        )
    );
}

#[test]
fn paths_that_are_no_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = Gguf::open(dir.path()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{}: not a regular file", dir.path().display())
    );
    let error = Gguf::open(dir.path().join("absent.gguf")).unwrap_err();
    let Error::InFile { error, .. } = error else {
        panic!("{error}")
    };
    assert!(matches!(*error, Error::Open(_)), "{error}");
}

/// Part `no` (from 1) of `count`, with one tensor `t<no>`; `total` tensors are announced.
fn part(no: u16, count: u16, total: i32) -> GgufWriter {
    GgufWriter::new()
        .meta("split.no", u32::from(no - 1))
        .meta("split.count", u32::from(count))
        .meta("split.tensors.count", total)
        .meta("part", u32::from(no))
        .f32s(&format!("t{no}"), &[1], &[f32::from(no)])
}

fn part_path(dir: &Path, no: u16, count: u16) -> std::path::PathBuf {
    dir.join(format!("model-{no:05}-of-{count:05}.gguf"))
}

fn split_model(dir: &Path) {
    for no in 1..=3 {
        part(no, 3, 3).write(part_path(dir, no, 3));
    }
}

#[test]
fn a_split_model_opens_from_any_part() {
    let dir = tempfile::tempdir().unwrap();
    split_model(dir.path());
    for from in 1..=3 {
        let model = Gguf::open(part_path(dir.path(), from, 3)).unwrap();
        assert_eq!(model.metadata().u32("part").unwrap(), 1);
        assert_eq!(model.paths().len(), 3);
        for no in 1..=3_u16 {
            let tensor = model.tensor(&format!("t{no}")).unwrap();
            assert_eq!(*tensor.bytes, f32::from(no).to_le_bytes());
        }
    }
}

#[test]
fn broken_split_models_are_refused() {
    type Break = fn(&Path);
    let cases: [(Break, &str); 7] = [
        (
            |dir| std::fs::remove_file(part_path(dir, 2, 3)).unwrap(),
            "00002-of-00003.gguf: cannot",
        ),
        (
            |dir| part(3, 3, 3).write(part_path(dir, 2, 3)),
            "split.no is 2, expected 1",
        ),
        (
            |dir| part(2, 4, 3).write(part_path(dir, 2, 3)),
            "split.count is 4, expected 3",
        ),
        (
            |dir| part(1, 3, 5).write(part_path(dir, 1, 3)),
            "parts hold 3 tensors, expected 5",
        ),
        (
            |dir| {
                part(2, 3, 3)
                    .f32s("t1", &[1], &[0.0])
                    .write(part_path(dir, 2, 3))
            },
            "tensor t1 occurs twice",
        ),
        (
            |dir| GgufWriter::new().write(part_path(dir, 2, 3)),
            "metadata key split.count is missing",
        ),
        (
            |dir| std::fs::write(part_path(dir, 3, 3), "<html>").unwrap(),
            "like a web page",
        ),
    ];
    for (break_it, text) in cases {
        let dir = tempfile::tempdir().unwrap();
        split_model(dir.path());
        break_it(dir.path());
        let error = Gguf::open(part_path(dir.path(), 1, 3))
            .unwrap_err()
            .to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_part_must_carry_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("renamed.gguf");
    part(1, 3, 3).write(&path);
    let error = Gguf::open(&path).unwrap_err().to_string();
    assert!(
        error.contains("one of 3 parts of a model, but is not called NAME-"),
        "{error}"
    );
    let alone = part_path(dir.path(), 1, 2);
    sample().write(&alone);
    assert_eq!(Gguf::open(&alone).unwrap().paths().len(), 1);
}

fn array() -> impl Strategy<Value = Array> {
    use proptest::collection::vec;
    let leaf = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..9).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(any::<f32>(), 0..9).prop_map(Array::F32),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        vec(".*", 0..5).prop_map(Array::String),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        vec(any::<f64>(), 0..9).prop_map(Array::F64),
    ];
    leaf.prop_recursive(3, 30, 4, |inner| vec(inner, 0..4).prop_map(Array::Array))
}

fn value() -> impl Strategy<Value = MetadataValue> {
    prop_oneof![
        any::<u8>().prop_map(MetadataValue::U8),
        any::<i8>().prop_map(MetadataValue::I8),
        any::<u16>().prop_map(MetadataValue::U16),
        any::<i16>().prop_map(MetadataValue::I16),
        any::<u32>().prop_map(MetadataValue::U32),
        any::<i32>().prop_map(MetadataValue::I32),
        any::<f32>().prop_map(MetadataValue::F32),
        any::<bool>().prop_map(MetadataValue::Bool),
        ".*".prop_map(MetadataValue::String),
        array().prop_map(MetadataValue::Array),
        any::<u64>().prop_map(MetadataValue::U64),
        any::<i64>().prop_map(MetadataValue::I64),
        any::<f64>().prop_map(MetadataValue::F64),
    ]
}

proptest! {
    #[test]
    fn metadata_of_every_type_read_back(values in proptest::collection::vec(value(), 0..12)) {
        let mut writer = GgufWriter::new();
        for (i, value) in values.iter().enumerate() {
            writer = writer.meta(&format!("key.{i}"), value.clone());
        }
        let header = Header::parse(&writer.to_bytes()).unwrap();
        let read: Vec<MetadataValue> = header.metadata().iter().map(|(_, v)| v.clone()).collect();
        prop_assert_eq!(read, values);
    }

    #[test]
    fn arbitrary_bytes_never_panic(tail in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Header::parse(&tail);
        let _ = Header::parse(&[b"GGUF\x03\0\0\0".as_slice(), &tail].concat());
    }
}
