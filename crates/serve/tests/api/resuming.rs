//! Clients that lose a stream's connection and resume it, at the same server and at another.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_auth::keys::KeyRole;
use paceline_engine::{Finish, Service};
use paceline_serve::{
    Config, HttpServer, JournalMatch, JournalPart, Mirror, MirrorCallback, MirrorOutcome,
    ModelRegistry, StatusSource,
};
use serde_json::Value;

use crate::rig::{CHAT, CLOCK, COMPLETE, Rig, TestKeys, chat_body, completion_body, refusal};
use crate::scripted::{Script, ScriptedService};
use crate::tiny;

const JSON: &str = "Content-Type: application/json\r\n";
const RESPOND: &str = "/v1/responses";

/// An event's id and data.
type Event = (String, String);

/// A thought, a word and a call, cut in the middle of marks.
const CALL: [&str; 6] = [
    "<think>Is it?",
    "</think>\n\nI look.\n<tool_",
    "call>\n{\"name\": \"look\", \"argu",
    "ments\": {\"city\": \"Kö",
    "ln\"}}\n</tool",
    "_call>",
];

const WORDS: [&str; 6] = ["Hel", "loX", "wor", "ldY", " and", " all"];

fn script(texts: &[&'static str]) -> Vec<(u32, &'static str)> {
    (97..).zip(texts.iter().copied()).collect()
}

/// Resumes after the event `last`.
fn again(rig: &Rig, path: &str, last: &str, more: &str) -> crate::client::TestResponse {
    let headers = format!("{JSON}Last-Event-ID: {last}\r\n{more}");
    rig.send("POST", path, &headers, "{}")
}

fn all(mut response: crate::client::TestResponse) -> Vec<Event> {
    assert_eq!(response.status, 200);
    let events = std::iter::from_fn(|| response.numbered());
    events.flatten().collect()
}

/// Events of a stream until nothing more comes; the connection is dropped then.
fn until_halt(rig: &Rig, path: &str, body: &str, tokens: usize) -> Vec<Event> {
    let mut response = rig.post(path, body);
    assert_eq!(response.status, 200);
    let mut events: Vec<Event> = Vec::new();
    let has = |events: &[Event], text: &str| events.iter().any(|(_, data)| data.contains(text));
    let last = WORDS[tokens - 1];
    while !has(&events, last) && !has(&events, "I look.") {
        events.extend(response.numbered().expect("the answer is not over"));
    }
    events
}

fn id_of(events: &[Event]) -> &str {
    &events.last().expect("there are events").0
}

/// The texts of all choices, calls included.
fn said(events: &[Event]) -> BTreeMap<u64, String> {
    let mut said: BTreeMap<u64, String> = BTreeMap::new();
    for (_, data) in events {
        let Ok(value) = serde_json::from_str::<Value>(data) else {
            continue; // the last word
        };
        for choice in value["choices"].as_array().into_iter().flatten() {
            let text = said.entry(choice["index"].as_u64().unwrap()).or_default();
            let delta = &choice["delta"];
            for part in [
                &choice["text"],
                &delta["content"],
                &delta["reasoning_content"],
                &delta["tool_calls"][0]["function"]["arguments"],
            ] {
                text.push_str(part.as_str().unwrap_or_default());
            }
        }
        let is_delta = value["type"]
            .as_str()
            .is_some_and(|it| it.ends_with(".delta"));
        if is_delta {
            let text = said.entry(0).or_default();
            text.push_str(value["delta"].as_str().unwrap());
        }
    }
    said
}

const TOOLS: &str = r#""stream":true,"tools":[{"type":"function","function":{"name":"look",
    "parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]"#;

#[test]
fn a_stream_goes_on_after_any_event_without_a_lost_or_doubled_one() {
    let response = r#"{"model":"tiny","input":"hi","stream":true}"#;
    for (path, body, texts) in [
        (CHAT, chat_body(r#""stream":true"#), &WORDS),
        (
            CHAT,
            chat_body(
                r#""stream":true,"n":2,"logprobs":true,"top_logprobs":2,
                   "stream_options":{"include_usage":true}"#,
            ),
            &WORDS,
        ),
        (CHAT, chat_body(TOOLS), &CALL),
        (
            COMPLETE,
            completion_body(r#""stream":true,"n":2,"echo":true"#),
            &WORDS,
        ),
        (RESPOND, response.to_owned(), &WORDS),
    ] {
        let rig = Rig::of(tiny::tool_model());
        let script = script(texts);
        rig.service
            .script(Script::Say(script.clone(), Finish::EndOfText));
        let undisturbed = said(&all(rig.post(path, &body)));
        rig.service.script(Script::Halt(script[..2].to_vec()));
        let mut whole = until_halt(&rig, path, &body, 2);
        let cancelled = if body.contains("\"n\":2") { 2 } else { 1 };
        rig.service.wait("the answer is stopped", |_, stopped, _| {
            stopped == cancelled
        });
        rig.service.script(Script::Say(script, Finish::EndOfText));
        let rest = all(again(&rig, path, id_of(&whole), ""));
        assert!([97, 98].starts_with(&rig.service.last_after()), "{path}");
        whole.extend(rest);
        assert_eq!(said(&whole), undisturbed, "{body}");
        let numbers = whole.iter().filter(|(id, _)| !id.is_empty());
        let numbers: Vec<&str> = numbers
            .map(|(id, _)| id.split_once(':').unwrap().1)
            .collect();
        let expected: Vec<String> = (0..numbers.len()).map(|n| n.to_string()).collect();
        assert_eq!(numbers, expected, "{body}");
        // It is over, and told from the journal alone.
        let asked = rig.service.requests().len();
        for (place, (id, _)) in whole
            .iter()
            .enumerate()
            .filter(|(_, (id, _))| !id.is_empty())
        {
            assert_eq!(all(again(&rig, path, id, "")), whole[place + 1..], "{body}");
        }
        assert_eq!(rig.service.requests().len(), asked);
    }
}

#[test]
fn a_response_goes_on_by_its_id_and_sequence_number() {
    let rig = Rig::of(tiny::tool_model());
    let body = r#"{"model":"tiny","input":"hi","stream":true}"#;
    rig.service.script(Script::Halt(script(&WORDS[..3])));
    let begun = until_halt(&rig, RESPOND, body, 3);
    rig.service
        .script(Script::Say(script(&WORDS), Finish::EndOfText));
    let first: Value = serde_json::from_str(&begun[0].1).unwrap();
    let id = first["response"]["id"].as_str().unwrap();
    let number = |(_, data): &Event| {
        let value: Value = serde_json::from_str(data).unwrap();
        value["sequence_number"].as_u64().unwrap()
    };
    let last = number(begun.last().unwrap());
    let path = format!("{RESPOND}/{id}?stream=true&starting_after={last}");
    let rest = all(rig.get(&path));
    let numbers: Vec<u64> = begun.iter().chain(&rest).map(number).collect();
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    let done: Value = serde_json::from_str(&rest.last().unwrap().1).unwrap();
    assert_eq!(done["type"], "response.completed");
    let text = &done["response"]["output"][0]["content"][0]["text"];
    assert_eq!(*text, WORDS.concat());
    // All of it, and it can still be named by a later request.
    let whole = all(rig.get(&format!("{RESPOND}/{id}?stream=true")));
    assert_eq!(whole.len(), numbers.len());
    rig.get(&format!("{RESPOND}/{id}"))
        .ok("the stored response");
    let bad = rig.get(&format!("{RESPOND}/{id}?stream=true&starting_after=x"));
    assert_eq!(refusal(bad).1, "invalid_type");
}

#[test]
fn a_client_that_comes_back_takes_the_stream_from_a_connection_that_hangs() {
    let rig = Rig::new();
    rig.service.script(Script::Halt(script(&WORDS[..2])));
    let body = chat_body(r#""stream":true"#);
    let mut hangs = rig.post(CHAT, &body);
    let mut begun = hangs.numbered().unwrap();
    while !begun.iter().any(|(_, data)| data.contains(WORDS[1])) {
        begun.extend(hangs.numbered().unwrap());
    }
    rig.service
        .script(Script::Say(script(&WORDS), Finish::EndOfText));
    let rest = all(again(&rig, CHAT, id_of(&begun), ""));
    begun.extend(rest);
    assert_eq!(said(&begun)[&0], WORDS.concat());
    assert_eq!(hangs.numbered(), None, "it is told nothing more");
}

#[test]
fn answers_are_for_the_key_that_asked_and_for_a_while() {
    let mut keys = TestKeys::new();
    let (_, own, _) = keys.make("own", KeyRole::User);
    let (_, other, _) = keys.make("other", KeyRole::User);
    let rig = keys.rig(|config| config.times.reconnect = Duration::from_millis(200));
    let headers = format!("{JSON}{own}");
    let events = all(rig.send("POST", CHAT, &headers, &chat_body(r#""stream":true"#)));
    let last = &events[1].0;
    let get = |key: &str| again(&rig, CHAT, last, key);
    let (status, code, ..) = refusal(get(&other));
    assert_eq!((status, code.as_str()), (404, "answer_not_found"));
    assert_eq!(get(&own).status, 200);
    let waited = paceline_base::testing::Stopwatch::start();
    while get(&own).status == 200 {
        assert!(
            waited.elapsed() < crate::client::PATIENCE,
            "it is kept for ever"
        );
        // Its stay begins anew each time it is read.
        std::thread::park_timeout(Duration::from_millis(400));
    }
    for (bad, status) in [("x:1", 404), ("x", 400), ("x:y", 400)] {
        let got = again(&rig, CHAT, bad, &own);
        assert_eq!(refusal(got).0, status, "{bad}");
    }
}

/// Another node's memory, as all servers of a test see it.
#[derive(Clone, Default)]
struct MemoryMirror(Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

impl Mirror for MemoryMirror {
    fn put(&self, piece: JournalPart, done: MirrorCallback) {
        let mut all = self.0.lock().unwrap();
        let copy = all.entry(piece.id).or_default();
        assert!(piece.at <= copy.len() as u64);
        copy.truncate(piece.at as usize);
        copy.extend(piece.bytes);
        done(MirrorOutcome::Yes);
    }

    fn find(&self, id: &str, _: Option<&str>) -> JournalMatch {
        let copy = self.0.lock().unwrap().get(id).cloned();
        copy.map_or(JournalMatch::Nowhere, JournalMatch::Copy)
    }
}

/// A server whose answers are kept on the shelf too.
fn mirrored(shelf: &MemoryMirror) -> Rig {
    let own = shelf.clone();
    let service = ScriptedService::new(Script::Say(script(&WORDS), Finish::EndOfText));
    let model = tiny::tool_model();
    let change = |config: &mut paceline_serve::Config| {
        config.journals.mirror_to(Arc::new(own));
    };
    Rig::start(change, model, Arc::new(service.clone()), service)
}

/// Its request may wait for others: it knows the name of its answer by then.
#[test]
fn a_client_without_a_token_goes_on_at_another_node() {
    let shelf = MemoryMirror::default();
    let first = mirrored(&shelf);
    first.service.script(Script::Silence);
    let mut response = first.post(CHAT, &chat_body(r#""stream":true"#));
    assert_eq!(response.status, 200);
    let begun: Vec<Event> = std::iter::from_fn(|| response.numbered())
        .flatten()
        .take(1)
        .collect();
    drop((response, first));
    let second = mirrored(&shelf);
    let rest = all(again(&second, CHAT, id_of(&begun), ""));
    assert_eq!(said(&rest)[&0], WORDS.concat());
}

#[test]
fn a_client_goes_on_at_another_node_when_the_first_is_gone() {
    let shelf = MemoryMirror::default();
    let first = mirrored(&shelf);
    let early = r#"{"model":"tiny","input":"before","stream":false}"#;
    let earlier = first.post(RESPOND, early).json()["id"].clone();
    first.service.script(Script::Halt(script(&WORDS[..3])));
    let body = format!(
        r#"{{"model":"tiny","input":"hi","stream":true,"previous_response_id":{earlier}}}"#
    );
    let mut events = until_halt(&first, RESPOND, &body, 3);
    let asked = first.service.last();
    drop(first);
    let second = mirrored(&shelf);
    let rest = all(again(&second, RESPOND, id_of(&events), ""));
    assert_eq!(second.service.last_after(), [97, 98, 99]);
    // The conversation before it went along, and the seed.
    assert_eq!(second.service.last(), asked);
    events.extend(rest);
    assert_eq!(said(&events)[&0], WORDS.concat());
}

/// Another node that answers with its second model what a first one began.
#[test]
fn of_several_models_the_one_of_the_journal_goes_on_at_once() {
    let shelf = MemoryMirror::default();
    let service = || ScriptedService::new(Script::Say(script(&WORDS), Finish::EndOfText));
    let mirror = |config: &mut paceline_serve::Config| {
        config.journals.mirror_to(Arc::new(shelf.clone()));
    };
    let model = |id: &str| paceline_serve::ServedModel {
        id: id.to_owned(),
        aliases: Vec::new(),
        ..tiny::tool_model()
    };
    let own = service();
    let first = Rig::start(mirror, model("two"), Arc::new(own.clone()), own);
    first.service.script(Script::Halt(script(&WORDS[..3])));
    let body = r#"{"model":"two","input":"hi","stream":true}"#;
    let begun = until_halt(&first, RESPOND, body, 3);
    drop(first);
    let created: Value = serde_json::from_str(&begun[0].1).unwrap();
    let id = created["response"]["id"].as_str().unwrap();
    let second = || {
        let models = ["one", "two"].map(|id| {
            let service: Arc<dyn Service> = Arc::new(service());
            (model(id), service)
        });
        Rig::several_with(mirror, Vec::from(models))
    };
    let whole = format!("{RESPOND}/{id}?stream=true");
    assert_eq!(said(&all(second().get(&whole)))[&0], WORDS.concat());
    // The body of a client that resumes may name no model.
    let mut events = begun.clone();
    events.extend(all(again(&second(), RESPOND, id_of(&begun), "")));
    assert_eq!(said(&events)[&0], WORDS.concat());
    let unknown = second().get(&format!("{RESPOND}/resp_0?stream=true"));
    assert_eq!(refusal(unknown).1, "answer_not_found");
}

/// The responses of another node, as its [`ModelRegistry`] tell them.
struct ResponseMirror(ModelRegistry);

impl Mirror for ResponseMirror {
    fn put(&self, _: JournalPart, done: MirrorCallback) {
        done(MirrorOutcome::Yes);
    }

    fn find(&self, id: &str, key: Option<&str>) -> JournalMatch {
        self.0
            .response(id, key)
            .map_or(JournalMatch::Nowhere, JournalMatch::Copy)
    }
}

#[test]
fn a_stored_response_is_found_at_any_node() {
    let nodes = StatusSource(Arc::new(|| Value::Null));
    let (server, doors) = HttpServer::bind_node(Config::new(0, CLOCK), nodes).unwrap();
    let service = ScriptedService::new(Script::Say(script(&WORDS), Finish::EndOfText));
    doors
        .register("a", tiny::tool_model(), Arc::new(service))
        .unwrap();
    let owner = Rig::run(server, ScriptedService::new(Script::Silence));
    let body = r#"{"model":"tiny","input":"hi"}"#;
    let stored = owner.post(RESPOND, body).json();
    let path = format!("{RESPOND}/{}", stored["id"].as_str().unwrap());
    let mirror = |config: &mut Config| config.journals.mirror_to(Arc::new(ResponseMirror(doors)));
    let other = Rig::with(mirror);
    assert_eq!(other.get(&path).json(), stored);
    assert_eq!(
        refusal(other.get(&format!("{path}0"))).1,
        "response_not_found"
    );
    assert_eq!(
        refusal(other.get(&format!("{RESPOND}/x"))).1,
        "response_not_found"
    );
}

/// Another node's memory that first gives its first two lines, as a node that kept the
/// beginning only.
struct SlowMirror {
    shelf: MemoryMirror,
    has_longer: bool,
}

impl Mirror for SlowMirror {
    fn put(&self, _: JournalPart, done: MirrorCallback) {
        done(MirrorOutcome::Yes);
    }

    fn find(&self, id: &str, key: Option<&str>) -> JournalMatch {
        let JournalMatch::Copy(copy) = self.shelf.find(id, key) else {
            return JournalMatch::Nowhere;
        };
        let lines = copy.split_inclusive(|byte| *byte == b'\n');
        JournalMatch::Copy(lines.take(2).flatten().copied().collect())
    }

    fn find_longer(&self, id: &str, key: Option<&str>, than: usize) -> Option<Vec<u8>> {
        let copy = self.shelf.find(id, key).copy();
        let copy = copy.filter(|_| self.has_longer);
        copy.filter(|copy| copy.len() > than)
    }
}

/// Tokens of two choices come in any order. So the numbers of events that a client has mean
/// something only where the journal has these events.
#[test]
fn two_choices_go_on_from_a_copy_that_has_the_clients_events() {
    let shelf = MemoryMirror::default();
    let with = |mirror: Arc<dyn Mirror>| {
        let service = ScriptedService::new(Script::Say(script(&WORDS), Finish::EndOfText));
        let model = tiny::tool_model();
        let change = |config: &mut paceline_serve::Config| config.journals.mirror_to(mirror);
        Rig::start(change, model, Arc::new(service.clone()), service)
    };
    let first = with(Arc::new(shelf.clone()));
    first.service.script(Script::Halt(script(&WORDS[..3])));
    let mut events = until_halt(&first, CHAT, &chat_body(r#""stream":true,"n":2"#), 3);
    drop(first);
    let slow = |has_longer| {
        let shelf = shelf.clone();
        with(Arc::new(SlowMirror { shelf, has_longer }))
    };
    let behind = slow(false);
    for _ in 0..2 {
        let refused = again(&behind, CHAT, id_of(&events), "");
        assert_eq!(refused.header("retry-after"), Some("1"));
        let (status, code, ..) = refusal(refused);
        assert_eq!((status, code.as_str()), (503, "answer_behind"));
    }
    let rest = all(again(&slow(true), CHAT, id_of(&events), ""));
    events.extend(rest);
    let said = said(&events);
    assert_eq!([&said[&0], &said[&1]], [&WORDS.concat(), &WORDS.concat()]);
    let numbers = events.iter().filter_map(|(id, _)| id.split_once(':'));
    let numbers: Vec<usize> = numbers.map(|(_, n)| n.parse().unwrap()).collect();
    assert_eq!(numbers, (0..numbers.len()).collect::<Vec<_>>());
}

/// No other node.
struct AbsentMirror;

impl Mirror for AbsentMirror {
    fn put(&self, _: JournalPart, done: MirrorCallback) {
        done(MirrorOutcome::No("no other node lives".to_owned()));
    }

    fn find(&self, _: &str, _: Option<&str>) -> JournalMatch {
        JournalMatch::Unsure
    }
}

#[test]
fn without_another_node_answers_go_on_with_an_event() {
    let mut live = None;
    let rig = Rig::with(|config| {
        config.journals.mirror_to(Arc::new(AbsentMirror));
        live = Some(config.live.clone());
    });
    let events = all(rig.chat(r#""stream":true"#));
    assert_eq!(said(&events)[&0], "Hello, world");
    let told = live.unwrap().events().after(0, 100);
    let told = told.iter().filter(|event| {
        matches!(&event.kind, paceline_serve::events::Kind::Unprotected { reason }
                 if reason == "no other node lives")
    });
    assert_eq!(told.count(), 1);
}

/// A client that gets 404 gives up, so a silent node is no reason for that.
#[test]
fn an_answer_that_a_silent_node_may_keep_is_asked_for_again() {
    let rig = Rig::with(|config| config.journals.mirror_to(Arc::new(AbsentMirror)));
    let (status, code, ..) = refusal(again(&rig, CHAT, "4f:1", ""));
    assert_eq!((status, code.as_str()), (503, "answer_unreached"));
}
