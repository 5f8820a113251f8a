//! `paceline nodes`: the machines of the cluster.

use paceline_base::Bytes;
use serde_json::{Value, json};

use crate::member;
use crate::output::{print, printable, tell};

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
    /// Show a code that lets one machine in, for five minutes and three tries
    Invite,
}

/// Lists nodes, forgets one, or lets one in.
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
    let nodes: Vec<[String; 7]> = rows(&answer["nodes"]);
    let width = |column: usize| nodes.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..7).map(|column| width(column).unwrap_or(0)).collect();
    for row in &nodes {
        let cells = row.iter().zip(&widths);
        let cells: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        print(cells.join("  ").trim_end())?;
    }
    for problem in answer["problems"].as_array().into_iter().flatten() {
        tell(format_args!(
            "warning: {}",
            printable(problem.as_str().unwrap_or_default())
        ));
    }
    Ok(())
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
