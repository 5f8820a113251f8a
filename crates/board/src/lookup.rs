//! Looks up models, clusters and engines by name or file.

use std::io;
use std::path::{Path, PathBuf};

use paceline_base::Bytes;
use paceline_model::shape;
use paceline_plan::catalogue::{HardwareEntry, LinkKind, ModelEntry, parse_cluster, short_cluster};
use paceline_plan::{Calibration, Catalogue, Cluster, ModelShape};
use paceline_store::{Error as StoreError, Home};

use crate::tables::aligned;

/// Why a lookup failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Shape(#[from] shape::Error),
    #[error("{0}")]
    Plan(#[from] paceline_plan::Error),
    #[error("no model is called {name:?}")]
    Name {
        name: String,
        /// Similar known names, best first.
        near: Vec<String>,
    },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
}

/// Default bits per weight, without file, catalogue entry or option: 4-bit blocks with scales.
const BITS: f64 = 4.5;

/// Maximum TOML file: a cluster of 512 nodes with every link named is below 7 MB. Errors in that
/// much are found within half a second.
const TOML_BYTES_MAX: u64 = 8 << 20;

/// A model's shape by name, as `run` resolves it. Local files come first, then names of models to
/// download with their shape in the catalogue, then other names of the catalogue. `bits` replaces
/// the stored bits per weight.
pub fn model(
    home: Option<&Home>,
    name: &str,
    bits: Option<f64>,
    catalogue: &Catalogue,
) -> Result<ModelShape, Error> {
    if let Some(path) = home.and_then(|home| local_path(home, name)) {
        return Ok(shape::from_files(&path, bits)?);
    }
    if Path::new(name).exists() {
        return Ok(shape::from_files(Path::new(name), bits)?); // a config.json alone
    }
    let is_own = catalogue.models.iter().any(|model| model.name == name);
    let (known, usual_bits) = if is_own {
        (None, None)
    } else {
        known_name(name)
    };
    let entry = catalogue.model(known.unwrap_or(name));
    let entry = entry.map_err(|error| match near_names(home, name) {
        near if near.is_empty() => error.into(),
        near => Error::Name {
            name: name.to_owned(),
            near,
        },
    })?;
    Ok(match bits {
        Some(bits) => entry.shape(bits),
        None => entry.stored(usual_bits.or(entry.bits).unwrap_or(BITS)),
    }?)
}

/// Names like `name` that `run` knows.
fn near_names(home: Option<&Home>, name: &str) -> Vec<String> {
    match home.map(|home| paceline_store::resolve(home, name)) {
        Some(Err(StoreError::UnknownModel { close, .. })) => close,
        _ => Vec::new(),
    }
}

/// The catalogue's shape and stored bits of a model that `run` would download as `name`.
fn known_name(name: &str) -> (Option<&'static str>, Option<f64>) {
    if let Some(model) = paceline_store::Catalogue::BUILTIN.find(name) {
        return (model.shape, None);
    }
    let usual = paceline_store::usual_name(name);
    let shape = usual.and_then(|usual| usual.shape.as_deref());
    (shape, usual.map(|usual| usual.bits))
}

/// Bytes of the weights that `run` would download as `name`, by their shape in the catalogue.
/// `None` for other names.
pub fn weights(name: &str) -> Option<Bytes> {
    let (shape, bits) = known_name(name);
    let catalogue = Catalogue::builtin().ok()?;
    let entry = catalogue.model(shape?).ok()?;
    let shape = entry.stored(bits.or(entry.bits).unwrap_or(BITS)).ok()?;
    Some(Bytes(shape.weight_bytes() as u64))
}

/// The local files that `run` would use for `name`: a path, or a model of the store.
pub fn local_path(home: &Home, name: &str) -> Option<PathBuf> {
    match paceline_store::resolve(home, name) {
        Ok(paceline_store::Resolution::Path(found)) => Some(found.path),
        _ => None,
    }
}

/// A cluster from a file, or else from the short form.
///
/// # Errors
/// An unreadable file, or an invalid cluster.
pub fn cluster(text: &str, catalogue: &mut Catalogue) -> Result<Cluster, Error> {
    let path = Path::new(text);
    if !path.is_file() {
        return Ok(short_cluster(text, catalogue)?);
    }
    let toml = read(path)?;
    let mut cluster = parse_cluster(&toml, text, catalogue)?;
    if cluster.name == text {
        let stem = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned());
        cluster.name = stem.unwrap_or_default();
    }
    Ok(cluster)
}

/// Reads a TOML file of bounded size.
pub fn read(path: &Path) -> Result<String, Error> {
    use std::io::Read;
    let at = |source| Error::Read {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(at)?;
    let mut text = String::new();
    file.take(TOML_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(at)?;
    Ok(text)
}

/// Sets one engine's constants for all nodes of all clusters.
pub fn set_engine(
    clusters: &mut [Cluster],
    name: &str,
    calibration: &Calibration,
) -> Result<(), paceline_plan::Error> {
    let known = calibration
        .engines()
        .iter()
        .map(|engine| engine.name.as_str());
    if !known.clone().any(|engine| engine == name) {
        return Err(paceline_plan::Error::Unknown {
            kind: "engine",
            name: name.to_owned(),
            nearest: known.collect::<Vec<_>>().join(", "),
        });
    }
    for node in clusters.iter_mut().flat_map(|cluster| &mut cluster.nodes) {
        node.engine = name.to_owned();
    }
    Ok(())
}

/// Machines, links, models and engines, a table each.
pub fn list(catalogue: &Catalogue, calibration: &Calibration) -> String {
    let tables = [
        machines(catalogue),
        links(catalogue),
        models(catalogue),
        aligned(
            &std::iter::once("ENGINE")
                .chain(calibration.engines().iter().map(|e| e.name.as_str()))
                .map(|name| [name.to_owned()])
                .collect::<Vec<_>>(),
        ),
    ];
    tables.map(|lines| lines.join("\n")).join("\n\n")
}

/// A number without needless decimals; `-` for none.
fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"))
}

/// Whether a kind stands for a machine or link that can be bought.
fn is_named(kind: &str) -> bool {
    !matches!(kind, "unknown" | "unknown-cuda-gpu" | "none")
}

fn machines(catalogue: &Catalogue) -> Vec<String> {
    let heading = ["MACHINE", "MEMORY GB", "GB/S", "TFLOPS", "LOAD W", "USD"];
    let row = |it: &HardwareEntry| {
        [
            it.kind.clone(),
            number(it.memory_gb),
            number(it.memory_bandwidth_gb_s),
            number(it.fp16_tflops),
            number(it.load_w),
            number(it.price_usd),
        ]
    };
    let known = catalogue.hardware.iter().filter(|it| is_named(&it.kind));
    let rows = std::iter::once(heading.map(str::to_owned)).chain(known.map(row));
    aligned(&rows.collect::<Vec<_>>())
}

fn links(catalogue: &Catalogue) -> Vec<String> {
    let heading = ["LINK", "ONE WAY US", "GBIT/S"].map(str::to_owned);
    let row = |it: &LinkKind| {
        let link = it.between(0, 1);
        let us = Some(link.alpha * 1e6);
        [
            it.kind.clone(),
            number(us),
            format!("{:.1}", link.beta * 8e-9),
        ]
    };
    let known = catalogue.links.iter().filter(|it| is_named(&it.kind));
    aligned(
        &std::iter::once(heading)
            .chain(known.map(row))
            .collect::<Vec<_>>(),
    )
}

/// Models with the names that `run` and `plan` take for them too.
fn models(catalogue: &Catalogue) -> Vec<String> {
    let heading = ["MODEL", "WEIGHTS GB", "ALSO"].map(str::to_owned);
    let row = |it: &ModelEntry| {
        let stored = it.stored(it.bits.unwrap_or(BITS)).ok();
        let weights = stored.map(|shape| shape.weight_bytes() / 1e9);
        let usual = paceline_store::usual_names().iter();
        let usual = usual.filter(|usual| usual.shape.as_deref() == Some(&it.name));
        let also = usual.map(|usual| usual.name.as_str()).next();
        let weights = weights.map_or_else(|| "-".to_owned(), |gb| format!("{gb:.1}"));
        [it.name.clone(), weights, also.unwrap_or("").to_owned()]
    };
    let rows = std::iter::once(heading).chain(catalogue.models.iter().map(row));
    aligned(&rows.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use paceline_store::{Catalogue as Names, usual_names};

    use super::*;

    #[test]
    fn the_list_has_columns_of_eighty_at_most_and_usual_names() {
        let all = list(
            &Catalogue::builtin().unwrap(),
            &Calibration::builtin().unwrap(),
        );
        assert!(all.lines().all(|line| line.chars().count() <= 80), "{all}");
        let line = |name: &str| {
            let found = all.lines().find(|line| line.starts_with(name));
            found.unwrap_or_else(|| panic!("{name}: {all}")).to_owned()
        };
        assert!(line("mac-studio-m3-ultra-512").contains(" 512 "), "{all}");
        assert!(line("Qwen3-32B").ends_with(" qwen3:32b"), "{all}");
        assert!(line("10gbe").ends_with(" 9.4"), "{all}");
        assert!(!all.contains("unknown"), "{all}");
    }

    #[test]
    fn an_unknown_name_comes_with_names_like_it() {
        let home = Home::new("/nonexistent");
        let catalogue = Catalogue::builtin().unwrap();
        match model(Some(&home), "qwen9:8b", None, &catalogue) {
            Err(Error::Name { near, .. }) => assert!(near.iter().any(|it| it == "qwen3:8b")),
            other => panic!("{other:?}"),
        }
        assert!(weights("qwen3:8b").is_some() && weights("o/r").is_none());
    }

    #[test]
    fn run_knows_the_planners_names_of_all_that_it_can_fetch() {
        let catalogue = Catalogue::builtin().unwrap();
        let own = Names::BUILTIN.iter().filter_map(|model| model.shape);
        let usual = usual_names()
            .iter()
            .filter_map(|usual| usual.shape.as_deref());
        let fetched: Vec<&str> = own.chain(usual).collect();
        for model in &catalogue.models {
            let name = model.name.as_str();
            let known = known_name(name).0;
            assert_eq!(known, fetched.contains(&name).then_some(name));
        }
    }
}
