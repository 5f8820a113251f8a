//! Measures the prefill speed of a split, with steps in one pass and in two overlapping halves.
//! This program is one rank of the split, on this machine or another.
//!
//! ```text
//! cargo bench -p paceline-model --bench overlap -- \
//!     MODEL SPLIT ADDRESSES any|shm|tcp sealed|clear ROWS PAIRS RANK
//! ```
//!
//! Each rank is a process with one thread; all get the same arguments but for RANK. ADDRESSES lists
//! one address per rank, separated by commas. Each of PAIRS measures both modes in alternating
//! order, each with new links and a short warm-up step. The leader prints tokens per second, and at
//! the end the ratio of the medians. `scripts/bench/two_hosts.sh` starts two ranks with a network
//! between them.

#![allow(clippy::print_stdout, reason = "a bench reports on standard output")]

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::{Rank, median};
use paceline_comm::tcp::{Config as Tcp, GroupId, GroupKey, KEY_BYTES, Listener, Protection};
use paceline_comm::{Deadline, Group, JoinParams, Strict, init};
use paceline_model::{
    Batch, BatchSequence, BatchSize, Config, Links, LoadOptions, Logits, Model, ModelSource, Split,
    Workspace,
};
use paceline_tensor::{Kernels, PAGE};

/// Timeout for another rank, which may still be packing its weights.
const PATIENCE: Duration = Duration::from_secs(120);

/// Rows of the warm-up step.
const WARM_ROWS: usize = 64;

type BenchResult<T> = Result<T, Box<dyn Error>>;

fn main() -> BenchResult<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    // Cargo adds an argument of its own.
    let [model, split, addrs, backend, protection, rows, pairs, rank] = args[..] else {
        println!("overlap: MODEL SPLIT ADDRESSES any|shm|tcp sealed|clear ROWS PAIRS RANK");
        return Ok(());
    };
    let world = meet(addrs, backend, protection, rank.parse()?)?;
    let mut model = load(Path::new(model), split, &*world)?;
    let mut speeds = [vec![], vec![]];
    for pair in 0..pairs.parse()? {
        for overlap in [pair % 2 == 1, pair % 2 == 0] {
            let mut links = links(&*world, &model)?;
            if pair == 0 && overlap {
                let (rank, tuning) = (world.rank(), world.tuning());
                println!("{rank}: {tuning:?}, by itself overlap: {}", links.overlap);
            }
            links.overlap = overlap;
            model = model.link(links);
            speeds[usize::from(overlap)].push(speed(&model, rows.parse()?)?);
        }
        if model.shard().leads() {
            report("tokens/s", [0, 1].map(|at: usize| speeds[at][pair]));
        }
    }
    world.barrier(soon())?;
    if model.shard().leads() {
        report("medians", speeds.map(median));
    }
    Ok(())
}

fn report(what: &str, [off, on]: [f64; 2]) {
    let ratio = on / off;
    println!("{what}: without {off:.2}, with {on:.2}, ratio {ratio:.3}");
}

fn soon() -> Deadline {
    Deadline::at(Instant::now() + PATIENCE)
}

/// Joins the other ranks. The key and the group's name are public constants.
fn meet(addrs: &str, backend: &str, protection: &str, rank: u32) -> BenchResult<Box<dyn Group>> {
    let addrs = addrs.split(',').map(str::parse);
    let addrs = addrs.collect::<Result<Vec<SocketAddr>, _>>()?;
    let config = Tcp {
        protection: match protection {
            "sealed" => Protection::Key(GroupKey::new([7; KEY_BYTES])),
            _ => Protection::Plaintext,
        },
        ..Tcp::default()
    };
    let seat = JoinParams {
        listener: Listener::bind(addrs[rank as usize])?,
        rank: Rank(rank),
        addrs: &addrs,
        id: GroupId([7; 16]),
        config,
    };
    Ok(init(backend.parse()?, Strict::Yes, seat, &[], soon())?)
}

/// New groups for each measurement, so that no link is warm from an earlier one.
fn links(world: &dyn Group, model: &Model) -> BenchResult<Links> {
    let own = |stage| world.split(stage, world.rank().0, soon());
    Ok(Links::new(
        own(0)?,
        own(model.shard().stage as u32)?,
        PATIENCE,
    ))
}

fn load(path: &Path, split: &str, world: &dyn Group) -> BenchResult<Model> {
    let source = ModelSource::open(path)?;
    let config = Config::read(&source)?;
    let split = Split::plan(&config, split.parse()?, world.size(), &[])?;
    let (kernels, options) = (Arc::new(Kernels::new(1)?), LoadOptions::default());
    let model = Model::load_shard(&source, &split, world.rank(), options, kernels, |_, _| {});
    Ok(model?)
}

/// Tokens per second of a prompt of `rows`, in one step.
fn speed(model: &Model, rows: usize) -> BenchResult<f64> {
    let positions = rows.next_multiple_of(PAGE);
    let mut ws = Workspace::new(model, BatchSize::single(rows, positions));
    let mut cache = model.whole_cache(positions)?;
    let pages: Vec<u32> = (0..).take(positions / PAGE).collect();
    let tokens: Vec<u32> = (0..).take(rows).map(|t| 3 + 7 * t % 1000).collect();
    let mut step = |rows| -> BenchResult<f64> {
        let start = Instant::now();
        if model.shard().leads() {
            let sequences = &[BatchSequence::plain(
                &tokens[..rows],
                0,
                &pages,
                Logits::Last,
            )];
            model.forward(&Batch { sequences }, &mut ws, &mut cache)?;
        } else {
            model.follow(&mut ws, &mut cache)?;
        }
        Ok(rows as f64 / start.elapsed().as_secs_f64())
    };
    step(WARM_ROWS.min(rows))?;
    step(rows)
}
