//! The life of a model's copy on a disk with faults. It is fetched group by group, published under
//! its final name, compared and mended. Meanwhile the power fails, bits flip, files are cut, and
//! the disk is full.
//!
//! The code is that of nodes: [`VerifiedPartial`], [`compare`], [`replace`]. Only the disk below it
//! is simulated (`disk`), and the nodes that send groups.
//!
//! *Safety*, checked after each step:
//! - A partial file that was opened offers right groups only.
//! - A group that the disk did not take, or that was wrong, is not offered.
//! - A complete copy that no fault has touched has the model's bytes, under its name from the first
//!   moment on. Once published, it stays through power cuts.
//! - A small file has its old bytes or its new ones.
//! - A comparison finds each flipped bit, and each byte that a cut file lacks.
//!
//! *Liveness*: without further faults the copy is complete and right.

use std::path::Path;

use paceline_node::testing::{Tree, VerifiedPartial, compare};
use paceline_store::storage::{OpenMode, Storage as _, replace};

use crate::disk::SimDisk;
use crate::scenario::SimRandom;

/// The partial file, its record and the complete copy, as `fleet::copies` names them.
const SHARD: &str = "m.shard";
const HAVE: &str = "m.have";
const COPY: &str = "m.gguf";

/// A small file.
const NAME: &str = "m.name";

/// Steps of a run: some four downloads.
const STEPS: usize = 60;

/// Result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyOutcome {
    /// Groups stored.
    pub fetched: usize,
    pub power_cuts: usize,
    /// Groups fetched again in place.
    pub mended: usize,
    /// Groups that a full disk did not take.
    pub refused: usize,
    pub published: usize,
    pub violations: Vec<String>,
}

/// Runs the copy of this seed. `syncs` is false for a disk that only claims to sync, which is a
/// violation.
pub fn run_copy(seed: u64, syncs: bool) -> CopyOutcome {
    let mut run = CopyRun::new(seed, syncs);
    for _ in 0..STEPS {
        run.step();
        run.check_copy();
    }
    run.finish();
    run.outcome
}

struct CopyRun {
    random: SimRandom,
    disk: SimDisk,
    /// The model's bytes, and their hash tree.
    right: Vec<u8>,
    tree: Tree,
    partial: Option<VerifiedPartial>,
    /// Whether the copy's name must survive.
    is_published: bool,
    /// Whether a fault has touched the bytes of the copy since they were right.
    is_touched: bool,
    /// Contents that the small file may have: the last that was written, and those of failed writes
    /// since. `None` stands for no file.
    small: Vec<Option<u64>>,
    outcome: CopyOutcome,
}

impl CopyRun {
    fn new(seed: u64, syncs: bool) -> Self {
        let mut random = SimRandom::new(seed ^ 0xd15c);
        let words = (2 + random.below(4)) * (8 << 10) + random.below(500);
        let words = (0..words).flat_map(|_| random.next().to_le_bytes());
        let right: Vec<u8> = words.collect();
        let tree = Tree::read(&mut &*right, right.len() as u64).expect("bytes in memory");
        Self {
            disk: SimDisk::new(seed, syncs),
            random,
            right,
            tree,
            partial: None,
            is_published: false,
            is_touched: false,
            small: vec![None],
            outcome: CopyOutcome::default(),
        }
    }

    fn violate(&mut self, what: String) {
        self.outcome.violations.push(what);
    }

    fn group(&self, index: u64) -> &[u8] {
        let span = self.tree.groups.span(&(index..index + 1));
        &self.right[span.start as usize..span.end as usize]
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..=8 => self.fetch(),
            9 | 10 => self.publish(),
            11 | 12 => self.mend(),
            13 => self.write_small(),
            14 => self.cut_power(),
            15 => self.partial = None, // the process is killed
            16 => self.flip(),
            17 => self.cut_file(),
            18 => self.disk.fill(true),
            _ => self.disk.fill(false),
        }
    }

    /// Opens the partial file if that was not done yet, and checks what it offers.
    fn open(&mut self) -> bool {
        if self.partial.is_some() {
            return true;
        }
        let Ok(partial) = VerifiedPartial::open(&self.disk, Path::new(SHARD), self.tree.clone())
        else {
            return false;
        };
        for (start, end) in partial.runs() {
            for index in start..end {
                let given = partial.give(&(index..index + 1)).ok().flatten();
                if given.as_deref() != Some(self.group(index)) {
                    self.violate(format!(
                        "an opened file offers group {index}, which is wrong"
                    ));
                }
            }
        }
        self.partial = Some(partial);
        true
    }

    /// Another node sends the first missing group, now and then with a wrong bit.
    fn fetch(&mut self) {
        if !self.open() {
            return;
        }
        let all = 0..self.tree.groups.count();
        let missing = self.partial.as_ref().and_then(|partial| {
            let runs = partial.missing(&all);
            runs.first().map(|run| run.start)
        });
        let Some(index) = missing else {
            return;
        };
        let (is_wrong, mut bytes) = (self.random.chance(100), self.group(index).to_vec());
        if is_wrong {
            let at = self.random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1;
        }
        let Some(partial) = &self.partial else {
            return;
        };
        let taken = partial.take(index, &bytes);
        let is_offered = partial.missing(&(index..index + 1)).is_empty();
        match taken {
            Ok(true) => self.outcome.fetched += 1,
            Ok(false) => {}
            Err(_) => self.outcome.refused += 1,
        }
        if is_offered != (matches!(taken, Ok(true)) && !is_wrong) {
            self.violate(format!(
                "group {index} was taken as {taken:?}: {is_offered}"
            ));
        }
    }

    /// As a node does once all groups are there and their SHA-256 is right.
    fn publish(&mut self) {
        let bytes = self.disk.bytes_of(Path::new(SHARD));
        let Some(partial) = self.partial.as_ref().filter(|it| it.is_complete()) else {
            return;
        };
        if bytes.as_ref() != Some(&self.right) {
            let all = 0..self.tree.groups.count();
            // A full disk may keep it from the record, not from the open file.
            let _: std::io::Result<_> = partial.recheck(&all);
            return;
        }
        let is_there = self.disk.bytes_of(Path::new(COPY)).is_some();
        if !is_there && partial.publish(&self.disk, Path::new(COPY)).is_ok() {
            self.is_published = true;
            self.is_touched = false;
            self.outcome.published += 1;
        }
    }

    /// Compares all of the copy and fetches the groups that differ, as a load or a `pull` does.
    fn mend(&mut self) {
        let Ok(file) = self.disk.open(Path::new(COPY), OpenMode::Read) else {
            return;
        };
        let all = std::iter::once(0..self.tree.groups.count()).collect();
        let wrong = compare(&*file, &self.tree, all, &|_| true).unwrap_or_default();
        let is_right = self.disk.bytes_of(Path::new(COPY)).as_ref() == Some(&self.right);
        if is_right != wrong.is_empty() {
            self.violate(format!("a copy is right: {is_right}, and {wrong:?} differ"));
        }
        let copy = Path::new(COPY);
        let mended = VerifiedPartial::of_copy(&self.disk, copy, self.tree.clone(), &wrong);
        let Ok(mended) = mended else { return };
        let taken = wrong.into_iter().flatten().map(|index| {
            let taken = mended.take(index, self.group(index));
            taken.map(|_| 1)
        });
        let taken: std::io::Result<usize> = taken.sum();
        if let (Ok(taken), Ok(())) = (taken, mended.sync()) {
            self.outcome.mended += taken;
            self.is_touched = false;
        }
    }

    /// Replaces the small file by the next number.
    fn write_small(&mut self) {
        let next = self.random.next();
        let written = replace(&self.disk, Path::new(NAME), &next.to_le_bytes());
        if written.is_ok() {
            self.small.clear();
        }
        self.small.push(Some(next));
    }

    fn cut_power(&mut self) {
        self.partial = None;
        self.disk.cut_power();
        self.disk.fill(false);
        self.outcome.power_cuts += 1;
        let is_there = self.disk.bytes_of(Path::new(COPY)).is_some();
        if self.is_published && !is_there {
            self.violate("a published copy is gone after a power cut".to_owned());
            self.is_published = false;
        }
        self.check_small();
    }

    /// The small file has one of the contents that it may have.
    fn check_small(&mut self) {
        let found = self.disk.bytes_of(Path::new(NAME));
        let number = |bytes: &Vec<u8>| bytes.as_slice().try_into().map(u64::from_le_bytes).ok();
        let is_one = match &found {
            None => self.small.contains(&None),
            Some(bytes) => number(bytes).is_some_and(|own| self.small.contains(&Some(own))),
        };
        if !is_one {
            let small = &self.small;
            let what = format!("a small file has {found:?}, expected one of {small:?}");
            self.violate(what);
        }
    }

    fn flip(&mut self) {
        let path = [SHARD, HAVE, COPY][self.random.below(3) as usize];
        let at = self.random.below(self.right.len() as u64);
        let is_done = self.disk.flip(Path::new(path), at);
        self.is_touched |= is_done && path != HAVE;
    }

    fn cut_file(&mut self) {
        let path = [SHARD, HAVE, COPY][self.random.below(3) as usize];
        let bytes = self.random.below(self.right.len() as u64);
        // No node has it open: it was cut while none ran.
        self.partial = None;
        self.disk.cut(Path::new(path), bytes);
        self.is_touched |= path != HAVE;
    }

    /// A copy that no fault has touched has the model's bytes.
    fn check_copy(&mut self) {
        let copy = self.disk.bytes_of(Path::new(COPY));
        if !self.is_touched && copy.is_some_and(|bytes| bytes != self.right) {
            self.violate("the copy has its name and not the model's bytes".to_owned());
            self.is_touched = true; // told once
        }
    }

    /// Without further faults the copy becomes right.
    fn finish(&mut self) {
        self.cut_power();
        self.mend();
        for _ in 0..100 {
            self.fetch();
            self.publish();
        }
        self.mend();
        if self.disk.bytes_of(Path::new(COPY)).as_ref() != Some(&self.right) {
            self.violate("the copy is not right in the end".to_owned());
        }
    }
}
