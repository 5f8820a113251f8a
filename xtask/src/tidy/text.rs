//! Rules about lines: width, notes left in comments, the module doc, the file's size.

use super::{RustFile, TidyFinding};

/// The width rustfmt is set to; it leaves comments and long strings alone, this rule does not.
const WIDTH_MAX: usize = 100;

/// Files beyond this usually hold a second idea. A warning only: tests and tables may be long.
const FILE_LINES_MAX: usize = 800;

/// A file longer than this explains itself in a module doc.
const UNDOCUMENTED_LINES_MAX: usize = 50;

/// All line rules for one file.
pub(crate) fn check(file: &RustFile) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    for line in 1..=file.lines.len() {
        width(file, line, &mut findings);
        note(file, line, &mut findings);
    }
    let lines = file.lines.len();
    if lines > UNDOCUMENTED_LINES_MAX && !has_module_doc(file) {
        let message = format!("{lines} lines and no module doc (`//!`)");
        findings.push(TidyFinding::error(&file.path, 1, "module-doc", message));
    }
    if lines > FILE_LINES_MAX {
        let message = format!("{lines} lines, over {FILE_LINES_MAX}: look for the second idea");
        findings.push(TidyFinding::warning(&file.path, 1, "file-length", message));
    }
    findings
}

fn has_module_doc(file: &RustFile) -> bool {
    file.syntax
        .attrs
        .iter()
        .any(|attr| attr.path().is_ident("doc"))
}

/// Lines over the width, but for those that a string literal or an address makes long.
fn width(file: &RustFile, line: usize, findings: &mut Vec<TidyFinding>) {
    let text = &file.lines[line - 1];
    let width = text.chars().count();
    let literal = file.literal_columns[line - 1];
    let unbreakable = text.contains("://") || (literal > 0 && width - literal <= WIDTH_MAX);
    if width > WIDTH_MAX && !unbreakable {
        let message = format!("{width} characters, at most {WIDTH_MAX}");
        findings.push(TidyFinding::error(&file.path, line, "width", message));
    }
}

/// Notes for later have one form, `TODO(topic): sentence.`, which may run over several lines.
fn note(file: &RustFile, line: usize, findings: &mut Vec<TidyFinding>) {
    let comment = &file.comments[line - 1];
    for word in ["FIXME", "XXX", "HACK"] {
        if find_word(comment, word).is_some() {
            let message = format!("write `TODO(topic): sentence.` instead of {word}");
            findings.push(TidyFinding::error(&file.path, line, "todo-form", message));
        }
    }
    let Some(at) = find_word(comment, "TODO") else {
        return;
    };
    let mut note = comment[at..].trim_end().to_string();
    for next in &file.comments[line..] {
        let continued = next.trim_start().trim_start_matches(['/', '!', '*', ' ']);
        if note.ends_with('.') || continued.is_empty() {
            break;
        }
        note.push(' ');
        note.push_str(continued.trim_end());
    }
    if !is_well_formed(&note) {
        let message = "write `TODO(topic): sentence.`".to_string();
        findings.push(TidyFinding::error(&file.path, line, "todo-form", message));
    }
}

fn is_well_formed(note: &str) -> bool {
    note.strip_prefix("TODO(")
        .and_then(|rest| rest.split_once("): "))
        .is_some_and(|(topic, sentence)| !topic.is_empty() && sentence.len() > 1)
        && note.ends_with('.')
}

/// Byte offset of `word` in `text`, standing alone.
pub(super) fn find_word(text: &str, word: &str) -> Option<usize> {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).map(|(at, _)| at).find(|at| {
        !is_part(text[..*at].chars().next_back())
            && !is_part(text[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Vec<(&'static str, usize)> {
        let file = RustFile::parse("crates/base/src/lib.rs", text).expect("the sample is Rust");
        check(&file)
            .iter()
            .map(|finding| (finding.rule, finding.line))
            .collect()
    }

    #[test]
    fn notes_have_one_form() {
        let cases = [
            ("// TODO(kv): evict by age.", 0),
            ("/// TODO(kv): evict\n/// by age.\nfn f() {}", 0),
            ("// TODO: evict by age.", 1),
            ("// TODO(kv): evict by age", 1),
            ("// TODO(): evict by age.", 1),
            ("fn f() {} // TODO later", 1),
            ("// FIXME(kv): evict by age.", 1),
            ("// XXX", 1),
            ("// Noise XXpsk3, TODOS and a mktemp XXXXXX", 0),
            ("fn f() { g(\"TODO FIXME\"); }", 0),
            ("const TODO: u8 = 1;", 0),
        ];
        for (text, count) in cases {
            let found = rules(text);
            assert_eq!(found.len(), count, "{text}: {found:?}");
            assert!(found.iter().all(|(rule, _)| *rule == "todo-form"), "{text}");
        }
    }

    #[test]
    fn width_counts_characters_and_spares_what_cannot_be_broken() {
        let comment = |n: usize| format!("// {}", "é".repeat(n - 3));
        assert_eq!(rules(&comment(100)), []);
        assert_eq!(rules(&comment(101)), [("width", 1)]);
        assert_eq!(
            rules(&format!("// see https://example.org/{}", "x".repeat(90))),
            []
        );
        assert_eq!(
            rules(&format!("const X: &str = \"{}\";", "x".repeat(120))),
            []
        );
        let code = format!("const X: u8 = {};", vec!["1"; 60].join(" + "));
        assert_eq!(rules(&code), [("width", 1)]);
    }

    #[test]
    fn longer_files_have_a_module_doc() {
        assert_eq!(rules(&"fn f() {}\n".repeat(50)), []);
        assert_eq!(rules(&"fn f() {}\n".repeat(51)), [("module-doc", 1)]);
        assert_eq!(
            rules(&format!("//! What this is.\n{}", "fn f() {}\n".repeat(60))),
            []
        );
        assert_eq!(
            rules(&format!("// Not a doc.\n{}", "fn f() {}\n".repeat(60))).len(),
            1
        );
    }

    #[test]
    fn a_very_long_file_is_a_warning() {
        let text = format!("//! What this is.\n{}", "fn f() {}\n".repeat(800));
        let file = RustFile::parse("crates/base/src/lib.rs", &text).expect("the sample is Rust");
        let findings = check(&file);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].rule, "file-length");
        assert!(!findings[0].is_error());
    }
}
