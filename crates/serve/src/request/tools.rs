//! `tools`, `tool_choice` and `response_format` in OpenAI's forms.

use serde_json::{Map, Value, json};

use super::bounds::MAX_TOOLS;
use super::fields::{JSON_SCHEMA, TOOL, TOOL_FUNCTION};
use super::{RequestParser, array, object, unsupported};
use crate::conversation::{AnswerFormat, Conversation, Tool, ToolChoice};
use crate::field::{FieldValues, wrong_type};
use crate::rejection::Rejection;

impl RequestParser<'_> {
    /// Parses `tools`, `tool_choice` and `parallel_tool_calls` of a chat.
    pub(super) fn read_tools(
        &self,
        fields: &mut FieldValues,
        conversation: &mut Conversation,
    ) -> Result<(), Rejection> {
        if let Some(tools) = fields.take("tools") {
            let tools = array(tools, "tools", MAX_TOOLS, "tools")?.into_iter();
            let tools = tools.enumerate().map(|(i, tool)| self.tool(tool, i));
            conversation.tools = tools.collect::<Result<_, _>>()?;
        }
        conversation.is_parallel = fields.get("parallel_tool_calls") != Some(&Value::Bool(false));
        if let Some(choice) = fields.take("tool_choice") {
            self.read_choice(choice, conversation)?;
        }
        Ok(())
    }

    fn tool(&self, value: Value, i: usize) -> Result<Tool, Rejection> {
        let place = format!("tools[{i}]");
        let map = object(value, || place.clone())?;
        let mut fields = self.fields(map, TOOL, &format!("{place}."))?;
        let place = format!("{place}.function");
        let function = object(fields.take("function").unwrap_or_default(), || {
            place.clone()
        })?;
        self.function(function, &place)
    }

    /// Parses a function's name, description and schema at `place`.
    pub(super) fn function(
        &self,
        function: Map<String, Value>,
        place: &str,
    ) -> Result<Tool, Rejection> {
        let mut fields = self.fields(function, TOOL_FUNCTION, &format!("{place}."))?;
        Ok(Tool {
            name: fields.text("name").unwrap_or_default().to_owned(),
            description: fields.text("description").map(str::to_owned),
            parameters: fields.take("parameters").unwrap_or_else(no_parameters),
            is_strict: fields.is_true("strict"),
        })
    }

    /// Parses `tool_choice`: a word, a named function, or allowed tools.
    pub(super) fn read_choice(
        &self,
        value: Value,
        conversation: &mut Conversation,
    ) -> Result<(), Rejection> {
        let value = match value {
            Value::String(word) => {
                conversation.choice = word_choice(&word, "tool_choice")?;
                return check_choice(conversation);
            }
            Value::Object(map) => map,
            other => {
                let expected = "a string or an object";
                return Err(wrong_type("tool_choice".into(), &other, expected));
            }
        };
        match value.get("type").and_then(Value::as_str) {
            Some("function") => {
                // Chat nests it in `function`; responses put it next to `type`.
                let name = value.get("function").unwrap_or(&Value::Null)["name"].as_str();
                let name = name.or(value.get("name").and_then(Value::as_str));
                let name = name.ok_or_else(|| missing("tool_choice.function.name"))?;
                conversation.choice = ToolChoice::Named(name.to_owned());
            }
            Some("allowed_tools") => allow(&value, conversation)?,
            _ => {
                let got = crate::json::show(&value.into());
                let why = "its type is \"function\" or \"allowed_tools\"";
                return Err(unsupported("tool_choice", got, why));
            }
        }
        check_choice(conversation)
    }
}

fn missing(param: &str) -> Rejection {
    needs(param, "the name of a tool")
}

/// Schema of a tool without arguments.
pub(super) fn no_parameters() -> Value {
    json!({"type": "object", "properties": {}})
}

fn word_choice(word: &str, param: &str) -> Result<ToolChoice, Rejection> {
    match word {
        "auto" => Ok(ToolChoice::Auto),
        "none" => Ok(ToolChoice::None),
        "required" | "any" => Ok(ToolChoice::Required),
        _ => Err(Rejection::Range {
            param: param.into(),
            got: format!("{:?}", crate::field::clip(word)),
            expected: "\"auto\", \"none\" or \"required\"".into(),
        }),
    }
}

/// Restricts the callable tools.
fn allow(value: &Map<String, Value>, conversation: &mut Conversation) -> Result<(), Rejection> {
    // Chat nests the list in `allowed_tools`; responses put it next to `type`.
    let nested = value.get("allowed_tools").and_then(Value::as_object);
    let list = nested.unwrap_or(value);
    conversation.choice = match list.get("mode").and_then(Value::as_str) {
        Some(mode @ ("auto" | "required")) => word_choice(mode, "tool_choice.mode")?,
        _ => return Err(needs("tool_choice.mode", "\"auto\" or \"required\"")),
    };
    let Some(Value::Array(tools)) = list.get("tools") else {
        return Err(needs("tool_choice.tools", "an array of tools"));
    };
    let name = |tool| allowed_name(tool, nested.is_some());
    let names: Option<Vec<String>> = tools.iter().map(name).collect();
    let expected = "tools of type function, each with its name";
    let names = names.ok_or_else(|| needs("tool_choice.tools", expected))?;
    conversation.tools.retain(|tool| names.contains(&tool.name));
    Ok(())
}

/// The tool's name in an entry of `allowed_tools`; `None` for malformed entries. Chat nests it in
/// `function`.
fn allowed_name(tool: &Value, nested: bool) -> Option<String> {
    let tool = tool.as_object()?;
    let of = if nested {
        tool.get("function")?.as_object()?
    } else {
        tool
    };
    let alone = !nested || (tool.len() == 2 && of.len() == 1);
    let is_function = tool.get("type")?.as_str()? == "function";
    (alone && is_function).then(|| of.get("name")?.as_str().map(str::to_owned))?
}

fn needs(param: &str, expected: &str) -> Rejection {
    let (param, expected) = (param.to_owned(), expected.to_owned());
    Rejection::Missing { param, expected }
}

/// # Errors
/// [`Rejection::Conflict`] for required calls without tools.
pub(super) fn check_choice(conversation: &Conversation) -> Result<(), Rejection> {
    let has = |name: &String| conversation.tools.iter().any(|tool| tool.name == *name);
    let condition = match &conversation.choice {
        ToolChoice::Required if conversation.tools.is_empty() => "without tools",
        ToolChoice::Named(name) if !has(name) => "for a tool that is not among tools",
        _ => return Ok(()),
    };
    let param = "tool_choice";
    Err(Rejection::Conflict { param, condition })
}

impl RequestParser<'_> {
    /// Parses `response_format`, or `text.format` of responses at `place`.
    pub(super) fn format(
        &self,
        value: Option<Value>,
        place: &str,
    ) -> Result<AnswerFormat, Rejection> {
        let Some(value) = value else {
            return Ok(AnswerFormat::Text);
        };
        let mut map = object(value, || place.to_owned())?;
        let kind = map.get("type").and_then(Value::as_str).unwrap_or_default();
        match kind.to_owned().as_str() {
            "text" if map.len() == 1 => Ok(AnswerFormat::Text),
            "json_object" if map.len() == 1 => Ok(AnswerFormat::JsonObject),
            "json_schema" => {
                // Chat nests it in `json_schema`; responses put it next to `type`.
                let (inner, place) = match map.swap_remove("json_schema") {
                    Some(inner) => {
                        for other in map.keys().filter(|name| *name != "type") {
                            let other = crate::field::clip(other);
                            self.notes.unknown(format!("{place}.{other}"))?;
                        }
                        let place = format!("{place}.json_schema");
                        (object(inner, || place.clone())?, place)
                    }
                    None if place == "response_format" => {
                        return Err(Rejection::Missing {
                            param: format!("{place}.json_schema"),
                            expected: "an object".to_owned(),
                        });
                    }
                    None => {
                        map.swap_remove("type");
                        (map, place.to_owned())
                    }
                };
                let mut fields = self.fields(inner, JSON_SCHEMA, &format!("{place}."))?;
                let schema = fields.take("schema").unwrap_or_else(|| json!({}));
                Ok(AnswerFormat::JsonSchema(schema))
            }
            _ => {
                let got = crate::json::show(&map.into());
                let why = "its type is text, json_object or json_schema";
                Err(unsupported(place, got, why))
            }
        }
    }
}
