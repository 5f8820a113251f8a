//! `paceline bench comm`: what the collectives cost on this machine, beside other libraries.
//!
//! The ranks of `shm` and `tcp` are processes: this binary again, with the hidden `--as-rank`. A
//! child prints its address, reads the addresses of all, measures, and rank 0 prints the rows as
//! JSON. Then each line `bytes calls` on its input is a turn against a rival (`rivals`): MLX, Open
//! MPI, or ranks of its own kind without encryption or with one stream.
//!
//! Wires of other kinds work the same way where this program can start the ranks itself. Started
//! by a launcher (`paceline launch`, `mlx.launch`, `mpirun`), each process is a rank of its group,
//! and rank 0 reports. With `--nodes` or `--instance` each rank is on a machine of the cluster
//! (`nodes`).

mod nodes;
mod rivals;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::num::NonZeroU8;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use paceline_base::Rank;
use paceline_bench::comm::{Report, Spec, measure, sums};
use paceline_comm::{Algorithm, Backend, Deadline, Group, Seat, Strict, init, local, tcp};
use serde::{Deserialize, Serialize};

pub(crate) use self::nodes::start_rank;
use self::rivals::{Others, Turns, compare};
use crate::member::{self, Ports};
use crate::{output, wires};

/// The whole measurement gives up after this long.
const PATIENCE: Duration = Duration::from_secs(600);

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Transport {
    /// Threads of one process
    Local,
    /// Processes that share memory
    Shm,
    /// Processes, by TCP over loopback
    Tcp,
    /// RDMA: ranks of a launcher, or the devices in MLX_IBV_DEVICES; wants --plaintext
    Rdma,
    /// MLX's ring: ranks of a launcher, or processes over loopback; wants --plaintext
    MlxRing,
    /// MPI: ranks of mpirun; wants --plaintext
    Mpi,
    /// NCCL: ranks of a launcher, or processes on this machine's GPUs; wants --plaintext
    Nccl,
}

impl Transport {
    const fn backend(self) -> Backend {
        match self {
            Self::Local => Backend::Local,
            Self::Shm => Backend::Shm,
            Self::Tcp => Backend::Tcp,
            Self::Rdma => Backend::Rdma,
            Self::MlxRing => Backend::MlxRing,
            Self::Mpi => Backend::Mpi,
            Self::Nccl => Backend::Nccl,
        }
    }
}

/// Whom to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    /// MLX's ring (pip install 'mlx[cpu]')
    Mlx,
    /// Open MPI (Debian: openmpi-bin)
    Mpi,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum, Serialize, Deserialize)]
enum Force {
    OneShot,
    TwoShot,
    Ring,
    Halving,
    Doubling,
    Tree,
}

impl Force {
    fn algorithm(self) -> Algorithm {
        match self {
            Self::OneShot => Algorithm::OneShot,
            Self::TwoShot => Algorithm::TwoShot,
            Self::Ring => Algorithm::Ring,
            Self::Halving => Algorithm::Halving,
            Self::Doubling => Algorithm::Doubling,
            Self::Tree => Algorithm::Tree,
        }
    }
}

/// Arguments of `bench comm`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// A rank on each of these machines of the cluster: how many, or their names, such as a,b; over
    /// the ways that their workers would use, encrypted
    #[arg(long, value_name = "N|A,B,..",
          conflicts_with_all = ["ranks", "transport", "plaintext", "encrypt", "against"])]
    nodes: Option<String>,
    /// A rank on each machine that computes the loaded MODEL
    #[arg(long, value_name = "MODEL",
          conflicts_with_all = ["nodes", "ranks", "transport", "plaintext", "encrypt", "against"])]
    instance: Option<String>,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value = "tcp")]
    transport: Transport,
    /// Use this algorithm wherever an operation has it
    #[arg(long, value_enum)]
    algorithm: Option<Force>,
    /// Largest buffer of a rank, in bytes
    #[arg(long, default_value_t = 64 << 20)]
    max_bytes: usize,
    /// Allow a transport that cannot encrypt
    #[arg(long)]
    plaintext: bool,
    /// Encrypt, and compare with ranks that do not
    #[arg(long)]
    encrypt: bool,
    /// TCP connections of a pair for collectives; with more than one, compare with one
    #[arg(long, default_value = "1")]
    streams: NonZeroU8,
    /// Only print which algorithm is used from which size on, and why
    #[arg(long)]
    explain: bool,
    /// Also measure another library on the same ranks and sizes, in turns
    #[arg(long, value_enum)]
    against: Option<Peer>,
    /// Python that has the other library
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Also write latencies over sizes as a picture
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// What a child process is told
    #[arg(long, hide = true)]
    as_rank: Option<u32>,
    /// A rank of another machine's measurement, which says the rest on standard input
    #[arg(long, hide = true)]
    elsewhere: bool,
    /// Ports that this machine's rank listens at for --nodes and --instance, as `up --data-ports`,
    /// which a firewall must let in [default: any]
    #[arg(long, value_name = "A-B", value_parser = member::ports)]
    data_ports: Option<Ports>,
    /// Only interface that this machine's rank listens at for --nodes and --instance
    #[arg(long, value_name = "IF")]
    data_interface: Option<String>,
}

/// Runs the measurement, or one rank of it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(rank) = args.as_rank {
        return child(args, Rank(rank));
    }
    if args.elsewhere {
        return nodes::rank(args);
    }
    if args.nodes.is_some() || args.instance.is_some() {
        return print(args, &nodes::measure(args)?);
    }
    let backend = args.transport.backend();
    let plaintext = wires::asked_for(backend, args.plaintext)?;
    if wires::is_launched(backend) {
        let alone = args.against.is_none() && !args.encrypt;
        ensure!(alone, "ranks of a launcher have no rivals");
        let group = wires::join(backend, plaintext, deadline())?;
        let report = measure(&args.spec(), &*group)?;
        return match group.rank() {
            Rank(0) => print(args, &report),
            _ => Ok(()),
        };
    }
    let report = match args.transport {
        Transport::Local => {
            let alone = args.against.is_none() && !args.encrypt && args.streams.get() == 1;
            ensure!(
                alone,
                "threads have no rivals: choose --transport shm or tcp"
            );
            threads(args)?
        }
        _ => processes(args)?,
    };
    print(args, &report)
}

/// Ranks in processes, and all they are compared with.
fn processes(args: &Args) -> anyhow::Result<Report> {
    let wanted = Kind {
        encrypt: args.encrypt,
        streams: args.streams,
    };
    let (mut ranks, mut report) = Ranks::start(args, wanted)?;
    if args.explain {
        return Ok(report);
    }
    if args.encrypt {
        let plain = Kind {
            encrypt: false,
            ..wanted
        };
        let (mut plain, _) = Ranks::start(&args.quick(), plain)?;
        report
            .peer
            .extend(compare(args, "plain", &mut ranks, &mut plain)?);
    }
    if args.streams.get() > 1 {
        let one = Kind {
            streams: NonZeroU8::MIN,
            ..wanted
        };
        let (mut one, _) = Ranks::start(&args.quick(), one)?;
        report
            .peer
            .extend(compare(args, "1 stream", &mut ranks, &mut one)?);
    }
    if let Some(peer) = args.against {
        let mut others = Others::start(args, peer)?;
        let name = value_name(peer);
        report
            .peer
            .extend(compare(args, &name, &mut ranks, &mut others)?);
    }
    ranks.end()?;
    Ok(report)
}

impl Args {
    /// What every rank measures.
    fn spec(&self) -> Spec {
        Spec {
            transport: value_name(self.transport),
            holds_nothing: self.transport == Transport::MlxRing,
            max_bytes: if self.explain { 0 } else { self.max_bytes },
            deadline: deadline(),
        }
    }

    /// For ranks that only take turns.
    fn quick(&self) -> Self {
        Self {
            max_bytes: 0,
            python: self.python.clone(),
            plot: None,
            nodes: None,
            instance: None,
            data_ports: None,
            data_interface: None,
            ..*self
        }
    }
}

fn deadline() -> Deadline {
    Deadline::at(Instant::now() + PATIENCE)
}

fn threads(args: &Args) -> anyhow::Result<Report> {
    let mut tuning = local::ranks(1)[0].tuning();
    tuning.force = args.algorithm.map(Force::algorithm);
    let ranks = local::ranks_with(args.ranks, tuning);
    std::thread::scope(|scope| {
        let run = |group: local::Local| measure(&args.spec(), &group);
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|g| scope.spawn(move || run(g)))
            .collect();
        let results = threads
            .into_iter()
            .map(|t| t.join().expect("no rank panics"));
        let mut results = results.collect::<Result<Vec<_>, _>>()?;
        Ok(results.swap_remove(0))
    })
}

/// Children that are ended with their owner.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What ranks of this program differ in, when compared with themselves.
#[derive(Clone, Copy)]
struct Kind {
    encrypt: bool,
    streams: NonZeroU8,
}

/// The ranks of one group, as processes that have measured and wait for turns.
struct Ranks {
    children: Children,
    outputs: Vec<BufReader<ChildStdout>>,
}

impl Ranks {
    fn start(args: &Args, kind: Kind) -> anyhow::Result<(Self, Report)> {
        let (mut children, mut outputs) = (Children(Vec::new()), Vec::new());
        for rank in 0..args.ranks {
            let mut child = rank_command(args, kind, rank)?
                .spawn()
                .context("cannot start a rank")?;
            outputs.push(BufReader::new(child.stdout.take().expect("piped")));
            children.0.push(child);
        }
        let mut addrs = Vec::new();
        for output in &mut outputs {
            let mut line = String::new();
            output.read_line(&mut line)?;
            ensure!(!line.is_empty(), "a rank ended before it had an address");
            addrs.push(line.trim().to_owned());
        }
        let key = match kind.encrypt {
            true => hex(tcp::GroupKey::random()?.bytes()),
            false => "-".to_owned(),
        };
        let mut ranks = Self { children, outputs };
        let id = hex(&tcp::GroupId::random().0);
        ranks.tell(&format!("{id} {key} {}", addrs.join(" ")))?;
        let line = ranks.hear().context("rank 0 reported no figures")?;
        Ok((ranks, serde_json::from_str(&line)?))
    }

    fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        for child in &mut self.children.0 {
            writeln!(child.stdin.as_mut().expect("piped"), "{line}")?;
        }
        Ok(())
    }

    /// The next line of rank 0.
    fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.outputs[0].read_line(&mut line)?;
        ensure!(!line.is_empty(), "a rank failed, its message is above");
        Ok(line)
    }

    /// Lets them end.
    fn end(mut self) -> anyhow::Result<()> {
        for child in &mut self.children.0 {
            drop(child.stdin.take());
        }
        for child in &mut self.children.0 {
            let status = child.wait()?;
            ensure!(status.success(), "a rank failed, its message is above");
        }
        Ok(())
    }
}

impl Turns for Ranks {
    fn turn(&mut self, bytes: usize, calls: usize) -> anyhow::Result<f64> {
        self.tell(&format!("{bytes} {calls}"))?;
        Ok(self.hear()?.trim().parse()?)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn rank_command(args: &Args, kind: Kind, rank: u32) -> anyhow::Result<Command> {
    let mut command = Command::new(crate::process::own_program()?);
    command
        .args(["bench", "comm", "--as-rank", &rank.to_string()])
        .args(["--max-bytes", &args.max_bytes.to_string()])
        .args(["--streams", &kind.streams.to_string()])
        .arg("--transport")
        .arg(value_name(args.transport))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    if let Some(force) = args.algorithm {
        command.arg("--algorithm").arg(value_name(force));
    }
    if args.explain {
        command.arg("--explain");
    }
    if args.plaintext {
        command.arg("--plaintext");
    }
    Ok(command)
}

fn value_name(value: impl clap::ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or(String::new(), |value| value.get_name().to_owned())
}

/// Gives a rank a core of its own where there are enough, as `mpirun` does: two ranks that start on
/// one core take turns there until the system notices, which is longer than a small size takes.
#[cfg(target_os = "linux")]
fn bind(ranks: usize, rank: Rank) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(all) = sched_getaffinity(None) else {
        return;
    };
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core));
    if let (true, Some(core)) = (all.count() as usize >= ranks, cores.nth(rank.0 as usize)) {
        let mut own = CpuSet::new();
        own.set(core);
        let _ = sched_setaffinity(None, &own); // refused: as it was
    }
}

/// Other systems place threads as they like.
#[cfg(not(target_os = "linux"))]
const fn bind(_ranks: usize, _rank: Rank) {}

/// A child process: joins and measures.
fn child(args: &Args, rank: Rank) -> anyhow::Result<()> {
    let listener = tcp::Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    take_part(args, rank, listener)
}

/// Says where it listens, hears where the others do, and measures with them.
fn take_part(args: &Args, rank: Rank, listener: tcp::Listener) -> anyhow::Result<()> {
    output::print(&listener.addr().to_string())?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let id = tcp::GroupId(unhex(words.next().unwrap_or_default())?);
    let protection = match words.next().unwrap_or_default() {
        "-" => tcp::Protection::Loopback,
        key => tcp::Protection::Key(tcp::GroupKey::new(unhex(key)?)),
    };
    let addrs = words
        .map(str::parse)
        .collect::<Result<Vec<SocketAddr>, _>>()?;
    if !args.elsewhere {
        bind(addrs.len(), rank);
    }
    let config = tcp::Config {
        force: args.algorithm.map(Force::algorithm),
        streams: args.streams,
        protection,
        ..tcp::Config::default()
    };
    let by = deadline();
    let backend = args.transport.backend();
    let wire = wires::of(backend, wires::asked_for(backend, args.plaintext)?)?;
    let wire = wire.as_deref();
    let seat = Seat {
        listener,
        rank,
        addrs: &addrs,
        id,
        config,
    };
    let group = init(backend, Strict::Yes, seat, wire.as_slice(), by)?;
    let report = measure(&args.spec(), &*group)?;
    if rank == Rank(0) {
        output::print(&serde_json::to_string(&report)?)?;
    }
    turns(&*group)?;
    Ok(group.barrier(deadline())?)
}

/// Sums as often as each line of the input says, until it ends.
fn turns(group: &dyn Group) -> anyhow::Result<()> {
    for line in std::io::stdin().lines() {
        let line = line?;
        let (bytes, calls) = line.split_once(' ').context("a turn is two numbers")?;
        let asked: (usize, usize) = (bytes.parse()?, calls.parse()?);
        let median_us = sums(group, asked, deadline())?;
        if group.rank() == Rank(0) {
            output::print(&median_us.to_string())?;
        }
    }
    Ok(())
}

fn unhex<const N: usize>(text: &str) -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    let right = text.len() == 2 * N && text.is_ascii();
    ensure!(
        right,
        "expected {} hexadecimal digits, got {}",
        2 * N,
        text.len()
    );
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits)?, 16)?;
    }
    Ok(bytes)
}

fn print(args: &Args, report: &Report) -> anyhow::Result<()> {
    output::draw(args.plot.as_deref(), || report.svg())?;
    if args.json {
        return output::print(&serde_json::to_string(report)?);
    }
    output::print(&format!("{} over {}", report.explain, report.transport))?;
    if !report.nodes.is_empty() {
        let nodes = report.nodes.join(", ");
        output::print(&format!("ranks on {}", output::printable(&nodes)))?;
    }
    if args.explain {
        return Ok(());
    }
    output::print(&report.table())
}
