//! The files of a rank's assignment: opened, announced where parts are missing, and checked.

use std::path::Path;
use std::sync::Arc;

use paceline_base::Rank;
use paceline_model::{Config, ModelSource};

use super::{Identity, RankWorker};
use crate::messages::{FromWorker, RankAssignment};
use crate::partial_source::RangeRequest;
use crate::stamp::WeightsStamp;
use crate::{Error, partial_source};

impl RankWorker<'_> {
    pub(super) fn part(&self, job: &RankAssignment) -> Result<(Arc<ModelSource>, Identity), Error> {
        let asks = (!job.is_alone).then(|| self.asks());
        let source = Arc::new(partial_source::open(&job.model, asks)?);
        check_identity(job, &source)?;
        let config = Config::read(&source)?;
        job.split.check(&config)?;
        if job.rank >= job.split.ranks() {
            return Err(Error::Setting {
                field: "rank",
                got: job.rank.to_string(),
            });
        }
        let of = Identity {
            model: job.model.clone(),
            stamp: WeightsStamp::of(&job.model)?,
            class: job.class.clone(),
            kv: job.kv.clone(),
            memory: job.memory,
            threads: job.threads,
            first_core: job.first_core,
            shard: job.split.shard(&config, Rank(job.rank)),
            adapters: job.adapters.clone(),
        };
        Ok((source, of))
    }

    fn asks(&self) -> Arc<partial_source::RangeRequester> {
        let channel = Arc::clone(&self.channel);
        Arc::new(move |wish| {
            let message = match wish {
                RangeRequest::Fetch { file, parts } => FromWorker::Wants { file, parts },
                RangeRequest::Repair { file, parts } => FromWorker::Damaged { file, parts },
            };
            // If the instance is lost, the reader of the channel ends this process.
            let _ = channel.send(&message);
        })
    }

    /// Announces the ranges that this rank will read of incomplete files, so that the host
    /// prefetches them.
    pub(super) fn announce(&self, job: &RankAssignment, source: &ModelSource) -> Result<(), Error> {
        if !partial_source::is_partial(&job.model) {
            return Ok(());
        }
        let config = Config::read(source)?;
        let shard = job.split.shard(&config, Rank(job.rank));
        let runs = partial_source::ahead(&job.model, source, (config.family, &shard));
        for (file, parts) in runs {
            self.send(&FromWorker::Wants { file, parts })?;
        }
        Ok(())
    }
}

/// Refuses files with another identity than the instance's.
pub(super) fn check_identity(job: &RankAssignment, source: &ModelSource) -> Result<(), Error> {
    check_file((&job.model, &job.identity), source)
}

/// Refuses files at `path` with another identity than `expected`.
pub(super) fn check_file(
    (path, expected): (&Path, &str),
    source: &ModelSource,
) -> Result<(), Error> {
    let got = crate::identity(source).map_err(|source| Error::System {
        what: "read the model's files",
        source,
    })?;
    if got == expected {
        return Ok(());
    }
    Err(Error::OtherModel {
        path: path.to_owned(),
        got,
        expected: expected.to_owned(),
    })
}
