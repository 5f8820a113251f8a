//! Deterministic simulation of whole clusters from a seed, in virtual time.
//!
//! A [`Scenario`] is drawn from a seed: the number of nodes, slow, lossy and cut links, clock skew,
//! crashes, restarts, and users' loads and unloads. [`run`] plays it on the same
//! [`Member`](paceline_cluster::nodes::Member) that nodes run, 60 virtual seconds in milliseconds,
//! and returns the violations. A seed always gives the same run.
//!
//! ```
//! let outcome = paceline_sim::run(&paceline_sim::Scenario::of(7));
//! assert_eq!(outcome.violations, Vec::<String>::new());
//! ```
//!
//! - [`scenario`]: faults and their times.
//! - [`serving`]: supervisors, workers, ingress and clients of the instances.
//! - [`world`]: nodes, links and the queue of events.
//! - [`rounds`]: what a node observes, and the actions that `paceline_fleet::reconcile` decides.
//! - [`check`]: safety and liveness checks.
//! - [`malice`]: a cluster with one malicious member.
//! - [`copies`]: a model's copy on a disk with faults, and its checks; [`disk`]: that disk.
//!
//! Simulated: membership, the map, dialling, the rules and supervisors that nodes run, workers and
//! clients; files of copies. Not simulated: predictions, memory for lost ranks, the workers'
//! computation, and bytes of sessions, which have their own tests.

mod check;
mod copies;
mod disk;
mod malice;
mod rounds;
mod scenario;
mod serving;
mod world;

pub use copies::{CopyOutcome, run_copy};
pub use malice::run_malice;
pub use scenario::{Fault, Happening, Scenario};
pub use world::{SimOutcome, run};
