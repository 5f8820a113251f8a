//! `paceline engines`: what computes here, and how MLX gets here.

use std::env::consts::{ARCH, OS};
use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};
use paceline_base::Bytes;
use paceline_cluster::machine;
use paceline_mlx::{Device, Library};
use paceline_store::{MLX_VERSION, Mlx, MlxBuild, Toolchain, install_mlx, mlx_bytes};
use paceline_tensor::InstructionSet;
use serde::Serialize;
use serde_json::json;

use crate::error::Error;
use crate::home::{self, Settings};
use crate::interrupt::Signals;
use crate::output::{counted, print, tell};
use crate::progress::on_stderr;

/// Arguments of `paceline engines`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Engines>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Engines {
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
    /// Folder with the sources of mlx-c, instead of those that cargo fetches
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

/// An engine as it stands here.
#[derive(Debug, Serialize)]
pub(crate) struct Engine {
    pub(crate) name: &'static str,
    pub(crate) ready: bool,
    version: String,
    library: Option<PathBuf>,
    pub(crate) devices: Vec<DeviceRow>,
    /// Why it is not ready.
    pub(crate) problem: Option<String>,
}

/// A device of an engine.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceRow {
    /// `cpu` or `gpu`.
    kind: &'static str,
    /// What computes: an instruction set, `metal`, `cuda`, `cpu`.
    pub(crate) backend: String,
    pub(crate) name: Option<String>,
    /// What a model may fill.
    memory_bytes: Option<u64>,
}

/// Lists or installs.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    match &args.command {
        Some(Engines::Install(install)) => install_engine(install, signals),
        None => list(args.json),
    }
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let engines = [cpu(), mlx()?];
    if as_json {
        return print(&json!({ "engines": engines }).to_string());
    }
    print(&text(&engines))?;
    if !engines[1].ready {
        tell(format_args!("hint: {}", mend_mlx()));
    }
    Ok(())
}

/// The command that brings MLX here.
pub(crate) fn mend_mlx() -> &'static str {
    "`paceline engines install mlx` fetches MLX and builds its C layer"
}

/// paceline's own engine, which is always there.
pub(crate) fn cpu() -> Engine {
    let best = InstructionSet::available().pop();
    let memory = machine::memory();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Engine {
        name: "cpu",
        ready: true,
        version: env!("CARGO_PKG_VERSION").into(),
        library: None,
        devices: vec![DeviceRow {
            kind: "cpu",
            backend: best.map_or("scalar", InstructionSet::name).into(),
            name: Some(counted(cores, "thread")),
            memory_bytes: memory.map(|memory| memory.available.unwrap_or(memory.total).0),
        }],
        problem: None,
    }
}

/// MLX, opened from wherever it is found first.
pub(crate) fn mlx() -> anyhow::Result<Engine> {
    let engine = |version, library, devices, problem: Option<String>| Engine {
        name: "mlx",
        ready: problem.is_none(),
        version,
        library,
        devices,
        problem,
    };
    let library = match Library::open(&home::mlx_places()?) {
        Ok(library) => library,
        Err(error) => {
            let problem = Some(error.to_string());
            return Ok(engine(MLX_VERSION.into(), None, Vec::new(), problem));
        }
    };
    let devices = [Device::Cpu, Device::Gpu].map(|device| device_row(&library, device));
    let found: Vec<DeviceRow> = devices.into_iter().flatten().collect();
    let problem = found.is_empty().then(|| "mlx: no device works".to_owned());
    let path = Some(library.path().to_owned());
    Ok(engine(library.version().to_owned(), path, found, problem))
}

/// A device, if there is one of its kind that can be used.
fn device_row(library: &Library, device: Device) -> Option<DeviceRow> {
    if !library.has(device).ok()? {
        return None;
    }
    let stream = library.stream(device).ok()?;
    Some(DeviceRow {
        kind: device.name(),
        backend: library.backend(device).ok()?.into(),
        name: stream.device_name(),
        memory_bytes: stream.available().ok().map(|bytes| bytes.0),
    })
}

fn text(engines: &[Engine]) -> String {
    let mut lines = Vec::new();
    for engine in engines {
        let place = engine.library.as_ref();
        let place = place.map_or_else(String::new, |path| format!("  {}", path.display()));
        let state = if engine.ready { "ready" } else { "not here" };
        lines.push(format!(
            "{:4} {:8} {state}{place}",
            engine.name, engine.version
        ));
        for device in &engine.devices {
            let name = device.name.as_deref().unwrap_or("");
            let memory = device
                .memory_bytes
                .map_or_else(|| "?".into(), |n| Bytes(n).to_string());
            lines.push(format!(
                "     {:3}  {:12} {memory:>10}  {name}",
                device.kind, device.backend
            ));
        }
        lines.extend(
            engine
                .problem
                .iter()
                .map(|problem| format!("     {problem}")),
        );
    }
    lines.join("\n")
}

/// The build of MLX for this machine.
fn choose(os: &str, arch: &str, cuda: impl FnOnce() -> Option<u32>) -> Result<MlxBuild, Error> {
    if MlxBuild::Metal.exists_for(os, arch) {
        return Ok(MlxBuild::Metal);
    }
    if !MlxBuild::Cpu.exists_for(os, arch) {
        return Err(Error::NoMlx {
            build: "MLX".into(),
            os: os.into(),
            arch: arch.into(),
        });
    }
    Ok(match cuda() {
        Some(13..) => MlxBuild::Cuda13,
        Some(12) => MlxBuild::Cuda12,
        _ => MlxBuild::Cpu,
    })
}

fn install_engine(args: &Install, signals: &Signals) -> anyhow::Result<()> {
    let Installable::Mlx = args.engine;
    let build = match args.build.map(MlxBuild::from) {
        Some(build) if !build.exists_for(OS, ARCH) => {
            return Err(Error::NoMlx {
                build: format!("mlx-{}", build.name()),
                os: OS.into(),
                arch: ARCH.into(),
            }
            .into());
        }
        Some(build) => build,
        None => choose(OS, ARCH, machine::cuda_major)?,
    };
    let settings = Settings::from_env()?;
    let tools = Toolchain {
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
    report(&installed, args.json)
}

fn report(mlx: &Mlx, as_json: bool) -> anyhow::Result<()> {
    // Opened once, so that what cannot be loaded is told now.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_follows_the_machine() {
        let none = || None;
        for (os, arch, cuda, build) in [
            ("macos", "aarch64", None, MlxBuild::Metal),
            ("linux", "x86_64", None, MlxBuild::Cpu),
            ("linux", "aarch64", Some(11), MlxBuild::Cpu),
            ("linux", "x86_64", Some(12), MlxBuild::Cuda12),
            ("linux", "x86_64", Some(13), MlxBuild::Cuda13),
            ("linux", "x86_64", Some(14), MlxBuild::Cuda13),
        ] {
            assert_eq!(
                choose(os, arch, || cuda).unwrap(),
                build,
                "{os} {arch} {cuda:?}"
            );
        }
        assert!(choose("macos", "x86_64", none).is_err());
        assert!(choose("linux", "riscv64", none).is_err());
    }
}
