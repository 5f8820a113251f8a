//! Draws latencies.

use paceline_base::Bytes;
use paceline_plan::draw::{Axis, LineChart, Scale, Series, short};

use super::Report;

/// Operations in the chart: those on the critical path of a model's step, and a message.
const DRAWN: [&str; 3] = ["all_reduce", "all_gather", "send_recv"];

/// Latency over size by operation; the cost model of a message and other libraries are dashed.
pub(super) fn svg(report: &Report) -> String {
    let line = |name: &str, points: Vec<(f64, f64)>, dashed| Series {
        name: name.to_owned(),
        points,
        dashed,
    };
    let of = |op: &str| {
        let rows = report
            .rows
            .iter()
            .filter(|row| row.op == op && row.bytes > 0);
        rows.map(|row| (row.bytes as f64, row.p50_us))
            .collect::<Vec<_>>()
    };
    let mut series: Vec<Series> = DRAWN
        .into_iter()
        .map(|op| line(op, of(op), false))
        .collect();
    let said = |(bytes, _): (f64, f64)| (bytes, report.alpha_us + report.beta_ns * bytes / 1e3);
    let model: Vec<_> = of("send_recv").into_iter().map(said).collect();
    series.push(line("send_recv, cost model", model, true));
    let mut peers: Vec<&String> = report.peer.iter().map(|rival| &rival.peer).collect();
    peers.dedup();
    for peer in peers {
        let rows = report.peer.iter().filter(|rival| rival.peer == *peer);
        let points = rows
            .map(|rival| (rival.bytes as f64, rival.p50_us))
            .collect();
        series.push(line(&format!("all_reduce, {peer}"), points, true));
    }
    series.retain(|series| !series.points.is_empty());
    let lines = LineChart {
        title: format!(
            "{} ranks over {}: median latency",
            report.ranks, report.transport
        ),
        x: Axis {
            label: "bytes of a rank",
            scale: Scale::Log,
            format: |bytes| Bytes(bytes as u64).to_string(),
        },
        y: Axis {
            label: "microseconds",
            scale: Scale::Log,
            format: short,
        },
        series,
    };
    lines.svg()
}
