//! `paceline doctor`: checks this machine, with remedies.

use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use paceline_board::doctor::{DoctorInput, HealthCheck, checks, line, of_finding, text};
use paceline_board::engines::mlx;
use paceline_cluster::nodes::agent::{Agent, Finding, local};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::output::print;
use crate::terminal::fitted;
use crate::{home, member};

/// Read timeout of a node's tests: each takes a few seconds.
const SILENCE: Duration = Duration::from_secs(30);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Test what keeps this machine and HOST (or HOST:PORT) apart, in both directions: ports,
    /// multicast, packet size, clocks
    #[arg(long, value_name = "HOST", value_parser = NonEmptyStringValueParser::new())]
    peer: Option<String>,
}

/// Runs and prints all checks. A failed check is no error.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(host) = &args.peer {
        return examine(host, args.json);
    }
    let checks = own_checks()?;
    if args.json {
        return print(&json!({ "checks": checks }).to_string());
    }
    print(&fitted(&text(&checks)))
}

pub(crate) fn own_checks() -> anyhow::Result<Vec<HealthCheck>> {
    Ok(checks(DoctorInput {
        folder: &home::folder()?,
        models: &home::home()?.models_dir(),
        mlx: &mlx(&home::mlx_places()?),
        path: std::env::var_os("PATH").as_deref(),
        is_up: member::ask_if_up("nodes", json!({})).is_ok_and(|told| told.is_some()),
    }))
}

/// Tests the connection to `host` and prints each finding at once. A finding is no error.
fn examine(host: &str, as_json: bool) -> anyhow::Result<()> {
    let mut checks = Vec::new();
    let mut told = |finding: &Finding| {
        let check = of_finding(finding, host);
        if !as_json {
            // A closed stdout is reported at the end.
            let _ = print(&fitted(&line(&check)));
        }
        checks.push(check);
    };
    let home = home::folder()?;
    let asked = local::ask(
        &home,
        "examine",
        json!({ "peer": host }),
        SILENCE,
        |value| {
            if let Ok(finding) = Finding::deserialize(&value) {
                told(&finding);
            }
        },
    );
    match asked {
        Err(local::Error::NotUp) => {
            let agent = Agent::start(member::at_rest()?)?;
            agent.examine(host, |finding| told(&finding));
            agent.stop();
        }
        asked => drop::<Value>(asked?),
    }
    match as_json {
        true => print(&json!({ "peer": host, "checks": checks }).to_string()),
        false => Ok(()),
    }
}
