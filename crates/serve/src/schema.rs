//! Request types. A type derives its JSON Schema, the schema checks the body, and serde reads it.
//! So the OpenAPI document, the checks and the types cannot differ.
//!
//! The schema decides how a field is treated:
//!
//! | the field | schema | so |
//! |---|---|---|
//! | changes the answer, implemented | bounds | honoured |
//! | changes the answer, not implemented | `enum`, `x-why` | 400 unless it asks for nothing |
//! | cannot change the answer | in a struct of `no_effect` | accepted |
//! | unknown | `additionalProperties: false` | 400, or a warning with `--lenient` |
//! | unknown, in an object that clients send back | no `additionalProperties` | a warning |
//!
//! `null` counts as absent, and `1.0` is an integer, as in JSON Schema.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::json::show;
use crate::rejection::Rejection;

/// Why a value that is not among the listed ones is not supported.
const WHY: &str = "x-why";

/// Strictness of the parser, and collected warnings for the client.
#[derive(Debug, Default)]
pub(crate) struct FieldWarnings {
    /// Whether unknown fields are ignored with a warning.
    pub(crate) is_lenient: bool,
    warnings: RefCell<Vec<String>>,
}

/// Maximum warnings of a response, and bytes of each: they are headers.
const MAX_WARNINGS: usize = 8;
const MAX_WARNING: usize = 200;

impl FieldWarnings {
    pub(crate) fn new(is_lenient: bool) -> Self {
        let warnings = RefCell::default();
        Self {
            is_lenient,
            warnings,
        }
    }

    /// Adds a warning, once.
    pub(crate) fn warn(&self, text: impl Into<String>) {
        let mut text: String = text.into();
        text.retain(|c| matches!(c, ' '..='~') && c != '"' && c != '\\');
        text.truncate(MAX_WARNING);
        let mut warnings = self.warnings.borrow_mut();
        if warnings.len() < MAX_WARNINGS && !warnings.contains(&text) {
            warnings.push(text);
        }
    }

    /// # Errors
    /// [`Rejection::Unknown`] in strict mode.
    fn unknown(&self, param: String) -> Result<(), Rejection> {
        if !self.is_lenient {
            return Err(Rejection::Unknown { param });
        }
        self.ignored(&param);
        Ok(())
    }

    fn ignored(&self, param: &str) {
        self.warn(format!("{param} is unknown and was ignored"));
    }

    pub(crate) fn into_warnings(self) -> Vec<String> {
        self.warnings.into_inner()
    }
}

/// The path of a value in the body, such as `messages[0].content`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SchemaPlace<'a> {
    Body,
    Field(&'a SchemaPlace<'a>, &'a str),
    Item(&'a SchemaPlace<'a>, usize),
}

impl fmt::Display for SchemaPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Body => Ok(()),
            Self::Field(Self::Body, name) => f.write_str(&clip(name)),
            Self::Field(outer, name) => write!(f, "{outer}.{}", clip(name)),
            Self::Item(outer, i) => write!(f, "{outer}[{i}]"),
        }
    }
}

/// The schema of `T`, generated once.
pub(crate) fn schema_of<T: JsonSchema + 'static>() -> &'static Value {
    static SCHEMAS: Mutex<BTreeMap<TypeId, &'static Value>> = Mutex::new(BTreeMap::new());
    let mut schemas = SCHEMAS.lock().unwrap_or_else(PoisonError::into_inner);
    let generate = || &*Box::leak(Box::new(generate::<T>()));
    schemas.entry(TypeId::of::<T>()).or_insert_with(generate)
}

fn generate<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    // Widths of Rust's integers are no limits of the API, and comments have lines.
    let plain = RecursiveTransform(|schema: &mut Schema| {
        schema.remove("format");
        schema.remove("title");
        if let Some(Value::String(text)) = schema.get_mut("description") {
            *text = text.replace('\n', " ");
        }
    });
    let generator = settings.with_transform(plain).into_generator();
    generator.into_root_schema_for::<T>().to_value()
}

/// Checks `body` by the schema of `T`, and reads it.
///
/// # Errors
/// The first field, in the body's order, that is invalid or unknown. Else the first missing one.
pub(crate) fn read<T: DeserializeOwned + JsonSchema + 'static>(
    body: Map<String, Value>,
    notes: &FieldWarnings,
) -> Result<T, Rejection> {
    let mut body = Value::Object(body);
    check(schema_of::<T>(), &mut body, SchemaPlace::Body, notes)?;
    serde_json::from_value(body).map_err(|error| Rejection::Invalid {
        reason: error.to_string(),
    })
}

/// Checks `value`; writes integers as such, and removes `null` and unknown fields.
fn check(
    schema: &'static Value,
    value: &mut Value,
    at: SchemaPlace<'_>,
    notes: &FieldWarnings,
) -> Result<(), Rejection> {
    if let Some(options) = options(schema) {
        return check(option(schema, options, value, at)?, value, at, notes);
    }
    if !is_kind(schema, value) {
        return Err(wrong_type(at.to_string(), value, describe(schema)));
    }
    check_listed(schema, value, at)?;
    match value {
        // Any value, with any content.
        _ if schema.get("type").is_none() => Ok(()),
        Value::String(text) => check_text(schema, text, at),
        Value::Number(_) => check_number(schema, value, at),
        Value::Array(items) => {
            check_length(schema, "Items", items.len(), "items", at)?;
            let Some(schema) = schema.get("items") else {
                return Ok(());
            };
            let mut items = items.iter_mut().enumerate();
            items.try_for_each(|(i, item)| check(schema, item, SchemaPlace::Item(&at, i), notes))
        }
        Value::Object(map) => check_object(schema, map, at, notes),
        Value::Null | Value::Bool(_) => Ok(()),
    }
}

/// The schemas; a value matches one.
fn options(schema: &'static Value) -> Option<&'static Vec<Value>> {
    schema.get("anyOf").or(schema.get("oneOf"))?.as_array()
}

/// The option that `value` has to match: the first of its type. Objects with a tag, which is a
/// constant, match by it; an option without one takes the other tags.
fn option(
    schema: &'static Value,
    options: &'static [Value],
    value: &Value,
    at: SchemaPlace<'_>,
) -> Result<&'static Value, Rejection> {
    let fits: Vec<&'static Value> = options.iter().filter(|one| is_kind(one, value)).collect();
    let alike = fits.iter().find(|one| is_like(one, value));
    let Some(first) = alike.or(fits.first()) else {
        return Err(wrong_type(at.to_string(), value, describe(schema)));
    };
    let Some((tag, map)) = tag_of(first).zip(value.as_object()) else {
        return Ok(first);
    };
    let given = map.get(tag).unwrap_or(&Value::Null);
    let constant = |one: &'static Value| one["properties"][tag].get("const");
    let needs_tag = |one: &Value| {
        one["required"]
            .as_array()
            .is_some_and(|all| all.contains(&tag.into()))
    };
    let is_named = |one: &&&'static Value| match given {
        Value::Null => !needs_tag(one),
        given => constant(one) == Some(given),
    };
    let open = || fits.iter().find(|one| constant(one).is_none());
    if let Some(one) = fits.iter().find(is_named).or_else(open) {
        return Ok(one);
    }
    let at = SchemaPlace::Field(&at, tag);
    let expected = one_of(fits.iter().filter_map(|one| constant(one)));
    match given {
        Value::Null => Err(Rejection::Missing {
            param: at.to_string(),
            expected,
        }),
        Value::String(_) => Err(unlisted(schema, given, at, expected)),
        _ => Err(wrong_type(at.to_string(), given, expected)),
    }
}

/// The field whose constant tells the options of a schema apart.
fn tag_of(option: &'static Value) -> Option<&'static str> {
    let mut properties = option.get("properties")?.as_object()?.iter();
    properties.find_map(|(name, schema)| schema.get("const").map(|_| name.as_str()))
}

/// Whether the type of `value` is the schema's; of a list also that of its first item.
fn is_like(schema: &'static Value, value: &Value) -> bool {
    if let Some(options) = options(schema) {
        return options.iter().any(|one| is_like(one, value));
    }
    let first = value.as_array().and_then(|items| items.first());
    let items = schema.get("items").zip(first);
    is_kind(schema, value) && items.is_none_or(|(items, first)| is_like(items, first))
}

fn is_kind(schema: &'static Value, value: &Value) -> bool {
    if let Some(options) = options(schema) {
        return options.iter().any(|one| is_kind(one, value));
    }
    let mut kinds = kinds(schema).peekable();
    kinds.peek().is_none()
        || kinds.any(|kind| match kind {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "string" => value.is_string(),
            "number" => value.is_number(),
            "integer" => integer(value).is_some(),
            "array" => value.is_array(),
            _ => value.is_object(),
        })
}

/// The types of a schema; none for any.
fn kinds(schema: &'static Value) -> impl Iterator<Item = &'static str> {
    let kinds = match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.as_slice(),
        Some(kind) => std::slice::from_ref(kind),
        None => &[],
    };
    kinds.iter().filter_map(Value::as_str)
}

/// The values that a schema accepts, for an error message.
fn describe(schema: &'static Value) -> String {
    if let Some(options) = options(schema) {
        let mut all: Vec<String> = options.iter().map(describe).collect();
        all.dedup();
        all.retain(|one| !one.is_empty());
        return all.join(" or ");
    }
    if let Some(Value::Array(values)) = schema.get("enum") {
        return one_of(values);
    }
    match kinds(schema).next().unwrap_or("null") {
        "null" => String::new(),
        "boolean" => "true or false".into(),
        "integer" => "an integer".into(),
        "array" => match schema["items"]["type"].as_str() {
            Some(items) => format!("an array of {items}s"),
            None => "an array".into(),
        },
        "object" => "an object".into(),
        kind => format!("a {kind}"),
    }
}

fn one_of<'a>(values: impl IntoIterator<Item = &'a Value>) -> String {
    let values = values.into_iter().filter(|value| !value.is_null());
    let values: Vec<String> = values.map(show).collect();
    match &values[..] {
        [one] => one.clone(),
        _ => format!("one of {}", values.join(", ")),
    }
}

fn unlisted(
    schema: &'static Value,
    value: &Value,
    at: SchemaPlace<'_>,
    expected: String,
) -> Rejection {
    let (param, got) = (at.to_string(), show(value));
    match schema.get(WHY).and_then(Value::as_str) {
        Some(why) => Rejection::Unsupported { param, got, why },
        None => Rejection::Range {
            param,
            got,
            expected,
        },
    }
}

fn check_listed(
    schema: &'static Value,
    value: &Value,
    at: SchemaPlace<'_>,
) -> Result<(), Rejection> {
    let values = match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(values)), _) => values.as_slice(),
        (_, Some(value)) => std::slice::from_ref(value),
        _ => return Ok(()),
    };
    if values.contains(value) {
        return Ok(());
    }
    Err(unlisted(schema, value, at, one_of(values)))
}

fn check_text(schema: &'static Value, text: &str, at: SchemaPlace<'_>) -> Result<(), Rejection> {
    let most = schema.get("maxLength").and_then(Value::as_u64);
    // Bytes first: counting the characters of a long text takes a while.
    let is_far_over = most.is_none_or(|most| text.len() as u64 > 4 * most);
    let chars = match is_far_over {
        true => text.len().div_ceil(4),
        false => text.chars().count(),
    };
    check_length(schema, "Length", chars, "characters", at)
}

/// Checks a length by the keywords `min{of}` and `max{of}`.
fn check_length(
    schema: &'static Value,
    of: &str,
    got: usize,
    unit: &'static str,
    at: SchemaPlace<'_>,
) -> Result<(), Rejection> {
    let bound = |side: &str| schema.get(format!("{side}{of}")).and_then(Value::as_u64);
    let (min, max) = (bound("min"), bound("max"));
    if min.unwrap_or(0) <= got as u64 && got as u64 <= max.unwrap_or(u64::MAX) {
        return Ok(());
    }
    let expected = match (min, max) {
        (Some(min), Some(max)) => format!("{min} to {max}"),
        (min, None) => format!("{} or more", min.unwrap_or(0)),
        (None, Some(max)) => format!("at most {max}"),
    };
    Err(Rejection::Length {
        param: at.to_string(),
        got,
        unit,
        expected,
    })
}

fn check_number(
    schema: &'static Value,
    value: &mut Value,
    at: SchemaPlace<'_>,
) -> Result<(), Rejection> {
    let (min, max) = (schema.get("minimum"), schema.get("maximum"));
    let (is_in, min, max) = if kinds(schema).any(|kind| kind == "integer") {
        let bound = |bound: Option<&Value>, or| bound.and_then(Value::as_i64).unwrap_or(or);
        let (min, max) = (bound(min, i64::MIN), bound(max, i64::MAX));
        let number = integer(value).and_then(|number| i64::try_from(number).ok());
        let is_excluded = number.is_some_and(|number| schema["not"]["const"] == number);
        let is_in = number.is_some_and(|number| (min..=max).contains(&number)) && !is_excluded;
        if let (true, Some(number)) = (is_in, number) {
            *value = number.into();
        }
        (is_in, min.to_string(), max.to_string())
    } else {
        let bound = |bound: Option<&Value>, or| bound.and_then(Value::as_f64).unwrap_or(or);
        let (min, max) = (bound(min, f64::MIN), bound(max, f64::MAX));
        let is_in = value
            .as_f64()
            .is_some_and(|number| (min..=max).contains(&number));
        (is_in, min.to_string(), max.to_string())
    };
    if is_in {
        return Ok(());
    }
    Err(Rejection::Range {
        param: at.to_string(),
        got: show(value),
        expected: match schema.get("not") {
            // A bound on tokens.
            Some(_) => format!("1 to {max}, or {min}"),
            None => format!("{min} to {max}"),
        },
    })
}

fn check_object(
    schema: &'static Value,
    map: &mut Map<String, Value>,
    at: SchemaPlace<'_>,
    notes: &FieldWarnings,
) -> Result<(), Rejection> {
    check_length(schema, "Properties", map.len(), "entries", at)?;
    for (name, mut value) in std::mem::take(map) {
        let place = SchemaPlace::Field(&at, &name);
        let known = schema["properties"].get(&name);
        let known = match (known, schema.get("additionalProperties")) {
            (Some(_), _) if value.is_null() => continue,
            (None, Some(Value::Bool(false))) => {
                notes.unknown(place.to_string())?;
                continue;
            }
            (None, None) => {
                if !value.is_null() {
                    notes.ignored(&place.to_string());
                }
                continue;
            }
            (known, others) => known.or(others),
        };
        if let Some(keys) = schema.get("propertyNames") {
            check_text(keys, &name, place)?;
        }
        known.map_or(Ok(()), |schema| check(schema, &mut value, place, notes))?;
        map.insert(name, value);
    }
    let required = schema["required"].as_array().into_iter().flatten();
    let mut required = required.filter_map(Value::as_str);
    let Some(name) = required.find(|name| !map.contains_key(*name)) else {
        return Ok(());
    };
    let about = schema["properties"][name]["description"].as_str();
    Err(Rejection::Missing {
        param: SchemaPlace::Field(&at, name).to_string(),
        expected: about.unwrap_or("a value").to_owned(),
    })
}

pub(crate) fn wrong_type(param: String, value: &Value, expected: impl Into<String>) -> Rejection {
    let (got, expected) = (show(value), expected.into());
    Rejection::Type {
        param,
        got,
        expected,
    }
}

/// An integer; also one with a zero fraction, up to 2^53.
pub(crate) fn integer(value: &Value) -> Option<i128> {
    if let Some(integer) = value.as_i64() {
        return Some(integer.into());
    }
    if let Some(integer) = value.as_u64() {
        return Some(integer.into());
    }
    // Beyond 2^53 the written integer is unknown: out of any bound.
    const EXACT: f64 = (1u64 << 53) as f64;
    let float = value.as_f64().filter(|float| float.fract() == 0.0)?;
    let is_exact = float.abs() <= EXACT;
    Some(if is_exact {
        float as i128
    } else {
        (float.signum() * 1e30) as i128
    })
}

/// Truncates a client's field name to the longest known one.
pub(crate) fn clip(name: &str) -> String {
    const LONGEST: usize = 64;
    if name.chars().count() <= LONGEST {
        return name.to_owned();
    }
    let start: String = name.chars().take(LONGEST).collect();
    start + "..."
}
