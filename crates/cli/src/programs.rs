//! `paceline programs`: a program or a socket on a machine of the cluster, as `ssh` would give it.
//!
//! Other commands and workers in Python start it. Its far end runs below the other machine's node,
//! where the owner started it with `--allow-programs`.

use std::io::{self, Read};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, bail};
use paceline_board::machines::consenting;
use paceline_launch::joined::{self, Request};
use paceline_node::tunnel;
use serde_json::json;

use crate::home;
use crate::member::{PortRange, ports};
use crate::output::{print, print_err};

/// Exit code without an answer of the other machine, as that of `ssh`.
const CODE_LOST: i32 = 255;

/// Most connections that a forwarder has at a time: a Dask worker has some with each other one.
const FORWARDED_MAX: usize = 1024;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The id of the machine's node
    #[arg(long, value_name = "ID")]
    node: Option<String>,
    /// Connect to this port of its loopback interface
    #[arg(long, value_name = "PORT", requires = "node")]
    port: Option<u16>,
    /// Connect to this Unix socket of it
    #[arg(long, value_name = "PATH", requires = "node", conflicts_with = "port")]
    socket: Option<PathBuf>,
    /// Lead connections to these ports of the loopback interface to the same ports of a node, until
    /// standard input ends; may be given several times
    #[arg(long, value_name = "A-B=ID", conflicts_with = "node", value_parser = forward)]
    forward: Vec<(PortRange, String)>,
    /// The other end, started by a node
    #[arg(long, conflicts_with = "node")]
    far: bool,
    /// Most private memory of a program that --far starts
    #[arg(long, value_name = "BYTES", requires = "far")]
    memory: Option<u64>,
    /// The program and its arguments. Without --node, the machines that run programs are listed
    #[arg(last = true, value_name = "PROGRAM", requires = "node")]
    command: Vec<String>,
}

/// Runs a program on a node, connects to it, is its far end, or lists machines that allow it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.far {
        return Ok(joined::far(args.memory)?);
    }
    if !args.forward.is_empty() {
        return forward_all(&args.forward);
    }
    let Some(node) = &args.node else {
        return list();
    };
    let request = match (args.port, &args.socket) {
        (Some(port), _) => Request::Port(port),
        (_, Some(path)) => Request::Socket(path.clone()),
        _ => Request::Run(args.command.clone()),
    };
    let line = tunnel::line(&home::folder()?, node, tunnel::PROGRAMS);
    let line = line.with_context(|| format!("no program on the machine {node}"))?;
    let (input, output, errors) = (io::stdin(), io::stdout(), io::stderr());
    match joined::near(line, &request, input, output, errors) {
        Ok(ending) if ending.is_success() => Ok(()),
        Ok(ending) => std::process::exit(ending.exit_code()),
        Err(joined::Error::Lost) => std::process::exit(CODE_LOST),
        Err(error) => bail!(error),
    }
}

/// Prints the machines that run programs, this one first, as one JSON object.
fn list() -> anyhow::Result<()> {
    let found = consenting(&home::folder()?)?;
    let machines = found.machines.iter().map(|machine| {
        let programs = !machine.is_own || found.is_open;
        json!({ "name": machine.name, "id": machine.id, "is_own": machine.is_own,
            "programs": programs })
    });
    let machines: Vec<_> = machines.collect();
    print(&json!({ "machines": machines, "refusing": found.refusing }).to_string())
}

/// Parses `A-B=ID`.
fn forward(text: &str) -> Result<(PortRange, String), String> {
    let parts = text.split_once('=');
    let (range, id) = parts.ok_or_else(|| format!("{text:?} is no A-B=ID"))?;
    Ok((ports(range)?, id.to_owned()))
}

/// Leads connections to nodes until standard input ends.
fn forward_all(forwards: &[(PortRange, String)]) -> anyhow::Result<()> {
    let count = Arc::new(AtomicUsize::new(0));
    let all = forwards.iter();
    let all = all.flat_map(|(PortRange(range), id)| range.clone().map(move |port| (port, id)));
    for (port, id) in all {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let listener = listener.with_context(|| format!("cannot listen at port {port}"))?;
        let (id, count) = (id.clone(), Arc::clone(&count));
        thread::spawn(move || {
            for stream in listener.incoming().filter_map(Result::ok) {
                if count.fetch_add(1, Ordering::Relaxed) >= FORWARDED_MAX {
                    count.fetch_sub(1, Ordering::Relaxed);
                    continue; // closes it
                }
                let (id, count) = (id.clone(), Arc::clone(&count));
                thread::spawn(move || {
                    if let Err(error) = lead(&stream, port, &id) {
                        print_err(format_args!("port {port} of {id}: {error:#}"));
                    }
                    let _ = stream.shutdown(Shutdown::Both);
                    count.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
    }
    let mut rest = [0; 64];
    while matches!(io::stdin().read(&mut rest), Ok(1..)) {}
    Ok(())
}

/// Joins a connection with a port of a node. Blocks until either ends.
fn lead(stream: &TcpStream, port: u16, id: &str) -> anyhow::Result<()> {
    let line = tunnel::line(&home::folder()?, id, tunnel::PROGRAMS)?;
    let input = stream.try_clone()?;
    stream.set_nodelay(true)?;
    joined::near(line, &Request::Port(port), input, stream, io::sink())?;
    Ok(())
}
