//! Selects the files of a repository that form a model.

use crate::Error;
use crate::index::StoreEntry;
use crate::name::{HubId, check_file_path};

/// Files of a safetensors folder besides the weights. The last two define how an encoder pools its
/// rows.
const FOLDER_FILES: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
];
/// The index of split weights.
const WEIGHT_INDEX: &str = "model.safetensors.index.json";

/// The selected files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelFileSet {
    /// A GGUF model; several files when it is split, in order.
    Gguf(Vec<String>),
    Folder(Vec<String>),
}

/// Selects from a repository's file list. GGUF comes first: with any GGUF file, or a selector, the
/// result is a GGUF model.
pub(crate) fn choose(
    id: &HubId,
    selector: Option<&str>,
    files: &[String],
) -> Result<ModelFileSet, Error> {
    let models = gguf_models(files);
    if models.is_empty() && selector.is_none() {
        return folder(files).ok_or_else(|| Error::NothingUsable {
            repo: id.to_string(),
        });
    }
    let fits: Vec<&Vec<String>> = models
        .iter()
        .filter(|parts| match selector {
            Some(selector) => file_fits(&parts[0], selector),
            None => !is_projector(&parts[0]),
        })
        .collect();
    let names = |models: &[&Vec<String>]| models.iter().map(|parts| parts[0].clone()).collect();
    match (&fits[..], selector) {
        ([only], _) => Ok(ModelFileSet::Gguf((*only).clone())),
        ([], Some(selector)) => Err(Error::NoMatchingGguf {
            repo: id.to_string(),
            selector: selector.into(),
            choices: names(&models.iter().collect::<Vec<_>>()),
        }),
        ([], None) => Err(Error::NothingUsable {
            repo: id.to_string(),
        }),
        (several, _) => Err(Error::AmbiguousGguf {
            repo: id.to_string(),
            choices: names(several),
        }),
    }
}

/// GGUF models, sorted, with the files of split ones grouped. Omits unsafe paths and incomplete
/// split models.
pub(crate) fn gguf_models(files: &[String]) -> Vec<Vec<String>> {
    let mut names: Vec<&String> = files
        .iter()
        .filter(|name| name.ends_with(".gguf") && check_file_path(name).is_ok())
        .collect();
    names.sort();
    names.dedup();
    let present = |name: &String| names.binary_search(&name).is_ok();
    let mut models = Vec::new();
    for name in &names {
        match split_part(name) {
            None => models.push(vec![(*name).clone()]),
            Some((stem, 1, count)) if usize::from(count) <= names.len() => {
                let parts: Vec<String> = (1..=count)
                    .map(|i| format!("{stem}-{i:05}-of-{count:05}.gguf"))
                    .collect();
                if parts.iter().all(present) {
                    models.push(parts);
                }
            }
            Some(_) => {}
        }
    }
    models
}

/// `stem-00002-of-00003.gguf` as `(stem, 2, 3)`, the naming of llama.cpp's gguf-split.
fn split_part(name: &str) -> Option<(&str, u16, u16)> {
    let rest = name.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let digits = |text: &str| (text.len() == 5).then(|| text.parse().ok())?;
    Some((stem, digits(part)?, digits(count)?))
}

/// Vision projectors are GGUF files but not models.
pub(crate) fn is_projector(name: &str) -> bool {
    name.rsplit('/')
        .next()
        .unwrap_or(name)
        .starts_with("mmproj")
}

/// Whether `selector` matches a file: by path, name, or the quantisation at the end of its name.
/// That follows `-`, `_` or `.` (`Q4_K` does not match `Q4_K_M`). Only paths are case-sensitive.
pub(crate) fn file_fits(file: &str, selector: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    if file == selector || name == selector {
        return true;
    }
    let stem = match split_part(name) {
        Some((stem, ..)) => stem,
        None => name.strip_suffix(".gguf").unwrap_or(name),
    };
    let (stem, selector) = (stem.to_ascii_lowercase(), selector.to_ascii_lowercase());
    match stem.strip_suffix(&selector) {
        Some(before) => {
            !selector.is_empty() && (before.is_empty() || before.ends_with(['-', '_', '.']))
        }
        None => false,
    }
}

/// Whether `spec` (`owner/name` or `owner/name:selector`) matches this entry.
pub(crate) fn entry_fits(entry: &StoreEntry, spec: &str) -> bool {
    let (wanted, selector) = match spec.split_once(':') {
        Some((repo, selector)) => (repo, Some(selector)),
        None => (spec, None),
    };
    match (entry.name.hub_parts(), selector) {
        (Some((repo, Some(file))), Some(selector)) => repo == wanted && file_fits(file, selector),
        (Some((repo, _)), None) => repo == wanted,
        _ => false,
    }
}

/// The files of a safetensors folder, top level only; `None` without config or weights. If the
/// usual `model*.safetensors` exist, omits other safetensors (the same weights in another layout,
/// from some publishers).
fn folder(files: &[String]) -> Option<ModelFileSet> {
    let mut names: Vec<&String> = files
        .iter()
        .filter(|name| !name.contains('/') || FOLDER_FILES.contains(&name.as_str()))
        .filter(|name| check_file_path(name).is_ok())
        .collect();
    names.sort();
    names.dedup();
    let weights = |name: &&&String| name.ends_with(".safetensors");
    let usual = |name: &&&String| name.starts_with("model");
    let has_usual = names.iter().filter(weights).any(|name| usual(&name));
    let wanted = |name: &&&String| {
        FOLDER_FILES.contains(&name.as_str())
            || name.as_str() == WEIGHT_INDEX
            || (weights(name) && (!has_usual || usual(name)))
    };
    let chosen: Vec<String> = names
        .iter()
        .filter(wanted)
        .map(|name| (*name).clone())
        .collect();
    let complete = chosen.iter().any(|name| name == "config.json")
        && chosen.iter().any(|name| name.ends_with(".safetensors"));
    complete.then_some(ModelFileSet::Folder(chosen))
}

/// The quantisation in a GGUF file's name, such as `Q4_K_M`, for display.
pub fn quant_of_name(file: &str) -> Option<&str> {
    let name = file.rsplit('/').next().unwrap_or(file);
    let stem = split_part(name).map_or_else(|| name.strip_suffix(".gguf"), |(s, ..)| Some(s))?;
    let last = stem.rsplit(['-', '.']).next()?;
    let upper = last.to_ascii_uppercase();
    let rest = upper.strip_prefix("IQ").or_else(|| upper.strip_prefix('Q'));
    let quantised = rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    (quantised || matches!(upper.as_str(), "F32" | "F16" | "BF16")).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn id() -> HubId {
        HubId::parse("o/r").unwrap()
    }

    #[test]
    fn selectors_mean_whole_quantisation_names() {
        for (file, selector, fits) in [
            ("m-Q4_K_M.gguf", "Q4_K_M", true),
            ("m.q4_k_m.gguf", "Q4_K_M", true),
            ("m-Q4_K_M.gguf", "Q4_K", false),
            ("m-Q4_K_M.gguf", "K_M", true),
            ("mQ4_1.gguf", "Q4_1", false),
            ("BF16/m-BF16-00001-of-00002.gguf", "bf16", true),
            ("sub/m-Q8_0.gguf", "m-Q8_0.gguf", true),
            ("sub/m-Q8_0.gguf", "sub/m-Q8_0.gguf", true),
            ("m-Q8_0.gguf", "", false),
        ] {
            assert_eq!(file_fits(file, selector), fits, "{file} {selector}");
        }
    }

    #[test]
    fn one_gguf_needs_no_selector_and_several_do() {
        let one = names(&["README.md", "m-Q8_0.gguf", "mmproj-F16.gguf"]);
        assert_eq!(
            choose(&id(), None, &one).unwrap(),
            ModelFileSet::Gguf(names(&["m-Q8_0.gguf"]))
        );

        let two = names(&[
            "m-Q8_0.gguf",
            "m-Q4_0.gguf",
            "config.json",
            "model.safetensors",
        ]);
        match choose(&id(), None, &two).unwrap_err() {
            Error::AmbiguousGguf { choices, .. } => {
                assert_eq!(choices, names(&["m-Q4_0.gguf", "m-Q8_0.gguf"]));
            }
            other => panic!("{other:?}"),
        }
        let picked = choose(&id(), Some("q4_0"), &two).unwrap();
        assert_eq!(picked, ModelFileSet::Gguf(names(&["m-Q4_0.gguf"])));
        match choose(&id(), Some("Q2_K"), &two).unwrap_err() {
            Error::NoMatchingGguf { choices, .. } => assert_eq!(choices.len(), 2),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn split_models_are_one_choice_and_incomplete_ones_none() {
        let files = names(&["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"]);
        let parts = names(&["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]);
        assert_eq!(
            choose(&id(), None, &files).unwrap(),
            ModelFileSet::Gguf(parts)
        );
        let torn = names(&["a-00001-of-65535.gguf", "b-00002-of-00002.gguf"]);
        assert!(matches!(
            choose(&id(), None, &torn),
            Err(Error::NothingUsable { .. })
        ));
    }

    #[test]
    fn a_folder_takes_what_inference_needs() {
        let files = names(&[
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "tokenizer.json",
            "pytorch_model.bin",
            "original/params.json",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "../config.json",
            "run.py",
        ]);
        let ModelFileSet::Folder(chosen) = choose(&id(), None, &files).unwrap() else {
            panic!()
        };
        assert_eq!(
            chosen,
            names(&[
                "1_Pooling/config.json",
                "config.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
            ])
        );
        for lacking in [
            names(&["config.json"]),
            names(&["model.safetensors"]),
            names(&[]),
        ] {
            assert!(matches!(
                choose(&id(), None, &lacking),
                Err(Error::NothingUsable { .. })
            ));
        }
    }

    #[test]
    fn quantisations_are_read_from_names() {
        for (file, quant) in [
            ("SmolLM2-135M-Instruct.Q4_1.gguf", Some("Q4_1")),
            ("gemma-3-270m-q4_k_m.gguf", Some("q4_k_m")),
            ("x-IQ4_XS-00001-of-00002.gguf", Some("IQ4_XS")),
            ("m-bf16.gguf", Some("bf16")),
            ("Qwen.gguf", None),
            ("model.bin", None),
        ] {
            assert_eq!(quant_of_name(file), quant, "{file}");
        }
    }
}
