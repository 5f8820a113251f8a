//! Installation of MLX with a fake pip, a fake package index and a fake compiler.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

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
        ..Toolchain::default()
    }
}

/// A release with a C layer for MLX `version`, made with the package index at `index`; no tools.
fn release(setup: &StoreSetup, version: &str, index: &str) -> Toolchain {
    let folder = setup.file("lib/paceline");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(MLX_LAYER), "a layer").unwrap();
    let record = format!(
        r#"{{"mlx": "{version}", "mlx_c": "0.7.0", "index": "{index}", "sha256": "{}"}}"#,
        sha256(b"a layer")
    );
    fs::write(folder.join("mlx-layer.json"), record).unwrap();
    Toolchain {
        shipped: Some(folder),
        cargo: "/nonexistent/cargo".into(),
        compiler: "/nonexistent/c++".into(),
        ..Toolchain::default()
    }
}

/// An index whose page of `mlx-cpu` links to `wheel` by the fragment that `hash` has later.
fn package_index(wheel: ServerReply, hash: &Arc<Mutex<String>>) -> FakeHub {
    let hash = Arc::clone(hash);
    FakeHub::start(move |request, _| match &*request.path {
        "/simple/mlx-cpu/" => {
            let hash = hash.lock().unwrap();
            let page = format!("<a href=\"../../files/mlx.whl#sha256={hash}\">mlx.whl</a>");
            let body = Arc::new(page.into_bytes());
            ServerReply::Chunked { body }
        }
        "/files/mlx.whl" => wheel.clone(),
        _ => ServerReply::Status(404),
    })
}

/// The error of an installation from an index that delivers `wheel` for the pinned hash.
fn refused(wheel: ServerReply) -> Error {
    let hash = Arc::new(Mutex::new(String::new()));
    let index = package_index(wheel, &hash);
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    let tools = release(&setup, MLX_VERSION, &format!("{}/simple/", index.url()));
    match index_failure(install(&setup, &tools)) {
        Error::NotInIndex { sha256, page, .. } => {
            assert!(page.ends_with("/simple/mlx-cpu/"), "{page}");
            *hash.lock().unwrap() = sha256;
        }
        other => panic!("{other:?}"),
    }
    let error = index_failure(install(&setup, &tools));
    assert_eq!(left(&setup), [] as [&str; 0]);
    error
}

fn index_failure(result: Result<MlxInstallation, Error>) -> Error {
    match result {
        Err(Error::IndexFailed { requirement, cause }) => {
            assert_eq!(requirement, "mlx-cpu==0.32.2");
            *cause
        }
        other => panic!("{other:?}"),
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
fn a_release_needs_no_tools_and_the_wheel_of_an_index_is_verified() {
    let body = Arc::new(payload());
    let etag = "\"e\"".to_owned();
    let whole = ServerReply::File {
        body: Arc::clone(&body),
        etag: etag.clone(),
    };
    match refused(whole) {
        Error::HashMismatch { got, .. } => assert_eq!(got, sha256(&body), "all bytes came"),
        other => panic!("{other:?}"),
    }
    let cut = ServerReply::CutAfter {
        body,
        etag,
        bytes: 1000,
    };
    assert!(matches!(refused(cut), Error::ConnectionLost { .. }));
    assert!(matches!(
        refused(ServerReply::Status(404)),
        Error::NotFound { .. }
    ));
}

#[test]
fn the_index_of_the_settings_comes_before_the_one_of_the_release() {
    let mut setup = StoreSetup::new("http://127.0.0.1:1".into());
    let tools = release(&setup, MLX_VERSION, "http://127.0.0.1:1");
    let other = package_index(ServerReply::Silence, &Arc::default());
    setup.options.index = PackageIndex::Address(format!("{}/simple", other.url()));
    let error = index_failure(install(&setup, &tools));
    assert!(matches!(error, Error::NotInIndex { .. }), "{error}");
    setup.options.index = PackageIndex::Pip;
    let error = install(&setup, &tools).unwrap_err();
    assert!(matches!(error, Error::PythonMissing { .. }), "{error}");
}

#[test]
fn a_shipped_layer_of_another_version_is_passed_over() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    let tools = release(&setup, "0.31.0", "http://127.0.0.1:1");
    let mut log = ProgressLog::default();
    let (root, cancel) = (setup.file("engines"), Cancel::default());
    let error = install_mlx(
        &root,
        MlxBuild::Cpu,
        &tools,
        &setup.options,
        &cancel,
        &mut log,
    )
    .unwrap_err();
    assert!(matches!(error, Error::ToolMissing { .. }), "{error}");
    assert!(
        log.messages[0].contains("for MLX 0.31.0, expected 0.7.0 for 0.32.2"),
        "{:?}",
        log.messages
    );
}

#[test]
fn an_older_system_is_refused_by_name() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    let old = Toolchain {
        system: Some(SystemVersion(2, 31)),
        ..release(&setup, MLX_VERSION, "http://127.0.0.1:1")
    };
    let error = install(&setup, &old).unwrap_err();
    assert_eq!(
        error.to_string(),
        "MLX 0.32.2 needs glibc 2.35 or later, this machine has glibc 2.31"
    );
    assert_eq!(left(&setup), [] as [&str; 0]);
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
