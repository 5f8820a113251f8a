//! Steering on simulated machines.

use std::time::Duration;

use super::{COLD, Event, LEAST, MOST, NOISE, SplitChange, SplitEstimate, SplitSelector};

/// A token of a step that ended at that time.
const fn token(at: Duration) -> Event {
    Event::Token { further: 0, at }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct NoiseRng(u64);

impl NoiseRng {
    /// Evenly in 0..1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Between the two, evenly in their logarithm.
    fn between(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.unit())
    }
}

fn way(tok_s: f64, change_ms: u64) -> SplitEstimate {
    let change = Duration::from_millis(change_ms);
    SplitEstimate {
        tok_s,
        key_s: 0.0,
        change,
    }
}

/// A machine on which each way has a speed of its own.
struct SimulatedMachine {
    steering: SplitSelector,
    /// Tokens a second, in truth.
    truth: Vec<f64>,
    change: Duration,
    now: Duration,
    orders: Vec<SplitChange>,
}

impl SimulatedMachine {
    fn new(expected: &[f64], truth: &[f64], change_ms: u64, at: usize) -> Self {
        let ways: Vec<SplitEstimate> = expected.iter().map(|&v| way(v, change_ms)).collect();
        Self {
            steering: SplitSelector::new(&ways, at).unwrap(),
            truth: truth.to_vec(),
            change: Duration::from_millis(change_ms),
            now: Duration::ZERO,
            orders: Vec::new(),
        }
    }

    /// A response of `n` tokens. Each takes up to `noise` longer or shorter, and one in 50 ten
    /// times as long.
    fn answer(&mut self, n: usize, noise: f64, random: &mut NoiseRng) {
        self.steering.step(self.now, Event::Opened);
        for _ in 0..n {
            let spike = if random.unit() < 0.02 { 10.0 } else { 1.0 };
            let factor = spike * (1.0 + noise * (2.0 * random.unit() - 1.0));
            let gap = factor / self.truth[self.steering.at()];
            self.now += Duration::from_secs_f64(gap);
            if let Some(order) = self.steering.step(self.now, token(self.now)) {
                assert_ne!(order.from, order.to);
                self.orders.push(order);
                self.now += self.change;
                self.steering.step(self.now, Event::Changed(self.change));
                assert_eq!(self.steering.at(), order.to);
            }
        }
        self.steering.step(self.now, Event::Closed);
    }
}

#[test]
fn a_good_choice_is_kept() {
    let mut random = NoiseRng(1);
    let mut machine = SimulatedMachine::new(&[100.0, 90.0], &[97.0, 90.0], 100, 0);
    machine.answer(5000, 0.1, &mut random);
    assert_eq!(machine.orders, []);
    assert!((machine.steering.measured(0).unwrap() / 97.0 - 1.0).abs() < 0.05);
    assert_eq!(machine.steering.measured(1), None);
}

#[test]
fn a_bad_choice_is_left_once_it_lost_what_a_change_costs() {
    let mut random = NoiseRng(2);
    let mut machine = SimulatedMachine::new(&[200.0, 100.0], &[50.0, 100.0], 1000, 0);
    machine.answer(1000, 0.0, &mut random);
    assert_eq!(machine.orders.len(), 1, "{:?}", machine.orders);
    assert_eq!(machine.steering.at(), 1);
    // 10 ms a token are lost: 100 tokens make up a second.
    let mut machine = SimulatedMachine::new(&[200.0, 100.0], &[50.0, 100.0], 1000, 0);
    machine.answer(100 + COLD, 0.0, &mut random);
    assert_eq!(machine.orders, []);
}

#[test]
fn what_turns_out_worse_is_rolled_back() {
    let mut random = NoiseRng(3);
    let mut machine = SimulatedMachine::new(&[200.0, 150.0], &[100.0, 60.0], 50, 0);
    machine.answer(3000, 0.05, &mut random);
    let course: Vec<_> = machine.orders.iter().map(|o| (o.from, o.to)).collect();
    assert_eq!(course, [(0, 1), (1, 0)]);
    let back = machine.orders[1];
    assert!(back.expected < 110.0 && back.measured < 66.0, "{back:?}");
}

/// Tokens of several answers at a time, and of a way that is no longer in use, say nothing.
#[test]
fn only_tokens_of_an_answer_alone_count() {
    let at = |ms: u64| Duration::from_millis(ms);
    let mut steering = SplitSelector::new(&[way(1e6, 0), way(2e6, 0)], 0).unwrap();
    steering.step(at(0), Event::Opened);
    steering.step(at(0), Event::Opened);
    for ms in 0..1000 {
        assert_eq!(steering.step(at(ms), token(at(ms))), None);
    }
    steering.step(at(1000), Event::Closed);
    let order = (1000..2000).find_map(|ms| Some((ms, steering.step(at(ms), token(at(ms)))?)));
    let (ms, order) = order.unwrap();
    // A step has given all its tokens when the next one ends.
    assert_eq!(ms, 1001 + (COLD + LEAST) as u64);
    assert_eq!((order.from, order.to), (0, 1));
    // While it is being done, and from before it was done:
    assert_eq!(steering.step(at(2500), token(at(2500))), None);
    steering.step(at(3000), Event::Changed(at(500)));
    for ms in 2000..3000 {
        assert_eq!(steering.step(at(ms), token(at(ms))), None);
    }
    assert_eq!(steering.measured(1), None);
    assert_eq!(steering.at(), 1);
}

/// On hold, only explicit changes move it, and tokens do not.
#[test]
fn steering_that_holds_is_moved_by_others() {
    let at = |ms: u64| Duration::from_millis(ms);
    let mut steering = SplitSelector::new(&[way(1e6, 0), way(2e6, 0)], 0)
        .unwrap()
        .holding();
    steering.step(at(0), Event::Opened);
    for ms in 0..1000 {
        assert_eq!(steering.step(at(ms), token(at(ms))), None);
    }
    assert_eq!(steering.order(0, 2.0), None, "it is in use");
    assert_eq!(steering.order(2, 2.0), None, "there is none");
    let order = steering.order(1, 1.5).unwrap();
    assert_eq!((order.from, order.to), (0, 1));
    assert!(
        (order.expected / order.measured - 1.5).abs() < 1e-9,
        "{order:?}"
    );
    assert_eq!(steering.order(1, 1.5), None, "it is on its way");
    steering.step(at(2000), Event::Changed(at(500)));
    assert_eq!(steering.at(), 1);
    assert!(steering.order(0, 1.2).is_some());
    steering.step(at(3000), Event::Refused);
    assert_eq!(
        (steering.at(), steering.order(0, 1.2)),
        (1, None),
        "it was refused"
    );
}

#[test]
fn a_way_that_cannot_be_had_is_not_tried_again() {
    let mut steering = SplitSelector::new(&[way(1e6, 0), way(2e6, 0)], 0).unwrap();
    steering.step(Duration::ZERO, Event::Opened);
    let mut orders = 0;
    for ms in 0..1000 {
        let now = Duration::from_millis(ms);
        if steering.step(now, token(now)).is_some() {
            orders += 1;
            steering.step(now, Event::Refused);
        }
    }
    assert_eq!((orders, steering.at(), steering.changes()), (1, 0, 0));
}

#[test]
fn speeds_that_cannot_be_are_refused() {
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = SplitSelector::new(&[way(1.0, 0), way(bad, 0)], 0).unwrap_err();
        assert!(
            error.to_string().starts_with("way 1: decode tok/s"),
            "{error}"
        );
    }
}

/// With any predictions and any truth, there are few changes. No measured candidate is better than
/// the chosen one by more than noise. Little time is lost against the best candidate that was
/// tried.
#[test]
fn simulated_machines_end_well() {
    let mut random = NoiseRng(4);
    let mut changes = 0;
    for seed in 0..100 {
        let n = 2 + (random.unit() * 3.0) as usize;
        let truth: Vec<f64> = (0..n).map(|_| random.between(20.0, 400.0)).collect();
        let expected: Vec<f64> = truth.iter().map(|v| v * random.between(0.3, 3.0)).collect();
        let change_ms = random.between(10.0, 3000.0) as u64;
        let first = (0..n).max_by(|a, b| expected[*a].total_cmp(&expected[*b]));
        let mut machine = SimulatedMachine::new(&expected, &truth, change_ms, first.unwrap());
        let tokens = 10_000;
        for _ in 0..tokens / 500 {
            machine.answer(500, 0.1, &mut random);
        }
        let (steering, course) = (&machine.steering, &machine.orders);
        changes += course.len();
        let case = format!("{seed}: {truth:?} {expected:?} {change_ms} ms {course:?}");
        assert!(steering.changes() <= MOST, "{case}");
        let tried = (0..n).filter(|&i| steering.measured(i).is_some());
        let best = tried.map(|i| truth[i]).fold(0.0, f64::max);
        let kept = truth[steering.at()];
        assert!(kept * (1.0 + NOISE) * 1.1 >= best, "{case}");
        // Spikes make the mean 18 % longer than the median.
        let ideal = 1.18 * f64::from(tokens) / best;
        let paid = machine.change.as_secs_f64() * f64::from((1u32 << MOST) + MOST);
        let blind = MOST as f64 * 2.0 * (LEAST + COLD) as f64 / 20.0;
        let allowed = ideal * (1.0 + NOISE) * 1.1 + paid + blind;
        assert!(machine.now.as_secs_f64() <= allowed, "{case}");
    }
    assert!(changes > 20, "{changes}: the cases are too easy");
}

/// A token after 4,000 keys takes twice as long as the prediction says, as it should.
#[test]
fn a_long_answer_is_no_reason_to_change() {
    let other = way(90.0, 0);
    let long = SplitEstimate {
        key_s: 0.01 / 4000.0,
        ..way(100.0, 0)
    };
    let mut steering = SplitSelector::new(&[long, other], 0).unwrap();
    steering.step(Duration::ZERO, Event::Opened);
    for i in 0..200 {
        let now = Duration::from_millis(20 * i);
        let token = Event::Token {
            further: 4000,
            at: now,
        };
        assert_eq!(steering.step(now, token), None);
    }
    let measured = steering.measured(0).unwrap();
    assert!((measured / 100.0 - 1.0).abs() < 1e-6, "{measured}");
}

/// Plays 80 steps of `step_ms` with `tokens` each. All tokens arrive at once, as after a
/// connection that stalled.
fn answer(steering: &mut SplitSelector, step_ms: u64, tokens: u32) -> Option<f64> {
    for step in 0..80 {
        let ended = Duration::from_millis(step_ms * step);
        for _ in 0..tokens {
            steering.step(Duration::from_secs(10), token(ended));
        }
    }
    steering.measured(0)
}

#[test]
fn tokens_of_a_step_share_its_time() {
    let mut steering = SplitSelector::new(&[way(1.0, 0)], 0).unwrap();
    assert_eq!(answer(&mut steering, 100, 4), None, "no request is open");
    steering.step(Duration::ZERO, Event::Opened);
    let mut tok_s = |step_ms, tokens| answer(&mut steering, step_ms, tokens).map(f64::round);
    assert_eq!(tok_s(100, 4), Some(40.0));
    // The clock of another leader goes back.
    assert_eq!(tok_s(50, 1), Some(20.0));
}

/// Tokens of one answer that take `gap` each by split 0, and the time until it is left.
fn left_after(selector: &mut SplitSelector, gap: f64, tokens: usize) -> Option<f64> {
    let at = Duration::from_secs_f64;
    selector.step(at(0.0), Event::Opened);
    for n in 0..tokens {
        let now = at(gap * n as f64);
        let before = selector.due().filter(|due| *due < now);
        if let Some(due) = before {
            assert!(
                selector.step(due, Event::Waited).is_some(),
                "it said {due:?}"
            );
            return Some(due.as_secs_f64());
        }
        if selector.step(now, token(now)).is_some() {
            return Some(now.as_secs_f64());
        }
    }
    None
}

/// However long a change takes: a minute, here.
#[test]
fn a_split_that_is_twice_as_slow_as_another_is_left_within_seconds() {
    for gap in [0.05, 0.11, 0.3, 0.7, 1.2, 2.0, 2.9, 4.0] {
        let other = 2.1 / gap;
        let mut selector =
            SplitSelector::new(&[way(2.0 * other, 60_000), way(other, 60_000)], 0).unwrap();
        let left = left_after(&mut selector, gap, 1000);
        assert!(left.is_some_and(|s| s < 4.3), "{gap}: {left:?}");
        assert!(
            selector.measured(0).is_some_and(|v| v < 0.5 * other),
            "{gap}"
        );
    }
}

/// A stall of seconds after usual steps says nothing of the split, and neither do two slow steps.
#[test]
fn a_stall_leaves_nothing() {
    let at = Duration::from_secs_f64;
    let mut selector = SplitSelector::new(&[way(12.0, 60_000), way(9.0, 60_000)], 0).unwrap();
    assert_eq!(left_after(&mut selector, 0.09, 100), None);
    assert_eq!(selector.due(), None);
    let mut now = 100.0 * 0.09;
    for gap in [2.9, 0.9, 0.09] {
        now += gap;
        assert_eq!(selector.step(at(now), token(at(now))), None, "{gap}");
    }
    // Of several answers nothing is concluded.
    selector.step(at(now), Event::Opened);
    assert_eq!(selector.due(), None);
    assert_eq!(selector.step(at(now + 60.0), Event::Waited), None);
}

/// Lives of a pipeline that verifies draft windows in flight. Their results come in bursts, with
/// stalls, other requests, and new leaders in between. The measured speed is never above 1.5 times
/// the best that was computed. A median of the steps was 400,000 tokens a second.
#[test]
fn no_life_measures_more_than_was_computed() {
    let mut random = NoiseRng(7);
    let mut measured = 0;
    for life in 0..200 {
        let windows = 1 + (random.unit() * 6.0) as u32;
        let tokens = 1 + (random.unit() * 9.0) as u32;
        let cycle_s = random.between(0.005, 2.0);
        let best = f64::from(windows * tokens) / (0.9 * cycle_s);
        let mut selector = SplitSelector::new(&[way(50.0, 0)], 0).unwrap();
        let (mut now, mut leader) = (0.0, 0.0);
        selector.step(Duration::ZERO, Event::Opened);
        for _ in 0..300 {
            let stall = if random.unit() < 0.03 { 20.0 } else { 1.0 };
            now += cycle_s * stall * (0.9 + 0.2 * random.unit());
            for window in 0..windows {
                let late = now + 1e-6 * f64::from(window);
                let at = Duration::from_secs_f64(late - leader);
                for _ in 0..tokens {
                    selector.step(Duration::from_secs_f64(late), token(at));
                }
            }
            let told = selector.measured(0);
            assert!(
                told.is_none_or(|tok_s| tok_s <= 1.5 * best),
                "{life}: {told:?}, {windows} windows of {tokens} in {cycle_s} s: {best}"
            );
            measured += usize::from(told.is_some());
            let at = Duration::from_secs_f64(now);
            match (random.unit() * 60.0) as u32 {
                0 => {
                    leader = now;
                    selector.step(at, Event::Restarted);
                }
                1 => {
                    selector.step(at, Event::Opened);
                    selector.step(at, Event::Closed);
                }
                _ => {}
            }
        }
    }
    assert!(measured > 10_000, "{measured}");
}
