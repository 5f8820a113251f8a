//! Looks up models, clusters and engines by name or file.

use std::io;
use std::path::{Path, PathBuf};

use paceline_model::shape;
use paceline_plan::catalogue::{parse_cluster, short_cluster};
use paceline_plan::{Calibration, Catalogue, Cluster, ModelShape};
use paceline_store::Home;

/// Why a lookup failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Shape(#[from] shape::Error),
    #[error("{0}")]
    Plan(#[from] paceline_plan::Error),
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Default bits per weight, without file, catalogue entry or option: 4-bit blocks with scales.
const BITS: f64 = 4.5;

/// Maximum TOML file: a cluster of 512 nodes with every link named is below 7 MB. Errors in that
/// much are found within half a second.
const TOML_BYTES_MAX: u64 = 8 << 20;

/// A model's shape by name, as `run` resolves it. Local files come first, then names of models to
/// download with their shape in the catalogue, then other names of the catalogue. `bits` replaces
/// the stored bits per weight.
///
/// # Errors
/// Unreadable files, an unknown name.
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
    let entry = catalogue.model(known.unwrap_or(name))?;
    Ok(match bits {
        Some(bits) => entry.shape(bits),
        None => entry.stored(usual_bits.or(entry.bits).unwrap_or(BITS)),
    }?)
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
///
/// # Errors
/// [`Error::Read`].
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
///
/// # Errors
/// An unknown engine.
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

/// Lists machines, links, models and engines.
pub fn list(catalogue: &Catalogue, calibration: &Calibration) -> String {
    let known = |kind: &&str| !matches!(*kind, "unknown" | "unknown-cuda-gpu" | "none");
    let machines = catalogue
        .hardware
        .iter()
        .map(|h| h.kind.as_str())
        .filter(known);
    let links = catalogue
        .links
        .iter()
        .map(|l| l.kind.as_str())
        .filter(known);
    let models = catalogue.models.iter().map(|m| m.name.as_str());
    let engines = calibration.engines().iter().map(|e| e.name.as_str());
    let lines = |title: &str, names: Vec<&str>| format!("{title}\n  {}", names.join("\n  "));
    let all = [
        lines("machines", machines.collect()),
        lines("links", links.collect()),
        lines("models", models.collect()),
        lines("engines", engines.collect()),
    ];
    all.join("\n")
}

#[cfg(test)]
mod tests {
    use paceline_store::{Catalogue as Names, usual_names};

    use super::*;

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
