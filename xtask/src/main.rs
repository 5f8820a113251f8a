//! Project chores: `cargo xtask --help` lists them.

#![allow(
    clippy::print_stdout,
    reason = "a program for people: stdout is its interface"
)]

mod asan;
mod cargo_test;
mod catalogue;
mod darwin;
mod deny;
mod docs;
mod extent;
mod fuzz;
mod gpu_pack;
mod instructions;
mod long_record;
mod minilm;
mod mlx;
mod mlx_engine;
mod mlx_gpu;
mod mlx_tools;
mod models;
mod mpi;
mod neon;
mod nextest;
mod package;
mod process;
mod rdma;
mod release;
mod repo;
mod rust_target;
mod schemas;
mod sdk;
mod steps;
mod tally;
mod templates;
mod tidy;
mod tokenizers;
mod venv;
mod wheel;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use extent::TestExtent;
use steps::TestStep;
use tally::TestTally;

/// Project chores of paceline.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Fetch the test models, then format check, lints, tidy and all tests, with one total.
    Test {
        /// Steps to run, in this order, instead of
        /// models,mlx,fmt,tidy,clippy,build,unit,doc,mpi,mlx-tools,gpu,sdk,wheel,docs.
        #[arg(long, value_delimiter = ',', value_name = "STEPS")]
        only: Vec<TestStep>,
        /// Run the slow proofs too, which CONTRIBUTING.md lists.
        #[arg(long)]
        long: bool,
    },
    /// Check the rules of the house: layers, function length, unwrap, comments, tracked files.
    Tidy,
    /// Fetch and make the models that tests read.
    Models {
        /// Folder to use instead of ${PACELINE_TEST_MODELS:-~/.cache/paceline/test-models}.
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// List the usual names of models and the hub repositories that they mean.
    Catalogue {
        /// Look on the hub for each, and note what it has.
        #[arg(long)]
        check: bool,
    },
    /// Run OpenAI's SDKs and schemathesis against a live server of real processes.
    Sdk {
        /// paceline to test instead of what is built here.
        #[arg(long)]
        binary: Option<PathBuf>,
        /// Coding agents from npm too, 1.1 GB of them.
        #[arg(long)]
        long: bool,
    },
    /// Build the package for Python, install it into a fresh environment and test it there.
    Wheel {
        /// paceline to put into it instead of what is built here.
        #[arg(long)]
        binary: Option<PathBuf>,
    },
    /// Make packages, and check them, the C library, service units and samples.
    Package {
        /// Install the package into a fresh Debian too.
        #[arg(long)]
        long: bool,
    },
    /// Check pages made of definitions, follow the tutorials, check the samples for schedulers.
    Docs {
        /// Make the pages in docs/reference instead.
        #[arg(long)]
        write: bool,
        /// Run the slow parts of tutorials too.
        #[arg(long)]
        long: bool,
    },
    /// Build programs, wheels, packages, images and install.sh for Linux on x86-64 and AArch64 into
    /// target/publish.
    Release {
        /// Build again in a clone elsewhere, and compare every file.
        #[arg(long)]
        twice: bool,
    },
    /// Compare `paceline launch` and `topology` with MLX's own tools, and start MLX programs.
    MlxTools {
        /// paceline to test instead of what is built here.
        #[arg(long, conflicts_with = "golden")]
        binary: Option<PathBuf>,
        /// Record what MLX makes of the hosts in scripts/mlx/topology.py instead.
        #[arg(long)]
        golden: bool,
    },
    /// Fetch MLX and build its C layer, for the tests of the MLX engine.
    Mlx {
        /// Run the engine's tests on this machine's GPU, and compare an 8B-shaped model with
        /// mlx-lm.
        #[arg(long)]
        gpu: bool,
    },
    /// Run rings of Rust and real MLX ranks.
    MlxRing,
    /// Run array jobs on this machine's graphics processor, software included.
    Gpu {
        #[command(subcommand)]
        command: Option<GpuChore>,
    },
    /// Run groups over MPI by mpirun.
    Mpi,
    /// Check that the workspace compiles for Apple silicon.
    Darwin,
    /// Run the kernel tests for AArch64 under QEMU.
    Neon,
    /// Count the instructions of the AVX2 kernels and compare with the recorded counts.
    Instructions {
        /// Record the counts instead.
        #[arg(long)]
        record: bool,
    },
    /// Run the parsers of what comes from outside on bytes that libFuzzer makes.
    Fuzz {
        /// Only check that the targets compile.
        #[arg(long, conflicts_with_all = ["only", "seconds"])]
        check: bool,
        /// Targets to run instead of all.
        #[arg(long, value_delimiter = ',', value_name = "TARGETS")]
        only: Vec<String>,
        /// Time for each; as many run side by side as there are cores.
        #[arg(long, default_value_t = 600)]
        seconds: u32,
    },
    /// Run the tests of comm and tensor under AddressSanitizer, by a nightly compiler.
    Asan,
    /// Run ranks over real verbs in a virtual machine with a software RDMA device.
    Rdma,
    /// Check licences, bans and sources of all dependencies with cargo-deny.
    Deny,
}

#[derive(Debug, Subcommand)]
enum GpuChore {
    /// Make a folder that proves the MLX engine on a machine with a card and nothing else.
    Pack {
        /// Build of MLX, such as cuda-13, instead of that of this machine's tests.
        #[arg(long)]
        build: Option<String>,
        /// Leave out NVIDIA's packages, which a Python of the other machine has.
        #[arg(long)]
        without_nvidia: bool,
    },
}

fn main() -> ExitCode {
    match run(Args::parse().chore) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Does the chore; true when nothing failed.
#[expect(clippy::too_many_lines, reason = "an arm for each chore")]
fn run(chore: Chore) -> Result<bool> {
    Ok(match chore {
        Chore::Test { only, long } => {
            let extent = extent(long);
            if only.is_empty() {
                let more: &[_] = if long { &steps::LONG_ONLY } else { &[] };
                steps::run_stages(&[&steps::DEFAULT[..], more].concat(), extent)
            } else {
                steps::run(&only, extent)
            }
        }
        Chore::Tidy => steps::tidy()?.failed == 0,
        Chore::Models { dir } => {
            let tally = models::run(dir)?;
            tally.print_names();
            tally.failed == 0
        }
        Chore::Catalogue { check } => {
            catalogue::run(check)?;
            true
        }
        Chore::Sdk { binary: None, long } => steps::run(&[TestStep::Sdk], extent(long)),
        Chore::Sdk { binary, long } => closed(&sdk::run(binary, extent(long), &mut show)?),
        Chore::Wheel { binary: None } => steps::run(&[TestStep::Wheel], TestExtent::Default),
        Chore::Wheel { binary } => closed(&wheel::run(binary, TestExtent::Default, &mut show)?),
        Chore::Package { long } => {
            let extent = if long {
                TestExtent::Long
            } else {
                TestExtent::Default
            };
            steps::run(&[TestStep::Package], extent)
        }
        Chore::Docs { write: false, long } => steps::run(&[TestStep::Docs], extent(long)),
        Chore::Docs { write: true, .. } => closed(&docs::run(
            docs::ReferencePages::Write,
            TestExtent::Default,
            &mut show,
        )?),
        Chore::Release { twice: false } => steps::run(&[TestStep::Release], TestExtent::Default),
        Chore::Release { twice: true } => closed(&release::run(release::Builds::Twice, &mut show)?),
        Chore::MlxTools { golden: true, .. } => {
            mlx_tools::golden()?;
            true
        }
        Chore::MlxTools { binary: None, .. } => {
            steps::run(&[TestStep::MlxTools], TestExtent::Default)
        }
        Chore::MlxTools { binary, .. } => closed(&mlx_tools::run(binary, &mut show)?),
        Chore::Mlx { gpu: false } => steps::run(&[TestStep::Mlx], TestExtent::Default),
        Chore::Mlx { gpu: true } => steps::run(&[TestStep::MlxGpu], TestExtent::Default),
        Chore::MlxRing => steps::run(&[TestStep::MlxRing], TestExtent::Default),
        Chore::Gpu { command: None } => steps::run(&[TestStep::Gpu], TestExtent::Default),
        Chore::Gpu {
            command:
                Some(GpuChore::Pack {
                    build,
                    without_nvidia,
                }),
        } => {
            let build = build.as_deref();
            let options = gpu_pack::PackOptions {
                build,
                without_nvidia,
            };
            gpu_pack::run(&options, &mut show)?;
            true
        }
        Chore::Mpi => steps::run(&[TestStep::Mpi], TestExtent::Default),
        Chore::Darwin => steps::run(&[TestStep::Darwin], TestExtent::Default),
        Chore::Neon => steps::run(&[TestStep::Neon], TestExtent::Default),
        Chore::Instructions { record: true } => {
            instructions::run(true, &mut |line| println!("{line}"))?.failed == 0
        }
        Chore::Instructions { record: false } => {
            steps::run(&[TestStep::Instructions], TestExtent::Default)
        }
        Chore::Fuzz { check: true, .. } => steps::run(&[TestStep::Fuzz], TestExtent::Default),
        Chore::Fuzz { only, seconds, .. } => {
            let options = fuzz::Options { only, seconds };
            let tally = fuzz::run(&options, &mut |line| println!("{line}"))?;
            closed(&tally)
        }
        Chore::Asan => steps::run(&[TestStep::Asan], TestExtent::Default),
        Chore::Rdma => steps::run(&[TestStep::Rdma], TestExtent::Default),
        Chore::Deny => steps::run(&[TestStep::Deny], TestExtent::Default),
    })
}

fn show(line: &str) {
    println!("{line}");
}

/// Prints the closing lines of a chore that is no step; true when nothing failed.
fn closed(tally: &TestTally) -> bool {
    tally.print_names();
    println!("{tally}");
    tally.failed == 0
}

const fn extent(is_long: bool) -> TestExtent {
    if is_long {
        TestExtent::Long
    } else {
        TestExtent::Default
    }
}
