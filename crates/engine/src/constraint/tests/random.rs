//! Random schemas with random answers within their grammars: each complete answer validates.

use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::{Map, Value as Json, json};

use super::*;

/// Number of schemas that the issue requires.
const SCHEMAS: usize = 500;

/// Tokens after which an answer is abandoned.
const LONGEST: usize = 800;

/// Random numbers below a bound.
struct Dice(Pcg64Mcg);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        (self.0.next_u64() % n as u64) as usize
    }

    /// True once in `n` calls on average.
    fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn schema(&mut self, depth: usize) -> Json {
        match self.below(if depth == 0 { 6 } else { 9 }) {
            0 => {
                let least = self.below(4);
                json!({"type": "string", "minLength": least, "maxLength": least + self.below(9)})
            }
            1 => json!({"enum": ["red", "dark green", "\"", 7, null, {"a": [true]}]}),
            2 => {
                let least = self.below(200) as i64 - 100;
                json!({"type": "integer", "minimum": least, "maximum": least + self.below(900) as i64})
            }
            3 => {
                let least = self.below(20) as i64 - 10;
                json!({"type": "number", "minimum": least, "exclusiveMaximum": least + 1 + self.below(50) as i64})
            }
            4 => json!({"type": ["boolean", "null"]}),
            5 => json!({"const": [self.below(9), "x"]}),
            6 => {
                let least = self.below(3);
                let items = self.schema(depth - 1);
                json!({"type": "array", "items": items, "minItems": least, "maxItems": least + self.below(3)})
            }
            7 => json!({"anyOf": [self.schema(depth - 1), self.schema(depth - 1)]}),
            _ => self.object(depth - 1),
        }
    }

    fn object(&mut self, depth: usize) -> Json {
        let (mut properties, mut required) = (Map::new(), Vec::new());
        for i in 0..1 + self.below(4) {
            let name = format!("p{i}");
            properties.insert(name.clone(), self.schema(depth));
            if !self.once_in(3) {
                required.push(name);
            }
        }
        json!({"type": "object", "properties": properties, "required": required,
            "additionalProperties": false})
    }

    /// A random token that `mask` allows, biased towards tokens that end texts and lists.
    fn token(&mut self, mask: &SimpleVob, tokenizer: &Tokenizer) -> u32 {
        let all: Vec<u32> = mask.iter().collect();
        let closes = |id: &u32| {
            let first = tokenizer.token_bytes(*id).and_then(<[u8]>::first);
            first.is_some_and(|first| b"\"]}".contains(first))
        };
        let ends = |id: &u32| tokenizer.is_end_of_generation(*id);
        let each = || all.iter().copied();
        let closing: Vec<u32> = each().filter(ends).chain(each().filter(closes)).collect();
        let from = match closing.is_empty() || self.once_in(2) {
            true => &all,
            false => &closing,
        };
        from[self.below(from.len())]
    }
}

/// Why `value` does not match `schema`, which [`Dice::schema`] made.
fn wrong(schema: &Json, value: &Json) -> Option<String> {
    let is = |name: &str| match name {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        _ => value.is_object(),
    };
    let fits = match &schema["type"] {
        Json::String(name) => is(name),
        Json::Array(names) => names.iter().any(|name| is(name.as_str().unwrap())),
        _ => true,
    };
    let (number, size) = (value.as_f64(), size_of(value));
    let holds =
        |keyword: &str, check: &dyn Fn(f64) -> bool| schema[keyword].as_f64().is_none_or(check);
    let bounds = [
        fits,
        holds("minimum", &|least| number.is_some_and(|x| x >= least)),
        holds("maximum", &|most| number.is_some_and(|x| x <= most)),
        holds("exclusiveMaximum", &|most| number.is_some_and(|x| x < most)),
        holds("minLength", &|least| size >= least),
        holds("maxLength", &|most| size <= most),
        holds("minItems", &|least| size >= least),
        holds("maxItems", &|most| size <= most),
        schema["enum"]
            .as_array()
            .is_none_or(|all| all.contains(value)),
        schema.get("const").is_none_or(|only| only == value),
        schema["anyOf"]
            .as_array()
            .is_none_or(|all| all.iter().any(|one| wrong(one, value).is_none())),
        required(schema, value),
    ];
    if bounds.contains(&false) {
        return Some(format!("{value} is not as {schema}"));
    }
    let items = value.as_array().into_iter().flatten();
    let mut parts = items.filter_map(|item| wrong(schema.get("items")?, item));
    parts.next().or_else(|| in_properties(schema, value))
}

fn size_of(value: &Json) -> f64 {
    match value {
        Json::String(text) => text.chars().count() as f64,
        Json::Array(items) => items.len() as f64,
        _ => 0.0,
    }
}

fn required(schema: &Json, value: &Json) -> bool {
    let names = schema["required"].as_array().into_iter().flatten();
    let mut names = names.filter_map(Json::as_str);
    names.all(|name| value.get(name).is_some())
}

fn in_properties(schema: &Json, value: &Json) -> Option<String> {
    let properties = schema["properties"].as_object()?;
    let entries = value.as_object().into_iter().flatten();
    let mut wrongs = entries.filter_map(|(name, value)| match properties.get(name) {
        Some(schema) => wrong(schema, value),
        None => Some(format!("{name} is no property of {schema}")),
    });
    wrongs.next()
}

/// A random answer within the grammar; `None` if it does not end.
fn answer(guide: &mut Guide, tokenizer: &Tokenizer, dice: &mut Dice) -> Option<String> {
    let mut said = Vec::new();
    for _ in 0..LONGEST {
        let token = match guide.allowed(tokenizer.vocab_size()) {
            Allowed::Only(mask) => dice.token(mask, tokenizer),
            Allowed::Complete => return Some(String::from_utf8(said).unwrap()),
            other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&said)),
        };
        if tokenizer.is_end_of_generation(token) {
            return Some(String::from_utf8(said).unwrap());
        }
        said.extend_from_slice(tokenizer.token_bytes(token).unwrap());
        guide.accept(token, tokenizer);
    }
    None
}

#[test]
fn random_answers_to_random_schemas_validate() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    let mut dice = Dice(Pcg64Mcg::seed_from_u64(28));
    let mut ended = 0;
    for i in 0..SCHEMAS {
        let schema = dice.object(2);
        let constraint = whole(Grammar::JsonSchema(schema.to_string()));
        let mut guide = grammars.guide(constraint).unwrap();
        let Some(text) = answer(&mut guide, &tokenizer, &mut dice) else {
            continue;
        };
        ended += 1;
        let document: Json = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("schema {i}: {error}: {text:?}\n{schema}"));
        let wrong = wrong(&schema, &document);
        assert_eq!(wrong, None, "schema {i}: {text}\n{schema}");
    }
    assert!(ended * 10 >= SCHEMAS * 9, "{ended} of {SCHEMAS} ended");
}
