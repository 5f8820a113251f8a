//! A Rust file, parsed once for all source rules: syntax tree, flat tokens, comments, test code.
//!
//! Rules that look for code read [`RustFile::tokens`], where comments and the insides of strings
//! cannot match by accident. Macro bodies, which a syntax tree leaves unparsed, are searched there
//! like any other code. Rules about comments read [`RustFile::comments`].

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use proc_macro2::{LineColumn, Spacing, Span, TokenStream, TokenTree};
use syn::visit::Visit;

use crate::repo;

/// A token with its place. `::` is one token, every other punctuation one character.
#[derive(Debug)]
pub(crate) struct Token {
    /// The token as written; delimiters are `(`, `)`, `[`, `]`, `{`, `}`.
    pub(crate) text: String,
    /// Line of its first character, from 1.
    pub(crate) line: usize,
}

/// A parsed source file.
pub(crate) struct RustFile {
    /// Path from the repository root, with `/`.
    pub(crate) path: String,
    /// The lines as written, without line ends.
    pub(crate) lines: Vec<String>,
    /// The lines with all code blanked out: what remains are comments and doc comments.
    pub(crate) comments: Vec<String>,
    /// Characters of each line that belong to string literals.
    pub(crate) literal_columns: Vec<usize>,
    /// All tokens in order, without doc comments.
    pub(crate) tokens: Vec<Token>,
    pub(crate) syntax: syn::File,
    pub(crate) test_file: bool,
    /// Lines of items under `#[cfg(test)]`, `#[test]` and the like, both ends included.
    test_regions: Vec<(usize, usize)>,
}

impl RustFile {
    /// Parses `text`, the contents of the file at `path`.
    pub(crate) fn parse(path: &str, text: &str) -> Result<RustFile> {
        let stream: TokenStream = text
            .parse()
            .map_err(|error| anyhow::anyhow!("{path}: not lexed as Rust: {error}"))?;
        let syntax: syn::File =
            syn::parse2(stream.clone()).with_context(|| format!("{path}: not parsed as Rust"))?;
        let lines: Vec<String> = text.lines().map(String::from).collect();
        let mut flat = Flattener::new(&lines);
        flat.stream(stream);
        let mut regions = TestRegions::default();
        regions.visit_file(&syntax);
        Ok(RustFile {
            path: path.to_string(),
            comments: flat.comments.into_iter().map(String::from_iter).collect(),
            literal_columns: flat.literal_columns,
            tokens: flat.tokens,
            test_file: repo::is_test_path(path),
            test_regions: regions.lines,
            lines,
            syntax,
        })
    }

    /// True when `line` (from 1) is test code.
    pub(crate) fn is_test(&self, line: usize) -> bool {
        self.test_file
            || self
                .test_regions
                .iter()
                .any(|(from, to)| (*from..=*to).contains(&line))
    }

    /// The files of this file's out-of-line test modules (`#[cfg(test)] mod x;`). Each is the path
    /// without its ending, so that `a/x` means `a/x.rs` and everything below `a/x/`.
    pub(crate) fn test_modules(&self) -> BTreeSet<String> {
        let folder = module_folder(&self.path);
        let mut found = BTreeSet::new();
        for item in &self.syntax.items {
            if let syn::Item::Mod(module) = item
                && module.content.is_none()
                && is_test_item(&module.attrs)
            {
                found.insert(format!("{folder}/{}", module.ident));
            }
        }
        found
    }
}

fn module_folder(path: &str) -> String {
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    match file {
        "lib.rs" | "main.rs" | "mod.rs" => folder.to_string(),
        _ => path.trim_end_matches(".rs").to_string(),
    }
}

/// Turns the token tree into a flat list and blanks its characters out of the comment lines.
struct Flattener<'a> {
    lines: &'a [String],
    comments: Vec<Vec<char>>,
    literal_columns: Vec<usize>,
    tokens: Vec<Token>,
}

impl<'a> Flattener<'a> {
    fn new(lines: &'a [String]) -> Self {
        Flattener {
            lines,
            comments: lines.iter().map(|line| line.chars().collect()).collect(),
            literal_columns: vec![0; lines.len()],
            tokens: Vec::new(),
        }
    }

    fn stream(&mut self, stream: TokenStream) {
        let mut colon_open = false;
        for tree in stream {
            let span = tree.span();
            if self.is_doc_comment(span) {
                continue;
            }
            match tree {
                TokenTree::Group(group) => self.group(&group),
                TokenTree::Punct(punct) => {
                    let second_colon = colon_open && punct.as_char() == ':';
                    colon_open = punct.as_char() == ':'
                        && punct.spacing() == Spacing::Joint
                        && !second_colon;
                    self.blank(span);
                    if second_colon && let Some(last) = self.tokens.last_mut() {
                        last.text.push(':');
                    } else {
                        self.push(punct.to_string(), span);
                    }
                    continue;
                }
                TokenTree::Ident(ident) => {
                    self.blank(span);
                    self.push(ident.to_string(), span);
                }
                TokenTree::Literal(literal) => {
                    self.count_literal(span);
                    self.blank(span);
                    self.push(literal.to_string(), span);
                }
            }
            colon_open = false;
        }
    }

    fn group(&mut self, group: &proc_macro2::Group) {
        let (open, close) = match group.delimiter() {
            proc_macro2::Delimiter::Parenthesis => ("(", ")"),
            proc_macro2::Delimiter::Bracket => ("[", "]"),
            proc_macro2::Delimiter::Brace => ("{", "}"),
            proc_macro2::Delimiter::None => ("", ""),
        };
        self.blank(group.span_open());
        self.push(open.into(), group.span_open());
        self.stream(group.stream());
        self.blank(group.span_close());
        self.push(close.into(), group.span_close());
    }

    fn push(&mut self, text: String, span: Span) {
        self.tokens.push(Token {
            text,
            line: span.start().line,
        });
    }

    /// A doc comment reaches us as the tokens of `#[doc = "..."]`, all with the comment's span.
    fn is_doc_comment(&self, span: Span) -> bool {
        let LineColumn { line, column } = span.start();
        let Some(text) = self.lines.get(line.wrapping_sub(1)) else {
            return false;
        };
        let start: String = text.chars().skip(column).take(3).collect();
        ["///", "//!", "/**", "/*!"].contains(&start.as_str())
    }

    fn blank(&mut self, span: Span) {
        for (line, from, to) in self.columns(span) {
            for character in &mut self.comments[line][from..to] {
                *character = ' ';
            }
        }
    }

    fn count_literal(&mut self, span: Span) {
        for (line, from, to) in self.columns(span) {
            self.literal_columns[line] += to - from;
        }
    }

    /// The span's columns on each line it touches: (line index, first column, end column).
    fn columns(&self, span: Span) -> Vec<(usize, usize, usize)> {
        let (start, end) = (span.start(), span.end());
        let last = end.line.min(self.lines.len());
        (start.line.max(1)..=last)
            .map(|line| {
                let width = self.comments[line - 1].len();
                let from = if line == start.line {
                    start.column.min(width)
                } else {
                    0
                };
                let to = if line == end.line {
                    end.column.min(width)
                } else {
                    width
                };
                (line - 1, from, to.max(from))
            })
            .collect()
    }
}

/// Collects the line ranges of items that only tests compile.
#[derive(Default)]
struct TestRegions {
    lines: Vec<(usize, usize)>,
}

impl TestRegions {
    /// Records the item when its attributes make it test code; says whether it did.
    fn record(&mut self, attrs: &[syn::Attribute], item: &impl syn::spanned::Spanned) -> bool {
        let test = is_test_item(attrs);
        if test {
            let span = item.span();
            self.lines.push((span.start().line, span.end().line));
        }
        test
    }
}

impl<'ast> Visit<'ast> for TestRegions {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let is_testing_module = matches!(item, syn::Item::Mod(module) if module.ident == "testing");
        if is_testing_module {
            let span = syn::spanned::Spanned::span(item);
            self.lines.push((span.start().line, span.end().line));
        } else if !self.record(item_attrs(item), item) {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !self.record(&item.attrs, item) {
            syn::visit::visit_impl_item_fn(self, item);
        }
    }
}

fn item_attrs(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// True for `#[test]`, `#[x::test]`, `#[cfg(test)]` and cfgs that hold under test or under the
/// feature `testing` only. A cfg with `not(...)` in it is not taken for test code.
fn is_test_item(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|attr| {
        let path = attr.path();
        if path
            .segments
            .last()
            .is_some_and(|last| last.ident == "test")
        {
            return true;
        }
        let syn::Meta::List(list) = &attr.meta else {
            return false;
        };
        if !path.is_ident("cfg") {
            return false;
        }
        let text = list.tokens.to_string();
        let words: Vec<&str> = text
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .collect();
        (words.contains(&"test") || words.contains(&"testing")) && !words.contains(&"not")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> RustFile {
        RustFile::parse("crates/base/src/lib.rs", text).expect("the sample is Rust")
    }

    fn texts(file: &RustFile) -> Vec<&str> {
        file.tokens
            .iter()
            .map(|token| token.text.as_str())
            .collect()
    }

    #[test]
    fn tokens_join_double_colons_and_reach_into_macros() {
        let file = parse("fn f() { vec![a::b(c)]; }");
        let expected = [
            "fn", "f", "(", ")", "{", "vec", "!", "[", "a", "::", "b", "(", "c", ")", "]", ";", "}",
        ];
        assert_eq!(texts(&file), expected);
    }

    #[test]
    fn doc_comments_are_comments_and_strings_are_not() {
        let file = parse("/// Said.\nfn f() { g(\"no // comment\"); } // tail\n");
        assert!(file.comments[0].contains("Said."), "{:?}", file.comments);
        assert!(!file.comments[1].contains("no"), "{:?}", file.comments);
        assert!(file.comments[1].trim() == "// tail", "{:?}", file.comments);
        assert_eq!(file.literal_columns, [0, 15]);
        assert!(!texts(&file).contains(&"doc"));
    }

    #[test]
    fn test_code_is_known_by_its_attributes() {
        let cases = [
            ("#[cfg(test)]\nmod tests {\n fn f() {}\n}", true),
            ("#[cfg(all(test, unix))]\nmod tests {\n fn f() {}\n}", true),
            (
                "#[cfg(any(test, feature = \"testing\"))]\nmod x {\n fn f() {}\n}",
                true,
            ),
            (
                "#[cfg(feature = \"testing\")]\nimpl X {\n fn f() {}\n}",
                true,
            ),
            ("#[cfg(not(test))]\nmod x {\n fn f() {}\n}", false),
            ("#[cfg(unix)]\nmod x {\n fn f() {}\n}", false),
            ("#[inline]\n#[test]\n fn f() {}\n", true),
            ("pub mod testing {\n\n fn f() {}\n}", true),
            ("impl X {\n #[cfg(test)]\n fn f() {}\n}", true),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text).is_test(3), expected, "{text}");
        }
    }

    #[test]
    fn out_of_line_test_modules_name_their_files() {
        let text = "#[cfg(test)]\nmod tests;\nmod other;";
        let modules = |path: &str| {
            RustFile::parse(path, text)
                .expect("the sample is Rust")
                .test_modules()
        };
        assert_eq!(
            modules("crates/a/src/lib.rs"),
            BTreeSet::from(["crates/a/src/tests".into()])
        );
        assert_eq!(
            modules("crates/a/src/x.rs"),
            BTreeSet::from(["crates/a/src/x/tests".into()])
        );
    }

    #[test]
    fn what_is_not_rust_is_an_error() {
        assert!(RustFile::parse("x.rs", "fn (").is_err());
        assert!(RustFile::parse("x.rs", "fn fn").is_err());
    }
}
