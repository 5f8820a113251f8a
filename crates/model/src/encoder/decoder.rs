//! Decoders trained for embeddings: Qwen3 Embedding and similar models.
//!
//! Each row attends to the rows before it, so only the last one has seen the whole text. Source:
//! Zhang et al. 2025 (Qwen3 Embedding), `1_Pooling/config.json` of its folders.

use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{Kernels, PAGE};

use super::ROWS;
use super::config::{ARCHITECTURE, EncoderConfig, EncoderFamily, Pooling, longest, pooling_modes};
use super::forward::unit;
use crate::{
    Batch, BatchSequence, BatchSize, Config, Error, LoadOptions, Logits, Model, ModelSource,
    Workspace,
};

/// Maximum tokens of a text, even for models trained on longer ones. The keys of a longer text
/// would take more than 0.9 GB in the smallest Qwen3 Embedding, in floats. OpenAI has 8,191.
const CONTEXT_MAX: usize = 8192;

/// `LLAMA_POOLING_TYPE_LAST` of llama.cpp.
const LAST: u64 = 3;

/// A decoder that computes the last row of texts.
#[derive(Debug)]
pub(super) struct Decoder(Model);

/// Whether the files of a decoder specify last-token pooling.
pub(super) fn is_embedder(source: &ModelSource) -> bool {
    match source {
        ModelSource::Hf(folder) => {
            let modes = pooling_modes(folder).ok().flatten();
            modes.is_some_and(|modes| modes == ["pooling_mode_lasttoken"])
        }
        ModelSource::Gguf(file) => {
            let metadata = file.metadata();
            let pooling = metadata
                .str(ARCHITECTURE)
                .ok()
                .and_then(|name| metadata.opt_u64(&format!("{name}.pooling_type")).ok());
            pooling.flatten() == Some(LAST)
        }
    }
}

/// # Errors
/// As [`Config::read`].
pub(super) fn read(source: &ModelSource) -> Result<EncoderConfig, Error> {
    let config = Config::read(source)?;
    let told = match source {
        ModelSource::Hf(folder) => longest(folder)?,
        ModelSource::Gguf(_) => None,
    };
    let context = told.unwrap_or(CONTEXT_MAX).min(CONTEXT_MAX);
    Ok(EncoderConfig {
        family: EncoderFamily::Decoder(config.family),
        width: config.width,
        vocab: config.vocab,
        context: context.min(config.context),
        pooling: Pooling::Last,
    })
}

impl Decoder {
    /// # Errors
    /// As [`Model::load`].
    pub(super) fn load(source: &ModelSource, kernels: Arc<Kernels>) -> Result<Self, Error> {
        let class = KernelClass::CpuF32;
        Model::load(source, LoadOptions { class }, kernels, |_, _| {}).map(Self)
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.0.weight_bytes()
    }

    /// Vectors of several texts that fit into one step, or of one text in chunks of [`ROWS`] rows.
    ///
    /// # Errors
    /// [`Error::Cache`].
    pub(super) fn embed(
        &self,
        texts: &[&[u32]],
        is_over: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<f32>>>, Error> {
        let lengths = texts.iter().map(|text| text.len());
        let size = BatchSize {
            rows: lengths.clone().sum::<usize>().min(ROWS),
            logit_rows: texts.len(),
            sequences: texts.len(),
            context: lengths.clone().max().unwrap_or(1),
        };
        let positions = lengths.map(|len| len.next_multiple_of(PAGE)).sum();
        let mut cache = self.0.whole_cache(positions)?;
        let mut workspace = Workspace::headless(&self.0, size);
        let pages = pages_of(texts);
        let longest = size.context;
        for first in (0..longest).step_by(ROWS) {
            if is_over() {
                return Ok(None);
            }
            let parts = texts.iter().zip(&pages);
            let sequences: Vec<BatchSequence<'_>> = parts
                .map(|(text, pages)| part_of(text, pages, first))
                .collect();
            let batch = Batch {
                sequences: &sequences,
            };
            self.0.forward(&batch, &mut workspace, &mut cache)?;
        }
        let row = |i| unit(workspace.normed(i).iter().copied().map(f64::from));
        Ok(Some((0..texts.len()).map(row).collect()))
    }
}

/// Rows of a text from position `first` on, up to a step's maximum.
fn part_of<'a>(text: &'a [u32], pages: &'a [u32], first: usize) -> BatchSequence<'a> {
    let end = text.len().min(first + ROWS);
    BatchSequence {
        tokens: &text[first..end],
        position: first,
        pages,
        windows: &[],
        adapter: 0,
        logits: match end == text.len() {
            true => Logits::Last,
            false => Logits::None,
        },
    }
}

/// Pages of each text.
fn pages_of(texts: &[&[u32]]) -> Vec<Vec<u32>> {
    let mut next = 0;
    let pages = |text: &&[u32]| {
        let first = next;
        next += text.len().div_ceil(PAGE) as u32;
        (first..next).collect()
    };
    texts.iter().map(pages).collect()
}
