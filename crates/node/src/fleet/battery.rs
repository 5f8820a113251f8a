//! Battery policy: a laptop with a low battery moves its work to other nodes, and takes work again
//! on mains power.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use paceline_cluster::telemetry;

use super::Inner;

/// Charge at which work moves. Laptops go to sleep at about 5 %, and a large model takes minutes to
/// be copied and loaded elsewhere.
const LOW: f64 = 0.10;

/// Poll interval; a poll reads three small files. Short, because the battery may already be low
/// when the machine is unplugged.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Longest drain, as after a signal.
const MOVE_LIMIT: Duration = Duration::from_secs(300);

/// State of the battery at the last poll.
#[derive(Debug, Default)]
pub(super) struct Battery {
    looked: Option<Instant>,
    is_low: bool,
}

impl Battery {
    fn is_due(&mut self, now: Instant) -> bool {
        let last = self.looked.map(|at| now.saturating_duration_since(at));
        let is_due = last.is_none_or(|last| last >= LOOK_EVERY);
        if is_due {
            self.looked = Some(now);
        }
        is_due
    }

    /// Takes a reading: whether the battery is discharging, and its charge. Returns whether it is
    /// low, if that changed. It stays low until mains power returns, so a wavering charge moves
    /// nothing.
    fn judge(&mut self, found: Option<(bool, f64)>) -> Option<bool> {
        let is_low = found.is_some_and(|(used, charge)| used && (self.is_low || charge <= LOW));
        (std::mem::replace(&mut self.is_low, is_low) != is_low).then_some(is_low)
    }
}

impl Inner {
    /// Drains this node when its battery is low, and takes work again on mains power.
    pub(super) fn rest(self: &Arc<Self>, battery: &mut Battery, now: Instant) {
        if !battery.is_due(now) {
            return;
        }
        match battery.judge(telemetry::battery("/")) {
            // No node could take the work: it stays here, and the next poll may find one.
            Some(true) if self.is_last() => battery.is_low = false,
            Some(true) => self.go_to_rest(),
            Some(false) => {
                self.rests.store(false, Ordering::SeqCst);
                self.agent.set_leaving(false);
                (self.spec.tell)("the current is back: this machine takes work again");
            }
            None => {}
        }
    }

    /// Drains on its own thread, since models may have to be copied.
    fn go_to_rest(self: &Arc<Self>) {
        (self.spec.tell)("the battery is low: this machine's work moves to others");
        self.rests.store(true, Ordering::SeqCst);
        let inner = Arc::clone(self);
        let run = move || {
            let stuck = inner.leave(MOVE_LIMIT, &mut || ());
            if !stuck.is_empty() {
                let models = stuck.join(", ");
                (inner.spec.tell)(&format!("no other machine takes {models}"));
            }
        };
        let thread = std::thread::Builder::new().name("rest".to_owned());
        if let Err(error) = thread.spawn(run) {
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_low_battery_is_told_once_and_its_end_too() {
        let mut battery = Battery::default();
        let looks = [
            (Some((true, 0.5)), None),
            (Some((true, 0.10)), Some(true)),
            (Some((true, 0.11)), None), // it wavers
            (Some((true, 0.05)), None),
            (Some((false, 0.05)), Some(false)),
            (Some((false, 0.04)), None),
            (None, None),
        ];
        for (found, said) in looks {
            assert_eq!(battery.judge(found), said, "{found:?}");
        }
    }

    #[test]
    fn it_is_looked_at_now_and_then() {
        let (mut battery, start) = (Battery::default(), Instant::now());
        let mut due = |s| battery.is_due(start + Duration::from_secs(s));
        let seconds: Vec<u64> = (0..12).filter(|s| due(*s)).collect();
        assert_eq!(seconds, [0, 5, 10]);
    }
}
