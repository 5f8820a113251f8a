//! Programs of users on machines of the cluster: only with consent, and as `ssh` would run them.

use std::process::Output;

use super::{TestMachine, said, shared, until};
use crate::common::text;

/// Runs a shell script on a machine by the node of `own`.
fn script(own: &TestMachine, id: &str, script: &str) -> Output {
    own.run(&["programs", "--node", id, "--", "/bin/sh", "-c", script])
}

#[test]
fn programs_run_only_where_the_owner_allows_it() {
    let one = shared::up("one", None);
    let two = shared::up_with("two", Some(&one), &["--allow-programs"]);
    let listed = || text(&one.run(&["programs"]).stdout);
    until("two is listed", || listed().contains("\"name\":\"two\""));
    let nodes = text(&one.run(&["nodes"]).stdout);
    assert!(
        nodes.contains("programs of users may run on two"),
        "{nodes}"
    );
    let [of_one, of_two] = [&one, &two].map(|machine| {
        let own = text(&machine.run(&["programs"]).stdout);
        let own: serde_json::Value = serde_json::from_str(&own).unwrap();
        own["machines"][0]["id"].as_str().unwrap().to_owned()
    });

    let done = script(&one, &of_two, "echo out; echo err >&2; exit 7");
    let streams = (text(&done.stdout), text(&done.stderr), done.status.code());
    assert_eq!(streams, ("out\n".into(), "err\n".into(), Some(7)));
    let ranks = one.run(&[
        "launch",
        "--nodes",
        "2",
        "--",
        "sh",
        "-c",
        "echo rank $MLX_RANK",
    ]);
    let mut lines: Vec<_> = text(&ranks.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["[0] rank 0", "[1] rank 1"], "{}", said(&ranks));

    let ran = two.home.path().join("ran");
    let refused = script(&two, &of_one, &format!("touch {}", ran.display()));
    let why = said(&refused);
    assert!(why.contains("no service \"programs\""), "{why}");
    assert_eq!((refused.status.code(), ran.exists()), (Some(1), false));
    let refused = two.run(&["launch", "--nodes", "2", "--", "true"]);
    assert!(
        said(&refused).contains("not allowed on one"),
        "{}",
        said(&refused)
    );
}
