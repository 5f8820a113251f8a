//! Checks that commands linked from findings exist in this version.
//!
//! Uses the command line's own definition, so that links stay valid.

use clap::CommandFactory;

/// Whether `line`, such as `paceline plan MODEL --compare`, is a command with existing options.
pub(super) fn exists(line: &str) -> bool {
    has(&crate::Cli::command(), line)
}

fn has(program: &clap::Command, line: &str) -> bool {
    let mut words = line.split_whitespace();
    if words.next() != Some(program.get_name()) {
        return false;
    }
    let mut command = program;
    let mut at_subcommand = true;
    for word in words {
        if word == "--" {
            break;
        }
        if let Some(option) = word.strip_prefix("--") {
            let is_it = |arg: &clap::Arg| arg.get_long() == Some(option);
            if !command.get_arguments().any(is_it) {
                return false;
            }
            at_subcommand = false;
        } else if at_subcommand && command.has_subcommands() {
            match command.find_subcommand(word) {
                Some(found) => command = found,
                None => return false,
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_known_by_words_and_options() {
        for (line, known) in [
            ("paceline bench model MODEL --threads 2", true),
            ("paceline kb search WORDS", true),
            ("paceline run MODEL PROMPT --json", true),
            ("paceline run MODEL PROMPT --nope 3", false),
            ("paceline nope", false),
            ("paceline bench nope", false),
            ("other run", false),
            ("paceline", true),
            ("", false),
        ] {
            assert_eq!(exists(line), known, "{line}");
        }
    }

    #[test]
    fn what_follows_two_dashes_is_not_ours() {
        let program = clap::Command::new("paceline").subcommand(clap::Command::new("launch"));
        assert!(has(&program, "paceline launch -- PROG --nope"));
        assert!(!has(&program, "paceline launch --nope"));
    }

    #[test]
    fn every_link_of_the_knowledge_base_exists() {
        let kb = paceline_kb::KnowledgeBase::built_in();
        for check in kb.findings().flat_map(|finding| kb.checks_of(finding.id)) {
            assert!(exists(&check.command), "{}", check.command);
        }
    }
}
