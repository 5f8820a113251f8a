//! The frame of `paceline top`: a pure function of the node's status (JSON) and the keys typed.
//!
//! [`TopView`] has the state, [`frame`] draws it on a terminal, and [`plain`] returns it as text.
//! It neither polls the node nor reads keys; the command does.

mod chat;
mod rows;

use std::cmp::Ordering;
use std::collections::VecDeque;

use paceline_base::{CallbackError, printable};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, Sparkline, Table, Widget};
use serde_json::Value;

use chat::ChatPane;
use rows::{instance, link, node, request};

/// Points of the tokens-per-second graph: two minutes.
const SPEEDS_MAX: usize = 120;

const GRAPH_ROWS: usize = 3;

/// Maximum characters of a typed model name: those of a path.
const NAME_CHARS_MAX: usize = 1_024;

const KEYS: &str = "\
q            end
c            chat with a loaded model; Tab takes another one, Esc goes back
l            load a model by its name
u            unload a model; Tab takes the next one
s            sort the machines by name, CPU or memory
/            show only rows with a text; Enter keeps it, Esc clears it
arrows, j k  scroll: the machines, then models, links and requests
PgUp, PgDn   ten rows at once; Home and End: the first and last row
?            these keys; any key goes back";

/// Sort column of machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MachineSort {
    /// This node first, then by name.
    #[default]
    Name,
    /// The busiest first.
    Cpu,
    /// The fullest first.
    Memory,
}

impl MachineSort {
    /// The next column, cyclic.
    pub const fn next(self) -> Self {
        match self {
            Self::Name => Self::Cpu,
            Self::Cpu => Self::Memory,
            Self::Memory => Self::Name,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Cpu => "CPU",
            Self::Memory => "memory",
        }
    }
}

/// A request of a key to the command.
#[derive(Clone, Debug, PartialEq)]
pub enum TopAction {
    /// Exit.
    End,
    /// Load the model with this name.
    Load(String),
    /// Unload the model with this name.
    Unload(String),
    /// Send this chat completion; its answer goes to [`TopView::hear`].
    Ask(Value),
}

/// The line in which a model's name is typed.
#[derive(Debug)]
struct ModelLine {
    /// Whether it is loaded; else unloaded.
    loads: bool,
    name: String,
}

/// State of the screen.
#[derive(Debug, Default)]
pub struct TopView {
    status: Value,
    /// Error of the last update.
    problem: Option<String>,
    /// Tokens a second of the last updates.
    speeds: VecDeque<u64>,
    pub sort: MachineSort,
    /// Shows only names with this text.
    pub filter: Option<String>,
    /// Whether keys edit the filter.
    pub is_typing: bool,
    /// Scroll offset in lines.
    pub scroll: usize,
    /// Whether the keys are shown instead.
    shows_keys: bool,
    line: Option<ModelLine>,
    /// How the last command went.
    said: String,
    chat: ChatPane,
}

impl TopView {
    /// Applies a status of the node.
    pub fn update(&mut self, status: Result<Value, CallbackError>) {
        match status {
            Ok(status) => {
                let speed = tok_s(&status);
                self.status = status;
                self.problem = None;
                self.speeds.push_back(speed.round() as u64);
                if self.speeds.len() > SPEEDS_MAX {
                    self.speeds.pop_front();
                }
            }
            Err(problem) => self.problem = Some(problem.to_string()),
        }
    }

    pub fn handle_key(&mut self, key: KeyEvent) -> Option<TopAction> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if let KeyCode::Char('c' | 'd') = key.code
            && is_control
        {
            return Some(TopAction::End);
        }
        if self.chat.is_open {
            let ready = self.models("ready");
            return self.chat.handle_key(key, &ready);
        }
        if self.line.is_some() {
            return self.type_name(key.code);
        }
        if let Some(filter) = self.filter.as_mut().filter(|_| self.is_typing) {
            match key.code {
                KeyCode::Char(c) if filter.chars().count() < 64 => filter.push(c),
                KeyCode::Backspace => drop(filter.pop()),
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => self.clear_filter(),
                _ => {}
            }
            return None;
        }
        if std::mem::take(&mut self.shows_keys) {
            return (key.code == KeyCode::Char('q')).then_some(TopAction::End);
        }
        self.said.clear();
        match key.code {
            KeyCode::Char('q') => return Some(TopAction::End),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.shows_keys = true,
            KeyCode::Char('c') => self.chat.is_open = true,
            KeyCode::Char('l') => self.open_line(true),
            KeyCode::Char('u') => self.open_line(false),
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('/') => self.type_filter(),
            KeyCode::Esc => self.clear_filter(),
            KeyCode::Down | KeyCode::Char('j') => self.scroll = self.scroll.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(10),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = usize::MAX,
            _ => {}
        }
        None
    }

    /// Opens the line for a model's name; to unload, with the first model of the list.
    fn open_line(&mut self, loads: bool) {
        let first = self.models("").into_iter().next().filter(|_| !loads);
        let name = first.unwrap_or_default();
        self.line = Some(ModelLine { loads, name });
    }

    /// Handles a key of the line.
    fn type_name(&mut self, code: KeyCode) -> Option<TopAction> {
        let loaded = self.models("");
        let line = self.line.as_mut()?;
        match code {
            KeyCode::Char(c) if line.name.chars().count() < NAME_CHARS_MAX => line.name.push(c),
            KeyCode::Backspace => drop(line.name.pop()),
            KeyCode::Tab if !line.loads && !loaded.is_empty() => {
                let at = loaded.iter().position(|name| *name == line.name);
                line.name
                    .clone_from(&loaded[at.map_or(0, |at| (at + 1) % loaded.len())]);
            }
            KeyCode::Esc => self.line = None,
            KeyCode::Enter => {
                let ModelLine { loads, name } = self.line.take()?;
                let name = name.trim().to_owned();
                let action = if loads {
                    TopAction::Load
                } else {
                    TopAction::Unload
                };
                return (!name.is_empty()).then(|| action(name));
            }
            _ => {}
        }
        None
    }

    /// Names of the instances' models in a state; in any if it is empty. Each name once.
    fn models(&self, state: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for it in self.status["instances"].as_array().into_iter().flatten() {
            let name = it["model"].as_str().unwrap_or_default();
            if (state.is_empty() || it["state"] == state) && !names.iter().any(|it| it == name) {
                names.push(name.to_owned());
            }
        }
        names
    }

    /// Shows how a command went.
    pub fn say(&mut self, said: String) {
        self.said = said;
    }

    /// Adds a part of an answer.
    pub fn hear(&mut self, part: &str) {
        self.chat.hear(part);
    }

    pub fn end_answer(&mut self, ended: Result<(), CallbackError>) {
        self.chat.end(ended);
    }

    /// Starts editing the filter.
    pub fn type_filter(&mut self) {
        self.is_typing = true;
        self.filter.get_or_insert_default();
    }

    /// Removes the filter.
    pub fn clear_filter(&mut self) {
        self.is_typing = false;
        self.filter = None;
    }

    /// Items of a list that match the filter.
    fn items(&self, name: &str) -> Vec<&Value> {
        let filter = self.filter.as_deref().unwrap_or_default();
        let all = self.status[name].as_array().into_iter().flatten();
        let has = |value: &Value| match value {
            Value::String(text) => text.contains(filter),
            Value::Array(all) => all
                .iter()
                .filter_map(Value::as_str)
                .any(|t| t.contains(filter)),
            _ => false,
        };
        let passes = |item: &&Value| {
            let names = ["name", "model", "state", "node", "nodes", "from", "to"];
            filter.is_empty() || names.iter().any(|name| has(&item[*name]))
        };
        all.filter(passes).collect()
    }

    fn nodes(&self) -> Vec<&Value> {
        let mut nodes = self.items("nodes");
        let by = |of: fn(&Value) -> f64| {
            move |a: &&Value, b: &&Value| of(b).partial_cmp(&of(a)).unwrap_or(Ordering::Equal)
        };
        match self.sort {
            MachineSort::Name => {}
            MachineSort::Cpu => {
                nodes.sort_by(by(|n| n["telemetry"]["cpu_busy"].as_f64().unwrap_or(-1.0)))
            }
            MachineSort::Memory => nodes.sort_by(by(|n| memory_share(n).unwrap_or(-1.0))),
        }
        nodes
    }
}

fn tok_s(status: &Value) -> f64 {
    let requests = status["requests"].as_array().into_iter().flatten();
    let speeds = requests.filter_map(|request| request["tok_s"].as_f64());
    // An empty sum would be -0.0.
    speeds.fold(0.0, |a, b| a + b)
}

fn memory_share(node: &Value) -> Option<f64> {
    let all = node["telemetry"]["memory_bytes"].as_f64()?;
    let free = node["telemetry"]["memory_available_bytes"].as_f64()?;
    (all > 0.0).then(|| 1.0 - free / all)
}

/// A frame as text, without trailing spaces.
pub fn plain(view: &mut TopView, (width, height): (u16, u16)) -> String {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    let area = buffer.area;
    draw(view, area, &mut buffer);
    written(&buffer)
}

/// The text of a drawn frame.
fn written(buffer: &Buffer) -> String {
    let line = |y: u16| {
        let cells = (0..buffer.area.width).map(|x| buffer[(x, y)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    let lines: Vec<String> = (0..buffer.area.height).map(line).collect();
    lines.join("\n").trim_end().to_owned()
}

/// Draws on the terminal.
pub fn frame(view: &mut TopView, frame: &mut Frame) {
    let area = frame.area();
    draw(view, area, frame.buffer_mut());
}

/// Draws all parts; truncates without room.
fn draw(view: &mut TopView, area: Rect, buffer: &mut Buffer) {
    if view.chat.is_open {
        return view.chat.draw(area, buffer);
    }
    if view.shows_keys {
        for (line, y) in KEYS.lines().zip(area.y..area.bottom()) {
            Line::raw(line).render(
                Rect {
                    y,
                    height: 1,
                    ..area
                },
                buffer,
            );
        }
        return;
    }
    let parts = Layout::vertical(heights(view, area.height).map(Constraint::Length));
    let [
        head,
        graph,
        machines,
        _,
        models,
        _,
        links,
        _,
        requests,
        foot,
    ] = parts.areas(area);
    header(view, usize::from(area.width)).render(head, buffer);
    let speeds = view.speeds.make_contiguous();
    let last = &speeds[speeds.len().saturating_sub(usize::from(area.width))..];
    Sparkline::default().data(last).render(graph, buffer);
    let mut left = view.scroll;
    let rows = visible(view.nodes(), machines, &mut left).map(node);
    let names = [
        "MACHINE", "STATE", "CPU", "GHZ", "MEMORY", "TEMP", "POWER", "IN/S", "OUT/S",
    ];
    let widths = [name_width(area.width), 7, 5, 4, 16, 5, 6, 7, 7];
    table(names, rows, (widths, &[3, 5, 6, 8, 7, 4]), area.width).render(machines, buffer);
    let rows = visible(view.items("instances"), models, &mut left).map(instance);
    let names = ["MODEL", "STATE", "SPLIT", "TOK/S (PREDICTED)", "ON"];
    table(names, rows, ([18, 15, 9, 18, 16], &[2, 3]), area.width).render(models, buffer);
    let is_wide = area.width >= 90;
    let rows = visible(view.items("links"), links, &mut left);
    let rows = rows.map(|it| link(it, is_wide));
    let names = [
        "LINK FROM",
        "TO",
        "BY",
        "LATENCY",
        "BANDWIDTH",
        "MODELS",
        "SENDS",
    ];
    let width = name_width(area.width);
    let widths = [width, width, 8, 8, 9, 9, 9];
    table(names, rows, (widths, &[5, 6, 2]), area.width).render(links, buffer);
    let rows = visible(view.items("requests"), requests, &mut left).map(request);
    let names = [
        "REQUEST", "MODEL", "PROMPT", "TOKENS", "TOK/S", "FIRST", "AT",
    ];
    let widths = [8, 22, 7, 7, 7, 8, 9];
    table(names, rows, (widths, &[2, 5, 6]), area.width).render(requests, buffer);
    view.scroll -= left; // the end of the last table
    footer(view).render(foot, buffer);
}

/// The rows of a table in `area`, without those that are scrolled away. A table scrolls once those
/// above it are at their end: `left` are the rows to scroll by from here on.
fn visible<'a>(
    all: Vec<&'a Value>,
    area: Rect,
    left: &mut usize,
) -> impl Iterator<Item = &'a Value> {
    let room = usize::from(area.height.saturating_sub(1));
    let skipped = all.len().saturating_sub(room).min(*left);
    *left -= skipped;
    all.into_iter().skip(skipped)
}

/// Width of the name column. The others need 64 with spaces, so that nothing is truncated at 80.
const fn name_width(width: u16) -> u16 {
    match width.saturating_sub(65) {
        ..15 => 15,
        room @ 15..32 => room,
        _ => 32,
    }
}

/// Heights of the parts, from the top. Without room for all, the first and last line have priority,
/// then machines, models, links; requests get the rest.
fn heights(view: &TopView, height: u16) -> [u16; 10] {
    let mut left = height;
    let mut take = |wanted: usize| {
        let taken = u16::try_from(wanted).unwrap_or(u16::MAX).min(left);
        left -= taken;
        taken
    };
    let part = |share: u16| usize::from(height / share);
    let (head, foot) = (take(1), take(1));
    // At least one request, from which the others can be scrolled to.
    let has_requests = height >= 12 && !view.items("requests").is_empty();
    let requests = take(if has_requests { 2 } else { 0 });
    let graph = take(if height >= 20 { GRAPH_ROWS } else { 0 });
    let machines = take((view.nodes().len().max(1) + 1).min(part(2)));
    let above_models = take(1);
    let models = take((view.items("instances").len() + 1).min(part(3)));
    let above_links = take(1);
    // A single machine has no links, and no rows for them.
    let (links, below) = match view.items("links").len() {
        0 => (0, 0),
        n => (take((n + 1).min(part(4))), take(1)),
    };
    [
        head,
        graph,
        machines,
        above_models,
        models,
        above_links,
        links,
        below,
        requests + left,
        foot,
    ]
}

/// A table whose last column takes the remaining width. Without room for all columns, those that
/// `order` names are left out, the first of them first.
fn table<const N: usize>(
    names: [&'static str; N],
    rows: impl Iterator<Item = [String; N]>,
    (widths, order): ([u16; N], &[usize]),
    room: u16,
) -> Table<'static> {
    let mut shown = [true; N];
    let needed = |shown: &[bool; N]| -> u16 {
        let each = widths.iter().zip(shown).filter(|(_, is_shown)| **is_shown);
        each.map(|(width, _)| width + 1).sum::<u16>() - 1
    };
    for column in order {
        if needed(&shown) > room {
            shown[*column] = false;
        }
    }
    let columns: Vec<usize> = (0..N).filter(|column| shown[*column]).collect();
    let last = columns.last().copied();
    let widths = columns.iter().map(|column| match Some(*column) == last {
        true => Constraint::Fill(1),
        false => Constraint::Length(widths[*column]),
    });
    let widths: Vec<Constraint> = widths.collect();
    let row = |mut cells: [String; N]| {
        let cells = columns
            .iter()
            .map(|column| std::mem::take(&mut cells[*column]));
        Row::new(cells.map(Cell::from).collect::<Vec<_>>())
    };
    let rows: Vec<Row<'_>> = rows.map(row).collect();
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let names = columns.iter().map(|column| names[*column]);
    Table::new(rows, widths).header(Row::new(names).style(bold))
}

/// The cluster's summary, with energy per token if it fits.
fn header(view: &TopView, width: usize) -> Line<'static> {
    const NAME: &str = "paceline";
    let status = &view.status;
    let text = |name: &str| printable(status[name].as_str().unwrap_or("-")).into_owned();
    let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    let alive = nodes.iter().filter(|node| node["state"] == "alive").count();
    let requests = status["requests"].as_array().map_or(0, Vec::len);
    let mut about = format!(
        "  {} · {} · {alive} of {} machines · {requests} requests · {:.1} tokens/s",
        text("name"),
        text("cluster"),
        nodes.len(),
        tok_s(status)
    );
    if let Some(joules) = status["energy"]["joules_per_token"].as_f64() {
        let energy = format!(" · {joules:.1} J/token");
        let taken = [NAME, &about, &energy].map(|part| part.chars().count());
        if taken.iter().sum::<usize>() <= width {
            about += &energy;
        }
    }
    let bold = Style::new().add_modifier(Modifier::BOLD);
    Line::from(vec![Span::styled(NAME, bold), Span::raw(about)])
}

fn footer(view: &TopView) -> Line<'static> {
    let reversed = Style::new().add_modifier(Modifier::REVERSED);
    if let Some(problem) = &view.problem {
        let problem = printable(problem).into_owned();
        return Line::styled(format!("the node does not answer: {problem}"), reversed);
    }
    if let Some(ModelLine { loads, name }) = &view.line {
        let (verb, name) = (if *loads { "load" } else { "unload" }, printable(name));
        return Line::styled(
            format!("{verb}: {name}_  Enter does it, Esc goes back"),
            reversed,
        );
    }
    if !view.said.is_empty() {
        return Line::styled(printable(&view.said).into_owned(), reversed);
    }
    let filter = match (&view.filter, view.is_typing) {
        (Some(filter), true) => format!("/{filter}_  "),
        (Some(filter), false) => format!("/{filter}  "),
        (None, _) => String::new(),
    };
    let sort = view.sort.name();
    Line::raw(format!(
        "{filter}q end  c chat  l load  u unload  s sort ({sort})  / filter  ? keys"
    ))
}

#[cfg(test)]
mod tests;
