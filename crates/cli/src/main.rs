//! The paceline binary: parses the command line and runs the subcommand.
//!
//! Exit codes: 0 ok, 1 failed or interrupted, 2 wrong usage; for `launch` that of the first failed
//! rank. Results go to stdout, all else to stderr. Only this crate reads environment variables.

#![warn(clippy::print_stderr)]

mod adapter;
mod agent;
mod bench;
mod chaos;
mod compute;
mod compute_engines;
mod doctor;
mod draft_limit;
mod engines;
mod error;
mod families;
mod fits;
mod hint;
mod home;
mod instance_choice;
mod instances;
mod interrupt;
mod join;
mod kb;
mod key;
mod launch;
mod load;
mod local_model;
mod log;
mod machines;
mod mapreduce;
mod member;
mod models;
mod nodes;
mod output;
mod plaintext;
mod plan;
mod process;
mod programs;
mod progress;
mod pull;
mod release;
mod run;
mod selftest;
mod service;
mod shell;
mod show;
mod stores;
mod terminal;
mod top;
mod topology;
mod trace;
mod train;
mod up;
mod upgrade;
mod worker;
mod wrap;

use std::io::IsTerminal;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use error::Error;
use interrupt::Signals;
use paceline_board::fast_sync::{GpuWait, SyncChoice};

/// Pool your machines and run models too large for one of them.
#[derive(Debug, Parser)]
#[command(
    name = "paceline",
    version = release::version(),
    arg_required_else_help = true,
    disable_version_flag = true
)]
struct Cli {
    /// Print version
    #[arg(short = 'V', short_alias = 'v', long, action = ArgAction::Version)]
    version: Option<bool>,
    #[command(flatten)]
    log: log::LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer a prompt, or chat
    Run(run::Args),
    /// Start this machine's node, alone or with a model behind an HTTP API
    Up(Box<up::Args>),
    /// Join the cluster of another machine
    Join(join::Args),
    /// Leave the cluster for good
    Leave,
    /// The machines of the cluster: list, let in, forget
    Nodes(nodes::Args),
    /// Load a model over machines of the cluster
    Load(instances::LoadArgs),
    /// Unload a model
    Unload(instances::UnloadArgs),
    /// What is loaded, where, and how it is
    Ps(instances::PsArgs),
    /// The cluster in a terminal: machines, models, requests
    Top(top::Args),
    /// Where the time of an answer went, node by node
    Trace(trace::Args),
    /// Make, list and revoke keys
    #[command(subcommand)]
    Key(key::Command),
    /// One rank of a model over several processes: started by the other commands
    #[command(hide = true)]
    Worker(worker::Args),
    /// The chat template of a model: started by the other commands
    #[command(hide = true)]
    Template,
    /// The RDMA devices of this machine, as JSON: started by its node
    #[command(hide = true)]
    Rdma,
    /// Which machines, which split, how fast
    Plan(plan::Args),
    /// Run a program on many machines, a rank each
    Launch(launch::Args),
    /// Start Dask or Ray on the machines of the cluster, show or stop it
    #[command(subcommand)]
    Compute(compute_engines::Args),
    /// A program or a socket on a machine of the cluster: started by the other commands
    #[command(hide = true)]
    Programs(programs::Args),
    /// How machines are cabled, and a hostfile from that
    Topology(topology::Args),
    /// Measure this machine
    #[command(subcommand)]
    Bench(bench::Command),
    /// Compute on arrays: sums that are exact, over threads and processes
    #[command(subcommand)]
    Mapreduce(mapreduce::Command),
    /// Train a model, or an adapter of one, on several processes with the same bits
    Train(train::Args),
    /// One process of a training: started by the other commands
    #[command(hide = true)]
    TrainWorker(train::TrainWorkerArgs),
    /// What runs a worker of a training on another machine: started by the other commands
    #[command(hide = true)]
    TrainFar(train::TrainHostArgs),
    /// Show, convert and fuse adapters
    #[command(subcommand)]
    Adapter(adapter::Command),
    /// Fetch a model into the store
    Pull(pull::Args),
    /// List the models in the store
    #[command(visible_aliases = ["list", "ls"])]
    Models(models::ListArgs),
    /// What a model is: its shape, size, memory and licence
    Show(show::Args),
    /// Remove a model from the store
    Rm(models::RmArgs),
    /// List what computes here, and install engines
    Engines(engines::Args),
    /// What this machine can do, what is missing, and what mends it
    Doctor(doctor::Args),
    /// Check this machine, its engines and its cluster; a report that can be posted
    Selftest(selftest::Args),
    /// Start a coding agent against this machine's server
    Agent(agent::Args),
    /// Break a cluster on this machine on purpose, and compare its answers
    Chaos(chaos::Args),
    /// What is known about distributed GPU computing: search, ask, add
    Kb(kb::Args),
    /// Start this machine's node by itself: install, status, remove
    #[command(subcommand)]
    Service(service::Command),
    /// Bring a new release to the machines of the cluster, one after the other
    Upgrade(upgrade::Args),
    /// Upgrades this machine for another one: started by its node
    #[command(hide = true)]
    UpgradeReceiver(upgrade::ReceiverArgs),
    /// Print a script that completes commands in a shell
    Completions(shell::CompletionArgs),
    /// Print the manual, or write its pages
    #[command(hide = true)]
    Man(shell::ManArgs),
    /// Print the version
    Version,
}

impl Command {
    const fn gpu_wait(&self) -> SyncChoice {
        let is_asked = match self {
            // It measures both ways, the usual one in its other processes.
            Self::Selftest(args) => return SyncChoice::Always(args.gpu_wait()),
            Self::Engines(_) => return SyncChoice::Always(GpuWait::Usual),
            Self::Run(args) => args.engine.fast_sync,
            Self::Up(args) => args.engine.fast_sync,
            Self::Bench(bench::Command::Model(args)) => args.engine.fast_sync,
            _ => false,
        };
        match is_asked {
            true => SyncChoice::Asked,
            false => SyncChoice::Qualified,
        }
    }
}

fn main() {
    // clap exits by itself: 0 for --help and --version, 2 for wrong usage.
    let usage = |error: clap::Error| -> Cli {
        show_help(&error);
        hint::of_usage(error, &Cli::command()).exit()
    };
    hush_caught_panics();
    let Cli { command, log, .. } = Cli::try_parse().unwrap_or_else(usage);
    // These start the user's programs, with the user's environment.
    if !matches!(
        command,
        Command::Launch(_) | Command::Compute(_) | Command::Programs(_) | Command::Agent(_)
    ) {
        // SAFETY: no thread was started so far.
        let warning = unsafe {
            process::disable_tf32();
            process::set_gpu_wait(command.gpu_wait())
        };
        warning.into_iter().for_each(output::print_err);
    }
    let begun = log::start(&log);
    let code = match begun.and_then(|()| execute(&command)) {
        Ok(()) => 0,
        Err(error)
            if matches!(
                command,
                Command::Worker(_) | Command::Template | Command::TrainWorker(_)
            ) && !error.is::<Error>() =>
        {
            1 // the parent was told
        }
        Err(error) => exit_code(&error),
    };
    paceline_mlx::exit(code.into())
}

/// Prints help wrapped to the terminal, and ends; returns for other errors, and without a terminal.
fn show_help(error: &clap::Error) {
    if error.kind() != ErrorKind::DisplayHelp || !std::io::stdout().is_terminal() {
        return;
    }
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    let help = error.render();
    let help = match is_plain {
        true => help.to_string(),
        false => help.ansi().to_string(),
    };
    let code = output::show_formatted(&terminal::fitted(&help)).map_or(1, |()| 0);
    std::process::exit(code);
}

/// Hides caught panics of tokenizer and template libraries, which become errors.
fn hush_caught_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !paceline_text::panics::are_caught() {
            usual(panic);
        }
    }));
}

fn execute(command: &Command) -> anyhow::Result<()> {
    let signals = Signals::install()?;
    match command {
        Command::Run(args) => run::run(args, &signals),
        Command::Up(args) => up::run(args, &signals),
        Command::Join(args) => join::run(args),
        Command::Leave => join::leave(),
        Command::Nodes(args) => nodes::run(args),
        Command::Load(args) => instances::load(args, &signals),
        Command::Unload(args) => instances::unload(args),
        Command::Ps(args) => instances::ps(args),
        Command::Top(args) => top::run(args),
        Command::Trace(args) => trace::run(args, &signals),
        Command::Key(command) => key::run(command),
        Command::Worker(args) => worker::run(args),
        Command::Template => worker::template(),
        Command::Rdma => nodes::rdma(),
        Command::Plan(args) => plan::run(args),
        Command::Launch(args) => launch::run(args, &signals),
        Command::Compute(args) => compute_engines::run(args, &signals),
        Command::Programs(args) => programs::run(args),
        Command::Topology(args) => topology::run(args, &signals),
        Command::Bench(command) => bench::run(command, &signals),
        Command::Mapreduce(command) => mapreduce::run(command),
        Command::Train(args) => train::run(args, &signals),
        Command::TrainWorker(args) => train::work(args),
        Command::TrainFar(args) => train::far(args),
        Command::Adapter(command) => adapter::run(command, &signals),
        Command::Pull(args) => pull::run(args, &signals),
        Command::Models(args) => models::list(args),
        Command::Show(args) => show::run(args),
        Command::Rm(args) => models::remove(args),
        Command::Engines(args) => engines::run(args, &signals),
        Command::Doctor(args) => doctor::run(args),
        Command::Selftest(args) => selftest::run(args, &signals),
        Command::Agent(args) => agent::run(args),
        Command::Chaos(args) => chaos::run(args, &signals),
        Command::Kb(args) => kb::run(args),
        Command::Service(command) => service::run(command),
        Command::Upgrade(args) => upgrade::run(args, &signals),
        Command::UpgradeReceiver(args) => upgrade::receiver(args),
        Command::Completions(args) => shell::completions(args),
        Command::Man(args) => shell::man(args),
        Command::Version => output::print(&format!("paceline {}", release::version())),
    }
}

/// Reports `error`, unless stdout was closed; returns the exit code.
fn exit_code(error: &anyhow::Error) -> u8 {
    let own = error.downcast_ref::<Error>();
    if matches!(own, Some(Error::ReaderGone)) {
        return 0;
    }
    hint::report(error);
    if let Some(code) = launch::exit_code(error) {
        return code;
    }
    if own.is_some_and(Error::is_usage) {
        2
    } else {
        1
    }
}
