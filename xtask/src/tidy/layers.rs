//! The layer rule: crate edges only go down, and some dependencies have owners.
//!
//! The facts come from `cargo metadata`. A development dependency obeys the same rule, so that a
//! test cannot couple crates that the code separates; only the crate itself is free.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::TidyFinding;
use super::copies::LayerTable;
use crate::repo;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CrateLayer {
    /// L0 to L8; may use crates of lower levels.
    Level(u8),
    /// Outside the product: may use everything, nothing may use it.
    Dev,
}

use CrateLayer::{Dev, Level};

/// Every crate there may be, by folder name. A new crate is entered here and in ARCHITECTURE.md.
const LAYERS: [(&str, CrateLayer); 34] = [
    ("base", Level(0)),
    ("process", Level(1)),
    ("tensor", Level(1)),
    ("weights", Level(1)),
    ("auth", Level(1)),
    ("load-generator", Level(1)),
    ("comm", Level(1)),
    ("plan", Level(1)),
    ("kb", Level(1)),
    ("mlx", Level(1)),
    ("gpu", Level(1)),
    ("comm-interop", Level(2)),
    ("comm-rdma", Level(2)),
    ("text", Level(2)),
    ("model", Level(2)),
    ("cluster", Level(2)),
    ("store", Level(2)),
    ("launch", Level(2)),
    ("model-mlx", Level(3)),
    ("engine", Level(4)),
    ("train", Level(4)),
    ("fleet", Level(4)),
    ("mapreduce", Level(4)),
    ("serve", Level(5)),
    ("worker", Level(5)),
    ("node", Level(6)),
    ("board", Level(7)),
    ("bench", Level(7)),
    ("chaos", Level(7)),
    ("cli", Level(8)),
    ("python", Level(8)),
    ("capi", Level(8)),
    ("sim", Dev),
    ("xtask", Dev),
];

/// Outside crates that only some of ours may use, for any purpose.
const OWNED: [(&str, &[&str]); 4] = [
    ("anyhow", &["bench", "chaos", "cli", "xtask"]),
    ("clap", &["cli", "xtask"]),
    (
        "tokio",
        &[
            "auth",
            "comm",
            "cluster",
            "engine",
            "mapreduce",
            "node",
            "serve",
            "cli",
        ],
    ),
    ("axum", &["serve"]),
];

/// The output of `cargo metadata --no-deps`, as far as the rule needs it.
#[derive(Debug, Deserialize)]
pub(crate) struct CargoMetadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    manifest_path: String,
    dependencies: Vec<Dependency>,
    targets: Vec<CargoTarget>,
}

/// An artifact that cargo builds of a package.
#[derive(Debug, Deserialize)]
struct CargoTarget {
    kind: Vec<String>,
    src_path: String,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    /// `dev`, `build`, or absent for an ordinary one.
    kind: Option<String>,
    path: Option<String>,
}

impl CargoMetadata {
    /// Asks cargo about the workspace.
    pub(crate) fn read() -> Result<CargoMetadata> {
        let output = repo::cargo()
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .output()
            .context("run cargo metadata")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cargo metadata: {complaint}");
        serde_json::from_slice(&output.stdout).context("read the output of cargo metadata")
    }

    /// Folder names of the crates below `crates/`.
    pub(crate) fn crate_names(&self, root: &Path) -> Vec<String> {
        let folders = self.packages.iter().map(|package| package.folder(root));
        folders
            .filter_map(|folder| folder.strip_prefix("crates/").map(String::from))
            .collect()
    }

    /// The sources of all programs of integration tests, relative to `root`.
    pub(crate) fn test_programs(&self, root: &Path) -> Vec<String> {
        let targets = self.packages.iter().flat_map(|package| &package.targets);
        targets
            .filter(|target| target.kind.iter().any(|kind| kind == "test"))
            .map(|target| relative(root, &target.src_path))
            .collect()
    }
}

impl Package {
    /// The package's folder, relative to the root.
    fn folder(&self, root: &Path) -> String {
        relative(root, &self.manifest_path)
            .trim_end_matches("/Cargo.toml")
            .to_string()
    }
}

fn relative(root: &Path, path: &str) -> String {
    let path = Path::new(path);
    path.strip_prefix(root)
        .unwrap_or(path)
        .to_string_lossy()
        .replace('\\', "/")
}

/// Findings about the workspace's edges; `root` is the folder that all paths start from.
pub(crate) fn check(metadata: &CargoMetadata, root: &Path) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    for package in &metadata.packages {
        let folder = package.folder(root);
        let name = repo::crate_of(&folder);
        let manifest = relative(root, &package.manifest_path);
        let text = std::fs::read_to_string(&package.manifest_path).unwrap_or_default();
        let mut say = |subject: &str, rule: &'static str, message: String| {
            let line = line_of(&text, subject);
            findings.push(TidyFinding::error(&manifest, line, rule, message));
        };
        if folder.starts_with("crates/") && package.name != format!("paceline-{name}") {
            let message = format!("folder {folder} holds package {}", package.name);
            say(
                "name",
                "crate-name",
                format!("{message}, expected paceline-{name}"),
            );
        }
        let Some(layer) = layer_of(name) else {
            say(
                "name",
                "layer",
                format!("crate `{name}` has no layer in tidy's table"),
            );
            continue;
        };
        for dependency in &package.dependencies {
            if let Some(message) = refuse_edge(root, name, layer, dependency) {
                say(&dependency.name, "layer", message);
            }
            if let Some(message) = refuse_owned(name, dependency) {
                say(&dependency.name, "dependency-owner", message);
            }
        }
    }
    findings
}

/// The table, for comparing its copies.
pub(crate) fn table() -> LayerTable {
    let text = |layer: CrateLayer| match layer {
        Level(level) => level.to_string(),
        Dev => "dev".to_string(),
    };
    let rows = LAYERS.iter();
    rows.map(|(name, layer)| (name.to_string(), text(*layer)))
        .collect()
}

fn layer_of(name: &str) -> Option<CrateLayer> {
    LAYERS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, layer)| *layer)
}

/// Why the edge from crate `name` is not allowed, if it is an edge inside the workspace.
fn refuse_edge(
    root: &Path,
    name: &str,
    layer: CrateLayer,
    dependency: &Dependency,
) -> Option<String> {
    let target = relative(root, dependency.path.as_deref()?);
    let target = repo::crate_of(&target);
    let kind = dependency.kind.as_deref();
    if target == name && kind == Some("dev") {
        return None;
    }
    let kind = kind.map_or(String::new(), |kind| format!("{kind}-"));
    let edge = format!("{kind}dependency {name} -> {target}");
    match (layer, layer_of(target)) {
        (_, None) => Some(format!("{edge}: `{target}` has no layer in tidy's table")),
        (_, Some(Dev)) => Some(format!("{edge}: nothing depends on a development crate")),
        (Level(from), Some(Level(to))) if to >= from => {
            Some(format!("{edge}: L{from} -> L{to}, but edges only go down"))
        }
        (Dev | Level(_), Some(Level(_))) => None,
    }
}

fn refuse_owned(name: &str, dependency: &Dependency) -> Option<String> {
    let (_, owners) = OWNED.iter().find(|(owned, _)| *owned == dependency.name)?;
    let allowed = owners.contains(&name);
    (!allowed).then(|| {
        format!(
            "`{}` is only for {}, not for `{name}`",
            dependency.name,
            owners.join(", ")
        )
    })
}

/// Line of the manifest, from 1, that begins with the word `subject`; 1 when there is none.
fn line_of(manifest: &str, subject: &str) -> usize {
    let begins = |line: &str| {
        line.strip_prefix(subject).is_some_and(|rest| {
            !rest.starts_with(|c: char| c.is_alphanumeric() || "-_".contains(c))
        })
    };
    manifest.lines().position(begins).map_or(1, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(name: &str, dependency: &str, kind: Option<&str>) -> Vec<String> {
        let ours = LAYERS.iter().any(|(known, _)| *known == dependency);
        let folder = |name: &str| match name {
            "xtask" => "/r/xtask".to_string(),
            _ => format!("/r/crates/{name}"),
        };
        let metadata = CargoMetadata {
            packages: vec![Package {
                name: if name == "xtask" {
                    name.into()
                } else {
                    format!("paceline-{name}")
                },
                manifest_path: format!("{}/Cargo.toml", folder(name)),
                targets: Vec::new(),
                dependencies: vec![Dependency {
                    name: if ours {
                        format!("paceline-{dependency}")
                    } else {
                        dependency.into()
                    },
                    kind: kind.map(String::from),
                    path: ours.then(|| folder(dependency)),
                }],
            }],
        };
        check(&metadata, Path::new("/r"))
            .into_iter()
            .map(|f| f.message)
            .collect()
    }

    #[test]
    fn edges_only_go_down() {
        let allowed = [
            ("tensor", "base", None),
            ("engine", "model", None),
            ("cli", "base", Some("build")),
            ("xtask", "store", None),
            ("sim", "cluster", None),
            ("comm", "comm", Some("dev")),
            ("engine", "tensor", Some("dev")),
        ];
        for (from, to, kind) in allowed {
            assert_eq!(
                verdict(from, to, kind),
                Vec::<String>::new(),
                "{from} -> {to} {kind:?}"
            );
        }
        let refused = [
            ("base", "tensor", None, "edges only go down"),
            ("tensor", "weights", None, "edges only go down"),
            ("model", "cluster", None, "edges only go down"),
            ("cluster", "launch", None, "edges only go down"),
            (
                "model",
                "engine",
                Some("build"),
                "build-dependency model -> engine",
            ),
            (
                "tensor",
                "weights",
                Some("dev"),
                "dev-dependency tensor -> weights",
            ),
            ("comm", "comm", None, "edges only go down"),
            ("cluster", "sim", Some("dev"), "development crate"),
            ("sim", "xtask", None, "development crate"),
        ];
        for (from, to, kind, expected) in refused {
            let messages = verdict(from, to, kind);
            assert_eq!(messages.len(), 1, "{from} -> {to} {kind:?}");
            assert!(messages[0].contains(expected), "{messages:?}");
        }
    }

    #[test]
    fn unknown_crates_are_refused() {
        let messages = verdict("helpers", "serde", None);
        assert!(
            messages[0].contains("`helpers` has no layer"),
            "{messages:?}"
        );
    }

    #[test]
    fn owned_dependencies_stay_with_their_owners() {
        for (name, dependency) in [
            ("cli", "clap"),
            ("xtask", "anyhow"),
            ("serve", "axum"),
            ("cluster", "tokio"),
        ] {
            assert_eq!(verdict(name, dependency, None), Vec::<String>::new());
        }
        for (name, dependency) in [
            ("store", "anyhow"),
            ("tensor", "tokio"),
            ("cli", "axum"),
            ("engine", "clap"),
        ] {
            assert_eq!(
                verdict(name, dependency, None).len(),
                1,
                "{name} {dependency}"
            );
            assert_eq!(
                verdict(name, dependency, Some("dev")).len(),
                1,
                "{name} {dependency}"
            );
        }
    }

    #[test]
    fn folder_and_package_agree() {
        let metadata = CargoMetadata {
            packages: vec![Package {
                name: "paceline-tensors".into(),
                manifest_path: "/r/crates/tensor/Cargo.toml".into(),
                dependencies: Vec::new(),
                targets: Vec::new(),
            }],
        };
        let findings = check(&metadata, Path::new("/r"));
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].rule, "crate-name");
        assert_eq!(findings[0].path, "crates/tensor/Cargo.toml");
    }

    #[test]
    fn a_dependency_is_found_in_its_manifest() {
        let manifest =
            "[package]\nname = \"x\"\n\n[dependencies]\nserde_json = \"1\"\nserde = \"1\"";
        assert_eq!(line_of(manifest, "serde"), 6);
        assert_eq!(line_of(manifest, "name"), 2);
        assert_eq!(line_of(manifest, "absent"), 1);
    }
}
