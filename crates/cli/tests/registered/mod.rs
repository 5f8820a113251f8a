//! RDMA between ranks of a split. The data of a step is read from where it was computed and put
//! where it is added up: nothing is copied on the way. Real ranks run over the software verbs
//! library, loaded as the system's. The test stands here because `model` knows no wire.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test, with helpers outside of test functions"
)]

#[allow(dead_code, reason = "the tests of `model` use the rest")]
#[path = "../../../model/tests/common/gemma4.rs"]
mod gemma4;
#[allow(dead_code, reason = "the tests of `model` use the rest")]
#[path = "../../../model/tests/common/tiny.rs"]
mod tiny;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::{BlockType, KernelClass, Rank};
use paceline_comm::{CopyStats, Deadline, Group, tcp};
use paceline_comm_rdma::{self as rdma, Cabling, Matrix, Verbs};
use paceline_mlx::LibraryPaths;
use paceline_model::{
    Batch, BatchSequence, BatchSize, Config, FollowOutcome, Links, LoadOptions, LoadedModel as _,
    Logits, Model, ModelFamily, ModelSource, Split, Workspace,
};
use paceline_model_mlx::{MlxModel, MlxOptions};
use paceline_tensor::{Kernels, PAGE};
use tiny::Tiny;

use crate::library;

/// Rows of each step: a prompt, whose second half is computed while the first is exchanged, then
/// tokens one by one.
const STEPS: [usize; 4] = [256, 1, 1, 1];

/// Positions of the cache.
const CONTEXT: usize = 320;

/// Deadline of every call: none waits for anything but other threads.
const PATIENCE: Duration = Duration::from_secs(60);

fn soon() -> Deadline {
    Deadline::at(Instant::now() + PATIENCE)
}

/// The groups of both ranks, as a node makes them: the stage is split off the world.
fn links(verbs: &Verbs, config: &rdma::Config) -> Vec<Links> {
    let devices = verbs.devices().unwrap();
    let matrix = Matrix::switched(&devices[..2]);
    let cabling = Cabling::with(verbs.clone(), matrix, config.clone());
    let listen = |_| tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<_> = (0..2).map(listen).collect();
    let addrs: Vec<_> = listeners.iter().map(tcp::Listener::addr).collect();
    let id = tcp::GroupId::random();
    let threads = (0..).zip(listeners).map(|(rank, listener)| {
        let (cabling, addrs) = (cabling.clone(), addrs.clone());
        std::thread::spawn(move || {
            let world = rdma::join(&cabling, listener, Rank(rank), &addrs, id, soon()).unwrap();
            let stage = (&world as &dyn Group).split(0, rank, soon()).unwrap();
            let links = Links::new(Box::new(world), stage, PATIENCE);
            assert!(links.overlap, "a cable is a wire");
            links
        })
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

/// The bits of the logits of every step, at the leader; and what the exchanges of the stage copied.
fn run(model: &Model, tokens: &[u32]) -> (Vec<Vec<u32>>, Vec<(u64, u64)>) {
    let size = BatchSize::single(STEPS[0], CONTEXT);
    let mut ws = Workspace::new(model, size);
    let mut cache = model.whole_cache(CONTEXT).unwrap();
    let pages: Vec<u32> = (0..(CONTEXT / PAGE) as u32).collect();
    let copies = || {
        model
            .links()
            .map_or(CopyStats::default(), |l| l.stage.copies())
    };
    let (mut all, mut copied, mut done) = (Vec::new(), Vec::new(), 0);
    for rows in STEPS {
        let before = copies();
        if model.shard().leads() {
            let sequences = [BatchSequence::plain(
                &tokens[done..done + rows],
                done,
                &pages,
                Logits::Last,
            )];
            let batch = Batch::new(&sequences);
            assert_eq!(model.forward(&batch, &mut ws, &mut cache).unwrap(), 1);
            let logits = ws.logits_mut(0, model.config().vocab);
            all.push(logits.iter().map(|logit| logit.to_bits()).collect());
        } else {
            assert_eq!(
                model.follow(&mut ws, &mut cache).unwrap(),
                FollowOutcome::Step
            );
        }
        let CopyStats { in_place, staged } = copies();
        copied.push((in_place.0 - before.in_place.0, staged.0 - before.staged.0));
        done += rows;
    }
    (all, copied)
}

fn load(path: &Path, split: &Split, rank: Rank, links: Option<Links>) -> Model {
    let options = LoadOptions {
        class: KernelClass::Cpu,
    };
    let kernels = Arc::new(Kernels::new(1).unwrap());
    let source = ModelSource::open(path).unwrap();
    let model = Model::load_shard(&source, split, rank, options, kernels, |_, _| {}).unwrap();
    match links {
        Some(links) => model.link(links),
        None => model,
    }
}

/// The bytes that each of two ranks copied in each step; the logits are those of one rank.
fn copied(
    path: &Path,
    tokens: &[u32],
    verbs: &Verbs,
    config: &rdma::Config,
) -> Vec<Vec<(u64, u64)>> {
    let shape = Config::read(&ModelSource::open(path).unwrap()).unwrap();
    let split = Split::plan(&shape, "tensor".parse().unwrap(), 2, &[]).unwrap();
    let (alone, _) = run(&load(path, &Split::whole(&shape), Rank(0), None), tokens);
    let ranks = links(verbs, config);
    std::thread::scope(|scope| {
        let rank = |(rank, links)| {
            let split = &split;
            scope.spawn(move || {
                let model = load(path, split, Rank(rank), Some(links));
                let ran = run(&model, tokens);
                model.links().unwrap().world.barrier(soon()).unwrap();
                ran
            })
        };
        let threads: Vec<_> = (0..).zip(ranks).map(rank).collect();
        let ran = threads.into_iter().map(|thread| thread.join().unwrap());
        let ran: Vec<_> = ran.collect();
        assert_eq!(ran[0].0, alone);
        ran.into_iter().map(|(_, copied)| copied).collect()
    })
}

#[test]
fn steps_of_a_split_model_copy_nothing_that_is_exchanged() {
    let folder = tempfile::tempdir().unwrap();
    let Some(library) = library::build(folder.path()) else {
        println!("SKIPPED steps_of_a_split_model_copy_nothing_that_is_exchanged: no rustc");
        return;
    };
    let verbs = Verbs::load_from(library.to_str().unwrap()).unwrap();
    let (path, tiny) = (
        folder.path().join("tiny.gguf"),
        Tiny::new(ModelFamily::Llama, BlockType::Q4_1),
    );
    tiny.write(&path);
    let tokens = tiny.tokens(STEPS.iter().sum(), 1);

    let always = rdma::Config {
        in_place_bytes: 1,
        ..rdma::Config::default()
    };
    for (rank, steps) in copied(&path, &tokens, &verbs, &always).iter().enumerate() {
        println!("rank {rank}: (bytes in place, bytes staged) by step: {steps:?}");
        // Every row exchanges as much: two sums of each layer, both ways, for each root.
        let [prompt, first, rest @ ..] = &steps[..] else {
            panic!("{steps:?}")
        };
        let row = (2 * tiny.layers * 2 * tiny.width * 4) as u64;
        assert!(
            first.0 >= row && first.0.is_multiple_of(row / 2),
            "{steps:?}"
        );
        assert_eq!(*prompt, (STEPS[0] as u64 * first.0, 0));
        assert!(
            rest.iter().all(|step| step == first) && first.1 == 0,
            "{steps:?}"
        );
    }
    // Unless told so, one row is copied at the receiver, which takes less time than to agree.
    let steps = copied(&path, &tokens, &verbs, &rdma::Config::default());
    println!("by default: {steps:?}");
    assert!(
        steps.iter().all(|steps| steps[0].0 > 0 && steps[0].1 == 0),
        "{steps:?}"
    );
}

/// Bytes that a rank on MLX copied in a prompt of 256 rows.
fn copied_by_mlx(model: MlxModel, tokens: &[u32]) -> CopyStats {
    let model = Arc::new(model);
    let size = BatchSize::single(STEPS[0], CONTEXT);
    let mut compute = Arc::clone(&model).reserve(size, CONTEXT).unwrap();
    let pages: Vec<u32> = (0..(CONTEXT / PAGE) as u32).collect();
    if model.shard().leads() {
        let sequences = [BatchSequence::plain(
            &tokens[..STEPS[0]],
            0,
            &pages,
            Logits::Last,
        )];
        let batch = Batch::new(&sequences);
        assert_eq!(compute.forward(&batch).unwrap(), 1);
    } else {
        assert_eq!(compute.follow().unwrap(), FollowOutcome::Step);
    }
    let links = model.links().unwrap();
    links.world.barrier(soon()).unwrap();
    links.stage.copies()
}

/// Values of the other rank are written into the memory of the array that reads them.
#[test]
fn ranks_on_mlx_receive_in_place() {
    let (folder, test) = (
        tempfile::tempdir().unwrap(),
        "ranks_on_mlx_receive_in_place",
    );
    let Some(mlx) = std::env::var_os("PACELINE_MLXC") else {
        return println!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    };
    let Some(library) = library::build(folder.path()) else {
        return println!("SKIPPED {test}: no rustc");
    };
    let verbs = Verbs::load_from(library.to_str().unwrap()).unwrap();
    let (path, tiny) = (
        folder.path().join("tiny.gguf"),
        Tiny::new(ModelFamily::Llama, BlockType::Q8_0),
    );
    tiny.write(&path);
    let tokens = tiny.tokens(STEPS[0], 1);
    let source = Arc::new(ModelSource::open(&path).unwrap());
    let shape = Config::read(&source).unwrap();
    let split = Split::plan(&shape, "tensor".parse().unwrap(), 2, &[]).unwrap();
    let always = rdma::Config {
        in_place_bytes: 1,
        ..rdma::Config::default()
    };
    let load = |rank: u32, links: Links| {
        let options = MlxOptions {
            places: LibraryPaths {
                explicit: Some(mlx.clone().into()),
                ..LibraryPaths::default()
            },
            class: KernelClass::MlxF32,
            positions: CONTEXT,
            rows: STEPS[0],
            sequences: 1,
            kv: None,
            captures: Vec::new(),
            memory: None,
            patience: MlxOptions::PATIENCE,
            last_words: MlxOptions::LAST_WORDS,
        };
        let kernels = Arc::new(Kernels::new(1).unwrap());
        let source = Arc::clone(&source);
        let model = MlxModel::load(
            source,
            &split,
            Rank(rank),
            (options, None),
            kernels,
            |_, _| {},
        );
        model.unwrap().link(links)
    };
    let copied: Vec<CopyStats> = std::thread::scope(|scope| {
        let rank = |(rank, links)| {
            let (load, tokens) = (&load, &tokens);
            scope.spawn(move || copied_by_mlx(load(rank, links), tokens))
        };
        let threads: Vec<_> = (0..).zip(links(&verbs, &always)).map(rank).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    println!("{copied:?}");
    // Half of a row's width comes from the other rank, twice a layer.
    let received = (STEPS[0] * tiny.layers * 2 * tiny.width / 2 * 4) as u64;
    assert!(
        copied.iter().all(|it| it.in_place.0 >= received),
        "{copied:?} of {received}"
    );
}
