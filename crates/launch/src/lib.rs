//! Starts programs on many machines over the system's `ssh`, and detects how machines are cabled.
//!
//! The programs need not know paceline. They get the environment and the files that MLX's backends
//! read. The ranks of paceline's own are in the crate `cluster`.
//!
//! ```text
//!  topology: probe ──▶ cables ──▶ hostfile ──▶ launch: plan ──▶ run ──▶ lines, endings
//!                │                                                │
//!                └────────────────── remote: shells ──────────────┘
//! ```
//!
//! ```no_run
//! use paceline_launch::hostfile::Hostfile;
//! use paceline_launch::launch::{self, Backend, Launch, LaunchLimits, Options};
//! use paceline_launch::launch::{WorkingDirectory, StdinTo, Streams, RankTags};
//! use paceline_launch::remote::SshClient;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hosts = Hostfile::from_names("10.0.0.1,10.0.0.2", 1)?;
//! let program = Launch {
//!     ranks: launch::plan(Backend::Ring, &hosts, &Options::default())?,
//!     command: vec!["python3".into(), "train.py".into()],
//!     place: WorkingDirectory::IfPresent("/data".into()),
//!     stdin: StdinTo::None,
//!     tags: RankTags::Session,
//!     limits: LaunchLimits::default(),
//! };
//! let streams = Streams {
//!     input: Box::new(std::io::empty()),
//!     output: Box::new(std::io::stdout()),
//!     errors: Box::new(std::io::stderr()),
//! };
//! let reach = SshClient::new("ssh", None);
//! launch::run(&program, &reach, streams, &|| false, &mut |notice| eprintln!("{notice}"))?;
//! # Ok(())
//! # }
//! ```
//!
//! In reading order:
//! - [`hostfile`]: lists of machines, in MLX's formats.
//! - [`remote`]: shells on other machines; [`joined`]: what stands for `ssh` within a cluster.
//! - [`launch`]: a program on many machines.
//! - [`engines`]: the programs of a cluster of Dask or Ray.
//! - [`topology`]: cables between machines, and hostfiles for them.
//!
//! Each module has its own `Error`. The crate has no async runtime and prints nothing itself.

pub mod engines;
pub mod hostfile;
pub mod joined;
pub mod launch;
mod marks;
pub mod remote;
pub mod testing;
pub mod topology;
