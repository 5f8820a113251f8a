//! Selects the files of a repository that form a model.

use paceline_base::Bytes;

use crate::error::{Error, GgufChoice};
use crate::gguf_name::{
    GgufModel, GgufRole, best_fits, gguf_models, of_role, quant_of_name, stem, tags,
};
use crate::name::{HubId, check_file_path};

/// Files of a safetensors folder besides the weights. The last two define how an encoder pools its
/// rows.
const FOLDER_FILES: [&str; 19] = [
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
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "modules.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Dense/config.json",
    "3_Dense/model.safetensors",
];
const WEIGHT_INDEX: &str = "model.safetensors.index.json";
/// Maximum models with short selectors, whose search is quadratic. The largest repositories have
/// some 60.
const SHORT_MAX: usize = 200;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelFileSet {
    /// A GGUF model; several files when it is split, in order.
    Gguf(Vec<String>),
    Folder(Vec<String>),
}

#[derive(Clone, Debug)]
pub(crate) struct ListedFile {
    pub(crate) path: String,
    pub(crate) bytes: Option<u64>,
    pub(crate) sha256: Option<String>,
}

/// Selects from a repository's file list. GGUF comes first: with any GGUF model, or a selector, the
/// result is a GGUF model. Draft models are selected only where nothing else fits.
pub(crate) fn choose(
    id: &HubId,
    selector: Option<&str>,
    files: &[ListedFile],
) -> Result<ModelFileSet, Error> {
    let all = gguf_models(files.iter().map(|file| file.path.as_str()));
    let models = of_role(&all, GgufRole::Model);
    let fits = match selector {
        Some(selector) => fits(&all, selector),
        None if models.is_empty() => match folder(files) {
            Some(folder) => return Ok(folder),
            None => of_role(&all, GgufRole::Draft),
        },
        None => models.clone(),
    };
    let fits = without_split_twins(fits);
    let repo = id.to_string();
    match (fits.len(), selector) {
        (1, _) => Ok(ModelFileSet::Gguf(
            fits.into_iter().flat_map(|m| m.0).collect(),
        )),
        (0, Some(selector)) => Err(Error::NoMatchingGguf {
            repo,
            selector: selector.into(),
            choices: choices(&models, &models, files),
        }),
        (0, None) => Err(Error::NothingUsable { repo }),
        _ => Err(Error::AmbiguousGguf {
            repo,
            choices: choices(&fits, &models, files),
        }),
    }
}

/// The models that `selector` names best; other files only where it names no model.
fn fits(all: &[GgufModel], selector: &str) -> Vec<GgufModel> {
    match best_fits(of_role(all, GgufRole::Model), GgufModel::file, selector) {
        none if none.is_empty() => best_fits(all.to_vec(), GgufModel::file, selector),
        fits => fits,
    }
}

/// Removes split models that are also there in fewer files.
fn without_split_twins(mut models: Vec<GgufModel>) -> Vec<GgufModel> {
    let has_twin = |model: &GgufModel| {
        let is_twin = |other: &GgufModel| {
            other.0.len() < model.0.len()
                && stem(other.file()).eq_ignore_ascii_case(stem(model.file()))
        };
        models.iter().any(is_twin)
    };
    let keep: Vec<bool> = models.iter().map(|model| !has_twin(model)).collect();
    let mut keep = keep.into_iter();
    models.retain(|_| keep.next().unwrap_or(true));
    models
}

/// `shown` of the repository's `models`, smallest first. Draft models are not among `models`.
fn choices(shown: &[GgufModel], models: &[GgufModel], files: &[ListedFile]) -> Vec<GgufChoice> {
    let is_model = |model: &GgufModel| model.role() == GgufRole::Model;
    let all = if shown.iter().all(is_model) {
        models
    } else {
        shown
    };
    let names: Vec<&str> = all.iter().map(GgufModel::file).collect();
    let bytes = |path: &String| files.iter().find(|file| file.path == *path)?.bytes;
    let choice = |(model, selector): (&GgufModel, String)| GgufChoice {
        selector,
        files: model.0.len(),
        bytes: model.0.iter().map(bytes).sum::<Option<u64>>().map(Bytes),
    };
    let pairs = all.iter().zip(selectors(&names));
    let pairs = pairs.filter(|(model, _)| shown.contains(model));
    let mut choices: Vec<GgufChoice> = pairs.map(choice).collect();
    choices.sort_by_key(|choice| choice.bytes);
    choices
}

/// For each of `files`, the shortest selector that names it alone; the path where there are more
/// than [`SHORT_MAX`].
pub(crate) fn selectors(files: &[&str]) -> Vec<String> {
    if files.len() > SHORT_MAX {
        return files.iter().map(|file| (*file).to_owned()).collect();
    }
    let selects =
        |selector: &str, file: &str| best_fits(files.to_vec(), |file| *file, selector) == [file];
    let selector = |(file, tag): (&&str, &str)| {
        let quant = quant_of_name(file).unwrap_or_default();
        let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
        let shorter = [tag, quant, folder, name];
        let shorter = shorter.into_iter().find(|text| selects(text, file));
        shorter.unwrap_or(file).to_owned()
    };
    files.iter().zip(tags(files)).map(selector).collect()
}

/// The files of a safetensors folder, top level only; `None` without config or weights. If the
/// usual `model*.safetensors` exist, omits other safetensors (the same weights in another layout,
/// from some publishers).
fn folder(files: &[ListedFile]) -> Option<ModelFileSet> {
    let mut names: Vec<&str> = files
        .iter()
        .map(|file| file.path.as_str())
        .filter(|name| !name.contains('/') || FOLDER_FILES.contains(name))
        .filter(|name| check_file_path(name).is_ok())
        .collect();
    names.sort_unstable();
    names.dedup();
    let weights = |name: &&&str| name.ends_with(".safetensors");
    let usual = |name: &&&str| name.starts_with("model");
    let has_usual = names.iter().filter(weights).any(|name| usual(&name));
    let wanted = |name: &&&str| {
        FOLDER_FILES.contains(*name)
            || **name == WEIGHT_INDEX
            || (weights(name) && (!has_usual || usual(name)))
    };
    let chosen: Vec<String> = names
        .iter()
        .filter(wanted)
        .map(|name| (*name).to_owned())
        .collect();
    let complete = chosen.iter().any(|name| name == "config.json")
        && chosen.iter().any(|name| name.ends_with(".safetensors"));
    complete.then_some(ModelFileSet::Folder(chosen))
}

#[cfg(test)]
mod tests;
