//! Finds the ring order over the existing cables.
//!
//! JACCL requires a mesh of at most eight ranks, or cables from every rank to the next in rank
//! order. Here the ring is searched: the order with the fewest adjacent pairs without a cable, none
//! if possible. Those pairs, and all non-ring traffic without a cable, use TCP.

use super::matrix::Matrix;

/// Step limit of the search: enough for 10 ranks, some ms. Larger groups get the best ring found by
/// then, which is the first for any sensible cabling.
const STEPS: usize = 500_000;

/// Ranks in the order of a ring with as few pairs without a cable as possible. Among equally good
/// orders the first found, which is the same on all ranks.
pub(super) fn ring(matrix: &Matrix) -> Vec<usize> {
    let size = matrix.size();
    let rank_order: Vec<usize> = (0..size).collect();
    let mut search = RouteSearch {
        matrix,
        path: vec![0],
        used: vec![false; size],
        gaps: 0,
        best_gaps: gaps(matrix, &rank_order),
        best: rank_order,
        steps: STEPS,
    };
    if size > 2 {
        search.used[0] = true;
        search.extend();
    }
    search.best
}

/// Number of adjacent pairs in this ring without a cable.
pub(super) fn gaps(matrix: &Matrix, order: &[usize]) -> usize {
    let next = order.iter().skip(1).chain(order.first());
    let pairs = order.iter().zip(next);
    pairs
        .filter(|(a, b)| a != b && matrix.devices(**a, **b).is_empty())
        .count()
}

/// Depth-first search, cut off where a path is no better than the best ring.
struct RouteSearch<'a> {
    matrix: &'a Matrix,
    path: Vec<usize>,
    used: Vec<bool>,
    gaps: usize,
    best: Vec<usize>,
    best_gaps: usize,
    steps: usize,
}

impl RouteSearch<'_> {
    fn extend(&mut self) {
        let (size, last) = (self.matrix.size(), self.path[self.path.len() - 1]);
        if self.path.len() == size {
            let all = self.gaps + self.gap(last, self.path[0]);
            if all < self.best_gaps {
                (self.best, self.best_gaps) = (self.path.clone(), all);
            }
            return;
        }
        // Cables first: a ring of cables is then found before any other is tried.
        for wanted in 0..2 {
            for next in 0..size {
                let gap = self.gap(last, next);
                let promising = self.gaps + gap < self.best_gaps && self.steps > 0;
                if self.used[next] || gap != wanted || !promising {
                    continue;
                }
                self.steps -= 1;
                (self.used[next], self.gaps) = (true, self.gaps + gap);
                self.path.push(next);
                self.extend();
                self.path.pop();
                (self.used[next], self.gaps) = (false, self.gaps - gap);
            }
        }
    }

    fn gap(&self, a: usize, b: usize) -> usize {
        usize::from(self.matrix.devices(a, b).is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cabled(size: usize, cables: &[(usize, usize)]) -> Matrix {
        let joined = |a, b| cables.contains(&(a, b)) || cables.contains(&(b, a));
        let entry = |a, b| match joined(a, b) {
            true => vec!["x".to_string()],
            false => Vec::new(),
        };
        let row = |a| (0..size).map(|b| entry(a, b)).collect();
        Matrix::new((0..size).map(row).collect()).unwrap()
    }

    #[test]
    fn a_ring_follows_the_cables() {
        type Case<'a> = (usize, &'a [(usize, usize)], &'a [usize], usize);
        let cases: [Case<'_>; 7] = [
            (1, &[], &[0], 0),
            (2, &[(0, 1)], &[0, 1], 0),
            (4, &[(0, 1), (1, 2), (2, 3), (3, 0)], &[0, 1, 2, 3], 0),
            (4, &[(0, 2), (2, 1), (1, 3), (3, 0)], &[0, 2, 1, 3], 0),
            // A line: one pair of its ends has no cable.
            (4, &[(0, 2), (2, 1), (1, 3)], &[0, 2, 1, 3], 1),
            // A star.
            (4, &[(0, 1), (0, 2), (0, 3)], &[0, 1, 2, 3], 2),
            (3, &[], &[0, 1, 2], 3),
        ];
        for (size, cables, order, missing) in cases {
            let matrix = cabled(size, cables);
            let found = ring(&matrix);
            assert_eq!(gaps(&matrix, &found), missing, "{cables:?}: {found:?}");
            assert_eq!(found, order, "{cables:?}");
        }
    }

    #[test]
    fn the_search_ends_for_large_groups() {
        // Two halves without a cable between them: every order has gaps, and none is perfect.
        let pairs = (0..12).flat_map(|a| (0..a).map(move |b| (a, b)));
        let cables: Vec<_> = pairs.filter(|(a, b)| (*a < 6) == (*b < 6)).collect();
        let matrix = cabled(12, &cables);
        assert_eq!(gaps(&matrix, &ring(&matrix)), 2);
    }
}
