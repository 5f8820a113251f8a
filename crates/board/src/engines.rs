//! Compute engines of this machine: paceline's own and MLX.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use paceline_base::{Bytes, counted};
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::local::CommandProgress;
use paceline_cluster::nodes::agent::{Agent, EngineDevice};
use paceline_mlx::{DeviceKind, Error, Library, LibraryPaths};
use paceline_store::{MLX_VERSION, MlxBuild};
use paceline_tensor::InstructionSet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Local command that makes a node list its engines again.
pub const LIST_ENGINES: &str = "engines";

/// Interval of listing the engines again. A child opens each driver for it: 0.1 s on MLX's CPU
/// build, and some hundred megabytes of a CUDA card meanwhile.
const LIST_EVERY: Duration = Duration::from_mins(10);

/// State of an engine on this machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Its name on the command line.
    pub name: String,
    /// Whether it is usable.
    pub ready: bool,
    /// Version of paceline, or of MLX.
    pub version: String,
    /// The opened library, if any.
    pub library: Option<PathBuf>,
    pub devices: Vec<EngineDevice>,
    /// Why it is not ready.
    pub problem: Option<String>,
}

/// The output of `paceline engines --json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct EngineList {
    pub engines: Vec<EngineStatus>,
}

/// Publishes the devices of this machine's engines as facts of the node `agent`. A child, the
/// program at `program`, lists them, so that the node itself opens no driver. Blocks for the time
/// that a driver takes to open, some seconds at most; a child that fails leaves the facts as they
/// are.
pub fn publish_devices(agent: &Agent, program: &Path) {
    let output = program.to_str();
    let output = output.and_then(|program| machine::ask(program, &["engines", "--json"]));
    let list = output.and_then(|text| serde_json::from_str::<EngineList>(&text).ok());
    if let Some(EngineList { engines }) = list {
        agent.set_devices(engines.into_iter().flat_map(|it| it.devices).collect());
    }
}

/// Keeps the devices of this machine's engines published by [`publish_devices`]. Lists them now,
/// every [`LIST_EVERY`], and when a program of this machine sends [`LIST_ENGINES`] to the node.
/// Returns only if the node drops the command.
pub fn keep_published(agent: &Agent, program: &Path) {
    // One request is enough: the list that it starts is newer than all requests before it.
    let (ask, asked) = sync_channel(1);
    agent.serve_local(
        LIST_ENGINES,
        move |_: &Value, _: &mut CommandProgress<'_>| {
            let _ = ask.try_send(()); // one waits already
            Ok(Value::Null)
        },
    );
    loop {
        publish_devices(agent, program);
        if asked.recv_timeout(LIST_EVERY) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

/// The command that installs MLX.
pub const fn mend_mlx() -> &'static str {
    "`paceline engines install mlx` fetches MLX"
}

/// paceline's own engine, always present.
pub fn cpu() -> EngineStatus {
    let best = InstructionSet::available().pop();
    let memory = machine::memory();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    EngineStatus {
        name: "cpu".into(),
        ready: true,
        version: env!("CARGO_PKG_VERSION").into(),
        library: None,
        devices: vec![EngineDevice {
            engine: "cpu".into(),
            kind: "cpu".into(),
            backend: best.map_or("scalar", InstructionSet::name).into(),
            name: Some(counted(cores, "thread")),
            memory_bytes: memory.map(|memory| memory.available.unwrap_or(memory.total).0),
            ..EngineDevice::default()
        }],
        problem: None,
    }
}

/// MLX, from the first of `places` that has it.
pub fn mlx(places: &LibraryPaths) -> EngineStatus {
    let engine = |version, library, devices, problem: Option<String>| EngineStatus {
        name: "mlx".into(),
        ready: problem.is_none(),
        version,
        library,
        devices,
        problem,
    };
    let library = match Library::open(places) {
        Ok(library) => library,
        Err(error) => {
            let problem = Some(error.to_string());
            let is_installed = !matches!(error, Error::NotFound { .. });
            let device = EngineDevice {
                engine: "mlx".into(),
                problem: problem.clone(),
                ..EngineDevice::default()
            };
            let devices = is_installed.then_some(device).into_iter().collect();
            return engine(MLX_VERSION.into(), None, devices, problem);
        }
    };
    let devices = [DeviceKind::Cpu, DeviceKind::Gpu].map(|device| device_row(&library, device));
    let found: Vec<EngineDevice> = devices.into_iter().flatten().collect();
    let works = found.iter().any(|device| device.problem.is_none());
    let problem = (!works).then(|| "mlx: no device works".to_owned());
    let path = Some(library.path().to_owned());
    engine(library.version().to_owned(), path, found, problem)
}

/// A device of a kind, if the library has one; with the reason if it does not open.
fn device_row(library: &Library, device: DeviceKind) -> Option<EngineDevice> {
    let opened = |mut row: EngineDevice| -> Result<EngineDevice, Error> {
        row.backend = library.backend(device)?.into();
        let stream = library.stream(device)?;
        row.name = stream.device_name();
        row.memory_bytes = Some(stream.available()?.0);
        Ok(row)
    };
    let row = EngineDevice {
        engine: "mlx".into(),
        kind: device.name().into(),
        ..EngineDevice::default()
    };
    let has = library.has(device);
    let opened = has.and_then(|has| has.then(|| opened(row.clone())).transpose());
    opened.unwrap_or_else(|error| {
        let problem = Some(error.to_string());
        Some(EngineDevice { problem, ..row })
    })
}

/// All engines as text.
pub fn text(engines: &[EngineStatus]) -> String {
    let mut lines = Vec::new();
    for engine in engines {
        let place = engine.library.as_ref();
        let place = place.map_or_else(String::new, |path| format!("  {}", path.display()));
        let state = if engine.ready { "ready" } else { "not here" };
        lines.push(format!(
            "{:4} {:8} {state}{place}",
            engine.name, engine.version
        ));
        // The problem of an engine without devices follows.
        for device in engine.devices.iter().filter(|it| !it.kind.is_empty()) {
            let name = device.name.as_ref().or(device.problem.as_ref());
            let name = name.map_or("", |name| name);
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

/// The MLX build for a system; `cuda` returns the driver's CUDA version. `None` if none is
/// published.
pub fn choose(os: &str, arch: &str, cuda: impl FnOnce() -> Option<u32>) -> Option<MlxBuild> {
    if MlxBuild::Metal.exists_for(os, arch) {
        return Some(MlxBuild::Metal);
    }
    if !MlxBuild::Cpu.exists_for(os, arch) {
        return None;
    }
    Some(match cuda() {
        Some(13..) => MlxBuild::Cuda13,
        Some(12) => MlxBuild::Cuda12,
        _ => MlxBuild::Cpu,
    })
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
        assert!(choose("macos", "x86_64", none).is_none());
        assert!(choose("linux", "riscv64", none).is_none());
    }
}
