//! The JSON-Schema test suite, if it is installed.
//!
//! `cargo xtask models` installs it: the folder `json/tests` of the source package of pip's
//! `jsonschema` (4.26.0). `PACELINE_JSON_SCHEMA_SUITE` overrides the path.
//!
//! A schema that is not refused is claimed. The grammar of a claimed schema must allow every valid
//! document and no invalid one. Exceptions are listed by name; a missing or superfluous name fails
//! the test.

use std::collections::BTreeMap;
use std::path::PathBuf;

use paceline_text::grammar::strict;
use serde_json::{Value as Json, json};

use super::*;

/// Cases of the schema suite that the grammars do not claim, by name:
///
/// - `refused`: schemas by the keyword that the refusal names.
/// - `spelt_otherwise`: values with several spellings (JSON Schema core 4.2.2: numbers are compared
///   as numbers, objects without order). The grammar has one of them, which must pass.
/// - `not_claimed`: valid documents that are masked. Formats are enforced, which the specification
///   allows (validation 7.2.1). A dialect named by `$schema` is not fetched.
/// - `let_through`: invalid texts of an enforced format. The compiler's expressions cannot express
///   leap years, nor the minutes with a leap second.
fn known() -> Json {
    serde_json::from_str(include_str!("suite.json")).unwrap()
}

/// Maximum refused schemas, by keyword or by the compiler: references to other documents,
/// `patternProperties` that overlap, and schemas without a valid document. Counted on
/// 2026-11-26 with `llguidance` 1.9.1.
const MAX_REFUSED: usize = 207;

/// Enforced formats: files of `optional/format`.
const FORMATS: &str = "date date-time duration email hostname ipv4 ipv6 time uri uuid";

/// Results of the cases of some files.
#[derive(Debug, Default)]
struct SuiteCounts {
    schemas: usize,
    /// Schemas refused by name or by the compiler.
    refused: usize,
    /// Of these, by keyword.
    keywords: BTreeMap<String, usize>,
    passed: usize,
    /// Valid documents allowed in another spelling only.
    spelt_otherwise: Vec<String>,
    /// Valid documents that are not allowed.
    masked: Vec<String>,
    /// Invalid documents that are allowed.
    let_through: Vec<String>,
}

impl SuiteCounts {
    fn refuse(&mut self, schema: &Json) {
        self.refused += 1;
        if let Err(refused) = strict(schema) {
            *self.keywords.entry(refused.keyword).or_default() += 1;
        }
    }

    fn sort(&mut self) {
        self.spelt_otherwise.sort();
        self.masked.sort();
        self.let_through.sort();
    }
}

/// Property names in the order of the schema, which the compiler requires.
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
            let of = |(name, value): (&String, &Json)| (name.clone(), sorted(value, names));
            entries.into_iter().map(of).collect()
        }
        Json::Array(items) => items.iter().map(|item| sorted(item, names)).collect(),
        other => other.clone(),
    }
}

/// The names of the properties of all objects in a document.
fn names_in(document: &Json, names: &mut Vec<String>) {
    match document {
        Json::Object(map) => {
            names.extend(map.keys().cloned());
            map.values().for_each(|inner| names_in(inner, names));
        }
        Json::Array(items) => items.iter().for_each(|inner| names_in(inner, names)),
        _ => {}
    }
}

/// `document` as the grammar of a constant spells it: integers without a fraction, properties in
/// the order of the constant.
fn respelt(document: &Json, schema: &Json) -> Json {
    let mut names = Vec::new();
    for key in ["const", "enum"] {
        names_in(&schema[key], &mut names);
    }
    whole_numbers(&sorted(document, &names))
}

fn whole_numbers(document: &Json) -> Json {
    match document {
        // Every whole number of the suite is below 2^63.
        Json::Number(n) => match n.as_f64() {
            Some(f) if f.fract() == 0.0 && f.abs() < 9e18 => Json::from(f as i64),
            _ => document.clone(),
        },
        Json::Array(items) => items.iter().map(whole_numbers).collect(),
        Json::Object(map) => {
            let whole = map.iter().map(|(k, v)| (k.clone(), whole_numbers(v)));
            Json::Object(whole.collect())
        }
        other => other.clone(),
    }
}

fn check(grammars: &Grammars, tokenizer: &Tokenizer, group: &Json, tally: &mut SuiteCounts) {
    let schema = &group["schema"];
    tally.schemas += 1;
    let constraint = whole(Grammar::JsonSchema(schema.to_string()));
    if strict(schema).is_err() || grammars.check(&constraint).is_err() {
        tally.refuse(schema);
        return;
    }
    let mut names = Vec::new();
    order(schema, &mut names);
    let passes = |text: String| passes(grammars, tokenizer, &constraint, &text) == Some(true);
    for test in group["tests"].as_array().unwrap() {
        let document = sorted(&test["data"], &names);
        let is_valid = test["valid"] == true;
        let text = |json: &Json| json.as_str().unwrap().to_owned();
        let name = [text(&group["description"]), text(&test["description"])].join(" / ");
        match (is_valid, passes(document.to_string())) {
            (true, true) | (false, false) => tally.passed += 1,
            (false, true) => tally.let_through.push(name),
            (true, false) if passes(respelt(&document, schema).to_string()) => {
                tally.spelt_otherwise.push(name);
            }
            (true, false) => tally.masked.push(name),
        }
    }
}

/// The suite's folder for the supported draft, if installed.
fn folder(test: &str) -> Option<PathBuf> {
    let named = std::env::var_os("PACELINE_JSON_SCHEMA_SUITE").map(PathBuf::from);
    let models = crate::engine::tests::smollm2::folder();
    let folder = named.unwrap_or_else(|| models.join("json-schema-suite"));
    if folder.is_dir() {
        return Some(folder.join("draft2020-12"));
    }
    eprintln!("SKIPPED {test}: {} is not there", folder.display());
    None
}

fn check_files(files: &[PathBuf]) -> SuiteCounts {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    let mut tally = SuiteCounts::default();
    for file in files {
        let groups: Json = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        for group in groups.as_array().unwrap() {
            check(&grammars, &tokenizer, group, &mut tally);
        }
    }
    tally.sort();
    eprintln!(
        "{} schemas, {} refused, {} documents as expected",
        tally.schemas, tally.refused, tally.passed
    );
    tally
}

#[test]
fn the_json_schema_suite() {
    let Some(folder) = folder("the_json_schema_suite") else {
        return;
    };
    let files = std::fs::read_dir(folder).unwrap();
    let files = files.map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.is_file()).collect();
    files.sort();
    let tally = check_files(&files);
    let known = known();
    assert_eq!(json!(tally.masked), known["not_claimed"]);
    assert_eq!(json!(tally.spelt_otherwise), known["spelt_otherwise"]);
    assert_eq!(tally.let_through, [""; 0]);
    assert_eq!(json!(tally.keywords), known["refused"]);
    assert!(tally.refused <= MAX_REFUSED, "{}", tally.refused);
    assert!(tally.passed > 300, "{}", tally.passed);
}

#[test]
fn the_formats_of_the_json_schema_suite() {
    let Some(folder) = folder("the_formats_of_the_json_schema_suite") else {
        return;
    };
    let file = |name: &str| folder.join(format!("optional/format/{name}.json"));
    let files: Vec<_> = FORMATS.split(' ').map(file).collect();
    let tally = check_files(&files);
    assert_eq!(tally.masked, [""; 0]);
    assert_eq!(tally.spelt_otherwise, [""; 0]);
    assert_eq!(json!(tally.let_through), known()["let_through"]);
    assert_eq!(tally.refused, 0);
}
