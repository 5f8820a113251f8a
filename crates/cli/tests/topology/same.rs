//! The same as MLX's tool on the same hosts.

use serde_json::Value;

use super::{SshHosts, tests_data};

/// Hostfiles and graphs byte for byte, commands line by line, and whether there is a result.
#[test]
fn results_are_those_that_mlx_has() {
    let text = std::fs::read_to_string(tests_data("mlx-0.32.4.json")).unwrap();
    let recorded: Value = serde_json::from_str(&text).unwrap();
    let mut compared = 0;
    for case in recorded["cases"].as_array().unwrap() {
        let world = SshHosts::with(&case["hosts"]);
        let names: Vec<&str> = case["hosts"]
            .as_object()
            .unwrap()
            .keys()
            .map(|n| &n[..])
            .collect();
        for run in case["runs"].as_array().unwrap() {
            compare(&world, &names, run, case["name"].as_str().unwrap());
            compared += 1;
        }
    }
    assert!(compared >= 50, "{compared} runs are recorded");
}

fn compare(world: &SshHosts, names: &[&str], run: &Value, case: &str) {
    let own: Vec<&str> = run["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| a.as_str().unwrap())
        .collect();
    let output = world.path("out.json");
    let names = names.join(",");
    let mut args = vec!["--hosts", &names, "--yes"];
    args.extend(&own);
    if !own.contains(&"--dot") {
        args.extend(["--output-hostfile", output.to_str().unwrap()]);
    }
    let ended = world.run_topology(&args);
    let title = format!("{case}: {own:?}: {}", ended.stderr);
    assert_eq!(ended.code == Some(0), run["code"] == 0, "{title}");
    let written = std::fs::read_to_string(&output).ok();
    assert_eq!(written.as_deref(), run["file"].as_str(), "{title}");
    if let Some(dot) = run["dot"].as_str() {
        assert_eq!(ended.stdout, dot, "{title}");
    }
    if let Some(done) = run["done"].as_object() {
        for (host, commands) in done {
            assert_eq!(world.done(host).as_deref(), commands.as_str(), "{title}");
        }
        assert!(!done.is_empty(), "{title}");
    }
    let _ = std::fs::remove_file(output);
}
