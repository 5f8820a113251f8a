//! Rules about calls that have an owner: the clock, the environment, other processes.
//!
//! The calls are a table; a row is a token sequence, the crates that may use it, and the message.
//! Searching tokens keeps comments and strings out and finds a call inside a macro as well.
//! Clippy's `disallowed_methods` has no exception for tests and none for one file with a reason.

use super::{RustFile, TidyFinding};
use crate::repo;

/// A banned token sequence.
struct Ban {
    rule: &'static str,
    tokens: &'static [Pattern],
    /// Crates in which the sequence is allowed.
    owners: &'static [&'static str],
    message: &'static str,
}

/// The tokens that match at one place.
enum Pattern {
    Is(&'static str),
    AnyOf(&'static [&'static str]),
}

use Pattern::{AnyOf, Is};

const BANS: [Ban; 3] = [
    Ban {
        rule: "environment",
        tokens: &[Is("env"), Is("::"), AnyOf(&ENVIRONMENT)],
        owners: &["cli", "xtask"],
        message: "only `cli` and `xtask` read the environment; take the value as an argument",
    },
    Ban {
        rule: "clock",
        tokens: &[AnyOf(&["Instant", "SystemTime"]), Is("::"), Is("now")],
        owners: &[
            "cli", "xtask", "comm", "cluster", "launch", "worker", "node", "board", "bench",
            "chaos",
        ],
        message: "time is passed in, but where other processes are waited for (comm, cluster, \
                  launch, worker, node, board) and where it is measured (bench, chaos); \
                  another place that must read the clock is listed in tidy's `EXEMPT`",
    },
    Ban {
        rule: "command",
        tokens: &[Is("Command"), Is("::"), Is("new")],
        owners: &[
            "cli", "xtask", "store", "cluster", "launch", "chaos", "bench",
        ],
        message: "only `cli`, `xtask`, `cluster` (workers), `launch` (ssh), `chaos` (nodes), `bench` \
                  (ranks) and `store` (pip) start processes",
    },
];

const ENVIRONMENT: [&str; 7] = [
    "var",
    "var_os",
    "vars",
    "vars_os",
    "set_var",
    "remove_var",
    "home_dir",
];

/// Findings for every banned call in `file`.
pub(crate) fn check(file: &RustFile) -> Vec<TidyFinding> {
    let krate = repo::crate_of(&file.path);
    let build_script = file.path.ends_with("/build.rs");
    let mut findings = Vec::new();
    for ban in BANS.iter().filter(|ban| !ban.owners.contains(&krate)) {
        if build_script && ban.rule == "environment" {
            continue; // cargo passes a build script its options there
        }
        for at in matches(file, ban.tokens) {
            let line = file.tokens[at].line;
            if !file.is_test(line) {
                findings.push(TidyFinding::error(
                    &file.path,
                    line,
                    ban.rule,
                    ban.message.into(),
                ));
            }
        }
    }
    findings
}

/// Token indexes at which the sequence starts. `env::{...}` in a `use` counts for each member.
fn matches(file: &RustFile, sequence: &[Pattern]) -> Vec<usize> {
    let is = |at: usize, pattern: &Pattern| {
        file.tokens.get(at).is_some_and(|token| match pattern {
            Is(text) => token.text == *text,
            AnyOf(texts) => texts.contains(&token.text.as_str()),
        })
    };
    let starts = |at: usize| sequence.iter().enumerate().all(|(i, p)| is(at + i, p));
    let imports = |at: usize| {
        let [head @ .., last] = sequence else {
            return false;
        };
        head.iter().enumerate().all(|(i, p)| is(at + i, p))
            && matches!(head.last(), Some(Is("::")))
            && is(at + head.len(), &Is("{"))
            && file.tokens[at + head.len()..]
                .iter()
                .take_while(|token| token.text != "}")
                .any(|token| matches!(last, AnyOf(texts) if texts.contains(&token.text.as_str())))
    };
    (0..file.tokens.len())
        .filter(|at| starts(*at) || imports(*at))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules and lines that the sample violates when it lies at `path`.
    fn rules(path: &str, text: &str) -> Vec<(&'static str, usize)> {
        let file = RustFile::parse(path, text).expect("the sample is Rust");
        check(&file)
            .iter()
            .map(|finding| (finding.rule, finding.line))
            .collect()
    }

    const LIBRARY: &str = "crates/base/src/lib.rs";

    #[test]
    fn each_banned_call_is_found_at_its_line() {
        let cases = [
            ("fn f() {\n std::env::var(\"X\");\n}", "environment"),
            ("\nuse std::env::{args, var_os};", "environment"),
            ("fn f() {\n let t = Instant::now();\n}", "clock"),
            (
                "fn f() {\n t.get_or_init(std::time::SystemTime::now);\n}",
                "clock",
            ),
            (
                "fn f() {\n std::process::Command::new(\"x\");\n}",
                "command",
            ),
        ];
        for (text, rule) in cases {
            let found = rules(LIBRARY, text);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert_eq!(found[0].0, rule, "{text}");
            assert!((2..=3).contains(&found[0].1), "{text}: {found:?}");
        }
    }

    #[test]
    fn what_only_looks_like_a_banned_call_is_let_through() {
        let cases = [
            "// std::env::var(X) Command::new(x)\nfn f() {}",
            "/// `Instant::now()` is banned.\nfn f() { g(\"Instant::now() Command::new(x)\"); }",
            "fn f() { env!(\"X\"); option_env!(\"X\"); std::env::temp_dir(); }",
            "use std::env::{args, current_dir};",
        ];
        for text in cases {
            assert_eq!(rules(LIBRARY, text), [], "{text}");
        }
    }

    #[test]
    fn owners_and_tests_may_use_what_they_own() {
        let uses = "fn f() { std::env::var(\"X\"); Instant::now(); Command::new(\"x\"); }";
        for path in [
            "crates/cli/src/main.rs",
            "xtask/src/main.rs",
            "crates/base/tests/x.rs",
        ] {
            assert_eq!(rules(path, uses), [], "{path}");
        }
        assert_eq!(rules(LIBRARY, uses).len(), 3);
        assert_eq!(
            rules(LIBRARY, &format!("#[cfg(test)] mod tests {{ {uses} }}")),
            []
        );
        assert_eq!(
            rules("crates/store/src/pip.rs", "fn f() { Command::new(\"x\"); }"),
            []
        );
        let build = "fn main() { std::env::var(\"OUT_DIR\"); }";
        assert_eq!(rules("crates/base/build.rs", build), []);
    }
}
