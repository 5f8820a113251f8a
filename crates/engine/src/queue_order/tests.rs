//! A simulated engine with a few slots: seeded arrivals of several clients.

use proptest::prelude::*;

use super::*;

fn turn(priority: i32, served: u64, due_ms: Option<u64>) -> QueueKey {
    QueueKey {
        passed: 0,
        priority,
        places: 0,
        resumes: false,
        served,
        due: due_ms.map(Duration::from_millis),
    }
}

#[test]
fn turns_go_by_priority_service_deadline_and_age() {
    let of = |places, served| QueueKey {
        places,
        ..turn(0, served, None)
    };
    let resumed = |places, served| QueueKey {
        resumes: true,
        ..of(places, served)
    };
    let passed = QueueKey {
        passed: PASSED_MAX,
        ..turn(-9, 9, None)
    };
    let due = |ms| turn(0, 0, Some(ms));
    let cases: [(&[QueueKey], usize); 11] = [
        (&[turn(0, 0, None), turn(0, 0, None)], 0),
        (&[turn(0, 0, None), turn(1, 9, None)], 1),
        (&[of(3, 0), of(3, 0), of(1, 9), of(0, 9), of(0, 9)], 3),
        (&[of(1, 5), of(1, 4)], 1),
        (&[of(1, 4), resumed(1, 9)], 1),
        (&[resumed(2, 0), of(1, 9)], 1),
        (&[of(0, 0), turn(1, 9, None)], 1),
        (&[turn(0, 5, Some(1)), turn(0, 4, None)], 1),
        (&[turn(0, 0, None), due(9), due(8)], 2),
        (&[turn(-1, 0, None), turn(0, 7, None), turn(0, 7, None)], 1),
        (&[turn(9, 0, None), passed], 1),
    ];
    for (turns, expected) in cases {
        assert_eq!(next(turns.iter().copied()), Some(expected), "{turns:?}");
        assert_eq!(in_order(turns.iter().copied())[0], expected, "{turns:?}");
    }
    assert_eq!(next(std::iter::empty()), None);
}

/// Scheduling parameters of sequences with these clients and priorities.
fn orders<const N: usize>(all: [(u64, i32); N]) -> [SchedulingParams; N] {
    all.map(|(client, priority)| SchedulingParams {
        client,
        priority,
        ..SchedulingParams::default()
    })
}

/// Scheduling parameters of sequences with these clients.
fn clients<const N: usize>(all: [u64; N]) -> [SchedulingParams; N] {
    orders(all.map(|client| (client, 0)))
}

#[test]
fn a_client_alone_keeps_its_places() {
    let [seven] = clients([7]);
    assert_eq!(preemption_victim(&clients([7, 7, 7, 7]), seven), None);
    assert_eq!(preemption_victim(&[], seven), None);
}

#[test]
fn the_client_with_the_most_places_gives_way() {
    let [_, _, two, three, four] = clients([0, 1, 2, 3, 4]);
    assert_eq!(preemption_victim(&clients([1, 1, 2, 1]), two), Some(3));
    assert_eq!(preemption_victim(&clients([1, 1, 2, 2]), three), Some(3));
    assert_eq!(preemption_victim(&clients([1, 1, 2]), two), None);
    assert_eq!(preemption_victim(&clients([1, 2, 3]), four), None);
}

/// Otherwise it would get its slot back at once.
#[test]
fn nothing_gives_way_to_a_lower_priority() {
    let [low, same, high] = orders([(2, -1), (2, 0), (2, 1)]);
    assert_eq!(preemption_victim(&clients([1, 1, 1]), low), None);
    assert_eq!(preemption_victim(&clients([1, 1, 1]), same), Some(2));
    assert_eq!(preemption_victim(&clients([1, 1, 1]), high), Some(2));
    let mixed = orders([(1, 5), (1, 0), (1, 5)]);
    assert_eq!(preemption_victim(&mixed, same), Some(1));
}

/// Otherwise a client with many requests would soon have some that precede all others, and take
/// their slots one by one.
#[test]
fn fair_turns_pass_nobody() {
    let places = |client: u64| client as usize; // client 4 has 4
    let [two, three] = clients([2, 3]);
    assert!(!passes(two, three, places));
    assert!(passes(three, two, places));
    assert!(passes(two, two, places), "its own requests");
    let [high] = orders([(2, 1)]);
    assert!(passes(high, three, places), "a priority is not fair");
}

#[test]
fn a_client_saves_nothing_up() {
    let mut shares = ServedRows::default();
    shares.enter(1, std::iter::empty());
    shares.charge(1, 1000);
    shares.enter(2, [1].into_iter());
    assert_eq!((shares.of(1), shares.of(2)), (1000, 1000));
    shares.charge(2, 10);
    shares.enter(1, [1, 2].into_iter());
    assert_eq!((shares.of(1), shares.of(2)), (1000, 1010));
    shares.enter(3, [2].into_iter());
    assert_eq!((shares.of(1), shares.of(3)), (0, 1010), "forgotten");
}

#[derive(Clone, Copy, Debug)]
struct SimulatedRequest {
    order: SchedulingParams,
    rows: usize,
    passed: u32,
    came: usize,
}

/// An engine that computes a row per slot in each step.
#[derive(Debug, Default)]
struct QueueSimulation {
    shares: ServedRows,
    waiting: Vec<SimulatedRequest>,
    running: Vec<SimulatedRequest>,
    /// Waiting time of each request, with its priority and client.
    waits: Vec<(usize, SchedulingParams)>,
    step: usize,
}

impl QueueSimulation {
    fn come(&mut self, order: SchedulingParams, rows: usize) {
        let open = self.waiting.iter().chain(&self.running);
        let clients: Vec<u64> = open.map(|job| job.order.client).collect();
        self.shares.enter(order.client, clients.into_iter());
        self.waiting.push(SimulatedRequest {
            order,
            rows,
            passed: 0,
            came: self.step,
        });
    }

    fn step(&mut self, places: usize) {
        while self.running.len() < places {
            let places = |client| {
                let running = self.running.iter();
                running.filter(|job| job.order.client == client).count()
            };
            let turns = self.waiting.iter().map(|job| QueueKey {
                passed: job.passed,
                priority: job.order.priority,
                places: places(job.order.client),
                resumes: false,
                served: self.shares.of(job.order.client),
                due: None,
            });
            let Some(place) = next(turns) else {
                break;
            };
            let job = self.waiting.remove(place);
            self.waiting[..place].iter_mut().for_each(|j| j.passed += 1);
            self.waits.push((self.step - job.came, job.order));
            self.running.push(job);
        }
        for job in &mut self.running {
            job.rows -= 1;
            self.shares.charge(job.order.client, 1);
        }
        self.running.retain(|job| job.rows > 0);
        self.step += 1;
    }
}

proptest! {
    /// Every request gets a slot, despite any number of requests of higher priority.
    #[test]
    fn nothing_starves(rows in 1..30usize, places in 1..5usize, low in 1..20usize) {
        let mut simulated = QueueSimulation::default();
        let order = |priority| SchedulingParams { priority, ..SchedulingParams::default() };
        (0..low).for_each(|_| simulated.come(order(-5), rows));
        for _ in 0..(PASSED_MAX as usize + low + 2) * rows * 2 {
            while simulated.waiting.len() < low + 4 {
                simulated.come(order(5), rows);
            }
            simulated.step(places);
        }
        let n_low = simulated.waits.iter().filter(|(_, order)| order.priority < 0).count();
        prop_assert_eq!(n_low, low);
    }
}
