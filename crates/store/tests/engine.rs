//! Installation of MLX with a fake pip and a fake compiler.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::*;
use paceline_store::*;

/// A compiler that writes its arguments to its last argument.
const COMPILER: &str = "#!/bin/sh\nfor last; do :; done\n\
                        [ \"$1\" = --version ] || echo \"$*\" > \"$last\"\n";

fn script(path: &Path, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_owned()
}

fn tools(setup: &StoreSetup) -> Toolchain {
    let sources = setup.file("sources");
    fs::create_dir_all(sources.join("mlx/c")).unwrap();
    fs::write(sources.join("mlx/c/array.cpp"), "int a;").unwrap();
    Toolchain {
        cargo: "/nonexistent/cargo".into(),
        compiler: script(&setup.file("c++"), COMPILER).into(),
        sources: Some(sources),
    }
}

fn install(setup: &StoreSetup, tools: &Toolchain) -> Result<MlxInstallation, Error> {
    install_mlx(
        &setup.file("engines"),
        MlxBuild::Cpu,
        tools,
        &setup.options,
        &Cancel::default(),
        &mut SilentProgress,
    )
}

/// Names below the folder of engines, without links and locks.
fn left(setup: &StoreSetup) -> Vec<String> {
    let entries = fs::read_dir(setup.file("engines")).into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != ".lock").collect();
    names.sort();
    names
}

#[test]
fn a_wheel_of_other_bytes_is_refused_and_nothing_stays() {
    let mut setup = StoreSetup::new("http://127.0.0.1:1".into());
    setup.fake_pip("echo not MLX > \"$W/mlx_cpu-0.32.2-py3-none-any.whl\"");
    let error = install(&setup, &tools(&setup)).unwrap_err();
    assert!(
        matches!(&error, Error::HashMismatch { what, .. } if what == "mlx-cpu==0.32.2"),
        "{error}"
    );
    assert_eq!(left(&setup), [] as [&str; 0]);
    assert_eq!(find_mlx(&setup.file("engines")), None);
}

#[test]
fn missing_tools_are_named_before_anything_is_fetched() {
    let mut setup = StoreSetup::new("http://127.0.0.1:1".into());
    let asked = setup.file("asked");
    setup.fake_pip(&format!("touch {}", asked.display()));
    let whole = tools(&setup);
    let no_compiler = Toolchain {
        compiler: "/nonexistent/c++".into(),
        ..whole.clone()
    };
    let no_cargo = Toolchain {
        sources: None,
        ..whole.clone()
    };
    let broken = Toolchain {
        compiler: script(
            &setup.file("bad"),
            "#!/bin/sh\necho no licence >&2\nexit 69\n",
        )
        .into(),
        ..whole
    };
    for (tools, want) in [
        (
            no_compiler,
            "cannot start /nonexistent/c++: no such program".to_owned(),
        ),
        (
            no_cargo,
            "cannot start /nonexistent/cargo: no such program".to_owned(),
        ),
        (
            broken,
            format!(
                "{} failed (status 69): no licence",
                setup.file("bad").display()
            ),
        ),
    ] {
        assert_eq!(install(&setup, &tools).unwrap_err().to_string(), want);
    }
    assert!(!asked.exists());
    assert_eq!(left(&setup), [] as [&str; 0]);
}

#[test]
fn what_is_installed_is_found_by_its_record() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    let root = setup.file("engines");
    let library = root.join(MLX_VERSION).join("mlx/lib").join(MLX_LAYER);
    fs::create_dir_all(library.parent().unwrap()).unwrap();
    fs::write(&library, "").unwrap();
    assert_eq!(find_mlx(&root), None, "no record");
    let record = root.join(MLX_VERSION).join("paceline.json");
    for text in [
        "",
        "{}",
        "[1]",
        r#"{"build": "other", "mlx": "1", "mlx_c": "1", "wheels": []}"#,
    ] {
        fs::write(&record, text).unwrap();
        assert_eq!(find_mlx(&root), None, "{text}");
    }
    let text = r#"{"build": "cuda-13", "mlx": "0.32.2", "mlx_c": "0.7.0", "wheels": []}"#;
    fs::write(&record, text).unwrap();
    let found = find_mlx(&root).unwrap();
    assert_eq!((found.build, &found.library), (MlxBuild::Cuda13, &library));
    fs::remove_file(&library).unwrap();
    assert_eq!(find_mlx(&root), None, "no library");
}

#[test]
fn builds_are_for_their_systems() {
    let exists = |build: MlxBuild| {
        [
            ("linux", "x86_64"),
            ("linux", "aarch64"),
            ("macos", "aarch64"),
            ("macos", "x86_64"),
        ]
        .map(|(os, arch)| build.exists_for(os, arch))
    };
    assert_eq!(exists(MlxBuild::Metal), [false, false, true, false]);
    for build in [MlxBuild::Cpu, MlxBuild::Cuda12, MlxBuild::Cuda13] {
        assert_eq!(exists(build), [true, true, false, false], "{build:?}");
    }
    let names: Vec<&str> = MlxBuild::ALL.iter().map(|build| build.name()).collect();
    assert_eq!(names, ["cpu", "metal", "cuda-12", "cuda-13"]);
}
