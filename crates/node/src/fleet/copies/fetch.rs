//! Fetches copies of models: whole or in parts, from other nodes or the hub.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use std::{fs, io};

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::member::Life;
use paceline_fleet::{InstanceSpec, specs};
use paceline_store::storage;
use paceline_store::storage::FileSystem;
use paceline_store::verified::damage::{Count, merged};
use paceline_store::verified::partial_file;
use paceline_store::verified::partial_file::VerifiedPartial;
use paceline_store::verified::sums::SUMS;
use paceline_store::verified::tree::{HashGroups, Tree, shown};
use paceline_worker::partial_source::ByteRange;

use super::super::file_ranges::{FileFetch, Short};
use super::super::hub::{HubOrigin, ModelHub};
use super::super::roots::KnownRoot;
use super::super::{FILE, file_ranges, hub, roots};
use super::files::{copy, hash};
use super::messages::{Fetch, fetch};
use super::repair::{CheckRange, RepairReport, RootOrigin};
use super::{
    CopyProgress, LOOK_EVERY, ModelCopies, NAME, PARTS_OF_HUB, PartialCopy, SILENCE, TELL_EVERY,
    WHOLE_FILES, WHOLE_PART, first_groups, signed_root, write_whole,
};
use crate::fleet::hosts::NodeConnection;
use crate::workers::connection::{ConnectionError, send_message};
use crate::workers::host::ModelName;

impl ModelCopies {
    /// Fetches all of a model to this node and waits for it. Uses all nodes that have parts, or the
    /// node `from` if the root is not signed. `progress` receives byte counts.
    pub(in crate::fleet) fn take(
        &self,
        agent: &Agent,
        from: Option<NodeId>,
        wanted: &InstanceSpec,
        progress: &dyn Fn(u64),
    ) -> Result<(), String> {
        let mut told = |bytes: u64| -> Result<(), ConnectionError> {
            progress(bytes);
            Ok(())
        };
        self.fetch(agent, from, &fetch(agent, wanted), &mut told)
            .map(drop)
    }

    /// Fetches the bytes needed to open a model file with a signed root.
    pub(in crate::fleet) fn take_part(
        &self,
        agent: &Agent,
        wanted: &InstanceSpec,
    ) -> Result<(), String> {
        let fetch = Fetch {
            parts: true,
            ..fetch(agent, wanted)
        };
        if wanted.manifest {
            let fetched = self.fetch_model(agent, None, &fetch, &mut |_| Ok(()));
            return fetched.map(drop);
        }
        let rooted = KnownRoot::from(roots::of(&agent.map(), &wanted.sha256)?);
        let held = self.held(agent, &fetch.model, Some((rooted.clone(), None)))?;
        self.fetch_parts(agent, &fetch, (&held, &rooted), &mut |_| Ok(()))
    }

    pub(super) fn fetch(
        &self,
        agent: &Agent,
        from: Option<NodeId>,
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<Option<RepairReport>, String> {
        if fetch.asks {
            let lacks = |_| "it has no copy of the model".to_owned();
            return self.find(&fetch.model).map(|_| None).map_err(lacks);
        }
        match fetch.model.manifest {
            true => self.fetch_model(agent, from, fetch, told),
            false => self.fetch_file(agent, (signed_root(agent, fetch), from), fetch, told),
        }
    }

    /// Fetches a file, or verifies it if it is here, by its root; `None` if the known root is of
    /// another length.
    pub(super) fn fetch_file(
        &self,
        agent: &Agent,
        (rooted, from): (Result<Option<KnownRoot>, String>, Option<NodeId>),
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<Option<RepairReport>, String> {
        if self.find_file(&fetch.model).is_ok() {
            let known = rooted.ok().flatten().map(|rooted| (rooted, from));
            let extent = if fetch.checks {
                CheckRange::All
            } else {
                CheckRange::Start
            };
            let run = |count: &Count<'_>| self.check((agent, &fetch.model), known, extent, count);
            return watched(run, told);
        }
        let here = partial_file::bytes_on_disk(&self.place(&fetch.model, partial_file::FILE)?);
        self.check_share(fetch, here)?;
        self.get(agent, (rooted, from), fetch, told).map(|()| None)
    }

    /// Checks whether the disk takes what this node's workers will fetch, besides the bytes `here`.
    pub(super) fn check_share(&self, fetch: &Fetch, here: u64) -> Result<(), String> {
        match fetch.share.saturating_sub(here) {
            0 => Ok(()),
            bytes => (self.may_have)(bytes),
        }
    }

    /// Fetches a missing model, by its root if that is known; `None` if the root is of another
    /// length.
    pub(super) fn get(
        &self,
        agent: &Agent,
        (rooted, from): (Result<Option<KnownRoot>, String>, Option<NodeId>),
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let reason = match (rooted, from) {
            (Ok(Some(rooted)), _) => {
                match self.held(agent, &fetch.model, Some((rooted.clone(), from))) {
                    Ok(held) => return self.fetch_parts(agent, fetch, (&held, &rooted), told),
                    Err(reason) => reason,
                }
            }
            (_, Some(from)) => match self.copy_from(agent, from, fetch, told) {
                Ok(()) => return Ok(()),
                Err(reason) => reason,
            },
            (Ok(None), None) => "the signed root is of a file of another length".to_owned(),
            (Err(reason), None) => reason,
        };
        self.whole_from_hub(agent, fetch, &reason, told)
    }

    /// Fetches groups of a model from all nodes that have some, and from the hub if none has them.
    fn fetch_parts(
        &self,
        agent: &Agent,
        fetch: &Fetch,
        (held, rooted): (&PartialCopy, &KnownRoot),
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let model = &fetch.model;
        let wanted = match fetch.parts {
            true => first_groups(rooted, held.partial.groups()),
            false => std::iter::once(0..held.partial.groups().count()).collect(),
        };
        let run = |count: &Count<'_>| self.fetch_groups((agent, model), held, &wanted, count);
        watched(run, told)?;
        match fetch.parts {
            true => Ok(()),
            false => self.seal(agent, model, held),
        }
    }

    /// Fetches all of a model from the hub; `reason` is why no node has it.
    fn whole_from_hub(
        &self,
        agent: &Agent,
        fetch: &Fetch,
        reason: &str,
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let model = &fetch.model;
        let (hub, origin) = self.on_hub((agent, model), fetch.bytes, reason)?;
        let turn = self.turn(WHOLE_FILES);
        let _turn = lock(&turn);
        if self.find_file(model).is_ok() {
            return Ok(()); // copied meanwhile
        }
        // Bytes already downloaded count as part of the budget.
        let [begun, _] = PARTS_OF_HUB;
        let begun = fs::metadata(self.place(model, begun)?).map_or(0, |facts| facts.len());
        (self.may_have)(fetch.bytes.saturating_sub(begun))?;
        let place = self.whole(model)?;
        let named = fs::create_dir_all(&self.folder).and_then(|()| self.write_name(model));
        named.map_err(|error| format!("{}: {error}", place.display()))?;
        let run = |count: &Count<'_>| {
            let whole = hub.whole(&origin, &place, count);
            whole.map_err(|error| error.to_string())
        };
        let had = watched(run, told);
        had.map_err(|failed| unavailable(agent, model, reason, Some(&failed)))
    }

    /// Fetches runs of groups from the hub; `reason` is why no node has them.
    fn groups_from_hub(
        &self,
        (agent, model): (&Agent, &ModelName),
        (partial, runs): (&VerifiedPartial, &[Range<u64>]),
        reason: &str,
        told: &Count<'_>,
    ) -> Result<(), String> {
        let bytes = partial.groups().bytes;
        let (hub, origin) = self.on_hub((agent, model), bytes, reason)?;
        let fill = |run: &Range<u64>| hub::fill(&**hub, &origin, partial, run, told);
        let filled = runs.iter().try_for_each(fill);
        filled.map_err(|failed| unavailable(agent, model, reason, Some(&failed)))
    }

    /// The hub and the model's origin on it, if the length matches. Logs its first use for a model.
    fn on_hub(
        &self,
        (agent, model): (&Agent, &ModelName),
        bytes: u64,
        reason: &str,
    ) -> Result<(&Arc<dyn ModelHub>, HubOrigin), String> {
        let origin = self.origin(agent, model);
        let origin = origin.filter(|origin| origin.bytes == bytes);
        let Some((hub, origin)) = self.hub.as_ref().zip(origin) else {
            return Err(unavailable(agent, model, reason, None));
        };
        if lock(&self.state).of_hub.insert(model.sha256.clone()) {
            let name = &model.name;
            (self.tell)(&format!("{name}: {reason}: asking the hub for {origin}"));
        }
        Ok((hub, origin))
    }

    /// The partial copy of a model, verified by the root `told`; creates it if there is none.
    pub(super) fn held(
        &self,
        agent: &Agent,
        model: &ModelName,
        told: Option<RootOrigin>,
    ) -> Result<Arc<PartialCopy>, String> {
        let is_it = |held: &Arc<PartialCopy>| {
            let told = told.as_ref();
            told.is_none_or(|(rooted, _)| rooted.root == held.rooted.root)
        };
        let known = || {
            lock(&self.state)
                .parts
                .get(&model.sha256)
                .cloned()
                .filter(is_it)
        };
        if let Some(held) = known() {
            return Ok(held);
        }
        let turn = self.turn(&model.sha256);
        let _turn = lock(&turn);
        if let Some(held) = known() {
            return Ok(held);
        }
        self.end_other(&model.sha256)?;
        let (rooted, from) = match told {
            Some(told) => told,
            None => match roots::of(&agent.map(), &model.sha256) {
                Ok(rooted) => (rooted.into(), None),
                Err(reason) => (self.root_of_part(agent, model).ok_or(reason)?, None),
            },
        };
        let path = self.place(model, partial_file::FILE)?;
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let tree = self.leaves(agent, model, (&rooted, from))?;
        let open = || {
            self.write_name(model)?;
            VerifiedPartial::open(&FileSystem, &path, tree)
        };
        let partial = open().map_err(failed)?;
        let held = Arc::new(PartialCopy {
            partial,
            rooted,
            from,
        });
        lock(&self.state)
            .parts
            .insert(model.sha256.clone(), Arc::clone(&held));
        Ok(held)
    }

    /// Ends the partial copy of a file that is verified by another root: two manifests, one of them
    /// wrong, contradict each other. Its groups are verified again by the root of the next one.
    ///
    /// # Errors
    /// It is being fetched or served.
    fn end_other(&self, sha256: &str) -> Result<(), String> {
        let parts = &mut lock(&self.state).parts;
        match parts.get(sha256) {
            Some(held) if Arc::strong_count(held) > 1 => Err(format!(
                "another model's manifest gives the file with SHA-256 {sha256} the root {}, by \
                 which it is in use now",
                held.rooted.root
            )),
            _ => {
                parts.remove(sha256);
                Ok(())
            }
        }
    }

    /// The leaves below a root, from this node or from one that has the file.
    pub(super) fn leaves(
        &self,
        agent: &Agent,
        model: &ModelName,
        (rooted, from): (&KnownRoot, Option<NodeId>),
    ) -> Result<Tree, String> {
        let groups = HashGroups::of(rooted.bytes);
        let accept = |leaves: &[u8]| {
            let tree = Tree::from_bytes(rooted.bytes, leaves)?;
            (shown(tree.root()) == rooted.root).then_some(tree)
        };
        let kept = self.place(model, partial_file::TREE)?;
        if let Some(tree) = fs::read(&kept).ok().and_then(|kept| accept(&kept)) {
            return Ok(tree);
        }
        let sources = self.sources(agent, model, [rooted.by, from]);
        let tree = file_ranges::leaves(agent, (model, groups), &sources, accept)?;
        let written = write_whole(&kept, &tree.to_bytes());
        written.map_err(|error| format!("{}: {error}", kept.display()))?;
        Ok(tree)
    }

    /// Nodes that may have parts of a model: the given nodes, the instances' nodes, their sources,
    /// then all others, which may have a copy. Excludes dead nodes and nodes that sent wrong bytes.
    pub(super) fn sources(
        &self,
        agent: &Agent,
        model: &ModelName,
        first: impl IntoIterator<Item = Option<NodeId>>,
    ) -> Vec<file_ranges::RangeSource> {
        let (map, views) = (agent.map(), agent.nodes());
        let of = self.model_with(&model.sha256);
        let of = of.as_deref().unwrap_or(&model.sha256);
        let is_it = |wanted: &InstanceSpec| wanted.sha256 == of;
        let records = specs(&map).filter(|(.., wanted)| is_it(wanted));
        let of_records = records.flat_map(|(.., wanted)| {
            let source = wanted.source.into_iter();
            source.chain(wanted.nodes).collect::<Vec<_>>()
        });
        let others = views.iter().map(|view| view.id);
        let first = first.into_iter().flatten();
        let mut ids: Vec<NodeId> = first.chain(of_records).chain(others).collect();
        let mut seen = BTreeSet::new();
        let lives = |id: NodeId| matches!(agent.life(id), Life::Alive | Life::Suspect);
        ids.retain(|id| *id != agent.id() && lives(*id) && seen.insert(*id));
        ids.retain(|id| !lock(&self.state).liars.contains(id));
        let name = |id: NodeId| {
            let view = views.iter().find(|view| view.id == id);
            view.map_or_else(|| id.to_string(), |view| view.facts.name.clone())
        };
        let sources = ids
            .into_iter()
            .map(|id| file_ranges::RangeSource { id, name: name(id) });
        sources.take(file_ranges::SOURCES_MAX).collect()
    }

    /// Fetches the missing groups of `wanted`.
    pub(super) fn fetch_groups(
        &self,
        (agent, model): (&Agent, &ModelName),
        held: &PartialCopy,
        wanted: &[Range<u64>],
        told: &Count<'_>,
    ) -> Result<(), String> {
        let partial = &held.partial;
        let missing = || -> Vec<Range<u64>> {
            let wanted = wanted.iter();
            merged(wanted.flat_map(|run| partial.missing(run)).collect())
        };
        if missing().is_empty() {
            return Ok(());
        }
        let _turn = lock(&partial.turn);
        let missing = missing();
        if missing.is_empty() {
            return Ok(()); // fetched meanwhile
        }
        let span = |run: &Range<u64>| partial.groups().span(run);
        let bytes = missing.iter().map(|run| span(run).end - span(run).start);
        if !partial.is_copy() {
            (self.may_have)(bytes.sum())?;
        }
        let sources = self.sources(agent, model, [held.rooted.by, held.from]);
        let lied = |source: &file_ranges::RangeSource, lie: &str| {
            lock(&self.state).liars.insert(source.id);
            let (name, model) = (&source.name, self.label(model));
            (self.tell)(&format!("warning: {model}: {name}: {lie}"));
        };
        let fetching = FileFetch {
            agent,
            model,
            partial,
            sources: &sources,
            told,
            lied: &lied,
        };
        match fetching.run(&missing) {
            Ok(()) => Ok(()),
            Err(Short::Ended(reason)) => Err(reason),
            Err(Short::Lacking(reason)) => {
                let left: Vec<Range<u64>> = missing
                    .iter()
                    .flat_map(|run| partial.missing(run))
                    .collect();
                let left = (partial, left.as_slice());
                self.groups_from_hub((agent, model), left, &reason, told)
            }
        }
    }

    /// Fetches ranges of a model's file that a worker requests, while `goes_on` returns true.
    /// `file` is its name in the model's folder, empty for a model of one file.
    ///
    /// # Errors
    /// The unavailable bytes, and the failure of each source.
    pub(in crate::fleet) fn bring(
        &self,
        agent: &Agent,
        (model, file): (&ModelName, &str),
        parts: &[ByteRange],
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), String> {
        let model = &self.file_of(model, file)?;
        let held = self.held(agent, model, None)?;
        let wanted = CheckRange::Parts(parts).groups(&held.rooted, held.partial.groups());
        self.fetch_groups((agent, model), &held, &wanted, &|_| goes_on())
    }

    /// Turns a complete partial file into a copy. Verifies its SHA-256 as well, in case the root
    /// was signed for another file.
    fn seal(&self, agent: &Agent, model: &ModelName, held: &PartialCopy) -> Result<(), String> {
        let path = &held.partial.path;
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let sum = hash(path).map_err(failed)?;
        if sum != model.sha256 {
            let wrong = held.partial.recheck(&(0..held.partial.groups().count()));
            if !wrong.map_err(failed)?.is_empty() {
                return Err(format!("{} was changed after it came", path.display()));
            }
            self.forget_file(&model.sha256).map_err(failed)?;
            let mut views = agent.nodes().into_iter();
            let by = held.rooted.by.map_or_else(String::new, |by| {
                let view = views.find(|view| view.id == by);
                view.map_or_else(|| by.to_string(), |view| view.facts.name)
            });
            return Err(format!(
                "{by} has signed the root of another file, whose SHA-256 is {sum}"
            ));
        }
        let copy = self.whole(model)?;
        held.partial.publish(&FileSystem, &copy).map_err(failed)?;
        // Without sums, loads compare the copy with its tree.
        let _: io::Result<()> = held.partial.make_sums(&copy.with_extension(SUMS));
        Ok(())
    }

    /// Copies a whole file from one node.
    fn copy_from(
        &self,
        agent: &Agent,
        from: NodeId,
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let turn = self.turn(WHOLE_FILES);
        let _turn = lock(&turn);
        if self.find_file(&fetch.model).is_ok() {
            return Ok(()); // copied meanwhile
        }
        (self.may_have)(fetch.bytes)?;
        let place = self.whole(&fetch.model)?;
        fs::create_dir_all(&self.folder).map_err(|e| format!("{}: {e}", self.folder.display()))?;
        let partial = place.with_extension(WHOLE_PART);
        let opened = agent.open(from, FILE, SILENCE);
        let file = NodeConnection(opened.map_err(|error| error.to_string())?);
        send_message(&file, &fetch.model).map_err(|broken| broken.to_string())?;
        let copied = copy(&file, &partial, fetch, told);
        let copied = copied.map_err(|error| format!("{}: {error}", partial.display()));
        let right = copied.and_then(|copied| match copied == fetch.model.sha256 {
            true => Ok(()),
            false => Err(format!(
                "the copy has SHA-256 {copied}, which is another file"
            )),
        });
        if right.is_err() {
            // The next fetch starts anew.
            let _: io::Result<()> = fs::remove_file(&partial);
        }
        right?;
        let named = write_whole(&place.with_extension(NAME), fetch.model.name.as_bytes());
        let kept = named.and_then(|()| storage::rename(&FileSystem, &partial, &place));
        kept.map_err(|e| format!("{}: {e}", place.display()))
    }
}

/// As [`hub::unavailable`], for this node.
pub(super) fn unavailable(
    agent: &Agent,
    model: &ModelName,
    nodes: &str,
    hub: Option<&str>,
) -> String {
    let views = agent.nodes();
    let own = views.first().map_or("", |own| own.facts.name.as_str());
    hub::unavailable((model.name.as_str(), own), (nodes, hub))
}

/// Runs a fetch on its own thread and reports its progress until it ends.
pub(super) fn watched<T: Send>(
    run: impl FnOnce(&Count<'_>) -> Result<T, String> + Send,
    told: &mut CopyProgress<'_>,
) -> Result<T, String> {
    let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let count = |bytes: u64| {
        done.fetch_add(bytes, Ordering::Relaxed);
        !is_over.load(Ordering::Relaxed)
    };
    std::thread::scope(|scope| {
        let running = scope.spawn(|| run(&count));
        let mut last = Instant::now();
        while !running.is_finished() {
            if last.elapsed() >= TELL_EVERY {
                last = Instant::now();
                if told(done.load(Ordering::Relaxed)).is_err() {
                    is_over.store(true, Ordering::Relaxed);
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let ended = running.join();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
