//! Scenarios: the faults of a run and their times, drawn from a seed.

use std::time::Duration;

/// SplitMix64 (Steele and others, OOPSLA 2014).
#[derive(Clone, Debug)]
pub(crate) struct SimRandom(u64);

impl SimRandom {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) const fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True with a probability of `per_mille` thousandths.
    pub(crate) const fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// A fault of nodes or the network, or a user's command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process of a node ends without notice; its saved state stays.
    Crash(usize),
    /// A node drains: it hands over its instances and ends some seconds later.
    Leave(usize),
    /// A node starts again.
    Start(usize),
    /// The network partitions: nodes with a set bit reach only each other.
    Split(u64),
    /// A one-way partition: messages from one node do not reach another.
    Deaf(usize, usize),
    /// The network is whole again.
    Heal,
    /// A user loads an instance at this node, over that many nodes.
    Load(usize, usize),
    /// A user unloads the oldest instance at this node.
    Unload(usize),
}

/// A fault and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Happening {
    /// Virtual time.
    pub at: Duration,
    pub fault: Fault,
}

/// All inputs of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// The seed of the scenario and of the run's own randomness.
    pub seed: u64,
    pub nodes: usize,
    /// Length of the run; the last third has no faults.
    pub length: Duration,
    /// Messages and attempts to connect that are lost, in thousandths.
    pub loss_per_mille: u64,
    /// Messages that arrive twice, in thousandths.
    pub twice_per_mille: u64,
    /// Least and greatest delay of a message.
    pub delay: (Duration, Duration),
    /// Skew of each node's wall clock, in milliseconds ahead.
    pub skew_ms: Vec<u64>,
    /// The faults and their times, in order.
    pub happenings: Vec<Happening>,
}

impl Scenario {
    /// The scenario of this seed: 3 to 12 nodes, 60 s.
    pub fn of(seed: u64) -> Self {
        let mut random = SimRandom::new(seed);
        let nodes = 3 + random.below(10) as usize;
        let length = Duration::from_secs(60);
        let slowest = [2, 20, 80][random.below(3) as usize];
        let mut scenario = Self {
            seed,
            nodes,
            length,
            loss_per_mille: [0, 20, 100][random.below(3) as usize],
            twice_per_mille: [0, 50][random.below(2) as usize],
            delay: (Duration::from_micros(100), Duration::from_millis(slowest)),
            skew_ms: (0..nodes).map(|_| random.below(20_000)).collect(),
            happenings: Vec::new(),
        };
        scenario.draw(&mut random);
        scenario
    }

    /// `nodes` nodes that start together, without faults.
    pub fn quiet(seed: u64, nodes: usize, length: Duration) -> Self {
        Self {
            nodes,
            length,
            loss_per_mille: 0,
            twice_per_mille: 0,
            delay: (Duration::from_micros(100), Duration::from_millis(2)),
            skew_ms: vec![0; nodes],
            happenings: Vec::new(),
            ..Self::of(seed)
        }
    }

    /// Up to a dozen faults in the first two thirds. Then all nodes live, but for one at times. The
    /// network heals, but for one path at times.
    fn draw(&mut self, random: &mut SimRandom) {
        let calm = self.length * 2 / 3;
        let nodes = self.nodes as u64;
        let mut add = |at_ms: u64, fault| {
            let at = Duration::from_millis(at_ms);
            self.happenings.push(Happening { at, fault });
        };
        for _ in 0..1 + random.below(3) {
            let wide = 1 + random.below(nodes) as usize;
            add(
                3000 + random.below(20_000),
                Fault::Load(random.below(nodes) as usize, wide),
            );
        }
        for _ in 0..random.below(10) {
            let at = 2000 + random.below(calm.as_millis() as u64 - 4000);
            let one = random.below(nodes) as usize;
            let fault = match random.below(6) {
                0 | 1 => Fault::Crash(one),
                2 => Fault::Start(one),
                3 => Fault::Split(random.next()),
                4 => Fault::Deaf(one, random.below(nodes) as usize),
                _ if random.chance(300) => Fault::Unload(one),
                _ => Fault::Heal,
            };
            add(at, fault);
        }
        for _ in 0..random.below(3) {
            let at = 8000 + random.below(calm.as_millis() as u64 - 12_000);
            let one = random.below(nodes) as usize;
            add(at, Fault::Leave(one));
            add(at + 1000 + random.below(3000), Fault::Crash(one));
        }
        let calm_ms = calm.as_millis() as u64;
        add(calm_ms, Fault::Heal);
        // One may stay down for good: the others must work without it.
        let dead = random.chance(300).then(|| random.below(nodes));
        for node in (0..nodes).filter(|node| Some(*node) != dead) {
            add(calm_ms, Fault::Start(node as usize));
        }
        if let Some(dead) = dead {
            add(calm_ms, Fault::Crash(dead as usize));
        }
        // Two may stay without a path between them, where a third reaches both.
        let (one, two) = (random.below(nodes), random.below(nodes));
        if random.chance(250) && one != two && (nodes > 3 || dead.is_none()) {
            add(calm_ms + 1, Fault::Deaf(one as usize, two as usize));
        }
        self.happenings.sort_by_key(|happening| happening.at);
    }
}
