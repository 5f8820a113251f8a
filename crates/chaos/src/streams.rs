//! A client of the HTTP API that records the time of each fragment of its answer. When its
//! connection breaks, or is silent for too long, it resumes at another node with the id of its last
//! event. A response is resumed with its id and the number of its last event.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

use super::spaces;

/// Longest wait for a complete answer, faults included.
const ANSWER_LIMIT: Duration = Duration::from_secs(180);

/// Silence after which a client tries another node: longer than a recovery takes.
const PATIENCE: Duration = Duration::from_secs(6);

/// Time limit of a connection within this machine.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Pause between two attempts to resume.
const RETRY: Duration = Duration::from_millis(100);

/// Longest line of an event: far longer than a fragment of text and its frame.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Fragments after which a cancelling client leaves.
const CANCEL_AFTER: usize = 10;

/// Kinds of requests: greedy, seeded, with log-probabilities, of two choices, cancelled by the
/// client, with a schema, with a required tool call, and a response.
pub(crate) const KINDS: usize = 8;

/// The address of a node's API.
#[derive(Clone, Debug)]
pub(crate) struct ApiEndpoint {
    pub(crate) port: u16,
    /// The network namespace of its loopback; `None` for this process's own.
    pub(crate) space: Option<Arc<File>>,
}

/// A request body, and the client's behaviour.
#[derive(Clone, Debug)]
pub(crate) struct ClientRequest {
    body: Value,
    /// Its client cancels in the middle.
    cancels: bool,
    /// It is for `/v1/responses`.
    is_response: bool,
}

/// A complete or partial answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientResponse {
    /// The content of each choice: text, calls and log-probabilities.
    pub(crate) said: BTreeMap<u64, String>,
    /// Why it is incomplete.
    pub(crate) error: Option<String>,
    /// How often its client continued at another node.
    pub(crate) moves: u32,
    /// The server rejects the request at every node.
    pub(crate) is_refused: bool,
    ended: bool,
    cancelled: bool,
    /// Id of the last event, and of one whose data is still to come.
    last: Option<String>,
    next: Option<String>,
    /// Id of a response, and the number of its last event.
    response: Option<(String, u64)>,
    pieces: Vec<Instant>,
}

impl ClientRequest {
    /// Different requests, of all [`KINDS`] in turn.
    pub(crate) fn several(count: usize, tokens: u32) -> Vec<Self> {
        let one = |number: usize| {
            let mut body = json!({
                "messages": [{"role": "user", "content": format!("Count from {number}.")}],
                "temperature": if number.is_multiple_of(2) { 0.0 } else { 0.8 },
                "seed": number,
                "max_tokens": tokens,
                "ignore_eos": true,
                "stream": true,
            });
            match number % KINDS {
                2 => {
                    body["logprobs"] = true.into();
                    body["top_logprobs"] = 2.into();
                }
                3 => {
                    body["n"] = 2.into();
                    body["max_tokens"] = (tokens / 2).into();
                }
                5 => body["response_format"] = schema(),
                6 => {
                    body["tools"] = json!([tool()]);
                    body["tool_choice"] = "required".into();
                }
                7 => body = response(number, tokens),
                _ => {}
            }
            Self {
                body,
                cancels: number % KINDS == 4,
                is_response: number % KINDS == 7,
            }
        };
        (0..count).map(one).collect()
    }

    /// Whether some models cannot answer it.
    pub(crate) fn is_optional(&self) -> bool {
        !self.body["tools"].is_null()
    }

    /// Sends the request to the first of `doors`, and signals when `at_token` fragments have
    /// arrived.
    pub(crate) fn answer(
        &self,
        doors: &[ApiEndpoint],
        at_token: u32,
        reached: &Sender<()>,
    ) -> ClientResponse {
        let (mut answer, begun) = (ClientResponse::default(), Instant::now());
        let mut error = None;
        for door in doors.iter().cycle() {
            if answer.ended || answer.cancelled || answer.error.is_some() {
                return answer;
            }
            if begun.elapsed() > ANSWER_LIMIT {
                break;
            }
            if error.is_some() {
                answer.moves += 1;
                std::thread::sleep(RETRY);
            }
            error = self.stream(door, &mut answer, at_token, reached).err();
        }
        answer.error = error.map(|error| format!("{error:#}"));
        answer
    }

    fn stream(
        &self,
        door: &ApiEndpoint,
        answer: &mut ClientResponse,
        at_token: u32,
        reached: &Sender<()>,
    ) -> Result<()> {
        let (status, mut lines) = self.ask_next(door, answer)?;
        if status != 200 {
            let mut said = String::new();
            lines.take(LINE_BYTES_MAX).read_to_string(&mut said)?;
            // If no node has the answer any more, it is lost.
            if status == 404 && answer.last.is_some() {
                answer.error = Some(said.clone());
            }
            if status == 400 {
                (answer.error, answer.is_refused) = (Some(said.clone()), true);
            }
            bail!("{status}: {said}");
        }
        while !answer.ended {
            let mut line = String::new();
            let read = Read::take(&mut lines, LINE_BYTES_MAX).read_line(&mut line)?;
            ensure!(read > 0, "the stream ended before the answer did");
            answer.take(line.trim())?;
            if answer.pieces.len() == at_token as usize && answer.error.is_none() {
                let _ = reached.send(()); // the first of all answers counts
            }
            if self.cancels && answer.pieces.len() >= CANCEL_AFTER {
                answer.cancelled = true;
                break;
            }
        }
        Ok(())
    }

    /// Requests the events after the last received one, or all of the answer.
    fn ask_next(
        &self,
        door: &ApiEndpoint,
        answer: &ClientResponse,
    ) -> Result<(u16, BufReader<TcpStream>)> {
        let model = model_at(door)?.context("the node has no model")?;
        if let Some((id, number)) = &answer.response {
            let path = format!("/v1/responses/{id}?stream=true&starting_after={number}");
            return ask(door, &format!("GET {path}"), "", "");
        }
        let mut body = self.body.clone();
        body["model"] = model;
        let last = answer.last.as_ref();
        let header = last.map_or(String::new(), |id| format!("Last-Event-ID: {id}\r\n"));
        let path = match self.is_response {
            true => "/v1/responses",
            false => "/v1/chat/completions",
        };
        ask(door, &format!("POST {path}"), &header, &body.to_string())
    }
}

/// A request for a response: the API has no seed field, so it is greedy.
fn response(number: usize, tokens: u32) -> Value {
    json!({
        "input": format!("Count from {number}."),
        "temperature": 0.0,
        "max_output_tokens": tokens,
        "stream": true,
    })
}

fn schema() -> Value {
    let list = json!({"type": "array", "items": {"type": "integer"}, "minItems": 20});
    let object = json!({"type": "object", "properties": {"numbers": list},
                        "required": ["numbers"], "additionalProperties": false});
    json!({"type": "json_schema",
           "json_schema": {"name": "count", "strict": true, "schema": object}})
}

fn tool() -> Value {
    let parameters = schema()["json_schema"]["schema"].clone();
    json!({"type": "function",
           "function": {"name": "add", "description": "Adds numbers", "parameters": parameters}})
}

/// Sends an HTTP/1.0 request, whose answer ends with its connection. Returns its status, and a
/// reader behind its headers.
fn ask(
    door: &ApiEndpoint,
    what: &str,
    headers: &str,
    body: &str,
) -> Result<(u16, BufReader<TcpStream>)> {
    if let Some(space) = &door.space {
        spaces::enter(space).context("cannot enter the node's network")?;
    }
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, door.port));
    let mut stream = TcpStream::connect_timeout(&addr, CONNECT_LIMIT)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let length = body.len();
    write!(
        stream,
        "{what} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\
         Content-Length: {length}\r\n\r\n{body}"
    )?;
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    let mut status = None;
    loop {
        line.clear();
        let read = Read::take(&mut lines, LINE_BYTES_MAX).read_line(&mut line)?;
        ensure!(read > 0, "no answer came");
        if line.trim().is_empty() {
            break;
        }
        status = status.or_else(|| line.split(' ').nth(1)?.parse().ok());
    }
    Ok((status.context("no status came")?, lines))
}

/// Name of the model served by the node behind `door`; `None` if it has none yet. Runs on its own
/// thread: the calling one stays in its network namespace.
pub(crate) fn model(door: &ApiEndpoint) -> Result<Option<Value>> {
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| model_at(door)).join();
        asked.map_err(|_| anyhow!("a client panicked"))?
    })
}

fn model_at(door: &ApiEndpoint) -> Result<Option<Value>> {
    let (_, lines) = ask(door, "GET /v1/models", "", "")?;
    let mut said = String::new();
    lines.take(LINE_BYTES_MAX).read_to_string(&mut said)?;
    let models: Value = serde_json::from_str(&said)?;
    let name = models["data"][0]["id"].clone();
    Ok(Some(name).filter(Value::is_string))
}

impl ClientResponse {
    /// Handles a line of the event stream.
    fn take(&mut self, line: &str) -> Result<()> {
        if let Some(id) = line.strip_prefix("id: ") {
            self.next = Some(id.to_owned());
        }
        let Some(data) = line.strip_prefix("data: ") else {
            return Ok(()); // an empty line, or a comment that keeps the connection alive
        };
        if data == "[DONE]" {
            self.ended = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).context("not an event")?;
        self.last = self.next.take().or(self.last.take());
        if let Some(kind) = event["type"].as_str() {
            return self.take_response(kind, &event);
        }
        if event["error"]["code"] == "shutting_down" {
            bail!("the node goes");
        }
        if !event["error"].is_null() {
            self.error = Some(event["error"].to_string());
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            self.take_choice(choice);
        }
        Ok(())
    }

    fn take_response(&mut self, kind: &str, event: &Value) -> Result<()> {
        let response = &event["response"];
        if kind == "response.failed" {
            ensure!(
                response["error"]["code"] != "shutting_down",
                "the node goes"
            );
            self.error = Some(response["error"].to_string());
            return Ok(());
        }
        // The first events have the id, all have a number.
        let known = self.response.take().map(|(id, _)| id);
        let id = response["id"].as_str().map(str::to_owned).or(known);
        self.response = id.zip(event["sequence_number"].as_u64());
        let said = self.said.entry(0).or_default();
        if let Some(delta) = event["delta"].as_str() {
            said.push_str(delta);
            self.pieces.push(Instant::now());
        }
        if ["response.completed", "response.incomplete"].contains(&kind) {
            said.push_str(kind);
            self.ended = true;
        }
        Ok(())
    }

    fn take_choice(&mut self, choice: &Value) {
        let said = self
            .said
            .entry(choice["index"].as_u64().unwrap_or(0))
            .or_default();
        let delta = &choice["delta"];
        let arguments = &delta["tool_calls"][0]["function"];
        let pieces = [
            &delta["content"],
            &delta["reasoning_content"],
            &arguments["name"],
            &arguments["arguments"],
        ];
        let text: String = pieces.into_iter().filter_map(Value::as_str).collect();
        said.push_str(&text);
        let logprobs = choice["logprobs"]["content"].as_array();
        for entry in logprobs.into_iter().flatten() {
            said.push_str(&entry["logprob"].to_string());
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            said.push_str(reason);
        }
        if !text.is_empty() {
            self.pieces.push(Instant::now());
        }
    }

    /// Whether it is incomplete for its client.
    pub(crate) fn is_lost(&self) -> bool {
        self.error.is_some() || !(self.ended || self.cancelled)
    }

    /// Whether its content differs from the undisturbed answer.
    pub(crate) fn is_altered(&self, right: &Self) -> bool {
        let begins = |(choice, said): (&u64, &String)| {
            let right = right.said.get(choice).map_or("", String::as_str);
            said.starts_with(right) || right.starts_with(said.as_str())
        };
        // The length of a cancelled answer is random.
        let is_right = match self.cancelled {
            true => self.said.iter().all(begins),
            false => self.said == right.said,
        };
        !self.is_lost() && !is_right
    }

    /// Time from the report of a fault to the next fragment. `None` if none came, or if the answer
    /// had no fragment at the fault: it may have been queued.
    pub(crate) fn resumed(&self, at: Instant, told: Instant) -> Option<Duration> {
        self.pieces.first().filter(|first| **first <= at)?;
        let next = self.pieces.iter().find(|piece| **piece > told)?;
        Some(*next - told)
    }

    /// Number of fragments received before `moment`.
    pub(crate) fn pieces_at(&self, moment: Instant) -> usize {
        self.pieces.partition_point(|piece| *piece <= moment)
    }

    /// The longest wait for a fragment received after `moment`; `None` if there is none.
    pub(crate) fn pause(&self, moment: Instant) -> Option<Duration> {
        let pairs = self.pieces.iter().zip(self.pieces.iter().skip(1));
        pairs
            .filter(|(_, next)| **next > moment)
            .map(|(piece, next)| *next - *piece)
            .max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_from_its_events() {
        let mut answer = ClientResponse::default();
        let before = Instant::now();
        for line in [
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            "",
            "id: 4f:1",
            r#"data: {"choices":[{"index":0,"delta":{"content":"a"}}]}"#,
            ": still here",
            "id: 4f:2",
            r#"data: {"choices":[{"index":0,"delta":{"content":"b"}}]}"#,
            r#"data: {"choices":[{"index":1,"delta":{"content":"c"},
                "logprobs":{"content":[{"logprob":-0.5}]}}]}"#,
            r#"data: {"choices":[]}"#,
        ] {
            answer.take(&line.replace('\n', "")).unwrap();
        }
        let said: Vec<_> = answer.said.values().map(String::as_str).collect();
        assert_eq!(said, ["ab", "c-0.5"]);
        assert_eq!(answer.last.as_deref(), Some("4f:2"));
        assert!(answer.is_lost(), "it has not ended");
        answer.take("data: [DONE]").unwrap();
        assert!(!answer.is_lost());
        assert!(answer.pause(before).is_some());
        assert_eq!(answer.pause(Instant::now()), None);
        assert_eq!(answer.resumed(before, before), None);
        let begun = answer.pieces[0];
        let next = answer.pieces[1] - begun;
        assert_eq!(answer.resumed(begun, begun), Some(next));
        assert_eq!((answer.pieces_at(before), answer.pieces_at(begun)), (0, 1));
        assert!(answer.is_altered(&ClientResponse::default()));
        let cancelled = |said: &str| ClientResponse {
            said: BTreeMap::from([(0, said.to_owned())]),
            cancelled: true,
            ..ClientResponse::default()
        };
        let right = cancelled("abc");
        assert!(!cancelled("ab").is_altered(&right) && !cancelled("abcd").is_altered(&right));
        assert!(cancelled("ac").is_altered(&right));
        answer
            .take(r#"data: {"error":{"message":"lost"}}"#)
            .unwrap();
        assert!(answer.is_lost());
        assert!(answer.take("data: {").is_err());
    }

    #[test]
    fn a_response_is_read_from_its_events() {
        let mut answer = ClientResponse::default();
        for (number, event) in [
            r#""type":"response.created","response":{"id":"resp_4f"}"#,
            r#""type":"response.output_item.added","output_index":0"#,
            r#""type":"response.output_text.delta","delta":"a""#,
            r#""type":"response.output_text.delta","delta":"b""#,
        ]
        .iter()
        .enumerate()
        {
            let line = format!("data: {{\"sequence_number\":{number},{event}}}");
            answer.take(&line).unwrap();
        }
        assert_eq!(answer.response, Some(("resp_4f".to_owned(), 3)));
        assert_eq!((&*answer.said[&0], answer.pieces.len()), ("ab", 2));
        assert!(answer.is_lost(), "it has not ended");
        let failed = |code: &str| {
            let error = format!(r#"{{"error":{{"code":"{code}"}}}}"#);
            format!(r#"data: {{"type":"response.failed","response":{error}}}"#)
        };
        assert!(answer.take(&failed("shutting_down")).is_err());
        assert_eq!(answer.response.as_ref().map(|it| it.1), Some(3));
        let end = r#"data: {"type":"response.incomplete","sequence_number":4,"response":{}}"#;
        answer.take(end).unwrap();
        assert!(!answer.is_lost());
        assert_eq!(answer.said[&0], "abresponse.incomplete");
        answer.take(&failed("answer_lost")).unwrap();
        assert!(answer.is_lost());
    }

    #[test]
    fn requests_are_of_all_kinds() {
        let all = ClientRequest::several(KINDS, 100);
        assert!(all.iter().any(|it| it.body["logprobs"] == true));
        assert!(all.iter().any(|it| it.body["n"] == 2));
        assert!(all[4].cancels);
        assert!(all[7].is_response && all[7].body["input"].is_string());
        assert!(all.iter().any(ClientRequest::is_optional));
    }
}
