//! Persistent KV cache: pages in a store that outlives the engine.
//!
//! ```text
//! a page is cached --write_kept--> store        at the end of the step
//! a prompt begins with pages that only the store has --recall--> cached pages, before a step
//! ```
//!
//! A prompt computes no rows while the store has its next page, so that nothing is computed twice.
//! Few pages are restored before each step, so that other sequences are not stalled.

use paceline_model::{KEPT_MAX, PageStore, PersistedPage};
use paceline_tensor::PAGE;

use super::Engine;
use crate::Error;

/// Maximum pages restored before a step, over all sequences: 2048 tokens. It is also the distance
/// of retained delta-net states, so that a restore always reaches the next one. For a 0.5B model
/// these are 25 MB, which take some 30 ms from the disk cache, checks included.
const RECALLED_PAGES: usize = 32;

impl Engine {
    /// Persists full pages in `store`, and looks there for pages that the cache lacks. Answers do
    /// not depend on it. Every rank of a split model has its own store.
    #[must_use]
    pub fn with_store(mut self, store: Box<dyn PageStore>) -> Self {
        self.compute.attach(store);
        self
    }

    /// Records the cached pages of a running sequence from index `first` on that the store lacks.
    pub(super) fn note_kept(&mut self, index: usize, first: usize) {
        let sequence = &mut self.running[index];
        let known = sequence.pages.n_known();
        let is_own = sequence.read_by.is_none();
        let Some(store) = self.compute.store().filter(|_| is_own && first < known) else {
            return;
        };
        sequence.name_pages(store, known);
        for at in first..known {
            let parts = self.pages.parts(&sequence.pages, at, sequence.prompt_len());
            let pages = parts.map(|(pool, _)| sequence.kept_page((pool, at)));
            self.to_keep.extend(pages.filter(|page| !store.has(page)));
        }
    }

    /// Whether prompts are computed from their beginning despite cached pages. The store's pages
    /// are then for other nodes, which need the window and state pages of every position. The cache
    /// has these only for the end of a prefix.
    pub(super) fn reads_all(&self) -> bool {
        let wants = self
            .compute
            .store()
            .is_some_and(|store| store.wants_known());
        wants && !self.compute.windows().is_empty()
    }

    /// Records the pages that the last admitted sequence found in the cache, if the store wants
    /// them. They must be written before a batch is planned, which may give a page a new owner.
    pub(super) fn note_known(&mut self) {
        let wants = self
            .compute
            .store()
            .is_some_and(|store| store.wants_known());
        if wants && let Some(last) = self.running.len().checked_sub(1) {
            self.note_kept(last, 0);
        }
    }

    /// Writes the recorded pages to the stores of all ranks, before a page can get a new owner.
    pub(super) fn write_kept(&mut self) -> Result<(), Error> {
        let pages = std::mem::take(&mut self.to_keep);
        for pages in pages.chunks(KEPT_MAX) {
            self.compute.persist_pages(pages)?;
        }
        Ok(())
    }

    /// Restores pages at the beginning of prompts. Sequences with pages left for later steps are
    /// held.
    pub(super) fn recall(&mut self) -> Result<(), Error> {
        if self.compute.store().is_none() {
            return Ok(());
        }
        let mut left = RECALLED_PAGES;
        for index in 0..self.running.len() {
            self.adopt_cached_pages(index);
            let pages = self.recallable(index);
            self.running[index].holds = pages > left;
            if (1..=left).contains(&pages) {
                let before = self.running[index].computed;
                self.recall_pages(index, pages)?;
                left -= pages;
                // Pages that the store fails to read are computed.
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

    /// Next pages of a running sequence that can be restored from the store.
    fn recallable(&mut self, index: usize) -> usize {
        let waits = self.waits(index);
        let sequence = &mut self.running[index];
        let (known, pages) = (sequence.pages.n_known(), &sequence.pages);
        let is_at_page = pages.is_known() && sequence.computed == known * PAGE;
        let whole = (sequence.tokens.len() - 1) / PAGE; // the last token is computed
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

    /// Restores the next `more` pages of a running sequence, or as many as are readable.
    fn recall_pages(&mut self, index: usize, more: usize) -> Result<(), Error> {
        let sequence = &mut self.running[index];
        let known = sequence.pages.n_known();
        let parts = self.pages.missing_parts(&sequence.pages, known + more);
        let parts: Vec<(u32, usize)> = parts.collect();
        if !self.pages.make_room(&mut sequence.pages, known + more) {
            self.rematch_prefix(index);
            return Ok(());
        }
        let pages = parts.iter().map(|part| sequence.kept_page(*part));
        let pages: Vec<PersistedPage> = pages.collect();
        let n = self.compute.restore_pages(&pages)?;
        let whole = match self.compute.windows().is_empty() {
            true => n,
            false if n == pages.len() => more,
            false => 0, // unusable without all parts
        };
        let sequence = &mut self.running[index];
        if whole > 0
            && let Some(name) = self.compute.store().and_then(PageStore::read_by)
        {
            sequence.read_by = Some(name);
            self.pages.stop_sharing(&mut sequence.pages);
        }
        sequence.computed = (known + whole) * PAGE;
        let computed = &sequence.tokens[..sequence.computed];
        self.pages.register(computed, &mut sequence.pages);
        self.count_reused(index, whole * PAGE);
        if whole < more {
            self.rematch_prefix(index);
        }
        Ok(())
    }
}
