//! Text to token ids and ids to bytes.
//!
//! ```text
//! text --cut at special tokens--> fragments --+-- token: its id
//!                                             +-- text: the model's own way of cutting --> ids
//! id --> bytes (always the same for an id) --> detokenizer::StreamDecoder --> text
//! ```
//!
//! Five ways of encoding a fragment of text:
//! - `bpe`: byte-level byte-pair encoding of a GGUF (`tokenizer.ggml.model` = `gpt2`): words cut
//!   by `pretokenize`, merged by the `tokenizers` crate;
//! - `bpe` too: pairs over the characters of a line (`gemma4`), merged by the same crate;
//! - `spm`: SentencePiece by scores of a GGUF (`llama`), our own, for the crate cannot express it;
//! - WordPiece of a GGUF (`bert`), run by the crate;
//! - `json`: any model of a `tokenizer.json` (WordPiece of BERT too), run by the crate.
//!
//! Invariant: with [`Specials::AsText`] no text produces the id of a control token.
//!
//! Not here: which turns a conversation has ([`crate::chat`]), and vocabularies of other kinds
//! (Unigram and RWKV of a GGUF), which are refused by name.

mod bpe;
mod ends;
mod fragments;
mod gguf;
mod json;
mod keys;
mod pretokenize;
mod spm;
mod steps;
mod vocab;

use std::path::{Path, PathBuf};

use crate::detokenizer::StreamDecoder;
pub(crate) use fragments::Fragment;
use fragments::{Cutter, Special};
use paceline_weights::gguf::Metadata;
use vocab::{Kind, Vocab};

/// Why a tokenizer could not be read, or could not encode a text.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Metadata of a GGUF is missing or of another type.
    #[error(transparent)]
    Metadata(#[from] paceline_weights::gguf::Error),
    /// `tokenizer.ggml.model` names a kind of vocabulary that is not supported.
    #[error("tokenizer model {name} is not supported, expected gpt2, llama, bert or gemma4")]
    UnknownModel { name: String },
    /// `tokenizer.ggml.pre` names a way of cutting words that is not known: guessing one would
    /// give other ids than the model was trained with.
    #[error("pre-tokenizer {name} is not supported")]
    UnknownPre { name: String },
    #[error("the vocabulary is empty")]
    EmptyVocabulary,
    /// A list that goes with the tokens has another length.
    #[error("metadata key {key}: {got} entries, expected {expected}, one per token")]
    Count {
        key: &'static str,
        got: usize,
        /// The number of tokens.
        expected: usize,
    },
    #[error("score of token {id} is not a number")]
    Score {
        /// The token.
        id: usize,
    },
    /// A merge is not two tokens that make a third.
    #[error("merge {index} {text:?} does not join two tokens to a third")]
    Merge {
        /// Position in the list of merges.
        index: usize,
        text: String,
    },
    /// More special tokens than can be looked for at once.
    #[error("{count} special tokens are too many")]
    TooManySpecials {
        /// Size of the vocabulary.
        count: usize,
    },
    #[error("reading {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file is larger than any real one.
    #[error("{what} has {size} bytes, expected at most {limit}")]
    TooLarge {
        /// Name of the file.
        what: &'static str,
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A file is not JSON of the expected form.
    #[error("{what} is malformed: {reason}")]
    Malformed {
        /// Name of the file.
        what: &'static str,
        /// Message of the parser.
        reason: String,
    },
    /// An id of a `tokenizer.json` is far outside the number of its tokens.
    #[error("token {text:?} has id {id}, expected below {limit} in a vocabulary of {count}")]
    Id {
        /// The token.
        text: String,
        id: u32,
        /// The lowest id that is refused.
        limit: u64,
        /// Number of tokens.
        count: usize,
    },
    /// The decoder of a `tokenizer.json` is of a kind that cannot be streamed token by token.
    #[error("decoder {name} of tokenizer.json is not supported")]
    UnknownDecoder { name: String },
    /// The merges and tokens do not make a model.
    #[error("vocabulary and merges do not fit together: {reason}")]
    Model {
        /// Message of the `tokenizers` crate.
        reason: String,
    },
    #[error("text has {size} bytes, expected less than 4 GiB")]
    TextTooLong {
        /// Its length in bytes.
        size: usize,
    },
    /// A byte can be spelt neither by a byte token nor by the unknown token.
    #[error("the vocabulary has no token for byte {byte:#04x}")]
    NoByteToken { byte: u8 },
    /// The text has more tokens than the caller takes.
    #[error("the text has more than {tokens_max} tokens")]
    TooManyTokens { tokens_max: usize },
    /// The `tokenizers` crate could not encode a text.
    #[error("encoding failed: {reason}")]
    Encode {
        /// Message of the crate.
        reason: String,
    },
    /// A `tokenizer.json` turns ordinary text into a control token and cannot be kept from it.
    #[error("ordinary text gives control token {id}")]
    ControlFromText { id: u32 },
}

/// Treatment of the names of special tokens in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Names of control tokens are ordinary text: for messages, and for texts that are no prompts.
    AsText,
    /// Names of special tokens become these tokens: for text that the program itself made, and for
    /// prompts without a template.
    Parse,
}

/// Turns text into the token ids of one model, and ids into bytes. Immutable and shareable between
/// threads.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    algorithm: Algorithm,
    /// Finds user-defined tokens only.
    user_defined: Cutter,
    /// Finds all special tokens.
    all_special: Cutter,
    /// Finds control and unknown tokens only.
    control: Cutter,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Sorted.
    ends: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    /// Token that a post-processor puts behind a whole text; used where EOS is not added.
    after: Option<u32>,
}

/// # Errors
/// [`Error::TooManyTokens`] if there are.
fn within(ids: &[u32], tokens_max: usize) -> Result<(), Error> {
    if ids.len() > tokens_max {
        return Err(Error::TooManyTokens { tokens_max });
    }
    Ok(())
}

/// Algorithm from text between special tokens to ids.
#[derive(Debug)]
enum Algorithm {
    ByteBpe(Box<bpe::ByteBpe>),
    TextBpe(Box<bpe::TextBpe>),
    Sentence(Box<spm::Spm>),
    Json(Box<json::TokenizerPipeline>),
}

struct TokenizerParts {
    vocab: Vocab,
    algorithm: Algorithm,
    specials: Vec<(Kind, Special)>,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    after: Option<u32>,
}

impl Tokenizer {
    /// The tokenizer in the metadata of a GGUF file.
    ///
    /// Ids equal llama.cpp's (recorded in `tests/golden`), with two intended differences.
    /// Ordinary text never produces control tokens. A missing BOS or EOS of a `gpt2` vocabulary is
    /// none rather than id 11.
    ///
    /// Cost: about 30 ms for SmolLM2 (49,152 tokens) and 60 ms for Gemma (262,144), on one core of
    /// a 2-core EPYC 9004 VM. Memory: a few times the texts.
    ///
    /// # Errors
    /// [`Error::Metadata`], [`Error::UnknownModel`], [`Error::UnknownPre`],
    /// [`Error::EmptyVocabulary`], [`Error::Count`], [`Error::Score`], [`Error::Merge`].
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, Error> {
        gguf::read(metadata)
    }

    /// The tokenizer of a Hugging Face folder: `tokenizer.json`, and where they exist
    /// `tokenizer_config.json`, `generation_config.json` and `config.json` for BOS and EOS.
    ///
    /// # Errors
    /// The errors of [`from_json_bytes`](Self::from_json_bytes), and [`Error::Read`].
    pub fn from_hf_dir(dir: &Path) -> Result<Self, Error> {
        json::read_dir(dir)
    }

    /// The tokenizer that a `tokenizer.json` describes. BOS is what its post-processor puts first;
    /// the tokens that end an answer are found by name.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::Malformed`], [`Error::Id`], [`Error::UnknownDecoder`],
    /// [`Error::EmptyVocabulary`].
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Self, Error> {
        json::read_bytes(bytes)
    }

    fn assemble(parts: TokenizerParts) -> Result<Self, Error> {
        let pick = |wanted: &dyn Fn(Kind) -> bool| {
            let specials = parts.specials.iter().filter(|(kind, _)| wanted(*kind));
            Cutter::new(specials.map(|(_, special)| special.clone()).collect())
        };
        Ok(Self {
            user_defined: pick(&|kind| kind == Kind::UserDefined)?,
            control: pick(&|kind| kind != Kind::UserDefined)?,
            all_special: pick(&|_| true)?,
            vocab: parts.vocab,
            algorithm: parts.algorithm,
            bos: parts.bos,
            eos: parts.eos,
            ends: parts.ends,
            add_bos: parts.add_bos,
            add_eos: parts.add_eos,
            after: parts.after,
        })
    }

    /// The ids of `text`. With `add_bos`, BOS goes first if the model wants one
    /// ([`adds_bos`](Self::adds_bos)); EOS is never added.
    ///
    /// Cost: O(n log n) in the length of the text.
    ///
    /// # Errors
    /// [`Error::TextTooLong`], [`Error::NoByteToken`], [`Error::Encode`],
    /// [`Error::ControlFromText`].
    pub fn encode(&self, text: &str, specials: Specials, add_bos: bool) -> Result<Vec<u32>, Error> {
        self.encode_within(text, specials, add_bos, usize::MAX)
    }

    /// Like [`encode`](Self::encode), but fails on more than `tokens_max` tokens.
    ///
    /// Cost: linear in the words of `tokens_max` tokens. A SentencePiece vocabulary joins a whole
    /// text at once, so there a text is refused by its length before, or encoded whole.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`], and those of [`encode`](Self::encode).
    pub fn encode_within(
        &self,
        text: &str,
        specials: Specials,
        add_bos: bool,
        tokens_max: usize,
    ) -> Result<Vec<u32>, Error> {
        let cutter = match specials {
            Specials::AsText => &self.user_defined,
            Specials::Parse => &self.all_special,
        };
        let mut out = Vec::new();
        if add_bos && self.add_bos {
            out.extend(self.bos);
        }
        self.encode_fragments(&cutter.cut(text), tokens_max, &mut out)?;
        Ok(out)
    }

    /// The ids of a prompt without a template. Names of special tokens become these tokens. BOS
    /// goes first if the model wants one and the prompt does not begin with it.
    pub fn encode_prompt(&self, prompt: &str, tokens_max: usize) -> Result<Vec<u32>, Error> {
        let mut ids = self.encode_within(prompt, Specials::Parse, true, tokens_max)?;
        let twice = self.bos.filter(|_| self.add_bos).map(|bos| [bos, bos]);
        if twice.is_some_and(|twice| ids.starts_with(&twice)) {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// The ids of a whole text that a user wrote, with the tokens around it that the model was
    /// trained with. These are BOS and EOS; for BERT `[CLS]` and `[SEP]`. Encoders read such texts.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = self.encode(text, Specials::AsText, true)?;
        ids.extend(self.last());
        Ok(ids)
    }

    /// The token that ends a [whole text](Self::encode_whole), if the model was trained with one.
    pub fn last(&self) -> Option<u32> {
        self.eos.filter(|_| self.add_eos).or(self.after)
    }

    /// The ids of fragments of one text; texts of fragments are encoded as ordinary text. Stops
    /// when there are more than `tokens_max`.
    pub(crate) fn encode_pieces(
        &self,
        pieces: &[Fragment<'_>],
        tokens_max: usize,
    ) -> Result<Vec<u32>, Error> {
        let mut fragments = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match *piece {
                Fragment::Text(text) => fragments.extend(self.user_defined.cut(text)),
                token @ Fragment::Token { .. } => fragments.push(token),
            }
        }
        let mut out = Vec::new();
        self.encode_fragments(&fragments, tokens_max, &mut out)?;
        Ok(out)
    }

    pub(crate) fn cut_control<'a>(&self, text: &'a str) -> Vec<Fragment<'a>> {
        self.control.cut(text)
    }

    /// The names of all control tokens.
    pub(crate) fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.control.texts()
    }

    fn encode_fragments(
        &self,
        fragments: &[Fragment<'_>],
        tokens_max: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        if let Algorithm::Json(pipeline) = &self.algorithm {
            let is_control = |id| self.is_control(id);
            let left = tokens_max.saturating_sub(out.len());
            let ids = pipeline.encode(fragments, &self.control, &is_control, left)?;
            out.extend(ids);
            return within(out, tokens_max);
        }
        let mut after_text = false;
        for fragment in fragments {
            match *fragment {
                Fragment::Token { id, .. } => out.push(id),
                Fragment::Text(text) => match &self.algorithm {
                    Algorithm::ByteBpe(model) => model.encode(text, tokens_max, out)?,
                    Algorithm::TextBpe(model) => {
                        model.encode(text, out)?;
                        within(out, tokens_max)?;
                    }
                    Algorithm::Sentence(model) => {
                        model.check_length(text, tokens_max.saturating_sub(out.len()))?;
                        model.encode(&self.vocab, text, after_text, out)?
                    }
                    Algorithm::Json(_) => unreachable!("handled above"),
                },
            }
            within(out, tokens_max)?;
            after_text = matches!(fragment, Fragment::Text(_));
        }
        Ok(())
    }

    /// The text of whole `ids`, from the start of a text; control tokens give nothing.
    pub fn decode_all(&self, ids: &[u32]) -> String {
        let mut decoder = StreamDecoder::at_start(self.adds_space_prefix());
        let bytes = ids.iter().filter_map(|id| self.token_bytes(*id));
        let mut text: String = bytes.map(|b| decoder.push(b)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// The bytes that `id` adds to a text: empty for control, unknown and unused tokens, `None` for
    /// an id without a token. A token may be a part of a character. Cost: O(1).
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocab.bytes(id)
    }

    /// The name of `id` as the vocabulary writes it. Cost: linear in the name.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// Number of ids, the highest plus one. The model may have rows for more.
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text. An answer may end with others as well:
    /// [`is_end_of_generation`](Self::is_end_of_generation).
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether the model expects BOS before a text.
    pub fn adds_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// Whether encoding puts a space before a text, which decoding from the start must drop.
    pub fn adds_space_prefix(&self) -> bool {
        match &self.algorithm {
            Algorithm::ByteBpe(_) | Algorithm::TextBpe(_) => false,
            Algorithm::Sentence(model) => model.space_prefix,
            Algorithm::Json(pipeline) => pipeline.space_prefix(),
        }
    }

    /// Whether an answer ends with `id`.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// All tokens that end an answer, ascending.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.ends
    }

    /// Whether `id` steers the model and is no text.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.kind(id) == Kind::Control
    }
}
