//! Compiles and runs chat templates: minijinja with the functions and settings of `transformers`,
//! and limits on steps and output.

use std::error::Error as _;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{Environment, ErrorKind, State, Value};

use super::{TemplateError, depth, json};
use crate::panics;

/// Longest template: the longest known (with tools, dates and thinking) have 20 KB.
const MAX_TEMPLATE_BYTES: usize = 64 << 10;

/// Steps of a rendering: instructions, and 64 bytes of the texts that filters and operators read or
/// make (minijinja's `fuel`). A turn takes 30 (SmolLM2) to 300 (Qwen 3), so this is a
/// conversation of 30,000 turns; an endless template is stopped within a second.
pub(super) const MAX_FUEL: u64 = 10_000_000;

/// Longest rendered text: 4 million tokens at 4 bytes, more than any context.
pub(super) const MAX_OUTPUT_BYTES: usize = 16 << 20;

const NAME: &str = "chat";

/// Message that a template passes to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Compiles `source`.
///
/// Set as in `transformers`:
/// - `trim_blocks`, `lstrip_blocks` and loop controls are on, and nothing is escaped;
/// - undefined values print as nothing;
/// - there are `raise_exception`, and `tojson` without HTML escapes;
/// - floats are written as Python writes them;
/// - there are the methods of Python's strings, lists and dictionaries;
/// - `{% generation %}` (which marks what a model wrote, for training) is accepted and means
///   nothing.
///
/// There is no loader: a template sees no file.
pub(super) fn compile(source: &str) -> Result<Environment<'static>, TemplateError> {
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(TemplateError::TooLong {
            size: source.len(),
            limit: MAX_TEMPLATE_BYTES,
        });
    }
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    let syntax = syntax.map_err(syntax_error)?;
    let source = without_generation(source);
    depth::check(&source, syntax.clone())?;
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_fuel(Some(MAX_FUEL));
    env.add_filter("tojson", json::tojson);
    env.add_filter("string", string);
    env.set_formatter(|out, state, value| match python_float(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => minijinja::escape_formatter(out, state, value),
    });
    env.add_test("iterable", is_iterable);
    env.add_function("raise_exception", raise_exception);
    let added = panics::catch(|| env.add_template_owned(NAME, source));
    added.map_err(panicked)?.map_err(syntax_error)?;
    Ok(env)
}

/// Jinja's test `iterable`. minijinja's accepts `none`, so templates with `tools is iterable and
/// tools | length > 0` (Qwen3-Coder, Nemotron 3) would fail without tools.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Jinja's filter `string`, with floats as Python writes them.
fn string(state: &State<'_, '_>, value: &Value) -> Result<Value, minijinja::Error> {
    match python_float(value) {
        Some(text) => Ok(text.into()),
        None => minijinja::filters::string(state, value),
    }
}

/// A finite float as Python writes it.
fn python_float(value: &Value) -> Option<String> {
    if !value.is_number() || value.is_integer() {
        return None;
    }
    let number = f64::try_from(value.clone()).ok()?;
    number.is_finite().then(|| json::python_float(number))
}

fn raise_exception(words: Rest<Value>) -> Result<Value, minijinja::Error> {
    let text = words.first().map(Value::to_string).unwrap_or_default();
    let error = minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception");
    Err(error.with_source(Raised(text)))
}

/// Makes `{% generation %}` an `{% if true %}`, with its white-space marks kept.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let tag = &rest[at + 2..];
        let Some(end) = tag.find("%}") else { break };
        let body = &tag[..end];
        let word = body.trim_matches(['-', '+']).trim();
        let new = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => word,
        };
        out.push_str(&rest[..at + 2]);
        if new == word {
            out.push_str(body);
        } else {
            out.push_str(&body.replacen(word, new, 1));
        }
        rest = &tag[end..];
    }
    out + rest
}

fn syntax_error(error: minijinja::Error) -> TemplateError {
    TemplateError::Syntax {
        line: error.line().unwrap_or(0),
        reason: reason_of(&error),
    }
}

const fn panicked(message: String) -> TemplateError {
    TemplateError::Panicked { message }
}

fn reason_of(error: &minijinja::Error) -> String {
    error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned)
}

/// Runs the template with `context`; it may write `limit` bytes.
pub(super) fn render(
    env: &Environment<'_>,
    context: Value,
    limit: usize,
) -> Result<String, TemplateError> {
    let template = env.get_template(NAME).map_err(syntax_error)?;
    let mut out = Limited::new(limit.min(MAX_OUTPUT_BYTES));
    let ended = panics::catch(|| template.render_captured_to(context, &mut out));
    match ended.map_err(panicked)? {
        Ok(_) => Ok(String::from_utf8(out.bytes).expect("templates write text")),
        Err(_) if out.is_full => Err(TemplateError::OutputTooLong { limit: out.limit }),
        Err(error) => Err(render_error(&error)),
    }
}

fn render_error(error: &minijinja::Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::TooManySteps { limit: MAX_FUEL };
    }
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TemplateError::Raised {
                message: message.clone(),
            };
        }
        source = cause.source();
    }
    TemplateError::Render {
        line: error.line().unwrap_or(0),
        reason: reason_of(error),
    }
}

/// Collects output up to the limit.
struct Limited {
    bytes: Vec<u8>,
    limit: usize,
    is_full: bool,
}

impl Limited {
    const fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            is_full: false,
        }
    }
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            self.is_full = true;
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_is_not_iterable() {
        for (value, expected) in [
            ("unknown", "True"),
            ("none", "False"),
            ("[]", "True"),
            ("{}", "True"),
            ("'x'", "True"),
            ("1", "False"),
        ] {
            let env = compile(&format!("{{{{ {value} is iterable }}}}")).unwrap();
            let text = render(&env, minijinja::context! {}, 100).unwrap();
            assert_eq!(text, expected, "{value}");
        }
    }

    #[test]
    fn floats_are_pythons() {
        let source = "{{ 1e-05 }} {{ 1e22 | string }} {{ 2.0 }} {{ 3 }} {{ 0.5 | string }}";
        let env = compile(source).unwrap();
        let text = render(&env, minijinja::context! {}, 100).unwrap();
        assert_eq!(text, "1e-05 1e+22 2.0 3 0.5");
    }

    #[test]
    fn a_panic_of_the_interpreter_is_a_failure_of_the_template() {
        fn fall() -> Result<Value, minijinja::Error> {
            panic!("not that {}", "deep");
        }
        let mut env = compile("{{ fall() if deep else 'text' }}").unwrap();
        env.add_function("fall", fall);
        let failure = render(&env, minijinja::context! { deep => true }, 100).unwrap_err();
        assert!(failure.is_of_model(), "{failure}");
        let words = "chat template makes its interpreter panic: not that deep";
        assert_eq!(failure.to_string(), words);
        let text = render(&env, minijinja::context! {}, 100);
        assert_eq!(text.as_deref(), Ok("text"), "the next conversation");
    }

    #[test]
    fn generation_tags_keep_their_white_space_marks() {
        for (source, expected) in [
            (
                "a{% generation %}b{% endgeneration %}",
                "a{% if true %}b{% endif %}",
            ),
            ("{%- generation -%}", "{%- if true -%}"),
            (
                "{{ generation }}{% if generation %}",
                "{{ generation }}{% if generation %}",
            ),
            ("{% unfinished", "{% unfinished"),
            ("", ""),
        ] {
            assert_eq!(without_generation(source), expected);
        }
    }
}
