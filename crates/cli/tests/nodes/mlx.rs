//! `--engine mlx` as a user calls it: the same answer over one node and several, beside our own
//! kernels, and libraries that cannot be used.
//!
//! Runs where `PACELINE_MLXC` names a `libmlxc`, which `cargo xtask mlx` builds.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use super::tiny::FAMILIES;
use super::{World, alone, fake, finish, text};

/// Where MLX is, or a line that says why a test is skipped.
fn library(test: &str) -> Option<PathBuf> {
    let found = std::env::var_os("PACELINE_MLXC").map(PathBuf::from);
    if found.is_none() {
        eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    }
    found
}

fn run(world: &World, library: &Path, model: &str, more: &[&str]) -> Output {
    let own = ["run", model, "Once upon a time", "--max-tokens", "12"];
    let own = own.into_iter().chain(["--temperature", "0", "--json"]);
    let mut command = world.paceline(own.chain(more.iter().copied()));
    command.env("MLX_ENABLE_TF32", "1"); // a user's, which changes no number
    finish(command.env("PACELINE_MLXC", library))
}

fn answer(world: &World, library: &Path, model: &str, more: &[&str]) -> Value {
    let output = run(world, library, model, more);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{more:?}: {said}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["n_generated"], 12, "{more:?}: {answer}");
    answer
}

#[test]
fn nodes_on_mlx_say_the_same() {
    let Some(library) = library("nodes on mlx say the same") else {
        return;
    };
    let _alone = alone();
    let world = World::new();
    let model = world.write_model(FAMILIES[0]);
    let answer = |more: &[&str]| answer(&world, &library, &model, more);
    let ours = answer(&[]);
    let one = answer(&["--engine", "mlx", "--class", "mlx-f32"]);
    assert_eq!(one["tokens"], ours["tokens"]);
    let device = one["instruction_set"].as_str().unwrap();
    assert!(device.starts_with("mlx 0.32"), "{device}");
    for (engines, split, class) in [
        ("mlx", "tensor", "mlx-f32"),
        ("mlx", "pipeline", "mlx-f32"),
        ("cpu,mlx", "pipeline", "cpu+mlx-f32"),
        ("mlx,cpu", "pipeline", "mlx-f32+cpu"),
    ] {
        let two = ["--nodes", "2", "--split", split, "--engine", engines];
        let two = answer(&[&two[..], &["--class", "mlx-f32"]].concat());
        assert_eq!(two["tokens"], one["tokens"], "{engines} {split}");
        assert_eq!(two["kernel_class"], class, "{engines} {split}");
        let arrays = &two["array_bytes_per_token"];
        assert!(arrays["in_place"].as_u64().unwrap() > 0, "{two}");
        assert_eq!([&arrays["converted"], &arrays["staged"]], [0, 0], "{two}");
    }
    world.assert_clean();
}

/// Log-probabilities to the last bit are `crates/model/tests/mlx.rs`; here the option is seen to
/// reach the nodes.
#[test]
fn the_exact_class_reaches_every_node() {
    let Some(library) = library("the exact class reaches every node") else {
        return;
    };
    let _alone = alone();
    let world = World::new();
    let model = world.write_model(FAMILIES[2]);
    let answer = |more: &[&str]| answer(&world, &library, &model, more);
    let one = answer(&["--class", "mlx-exact"]);
    assert_eq!(one["kernel_class"], "mlx-exact");
    let split = ["--class", "mlx-exact", "--nodes", "2", "--split", "tensor"];
    assert_eq!(answer(&split)["tokens"], one["tokens"]);
}

#[test]
fn libraries_that_cannot_be_used_are_told_by_name() {
    let _alone = alone();
    let world = World::new();
    let model = world.write_model(FAMILIES[0]);
    let refused = |library: &Path, message: &str| {
        for nodes in ["1", "2"] {
            let more = ["--engine", "mlx", "--nodes", nodes];
            let output = run(&world, library, &model, &more);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains(message), "{nodes}: {said}");
            assert!(said.contains("hint: "), "{nodes}: {said}");
        }
    };
    refused(&world.path("none.so"), "none.so");
    let cut = world.path("libmlxc.so");
    match std::env::var_os("PACELINE_MLXC") {
        Some(whole) => {
            let whole = std::fs::read(whole).unwrap();
            std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
            refused(&cut, "is truncated: its headers describe");
        }
        None => eprintln!("SKIPPED a library that is cut, by the binary: no PACELINE_MLXC"),
    }
    std::fs::write(&cut, "no library").unwrap();
    refused(&cut, "is not a shared library of this system");
    match fake::build(&world.path("tmp"), "other.rs", &["--cfg", "wrong_version"]) {
        Some(other) => {
            refused(&other, "is of version 0.31.1, expected 0.32.x");
            std::fs::remove_file(other).unwrap();
        }
        None => eprintln!("SKIPPED mlx of another version, by the binary: no rustc"),
    }
    if let Some(stating) = fake::build(&world.path("tmp"), "other.rs", &["--cfg", "states_tf32"]) {
        refused(&stating, "is of version without TF32, expected 0.32.x");
        std::fs::remove_file(stating).unwrap();
    }
    world.assert_clean();
}
