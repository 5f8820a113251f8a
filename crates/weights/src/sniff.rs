//! Recognises files of other kinds, so that a wrong file gets a helpful error.

use std::fmt;

/// Apparent kind of a file that has not the expected format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LooksLike {
    /// No byte at all.
    Empty,
    /// Only zero bytes at the start: a preallocated download that never arrived.
    Zeros,
    /// A GGUF model.
    Gguf,
    /// A model of llama.cpp from before GGUF (`ggml`, `ggmf`, `ggjt`, `ggla`).
    OldGgml,
    /// A safetensors file.
    Safetensors,
    /// A zip archive, which is also what PyTorch writes.
    Zip,
    /// A Python pickle.
    Pickle,
    /// A gzip, xz or zstd stream.
    Compressed,
    /// The text file that git-lfs leaves in place of a large file.
    GitLfsPointer,
    /// A web page, such as a login or error page saved instead of a download.
    Html,
    /// A JSON text, such as an error of a server or an index file.
    Json,
    /// None of the known kinds.
    Unknown,
}

impl LooksLike {
    /// Judges by the first bytes; `start` may be the whole file.
    pub fn of(start: &[u8]) -> Self {
        const MAGICS: &[(&[u8], LooksLike)] = &[
            (b"GGUF", LooksLike::Gguf),
            (b"lmgg", LooksLike::OldGgml),
            (b"fmgg", LooksLike::OldGgml),
            (b"tjgg", LooksLike::OldGgml),
            (b"algg", LooksLike::OldGgml),
            (b"PK\x03\x04", LooksLike::Zip),
            (b"\x80\x02", LooksLike::Pickle),
            (b"\x80\x04", LooksLike::Pickle),
            (b"\x1f\x8b", LooksLike::Compressed),
            (b"\xfd7zXZ", LooksLike::Compressed),
            (b"\x28\xb5\x2f\xfd", LooksLike::Compressed),
            (b"version https://git-lfs", LooksLike::GitLfsPointer),
        ];
        if start.is_empty() {
            return Self::Empty;
        }
        if let Some((_, kind)) = MAGICS.iter().find(|(magic, _)| start.starts_with(magic)) {
            return *kind;
        }
        if start.get(8) == Some(&b'{') && start.get(5..8) == Some(&[0; 3]) {
            return Self::Safetensors; // a header length below 2^40, then JSON
        }
        Self::of_text(&start[..start.len().min(256)])
    }

    fn of_text(start: &[u8]) -> Self {
        let text = start.trim_ascii_start();
        match text.first() {
            Some(b'<') => Self::Html,
            Some(b'{' | b'[') => Self::Json,
            _ if start.iter().all(|&b| b == 0) => Self::Zeros,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for LooksLike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "it is empty",
            Self::Zeros => "it begins with zeros only",
            Self::Gguf => "it looks like a GGUF file",
            Self::OldGgml => "it looks like a GGML file from before GGUF",
            Self::Safetensors => "it looks like a safetensors file",
            Self::Zip => "it looks like a zip archive or PyTorch checkpoint",
            Self::Pickle => "it looks like a Python pickle",
            Self::Compressed => "it looks like a compressed file",
            Self::GitLfsPointer => "it looks like a git-lfs pointer, not the file it stands for",
            Self::Html => "it looks like a web page",
            Self::Json => "it looks like JSON text",
            Self::Unknown => "its first bytes are of no known kind",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_apart() {
        for (start, kind) in [
            (&b""[..], LooksLike::Empty),
            (&[0; 64], LooksLike::Zeros),
            (b"GGUF\x03\0\0\0", LooksLike::Gguf),
            (b"tjgg\x01\0\0\0", LooksLike::OldGgml),
            (b"\x10\0\0\0\0\0\0\0{\"a\":{}}", LooksLike::Safetensors),
            (b"PK\x03\x04rest", LooksLike::Zip),
            (b"\x80\x02}q\0", LooksLike::Pickle),
            (b"\x1f\x8b\x08", LooksLike::Compressed),
            (
                b"version https://git-lfs.github.com/spec/v1\n",
                LooksLike::GitLfsPointer,
            ),
            (b"\n<!DOCTYPE html><html>", LooksLike::Html),
            (b"{\"error\":\"not found\"}", LooksLike::Json),
            (b"hello", LooksLike::Unknown),
        ] {
            assert_eq!(LooksLike::of(start), kind, "{start:?}");
        }
    }
}
