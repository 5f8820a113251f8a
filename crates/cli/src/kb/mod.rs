//! `paceline kb`: findings on distributed computing, searched and answered from.
//!
//! [`paceline_kb`] knows, finds and says it, [`findings`] has the user's files, this module
//! prints.
//!
//! A search without hits and a question without an answer are results, not failures: exit code 0.

mod command;
mod error;

use std::env;
use std::io::IsTerminal;
use std::path::PathBuf;

use paceline_board::findings::{self, Error, Taken};
use paceline_kb::report::{Page, json, show};
use paceline_kb::{Area, Finding, Found, KnowledgeBase};
use serde_json::Value;

pub(crate) use error::hint;

use crate::home;
use crate::output::{print, printable, tell};
use command::exists;

/// How many findings go with an answer.
const RELATED: usize = 3;

/// Arguments of `paceline kb`.
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

/// A number, also as `#415`.
fn id(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.strip_prefix('#').unwrap_or(text).parse()
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut page = page_for_stdout();
    let object = match &args.command {
        Command::Skill { topic } if topic.is_empty() => {
            let kb = load();
            show::areas(&kb, &mut page);
            json::areas(&kb)
        }
        Command::Skill { topic } => area(&load(), &topic.join(" "), &mut page)?,
        Command::Search { query, limit } => {
            search(&load(), &query.join(" "), *limit, args.json, &mut page)?
        }
        Command::Detail { id } => {
            let kb = load();
            let finding = finding(&kb, *id)?;
            show::detail(&kb, finding, exists, &mut page);
            json::detail(&kb, finding, exists)
        }
        Command::Stats => {
            let kb = load();
            show::stats(&kb, &mut page);
            json::stats(&kb)
        }
        Command::Ask { question } => ask(&load(), &question.join(" "), &mut page)?,
        Command::Add { file, replace } => {
            let taken = match replace {
                true => Taken::Replace,
                false => Taken::Refuse,
            };
            let home = home::home()?;
            let added = findings::add(home.root(), file, taken, &|line| tell(line))?;
            show::added(&added, &mut page);
            json::added(&added)
        }
    };
    if args.json {
        return print(&object.to_string());
    }
    match page.into_text() {
        text if text.is_empty() => Ok(()),
        text => print(&text),
    }
}

/// The built-in findings and the user's.
fn load() -> KnowledgeBase {
    let home = home::home().ok();
    findings::load(home.as_ref().map(|home| home.root()), &|line| tell(line))
}

fn area(kb: &KnowledgeBase, name: &str, page: &mut Page) -> Result<Value, Error> {
    match kb.area(name) {
        Area::Skill(skill) => {
            show::skill(kb, skill, page);
            Ok(json::skill(kb, skill))
        }
        Area::Topic(topic) => {
            show::topic(kb, topic, page);
            Ok(json::topic(kb, topic, exists))
        }
        Area::Ambiguous(topics) => Err(Error::AmbiguousTopic {
            name: name.to_owned(),
            choices: topics.iter().map(|topic| topic.slug()).collect(),
        }),
        Area::Unknown(near) => Err(Error::NoSuchTopic {
            name: name.to_owned(),
            near: near.into_iter().map(str::to_owned).collect(),
        }),
    }
}

fn finding(kb: &KnowledgeBase, id: u32) -> Result<&Finding, Error> {
    kb.finding(id).ok_or_else(|| Error::NoSuchFinding {
        id,
        near: kb.ids_near(id, 3),
    })
}

fn search(
    kb: &KnowledgeBase,
    query: &str,
    limit: usize,
    json: bool,
    page: &mut Page,
) -> Result<Value, Error> {
    let found = kb.search(query, limit);
    if found.n_words == 0 {
        return Err(Error::NoWords {
            text: query.to_owned(),
        });
    }
    if !json {
        tell_unknown(&found);
    }
    show::search(kb, &found, page);
    Ok(json::search(kb, query, &found))
}

fn tell_unknown(found: &Found) {
    for unknown in &found.unknown {
        let meant = match unknown.nearest.join(" or ") {
            near if near.is_empty() => String::new(),
            near => format!("; did you mean {near}?"),
        };
        let line = format!("note: no finding has the word {}{meant}", unknown.word);
        tell(printable(&line));
    }
    if found.n_found == 0 {
        tell("nothing found");
    }
}

fn ask(kb: &KnowledgeBase, question: &str, page: &mut Page) -> Result<Value, Error> {
    let near = kb.search(question, RELATED);
    if near.n_words == 0 {
        return Err(Error::NoWords {
            text: question.to_owned(),
        });
    }
    let fit = kb.ask(question);
    show::ask(kb, fit, &near, page);
    Ok(json::ask(kb, question, fit, &near))
}

/// Width where no terminal says one.
const WIDTH_DEFAULT: usize = 80;

/// A page for stdout. `COLUMNS` counts where stdout is no terminal, `NO_COLOR` and `TERM=dumb`
/// where it is one.
fn page_for_stdout() -> Page {
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
    Page::new(width, terminal && !asked_not_to && !dumb)
}

#[cfg(test)]
mod tests {
    use paceline_plan::{Calibration, Catalogue};

    use super::*;

    /// The planner's assumption, as the knowledge base states it, where `id` disagrees with others.
    fn assumed(id: u32) -> String {
        let kb = KnowledgeBase::built_in();
        let all = kb.assumptions_on(id).into_iter();
        all.map(|a| a.assumes.clone())
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn the_planner_does_assume_what_it_is_said_to() {
        let catalogue = Catalogue::builtin().unwrap();
        let link = |kind: &str| catalogue.link(kind).unwrap();
        let machine = |kind: &str| catalogue.machine(kind).unwrap();
        let calibration = Calibration::builtin().unwrap();
        let constant = |name: &str| {
            let mut all = calibration.parameters();
            all.find(|p| p.name == name).map(|p| p.value).unwrap()
        };
        let large = machine("mac-studio-m3-ultra-512");
        let [small_price, large_price] = ["mac-studio-m3-ultra-256", "mac-studio-m3-ultra-512"]
            .map(|kind| machine(kind).price_usd.unwrap());
        let dollars = |usd: f64| format!("${},{:03}", usd as u64 / 1000, usd as u64 % 1000);
        let gbit = |kind: &str| {
            let gbit = link(kind).bandwidth_gbit_s_theoretical.unwrap() as u64;
            format!("{},{:03}", gbit / 1000, gbit % 1000)
        };
        let us = |seconds: f64| (seconds * 1e6).round();
        for (id, figure) in [
            (
                306,
                format!("{} µs a message over RDMA", us(link("tb5-rdma").alpha())),
            ),
            (306, format!("{} µs over TCP", us(link("tb5-tcp").alpha()))),
            (
                306,
                format!("about {} µs with RDMA", us(constant("handover.gpu.rdma"))),
            ),
            (
                306,
                format!("{:.2} ms with sockets", constant("handover.gpu.tcp") * 1e3),
            ),
            (420, format!("{} W idle", large.idle_w.unwrap())),
            (420, format!("{} W at full load", large.load_w.unwrap())),
            (425, dollars(large_price)),
            (425, dollars(small_price)),
            (425, dollars(2.0 * (large_price + small_price))),
            (
                437,
                format!("{} and {} Gbit/s", gbit("nvlink4"), gbit("nvlink5")),
            ),
        ] {
            let text = assumed(id);
            assert!(text.contains(&figure), "{figure:?} is not in {text:?}");
        }
    }

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
