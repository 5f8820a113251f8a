//! Parts that several targets share: tokenizers, tools and markers of families, and a server on
//! loopback whose answers are ready.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_auth::tls::ServerProtocol;
use paceline_engine::{
    DraftCounts, Finish, Reply, RequestFailure, Service, ServiceStatus, Sink, State, Submission,
    Ticket, TokenLogprobs,
};
use paceline_serve::{Config, HttpServer, ModelDetails, ServedModel, TimeSource, default_sampling};
use paceline_text::chat::ChatTemplate;
use paceline_text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Tokens of [`tokenizer`]: the bytes in their order of Unicode's spelling, and two control tokens.
pub const VOCAB: usize = 258;

/// A tokenizer of three bytes and two control tokens.
pub const TOKENIZER: &str = r#"{"version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
         "rstrip": false, "normalized": false},
        {"id": 4, "content": "</s>", "special": true, "single_word": false, "lstrip": false,
         "rstrip": false, "normalized": false}],
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true},
    "model": {"type": "BPE", "vocab": {"a": 0, "<": 1, ">": 2}, "merges": []}}"#;

/// Markers by which the families' chat templates are known.
pub const FAMILIES: [&str; 14] = [
    "<tool_call> </think>",
    "<tool_call> <function= <parameter= </think>",
    "<tool_call> <arg_key> </think>",
    "<|tool_calls_section_begin|>",
    "<|start|> <|channel|>",
    "<|tool_call> <channel|>",
    "<minimax:tool_call> </think>",
    "<｜tool▁calls▁begin｜> ```json",
    "<｜tool▁calls▁begin｜> </think>",
    "<｜DSML｜function_calls> </think>",
    "[TOOL_CALLS] [/THINK]",
    "[TOOL_CALLS] [ARGS]",
    "<|python_tag|>",
    "none",
];

/// Calls tools in the form of Qwen 3, so that the paths of calls are reached.
const TEMPLATE: &str = "{% if tools %}{% for t in tools %}{{ t | tojson }}<tool_call>\n{% endfor %}{% endif %}\
    {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}\
    {{ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Longest wait for the server. It responds to complete requests at once, and closes others at
/// their end.
const LIMIT: Duration = Duration::from_secs(10);

/// Longest stream after the beginning of a response; a longer one counts as endless.
const STREAM_LIMIT: Duration = Duration::from_millis(500);

/// The spelling of a byte in byte-level vocabularies (GPT-2).
fn spelled(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !is_itself(*other)).count();
    char::from_u32(256 + before as u32).expect("far below the surrogates")
}

/// A byte-level tokenizer of [`VOCAB`] tokens.
///
/// # Panics
/// If the tokenizer that is written here cannot be read.
pub fn tokenizer() -> Tokenizer {
    let mut vocab = Map::new();
    for byte in 0..=u8::MAX {
        vocab.insert(spelled(byte).to_string(), json!(byte));
    }
    let control = |id: u32, name: &str| {
        json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false})
    };
    let file: Value = json!({
        "version": "1.0",
        "added_tokens": [control(256, "<|im_start|>"), control(257, "<|im_end|>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json_bytes(file.to_string().as_bytes()).expect("written above")
}

/// Two tools.
pub fn tools() -> Vec<Value> {
    let tool = |name| {
        let properties = json!({
            "text": {"type": "string"}, "number": {"type": "integer"}, "inner": {"type": "object"},
        });
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    ["look", "run_it"].map(tool).to_vec()
}

/// Answers each request by one token.
#[derive(Debug)]
struct Ready;

impl Service for Ready {
    fn accept(&self, submission: Submission, mut sink: Sink) -> Result<(), RequestFailure> {
        let request = submission.request;
        thread::spawn(move || {
            let row = |n: usize| TokenLogprobs {
                logprob: -0.5,
                top: (0..n as u32).map(|i| (i, -0.5 - i as f32)).collect(),
            };
            let before = request.prompt.len().saturating_sub(1);
            let n = request.logprobs.unwrap_or(0);
            sink(Reply::PromptRead {
                reused: 0,
                logprobs: request.prompt_logprobs.then(|| vec![row(n); before]),
                read_by: None,
            });
            sink(Reply::Token {
                token: 97,
                text: "a".to_owned(),
                logprobs: request.logprobs.map(row),
            });
            sink(Reply::Finished {
                text: String::new(),
                reason: Finish::EndOfText,
                drafts: DraftCounts::default(),
            });
        });
        Ok(())
    }

    fn cancel(&self, _ticket: Ticket) {}

    fn status(&self) -> ServiceStatus {
        ServiceStatus {
            state: State::Ready,
            running: 0,
            waiting: 0,
        }
    }
}

fn model() -> ServedModel {
    let template = ChatTemplate::new(TEMPLATE).expect("written above");
    ServedModel {
        id: "tiny".to_owned(),
        aliases: Vec::new(),
        created_unix_s: 0,
        fingerprint: "fuzz".to_owned(),
        classes: String::new(),
        tokenizer: Arc::new(tokenizer()),
        template: Some(Arc::new(template)),
        context: 4096,
        sampling: default_sampling(),
        about: ModelDetails::default(),
    }
}

/// Starts a server on loopback, which runs as long as the process.
///
/// # Panics
/// If there is no free port.
pub fn serve(wire: ServerProtocol) -> SocketAddr {
    let clock = TimeSource {
        now: Instant::now,
        unix_s: || 1_700_000_000,
    };
    let mut config = Config::new(0, clock);
    config.wire = wire;
    let server = HttpServer::bind(config, model(), Arc::new(Ready)).expect("a free port");
    let addr = server.addresses()[0];
    thread::spawn(move || server.run());
    addr
}

/// Sends `bytes` on a new connection, ends it, and reads the response.
///
/// # Panics
/// If the server neither responds nor closes the connection for 10 s.
pub fn ask(addr: SocketAddr, bytes: &[u8]) {
    let mut stream = connect(addr);
    // The server may refuse before it has read everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let (mut buffer, mut has_begun) = ([0; 4096], false);
    let start = Instant::now();
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => has_begun = true,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if has_begun {
                    return; // such as the events of a node
                }
                assert!(
                    start.elapsed() < LIMIT,
                    "no answer to {:?}",
                    bytes.escape_ascii()
                );
            }
            Err(_) => return,
        }
    }
}

/// Ports may run out for a moment: each connection leaves one behind.
fn connect(addr: SocketAddr) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(addr) {
            Ok(stream) => {
                let set = stream.set_read_timeout(Some(STREAM_LIMIT));
                set.expect("a time above zero");
                return stream;
            }
            Err(error) => assert!(start.elapsed() < LIMIT, "no connection to {addr}: {error}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}
