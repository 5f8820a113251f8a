//! One request: sent, and its stream of events read with the time of each.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use super::jobs::Job;
use super::{Error, Load};

/// Longest line of a stream that is read. A token takes some hundred bytes.
const LINE_BYTES: u64 = 1 << 20;

/// Longest answer to a question about the server, or text of an error, that is read.
const TEXT_BYTES: u64 = 4 << 20;

/// Bytes of an error's text that are told.
const TOLD_CHARS: usize = 120;

/// Where requests go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Without `/v1` at its end.
    base: String,
    key: Option<String>,
    model: String,
    /// In PEM form.
    certificates: Option<Vec<u8>>,
}

impl Server {
    /// The server at `url`, with or without `/v1` at its end.
    pub fn new(url: &str, key: Option<String>, model: impl Into<String>) -> Self {
        Self {
            base: base(url),
            key,
            model: model.into(),
            certificates: None,
        }
    }

    /// The same, trusted for these certificates (PEM) instead of the built-in authorities'.
    pub fn trusting(self, certificates: Vec<u8>) -> Self {
        Self {
            certificates: Some(certificates),
            ..self
        }
    }

    /// The same with the first model that the server lists.
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

    /// Its model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Its address, without `/v1`.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// Tokens a second that a paceline server predicts for an answer alone; `None` where it does
    /// not, as other servers do not.
    pub fn predicted_tok_s(&self, timeout: Duration) -> Option<f64> {
        let url = format!("{}/metrics", self.base);
        let text = get(&self.agent(timeout), &url, self.key.as_deref()).ok()?;
        let name = "paceline_decode_tok_s_predicted ";
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        value
            .trim()
            .parse()
            .ok()
            .filter(|tok_s: &f64| tok_s.is_finite())
    }
}

fn base(url: &str) -> String {
    let url = url.trim_end_matches('/');
    url.strip_suffix("/v1").unwrap_or(url).to_owned()
}

/// Root certificates of a client: `certificates` (PEM) where they are given, else the built-in
/// authorities. Of certificates that cannot be read none is trusted.
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

/// An answer that came to its end.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answered {
    pub(super) sent: Instant,
    /// When each piece of the answer came; servers send a token a piece.
    pub(super) pieces: Vec<Instant>,
    pub(super) ended: Instant,
    /// As the server counts them; 0 when it does not say.
    pub(super) prompt_tokens: u64,
    /// As the server counts them; pieces when it does not say.
    pub(super) output_tokens: u64,
    /// Tokens of the prompt that the server had computed before.
    pub(super) cached_tokens: u64,
}

/// What became of a request, or why nothing.
pub(super) type Outcome = Result<Answered, String>;

/// Sends requests of one load.
#[derive(Debug)]
pub(super) struct Client<'a> {
    agent: ureq::Agent,
    load: &'a Load,
    now: fn() -> Instant,
}

impl<'a> Client<'a> {
    pub(super) fn new(load: &'a Load, now: fn() -> Instant) -> Self {
        Self {
            agent: load.server.agent(load.timeout),
            load,
            now,
        }
    }

    fn body(&self, job: &Job) -> Value {
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

    /// Sends a request and reads its answer to the end.
    pub(super) fn send(&self, job: &Job) -> Outcome {
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
        let mut stream = Stream::new(sent, self.now);
        let lines = BufReader::new(response.into_body().into_reader());
        stream.read(lines)?;
        stream.end()
    }
}

/// The message of an error's body; the body where there is none.
fn message(text: &str) -> String {
    let value: Option<Value> = serde_json::from_str(text).ok();
    let message = value
        .as_ref()
        .and_then(|value| value["error"]["message"].as_str());
    message.unwrap_or(text).to_owned()
}

/// Reads `bytes` as a stream of server-sent events and as an error's body, for fuzzing.
pub(crate) fn parse(bytes: &[u8], now: fn() -> Instant) {
    let mut stream = Stream::new(now(), now);
    if stream.read(bytes).is_ok() {
        let _ = stream.end();
    }
    let _ = message(&String::from_utf8_lossy(bytes));
}

/// A stream of server-sent events as far as it was read.
struct Stream {
    answer: Answered,
    usage: Option<(u64, u64)>,
    is_done: bool,
    now: fn() -> Instant,
}

impl Stream {
    fn new(sent: Instant, now: fn() -> Instant) -> Self {
        let answer = Answered {
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

    fn end(mut self) -> Outcome {
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

    fn read(text: &str) -> Outcome {
        let mut stream = Stream::new(Instant::now(), Instant::now);
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
    fn addresses_may_end_in_v1() {
        for url in [
            "http://h:1",
            "http://h:1/",
            "http://h:1/v1",
            "http://h:1/v1/",
        ] {
            assert_eq!(Server::new(url, None, "m").url(), "http://h:1");
        }
    }
}
