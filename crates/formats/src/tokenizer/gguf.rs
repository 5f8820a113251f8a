//! A tokenizer out of the metadata of a GGUF file.

use super::bpe::{ByteBpe, TextBpe};
use super::ends;
use super::fragments::Special;
use super::pretokenize::Scheme;
use super::spm::Spm;
use super::vocab::{Kind, Spelling, Vocab};
use super::{Algorithm, Error, Parts, Tokenizer};
use crate::gguf::{Metadata, Value};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// Ids that SentencePiece models have when the file does not say (llama.cpp does the same).
const SENTENCE_UNKNOWN: u32 = 0;
const SENTENCE_BOS: u32 = 1;
const SENTENCE_EOS: u32 = 2;

/// See [`Tokenizer::from_gguf`].
pub(super) fn read(metadata: &Metadata) -> Result<Tokenizer, Error> {
    match metadata.str(MODEL)? {
        "gpt2" => read_byte_bpe(metadata),
        "llama" => read_sentence(metadata),
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

/// Gemma 4: merges over text as SentencePiece writes it. Its early files say that BOS is not
/// added, which is wrong: llama.cpp adds it whatever they say.
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

/// What holds when the file does not say.
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
    Tokenizer::assemble(Parts {
        vocab,
        algorithm,
        specials,
        bos,
        eos,
        ends,
        add_bos: metadata.opt_bool(ADD_BOS)?.unwrap_or(default.add_bos),
        add_eos: metadata.opt_bool(ADD_EOS)?.unwrap_or(false),
    })
}

/// The id under `key`. Writers put a negative id or one outside the vocabulary for "none".
fn special_id(metadata: &Metadata, key: &str, vocab: &Vocab) -> Result<Option<u32>, Error> {
    if let Some(Value::I8(_) | Value::I16(_) | Value::I32(_) | Value::I64(_)) = metadata.get(key)
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
