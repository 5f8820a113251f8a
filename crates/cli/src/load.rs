//! From MODEL on the command line to a model in memory.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use paceline_base::KernelClass;
use paceline_model::{LoadOptions, Model, Source};
use paceline_tensor::{InstructionSet, Kernels};

use crate::error::Error;
use crate::output::tell;

/// Loading that takes longer gets a bar: small models are ready before one is worth looking at.
const BAR_AFTER: Duration = Duration::from_millis(500);

/// Options of every command that computes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ComputeArgs {
    /// Threads to compute with [default: all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// How numbers are computed: cpu, cpu-q8 (reads prompts faster, less exact) or cpu-f32 (slow,
    /// four to eight times the memory)
    #[arg(long, value_name = "CLASS", default_value_t)]
    pub(crate) class: KernelClass,
}

/// Kernels for the threads asked for and the instruction set that `PACELINE_CPU` forces, if any.
///
/// # Errors
/// [`Error::UnknownCpu`], [`Error::CpuLacks`], and what the system says when it refuses a thread.
pub(crate) fn kernels(args: ComputeArgs) -> anyhow::Result<Arc<Kernels>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.map_or(cores, usize::from);
    if threads > cores {
        tell(format_args!(
            "warning: {threads} threads wait for each other on {cores} cores: fewer are faster"
        ));
    }
    let refused = || format!("cannot start {threads} threads");
    let Some(value) = std::env::var_os("PACELINE_CPU").filter(|value| !value.is_empty()) else {
        return Ok(Arc::new(Kernels::new(threads).with_context(refused)?));
    };
    let value = value.to_string_lossy().into_owned();
    let kernels = Kernels::with_set(instruction_set(&value)?, threads);
    if matches!(&kernels, Err(error) if error.kind() == ErrorKind::Unsupported) {
        let available = names(InstructionSet::available());
        return Err(Error::CpuLacks { value, available }.into());
    }
    Ok(Arc::new(kernels.with_context(refused)?))
}

fn instruction_set(value: &str) -> Result<InstructionSet, Error> {
    let mut all = InstructionSet::ALL.into_iter();
    all.find(|set| set.name() == value)
        .ok_or_else(|| Error::UnknownCpu {
            value: value.to_owned(),
            known: names(InstructionSet::ALL),
        })
}

fn names(sets: impl IntoIterator<Item = InstructionSet>) -> String {
    let names: Vec<&str> = sets.into_iter().map(InstructionSet::name).collect();
    names.join(", ")
}

/// Opens `path` and packs its weights, with a progress bar on stderr when that takes a while.
///
/// # Errors
/// What is wrong with the model, and its path.
pub(crate) fn model(
    path: &Path,
    class: KernelClass,
    kernels: Arc<Kernels>,
) -> anyhow::Result<(Source, Model)> {
    let source = Source::open(path).map_err(|error| in_model(path, error))?;
    let style = ProgressStyle::with_template("loading {bar:30} {pos}/{len} layers")?;
    let mut bar = None;
    let start = Instant::now();
    let model = Model::load(&source, LoadOptions { class }, kernels, |done, of| {
        if start.elapsed() > BAR_AFTER {
            let new = || ProgressBar::new(of as u64).with_style(style.clone());
            bar.get_or_insert_with(new).set_position(done as u64);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok((source, model.map_err(|error| in_model(path, error))?))
}

/// Adds the path, unless the error has it: of several files, it names the right one.
fn in_model(path: &Path, error: paceline_model::Error) -> anyhow::Error {
    let path = path.display().to_string();
    if error.to_string().starts_with(&path) {
        error.into()
    } else {
        anyhow::Error::new(error).context(format!("cannot load {path}"))
    }
}
