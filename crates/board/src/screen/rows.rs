//! Rows of the tables: what each column says of a node, an instance, a link or a request.

use paceline_base::printable;
use serde_json::Value;

use super::memory_share;
use crate::tables;

pub(super) fn text(value: &Value) -> String {
    printable(value.as_str().unwrap_or("-")).into_owned()
}

/// A number with its unit, or a dash if missing.
pub(super) fn number(value: &Value, write: impl Fn(f64) -> String) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), write)
}

/// Bytes with three digits at most and a unit: seven characters below a PiB.
pub(super) fn short(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes.max(0.0), 0);
    // From 999.5 on it would round to four digits.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let digits = usize::from(unit > 0 && value < 9.95);
    format!("{value:.digits$} {}", UNITS[unit])
}

pub(super) fn node(node: &Value) -> [String; 9] {
    let t = &node["telemetry"];
    let all = t["memory_bytes"].as_f64().unwrap_or(0.0);
    let memory = memory_share(node).map_or_else(
        || "-".to_owned(),
        |share| format!("{:.0} % of {}", share * 100.0, short(all)),
    );
    let traffic = |name: &str| {
        let networks = t["networks"].as_array();
        networks.map_or_else(
            || "-".to_owned(),
            |all| {
                short(
                    all.iter()
                        .filter_map(|network| network[name].as_f64())
                        .sum(),
                )
            },
        )
    };
    [
        text(&node["name"]),
        text(&node["state"]),
        number(&t["cpu_busy"], |busy| format!("{:.0} %", busy * 100.0)),
        number(&t["cpu_mhz"], |mhz| format!("{:.1}", mhz / 1000.0)),
        memory,
        number(&t["temperature_c"], |c| format!("{c:.0} C")),
        number(&t["package_watts"], |watts| format!("{watts:.0} W")),
        traffic("received_bytes_s"),
        traffic("sent_bytes_s"),
    ]
}

pub(super) fn instance(it: &Value) -> [String; 5] {
    let portrait = &it["portrait"];
    let state = match (it["progress"][0].as_u64(), it["progress"][1].as_u64()) {
        (Some(done), Some(of)) if of > 0 && it["state"] != "ready" => {
            format!("{} {} %", text(&it["state"]), done.min(of) * 100 / of)
        }
        _ => text(&it["state"]),
    };
    let speed = number(&portrait["measured_tok_s"], |v| format!("{v:.1}"));
    let predicted = number(&portrait["predicted_tok_s"], |v| format!("{v:.1}"));
    let split = portrait["split"].as_str().or(it["split"].as_str());
    let place = match it["reason"].as_str() {
        Some(reason) => printable(reason).into_owned(),
        None => tables::counted(it),
    };
    let split = printable(split.unwrap_or("-")).into_owned();
    [
        text(&it["model"]),
        state,
        split,
        format!("{speed} ({predicted})"),
        place,
    ]
}

/// A measured link. `MODELS` is the traffic of model workers. `SENDS` is all traffic of its
/// interface, on a wide terminal with its share of the bandwidth.
pub(super) fn link(it: &Value, is_wide: bool) -> [String; 7] {
    let load = it["sent_bytes_s"].as_f64().zip(it["bytes_per_s"].as_f64());
    let load = load.filter(|(_, most)| is_wide && *most > 0.0);
    let load = load.map_or_else(String::new, |(sent, most)| {
        format!(" ({:.0} %)", 100.0 * sent / most)
    });
    let sent = |name: &str| number(&it[name], |sent| format!("{}/s", short(sent)));
    [
        text(&it["from"]),
        text(&it["to"]),
        text(&it["interface"]),
        number(&it["latency_s"], |s| format!("{:.2} ms", s * 1e3)),
        number(&it["bytes_per_s"], |rate| format!("{:.0} MB/s", rate / 1e6)),
        sent("model_bytes_s"),
        sent("sent_bytes_s") + &load,
    ]
}

pub(super) fn request(it: &Value) -> [String; 7] {
    [
        it["request"].to_string(),
        text(&it["model"]),
        it["prompt_tokens"].to_string(),
        it["tokens"].to_string(),
        number(&it["tok_s"], |v| format!("{v:.1}")),
        match it["ttft_s"].as_f64() {
            Some(seconds) => format!("{seconds:.2} s"),
            None => number(&it["age_s"], |age| format!("({age:.0} s)")),
        },
        it["node"]
            .as_str()
            .map_or_else(|| "here".to_owned(), |node| printable(node).into_owned()),
    ]
}
