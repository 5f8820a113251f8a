//! `paceline chaos` on a tiny model: one fault of each kind, with clients at all nodes, and every
//! answer is right.

use serde_json::Value;

use super::{Machine, said};
use crate::common::text;
use crate::nodes::tiny::FAMILIES;

#[test]
fn faults_neither_lose_nor_alter_answers() {
    let host = Machine::new("n0", None);
    let model = host.home.path().join("tiny.gguf");
    FAMILIES[0].write(&model);
    let model = model.to_str().unwrap();
    let asked = ["--rounds", "6", "--tokens", "400", "--streams", "5"];
    let output = host.run(&[&["chaos", model, "--seed", "3", "--json"], &asked[..]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    assert_eq!(report["answers"], 30, "{report}");
    assert_eq!(report["lost"], 0, "{report}");
    assert_eq!(report["altered"], 0, "{report}");
    let rounds = report["rounds"].as_array().unwrap();
    let mut faults: Vec<_> = rounds
        .iter()
        .map(|it| it["fault"].as_str().unwrap())
        .collect();
    faults.sort_unstable();
    let all = [
        "flap",
        "freeze-node",
        "freeze-worker",
        "kill-node",
        "kill-worker",
        "leave-node",
    ];
    assert_eq!(faults, all, "{report}");
    // A node that leaves may not be felt at all.
    for round in rounds.iter().filter(|it| it["fault"] != "leave-node") {
        assert!(
            round["pause_s"].as_f64().unwrap() > 0.05,
            "no fault was felt: {round}"
        );
    }
}
