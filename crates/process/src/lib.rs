//! Child processes: process groups, exit states, and whole lines of their output.
//!
//! The crates `cluster` (workers of one group) and `launch` (programs on many machines) start
//! processes with it. It knows neither the ranks' messages nor other machines.
//!
//! ```
//! use std::io::Read;
//! use std::process::{Command, Stdio};
//! use paceline_process::processes::{Ending, LineBuffer, Process};
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
//! All items are in [`processes`]. A failed start is the system's own error.

pub mod processes;
