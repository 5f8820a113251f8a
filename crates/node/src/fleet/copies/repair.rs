//! Repair of complete copies: finds groups that differ from the model's hash tree and fetches them
//! again.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::{Bytes, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::Agent;
use serde::{Deserialize, Serialize};

use super::files::header_bytes;
use super::{ModelCopies, PartialCopy, first_groups, partial_file, write_whole};
use crate::fleet::roots::{self, KnownRoot};
use crate::workers::host::ModelName;
use paceline_store::storage::{FileSystem, OpenMode, Storage as _};
use paceline_store::verified::checksums::Checksums;
use paceline_store::verified::damage::{Count, compare, merged};
use paceline_store::verified::partial_file::VerifiedPartial;
use paceline_store::verified::tree::{HashGroups, Tree, shown};
use paceline_worker::partial_source::ByteRange;

/// Most damaged ranges listed in an error or warning.
const RANGES_MAX: usize = 3;

/// A damaged copy up to this size is compared whole, so that one message lists all damage. The
/// worker waits four seconds for it at 1 GB/s.
const WHOLE_BYTES: u64 = 4 << 30;

/// Which bytes of a copy to compare.
#[derive(Clone, Copy, Debug)]
pub(in crate::fleet) enum CheckRange<'a> {
    /// The bytes needed to open and identify the file.
    Start,
    /// Only these ranges.
    Parts(&'a [ByteRange]),
    /// Every byte.
    All,
}

impl CheckRange<'_> {
    /// The groups that have these bytes.
    pub(super) fn groups(self, rooted: &KnownRoot, groups: HashGroups) -> Vec<Range<u64>> {
        match self {
            Self::Start => first_groups(rooted, groups),
            Self::Parts(parts) => {
                let around = |(start, end): &ByteRange| groups.around(&(*start..*end));
                parts.iter().map(around).collect()
            }
            Self::All => std::iter::once(0..groups.count()).collect(),
        }
    }
}

/// The part of a damaged copy that was fetched again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairReport {
    /// Blocks: the units of the file's hash tree.
    pub blocks: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// The root of a model file, and the node it came from.
pub(super) type RootOrigin = (KnownRoot, Option<NodeId>);

impl ModelCopies {
    /// Compares bytes of a whole copy, or of the store's file, with its hash tree. Groups that
    /// differ are fetched from other nodes or the hub, and written in place. A copy whose root no
    /// node has signed is compared by its SHA-256. `count` receives the number of bytes compared or
    /// fetched. Returns the repaired part; `None` for an intact copy, and if this node has none.
    ///
    /// # Errors
    /// The damaged bytes, and why no source supplied them.
    pub(in crate::fleet) fn check(
        &self,
        (agent, model): (&Agent, &ModelName),
        known: Option<RootOrigin>,
        extent: CheckRange<'_>,
        count: &Count<'_>,
    ) -> Result<Option<RepairReport>, String> {
        let Some((copy, tree, known)) = self.comparable((agent, model), known)? else {
            return Ok(None);
        };
        let compare = |groups| {
            let opened = FileSystem.open(&copy, OpenMode::Read);
            let wrong = opened.and_then(|file| compare(&*file, &tree, groups, count));
            wrong.map_err(|error| format!("{}: {error}", copy.display()))
        };
        if compare(extent.groups(&known.0, tree.groups))?.is_empty() {
            return Ok(None);
        }
        let turn = self.turn(&model.sha256);
        let _turn = lock(&turn);
        // Perhaps repaired meanwhile, for another worker.
        let extent = match tree.groups.bytes <= WHOLE_BYTES {
            true => CheckRange::All,
            false => extent,
        };
        let wrong = compare(extent.groups(&known.0, tree.groups))?;
        match wrong.is_empty() {
            true => Ok(None),
            false => self
                .mend((agent, model), (&copy, &tree), (known, wrong), count)
                .map(Some),
        }
    }

    /// A complete copy, or the user's file with checksums, and its hash tree. `None` if there is
    /// neither, and for a copy without a root whose SHA-256 is right.
    fn comparable(
        &self,
        (agent, model): (&Agent, &ModelName),
        known: Option<RootOrigin>,
    ) -> Result<Option<(PathBuf, Tree, RootOrigin)>, String> {
        let copy = self.whole(model)?;
        if !copy.is_file() {
            return Ok(self.stored(model));
        }
        let Some(known) = known.or_else(|| self.root(agent, model)) else {
            return self.check_sum(&copy, model).map(|()| None);
        };
        lock(&self.state)
            .roots
            .insert(model.sha256.clone(), known.clone());
        let tree = self.tree_of_copy((agent, model), &copy, &known)?;
        Ok(Some((copy, tree, known)))
    }

    /// A file of the user's store that has checksums.
    fn stored(&self, model: &ModelName) -> Option<(PathBuf, Tree, RootOrigin)> {
        if model.manifest {
            return None;
        }
        let path = self.find_file(model).ok()?;
        let Checksums { tree, .. } = Checksums::read(&path).ok()??;
        let bytes = tree.groups.bytes;
        // If the header cannot be read, all of the file counts as header.
        let header = header_bytes(&path).unwrap_or(bytes);
        let rooted = KnownRoot {
            bytes,
            header,
            root: shown(tree.root()),
            weights: bytes.saturating_sub(header),
            by: None,
        };
        Some((path, tree, (rooted, None)))
    }

    /// The root of a model, from the map or from the node that requested the check.
    pub(super) fn root(&self, agent: &Agent, model: &ModelName) -> Option<RootOrigin> {
        let map = agent.map();
        let told = || {
            let told = lock(&self.state).roots.get(&model.sha256).cloned();
            told.filter(|(rooted, _)| rooted.is_trusted(&map))
        };
        let of_model = || Some((self.root_of_part(agent, model)?, None));
        let of_map = roots::of(&map, &model.sha256).ok();
        let of_map = of_map.map(|rooted| (rooted.into(), None));
        of_map.or_else(told).or_else(of_model)
    }

    /// Refuses a copy whose SHA-256 differs from its name. Reads all of it, unless it is unchanged
    /// since this process last did.
    pub(super) fn check_sum(&self, copy: &Path, model: &ModelName) -> Result<(), String> {
        let sum = self.hash(copy);
        let sum = sum.map_err(|error| format!("{}: {error}", copy.display()))?;
        match sum == model.sha256 {
            true => Ok(()),
            false => Err(format!(
                "the copy {} is damaged, its SHA-256 is {sum}: `paceline rm {}` removes it",
                copy.display(),
                model.name
            )),
        }
    }

    /// The leaves below a copy's root: from disk, from another node, or from the copy itself if its
    /// SHA-256 is right.
    fn tree_of_copy(
        &self,
        (agent, model): (&Agent, &ModelName),
        copy: &Path,
        (rooted, from): &RootOrigin,
    ) -> Result<Tree, String> {
        let reason = match self.leaves(agent, model, (rooted, *from)) {
            Ok(tree) => return Ok(tree),
            Err(reason) => reason,
        };
        self.check_sum(copy, model)?;
        let failed = |error: io::Error| format!("{}: {error}", copy.display());
        let mut file = File::open(copy).map_err(failed)?;
        let tree = Tree::read(&mut file, rooted.bytes).map_err(failed)?;
        if shown(tree.root()) != rooted.root {
            return Err(reason);
        }
        write_whole(&self.place(model, partial_file::TREE)?, &tree.to_bytes()).map_err(failed)?;
        Ok(tree)
    }

    /// Fetches the groups `wrong` of a copy and writes them in place.
    pub(super) fn mend(
        &self,
        (agent, model): (&Agent, &ModelName),
        (copy, tree): (&Path, &Tree),
        ((rooted, from), wrong): (RootOrigin, Vec<Range<u64>>),
        count: &Count<'_>,
    ) -> Result<RepairReport, String> {
        let groups = tree.groups;
        let damage = format!(
            "the copy {} is damaged at bytes {}",
            copy.display(),
            ranges(groups, &wrong)
        );
        (self.tell)(&format!("warning: {}: {damage}", model.name));
        let failed = |error: io::Error| format!("{damage}: {error}");
        let held = PartialCopy {
            partial: VerifiedPartial::of_copy(&FileSystem, copy, tree.clone(), &wrong)
                .map_err(failed)?,
            rooted,
            from,
        };
        let fetched = self.fetch_groups((agent, model), &held, &wrong, count);
        fetched.map_err(|reason| format!("{damage}: {reason}"))?;
        held.partial.sync().map_err(failed)?;
        let mended = RepairReport {
            blocks: wrong.iter().map(|run| run.end - run.start).sum(),
            bytes: wrong.iter().map(|run| bytes_of(groups, run)).sum(),
        };
        let (name, RepairReport { blocks, bytes }) = (&model.name, mended);
        let bytes = Bytes(bytes);
        (self.tell)(&format!(
            "{name}: mended {blocks} blocks ({bytes}) of the copy"
        ));
        Ok(mended)
    }

    /// As [`check`](Self::check), for a worker that found damage in its ranges of a complete or
    /// partial file. `file` is its name in the model's folder, empty for a model of one file.
    pub(in crate::fleet) fn repair(
        &self,
        agent: &Agent,
        (model, file): (&ModelName, &str),
        parts: &[ByteRange],
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), String> {
        let model = &self.file_of(model, file)?;
        let count: &Count<'_> = &|_| goes_on();
        if self.whole(model)?.is_file() || self.stored(model).is_some() {
            let checked = self.check((agent, model), None, CheckRange::Parts(parts), count);
            return checked.map(drop);
        }
        let held: Arc<PartialCopy> = self.held(agent, model, None)?;
        let (path, groups) = (&held.partial.path, held.partial.groups());
        for run in CheckRange::Parts(parts).groups(&held.rooted, groups) {
            let wrong = held.partial.recheck(&run);
            let wrong = wrong.map_err(|error| format!("{}: {error}", path.display()))?;
            if !wrong.is_empty() {
                let (path, at) = (path.display(), ranges(groups, &merged(wrong)));
                let name = &model.name;
                (self.tell)(&format!("warning: {name}: {path} is damaged at bytes {at}"));
            }
        }
        self.bring(agent, (model, ""), parts, goes_on)
    }
}

fn bytes_of(groups: HashGroups, run: &Range<u64>) -> u64 {
    let span = groups.span(run);
    span.end - span.start
}

/// Runs of groups as byte ranges, for messages.
pub(super) fn ranges(groups: HashGroups, runs: &[Range<u64>]) -> String {
    let span = |run: &Range<u64>| groups.span(run);
    let first = runs.iter().take(RANGES_MAX).map(span);
    let first: Vec<String> = first
        .map(|it| format!("{}..{}", it.start, it.end))
        .collect();
    match runs.len().saturating_sub(RANGES_MAX) {
        0 => first.join(", "),
        more => format!("{} and {more} more ranges", first.join(", ")),
    }
}
