//! `paceline top`: a live view of the cluster.
//!
//! ```text
//! node of this home --local socket-->  status (JSON) --> View --> frame of ratatui --> terminal
//! or --url          --HTTP---------->
//! ```
//!
//! The frame uses bold and reversed text without colours, so it is readable on every terminal and
//! over ssh. A thread polls the node, so keys work while the node is slow.

use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use anyhow::Context;
use paceline_board::screen::{self, TopView};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use serde_json::{Value, json};

use crate::output::print;
use crate::{agent, member};

const EXAMPLES: &str = "\
Examples:
  paceline top
  paceline top --once
  PACELINE_API_KEY=pl-... paceline top --url https://192.168.1.5:52415

Keys: q ends, s sorts the machines by another column, / filters by text, Esc clears the filter,
arrows and page keys scroll, ? shows all.";

/// Poll interval of the node.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Maximum wait for a key before new data is drawn.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// Columns and rows of `--once` without a terminal.
const PLAIN: (u16, u16) = (100, 40);

/// Arguments of `paceline top`.
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
///
/// # Errors
/// A node that does not respond at first, an unusable terminal.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let first = ask(args.url.as_deref())?;
    let mut view = TopView::default();
    view.update(Ok(first));
    if args.once || !std::io::stdout().is_terminal() {
        let size = ratatui::crossterm::terminal::size().ok();
        let size = size.filter(|_| std::io::stdout().is_terminal());
        return print(&screen::plain(&mut view, size.unwrap_or(PLAIN)));
    }
    let (sender, heard) = sync_channel(1);
    let url = args.url.clone();
    // Not joined at the end: it may be in a request.
    let asking = std::thread::Builder::new().name("top".to_owned());
    asking
        .spawn(move || keep_asking(url.as_deref(), &sender))
        .context("cannot start a thread")?;
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let outcome = show(&mut terminal, &mut view, &heard);
    ratatui::restore();
    outcome
}

/// Draws and reads keys until the user exits.
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut TopView,
    heard: &Receiver<Result<Value, String>>,
) -> anyhow::Result<()> {
    loop {
        let drawn = terminal.draw(|frame| screen::frame(view, frame));
        drawn.context("cannot draw on the terminal")?;
        if event::poll(KEY_WAIT).context("cannot read keys")? {
            match event::read().context("cannot read keys")? {
                Event::Key(key) if key.kind == KeyEventKind::Press && view.handle_key(key) => {
                    return Ok(());
                }
                // A resize; the next frame has the new size.
                _ => {}
            }
        }
        match heard.recv_timeout(Duration::ZERO) {
            Ok(status) => view.update(status),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Polls the node once a second until the receiver is dropped.
fn keep_asking(url: Option<&str>, heard: &SyncSender<Result<Value, String>>) {
    loop {
        std::thread::sleep(LOOK_EVERY);
        let status = ask(url).map_err(|error| format!("{error:#}"));
        if heard.send(status).is_err() {
            return;
        }
    }
}

/// # Errors
/// Why the node does not respond.
fn ask(url: Option<&str>) -> anyhow::Result<Value> {
    let Some(url) = url else {
        return member::ask("board", json!({}));
    };
    let key = std::env::var("PACELINE_API_KEY").ok();
    let key = key.filter(|key| !key.is_empty());
    let url = url.trim_end_matches('/');
    agent::get(&format!("{url}/v1/paceline/status"), key.as_deref())
}
