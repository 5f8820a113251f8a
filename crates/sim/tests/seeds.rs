//! Many seeds, each a separate cluster.
//!
//! One again: `SIM_SEED=17 cargo test --release -p paceline-sim`. More, from any first one on:
//! `SIM_SEEDS=10000 SIM_FIRST=5000 cargo test --release -p paceline-sim`.

use std::time::Duration;

use paceline_sim::{Scenario, run};

/// Seeds of every commit.
const SEEDS: u64 = 1000;

/// Regression seeds: both ends of a session took the other for dead and never reconnected.
const SEEDS_ONCE: [u64; 1] = [8087];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn no_seed_violates_anything() {
    let one = number("SIM_SEED");
    let first = one.or_else(|| number("SIM_FIRST")).unwrap_or(0);
    let count = if one.is_some() {
        1
    } else {
        number("SIM_SEEDS").unwrap_or(SEEDS)
    };
    let mut failed = Vec::new();
    let (mut events, mut takeovers, mut moves) = (0, 0, 0);
    let (mut answers, mut resumed) = (0, 0);
    let again = SEEDS_ONCE.into_iter().filter(|_| one.is_none());
    for seed in (first..first + count).chain(again) {
        let scenario = Scenario::of(seed);
        let outcome = run(&scenario);
        events += outcome.events;
        takeovers += outcome.takeovers;
        moves += outcome.moves;
        answers += outcome.answers;
        resumed += outcome.resumed;
        if one.is_some() {
            println!("{scenario:#?}\n{outcome:#?}");
        }
        if !outcome.violations.is_empty() {
            failed.push((seed, outcome.violations));
        }
    }
    println!(
        "{count} seeds, {events} events, {takeovers} takeovers, {moves} moves, {answers} answers, \
         {resumed} times one went on elsewhere, {} failed",
        failed.len()
    );
    assert!(
        one.is_some() || takeovers.min(moves).min(answers).min(resumed) >= count / 10,
        "{takeovers} takeovers, {moves} moves, {answers} answers, {resumed} of them elsewhere: \
         that tests little"
    );
    let Some((seed, violations)) = failed.first() else {
        return;
    };
    let again = format!("SIM_SEED={seed} cargo test --release -p paceline-sim -- --nocapture");
    let all: Vec<u64> = failed.iter().map(|(seed, _)| *seed).take(20).collect();
    panic!(
        "{} of {count} seeds {all:?}: {violations:#?}\nagain: {again}",
        failed.len()
    );
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    for seed in 0..20 {
        let scenario = Scenario::of(seed);
        assert_eq!(run(&scenario), run(&scenario), "seed {seed}");
    }
}

#[test]
fn a_hundred_nodes_settle_within_ten_seconds() {
    let scenario = Scenario::quiet(1, 100, Duration::from_secs(12));
    let outcome = run(&scenario);
    let settled = outcome.settled.expect("they settle");
    println!("settled after {settled:?}, {} events", outcome.events);
    assert!(settled <= Duration::from_secs(10), "{settled:?}");
    assert_eq!(outcome.violations, Vec::<String>::new());
}

/// The checkers detect violations: a network that stays partitioned is one.
#[test]
fn a_split_that_never_heals_is_a_violation() {
    let mut scenario = Scenario::quiet(3, 4, Duration::from_secs(20));
    scenario.happenings = vec![paceline_sim::Happening {
        at: Duration::from_secs(5),
        fault: paceline_sim::Fault::Split(0b0011),
    }];
    let outcome = run(&scenario);
    assert!(outcome.settled.is_some());
    assert!(
        outcome
            .violations
            .iter()
            .any(|said| said.contains("sees node")),
        "{outcome:?}"
    );
}
