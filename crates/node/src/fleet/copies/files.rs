//! Whole files: their SHA-256, and copies from one node to another.

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use paceline_base::hex;
use paceline_formats::gguf::Header;
use paceline_formats::tensor::MappedBytes;
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

/// SHA-256 of a file, or of the names, lengths and bytes of a folder's files in order of their
/// names; in hexadecimal digits. Reads all of it.
///
/// # Errors
/// What the system says.
pub(super) fn hash(path: &Path) -> std::io::Result<String> {
    let mut sum = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    for of_model in files(path)? {
        let mut file = File::open(&of_model)?;
        if let Ok(name) = of_model.strip_prefix(path)
            && name != Path::new("")
        {
            sum.update(name.as_os_str().as_encoded_bytes());
            sum.update([0]);
            sum.update(file.metadata()?.len().to_le_bytes());
        }
        loop {
            match file.read(&mut piece)? {
                0 => break,
                n => sum.update(&piece[..n]),
            }
        }
    }
    Ok(digits(sum))
}

/// Most files of a model's folder: some hundreds of shards in the largest known.
const FILES_MAX: usize = 4096;

/// The file itself, or all files below a folder, in order of their names.
///
/// # Errors
/// A folder that cannot be read, or that has more than [`FILES_MAX`] files.
pub(super) fn files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let (mut folders, mut all) = (vec![path.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                false => all.push(path),
            }
            if all.len() + folders.len() > FILES_MAX {
                let reason = format!("a folder of over {FILES_MAX} files is no model");
                return Err(std::io::Error::other(reason));
            }
        }
    }
    all.sort();
    Ok(all)
}

/// A model of several files. Copies consist of one file, so such a model cannot be sent to another
/// machine.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::fleet) enum Several {
    #[error("{} is a folder: over several machines only models of one GGUF file can be loaded", path.display())]
    Folder { path: PathBuf },
    #[error(
        "{} is one of {parts} files of a split model: other machines can be given only models of \
         one GGUF file; `llama-gguf-split --merge` makes one, or load it on the machine that has \
         all of them",
        path.display()
    )]
    Split { path: PathBuf, parts: u64 },
}

/// Checks whether the model at `path` is one file. Reads the file's header. A file that is not GGUF
/// passes: its reader reports the error.
///
/// # Errors
/// [`Several`].
pub(in crate::fleet) fn check_single(path: &Path) -> Result<(), Several> {
    let path = path.to_owned();
    if path.is_dir() {
        return Err(Several::Folder { path });
    }
    let count = || {
        let header = Header::parse(&MappedBytes::open(&path).ok()?).ok()?;
        header.metadata().opt_u64("split.count").ok()?
    };
    match count() {
        Some(parts @ 2..) => Err(Several::Split { path, parts }),
        _ => Ok(()),
    }
}

fn digits(sum: Sha256) -> String {
    hex(&sum.finalize())
}

#[cfg(test)]
mod tests {
    use paceline_formats::gguf::testing::GgufWriter;

    use super::*;

    #[test]
    fn a_folder_is_known_by_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        fs::create_dir(folder.path().join("inner")).unwrap();
        write("a", "1");
        write("inner/b", "2");
        let first = hash(folder.path()).unwrap();
        assert_eq!(hash(folder.path()).unwrap(), first);
        write("inner/b", "3");
        assert_ne!(hash(folder.path()).unwrap(), first);
        write("inner/b", "2");
        assert_eq!(hash(folder.path()).unwrap(), first);
        write("c", "");
        assert_ne!(hash(folder.path()).unwrap(), first);
    }

    #[test]
    fn models_of_several_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let part = |count: u32| {
            let part = GgufWriter::new().meta("split.no", 0_u32);
            part.meta("split.count", count)
        };
        part(1).write(path("one.gguf"));
        part(3).write(path("m-00001-of-00003.gguf"));
        fs::write(path("other"), "no GGUF").unwrap();
        let check = |name: &str| check_single(&path(name));
        assert_eq!((check("one.gguf"), check("other")), (Ok(()), Ok(())));
        let split = check("m-00001-of-00003.gguf").unwrap_err().to_string();
        assert!(
            split.contains("is one of 3 files of a split model"),
            "{split}"
        );
        let path = folder.path().to_owned();
        assert_eq!(check_single(&path), Err(Several::Folder { path }));
    }
}
