//! `paceline top`: a live view of the cluster.
//!
//! ```text
//! node of this home --local socket-->  status (JSON) --> View --> frame of ratatui --> terminal
//! or --url          --HTTP---------->
//! keys l, u, c        --> load, unload, chat completion of the same node --> View
//! ```
//!
//! The frame uses bold and reversed text without colours, so it is readable on every terminal and
//! over ssh. A thread polls the node, and each command has its own, so keys work while the node is
//! slow.

use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use anyhow::{Context, anyhow};
use paceline_base::CallbackError;
use paceline_board::screen::{self, TopAction, TopView};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use serde_json::{Value, json};

use crate::output::print;
use crate::{agent, member};

const EXAMPLES: &str = "\
Examples:
  paceline top
  paceline top --once
  PACELINE_API_KEY=pl-... paceline top --url https://192.168.1.5:52415

Keys: q ends, c chats with a loaded model, l loads a model, u unloads one, s sorts
the machines by another column, / filters by text, Esc clears the filter, arrows and
page keys scroll, ? shows all.";

/// Poll interval of the node.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Maximum wait for a key before new data is drawn.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// Maximum duration of an answer: the default of `up --request-timeout`.
const ANSWER_LIMIT: Duration = Duration::from_secs(600);

/// Maximum duration of a load or unload command by HTTP: a model may be hashed first.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// Updates that wait to be drawn; their senders wait when there are more.
const UPDATES_MAX: usize = 64;

/// Columns and rows of `--once` without a terminal.
const PLAIN: (u16, u16) = (100, 40);

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Node to ask over HTTP, with the key in PACELINE_API_KEY if it wants one [default: the node
    /// of this machine]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Print one frame as text and end
    #[arg(long)]
    once: bool,
}

/// Shows the cluster until the user exits.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let first = ask(args.url.as_deref())?;
    let mut view = TopView::default();
    view.update(Ok(first));
    if args.once || !std::io::stdout().is_terminal() {
        let size = ratatui::crossterm::terminal::size().ok();
        let size = size.filter(|_| std::io::stdout().is_terminal());
        return print(&screen::plain(&mut view, size.unwrap_or(PLAIN)));
    }
    let (sender, heard) = sync_channel(UPDATES_MAX);
    let node = Node {
        url: args.url.clone(),
        sender,
    };
    // Not joined at the end: it may be in a request.
    node.spawn(Node::keep_asking)?;
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let outcome = show(&mut terminal, &mut view, (&node, &heard));
    ratatui::restore();
    outcome
}

/// News for the view.
enum TopUpdate {
    Status(Result<Value, CallbackError>),
    /// How a command went.
    Said(String),
    Part(String),
    AnswerEnd(Result<(), CallbackError>),
}

/// Draws and reads keys until the user exits.
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut TopView,
    (node, heard): (&Node, &Receiver<TopUpdate>),
) -> anyhow::Result<()> {
    loop {
        let drawn = terminal.draw(|frame| screen::frame(view, frame));
        drawn.context("cannot draw on the terminal")?;
        if event::poll(KEY_WAIT).context("cannot read keys")?
            // Else a resize; the next frame has the new size.
            && let Event::Key(key) = event::read().context("cannot read keys")?
            && key.kind == KeyEventKind::Press
        {
            match view.handle_key(key) {
                Some(TopAction::End) => return Ok(()),
                Some(action) => node.spawn(move |node| node.act(action))?,
                None => {}
            }
        }
        for update in heard.try_iter().take(UPDATES_MAX) {
            match update {
                TopUpdate::Status(status) => view.update(status),
                TopUpdate::Said(said) => view.say(said),
                TopUpdate::Part(part) => view.hear(&part),
                TopUpdate::AnswerEnd(ended) => view.end_answer(ended),
            }
        }
    }
}

/// The node that is shown, and where its news go.
#[derive(Clone)]
struct Node {
    /// `None` for this home's node.
    url: Option<String>,
    sender: SyncSender<TopUpdate>,
}

impl Node {
    /// Runs `work` on a thread of its own.
    fn spawn(&self, work: impl FnOnce(&Self) + Send + 'static) -> anyhow::Result<()> {
        let own = self.clone();
        let thread = std::thread::Builder::new().name("top".to_owned());
        let thread = thread.spawn(move || work(&own));
        thread.map(drop).context("cannot start a thread")
    }

    /// Polls the node once a second until the receiver is dropped.
    fn keep_asking(&self) {
        loop {
            std::thread::sleep(LOOK_EVERY);
            let status = ask(self.url.as_deref()).map_err(|error| format!("{error:#}").into());
            if self.sender.send(TopUpdate::Status(status)).is_err() {
                return;
            }
        }
    }

    fn act(&self, action: TopAction) {
        let update = match action {
            TopAction::End => return,
            TopAction::Load(model) => self.manage("load", model),
            TopAction::Unload(model) => self.manage("unload", model),
            TopAction::Ask(body) => {
                let ended = self
                    .answer(&body)
                    .map_err(|error| format!("{error:#}").into());
                TopUpdate::AnswerEnd(ended)
            }
        };
        let _ = self.sender.send(update); // the view may be gone
    }

    /// Loads or unloads a model.
    fn manage(&self, command: &str, model: String) -> TopUpdate {
        let body = json!({ "model": model });
        let done = match &self.url {
            None => member::ask(command, body).map(drop),
            Some(url) => {
                let url = format!("{}/v1/paceline/{command}", url.trim_end_matches('/'));
                agent::post((&url, key().as_deref()), &body, COMMAND_LIMIT, &mut |_| {})
            }
        };
        TopUpdate::Said(match (done, command) {
            (Ok(()), "load") => format!("{model} is being loaded"),
            (Ok(()), _) => format!("{model} is unloaded"),
            (Err(error), _) => format!("{command} {model}: {error:#}"),
        })
    }

    /// Sends the parts of an answer as they come.
    fn answer(&self, body: &Value) -> anyhow::Result<()> {
        let url = self.url.clone().unwrap_or_else(agent::own_url);
        let url = format!("{}/v1/chat/completions", url.trim_end_matches('/'));
        let mut problem = None;
        let mut hear = |line: &str| {
            let data = line.strip_prefix("data: ").unwrap_or_default();
            let chunk: Value = serde_json::from_str(data).unwrap_or_default();
            if let Some(part) = chunk["choices"][0]["delta"]["content"].as_str() {
                let _ = self.sender.send(TopUpdate::Part(part.to_owned())); // as above
            }
            if let Some(reason) = chunk["error"]["message"].as_str() {
                problem = Some(reason.to_owned());
            }
        };
        agent::post((&url, key().as_deref()), body, ANSWER_LIMIT, &mut hear)?;
        problem.map_or(Ok(()), |reason| Err(anyhow!(reason)))
    }
}

/// The API key for a server.
fn key() -> Option<String> {
    let key = std::env::var("PACELINE_API_KEY").ok();
    key.filter(|key| !key.is_empty())
}

fn ask(url: Option<&str>) -> anyhow::Result<Value> {
    let Some(url) = url else {
        return member::ask("board", json!({}));
    };
    let url = url.trim_end_matches('/');
    agent::get(&format!("{url}/v1/paceline/status"), key().as_deref())
}
