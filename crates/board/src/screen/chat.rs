//! The chat of `paceline top`: its conversation, its input line, its drawing.

use paceline_base::{CallbackError, printable};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Widget;
use serde_json::{Value, json};

use super::TopAction;

const INPUT_CHARS_MAX: usize = 4_000;

/// Maximum characters of an answer that is shown and sent again.
const ANSWER_CHARS_MAX: usize = 64_000;

/// Maximum messages; the oldest are dropped, also from what the model gets.
const MESSAGES_MAX: usize = 64;

/// A conversation with a loaded model.
#[derive(Debug, Default)]
pub(super) struct ChatPane {
    pub(super) is_open: bool,
    model: String,
    input: String,
    /// Whether the model wrote it, and the text.
    messages: Vec<(bool, String)>,
    is_answering: bool,
    /// How the last answer ended.
    note: String,
    /// Lines above the end.
    scroll: usize,
}

impl ChatPane {
    /// Handles a key; `models` are those that answer.
    pub(super) fn handle_key(&mut self, key: KeyEvent, models: &[String]) -> Option<TopAction> {
        if !models.contains(&self.model) {
            self.model = models.first().cloned().unwrap_or_default();
        }
        match key.code {
            KeyCode::Esc => self.is_open = false,
            KeyCode::Tab => {
                let at = models.iter().position(|model| *model == self.model);
                let next = at.map_or(0, |at| (at + 1) % models.len());
                self.model = models.get(next).cloned().unwrap_or_default();
            }
            KeyCode::Char(c) if self.input.chars().count() < INPUT_CHARS_MAX => self.input.push(c),
            KeyCode::Backspace => drop(self.input.pop()),
            KeyCode::Up => self.scroll += 1,
            KeyCode::Down => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageUp => self.scroll += 10,
            KeyCode::PageDown => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::Enter => return self.send(),
            _ => {}
        }
        None
    }

    /// The request for the typed message.
    fn send(&mut self) -> Option<TopAction> {
        if self.is_answering || self.input.trim().is_empty() {
            return None;
        }
        if self.model.is_empty() {
            self.note = "no model is loaded: Esc, then l loads one".to_owned();
            return None;
        }
        self.messages.push((false, std::mem::take(&mut self.input)));
        let too_many = self.messages.len().saturating_sub(MESSAGES_MAX);
        self.messages.drain(..too_many);
        let messages = self.messages.iter().map(|(is_answer, text)| {
            let role = if *is_answer { "assistant" } else { "user" };
            json!({ "role": role, "content": text })
        });
        let messages: Vec<Value> = messages.collect();
        self.messages.push((true, String::new()));
        (self.is_answering, self.scroll) = (true, 0);
        self.note.clear();
        Some(TopAction::Ask(
            json!({ "model": self.model, "messages": messages, "stream": true }),
        ))
    }

    /// Adds a part of the answer.
    pub(super) fn hear(&mut self, part: &str) {
        if let Some((true, answer)) = self.messages.last_mut()
            && answer.len() < ANSWER_CHARS_MAX
        {
            answer.push_str(part);
        }
    }

    /// Ends the answer. An empty one is removed with its question.
    pub(super) fn end(&mut self, ended: Result<(), CallbackError>) {
        self.is_answering = false;
        self.note = ended
            .err()
            .map_or_else(String::new, |error| error.to_string());
        if self
            .messages
            .last()
            .is_some_and(|(_, text)| text.is_empty())
        {
            self.messages.pop();
            let question = self.messages.pop().map(|(_, text)| text);
            if self.input.is_empty() {
                self.input = question.unwrap_or_default();
            }
        }
    }

    /// Draws the conversation, with the input line and the keys below it.
    pub(super) fn draw(&mut self, area: Rect, buffer: &mut Buffer) {
        let width = usize::from(area.width.max(1));
        let mut lines: Vec<(String, Modifier)> = Vec::new();
        for (is_answer, text) in &self.messages {
            let style = if *is_answer {
                Modifier::empty()
            } else {
                Modifier::BOLD
            };
            let text = text.lines().flat_map(|line| wrapped(line, width));
            lines.extend(text.map(|line| (line, style)));
            lines.push((String::new(), style));
        }
        let model = printable(&self.model);
        let state = match (self.is_answering, self.note.as_str()) {
            (true, _) => "writes".to_owned(),
            (false, "") => "Enter sends".to_owned(),
            (false, note) => printable(note).into_owned(),
        };
        let foot = format!("{model}: {state}  Tab model  arrows scroll  Esc back");
        let room = usize::from(area.height.saturating_sub(2));
        self.scroll = self.scroll.min(lines.len().saturating_sub(room));
        let end = lines.len() - self.scroll;
        let shown = lines[end.saturating_sub(room)..end].iter().cloned();
        let input = format!("> {}_", printable(&self.input));
        let skipped = input.chars().count().saturating_sub(width);
        let input: String = input.chars().skip(skipped).collect();
        let below = [(input, Modifier::BOLD), (foot, Modifier::REVERSED)];
        let missing = usize::from(area.height).saturating_sub(2 + shown.len());
        let blank = std::iter::repeat_n((String::new(), Modifier::empty()), missing);
        for ((line, style), y) in shown.chain(blank).chain(below).zip(area.y..area.bottom()) {
            let row = Rect {
                y,
                height: 1,
                ..area
            };
            Line::styled(line, Style::new().add_modifier(style)).render(row, buffer);
        }
    }
}

/// A line in pieces of at most `width` characters, cut at spaces where there are any, without
/// control characters.
fn wrapped(line: &str, width: usize) -> Vec<String> {
    let mut rest: Vec<char> = printable(line).chars().collect();
    let mut pieces = Vec::new();
    while rest.len() > width {
        let space = rest[..=width].iter().rposition(|c| *c == ' ');
        let end = space.filter(|at| *at > 0).unwrap_or(width);
        let after = rest.split_off(end);
        pieces.push(rest.iter().collect());
        rest = after
            .into_iter()
            .skip(usize::from(space == Some(end)))
            .collect();
    }
    pieces.push(rest.iter().collect());
    pieces
}
