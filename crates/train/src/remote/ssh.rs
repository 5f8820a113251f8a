//! A connection to another machine by `ssh`.

use std::path::Path;

use paceline_launch::remote::{Sharing, SshClient, quote};
use paceline_process::Program;

use crate::Error;

/// The line that `paceline train-far` prints first where `ssh` starts it.
pub const GREETING: &str = "paceline-train-far";

/// A connection to `program` on a host: at this machine's path if it is there, else as the host's
/// shell finds it.
///
/// # Errors
/// [`Error::Line`].
pub fn by_ssh(host: &str, program: &Path) -> Result<Program, Error> {
    let program = quote(&program.display().to_string());
    let script = format!(
        "if [ -x {program} ]; then exec {program} train-far; fi; exec paceline train-far\n"
    );
    let mut shell = SshClient::new("ssh", None).shell(host, Sharing::Alone);
    let started = Program::by_shell(&mut shell, &script, GREETING);
    started.map_err(|error| Error::Line {
        reason: format!("cannot start ssh to {host}: {error}"),
    })
}
