//! Receiver of KV pages: collects the senders' parts until the engine takes the pages.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use paceline_base::lock;
use paceline_comm::Group;
use paceline_model::{KvTransferPlan, PageName, PageStore, PersistedPage, WindowPool};
use paceline_tensor::{KvType, PAGE};
use tracing::{debug, warn};

use super::{ControlChannel, GIVER, NO_POOL, PAGE_LIMIT, RECEIVE_LIMIT, TAG, unlinked, within};
use crate::messages::FromWorker;
use crate::{Error, disk};

/// Overhead of a page in bytes: its name in two collections.
const PAGE_COST: usize = 128;

/// Most expected prompts, and most complete ones that were not taken; the oldest are dropped.
const EXPECTED_MAX: usize = 64;

/// Extra pages of a windowed pool: besides one page in a stride, a prompt has the last two of the
/// window.
const LAST_SAVED: usize = 2;

/// A page, complete or partly received.
#[derive(Debug)]
struct IncomingPage {
    bytes: Vec<u8>,
    /// By sender: whether its part is missing.
    missing: Vec<bool>,
    /// Its key in [`State::order`].
    at: u64,
    /// Number of its last prompt: how many were complete before it.
    prompt: u64,
}

impl IncomingPage {
    fn is_whole(&self) -> bool {
        !self.missing.contains(&true)
    }
}

type TransferKey = (PageName, u32);

#[derive(Debug, Default)]
struct State {
    round: u64,
    /// Name of the senders' numbers, where they are other ones.
    read_by: Option<String>,
    givers: usize,
    /// Bytes of a page, by pool.
    page_bytes: Vec<usize>,
    pages: HashMap<TransferKey, IncomingPage>,
    /// Keys of `pages`, oldest first.
    order: BTreeMap<u64, TransferKey>,
    last: u64,
    bytes: usize,
    /// Prompts and their last pages.
    expected: VecDeque<(u64, PageName)>,
    /// Number of complete prompts in the round.
    complete: u64,
    /// Last pages of complete prompts that the engine has not taken, with the number of
    /// [`IncomingPage::prompt`].
    to_take: VecDeque<(u64, PageName)>,
}

impl State {
    fn remove(&mut self, key: &TransferKey) -> Option<IncomingPage> {
        let page = self.pages.remove(key)?;
        self.bytes -= PAGE_COST + page.bytes.len();
        self.order.remove(&page.at);
        Some(page)
    }

    fn has_any(&self, name: PageName) -> bool {
        let mut pools = 0..self.page_bytes.len() as u32;
        pools.any(|pool| self.pages.contains_key(&(name, pool)))
    }

    /// Whether a page is complete in all pools.
    fn has_all(&self, name: PageName) -> bool {
        let whole = |pool: u32| {
            self.pages
                .get(&(name, pool))
                .is_some_and(IncomingPage::is_whole)
        };
        let pools = self.page_bytes.len() as u32;
        pools > 0 && (0..pools).all(whole)
    }

    /// The page of a key; creates it and evicts old pages for it.
    fn page(&mut self, key: TransferKey, bytes_max: usize) -> &mut IncomingPage {
        let bytes = self.page_bytes[key.1 as usize];
        if !self.pages.contains_key(&key) {
            while self.bytes + PAGE_COST + bytes > bytes_max
                && let Some((_, oldest)) = self.order.pop_first()
            {
                self.remove(&oldest);
            }
            self.bytes += PAGE_COST + bytes;
            self.last += 1;
            self.order.insert(self.last, key);
        }
        let new = || IncomingPage {
            bytes: vec![0; bytes],
            missing: vec![true; self.givers],
            at: self.last,
            prompt: 0,
        };
        let page = self.pages.entry(key).or_insert_with(new);
        page.prompt = self.complete;
        page
    }

    /// Removes and returns the prompts whose last page is `name`, which is complete now.
    fn completed(&mut self, name: PageName) -> Vec<u64> {
        let mut complete = Vec::new();
        self.expected.retain(|(number, page)| {
            let is_it = *page == name;
            if is_it {
                complete.push(*number);
            }
            !is_it
        });
        if !complete.is_empty() {
            if self.to_take.len() == EXPECTED_MAX {
                self.to_take.pop_front();
            }
            self.to_take.push_back((self.complete, name));
            self.complete += 1;
        }
        complete
    }

    /// The engine took part of a page. After the last page of a prompt, the rest of the prompt is
    /// dropped: the cache had it or does not need it.
    fn taken(&mut self, name: PageName) {
        let of_name = self.to_take.iter().position(|(_, page)| *page == name);
        let Some(at) = of_name.filter(|_| !self.has_any(name)) else {
            return;
        };
        let Some((prompt, _)) = self.to_take.remove(at) else {
            return;
        };
        let left = self.pages.iter().filter(|(_, page)| page.prompt == prompt);
        let left: Vec<TransferKey> = left.map(|(key, _)| *key).collect();
        for key in left {
            self.remove(&key);
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct ReceivedPages {
    state: Arc<Mutex<State>>,
    /// Pages of a prompt of the full context, by pool. Capacity is one such prompt: the oldest
    /// pages are evicted.
    most: Vec<usize>,
}

impl ReceivedPages {
    /// For sequences of `context` tokens, in pools whose `windows` drop some pages.
    pub(super) fn new(context: usize, windows: &[WindowPool]) -> Self {
        let all = context.div_ceil(PAGE);
        let some = |window: &WindowPool| all.min(all / window.every.max(1) + LAST_SAVED);
        Self {
            state: Arc::default(),
            most: std::iter::once(all)
                .chain(windows.iter().map(some))
                .collect(),
        }
    }

    /// Starts a round with `givers` senders. Drops the pages of earlier rounds, whose parts may
    /// differ.
    pub(super) fn begin(
        &self,
        (round, read_by): (u64, Option<String>),
        givers: usize,
        page_bytes: &[usize],
    ) {
        let mut state = lock(&self.state);
        *state = State {
            round,
            read_by,
            givers,
            page_bytes: page_bytes.to_vec(),
            ..State::default()
        };
    }

    /// Registers an expected prompt by its last page; `true` if that is already complete.
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

    /// Adds a sender's part of a page; returns the prompts that it completes. `None` if the round
    /// is over.
    fn add(
        &self,
        (round, giver): (u64, usize),
        part: &KvTransferPlan,
        (name, pool): TransferKey,
        bytes: &[u8],
    ) -> Option<Vec<u64>> {
        let mut state = lock(&self.state);
        if state.round != round {
            return None;
        }
        let each = state.page_bytes.iter().zip(&self.most);
        let bytes_max = each.map(|(bytes, pages)| pages * (PAGE_COST + bytes)).sum();
        let page = state.page((name, pool), bytes_max);
        part.scatter(pool as usize, bytes, &mut page.bytes);
        page.missing[giver] = false;
        Some(match state.has_all(name) {
            true => state.completed(name),
            false => Vec::new(),
        })
    }
}

pub(super) struct SenderConnection {
    pub(super) channel: ControlChannel,
    pub(super) incoming: ReceivedPages,
    pub(super) round: u64,
    pub(super) giver: usize,
    pub(super) part: KvTransferPlan,
    pub(super) space: [u8; 16],
}

impl SenderConnection {
    /// Receives until the round is over or the sender is lost, which it reports to the instance.
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

    /// The bytes after a header, whose length must match the expected one.
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

/// A store that looks up received pages first, then those on disk. While the senders have other
/// numbers it leaves the disk alone.
#[derive(Debug)]
pub(super) struct ReceivedPageStore {
    incoming: ReceivedPages,
    disk: Option<Box<dyn PageStore>>,
    kv: KvType,
}

impl ReceivedPageStore {
    /// With keys and values of type `kv`, which is also that of pages on disk.
    pub(super) fn new(
        incoming: ReceivedPages,
        disk: Option<Box<dyn PageStore>>,
        kv: KvType,
    ) -> Self {
        Self { incoming, disk, kv }
    }

    /// The disk, while pages may be kept there.
    fn disk(&mut self) -> Option<&mut Box<dyn PageStore>> {
        let is_near = lock(&self.incoming.state).read_by.is_some();
        self.disk.as_mut().filter(|_| !is_near)
    }
}

impl PageStore for ReceivedPageStore {
    fn name(&self, before: &PageName, tokens: &[u32]) -> PageName {
        disk::name(before, tokens)
    }

    fn has(&self, page: &PersistedPage) -> bool {
        let state = lock(&self.incoming.state);
        let came = state.pages.get(&(page.name, page.pool));
        let disk = self.disk.as_ref().filter(|_| state.read_by.is_none());
        came.is_some_and(IncomingPage::is_whole) || disk.is_some_and(|disk| disk.has(page))
    }

    fn put(&mut self, page: &PersistedPage, bytes: &[u8]) {
        if let Some(disk) = self.disk() {
            disk.put(page, bytes);
        }
    }

    fn get(&mut self, page: &PersistedPage, into: &mut [u8]) -> bool {
        let key = (page.name, page.pool);
        let mut state = lock(&self.incoming.state);
        let is_whole = state.pages.get(&key).is_some_and(IncomingPage::is_whole);
        let came = state.remove(&key).filter(|_| is_whole);
        state.taken(page.name);
        drop(state);
        match came {
            Some(came) if came.bytes.len() == into.len() => {
                into.copy_from_slice(&came.bytes);
                true
            }
            _ => self.disk().is_some_and(|disk| disk.get(page, into)),
        }
    }

    fn forget(&mut self, page: &PersistedPage) {
        lock(&self.incoming.state).remove(&(page.name, page.pool));
        if let Some(disk) = &mut self.disk {
            disk.forget(page);
        }
    }

    fn kv_type(&self) -> Option<KvType> {
        Some(self.kv)
    }

    fn read_by(&self) -> Option<String> {
        lock(&self.incoming.state).read_by.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::TransferRound;

    fn name(i: u32) -> PageName {
        PageName([i; 8])
    }

    fn kept(i: u32, pool: u32) -> PersistedPage {
        PersistedPage {
            name: name(i),
            index: i,
            pool,
            page: 0,
        }
    }

    /// The part of one of two senders: half of an eight-byte page of the first pool, nothing of the
    /// second.
    fn half(giver: usize) -> KvTransferPlan {
        let run = paceline_model::CopyRange {
            from: 0,
            to: 4 * giver,
            len: 4,
        };
        KvTransferPlan {
            runs: vec![vec![run], Vec::new()],
            page_bytes: vec![8, 0],
        }
    }

    fn add(incoming: &ReceivedPages, giver: usize, (i, pool): (u32, u32)) -> Option<Vec<u64>> {
        let bytes = vec![giver as u8 + 1; if pool == 0 { 4 } else { 0 }];
        incoming.add((1, giver), &half(giver), (name(i), pool), &bytes)
    }

    /// For sequences of four pages, in two pools that keep all of them.
    fn four_pages() -> ReceivedPages {
        let window = WindowPool {
            back: PAGE,
            pages: 4,
            every: 1,
        };
        ReceivedPages::new(4 * PAGE, &[window])
    }

    #[test]
    fn a_page_is_there_when_all_givers_have_sent_all_of_it() {
        let incoming = four_pages();
        incoming.begin((1, None), 2, &[8, 0]);
        assert!(!incoming.expect(7, name(1)));
        let mut store = ReceivedPageStore::new(incoming.clone(), None, KvType::F16);
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
        // Half a page is not complete.
        add(&incoming, 0, (2, 0));
        assert!(!store.get(&kept(2, 0), &mut into));
    }

    /// A page of the disk, whose numbers are the receiver's own.
    #[derive(Debug)]
    struct OnDisk;

    impl PageStore for OnDisk {
        fn name(&self, before: &PageName, tokens: &[u32]) -> PageName {
            disk::name(before, tokens)
        }

        fn has(&self, _: &PersistedPage) -> bool {
            true
        }

        fn put(&mut self, page: &PersistedPage, _: &[u8]) {
            panic!("{page:?} has other numbers");
        }

        fn get(&mut self, _: &PersistedPage, _: &mut [u8]) -> bool {
            true
        }

        fn forget(&mut self, _: &PersistedPage) {}
    }

    #[test]
    fn pages_of_other_numbers_are_named_and_kept_by_nobody() {
        let round = |numbers: [&str; 2]| TransferRound {
            number: 1,
            group: [0; 16],
            key: None,
            numbers: numbers.map(str::to_owned),
        };
        let incoming = four_pages();
        let disk: Option<Box<dyn PageStore>> = Some(Box::new(OnDisk));
        let mut store = ReceivedPageStore::new(incoming.clone(), disk, KvType::F16);
        for (numbers, read_by) in [
            (["mlx(metal)", "mlx(cuda)"], Some("mlx(metal)".to_owned())),
            (["mlx(metal)", "mlx(metal)"], None),
        ] {
            let read = round(numbers).read_by().cloned();
            incoming.begin((1, read), 1, &[8, 0]);
            let is_own = read_by.is_none();
            assert_eq!(store.read_by(), read_by);
            assert_eq!(store.has(&kept(1, 0)), is_own);
            assert_eq!(store.get(&kept(1, 0), &mut [0; 8]), is_own);
            if !is_own {
                store.put(&kept(1, 0), &[0; 8]);
            }
        }
    }

    #[test]
    fn rounds_that_are_over_add_nothing_and_the_oldest_pages_make_room() {
        let incoming = four_pages();
        incoming.begin((1, None), 1, &[8, 0]);
        let store = ReceivedPageStore::new(incoming.clone(), None, KvType::F16);
        for i in 0..100 {
            add(&incoming, 0, (i, 0));
            add(&incoming, 0, (i, 1));
        }
        let there = (0..100).filter(|i| store.has(&kept(*i, 0))).count();
        assert_eq!(there, 4, "a sequence of four pages");
        assert!(store.has(&kept(99, 0)) && !store.has(&kept(0, 0)));
        incoming.begin((2, None), 1, &[8, 0]);
        assert!(!store.has(&kept(99, 0)));
        assert_eq!(add(&incoming, 0, (1, 0)), None);
    }

    #[test]
    fn what_is_left_of_a_prompt_goes_with_its_last_page() {
        let incoming = four_pages();
        incoming.begin((1, None), 1, &[8, 0]);
        let mut store = ReceivedPageStore::new(incoming.clone(), None, KvType::F16);
        for (number, last) in [(7, 2), (8, 4)] {
            assert!(!incoming.expect(number, name(last)));
            for i in [last - 1, last] {
                assert_eq!(add(&incoming, 0, (i, 0)), Some(vec![]));
                let whole = if i == last { vec![number] } else { vec![] };
                assert_eq!(add(&incoming, 0, (i, 1)), Some(whole));
            }
        }
        assert!(store.get(&kept(2, 0), &mut [0; 8]));
        assert!(store.has(&kept(1, 0)), "part of the last page is left");
        assert!(store.get(&kept(2, 1), &mut []));
        assert!(!store.has(&kept(1, 0)) && !store.has(&kept(1, 1)));
        assert!(store.has(&kept(3, 0)), "of the next prompt");
        for pool in [0, 1] {
            let mut into = vec![0; if pool == 0 { 8 } else { 0 }];
            assert!(store.get(&kept(4, pool), &mut into));
        }
        let state = lock(&incoming.state);
        assert_eq!(
            (state.bytes, state.pages.len(), state.order.len()),
            (0, 0, 0)
        );
    }
}
