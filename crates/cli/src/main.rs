//! The paceline binary: parses the command line and hands over to the subcommands.
//!
//! Exit codes: 0 ok, 1 failed, 2 wrong usage. Results go to stdout, everything else to stderr. This
//! is the only crate that reads environment variables.

mod bench;
mod hint;
mod home;
mod interrupt;
mod load;
mod models;
mod progress;
mod pull;
mod run;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    /// Measure this machine
    #[command(subcommand)]
    Bench(bench::Command),
    /// Fetch a model into the store
    Pull(pull::Args),
    /// List the models in the store
    Models(models::ListArgs),
    /// Remove a model from the store
    Rm(models::RmArgs),
}

fn main() -> ExitCode {
    // clap ends the process by itself: 0 for --help and --version, 2 for wrong usage.
    let outcome = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Bench(command) => bench::run(&command),
        Command::Pull(args) => pull::run(&args),
        Command::Models(args) => models::list(&args),
        Command::Rm(args) => models::remove(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            hint::report(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints a result and a newline to stdout. A reader that has gone away, such as `head`, is not an
/// error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
