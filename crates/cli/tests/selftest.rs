//! `paceline selftest` on a machine without tools, without MLX, and with MLX where
//! `PACELINE_MLXC` names it (`cargo xtask mlx`).

use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::common::home::{TestHome, object};
use crate::common::{finish, text};
use crate::nodes::fake;

/// Runs the self-test without speeds; `library` is where MLX is looked for.
fn selftest(world: &TestHome, library: &Path, more: &[&str]) -> Output {
    let args = ["selftest", "--quick"]
        .into_iter()
        .chain(more.iter().copied());
    let mut command = world.paceline(args);
    finish(command.env("PACELINE_MLXC", library).env("USER", "zaphod"))
}

fn names<'a>(report: &'a Value, outcome: &str) -> Vec<&'a str> {
    let rows = report["rows"].as_array().unwrap();
    let ended = rows.iter().filter(|row| row["outcome"] == outcome);
    ended.map(|row| row["check"].as_str().unwrap()).collect()
}

#[test]
fn the_bits_of_this_machine_are_the_recorded_ones() {
    let world = TestHome::new();
    let output = selftest(&world, &world.path("none"), &["--json", "--cluster"]);
    let report = object(&output);
    assert_eq!(report["failed"], 0, "{report:#}");
    let passed = names(&report, "passed");
    for check in [
        "cpu: recorded bits",
        "cpu: two answers at once",
        "cpu: process exit",
    ] {
        assert!(passed.contains(&check), "{check}: {report:#}");
    }
    let skipped = names(&report, "skipped");
    for check in [
        "mlx: library",
        "mlx: process exit",
        "cluster: recorded bits",
    ] {
        assert!(skipped.contains(&check), "{check}: {report:#}");
    }
    world.assert_clean();
}

#[test]
fn a_failed_check_ends_with_an_error_and_a_report_to_post() {
    let world = TestHome::new();
    let none = world.path("zaphod/none");
    let file = world.path("models/report.txt");
    let more = ["--engine", "mlx", "--report", file.to_str().unwrap()];
    std::fs::create_dir(world.path("zaphod")).unwrap();
    std::fs::write(&none, "no library").unwrap();
    let output = selftest(&world, &none, &more);
    let (said, table) = (text(&output.stderr), text(&output.stdout));
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.starts_with("error: the self-test failed: 1 check\nhint: "),
        "{said}"
    );
    assert!(table.contains("\nfailed   mlx: library"), "{table}");
    assert!(!table.contains("cpu: recorded bits"), "{table}");
    for line in table.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let report = std::fs::read_to_string(&file).unwrap();
    assert_eq!(report, table);
    for private in ["zaphod", world.path("").to_str().unwrap()] {
        assert!(!report.contains(private), "{report}");
    }
    std::fs::remove_dir_all(world.path("zaphod")).unwrap();
    world.assert_clean();
}

#[test]
fn mlx_is_near_and_ends_in_order() {
    let name = "mlx_is_near_and_ends_in_order";
    let Some(library) = std::env::var_os("PACELINE_MLXC") else {
        eprintln!("SKIPPED {name}: PACELINE_MLXC is not set (`cargo xtask mlx` names it)");
        return;
    };
    let world = TestHome::new();
    let output = selftest(&world, library.as_ref(), &["--engine", "mlx", "--json"]);
    let report = object(&output);
    assert_eq!(report["failed"], 0, "{report:#}");
    let passed = names(&report, "passed");
    let checks = passed.iter().filter(|check| check.starts_with("mlx"));
    assert_eq!(checks.count(), 7, "{report:#}");
    world.assert_clean();
}

/// On a library of this test that stands for MLX on a Mac (`crates/mlx/tests/fake/metal.rs`).
#[test]
#[cfg(target_os = "linux")]
fn ten_thousand_waits_qualify_a_gpu_for_fast_sync() {
    let name = "ten_thousand_waits_qualify_a_gpu_for_fast_sync";
    let Some(library) = std::env::var_os("PACELINE_MLXC") else {
        eprintln!("SKIPPED {name}: PACELINE_MLXC is not set (`cargo xtask mlx` names it)");
        return;
    };
    let world = TestHome::new();
    let Some(metal) = fake::linked(&world.path("tmp"), library.as_ref(), "metal.rs") else {
        return eprintln!("SKIPPED {name}: no rustc");
    };
    let crossing = |part: &str| {
        let mut command = world.paceline(["selftest", "--tiny", "none", "--part", part]);
        command.env("PACELINE_MLXC", &metal).stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let parent = child.stdin.take(); // it ends with its parent
        let output = child.wait_with_output().unwrap();
        drop(parent);
        let rows = text(&output.stdout);
        let rows = rows.lines().map(|line| serde_json::from_str(line).unwrap());
        let mut evaluations = rows.filter(|row: &Value| row["figure"]["unit"] == "us");
        evaluations.next().unwrap()["figure"]["value"]
            .as_f64()
            .unwrap()
    };
    let kept = world.path("home/engine-rates.json");
    let usual = crossing("mlx");
    assert!(!kept.exists());
    let fast = crossing("sync");
    assert!(fast < usual, "{fast} us and {usual} us");
    let kept: Value = serde_json::from_slice(&std::fs::read(kept).unwrap()).unwrap();
    let ns = kept[0]["fast_crossing_ns"].as_f64().unwrap();
    assert!((ns / 1e3 - fast).abs() < 1.0, "{kept}");
    assert_eq!(kept[0]["backend"], "metal");
    std::fs::remove_file(metal).unwrap();
    world.assert_clean();
}
