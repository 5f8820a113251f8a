//! Groups over the software library.

use std::thread;
use std::time::{Duration, Instant};

use super::soft::{Caps, Fabric, Faults};
use super::*;
use crate::{Reduce, testing};

pub(super) fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

/// A fabric and the names of its devices.
pub(super) struct Lab {
    pub(super) fabric: Fabric,
    pub(super) cablings: Vec<Cabling>,
}

/// One device for each rank, all on one switch.
pub(super) fn switched(size: u32, faults: Faults) -> Lab {
    let fabric = Fabric::new(faults, Caps::APPLE);
    let name = |rank| format!("soft{}.{rank}", soft::number());
    let names: Vec<String> = (0..size).map(name).collect();
    names.iter().for_each(|name| fabric.device(name));
    let matrix = Matrix::switched(&names);
    let cabling = |_| Cabling::new(software::verbs(Limits::APPLE), matrix.clone());
    let cablings = (0..size).map(cabling).collect();
    Lab { fabric, cablings }
}

/// What joining gives each rank, in rank order.
pub(super) fn join_all(lab: &Lab) -> Vec<Result<Rdma, RdmaError>> {
    let listen = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<Listener> = lab.cablings.iter().map(listen).collect();
    let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
    let id = GroupId::random();
    let seats = (0..).zip(lab.cablings.iter().cloned().zip(listeners));
    let threads = seats.map(|(rank, (cabling, listener))| {
        let addrs = addrs.clone();
        thread::spawn(move || join(&cabling, listener, Rank(rank), &addrs, id, soon(30)))
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

pub(super) fn groups(lab: &Lab) -> Vec<Rdma> {
    join_all(lab).into_iter().map(|joined| joined.unwrap()).collect()
}

fn boxed(groups: Vec<Rdma>) -> testing::Ranks {
    let boxed = |group| Box::new(group) as Box<dyn Group>;
    groups.into_iter().map(boxed).collect()
}

#[test]
fn conforms() {
    let make = |size| boxed(groups(&switched(size, Faults::default())));
    testing::run_all(&make, 0x5eed_0007);
}

#[test]
fn two_ranks_add_up() {
    let lab = switched(2, Faults::default());
    let threads = groups(&lab).into_iter().map(|group| {
        thread::spawn(move || {
            let mut data = vec![1.0_f32; 100_000];
            let by = soon(10);
            (&group as &dyn Group).all_reduce(&mut data, Reduce::Sum, by).unwrap();
            assert!(data.iter().all(|sum| *sum == 2.0));
        })
    });
    threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(lab.fabric.live(), 0, "everything was given back");
}
