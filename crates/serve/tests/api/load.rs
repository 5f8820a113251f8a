//! The measuring client against a real server of a scripted service.

use std::time::{Duration, Instant};

use paceline_engine::{Finish, RequestFailure};
use paceline_load_generator::{
    Arrivals, GoodputLimits, LoadProfile, Report, RequestLengths, TargetServer,
};

use crate::client::PATIENCE;
use crate::rig::Rig;
use crate::scripted::Script;

fn load_of(rig: &Rig, arrivals: Arrivals) -> LoadProfile {
    let url = format!("http://{}/v1", rig.addr);
    LoadProfile {
        server: TargetServer::new(&url, None, "").find(PATIENCE).unwrap(),
        arrivals,
        requests: 12,
        lengths: RequestLengths::parse("5 4\n3 9").unwrap(),
        shared_prefix: 0,
        ignore_eos: true,
        seed: 7,
        goals: GoodputLimits::default(),
        timeout: PATIENCE,
    }
}

fn run(load: &LoadProfile) -> Report {
    paceline_load_generator::run(load, Instant::now, &|| false)
}

#[test]
fn both_kinds_of_arrivals_ask_and_count() {
    for arrivals in [
        Arrivals::Closed { clients: 3 },
        Arrivals::Poisson { per_s: 200.0 },
    ] {
        let rig = Rig::new();
        let load = load_of(&rig, arrivals);
        assert_eq!(load.server.model(), "tiny");
        let report = run(&load);
        assert_eq!(
            (report.requests, report.answered, report.good),
            (12, 12, 12)
        );
        assert_eq!(report.errors.len(), 0);
        // "Hello, world" is four tokens.
        assert_eq!(report.output_tokens, 48);
        assert_eq!(report.gap_ms.unwrap().n, 36);
        let mut asked: Vec<usize> = rig
            .service
            .requests()
            .iter()
            .map(|r| r.max_tokens)
            .collect();
        asked.sort_unstable();
        assert_eq!(asked, [[4; 6], [9; 6]].concat());
    }
}

#[test]
fn errors_are_counted_by_what_was_wrong() {
    let rig = Rig::new();
    let load = load_of(&rig, Arrivals::Closed { clients: 2 });
    rig.service
        .script(Script::Refuse(RequestFailure::Busy { waiting: 5 }));
    let report = run(&load);
    assert_eq!((report.answered, report.errors.len()), (0, 1));
    let (error, n) = report.errors.first_key_value().unwrap();
    assert!(error.starts_with("429 Too Many Requests: "), "{error}");
    assert_eq!(*n, 12);
    let lost = RequestFailure::Lost {
        reason: "rank 1".into(),
    };
    rig.service.script(Script::Fail(3, lost));
    let report = run(&load);
    let (error, n) = report.errors.first_key_value().unwrap();
    assert!(
        error.starts_with("in the stream: ") && error.contains("rank 1"),
        "{error}"
    );
    assert_eq!((report.answered, *n), (0, 12));
}

#[test]
fn goodput_counts_answers_in_time() {
    let rig = Rig::new();
    let late = Duration::from_millis(120);
    rig.service.script(Script::Late(late, "x"));
    let goals = GoodputLimits {
        ttft: Some(late / 2),
        gap: None,
    };
    let load = LoadProfile {
        goals,
        requests: 2,
        ..load_of(&rig, Arrivals::Closed { clients: 2 })
    };
    let report = run(&load);
    assert_eq!((report.answered, report.good), (2, 0));
    assert!(report.ttft_ms.unwrap().p50 >= 120.0);
    rig.service
        .script(Script::Say(vec![(97, "x")], Finish::EndOfText));
    let goals = GoodputLimits {
        ttft: Some(PATIENCE),
        gap: Some(PATIENCE),
    };
    assert_eq!(run(&LoadProfile { goals, ..load }).good, 2);
}

#[test]
fn servers_that_are_none_are_named() {
    let error = TargetServer::new("http://127.0.0.1:9", None, "")
        .find(PATIENCE)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("no answer from http://127.0.0.1:9/v1/models: "),
        "{error}"
    );
    let rig = Rig::new();
    let server = TargetServer::new(&format!("http://{}/nowhere", rig.addr), None, "m");
    let load = LoadProfile {
        server,
        ..load_of(&rig, Arrivals::Closed { clients: 1 })
    };
    let report = run(&load);
    let error = report.errors.first_key_value().unwrap().0;
    assert!(error.starts_with("404 Not Found: "), "{error}");
}

#[test]
fn a_cancelled_run_sends_no_more() {
    let rig = Rig::new();
    for arrivals in [
        Arrivals::Closed { clients: 1 },
        Arrivals::Poisson { per_s: 0.001 },
    ] {
        let report = paceline_load_generator::run(&load_of(&rig, arrivals), Instant::now, &|| true);
        assert_eq!(report.requests, 0);
    }
    assert_eq!(rig.service.requests().len(), 0);
}
