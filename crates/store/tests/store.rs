//! Names, records and removal.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::*;
use paceline_store::*;

/// Creates a complete model `tiny` in a store.
fn stored() -> (StoreSetup, PathBuf) {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    let dir = setup.home.models_dir().join("tiny");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("m.gguf"), b"GGUFdata").unwrap();
    fs::write(
        dir.join("paceline.json"),
        record("tiny", "m.gguf", 8, &sha256(b"GGUFdata")),
    )
    .unwrap();
    (setup, dir)
}

fn record(name: &str, file: &str, bytes: u64, sha256: &str) -> String {
    format!(
        r#"{{"version":1,"name":"{name}","kind":"gguf","source":"test","files":
        [{{"path":"{file}","bytes":{bytes},"sha256":"{sha256}"}}],"pulled_at":5,"last_used":null}}"#
    )
}

fn used(setup: &StoreSetup, name: &EntryName) -> Result<(), Error> {
    check_used(
        &setup.home,
        name,
        now(),
        &Cancel::default(),
        &mut SilentProgress,
    )
}

fn tiny() -> Catalogue {
    catalogue(b"GGUFdata", true, Vec::new())
}

#[test]
fn a_path_that_exists_wins_and_others_are_named_by_what_they_look_like() {
    let (setup, _) = stored();
    let file = setup.file("smollm2");
    fs::write(&file, "GGUF and more").unwrap();
    let spec = file.to_str().unwrap();
    match resolve(&setup.home, spec).unwrap() {
        Resolution::Path(found) => {
            assert_eq!(
                (found.path, found.kind, found.name),
                (file, Kind::Gguf, None)
            );
        }
        other => panic!("{other:?}"),
    }
    type Check = fn(Result<Resolution, Error>) -> bool;
    let cases: [(&str, Check); 13] = [
        (
            "smollm2",
            |r| matches!(r, Ok(Resolution::NeedsDownload(p)) if p.bytes().is_some()),
        ),
        (
            "own/repo",
            |r| matches!(r, Ok(Resolution::NeedsDownload(p)) if p.name() == "own/repo"),
        ),
        ("own/repo:Q4_0", |r| {
            matches!(r, Ok(Resolution::NeedsDownload(p))
            if p.name() == "own/repo:Q4_0")
        }),
        ("smollm", |r| {
            matches!(r, Err(Error::UnknownModel { close, .. })
            if *close == ["smollm2", "smollm2:1.7b", "smollm2:360m"])
        }),
        ("SmolML2", |r| {
            matches!(r, Err(Error::UnknownModel { close, .. })
            if *close == ["smollm2"])
        }),
        (
            "qwertyuiop",
            |r| matches!(r, Err(Error::UnknownModel { close, .. }) if close.is_empty()),
        ),
        (
            "",
            |r| matches!(r, Err(Error::UnknownModel { close, .. }) if close.is_empty()),
        ),
        ("./none.gguf", |r| {
            matches!(r, Err(Error::NoSuchPath { .. }))
        }),
        ("none.gguf", |r| matches!(r, Err(Error::NoSuchPath { .. }))),
        ("models/none.gguf", |r| {
            matches!(r, Err(Error::NoSuchPath { .. }))
        }),
        ("a/b/c", |r| matches!(r, Err(Error::NoSuchPath { .. }))),
        ("own/re po", |r| matches!(r, Err(Error::BadHubId { .. }))),
        ("own/repo:../../x", |r| {
            matches!(r, Err(Error::BadHubId { .. }))
        }),
    ];
    for (spec, check) in cases {
        let result = resolve(&setup.home, spec);
        let shown = format!("{spec}: {result:?}");
        assert!(check(result), "{shown}");
    }
}

#[test]
fn paths_that_hold_no_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    let text = dir.path().join("x.gguf");
    fs::write(&text, "<html>").unwrap();
    let short = dir.path().join("short.gguf");
    fs::write(&short, "GG").unwrap();
    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    for path in [&text, &short, &folder, &PathBuf::from("/dev/null")] {
        let refused = resolve(&home, path.to_str().unwrap());
        assert!(
            matches!(refused, Err(Error::NotAModel { .. })),
            "{path:?} {refused:?}"
        );
    }
    fs::write(folder.join("config.json"), "{}").unwrap();
    assert!(matches!(
        resolve(&home, folder.to_str().unwrap()),
        Err(Error::NotAModel { .. })
    ));
    fs::write(folder.join("model.safetensors"), "").unwrap();
    match resolve(&home, folder.to_str().unwrap()).unwrap() {
        Resolution::Path(found) => assert_eq!(found.kind, Kind::Safetensors),
        other => panic!("{other:?}"),
    }
}

#[test]
fn use_is_noted_and_listed() {
    let (setup, dir) = stored();
    let entries = list(&setup.home).unwrap();
    assert_eq!(entries.len(), 1);
    let name = &entries[0].name;
    used(&setup, name).unwrap();
    match &list(&setup.home).unwrap()[0].state {
        State::Complete {
            last_used,
            pulled_at,
            ..
        } => {
            assert_eq!(*last_used, Some(now()));
            assert_eq!(*pulled_at, now() - Duration::from_secs(1_800_000_000 - 5));
        }
        other => panic!("{other:?}"),
    }
    let text = fs::read_to_string(dir.join("paceline.json")).unwrap();
    assert!(text.contains("\"last_used\": 1800000000"), "{text}");
    verify(&setup.home, name, &setup.cancel, &mut SilentProgress).unwrap();
    fs::write(dir.join("m.gguf"), b"GGUFdatA").unwrap();
    let wrong = verify(&setup.home, name, &setup.cancel, &mut SilentProgress);
    assert!(
        matches!(wrong, Err(Error::HashMismatch { .. })),
        "{wrong:?}"
    );
    remove(&setup.home, "tiny").unwrap();
    assert!(matches!(used(&setup, name), Err(Error::NotInStore { .. })));
}

#[test]
fn a_model_is_removed_by_every_name_that_pull_takes() {
    for spec in ["smollm2", "smollm2:latest", "SmolLM2:135M", "smollm2-135m"] {
        let setup = StoreSetup::new("http://127.0.0.1:1".into());
        let dir = setup.home.models_dir().join("smollm2");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("m.gguf"), b"GGUFdata").unwrap();
        let record = record("smollm2", "m.gguf", 8, &sha256(b"GGUFdata"));
        fs::write(dir.join("paceline.json"), record).unwrap();
        let removed = remove(&setup.home, spec).unwrap();
        assert_eq!(removed.name.as_str(), "smollm2", "{spec}");
        assert_eq!(list(&setup.home).unwrap(), [], "{spec}");
    }
}

#[test]
fn a_whole_name_in_the_store_wins_over_the_end_of_another() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    for file in ["S-Compact.gguf", "S-I-Compact.gguf"] {
        let dir = setup.home.models_dir().join(format!("own--repo--{file}"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(file), b"GGUFdata").unwrap();
        let record = record(&format!("own/repo:{file}"), file, 8, &sha256(b"GGUFdata"));
        fs::write(dir.join("paceline.json"), record).unwrap();
    }
    for (selector, file) in [
        ("Compact", "S-Compact.gguf"),
        ("i-compact", "S-I-Compact.gguf"),
    ] {
        let spec = format!("own/repo:{selector}");
        let Ok(Resolution::Path(found)) = resolve(&setup.home, &spec) else {
            panic!("{spec}");
        };
        assert!(found.path.ends_with(file), "{found:?}");
        assert!(
            find_for_removal(&setup.home, &spec)
                .unwrap()
                .as_str()
                .ends_with(file)
        );
    }
    match resolve(&setup.home, "own/repo") {
        Err(Error::AmbiguousGguf { choices, .. }) => {
            let selectors: Vec<&str> = choices.iter().map(|it| &*it.selector).collect();
            assert_eq!(selectors, ["Compact", "I-Compact"]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_empty_home_is_an_empty_store() {
    let home = Home::new("/nonexistent/paceline");
    assert_eq!(list(&home).unwrap(), []);
    assert!(matches!(
        remove(&home, "smollm2"),
        Err(Error::NotInStore { .. })
    ));
}

#[test]
fn hostile_records_make_a_model_damaged_and_nothing_worse() {
    let sha = sha256(b"GGUFdata");
    let outside = "../../../secret";
    let cases = [
        String::new(),
        "{".into(),
        "[]".into(),
        "null".into(),
        "\u{feff}{}".into(),
        "[".repeat(100_000),
        record("tiny", outside, 8, &sha),
        record("tiny", "/etc/passwd", 8, &sha),
        record("tiny", "m.gguf/..", 8, &sha),
        record("tiny", "", 8, &sha),
        record("tiny", "missing.gguf", 8, &sha),
        record("tiny", "link.gguf", 8, &sha),
        record("tiny", "sub", 8, &sha),
        record("tiny", "m.gguf", 9, &sha),
        record("tiny", "m.gguf", 8, "abc"),
        record("other", "m.gguf", 8, &sha),
        record("../../other", "m.gguf", 8, &sha),
        record("tiny", "m.gguf", 8, &sha).replace("\"version\":1", "\"version\":2"),
        record("tiny", "m.gguf", 8, &sha).replace("\"pulled_at\":5", "\"pulled_at\":-5"),
        record("tiny", "m.gguf", 8, &sha).replace("\"source\"", "\"extra\":0,\"source\""),
        record("tiny", "m.gguf", 8, &sha).replace("\"bytes\":8", "\"bytes\":1e99"),
        format!(
            "{}{}",
            record("tiny", "m.gguf", 8, &sha),
            " ".repeat(2 << 20) + "x"
        ),
    ];
    for text in cases {
        let (setup, dir) = stored();
        let secret = setup.file("secret");
        fs::write(&secret, b"GGUFdata").unwrap();
        symlink(&secret, dir.join("link.gguf")).unwrap();
        fs::create_dir(dir.join("sub")).unwrap();
        fs::write(dir.join("paceline.json"), &text).unwrap();
        let shown: String = text.chars().take(200).collect();
        let entries = list(&setup.home).unwrap();
        assert_eq!(entries.len(), 1, "{shown}");
        let padded = text.len() > 1 << 20 && text.starts_with('{');
        let damaged = matches!(entries[0].state, State::Damaged { .. });
        assert!(damaged || padded, "{shown}: {:?}", entries[0].state);
        assert!(entries[0].path.starts_with(&dir), "{shown}");
        if damaged {
            assert!(matches!(
                resolve_in(&setup.home, tiny(), "tiny"),
                Ok(Resolution::NeedsDownload(_))
            ));
            assert!(used(&setup, &entries[0].name).is_err());
        }
        assert_eq!(remove(&setup.home, "tiny").unwrap().name.as_str(), "tiny");
        assert!(secret.exists() && !dir.exists(), "{shown}");
    }
}

#[test]
fn far_times_do_not_panic() {
    let (setup, dir) = stored();
    let text = record("tiny", "m.gguf", 8, &sha256(b"GGUFdata"))
        .replace("\"last_used\":null", &format!("\"last_used\":{}", u64::MAX));
    fs::write(dir.join("paceline.json"), text).unwrap();
    assert!(list(&setup.home).unwrap()[0].is_complete());
}

#[test]
fn removal_never_leaves_the_store() {
    let (setup, dir) = stored();
    let mine = setup.file("mine.gguf");
    fs::write(&mine, "GGUF").unwrap();
    let precious = setup.file("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("x"), "x").unwrap();
    symlink(&precious, setup.home.models_dir().join("linked")).unwrap();
    symlink(&precious, dir.join("inner")).unwrap();
    fs::create_dir(setup.home.models_dir().join("not a model")).unwrap();

    let outside = [
        mine.clone(),
        precious.clone(),
        setup.home.root().into(),
        "/".into(),
    ];
    for path in outside {
        let refused = remove(&setup.home, path.to_str().unwrap());
        assert!(
            matches!(refused, Err(Error::OutsideStore { .. })),
            "{path:?}: {refused:?}"
        );
    }
    let models = setup.home.models_dir();
    for spec in [
        "",
        ".",
        "..",
        "linked",
        "nope",
        "../../mine.gguf",
        "tiny/..",
        "not a model",
    ] {
        let refused = remove(&setup.home, spec);
        assert!(refused.is_err(), "{spec:?}: {refused:?}");
    }
    for path in [
        models.clone(),
        models.join("not a model"),
        models.join("tiny/inner/x"),
    ] {
        let refused = remove(&setup.home, path.to_str().unwrap());
        assert!(
            matches!(refused, Err(Error::OutsideStore { .. })),
            "{path:?}: {refused:?}"
        );
    }
    let inside = dir.join("m.gguf");
    let removed = remove(&setup.home, inside.to_str().unwrap()).unwrap();
    assert_eq!(removed.name.as_str(), "tiny");
    assert!(removed.bytes.0 > 8);
    assert!(!dir.exists() && mine.exists() && precious.join("x").exists());
}

#[test]
fn a_model_in_use_is_not_removed() {
    let (setup, dir) = stored();
    let locks = setup.home.models_dir().join(".locks");
    fs::create_dir_all(&locks).unwrap();
    let lock = fs::File::create(locks.join("tiny.lock")).unwrap();
    lock.lock().unwrap();
    assert!(matches!(
        remove(&setup.home, "tiny"),
        Err(Error::Busy { .. })
    ));
    assert!(dir.join("paceline.json").exists());
    lock.unlock().unwrap();
    remove(&setup.home, "tiny").unwrap();
}

#[test]
fn partial_downloads_are_listed_and_removable() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    let dir = setup.home.models_dir().join("own--repo--m-Q8_0.gguf");
    fs::create_dir_all(&dir).unwrap();
    assert_eq!(list(&setup.home).unwrap(), [], "an empty folder is nothing");
    fs::write(dir.join("m-Q8_0.gguf.partial"), vec![0; 1000]).unwrap();
    let entries = list(&setup.home).unwrap();
    assert_eq!(entries[0].name.as_str(), "own/repo:m-Q8_0.gguf");
    assert_eq!(
        (entries[0].bytes.0, &entries[0].state),
        (1000, &State::Partial)
    );
    assert!(matches!(entries[0].found(), Err(Error::Damaged { .. })));
    assert_eq!(remove(&setup.home, "own/repo").unwrap().bytes.0, 1000);
    assert!(!dir.exists());
}

#[test]
fn a_folder_without_permission_is_named() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    fs::create_dir_all(setup.home.root()).unwrap();
    let set = |mode| fs::set_permissions(setup.home.root(), fs::Permissions::from_mode(mode));
    set(0o500).unwrap();
    if fs::write(setup.home.root().join("probe"), "").is_ok() {
        // Root may write anywhere: a file in the folder's place gives another clear error.
        fs::write(setup.home.models_dir(), "in the way").unwrap();
        let error = setup.pull(tiny(), "tiny").0.unwrap_err();
        assert!(matches!(&error, Error::Io { path, .. } if path.starts_with(setup.home.root())));
    } else {
        let error = setup.pull(tiny(), "tiny").0.unwrap_err();
        assert!(matches!(error, Error::PermissionDenied { .. }), "{error:?}");
    }
    set(0o700).unwrap();
    assert!(Path::new(setup.home.root()).exists());
}

#[test]
fn a_folder_with_one_gguf_model_is_that_model() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    let folder = setup.file("folder");
    fs::create_dir(&folder).unwrap();
    let spec = folder.to_str().unwrap();
    let resolved = || resolve(&setup.home, spec);
    assert!(matches!(resolved(), Err(Error::NotAModel { .. })));
    fs::write(folder.join("mmproj-F16.gguf"), "GGUF").unwrap();
    assert!(matches!(resolved(), Err(Error::NotAModel { .. })));
    for part in ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"] {
        fs::write(folder.join(part), "GGUF").unwrap();
    }
    match resolved().unwrap() {
        Resolution::Path(found) => {
            assert_eq!(found.path, folder.join("m-00001-of-00002.gguf"));
            assert_eq!((found.kind, found.name), (Kind::Gguf, None));
        }
        other => panic!("{other:?}"),
    }
    fs::write(folder.join("n.gguf"), "GGUF").unwrap();
    match resolved().unwrap_err() {
        Error::SeveralGguf { choices, .. } => {
            assert_eq!(choices, ["m-00001-of-00002.gguf", "n.gguf"]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_usual_name_means_a_repository() {
    let setup = StoreSetup::new("http://127.0.0.1:1".into());
    for spec in ["qwen3:8b", "qwen3-8b", "Qwen3:8B", "qwen3"] {
        match resolve(&setup.home, spec).unwrap() {
            Resolution::NeedsDownload(plan) => {
                assert_eq!(plan.name(), "Qwen/Qwen3-8B-GGUF:Q4_K_M", "{spec}");
            }
            other => panic!("{other:?}"),
        }
    }
    // A pulled one is found and removed by that name too.
    let name = "Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf";
    let dir = setup
        .home
        .models_dir()
        .join("Qwen--Qwen3-8B-GGUF--Qwen3-8B-Q4_K_M.gguf");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("Qwen3-8B-Q4_K_M.gguf"), b"GGUFdata").unwrap();
    let record = record(name, "Qwen3-8B-Q4_K_M.gguf", 8, &sha256(b"GGUFdata"));
    fs::write(dir.join("paceline.json"), record).unwrap();
    match resolve(&setup.home, "qwen3:8b").unwrap() {
        Resolution::Path(found) => assert_eq!(found.name.unwrap().as_str(), name),
        other => panic!("{other:?}"),
    }
    assert_eq!(remove(&setup.home, "qwen3:8b").unwrap().name.as_str(), name);
    assert!(!dir.exists());
}

#[test]
fn a_file_that_was_replaced_is_noticed_before_it_is_used() {
    let (setup, dir) = stored();
    let Resolution::Path(found) = resolve_in(&setup.home, tiny(), "tiny").unwrap() else {
        panic!("it is there")
    };
    let name = found.name.unwrap();
    let file = dir.join("m.gguf");
    used(&setup, &name).unwrap();
    // The same bytes with another inode and time, as after a restored backup: hashed once, and
    // recorded.
    fs::rename(&file, dir.join("old")).unwrap();
    fs::write(&file, b"GGUFdata").unwrap();
    used(&setup, &name).unwrap();
    let stamps = || match &list(&setup.home).unwrap()[0].state {
        State::Complete { files, .. } => files[0].stamp.unwrap(),
        other => panic!("{other:?}"),
    };
    let noted = stamps();
    used(&setup, &name).unwrap();
    assert_eq!(stamps(), noted);
    // Other bytes of the same length are rejected every time, until restored.
    let other = dir.join("other");
    fs::write(&other, b"GGUFevil").unwrap();
    fs::rename(&other, &file).unwrap();
    for _ in 0..2 {
        let error = used(&setup, &name).unwrap_err();
        assert!(matches!(error, Error::HashMismatch { .. }), "{error}");
    }
    fs::rename(dir.join("old"), &file).unwrap();
    verify(&setup.home, &name, &Cancel::default(), &mut SilentProgress).unwrap();
    used(&setup, &name).unwrap();
}
