//! Rules about all tracked files: nothing machine-specific, nothing large, no crate forgotten.

use std::path::Path;

use super::TidyFinding;

/// Larger files do not belong in git: models are fetched, golden data is small. Binary mebibyte.
pub(super) const BYTES_MAX: u64 = 1 << 20;

/// `base` is shared by every crate, so it stays small. The design's figure.
const BASE_LINES_MAX: usize = 3000;

/// Registry hosts. Which mirror a machine uses is its own affair; a tracked file that names one
/// breaks elsewhere. Written in two parts so that this file passes its own rule.
const HOSTS: [(&str, &str); 8] = [
    ("pypi", ".org"),
    ("files.pythonhosted", ".org"),
    ("registry.npmjs", ".org"),
    ("index.crates", ".io"),
    ("static.crates", ".io"),
    ("static.rust-lang", ".org"),
    ("deb.debian", ".org"),
    ("proxy.golang", ".org"),
];

/// Folders of one machine, in two parts for the same reason.
const FOLDERS: [(&str, &str); 2] = [("/root", "/"), ("/work", "/")];

/// Text that no tracked file may contain on this machine: the constants above, and the home
/// folder and the folder around the checkout. Very short paths would match everywhere and are
/// left out.
pub(crate) fn forbidden(root: &Path, home: Option<&Path>) -> Vec<String> {
    let mut words: Vec<String> = HOSTS
        .iter()
        .chain(&FOLDERS)
        .map(|(a, b)| format!("{a}{b}"))
        .collect();
    for folder in [home, root.parent()].into_iter().flatten() {
        let text = format!("{}/", folder.display());
        if text.len() >= 6 && !words.contains(&text) {
            words.push(text);
        }
    }
    words
}

/// Findings about one file's bytes. `Cargo.lock` is cargo's and may name what it likes.
pub(crate) fn check_file(path: &str, bytes: &[u8], forbidden: &[String]) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    if bytes.len() as u64 > BYTES_MAX {
        let message = format!("{} KiB, at most {}", bytes.len() / 1024, BYTES_MAX / 1024);
        findings.push(TidyFinding::error(path, 1, "file-size", message));
    }
    let text = std::str::from_utf8(bytes).unwrap_or("");
    if path.ends_with("Cargo.lock") {
        return findings;
    }
    for (at, line) in text.lines().enumerate() {
        for word in forbidden.iter().filter(|word| contains_path(line, word)) {
            let message = format!("`{word}` is a registry host or a folder of one machine");
            findings.push(TidyFinding::error(path, at + 1, "machine", message));
        }
    }
    findings
}

/// True when `word` occurs in `line` and, where it is a path, is not the end of a longer path.
fn contains_path(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "_-./}~".contains(c))
            || !word.starts_with('/')
    })
}

/// ARCHITECTURE.md, once written, has a table row for every crate.
pub(crate) fn check_crate_table(text: &str, crates: &[String]) -> Vec<TidyFinding> {
    let has_row = |name: &String| {
        let cell = format!("crates/{name}");
        let ends = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '-');
        text.lines()
            .filter(|line| line.trim_start().starts_with('|'))
            .any(|line| {
                line.match_indices(&cell)
                    .any(|(at, _)| ends(&line[at + cell.len()..]))
            })
    };
    let missing = crates.iter().filter(|name| !has_row(name));
    missing
        .map(|name| {
            let message = format!("the crate table has no row for `crates/{name}`");
            TidyFinding::error("ARCHITECTURE.md", 1, "crate-table", message)
        })
        .collect()
}

/// `base` under its limit; `lines` counts its source files.
pub(crate) fn check_base_size(lines: usize) -> Option<TidyFinding> {
    (lines >= BASE_LINES_MAX).then(|| {
        let message = format!("{lines} lines, `base` stays under {BASE_LINES_MAX}");
        TidyFinding::error("crates/base/src/lib.rs", 1, "base-size", message)
    })
}

/// Every manifest takes over the workspace's lints.
pub(crate) fn check_lints(path: &str, manifest: &str) -> Option<TidyFinding> {
    let mut lines = manifest
        .lines()
        .map(str::trim)
        .skip_while(|line| *line != "[lints]")
        .skip(1);
    (lines.next() != Some("workspace = true")).then(|| {
        let message = "the manifest lacks `[lints] workspace = true`".to_string();
        TidyFinding::error(path, 1, "lints", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Vec<String> {
        forbidden(
            Path::new("/srv/build/main"),
            Some(Path::new("/users/someone")),
        )
    }

    #[test]
    fn hosts_and_machine_folders_are_found() {
        let host = format!("pypi{}", ".org");
        let root = format!("{}/", "/root");
        let bad = [
            format!("index-url = https://{host}/simple"),
            format!("cd {root}x"),
            "see /users/someone/notes".into(),
            "\"/srv/build/main\"".into(),
        ];
        for line in bad {
            let text = format!("first\n{line}\n");
            let findings = check_file("docs/x.md", text.as_bytes(), &words());
            assert_eq!(findings.len(), 1, "{line}");
            assert_eq!((findings[0].line, findings[0].rule), (2, "machine"));
        }
        let good = [
            format!("${{HOME}}{root}"),
            format!("a{root}b"),
            "/users/somebody/x".into(),
        ];
        for line in good {
            assert!(
                check_file("docs/x.md", line.as_bytes(), &words()).is_empty(),
                "{line}"
            );
        }
        let lock = format!("source = \"https://{host}\"");
        assert!(check_file("Cargo.lock", lock.as_bytes(), &words()).is_empty());
    }

    #[test]
    fn a_home_that_is_the_root_forbids_nothing_more() {
        let all = forbidden(Path::new("/"), Some(Path::new("/")));
        assert_eq!(all.len(), HOSTS.len() + FOLDERS.len());
    }

    #[test]
    fn large_files_are_found() {
        let limit = usize::try_from(BYTES_MAX).expect("fits");
        assert!(check_file("x.bin", &vec![0xff; limit], &[]).is_empty());
        let findings = check_file("x.bin", &vec![0xff; limit + 1], &[]);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].rule, "file-size");
    }

    #[test]
    fn the_crate_table_is_complete() {
        let crates = ["base".to_string(), "comm".to_string()];
        let text =
            "| [`crates/base`](crates/base) | ids |\n`crates/comm` in prose\n| `crates/comms` |";
        let findings = check_crate_table(text, &crates);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].message.contains("crates/comm"), "{findings:?}");
        assert!(check_crate_table("| crates/base | crates/comm |", &crates).is_empty());
    }

    #[test]
    fn base_stays_small() {
        assert!(check_base_size(2999).is_none());
        assert!(check_base_size(3000).is_some());
    }

    #[test]
    fn manifests_take_the_workspace_lints() {
        assert!(check_lints("x", "[package]\n[lints]\nworkspace = true\n").is_none());
        assert!(check_lints("x", "[package]\n[dependencies]\nx.workspace = true\n").is_some());
    }
}
