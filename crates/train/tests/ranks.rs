//! Runs over stages, ranks and workers elsewhere: the bytes of one process.

use std::cell::Cell;
use std::path::Path;

use paceline_train::{Error, Method, Report, Sharding, TrainingProgress, read_metrics};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::gradients::trained;
use crate::runs::{Where, data, job, nodes, result, train};

/// A model cut into stages, with one worker killed on its way, and with two workers a stage. All
/// give the bytes of one process, held-out data included. Left-out inputs and packed rows are the
/// same everywhere too.
#[test]
fn stages_give_the_bytes_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let mut job = job(&data, 6);
    job.trained.dropout = 0.2;
    job.pack = true;
    let one = folder.path().join("one");
    train(&job, nodes(1), &one, (false, &|| false), |_, _| {}).unwrap();
    for (count, stages, killed) in [(2, 2, None), (3, 3, Some(1)), (4, 2, Some(3)), (2, 1, None)] {
        let output = folder.path().join(format!("stages-{count}-{stages}"));
        let at = Where {
            stages,
            ..nodes(count)
        };
        let hear = |progress: &TrainingProgress, ids: &[u32]| {
            if let (TrainingProgress::Step(m), Some(rank)) = (progress, killed)
                && m.step == 2
            {
                let id = i32::try_from(ids[rank]).unwrap();
                kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
            }
        };
        let report = train(&job, at, &output, (false, &|| false), hear).unwrap();
        assert_eq!(report.lost, u32::from(killed.is_some()));
        assert!(
            result(&one) == result(&output),
            "{count} workers, {stages} stages"
        );
        let busy = read_metrics(&output.join("metrics.jsonl")).unwrap();
        let is_share = |share: f64| stages > 1 && share > 0.0 && share < 1.0;
        assert!(
            busy.iter()
                .all(|m| m.busy_share.map_or(stages == 1, is_share))
        );
    }
    // Experts whose routers have a loss of their own, all weights of them.
    job.trained = trained("qwen3moe-bf16", Method::Full);
    (job.trained.balance, job.optimiser.steps) = (0.1, 2);
    let (one, two) = (folder.path().join("experts"), folder.path().join("stages"));
    train(&job, nodes(1), &one, (false, &|| false), |_, _| {}).unwrap();
    let at = Where {
        stages: 2,
        ..nodes(2)
    };
    train(&job, at, &two, (false, &|| false), |_, _| {}).unwrap();
    assert!(result(&one) == result(&two), "stages of experts");
    let at = Where {
        stages: 9,
        ..nodes(2)
    };
    let output = folder.path().join("too-many");
    let error = train(&job, at, &output, (false, &|| false), |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("9 stages"), "{error}");
}

/// A long row is cut over ranks, also with the experts, and one of them is killed: the bytes of one
/// process.
#[test]
fn rows_cut_over_ranks_give_the_bytes_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    let line = |n: usize| json!({ "text": "turn front rider line ".repeat(n) }).to_string() + "\n";
    std::fs::write(&path, [line(140), line(3), line(90)].concat()).unwrap();
    for (model, method, dropout, count, killed, sharding) in [
        ("llama-tied", Method::Lora, 0.2, 2, Some(1), Sharding::Rows),
        (
            "qwen3moe-bf16",
            Method::Full,
            0.0,
            3,
            None,
            Sharding::Experts,
        ),
        (
            "gpt-oss-bf16",
            Method::Lora,
            0.2,
            2,
            Some(1),
            Sharding::Experts,
        ),
    ] {
        let mut job = job(&path, 2);
        job.trained = trained(model, method);
        if sharding == Sharding::Experts {
            job.trained.targets.push("experts".to_owned());
        }
        (job.trained.dropout, job.trained.balance) = (dropout, 0.1);
        (job.tokens_max, job.batch, job.leaf) = (4096, 3, 2);
        let [one, cut] = ["one", "cut"].map(|name| folder.path().join(format!("{model}-{name}")));
        train(&job, nodes(1), &one, (false, &|| false), |_, _| {}).unwrap();
        let at = Where {
            sharding: Some(sharding),
            ..nodes(count)
        };
        let hear = |progress: &TrainingProgress, ids: &[u32]| {
            if let (TrainingProgress::Step(m), Some(rank)) = (progress, killed)
                && m.step == 1
            {
                let id: u32 = ids[rank];
                let id = Pid::from_raw(i32::try_from(id).unwrap()).unwrap();
                kill_process(id, Signal::KILL).unwrap();
            }
        };
        let report = train(&job, at, &cut, (false, &|| false), hear).unwrap();
        assert_eq!(report.lost, u32::from(killed.is_some()));
        assert!(result(&one) == result(&cut), "{model}, {count} ranks");
    }
    let at = Where {
        sharding: Some(Sharding::Experts),
        ..nodes(2)
    };
    let output = folder.path().join("dense");
    let error = train(&job(&path, 2), at, &output, (false, &|| false), |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("no experts"), "{error}");
}

/// Ranks share out the state, and two of them are killed, also at once. Then a run is stopped and
/// continued with other numbers of ranks. All give the bytes of one process, and so do stages of a
/// model with one table.
#[test]
fn ranks_with_shards_give_the_bytes_of_one_process() {
    use Sharding::{All, State};
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    /// Ranks, how they share out, and the step and rank of each kill.
    type Case<'a> = (usize, Sharding, &'a [(u64, usize)]);
    let cases: [Case<'_>; 5] = [
        (2, All, &[]),
        (3, All, &[(4, 0), (4, 1)]),
        (3, All, &[(2, 1), (4, 0)]),
        (4, State, &[(1, 3)]),
        (2, State, &[(1, 0), (3, 1)]),
    ];
    let models = [
        ("llama-tied", Method::Full),
        ("qwen3moe-bf16", Method::Full),
        ("llama-tied", Method::Lora),
    ];
    for (model, method) in models {
        let mut job = job(&data, 6);
        job.trained = trained(model, method);
        let of = |name: &str| folder.path().join(format!("{model}-{method:?}-{name}"));
        let one = of("one");
        let expected = train(&job, nodes(1), &one, (false, &|| false), |_, _| {}).unwrap();
        let is_same = |output: &Path, report: &Report, about: &str| {
            assert_eq!(report.digest, expected.digest, "{model} {method:?} {about}");
            assert!(result(&one) == result(output), "{model} {method:?} {about}");
        };
        let ranks = |count: usize, sharding: Sharding| Where {
            sharding: Some(sharding),
            ..nodes(count)
        };
        for (i, (count, sharding, kills)) in cases.into_iter().enumerate() {
            let output = of(&i.to_string());
            let hear = |progress: &TrainingProgress, ids: &[u32]| {
                let TrainingProgress::Step(m) = progress else {
                    return;
                };
                for (_, rank) in kills.iter().filter(|(step, _)| *step == m.step) {
                    let id = Pid::from_raw(i32::try_from(ids[*rank]).unwrap()).unwrap();
                    let _ = kill_process(id, Signal::KILL); // gone, where a step is repeated
                }
            };
            let at = ranks(count, sharding);
            let report = train(&job, at, &output, (false, &|| false), hear).unwrap();
            assert_eq!(report.lost as usize, kills.len());
            is_same(&output, &report, &format!("{count} ranks {sharding:?}"));
        }
        let cut = of("cut");
        for (at, last) in [(ranks(3, All), 2), (ranks(2, State), 4), (nodes(1), 6)] {
            let asked = Cell::new(0);
            let stop = || {
                asked.set(asked.get() + 1);
                last < 6 && asked.get() > 2
            };
            match train(&job, at, &cut, (last > 2, &stop), |_, _| {}) {
                Err(Error::Stopped { step }) => assert_eq!(step, last + 1),
                other => is_same(&cut, &other.unwrap(), "cut"),
            }
        }
        let stages = of("stages");
        let at = Where {
            stages: 2,
            ..nodes(2)
        };
        let report = train(&job, at, &stages, (false, &|| false), |_, _| {}).unwrap();
        is_same(&stages, &report, "stages");
    }
}

/// Workers behind a bridge, which have neither model nor data: all of it is sent, and the bytes are
/// those of one process.
#[test]
fn workers_elsewhere_give_the_bytes_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let job = job(&data, 4);
    let (one, far) = (folder.path().join("one"), folder.path().join("far"));
    train(&job, nodes(1), &one, (false, &|| false), |_, _| {}).unwrap();
    for (stages, sharding) in [(1, None), (2, None), (1, Some(Sharding::State))] {
        let at = Where {
            stages,
            sharding,
            far: true,
            ..nodes(2)
        };
        let output = far.join(format!("{stages}-{sharding:?}"));
        let report = train(&job, at, &output, (false, &|| false), |_, _| {}).unwrap();
        assert_eq!(report.lost, 0);
        assert!(
            result(&one) == result(&output),
            "{stages} stages {sharding:?}"
        );
    }
    let events = std::fs::read_dir(one.join("tensorboard")).unwrap().count();
    assert_eq!(events, 1);
}
