//! Sets of times: sorted intervals that do not touch.

/// Start and end in nanoseconds.
pub(super) type Interval = (i64, i64);

/// A set of times, as sorted non-empty intervals with gaps between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Moments(Vec<Interval>);

impl Moments {
    /// The union of `intervals`. Cost: a sort.
    pub(super) fn new(intervals: impl IntoIterator<Item = Interval>) -> Self {
        let mut all: Vec<Interval> = intervals.into_iter().filter(|(a, b)| a < b).collect();
        all.sort_unstable();
        let mut out: Vec<Interval> = Vec::with_capacity(all.len());
        for (begin, end) in all {
            match out.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                _ => out.push((begin, end)),
            }
        }
        Self(out)
    }

    /// The intervals, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Interval> + '_ {
        self.0.iter().copied()
    }

    /// Total length in nanoseconds.
    pub(super) fn total(&self) -> i64 {
        self.0.iter().map(|(a, b)| b - a).sum()
    }

    /// The union.
    pub(super) fn or(&self, other: &Self) -> Self {
        Self::new(self.iter().chain(other.iter()))
    }

    /// The difference. Cost: one pass over both.
    pub(super) fn without(&self, other: &Self) -> Self {
        let mut out = Vec::with_capacity(self.0.len());
        let mut next = 0;
        for (mut begin, end) in self.iter() {
            while next < other.0.len() && other.0[next].1 <= begin {
                next += 1;
            }
            let mut i = next;
            while i < other.0.len() && other.0[i].0 < end {
                let (from, to) = other.0[i];
                if begin < from {
                    out.push((begin, from));
                }
                begin = begin.max(to);
                i += 1;
            }
            if begin < end {
                out.push((begin, end));
            }
        }
        Self(out)
    }

    /// The intersection.
    pub(super) fn and(&self, other: &Self) -> Self {
        self.without(&self.without(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(intervals: &[Interval]) -> Moments {
        Moments::new(intervals.iter().copied())
    }

    #[test]
    fn intervals_are_joined_and_empty_ones_dropped() {
        let joined = of(&[(5, 7), (0, 2), (2, 4), (6, 9), (3, 3), (11, 10)]);
        assert_eq!(joined, of(&[(0, 4), (5, 9)]));
        assert_eq!(joined.total(), 8);
    }

    /// Compares with sets of integers, for every pair of sets of up to eight numbers.
    #[test]
    fn sets_are_those_of_their_moments() {
        let set =
            |bits: u32| Moments::new((0..8).filter(|i| bits >> i & 1 == 1).map(|i| (i, i + 1)));
        for a in 0..256 {
            for b in 0..256 {
                assert_eq!(set(a).or(&set(b)), set(a | b), "{a} {b}");
                assert_eq!(set(a).without(&set(b)), set(a & !b), "{a} {b}");
                assert_eq!(set(a).and(&set(b)), set(a & b), "{a} {b}");
            }
        }
    }
}
