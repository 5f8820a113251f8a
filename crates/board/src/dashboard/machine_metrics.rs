//! Metrics of this machine and its devices, and the energy of the cluster.

use paceline_cluster::telemetry::{Energy, Gpu, TelemetrySample};
use paceline_serve::MetricSample;
use serde_json::Value;

use crate::label::label;

/// Current energy per token: watts of all reporting machines over tokens a second of all requests.
pub(super) fn energy(nodes: &[Value], requests: &[Value], per_kwh: Option<f64>) -> Option<Energy> {
    let watts = nodes.iter().filter_map(|node| {
        let sample = serde_json::from_value::<TelemetrySample>(node["telemetry"].clone());
        sample.ok()?.watts()
    });
    let tok_s = requests
        .iter()
        .filter_map(|request| request["tok_s"].as_f64());
    Energy::of(watts.reduce(|a, b| a + b)?, tok_s.sum(), per_kwh)
}

/// The machine's metrics under their Prometheus names.
pub(super) fn machine_facts(sample: &TelemetrySample) -> Vec<MetricSample> {
    let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    let sum = |of: fn(&paceline_cluster::telemetry::InterfaceTraffic) -> f64| {
        let rates = sample.networks.iter().map(of);
        rates.reduce(|a, b| a + b)
    };
    #[rustfmt::skip]
    let all = [
        ("node_cpu_busy_ratio", "Share of time that the cores were busy", sample.cpu_busy),
        ("node_cpu_mhz", "Mean frequency of the cores", sample.cpu_mhz),
        ("node_memory_bytes", "Main memory", bytes(sample.memory_bytes)),
        ("node_memory_available_bytes", "Main memory that programs can still take",
         bytes(sample.memory_available_bytes)),
        ("node_swap_used_bytes", "Swap space in use", bytes(sample.swap_used_bytes)),
        ("node_cpu_pressure_ratio", "Share of time that a task waited for a core",
         sample.cpu_pressure),
        ("node_memory_pressure_ratio", "Share of time that a task waited for memory",
         sample.memory_pressure),
        ("node_io_pressure_ratio", "Share of time that a task waited for a disk",
         sample.io_pressure),
        ("node_disk_read_bytes_per_second", "Read from all disks", sample.disk_read_bytes_s),
        ("node_disk_written_bytes_per_second", "Written to all disks", sample.disk_write_bytes_s),
        ("node_network_received_bytes_per_second", "Received without loopback",
         sum(|network| network.received_bytes_s)),
        ("node_network_sent_bytes_per_second", "Sent without loopback",
         sum(|network| network.sent_bytes_s)),
        ("node_temperature_celsius", "The hottest sensor", sample.temperature_c),
        ("node_package_watts", "Power of all processor packages", sample.package_watts),
        ("node_battery_ratio", "Charge of the battery", sample.battery),
        ("node_watts", "Power of processor packages and graphics processors, on battery of all",
         sample.watts()),
        ("node_throttled_ratio", "Share of time that a package was slowed down by heat",
         sample.throttled),
    ];
    let known = all.into_iter().filter_map(|(name, help, value)| {
        let value = value?;
        Some(MetricSample {
            name,
            help,
            labels: String::new(),
            value,
        })
    });
    known.chain(gpu_facts(&sample.gpus)).collect()
}

/// Metrics of each GPU, grouped by name.
pub(super) fn gpu_facts(gpus: &[Gpu]) -> impl Iterator<Item = MetricSample> {
    type Of = fn(&Gpu) -> Option<f64>;
    #[rustfmt::skip]
    let all: [(&'static str, &'static str, Of); 6] = [
        ("node_gpu_busy_ratio", "Share of time that the graphics processor was busy",
         |gpu| gpu.busy),
        ("node_gpu_memory_bytes", "Memory of the graphics processor",
         |gpu| gpu.memory_bytes.map(|bytes| bytes as f64)),
        ("node_gpu_memory_used_bytes", "Memory of the graphics processor in use",
         |gpu| gpu.memory_used_bytes.map(|bytes| bytes as f64)),
        ("node_gpu_watts", "Power of the graphics processor", |gpu| gpu.watts),
        ("node_gpu_temperature_celsius", "Its hottest sensor", |gpu| gpu.temperature_c),
        ("node_gpu_throttled", "Whether it is slowed down because of heat or power",
         |gpu| gpu.throttled.map(|is_slow| f64::from(u8::from(is_slow)))),
    ];
    all.into_iter().flat_map(move |(name, help, of)| {
        gpus.iter().filter_map(move |gpu| {
            let value = of(gpu)?;
            let labels = label("gpu", &gpu.name);
            Some(MetricSample {
                name,
                help,
                labels,
                value,
            })
        })
    })
}
