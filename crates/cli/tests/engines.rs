//! `paceline engines` and `paceline doctor` as a user or a script calls them.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::common::home;
#[cfg(target_os = "linux")]
use crate::nodes::fake::linked;

/// paceline in a world of its own; no program is in its PATH.
fn paceline(home: &Path, args: &[&str]) -> Command {
    let mut command = crate::common::paceline(home);
    command.args(args);
    command
}

fn run(command: &mut Command) -> (Output, String) {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    (output, said)
}

fn object(command: &mut Command) -> Value {
    home::object(&command.output().unwrap())
}

#[test]
fn the_cpu_engine_is_always_ready() {
    let home = tempfile::tempdir().unwrap();
    let mut command = paceline(home.path(), &["engines", "--json"]);
    command.env("PACELINE_MLXC", home.path().join("none"));
    let listed = object(&mut command);
    let cpu = &listed["engines"][0];
    assert_eq!((&cpu["name"], &cpu["ready"]), (&"cpu".into(), &true.into()));
    assert_eq!(cpu["devices"][0]["kind"], "cpu");
    let mlx = &listed["engines"][1];
    assert_eq!(
        (&mlx["name"], &mlx["ready"]),
        (&"mlx".into(), &false.into())
    );
    assert!(mlx["problem"].as_str().unwrap().contains("none"), "{mlx}");
    assert_eq!(mlx["devices"].as_array().unwrap().len(), 0);
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn an_mlx_that_is_not_there_or_does_not_open_comes_with_advice() {
    let home = tempfile::tempdir().unwrap();
    let library = home.path().join("libmlxc.so");
    std::fs::write(&library, "no library").unwrap();
    let mut command = paceline(home.path(), &["engines", "--json"]);
    let listed = object(command.env("PACELINE_MLXC", &library));
    let problem = listed["engines"][1]["devices"][0]["problem"].as_str();
    assert!(problem.unwrap().contains("libmlxc.so"), "{listed}");

    let mut command = paceline(home.path(), &["engines"]);
    command.env("PACELINE_MLXC", home.path().join("none"));
    let (output, said) = run(&mut command);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("hint: `paceline engines install mlx`"),
        "{said}"
    );
}

#[test]
fn an_installation_without_tools_says_which_one() {
    let home = tempfile::tempdir().unwrap();
    let args = ["engines", "install", "mlx", "--build", "cpu"];
    let (output, said) = run(&mut paceline(home.path(), &args));
    assert_eq!(output.status.code(), Some(1), "{said}");
    if cfg!(target_os = "linux") {
        assert!(
            said.starts_with("error: cannot start c++: no such program\nhint: "),
            "{said}"
        );
    } else {
        assert!(said.contains("not published for macos"), "{said}");
    }
    let (output, _) = run(&mut paceline(home.path(), &["engines", "install", "other"]));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_release_has_the_c_layer_beside_the_program_and_needs_no_tools() {
    let home = tempfile::tempdir().unwrap();
    let args = ["engines", "install", "mlx", "--build", "cpu"];
    let built = paceline(home.path(), &[]);
    let (bin, own) = (home.path().join("bin"), home.path().join("lib/paceline"));
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::create_dir_all(&own).unwrap();
    std::fs::copy(built.get_program(), bin.join("paceline")).unwrap();
    std::fs::write(own.join("libmlxc.so"), "").unwrap();
    let record =
        r#"{"mlx": "0.32.2", "mlx_c": "0.7.0", "sha256": "", "index": "http://127.0.0.1:1/"}"#;
    std::fs::write(own.join("mlx-layer.json"), record).unwrap();
    let mut command = Command::new(bin.join("paceline"));
    command.args(args).env_clear();
    command.env("PACELINE_HOME", home.path().join("home"));
    command.env("PIP_CONFIG_FILE", "/dev/null");
    let (output, said) = run(&mut command);
    assert_eq!(output.status.code(), Some(1), "{said}");
    if cfg!(target_os = "linux") && !said.contains("needs glibc") {
        let parts = [
            "error: cannot fetch mlx-cpu==0.32.2 from the package index: cannot reach 127.0.0.1:1",
            "\nhint: ",
            "PIP_INDEX_URL",
        ];
        crate::common::assert_parts(&args, &said, &parts);
    }
}

#[test]
fn the_doctor_names_what_mends_what_is_missing() {
    let home = tempfile::tempdir().unwrap();
    let mut command = paceline(home.path(), &["doctor", "--json"]);
    command.env("PACELINE_MLXC", home.path().join("none"));
    let seen = object(&mut command);
    let checks = seen["checks"].as_array().unwrap();
    let names: Vec<&str> = checks.iter().map(|c| c["name"].as_str().unwrap()).collect();
    for name in [
        "cpu",
        "memory",
        "disk",
        "gpu",
        "mlx",
        "rdma",
        "nccl",
        "mpi",
        "thunderbolt",
        "ports",
        "firewall",
        "multicast",
        "vpn",
        "packet size",
        "clock",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    for check in checks {
        let missing = check["state"] == "missing" || check["state"] == "doubtful";
        assert_eq!(check["mend"].is_string(), missing, "{check}");
        assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
    }
    let mpi = checks.iter().find(|check| check["name"] == "mpi").unwrap();
    assert_eq!(mpi["state"], "missing", "nothing is in PATH");
    let (output, said) = run(&mut paceline(home.path(), &["doctor"]));
    assert!(output.status.success() && said.is_empty(), "{said}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("mend: "));
}

/// Where `cargo xtask mlx` built the library, which `cargo xtask test` names.
#[test]
fn a_library_that_is_named_is_ready() {
    let name = "a_library_that_is_named_is_ready";
    let Some(library) = std::env::var_os("PACELINE_MLXC") else {
        eprintln!("SKIPPED {name}: PACELINE_MLXC is not set (`cargo xtask mlx` names it)");
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let mut command = paceline(home.path(), &["engines", "--json"]);
    let listed = object(command.env("PACELINE_MLXC", &library));
    let mlx = &listed["engines"][1];
    assert_eq!(mlx["ready"], true, "{mlx}");
    assert_eq!(mlx["library"], library.to_str().unwrap());
    assert!(
        mlx["devices"][0]["memory_bytes"].as_u64().unwrap() > 1 << 20,
        "{mlx}"
    );
}

/// On a device that hangs, and a process that would not end in order.
#[cfg(target_os = "linux")]
#[test]
fn a_device_that_hangs_is_measured_until_the_limit() {
    let name = "a_device_that_hangs_is_measured_until_the_limit";
    let Some(library) = std::env::var_os("PACELINE_MLXC") else {
        eprintln!("SKIPPED {name}: PACELINE_MLXC is not set (`cargo xtask mlx` names it)");
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let Some(hang) = linked(home.path(), Path::new(&library), "hang.rs") else {
        return eprintln!("SKIPPED {name}: no rustc");
    };
    let mut command = paceline(home.path(), &["engines", "--measure", "--limit", "1"]);
    let (output, said) = run(command
        .env("PACELINE_MLXC", &hang)
        .env("PACELINE_HANG", &hang));
    assert_eq!(output.status.code(), Some(1), "{said}");
    let parts = [
        "error: measuring the devices of mlx took more than 1s",
        "\nhint: ",
    ];
    crate::common::assert_parts(&[name], &said, &parts);
}

/// A CUDA card states what is free, which the models of this machine lower: a node adds theirs.
#[cfg(target_os = "linux")]
#[test]
fn a_card_says_what_is_free_and_what_it_has() {
    let name = "a_card_says_what_is_free_and_what_it_has";
    let Some(library) = std::env::var_os("PACELINE_MLXC") else {
        eprintln!("SKIPPED {name}: PACELINE_MLXC is not set (`cargo xtask mlx` names it)");
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let Some(card) = linked(home.path(), Path::new(&library), "card.rs") else {
        return eprintln!("SKIPPED {name}: no rustc");
    };
    let mut command = paceline(home.path(), &["engines", "--json"]);
    let listed = object(command.env("PACELINE_MLXC", card));
    let devices = listed["engines"][1]["devices"].as_array().unwrap();
    let memory = |at: usize| {
        (
            devices[at]["memory_bytes"].as_u64(),
            devices[at]["total_bytes"].as_u64(),
        )
    };
    assert_eq!(memory(1), (Some(10_000_000_000), Some(24_000_000_000)));
    assert!(
        memory(0).0.is_some() && memory(0).1.is_none(),
        "a limit: {listed}"
    );
}
