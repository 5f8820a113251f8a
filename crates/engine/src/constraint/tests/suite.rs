//! The JSON-Schema test suite, if it is installed.
//!
//! `cargo xtask models` installs it: the folder `json/tests` of the source package of pip's
//! `jsonschema` (4.26.0). `PACELINE_JSON_SCHEMA_SUITE` overrides the path.
//!
//! A schema that is not refused is claimed. The grammar of a claimed schema must allow every valid
//! document and no invalid one. Exceptions are listed by name below; a missing or superfluous name
//! fails the test.

use std::collections::BTreeMap;
use std::path::PathBuf;

use paceline_text::grammar::strict;
use serde_json::Value as Json;

use super::*;

/// Schemas that are refused, by the keyword that the refusal names.
const REFUSED: [(&str, usize); 15] = [
    ("$dynamicRef", 12),
    ("contains", 18),
    ("dependentRequired", 4),
    ("dependentSchemas", 7),
    ("else", 2),
    ("if", 17),
    ("maxContains", 1),
    ("minContains", 1),
    ("not", 12),
    ("oneOf", 8),
    ("propertyNames", 8),
    ("then", 3),
    ("unevaluatedItems", 22),
    ("unevaluatedProperties", 35),
    ("uniqueItems", 3),
];

/// Maximum refused schemas, by keyword or by the compiler: references to other documents,
/// `patternProperties` that overlap, and schemas without a valid document. Counted on
/// 2026-11-26 with `llguidance` 1.9.1.
const MAX_REFUSED: usize = 207;

/// Values with several spellings (JSON Schema core 4.2.2: numbers are compared as numbers, objects
/// without order). The grammar has one of them, which must pass.
const SPELT_OTHERWISE: [&str; 10] = [
    "const with -2.0 matches integer and float types / float -2.0 is valid",
    "const with 0 does not match other zero-like types / float zero is valid",
    "const with 1 does not match true / float one is valid",
    "const with object / same object with different property order is valid",
    "enum with 0 does not match false / float zero is valid",
    "enum with 1 does not match true / float one is valid",
    "enum with [0] does not match [false] / [0.0] is valid",
    "enum with [1] does not match [true] / [1.0] is valid",
    "float and integers are equal up to 64-bit representation limits / float is valid",
    "integer type matches integers / a float with zero fractional part is an integer",
];

/// Valid documents that are masked without a claim. Formats are enforced, which the specification
/// allows (validation 7.2.1). A dialect named by `$schema` is not fetched.
const NOT_CLAIMED: [&str; 11] = [
    "date format / invalid date string is only an annotation by default",
    "date-time format / invalid date-time string is only an annotation by default",
    "duration format / invalid duration string is only an annotation by default",
    "email format / invalid email string is only an annotation by default",
    "hostname format / invalid hostname string is only an annotation by default",
    "ipv4 format / invalid ipv4 string is only an annotation by default",
    "ipv6 format / invalid ipv6 string is only an annotation by default",
    "schema that uses custom metaschema with with no validation vocabulary / no validation: \
     invalid number, but it still validates",
    "time format / invalid time string is only an annotation by default",
    "uri format / invalid uri string is only an annotation by default",
    "uuid format / invalid uuid string is only an annotation by default",
];

/// Enforced formats: files of `optional/format`.
const FORMATS: [&str; 10] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
];

/// Invalid texts of an enforced format that are allowed: the compiler's expressions cannot express
/// leap years, nor the minutes with a leap second.
const LET_THROUGH: [&str; 14] = [
    "validation of date strings / 2021 is not a leap year",
    "validation of date strings / a invalid date string with 29 days in February (normal)",
    "validation of date-time strings / an invalid date-time with leap second on a wrong hour, UTC",
    "validation of date-time strings / an invalid date-time with leap second on a wrong minute, \
     UTC",
    "validation of time strings / an invalid time string with invalid leap second (wrong hour)",
    "validation of time strings / an invalid time string with invalid leap second (wrong minute)",
    "validation of time strings / invalid leap second, Zulu (wrong hour)",
    "validation of time strings / invalid leap second, Zulu (wrong minute)",
    "validation of time strings / invalid leap second, negative time-offset (wrong hour)",
    "validation of time strings / invalid leap second, negative time-offset (wrong minute)",
    "validation of time strings / invalid leap second, positive time-offset (wrong hour)",
    "validation of time strings / invalid leap second, positive time-offset (wrong minute)",
    "validation of time strings / invalid leap second, zero time-offset (wrong hour)",
    "validation of time strings / invalid leap second, zero time-offset (wrong minute)",
];

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
        for names in [
            &mut self.spelt_otherwise,
            &mut self.masked,
            &mut self.let_through,
        ] {
            names.sort();
        }
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
            entries
                .into_iter()
                .map(|(k, v)| (k.clone(), sorted(v, names)))
                .collect()
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
        let groups = groups.as_array().unwrap();
        groups
            .iter()
            .for_each(|group| check(&grammars, &tokenizer, group, &mut tally));
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
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    let tally = check_files(&files);
    assert_eq!(tally.masked, NOT_CLAIMED);
    assert_eq!(tally.spelt_otherwise, SPELT_OTHERWISE);
    assert_eq!(tally.let_through, [""; 0]);
    let refused = REFUSED.map(|(keyword, n)| (keyword.to_owned(), n));
    assert_eq!(tally.keywords, BTreeMap::from(refused));
    assert!(tally.refused <= MAX_REFUSED, "{}", tally.refused);
    assert!(tally.passed > 300, "{}", tally.passed);
}

#[test]
fn the_formats_of_the_json_schema_suite() {
    let Some(folder) = folder("the_formats_of_the_json_schema_suite") else {
        return;
    };
    let file = |name: &str| folder.join(format!("optional/format/{name}.json"));
    let tally = check_files(&FORMATS.map(file));
    assert_eq!(tally.masked, [""; 0]);
    assert_eq!(tally.spelt_otherwise, [""; 0]);
    assert_eq!(tally.let_through, LET_THROUGH);
    assert_eq!(tally.refused, 0);
}
