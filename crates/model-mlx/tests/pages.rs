//! Pages of prompts between classes: keys and values converted, and the logits near.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::common::tiny::Tiny;
use crate::common::{golden, kernels, load};
use crate::{Windowed, apart, furthest, mlx};
use paceline_base::{BlockType, KernelClass};
use paceline_model::{ModelFamily, PageName, PageStore, PersistedPage};
use paceline_tensor::{KvType, PAGE};

/// A store of pages in memory, whose clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Shelf {
    pub(crate) pages: Arc<Mutex<BTreeMap<PageKey, Vec<u8>>>>,
    pub(crate) kv: Option<KvType>,
}

/// Index and pool of a page.
pub(crate) type PageKey = (u32, u32);

impl PageStore for Shelf {
    fn name(&self, before: &PageName, _tokens: &[u32]) -> PageName {
        *before
    }

    fn has(&self, _page: &PersistedPage) -> bool {
        true
    }

    fn put(&mut self, page: &PersistedPage, bytes: &[u8]) {
        let mut pages = self.pages.lock().unwrap();
        pages.insert((page.index, page.pool), bytes.to_vec());
    }

    fn get(&mut self, page: &PersistedPage, into: &mut [u8]) -> bool {
        into.copy_from_slice(&self.pages.lock().unwrap()[&(page.index, page.pool)]);
        true
    }

    fn forget(&mut self, _page: &PersistedPage) {}

    fn kv_type(&self) -> Option<KvType> {
        self.kv
    }
}

fn first_pages(sequence: &Windowed, count: usize) -> Vec<PersistedPage> {
    let windows = sequence
        .kinds
        .iter()
        .map(|it| (it.first_page, &it.pages[..]));
    let pools = std::iter::once((0, &sequence.pages[..])).chain(windows);
    let of_pool = |(pool, (first, pages)): (usize, (usize, &[u32]))| {
        let pages = pages.iter().zip(first..count);
        let page = |(page, index): (&u32, usize)| PersistedPage {
            name: PageName::default(),
            index: index as u32,
            pool: pool as u32,
            page: *page,
        };
        pages.map(page).collect::<Vec<_>>()
    };
    pools.enumerate().flat_map(of_pool).collect()
}

/// Models, and a prompt of each a little longer than a page. The last has index rows behind its
/// keys and values.
fn prompts(dir: &Path) -> Vec<(&'static str, PathBuf, Vec<u32>)> {
    let tiny = |family: ModelFamily| {
        let path = dir.join(family.name());
        let tiny = Tiny::new(family, BlockType::Q8_0);
        tiny.write(&path);
        (family.name(), path, tiny.tokens(PAGE + 3, 7))
    };
    let blocks = "minimax-m3-blocks-bf16";
    let tokens = (0..PAGE as u32 + 3).map(|i| i * 37 % 300).collect();
    vec![
        tiny(ModelFamily::Llama),
        tiny(ModelFamily::Gemma3),
        tiny(ModelFamily::DeepSeek),
        (blocks, golden(&format!("hf/{blocks}")), tokens),
    ]
}

/// A prompt whose first page another class has read: the logits are those of the class that goes
/// on, within what the classes differ. Of the same class they have the same bits.
#[test]
fn pages_of_a_prompt_go_from_class_to_class() {
    use KernelClass::{Cpu, CpuF32, Mlx, MlxF32};
    let Some(library) = apart("pages::pages_of_a_prompt_go_from_class_to_class") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for (name, path, tokens) in prompts(dir.path()) {
        let is_first = name == ModelFamily::Llama.name();
        // Without a type, pages have that of the cache.
        let mut own_bytes: Vec<usize> = Vec::new();
        let begun = |class: KernelClass, kv| {
            let model = match class.is_mlx() {
                true => mlx(&library, &path, class),
                false => Arc::new(load(&path, class, &kernels())),
            };
            let mut own = Windowed::new(model, PAGE, (tokens.len(), 1));
            own.pages.reverse();
            let pages = Arc::default();
            let shelf = Shelf { pages, kv };
            own.compute.attach(Box::new(shelf.clone()));
            (own, shelf)
        };
        for (from, to, kv, tolerance) in [
            (MlxF32, CpuF32, Some(KvType::F32), 1e-4),
            (CpuF32, MlxF32, Some(KvType::F32), 1e-4),
            (MlxF32, MlxF32, None, 0.0),
            (Mlx, Mlx, None, 0.0),
            (MlxF32, Cpu, Some(KvType::F16), 5e-3),
            (Cpu, MlxF32, Some(KvType::F16), 5e-3),
            (CpuF32, Cpu, Some(KvType::F32), 5e-3),
            (Cpu, CpuF32, Some(KvType::F16), 5e-3),
        ]
        .into_iter()
        .take(if is_first { 8 } else { 2 })
        {
            let (mut giver, given) = begun(from, kv);
            giver.step(&tokens[..PAGE], 0);
            let pages = first_pages(&giver, 1);
            giver.compute.persist_pages(&pages).unwrap();
            if kv.is_none() {
                let bytes = given.pages.lock().unwrap().values().map(Vec::len).sum();
                own_bytes.push(bytes);
            }
            let (mut taker, taken) = begun(to, kv);
            let expected = {
                taker.step(&tokens[..PAGE], 0);
                taker.step(&tokens[PAGE..], PAGE)
            };
            *taken.pages.lock().unwrap() = std::mem::take(&mut given.pages.lock().unwrap());
            let pages = first_pages(&taker, 1);
            assert_eq!(taker.compute.restore_pages(&pages).unwrap(), pages.len());
            let got = taker.step(&tokens[PAGE..], PAGE);
            let far = furthest(&got, &expected);
            println!("{name} {from}>{to}: {far:.1e}");
            assert!(far <= tolerance, "{name} {from}>{to}: {far:.1e}");
            assert!(from == to || far > 0.0, "{name} {from}>{to}: its own pages");
        }
        if let [f32_bytes, f16_bytes] = own_bytes[..] {
            assert_eq!(f32_bytes, 2 * f16_bytes);
        }
    }
}
