//! Grammars of calls: what a family's reader takes for a call passes, and nothing else does.

use paceline_formats::chat::ChatTemplate;
use paceline_formats::tools::{CallRules, Event, ReaderOptions, Syntax};
use serde_json::{Value as Json, json};

use super::*;

fn tools() -> Vec<Json> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "integer", "minimum": 0},
        },
        "required": ["city"],
        "additionalProperties": false,
    });
    let function = json!({"name": "look", "parameters": parameters, "strict": true});
    let any = json!({"name": "run", "parameters": {"type": "object", "properties": {
        "code": {"type": "string"}, "not": {"type": "array", "uniqueItems": true}}}});
    [function, any]
        .map(|f| json!({"type": "function", "function": f}))
        .to_vec()
}

/// A family: markers of its template, its control tokens, calls that pass, calls that do not.
struct Case {
    template: &'static str,
    controls: &'static [&'static str],
    calls: &'static [&'static str],
    broken: &'static [&'static str],
}

const CASES: [Case; 2] = [
    Case {
        template: "<tool_call> </think>",
        controls: &[],
        calls: &[
            "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"<b>\", \"days\": 3}}\n</tool_call>",
            "<tool_call>{\"name\":\"run\",\"arguments\":{\"code\":\"a\\nb\"}}</tool_call>",
        ],
        broken: &[
            "<tool_call>\n{\"name\": \"other\"",
            "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"days\"",
            "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"x\"}}x",
        ],
    },
    Case {
        template: "<tool_call> <function= <parameter= </think>",
        controls: &[],
        calls: &[
            "<tool_call>\n<function=look>\n<parameter=city>\nKöln < 3\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=run>\n<parameter=code>\nif a:\n  b\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=look>\n<parameter=city>\nB\n</parameter>\n<parameter=unit>\nc\n</parameter>\n</function>\n</tool_call>",
        ],
        broken: &[
            "<tool_call>\n<function=other>",
            "<tool_call>\n<function=look>\n<parameter=unit>\n",
            "<tool_call>\n<function=look>\n<parameter=city>\nx\n</parameter>\n<parameter=days>\nx",
        ],
    },
];

impl Case {
    fn constraint(&self, tokenizer: &Tokenizer, is_required: bool) -> Constraint {
        let tools = tools();
        let rules = CallRules {
            tools: &tools,
            is_required,
            is_parallel: true,
            has_any_arguments: false,
            answer: None,
        };
        let grammar = self
            .syntax()
            .constraint(tokenizer, &[], &rules)
            .unwrap()
            .unwrap();
        let relaxed: Vec<&str> = grammar
            .relaxed
            .iter()
            .map(|(_, u)| u.keyword.as_str())
            .collect();
        assert_eq!(relaxed, ["uniqueItems"]);
        grammar.constraint
    }

    fn syntax(&self) -> Syntax {
        Syntax::of(&ChatTemplate::new(self.template).unwrap())
    }

    /// The calls that the reader finds.
    fn read(&self, answer: &str) -> usize {
        let syntax = self.syntax();
        let tokenizer = crate::engine::tests::tiny::byte_tokenizer(self.controls);
        let prompt = tokenizer
            .encode("<|start|>assistant", Specials::Parse, false)
            .unwrap();
        let mut reader = syntax.reader(&tokenizer, &prompt, &tools(), ReaderOptions::default());
        let mut events = reader.push(answer);
        events.extend(reader.finish());
        assert_eq!(reader.failed_calls(), 0, "{answer}");
        events
            .iter()
            .filter(|event| matches!(event, Event::CallEnd { .. }))
            .count()
    }
}

#[test]
fn an_answer_of_a_schema_stands_beside_calls() {
    let (schema, tools) = (json!({"type": "object", "required": ["n"]}), tools());
    for case in &CASES {
        let tokenizer = crate::engine::tests::tiny::byte_tokenizer(case.controls);
        let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
        let rules = CallRules {
            tools: &tools,
            is_required: false,
            is_parallel: true,
            has_any_arguments: false,
            answer: Some(&schema),
        };
        let grammar = case.syntax().constraint(&tokenizer, &[], &rules);
        let constraint = grammar.unwrap().unwrap().constraint;
        let passed = |text: &str| passes(&grammars, &tokenizer, &constraint, text);
        assert_eq!(passed(case.calls[0]), Some(true), "{constraint:?}");
        assert_eq!(passed(r#"{"n": 1}"#), Some(true));
        assert_eq!(passed(case.broken[0]), None);
        assert_eq!(passed(r#"{"m": 1}"#), None);
        assert_eq!(passed("Words."), None);
    }
}

#[test]
fn a_model_may_think_before_it_answers_or_calls() {
    for (prompt, thought) in [
        ("", "<think>a {b</think>\n"),
        ("<think>\n", "a {b</think>\n"),
    ] {
        let tokenizer = crate::engine::tests::tiny::byte_tokenizer(&[]);
        let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
        let prompt = tokenizer.encode(prompt, Specials::AsText, false).unwrap();
        let syntax = Syntax::of(&ChatTemplate::new("<tool_call> </think>").unwrap());
        let schema = json!({"type": "object", "required": ["n"]});
        let answer = syntax.bound_json(&tokenizer, &prompt, &schema);
        let tools = tools();
        let rules = CallRules {
            tools: &tools,
            is_required: true,
            is_parallel: true,
            has_any_arguments: false,
            answer: None,
        };
        let call = syntax.constraint(&tokenizer, &prompt, &rules);
        let call = call.unwrap().unwrap().constraint;
        for (constraint, text) in [(&answer, r#"{"n": 1}"#), (&call, CASES[0].calls[0])] {
            let passed = |text: &str| passes(&grammars, &tokenizer, constraint, text);
            assert_eq!(
                passed(&format!("{thought}{text}")),
                Some(true),
                "{constraint:?}"
            );
            assert_eq!(passed(&format!("{thought}Words.")), None);
        }
    }
}

#[test]
fn what_the_reader_takes_for_a_call_passes() {
    for case in &CASES {
        let tokenizer = crate::engine::tests::tiny::byte_tokenizer(case.controls);
        let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
        for is_required in [false, true] {
            let constraint = case.constraint(&tokenizer, is_required);
            grammars
                .check(&constraint)
                .unwrap_or_else(|e| panic!("{e}: {constraint:?}"));
            for call in case.calls {
                assert!(case.read(call) > 0, "{call}");
                let passed = passes(&grammars, &tokenizer, &constraint, call);
                assert_eq!(passed, Some(true), "{is_required} {call}\n{constraint:?}");
            }
            for broken in case.broken {
                let passed = passes(&grammars, &tokenizer, &constraint, broken);
                assert_eq!(passed, None, "{is_required} {broken}");
            }
            let words = passes(&grammars, &tokenizer, &constraint, "Words.");
            assert_eq!(words.is_some(), !is_required, "{}", case.template);
        }
    }
}
