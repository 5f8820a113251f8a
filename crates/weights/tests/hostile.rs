//! Files that lie: every cut and every flipped bit of small files, and headers that announce what
//! is not there. Each must be refused or read, without a panic, and with memory in proportion to
//! the file.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use crate::counting::peak_bytes;
use paceline_base::BlockType;
use paceline_weights::gguf::testing::GgufWriter;
use paceline_weights::gguf::{Array, Header};
use paceline_weights::safetensors;

/// Memory that a reader may take for a file: some for error texts and empty tables, and six times
/// the file. An empty string takes 8 bytes in a file and 24 in memory. The smallest tensor of a
/// safetensors header takes 50 and 80, twice that while the list grows. The worst that the test of
/// dense headers finds is 4.6.
fn allowed(file: &[u8]) -> usize {
    4096 + 6 * file.len()
}

fn gguf_outcome(file: &[u8]) -> Result<(), String> {
    let (result, peak) = peak_bytes(|| Header::parse(file).map(drop).map_err(|e| e.to_string()));
    assert!(
        peak <= allowed(file),
        "{peak} bytes for a file of {}: {result:?}",
        file.len()
    );
    result
}

fn safetensors_outcome(file: &[u8]) -> Result<(), String> {
    let parse = || {
        safetensors::Header::parse(file)
            .map(drop)
            .map_err(|e| e.to_string())
    };
    let (result, peak) = peak_bytes(parse);
    assert!(
        peak <= allowed(file),
        "{peak} bytes for a file of {}: {result:?}",
        file.len()
    );
    result
}

fn small_gguf() -> GgufWriter {
    GgufWriter::new()
        .meta("general.architecture", "llama")
        .meta("general.alignment", 32_u32)
        .meta("flag", true)
        .meta("eps", 1e-5_f32)
        .meta("big", 1_u64 << 40)
        .meta("tokens", ["a", "bc", ""])
        .meta("scores", vec![0.5_f32, -1.0])
        .meta(
            "nested",
            Array::Array(vec![Array::U8(vec![1, 2]), Array::Bool(vec![true])]),
        )
        .f32s("norm", &[5], &[1.0; 5])
        .tensor("weight", BlockType::Q8_0, &[2, 32], vec![9; 68])
}

fn small_safetensors() -> Vec<u8> {
    let (a, b) = (0.5_f32.to_le_bytes(), [1_u8; 12]);
    let view = |dtype, shape: &[usize], data| {
        ::safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).unwrap()
    };
    let tensors = [
        ("a", view(::safetensors::Dtype::F32, &[1], &a[..])),
        (
            "b.weight",
            view(::safetensors::Dtype::BF16, &[2, 3], &b[..]),
        ),
    ];
    let free_text = [("format".to_owned(), "pt".to_owned())].into();
    ::safetensors::serialize(tensors, Some(free_text)).unwrap()
}

#[test]
fn every_cut_of_a_gguf_is_refused() {
    let file = small_gguf().to_bytes();
    gguf_outcome(&file).unwrap();
    let end = Header::parse(&file).unwrap().tensors()[1]
        .range()
        .unwrap()
        .end;
    for len in 0..end {
        let error = gguf_outcome(&file[..len]).expect_err("cut");
        let told = len == 0 || error.contains(&len.to_string());
        assert!(told, "the size {len} is not in: {error}");
    }
}

#[test]
fn every_flipped_bit_of_a_gguf_header_is_survived() {
    let writer = small_gguf();
    let file = writer.to_bytes();
    let mut refused = 0;
    for bit in 0..writer.header_bytes().len() * 8 {
        let mut flipped = file.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        refused += usize::from(gguf_outcome(&flipped).is_err());
    }
    assert!(refused > 1000, "only {refused} flips were noticed");
}

#[test]
fn every_cut_and_flip_of_a_safetensors_file_is_survived() {
    let file = small_safetensors();
    safetensors_outcome(&file).unwrap();
    for len in 0..file.len() {
        safetensors_outcome(&file[..len]).expect_err("cut");
    }
    for bit in 0..(file.len() - 16) * 8 {
        let mut flipped = file.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let _ = safetensors_outcome(&flipped);
    }
}

/// A GGUF header written field by field.
struct Raw(Vec<u8>);

impl Raw {
    fn new(tensors: u64, entries: u64) -> Self {
        Self(b"GGUF\x03\0\0\0".to_vec()).u64(tensors).u64(entries)
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn text(self, text: &str) -> Self {
        let mut raw = self.u64(text.len() as u64);
        raw.0.extend(text.as_bytes());
        raw
    }

    fn zeros(mut self, n: usize) -> Self {
        self.0.resize(self.0.len() + n, 0);
        self
    }

    /// A single F32 tensor called `t`, dimensions innermost first.
    fn tensor(self, dims: &[u64], offset: u64) -> Self {
        let raw = self.text("t").u32(dims.len() as u32);
        dims.iter()
            .fold(raw, |raw, &n| raw.u64(n))
            .u32(0)
            .u64(offset)
    }
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

fn check_gguf<const N: usize>(cases: [(Raw, &str); N]) {
    for (raw, text) in cases {
        let error = gguf_outcome(&raw.0).expect_err(text);
        assert!(error.contains(text), "expected {text:?} in: {error}");
    }
}

#[test]
fn counts_of_gguf_headers_that_lie_are_refused() {
    check_gguf([
        (
            Raw::new(u64::MAX, 0),
            "tensor count at byte 16 needs at least 18446744073709551615",
        ),
        (
            Raw::new(1 << 40, 0).zeros(64),
            "tensor count at byte 16 needs",
        ),
        (
            Raw::new(4, 0).zeros(91),
            "tensor count at byte 16 needs at least 100 bytes",
        ),
        (
            Raw::new(4, 0).zeros(99),
            "tensor table at byte 24 needs at least 100 bytes",
        ),
        (Raw::new(0, u64::MAX), "metadata count at byte 24 needs"),
        (
            Raw::new(0, 1 << 17).zeros(15 << 17),
            "metadata count is 131072, at most 65536",
        ),
        (
            Raw::new(1 << 21, 0).zeros(26 << 21),
            "tensor count is 2097152, at most 1048576",
        ),
    ]);
}

#[test]
fn metadata_of_gguf_headers_that_lies_is_refused() {
    let deep = (0..6).fold(Raw::new(0, 1).text("k").u32(ARRAY), |raw, _| {
        raw.u32(ARRAY).u64(1)
    });
    check_gguf([
        (
            Raw::new(0, 1).u64(u64::MAX).zeros(20),
            "metadata key at byte 32 needs",
        ),
        (
            Raw::new(0, 1).u64(70_000).zeros(80_000),
            "has 70000 bytes, expected 1 to 65535",
        ),
        (
            Raw::new(0, 1).text("k").u32(STRING).u64(1 << 50).zeros(9),
            "metadata value at byte 45",
        ),
        (
            Raw::new(0, 1).text("k").u32(13).zeros(9),
            "metadata key k: value type 13 is unknown",
        ),
        (
            Raw::new(0, 1).text("k").u32(7).u32(2),
            "bool at byte 37 is 2, expected 0 or 1",
        ),
        (
            Raw::new(0, 1).text("k").u32(STRING).u64(1).u32(0xff),
            "is not UTF-8",
        ),
        (
            Raw::new(0, 1).text("k").u32(ARRAY).u32(10).u64(1 << 61),
            "array at byte 49 needs",
        ),
        (
            Raw::new(0, 1).text("k").u32(ARRAY).u32(0).u64(u64::MAX),
            "array at byte 49 needs",
        ),
        (
            Raw::new(0, 1)
                .text("k")
                .u32(ARRAY)
                .u32(STRING)
                .u64(3)
                .zeros(23),
            "at least 24 bytes",
        ),
        (
            Raw::new(0, 1)
                .text("k")
                .u32(ARRAY)
                .u32(0)
                .u64(1 << 25)
                .zeros(1 << 25),
            "array is 33554432, at most 16777216",
        ),
        (
            deep.zeros(32),
            "metadata key k: arrays are nested deeper than 4 levels",
        ),
    ]);
}

#[test]
fn tensors_of_gguf_headers_that_lie_are_refused() {
    let aligned = |n| Raw::new(1, 1).text("general.alignment").u32(U64).u64(n);
    check_gguf([
        (
            Raw::new(1, 0).text("t").u32(u32::MAX).zeros(64),
            "has 4294967295 dimensions",
        ),
        (
            Raw::new(1, 0).tensor(&[1 << 63, 2], 0).zeros(64),
            "is empty or too large",
        ),
        (
            Raw::new(1, 0).tensor(&[1 << 32, 1 << 31], 0).zeros(64),
            "is empty or too large",
        ),
        (
            Raw::new(1, 0).tensor(&[1 << 33; 4], 0).zeros(64),
            "is empty or too large",
        ),
        (
            Raw::new(1, 0).tensor(&[1 << 40], 0).zeros(64),
            "expected 4398046511168 for tensor t",
        ),
        (
            Raw::new(1, 0).tensor(&[1], 1 << 40).zeros(64),
            "expected 1099511627844 for tensor t",
        ),
        (
            Raw::new(1, 0).tensor(&[1], u64::MAX - 31).zeros(64),
            "expected 18446744073709551615",
        ),
        (
            aligned(0).tensor(&[1], 0).zeros(64),
            "alignment of tensor data is 0, expected a power",
        ),
        (
            aligned(3).tensor(&[1], 0).zeros(64),
            "alignment of tensor data is 3, expected a power",
        ),
        (
            aligned(1 << 63).tensor(&[1], 0).zeros(64),
            "expected 9223372036854775812 for tensor t",
        ),
        (
            aligned(1 << 63).tensor(&[1], 1 << 63).zeros(64),
            "expected 18446744073709551615",
        ),
    ]);
}

/// Many things of the least size: what costs the reader most memory per byte of file.
#[test]
fn dense_headers_stay_in_proportion() {
    let strings = GgufWriter::new().meta("k", Array::String(vec![String::new(); 10_000]));
    gguf_outcome(&strings.to_bytes()).unwrap();
    let arrays = GgufWriter::new().meta("k", Array::Array(vec![Array::U8(vec![0]); 10_000]));
    gguf_outcome(&arrays.to_bytes()).unwrap();
    let name = |i: usize| char::from_u32(0x100 + i as u32).unwrap().to_string();
    let entries = (0..5_000).fold(GgufWriter::new(), |w, i| w.meta(&name(i), 0_u8));
    gguf_outcome(&entries.to_bytes()).unwrap();
    let tensors = (0..5_000).fold(GgufWriter::new().alignment(1), |w, i| {
        w.raw_tensor(&name(i), 99, &[], [])
    });
    gguf_outcome(&tensors.to_bytes()).unwrap();
    let json: Vec<String> = (0..5_000)
        .map(|i| {
            format!(
                r#""{}":{{"dtype":"","shape":[],"data_offsets":[0,0]}}"#,
                name(i)
            )
        })
        .collect();
    safetensors_outcome(&safetensors_file(&format!("{{{}}}", json.join(",")), 0)).unwrap();
}

/// A safetensors file of a header and `data` zero bytes.
fn safetensors_file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

/// The header of one tensor, `t`, whose data lie from `start` to `end`.
fn one(dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
}

/// The header of two tensors of 8 bytes, `a` and `b`, whose data lie there.
fn two(a: &str, b: &str) -> String {
    let entry = |name, offsets| {
        format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#)
    };
    format!("{{{},{}}}", entry("a", a), entry("b", b))
}

/// Checks that every header before `data` bytes of data is refused with the given text.
fn assert_refused(cases: &[(String, usize, &str)]) {
    for (header, data, text) in cases {
        let error = safetensors_outcome(&safetensors_file(header, *data)).expect_err(text);
        assert!(error.contains(text), "expected {text:?} in: {error}");
    }
}

#[test]
fn safetensors_data_that_are_not_where_the_header_says_are_refused() {
    let reversed = "tensor t: range 8..0 is reversed";
    let late = "tensor t: data start at 8, expected 0";
    let endless = "expected 18446744073709551615: truncated";
    let within = "tensor b: data start at 4, expected 8";
    let apart = "tensor b: data start at 9, expected 8";
    let twice = two("[0,8]", "[8,16]").replace("\"b\"", "\"a\"");
    assert_refused(&[
        (one("F32", "[2]", 0, 8), 4, "bytes, expected"),
        (one("F32", "[2]", 0, 8), 9, "bytes, expected"),
        (one("F32", "[2]", 8, 0), 8, reversed),
        (one("F32", "[2]", 8, 16), 16, late),
        (one("F32", "[2]", 0, u64::MAX), 8, endless),
        (two("[0,8]", "[4,12]"), 12, within),
        (two("[0,8]", "[9,17]"), 17, apart),
        (twice, 16, "header: tensor a occurs twice"),
    ]);
}

#[test]
fn safetensors_shapes_that_lie_are_refused() {
    let short = "range 0..8 has not the 12 bytes of F32 [3]";
    let none = "range 0..8 has not the 0 bytes of BF16 [3, 0]";
    let (large, deep) = ("[4294967296,4294967296]", "[1,1,1,1,1,1,1,1,1]");
    let sizes = "expected a list of at most 8 sizes";
    let negative = "invalid value: integer `-2`";
    let broken = "invalid type: floating point";
    assert_refused(&[
        (one("F32", "[3]", 0, 8), 8, short),
        (one("BF16", "[3, 0]", 0, 8), 8, none),
        (one("F32", large, 0, 8), 8, "is empty or too large"),
        (one("F32", "[4611686018427387904]", 0, 8), 8, "has not the"),
        (one("F32", deep, 0, 4), 4, sizes),
        (one("F32", "[-2]", 0, 8), 8, negative),
        (one("F32", "[1.5]", 0, 8), 8, broken),
    ]);
}

/// Headers that nest without end neither overflow the stack nor take long.
#[test]
fn safetensors_headers_that_are_no_table_are_refused() {
    let nested = |before: &str, open: &str| format!("{before}{}", open.repeat(100_000));
    assert_refused(&[
        (nested(r#"{"t":"#, "["), 0, "header: "),
        (nested(r#"{"t":"#, r#"{"a":"#), 0, "header: "),
        (nested(r#"{"__metadata__":"#, "["), 0, "header: "),
        ("{}}".to_owned(), 0, "header: trailing characters"),
        ("[]".to_owned(), 0, "not a safetensors file"),
    ]);
}

#[test]
fn lying_safetensors_lengths_are_refused() {
    for (length, text) in [
        (0, "not a safetensors file"),
        (100, "header of 100 bytes, but the file has 12"),
        (99_999_999, "header of 99999999 bytes, but the file has 12"),
        (
            100_000_001,
            "header of 100000001 bytes, at most 100000000 are allowed",
        ),
        (u64::MAX, "header of 18446744073709551615 bytes, at most"),
    ] {
        let mut file = safetensors_file("{}  ", 0);
        file[..8].copy_from_slice(&length.to_le_bytes());
        let error = safetensors_outcome(&file).expect_err(text);
        assert!(error.contains(text), "expected {text:?} in: {error}");
    }
}
