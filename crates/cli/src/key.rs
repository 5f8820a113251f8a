//! `paceline key`: keys of the HTTP API and of the cluster.

use std::time::SystemTime;

use paceline_serve::keys::{KeyInfo, Keys, Role};
use serde_json::json;

use crate::output::{print, tell};
use crate::{home, join};

/// What to do with keys.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Keys that clients of `paceline up` must give; with the first one, they are asked for
    #[command(subcommand)]
    Api(Api),
    /// The key of this machine's cluster, which lets other machines in
    #[command(subcommand)]
    Cluster(Cluster),
}

/// What to do with the cluster's key.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Cluster {
    /// Print the token for `paceline join --token-file`; it counts until the key is changed
    Show,
}

/// What to do with API keys.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Api {
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
    /// Take a key away; a running server notices at once
    Revoke {
        /// Its id, from `paceline key api list`
        id: String,
    },
}

/// A key as a line; the role is shown only for admins.
fn line(key: &KeyInfo) -> String {
    let role = match key.role {
        Role::Admin => "  (admin)",
        Role::User => "",
    };
    format!("{}  {}{role}", key.id, key.name)
}

/// Makes, lists or revokes keys.
///
/// # Errors
/// An unusable key file, or an invalid name.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    let command = match command {
        Command::Api(command) => command,
        Command::Cluster(Cluster::Show) => return join::show_token(),
    };
    let mut keys = Keys::open(&home::api_keys()?)?;
    match command {
        Api::New { name, admin } => {
            let role = if *admin { Role::Admin } else { Role::User };
            let now = SystemTime::UNIX_EPOCH.elapsed();
            let now = now.map_or(0, |since| since.as_secs());
            let (key, info) = keys.make(name, role, now)?;
            tell(format_args!(
                "key {} for {name}; it is shown only now:",
                info.id
            ));
            print(&key)
        }
        Api::List { json: true } => {
            let keys: Vec<&KeyInfo> = keys.list().collect();
            print(&json!({ "keys": keys }).to_string())
        }
        Api::List { json: false } => keys.list().try_for_each(|key| print(&line(key))),
        Api::Revoke { id } => {
            let key = keys.revoke(id)?;
            tell(format_args!("revoked {} ({})", key.id, key.name));
            Ok(())
        }
    }
}
