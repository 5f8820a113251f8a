//! The rule on copies of the layer table: all say what [`super::layers`] says.
//!
//! The copies are the picture and the code map of ARCHITECTURE.md, and the table of
//! crates/README.md, which leaves `xtask` out. Each is read into the layer of each name, as the
//! copy writes it, and compared with the table.

use std::collections::BTreeMap;

use super::TidyFinding;

/// The layer of each crate, `0` to `6` or `dev`.
pub(crate) type LayerTable = BTreeMap<String, String>;

/// Findings where a copy differs from `table`; the texts are those of the two pages.
pub(crate) fn check(table: &LayerTable, architecture: &str, readme: &str) -> Vec<TidyFinding> {
    let mut crates = table.clone();
    crates.remove("xtask");
    let (map, folders) = ("ARCHITECTURE.md", "crates/README.md");
    let mut findings = compare(map, "the picture", table, &picture(architecture));
    findings.extend(compare(map, "the code map", table, &rows(architecture)));
    findings.extend(compare(folders, "the table", &crates, &rows(readme)));
    findings
}

/// A finding for each crate that `copy` lacks, has too many or has in another layer.
fn compare(page: &str, part: &str, table: &LayerTable, copy: &LayerTable) -> Vec<TidyFinding> {
    let names = table
        .keys()
        .chain(copy.keys().filter(|name| !table.contains_key(*name)));
    let differs = |name: &&String| table.get(*name) != copy.get(*name);
    let say = |name: &String| {
        let layer = |table: &LayerTable| {
            table
                .get(name)
                .map_or("no layer".into(), |l| format!("layer {l}"))
        };
        let message = format!(
            "{part} gives `{name}` {}, tidy's table {}",
            layer(copy),
            layer(table)
        );
        TidyFinding::error(page, 1, "layer-copy", message)
    };
    names.filter(differs).map(say).collect()
}

/// Crates in the picture: lines such as `L1  [tensor]  [mlx]`, and `dev [sim]`.
fn picture(text: &str) -> LayerTable {
    let mut found = LayerTable::new();
    for line in text.lines().filter(|line| line.contains('[')) {
        let mut words = line.split_whitespace();
        let Some(layer) = words.next().and_then(layer_of) else {
            continue;
        };
        let boxed = words.map_while(|word| word.strip_prefix('[')?.strip_suffix(']'));
        found.extend(boxed.map(|name| (name.to_string(), layer.clone())));
    }
    found
}

/// `2` for `L2`, `dev` for itself.
fn layer_of(word: &str) -> Option<String> {
    let level = word
        .strip_prefix('L')
        .filter(|level| level.parse::<u8>().is_ok());
    level.or((word == "dev").then_some("dev")).map(String::from)
}

/// Crates in a table whose first cell names the crate and whose second says its layer.
fn rows(text: &str) -> LayerTable {
    let row = |line: &str| {
        let mut cells = line.trim().strip_prefix('|')?.split('|').map(str::trim);
        let (name, layer) = (cells.next()?, cells.next()?);
        let name = name
            .trim_start_matches('[')
            .strip_prefix('`')?
            .split('`')
            .next()?;
        let layer = match layer {
            "development" | "dev" => "dev",
            level => level.parse::<u8>().ok().map(|_| level)?,
        };
        let name = name.strip_prefix("crates/").unwrap_or(name);
        Some((name.to_string(), layer.to_string()))
    };
    text.lines().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "```\n L1  [tensor]  [comm]  kernels; see [x]\n L0  [base]  types\n \
                        dev [xtask] [sim]  chores\n```\n\n| crate | layer | what |\n|---|---|---|\n\
                        | `crates/base` | 0 | types |\n| `crates/tensor` | 1 | kernels |\n\
                        | `crates/comm` | 1 | groups |\n| `crates/sim` | dev | clusters |\n\
                        | `xtask` | dev | tidy |\n";

    const README: &str = "| crate | layer | in a sentence |\n|---|---|---|\n\
                          | [`base`](base/src/lib.rs) | 0 | Types. |\n\
                          | [`tensor`](tensor/src/lib.rs) | 1 | Kernels. |\n\
                          | [`comm`](comm/src/lib.rs) | 1 | Groups. |\n\
                          | [`sim`](sim/src/lib.rs) | development | Clusters. |\n";

    fn table() -> LayerTable {
        let layers = [
            ("base", "0"),
            ("tensor", "1"),
            ("comm", "1"),
            ("sim", "dev"),
            ("xtask", "dev"),
        ];
        let owned = layers
            .iter()
            .map(|(name, layer)| (name.to_string(), layer.to_string()));
        owned.collect()
    }

    fn messages(page: &str, readme: &str) -> Vec<String> {
        let findings = check(&table(), page, readme);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn equal_copies_are_read_whole() {
        assert_eq!(picture(PAGE), table());
        assert_eq!(rows(PAGE), table());
        assert_eq!(messages(PAGE, README), Vec::<String>::new());
    }

    #[test]
    fn each_copy_is_compared() {
        let cases = [
            (
                PAGE.replace("[comm]  kernels", "kernels"),
                README.to_string(),
                "the picture gives `comm` no layer",
            ),
            (
                PAGE.replace("[sim]", "[sim] [old]"),
                README.to_string(),
                "the picture gives `old` layer dev",
            ),
            (
                PAGE.replace("tensor` | 1", "tensor` | 2"),
                README.to_string(),
                "the code map gives `tensor` layer 2",
            ),
            (
                PAGE.to_string(),
                README.replace("| 0 |", "| 1 |"),
                "README.md:1: layer-copy: the table gives `base` layer 1",
            ),
            (
                PAGE.to_string(),
                README.replace("development", "3"),
                "gives `sim` layer 3, tidy's table layer dev",
            ),
        ];
        for (page, readme, expected) in cases {
            let found = messages(&page, &readme);
            assert_eq!(found.len(), 1, "{expected}: {found:?}");
            assert!(found[0].contains(expected), "{found:?}");
        }
    }
}
