//! The user's own machines as a cluster for the planner.
//!
//! Memory, links and GPUs are those that the nodes report. A GPU has its measured rates, else those
//! of its class. The rates of this machine's processor are measured by the caller; those of other
//! processors are estimated by their cores.

use paceline_cluster::machine;
use paceline_cluster::nodes::agent::EngineDevice;
use paceline_node::forecast::devices::DeviceSpeed;
use paceline_plan::catalogue::HardwareEntry;
use paceline_plan::{Cluster, Error, LinkTransport, NodeLink};
use serde_json::Value;

/// A link that is not measured yet: Ethernet of 1 Gbit/s.
const UNMEASURED: (f64, f64) = (100e-6, 117e6);

/// Bandwidth of this machine's memory in bytes a second, and its integer operations a second.
pub type MeasuredRates = (f64, f64);

/// This machine as a cluster of one node.
pub fn this_machine(rates: MeasuredRates) -> Result<Cluster, Error> {
    let memory = machine::available().map(|bytes| bytes.0 as f64);
    let node = entry(memory, rates).node("this machine", None)?;
    Ok(Cluster {
        name: "this machine".to_owned(),
        nodes: vec![node],
        links: Vec::new(),
    })
}

/// The fastest GPU that a node lists and can use.
fn gpu(node: &Value) -> Option<HardwareEntry> {
    let listed = node["devices"].as_array()?.iter();
    let listed = listed.filter_map(|it| serde_json::from_value::<EngineDevice>(it.clone()).ok());
    let entry = |device: EngineDevice| {
        let (read, operations) = DeviceSpeed::of(&device)?.usual_rates();
        Some(HardwareEntry {
            kind: device.name.unwrap_or_else(|| device.backend.clone()),
            backend: Some(device.backend),
            // The engine without costs of a framework: ours has none of exo or mlx-lm.
            engine: Some("generic".to_owned()),
            // The node reports what the device lends to models.
            usable_fraction: Some(1.0),
            ..entry(
                device.memory_bytes.map(|bytes| bytes as f64),
                (read, operations),
            )
        })
    };
    let gpus = listed.filter(|device| device.kind == "gpu" && device.problem.is_none());
    gpus.filter_map(entry).max_by(|a, b| {
        let read = |it: &HardwareEntry| it.memory_bandwidth_gb_s.unwrap_or(0.0);
        read(a).total_cmp(&read(b))
    })
}

fn entry(memory_bytes: Option<f64>, (read, operations): MeasuredRates) -> HardwareEntry {
    HardwareEntry {
        kind: "this machine".to_owned(),
        memory_gb: memory_bytes.map(|bytes| bytes / 1e9),
        memory_bandwidth_gb_s: Some(read / 1e9),
        fp16_tflops: Some(operations / 1e12),
        backend: Some("cpu".to_owned()),
        source: "own measurement".to_owned(),
        ..HardwareEntry::default()
    }
}

/// The live machines of `nodes`, as `paceline nodes --json` lists them, this one first. With names
/// only the named ones, with a number only the first ones.
pub fn own_cluster(
    nodes: &Value,
    chosen: Option<&[String]>,
    rates: MeasuredRates,
) -> Result<Cluster, Error> {
    let all = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    let name = |node: &Value| node["name"].as_str().unwrap_or_default().to_owned();
    let count = match chosen {
        Some([one]) => one.parse().ok(),
        _ => None,
    };
    let is_chosen = |node: &&Value| {
        let is_named = |names: &[String]| names.contains(&name(node));
        let lives = node["state"] == "alive" && node["leaving"] != true;
        lives && (count.is_some() || chosen.is_none_or(is_named))
    };
    let chosen = all.iter().filter(is_chosen);
    let chosen: Vec<&Value> = chosen.take(count.unwrap_or(usize::MAX)).collect();
    let cores = |node: &Value| node["cores"].as_f64().filter(|cores| *cores > 0.0);
    let own_cores = all.first().and_then(cores);
    let node = |node: &&Value| {
        let more = cores(node)
            .zip(own_cores)
            .map_or(1.0, |(its, own)| its / own);
        let memory = node["memory_bytes"].as_f64();
        let processor = || entry(memory, (rates.0 * more, rates.1 * more));
        gpu(node).unwrap_or_else(processor).node(&name(node), None)
    };
    let (mut links, mut guessed) = (Vec::new(), false);
    for (b, to) in chosen.iter().enumerate() {
        for (a, from) in chosen[..b].iter().enumerate() {
            let measured = path(from, &name(to)).or_else(|| path(to, &name(from)));
            guessed |= measured.is_none();
            let (alpha, beta) = measured.unwrap_or(UNMEASURED);
            links.push(NodeLink {
                a,
                b,
                kind: "tcp".to_owned(),
                transport: LinkTransport::Tcp,
                alpha,
                beta,
                shared: false,
            });
        }
    }
    let names: Vec<String> = chosen.iter().map(|node| name(node)).collect();
    let note = if guessed {
        " (links not measured: 1 Gbit/s)"
    } else {
        ""
    };
    let cluster = Cluster {
        name: format!("{}{note}", names.join(", ")),
        nodes: chosen.iter().map(node).collect::<Result<_, _>>()?,
        links,
    };
    cluster.check()?;
    Ok(cluster)
}

/// Seconds one way and bytes a second of the path that `from` uses to the node `to`, if measured.
fn path(from: &Value, to: &str) -> Option<(f64, f64)> {
    let paths = from["paths"].as_array()?;
    let used = |path: &&Value| path["to_name"] == to && path["preferred"] == true;
    let path = paths.iter().find(used)?;
    let round_trip = path["latency_us"].as_f64()?.max(1.0);
    Some((round_trip / 2.0 * 1e-6, path["bytes_per_s"].as_f64()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nodes() -> Value {
        let node = |name: &str, state: &str, cores: u32| {
            json!({ "name": name, "state": state, "cores": cores, "memory_bytes": 16e9,
                    "paths": [] })
        };
        let mut nodes = json!([
            node("mini", "alive", 4),
            node("studio", "alive", 8),
            node("old", "dead", 8)
        ]);
        nodes[0]["paths"] = json!([
            { "to_name": "studio", "preferred": true, "latency_us": 200, "bytes_per_s": 1_000_000_000 },
        ]);
        nodes
    }

    #[test]
    fn live_machines_have_their_memory_cores_and_paths() {
        let cluster = own_cluster(&nodes(), None, (10e9, 1e12)).unwrap();
        assert_eq!(cluster.name, "mini, studio");
        let bandwidths: Vec<f64> = cluster.nodes.iter().map(|node| node.bandwidth).collect();
        assert_eq!(bandwidths, [10e9, 20e9]);
        assert_eq!(cluster.links.len(), 1);
        let link = &cluster.links[0];
        assert!(
            (link.alpha / 1e-4 - 1.0).abs() < 1e-9 && link.beta == 1e9,
            "{link:?}"
        );
        let only = |chosen: &str| {
            let chosen = [chosen.to_owned()];
            own_cluster(&nodes(), Some(&chosen), (10e9, 1e12)).map(|it| it.name)
        };
        assert_eq!(only("studio").unwrap(), "studio");
        assert_eq!(only("1").unwrap(), "mini");
        assert!(only("old").is_err());
    }

    #[test]
    fn a_gpu_computes_with_its_memory_and_rates_unless_it_cannot_be_used() {
        let forms = json!([{ "bits": 5, "reads": 100e9 as u64, "computes": 2e12 as u64 }]);
        let mut nodes = nodes();
        nodes[0]["devices"] = json!([
            { "engine": "cpu", "kind": "cpu", "backend": "avx2", "memory_bytes": 15e9 as u64 },
            { "engine": "mlx", "kind": "gpu", "backend": "metal", "name": "Apple M9",
              "memory_bytes": 12e9 as u64, "placed_bytes": 1, "rates": { "forms": forms } },
        ]);
        nodes[1]["devices"] = json!([{ "engine": "mlx", "kind": "gpu", "backend": "cuda",
                                       "memory_bytes": 80e9 as u64, "problem": "no driver" }]);
        let cluster = own_cluster(&nodes, None, (10e9, 1e12)).unwrap();
        let gpu = &cluster.nodes[0];
        assert_eq!(
            (gpu.budget(), gpu.backend),
            (12e9, paceline_plan::Backend::Metal)
        );
        assert_eq!(gpu.kind, "Apple M9");
        // The form of 5 bits holds weights that have 4.5 in the file.
        assert!(
            (gpu.bandwidth / 90e9 - 1.0).abs() < 1e-9,
            "{}",
            gpu.bandwidth
        );
        assert_eq!(cluster.nodes[1].backend, paceline_plan::Backend::Cpu);
        assert_eq!(cluster.nodes[1].bandwidth, 20e9);
    }

    #[test]
    fn a_link_without_a_measurement_is_guessed_and_said() {
        let mut nodes = nodes();
        nodes[0]["paths"] = json!([]);
        let cluster = own_cluster(&nodes, None, (10e9, 1e12)).unwrap();
        assert!(cluster.name.contains("not measured"), "{}", cluster.name);
        assert_eq!(cluster.links[0].beta, UNMEASURED.1);
    }
}
