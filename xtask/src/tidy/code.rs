//! Rules about code: calls that have an owner, and attributes that owe a reason.
//!
//! The calls are a table; a row is a token sequence, who may use it, and what to say. Searching
//! tokens keeps comments and strings out and finds a call inside a macro as well.

use super::{Finding, RustFile};
use crate::repo;

/// A banned token sequence.
struct Ban {
    rule: &'static str,
    tokens: &'static [Pattern],
    /// Crates in which the sequence is allowed.
    owners: &'static [&'static str],
    /// Test code may use it too.
    tests: bool,
    message: &'static str,
}

/// The tokens that match at one place.
enum Pattern {
    Is(&'static str),
    AnyOf(&'static [&'static str]),
}

use Pattern::{AnyOf, Is};

const OPEN: Pattern = AnyOf(&["(", "[", "{"]);

const BANS: [Ban; 6] = [
    Ban {
        rule: "unwrap",
        tokens: &[Is("."), Is("unwrap"), Is("("), Is(")")],
        owners: &[],
        tests: true,
        message: "`.unwrap()` outside tests: return an error, or `expect` with the invariant",
    },
    Ban {
        rule: "stub",
        tokens: &[AnyOf(&["todo", "unimplemented", "dbg"]), Is("!"), OPEN],
        owners: &[],
        tests: false,
        message: "`todo!`, `unimplemented!` and `dbg!` do not belong in the tree",
    },
    Ban {
        rule: "print",
        tokens: &[AnyOf(&["println", "print"]), Is("!"), OPEN],
        owners: &["cli", "xtask"],
        tests: true,
        message: "only `cli` and `xtask` write to stdout",
    },
    Ban {
        rule: "environment",
        tokens: &[Is("env"), Is("::"), AnyOf(&ENVIRONMENT)],
        owners: &["cli", "xtask"],
        tests: true,
        message: "only `cli` and `xtask` read the environment; take the value as an argument",
    },
    Ban {
        rule: "clock",
        tokens: &[AnyOf(&["Instant", "SystemTime"]), Is("::"), Is("now")],
        owners: &[
            "cli", "xtask", "comm", "cluster", "launch", "node", "board", "bench", "chaos",
        ],
        tests: true,
        message: "time is passed in, but where other processes are waited for (comm, cluster, \
                  launch, node, board) and where it is measured (bench, chaos); \
                  another place that must read the clock is listed in tidy's `EXEMPT`",
    },
    Ban {
        rule: "command",
        tokens: &[Is("Command"), Is("::"), Is("new")],
        owners: &[
            "cli", "xtask", "store", "cluster", "launch", "chaos", "bench",
        ],
        tests: true,
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
pub(crate) fn check_calls(file: &RustFile) -> Vec<Finding> {
    let krate = repo::crate_of(&file.path);
    let build_script = file.path.ends_with("/build.rs");
    let mut findings = Vec::new();
    for ban in BANS.iter().filter(|ban| !ban.owners.contains(&krate)) {
        if build_script && matches!(ban.rule, "print" | "environment") {
            continue; // cargo talks to build scripts through both
        }
        for at in matches(file, ban.tokens) {
            let line = file.tokens[at].line;
            if !(ban.tests && file.is_test(line)) {
                findings.push(Finding::error(
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

/// Findings for `#[ignore]`, `#[allow(..)]` and `#[expect(..)]` without a reason.
pub(crate) fn check_attributes(file: &RustFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, body) in attributes(file) {
        let owed = match body.first().copied() {
            Some("ignore") if body.len() < 3 => {
                Some(("ignore", "say why: `#[ignore = \"reason\"]`"))
            }
            _ if silences_a_lint(&body) && !body.contains(&"reason") => {
                Some(("allow", "say why inside the attribute: `reason = \"...\"`"))
            }
            _ => None,
        };
        if let Some((rule, message)) = owed {
            findings.push(Finding::error(&file.path, line, rule, message.into()));
        }
    }
    findings
}

/// True for `allow(` and `expect(`, alone or inside a `cfg_attr`.
fn silences_a_lint(body: &[&str]) -> bool {
    body.windows(2)
        .any(|pair| matches!(pair, ["allow" | "expect", "("]))
}

/// The attributes of the file: line of the `#`, and the tokens between the brackets.
fn attributes(file: &RustFile) -> Vec<(usize, Vec<&str>)> {
    let texts: Vec<&str> = file
        .tokens
        .iter()
        .map(|token| token.text.as_str())
        .collect();
    let mut found = Vec::new();
    for at in 0..texts.len() {
        let open = match texts.get(at..at + 3) {
            Some(["#", "[", _]) => at + 1,
            Some(["#", "!", "["]) => at + 2,
            _ => continue,
        };
        let mut depth = 0usize;
        let mut body = Vec::new();
        for text in &texts[open..] {
            match *text {
                "[" => depth += 1,
                "]" => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                break;
            }
            body.push(*text);
        }
        found.push((file.tokens[at].line, body.split_off(1)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules and lines that the sample violates when it lies at `path`.
    fn rules(path: &str, text: &str) -> Vec<(&'static str, usize)> {
        let file = RustFile::parse(path, text).expect("the sample is Rust");
        let mut findings = check_calls(&file);
        findings.extend(check_attributes(&file));
        findings
            .iter()
            .map(|finding| (finding.rule, finding.line))
            .collect()
    }

    const LIBRARY: &str = "crates/base/src/lib.rs";

    #[test]
    fn each_banned_call_is_found_at_its_line() {
        let cases = [
            ("fn f() {\n x.unwrap();\n}", "unwrap"),
            ("fn f() {\n assert!(x\n.unwrap() > 1);\n}", "unwrap"),
            ("fn f() {\n todo!();\n}", "stub"),
            ("fn f() {\n unimplemented!(\"x\");\n}", "stub"),
            ("fn f() {\n dbg!(x);\n}", "stub"),
            ("fn f() {\n println!();\n}", "print"),
            ("fn f() {\n print!(\"x\");\n}", "print"),
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
            "// x.unwrap() todo!() println!()\nfn f() {}",
            "/// `Instant::now()` is banned.\nfn f() { g(\".unwrap() dbg!(x)\"); }",
            "fn f() { x.unwrap_or(1); x.unwrap_or_default(); x.expect(\"held\"); }",
            "fn f() { if todo != x { eprintln!(\"x\"); } }",
            "fn f() { env!(\"X\"); option_env!(\"X\"); std::env::temp_dir(); }",
            "use std::env::{args, current_dir};",
        ];
        for text in cases {
            assert_eq!(rules(LIBRARY, text), [], "{text}");
        }
    }

    #[test]
    fn owners_and_tests_may_use_what_they_own() {
        let uses =
            "fn f() { println!(); std::env::var(\"X\"); Instant::now(); Command::new(\"x\"); }";
        for path in [
            "crates/cli/src/main.rs",
            "xtask/src/main.rs",
            "crates/base/tests/x.rs",
        ] {
            assert_eq!(rules(path, uses), [], "{path}");
        }
        assert_eq!(rules(LIBRARY, uses).len(), 4);
        assert_eq!(
            rules(LIBRARY, &format!("#[cfg(test)] mod tests {{ {uses} }}")),
            []
        );
        assert_eq!(
            rules("crates/store/src/pip.rs", "fn f() { Command::new(\"x\"); }"),
            []
        );
        assert_eq!(
            rules("crates/base/build.rs", "fn main() { println!(\"x\"); }"),
            []
        );
        let unwrap = "fn f() { x.unwrap(); }";
        assert_eq!(rules("crates/cli/src/main.rs", unwrap), [("unwrap", 1)]);
        assert_eq!(
            rules("crates/base/tests/x.rs", "fn f() { todo!(); }"),
            [("stub", 1)]
        );
    }

    #[test]
    fn attributes_owe_a_reason() {
        let cases = [
            ("#[ignore]\nfn f() {}", vec![("ignore", 1)]),
            ("#[ignore = \"needs RDMA\"]\nfn f() {}", vec![]),
            ("#[allow(dead_code)]\nfn f() {}", vec![("allow", 1)]),
            ("#![allow(dead_code)]\nfn f() {}", vec![("allow", 1)]),
            ("#[expect(dead_code)]\nfn f() {}", vec![("allow", 1)]),
            (
                "#[cfg_attr(unix, allow(dead_code))]\nfn f() {}",
                vec![("allow", 1)],
            ),
            (
                "#[allow(dead_code, reason = \"read by the debugger\")]\nfn f() {}",
                vec![],
            ),
            ("#[doc = \"allow\"]\nfn f() { allow(1); }", vec![]),
            ("#[derive(Debug)]\nstruct X([u8; 2]);", vec![]),
        ];
        for (text, expected) in cases {
            assert_eq!(rules(LIBRARY, text), expected, "{text}");
        }
    }
}
