//! Simulates whole clusters from a seed, in virtual time.
//!
//! A [`Scenario`] is drawn from a seed. It says how many nodes there are, when links are slow,
//! lossy or cut, and how wrong the nodes' clocks are. It also says when nodes crash, start again
//! and are told what to run. [`run`] plays it over the same
//! [`Member`](paceline_cluster::nodes::Member) that nodes run, 60 virtual seconds in milliseconds.
//! It returns what was violated. One seed always gives the same run.
//!
//! ```
//! let outcome = paceline_sim::run(&paceline_sim::Scenario::of(7));
//! assert_eq!(outcome.violations, Vec::<String>::new());
//! ```
//!
//! - [`scenario`]: faults and their times.
//! - [`serving`]: supervisors, workers, entries and clients of the instances.
//! - [`world`]: nodes, links and the queue of events.
//! - [`check`]: states that must never be, and the state that must be in the end.
//!
//! Played: membership, the map, dialling, ownership of instances, the supervisors that nodes run,
//! and what workers and clients do. Not played: bytes of sessions, which have tests of their own,
//! and what workers compute.

mod check;
mod scenario;
mod serving;
mod world;

pub use scenario::{Fault, Happening, Scenario};
pub use world::{Outcome, run};
