//! Whose sequence is computed next, where several clients share an engine.
//!
//! Max-min fairness over places: a place that is free goes to the client that has the fewest, and
//! where none is free the client with the most gives one up to a client that has two fewer. So no
//! number of requests of one client keeps another's waiting, and a client that is alone has all
//! places. A client that has given one up keeps one at least, for its oldest sequence: each ends.

use std::collections::HashMap;

/// Places of each client, from the clients of all running sequences.
fn places(running: &[u64]) -> HashMap<u64, usize> {
    running.iter().fold(HashMap::new(), |mut places, client| {
        *places.entry(*client).or_default() += 1;
        places
    })
}

/// Which of the `queued` sequences is next, by their clients: the first of the client that has the
/// fewest of the `running` ones.
pub(crate) fn next(running: &[u64], queued: impl Iterator<Item = u64>) -> Option<usize> {
    let places = places(running);
    let has = |client: &u64| places.get(client).copied().unwrap_or(0);
    let (at, _) = queued.enumerate().min_by_key(|(_, client)| has(client))?;
    Some(at)
}

/// Which of the `running` sequences, oldest first, gives its place to one of `client`: the youngest
/// of the client with the most; `None` while that would not be fairer.
pub(crate) fn gives_way(running: &[u64], client: u64) -> Option<usize> {
    let places = places(running);
    let most = places.values().copied().max()?;
    let own = places.get(&client).copied().unwrap_or(0);
    let is_of_most = |other: &u64| places.get(other) == Some(&most);
    (most >= own + 2).then(|| running.iter().rposition(is_of_most))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_alone_has_all_places_in_order() {
        assert_eq!(next(&[7, 7, 7], [7, 7].into_iter()), Some(0));
        assert_eq!(gives_way(&[7, 7, 7, 7], 7), None);
        assert_eq!(next(&[7], std::iter::empty()), None);
        assert_eq!(gives_way(&[], 7), None);
    }

    #[test]
    fn who_has_the_fewest_is_next_and_who_has_the_most_gives_way() {
        assert_eq!(next(&[1, 1, 2], [1, 1, 2, 3, 3].into_iter()), Some(3));
        assert_eq!(next(&[1, 2], [2, 1].into_iter()), Some(0));
        assert_eq!(gives_way(&[1, 1, 2, 1], 2), Some(3));
        assert_eq!(gives_way(&[1, 1, 2, 2], 3), Some(3));
        assert_eq!(gives_way(&[1, 1, 2], 2), None);
        assert_eq!(gives_way(&[1, 2, 3], 4), None);
    }
}
