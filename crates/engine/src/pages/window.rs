//! Pages of layers with a sliding window, or with a recurrent state of fixed size.
//!
//! Such a page is cached together with the full-attention page of the same tokens. A prefix is
//! reused up to the pages that the next row reads.
//!
//! Pages of states are large. When a sequence releases them, the last two within the prompt and one
//! in [`WindowPool::every`] stay cached. The others are freed at once.

use std::collections::BTreeMap;

use paceline_model::{WindowPages, WindowPool};
use paceline_tensor::PAGE;

/// A page of a window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WindowSlot {
    /// Sequences that have it.
    pub(super) users: usize,
    /// The full-attention page that it is cached with.
    pub(super) of: Option<u32>,
    /// Time of its release, if no sequence has it.
    since: u64,
    /// Whether it stays cached when released.
    saved: bool,
}

/// The pages of one kind of layers.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pool: WindowPool,
    pub(super) slots: Vec<WindowSlot>,
    /// Without owner and contents.
    pub(super) free: Vec<u32>,
    /// Cached ones without owner, by time of release.
    pub(super) unused: BTreeMap<u64, u32>,
}

impl Window {
    pub(super) fn new(pool: WindowPool) -> Self {
        let n = u32::try_from(pool.pages).expect("fewer than 2^32 pages");
        Self {
            pool,
            slots: vec![WindowSlot::default(); pool.pages],
            free: (0..n).rev().collect(),
            unused: BTreeMap::new(),
        }
    }

    /// First page that a row at `position` reads.
    pub(super) const fn first_page(&self, position: usize) -> usize {
        self.pool.first_page(position)
    }

    /// Pages without owner.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Allocates a page: a free one, else the least recently used cached one. Also returns the
    /// full-attention page that the latter was cached with.
    pub(super) fn take(&mut self) -> (u32, Option<u32>) {
        let unused = || self.unused.pop_first().map(|(_, page)| page);
        let page = self.free.pop().or_else(unused);
        let page = page.expect("as many as are available");
        let slot = &mut self.slots[page as usize];
        (slot.users, slot.saved) = (1, false);
        (page, slot.of.take())
    }

    /// Adds a user to a cached page.
    pub(super) fn share(&mut self, page: u32) {
        let slot = &mut self.slots[page as usize];
        if slot.users == 0 {
            self.unused.remove(&slot.since);
        }
        slot.users += 1;
    }

    /// Caches a sequence's page with the full-attention page `of`.
    pub(super) fn learn(&mut self, page: u32, of: u32) {
        self.slots[page as usize].of = Some(of);
    }

    /// Frees an uncached page of one sequence.
    pub(super) fn free_own(&mut self, page: u32) {
        self.slots[page as usize].users = 0;
        self.free.push(page);
    }

    /// Whether page `index` of a sequence stays cached when released; its prompt has `prompt`
    /// tokens. Window pages always stay. Of states, one in `every` and the last two within the
    /// prompt stay.
    pub(super) const fn saves(&self, index: usize, prompt: usize) -> bool {
        let full = prompt.saturating_sub(1) / PAGE;
        let at_end = index < full && index + 2 >= full;
        at_end || (index + 1).is_multiple_of(self.pool.every)
    }

    /// Releases a page that need not stay cached. Frees it if this was the last user and no
    /// sequence saved it; returns the page that it was cached with then.
    pub(super) fn release_unsaved(&mut self, page: u32, now: u64) -> Option<u32> {
        let slot = &mut self.slots[page as usize];
        if slot.saved || slot.users > 1 || slot.of.is_none() {
            self.release(page, now);
            return None;
        }
        slot.users = 0;
        self.free.push(page);
        slot.of.take()
    }

    /// Releases a page. A cached page stays cached until evicted.
    pub(super) fn release(&mut self, page: u32, now: u64) {
        let slot = &mut self.slots[page as usize];
        slot.users -= 1;
        match slot.of {
            None => self.free.push(page),
            Some(_) if slot.users == 0 => {
                slot.saved = true;
                slot.since = now;
                self.unused.insert(now, page);
            }
            Some(_) => {}
        }
    }

    /// Frees a cached page without owner.
    pub(super) fn forget(&mut self, page: u32) {
        let slot = &mut self.slots[page as usize];
        slot.of = None;
        self.unused.remove(&slot.since);
        self.free.push(page);
    }
}

/// A sequence's pages of one window.
#[derive(Clone, Debug, Default)]
pub(super) struct SequenceWindow {
    /// Released pages.
    first: usize,
    /// Remaining pages, in order of position.
    pages: Vec<u32>,
}

impl SequenceWindow {
    /// Empty; the next page is number `first` of the sequence.
    pub(super) fn from(first: usize) -> Self {
        let pages = Vec::new();
        Self { first, pages }
    }

    pub(super) fn push(&mut self, page: u32) {
        self.pages.push(page);
    }

    /// Additional pages it needs to have those before page `end`.
    pub(super) fn missing(&self, end: usize) -> usize {
        end.saturating_sub(self.first + self.pages.len())
    }

    pub(super) fn pages(&self) -> WindowPages<'_> {
        WindowPages {
            first_page: self.first,
            pages: &self.pages,
        }
    }

    /// Page `index` of the sequence, if not released.
    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut u32> {
        self.pages.get_mut(index.checked_sub(self.first)?)
    }

    /// Page `index` of the sequence, if present.
    pub(super) fn at(&self, index: usize) -> Option<u32> {
        let page = self.pages.get(index.checked_sub(self.first)?);
        page.copied()
    }

    /// If empty, sets its next page to number `first` or a later one.
    pub(super) fn begin_at(&mut self, first: usize) {
        if self.pages.is_empty() {
            self.first = self.first.max(first);
        }
    }

    /// Removes and returns its first page if that is before page `first`.
    pub(super) fn leave(&mut self, first: usize) -> Option<(usize, u32)> {
        if self.first >= first || self.pages.is_empty() {
            return None;
        }
        self.first += 1;
        Some((self.first - 1, self.pages.remove(0))) // typically tens of pages
    }

    /// Removes all pages, in order.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = u32> {
        std::mem::take(self).pages.into_iter()
    }
}
