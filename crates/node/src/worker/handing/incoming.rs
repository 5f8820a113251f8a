//! Pages that come to this rank.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use paceline_base::lock;
use paceline_comm::Group;
use paceline_model::{Handed, KeptPage, PageName, PageStore};
use paceline_tensor::PAGE;
use tracing::{debug, warn};

use super::{Channel, GIVER, NO_POOL, PAGE_LIMIT, RECEIVE_LIMIT, TAG, unlinked, within};
use crate::messages::FromWorker;
use crate::{Error, disk};

/// Sequences of the whole context whose pages there is room for, until the engine takes them. One
/// is handed over while the one before is taken. The oldest pages make room for new ones.
const CONTEXTS: usize = 2;

/// Bytes that a page counts for beside its own: its name in two collections.
const PAGE_COST: usize = 128;

/// Prompts that are expected at once; the oldest are forgotten.
const EXPECTED_MAX: usize = 64;

/// A page, or what has come of it.
#[derive(Debug)]
struct Page {
    bytes: Vec<u8>,
    /// Givers whose part has not come.
    missing: Vec<bool>,
}

impl Page {
    fn is_whole(&self) -> bool {
        !self.missing.contains(&true)
    }
}

type Key = (PageName, u32);

#[derive(Debug, Default)]
struct State {
    round: u64,
    givers: usize,
    /// Of a page, by pool.
    page_bytes: Vec<usize>,
    pages: HashMap<Key, Page>,
    /// Keys in the order in which they came; some are taken already.
    order: VecDeque<Key>,
    bytes: usize,
    /// Prompts and their last pages.
    expected: VecDeque<(u64, PageName)>,
}

impl State {
    fn remove(&mut self, key: &Key) -> Option<Page> {
        let page = self.pages.remove(key)?;
        self.bytes -= PAGE_COST + page.bytes.len();
        Some(page)
    }

    /// Whether the whole of a page is there: its parts in all pools.
    fn has_all(&self, name: PageName) -> bool {
        let whole = |pool: u32| self.pages.get(&(name, pool)).is_some_and(Page::is_whole);
        let pools = self.page_bytes.len() as u32;
        pools > 0 && (0..pools).all(whole)
    }

    /// The page of a key, made where it is new, with room for it.
    fn page(&mut self, key: Key, bytes_max: usize) -> &mut Page {
        let bytes = self.page_bytes[key.1 as usize];
        if !self.pages.contains_key(&key) {
            let is_gone = |key: &Key| !self.pages.contains_key(key);
            while self.order.front().is_some_and(is_gone) {
                self.order.pop_front();
            }
            while self.bytes + PAGE_COST + bytes > bytes_max
                && let Some(oldest) = self.order.pop_front()
            {
                self.remove(&oldest);
            }
            self.bytes += PAGE_COST + bytes;
            self.order.push_back(key);
        }
        let new = || Page {
            bytes: vec![0; bytes],
            missing: vec![true; self.givers],
        };
        self.pages.entry(key).or_insert_with(new)
    }
}

/// Pages that have come and were not taken.
#[derive(Clone, Debug)]
pub(super) struct Incoming {
    state: Arc<Mutex<State>>,
    /// Pages of a sequence at most.
    pages: usize,
}

impl Incoming {
    /// For sequences of `context` tokens.
    pub(super) fn new(context: usize) -> Self {
        Self {
            state: Arc::default(),
            pages: context.div_ceil(PAGE),
        }
    }

    /// Begins a round with so many givers. Pages of rounds before are dropped: their parts may have
    /// been cut otherwise.
    pub(super) fn begin(&self, round: u64, givers: usize, page_bytes: &[usize]) {
        let mut state = lock(&self.state);
        *state = State {
            round,
            givers,
            page_bytes: page_bytes.to_vec(),
            ..State::default()
        };
    }

    /// Notes that a prompt's last page is expected; `true` when it is there already.
    pub(super) fn expect(&self, number: u64, page: PageName) -> bool {
        let mut state = lock(&self.state);
        if state.has_all(page) {
            return true;
        }
        if state.expected.len() == EXPECTED_MAX {
            state.expected.pop_front();
        }
        state.expected.push_back((number, page));
        false
    }

    /// Adds a giver's part of a page; the prompts that are complete with it. `None` when the round
    /// is over.
    fn add(
        &self,
        (round, giver): (u64, usize),
        part: &Handed,
        (name, pool): Key,
        bytes: &[u8],
    ) -> Option<Vec<u64>> {
        let mut state = lock(&self.state);
        if state.round != round {
            return None;
        }
        let each = state.page_bytes.iter().map(|bytes| PAGE_COST + bytes);
        let bytes_max = CONTEXTS * self.pages * each.sum::<usize>();
        let page = state.page((name, pool), bytes_max);
        part.scatter(pool as usize, bytes, &mut page.bytes);
        page.missing[giver] = false;
        if !state.has_all(name) {
            return Some(Vec::new());
        }
        let mut complete = Vec::new();
        state.expected.retain(|(number, page)| {
            let is_it = *page == name;
            if is_it {
                complete.push(*number);
            }
            !is_it
        });
        Some(complete)
    }
}

/// The way from one giver.
pub(super) struct Lane {
    pub(super) channel: Channel,
    pub(super) incoming: Incoming,
    pub(super) round: u64,
    pub(super) giver: usize,
    pub(super) part: Handed,
    pub(super) space: [u8; 16],
}

impl Lane {
    /// Takes what comes until the round is over or the giver is gone, which the instance is told.
    pub(super) fn run(self, group: Result<Box<dyn Group>, Error>) {
        let ended = group.and_then(|group| self.take(&*group));
        let is_over = lock(&self.incoming.state).round != self.round;
        if let Err(error) = ended
            && !is_over
        {
            warn!(giver = self.giver, %error, "pages do not come");
            // Should the instance be gone, the reader of the channel ends this process.
            let _ = self.channel.send(&unlinked(self.round, &error));
        }
    }

    fn take(&self, group: &dyn Group) -> Result<(), Error> {
        debug!(giver = self.giver, "takes pages");
        let mut head = [0u8; disk::HEAD];
        loop {
            group.recv(&mut head, GIVER, TAG, within(RECEIVE_LIMIT))?;
            let (name, pool) = disk::page_of(&self.space, &head).ok_or(Error::BadPage {
                what: "it is of another model, split or version",
            })?;
            if pool == NO_POOL {
                if lock(&self.incoming.state).round != self.round {
                    return Ok(());
                }
                continue;
            }
            let bytes = self.part(group, &head, pool)?;
            let of = (self.round, self.giver);
            let added = self.incoming.add(of, &self.part, (name, pool), &bytes);
            let Some(complete) = added else {
                return Ok(());
            };
            for number in complete {
                let _ = self.channel.send(&FromWorker::Arrived { number }); // as above
            }
        }
    }

    /// The bytes behind a header, which is to be about as many as this rank expects.
    fn part(
        &self,
        group: &dyn Group,
        head: &[u8; disk::HEAD],
        pool: u32,
    ) -> Result<Vec<u8>, Error> {
        let bad = |what| Error::BadPage { what };
        if pool as usize >= self.part.runs.len() {
            return Err(bad("its pool does not exist"));
        }
        let len = self.part.bytes(pool as usize);
        let told = head.last_chunk().map(|len| u64::from_le_bytes(*len));
        if told != Some(len as u64) {
            return Err(bad("it has another length"));
        }
        let mut bytes = vec![0u8; len];
        if len > 0 {
            group.recv(&mut bytes, GIVER, TAG, within(PAGE_LIMIT))?;
        }
        let mut sum = [0u8; disk::SUM];
        group.recv(&mut sum, GIVER, TAG, within(PAGE_LIMIT))?;
        match sum == disk::summed(head, &bytes) {
            true => Ok(bytes),
            false => Err(bad("its checksum is wrong")),
        }
    }
}

/// A store of pages that have come, before those on disk.
#[derive(Debug)]
pub(super) struct Taken {
    incoming: Incoming,
    disk: Option<Box<dyn PageStore>>,
}

impl Taken {
    pub(super) fn new(incoming: Incoming, disk: Option<Box<dyn PageStore>>) -> Self {
        Self { incoming, disk }
    }
}

impl PageStore for Taken {
    fn name(&self, before: &PageName, tokens: &[u32]) -> PageName {
        disk::name(before, tokens)
    }

    fn has(&self, page: &KeptPage) -> bool {
        let state = lock(&self.incoming.state);
        let came = state.pages.get(&(page.name, page.pool));
        came.is_some_and(Page::is_whole) || self.disk.as_ref().is_some_and(|disk| disk.has(page))
    }

    fn put(&mut self, page: &KeptPage, bytes: &[u8]) {
        if let Some(disk) = &mut self.disk {
            disk.put(page, bytes);
        }
    }

    fn get(&mut self, page: &KeptPage, into: &mut [u8]) -> bool {
        let key = (page.name, page.pool);
        let mut state = lock(&self.incoming.state);
        let is_whole = state.pages.get(&key).is_some_and(Page::is_whole);
        let came = state.remove(&key).filter(|_| is_whole);
        drop(state);
        match came {
            Some(came) if came.bytes.len() == into.len() => {
                into.copy_from_slice(&came.bytes);
                true
            }
            _ => self.disk.as_mut().is_some_and(|disk| disk.get(page, into)),
        }
    }

    fn forget(&mut self, page: &KeptPage) {
        lock(&self.incoming.state).remove(&(page.name, page.pool));
        if let Some(disk) = &mut self.disk {
            disk.forget(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(i: u32) -> PageName {
        PageName([i; 8])
    }

    fn kept(i: u32, pool: u32) -> KeptPage {
        KeptPage {
            name: name(i),
            index: i,
            pool,
            page: 0,
        }
    }

    /// The part of one of two givers: half of an eight-byte page of the first pool, nothing of the
    /// second.
    fn half(giver: usize) -> Handed {
        let run = paceline_model::Run {
            from: 0,
            to: 4 * giver,
            len: 4,
        };
        Handed {
            runs: vec![vec![run], Vec::new()],
            page_bytes: vec![8, 0],
        }
    }

    fn add(incoming: &Incoming, giver: usize, (i, pool): (u32, u32)) -> Option<Vec<u64>> {
        let bytes = vec![giver as u8 + 1; if pool == 0 { 4 } else { 0 }];
        incoming.add((1, giver), &half(giver), (name(i), pool), &bytes)
    }

    #[test]
    fn a_page_is_there_when_all_givers_have_sent_all_of_it() {
        let incoming = Incoming::new(4 * PAGE);
        incoming.begin(1, 2, &[8, 0]);
        assert!(!incoming.expect(7, name(1)));
        let mut store = Taken::new(incoming.clone(), None);
        let mut into = [0; 8];
        assert_eq!(add(&incoming, 0, (1, 0)), Some(vec![]));
        assert!(!store.has(&kept(1, 0)));
        assert_eq!(add(&incoming, 1, (1, 0)), Some(vec![]));
        assert_eq!(add(&incoming, 1, (1, 1)), Some(vec![]));
        assert_eq!(add(&incoming, 0, (1, 1)), Some(vec![7]));
        assert!(store.has(&kept(1, 0)) && store.has(&kept(1, 1)));
        assert!(incoming.expect(8, name(1)), "it is there");
        assert!(store.get(&kept(1, 0), &mut into));
        assert_eq!(into, [1, 1, 1, 1, 2, 2, 2, 2]);
        assert!(!store.get(&kept(1, 0), &mut into), "it was taken");
        // Half a page is none.
        add(&incoming, 0, (2, 0));
        assert!(!store.get(&kept(2, 0), &mut into));
    }

    #[test]
    fn rounds_that_are_over_add_nothing_and_the_oldest_pages_make_room() {
        let incoming = Incoming::new(4 * PAGE);
        incoming.begin(1, 1, &[8, 0]);
        let store = Taken::new(incoming.clone(), None);
        for i in 0..100 {
            add(&incoming, 0, (i, 0));
            add(&incoming, 0, (i, 1));
        }
        let there = (0..100).filter(|i| store.has(&kept(*i, 0))).count();
        assert_eq!(there, 2 * 4, "two sequences of four pages");
        assert!(store.has(&kept(99, 0)) && !store.has(&kept(0, 0)));
        incoming.begin(2, 1, &[8, 0]);
        assert!(!store.has(&kept(99, 0)));
        assert_eq!(add(&incoming, 0, (1, 0)), None);
    }
}
