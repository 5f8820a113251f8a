//! The loss curve as a picture.

use std::fmt::Write;

use crate::metrics::Measured;

/// Sizes in pixels.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 24.0;

/// The losses of a run over its steps as a chart: training and held out. A training loss is
/// computed before its step's update, so the held-out loss before the first step is at the first
/// step too.
pub fn svg(steps: &[Measured]) -> String {
    let held_out = steps.iter().flat_map(|m| {
        let losses = [m.val_loss_before, m.val_loss];
        losses.into_iter().flatten().map(|loss| (m.step, loss))
    });
    let trained: Vec<(u64, f64)> = steps.iter().map(|m| (m.step, m.loss)).collect();
    let held_out: Vec<(u64, f64)> = held_out.collect();
    let all = || trained.iter().chain(&held_out).map(|(_, loss)| *loss);
    let (low, high) = (
        all().fold(f64::INFINITY, f64::min),
        all().fold(0.0, f64::max),
    );
    let (low, high) = if low < high {
        (low, high)
    } else {
        (low - 0.5, low + 0.5)
    };
    let last = trained.last().map_or(1, |(step, _)| *step).max(2);
    let x = |step: u64| LEFT + (WIDTH - LEFT - 16.0) * (step - 1) as f64 / (last - 1) as f64;
    let y = |loss: f64| TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low);
    let line = |points: &[(u64, f64)]| {
        let point = |(step, loss): &(u64, f64)| format!("{:.1},{:.1}", x(*step), y(*loss));
        points.iter().map(point).collect::<Vec<_>>().join(" ")
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for i in 0..=4 {
        let loss = low + (high - low) * f64::from(i) / 4.0;
        let (at, right) = (y(loss), WIDTH - 16.0);
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{loss:.2}</text>",
            LEFT - 6.0,
            at + 4.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{:.1}\">step 1</text>\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">step {last}</text>",
        HEIGHT - 16.0,
        WIDTH - 16.0,
        HEIGHT - 16.0
    );
    for (points, colour, name, at) in [
        (&trained, "#1f77b4", "training", 0.0),
        (&held_out, "#d62728", "held out", 80.0),
    ] {
        if points.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>\
             <text x=\"{:.1}\" y=\"16\" fill=\"{colour}\">{name}</text>",
            line(points),
            LEFT + at
        );
    }
    out.push_str("</svg>\n");
    out
}
