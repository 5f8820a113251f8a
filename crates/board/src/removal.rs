//! Removes models from the store for API clients.

use std::path::Path;
use std::sync::Arc;

use paceline_serve::{Removal, Remover};
use paceline_store::{EntryName, Error as StoreError, Home, Resolution, find_for_removal, resolve};
use serde_json::Value;

use crate::tables::{label, names};

/// Removes models by their store names: clients cannot name paths.
pub fn remover(home: Home) -> Remover {
    let remove = move |name: &str, served: &[String]| {
        if Path::new(name).exists() {
            return Ok(Removal::NotKept);
        }
        if is_served(&home, name, served) {
            return Ok(Removal::InUse);
        }
        match paceline_store::remove(&home, name) {
            Ok(_) => Ok(Removal::Done),
            Err(StoreError::NotInStore { .. }) => Ok(Removal::NotKept),
            Err(error) => Err(error.into()),
        }
    };
    Remover(Arc::new(remove))
}

/// The instances, of those that `ps` lists, that compute with the stored model `name`, each with
/// its machines.
pub fn model_users(home: &Home, name: &str, instances: &Value) -> Vec<String> {
    let all = instances.as_array().into_iter().flatten();
    let uses = |it: &&Value| {
        let model = it["model"].as_str().unwrap_or_default().to_owned();
        // Models of upstreams have no id.
        it["id"].is_string() && is_served(home, name, &[model])
    };
    let told = |it: &Value| format!("{} on {}", label(it), names(&it["nodes"]));
    all.filter(uses).map(told).collect()
}

/// Whether `name` and one of `api_model` are the same stored model. A model has several names:
/// alias, usual name, hub id, path.
fn is_served(home: &Home, name: &str, served: &[String]) -> bool {
    let Ok(own) = find_for_removal(home, name) else {
        return false;
    };
    served
        .iter()
        .any(|other| stored(home, other).as_ref() == Some(&own))
}

/// The stored model for a server's argument `spec`.
fn stored(home: &Home, spec: &str) -> Option<EntryName> {
    let loaded = match resolve(home, spec) {
        Ok(Resolution::Path(found)) => found.name,
        _ => None,
    };
    // Paths into the store resolve only as paths.
    loaded.or_else(|| find_for_removal(home, spec).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_served_file_is_known_under_its_other_names() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        for name in ["one", "two"] {
            let folder = home.models_dir().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("m.gguf"), b"GGUFdata").unwrap();
        }
        let path = home.models_dir().join("one/m.gguf");
        let path = path.to_string_lossy().into_owned();
        for (served, expected) in [
            ("one", true),
            (path.as_str(), true),
            ("two", false),
            ("x", false),
        ] {
            let served = ["mine".to_owned(), served.to_owned()];
            assert_eq!(is_served(&home, "one", &served), expected, "{served:?}");
        }
        assert!(!is_served(&home, "three", &["three".to_owned()]));
        let instances = json!([
            { "id": "i1", "model": path, "nodes": ["mini", "studio"] },
            { "id": "i2", "model": "two", "nodes": ["mini"] },
            { "model": "one", "nodes": ["via elsewhere"] },
        ]);
        let told = model_users(&home, "one", &instances);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].ends_with(" on mini, studio"), "{told:?}");
    }
}
