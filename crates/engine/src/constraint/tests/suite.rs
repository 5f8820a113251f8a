//! The JSON-Schema test suite, where it is on this machine.
//!
//! `cargo xtask models` brings it: the folder `json/tests` of the source package of pip's
//! `jsonschema` (4.26.0). `PACELINE_JSON_SCHEMA_SUITE` may name another.

use std::path::PathBuf;

use paceline_formats::grammar::strict;
use serde_json::Value as Json;

use super::*;

/// What came of the cases of a draft.
#[derive(Debug, Default)]
struct Tally {
    schemas: usize,
    /// Schemas that are refused by name, or that the compiler refuses.
    refused: usize,
    passed: usize,
    /// Valid documents that did not pass.
    masked: Vec<String>,
    /// Invalid documents that passed.
    let_through: Vec<String>,
}

/// The order in which a schema names its properties, which is the order in which the compiler
/// wants them.
fn order(schema: &Json, names: &mut Vec<String>) {
    match schema {
        Json::Object(map) => {
            let properties = map.get("properties").and_then(Json::as_object);
            names.extend(properties.into_iter().flat_map(|p| p.keys().cloned()));
            let required = map.get("required").and_then(Json::as_array);
            let required = required.into_iter().flatten().filter_map(Json::as_str);
            names.extend(required.map(str::to_owned));
            map.values().for_each(|inner| order(inner, names));
        }
        Json::Array(items) => items.iter().for_each(|inner| order(inner, names)),
        _ => {}
    }
}

fn sorted(document: &Json, names: &[String]) -> Json {
    match document {
        Json::Object(map) => {
            let mut entries: Vec<(&String, &Json)> = map.iter().collect();
            let place = |name: &String| names.iter().position(|n| n == name).unwrap_or(usize::MAX);
            entries.sort_by_key(|(name, _)| place(name));
            entries
                .into_iter()
                .map(|(k, v)| (k.clone(), sorted(v, names)))
                .collect()
        }
        Json::Array(items) => items.iter().map(|item| sorted(item, names)).collect(),
        other => other.clone(),
    }
}

fn check(grammars: &Grammars, tokenizer: &Tokenizer, group: &Json, tally: &mut Tally) {
    let schema = &group["schema"];
    tally.schemas += 1;
    let constraint = whole(Grammar::JsonSchema(schema.to_string()));
    if strict(schema).is_err() || grammars.check(&constraint).is_err() {
        tally.refused += 1;
        return;
    }
    let mut names = Vec::new();
    order(schema, &mut names);
    for test in group["tests"].as_array().unwrap() {
        let document = sorted(&test["data"], &names).to_string();
        let passed = passes(grammars, tokenizer, &constraint, &document) == Some(true);
        let is_valid = test["valid"] == true;
        let name = || {
            format!(
                "{} / {}: {schema} {document}",
                group["description"], test["description"]
            )
        };
        match (is_valid, passed) {
            (true, false) => tally.masked.push(name()),
            (false, true) => tally.let_through.push(name()),
            _ => tally.passed += 1,
        }
    }
}

#[test]
fn the_json_schema_suite() {
    let named = std::env::var_os("PACELINE_JSON_SCHEMA_SUITE").map(PathBuf::from);
    let models = crate::engine::tests::smollm2::folder();
    let folder = named.unwrap_or_else(|| models.join("json-schema-suite"));
    if !folder.is_dir() {
        let folder = folder.display();
        eprintln!("SKIPPED the_json_schema_suite: {folder} is not there");
        return;
    }
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    let mut tally = Tally::default();
    let mut files: Vec<_> = std::fs::read_dir(folder.join("draft2020-12"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    for file in files {
        let groups: Json = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let groups = groups.as_array().unwrap();
        groups
            .iter()
            .for_each(|group| check(&grammars, &tokenizer, group, &mut tally));
    }
    eprintln!(
        "{} schemas, {} refused, {} documents as expected",
        tally.schemas, tally.refused, tally.passed
    );
    eprintln!(
        "valid and masked: {}\n{}",
        tally.masked.len(),
        tally.masked.join("\n")
    );
    eprintln!(
        "invalid and let through: {}\n{}",
        tally.let_through.len(),
        tally.let_through.join("\n")
    );
    assert!(tally.passed > 300, "{}", tally.passed);
}
