//! Prefix cache: page ownership of sequences, and the contents of pages without an owner.
//!
//! A full page holds keys and values of 64 tokens. By the numerics rule these are determined to the
//! bit by the tokens, the tokens before them and the sequence's adapter. So a page is *cached*
//! under its 64 tokens and the cached page before it. Any sequence with the same prefix and adapter
//! shares it instead of computing it. Examples are the next turn of a chat, a common system prompt,
//! and a preempted sequence.
//!
//! ```text
//! free --grow--> owned by one --learn--> cached, shared --release--> cached, unused
//!  ^                  |                       ^                            |
//!  +-----release------+                       +-----------reuse------------+
//!  +--------- evicted: the cheapest to compute, least recently used -------+
//! ```
//!
//! Layers with a sliding window or a recurrent state have separate pages for the same positions
//! ([`Window`]). A sequence releases them when no row reads them any more. Window pages of cached
//! pages remain until they are evicted. A prefix can be reused up to a position whose next row
//! finds all its window pages.
//!
//! Cached pages are compared by their tokens, not only by a hash: no prompt can be crafted to find
//! another one's keys. Only full pages are shared, so no shared page is written. Answers are the
//! same to the bit. Only the prefill time reveals that another request had the same prefix.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use paceline_model::{WindowPages, WindowPool};
use paceline_tensor::PAGE;

mod persistence;
mod window;

use window::{SequenceWindow, Window};

/// Roots of sequences that share no pages are above this. The clock, which numbers cached pages,
/// stays below, and the roots of 2^32 adapters are at the end.
const FIRST_PRIVATE: u64 = 1 << 63;

/// Key of a cached page: the page before it, or the root of its sequence, and its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PageKey {
    before: u64,
    tokens: [u32; PAGE],
}

impl PageKey {
    /// Key of the first page of `tokens`, `None` if they do not fill it.
    fn new(before: u64, tokens: &[u32]) -> Option<Self> {
        let tokens = *tokens.first_chunk()?;
        Some(Self { before, tokens })
    }
}

#[derive(Clone, Debug)]
struct CachedContents {
    /// Unique, so that nothing follows an evicted page.
    number: u64,
    key: Arc<PageKey>,
    /// Time of its release, if no sequence has it.
    since: u64,
    /// Nanoseconds to compute it again, as measured when it was computed.
    cost: u64,
    /// Eviction order of unused pages, the lowest first.
    rank: u64,
    /// Highest rank of a page after it: those are evicted first.
    least_rank: u64,
    /// The page of each window for the same positions, if still cached. A sequence that has one of
    /// these has this page.
    windows: Vec<Option<u32>>,
}

#[derive(Clone, Debug, Default)]
struct PageSlot {
    /// Sequences that have it; more than one only if cached.
    users: usize,
    known: Option<CachedContents>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct SequencePages {
    /// In order of position.
    pages: Vec<u32>,
    /// Cached pages among them, from the first; the others have a single user.
    n_known: usize,
    /// Number of the last cached page, or the root.
    last_known: u64,
    /// Root of its first page. Sequences with different roots share no pages.
    root: u64,
    windows: Vec<SequenceWindow>,
}

impl SequencePages {
    /// Without pages, for a sequence with adapter `place`, counted from 1; 0 for none.
    pub(crate) fn of_adapter(place: u32) -> Self {
        // Cached pages are numbered from 1 and never reach these numbers.
        Self::rooted(match place {
            0 => 0,
            place => u64::MAX - u64::from(place),
        })
    }

    fn rooted(root: u64) -> Self {
        Self {
            root,
            last_known: root,
            ..Self::default()
        }
    }

    pub(crate) fn windows(&self) -> impl Iterator<Item = WindowPages<'_>> {
        self.windows.iter().map(SequenceWindow::pages)
    }

    pub(crate) fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Has its further pages cached for itself alone; `number` is of no cached page and no root.
    const fn set_private(&mut self, number: u64) {
        self.last_known = number;
        if self.n_known == 0 {
            self.root = number;
        }
    }

    /// Whether all its pages are cached.
    pub(crate) const fn is_known(&self) -> bool {
        self.n_known == self.pages.len()
    }

    pub(crate) const fn len(&self) -> usize {
        self.pages.len()
    }

    /// Number of cached pages, from the first.
    pub(crate) const fn n_known(&self) -> usize {
        self.n_known
    }
}

/// Tokens of the next page. They must fill the page without the last of `tokens`, whose logits must
/// be computed.
fn next_page<'a>(tokens: &'a [u32], owned: &SequencePages) -> Option<&'a [u32]> {
    let begin = owned.n_known * PAGE;
    let page = tokens.get(begin..begin + PAGE)?;
    (begin + PAGE < tokens.len()).then_some(page)
}

/// Whether `older`, a sequence of `tokens`, will compute the next page of the sequence `own`. This
/// holds for equal pages so far, and equal tokens in the next page. All pages of `owned` are
/// cached.
pub(crate) fn follows(
    (own, owned): (&[u32], &SequencePages),
    (tokens, older): (&[u32], &SequencePages),
) -> bool {
    let n = owned.n_known;
    let begins_alike = match n {
        0 => older.root == owned.root,
        n => older.pages.get(n - 1) == owned.pages.last(),
    };
    let page = next_page(own, owned);
    let is_to_come = older.n_known == n;
    is_to_come && begins_alike && page.is_some() && tokens.get(n * PAGE..(n + 1) * PAGE) == page
}

/// All pages of a cache, with some 300 bytes per cached page.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    /// By number.
    pages: Vec<PageSlot>,
    /// Pages without owner and contents.
    free: Vec<u32>,
    /// Cached pages without owner, by rank and time of release. A page is released before its
    /// predecessor and has no higher rank, so no page remains that cannot be found.
    unused: BTreeMap<(u64, u64), u32>,
    /// Rank of the last evicted page: a page released now ranks above it by its cost. Among equal
    /// costs the least recently used page goes first (Cao and Irani, GreedyDual, USITS 1997).
    level: u64,
    /// Current cost of a page in nanoseconds.
    cost: u64,
    /// Not iterated: its order is arbitrary.
    known: HashMap<Arc<PageKey>, u32>,
    /// Counts cached and released pages.
    clock: u64,
    windows: Vec<Window>,
}

impl Pages {
    /// All of `pages` pages free, and those of `windows`; low numbers are allocated first.
    pub(crate) fn new(pages: usize, windows: &[WindowPool]) -> Self {
        let n = u32::try_from(pages).expect("fewer than 2^32 pages");
        Self {
            pages: vec![PageSlot::default(); pages],
            free: (0..n).rev().collect(),
            unused: BTreeMap::new(),
            level: 0,
            cost: 0,
            known: HashMap::new(),
            clock: 0,
            windows: windows.iter().map(|pool| Window::new(*pool)).collect(),
        }
    }

    /// Sets the current time to compute a page, for the eviction order.
    pub(crate) const fn set_cost(&mut self, nanos: u64) {
        self.cost = nanos;
    }

    /// Shares no further pages of `owned` with other sequences.
    pub(crate) const fn stop_sharing(&mut self, owned: &mut SequencePages) {
        self.clock += 1;
        owned.set_private(FIRST_PRIVATE + self.clock);
    }

    /// Pages without owner.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Grows `owned` to `pages` pages, window pages included; `false`, with nothing allocated, if
    /// there are not enough. Evicts the unused page of the lowest rank if none is free.
    pub(crate) fn grow(&mut self, owned: &mut SequencePages, pages: usize) -> bool {
        let more = pages.saturating_sub(owned.len());
        owned
            .windows
            .resize_with(self.windows.len(), SequenceWindow::default);
        let windows = || self.windows.iter().zip(&owned.windows);
        let fits =
            |(window, held): (&Window, &SequenceWindow)| held.missing(pages) <= window.available();
        if more > self.available() || !windows().all(fits) {
            return false;
        }
        self.grow_windows(owned, pages);
        for _ in 0..more {
            let page = self.free.pop().or_else(|| self.evict());
            let page = page.expect("as many as are available");
            self.pages[page as usize].users = 1;
            owned.pages.push(page);
        }
        true
    }

    /// Allocates window pages; enough must be available.
    fn grow_windows(&mut self, owned: &mut SequencePages, pages: usize) {
        let windows = self.windows.iter_mut().zip(&mut owned.windows);
        for (i, (window, held)) in windows.enumerate() {
            for _ in 0..held.missing(pages) {
                let (page, forgotten) = window.take();
                held.push(page);
                let known = forgotten.and_then(|of| self.pages[of as usize].known.as_mut());
                known.into_iter().for_each(|known| known.windows[i] = None);
            }
        }
    }

    /// Evicts the unused page of the lowest rank, with its window pages, which have no owner
    /// either.
    fn evict(&mut self) -> Option<u32> {
        let ((rank, _), page) = self.unused.pop_first()?;
        self.level = self.level.max(rank);
        let known = self.pages[page as usize].known.take()?;
        self.known.remove(&known.key);
        for (window, page) in self.windows.iter_mut().zip(&known.windows) {
            page.iter().for_each(|page| window.forget(*page));
        }
        Some(page)
    }

    /// Releases window pages that no row from `position` on reads. All of them are cached. Most
    /// states are dropped: one in [`WindowPool::every`] stays, and those near the end of the
    /// `prompt` tokens that the sequence began with. The next turn of a chat shares its prompt with
    /// this one, except for some tokens.
    pub(crate) fn release_windows(
        &mut self,
        owned: &mut SequencePages,
        position: usize,
        prompt: usize,
    ) {
        let windows = self.windows.iter_mut().zip(&mut owned.windows);
        for (i, (window, held)) in windows.enumerate() {
            let first = window.first_page(position);
            while let Some((index, page)) = held.leave(first) {
                self.clock += 1;
                if window.saves(index, prompt) {
                    window.release(page, self.clock);
                } else if let Some(of) = window.release_unsaved(page, self.clock) {
                    let known = self.pages[of as usize].known.as_mut();
                    known.into_iter().for_each(|known| known.windows[i] = None);
                }
            }
        }
    }

    /// Releases all pages. Cached pages stay cached until evicted.
    pub(crate) fn release(&mut self, owned: &mut SequencePages) {
        for (window, held) in self.windows.iter_mut().zip(&mut owned.windows) {
            for page in held.drain() {
                self.clock += 1;
                window.release(page, self.clock);
            }
        }
        let mut behind = 0; // rank of the next page
        for number in owned.pages.drain(..).rev() {
            let page = &mut self.pages[number as usize];
            page.users -= 1;
            let Some(known) = &mut page.known else {
                self.free.push(number);
                continue;
            };
            known.least_rank = known.least_rank.max(behind);
            if page.users == 0 {
                self.clock += 1;
                known.since = self.clock;
                known.rank = known.least_rank.max(self.level.saturating_add(known.cost));
                self.unused.insert((known.rank, known.since), number);
                behind = known.rank;
            }
        }
        *owned = SequencePages::rooted(owned.root);
    }

    /// Gives `owned`, which has no page, the longest cached prefix of `tokens`. Returns its tokens,
    /// fewer than all: the logits of the last one must be computed.
    ///
    /// Cost: a hash of 64 tokens per matched page, and one more. With windows, also a check of each
    /// window per page that cannot be the last.
    pub(crate) fn reuse(&mut self, tokens: &[u32], owned: &mut SequencePages) -> usize {
        let (_, before_last) = tokens.split_last().expect("a sequence has tokens");
        let mut found = Vec::new();
        let mut before = owned.root;
        for tokens in before_last.chunks(PAGE) {
            let key = PageKey::new(before, tokens);
            let Some(&page) = key.and_then(|key| self.known.get(&key)) else {
                break;
            };
            found.push(page);
            before = self.known(page).number;
        }
        while !self.can_end(&found) {
            found.pop();
        }
        for (page, index) in found.iter().zip(0..) {
            owned.last_known = self.take_known(*page);
            owned.pages.push(*page);
            owned.n_known = index + 1;
        }
        self.take_windows(&found, owned);
        owned.n_known * PAGE
    }

    /// Whether the next page of the sequence is cached and reusable. All pages of `owned` are
    /// cached.
    pub(crate) fn is_next_known(&self, tokens: &[u32], owned: &SequencePages) -> bool {
        let page = next_page(tokens, owned);
        let key = page.and_then(|page| PageKey::new(owned.last_known, page));
        key.is_some_and(|key| self.known.contains_key(&key))
    }

    fn known(&self, page: u32) -> &CachedContents {
        let known = self.pages[page as usize].known.as_ref();
        known.expect("found among the known")
    }

    /// Whether the row after `found` finds all its window pages.
    fn can_end(&self, found: &[u32]) -> bool {
        self.windows.iter().enumerate().all(|(i, window)| {
            let seen = &found[window.first_page(found.len() * PAGE)..];
            seen.iter()
                .all(|page| self.known(*page).windows[i].is_some())
        })
    }

    /// Gives `owned` the window pages that the row after `found` reads.
    fn take_windows(&mut self, found: &[u32], owned: &mut SequencePages) {
        owned.windows.clear();
        for i in 0..self.windows.len() {
            let first = self.windows[i].first_page(found.len() * PAGE);
            let mut held = SequenceWindow::from(first);
            for page in &found[first..] {
                let page = self.known(*page).windows[i].expect("it can end here");
                self.windows[i].share(page);
                held.push(page);
            }
            owned.windows.push(held);
        }
    }

    /// Adds a user to a cached page; returns the page's unique number.
    fn take_known(&mut self, page: u32) -> u64 {
        let page = &mut self.pages[page as usize];
        let known = page.known.as_ref().expect("found among the known");
        if page.users == 0 {
            self.unused.remove(&(known.rank, known.since));
        }
        page.users += 1;
        known.number
    }

    /// Caches the full pages of a sequence; `computed` are its tokens with keys and values. A page
    /// that another sequence has already cached is replaced by that one.
    pub(crate) fn register(&mut self, computed: &[u32], owned: &mut SequencePages) {
        while let Some(key) = PageKey::new(owned.last_known, &computed[owned.n_known * PAGE..]) {
            let own = owned.pages[owned.n_known];
            owned.last_known = match self.known.get(&key) {
                Some(&page) => {
                    owned.pages[owned.n_known] = page;
                    self.pages[own as usize].users = 0;
                    self.free.push(own);
                    self.take_known(page)
                }
                None => self.add_known(own, key),
            };
            self.learn_windows(owned);
            owned.n_known += 1;
        }
    }

    /// Caches the window pages of the page that was just cached: those of the other sequence if
    /// present, else its own.
    fn learn_windows(&mut self, owned: &mut SequencePages) {
        let (index, page) = (owned.n_known, owned.pages[owned.n_known]);
        let known = self.pages[page as usize].known.as_mut();
        let known = known.expect("it was just learned");
        let windows = self.windows.iter_mut().zip(&mut owned.windows);
        for ((window, held), known) in windows.zip(&mut known.windows) {
            let Some(own) = held.get_mut(index) else {
                continue;
            };
            match *known {
                Some(theirs) => {
                    window.free_own(*own);
                    window.share(theirs);
                    *own = theirs;
                }
                None => {
                    window.learn(*own, page);
                    *known = Some(*own);
                }
            }
        }
    }

    fn add_known(&mut self, page: u32, key: PageKey) -> u64 {
        self.clock += 1;
        let (number, key) = (self.clock, Arc::new(key));
        self.known.insert(Arc::clone(&key), page);
        self.pages[page as usize].known = Some(CachedContents {
            number,
            key,
            since: 0,
            cost: self.cost,
            rank: 0,
            least_rank: 0,
            windows: vec![None; self.windows.len()],
        });
        number
    }
}

#[cfg(test)]
pub(crate) mod tests;
