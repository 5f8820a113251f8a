//! Looks whether the hub has what the usual names of models mean, and notes what it has.
//!
//! It needs a network. An entry that the hub does not have keeps its text, and the
//! command fails at its end, so that a person mends the list.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use paceline_store::{Error, Hub, HubFiles, PullOptions, UsualName, look_up, parse_usual_names};

use crate::repo;

/// The list, relative to the repository's root.
const LIST: &str = "crates/store/data/usual-names.json";

/// Prints the list; with `check`, compares it with the hub and writes down what that has.
pub(crate) fn run(check: bool) -> Result<()> {
    let path = repo::root().join(LIST);
    let mut names = read(&path)?;
    if !check {
        print!("{}", table(&names));
        return Ok(());
    }
    let options = options();
    let failed = compare(&mut names, |usual| look_up(&usual.hub, &options));
    std::fs::write(&path, text(&names)?).with_context(|| format!("writing {LIST}"))?;
    print!("{}", table(&names));
    for (name, error) in &failed {
        println!("{name}: {error}");
    }
    ensure!(
        failed.is_empty(),
        "{} names are not on the hub as the list has them",
        failed.len()
    );
    Ok(())
}

fn options() -> PullOptions {
    let endpoint =
        std::env::var("HF_ENDPOINT").unwrap_or_else(|_| Hub::DEFAULT_ENDPOINT.to_owned());
    PullOptions {
        hub: Hub {
            endpoint,
            ..Hub::default()
        },
        ..PullOptions::default()
    }
}

fn read(path: &Path) -> Result<Vec<UsualName>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {LIST}"))?;
    parse_usual_names(&text).with_context(|| format!("reading {LIST}"))
}

/// Notes what the hub has under each name; the names that it lacks, with why.
fn compare(
    names: &mut [UsualName],
    mut ask: impl FnMut(&UsualName) -> Result<HubFiles, Error>,
) -> Vec<(String, Error)> {
    let mut failed = Vec::new();
    for usual in names {
        match ask(usual) {
            Ok(on_hub) => usual.checked = Some(on_hub),
            Err(error) => failed.push((usual.name.clone(), error)),
        }
    }
    failed
}

/// A name a line, as people edit it.
fn text(names: &[UsualName]) -> Result<String> {
    let lines: Result<Vec<String>, _> = names.iter().map(serde_json::to_string).collect();
    let lines: Vec<String> = lines?.iter().map(|line| format!("  {line}")).collect();
    Ok(format!("[\n{}\n]\n", lines.join(",\n")))
}

fn table(names: &[UsualName]) -> String {
    let mut table = String::new();
    for usual in names {
        let state = usual.checked.as_ref();
        let state = state.map_or_else(
            || "not checked".to_owned(),
            |on_hub| on_hub.size().to_string(),
        );
        writeln!(table, "{:24} {state:>12}  {}", usual.name, usual.hub).expect("text takes all");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_hub_has_is_noted_and_what_it_lacks_is_told() {
        let mut names = read(&repo::root().join(LIST)).unwrap();
        let before = names[1].checked.clone();
        let failed = compare(&mut names[..2], |usual| match usual.name.as_str() {
            "qwen3:0.6b" => Ok(HubFiles {
                commit: "0".repeat(40),
                files: vec!["a.gguf".to_owned()],
                bytes: 5 << 20,
            }),
            name => Err(Error::UnknownModel {
                spec: name.to_owned(),
                close: Vec::new(),
            }),
        });
        assert_eq!(names[0].checked.as_ref().unwrap().bytes, 5 << 20);
        assert_eq!(names[1].checked, before);
        assert_eq!(failed.len(), 1);
        let written = text(&names).unwrap();
        assert_eq!(parse_usual_names(&written).unwrap(), names);
        assert!(table(&names).contains("5.0 MiB"));
    }
}
