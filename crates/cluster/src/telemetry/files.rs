//! Values of a single reading: memory, pressure, frequency, temperature, battery, GPUs.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{Gpu, TelemetrySample};

/// Longest file read: `/proc/stat` of 1,024 cores takes about 100 KB.
const FILE_BYTES_MAX: u64 = 1 << 20;

const ENTRIES_MAX: usize = 1024;

/// The root of a machine's files.
#[derive(Debug)]
pub(super) struct SystemFiles(pub(super) PathBuf);

impl SystemFiles {
    /// The text of a file, `None` when it cannot be read.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        read(&self.0.join(path))
    }

    /// Paths in a folder whose names begin with `prefix`, in order of name.
    pub(super) fn folders(&self, path: &str, prefix: &str) -> Vec<PathBuf> {
        folders(&self.0.join(path), prefix)
    }

    pub(super) fn memory(&self, sample: &mut TelemetrySample) {
        let text = self.text("proc/meminfo").unwrap_or_default();
        let bytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib = line.strip_prefix(':')?.trim().strip_suffix("kB")?.trim();
            kib.parse::<u64>().ok()?.checked_mul(1024)
        };
        sample.memory_bytes = bytes("MemTotal");
        sample.memory_available_bytes = bytes("MemAvailable");
        sample.swap_bytes = bytes("SwapTotal").filter(|bytes| *bytes > 0);
        let free = bytes("SwapFree");
        let used = sample.swap_bytes.zip(free);
        sample.swap_used_bytes = used.map(|(all, free)| all.saturating_sub(free));
        sample.cpu_pressure = self.pressure("cpu");
        sample.memory_pressure = self.pressure("memory");
        sample.io_pressure = self.pressure("io");
    }

    fn pressure(&self, of: &str) -> Option<f64> {
        let text = self.text(&format!("proc/pressure/{of}"))?;
        let some = text.lines().find(|line| line.starts_with("some "))?;
        let percent = some.split("avg10=").nth(1)?.split(' ').next()?;
        Some(percent.parse::<f64>().ok()? / 100.0)
    }

    pub(super) fn sensors(&self, sample: &mut TelemetrySample) {
        let cores = self.folders("sys/devices/system/cpu", "cpu");
        let khz = cores
            .iter()
            .filter_map(|core| number(&core.join("cpufreq/scaling_cur_freq")));
        sample.cpu_mhz = mean(khz).map(|khz| khz / 1000.0);
        let hwmon = self.folders("sys/class/hwmon", "hwmon");
        let inputs = hwmon.iter().flat_map(|chip| folders(chip, "temp"));
        let inputs = inputs.filter(|path| path.to_string_lossy().ends_with("_input"));
        // A sensor without a device behind it reads 0 or a value far below freezing.
        let degrees = inputs.filter_map(|path| number(&path)).map(|m| m / 1000.0);
        sample.temperature_c = degrees
            .filter(|c| (1.0..150.0).contains(c))
            .reduce(f64::max);
        self.battery(sample);
        let cards = self.folders("sys/class/drm", "card");
        sample.gpus = cards.iter().filter_map(|card| gpu(card)).collect();
    }

    pub(super) fn battery(&self, sample: &mut TelemetrySample) {
        let supplies = self.folders("sys/class/power_supply", "");
        let is_battery = |path: &&PathBuf| {
            let scope = read(&path.join("scope")).unwrap_or_default();
            let kind = read(&path.join("type")).unwrap_or_default();
            kind.trim() == "Battery" && scope.trim() != "Device" // not a mouse's
        };
        let Some(battery) = supplies.iter().find(is_battery) else {
            return;
        };
        sample.battery = number(&battery.join("capacity")).map(|percent| percent / 100.0);
        sample.battery_watts = battery_watts(battery);
        let status = read(&battery.join("status"));
        sample.on_battery = status.map(|status| status.trim() == "Discharging");
    }
}

/// Watts that flow into or out of a battery, reported directly or as current and voltage.
fn battery_watts(battery: &Path) -> Option<f64> {
    let micro = |name: &str| number(&battery.join(name)).map(|value| value.abs() / 1e6);
    let product = || Some(micro("current_now")? * micro("voltage_now")?);
    micro("power_now").or_else(product)
}

/// A card whose driver reports its load, as AMD's does.
fn gpu(card: &Path) -> Option<Gpu> {
    let device = card.join("device");
    let busy = number(&device.join("gpu_busy_percent")).map(|percent| percent / 100.0);
    let bytes = |name: &str| number(&device.join(name)).map(|bytes| bytes as u64);
    let memory_bytes = bytes("mem_info_vram_total");
    let memory_used_bytes = bytes("mem_info_vram_used");
    let sensors = folders(&device.join("hwmon"), "hwmon");
    let sensor = |name: &str| sensors.iter().find_map(|chip| number(&chip.join(name)));
    let temperatures = sensors.iter().flat_map(|chip| folders(chip, "temp"));
    let temperatures = temperatures.filter(|path| path.to_string_lossy().ends_with("_input"));
    let degrees = temperatures
        .filter_map(|path| number(&path))
        .map(|m| m / 1000.0);
    let name = card.file_name()?.to_string_lossy().into_owned();
    (busy.is_some() || memory_bytes.is_some()).then_some(Gpu {
        name,
        busy,
        memory_bytes,
        memory_used_bytes,
        // Mean or present power in microwatts, by kernel.
        watts: sensor("power1_average")
            .or_else(|| sensor("power1_input"))
            .map(|uw| uw / 1e6),
        temperature_c: degrees
            .filter(|c| (1.0..150.0).contains(c))
            .reduce(f64::max),
        throttled: None,
    })
}

/// The number that is all of a file.
pub(super) fn number(path: &Path) -> Option<f64> {
    let number: f64 = read(path)?.trim().parse().ok()?;
    number.is_finite().then_some(number)
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = File::open(path).ok()?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

fn folders(path: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let named = entries.take(ENTRIES_MAX);
    let named = named.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let mut paths: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
    (n > 0).then(|| sum / f64::from(n))
}
