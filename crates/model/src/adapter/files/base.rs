//! Names of base models, by which PEFT finds their weights: a folder, or a repository of the hub.

use std::path::Path;

use paceline_weights::gguf::Metadata;

use crate::{Error, ModelSource};

/// Keys of GGUF files for the repository that the weights were converted from.
const SOURCES: [&str; 3] = [
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.source.url",
];
const HUB: &str = "https://huggingface.co/";

/// The name of the model at `path`: a folder's path, or the repository of a GGUF file's weights.
/// `None` where the file does not say it. PEFT reads no weights from the file itself.
///
/// # Errors
/// The errors of [`ModelSource::open`].
pub fn base_name(path: &Path) -> Result<Option<String>, Error> {
    Ok(match ModelSource::open(path)? {
        ModelSource::Hf(folder) => Some(folder.path().display().to_string()),
        ModelSource::Gguf(file) => repository(file.metadata()),
    })
}

/// The repository of a file's weights. In a quantised file `general.base_model.0` is the same
/// model, in a fine-tuned one it is a parent. So it counts where it has the file's name.
fn repository(metadata: &Metadata) -> Option<String> {
    let text = |key: &str| metadata.opt_str(key).ok().flatten();
    let source = SOURCES.iter().find_map(|key| hub_id(text(key)?));
    let parent = || {
        let name = plain(text("general.name")?);
        let id = hub_id(text("general.base_model.0.repo_url")?)?;
        let (_, last) = id.split_once('/')?;
        let theirs = text("general.base_model.0.name").map(plain);
        (theirs.is_some_and(|theirs| theirs == name) || plain(last) == name).then_some(id)
    };
    source.or_else(parent).map(str::to_owned)
}

/// `owner/name` of a text or an address of the hub.
fn hub_id(text: &str) -> Option<&str> {
    let id = text.strip_prefix(HUB).unwrap_or(text).trim_end_matches('/');
    let is_part = |part: &str| {
        let is_right = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && part.chars().all(is_right)
    };
    let (owner, name) = id.split_once('/')?;
    (is_part(owner) && is_part(name)).then_some(id)
}

/// Letters and digits only, to match names with different separators.
fn plain(name: &str) -> String {
    let letters = name.chars().filter(|c| c.is_alphanumeric());
    letters.flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use paceline_weights::gguf::MetadataValue;

    use super::*;
    use crate::adapter::files::{Adapter, CONFIG, Form};

    #[test]
    fn no_file_of_an_adapter_names_a_gguf_file() {
        let folder = tempfile::tempdir().unwrap();
        for (base, named) in [
            ("/models/a.gguf", None),
            ("/models/folder", Some("/models/folder")),
            ("owner/name", Some("owner/name")),
        ] {
            for (form, key) in [
                (Form::Peft, "base_model_name_or_path"),
                (Form::Mlx, "model"),
            ] {
                let adapter = Adapter::new(2, 4.0, Some(base.to_owned()), Vec::new());
                adapter.write(folder.path(), form).unwrap();
                let config = std::fs::read(folder.path().join(CONFIG)).unwrap();
                let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
                assert_eq!(config[key].as_str(), named, "{base}");
            }
        }
    }

    /// Entries as llama.cpp's converters write them of model cards.
    #[test]
    fn files_name_the_repository_of_their_own_weights() {
        let of = |entries: &[(&str, &str)]| {
            let entry = |(key, text): &(&str, &str)| {
                (
                    format!("general.{key}"),
                    MetadataValue::String((*text).to_owned()),
                )
            };
            let metadata = Metadata::from_entries(entries.iter().map(entry).collect());
            repository(&metadata.unwrap())
        };
        let qwen = Some("Qwen/Qwen3-0.6B".to_owned());
        let url = "https://huggingface.co/Qwen/Qwen3-0.6B";
        assert_eq!(
            of(&[("source.huggingface.repository", "Qwen/Qwen3-0.6B")]),
            qwen
        );
        assert_eq!(of(&[("source.url", url)]), qwen);
        let parent = ("base_model.0.repo_url", url);
        assert_eq!(of(&[("name", "Qwen3-0.6B"), parent]), qwen);
        let named = ("base_model.0.name", "Qwen3 0.6B");
        assert_eq!(of(&[("name", "Qwen3 0.6b"), named, parent]), qwen);
        // A fine-tuned model has another model below it.
        assert_eq!(of(&[("name", "Qwen3 0.6B Instruct"), named, parent]), None);
        for other in [
            "https://github.com/a/b",
            "/models/a.gguf",
            "a/b/c",
            "a b/c",
            "",
        ] {
            assert_eq!(of(&[("source.url", other)]), None, "{other}");
        }
        assert_eq!(of(&[]), None);
    }
}
