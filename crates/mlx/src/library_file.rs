//! Whether a shared library's file is as long as its headers say.
//!
//! The loader maps what the headers describe and checks little. A file cut off behind its headers
//! ends the process with a bus error when its functions are first used. So this module looks first:
//! at the program headers of ELF files and the segments of Mach-O files. Both are 64 bits and
//! little endian, as on the systems that MLX is for. Source: `elf.h`, `mach-o/loader.h`.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::Error;

/// Headers that are read: far more than the load commands of MLX's libraries, which are 3 KB.
const HEADER_BYTES: u64 = 64 << 10;

const ELF: [u8; 4] = *b"\x7fELF";
const MACH_O: [u8; 4] = 0xfeed_facf_u32.to_le_bytes();

/// `LC_SEGMENT_64`
const SEGMENT: u32 = 0x19;

/// Checks the file at `path`.
///
/// # Errors
/// [`Error::Read`], [`Error::Truncated`]; [`Error::NotALibrary`] for another format than this
/// system's.
pub(crate) fn check(path: &Path) -> Result<(), Error> {
    let read = |source| Error::Read {
        path: path.to_path_buf(),
        source,
    };
    let file = File::open(path).map_err(read)?;
    let got = file.metadata().map_err(read)?.len();
    let mut head = Vec::new();
    match file.take(HEADER_BYTES).read_to_end(&mut head) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => Ok(0),
        other => other,
    }
    .map_err(read)?;
    let end = match head.first_chunk() {
        Some(&ELF) if cfg!(not(target_os = "macos")) => elf_end(&head),
        Some(&MACH_O) if cfg!(target_os = "macos") => mach_o_end(&head),
        _ => {
            let path = path.to_path_buf();
            return Err(Error::NotALibrary { path });
        }
    };
    // Headers that are cut off themselves describe at least one byte more than there is.
    let expected = end.unwrap_or(head.len() as u64 + 1);
    if expected <= got {
        return Ok(());
    }
    Err(Error::Truncated {
        path: path.to_path_buf(),
        expected,
        got,
    })
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let part: [u8; N] = bytes.get(at..at.checked_add(N)?)?.try_into().ok()?;
    let mut word = [0; 8];
    word[..N].copy_from_slice(&part);
    Some(u64::from_le_bytes(word))
}

/// Where the last section header and the last segment end; `None` when the headers are cut off.
fn elf_end(head: &[u8]) -> Option<u64> {
    let (table, entry, entries) = (
        word::<8>(head, 32)?,
        word::<2>(head, 54)?,
        word::<2>(head, 56)?,
    );
    let sections = word::<8>(head, 40)?;
    let section_bytes = word::<2>(head, 58)? * word::<2>(head, 60)?;
    let mut end = sections.saturating_add(section_bytes);
    for i in 0..entries {
        let at = usize::try_from(table.saturating_add(i * entry)).ok()?;
        let (offset, bytes) = (word::<8>(head, at + 8)?, word::<8>(head, at + 32)?);
        end = end.max(offset.saturating_add(bytes));
    }
    Some(end)
}

/// Where the last segment ends; `None` when the headers are cut off.
fn mach_o_end(head: &[u8]) -> Option<u64> {
    let commands = word::<4>(head, 16)?;
    let (mut at, mut end) = (32usize, 0);
    for _ in 0..commands {
        let bytes = usize::try_from(word::<4>(head, at + 4)?).ok()?;
        if word::<4>(head, at)? == u64::from(SEGMENT) {
            let (offset, bytes) = (word::<8>(head, at + 40)?, word::<8>(head, at + 48)?);
            end = end.max(offset.saturating_add(bytes));
        }
        at = at.checked_add(bytes.max(8))?;
    }
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with `entries` program headers. The first describes `bytes` from 0.
    fn elf(entries: u16, bytes: u64) -> Vec<u8> {
        let mut head = vec![0; 64 + 56 * usize::from(entries)];
        head[..4].copy_from_slice(&ELF);
        head[32..40].copy_from_slice(&64u64.to_le_bytes());
        head[54..56].copy_from_slice(&56u16.to_le_bytes());
        head[56..58].copy_from_slice(&entries.to_le_bytes());
        head[96..104].copy_from_slice(&bytes.to_le_bytes());
        head
    }

    #[test]
    fn segments_must_lie_in_the_file() {
        assert_eq!(elf_end(&elf(2, 176)), Some(176));
        assert_eq!(elf_end(&elf(2, 177)), Some(177));
        assert_eq!(elf_end(&elf(2, 176)[..100]), None);
        assert_eq!(elf_end(&elf(2, u64::MAX)), Some(u64::MAX));
    }

    #[test]
    fn segments_of_mach_o_too() {
        let mut head = vec![0; 32 + 72];
        head[..4].copy_from_slice(&MACH_O);
        head[16] = 1;
        head[32] = 0x19;
        head[36] = 72;
        head[72..80].copy_from_slice(&1000u64.to_le_bytes());
        head[80..88].copy_from_slice(&24u64.to_le_bytes());
        assert_eq!(mach_o_end(&head), Some(1024));
        assert_eq!(mach_o_end(&head[..80]), None);
    }

    #[test]
    fn every_cut_of_a_file_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lib");
        let whole = elf(1, 120);
        for n in 4..whole.len() {
            std::fs::write(&path, &whole[..n]).unwrap();
            let error = check(&path);
            assert!(
                matches!(
                    error,
                    Err(Error::Truncated { .. } | Error::NotALibrary { .. })
                ),
                "{n} bytes: {error:?}"
            );
        }
        std::fs::write(&path, "#!/bin/sh").unwrap();
        assert!(matches!(check(&path), Err(Error::NotALibrary { .. })));
    }
}
