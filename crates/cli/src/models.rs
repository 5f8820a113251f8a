//! `paceline models` and `paceline rm`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paceline_store::{
    Catalogue, Entry, Kind, Model, State, UsualName, list as entries, quant_of_name, usual_names,
};
use serde_json::{Value, json};

use crate::output::{print, tell};
use crate::{fits, home, stores};

/// Arguments of `paceline models`.
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
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `paceline rm`.
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
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists what the store holds.
pub(crate) fn list(args: &ListArgs) -> anyhow::Result<()> {
    if args.nodes {
        return stores::list(args.json);
    }
    if args.fits {
        return fits::run(args.cluster.as_deref(), args.json);
    }
    let home = home::home()?;
    let stored = entries(&home)?;
    let missing: Vec<&Model> = Catalogue::BUILTIN
        .iter()
        .filter(|model| args.all && !stored.iter().any(|e| e.name.as_str() == model.alias))
        .collect();
    if args.json {
        let models: Vec<Value> = stored.iter().map(entry_json).collect();
        let mut object = json!({ "home": home.root().to_string_lossy(), "models": models });
        if args.all {
            object["available"] = missing.iter().map(|model| model_json(model)).collect();
            object["usual_names"] = usual_names().iter().map(usual_json).collect();
        }
        return print(&object.to_string());
    }
    if stored.is_empty() && missing.is_empty() {
        tell(format_args!("no models in {}", home.models_dir().display()));
        tell("hint: `paceline models --all` shows what can be pulled by a short name");
        return Ok(());
    }
    let now = SystemTime::now();
    let mut rows = vec![["NAME", "TYPE", "SIZE", "LAST USED", "PATH"].map(str::to_owned)];
    rows.extend(stored.iter().map(|entry| entry_row(entry, now)));
    rows.extend(missing.iter().map(|model| model_row(model)));
    let usual = usual_names().iter().filter(|_| args.all);
    rows.extend(usual.map(usual_row));
    print(&table(&rows))
}

/// Removes a model.
pub(crate) fn remove(args: &RmArgs) -> anyhow::Result<()> {
    if args.everywhere || !args.node.is_empty() {
        return stores::remove(&args.model, &args.node, args.json);
    }
    let removed = paceline_store::remove(&home::home()?, &args.model)?;
    let name = removed.name.as_str();
    if args.json {
        return print(&json!({ "name": name, "freed_bytes": removed.bytes.0 }).to_string());
    }
    print(&format!("removed {name}, freed {}", removed.bytes))
}

fn entry_row(entry: &Entry, now: SystemTime) -> [String; 5] {
    let (kind, used) = match &entry.state {
        State::Complete {
            kind,
            files,
            last_used,
            ..
        } => {
            let used = last_used.map_or_else(|| "never".to_owned(), |time| ago(time, now));
            (type_name(*kind, &files[0].path), used)
        }
        State::Partial => ("partial".to_owned(), "-".to_owned()),
        State::Damaged { .. } => ("damaged".to_owned(), "-".to_owned()),
    };
    let path = entry.path.display().to_string();
    [
        entry.name.to_string(),
        kind,
        entry.file_bytes().to_string(),
        used,
        path,
    ]
}

fn model_row(model: &Model) -> [String; 5] {
    let kind = type_name(Kind::Gguf, model.file);
    [
        model.alias.to_owned(),
        kind,
        model.bytes.to_string(),
        "not pulled".into(),
        "-".into(),
    ]
}

/// A usual name: what it means stands where other rows have their path.
fn usual_row(usual: &UsualName) -> [String; 5] {
    let (size, state) = match &usual.checked {
        Some(on_hub) => (on_hub.size().to_string(), "on the hub"),
        None => ("-".to_owned(), "not verified here"),
    };
    let kind = "GGUF".to_owned();
    let hub = match &usual.uncomputed {
        Some(architecture) => format!("{} ({architecture}: not computed yet)", usual.hub),
        None => usual.hub.clone(),
    };
    [usual.name.clone(), kind, size, state.to_owned(), hub]
}

fn usual_json(usual: &UsualName) -> Value {
    json!({
        "name": usual.name,
        "also": usual.also,
        "hub": usual.hub,
        "checked": usual.checked.is_some(),
        "computed": usual.uncomputed.is_none(),
        "bytes": usual.checked.as_ref().map(|on_hub| on_hub.bytes),
    })
}

fn type_name(kind: Kind, first_file: &str) -> String {
    match (kind, quant_of_name(first_file)) {
        (Kind::Gguf, Some(quant)) => format!("GGUF {}", quant.to_uppercase()),
        (Kind::Gguf, None) => "GGUF".to_owned(),
        (Kind::Safetensors, _) => "safetensors".to_owned(),
    }
}

/// Left-aligned columns, two spaces apart; sizes to the right.
fn table(rows: &[[String; 5]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; 5] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let line = |row: &[String; 5]| {
        let [name, kind, size, used, path] = row;
        let [w_name, w_kind, w_size, w_used, _] = widths;
        format!("{name:w_name$}  {kind:w_kind$}  {size:>w_size$}  {used:w_used$}  {path}")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// How long ago, in the largest unit that counts to at least one.
fn ago(time: SystemTime, now: SystemTime) -> String {
    const UNITS: [(u64, &str); 4] = [
        (365 * 86_400, "year"),
        (86_400, "day"),
        (3600, "hour"),
        (60, "minute"),
    ];
    // A clock that was set back makes a time lie in the future.
    let seconds = now.duration_since(time).unwrap_or(Duration::ZERO).as_secs();
    match UNITS.iter().find(|(unit, _)| seconds >= *unit) {
        None => "just now".to_owned(),
        Some((unit, name)) => match seconds / unit {
            1 => format!("1 {name} ago"),
            n => format!("{n} {name}s ago"),
        },
    }
}

fn entry_json(entry: &Entry) -> Value {
    let mut object = json!({
        "name": entry.name.as_str(),
        "path": entry.path.to_string_lossy(),
        "bytes": entry.file_bytes().0,
    });
    match &entry.state {
        State::Complete {
            kind,
            source,
            files,
            pulled_at,
            last_used,
        } => {
            object["state"] = "complete".into();
            object["type"] = json!(kind);
            object["quantisation"] = json!(quant_of_name(&files[0].path));
            object["source"] = json!(source);
            object["files"] = json!(files);
            object["pulled_at"] = json!(unix(*pulled_at));
            object["last_used"] = json!(last_used.map(unix));
        }
        State::Partial => object["state"] = "partial".into(),
        State::Damaged { reason } => {
            object["state"] = "damaged".into();
            object["reason"] = json!(reason);
        }
    }
    object
}

fn model_json(model: &Model) -> Value {
    json!({
        "name": model.alias,
        "about": model.about,
        "bytes": model.bytes.0,
        "licence": model.licence,
        "licence_url": model.licence_url,
        "sha256": model.sha256,
    })
}

/// Seconds since 1970.
fn unix(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_the_unit_that_fits() {
        let now = UNIX_EPOCH + Duration::from_secs(2_000_000_000);
        for (seconds, text) in [
            (0, "just now"),
            (59, "just now"),
            (60, "1 minute ago"),
            (7199, "1 hour ago"),
            (7200, "2 hours ago"),
            (3 * 86_400, "3 days ago"),
            (800 * 86_400, "2 years ago"),
        ] {
            assert_eq!(ago(now - Duration::from_secs(seconds), now), text);
        }
        assert_eq!(ago(now + Duration::from_secs(9), now), "just now");
    }

    #[test]
    fn columns_line_up() {
        let row = |cells: [&str; 5]| cells.map(str::to_owned);
        let text = table(&[
            row(["A", "T", "SIZE", "U", "P"]),
            row(["long", "x", "1 B", "y", "/p"]),
        ]);
        assert_eq!(text, "A     T  SIZE  U  P\nlong  x   1 B  y  /p");
    }
}
