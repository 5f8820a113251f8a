//! Tests of `dashboard.rs`.

use super::machine_metrics::gpu_facts;
use super::*;
use crate::label::label;
use paceline_cluster::nodes::agent::NodePaths;
use paceline_cluster::telemetry::{Gpu, InterfaceTraffic};
use paceline_serve::METRIC_NAMES;

fn full() -> TelemetrySample {
    TelemetrySample {
        cpu_busy: Some(0.5),
        cpu_mhz: Some(1.0),
        memory_bytes: Some(1),
        memory_available_bytes: Some(1),
        swap_used_bytes: Some(1),
        cpu_pressure: Some(0.1),
        memory_pressure: Some(0.1),
        io_pressure: Some(0.1),
        disk_read_bytes_s: Some(1.0),
        disk_write_bytes_s: Some(1.0),
        networks: vec![InterfaceTraffic::default()],
        temperature_c: Some(40.0),
        package_watts: Some(9.0),
        battery: Some(0.5),
        throttled: Some(0.0),
        gpus: vec![gpu("card0"), gpu("card1")],
        ..TelemetrySample::default()
    }
}

fn gpu(name: &str) -> Gpu {
    Gpu {
        name: name.to_owned(),
        busy: Some(0.5),
        memory_bytes: Some(2),
        memory_used_bytes: Some(1),
        watts: Some(90.0),
        temperature_c: Some(60.0),
        throttled: Some(true),
    }
}

/// A cluster of two whose links are measured.
fn two() -> [NodePaths; 2] {
    let mut all = [
        links::tests::ways((1, "a"), (2, "b"), 120),
        links::tests::ways((2, "b"), (1, "a"), 130),
    ];
    all[0].paths[0].path.bytes_per_s = Some(940_000_000);
    all
}

/// Names of metrics in a text: words that begin with `paceline_`.
fn names(text: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let words = text.split(|c| !is_part(c));
    words
        .filter(|word| word.starts_with("paceline_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn dashboard_and_alerts_name_metrics_that_there_are() {
    let facts = machine_facts(&full())
        .into_iter()
        .chain(links::facts(&two()))
        .chain(traffic::facts(&[traffic::tests::counts(
            "1",
            1,
            [[0, 5], [6, 0]],
        )]));
    let mut machine: Vec<String> = facts
        .map(|fact| format!("paceline_{}", fact.name))
        .collect();
    machine.dedup(); // of each graphics processor
    assert_eq!(machine.len(), 17 + 6 + 2 + 1);
    // That file has the names of instance metrics.
    let up = include_str!("../figures.rs");
    let is_known = |name: &String| {
        let short = name.trim_start_matches("paceline_");
        METRIC_NAMES.contains(&name.as_str())
            || machine.contains(name)
            || up.contains(&format!("\"{short}\""))
    };
    let grafana = include_str!("../../../../docs/monitoring/grafana.json");
    let alerts = include_str!("../../../../docs/monitoring/alerts.yml");
    let _: Value = serde_json::from_str(grafana).unwrap();
    for (text, least) in [(grafana, 30), (alerts, 11)] {
        let used = names(text);
        assert!(used.len() >= least, "{used:?}");
        let unknown: Vec<_> = used.iter().filter(|name| !is_known(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
    // Guards against a dashboard with few metrics.
    let used = names(grafana);
    let forgotten = machine.iter().filter(|name| !used.contains(name)).count();
    assert!(
        forgotten <= 5,
        "{forgotten} of the machine's metrics are shown nowhere"
    );
}

#[test]
fn energy_is_told_while_tokens_come_and_machines_tell_watts() {
    let node = |watts: Option<f64>| json!({ "telemetry": { "package_watts": watts } });
    let (known, silent) = (json!({ "telemetry": { "package_watts": 30.0 } }), json!({}));
    let requests = [json!({ "tok_s": 4.0 }), json!({ "tok_s": 2.0 }), json!({})];
    let told = energy(&[known.clone(), silent, node(None)], &requests, Some(0.36)).unwrap();
    assert_eq!((told.watts, told.joules_per_token), (30.0, 5.0));
    assert!((told.cost_per_million.unwrap() - 0.5).abs() < 1e-12);
    assert_eq!(energy(&[known], &[], None), None);
    assert_eq!(energy(&[], &requests, None), None);
}

#[test]
fn figures_that_a_machine_does_not_tell_are_absent() {
    assert!(machine_facts(&TelemetrySample::default()).is_empty());
    let silent = Gpu {
        name: "card0".to_owned(),
        watts: Some(0.0),
        ..Gpu::default()
    };
    let facts: Vec<MetricSample> = gpu_facts(&[silent]).collect();
    let names: Vec<&str> = facts.iter().map(|fact| fact.name).collect();
    assert_eq!(names, ["node_gpu_watts"]);
}

#[test]
fn graphics_processors_and_links_are_told_apart_by_labels() {
    let told = |facts: Vec<MetricSample>, name: &str| -> Vec<(String, f64)> {
        let own = facts.into_iter().filter(|fact| fact.name == name);
        own.map(|fact| (fact.labels, fact.value)).collect()
    };
    let pair = |labels: &str, value: f64| (labels.to_owned(), value);
    assert_eq!(
        told(machine_facts(&full()), "node_gpu_throttled"),
        [pair("gpu=\"card0\"", 1.0), pair("gpu=\"card1\"", 1.0)]
    );
    // Only this node's links: the other node has its own `/metrics`.
    let labels = "from=\"a\",to=\"b\",interface=\"eth0\"";
    assert_eq!(
        told(links::facts(&two()), "link_latency_seconds"),
        [pair(labels, 0.000_12)]
    );
    assert_eq!(
        told(links::facts(&two()), "link_bandwidth_bytes_per_second"),
        [pair(labels, 940e6)]
    );
    assert_eq!(links::facts(&[]), []);
    assert_eq!(label("a", "b\"\\\n"), "a=\"b\\\"\\\\\\n\"");
}
