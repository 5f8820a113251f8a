//! Users' load and unload requests, written as specs to the shared map.

mod nodes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_fleet::{
    ADAPTERS_MAX, AdapterFile, DraftOf, EPOCH_UNWANTED, InstanceId, InstanceOptions, InstanceSpec,
    SPARE_AUTO, WeightDistribution, specs,
};
use paceline_model::{Config, ModelSource, SplitKind, draft_captures};

use super::copies::ModelIdentity;
use super::device_memory::{OpenModel, plan_memory};
use super::error::no_path;
use super::expansion::open_model;
use super::preview::Proposal;
use super::proposals::predictions;
use super::{Error, Inner, LoadRequest, REPLICAS_MAX, engines, name_of, new_id, preview};
use crate::classes::EngineChoice;
use crate::model_setup::check_draft_model;
use paceline_fleet::replica_names;
use paceline_worker::adapters;

/// How long a load waits for the facts of newly connected nodes. They follow within milliseconds;
/// on busy cores one node in thirty had not sent them when `load` came.
const FACTS_WAIT: Duration = Duration::from_secs(5);

/// Longest wait for paths that answer again. Both ends find that out by pings some seconds apart.
const PATHS_WAIT: Duration = Duration::from_secs(10);

/// How long a load waits for these paths where an instance can do without them, by a relay.
const RELAY_AFTER: Duration = Duration::from_secs(2);

/// Time between two looks at these paths.
const PATHS_EVERY: Duration = Duration::from_millis(200);

impl Inner {
    /// As [`Fleet::load`](super::Fleet::load).
    pub(super) fn load(&self, ask: &LoadRequest) -> Result<Vec<InstanceId>, Error> {
        // They count as replicas, and in memory, while their records are there.
        for id in self.failed(&ask.model) {
            self.want(id, EPOCH_UNWANTED, None)?;
        }
        self.want_all(&self.asked(ask)?)
    }

    /// The failed instances of a model. They compute nothing; a load of the model replaces them.
    fn failed(&self, model: &str) -> Vec<InstanceId> {
        let map = self.agent.map();
        let all = specs(&map).filter(|(.., wanted)| wanted.model == model);
        let failed = all.filter(|(id, epoch, _)| paceline_fleet::has_failed(&map, *id, *epoch));
        failed.map(|(id, ..)| id).collect()
    }

    /// The first spec of each requested replica.
    pub(super) fn asked(&self, ask: &LoadRequest) -> Result<Vec<InstanceSpec>, Error> {
        self.await_facts();
        let groups = match ask.replicas {
            0 | 1 => vec![self.choose(ask)?],
            2..=REPLICAS_MAX => self.spread(ask)?,
            replicas => return Err(Error::Replicas { replicas }),
        };
        if ask.spare.is_some_and(|spare| spare > 0) && groups.iter().any(|nodes| nodes.len() < 2) {
            return Err(Error::SpareAlone);
        }
        let path = self.copies.of_user(&ask.model)?;
        let all: BTreeSet<NodeId> = groups.iter().flatten().copied().collect();
        let readers = self.readers(ask)?;
        if let Some(draft) = &ask.draft {
            self.check_draft(draft, (&ask.model, &path))?;
        }
        self.check_apart(&readers, &all)?;
        for nodes in &groups {
            self.measure_rates(nodes);
            for way in self.ways_told(nodes) {
                (self.spec.tell)(&format!("{}: {way}", ask.model));
            }
        }
        self.records(ask, &path, groups)
    }

    fn check_apart(&self, readers: &[NodeId], decoding: &BTreeSet<NodeId>) -> Result<(), Error> {
        match readers.iter().find(|id| decoding.contains(id)) {
            Some(both) => Err(Error::ReadsAndDecodes {
                node: self.name(*both),
            }),
            None => Ok(()),
        }
    }

    fn check_draft(&self, draft: &str, (model, path): (&str, &Path)) -> Result<(), Error> {
        let of_draft = self.copies.of_user(draft)?;
        let open = |name: &str, path: &Path| ModelSource::open(path).map_err(Error::of(name));
        let (source, own) = (open(draft, &of_draft)?, open(model, path)?);
        let config = Config::read(&own).map_err(Error::of(model))?;
        let captures = draft_captures(&source, &config, of_draft == path);
        if captures.map_err(Error::of(draft))?.is_none() {
            check_draft_model(&source, &own).map_err(Error::of(draft))?;
        }
        Ok(())
    }

    /// A spec for each replica, on its group of nodes.
    fn records(
        &self,
        ask: &LoadRequest,
        path: &Path,
        groups: Vec<Vec<NodeId>>,
    ) -> Result<Vec<InstanceSpec>, Error> {
        let map = self.agent.map();
        let others: Vec<_> = specs(&map).collect();
        let others = others.iter().map(|(id, _, wanted)| (*id, wanted));
        let numbers = replica_names::next(&ask.model, others, groups.len());
        let one = self.record(ask, path)?;
        let of_group = |(nodes, replica)| {
            let mut record = InstanceSpec {
                nodes,
                replica,
                ..one.clone()
            };
            match self.relayed(ask, &record.nodes) {
                Some(ask) => {
                    record.relayed = true;
                    record.split = ask.split.to_string();
                    self.plan_record(&ask, path, &mut record)?;
                }
                None => self.plan_record(ask, path, &mut record)?,
            }
            Ok::<_, Error>(record)
        };
        let records: Result<Vec<InstanceSpec>, Error> =
            groups.into_iter().zip(numbers).map(of_group).collect();
        let mut records = records?;
        let first = &records[0];
        let own = self.agent.id();
        let used: BTreeSet<NodeId> = records.iter().flat_map(|it| it.nodes.clone()).collect();
        let mut all = used.iter().chain(&first.prompts);
        if all.any(|id| *id != own) {
            self.sign(first, path);
        }
        let reserves = self.reserves(first, &used);
        for record in &mut records {
            let heirs = record.nodes[1..].iter().chain(&reserves);
            record.successors = heirs.copied().collect();
        }
        Ok(records)
    }

    /// States engines, split, shares and memory of a record for its nodes, by the best proposal
    /// for them where the request leaves something open.
    fn plan_record(
        &self,
        ask: &LoadRequest,
        path: &Path,
        record: &mut InstanceSpec,
    ) -> Result<(), Error> {
        let engines = self.engine_choice(ask, &record.nodes)?;
        self.measure_disk(ask, path);
        let opened = open_model(path).ok(); // an encoder has no engine to choose
        let model = opened.as_ref().map(|(source, config)| (source, config));
        let planned = model.and_then(|model| self.planned(ask, model, (&*record, &engines)));
        let best = planned.as_ref().map(|(best, _)| best);
        let classes = best.map(|best| best.classes_of(&record.nodes));
        self.set_classes(ask, classes, record)?;
        if let Some((best, predicted)) = planned {
            record.predicted = predicted;
            record.shares = best.shares_of(&record.nodes);
            if record.nodes.len() > 1 {
                record.split = best.split;
            }
        }
        plan_memory(model, record, &self.rooms_named(None, record))?;
        self.check_readers(path, record)?;
        record.width = u16::try_from(record.nodes.len()).ok();
        Ok(())
    }

    /// Waits until the facts of all live nodes are here; without them they seem to have other
    /// numerics. Blocks for at most [`FACTS_WAIT`].
    pub(super) fn await_facts(&self) {
        let deadline = Instant::now() + FACTS_WAIT;
        let is_silent = |node: &NodeView| node.state == Life::Alive && !node.has_told();
        while self.agent.nodes().iter().any(is_silent) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The first proposal for `nodes`, and logs it; with the [`predictions`] of an open split.
    /// `None` where a request leaves nothing open, and without a prediction; the split then stays
    /// automatic.
    fn planned(
        &self,
        ask: &LoadRequest,
        model: OpenModel<'_>,
        (record, engines): (&InstanceSpec, &EngineChoice),
    ) -> Option<(Proposal, BTreeMap<String, u64>)> {
        let (nodes, views) = (&record.nodes, self.agent.nodes());
        let mut gpus = views.iter().filter(|view| nodes.contains(&view.id));
        let has_gpu = gpus.any(|view| engines::has_gpu(&view.facts));
        let is_split_open = ask.split == SplitKind::Auto && nodes.len() > 1;
        let is_engine_open = has_gpu && *engines == EngineChoice::Fastest;
        if !is_split_open && !is_engine_open {
            return None;
        }
        let told = |line: &str| (self.spec.tell)(&format!("{}: {line}", ask.model));
        match self.best_of(ask, model, (record, engines)) {
            Ok(all) => {
                let best = all.first()?.clone();
                let (split, tok_s) = (&best.split, best.decode_tok_s);
                told(&format!("split {split}, {tok_s:.1} tokens/s as predicted"));
                preview::why(&all).as_deref().into_iter().for_each(told);
                let predicted = is_split_open.then(|| predictions(&all));
                Some((best, predicted.unwrap_or_default()))
            }
            Err(reason) => {
                told(&format!("the split is not planned: {reason}"));
                None
            }
        }
    }

    /// The proposals for `nodes`, at least one, the fastest that fits first.
    fn best_of(
        &self,
        ask: &LoadRequest,
        (source, config): OpenModel<'_>,
        (record, engines): (&InstanceSpec, &EngineChoice),
    ) -> Result<Vec<Proposal>, Error> {
        let nodes = &record.nodes;
        let of = (self.threads(ask), ask.options.memory);
        let forecast = self.forecast(source, config, of)?;
        let (wishes, machines) = ((ask.split, engines), self.machines(nodes));
        let model = (source, config, &forecast);
        let (proposals, mut reasons) =
            self.proposals(model, wishes, (nodes, &machines), (None, record));
        match proposals.is_empty() {
            true => Err(reasons
                .pop()
                .unwrap_or_else(|| "no split fits".into())
                .into()),
            false => Ok(proposals),
        }
    }

    /// Signs the roots of a model and its draft, so that other nodes can fetch ranges of them.
    /// Otherwise they copy whole files from this node.
    fn sign(&self, record: &InstanceSpec, path: &Path) {
        let of_draft = record.of_draft();
        let draft = of_draft
            .as_ref()
            .map(|draft| (draft, self.copies.of_user(&draft.model)));
        let draft = draft.and_then(|(draft, path)| Some((draft, path.ok()?)));
        let model = (record, path.to_owned());
        for (record, path) in std::iter::once(model).chain(draft) {
            let signed = self.copies.sign(&self.agent, &name_of(record), &path);
            if let Err(reason) = signed {
                (self.spec.tell)(&format!(
                    "warning: nodes copy all of {}: {reason}",
                    record.model
                ));
            }
        }
    }

    /// Signs the root of a model on its own thread.
    pub(super) fn sign_meanwhile(&self, record: &InstanceSpec, path: &Path) {
        let (copies, agent) = (Arc::clone(&self.copies), self.agent.clone());
        let (model, path) = (name_of(record), path.to_owned());
        let tell = Arc::clone(&self.spec.tell);
        let run = move || {
            if let Err(reason) = copies.sign(&agent, &model, &path) {
                let name = &model.name;
                tell(&format!(
                    "warning: no other machine answers with {name}: {reason}"
                ));
            }
        };
        self.spawn("sign", run);
    }

    /// Fields that the records of all replicas share.
    fn record(&self, ask: &LoadRequest, path: &Path) -> Result<InstanceSpec, Error> {
        let ModelIdentity {
            sha256,
            bytes,
            manifest,
        } = self.identify(path)?;
        Ok(InstanceSpec {
            model: ask.model.clone(),
            sha256,
            bytes,
            manifest,
            named: !ask.nodes.is_empty(),
            split: ask.split.to_string(),
            threads: ask.threads.unwrap_or(self.spec.threads as u16),
            options: ask.options,
            spare: ask.spare.map_or(SPARE_AUTO, |spare| spare.min(1)),
            source: Some(self.agent.id()),
            draft: ask
                .draft
                .as_deref()
                .map(|name| self.draft(name))
                .transpose()?,
            adapters: self.adapters(ask, path)?,
            names: ask.names.clone(),
            adapter_naming: ask.adapter_naming,
            machine: ask.machine.clone(),
            prompts: self.readers(ask)?,
            prompts_class: ask.prefill_class.clone().unwrap_or_default(),
            ..InstanceSpec::default()
        })
    }

    /// A model of this machine as a spec without an instance, for copies to other nodes.
    pub(super) fn sent(&self, model: &str) -> Result<InstanceSpec, Error> {
        let path = self.copies.of_user(model)?;
        let ask = LoadRequest {
            model: model.to_owned(),
            spare: Some(0),
            options: InstanceOptions {
                parallel: 1,
                weights: WeightDistribution::Whole,
                ..InstanceOptions::default()
            },
            ..LoadRequest::default()
        };
        let record = self.record(&ask, &path)?;
        self.sign(&record, &path);
        Ok(record)
    }

    /// Identifies the model at `path` and publishes its hub origin.
    fn identify(&self, path: &Path) -> Result<ModelIdentity, Error> {
        let identity = self.copies.identify(&self.agent, path)?;
        self.tell_origin((&identity.sha256, identity.manifest), path);
        Ok(identity)
    }

    /// Publishes the hub origin of the model at `path`, if known: the SHA-256 of its file, or of
    /// its manifest. A node without another source then uses the hub.
    pub(super) fn tell_origin(&self, (sha256, manifest): (&str, bool), path: &Path) {
        let origin = match manifest {
            true => self.copies.model_origin(sha256, path),
            false => self.spec.hub.origin(path),
        };
        if let Some(origin) = origin.filter(|origin| origin.sha256 == sha256) {
            origin.publish(&self.agent);
        }
    }

    /// A draft model of this machine's store, as a record names it.
    fn draft(&self, name: &str) -> Result<DraftOf, Error> {
        let ModelIdentity {
            sha256,
            bytes,
            manifest,
        } = self.identify(&self.copies.of_user(name)?)?;
        Ok(DraftOf {
            model: name.to_owned(),
            sha256,
            bytes,
            manifest,
        })
    }

    /// The requested adapters as copies for other nodes: one GGUF file each. Reads them and the
    /// model's shape.
    fn adapters(&self, ask: &LoadRequest, path: &Path) -> Result<Vec<AdapterFile>, Error> {
        let got = ask.adapters.len();
        if got > ADAPTERS_MAX {
            return Err(Error::Count {
                what: "adapters",
                got,
                least: 0,
                most: ADAPTERS_MAX,
            });
        }
        if got == 0 {
            return Ok(Vec::new());
        }
        let source = ModelSource::open(path).map_err(Error::of(path.display()))?;
        let config = Config::read(&source).map_err(Error::of(path.display()))?;
        let mut all: Vec<AdapterFile> = Vec::new();
        for (name, from) in &ask.adapters {
            if name.is_empty() || all.iter().any(|known| known.name == *name) {
                return Err(Error::AdapterName { name: name.clone() });
            }
            let folder = &self.copies.folder;
            let failed = || Error::of(folder.display());
            std::fs::create_dir_all(folder).map_err(failed())?;
            let made = tempfile::tempdir_in(folder).map_err(failed())?;
            let file = adapters::as_gguf((name.as_str(), from.as_path()), &config, made.path());
            let file = file.map_err(Error::of(format_args!("adapter {name}")))?;
            let bytes = std::fs::metadata(&file).map_err(failed())?;
            let model = ask.names.first().unwrap_or(&ask.model);
            let sha256 = self.copies.keep(&file, &format!("{model}:{name}"))?;
            all.push(AdapterFile {
                name: name.clone(),
                sha256,
                bytes: bytes.len(),
            });
        }
        Ok(all)
    }

    /// Writes the first specs of new instances, all or none.
    fn want_all(&self, records: &[InstanceSpec]) -> Result<Vec<InstanceId>, Error> {
        let mut ids = Vec::new();
        for record in records {
            match self.want_new(record) {
                Ok(id) => ids.push(id),
                Err(reason) => {
                    for id in ids {
                        self.want(id, EPOCH_UNWANTED, None)?;
                    }
                    return Err(reason);
                }
            }
        }
        Ok(ids)
    }

    pub(super) fn want_new(&self, record: &InstanceSpec) -> Result<InstanceId, Error> {
        let id = new_id()?;
        self.want(id, 1, Some(record)).map(|()| id)
    }

    /// The request for a pipeline, where the owner has to relay between two of `nodes`; the first
    /// one is the owner.
    fn relayed(&self, ask: &LoadRequest, nodes: &[NodeId]) -> Option<LoadRequest> {
        let (a, b) = preview::pairs(nodes).find(|(a, b)| self.is_apart(*a, *b))?;
        let owner = nodes.first().filter(|_| may_relay(ask))?;
        let names = [a, b, *owner].map(|id| self.name(id));
        (self.spec.tell)(&format!(
            "{}: a pipeline; {} relays: {}",
            ask.model,
            names[2],
            no_path(&names[0], &names[1])
        ));
        Some(LoadRequest {
            split: SplitKind::Pipeline,
            ..ask.clone()
        })
    }

    /// As [`Fleet::unload`](super::Fleet::unload).
    pub(super) fn unload(&self, name: &str, replica: Option<u16>) -> Result<usize, Error> {
        let map = self.agent.map();
        let all: Vec<_> = specs(&map).collect();
        let numbers = replica_names::numbers(all.iter().map(|(id, _, wanted)| (*id, wanted)));
        let is_it = |id: InstanceId, wanted: &InstanceSpec| {
            wanted.is_called(name) || id.to_string() == name
        };
        let named = all.iter().filter(|(id, _, wanted)| is_it(*id, wanted));
        let mut ids: Vec<InstanceId> = named.map(|(id, ..)| *id).collect();
        if ids.is_empty() {
            let name = name.to_owned();
            return Err(Error::UnknownInstance { name });
        }
        if let Some(replica) = replica {
            // A single instance has no number.
            ids.retain(|id| numbers.get(id).map_or(1, |it| it.number) == replica);
        }
        if let (true, Some(replica)) = (ids.is_empty(), replica) {
            let name = name.to_owned();
            return Err(Error::UnknownReplica { replica, name });
        }
        for id in &ids {
            self.want(*id, EPOCH_UNWANTED, None)?;
        }
        Ok(ids.len())
    }
}

/// Whether an instance may run on nodes that cannot all speak: a tensor split would send each of
/// its sums over the relay.
fn may_relay(ask: &LoadRequest) -> bool {
    matches!(ask.split, SplitKind::Auto | SplitKind::Pipeline) && ask.replicas < 2
}
