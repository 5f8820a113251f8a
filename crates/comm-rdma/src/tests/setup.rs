//! Joins of groups, and their failures.

use super::*;
use crate::{JacclSettings, Verbs, join_settings};

fn errors(lab: &FabricFixture) -> Vec<String> {
    let joined = join_all(lab).into_iter();
    joined
        .map(|joined| joined.unwrap_err().to_string())
        .collect()
}

/// The functions called during a join that may fail.
const JOINING: [&str; 8] = [
    "ibv_open_device",
    "ibv_query_port",
    "ibv_query_gid",
    "ibv_alloc_pd",
    "ibv_reg_mr",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_modify_qp",
];

/// The join results of two ranks when this call fails, or `None` if it never occurred. Nothing is
/// left allocated.
fn joined_but_for(call: &'static str, before: usize) -> Option<Vec<Result<(), RdmaError>>> {
    let lab = switched(2, Faults::default());
    lab.fabric.core.refuse_once(call, before);
    let joined = join_all(&lab).into_iter();
    let joined = joined.map(|joined| joined.map(drop)).collect();
    let live = lab.fabric.live();
    assert_eq!(live, 0, "{call} {before}: something was not given back");
    lab.fabric.core.has_refused().then_some(joined)
}

/// Whether one rank names the failed call, and the other reports [`RdmaError::Elsewhere`].
fn is_told(call: &str, joined: &[Result<(), RdmaError>]) -> bool {
    let is_own = |error: &RdmaError| match error {
        RdmaError::Verb {
            call: named,
            source,
            ..
        } => *named == call && source.raw_os_error().is_some_and(|code| code > 0),
        _ => false,
    };
    match joined {
        [Err(own), Err(RdmaError::Elsewhere { .. })]
        | [Err(RdmaError::Elsewhere { .. }), Err(own)] => is_own(own),
        _ => false,
    }
}

/// Every call fails once. Both ranks get an error. The exception is a call for bulk queue pairs:
/// the link then works without them.
#[test]
fn every_call_that_fails_is_an_error_on_all_ranks() {
    for call in JOINING {
        let all = (0..100).map_while(|before| joined_but_for(call, before));
        let (mut told, mut forgiven) = (0, 0);
        for joined in all {
            if joined.iter().all(Result::is_ok) {
                forgiven += 1;
            } else {
                assert!(is_told(call, &joined), "{call}: {joined:?}");
                told += 1;
            }
        }
        // The first call is always needed by a link; the rank that makes the others differs.
        assert!(told > 0, "{call} was never an error");
        let pairs = ["ibv_create_cq", "ibv_create_qp", "ibv_modify_qp"].contains(&call);
        assert!(
            pairs || forgiven == 0,
            "{call} was forgiven {forgiven} times"
        );
    }
}

/// Functions of the library, the error text when all calls of one fail, and whether joined ranks
/// must notice. JACCL continues with a null domain (ml-explore/mlx #3777) and adds a negative count
/// of completions to its own.
const REFUSED: [(&str, Option<&str>); 17] = [
    ("ibv_get_device_name", Some("no RDMA device soft")),
    ("ibv_open_device", Some(": ibv_open_device(): ")),
    ("ibv_query_port", Some(": ibv_query_port(port 1): ")),
    ("ibv_query_gid", Some(": ibv_query_gid(port 1, index 0): ")),
    ("ibv_alloc_pd", Some(": ibv_alloc_pd(): ")),
    ("ibv_reg_mr", Some(": ibv_reg_mr(")),
    ("ibv_create_cq", Some(": ibv_create_cq(64 entries): ")),
    (
        "ibv_create_qp",
        Some(": ibv_create_qp(UC, 32 requests of 2 pieces): "),
    ),
    ("ibv_modify_qp", Some(": ibv_modify_qp(INIT, port 1): ")),
    (
        "ibv_post_recv",
        Some(": ibv_post_recv(work request 0x20000): "),
    ),
    ("ibv_post_send", Some(": ibv_post_send(work request 0x100")),
    ("ibv_poll_cq", Some(": ibv_poll_cq(16 entries): ")),
    // A failed destroy call is no reason to fail: nothing can be done about it.
    ("ibv_destroy_qp", None),
    ("ibv_destroy_cq", None),
    ("ibv_dereg_mr", None),
    ("ibv_dealloc_pd", None),
    ("ibv_close_device", None),
];

#[test]
fn every_function_that_always_fails_is_named() {
    for (call, expected) in REFUSED {
        let lab = switched(2, Faults::default());
        lab.fabric.core.refuse(Some(call));
        let joined = join_all(&lab);
        for joined in &joined {
            let said = joined.as_ref().err().map(RdmaError::to_string);
            match (said, expected) {
                (Some(said), Some(expected)) => assert!(said.contains(expected), "{call}: {said}"),
                (said, expected) => assert_eq!(said.is_some(), expected.is_some(), "{call}"),
            }
        }
        drop(joined);
        assert_eq!(lab.fabric.live(), 0, "{call}: something was not given back");
    }
}

/// The same after the join: calls fail, and none hangs.
#[test]
fn a_function_that_fails_later_ends_the_call() {
    for call in [
        "ibv_post_send",
        "ibv_post_recv",
        "ibv_poll_cq",
        "ibv_reg_mr",
    ] {
        let lab = switched(2, Faults::default());
        let joined = groups(&lab);
        lab.fabric.core.refuse(Some(call));
        let ends = on_threads(joined, |group| {
            // Memory that cannot be registered is still used.
            let mut memory = RegisteredMemory::<u32>::new(Some(&group), 100_000);
            let registered = memory.is_registered();
            memory.fill(1);
            let by = soon(60);
            let result = (&group as &dyn Group).all_reduce(&mut memory, Reduce::Sum, by);
            if result.is_ok() {
                assert!(memory.iter().all(|sum| *sum == 2));
                (&group as &dyn Group).barrier(by).unwrap();
            }
            let broken = group.broken(Rank(1 - group.rank().0));
            (
                result.is_ok(),
                registered,
                broken.map(|error| error.to_string()),
            )
        });
        for (well, registered, _) in &ends {
            let survives = call == "ibv_reg_mr";
            assert_eq!(
                (*well, *registered),
                (survives, !survives),
                "{call}: {ends:?}"
            );
        }
        let named = |(_, _, broken): &(bool, bool, Option<String>)| {
            broken.as_ref().is_some_and(|error| error.contains(call))
        };
        assert!(
            call == "ibv_reg_mr" || ends.iter().any(named),
            "{call}: {ends:?}"
        );
        assert_eq!(lab.fabric.live(), 0, "{call}: something was not given back");
    }
}

/// JACCL searches the table for the address, and then announces entry 1 all the same.
#[test]
fn an_address_is_used_wherever_it_is_in_the_table() {
    for [a, b] in [[0, 3], [5, 1], [254, 0]] {
        let (fabric, number) = (Fabric::new(Faults::default(), Caps::APPLE), soft::number());
        let names = [0, 1].map(|rank| format!("soft{number}.{rank}"));
        for (name, (rank, at)) in names.iter().zip((1..).zip([a, b])) {
            fabric.device_with(name, [10, 1, 0, rank], at);
        }
        let lab = FabricFixture::new(fabric, &Matrix::switched(&names), Config::default());
        on_each(&lab, |group| {
            let mut sum = [1_u64; 5000];
            (&group as &dyn Group)
                .all_reduce(&mut sum, Reduce::Sum, soon(60))
                .unwrap();
            assert_eq!(sum, [2; 5000]);
            (&group as &dyn Group).barrier(soon(60)).unwrap();
        });
    }
}

/// Apple's driver reportedly refuses heap memory; whole mapped pages pass.
#[test]
fn only_whole_pages_are_registered() {
    let caps = Caps {
        pages: true,
        ..Caps::APPLE
    };
    let lab = switched(2, Faults::default());
    let matrix = (*lab.cablings[0].matrix).clone();
    drop(lab);
    let fabric = Fabric::new(Faults::default(), caps);
    (0..2).for_each(|rank| fabric.device(matrix.of(rank)[0]));
    on_each(
        &FabricFixture::new(fabric, &matrix, Config::default()),
        |group| {
            assert!(RegisteredMemory::<f32>::new(Some(&group), 1001).is_registered());
            assert!(group.allocate(3).is_ok());
            let mut plain = vec![0_u8; 1000];
            // SAFETY: `plain` lives longer.
            let error = unsafe { group.register(plain.as_mut_ptr(), 999) }.unwrap_err();
            assert!(
                error.to_string().contains("ibv_reg_mr(999 bytes at "),
                "{error}"
            );
            (&group as &dyn Group).barrier(soon(60)).unwrap();
        },
    );
}

#[test]
fn a_machine_without_rdma_says_so() {
    soft::NO_LIST.set(true);
    let error = software::verbs(DeviceLimits::APPLE)
        .devices()
        .unwrap_err()
        .to_string();
    soft::NO_LIST.set(false);
    assert!(error.starts_with("list RDMA devices: "), "{error}");
    let lab = switched(2, Faults::default());
    let matrix = Matrix::switched(&["nowhere".to_string(), "neither".to_string()]);
    let lab = FabricFixture::new(lab.fabric, &matrix, Config::default());
    let errors = errors(&lab);
    assert!(
        errors[0].starts_with("no RDMA device nowhere; there are: "),
        "{}",
        errors[0]
    );
    assert!(
        errors[1].starts_with("no RDMA device neither; "),
        "{}",
        errors[1]
    );
    let error = Verbs::load_from("libno-such-verbs.so")
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("open libno-such-verbs.so: "), "{error}");
}

#[test]
fn devices_hold_what_apples_hold() {
    // Eleven queue pairs on each.
    let errors = errors(&switched(12, Faults::default()));
    let limit = |error: &String| error.contains("11 queue pairs, at most 10");
    assert!(errors.iter().all(limit), "{errors:?}");

    let lab = switched(2, Faults::default());
    on_each(&lab, |group| {
        // The group itself uses one region.
        let buffers: Vec<_> = (0..99).map(|_| group.allocate(100).unwrap()).collect();
        let error = group.allocate(100).unwrap_err().to_string();
        assert!(
            error.ends_with("101 memory regions, at most 100"),
            "{error}"
        );
        drop(buffers);
        group.allocate(100).unwrap();
        (&group as &dyn Group).barrier(soon(60)).unwrap();
    });
}

/// A device with less capacity than its limits is handled.
#[test]
fn the_device_has_the_last_word() {
    let caps = Caps {
        pairs: 1,
        ..Caps::APPLE
    };
    let lab = switched(3, Faults::default());
    let matrix = (*lab.cablings[0].matrix).clone();
    let fabric = Fabric::new(Faults::default(), caps);
    drop(lab);
    (0..3).for_each(|rank| fabric.device(matrix.of(rank)[0]));
    let errors = errors(&FabricFixture::new(fabric, &matrix, Config::default()));
    let busy = |error: &String| error.contains("ibv_create_qp(UC, 32 requests of 2 pieces): ");
    assert!(errors.iter().all(busy), "{errors:?}");
}

/// Two cables between two ranks, listed in another order on the two ends.
fn crossed(networks: bool) -> FabricFixture {
    let (fabric, number) = (Fabric::new(Faults::default(), Caps::APPLE), soft::number());
    let name = |rank: usize, cable: usize| format!("soft{number}.{rank}.{cable}");
    let places = [[(0, 0), (0, 1)], [(1, 0), (1, 1)]];
    for (rank, cable) in places.into_iter().flatten() {
        // The cable of rank 0's first device leads to rank 1's second.
        let wire = u8::try_from(cable ^ rank).unwrap();
        let host = u8::try_from(rank + 1).unwrap();
        let address = match networks {
            true => [192, 168, 0, 4 * wire + host],
            false => [10, 0, host, wire],
        };
        fabric.device_at(&name(rank, cable), address);
    }
    fabric.cable(&name(0, 0), &name(1, 1));
    fabric.cable(&name(0, 1), &name(1, 0));
    let entry = |rank: usize| (0..2).map(|cable| name(rank, cable)).collect();
    let rows = vec![vec![vec![], entry(0)], vec![entry(1), vec![]]];
    FabricFixture::new(fabric, &Matrix::new(rows).unwrap(), Config::default())
}

#[test]
fn crossed_cables_are_sorted_out_or_named() {
    on_each(&crossed(true), |group| {
        let mut data = vec![1_u32; 100_000];
        (&group as &dyn Group)
            .all_reduce(&mut data, Reduce::Sum, soon(60))
            .unwrap();
        assert!(data.iter().all(|sum| *sum == 2));
        (&group as &dyn Group).barrier(soon(60)).unwrap();
    });
    for error in errors(&crossed(false)) {
        let expected = "nothing from rank 1 reaches rank 0 over cable 0 (device soft";
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn ranks_that_were_told_different_things_do_not_join() {
    let mut lab = switched(3, Faults::default());
    lab.cablings[2].config.message_bytes = 4096;
    for error in errors(&lab) {
        assert_eq!(
            error,
            "rank 2 was given other devices or options than rank 0"
        );
    }
    let lab = switched(2, Faults::default());
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let addrs = [listener.addr(); 3];
    let id = GroupId::random();
    let error = join(&lab.cablings[0], listener, Rank(0), &addrs, id, soon(1)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "device matrix: it is for 2 ranks, expected 3"
    );
}

#[test]
fn jaccls_environment_makes_a_group() {
    let coordinator = crate::free::free();
    let lab = switched(3, Faults::default());
    let matrix = (*lab.cablings[0].matrix).clone();
    on_threads((0..3).collect(), move |rank| {
        let settings = JacclSettings {
            rank: Rank(rank),
            coordinator,
            matrix: matrix.clone(),
            ring: true,
        };
        let verbs = software::verbs(DeviceLimits::APPLE);
        let group = join_settings(verbs, &settings, Config::default(), soon(60)).unwrap();
        assert_eq!(group.tuning().force, Some(Algorithm::Ring));
        assert!(group.tuning().wire, "a cable");
        let mut sum = [rank; 40_000];
        (&group as &dyn Group)
            .all_reduce(&mut sum, Reduce::Sum, soon(60))
            .unwrap();
        assert_eq!(sum, [3; 40_000]);
        (&group as &dyn Group).barrier(soon(60)).unwrap();
    });
}
