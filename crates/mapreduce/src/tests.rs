//! Jobs against the answers of Python and NumPy, over any cut and any number of threads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::reduce::{Op, exact_avg, exact_dot, exact_sum, exact_var};
use crate::{Crew, Dtype, Input, Journal, Kind, Leases, Origin, Partial, Scratch, Task, Value};

#[derive(Deserialize)]
struct Index {
    arrays: BTreeMap<String, BTreeMap<String, String>>,
}

fn golden() -> (PathBuf, Index) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/mapreduce");
    let index = std::fs::read_to_string(folder.join("index.json")).unwrap();
    (folder, serde_json::from_str(&index).unwrap())
}

fn reduction(path: &Path, op: Op) -> Task {
    let input = Input::npy(path).unwrap().flat();
    Task::of_files(vec![input; op.inputs()], Kind::Reduce(op))
}

fn run(task: &Task, threads: usize) -> Partial {
    Crew::here(threads).run(task, None, &mut |_| {}).unwrap()
}

fn value(task: &Task, partial: &Partial) -> Value {
    let Partial::Reduce(state) = partial else {
        panic!("no reduction: {partial:?}");
    };
    state.value(task.dtype()).unwrap()
}

#[test]
fn reductions_are_those_of_python() {
    let (folder, index) = golden();
    for (name, answers) in index.arrays {
        for op in Op::ALL {
            let task = reduction(&folder.join(format!("{name}.npy")), op);
            let got = value(&task, &run(&task, 2));
            let expected = &answers[op.name()];
            let same = match got {
                Value::Int(got) => expected.parse() == Ok(got),
                Value::Float(got) => expected.parse() == Ok(got),
            };
            assert!(same, "{op} of {name}: {got}, expected {expected}");
        }
    }
}

#[test]
fn any_cut_has_the_same_state() {
    let (folder, index) = golden();
    for name in index.arrays.keys() {
        for op in Op::ALL {
            let task = reduction(&folder.join(format!("{name}.npy")), op);
            let prepared = task.prepare().unwrap();
            let mut results = [1, 7, 1000, 3001].map(|part_rows| {
                let mut leases = Leases::of(task.rows(), part_rows);
                let mut all = task.empty();
                let mut scratch = Scratch::default();
                while let Some(part) = leases.lease(0) {
                    let partial = prepared.compute(part, &mut scratch).unwrap();
                    // As it comes from another process.
                    let text = serde_json::to_string(&partial).unwrap();
                    all.merge(serde_json::from_str(&text).unwrap());
                }
                serde_json::to_string(&all).unwrap()
            });
            results.sort();
            assert_eq!(results[0], results[3], "{op} of {name}");
        }
    }
}

#[test]
fn specials_come_through() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.raw");
    for (values, sum, min) in [
        (&[1.0, f64::NAN, -1.0][..], f64::NAN, f64::NAN),
        (&[f64::INFINITY, 1.0], f64::INFINITY, 1.0),
        (&[-0.0, 0.0], 0.0, -0.0),
        (&[0.0, -0.0, 3.0], 3.0, -0.0),
        (
            &[f64::NEG_INFINITY, f64::INFINITY],
            f64::NAN,
            f64::NEG_INFINITY,
        ),
    ] {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        std::fs::write(&path, bytes).unwrap();
        for (op, expected) in [(Op::Sum, sum), (Op::Min, min)] {
            let input = Input::raw(&path, Dtype::F64, 1).unwrap();
            let task = Task::of_files(vec![input], Kind::Reduce(op));
            let got = value(&task, &run(&task, 1)).as_f64();
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{op} of {values:?}: {got}");
        }
    }
}

#[test]
fn nothing_has_a_sum_but_no_mean() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.raw");
    std::fs::write(&path, []).unwrap();
    for op in Op::ALL {
        let input = Input::raw(&path, Dtype::F32, 1).unwrap();
        let task = Task::of_files(vec![input; op.inputs()], Kind::Reduce(op));
        let Partial::Reduce(state) = run(&task, 3) else {
            panic!("no reduction");
        };
        let has_one = matches!(op, Op::Sum | Op::Dot | Op::Count);
        assert_eq!(state.value(Dtype::F32).is_ok(), has_one, "{op}");
    }
}

#[test]
fn columns_in_memory() {
    let values = [1e16, 1.0, -1e16, 3.0];
    assert_eq!(exact_sum(&values), 4.0);
    assert_eq!(exact_avg(&values), Some(1.0));
    assert_eq!(exact_dot(&values, &[1.0; 4]), 4.0);
    assert_eq!(exact_var(&[2.0, 4.0]), Some(1.0));
    assert_eq!(exact_var(&[]), None);
    // What the difference of rounded sums gets wrong.
    let near: Vec<f64> = (0..1000).map(|i| 1e9 + f64::from(i % 2)).collect();
    assert_eq!(exact_var(&near), Some(0.25));
}

#[test]
fn expressions_are_computed_before_reductions() {
    let (folder, index) = golden();
    let input = |name: &str| {
        Input::npy(&folder.join(format!("{name}.npy")))
            .unwrap()
            .flat()
    };
    let sum = |inputs, map: &str| {
        let mut task = Task::of_files(inputs, Kind::Reduce(Op::Sum));
        task.map = Some(map.to_owned());
        value(&task, &run(&task, 2)).as_f64()
    };
    let float = |name: &str, op: &str| index.arrays[name][op].parse::<f64>().unwrap();
    let uniform = || input("uniform");
    assert_eq!(sum(vec![uniform()], "x"), float("uniform", "sum"));
    assert_eq!(sum(vec![uniform()], "select(x >= 0, 1, 0)"), 3000.0);
    assert_eq!(sum(vec![uniform()], "i"), (2999 * 1500) as f64);
    let both = vec![uniform(), input("normal")];
    assert_eq!(sum(both, "select(x < 2, y, 0)"), float("normal", "sum"));
    let mut task = Task::of_files(vec![uniform()], Kind::Reduce(Op::Sum));
    task.map = Some("x + z".to_owned());
    let refused = Crew::here(1).run(&task, None, &mut |_| {}).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("z is input 3, but there are 1"),
        "{refused}"
    );
}

#[test]
fn samples_are_those_of_their_number() {
    let task = Task {
        origin: Origin::Random {
            seed: 1,
            samples: 200_000,
            columns: 2,
        },
        map: Some("select(x * x + y * y < 1, 4, 0)".to_owned()),
        kind: Kind::Reduce(Op::Mean),
    };
    let pi = value(&task, &run(&task, 3)).as_f64();
    assert!((pi - std::f64::consts::PI).abs() < 0.02, "{pi}");
    assert_eq!(value(&task, &run(&task, 1)), Value::Float(pi));
}

#[test]
fn a_job_goes_on_from_its_journal() {
    let (folder, _) = golden();
    let task = reduction(&folder.join("mixed.npy"), Op::Var);
    let expected = run(&task, 1);
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("journal");
    let mut whole = Journal::open(&path, &task, 100).unwrap();
    let crew = |journal: &mut Journal| {
        let mut parts = 0;
        let partial = Crew::here(2)
            .run(&task, Some(journal), &mut |_| parts += 1)
            .unwrap();
        (partial, parts)
    };
    assert_eq!(crew(&mut whole), (expected.clone(), 30));
    let text = std::fs::read(&path).unwrap();
    let ends: Vec<usize> = (0..text.len()).filter(|i| text[*i] == b'\n').collect();
    // Killed after any part, and within one.
    for (cut, left) in [
        (ends[0] + 1, 30),
        (ends[7] + 1, 23),
        (ends[7] + 20, 23),
        (text.len(), 0),
    ] {
        std::fs::write(&path, &text[..cut]).unwrap();
        let mut journal = Journal::open(&path, &task, 999).unwrap();
        assert_eq!(crew(&mut journal), (expected.clone(), left), "cut {cut}");
        assert_eq!(std::fs::read(&path).unwrap().len(), text.len());
    }
    let other = reduction(&folder.join("mixed.npy"), Op::Sum);
    let refused = Journal::open(&path, &other, 100).unwrap_err();
    assert!(
        refused.to_string().contains("not that of this job"),
        "{refused}"
    );
    std::fs::write(&path, "hello\n").unwrap();
    assert!(Journal::open(&path, &task, 100).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"hello\n");
}

#[test]
fn written_columns_are_read_again() {
    let (folder, index) = golden();
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("out.npy");
    let input = Input::npy(&folder.join("normal.npy")).unwrap();
    crate::FileSink::create(&path, input.rows).unwrap();
    let mut task = Task::of_files(vec![input], Kind::Write(path.clone()));
    task.map = Some("2 * x".to_owned());
    assert_eq!(run(&task, 2), Partial::Written(3000));
    let sum = reduction(&path, Op::Sum);
    let expected = 2.0 * index.arrays["normal"]["sum"].parse::<f64>().unwrap();
    assert_eq!(value(&sum, &run(&sum, 1)), Value::Float(expected));
}
