//! `paceline worker`: one rank of an instance. Started by `run`, `up` and `bench`, not by users.

use std::io::Error as IoError;
use std::sync::Arc;

use paceline_base::Bytes;
use paceline_comm::Plaintext;
use paceline_node::launcher_env;
use paceline_worker::process::WorkerSettings;
use signal_hook::consts::SIGUSR2;
use signal_hook::flag;

use crate::error::started_by_hand;
use crate::member::{self, PortRange};
use crate::plaintext::variable;
use crate::{home, load};

/// Arguments of the hidden command.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Ports to listen at for ranks of other machines
    #[arg(long, value_name = "A-B", value_parser = member::ports)]
    data_ports: Option<PortRange>,
    /// Bytes on disk for prompts that were read; none without
    #[arg(long, value_name = "BYTES")]
    prefix_cache: Option<u64>,
    /// Keep packed weights on disk
    #[arg(long)]
    packed: bool,
}

/// Runs the worker; errors go to the parent, so nothing is printed.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let kernels = |threads, pinning| load::kernels_at(threads, pinning).map_err(IoError::other);
    // The parent requested plaintext, or has no such transport.
    let wire =
        |backend| launcher_env::of(backend, Plaintext::Allowed, &variable).map_err(IoError::other);
    let ports = args.data_ports.clone().map(|PortRange(ports)| ports);
    let disk = args.prefix_cache.map(Bytes).map(home::prefixes);
    let disk = disk.transpose()?;
    let halted = Arc::default();
    // Sent by `paceline chaos`. Without a handler it would end the process.
    flag::register(SIGUSR2, Arc::clone(&halted))?;
    let settings = WorkerSettings {
        mlx: home::mlx_places()?,
        ports,
        disk,
        packed: home::packed().ok(),
        keeps_packed: args.packed,
        halted,
    };
    match paceline_worker::process::run(kernels, wire, settings) {
        Ok(never) => match never {},
        Err(error) if error.is_by_hand() => Err(started_by_hand().into()),
        Err(error) => Err(error.into()),
    }
}

/// `paceline template`: runs the chat template of one model, within limits.
pub(crate) fn template() -> anyhow::Result<()> {
    match paceline_worker::interpreter::run() {
        Ok(never) => match never {},
        Err(error) if error.is_by_hand() => Err(started_by_hand().into()),
        Err(error) => Err(error.into()),
    }
}
