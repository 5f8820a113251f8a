//! Finds a ring over all hosts.
//!
//! Up to [`HOSTS_EXACT`] hosts the search is exact. It runs over sets of visited hosts, not over
//! paths, so that its time does not depend on the cables. Beyond that it searches paths, up to a
//! number of steps.

use super::{Error, Graph};

/// Most hosts of an exact search: 2^16 sets of 16 hosts, a byte each.
pub const HOSTS_EXACT: usize = 16;

/// Step limit of the search among more hosts, a second or so.
const STEPS_MAX: u64 = 20_000_000;

/// Cost of an impossible path.
const NEVER: u8 = u8::MAX;

/// A ring over all hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Hosts in order, beginning with host 0.
    pub order: Vec<usize>,
    /// Fewest cables between two neighbours.
    pub cables: u32,
}

/// The ring with the most cables between each two neighbours; among those, the one whose order
/// comes first. `None` if there is none. Two hosts with a cable are a ring.
///
/// MLX keeps the first ring that it finds of the same hosts, which may have fewer cables.
///
/// # Errors
/// [`Error::SearchTooLong`] with more than [`HOSTS_EXACT`] hosts.
pub fn best_ring(graph: &Graph) -> Result<Option<Ring>, Error> {
    let counts = graph.counts();
    let most = counts.iter().flatten().copied().max().unwrap_or(0);
    for cables in (1..=most).rev() {
        let connected = |a: usize, b: usize| counts[a][b] >= cables;
        if let Some(order) = round(counts.len(), &connected)? {
            return Ok(Some(Ring { order, cables }));
        }
    }
    Ok(None)
}

/// The fewest cables missing for a ring; empty with more than [`HOSTS_EXACT`] hosts.
pub fn missing_for_ring(graph: &Graph) -> Vec<(usize, usize)> {
    let counts = graph.counts();
    let count = counts.len();
    if !(2..=HOSTS_EXACT).contains(&count) {
        return Vec::new();
    }
    let cost = |a: usize, b: usize| u8::from(counts[a][b] == 0);
    let (_, order) = cheapest(count, &cost);
    let steps = (0..count).map(|at| (order[at], order[(at + 1) % count]));
    let mut missing: Vec<_> = steps.filter(|(a, b)| counts[*a][*b] == 0).collect();
    missing.truncate(if count == 2 { 1 } else { missing.len() });
    missing
        .into_iter()
        .map(|(a, b)| (a.min(b), a.max(b)))
        .collect()
}

fn round(
    count: usize,
    connected: &dyn Fn(usize, usize) -> bool,
) -> Result<Option<Vec<usize>>, Error> {
    if count < 2 {
        return Ok(None);
    }
    if count > HOSTS_EXACT {
        return Walk::new(count, connected).search();
    }
    let cost = |a, b| if connected(a, b) { 0 } else { NEVER };
    let (total, order) = cheapest(count, &cost);
    Ok((total == 0).then_some(order))
}

/// The cheapest ring of `count` hosts from host 0, 2 to [`HOSTS_EXACT`] of them, and its cost, at
/// most [`NEVER`]. Among equal rings, the one whose order comes first. `cost` is symmetric.
///
/// `rest[visited][at]` is the cost of the path from `at` through all unvisited hosts, and back to
/// host 0 (Held and Karp, 1962).
fn cheapest(count: usize, cost: &dyn Fn(usize, usize) -> u8) -> (u8, Vec<usize>) {
    let all = (1_usize << count) - 1;
    let mut rest = vec![[NEVER; HOSTS_EXACT]; all + 1];
    for (at, rest) in rest[all].iter_mut().enumerate().take(count) {
        *rest = cost(at, 0);
    }
    let others = |visited: usize| (0..count).filter(move |host| visited & (1 << host) == 0);
    for visited in (1..all).rev().filter(|visited| visited & 1 == 1) {
        for at in (0..count).filter(|at| visited & (1 << at) != 0) {
            let ways = others(visited)
                .map(|next| cost(at, next).saturating_add(rest[visited | 1 << next][next]));
            rest[visited][at] = ways.min().unwrap_or(NEVER);
        }
    }
    let (mut order, mut visited) = (vec![0], 1);
    while order.len() < count {
        let at = order[order.len() - 1];
        let way = |next: &usize| cost(at, *next).saturating_add(rest[visited | 1 << next][*next]);
        let next = others(visited)
            .min_by_key(way)
            .expect("some are not visited");
        visited |= 1 << next;
        order.push(next);
    }
    (rest[1][0], order)
}

/// A search along paths.
struct Walk<'a> {
    connected: &'a dyn Fn(usize, usize) -> bool,
    path: Vec<usize>,
    visited: Vec<bool>,
    steps: u64,
}

impl<'a> Walk<'a> {
    fn new(count: usize, connected: &'a dyn Fn(usize, usize) -> bool) -> Self {
        let mut visited = vec![false; count];
        visited[0] = true;
        Self {
            connected,
            path: vec![0],
            visited,
            steps: 0,
        }
    }

    fn search(mut self) -> Result<Option<Vec<usize>>, Error> {
        let count = self.visited.len();
        let mut next = 0; // the host to try after the last of the path
        loop {
            self.steps += 1;
            if self.steps > STEPS_MAX {
                let steps = STEPS_MAX;
                return Err(Error::SearchTooLong { count, steps });
            }
            let at = self.path[self.path.len() - 1];
            if self.path.len() == count && (self.connected)(at, 0) {
                return Ok(Some(self.path));
            }
            let mut further = next..count;
            let found = further.find(|host| !self.visited[*host] && (self.connected)(at, *host));
            if let Some(host) = found {
                self.visited[host] = true;
                self.path.push(host);
                next = 0;
            } else {
                self.path.pop();
                self.visited[at] = false;
                if self.path.is_empty() {
                    return Ok(None);
                }
                next = at + 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::graph::tests::graph;
    use super::*;

    fn ring(hosts: usize, cables: &[(usize, usize)]) -> Option<(Vec<usize>, u32)> {
        let found = best_ring(&graph(hosts, cables)).unwrap();
        found.map(|ring| (ring.order, ring.cables))
    }

    #[test]
    fn small_rings() {
        assert_eq!(ring(1, &[(0, 0)]), None);
        assert_eq!(ring(2, &[]), None);
        assert_eq!(ring(2, &[(0, 1), (1, 0)]), Some((vec![0, 1], 2)));
        assert_eq!(ring(3, &[(0, 1), (1, 2)]), None);
        assert_eq!(ring(3, &[(0, 1), (1, 2), (2, 0)]), Some((vec![0, 1, 2], 1)));
        let square = [(0, 2), (2, 1), (1, 3), (3, 0)];
        assert_eq!(ring(4, &square), Some((vec![0, 2, 1, 3], 1)));
    }

    /// A full mesh of single cables, doubled on 0-2-1-3: the first ring that a search meets,
    /// 0-1-2-3, has one cable.
    #[test]
    fn the_ring_with_most_cables_is_taken() {
        let mesh = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
        assert_eq!(ring(4, &mesh), Some((vec![0, 1, 2, 3], 1)));
        let doubled = [&mesh[..], &[(0, 2), (2, 1), (1, 3), (3, 0)]].concat();
        assert_eq!(ring(4, &doubled), Some((vec![0, 2, 1, 3], 2)));
    }

    /// MLX's search follows all 15! / 2 paths before it gives up.
    #[test]
    fn a_mesh_of_sixteen_takes_no_time() {
        let others = (1..15).flat_map(|a| (a + 1..15).map(move |b| (a, b)));
        let mut cables: Vec<_> = others.chain([(0, 1), (15, 1)]).collect();
        let start = std::time::Instant::now();
        assert_eq!(ring(16, &cables), None, "0 and 15 both hang on 1");
        assert_eq!(missing_for_ring(&graph(16, &cables)).len(), 2);
        cables.push((0, 15));
        assert_eq!(ring(16, &cables), None, "1 would be passed twice");
        assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    }

    #[test]
    fn more_hosts_are_searched_up_to_a_limit() {
        let cables: Vec<_> = (0..40).map(|host| (host, (host + 1) % 40)).collect();
        let found = ring(40, &cables).unwrap();
        assert_eq!(found, ((0..40).collect(), 1));
        assert_eq!(ring(40, &cables[1..]), None);
    }

    #[test]
    fn missing_cables_are_named() {
        let missing = |hosts, cables: &[(usize, usize)]| missing_for_ring(&graph(hosts, cables));
        assert_eq!(missing(2, &[]), [(0, 1)]);
        assert_eq!(missing(4, &[(0, 1), (1, 2), (2, 3)]), [(0, 3)]);
        assert_eq!(missing(4, &[(0, 1), (0, 2), (0, 3)]).len(), 2);
        assert_eq!(missing(3, &[(0, 1), (1, 2), (2, 0)]), []);
    }

    /// All orders of hosts 1 and following, lexicographically.
    fn orders(count: usize) -> Vec<Vec<usize>> {
        let mut all = vec![vec![0]];
        for _ in 1..count {
            let longer = all.iter().flat_map(|order| {
                let rest = (0..count).filter(|host| !order.contains(host));
                rest.map(|host| [&order[..], &[host]].concat())
            });
            all = longer.collect();
        }
        all
    }

    proptest! {
        #[test]
        fn nothing_better_is_overlooked(
            count in 2_usize..7,
            cables in prop::collection::vec((0_usize..6, 0_usize..6), 0..20),
        ) {
            let fits = |(a, b): &(usize, usize)| *a < count && *b < count;
            let cables: Vec<_> = cables.into_iter().filter(fits).collect();
            let counts = graph(count, &cables).counts();
            let width = |order: &Vec<usize>| {
                let steps = (0..count).map(|at| counts[order[at]][order[(at + 1) % count]]);
                steps.min().unwrap_or(0)
            };
            let mut best: Option<(Vec<usize>, u32)> = None;
            for order in orders(count) {
                let width = width(&order);
                if width > best.as_ref().map_or(0, |best| best.1) {
                    best = Some((order, width));
                }
            }
            prop_assert_eq!(ring(count, &cables), best);
        }

        #[test]
        fn the_long_search_finds_the_same(
            count in 2_usize..8,
            cables in prop::collection::vec((0_usize..8, 0_usize..8), 0..24),
        ) {
            let fits = |(a, b): &(usize, usize)| *a < count && *b < count;
            let cables: Vec<_> = cables.into_iter().filter(fits).collect();
            let counts = graph(count, &cables).counts();
            let connected = |a: usize, b: usize| counts[a][b] > 0;
            let walked = Walk::new(count, &connected).search().unwrap();
            prop_assert_eq!(walked, round(count, &connected).unwrap());
        }
    }
}
