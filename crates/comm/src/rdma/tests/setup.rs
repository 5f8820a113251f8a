//! How groups come about, and why they do not.

use std::sync::atomic::Ordering;

use super::*;

fn errors(lab: &Lab) -> Vec<String> {
    let joined = join_all(lab).into_iter();
    joined
        .map(|joined| joined.unwrap_err().to_string())
        .collect()
}

/// Every function that may fail fails once: a typed error on the rank it happens to, another on
/// its peer, nothing is left behind.
#[test]
fn every_call_that_fails_is_an_error_on_all_ranks() {
    let (mut failed, mut calls) = (0, Vec::new());
    loop {
        let lab = switched(2, Faults::default());
        lab.fabric.core.refuse_in.store(failed, Ordering::Release);
        let joined = join_all(&lab);
        if joined.iter().all(Result::is_ok) {
            break;
        }
        let mut own = 0;
        for joined in &joined {
            match joined.as_ref().unwrap_err() {
                RdmaError::Verb { call, source, .. } => {
                    assert!(
                        source.raw_os_error().is_some_and(|code| code > 0),
                        "{source}"
                    );
                    calls.push(*call);
                    own += 1;
                }
                RdmaError::Elsewhere { .. } => {}
                error => panic!("call {failed}: {error}"),
            }
        }
        assert_eq!(own, 1, "call {failed}: {joined:?}");
        drop(joined);
        assert_eq!(
            lab.fabric.live(),
            0,
            "call {failed}: something was not given back"
        );
        failed += 1;
        assert!(failed < 100, "it never works");
    }
    calls.sort_unstable();
    calls.dedup();
    let expected = [
        "ibv_alloc_pd",
        "ibv_create_cq",
        "ibv_create_qp",
        "ibv_modify_qp",
        "ibv_open_device",
        "ibv_query_gid",
        "ibv_query_port",
        "ibv_reg_mr",
    ];
    assert_eq!(calls, expected);
}

#[test]
fn a_machine_without_rdma_says_so() {
    soft::NO_LIST.set(true);
    let error = software::verbs(Limits::APPLE)
        .devices()
        .unwrap_err()
        .to_string();
    soft::NO_LIST.set(false);
    assert!(error.starts_with("list RDMA devices: "), "{error}");
    let lab = switched(2, Faults::default());
    let matrix = Matrix::switched(&["nowhere".to_string(), "neither".to_string()]);
    let lab = Lab::new(lab.fabric, &matrix, Config::default());
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
        // One region is the group's own.
        let buffers: Vec<_> = (0..99).map(|_| group.allocate(100).unwrap()).collect();
        let error = group.allocate(100).unwrap_err().to_string();
        assert!(
            error.ends_with("101 memory regions, at most 100"),
            "{error}"
        );
        drop(buffers);
        group.allocate(100).unwrap();
        (&group as &dyn Group).barrier(soon(10)).unwrap();
    });
}

/// A device that holds less than it should is believed.
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
    let errors = errors(&Lab::new(fabric, &matrix, Config::default()));
    let busy = |error: &String| error.contains("ibv_create_qp(UC, 32 requests of 2 pieces): ");
    assert!(errors.iter().all(busy), "{errors:?}");
}

/// Two cables between two ranks, listed in another order on the two ends.
fn crossed(networks: bool) -> Lab {
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
    Lab::new(fabric, &Matrix::new(rows).unwrap(), Config::default())
}

#[test]
fn crossed_cables_are_sorted_out_or_named() {
    on_each(&crossed(true), |group| {
        let mut data = vec![1_u32; 100_000];
        (&group as &dyn Group)
            .all_reduce(&mut data, Reduce::Sum, soon(10))
            .unwrap();
        assert!(data.iter().all(|sum| *sum == 2));
        (&group as &dyn Group).barrier(soon(10)).unwrap();
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
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let coordinator = free.local_addr().unwrap();
    drop(free);
    let lab = switched(3, Faults::default());
    let matrix = (*lab.cablings[0].matrix).clone();
    let threads = (0..3).map(|rank| {
        let settings = Settings {
            rank: Rank(rank),
            coordinator,
            matrix: matrix.clone(),
            ring: true,
        };
        thread::spawn(move || {
            let verbs = software::verbs(Limits::APPLE);
            let group = join_settings(verbs, &settings, Config::default(), soon(20)).unwrap();
            assert_eq!(group.tuning().force, Some(Algorithm::Ring));
            let mut sum = [rank; 40_000];
            (&group as &dyn Group)
                .all_reduce(&mut sum, Reduce::Sum, soon(10))
                .unwrap();
            assert_eq!(sum, [3; 40_000]);
            (&group as &dyn Group).barrier(soon(10)).unwrap();
        })
    });
    threads
        .collect::<Vec<_>>()
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}
