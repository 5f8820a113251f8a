//! Models of several files whose weights arrive while they are open: a read waits for the bytes of
//! its tensor, in its file.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use paceline_base::BlockType;
use paceline_weights::gguf::Gguf;
use paceline_weights::gguf::testing::GgufWriter;
use paceline_weights::hf::{HfFolder, StackSlice};
use paceline_weights::tensor::{Absent, Arrivals, MappedBytes};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// Files and ranges that were waited for.
type Waits = Arc<Mutex<Vec<(String, Range<usize>)>>>;

/// Has every byte, or none after byte `end`.
#[derive(Debug)]
struct Recorder {
    name: String,
    end: usize,
    waits: Waits,
}

impl Arrivals for Recorder {
    fn wait(&self, range: Range<usize>) -> Result<(), Absent> {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.push((self.name.clone(), range.clone()));
        let absent = Absent {
            file: self.name.clone(),
            range: range.clone(),
            reason: "nobody has them".to_owned(),
        };
        (range.end <= self.end).then_some(()).ok_or(absent)
    }
}

fn recorder(
    waits: &Waits,
    end: usize,
) -> impl Fn(&Path, &MappedBytes) -> std::io::Result<Option<Arc<dyn Arrivals>>> + use<> {
    let waits = Arc::clone(waits);
    move |path, _| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let waits = Arc::clone(&waits);
        Ok(Some(Arc::new(Recorder { name, end, waits })))
    }
}

fn taken(waits: &Waits) -> Vec<(String, Range<usize>)> {
    std::mem::take(&mut waits.lock().unwrap())
}

/// The recorded wait is one range, of `name`; its bytes there are `bytes`.
fn check_wait(dir: &Path, waits: &Waits, (name, bytes): (&str, &[u8])) {
    let waits = taken(waits);
    let [(file, range)] = &waits[..] else {
        panic!("{waits:?}");
    };
    assert_eq!(file, name);
    assert_eq!(
        &std::fs::read(dir.join(name)).unwrap()[range.clone()],
        bytes
    );
}

const PARTS: [&str; 2] = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];

fn split_gguf(dir: &Path) {
    for (no, name) in PARTS.into_iter().enumerate() {
        let file = GgufWriter::new()
            .meta("split.no", no as u32)
            .meta("split.count", 2u32)
            .meta("split.tensors.count", 4u32);
        let tensor = |file: GgufWriter, i: usize| {
            let bytes = vec![10 * no as u8 + i as u8; 64];
            file.tensor(&format!("{no}.{i}"), BlockType::F32, &[2, 8], bytes)
        };
        tensor(tensor(file, 0), 1).write(dir.join(name));
    }
}

#[test]
fn a_tensor_of_a_split_file_waits_for_its_bytes_in_its_part() {
    let dir = tempfile::tempdir().unwrap();
    split_gguf(dir.path());
    let waits = Waits::default();
    let model = Gguf::open_arriving(dir.path().join(PARTS[0]), &recorder(&waits, 1 << 20)).unwrap();
    assert!(model.contents().all(|(bytes, header)| header < bytes.len()));
    assert_eq!(model.location("1.0").unwrap().0, dir.path().join(PARTS[1]));
    let tensor = model.tensor("1.1").unwrap();
    assert_eq!(taken(&waits), [], "nothing was read");
    assert_eq!(*tensor.bytes, [11; 64]);
    check_wait(dir.path(), &waits, (PARTS[1], &[11; 64]));
    let row = tensor.bytes.slice(32..64).unwrap().arrived().unwrap();
    assert_eq!((&*row, &*row), (&[11; 32][..], &[11; 32][..]));
    check_wait(dir.path(), &waits, (PARTS[1], &[11; 32]));
}

#[test]
fn a_file_that_cannot_be_looked_at_is_named() {
    let dir = tempfile::tempdir().unwrap();
    split_gguf(dir.path());
    let denied = |_: &Path, _: &MappedBytes| Err(std::io::ErrorKind::PermissionDenied.into());
    let error = Gguf::open_arriving(dir.path().join(PARTS[1]), &denied).unwrap_err();
    let path = dir.path().join(PARTS[0]);
    let expected = format!("{}: cannot read: permission denied", path.display());
    assert_eq!(error.to_string(), expected);
}

/// A folder of two shards: a matrix in MLX's groups, and a stack of three experts.
fn folder(dir: &Path) {
    let config = r#"{"quantization": {"bits": 4, "group_size": 64}}"#;
    std::fs::write(dir.join("config.json"), config).unwrap();
    let index = r#"{"weight_map": {"m.weight": "one.safetensors", "m.scales": "one.safetensors",
        "m.biases": "one.safetensors", "e_blocks": "two.safetensors",
        "e_scales": "two.safetensors"}}"#;
    std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    let write = |name: &str, tensors: &[(&str, Dtype, &[usize])]| {
        let bytes = |shape: &[usize], dtype: Dtype| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (0..len).map(|i| i as u8).collect::<Vec<u8>>()
        };
        let data = tensors.iter().map(|(_, dtype, shape)| bytes(shape, *dtype));
        let data: Vec<_> = data.collect();
        let views = tensors
            .iter()
            .zip(&data)
            .map(|((name, dtype, shape), data)| {
                (
                    *name,
                    TensorView::new(*dtype, shape.to_vec(), data).unwrap(),
                )
            });
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.join(name), file).unwrap();
    };
    let matrix: [(&str, Dtype, &[usize]); 3] = [
        ("m.weight", Dtype::U32, &[4, 16]),
        ("m.scales", Dtype::BF16, &[4, 2]),
        ("m.biases", Dtype::BF16, &[4, 2]),
    ];
    write("one.safetensors", &matrix);
    let stack: [(&str, Dtype, &[usize]); 2] = [
        ("e_blocks", Dtype::U8, &[3, 2, 2, 16]),
        ("e_scales", Dtype::U8, &[3, 2, 2]),
    ];
    write("two.safetensors", &stack);
}

/// Bytes that were waited for, by file.
fn sizes(waits: &Waits) -> Vec<(String, usize)> {
    let waits = taken(waits).into_iter();
    waits.map(|(file, range)| (file, range.len())).collect()
}

#[test]
fn parts_of_matrices_in_a_folder_wait_for_their_own_bytes() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path());
    let waits = Waits::default();
    let whole = HfFolder::open(dir.path()).unwrap();
    let model = HfFolder::open_arriving(dir.path(), &recorder(&waits, 1 << 20)).unwrap();
    assert!(model.contents().all(|(bytes, header)| header < bytes.len()));
    let rows = model.quantised("m").unwrap().unwrap().row_range(1..3);
    assert_eq!(taken(&waits), [], "nothing was read");
    let rows = rows.unwrap().arrived().unwrap().joined().unwrap();
    let one = "one.safetensors".to_owned();
    let expected = [128, 8, 8].map(|len| (one.clone(), len));
    assert_eq!(sizes(&waits), expected);
    let expected = whole.tensor("m.weight").unwrap().bytes;
    assert_eq!(
        *rows.bytes,
        expected[expected.len() / 4..][..rows.bytes.len()]
    );

    let second = StackSlice {
        index: 1,
        of: 3,
        first: 0,
        step: 1,
    };
    let expert = model.stacked("e", second).unwrap();
    let two = "two.safetensors".to_owned();
    assert_eq!(sizes(&waits), [64, 4].map(|len| (two.clone(), len)));
    assert_eq!(*expert.bytes, *whole.stacked("e", second).unwrap().bytes);
}

#[test]
fn bytes_of_a_folder_that_never_arrive_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path());
    let model = HfFolder::open_arriving(dir.path(), &recorder(&Waits::default(), 0)).unwrap();
    for error in [
        model.tensor("m.weight").map(drop).unwrap_err(),
        model
            .stacked(
                "e",
                StackSlice {
                    index: 0,
                    of: 3,
                    first: 0,
                    step: 1,
                },
            )
            .map(drop)
            .unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.contains("are not here: nobody has them"), "{text}");
    }
    let bytes = model.bytes_of("m.scales").map(MappedBytes::arrived);
    assert!(bytes.unwrap().is_err());
}
