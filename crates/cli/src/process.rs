//! Facts that the system knows about this process.

use std::ffi::OsString;
use std::io;

pub(crate) use paceline_cluster::machine::peak_memory_bytes;
pub(crate) use paceline_cluster::own::{end_with_parent, ignores, own_program};
use paceline_node::crew::for_workers;
use paceline_node::interpreter::Program;

/// Makes MLX compute products of f32 in f32, here and in the processes that this one starts. The
/// numbers of a kernel class do not depend on the user's environment.
///
/// # Safety
/// This process has no other thread.
pub(crate) unsafe fn disable_tf32() {
    // SAFETY: the caller promises that no thread reads the environment meanwhile.
    unsafe { std::env::set_var(paceline_mlx::TF32, "0") };
}

/// The environment that workers get: what they need of this process's.
pub(crate) fn worker_env() -> Vec<(OsString, OsString)> {
    for_workers(std::env::vars_os())
}

/// The environment of a process that stands between a job and its worker on a host. It is all of
/// this process's, since `ssh` needs its agent and what the user's configuration names.
pub(crate) fn ssh_env() -> Vec<(OsString, OsString)> {
    std::env::vars_os().collect()
}

/// The program that runs a model's chat template in a process of its own: `paceline template`.
///
/// # Errors
/// As [`own_program`].
pub(crate) fn template_program() -> io::Result<Program> {
    Ok(Program {
        path: own_program()?,
        args: vec!["template".into()],
        env: Vec::new(),
    })
}
