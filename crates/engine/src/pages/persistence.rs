//! Persisting and restoring pages: which parts of a page exist, and allocation for restored ones.

use paceline_tensor::PAGE;

use super::window::SequenceWindow;
use super::{Pages, SequencePages};

impl Pages {
    /// Parts of cached page `index` of a sequence to persist, as pools and page numbers. Window
    /// pages count while the sequence has them; states only if they also stay in the cache. The
    /// sequence began with `prompt` tokens.
    pub(crate) fn parts(
        &self,
        owned: &SequencePages,
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

    /// Parts that a sequence with only cached pages needs to continue after page `end`: pools and
    /// page indices, full-attention pages first.
    pub(crate) fn missing_parts(
        &self,
        owned: &SequencePages,
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

    /// Allocates the pages that a sequence with only cached pages needs to continue after page
    /// `end`. `false` if there are not enough; the sequence has lost window pages then.
    pub(crate) fn make_room(&mut self, owned: &mut SequencePages, end: usize) -> bool {
        owned
            .windows
            .resize_with(self.windows.len(), SequenceWindow::default);
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

impl SequencePages {
    /// Its page at `index` of a pool, if present.
    pub(crate) fn part(&self, (pool, index): (u32, usize)) -> Option<u32> {
        match pool.checked_sub(1) {
            None => self.pages.get(index).copied(),
            Some(window) => self.windows.get(window as usize)?.at(index),
        }
    }
}
