//! Load, memory and heat of this machine, sampled cheaply.
//!
//! [`Sampler::sample`] reads some twenty small files of `/proc` and `/sys`, which takes well below
//! a millisecond. Rates are means since the previous sample, so the first one has none. Values that
//! a system does not report are absent, never zero. Macs are read through IOReport and SMC, which
//! waits for a tenth of a second.
//!
//! The files are read below a root folder, so that recordings of other machines test the reader.

mod energy;
mod files;
mod mac;
mod nvml;
mod rates;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::machine;

pub use energy::Energy;
use files::SystemFiles;
use mac::Mac;
use nvml::Nvml;
use rates::RateCounters;

/// Load of a machine, as far as its system reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TelemetrySample {
    /// Share of time that all cores together were busy, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_busy: Option<f64>,
    /// The same for each core.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub core_busy: Vec<f64>,
    /// Mean frequency of the cores in MHz.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_mhz: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes that programs could still take without swapping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_available_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_used_bytes: Option<u64>,
    /// Share of the last 10 s in which some task waited for a core, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_pressure: Option<f64>,
    /// The same for memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_pressure: Option<f64>,
    /// The same for input and output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_pressure: Option<f64>,
    /// Bytes a second read from all disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_read_bytes_s: Option<f64>,
    /// Bytes a second written to all disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_write_bytes_s: Option<f64>,
    /// Networks, without loopback.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<InterfaceTraffic>,
    /// The hottest sensor in degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Power of all processor packages in watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub package_watts: Option<f64>,
    /// Charge of the battery, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub battery: Option<f64>,
    /// Share of time in which a processor package was slowed down because it was hot, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled: Option<f64>,
    /// Power into or out of the battery in watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub battery_watts: Option<f64>,
    /// Whether the battery is discharging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_battery: Option<bool>,
    /// Graphics processors whose driver reports them in `/sys` or by NVML.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
}

/// Traffic of a network interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InterfaceTraffic {
    pub name: String,
    pub received_bytes_s: f64,
    pub sent_bytes_s: f64,
}

/// Load of a graphics processor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Name of its device file.
    pub name: String,
    /// Share of time that it was busy, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// Power in watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watts: Option<f64>,
    /// Its hottest sensor in degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Whether it is slowed down because of heat or power.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled: Option<bool>,
}

impl TelemetrySample {
    /// Watts of processor packages and graphics processors, as far as they report it. On battery it
    /// is the battery's power, which is that of the whole machine.
    pub fn watts(&self) -> Option<f64> {
        if self.on_battery == Some(true) && self.battery_watts.is_some() {
            return self.battery_watts;
        }
        let gpus = self.gpus.iter().filter_map(|gpu| gpu.watts);
        gpus.chain(self.package_watts).reduce(|a, b| a + b)
    }
}

/// Whether the battery of the machine below `root` is discharging, and its charge, 0 to 1; `None`
/// without one. Reads a few small files; on a Mac it waits some milliseconds for `pmset`.
pub fn battery(root: impl Into<PathBuf>) -> Option<(bool, f64)> {
    if cfg!(target_os = "macos") {
        return mac::battery(&machine::ask("pmset", &["-g", "batt"])?);
    }
    let mut sample = TelemetrySample::default();
    SystemFiles(root.into()).battery(&mut sample);
    Some((sample.on_battery?, sample.battery?))
}

/// Samples one machine.
#[derive(Debug)]
pub struct Sampler {
    files: SystemFiles,
    nvml: Nvml,
    mac: Mac,
    before: Option<(Duration, RateCounters)>,
}

impl Sampler {
    /// Reads below `root`, which is `/` on a real machine.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let files = SystemFiles(root.into());
        Self {
            nvml: Nvml::open(&files),
            mac: Mac::open(&files),
            files,
            before: None,
        }
    }

    /// Reads everything; `now` is any clock that does not go back.
    pub fn sample(&mut self, now: Duration) -> TelemetrySample {
        let files = &self.files;
        let mut sample = TelemetrySample::default();
        files.memory(&mut sample);
        files.sensors(&mut sample);
        sample.gpus.extend(self.nvml.gpus());
        let counters = RateCounters::read(files);
        if let Some((then, before)) = &self.before {
            counters.rates(before, now.saturating_sub(*then), &mut sample);
        }
        self.before = Some((now, counters));
        self.mac.fill(&mut sample);
        sample
    }
}
