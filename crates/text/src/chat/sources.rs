//! The templates in a model's files: one, or several by name.
//!
//! Models such as Command R and Mixtral 8x22B have a template of its own for conversations with
//! tools, `tool_use`. It is in a list of `tokenizer_config.json`, in the folder
//! `additional_chat_templates`, or in a GGUF file as `tokenizer.chat_template.tool_use`. The choice
//! is that of `transformers` (`get_chat_template`).

use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value as Json;

use super::Error;
use crate::limited_read;
use paceline_weights::gguf::Metadata;

const GGUF_KEY: &str = "tokenizer.chat_template";
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The template for conversations with tools in a folder that has `chat_template.jinja`.
pub const TOOL_USE_FILE: &str = "additional_chat_templates/tool_use.jinja";

/// Largest configuration file that is searched for a template: ten times Gemma's.
const MAX_CONFIG_BYTES: usize = 12 << 20;

/// The texts of a model's templates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateSources {
    /// For conversations without tools; with tools where there is no other.
    pub default: Option<String>,
    pub tool_use: Option<String>,
    /// Names of further ones, which nothing selects.
    pub others: Vec<String>,
}

impl From<&str> for TemplateSources {
    fn from(source: &str) -> Self {
        Self {
            default: Some(source.to_owned()),
            ..Self::default()
        }
    }
}

impl TemplateSources {
    fn add(&mut self, name: &str, source: &str) {
        match name {
            DEFAULT => self.default = Some(source.to_owned()),
            TOOL_USE => self.tool_use = Some(source.to_owned()),
            other => self.others.push(other.to_owned()),
        }
    }

    pub(super) fn names(&self) -> Vec<String> {
        let named = [(DEFAULT, &self.default), (TOOL_USE, &self.tool_use)];
        let named = named.into_iter().filter(|(_, source)| source.is_some());
        let named = named.map(|(name, _)| name.to_owned());
        named.chain(self.others.iter().cloned()).collect()
    }

    fn found(self) -> Result<Self, Error> {
        match self == Self::default() {
            true => Err(Error::NoTemplate),
            false => Ok(self),
        }
    }

    /// The templates in the metadata of a GGUF file: `tokenizer.chat_template`, and
    /// `tokenizer.chat_template.NAME`.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::Metadata`].
    pub fn in_gguf(metadata: &Metadata) -> Result<Self, Error> {
        let mut sources = Self::default();
        for (key, _) in metadata.iter() {
            let Some(rest) = key.strip_prefix(GGUF_KEY) else {
                continue;
            };
            let name = if rest.is_empty() {
                Some(DEFAULT)
            } else {
                rest.strip_prefix('.')
            };
            if let (Some(name), Some(source)) = (name, metadata.opt_str(key)?) {
                sources.add(name, source);
            }
        }
        sources.found()
    }

    /// The templates of a Hugging Face folder: `chat_template.jinja` and [`TOOL_USE_FILE`], else
    /// `chat_template` of `tokenizer_config.json`, else of `chat_template.json`.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::Read`], [`Error::Malformed`], [`Error::TooLong`].
    pub fn in_dir(dir: &Path) -> Result<Self, Error> {
        let text = |name: &str| {
            let bytes = read_limited(&dir.join(name))?;
            Ok::<_, Error>(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
        };
        if let default @ Some(_) = text("chat_template.jinja")? {
            return Ok(Self {
                default,
                tool_use: text(TOOL_USE_FILE)?,
                others: Vec::new(),
            });
        }
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = dir.join(name);
            let Some(bytes) = read_limited(&path)? else {
                continue;
            };
            let json: Json = serde_json::from_slice(&bytes).map_err(|e| Error::Malformed {
                path,
                reason: e.to_string(),
            })?;
            let sources = Self::in_entry(&json["chat_template"]);
            if sources != Self::default() {
                return Ok(sources);
            }
        }
        Err(Error::NoTemplate)
    }

    /// The templates of a `chat_template` entry: a string, or a list of named ones.
    fn in_entry(entry: &Json) -> Self {
        if let Some(source) = entry.as_str() {
            return source.into();
        }
        let mut sources = Self::default();
        for item in entry.as_array().into_iter().flatten() {
            if let (Some(name), Some(source)) = (item["name"].as_str(), item["template"].as_str()) {
                sources.add(name, source);
            }
        }
        sources
    }
}

/// The file's bytes; `None` if it does not exist.
fn read_limited(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let (own, limit) = (path.to_owned(), MAX_CONFIG_BYTES);
    match limited_read::read(path, limit as u64) {
        Ok(Ok(bytes)) => Ok(Some(bytes)),
        Ok(Err(size)) => Err(Error::TooLong {
            path: own,
            size: size as usize,
            limit,
        }),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(source) => Err(Error::Read { path: own, source }),
    }
}
