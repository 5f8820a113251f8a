//! `paceline nodes`: the machines of the cluster.

use paceline_board::tables;
use serde_json::{Value, json};

use crate::member;
use crate::output::{print, print_err};

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
    /// Let workers use an RDMA cable of this machine, which is not encrypted, or list the cables;
    /// its other machine must trust it too
    Trust {
        /// The cable: a device of this machine and the other machine, such as rdma_en5:mini
        #[arg(value_name = "DEVICE:NODE")]
        link: Option<String>,
        /// Trust it no longer: what is loaded from now on uses encrypted TCP
        #[arg(long, requires = "link")]
        remove: bool,
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
}

/// Lists, removes, revokes or invites nodes, and trusts cables.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.command {
        Some(Command::Rm { node }) => {
            member::ask("forget", json!({ "node": node }))?;
            print_err(format_args!("forgot {node}"));
            Ok(())
        }
        Some(Command::Revoke { node }) => {
            let told = member::ask("revoke", json!({ "node": node }))?;
            revocation(node, &told).iter().for_each(print_err);
            Ok(())
        }
        Some(Command::Invite) => invite(),
        Some(Command::Trust { link, remove, json }) => trust(link.as_deref(), *remove, *json),
        None => list(args.json),
    }
}

/// Lines on a revocation: its effects, and what to look at.
fn revocation(node: &str, told: &Value) -> Vec<String> {
    let names = |field: &str| {
        let all = told[field].as_array().into_iter().flatten();
        let names: Vec<&str> = all.filter_map(Value::as_str).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let mut lines = vec![match told["needs_second"] == true {
        false => format!("revoked {node}; the cluster has a new token: paceline key cluster show"),
        true => format!(
            "revoked {node} for this machine alone, which has revoked another one lately. For the \
             others type on a second machine: paceline nodes revoke {node}"
        ),
    }];
    if let Some(keys) = names("keys") {
        lines.push(format!(
            "API keys written since it joined: {keys}; see paceline key api list, and take unknown \
             ones away: paceline key api revoke ID"
        ));
    }
    if let Some(nodes) = names("nodes") {
        lines.push(format!(
            "machines that came after it: {nodes}; revoke unknown ones"
        ));
    }
    lines
}

/// Trusts an RDMA cable, or no longer, if one is named; else lists the cables.
fn trust(link: Option<&str>, remove: bool, as_json: bool) -> anyhow::Result<()> {
    let answer = match link {
        Some(link) => member::ask("trust", json!({ "link": link, "remove": remove }))?,
        None => member::ask("cables", json!({}))?,
    };
    if as_json {
        return print(&answer["cables"].to_string());
    }
    for line in tables::cables(&answer["cables"]) {
        print(&line)?;
    }
    if link.is_some() {
        print_err("models that are loaded from now on use what both machines trust");
    }
    Ok(())
}

/// Prints this machine's RDMA devices, for its node.
pub(crate) fn rdma() -> anyhow::Result<()> {
    print(&serde_json::to_string(&paceline_board::rdma::devices()?)?)
}

fn invite() -> anyhow::Result<()> {
    let answer = member::ask("invite", json!({}))?;
    let code = answer["code"].as_str().unwrap_or_default();
    print(code)?;
    print_err(format_args!(
        "type on the other machine within five minutes: paceline join {code}"
    ));
    Ok(())
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let answer = member::ask("nodes", json!({}))?;
    if as_json {
        return print(&answer["nodes"].to_string());
    }
    for line in tables::nodes(&answer["nodes"]) {
        print(&line)?;
    }
    for problem in answer["problems"].as_array().into_iter().flatten() {
        let problem = problem.as_str().unwrap_or_default();
        print_err(format_args!("warning: {problem}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revocation_says_what_is_left_to_do() {
        let told = json!({ "needs_second": false, "keys": [], "nodes": [] });
        let lines = revocation("mini", &told);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains("new token"), "{lines:?}");
        let told = json!({ "needs_second": true, "keys": ["k1", "k2"], "nodes": ["late"] });
        let lines = revocation("mini", &told).join("\n");
        for part in [
            "second machine: paceline nodes revoke mini",
            "k1, k2",
            "late",
        ] {
            assert!(lines.contains(part), "{lines}");
        }
    }
}
