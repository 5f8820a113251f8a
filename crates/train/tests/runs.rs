//! Whole runs: any number of workers, lost workers, stopped runs, and invalid data.

use std::cell::Cell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use paceline_base::testing;
use paceline_cluster::machine::peak_memory_bytes;
use paceline_mlx::{DeviceKind, Library};
use paceline_model::adapter::files::{Adapter, Form};
use paceline_model::{Config, LayerRole, ModelSource, Nth, Role};
use paceline_model_mlx::MlxPlaces;
use paceline_process::Program;
use paceline_tensor::{Kernels, storage};
use paceline_train::remote::{FarSpec, GREETING, forward_to_worker, run_worker};
use paceline_train::{
    Error, Leaf, Means, Method, OptimiserOptions, Post, Report, Rule, RunFigures, RunOptions,
    Schedule, Sharding, TrainOn, TrainableModel, TrainingClass, TrainingJob, TrainingProgress,
    TrainingRun, TrainingWorkers, WorkerOptions, fuse, read_metrics, svg, worker,
};
use paceline_weights::safetensors::Safetensors;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::gradients::{golden, served, trained, with_mlx};

const STEPS: u64 = 16;

/// Not a test: what the worker processes of this file run. With another standard input than a
/// parent's channel it ends at once.
#[test]
fn as_worker() {
    assert!(worker::run(Kernels::new).is_err());
}

/// Not a test: forwards between a run and a worker that it starts by the program's own `as_far`.
#[test]
fn as_near() {
    let connect = || {
        let mut far = std::process::Command::new(std::env::current_exe().unwrap());
        far.args(["runs::as_far", "--exact", "--nocapture"]);
        far.env("PACELINE_TRAIN_FAR", "1");
        Ok(Program::by_shell(&mut far, "", GREETING).unwrap())
    };
    assert!(forward_to_worker(connect, "no such name").is_err());
}

/// Not a test but where `as_near` starts it: the other side, which has no model.
#[test]
fn as_far() {
    if std::env::var_os("PACELINE_TRAIN_FAR").is_none() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    // The test program prints lines before.
    print!("\n{GREETING}\n");
    std::io::Write::flush(&mut std::io::stdout()).unwrap();
    let spec = FarSpec {
        program: std::env::current_exe().unwrap(),
        args: worker_args(),
        env: std::env::vars_os().collect(),
        scratch: scratch.path(),
        find: &|_, _| None,
    };
    assert!(run_worker(Program::parent(), spec).is_err());
}

fn worker_args() -> Vec<OsString> {
    let args = ["runs::as_worker", "--exact", "--nocapture"];
    args.map(OsString::from).to_vec()
}

/// Short lines of letters, whose lengths differ.
pub(crate) fn data(folder: &Path) -> PathBuf {
    let words = ["turn", "front", "rider", "line", "machine", "wind"];
    let line = |i: usize| {
        let text: Vec<&str> = (0..3 + i % 5).map(|j| words[(i * 7 + j * j) % 6]).collect();
        json!({ "text": text.join(" ") }).to_string() + "\n"
    };
    let path = folder.join("data.jsonl");
    std::fs::write(&path, (0..23).map(line).collect::<String>()).unwrap();
    path
}

pub(crate) fn job(data: &Path, steps: u64) -> TrainingJob {
    TrainingJob {
        trained: trained("llama-tied", Method::Lora),
        data: data.to_owned(),
        valid: Some(data.to_owned()),
        train_on: TrainOn::Assistant,
        tokens_max: 64,
        pack: false,
        batch: 13,
        leaf: 2,
        seed: 7,
        epochs: None,
        optimiser: OptimiserOptions {
            rule: Rule::AdamW,
            lr: 1e-2,
            warmup: 3,
            schedule: Schedule::Cosine,
            steps,
            decay_steps: None,
            decay: 0.01,
            clip: 1.0,
        },
    }
}

/// Workers and stages of a run.
#[derive(Clone, Copy)]
pub(crate) struct Where {
    pub(crate) nodes: usize,
    pub(crate) stages: usize,
    pub(crate) sharding: Option<Sharding>,
    /// Whether workers are behind a bridge.
    pub(crate) far: bool,
    /// Whether their command lines have [`MARK_OF_LONG`], so that a test finds its own.
    pub(crate) marked: bool,
}

/// A word that `libtest` passes over.
const MARK_OF_LONG: &str = "--skip=of-the-long-run";

pub(crate) const fn nodes(nodes: usize) -> Where {
    Where {
        nodes,
        stages: 1,
        sharding: None,
        far: false,
        marked: false,
    }
}

fn crew(run: &TrainingRun, at: Where, output: &Path) -> Result<TrainingWorkers, Error> {
    if at.nodes == 1 && !at.far {
        return Ok(TrainingWorkers::here());
    }
    let name = if at.far {
        "runs::as_near"
    } else {
        "runs::as_worker"
    };
    let mark = at.marked.then_some(MARK_OF_LONG);
    let args = [name, "--exact", "--nocapture"].into_iter().chain(mark);
    let post = Post {
        args: args.map(OsString::from).collect(),
        threads: 1,
        place: if at.far { "there" } else { "" }.to_owned(),
    };
    let processes = WorkerOptions {
        program: std::env::current_exe().unwrap(),
        posts: vec![post; at.nodes],
        env: std::env::vars_os().collect(),
        stages: at.stages,
        sharding: at.sharding,
        exchange: output.join(".exchange"),
    };
    TrainingWorkers::start(processes, run)
}

/// Trains, and collects every progress event together with the workers' ids at the start.
pub(crate) fn train(
    job: &TrainingJob,
    at: Where,
    output: &Path,
    (resume, stop): (bool, &dyn Fn() -> bool),
    mut hear: impl FnMut(&TrainingProgress, &[u32]),
) -> Result<Report, Error> {
    let run = TrainingRun::open(job, Kernels::new(1).unwrap(), at.nodes == 1 && !at.far)?;
    let mut crew = crew(&run, at, output)?;
    let ids = crew.ids();
    let start = std::time::Instant::now();
    let options = RunOptions {
        output,
        resume,
        save_every: 5,
        eval_every: 8,
        clock: &|| start.elapsed().as_secs_f64(),
        stop,
        figures: RunFigures {
            epoch_s: 1.75e9,
            flops: 1e9,
            // Of ranks in other processes theirs counts.
            memory: &|| peak_memory_bytes().filter(|_| at.nodes == 1),
        },
    };
    run.train(&mut crew, options, &mut |progress| hear(&progress, &ids))
}

/// The adapter's bytes, or the model's, and the curve without times.
pub(crate) fn result(output: &Path) -> (Vec<u8>, Vec<String>) {
    let metrics = read_metrics(&output.join("metrics.jsonl")).unwrap();
    let line = |m: &paceline_train::Measured| {
        format!(
            "{} {:?} {:?} {:?} {:?}",
            m.step, m.loss, m.lr, m.grad_norm, m.val_loss
        )
    };
    let files = ["adapter_model.safetensors", "model.safetensors"];
    let file = files
        .iter()
        .map(|name| output.join(name))
        .find(|path| path.exists());
    let written = std::fs::read(file.unwrap()).unwrap();
    (written, metrics.iter().map(line).collect())
}

#[test]
fn any_number_of_workers_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let job = job(&data, STEPS);
    let mut first = None;
    for count in [1, 2, 3, 4, 6] {
        let output = folder.path().join(format!("nodes-{count}"));
        let report = train(&job, nodes(count), &output, (false, &|| false), |_, _| {}).unwrap();
        assert!(report.loss[1] < report.loss[0] - 1.0, "{:?}", report.loss);
        let result = result(&output);
        assert_eq!(result.1.len() as u64, STEPS);
        let first = first.get_or_insert_with(|| result.clone());
        assert!(*first == result, "{count} workers");
        assert!(!output.join(".exchange").exists());
    }
    let picture = svg(&read_metrics(&folder.path().join("nodes-3/metrics.jsonl")).unwrap());
    assert!(picture.contains("step 16"), "{picture}");
    let held_out = picture.lines().find(|line| line.contains("held out"));
    // Before the first step and after the eighth and sixteenth; the left edge is the first step.
    let points = held_out.and_then(|line| line.split('"').nth(1)).unwrap();
    assert_eq!(points.split(' ').count(), 3, "{points}");
    assert!(points.starts_with("56.0,"), "{points}");
}

/// Three are killed and one is stopped; their leaves are computed by others, and others join.
#[test]
fn lost_workers_do_not_show() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let job = job(&data, 2 * STEPS);
    let (calm, rough) = (folder.path().join("calm"), folder.path().join("rough"));
    train(&job, nodes(1), &calm, (false, &|| false), |_, _| {}).unwrap();
    let send = |ids: &[u32], rank: usize, signal| {
        let id = Pid::from_raw(i32::try_from(ids[rank]).unwrap()).unwrap();
        kill_process(id, signal).unwrap();
    };
    let mut lost = 0;
    let report = train(
        &job,
        nodes(4),
        &rough,
        (false, &|| false),
        |progress, ids| match progress {
            TrainingProgress::Step(m) if m.step == 3 => send(ids, 0, Signal::KILL),
            TrainingProgress::Step(m) if m.step == 8 => {
                send(ids, 1, Signal::KILL);
                send(ids, 2, Signal::KILL);
            }
            TrainingProgress::Step(m) if m.step == 15 => send(ids, 3, Signal::STOP),
            TrainingProgress::Lost { .. } => lost += 1,
            _ => {}
        },
    );
    assert_eq!((report.unwrap().lost, lost), (4, 4));
    assert!(result(&calm) == result(&rough));
}

/// Adapters of routed and shared experts lower the held-out loss, also of experts in stacks. A
/// model with them in it gives that loss; stacks of folders are refused by name there.
#[test]
fn experts_learn_by_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let mut job = job(&data, 8);
    for (model, fuses) in [
        ("qwen2moe-bf16", true),
        ("qwen3moe-bf16", true),
        ("mixtral", true),
        ("gpt-oss-bf16", false),
        ("qwen35moe-bf16", false),
    ] {
        job.trained = trained(model, Method::Lora);
        job.trained.targets = vec!["experts".to_owned()];
        let output = folder.path().join(model);
        let report = train(&job, nodes(1), &output, (false, &|| false), |_, _| {}).unwrap();
        let [before, after] = [report.val_loss_before, report.val_loss].map(Option::unwrap);
        assert!(after < before - 0.1, "{model}: {before} {after}");
        let (adapter, _) = Adapter::read(&output).unwrap();
        let (fused, from) = (
            folder.path().join(format!("fused-{model}")),
            &job.trained.model,
        );
        let kernels = Kernels::new(1).unwrap();
        let made = fuse::fuse(from, (&adapter, &output), &fused, &kernels);
        if !fuses {
            let error = made.unwrap_err().to_string();
            assert!(error.contains("one tensor"), "{error}");
            continue;
        }
        made.unwrap();
        let mut again = job.clone();
        (again.trained.model, again.optimiser.steps) = (fused, 1);
        let output = folder.path().join(format!("{model}-again"));
        let again = train(&again, nodes(1), &output, (false, &|| false), |_, _| {}).unwrap();
        let found = again.val_loss_before.unwrap();
        assert!(
            (found - after).abs() < 1e-4 * after,
            "{model}: {found} {after}"
        );
    }
    job.trained.model = golden().join("hf/qwen3-bf16");
    let error = TrainingRun::open(&job, Kernels::new(1).unwrap(), true).unwrap_err();
    assert!(error.to_string().contains("no experts"), "{error}");
}

/// A pair changes its expert's matrix in the stack of a GGUF file, and no other.
#[test]
fn a_stack_of_experts_is_fused() {
    let folder = tempfile::tempdir().unwrap();
    let model = golden().join("hf/deepseek-v3-bf16-mtp.gguf");
    let fused = folder.path().join("fused.gguf");
    let config = Config::read(&ModelSource::open(&model).unwrap()).unwrap();
    let of = config.experts().unwrap().count;
    let layer = config.layers.iter().position(|l| l.experts.is_some());
    let layer = layer.unwrap();
    let values = |path: &Path, index: usize| {
        let role = Role::Layer(layer, LayerRole::ExpertUp(Nth { index, of }));
        let source = ModelSource::open(path).unwrap();
        let tensor = source.weight(config.family, role).unwrap();
        let mut values = vec![0.0; tensor.shape.iter().product()];
        storage::dequantise(tensor.block_type, &tensor.bytes, &mut values);
        (tensor.shape, values)
    };
    let (shape, own) = values(&model, 1);
    let half = |name: &str, shape: [usize; 2]| {
        let name = format!("base_model.model.model.layers.{layer}.mlp.experts.1.up_proj.{name}");
        (
            name + ".weight",
            shape.to_vec(),
            vec![0.5; shape[0] * shape[1]],
        )
    };
    let pair = [half("lora_A", [1, shape[1]]), half("lora_B", [shape[0], 1])];
    let adapter = Adapter::new(1, 1.0, None, pair.into());
    let kernels = Kernels::new(1).unwrap();
    fuse::fuse(&model, (&adapter, folder.path()), &fused, &kernels).unwrap();
    let expected: Vec<f32> = own.iter().map(|x| x + 0.25).collect();
    assert!(values(&fused, 1).1 == expected);
    assert!(values(&fused, 0) == values(&model, 0));
}

/// The number of steps that see every row twice.
#[test]
fn epochs_count_rows() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(&data(folder.path()), 1);
    job.epochs = Some(2);
    let output = folder.path().join("epochs");
    let report = train(&job, nodes(1), &output, (false, &|| false), |_, _| {}).unwrap();
    assert_eq!(report.steps, 4, "2 x 23 rows of 13 a step");
}

/// A kill every 15 s for ten minutes, with others in the place of those that were killed. The run
/// gives the bytes of the calm run, in at most 1.25 times its time.
#[test]
fn ten_minutes_of_kills_cost_a_quarter_at_most() {
    const EVERY: f64 = 15.0;
    const LENGTH: f64 = 600.0;
    if !testing::long() || !cfg!(target_os = "linux") {
        return eprintln!("SKIPPED ten minutes of kills (its time): PACELINE_TEST_LONG is not set");
    }
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let mut job = job(&data, 200);
    job.valid = None;
    let timed = |job: &TrainingJob, output: &str, kills: bool| {
        let (output, start) = (folder.path().join(output), std::time::Instant::now());
        let (mut killed, mut turn) = (0.0, 0);
        let hear = |progress: &TrainingProgress, _: &[u32]| {
            let now = start.elapsed().as_secs_f64();
            if kills && matches!(progress, TrainingProgress::Step(_)) && now - killed >= EVERY {
                let workers = marked_children();
                if let Some(id) = workers.get(turn % workers.len().max(1)) {
                    // Fails where it has just ended by itself.
                    let _ = kill_process(Pid::from_raw(*id).unwrap(), Signal::KILL);
                    (killed, turn) = (now, turn + 1);
                }
            }
        };
        let at = Where {
            marked: true,
            ..nodes(3)
        };
        train(job, at, &output, (false, &|| false), hear).unwrap();
        (start.elapsed().as_secs_f64(), result(&output), turn)
    };
    let (probe, ..) = timed(&job, "probe", false);
    job.optimiser.steps = (200.0 * LENGTH / probe) as u64;
    let (calm, expected, _) = timed(&job, "calm", false);
    let (rough, got, kills) = timed(&job, "rough", true);
    eprintln!("calm {calm:.0} s, rough {rough:.0} s with {kills} kills");
    assert!(expected == got && kills >= 30, "{kills} kills");
    assert!(rough <= 1.25 * calm, "calm {calm:.0} s, rough {rough:.0} s");
}

/// Processes that this one started with the mark and that are still there.
fn marked_children() -> Vec<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of_task = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("children")).unwrap_or_default()
    };
    let texts: Vec<String> = tasks.map(|task| of_task(task.unwrap())).collect();
    let ids = texts.iter().flat_map(|text| text.split_whitespace());
    let is_marked = |id: &&str| {
        let line = std::fs::read_to_string(format!("/proc/{id}/cmdline"));
        line.is_ok_and(|line| line.contains(MARK_OF_LONG))
    };
    ids.filter(is_marked)
        .map(|id| id.parse().unwrap())
        .collect()
}

/// Stopped in the middle, with the rest of a checkpoint that was being written and a line that was
/// cut off. Going on gives the bytes of not having stopped. Another job is refused.
#[test]
fn going_on_gives_the_bytes_of_not_having_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let job = job(&data, STEPS);
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    train(&job, nodes(1), &whole, (false, &|| false), |_, _| {}).unwrap();
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > 9
    };
    let error = train(&job, nodes(1), &cut, (false, &stop), |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::Stopped { step: 10 }), "{error}");
    let steps = |name: &str| cut.join(name).exists();
    assert!(steps("step-0000009") && steps("step-0000005") && !steps("adapter_config.json"));
    // State after a kill: the newest is gone, one was not finished, and metrics are ahead.
    std::fs::remove_dir_all(cut.join("step-0000009")).unwrap();
    std::fs::create_dir(cut.join(".step-0000010.tmp")).unwrap();
    let metrics = std::fs::read_to_string(cut.join("metrics.jsonl")).unwrap();
    std::fs::write(cut.join("metrics.jsonl"), metrics + "{\"step\":10,\"lo").unwrap();
    let there = train(&job, nodes(1), &cut, (false, &|| false), |_, _| {}).unwrap_err();
    assert!(there.to_string().contains("--resume"), "{there}");
    let mut other = job.clone();
    other.optimiser.lr = 0.5;
    let refused = train(&other, nodes(1), &cut, (true, &|| false), |_, _| {})
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("optimiser.lr") && refused.contains("0.5"),
        "{refused}"
    );
    train(&job, nodes(2), &cut, (true, &|| false), |_, _| {}).unwrap();
    assert!(result(&whole) == result(&cut));
    // A checkpoint with changed values is not resumed.
    let path = cut.join("step-0000016/params.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let refused = train(&job, nodes(1), &cut, (true, &|| false), |_, _| {})
        .unwrap_err()
        .to_string();
    assert!(refused.contains("digest"), "{refused}");
}

/// peft's adapter in peft's logits, and fused by us.
#[test]
fn a_fused_adapter_gives_the_logits_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    let from = golden().join("train/adapter");
    let (adapter, form) = Adapter::read(&from).unwrap();
    assert_eq!(form, Form::Peft);
    let model = golden().join("hf/llama-tied");
    let output = folder.path().join("fused");
    let kernels = Kernels::new(2).unwrap();
    fuse::fuse(&model, (&adapter, &from), &output, &kernels).unwrap();
    let mut of = trained("llama-tied", Method::Lora);
    of.model = output;
    let net = TrainableModel::load(&of, Kernels::new(1).unwrap()).unwrap();
    let zeros = vec![0.0; net.layout().len()];
    let logits = Safetensors::open(golden().join("train/adapter.logits.safetensors")).unwrap();
    let logits = logits.tensor("logits").unwrap();
    let (rows, vocab) = (logits.shape[0], logits.shape[1]);
    let mut values = vec![0.0; rows * vocab];
    storage::dequantise(logits.block_type, &logits.bytes, &mut values);
    let token = |i: usize| ((7 + 31 * i + i * i) % 300) as u32;
    for row in 0..rows {
        let wanted = 37 * row % vocab;
        let mut leaf = Leaf {
            tokens: (0..=row).map(token).collect(),
            targets: vec![None; row + 1],
            lengths: vec![row + 1],
        };
        leaf.targets[row] = Some(wanted as u32);
        let row = &values[row * vocab..(row + 1) * vocab];
        let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        let expected = total.ln() - f64::from(row[wanted]);
        let got = net.loss(&zeros, &leaf).unwrap();
        assert!((got - expected).abs() < 1e-4, "{got} {expected}");
    }
    let other = fuse::fuse(
        &golden().join("hf/qwen3-bf16"),
        (&adapter, &from),
        &folder.path().join("other"),
        &kernels,
    );
    assert!(other.unwrap_err().to_string().contains("in the model, and"));
}

/// peft's adapter with base weights in their stored form gives peft's logits.
#[test]
fn an_adapter_beside_its_base_gives_the_logits_of_peft() {
    let from = golden().join("train/adapter");
    let (adapter, _) = Adapter::read(&from).unwrap();
    let logits = Safetensors::open(golden().join("train/adapter.logits.safetensors")).unwrap();
    let logits = logits.tensor("logits").unwrap();
    let (rows, vocab) = (logits.shape[0], logits.shape[1]);
    let mut expected = vec![0.0; rows * vocab];
    storage::dequantise(logits.block_type, &logits.bytes, &mut expected);
    let tokens: Vec<u32> = (0..rows)
        .map(|i| ((7 + 31 * i + i * i) % 300) as u32)
        .collect();
    let found = served("llama-tied", &adapter, &tokens);
    for (i, (row, expected)) in found.iter().zip(expected.chunks(vocab)).enumerate() {
        for (got, expected) in row.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-4, "row {i}: {got} {expected}");
        }
    }
}

/// Every weight is trained, and what is written is a model that can be trained on.
#[test]
fn a_whole_model_learns_and_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let mut job = job(&data, 6);
    job.trained = trained("qwen2-f16", Method::Full);
    job.optimiser.lr = 1e-3;
    let output = folder.path().join("full");
    let report = train(&job, nodes(2), &output, (false, &|| false), |_, _| {}).unwrap();
    assert!(report.loss[1] < report.loss[0], "{:?}", report.loss);
    let mut again = job.clone();
    again.trained.model = output;
    again.optimiser.steps = 1;
    let output = folder.path().join("again");
    let next = train(&again, nodes(1), &output, (false, &|| false), |_, _| {}).unwrap();
    assert!(
        next.loss[0] < report.loss[0],
        "{:?} {:?}",
        next.loss,
        report.loss
    );
}

/// Options of a run without a clock.
fn plain(output: &Path) -> RunOptions<'_> {
    fn zero() -> f64 {
        0.0
    }
    fn never() -> bool {
        false
    }
    RunOptions {
        output,
        resume: false,
        save_every: 20,
        eval_every: 100,
        clock: &zero,
        stop: &never,
        figures: RunFigures {
            epoch_s: 1.75e9,
            ..RunFigures::UNKNOWN
        },
    }
}

/// The same inputs are left out by chance: the third loss is the CPU engine's, far nearer than one
/// without chance.
#[test]
fn chance_is_the_same_on_mlx() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let loss = |class: TrainingClass, dropout: f32| {
        let mut job = job(&data, 3);
        (job.batch, job.leaf, job.valid) = (4, 2, None);
        (job.trained.class, job.trained.dropout) = (class, dropout);
        let run = TrainingRun::open(&job, with_mlx("chance on mlx")?, true).unwrap();
        let output = folder.path().join(format!("{class}-{dropout}"));
        let report = run.train(&mut TrainingWorkers::here(), plain(&output), &mut |_| ());
        Some(report.unwrap().loss[1])
    };
    let Some(mlx) = loss(TrainingClass::MlxF32, 0.5) else {
        return;
    };
    let [cpu, without] = [0.5, 0.0].map(|dropout| loss(TrainingClass::Cpu, dropout).unwrap());
    let (off, chance) = ((mlx - cpu).abs(), (without - cpu).abs());
    assert!(
        10.0 * off < chance && off < 1e-3 * cpu,
        "{mlx} {cpu} {without}"
    );
}

/// A 4-bit base on MLX: adapters learn, and a run resumes in its own class alone. A device that is
/// a test bed says so.
#[test]
fn a_stored_base_learns_on_mlx() {
    let Some(means) = with_mlx("a 4-bit base learns on mlx") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let mut job = job(&data, 40);
    job.trained.model = golden().join("mlx/llama-4bit");
    (job.trained.method, job.trained.class) = (Method::Qlora, TrainingClass::MlxF32);
    (job.batch, job.leaf, job.valid) = (4, 4, None);
    let output = folder.path().join("out");
    let options = plain(&output);
    let is_bed = !Library::open(&means.mlx)
        .unwrap()
        .has(DeviceKind::Gpu)
        .unwrap();
    let run = TrainingRun::open(&job, means, true).unwrap();
    let mut notes = Vec::new();
    let mut hear = |progress: TrainingProgress| {
        if let TrainingProgress::Note { line } = progress {
            notes.push(line);
        }
    };
    let report = run
        .train(&mut TrainingWorkers::here(), options, &mut hear)
        .unwrap();
    assert!(report.loss[1] < 2.6, "{:?}", report.loss);
    let told = notes.iter().any(|note| note.contains("test bed"));
    assert_eq!(told, is_bed, "{notes:?}");
    job.trained.class = TrainingClass::Cpu;
    let other = TrainingRun::open(&job, Kernels::new(1).unwrap(), true).unwrap();
    let again = RunOptions {
        resume: true,
        ..options
    };
    let error = other.train(&mut TrainingWorkers::here(), again, &mut |_| ());
    let error = error.unwrap_err().to_string();
    let told = "trained.class \"mlx-f32\", this one has \"cpu\"";
    assert!(error.contains(told), "{error}");
}

#[test]
fn a_class_without_its_library_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(&data(folder.path()), 1);
    job.trained.class = TrainingClass::Mlx;
    let nowhere = Means {
        kernels: Kernels::new(1).unwrap(),
        mlx: MlxPlaces {
            explicit: Some(folder.path().join("none.so")),
            ..MlxPlaces::default()
        },
    };
    let error = TrainingRun::open(&job, nowhere, true)
        .unwrap_err()
        .to_string();
    assert!(error.contains("none.so"), "{error}");
}
