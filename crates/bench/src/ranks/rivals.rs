//! Programs measured against the ranks of `bench comm`. They take turns, so that other load on the
//! machine affects both alike.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use paceline_process::Process;

use super::{RankSettings, Ranks, RivalLibrary};
use crate::comm::{Rival, SIZES, calls};
use crate::quantile;

/// A rank of MLX or Open MPI.
const SCRIPT: &str = include_str!("../../../../scripts/peers/collectives.py");

/// Turns of each side at each size; the median of their ratios counts.
const TURNS: usize = 5;

/// Time limit for the ranks of another library to start.
const START: Duration = Duration::from_secs(60);

/// A group that computes sums on request.
pub(super) trait SumRunner {
    /// Median time of `calls` sums of `bytes`, in microseconds.
    fn turn(&mut self, bytes: usize, calls: usize) -> Result<f64>;
}

/// Measures `ours` and `theirs` in turns, at every size up to the largest requested.
pub(super) fn compare(
    args: &RankSettings,
    name: &str,
    ours: &mut Ranks,
    theirs: &mut dyn SumRunner,
) -> Result<Vec<Rival>> {
    let sizes = SIZES.into_iter().filter(|bytes| *bytes <= args.max_bytes);
    let row = |bytes: usize| {
        let calls = (calls(bytes) / TURNS).max(3);
        let pairs = (0..TURNS).map(|_| {
            let theirs = theirs.turn(bytes, calls)?;
            Ok((ours.turn(bytes, calls)?, theirs))
        });
        let pairs: Vec<(f64, f64)> = pairs.collect::<Result<_>>()?;
        let median = |of: fn(&(f64, f64)) -> f64| {
            let values: Vec<f64> = pairs.iter().map(of).collect();
            quantile(&values, 0.5)
        };
        Ok(Rival {
            peer: name.to_owned(),
            bytes,
            ours_us: median(|pair| pair.0),
            p50_us: median(|pair| pair.1),
            ratio: median(|pair| pair.0 / pair.1),
        })
    };
    sizes.map(row).collect()
}

/// Ranks of another library.
pub(super) struct RivalRanks {
    _processes: Vec<Process>,
    /// By rank.
    streams: Vec<BufReader<TcpStream>>,
}

impl RivalRanks {
    /// Starts the ranks and waits until all have connected.
    pub(super) fn start(args: &RankSettings, peer: RivalLibrary) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let port = listener.local_addr()?.port().to_string();
        let mut processes = match peer {
            RivalLibrary::Mlx => mlx(args, &port)?,
            RivalLibrary::Mpi => vec![mpi(args, &port)?],
        };
        let mut streams = Vec::new();
        listener.set_nonblocking(true)?;
        let until = Instant::now() + START;
        while streams.len() < args.ranks as usize {
            match listener.accept() {
                Ok((stream, _)) => streams.push(greeted(stream)?),
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => return Err(error).context("another library does not start"),
            }
            if let Some(ended) = processes.iter_mut().find(|it| it.has_ended()) {
                let (name, ending) = (peer.name(), ended.reap());
                bail!("{name} {ending}, its message is above");
            }
        }
        streams.sort_by_key(|(rank, _)| *rank);
        Ok(Self {
            _processes: processes,
            streams: streams.into_iter().map(|(_, stream)| stream).collect(),
        })
    }
}

/// Reads the rank of a new connection.
fn greeted(stream: TcpStream) -> Result<(u32, BufReader<TcpStream>)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(START))?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let rank = line
        .trim()
        .parse()
        .context("a rank did not say which it is")?;
    Ok((rank, stream))
}

impl SumRunner for RivalRanks {
    fn turn(&mut self, bytes: usize, calls: usize) -> Result<f64> {
        for stream in &mut self.streams {
            writeln!(stream.get_mut(), "[{bytes}, {calls}]")?;
        }
        let mut line = String::new();
        self.streams[0].read_line(&mut line)?;
        line.trim()
            .parse()
            .context("another library gave no figures, its message is above")
    }
}

fn mlx(args: &RankSettings, port: &str) -> Result<Vec<Process>> {
    let addrs = (0..args.ranks).map(|_| {
        let free = TcpListener::bind(("127.0.0.1", 0))?;
        Ok(vec![free.local_addr()?.to_string()])
    });
    let addrs = addrs.collect::<std::io::Result<Vec<_>>>()?;
    let hosts = tempfile::NamedTempFile::new()?.into_temp_path();
    std::fs::write(&hosts, serde_json::to_string(&addrs)?)?;
    let mut processes = Vec::new();
    for rank in 0..args.ranks {
        let mut command = Command::new(&args.python);
        command
            .args(["-c", SCRIPT, "mlx", port])
            .env("MLX_RANK", rank.to_string())
            .env("MLX_HOSTFILE", &*hosts)
            .stdin(Stdio::null());
        let process = Process::start(&mut command);
        processes.push(process.with_context(|| format!("cannot run {}", args.python.display()))?);
    }
    // The ranks read the file when they start; it may stay behind.
    let _ = hosts.keep();
    Ok(processes)
}

fn mpi(args: &RankSettings, port: &str) -> Result<Process> {
    let options = [
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
    ];
    let mut command = Command::new("mpirun");
    command
        .args(options)
        .args(["-n", &args.ranks.to_string()])
        .arg(&args.python)
        .args(["-c", SCRIPT, "mpi", port])
        .stdin(Stdio::null());
    Process::start(&mut command).context("cannot run mpirun")
}
