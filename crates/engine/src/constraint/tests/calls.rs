//! Grammars of tool calls allow exactly the texts that a family's parser reads as calls.

use paceline_text::chat::ChatTemplate;
use paceline_text::tools::{CallRules, Event, ReaderOptions, Syntax, ToolCallFormat};
use serde_json::{Value as Json, json};

use super::families::Case;
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

/// Several calls are allowed.
const fn rules(tools: &[Json], is_required: bool) -> CallRules<'_> {
    CallRules {
        tools,
        is_required,
        is_parallel: true,
        has_any_arguments: false,
        answer: None,
    }
}

/// A tokenizer of bytes and these control tokens, with its grammars.
fn vocabulary(controls: &[&str]) -> (Tokenizer, Grammars) {
    let tokenizer = crate::engine::tests::tiny::byte_tokenizer(controls);
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    (tokenizer, grammars)
}

impl Case {
    /// `None` for a format without a marker for optional calls.
    fn constraint(&self, tokenizer: &Tokenizer, is_required: bool) -> Option<Constraint> {
        let tools = tools();
        let rules = rules(&tools, is_required);
        let grammar = self.syntax().constraint(tokenizer, &[], &rules).unwrap()?;
        let relaxed = grammar.relaxed.iter().map(|(_, u)| u.keyword.as_str());
        assert_eq!(relaxed.collect::<Vec<_>>(), ["uniqueItems"]);
        Some(grammar.constraint)
    }

    fn syntax(&self) -> Syntax {
        Syntax::of(&ChatTemplate::new(&self.template).unwrap())
    }

    fn is(&self, family: ToolCallFormat) -> bool {
        self.syntax().family() == Some(family)
    }

    /// Number of calls that the parser finds.
    fn read(&self, answer: &str) -> usize {
        let syntax = self.syntax();
        let tokenizer = crate::engine::tests::tiny::byte_tokenizer(&self.controls());
        let prompt = tokenizer.encode("<|start|>assistant", Specials::Parse, false);
        let prompt = prompt.unwrap();
        let mut reader = syntax.reader(&tokenizer, &prompt, &tools(), ReaderOptions::default());
        let mut events = reader.push(answer);
        events.extend(reader.finish());
        assert_eq!(reader.failed_calls(), 0, "{answer}");
        let is_end = |event: &&Event| matches!(event, Event::CallEnd { .. });
        events.iter().filter(is_end).count()
    }
}

#[test]
fn an_answer_of_a_schema_stands_beside_calls() {
    let (schema, tools) = (json!({"type": "object", "required": ["n"]}), tools());
    for case in &Case::all() {
        let (tokenizer, grammars) = vocabulary(&case.controls());
        let rules = CallRules {
            answer: Some(&schema),
            ..rules(&tools, false)
        };
        let grammar = case.syntax().constraint(&tokenizer, &[], &rules).unwrap();
        if case.is(ToolCallFormat::Harmony) {
            // Its answers are in a channel; no grammar combines both yet.
            assert!(grammar.is_none());
            continue;
        }
        let constraint = grammar.unwrap().constraint;
        let passed = |text: &str| passes(&grammars, &tokenizer, &constraint, text);
        assert_eq!(passed(&case.calls[0]), Some(true), "{constraint:?}");
        assert_eq!(passed(r#"{"n": 1}"#), Some(true));
        assert_eq!(passed(&case.broken[0]), None);
        assert_eq!(passed(r#"{"m": 1}"#), None);
        assert_eq!(passed("Words."), None);
    }
}

/// In arguments of calls, and in answers after reasoning.
#[test]
fn white_space_in_calls_is_bounded() {
    let (tokenizer, grammars) = vocabulary(&[]);
    let syntax = Syntax::of(&ChatTemplate::new("<tool_call> </think>").unwrap());
    let schema = json!({"type": "object", "required": ["n"]});
    let answer = syntax.bound_json(&tokenizer, &[], &schema);
    let tools = tools();
    let rules = rules(&tools, true);
    let call = syntax.constraint(&tokenizer, &[], &rules).unwrap();
    let begun = r#"<tool_call>{"name": "look", "arguments": {"#;
    let call = call.unwrap().constraint;
    for (constraint, begun) in [(answer, "<think>a</think>{"), (call, begun)] {
        let guide = grammars.guide(constraint).unwrap();
        assert_eq!(repeats(&guide, begun, " ", &tokenizer), 20, "{begun}");
    }
}

#[test]
fn a_model_may_think_before_it_answers_or_calls() {
    let first = &Case::all()[0].calls[0];
    let prompts = ["", "<think>\n"];
    for (prompt, thought) in prompts
        .into_iter()
        .zip(["<think>a {b</think>\n", "a {b</think>\n"])
    {
        let (tokenizer, grammars) = vocabulary(&[]);
        let prompt = tokenizer.encode(prompt, Specials::AsText, false).unwrap();
        let syntax = Syntax::of(&ChatTemplate::new("<tool_call> </think>").unwrap());
        let schema = json!({"type": "object", "required": ["n"]});
        let answer = syntax.bound_json(&tokenizer, &prompt, &schema);
        let tools = tools();
        let call = syntax.constraint(&tokenizer, &prompt, &rules(&tools, true));
        let call = call.unwrap().unwrap().constraint;
        for (constraint, text) in [(&answer, r#"{"n": 1}"#), (&call, first)] {
            let passed = |text: &str| passes(&grammars, &tokenizer, constraint, text);
            let whole = passed(&format!("{thought}{text}"));
            assert_eq!(whole, Some(true), "{constraint:?}");
            assert_eq!(passed(&format!("{thought}Words.")), None);
        }
    }
}

#[test]
fn what_the_reader_takes_for_a_call_passes() {
    for case in &Case::all() {
        let (tokenizer, grammars) = vocabulary(&case.controls());
        for is_required in [false, true] {
            let Some(constraint) = case.constraint(&tokenizer, is_required) else {
                let is_unmarked = case.is(ToolCallFormat::Llama3);
                assert!(!is_required && is_unmarked, "{}", case.template);
                continue;
            };
            grammars
                .check(&constraint)
                .unwrap_or_else(|e| panic!("{e}: {constraint:?}"));
            for call in &case.calls {
                assert!(case.read(call) > 0, "{call}");
                let passed = passes(&grammars, &tokenizer, &constraint, call);
                assert_eq!(passed, Some(true), "{is_required} {call}\n{constraint:?}");
            }
            for broken in &case.broken {
                let passed = passes(&grammars, &tokenizer, &constraint, broken);
                assert_eq!(passed, None, "{is_required} {broken}");
            }
            let words = passes(&grammars, &tokenizer, &constraint, "Words.");
            assert_eq!(words.is_some(), !is_required, "{}", case.template);
        }
    }
}

/// A random number below `n`; advances the state (xorshift, Marsaglia 2003).
fn draw(state: &mut u64, n: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state % n as u64) as usize
}

/// Ends of free texts, which random bytes would never form.
const ENDS: &str = "</arg_value> \n</parameter> </parameter> </｜DSML｜parameter> </think> \"}";

/// The next byte or control token. An ending that was begun continues; else chance decides. Marks
/// are likelier, since texts never end when each byte is as probable as the others.
fn choose(allowed: &[u32], begun: &mut Vec<u8>, state: &mut u64) -> u32 {
    if begun.is_empty() && draw(state, 8) == 0 {
        let ends: Vec<&str> = ENDS.split(' ').collect();
        *begun = ends[draw(state, ends.len())].bytes().rev().collect();
    }
    if let Some(byte) = begun.pop() {
        if allowed.contains(&byte.into()) {
            return byte.into();
        }
        begun.clear();
    }
    let is_control = |id: u32| id > 256;
    let is_mark = |id: u32| is_control(id) || b"<>{}[]\":,/\n|=ao".contains(&(id as u8));
    let is_plain = |id: u32| is_control(id) || id < 127;
    let pick = |is: &dyn Fn(u32) -> bool| -> Vec<u32> {
        allowed.iter().copied().filter(|id| is(*id)).collect()
    };
    let (marks, plain) = (pick(&is_mark), pick(&is_plain));
    let pool = match draw(state, 4) {
        1.. if !marks.is_empty() => &marks,
        _ if !plain.is_empty() => &plain,
        _ => allowed,
    };
    pool[draw(state, pool.len())]
}

/// An answer of random allowed tokens; `None` if it does not end soon.
fn drawn(
    grammars: &Grammars,
    tokenizer: &Tokenizer,
    constraint: &Constraint,
    state: &mut u64,
) -> Option<String> {
    const TOKENS: usize = 800;
    let (vocab, end) = (tokenizer.vocab_size(), tokenizer.eos().unwrap());
    let mut guide = grammars.guide(constraint.clone()).unwrap();
    let (mut answer, mut begun) = (Vec::new(), Vec::new());
    for _ in 0..TOKENS {
        let allowed: Vec<u32> = match guide.allowed(vocab) {
            Allowed::Only(mask) => {
                let ids = 0..vocab as u32;
                ids.filter(|id| mask.is_allowed(*id)).collect()
            }
            _ => return None,
        };
        if allowed.contains(&end) {
            return String::from_utf8(answer).ok();
        }
        let token = choose(&allowed, &mut begun, state);
        match u8::try_from(token) {
            Ok(byte) => answer.push(byte),
            Err(_) => answer.extend(tokenizer.token_text(token).unwrap().bytes()),
        }
        guide.accept(token, tokenizer);
    }
    None
}

/// A family's parser finds calls of these tools in every answer that its grammar allows.
#[test]
fn what_passes_is_a_call_for_the_reader() {
    const DRAWS: usize = 16;
    for case in &Case::all() {
        let (tokenizer, grammars) = vocabulary(&case.controls());
        let constraint = case.constraint(&tokenizer, true).unwrap();
        let mut state = 0x2545_f491_4f6c_dd1d;
        let draw = |_| drawn(&grammars, &tokenizer, &constraint, &mut state);
        let answers: Vec<String> = (0..DRAWS).filter_map(draw).collect();
        assert!(answers.len() > DRAWS / 4, "{}: {answers:?}", case.template);
        for answer in answers {
            assert!(case.read(&answer) > 0, "{}: {answer}", case.template);
        }
    }
}

/// Gemma's grammar enforces tool names and the call format.
#[test]
fn gemmas_calls_are_held_to_their_form() {
    let controls = r#"<|tool_call> <tool_call|> <|"|> <|channel> <channel|>"#;
    let controls: Vec<&str> = controls.split(' ').collect();
    let case = Case {
        template: "<|tool_call> <channel|>".to_owned(),
        ..Case::default()
    };
    let strict = tools();
    for controls in [&controls[..], &[]] {
        let (tokenizer, grammars) = vocabulary(controls);
        let grammar = case.syntax();
        let grammar = grammar.constraint(&tokenizer, &[], &rules(&strict[1..], true));
        let grammar = grammar.unwrap().unwrap();
        assert_eq!(grammar.relaxed[0].1.keyword, "properties");
        let constraint = grammar.constraint;
        let passed = |text: &str| passes(&grammars, &tokenizer, &constraint, text);
        for call in [
            "<|tool_call>call:run{code:<|\"|>a < \"b\"\n<|\"|>,n:[1,-2.5,true,null]}<tool_call|>",
            "<|tool_call>call:run{}<tool_call|><|tool_call>call:run{a:{b:<|\"|><|\"|>}}<tool_call|>",
        ] {
            assert_eq!(passed(call), Some(true), "{call}\n{constraint:?}");
            assert!(case.read(call) > 0, "{call}");
        }
        let [look, run] = ["<|tool_call>call:look", "<|tool_call>call:run{a:b"];
        for broken in ["Words.", look, run] {
            assert_eq!(passed(broken), None, "{broken}");
        }
        let all = rules(&strict, true);
        let grammar = case.syntax().constraint(&tokenizer, &[], &all);
        assert!(grammar.unwrap().is_none());
    }
}
