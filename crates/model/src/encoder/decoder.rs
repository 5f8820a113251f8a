//! Decoders trained for embeddings: Qwen3 Embedding, EmbeddingGemma and similar models.
//!
//! In a causal model each row attends to the rows before it, so only the last one has seen the
//! whole text. In a bidirectional one every row sees the text, whose rows are computed together.
//! Source: Zhang et al. 2025 (Qwen3 Embedding), Vera et al. 2025 (EmbeddingGemma),
//! `1_Pooling/config.json` of their folders.

use std::ops::Range;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{Kernels, PAGE};

use super::ROWS;
use super::config::{
    ARCHITECTURE, EncoderConfig, EncoderFamily, Pooling, longest, pooling_modes, wrong,
};

use crate::{
    Batch, BatchSequence, BatchSize, Config, Error, LoadOptions, Logits, Model, ModelSource,
    Workspace,
};

/// Maximum tokens of a text, even for models trained on longer ones. The keys of a longer text
/// would take more than 0.9 GB in the smallest Qwen3 Embedding, in floats. OpenAI has 8,191.
const CONTEXT_MAX: usize = 8192;

/// A decoder that computes vectors of texts.
#[derive(Debug)]
pub(super) struct Decoder {
    model: Model,
    pooling: Pooling,
}

/// Whether the files of a decoder specify last-token pooling or attention in both directions.
pub(super) fn is_embedder(source: &ModelSource) -> bool {
    pooling(source, false).is_ok_and(|pooling| pooling == Pooling::Last)
        || Config::is_bidirectional(source)
}

/// Pooling of a decoder: of the last token, or what else a bidirectional one allows.
///
/// # Errors
/// Another pooling.
fn pooling(source: &ModelSource, bidirectional: bool) -> Result<Pooling, Error> {
    let (field, said) = match source {
        ModelSource::Hf(folder) => {
            let modes = pooling_modes(folder)?.unwrap_or_default();
            ("1_Pooling", modes.join(", "))
        }
        ModelSource::Gguf(file) => {
            let metadata = file.metadata();
            let key = format!("{}.pooling_type", metadata.str(ARCHITECTURE)?);
            let said = metadata.opt_u64(&key)?;
            (
                "pooling_type",
                said.map(|said| said.to_string()).unwrap_or_default(),
            )
        }
    };
    // The numbers are llama.cpp's.
    match (said.as_str(), bidirectional) {
        ("pooling_mode_lasttoken" | "3", _) => Ok(Pooling::Last),
        ("pooling_mode_mean_tokens" | "" | "0" | "1", true) => Ok(Pooling::Mean),
        ("pooling_mode_cls_token" | "2", true) => Ok(Pooling::First),
        (other, _) => Err(wrong(
            field,
            other,
            "that of the mean, the first or the last token",
        )),
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
        pooling: pooling(source, config.bidirectional)?,
    })
}

impl Decoder {
    /// # Errors
    /// As [`Model::load`].
    pub(super) fn load(source: &ModelSource, kernels: Arc<Kernels>) -> Result<Self, Error> {
        let class = KernelClass::CpuF32;
        let model = Model::load(source, LoadOptions { class }, kernels, |_, _| {})?;
        Ok(Self {
            pooling: pooling(source, model.config().bidirectional)?,
            model,
        })
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.model.weight_bytes()
    }

    /// Pooled rows of several texts that fit into one step, or of one text: in chunks of [`ROWS`]
    /// rows, or whole in a bidirectional model.
    ///
    /// # Errors
    /// [`Error::Cache`].
    pub(super) fn embed(
        &self,
        texts: &[&[u32]],
        is_over: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<f64>>>, Error> {
        let lengths = texts.iter().map(|text| text.len());
        let (all, longest) = (lengths.clone().sum(), lengths.clone().max().unwrap_or(1));
        let chunk = match self.model.config().bidirectional {
            true => longest,
            false => ROWS,
        };
        let wanted = match self.pooling {
            Pooling::Last => Logits::Last,
            Pooling::Mean | Pooling::First => Logits::All,
        };
        let size = BatchSize {
            rows: chunk.max(ROWS).min(all),
            logit_rows: match wanted {
                Logits::All => all,
                _ => texts.len(),
            },
            sequences: texts.len(),
            context: longest,
        };
        let positions = lengths.map(|len| len.next_multiple_of(PAGE)).sum();
        let mut cache = self.model.whole_cache(positions)?;
        let mut workspace = Workspace::headless(&self.model, size);
        let pages = pages_of(texts);
        for first in (0..longest).step_by(chunk) {
            if is_over() {
                return Ok(None);
            }
            let parts = texts.iter().zip(&pages);
            let sequences: Vec<BatchSequence<'_>> = parts
                .map(|(text, pages)| part_of((text, pages), first..first + chunk, wanted))
                .collect();
            let batch = Batch::new(&sequences);
            self.model.forward(&batch, &mut workspace, &mut cache)?;
        }
        let mut next = 0;
        let pooled = |text: &&[u32]| {
            let rows = match wanted {
                Logits::All => next..next + text.len(),
                _ => next..next + 1,
            };
            next = rows.end;
            self.pooled(&workspace, rows)
        };
        Ok(Some(texts.iter().map(pooled).collect()))
    }

    /// A text's normed rows as one.
    fn pooled(&self, workspace: &Workspace, rows: Range<usize>) -> Vec<f64> {
        let rows = match self.pooling {
            Pooling::Mean => rows,
            Pooling::First => rows.start..rows.start + 1,
            Pooling::Last => rows.end - 1..rows.end,
        };
        let n = rows.len() as f64;
        let mut pooled = vec![0.0; self.model.config().width];
        for row in rows {
            let values = workspace.normed(row).iter();
            let sums = pooled.iter_mut().zip(values);
            sums.for_each(|(sum, x)| *sum += f64::from(*x));
        }
        pooled.iter_mut().for_each(|sum| *sum /= n);
        pooled
    }
}

/// Rows `positions` of a text, as many as it has.
fn part_of<'a>(
    (text, pages): (&'a [u32], &'a [u32]),
    positions: Range<usize>,
    wanted: Logits,
) -> BatchSequence<'a> {
    let first = positions.start;
    let end = text.len().min(positions.end);
    BatchSequence::plain(
        &text[first..end],
        first,
        pages,
        match end == text.len() {
            true => wanted,
            false => Logits::None,
        },
    )
}

fn pages_of(texts: &[&[u32]]) -> Vec<Vec<u32>> {
    let mut next = 0;
    let pages = |text: &&[u32]| {
        let first = next;
        next += text.len().div_ceil(PAGE) as u32;
        (first..next).collect()
    };
    texts.iter().map(pages).collect()
}
