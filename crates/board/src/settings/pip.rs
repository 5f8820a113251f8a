//! The package index that pip is configured for.
//!
//! pip reads its files in this order; later ones win, and variables win over files:
//!
//! 1. of the machine: `/etc/xdg/pip/pip.conf`, `/etc/pip.conf`, on a Mac
//!    `/Library/Application Support/pip/pip.conf`;
//! 2. of the user: `~/.pip/pip.conf`, `~/.config/pip/pip.conf`, on a Mac
//!    `~/Library/Application Support/pip/pip.conf`;
//! 3. of the active environment: `$VIRTUAL_ENV/pip.conf`;
//! 4. `$PIP_CONFIG_FILE`. If that is `/dev/null`, there are no files.
//!
//! Source: pip's documentation, "Configuration", and `pip/_internal/configuration.py` of pip 25.

use std::path::{Path, PathBuf};

use paceline_store::PackageIndex;

use super::{Variables, text};

/// Maximum size of a file; usual ones have some lines.
const FILE_BYTES_MAX: u64 = 64 << 10;

const MACHINE: [&str; 3] = [
    "/etc/xdg/pip/pip.conf",
    "/etc/pip.conf",
    "/Library/Application Support/pip/pip.conf",
];

/// Files of the user, below the home folder.
const USER: [&str; 3] = [
    ".pip/pip.conf",
    ".config/pip/pip.conf",
    "Library/Application Support/pip/pip.conf",
];

/// The index by `PIP_INDEX_URL`, `PIP_NO_INDEX` and pip's files. A folder is left to pip, and so is
/// an address with a login, so that no error shows the password.
pub fn package_index(variables: Variables<'_>) -> PackageIndex {
    let text = |name: &str| text(variables, name);
    let contents: Vec<String> = files(&text).iter().filter_map(|path| read(path)).collect();
    choose(&text, &contents)
}

/// The index by the variables in `text` and the contents of pip's files.
fn choose(text: &dyn Fn(&str) -> Option<String>, contents: &[String]) -> PackageIndex {
    let setting = |variable: &str, key: &str| {
        let in_files = || contents.iter().rev().find_map(|file| value(file, key));
        text(variable).or_else(in_files)
    };
    let no_index = setting("PIP_NO_INDEX", "no-index");
    let is_on = |value: String| matches!(&*value.to_lowercase(), "1" | "true" | "yes" | "on");
    match setting("PIP_INDEX_URL", "index-url") {
        _ if no_index.is_some_and(is_on) => PackageIndex::Pip,
        Some(address) if address.contains('@') || !address.starts_with("http") => PackageIndex::Pip,
        Some(address) => PackageIndex::Address(address),
        None => PackageIndex::Release,
    }
}

/// pip's files, in the order that pip reads them; most do not exist.
fn files(text: &dyn Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let named = text("PIP_CONFIG_FILE");
    if named.as_deref() == Some("/dev/null") {
        return Vec::new();
    }
    let home = text("HOME");
    let of_user = USER
        .iter()
        .filter_map(|file| Some(Path::new(home.as_ref()?).join(file)));
    let config = text("XDG_CONFIG_HOME").map(|folder| Path::new(&folder).join("pip/pip.conf"));
    let active = text("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("pip.conf"));
    let machine = MACHINE.iter().map(PathBuf::from);
    let own = of_user.chain(config).chain(active);
    machine.chain(own).chain(named.map(PathBuf::from)).collect()
}

fn read(path: &Path) -> Option<String> {
    let meta = std::fs::metadata(path).ok()?;
    let fits = meta.is_file() && meta.len() <= FILE_BYTES_MAX;
    fits.then(|| std::fs::read_to_string(path).ok())?
}

/// The value of `key` in a file: of section `download`, else of `global`.
fn value(file: &str, key: &str) -> Option<String> {
    let (mut section, mut found) = ("", [None, None]);
    for line in file.lines().map(str::trim) {
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            section = name;
            continue;
        }
        let Some((name, value)) = line.split_once(['=', ':']) else {
            continue;
        };
        let place = ["download", "global"].iter().position(|it| *it == section);
        let same = name.trim().to_lowercase().replace('_', "-") == key;
        if let Some(place) = place.filter(|_| same) {
            found[place] = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        }
    }
    found.into_iter().flatten().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(variables: &[(&str, &str)], files: &[&str]) -> PackageIndex {
        let text = |name: &str| {
            let given = variables.iter().find(|(given, _)| *given == name)?;
            Some(given.1.to_owned())
        };
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        choose(&text, &files)
    }

    #[test]
    fn the_index_is_the_one_that_pip_would_ask() {
        let address = |text: &str| PackageIndex::Address(text.into());
        let both =
            "[global]\nindex-url = http://a/simple\n[download]\nindex_url: http://b/simple\n";
        for (variables, files, expected) in [
            (&[][..], &[][..], PackageIndex::Release),
            (&[], &[both], address("http://b/simple")),
            (
                &[],
                &[
                    "[global]\nindex-url = http://a",
                    "[global]\nindex-url = http://b",
                ],
                address("http://b"),
            ),
            (
                &[("PIP_INDEX_URL", "http://c")],
                &[both],
                address("http://c"),
            ),
            (&[("PIP_NO_INDEX", "1")], &[both], PackageIndex::Pip),
            (
                &[("PIP_NO_INDEX", "0")],
                &[both],
                address("http://b/simple"),
            ),
            (&[], &["[global]\nno_index = true"], PackageIndex::Pip),
            (
                &[],
                &["[global]\nindex-url=http://u:p@a/simple"],
                PackageIndex::Pip,
            ),
        ] {
            assert_eq!(index(variables, files), expected, "{variables:?} {files:?}");
        }
    }

    #[test]
    fn other_sections_and_keys_do_not_count() {
        assert_eq!(
            value("index-url = x\n[install]\nindex-url = y", "index-url"),
            None
        );
        assert_eq!(value("[global]\nextra-index-url = x", "index-url"), None);
        assert_eq!(
            value("[global]\n# index-url = x\nindex-url =", "index-url"),
            None
        );
        let no_files = [("PIP_CONFIG_FILE".to_owned(), "/dev/null".to_owned())];
        let text = |name: &str| {
            let found = no_files.iter().find(|(given, _)| given == name);
            found.map(|(_, value)| value.clone())
        };
        assert!(files(&text).is_empty());
    }
}
