//! Manifest of a model of several files: names, lengths and hashes of all of them.
//!
//! ```text
//! {"paceline_manifest":1,
//!  "files":[{"name":"model-00001-of-00002.safetensors","bytes":N,"sha256":"..","header":N,
//!            "root":".."}, ..],
//!  "inline":{"config.json":"text", ..}}
//! ```
//! The SHA-256 of these bytes identifies the model. Each file is verified by its SHA-256 there, and
//! each range by the root of its hash tree. Small text files are part of the manifest.
//!
//! A manifest comes from another node. [`Manifest::parse`] accepts only what
//! [`Manifest::to_bytes`] writes, with names that stay inside the model's folder.
//!
//! Pure: no files, no clock. `copies` computes manifests and opens models by them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::roots::BYTES_MAX;

/// Version of the layout.
const VERSION: u32 = 1;

/// Most files of a model, inline ones among them: some hundreds of shards in the largest known.
pub(super) const FILES_MAX: usize = 4096;

/// Longest manifest: sixteen inline files of the largest size, and 4096 entries of some 300 bytes.
pub(super) const MANIFEST_BYTES_MAX: u64 = 20 << 20;

/// Largest inline file: above the largest settings file but a tokenizer's.
pub(super) const INLINE_BYTES_MAX: u64 = 1 << 20;

/// Most bytes of all inline files.
pub(super) const INLINE_TOTAL_MAX: u64 = 16 << 20;

/// Longest name, and most folders in it: the limits of names in the store are similar.
const NAME_BYTES_MAX: usize = 200;
const NAME_PARTS_MAX: usize = 8;

/// Ending of files that are being written, which are renamed once they are complete.
const UNFINISHED: &str = ".new";

/// Why bytes are no manifest.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("a manifest of {bytes} bytes, {MANIFEST_BYTES_MAX} are the most")]
    TooLong { bytes: usize },
    #[error("no manifest: {0}")]
    Json(#[from] serde_json::Error),
    #[error("a manifest of version {got}, expected {VERSION}")]
    Version { got: u32 },
    #[error("a manifest with {got} files, expected 1 to {FILES_MAX}")]
    Count { got: usize },
    #[error("inline files of {bytes} bytes, {INLINE_TOTAL_MAX} are the most")]
    Inline { bytes: u64 },
    #[error("{name:?} is no name of a file inside the model's folder")]
    Name { name: String },
    #[error("{name:?} is a name twice, or a folder and a file")]
    Duplicate { name: String },
    #[error("{name}: {field} {got:?} has not 64 lower-case hexadecimal digits")]
    Digest {
        name: String,
        field: &'static str,
        got: String,
    },
    #[error("{name}: {bytes} bytes, {header} of them a header: {BYTES_MAX} are the most")]
    Length {
        name: String,
        bytes: u64,
        header: u64,
    },
    #[error("{name}: another file with its SHA-256 has another length or root")]
    Contradiction { name: String },
    #[error("a manifest in another order or with other fields than paceline writes")]
    NotCanonical,
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ManifestFile {
    /// Path inside the model's folder, with `/`.
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Lower-case hexadecimal digits.
    pub(super) sha256: String,
    /// Bytes before its weights; all of a file without weights.
    pub(super) header: u64,
    /// Root of its hash tree, in hexadecimal digits.
    pub(super) root: String,
}

/// The files of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    paceline_manifest: u32,
    /// By name.
    files: Vec<ManifestFile>,
    /// Small text files, by name.
    inline: BTreeMap<String, String>,
}

impl Manifest {
    pub(super) fn new(
        mut files: Vec<ManifestFile>,
        inline: BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let manifest = Self {
            paceline_manifest: VERSION,
            files,
            inline,
        };
        manifest.check().map(|()| manifest)
    }

    /// Reads a manifest of another node.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            let bytes = bytes.len();
            return Err(Error::TooLong { bytes });
        }
        let manifest: Self = serde_json::from_slice(bytes)?;
        manifest.check()?;
        match manifest.to_bytes() == bytes {
            true => Ok(manifest),
            false => Err(Error::NotCanonical),
        }
    }

    /// Its bytes, whose SHA-256 identifies the model.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a manifest is JSON")
    }

    /// Its files, by name; without inline ones.
    pub(super) fn files(&self) -> &[ManifestFile] {
        &self.files
    }

    /// Its small text files, by name.
    pub(super) const fn inline(&self) -> &BTreeMap<String, String> {
        &self.inline
    }

    pub(super) fn file(&self, name: &str) -> Option<&ManifestFile> {
        let at = self
            .files
            .binary_search_by(|file| file.name.as_str().cmp(name));
        at.ok().map(|at| &self.files[at])
    }

    /// Whether one of its files has this SHA-256.
    pub(super) fn has(&self, sha256: &str) -> bool {
        self.files.iter().any(|file| file.sha256 == sha256)
    }

    /// Length of all files, without inline ones.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = self.files.iter().map(|file| file.bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// Bytes of weights in all files.
    pub(super) fn weights(&self) -> u64 {
        let weights = self.files.iter().map(|file| file.bytes - file.header);
        weights.fold(0, u64::saturating_add)
    }

    /// Name of the file by which the model is opened: the first part of a split GGUF model. `None`
    /// for a model that is opened by its folder.
    pub(super) fn first_part(&self) -> Option<&str> {
        let is_gguf = |file: &ManifestFile| file.name.ends_with(".gguf");
        let first = self
            .files
            .first()
            .filter(|_| self.files.iter().all(is_gguf));
        first.map(|file| file.name.as_str())
    }

    fn check(&self) -> Result<(), Error> {
        let (got, count) = (self.paceline_manifest, self.files.len() + self.inline.len());
        if got != VERSION {
            return Err(Error::Version { got });
        }
        if self.files.is_empty() || count > FILES_MAX {
            return Err(Error::Count { got: count });
        }
        let inline = self.inline.values().map(|text| text.len() as u64).sum();
        if inline > INLINE_TOTAL_MAX {
            return Err(Error::Inline { bytes: inline });
        }
        self.check_names()?;
        self.files.iter().try_for_each(ManifestFile::check)?;
        let (bytes, header) = (self.bytes(), 0);
        if bytes > BYTES_MAX {
            let name = "all files".to_owned();
            return Err(Error::Length {
                name,
                bytes,
                header,
            });
        }
        self.check_contents()
    }

    /// Names are plain, in order, and distinct on file systems that ignore case too.
    fn check_names(&self) -> Result<(), Error> {
        let names = || {
            let files = self.files.iter().map(|file| &file.name);
            files.chain(self.inline.keys())
        };
        if !self.files.is_sorted_by(|a, b| a.name <= b.name) {
            return Err(Error::NotCanonical);
        }
        let mut seen = BTreeSet::new();
        for name in names() {
            if !is_plain(name) {
                return Err(Error::Name { name: name.clone() });
            }
            if !seen.insert(name.to_lowercase()) {
                return Err(Error::Duplicate { name: name.clone() });
            }
        }
        let is_folder = |name: &&String| {
            let folders = name
                .match_indices('/')
                .map(|(at, _)| name[..at].to_lowercase());
            folders.into_iter().any(|folder| seen.contains(&folder))
        };
        match names().find(is_folder) {
            Some(name) => Err(Error::Duplicate { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// Files with one SHA-256 are one file.
    fn check_contents(&self) -> Result<(), Error> {
        let mut known = BTreeMap::new();
        for file in &self.files {
            let facts = (file.bytes, &file.root);
            if *known.entry(&file.sha256).or_insert(facts) != facts {
                let name = file.name.clone();
                return Err(Error::Contradiction { name });
            }
        }
        Ok(())
    }
}

impl ManifestFile {
    fn check(&self) -> Result<(), Error> {
        let name = || self.name.clone();
        for (field, got) in [("sha256", &self.sha256), ("root", &self.root)] {
            let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
            if got.len() != 64 || !got.bytes().all(is_digit) {
                let (name, got) = (name(), got.clone());
                return Err(Error::Digest { name, field, got });
            }
        }
        let (bytes, header) = (self.bytes, self.header);
        match bytes > BYTES_MAX || header > bytes {
            true => Err(Error::Length {
                name: name(),
                bytes,
                header,
            }),
            false => Ok(()),
        }
    }
}

/// Whether a name stays inside the folder it is joined to, and can be shown to people.
fn is_plain(name: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && part != "." && part != "..";
    let is_odd = |c: char| c.is_control() || c == '\\';
    name.len() <= NAME_BYTES_MAX
        && !name.ends_with(UNFINISHED)
        && !name.contains(is_odd)
        && name.split('/').count() <= NAME_PARTS_MAX
        && name.split('/').all(is_part)
}

/// Reads `bytes` as a manifest, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::parse(bytes) {
        assert_eq!(manifest.to_bytes(), bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> ManifestFile {
        ManifestFile {
            name: name.to_owned(),
            bytes: 100,
            sha256: "a".repeat(64),
            header: 10,
            root: "b".repeat(64),
        }
    }

    fn small(names: &[&str]) -> BTreeMap<String, String> {
        names
            .iter()
            .map(|name| ((*name).to_owned(), "{}".to_owned()))
            .collect()
    }

    /// The error of a manifest of these files, read from its bytes.
    fn refused(files: Vec<ManifestFile>, inline: &[&str]) -> String {
        let (paceline_manifest, inline) = (VERSION, small(inline));
        let manifest = Manifest {
            paceline_manifest,
            files,
            inline,
        };
        Manifest::parse(&manifest.to_bytes())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn what_is_written_is_read() {
        let files = vec![file("m-00002.safetensors"), file("m-00001.safetensors")];
        let manifest = Manifest::new(files, small(&["config.json", "1_Pooling/config.json"]));
        let manifest = manifest.unwrap();
        let bytes = manifest.to_bytes();
        assert_eq!(Manifest::parse(&bytes).unwrap(), manifest);
        assert_eq!(manifest.bytes(), 200);
        assert_eq!(manifest.files()[0].name, "m-00001.safetensors");
        let name = "m-00002.safetensors";
        assert_eq!(manifest.file(name).unwrap().name, name);
        assert!(manifest.file("config.json").is_none());
        assert_eq!(manifest.first_part(), None);
        let parts = vec![file("m-00001-of-00002.gguf"), file("m-00002-of-00002.gguf")];
        let split = Manifest::new(parts, BTreeMap::new()).unwrap();
        assert_eq!(split.first_part(), Some("m-00001-of-00002.gguf"));
    }

    #[test]
    fn names_that_leave_the_folder_or_meet_are_refused() {
        let long = "a".repeat(NAME_BYTES_MAX + 1);
        let deep = "a/".repeat(NAME_PARTS_MAX) + "a";
        for name in [
            "", "/m", "../m", "a/../m", "a//m", "./m", "m/", "..", "a\\m", "m\n", "m\0", "m.new",
            &long, &deep,
        ] {
            let refusals = [
                refused(vec![file(name)], &[]),
                refused(vec![file("m")], &[name]),
            ];
            for refusal in refusals {
                assert!(refusal.contains("no name of a file inside"), "{refusal}");
            }
        }
        for (files, inline) in [
            (vec![file("m"), file("m")], vec![]),
            (vec![file("m")], vec!["m"]),
            (vec![file("M"), file("m")], vec![]),
            (vec![file("m")], vec!["m/config.json"]),
            (vec![file("m/a"), file("m/a/b")], vec![]),
        ] {
            let refusal = refused(files, &inline);
            assert!(refusal.contains("is a name twice"), "{refusal}");
        }
    }

    #[test]
    fn counts_lengths_and_hashes_have_limits() {
        let many = |n: usize| (0..n).map(|i| file(&format!("{i:05}"))).collect::<Vec<_>>();
        assert!(Manifest::new(many(FILES_MAX), BTreeMap::new()).is_ok());
        let refusal = refused(many(FILES_MAX + 1), &[]);
        assert!(refusal.contains("with 4097 files"), "{refusal}");
        assert!(refused(Vec::new(), &["a"]).contains("with 1 files"));
        let with = |change: fn(&mut ManifestFile)| {
            let mut other = file("m");
            change(&mut other);
            refused(vec![file("a"), other], &[])
        };
        for (change, told) in [
            (
                (|it| it.header = 101) as fn(&mut ManifestFile),
                "101 of them a header",
            ),
            (|it| it.bytes = u64::MAX, "are the most"),
            (|it| it.bytes = BYTES_MAX, "all files"),
            (|it| it.sha256 = "A".repeat(64), "sha256"),
            (|it| it.sha256 = "../../../etc/passwd".to_owned(), "sha256"),
            (|it| it.root.push('b'), "root"),
            (|it| it.root = "c".repeat(64), "another length or root"),
        ] {
            let refusal = with(change);
            assert!(refusal.contains(told), "{told}: {refusal}");
        }
        let long = vec![b' '; MANIFEST_BYTES_MAX as usize + 1];
        let refusal = Manifest::parse(&long).unwrap_err().to_string();
        assert!(refusal.contains("are the most"), "{refusal}");
        let text = "x".repeat(INLINE_TOTAL_MAX as usize + 1);
        let inline = BTreeMap::from([("a".to_owned(), text)]);
        let refusal = Manifest::new(vec![file("m")], inline).unwrap_err();
        assert!(matches!(refusal, Error::Inline { .. }), "{refusal}");
    }

    #[test]
    fn other_texts_of_the_same_manifest_are_refused() {
        let manifest = Manifest::new(vec![file("a"), file("m")], small(&["config.json"]));
        let text = String::from_utf8(manifest.unwrap().to_bytes()).unwrap();
        for (from, to) in [
            (
                "{\"config.json\":\"{}\"}",
                "{\"config.json\":\"1\",\"config.json\":\"{}\"}",
            ),
            ("\"files\":", "\"files\": "),
            ("\"name\":\"a\"", "\"name\":\"z\""),
            ("\"inline\"", "\"later\":1,\"inline\""),
            ("manifest\":1", "manifest\":2"),
            ("manifest\":1", "manifest\":-1"),
        ] {
            let other = text.replacen(from, to, 1);
            assert_ne!(other, text);
            assert!(Manifest::parse(other.as_bytes()).is_err(), "{other}");
        }
        assert!(Manifest::parse(&text.as_bytes()[..text.len() - 1]).is_err());
    }
}
