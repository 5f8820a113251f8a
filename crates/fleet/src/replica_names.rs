//! Model names and replica numbers: which instances a name stands for, and how replicas are
//! numbered.
//!
//! ```text
//! smollm2 ──▶ replica 1: instance 5f..   on n0     one door on every node that has the file
//!         └─▶ replica 2: instance a1..   on n1
//! ```
//! All instances of one name, file and context are *replicas* of the model, from one `load` or
//! several. A replica keeps its number when others are unloaded.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::{AdapterNaming, InstanceId, InstanceSpec};

/// Key of interchangeable instances: they give the same answers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    model: String,
    sha256: String,
    context: Option<u32>,
    /// Type of keys and values, if stated.
    kv: Option<String>,
    /// Names for clients, if the record has some.
    names: Vec<String>,
    naming: AdapterNaming,
    /// Name and SHA-256 of each adapter.
    adapters: Vec<(String, String)>,
}

impl Name {
    /// The name of an instance.
    pub fn of(wanted: &InstanceSpec) -> Self {
        Self {
            model: wanted.model.clone(),
            sha256: wanted.sha256.clone(),
            context: wanted.options.context,
            kv: wanted.machine.as_ref().and_then(|it| it.kv.clone()),
            names: wanted.names.clone(),
            naming: wanted.adapter_naming,
            adapters: wanted
                .adapters
                .iter()
                .map(|it| (it.name.clone(), it.sha256.clone()))
                .collect(),
        }
    }

    /// The registration key of this name; unique for each name.
    pub fn key(&self) -> String {
        let context = self.context.unwrap_or(0);
        let adapters = self.adapters.iter();
        let adapter = |(name, sha256): &(String, String)| format!("/{sha256}={name}");
        let adapters: String = adapters.map(adapter).collect();
        let kv = self
            .kv
            .as_deref()
            .map_or(String::new(), |kv| format!("/{kv}"));
        let naming = match self.naming {
            AdapterNaming::Qualified => String::new(),
            other => format!("/{other:?}"),
        };
        let names: String = self.names.iter().map(|name| format!("/{name}")).collect();
        let model = &self.model;
        format!(
            "{}/{context}/{model}{kv}{naming}{names}{adapters}",
            self.sha256
        )
    }

    /// The registration keys of its adapters, in the order of the spec.
    pub fn adapter_keys(&self) -> impl Iterator<Item = String> {
        let key = self.key();
        let names = self.adapters.iter().map(|(name, _)| name);
        names.map(move |name| format!("{key}#{name}"))
    }
}

/// A replica of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Replica {
    /// Its number, from 1.
    pub number: u16,
    /// Number of replicas, or the highest number if some were unloaded.
    pub of: u16,
}

/// Replica numbers of all instances. An instance loaded alone and the only one of its model has
/// none.
pub fn numbers<'a>(
    all: impl IntoIterator<Item = (InstanceId, &'a InstanceSpec)>,
) -> BTreeMap<InstanceId, Replica> {
    let mut models: BTreeMap<&str, Vec<(InstanceId, u16)>> = BTreeMap::new();
    for (id, wanted) in all {
        let of_model = models.entry(&wanted.model).or_default();
        of_model.push((id, wanted.replica));
    }
    models.into_values().flat_map(numbers_of_model).collect()
}

/// Replica numbers of one model's instances, from their specs. A spec without a number, or with a
/// duplicate, gets the lowest free one.
fn numbers_of_model(all: Vec<(InstanceId, u16)>) -> Vec<(InstanceId, Replica)> {
    if matches!(all[..], [(_, 0)]) {
        return Vec::new();
    }
    let (mut taken, mut rest) = (BTreeMap::new(), Vec::new());
    for (id, number) in all {
        match number {
            0 => rest.push(id),
            number if taken.contains_key(&number) => rest.push(id),
            number => {
                taken.insert(number, id);
            }
        }
    }
    for id in rest {
        let free = (1..u16::MAX).find(|number| !taken.contains_key(number));
        taken.insert(free.unwrap_or(u16::MAX), id);
    }
    let highest = taken.keys().next_back().copied().unwrap_or(0);
    let replica = |number| Replica {
        number,
        of: highest,
    };
    let numbered = taken.into_iter();
    numbered.map(|(number, id)| (id, replica(number))).collect()
}

/// Numbers for `count` new instances of a model, given `all` existing ones; 0 for a single
/// instance.
pub fn next<'a>(
    model: &str,
    all: impl IntoIterator<Item = (InstanceId, &'a InstanceSpec)>,
    count: usize,
) -> Vec<u16> {
    let of_model = |(_, wanted): &(InstanceId, &InstanceSpec)| wanted.model == model;
    let others: Vec<_> = all.into_iter().filter(of_model).collect();
    if others.is_empty() && count == 1 {
        return vec![0];
    }
    let known = numbers(others.iter().copied());
    let mut taken: BTreeSet<u16> = known.values().map(|it| it.number).collect();
    if taken.is_empty() && !others.is_empty() {
        taken.insert(1); // the one that was loaded alone
    }
    let free = (1..=u16::MAX).filter(|number| !taken.contains(number));
    free.take(count).collect()
}

#[cfg(test)]
mod tests {
    use paceline_cluster::nodes::NodeId;

    use super::*;

    fn wanted(model: &str, replica: u16) -> InstanceSpec {
        InstanceSpec {
            model: model.to_owned(),
            sha256: "0".repeat(64),
            nodes: vec![NodeId([1; 16])],
            split: "auto".to_owned(),
            threads: 1,
            replica,
            ..InstanceSpec::default()
        }
    }

    /// Instances 0, 1, .. by model and the number in their record.
    fn instances(all: &[(&str, u16)]) -> Vec<(InstanceId, InstanceSpec)> {
        let records = all.iter().zip(0..);
        let records = records.map(|((model, n), id)| (InstanceId(id), wanted(model, *n)));
        records.collect()
    }

    /// `number/of` of each instance, `-` for those without.
    fn told(all: &[(&str, u16)]) -> Vec<String> {
        let all = instances(all);
        let numbers = numbers(all.iter().map(|(id, wanted)| (*id, wanted)));
        let of = |id: &InstanceId| numbers.get(id).map(|it| format!("{}/{}", it.number, it.of));
        let told = all.iter().map(|(id, _)| of(id));
        told.map(|it| it.unwrap_or_else(|| "-".to_owned()))
            .collect()
    }

    #[test]
    fn replicas_have_numbers_and_keep_them() {
        assert_eq!(told(&[]), Vec::<String>::new());
        assert_eq!(told(&[("a", 0)]), ["-"]);
        assert_eq!(told(&[("a", 0), ("b", 0)]), ["-", "-"]);
        assert_eq!(told(&[("a", 1), ("b", 0), ("a", 2)]), ["1/2", "-", "2/2"]);
        assert_eq!(told(&[("a", 2)]), ["2/2"], "1 was unloaded");
        assert_eq!(told(&[("a", 0), ("a", 0)]), ["1/2", "2/2"]);
        assert_eq!(told(&[("a", 0), ("a", 1)]), ["2/2", "1/2"]);
        // Written on two sides of a partition.
        assert_eq!(told(&[("a", 1), ("a", 1), ("a", 3)]), ["1/3", "2/3", "3/3"]);
    }

    #[test]
    fn new_instances_get_free_numbers() {
        let next = |all: &[(&str, u16)], count| {
            let all = instances(all);
            next("a", all.iter().map(|(id, wanted)| (*id, wanted)), count)
        };
        assert_eq!(next(&[], 1), [0]);
        assert_eq!(next(&[("b", 0)], 1), [0]);
        assert_eq!(next(&[], 3), [1, 2, 3]);
        assert_eq!(next(&[("a", 0)], 1), [2]);
        assert_eq!(next(&[("a", 2)], 2), [1, 3]);
        assert_eq!(next(&[("a", 1), ("a", 2)], 1), [3]);
    }

    #[test]
    fn a_name_stands_for_instances_that_answer_alike() {
        let one = wanted("a", 1);
        assert_eq!(Name::of(&one), Name::of(&wanted("a", 2)));
        let mut short = one.clone();
        short.options.context = Some(512);
        let other = InstanceSpec {
            sha256: "1".repeat(64),
            ..one.clone()
        };
        for unlike in [&short, &other, &wanted("b", 1)] {
            assert_ne!(Name::of(&one), Name::of(unlike));
            assert_ne!(Name::of(&one).key(), Name::of(unlike).key());
        }
    }
}
