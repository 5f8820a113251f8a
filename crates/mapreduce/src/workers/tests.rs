//! Workers that are shell scripts and send the messages of remote workers.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::*;
use crate::groupby::{GroupTable, Grouping};
use crate::messages::PackedPartial;
use crate::reduce::{Op, State};
use crate::{Dtype, FileSink, InputFile, InputSource, Values};

/// The first messages that a script waits for: a start and a job.
const BEGUN: &str = "read a; read a";

fn says(message: &FromWorker) -> String {
    let text = serde_json::to_string(message).unwrap();
    format!("echo '{text}' >&0")
}

/// Workers that are scripts and end when their parent does, on machines of these names.
fn crew(scripts: &[(&str, &[String])]) -> JobWorkers {
    let args = scripts.iter().map(|(_, lines)| {
        let script = format!("{BEGUN}; {}; while read a; do :; done", lines.join("; "));
        vec![OsString::from("-c"), OsString::from(script)]
    });
    let processes = ProcessOptions {
        program: PathBuf::from("/bin/sh"),
        args: args.collect(),
        env: Vec::new(),
        hosts: scripts.iter().map(|(host, _)| (*host).to_owned()).collect(),
        threads: 1,
        device: DeviceChoice::Cpu,
    };
    JobWorkers::start(processes).unwrap()
}

fn ready(inputs: u64) -> String {
    says(&FromWorker::Ready {
        job: 1,
        inputs,
        threads: 1,
    })
}

fn sum() -> JobSpec {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/mapreduce");
    let input = InputFile::npy(&folder.join("normal.npy")).unwrap().flat();
    JobSpec::of_files(vec![input], Kind::Reduce(Op::Sum))
}

#[test]
fn a_machine_with_other_inputs_is_left_out_by_name() {
    let task = sum();
    let expected = JobWorkers::here(1).run(&task, None, &mut |_| {}).unwrap();
    let home = tempfile::tempdir().unwrap();
    let flag = home.path().join("said");
    let inputs = task.fingerprint().unwrap();
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
    let left_out = JobProgress::Lost {
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
    FileSink::create(&out, Dtype::F64, &[sum.rows()]).unwrap();
    let bytes = || std::fs::read(&out).unwrap();
    let before = bytes();
    let write = JobSpec {
        kind: Kind::Write(out.clone()),
        ..sum.clone()
    };
    let rows = |first_row, bytes: usize| FromWorker::Rows {
        job: 1,
        first_row,
        values: PackedPartial([&[0][..], &vec![1; bytes]].concat()),
    };
    for (task, message) in [
        (&sum, rows(0, 8)),
        (&write, rows(0, 7)),
        (&write, rows(sum.rows(), 8)),
        (&write, rows(u64::MAX, 8)),
    ] {
        let lines = [ready(task.fingerprint().unwrap()), says(&message)];
        let mut crew = crew(&[("two", &lines)]);
        let lost = crew.run(task, None, &mut |_| {}).unwrap_err().to_string();
        assert!(lost.contains("that are not of its"), "{lost}");
        assert!(bytes() == before, "{lost}");
    }
}

#[test]
fn a_machine_writes_no_rows_but_those_of_its_parts() {
    const PART: u64 = 1 << 16;
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("out.npy");
    let task = JobSpec {
        origin: InputSource::Random {
            seed: 1,
            samples: 3 * PART,
            columns: 1,
        },
        map: None,
        wgsl: None,
        block: None,
        kind: Kind::Write(out.clone()),
    };
    let rows = |first_row, count: usize| {
        says(&FromWorker::Rows {
            job: 1,
            first_row,
            values: PackedPartial([&[0][..], &vec![1; 8 * count]].concat()),
        })
    };
    // A worker of one thread gets two parts of three.
    for (first_row, count) in [(2 * PART, 1), (2 * PART - 1, 2), (PART - 1, 2)] {
        FileSink::create(&out, Dtype::F64, &[task.rows()]).unwrap();
        let before = std::fs::read(&out).unwrap();
        let header = before.len() - 8 * task.rows() as usize;
        let lines = [ready(0), rows(PART, 2), rows(first_row, count)];
        let mut crew = crew(&[("two", &lines)]);
        let lost = crew.run(&task, None, &mut |_| {}).unwrap_err().to_string();
        assert!(lost.contains("rows that are not of its part"), "{lost}");
        let mut expected = before;
        expected[header + 8 * PART as usize..][..16].fill(1);
        let written = std::fs::read(&out).unwrap();
        assert!(written == expected, "from row {first_row}");
    }
}

#[test]
fn groups_of_a_machine_are_those_of_as_many_values_as_its_part_has() {
    let home = tempfile::tempdir().unwrap();
    let input = |name: &str, dtype| {
        let path = home.path().join(name);
        FileSink::create(&path, dtype, &[8]).unwrap();
        InputFile::npy(&path).unwrap()
    };
    let grouping = Grouping {
        op: Op::Sum,
        keys: Dtype::I32,
        values: Dtype::F64,
    };
    let inputs = vec![input("keys", Dtype::I32), input("values", Dtype::F64)];
    let task = JobSpec::of_files(inputs, Kind::GroupBy(grouping));
    let inputs = task.fingerprint().unwrap();
    let groups = |op, values: usize| {
        let mut groups = GroupTable::new(Grouping { op, ..grouping });
        let zeros = vec![0.0; values];
        groups.take(&Values::Floats(&zeros), &Values::Floats(&zeros));
        PartialResult::GroupBy(groups)
    };
    let piece = |part, partial| {
        says(&FromWorker::Piece {
            job: 1,
            part,
            partial,
        })
    };
    let done = |part, partial| {
        says(&FromWorker::Done {
            job: 1,
            part,
            partial,
            on_device: false,
        })
    };
    let run = |mut lines: Vec<String>| {
        lines.insert(0, ready(inputs));
        crew(&[("two", &lines[..])]).run(&task, None, &mut |_| {})
    };
    let expected = JobWorkers::here(1).run(&task, None, &mut |_| {}).unwrap();
    let whole = [piece(0, groups(Op::Sum, 3)), done(0, groups(Op::Sum, 5))];
    assert_eq!(run(whole.to_vec()).unwrap(), expected);
    let sum = PartialResult::Reduce(Box::new(State::new(Op::Sum)));
    for lies in [
        vec![piece(0, groups(Op::Sum, 9))],
        vec![piece(0, groups(Op::Sum, 0))],
        vec![piece(1, groups(Op::Sum, 1))],
        vec![piece(0, groups(Op::Min, 1))],
        vec![piece(0, sum)],
        vec![piece(0, groups(Op::Sum, 5)), piece(0, groups(Op::Sum, 4))],
        vec![piece(0, groups(Op::Sum, 5)), done(0, groups(Op::Sum, 4))],
        vec![done(0, groups(Op::Sum, 7))],
        vec![done(1, groups(Op::Sum, 8))],
    ] {
        let lost = run(lies.clone()).unwrap_err().to_string();
        assert!(lost.contains("not of its part"), "{lies:?}: {lost}");
    }
}
