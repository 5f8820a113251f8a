//! Values from two readings: load of cores, bytes a second, watts.

use std::collections::BTreeMap;
use std::time::Duration;

use super::files::{SystemFiles, number};
use super::{InterfaceTraffic, TelemetrySample};

/// Bytes of a sector in `/proc/diskstats`, on every device.
const SECTOR_BYTES: u64 = 512;

/// Counters that only grow, except for wraps and devices that come and go.
#[derive(Debug, Default)]
pub(super) struct RateCounters {
    /// Busy and total time of all cores together and of each, in the kernel's ticks.
    cores: Vec<(u64, u64)>,
    /// Bytes read and written, by disk.
    disks: BTreeMap<String, [u64; 2]>,
    /// Bytes received and sent, by interface.
    networks: BTreeMap<String, [u64; 2]>,
    /// Energy in microjoules with the value at which it wraps, by package.
    packages: BTreeMap<String, (u64, u64)>,
    /// Milliseconds of thermal throttling: the largest of all packages.
    throttled_ms: Option<u64>,
}

impl RateCounters {
    pub(super) fn read(files: &SystemFiles) -> Self {
        let text = |path| files.text(path).unwrap_or_default();
        Self {
            cores: text("proc/stat").lines().map_while(core).collect(),
            disks: text("proc/diskstats")
                .lines()
                .filter_map(|line| disk(files, line))
                .collect(),
            networks: text("proc/net/dev").lines().filter_map(network).collect(),
            packages: packages(files),
            throttled_ms: throttled_ms(files),
        }
    }

    /// Fills in the rates since `before`, `took` ago.
    pub(super) fn rates(&self, before: &Self, took: Duration, sample: &mut TelemetrySample) {
        let seconds = took.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        // After a core is switched on or off, the lines belong to other cores.
        if self.cores.len() == before.cores.len() {
            let mut busy = self.cores.iter().zip(&before.cores).map(busy);
            sample.cpu_busy = busy.next().flatten();
            sample.core_busy = busy.map(|busy| busy.unwrap_or(0.0)).collect();
        }
        if let Some([read, written]) = sum_rates(&self.disks, &before.disks, seconds) {
            sample.disk_read_bytes_s = Some(read);
            sample.disk_write_bytes_s = Some(written);
        }
        let networks = self.networks.iter().filter_map(|(name, now)| {
            let [received, sent] = rate(now, before.networks.get(name)?, seconds);
            Some(InterfaceTraffic {
                name: name.clone(),
                received_bytes_s: received,
                sent_bytes_s: sent,
            })
        });
        sample.networks = networks.collect();
        let watts = self.packages.iter().filter_map(|(name, (now, wrap))| {
            let (then, _) = before.packages.get(name)?;
            let used = now.checked_sub(*then).or((*now + *wrap).checked_sub(*then));
            used.map(|uj| uj as f64 / 1e6 / seconds)
        });
        sample.package_watts = watts.reduce(|a, b| a + b);
        let throttled = self.throttled_ms.zip(before.throttled_ms);
        sample.throttled = throttled.map(|(now, then)| {
            let seconds_hot = now.saturating_sub(then) as f64 / 1e3;
            (seconds_hot / seconds).min(1.0)
        });
    }
}

/// Busy and total ticks of a line `cpu…` of `/proc/stat`.
fn core(line: &str) -> Option<(u64, u64)> {
    let mut words = line.strip_prefix("cpu")?.split_ascii_whitespace();
    if !line.starts_with("cpu ") {
        words.next(); // the rest of the core's name
    }
    // user nice system idle iowait irq softirq steal; guests are in user already.
    let ticks: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
    let total = ticks.iter().sum::<u64>();
    let idle = ticks.get(3)? + ticks.get(4).unwrap_or(&0);
    Some((total - idle, total))
}

fn busy((now, before): (&(u64, u64), &(u64, u64))) -> Option<f64> {
    let total = now.1.checked_sub(before.1).filter(|total| *total > 0)?;
    let busy = now.0.saturating_sub(before.0);
    Some((busy as f64 / total as f64).min(1.0))
}

/// Name and bytes of a whole disk; partitions and stacked devices would count twice.
fn disk(files: &SystemFiles, line: &str) -> Option<(String, [u64; 2])> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let name = *words.get(2)?;
    let is_real = !["loop", "ram", "zram", "dm-", "md", "sr"]
        .iter()
        .any(|kind| name.starts_with(kind));
    let is_whole = files.0.join("sys/block").join(name).exists();
    let sectors = |at: usize| {
        words
            .get(at)?
            .parse::<u64>()
            .ok()?
            .checked_mul(SECTOR_BYTES)
    };
    let bytes = [sectors(5)?, sectors(9)?];
    (is_real && is_whole).then(|| (name.to_owned(), bytes))
}

/// Name and bytes of an interface in `/proc/net/dev`.
fn network(line: &str) -> Option<(String, [u64; 2])> {
    let (name, rest) = line.split_once(':')?;
    let name = name.trim();
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    let bytes = |at: usize| words.get(at)?.parse::<u64>().ok();
    let bytes = [bytes(0)?, bytes(8)?];
    (name != "lo").then(|| (name.to_owned(), bytes))
}

/// Energy of each processor package: `intel-rapl:0`, also AMD's; not the parts `intel-rapl:0:1`.
fn packages(files: &SystemFiles) -> BTreeMap<String, (u64, u64)> {
    let zones = files.folders("sys/class/powercap", "intel-rapl:");
    let energy = zones.iter().filter_map(|zone| {
        let name = zone.file_name()?.to_string_lossy().into_owned();
        let number = |file: &str| number(&zone.join(file)).map(|uj| uj as u64);
        let is_package = name.matches(':').count() == 1;
        let energy = is_package.then(|| number("energy_uj")).flatten()?;
        Some((name, (energy, number("max_energy_range_uj").unwrap_or(0))))
    });
    energy.collect()
}

/// Equal for all cores of a package, so one core of each would suffice.
fn throttled_ms(files: &SystemFiles) -> Option<u64> {
    let cores = files.folders("sys/devices/system/cpu", "cpu");
    let file = "thermal_throttle/package_throttle_total_time_ms";
    let times = cores.iter().filter_map(|core| number(&core.join(file)));
    times.map(|ms| ms as u64).max()
}

fn rate(now: &[u64; 2], before: &[u64; 2], seconds: f64) -> [f64; 2] {
    std::array::from_fn(|at| now[at].saturating_sub(before[at]) as f64 / seconds)
}

fn sum_rates(
    now: &BTreeMap<String, [u64; 2]>,
    before: &BTreeMap<String, [u64; 2]>,
    seconds: f64,
) -> Option<[f64; 2]> {
    let rates = now
        .iter()
        .filter_map(|(name, now)| Some(rate(now, before.get(name)?, seconds)));
    rates.reduce(|a, b| [a[0] + b[0], a[1] + b[1]])
}
