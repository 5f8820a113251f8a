//! Models of several files, which are downloaded at the same time.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, OnceLock};

use crate::common::*;
use crate::hub::listing;
use paceline_base::Bytes;
use paceline_store::*;

const PARTS: usize = 6;
const CONNECTIONS: usize = 4;
/// Bytes of a part: several blocks of a connection.
const PART_BYTES: usize = 500_000;

fn name(part: usize) -> String {
    format!("Q8_0/m-Q8_0-{part:05}-of-{PARTS:05}.gguf")
}

/// The part's bytes; all parts differ.
fn part(part: usize) -> Vec<u8> {
    payload()[part * 1000..][..PART_BYTES].to_vec()
}

fn part_of(path: &str) -> Option<usize> {
    (1..=PARTS).find(|part| path.ends_with(&name(*part)))
}

fn repository() -> ServerReply {
    let parts: Vec<_> = (1..=PARTS)
        .map(|it| (name(it), sha256(&part(it))))
        .collect();
    let parts: Vec<_> = parts
        .iter()
        .map(|it| (&*it.0, PART_BYTES, Some(&*it.1)))
        .collect();
    ServerReply::File {
        body: Arc::new(listing(&parts).into_bytes()),
        etag: etag("l"),
    }
}

fn whole(number: usize) -> ServerReply {
    ServerReply::File {
        body: Arc::new(part(number)),
        etag: etag(&number.to_string()),
    }
}

fn folder(setup: &StoreSetup) -> PathBuf {
    let model = format!("own--repo--{}", name(1).replace('/', "%2F"));
    setup.home.models_dir().join(model)
}

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "one story: wrong bytes, a cut, a resume"
)]
fn wrong_bytes_of_one_file_end_the_pull_and_the_others_are_kept() {
    let (first_four, asked) = (Barrier::new(CONNECTIONS), AtomicUsize::new(0));
    let (honest, folder_of) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(OnceLock::<PathBuf>::new()),
    );
    let (is_honest, place) = (Arc::clone(&honest), Arc::clone(&folder_of));
    let server = FakeHub::start(move |request, _| {
        let Some(number) = part_of(&request.path) else {
            return repository();
        };
        // Blocks for ever unless four files are requested at the same time.
        if asked.fetch_add(1, Ordering::Relaxed) < CONNECTIONS {
            first_four.wait();
        }
        let etag = etag(&number.to_string());
        match number {
            2 if request.header("range").is_none() => ServerReply::CutAfter {
                body: Arc::new(part(2)),
                etag,
                bytes: 300_000,
            },
            3 if !is_honest.load(Ordering::Relaxed) => {
                wait_for_file(&place.wait().join(name(1)));
                wait_for_file(&place.wait().join(name(2)));
                let body = Arc::new(part(4));
                ServerReply::File { body, etag }
            }
            number => whole(number),
        }
    });
    let setup = StoreSetup::new(server.url()).patient();
    folder_of.set(folder(&setup)).unwrap();
    let (first, record) = setup.pull(empty_catalogue(), "own/repo:Q8_0");
    match first {
        Err(Error::HashMismatch { what, .. }) => assert!(what.ends_with(&name(3)), "{what}"),
        other => panic!("{other:?}"),
    }
    assert!((1..=CONNECTIONS).contains(&record.busy_max), "{record:?}");
    let left = setup.files();
    assert!(
        !left.iter().any(|file| file.contains("00003-of")),
        "{left:?}"
    );

    honest.store(true, Ordering::Relaxed);
    let before = server.requests().len();
    let (pulled, record) = setup.pull(empty_catalogue(), "own/repo:Q8_0");
    let pulled = pulled.unwrap();
    assert_eq!(pulled.bytes, Bytes((PARTS * PART_BYTES) as u64));
    for number in 1..=PARTS {
        assert_eq!(
            fs::read(folder(&setup).join(name(number))).unwrap(),
            part(number)
        );
        let pinned = origin(&setup.home, &folder(&setup).join(name(number))).unwrap();
        assert_eq!(
            (pinned.file, pinned.sha256),
            (name(number), sha256(&part(number)))
        );
    }
    assert_eq!(setup.files().len(), PARTS + 1, "{:?}", setup.files());
    let requests = server.requests();
    let of_part = |number, requests: &[ServerRequest]| {
        let of_part = requests
            .iter()
            .filter(|it| part_of(&it.path) == Some(number));
        of_part
            .map(|it| it.header("range").map(str::to_owned))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of_part(2, &requests),
        [None, Some("bytes=300000-".to_owned())]
    );
    assert!(of_part(1, &requests[before..]).is_empty());
    assert_eq!(of_part(3, &requests[before..]), [None]);
    let (label, total, done, advanced) = record.parts.last().unwrap();
    assert_eq!(label, "6 files");
    assert!(*done >= 2 * PART_BYTES as u64);
    assert_eq!(*total, Some(done + advanced));
    let selected = record.selected.unwrap();
    assert_eq!(
        (selected.files.len(), selected.bytes()),
        (PARTS, Some(pulled.bytes))
    );
}

#[test]
fn a_cancelled_pull_of_several_files_is_resumed() {
    let asked = AtomicUsize::new(0);
    let server = FakeHub::start(move |request, _| match part_of(&request.path) {
        None => repository(),
        Some(number) if asked.fetch_add(1, Ordering::Relaxed) < CONNECTIONS => {
            ServerReply::StallAfter {
                body: Arc::new(part(number)),
                etag: etag(&number.to_string()),
                bytes: 200_000,
            }
        }
        Some(number) => whole(number),
    });
    let setup = StoreSetup::new(server.url()).patient();
    let mut record = ProgressLog {
        cancel_after: Some((700_000, setup.cancel.clone())),
        ..ProgressLog::default()
    };
    let stopped = setup.pull_with(empty_catalogue(), "own/repo", &mut record);
    assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    assert_eq!(list(&setup.home).unwrap()[0].state, State::Partial);

    let again = StoreSetup {
        cancel: Cancel::default(),
        ..setup
    };
    let (pulled, record) = again.pull(empty_catalogue(), "own/repo");
    let pulled = pulled.unwrap();
    let verified = verify(
        &again.home,
        &pulled.name,
        &again.cancel,
        &mut SilentProgress,
    );
    verified.unwrap();
    let (_, total, done, advanced) = record.parts.last().unwrap();
    assert!(*done >= 700_000, "{record:?}");
    assert_eq!(*total, Some(done + advanced));
    assert_eq!(list(&again.home).unwrap()[0].file_count(), Some(PARTS));
}
