//! Pulls from a hub that resumes, sends wrong data, redirects, stalls and rejects.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::common::*;
use paceline_base::Bytes;
use paceline_base::testing::Stopwatch;
use paceline_store::*;

const PARTIAL: [&str; 2] = [
    "tiny/tiny.Q4_1.gguf.partial",
    "tiny/tiny.Q4_1.gguf.partial.json",
];
const COMPLETE: [&str; 2] = ["tiny/paceline.json", "tiny/tiny.Q4_1.gguf"];

fn body() -> (Arc<Vec<u8>>, Catalogue) {
    let body = Arc::new(payload());
    let catalogue = catalogue(&body, true, Vec::new());
    (body, catalogue)
}

fn hub_failure(result: Result<PulledModel, Error>) -> Error {
    match result {
        Err(Error::AllSourcesFailed { mut failures, .. }) => failures.remove(0).1,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pull_ends_with_the_file_its_record_and_nothing_else() {
    let (body, catalogue) = body();
    let server = FakeHub::of(&body);
    let setup = StoreSetup::new(server.url());
    let (pulled, record) = setup.pull(catalogue, "tiny");
    let pulled = pulled.unwrap();
    assert!(pulled.fetched);
    assert_eq!(pulled.bytes, Bytes(body.len() as u64));
    assert_eq!(fs::read(&pulled.found.path).unwrap(), *body);
    assert_eq!(setup.files(), COMPLETE);
    assert_eq!(server.requests()[0].path, "/own/tiny/resolve/rev/tiny.gguf");
    let size = body.len() as u64;
    assert_eq!(
        record.parts,
        [("tiny.Q4_1.gguf".to_owned(), Some(size), 0, size)]
    );

    let Resolution::Path(found) = resolve_in(&setup.home, catalogue, "tiny").unwrap() else {
        panic!("it is there now");
    };
    assert_eq!(found, pulled.found);
    let verified = verify(
        &setup.home,
        &pulled.name,
        &setup.cancel,
        &mut SilentProgress,
    );
    verified.unwrap();
}

#[test]
fn a_broken_connection_is_resumed_within_the_same_pull() {
    let (body, catalogue) = body();
    let server = FakeHub::start(move |_, number| {
        let body = Arc::clone(&body);
        match number {
            0 => ServerReply::cut(&body, "1", 1_000_000),
            1 => ServerReply::Status(503),
            2 => ServerReply::StallAfter {
                body,
                etag: etag("1"),
                bytes: 1_500_000,
            },
            _ => ServerReply::file(&body, "1"),
        }
    });
    let mut setup = StoreSetup::new(server.url());
    setup.options.retry.attempts = 4;
    let (pulled, record) = setup.pull(catalogue, "tiny");
    pulled.unwrap();
    assert_eq!(setup.files(), COMPLETE);
    let requests = server.requests();
    let ranges: Vec<Option<&str>> = requests.iter().map(|r| r.header("range")).collect();
    let again = Some("bytes=1000000-");
    assert_eq!(ranges, [None, again, again, Some("bytes=2500000-")]);
    assert_eq!(requests[3].header("if-range"), Some("\"1\""));
    assert_eq!(record.messages.len(), 3, "{:?}", record.messages);
}

#[test]
fn a_later_pull_goes_on_where_a_cancelled_one_stopped() {
    let (body, catalogue) = body();
    let server = FakeHub::of(&body);
    let setup = StoreSetup::new(server.url());
    let cancel_after = Some((500_000, setup.cancel.clone()));
    let mut record = ProgressLog {
        cancel_after,
        ..ProgressLog::default()
    };
    let stopped = setup.pull_with(catalogue, "tiny", &mut record);
    assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    assert_eq!(setup.files(), PARTIAL);
    let entries = list(&setup.home).unwrap();
    assert_eq!(entries[0].state, State::Partial);
    assert!(entries[0].bytes.0 >= 500_000);

    let again = StoreSetup {
        cancel: Cancel::default(),
        ..setup
    };
    let (pulled, record) = again.pull(catalogue, "tiny");
    pulled.unwrap();
    assert_eq!(again.files(), COMPLETE);
    let (_, total, done, advanced) = record.parts.last().unwrap().clone();
    assert!(done >= 500_000);
    assert_eq!(total, Some(done + advanced));
}

#[test]
fn resuming_starts_over_when_the_server_cannot_or_its_copy_changed() {
    const VICES: &str = "no ranges|new etag|wrong range|shorter|weak etag|bad partial";
    for vice in VICES.split('|') {
        let (body, catalogue) = body();
        let server = FakeHub::start(move |request, number| {
            let body = Arc::clone(&body);
            let first = number == 0;
            match vice {
                "weak etag" if first => ServerReply::CutAfter {
                    body,
                    etag: "W/\"1\"".into(),
                    bytes: 100_000,
                },
                _ if first => ServerReply::cut(&body, "1", 100_000),
                "no ranges" => ServerReply::NoRanges {
                    body,
                    etag: etag("1"),
                },
                "new etag" => ServerReply::file(&body, "2"),
                "wrong range" if number == 1 => ServerReply::WrongRange {
                    body,
                    etag: etag("1"),
                },
                "shorter" if number == 1 => ServerReply::Status(416),
                "weak etag" => {
                    assert_eq!(request.header("range"), None);
                    ServerReply::File {
                        body,
                        etag: "W/\"1\"".into(),
                    }
                }
                _ => ServerReply::file(&body, "1"),
            }
        });
        let mut setup = StoreSetup::new(server.url());
        setup.options.retry.attempts = 1;
        let (first, _) = setup.pull(catalogue, "tiny");
        assert!(
            matches!(hub_failure(first), Error::ConnectionLost { .. }),
            "{vice}"
        );
        if vice == "bad partial" {
            let path = setup.home.models_dir().join(PARTIAL[0]);
            let mut bytes = fs::read(&path).unwrap();
            bytes[50_000] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
        setup.options.retry.attempts = 3;
        let (second, _) = setup.pull(catalogue, "tiny");
        assert!(second.unwrap().fetched, "{vice}");
        assert_eq!(setup.files(), COMPLETE, "{vice}");
    }
}

#[test]
fn wrong_bytes_are_refused_and_removed() {
    let (body, catalogue) = body();
    let mut other = body.to_vec();
    other[1_000_000] ^= 0x10;
    let expected = sha256(&body);
    let wrong = Arc::new(other);
    let got = sha256(&wrong);
    let server = FakeHub::of(&wrong);
    let setup = StoreSetup::new(server.url());
    let (result, _) = setup.pull(catalogue, "tiny");
    match hub_failure(result) {
        Error::HashMismatch {
            expected: e,
            got: g,
            ..
        } => assert_eq!((e, g), (expected, got)),
        other => panic!("{other:?}"),
    }
    assert_eq!(
        server.requests().len(),
        1,
        "asking again would give the same bytes"
    );
    assert_eq!(setup.files(), [""; 0]);
    assert_eq!(list(&setup.home).unwrap(), []);
}

/// Each transfer makes progress, so that the limit on failures in a row is never reached.
#[test]
fn wrong_bytes_in_pieces_are_not_fetched_for_ever() {
    let (body, catalogue) = body();
    let mut other = body.to_vec();
    other[1_000_000] ^= 0x10;
    let wrong = Arc::new(other);
    let server = FakeHub::start(move |_, _| ServerReply::cut(&wrong, "1", 2 << 20));
    let (result, _) = StoreSetup::new(server.url()).pull(catalogue, "tiny");
    assert!(matches!(hub_failure(result), Error::HashMismatch { .. }));
    assert_eq!(server.requests().len(), 3 * 2, "three starts of two pieces");
}

#[test]
fn a_file_announced_with_another_hash_or_size_is_not_even_fetched() {
    let (body, catalogue) = body();
    let to_other = |name: &str, value: String| {
        let body = Arc::clone(&body);
        let headers = vec![(name.to_owned(), value)];
        FakeHub::start(move |_, _| ServerReply::FileWith {
            body: Arc::clone(&body),
            etag: etag("1"),
            headers: headers.clone(),
        })
    };
    let hash = to_other("X-Linked-Etag", etag(&"0".repeat(64)));
    let (result, record) = StoreSetup::new(hash.url()).pull(catalogue, "tiny");
    assert!(matches!(hub_failure(result), Error::HashMismatch { .. }));
    assert!(record.parts.is_empty());

    let size = to_other("X-Linked-Size", "7".into());
    let (result, _) = StoreSetup::new(size.url()).pull(catalogue, "tiny");
    assert!(matches!(
        hub_failure(result),
        Error::SizeMismatch { got: Bytes(7), .. }
    ));

    let short = Arc::new(body[..1000].to_vec());
    let lying = FakeHub::of(&short);
    let (result, _) = StoreSetup::new(lying.url()).pull(catalogue, "tiny");
    assert!(matches!(
        hub_failure(result),
        Error::SizeMismatch {
            got: Bytes(1000),
            ..
        }
    ));
}

#[test]
fn a_body_without_length_is_bounded_by_the_expected_size() {
    let (body, catalogue) = body();
    let served = Arc::clone(&body);
    let fine = FakeHub::start(move |_, _| ServerReply::Chunked {
        body: Arc::clone(&served),
    });
    StoreSetup::new(fine.url())
        .pull(catalogue, "tiny")
        .0
        .unwrap();

    let mut long = body.to_vec();
    long.extend(vec![0; 4 << 20]);
    let long = Arc::new(long);
    let endless = FakeHub::start(move |_, _| ServerReply::Chunked {
        body: Arc::clone(&long),
    });
    let setup = StoreSetup::new(endless.url());
    let (result, record) = setup.pull(catalogue, "tiny");
    let error = hub_failure(result);
    assert!(matches!(error, Error::SizeMismatch { .. }), "{error:?}");
    assert!(
        record.parts[0].3 <= body.len() as u64,
        "stopped at the expected size"
    );
    assert_eq!(setup.files(), [""; 0]);
}

#[test]
fn refusals_are_told_apart() {
    type Fits = fn(&Error) -> bool;
    let unauthorized: Fits = |e| matches!(e, Error::Unauthorized { token_sent, .. } if !token_sent);
    let cases: [(u16, Fits); 5] = [
        (401, unauthorized),
        (403, |e| matches!(e, Error::Forbidden { .. })),
        (404, |e| matches!(e, Error::NotFound { .. })),
        (418, |e| matches!(e, Error::HttpStatus { status: 418, .. })),
        (500, |e| matches!(e, Error::HttpStatus { status: 500, .. })),
    ];
    for (status, fits) in cases {
        let server = FakeHub::start(move |_, _| ServerReply::Status(status));
        let setup = StoreSetup::new(server.url());
        let (_, catalogue) = body();
        let error = hub_failure(setup.pull(catalogue, "tiny").0);
        assert!(fits(&error), "{status}: {error:?}");
        let asked = if status == 500 { 3 } else { 1 };
        assert_eq!(server.requests().len(), asked, "{status}");

        let error = setup.pull(empty_catalogue(), "own/repo").0.unwrap_err();
        assert!(fits(&error), "{status}: {error:?}");
    }
}

#[test]
fn redirects_are_followed_and_the_token_stays_with_the_hub() {
    let (body, catalogue) = body();
    let hash = sha256(&body);
    let storage = FakeHub::of(&body);
    let elsewhere = format!("{}/blob?signature=1", storage.url());
    let hub = FakeHub::start(move |_, number| match number {
        0 => ServerReply::Redirect {
            to: "/own/renamed/tiny.gguf".into(),
            headers: Vec::new(),
        },
        _ => ServerReply::Redirect {
            to: elsewhere.clone(),
            headers: vec![("X-Linked-Etag".into(), etag(&hash))],
        },
    });
    let mut setup = StoreSetup::new(hub.url());
    setup.options.hub.token = Some(HubToken::new("hf_secret"));
    setup.pull(catalogue, "tiny").0.unwrap();
    for request in hub.requests() {
        assert_eq!(
            request.header("authorization"),
            Some("Bearer hf_secret"),
            "{}",
            request.path
        );
    }
    assert_eq!(storage.requests().len(), 1);
    assert_eq!(storage.requests()[0].header("authorization"), None);
    assert_eq!(hub.requests()[1].path, "/own/renamed/tiny.gguf");
}

#[test]
fn redirect_loops_end() {
    let (_, catalogue) = body();
    let hub = FakeHub::start(|_, _| ServerReply::Redirect {
        to: "/again".into(),
        headers: Vec::new(),
    });
    let error = hub_failure(StoreSetup::new(hub.url()).pull(catalogue, "tiny").0);
    assert!(matches!(error, Error::BadRedirect { .. }), "{error:?}");
    assert!(hub.requests().len() < 10);
}

#[test]
fn an_unreachable_hub_is_given_up_in_the_time_for_it() {
    let silent = FakeHub::start(|_, _| ServerReply::Silence);
    let garbage = FakeHub::start(|_, _| ServerReply::Garbage);
    let refused = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    // 192.0.2.0/24 is reserved for documentation (RFC 5737), `.invalid` never resolves (RFC 2606).
    let endpoints = [
        silent.url(),
        garbage.url(),
        refused,
        "http://192.0.2.1:9".into(),
        "https://hub.invalid".into(),
    ];
    for endpoint in endpoints {
        let (_, catalogue) = body();
        let mut setup = StoreSetup::new(endpoint.clone());
        setup.options.deadlines.reach = Duration::from_millis(700);
        let started = Stopwatch::start();
        let error = hub_failure(setup.pull(catalogue, "tiny").0);
        assert!(
            matches!(error, Error::HubUnreachable { .. }),
            "{endpoint}: {error:?}"
        );
        assert!(
            started.elapsed() < Duration::from_millis(2700),
            "{endpoint}"
        );
        let error = setup.pull(empty_catalogue(), "own/repo").0.unwrap_err();
        assert!(
            matches!(error, Error::HubUnreachable { .. }),
            "{endpoint}: {error:?}"
        );
    }
    assert_eq!(HubDeadlines::default().reach, Duration::from_secs(3));
}

#[test]
fn cancelling_does_not_wait_for_a_silent_server() {
    let (_, catalogue) = body();
    let silent = FakeHub::start(|_, _| ServerReply::Silence);
    let mut setup = StoreSetup::new(silent.url());
    setup.options.deadlines.reach = Duration::from_secs(60);
    let cancel = setup.cancel.clone();
    let started = Stopwatch::start();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while silent.requests().is_empty() {
                std::thread::yield_now();
            }
            cancel.cancel();
        });
        let (stopped, _) = setup.pull(catalogue, "tiny");
        assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    });
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_disk_too_small_is_found_beforehand() {
    let (body, catalogue) = body();
    let size = body.len() as u64;
    let server = FakeHub::of(&body);
    let mut setup = StoreSetup::new(server.url());
    setup.options.free_space = |_| Ok(1 << 20);
    match setup.pull(catalogue, "tiny").0.unwrap_err() {
        Error::DiskFull { needed, free, .. } => {
            assert_eq!((needed, free), (Bytes(size), Bytes(1 << 20)));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(setup.files(), [""; 0]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_fills_up_while_writing_says_so() {
    let (body, catalogue) = body();
    let server = FakeHub::of(&body);
    let setup = StoreSetup::new(server.url());
    let partial = setup.home.models_dir().join(PARTIAL[0]);
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("/dev/full", &partial).unwrap();
    let error = setup.pull(catalogue, "tiny").0.unwrap_err();
    assert!(matches!(error, Error::DiskFull { .. }), "{error:?}");
    assert_eq!(
        setup.files(),
        [""; 0],
        "nothing that arrived, nothing that stays"
    );
}

#[test]
fn a_connection_that_brings_nothing_leaves_nothing() {
    let (body, catalogue) = body();
    let server = FakeHub::start(move |_, _| ServerReply::cut(&body, "1", 0));
    let setup = StoreSetup::new(server.url());
    setup.pull(catalogue, "tiny").0.unwrap_err();
    assert_eq!(setup.files(), [""; 0]);
}

#[test]
fn the_hub_is_asked_what_it_has_without_fetching_it() {
    let text = listing(&[("m-Q4_K_M.gguf", 7, None), ("m-Q8_0.gguf", 9, None)]);
    let body = Arc::new(text.into_bytes());
    let server = FakeHub::start(move |_, _| ServerReply::Chunked {
        body: Arc::clone(&body),
    });
    let setup = StoreSetup::new(server.url());
    let on_hub = look_up("own/repo:q8_0", &setup.options).unwrap();
    assert_eq!(
        (on_hub.files, on_hub.bytes),
        (vec!["m-Q8_0.gguf".to_owned()], 9)
    );
    assert!(matches!(
        look_up("own/repo", &setup.options).unwrap_err(),
        Error::AmbiguousGguf { .. }
    ));
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let (body, catalogue) = body();
    let (gate, opened) = std::sync::mpsc::channel::<()>();
    let opened = std::sync::Mutex::new(opened);
    let server = FakeHub::start(move |_, _| {
        // The first pull holds the lock until the second waits for it.
        opened.lock().unwrap().recv().unwrap();
        ServerReply::file(&body, "1")
    });
    let setup = StoreSetup::new(server.url());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| setup.pull(catalogue, "tiny").0);
        while server.requests().is_empty() {
            std::thread::yield_now();
        }
        struct ProgressSender(std::sync::mpsc::Sender<()>, Vec<String>);
        impl PullProgress for ProgressSender {
            fn start(&mut self, _: &str, _: Option<u64>, _: u64) {}
            fn advance(&mut self, _: u64) {}
            fn message(&mut self, text: &str) {
                self.1.push(text.into());
                self.0.send(()).unwrap();
            }
            fn finish(&mut self) {}
        }
        let mut tell = ProgressSender(gate, Vec::new());
        let plan = match resolve_in(&setup.home, catalogue, "tiny").unwrap() {
            Resolution::NeedsDownload(plan) => plan,
            Resolution::Path(_) => panic!("not yet"),
        };
        let busy = remove(&setup.home, "tiny");
        assert!(
            matches!(busy, Err(Error::NotInStore { .. } | Error::Busy { .. })),
            "{busy:?}"
        );
        let (options, cancel) = (&setup.options, &setup.cancel);
        let second = pull(&setup.home, &plan, options, cancel, &mut tell, now());
        assert!(first.join().unwrap().unwrap().fetched);
        assert!(!second.unwrap().fetched);
        let told = &tell.1[0];
        assert!(told.contains("another paceline process"), "{told}");
    });
    assert_eq!(server.requests().len(), 1);
}

pub(crate) fn listing(files: &[(&str, usize, Option<&str>)]) -> String {
    let sibling = |(name, size, sha): &(&str, usize, Option<&str>)| {
        let lfs = sha.map_or(String::new(), |sha| {
            format!(r#","lfs":{{"sha256":"{sha}"}}"#)
        });
        format!(r#"{{"rfilename":"{name}","size":{size}{lfs}}}"#)
    };
    let siblings: Vec<String> = files.iter().map(sibling).collect();
    format!(
        r#"{{"sha":"{}","siblings":[{}]}}"#,
        "ab".repeat(20),
        siblings.join(",")
    )
}

#[test]
fn a_folder_is_fetched_file_by_file_and_resumed_between_them() {
    let weights = Arc::new(payload());
    let hash = sha256(&weights);
    let config = Arc::new(b"{\"model_type\":\"llama\"}".to_vec());
    let list_json = listing(&[
        ("config.json", config.len(), None),
        ("model.safetensors", weights.len(), Some(&hash)),
        ("tokenizer.json", config.len(), None),
        ("../evil.safetensors", 3, None),
        ("run.py", 3, None),
    ]);
    let list_json = Arc::new(list_json.into_bytes());
    let (small, large) = (Arc::clone(&config), Arc::clone(&weights));
    let (refused, folder) = (AtomicBool::new(false), Arc::new(OnceLock::<PathBuf>::new()));
    let place = Arc::clone(&folder);
    let server = FakeHub::start(move |request, _| match request.path.as_str() {
        path if path.starts_with("/api/") => ServerReply::file(&list_json, "l"),
        path if path.ends_with("/tokenizer.json") && !refused.swap(true, Ordering::Relaxed) => {
            // The failure ends the other downloads.
            wait_for_file(&place.wait().join("model.safetensors"));
            ServerReply::Status(404)
        }
        path if path.ends_with(".json") => ServerReply::file(&small, "c"),
        _ => ServerReply::file(&large, "w"),
    });
    let setup = StoreSetup::new(server.url()).patient();
    folder
        .set(setup.home.models_dir().join("own--repo"))
        .unwrap();
    let (first, _) = setup.pull(empty_catalogue(), "own/repo");
    assert!(matches!(first, Err(Error::NotFound { .. })), "{first:?}");
    let (pulled, record) = setup.pull(empty_catalogue(), "own/repo");
    let pulled = pulled.unwrap();
    assert_eq!(pulled.found.kind, Kind::Safetensors);
    assert_eq!(pulled.name.as_str(), "own/repo");
    let names = "config.json model.safetensors paceline.json tokenizer.json".split(' ');
    let names: Vec<String> = names.map(|name| format!("own--repo/{name}")).collect();
    assert_eq!(setup.files(), names);
    let requests = server.requests();
    let weights = requests.iter().filter(|r| r.path.ends_with(".safetensors"));
    assert_eq!(weights.count(), 1, "the weights were there already");
    assert!(
        record.labels.contains("checking model.safetensors"),
        "{record:?}"
    );
    let config = format!("/own/repo/resolve/{}/config.json", "ab".repeat(20));
    assert!(requests.iter().any(|request| request.path == config));

    let stored = resolve_in(&setup.home, empty_catalogue(), "own/repo").unwrap();
    assert_eq!(stored, Resolution::Path(pulled.found));
}

/// The error of a pull from the hub.
fn refused(setup: &StoreSetup, spec: &str) -> Error {
    setup.pull(empty_catalogue(), spec).0.unwrap_err()
}

#[test]
fn gguf_repositories_want_a_selector_unless_there_is_one_file() {
    let model = Arc::new(payload());
    let hash = sha256(&model);
    let list_json = listing(&[
        ("Q4/m-Q4_K_M.gguf", model.len(), Some(&hash)),
        ("m-Q8_0.gguf", model.len(), Some(&hash)),
    ]);
    let list_json = Arc::new(list_json.into_bytes());
    let server = FakeHub::start(move |request, _| match request.path.starts_with("/api/") {
        true => ServerReply::file(&list_json, "l"),
        false => ServerReply::file(&model, "m"),
    });
    let setup = StoreSetup::new(server.url());
    match refused(&setup, "own/repo") {
        Error::AmbiguousGguf { choices, .. } => {
            let choices: Vec<_> = choices.iter().map(|it| (&*it.selector, it.bytes)).collect();
            let bytes = Some(Bytes(payload().len() as u64));
            assert_eq!(choices, [("Q4_K_M", bytes), ("Q8_0", bytes)]);
        }
        other => panic!("{other:?}"),
    }
    let none = refused(&setup, "own/repo:Q2_K");
    assert!(matches!(none, Error::NoMatchingGguf { .. }), "{none:?}");

    let pulled = setup.pull(empty_catalogue(), "own/repo:q4_k_m").0.unwrap();
    assert_eq!(pulled.name.as_str(), "own/repo:Q4/m-Q4_K_M.gguf");
    let place = "own--repo--Q4%2Fm-Q4_K_M.gguf/Q4/m-Q4_K_M.gguf";
    assert!(pulled.found.path.ends_with(place));
    for spec in ["own/repo", "own/repo:Q4_K_M", "own/repo:m-Q4_K_M.gguf"] {
        let found = resolve_in(&setup.home, empty_catalogue(), spec).unwrap();
        assert_eq!(found, Resolution::Path(pulled.found.clone()), "{spec}");
    }
    setup.pull(empty_catalogue(), "own/repo:Q8_0").0.unwrap();
    let several = resolve_in(&setup.home, empty_catalogue(), "own/repo");
    assert!(
        matches!(several, Err(Error::AmbiguousGguf { .. })),
        "{several:?}"
    );
    let any = remove(&setup.home, "own/repo");
    assert!(matches!(any, Err(Error::AmbiguousEntry { .. })), "{any:?}");
    let removed = remove(&setup.home, "own/repo:Q8_0").unwrap();
    assert_eq!(removed.name.as_str(), "own/repo:m-Q8_0.gguf");
}

#[test]
fn an_endless_file_list_is_cut_off() {
    let body = Arc::new(vec![b' '; 17 << 20]);
    let server = FakeHub::of(&body);
    let error = refused(&StoreSetup::new(server.url()), "own/repo");
    assert!(matches!(error, Error::SizeMismatch { .. }), "{error:?}");
}

#[test]
fn a_pinned_file_is_had_whole_and_in_ranges_from_its_commit() {
    let model = Arc::new(payload());
    let hash = sha256(&model);
    let list_json = listing(&[("m-Q8_0.gguf", model.len(), Some(&hash))]);
    let list_json = Arc::new(list_json.into_bytes());
    let served = Arc::clone(&model);
    let server = FakeHub::start(move |request, number| {
        let body = Arc::clone(&served);
        match number {
            0 => ServerReply::file(&list_json, "l"),
            // The range is interrupted and resumed; the last server has no ranges.
            3 => ServerReply::cut(&body, "m", 100_000),
            5 => ServerReply::NoRanges {
                body,
                etag: etag("m"),
            },
            _ => {
                let commit = "ab".repeat(20);
                let path = format!("/own/repo/resolve/{commit}/m-Q8_0.gguf");
                assert_eq!(request.path, path);
                ServerReply::file(&body, "m")
            }
        }
    });
    let setup = StoreSetup::new(server.url());
    let pulled = setup.pull(empty_catalogue(), "own/repo").0.unwrap();
    let pinned = origin(&setup.home, &pulled.found.path).unwrap();
    assert_eq!(pinned.repo, "own/repo");
    assert_eq!(
        (pinned.bytes, &pinned.sha256),
        (model.len() as u64, &hash),
        "{pinned:?}"
    );
    assert_eq!(origin(&setup.home, &setup.file("m-Q8_0.gguf")), None);

    let folder = setup.file("copies");
    let (options, cancel) = (&setup.options, &setup.cancel);
    let fetch = |pinned: &PinnedFile, file: &str| {
        fetch_pinned(
            pinned,
            (&folder, file),
            options,
            cancel,
            &mut SilentProgress,
        )
    };
    fetch(&pinned, "x.gguf").unwrap();
    assert_eq!(fs::read(folder.join("x.gguf")).unwrap(), *model);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);

    for span in [1_000_000..1_500_000, 2_000_000..2_000_001] {
        let mut came = Vec::new();
        let mut take = |bytes: &[u8]| {
            came.extend_from_slice(bytes);
            true
        };
        read_pinned(&pinned, span.clone(), options, cancel, &mut take).unwrap();
        let right = &model[span.start as usize..span.end as usize];
        assert!(came == right, "{span:?}: {} bytes came", came.len());
    }
    let requests = server.requests();
    let asked = |number: usize| requests[number].header("range");
    assert_eq!(asked(3), Some("bytes=1000000-1499999"));
    assert_eq!(asked(4), Some("bytes=1100000-1499999"), "no byte twice");

    let other = PinnedFile {
        sha256: "0".repeat(64),
        ..pinned
    };
    let wrong = fetch(&other, "y.gguf").unwrap_err();
    assert!(matches!(wrong, Error::HashMismatch { .. }), "{wrong:?}");
    let left = fs::read_dir(&folder).unwrap().count();
    assert_eq!(left, 1, "nothing of it is left");
}

#[test]
fn attempts_to_read_a_range_end_without_1_mib_of_progress() {
    let model = Arc::new(payload());
    let pinned = PinnedFile {
        repo: "own/repo".into(),
        revision: "ab".repeat(20),
        file: "m.gguf".into(),
        bytes: model.len() as u64,
        sha256: sha256(&model),
    };
    // The attempts receive 1 MiB, then one byte each; one beyond the policy would succeed.
    let served = Arc::clone(&model);
    let server = FakeHub::start(move |_, number| ServerReply::CutAfter {
        body: Arc::clone(&served),
        etag: etag("m"),
        bytes: match number {
            0 => 1 << 20,
            1..4 => 1,
            _ => served.len(),
        },
    });
    let setup = StoreSetup::new(server.url());
    let (options, cancel, mut got) = (&setup.options, &setup.cancel, 0);
    let mut take = |bytes: &[u8]| {
        got += bytes.len();
        true
    };
    let result = read_pinned(&pinned, 0..pinned.bytes, options, cancel, &mut take);
    assert!(
        matches!(result, Err(Error::ConnectionLost { .. })),
        "{result:?}"
    );
    // The first attempt counts as one failure: its progress only resets the count.
    assert_eq!((server.requests().len(), got), (3, (1 << 20) + 2));
}

#[test]
fn a_search_has_ids_that_can_be_pulled() {
    let found = r#"[{"id": "o/r", "downloads": 7}, {"id": "no owner"}, {"likes": 1},
                    {"id": "o/s", "likes": 2, "tags": []}]"#;
    let body = Arc::new(found.as_bytes().to_vec());
    let server = FakeHub::of(&body);
    let setup = StoreSetup::new(server.url());
    let found = search("a b/ü&x=1", &setup.options, &setup.cancel).unwrap();
    let ids: Vec<(&str, u64, u64)> = found
        .iter()
        .map(|it| (it.id.as_str(), it.downloads, it.likes))
        .collect();
    assert_eq!(ids, [("o/r", 7, 0), ("o/s", 0, 2)]);
    let asked = &server.requests()[0].path;
    assert!(
        asked.starts_with("/api/models?search=a%20b%2F%C3%BC%26x%3D1&filter=gguf"),
        "{asked}"
    );
}
