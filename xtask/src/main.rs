//! Project chores: `cargo xtask tidy`.

#![allow(
    clippy::print_stdout,
    reason = "a program for people: stdout is its interface"
)]

mod repo;
mod tidy;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Project chores of paceline.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Check the rules of the house: layers, function length, unwrap, comments, tracked files.
    Tidy {
        /// Print function and file lengths instead of checking.
        #[arg(long)]
        report: bool,
    },
}

fn main() -> Result<ExitCode> {
    match Args::parse().chore {
        Chore::Tidy { report: true } => print!("{}", tidy::report()?),
        Chore::Tidy { report: false } => return tidy_check(),
    }
    Ok(ExitCode::SUCCESS)
}

fn tidy_check() -> Result<ExitCode> {
    let findings = tidy::run()?;
    for finding in &findings {
        println!("{finding}");
    }
    let errors = findings.iter().filter(|finding| finding.is_error()).count();
    println!(
        "tidy: {errors} errors, {} warnings",
        findings.len() - errors
    );
    Ok(if errors == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
