//! The pages of the cache: which sequence has which, and the contents of pages that none has.
//!
//! A full page holds keys and values of 64 tokens. By the numerics rule these follow to the bit
//! from the tokens, from those before them and from the sequence's adapter. So a page is *known* by
//! the 64 tokens in it and the known page before it. Any sequence that starts with the same tokens
//! and has the same adapter can have it instead of computing it. Examples are the next turn of a
//! chat, a system prompt that all share, and a sequence that gave up its pages.
//!
//! ```text
//! free --grow--> had by one --learn--> known, had by any number --release--> known, unused
//!  ^                 |                              ^                              |
//!  +-----release-----+                              +------------reuse-------------+
//!  +------------ needed: the cheapest to compute of those unused longest ----------+
//! ```
//!
//! Layers that look at a window only, or keep a state, have pages of their own for the same
//! positions ([`Window`]). A sequence gives them back when no row looks at them any more. Pages of
//! windows of known pages stay until they are needed. So a beginning can be reused as far as there
//! are the pages that the row behind it looks at.
//!
//! Known pages are compared by their tokens, not by a hash alone: nobody can make a prompt that
//! finds another one's keys. Only whole pages that are full are shared, so nobody writes to one.
//! Answers are the same to the bit; only who measures how soon a prompt is read can tell that
//! somebody's began alike.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use paceline_model::{WindowPages, WindowPool};
use paceline_tensor::PAGE;

mod kept;
mod window;

use window::{Held, Window};

/// The key of a known page: the page before it, or the root of its sequence, and its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    before: u64,
    tokens: [u32; PAGE],
}

impl Key {
    /// Of the first page of `tokens`, `None` when they do not fill it.
    fn new(before: u64, tokens: &[u32]) -> Option<Self> {
        let tokens = *tokens.first_chunk()?;
        Some(Self { before, tokens })
    }
}

/// The contents of a page.
#[derive(Clone, Debug)]
struct Known {
    /// Never used twice, so that nothing follows a page that is forgotten.
    number: u64,
    key: Arc<Key>,
    /// When it was given back last, where nobody has it.
    since: u64,
    /// Nanoseconds to compute it again, as measured when it was computed.
    cost: u64,
    /// The order in which unused pages are forgotten, the lowest first.
    rank: u64,
    /// The highest rank of a page behind it: it is forgotten after all of those.
    least_rank: u64,
    /// The page of each window with the same positions, where it is still there. A sequence that
    /// has one of these has this page.
    windows: Vec<Option<u32>>,
}

/// A page of the cache.
#[derive(Clone, Debug, Default)]
struct Page {
    /// Sequences that have it; more than one only when it is known.
    users: usize,
    known: Option<Known>,
}

/// The pages of a sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owned {
    /// In order of position.
    pages: Vec<u32>,
    /// How many of them, from the first, are known; the rest has no other user.
    n_known: usize,
    /// Number of the last known one; the root before there is one.
    last_known: u64,
    /// The root that its first page follows. Sequences of another root share nothing with it.
    root: u64,
    /// Pages of each window.
    windows: Vec<Held>,
}

impl Owned {
    /// Without pages, for a sequence whose keys depend on adapter `place`, counted from 1; 0 for
    /// none.
    pub(crate) fn of_adapter(place: u32) -> Self {
        // Known pages are numbered from 1 on, and never so many.
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
        self.windows.iter().map(Held::pages)
    }

    pub(crate) fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Whether it ends with known pages: nothing of its own is in them.
    pub(crate) const fn is_known(&self) -> bool {
        self.n_known == self.pages.len()
    }

    pub(crate) const fn len(&self) -> usize {
        self.pages.len()
    }

    /// How many of them, from the first, are known.
    pub(crate) const fn n_known(&self) -> usize {
        self.n_known
    }
}

/// The tokens of the page behind those that `owned` has. They must fill the page and not be the
/// last of `tokens`: the logits after the last one are to be computed.
fn next_page<'a>(tokens: &'a [u32], owned: &Owned) -> Option<&'a [u32]> {
    let begin = owned.n_known * PAGE;
    let page = tokens.get(begin..begin + PAGE)?;
    (begin + PAGE < tokens.len()).then_some(page)
}

/// Whether `older`, a sequence of `tokens`, is on its way to the page that the sequence of `own`
/// needs next. Both have the same pages so far, and the tokens of the next page are the same.
/// `owned` has known pages only.
pub(crate) fn follows((own, owned): (&[u32], &Owned), (tokens, older): (&[u32], &Owned)) -> bool {
    let n = owned.n_known;
    let begins_alike = match n {
        0 => older.root == owned.root,
        n => older.pages.get(n - 1) == owned.pages.last(),
    };
    let page = next_page(own, owned);
    let is_to_come = older.n_known == n;
    is_to_come && begins_alike && page.is_some() && tokens.get(n * PAGE..(n + 1) * PAGE) == page
}

/// All pages of a cache. Beside the cache it takes some 300 bytes per known page.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    /// By number.
    pages: Vec<Page>,
    /// Pages of which nothing is known and that nobody has.
    free: Vec<u32>,
    /// Known pages that nobody has, by rank and by when they were given back. A page is always
    /// given back before the one that it follows, and has no higher rank, so none stays behind that
    /// cannot be found.
    unused: BTreeMap<(u64, u64), u32>,
    /// Rank of the page that was forgotten last: a page that is given back now ranks above it by
    /// its cost. Of pages that cost the same the one unused longest goes first (Cao and Irani,
    /// GreedyDual, USITS 1997).
    level: u64,
    /// Nanoseconds that a page costs now.
    cost: u64,
    /// Not iterated: its order is arbitrary.
    known: HashMap<Arc<Key>, u32>,
    /// Counts pages that became known, and those given back.
    clock: u64,
    windows: Vec<Window>,
}

impl Pages {
    /// All of `pages` pages free, and those of `windows`; low numbers are given out first.
    pub(crate) fn new(pages: usize, windows: &[WindowPool]) -> Self {
        let n = u32::try_from(pages).expect("fewer than 2^32 pages");
        Self {
            pages: vec![Page::default(); pages],
            free: (0..n).rev().collect(),
            unused: BTreeMap::new(),
            level: 0,
            cost: 0,
            known: HashMap::new(),
            clock: 0,
            windows: windows.iter().map(|pool| Window::new(*pool)).collect(),
        }
    }

    /// Says how long a page takes to compute now, by which unused pages are kept.
    pub(crate) const fn set_cost(&mut self, nanos: u64) {
        self.cost = nanos;
    }

    /// Pages that nobody has.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Grows `owned` to `pages` pages, of the windows too; `false`, with nothing taken, when there
    /// are not enough. The unused page that ranks lowest is forgotten for it when no page is free.
    pub(crate) fn grow(&mut self, owned: &mut Owned, pages: usize) -> bool {
        let more = pages.saturating_sub(owned.len());
        owned.windows.resize_with(self.windows.len(), Held::default);
        let windows = || self.windows.iter().zip(&owned.windows);
        let fits = |(window, held): (&Window, &Held)| held.missing(pages) <= window.available();
        if more > self.available() || !windows().all(fits) {
            return false;
        }
        self.grow_windows(owned, pages);
        for _ in 0..more {
            let page = self.free.pop().or_else(|| self.forget());
            let page = page.expect("as many as are available");
            self.pages[page as usize].users = 1;
            owned.pages.push(page);
        }
        true
    }

    /// As many as are available.
    fn grow_windows(&mut self, owned: &mut Owned, pages: usize) {
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

    /// Takes the unused page that ranks lowest. Nobody has those of its windows.
    fn forget(&mut self) -> Option<u32> {
        let ((rank, _), page) = self.unused.pop_first()?;
        self.level = self.level.max(rank);
        let known = self.pages[page as usize].known.take()?;
        self.known.remove(&known.key);
        for (window, page) in self.windows.iter_mut().zip(&known.windows) {
            page.iter().for_each(|page| window.forget(*page));
        }
        Some(page)
    }

    /// Takes the pages of windows back that no row from `position` on looks at. All of them are
    /// known. Most states go for good: one in so many stays, and those near the end of the `prompt`
    /// tokens that the sequence began with. The next turn of a chat begins like this one as far as
    /// its prompt went, some tokens less.
    pub(crate) fn leave(&mut self, owned: &mut Owned, position: usize, prompt: usize) {
        let windows = self.windows.iter_mut().zip(&mut owned.windows);
        for (i, (window, held)) in windows.enumerate() {
            let first = window.first_page(position);
            while let Some((index, page)) = held.leave(first) {
                self.clock += 1;
                if window.saves(index, prompt) {
                    window.release(page, self.clock);
                } else if let Some(of) = window.let_go(page, self.clock) {
                    let known = self.pages[of as usize].known.as_mut();
                    known.into_iter().for_each(|known| known.windows[i] = None);
                }
            }
        }
    }

    /// Takes all pages back. Known pages among them stay known until they are needed.
    pub(crate) fn release(&mut self, owned: &mut Owned) {
        for (window, held) in self.windows.iter_mut().zip(&mut owned.windows) {
            for page in held.drain() {
                self.clock += 1;
                window.release(page, self.clock);
            }
        }
        let mut behind = 0; // rank of the page behind
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
        *owned = Owned::rooted(owned.root);
    }

    /// Gives `owned`, which has no page, the known pages that `tokens` start with. Returns how many
    /// tokens they hold. These are less than all: the logits after the last one are to be computed.
    ///
    /// Cost: a hash of 64 tokens per page that is found, and one more. With windows, it also looks
    /// at the pages of each for every page that cannot be the last.
    pub(crate) fn reuse(&mut self, tokens: &[u32], owned: &mut Owned) -> usize {
        let (_, before_last) = tokens.split_last().expect("a sequence has tokens");
        let mut found = Vec::new();
        let mut before = owned.root;
        for tokens in before_last.chunks(PAGE) {
            let key = Key::new(before, tokens);
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

    /// Whether the page of `tokens` behind those that `owned` has is known, and could be reused.
    /// `owned` has known pages only.
    pub(crate) fn is_next_known(&self, tokens: &[u32], owned: &Owned) -> bool {
        let page = next_page(tokens, owned);
        let key = page.and_then(|page| Key::new(owned.last_known, page));
        key.is_some_and(|key| self.known.contains_key(&key))
    }

    fn known(&self, page: u32) -> &Known {
        let known = self.pages[page as usize].known.as_ref();
        known.expect("found among the known")
    }

    /// Whether the pages of all windows are there that the row behind `found` looks at.
    fn can_end(&self, found: &[u32]) -> bool {
        self.windows.iter().enumerate().all(|(i, window)| {
            let seen = &found[window.first_page(found.len() * PAGE)..];
            seen.iter()
                .all(|page| self.known(*page).windows[i].is_some())
        })
    }

    /// Gives `owned` the pages of windows that the row behind `found` looks at.
    fn take_windows(&mut self, found: &[u32], owned: &mut Owned) {
        owned.windows.clear();
        for i in 0..self.windows.len() {
            let first = self.windows[i].first_page(found.len() * PAGE);
            let mut held = Held::from(first);
            for page in &found[first..] {
                let page = self.known(*page).windows[i].expect("it can end here");
                self.windows[i].share(page);
                held.push(page);
            }
            owned.windows.push(held);
        }
    }

    /// Counts another sequence that has this page; returns the page's number among the known.
    fn take_known(&mut self, page: u32) -> u64 {
        let page = &mut self.pages[page as usize];
        let known = page.known.as_ref().expect("found among the known");
        if page.users == 0 {
            self.unused.remove(&(known.rank, known.since));
        }
        page.users += 1;
        known.number
    }

    /// Remembers what is in the pages of a sequence that are full with `computed`, the tokens whose
    /// keys and values are in the cache. A page that another sequence has computed as well goes
    /// back for that one.
    pub(crate) fn learn(&mut self, computed: &[u32], owned: &mut Owned) {
        while let Some(key) = Key::new(owned.last_known, &computed[owned.n_known * PAGE..]) {
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

    /// The pages of windows that go with the page that was just learned: those that are known
    /// already, else the sequence's own.
    fn learn_windows(&mut self, owned: &mut Owned) {
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

    fn add_known(&mut self, page: u32, key: Key) -> u64 {
        self.clock += 1;
        let (number, key) = (self.clock, Arc::new(key));
        self.known.insert(Arc::clone(&key), page);
        self.pages[page as usize].known = Some(Known {
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
