//! The rule on test programs: a crate links few of them, and none of its test files is outside.
//!
//! Linking a program takes seconds, so the files in a crate's `tests` are modules of `tests/all.rs`
//! and manifests say `autotests = false`. Cargo ignores a file that no program declares, and its
//! tests would never run: here it is a finding.

use std::collections::BTreeSet;

use super::TidyFinding;
use super::source::RustFile;
use crate::repo;

/// Test programs of one crate: `all`, and what has to be apart. `comm` has the model checker's and
/// MPI's.
const PROGRAMS_MAX: usize = 3;

/// Findings about all crates; `programs` are the sources of cargo's test targets, from the root.
pub(crate) fn check(files: &[RustFile], programs: &[String]) -> Vec<TidyFinding> {
    let modules: BTreeSet<String> = files
        .iter()
        .filter(|file| tests_file(&file.path).is_some())
        .flat_map(modules)
        .collect();
    let outside = files.iter().filter_map(|file| {
        let module = tests_file(&file.path)?;
        let known = modules.contains(&module) || programs.contains(&file.path);
        let message = "no test program has this file: declare it in tests/all.rs";
        (!known).then(|| TidyFinding::error(&file.path, 1, "test-program", message.into()))
    });
    outside.chain(too_many(programs)).collect()
}

/// The module that a file directly in `tests`, or a folder there with the file in it, would be;
/// `None` for all other files.
fn tests_file(path: &str) -> Option<String> {
    let (folder, rest) = path.strip_prefix("crates/")?.split_once("/tests/")?;
    let name = match rest.split('/').collect::<Vec<_>>()[..] {
        [file] => file.strip_suffix(".rs")?,
        [folder, "main.rs" | "mod.rs"] => folder,
        _ => return None,
    };
    (!folder.contains('/')).then(|| format!("{folder}/{name}"))
}

/// The modules that a file in `tests` declares without a body, as [`tests_file`] names them.
fn modules(file: &RustFile) -> Vec<String> {
    let name = repo::crate_of(&file.path);
    let items = file.syntax.items.iter();
    items
        .filter_map(|item| match item {
            syn::Item::Mod(module) if module.content.is_none() => {
                Some(format!("{name}/{}", module.ident))
            }
            _ => None,
        })
        .collect()
}

fn too_many(programs: &[String]) -> Vec<TidyFinding> {
    let crates: BTreeSet<&str> = programs.iter().map(|path| repo::crate_of(path)).collect();
    let count = |name: &str| {
        let own = programs.iter().filter(|path| repo::crate_of(path) == name);
        own.count()
    };
    let many = crates.iter().filter(|name| count(name) > PROGRAMS_MAX);
    many.map(|name| {
        let message = format!(
            "{} test programs, at most {PROGRAMS_MAX}: make modules of tests/all.rs of them",
            count(name)
        );
        let manifest = format!("crates/{name}/Cargo.toml");
        TidyFinding::error(&manifest, 1, "test-program", message)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)], programs: &[&str]) -> Vec<String> {
        let files: Vec<RustFile> = files
            .iter()
            .map(|(path, text)| RustFile::parse(path, text).expect("the sample is Rust"))
            .collect();
        let programs: Vec<String> = programs.iter().map(|path| path.to_string()).collect();
        let findings = check(&files, &programs);
        findings.into_iter().map(|finding| finding.path).collect()
    }

    #[test]
    fn a_file_outside_of_all_programs_is_found() {
        let files = [
            ("crates/a/tests/all.rs", "mod edges;\nmod hostile;"),
            ("crates/a/tests/edges.rs", ""),
            ("crates/a/tests/hostile/mod.rs", "mod deep;"),
            ("crates/a/tests/hostile/deep.rs", ""),
            ("crates/a/tests/lost.rs", ""),
            ("crates/a/tests/astray/main.rs", ""),
            ("crates/a/tests/alone.rs", ""),
            ("crates/a/src/engine/tests/batches.rs", ""),
            ("crates/b/tests/edges.rs", ""),
        ];
        let programs = ["crates/a/tests/all.rs", "crates/a/tests/alone.rs"];
        let expected = [
            "crates/a/tests/lost.rs",
            "crates/a/tests/astray/main.rs",
            "crates/b/tests/edges.rs",
        ];
        assert_eq!(found(&files, &programs), expected);
    }

    #[test]
    fn programs_are_few() {
        let programs: Vec<String> = (0..4).map(|n| format!("crates/a/tests/p{n}.rs")).collect();
        let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
        assert_eq!(found(&[], &programs[..3]), Vec::<String>::new());
        assert_eq!(found(&[], &programs), ["crates/a/Cargo.toml"]);
    }
}
