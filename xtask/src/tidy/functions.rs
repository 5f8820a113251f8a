//! Function lengths for the report. `clippy.toml` has the limit.

use syn::visit::Visit;

use super::RustFile;

/// The house style's figure for a long function, after TIGER_STYLE.
const LONG_LINES: usize = 70;

/// A function with a body. Lines count from 1, both ends included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FunctionSpan {
    pub(crate) name: String,
    /// Line of the keyword `fn`.
    pub(crate) line: usize,
    /// Line of the closing brace.
    last_line: usize,
}

impl FunctionSpan {
    /// Lines from `fn` to the closing brace.
    pub(crate) fn lines(&self) -> usize {
        self.last_line - self.line + 1
    }
}

/// Every function of the file that has a body, nested ones too, in source order.
pub(crate) fn functions(file: &RustFile) -> Vec<FunctionSpan> {
    let mut collector = Collector::default();
    collector.visit_file(&file.syntax);
    collector.functions
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
        "{} functions: median {} lines, p90 {}, over 40: {:.1} %, over {LONG_LINES}: {:.1} %\n",
        all.len(),
        at(50),
        at(90),
        share(40),
        share(LONG_LINES)
    );
    for (lines, place) in all.iter().filter(|(lines, _)| *lines > 40).take(20) {
        text.push_str(&format!("{lines:6}  {place}\n"));
    }
    text
}

#[derive(Default)]
struct Collector {
    functions: Vec<FunctionSpan>,
}

impl Collector {
    fn add(&mut self, signature: &syn::Signature, block: &syn::Block) {
        self.functions.push(FunctionSpan {
            name: signature.ident.to_string(),
            line: signature.fn_token.span.start().line,
            last_line: block.brace_token.span.close().end().line,
        });
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.sig, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.add(&item.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function of exactly `lines` lines.
    fn sample(lines: usize) -> RustFile {
        let body = "    step();\n".repeat(lines - 2);
        let text = format!("/// Doc.\n#[inline]\nfn long_one() {{\n{body}}}\n");
        RustFile::parse("crates/base/src/lib.rs", &text).expect("the sample is Rust")
    }

    #[test]
    fn functions_methods_and_trait_bodies_are_measured() {
        assert_eq!(functions(&sample(70))[0].lines(), 70);
        for head in ["impl X", "trait X"] {
            let text = format!("{head} {{\n    fn m() {{\n        step();\n    }}\n}}\n");
            let file = RustFile::parse("crates/base/src/lib.rs", &text).expect("Rust");
            assert_eq!(functions(&file)[0].lines(), 3, "{head}");
        }
    }

    #[test]
    fn the_report_lists_the_longest_first() {
        let text = report(&[sample(50), sample(60), sample(5)]);
        assert!(text.starts_with("3 functions: median 50 lines"), "{text}");
        let sixty = text.find("    60  ").expect("60 is listed");
        assert!(
            sixty < text.find("    50  ").expect("50 is listed"),
            "{text}"
        );
        assert!(!text.contains("     5  "), "{text}");
    }
}
