//! Grammars of clients: schemas, expressions, Lark, choices. They compile or are refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_engine::Grammars;
use paceline_fuzz::{VOCAB, tokenizer};
use paceline_text::grammar::{Constraint, Grammar, relaxed, strict};

thread_local! {
    static GRAMMARS: Grammars = Grammars::new(&tokenizer(), VOCAB).expect("a vocabulary of bytes");
}

// The engine turns panics of the grammar's crate into errors; libFuzzer's own hook would stop at
// them.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |text: &str| {
    let mut chars = text.chars();
    let kind = chars.next();
    let rest = chars.as_str().to_owned();
    if let Ok(schema) = serde_json::from_str(&rest) {
        let _ = (relaxed(&schema), strict(&schema));
    }
    let grammar = match kind {
        Some('s') => Grammar::JsonSchema(rest),
        Some('r') => Grammar::Regex(rest),
        Some('l') => Grammar::Lark(rest),
        Some('c') => Grammar::Choice(rest.lines().map(str::to_owned).collect()),
        _ => return,
    };
    GRAMMARS.with(|grammars| {
        let _ = grammars.check(&Constraint::whole(grammar));
    });
});
