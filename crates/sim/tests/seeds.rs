//! Many seeds, each a separate cluster.
//!
//! One again: `SIM_SEED=17 cargo test --release -p paceline-sim`. More, from any first one on:
//! `SIM_SEEDS=10000 SIM_FIRST=5000 cargo test --release -p paceline-sim`.

use std::time::Duration;

use paceline_sim::{Scenario, run, run_copy, run_malice};

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
    let (mut events, mut takeovers, mut moves, mut widened) = (0, 0, 0, 0);
    let (mut answers, mut resumed) = (0, 0);
    let again = SEEDS_ONCE.into_iter().filter(|_| one.is_none());
    for seed in (first..first + count).chain(again) {
        let scenario = Scenario::of(seed);
        let outcome = run(&scenario);
        events += outcome.events;
        takeovers += outcome.takeovers;
        moves += outcome.moves;
        widened += outcome.widened;
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
        "{count} seeds, {events} events, {takeovers} takeovers, {moves} moves, {widened} widened, {answers} \
         answers, {resumed} times one went on elsewhere, {} failed",
        failed.len()
    );
    assert!(
        one.is_some() || takeovers.min(moves).min(widened).min(answers).min(resumed) >= count / 10,
        "{takeovers} takeovers, {moves} moves, {widened} widened, {answers} answers, {resumed} of them elsewhere: \
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

/// Seeds of a copy's life: 5 ms each.
const COPY_SEEDS: u64 = 100;

#[test]
fn no_fault_of_a_disk_damages_a_copy_unnoticed() {
    let one = number("SIM_SEED");
    let first = one.or_else(|| number("SIM_FIRST")).unwrap_or(0);
    let count = if one.is_some() {
        1
    } else {
        number("SIM_SEEDS").unwrap_or(COPY_SEEDS)
    };
    let (mut mended, mut refused, mut published) = (0, 0, 0);
    for seed in first..first + count {
        let outcome = run_copy(seed, true);
        mended += outcome.mended;
        refused += outcome.refused;
        published += outcome.published;
        let again = format!("SIM_SEED={seed} cargo test --release -p paceline-sim copy");
        assert_eq!(outcome.violations, Vec::<String>::new(), "again: {again}");
        assert!(outcome.published > 0, "seed {seed}: {outcome:?}");
    }
    println!("{count} copies, published {published} times, {mended} groups mended");
    let least = mended.min(refused).min(published) as u64;
    assert!(one.is_some() || least >= count / 2, "that tests little");
    assert_eq!(run_copy(first, true), run_copy(first, true));
}

/// The checkers detect violations: a disk that loses synced bytes is one.
#[test]
fn a_disk_that_only_claims_to_sync_is_a_violation() {
    let violations = (0..100).flat_map(|seed| run_copy(seed, false).violations);
    let violations: Vec<String> = violations.collect();
    for part in ["is gone", "not the model's bytes", "a small file"] {
        let is_told = violations.iter().any(|told| told.contains(part));
        assert!(is_told, "{part}: {violations:?}");
    }
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

/// `MALICE_SEEDS=10000` for more, and `SIM_SEED` for one.
#[test]
fn a_malicious_member_changes_nothing_of_others_and_is_revoked() {
    let one = number("SIM_SEED");
    let count = one.map_or(number("MALICE_SEEDS").unwrap_or(60), |_| 1);
    let first = one.unwrap_or(0);
    let failed: Vec<_> = (first..first + count)
        .map(|seed| (seed, run_malice(seed)))
        .filter(|(_, violations)| !violations.is_empty())
        .collect();
    println!(
        "{count} seeds with a malicious member, {} failed",
        failed.len()
    );
    assert!(
        failed.is_empty(),
        "{} failed: {:#?}",
        failed.len(),
        failed[0]
    );
}
