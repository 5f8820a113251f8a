//! Collectives of ranks in their own processes, and of the libraries they are compared with.
//!
//! The processes are the program `paceline bench comm` again, with the hidden `--as-rank`. A child
//! prints its address, reads the addresses of all, measures, and rank 0 prints the rows as JSON.
//! Then each line `bytes calls` on its input requests a turn against a rival. Rivals are MLX, Open
//! MPI, and ranks of its own kind without encryption or with one stream. With machines of a cluster
//! each rank is on one of them ([`nodes`]).

pub mod nodes;
mod rivals;

use std::fmt;
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::num::NonZeroU8;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use paceline_base::{Rank, hex, unhex};
use paceline_comm::{
    Algorithm, Backend, Deadline, Group, JoinParams, Plaintext, Strict, init, local, tcp,
};
use paceline_comm_rdma::settings::Lookup;
use paceline_node::launcher_env;
use paceline_process::{Ending, Program};
use serde::{Deserialize, Serialize};

use self::rivals::{RivalRanks, SumRunner, compare};
use crate::comm::{CollectiveSpec, Report, measure, sums};

/// Time limit of the whole measurement.
const PATIENCE: Duration = Duration::from_secs(600);

paceline_base::named_enum! {
    /// A library to compare with.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RivalLibrary {
        /// MLX's ring.
        Mlx = "mlx",
        Mpi = "mpi",
    }
}

paceline_base::named_enum! {
    /// An algorithm that is forced wherever an operation has it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Force {
        OneShot = "one-shot",
        TwoShot = "two-shot",
        Ring = "ring",
        Halving = "halving",
        Doubling = "doubling",
        Tree = "tree",
    }
}

impl Force {
    fn algorithm(self) -> Algorithm {
        Algorithm::from_name(self.name()).expect("each is an algorithm of comm")
    }
}

/// Settings of the measurement and of its processes.
#[derive(Clone, Debug)]
pub struct RankSettings {
    pub program: PathBuf,
    pub ranks: u32,
    /// The transport.
    pub backend: Backend,
    /// Force this algorithm wherever an operation has it.
    pub algorithm: Option<Force>,
    pub max_bytes: usize,
    /// Whether a transport without encryption is allowed.
    pub plaintext: Plaintext,
    /// Encrypt, and compare with unencrypted ranks.
    pub encrypt: bool,
    /// TCP connections of a pair; if several, compare with one.
    pub streams: NonZeroU8,
    /// Only print the choice of algorithms by size.
    pub explain: bool,
    /// Another library to measure on the same ranks and sizes, in turns.
    pub against: Option<RivalLibrary>,
    /// Python with the other library.
    pub python: PathBuf,
}

/// A rank's standard input and output.
pub struct RankStreams<'a> {
    /// From its parent.
    pub input: &'a mut dyn BufRead,
    /// To its parent.
    pub output: &'a mut dyn Write,
}

impl fmt::Debug for RankStreams<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").finish_non_exhaustive()
    }
}

impl RankStreams<'_> {
    fn write_line(&mut self, line: &str) -> Result<()> {
        writeln!(self.output, "{line}")?;
        Ok(self.output.flush()?)
    }
}

/// Measures ranks in processes, and all rivals.
pub fn processes(args: &RankSettings) -> Result<Report> {
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
        let mut others = RivalRanks::start(args, peer)?;
        let name = peer.name();
        report
            .peer
            .extend(compare(args, name, &mut ranks, &mut others)?);
    }
    ranks.end()?;
    Ok(report)
}

impl RankSettings {
    /// The measurement of every rank.
    pub fn spec(&self) -> CollectiveSpec {
        CollectiveSpec {
            transport: self.backend.to_string(),
            holds_nothing: self.backend == Backend::MlxRing,
            max_bytes: if self.explain { 0 } else { self.max_bytes },
            deadline: deadline(),
        }
    }

    /// For ranks that only run turns.
    fn quick(&self) -> Self {
        Self {
            max_bytes: 0,
            ..self.clone()
        }
    }
}

/// The deadline of a measurement that starts now.
pub fn deadline() -> Deadline {
    Deadline::at(Instant::now() + PATIENCE)
}

/// Measures ranks in threads of this process.
pub fn threads(args: &RankSettings) -> Result<Report> {
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

/// The variant of this program's ranks, for comparisons with themselves.
#[derive(Clone, Copy)]
struct Kind {
    encrypt: bool,
    streams: NonZeroU8,
}

/// The processes of one group, which have measured and wait for turns.
struct Ranks {
    programs: Vec<Program>,
}

impl Ranks {
    fn start(args: &RankSettings, kind: Kind) -> Result<(Self, Report)> {
        let start = |rank| Program::start(&mut rank_command(args, kind, rank));
        let programs = (0..args.ranks).map(start).collect::<Result<Vec<_>, _>>();
        let mut programs = programs.context("cannot start a rank")?;
        let mut addrs = Vec::new();
        for program in &mut programs {
            let line = program.receive_line()?;
            ensure!(!line.is_empty(), "a rank ended before it had an address");
            addrs.push(line.trim().to_owned());
        }
        let key = match kind.encrypt {
            true => hex(tcp::GroupKey::random()?.bytes()),
            false => "-".to_owned(),
        };
        let mut ranks = Self { programs };
        let id = hex(&tcp::GroupId::random().0);
        ranks.send_line(&format!("{id} {key} {}", addrs.join(" ")))?;
        let line = ranks.receive_line().context("rank 0 reported no figures")?;
        Ok((ranks, serde_json::from_str(&line)?))
    }

    fn send_line(&mut self, line: &str) -> Result<()> {
        for program in &mut self.programs {
            program.send_line(line)?;
        }
        Ok(())
    }

    /// Reads the next line of rank 0.
    fn receive_line(&mut self) -> Result<String> {
        let line = self.programs[0].receive_line()?;
        ensure!(!line.is_empty(), "a rank failed, its message is above");
        Ok(line)
    }

    /// Closes their inputs and waits for their end.
    fn end(mut self) -> Result<()> {
        self.programs.iter_mut().for_each(Program::close_input);
        for program in &mut self.programs {
            let ending = program.wait();
            let is_fine = ending.is_some_and(Ending::is_success);
            ensure!(is_fine, "a rank failed, its message is above");
        }
        Ok(())
    }
}

impl SumRunner for Ranks {
    fn turn(&mut self, bytes: usize, calls: usize) -> Result<f64> {
        self.send_line(&format!("{bytes} {calls}"))?;
        Ok(self.receive_line()?.trim().parse()?)
    }
}

fn rank_command(args: &RankSettings, kind: Kind, rank: u32) -> Command {
    let mut command = Command::new(&args.program);
    command
        .args(["bench", "comm", "--as-rank", &rank.to_string()])
        .args(["--max-bytes", &args.max_bytes.to_string()])
        .args(["--streams", &kind.streams.to_string()])
        .arg("--transport")
        .arg(args.backend.name());
    if let Some(force) = args.algorithm {
        command.arg("--algorithm").arg(force.name());
    }
    if args.explain {
        command.arg("--explain");
    }
    if args.plaintext == Plaintext::Allowed {
        command.arg("--plaintext");
    }
    command
}

/// Pins a rank to its own core if there are enough, as `mpirun` does. Two ranks that start on one
/// core share it until the system moves one, which takes longer than a small size.
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

/// Other systems place threads themselves.
#[cfg(not(target_os = "linux"))]
const fn bind(_ranks: usize, _rank: Rank) {}

/// The body of a child process: joins and measures. `lookup` returns environment variables.
///
/// # Errors
/// Ranks that do not meet, or a collective that fails.
pub fn child(
    args: &RankSettings,
    rank: Rank,
    lookup: Lookup<'_>,
    lines: &mut RankStreams<'_>,
) -> Result<()> {
    let listener = tcp::Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let cores = Cores::OfItsOwn;
    take_part(args, (rank, cores), listener, (lookup, lines))
}

/// Whether ranks of one machine get their own cores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cores {
    /// If there are enough.
    OfItsOwn,
    /// The rank is alone on its machine.
    All,
}

/// Prints its address, reads the others', joins and measures.
fn take_part(
    args: &RankSettings,
    (rank, cores): (Rank, Cores),
    listener: tcp::Listener,
    (lookup, lines): (Lookup<'_>, &mut RankStreams<'_>),
) -> Result<()> {
    lines.write_line(&listener.addr().to_string())?;
    let mut line = String::new();
    lines.input.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let id = tcp::GroupId(bytes(words.next().unwrap_or_default())?);
    let protection = match words.next().unwrap_or_default() {
        "-" => tcp::Protection::Loopback,
        key => tcp::Protection::Key(tcp::GroupKey::new(bytes(key)?)),
    };
    let addrs = words
        .map(str::parse)
        .collect::<Result<Vec<SocketAddr>, _>>()?;
    if cores == Cores::OfItsOwn {
        bind(addrs.len(), rank);
    }
    let config = tcp::Config {
        force: args.algorithm.map(Force::algorithm),
        streams: args.streams,
        protection,
        ..tcp::Config::default()
    };
    let by = deadline();
    let wire = launcher_env::of(args.backend, args.plaintext, lookup)?;
    let wire = wire.as_deref();
    let seat = JoinParams {
        listener,
        rank,
        addrs: &addrs,
        id,
        config,
    };
    let group = init(args.backend, Strict::Yes, seat, wire.as_slice(), by)?;
    let report = measure(&args.spec(), &*group)?;
    if rank == Rank(0) {
        lines.write_line(&serde_json::to_string(&report)?)?;
    }
    turns(&*group, lines)?;
    Ok(group.barrier(deadline())?)
}

/// Runs the sums requested by each input line, until the input ends.
fn turns(group: &dyn Group, lines: &mut RankStreams<'_>) -> Result<()> {
    let mut line = String::new();
    while lines.input.read_line(&mut line)? > 0 {
        let turn = line.trim_end().split_once(' ');
        let (bytes, calls) = turn.context("a turn is two numbers")?;
        let asked: (usize, usize) = (bytes.parse()?, calls.parse()?);
        let median_us = sums(group, asked, deadline())?;
        if group.rank() == Rank(0) {
            lines.write_line(&median_us.to_string())?;
        }
        line.clear();
    }
    Ok(())
}

fn bytes<const N: usize>(text: &str) -> Result<[u8; N]> {
    let bytes = unhex(text).and_then(|bytes| bytes.try_into().ok());
    bytes.with_context(|| format!("expected {} hexadecimal digits, got {}", 2 * N, text.len()))
}
