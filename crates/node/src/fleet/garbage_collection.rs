//! Garbage collection of the shared map: removes unused records, since the map is bounded.
//!
//! - `weights/SHA256` and `hub/SHA256`: roots and origins of files that no instance uses and no
//!   live node has. A node that returns with the file publishes them again when it loads it.
//! - Reports of unloaded instances.
//!
//! The live node with the lowest id checks some times an hour. It removes a record only if the
//! previous check already found the same write unused, because a load publishes roots before its
//! spec.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::InstanceSpec;
use paceline_cluster::nodes::{
    HybridTimestamp, InstanceId, Register, RegisterKey, Registers, placement,
};

use super::Inner;

/// Interval of checks, and so the least age of removed records. A load takes some seconds from its
/// roots to its spec, mostly for signing.
const LOOK_EVERY: Duration = Duration::from_secs(600);

/// Most files in a query to nodes: 17 kB of SHA-256.
const FILES_MAX: usize = 256;

/// Identity of a write to a record: its epoch and timestamp.
type Write = (u64, HybridTimestamp);

/// SHA-256 of the files that instances use, including drafts and adapters.
pub(super) fn wanted(map: &Registers) -> BTreeSet<String> {
    let all = placement::wanted(map).map(|(.., wanted)| wanted);
    all.flat_map(InstanceSpec::files)
        .map(|file| file.sha256)
        .collect()
}

/// The SHA-256 of the file of a record.
fn file_of(key: &RegisterKey) -> Option<&str> {
    let RegisterKey::Named(name) = key else {
        return None;
    };
    let file = name.strip_prefix("weights/");
    file.or_else(|| name.strip_prefix("hub/"))
}

/// The instance of a record, even if this version cannot parse the record.
fn instance_of((key, register): (&RegisterKey, &Register)) -> Option<InstanceId> {
    let RegisterKey::Record(id) = key else {
        return None;
    };
    register.value.is_some().then_some(*id)
}

/// Records that no instance uses now. If this version cannot parse an instance's spec, it does not
/// know that instance's files and treats all files as used.
fn idle(map: &Registers) -> BTreeMap<RegisterKey, Write> {
    let wanted = wanted(map);
    let instances: BTreeSet<InstanceId> = map.iter().filter_map(instance_of).collect();
    let all_read = placement::wanted(map).count() == instances.len();
    let is_idle = |key: &RegisterKey| match key {
        RegisterKey::Report(id) => !instances.contains(id),
        key => all_read && file_of(key).is_some_and(|sha256| !wanted.contains(sha256)),
    };
    let there = map.iter().filter(|(_, register)| register.value.is_some());
    let idle = there.filter(|(key, _)| is_idle(key));
    idle.map(|(key, register)| (key.clone(), (register.epoch, register.stamp)))
        .collect()
}

/// Collector of unused records.
#[derive(Debug, Default)]
pub(super) struct RecordCollector {
    last: Option<Instant>,
    seen: Arc<Mutex<IdleRecords>>,
}

/// Records unused at the last check.
#[derive(Debug, Default)]
struct IdleRecords(BTreeMap<RegisterKey, Write>);

impl IdleRecords {
    /// Returns records unused now and at the previous check; stores the others for the next one.
    fn look(&mut self, map: &Registers) -> BTreeMap<RegisterKey, Write> {
        let before = std::mem::replace(&mut self.0, idle(map));
        let now = self.0.iter();
        let again = now.filter(|(key, write)| before.get(*key) == Some(*write));
        again.map(|(key, write)| (key.clone(), *write)).collect()
    }
}

impl Inner {
    /// Removes unused records on its own thread, since it queries nodes for files.
    pub(super) fn remove_stale(self: &Arc<Self>, stale: &mut RecordCollector, now: Instant) {
        let is_early = |last: Instant| now.saturating_duration_since(last) < LOOK_EVERY;
        if stale.last.is_some_and(is_early) {
            return;
        }
        stale.last = Some(now);
        let (inner, seen) = (Arc::clone(self), Arc::clone(&stale.seen));
        let run = move || {
            let mut seen = match seen.try_lock() {
                Ok(seen) => seen,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return, // the last check still waits for a node
            };
            let due = seen.look(&inner.agent.map());
            if inner.is_first() {
                inner.remove_records(due);
            }
        };
        let thread = std::thread::Builder::new().name("stale".to_owned());
        if let Err(error) = thread.spawn(run) {
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    /// Whether this is the live node with the lowest id.
    fn is_first(&self) -> bool {
        let own = self.agent.id();
        let nodes = self.agent.nodes().into_iter();
        let mut living = nodes.filter(|node| node.state == Life::Alive);
        !living.any(|node| node.id < own)
    }

    fn remove_records(&self, mut due: BTreeMap<RegisterKey, Write>) {
        let files: BTreeSet<String> = due.keys().filter_map(file_of).map(str::to_owned).collect();
        let files: Vec<String> = files.into_iter().take(FILES_MAX).collect();
        // A node that does not answer may have all of them.
        let held = match files.is_empty() {
            true => Some(BTreeSet::new()),
            false => self.held_anywhere(&files),
        };
        due.retain(|key, _| match (file_of(key), &held) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(sha256), Some(held)) => {
                !held.contains(sha256) && files.iter().any(|file| file == sha256)
            }
        });
        let still = idle(&self.agent.map());
        due.retain(|key, write| still.get(key) == Some(write));
        for (key, (epoch, _)) in due {
            // Fails if it was written again meanwhile: then it is used.
            let _: Result<(), _> = self.agent.write(key, epoch, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use paceline_cluster::nodes::NodeId;
    use paceline_cluster::nodes::placement::DraftOf;

    use super::*;
    use crate::fleet::copies::tests::wanted as record;
    use crate::fleet::{hub, roots};
    use crate::workers::host::ModelName;

    fn register(ms: u64, value: Option<&str>) -> Register {
        let (count, node) = (0, NodeId([1; 16]));
        Register {
            epoch: 0,
            stamp: HybridTimestamp { ms, count, node },
            value: value.map(str::to_owned),
        }
    }

    fn map(entries: &[(RegisterKey, Register)]) -> Registers {
        Registers::from_entries(entries.iter().cloned())
    }

    #[test]
    fn what_no_instance_wants_goes_at_the_second_look_unless_it_is_told_again() {
        let [model, draft, old] = ["a", "b", "c"].map(|digit| digit.repeat(64));
        let mut instance = record(
            ModelName {
                name: "m".to_owned(),
                sha256: model.clone(),
                manifest: false,
            },
            5,
        );
        instance.nodes = vec![NodeId([1; 16])];
        instance.draft = Some(DraftOf {
            model: "d".to_owned(),
            sha256: draft.clone(),
            bytes: 5,
            manifest: false,
        });
        let instance = serde_json::to_string(&instance).unwrap();
        let mut entries = vec![
            (
                RegisterKey::Record(InstanceId(1)),
                register(1, Some(&instance)),
            ),
            (RegisterKey::Report(InstanceId(1)), register(1, Some("{}"))),
            (RegisterKey::Report(InstanceId(2)), register(1, Some("{}"))),
            (
                RegisterKey::Named("paths/x".to_owned()),
                register(1, Some("{}")),
            ),
            (hub::key(&draft), register(1, Some("{}"))),
            (hub::key(&old), register(1, Some("{}"))),
            (roots::key(&model), register(1, Some("{}"))),
            (roots::key(&old), register(1, Some("{}"))),
            (roots::key(&"d".repeat(64)), register(1, None)),
        ];
        let mut seen = IdleRecords::default();
        assert!(seen.look(&map(&entries)).is_empty(), "the first look");
        let keys = |due: BTreeMap<RegisterKey, Write>| due.into_keys().collect::<Vec<_>>();
        let report = RegisterKey::Report(InstanceId(2));
        let all = [report.clone(), hub::key(&old), roots::key(&old)];
        assert_eq!(keys(seen.look(&map(&entries))), all);
        for (key, told) in &mut entries {
            if file_of(key) == Some(old.as_str()) {
                *told = register(9, Some("{}"));
            }
        }
        assert_eq!(keys(seen.look(&map(&entries))), [report], "told again");
        assert_eq!(keys(seen.look(&map(&entries))), all);
    }

    #[test]
    fn an_instance_of_another_version_keeps_its_report_and_all_files() {
        let [known, later] = [1, 2].map(InstanceId);
        let map = map(&[
            (
                RegisterKey::Record(later),
                register(1, Some("{\"later\":1}")),
            ),
            (RegisterKey::Report(later), register(1, Some("{}"))),
            (RegisterKey::Report(known), register(1, Some("{}"))),
            (roots::key(&"a".repeat(64)), register(1, Some("{}"))),
        ]);
        let idle: Vec<RegisterKey> = idle(&map).into_keys().collect();
        assert_eq!(idle, [RegisterKey::Report(known)]);
    }
}
