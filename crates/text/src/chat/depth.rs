//! Limits on a template's nesting, checked before it is parsed.
//!
//! minijinja bounds brackets and blocks (150 levels). But its parser, its compiler and the drop of
//! its tree recurse once for each `elif` and for each operator of a chain. Such chains are
//! `- - - x`, `a if b else a if b else ...` and `a + a + ...`. Without these bounds 64 KB of text
//! overflow a thread's stack.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

use super::TemplateError;

/// Most tokens between `{{` and `}}` or `{%` and `%}`. The longest tag of the templates in
/// `tests-data/golden` has 91. A thread with 2 MiB of stack bears this many levels (a test).
pub(super) const TAG_TOKENS_MAX: usize = 1000;

/// Most `elif` of a template. The golden templates have 12 at most.
pub(super) const ELIFS_MAX: usize = 250;

/// Refuses `source` if it nests too deep. Text that is no token is left to the parser to refuse.
///
/// Cost: one pass over the text.
pub(super) fn check(source: &str, syntax: SyntaxConfig) -> Result<(), TemplateError> {
    let (mut in_tag, mut elifs) = (0, 0);
    let mut begins_block = false;
    for token in tokenize(source, false, syntax) {
        let Ok((token, span)) = token else { break };
        let line = usize::from(span.start_line);
        in_tag = match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => 0,
            _ => in_tag + 1,
        };
        elifs += usize::from(begins_block && matches!(token, Token::Ident("elif")));
        begins_block = matches!(token, Token::BlockStart);
        for (count, what, limit) in [
            (in_tag, "tokens in a tag", TAG_TOKENS_MAX),
            (elifs, "branches by elif", ELIFS_MAX),
        ] {
            if count > limit {
                let what = what.to_owned();
                return Err(TemplateError::TooDeep { line, what, limit });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Here;
    use super::*;

    /// Chains of each kind of recursion, `n` links long.
    fn chains(n: usize) -> Vec<String> {
        let tag = |inner: String| format!("{{{{ {inner} }}}}");
        vec![
            tag("-".repeat(n) + "1"),
            tag("not ".repeat(n) + "1"),
            tag("a if b else ".repeat(n / 4) + "1"),
            tag("a ** ".repeat(n / 2) + "1"),
            tag("a + ".repeat(n / 2) + "1"),
            tag("a ~ ".repeat(n / 2) + "1"),
            tag("a and ".repeat(n / 2) + "1"),
            tag("a".to_owned() + &".a".repeat(n / 2)),
            tag("a".to_owned() + &"[a]".repeat(n / 3)),
            tag("a".to_owned() + &" | trim".repeat(n / 2)),
            tag("(".repeat(n / 2) + &")".repeat(n / 2)),
            tag("[".repeat(n / 2) + &"]".repeat(n / 2)),
            format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}x".repeat(n)),
            "{% if a %}".repeat(n) + &"{% endif %}".repeat(n),
        ]
    }

    #[test]
    fn long_chains_are_refused_before_they_are_parsed() {
        for source in chains(20_000) {
            let failure = Here::compile(&source).unwrap_err();
            let text = failure.to_string();
            assert!(text.len() < 200, "{source:.20}: {text}");
        }
    }

    #[test]
    fn a_small_stack_bears_the_longest_chains() {
        let on_small_stack = || {
            for n in [100, ELIFS_MAX, TAG_TOKENS_MAX - 3] {
                for source in chains(n) {
                    drop(Here::compile(&source));
                }
            }
        };
        let thread = std::thread::Builder::new().stack_size(2 << 20);
        thread.spawn(on_small_stack).unwrap().join().unwrap();
    }

    #[test]
    fn tags_are_counted_one_by_one() {
        let many = "{{ a + b }}{% if a %}x{% endif %}".repeat(1500);
        assert!(Here::compile(&many).is_ok());
    }
}
