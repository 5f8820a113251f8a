//! A model as a folder of files, in the layout of the Hugging Face hub.
//!
//! ```text
//! config.json                        architecture and sizes, required
//! model.safetensors                  weights in one file, or
//! model.safetensors.index.json       which file holds which tensor
//! tokenizer.json                     read by crate::tokenizer
//! tokenizer_config.json              special tokens, often the chat template
//! chat_template.jinja                the chat template, where it is a file of its own
//! generation_config.json             stop tokens and sampling defaults
//! ```
//!
//! The index may only name files inside the folder. Links are followed, because the hub's own
//! cache is a folder of links to blobs. Python code, pickles and everything else in the folder are
//! never looked at. A JSON file is read whole, up to a limit; the weights are mapped.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use paceline_base::Bytes;
use serde_json::Value;

use crate::mlx::{self, Quantised, Scheme, UncheckedTensor};
use crate::name_index::NameIndex;
use crate::safetensors::{self, Safetensors};
use crate::scaled;
use crate::tensor::{Absent, FindArrivals, MappedBytes, Tensor};

mod expert_stack;
mod weight_map;

pub use expert_stack::StackSlice;

use weight_map::WeightMap;

/// Largest settings file. The largest seen is Gemma 3's `tokenizer_config.json`, 1.2 MB; the limit
/// bounds memory, since a parsed value may take tens of times its text.
const MAX_SETTINGS_BYTES: u64 = 8 << 20;

/// Largest index of shards: about 100 bytes a tensor; DeepSeek-V3's, 92,000 tensors, is 9 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Why a folder cannot be used as a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{}: cannot read: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{}: not a folder", path.display())]
    NotAFolder { path: PathBuf },
    /// A folder, pipe or device in the place of a file.
    #[error("{}: not a regular file", path.display())]
    NotAFile { path: PathBuf },
    /// A text file that is larger than any of its kind.
    #[error("{}: larger than {max}", path.display())]
    TooLarge {
        path: PathBuf,
        /// The most that is read.
        max: Bytes,
    },
    /// A file that is not JSON, or not with the fields it must have.
    #[error("{}: {error}", path.display())]
    Json {
        path: PathBuf,
        error: serde_json::Error,
    },
    #[error("{}: not UTF-8", path.display())]
    NotUtf8 { path: PathBuf },
    #[error("{}: {field}: expected {expected}", path.display())]
    Field {
        path: PathBuf,
        field: &'static str,
        /// Types that the field may have.
        expected: &'static str,
    },
    #[error("{}: holds no model.safetensors or model.safetensors.index.json", path.display())]
    NoWeights { path: PathBuf },
    #[error("{}: tensor {tensor} is in {file:?}, which is not inside the folder", path.display())]
    Escape {
        path: PathBuf,
        tensor: String,
        /// The file it is said to be in.
        file: String,
    },
    #[error("{}: tensor {tensor} occurs twice", path.display())]
    DuplicateTensor { path: PathBuf, tensor: String },
    #[error("{}: tensor {tensor} is missing", path.display())]
    MissingTensor { path: PathBuf, tensor: String },
    /// A matrix is quantised in a way that paceline does not read, or nothing says in which.
    #[error("{}: {tensor}: {field} is {got}, expected {expected}", path.display())]
    Quantization {
        path: PathBuf,
        tensor: String,
        field: &'static str,
        got: String,
        /// Values that the field may have.
        expected: &'static str,
    },
    /// A part of a quantised matrix has another type than its scheme requires.
    #[error("{}: tensor {tensor}: dtype {dtype}, expected {expected}", path.display())]
    QuantisedDtype {
        path: PathBuf,
        tensor: String,
        dtype: String,
        expected: &'static str,
    },
    /// A stack of experts has another shape than it must have.
    #[error("{}: tensor {tensor}: shape {got:?}, expected {expected}", path.display())]
    Stack {
        path: PathBuf,
        /// The stack, or a part of it.
        tensor: String,
        got: Vec<usize>,
        /// The shape that it must have.
        expected: &'static str,
    },
    /// A part of a matrix with scales has another shape than it must have.
    #[error("{}: tensor {tensor}: shape {got:?}, expected {expected}", path.display())]
    Scales {
        path: PathBuf,
        tensor: String,
        got: Vec<usize>,
        /// The shape that it must have.
        expected: &'static str,
    },
    /// The parts of a quantised matrix do not fit each other.
    #[error(transparent)]
    Misfit(Box<mlx::Misfit>),
    #[error("tensor {tensor}: cannot reserve memory: {error}")]
    Memory { tensor: String, error: io::Error },
    /// Weights of a file that is still being downloaded will not arrive.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// A file of weights is broken, or lacks a tensor that the index puts into it.
    #[error(transparent)]
    Weights(#[from] safetensors::Error),
}

/// An open model folder; see [`crate::tensor`] for what the mapped weights demand.
#[derive(Debug)]
pub struct HfFolder {
    path: PathBuf,
    config: Value,
    tokenizer_config: Option<Value>,
    generation_config: Option<Value>,
    chat_template: Option<String>,
    shards: Vec<Safetensors>,
    places: Vec<TensorLocation>,
    index: NameIndex,
}

/// A tensor and the shard that holds it.
#[derive(Debug)]
struct TensorLocation {
    tensor: String,
    shard: usize,
}

fn tensor_of(place: &TensorLocation) -> &str {
    &place.tensor
}

impl HfFolder {
    /// Opens the model in the folder `path`: reads its settings and maps its weights.
    ///
    /// When `model.safetensors` and an index are both there, the index is not read, as in the
    /// `transformers` library.
    ///
    /// # Errors
    /// Every [`Error`] but [`Error::MissingTensor`]. A shard that is absent, and a tensor that
    /// is not in the shard that the index names, are found here.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Err(Error::NotAFolder {
                path: path.to_owned(),
            });
        }
        let config_path = path.join("config.json");
        let config = read_json(&config_path)?.ok_or_else(|| not_found(config_path))?;
        let tokenizer_config = read_json(&path.join("tokenizer_config.json"))?;
        let generation_config = read_json(&path.join("generation_config.json"))?;
        let chat_template = read_chat_template(path, tokenizer_config.as_ref())?;
        let (shards, places) = open_weights(path)?;
        let index = NameIndex::new(&places, tensor_of).map_err(|at| Error::DuplicateTensor {
            path: path.to_owned(),
            tensor: places[at].tensor.clone(),
        })?;
        Ok(Self {
            path: path.to_owned(),
            config,
            tokenizer_config,
            generation_config,
            chat_template,
            shards,
            places,
            index,
        })
    }

    /// Opens a folder whose weight files are still being downloaded: everything before their
    /// weights and all other files are there. Reading a weight waits until the progress that `find`
    /// returns for its file reports its bytes.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open); those of `find`, as [`Error::Weights`].
    pub fn open_arriving(path: impl AsRef<Path>, find: &FindArrivals<'_>) -> Result<Self, Error> {
        let mut folder = Self::open(path)?;
        for shard in &mut folder.shards {
            shard.arrive_by(find)?;
        }
        Ok(folder)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `tokenizer_config.json`, where there is one.
    pub fn tokenizer_config(&self) -> Option<&Value> {
        self.tokenizer_config.as_ref()
    }

    /// `generation_config.json`, where there is one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// A further settings file of the folder, such as `1_Pooling/config.json`; `None` where there
    /// is none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NotAFile`], [`Error::TooLarge`], [`Error::Json`].
    pub fn settings(&self, name: &'static str) -> Result<Option<Value>, Error> {
        read_json(&self.path.join(name))
    }

    /// The chat template: `chat_template.jinja`, else the field `chat_template` of
    /// `tokenizer_config.json`. If that field is a list, its entry `default`.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Names of all tensors, of any dtype: in the order of the index, or of the only file.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.places.iter().map(tensor_of)
    }

    /// Whether the folder has a tensor of that name, of any dtype.
    pub fn has(&self, name: &str) -> bool {
        self.place(name).is_some()
    }

    /// Whether the folder has the weight `name`, as one tensor or as packed values.
    pub fn has_weight(&self, name: &str) -> bool {
        self.has(name) || self.has(&format!("{name}_packed"))
    }

    fn place(&self, name: &str) -> Option<&TensorLocation> {
        self.index.find(&self.places, tensor_of, name)
    }

    /// The entry of a tensor in its file.
    pub fn info(&self, name: &str) -> Option<&safetensors::TensorInfo> {
        self.shards[self.place(name)?.shard].info(name)
    }

    /// The tensor called `name`. Copies no weights but those of a quantised matrix.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::Weights`] when it is of a dtype that paceline does not
    /// read, or empty; as [`quantised`](Self::quantised), and [`Error::Memory`].
    pub fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        if let Some(module) = name.strip_suffix(".weight")
            && let Some(quantised) = self.quantised(module)?
        {
            return quantised.joined();
        }
        let place = self.place(name).ok_or_else(|| Error::MissingTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
        })?;
        Ok(self.shards[place.shard].tensor(name)?)
    }

    /// The quantised matrix of the module `module`; `None` when that has no scales. Copies no
    /// weights.
    ///
    /// # Errors
    /// [`Error::Quantization`], [`Error::QuantisedDtype`], [`Error::Misfit`], [`Error::Scales`],
    /// and [`Error::MissingTensor`] for what belongs to the scales.
    pub fn quantised(&self, module: &str) -> Result<Option<Quantised>, Error> {
        let part = |name: &str| self.part(name).or_else(|| self.shared_scale(name));
        self.quantised_by(module, |name| Ok(part(name)))
    }

    /// The scale of a table for one of its shards, as Qwen 3.8 has it: `NAME.weight_scale` for
    /// `NAME.shard_3.weight`.
    fn shared_scale(&self, name: &str) -> Option<UncheckedTensor> {
        let (table, shard) = name.split_once(".shard_")?;
        let (_, suffix) = shard.split_once('.')?;
        let is_scale = scaled::SCALES.contains(&suffix);
        is_scale.then(|| self.part(&format!("{table}.{suffix}")))?
    }

    /// Like [`quantised`](Self::quantised), from the tensors that `part` returns.
    fn quantised_by(
        &self,
        module: &str,
        part: impl Fn(&str) -> Result<Option<UncheckedTensor>, Error>,
    ) -> Result<Option<Quantised>, Error> {
        let part = |suffix: &str| part(&format!("{module}.{suffix}"));
        let path = || self.path.clone();
        let Some(scales) = part("scales")? else {
            return scaled::quantised(module, &self.config, part, path);
        };
        let scheme = Scheme::of(&self.config, module, || self.path.join("config.json"))?;
        let weight = part("weight")?.ok_or_else(|| Error::MissingTensor {
            path: path(),
            tensor: format!("{module}.weight"),
        })?;
        Quantised::new(module, scheme, [weight, scales], part("biases")?, path).map(Some)
    }

    /// A tensor of any dtype.
    fn part(&self, name: &str) -> Option<UncheckedTensor> {
        let shard = &self.shards[self.place(name)?.shard];
        let info = shard.info(name)?;
        Some(UncheckedTensor {
            dtype: info.dtype().to_owned(),
            shape: info.shape().to_vec(),
            bytes: shard.bytes_of(info),
        })
    }

    /// The bytes of a tensor of any dtype.
    pub fn bytes_of(&self, name: &str) -> Option<MappedBytes> {
        let shard = &self.shards[self.place(name)?.shard];
        Some(shard.bytes_of(shard.info(name)?))
    }

    /// The file that holds the tensor called `name`, and its byte range there.
    pub fn location(&self, name: &str) -> Option<(&Path, Range<usize>)> {
        let shard = &self.shards[self.place(name)?.shard];
        Some((shard.path(), shard.info(name)?.range()))
    }

    /// The bytes of each weight file, and the length of the prefix before its weights. Does not
    /// wait: weights that have not arrived are zero.
    pub fn contents(&self) -> impl Iterator<Item = (&[u8], usize)> {
        self.shards.iter().map(Safetensors::content)
    }

    /// Size of all weight files.
    pub fn file_bytes(&self) -> Bytes {
        Bytes(self.shards.iter().map(|shard| shard.file_bytes().0).sum())
    }
}

fn not_found(path: PathBuf) -> Error {
    Error::Io {
        path,
        error: io::ErrorKind::NotFound.into(),
    }
}

/// Content of a file of at most `max` bytes; `None` when there is no such file.
fn read_limited(path: &Path, max: u64) -> Result<Option<Vec<u8>>, Error> {
    let io_error = |error| Error::Io {
        path: path.to_owned(),
        error,
    };
    match std::fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error(e)),
        Ok(metadata) if !metadata.is_file() => {
            return Err(Error::NotAFile {
                path: path.to_owned(),
            });
        }
        Ok(_) => {}
    }
    let mut content = Vec::new();
    let file = File::open(path).map_err(io_error)?;
    file.take(max + 1)
        .read_to_end(&mut content)
        .map_err(io_error)?;
    if content.len() as u64 > max {
        return Err(Error::TooLarge {
            path: path.to_owned(),
            max: Bytes(max),
        });
    }
    Ok(Some(content))
}

/// A settings file; `None` when there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>, Error> {
    let Some(content) = read_limited(path, MAX_SETTINGS_BYTES)? else {
        return Ok(None);
    };
    match serde_json::from_slice(&content) {
        Ok(value) => Ok(Some(value)),
        Err(error) => Err(Error::Json {
            path: path.to_owned(),
            error,
        }),
    }
}

fn read_chat_template(dir: &Path, config: Option<&Value>) -> Result<Option<String>, Error> {
    let path = dir.join("chat_template.jinja");
    if let Some(content) = read_limited(&path, MAX_SETTINGS_BYTES)? {
        return match String::from_utf8(content) {
            Ok(template) => Ok(Some(template)),
            Err(_) => Err(Error::NotUtf8 { path }),
        };
    }
    match config.and_then(|config| config.get("chat_template")) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(template)) => Ok(Some(template.clone())),
        Some(Value::Array(list)) => Ok(default_template(list)),
        Some(_) => Err(Error::Field {
            path: dir.join("tokenizer_config.json"),
            field: "chat_template",
            expected: "a string or a list",
        }),
    }
}

/// The entry called `default` of a list of `{"name": ..., "template": ...}`.
fn default_template(list: &[Value]) -> Option<String> {
    let entry = list
        .iter()
        .find(|e| e.get("name").and_then(Value::as_str) == Some("default"))?;
    entry
        .get("template")
        .and_then(Value::as_str)
        .map(str::to_owned)
}

/// Maps the weights and says which file holds which tensor.
fn open_weights(dir: &Path) -> Result<(Vec<Safetensors>, Vec<TensorLocation>), Error> {
    let single = dir.join("model.safetensors");
    if single.exists() {
        let file = Safetensors::open(&single)?;
        let tensors = file.tensors().map(|t| t.name().to_owned());
        let places = tensors
            .map(|tensor| TensorLocation { tensor, shard: 0 })
            .collect();
        return Ok((vec![file], places));
    }
    let path = dir.join("model.safetensors.index.json");
    let Some(content) = read_limited(&path, MAX_INDEX_BYTES)? else {
        return Err(Error::NoWeights {
            path: dir.to_owned(),
        });
    };
    let map = WeightMap::parse(&content).map_err(|error| Error::Json {
        path: path.clone(),
        error,
    });
    open_shards(dir, &path, map?)
}

/// Maps each file that the index names once, and checks that it holds what the index says.
fn open_shards(
    dir: &Path,
    index: &Path,
    map: WeightMap,
) -> Result<(Vec<Safetensors>, Vec<TensorLocation>), Error> {
    let mut files: Vec<&str> = map.entries.iter().map(|(_, file)| file.as_str()).collect();
    files.sort_unstable();
    files.dedup();
    for (tensor, file) in &map.entries {
        if !stays_inside(file) {
            let (tensor, file) = (tensor.clone(), file.clone());
            return Err(Error::Escape {
                path: index.to_owned(),
                tensor,
                file,
            });
        }
    }
    let shards: Vec<Safetensors> = files
        .iter()
        .map(|file| Safetensors::open(dir.join(file)))
        .collect::<Result<_, _>>()?;
    let mut places = Vec::with_capacity(map.entries.len());
    for (tensor, file) in &map.entries {
        let shard = files
            .binary_search(&file.as_str())
            .expect("every file was listed");
        shards[shard].require(tensor)?;
        places.push(TensorLocation {
            tensor: tensor.clone(),
            shard,
        });
    }
    Ok((shards, places))
}

/// Whether a relative path has only plain components. Backslashes are refused everywhere, so that
/// one index means the same on all systems.
fn stays_inside(file: &str) -> bool {
    let mut components = Path::new(file).components().peekable();
    components.peek().is_some()
        && !file.contains(['\\', '\0'])
        && components.all(|c| matches!(c, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_paths_stay_inside() {
        for (file, inside) in [
            ("model-00001-of-00002.safetensors", true),
            ("sub/model.safetensors", true),
            ("..model", true),
            ("", false),
            (".", false),
            ("..", false),
            ("../model.safetensors", false),
            ("sub/../../model.safetensors", false),
            ("/etc/passwd", false),
            ("..\\model.safetensors", false),
            ("a\0b", false),
        ] {
            assert_eq!(stays_inside(file), inside, "{file:?}");
        }
    }

    #[test]
    fn the_default_template_of_a_list_is_taken() {
        let list: Vec<Value> = serde_json::from_str(
            r#"[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, 3]"#,
        )
        .unwrap();
        assert_eq!(default_template(&list).as_deref(), Some("D"));
        assert_eq!(default_template(&list[..1]), None);
    }
}
