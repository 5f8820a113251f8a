//! Lookup by name in a list that keeps its order.

/// Positions of a list, sorted by name.
///
/// Costs one `usize` per name, and unlike a hash map it has no order that could leak. Building is
/// O(n log n), so a file with a million hostile names stays cheap.
#[derive(Clone, Debug, Default)]
pub(crate) struct NameIndex {
    sorted: Vec<usize>,
}

impl NameIndex {
    /// Indexes `items`; `Err` is the position of an item whose name occurs earlier as well.
    pub(crate) fn new<T>(items: &[T], name: impl Fn(&T) -> &str) -> Result<Self, usize> {
        let mut sorted: Vec<usize> = (0..items.len()).collect();
        sorted.sort_unstable_by_key(|&i| (name(&items[i]), i));
        match sorted
            .windows(2)
            .find(|w| name(&items[w[0]]) == name(&items[w[1]]))
        {
            Some(pair) => Err(pair[1]),
            None => Ok(Self { sorted }),
        }
    }

    /// The item called `wanted` in the list that the index was made of.
    pub(crate) fn find<'a, T>(
        &self,
        items: &'a [T],
        name: impl Fn(&T) -> &str,
        wanted: &str,
    ) -> Option<&'a T> {
        let at = self
            .sorted
            .binary_search_by(|&i| name(&items[i]).cmp(wanted))
            .ok()?;
        Some(&items[self.sorted[at]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name<'a>(s: &'a &'static str) -> &'a str {
        s
    }

    #[test]
    fn finds_every_name_and_no_other() {
        let items = ["b", "", "a", "ab"];
        let index = NameIndex::new(&items, name).unwrap();
        for item in &items {
            assert_eq!(index.find(&items, name, item), Some(item));
        }
        assert_eq!(index.find(&items, name, "c"), None);
        assert!(NameIndex::default().find(&items[..0], name, "a").is_none());
    }

    #[test]
    fn names_the_later_duplicate() {
        assert_eq!(NameIndex::new(&["x", "y", "x"], name).unwrap_err(), 2);
    }
}
