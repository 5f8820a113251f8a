//! The cost of the protocol: a call over the software library against one over shared memory.

use paceline_comm::shm;

use super::*;

/// Microseconds of a sum of `bytes` bytes by two ranks: the median of batches of 100.
fn time(ranks: Vec<Box<dyn Group>>, bytes: usize) -> f64 {
    let times = on_threads(ranks, move |group| {
        let mut data = vec![0.0_f32; bytes / 4];
        let mut batch = || {
            let start = Instant::now();
            for _ in 0..100 {
                group.all_reduce(&mut data, Reduce::Sum, soon(60)).unwrap();
            }
            start.elapsed().as_secs_f64() * 1e4
        };
        for _ in 0..20 {
            batch();
        }
        let mut times: Vec<f64> = (0..101).map(|_| batch()).collect();
        group.barrier(soon(60)).unwrap();
        times.sort_unstable_by(f64::total_cmp);
        times[50]
    });
    times.into_iter().fold(0.0, f64::max)
}

fn shared() -> Vec<Box<dyn Group>> {
    let listen = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<Listener> = (0..2).map(listen).collect();
    let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
    let id = GroupId::random();
    on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        let group = shm::join(listener, Rank(rank), &addrs, id, soon(30));
        Box::new(group.unwrap()) as Box<dyn Group>
    })
}

/// Needs `COMM_TEST_SPEED`, and an idle machine.
#[test]
fn a_sum_of_4_kib_costs_at_most_twice_what_it_does_in_shared_memory() {
    let name = "a_sum_of_4_kib_costs_at_most_twice_what_it_does_in_shared_memory";
    if std::env::var_os("COMM_TEST_SPEED").is_none() {
        println!("SKIPPED {name}: COMM_TEST_SPEED is not set");
        return;
    }
    for bytes in [4, 4 << 10, 64 << 10, 1 << 20] {
        let mut pairs: Vec<[f64; 2]> = (0..5)
            .map(|_| {
                let rdma = time(boxed(&switched(2, Faults::default())), bytes);
                [time(shared(), bytes), rdma]
            })
            .collect();
        pairs.sort_unstable_by(|a, b| (a[1] / a[0]).total_cmp(&(b[1] / b[0])));
        let [shared, rdma] = pairs[2];
        println!("{bytes} bytes: shm {shared:.2} us, rdma {rdma:.2} us; all: {pairs:.2?}");
        assert!(
            bytes != 4 << 10 || rdma <= 2.0 * shared,
            "{rdma:.2} us, shm {shared:.2} us"
        );
    }
}

/// Needs `COMM_TEST_SPEED`: the cost of gathering registered memory.
#[test]
fn a_gather_of_registered_memory() {
    if std::env::var_os("COMM_TEST_SPEED").is_none() {
        println!("SKIPPED a_gather_of_registered_memory: COMM_TEST_SPEED is not set");
        return;
    }
    for bytes in [64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        let times = on_each(&switched(2, Faults::default()), move |group| {
            let own = group.allocate(bytes).unwrap();
            let mut all = group.allocate(2 * bytes).unwrap();
            let group: &dyn Group = &group;
            let mut once = || {
                let start = Instant::now();
                group.all_gather(&own[..], &mut all[..], soon(60)).unwrap();
                start.elapsed().as_secs_f64() * 1e6
            };
            let mut times: Vec<f64> = (0..300).map(|_| once()).collect();
            group.barrier(soon(60)).unwrap();
            times.sort_unstable_by(f64::total_cmp);
            times[150]
        });
        let times = times.into_iter();
        println!(
            "gather of {bytes} bytes: {:.1} us",
            times.fold(0.0, f64::max)
        );
    }
}
