//! Traffic of instances between machines, from differences of the ranks' byte counters.
//!
//! Ranks count bytes since the start of their epoch. A node polls its own instances while a client
//! views it. So the first poll has no rate, nor does one after a long pause.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_serve::MetricSample;
use paceline_worker::CollectiveTraffic;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::label::label;

/// Minimum time between two polls.
const COUNT_EVERY: Duration = Duration::from_millis(900);

/// Age from which a difference is not current.
const STALE: Duration = Duration::from_secs(6);

/// Bytes a second by (source, target) machine names.
pub(super) type PairRates = BTreeMap<(String, String), f64>;

/// Bytes a second from one machine to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LinkRate {
    from: String,
    to: String,
    bytes_s: f64,
}

/// The last counters of this node's instances.
#[derive(Default)]
pub(super) struct TrafficMeter(Mutex<Option<TrafficSample>>);

struct TrafficSample {
    at: Instant,
    counts: Vec<CollectiveTraffic>,
    rates: Vec<LinkRate>,
}

impl TrafficMeter {
    /// Traffic of the instances at `now`; `count` polls their ranks, at most once a second.
    pub(super) fn rates(
        &self,
        now: Instant,
        count: &dyn Fn() -> Vec<CollectiveTraffic>,
    ) -> Vec<LinkRate> {
        let mut last = lock(&self.0);
        let since = last
            .as_ref()
            .map(|last| now.saturating_duration_since(last.at));
        if let (Some(last), Some(since)) = (&*last, since)
            && since < COUNT_EVERY
        {
            return last.rates.clone();
        }
        let counts = count();
        let before = last.take().zip(since).filter(|(_, since)| *since < STALE);
        let rates = before.map_or_else(Vec::new, |(last, since)| {
            rates(&last.counts, &counts, since.as_secs_f64())
        });
        *last = Some(TrafficSample {
            at: now,
            counts,
            rates: rates.clone(),
        });
        rates
    }
}

/// Rates between two polls that are `seconds` apart. Omits new instances, those with a new epoch,
/// and traffic within a machine.
fn rates(before: &[CollectiveTraffic], after: &[CollectiveTraffic], seconds: f64) -> Vec<LinkRate> {
    let mut pairs = PairRates::new();
    for now in after {
        let is_same = |it: &&CollectiveTraffic| it.id == now.id && it.epoch == now.epoch;
        let Some(then) = before.iter().find(is_same) else {
            continue;
        };
        let ends = now.nodes.iter().zip(now.sent.iter().zip(&then.sent));
        for (from, (now_to, then_to)) in ends {
            let to = now.nodes.iter().zip(now_to.iter().zip(then_to));
            for (to, (now, then)) in to.filter(|(to, _)| *to != from) {
                let moved = now.saturating_sub(*then) as f64;
                *pairs.entry((from.clone(), to.clone())).or_default() += moved / seconds;
            }
        }
    }
    let rate = |((from, to), bytes_s)| LinkRate { from, to, bytes_s };
    pairs.into_iter().map(rate).collect()
}

/// Sums the rates of this node and of other nodes' reports.
pub(super) fn sums<'a>(own: Vec<LinkRate>, others: impl Iterator<Item = &'a Value>) -> PairRates {
    let told = others.filter_map(|part| Vec::<LinkRate>::deserialize(&part["traffic"]).ok());
    let mut pairs = PairRates::new();
    for rate in own.into_iter().chain(told.flatten()) {
        *pairs.entry((rate.from, rate.to)).or_default() += rate.bytes_s;
    }
    pairs
}

/// Traffic of this node's instances by pairs of machines, for `/metrics`.
pub(super) fn facts(counts: &[CollectiveTraffic]) -> Vec<MetricSample> {
    let mut pairs: BTreeMap<(&String, &String), u64> = BTreeMap::new();
    for it in counts {
        for (from, sent) in it.nodes.iter().zip(&it.sent) {
            let to = it.nodes.iter().zip(sent);
            for (to, bytes) in to.filter(|(to, _)| *to != from) {
                *pairs.entry((from, to)).or_default() += bytes;
            }
        }
    }
    let fact = |((from, to), bytes): ((&String, &String), u64)| MetricSample {
        name: "link_model_bytes",
        help: "Bytes that workers of models have sent to another machine in their epochs so far",
        labels: [label("from", from), label("to", to)].join(","),
        value: bytes as f64,
    };
    pairs.into_iter().map(fact).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::json;
    use std::cell::Cell;

    pub(in super::super) fn counts(id: &str, epoch: u64, sent: [[u64; 2]; 2]) -> CollectiveTraffic {
        CollectiveTraffic {
            id: id.to_owned(),
            epoch,
            nodes: vec!["a".to_owned(), "b".to_owned()],
            sent: sent.map(|to| to.to_vec()).to_vec(),
        }
    }

    fn rate(from: &str, to: &str, bytes_s: f64) -> LinkRate {
        LinkRate {
            from: from.to_owned(),
            to: to.to_owned(),
            bytes_s,
        }
    }

    #[test]
    fn rates_are_differences_of_the_same_epoch() {
        let before = [
            counts("1", 1, [[0, 100], [40, 0]]),
            counts("2", 1, [[0, 7], [7, 0]]),
        ];
        let after = [
            counts("1", 1, [[0, 300], [40, 0]]),
            counts("2", 2, [[0, 9], [9, 0]]),
            counts("3", 1, [[0, 9], [9, 0]]),
        ];
        let expected = [rate("a", "b", 100.0), rate("b", "a", 0.0)];
        assert_eq!(rates(&before, &after, 2.0), expected);
        assert_eq!(rates(&[], &after, 2.0), []);
    }

    #[test]
    fn metrics_have_the_bytes_of_each_pair_of_all_instances() {
        let one = counts("1", 1, [[7, 300], [40, 7]]);
        let two = counts("2", 4, [[0, 5], [0, 0]]);
        let facts = facts(&[one, two]);
        let told: Vec<(&str, f64)> = facts.iter().map(|it| (&*it.labels, it.value)).collect();
        let expected = [
            ("from=\"a\",to=\"b\"", 305.0),
            ("from=\"b\",to=\"a\"", 40.0),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn ranks_of_one_machine_move_nothing_between_machines() {
        let alone = |sent| CollectiveTraffic {
            nodes: vec!["a".to_owned(), "a".to_owned()],
            ..counts("1", 1, sent)
        };
        let (before, after) = (alone([[0, 1], [1, 0]]), alone([[0, 9], [9, 0]]));
        assert_eq!(rates(&[before], &[after], 1.0), []);
    }

    #[test]
    fn counts_are_asked_for_once_a_second_and_old_ones_tell_nothing() {
        let (traffic, begun, asked) = (TrafficMeter::default(), Instant::now(), Cell::new(0));
        let look = |ms: u64| {
            let count = || {
                asked.set(asked.get() + 1);
                vec![counts("1", 1, [[0, 1000 * ms], [0, 0]])]
            };
            let rates = traffic.rates(begun + Duration::from_millis(ms), &count);
            (rates.first().map(|rate| rate.bytes_s), asked.get())
        };
        assert_eq!(look(0), (None, 1), "the first");
        assert_eq!(look(500), (None, 1));
        assert_eq!(look(1000), (Some(1e6), 2));
        assert_eq!(look(1500), (Some(1e6), 2), "as before");
        assert_eq!(look(9000), (None, 3), "long after");
    }

    #[test]
    fn rates_of_all_nodes_are_added() {
        let others = [
            json!({ "traffic": [{ "from": "a", "to": "b", "bytes_s": 2.0 }] }),
            json!({ "telemetry": {} }),
        ];
        let sums = sums(vec![rate("a", "b", 1.0)], others.iter());
        let pair = ("a".to_owned(), "b".to_owned());
        assert_eq!(sums, PairRates::from([(pair, 3.0)]));
    }
}
