//! The draft model of a leader, kept between epochs like the weights.

use std::sync::Arc;
use std::time::Instant;

use paceline_base::KernelClass;
use paceline_engine::Draft;
use paceline_model::{LoadedModel, ModelSource};
use paceline_model_mlx::MlxPlaces;
use paceline_tensor::Kernels;
use paceline_text::tokenizer::Tokenizer;

use super::{check_file, parse};
use crate::stamp::WeightsStamp;
use crate::messages::{DraftJob, RankAssignment};
use crate::{Error, load_whole, texts};

/// Key of a loaded draft, which is reused if the key is equal.
#[derive(Clone, Debug, PartialEq)]
struct DraftKey {
    of: DraftJob,
    stamp: WeightsStamp,
    class: String,
}

/// A loaded draft and its key.
type LoadedDraft = (DraftKey, Arc<dyn LoadedModel>, Arc<Tokenizer>);

/// Cache of the last loaded draft. It is packed for the worker's kernels and must be dropped with
/// them.
#[derive(Default)]
pub(super) struct DraftCache(Option<LoadedDraft>);

impl DraftCache {
    /// The draft of an assignment, cached or loaded; `None` if it has none.
    ///
    /// # Errors
    /// Its files are invalid; [`Error::OtherModel`] if they were replaced.
    pub(super) fn of(
        &mut self,
        job: &RankAssignment,
        kernels: &Arc<Kernels>,
        mlx: &MlxPlaces,
    ) -> Result<Option<Draft>, Error> {
        let Some(of) = job.draft.clone() else {
            self.0 = None;
            return Ok(None);
        };
        let stamp = WeightsStamp::of(&of.model)?;
        let class = job.class.clone();
        let key = DraftKey { of, stamp, class };
        let (key, model, tokenizer) = match self.0.take().filter(|kept| kept.0 == key) {
            Some(kept) => kept,
            None => load(key, job, kernels, mlx)?,
        };
        let draft = Draft {
            model: Arc::clone(&model),
            tokenizer: Arc::clone(&tokenizer),
            now: Instant::now,
        };
        self.0 = Some((key, model, tokenizer));
        Ok(Some(draft))
    }
}

fn load(
    key: DraftKey,
    job: &RankAssignment,
    kernels: &Arc<Kernels>,
    mlx: &MlxPlaces,
) -> Result<LoadedDraft, Error> {
    let source = Arc::new(ModelSource::open(&key.of.model)?);
    check_file((&key.of.model, &key.of.identity), &source)?;
    let class: KernelClass = parse(&key.class, "kernel class")?;
    let kernels = Arc::clone(kernels);
    let model = load_whole(&source, (class, None), &job.engine, mlx, kernels, |_, _| {})?;
    let tokenizer = Arc::new(texts::tokenizer(&source)?);
    Ok((key, model, tokenizer))
}
