//! Child processes: process groups, exit states, and whole lines of their output.
//!
//! Every crate that starts a program owns it by this one, wherever it runs:
//! - [`Process`]: a child that ends with its owner, together with its own children.
//! - [`Program`]: a program with its standard input and output: here, by `ssh`, or at the other end
//!   of a socket.
//! - [`Ending`], [`ExitLog`]: the exit state of a process; the first failure of many.
//! - [`LineBuffer`], [`LineTail`], [`PrefixedWriter`]: whole lines from chunks, the last lines, and
//!   many processes' lines on one output without mixing.
//!
//! It knows neither the ranks' messages nor other machines.
//!
//! ```
//! use std::io::Read;
//! use std::process::{Command, Stdio};
//! use paceline_process::{Ending, LineBuffer, Process};
//!
//! # fn main() -> std::io::Result<()> {
//! let mut command = Command::new("sh");
//! command.args(["-c", "echo one; printf two; exit 3"]).stdout(Stdio::piped());
//! let mut process = Process::start(&mut command)?;
//! let mut output = process.take_stdout().expect("standard output was piped");
//! let (mut lines, mut piece, mut said) = (LineBuffer::default(), [0; 512], Vec::new());
//! loop {
//!     match output.read(&mut piece)? {
//!         0 => break,
//!         count => lines.feed(&piece[..count], |line| said.push(line.to_owned())),
//!     }
//! }
//! lines.finish(|line| said.push(line.to_owned()));
//! assert_eq!(said, ["one", "two"]);
//! assert_eq!(process.reap(), Ending::Code(3));
//! # Ok(())
//! # }
//! ```
//!
//! A failed start is the system's own error.

mod exit;
mod lines;
mod process;
mod program;

pub use exit::{Ending, ExitLog};
pub use lines::{LINE_TEXT_BYTES_MAX, LineBuffer, LineTail, PrefixedWriter};
pub use process::Process;
pub use program::{MESSAGE_BYTES_MAX, Program, skip_to};
pub use rustix::process::Signal;
