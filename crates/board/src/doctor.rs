//! Checks of this machine, each gap with the command that mends it.

mod cables;
mod network;
mod peer;

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;

use paceline_base::{Bytes, counted};
use paceline_cluster::machine::{self, GpuMemory};
use paceline_cluster::network::unauthorised_thunderbolt;
use paceline_cluster::nodes::agent::EngineDevice;
use paceline_cluster::sandbox::{Enforced, Sandbox, SandboxLevel};
use paceline_comm_interop::nccl::{self, Libraries};
use paceline_store::{MlxBuild, free_space};
use paceline_tensor::InstructionSet;
use serde::Serialize;

use crate::engines::{self, EngineStatus};

pub use peer::check as of_finding;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It works.
    Ok,
    /// Missing; `mend` says how to get it.
    Missing,
    /// It may work; `mend` says what to do if not.
    Doubtful,
    /// This machine has no such hardware.
    Absent,
    /// Another machine cannot be reached this way.
    Blocked,
}

impl State {
    const fn mark(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Missing => "missing",
            Self::Doubtful => "doubtful",
            Self::Absent => "-",
            Self::Blocked => "blocked",
        }
    }
}

/// A completed check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HealthCheck {
    pub name: &'static str,
    /// Its result.
    pub state: State,
    /// The detected item, or why it is missing.
    pub found: String,
    /// The command or step that mends it.
    pub mend: Option<String>,
}

impl HealthCheck {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            state: State::Ok,
            found: found.into(),
            mend: None,
        }
    }

    fn absent(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            state: State::Absent,
            ..Self::ok(name, found)
        }
    }

    fn doubtful(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self {
            state: State::Doubtful,
            ..Self::missing(name, found, mend)
        }
    }

    fn missing(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self {
            state: State::Missing,
            mend: Some(mend.into()),
            ..Self::ok(name, found)
        }
    }
}

/// Facts about this machine from the caller.
#[derive(Clone, Copy, Debug)]
pub struct DoctorInput<'a> {
    /// Paceline's folder.
    pub folder: &'a Path,
    pub models: &'a Path,
    pub mlx: &'a EngineStatus,
    pub path: Option<&'a OsStr>,
    /// Whether a node of this home runs.
    pub is_up: bool,
}

/// Runs all checks; takes about a second.
pub fn checks(here: DoctorInput<'_>) -> Vec<HealthCheck> {
    let gpus = machine::nvidia();
    let mut checks = vec![
        cpu(),
        memory(),
        disk(here.folder, here.models),
        gpu(&gpus),
        mlx(here.mlx),
        python(),
        compiler(),
        cargo(),
        cables::rdma(crate::rdma::devices()),
        nccl(gpus.is_empty()),
        mpi(),
        thunderbolt(machine::thunderbolt(), &unauthorised_thunderbolt()),
        ssh(here.path),
        sandbox(Sandbox::Worker.tried()),
    ];
    if let Some(memory) = machine::gpu_memory() {
        checks.insert(4, gpu_memory(memory, metal_limit(here.mlx))); // behind the GPU
    }
    checks.extend(cables::of_mac());
    checks.extend(network::checks(here.is_up));
    checks
}

pub fn text(checks: &[HealthCheck]) -> String {
    let lines: Vec<String> = checks.iter().map(line).collect();
    lines.join("\n")
}

/// Checks the sandbox, which denies workers and templates unneeded files and system calls.
fn sandbox(enforced: Enforced) -> HealthCheck {
    let files = match enforced.files {
        SandboxLevel::Full => "Landlock",
        SandboxLevel::Part => "Landlock in part",
        SandboxLevel::Nothing => "no Landlock",
    };
    let calls = if enforced.calls {
        "seccomp"
    } else {
        "no seccomp"
    };
    let found = format!("{files}, {calls}");
    if enforced.files == SandboxLevel::Nothing || !enforced.calls {
        let found = format!("{found}: workers run with all rights of this user");
        return HealthCheck::absent("sandbox", found);
    }
    HealthCheck::ok("sandbox", found)
}

/// A check, with its remedy on a second line.
pub fn line(check: &HealthCheck) -> String {
    let HealthCheck { name, found, .. } = check;
    let line = format!("{name:12} {:8} {found}", check.state.mark());
    match &check.mend {
        Some(mend) => format!("{line}\n{:21} mend: {mend}", ""),
        None => line,
    }
}

fn cpu() -> HealthCheck {
    let sets: Vec<&str> = InstructionSet::available()
        .into_iter()
        .map(InstructionSet::name)
        .collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let found = format!("{}, {}", sets.join(", "), counted(threads, "thread"));
    if sets.len() > 1 {
        return HealthCheck::ok("cpu", found);
    }
    HealthCheck::absent(
        "cpu",
        format!("{found}: only portable kernels run here, slowly"),
    )
}

fn memory() -> HealthCheck {
    match machine::memory() {
        Some(memory) => {
            let free = memory.available.map(|free| format!(", {free} available"));
            let found = format!("{}{}", memory.total, free.unwrap_or_default());
            HealthCheck::ok("memory", found)
        }
        None => HealthCheck::absent("memory", "the system does not say"),
    }
}

/// Checks the folders of files and models, which may be on different disks.
fn disk(folder: &Path, models: &Path) -> HealthCheck {
    for part in [folder, models] {
        if let Some(why) = existing(part).and_then(unwritable) {
            let found = format!("cannot write in {}: {why}", part.display());
            let mend = "give yourself write access, or set PACELINE_HOME to a folder of your own";
            return HealthCheck::missing("disk", found, mend);
        }
    }
    let free = existing(models).and_then(|parent| free_space(parent).ok());
    let found = match free {
        Some(bytes) => format!(
            "{} free in {}",
            paceline_base::Bytes(bytes),
            folder.display()
        ),
        None => format!("unknown in {}", folder.display()),
    };
    HealthCheck::ok("disk", found)
}

/// `folder`, or the first of its parents that exists: both are on the same file system.
fn existing(folder: &Path) -> Option<&Path> {
    folder.ancestors().find(|parent| parent.exists())
}

/// Tries to create a file in `folder`: a read-only file system reports nothing before.
fn unwritable(folder: &Path) -> Option<std::io::Error> {
    let name = format!(".paceline-doctor-{}", std::process::id());
    let file = folder.join(name);
    let made = File::create_new(&file).map(drop);
    let _ = std::fs::remove_file(&file); // where it was made
    made.err()
}

fn gpu(nvidia: &[machine::MachineGpu]) -> HealthCheck {
    if cfg!(all(target_os = "macos", target_arch = "aarch64")) {
        return HealthCheck::ok("gpu", "Apple silicon, Metal");
    }
    let names = nvidia
        .iter()
        .map(|gpu| format!("{} with {}", gpu.name, gpu.memory));
    let names: Vec<String> = names.collect();
    if names.is_empty() {
        return HealthCheck::absent(
            "gpu",
            "none that an engine could use (NVIDIA's driver lists none)",
        );
    }
    HealthCheck::ok("gpu", names.join(", "))
}

/// The memory that Metal recommends to use at most, as MLX reads it from the device.
fn metal_limit(engine: &EngineStatus) -> Option<Bytes> {
    let metal = engine.devices.iter().find(|d| d.backend == "metal")?;
    metal.memory_bytes.map(Bytes)
}

/// Check of the memory that a model on the GPU may fill; `said` is what its driver says of that.
fn gpu_memory(memory: GpuMemory, said: Option<Bytes>) -> HealthCheck {
    let limit = said.unwrap_or(memory.limit);
    let found = format!("a model may fill {limit} of {}", memory.total);
    let mend = memory.raised_mb.filter(|mb| mb << 20 > limit.0);
    HealthCheck {
        mend: mend.map(|mb| {
            format!("sudo sysctl iogpu.wired_limit_mb={mb} lends more, until the next restart")
        }),
        ..HealthCheck::ok("gpu memory", found)
    }
}

/// A device's kind, name and memory.
fn device(device: &EngineDevice) -> String {
    let name = device.name.iter().map(|name| format!(" {name}"));
    let memory = device.memory_bytes.iter();
    let memory = memory.map(|bytes| format!(" with {}", Bytes(*bytes)));
    let rest: String = name.chain(memory).collect();
    format!("{}{rest}", device.backend)
}

fn mlx(engine: &EngineStatus) -> HealthCheck {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    match &engine.problem {
        None => {
            let devices: Vec<String> = engine.devices.iter().map(device).collect();
            HealthCheck::ok("mlx", format!("devices: {}", devices.join(", ")))
        }
        Some(problem) if MlxBuild::ALL.iter().any(|build| build.exists_for(os, arch)) => {
            HealthCheck::missing("mlx", problem, engines::mend_mlx())
        }
        Some(_) => HealthCheck::absent("mlx", format!("none is published for {os} on {arch}")),
    }
}

/// Checks for a program; `use_of` says what needs it.
fn program(
    name: &'static str,
    command: &str,
    arguments: &[&str],
    use_of: &str,
    mend: &str,
) -> HealthCheck {
    match machine::first_line(command, arguments) {
        Some(line) => HealthCheck::ok(name, line),
        None => HealthCheck::missing(name, format!("no {command}, which {use_of}"), mend),
    }
}

fn python() -> HealthCheck {
    let use_of = "fetches models and engines where the hub cannot be reached";
    let mend = "apt install python3-pip, or brew install python";
    program("pip", "python3", &["-m", "pip", "--version"], use_of, mend)
}

fn compiler() -> HealthCheck {
    let mend = "apt install g++, or xcode-select --install";
    let use_of = "builds MLX's C layer where no release brings it";
    program("c++", "c++", &["--version"], use_of, mend)
}

fn cargo() -> HealthCheck {
    let mend = "install Rust with rustup, or give `paceline engines install mlx` --sources";
    let use_of = "fetches the sources of MLX's C layer where no release brings it";
    program("cargo", "cargo", &["--version"], use_of, mend)
}

fn ssh(path: Option<&OsStr>) -> HealthCheck {
    // `ssh -V` writes to stderr, and without options ssh exits with 255.
    let there =
        path.is_some_and(|path| std::env::split_paths(path).any(|dir| dir.join("ssh").is_file()));
    if there {
        return HealthCheck::ok("ssh", "there, for `paceline launch` and `topology`");
    }
    let mend = "apt install openssh-client";
    HealthCheck::missing(
        "ssh",
        "no ssh, which starts programs on other machines",
        mend,
    )
}

fn nccl(no_gpu: bool) -> HealthCheck {
    if no_gpu {
        return HealthCheck::absent("nccl", "no NVIDIA GPU");
    }
    match nccl::check(&Libraries::default()) {
        Ok(()) => HealthCheck::ok("nccl", "there"),
        Err(error) => HealthCheck::missing("nccl", error.to_string(), "apt install libnccl2"),
    }
}

fn mpi() -> HealthCheck {
    // Asks mpirun: initialising MPI outside of it may print, and fails badly in containers.
    match machine::first_line("mpirun", &["--version"]) {
        Some(line) => HealthCheck::ok(
            "mpi",
            format!("{line}, for `paceline launch --backend mpi`"),
        ),
        None => HealthCheck::missing(
            "mpi",
            "no mpirun",
            "apt install openmpi-bin, or brew install open-mpi",
        ),
    }
}

/// `refused`: connected devices that this machine does not authorise.
fn thunderbolt(ports: usize, refused: &[String]) -> HealthCheck {
    if ports == 0 {
        return HealthCheck::absent("thunderbolt", "no port");
    }
    if let [device, ..] = refused {
        return HealthCheck::doubtful(
            "thunderbolt",
            format!("device {device} is not authorised"),
            format!("boltctl enroll {device}"),
        );
    }
    HealthCheck::ok(
        "thunderbolt",
        format!("{ports} ports; `paceline topology` shows the cables"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_what_mends_it() {
        let checks = [
            HealthCheck::ok("cpu", "avx2"),
            HealthCheck::absent("gpu", "none"),
            HealthCheck::missing("mpi", "no mpirun", "apt install openmpi-bin"),
        ];
        assert_eq!(
            text(&checks),
            "cpu          ok       avx2\n\
             gpu          -        none\n\
             mpi          missing  no mpirun\n                      mend: apt install openmpi-bin"
        );
    }

    #[test]
    fn folders_that_take_no_file_are_noticed() {
        let folder = tempfile::tempdir().unwrap();
        assert!(unwritable(folder.path()).is_none());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(unwritable(Path::new("/nonexistent")).is_some());
        // `/proc` accepts no files, even from root.
        #[cfg(target_os = "linux")]
        assert!(unwritable(Path::new("/proc")).is_some());
    }

    #[test]
    fn a_disk_is_ok_where_all_of_the_store_takes_files() {
        let folder = tempfile::tempdir().unwrap();
        let later = folder.path().join("later/models");
        assert_eq!(disk(folder.path(), &later).state, State::Ok);
        #[cfg(target_os = "linux")]
        for (folder, models) in [
            (folder.path(), "/proc"),
            (Path::new("/proc"), "/proc/models"),
        ] {
            let check = disk(folder, Path::new(models));
            assert_eq!(check.state, State::Missing, "{models}");
            assert!(check.found.contains("cannot write in /proc:"), "{check:?}");
        }
    }

    #[test]
    fn devices_make_the_difference() {
        assert_eq!(thunderbolt(0, &[]).state, State::Absent);
        assert_eq!(thunderbolt(2, &[]).state, State::Ok);
        let refused = thunderbolt(2, &["c0ffee".to_owned()]);
        assert_eq!(refused.mend.as_deref(), Some("boltctl enroll c0ffee"));
        assert_eq!(nccl(true).state, State::Absent);
        let none = program("x", "/nonexistent/x", &[], "does it", "get it");
        assert_eq!(
            (none.state, none.mend.as_deref()),
            (State::Missing, Some("get it"))
        );
    }
}
