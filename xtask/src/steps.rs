//! The steps of a test run, one after the other, with their times and one closing line.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::cargo_test::TestLog;
use crate::extent::{LONG, TestExtent};
use crate::nextest::{self, NextestLog};
use crate::tally::TestTally;
use crate::{
    asan, darwin, deny, docs, fuzz, instructions, long_record, mlx, mlx_engine, mlx_gpu, mlx_tools,
    models, mpi, neon, package, process, rdma, release, repo, sdk, tidy, wheel,
};

/// A step of a test run. `cargo xtask test` runs those of [`DEFAULT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TestStep {
    /// Fetch and make the models that tests read.
    Models,
    /// MLX's libraries, which the engine's tests open.
    Mlx,
    /// rustfmt, check only.
    Fmt,
    /// clippy over all targets, warnings denied.
    Clippy,
    /// The rules of the house.
    Tidy,
    /// The programs of the tests, and paceline.
    Build,
    /// Unit and integration tests.
    Unit,
    /// Examples in the documentation.
    Doc,
    /// Clients that others wrote, against a live server.
    Sdk,
    /// The package for Python, in an environment of its own.
    Wheel,
    /// Pages made of definitions, tutorials, and samples for schedulers.
    Docs,
    /// Packages, the C library, service units and samples.
    Package,
    /// Programs, wheels and packages for other machines, by Zig.
    Release,
    /// MLX's own tools, and programs that use MLX.
    MlxTools,
    /// The MLX engine on this machine's GPU.
    MlxGpu,
    /// Array jobs on a graphics processor, lavapipe where there is no other.
    Gpu,
    /// Groups over MPI, by mpirun.
    Mpi,
    /// Rings of Rust and real MLX ranks; the unit tests have them too.
    MlxRing,
    /// `cargo check` for Apple silicon.
    Darwin,
    /// The kernel tests for AArch64 under QEMU.
    Neon,
    /// Instructions of the AVX2 kernels, counted by callgrind.
    Instructions,
    /// The fuzz targets compile.
    Fuzz,
    /// Unsafe code under AddressSanitizer.
    Asan,
    /// Ranks over real verbs in a virtual machine.
    Rdma,
    /// Licences and sources of dependencies.
    Deny,
}

/// The default steps of `cargo xtask test`: stages one after the other, the lanes of a stage in
/// parallel. Downloads and Python, which use one core at most, overlap with compilers. The unit
/// tests have the machine for themselves: many wait for other processes.
pub(crate) const DEFAULT: [&[&[TestStep]]; 4] = [
    &[
        &[TestStep::Models, TestStep::Mlx],
        &[
            TestStep::Fmt,
            TestStep::Tidy,
            TestStep::Clippy,
            TestStep::Build,
        ],
    ],
    &[&[TestStep::Unit]],
    &[
        &[TestStep::Doc, TestStep::Mpi],
        &[TestStep::MlxTools, TestStep::Gpu],
    ],
    &[&[TestStep::Sdk], &[TestStep::Wheel, TestStep::Docs]],
];

/// The steps of the long run besides: packages in fresh roots, made of what other machines get.
pub(crate) const LONG_ONLY: [&[&[TestStep]]; 1] = [&[&[TestStep::Release, TestStep::Package]]];

impl TestStep {
    /// The name as `--only` takes it.
    fn name(self) -> String {
        let value = self.to_possible_value().expect("no step is hidden");
        value.get_name().to_owned()
    }

    fn run(self, extent: TestExtent) -> Result<TestTally> {
        match self {
            TestStep::Models => models::run(None),
            TestStep::Mlx => Ok(mlx_engine::run(&mut |line| println!("{line}"))),
            TestStep::Fmt => {
                cargo_check(self, &["fmt", "--all", "--check", "--", "--color", "never"])
            }
            TestStep::Clippy => cargo_check(
                self,
                &[
                    "clippy",
                    "--release",
                    "--workspace",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ],
            ),
            TestStep::Tidy => tidy(),
            TestStep::Build => cargo_check(
                self,
                &["test", "--release", "--workspace", "--tests", "--no-run"],
            ),
            TestStep::Unit => match nextest::command() {
                Ok(command) => unit(command, extent),
                Err(error) => {
                    println!("{error:#}: the tests take twice as long");
                    cargo_test(self, "--tests", extent)
                }
            },
            TestStep::Doc => cargo_test(self, "--doc", extent),
            TestStep::Sdk => sdk::run(None, extent, &mut |line| println!("{line}")),
            TestStep::Wheel => wheel::run(None, extent, &mut |line| println!("{line}")),
            TestStep::Docs => docs::run(docs::ReferencePages::Check, extent, &mut |line| {
                println!("{line}")
            }),
            TestStep::Release => {
                release::run(release::Builds::Once, &mut |line| println!("{line}"))
            }
            TestStep::Package => package::run(extent, &mut |line| println!("{line}")),
            TestStep::MlxTools => mlx_tools::run(None, &mut |line| println!("{line}")),
            TestStep::MlxGpu => mlx_gpu::run(&mut |line| println!("{line}")),
            TestStep::Gpu => gpu(extent),
            TestStep::Mpi => mpi::run(&mut |line| println!("{line}")),
            TestStep::MlxRing => mlx::run(&mut |line| println!("{line}")),
            TestStep::Darwin => darwin::run(&mut |line| println!("{line}")),
            TestStep::Neon => neon::run(&mut |line| println!("{line}")),
            TestStep::Instructions => instructions::run(false, &mut |line| println!("{line}")),
            TestStep::Fuzz => fuzz::check(&mut |line| println!("{line}")),
            TestStep::Asan => asan::run(&mut |line| println!("{line}")),
            TestStep::Rdma => rdma::run(&mut |line| println!("{line}")),
            TestStep::Deny => deny::run(&mut |line| println!("{line}")),
        }
    }
}

/// Runs `steps` one after the other. See [`run_stages`].
pub(crate) fn run(steps: &[TestStep], extent: TestExtent) -> bool {
    run_stages(&[&[steps]], extent)
}

/// Runs `stages` in order, all steps even when one fails. Prints a table, the names of what failed
/// and what was skipped, and the closing line. True when nothing failed.
pub(crate) fn run_stages(stages: &[&[&[TestStep]]], extent: TestExtent) -> bool {
    let mut total = TestTally::default();
    let mut table = Vec::new();
    let outcomes: Vec<StepOutcome> = stages
        .iter()
        .flat_map(|lanes| run_lanes(lanes, extent))
        .collect();
    long_run(&outcomes, extent);
    for (name, time, tally) in outcomes {
        table.push(row(&name, time, &tally));
        total.add(tally);
    }
    println!("\nstep      seconds  result");
    table.iter().for_each(|row| println!("{row}"));
    total.print_names();
    println!("{total}");
    total.failed == 0
}

type StepOutcome = (String, Duration, TestTally);

/// Records a long run; tells at the end of another how old the record is.
fn long_run(outcomes: &[StepOutcome], extent: TestExtent) {
    let rows: Vec<_> = outcomes
        .iter()
        .map(|(name, time, tally)| (name.as_str(), *time, tally))
        .collect();
    match extent {
        TestExtent::Long => match long_record::write(&rows) {
            Ok(()) => println!("benches/results/long-run.tsv has this run: commit it"),
            Err(error) => println!("this long run is not recorded: {error:#}"),
        },
        TestExtent::Default if outcomes.iter().any(|(name, ..)| name == "unit") => {
            println!("\n{}", long_record::describe());
        }
        TestExtent::Default => {}
    }
}

/// Runs lanes in parallel, the steps of each in order; outcomes are in lane order. Output of lanes
/// is interleaved; each step has a log of its own.
fn run_lanes(lanes: &[&[TestStep]], extent: TestExtent) -> Vec<StepOutcome> {
    let lane = |steps: &[TestStep]| -> Vec<StepOutcome> {
        steps.iter().map(|step| run_step(*step, extent)).collect()
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = lanes
            .iter()
            .map(|steps| scope.spawn(move || lane(steps)))
            .collect();
        let joined = running.into_iter().map(|lane| lane.join());
        let ended = joined.map(|lane| lane.unwrap_or_else(|why| resume_unwind(why)));
        ended.flatten().collect()
    })
}

fn run_step(step: TestStep, extent: TestExtent) -> StepOutcome {
    println!("== {}", step.name());
    let start = Instant::now();
    let tally = step.run(extent).unwrap_or_else(|error| {
        println!("error: {error:#}");
        TestTally::failure(&format!("{}: {error:#}", step.name()))
    });
    let time = start.elapsed();
    println!("== {} ended after {:.1} s", step.name(), time.as_secs_f64());
    (step.name(), time, tally)
}

fn row(name: &str, time: Duration, tally: &TestTally) -> String {
    format!("{name:9} {:7.1}  {tally}", time.as_secs_f64())
}

/// A cargo command that passes or fails as a whole; its output is shown but for progress.
fn cargo_check(step: TestStep, arguments: &[&str]) -> Result<TestTally> {
    let mut command = repo::cargo();
    command.args(arguments);
    let passed = process::stream(command, &process::log_path(&step.name()), |line| {
        if !process::is_progress(line) {
            println!("{line}");
        }
    })?;
    Ok(TestTally::check(&step.name(), passed))
}

/// Prints every finding; fails when one is an error.
pub(crate) fn tidy() -> Result<TestTally> {
    let findings = tidy::run()?;
    findings.iter().for_each(|finding| println!("{finding}"));
    let errors = findings.iter().filter(|finding| finding.is_error()).count();
    println!(
        "tidy: {errors} errors, {} warnings",
        findings.len() - errors
    );
    Ok(TestTally::check(
        &format!("tidy: {errors} errors"),
        errors == 0,
    ))
}

/// Clippy and tests of the crates that have the feature `gpu`, with it; tests say which adapter
/// they ran on, or that there is none.
fn gpu(extent: TestExtent) -> Result<TestTally> {
    const CRATES: [&str; 6] = [
        "--release",
        "-p",
        "paceline-gpu",
        "-p",
        "paceline-mapreduce",
        "--features=paceline-mapreduce/gpu",
    ];
    let mut clippy = vec!["clippy"];
    clippy.extend(CRATES);
    clippy.extend(["--all-targets", "--", "-D", "warnings"]);
    let mut tally = cargo_check(TestStep::Gpu, &clippy)?;
    let mut command = repo::cargo();
    command.arg("test").args(CRATES);
    command.args(["--no-fail-fast", "--tests", "--", "--show-output"]);
    if extent == TestExtent::Long {
        command.env(LONG.0, LONG.1);
    }
    let mut log = TestLog::new();
    let success = process::stream(command, &process::log_path("gpu-tests"), |line| {
        if log.read(line) && !process::is_progress(line) {
            println!("{line}");
        }
    })?;
    tally.add(log.finish("gpu", success));
    Ok(tally)
}

/// All tests but those of documentation, each as a process of its own, by `.config/nextest.toml`.
fn unit(mut command: Command, extent: TestExtent) -> Result<TestTally> {
    command.args(["run", "--release", "--workspace", "--color", "never"]);
    command.args(["--no-fail-fast", "--success-output", "immediate"]);
    // One more than cores: many tests wait for other processes.
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    command.args(["--test-threads", &(cores + 1).to_string()]);
    point_to_models(&mut command, extent)?;
    let mut log = NextestLog::default();
    let success = process::stream(command, &process::log_path("unit"), |line| {
        if log.read(line) {
            println!("{line}");
        }
    })?;
    Ok(log.finish("unit", success))
}

/// Tests of the whole workspace, of the kind that `kind` selects, by the plain harness.
fn cargo_test(step: TestStep, kind: &str, extent: TestExtent) -> Result<TestTally> {
    let mut command = repo::cargo();
    command.args(["test", "--release", "--workspace", "--no-fail-fast", kind]);
    command.args(["--", "--show-output"]);
    point_to_models(&mut command, extent)?;
    let mut log = TestLog::new();
    let success = process::stream(command, &process::log_path(&step.name()), |line| {
        if log.read(line) && !process::is_progress(line) {
            println!("{line}");
        }
    })?;
    Ok(log.finish(&step.name(), success))
}

/// Passes on the test models' folder, so that the tests read what the models step made, a Python
/// with MLX, and MLX's C layer. Tests that lack one say so by name.
fn point_to_models(command: &mut Command, extent: TestExtent) -> Result<()> {
    command.env(
        "PACELINE_TEST_MODELS",
        models::folder().context("find the test models")?,
    );
    if extent == TestExtent::Long {
        command.env(LONG.0, LONG.1);
    }
    match mlx::python() {
        Ok(python) => drop(command.env(mlx::PYTHON, python)),
        Err(error) => println!("no Python with MLX: {error:#}"),
    }
    match mlx_engine::library() {
        Ok(library) => drop(command.env(mlx_engine::LIBRARY, library)),
        Err(error) => println!("no MLX to open: {error:#}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_seconds_and_counts() {
        let row = row(
            "fmt",
            Duration::from_millis(1300),
            &TestTally::check("fmt", true),
        );
        assert_eq!(row, "fmt           1.3  1 passed, 0 failed, 0 skipped");
    }
}
