//! Constrained decoding: the tokens that a grammar allows next.
//!
//! ```text
//! Constraint --Grammars--> Guide --prepare (during the forward pass)--> mask --> sampler
//!                            ^------------------- accept <-- chosen token -------'
//! ```
//!
//! `llguidance` has the automata. This module builds its trie of the vocabulary, bounds the cost of
//! a grammar, and activates the grammar at its [`Start`]. A guide's state is a function of the
//! constraint and the generated tokens, so a snapshot needs nothing else. All bounds count work,
//! not time: two machines agree on them.
//!
//! If a grammar leaves a single next byte, such as in the field names of an object, a guide knows
//! the following text. A token that is the only spelling of its beginning is appended without
//! logits ([`Guide::sole`]). If several tokens fit, the longest ones are draft tokens for the next
//! step ([`Guide::guesses`]). Neither changes an answer.

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use paceline_text::grammar::{
    Constraint, Grammar, MAX_GRAMMAR_BYTES, MAX_MARKER_BYTES, MAX_MARKERS, Start, Unsupported,
    compilable, strict,
};
use paceline_text::tokenizer::Tokenizer;
use serde_json::json;
use toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

mod marker_scanner;

use marker_scanner::MarkerScanner;

/// Why a constraint is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    #[error("the grammar has {got} bytes, expected at most {most}")]
    TooLong {
        /// Size in bytes.
        got: usize,
        /// Maximum.
        most: usize,
    },
    #[error("the schema is not JSON: {reason}")]
    NotJson { reason: String },
    /// A schema keyword that is not supported.
    #[error(transparent)]
    Keyword(#[from] Unsupported),
    /// A list of choices or markers that is empty, too long, or has an empty text.
    #[error("{what} needs 1 to {most} texts that are not empty")]
    List {
        /// Name of the list.
        what: &'static str,
        /// Maximum.
        most: usize,
    },
    /// The compiler refuses the grammar, or it is too large.
    #[error("the grammar cannot be used: {reason}")]
    Grammar { reason: String },
}

/// Maximum texts of a [`Grammar::Choice`].
const MAX_CHOICES: usize = 4096;

/// Compiles grammars for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    /// End-of-generation tokens.
    ends: Vec<u32>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Grammars");
        f.field("ends", &self.ends).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model with `vocab` logits. Cost: sorts the vocabulary, some 50 ms for 49,152 tokens.
    ///
    /// # Errors
    /// [`ConstraintError::Grammar`] for a vocabulary beyond the limits of the automata.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Self, ConstraintError> {
        let ends = tokenizer.end_of_generation().iter().copied();
        let ends: Vec<u32> = ends.filter(|id| (*id as usize) < vocab).collect();
        let mut words: Vec<Vec<u8>> = (0..vocab as u32).map(|id| word(tokenizer, id)).collect();
        // The trie requires an end token, which this vocabulary lacks.
        if ends.is_empty() {
            words.push(b"\xff<|end|>".to_vec());
        }
        let eos = ends.first().copied().unwrap_or(vocab as u32);
        let info = TokRxInfo::new(words.len() as u32, eos);
        let trie = caught(|| {
            let trie = TokTrie::from(&info, &words);
            match ends.is_empty() {
                true => trie,
                false => trie.with_eos_tokens(&ends),
            }
        })?;
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| refused(&e.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory, ends })
    }

    /// Whether an engine with this vocabulary supports `constraint`. Cost: compiles the grammar, a
    /// millisecond for a schema of 20 fields, bounded by counts of work.
    ///
    /// # Errors
    /// The first fault found.
    pub fn check(&self, constraint: &Constraint) -> Result<(), ConstraintError> {
        check_sizes(constraint)?;
        self.compile(&constraint.grammar).map(drop)
    }

    fn compile(&self, grammar: &Grammar) -> Result<Matcher, ConstraintError> {
        let of_schema = |schema| TopLevelGrammar::from_json_schema(compilable(schema));
        let top = match grammar {
            Grammar::JsonSchema(text) => of_schema(&schema_of(text)?),
            Grammar::JsonObject => of_schema(&json!({"type": "object"})),
            Grammar::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            Grammar::Choice(texts) => TopLevelGrammar::from_lark(choice(texts)),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        };
        let matcher = Matcher::new(self.factory.create_parser(top));
        match matcher.get_error() {
            None => Ok(matcher),
            Some(reason) => Err(refused(&reason)),
        }
    }

    /// A guide at the start of an answer.
    ///
    /// # Errors
    /// The first fault of the constraint.
    pub(crate) fn guide(&self, constraint: Constraint) -> Result<Guide, ConstraintError> {
        check_sizes(&constraint)?;
        let fresh = self.compile(&constraint.grammar)?;
        let watch = MarkerScanner::of(&constraint.start);
        let state = match &watch {
            None => State::Matching(fresh.clone()),
            Some(_) => State::Free,
        };
        Ok(Guide {
            constraint,
            fresh,
            watch,
            state,
            mask: None,
            ahead: None,
        })
    }
}

/// Checks bounds that need no compiler.
fn check_sizes(constraint: &Constraint) -> Result<(), ConstraintError> {
    let (got, most) = (constraint.grammar.size(), MAX_GRAMMAR_BYTES);
    if got > most {
        return Err(ConstraintError::TooLong { got, most });
    }
    if let Grammar::Choice(texts) = &constraint.grammar {
        check_list("choice", texts, MAX_CHOICES, MAX_GRAMMAR_BYTES)?;
    }
    match &constraint.start {
        Start::Now => Ok(()),
        Start::After { marker } => {
            check_list("marker", std::slice::from_ref(marker), 1, MAX_MARKER_BYTES)
        }
        Start::Lazily { markers, except } => {
            check_list("markers", markers, MAX_MARKERS, MAX_MARKER_BYTES)?;
            let span = except.iter().flat_map(|span| [&span.open, &span.close]);
            let span: Vec<String> = span.cloned().collect();
            match span.is_empty() {
                true => Ok(()),
                false => check_list("except", &span, 2, MAX_MARKER_BYTES),
            }
        }
    }
}

/// Maximum bytes of a token in a constrained answer: the trie nests as deeply. GLM has a token of
/// 1,024 spaces.
const MAX_TOKEN_BYTES: usize = 512;

/// Bytes of a token in the trie. Control tokens have a marker, so that no text equals one. Empty
/// for tokens that a constrained answer never has.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let word = match control_text(tokenizer, id) {
        Some(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat(),
        None => tokenizer.token_bytes(id).unwrap_or_default().to_vec(),
    };
    match word.len() > MAX_TOKEN_BYTES {
        true => Vec::new(),
        false => word,
    }
}

/// The name of a control token.
fn control_text(tokenizer: &Tokenizer, id: u32) -> Option<&str> {
    let name = tokenizer.token_text(id);
    name.filter(|_| tokenizer.is_control(id))
}

/// Converts a panic of the trie to an error: it asserts limits that a vocabulary from a file may
/// exceed.
fn caught<T>(make: impl FnOnce() -> T) -> Result<T, ConstraintError> {
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make));
    made.map_err(|_| refused("the vocabulary does not fit"))
}

/// First line of the compiler's message, which may quote the whole grammar.
fn refused(reason: &str) -> ConstraintError {
    const MOST: usize = 300;
    let line = reason.lines().next().unwrap_or_default();
    let reason = line.chars().take(MOST).collect();
    ConstraintError::Grammar { reason }
}

fn check_list(
    what: &'static str,
    texts: &[String],
    most: usize,
    most_bytes: usize,
) -> Result<(), ConstraintError> {
    let is_fit = |text: &String| (1..=most_bytes).contains(&text.len());
    if (1..=most).contains(&texts.len()) && texts.iter().all(is_fit) {
        return Ok(());
    }
    Err(ConstraintError::List { what, most })
}

fn schema_of(text: &str) -> Result<serde_json::Value, ConstraintError> {
    let no_json = |reason| ConstraintError::NotJson { reason };
    let schema = serde_json::from_str(text).map_err(|e| no_json(e.to_string()))?;
    Ok(strict(&schema)?)
}

/// A choice of `texts` as a Lark grammar.
fn choice(texts: &[String]) -> String {
    let quoted = texts.iter().map(|text| json!(text).to_string());
    format!("start: {}", quoted.collect::<Vec<_>>().join(" | "))
}

/// Tokens that may follow.
#[derive(Debug)]
pub(crate) enum Allowed<'a> {
    /// Any token.
    All,
    /// These tokens, at least one of the vocabulary.
    Only(&'a SimpleVob),
    /// None: the answer is complete, and the model has no end token.
    Complete,
    /// Unknown: a limit was reached.
    Broken,
}

/// The state of an answer within its grammar.
pub(crate) struct Guide {
    constraint: Constraint,
    /// The grammar at its start.
    fresh: Matcher,
    /// Scanner for the grammar's start; `None` with [`Start::Now`].
    watch: Option<MarkerScanner>,
    state: State,
    /// Allowed next tokens, once computed.
    mask: Option<SimpleVob>,
    /// Forced text, once computed.
    ahead: Option<Vec<u8>>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one for each answer that keeps to a grammar"
)]
enum State {
    Free,
    Matching(Matcher),
    Broken,
}

impl Clone for Guide {
    fn clone(&self) -> Self {
        let state = match &self.state {
            State::Free => State::Free,
            State::Matching(matcher) => State::Matching(matcher.deep_clone()),
            State::Broken => State::Broken,
        };
        Self {
            constraint: self.constraint.clone(),
            fresh: self.fresh.deep_clone(),
            watch: self.watch.clone(),
            state,
            mask: self.mask.clone(),
            ahead: self.ahead.clone(),
        }
    }
}

impl std::fmt::Debug for Guide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Guide");
        f.field("constraint", &self.constraint)
            .finish_non_exhaustive()
    }
}

impl Guide {
    pub(crate) const fn constraint(&self) -> &Constraint {
        &self.constraint
    }

    /// Whether the grammar is inactive: before its start, and after its end.
    pub(crate) const fn is_free(&self) -> bool {
        matches!(self.state, State::Free)
    }

    /// Whether [`prepare`](Self::prepare) has work to do.
    pub(crate) const fn is_due(&self) -> bool {
        matches!(self.state, State::Matching(_)) && self.mask.is_none()
    }

    /// Computes the allowed tokens if needed: 10 us to some milliseconds.
    pub(crate) fn prepare(&mut self) {
        if !self.is_due() {
            return;
        }
        let State::Matching(matcher) = &mut self.state else {
            return;
        };
        match matcher.compute_mask_or_eos() {
            Ok(mask) => self.mask = Some(mask),
            Err(_) => self.state = State::Broken,
        }
    }

    /// Allowed next tokens of a vocabulary of `vocab` tokens.
    pub(crate) fn allowed(&mut self, vocab: usize) -> Allowed<'_> {
        self.prepare();
        match (&self.state, &self.mask) {
            (State::Broken, _) => Allowed::Broken,
            (State::Matching(_), Some(mask)) => match mask.first_bit_set() {
                Some(first) if first < vocab => Allowed::Only(mask),
                Some(_) => Allowed::Complete,
                None => Allowed::Broken,
            },
            _ => Allowed::All,
        }
    }

    /// Forced text; empty if there is a choice. Cost: a copy of the parser's state for the first
    /// token of such a text, some 10 us.
    fn ahead(&mut self) -> &[u8] {
        let State::Matching(matcher) = &self.state else {
            return &[];
        };
        // On a copy: after this call a parser finds no token where a token is forced by id.
        let find = || matcher.clone().compute_ff_bytes();
        self.ahead.get_or_insert_with(find)
    }

    /// The only allowed token of `vocab`, if the grammar leaves no choice.
    pub(crate) fn sole(&mut self, vocab: usize) -> Option<u32> {
        let is_stopped = matches!(&self.state, State::Matching(matcher) if matcher.is_stopped());
        if !is_stopped && self.ahead().is_empty() {
            return None;
        }
        let Allowed::Only(mask) = self.allowed(vocab) else {
            return None;
        };
        let first = mask.first_bit_set().filter(|_| mask.num_set() == 1)?;
        u32::try_from(first).ok()
    }

    /// Up to `most` tokens that spell the forced text, the longest first. Other tokens may spell it
    /// too.
    pub(crate) fn guesses(&mut self, most: usize) -> Vec<u32> {
        let ahead = self.ahead();
        // The rest is the name of a single control token.
        let marker = TokTrie::SPECIAL_TOKEN_MARKER;
        let text = ahead.split(|byte| *byte == marker).next();
        let text = text.unwrap_or_default().to_vec();
        let State::Matching(matcher) = &self.state else {
            return Vec::new();
        };
        let env = matcher.tok_env().ok().filter(|_| !text.is_empty());
        let mut tokens = env.map_or_else(Vec::new, |env| env.tokenize_bytes(&text));
        tokens.truncate(most);
        tokens
    }

    /// Advances by the chosen token, by its text or control name.
    pub(crate) fn accept(&mut self, token: u32, tokenizer: &Tokenizer) {
        self.mask = None;
        let bytes = tokenizer.token_bytes(token).unwrap_or_default();
        self.ahead = self.ahead.take().and_then(|ahead| behind(&ahead, bytes));
        if tokenizer.is_end_of_generation(token) {
            return;
        }
        let is_lazy = self.is_lazy();
        if let State::Matching(matcher) = &mut self.state {
            if matcher.consume_token(token).is_err() {
                self.state = State::Broken;
            } else if is_lazy && matcher.is_stopped() {
                self.state = State::Free;
            }
            return;
        }
        let control = control_text(tokenizer, token);
        let bytes = control.map_or(bytes, str::as_bytes);
        let Some(rest) = self.watch.as_mut().and_then(|watch| watch.push(bytes)) else {
            return;
        };
        self.begin(&rest);
    }

    const fn is_lazy(&self) -> bool {
        matches!(self.constraint.start, Start::Lazily { .. })
    }

    /// Activates the grammar after a marker; `rest` is the remaining text of the marker's token.
    fn begin(&mut self, rest: &[u8]) {
        let mut matcher = self.fresh.deep_clone();
        let rest = match self.is_lazy() {
            true => rest,
            false => rest.trim_ascii_start(),
        };
        let Ok(env) = matcher.tok_env() else {
            return;
        };
        let tokens = env.tokenize_bytes(rest);
        // A lazy grammar that cannot parse the first text was no call: the marker was part of the
        // answer.
        let consumed = matcher.try_consume_tokens(&tokens);
        if consumed.is_ok_and(|n| n == tokens.len()) {
            self.ahead = None;
            self.state = State::Matching(matcher);
        } else if !self.is_lazy() {
            self.state = State::Broken;
        }
    }
}

/// Rest of the forced text after a token; `None` if it must be computed again.
fn behind(ahead: &[u8], token: &[u8]) -> Option<Vec<u8>> {
    let rest = ahead.strip_prefix(token)?;
    let is_known = !token.is_empty() && !rest.is_empty();
    is_known.then(|| rest.to_vec())
}

#[cfg(test)]
mod tests;
