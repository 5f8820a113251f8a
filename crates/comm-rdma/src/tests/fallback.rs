//! Joins in which cables fail: the ranks use TCP there, and the other cables.

use paceline_comm::tcp::{GroupKey, Protection};

use super::*;
use crate::ENABLE_RDMA;

/// The fixture with encrypted TCP where a cable fails; each rank refuses these peers.
fn with_fallback(mut lab: FabricFixture, refused: &[&[u32]]) -> FabricFixture {
    for (rank, cabling) in lab.cablings.iter_mut().enumerate() {
        let refused = refused.get(rank).copied().unwrap_or_default();
        cabling.fallback = Some(refused.iter().copied().map(Rank).collect());
        cabling.config.tcp.protection = Protection::Key(GroupKey::new([7; 32]));
    }
    lab
}

/// Joins, sums over the group and over a part of it; returns by rank the cables to each peer and
/// the errors.
fn cables(lab: &FabricFixture) -> Vec<(Vec<usize>, Vec<String>)> {
    on_each(lab, |group| {
        let mut sums = [1_u64; 5000];
        let whole: &dyn Group = &group;
        whole.all_reduce(&mut sums, Reduce::Sum, soon(60)).unwrap();
        assert_eq!(sums, [u64::from(whole.size()); 5000]);
        let part = whole.split(0, group.rank().0, soon(60)).unwrap();
        part.barrier(soon(60)).unwrap();
        let peers = (0..group.size()).map(|peer| group.cables(Rank(peer)).0);
        let errors = group.refusals().iter();
        let errors = errors.map(|(peer, error)| format!("{peer}: {error}"));
        (peers.collect(), errors.collect())
    })
}

#[test]
fn a_pair_that_one_end_refuses_uses_tcp() {
    let lab = with_fallback(cabled(3, |_, _| 2, Faults::default()), &[&[], &[0]]);
    let joined = cables(&lab);
    let counts: Vec<&[usize]> = joined.iter().map(|(counts, _)| &counts[..]).collect();
    assert_eq!(counts, [[0, 0, 2], [0, 0, 2], [2, 2, 0]]);
    let expected = "rank 0: the cables to rank 0 are not trusted here";
    assert_eq!(joined[1].1, [expected; 2], "one for each cable");
    assert!(joined[0].1.is_empty() && joined[2].1.is_empty());
}

#[test]
fn ranks_without_a_device_that_opens_use_tcp() {
    let mut lab = with_fallback(switched(3, Faults::default()), &[]);
    let mut rows = Vec::new();
    for from in 0..3 {
        let name = |to| lab.cablings[0].matrix.devices(from, to).to_vec();
        rows.push([0, 1, 2].map(name).to_vec());
    }
    rows[1][2] = vec!["none".to_owned()];
    let matrix = Arc::new(Matrix::new(rows).unwrap());
    lab.cablings
        .iter_mut()
        .for_each(|cabling| cabling.matrix = Arc::clone(&matrix));
    let joined = cables(&lab);
    assert_eq!(joined[1].0, [1, 0, 0]);
    assert_eq!(joined[2].0, [1, 0, 0]);
    assert!(joined[1].1[0].starts_with("rank 2: no RDMA device none; there are: "));
}

/// Every call of the library fails once, then always.
#[test]
fn calls_that_fail_leave_a_group_over_tcp() {
    for call in [
        "ibv_open_device",
        "ibv_query_port",
        "ibv_alloc_pd",
        "ibv_reg_mr",
        "ibv_create_cq",
        "ibv_create_qp",
        "ibv_modify_qp",
        "ibv_post_recv",
        "ibv_post_send",
    ] {
        let lab = with_fallback(cabled(2, |_, _| 1, Faults::default()), &[]);
        lab.fabric.core.refuse(Some(call));
        let joined = cables(&lab);
        assert!(joined.iter().all(|(counts, _)| *counts == [0, 0]), "{call}");
        let named = |(_, errors): &(Vec<usize>, Vec<String>)| {
            errors.iter().any(|error| error.contains(call))
        };
        assert!(joined.iter().any(named), "{call}: {joined:?}");
        assert_eq!(lab.fabric.live(), 0, "{call}: something was not given back");

        let lab = with_fallback(cabled(2, |_, _| 1, Faults::default()), &[]);
        lab.fabric.core.refuse_once(call, 1);
        let joined = cables(&lab);
        assert_eq!(joined[0].0[1], joined[1].0[0], "{call}: both ends agree");
    }
}

#[test]
fn a_cable_that_leads_elsewhere_is_not_used() {
    let lab = with_fallback(cabled(3, |_, _| 1, Faults::default()), &[]);
    let end = |from, to| lab.cablings[0].matrix.devices(from, to)[0].clone();
    lab.fabric.device("elsewhere");
    lab.fabric.cable(&end(0, 2), "elsewhere");
    let joined = cables(&lab);
    assert_eq!(joined[0].0, [0, 1, 0]);
    assert_eq!(joined[2].0, [0, 1, 0]);
    assert!(
        joined[0].1[0].contains("over cable 0 (device"),
        "{joined:?}"
    );
}

#[test]
fn the_setting_that_is_off_is_named() {
    let device = || "rdma_en5".to_owned();
    let none = RdmaError::NoSuchDevice {
        wanted: device(),
        there: Vec::new(),
    };
    assert_eq!(none.setting("macos"), Some(ENABLE_RDMA));
    assert_eq!(none.setting("linux"), None);
    let bridge = RdmaError::Verb {
        device: device(),
        call: "ibv_modify_qp",
        operands: String::new(),
        source: std::io::Error::from_raw_os_error(22),
    };
    assert!(
        bridge
            .setting("macos")
            .unwrap()
            .contains("Thunderbolt Bridge")
    );
    let down = RdmaError::PortDown {
        device: device(),
        state: 1,
    };
    assert!(down.setting("macos").unwrap().contains("cable"));
    let at = |what: &str| ENABLE_RDMA.find(what).unwrap();
    assert!(at("System Settings") < at("rdma_ctl enable"));
    assert!(at("rdma_ctl enable") < at("Recovery"));
}
