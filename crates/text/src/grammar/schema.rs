//! A JSON schema as the grammar compiler takes it.
//!
//! The compiler (`llguidance`) refuses keywords that it does not know. Some of them say nothing
//! about validity and are left out: `$` keywords, vendors' extensions, annotations. The others are
//! reported by name and place, so that the caller can refuse them or warn that they are ignored.

use serde_json::{Map, Value as Json, json};

use super::exclusive::SchemaComparison;
use super::format;

/// A keyword that limits what is valid, and that the compiler cannot follow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "schema keyword {keyword:?} at {place} is not supported{}",
    advice(keyword)
)]
pub struct Unsupported {
    pub keyword: String,
    /// JSON pointer of the schema that has it; `#` is the whole.
    pub place: String,
}

fn advice(keyword: &str) -> &'static str {
    match keyword {
        ONE_OF => {
            ", as a document may match two of its schemas: use anyOf, or require a property whose \
             constant differs in each"
        }
        _ => "",
    }
}

const ONE_OF: &str = "oneOf";
const ANY_OF: &str = "anyOf";

/// Keywords that limit what is valid, and that `llguidance` 1.9 cannot follow.
const UNSUPPORTED: [&str; 19] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
    "disallow",
    "divisibleBy",
];

/// Keywords that `llguidance` follows, and `$` keywords that it looks at.
const KEPT: [&str; 33] = [
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "const",
    "enum",
    "type",
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "id",
    "$anchor",
];

/// Keywords whose value is a schema.
const SCHEMAS: [&str; 3] = ["additionalProperties", "additionalItems", "items"];
/// Keywords whose value is a list of schemas.
const LISTS: [&str; 5] = ["anyOf", "oneOf", "allOf", "prefixItems", "items"];
/// Keywords whose value is an object of schemas.
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Formats that are followed; others are annotations. The specification (2020-12, validation 7.2.1)
/// allows both.
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// White space between two tokens of JSON. It has up to 20 bytes, as between the parts of a call,
/// or a line end and 40 blanks (ten levels of four). Without a bound small models write nothing
/// else.
const SPACE: &str = r"[ \n\r\t]{1,20}|\n {1,40}";

/// Options of the compiler, in the schema itself.
const OPTIONS: &str = "x-guidance";

/// Deepest nesting.
const MAX_DEPTH: usize = 64;

/// `schema` without what says nothing, for answers that must be valid.
///
/// # Errors
/// [`Unsupported`] for the first keyword that cannot be followed.
pub fn strict(schema: &Json) -> Result<Json, Unsupported> {
    let (schema, dropped) = clean_all(schema);
    dropped.into_iter().next().map_or(Ok(schema), Err)
}

/// `schema` without keywords that say nothing and without those that cannot be followed, and a list
/// of the latter. A document that matches it may be invalid.
pub fn relaxed(schema: &Json) -> (Json, Vec<Unsupported>) {
    let (mut schema, mut dropped) = clean_all(schema);
    // It is there as `anyOf`.
    dropped.retain(|one| one.keyword != ONE_OF);
    if let Json::Object(map) = &mut schema {
        // Reads unknown keywords as no constraint.
        map.insert(OPTIONS.into(), json!({"lenient": true}));
    }
    dropped.truncate(MAX_TOLD);
    (schema, dropped)
}

/// `schema`, which [`strict`] or [`relaxed`] gave, for the compiler. White space between the tokens
/// of its documents is bounded.
pub fn compilable(schema: &Json) -> Json {
    let mut schema = match schema {
        Json::Bool(true) => json!({}),
        other => other.clone(),
    };
    if let Json::Object(map) = &mut schema {
        let options = map.entry(OPTIONS).or_insert_with(|| json!({}));
        options["whitespace_pattern"] = SPACE.into();
    }
    schema
}

/// Most unsupported keywords that are reported.
const MAX_TOLD: usize = 16;

fn clean_all(schema: &Json) -> (Json, Vec<Unsupported>) {
    let mut dropped = Vec::new();
    let comparison = SchemaComparison::new(schema);
    let schema = clean(schema, (&comparison, "#"), 0, &mut dropped);
    (schema, dropped)
}

/// `schema` at a place of the schema that the comparison is of.
fn clean(
    schema: &Json,
    (comparison, place): (&SchemaComparison<'_>, &str),
    depth: usize,
    dropped: &mut Vec<Unsupported>,
) -> Json {
    let Json::Object(map) = schema else {
        return schema.clone();
    };
    let mut drop = |keyword: &str| {
        let (keyword, place) = (keyword.to_owned(), place.to_owned());
        dropped.push(Unsupported { keyword, place });
    };
    if depth > MAX_DEPTH {
        drop("properties");
        return json!({});
    }
    map.iter()
        .filter(|(key, value)| is_limit(key, value))
        .for_each(|(key, _)| drop(key));
    let arms = map.get(ONE_OF).and_then(Json::as_array);
    if arms.is_some_and(|arms| !comparison.excludes_all(arms)) {
        drop(ONE_OF);
    }
    let kept = map.iter().filter(|(key, value)| is_kept(key, value));
    let clean = kept.map(|(key, value)| {
        let place = format!("{place}/{key}");
        (
            key.clone(),
            clean_value(key, value, (comparison, &place), depth + 1, dropped),
        )
    });
    let mut clean: Map<String, Json> = clean.collect();
    one_of_to_any_of(&mut clean);
    complete_format(&mut clean);
    Json::Object(clean)
}

/// Makes `oneOf` an `anyOf`, which is the same where the arms exclude each other.
fn one_of_to_any_of(schema: &mut Map<String, Json>) {
    let Some(arms) = schema.swap_remove(ONE_OF) else {
        return;
    };
    if !schema.contains_key(ANY_OF) {
        schema.insert(ANY_OF.into(), arms);
        return;
    }
    let all = schema.entry("allOf").or_insert_with(|| json!([]));
    if let Json::Array(all) = all {
        all.push(json!({ANY_OF: arms}));
    }
}

/// Puts a pattern in place of a format that the compiler knows only in part.
fn complete_format(schema: &mut Map<String, Json>) {
    let name = schema.get("format").and_then(Json::as_str);
    let Some(pattern) = name.and_then(format::pattern) else {
        return;
    };
    schema.remove("format");
    if !schema.contains_key("pattern") {
        schema.insert("pattern".into(), pattern.into());
        return;
    }
    let all = schema.entry("allOf").or_insert_with(|| json!([]));
    if let Json::Array(all) = all {
        all.push(json!({"pattern": pattern}));
    }
}

fn clean_value(
    key: &str,
    value: &Json,
    (comparison, place): (&SchemaComparison<'_>, &str),
    depth: usize,
    dropped: &mut Vec<Unsupported>,
) -> Json {
    match value {
        Json::Object(map) if MAPS.contains(&key) => {
            let mut out = Map::new();
            for (name, inner) in map {
                let inner = clean(
                    inner,
                    (comparison, &format!("{place}/{name}")),
                    depth,
                    dropped,
                );
                out.insert(name.clone(), inner);
            }
            out.into()
        }
        Json::Array(items) if LISTS.contains(&key) => {
            let items = items.iter().enumerate();
            let mut item =
                |(i, inner)| clean(inner, (comparison, &format!("{place}/{i}")), depth, dropped);
            items.map(&mut item).collect()
        }
        Json::Object(_) if SCHEMAS.contains(&key) => {
            clean(value, (comparison, place), depth, dropped)
        }
        other => other.clone(),
    }
}

/// Whether a keyword limits what is valid in a way that cannot be followed.
fn is_limit(key: &str, value: &Json) -> bool {
    let says_nothing = key == "uniqueItems" && *value == Json::Bool(false);
    UNSUPPORTED.contains(&key) && !says_nothing
}

fn is_kept(key: &str, value: &Json) -> bool {
    let is_annotation = key == "format" && !value.as_str().is_some_and(|f| FORMATS.contains(&f));
    KEPT.contains(&key) && !is_annotation
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_nothing_is_left_out() {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$comment": "c", "title": "t", "description": "d", "default": {}, "x-order": 1,
            "deprecated": true, "markdownDescription": "m", "uniqueItems": false,
            "type": "object",
            "properties": {
                "not": {"type": "string", "format": "color", "examples": ["a"]},
                "if": {"type": "integer", "maximum": 9007199254740991u64},
            },
            "additionalProperties": false,
        });
        let expected = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "not": {"type": "string"},
                "if": {"type": "integer", "maximum": 9007199254740991u64},
            },
            "additionalProperties": false,
        });
        assert_eq!(strict(&schema), Ok(expected));
    }

    #[test]
    fn limits_that_cannot_be_kept_are_named() {
        let schema = json!({"anyOf": [
            {"type": "array", "items": {"not": {"type": "null"}}, "uniqueItems": true},
            {"properties": {"a": {"if": true}}},
        ]});
        let error = strict(&schema).unwrap_err();
        assert_eq!(
            error.to_string(),
            "schema keyword \"uniqueItems\" at #/anyOf/0 is not supported"
        );
        let (relaxed, dropped) = relaxed(&schema);
        let named: Vec<&str> = dropped.iter().map(|d| d.keyword.as_str()).collect();
        assert_eq!(named, ["uniqueItems", "not", "if"]);
        let expected = json!({
            "anyOf": [{"type": "array", "items": {}}, {"properties": {"a": {}}}],
            "x-guidance": {"lenient": true},
        });
        assert_eq!(relaxed, expected);
    }

    #[test]
    fn arms_that_exclude_each_other_are_any_of() {
        let tagged = |tag: &str| {
            json!({"properties": {"t": {"const": tag}}, "required": ["t"],
            "type": "object"})
        };
        let union = json!({"oneOf": [tagged("a"), tagged("b")], "discriminator": {}});
        let expected = json!({"anyOf": [tagged("a"), tagged("b")]});
        assert_eq!(strict(&union), Ok(expected.clone()));
        let both = json!({"oneOf": [tagged("a"), tagged("b")], "anyOf": [{}]});
        let all = json!({"anyOf": [{}], "allOf": [expected]});
        assert_eq!(strict(&both), Ok(all));
        let overlap = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
        let error = strict(&overlap).unwrap_err().to_string();
        assert!(
            error.contains("\"oneOf\" at #") && error.contains("anyOf"),
            "{error}"
        );
        let (relaxed, dropped) = relaxed(&overlap);
        assert!(
            dropped.is_empty() && relaxed["anyOf"].is_array(),
            "{relaxed}"
        );
    }

    #[test]
    fn a_format_that_is_known_in_part_becomes_a_pattern() {
        let email = format::pattern("email").unwrap();
        let schema = json!({"properties": {
            "a": {"type": "string", "format": "email"},
            "b": {"format": "email", "pattern": "com$"},
            "c": {"format": "date"},
        }});
        let expected = json!({"properties": {
            "a": {"type": "string", "pattern": email},
            "b": {"pattern": "com$", "allOf": [{"pattern": email}]},
            "c": {"format": "date"},
        }});
        assert_eq!(strict(&schema), Ok(expected.clone()));
        assert_eq!(strict(&expected), Ok(expected), "cleaned twice");
    }

    #[test]
    fn endless_nesting_ends() {
        let mut schema = json!({"type": "string"});
        for _ in 0..100 {
            schema = json!({"items": schema});
        }
        assert!(strict(&schema).is_err());
    }
}
