//! The draft model or head of a leader, kept between epochs like the weights.

use std::sync::Arc;
use std::time::Instant;

use paceline_base::KernelClass;
use paceline_engine::{Draft, DraftNetwork};
use paceline_model::{ModelSource, load_draft_head};
use paceline_model_mlx::MlxPlaces;
use paceline_tensor::Kernels;
use tracing::warn;

use super::model_files::check_file;
use super::parse;
use crate::messages::{DraftJob, RankAssignment};
use crate::stamp::WeightsStamp;
use crate::{Error, load_whole, texts};

/// Key of a loaded draft, which is reused if the key is equal.
#[derive(Clone, Debug, PartialEq)]
struct DraftKey {
    of: DraftJob,
    stamp: WeightsStamp,
    class: String,
}

/// Cache of the last loaded draft. It is packed for the worker's kernels and must be dropped with
/// them.
#[derive(Default)]
pub(super) struct DraftCache(Option<(DraftKey, DraftNetwork)>);

impl DraftCache {
    /// The draft of an assignment, cached or loaded; `None` if it has none, or the prediction layer
    /// in the model's own files is invalid.
    ///
    /// # Errors
    /// Its files are invalid; [`Error::OtherModel`] if they were replaced.
    pub(super) fn of(
        &mut self,
        job: &RankAssignment,
        (model, kernels): (&ModelSource, &Arc<Kernels>),
        mlx: &MlxPlaces,
    ) -> Result<Option<Draft>, Error> {
        let Some(of) = job.draft.clone() else {
            self.0 = None;
            return Ok(None);
        };
        let stamp = WeightsStamp::of(&of.model)?;
        let class = job.class.clone();
        let key = DraftKey { of, stamp, class };
        let network = match self.0.take().filter(|kept| kept.0 == key) {
            Some(kept) => kept.1,
            None => match load(&key, job, (model, kernels), mlx) {
                Err(error) if key.of.model == job.model => {
                    warn!(%error, "the model's prediction layer is not used");
                    return Ok(None);
                }
                loaded => loaded?,
            },
        };
        self.0 = Some((key, network.clone()));
        let now = Instant::now;
        Ok(Some(Draft { network, now }))
    }
}

fn load(
    key: &DraftKey,
    job: &RankAssignment,
    (model, kernels): (&ModelSource, &Arc<Kernels>),
    mlx: &MlxPlaces,
) -> Result<DraftNetwork, Error> {
    let source = Arc::new(ModelSource::open(&key.of.model)?);
    check_file((&key.of.model, &key.of.identity), &source)?;
    let class: KernelClass = parse(&key.class, "kernel class")?;
    let kernels = Arc::clone(kernels);
    if !job.captures.is_empty() {
        let head = load_draft_head(&source, model, class, kernels)?;
        return Ok(DraftNetwork::Head(head));
    }
    let model = load_whole(&source, (class, None), &job.engine, mlx, kernels, |_, _| {})?;
    let tokenizer = Arc::new(texts::tokenizer(&source)?);
    Ok(DraftNetwork::Model { model, tokenizer })
}
