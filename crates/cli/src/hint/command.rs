//! Suggests a command for an unknown one.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue};

/// Commands of other programs, with their counterparts.
const ELSEWHERE: [(&str, &str); 22] = [
    ("ask", "`paceline run MODEL \"...\"` answers a prompt"),
    ("chat", "`paceline run MODEL` chats"),
    (
        "cp",
        "the store has no copies; `paceline models` shows where files lie",
    ),
    ("create", "`paceline run FILE.gguf` takes files of your own"),
    ("delete", "`paceline rm MODEL` removes a model"),
    ("download", "`paceline pull MODEL` fetches a model"),
    ("generate", "`paceline run MODEL \"...\"` answers a prompt"),
    ("get", "`paceline pull MODEL` fetches a model"),
    (
        "info",
        "`paceline show MODEL` describes a model, `paceline doctor` this machine",
    ),
    ("inspect", "`paceline show MODEL` describes a model"),
    (
        "install",
        "`paceline pull MODEL` fetches a model, `paceline engines install` an engine",
    ),
    ("kill", "Ctrl-C, or SIGTERM, ends `paceline up`"),
    ("quit", "Ctrl-C, or SIGTERM, ends `paceline up`"),
    ("remove", "`paceline rm MODEL` removes a model"),
    (
        "restart",
        "Ctrl-C ends `paceline up`; start it again after that",
    ),
    (
        "search",
        "`paceline models --all` lists names, `paceline kb search` findings",
    ),
    ("serve", "`paceline up MODEL` serves a model over HTTP"),
    ("server", "`paceline up MODEL` serves a model over HTTP"),
    ("start", "`paceline up MODEL` serves a model over HTTP"),
    ("stop", "Ctrl-C, or SIGTERM, ends `paceline up`"),
    (
        "test",
        "`paceline doctor` looks at this machine, `paceline bench` measures it",
    ),
    ("uninstall", "`paceline rm MODEL` removes a model"),
];

/// Adds a suggestion for an unknown first word to `error`. The parser's own goes by shared letters,
/// and suggests `topology` for `stop`.
pub(crate) fn of_usage(mut error: clap::Error, program: &clap::Command) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return error;
    };
    // Only the first word is a top-level command.
    let first = std::env::args().nth(1);
    if first.as_deref() != Some(word) {
        return error;
    }
    let word = word.to_lowercase();
    error.remove(ContextKind::SuggestedSubcommand);
    if let Some(tip) = tip(&word, program) {
        let tips = vec![StyledStr::from(tip)];
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

fn tip(word: &str, program: &clap::Command) -> Option<String> {
    if let Some((_, advice)) = ELSEWHERE.iter().find(|(there, _)| *there == word) {
        return Some((*advice).to_owned());
    }
    let shown = program
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    let names = shown.flat_map(clap::Command::get_name_and_visible_aliases);
    let distance = |name: &str| strsim::damerau_levenshtein(name, word);
    let near = names.map(|name| (distance(name), name)).min()?;
    let is_near = near.0 <= (word.chars().count() / 3).max(1);
    is_near.then(|| format!("a similar command exists: `paceline {}`", near.1))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn words_of_other_programs_are_sorted_and_no_commands() {
        let program = crate::Cli::command();
        assert!(ELSEWHERE.is_sorted());
        for (word, _) in ELSEWHERE {
            assert!(program.find_subcommand(word).is_none(), "{word}");
        }
    }

    #[test]
    fn near_words_are_suggested_and_others_not() {
        let program = crate::Cli::command();
        for (word, part) in [
            ("stop", Some("SIGTERM")),
            ("serve", Some("`paceline up MODEL`")),
            ("rnu", Some("`paceline run`")),
            ("plul", Some("`paceline pull`")),
            ("docter", Some("`paceline doctor`")),
            ("topolgy", Some("`paceline topology`")),
            ("lst", Some("`paceline l")),
            ("walker", None),
            ("frobnicate", None),
            ("x", None),
        ] {
            let tip = tip(word, &program);
            match part {
                Some(part) => assert!(
                    tip.as_ref().is_some_and(|t| t.contains(part)),
                    "{word}: {tip:?}"
                ),
                None => assert_eq!(tip, None, "{word}"),
            }
        }
    }
}
