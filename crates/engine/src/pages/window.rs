//! Pages of layers that look at some of the positions only: windows, and states of fixed size.
//!
//! Such a page is cached together with the page of all positions of the same tokens. A prefix is
//! reused as far as the pages exist that the next row looks at.
//!
//! Pages of states are large. Of those that a sequence lets go, the last two within the prompt and
//! one in [`WindowPool::every`] stay cached. The others are free at once.

use std::collections::BTreeMap;

use paceline_model::{WindowPages, WindowPool};
use paceline_tensor::PAGE;

/// A page of a window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// Sequences that have it.
    pub(super) users: usize,
    /// The page of all positions that it is known with.
    pub(super) of: Option<u32>,
    /// When it was given back last, where nobody has it.
    since: u64,
    /// Whether it stays when sequences let it go.
    saved: bool,
}

/// The pages of one kind of layers.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pool: WindowPool,
    pub(super) slots: Vec<Slot>,
    /// Of which nothing is known and that nobody has.
    pub(super) free: Vec<u32>,
    /// Known ones that nobody has, by when they were given back.
    pub(super) unused: BTreeMap<u64, u32>,
}

impl Window {
    pub(super) fn new(pool: WindowPool) -> Self {
        let n = u32::try_from(pool.pages).expect("fewer than 2^32 pages");
        Self {
            pool,
            slots: vec![Slot::default(); pool.pages],
            free: (0..n).rev().collect(),
            unused: BTreeMap::new(),
        }
    }

    /// The first page that a row at `position` looks at.
    pub(super) const fn first_page(&self, position: usize) -> usize {
        self.pool.first_page(position)
    }

    /// Pages that nobody has.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Takes a page that nobody has: a free one, else the known one that was unused longest, with
    /// the page that it was known with.
    pub(super) fn take(&mut self) -> (u32, Option<u32>) {
        let unused = || self.unused.pop_first().map(|(_, page)| page);
        let page = self.free.pop().or_else(unused);
        let page = page.expect("as many as are available");
        let slot = &mut self.slots[page as usize];
        (slot.users, slot.saved) = (1, false);
        (page, slot.of.take())
    }

    /// Counts another sequence that has a known page.
    pub(super) fn share(&mut self, page: u32) {
        let slot = &mut self.slots[page as usize];
        if slot.users == 0 {
            self.unused.remove(&slot.since);
        }
        slot.users += 1;
    }

    /// A page of one sequence is known with the page `of` of all positions from now on.
    pub(super) fn learn(&mut self, page: u32, of: u32) {
        self.slots[page as usize].of = Some(of);
    }

    /// Takes back a page of one sequence of which nothing is known.
    pub(super) fn free_own(&mut self, page: u32) {
        self.slots[page as usize].users = 0;
        self.free.push(page);
    }

    /// Whether page `index` of a sequence whose prompt has so many tokens is kept when it is let
    /// go. All pages are kept but those of states. Of states one in `every` is kept, and the last
    /// two within the prompt.
    pub(super) const fn saves(&self, index: usize, prompt: usize) -> bool {
        let full = prompt.saturating_sub(1) / PAGE;
        let at_end = index < full && index + 2 >= full;
        at_end || (index + 1).is_multiple_of(self.pool.every)
    }

    /// A sequence gives a page back that need not stay. Frees it if it was the last one and nobody
    /// saved it before; returns the page that it was known with then.
    pub(super) fn let_go(&mut self, page: u32, now: u64) -> Option<u32> {
        let slot = &mut self.slots[page as usize];
        if slot.saved || slot.users > 1 || slot.of.is_none() {
            self.release(page, now);
            return None;
        }
        slot.users = 0;
        self.free.push(page);
        slot.of.take()
    }

    /// A sequence gives a page back. A known page stays known until it is needed.
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

    /// Frees a known page that nobody has.
    pub(super) fn forget(&mut self, page: u32) {
        let slot = &mut self.slots[page as usize];
        slot.of = None;
        self.unused.remove(&slot.since);
        self.free.push(page);
    }
}

/// A sequence's pages of one window.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// Pages that it has given back.
    first: usize,
    /// The pages behind, in order of position.
    pages: Vec<u32>,
}

impl Held {
    /// None yet, the first to come being the page `first` of the sequence.
    pub(super) fn from(first: usize) -> Self {
        let pages = Vec::new();
        Self { first, pages }
    }

    pub(super) fn push(&mut self, page: u32) {
        self.pages.push(page);
    }

    /// Pages that it needs to have those before page `end` of the sequence.
    pub(super) fn missing(&self, end: usize) -> usize {
        end.saturating_sub(self.first + self.pages.len())
    }

    pub(super) fn pages(&self) -> WindowPages<'_> {
        WindowPages {
            first_page: self.first,
            pages: &self.pages,
        }
    }

    /// Page `index` of the sequence, where it has that still.
    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut u32> {
        self.pages.get_mut(index.checked_sub(self.first)?)
    }

    /// Page `index` of the sequence, where it has that.
    pub(super) fn at(&self, index: usize) -> Option<u32> {
        let page = self.pages.get(index.checked_sub(self.first)?);
        page.copied()
    }

    /// Where it has no page, the next to come is page `first` of the sequence, or one behind.
    pub(super) fn begin_at(&mut self, first: usize) {
        if self.pages.is_empty() {
            self.first = self.first.max(first);
        }
    }

    /// Gives up its first page if that is before page `first` of the sequence; says which it was.
    pub(super) fn leave(&mut self, first: usize) -> Option<(usize, u32)> {
        if self.first >= first || self.pages.is_empty() {
            return None;
        }
        self.first += 1;
        Some((self.first - 1, self.pages.remove(0))) // tens of pages as a rule
    }

    /// Gives up all pages, the first one first.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = u32> {
        std::mem::take(self).pages.into_iter()
    }
}
