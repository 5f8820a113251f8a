//! `paceline bench comm`: what the collectives cost on this machine, beside other libraries.
//!
//! The ranks of `shm` and `tcp` are processes: this binary again, with the hidden `--as-rank`. A
//! child prints its address, reads the addresses of all, measures, and rank 0 prints the rows as
//! JSON. Peers (MLX, Open MPI) measure the same sizes in Python scripts that are part of this file.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use paceline_base::{Bytes, Rank};
use paceline_comm::{Algorithm, Deadline, Error, Group, Reduce, Tuning, local, shm, tcp};
use serde::{Deserialize, Serialize};

use super::quantile;
use crate::output;

/// Bytes of a rank's buffer: 4 B to 64 MiB in steps of 16 and, in between, of 4.
const SIZES: [usize; 13] = [
    4,
    16,
    64,
    256,
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];

/// Calls per size: as many as move this many bytes, within bounds that keep medians meaningful
/// and the whole run under a minute.
const BYTES_PER_SIZE: usize = 128 << 20;
const CALLS: std::ops::RangeInclusive<usize> = 5..=1000;

/// The whole measurement gives up after this long.
const PATIENCE: Duration = Duration::from_secs(600);

/// Sums with MLX's ring or, over ctypes, with Open MPI; prints `[[bytes, median us], ...]`.
const PEER: &str = r#"
import sys, time, json
which, sizes = sys.argv[1], json.loads(sys.argv[2])
if which == "mlx":
    import mlx.core as mx
    group = mx.distributed.init(strict=True, backend="ring")
    rank = group.rank()
    def make(n):
        x = mx.ones((max(n // 4, 1),)); mx.eval(x)
        return lambda: mx.eval(mx.distributed.all_sum(x, stream=mx.cpu))
else:
    import ctypes
    lib = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
    lib.MPI_Init(None, None)
    sym = lambda name: ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(lib, name)))
    world, f32, add = sym("ompi_mpi_comm_world"), sym("ompi_mpi_float"), sym("ompi_mpi_op_sum")
    number = ctypes.c_int(); lib.MPI_Comm_rank(world, ctypes.byref(number)); rank = number.value
    def make(n):
        count = max(n // 4, 1)
        a, b = (ctypes.c_float * count)(), (ctypes.c_float * count)()
        return lambda: lib.MPI_Allreduce(a, b, count, f32, add, world)
rows = []
for n, calls in sizes:
    call = make(n)
    for _ in range(3): call()
    times = []
    for _ in range(calls):
        start = time.perf_counter(); call(); times.append((time.perf_counter() - start) * 1e6)
    rows.append([n, sorted(times)[len(times) // 2]])
if rank == 0: print(json.dumps(rows), flush=True)
if which != "mlx": lib.MPI_Finalize()
"#;

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Transport {
    /// Threads of one process
    Local,
    /// Processes that share memory
    Shm,
    /// Processes, by TCP over loopback
    Tcp,
}

/// Whom to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    /// MLX's ring (pip install 'mlx[cpu]')
    Mlx,
    /// Open MPI (Debian: openmpi-bin)
    Mpi,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
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
    /// How ranks reach each other
    #[arg(long, value_enum, default_value = "tcp")]
    transport: Transport,
    /// Use this algorithm wherever an operation has it
    #[arg(long, value_enum)]
    algorithm: Option<Force>,
    /// Largest buffer of a rank, in bytes
    #[arg(long, default_value_t = 64 << 20)]
    max_bytes: usize,
    /// Only print which algorithm is used from which size on, and why
    #[arg(long)]
    explain: bool,
    /// Also measure another library on the same ranks and sizes
    #[arg(long, value_enum)]
    against: Option<Peer>,
    /// Python that has the other library
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// What a child process is told
    #[arg(long, hide = true)]
    as_rank: Option<u32>,
}

/// One operation at one size.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    op: String,
    bytes: usize,
    algorithm: String,
    p10_us: f64,
    p50_us: f64,
    p99_us: f64,
    /// What each link had to carry for this, per second.
    bus_gb_s: f64,
}

/// What rank 0 knows in the end.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    transport: String,
    ranks: u32,
    alpha_us: f64,
    beta_ns: f64,
    explain: String,
    rows: Vec<Row>,
    #[serde(default)]
    peer: Vec<PeerRow>,
}

#[derive(Debug, Serialize, Deserialize)]
struct PeerRow {
    peer: String,
    bytes: usize,
    p50_us: f64,
    /// Ours over theirs, for all_reduce.
    ratio: f64,
}

/// Runs the measurement, or one rank of it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(rank) = args.as_rank {
        return child(args, Rank(rank));
    }
    let mut report = match args.transport {
        Transport::Local => threads(args)?,
        Transport::Shm | Transport::Tcp => processes(args)?,
    };
    if let (Some(peer), false) = (args.against, args.explain) {
        compare(args, peer, &mut report)?;
    }
    print(args, &report)
}

fn deadline() -> Deadline {
    Deadline::at(Instant::now() + PATIENCE)
}

fn threads(args: &Args) -> anyhow::Result<Report> {
    let mut tuning = local::ranks(1)[0].tuning();
    tuning.force = args.algorithm.map(Force::algorithm);
    let ranks = local::ranks_with(args.ranks, tuning);
    std::thread::scope(|scope| {
        let run = |group: local::Local| measure(args, &group);
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

fn processes(args: &Args) -> anyhow::Result<Report> {
    let mut children = Children(Vec::new());
    let mut outputs = Vec::new();
    for rank in 0..args.ranks {
        let mut child = rank_command(args, rank)?
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
    let id = tcp::GroupId::random()
        .0
        .map(|byte| format!("{byte:02x}"))
        .concat();
    for child in &mut children.0 {
        let mut stdin = child.stdin.take().expect("piped");
        writeln!(stdin, "{id} {}", addrs.join(" "))?;
    }
    let report = serde_json::from_reader(&mut outputs[0]);
    for child in &mut children.0 {
        ensure!(
            child.wait()?.success(),
            "a rank failed, its message is above"
        );
    }
    report.context("rank 0 reported no figures")
}

fn rank_command(args: &Args, rank: u32) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["bench", "comm", "--as-rank", &rank.to_string()])
        .args(["--max-bytes", &args.max_bytes.to_string()])
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
    Ok(command)
}

fn value_name(value: impl clap::ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or(String::new(), |value| value.get_name().to_owned())
}

/// A child process: joins and measures.
fn child(args: &Args, rank: Rank) -> anyhow::Result<()> {
    let listener = tcp::Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    output::print(&listener.addr().to_string())?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let id = group_id(words.next().unwrap_or_default())?;
    let addrs = words
        .map(str::parse)
        .collect::<Result<Vec<SocketAddr>, _>>()?;
    let config = tcp::Config {
        force: args.algorithm.map(Force::algorithm),
        ..tcp::Config::default()
    };
    let by = deadline();
    let group: Box<dyn Group> = match args.transport {
        Transport::Shm => Box::new(shm::join_with(listener, rank, &addrs, id, config, by)?),
        _ => Box::new(tcp::join_with(listener, rank, &addrs, id, config, by)?),
    };
    let report = measure(args, &*group)?;
    if rank == Rank(0) {
        output::print(&serde_json::to_string(&report)?)?;
    }
    Ok(())
}

fn group_id(text: &str) -> anyhow::Result<tcp::GroupId> {
    let mut id = [0; 16];
    ensure!(
        text.len() == 32 && text.is_ascii(),
        "group id {text:?} is not 32 digits"
    );
    for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits)?, 16)?;
    }
    Ok(tcp::GroupId(id))
}

/// Buffers of one rank: `own` has one part, `all` one for each rank.
struct Buffers {
    own: Vec<f32>,
    all: Vec<f32>,
    again: Vec<f32>,
}

type Call = fn(&dyn Group, &mut Buffers, Deadline) -> Result<(), Error>;

/// An operation: its name, the call, and how many times a rank's buffer crosses each link.
type Op = (&'static str, Call, fn(f64) -> f64);

const OPS: [Op; 7] = [
    ("barrier", |g, _, by| g.barrier(by), |_| 0.0),
    (
        "all_reduce",
        |g, b, by| g.all_reduce(&mut b.own, Reduce::Sum, by),
        |ranks| 2.0 * (ranks - 1.0) / ranks,
    ),
    (
        "all_gather",
        |g, b, by| g.all_gather(&b.own, &mut b.all, by),
        |ranks| ranks - 1.0,
    ),
    (
        "reduce_scatter",
        |g, b, by| g.reduce_scatter(&b.all, &mut b.own, Reduce::Sum, by),
        |ranks| ranks - 1.0,
    ),
    (
        "all_to_all",
        |g, b, by| g.all_to_all(&b.all, &mut b.again, by),
        |ranks| ranks - 1.0,
    ),
    (
        "broadcast",
        |g, b, by| g.broadcast(&mut b.own, Rank(0), by),
        |_| 1.0,
    ),
    ("send_recv", shift, |_| 1.0),
];

/// Every rank sends to the next and receives from the one before.
fn shift(group: &dyn Group, b: &mut Buffers, by: Deadline) -> Result<(), Error> {
    let (rank, size) = (group.rank().0, group.size());
    if size > 1 {
        group.send(&b.own, Rank((rank + 1) % size), 0, by)?;
        group.recv(&mut b.own, Rank((rank + size - 1) % size), 0, by)?;
    }
    Ok(())
}

fn calls(bytes: usize) -> usize {
    (BYTES_PER_SIZE / bytes).clamp(*CALLS.start(), *CALLS.end())
}

fn measure(args: &Args, group: &dyn Group) -> Result<Report, Error> {
    let (tuning, by) = (group.tuning(), deadline());
    let mut rows = Vec::new();
    let sizes = SIZES
        .into_iter()
        .filter(|bytes| *bytes <= args.max_bytes && !args.explain);
    for bytes in sizes {
        for op in OPS {
            // Parts for all ranks of the largest sizes would not fit small machines.
            let many = matches!(op.0, "all_gather" | "reduce_scatter" | "all_to_all");
            if (op.0 == "barrier") <= (bytes == 4) && !(many && bytes > 16 << 20) {
                rows.push(row(group, &tuning, op, bytes, by)?);
            }
        }
    }
    group.barrier(by)?;
    Ok(Report {
        transport: value_name(args.transport),
        ranks: group.size(),
        alpha_us: tuning.alpha_us,
        beta_ns: tuning.beta_ns,
        explain: tuning.explain(group.size() as usize),
        rows,
        peer: Vec::new(),
    })
}

fn row(
    group: &dyn Group,
    tuning: &Tuning,
    (name, call, copies): Op,
    bytes: usize,
    by: Deadline,
) -> Result<Row, Error> {
    let (size, length) = (group.size() as usize, bytes / 4);
    let many = matches!(name, "all_gather" | "reduce_scatter" | "all_to_all");
    let all = if many { length * size } else { 0 };
    let mut buffers = Buffers {
        own: vec![0.0; length],
        all: vec![0.0; all],
        again: vec![0.0; all],
    };
    (0..3).try_for_each(|_| call(group, &mut buffers, by))?;
    let mut times = Vec::new();
    for _ in 0..calls(bytes) {
        let start = Instant::now();
        call(group, &mut buffers, by)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let p50_us = quantile(&times, 0.5);
    let algorithm = match name {
        "all_reduce" => tuning.all_reduce(bytes, size).to_string(),
        "broadcast" => tuning.broadcast(bytes, size).to_string(),
        _ => String::new(),
    };
    Ok(Row {
        op: name.to_owned(),
        bytes,
        algorithm,
        p10_us: quantile(&times, 0.1),
        p50_us,
        p99_us: quantile(&times, 0.99),
        bus_gb_s: copies(size as f64) * bytes as f64 / p50_us / 1e3,
    })
}

/// Measures the peer's all-reduce on the same sizes and adds the ratios.
fn compare(args: &Args, peer: Peer, report: &mut Report) -> anyhow::Result<()> {
    let ours: Vec<(usize, f64)> = report
        .rows
        .iter()
        .filter(|row| row.op == "all_reduce")
        .map(|row| (row.bytes, row.p50_us))
        .collect();
    let sizes: Vec<(usize, usize)> = ours.iter().map(|(b, _)| (*b, calls(*b).min(200))).collect();
    let sizes = serde_json::to_string(&sizes)?;
    let theirs = match peer {
        Peer::Mlx => mlx(args, &sizes)?,
        Peer::Mpi => mpi(args, &sizes)?,
    };
    let pairs = ours.into_iter().zip(theirs);
    report.peer = pairs
        .map(|((bytes, ours), (_, p50_us))| PeerRow {
            peer: value_name(peer),
            bytes,
            p50_us,
            ratio: ours / p50_us,
        })
        .collect();
    Ok(())
}

fn mlx(args: &Args, sizes: &str) -> anyhow::Result<Vec<(usize, f64)>> {
    let addrs = (0..args.ranks).map(|_| {
        let free = std::net::TcpListener::bind(("127.0.0.1", 0))?;
        Ok(vec![free.local_addr()?.to_string()])
    });
    let addrs = addrs.collect::<std::io::Result<Vec<_>>>()?;
    let hosts = tempfile::NamedTempFile::new()?;
    serde_json::to_writer(&hosts, &addrs)?;
    let mut children = Children(Vec::new());
    for rank in 0..args.ranks {
        let child = Command::new(&args.python)
            .args(["-c", PEER, "mlx", sizes])
            .env("MLX_RANK", rank.to_string())
            .env("MLX_HOSTFILE", hosts.path())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", args.python.display()))?;
        children.0.push(child);
    }
    let output = children.0[0].stdout.take().expect("piped");
    serde_json::from_reader(output).context("MLX gave no figures, its message is above")
}

fn mpi(args: &Args, sizes: &str) -> anyhow::Result<Vec<(usize, f64)>> {
    let output = Command::new("mpirun")
        .args([
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
        ])
        .args(["-n", &args.ranks.to_string()])
        .arg(&args.python)
        .args(["-c", PEER, "mpi", sizes])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run mpirun")?;
    if !output.status.success() {
        bail!("Open MPI did not run ({})", output.status);
    }
    serde_json::from_slice(&output.stdout).context("Open MPI gave no figures")
}

fn print(args: &Args, report: &Report) -> anyhow::Result<()> {
    if args.json {
        return output::print(&serde_json::to_string(report)?);
    }
    output::print(&format!("{} over {}", report.explain, report.transport))?;
    if args.explain {
        return Ok(());
    }
    output::print(&format!(
        "{:<15}{:>10} {:<10}{:>11}{:>11}{:>11}{:>10}",
        "operation", "bytes", "algorithm", "p10 us", "p50 us", "p99 us", "bus GB/s"
    ))?;
    for row in &report.rows {
        output::print(&format!(
            "{:<15}{:>10} {:<10}{:>11.1}{:>11.1}{:>11.1}{:>10.2}",
            row.op,
            Bytes(row.bytes as u64).to_string(),
            row.algorithm,
            row.p10_us,
            row.p50_us,
            row.p99_us,
            row.bus_gb_s
        ))?;
    }
    for row in &report.peer {
        output::print(&format!(
            "{:<15}{:>10} {:<10}{:>11}{:>11.1}   ours / theirs {:.2}",
            "all_reduce",
            Bytes(row.bytes as u64).to_string(),
            row.peer,
            "",
            row.p50_us,
            row.ratio
        ))?;
    }
    Ok(())
}
