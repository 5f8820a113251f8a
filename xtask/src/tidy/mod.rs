//! `cargo xtask tidy`: the rules of the house that neither the compiler nor clippy has.
//!
//! Each rule is a function from a value (a parsed file, cargo's metadata, a file's bytes) to
//! findings, so that its tests need no repository. CONTRIBUTING.md lists the rules for people.
//!
//! Reading order:
//! - [`source`] parses.
//! - [`code`] and [`text`] check Rust files.
//! - [`layers`] checks the crate edges, and [`copies`] their pictures.
//! - [`circles`] checks the edges between a crate's files.
//! - [`words`] checks comments.
//! - [`programs`] checks the test programs.
//! - [`tracked`] checks every tracked file.

mod circles;
mod code;
mod copies;
mod items;
mod layers;
mod programs;
mod source;
mod text;
mod tracked;
mod words;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::repo;
use source::RustFile;

/// A place that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TidyFinding {
    /// Path from the root, with `/`.
    path: String,
    /// Line, from 1.
    line: usize,
    rule: &'static str,
    message: String,
    error: bool,
}

impl TidyFinding {
    fn error(path: &str, line: usize, rule: &'static str, message: String) -> TidyFinding {
        TidyFinding {
            path: path.into(),
            line,
            rule,
            message,
            error: true,
        }
    }

    fn warning(path: &str, line: usize, rule: &'static str, message: String) -> TidyFinding {
        TidyFinding {
            error: false,
            ..TidyFinding::error(path, line, rule, message)
        }
    }

    /// False for a warning, which is printed and does not fail the run.
    pub(crate) fn is_error(&self) -> bool {
        self.error
    }
}

impl fmt::Display for TidyFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = if self.error { "" } else { "warning: " };
        write!(
            f,
            "{}:{}: {}: {level}{}",
            self.path, self.line, self.rule, self.message
        )
    }
}

/// A place that a rule lets through, and why. An entry that no longer matches is a finding.
struct Exemption {
    rule: &'static str,
    path: &'static str,
    reason: &'static str,
}

/// All exemptions. Keep it short: a place that needs one usually wants an argument instead.
const EXEMPT: [Exemption; 24] = [
    Exemption {
        rule: "environment",
        path: "crates/comm-rdma/examples/ibverbs.rs",
        reason: "a library in C's manner, for tests: nobody hands it arguments",
    },
    clock(
        "crates/capi/src/group.rs",
        "C hands over seconds, which become deadlines here",
    ),
    clock(
        "crates/capi/src/model.rs",
        "C hands over seconds, which become deadlines here",
    ),
    clock(
        "crates/text/src/tokenizer/steps.rs",
        "patterns of an untrusted file search with a deadline",
    ),
    clock(
        "crates/process/src/program.rs",
        "a program that stays after the end of its input is killed after a deadline",
    ),
    clock(
        "crates/mlx/src/stream.rs",
        "the wait for a device polls for a bounded time, then blocks",
    ),
    clock(
        "crates/mlx/src/limits.rs",
        "reads are timed beside MLX's streams, which no other thread may use",
    ),
    clock(
        "crates/model/src/links.rs",
        "a rank that waits for another gives it a deadline",
    ),
    clock(
        "crates/model/src/trace.rs",
        "a rank that is traced notes when exchanges begin and end",
    ),
    clock(
        "crates/model-mlx/src/host.rs",
        "a device that hangs is given up after a deadline",
    ),
    clock(
        "crates/model-mlx/src/gates.rs",
        "a gate is compiled where that is measured to be faster",
    ),
    clock(
        "crates/model/src/progress.rs",
        "what a layer takes is measured, so that a hang is known from a slow layer",
    ),
    clock(
        "crates/python/src/group.rs",
        "Python hands over seconds, which become deadlines here",
    ),
    clock(
        "crates/sim/src/world.rs",
        "the origin of virtual time, which rules only compare",
    ),
    clock(
        "crates/store/src/child.rs",
        "a compiler that hangs is given up after a deadline",
    ),
    clock(
        "crates/store/src/download.rs",
        "waits between attempts, and stops when cancelled",
    ),
    clock(
        "crates/store/src/http.rs",
        "a silent server is given up after a deadline",
    ),
    clock(
        "crates/store/src/lines.rs",
        "a download is told now and then",
    ),
    clock(
        "crates/store/src/pip.rs",
        "a silent pip is given up after a deadline",
    ),
    clock(
        "crates/tensor/src/meter.rs",
        "products are timed for forecasts, and only while that is asked for",
    ),
    clock(
        "crates/train/src/remote/frames.rs",
        "another machine that says nothing is given up after a deadline",
    ),
    clock(
        "crates/train/src/shard/link.rs",
        "ranks wait for ranks in other processes",
    ),
    Exemption {
        rule: "command",
        path: "crates/node/src/workers/awake.rs",
        reason: "a program of the system holds the sleep assertion while workers run",
    },
    Exemption {
        rule: "command",
        path: "crates/node/src/service.rs",
        reason: "launchd and systemd take orders only from their own commands",
    },
];

const fn clock(path: &'static str, reason: &'static str) -> Exemption {
    Exemption {
        rule: "clock",
        path,
        reason,
    }
}

/// Reads the repository and applies every rule; findings come sorted by place.
///
/// # Errors
/// When git or cargo fails, or a file cannot be read. A Rust file that does not parse
/// is a finding.
pub(crate) fn run() -> Result<Vec<TidyFinding>> {
    let root = repo::root();
    let paths = repo::files(&root)?;
    let metadata = layers::CargoMetadata::read()?;
    let (files, mut findings) = parse_all(&root, &paths)?;
    findings.extend(files.iter().flat_map(check_rust));
    findings.extend(files.iter().flat_map(items::check));
    findings.extend(items::check_names(&files));
    findings.extend(circles::check(&files));
    findings.extend(words::check(&files));
    findings.extend(layers::check(&metadata, &root));
    findings.extend(check_copies(&root)?);
    findings.extend(programs::check(&files, &metadata.test_programs(&root)));
    findings.extend(check_tracked(&root, &paths)?);
    if let Ok(text) = std::fs::read_to_string(root.join("ARCHITECTURE.md")) {
        findings.extend(tracked::check_crate_table(
            &text,
            &metadata.crate_names(&root),
        ));
    }
    let in_base = files
        .iter()
        .filter(|file| file.path.starts_with("crates/base/src/"));
    findings.extend(tracked::check_base_size(
        in_base.map(|file| file.lines.len()).sum(),
    ));
    let mut findings = apply_exemptions(findings, &EXEMPT);
    findings.sort();
    Ok(findings)
}

/// Parses every Rust file and marks those that are out-of-line test modules of another.
fn parse_all(root: &Path, paths: &[String]) -> Result<(Vec<RustFile>, Vec<TidyFinding>)> {
    let mut files = Vec::new();
    let mut findings = Vec::new();
    for path in paths.iter().filter(|path| path.ends_with(".rs")) {
        let text = std::fs::read_to_string(root.join(path)).with_context(|| path.clone())?;
        match RustFile::parse(path, &text) {
            Ok(file) => files.push(file),
            Err(error) => findings.push(TidyFinding::error(path, 1, "parse", format!("{error:#}"))),
        }
    }
    let modules: BTreeSet<String> = files.iter().flat_map(RustFile::test_modules).collect();
    for file in &mut files {
        file.test_file |= modules
            .iter()
            .any(|module| is_in_module(&file.path, module));
    }
    Ok((files, findings))
}

/// True when `path` is the module's own file or lies below its folder.
fn is_in_module(path: &str, module: &str) -> bool {
    path.strip_prefix(module)
        .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

fn check_rust(file: &RustFile) -> Vec<TidyFinding> {
    let mut findings = code::check(file);
    findings.extend(text::check(file));
    findings
}

/// The layer table's copies against the table.
fn check_copies(root: &Path) -> Result<Vec<TidyFinding>> {
    let read = |page: &str| std::fs::read_to_string(root.join(page)).context(page.to_string());
    let (architecture, readme) = (read("ARCHITECTURE.md")?, read("crates/README.md")?);
    Ok(copies::check(&layers::table(), &architecture, &readme))
}

fn check_tracked(root: &Path, paths: &[String]) -> Result<Vec<TidyFinding>> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let forbidden = tracked::forbidden(root, home.as_deref());
    let mut findings = Vec::new();
    for path in paths {
        let bytes = std::fs::read(root.join(path)).with_context(|| path.clone())?;
        findings.extend(tracked::check_file(path, &bytes, &forbidden));
        if path.ends_with("/Cargo.toml") && !path.starts_with("fuzz/") {
            let manifest = String::from_utf8_lossy(&bytes);
            findings.extend(tracked::check_lints(path, &manifest));
        }
    }
    Ok(findings)
}

/// Drops what `exempt` lets through, and adds a finding for every entry that let nothing through.
fn apply_exemptions(findings: Vec<TidyFinding>, exempt: &[Exemption]) -> Vec<TidyFinding> {
    let covers = |entry: &Exemption, finding: &TidyFinding| {
        entry.rule == finding.rule && entry.path == finding.path
    };
    let stale = exempt
        .iter()
        .filter(|entry| !findings.iter().any(|f| covers(entry, f)));
    let mut kept: Vec<TidyFinding> = stale
        .map(|entry| {
            let message = format!(
                "exempt from `{}` ({}) without need",
                entry.rule, entry.reason
            );
            TidyFinding::error(entry.path, 1, "stale-exemption", message)
        })
        .collect();
    kept.extend(
        findings
            .into_iter()
            .filter(|f| !exempt.iter().any(|entry| covers(entry, f))),
    );
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_prints_place_rule_and_message() {
        let finding = TidyFinding::error("crates/a/src/lib.rs", 7, "clock", "no".into());
        assert_eq!(finding.to_string(), "crates/a/src/lib.rs:7: clock: no");
        let finding = TidyFinding::warning("x.rs", 1, "file-length", "long".into());
        assert_eq!(finding.to_string(), "x.rs:1: file-length: warning: long");
    }

    #[test]
    fn exemptions_let_through_and_go_stale() {
        let finding = |path: &str| TidyFinding::error(path, 3, "clock", "no".into());
        let exempt = [Exemption {
            rule: "clock",
            path: "a.rs",
            reason: "measures links",
        }];
        let kept = apply_exemptions(vec![finding("a.rs"), finding("b.rs")], &exempt);
        assert_eq!(kept, [finding("b.rs")]);
        let kept = apply_exemptions(vec![finding("b.rs")], &exempt);
        assert_eq!(kept.len(), 2);
        assert_eq!(kept[0].rule, "stale-exemption");
    }

    #[test]
    fn every_source_rule_is_applied() {
        let text = format!(
            "fn f() {{ Instant::now(); Command::new(x); std::env::var(x); }} // TODO later\n// {}\n{}",
            "x".repeat(100),
            "\n".repeat(800)
        );
        let file = RustFile::parse("crates/base/src/lib.rs", &text).expect("the sample is Rust");
        let rules: BTreeSet<&str> = check_rust(&file)
            .iter()
            .map(|finding| finding.rule)
            .collect();
        let expected = [
            "clock",
            "command",
            "environment",
            "file-length",
            "module-doc",
            "todo-form",
            "width",
        ];
        assert_eq!(rules, BTreeSet::from(expected));
    }

    #[test]
    fn every_rule_for_tracked_files_is_applied() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = folder.path().join("checkout");
        let machine = format!("{}\n", folder.path().join("x").display());
        let files = [
            ("big.bin", vec![0; tracked::BYTES_MAX as usize + 1]),
            ("note.md", machine.into_bytes()),
            ("Cargo.toml", b"[workspace]\n".to_vec()),
        ];
        std::fs::create_dir_all(root.join("crate")).expect("made");
        std::fs::write(root.join("crate/Cargo.toml"), "[package]\n").expect("written");
        for (path, bytes) in &files {
            std::fs::write(root.join(path), bytes).expect("written");
        }
        let mut paths: Vec<String> = files.iter().map(|(path, _)| path.to_string()).collect();
        paths.push("crate/Cargo.toml".into());
        let found = check_tracked(&root, &paths).expect("all files are there");
        let mut found: Vec<(&str, &str)> =
            found.iter().map(|f| (f.path.as_str(), f.rule)).collect();
        found.sort_unstable();
        let expected = [
            ("big.bin", "file-size"),
            ("crate/Cargo.toml", "lints"),
            ("note.md", "machine"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn files_of_a_test_module_are_test_code() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("has a parent")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        write("src/lib.rs", "#[cfg(test)]\nmod checks;\nmod plain;\n");
        write("src/checks.rs", "fn f() { Instant::now(); }\n");
        write("src/plain.rs", "fn f() { Instant::now(); }\n");
        write("src/broken.rs", "fn (\n");
        let paths = ["lib", "checks", "plain", "broken"].map(|name| format!("src/{name}.rs"));
        let (files, findings) = parse_all(folder.path(), &paths).expect("all files are there");
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(
            (findings[0].path.as_str(), findings[0].rule),
            ("src/broken.rs", "parse")
        );
        let found: Vec<TidyFinding> = files.iter().flat_map(check_rust).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].path, "src/plain.rs");
    }
}
