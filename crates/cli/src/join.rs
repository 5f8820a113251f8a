//! `paceline join` and `paceline leave`: cluster membership of this machine.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use paceline_cluster::nodes::ClusterKey;
use paceline_cluster::nodes::agent::local;
use paceline_cluster::nodes::agent::{Joined, join_at_rest, join_by_code_at_rest, token_at_rest};
use paceline_cluster::nodes::pairing::Code;
use serde_json::json;

use crate::error::failed;
use crate::output::{print, print_err};
use crate::{home, member};

/// Maximum token file: a token has 78 characters.
const TOKEN_BYTES_MAX: u64 = 1024;

const EXAMPLES: &str = "\
Examples:
  paceline nodes invite                          on a machine of the cluster: shows a code
  paceline join 123-456                          on this machine
  paceline key cluster show | ssh host paceline join --token-file -";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Code that `paceline nodes invite` shows on a machine of the cluster
    #[arg(value_name = "CODE", required_unless_present = "token_file")]
    code: Option<String>,
    /// File with the token that `paceline key cluster show` prints; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "code")]
    token_file: Option<PathBuf>,
    /// Machine that shows the code, HOST or HOST:PORT, where multicast does not reach it
    #[arg(long, value_name = "HOST", conflicts_with = "token_file")]
    peer: Option<String>,
}

/// Moves this machine into another cluster, with or without a running node.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let peer = args.peer.as_deref();
    let joined = match (&args.code, &args.token_file) {
        (Some(code), _) => {
            let parsed = Code::parse(code)?;
            let arguments = json!({ "code": code, "peer": peer });
            match member::ask_if_up("join", arguments).map_err(not_paired)? {
                Some(answer) => serde_json::from_value(answer)?,
                None => join_by_code_at_rest(&home::folder()?, &parsed, peer)?,
            }
        }
        (None, file) => {
            let token = read(file.as_deref().unwrap_or(Path::new("-")))?;
            let key = ClusterKey::from_token(&token)?;
            match member::ask_if_up("join", json!({ "token": *key.token() }))? {
                Some(answer) => serde_json::from_value(answer)?,
                None => join_at_rest(&home::folder()?, &key)?,
            }
        }
    };
    report(&joined);
    Ok(())
}

/// The error of a running node, which has no type.
fn not_paired(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(local::Error::Refused(reason)) if reason.contains("code") => failed(
            reason,
            "a code counts once: `paceline nodes invite` shows a new one; --peer HOST finds its \
             machine where multicast does not",
        )
        .into(),
        _ => error,
    }
}

fn read(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let taken = match file == Path::new("-") {
        true => std::io::stdin()
            .take(TOKEN_BYTES_MAX)
            .read_to_string(&mut text),
        false => {
            File::open(file).and_then(|file| file.take(TOKEN_BYTES_MAX).read_to_string(&mut text))
        }
    };
    taken.with_context(|| format!("cannot read the token from {}", file.display()))?;
    Ok(text)
}

fn report(joined: &Joined) {
    let cluster = &joined.cluster;
    match joined.already {
        true => print_err(format_args!("this machine is in cluster {cluster} already")),
        false => print_err(format_args!("this machine is in cluster {cluster} now")),
    }
    if !joined.met.is_empty() {
        let met = joined.met.join(", ");
        print_err(format_args!("it has met {met}"));
    }
    for problem in &joined.problems {
        print_err(format_args!("warning: {problem}"));
    }
}

/// Removes this machine from its cluster permanently.
pub(crate) fn leave() -> anyhow::Result<()> {
    print_err("moving what this machine computes to the others");
    member::ask("move", json!({}))?;
    member::ask("leave", json!({}))?;
    print_err("this machine left its cluster and is alone now");
    Ok(())
}

/// Prints the token of this machine's cluster.
pub(crate) fn show_token() -> anyhow::Result<()> {
    let answer = member::ask_if_up("token", json!({}))?;
    match answer.as_ref().and_then(|answer| answer["token"].as_str()) {
        Some(token) => print(token),
        None => print(&token_at_rest(&home::folder()?)?),
    }
}
