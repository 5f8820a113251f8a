//! Names of the parts of a split model: `NAME-00001-of-00003.gguf`, from 1.
//!
//! Source: `llama_split_path` in `llama.cpp`, format `%s-%05d-of-%05d.gguf`.

use std::path::{Path, PathBuf};

/// A file name that follows the scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SplitName {
    /// The path up to the `-` before the number.
    prefix: PathBuf,
    /// Number of this part, from 1.
    pub(super) no: u64,
    /// Number of parts.
    pub(super) count: u64,
}

impl SplitName {
    /// Reads the scheme from a path; `None` when the name does not follow it.
    pub(super) fn parse(path: &Path) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (name, no) = rest.rsplit_once('-')?;
        let (no, count) = (five_digits(no)?, five_digits(count)?);
        if name.is_empty() {
            return None;
        }
        let prefix = path.with_file_name(name);
        (1..=count)
            .contains(&no)
            .then_some(Self { prefix, no, count })
    }

    /// The path of part `no`, from 1.
    pub(super) fn part(&self, no: u64) -> PathBuf {
        let mut path = self.prefix.clone().into_os_string();
        path.push(format!("-{no:05}-of-{:05}.gguf", self.count));
        path.into()
    }
}

fn five_digits(text: &str) -> Option<u64> {
    let is_number = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if is_number { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_scheme_or_not() {
        for (path, expected) in [
            ("dir/m-00002-of-00003.gguf", Some((2, 3))),
            ("m-of-x-00001-of-00001.gguf", Some((1, 1))),
            ("m-00004-of-00003.gguf", None),
            ("m-00000-of-00003.gguf", None),
            ("m-0001-of-0003.gguf", None),
            ("m-+0001-of-00003.gguf", None),
            ("m-00001-of-00003.bin", None),
            ("-00001-of-00002.gguf", None),
            ("m.gguf", None),
            ("", None),
        ] {
            let parsed = SplitName::parse(Path::new(path));
            assert_eq!(parsed.map(|s| (s.no, s.count)), expected, "{path}");
        }
    }

    #[test]
    fn other_parts_are_named() {
        let name = SplitName::parse(Path::new("dir/m.v2-00002-of-00003.gguf")).unwrap();
        assert_eq!(name.part(1), Path::new("dir/m.v2-00001-of-00003.gguf"));
        assert_eq!(name.part(2), Path::new("dir/m.v2-00002-of-00003.gguf"));
    }
}
