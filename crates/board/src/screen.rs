//! The frame of `paceline top`: a pure function of the node's status (JSON) and the keys typed.
//!
//! [`TopView`] has the state, [`frame`] draws it on a terminal, and [`plain`] returns it as text.
//! It neither polls the node nor reads keys; the command does.

use std::cmp::Ordering;
use std::collections::VecDeque;

use paceline_base::printable;
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, Sparkline, Table, Widget};
use serde_json::Value;

use crate::tables;

/// Points of the tokens-per-second graph: two minutes.
const SPEEDS_MAX: usize = 120;

const GRAPH_ROWS: usize = 3;

/// Text of `?`.
const KEYS: &str = "\
q            end
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

/// State of the screen.
#[derive(Debug, Default)]
pub struct TopView {
    status: Value,
    /// Error of the last update.
    problem: Option<String>,
    /// Tokens a second of the last updates.
    speeds: VecDeque<u64>,
    /// Sort column of machines.
    pub sort: MachineSort,
    /// Shows only names with this text.
    pub filter: Option<String>,
    /// Whether keys edit the filter.
    pub is_typing: bool,
    /// Scroll offset in lines.
    pub scroll: usize,
    /// Whether the keys are shown instead.
    shows_keys: bool,
}

impl TopView {
    /// Applies a status of the node.
    pub fn update(&mut self, status: Result<Value, String>) {
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
            Err(problem) => self.problem = Some(problem),
        }
    }

    /// Handles a key; returns true to exit.
    pub fn handle_key(&mut self, key: KeyEvent) -> bool {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if let KeyCode::Char('c' | 'd') = key.code
            && is_control
        {
            return true;
        }
        if let Some(filter) = self.filter.as_mut().filter(|_| self.is_typing) {
            match key.code {
                KeyCode::Char(c) if filter.chars().count() < 64 => filter.push(c),
                KeyCode::Backspace => drop(filter.pop()),
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => self.clear_filter(),
                _ => {}
            }
            return false;
        }
        if std::mem::take(&mut self.shows_keys) {
            return key.code == KeyCode::Char('q');
        }
        match key.code {
            KeyCode::Char('q') => return true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.shows_keys = true,
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
        false
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
    let filter = match (&view.filter, view.is_typing) {
        (Some(filter), true) => format!("/{filter}_  "),
        (Some(filter), false) => format!("/{filter}  "),
        (None, _) => String::new(),
    };
    let sort = view.sort.name();
    Line::raw(format!(
        "{filter}q end  s sort ({sort})  / filter  arrows scroll  ? keys"
    ))
}

fn text(value: &Value) -> String {
    printable(value.as_str().unwrap_or("-")).into_owned()
}

/// A number with its unit, or a dash if missing.
fn number(value: &Value, write: impl Fn(f64) -> String) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), write)
}

/// Bytes with three digits at most and a unit: seven characters below a PiB.
fn short(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes.max(0.0), 0);
    // From 999.5 on it would round to four digits.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let digits = usize::from(unit > 0 && value < 9.95);
    format!("{value:.digits$} {}", UNITS[unit])
}

fn node(node: &Value) -> [String; 9] {
    let t = &node["telemetry"];
    let all = t["memory_bytes"].as_f64().unwrap_or(0.0);
    let memory = memory_share(node).map_or_else(
        || "-".to_owned(),
        |share| format!("{:.0} % of {}", share * 100.0, short(all)),
    );
    let traffic = |name: &str| {
        let networks = t["networks"].as_array();
        networks.map_or_else(
            || "-".to_owned(),
            |all| {
                short(
                    all.iter()
                        .filter_map(|network| network[name].as_f64())
                        .sum(),
                )
            },
        )
    };
    [
        text(&node["name"]),
        text(&node["state"]),
        number(&t["cpu_busy"], |busy| format!("{:.0} %", busy * 100.0)),
        number(&t["cpu_mhz"], |mhz| format!("{:.1}", mhz / 1000.0)),
        memory,
        number(&t["temperature_c"], |c| format!("{c:.0} C")),
        number(&t["package_watts"], |watts| format!("{watts:.0} W")),
        traffic("received_bytes_s"),
        traffic("sent_bytes_s"),
    ]
}

fn instance(it: &Value) -> [String; 5] {
    let portrait = &it["portrait"];
    let state = match (it["progress"][0].as_u64(), it["progress"][1].as_u64()) {
        (Some(done), Some(of)) if of > 0 && it["state"] != "ready" => {
            format!("{} {} %", text(&it["state"]), done.min(of) * 100 / of)
        }
        _ => text(&it["state"]),
    };
    let speed = number(&portrait["measured_tok_s"], |v| format!("{v:.1}"));
    let predicted = number(&portrait["predicted_tok_s"], |v| format!("{v:.1}"));
    let split = portrait["split"].as_str().or(it["split"].as_str());
    let place = match it["reason"].as_str() {
        Some(reason) => printable(reason).into_owned(),
        None => tables::counted(it),
    };
    let split = printable(split.unwrap_or("-")).into_owned();
    [
        text(&it["model"]),
        state,
        split,
        format!("{speed} ({predicted})"),
        place,
    ]
}

/// A measured link. `MODELS` is the traffic of model workers. `SENDS` is all traffic of its
/// interface, on a wide terminal with its share of the bandwidth.
fn link(it: &Value, is_wide: bool) -> [String; 7] {
    let load = it["sent_bytes_s"].as_f64().zip(it["bytes_per_s"].as_f64());
    let load = load.filter(|(_, most)| is_wide && *most > 0.0);
    let load = load.map_or_else(String::new, |(sent, most)| {
        format!(" ({:.0} %)", 100.0 * sent / most)
    });
    let sent = |name: &str| number(&it[name], |sent| format!("{}/s", short(sent)));
    [
        text(&it["from"]),
        text(&it["to"]),
        text(&it["interface"]),
        number(&it["latency_s"], |s| format!("{:.2} ms", s * 1e3)),
        number(&it["bytes_per_s"], |rate| format!("{:.0} MB/s", rate / 1e6)),
        sent("model_bytes_s"),
        sent("sent_bytes_s") + &load,
    ]
}

fn request(it: &Value) -> [String; 7] {
    [
        it["request"].to_string(),
        text(&it["model"]),
        it["prompt_tokens"].to_string(),
        it["tokens"].to_string(),
        number(&it["tok_s"], |v| format!("{v:.1}")),
        match it["ttft_s"].as_f64() {
            Some(seconds) => format!("{seconds:.2} s"),
            None => number(&it["age_s"], |age| format!("({age:.0} s)")),
        },
        it["node"]
            .as_str()
            .map_or_else(|| "here".to_owned(), |node| printable(node).into_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    fn status() -> Value {
        json!({
            "name": "mini", "cluster": "blue-otter-31",
            "nodes": [
                {"name": "mini", "state": "alive", "telemetry": {
                    "cpu_busy": 0.83, "cpu_mhz": 3400.0, "memory_bytes": 68_719_476_736_u64,
                    "memory_available_bytes": 17_179_869_184_u64, "temperature_c": 71.4,
                    "package_watts": 64.2, "networks": [
                        {"name": "eth0", "received_bytes_s": 1048576.0, "sent_bytes_s": 512.0}]}},
                {"name": "studio", "state": "alive", "telemetry": {"cpu_busy": 0.91}},
                {"name": "tower", "state": "dead"},
            ],
            "links": [
                {"from": "mini", "to": "studio", "interface": "eth0", "latency_s": 0.000_12,
                 "bytes_per_s": 940_000_000, "sent_bytes_s": 47_000_000.0,
                 "model_bytes_s": 41_000_000.0},
                {"from": "studio", "to": "mini", "interface": "en5", "latency_s": 0.000_35},
            ],
            "energy": {"watts": 64.2, "joules_per_token": 4.52},
            "instances": [
                {"id": "1", "model": "qwen3:8b", "state": "ready", "split": "auto",
                 "nodes": ["mini", "studio"], "progress": null, "portrait": {
                    "split": "pipeline", "measured_tok_s": 14.2, "predicted_tok_s": 14.9}},
                {"id": "2", "model": "smollm2", "state": "fetching", "split": "tensor",
                 "nodes": ["mini"], "progress": [25, 100]},
                {"id": "3", "model": "broken", "state": "failed", "split": "auto",
                 "nodes": ["mini"], "reason": "no tensor blk.3.attn_q.weight"},
            ],
            "requests": [
                {"request": 21, "model": "qwen3:8b", "prompt_tokens": 812, "tokens": 71,
                 "tok_s": 14.9, "ttft_s": 1.31, "age_s": 6.0, "node": "mini"},
                {"request": 22, "model": "qwen3:8b", "prompt_tokens": 12, "tokens": 0,
                 "age_s": 2.0, "node": null},
            ],
        })
    }

    fn view() -> TopView {
        let mut view = TopView::default();
        view.update(Ok(status()));
        view
    }

    #[test]
    fn a_frame_of_80_by_24() {
        let expected = "\
paceline  mini · blue-otter-31 · 2 of 3 machines · 2 requests · 14.9 tokens/s
█
█
█
MACHINE         STATE   CPU   GHZ  MEMORY           TEMP  POWER  IN/S    OUT/S
mini            alive   83 %  3.4  75 % of 64 GiB   71 C  64 W   1.0 MiB 512 B
studio          alive   91 %  -    -                -     -      -       -
tower           dead    -     -    -                -     -      -       -

MODEL              STATE           SPLIT     TOK/S (PREDICTED)  ON
qwen3:8b           ready           pipeline  14.2 (14.9)        mini, studio
smollm2            fetching 25 %   tensor    - (-)              mini
broken             failed          auto      - (-)              no tensor blk.3.

LINK FROM       TO              BY       LATENCY  BANDWIDTH MODELS    SENDS
mini            studio          eth0     0.12 ms  940 MB/s  39 MiB/s  45 MiB/s
studio          mini            en5      0.35 ms  -         -         -

REQUEST  MODEL                  PROMPT  TOKENS  TOK/S   FIRST    AT
21       qwen3:8b               812     71      14.9    1.31 s   mini
22       qwen3:8b               12      0       -       (2 s)    here


q end  s sort (name)  / filter  arrows scroll  ? keys";
        assert_eq!(plain(&mut view(), (80, 24)), expected);
    }

    #[test]
    fn every_size_is_drawn_without_a_panic() {
        for width in [0, 1, 3, 20, 79, 200, 500] {
            for height in [0, 1, 2, 7, 19, 60, 200] {
                plain(&mut view(), (width, height));
                plain(&mut TopView::default(), (width, height));
            }
        }
        let empty = plain(&mut TopView::default(), (80, 24));
        assert!(empty.contains("0 requests · 0.0 tokens/s"), "{empty}");
    }

    /// The expected screen is in this folder; it is that of `paceline top` in a terminal.
    #[test]
    fn a_frame_of_200_by_60() {
        let expected = include_str!("200x60.txt").trim_end();
        assert_eq!(plain(&mut view(), (200, 60)), expected);
    }

    #[test]
    fn a_terminal_that_is_resized_shows_each_size_whole() {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        let mut resized = view();
        for (width, height) in [(80, 24), (20, 5), (200, 60), (1, 1), (80, 24)] {
            terminal.backend_mut().resize(width, height);
            terminal
                .draw(|frame| super::frame(&mut resized, frame))
                .unwrap();
            let shown = written(terminal.backend().buffer());
            assert_eq!(
                shown,
                plain(&mut view(), (width, height)),
                "{width} x {height}"
            );
        }
    }

    #[test]
    fn a_small_terminal_keeps_the_first_line_and_the_keys() {
        let small = plain(&mut view(), (20, 5));
        let lines: Vec<&str> = small.lines().collect();
        assert_eq!(lines.len(), 5, "{small}");
        assert!(lines[0].starts_with("paceline  mini"), "{small}");
        assert_eq!(lines[4], "q end  s sort (name)");
    }

    #[test]
    fn a_narrow_terminal_has_fewer_columns_and_no_cut_ones() {
        let narrow = plain(&mut view(), (60, 24));
        let heading = |name: &str| narrow.lines().find(|line| line.starts_with(name)).unwrap();
        assert_eq!(
            heading("MACHINE"),
            "MACHINE         STATE   CPU   MEMORY           IN/S"
        );
        assert_eq!(heading("MODEL"), "MODEL              STATE           ON");
        assert_eq!(
            heading("LINK FROM"),
            "LINK FROM       TO              BY       LATENCY  BANDWIDTH"
        );
        assert_eq!(
            heading("REQUEST"),
            "REQUEST  MODEL                  TOKENS  TOK/S   AT"
        );
    }

    #[test]
    fn every_table_can_be_scrolled_to_its_end_and_keys_are_told() {
        let mut view = view();
        let size = (80, 16);
        assert!(!plain(&mut view, size).contains("\n22 "));
        let press = |view: &mut TopView, code| view.handle_key(KeyEvent::from(code));
        press(&mut view, KeyCode::End);
        let end = plain(&mut view, size);
        assert!(end.contains("\n22 "), "{end}");
        press(&mut view, KeyCode::Home);
        press(&mut view, KeyCode::Char('?'));
        let keys = plain(&mut view, size);
        assert!(keys.contains("PgUp, PgDn"), "{keys}");
        press(&mut view, KeyCode::Char('x'));
        assert!(plain(&mut view, size).starts_with("paceline  mini"));
    }

    #[test]
    fn the_widest_values_have_room_at_80_columns() {
        let mut status = status();
        status["nodes"][0]["telemetry"] = json!({
            "cpu_busy": 1.0, "cpu_mhz": 3400.0, "memory_bytes": 1_099_511_627_776_u64,
            "memory_available_bytes": 0, "temperature_c": 101.0, "package_watts": 1200.0,
            "networks": [{"received_bytes_s": 999.0 * 1024.0, "sent_bytes_s": 1e9}],
        });
        let mut view = TopView::default();
        view.update(Ok(status));
        let text = plain(&mut view, (80, 24));
        let expected =
            "mini            alive   100 % 3.4  100 % of 1.0 TiB 101 C 1200 W 999 KiB 954 MiB";
        assert_eq!(text.lines().nth(5), Some(expected), "{text}");
    }

    #[test]
    fn bytes_have_three_digits_at_most() {
        let told = [0.0, 999.4, 999.5, 1e4, 10.2e3, 1023.9 * 1024.0, 2e6, 1e18].map(short);
        let expected = [
            "0 B",
            "999 B",
            "1.0 KiB",
            "9.8 KiB",
            "10 KiB",
            "1.0 MiB",
            "1.9 MiB",
            "909495 TiB",
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn a_machine_alone_has_no_row_of_links() {
        let mut status = status();
        status["links"] = json!([]);
        let mut view = TopView::default();
        view.update(Ok(status));
        assert!(!plain(&mut view, (200, 60)).contains("LINK"));
    }

    #[test]
    fn sorting_filtering_and_scrolling() {
        let mut view = view();
        let first = |view: &mut TopView| {
            let text = plain(view, (80, 24));
            text.lines()
                .nth(5)
                .unwrap()
                .split(' ')
                .next()
                .unwrap()
                .to_owned()
        };
        view.sort = view.sort.next();
        assert_eq!(first(&mut view), "studio");
        view.sort = MachineSort::Name;
        view.filter = Some("tower".into());
        assert_eq!(first(&mut view), "tower");
        assert!(!plain(&mut view, (80, 24)).contains("qwen3"));
        view.clear_filter();
        view.scroll = usize::MAX;
        assert_eq!(first(&mut view), "mini", "there is room for all");
        view.scroll = 2;
        plain(&mut view, (80, 8));
        assert!(view.scroll <= 2);
    }

    #[test]
    fn names_from_other_machines_cannot_drive_the_terminal() {
        let mut view = TopView::default();
        view.update(Ok(
            json!({"nodes": [{"name": "a\u{1b}[2Jb", "state": "alive"}]}),
        ));
        assert!(!plain(&mut view, (80, 24)).contains('\u{1b}'));
        view.update(Err("gone\u{7}".into()));
        let text = plain(&mut view, (80, 24));
        assert!(text.contains("does not answer") && !text.contains('\u{7}'));
    }
}
