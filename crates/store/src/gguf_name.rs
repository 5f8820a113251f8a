//! Names of GGUF files: parts of split models, quantisations, and files that are no models.
//!
//! Publishers follow no common scheme. These are recorded names:
//!
//! | file | meaning |
//! |---|---|
//! | `Qwen3-8B-Q4_K_M.gguf`, `Foo.i1-Q4_K_M.gguf` | a model of that quantisation |
//! | `BF16/Qwen3.8-27B-BF16-00001-of-00002.gguf` | the first part of a split model, in a folder |
//! | `mmproj-F16.gguf`, `Foo.mmproj-Q8_0.gguf` | a vision projector |
//! | `imatrix_unsloth.gguf`, `Foo-imatrix.gguf` | an importance matrix |
//! | `MTP/mtp-gemma-4-12b-it-Q8_0.gguf`, `dflash-draft-3.6-q8_0.gguf` | a draft model |

use crate::name::check_file_path;

/// Beginnings of draft models' names, as llama.cpp's downloader has them (its pull request 25811);
/// `draft-` is the older form.
const DRAFT_BEGINNINGS: [&str; 4] = ["mtp-", "dflash-", "eagle3-", "draft-"];
/// Characters between the words of a name. `_` joins the parts of a quantisation.
const BREAKS: [char; 2] = ['-', '.'];

/// The use of a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GgufRole {
    Model,
    /// A small model or prediction head that drafts for a model.
    Draft,
    /// A vision projector or an importance matrix.
    Auxiliary,
}

/// A GGUF model of a repository: its files in order, several when it is split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GgufModel(pub(crate) Vec<String>);

impl GgufModel {
    pub(crate) fn file(&self) -> &str {
        &self.0[0]
    }

    pub(crate) fn role(&self) -> GgufRole {
        role(self.file())
    }
}

/// The use of a GGUF file, by its path.
pub(crate) fn role(file: &str) -> GgufRole {
    let (name, stem) = (
        base_name(file).to_ascii_lowercase(),
        stem(file).to_ascii_lowercase(),
    );
    let has_word = |wanted: &str| name.split(['-', '_', '.']).any(|word| word == wanted);
    let is_matrix = name.starts_with("imatrix") || quant_of_name(file).is_none();
    if has_word("mmproj") || name.starts_with("mmproj") || (has_word("imatrix") && is_matrix) {
        return GgufRole::Auxiliary;
    }
    let begins = DRAFT_BEGINNINGS.iter().any(|start| name.starts_with(start));
    if begins || stem.ends_with("-mtp") || folder(file).eq_ignore_ascii_case("mtp") {
        return GgufRole::Draft;
    }
    GgufRole::Model
}

pub(crate) fn of_role(models: &[GgufModel], role: GgufRole) -> Vec<GgufModel> {
    let of_role = models.iter().filter(|model| model.role() == role);
    of_role.cloned().collect()
}

/// GGUF models, sorted, with the files of split ones grouped. Omits unsafe paths and incomplete
/// split models.
pub(crate) fn gguf_models<'a>(files: impl Iterator<Item = &'a str>) -> Vec<GgufModel> {
    let mut names: Vec<&str> = files
        .filter(|name| name.ends_with(".gguf") && check_file_path(name).is_ok())
        .collect();
    names.sort_unstable();
    names.dedup();
    let present = |name: &String| names.binary_search(&name.as_str()).is_ok();
    let mut models = Vec::new();
    for name in &names {
        match split_part(name) {
            None => models.push(GgufModel(vec![(*name).to_owned()])),
            Some((stem, 1, count)) if usize::from(count) <= names.len() => {
                let parts: Vec<String> = (1..=count)
                    .map(|i| format!("{stem}-{i:05}-of-{count:05}.gguf"))
                    .collect();
                if parts.iter().all(present) {
                    models.push(GgufModel(parts));
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

/// The file's name without folders.
fn base_name(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

/// The folders of a path; empty at the top.
fn folder(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The name without folders, part number and `.gguf`.
pub(crate) fn stem(file: &str) -> &str {
    let name = base_name(file);
    match split_part(name) {
        Some((stem, ..)) => stem,
        None => name.strip_suffix(".gguf").unwrap_or(name),
    }
}

/// How well a selector names a file; the least is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// Path or file name. Only these select auxiliary files. Paths are case-sensitive.
    Name,
    /// The whole stem, folder, or tag: `Compact` and not `I-Compact`.
    Whole,
    /// The end of the stem, after `-`, `_` or `.`. `Q4_K` does not match `Q4_K_M`.
    End,
    /// Whole words of the tag: `Q4_K_M` in `Q4_K_M-imat`.
    Words,
}

/// The items that `selector` names best. `file` returns an item's first file.
pub(crate) fn best_fits<T>(items: Vec<T>, file: impl Fn(&T) -> &str, selector: &str) -> Vec<T> {
    let common = common_length(items.iter().map(&file));
    let fits: Vec<Option<Fit>> = items
        .iter()
        .map(|item| fit(file(item), common, selector))
        .collect();
    let Some(best) = fits.iter().flatten().min().copied() else {
        return Vec::new();
    };
    let ranked = items.into_iter().zip(fits);
    let best = ranked.filter(|(_, fit)| *fit == Some(best));
    best.map(|(item, _)| item).collect()
}

/// How `selector` names `file`, whose stem shares its first `common` bytes with all others.
fn fit(file: &str, common: usize, selector: &str) -> Option<Fit> {
    if file == selector || base_name(file).eq_ignore_ascii_case(selector) {
        return Some(Fit::Name);
    }
    if selector.is_empty() || role(file) == GgufRole::Auxiliary {
        return None;
    }
    let (stem, selector) = (
        stem(file).to_ascii_lowercase(),
        selector.to_ascii_lowercase(),
    );
    let tag = stem.get(common..).unwrap_or(&stem);
    if stem == selector || tag == selector || folder(file).eq_ignore_ascii_case(&selector) {
        return Some(Fit::Whole);
    }
    let before = stem.strip_suffix(&selector);
    if before.is_some_and(|before| before.ends_with(['-', '_', '.'])) {
        return Some(Fit::End);
    }
    let padded = |text: &str| format!("-{}-", text.replace(BREAKS, "-"));
    padded(tag)
        .contains(&padded(&selector))
        .then_some(Fit::Words)
}

/// The part of each file's stem that tells it from the others, such as `Q4_K_M` or `I-Compact`;
/// empty where the stems begin differently.
pub(crate) fn tags<'a>(files: &[&'a str]) -> Vec<&'a str> {
    let common = common_length(files.iter().copied());
    let tag = |file: &&'a str| match common {
        0 => "",
        common => stem(file).get(common..).unwrap_or_default(),
    };
    files.iter().map(tag).collect()
}

/// Bytes at the beginning of all models' stems, ignoring case, up to a break. Auxiliary files do
/// not count; 0 for fewer than two models.
fn common_length<'a>(files: impl Iterator<Item = &'a str>) -> usize {
    let stems = files
        .filter(|file| role(file) == GgufRole::Model)
        .map(|file| stem(file).to_ascii_lowercase());
    let mut stems: Vec<String> = stems.collect();
    stems.sort_unstable();
    stems.dedup();
    // Of sorted texts, first and last differ earliest.
    let (Some(first), Some(last)) = (stems.first(), stems.last()) else {
        return 0;
    };
    if first == last {
        return 0;
    }
    let same = first.bytes().zip(last.bytes());
    let same = same.take_while(|(a, b)| a == b).count();
    let shared = &first.as_bytes()[..same];
    let is_break = |byte: &u8| BREAKS.contains(&char::from(*byte));
    shared.iter().rposition(is_break).map_or(0, |at| at + 1)
}

/// The quantisation in a GGUF file's name, such as `Q4_K_M`, for display.
pub fn quant_of_name(file: &str) -> Option<&str> {
    let last = stem(file).rsplit(BREAKS).next()?;
    if !file.ends_with(".gguf") {
        return None;
    }
    let upper = last.to_ascii_uppercase();
    let rest = upper.strip_prefix("IQ").or_else(|| upper.strip_prefix('Q'));
    let quantised = rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    (quantised || matches!(upper.as_str(), "F32" | "F16" | "BF16")).then_some(last)
}
