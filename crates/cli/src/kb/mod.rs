//! `paceline kb`: searches and answers from findings on distributed computing.
//!
//! [`paceline_kb`] has the findings, search and text; [`findings`] loads the user's files; this
//! module prints.
//!
//! A search without hits and a question without answer are results, not failures: exit code 0.

mod command;
mod error;

use std::env;
use std::io::IsTerminal;
use std::path::PathBuf;

use paceline_board::findings::{self, ConflictPolicy};
use paceline_kb::KnowledgeBase;
use paceline_kb::report::{TextPage, json, show};

pub(crate) use error::hint;

use crate::home;
use crate::output::{print, print_err, show_formatted};
use command::exists;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show a skill (gpu-distributed) or one of its topics
    Skill {
        /// A skill or a topic, in full or in part; without it, the list of them
        topic: Vec<String>,
    },
    /// Find findings by words, best first
    Search {
        /// Words; their beginnings and other forms are found too
        #[arg(required = true)]
        query: Vec<String>,
        /// How many findings to show
        #[arg(long, default_value_t = 10, value_name = "N")]
        limit: usize,
    },
    /// Show all that is known about a finding
    Detail {
        /// Its number
        #[arg(value_parser = id)]
        id: u32,
    },
    /// Count what is there
    Stats,
    /// Answer a question from the quick answers, with the findings they rest on
    Ask {
        /// The question
        #[arg(required = true)]
        question: Vec<String>,
    },
    /// Add findings of your own; `search` then finds them
    Add {
        /// A TOML file of findings
        file: PathBuf,
        /// Put it in the place of a file of the same name
        #[arg(long)]
        replace: bool,
    },
}

/// Parses a number, also as `#415`.
fn id(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.strip_prefix('#').unwrap_or(text).parse()
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut page = page_for_stdout();
    let object = match &args.command {
        Command::Skill { topic } if topic.is_empty() => {
            let kb = load();
            show::areas(&kb, &mut page);
            json::areas(&kb)
        }
        Command::Skill { topic } => findings::area(&load(), &topic.join(" "), exists, &mut page)?,
        Command::Search { query, limit } => {
            let (object, notes) = findings::search(&load(), &query.join(" "), *limit, &mut page)?;
            notes.iter().filter(|_| !args.json).for_each(print_err);
            object
        }
        Command::Detail { id } => {
            let kb = load();
            let finding = findings::finding(&kb, *id)?;
            show::detail(&kb, finding, exists, &mut page);
            json::detail(&kb, finding, exists)
        }
        Command::Stats => {
            let kb = load();
            show::stats(&kb, &mut page);
            json::stats(&kb)
        }
        Command::Ask { question } => findings::ask(&load(), &question.join(" "), &mut page)?,
        Command::Add { file, replace } => {
            let taken = match replace {
                true => ConflictPolicy::Replace,
                false => ConflictPolicy::Refuse,
            };
            let home = home::home()?;
            let added = findings::add(home.root(), file, taken, &|line| print_err(line))?;
            show::added(&added, &mut page);
            json::added(&added)
        }
    };
    if args.json {
        return print(&object.to_string());
    }
    match page.into_text() {
        text if text.is_empty() => Ok(()),
        text => show_formatted(&format!("{text}\n")),
    }
}

/// Loads the built-in findings and the user's.
fn load() -> KnowledgeBase {
    let home = home::home().ok();
    findings::load(home.as_ref().map(|home| home.root()), &|line| {
        print_err(line)
    })
}

/// Width without a terminal.
const WIDTH_DEFAULT: usize = 80;

/// A page for stdout. `COLUMNS` applies without a terminal, `NO_COLOR` and `TERM=dumb` with one.
fn page_for_stdout() -> TextPage {
    let stdout = std::io::stdout();
    let terminal = stdout.is_terminal();
    let width = if terminal {
        let size = rustix::termios::tcgetwinsize(&stdout).ok();
        size.map(|size| usize::from(size.ws_col))
    } else {
        env::var("COLUMNS")
            .ok()
            .and_then(|value| value.parse().ok())
    };
    let asked_not_to = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    let width = width.filter(|width| *width > 0).unwrap_or(WIDTH_DEFAULT);
    TextPage::new(width, terminal && !asked_not_to && !dumb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_may_be_written_with_a_hash() {
        for (text, number) in [
            ("415", Some(415)),
            ("#415", Some(415)),
            ("", None),
            ("x", None),
            ("-1", None),
        ] {
            assert_eq!(id(text).ok(), number, "{text}");
        }
    }
}
