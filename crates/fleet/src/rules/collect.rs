//! Garbage collection of the shared map: removes unused records, since the map is bounded.
//!
//! - `weights/SHA256` and `hub/SHA256`: roots and origins of files that no instance uses and no
//!   live node has. A node that returns with the file publishes them again when it loads it.
//! - Reports of unloaded instances.
//!
//! The live node with the lowest id checks some times an hour. It removes a record only if the
//! previous check already found the same write unused. A load publishes roots before its spec.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::{HybridTimestamp, Register, RegisterKey, Registers};

use super::{Action, Round};
use crate::{InstanceId, InstanceSpec, specs};

/// Interval of checks, and so the least age of removed records. A load takes some seconds from its
/// roots to its spec, mostly for signing.
const LOOK_EVERY: Duration = Duration::from_secs(600);

/// Identity of a write to a record: its epoch and timestamp.
pub type Write = (u64, HybridTimestamp);

/// SHA-256 of the files that instances use, including drafts and adapters.
pub fn files(map: &Registers) -> BTreeSet<String> {
    let all = specs(map).map(|(.., wanted)| wanted);
    all.flat_map(InstanceSpec::files)
        .map(|file| file.sha256)
        .collect()
}

/// The SHA-256 of the file of a record.
pub fn file_of(key: &RegisterKey) -> Option<&str> {
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
pub fn idle(map: &Registers) -> BTreeMap<RegisterKey, Write> {
    let wanted = files(map);
    let instances: BTreeSet<InstanceId> = map.iter().filter_map(instance_of).collect();
    let all_read = specs(map).count() == instances.len();
    let is_idle = |key: &RegisterKey| match key {
        RegisterKey::Report(id) => !instances.contains(id),
        key => all_read && file_of(key).is_some_and(|sha256| !wanted.contains(sha256)),
    };
    let there = map.iter().filter(|(_, register)| register.value.is_some());
    let idle = there.filter(|(key, _)| is_idle(key));
    idle.map(|(key, register)| (key.clone(), (register.epoch, register.stamp)))
        .collect()
}

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let is_early = |last| round.now.saturating_duration_since(last) < LOOK_EVERY;
    if round.history.collected.is_some_and(is_early) {
        return Vec::new();
    }
    round.history.collected = Some(round.now);
    let mut living = round
        .observed
        .nodes
        .iter()
        .filter(|node| node.state == Life::Alive);
    let removes = !living.any(|node| node.id < round.observed.own);
    vec![Action::Collect { removes }]
}

/// Records unused at the last check.
#[derive(Debug, Default)]
pub struct IdleRecords(BTreeMap<RegisterKey, Write>);

impl IdleRecords {
    /// Returns records unused now and at the previous check; stores the others for the next one.
    pub fn look(&mut self, map: &Registers) -> BTreeMap<RegisterKey, Write> {
        let before = std::mem::replace(&mut self.0, idle(map));
        let now = self.0.iter();
        let again = now.filter(|(key, write)| before.get(*key) == Some(*write));
        again.map(|(key, write)| (key.clone(), *write)).collect()
    }
}

#[cfg(test)]
mod tests {
    use paceline_cluster::nodes::NodeId;

    use super::super::testing;
    use super::*;
    use crate::DraftOf;

    fn key(kind: &str, sha256: &str) -> RegisterKey {
        RegisterKey::Named(format!("{kind}/{sha256}"))
    }

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
        let mut instance = testing::record(1, 1, &[1]).1.spec;
        instance.sha256.clone_from(&model);
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
            (key("hub", &draft), register(1, Some("{}"))),
            (key("hub", &old), register(1, Some("{}"))),
            (key("weights", &model), register(1, Some("{}"))),
            (key("weights", &old), register(1, Some("{}"))),
            (key("weights", &"d".repeat(64)), register(1, None)),
        ];
        let mut seen = IdleRecords::default();
        assert!(seen.look(&map(&entries)).is_empty(), "the first look");
        let keys = |due: BTreeMap<RegisterKey, Write>| due.into_keys().collect::<Vec<_>>();
        let report = RegisterKey::Report(InstanceId(2));
        let all = [report.clone(), key("hub", &old), key("weights", &old)];
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
            (key("weights", &"a".repeat(64)), register(1, Some("{}"))),
        ]);
        let idle: Vec<RegisterKey> = idle(&map).into_keys().collect();
        assert_eq!(idle, [RegisterKey::Report(known)]);
    }
}
