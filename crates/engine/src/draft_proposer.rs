//! Draft-model proposer: a small model, or a head on the large model, proposes tokens that the
//! large model verifies.
//!
//! ```text
//! tokens   ... A B C            the pending token is C
//! draft    C -> D, D -> E       one draft pass per token
//! step     rows C D E           the large model verifies them in one step
//! next     C D F: D was right   the draft's keys of C and D stay, the row of E is overwritten
//! ```
//!
//! The draft model runs whole on the leader, independent of the large model's split. Proposing
//! needs no exchange, and verifying several tokens takes as many exchanges as one token. The draft
//! model has its own cache and pages. It samples with a copy of the sequence's sampler and the same
//! random numbers. So sampled answers profit as well. The answer never depends on a draft: see
//! [`ngram`](crate::ngram).
//!
//! A draft head ([`DraftHead`](paceline_model::DraftHead)) reads the large model's residual stream
//! as well. It reads accepted draft tokens again, with what the large model computed for them.
//!
//! In a pipeline a draft model continues its draft while earlier draft tokens are in flight: see
//! [`chain`](crate::chain).
//!
//! **When it pays.** [`GainEstimate`] has measured times: of steps without drafts, of verifying
//! steps by their rows, and of draft passes. With each sequence's acceptance they give its draft
//! length with the most tokens per second, 0 if none gains [`LEAST_GAIN`]. A draft model without a
//! gain is tried again from time to time, for at most [`TRIAL_SHARE`] of the time. Near classes
//! have [fixed](Costs::fixed) times.
//!
//! - [`draft`]: the input of the engine's caller.
//! - [`state`]: of each sequence.
//! - [`network`]: passes of a model or a head.
//! - [`gain_estimate`]: draft lengths.

mod draft;
mod gain_estimate;
mod network;
mod state;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paceline_model::{BatchSize, DraftPlace, LoadedModel, Logits};
use paceline_tensor::PAGE;
use paceline_text::tokenizer::Tokenizer;

use crate::chain::ProposerStats;
use crate::ngram::{Costs, DraftCandidate, FIRST_GUESS, LEAST_GAIN, updated_acceptance};
use crate::pages::{Pages, SequencePages};
use crate::proposer::{DraftStep, Drafts, Proposer};
use crate::sampling::{SamplingInputs, Scratch};
use crate::sequence::Sequence;
use crate::{EngineConfig, Error, SequenceId};
use gain_estimate::GainEstimate;
use network::{Network, PassRows, kernels};
use state::{DraftRequest, DraftState, PassPart, SequenceDraft};

pub use draft::{Draft, DraftNetwork};

/// Initial acceptance of a draft model. Users configure models that fit: published pairs of one
/// family accept 0.6 to 0.8.
const FIRST_ACCEPTANCE: f64 = 0.6;

/// Weight of the last draft token in the initial acceptance of new sequences, an average over many
/// answers.
const ALL_WEIGHT: f64 = 0.01;

/// Time of a draft pass relative to a step without drafts, until measured. A draft model is about a
/// quarter of its model, or less.
const FIRST_PASS: f64 = 0.25;

/// Passes whose times may lower that estimate only: one draft of the usual length.
const COLD_PASSES: usize = 4;

/// Maximum tokens that the draft model may lag and still propose, as many as a step adds. Beyond
/// that it catches up first.
const FEW: usize = 8;

/// Rows of a catch-up pass. Weights are unpacked once for all of them; more would delay other
/// answers, which have no prompt rows in the step.
const CATCH_UP_ROWS: usize = 128;

/// Tokens over which the cost of catching up must pay. The length of an answer is unknown; few chat
/// answers are shorter.
const LOOK_AHEAD: usize = 256;

/// Fraction of step time for trials of a draft model without a gain. Such a model costs at most 3
/// %, including the first drafts.
const TRIAL_SHARE: f64 = 0.02;

/// Maximum saved trial time, in steps without drafts.
const SAVED_STEPS: f64 = 8.0;

/// Weight of the last pass in the time of a catch-up row.
const ROW_WEIGHT: f64 = 0.5;

/// The draft model of an engine, with its cache and statistics.
#[derive(Debug)]
pub(crate) struct DraftProposer {
    network: Network,
    now: fn() -> Instant,
    pages: Pages,
    /// Maximum positions of a sequence.
    context: usize,
    states: BTreeMap<SequenceId, DraftState>,
    /// End-of-generation tokens: a draft ends there.
    ends: Vec<u32>,
    /// `(vocabulary of the model,)`: a row of the draft model's logits.
    logits: Vec<f32>,
    scratch: Scratch,
    /// Average acceptance over all answers.
    acceptance: f64,
    /// Times of passes, by rows.
    passes: Costs,
    /// Passes of a few rows so far.
    measured: usize,
    /// Seconds per row of a catch-up pass.
    row_s: Option<f64>,
    /// Seconds available for trials.
    allowance: f64,
    /// Time of the last step spent in this proposer.
    spent: Duration,
}

impl DraftProposer {
    /// Reserves memory for the sequences of an engine with `config` and a model with `vocab`
    /// tokens.
    ///
    /// # Errors
    /// [`Error::DraftVocabulary`], [`Error::DraftCaptures`]; [`Error::Model`] if the allocation
    /// fails.
    pub(crate) fn new(
        draft: &Draft,
        tokenizer: &Tokenizer,
        config: &EngineConfig,
        model: &dyn LoadedModel,
    ) -> Result<Self, Error> {
        let (vocab, mut context) = (model.config().vocab, config.context);
        match &draft.network {
            DraftNetwork::Model {
                model,
                tokenizer: own,
            } => {
                Draft::check(own, tokenizer)?;
                context = context.min(model.config().context);
            }
            DraftNetwork::Head(head) if head.captures() != model.captures() => {
                return Err(Error::DraftCaptures {
                    got: model.captures().to_vec(),
                    expected: head.captures().to_vec(),
                });
            }
            DraftNetwork::Head(_) => {}
        }
        let sequences = config.batch_size().sequences;
        let size = BatchSize {
            rows: CATCH_UP_ROWS.max(FEW * sequences),
            logit_rows: sequences,
            sequences,
            context,
        };
        let network = Network::new(draft, size, config.cache_positions)?;
        Ok(Self {
            pages: network.pages(),
            network,
            now: draft.now,
            context,
            states: BTreeMap::new(),
            ends: tokenizer.end_of_generation().to_vec(),
            logits: vec![0.0; vocab],
            scratch: Scratch::new(vocab),
            acceptance: FIRST_ACCEPTANCE,
            passes: match model.class().is_mlx() {
                true => Costs::fixed(draft.share(model)),
                false => Costs::default(),
            },
            measured: 0,
            row_s: None,
            allowance: 0.0,
            spent: Duration::ZERO,
        })
    }

    /// Adds new sequences, and processes the verification of the last drafts.
    fn settle(&mut self, wishes: &[DraftRequest<'_>]) {
        for DraftRequest { sequence, .. } in wishes {
            let all = &mut self.acceptance;
            if let Some(held) = self.states.get_mut(&sequence.id) {
                let computed = held.computed;
                held.settle(&sequence.tokens, &sequence.ahead, |is_right| {
                    *all = updated_acceptance(*all, is_right, ALL_WEIGHT);
                });
                if self.network.is_head() {
                    held.computed = computed; // draft tokens are read again
                }
                continue;
            }
            if self.network.is_head() {
                continue; // until there are captured rows
            }
            let mut pages = SequencePages::default();
            let computed = self.pages.reuse(&sequence.tokens, &mut pages);
            let held = DraftState::new(pages, computed, *all);
            self.states.insert(sequence.id, held);
        }
    }

    /// Seconds of a pass with one row for each of `n` sequences. The first passes find cold memory,
    /// so they may lower the estimate only.
    fn pass_s(&self, n: usize, plain: f64) -> f64 {
        let known = self.passes.seconds(n).or_else(|| self.passes.seconds(1));
        let estimate = plain * FIRST_PASS;
        match known {
            Some(known) if self.passes.is_fixed() || self.measured >= COLD_PASSES => known,
            known => known.map_or(estimate, |known| known.min(estimate)),
        }
    }

    /// Tokens of a sequence that the draft model has not read.
    fn behind(&self, sequence: &Sequence) -> usize {
        let computed = self
            .states
            .get(&sequence.id)
            .map_or(0, |held| held.computed);
        sequence.tokens.len() - computed
    }

    /// Acceptance and maximum draft of a sequence; 0 if the draft model cannot read it.
    fn chances(&self, wish: &DraftRequest<'_>) -> DraftCandidate {
        let Some(held) = self.states.get(&wish.sequence.id) else {
            return DraftCandidate {
                acceptance: self.acceptance,
                guesses: 0,
            };
        };
        let tokens = &wish.sequence.tokens;
        let unread = tokens.get(held.computed..).unwrap_or_default();
        let fits = self.fits(tokens.len(), false);
        let has_features = held.features.positions().end + 1 == tokens.len();
        let is_read = !unread.is_empty()
            && unread.iter().all(|token| self.network.knows(*token))
            && (has_features || !self.network.is_head());
        DraftCandidate {
            acceptance: held.ledger.acceptance,
            guesses: if is_read { wish.room.min(fits) } else { 0 },
        }
    }

    /// Maximum draft after `len` tokens, whether or not the last of these is a draft token.
    /// Recurrent states change with the last row of a page and cannot be rolled back, so no draft
    /// token may be there.
    fn fits(&self, len: usize, ends_with_guess: bool) -> usize {
        let fits = self.context.saturating_sub(len);
        let most = self.network.block().map(|block| block.drafts);
        let fits = fits.min(most.unwrap_or(usize::MAX));
        let in_page = len % PAGE;
        match self.network.has_states() {
            false => fits,
            true if in_page == 0 && ends_with_guess => 0,
            // The last draft token is not read, so it may be the page's last token.
            true => fits.min(PAGE - in_page),
        }
    }

    /// Runs one catch-up pass for sequences far behind, where that promises a gain; returns whether
    /// it did.
    fn catch_up(
        &mut self,
        wishes: &[DraftRequest<'_>],
        outlook: &GainEstimate<'_>,
    ) -> Result<bool, Error> {
        let mut left = CATCH_UP_ROWS;
        let mut parts = Vec::new();
        for wish in wishes {
            let behind = self.behind(wish.sequence);
            if behind <= FEW || left == 0 || !self.is_worth(wish, behind, outlook) {
                continue;
            }
            let (id, tokens) = (wish.sequence.id, &wish.sequence.tokens);
            let from = tokens.len() - behind;
            let end = from + (behind - 1).min(left);
            if self.grow(id, end) {
                left -= end - from;
                parts.push(PassPart {
                    id,
                    tokens: &tokens[from..end],
                    from,
                    feature: &[],
                });
            }
        }
        if parts.is_empty() {
            return Ok(false);
        }
        self.pass(&parts, Logits::None)?;
        for wish in wishes {
            let part = parts.iter().find(|part| part.id == wish.sequence.id);
            if let Some(part) = part {
                self.keep(wish.sequence, part.from + part.tokens.len());
            }
        }
        Ok(true)
    }

    /// Whether drafting the rest of an answer saves more time than reading `behind` tokens costs,
    /// or the trial time covers that cost.
    fn is_worth(
        &mut self,
        wish: &DraftRequest<'_>,
        behind: usize,
        outlook: &GainEstimate<'_>,
    ) -> bool {
        let chances = self.chances(wish);
        if chances.guesses == 0 {
            return false;
        }
        let row = self.row_s.unwrap_or(outlook.pass * FIRST_GUESS);
        let cost = behind as f64 * row;
        let (gain, _) = outlook.best(&[chances]);
        let rest = wish.sequence.tokens_left().min(LOOK_AHEAD) as f64;
        if gain > LEAST_GAIN && cost < outlook.plain * (1.0 - 1.0 / gain) * rest {
            return true;
        }
        let is_tried = cost + outlook.trial() <= self.allowance;
        if is_tried {
            // The rest is charged with the passes that read it.
            self.allowance -= behind.min(CATCH_UP_ROWS) as f64 * row;
        }
        is_tried
    }

    /// The expected gain and the draft length of each sequence; `None` without any.
    fn depths(
        &mut self,
        wishes: &[DraftRequest<'_>],
        outlook: &GainEstimate<'_>,
        least: f64,
    ) -> Option<(f64, Vec<usize>)> {
        let ready = |wish: &DraftRequest<'_>| {
            let chances = self.chances(wish);
            let is_ready = self.behind(wish.sequence) <= FEW;
            DraftCandidate {
                guesses: if is_ready { chances.guesses } else { 0 },
                ..chances
            }
        };
        let each: Vec<DraftCandidate> = wishes.iter().map(ready).collect();
        let (gain, depths) = outlook.best(&each);
        if gain > least {
            return Some((gain, depths));
        }
        let tried = each.iter().position(|of| of.guesses > 0)?;
        // No trials while the n-gram proposer has a gain.
        if least > LEAST_GAIN || outlook.trial() > self.allowance {
            return None;
        }
        self.allowance -= outlook.trial();
        let mut depths = vec![0; wishes.len()];
        depths[tried] = 1;
        Some((gain, depths))
    }

    /// Runs the draft passes, one per draft position.
    fn run_passes(
        &mut self,
        wishes: &[DraftRequest<'_>],
        depths: &[usize],
    ) -> Result<Vec<Vec<u32>>, Error> {
        let mut guesses = vec![Vec::new(); wishes.len()];
        let mut all = self.begin(wishes, depths);
        for depth in 1.. {
            all.retain(|guessing| guessing.depth >= depth);
            if all.is_empty() {
                break;
            }
            let parts = all.iter().map(SequenceDraft::part);
            self.pass(&parts.collect::<Vec<_>>(), Logits::Last)?;
            for (row, guessing) in all.iter_mut().enumerate() {
                for nth in 0..self.network.block().map_or(1, |_| guessing.depth) {
                    let token = self.draw((row, nth), guessing);
                    guesses[guessing.place].push(token);
                    if self.ends.contains(&token) {
                        guessing.depth = 0; // the answer ends here
                        break;
                    }
                }
            }
            if self.network.block().is_some() {
                break; // a pass is the whole draft
            }
        }
        for (wish, guessed) in wishes.iter().zip(&guesses) {
            if !guessed.is_empty() {
                self.keep(wish.sequence, wish.sequence.tokens.len());
                if let Some(held) = self.states.get_mut(&wish.sequence.id) {
                    held.ledger.from = wish.sequence.tokens.len();
                    held.ledger.guessed.clone_from(guessed);
                }
            }
        }
        Ok(guesses)
    }

    /// Extends the draft of one sequence, up to an end-of-generation token.
    fn extend_draft(&mut self, guessing: &mut SequenceDraft) -> Result<(), Error> {
        for _ in 0..guessing.depth {
            self.pass(&[guessing.part()], Logits::Last)?;
            let token = self.draw((0, 0), guessing);
            if self.ends.contains(&token) {
                break; // the answer ends here
            }
        }
        Ok(())
    }

    /// Starts the drafts of the sequences with a draft length and with free pages.
    fn begin(&mut self, wishes: &[DraftRequest<'_>], depths: &[usize]) -> Vec<SequenceDraft> {
        let mut all = Vec::new();
        for (place, (wish, &depth)) in wishes.iter().zip(depths).enumerate() {
            let sequence = wish.sequence;
            // The last draft token is not read; a block begins with the last token.
            let behind = depth.saturating_sub(1);
            let behind = (self.network.block()).map_or(behind, |block| block.positions - 1);
            let positions = sequence.tokens.len() + behind;
            if depth == 0 || !self.grow(sequence.id, positions) {
                continue;
            }
            all.push(SequenceDraft {
                place,
                id: sequence.id,
                depth,
                history: sequence.tokens.clone(),
                prompt_len: sequence.prompt_len(),
                from: sequence.tokens.len() - self.behind(sequence),
                sampler: sequence.sampler().clone(),
                feature: Vec::new(),
            });
        }
        all
    }

    /// Samples a sequence's next draft token, the `nth` of the pass whose part `row` it was, and
    /// appends it to its history. Excludes tokens that one of the vocabularies lacks.
    fn draw(&mut self, (row, nth): (usize, usize), guessing: &mut SequenceDraft) -> u32 {
        let previous = guessing.history.last().copied().unwrap_or_default();
        let place = DraftPlace { nth, previous };
        self.network.write_logits(row, place, &mut self.logits);
        let asked = SamplingInputs {
            history: (&guessing.history[..], guessing.prompt_len),
            mask: None,
            logprobs: None,
        };
        let (sampler, logits) = (&mut guessing.sampler, &mut self.logits);
        let kernels = kernels(&self.network);
        let choice = sampler.choose(kernels, logits, asked, &mut self.scratch);
        guessing.feature = self.network.output(row).to_vec();
        guessing.from = guessing.history.len();
        guessing.history.push(choice.token);
        choice.token
    }

    /// Allocates pages for the first `positions` positions of a sequence; whether they were
    /// available.
    fn grow(&mut self, id: SequenceId, positions: usize) -> bool {
        let held = self.states.get_mut(&id);
        held.is_some_and(|held| {
            let pages = positions.saturating_sub(held.origin).div_ceil(PAGE);
            self.pages.grow(&mut held.pages, pages)
        })
    }

    /// Records that the first `computed` tokens of a sequence are in the draft model's cache.
    fn keep(&mut self, sequence: &Sequence, computed: usize) {
        let Some(held) = self.states.get_mut(&sequence.id) else {
            return;
        };
        held.computed = computed;
        if self.network.is_head() {
            held.features.drop_before(computed - 1);
            return;
        }
        let tokens = &sequence.tokens[..computed];
        self.pages.register(tokens, &mut held.pages);
        let prompt = sequence.prompt_len();
        self.pages
            .release_windows(&mut held.pages, computed, prompt);
    }

    /// Runs a draft pass over tokens of sequences, each from a position on. All parts of a head's
    /// pass have captured rows, or none.
    fn pass<'p>(&mut self, parts: &[PassPart<'p>], logits: Logits) -> Result<(), Error> {
        let (states, is_head) = (&self.states, self.network.is_head());
        let is_captured = parts.iter().all(|part| part.feature.is_empty());
        let of = |part: &PassPart<'p>| {
            let held = &states[&part.id];
            let before = part.from.saturating_sub(1);
            PassRows {
                tokens: part.tokens,
                position: part.from - held.origin,
                pending: held.features.positions().end.saturating_sub(held.origin),
                pages: &held.pages,
                features: match part.feature {
                    [] if is_head => held.features.rows(before..before + part.tokens.len()),
                    own => own,
                },
            }
        };
        let rows: Vec<PassRows<'_>> = parts.iter().map(of).collect();
        let begun = (self.now)();
        self.network.pass(&rows, (logits, is_captured))?;
        let took = (self.now)().saturating_duration_since(begun);
        self.measure(rows.iter().map(|rows| rows.tokens.len()).sum(), took);
        Ok(())
    }

    /// Records the time of a pass.
    fn measure(&mut self, rows: usize, took: Duration) {
        self.passes.record(rows, took);
        self.measured += usize::from(rows <= FEW);
        if rows > FEW && !self.passes.is_fixed() {
            let row = took.as_secs_f64() / rows as f64;
            self.row_s = Some(
                self.row_s
                    .map_or(row, |known| known + ROW_WEIGHT * (row - known)),
            );
        }
    }
}

impl Proposer for DraftProposer {
    /// Proposes if a draft length promises enough, or if a trial is due. Blocks for one draft pass
    /// per token, and one for catching up.
    fn propose(&mut self, step: &mut DraftStep<'_>, least: f64) -> Result<Option<Drafts>, Error> {
        let running = &*step.running;
        let wishes = step
            .parts
            .iter()
            .map(|part| DraftRequest::new(part, running));
        let wishes: Vec<DraftRequest<'_>> = wishes.collect();
        self.settle(&wishes);
        let (bounds, costs) = (step.limits, step.costs);
        let plain = costs.seconds(bounds.decoding).filter(|s| *s > 0.0);
        let Some(plain) = plain else {
            return Ok(None); // a step without drafts is measured first
        };
        let outlook = GainEstimate {
            plain,
            pass: self.pass_s(bounds.decoding, plain),
            is_block: self.network.block().is_some(),
            bounds,
            costs,
            // A head's later windows would have no captured rows.
            pipeline: step.pipeline.filter(|_| !self.network.is_head()),
        };
        let begun = (self.now)();
        let is_behind = self.catch_up(&wishes, &outlook)?;
        let depths = self.depths(&wishes, &outlook, least);
        let drafts = depths.map(|(gain, depths)| {
            let tokens = self.run_passes(&wishes, &depths)?;
            Ok::<_, Error>(Drafts { gain, tokens })
        });
        let drafts = drafts.transpose()?;
        if is_behind || drafts.is_some() {
            self.spent += (self.now)().saturating_duration_since(begun);
        }
        Ok(drafts.filter(|drafts| drafts.tokens.iter().any(|tokens| !tokens.is_empty())))
    }

    /// Blocks for one draft pass per token.
    fn propose_ahead(&mut self, sequence: &Sequence, most: usize) -> Result<Vec<u32>, Error> {
        let (id, tokens, ahead) = (sequence.id, &sequence.tokens, &sequence.ahead);
        let all = &mut self.acceptance;
        let held = self.states.get_mut(&id).filter(|_| !self.network.is_head());
        let Some(held) = held else {
            return Ok(Vec::new());
        };
        held.settle(tokens, ahead, |is_right| {
            *all = updated_acceptance(*all, is_right, ALL_WEIGHT);
        });
        let known = held.computed + held.ledger.guessed.len().saturating_sub(1);
        let is_own = held.ledger.continues(ahead);
        let len = tokens.len() + ahead.len();
        let depth = most.min(self.fits(len, true));
        let is_near = known < len && len - known <= FEW;
        if !is_own || !is_near || depth == 0 || !self.grow(id, len + depth - 1) {
            return Ok(Vec::new());
        }
        let mut sampler = sequence.sampler().clone();
        (0..ahead.len()).for_each(|_| sampler.skip());
        let mut guessing = SequenceDraft {
            place: 0,
            id,
            depth,
            history: [&tokens[..], &ahead[..]].concat(),
            prompt_len: sequence.prompt_len(),
            from: known,
            sampler,
            feature: Vec::new(),
        };
        self.extend_draft(&mut guessing)?;
        let guesses = guessing.history.split_off(len);
        if let Some(held) = self.states.get_mut(&id) {
            held.ledger.guessed.extend_from_slice(&guesses);
            let computed = held.computed;
            self.keep(sequence, computed);
        }
        Ok(guesses)
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(mut held) = self.states.remove(&id) {
            self.pages.release(&mut held.pages);
        }
    }

    fn chance(&self, id: SequenceId, plain: f64) -> ProposerStats {
        let held = self.states.get(&id);
        ProposerStats {
            acceptance: held.map_or(self.acceptance, |held| held.ledger.acceptance),
            pass: self.pass_s(1, plain),
        }
    }

    fn record_step(&mut self, is_plain: bool, duration: Duration) -> Duration {
        let spent = std::mem::take(&mut self.spent);
        if is_plain {
            let own = match self.passes.is_fixed() {
                true => duration,
                false => duration.saturating_sub(spent),
            };
            let seconds = own.as_secs_f64();
            let most = SAVED_STEPS * seconds;
            self.allowance = (self.allowance + TRIAL_SHARE * seconds).min(most);
        }
        spent
    }

    /// A head begins a sequence with the first position whose predecessor was captured. It begins
    /// anew where captured rows are missing: their tokens came from the prefix cache, or were
    /// dropped.
    fn observe(&mut self, sequence: &Sequence, position: usize, captured: &[f32]) {
        let width = self.network.feature_width();
        if width == 0 {
            return;
        }
        let new = || DraftState::new(SequencePages::default(), 0, self.acceptance);
        let held = self.states.entry(sequence.id).or_insert_with(new);
        held.features.add(position, captured, width);
        let first = held.features.positions().start + 1;
        if held.computed < first {
            self.pages.release(&mut held.pages);
            held.pages = SequencePages::default();
            held.ledger.guessed.clear();
            (held.origin, held.computed) = (first, first);
        }
    }
}
