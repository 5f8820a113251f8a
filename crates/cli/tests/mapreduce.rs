//! `paceline mapreduce` as a script calls it. The bits are the same over any number of worker
//! processes, after a killed worker, and after a job that was killed and resumed.

use std::fs;
use std::path::Path;
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::home::TestHome;
use crate::common::{assert_parts, collect, finish, text, until, words};

/// Rows of the columns: seven parts of the smallest size.
const ROWS: u64 = 400_000;

/// Samples of a job that is killed: half a second of computing or more.
const SAMPLES: &str = "10000000";

/// Figures of a run, which differ between two of them.
const FIGURES: [&str; 12] = [
    "device",
    "device_parts",
    "gb_s",
    "node_threads",
    "machine_gb_s",
    "seconds",
    "nodes",
    "threads",
    "lost",
    "memory",
    "buckets",
    "in_memory",
];

/// Numbers for tests, from a linear congruence of Knuth.
fn numbers() -> impl Iterator<Item = u64> {
    let step = |state: &mut u64| {
        *state = state.wrapping_mul(6364136223846793005);
        *state = state.wrapping_add(1442695040888963407);
        Some(*state ^ *state >> 31)
    };
    std::iter::repeat(()).scan(36, move |state, ()| step(state))
}

fn write_npy(path: &Path, descr: &str, shape: &str, values: &[u8]) {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let length = (10 + header.len() + 1).next_multiple_of(64) - 10;
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((length as u16).to_le_bytes());
    bytes.extend(format!("{header:<width$}\n", width = length - 1).bytes());
    bytes.extend(values);
    fs::write(path, bytes).unwrap();
}

/// The last `bytes` bytes of a file: the values of a `.npy` file.
fn values(path: &Path, bytes: usize) -> Vec<u8> {
    let all = fs::read(path).unwrap();
    all[all.len() - bytes..].to_vec()
}

fn bytes_of(values: impl Iterator<Item = f64>) -> Vec<u8> {
    values.flat_map(f64::to_le_bytes).collect()
}

/// A world with columns: values over many binary orders, keys of 1,000 groups, the same rows
/// shuffled, and points of two axes.
pub(crate) fn stocked() -> TestHome {
    let world = TestHome::new();
    let rows: Vec<(f64, u64)> = numbers()
        .zip(numbers().skip(7))
        .take(ROWS as usize)
        .map(|(a, b)| {
            let scale = 2f64.powi((b >> 40) as i32 % 60 - 30);
            (
                (a >> 11) as f64 * scale * if a & 1 == 0 { 1.0 } else { -1.0 },
                b % 1000,
            )
        })
        .collect();
    let mut shuffled = rows.clone();
    shuffled.sort_by_key(|(value, key)| value.to_bits().rotate_left(17) ^ key << 9);
    for (rows, [values, keys]) in [
        (&rows, ["values.npy", "keys.npy"]),
        (&shuffled, ["values2.npy", "keys2.npy"]),
    ] {
        let shape = format!("({ROWS},)");
        let floats = bytes_of(rows.iter().map(|row| row.0));
        write_npy(&world.path("models").join(values), "<f8", &shape, &floats);
        let all: Vec<u8> = rows
            .iter()
            .flat_map(|row| (row.1 as i32).to_le_bytes())
            .collect();
        write_npy(&world.path("models").join(keys), "<i4", &shape, &all);
    }
    let points = bytes_of(rows.iter().map(|row| row.0 % 97.0));
    let shape = format!("({}, 4)", ROWS / 4);
    write_npy(
        &world.path("models").join("points.npy"),
        "<f8",
        &shape,
        &points,
    );
    world
}

fn start(world: &TestHome, args: &[&str]) -> Child {
    let args = ["mapreduce"].into_iter().chain(args.iter().copied());
    world.paceline(args.chain(["--json"])).spawn().unwrap()
}

fn object(child: Child) -> Value {
    let output = collect(child);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The output of a job, without the figures of the run.
fn result(mut object: Value) -> Value {
    let fields = object.as_object_mut().unwrap();
    fields.retain(|name, _| !FIGURES.contains(&name.as_str()));
    object
}

pub(crate) fn json(world: &TestHome, args: &[&str], nodes: &str) -> Value {
    result(object(start(world, &[args, &["--nodes", nodes]].concat())))
}

/// The values of `values.npy` in order.
fn in_order(world: &TestHome) -> Vec<u8> {
    let bytes = values(&world.path("models").join("values.npy"), 8 * ROWS as usize);
    let floats = bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|b| f64::from_le_bytes(*b));
    let mut floats: Vec<f64> = floats.collect();
    floats.sort_unstable_by(f64::total_cmp);
    bytes_of(floats.into_iter())
}

#[test]
fn sorted_files_are_in_order_over_nodes_and_beyond_memory() {
    let world = stocked();
    let expected = in_order(&world);
    let out = world.path("models").join("out.npy");
    for (more, in_memory) in [
        (&["--threads", "1"][..], true),
        (&["--memory", "4M"], false),
        (&["--nodes", "3", "--memory", "8M"], false),
    ] {
        let args = [&["sort", "values.npy", "-o", "out.npy"], more].concat();
        let said = object(start(&world, &args));
        assert_eq!(said["rows"], ROWS);
        assert_eq!(said["in_memory"], in_memory, "{more:?}");
        assert!(values(&out, expected.len()) == expected, "{more:?}");
        let left = fs::read_dir(world.path("models")).unwrap();
        assert_eq!(left.count(), 6, "something is left beside out.npy");
        fs::remove_file(&out).unwrap();
    }
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let world = stocked();
    fs::write(world.path("models").join("bad.npy"), "\u{93}NUMPY").unwrap();
    for (args, code, parts) in [
        (
            &["reduce", "sum", "values.npy", "--device", "tpu"][..],
            2,
            &["--device", "expected auto, cpu or gpu"][..],
        ),
        (
            &["reduce", "sum", "values.npy", "--map", "x; y"],
            1,
            &["expected an operator", "character 2"],
        ),
        (
            &["sort", "values.npy", "-o", "o.npy", "--memory", "1000"],
            1,
            &["1000 bytes of memory are too few"],
        ),
        (
            &["sort", "values.npy", "-o", "o.npy", "--memory", "much"],
            2,
            &["--memory", "expected a number of bytes"],
        ),
        (&["sort", "bad.npy", "-o", "o.npy"], 1, &["bad.npy"]),
        (
            &["groupby", "sum", "values.npy", "keys.npy"],
            1,
            &["by keys of type f64"],
        ),
    ] {
        let output = finish(&mut world.paceline([&["mapreduce"], args].concat()));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert_parts(&args, &said, parts);
    }
}

/// With the feature `gpu` and an adapter, software included; else it is refused by name.
#[test]
fn a_graphics_processor_changes_no_bit() {
    let world = stocked();
    let few: Vec<u8> = (0..5000i32)
        .flat_map(|i| (i * i % 97).to_le_bytes())
        .collect();
    let path = world.path("models").join("few.npy");
    write_npy(&path, "<i4", "(5000,)", &few);
    fs::write(
        world.path("models").join("odd.wgsl"),
        "fn odd(x: i32) -> i32 { return x % 2; }",
    )
    .unwrap();
    for args in [
        &["reduce", "sum", "values.npy"][..],
        &["reduce", "min", "values.npy", "--map", "x ^ 2 - i"],
        &["hist", "values.npy", "--bins", "20"],
        &["kmeans", "points.npy", "-k", "3", "--iterations", "2"],
        &["groupby", "sum", "keys.npy", "values.npy"],
        &["join", "sum", "few.npy", "few.npy", "few.npy", "few.npy"],
    ] {
        let device = [args, &["--device", "gpu", "--json"]].concat();
        let output = finish(&mut world.paceline([&["mapreduce"], &device[..]].concat()));
        let said = text(&output.stderr);
        if !output.status.success() {
            assert!(!said.contains("is lost"), "{said}");
            assert_parts(&args, &said, &["graphics processor"]);
            assert!(!cfg!(feature = "gpu") || said.contains("no graphics processor is found"));
            eprintln!("SKIPPED a_graphics_processor_changes_no_bit: {said}");
            return;
        }
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        eprintln!("{args:?} ran on {}", said["device"]);
        assert!(said["device_parts"].as_u64() > Some(0), "{said}");
        assert_eq!(result(said), json(&world, args, "1"), "{args:?}");
    }
    let odd = [
        "reduce", "sum", "keys.npy", "--wgsl", "odd.wgsl", "--device", "gpu",
    ];
    let by_expression = ["reduce", "sum", "keys.npy", "--map", "x % 2"];
    assert_eq!(json(&world, &odd, "2"), json(&world, &by_expression, "1"));
    // A loop over the rows around each, twice, in parts of any size.
    fs::write(
        world.path("models").join("near.wgsl"),
        "fn f(row: i32) -> f32 {
            var sum = 0.0;
            for (var k = -2; k <= 2; k += 1) { sum += x(row + k, 0); }
            return sum % 64.0;
        }",
    )
    .unwrap();
    let near = words("reduce sum keys.npy --wgsl near.wgsl --device gpu");
    let [one, two] = ["1", "2"].map(|nodes| {
        json(
            &world,
            &[&near[..], &["--halo", "2", "--steps", "2"]].concat(),
            nodes,
        )
    });
    assert_eq!(one, two);
    let beyond = [&["mapreduce"], &near[..], &["--halo", "1"]].concat();
    let output = finish(&mut world.paceline(beyond));
    assert_parts(&near, &text(&output.stderr), &["beyond its halo"]);
}

/// Kills a process, which may have ended by itself.
fn kill(pid: u32) {
    let pid = Pid::from_raw(pid as i32).unwrap();
    let _ = kill_process(pid, Signal::KILL);
}

/// Waits until `done` or the end of a short job.
fn until_in(job: &mut Child, what: &str, mut done: impl FnMut(u32) -> bool) {
    let pid = job.id();
    until(what, || done(pid) || job.try_wait().unwrap().is_some());
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_worker_changes_no_bit() {
    use crate::nodes::processes::all_children;

    let world = stocked();
    let samples = ["montecarlo", "sin(x) * y", "--samples", SAMPLES];
    let sort = ["sort", "values.npy", "-o", "out.npy"];
    let groups = ["groupby", "sum", "keys.npy", "values.npy"];
    for args in [&samples[..], &sort, &groups] {
        let alone = json(&world, args, "1");
        let mut job = start(&world, &[args, &["--nodes", "3"]].concat());
        until_in(&mut job, "workers", |pid| all_children(pid).len() == 3);
        if let Some(worker) = all_children(job.id()).get(1) {
            kill(*worker);
        }
        let said = object(job);
        assert!(said["lost"] == 1 || args != samples, "{said}");
        assert_eq!(result(said), alone, "{args:?}");
    }
    let out = values(&world.path("models").join("out.npy"), 8 * ROWS as usize);
    assert!(out == in_order(&world));
}

/// How many lines a file has.
fn lines(path: &Path) -> usize {
    fs::read(path).map_or(0, |text| text.iter().filter(|c| **c == b'\n').count())
}

#[test]
fn a_killed_job_goes_on_where_it_was() {
    let world = stocked();
    let journal = world.path("models").join("journal");
    for (args, nodes) in [
        (&["montecarlo", "sin(x) * y", "--samples", SAMPLES][..], "2"),
        (&["sort", "values.npy", "-o", "out.npy"], "2"),
    ] {
        let alone = json(&world, args, nodes);
        let args = [args, &["--resume", "journal", "--nodes", nodes]].concat();
        let mut job = start(&world, &args);
        until_in(&mut job, "a part", |_| lines(&journal) > 2);
        kill(job.id());
        collect(job);
        assert!(args[0] == "sort" || lines(&journal) > 2, "it was over");
        assert_eq!(result(object(start(&world, &args))), alone, "{args:?}");
        assert!(!journal.exists());
    }
    let out = values(&world.path("models").join("out.npy"), 8 * ROWS as usize);
    assert!(out == in_order(&world));
}
