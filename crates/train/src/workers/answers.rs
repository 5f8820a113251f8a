//! Workers of a draft head's training: they answer prompts, then compute leaves of the head.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use paceline_base::Rank;

use super::deadline::Deadlines;
use super::leaves::LeafWork;
use super::{At, LeafModel, TrainingWorkers, WorkerOptions, alone};
use crate::drafter::DrafterRun;
use crate::drafter::answers::{Answer, group};
use crate::error::Error;
use crate::messages::{ANSWERS_FILE, FromWorker, ToWorker, WorkerJob};
use crate::report::TrainingProgress;

impl TrainingWorkers {
    /// Starts workers for a draft head, which each have the whole model. Dropping this ends them.
    ///
    /// # Errors
    /// As [`start`](Self::start); errors of the model's files.
    pub fn start_drafter(processes: WorkerOptions, run: &DrafterRun) -> Result<Self, Error> {
        let (job, expected) = (WorkerJob::Drafter(run.job().clone()), run.fingerprints()?);
        Self::spawn(processes, job, expected, None)
    }

    /// Answers to prompts from `first` on: a group of them by each worker. `None` without workers.
    pub(crate) fn answer(
        &mut self,
        (first, prompts): (usize, &[Vec<u32>]),
        clock: &dyn Fn() -> f64,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Option<Vec<Answer>>, Error> {
        let Some(team) = &mut self.team else {
            return Ok(None);
        };
        let mut answers = BTreeMap::new();
        let message = |groups: Range<usize>| ToWorker::Answer {
            first,
            start: groups.start,
            end: groups.end,
        };
        let mut take = |message: FromWorker, has: &[Range<usize>]| match message {
            FromWorker::Answered {
                start,
                end,
                answers: new,
            } if has.contains(&(start..end)) => {
                let asked = (start..end).flat_map(|nth| group(prompts, nth));
                let fits = |(answer, prompt): (&Answer, &Vec<u32>)| answer.is_to(prompt);
                if new.len() != asked.clone().count() || !new.iter().zip(asked).all(fits) {
                    return Err("answered other prompts");
                }
                answers.insert(start, new);
                Ok(Some(start..end))
            }
            _ => Ok(None),
        };
        let work = LeafWork {
            leaves: (0..)
                .take_while(|nth| !group(prompts, *nth).is_empty())
                .count(),
            message: &message,
            take: &mut take,
        };
        let step = first as u64;
        team.share_out(work, &At { step, clock }, watch)?;
        Ok(Some(answers.into_values().flatten().collect()))
    }

    /// Groups of prompts that are answered at once.
    pub(crate) fn groups(&self) -> usize {
        self.team.as_ref().map_or(1, |team| team.members.len())
    }

    /// Gives all workers the answers in the file `path`, which the head is trained on.
    pub(crate) fn learn(&mut self, path: &Path) -> Result<(), Error> {
        let Some(team) = &mut self.team else {
            return Ok(());
        };
        let there = team.exchange.join(ANSWERS_FILE);
        let folder = there.parent().unwrap_or(&team.exchange);
        std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        std::fs::copy(path, &there).map_err(Error::file("write", &there))?;
        team.is_learning = true;
        team.deadlines = Deadlines::new(team.members.len()); // a leaf is another one now
        for (rank, member) in team.members.iter_mut().enumerate() {
            member.speed = 0.0;
            // A worker that does not read will be reported as ended.
            let _ = team.workers.send(Rank(rank as u32), &ToWorker::Learn);
        }
        Ok(())
    }

    /// The loss and the gradient of a step of a draft head.
    pub(crate) fn step_of_head(
        &mut self,
        head: &mut impl LeafModel,
        (params, step): (&[f32], u64),
        clock: &dyn Fn() -> f64,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(f64, Vec<f32>), Error> {
        match &mut self.team {
            None => alone(head, params, step),
            Some(team) => team.leaves(head.shape(), params, &At { step, clock }, watch),
        }
    }
}
