//! Upstreams: whole requests to other servers, and what those may do wrong.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use paceline_auth::keys::{KeyRole, Keys};
use paceline_engine::{Finish, Service, State};
use paceline_serve::{
    Config, HttpServer, ServedModel, StatusSource, UpstreamArg, UpstreamSpec, Upstreams,
};
use serde_json::Value;

use crate::client::{PATIENCE, connect};
use crate::rig::{CHAT, CLOCK, Rig, chat_body, refusal};
use crate::scripted::{Script, ScriptedService};
use crate::tiny;

const LIST: &str = r#"{"object":"list","data":[{"id":"far","created":7}]}"#;
const JSON: &str = "Content-Type: application/json\r\n";
const CHAT_JSON: &str = r#"{"model":"far","messages":[],"tools":[{"odd":1}],  "own_field":2}"#;

/// Upstreams, and the lines that they tell.
fn upstreams(args: &[String]) -> (Upstreams, Receiver<String>) {
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let specs = args.iter().map(|arg| spec(arg)).collect();
    let tell = move |line: &str| drop(tell.lock().unwrap().send(line.to_owned()));
    (Upstreams::new(specs, Arc::new(tell)).unwrap(), told)
}

fn spec(arg: &str) -> UpstreamSpec {
    arg.parse::<UpstreamArg>().unwrap().open().unwrap()
}

fn url(addr: SocketAddr) -> String {
    format!("http://{addr}")
}

/// A node with upstreams that are up, and with these models of its own.
fn node(args: &[String], own: Vec<(ServedModel, Arc<dyn Service>)>) -> (Rig, Receiver<String>) {
    let (all, told) = upstreams(args);
    let rig = Rig::several_with(|config| config.upstreams = all, own);
    for _ in args {
        wait(&told, "models");
    }
    (rig, told)
}

/// The next line that has `word`.
fn wait(told: &Receiver<String>, word: &str) -> String {
    let lines = std::iter::from_fn(|| told.recv_timeout(PATIENCE).ok());
    let found = lines.into_iter().find(|line| line.contains(word));
    found.unwrap_or_else(|| panic!("{word} was not told"))
}

fn named(id: &str) -> ServedModel {
    ServedModel {
        id: id.to_owned(),
        aliases: Vec::new(),
        ..tiny::model()
    }
}

/// A scripted server of HTTP. It lists one model, `far`, and leaves other requests to `answer`,
/// which gets the request as text.
struct FakeServer {
    addr: SocketAddr,
    asked: Receiver<String>,
    over: Arc<AtomicBool>,
}

type Answer = fn(&mut TcpStream, &str);
type List = fn(&mut TcpStream);

impl FakeServer {
    fn new(answer: Answer) -> Self {
        Self::listing(|stream| reply(stream, "200 OK", "", LIST), answer)
    }

    fn listing(list: List, answer: Answer) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let (tell, asked) = channel();
        let over = Arc::<AtomicBool>::default();
        let is_over = Arc::clone(&over);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if is_over.load(SeqCst) {
                    return;
                }
                let tell: Sender<String> = tell.clone();
                std::thread::spawn(move || {
                    let mut stream = stream.unwrap();
                    let request = received(&stream);
                    if request.starts_with("GET") {
                        return list(&mut stream);
                    }
                    let _ = tell.send(request.clone());
                    answer(&mut stream, &request);
                });
            }
        });
        Self { addr, asked, over }
    }

    /// Closes the listener.
    fn end(&self) {
        self.over.store(true, SeqCst);
        drop(TcpStream::connect(self.addr));
        let is_closed = || TcpStream::connect(self.addr).is_err();
        while !is_closed() {
            std::thread::yield_now();
        }
    }
}

fn received(stream: &TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let mut text = String::new();
    while reader.read_line(&mut text).unwrap_or(0) > 2 {}
    let length = text.to_lowercase();
    let length = length.split("content-length: ").nth(1);
    let length = length.and_then(|rest| rest.lines().next());
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    reader.read_exact(&mut body).unwrap();
    text + &String::from_utf8(body).unwrap()
}

fn reply(stream: &mut TcpStream, status: &str, headers: &str, body: &str) {
    let length = body.len();
    let text = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\n\r\n{body}");
    let _ = stream.write_all(text.as_bytes());
}

fn json(stream: &mut TcpStream, _: &str) {
    reply(stream, "200 OK", JSON, r#"{"said":"far"}"#);
}

#[test]
fn models_are_listed_and_answers_are_those_of_the_upstream() {
    let far = Rig::new();
    let near = ScriptedService::new(Script::Silence);
    let (rig, _) = node(&[url(far.addr)], vec![(named("near"), Arc::new(near))]);
    let host = far.addr.to_string();
    let listed = rig.get("/v1/models").json();
    let owners: Vec<&Value> = listed["data"].as_array().unwrap().iter().collect();
    assert_eq!(owners.len(), 2, "{listed}");
    assert_eq!(owners[0]["owned_by"], "paceline");
    assert_eq!(owners[1]["id"], "tiny");
    assert_eq!(owners[1]["owned_by"], format!("via {host}"));
    assert_eq!(rig.get("/v1/models/tiny").json(), *owners[1]);
    assert_eq!(rig.get("/v1/models/near").json(), *owners[0]);
    let tags = rig.get("/api/tags").json();
    let tag = &tags["models"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["name"] == "tiny");
    assert!(tag.is_some(), "{tags}");
    let said = |text: &str| text.replace(char::is_numeric, "");
    let whole = rig.chat("");
    assert_eq!(whole.header("x-paceline-upstream"), Some(host.as_str()));
    assert_eq!(whole.json()["choices"], far.chat("").json()["choices"]);
    let stream = r#""stream":true,"stream_options":{"include_usage":true}"#;
    let events = rig.chat(stream).all_events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert_eq!(events.len(), far.chat(stream).all_events().len());
    let tool = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    assert_eq!(rig.chat(tool).status, far.chat(tool).status);
    // Refusals of the upstream are its own, in each dialect.
    for (path, body) in [
        (CHAT, chat_body(r#""n":99"#)),
        ("/v1/messages", r#"{"model":"tiny"}"#.to_owned()),
        ("/api/chat", r#"{"model":"tiny","messages":7}"#.to_owned()),
    ] {
        let (ours, theirs) = (rig.post(path, &body), far.post(path, &body));
        assert_eq!(ours.status, theirs.status, "{path}");
        assert_eq!(said(&ours.text()), said(&theirs.text()));
    }
    let unknown = rig.post(CHAT, r#"{"model":"none","messages":[]}"#);
    assert_eq!(refusal(unknown).1, "model_not_found");
}

#[test]
fn bodies_pass_unchanged_and_keys_stay_apart() {
    let far = FakeServer::new(json);
    let folder = tempfile::tempdir().unwrap();
    let [key_file, keys_file] = ["up", "keys"].map(|name| folder.path().join(name));
    std::fs::write(&key_file, "up-secret\n").unwrap();
    let mut keys = Keys::open(&keys_file).unwrap();
    let (key, _) = keys.make("test", KeyRole::User, 1).unwrap();
    let (all, told) = upstreams(&[format!("{},key={}", url(far.addr), key_file.display())]);
    let rig = Rig::several_with(
        |config| {
            config.access.keys = Some(keys_file);
            config.upstreams = all;
        },
        vec![],
    );
    wait(&told, "models");
    for path in ["/v1/models", "/v1/models/far"] {
        assert_eq!(rig.get(path).status, 401);
    }
    assert_eq!(rig.post(CHAT, CHAT_JSON).status, 401);
    assert!(far.asked.try_recv().is_err());
    let with_key = format!("{JSON}Authorization: Bearer {key}\r\nCookie: c\r\n");
    let answer = rig.send("POST", &format!("{CHAT}?a=b"), &with_key, CHAT_JSON);
    assert_eq!(answer.json()["said"], "far");
    let sent = far.asked.recv_timeout(PATIENCE).unwrap();
    assert!(
        sent.starts_with(&format!("POST {CHAT}?a=b HTTP/1.1\r\n")),
        "{sent}"
    );
    assert!(sent.ends_with(&format!("\r\n\r\n{CHAT_JSON}")), "{sent}");
    assert!(
        sent.contains("authorization: Bearer up-secret\r\n"),
        "{sent}"
    );
    assert!(sent.contains("via: 1.1 paceline-"), "{sent}");
    assert!(!sent.contains(&key) && !sent.contains("cookie"), "{sent}");
    // A page of the upstream is no page of this server.
    let (page, _) = node(&[url(FakeServer::new(html).addr)], vec![]);
    let answer = page.post(CHAT, CHAT_JSON);
    assert_eq!(
        answer.header("content-type"),
        Some("application/octet-stream")
    );
}

fn html(stream: &mut TcpStream, _: &str) {
    reply(stream, "200 OK", "Content-Type: text/html\r\n", "<script>");
}

#[test]
fn limits_hold_and_a_client_that_leaves_ends_its_request() {
    for fields in [r#""stream":true"#, ""] {
        let far = Rig::new();
        far.service.script(Script::Halt(vec![(97, "a")]));
        let (all, told) = upstreams(&[url(far.addr)]);
        let change = |config: &mut Config| {
            config.upstreams = all;
            config.limits.requests = 1;
        };
        let rig = Rig::several_with(change, vec![]);
        wait(&told, "models");
        let stream = rig.begin("", fields);
        far.service
            .wait("the request", |requests, _, _| requests == 1);
        assert_eq!(refusal(rig.chat("")).1, "server_busy");
        drop(stream);
        far.service.wait("cancelling", |_, cancelled, replying| {
            (cancelled, replying) == (1, 0)
        });
    }
}

#[test]
fn a_dead_upstream_is_told_and_others_take_its_requests() {
    let far = FakeServer::new(|_, _| {}); // closes the connection without a reply
    let (rig, told) = node(&[url(far.addr)], vec![]);
    let failed = rig.post(CHAT, CHAT_JSON);
    assert_eq!(failed.header("retry-after"), Some("2"));
    let (status, code, _, message) = refusal(failed);
    assert_eq!((status, code.as_str()), (502, "upstream_failed"));
    assert!(message.contains(&far.addr.to_string()), "{message}");
    far.end();
    let line = wait(&told, "is down");
    assert!(line.contains("no connection"), "{line}");
    let down = rig.post(CHAT, CHAT_JSON);
    assert_eq!(down.header("retry-after"), Some("2"));
    assert_eq!(refusal(down).1, "upstream_down");
    assert_eq!(rig.get("/v1/models").json()["data"], serde_json::json!([]));
    // The first of two breaks off, the second answers.
    let (broken, busy, good) = (
        FakeServer::new(|_, _| {}),
        FakeServer::new(|stream, _| reply(stream, "503 Busy", "", "busy")),
        FakeServer::new(json),
    );
    let all = [&broken, &busy, &good].map(|it| url(it.addr));
    let (rig, _) = node(&all, vec![]);
    for _ in 0..3 {
        assert_eq!(rig.post(CHAT, CHAT_JSON).json()["said"], "far");
    }
}

#[test]
fn a_stream_that_breaks_ends_with_an_error() {
    fn chunk(stream: &mut TcpStream, text: &str) {
        let _ = write!(stream, "{:x}\r\n{text}\r\n", text.len());
    }
    let far = FakeServer::new(|stream, request| {
        let kind = match request.contains("/api/chat") {
            true => "application/x-ndjson",
            false => "text/event-stream",
        };
        let _ = write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        );
        chunk(
            stream,
            if kind.contains("nd") {
                "{\"a\":1}\n"
            } else {
                "data: {\"a\":1}\n\n"
            },
        );
    });
    let (rig, _) = node(&[url(far.addr)], vec![]);
    for (path, before, error) in [
        (CHAT, "data: {\"a\":1}\n\n", "data: {\"error\":{"),
        (
            "/v1/messages",
            "data: {\"a\":1}\n\n",
            "event: error\ndata: {\"type\":\"error\"",
        ),
        ("/api/chat", "{\"a\":1}\n", "{\"error\":\"upstream"),
    ] {
        let text = rig.post(path, CHAT_JSON).text();
        let rest = text
            .strip_prefix(before)
            .unwrap_or_else(|| panic!("{path}: {text}"));
        assert!(
            rest.starts_with(error) && rest.contains("failed"),
            "{path}: {rest}"
        );
    }
    let whole = FakeServer::new(|stream, _| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{\"a\":");
    });
    let (rig, _) = node(&[url(whole.addr)], vec![]);
    let mut stream = connect(rig.addr);
    let length = CHAT_JSON.len();
    let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
    let text = format!("POST {CHAT} HTTP/1.1\r\n{head}Content-Length: {length}\r\n\r\n{CHAT_JSON}");
    stream.write_all(text.as_bytes()).unwrap();
    let mut all = String::new();
    let _ = stream.read_to_string(&mut all); // may be reset
    assert!(!all.ends_with("0\r\n\r\n"), "no whole body: {all}");
}

#[test]
fn keys_paths_and_redirections_are_refused_by_name() {
    let far = FakeServer::new(|stream, request| {
        let path = request.split(' ').nth(1).unwrap_or_default();
        match path {
            CHAT => reply(stream, "401 Unauthorized", "", "wrong key"),
            "/v1/completions" => reply(stream, "302 Found", "Location: http://else\r\n", ""),
            "/v1/embeddings" => {
                let (kind, body) = (JSON, r#"{"error":"model \"far\" not found"}"#);
                reply(stream, "404 Not Found", kind, body);
            }
            _ => reply(stream, "404 Not Found", "", "404 page not found"),
        }
    });
    let (rig, _) = node(&[url(far.addr)], vec![]);
    for (path, status, code, parts) in [
        (CHAT, 502, "upstream_failed", ["key", "401"]),
        ("/v1/completions", 502, "upstream_failed", ["", "302"]),
        (
            "/v1/responses",
            501,
            "not_implemented",
            ["/v1/responses", "404"],
        ),
    ] {
        let (is, named, _, message) = refusal(rig.post(path, CHAT_JSON));
        assert_eq!((is, named.as_str()), (status, code));
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let lacks = rig.post("/v1/messages", CHAT_JSON);
    assert_eq!(lacks.status, 501);
    assert_eq!(lacks.json()["error"]["type"], "api_error");
    let own = rig.post("/v1/embeddings", CHAT_JSON);
    assert_eq!(own.status, 404);
    assert_eq!(own.json()["error"], "model \"far\" not found");
}

#[test]
fn hostile_lists_are_bounded_and_told() {
    let lists: [(List, &str); 6] = [
        (
            |stream| flood(stream, "HTTP/1.1 200 OK\r\n", "X-Long: x\r\n"),
            "broke",
        ),
        (
            |stream| {
                flood(
                    stream,
                    "HTTP/1.1 200 OK\r\n\r\n{\"data\":[",
                    "{\"id\":\"a\"},",
                )
            },
            "broke",
        ),
        (
            |stream| {
                let body = format!("{{\"data\":[{}{{}}]}}", "{\"id\":\"a\"},".repeat(2000));
                reply(stream, "200 OK", "", &body);
            },
            "unusable",
        ),
        (|stream| reply(stream, "200 OK", "", "<html>"), "unusable"),
        (
            |stream| reply(stream, "401 Unauthorized", "", ""),
            "refuses this node's key",
        ),
        // Holds the connection until the other end gives up.
        (|stream| drop(stream.read(&mut [0])), "silent for 3 s"),
    ];
    let fakes = lists.map(|(list, _)| FakeServer::listing(list, json));
    let (all, told) = upstreams(&fakes.each_ref().map(|it| url(it.addr)));
    let _rig = Rig::several_with(|config| config.upstreams = all.clone(), vec![]);
    let mut seen = BTreeSet::new();
    while seen.len() < fakes.len() {
        let line = wait(&told, "is down");
        let at = fakes
            .iter()
            .position(|it| line.contains(&it.addr.to_string()));
        let at = at.expect(&line);
        assert!(
            line.contains(lists[at].1),
            "{line}, expected {}",
            lists[at].1
        );
        seen.insert(at);
    }
    let rows = all.instances();
    assert!(rows.iter().all(|row| row["state"] == "failed"), "{rows:?}");
}

fn flood(stream: &mut TcpStream, start: &str, more: &str) {
    let _ = stream.write_all(start.as_bytes());
    let more = more.repeat(1000);
    while stream.write_all(more.as_bytes()).is_ok() {}
}

#[test]
fn loops_are_found_and_refused() {
    let ((of_a, told_a), (of_b, told_b)) = (upstreams(&[]), upstreams(&[]));
    let start = |name: &str, all: &Upstreams| {
        let service = ScriptedService::new(Script::Say(vec![(97, "a")], Finish::Length));
        let own: Vec<(ServedModel, Arc<dyn Service>)> = vec![(named(name), Arc::new(service))];
        Rig::several_with(|config| config.upstreams = all.clone(), own)
    };
    let (a, b) = (start("a", &of_a), start("b", &of_b));
    of_a.add(spec(&url(b.addr)));
    wait(&told_a, "models: 1");
    of_b.add(spec(&url(a.addr)));
    wait(&told_b, "models: 1");
    assert!(wait(&told_b, "left out").contains("left out 1"));
    assert!(wait(&told_a, "left out").contains("left out 1"));
    let names = |rig: &Rig| {
        let list = rig.get("/v1/models").json();
        let all = list["data"].as_array().unwrap().clone();
        all.iter()
            .map(|it| it["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (names(&a), names(&b)),
        (vec!["a".into(), "b".into()], vec!["b".into(), "a".into()])
    );
    let body = r#"{"model":"b","prompt":"hi"}"#;
    let answer = a.post("/v1/completions", body);
    assert_eq!(
        answer.header("x-paceline-upstream"),
        Some(b.addr.to_string().as_str())
    );
    // A request that passed this server is refused, and served where it has the model itself.
    let via = a.get("/v1/models").header("via").unwrap().to_owned();
    let headers = format!("{JSON}Via: {via}\r\n");
    let back = a.send("POST", "/v1/completions", &headers, body);
    assert_eq!(
        (back.status, refusal(back).1.as_str()),
        (508, "upstream_loop")
    );
    let own = r#"{"model":"a","prompt":"hi"}"#;
    assert_eq!(a.send("POST", "/v1/completions", &headers, own).status, 200);
    of_a.add(spec(&url(a.addr)));
    assert!(wait(&told_a, "is down").contains("this server itself"));
}

#[test]
fn a_replica_is_used_only_where_it_is_allowed() {
    let far = Rig::new();
    let host = far.addr.to_string();
    let via = |rig: &Rig| {
        let answer = rig.chat("");
        (
            answer.status,
            answer.header("x-paceline-upstream").map(str::to_owned),
        )
    };
    for (option, is_used) in [("", false), (",replica", true)] {
        let own = ScriptedService::new(Script::Say(vec![(97, "a")], Finish::Length));
        let models: Vec<(ServedModel, Arc<dyn Service>)> =
            vec![(tiny::model(), Arc::new(own.clone()))];
        let (rig, _) = node(&[url(far.addr) + option], models);
        assert_eq!(via(&rig), (200, None), "the own instance is ready");
        own.state(State::Failed("it broke".to_owned()));
        let expected = if is_used {
            (200, Some(host.clone()))
        } else {
            (503, None)
        };
        assert_eq!(via(&rig), expected);
        let listed = rig.get("/v1/models").json();
        assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed}");
    }
    // An instance with a queue leaves requests to a replica; a broken replica gives them back.
    let broken = FakeServer::listing(
        |stream| reply(stream, "200 OK", "", r#"{"data":[{"id":"tiny"}]}"#),
        |_, _| {},
    );
    let own = ScriptedService::new(Script::Say(vec![(97, "a")], Finish::Length));
    own.queue(3, 2);
    let models: Vec<(ServedModel, Arc<dyn Service>)> = vec![(tiny::model(), Arc::new(own))];
    let (rig, _) = node(&[url(broken.addr) + ",replica"], models);
    assert_eq!(via(&rig), (200, None));
    assert!(broken.asked.recv_timeout(PATIENCE).is_ok());
}

#[test]
fn another_node_of_the_cluster_reaches_the_upstreams_of_this_one() {
    let far = Rig::new();
    let dying = FakeServer::new(json);
    let (all, told) = upstreams(&[url(far.addr), url(dying.addr)]);
    let mut config = Config::new(0, CLOCK);
    config.upstreams = all.clone();
    let status = StatusSource(Arc::new(|| Value::Null));
    let (server, doors) = HttpServer::bind_node(config, status).unwrap();
    let _one = Rig::run(server, ScriptedService::new(Script::Silence));
    wait(&told, "models: 1");
    wait(&told, "models: 1");
    let own = doors.clone();
    let (of_two, told_two) = upstreams(&[]);
    of_two.add(UpstreamSpec::of_node(
        "one".to_owned(),
        Arc::new(move || {
            let (here, there) = UnixStream::pair()?;
            own.serve_upstreams(there).map(|()| here)
        }),
    ));
    let set = of_two.clone();
    let two = Rig::several_with(|config| config.upstreams = of_two, vec![]);
    wait(&told_two, "models: 2");
    let listed = two.get("/v1/models").json();
    assert_eq!(listed["data"][0]["owned_by"], "via one");
    let answer = two.chat("");
    assert_eq!(answer.header("x-paceline-upstream"), Some("one"));
    assert_eq!(answer.json()["choices"], far.chat("").json()["choices"]);
    far.service.script(Script::Halt(vec![(97, "a")]));
    let stream = two.begin("", r#""stream":true"#);
    far.service
        .wait("the request", |requests, _, _| requests == 3);
    drop(stream);
    far.service
        .wait("cancelling", |_, cancelled, _| cancelled == 1);

    // An upstream is dead: its models stay known.
    dying.end();
    let dead = two.post(CHAT, CHAT_JSON);
    assert_eq!(refusal(dead).0, 502);
    wait(&told, "is down");
    let gauges = all.facts().into_iter();
    let mut up = gauges.filter(|it| it.name == "upstream_up" && it.value == 0.0);
    let label = format!("upstream=\"{}\"", dying.addr);
    assert_eq!(up.next().map(|it| it.labels), Some(label));
    let down = refusal(two.post(CHAT, CHAT_JSON));
    assert_eq!((down.0, down.1.as_str()), (503, "upstream_down"));
    let (mut here, there) = UnixStream::pair().unwrap();
    doors.serve_upstreams(there).unwrap();
    let text = "GET /v1/models HTTP/1.1\r\nHost: one\r\nConnection: close\r\n\r\n";
    here.write_all(text.as_bytes()).unwrap();
    let mut listed = String::new();
    here.read_to_string(&mut listed).unwrap();
    assert!(listed.contains(r#""down":"no connection"#), "{listed}");

    // The node has no upstreams any more.
    set.remove_node("one");
    assert_eq!(two.get("/v1/models").json()["data"], serde_json::json!([]));
}

#[test]
fn tools_that_the_model_of_an_upstream_calls_reach_the_client() {
    let far = Rig::of(tiny::tool_model());
    let call =
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    far.service
        .script(Script::Say(vec![(97, call)], Finish::EndOfText));
    let (rig, _) = node(&[url(far.addr)], vec![]);
    let tool = r#""tools":[{"type":"function","function":{"name":"look","parameters":
        {"type":"object","properties":{"city":{"type":"string"}}}}}]"#;
    let said = rig.chat(tool).json();
    let choice = &said["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{said}");
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(function["name"], "look");
    assert_eq!(function["arguments"], r#"{"city": "Rome"}"#);
    let events = rig.chat(&format!(r#""stream":true,{tool}"#)).all_events();
    let has_call = |event: &String| event.contains("tool_calls") && event.contains("look");
    assert!(events.iter().any(has_call), "{events:?}");
}
