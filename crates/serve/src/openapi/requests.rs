//! Schemas of request bodies, narrowed to the server's limits and the model.

use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::model::ServedModel;
use crate::request::chat::ChatRequest;
use crate::request::completion::CompletionRequest;
use crate::schema::schema_of;

pub(super) fn schemas(config: &Config, model: &ServedModel) -> Map<String, Value> {
    let limits = &config.limits;
    let mut chat = schema_of::<ChatRequest>().clone();
    let mut completion = schema_of::<CompletionRequest>().clone();
    for request in [&mut chat, &mut completion] {
        name_model(request, model);
        let choices = &mut request["properties"]["n"];
        (choices["minimum"], choices["maximum"]) = (1.into(), limits.choices.into());
        request["allOf"] = json!([needs("stream_options", "stream")]);
    }
    if let Some(all) = chat["allOf"].as_array_mut() {
        all.push(needs("top_logprobs", "logprobs"));
        all.push(json!({"not": {"required": ["max_tokens", "max_completion_tokens"]}}));
    }
    narrow_tools(&mut chat, model);
    let messages = &mut chat["properties"]["messages"];
    (messages["minItems"], messages["maxItems"]) = (1.into(), limits.messages.into());
    completion["properties"]["prompt"]["anyOf"] = prompt(limits.prompts, model);
    let ids = up_to(model.vocab().saturating_sub(1));
    let token = json!({"type": "string", "pattern": format!("^({ids})$")});
    Map::from_iter([
        ("ChatRequest".to_owned(), chat),
        ("CompletionRequest".to_owned(), completion),
        ("TokenId".to_owned(), token),
    ])
}

/// Lists the model's names, if the request names a model.
pub(super) fn name_model(request: &mut Value, model: &ServedModel) {
    if request["properties"]["model"].is_object() {
        let names = model.names().map(Value::from).chain([Value::Null]);
        request["properties"]["model"]["enum"] = names.collect();
    }
}

/// Requires empty `tools` for models without tool calls.
pub(super) fn narrow_tools(request: &mut Value, model: &ServedModel) {
    if !model.has_calls() {
        request["properties"]["tools"] = json!({"enum": [[], null]});
        request["properties"]["tool_choice"] = json!({"enum": ["auto", "none", null]});
    }
}

/// Requires `other: true` with `field`.
fn needs(field: &str, other: &str) -> Value {
    json!({
        "if": {"required": [field], "properties": {field: {"not": {"type": "null"}}}},
        "then": {"required": [other], "properties": {other: {"const": true}}},
    })
}

fn prompt(most: usize, model: &ServedModel) -> Value {
    let text = json!({"type": "string", "minLength": 1});
    let id = json!({"type": "integer", "minimum": 0, "maximum": model.vocab().saturating_sub(1)});
    let most_ids = model.context.saturating_sub(1);
    let ids = json!({"type": "array", "items": id, "minItems": 1, "maxItems": most_ids});
    let list =
        |items: &Value| json!({"type": "array", "items": items, "minItems": 1, "maxItems": most});
    json!([text, list(&text), ids, list(&ids)])
}

/// A regular expression for the integers from 0 to `most`, in digits without leading zeros.
fn up_to(most: u32) -> String {
    let digits = most.to_string();
    let more = |n: usize| match n {
        0 => String::new(),
        n => format!("[0-9]{{{n}}}"),
    };
    let shorter = (1..digits.len()).map(|len| format!("[1-9]{}", more(len - 1)));
    // Of equal length: equal up to one smaller digit.
    let smaller = digits.char_indices().filter_map(|(i, digit)| {
        let least = if i == 0 { '1' } else { '0' };
        let below = char::from(digit as u8 - 1);
        let rest = more(digits.len() - i - 1);
        (digit > least).then(|| format!("{}[{least}-{below}]{rest}", &digits[..i]))
    });
    let zero = (most > 0).then(|| "0".to_owned());
    let all = zero
        .into_iter()
        .chain(shorter)
        .chain(smaller)
        .chain([digits.clone()]);
    all.collect::<Vec<_>>().join("|")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the pattern, of the few forms that `up_to` writes, matches all of `text`.
    fn matches(pattern: &str, text: &str) -> bool {
        pattern.split('|').any(|alternative| {
            let (mut sets, mut rest) = (Vec::new(), alternative);
            while !rest.is_empty() {
                if let Some(set) = rest.strip_prefix('[') {
                    let (set, after) = set.split_once(']').unwrap();
                    let range = (set.as_bytes()[0], set.as_bytes()[2]);
                    rest = after;
                    let mut n = 1;
                    if let Some(count) = rest.strip_prefix('{') {
                        let (count, after) = count.split_once('}').unwrap();
                        (n, rest) = (count.parse().unwrap(), after);
                    }
                    sets.extend(std::iter::repeat_n(range, n));
                } else {
                    let byte = rest.as_bytes()[0];
                    sets.push((byte, byte));
                    rest = &rest[1..];
                }
            }
            let in_set = |((low, high), byte): (&(u8, u8), u8)| (*low..=*high).contains(&byte);
            sets.len() == text.len() && sets.iter().zip(text.bytes()).all(in_set)
        })
    }

    #[test]
    fn token_ids_have_an_exact_pattern() {
        for most in [0, 1, 9, 10, 11, 31, 99, 100, 109, 250, 999, 1000, 1234] {
            let pattern = up_to(most);
            for id in 0..=most + 1200 {
                let got = matches(&pattern, &id.to_string());
                assert_eq!(got, id <= most, "{id} of {most}: {pattern}");
            }
            assert!(!matches(&pattern, "00") && !matches(&pattern, "01") && !matches(&pattern, ""));
        }
    }
}
