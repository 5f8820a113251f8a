//! A tokenizer from the metadata of a GGUF file: selects the algorithm by `tokenizer.ggml.model`
//! and checks vocabulary, scores, merges and special tokens.

use super::bpe::{ByteBpe, TextBpe};
use super::ends;
use super::fragments::Special;
use super::json;
use super::pretokenize::Scheme;
use super::spm::Spm;
use super::vocab::{Kind, Spelling, Vocab};
use super::{Algorithm, Error, Tokenizer, TokenizerParts};
use paceline_weights::gguf::{Metadata, MetadataValue};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const CLS: &str = "tokenizer.ggml.cls_token_id";
const SEP: &str = "tokenizer.ggml.seperator_token_id"; // spelt so
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// Before a word of a WordPiece vocabulary.
const WORD: char = '\u{2581}';

/// Ids that SentencePiece models have when the file does not say (llama.cpp does the same).
const SENTENCE_UNKNOWN: u32 = 0;
const SENTENCE_BOS: u32 = 1;
const SENTENCE_EOS: u32 = 2;

/// See [`Tokenizer::from_gguf`].
pub(super) fn read(metadata: &Metadata) -> Result<Tokenizer, Error> {
    match metadata.str(MODEL)? {
        "gpt2" => read_byte_bpe(metadata),
        "llama" => read_sentence(metadata),
        "bert" => read_word_piece(metadata),
        "gemma4" => read_text_bpe(metadata),
        other => Err(Error::UnknownModel {
            name: other.to_owned(),
        }),
    }
}

fn read_byte_bpe(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let scheme = Scheme::by_name(metadata.opt_str(PRE)?.unwrap_or("default"))?;
    let vocab = read_vocab(metadata, Spelling::ByteLevel)?;
    let model = ByteBpe::new(&vocab, metadata.strs(MERGES)?, scheme)?;
    let flags = Flags {
        add_bos: scheme.add_bos,
        bos: None,
        eos: None,
    };
    finish(metadata, vocab, Algorithm::ByteBpe(Box::new(model)), flags)
}

/// Gemma 4: merges over text as SentencePiece writes it. Its early files say that BOS is not added,
/// which is wrong: llama.cpp adds it regardless.
fn read_text_bpe(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let vocab = read_vocab(metadata, Spelling::Sentence)?;
    let model = TextBpe::new(&vocab, metadata.strs(MERGES)?)?;
    let flags = Flags {
        add_bos: true,
        bos: None,
        eos: None,
    };
    let mut tokenizer = finish(metadata, vocab, Algorithm::TextBpe(Box::new(model)), flags)?;
    tokenizer.add_bos = true;
    Ok(tokenizer)
}

fn read_sentence(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let vocab = read_vocab(metadata, Spelling::Sentence)?;
    let scores = metadata.f32s(SCORES)?;
    check_count(SCORES, scores.len(), vocab.len())?;
    let unknown = special_id(metadata, UNKNOWN, &vocab)?.unwrap_or(SENTENCE_UNKNOWN);
    let unknown = (vocab.kind(unknown) == Kind::Unknown || metadata.get(UNKNOWN).is_some())
        .then_some(unknown);
    let space_prefix = metadata.opt_bool(SPACE_PREFIX)?.unwrap_or(true);
    let model = Spm::new(&vocab, scores, unknown, space_prefix)?;
    let flags = Flags {
        add_bos: true,
        bos: Some(SENTENCE_BOS),
        eos: Some(SENTENCE_EOS),
    };
    finish(metadata, vocab, Algorithm::Sentence(Box::new(model)), flags)
}

/// WordPiece of BERT: written as the `tokenizer.json` that it was converted from.
///
/// `convert_hf_to_gguf.py` of llama.cpp puts a mark before words, and takes the marks of pieces
/// away: `the` is `▁the`, `##ing` is `ing`. Whether letters are made small is not in the file: they
/// are where no word has a capital.
fn read_word_piece(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let written = metadata.strs(TOKENS)?;
    let kinds = metadata.opt_i32s(TOKEN_TYPE)?;
    if let Some(kinds) = kinds {
        check_count(TOKEN_TYPE, kinds.len(), written.len())?;
    }
    let is_named = |text: &str| text.starts_with('[') && text.ends_with(']');
    let spelt = |text: &str| match text.strip_prefix(WORD) {
        Some(word) => word.to_owned(),
        None if is_named(text) => text.to_owned(),
        None => format!("##{text}"),
    };
    let tokens: Vec<String> = written.iter().map(|text| spelt(text)).collect();
    let id = |keys: [&str; 2], name: &str| -> Result<u32, Error> {
        let told = keys
            .iter()
            .find_map(|key| metadata.opt_u64(key).ok().flatten());
        let found = || {
            tokens
                .iter()
                .position(|text| text == name)
                .map(|id| id as u64)
        };
        let id = told.or_else(found).filter(|id| *id < tokens.len() as u64);
        id.map(|id| id as u32).ok_or_else(|| Error::Malformed {
            what: MODEL,
            reason: format!("bert without the token {name}"),
        })
    };
    let cls = id([CLS, BOS], "[CLS]")?;
    let sep = id([SEP, EOS], "[SEP]")?;
    let unknown = id([UNKNOWN, UNKNOWN], "[UNK]")?;
    let is_special = |id: u32| {
        let kind = kinds.map_or(Kind::Normal, |kinds| Kind::from_gguf(kinds[id as usize]));
        [cls, sep, unknown].contains(&id) || kind == Kind::Control
    };
    let special = |id: u32| {
        serde_json::json!({"id": id, "content": tokens[id as usize], "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
    };
    let specials = (0..tokens.len() as u32).filter(|id| is_special(*id));
    let has_capital = |(id, text): (u32, &String)| {
        !is_special(id) && !is_named(text) && text.chars().any(char::is_uppercase)
    };
    let is_cased = (0..).zip(&tokens).any(has_capital);
    let ids: serde_json::Map<_, _> = (0_u32..)
        .zip(&tokens)
        .map(|(id, text)| (text.clone(), id.into()))
        .collect();
    let name = |id: u32| tokens[id as usize].as_str();
    let text = serde_json::json!({
        "version": "1.0",
        "added_tokens": specials.map(special).collect::<Vec<_>>(),
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": !is_cased},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor":
            {"type": "BertProcessing", "cls": [name(cls), cls], "sep": [name(sep), sep]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": name(unknown), "vocab": ids,
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    });
    json::read_bytes(text.to_string().as_bytes())
}

/// Defaults for facts that the file does not state.
struct Flags {
    add_bos: bool,
    bos: Option<u32>,
    eos: Option<u32>,
}

fn finish(
    metadata: &Metadata,
    vocab: Vocab,
    algorithm: Algorithm,
    default: Flags,
) -> Result<Tokenizer, Error> {
    let known = |id: &u32| (*id as usize) < vocab.len();
    let bos = special_id(metadata, BOS, &vocab)?.or(default.bos.filter(known));
    let eos = special_id(metadata, EOS, &vocab)?.or(default.eos.filter(known));
    let eot = special_id(metadata, EOT, &vocab)?;
    let eom = special_id(metadata, EOM, &vocab)?;
    let ends = ends::find(vocab.iter(), [eos, eot, eom].into_iter().flatten());
    let specials = vocab
        .iter()
        .map(|(id, text, kind)| (kind, Special::plain(id, text)));
    let is_cut = |kind| matches!(kind, Kind::Control | Kind::Unknown | Kind::UserDefined);
    let specials = specials.filter(|(kind, _)| is_cut(*kind)).collect();
    Tokenizer::assemble(TokenizerParts {
        vocab,
        algorithm,
        specials,
        bos,
        eos,
        ends,
        add_bos: metadata.opt_bool(ADD_BOS)?.unwrap_or(default.add_bos),
        add_eos: metadata.opt_bool(ADD_EOS)?.unwrap_or(false),
        after: None,
    })
}

/// The id under `key`. Writers put a negative id or one outside the vocabulary for "none".
fn special_id(metadata: &Metadata, key: &str, vocab: &Vocab) -> Result<Option<u32>, Error> {
    if let Some(
        MetadataValue::I8(_)
        | MetadataValue::I16(_)
        | MetadataValue::I32(_)
        | MetadataValue::I64(_),
    ) = metadata.get(key)
        && metadata.opt_u64(key).is_err()
    {
        return Ok(None);
    }
    let in_range = |id: &u64| *id < vocab.len() as u64;
    Ok(metadata.opt_u64(key)?.filter(in_range).map(|id| id as u32))
}

fn read_vocab(metadata: &Metadata, spelling: Spelling) -> Result<Vocab, Error> {
    let tokens = metadata.strs(TOKENS)?;
    if tokens.is_empty() {
        return Err(Error::EmptyVocabulary);
    }
    let kinds = metadata.opt_i32s(TOKEN_TYPE)?;
    if let Some(kinds) = kinds {
        check_count(TOKEN_TYPE, kinds.len(), tokens.len())?;
    }
    let mut vocab = Vocab::new(spelling);
    for (i, text) in tokens.iter().enumerate() {
        let kind = kinds.map_or(Kind::Normal, |k| Kind::from_gguf(k[i]));
        let is_end = matches!(kind, Kind::Normal | Kind::UserDefined) && ends::is_end_name(text);
        vocab.push(text, if is_end { Kind::Control } else { kind });
    }
    Ok(vocab)
}

fn check_count(key: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::Count { key, got, expected })
    }
}
