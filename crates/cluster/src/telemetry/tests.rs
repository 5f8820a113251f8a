//! Recorded machines as folders: a laptop with a battery, a virtual machine, and systems that
//! report nothing.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::{InterfaceTraffic, Sampler, TelemetrySample};

/// Files of a laptop at two times, two seconds apart.
const THEN: &[(&str, &str)] = &[
    (
        "proc/stat",
        "cpu  1000 0 1000 8000 0 0 0 0 0 0\ncpu0 500 0 500 4000 0 0 0 0 0 0\n\
         cpu1 500 0 500 4000 0 0 0 0 0 0\nintr 5 6\n",
    ),
    (
        "proc/meminfo",
        "MemTotal:       16000000 kB\nMemFree:         100 kB\nMemAvailable:    4000000 kB\n\
         SwapTotal:       2000000 kB\nSwapFree:        1500000 kB\n",
    ),
    (
        "proc/pressure/memory",
        "some avg10=12.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=1.00 avg60=0 avg300=0 total=1\n",
    ),
    (
        "proc/diskstats",
        " 259 0 nvme0n1 10 0 1000 5 20 0 2000 9 0 0 0\n 259 1 nvme0n1p1 10 0 1000 5 20 0 2000 9 0 0 0\n \
         7 0 loop0 1 0 9 9 9 9 9 9 9 9 9\n",
    ),
    (
        "proc/net/dev",
        "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0\n\
         wlan0: 1000 1 0 0 0 0 0 0 5000 1 0 0 0 0 0 0\n",
    ),
];

/// Files of one line, behind their paths.
const THEN_LINES: &str = "\
sys/block/nvme0n1/size 1000000
sys/block/loop0/size 1
sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq 2400000
sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq 3600000
sys/class/hwmon/hwmon0/temp1_input 48000
sys/class/hwmon/hwmon1/temp1_input 71500
sys/class/hwmon/hwmon1/temp2_input -128000
sys/class/powercap/intel-rapl:0/energy_uj 262143000000
sys/class/powercap/intel-rapl:0/max_energy_range_uj 262143328850
sys/class/powercap/intel-rapl:0:0/energy_uj 5
sys/class/power_supply/AC/type Mains
sys/class/power_supply/BAT0/type Battery
sys/class/power_supply/BAT0/capacity 83
sys/class/power_supply/BAT0/status Discharging
sys/class/power_supply/BAT0/current_now 1500000
sys/class/power_supply/BAT0/voltage_now 12000000
sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_total_time_ms 100
sys/class/drm/card0/device/hwmon/hwmon3/power1_average 41000000
sys/class/drm/card0/device/hwmon/hwmon3/temp1_input 55000
sys/class/drm/card0/device/hwmon/hwmon3/temp2_input 63000
sys/class/drm/card0/device/gpu_busy_percent 37
sys/class/drm/card0/device/mem_info_vram_total 8589934592
sys/class/drm/card0/device/mem_info_vram_used 1073741824";

const NOW: &[(&str, &str)] = &[
    (
        "proc/stat",
        "cpu  1150 0 1050 8200 0 0 0 0 0 0\ncpu0 650 0 550 4000 0 0 0 0 0 0\n\
         cpu1 500 0 500 4200 0 0 0 0 0 0\nintr 5 6\n",
    ),
    (
        "proc/diskstats",
        " 259 0 nvme0n1 10 0 3000 5 20 0 2400 9 0 0 0\n 259 1 nvme0n1p1 10 0 3000 5 20 0 2400 9 0 0 0\n",
    ),
    (
        "proc/net/dev",
        "    lo: 990 1 0 0 0 0 0 0 990 1 0 0 0 0 0 0\n \
         wlan0: 3000 1 0 0 0 0 0 0 5500 1 0 0 0 0 0 0\n  new0: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n",
    ),
];

/// As [`THEN_LINES`]. The energy has wrapped after 328,850 uJ; 29,671,150 more are 30 J in all.
const NOW_LINES: &str = "\
sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_total_time_ms 600
sys/class/powercap/intel-rapl:0/energy_uj 29671150";

/// Files of several lines, and those of one.
fn both(
    files: &'static [(&str, &str)],
    lines: &'static str,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = lines.lines().map(|line| line.split_once(' ').unwrap());
    files.iter().copied().chain(lines)
}

fn write<'a>(root: &Path, files: impl IntoIterator<Item = (&'a str, &'a str)>) {
    for (path, text) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

#[test]
fn a_laptop_is_read() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), both(THEN, THEN_LINES));
    let mut sampler = Sampler::new(root.path());
    let first = sampler.sample(Duration::from_secs(5));
    assert_eq!(first.cpu_busy, None);
    assert!(first.networks.is_empty() && first.package_watts.is_none());
    write(root.path(), both(NOW, NOW_LINES));
    let second = sampler.sample(Duration::from_secs(7));
    assert_eq!(second.cpu_busy, Some(0.5));
    assert_eq!(second.core_busy, [1.0, 0.0]);
    assert_eq!(second.cpu_mhz, Some(3000.0));
    assert_eq!(second.memory_bytes, Some(16_384_000_000));
    assert_eq!(second.memory_available_bytes, Some(4_096_000_000));
    assert_eq!(second.swap_used_bytes, Some(512_000_000));
    assert_eq!(second.memory_pressure, Some(0.125));
    assert_eq!((second.cpu_pressure, second.io_pressure), (None, None));
    assert_eq!(second.disk_read_bytes_s, Some(512_000.0));
    assert_eq!(second.disk_write_bytes_s, Some(102_400.0));
    let wlan = InterfaceTraffic {
        name: "wlan0".into(),
        received_bytes_s: 1000.0,
        sent_bytes_s: 250.0,
    };
    assert_eq!(second.networks, [wlan]);
    assert_eq!(second.temperature_c, Some(71.5));
    assert_eq!(second.package_watts, Some(15.0));
    assert_eq!(
        (second.battery, second.on_battery),
        (Some(0.83), Some(true))
    );
    assert_eq!(second.gpus.len(), 1);
    assert_eq!(second.gpus[0].busy, Some(0.37));
    assert_eq!(second.gpus[0].memory_used_bytes, Some(1 << 30));
    assert_eq!(second.gpus[0].watts, Some(41.0));
    assert_eq!(second.gpus[0].temperature_c, Some(63.0));
    assert_eq!(second.throttled, Some(0.25));
    assert_eq!(second.battery_watts, Some(18.0));
    assert_eq!(second.watts(), Some(18.0), "on battery it gives all");
    let plugged_in = TelemetrySample {
        on_battery: Some(false),
        ..second
    };
    assert_eq!(plugged_in.watts(), Some(15.0 + 41.0));
}

/// A virtual machine, recorded by `scripts/golden/machine.py`, which computed the expected values
/// from the files independently. It has no sensors, so their values are absent.
#[test]
fn a_recorded_machine_is_read() {
    const RECORDED: &str = include_str!("../../../../tests-data/golden/telemetry/cloud-vm.json");
    let recorded: Value = serde_json::from_str(RECORDED).unwrap();
    let root = tempfile::tempdir().unwrap();
    let put = |when: &str| {
        let files = recorded[when].as_object().unwrap().iter();
        let files = files.map(|(path, text)| (path.as_str(), text.as_str().unwrap()));
        write(root.path(), files);
    };
    put("then");
    let mut sampler = Sampler::new(root.path());
    sampler.sample(Duration::ZERO);
    put("now");
    let took = Duration::from_secs_f64(recorded["seconds"].as_f64().unwrap());
    let told = serde_json::to_value(sampler.sample(took)).unwrap();
    let expected = &recorded["expected"];
    assert!(is_near(&told, expected), "{told}, expected {expected}");
}

/// Whether both have the same keys, and numbers that differ by rounding at most.
fn is_near(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() <= 1e-9 * b.abs()
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_near(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let mut all = a.iter();
            a.len() == b.len() && all.all(|(key, a)| b.get(key).is_some_and(|b| is_near(a, b)))
        }
        (a, b) => a == b,
    }
}

#[test]
fn what_a_system_does_not_tell_is_absent() {
    let root = tempfile::tempdir().unwrap();
    let mut sampler = Sampler::new(root.path());
    sampler.sample(Duration::ZERO);
    let sample = sampler.sample(Duration::from_secs(1));
    assert_eq!(serde_json::to_string(&sample).unwrap(), "{}");
}

#[test]
fn damaged_files_are_absent_values_and_no_panic() {
    let root = tempfile::tempdir().unwrap();
    let text = "cpu 1 2\ncpu  x\n: : :\nMemTotal: 99999999999999999999 kB\nsome avg10=\n\u{0}";
    let damaged = both(THEN, THEN_LINES).map(|(path, _)| (path, text));
    write(root.path(), damaged);
    let mut sampler = Sampler::new(root.path());
    sampler.sample(Duration::ZERO);
    let sample = sampler.sample(Duration::ZERO);
    assert_eq!((sample.memory_bytes, sample.battery), (None, None));
}

/// The bar is 0.3 % of a core; a sample each 2 s may take 6 ms for that.
#[cfg(target_os = "linux")]
#[test]
fn a_sample_of_this_machine_is_cheap() {
    let mut sampler = Sampler::new("/");
    let cpu_ns = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        text.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    sampler.sample(Duration::ZERO);
    let begun = cpu_ns();
    for second in 1..=10 {
        let sample = sampler.sample(Duration::from_secs(second));
        assert!(sample.memory_bytes.is_some_and(|bytes| bytes > 0));
    }
    let each_us = (cpu_ns() - begun) / 10_000;
    assert!(each_us < 6_000, "{each_us} us of CPU time a sample");
}
