//! Greedy answers of the model to prompts, kept in a file as they are made.
//!
//! A line has the tokens of one prompt with its answer. Lines are in the order of prompts, so that
//! a stopped run continues behind the last whole line.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_model::{Batch, BatchSequence, BatchSize, Compute, LoadedModel as _, Logits, Model};
use paceline_tensor::PAGE;
use paceline_text::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

use super::network::largest;
use crate::error::Error;

/// Answers that are made together. Weights are read once for all of them; 16 rows are a block of
/// the kernels.
const STREAMS: usize = 16;

/// Rows of a pass over a prompt.
const PROMPT_ROWS: usize = 256;

/// A prompt with the model's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// Prompt and answer.
    pub(super) tokens: Vec<u32>,
}

impl Answer {
    /// Tokens of the answer.
    pub(super) fn own_tokens(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether it answers this prompt.
    pub(crate) fn is_to(&self, prompt: &[u32]) -> bool {
        self.prompt == prompt.len() && self.tokens.starts_with(prompt)
    }
}

/// The prompts that are answered together as group `nth`; empty behind the last one.
pub(crate) fn group(prompts: &[Vec<u32>], nth: usize) -> &[Vec<u32>] {
    prompts.chunks(STREAMS).nth(nth).unwrap_or_default()
}

/// The prompts of a run, and the answers so far.
#[derive(Debug)]
pub(super) struct Answers {
    path: PathBuf,
    prompts: Vec<Vec<u32>>,
    answers: Vec<Answer>,
}

impl Answers {
    /// Reads the answers that a stopped run has left.
    ///
    /// # Errors
    /// [`Error::Files`]; a line that is not of its prompt is malformed.
    pub(super) fn open(
        path: &Path,
        prompts: Vec<Vec<u32>>,
        tokens_max: usize,
    ) -> Result<Self, Error> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.map_err(Error::file("read", path))?,
        };
        // A line without an end was being written.
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let mut answers = Vec::new();
        for (line, prompt) in whole.lines().zip(&prompts) {
            let answer: Answer =
                serde_json::from_str(line).map_err(|e| Error::malformed(path, e))?;
            if !answer.is_to(prompt) || answer.tokens.len() > tokens_max {
                let reason = format!("line {} is not of its prompt", answers.len() + 1);
                return Err(Error::malformed(path, reason));
            }
            answers.push(answer);
        }
        if whole.len() < text.len() {
            std::fs::write(path, whole).map_err(Error::file("write", path))?;
        }
        Ok(Self {
            path: path.to_owned(),
            prompts,
            answers,
        })
    }

    /// Makes the answers that are missing, here or by the workers. Blocks for a forward pass a
    /// token of each group.
    ///
    /// # Errors
    /// [`Error::Model`]; [`Error::Files`]; [`Error::Lost`] when no worker is left;
    /// [`Error::Stopped`] when `stop` says so.
    pub(super) fn complete(
        &mut self,
        mut answering: impl FnMut(usize, &[Vec<u32>]) -> Result<Vec<Answer>, Error>,
        groups: usize,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&[Answer], usize),
    ) -> Result<(), Error> {
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&self.path)
            .map_err(Error::file("open", &self.path))?;
        while self.answers.len() < self.prompts.len() {
            if stop() {
                return Err(Error::Stopped { step: 1 });
            }
            let from = self.answers.len();
            let to = (from + groups * STREAMS).min(self.prompts.len());
            for answer in answering(from, &self.prompts[from..to])? {
                let line = serde_json::to_string(&answer).unwrap_or_default();
                writeln!(file, "{line}").map_err(Error::file("write", &self.path))?;
                self.answers.push(answer);
            }
            progress(&self.answers, self.prompts.len());
        }
        Ok(())
    }

    pub(super) fn into_answers(self) -> Vec<Answer> {
        self.answers
    }
}

/// Answers the prompts of a group together, each in its own pages.
#[derive(Debug)]
pub(super) struct Answering {
    compute: Box<dyn Compute>,
    vocab: usize,
    /// Tokens that end an answer.
    ends: Vec<u32>,
    /// Pages of each stream.
    pages: usize,
    /// Longest prompt with its answer.
    tokens_max: usize,
}

impl Answering {
    /// # Errors
    /// [`Error::Model`] if the memory cannot be reserved.
    pub(super) fn new(
        (model, tokenizer): (&Arc<Model>, &Tokenizer),
        tokens_max: usize,
    ) -> Result<Self, Error> {
        let pages = tokens_max.div_ceil(PAGE);
        let size = BatchSize {
            rows: PROMPT_ROWS,
            logit_rows: STREAMS,
            sequences: STREAMS,
            context: tokens_max,
        };
        Ok(Self {
            compute: Arc::clone(model).reserve(size, STREAMS * pages * PAGE)?,
            vocab: model.config().vocab,
            ends: tokenizer.end_of_generation().to_vec(),
            pages,
            tokens_max,
        })
    }

    /// The answers to the prompts of a [`group`]. Blocks for a forward pass a token.
    pub(super) fn answer(&mut self, prompts: &[Vec<u32>]) -> Result<Vec<Answer>, Error> {
        let mut answers = Vec::with_capacity(prompts.len());
        for (stream, prompt) in prompts.iter().enumerate() {
            answers.push(Answer {
                prompt: prompt.len(),
                tokens: prompt.clone(),
            });
            let mut chunks = prompt.chunks(PROMPT_ROWS).peekable();
            let mut position = 0;
            while let Some(chunk) = chunks.next() {
                let logits = if chunks.peek().is_none() {
                    Logits::Last
                } else {
                    Logits::None
                };
                self.forward(&[(stream, chunk, position)], logits)?;
                position += chunk.len();
            }
            answers[stream].tokens.push(self.token(0));
        }
        loop {
            let is_open = |answer: &Answer| {
                let last = answer.tokens.last();
                answer.tokens.len() < self.tokens_max
                    && last.is_some_and(|t| !self.ends.contains(t))
            };
            let open: Vec<usize> = (0..answers.len())
                .filter(|i| is_open(&answers[*i]))
                .collect();
            if open.is_empty() {
                return Ok(answers);
            }
            let last = |i: &usize| {
                let tokens = &answers[*i].tokens;
                (*i, &tokens[tokens.len() - 1..], tokens.len() - 1)
            };
            let rows: Vec<_> = open.iter().map(last).collect();
            self.forward(&rows, Logits::Last)?;
            for (row, i) in open.into_iter().enumerate() {
                answers[i].tokens.push(self.token(row));
            }
        }
    }

    fn forward(&mut self, rows: &[(usize, &[u32], usize)], logits: Logits) -> Result<(), Error> {
        let pages: Vec<u32> = (0..(STREAMS * self.pages) as u32).collect();
        let mut sequences: Vec<BatchSequence<'_>> = Vec::with_capacity(rows.len());
        for (stream, tokens, position) in rows {
            sequences.push(BatchSequence::plain(
                tokens,
                *position,
                &pages[stream * self.pages..(stream + 1) * self.pages],
                logits,
            ));
        }
        self.compute.forward(&Batch::new(&sequences))?;
        Ok(())
    }

    /// The likeliest token by row `row` of the logits.
    fn token(&mut self, row: usize) -> u32 {
        largest(&self.compute.logits_mut(row)[..self.vocab])
    }
}
