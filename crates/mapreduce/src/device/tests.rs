//! Tests of every device, one suite: the bits of the definition, block by block and job by job.
//!
//! With the feature `gpu` it also runs on this machine's graphics processor; on lavapipe in CI.
//! Where there is none, those tests are skipped by name.

use std::path::Path;
use std::sync::Arc;

use super::{BlockRows, Column, ComputeDevice, Cpu, DeviceChoice, Lost};
use crate::expr::ExprProgram;
use crate::groupby::Grouping;
use crate::hist::Bins;
use crate::jobs::{Grouped, joined};
use crate::kmeans::Centroids;
use crate::philox::Philox;
use crate::reduce::Op;
use crate::sort::Sort;
use crate::topk::Pick;
use crate::{
    Dtype, InputFile, InputSource, JobSpec, JobWorkers, Kind, Leases, PartialResult, Scratch,
};

/// Expressions that devices compute, and some that they may leave to the CPU.
const EXPRESSIONS: [&str; 8] = [
    "x",
    "x + y * 2 - z / w",
    "sqrt(abs(x)) + floor(y) - ceil(z) * trunc(w) + round(x * 3)",
    "select(x > y && !(z <= w) || x == 0, min(x, y), max(z, -w))",
    "i * 0.5 + x ^ 2 + y ^ 1",
    "select(x != x, 1, x / 0)",
    "1e308 * x + pi - nan",
    "sin(x) + y % 3 + x ^ 0.5",
];

fn random(seed: u64, n: usize, range: f64) -> Vec<f64> {
    let all = Philox::new(seed);
    let value = |i: u64| match i % 50 {
        0 => [0.0, -0.0, f64::NAN, f64::INFINITY][(i / 50 % 4) as usize],
        1 => f64::from_bits(all.word(i, 3) >> 12),
        _ => (all.uniform(i, 0) - 0.5) * ((all.uniform(i, 1) - 0.5) * range).exp2(),
    };
    (0..n as u64).map(value).collect()
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Calls of a device against the definition.
fn blocks_conform(device: &dyn ComputeDevice) {
    for n in [1, 300, 20_000] {
        let data: Vec<Vec<f64>> = (0..4).map(|i| random(i, n, 80.0)).collect();
        let mut all: Vec<Column<'_>> = data.iter().map(|column| Column::Values(column)).collect();
        expressions_conform(device, &all, n as u64);
        reductions_conform(device, &all, n as u64);
        all[1] = Column::Random {
            seed: 77 << 33 | 5,
            dimension: 3,
        };
        expressions_conform(device, &all, n as u64);
        sorts_conform(device, &data[0]);
    }
    // Lengths beyond a group of the device's, and beyond a pass.
    sorts_conform(device, &random(11, 2049, 80.0));
    sorts_conform(device, &random(12, 70_001, 80.0));
    nearest_conform(device);
}

fn rows<'a>(
    columns: &'a [Column<'a>],
    count: u64,
    program: Option<&'a ExprProgram>,
) -> BlockRows<'a> {
    BlockRows {
        count,
        first: 3 << 32,
        columns,
        program,
    }
}

fn expressions_conform(device: &dyn ComputeDevice, columns: &[Column<'_>], n: u64) {
    for text in EXPRESSIONS {
        let program = ExprProgram::parse(text, columns.len()).unwrap();
        if !device.maps(&program) {
            assert!(text.contains("sin"), "{text} has a form on every device");
            continue;
        }
        let rows = rows(columns, n, Some(&program));
        let [got, expected] = [device, &Cpu].map(|device| bits(&device.values(&rows).unwrap()));
        assert!(got == expected, "{text}, {n} rows");
        let [got, expected] = [device, &Cpu].map(|device| device.sum(&rows).unwrap().to_bytes());
        assert_eq!(got, expected, "the sum of {text}, {n} rows");
    }
}

fn reductions_conform(device: &dyn ComputeDevice, columns: &[Column<'_>], n: u64) {
    let bins = Bins::new(-2.0, 2.0, 37).unwrap();
    let many = Bins::new(-100.0, 0.5, 9000).unwrap();
    for columns in [&columns[..1], &columns[..2]] {
        let rows = rows(columns, n, None);
        let both = [device, &Cpu];
        let [got, expected] = both.map(|device| device.sum(&rows).unwrap().to_bytes());
        assert_eq!(got, expected, "sum of {n}");
        let [got, expected] = both.map(|device| device.products(&rows).unwrap().to_bytes());
        assert_eq!(got, expected, "products of {n}, {} columns", columns.len());
        let [got, expected] = both.map(|device| device.extremes(&rows).unwrap());
        assert_eq!(got, expected, "extremes of {n}");
        for bins in [&bins, &many] {
            let [got, expected] = both.map(|device| device.hist(&rows, bins).unwrap());
            assert!(got == expected, "{} bins of {n}", bins.count);
        }
    }
    let words: Vec<u8> = (0..n)
        .flat_map(|i| (Philox::new(5).word(i, 0) as u32).to_le_bytes())
        .collect();
    for bins in [2, 256, 4096] {
        let [got, expected] = [device, &Cpu].map(|device| device.hist_raw(&words, bins).unwrap());
        assert!(got == expected, "{bins} raw bins of {n}");
    }
}

fn sorts_conform(device: &dyn ComputeDevice, data: &[f64]) {
    for width in [4, 8] {
        let bytes: Vec<u8> = data.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(device.sorts(bytes.len() as u64, width));
        let [got, expected] = [device, &Cpu].map(|device| {
            let mut keys = bytes.clone();
            device.sort(&mut keys, width).unwrap();
            keys
        });
        assert!(
            got == expected,
            "{} keys of {width} bytes",
            bytes.len() / width
        );
    }
}

fn nearest_conform(device: &dyn ComputeDevice) {
    for (k, columns) in [(1u32, 1u32), (17, 16), (64, 3)] {
        let values = random(9, 500 * columns as usize, 4.0);
        let centroids = Centroids {
            k,
            columns,
            values: random(10, (k * columns) as usize, 0.0),
        };
        let found = [device, &Cpu].map(|device| {
            let found = device.nearest(&values, &centroids).unwrap();
            found
                .into_iter()
                .map(|(which, d)| (which, d.to_bits()))
                .collect::<Vec<_>>()
        });
        assert!(found[0] == found[1], "{k} centroids of {columns} columns");
    }
}

/// Jobs of every kind with a device against those without.
fn jobs_conform(device: &Arc<dyn ComputeDevice>) {
    let home = tempfile::tempdir().unwrap();
    for task in tasks(home.path()) {
        let [got, expected] = [Some(device), None].map(|device| {
            let prepared = task.prepare().unwrap();
            let mut scratch = Scratch::on(device.map(Arc::clone), DeviceChoice::Gpu);
            let mut leases = Leases::of(task.rows(), 7001);
            let mut all = task.empty();
            while let Some(part) = leases.lease(0) {
                all.merge(prepared.compute(part, &mut scratch).unwrap());
            }
            match (all, &task.kind) {
                // Groups come in another order from a device.
                (PartialResult::GroupBy(groups), Kind::GroupBy(of) | Kind::Join(of)) => {
                    serde_json::to_string(&Grouped::new(&groups, of.op)).unwrap()
                }
                (all, _) => serde_json::to_string(&all).unwrap(),
            }
        });
        assert!(got == expected, "{task:?}");
    }
    sorted_files_conform(device, home.path());
}

fn column(path: &Path, dtype: Dtype, bytes: Vec<u8>) -> InputFile {
    std::fs::write(path, bytes).unwrap();
    InputFile::raw(path, dtype, 1).unwrap()
}

/// Columns `x` and `y` of f64, `u` of u32, `wide` of u64, and `few` of 700 keys.
fn columns(home: &Path) -> [InputFile; 5] {
    let floats = |seed, n| {
        random(seed, n, 60.0)
            .into_iter()
            .flat_map(f64::to_le_bytes)
            .collect()
    };
    let x = column(&home.join("x"), Dtype::F64, floats(1, 20_000));
    let y = column(&home.join("y"), Dtype::F64, floats(2, 20_000));
    let words = (0..20_000).map(|i| Philox::new(3).word(i, 0));
    let u = column(
        &home.join("u"),
        Dtype::U32,
        words
            .clone()
            .flat_map(|w| (w as u32).to_le_bytes())
            .collect(),
    );
    // Some beyond 2^53: a block of them stays on the CPU.
    let wide = column(
        &home.join("wide"),
        Dtype::U64,
        words.flat_map(|w| (w >> (w % 40)).to_le_bytes()).collect(),
    );
    let few: Vec<u8> = (0..20_000)
        .map(|i| Philox::new(5).word(i, 0) % 700)
        .flat_map(|word| (word as i16).to_le_bytes())
        .collect();
    let few = column(&home.join("few"), Dtype::I16, few);
    [x, y, u, wide, few]
}

fn tasks(home: &Path) -> Vec<JobSpec> {
    let [x, y, u, wide, few] = columns(home);
    let mut points = x.clone();
    (points.rows, points.columns) = (5000, 4);
    let mut tasks: Vec<JobSpec> = Vec::new();
    for op in Op::ALL {
        for input in [&x, &u, &wide] {
            tasks.push(JobSpec::of_files(
                vec![input.clone(); op.inputs()],
                Kind::Reduce(op),
            ));
        }
    }
    let bins = Bins::new(-2.5, 2.5, 16).unwrap();
    let raw = Bins::new(0.0, 2f64.powi(32), 256).unwrap();
    let values = random(4, 12, 1.0)
        .into_iter()
        .map(|v| if v.is_finite() { v } else { 0.0 });
    let centroids = Centroids {
        k: 3,
        columns: 4,
        values: values.collect(),
    };
    let grouping = Grouping {
        op: Op::Sum,
        keys: Dtype::U32,
        values: Dtype::F64,
    };
    tasks.push(JobSpec::of_files(vec![x.clone()], Kind::Hist(bins)));
    tasks.push(JobSpec::of_files(vec![u.clone()], Kind::Hist(raw)));
    tasks.push(JobSpec::of_files(vec![points], Kind::KMeans(centroids)));
    for values in [&x, &wide] {
        let of = Grouping {
            keys: Dtype::I16,
            values: values.dtype,
            ..grouping
        };
        let inputs = vec![few.clone(), values.clone()];
        tasks.push(JobSpec::of_files(inputs, Kind::GroupBy(of)));
    }
    for (op, pair) in [(Op::Sum, "x * y"), (Op::Max, "x - y"), (Op::Count, "x")] {
        // 200 rows of the left table for each of the right one.
        let [mut keys, mut values] = [few.clone(), y.clone()];
        (keys.rows, values.rows) = (5000, 5000);
        let inputs = [few.clone(), x.clone(), keys, values];
        tasks.push(joined(inputs, op, pair.to_owned()));
    }
    tasks.push(JobSpec::of_files(
        vec![u, x.clone()],
        Kind::GroupBy(grouping),
    ));
    tasks.extend(mapped(&x, &y, bins));
    tasks
}

/// Tasks that compute an expression of each row first.
fn mapped(x: &InputFile, y: &InputFile, bins: Bins) -> Vec<JobSpec> {
    let mut tasks = Vec::new();
    let pick = Pick {
        k: 9,
        largest: true,
        dtype: Dtype::F64,
    };
    for kind in [
        Kind::TopK(pick),
        Kind::Reduce(Op::Std),
        Kind::Hist(bins),
        Kind::Reduce(Op::Count),
    ] {
        for map in EXPRESSIONS.map(|text| text.replace('z', "x").replace('w', "y")) {
            let mut task = JobSpec::of_files(vec![x.clone(), y.clone()], kind.clone());
            task.map = Some(map);
            tasks.push(task);
        }
    }
    tasks.push(JobSpec {
        origin: InputSource::Random {
            seed: 36,
            samples: 30_000,
            columns: 4,
        },
        map: Some("select(x ^ 2 + y ^ 2 < 1, 4 + z, w)".to_owned()),
        wgsl: None,
        block: None,
        kind: Kind::Reduce(Op::Var),
    });
    tasks
}

fn sorted_files_conform(device: &Arc<dyn ComputeDevice>, home: &Path) {
    for dtype in [Dtype::F64, Dtype::I32, Dtype::U16] {
        let mut input = InputFile::raw(&home.join("x"), dtype, 1).unwrap();
        input.rows -= 1;
        let sorted = [Some(device), None].map(|device| {
            let sort = Sort {
                input: input.clone(),
                out: home.join("out.npy"),
                memory: 64 << 20,
                journal: None,
            };
            let mut crew =
                JobWorkers::here(1).with_device(device.map(Arc::clone), DeviceChoice::Gpu);
            sort.run(&mut crew, &mut |_, _| {}).unwrap();
            std::fs::read(&sort.out).unwrap()
        });
        assert!(sorted[0] == sorted[1], "{dtype}");
    }
}

#[test]
fn the_cpu_conforms() {
    blocks_conform(&Cpu);
    let device: Arc<dyn ComputeDevice> = Arc::new(Cpu);
    jobs_conform(&device);
}

/// A device that is lost at each call.
#[derive(Debug)]
struct Broken;

fn broken<T>() -> Result<T, Lost> {
    Err(Lost("pulled out".to_owned()))
}

impl ComputeDevice for Broken {
    fn label(&self) -> &str {
        "broken"
    }
    fn rows_max(&self, _row_bytes: u64) -> u64 {
        1000
    }
    fn maps(&self, _program: &ExprProgram) -> bool {
        true
    }
    fn sorts(&self, _bytes: u64, _width: usize) -> bool {
        true
    }
    fn values(&self, _rows: &BlockRows<'_>) -> Result<Vec<f64>, Lost> {
        broken()
    }
    fn sum(&self, _rows: &BlockRows<'_>) -> Result<paceline_base::exact::ExactSum, Lost> {
        broken()
    }
    fn products(&self, _rows: &BlockRows<'_>) -> Result<paceline_base::exact::ExactSum, Lost> {
        broken()
    }
    fn extremes(&self, _rows: &BlockRows<'_>) -> Result<(i64, i64, bool), Lost> {
        broken()
    }
    fn hist(&self, _rows: &BlockRows<'_>, _bins: &Bins) -> Result<Vec<u32>, Lost> {
        broken()
    }
    fn hist_raw(&self, _words: &[u8], _bins: u32) -> Result<Vec<u32>, Lost> {
        broken()
    }
    fn nearest(&self, _values: &[f64], _centroids: &Centroids) -> Result<Vec<(u32, f64)>, Lost> {
        broken()
    }
    fn sort(&self, _keys: &mut [u8], _width: usize) -> Result<(), Lost> {
        broken()
    }
}

#[test]
fn parts_of_a_lost_device_are_computed_elsewhere() {
    let device: Arc<dyn ComputeDevice> = Arc::new(Broken);
    jobs_conform(&device);
    let home = tempfile::tempdir().unwrap();
    let task = tasks(home.path()).swap_remove(0);
    let mut crew = JobWorkers::here(2).with_device(Some(device), DeviceChoice::Gpu);
    let partial = crew.run(&task, None, &mut |_| {}).unwrap();
    assert_eq!(crew.device_parts(), 0);
    assert_eq!(
        partial,
        JobWorkers::here(1).run(&task, None, &mut |_| {}).unwrap()
    );
}

#[test]
fn two_columns_and_an_expression_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let x = column(&home.path().join("x"), Dtype::F64, vec![0; 800]);
    let mut task = JobSpec::of_files(vec![x; 2], Kind::Reduce(Op::Dot));
    task.map = Some("x".to_owned());
    let refused = task.prepare().unwrap_err().to_string();
    assert!(
        refused.contains("dot takes columns as they are"),
        "{refused}"
    );
    task.kind = Kind::Reduce(Op::Sum);
    task.wgsl = Some("fn f(x: f32, y: f32) -> f32 { return x; }".to_owned());
    let refused = task.prepare().unwrap_err().to_string();
    assert!(refused.contains("sum takes no WGSL function"), "{refused}");
}

#[cfg(not(feature = "gpu"))]
#[test]
fn without_graphics_processors_they_are_refused_by_name() {
    let refused = DeviceChoice::Gpu.open().unwrap_err().to_string();
    assert!(refused.contains("cargo feature gpu"), "{refused}");
    assert!(DeviceChoice::Auto.open().unwrap().is_none());
}

/// This machine's graphics processor; `None` with a line where there is none.
#[cfg(feature = "gpu")]
fn graphics(test: &str) -> Option<super::gpu::Graphics> {
    match super::gpu::Graphics::open(true) {
        Ok(device) => {
            eprintln!("{test} runs on {}", device.label());
            Some(device)
        }
        Err(error) => {
            eprintln!("SKIPPED {test}: {error}");
            None
        }
    }
}

#[cfg(feature = "gpu")]
#[test]
fn a_graphics_processor_conforms() {
    let Some(device) = graphics("a_graphics_processor_conforms") else {
        return;
    };
    blocks_conform(&device);
    let device: Arc<dyn ComputeDevice> = Arc::new(device);
    jobs_conform(&device);
}

#[cfg(feature = "gpu")]
#[test]
fn a_graphics_processor_that_is_lost_changes_no_bit() {
    let Some(device) = graphics("a_graphics_processor_that_is_lost_changes_no_bit") else {
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let task = tasks(home.path()).swap_remove(0);
    let alone = JobWorkers::here(1).run(&task, None, &mut |_| {}).unwrap();
    let device = Arc::new(device);
    let mut crew = JobWorkers::here(1).with_device(
        Some(Arc::clone(&device) as Arc<dyn ComputeDevice>),
        DeviceChoice::Gpu,
    );
    assert_eq!(crew.run(&task, None, &mut |_| {}).unwrap(), alone);
    assert!(crew.device_parts() > 0);
    device.lose();
    let before = crew.device_parts();
    assert_eq!(crew.run(&task, None, &mut |_| {}).unwrap(), alone);
    assert_eq!(
        crew.device_parts(),
        before,
        "a lost device has computed parts"
    );
}

#[cfg(feature = "gpu")]
#[test]
fn functions_of_users_are_computed_or_not_answered() {
    let Some(device) = graphics("functions_of_users_are_computed_or_not_answered") else {
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let words = (0..5000u32).flat_map(u32::to_le_bytes).collect();
    let input = column(&home.path().join("u"), Dtype::U32, words);
    let mut task = JobSpec::of_files(vec![input], Kind::Reduce(Op::Sum));
    task.wgsl = Some("fn odd(x: u32) -> u32 { return x % 2u; }".to_owned());
    let refused = JobWorkers::here(1)
        .run(&task, None, &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(refused.contains("needs a graphics processor"), "{refused}");
    let device = Arc::new(device);
    let mut crew = JobWorkers::here(1).with_device(
        Some(Arc::clone(&device) as Arc<dyn ComputeDevice>),
        DeviceChoice::Gpu,
    );
    let crate::PartialResult::Reduce(state) = crew.run(&task, None, &mut |_| {}).unwrap() else {
        panic!("a reduction");
    };
    assert_eq!(state.value(Dtype::F64).unwrap().as_f64(), 2500.0);
    device.lose();
    let refused = crew.run(&task, None, &mut |_| {}).unwrap_err().to_string();
    assert!(refused.contains("lost"), "{refused}");
    task.wgsl = Some("fn two(x: u32, y: u32) -> u32 { return x; }".to_owned());
    let refused = task.prepare().unwrap_err().to_string();
    assert!(
        refused.contains("2 arguments, but there are 1 inputs"),
        "{refused}"
    );
}
