//! In-flight batches: planned, announced to the other ranks, and not yet computed by this one.
//!
//! ```text
//! stage 0    A   B   A'  B'        the leader plans B before it computes A
//! stage 1        A   B   A'  B'    A' needs the tokens that A gave
//! ```
//!
//! All ranks compute batches in the order of planning. So a page may get a new owner while an
//! in-flight batch uses it: the new owner writes later. A batch copies everything it reads when it
//! is planned, because sequences change meanwhile. Sequences with in-flight rows keep their pages:
//! they are not preempted, and cancelled ones are dropped when their rows complete.
//!
//! If no other sequence needs rows, a sequence with draft tokens may have further speculation
//! windows in flight ([`chain`](crate::chain)). A rejected draft token makes the later windows
//! *stale*. All ranks still compute them, and the engine ignores their logits. Rows after the right
//! token overwrite their rows in the cache. These were planned later and are computed later on
//! every rank. No row reads the stale rows before.

use paceline_model::trace::Kind;
use paceline_model::{Batch, BatchSequence, Logits, WindowPages};

use super::Engine;
use super::planning::PlannedRows;
use crate::constraint::Guide;
use crate::prefill_budget::Composition;
use crate::{Error, SequenceId};

/// The quantity that the duration of a step measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StepTiming {
    /// A step without overlapping windows. In a pipeline without other work this is the time from
    /// plan to logits.
    #[default]
    Step,
    /// The time of one stage: the step was planned together with the one before.
    Interval,
    /// Neither: speculation windows were in flight before it.
    Nothing,
}

#[derive(Clone, Debug, Default)]
pub(super) struct InFlightBatch {
    /// Sequences and their planned rows, in order of admission.
    pub(super) parts: Vec<(SequenceId, PlannedRows)>,
    pub(super) rows: Vec<SequenceRows>,
    pub(super) composition: Composition,
    pub(super) measures: StepTiming,
    /// Whether it is a speculation window after in-flight ones of the same sequence.
    pub(super) is_behind: bool,
}

/// Rows of one sequence, as input of the model.
#[derive(Clone, Debug)]
pub(super) struct SequenceRows {
    tokens: Vec<u32>,
    position: usize,
    pages: Vec<u32>,
    /// Per window: released pages, and remaining page numbers.
    windows: Vec<(usize, Vec<u32>)>,
    /// Adapter number, 0 for none.
    adapter: u32,
    logits: Logits,
}

impl SequenceRows {
    fn windows(&self) -> Vec<WindowPages<'_>> {
        let windows = self.windows.iter();
        windows
            .map(|(first_page, pages)| WindowPages {
                first_page: *first_page,
                pages,
            })
            .collect()
    }

    fn of_batch<'a>(&'a self, windows: &'a [WindowPages<'a>]) -> BatchSequence<'a> {
        BatchSequence {
            tokens: &self.tokens,
            position: self.position,
            pages: &self.pages,
            windows,
            adapter: self.adapter,
            logits: self.logits,
        }
    }

    const fn logit_rows(&self) -> usize {
        self.logits.rows(self.tokens.len())
    }
}

/// Runs `run` with the rows as a batch.
fn as_batch<T>(rows: &[SequenceRows], run: impl FnOnce(&Batch<'_>) -> T) -> T {
    let windows: Vec<Vec<WindowPages<'_>>> = rows.iter().map(SequenceRows::windows).collect();
    let sequences = rows.iter().zip(&windows);
    let sequences: Vec<BatchSequence<'_>> = sequences.map(|(r, w)| r.of_batch(w)).collect();
    run(&Batch::new(&sequences))
}

impl Engine {
    /// Plans and announces batches until enough are in flight to keep all stages busy.
    pub(super) fn launch_batches(&mut self) -> Result<(), Error> {
        if self.in_flight.is_empty() {
            self.starves = false;
            self.recall()?;
        } else if self.starves || self.is_to_measure() || self.wants_recall() {
            return Ok(()); // until none is in flight
        }
        let mut is_first = true;
        while let Some((plan, is_behind)) = self.next_plan()? {
            let mut flight = self.in_flight_batch(plan);
            flight.is_behind = is_behind;
            flight.measures = match is_behind {
                true if is_first => StepTiming::Nothing,
                true => StepTiming::Interval,
                false if self.in_flight.iter().any(|flight| flight.is_behind) => {
                    StepTiming::Nothing
                }
                false => StepTiming::Step,
            };
            if self.compute.depth() > 1 {
                as_batch(&flight.rows, |batch| self.compute.announce(batch))?;
            }
            self.in_flight.push_back(flight);
            is_first = false;
        }
        Ok(())
    }

    /// Rows of the next batch, if there is room for one, and whether it is a speculation window.
    /// Batches of ordinary rows have precedence.
    fn next_plan(&mut self) -> Result<Option<(Vec<PlannedRows>, bool)>, Error> {
        if self.starves || self.in_flight.len() >= self.compute.steps_max() {
            return Ok(None);
        }
        let ahead = self.in_flight.iter().filter(|flight| !flight.is_behind);
        if ahead.count() < self.compute.depth() {
            let mut plan = self.plan();
            if !plan.is_empty() {
                self.speculate(&mut plan)?;
                return Ok(Some((plan, false)));
            }
        }
        if self.starves {
            return Ok(None);
        }
        let behind = self.window_behind()?;
        Ok(behind.map(|part| (vec![part], true)))
    }

    /// Makes a plan an in-flight batch, with a copy of all inputs of the model.
    fn in_flight_batch(&mut self, mut plan: Vec<PlannedRows>) -> InFlightBatch {
        let composition = self.composition_of(&plan);
        self.note_rows(&plan);
        let (mut rows, mut row, mut logits_row) = (Vec::with_capacity(plan.len()), 0, 0);
        for part in &mut plan {
            let own = self.rows(part);
            (part.logits_row, part.position) = (logits_row, own.position);
            part.span = row..row + own.tokens.len();
            row = part.span.end;
            logits_row += own.logit_rows();
            rows.push(own);
        }
        let take_off = |mut part: PlannedRows| {
            let sequence = &mut self.running[part.index];
            sequence.n_in_flight += 1;
            part.course = sequence.course;
            if part.is_behind {
                sequence.ahead.extend_from_slice(&part.checked);
            } else {
                sequence.rows_in_flight += part.rows;
                sequence.ahead = part.checked.get(1..).unwrap_or_default().to_vec();
                sequence.guesser = part.guesser;
            }
            (sequence.id, part)
        };
        InFlightBatch {
            parts: plan.into_iter().map(take_off).collect(),
            rows,
            composition,
            measures: StepTiming::Step,
            is_behind: false,
        }
    }

    fn rows(&self, part: &PlannedRows) -> SequenceRows {
        let s = &self.running[part.index];
        let position = match part.is_behind {
            true => s.tokens.len() + s.ahead.len(),
            false => s.computed + s.rows_in_flight,
        };
        let end = position + part.rows;
        let own = s.tokens.get(position..end).unwrap_or_default();
        // The soft cap may make different logits equal, and the first among equals wins.
        let is_plain = self.model.config().softcap.is_none();
        let ends = self.tokenizer.end_of_generation();
        let draws = self.compute.draws_tokens() && part.checked.is_empty();
        let draw = draws.then(|| s.draw(ends));
        let wanted = match draw.flatten() {
            Some(draw) => draw.request(),
            None if is_plain => s.wanted(ends.len()),
            None => Logits::Last,
        };
        let (tokens, logits) = match end == s.tokens.len() {
            _ if !part.checked.is_empty() => (&*part.checked, wanted.of_all_rows()),
            _ if part.is_scored => (own, Logits::All),
            true => (own, wanted),
            false => (own, Logits::None),
        };
        let windows = s.pages.windows();
        SequenceRows {
            tokens: tokens.to_vec(),
            position,
            pages: s.pages.pages().to_vec(),
            windows: windows.map(|w| (w.first_page, w.pages.to_vec())).collect(),
            adapter: s.adapter.map_or(0, |adapter| adapter.place),
            logits,
        }
    }

    /// Completes an in-flight batch: returns the parts that sequences still need, with their
    /// current indices.
    pub(super) fn complete_batch(
        &mut self,
        parts: Vec<(SequenceId, PlannedRows)>,
    ) -> Vec<PlannedRows> {
        let mut landed = Vec::with_capacity(parts.len());
        let mut index = 0;
        for (id, part) in parts {
            // Both are in order of admission.
            while self.running[index].id != id {
                index += 1;
            }
            let sequence = &mut self.running[index];
            sequence.n_in_flight -= 1;
            if sequence.gone || part.course != sequence.course {
                self.draft_counters.add(part.guessed(), 0);
                continue;
            }
            sequence.rows_in_flight -= part.rows;
            landed.push(PlannedRows { index, ..part });
        }
        landed
    }

    /// Removes ended and cancelled sequences whose last in-flight rows are complete.
    pub(super) fn drop_gone(&mut self) {
        for index in (0..self.running.len()).rev() {
            let sequence = &self.running[index];
            if sequence.gone && sequence.n_in_flight == 0 {
                self.stop_running(index);
            }
        }
    }

    /// Whether all in-flight rows are stale and the next step is to be one without drafts. A step
    /// time is only valid if the step has the pipeline to itself.
    fn is_to_measure(&self) -> bool {
        let live = self.running.iter().any(|s| s.rows_in_flight > 0 && !s.gone);
        self.wants_plain_step() && !live
    }

    /// Runs the forward pass. In parallel, computes grammar masks that depend only on tokens
    /// already known.
    pub(super) fn forward(
        &mut self,
        plan: &[PlannedRows],
        rows: &[SequenceRows],
    ) -> Result<(), Error> {
        let mut due = self.take_due(plan);
        if self.model.links().is_none() {
            self.tracer.next_step(); // else the links count it
        }
        let began = self.tracer.begin();
        let n: usize = rows.iter().map(|rows| rows.tokens.len()).sum();
        let compute = &mut self.compute;
        let outcome = match rows.is_empty() {
            true => Ok(()),
            false => as_batch(rows, |batch| {
                with_guides(&mut due, || compute.forward(batch)).map(drop)
            }),
        };
        self.tracer.end(began, Kind::Step, n);
        for (index, guide) in due {
            self.running[index].guide = Some(guide);
        }
        Ok(outcome?)
    }
}

/// Runs `compute`, and prepares `guides`, if any, on another thread. Starting a thread takes some
/// 20 us, a mask up to milliseconds.
fn with_guides<T>(guides: &mut [(usize, Box<Guide>)], compute: impl FnOnce() -> T) -> T {
    if guides.is_empty() {
        return compute();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| guides.iter_mut().for_each(|(_, guide)| guide.prepare()));
        compute()
    })
}
