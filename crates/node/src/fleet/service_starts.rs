//! Service starts: which models are being registered at this node, each on its own thread. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paceline_fleet::replica_names::Name;

/// Interval between attempts of a node that lacks the model file.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Attempts by name; a registered model has none.
#[derive(Debug, Default)]
pub(super) struct ServiceStarts(BTreeMap<Name, StartAttempt>);

#[derive(Clone, Copy, Debug)]
struct StartAttempt {
    /// Whether a thread is running it.
    runs: bool,
    /// When the last attempt failed.
    failed: Option<Instant>,
}

impl ServiceStarts {
    /// Whether the caller must start an attempt now, and call [`end`](Self::end) after it.
    pub(super) fn begin(&mut self, name: &Name, now: Instant) -> bool {
        let failed = match self.0.get(name) {
            Some(last) if last.runs => return false,
            Some(last) => last.failed,
            None => None,
        };
        let is_early = |at: Instant| now.saturating_duration_since(at) < AGAIN_AFTER;
        if failed.is_some_and(is_early) {
            return false;
        }
        self.0
            .insert(name.clone(), StartAttempt { runs: true, failed });
        true
    }

    /// An attempt has ended.
    pub(super) fn end(&mut self, name: &Name, opened: bool, now: Instant) {
        if opened {
            self.0.remove(name);
            return;
        }
        let (runs, failed) = (false, Some(now));
        self.0.insert(name.clone(), StartAttempt { runs, failed });
    }

    /// Whether an earlier attempt found no file: only other instances can answer here.
    pub(super) fn failed(&self, name: &Name) -> bool {
        self.0.get(name).is_some_and(|it| it.failed.is_some())
    }

    /// Drops unloaded names, except those with a running attempt.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(&Name) -> bool) {
        self.0.retain(|name, it| it.runs || is_wanted(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::copies::tests::wanted;
    use crate::workers::host::ModelName;

    #[test]
    fn one_thread_opens_a_door_and_tries_again_after_a_while() {
        let name = Name::of(&wanted(
            ModelName {
                name: "m".to_owned(),
                sha256: "a".repeat(64),
                manifest: false,
            },
            5,
        ));
        let (mut opening, start) = (ServiceStarts::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert!(opening.begin(&name, at(0)));
        assert!(!opening.begin(&name, at(5000)), "one at a time");
        opening.retain(|_| false);
        assert!(!opening.begin(&name, at(5000)), "its thread still runs");
        assert!(!opening.failed(&name), "not known yet");
        opening.end(&name, false, at(6000));
        assert!(opening.failed(&name) && !opening.begin(&name, at(6999)));
        assert!(opening.begin(&name, at(7000)) && opening.failed(&name));
        opening.end(&name, true, at(7001));
        assert!(!opening.failed(&name));
        assert!(opening.begin(&name, at(7001)), "its door was closed since");
        opening.end(&name, false, at(7002));
        opening.retain(|_| false);
        assert!(!opening.failed(&name) && opening.begin(&name, at(7003)));
    }
}
