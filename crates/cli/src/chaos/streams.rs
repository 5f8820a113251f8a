//! A client of the HTTP API that notes when each piece of its answer came.

use std::io::{BufRead, BufReader};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};

/// Longest wait for a whole answer, faults included.
const ANSWER_LIMIT: Duration = Duration::from_secs(180);

/// Longest line of an event: a piece of text and its frame, far below it.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// A question, and how its answer's tokens are chosen.
#[derive(Clone, Debug)]
pub(super) struct Request(Value);

/// An answer, or as much of it as came.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    pub(super) text: String,
    /// Why it is not whole.
    pub(super) error: Option<String>,
    ended: bool,
    pieces: Vec<Instant>,
}

impl Request {
    /// Different requests, greedy and seeded in turn.
    pub(super) fn several(count: usize, tokens: u32) -> Vec<Self> {
        let one = |number: usize| {
            let temperature = if number.is_multiple_of(2) { 0.0 } else { 0.8 };
            Self(json!({
                "messages": [{"role": "user", "content": format!("Count from {number}.")}],
                "temperature": temperature,
                "seed": number,
                "max_tokens": tokens,
                "ignore_eos": true,
                "stream": true,
            }))
        };
        (0..count).map(one).collect()
    }

    /// Asks the node at `port`, and tells when `at_token` pieces came.
    pub(super) fn answer(&self, port: u16, at_token: u32, reached: &Sender<()>) -> Answer {
        let mut answer = Answer::default();
        if let Err(error) = self.stream(port, &mut answer, at_token, reached) {
            answer.error.get_or_insert(format!("{error:#}"));
        }
        answer
    }

    fn stream(
        &self,
        port: u16,
        answer: &mut Answer,
        at_token: u32,
        reached: &Sender<()>,
    ) -> anyhow::Result<()> {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(ANSWER_LIMIT))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        let agent = ureq::Agent::new_with_config(config);
        let base = format!("http://127.0.0.1:{port}");
        let mut body = self.0.clone();
        body["model"] = model(&agent, &base)?;
        let url = format!("{base}/v1/chat/completions");
        let request = agent.post(url).header("Content-Type", "application/json");
        let mut response = request.send(body.to_string())?;
        if response.status() != 200 {
            let said = response.body_mut().read_to_string()?;
            anyhow::bail!("{}: {said}", response.status());
        }
        let reader = response.body_mut().with_config().limit(u64::MAX).reader();
        let mut lines = BufReader::new(reader);
        while !answer.ended {
            let mut line = String::new();
            let read = std::io::Read::take(&mut lines, LINE_BYTES_MAX).read_line(&mut line)?;
            anyhow::ensure!(read > 0, "the stream ended before the answer did");
            answer.take(line.trim())?;
            if answer.pieces.len() == at_token as usize && answer.error.is_none() {
                let _ = reached.send(()); // the first of all answers counts
            }
        }
        Ok(())
    }
}

/// The name of the model that the node answers with.
fn model(agent: &ureq::Agent, base: &str) -> anyhow::Result<Value> {
    let mut response = agent.get(format!("{base}/v1/models")).call()?;
    let models: Value = serde_json::from_str(&response.body_mut().read_to_string()?)?;
    let name = models["data"][0]["id"].clone();
    anyhow::ensure!(name.is_string(), "the node has no model");
    Ok(name)
}

impl Answer {
    /// Takes a line of the event stream.
    fn take(&mut self, line: &str) -> anyhow::Result<()> {
        let Some(data) = line.strip_prefix("data: ") else {
            return Ok(()); // an empty line, or a comment that keeps the connection alive
        };
        if data == "[DONE]" {
            self.ended = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).context("not an event")?;
        if !event["error"].is_null() {
            self.error = Some(event["error"].to_string());
        }
        if let Some(piece) = event["choices"][0]["delta"]["content"].as_str()
            && !piece.is_empty()
        {
            self.text.push_str(piece);
            self.pieces.push(Instant::now());
        }
        Ok(())
    }

    /// Whether its client has to ask again.
    pub(super) fn is_lost(&self) -> bool {
        self.error.is_some() || !self.ended
    }

    /// The longest wait for a piece that came after `moment`; `None` where none came.
    pub(super) fn pause(&self, moment: Instant) -> Option<Duration> {
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
        let mut answer = Answer::default();
        let before = Instant::now();
        for line in [
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            "",
            r#"data: {"choices":[{"delta":{"content":"a"}}]}"#,
            ": still here",
            r#"data: {"choices":[{"delta":{"content":"b"}}]}"#,
            r#"data: {"choices":[]}"#,
        ] {
            answer.take(line).unwrap();
        }
        assert_eq!(answer.text, "ab");
        assert!(answer.is_lost(), "it has not ended");
        answer.take("data: [DONE]").unwrap();
        assert!(!answer.is_lost());
        assert!(answer.pause(before).is_some());
        assert_eq!(answer.pause(Instant::now()), None);
        answer
            .take(r#"data: {"error":{"message":"lost"}}"#)
            .unwrap();
        assert!(answer.is_lost());
        assert!(answer.take("data: {").is_err());
    }
}
