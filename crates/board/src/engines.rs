//! Compute engines of this machine: paceline's own and MLX.

use std::path::{Path, PathBuf};

use paceline_base::{Bytes, counted};
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::{Agent, EngineDevice};
use paceline_mlx::{DeviceKind, Library, LibraryPaths};
use paceline_store::{MLX_VERSION, MlxBuild};
use paceline_tensor::InstructionSet;
use serde::{Deserialize, Serialize};

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
        let ready = engines.into_iter().filter(|engine| engine.ready);
        agent.set_devices(ready.flat_map(|engine| engine.devices).collect());
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
            return engine(MLX_VERSION.into(), None, Vec::new(), problem);
        }
    };
    let devices = [DeviceKind::Cpu, DeviceKind::Gpu].map(|device| device_row(&library, device));
    let found: Vec<EngineDevice> = devices.into_iter().flatten().collect();
    let problem = found.is_empty().then(|| "mlx: no device works".to_owned());
    let path = Some(library.path().to_owned());
    engine(library.version().to_owned(), path, found, problem)
}

/// A usable device of a kind, if any.
fn device_row(library: &Library, device: DeviceKind) -> Option<EngineDevice> {
    if !library.has(device).ok()? {
        return None;
    }
    let stream = library.stream(device).ok()?;
    Some(EngineDevice {
        engine: "mlx".into(),
        kind: device.name().into(),
        backend: library.backend(device).ok()?.into(),
        name: stream.device_name(),
        memory_bytes: stream.available().ok().map(|bytes| bytes.0),
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
