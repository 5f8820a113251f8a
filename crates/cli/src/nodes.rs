//! `paceline nodes`: the machines of the cluster.

use paceline_base::Bytes;
use serde_json::{Value, json};

use crate::member;
use crate::output::{print, printable, tell};

/// Ways between nodes that are listed at most: those of four nodes with two interfaces.
const WAYS_MAX: usize = 24;

/// Arguments of `paceline nodes`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Things to do with nodes.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Forget a dead node
    Rm {
        /// Its name, its id, or the first digits of its id
        node: String,
    },
    /// Cut a machine off for good: the others end their sessions with it and let it in no more
    Revoke {
        /// Its name, its id, or the first digits of its id
        node: String,
    },
    /// Show a code that lets one machine in, for five minutes and three tries
    Invite,
}

/// Lists nodes, forgets one or cuts it off, or lets one in.
///
/// # Errors
/// What the node says, or that it does not run.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.command {
        Some(Command::Rm { node }) => {
            member::ask("forget", json!({ "node": node }))?;
            tell(format_args!("forgot {}", printable(node)));
            Ok(())
        }
        Some(Command::Revoke { node }) => {
            member::ask("revoke", json!({ "node": node }))?;
            let node = printable(node);
            tell(format_args!(
                "revoked {node}; the cluster has a new token: paceline key cluster show"
            ));
            Ok(())
        }
        Some(Command::Invite) => invite(),
        None => list(args.json),
    }
}

fn invite() -> anyhow::Result<()> {
    let answer = member::ask("invite", json!({}))?;
    let code = answer["code"].as_str().unwrap_or_default();
    print(code)?;
    tell(format_args!(
        "type on the other machine within five minutes: paceline join {code}"
    ));
    Ok(())
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let answer = member::ask("nodes", json!({}))?;
    if as_json {
        return print(&answer["nodes"].to_string());
    }
    for line in aligned(&rows(&answer["nodes"])) {
        print(&line)?;
    }
    for line in ways(&answer["nodes"]) {
        print(&line)?;
    }
    for problem in answer["problems"].as_array().into_iter().flatten() {
        tell(format_args!(
            "warning: {}",
            printable(problem.as_str().unwrap_or_default())
        ));
    }
    Ok(())
}

/// Rows as lines with columns of one width.
pub(crate) fn aligned<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths);
        let cells: Vec<String> = cells.map(|(cell, n)| format!("{cell:n$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// The measured ways of every pair below a heading; only those of this machine, which is the first,
/// where there are many. None without another machine.
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

/// A heading, and a line for each node.
fn rows(nodes: &Value) -> Vec<[String; 7]> {
    let heading = [
        "NAME", "ID", "STATE", "FOUND BY", "MEMORY", "CORES", "CLASS",
    ];
    let row = |node: &Value| {
        let text = |name: &str| printable(node[name].as_str().unwrap_or_default()).into_owned();
        let memory = node["memory_bytes"].as_u64().unwrap_or(0);
        [
            text("name"),
            text("id").chars().take(8).collect(),
            text("state"),
            text("found_by"),
            Bytes(memory).to_string(),
            node["cores"].to_string(),
            text("kernel_class"),
        ]
    };
    let nodes = nodes.as_array().into_iter().flatten();
    std::iter::once(heading.map(str::to_owned))
        .chain(nodes.map(row))
        .collect()
}
