//! A run's report as a table and as JSON.

use serde_json::{Value, json};

use super::{Arrivals, LatencySummary, LoadProfile, PredictedSpeed, Report};

/// The predicted total speed of a closed loop; `None` for Poisson arrivals.
fn together(load: &LoadProfile, predicted: &PredictedSpeed) -> Option<f64> {
    let Arrivals::Closed { clients } = load.arrivals else {
        return None;
    };
    predicted.tok_s(u32::try_from(clients).ok()?)
}

/// The report as a JSON object.
pub fn object(load: &LoadProfile, predicted: &PredictedSpeed, report: &Report) -> Value {
    let (clients, rate) = match load.arrivals {
        Arrivals::Closed { clients } => (Some(clients), None),
        Arrivals::Poisson { per_s } => (None, Some(per_s)),
    };
    json!({
        "url": load.server.url(),
        "model": load.server.model(),
        "clients": clients,
        "rate_per_s": rate,
        "seed": load.seed,
        "predicted_decode_tok_s": predicted.tok_s(1),
        "predicted_output_tok_s": together(load, predicted),
        "report": report,
    })
}

pub fn table(load: &LoadProfile, predicted: &PredictedSpeed, report: &Report) -> String {
    let arrivals = match load.arrivals {
        Arrivals::Closed { clients } => format!("{clients} clients in a closed loop"),
        Arrivals::Poisson { per_s } => format!("Poisson arrivals, {per_s} a second"),
    };
    let mut text = format!(
        "{} at {}, {arrivals}\n{} of {} requests answered in {:.1} s\n\
         prompts   {:>9} tokens, {} of them cached\n\
         answers   {:>9} tokens, {:.1} tokens/s, {:.2} answers/s\n\
         goodput   {:>9} answers, {:.2} answers/s",
        load.server.model(),
        load.server.url(),
        report.answered,
        report.requests,
        report.duration_s,
        report.prompt_tokens,
        report.cached_tokens,
        report.output_tokens,
        report.output_tok_s,
        report.answers_per_s,
        report.good,
        report.goodput_per_s,
    );
    if let Some(tok_s) = predicted.tok_s(1) {
        text += &format!("\npredicted {tok_s:>9.1} tokens/s of an answer alone");
    }
    if let Some(tok_s) = together(load, predicted) {
        text += &format!("\n          {tok_s:>9.1} tokens/s of all clients while they decode");
    }
    text += &format!(
        "\n\n{:<22}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "ms", "mean", "p50", "p95", "p99", "max"
    );
    for (name, times) in [
        ("to the first token", report.ttft_ms),
        ("between two tokens", report.gap_ms),
        ("to the end", report.whole_ms),
    ] {
        text += &row(name, times);
    }
    let errors = report.errors.iter();
    errors.fold(text, |text, (error, n)| {
        text + &format!("\n{n} failed: {error}")
    })
}

fn row(name: &str, times: Option<LatencySummary>) -> String {
    let Some(times) = times else {
        return format!("\n{name:<22}{:>9}", "-");
    };
    let all = [times.mean, times.p50, times.p95, times.p99, times.max];
    all.iter().fold(format!("\n{name:<22}"), |text, ms| {
        text + &format!("{ms:>9.1}")
    })
}
