//! From MODEL on the command line to a model in memory.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use paceline_base::KernelClass;
use paceline_model::{LoadOptions, Model, Source};
use paceline_tensor::{InstructionSet, Kernels};

/// Options of every command that computes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ComputeArgs {
    /// Threads to compute with [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// How numbers are computed: cpu, or cpu-f32 (slow, four to eight times the memory)
    #[arg(long, value_name = "CLASS", default_value_t)]
    pub(crate) class: KernelClass,
}

/// Kernels for the threads asked for and the instruction set that `PACELINE_CPU` forces, if any.
pub(crate) fn kernels(args: ComputeArgs) -> anyhow::Result<Arc<Kernels>> {
    let threads = match args.threads {
        Some(threads) => usize::from(threads),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let kernels = match std::env::var("PACELINE_CPU") {
        Ok(name) if !name.is_empty() => Kernels::with_set(instruction_set(&name)?, threads),
        _ => Kernels::new(threads),
    };
    Ok(Arc::new(kernels.with_context(|| {
        format!("cannot start {threads} threads")
    })?))
}

fn instruction_set(name: &str) -> anyhow::Result<InstructionSet> {
    let Some(set) = InstructionSet::ALL
        .into_iter()
        .find(|set| set.name() == name)
    else {
        let known = InstructionSet::ALL.map(InstructionSet::name).join(", ");
        bail!("PACELINE_CPU is {name:?}, expected one of {known}");
    };
    Ok(set)
}

/// Opens `path` and packs its weights, with a progress bar on stderr when that takes a while.
pub(crate) fn model(
    path: &Path,
    class: KernelClass,
    kernels: Arc<Kernels>,
) -> anyhow::Result<(Source, Model)> {
    let open = || format!("cannot load {}", path.display());
    let source = Source::open(path).with_context(open)?;
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(
        "loading {bar:30} {pos}/{len} layers",
    )?);
    // Small models are ready before a bar is worth looking at.
    let start = std::time::Instant::now();
    let model = Model::load(&source, LoadOptions { class }, kernels, |done, of| {
        if start.elapsed() > Duration::from_millis(500) {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
        }
    });
    bar.finish_and_clear();
    Ok((source, model.with_context(open)?))
}
