//! Benchmark of the collectives over any group: medians by operation and size.
//!
//! Every rank calls [`measure`]; rank 0 returns the relevant report. [`sums`] is one turn against
//! another library, whose results become [`Rival`]s of the report.

mod picture;

use std::time::Instant;

use paceline_base::{Bytes, Rank};
use paceline_comm::{Deadline, Error, Group, Reduce, RegisteredMemory, Tuning};
use serde::{Deserialize, Serialize};

use crate::quantile;

/// Bytes of a rank's buffer: 4 B to 64 MiB in steps of 16 and, in between, of 4.
pub const SIZES: [usize; 13] = [
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

/// Bytes moved per size, which sets the number of calls, within bounds that keep medians meaningful
/// and the whole run under a minute. With 8 calls of 16 MiB a row took only 15 ms, and mainly
/// measured other load on a core.
const BYTES_PER_SIZE: usize = 128 << 20;
const CALLS: std::ops::RangeInclusive<usize> = 40..=1000;

/// Settings of the measurement.
#[derive(Clone, Debug)]
pub struct CollectiveSpec {
    /// Name of the transport, for the report.
    pub transport: String,
    /// Whether the transport buffers no messages, as on MLX's ring.
    pub holds_nothing: bool,
    pub max_bytes: usize,
    /// Deadline of the whole measurement.
    pub deadline: Deadline,
}

/// An operation at one size.
#[derive(Debug, Serialize, Deserialize)]
pub struct OperationRow {
    pub op: String,
    /// Bytes of a rank's buffer.
    pub bytes: usize,
    /// The algorithm used; empty if the operation has only one.
    pub algorithm: String,
    /// Tenth percentile of a call's time, in microseconds.
    pub p10_us: f64,
    pub p50_us: f64,
    /// 99th percentile of a call's time, in microseconds.
    pub p99_us: f64,
    /// Bytes that each link had to carry, in GB per second.
    pub bus_gb_s: f64,
}

/// Results of the measurement, as returned by rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub transport: String,
    pub ranks: u32,
    /// α: time of an empty message, in microseconds.
    pub alpha_us: f64,
    /// β: time of a byte, in nanoseconds.
    pub beta_ns: f64,
    /// The choice of algorithms by size, with reasons.
    pub explain: String,
    /// By size, then by operation.
    pub rows: Vec<OperationRow>,
    /// Other libraries that were measured in turn.
    #[serde(default)]
    pub peer: Vec<Rival>,
    /// Machines of the ranks, in their order; empty if all are on this one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
}

/// An all_reduce of another library, measured in turns with ours.
#[derive(Debug, Serialize, Deserialize)]
pub struct Rival {
    /// The library.
    pub peer: String,
    /// Bytes of a rank's buffer.
    pub bytes: usize,
    /// Median of all our turns.
    pub ours_us: f64,
    /// Median of all their turns.
    pub p50_us: f64,
    /// Median of our time over theirs, turn by turn.
    pub ratio: f64,
}

/// Buffers of one rank: `own` has one part, `all` one for each rank.
struct Buffers {
    own: RegisteredMemory<f32>,
    all: RegisteredMemory<f32>,
    again: RegisteredMemory<f32>,
    /// Number of calls so far, for those that alternate.
    turn: usize,
}

type OperationFn = fn(&dyn Group, &mut Buffers, Deadline) -> Result<(), Error>;

/// An operation: its name, the call, and how many times a rank's buffer crosses each link.
type Op = (&'static str, OperationFn, fn(f64) -> f64);

/// The baseline of all-reduce: rank 0 copies a buffer there and back, the others wait.
const COPIES: &str = "two_copies";

/// Memory that the copies walk through, so that they miss the caches. It is four times the last
/// cache of the machines that this was measured on.
const COPIED_BYTES: usize = 128 << 20;

const OPS: [Op; 9] = [
    ("barrier", |g, _, by| g.barrier(by), |_| 0.0),
    (COPIES, two_copies, |_| 2.0),
    ("two_handovers", two_handovers, |_| 2.0),
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

fn two_copies(group: &dyn Group, b: &mut Buffers, by: Deadline) -> Result<(), Error> {
    if group.rank() == Rank(0) {
        let length = b.own.len();
        let pairs = b.all.len() / (2 * length);
        let pair = &mut b.all[2 * length * (b.turn % pairs)..][..2 * length];
        let (one, other) = pair.split_at_mut(length);
        other.copy_from_slice(one);
        one.copy_from_slice(other);
        b.turn += 1;
    }
    group.barrier(by)
}

/// Copies of data that another core has just written; [`COPIES`] copies old data. Ranks alternate:
/// rank 0 copies the last rank's output, then the last rank copies rank 0's.
fn two_handovers(group: &dyn Group, b: &mut Buffers, by: Deadline) -> Result<(), Error> {
    group.broadcast(&mut b.own, Rank(group.size() - 1), by)?;
    group.broadcast(&mut b.own, Rank(0), by)
}

/// Every rank sends to the next and receives from the one before.
fn shift(group: &dyn Group, b: &mut Buffers, by: Deadline) -> Result<(), Error> {
    if group.size() > 1 {
        send(group, b, by)?;
        recv(group, b, by)?;
    }
    Ok(())
}

/// The same on a transport that buffers no messages: one rank must receive first.
fn shift_in_turns(group: &dyn Group, b: &mut Buffers, by: Deadline) -> Result<(), Error> {
    match group.rank() {
        _ if group.size() == 1 => Ok(()),
        Rank(0) => recv(group, b, by).and_then(|()| send(group, b, by)),
        _ => shift(group, b, by),
    }
}

fn send(group: &dyn Group, b: &Buffers, by: Deadline) -> Result<(), Error> {
    let next = (group.rank().0 + 1) % group.size();
    group.send(&b.own, Rank(next), 0, by)
}

fn recv(group: &dyn Group, b: &mut Buffers, by: Deadline) -> Result<(), Error> {
    let before = (group.rank().0 + group.size() - 1) % group.size();
    group.recv(&mut b.own, Rank(before), 0, by)
}

/// Number of calls of an operation on `bytes` bytes.
pub fn calls(bytes: usize) -> usize {
    (BYTES_PER_SIZE / bytes).clamp(*CALLS.start(), *CALLS.end())
}

/// Measures every operation that the group has, at every size. Collective.
pub fn measure(spec: &CollectiveSpec, group: &dyn Group) -> Result<Report, Error> {
    let (tuning, by) = (group.tuning(), spec.deadline);
    let mut rows = Vec::new();
    for bytes in SIZES.into_iter().filter(|bytes| *bytes <= spec.max_bytes) {
        for op in OPS {
            // Parts for all ranks of the largest sizes would not fit small machines.
            let many = matches!(op.0, "all_gather" | "reduce_scatter" | "all_to_all");
            if (op.0 == "barrier") <= (bytes == 4) && !(many && bytes > 16 << 20) {
                match row(group, &tuning, held(spec, op), bytes, by) {
                    // All ranks get this, and nothing was sent.
                    Err(Error::Unsupported { .. }) => {}
                    row => rows.push(row?),
                }
            }
        }
    }
    group.barrier(by)?;
    Ok(Report {
        transport: spec.transport.clone(),
        ranks: group.size(),
        alpha_us: tuning.alpha_us,
        beta_ns: tuning.beta_ns,
        explain: tuning.explain(group.size() as usize),
        rows,
        peer: Vec::new(),
        nodes: Vec::new(),
    })
}

/// An operation in the variant that this transport supports.
fn held(spec: &CollectiveSpec, (name, call, copies): Op) -> Op {
    match name {
        "send_recv" if spec.holds_nothing => (name, shift_in_turns, copies),
        _ => (name, call, copies),
    }
}

fn row(
    group: &dyn Group,
    tuning: &Tuning,
    (name, call, copies): Op,
    bytes: usize,
    by: Deadline,
) -> Result<OperationRow, Error> {
    let (size, length) = (group.size() as usize, bytes / 4);
    let many = matches!(name, "all_gather" | "reduce_scatter" | "all_to_all");
    let all = match name {
        COPIES if group.rank() == Rank(0) => 2 * length * (COPIED_BYTES / (2 * bytes)).max(1),
        _ if many => length * size,
        _ => 0,
    };
    let mut buffers = Buffers {
        own: RegisteredMemory::new(Some(group), length),
        all: RegisteredMemory::new(many.then_some(group), all),
        again: RegisteredMemory::new(Some(group), if many { all } else { 0 }),
        turn: 0,
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
    Ok(OperationRow {
        op: name.to_owned(),
        bytes,
        algorithm,
        p10_us: quantile(&times, 0.1),
        p50_us,
        p99_us: quantile(&times, 0.99),
        bus_gb_s: copies(size as f64) * bytes as f64 / p50_us / 1e3,
    })
}

/// Median microseconds of `calls` sums of `bytes`, after three to warm up. Collective.
pub fn sums(group: &dyn Group, (bytes, calls): (usize, usize), by: Deadline) -> Result<f64, Error> {
    let mut data = RegisteredMemory::<f32>::new(Some(group), bytes / 4);
    let mut times = Vec::new();
    for turn in 0..calls + 3 {
        let start = Instant::now();
        group.all_reduce(&mut data, Reduce::Sum, by)?;
        if turn >= 3 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(quantile(&times, 0.5))
}

impl Report {
    /// Latencies over sizes, as SVG.
    pub fn svg(&self) -> String {
        picture::svg(self)
    }

    /// The rows and those of rivals, as a text table.
    pub fn table(&self) -> String {
        let head = format!(
            "{:<15}{:>10} {:<10}{:>11}{:>11}{:>11}{:>10}",
            "operation", "bytes", "algorithm", "p10 us", "p50 us", "p99 us", "bus GB/s"
        );
        let rows = self.rows.iter().map(OperationRow::text);
        let rivals = self.peer.iter().map(Rival::text);
        rows.chain(rivals)
            .fold(head, |text, row| text + "\n" + &row)
    }
}

impl OperationRow {
    fn text(&self) -> String {
        format!(
            "{:<15}{:>10} {:<10}{:>11.1}{:>11.1}{:>11.1}{:>10.2}",
            self.op,
            Bytes(self.bytes as u64).to_string(),
            self.algorithm,
            self.p10_us,
            self.p50_us,
            self.p99_us,
            self.bus_gb_s
        )
    }
}

impl Rival {
    fn text(&self) -> String {
        format!(
            "all_reduce in turns {:>10}: ours {:>9.1} us, {} {:>9.1} us, ours / theirs {:.2}",
            Bytes(self.bytes as u64).to_string(),
            self.ours_us,
            self.peer,
            self.p50_us,
            self.ratio
        )
    }
}
