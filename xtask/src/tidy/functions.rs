//! Function lengths: the limit, the reason that lifts it, and the report.

use syn::visit::Visit;

use super::{Finding, RustFile};

/// A function longer than this needs a reason. The house style's figure, after TIGER_STYLE.
const LINES_MAX: usize = 70;

/// A function with a body. Lines count from 1, both ends included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Line of the keyword `fn`.
    pub(crate) line: usize,
    /// First line of its attributes and doc comments, or `line`.
    first_line: usize,
    /// Line of the opening brace.
    brace_line: usize,
    /// Line of the closing brace.
    last_line: usize,
}

impl Function {
    /// Lines from `fn` to the closing brace.
    pub(crate) fn lines(&self) -> usize {
        self.last_line - self.line + 1
    }

    /// True when a `// long: reason` comment stands above the function or in its head.
    fn has_reason(&self, file: &RustFile) -> bool {
        let mut first = self.first_line;
        while first > 1 && file.lines[first - 2].trim_start().starts_with("//") {
            first -= 1;
        }
        (first..=self.brace_line).any(|line| {
            let reason = file.comments[line - 1].split_once("// long:");
            reason.is_some_and(|(_, reason)| reason.trim().len() >= 8)
        })
    }
}

/// Every function of the file that has a body, nested ones too, in source order.
pub(crate) fn functions(file: &RustFile) -> Vec<Function> {
    let mut collector = Collector::default();
    collector.visit_file(&file.syntax);
    collector.functions
}

/// Findings for functions over the limit without a reason.
pub(crate) fn check(file: &RustFile) -> Vec<Finding> {
    functions(file)
        .iter()
        .filter(|function| function.lines() > LINES_MAX && !function.has_reason(file))
        .map(|function| {
            let message = format!(
                "`{}` has {} lines, at most {LINES_MAX} without a `// long: reason` above it",
                function.name,
                function.lines()
            );
            Finding::error(&file.path, function.line, "function-length", message)
        })
        .collect()
}

/// The crate-wide table that `tidy --report` prints: shares, then the longest ones.
pub(crate) fn report(files: &[RustFile]) -> String {
    let mut all: Vec<(usize, String)> = Vec::new();
    for file in files {
        for function in functions(file) {
            let place = format!("{}:{} {}", file.path, function.line, function.name);
            all.push((function.lines(), place));
        }
    }
    all.sort_by(|a, b| b.cmp(a));
    let share = |limit: usize| {
        let over = all.iter().filter(|(lines, _)| *lines > limit).count();
        100.0 * over as f64 / all.len().max(1) as f64
    };
    let at = |quantile: usize| {
        all.get(all.len() * (100 - quantile) / 100)
            .map_or(0, |f| f.0)
    };
    let mut text = format!(
        "{} functions: median {} lines, p90 {}, over 40: {:.1} %, over {LINES_MAX}: {:.1} %\n",
        all.len(),
        at(50),
        at(90),
        share(40),
        share(LINES_MAX)
    );
    for (lines, place) in all.iter().filter(|(lines, _)| *lines > 40).take(20) {
        text.push_str(&format!("{lines:6}  {place}\n"));
    }
    text
}

#[derive(Default)]
struct Collector {
    functions: Vec<Function>,
}

impl Collector {
    fn add(&mut self, attrs: &[syn::Attribute], signature: &syn::Signature, block: &syn::Block) {
        let line = signature.fn_token.span.start().line;
        let braces = block.brace_token.span;
        let first_attr = attrs
            .iter()
            .map(|attr| attr.pound_token.span.start().line)
            .min();
        self.functions.push(Function {
            name: signature.ident.to_string(),
            line,
            first_line: first_attr.unwrap_or(line).min(line),
            brace_line: braces.open().start().line,
            last_line: braces.close().end().line,
        });
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.attrs, &item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.attrs, &item.sig, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.add(&item.attrs, &item.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function of exactly `lines` lines under `head`.
    fn sample(head: &str, lines: usize) -> RustFile {
        let body = "    step();\n".repeat(lines - 2);
        let text = format!("{head}fn long_one() {{\n{body}}}\n");
        RustFile::parse("crates/base/src/lib.rs", &text).expect("the sample is Rust")
    }

    #[test]
    fn the_limit_is_exact() {
        assert_eq!(functions(&sample("", 70))[0].lines(), 70);
        assert!(check(&sample("", 70)).is_empty());
        let findings = check(&sample("", 71));
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].line, findings[0].rule), (1, "function-length"));
        assert!(
            findings[0].message.contains("71 lines"),
            "{}",
            findings[0].message
        );
    }

    #[test]
    fn a_reason_lifts_the_limit_wherever_it_stands_in_the_head() {
        let heads = [
            "// long: one case per storage type\n",
            "/// Doc.\n// long: one case per storage type\n",
            "// long: one case per storage type\n/// Doc.\n#[inline]\n",
        ];
        for head in heads {
            assert!(check(&sample(head, 90)).is_empty(), "{head}");
        }
        assert_eq!(
            check(&sample("// long:\n", 90)).len(),
            1,
            "an empty reason is none"
        );
        assert_eq!(
            check(&sample("// long: far away reason\n\n", 90)).len(),
            1,
            "a gap"
        );
    }

    #[test]
    fn methods_and_trait_bodies_are_measured_too() {
        let body = "        step();\n".repeat(80);
        for head in ["impl X", "trait X"] {
            let text = format!("{head} {{\n    fn m() {{\n{body}    }}\n}}\n");
            let file = RustFile::parse("crates/base/src/lib.rs", &text).expect("Rust");
            assert_eq!(check(&file).len(), 1, "{head}");
        }
    }

    #[test]
    fn the_report_lists_the_longest_first() {
        let text = report(&[sample("", 50), sample("", 60), sample("", 5)]);
        assert!(text.starts_with("3 functions: median 50 lines"), "{text}");
        let sixty = text.find("    60  ").expect("60 is listed");
        assert!(
            sixty < text.find("    50  ").expect("50 is listed"),
            "{text}"
        );
        assert!(!text.contains("     5  "), "{text}");
    }
}
