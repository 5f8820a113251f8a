//! Messages between a run's process and its workers. Numbers go through files, whose names follow
//! from the messages: `STEP/...` in the folder of exchanged files.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::drafter::answers::Answer;
use crate::drafter::job::DrafterJob;
use crate::run::TrainingJob;
use crate::shard::{GroupPlan, ShardFile, ShardRole};
use crate::stage::{LeafSet, ModelStage};

/// All answers that a draft head is trained on, in the folder of exchanged files.
pub(crate) const ANSWERS_FILE: &str = "answers/all.jsonl";

/// The job of a run's workers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum WorkerJob {
    Model(TrainingJob),
    Drafter(DrafterJob),
}

/// Paths of a job, which differ between machines.
pub(crate) struct JobFiles<'a> {
    pub(crate) model: &'a mut PathBuf,
    pub(crate) data: &'a mut PathBuf,
    pub(crate) valid: &'a mut Option<PathBuf>,
}

impl WorkerJob {
    pub(crate) fn files(&mut self) -> JobFiles<'_> {
        let (model, data, valid) = match self {
            Self::Model(job) => (&mut job.trained.model, &mut job.data, &mut job.valid),
            Self::Drafter(job) => (&mut job.model, &mut job.data, &mut job.valid),
        };
        JobFiles { model, data, valid }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToWorker {
    /// The job of the run. Sent once, first.
    Start {
        job: Box<WorkerJob>,
        /// 0 for as many as there are cores.
        threads: usize,
        /// Folder of exchanged files.
        exchange: PathBuf,
        /// The part of the model that the worker has.
        stage: ModelStage,
        /// The worker's part of a sharded training.
        shard: Option<ShardRole>,
    },
    /// Leaves `start..end` of a step are to be computed, by one that has the whole model.
    Compute { step: u64, start: usize, end: usize },
    /// Groups `start..end` of prompts are to be answered, of those from prompt `first` on.
    Answer {
        first: usize,
        start: usize,
        end: usize,
    },
    /// A draft head is to be trained on the answers in [`ANSWERS_FILE`].
    Learn,
    /// A stage's workers, or all that cut rows, are to compute their leaves: of a step, or all that
    /// is held out.
    Pipe { epoch: u64, step: u64, set: LeafSet },
    /// A rank is to listen for the others: `open` for those on other machines.
    Listen { epoch: u64, open: bool },
    /// The ranks are to form a group and to have the state before a step.
    Form {
        epoch: u64,
        rank: usize,
        plan: GroupPlan,
        from: ShardSource,
        step: u64,
    },
    /// All ranks are to make a step.
    Step { epoch: u64, step: u64 },
    /// All ranks are to compute the losses of what is held out.
    Judge { epoch: u64 },
    /// All ranks are to write their shards.
    Save { epoch: u64 },
}

/// Bytes that a step took of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankUse {
    /// Bytes that it sent to other ranks.
    pub(crate) sent_bytes: u64,
    /// Most bytes that it had in memory so far, where the system tells.
    pub(crate) memory_bytes: Option<u64>,
}

/// Where ranks get their state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ShardSource {
    /// The first values of the run.
    First,
    /// A file for each rank.
    File,
    /// They have it, but for `empty`, who get the copies. `norm` (as bits) is that of a step that
    /// some of them have committed.
    Copies {
        empty: Vec<usize>,
        norm: Option<u64>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// The model is loaded; fingerprints of it and of the data.
    Ready {
        model: String,
        data: String,
        /// Class and device, the same for all workers of a run.
        engine: String,
        /// Lines for the run's owner.
        notes: Vec<String>,
    },
    /// The roots of a part of what is trained, of these leaves, are in a file.
    Part {
        step: u64,
        start: usize,
        end: usize,
        part: usize,
        /// SHA-256 of the file.
        digest: String,
    },
    /// All parts of these leaves were sent.
    Done {
        step: u64,
        start: usize,
        end: usize,
        /// Loss of each leaf, as bits: text would round.
        losses: Vec<u64>,
    },
    /// Answers to the prompts of these groups, in order.
    Answered {
        start: usize,
        end: usize,
        answers: Vec<Answer>,
    },
    /// A worker's leaves `start..end` went through its stage.
    Piped {
        epoch: u64,
        step: u64,
        start: usize,
        end: usize,
        /// Losses as bits, in the last stage.
        losses: Vec<u64>,
        /// SHA-256 of the file of roots, of leaves that went back.
        digest: Option<String>,
        /// Seconds that it waited for other workers.
        waited_s: f64,
    },
    /// A rank listens. `step`: steps of its state, if it has one.
    Listening {
        epoch: u64,
        addrs: Vec<SocketAddr>,
        step: Option<u64>,
    },
    /// A rank's group is there, and so is its state.
    Formed { epoch: u64, step: u64 },
    /// A rank has made a step: the norm of the gradient and the losses of all leaves, as bits.
    Stepped {
        epoch: u64,
        step: u64,
        norm: u64,
        losses: Vec<u64>,
        use_of: RankUse,
    },
    /// Rows that are held out, and their losses as bits.
    Judged {
        epoch: u64,
        losses: Vec<(usize, u64)>,
    },
    /// A rank's shard is in a file.
    Saved {
        epoch: u64,
        rank: usize,
        step: u64,
        /// SHA-256 of the file.
        digest: String,
    },
    /// A computation of a rank took longer than this many seconds, by far longer than before.
    Hangs { limit_s: f64 },
    /// A rank's group failed. It has the state that it had before the step.
    Broken { epoch: u64, reason: String },
    /// The worker failed for a reason that would stop every other worker too.
    Failed { reason: String },
}

/// The values before a step, of what a stage trains.
pub(crate) fn params_file(step: u64, stage: usize) -> String {
    format!("{step}/params-{stage}")
}

/// The roots of leaves of a step: of a part, or of a stage.
pub(crate) fn roots_file(step: u64, start: usize, end: usize, part: usize) -> String {
    format!("{step}/roots-{start}-{end}-{part}")
}

impl ToWorker {
    /// Files that a worker of a stage reads for it.
    pub(crate) fn needs(&self, stage: ModelStage) -> Vec<String> {
        match self {
            Self::Form {
                rank,
                step,
                from: ShardSource::File,
                ..
            } => {
                vec![ShardFile::given(*step, *rank)]
            }
            Self::Compute { step, .. } | Self::Pipe { step, .. } => {
                vec![params_file(*step, stage.index)]
            }
            Self::Learn => vec![ANSWERS_FILE.to_owned()],
            _ => Vec::new(),
        }
    }
}

impl FromWorker {
    /// Files that a worker of a stage wrote before it said so.
    pub(crate) fn output_files(&self, stage: ModelStage) -> Vec<String> {
        match self {
            Self::Part {
                step,
                start,
                end,
                part,
                ..
            } => vec![roots_file(*step, *start, *end, *part)],
            Self::Saved { rank, .. } => vec![ShardFile::saved(*rank)],
            Self::Piped {
                step,
                start,
                end,
                digest: Some(_),
                ..
            } => vec![roots_file(*step, *start, *end, stage.index)],
            _ => Vec::new(),
        }
    }
}
