//! Pages that are kept outside of the cache: which parts of them there are, and room to have them
//! back.

use paceline_tensor::PAGE;

use super::window::Held;
use super::{Owned, Pages};

impl Pages {
    /// The parts of known page `index` of a sequence that are worth keeping, as pools with page
    /// numbers. Parts of windows are kept as long as the sequence has them, and states only where
    /// they stay in the cache too. The sequence began with `prompt` tokens.
    pub(crate) fn parts(
        &self,
        owned: &Owned,
        index: usize,
        prompt: usize,
    ) -> impl Iterator<Item = (u32, u32)> {
        let all = owned.pages.get(index).map(|page| (0, *page));
        let windows = self.windows.iter().zip(&owned.windows).zip(1..);
        let windows = windows.filter_map(move |((window, held), pool)| {
            let page = held.at(index).filter(|_| window.saves(index, prompt))?;
            Some((pool, page))
        });
        all.into_iter().chain(windows)
    }

    /// The parts that a sequence with known pages only needs to go on behind page `end`. They are
    /// pools with places among its pages, those of all positions first.
    pub(crate) fn missing_parts(
        &self,
        owned: &Owned,
        end: usize,
    ) -> impl Iterator<Item = (u32, usize)> {
        let known = owned.n_known;
        let windows = self
            .windows
            .iter()
            .zip(1..)
            .flat_map(move |(window, pool)| {
                let first = window.first_page(end * PAGE).max(known);
                (first..end).map(move |index| (pool, index))
            });
        (known..end).map(|index| (0, index)).chain(windows)
    }

    /// Gives a sequence that has known pages only room for what it needs to go on behind page
    /// `end`. `false` when there is none, and it has lost pages of windows by then.
    pub(crate) fn make_room(&mut self, owned: &mut Owned, end: usize) -> bool {
        owned.windows.resize_with(self.windows.len(), Held::default);
        for (window, held) in self.windows.iter_mut().zip(&mut owned.windows) {
            let first = window.first_page(end * PAGE);
            while let Some((_, page)) = held.leave(first) {
                self.clock += 1;
                window.release(page, self.clock);
            }
            held.begin_at(first);
        }
        self.grow(owned, end)
    }
}

impl Owned {
    /// Its page at place `index` in a pool, where it has that.
    pub(crate) fn part(&self, (pool, index): (u32, usize)) -> Option<u32> {
        match pool.checked_sub(1) {
            None => self.pages.get(index).copied(),
            Some(window) => self.windows.get(window as usize)?.at(index),
        }
    }
}
