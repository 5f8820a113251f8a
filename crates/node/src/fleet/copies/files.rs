//! Whole files: their SHA-256, copies from one node to another, and the files of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use paceline_base::hex;
use paceline_text::chat::TOOL_USE_FILE;
use paceline_weights::gguf::{Gguf, Header};
use paceline_weights::tensor::MappedBytes;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{CopyProgress, Fetch, SILENCE, TELL_EVERY};
use crate::fleet::hosts::NodeConnection;
use crate::workers::connection::ConnectionError;

/// Bytes per message: large enough that encryption and system calls are negligible next to the
/// copy.
const PIECE_BYTES: usize = 1 << 20;

pub(super) fn send_file(line: &NodeConnection, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = file.read(&mut piece)?;
        line.0.send(&piece[..n]).map_err(std::io::Error::other)?;
        if n == 0 {
            return Ok(());
        }
    }
}

/// Writes received bytes to `place`; returns their SHA-256.
pub(super) fn copy(
    from: &NodeConnection,
    place: &Path,
    fetch: &Fetch,
    told: &mut CopyProgress<'_>,
) -> Result<String, ConnectionError> {
    let mut file = BufWriter::new(File::create(place).map_err(ConnectionError::new)?);
    let (mut sum, mut done, mut last) = (Sha256::new(), 0_u64, Instant::now());
    loop {
        let piece = from
            .0
            .recv(PIECE_BYTES, SILENCE)
            .map_err(ConnectionError::new)?;
        let piece = piece.ok_or_else(|| ConnectionError::new("no further piece came"))?;
        if piece.is_empty() {
            break;
        }
        done += piece.len() as u64;
        if done > fetch.bytes {
            return Err(ConnectionError::new(format!(
                "more than the {} bytes said",
                fetch.bytes
            )));
        }
        sum.update(&piece);
        file.write_all(&piece).map_err(ConnectionError::new)?;
        if last.elapsed() >= TELL_EVERY {
            told(done)?;
            last = Instant::now();
        }
    }
    file.flush().map_err(ConnectionError::new)?;
    file.get_ref().sync_all().map_err(ConnectionError::new)?;
    Ok(digits(sum))
}

/// SHA-256 of a file in hexadecimal digits. Reads all of it.
pub(super) fn hash(path: &Path) -> io::Result<String> {
    let (mut sum, mut file) = (Sha256::new(), File::open(path)?);
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(digits(sum)),
            n => sum.update(&piece[..n]),
        }
    }
}

/// Bytes before the weights of a GGUF or safetensors file.
pub(super) fn header_bytes(path: &Path) -> Option<u64> {
    if path
        .extension()
        .is_some_and(|ending| ending == "safetensors")
    {
        return safetensors_header(path).ok();
    }
    let file = MappedBytes::open(path).ok()?;
    let header = Header::parse(&file).ok()?;
    let starts = header.tensors().iter().filter_map(|tensor| tensor.range());
    let first = starts.map(|range| range.start as u64).min();
    Some(first.unwrap_or(file.len() as u64))
}

/// Bytes before the weights of a safetensors file: the length of the header and the header.
pub(super) fn safetensors_header(path: &Path) -> io::Result<u64> {
    let (mut length, mut file) = ([0; 8], File::open(path)?);
    file.read_exact(&mut length)?;
    let header = u64::from_le_bytes(length).saturating_add(length.len() as u64);
    Ok(header.min(file.metadata()?.len()))
}

/// SHA-256 of bytes in hexadecimal digits.
pub(super) fn hash_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Folders are models in the layout of the Hugging Face hub: the file of weights, or their index.
const WEIGHTS: &str = "model.safetensors";
const WEIGHT_INDEX: &str = "model.safetensors.index.json";

/// Endings of a folder's files without weights: settings, tokenizers and chat templates.
const SETTINGS: [&str; 4] = ["json", "jinja", "model", "txt"];

/// Files in folders of their own: an encoder's pooling and its dense layers, and the template for
/// conversations with tools.
const NESTED: [&str; 6] = [
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Dense/config.json",
    "3_Dense/model.safetensors",
    TOOL_USE_FILE,
];

/// The store's record of a model, which each use changes.
const STORE_RECORD: &str = "paceline.json";

/// A file of a model of several files.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PartFile {
    /// Its name in the model's folder.
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) has_weights: bool,
}

/// The files of the model at `path`, a folder or a part of a split GGUF model. `None` for a model
/// of one file, and for a file that is not GGUF: its reader reports the error.
///
/// # Errors
/// A folder without weights, a missing part, or what the system says.
pub(super) fn model_files(path: &Path) -> io::Result<Option<Vec<PartFile>>> {
    match path.is_dir() {
        true => folder_files(path).map(Some),
        false => split_files(path),
    }
}

/// The parts of the split GGUF model at `path`, in order.
fn split_files(path: &Path) -> io::Result<Option<Vec<PartFile>>> {
    // Only files with such a name are opened as parts.
    let name = path.file_name().and_then(|name| name.to_str());
    if !name.is_some_and(|name| name.contains("-of-")) {
        return Ok(None);
    }
    let count = || {
        let header = Header::parse(&MappedBytes::open(path).ok()?).ok()?;
        header.metadata().opt_u64("split.count").ok()?
    };
    if !matches!(count(), Some(2..)) {
        return Ok(None);
    }
    let model = Gguf::open(path).map_err(io::Error::other)?;
    let part = |path: &Path| {
        Some(PartFile {
            name: path.file_name()?.to_str()?.to_owned(),
            path: path.to_owned(),
            has_weights: true,
        })
    };
    Ok(model.paths().map(part).collect())
}

/// The weights that a folder is opened with, and its files without weights, by name.
fn folder_files(folder: &Path) -> io::Result<Vec<PartFile>> {
    let weights = match folder.join(WEIGHTS).exists() {
        true => BTreeSet::from([WEIGHTS.to_owned()]),
        false => indexed_weights(&folder.join(WEIGHT_INDEX))?,
    };
    let mut others = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let ending = path.extension().and_then(|ending| ending.to_str());
        let is_settings = ending.is_some_and(|ending| SETTINGS.contains(&ending));
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.filter(|name| !name.starts_with('.') && *name != STORE_RECORD);
        if is_settings && path.is_file() {
            others.extend(name.map(str::to_owned));
        }
    }
    let nested = NESTED
        .into_iter()
        .filter(|name| folder.join(name).is_file());
    others.extend(nested.map(str::to_owned));
    let others = others.into_iter().map(|name| (name, false));
    let all = weights.into_iter().map(|name| (name, true)).chain(others);
    let file = |(name, has_weights): (String, bool)| PartFile {
        path: folder.join(&name),
        name,
        has_weights,
    };
    Ok(all.map(file).collect())
}

/// The names of files in an index of weights.
fn indexed_weights(index: &Path) -> io::Result<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct FileIndex {
        weight_map: BTreeMap<String, String>,
    }
    let text = match fs::read(index) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let reason = format!("holds no {WEIGHTS} or {WEIGHT_INDEX}");
            return Err(io::Error::new(error.kind(), reason));
        }
        text => text?,
    };
    let index: FileIndex = serde_json::from_slice(&text)?;
    Ok(index.weight_map.into_values().collect())
}

fn digits(sum: Sha256) -> String {
    hex(&sum.finalize())
}

#[cfg(test)]
mod tests {
    use paceline_weights::gguf::testing::GgufWriter;

    use super::*;

    fn names(path: &Path) -> Option<Vec<(String, bool)>> {
        let files = model_files(path).unwrap()?.into_iter();
        Some(files.map(|file| (file.name, file.has_weights)).collect())
    }

    #[test]
    fn a_folder_has_its_weights_and_settings() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("config.json", "{}");
        let error = model_files(folder.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "it has no weights");
        fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        for other in [
            "README.md",
            ".cache.json",
            "other.safetensors",
            "paceline.json",
            "m.bin",
        ] {
            write(other, "");
        }
        write("1_Pooling/config.json", "{}");
        write(TOOL_USE_FILE, "");
        write("chat_template.jinja", "");
        let map =
            r#"{"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors","c":"m-1.safetensors"}}"#;
        write(WEIGHT_INDEX, map);
        let small = [
            "1_Pooling/config.json",
            TOOL_USE_FILE,
            "chat_template.jinja",
            "config.json",
            WEIGHT_INDEX,
        ];
        let own = |weights: &[&str]| {
            let weights = weights.iter().map(|name| ((*name).to_owned(), true));
            let small = small.iter().map(|name| ((*name).to_owned(), false));
            Some(weights.chain(small).collect::<Vec<_>>())
        };
        let two = own(&["m-1.safetensors", "m-2.safetensors"]);
        assert_eq!(names(folder.path()), two);
        write(WEIGHTS, "");
        assert_eq!(
            names(folder.path()),
            own(&[WEIGHTS]),
            "the index is not read"
        );
    }

    #[test]
    fn a_split_model_has_its_parts() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let part = |number: u32, count: u32| {
            let part = GgufWriter::new().meta("split.no", number);
            let part = part.meta("split.tensors.count", 0_u32);
            part.meta("split.count", count)
        };
        part(0, 1).write(path("x-of-one.gguf"));
        part(0, 3).write(path("m-00001-of-00003.gguf"));
        fs::write(path("an-of-other"), "no GGUF").unwrap();
        for one in ["x-of-one.gguf", "an-of-other", "absent.gguf"] {
            assert_eq!(names(&path(one)), None, "{one}");
        }
        let first = path("m-00001-of-00003.gguf");
        let error = model_files(&first).unwrap_err().to_string();
        assert!(error.contains("m-00002-of-00003.gguf"), "{error}");
        part(1, 3).write(path("m-00002-of-00003.gguf"));
        part(2, 3).write(path("m-00003-of-00003.gguf"));
        let all = (1..=3).map(|no| (format!("m-{no:05}-of-00003.gguf"), true));
        assert_eq!(names(&first), Some(all.collect()));
    }
}
