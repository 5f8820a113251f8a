//! Several models behind one address: health and metrics of all of them.

use std::sync::Arc;

use paceline_engine::{Finish, State};
use paceline_serve::ServedModel;

use crate::rig::Rig;
use crate::scripted::{Script, ScriptedService};
use crate::tiny;

fn rig() -> (Rig, [ScriptedService; 2]) {
    let services = [2, 3].map(|n| {
        let said = vec![(97, "a"); n];
        ScriptedService::new(Script::Say(said, Finish::Length))
    });
    let model = |id: &str| ServedModel {
        id: id.to_owned(),
        aliases: Vec::new(),
        ..tiny::model()
    };
    let models = ["one", "two \"2\""].map(model).into_iter();
    let each = services
        .iter()
        .map(|service| Arc::new(service.clone()) as _);
    (Rig::several(models.zip(each).collect()), services)
}

#[test]
fn health_tells_of_all_models() {
    let (rig, services) = rig();
    let health = rig.get("/health");
    assert_eq!(health.status, 200);
    let health = health.json();
    assert_eq!(health["status"], "ready");
    let names = [0, 1].map(|i| health["models"][i]["model"].clone());
    assert_eq!(names, ["one", "two \"2\""]);
    services[1].state(State::Failed("it broke".to_owned()));
    let health = rig.get("/health");
    assert_eq!(health.status, 503);
    let health = health.json();
    assert_eq!(
        (&health["status"], &health["model"]),
        (&"failed".into(), &"two \"2\"".into())
    );
    assert_eq!(health["models"][0]["status"], "ready");
}

#[test]
fn metrics_tell_of_all_models() {
    let (rig, _) = rig();
    for (model, n) in [("one", 1), ("two \\\"2\\\"", 2)] {
        for _ in 0..n {
            let body = format!(r#"{{"model":"{model}","prompt":"hi","max_tokens":9}}"#);
            assert_eq!(rig.post("/v1/completions", &body).status, 200);
        }
    }
    let text = rig.get("/metrics").text();
    let count = |part: &str| text.matches(part).count();
    for family in [
        "paceline_answers counter",
        "paceline_tokens counter",
        "paceline_shared gauge",
    ] {
        assert_eq!(count(&format!("# TYPE {family}\n")), 1, "{family}: {text}");
    }
    for sample in [
        r#"paceline_answers_total{model="one",outcome="complete"} 1"#,
        r#"paceline_answers_total{model="two \"2\"",outcome="complete"} 2"#,
        r#"paceline_tokens_total{model="one",kind="generated"} 2"#,
        r#"paceline_tokens_total{model="two \"2\"",kind="generated"} 6"#,
        r#"paceline_sequences_running{model="one"} 0"#,
        "paceline_shared 7",
    ] {
        assert_eq!(count(&format!("{sample}\n")), 1, "{sample}: {text}");
    }
    assert!(text.ends_with("# EOF\n") && count("# EOF") == 1);
    // Every sample comes behind the head of its own family.
    let mut family = "";
    for line in text.lines().filter(|line| !line.is_empty()) {
        match line.strip_prefix("# TYPE ") {
            Some(kind) => family = kind.split(' ').next().unwrap(),
            None => assert!(line.starts_with('#') || line.starts_with(family), "{line}"),
        }
    }
}
