//! Pages that are kept outside of the cache, in a store that outlives the engine.
//!
//! ```text
//! a page becomes known --write_kept--> store        at the end of the step
//! a prompt begins with pages that only the store has --recall--> known pages, before a step
//! ```
//!
//! A prompt computes no rows while the store has its next page, so that nothing is computed twice.
//! Few pages are recalled before each step: other sequences go on meanwhile.

use paceline_model::{KEPT_MAX, KeptPage, PageStore};
use paceline_tensor::PAGE;

use super::Engine;
use crate::Error;

/// Most pages that are recalled before a step, of all sequences: 2048 tokens. It is also how far
/// apart states of delta nets are kept, so that a recall always reaches the next one. Of a 0.5B
/// model these are 25 MB, which take some 30 ms from a disk's cache and to be checked.
const RECALLED_PAGES: usize = 32;

impl Engine {
    /// Keeps pages in `store` when they are full, and looks there for pages that the cache lacks.
    /// Answers do not depend on it. Every rank of a split model gets a store of its own.
    #[must_use]
    pub fn with_store(mut self, store: Box<dyn PageStore>) -> Self {
        self.compute.attach(store);
        self
    }

    /// Notes the pages of a running sequence from place `first` on that are known now and not in
    /// the store.
    pub(super) fn note_kept(&mut self, index: usize, first: usize) {
        let sequence = &mut self.running[index];
        let known = sequence.pages.n_known();
        let Some(store) = self.compute.store().filter(|_| first < known) else {
            return;
        };
        sequence.name_pages(store, known);
        for at in first..known {
            let parts = self.pages.parts(&sequence.pages, at, sequence.prompt_len());
            let pages = parts.map(|(pool, _)| sequence.kept_page((pool, at)));
            self.to_keep.extend(pages.filter(|page| !store.has(page)));
        }
    }

    /// Whether prompts are computed from their beginning, whatever the cache has. The store's pages
    /// are then for other nodes, which need those of windows and states on the way too. Of a prefix
    /// the cache has only the last of these.
    pub(super) fn reads_all(&self) -> bool {
        let wants = self
            .compute
            .store()
            .is_some_and(|store| store.wants_known());
        wants && !self.compute.windows().is_empty()
    }

    /// Notes the pages that the sequence admitted last found in the cache, where the store wants
    /// them. To be written before a batch is planned, which may give a page another owner.
    pub(super) fn note_known(&mut self) {
        let wants = self
            .compute
            .store()
            .is_some_and(|store| store.wants_known());
        if wants && let Some(last) = self.running.len().checked_sub(1) {
            self.note_kept(last, 0);
        }
    }

    /// Puts what was noted into the stores of all ranks, before a page can have another owner.
    pub(super) fn write_kept(&mut self) -> Result<(), Error> {
        let pages = std::mem::take(&mut self.to_keep);
        for pages in pages.chunks(KEPT_MAX) {
            self.compute.keep(pages)?;
        }
        Ok(())
    }

    /// Brings pages back that prompts begin with. Sequences that must wait for the next step hold.
    pub(super) fn recall(&mut self) -> Result<(), Error> {
        if self.compute.store().is_none() {
            return Ok(());
        }
        let mut left = RECALLED_PAGES;
        for index in 0..self.running.len() {
            self.catch_up(index);
            let pages = self.recallable(index);
            self.running[index].holds = pages > left;
            if (1..=left).contains(&pages) {
                let before = self.running[index].computed;
                self.recall_pages(index, pages)?;
                left -= pages;
                // What a store cannot give after all is computed.
                let went_on = self.running[index].computed > before;
                self.running[index].holds = went_on && self.recallable(index) > 0;
            }
        }
        Ok(())
    }

    /// Whether a prompt begins with pages that only the store has.
    pub(super) fn wants_recall(&mut self) -> bool {
        let has_store = self.compute.store().is_some();
        has_store && (0..self.running.len()).any(|index| self.recallable(index) > 0)
    }

    /// How many of the next pages of a running sequence the store has, so that it can go on behind
    /// them.
    fn recallable(&mut self, index: usize) -> usize {
        let waits = self.waits(index);
        let sequence = &mut self.running[index];
        let (known, pages) = (sequence.pages.n_known(), &sequence.pages);
        let is_at_page = pages.is_known() && sequence.computed == known * PAGE;
        let whole = (sequence.tokens.len() - 1) / PAGE; // the last token is to be computed
        let end = whole.min(known + RECALLED_PAGES);
        let Some(store) = self.compute.store().filter(|_| known < end) else {
            return 0;
        };
        if waits || !is_at_page || sequence.is_scoring() {
            return 0;
        }
        sequence.name_pages(store, end);
        let sequence = &self.running[index];
        let has = |part: (u32, usize)| store.has(&sequence.kept_page(part));
        let run = (known..end).take_while(|at| has((0, *at))).count();
        let reaches = |n: &usize| {
            let mut parts = self.pages.missing_parts(&sequence.pages, known + n);
            parts.all(has)
        };
        (1..=run).rev().find(reaches).unwrap_or(0)
    }

    /// Recalls the next `more` pages of a running sequence, or as many as can be had.
    fn recall_pages(&mut self, index: usize, more: usize) -> Result<(), Error> {
        let sequence = &mut self.running[index];
        let known = sequence.pages.n_known();
        let parts = self.pages.missing_parts(&sequence.pages, known + more);
        let parts: Vec<(u32, usize)> = parts.collect();
        if !self.pages.make_room(&mut sequence.pages, known + more) {
            self.find_again(index);
            return Ok(());
        }
        let pages = parts.iter().map(|part| sequence.kept_page(*part));
        let pages: Vec<KeptPage> = pages.collect();
        let n = self.compute.recall(&pages)?;
        let whole = match self.compute.windows().is_empty() {
            true => n,
            false if n == pages.len() => more,
            false => 0, // without all parts it cannot go on
        };
        let sequence = &mut self.running[index];
        sequence.computed = (known + whole) * PAGE;
        let computed = &sequence.tokens[..sequence.computed];
        self.pages.learn(computed, &mut sequence.pages);
        self.count_reused(index, whole * PAGE);
        if whole < more {
            self.find_again(index);
        }
        Ok(())
    }
}
