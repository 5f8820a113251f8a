//! `paceline key`: keys of the HTTP API and of the cluster.

use std::time::SystemTime;

use paceline_auth::keys::{KeyInfo, KeyRole, Keys};
use serde_json::{Value, json};

use crate::output::{print, print_err};
use crate::{home, join, member};

/// What to do with keys.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Keys that clients of `paceline up` must give; with the first one, they are asked for
    #[command(subcommand)]
    Api(ApiKeyCommand),
    /// The key of this machine's cluster, which lets other machines in
    #[command(subcommand)]
    Cluster(ClusterKeyCommand),
}

/// What to do with the cluster's key.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ClusterKeyCommand {
    /// Print the token for `paceline join --token-file`; it counts until the key is changed
    Show,
}

/// What to do with API keys.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ApiKeyCommand {
    /// Make a key and print it; it is kept as a hash only and cannot be shown again
    New {
        /// What it is for
        name: String,
        /// Let its holder load and unload models, remove them, and let machines in, too
        #[arg(long)]
        admin: bool,
    },
    /// List the keys, without the keys themselves
    List {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Let an admin's key that another machine made act as one on this machine, too
    Allow {
        /// Its id, from `paceline key api list` of the machine that made it
        id: String,
    },
    /// Take a key away; a running server notices at once
    Revoke {
        /// Its id, from `paceline key api list`
        id: String,
    },
}

/// A key as a line; the role is shown only for admins.
fn line(key: &KeyInfo) -> String {
    let role = match key.role {
        KeyRole::Admin => "  (admin)",
        KeyRole::User => "",
    };
    format!("{}  {}{role}", key.id, key.name)
}

/// The warning that a first key locks out clients of all machines, which `nodes` lists.
fn first_key_warning(nodes: &Value) -> String {
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Vec<&str> = nodes.iter().filter_map(|it| it["name"].as_str()).collect();
    let machines = match names.as_slice() {
        [] | [_] => "this machine, and any other of its cluster,".to_owned(),
        names => names.join(", "),
    };
    format!(
        "warning: this is the first key: from their next start on, {machines} answer no client \
         without one, not even on the machine itself"
    )
}

/// Makes, lists or revokes keys.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    let command = match command {
        Command::Api(command) => command,
        Command::Cluster(ClusterKeyCommand::Show) => return join::show_token(),
    };
    let mut keys = Keys::open(&home::api_keys()?)?;
    match command {
        ApiKeyCommand::New { name, admin } => {
            let role = if *admin {
                KeyRole::Admin
            } else {
                KeyRole::User
            };
            let now = SystemTime::UNIX_EPOCH.elapsed();
            let now = now.map_or(0, |since| since.as_secs());
            if keys.list().next().is_none() {
                let told = member::ask_if_up("nodes", json!({})).ok().flatten();
                print_err(first_key_warning(&told.unwrap_or_default()["nodes"]));
            }
            let (key, info) = keys.make(name, role, now)?;
            print_err(format_args!(
                "key {} for {name}; it is shown only now:",
                info.id
            ));
            print(&key)
        }
        ApiKeyCommand::List { json: true } => {
            let keys: Vec<&KeyInfo> = keys.list().collect();
            print(&json!({ "keys": keys }).to_string())
        }
        ApiKeyCommand::List { json: false } => keys.list().try_for_each(|key| print(&line(key))),
        ApiKeyCommand::Allow { id } => {
            let key = keys.allow_admin(id)?;
            print_err(format_args!(
                "{} ({}) is an admin's key on this machine",
                key.id, key.name
            ));
            Ok(())
        }
        ApiKeyCommand::Revoke { id } => {
            let key = keys.revoke(id)?;
            print_err(format_args!("revoked {} ({})", key.id, key.name));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_key_names_the_machines_that_it_locks() {
        let two = json!([{ "name": "mini" }, { "name": "studio" }]);
        let told = first_key_warning(&two);
        assert!(
            told.contains("next start on, mini, studio answer no client without"),
            "{told}"
        );
        let alone = first_key_warning(&Value::Null);
        assert!(alone.contains("this machine, and any other"), "{alone}");
    }
}
