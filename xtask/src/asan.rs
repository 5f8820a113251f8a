//! `cargo xtask asan`: the unsafe code of `comm`, the crates of wires above it, and `tensor` under
//! AddressSanitizer.
//!
//! A nightly compiler builds their tests with every access to memory checked, in `target/asan`, and
//! runs them. They cover kernels on every instruction set that this machine has, threads that share
//! buffers, processes that share memory, and software RDMA. It cannot see memory that C libraries
//! use, the kernel's accesses, or races. Races are the model checker's (`comm/tests/loom.rs`).

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::cargo_test::TestLog;
use crate::tally::TestTally;
use crate::{process, repo};

/// Tests that run together.
struct TestBatch {
    name: &'static str,
    package: &'static str,
    programs: &'static [&'static str],
    /// Parts of names of tests that are left out. They are tests of speed, which differs here, and
    /// of other people's programs and libraries, which are not built so.
    skipped: &'static [&'static str],
}

const PARTS: [TestBatch; 5] = [
    TestBatch {
        name: "comm",
        package: "paceline-comm",
        programs: &["--lib"],
        skipped: &["speed"],
    },
    TestBatch {
        name: "comm-processes",
        package: "paceline-comm",
        programs: &["--test", "all"],
        skipped: &[],
    },
    TestBatch {
        name: "comm-rdma",
        package: "paceline-comm-rdma",
        programs: &["--lib"],
        skipped: &["speed"],
    },
    TestBatch {
        name: "comm-interop",
        package: "paceline-comm-interop",
        programs: &["--lib", "--test", "all"],
        skipped: &[
            "speed",
            "mlx_ring::cases",
            "mlx_ring::deaths",
            "mlx_ring::mixed",
            "nccl::",
        ],
    },
    TestBatch {
        name: "tensor",
        package: "paceline-tensor",
        programs: &["--tests"],
        skipped: &[],
    },
];

/// Leaks are no matter of safety, and some are meant. Sizes that no memory has are refused by the
/// code under test, not by the checker.
const OPTIONS: &str = "detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1";

/// Runs the tests. A line `asan: PART: N passed...` for each part has the counts.
///
/// # Errors
/// When cargo cannot be run. A missing nightly compiler is a skip.
pub(crate) fn run(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    const NAME: &str = "unsafe code under AddressSanitizer";
    let mut nightly = Command::new("rustup");
    nightly.args(["run", "nightly", "rustc", "--version"]);
    match process::capture(nightly, Duration::from_secs(60)) {
        Ok(version) => show(&format!("asan: {}", version.trim())),
        Err(error) => return Ok(TestTally::skip(NAME, &format!("no nightly: {error:#}"))),
    }
    let (host, mut all) = (repo::host()?, TestTally::default());
    for part in &PARTS {
        let tally = test(part, &host, show)?;
        show(&format!("asan: {}: {tally}", part.name));
        all.add(tally);
    }
    Ok(all)
}

fn test(part: &TestBatch, host: &str, show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let (mut log, mut errors) = (TestLog::new(), 0);
    let path = process::log_path(&format!("asan-{}", part.name));
    let success = process::stream(command(part, host), &path, |line| {
        errors += usize::from(line.contains("ERROR: AddressSanitizer"));
        if log.read(line) {
            show(line);
        }
    })?;
    let mut tally = log.finish(part.name, success);
    // Counted apart: a test may expect its child to die.
    let name = format!(
        "AddressSanitizer found {errors} errors: see {}",
        path.display()
    );
    tally.add(TestTally::check(&name, errors == 0));
    Ok(tally)
}

fn command(part: &TestBatch, host: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "test", "--release"]);
    command
        .args(["--package", part.package])
        .args(part.programs);
    command.args(["--target", host, "--target-dir", "target/asan"]);
    command.args(["--", "--show-output"]);
    for name in part.skipped {
        command.args(["--skip", name]);
    }
    command.current_dir(repo::root());
    command.env(
        "RUSTFLAGS",
        "-Zsanitizer=address -Cforce-frame-pointers=yes",
    );
    command.env("ASAN_OPTIONS", OPTIONS);
    // Frames are several times as large.
    command.env("RUST_MIN_STACK", (32 << 20).to_string());
    command
}
