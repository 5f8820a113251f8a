//! `paceline bench comm`: cost of collectives on this machine, compared with other libraries.
//!
//! Other transports than shared memory and TCP work the same way, if this program can start the
//! ranks itself. With a launcher (`paceline launch`, `mlx.launch`, `mpirun`), each process is a
//! rank of its group, and rank 0 reports.

use std::num::NonZeroU8;
use std::path::PathBuf;

use anyhow::ensure;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use paceline_base::Rank;
use paceline_bench::comm::{Report, measure};
use paceline_bench::ranks::nodes::{self, Listen, LocalNode, NodeSelection};
use paceline_bench::ranks::{self, Force, RankSettings, RankStreams, deadline};
use paceline_comm::Backend;
use paceline_node::launcher_env;

use crate::member::{self, PortRange};
use crate::plaintext::variable;
use crate::process::{own_program, worker_env};
use crate::{home, output, plaintext};

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum BenchTransport {
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

impl BenchTransport {
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
enum PeerLibrary {
    /// MLX's ring (pip install 'mlx[cpu]')
    Mlx,
    /// Open MPI (Debian: openmpi-bin)
    Mpi,
}

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
    transport: BenchTransport,
    /// Use this algorithm wherever an operation has it
    #[arg(long, value_parser = force())]
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
    against: Option<PeerLibrary>,
    /// Python that has the other library
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Also write latencies over sizes as a picture
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Rank of a child process
    #[arg(long, hide = true)]
    as_rank: Option<u32>,
    /// A rank of another machine's measurement, which says the rest on standard input
    #[arg(long, hide = true)]
    elsewhere: bool,
    /// Ports that this machine's rank listens at for --nodes and --instance, as `up --data-ports`,
    /// which a firewall must let in [default: any]
    #[arg(long, value_name = "A-B", value_parser = member::ports)]
    data_ports: Option<PortRange>,
    /// Only interface that this machine's rank listens at for --nodes and --instance
    #[arg(long, value_name = "IF")]
    data_interface: Option<String>,
}

/// Runs the benchmark, or one of its ranks.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let settings = args.settings()?;
    if args.as_rank.is_some() || args.elsewhere {
        return rank(args, &settings);
    }
    if args.nodes.is_some() || args.instance.is_some() {
        return print(args, &over_cluster(args, &settings)?);
    }
    let (backend, plaintext) = (settings.backend, settings.plaintext);
    if launcher_env::is_launched(backend, &variable) {
        let alone = args.against.is_none() && !args.encrypt;
        ensure!(alone, "ranks of a launcher have no rivals");
        let group = launcher_env::join(backend, plaintext, &variable, deadline())?;
        let report = measure(&settings.spec(), &*group)?;
        return match group.rank() {
            Rank(0) => print(args, &report),
            _ => Ok(()),
        };
    }
    let report = match args.transport {
        BenchTransport::Local => {
            let alone = args.against.is_none() && !args.encrypt && args.streams.get() == 1;
            ensure!(
                alone,
                "threads have no rivals: choose --transport shm or tcp"
            );
            ranks::threads(&settings)?
        }
        _ => ranks::processes(&settings)?,
    };
    print(args, &report)
}

impl Args {
    fn settings(&self) -> anyhow::Result<RankSettings> {
        let backend = self.transport.backend();
        Ok(RankSettings {
            program: own_program()?,
            ranks: self.ranks,
            backend,
            algorithm: self.algorithm,
            max_bytes: self.max_bytes,
            plaintext: plaintext::asked_for(backend, self.plaintext)?,
            encrypt: self.encrypt,
            streams: self.streams,
            explain: self.explain,
            against: self.against.map(|peer| match peer {
                PeerLibrary::Mlx => ranks::RivalLibrary::Mlx,
                PeerLibrary::Mpi => ranks::RivalLibrary::Mpi,
            }),
            python: self.python.clone(),
        })
    }
}

/// Parses the name of an algorithm.
fn force() -> impl TypedValueParser<Value = Force> {
    let named = |name: String| Force::ALL.into_iter().find(|force| force.name() == name);
    PossibleValuesParser::new(Force::ALL.map(Force::name))
        .try_map(move |name| named(name).ok_or("no algorithm"))
}

/// Runs a rank: a child of the benchmark, here or on another machine.
fn rank(args: &Args, settings: &RankSettings) -> anyhow::Result<()> {
    let mut lines = RankStreams {
        input: &mut std::io::stdin().lock(),
        output: &mut std::io::stdout(),
    };
    match args.as_rank {
        Some(rank) => ranks::child(settings, Rank(rank), &variable, &mut lines),
        None => {
            let at = Listen {
                interface: args.data_interface.as_deref(),
                ports: args.data_ports.as_ref().map(|PortRange(ports)| ports),
            };
            nodes::rank(settings, at, &variable, &mut lines)
        }
    }
}

fn over_cluster(args: &Args, settings: &RankSettings) -> anyhow::Result<Report> {
    let here = LocalNode {
        home: &home::folder()?,
        listen: &member::listen_args(args.data_ports.as_ref(), args.data_interface.as_deref()),
        env: &worker_env(),
    };
    let names = match &args.instance {
        Some(model) => NodeSelection::of_instance(model, here)?,
        None => NodeSelection::parse(args.nodes.as_deref().unwrap_or_default()),
    };
    nodes::measure(settings, &names, here)
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
