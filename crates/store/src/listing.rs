//! Lists the store's models and those of the catalogue, as text and JSON.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::catalogue::{Catalogue, CatalogueModel};
use crate::gguf_name::quant_of_name;
use crate::home::Home;
use crate::index::{Kind, State, StoreEntry};
use crate::usual_names::{UsualName, usual_names};

/// Models of the store, and optionally those available by short names.
#[derive(Debug)]
pub struct StoreListing {
    stored: Vec<StoreEntry>,
    /// Missing models of the catalogue, and usual names.
    available: Option<(Vec<&'static CatalogueModel>, &'static [UsualName])>,
}

impl StoreListing {
    /// Only the store's models.
    pub const fn of(stored: Vec<StoreEntry>) -> Self {
        Self {
            stored,
            available: None,
        }
    }

    /// With all models that have a short name.
    pub fn with_catalogue(stored: Vec<StoreEntry>) -> Self {
        let is_here =
            |model: &&CatalogueModel| stored.iter().any(|e| e.name.as_str() == model.alias);
        let missing = Catalogue::BUILTIN.iter().filter(|model| !is_here(model));
        let available = Some((missing.collect(), usual_names()));
        Self { stored, available }
    }

    fn missing(&self) -> &[&'static CatalogueModel] {
        let available = self.available.as_ref();
        available.map_or(&[], |(missing, _)| missing.as_slice())
    }

    fn usual(&self) -> &'static [UsualName] {
        self.available.as_ref().map_or(&[], |(_, usual)| *usual)
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.stored.is_empty() && self.missing().is_empty()
    }

    /// A heading and a line for each model.
    pub fn text(&self, now: SystemTime) -> String {
        let mut rows =
            vec![["NAME", "TYPE", "FILES", "SIZE", "LAST USED", "PATH"].map(str::to_owned)];
        rows.extend(self.stored.iter().map(|entry| entry_row(entry, now)));
        rows.extend(self.missing().iter().map(|model| model_row(model)));
        rows.extend(self.usual().iter().map(usual_row));
        table(&rows)
    }

    /// All models as a JSON object.
    pub fn json(&self, home: &Home) -> Value {
        let models: Vec<Value> = self.stored.iter().map(entry_json).collect();
        let mut object = json!({ "home": home.root().to_string_lossy(), "models": models });
        if let Some((missing, usual)) = &self.available {
            object["available"] = missing.iter().map(|model| model_json(model)).collect();
            object["usual_names"] = usual.iter().map(usual_json).collect();
        }
        object
    }
}

fn entry_row(entry: &StoreEntry, now: SystemTime) -> [String; 6] {
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
    let files = entry.file_count();
    [
        entry.name.to_string(),
        kind,
        files.map_or_else(|| "-".to_owned(), |files| files.to_string()),
        entry.file_bytes().to_string(),
        used,
        path,
    ]
}

fn model_row(model: &CatalogueModel) -> [String; 6] {
    let kind = type_name(Kind::Gguf, model.file);
    [
        model.alias.to_owned(),
        kind,
        "1".to_owned(),
        model.bytes.to_string(),
        "not pulled".into(),
        "-".into(),
    ]
}

/// A usual name; the path column shows its repository.
fn usual_row(usual: &UsualName) -> [String; 6] {
    let (size, state) = match &usual.checked {
        Some(on_hub) => (on_hub.size().to_string(), "on the hub"),
        None => ("-".to_owned(), "not verified here"),
    };
    let kind = "GGUF".to_owned();
    let hub = match &usual.uncomputed {
        Some(architecture) => format!("{} ({architecture}: not computed yet)", usual.hub),
        None => usual.hub.clone(),
    };
    let files = usual.checked.as_ref().map(|on_hub| on_hub.files.len());
    let files = files.map_or_else(|| "-".to_owned(), |files| files.to_string());
    [usual.name.clone(), kind, files, size, state.to_owned(), hub]
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

/// Left-aligned columns, two spaces apart; numbers right-aligned.
fn table(rows: &[[String; 6]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; 6] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let line = |row: &[String; 6]| {
        let [name, kind, files, size, used, path] = row;
        let [w_name, w_kind, w_files, w_size, w_used, _] = widths;
        let about = format!("{name:w_name$}  {kind:w_kind$}  {files:>w_files$}  {size:>w_size$}");
        format!("{about}  {used:w_used$}  {path}")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Age in the largest unit of at least one.
fn ago(time: SystemTime, now: SystemTime) -> String {
    const UNITS: [(u64, &str); 4] = [
        (365 * 86_400, "year"),
        (86_400, "day"),
        (3600, "hour"),
        (60, "minute"),
    ];
    // The time may lie in the future if the clock was set back.
    let seconds = now.duration_since(time).unwrap_or(Duration::ZERO).as_secs();
    match UNITS.iter().find(|(unit, _)| seconds >= *unit) {
        None => "just now".to_owned(),
        Some((unit, name)) => match seconds / unit {
            1 => format!("1 {name} ago"),
            n => format!("{n} {name}s ago"),
        },
    }
}

fn entry_json(entry: &StoreEntry) -> Value {
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

fn model_json(model: &CatalogueModel) -> Value {
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
        let row = |cells: [&str; 6]| cells.map(str::to_owned);
        let text = table(&[
            row(["A", "T", "FILES", "SIZE", "U", "P"]),
            row(["long", "x", "3", "1 B", "y", "/p"]),
        ]);
        assert_eq!(
            text,
            "A     T  FILES  SIZE  U  P\nlong  x      3   1 B  y  /p"
        );
    }
}
