//! `paceline engines`: lists the compute engines, and installs MLX.

use std::env::consts::{ARCH, OS};
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use paceline_board::engines::{KeptRates, LIST_ENGINES, choose, cpu, measure, mend_mlx, mlx, text};
use paceline_board::fast_sync::{FastSync, SyncChoice};
use paceline_cluster::machine;
use paceline_mlx::Library;
use paceline_store::{MlxBuild, MlxInstallation, SystemVersion, Toolchain, install_mlx, mlx_bytes};
use serde_json::json;

use crate::error::{Error, failed};
use crate::home::{self, StoreSettings};
use crate::interrupt::Signals;
use crate::member;
use crate::output::{print, print_err};
use crate::progress::on_stderr;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<EnginesCommand>,
    /// Measure MLX's devices for the predictions of `load`, which takes some seconds
    #[arg(long)]
    measure: bool,
    /// Give up after so long: MLX waits for ever for a device that hangs
    #[arg(long, value_name = "SECONDS", default_value_t = LIMIT_S)]
    limit: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Default limit. MLX compiles kernels in its first evaluation; on CUDA that took up to 40 s (H100,
/// November 2026).
const LIMIT_S: u64 = 120;

#[derive(Debug, Subcommand)]
enum EnginesCommand {
    /// Fetch an engine into paceline's folder
    Install(Install),
}

#[derive(Debug, clap::Args)]
struct Install {
    /// The engine
    engine: Installable,
    /// Which build of MLX [default: the one for this machine]
    #[arg(long, value_name = "BUILD")]
    build: Option<Build>,
    /// Folder with the sources of mlx-c, instead of the release's layer or those cargo fetches
    #[arg(long, value_name = "FOLDER")]
    sources: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Installable {
    Mlx,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Build {
    Cpu,
    Metal,
    #[value(name = "cuda-12")]
    Cuda12,
    #[value(name = "cuda-13")]
    Cuda13,
}

impl From<Build> for MlxBuild {
    fn from(build: Build) -> Self {
        match build {
            Build::Cpu => Self::Cpu,
            Build::Metal => Self::Metal,
            Build::Cuda12 => Self::Cuda12,
            Build::Cuda13 => Self::Cuda13,
        }
    }
}

/// Lists or installs engines.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    match &args.command {
        Some(EnginesCommand::Install(install)) => install_engine(install, signals),
        None => list(args),
    }
}

fn list(args: &Args) -> anyhow::Result<()> {
    let (places, measures) = (home::mlx_places()?, args.measure);
    let (tell, told) = channel();
    let find = move || {
        let mut mlx = mlx(&places);
        if measures {
            measure(&mut mlx);
        }
        let _ = tell.send(mlx); // late
    };
    let thread = std::thread::Builder::new().name("devices".to_owned());
    thread.spawn(find).context("cannot start a thread")?;
    let limit = Duration::from_secs(args.limit);
    let late = |_| {
        let work = if measures { "measuring" } else { "listing" };
        failed(
            format!(
                "{work} the devices of mlx took more than {limit:?}: one of them or its driver \
                 hangs"
            ),
            "end other users of the GPU, or restart the machine; --limit waits longer",
        )
    };
    let mut mlx = told.recv_timeout(limit).map_err(late)?;
    let kept = KeptRates::new(&home::folder()?);
    if measures {
        kept.keep(&mlx);
    } else {
        // This process itself measures the usual waits.
        let wait = FastSync::new(&home::folder()?).decide(SyncChoice::Qualified, None);
        kept.add_to(&mut mlx, wait);
    }
    let engines = [cpu(), mlx];
    if args.json {
        return print(&json!({ "engines": engines }).to_string());
    }
    print(&text(&engines))?;
    if !engines[1].ready {
        print_err(format_args!("hint: {}", mend_mlx()));
    }
    Ok(())
}

fn unpublished(build: &str) -> Error {
    let hint = match build {
        "MLX" => "the cpu engine needs nothing and is always there",
        _ => "leave out --build for the one that fits this machine",
    };
    failed(format!("{build} is not published for {OS} on {ARCH}"), hint)
}

fn install_engine(args: &Install, signals: &Signals) -> anyhow::Result<()> {
    let Installable::Mlx = args.engine;
    let build = match args.build.map(MlxBuild::from) {
        Some(build) if !build.exists_for(OS, ARCH) => {
            return Err(unpublished(&format!("mlx-{}", build.name())).into());
        }
        Some(build) => build,
        None => choose(OS, ARCH, machine::cuda_major).ok_or_else(|| unpublished("MLX"))?,
    };
    let settings = StoreSettings::from_env()?;
    let tools = Toolchain {
        system: machine::system_version().map(|(major, minor)| SystemVersion(major, minor)),
        shipped: home::release_folder(),
        sources: args.sources.clone(),
        ..Toolchain::default()
    };
    let installed = signals.orderly(|cancel| {
        let (options, mut progress) = (&settings.options, on_stderr());
        let root = home::mlx_folder()?;
        Ok(install_mlx(
            &root,
            build,
            &tools,
            options,
            cancel,
            &mut *progress,
        )?)
    })?;
    // A node that does not run lists its engines when it starts, others within minutes.
    let _ = member::ask_if_up(LIST_ENGINES, json!({}));
    report(&installed, args.json)
}

fn report(mlx: &MlxInstallation, as_json: bool) -> anyhow::Result<()> {
    // Opened once, to report load errors now.
    let library = Library::load(&mlx.library)?;
    let bytes = mlx_bytes(mlx);
    if as_json {
        let object = json!({
            "engine": "mlx", "build": mlx.build.name(), "version": library.version(),
            "layer": mlx.layer, "library": mlx.library, "bytes": bytes.0,
        });
        return print(&object.to_string());
    }
    print(&format!(
        "mlx {} ({}), {bytes}: {}",
        library.version(),
        mlx.build.name(),
        mlx.library.display()
    ))
}
