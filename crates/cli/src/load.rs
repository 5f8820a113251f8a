//! Kernels, threads and progress for loading MODEL into memory.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use paceline_model::ModelSource;
use paceline_tensor::{InstructionSet, Kernels, Pinning};
use paceline_worker::open_checked;

use crate::compute::ComputeArgs;
use crate::error::{Error, failed};
use crate::output::{counted, print_err};

/// Nodes per core from which a warning says that they share cores.
const TURNS: usize = 4;

/// Loading time from which a bar is shown; small models load faster.
const BAR_AFTER: Duration = Duration::from_millis(500);

/// Threads of each of `nodes` local nodes. Warns about more threads than cores.
pub(crate) fn threads(args: ComputeArgs, nodes: u32) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let nodes = nodes as usize;
    if nodes > TURNS * cores {
        print_err(format_args!(
            "warning: {nodes} nodes take turns on {}: fewer are faster",
            counted(cores, "core")
        ));
    }
    let Some(threads) = args.threads.map(usize::from) else {
        return (cores / nodes).max(1);
    };
    if nodes * threads > cores && threads > 1 {
        let all = nodes * threads;
        print_err(format_args!(
            "warning: {all} threads wait for each other on {}: fewer are faster",
            counted(cores, "core")
        ));
    }
    threads
}

/// Kernels on `threads` threads with the instruction set that `PACELINE_CPU` forces, if any.
pub(crate) fn kernels(threads: usize) -> anyhow::Result<Arc<Kernels>> {
    free_kernels(threads).map(Arc::new)
}

/// As [`kernels`], with pinned threads.
pub(crate) fn kernels_at(threads: usize, pinning: Pinning) -> anyhow::Result<Arc<Kernels>> {
    match pinning {
        Pinning::Free => kernels(threads),
        pinning => Ok(Arc::new(free_kernels(threads)?.pinned(pinning)?)),
    }
}

/// As [`kernels`], not shared.
pub(crate) fn free_kernels(threads: usize) -> anyhow::Result<Kernels> {
    let refused = || format!("cannot start {threads} threads");
    match check_cpu()? {
        Some(set) => Kernels::with_set(set, threads).with_context(refused),
        None => Kernels::new(threads).with_context(refused),
    }
}

const UNSET_CPU: &str = "unset PACELINE_CPU to have the fastest that this machine can";

/// The instruction set that `PACELINE_CPU` forces, if any.
pub(crate) fn check_cpu() -> Result<Option<InstructionSet>, Error> {
    let value = std::env::var_os("PACELINE_CPU").filter(|value| !value.is_empty());
    let Some(value) = value.map(|value| value.to_string_lossy().into_owned()) else {
        return Ok(None);
    };
    let set = instruction_set(&value)?;
    if InstructionSet::available().contains(&set) {
        return Ok(Some(set));
    }
    let available = names(InstructionSet::available());
    Err(failed(
        format!("PACELINE_CPU is {value:?}, but this machine has {available}"),
        UNSET_CPU,
    ))
}

fn instruction_set(value: &str) -> Result<InstructionSet, Error> {
    let mut all = InstructionSet::ALL.into_iter();
    let unknown = || {
        let known = names(InstructionSet::ALL);
        let text = format!("PACELINE_CPU is {value:?}, expected one of {known}");
        failed(text, UNSET_CPU)
    };
    all.find(|set| set.name() == value).ok_or_else(unknown)
}

fn names(sets: impl IntoIterator<Item = InstructionSet>) -> String {
    let names: Vec<&str> = sets.into_iter().map(InstructionSet::name).collect();
    names.join(", ")
}

/// Opens the model at `path`. Weights of the store are compared with their checksums when they are
/// read.
pub(crate) fn open(path: &Path) -> anyhow::Result<ModelSource> {
    open_checked(path).map_err(|error| match error {
        paceline_worker::Error::Model(error) => in_model(path, error),
        other => other.into(),
    })
}

pub(crate) struct LoadBar {
    start: Instant,
    bar: Option<ProgressBar>,
}

impl LoadBar {
    /// Starts the clock.
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            bar: None,
        }
    }

    pub(crate) fn show(&mut self, done: usize, of: usize) {
        if self.start.elapsed() < BAR_AFTER {
            return;
        }
        let style = ProgressStyle::with_template("loading {wide_bar} {pos}/{len} layers");
        let style = style.expect("a template that a test has seen");
        let new = || ProgressBar::new(0).with_style(style);
        let bar = self.bar.get_or_insert_with(new);
        bar.set_length(of as u64);
        bar.set_position(done as u64);
    }

    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Adds the path, unless the error already names the right one of several files.
pub(crate) fn in_model(path: &Path, error: paceline_model::Error) -> anyhow::Error {
    let path = path.display().to_string();
    if error.to_string().starts_with(&path) {
        error.into()
    } else {
        anyhow::Error::new(error).context(format!("cannot load {path}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_drawn() {
        let mut bar = LoadBar::new();
        bar.start -= BAR_AFTER;
        bar.show(1, 3);
        assert_eq!(bar.bar.as_ref().unwrap().position(), 1);
        bar.clear();
        assert!(bar.bar.is_none());
    }
}
