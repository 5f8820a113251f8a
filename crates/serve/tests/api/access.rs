//! Hosts, origins and keys over the wire.

use paceline_auth::keys::KeyRole;
use paceline_serve::{Config, Error, HttpServer};
use std::sync::Arc;

use crate::rig::{CHAT, CLOCK, Rig, TestKeys, bearer, chat_body, refusal};
use crate::scripted::{Script, ScriptedService};
use crate::tiny;

const JSON: &str = "Content-Type: application/json\r\n";

#[test]
fn other_hosts_and_pages_are_refused_everywhere() {
    let rig = Rig::with(|config| {
        config.access.hosts = vec!["llm.example.org".into()];
        config.access.origins = vec!["https://chat.example.org".into()];
    });
    let own = format!("Origin: http://localhost:{}\r\n", rig.addr.port());
    for (headers, status, code) in [
        ("Host: localhost\r\n", 200, ""),
        ("Host: 127.0.0.1:1\r\n", 200, ""),
        ("Host: llm.example.org\r\n", 200, ""),
        ("Host: evil.example\r\n", 403, "host_not_allowed"),
        (
            "Host: localhost\r\nHost: localhost\r\n",
            400,
            "invalid_host",
        ),
        (own.as_str(), 200, ""),
        ("Origin: https://chat.example.org\r\n", 200, ""),
        (
            "Origin: https://evil.example\r\n",
            403,
            "origin_not_allowed",
        ),
    ] {
        for path in [
            "/health",
            "/",
            "/v1/models",
            "/metrics",
            "/openapi.json",
            "/nothing",
            CHAT,
        ] {
            let response = match path {
                CHAT => rig.send("POST", path, &format!("{JSON}{headers}"), &chat_body("")),
                _ => rig.send("GET", path, headers, ""),
            };
            if status == 200 {
                let expected = if path == "/nothing" { 404 } else { 200 };
                assert_eq!(response.status, expected, "{path} {headers}");
                continue;
            }
            assert_eq!(response.header("access-control-allow-origin"), None);
            let (got, got_code, ..) = refusal(response);
            assert_eq!((got, got_code.as_str()), (status, code), "{path} {headers}");
        }
    }
    let none = crate::client::raw(rig.addr, b"GET / HTTP/1.1\r\n\r\n");
    assert_eq!(refusal(none).1, "invalid_host");
    // HTTP/1.0 has no Host, and no browser speaks it.
    let old = crate::client::raw(rig.addr, b"GET /health HTTP/1.0\r\n\r\n");
    old.ok("HTTP/1.0 without Host");
    let absolute = b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n";
    assert_eq!(
        refusal(crate::client::raw(rig.addr, absolute)).1,
        "host_not_allowed"
    );
}

#[test]
fn preflights_are_answered_for_allowed_pages_only() {
    let rig = Rig::with(|config| {
        config.access.origins = vec!["https://chat.example.org".into()];
    });
    let ask = "Access-Control-Request-Method: POST\r\n";
    let allowed = format!("Origin: https://chat.example.org\r\n{ask}");
    let response = rig.send("OPTIONS", CHAT, &allowed, "");
    assert_eq!(response.status, 204);
    let origin = response.header("access-control-allow-origin");
    assert_eq!(origin, Some("https://chat.example.org"));
    let headers = response.header("access-control-allow-headers").unwrap();
    assert!(headers.contains("authorization") && headers.contains("content-type"));
    assert_eq!(response.header("vary"), Some("origin"));
    let other = format!("Origin: https://evil.example\r\n{ask}");
    let response = rig.send("OPTIONS", CHAT, &other, "");
    assert_eq!(response.header("access-control-allow-methods"), None);
    assert_eq!(refusal(response).0, 403);
    let answer = format!("{JSON}Origin: https://chat.example.org\r\n");
    let response = rig.send("POST", CHAT, &answer, &chat_body(""));
    let origin = response.header("access-control-allow-origin");
    assert_eq!(origin, Some("https://chat.example.org"));
    // Never to everybody, and never with credentials.
    assert_eq!(response.header("access-control-allow-credentials"), None);
    assert_eq!(
        rig.get("/health").header("access-control-allow-origin"),
        None
    );
}

#[test]
fn keys_are_asked_for_everywhere_but_for_health() {
    let mut keys = TestKeys::new();
    let (key, right, id) = keys.make("test", KeyRole::User);
    let rig = keys.rig(|_| {});
    let (missing, invalid) = ("missing_api_key", "invalid_api_key");
    for (header, status, code) in [
        (String::new(), 401, missing),
        ("Authorization: Bearer\r\n".into(), 401, missing),
        ("Authorization: Basic abc\r\n".into(), 401, missing),
        (bearer("wrong"), 401, invalid),
        (bearer(&format!("{key}x")), 401, invalid),
        (bearer(&key[..key.len() - 1]), 401, invalid),
        (bearer("\u{fc}"), 401, invalid),
        (right.clone(), 200, ""),
        (format!("authorization: bearer {key}\r\n"), 200, ""),
    ] {
        for path in ["/", "/v1/models", "/metrics", "/openapi.json", CHAT] {
            let response = match path {
                CHAT => rig.send("POST", path, &format!("{JSON}{header}"), &chat_body("")),
                _ => rig.send("GET", path, &header, ""),
            };
            if status == 200 {
                response.ok(path);
                continue;
            }
            assert_eq!(response.header("www-authenticate"), Some("Bearer"));
            let (got, got_code, ..) = refusal(response);
            assert_eq!((got, got_code.as_str()), (status, code), "{path} {header}");
        }
    }
    assert_eq!(rig.get("/health").status, 200);
    // Revoked while the server runs.
    keys.keys.revoke(&id).unwrap();
    assert_eq!(rig.send("GET", "/v1/models", &right, "").status, 401);
    let (_, header, _) = keys.make("another", KeyRole::User);
    assert_eq!(rig.send("GET", "/v1/models", &header, "").status, 200);
}

#[test]
fn addresses_of_the_network_need_keys_or_leave() {
    let dir = tempfile::tempdir().unwrap();
    let service = || Arc::new(ScriptedService::new(Script::Silence));
    let config = |addr: &str| {
        let mut config = Config::new(0, CLOCK);
        config.bind = vec![addr.parse().unwrap()];
        config
    };
    for open in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        let got = HttpServer::bind(config(open), tiny::model(), service());
        let error = got.unwrap_err();
        assert!(matches!(error, Error::Open { .. }), "{error:?}");
        assert!(error.to_string().contains("keys"), "{error}");
    }
    for loopback in ["127.0.0.1:0", "127.0.0.2:0"] {
        assert!(HttpServer::bind(config(loopback), tiny::model(), service()).is_ok());
    }
    let mut with_keys = config("0.0.0.0:0");
    with_keys.access.keys = Some(dir.path().join("keys.json"));
    assert!(HttpServer::bind(with_keys, tiny::model(), service()).is_ok());
    let mut with_leave = config("0.0.0.0:0");
    with_leave.access.open_to_network = true;
    assert!(HttpServer::bind(with_leave, tiny::model(), service()).is_ok());
}

#[test]
fn configurations_that_cannot_work_are_refused() {
    let bind = |change: &dyn Fn(&mut Config)| {
        let mut config = Config::new(0, CLOCK);
        change(&mut config);
        HttpServer::bind(
            config,
            tiny::model(),
            Arc::new(ScriptedService::new(Script::Silence)),
        )
    };
    let none = bind(&|config| config.bind.clear());
    assert!(matches!(none, Err(Error::NoAddress)));
    let zero = bind(&|config| config.limits.requests = 0);
    assert!(matches!(
        zero,
        Err(Error::Limit {
            limit: "requests",
            got: 0,
            ..
        })
    ));
    let deep = bind(&|config| config.limits.json_depth = 128);
    assert!(matches!(
        deep,
        Err(Error::Limit {
            limit: "json_depth",
            ..
        })
    ));
    let taken = bind(&|_| {}).unwrap();
    let again = bind(&|config| config.bind = taken.addresses().to_vec());
    assert!(matches!(again, Err(Error::Bind { .. })));
    let dir = tempfile::tempdir().unwrap();
    let broken = bind(&|config| config.access.keys = Some(dir.path().to_owned()));
    assert!(matches!(broken, Err(Error::Keys(_))));
    let mut model = tiny::model();
    model.id = "a\r\nb".into();
    let service = Arc::new(ScriptedService::new(Script::Silence));
    let named = HttpServer::bind(Config::new(0, CLOCK), model, service);
    assert!(matches!(named, Err(Error::Name { .. })));
}

#[test]
fn refusals_name_the_option_that_lets_in() {
    let rig = Rig::new();
    for (header, option) in [
        ("Origin: https://evil.example\r\n", "--allow-origin"),
        ("Host: llm.example\r\n", "--allow-host"),
    ] {
        let response = rig.send("GET", "/v1/models", header, "");
        assert_eq!(response.status, 403);
        let said = response.text();
        assert!(said.contains(option), "{said}");
    }
    let (status, code, _, message) = refusal(rig.chat(r#""foo":1"#));
    assert_eq!((status, code.as_str()), (400, "unknown_parameter"));
    assert!(message.contains("--lenient"), "{message}");
}
