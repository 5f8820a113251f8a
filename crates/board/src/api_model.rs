//! Builds the API's description of a model from its files: names, tokenizer, template, sampling.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use paceline_engine::SamplingParams;
use paceline_fleet::InstanceSpec;
use paceline_model::encoder::EncoderConfig;
use paceline_model::{Config, ModelSource};
use paceline_node::context_size::positions;
use paceline_serve::{ModelDetails, ServedModel, default_sampling};
use paceline_text::tokenizer;
use paceline_worker::interpreter::ChildProgram;
use paceline_worker::texts;

use crate::Error;

/// Fingerprint of kernel classes, version and model identity; without identity if its files cannot
/// be read.
fn fingerprint<S: Display, E>(
    (classes, kv): (&str, Option<&str>),
    identity: Result<S, E>,
) -> String {
    let kv = kv.map_or(String::new(), |kv| format!("-{kv}"));
    let classes = format!("{classes}{kv}");
    let version = env!("CARGO_PKG_VERSION");
    match identity {
        Ok(identity) => format!("{classes}-{version}-{identity}"),
        Err(_) => format!("{classes}-{version}"),
    }
}

/// Modification time of a file in seconds since 1970; 0 if unknown.
pub fn changed_unix_s(path: &Path) -> u64 {
    let changed = std::fs::metadata(path).and_then(|facts| facts.modified());
    let since = changed
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}

/// The description of a cluster instance, from its local model file; `templates` runs its template.
pub fn instance(
    path: &Path,
    wanted: &InstanceSpec,
    templates: &ChildProgram,
) -> Result<ServedModel, Error> {
    let of_model = |error| Error::of_model(path, error);
    let aliases = wanted.names.iter().skip(1).cloned().collect();
    let names = (wanted.id().to_owned(), aliases);
    let source = ModelSource::open(path).map_err(of_model)?;
    if EncoderConfig::is_encoder(&source) {
        let config = EncoderConfig::read(&source).map_err(of_model)?;
        return Ok(encoder(path, &source, &config, names)?);
    }
    let config = Config::read(&source).map_err(of_model)?;
    let template = texts::template(&source, templates)
        .and_then(Result::ok)
        .map(Arc::new);
    let context = wanted
        .options
        .context
        .map_or(config.context, |context| positions(context, &config));
    let kv = wanted.machine.as_ref().and_then(|it| it.kv.as_deref());
    Ok(ServedModel {
        id: names.0,
        aliases: names.1,
        created_unix_s: changed_unix_s(path),
        fingerprint: fingerprint(
            (&wanted.class_names(), kv),
            paceline_worker::identity(&source),
        ),
        classes: wanted.class_names(),
        tokenizer: Arc::new(texts::tokenizer(&source)?),
        template,
        context,
        sampling: sampling(path),
        about: ModelDetails {
            architecture: config.family.name().to_owned(),
            bytes: size(path),
            ..ModelDetails::default()
        },
    })
}

/// The description of an encoder, with id and aliases.
pub fn encoder(
    path: &Path,
    source: &ModelSource,
    config: &EncoderConfig,
    (id, aliases): (String, Vec<String>),
) -> Result<ServedModel, tokenizer::Error> {
    Ok(ServedModel {
        id,
        aliases,
        created_unix_s: changed_unix_s(path),
        fingerprint: format!("cpu-f32-{}", env!("CARGO_PKG_VERSION")),
        classes: "cpu-f32".to_owned(),
        tokenizer: Arc::new(texts::tokenizer(source)?),
        template: None,
        context: config.context,
        sampling: default_sampling(),
        about: ModelDetails {
            architecture: config.family.name().to_owned(),
            bytes: size(path),
            ..ModelDetails::default()
        },
    })
}

/// Default sampling of the model at `path`.
pub fn sampling(path: &Path) -> SamplingParams {
    let file = path.join("generation_config.json");
    let is_small = |file: &Path| std::fs::metadata(file).is_ok_and(|facts| facts.len() < 1 << 20);
    let text = is_small(&file).then(|| std::fs::read(&file).ok()).flatten();
    let config = text.and_then(|text| serde_json::from_slice(&text).ok());
    paceline_serve::recommended_sampling(&config.unwrap_or_default())
}

/// Bytes of the file, or of the folder's files.
pub fn size(path: &Path) -> u64 {
    let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |facts| facts.len());
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| bytes(&entry.path())).sum(),
        Err(_) => bytes(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_says_how_its_tokens_are_chosen() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("generation_config.json");
        assert_eq!(sampling(folder.path()), default_sampling());
        std::fs::write(&file, r#"{"temperature": 0.5, "top_k": 20}"#).unwrap();
        let own = sampling(folder.path());
        assert_eq!((own.temperature, own.top_k, own.min_p), (0.5, 20, 0.0));
        std::fs::write(&file, "no JSON").unwrap();
        assert_eq!(sampling(folder.path()), default_sampling());
    }
}
