//! Crews of shell scripts that say what workers of other machines say.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::*;
use crate::reduce::Op;
use crate::{Dtype, FileSink, Input};

/// The first messages that a script waits for: a start and a job.
const BEGUN: &str = "read a; read a";

/// A worker says this.
fn says(message: &FromWorker) -> String {
    let text = serde_json::to_string(message).unwrap();
    format!("echo '{text}' >&0")
}

/// A crew of scripts that end when their parent does, on machines of these names.
fn crew(scripts: &[(&str, &[String])]) -> Crew {
    let args = scripts.iter().map(|(_, lines)| {
        let script = format!("{BEGUN}; {}; read a", lines.join("; "));
        vec![OsString::from("-c"), OsString::from(script)]
    });
    let processes = Processes {
        program: PathBuf::from("/bin/sh"),
        args: args.collect(),
        env: Vec::new(),
        hosts: scripts.iter().map(|(host, _)| (*host).to_owned()).collect(),
        threads: 1,
        device: Choice::Cpu,
    };
    Crew::start(processes).unwrap()
}

fn ready(inputs: u64) -> String {
    says(&FromWorker::Ready {
        job: 1,
        inputs,
        threads: 1,
    })
}

fn sum() -> Task {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/mapreduce");
    let input = Input::npy(&folder.join("normal.npy")).unwrap().flat();
    Task::of_files(vec![input], Kind::Reduce(Op::Sum))
}

#[test]
fn a_machine_with_other_inputs_is_left_out_by_name() {
    let task = sum();
    let expected = Crew::here(1).run(&task, None, &mut |_| {}).unwrap();
    let home = tempfile::tempdir().unwrap();
    let flag = home.path().join("said");
    let inputs = task.looks().unwrap();
    let done = says(&FromWorker::Done {
        job: 1,
        part: 0,
        partial: expected.clone(),
        on_device: false,
    });
    let [set, wait] = [
        format!("touch '{}'", flag.display()),
        format!("until [ -e '{}' ]; do sleep 0.01; done", flag.display()),
    ];
    let mut crew = crew(&[
        ("two", &[ready(inputs ^ 1), set]),
        ("three", &[wait, ready(inputs), "read a".to_owned(), done]),
    ]);
    assert_eq!(crew.node_threads(), [None, None]);
    let mut told = Vec::new();
    let mut hear = |progress| told.push(progress);
    let got = crew.run(&task, None, &mut hear).unwrap();
    assert_eq!(got, expected);
    assert_eq!(crew.lost(), 1);
    assert_eq!(crew.node_threads(), [None, Some(1)]);
    let left_out = Progress::Lost {
        why: "two: it has other inputs of the same names".to_owned(),
        parts: 0,
    };
    assert!(told.contains(&left_out), "{told:?}");
}

#[test]
fn what_a_machine_cannot_do_others_may_but_not_processes_beside_it() {
    let task = sum();
    let reason = "x.npy is not there".to_owned();
    let failed = [says(&FromWorker::Failed { reason })];
    let all = crew(&[("two", &failed)]).run(&task, None, &mut |_| {});
    let all = all.unwrap_err().to_string();
    assert!(all.ends_with("two: x.npy is not there"), "{all}");
    let here = crew(&[("", &failed)]).run(&task, None, &mut |_| {});
    let here = here.unwrap_err();
    assert!(matches!(here, Error::Worker { .. }), "{here}");
}

#[test]
fn a_machine_writes_no_rows_but_those_of_its_task() {
    let sum = sum();
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("out.npy");
    FileSink::create(&out, Dtype::F64, sum.rows()).unwrap();
    let bytes = || std::fs::read(&out).unwrap();
    let before = bytes();
    let write = Task {
        kind: Kind::Write(out.clone()),
        ..sum.clone()
    };
    let rows = |first_row, bytes: usize| FromWorker::Rows {
        job: 1,
        first_row,
        values: Packed(vec![1; bytes]),
    };
    let keys = FromWorker::Keys {
        job: 1,
        part: 0,
        keys: Packed(vec![1; 8]),
    };
    for (task, message) in [
        (&sum, rows(0, 8)),
        (&write, rows(0, 7)),
        (&write, rows(sum.rows(), 8)),
        (&write, rows(u64::MAX, 8)),
        (&write, keys),
    ] {
        let lines = [ready(task.looks().unwrap()), says(&message)];
        let mut crew = crew(&[("two", &lines)]);
        let lost = crew.run(task, None, &mut |_| {}).unwrap_err().to_string();
        assert!(lost.contains("that are not of its"), "{lost}");
        assert!(bytes() == before, "{lost}");
    }
}
