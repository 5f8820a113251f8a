//! Environment and programs of this process and its children.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use paceline_board::fast_sync::{FastSync, GpuWait, SyncChoice};

use paceline_board::commands::ProgramStarter;
pub(crate) use paceline_cluster::machine::peak_memory_bytes;
pub(crate) use paceline_cluster::this_process::{end_with_parent, ignores, own_program};
use paceline_mlx::FAST_SYNC;
use paceline_node::workers::for_workers;
use paceline_process::Program;
use paceline_worker::interpreter::ChildProgram;

use crate::home;

/// Disables TF32 in MLX, here and in child processes: f32 products are computed in f32. So a kernel
/// class does not depend on the user's environment.
///
/// # Safety
/// No other thread may run.
pub(crate) unsafe fn disable_tf32() {
    // SAFETY: the caller promises that no thread reads the environment meanwhile.
    unsafe { std::env::set_var(paceline_mlx::TF32, "0") };
}

/// Has MLX wait for GPUs by `choice`, here and in child processes. Returns a warning for the user.
///
/// # Safety
/// No other thread may run.
pub(crate) unsafe fn set_gpu_wait(choice: SyncChoice) -> Option<&'static str> {
    let sync = FastSync::new(&home::folder().ok()?);
    let wait = sync.decide(choice, home::variable(FAST_SYNC).as_deref());
    let value = match wait {
        GpuWait::Usual => "0",
        GpuWait::Fast => "1",
    };
    // SAFETY: the caller promises that no thread reads the environment meanwhile.
    unsafe { std::env::set_var(FAST_SYNC, value) };
    let is_refused = choice == SyncChoice::Asked && wait == GpuWait::Usual;
    is_refused.then_some(
        "warning: fast sync stays off, since a GPU hung with it: `paceline selftest --fast-sync` \
         checks it again",
    )
}

/// The environment of workers: the needed part of this process's.
pub(crate) fn worker_env() -> Vec<(OsString, OsString)> {
    for_workers(std::env::vars_os())
}

/// Executes `program` in place of this process, with the same arguments and one more variable;
/// returns if that fails.
pub(crate) fn execute(program: &Path, variable: Option<(&str, &str)>) -> io::Error {
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1));
    command.envs(variable).exec()
}

/// Starts `program` with `words` and `more` for a connection from another machine.
pub(crate) fn starter(program: &Path, words: &[&str], more: Vec<OsString>) -> ProgramStarter {
    let program = program.to_owned();
    let args: Vec<OsString> = words.iter().map(OsString::from).chain(more).collect();
    Box::new(move || {
        let mut command = Command::new(&program);
        command.args(&args).env_clear().envs(worker_env());
        Program::start(command.stderr(Stdio::null()))
    })
}

/// The environment of a relay between a job and its worker on a host. It is all of this process's,
/// since `ssh` needs its agent and the variables of the user's configuration.
pub(crate) fn ssh_env() -> Vec<(OsString, OsString)> {
    std::env::vars_os().collect()
}

/// The program that runs chat templates in a separate process: `paceline template`.
pub(crate) fn template_program() -> io::Result<ChildProgram> {
    Ok(ChildProgram {
        path: own_program()?,
        args: vec!["template".into()],
        env: Vec::new(),
    })
}
