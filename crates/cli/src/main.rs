//! The paceline binary: parses the command line and hands over to the subcommands.
//!
//! Exit codes: 0 ok, 1 failed or interrupted, 2 wrong usage; of `launch` that of the first rank
//! that failed. Results go to stdout, everything else to stderr. This is the only crate that reads
//! environment variables.

#![warn(clippy::print_stderr)]

mod bench;
mod compute;
mod doctor;
mod engines;
mod error;
mod hint;
mod home;
mod interrupt;
mod kb;
mod key;
mod launch;
mod load;
mod loaded;
mod machine;
mod models;
mod moved;
mod output;
mod plan;
mod process;
mod progress;
mod pull;
mod run;
mod steered;
mod topology;
mod up;
mod wires;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use error::Error;
use interrupt::Signals;

/// Pool your machines and run models too large for one of them.
#[derive(Debug, Parser)]
#[command(name = "paceline", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer a prompt, or chat
    Run(run::Args),
    /// Start this machine's node: a model behind an HTTP API
    Up(up::Args),
    /// Make, list and revoke keys
    #[command(subcommand)]
    Key(key::Command),
    /// One rank of a model over several processes: started by the other commands
    #[command(hide = true)]
    Worker,
    /// Which machines, which split, how fast
    Plan(plan::Args),
    /// Run a program on many machines, a rank each
    Launch(launch::Args),
    /// How machines are cabled, and a hostfile from that
    Topology(topology::Args),
    /// Measure this machine
    #[command(subcommand)]
    Bench(bench::Command),
    /// Fetch a model into the store
    Pull(pull::Args),
    /// List the models in the store
    Models(models::ListArgs),
    /// Remove a model from the store
    Rm(models::RmArgs),
    /// List what computes here, and install engines
    Engines(engines::Args),
    /// What this machine can do, what is missing, and what mends it
    Doctor(doctor::Args),
    /// What is known about distributed GPU computing: search, ask, add
    Kb(kb::Args),
}

fn main() -> ExitCode {
    // clap ends the process by itself: 0 for --help and --version, 2 for wrong usage.
    let command = Cli::parse().command;
    match execute(&command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if matches!(command, Command::Worker) && !error.is::<Error>() => {
            ExitCode::FAILURE // the parent was told
        }
        Err(error) => exit_code(&error),
    }
}

fn execute(command: &Command) -> anyhow::Result<()> {
    let signals = Signals::install()?;
    match command {
        Command::Run(args) => run::run(args, &signals),
        Command::Up(args) => up::run(args, &signals),
        Command::Key(command) => key::run(command),
        Command::Worker => worker::run(),
        Command::Plan(args) => plan::run(args),
        Command::Launch(args) => launch::run(args, &signals),
        Command::Topology(args) => topology::run(args, &signals),
        Command::Bench(command) => bench::run(command, &signals),
        Command::Pull(args) => pull::run(args, &signals),
        Command::Models(args) => models::list(args),
        Command::Rm(args) => models::remove(args),
        Command::Engines(args) => engines::run(args, &signals),
        Command::Doctor(args) => doctor::run(args),
        Command::Kb(args) => kb::run(args),
    }
}

/// Reports `error`, unless it is none of the user's business.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    let own = error.downcast_ref::<Error>();
    if matches!(own, Some(Error::ReaderGone)) {
        return ExitCode::SUCCESS;
    }
    hint::report(error);
    if let Some(code) = launch::exit_code(error) {
        return ExitCode::from(code);
    }
    let of_topology = error.downcast_ref::<topology::Error>();
    let is_usage =
        own.is_some_and(Error::is_usage) || of_topology.is_some_and(topology::Error::is_usage);
    ExitCode::from(if is_usage { 2 } else { 1 })
}
