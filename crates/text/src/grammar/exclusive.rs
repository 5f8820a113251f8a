//! Whether no document matches two of several schemas, so that `oneOf` is `anyOf`.
//!
//! The answer is yes only where it follows from types, constants and required properties, as in
//! tagged unions of Pydantic and zod. It may be no for schemas that exclude each other otherwise.

use std::cell::Cell;

use serde_json::{Map, Value as Json};

/// Most comparisons of two schemas of a document, some milliseconds. References may make their
/// number exponential.
const MAX_STEPS: u32 = 20_000;

/// Deepest chain of references and unions that is followed.
const MAX_DEPTH: usize = 8;

/// Most arms, whose pairs are compared: ten times the largest union that is known.
const MAX_ARMS: usize = 256;

/// All types of JSON Schema but `integer`, which is a part of `number`.
const TYPES: [&str; 6] = ["null", "boolean", "object", "array", "number", "string"];

/// Compares schemas that are parts of `root`.
#[derive(Debug)]
pub(super) struct SchemaComparison<'a> {
    root: &'a Json,
    steps: Cell<u32>,
}

impl<'a> SchemaComparison<'a> {
    pub(super) const fn new(root: &'a Json) -> Self {
        let steps = Cell::new(0);
        Self { root, steps }
    }

    /// Whether each two of `arms` exclude each other.
    pub(super) fn excludes_all(&self, arms: &[Json]) -> bool {
        let excludes = |(i, one): (usize, &Json)| {
            let later = &arms[i + 1..];
            later.iter().all(|other| self.excludes(one, other, 0))
        };
        arms.len() <= MAX_ARMS && arms.iter().enumerate().all(excludes)
    }

    fn excludes(&self, one: &Json, other: &Json, depth: usize) -> bool {
        self.steps.set(self.steps.get() + 1);
        if depth > MAX_DEPTH || self.steps.get() > MAX_STEPS {
            return false;
        }
        if [one, other].contains(&&Json::Bool(false)) {
            return true;
        }
        let each = |arms: &Vec<Json>, other: &Json| {
            arms.iter().all(|arm| self.excludes(arm, other, depth + 1))
        };
        if union(one).is_some_and(|arms| each(arms, other))
            || union(other).is_some_and(|arms| each(arms, one))
        {
            return true;
        }
        let others = conjuncts(other, self.root);
        let mut pairs = conjuncts(one, self.root).into_iter();
        pairs.any(|a| others.iter().any(|b| self.excludes_plain(a, b, depth)))
    }

    fn excludes_plain(
        &self,
        one: &Map<String, Json>,
        other: &Map<String, Json>,
        depth: usize,
    ) -> bool {
        if let (Some(ones), Some(others)) = (constants(one), constants(other)) {
            return !ones.iter().any(|a| others.iter().any(|b| is_same(a, b)));
        }
        let (ones, others) = (types(one), types(other));
        let shared: Vec<&str> = ones
            .into_iter()
            .filter(|kind| others.contains(kind))
            .collect();
        match shared[..] {
            [] => true,
            ["object"] => {
                self.tells_apart(one, other, depth) || self.tells_apart(other, one, depth)
            }
            _ => false,
        }
    }

    /// Whether a property that `one` requires cannot be in an object of `other`.
    fn tells_apart(
        &self,
        one: &Map<String, Json>,
        other: &Map<String, Json>,
        depth: usize,
    ) -> bool {
        let required = one.get("required").and_then(Json::as_array);
        let is_closed = other.get("additionalProperties") == Some(&Json::Bool(false))
            && !other.contains_key("patternProperties");
        let mut required = required.into_iter().flatten().filter_map(Json::as_str);
        required.any(|name| match (property(one, name), property(other, name)) {
            (_, None) => is_closed,
            (Some(own), Some(theirs)) => self.excludes(own, theirs, depth + 1),
            (None, Some(_)) => false,
        })
    }
}

fn property<'a>(schema: &'a Map<String, Json>, name: &str) -> Option<&'a Json> {
    schema.get("properties")?.get(name)
}

/// Whether two constants are one value: numbers are compared as numbers.
fn is_same(one: &Json, other: &Json) -> bool {
    let numbers = one.as_f64().zip(other.as_f64());
    numbers.map_or(one == other, |(one, other)| one == other)
}

fn union(schema: &Json) -> Option<&Vec<Json>> {
    let arms = schema.get("anyOf").or_else(|| schema.get("oneOf"))?;
    arms.as_array()
}

/// The schemas that a document of `schema` matches: itself, what it refers to, and `allOf`.
fn conjuncts<'a>(schema: &'a Json, root: &'a Json) -> Vec<&'a Map<String, Json>> {
    let mut found = Vec::new();
    let mut open = vec![(schema, 0)];
    while let Some((schema, depth)) = open.pop() {
        let Some(map) = schema.as_object().filter(|_| depth <= MAX_DEPTH) else {
            continue;
        };
        found.push(map);
        let target = map.get("$ref").and_then(Json::as_str);
        let target = target.and_then(|target| root.pointer(target.strip_prefix('#')?));
        open.extend(target.map(|target| (target, depth + 1)));
        let all = map.get("allOf").and_then(Json::as_array);
        open.extend(all.into_iter().flatten().map(|one| (one, depth + 1)));
    }
    found
}

/// The values that a schema allows, where it lists them.
fn constants(schema: &Map<String, Json>) -> Option<Vec<&Json>> {
    if let Some(value) = schema.get("const") {
        return Some(vec![value]);
    }
    Some(schema.get("enum")?.as_array()?.iter().collect())
}

/// Types of documents that match; all where nothing is said.
fn types(schema: &Map<String, Json>) -> Vec<&str> {
    if let Some(values) = constants(schema) {
        return values.into_iter().map(type_of).collect();
    }
    let named: Vec<&str> = match schema.get("type") {
        Some(Json::String(one)) => vec![one],
        Some(Json::Array(several)) => several.iter().filter_map(Json::as_str).collect(),
        _ => return TYPES.to_vec(),
    };
    let wide = |name| if name == "integer" { "number" } else { name };
    named.into_iter().map(wide).collect()
}

const fn type_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Object(_) => "object",
        Json::Array(_) => "array",
        Json::Number(_) => "number",
        Json::String(_) => "string",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn references_that_multiply_end() {
        let properties: Map<String, Json> = (0..20)
            .map(|i| (format!("p{i}"), json!({"$ref": "#"})))
            .collect();
        let names: Vec<&String> = properties.keys().collect();
        let root = json!({"type": "object", "properties": properties, "required": names});
        let comparison = SchemaComparison::new(&root);
        assert!(!comparison.excludes_all(&[root.clone(), root.clone()]));
    }

    #[test]
    fn unions_are_told_apart_by_types_constants_and_required_properties() {
        let root = json!({"$defs": {
            "A": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            "B": {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]},
        }});
        for (arms, expected) in [
            (json!([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]), true),
            (json!([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]), false),
            (
                json!([{"type": "null"}, {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}]),
                true,
            ),
            (json!([{"type": "integer"}, {"type": "number"}]), false),
            (
                json!([{"type": "boolean"}, {"const": "a"}, {"enum": [1, 2]}, {"const": 3}]),
                true,
            ),
            (json!([{"const": 1.0}, {"type": "integer"}]), false),
            (json!([{"const": 1.0}, {"const": 1}]), false),
            (json!([true, false, false]), true),
            (json!([true, {}]), false),
            (json!([{"type": "string"}, {}]), false),
            (
                json!([{"type": "string", "minLength": 3}, {"type": "string", "maxLength": 2}]),
                false,
            ),
            // Only one requires the property: a document without it matches the other alone.
            (
                json!([{"$ref": "#/$defs/A"}, {"type": "object", "properties": {"k": {"const": "b"}}}]),
                true,
            ),
            (
                json!([
                {"type": "object", "properties": {"k": {"const": "a"}}},
                {"type": "object", "properties": {"k": {"const": "b"}}}]),
                false,
            ),
            // The type is not said, so a number matches both.
            (
                json!([
                {"properties": {"k": {"const": 1}}, "required": ["k"]},
                {"properties": {"k": {"const": 2}}, "required": ["k"]}]),
                false,
            ),
            (
                json!([
                {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": false},
                {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": false}]),
                true,
            ),
            (
                json!([{"allOf": [{"$ref": "#/$defs/A"}]}, {"$ref": "#/$defs/B"}]),
                true,
            ),
            (json!([{"$ref": "#"}, {"$ref": "#"}]), false),
        ] {
            let arms = arms.as_array().unwrap();
            assert_eq!(
                SchemaComparison::new(&root).excludes_all(arms),
                expected,
                "{arms:?}"
            );
        }
    }
}
