//! Training data: lines of JSON, as tokens and a mask.
//!
//! Forms of a line, by the keys that it has: `messages` (role, content), `conversations` (from,
//! value: ShareGPT), `instruction`, `input`, `output` (Alpaca), `prompt` and `completion`, `text`.
//! All but the last are conversations and go through the model's template; prompt and completion
//! of a model without one are put together. Everything is checked before the first step.

use std::path::{Path, PathBuf};

use paceline_base::hex;
use paceline_model::ModelSource;
use paceline_text::chat::{
    ChatMessage, ChatOptions, ChatTemplate, Error as ChatError, name_results,
};
use paceline_text::replace_lone_surrogates;
use paceline_text::tokenizer::{Specials, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::net::Leaf;
use crate::turns;

/// Tokens of a conversation that the loss covers. In plain text all count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainOn {
    /// Tokens of the assistant's turns.
    #[default]
    Assistant,
    /// Tokens of the last turn of the assistant.
    Last,
    All,
}

/// Tokens of one example, and the loss mask.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Example {
    tokens: Vec<u32>,
    judged: Vec<bool>,
    rendered: bool,
}

/// Examples, in the order of their files, and the rows that they are put into.
#[derive(Clone, Debug)]
pub struct Examples {
    examples: Vec<Example>,
    /// Examples that are packed into each row, without attention to each other.
    rows: Vec<Vec<usize>>,
    /// Examples cut to the longest length.
    pub cut: usize,
    /// Text examples with names of control tokens, as a template writes them. In text they are
    /// ordinary text.
    pub rendered: usize,
    /// SHA-256 of all tokens and masks.
    pub digest: String,
}

/// A model's way from text to tokens.
#[derive(Debug)]
pub struct ExampleReader {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    train_on: TrainOn,
    /// Longest row; the rest of a longer example is left out.
    tokens_max: usize,
    /// Whether a row has as many examples as fit.
    pack: bool,
}

impl ExampleReader {
    /// The reader of the model at `model`.
    ///
    /// # Errors
    /// Errors of its tokenizer or template.
    pub fn new(
        model: &Path,
        train_on: TrainOn,
        (tokens_max, pack): (usize, bool),
    ) -> Result<Self, Error> {
        let source = ModelSource::open(model)?;
        let (tokenizer, template) = match &source {
            ModelSource::Gguf(file) => (
                Tokenizer::from_gguf(file.metadata())?,
                ChatTemplate::from_gguf(file.metadata()),
            ),
            ModelSource::Hf(folder) => (
                Tokenizer::from_hf_dir(folder.path())?,
                ChatTemplate::from_hf_dir(folder.path()),
            ),
        };
        let template = match template {
            Ok(template) => Some(template),
            Err(ChatError::NoTemplate) => None,
            Err(error) => return Err(Error::Template(error)),
        };
        Ok(Self {
            tokenizer,
            template,
            train_on,
            tokens_max,
            pack,
        })
    }

    /// The model's tokenizer.
    pub(crate) const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The examples of a file, or of `NAME.jsonl` in a folder.
    ///
    /// # Errors
    /// [`Error::Data`] with file, line and reason; [`Error::NoExamples`]; [`Error::Files`].
    pub fn read(&self, path: &Path, name: &str) -> Result<Examples, Error> {
        let path = file_of(path, name);
        let bytes = std::fs::read(&path).map_err(Error::file("read", &path))?;
        let text = lines_of(&bytes).map_err(|(line, reason)| Error::Data {
            path: path.clone(),
            line,
            reason,
        })?;
        let (mut examples, mut cut, mut rendered) = (Vec::new(), 0, 0);
        for (i, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let at = |reason| Error::Data {
                path: path.clone(),
                line: i + 1,
                reason,
            };
            let mut example = self.example(line).map_err(at)?;
            rendered += usize::from(example.rendered);
            if example.tokens.len() > self.tokens_max {
                example.tokens.truncate(self.tokens_max);
                example.judged.truncate(self.tokens_max);
                cut += 1;
            }
            if !example.judged.iter().skip(1).any(|judged| *judged) {
                let n = example.tokens.len();
                return Err(at(format!("none of its {n} tokens is trained on")));
            }
            examples.push(example);
        }
        if examples.is_empty() {
            return Err(Error::NoExamples { path });
        }
        let digest = digest(&examples);
        let lengths: Vec<usize> = examples.iter().map(|e| e.tokens.len() - 1).collect();
        let rows = match self.pack {
            true => packed(&lengths, self.tokens_max),
            false => (0..lengths.len()).map(|i| vec![i]).collect(),
        };
        Ok(Examples {
            examples,
            rows,
            cut,
            rendered,
            digest,
        })
    }

    fn example(&self, line: &str) -> Result<Example, String> {
        let json = replace_lone_surrogates(line.as_bytes());
        let value: Value = serde_json::from_slice(&json).map_err(|e| format!("no JSON: {e}"))?;
        let Some(object) = value.as_object() else {
            return Err("no JSON object".to_owned());
        };
        let has = |key| object.contains_key(key);
        if has("messages") {
            return self.chat(messages(&object["messages"], ["role", "content"])?, &value);
        }
        if has("conversations") {
            return self.chat(
                messages(&object["conversations"], ["from", "value"])?,
                &value,
            );
        }
        if has("instruction") && has("output") {
            let (task, answer) = (text(&value, "instruction")?, text(&value, "output")?);
            let input = if has("input") {
                text(&value, "input")?
            } else {
                ""
            };
            let task = match input {
                "" => task.to_owned(),
                input => format!("{task}\n\n{input}"),
            };
            return self.turn(&task, answer, &value);
        }
        if has("prompt") && has("completion") {
            return self.turn(text(&value, "prompt")?, text(&value, "completion")?, &value);
        }
        if has("text") {
            let text = text(&value, "text")?;
            let mut example = self.plain("", text, true)?;
            example.rendered = self.names_control(text)?;
            return Ok(example);
        }
        let keys: Vec<&str> = object.keys().map(String::as_str).take(8).collect();
        Err(format!(
            "has the keys {keys:?}, expected messages, conversations, instruction and output, \
             prompt and completion, or text"
        ))
    }

    /// A question and its answer.
    fn turn(&self, task: &str, answer: &str, value: &Value) -> Result<Example, String> {
        if self.template.is_none() {
            return self.plain(task, answer, self.train_on == TrainOn::All);
        }
        let turns = vec![
            ChatMessage::new("user", task),
            ChatMessage::new("assistant", answer),
        ];
        self.chat(turns, value)
    }

    /// Text that ends with the end of a text. The loss covers the text before `after` only if
    /// `all`.
    fn plain(&self, before: &str, after: &str, all: bool) -> Result<Example, String> {
        let encode = |text: &str, bos| {
            let ids = self.tokenizer.encode(text, Specials::AsText, bos);
            ids.map_err(|e| e.to_string())
        };
        let mut tokens = encode(before, true)?;
        let asked = tokens.len();
        tokens.extend(encode(after, false)?);
        tokens.extend(self.tokenizer.eos());
        let judged = (0..tokens.len()).map(|i| all || i >= asked).collect();
        Ok(Example {
            tokens,
            judged,
            rendered: false,
        })
    }

    fn names_control(&self, text: &str) -> Result<bool, String> {
        let ids = self.tokenizer.encode(text, Specials::Parse, false);
        let ids = ids.map_err(|e| e.to_string())?;
        Ok(ids.iter().any(|id| self.tokenizer.is_control(*id)))
    }

    fn chat(&self, mut turns: Vec<ChatMessage>, value: &Value) -> Result<Example, String> {
        name_results(&mut turns);
        let template = self.template.as_ref();
        let template = template.ok_or("the model has no chat template for a conversation")?;
        let tools = value.get("tools").and_then(Value::as_array);
        let tools: Vec<Value> = tools.into_iter().flatten().map(turns::tool).collect();
        let encode = |turns: &[ChatMessage], add_generation_prompt| {
            let options = ChatOptions {
                add_generation_prompt,
                tools: tools.clone(),
                ..ChatOptions::default()
            };
            let ids = template.encode_chat(&self.tokenizer, turns, &options);
            ids.map_err(|e| e.to_string())
        };
        let tokens = encode(&turns, false)?;
        let mut judged = vec![self.train_on == TrainOn::All; tokens.len()];
        // OpenAI's format has a weight of 0 for answers that are not learnt.
        let counts =
            |turn: &ChatMessage| turn.extra.get("weight").is_none_or(|weight| *weight != 0);
        let is_answer = |turn: &usize| {
            let turn = &turns[*turn];
            matches!(turn.role.as_str(), "assistant" | "model") && counts(turn)
        };
        let mut answers: Vec<usize> = (0..turns.len()).filter(is_answer).collect();
        match self.train_on {
            TrainOn::All => answers.clear(),
            TrainOn::Last => drop(answers.drain(..answers.len().saturating_sub(1))),
            TrainOn::Assistant => {}
        }
        if answers.is_empty() && self.train_on != TrainOn::All {
            return Err("no turn of an assistant".to_owned());
        }
        for turn in answers {
            let (before, after) = (
                encode(&turns[..turn], true)?,
                encode(&turns[..=turn], false)?,
            );
            // A token may join the end of one text with the beginning of the next: the loss covers
            // it.
            let (begin, end) = (common(&before, &after), common(&after, &tokens));
            if begin + 1 < before.len() || end + 1 < after.len() {
                return Err(format!(
                    "the template writes turn {} in another way once more turns follow, so its \
                     tokens cannot be told apart: train on all",
                    turn + 1
                ));
            }
            judged[begin..end].fill(true);
        }
        Ok(Example {
            tokens,
            judged,
            rendered: false,
        })
    }
}

/// The text of a file of lines, without a byte order mark.
///
/// # Errors
/// Line and reason where the file is something else.
fn lines_of(bytes: &[u8]) -> Result<&str, (usize, String)> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    if matches!(
        bytes,
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [_, 0, ..] | [0, _, ..]
    ) {
        return Err((1, "the file is UTF-16, expected UTF-8".to_owned()));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        (line, "the line is not UTF-8".to_owned())
    })?;
    if text.trim_start().starts_with('[') {
        let reason = "the file is a JSON array, expected an object a line (JSON Lines)";
        return Err((1, reason.to_owned()));
    }
    Ok(text)
}

/// The file of examples that `path` means: itself, or `NAME.jsonl` in it.
pub(crate) fn file_of(path: &Path, name: &str) -> PathBuf {
    match path.is_dir() {
        true => path.join(format!("{name}.jsonl")),
        false => path.to_owned(),
    }
}

/// Rows of at most `room` together: the longest first, each into the first row that has room for
/// it (first-fit decreasing). A longer example has a row of its own. `O(n log n)` for n examples.
fn packed(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(lengths[*i]), *i));
    let mut rooms = Rooms::new(lengths.len(), room);
    let mut rows: Vec<Vec<usize>> = Vec::new();
    for i in order {
        // Rows behind the last are empty, so the first of them is found before the others.
        let row = rooms.first_for(lengths[i]).unwrap_or(rows.len());
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(i);
        rooms.take(row, lengths[i]);
    }
    rows
}

/// Room left in rows, as a tree in an array. Children of node `i` are `2 i` and `2 i + 1`, the leaf
/// of row `r` is `first + r`. A node has the most of its leaves.
struct Rooms {
    /// Room that is left, and 1; 0 where the row takes nothing more, not even an empty example.
    most: Vec<usize>,
    first: usize,
}

impl Rooms {
    fn new(rows: usize, room: usize) -> Self {
        let first = rows.next_power_of_two();
        Self {
            most: vec![room.saturating_add(1); 2 * first],
            first,
        }
    }

    /// The first row with room for `len`.
    fn first_for(&self, len: usize) -> Option<usize> {
        if self.most[1] <= len {
            return None;
        }
        let mut at = 1;
        while at < self.first {
            at *= 2;
            at += usize::from(self.most[at] <= len);
        }
        Some(at - self.first)
    }

    fn take(&mut self, row: usize, len: usize) {
        let mut at = self.first + row;
        self.most[at] = self.most[at].saturating_sub(len);
        while at > 1 {
            at /= 2;
            self.most[at] = self.most[2 * at].max(self.most[2 * at + 1]);
        }
    }
}

/// Tokens that both begin with.
fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str, String> {
    let wrong = || format!("{key} is {}, expected a text", kind(&value[key]));
    value[key].as_str().ok_or_else(wrong)
}

const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Turns whose speaker and words are under these keys.
fn messages(turns: &Value, [role, words]: [&str; 2]) -> Result<Vec<ChatMessage>, String> {
    let wrong = || format!("the conversation is {}, expected an array", kind(turns));
    let turns = turns.as_array().ok_or_else(wrong)?;
    let turn = |(i, turn): (usize, &Value)| {
        if let ("role", Some(message)) = (role, turn.as_object()) {
            let message = turns::message(message.clone());
            return message.map_err(|reason| format!("turn {}: {reason}", i + 1));
        }
        let of = |key| text(turn, key).map_err(|reason| format!("turn {}: {reason}", i + 1));
        let role = match of(role)? {
            "human" => "user",
            "gpt" | "chatgpt" | "bot" => "assistant",
            other => other,
        };
        Ok(ChatMessage::new(role, of(words)?))
    };
    let turns: Vec<ChatMessage> = turns
        .iter()
        .enumerate()
        .map(turn)
        .collect::<Result<_, String>>()?;
    match turns.is_empty() {
        true => Err("the conversation has no turns".to_owned()),
        false => Ok(turns),
    }
}

fn digest(examples: &[Example]) -> String {
    let mut hash = Sha256::new();
    for example in examples {
        hash.update((example.tokens.len() as u64).to_le_bytes());
        for (token, judged) in example.tokens.iter().zip(&example.judged) {
            hash.update(token.to_le_bytes());
            hash.update([u8::from(*judged)]);
        }
    }
    hex(&hash.finalize())
}

impl Examples {
    /// Number of examples, at least one.
    pub fn examples(&self) -> usize {
        self.examples.len()
    }

    /// Number of rows they are packed into, at least one.
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    /// The tokens of each example before the first that the loss covers.
    pub(crate) fn prompts(&self) -> Vec<Vec<u32>> {
        let of = |example: &Example| {
            let asked = example.judged.iter().take_while(|judged| !**judged).count();
            example.tokens[..asked].to_vec()
        };
        let prompts = self.examples.iter().map(of);
        prompts.filter(|prompt| !prompt.is_empty()).collect()
    }

    pub fn largest_token(&self) -> u32 {
        let all = self.examples.iter().flat_map(|example| &example.tokens);
        all.copied().max().unwrap_or(0)
    }

    /// Tokens of all examples.
    pub fn tokens(&self) -> u64 {
        self.examples
            .iter()
            .map(|example| example.tokens.len() as u64)
            .sum()
    }

    fn of<'a>(&'a self, rows: &'a [usize]) -> impl Iterator<Item = &'a Example> {
        let numbers = rows.iter().flat_map(move |row| &self.rows[*row]);
        numbers.map(move |i| &self.examples[*i])
    }

    /// These rows as one leaf. The last token of each example is only a target.
    pub fn leaf(&self, rows: &[usize]) -> Leaf {
        let mut leaf = Leaf::default();
        for example in self.of(rows) {
            let n = example.tokens.len() - 1;
            leaf.tokens.extend(&example.tokens[..n]);
            let next = example.tokens.iter().zip(&example.judged).skip(1);
            leaf.targets
                .extend(next.map(|(token, judged)| judged.then_some(*token)));
            leaf.lengths.push(n);
        }
        leaf
    }

    /// Tokens of these rows that the loss covers.
    pub fn judged(&self, rows: &[usize]) -> u64 {
        let of = |example: &Example| example.judged.iter().skip(1).filter(|j| **j).count() as u64;
        self.of(rows).map(of).sum()
    }

    /// Tokens of these rows that the model computes.
    pub fn computed(&self, rows: &[usize]) -> u64 {
        let of = |example: &Example| example.tokens.len() as u64 - 1;
        self.of(rows).map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_filled_by_the_longest_first_and_none_is_too_long() {
        let lengths = [3, 9, 1, 6, 4, 2, 10];
        let rows = packed(&lengths, 10);
        assert_eq!(rows, [vec![6], vec![1, 2], vec![3, 4], vec![0, 5]]);
        let mut all: Vec<usize> = rows.concat();
        all.sort_unstable();
        assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
        assert_eq!(packed(&[5, 5, 5], 9), [vec![0], vec![1], vec![2]]);
    }

    /// The definition of [`packed`]: every row is looked at, from the first.
    fn packed_naively(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|i| (std::cmp::Reverse(lengths[*i]), *i));
        let mut rows: Vec<(usize, Vec<usize>)> = Vec::new();
        for i in order {
            match rows.iter_mut().find(|(used, _)| used + lengths[i] <= room) {
                Some((used, row)) => {
                    *used += lengths[i];
                    row.push(i);
                }
                None => rows.push((lengths[i], vec![i])),
            }
        }
        rows.into_iter().map(|(_, row)| row).collect()
    }

    #[test]
    fn the_tree_of_rooms_finds_the_rows_of_a_search_from_the_first() {
        let mut state = 1u64;
        let mut next = |below: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % below
        };
        for n in [0, 1, 2, 3, 7, 8, 9, 100, 1000] {
            for room in [1, 10, 64] {
                // Empty examples and those that are longer than a row among them.
                let lengths: Vec<usize> = (0..n).map(|_| next(room + 3)).collect();
                let (fast, naive) = (packed(&lengths, room), packed_naively(&lengths, room));
                assert_eq!(fast, naive, "{n} of at most {room}: {lengths:?}");
            }
        }
    }
}
