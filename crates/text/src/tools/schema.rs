//! The type of a parameter, for families that write values without types.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;

/// The parameters of the tools of a request: their schemas by tool and name.
#[derive(Clone, Debug, Default)]
pub(super) struct Parameters {
    tools: BTreeMap<String, Json>,
}

/// The JSON types that a schema allows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Types(BTreeSet<String>);

impl Parameters {
    /// From tools as `{"type": "function", "function": {...}}` or as the function alone.
    pub(super) fn of(tools: &[Json]) -> Self {
        let entry = |tool: &Json| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            Some((
                name,
                function.get("parameters").cloned().unwrap_or_default(),
            ))
        };
        Self {
            tools: tools.iter().filter_map(entry).collect(),
        }
    }

    pub(super) fn has_tool(&self, tool: &str) -> bool {
        self.tools.contains_key(tool)
    }

    pub(super) fn types(&self, tool: &str, parameter: &str) -> Types {
        let mut types = Types::default();
        let Some(root) = self.tools.get(tool) else {
            return types;
        };
        types.add(&root["properties"][parameter], root, 8);
        types
    }
}

impl Types {
    /// Adds what `schema` allows; `depth` bounds references.
    fn add(&mut self, schema: &Json, root: &Json, depth: usize) {
        if depth == 0 {
            return;
        }
        match &schema["type"] {
            Json::String(name) => drop(self.0.insert(name.clone())),
            Json::Array(names) => {
                let names = names.iter().filter_map(Json::as_str);
                self.0.extend(names.map(str::to_owned));
            }
            _ => self.add_values(schema),
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            let schemas = schema[key].as_array().into_iter().flatten();
            schemas.for_each(|inner| self.add(inner, root, depth - 1));
        }
        let pointer = schema["$ref"].as_str().and_then(|r| r.strip_prefix('#'));
        if let Some(target) = pointer.and_then(|pointer| root.pointer(pointer)) {
            self.add(target, root, depth - 1);
        }
    }

    /// The types of `enum` and `const`, where no type is given.
    fn add_values(&mut self, schema: &Json) {
        let values = schema["enum"].as_array().into_iter().flatten();
        for value in values.chain(schema.get("const")) {
            self.0.insert(type_of(value).to_owned());
        }
    }

    fn allows(&self, value: &Json) -> bool {
        let kind = type_of(value);
        self.0.contains(kind) || kind == "integer" && self.0.contains("number")
    }

    /// Whether nothing is known of the type.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether every value is a string, so that it can be streamed.
    pub(super) fn is_text(&self) -> bool {
        self.0.len() == 1 && self.0.contains("string")
    }

    /// A value that was written as `text`: the type that the schema allows, else text. Without a
    /// schema it is the type that it parses as.
    pub(super) fn value(&self, text: &str) -> Json {
        let parsed = parse(text.trim());
        match parsed {
            Some(value) if self.0.is_empty() && !value.is_string() => value,
            Some(value) if !value.is_string() && self.allows(&value) => value,
            // A quoted string where there can be no plain one.
            Some(Json::String(inner)) if !self.0.is_empty() && !self.0.contains("string") => {
                Json::String(inner)
            }
            _ => Json::String(text.to_owned()),
        }
    }
}

/// JSON, or one of Python's three words, which templates print.
fn parse(text: &str) -> Option<Json> {
    match text {
        "True" => Some(true.into()),
        "False" => Some(false.into()),
        "None" => Some(Json::Null),
        _ => serde_json::from_str(text).ok(),
    }
}

fn type_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Number(n) if n.is_f64() => "number",
        Json::Number(_) => "integer",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_have_the_types_of_the_schema() {
        let tools = [
            json!({"type": "function", "function": {"name": "f", "parameters": {
                "$defs": {"n": {"type": "number"}},
                "properties": {
                    "s": {"type": "string"},
                    "i": {"type": "integer"},
                    "n": {"$ref": "#/$defs/n"},
                    "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    "e": {"enum": ["a", 1]},
                    "b": {"type": ["boolean", "string"]},
                },
            }}}),
        ];
        let parameters = Parameters::of(&tools);
        for (name, text, expected) in [
            ("s", "12", json!("12")),
            ("s", "", json!("")),
            ("i", "12", json!(12)),
            ("i", " 12\n", json!(12)),
            ("i", "twelve", json!("twelve")),
            ("n", "1.5", json!(1.5)),
            ("n", "2", json!(2)),
            ("o", "{\"a\": [1]}", json!({"a": [1]})),
            ("o", "None", json!(null)),
            ("e", "1", json!(1)),
            ("e", "a", json!("a")),
            ("b", "True", json!(true)),
            ("b", "yes", json!("yes")),
            ("unknown", "[1]", json!([1])),
            ("unknown", "plain", json!("plain")),
            ("unknown", "\"quoted\"", json!("\"quoted\"")),
        ] {
            assert_eq!(
                parameters.types("f", name).value(text),
                expected,
                "{name} {text:?}"
            );
        }
        assert!(parameters.types("f", "s").is_text() && !parameters.types("f", "b").is_text());
    }
}
