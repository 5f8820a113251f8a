//! Table-driven checks of request fields. A row checks a value, reports errors, and is its
//! description in the OpenAPI document. So the document and the checks cannot differ.

use std::cell::RefCell;

use serde_json::{Map, Value, json};

use crate::json::show;
use crate::rejection::Rejection;

/// A field of a request. `null` counts as absent.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) is_required: bool,
    /// For the OpenAPI document.
    pub(crate) about: &'static str,
}

/// Type and bounds of a value.
#[derive(Debug)]
pub(crate) enum Kind {
    /// Bounds included.
    Number { min: f64, max: f64 },
    /// Bounds included. `1.0` is an integer, as in JSON Schema.
    Integer { min: i64, max: i64 },
    /// True or false.
    Boolean,
    /// Length in characters.
    Text { min: usize, max: usize },
    /// Any object.
    Object,
    /// An object with these fields, parsed elsewhere.
    Table(&'static [Field]),
    /// A bound on tokens: -1 for none, or 1 to `max`. `1.0` is an integer, as in JSON Schema.
    TokenLimit { max: i64 },
    /// Accepts only these values, written in JSON, which ask for the default behaviour. Others
    /// would change the response; `why` is the error text.
    Only {
        values: &'static [&'static str],
        why: &'static str,
    },
    /// Parsed elsewhere; the function returns the schema.
    Own(fn() -> Value),
    /// Any value; ignored.
    Any,
}

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
    pub(crate) fn unknown(&self, param: String) -> Result<(), Rejection> {
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

impl Field {
    pub(crate) const fn new(name: &'static str, kind: Kind, about: &'static str) -> Self {
        let is_required = false;
        Self {
            name,
            kind,
            is_required,
            about,
        }
    }

    pub(crate) const fn required(mut self) -> Self {
        self.is_required = true;
        self
    }

    /// # Errors
    /// [`Rejection::Type`], [`Rejection::Range`], [`Rejection::Length`],
    /// [`Rejection::Unsupported`]; `param` is the field's full path.
    fn check(&self, value: &Value, param: String) -> Result<(), Rejection> {
        match self.kind {
            Kind::Number { min, max } => {
                let Some(number) = value.as_f64() else {
                    return Err(wrong_type(param, value, "a number"));
                };
                let expected = || format!("{min} to {max}");
                in_range((min..=max).contains(&number), param, value, expected)
            }
            Kind::Integer { min, max } => {
                let Some(number) = integer(value) else {
                    return Err(wrong_type(param, value, "an integer"));
                };
                let expected = || format!("{min} to {max}");
                let contains = (i128::from(min)..=i128::from(max)).contains(&number);
                in_range(contains, param, value, expected)
            }
            Kind::TokenLimit { max } => {
                let Some(number) = integer(value) else {
                    return Err(wrong_type(param, value, "an integer"));
                };
                let is_in = number == -1 || (1..=i128::from(max)).contains(&number);
                in_range(is_in, param, value, || format!("1 to {max}, or -1"))
            }
            Kind::Boolean if value.is_boolean() => Ok(()),
            Kind::Boolean => Err(wrong_type(param, value, "true or false")),
            Kind::Text { min, max } => check_text(value, param, min, max),
            Kind::Object | Kind::Table(_) if value.is_object() => Ok(()),
            Kind::Object | Kind::Table(_) => Err(wrong_type(param, value, "an object")),
            Kind::Only { values, why } => {
                let is_same =
                    |text: &&str| serde_json::from_str(text).is_ok_and(|v: Value| v == *value);
                if values.iter().any(is_same) {
                    return Ok(());
                }
                let got = show(value);
                Err(Rejection::Unsupported { param, got, why })
            }
            Kind::Own(_) | Kind::Any => Ok(()),
        }
    }

    /// The JSON Schema of the field.
    pub(crate) fn schema(&self) -> Value {
        let mut schema = match self.kind {
            Kind::Number { min, max } => {
                json!({"type": "number", "minimum": min, "maximum": max})
            }
            Kind::Integer { min, max } => {
                json!({"type": "integer", "minimum": min, "maximum": max})
            }
            Kind::TokenLimit { max } => {
                let zero = json!({"const": 0});
                json!({"type": "integer", "minimum": -1, "maximum": max, "not": zero})
            }
            Kind::Boolean => json!({"type": "boolean"}),
            Kind::Object => json!({"type": "object"}),
            Kind::Table(table) => object_schema(table),
            Kind::Text { min, max } => {
                json!({"type": "string", "minLength": min, "maxLength": max})
            }
            Kind::Only { values, .. } => {
                let parse = |text: &&str| serde_json::from_str::<Value>(text).unwrap_or_default();
                let values: Vec<Value> = values.iter().map(parse).collect();
                json!({"enum": values})
            }
            Kind::Own(schema) => schema(),
            Kind::Any => json!({}),
        };
        if !self.is_required {
            schema = nullable(schema);
        }
        if let (Some(object), false) = (schema.as_object_mut(), self.about.is_empty()) {
            object.insert("description".into(), self.about.into());
        }
        schema
    }
}

/// The same schema with null accepted.
fn nullable(mut schema: Value) -> Value {
    if schema.as_object().is_some_and(Map::is_empty) {
        return schema;
    }
    if allow_null(&mut schema) {
        return schema;
    }
    if let Some(kind @ Value::String(_)) = schema.get_mut("type") {
        *kind = json!([kind.clone(), "null"]);
        return schema;
    }
    json!({"anyOf": [schema, {"type": "null"}]})
}

/// Adds null to a schema's list of values; whether it has one.
pub(crate) fn allow_null(schema: &mut Value) -> bool {
    let values = schema.get_mut("enum").and_then(Value::as_array_mut);
    values.map(|values| values.push(Value::Null)).is_some()
}

/// The schema of an object with these fields, in which others have no effect.
pub(crate) fn open_schema(table: &[Field]) -> Value {
    let mut schema = object_schema(table);
    schema["additionalProperties"] = true.into();
    schema
}

/// The schema of an object with these fields and no others.
pub(crate) fn object_schema(table: &[Field]) -> Value {
    let properties: Map<String, Value> = table
        .iter()
        .map(|field| (field.name.to_owned(), field.schema()))
        .collect();
    let required = table.iter().filter(|field| field.is_required);
    let required: Vec<&str> = required.map(|field| field.name).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

fn check_text(value: &Value, param: String, min: usize, max: usize) -> Result<(), Rejection> {
    let Some(text) = value.as_str() else {
        return Err(wrong_type(param, value, "a string"));
    };
    // Bytes first: counting the characters of a long text takes a while.
    let got = if text.len() > 4 * max {
        text.len() / 4
    } else {
        text.chars().count()
    };
    if (min..=max).contains(&got) {
        return Ok(());
    }
    let (unit, expected) = ("characters", format!("{min} to {max}"));
    Err(Rejection::Length {
        param,
        got,
        unit,
        expected,
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

fn in_range(
    is_in: bool,
    param: String,
    value: &Value,
    expected: impl FnOnce() -> String,
) -> Result<(), Rejection> {
    if is_in {
        return Ok(());
    }
    let (got, expected) = (show(value), expected());
    Err(Rejection::Range {
        param,
        got,
        expected,
    })
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

/// An object whose fields passed the table's checks.
#[derive(Debug)]
pub(crate) struct FieldValues {
    values: Map<String, Value>,
}

impl FieldValues {
    /// Checks `object` at `place`, its path in the body: empty, or with a dot at the end.
    ///
    /// # Errors
    /// The first field, in the object's order, that is invalid or unknown. Else the first missing
    /// one. `notes` may allow unknown fields.
    pub(crate) fn new(
        object: Map<String, Value>,
        table: &[Field],
        place: &str,
        notes: &FieldWarnings,
    ) -> Result<Self, Rejection> {
        Self::check(object, table, place, |param, _| notes.unknown(param))
    }

    /// As [`new`](Self::new), for what clients send back in each turn. Unknown fields may be
    /// those of another server's answer: they have no effect and give a warning.
    ///
    /// # Errors
    /// The first field that is invalid, else the first missing one.
    pub(crate) fn open(
        object: Map<String, Value>,
        table: &[Field],
        place: &str,
        notes: &FieldWarnings,
    ) -> Result<Self, Rejection> {
        Self::check(object, table, place, |param, value| {
            if !value.is_null() {
                notes.ignored(&param);
            }
            Ok(())
        })
    }

    fn check(
        object: Map<String, Value>,
        table: &[Field],
        place: &str,
        unknown: impl Fn(String, &Value) -> Result<(), Rejection>,
    ) -> Result<Self, Rejection> {
        let mut values = Map::new();
        for (name, value) in object {
            let param = || format!("{place}{}", clip(&name));
            let Some(field) = table.iter().find(|field| field.name == name) else {
                unknown(param(), &value)?;
                continue;
            };
            if value.is_null() {
                continue;
            }
            field.check(&value, param())?;
            values.insert(name, value);
        }
        for field in table.iter().filter(|field| field.is_required) {
            if !values.contains_key(field.name) {
                let (param, expected) = (format!("{place}{}", field.name), field.about.to_owned());
                return Err(Rejection::Missing { param, expected });
            }
        }
        Ok(Self { values })
    }

    /// Removes and returns the value.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.values.swap_remove(name)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    pub(crate) fn number(&self, name: &str) -> Option<f64> {
        self.values.get(name)?.as_f64()
    }

    pub(crate) fn integer(&self, name: &str) -> Option<i64> {
        integer(self.values.get(name)?).and_then(|integer| integer.try_into().ok())
    }

    /// A non-negative integer.
    pub(crate) fn count(&self, name: &str) -> Option<usize> {
        self.integer(name)
            .and_then(|integer| integer.try_into().ok())
    }

    pub(crate) fn is_true(&self, name: &str) -> bool {
        self.values.get(name).is_some_and(|value| *value == true)
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name)?.as_str()
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const INNER: &[Field] = &[Field::new("inner", Kind::Boolean, "")];

    const TABLE: [Field; 7] = [
        Field::new(
            "number",
            Kind::Number {
                min: -2.0,
                max: 2.0,
            },
            "",
        ),
        Field::new(
            "integer",
            Kind::Integer {
                min: 1,
                max: i64::MAX,
            },
            "",
        ),
        Field::new("flag", Kind::Boolean, ""),
        Field::new("text", Kind::Text { min: 1, max: 3 }, "").required(),
        Field::new(
            "only",
            Kind::Only {
                values: &["[]", r#"{"type":"text"}"#],
                why: "reasons",
            },
            "",
        ),
        Field::new("own", Kind::Own(|| json!({"type": "array"})), ""),
        Field::new("table", Kind::Table(INNER), ""),
    ];

    #[test]
    fn each_kind_has_its_bounds() {
        for (object, expected) in [
            (r#"{"text":"a"}"#, "ok"),
            (r#"{"text":null}"#, "text is missing"),
            ("{}", "text is missing"),
            (r#"{"text":""}"#, "text has 0 characters, expected 1 to 3"),
            (r#"{"text":"中中中"}"#, "ok"),
            (
                r#"{"text":"aaaa"}"#,
                "text has 4 characters, expected 1 to 3",
            ),
            (r#"{"text":1}"#, "text is 1, expected a string"),
            (r#"{"text":"a","number":2}"#, "ok"),
            (
                r#"{"text":"a","number":2.0000001}"#,
                "number is 2.0000001, expected -2 to 2",
            ),
            (
                r#"{"text":"a","number":-1e308}"#,
                "number is -1e+308, expected -2 to 2",
            ),
            (
                r#"{"text":"a","number":"2"}"#,
                "number is \"2\", expected a number",
            ),
            (
                r#"{"text":"a","number":true}"#,
                "number is true, expected a number",
            ),
            (r#"{"text":"a","integer":1.0}"#, "ok"),
            (r#"{"text":"a","integer":9223372036854775807}"#, "ok"),
            (
                r#"{"text":"a","integer":9223372036854775808}"#,
                "integer is 9223372036854775808",
            ),
            (
                r#"{"text":"a","integer":1e300}"#,
                "integer is 1e+300, expected 1 to",
            ),
            (r#"{"text":"a","integer":0}"#, "integer is 0, expected 1 to"),
            (
                r#"{"text":"a","integer":1.5}"#,
                "integer is 1.5, expected an integer",
            ),
            (
                r#"{"text":"a","flag":1}"#,
                "flag is 1, expected true or false",
            ),
            (r#"{"text":"a","only":[]}"#, "ok"),
            (r#"{"text":"a","only":{"type":"text"}}"#, "ok"),
            (
                r#"{"text":"a","only":{"type":"json"}}"#,
                "only is an object, which is not supp",
            ),
            (r#"{"text":"a","own":7}"#, "ok"),
            (r#"{"text":"a","table":{"inner":true}}"#, "ok"),
            (
                r#"{"text":"a","table":[]}"#,
                "table is [], expected an object",
            ),
            (r#"{"text":"a","other":null}"#, "other is no field"),
            (r#"{"text":"a","flag":null,"number":null}"#, "ok"),
        ] {
            let object: Map<String, Value> = serde_json::from_str(object).unwrap();
            let got = match FieldValues::new(object.clone(), &TABLE, "", &FieldWarnings::default())
            {
                Ok(_) => "ok".to_owned(),
                Err(error) => error.to_string(),
            };
            assert!(got.starts_with(expected), "{object:?}: {got}");
        }
    }

    #[test]
    fn values_come_out_as_they_went_in() {
        let object = r#"{"text":"a","number":1,"integer":3.0,"flag":true}"#;
        let object = serde_json::from_str(object).unwrap();
        let fields = FieldValues::new(object, &TABLE, "x.", &FieldWarnings::default()).unwrap();
        assert_eq!(fields.text("text"), Some("a"));
        assert_eq!(fields.number("number"), Some(1.0));
        assert_eq!(fields.count("integer"), Some(3));
        assert!(fields.is_true("flag") && !fields.is_true("own"));
    }

    #[test]
    fn unknown_fields_pass_with_a_warning_where_they_may() {
        let object = r#"{"text":"a","other\r\n\"":1,"more":2}"#;
        let notes = FieldWarnings::new(true);
        let object: Map<String, Value> = serde_json::from_str(object).unwrap();
        let fields = FieldValues::new(object, &TABLE, "m.", &notes).unwrap();
        assert!(!fields.has("more"));
        assert_eq!(
            notes.into_warnings(),
            [
                "m.other is unknown and was ignored",
                "m.more is unknown and was ignored"
            ]
        );
    }

    #[test]
    fn names_of_clients_are_clipped() {
        let object = Map::from_iter([("y".repeat(1000), Value::from(1))]);
        let error = FieldValues::new(object, &TABLE, "m[0].", &FieldWarnings::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("m[0].yyy") && error.len() < 200,
            "{error}"
        );
    }

    #[test]
    fn schemas_accept_null_where_the_check_does() {
        let schema = object_schema(&TABLE);
        let properties = &schema["properties"];
        assert_eq!(properties["number"]["type"], json!(["number", "null"]));
        assert_eq!(properties["text"]["type"], "string");
        assert_eq!(
            properties["only"]["enum"],
            json!([[], {"type": "text"}, null])
        );
        assert_eq!(properties["own"]["type"], json!(["array", "null"]));
        let table = &properties["table"];
        assert_eq!(table["type"], json!(["object", "null"]));
        assert!(table["properties"]["inner"].is_object());
        assert_eq!(schema["required"], json!(["text"]));
    }
}
