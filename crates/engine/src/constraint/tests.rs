//! Masks of grammars, tested without a model.

use paceline_text::grammar::DelimitedSpan;
use paceline_text::tokenizer::Specials;

use super::*;

mod calls;
mod families;
mod random;
mod suite;

/// A vocabulary of all bytes, some words, and control tokens.
fn tokenizer() -> Tokenizer {
    crate::engine::tests::tiny::byte_tokenizer(&["<call>", "</call>"])
}

fn whole(grammar: Grammar) -> Constraint {
    Constraint::whole(grammar)
}

/// Whether the grammar allows `text` token by token, and an end after it.
fn passes(
    grammars: &Grammars,
    tokenizer: &Tokenizer,
    constraint: &Constraint,
    text: &str,
) -> Option<bool> {
    let vocab = tokenizer.vocab_size();
    let mut guide = grammars.guide(constraint.clone()).unwrap();
    for token in tokenizer.encode(text, Specials::Parse, false).unwrap() {
        match guide.allowed(vocab) {
            Allowed::All => {}
            Allowed::Only(mask) if mask.is_allowed(token) => {}
            _ => return None,
        }
        guide.accept(token, tokenizer);
    }
    let end = tokenizer.eos().unwrap();
    Some(match guide.allowed(vocab) {
        Allowed::All | Allowed::Complete => true,
        Allowed::Only(mask) => mask.is_allowed(end),
        Allowed::Broken => return None,
    })
}

/// Allowed tokens; `None` for all.
fn tokens(allowed: &Allowed<'_>, vocab: usize) -> Option<Vec<u32>> {
    match allowed {
        Allowed::All => None,
        Allowed::Only(mask) => {
            let ids = 0..vocab as u32;
            Some(ids.filter(|id| mask.is_allowed(*id)).collect())
        }
        Allowed::Complete | Allowed::Broken => panic!("{allowed:?}"),
    }
}

/// Also where tokens are forced by id, and after the end.
#[test]
fn knowing_the_text_ahead_changes_no_mask() {
    let tokenizer = tokenizer();
    let vocab = tokenizer.vocab_size();
    let grammars = Grammars::new(&tokenizer, vocab).unwrap();
    let encode = |text: &str| tokenizer.encode(text, Specials::Parse, false).unwrap();
    let id = |name: &str| encode(name)[0];
    let (call, end) = (id("<call>"), id("</call>"));
    let marked = format!("start: \"ab\" <[{call}]> /[xy]/ \"cd\" <[{end}]>");
    let schema = r#"{"type": "object", "properties": {"field_1": {"enum": ["red", "reed"]}},
        "required": ["field_1"], "additionalProperties": false}"#;
    let schema = Grammar::JsonSchema(schema.into());
    for (grammar, text, soles) in [
        (Grammar::Regex("abc(d|e)fgh".into()), "abcdfgh", 6),
        (Grammar::Lark(marked), "ab<call>xcd</call>", 4),
        (schema, r#"{"field_1":"reed"}"#, 8),
    ] {
        let constraint = whole(grammar);
        let [mut plain, mut ahead] = [(); 2].map(|()| grammars.guide(constraint.clone()).unwrap());
        let mut found = 0;
        for token in encode(text) {
            let sole = ahead.sole(vocab);
            let guesses = ahead.guesses(4);
            let expected = tokens(&plain.allowed(vocab), vocab);
            assert_eq!(tokens(&ahead.allowed(vocab), vocab), expected, "{text}");
            if let Some(sole) = sole {
                assert_eq!(expected, Some(vec![sole]), "{text}");
                found += 1;
            }
            if let Some(guess) = guesses.first() {
                assert!(expected.unwrap().contains(guess), "{text}");
            }
            plain.accept(token, &tokenizer);
            ahead.accept(token, &tokenizer);
        }
        assert!(found >= soles, "{found} of {text}");
        let end = ahead.sole(vocab);
        assert!(end.is_none() || end == tokenizer.eos(), "{text}: {end:?}");
    }
}

#[test]
fn each_kind_of_grammar() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    let schema = r#"{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "additionalProperties": false, "x-made-by": "me"}"#;
    let json = |text: &str| Grammar::JsonSchema(text.into());
    let regex = |text: &str| Grammar::Regex(text.into());
    let lark = |text: &str| Grammar::Lark(text.into());
    let choice = |texts: [&str; 2]| Grammar::Choice(texts.map(str::to_owned).to_vec());
    let email = r#"{"type": "string", "format": "email"}"#;
    let ipv6 = r#"{"type": "string", "format": "ipv6"}"#;
    let object = Grammar::JsonObject;
    let cases = [
        (json(schema), r#"{"a": 12}"#, Some(true)),
        (json(schema), r#"{"a": "#, Some(false)),
        (json(schema), r#"{"a": "x"}"#, None),
        (json(schema), r#"{"b": 1}"#, None),
        (json(email), r#""\"a b\"@[IPv6:::1]""#, Some(true)),
        (json(ipv6), r#""::ffff:192.168.0.256""#, None),
        (object.clone(), r#"{"any": [1, {"x": null}]}"#, Some(true)),
        (object, "[1]", None),
        (regex("[ab]+c"), "abbac", Some(true)),
        (regex("[ab]+c"), "abba", Some(false)),
        (regex("[ab]+c"), "xabc", None),
        (choice(["yes", "no \"way\"\n"]), "no \"way\"\n", Some(true)),
        (choice(["yes", "no"]), "maybe", None),
        (lark("start: \"x\" <[257]> \"y\""), "x<call>y", Some(true)),
        (lark("start: \"x<call>y\""), "x<call>y", None),
    ];
    for (grammar, text, expected) in cases {
        let constraint = whole(grammar);
        let passed = passes(&grammars, &tokenizer, &constraint, text);
        assert_eq!(passed, expected, "{constraint:?} {text}");
    }
}

/// Maximum repetitions of `text` that may follow `begun`, up to 100.
fn repeats(guide: &Guide, begun: &str, text: &str, tokenizer: &Tokenizer) -> usize {
    let mut guide = guide.clone();
    let vocab = tokenizer.vocab_size();
    let encode = |text: &str| tokenizer.encode(text, Specials::Parse, false).unwrap();
    for token in encode(begun) {
        guide.accept(token, tokenizer);
    }
    let token = encode(text)[0];
    let passes = |guide: &mut Guide| match guide.allowed(vocab) {
        Allowed::Only(mask) => mask.is_allowed(token),
        allowed => panic!("{begun}: {allowed:?}"),
    };
    let mut n = 0;
    while n < 100 && passes(&mut guide) {
        guide.accept(token, tokenizer);
        n += 1;
    }
    n
}

/// A model that prefers white space to everything else still reaches the end of its answer.
#[test]
fn white_space_in_json_is_bounded() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    let schema = r#"{"type": "object", "properties": {"a": {"const": 42}, "b": {"type": "array"}},
        "required": ["a", "b"], "additionalProperties": false}"#;
    for grammar in [Grammar::JsonSchema(schema.into()), Grammar::JsonObject] {
        let guide = grammars.guide(whole(grammar)).unwrap();
        let document = r#"{"a":42,"b":[1,{}]}"#;
        // Not inside a name or a number.
        for at in [1, 4, 5, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18] {
            let begun = &document[..at];
            let repeats = |begun: &str, text| repeats(&guide, begun, text, &tokenizer);
            assert_eq!(repeats(begun, " "), 20, "{begun}");
            assert_eq!(repeats(begun, "\n"), 20, "{begun}");
            assert_eq!(repeats(&format!("{begun}\n"), " "), 40, "{begun}");
        }
        for ends in ["", document] {
            assert_eq!(repeats(&guide, ends, " ", &tokenizer), 0, "{ends}");
        }
    }
}

#[test]
fn grammars_begin_where_they_should() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    let begun = |start| Constraint {
        grammar: Grammar::Regex("[0-9]+;".into()),
        start,
    };
    let after = begun(Start::After {
        marker: "</think>".into(),
    });
    let thought = DelimitedSpan {
        open: "<think>".into(),
        close: "</think>".into(),
        is_open: false,
    };
    let lazily = begun(Start::Lazily {
        markers: vec!["<call>".into(), "CALL".into()],
        except: Some(thought),
    });
    for (constraint, text, expected) in [
        (&after, "hm 1 < 2", Some(true)),
        (&after, "hm</think>12;", Some(true)),
        (&after, "hm</think>12", Some(false)),
        (&after, "hm</think>x", None),
        (&lazily, "words<call>12; more words CALL3; and", Some(true)),
        (&lazily, "words<call>12", Some(false)),
        (&lazily, "words<call>x", None),
        (&lazily, "<think><call>x</think>y<call>1", Some(false)),
    ] {
        let passed = passes(&grammars, &tokenizer, constraint, text);
        assert_eq!(passed, expected, "{text}");
    }
}

#[test]
fn what_cannot_be_kept_is_refused_by_name() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap();
    let schema = |text: &str| whole(Grammar::JsonSchema(text.into()));
    let deep = format!("{}x{}", "(".repeat(50_000), ")".repeat(50_000));
    let regex = |text: &str| whole(Grammar::Regex(text.into()));
    let lark = |text: &str| whole(Grammar::Lark(text.into()));
    let marker = String::new();
    let unmarked = Constraint {
        grammar: Grammar::JsonObject,
        start: Start::After { marker },
    };
    let not = "schema keyword \"not\" at #/items is not supported";
    let [unusable, few] = ["the grammar cannot be used", "choice needs 1 to 4096 texts"];
    let long = "x".repeat(MAX_GRAMMAR_BYTES + 1);
    let cases = [
        (schema("{"), "the schema is not JSON"),
        (schema(r#"{"items": {"not": {}}}"#), not),
        (schema(r#"{"type": "nothing"}"#), unusable),
        (regex("("), unusable),
        (regex(&deep), unusable),
        (lark("start: other"), unusable),
        (lark(&long), "the grammar has 1048577 bytes"),
        (whole(Grammar::Choice(vec![])), few),
        (whole(Grammar::Choice(vec![String::new()])), few),
        (unmarked, "marker needs 1 to 1 texts"),
    ];
    for (constraint, expected) in cases {
        let error = grammars.check(&constraint).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn a_vocabulary_without_an_end_completes() {
    let tokenizer = crate::engine::tests::tiny::endless_tokenizer();
    let grammars = Grammars::new(&tokenizer, 7).unwrap();
    let mut guide = grammars.guide(whole(Grammar::Regex("ab".into()))).unwrap();
    for token in 0..2 {
        let Allowed::Only(mask) = guide.allowed(7) else {
            panic!()
        };
        assert_eq!(mask.to_list(), [token]);
        guide.accept(token, &tokenizer);
    }
    assert!(matches!(guide.allowed(7), Allowed::Complete));
}
