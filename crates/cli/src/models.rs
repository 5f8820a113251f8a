//! `paceline models` and `paceline rm`.

use std::time::SystemTime;

use anyhow::Context;
use paceline_base::Bytes;
use paceline_board::model_users;
use paceline_store::{StoreListing, list as entries};
use serde_json::json;

use crate::error::failed;
use crate::output::{print, print_err};
use crate::{families, fits, home, member, stores};

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Also show the catalogue's models that are not here yet
    #[arg(long)]
    all: bool,
    /// Show which models fit this machine, how fast they will be and how they would be split
    #[arg(long, conflicts_with = "all")]
    fits: bool,
    /// The same for a cluster: a TOML file, or `4 x KIND @ LINK`
    #[arg(long, value_name = "FILE|NODES", requires = "fits")]
    cluster: Option<String>,
    /// Show which machine of the cluster has which models, and how much of them
    #[arg(long, conflicts_with_all = ["all", "fits"])]
    nodes: bool,
    /// Show what is supported for each model family
    #[arg(long, conflicts_with_all = ["all", "fits", "nodes"])]
    families: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RmArgs {
    /// A name that `paceline models` shows
    model: String,
    /// On these machines of the cluster, by their names, instead of this one; copies of it too
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    node: Vec<String>,
    /// On all machines of the cluster that live
    #[arg(long, conflicts_with = "node")]
    everywhere: bool,
    /// Remove it although it is loaded: it answers until it is unloaded, and the next start fetches
    /// it again
    #[arg(long, conflicts_with_all = ["node", "everywhere"])]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists the store's models.
pub(crate) fn list(args: &ListArgs) -> anyhow::Result<()> {
    if args.families {
        return families::run(args.json);
    }
    if args.nodes {
        return stores::list(args.json);
    }
    if args.fits {
        return fits::run(args.cluster.as_deref(), args.json);
    }
    let home = home::home()?;
    let stored = entries(&home)?;
    let listing = match args.all {
        true => StoreListing::with_catalogue(stored),
        false => StoreListing::of(stored),
    };
    if args.json {
        return print(&listing.json(&home).to_string());
    }
    if listing.is_empty() {
        print_err(format_args!("no models in {}", home.models_dir().display()));
        print_err("hint: `paceline models --all` shows what can be pulled by a short name");
        return Ok(());
    }
    print(&listing.text(SystemTime::now()))
}

pub(crate) fn remove(args: &RmArgs) -> anyhow::Result<()> {
    if args.everywhere || !args.node.is_empty() {
        return stores::remove(&args.model, &args.node, args.json);
    }
    let home = home::home()?;
    if !args.force
        && let Some(instances) = member::ask_if_up("ps", json!({})).ok().flatten()
    {
        let (model, users) = (&args.model, model_users(&home, &args.model, &instances));
        if !users.is_empty() {
            let text = format!("{model} is loaded: {}", users.join("; "));
            let hint = format!(
                "`paceline unload {model}` comes first; --force removes its files all the same"
            );
            return Err(failed(text, hint).into());
        }
    }
    let mut removed = paceline_store::remove(&home, &args.model)?;
    let folder = home::packed()?;
    let packed = paceline_model::remove_packed_orphans(&folder);
    let packed = packed.with_context(|| format!("cannot remove packed weights in {folder:?}"))?;
    removed.bytes = Bytes(removed.bytes.0 + packed.0);
    let name = removed.name.as_str();
    if args.json {
        let (bytes, files) = (removed.bytes.0, removed.files);
        let object = json!({ "name": name, "freed_bytes": bytes, "file_count": files });
        return print(&object.to_string());
    }
    let several = removed.files.filter(|files| *files > 1);
    let files = several.map_or(String::new(), |files| format!(" ({files} files)"));
    print(&format!("removed {name}{files}, freed {}", removed.bytes))
}
