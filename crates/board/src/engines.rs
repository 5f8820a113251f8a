//! Compute engines of this machine: paceline's own and MLX.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use paceline_base::{Bytes, counted};
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::local::CommandProgress;
use paceline_cluster::nodes::agent::{Agent, DeviceRates, EngineDevice, FormRates};
use paceline_mlx::{
    DeviceKind, Dtype, EVALUATIONS, Error, Library, LibraryPaths, ProductSizes, WeightForm,
    evaluation_us, operation_s, product_rates,
};
use paceline_node::fleet::lent_devices;
use paceline_store::{MLX_VERSION, MlxBuild};
use paceline_tensor::InstructionSet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fast_sync::GpuWait;

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
/// program at `program`, lists them, so that the node itself opens no driver. Where a device has no
/// rates yet, a second child measures it. Blocks for some seconds, 20 at most; a child that fails
/// leaves the facts as they are.
pub fn publish_devices(agent: &Agent, program: &Path) {
    let Some(devices) = listed(program, &[]) else {
        return;
    };
    let is_known = |device: &EngineDevice| {
        device.engine == "cpu" || device.rates.is_some() || device.problem.is_some()
    };
    let is_measured = devices.iter().all(is_known);
    publish(agent, devices);
    if is_measured {
        return;
    }
    if let Some(devices) = listed(program, &["--measure"]) {
        publish(agent, devices);
    }
}

/// Publishes listed devices, with the memory of this node's own models on them.
fn publish(agent: &Agent, devices: Vec<EngineDevice>) {
    if let Some(mut view) = agent.nodes().into_iter().next() {
        view.facts.devices = devices;
        agent.set_devices(lent_devices(&agent.map(), &view));
    }
}

/// The devices that a child with these arguments finds, also those that cannot be used. It ends by
/// itself when it would be killed, as this process may be gone by then.
fn listed(program: &Path, more: &[&str]) -> Option<Vec<EngineDevice>> {
    let arguments = [&["engines", "--json", "--limit", "10"], more].concat();
    let text = machine::ask(program.to_str()?, &arguments)?;
    let EngineList { engines } = serde_json::from_str(&text).ok()?;
    Some(engines.into_iter().flat_map(|it| it.devices).collect())
}

/// Measured rates of this machine's devices, kept on disk. A file that cannot be read counts as
/// empty, and one that cannot be written is measured again.
#[derive(Debug)]
pub struct KeptRates(PathBuf);

/// A device of a version of MLX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredDevice {
    pub version: String,
    pub backend: String,
    pub name: Option<String>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct KeptDevice {
    #[serde(flatten)]
    device: MeasuredDevice,
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<DeviceRates>,
    /// Nanoseconds of a crossing with [fast sync](crate::fast_sync), for which the device is
    /// qualified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fast_crossing_ns: Option<u64>,
}

impl KeptRates {
    /// In `engine-rates.json` of the folder `home`.
    pub fn new(home: &Path) -> Self {
        Self(home.join("engine-rates.json"))
    }

    fn read(&self) -> Vec<KeptDevice> {
        let text = std::fs::read(&self.0).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Adds the kept rates to the devices of `engine`; crossings are those of `wait`.
    pub fn add_to(&self, engine: &mut EngineStatus, wait: GpuWait) {
        let kept = self.read();
        for device in &mut engine.devices {
            let of = measured(&engine.version, device);
            let Some(kept) = kept.iter().find(|kept| kept.device == of) else {
                device.rates = None;
                continue;
            };
            device.rates.clone_from(&kept.rates);
            let fast = kept.fast_crossing_ns.filter(|_| wait == GpuWait::Fast);
            if let (Some(rates), Some(fast)) = (&mut device.rates, fast) {
                rates.crossing_ns = fast;
            }
        }
    }

    /// Keeps the rates of the devices of `engine`, and what they are qualified for; nothing else.
    pub fn keep(&self, engine: &EngineStatus) {
        let before = self.read();
        let kept = engine.devices.iter().filter_map(|device| {
            let rates = Some(device.rates.clone()?);
            let device = measured(&engine.version, device);
            let known = before.iter().find(|kept| kept.device == device);
            Some(KeptDevice {
                fast_crossing_ns: known.and_then(|kept| kept.fast_crossing_ns),
                device,
                rates,
            })
        });
        self.write(&kept.collect::<Vec<_>>());
    }

    /// Qualifies `device` for fast sync, with which a crossing takes so long.
    pub(crate) fn qualify(&self, device: MeasuredDevice, crossing_ns: u64) {
        let mut kept = self.read();
        let fast_crossing_ns = Some(crossing_ns);
        match kept.iter_mut().find(|kept| kept.device == device) {
            Some(known) => known.fast_crossing_ns = fast_crossing_ns,
            None => kept.push(KeptDevice {
                device,
                rates: None,
                fast_crossing_ns,
            }),
        }
        self.write(&kept);
    }

    /// Whether a device is qualified for fast sync.
    pub(crate) fn is_qualified(&self) -> bool {
        self.read()
            .iter()
            .any(|kept| kept.fast_crossing_ns.is_some())
    }

    fn write(&self, kept: &[KeptDevice]) {
        if let Ok(text) = serde_json::to_vec_pretty(kept) {
            let part = self
                .0
                .with_extension(format!("{}.part", std::process::id()));
            let _ = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &self.0));
        }
    }
}

/// The GPU that MLX computes on, if it has one that works.
pub fn gpu(mlx: &EngineStatus) -> Option<MeasuredDevice> {
    let mut devices = mlx.devices.iter();
    let gpu = devices.find(|device| device.kind == "gpu" && device.problem.is_none())?;
    Some(measured(&mlx.version, gpu))
}

fn measured(version: &str, device: &EngineDevice) -> MeasuredDevice {
    MeasuredDevice {
        version: version.to_owned(),
        backend: device.backend.clone(),
        name: device.name.clone(),
    }
}

/// The measured forms of weights: bits with those of a group's scale and bias, and type of the
/// other factors.
const FORMS: [(u32, WeightForm, Dtype); 6] = [
    (5, WeightForm::Groups(4), Dtype::F16),
    (9, WeightForm::Groups(8), Dtype::F16),
    (16, WeightForm::Floats, Dtype::F16),
    (6, WeightForm::Groups(4), Dtype::F32),
    (10, WeightForm::Groups(8), Dtype::F32),
    (32, WeightForm::Floats, Dtype::F32),
];

/// Sizes of the products that are measured. On a GPU they are more than the caches of any, 50 MB on
/// an H100, and the rows of a chunk of a prompt. MLX on a CPU is limited by arithmetic, which takes
/// forty times as long in 16 bits: a second in all.
const fn sizes(device: DeviceKind) -> ProductSizes {
    match device {
        DeviceKind::Cpu => ProductSizes {
            width: 512,
            matrices: 8,
            rows: 4,
        },
        DeviceKind::Gpu => ProductSizes {
            width: 2048,
            matrices: 40,
            rows: 512,
        },
    }
}

/// Measures the devices of MLX in place. A device that fails has empty rates, so that it is not
/// measured again.
pub fn measure(mlx: &mut EngineStatus) {
    let library = mlx.library.as_ref();
    let Some(library) = library.and_then(|path| Library::load(path).ok()) else {
        return;
    };
    for device in &mut mlx.devices {
        let kind = match device.kind.as_str() {
            "gpu" => DeviceKind::Gpu,
            _ => DeviceKind::Cpu,
        };
        device.rates = Some(rates(&library, kind).unwrap_or_default());
    }
}

fn rates(library: &Library, device: DeviceKind) -> Result<DeviceRates, paceline_mlx::Error> {
    let form = |(bits, form, dtype): (u32, WeightForm, Dtype)| {
        let measured = product_rates(library, device, (form, dtype), sizes(device))?;
        Ok::<_, paceline_mlx::Error>(FormRates {
            bits,
            wide: dtype == Dtype::F32,
            reads: measured.reads as u64,
            computes: measured.computes as u64,
        })
    };
    Ok(DeviceRates {
        forms: FORMS.into_iter().map(form).collect::<Result<_, _>>()?,
        operation_ns: (operation_s(library, device)? * 1e9) as u64,
        crossing_ns: (evaluation_us(library, device, EVALUATIONS)? * 1e3) as u64,
    })
}

/// Keeps the devices of this machine's engines published by [`publish_devices`]. Lists them now,
/// every [`LIST_EVERY`], and when a program of this machine sends [`LIST_ENGINES`] to the node.
/// Returns only if the node drops the command.
pub fn keep_published(agent: &Agent, program: &Path) {
    // A single request is enough: the list that it starts is newer than all requests before it.
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
            total_bytes: memory.and_then(|it| it.available.map(|_| it.total.0)),
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
        row.total_bytes = stream.total().map(|total| total.0);
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
            let measured = device.rates.as_ref().filter(|it| !it.forms.is_empty());
            lines.extend(measured.map(rates_told));
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

/// Measured rates as text.
fn rates_told(rates: &DeviceRates) -> String {
    let form = |form: &FormRates| {
        let (reads, computes) = (form.reads as f64 / 1e9, form.computes as f64 / 1e9);
        let factors = if form.wide { "x32" } else { "x16" };
        format!(
            "{}{factors} bits {reads:.2} GB/s {computes:.0} Gop/s",
            form.bits
        )
    };
    let forms: Vec<String> = rates.forms.iter().map(form).collect();
    let [operation, crossing] = [rates.operation_ns, rates.crossing_ns].map(|ns| ns as f64 / 1e3);
    let forms = forms.join(", ");
    format!("          {forms}, {operation:.1} us an operation, {crossing:.0} us a crossing")
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
    fn kept_rates_are_those_of_the_same_device_and_version() {
        let home = tempfile::tempdir().unwrap();
        let kept = KeptRates::new(home.path());
        let engine = |version: &str, name: &str, rates| EngineStatus {
            name: "mlx".into(),
            ready: true,
            version: version.into(),
            library: None,
            devices: vec![EngineDevice {
                name: Some(name.into()),
                backend: "metal".into(),
                rates,
                ..EngineDevice::default()
            }],
            problem: None,
        };
        let known = |version, name| {
            let mut engine = engine(version, name, None);
            kept.add_to(&mut engine, GpuWait::Usual);
            engine.devices[0].rates.clone()
        };
        assert_eq!(known("1", "M3"), None, "nothing is kept yet");
        let rates = DeviceRates {
            crossing_ns: 150_000,
            ..DeviceRates::default()
        };
        kept.keep(&engine("1", "M3", Some(rates.clone())));
        assert_eq!(known("1", "M3"), Some(rates.clone()));
        assert_eq!((known("2", "M3"), known("1", "M4")), (None, None));

        let device = measured("1", &engine("1", "M3", None).devices[0]);
        assert!(!kept.is_qualified());
        kept.qualify(device, 4_000);
        kept.keep(&engine("1", "M3", Some(rates.clone())));
        let mut fast = engine("1", "M3", None);
        kept.add_to(&mut fast, GpuWait::Fast);
        let crossing = |engine: &EngineStatus| engine.devices[0].rates.clone().unwrap().crossing_ns;
        assert_eq!(crossing(&fast), 4_000, "measured before and after");
        assert_eq!(known("1", "M3"), Some(rates));
    }

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
