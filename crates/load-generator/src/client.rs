//! Sends one request and timestamps the events of its stream.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use super::jobs::TimedRequest;
use super::{Error, LoadProfile};

/// Maximum line of a stream. A token takes some hundred bytes.
const LINE_BYTES: u64 = 1 << 20;

/// Maximum response to other requests, and of an error's text.
const TEXT_BYTES: u64 = 4 << 20;

/// Maximum reported characters of an error's text.
const TOLD_CHARS: usize = 120;

/// The measured server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetServer {
    /// Without `/v1` at its end.
    base: String,
    key: Option<String>,
    model: String,
    /// In PEM form.
    certificates: Option<Vec<u8>>,
}

impl TargetServer {
    /// The server at `url`, with or without `/v1` at its end.
    pub fn new(url: &str, key: Option<String>, model: impl Into<String>) -> Self {
        Self {
            base: base(url),
            key,
            model: model.into(),
            certificates: None,
        }
    }

    /// Trusts these certificates (PEM) instead of the built-in authorities.
    pub fn trusting(self, certificates: Vec<u8>) -> Self {
        Self {
            certificates: Some(certificates),
            ..self
        }
    }

    /// Selects the first model that the server lists.
    ///
    /// # Errors
    /// [`Error::NoServer`], [`Error::NoModel`].
    pub fn find(self, timeout: Duration) -> Result<Self, Error> {
        let list = format!("{}/v1/models", self.base);
        let failed = |reason| Error::NoServer {
            url: list.clone(),
            reason,
        };
        let text = get(&self.agent(timeout), &list, self.key.as_deref()).map_err(failed)?;
        let models: Value =
            serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
        match models["data"][0]["id"].as_str() {
            Some(model) => Ok(Self {
                model: model.to_owned(),
                ..self
            }),
            None => Err(Error::NoModel { url: list }),
        }
    }

    fn agent(&self, timeout: Duration) -> ureq::Agent {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .tls_config(trust(self.certificates.as_deref()))
            .proxy(None)
            .build();
        ureq::Agent::new_with_config(config)
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    /// Its address, without `/v1`.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// A paceline server's predicted speed for the model; empty for other servers.
    pub fn predicted(&self, timeout: Duration) -> PredictedSpeed {
        let url = format!("{}/metrics", self.base);
        let text = get(&self.agent(timeout), &url, self.key.as_deref());
        PredictedSpeed::read(&text.unwrap_or_default(), &self.model)
    }
}

/// Predicted tokens a second, by concurrency.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PredictedSpeed {
    /// Concurrent requests, ascending, with their total tokens a second.
    answers: Vec<(u32, f64)>,
}

impl PredictedSpeed {
    /// Parses the text of `/metrics`, which may have several models.
    fn read(text: &str, model: &str) -> Self {
        let own = format!("model=\"{model}\"");
        let mut answers = Vec::new();
        for line in text.lines() {
            let Some(rest) = line.strip_prefix("paceline_decode_tok_s_predicted") else {
                continue;
            };
            let Some((name, tok_s)) = rest.rsplit_once(' ') else {
                continue;
            };
            let of = match name.strip_prefix("_together") {
                Some(labels) => number(labels),
                None => Some(1),
            };
            let tok_s = tok_s.parse().ok().filter(|tok_s: &f64| tok_s.is_finite());
            let is_own = !name.contains("model=\"") || name.contains(&own);
            answers.extend(of.zip(tok_s).filter(|_| is_own));
        }
        answers.sort_by_key(|(n, _)| *n);
        Self { answers }
    }

    /// Total tokens a second of `answers` concurrent requests, interpolated. Requests beyond the
    /// server's maximum wait, so its maximum counts. `None` without a prediction.
    pub fn tok_s(&self, answers: u32) -> Option<f64> {
        let behind = self.answers.partition_point(|(n, _)| *n < answers);
        let most = self.answers.last().filter(|_| self.answers.len() > 1);
        let (high, above) = *self.answers.get(behind).or(most)?;
        let answers = answers.min(high);
        if high == answers {
            return Some(above);
        }
        let (low, below) = *self.answers.get(behind.checked_sub(1)?)?;
        let share = f64::from(answers - low) / f64::from(high - low);
        Some(below + (above - below) * share)
    }
}

/// The concurrency in a sample's labels.
fn number(labels: &str) -> Option<u32> {
    let (_, value) = labels.split_once("answers=\"")?;
    value.split('"').next()?.parse().ok()
}

fn base(url: &str) -> String {
    let url = url.trim_end_matches('/');
    url.strip_suffix("/v1").unwrap_or(url).to_owned()
}

/// Root certificates of a client: `certificates` (PEM), else the built-in authorities. Unreadable
/// certificates trust nothing.
pub fn trust(certificates: Option<&[u8]>) -> TlsConfig {
    let Some(pem) = certificates else {
        return TlsConfig::default();
    };
    let certificates = parse_pem(pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let roots = RootCerts::from(certificates.collect::<Vec<_>>());
    TlsConfig::builder().root_certs(roots).build()
}

fn get(agent: &ureq::Agent, url: &str, key: Option<&str>) -> Result<String, String> {
    let mut request = agent.get(url);
    if let Some(key) = key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let response = request.call().map_err(|error| error.to_string())?;
    let status = response.status();
    let text = text_of(response)?;
    if status.is_success() {
        return Ok(text);
    }
    Err(format!("{status}: {}", clip(&text)))
}

fn text_of(response: ureq::http::Response<ureq::Body>) -> Result<String, String> {
    let mut bytes = Vec::new();
    let body = response.into_body().into_reader();
    let read = body.take(TEXT_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn clip(text: &str) -> String {
    text.trim().chars().take(TOLD_CHARS).collect()
}

/// Measurements of a completed response.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ResponseTimes {
    pub(super) sent: Instant,
    /// Arrival of each chunk; servers send a token per chunk.
    pub(super) pieces: Vec<Instant>,
    pub(super) ended: Instant,
    /// As counted by the server; 0 if not reported.
    pub(super) prompt_tokens: u64,
    /// As counted by the server; chunks if not reported.
    pub(super) output_tokens: u64,
    pub(super) cached_tokens: u64,
}

/// A completed response, or the error.
pub(super) type LoadOutcome = Result<ResponseTimes, String>;

/// Sends the requests of one run.
#[derive(Debug)]
pub(super) struct LoadClient<'a> {
    agent: ureq::Agent,
    load: &'a LoadProfile,
    now: fn() -> Instant,
}

impl<'a> LoadClient<'a> {
    pub(super) fn new(load: &'a LoadProfile, now: fn() -> Instant) -> Self {
        Self {
            agent: load.server.agent(load.timeout),
            load,
            now,
        }
    }

    fn body(&self, job: &TimedRequest) -> Value {
        let mut body = json!({
            "model": self.load.server.model,
            "messages": [{"role": "user", "content": job.prompt}],
            "max_tokens": job.output,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.load.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        body
    }

    /// Sends a request and reads the whole response.
    pub(super) fn send(&self, job: &TimedRequest) -> LoadOutcome {
        let server = &self.load.server;
        let url = format!("{}/v1/chat/completions", server.base);
        let mut request = self.agent.post(url).content_type("application/json");
        if let Some(key) = &server.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let body = self.body(job).to_string();
        let sent = (self.now)();
        let response = request.send(body).map_err(|error| error.to_string())?;
        let status = response.status();
        if !status.is_success() {
            let text = text_of(response)?;
            return Err(format!("{status}: {}", clip(&message(&text))));
        }
        let mut stream = SseReader::new(sent, self.now);
        let lines = BufReader::new(response.into_body().into_reader());
        stream.read(lines)?;
        stream.end()
    }
}

/// The message in an error body; else the body.
fn message(text: &str) -> String {
    let value: Option<Value> = serde_json::from_str(text).ok();
    let message = value
        .as_ref()
        .and_then(|value| value["error"]["message"].as_str());
    message.unwrap_or(text).to_owned()
}

/// Parses `bytes` as server-sent events and as an error body, for fuzzing.
pub fn parse(bytes: &[u8], now: fn() -> Instant) {
    let mut stream = SseReader::new(now(), now);
    if stream.read(bytes).is_ok() {
        let _ = stream.end();
    }
    let _ = message(&String::from_utf8_lossy(bytes));
}

/// Parser state of a stream of server-sent events.
struct SseReader {
    answer: ResponseTimes,
    usage: Option<(u64, u64)>,
    is_done: bool,
    now: fn() -> Instant,
}

impl SseReader {
    fn new(sent: Instant, now: fn() -> Instant) -> Self {
        let answer = ResponseTimes {
            sent,
            pieces: Vec::new(),
            ended: sent,
            prompt_tokens: 0,
            output_tokens: 0,
            cached_tokens: 0,
        };
        Self {
            answer,
            usage: None,
            is_done: false,
            now,
        }
    }

    fn read(&mut self, mut lines: impl BufRead) -> Result<(), String> {
        let mut line = Vec::new();
        while !self.is_done {
            line.clear();
            let mut bounded = lines.by_ref().take(LINE_BYTES);
            let read = bounded.read_until(b'\n', &mut line);
            let n = read.map_err(|error| format!("in the stream: {error}"))?;
            if n == 0 {
                return Ok(());
            }
            if n as u64 == LINE_BYTES {
                return Err(format!(
                    "a line of the stream has {LINE_BYTES} bytes or more"
                ));
            }
            if let Some(data) = line.strip_prefix(b"data:") {
                self.event(data.trim_ascii())?;
            }
        }
        Ok(())
    }

    fn event(&mut self, data: &[u8]) -> Result<(), String> {
        let at = (self.now)();
        self.answer.ended = at;
        if data == b"[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let event: Value =
            serde_json::from_slice(data).map_err(|error| format!("in an event: {error}"))?;
        if !event["error"].is_null() {
            let text = event["error"]["message"].as_str().unwrap_or("an error");
            return Err(format!("in the stream: {}", clip(text)));
        }
        let delta = &event["choices"][0]["delta"];
        let has_text = |name: &str| delta[name].as_str().is_some_and(|text| !text.is_empty());
        let parts = ["content", "reasoning_content", "reasoning"];
        if parts.into_iter().any(has_text) || delta["tool_calls"].is_array() {
            self.answer.pieces.push(at);
        }
        let usage = &event["usage"];
        if let (Some(prompt), Some(output)) = (
            usage["prompt_tokens"].as_u64(),
            usage["completion_tokens"].as_u64(),
        ) {
            self.usage = Some((prompt, output));
            let cached = &usage["prompt_tokens_details"]["cached_tokens"];
            self.answer.cached_tokens = cached.as_u64().unwrap_or(0);
        }
        Ok(())
    }

    fn end(mut self) -> LoadOutcome {
        if !self.is_done {
            return Err("the stream ended without [DONE]".to_owned());
        }
        let counted = (0, self.answer.pieces.len() as u64);
        let (prompt, output) = self.usage.unwrap_or(counted);
        (self.answer.prompt_tokens, self.answer.output_tokens) = (prompt, output);
        Ok(self.answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> LoadOutcome {
        let mut stream = SseReader::new(Instant::now(), Instant::now);
        stream.read(text.as_bytes())?;
        stream.end()
    }

    #[test]
    fn streams_are_read() {
        let answer = read(concat!(
            ": hello\n\n",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\r\n\r\n",
            "data:{\"choices\":[{\"delta\":{\"reasoning_content\":\"b\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,",
            "\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
            "data: [DONE]\n\n",
        ))
        .unwrap();
        assert_eq!(answer.pieces.len(), 2);
        assert_eq!(
            (
                answer.prompt_tokens,
                answer.output_tokens,
                answer.cached_tokens
            ),
            (9, 3, 4)
        );
    }

    #[test]
    fn broken_streams_say_how() {
        let long = format!("data: {}", "x".repeat(LINE_BYTES as usize));
        for (text, expected) in [
            ("", "the stream ended without [DONE]"),
            (
                "data: {\"choices\":[]}\n\n",
                "the stream ended without [DONE]",
            ),
            (
                "data: {\"error\":{\"message\":\"lost\"}}\n\n",
                "in the stream: lost",
            ),
            ("data: {\n\n", "in an event: EOF while parsing"),
            (&long, "a line of the stream has 1048576 bytes or more"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn predictions_are_those_of_the_model() {
        let alone = PredictedSpeed::read("# HELP x y\npaceline_decode_tok_s_predicted 12.5\n", "a");
        assert_eq!((alone.tok_s(1), alone.tok_s(2)), (Some(12.5), None));
        let text = concat!(
            "paceline_decode_tok_s_predicted{model=\"a\"} 10\n",
            "paceline_decode_tok_s_predicted{model=\"b\"} 99\n",
            "paceline_decode_tok_s_predicted_together{model=\"a\",answers=\"2\"} 18\n",
            "paceline_decode_tok_s_predicted_together{model=\"a\",answers=\"4\"} 30\n",
            "paceline_decode_tok_s_predicted_together{model=\"b\",answers=\"8\"} 400\n",
            "paceline_decode_tok_s_predicted_together{model=\"a\",answers=\"16\"} NaN\n",
            "paceline_decode_tok_s_measured{model=\"a\"} 7\n",
        );
        let several = PredictedSpeed::read(text, "a");
        let said = [1, 2, 3, 4, 9].map(|n| several.tok_s(n).unwrap());
        assert_eq!(said, [10.0, 18.0, 24.0, 30.0, 30.0]);
        assert_eq!(several.tok_s(0), None);
        assert_eq!(
            PredictedSpeed::read("<html>", "a"),
            PredictedSpeed::default()
        );
        assert_eq!(PredictedSpeed::default().tok_s(1), None);
    }

    #[test]
    fn addresses_may_end_in_v1() {
        for url in [
            "http://h:1",
            "http://h:1/",
            "http://h:1/v1",
            "http://h:1/v1/",
        ] {
            assert_eq!(TargetServer::new(url, None, "m").url(), "http://h:1");
        }
    }
}
