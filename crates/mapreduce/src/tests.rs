//! Jobs against the answers of Python and NumPy, over any cut and any number of threads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::groupby::Grouping;
use crate::hist::Bins;
use crate::kmeans::Centroids;
use crate::philox::Philox;
use crate::reduce::{Op, exact_avg, exact_dot, exact_sum, exact_var};
use crate::sort::Sort;
use crate::topk::Pick;
use crate::{
    Decoded, Dtype, Error, InputFile, InputSource, JobSpec, JobWorkers, Journal, Kind, Leases,
    PartialResult, ResultValue, RowSource as _, Scratch,
};

#[derive(Deserialize)]
struct Index {
    arrays: BTreeMap<String, BTreeMap<String, String>>,
    jobs: Jobs,
}

/// Other answers of NumPy and `math.fsum`.
#[derive(Deserialize)]
struct Jobs {
    hist: Vec<u64>,
    topk: TopAnswer,
    groupby: BTreeMap<u8, String>,
    kmeans: KMeansAnswer,
    map: String,
    /// Hashes of the sorted values' bytes.
    sort: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct TopAnswer {
    values: Vec<i128>,
    indices: Vec<u64>,
}

#[derive(Deserialize)]
struct KMeansAnswer {
    counts: Vec<u64>,
    inertia: String,
    centroids: Vec<String>,
}

fn golden() -> (PathBuf, Index) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/mapreduce");
    let index = std::fs::read_to_string(folder.join("index.json")).unwrap();
    (folder, serde_json::from_str(&index).unwrap())
}

fn reduction(path: &Path, op: Op) -> JobSpec {
    let input = InputFile::npy(path).unwrap().flat();
    JobSpec::of_files(vec![input; op.inputs()], Kind::Reduce(op))
}

fn run(task: &JobSpec, threads: usize) -> PartialResult {
    JobWorkers::here(threads)
        .run(task, None, &mut |_| {})
        .unwrap()
}

fn value(task: &JobSpec, partial: &PartialResult) -> ResultValue {
    let PartialResult::Reduce(state) = partial else {
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
                ResultValue::Int(got) => expected.parse() == Ok(got),
                ResultValue::Float(got) => expected.parse() == Ok(got),
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
                    // Through JSON, as from another process.
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
            let input = InputFile::raw(&path, Dtype::F64, 1).unwrap();
            let task = JobSpec::of_files(vec![input], Kind::Reduce(op));
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
        let input = InputFile::raw(&path, Dtype::F32, 1).unwrap();
        let task = JobSpec::of_files(vec![input; op.inputs()], Kind::Reduce(op));
        let PartialResult::Reduce(state) = run(&task, 3) else {
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
    // The difference of rounded sums is wrong here.
    let near: Vec<f64> = (0..1000).map(|i| 1e9 + f64::from(i % 2)).collect();
    assert_eq!(exact_var(&near), Some(0.25));
}

#[test]
fn expressions_are_computed_before_reductions() {
    let (folder, index) = golden();
    let input = |name: &str| {
        InputFile::npy(&folder.join(format!("{name}.npy")))
            .unwrap()
            .flat()
    };
    let sum = |inputs, map: &str| {
        let mut task = JobSpec::of_files(inputs, Kind::Reduce(Op::Sum));
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
    let mut task = JobSpec::of_files(vec![uniform()], Kind::Reduce(Op::Sum));
    task.map = Some("x + z".to_owned());
    let refused = JobWorkers::here(1)
        .run(&task, None, &mut |_| {})
        .unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("z is input 3, but there are 1"),
        "{refused}"
    );
}

#[test]
fn samples_are_those_of_their_number() {
    let task = JobSpec {
        origin: InputSource::Random {
            seed: 1,
            samples: 200_000,
            columns: 2,
        },
        map: Some("select(x * x + y * y < 1, 4, 0)".to_owned()),
        wgsl: None,
        block: None,
        kind: Kind::Reduce(Op::Mean),
    };
    let pi = value(&task, &run(&task, 3)).as_f64();
    assert!((pi - std::f64::consts::PI).abs() < 0.02, "{pi}");
    assert_eq!(value(&task, &run(&task, 1)), ResultValue::Float(pi));
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
        let partial = JobWorkers::here(2)
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
    let input = InputFile::npy(&folder.join("normal.npy")).unwrap();
    crate::FileSink::create(&path, Dtype::F64, &[input.rows]).unwrap();
    let mut task = JobSpec::of_files(vec![input], Kind::Write(path.clone()));
    task.map = Some("2 * x".to_owned());
    assert_eq!(run(&task, 2), PartialResult::Written(3000));
    let sum = reduction(&path, Op::Sum);
    let expected = 2.0 * index.arrays["normal"]["sum"].parse::<f64>().unwrap();
    assert_eq!(value(&sum, &run(&sum, 1)), ResultValue::Float(expected));
}

#[test]
fn other_jobs_are_those_of_numpy() {
    let (folder, Index { jobs, .. }) = golden();
    let path = |name: &str| folder.join(format!("{name}.npy"));
    let flat = |name: &str| InputFile::npy(&path(name)).unwrap().flat();

    let bins = Bins::new(-2.5, 2.5, 16).unwrap();
    let hist = JobSpec::of_files(vec![flat("normal")], Kind::Hist(bins));
    let PartialResult::Hist(counts) = run(&hist, 2) else {
        panic!("no counts");
    };
    assert_eq!(counts.counts(), jobs.hist);

    let pick = Pick {
        k: 5,
        largest: true,
        dtype: Dtype::I64,
    };
    let top = JobSpec::of_files(vec![flat("int64")], Kind::TopK(pick));
    let PartialResult::TopK(top) = run(&top, 2) else {
        panic!("no values");
    };
    let expected = jobs.topk.values.into_iter().map(ResultValue::Int);
    let expected: Vec<_> = expected.zip(jobs.topk.indices).collect();
    assert_eq!(top.values(), expected);

    let grouping = Grouping {
        op: Op::Sum,
        keys: Dtype::U8,
        values: Dtype::F64,
    };
    let inputs = vec![flat("uint8"), flat("mixed")];
    let groups = JobSpec::of_files(inputs, Kind::GroupBy(grouping));
    let PartialResult::GroupBy(groups) = run(&groups, 2) else {
        panic!("no groups");
    };
    let text = |(key, value): (i128, ResultValue)| (key, ResultValue::Float(value.as_f64()));
    let expected = jobs.groupby.iter();
    let expected =
        expected.map(|(key, sum)| (i128::from(*key), ResultValue::Float(sum.parse().unwrap())));
    assert!(groups.values().into_iter().map(text).eq(expected));

    let mut map = JobSpec::of_files(vec![flat("uniform"), flat("normal")], Kind::Reduce(Op::Sum));
    map.map = Some("x * x - 3 * y".to_owned());
    assert_eq!(
        value(&map, &run(&map, 2)),
        ResultValue::Float(jobs.map.parse().unwrap())
    );
}

#[test]
fn clusters_are_those_of_numpy() {
    let (folder, Index { jobs, .. }) = golden();
    let input = InputFile::npy(&folder.join("float32.npy")).unwrap();
    let mut bytes = vec![0; 4 * input.row_bytes() as usize];
    input.open().unwrap().read(0..4, &mut bytes).unwrap();
    let (mut decoded, mut room) = (Decoded::default(), Vec::new());
    let first = decoded.decode(input.dtype, &bytes);
    let mut centroids = Centroids {
        k: 4,
        columns: 10,
        values: first.nearest(&mut room).to_vec(),
    };
    for iteration in 1..=5 {
        let kind = Kind::KMeans(centroids.clone());
        let task = JobSpec::of_files(vec![input.clone()], kind);
        let PartialResult::KMeans(assigned) = run(&task, 2) else {
            panic!("no clusters");
        };
        centroids = assigned.means(&centroids);
        if iteration == 5 {
            assert_eq!(assigned.rows(), jobs.kmeans.counts);
            assert_eq!(Ok(assigned.inertia()), jobs.kmeans.inertia.parse());
        }
    }
    let expected = jobs.kmeans.centroids.iter();
    let expected: Vec<f64> = expected.map(|text| text.parse().unwrap()).collect();
    assert_eq!(centroids.values, expected);
}

/// Memory that is too little for columns of 400,000 f64.
const LITTLE: u64 = 4 << 20;

fn sorted(
    input: &InputFile,
    out: &Path,
    threads: usize,
    memory: u64,
    journal: Option<&Path>,
) -> Sort {
    let sort = Sort {
        input: input.clone(),
        out: out.to_owned(),
        memory,
        journal: journal.map(Path::to_owned),
    };
    let sorted = sort
        .run(&mut JobWorkers::here(threads), &mut |_, _| {})
        .unwrap();
    assert_eq!(sorted.rows, input.rows);
    assert_eq!(sorted.in_memory, memory > LITTLE && journal.is_none());
    sort
}

/// The values of a `.npy` file with one axis.
fn values_of(path: &Path) -> (Dtype, Vec<u8>) {
    let input = InputFile::npy(path).unwrap();
    let mut bytes = vec![0; input.bytes() as usize];
    input
        .open()
        .unwrap()
        .read(0..input.rows, &mut bytes)
        .unwrap();
    (input.dtype, bytes)
}

/// FNV-1a, as in scripts/golden/mapreduce.py.
fn hash(bytes: &[u8]) -> String {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

#[test]
fn sorted_columns_are_those_of_numpy() {
    let (folder, Index { jobs, .. }) = golden();
    let home = tempfile::tempdir().unwrap();
    let [out, journal] = ["out.npy", "journal"].map(|name| home.path().join(name));
    for (name, expected) in jobs.sort {
        let input = InputFile::npy(&folder.join(format!("{name}.npy")))
            .unwrap()
            .flat();
        for (threads, journal) in [(1, None), (3, Some(&journal))] {
            sorted(
                &input,
                &out,
                threads,
                1 << 30,
                journal.map(PathBuf::as_path),
            );
            let (dtype, bytes) = values_of(&out);
            assert_eq!(dtype, input.dtype);
            assert_eq!(hash(&bytes), expected, "{name} over {threads} threads");
        }
        let left = std::fs::read_dir(home.path()).unwrap().count();
        assert_eq!(left, 1, "something is left beside {}", out.display());
    }
}

/// Columns that samples do not see through: few values, many equal ones, all in order.
fn columns_to_sort(rows: u64) -> Vec<(&'static str, Vec<f64>)> {
    let random = Philox::new(41);
    let column = |f: &dyn Fn(u64) -> f64| (0..rows).map(f).collect();
    vec![
        ("any", column(&|i| f64::from_bits(random.word(i, 0)))),
        ("signs", column(&|i| if i % 3 == 0 { -0.0 } else { 0.0 })),
        ("few", column(&|i| (random.uniform(i, 0) * 5.0).floor())),
        ("one", column(&|i| if i == 77 { -1.0 } else { 2.0 })),
        ("falling", column(&|i| -(i as f64))),
        ("skewed", column(&|i| (random.uniform(i, 0) * 700.0).exp())),
    ]
}

#[test]
fn sorts_larger_than_memory_have_the_same_bits() {
    let home = tempfile::tempdir().unwrap();
    let [path, out, journal] = ["x.raw", "out.npy", "journal"].map(|name| home.path().join(name));
    let rows = 400_000;
    for (name, values) in columns_to_sort(rows) {
        let bytes = |values: &[f64]| -> Vec<u8> {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes());
            bytes.collect()
        };
        std::fs::write(&path, bytes(&values)).unwrap();
        let mut expected = values;
        expected.sort_unstable_by(f64::total_cmp);
        let input = InputFile::raw(&path, Dtype::F64, 1).unwrap();
        for (threads, memory, journal) in [
            (1, 1 << 30, None),
            (2, 1 << 30, None),
            (3, LITTLE, None),
            (2, LITTLE, Some(journal.as_path())),
        ] {
            sorted(&input, &out, threads, memory, journal);
            let same = values_of(&out).1 == bytes(&expected);
            assert!(same, "{name} over {threads} threads with {memory} bytes");
        }
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 2);
    }
}

#[test]
fn a_sort_goes_on_from_its_journals() {
    let home = tempfile::tempdir().unwrap();
    let [path, out, journal] = ["x.raw", "out.npy", "journal"].map(|name| home.path().join(name));
    let random = Philox::new(42);
    let bytes: Vec<u8> = (0..300_000)
        .flat_map(|i| random.word(i, 0).to_le_bytes())
        .collect();
    std::fs::write(&path, bytes).unwrap();
    let input = InputFile::raw(&path, Dtype::U64, 1).unwrap();
    sorted(&input, &out, 1, 1 << 30, None);
    let expected = values_of(&out);
    let sort = Sort {
        input,
        out: out.clone(),
        memory: LITTLE,
        journal: Some(journal.clone()),
    };
    // Killed after some parts of the first half, and of the second.
    for stop_after in [3, 8] {
        let mut parts = 0;
        let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            sort.run(&mut JobWorkers::here(1), &mut |_, _| {
                parts += 1;
                assert!(parts < stop_after, "killed");
            })
        }));
        assert!(stopped.is_err() && journal.exists());
        let mut more = 0;
        sort.run(&mut JobWorkers::here(2), &mut |_, _| more += 1)
            .unwrap();
        assert!(more > 0 && values_of(&out) == expected);
        let mut all = 0;
        sort.run(&mut JobWorkers::here(1), &mut |_, _| all += 1)
            .unwrap();
        assert_eq!(more + stop_after, all, "parts were computed twice");
    }
    // Without the second half's partial output the sort cannot be resumed.
    let gather = home.path().join("journal.gather0");
    std::fs::write(&gather, "").unwrap();
    let gone = sort
        .run(&mut JobWorkers::here(1), &mut |_, _| {})
        .unwrap_err();
    assert!(matches!(gone, Error::Gone { .. }), "{gone}");
}
