//! The dashboard of a node: its page, its data, its events, and its commands.

use std::sync::Arc;

use paceline_auth::keys::KeyRole;
use paceline_serve::events::{EVENTS_MAX, Kind};
use paceline_serve::{Config, DashboardConfig, HttpServer, StatusSource};
use serde_json::{Value, json};

use crate::rig::{CLOCK, Rig, TestKeys};
use crate::scripted::{Script, ScriptedService};

/// The page's modules.
const MODULES: [&str; 9] = [
    "paceline.js",
    "dom.js",
    "api.js",
    "chat.js",
    "chats.js",
    "markdown.js",
    "models.js",
    "machines.js",
    "activity.js",
];

const HTML: &str = "Accept: text/html,application/xhtml+xml\r\n";

#[test]
fn browsers_get_the_page_and_others_what_they_got() {
    let rig = Rig::new();
    let page = rig.send("GET", "/", HTML, "");
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy").unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"));
    assert!(page.text().contains("Ollama is running"));
    assert_eq!(rig.send("HEAD", "/", HTML, "").status, 200);
    for accept in ["", "Accept: */*\r\n", "Accept: application/json\r\n"] {
        let index = rig.send("GET", "/", accept, "").json();
        assert_eq!(index["name"], "paceline", "{accept}");
    }
    let mut bytes = 0;
    for name in MODULES.iter().chain(&["paceline.css"]) {
        let asset = rig.get(&format!("/assets/{name}"));
        assert_eq!(asset.status, 200, "{name}");
        bytes += asset.text().len();
    }
    assert!(bytes < 150_000, "{bytes} bytes");
    assert_eq!(rig.get("/assets/other.js").status, 404);
    let evil = rig.send("GET", "/", &format!("{HTML}Host: evil.example\r\n"), "");
    assert_eq!(evil.status, 403);
}

#[test]
fn the_page_has_no_inline_code_and_no_other_server() {
    let rig = Rig::new();
    let page = rig.send("GET", "/", HTML, "").text();
    for bad in [
        "style=",
        "onclick",
        "http://",
        "https://",
        "<style",
        "javascript:",
    ] {
        assert!(!page.contains(bad), "{bad}");
    }
    assert_eq!(page.matches("<script").count(), 1);
    for name in MODULES {
        let script = rig.get(&format!("/assets/{name}")).text();
        for bad in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            "https://",
        ] {
            assert!(!script.contains(bad), "{name}: {bad}");
        }
        let imports = script.lines().filter(|line| line.starts_with("import "));
        for import in imports {
            let known = MODULES
                .iter()
                .any(|it| import.contains(&format!("\"./{it}\"")));
            assert!(known, "{name}: {import}");
        }
    }
}

#[test]
fn markdown_is_answered_as_trees() {
    let rig = Rig::new();
    let body = json!({ "texts": ["**a** <b>", "x".repeat(200_000)] }).to_string();
    let told = rig.post("/v1/paceline/markdown", &body).json();
    let strong = json!({ "tag": "strong", "children": ["a"] });
    let paragraph = json!({ "tag": "p", "children": [strong, " <b>"] });
    assert_eq!(told, json!({ "trees": [[paragraph], null] }));
    assert_eq!(
        rig.post("/v1/paceline/markdown", r#"{"texts": 1}"#).status,
        400
    );
}

fn board() -> DashboardConfig {
    DashboardConfig {
        status: StatusSource(Arc::new(|| json!({"name": "mini", "nodes": []}))),
        stages: Some(Arc::new(|id: &str| match id {
            "7" => Ok(json!({ "split": "pipeline", "steps": 3 })),
            _ => Err(format!("no instance of {id:?} is loaded").into()),
        })),
        manage: Some(Arc::new(|command: &str, arguments: &Value| match command {
            "load" => Ok(json!({ "id": arguments["model"] })),
            _ => Err(format!("no {command} here").into()),
        })),
    }
}

#[test]
fn stages_of_an_instance_are_looked_at() {
    let rig = Rig::with(|config| config.board = board());
    let told = rig.get("/v1/paceline/stages?instance=7").json();
    assert_eq!(told["split"], "pipeline");
    let unknown = rig.get("/v1/paceline/stages?instance=8");
    assert_eq!(unknown.status, 400);
    let why = &unknown.json()["error"]["message"];
    assert_eq!(why, "no instance of \"8\" is loaded");
    for bad in ["", "?instance=", "?model=7"] {
        let got = rig.get(&format!("/v1/paceline/stages{bad}")).status;
        assert_eq!(got, 400, "{bad}");
    }
}

#[test]
fn commands_reach_the_node_and_their_reasons_the_client() {
    let rig = Rig::with(|config| config.board = board());
    let status = rig.get("/v1/paceline/status").json();
    assert_eq!(
        (&status["name"], &status["may_manage"]),
        (&json!("mini"), &json!(true))
    );
    let loaded = rig.post("/v1/paceline/load", r#"{"model": "tiny"}"#);
    assert_eq!(loaded.json(), json!({"id": "tiny"}));
    let refused = rig.post("/v1/paceline/unload", "{}");
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["message"], "no unload here");
    assert_eq!(rig.post("/v1/paceline/load", "[1]").status, 400);
    assert_eq!(rig.post("/v1/paceline/nothing", "{}").status, 404);
    let plain = rig.send(
        "POST",
        "/v1/paceline/load",
        "Content-Type: text/plain\r\n",
        "{}",
    );
    assert_eq!(plain.status, 415);
    let other = "Content-Type: application/json\r\nOrigin: https://evil.example\r\n";
    assert_eq!(
        rig.send("POST", "/v1/paceline/load", other, "{}").status,
        403
    );
    // A node with the model of its command line takes no commands.
    let fixed = Rig::new();
    assert_eq!(fixed.post("/v1/paceline/load", "{}").status, 403);
    assert_eq!(fixed.get("/v1/paceline/status").json()["may_manage"], false);
}

#[test]
fn data_and_commands_need_a_key_where_keys_are_and_the_page_does_not() {
    let mut keys = TestKeys::new();
    let (_, user, _) = keys.make("laptop", KeyRole::User);
    let (_, admin, id) = keys.make("owner", KeyRole::Admin);
    let rig = keys.rig(|config| config.board = board());
    let stages = "/v1/paceline/stages?instance=7";
    for path in ["/v1/paceline/status", "/v1/paceline/events", stages] {
        let refused = rig.get(path);
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        assert_eq!(refused.status, 401, "{path}");
        assert_eq!(rig.send("GET", path, &user, "").status, 200, "{path}");
    }
    assert_eq!(rig.post("/v1/paceline/load", "{}").status, 401);
    let send = |key: &str, command: &str| {
        let typed = format!("{key}Content-Type: application/json\r\n");
        rig.send("POST", &format!("/v1/paceline/{command}"), &typed, "{}")
    };
    for command in ["load", "unload", "preview", "models", "invite"] {
        let refused = send(&user, command);
        assert_eq!(refused.status, 403, "{command}");
        assert_eq!(refused.json()["error"]["code"], "admin_key_needed");
    }
    assert_eq!(send(&admin, "load").status, 200);
    let sees =
        |key: &str| rig.send("GET", "/v1/paceline/status", key, "").json()["may_manage"].clone();
    assert_eq!((sees(&user), sees(&admin)), (json!(false), json!(true)));
    keys.keys.revoke(&id).unwrap();
    assert_eq!(send(&admin, "load").status, 401);
    assert_eq!(rig.send("GET", "/", HTML, "").status, 200);
    assert_eq!(rig.get("/assets/paceline.js").status, 200);
}

/// The events of one piece, without their ids.
fn heard(stream: &mut crate::client::TestResponse) -> Vec<Value> {
    let pieces = stream.pieces_with_ids().unwrap();
    pieces
        .iter()
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[test]
fn events_of_a_request_come_as_they_happen() {
    let mut live = None;
    let rig = Rig::with(|config| live = Some(config.live.clone()));
    let live = live.unwrap();
    let mut stream = rig.get("/v1/paceline/events");
    assert_eq!(stream.header("content-type"), Some("text/event-stream"));
    assert!(heard(&mut stream).is_empty());
    rig.chat("").ok("a chat");
    let mut events = Vec::new();
    while events.len() < 3 {
        events.extend(heard(&mut stream));
    }
    let kinds: Vec<_> = events
        .iter()
        .map(|event| event["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["request_started", "first_token", "request_ended"]);
    assert_eq!(events[0]["model"], "tiny");
    assert_eq!(
        (&events[2]["outcome"], &events[2]["tokens"]),
        (&json!("complete"), &json!(4))
    );
    // Those that are kept come first, from the number that a client has.
    let mut later = rig.get("/v1/paceline/events?after=2");
    assert_eq!(heard(&mut later)[0]["seq"], 3);
    for bad in ["after=x", "after=-1", "from=3"] {
        let got = rig.get(&format!("/v1/paceline/events?{bad}")).status;
        assert_eq!(got, 400, "{bad}");
    }
    for n in 0..EVENTS_MAX {
        let text = n.to_string();
        live.events().put(Kind::Fault { text });
    }
    let mut behind = rig.get("/v1/paceline/events?after=1");
    assert_eq!(heard(&mut behind)[0]["seq"], 4, "the oldest that is kept");
}

/// Of a node without a model: its own API and the dashboard's, as one.
#[test]
fn refusals_and_use_of_keys_are_told_without_a_model_too() {
    let mut keys = TestKeys::new();
    let (_, bearer, id) = keys.make("laptop", KeyRole::User);
    let mut config = Config::new(0, CLOCK);
    config.access.keys = Some(keys.path.clone());
    config.board = board();
    let live = config.live.clone();
    let nodes = StatusSource(Arc::new(|| json!({})));
    let (server, _doors) = HttpServer::bind_node(config, nodes).unwrap();
    let rig = Rig::run(server, ScriptedService::new(Script::Silence));
    for path in ["/v1/models", "/v1/paceline/status"] {
        assert_eq!(rig.get(path).status, 401, "{path}");
        rig.send("GET", path, &bearer, "").ok(path);
    }
    let typed = format!("{bearer}Content-Type: application/json\r\n");
    let refused = rig.send("POST", "/v1/paceline/load", &typed, "{}");
    assert_eq!(refused.status, 403);
    let told = live.events().after(0, 100);
    let told: Vec<_> = told.iter().map(|event| &event.kind).collect();
    let client = "127.0.0.1".to_owned();
    let refused = |code| Kind::Refused {
        code,
        client: client.clone(),
        times: 1,
    };
    let used = Kind::KeyUsed {
        key: id,
        client: client.clone(),
        times: 1,
    };
    let expected = [
        refused("missing_api_key"),
        used,
        refused("admin_key_needed"),
    ];
    assert_eq!(told, expected.iter().collect::<Vec<_>>());
}

#[test]
fn a_revoked_keys_stream_of_events_ends_with_an_error() {
    let mut keys = TestKeys::new();
    let (_, bearer, id) = keys.make("laptop", KeyRole::User);
    let rig = keys.rig(|_| {});
    let stream = rig.send("GET", "/v1/paceline/events", &bearer, "");
    assert_eq!(stream.status, 200);
    keys.keys.revoke(&id).unwrap();
    let text = stream.text();
    let (_, last) = text.rsplit_once("event: error\ndata: ").expect(&text);
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["error"]["code"], "invalid_api_key");
}

#[test]
fn streams_of_events_are_bounded_and_end_with_the_server() {
    let rig = Rig::new();
    let streams: Vec<_> = (0..32).map(|_| rig.get("/v1/paceline/events")).collect();
    assert!(streams.iter().all(|stream| stream.status == 200));
    assert_eq!(rig.get("/v1/paceline/events").status, 429);
    rig.handle.shutdown();
    for stream in streams {
        assert!(stream.text().starts_with(": begun"));
    }
    rig.join();
}
