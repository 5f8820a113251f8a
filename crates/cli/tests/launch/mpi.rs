//! Ranks that Open MPI's `mpirun` starts; skipped by name where there is none.

use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::wires::report;
use super::{LaunchOutput, SshHosts, assert_gone, feed, finish, until};

/// `mpirun` refuses root and more ranks than cores unless told otherwise, and any other MPI has
/// other options.
const LET: [&str; 4] = ["--backend", "mpi", "--mpi-arg", "--oversubscribe"];

/// Whether there is an Open MPI; says so if not.
fn can(test: &str) -> bool {
    let said = Command::new("mpirun").arg("--version").output();
    let is_there =
        said.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains("Open MPI"));
    if !is_there {
        eprintln!("SKIPPED {test}: there is no Open MPI");
    }
    is_there
}

fn launch(world: &SshHosts, args: &[&str]) -> Command {
    let mut command = world.launch(&[&LET, args].concat());
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        // Containers forbid the system call that Open MPI copies by between processes.
        .env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    command
}

fn run(world: &SshHosts, args: &[&str], input: &[u8]) -> LaunchOutput {
    let mut command = launch(world, args);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    feed(&mut child, input);
    finish(child)
}

#[test]
fn mpirun_starts_ranks_with_environment_and_input() {
    if !can("launch --backend mpi") {
        return;
    }
    let world = SshHosts::new();
    let wanted = world.path("tmp").canonicalize().unwrap();
    let script = "printf \"$OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_SIZE \"; sleep 0.1; echo $V; \
                  pwd; cat; echo err >&2";
    let args = [
        "-n",
        "2",
        "--env",
        "V=x y",
        "--cwd",
        wanted.to_str().unwrap(),
        "sh",
        "-c",
        script,
    ];
    let ended = run(&world, &args, b"input\n").ok();
    let folder = wanted.display();
    let expected = [
        "[0] 0/2 x y".to_owned(),
        format!("[0] {folder}"),
        "[0] input".to_owned(),
        "[1] 1/2 x y".to_owned(),
        format!("[1] {folder}"),
    ];
    let mut lines = ended.lines();
    lines.sort_by_key(|line| {
        (
            line.starts_with("[1]"),
            !line.contains("x y"),
            line.len() < 12,
        )
    });
    assert_eq!(lines, expected);
    let mut errors: Vec<&str> = ended.stderr.lines().collect();
    errors.sort_unstable();
    assert_eq!(errors, ["[0] err", "[1] err"]);
    world.assert_clean();
}

#[test]
fn mpiruns_code_is_that_of_the_first_rank_that_fails() {
    if !can("launch --backend mpi, failing") {
        return;
    }
    let world = SshHosts::new();
    let script = "echo $$ >id.$OMPI_COMM_WORLD_RANK; [ $OMPI_COMM_WORLD_RANK = 1 ] || sleep 1000; \
                  while ! [ -s id.0 ]; do sleep 0.02; done; exit 7";
    let ended = run(&world, &["-n", "2", "sh", "-c", script], b"");
    assert_eq!(ended.code, Some(7), "{ended:?}");
    assert!(ended.stderr.contains("[mpirun] "), "{ended:?}");
    assert!(
        ended.stderr.ends_with("error: mpirun exited with code 7\n"),
        "{ended:?}"
    );
    assert_gone(&[world.path("here/id.0"), world.path("here/id.1")]);
}

/// The library name that MLX looks for, which Debian has in its development packages only.
#[test]
fn the_librarys_name_is_passed_on() {
    if !can("launch --backend mpi, MLX_MPI_LIBNAME") {
        return;
    }
    let world = SshHosts::new();
    let ended = run(
        &world,
        &["-n", "1", "sh", "-c", "echo $MLX_MPI_LIBNAME"],
        b"",
    )
    .ok();
    assert!(ended.stdout.starts_with("[0] libmpi"), "{ended:?}");
}

#[test]
fn mpiruns_ranks_end_with_the_launcher() {
    if !can("launch --backend mpi, interrupted and killed") {
        return;
    }
    for signal in [Signal::INT, Signal::KILL] {
        let world = SshHosts::new();
        let ids = [0, 1].map(|rank| world.path(&format!("here/id.{rank}")));
        let script = "echo $$ >id.$OMPI_COMM_WORLD_RANK; exec sleep 1000";
        let mut command = launch(&world, &["-n", "2", "sh", "-c", script]);
        let child = command.spawn().unwrap();
        until("all ranks run", || {
            let is_noted = |id| std::fs::read(id).is_ok_and(|id| id.ends_with(b"\n"));
            ids.iter().all(is_noted)
        });
        kill_process(Pid::from_child(&child), signal).unwrap();
        let ended = finish(child);
        let code = (signal == Signal::INT).then_some(1);
        assert_eq!(ended.code, code, "{ended:?}");
        assert_gone(&ids);
    }
}

/// The collectives of this program as an MPI program.
#[test]
fn bench_comm_runs_under_mpirun() {
    const TEST: &str = "bench comm --transport mpi";
    if !cfg!(feature = "mpi") {
        eprintln!("SKIPPED {TEST}: mpi is not in this build (--features mpi)");
        return;
    }
    if !can(TEST) {
        return;
    }
    let world = SshHosts::new();
    let program = [
        env!("CARGO_BIN_EXE_paceline"),
        "bench",
        "comm",
        "--transport",
        "mpi",
        "--max-bytes",
        "64",
    ];
    let start = |more: &[&str]| {
        run(
            &world,
            &[&["-n", "2"][..], &program[..], more].concat(),
            b"",
        )
    };
    let refused = start(&[]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("mpi is plaintext"), "{refused:?}");
    let report = report(start(&["--plaintext", "--json"]));
    let facts = (&report["transport"], &report["ranks"]);
    assert_eq!(facts, (&"mpi".into(), &2.into()));
    // Eight operations at 4, 16 and 64 bytes, the barrier once.
    assert_eq!(report["rows"].as_array().unwrap().len(), 22, "{report}");
}
