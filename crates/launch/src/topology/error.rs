//! Errors of finding a topology.

use std::time::Duration;

/// Errors of finding a topology, with the host where they occurred.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("cannot reach {host}: {why}")]
    Unreachable {
        host: String,
        /// The last line from `ssh`, or how it ended.
        why: String,
    },
    #[error("{host} does not say within {limit:?} how it is connected")]
    Late { host: String, limit: Duration },
    /// A host has no Thunderbolt, or is no Mac.
    #[error("{host} says nothing about Thunderbolt: {why}")]
    NoThunderbolt {
        host: String,
        /// The output or ending of `system_profiler` instead.
        why: String,
    },
    #[error("{host}: {what} is missing from what system_profiler says of {port}")]
    Port {
        host: String,
        port: String,
        what: &'static str,
    },
    #[error("{host} has a cable in Thunderbolt {receptacle}, but no network service of that name")]
    NoService { host: String, receptacle: String },
    #[error("{first} and {second} are the same machine")]
    SameMachine { first: String, second: String },
    #[error("one host has nobody to be connected to")]
    OneHost,
    #[error("no mesh: {}", not_connected(missing))]
    NoMesh { missing: Vec<(String, String)> },
    #[error("no ring through all hosts: {}", not_connected(missing))]
    NoRing {
        /// The fewest cables that would complete one; empty if that was not searched.
        missing: Vec<(String, String)>,
    },
    /// Too many hosts with too many cables to decide whether there is a ring.
    #[error("no ring found among {count} hosts in {steps} steps")]
    SearchTooLong { count: usize, steps: u64 },
    #[error("no RDMA on {}", hosts.join(", "))]
    NoRdma { hosts: Vec<String> },
    #[error("{cables} cables, but 192.168.0.0/16 has no free network for all of them")]
    NoNetworks { cables: usize },
}

fn not_connected(pairs: &[(String, String)]) -> String {
    if pairs.is_empty() {
        return "more than one cable is missing".to_owned();
    }
    let each = pairs
        .iter()
        .map(|(a, b)| format!("{a} is not connected to {b}"));
    each.collect::<Vec<_>>().join(", ")
}
