//! Tests of `paths.rs`.

use super::*;

const NODE: NodeId = NodeId([1; 16]);
const SECOND: Duration = Duration::from_secs(1);

fn place(network: u8) -> SocketAddr {
    SocketAddr::from(([10, network, 0, 2], 52416))
}

fn sample(network: u8, micros: u64, megabytes: u64) -> PathSample {
    PathSample {
        local: IpAddr::from([10, network, 0, 1]),
        interface: format!("eth{network}"),
        latency: Duration::from_micros(micros),
        bytes_per_s: Some(megabytes * 1_000_000),
    }
}

/// A fast path on eth0 and a slow one on eth1, both measured.
fn two() -> PathTable {
    let mut table = PathTable::default();
    table.set_places(NODE, &[place(0), place(1)], Duration::ZERO);
    assert!(
        table
            .measured((NODE, place(1)), Some(&sample(1, 900, 100)), SECOND)
            .is_none()
    );
    assert_eq!(table.preferred(NODE).unwrap().interface, "eth1");
    assert!(
        table
            .measured((NODE, place(0)), Some(&sample(0, 100, 1000)), SECOND)
            .is_none()
    );
    assert_eq!(table.preferred(NODE).unwrap().interface, "eth0");
    table
}

#[test]
fn the_fast_way_is_left_when_it_is_lost_and_taken_again() {
    let mut table = two();
    assert_eq!(table.measured((NODE, place(0)), None, 2 * SECOND), None);
    let due = table.due(&[NODE], 2 * SECOND).unwrap();
    assert_eq!((due.remote, due.bandwidth), (place(0), false), "at once");
    let news = table.measured((NODE, place(0)), None, 3 * SECOND);
    let Some(PathChange::Fell { now, before }) = news else {
        panic!("{news:?}")
    };
    assert_eq!(
        (now.told(), before.told()),
        (
            "eth1 (0.90 ms, 100 MB/s)".to_owned(),
            "eth0 (0.10 ms, 1000 MB/s)".to_owned(),
        )
    );
    assert!(table.is_down(NODE, place(0)));
    assert_eq!(table.due(&[NODE], 7 * SECOND), None);
    assert_eq!(
        table.due(&[NODE], 8 * SECOND).unwrap().remote,
        place(0),
        "soon"
    );
    let news = table.measured((NODE, place(0)), Some(&sample(0, 100, 1000)), 8 * SECOND);
    assert!(matches!(news, Some(PathChange::Returned(path)) if path.interface == "eth0"));
    assert_eq!(table.measured((NODE, place(0)), None, 9 * SECOND), None);
}

#[test]
fn noise_moves_nothing_and_idle_ways_are_measured_once_a_minute() {
    let mut table = two();
    let noisy = sample(1, 90, 1100);
    assert_eq!(
        table.measured((NODE, place(1)), Some(&noisy), 2 * SECOND),
        None
    );
    assert_eq!(table.preferred(NODE).unwrap().interface, "eth0");
    assert_eq!(table.due(&[NODE], 60 * SECOND), None);
    assert_eq!(table.due(&[NODE], 61 * SECOND).unwrap().remote, place(0));
    table.hurry(NODE, PathProbe::Bandwidth, 5 * SECOND);
    assert!(table.due(&[NODE], 5 * SECOND).unwrap().bandwidth);
}

#[test]
fn link_local_ways_show_only_where_their_interface_has_no_other() {
    let mut table = two();
    let far: SocketAddr = "[fe80::2%3]:52416".parse().unwrap();
    table.set_places(NODE, &[place(0), place(1), far], SECOND);
    let mut local = sample(0, 300, 500);
    local.local = "fe80::1".parse().unwrap();
    table.measured((NODE, far), Some(&local), SECOND);
    let names = |table: &PathTable| -> Vec<String> {
        table
            .paths()
            .into_iter()
            .map(|path| path.interface)
            .collect()
    };
    assert_eq!(names(&table), ["eth0", "eth1"]);
    local.interface = "eth2".into();
    table.measured((NODE, far), Some(&local), SECOND);
    assert_eq!(names(&table), ["eth0", "eth1", "eth2"]);
    let preferred = table.paths().iter().filter(|path| path.preferred).count();
    assert_eq!(preferred, 1);
    table.keep(&[]);
    assert_eq!(table.paths(), []);
}

#[test]
fn an_address_that_leads_nowhere_is_rarely_tried() {
    let mut table = PathTable::default();
    table.set_places(NODE, &[place(9)], Duration::ZERO);
    for _ in 0..MISSES {
        table.measured((NODE, place(9)), None, SECOND);
    }
    table.hurry(NODE, PathProbe::Latency, 2 * SECOND);
    assert_eq!(table.due(&[NODE], 300 * SECOND), None);
    assert!(table.due(&[NODE], 301 * SECOND).is_some());
    assert_eq!(table.paths(), [], "it never answered");
}

#[test]
fn a_node_that_was_dead_gets_its_cable_back() {
    let mut table = two();
    table.died(NODE);
    assert!(table.preferred(NODE).is_none() && table.paths().iter().all(|path| !path.up));
    assert_eq!(table.due(&[], 99 * SECOND), None, "the dead are left alone");
    table.hurry(NODE, PathProbe::Latency, 3 * SECOND);
    assert!(table.due(&[NODE], 3 * SECOND).is_some());
    table.measured((NODE, place(1)), Some(&sample(1, 100, 1000)), 3 * SECOND);
    assert_eq!(table.preferred(NODE).unwrap().interface, "eth1");
    let news = table.measured((NODE, place(0)), Some(&sample(0, 100, 1000)), 4 * SECOND);
    assert!(matches!(news, Some(PathChange::Returned(path)) if path.interface == "eth0"));
}

#[test]
fn a_link_changes_by_its_way_or_by_a_factor() {
    let paths = two().paths();
    let (fast, slow) = (&paths[0], &paths[1]);
    assert!(has_moved(fast, slow) && !has_moved(fast, fast));
    let with = |latency_us: u64, megabytes: Option<u64>| Path {
        latency_us,
        bytes_per_s: megabytes.map(|megabytes| megabytes * 1_000_000),
        ..slow.clone()
    };
    let of = with(900, Some(100));
    for (other, expected) in [
        (with(1800, Some(100)), false),
        (with(1801, Some(100)), true),
        (with(449, Some(100)), true),
        (with(900, Some(200)), false),
        (with(900, Some(49)), true),
        (with(900, None), false),
    ] {
        assert_eq!(has_moved(&of, &other), expected, "{other:?}");
        assert_eq!(has_moved(&other, &of), expected, "{other:?}");
    }
    assert!(!has_moved(&with(50, None), &with(200, None)), "noise");
}

#[test]
fn a_pair_that_does_not_answer_is_broken_within_seconds() {
    let mut table = two();
    let is_broken = |table: &PathTable| super::super::reach::is_broken(&table.paths(), NODE);
    table.doubt(NODE, 2 * SECOND);
    assert_eq!(
        table.due(&[NODE], 2 * SECOND),
        None,
        "measured a second ago"
    );
    table.doubt(NODE, 7 * SECOND);
    while let Some(due) = table.due(&[NODE], 7 * SECOND) {
        assert!(!is_broken(&table), "one of them may answer");
        table.measured((NODE, due.remote), None, 7 * SECOND);
    }
    assert!(is_broken(&table));
    table.doubt(NODE, 8 * SECOND);
    assert_eq!(table.due(&[NODE], 8 * SECOND), None, "as often as before");
    table.measured((NODE, place(1)), Some(&sample(1, 900, 100)), 12 * SECOND);
    assert!(!is_broken(&table));
    let stranger = NodeId([9; 16]);
    assert!(
        !super::super::reach::is_broken(&table.paths(), stranger),
        "not known"
    );
}

#[test]
fn small_changes_are_no_news() {
    let old = two().paths();
    let mut new = old.clone();
    new[0].latency_us += 150;
    assert!(!is_news(&old, &new));
    new[0].latency_us = 1000;
    assert!(is_news(&old, &new) && is_news(&old, &old[..1]));
    new = old.clone();
    new[1].up = false;
    assert!(is_news(&old, &new));
}
