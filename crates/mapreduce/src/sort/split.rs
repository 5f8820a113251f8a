//! Splitters, and keys cut into the buckets between them.
//!
//! ```text
//! splitters        s0            s1
//! bucket      0     1      2      3      4
//! keys      < s0  == s0  between == s1  > s1
//! ```

use super::number;

/// Cells that the range of the splitters is cut into: many times the splitters of most sorts, and
/// their table stays in a first-level cache.
const CELLS: usize = 4096;

/// Set in a cell that has splitters in it.
const MIXED: u16 = 1 << 15;

/// Splitters, and a table that finds the bucket of most keys without comparing.
#[derive(Debug)]
pub(crate) struct Splitters {
    keys: Vec<u64>,
    /// Lowest key of cell 0.
    low: u64,
    /// Cells have `2^shift` keys each.
    shift: u32,
    /// Number of splitters below each cell, and [`MIXED`] if there are some in it. The first entry
    /// is for keys below all cells, the last for those above.
    cells: Vec<u16>,
}

impl Splitters {
    /// `keys` are ascending, all different, and fewer than 2^15.
    pub(crate) fn new(keys: &[u64]) -> Self {
        let (low, high) = (keys.first().copied(), keys.last().copied());
        let (low, high) = (low.unwrap_or(0), high.unwrap_or(0));
        let bits = u64::BITS - (high - low).leading_zeros();
        let shift = bits.saturating_sub(CELLS.ilog2());
        let mut cells = vec![0; CELLS + 2];
        let mut below = 0;
        for (cell, entry) in cells[1..=CELLS].iter_mut().enumerate() {
            let is_in = |key: &&u64| (**key - low) >> shift <= cell as u64;
            let inside = keys[below..].iter().take_while(is_in).count();
            *entry = below as u16 | if inside > 0 { MIXED } else { 0 };
            below += inside;
        }
        cells[CELLS + 1] = below as u16;
        Self {
            keys: keys.to_vec(),
            low,
            shift,
            cells,
        }
    }

    #[inline(always)]
    fn bucket(&self, key: u64) -> u16 {
        let cell = match key.checked_sub(self.low) {
            Some(above) => (above >> self.shift).min(CELLS as u64) as usize + 1,
            None => 0,
        };
        match self.cells[cell] {
            mixed if mixed & MIXED != 0 => self.search(key),
            below => 2 * below,
        }
    }

    fn search(&self, key: u64) -> u16 {
        match self.keys.binary_search(&key) {
            Ok(at) => 2 * at as u16 + 1,
            Err(at) => 2 * at as u16,
        }
    }

    /// Number of keys in each bucket, and the keys that are not equal to a splitter, bucket by
    /// bucket. Cost: two reads and a write of each key.
    pub(crate) fn partition<const N: usize>(&self, keys: Vec<[u8; N]>) -> (Vec<u64>, Vec<[u8; N]>) {
        if self.keys.is_empty() {
            return (vec![keys.len() as u64], keys);
        }
        let mut counts = vec![0; 2 * self.keys.len() + 1];
        let mut buckets = Vec::with_capacity(keys.len());
        for key in &keys {
            let bucket = self.bucket(number(*key));
            counts[usize::from(bucket)] += 1;
            buckets.push(bucket);
        }
        let mut next = vec![0; counts.len()];
        let mut sum = 0;
        for (next, count) in next.iter_mut().zip(&counts).step_by(2) {
            *next = sum;
            sum += *count as usize;
        }
        let mut cut = vec![[0; N]; sum];
        for (key, bucket) in keys.iter().zip(&buckets) {
            if bucket % 2 == 0 {
                let place = &mut next[usize::from(*bucket)];
                cut[*place] = *key;
                *place += 1;
            }
        }
        (counts, cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_between_and_at_splitters() {
        for splitters in [
            &[][..],
            &[5],
            &[0, 3, 4, 250, 255],
            &[1, 2, 3, 4, 5, 6, 7],
            &[10, u64::MAX],
        ] {
            let all = Splitters::new(splitters);
            for count in [0, 1, 15, 16, 300u64] {
                let numbers = || (0..count).map(|i| i * 37 % 256);
                let keys = numbers().map(|number| [number as u8]).collect();
                let (counts, cut) = all.partition(keys);
                let bucket = |number: &u64| {
                    let below = splitters.iter().filter(|s| **s < *number).count();
                    2 * below + usize::from(splitters.contains(number))
                };
                let mut expected: Vec<u64> = numbers().collect();
                expected.sort_by_key(bucket);
                for (i, got) in counts.iter().enumerate() {
                    let those = expected.iter().filter(|n| bucket(n) == i).count();
                    assert_eq!(*got, those as u64, "bucket {i} of {splitters:?}");
                }
                expected.retain(|number| bucket(number) % 2 == 0);
                assert!(cut.iter().map(|key| u64::from(key[0])).eq(expected));
            }
        }
        let (counts, cut) = Splitters::new(&[10, u64::MAX]).partition(vec![[255; 8], [10; 8]]);
        assert_eq!((counts, cut), (vec![0, 0, 1, 1, 0], vec![[10; 8]]));
    }
}
