//! Which pages of the cache are free.

/// Pages that no sequence owns. A page is given out once until it comes back.
#[derive(Clone, Debug)]
pub(crate) struct FreePages {
    free: Vec<u32>,
}

impl FreePages {
    /// All of `pages` pages free; low numbers are given out first.
    pub(crate) fn new(pages: usize) -> Self {
        let pages = u32::try_from(pages).expect("fewer than 2^32 pages");
        Self {
            free: (0..pages).rev().collect(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.free.len()
    }

    /// The free pages, in no order.
    #[cfg(test)]
    pub(crate) fn pages(&self) -> &[u32] {
        &self.free
    }

    /// Grows `owned` to `pages` pages; `false`, with nothing taken, when there are not enough.
    pub(crate) fn grow(&mut self, owned: &mut Vec<u32>, pages: usize) -> bool {
        let more = pages.saturating_sub(owned.len());
        if more > self.free.len() {
            return false;
        }
        owned.extend(self.free.drain(self.free.len() - more..).rev());
        true
    }

    /// Takes all pages back.
    pub(crate) fn release(&mut self, owned: &mut Vec<u32>) {
        self.free.extend(owned.drain(..).rev());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_one_owner() {
        let mut free = FreePages::new(5);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(free.grow(&mut a, 2) && free.grow(&mut b, 3));
        assert_eq!((a.clone(), b.clone()), (vec![0, 1], vec![2, 3, 4]));
        assert!(!free.grow(&mut a, 3), "none left");
        assert_eq!(a.len(), 2, "nothing was taken");
        free.release(&mut b);
        assert!(free.grow(&mut a, 5) && free.len() == 0);
        let mut all = a;
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
    }
}
