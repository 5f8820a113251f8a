//! Who has which page of the cache, and what is in the pages that nobody has.
//!
//! A page that is full holds keys and values of 64 tokens, and by the numerics rule these follow
//! from the tokens and from those before them, to the bit. So a page is *known* by the 64 tokens in
//! it and the known page before it, and any sequence that starts with the same tokens can have it
//! instead of computing it: the next turn of a chat, a system prompt that all share, a sequence
//! that gave up its pages.
//!
//! ```text
//! free --grow--> had by one --learn--> known, had by any number --release--> known, unused
//!  ^                 |                              ^                              |
//!  +-----release-----+                              +------------reuse-------------+
//!  +------------------------ needed, longest unused first -------------------------+
//! ```
//!
//! Known pages are compared by their tokens, not by a hash alone: nobody can make a prompt that
//! finds another one's keys. Only whole pages that are full are shared, so nobody writes to one.
//! Answers are the same to the bit; only who measures how soon a prompt is read can tell that
//! somebody's began alike.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use paceline_tensor::PAGE;

/// What makes a known page: the one before it (0 for none) and its tokens.
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

/// What is in a page.
#[derive(Clone, Debug)]
struct Known {
    /// Never used twice, so that nothing follows a page that is forgotten.
    number: u64,
    key: Arc<Key>,
    /// When it was given back last, where nobody has it.
    since: u64,
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
    /// Number of the last known one.
    last_known: u64,
}

impl Owned {
    pub(crate) fn pages(&self) -> &[u32] {
        &self.pages
    }

    pub(crate) const fn len(&self) -> usize {
        self.pages.len()
    }
}

/// All pages of a cache. Beside the cache it takes some 300 bytes per known page.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    /// By number.
    pages: Vec<Page>,
    /// Pages of which nothing is known and that nobody has.
    free: Vec<u32>,
    /// Known pages that nobody has, by when they were given back. A page is always given back
    /// before the one that it follows, so none stays behind that cannot be found.
    unused: BTreeMap<u64, u32>,
    /// Not iterated: its order is arbitrary.
    known: HashMap<Arc<Key>, u32>,
    /// Counts pages that became known, and those given back.
    clock: u64,
}

impl Pages {
    /// All of `pages` pages free; low numbers are given out first.
    pub(crate) fn new(pages: usize) -> Self {
        let n = u32::try_from(pages).expect("fewer than 2^32 pages");
        Self {
            pages: vec![Page::default(); pages],
            free: (0..n).rev().collect(),
            unused: BTreeMap::new(),
            known: HashMap::new(),
            clock: 0,
        }
    }

    /// Pages that nobody has.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Grows `owned` to `pages` pages; `false`, with nothing taken, when there are not enough.
    /// What was unused longest is forgotten for it when no page is free.
    pub(crate) fn grow(&mut self, owned: &mut Owned, pages: usize) -> bool {
        let more = pages.saturating_sub(owned.len());
        if more > self.available() {
            return false;
        }
        for _ in 0..more {
            let page = self.free.pop().or_else(|| self.forget());
            let page = page.expect("as many as are available");
            self.pages[page as usize].users = 1;
            owned.pages.push(page);
        }
        true
    }

    /// Takes the known page that was unused longest.
    fn forget(&mut self) -> Option<u32> {
        let (_, page) = self.unused.pop_first()?;
        let known = self.pages[page as usize].known.take()?;
        self.known.remove(&known.key);
        Some(page)
    }

    /// Takes all pages back. What is known of them stays known until they are needed.
    pub(crate) fn release(&mut self, owned: &mut Owned) {
        for number in owned.pages.drain(..).rev() {
            let page = &mut self.pages[number as usize];
            page.users -= 1;
            match &mut page.known {
                None => self.free.push(number),
                Some(known) if page.users == 0 => {
                    self.clock += 1;
                    known.since = self.clock;
                    self.unused.insert(self.clock, number);
                }
                Some(_) => {}
            }
        }
        *owned = Owned::default();
    }

    /// Gives `owned`, which has no page, the known pages that `tokens` start with; returns how many
    /// tokens they hold, less than all: the logits after the last one are to be computed.
    ///
    /// Cost: a hash of 64 tokens per page that is found, and one more.
    pub(crate) fn reuse(&mut self, tokens: &[u32], owned: &mut Owned) -> usize {
        let (_, before_last) = tokens.split_last().expect("a sequence has tokens");
        for tokens in before_last.chunks(PAGE) {
            let key = Key::new(owned.last_known, tokens);
            let Some(&page) = key.and_then(|key| self.known.get(&key)) else {
                break;
            };
            owned.last_known = self.take_known(page);
            owned.pages.push(page);
            owned.n_known += 1;
        }
        owned.n_known * PAGE
    }

    /// One more sequence has this page; returns its number among the known.
    fn take_known(&mut self, page: u32) -> u64 {
        let page = &mut self.pages[page as usize];
        let known = page.known.as_ref().expect("found among the known");
        if page.users == 0 {
            self.unused.remove(&known.since);
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
            owned.n_known += 1;
        }
    }

    fn add_known(&mut self, page: u32, key: Key) -> u64 {
        self.clock += 1;
        let (number, key) = (self.clock, Arc::new(key));
        self.known.insert(Arc::clone(&key), page);
        let since = 0;
        self.pages[page as usize].known = Some(Known { number, key, since });
        number
    }
}

#[cfg(test)]
pub(crate) mod tests;
