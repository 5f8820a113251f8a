//! A connection to another machine by `ssh`.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::Stdio;

use paceline_cluster::bridge::skip_to;
use paceline_launch::remote::{Sharing, SshClient};

use super::Ends;
use crate::Error;

/// The line that `paceline train-far` prints first where `ssh` starts it.
pub const GREETING: &str = "paceline-train-far";

/// A connection to `program` on a host: at this machine's path if it is there, else as the host's
/// shell finds it.
///
/// # Errors
/// [`Error::Line`].
pub fn by_ssh(host: &str, program: &Path) -> Result<Ends, Error> {
    let failed = |reason: String| Error::Line { reason };
    let program = format!("'{}'", program.display().to_string().replace('\'', "'\\''"));
    let script = format!(
        "if [ -x {program} ]; then exec {program} train-far; fi; exec paceline train-far\n"
    );
    let mut shell = SshClient::new("ssh", None).shell(host, Sharing::Alone);
    shell.stdin(Stdio::piped()).stdout(Stdio::piped());
    let child = shell.spawn();
    let mut child = child.map_err(|error| failed(format!("cannot start ssh: {error}")))?;
    let (to, from) = (child.stdin.take(), child.stdout.take());
    std::thread::spawn(move || child.wait()); // so that it leaves no entry when it ends
    let (Some(mut to), Some(from)) = (to, from) else {
        return Err(failed("ssh has no streams".to_owned()));
    };
    let sent = to.write_all(script.as_bytes()).and_then(|()| to.flush());
    sent.map_err(|error| failed(format!("{host}: {error}")))?;
    Ok(Ends {
        from: Box::new(SshGreeting {
            from,
            is_there: false,
        }),
        to: Box::new(to),
    })
}

/// The output of a host after [`GREETING`]: the output of its login shell before that is skipped.
struct SshGreeting<R> {
    from: R,
    is_there: bool,
}

impl<R: Read> Read for SshGreeting<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if !self.is_there && !skip_to(&mut self.from, GREETING) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.is_there = true;
        self.from.read(bytes)
    }
}
