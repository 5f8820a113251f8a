//! A GGUF model on disk: one mapped file or several.

use std::ops::Range;
use std::path::{Path, PathBuf};

use paceline_base::Bytes;

use super::header::index_tensors;
use super::split::SplitName;
use super::{Error, Header, Metadata, TensorInfo};
use crate::name_index::NameIndex;
use crate::tensor::{FindArrivals, MappedBytes, Tensor};

/// An open GGUF model.
///
/// Holds the header in memory and the weights as mappings; see [`crate::tensor`] for what that
/// demands of the files. Cheap to share by reference between threads.
#[derive(Debug)]
pub struct Gguf {
    parts: Vec<SplitFile>,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    index: NameIndex,
}

/// A file of the model: the only one, or a part.
#[derive(Debug)]
struct SplitFile {
    path: PathBuf,
    bytes: MappedBytes,
}

impl Gguf {
    /// Opens the model at `path`, which for a split model may be any of its parts.
    ///
    /// A file is part of a split model when its metadata has a `split.count` above 1. All parts
    /// must then lie in one folder under the names that llama.cpp's splitter gives. A file that
    /// only has such a name is opened alone. Metadata are those of the first part.
    ///
    /// # Errors
    /// [`Error::InFile`] with the path and what is wrong: the file cannot be opened, is not GGUF,
    /// is truncated, contradicts itself or the other parts.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let (part, header) = open_part(path)?;
        let count = header
            .metadata()
            .opt_u64("split.count")
            .map_err(|e| e.in_file(path))?;
        match count {
            Some(count @ 2..) => Self::open_split(path, count).map_err(|e| e.in_file(path)),
            _ => Self::assemble(vec![(part, header)]).map_err(|e| e.in_file(path)),
        }
    }

    /// Opens files that are still being downloaded: everything before their weights is there. A
    /// read of a weight waits until the progress that `find` returns for its file has its bytes.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open); those of `find`, as [`Error::Open`].
    pub fn open_arriving(path: impl AsRef<Path>, find: &FindArrivals<'_>) -> Result<Self, Error> {
        let mut model = Self::open(path)?;
        for SplitFile { path, bytes } in &mut model.parts {
            let arriving = bytes.arriving_by(path, find);
            *bytes = arriving.map_err(|error| Error::from(error).in_file(path))?;
        }
        Ok(model)
    }

    fn open_split(path: &Path, count: u64) -> Result<Self, Error> {
        let name = SplitName::parse(path).ok_or(Error::SplitName { count })?;
        let mut parts = Vec::new();
        for no in 1..=name.count {
            let path = name.part(no);
            let (part, header) = open_part(&path)?;
            check_part(header.metadata(), no, name.count).map_err(|e| e.in_file(&path))?;
            parts.push((part, header));
        }
        let model = Self::assemble(parts)?;
        let (got, expected) = (model.tensors.len() as u64, model.metadata.u64(TENSORS_KEY)?);
        if got != expected {
            return Err(Error::SplitTensors { got, expected });
        }
        Ok(model)
    }

    /// Joins the tensor tables of all parts.
    fn assemble(opened: Vec<(SplitFile, Header)>) -> Result<Self, Error> {
        let (mut parts, mut metadata, mut tensors) = (Vec::new(), None, Vec::new());
        for (no, (part, header)) in opened.into_iter().enumerate() {
            let (own_metadata, mut own_tensors) = header.into_parts();
            metadata.get_or_insert(own_metadata);
            own_tensors.iter_mut().for_each(|tensor| tensor.part = no);
            tensors.append(&mut own_tensors);
            parts.push(part);
        }
        let index = index_tensors(&tensors)?;
        Ok(Self {
            parts,
            metadata: metadata.unwrap_or_default(),
            tensors,
            index,
        })
    }

    /// The key-value pairs, of the first part when split.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors in file order, part after part, unsupported ones included.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// Whether the file has a tensor of that name, of any storage type.
    pub fn has(&self, name: &str) -> bool {
        self.info(name).is_some()
    }

    /// The entry of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.index.find(&self.tensors, TensorInfo::name, name)
    }

    /// The tensor called `name`. Copies no weights.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::Unsupported`] for a storage type that paceline does not
    /// read. Both are wrapped in [`Error::InFile`].
    pub fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        let missing = || Error::MissingTensor {
            tensor: name.to_owned(),
        };
        let info = self
            .info(name)
            .ok_or_else(|| missing().in_file(&self.parts[0].path))?;
        let part = &self.parts[info.part];
        let block_type = info.block_type().map_err(|error| {
            Error::Unsupported {
                tensor: name.to_owned(),
                error,
            }
            .in_file(&part.path)
        })?;
        let range = info.range().expect("the size of a supported type is known");
        let bytes = part
            .bytes
            .slice(range)
            .expect("ranges were checked against the file");
        Ok(Tensor {
            name: name.to_owned(),
            block_type,
            shape: info.shape().to_vec(),
            bytes,
        })
    }

    /// The file that holds the tensor called `name`, and its byte range there. `None` for an absent
    /// tensor, or one of a storage type of unknown size.
    pub fn location(&self, name: &str) -> Option<(&Path, Range<usize>)> {
        let info = self.info(name)?;
        Some((&self.parts[info.part].path, info.range()?))
    }

    /// Size of all files of the model.
    pub fn file_bytes(&self) -> Bytes {
        Bytes(self.parts.iter().map(|part| part.bytes.len() as u64).sum())
    }

    /// The bytes of each file, in order of their parts, and the length of the prefix before its
    /// weights. The prefix has header, metadata (tokenizer and chat template among them) and tensor
    /// table. Does not wait: weights that have not arrived are zero.
    pub fn contents(&self) -> impl Iterator<Item = (&[u8], usize)> {
        self.parts.iter().enumerate().map(|(no, part)| {
            let own = self.tensors.iter().filter(|tensor| tensor.part == no);
            let starts = own.filter_map(|tensor| Some(tensor.range()?.start));
            let bytes = part.bytes.as_they_are();
            (bytes, starts.min().unwrap_or(bytes.len()))
        })
    }

    /// The files of the model, in order of their parts; never empty.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }
}

/// Key of the number of tensors in all parts.
const TENSORS_KEY: &str = "split.tensors.count";

/// Maps one file and reads its header.
fn open_part(path: &Path) -> Result<(SplitFile, Header), Error> {
    let open = || {
        let bytes = MappedBytes::open(path)?;
        let header = Header::parse(&bytes)?;
        Ok((
            SplitFile {
                path: path.to_owned(),
                bytes,
            },
            header,
        ))
    };
    open().map_err(|e: Error| e.in_file(path))
}

/// Checks that a file is part `no` (from 1) of `count`; files count parts from 0.
fn check_part(metadata: &Metadata, no: u64, count: u64) -> Result<(), Error> {
    for (key, expected) in [("split.count", count), ("split.no", no - 1)] {
        let got = metadata.u64(key)?;
        if got != expected {
            return Err(Error::SplitMismatch { key, got, expected });
        }
    }
    Ok(())
}
