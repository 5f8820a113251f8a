//! Service starts: which models are being registered at this node, each on its own thread. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::replica_names::Name;

/// Interval between attempts of a node that lacks the model file.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Attempts by name; a registered model has none.
#[derive(Clone, Debug, Default)]
pub struct ServiceStarts(BTreeMap<Name, StartAttempt>);

#[derive(Clone, Copy, Debug)]
struct StartAttempt {
    /// Whether a thread is running it.
    runs: bool,
    /// When the last attempt failed.
    failed: Option<Instant>,
}

impl ServiceStarts {
    /// Whether an attempt may start now: none runs, and the last failure is long enough ago.
    pub fn is_due(&self, name: &Name, now: Instant) -> bool {
        let is_late = |at: Instant| now.saturating_duration_since(at) >= AGAIN_AFTER;
        let last = self.0.get(name);
        last.is_none_or(|it| !it.runs && it.failed.is_none_or(is_late))
    }

    /// Begins an attempt; call [`end`](Self::end) after it.
    pub fn begin(&mut self, name: &Name) {
        let failed = self.0.get(name).and_then(|it| it.failed);
        self.0
            .insert(name.clone(), StartAttempt { runs: true, failed });
    }

    /// An attempt has ended.
    pub fn end(&mut self, name: &Name, opened: bool, now: Instant) {
        if opened {
            self.0.remove(name);
            return;
        }
        let (runs, failed) = (false, Some(now));
        self.0.insert(name.clone(), StartAttempt { runs, failed });
    }

    /// Whether an earlier attempt found no file: only other instances can answer here.
    pub fn failed(&self, name: &Name) -> bool {
        self.0.get(name).is_some_and(|it| it.failed.is_some())
    }

    /// Drops unloaded names, except those with a running attempt.
    pub fn retain(&mut self, is_wanted: impl Fn(&Name) -> bool) {
        self.0.retain(|name, it| it.runs || is_wanted(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstanceSpec;

    #[test]
    fn one_thread_opens_a_service_and_tries_again_after_a_while() {
        let name = Name::of(&InstanceSpec::default());
        let (mut starts, begun) = (ServiceStarts::default(), Instant::now());
        let at = |ms: u64| begun + Duration::from_millis(ms);
        assert!(starts.is_due(&name, at(0)));
        starts.begin(&name);
        assert!(!starts.is_due(&name, at(5000)), "one at a time");
        starts.retain(|_| false);
        assert!(!starts.is_due(&name, at(5000)), "its thread still runs");
        assert!(!starts.failed(&name), "not known yet");
        starts.end(&name, false, at(6000));
        assert!(starts.failed(&name) && !starts.is_due(&name, at(6999)));
        assert!(starts.is_due(&name, at(7000)));
        starts.begin(&name);
        assert!(starts.failed(&name));
        starts.end(&name, true, at(7001));
        assert!(!starts.failed(&name));
        assert!(starts.is_due(&name, at(7001)), "it was closed since");
        starts.end(&name, false, at(7002));
        starts.retain(|_| false);
        assert!(!starts.failed(&name) && starts.is_due(&name, at(7003)));
    }
}
