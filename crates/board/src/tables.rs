//! Text tables of a node's reports: machines, paths, models, instances, placements.
//!
//! Each function formats the JSON of a command as lines. Foreign text is escaped.

use paceline_base::{Bytes, printable};
use paceline_cluster::nodes::rdma::RdmaDevice;
use serde_json::Value;

use crate::commands::unix_s;
use crate::rdma;

/// Maximum listed paths: those of four nodes with two interfaces.
const WAYS_MAX: usize = 24;

/// Columns of a terminal that a table should fit.
const COLUMNS: usize = 80;

/// Nodes, a line each, then the measured paths between them.
pub fn nodes(nodes: &Value) -> Vec<String> {
    let mut lines = aligned(&rows(nodes));
    let nodes_told = nodes.as_array().into_iter().flatten();
    lines.extend(nodes_told.clone().flat_map(device_problems));
    lines.extend(nodes_told.clone().flat_map(rdma_devices));
    lines.extend(programs(nodes_told));
    lines.extend(ways(nodes));
    lines
}

/// Why devices of a node cannot be used, a line each.
fn device_problems(node: &Value) -> Vec<String> {
    let devices = node["devices"].as_array().into_iter().flatten();
    let told = devices.filter_map(|device| {
        let text = |value: &Value| printable(value.as_str().unwrap_or_default()).into_owned();
        let problem = device["problem"].as_str()?;
        let (name, engine) = (text(&node["name"]), text(&device["engine"]));
        Some(format!(
            "{name}: {engine} cannot be used: {}",
            printable(problem)
        ))
    });
    told.collect()
}

/// The nodes that run programs of users, in one line.
fn programs<'a>(nodes: impl Iterator<Item = &'a Value>) -> Option<String> {
    let allowing = nodes.filter(|node| node["programs"] == true);
    let names = allowing.map(|node| printable(node["name"].as_str().unwrap_or_default()));
    let names = names.collect::<Vec<_>>().join(", ");
    (!names.is_empty()).then(|| format!("programs of users may run on {names}"))
}

fn rdma_devices(node: &Value) -> Vec<String> {
    let name = printable(node["name"].as_str().unwrap_or_default());
    let devices = serde_json::from_value::<Vec<RdmaDevice>>(node["rdma"].clone());
    let devices = devices.unwrap_or_default().into_iter();
    let line = |device| format!("{name}: RDMA {}", printable(&rdma::told(&device)));
    devices.map(line).collect()
}

/// RDMA cables of this machine, a line each.
pub fn cables(cables: &Value) -> Vec<String> {
    let heading = ["CABLE", "OTHER END", "TRUSTED"].map(str::to_owned);
    let row = |it: &Value| {
        let text = |name: &str| printable(it[name].as_str().unwrap_or_default()).into_owned();
        let trusted = match (it["here"] == true, it["there"] == true) {
            (true, true) => "at both ends",
            (true, false) => "here",
            (false, true) => "there",
            (false, false) => "no",
        };
        [text("link"), text("other"), trusted.to_owned()]
    };
    let rows: Vec<[String; 3]> = std::iter::once(heading)
        .chain(cables.as_array().into_iter().flatten().map(row))
        .collect();
    aligned(&rows)
}

/// Transports of instances whose nodes have RDMA cables, a line each.
fn wires(all: &Value) -> Vec<String> {
    let all = all.as_array().into_iter().flatten();
    let line = |it: &Value| {
        let wires = it["wires"].as_str()?;
        Some(format!("{}: {}", label(it), printable(wires)))
    };
    all.filter_map(line).collect()
}

/// Instances, a line each. Their numbers are named without layers where a line would be wider than
/// [`COLUMNS`].
pub fn instances(all: &Value) -> Vec<String> {
    let now_unix_s = unix_s();
    let heading = ["MODEL", "STATE", "NODES", "ENGINE", "EPOCH", "ID"].map(str::to_owned);
    let table = |engine: &dyn Fn(&str) -> String| {
        let row = |it: &Value| {
            let text = |name: &str| printable(it[name].as_str().unwrap_or_default()).into_owned();
            let (nodes, epoch) = (counted(it), it["epoch"].to_string());
            let engine = engine(&text("numbers"));
            let state = match it["since_unix_s"].as_u64() {
                Some(since) if it["state"] == "ready" => {
                    format!("{} {}", state(it), age(since, now_unix_s))
                }
                _ => state(it),
            };
            [label(it), state, nodes, engine, epoch, text("id")]
        };
        let all = all.as_array().into_iter().flatten().map(row);
        let rows: Vec<[String; 6]> = std::iter::once(heading.clone()).chain(all).collect();
        aligned(&rows)
    };
    let mut lines = table(&str::to_owned);
    if lines.iter().any(|line| line.chars().count() > COLUMNS) {
        lines = table(&without_layers);
    }
    lines.extend(all.as_array().into_iter().flatten().filter_map(degraded));
    let from_disk = |it| Some(format!("{}: {}", label(it), from_disk(it)?));
    lines.extend(all.as_array().into_iter().flatten().filter_map(from_disk));
    lines.extend(all.as_array().into_iter().flatten().filter_map(drafts));
    lines.extend(wires(all));
    lines
}

/// Names of the nodes that compute an instance's ranks now.
pub(crate) fn computing(it: &Value) -> Vec<&str> {
    let list = |name: &str| it[name].as_array().into_iter().flatten();
    let now: Vec<&str> = list("computing").filter_map(Value::as_str).collect();
    match now.is_empty() {
        true => list("nodes").filter_map(Value::as_str).collect(),
        false => now,
    }
}

/// Names of the nodes that compute an instance now, each with its number of ranks if it has
/// several.
pub(crate) fn counted(it: &Value) -> String {
    let mut each: Vec<(&str, usize)> = Vec::new();
    for node in computing(it) {
        match each.iter_mut().find(|(known, _)| *known == node) {
            Some((_, ranks)) => *ranks += 1,
            None => each.push((node, 1)),
        }
    }
    let told = each.into_iter().map(|(node, ranks)| match ranks {
        1 => printable(node).into_owned(),
        ranks => format!("{} x{ranks}", printable(node)),
    });
    told.collect::<Vec<_>>().join(", ")
}

/// How many draft tokens of an instance were accepted.
fn drafts(it: &Value) -> Option<String> {
    let count = |name: &str| it["drafts"][name].as_f64();
    let [checked, right, steps] = [count("checked")?, count("right")?, count("steps")?];
    Some(format!(
        "{}: {:.2} draft tokens accepted a step, {:.0} % of those checked",
        label(it),
        right / steps.max(1.0),
        100.0 * right / checked.max(1.0)
    ))
}

/// Missing nodes of an instance that answers, and the nodes that stand in for them.
fn degraded(it: &Value) -> Option<String> {
    if it["state"] != "ready" {
        return None; // the state has its reason
    }
    let stand_ins = it["stand_ins"].as_array().into_iter().flatten();
    let told = stand_ins.chain([&it["reason"]]).filter_map(Value::as_str);
    let told: Vec<&str> = told.collect();
    (!told.is_empty()).then(|| format!("{}: {}", label(it), printable(&told.join("; "))))
}

/// Time since a moment in its largest unit, as `90s`, `5m`, `3h` or `2d`.
fn age(since: u64, now: u64) -> String {
    let seconds = now.saturating_sub(since);
    match seconds {
        0..100 => format!("{seconds}s"),
        100..6_000 => format!("{}m", seconds / 60),
        6_000..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A name of numbers without the layers of its parts, equal neighbours once.
fn without_layers(numbers: &str) -> String {
    let parts = numbers.split('+');
    let parts = parts.map(|part| part.split(':').next().unwrap_or(part));
    let mut parts: Vec<&str> = parts.collect();
    parts.dedup();
    parts.join("+")
}

/// Placements, a line each, and whether the rates of their devices were measured.
pub fn proposals(preview: &Value) -> Vec<String> {
    let heading = [
        "NODES", "SPLIT", "ENGINE", "TOKENS/S", "TOGETHER", "FIRST", "LOAD", "FITS",
    ];
    let row = |it: &Value| {
        let number = |name: &str, unit: &str| match it[name].as_f64() {
            Some(value) => format!("{value:.1}{unit}"),
            None => "-".to_owned(),
        };
        let fits = if it["fits"] == true { "yes" } else { "no" };
        let replicas = it["replicas"].as_array().into_iter().flatten();
        let replicas: Vec<String> = replicas.map(names).collect();
        let nodes = match replicas.is_empty() {
            true => names(&it["nodes"]),
            false => replicas.join(" + "),
        };
        [
            nodes,
            it["split"].as_str().unwrap_or_default().to_owned(),
            engines_told(&it["engines"]),
            number("decode_tok_s", ""),
            number("batch_tok_s", ""),
            number("ttft_ms", " ms"),
            number("load_s", " s"),
            fits.to_owned(),
        ]
    };
    let placements = preview["placements"].as_array().into_iter().flatten();
    let rows: Vec<_> = std::iter::once(heading.map(str::to_owned))
        .chain(placements.clone().map(row))
        .collect();
    let mut lines = aligned(&rows);
    lines.extend(placements.clone().filter_map(constants));
    let from_disk = |it: &Value| {
        let split = it["split"].as_str().unwrap_or_default();
        Some(format!(
            "{}, {split}: {}",
            names(&it["nodes"]),
            from_disk(it)?
        ))
    };
    lines.extend(placements.filter_map(from_disk));
    lines
}

/// Weights that nodes read from their disks while they compute; `None` where all are in memory.
fn from_disk(it: &Value) -> Option<String> {
    let nodes = it["nodes"].as_array().into_iter().flatten();
    let each = nodes.zip(it["from_disk"].as_array()?);
    let told = each.filter_map(|(node, bytes)| {
        let bytes = bytes.as_u64().filter(|bytes| *bytes > 0)?;
        let node = printable(node.as_str().unwrap_or_default());
        Some(format!("{node} reads about {} from disk", Bytes(bytes)))
    });
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| told.join(", "))
}

/// Engines of nodes, equal neighbours once.
fn engines_told(engines: &Value) -> String {
    let engines = engines.as_array().into_iter().flatten();
    let mut told: Vec<&str> = engines.filter_map(Value::as_str).collect();
    told.dedup();
    printable(&told.join("+")).into_owned()
}

/// A placement whose devices have constants for rates.
fn constants(placement: &Value) -> Option<String> {
    let range = placement["decode_range"].as_array()?;
    let [least, most] = [range.first()?.as_f64()?, range.get(1)?.as_f64()?];
    Some(format!(
        "{}, {}: rates are constants of the device's class and not measured: {least:.1} to {most:.1} \
         tokens/s",
        names(&placement["nodes"]),
        placement["split"].as_str().unwrap_or_default(),
    ))
}

/// Stored model ranges and free disk, per node.
pub fn stores(told: &Value) -> Vec<String> {
    let heading = ["MODEL", "NODE", "HERE", "SIZE", "KIND"].map(str::to_owned);
    let mut rows = vec![heading];
    let mut notes = Vec::new();
    for store in told["nodes"].as_array().into_iter().flatten() {
        let node = printable(store["node"].as_str().unwrap_or_default()).into_owned();
        let models = store["models"].as_array().into_iter().flatten();
        rows.extend(models.map(|it| part(&node, it)));
        notes.push(space(&node, store));
    }
    let upstreams = told["upstreams"].as_array().into_iter().flatten();
    rows.extend(upstreams.map(|it| {
        let kind = if it["state"] == "ready" {
            "upstream"
        } else {
            "upstream, down"
        };
        [
            label(it),
            names(&it["nodes"]),
            "-".to_owned(),
            "-".to_owned(),
            kind.to_owned(),
        ]
    }));
    rows[1..].sort();
    let mut lines = aligned(&rows);
    lines.extend(notes);
    lines
}

fn part(node: &str, model: &Value) -> [String; 5] {
    let number = |name: &str| model[name].as_u64().unwrap_or(0);
    let (bytes, here) = (number("bytes"), number("here_bytes"));
    let kind = match (model["is_copy"] == true, model["is_loaded"] == true) {
        (false, false) => "pulled",
        (false, true) => "pulled, in use",
        (true, false) => "copy",
        (true, true) => "copy, in use",
    };
    let here = match here >= bytes {
        true => "all".to_owned(),
        false => format!("{} %", here * 100 / bytes.max(1)),
    };
    let name = printable(model["name"].as_str().unwrap_or_default()).into_owned();
    let size = Bytes(bytes).to_string();
    [name, node.to_owned(), here, size, kind.to_owned()]
}

/// Free disk of a node, or why it is unknown.
fn space(node: &str, store: &Value) -> String {
    if let Some(problem) = store["problem"].as_str() {
        return format!("{node}: {}", printable(problem));
    }
    let free = store["free_bytes"].as_u64().map(Bytes);
    let free = free.map_or_else(|| "unknown space".to_owned(), |free| free.to_string());
    match store["budget_bytes"].as_u64() {
        Some(budget) => format!("{node}: {free} free, disk budget {}", Bytes(budget)),
        None => format!("{node}: {free} free"),
    }
}

/// A model's name, with the replica's number if there are several.
pub fn label(it: &Value) -> String {
    let model = printable(it["model"].as_str().unwrap_or_default());
    let replica = &it["replica"];
    match (replica["number"].as_u64(), replica["of"].as_u64()) {
        (Some(number), Some(of)) => format!("{model} replica {number}/{of}"),
        _ => model.into_owned(),
    }
}

/// Names of nodes, as text.
pub fn names(nodes: &Value) -> String {
    let names = nodes.as_array().into_iter().flatten();
    let names: Vec<_> = names
        .filter_map(Value::as_str)
        .map(|name| printable(name).into_owned())
        .collect();
    names.join(", ")
}

/// An instance's state, with progress or reason.
fn state(it: &Value) -> String {
    let state = it["state"].as_str().unwrap_or_default();
    match it["reason"].as_str() {
        _ if degraded(it).is_some() => return "degraded".to_owned(),
        Some(reason) => return format!("{state}: {}", printable(reason)),
        None => {}
    }
    match (it["progress"][0].as_u64(), it["progress"][1].as_u64()) {
        (Some(done), Some(of)) if of > 0 => format!("{state} {} %", done * 100 / of),
        _ => state.to_owned(),
    }
}

/// Rows as lines with aligned columns.
pub fn aligned<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths);
        let cells: Vec<String> = cells.map(|(cell, n)| format!("{cell:n$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// The measured paths of all pairs; only those of this machine, the first, if there are many. Empty
/// without another machine.
fn ways(nodes: &Value) -> Vec<String> {
    let of = |node: &Value| -> Vec<[String; 6]> {
        let from = printable(node["name"].as_str().unwrap_or_default()).into_owned();
        let paths = node["paths"].as_array().into_iter().flatten();
        paths.map(|path| way(&from, path)).collect()
    };
    let nodes = nodes.as_array().map_or(&[][..], Vec::as_slice);
    let mut rows: Vec<_> = nodes.iter().flat_map(of).collect();
    if rows.len() > WAYS_MAX {
        rows = nodes.first().map(of).unwrap_or_default();
    }
    if rows.is_empty() {
        return Vec::new();
    }
    let heading = ["FROM", "TO", "INTERFACE", "ADDRESS", "LATENCY", "BANDWIDTH"];
    rows.insert(0, heading.map(str::to_owned));
    let mut lines = vec![String::new()];
    lines.extend(aligned(&rows));
    lines
}

fn way(from: &str, path: &Value) -> [String; 6] {
    let text = |name: &str| printable(path[name].as_str().unwrap_or_default()).into_owned();
    let latency = path["latency_us"].as_u64().unwrap_or(0) as f64 / 1000.0;
    let rate = path["bytes_per_s"].as_u64();
    let rate = rate.map_or("-".to_owned(), |rate| {
        format!("{:.0} MB/s", rate as f64 / 1e6)
    });
    let (latency, rate) = match (path["up"] == true, path["preferred"] == true) {
        (true, true) => (format!("{latency:.2} ms"), format!("{rate}  used")),
        (true, false) => (format!("{latency:.2} ms"), rate),
        (false, _) => ("down".to_owned(), rate),
    };
    [
        from.to_owned(),
        text("to_name"),
        text("interface"),
        text("remote"),
        latency,
        rate,
    ]
}

/// Engines of a node with the backends and memory of their GPUs, as `cpu, mlx (metal 27 GB)`; `?`
/// until the node lists them.
fn engines(devices: &Value) -> String {
    let mut told: Vec<String> = Vec::new();
    let usable = |device: &&Value| device["problem"].is_null();
    for device in devices.as_array().into_iter().flatten().filter(usable) {
        let text = |name: &str| printable(device[name].as_str().unwrap_or_default()).into_owned();
        let engine = text("engine");
        let memory = device["memory_bytes"].as_u64().map(Bytes);
        let memory = memory.map_or_else(String::new, |memory| format!(" {memory}"));
        match device["kind"] == "gpu" {
            true => {
                told.retain(|it| *it != engine);
                told.push(format!("{engine} ({}{memory})", text("backend")));
            }
            false if told.contains(&engine) => {}
            false => told.push(engine),
        }
    }
    match told.is_empty() {
        true => "?".to_owned(),
        false => told.join(", "),
    }
}

fn rows(nodes: &Value) -> Vec<[String; 7]> {
    let heading = [
        "NAME", "ID", "STATE", "FOUND BY", "MEMORY", "CORES", "ENGINES",
    ];
    let row = |node: &Value| {
        let text = |name: &str| printable(node[name].as_str().unwrap_or_default()).into_owned();
        let memory = node["memory_bytes"].as_u64().unwrap_or(0);
        [
            text("name"),
            text("id").chars().take(8).collect(),
            text("state"),
            // Whether over IPv4 or IPv6 tells a reader of the table nothing.
            text("found_by").trim_end_matches(['4', '6']).to_owned(),
            Bytes(memory).to_string(),
            node["cores"].to_string(),
            engines(&node["devices"]),
        ]
    };
    let nodes = nodes.as_array().into_iter().flatten();
    std::iter::once(heading.map(str::to_owned))
        .chain(nodes.map(row))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_device_that_fails_is_told_below_and_is_no_engine() {
        let told = nodes(
            &json!([{ "name": "mini", "devices": [{ "engine": "cpu", "kind": "cpu" },
            { "engine": "mlx", "kind": "gpu", "problem": "no driver" }], "programs": true }]),
        );
        assert!(told[1].ends_with(" cpu"), "{told:?}");
        assert_eq!(told[2], "mini: mlx cannot be used: no driver");
        assert_eq!(told[3], "programs of users may run on mini");
    }

    #[test]
    fn who_computes_is_told_and_who_stands_in_for_whom() {
        let told = json!([{ "model": "m", "state": "ready", "nodes": ["a", "b", "c"],
            "computing": ["a", "b", "a"], "stand_ins": ["a stands in for c"],
            "reason": "c is not used: it is dead", "epoch": 1, "id": "7" }]);
        let lines = instances(&told);
        assert!(
            lines[1].starts_with("m      degraded  a x2, b "),
            "{lines:?}"
        );
        assert_eq!(lines[2], "m: a stands in for c; c is not used: it is dead");
        let ages = [(5, "5s"), (600, "10m"), (7_200, "2h"), (259_200, "3d")];
        for (seconds, told) in ages {
            assert_eq!(age(1000, 1000 + seconds), told);
        }
    }

    #[test]
    fn numbers_are_named_whole_where_the_line_is_short() {
        let line = |model: &str| {
            let told = json!([{ "model": model, "state": "ready", "nodes": ["a", "b", "c"],
                "numbers": "mlx(metal)x2:0-47+cpu:48-63", "epoch": 1, "id": "12345678" }]);
            instances(&told).remove(1)
        };
        let short = line("smollm2");
        assert!(short.contains(" mlx(metal)x2:0-47+cpu:48-63 "), "{short}");
        let long = line("deepseek-r1-distill-llama");
        assert!(long.contains(" mlx(metal)x2+cpu "), "{long}");
        assert!(long.len() <= COLUMNS, "{long}");
    }

    #[test]
    fn parts_and_space_are_told_by_node() {
        let told = json!({ "nodes": [
            { "node": "mini", "free_bytes": 5_000_000_000_u64, "budget_bytes": null,
              "problem": null, "models": [
                { "name": "qwen", "bytes": 300, "here_bytes": 100, "is_copy": true,
                  "is_loaded": true },
                { "name": "ada", "bytes": 7, "here_bytes": 7 } ] },
            { "node": "old", "models": [], "problem": "it does not answer" } ] });
        let lines = stores(&told);
        assert!(lines[0].starts_with("MODEL"), "{lines:?}");
        assert!(
            lines[1].starts_with("ada ") && lines[1].contains(" all "),
            "{lines:?}"
        );
        assert!(
            lines[2].contains(" 33 % ") && lines[2].ends_with("copy, in use"),
            "{lines:?}"
        );
        assert!(
            lines[3].starts_with("mini: ") && lines[3].ends_with(" free"),
            "{lines:?}"
        );
        assert_eq!(lines[4], "old: it does not answer");
    }
}
