//! Persistent KV cache: pages stored outside the cache, so that their contents are not computed
//! again.
//!
//! ```text
//! leader  -- keep: names and pages ----> every rank puts its part of each page into its store
//! leader  -- recall: names and pages --> every rank gets its part of each page from its store
//!         <-- how many, from the first -
//! ```
//!
//! A page's name is a hash of its tokens and of all tokens before them. So all ranks use the same
//! name, and each looks up its part of the model in its own [`PageStore`]. These messages replace a
//! step's plan (`plan.rs`):
//!
//! ```text
//! length in words | kind | pages | 0, then for each page: name (8 words), index, pool, page
//! ```

use std::fmt;

use half::f16;
use paceline_base::Rank;
use paceline_tensor::{KvCache, KvType, LayerStore};

use crate::plan::HEADER_WORDS;
use crate::{Error, Links};

/// Maximum pages per message.
pub const KEPT_MAX: usize = 4096;

/// Message kinds, after those of plans.
const KEEP: u32 = 3;
const RECALL: u32 = 4;

/// Header words, and words per page.
const FIRST: usize = 4;
const EACH: usize = 11;

/// Name of a page's contents: a hash of its tokens and of the previous page's name. The first page
/// of a sequence follows the default name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageName(pub [u32; 8]);

/// A cache page with its content name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistedPage {
    pub name: PageName,
    /// Index among the pages of its sequence.
    pub index: u32,
    /// 0 for layers that attend to all positions, then one per entry of
    /// [`Compute::windows`](crate::Compute::windows).
    pub pool: u32,
    /// Number in the pool.
    pub page: u32,
}

/// One rank's store of its parts of pages. The key is name and pool.
pub trait PageStore: fmt::Debug + Send {
    /// Names a page of `tokens` after the page `before`. Must be a cryptographic hash: two prefixes
    /// never share a name.
    fn name(&self, before: &PageName, tokens: &[u32]) -> PageName;

    /// Whether the page is stored, from memory. Called often, so it must do no I/O.
    fn has(&self, page: &PersistedPage) -> bool;

    /// Stores the bytes of a page and replaces earlier ones. Returns soon, and may decline.
    fn put(&mut self, page: &PersistedPage, bytes: &[u8]);

    /// Fills `into` with the stored and verified bytes. `false` if they are gone; `into` is then
    /// undefined.
    fn get(&mut self, page: &PersistedPage, into: &mut [u8]) -> bool;

    /// Removes a page that this rank or another cannot read, or that needs lost pages before it.
    /// The engine stores it again after computing it.
    fn forget(&mut self, page: &PersistedPage);

    /// Whether the engine also stores pages that a prompt found in the cache. Set by stores that
    /// send pages to other nodes. Only for engines that run one sequence at a time.
    fn wants_known(&self) -> bool {
        false
    }

    /// Element type of keys and values in the pages of this store, where it is not that of the
    /// cache. All layers then keep keys and values, as f16 or f32.
    fn kv_type(&self) -> Option<KvType> {
        None
    }

    /// Name of the numbers that computed the pages, where they are not the model's own. Only the
    /// sequence that gets such a page may use it.
    fn read_by(&self) -> Option<String> {
        None
    }
}

/// A cache whose pages have the bytes of [`KvCache::page_data`], in a given element type.
pub trait PageMemory {
    /// Pages of each pool.
    fn pool_pages(&self) -> Vec<usize>;

    /// Runs `put` with the bytes of a page.
    ///
    /// # Errors
    /// If the device fails.
    fn read_page(
        &self,
        page: &PersistedPage,
        kv: Option<KvType>,
        put: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error>;

    /// Overwrites a page with the bytes that `get` fills in; `false` where it has none.
    ///
    /// # Errors
    /// If the device fails; the page is then undefined.
    fn write_page(
        &mut self,
        page: &PersistedPage,
        kv: Option<KvType>,
        get: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<bool, Error>;
}

impl PageMemory for KvCache {
    fn pool_pages(&self) -> Vec<usize> {
        self.pool_pages().collect()
    }

    fn read_page(
        &self,
        page: &PersistedPage,
        kv: Option<KvType>,
        put: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let own = self.page_data(page.pool as usize, page.page);
        match other_type(self, page.pool as usize, kv) {
            Some(KvType::F32) => put(&widened(own)),
            Some(_) => put(&narrowed(own)),
            None => put(own),
        }
        Ok(())
    }

    fn write_page(
        &mut self,
        page: &PersistedPage,
        kv: Option<KvType>,
        get: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<bool, Error> {
        let other = other_type(self, page.pool as usize, kv);
        let own = self.page_data_mut(page.pool as usize, page.page);
        let Some(other) = other else {
            return Ok(get(own));
        };
        let len = match other {
            KvType::F32 => own.len() * 2,
            _ => own.len() / 2,
        };
        let mut bytes = vec![0; len];
        let has = get(&mut bytes);
        if has {
            own.copy_from_slice(&match other {
                KvType::F32 => narrowed(&bytes),
                _ => widened(&bytes),
            });
        }
        Ok(has)
    }
}

/// `wanted`, where the layers of a pool keep keys and values in the other one of f16 and f32.
fn other_type(cache: &KvCache, pool: usize, wanted: Option<KvType>) -> Option<KvType> {
    let wanted = wanted.filter(|kv| matches!(kv, KvType::F16 | KvType::F32))?;
    let other = match wanted {
        KvType::F32 => KvType::F16,
        _ => KvType::F32,
    };
    let mut stores = cache.layers().filter(|(of, _)| *of == pool);
    let is_other = |store| match store {
        LayerStore::Rows(shape) | LayerStore::Latent(shape) | LayerStore::Indexed(shape, _) => {
            shape.kv_type == other
        }
        LayerStore::State(_)
        | LayerStore::Delta(_)
        | LayerStore::Pooled(..)
        | LayerStore::IndexedPools(..) => false,
        LayerStore::Nothing => true,
    };
    stores.all(|(_, store)| is_other(store)).then_some(wanted)
}

/// The f16 values of `bytes` as f32.
fn widened(bytes: &[u8]) -> Vec<u8> {
    let values = bytes.as_chunks().0.iter();
    values
        .flat_map(|value| f16::from_le_bytes(*value).to_f32().to_le_bytes())
        .collect()
}

/// The f32 values of `bytes` as f16, rounded to nearest even.
fn narrowed(bytes: &[u8]) -> Vec<u8> {
    let values = bytes.as_chunks().0.iter();
    values
        .flat_map(|value| f16::from_f32(f32::from_le_bytes(*value)).to_le_bytes())
        .collect()
}

/// A rank's page store, if attached.
#[derive(Debug, Default)]
pub struct PersistentCache(Option<Box<dyn PageStore>>);

impl PersistentCache {
    /// A cache that persists its pages in `store`.
    pub const fn in_store(store: Box<dyn PageStore>) -> Self {
        Self(Some(store))
    }

    /// Store of the pages, if any.
    pub fn store(&self) -> Option<&dyn PageStore> {
        self.0.as_deref()
    }

    /// [`Compute::persist_pages`](crate::Compute::persist_pages).
    pub fn keep(
        &mut self,
        links: Option<&Links>,
        cache: &dyn PageMemory,
        pages: &[PersistedPage],
    ) -> Result<(), Error> {
        announce_pages(links, KEEP, pages)?;
        self.put(cache, pages)
    }

    /// [`Compute::restore_pages`](crate::Compute::restore_pages).
    pub fn recall(
        &mut self,
        links: Option<&Links>,
        cache: &mut dyn PageMemory,
        pages: &[PersistedPage],
    ) -> Result<usize, Error> {
        announce_pages(links, RECALL, pages)?;
        let own = self.get(cache, pages)?;
        let all = match links {
            Some(links) => links.fewest_recalled(own)?,
            None => own,
        };
        if let Some(store) = &mut self.0 {
            pages[all..].iter().for_each(|page| store.forget(page));
        }
        Ok(all)
    }

    /// Handles a message of the leader; `false` if `words` are no such message.
    pub fn handle_message(
        &mut self,
        (links, leader): (&Links, Rank),
        words: &[u32],
        cache: &mut dyn PageMemory,
    ) -> Result<bool, Error> {
        match words[1] {
            KEEP => self.put(cache, &read(words, &cache.pool_pages())?)?,
            RECALL => {
                let pages = read(words, &cache.pool_pages())?;
                let own = self.get(cache, &pages)?;
                links.answer_recall(leader, own)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn put(&mut self, cache: &dyn PageMemory, pages: &[PersistedPage]) -> Result<(), Error> {
        let Some(store) = &mut self.0 else {
            return Ok(());
        };
        let kv = store.kv_type();
        for page in pages {
            cache.read_page(page, kv, &mut |bytes| store.put(page, bytes))?;
        }
        Ok(())
    }

    /// How many pages, from the first, were read.
    fn get(&mut self, cache: &mut dyn PageMemory, pages: &[PersistedPage]) -> Result<usize, Error> {
        let Some(store) = &mut self.0 else {
            return Ok(0);
        };
        let kv = store.kv_type();
        for (n, page) in pages.iter().enumerate() {
            if !cache.write_page(page, kv, &mut |into| store.get(page, into))? {
                return Ok(n);
            }
        }
        Ok(pages.len())
    }
}

/// Whether `words` are such a message instead of a plan.
pub(crate) const fn is_message(words: &[u32]) -> bool {
    matches!(words[1], KEEP | RECALL)
}

/// Sends the page list to the other ranks of a split model.
fn announce_pages(links: Option<&Links>, kind: u32, pages: &[PersistedPage]) -> Result<(), Error> {
    match links {
        Some(links) => links.announce_ahead(&write(kind, pages)),
        None => Ok(()),
    }
}

fn write(kind: u32, pages: &[PersistedPage]) -> Vec<u32> {
    let mut words = vec![0, kind, pages.len() as u32, 0];
    for page in pages {
        words.extend(page.name.0);
        words.extend([page.index, page.pool, page.page]);
    }
    let len = words.len().max(HEADER_WORDS);
    words.resize(len, 0);
    words[0] = len as u32;
    words
}

/// Parses and checks a page list. `pools` has the pages of each pool.
fn read(words: &[u32], pools: &[usize]) -> Result<Vec<PersistedPage>, Error> {
    let n = below("kept pages", words[2], KEPT_MAX + 1)?;
    below("words in use", (FIRST + n * EACH) as u32, words.len() + 1)?;
    let page = |words: &[u32]| {
        let (name, rest) = words.split_at(8);
        let pool = below("pool of a kept page", rest[1], pools.len())?;
        below("kept page", rest[2], pools[pool])?;
        Ok(PersistedPage {
            name: PageName(name.try_into().expect("eight words")),
            index: rest[0],
            pool: rest[1],
            page: rest[2],
        })
    };
    words[FIRST..]
        .chunks_exact(EACH)
        .take(n)
        .map(page)
        .collect()
}

const fn below(what: &'static str, got: u32, end: usize) -> Result<usize, Error> {
    let (got, limit) = (got as usize, end.saturating_sub(1));
    if got < end {
        return Ok(got);
    }
    Err(Error::Plan { what, got, limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(i: u32) -> PersistedPage {
        PersistedPage {
            name: PageName([i; 8]),
            index: i,
            pool: i % 2,
            page: i % 5,
        }
    }

    #[test]
    fn messages_say_what_was_written() {
        for n in [0, 1, 22, 23, 100] {
            let pages: Vec<PersistedPage> = (0..n).map(page).collect();
            let words = write(RECALL, &pages);
            assert_eq!((words[0] as usize, words[1]), (words.len(), RECALL));
            assert_eq!(read(&words, &[5, 5]).unwrap(), pages);
        }
    }

    #[test]
    fn hostile_messages_are_refused() {
        let words = write(KEEP, &[page(1), page(4)]);
        let refused = |at: usize, value: u32, pools: &[usize], what: &str| {
            let mut words = words.clone();
            words[at] = value;
            let error = read(&words, pools).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        refused(2, u32::MAX, &[5, 5], "kept pages");
        refused(2, 4000, &[5, 5], "words in use");
        refused(FIRST + 9, 2, &[5, 5], "pool");
        refused(FIRST + 10, 5, &[5, 5], "kept page");
        refused(0, 0, &[5], "pool");
        refused(0, 0, &[5, 0], "kept page");
    }
}
