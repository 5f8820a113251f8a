//! A tokenizer from a Hugging Face folder, run by the `tokenizers` crate.
//!
//! The crate's own handling of special tokens is bypassed. The text is cut by our
//! [`Cutter`](super::fragments::Cutter). The crate gets the fragments as parts of one text, so that
//! rules about the beginning of a text still see it. Added tokens are searched in the original
//! text, before the normaliser.
//!
//! A `tokenizer.json` is untrusted, and the crate panics on some malformed files. So:
//!
//! - The size and depth of the file are limited before anything is parsed.
//! - Ids are checked before they size an allocation.
//! - Its normaliser and pre-tokenizer run with bounds of growth and time ([`steps`]).
//! - Padding and truncation, which could ask for any amount of memory, are never run.
//! - As a last resort, a panic of the crate is caught and becomes an error (`crate::panics`).

use std::cell::Cell;
use std::ops::Range as Span;
use std::path::Path;

use serde_json::Value;
use tokenizers::tokenizer::{Model as _, PostProcessor as _};
use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString};
use tokenizers::{Encoding, ModelWrapper, NormalizedString, Token};

use super::fragments::{Cutter, Fragment, Special};
use super::steps::{self, Steps};
use super::vocab::{Kind, Spelling, Vocab, byte_token};
use super::{Algorithm, Error, Tokenizer, TokenizerParts, ends};
use crate::{limited_read, panics};

/// Largest `tokenizer.json` that is read: seven times Gemma's (33 MB), the largest known.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// Largest of the small configuration files: ten times Gemma's `tokenizer_config.json` (1.2 MB).
const MAX_CONFIG_BYTES: u64 = 12 << 20;

/// Deepest nesting of brackets: real files have 5 to 7. The crate copies what is inside a bracket
/// at each level, so that 100 levels would take 100 times the memory of the file.
const MAX_DEPTH: usize = 16;

/// Ids that a vocabulary may leave free beyond twice its number of tokens. Real ones leave a few
/// hundred (reserved for tokens that were never added).
const MAX_FREE_IDS: u64 = 1024;

const TOKENIZER: &str = "tokenizer.json";

/// The parts of the crate's tokenizer, run one after the other.
pub(super) struct TokenizerPipeline {
    inner: tokenizers::Tokenizer,
    steps: Steps,
    space_prefix: bool,
}

impl std::fmt::Debug for TokenizerPipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline")
            .field("space_prefix", &self.space_prefix)
            .finish_non_exhaustive()
    }
}

/// Facts from the files next to `tokenizer.json`.
#[derive(Debug, Default)]
struct Config {
    bos: Option<String>,
    eos: Option<String>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    bos_id: Option<u32>,
    end_ids: Vec<u32>,
}

/// See [`Tokenizer::from_hf_dir`].
pub(super) fn read_dir(dir: &Path) -> Result<Tokenizer, Error> {
    let path = dir.join(TOKENIZER);
    let bytes = read_limited(&path, TOKENIZER, MAX_TOKENIZER_BYTES)?;
    read(&bytes, &read_config(dir)?)
}

/// See [`Tokenizer::from_json_bytes`].
pub(super) fn read_bytes(bytes: &[u8]) -> Result<Tokenizer, Error> {
    read(bytes, &Config::default())
}

fn read(bytes: &[u8], config: &Config) -> Result<Tokenizer, Error> {
    check_size(TOKENIZER, bytes.len() as u64, MAX_TOKENIZER_BYTES)?;
    let malformed = |reason| Error::Malformed {
        what: TOKENIZER,
        reason,
    };
    if depth(bytes) > MAX_DEPTH {
        return Err(malformed(format!("brackets nest deeper than {MAX_DEPTH}")));
    }
    let inner =
        panics::catch(|| tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string()))
            .and_then(|result| result)
            .map_err(malformed)?;
    panics::catch(|| build(inner, config)).map_err(malformed)?
}

fn build(inner: tokenizers::Tokenizer, config: &Config) -> Result<Tokenizer, Error> {
    let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or_default();
    let (vocab, specials) = read_vocab(&inner, spelling(&decoder)?)?;
    let id_of = |text: &String| inner.token_to_id(text);
    let (before, after) = surroundings(&inner);
    let known = |id: &u32| vocab.text(*id).is_some();
    let after = after.filter(known);
    let configured = config.bos.as_ref().and_then(id_of).or(config.bos_id);
    let bos = configured.or(before).filter(known);
    let first_end = config.end_ids.first().copied();
    let eos = config.eos.as_ref().and_then(id_of).or(first_end).or(after);
    let eos = eos.filter(known);
    let named = config.end_ids.iter().copied().chain(eos).filter(known);
    let ends = ends::find(vocab.iter(), named);
    let space_prefix = strips_space(&decoder);
    let malformed = |reason| Error::Malformed {
        what: TOKENIZER,
        reason,
    };
    steps::check_model(inner.get_model()).map_err(malformed)?;
    let steps = Steps::new(&inner).map_err(malformed)?;
    Tokenizer::assemble(TokenizerParts {
        algorithm: Algorithm::Json(Box::new(TokenizerPipeline {
            inner,
            steps,
            space_prefix,
        })),
        vocab,
        specials,
        bos,
        eos,
        ends,
        add_bos: config.add_bos.unwrap_or(before.is_some() && before == bos),
        add_eos: config.add_eos.unwrap_or(after.is_some() && after == eos),
        after,
    })
}

impl TokenizerPipeline {
    pub(super) fn space_prefix(&self) -> bool {
        self.space_prefix
    }

    /// The ids of `fragments`; stops when there are more than `tokens_max`.
    ///
    /// The model may make a control token of text, from a name that is in its own vocabulary. The
    /// name is then cut in two, so that it is spelt.
    pub(super) fn encode(
        &self,
        fragments: &[Fragment<'_>],
        control: &Cutter,
        is_control: &dyn Fn(u32) -> bool,
        tokens_max: usize,
    ) -> Result<Vec<u32>, Error> {
        let mut ids = self.run(fragments, tokens_max)?;
        if surplus_control(fragments, &ids, is_control).is_some() {
            let finer = cut_names(fragments, control);
            ids = self.run(&finer, tokens_max)?;
            if let Some(id) = surplus_control(&finer, &ids, is_control) {
                return Err(Error::ControlFromText { id });
            }
        }
        Ok(ids)
    }

    fn run(&self, fragments: &[Fragment<'_>], tokens_max: usize) -> Result<Vec<u32>, Error> {
        let count = Cell::new(0);
        let result = panics::catch(|| {
            let ids = self.ids(fragments, (&count, tokens_max));
            ids.map_err(|e| e.to_string())
        });
        result.and_then(|result| result).map_err(|reason| {
            if count.get() > tokens_max {
                return Error::TooManyTokens { tokens_max };
            }
            Error::Encode { reason }
        })
    }

    /// Normaliser, pre-tokenizer and model, in the crate's order. Counts tokens of words, and fails
    /// at the first word with which there are too many.
    fn ids(
        &self,
        fragments: &[Fragment<'_>],
        (count, tokens_max): (&Cell<usize>, usize),
    ) -> tokenizers::Result<Vec<u32>> {
        let joined = joined(fragments);
        let deadline = steps::deadline(joined.len());
        let mut text = PreTokenizedString::from(joined);
        text.split(|_, whole| Ok(splits(&whole, fragments)))?;
        self.steps.run(&mut text, deadline)?;
        text.tokenize(|part| {
            steps::check(deadline)?;
            let tokens = self.inner.get_model().tokenize(part.get())?;
            count.set(count.get() + tokens.len());
            if count.get() > tokens_max {
                return Err("too many tokens".into());
            }
            Ok(tokens)
        })?;
        let parts = text.get_splits(OffsetReferential::Original, OffsetType::None);
        let tokens = parts.iter().filter_map(|(_, _, tokens)| tokens.as_ref());
        Ok(tokens.flatten().map(|token| token.id).collect())
    }
}

fn joined(fragments: &[Fragment<'_>]) -> String {
    fragments.iter().map(|f| f.text()).collect()
}

/// `whole` cut into fragments; those that are a token have it already.
fn splits(
    whole: &NormalizedString,
    fragments: &[Fragment<'_>],
) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    let mut start = 0;
    let mut cut = |fragment: &Fragment<'_>| {
        let span: Span<usize> = start..start + fragment.text().len();
        start = span.end;
        let part = whole.slice(tokenizers::tokenizer::normalizer::Range::Original(span))?;
        let tokens = match *fragment {
            Fragment::Token { id, text } => {
                Some(vec![Token::new(id, text.to_owned(), (0, text.len()))])
            }
            Fragment::Text(_) => None,
        };
        Some((part, tokens))
    };
    fragments.iter().filter_map(&mut cut).collect()
}

/// The first control token of `ids` that is in no fragment.
fn surplus_control(
    fragments: &[Fragment<'_>],
    ids: &[u32],
    is_control: &dyn Fn(u32) -> bool,
) -> Option<u32> {
    let mut wanted = fragments.iter().filter_map(|fragment| match *fragment {
        Fragment::Token { id, .. } if is_control(id) => Some(id),
        _ => None,
    });
    let mut got = ids.iter().copied().filter(|id| is_control(*id));
    got.find(|id| wanted.next() != Some(*id))
}

/// Cuts each name of a control token in text after its first character.
fn cut_names<'a>(fragments: &[Fragment<'a>], control: &Cutter) -> Vec<Fragment<'a>> {
    let mut out = Vec::new();
    for fragment in fragments {
        let Fragment::Text(text) = *fragment else {
            out.push(*fragment);
            continue;
        };
        for part in control.cut(text) {
            let part = part.text();
            let first = part.chars().next().map_or(0, char::len_utf8);
            let is_name = control.texts().any(|name| name == part);
            let (head, tail) = part.split_at(if is_name { first } else { 0 });
            let parts = [head, tail].into_iter().filter(|p| !p.is_empty());
            out.extend(parts.map(Fragment::Text));
        }
    }
    out
}

/// All tokens in order of ids, and those that are cut out of text.
fn read_vocab(
    inner: &tokenizers::Tokenizer,
    spelling: Spelling,
) -> Result<(Vocab, Vec<(Kind, Special)>), Error> {
    let by_text = inner.get_vocab(true);
    let mut texts: Vec<Option<&str>> = vec![None; n_ids(&by_text)?];
    for (text, id) in &by_text {
        texts[*id as usize] = Some(text);
    }
    let unknown = match inner.get_model() {
        ModelWrapper::BPE(model) => model.unk_token.clone(),
        ModelWrapper::WordPiece(model) => Some(model.unk_token.clone()),
        _ => None,
    };
    let is_unknown = |text: &str| unknown.as_deref() == Some(text) || text == "<unk>";
    let added = inner.get_added_tokens_decoder();
    let mut vocab = Vocab::new(spelling);
    let mut specials = Vec::new();
    for (id, text) in (0..).zip(&texts) {
        let text = text.unwrap_or_default();
        let token = added.get(&id);
        let kind = match token {
            _ if texts[id as usize].is_none() => Kind::Hole,
            _ if is_unknown(text) => Kind::Unknown,
            Some(token) if token.special || ends::is_end_name(text) => Kind::Control,
            Some(_) => Kind::UserDefined,
            None if spelling == Spelling::Sentence && byte_token(text).is_some() => Kind::Byte,
            None => Kind::Normal,
        };
        vocab.push(text, kind);
        if let Some(token) = token {
            let special = Special {
                strip_left: token.lstrip,
                strip_right: token.rstrip,
                whole_word: token.single_word,
                ..Special::plain(id, text)
            };
            specials.push((kind, special));
        }
    }
    Ok((vocab, specials))
}

/// Nesting depth of brackets in a JSON text, strings left out.
fn depth(json: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_string, mut escaped) = (false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => depth += 1,
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// The highest id plus one.
fn n_ids(by_text: &std::collections::HashMap<String, u32>) -> Result<usize, Error> {
    let limit = 2 * by_text.len() as u64 + MAX_FREE_IDS;
    let Some((text, id)) = by_text.iter().max_by_key(|(_, id)| **id) else {
        return Err(Error::EmptyVocabulary);
    };
    if u64::from(*id) >= limit {
        return Err(Error::Id {
            text: text.clone(),
            id: *id,
            limit,
            count: by_text.len(),
        });
    }
    Ok(*id as usize + 1)
}

/// Visits a decoder and, of a sequence, its parts.
fn decoders(decoder: &Value) -> Vec<&Value> {
    match decoder.get("decoders").and_then(Value::as_array) {
        Some(parts) => parts.iter().flat_map(decoders).collect(),
        None => vec![decoder],
    }
}

fn type_of(decoder: &Value) -> &str {
    decoder
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or("null")
}

/// The decoder's mapping of tokens to bytes. Only decoders that treat each token by itself are
/// supported: WordPiece's clean-up around punctuation, which looks at neighbours, is left out.
fn spelling(decoder: &Value) -> Result<Spelling, Error> {
    let mut found = None;
    for part in decoders(decoder) {
        match type_of(part) {
            "ByteLevel" => found = Some(Spelling::ByteLevel),
            "Replace" | "Metaspace" | "ByteFallback" => {
                found = found.or(Some(Spelling::Sentence));
            }
            "WordPiece" if part["prefix"] == "##" => found = Some(Spelling::WordPiece),
            "Fuse" | "Strip" => {}
            other => {
                return Err(Error::UnknownDecoder {
                    name: other.to_owned(),
                });
            }
        }
    }
    found.ok_or_else(|| Error::UnknownDecoder {
        name: type_of(decoder).to_owned(),
    })
}

/// Whether the decoder drops a space at the start of a text.
fn strips_space(decoder: &Value) -> bool {
    decoders(decoder).iter().any(|part| match type_of(part) {
        "Strip" => part["content"] == " " && part["start"].as_u64() > Some(0),
        "Metaspace" => part["prepend_scheme"] != "never",
        "WordPiece" => true,
        _ => false,
    })
}

/// The tokens that the post-processor puts right before and right after a text.
fn surroundings(inner: &tokenizers::Tokenizer) -> (Option<u32>, Option<u32>) {
    const TEXT: u32 = u32::MAX;
    let text = Encoding::from_tokens(vec![Token::new(TEXT, "x".to_owned(), (0, 1))], 0);
    let Some(Ok(all)) = inner
        .get_post_processor()
        .map(|p| p.process(text, None, true))
    else {
        return (None, None);
    };
    let ids = all.get_ids();
    let Some(at) = ids.iter().position(|id| *id == TEXT) else {
        return (None, None);
    };
    (ids[..at].first().copied(), ids[at + 1..].last().copied())
}

fn read_config(dir: &Path) -> Result<Config, Error> {
    let tokenizer = read_json(dir, "tokenizer_config.json")?;
    let generation = read_json(dir, "generation_config.json")?;
    let model = read_json(dir, "config.json")?;
    let name = |key: &str| {
        let value = &tokenizer[key];
        value
            .as_str()
            .or(value["content"].as_str())
            .map(str::to_owned)
    };
    let ids = |value: &Value| -> Vec<u32> {
        let list = value
            .as_array()
            .map_or(std::slice::from_ref(value), Vec::as_slice);
        list.iter()
            .filter_map(|id| id.as_u64()?.try_into().ok())
            .collect()
    };
    let mut end_ids = ids(&generation["eos_token_id"]);
    end_ids.extend(ids(&model["eos_token_id"]));
    let bos_ids = [
        ids(&generation["bos_token_id"]),
        ids(&model["bos_token_id"]),
    ]
    .concat();
    Ok(Config {
        bos: name("bos_token"),
        eos: name("eos_token"),
        add_bos: tokenizer["add_bos_token"].as_bool(),
        add_eos: tokenizer["add_eos_token"].as_bool(),
        bos_id: bos_ids.first().copied(),
        end_ids,
    })
}

/// A JSON file of `dir`; null if it does not exist.
fn read_json(dir: &Path, what: &'static str) -> Result<Value, Error> {
    let path = dir.join(what);
    if !path.exists() {
        return Ok(Value::Null);
    }
    let bytes = read_limited(&path, what, MAX_CONFIG_BYTES)?;
    serde_json::from_slice(&bytes).map_err(|e| Error::Malformed {
        what,
        reason: e.to_string(),
    })
}

fn read_limited(path: &Path, what: &'static str, limit: u64) -> Result<Vec<u8>, Error> {
    let read = limited_read::read(path, limit).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })?;
    read.map_err(|size| Error::TooLarge { what, size, limit })
}

fn check_size(what: &'static str, size: u64, limit: u64) -> Result<(), Error> {
    if size > limit {
        return Err(Error::TooLarge { what, size, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_counts_brackets_outside_strings() {
        for (json, expected) in [
            ("", 0),
            ("1", 0),
            ("[]", 1),
            (r#"{"a":[{}],"b":[]}"#, 3),
            (r#"["[[[", "\"[[[", "\\", []]"#, 2),
            ("]]][", 1),
            ("[[[\"[", 3),
        ] {
            assert_eq!(depth(json.as_bytes()), expected, "{json}");
        }
    }
}
