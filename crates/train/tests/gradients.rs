//! Gradients against PyTorch's in float64 and against differences of the loss.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::{KernelClass, upper_median};
use paceline_model::adapter::files::{Adapter, Base, Form, TARGETS};
use paceline_model::{
    Batch, BatchSequence, BatchSize, Config, LoadOptions, Logits, Model, ModelSource, Workspace,
};
use paceline_model_mlx::MlxPlaces;
use paceline_tensor::{InstructionSet, Kernels, PAGE, storage};
use paceline_train::{Leaf, Lora, Means, Method, TrainableModel, Trained, TrainingClass};
use paceline_weights::safetensors::Safetensors;
use serde_json::Value;

/// Sizes of `scripts/golden/train_gradients.py`.
const LORA: Lora = Lora {
    rank: 2,
    alpha: 4.0,
};
const LENGTHS: [usize; 2] = [13, 21];
const SAMPLES: usize = 32;

const MODELS: [&str; 12] = [
    "llama-tied",
    "llama-rope3-sharded",
    "qwen2-f16",
    "qwen3-bf16",
    "gemma3-linear-bf16",
    "qwen3moe-bf16",
    "mixtral",
    "qwen2moe-bf16",
    "gpt-oss-bf16",
    "deepseek-v2",
    "deepseek-v3-bf16",
    "qwen35-bf16",
];

/// Dense families, which have gradients on MLX too.
const DENSE: usize = 5;

/// Models whose adapters of experts are recorded.
const EXPERTS: [&str; 2] = ["qwen3moe-bf16", "gpt-oss-bf16"];

/// The model whose routers' loss is recorded, and its factor.
const BALANCED: (&str, f32) = ("qwen3moe-bf16", 0.5);

pub(crate) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden")
}

fn number(j: usize) -> f32 {
    let word = (j as u64 * 2_654_435_761 + 12_345) % (1 << 32);
    (word as f64 / f64::from(2.0f32.powi(32)) * 0.2 - 0.1) as f32
}

fn token(sequence: usize, i: usize) -> u32 {
    ((7 + 31 * i + 101 * sequence + i * i) % 300) as u32
}

fn sequence(s: usize) -> Leaf {
    let n = LENGTHS[s] - 1;
    let judged = |i: usize| s == 1 || !i.is_multiple_of(3);
    Leaf {
        tokens: (0..n).map(|i| token(s, i)).collect(),
        targets: (1..=n).map(|i| judged(i).then(|| token(s, i))).collect(),
        lengths: vec![n],
    }
}

/// Both sequences, which do not see each other.
fn both() -> Leaf {
    let [a, b] = [sequence(0), sequence(1)];
    Leaf {
        tokens: [a.tokens, b.tokens].concat(),
        targets: [a.targets, b.targets].concat(),
        lengths: [a.lengths, b.lengths].concat(),
    }
}

pub(crate) fn trained(model: &str, method: Method) -> Trained {
    Trained {
        model: golden().join("hf").join(model),
        method,
        lora: LORA,
        targets: TARGETS.map(|(_, _, name)| name.to_owned()).to_vec(),
        layers: None,
        dropout: 0.0,
        balance: 0.0,
        class: TrainingClass::Cpu,
    }
}

/// Threads, and MLX where `PACELINE_MLXC` names it; or a line that says why a test is skipped.
pub(crate) fn with_mlx(test: &str) -> Option<Means> {
    let found = std::env::var_os("PACELINE_MLXC").map(PathBuf::from);
    if found.is_none() {
        eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    }
    Some(Means {
        kernels: Kernels::new(1).unwrap(),
        mlx: MlxPlaces {
            explicit: Some(found?),
            ..MlxPlaces::default()
        },
    })
}

fn net(model: &str, method: Method, kernels: Kernels) -> TrainableModel {
    TrainableModel::load(&trained(model, method), kernels).unwrap()
}

/// The formula's values for adapters, the model's own for all weights.
fn values(net: &TrainableModel, method: Method) -> Vec<f32> {
    match method {
        Method::Full => net.first_values(0),
        _ => (0..net.layout().len()).map(number).collect(),
    }
}

fn recorded(model: &str) -> (BTreeMap<String, Vec<f32>>, Value) {
    let file = Safetensors::open(golden().join(format!("train/{model}.safetensors"))).unwrap();
    let names: Vec<String> = file.tensors().map(|info| info.name().to_owned()).collect();
    let read = |name: String| {
        let tensor = file.tensor(&name).unwrap();
        let mut values = vec![0.0; tensor.shape.iter().product()];
        storage::dequantise(tensor.block_type, &tensor.bytes, &mut values);
        (name, values)
    };
    let text = std::fs::read(golden().join(format!("train/{model}.json"))).unwrap();
    (
        names.into_iter().map(read).collect(),
        serde_json::from_slice(&text).unwrap(),
    )
}

fn distance(got: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(got.len(), exact.len());
    let square = |x: f64| x * x;
    let off: f64 = got
        .iter()
        .zip(exact)
        .map(|(g, e)| square(f64::from(*g) - f64::from(*e)))
        .sum();
    let length: f64 = exact.iter().map(|e| square(f64::from(*e))).sum();
    // An expert without rows has no gradient.
    (off / if length > 0.0 { length } else { 1.0 }).sqrt()
}

/// The median of the distances of PyTorch's samples of whole weights.
fn median_of_samples(about: &Value) -> f64 {
    let all = about["float32_distance"].as_object().unwrap().iter();
    let samples = all.filter(|(name, _)| name.starts_with("full."));
    upper_median(samples.map(|(_, off)| off.as_f64().unwrap()).collect()).unwrap()
}

/// Evenly spaced elements, as recorded of whole weights.
fn some(all: &[f32]) -> Vec<f32> {
    let every = (all.len() / SAMPLES).max(1);
    all.iter().step_by(every).take(SAMPLES).copied().collect()
}

/// Adapters of routed experts, in stacks and each alone, whose gradients are PyTorch's to 1e-4.
#[test]
fn adapters_of_experts_have_pytorchs_gradients() {
    for model in EXPERTS {
        let (exact, about) = recorded(model);
        let mut of = trained(model, Method::Lora);
        of.targets = Vec::from(["experts".to_owned()]);
        let net = TrainableModel::load(&of, Kernels::new(2).unwrap()).unwrap();
        let (leaf, at) = (both(), values(&net, Method::Lora));
        let (loss, grads) = net.gradient(&at, &leaf, leaf.judged()).unwrap();
        let off = loss / leaf.judged() as f64 - about["experts_loss"].as_f64().unwrap();
        assert!(off.abs() < 2e-5, "{model}: {off}");
        for slot in net.layout().slots() {
            let name = format!("experts.{}", slot.name);
            let got = distance(&some(&grads[slot.range.clone()]), &exact[&name]);
            assert!(got <= 1e-4, "{model} {name}: {got:e}");
        }
    }
}

/// Every family, adapters and whole models: at most four times as far from float64 as PyTorch in
/// float32 is. Of whole weights few elements are compared, which PyTorch may have by luck: there
/// its median counts where its own distance is smaller.
#[test]
fn gradients_are_as_near_to_float64_as_pytorchs() {
    for model in MODELS {
        let (exact, about) = recorded(model);
        for method in [Method::Lora, Method::Full] {
            let net = net(model, method, Kernels::new(2).unwrap());
            let leaf = both();
            let at = values(&net, method);
            let (loss, grads) = net.gradient(&at, &leaf, leaf.judged()).unwrap();
            let key = if method == Method::Full {
                "full_loss"
            } else {
                "loss"
            };
            let loss = loss / leaf.judged() as f64;
            let off = (loss - about[key].as_f64().unwrap()).abs();
            assert!(off < 2e-5, "{model} {method:?}: loss {loss}, off by {off}");
            let mut compared = 0;
            for slot in net.layout().slots() {
                let (name, got) = match method {
                    Method::Full => {
                        let all = &grads[slot.range.clone()];
                        (format!("full.{}", slot.name), some(all))
                    }
                    _ => (slot.name.clone(), grads[slot.range.clone()].to_vec()),
                };
                let Some(exact) = exact.get(&name) else {
                    panic!("{model}: nothing was recorded for {name}");
                };
                let own = about["float32_distance"][&name].as_f64().unwrap();
                let bar = match method {
                    Method::Full => 4.0 * own.max(median_of_samples(&about)),
                    _ => 4.0 * own,
                };
                let got: f64 = distance(&got, exact);
                assert!(
                    got <= bar.max(4e-7),
                    "{model} {name}: {got:e}, at most {bar:e}"
                );
                compared += 1;
            }
            assert!(compared >= 10, "{model} {method:?}");
        }
    }
}

/// Logits of a model with an adapter, by row.
pub(crate) fn served(model: &str, adapter: &Adapter, tokens: &[u32]) -> Vec<Vec<f32>> {
    let folder = golden().join("hf").join(model);
    let source = ModelSource::open(&folder).unwrap();
    let (class, kernels) = (KernelClass::CpuF32, Arc::new(Kernels::new(2).unwrap()));
    let model = Model::load(&source, LoadOptions { class }, kernels, |_, _| {}).unwrap();
    let base = model.weight_bytes();
    let beside = adapter.beside("own", &folder).unwrap();
    assert_eq!(beside.id.digest, adapter.digest());
    let model = model.with_adapters(&source, &[beside]).unwrap();
    let bytes = (adapter.numbers() * size_of::<f32>()) as u64;
    assert_eq!(model.weight_bytes().0, base.0 + bytes);
    let rows = tokens.len();
    let size = BatchSize {
        rows,
        logit_rows: rows,
        sequences: 1,
        context: rows,
    };
    let mut ws = Workspace::new(&model, size);
    let mut cache = model.whole_cache(rows).unwrap();
    let pages: Vec<u32> = (0..rows.div_ceil(PAGE) as u32).collect();
    let sequence = BatchSequence {
        tokens,
        position: 0,
        pages: &pages,
        windows: &[],
        adapter: 1,
        logits: Logits::All,
    };
    let batch = [sequence];
    let batch = Batch::new(&batch);
    assert_eq!(model.forward(&batch, &mut ws, &mut cache).unwrap(), rows);
    let vocab = model.config().vocab;
    (0..rows)
        .map(|i| ws.logits_mut(i, vocab).to_vec())
        .collect()
}

/// An adapter is served as it was trained: the logits of a model with it have the training's loss.
#[test]
fn adapters_of_all_kinds_of_layers_are_served_as_they_are_trained() {
    for name in [
        "gpt-oss-bf16",
        "qwen3moe-bf16",
        "deepseek-v2",
        "qwen35-bf16",
    ] {
        let mut of = trained(name, Method::Lora);
        if name != "qwen35-bf16" {
            of.targets.push("experts".to_owned());
        }
        let net = TrainableModel::load(&of, Kernels::new(2).unwrap()).unwrap();
        let (at, leaf) = (values(&net, Method::Lora), sequence(1));
        let slots = net.layout().slots().iter();
        let tensors = slots.map(|slot| {
            let values = at[slot.range.clone()].to_vec();
            (slot.name.clone(), slot.shape.clone(), values)
        });
        let adapter = Adapter::new(LORA.rank, f64::from(LORA.alpha), None, tensors.collect());
        let logits = served(name, &adapter, &leaf.tokens);
        let loss = |(row, target): (&Vec<f32>, &Option<u32>)| {
            let exps: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            target.map_or(0.0, |target| exps.ln() - f64::from(row[target as usize]))
        };
        let got: f64 = logits.iter().zip(&leaf.targets).map(loss).sum();
        let trained = net.loss(&at, &leaf).unwrap();
        assert!(
            (got - trained).abs() < 1e-4 * trained,
            "{name}: {got} {trained}"
        );
    }
}

/// The routers' auxiliary loss has PyTorch's gradient, and is not in the loss.
#[test]
fn even_routers_have_pytorchs_gradients() {
    let (exact, about) = recorded(BALANCED.0);
    let mut of = trained(BALANCED.0, Method::Full);
    of.balance = BALANCED.1;
    let net = TrainableModel::load(&of, Kernels::new(1).unwrap()).unwrap();
    let (leaf, at) = (both(), net.first_values(0));
    let (loss, grads) = net.gradient(&at, &leaf, leaf.judged()).unwrap();
    let off = loss / leaf.judged() as f64 - about["full_loss"].as_f64().unwrap();
    assert!(off.abs() < 2e-5, "{off}");
    let median = median_of_samples(&about);
    for slot in net.layout().slots() {
        let name = format!("aux.{}", slot.name);
        let own = about["float32_distance"][&name].as_f64().unwrap();
        let got = distance(&some(&grads[slot.range.clone()]), &exact[&name]);
        assert!(got <= 4.0 * own.max(median), "{name}: {got:e}");
    }
}

#[test]
fn bits_depend_on_no_instruction_set_and_no_threads() {
    for model in ["qwen3-bf16", "gemma3-linear-bf16"] {
        let mut first: Option<(u64, Vec<u32>)> = None;
        for set in InstructionSet::available() {
            for threads in [1, 3] {
                let net = net(
                    model,
                    Method::Lora,
                    Kernels::with_set(set, threads).unwrap(),
                );
                let leaf = both();
                let at = values(&net, Method::Lora);
                let (loss, grads) = net.gradient(&at, &leaf, leaf.judged()).unwrap();
                let bits = (loss.to_bits(), grads.iter().map(|g| g.to_bits()).collect());
                let first = first.get_or_insert_with(|| bits.clone());
                assert!(*first == bits, "{model} {set:?} {threads}");
            }
        }
    }
}

/// Neighbouring sequences in a leaf do not attend to each other. A base in its stored form gives
/// the bits of an unpacked one.
#[test]
fn neighbours_and_storage_do_not_show() {
    let lora = net("qwen2-f16", Method::Lora, Kernels::new(1).unwrap());
    let stored = net("qwen2-f16", Method::Qlora, Kernels::new(2).unwrap());
    let at = values(&lora, Method::Lora);
    let judged = both().judged();
    let (loss, grads) = lora.gradient(&at, &both(), judged).unwrap();
    let (stored_loss, stored_grads) = stored.gradient(&at, &both(), judged).unwrap();
    assert!(
        loss == stored_loss && grads == stored_grads,
        "a stored base"
    );
    let alone: Vec<f64> = (0..2)
        .map(|s| lora.loss(&at, &sequence(s)).unwrap())
        .collect();
    assert!(
        (alone[0] + alone[1] - loss).abs() < 1e-12 * loss.abs(),
        "{alone:?} {loss}"
    );
}

/// Farthest that a tensor's gradient on MLX may be from the CPU engine's, of its length. Both round
/// in f32, by sums of up to 128 products through three layers. PyTorch's distances from float64 are
/// up to 1e-5 on these models.
const MLX_TOLERANCE: f64 = 1e-4;

/// Share of the whole gradient below which a tensor's length does not count: what cancels, such as
/// the bias of keys, is all rounding.
const CANCELLED: f64 = 1e-3;

/// Every family, adapters on floats and on groups of integers, and whole models: layers on MLX give
/// the CPU engine's loss and gradients.
#[test]
fn gradients_on_mlx_are_the_cpu_engines() {
    let test = "gradients on mlx";
    let dense = MODELS.into_iter().take(DENSE);
    let folders = dense.map(|model| (golden().join("hf").join(model), Method::Lora));
    let stored = ["llama-4bit", "gemma3-5bit"];
    let stored = stored.map(|model| (golden().join("mlx").join(model), Method::Qlora));
    let whole = ["llama-tied", "gemma3-linear-bf16"];
    let whole = whole.map(|model| (golden().join("hf").join(model), Method::Full));
    for (model, method) in folders.chain(stored).chain(whole) {
        let Some(means) = with_mlx(test) else { return };
        let mut of = trained("llama-tied", method);
        of.model = model;
        let cpu = TrainableModel::load(&of, Kernels::new(1).unwrap()).unwrap();
        of.class = TrainingClass::MlxF32;
        let mlx = TrainableModel::load(&of, means).unwrap();
        assert_eq!(mlx.layout(), cpu.layout());
        let (leaf, at) = (both(), values(&cpu, method));
        let (loss, exact) = cpu.gradient(&at, &leaf, leaf.judged()).unwrap();
        let (own, got) = mlx.gradient(&at, &leaf, leaf.judged()).unwrap();
        let name = of.model.display();
        assert!((own - loss).abs() < 1e-5 * loss, "{name}: {own} {loss}");
        let length = |values: &[f32]| {
            let squares = values.iter().map(|x| f64::from(*x).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let floor = CANCELLED * length(&exact);
        for slot in cpu.layout().slots() {
            let (got, exact) = (&got[slot.range.clone()], &exact[slot.range.clone()]);
            let off: Vec<f32> = got.iter().zip(exact).map(|(g, e)| g - e).collect();
            let off = length(&off) / length(exact).max(floor);
            assert!(
                off < MLX_TOLERANCE,
                "{name} {:?} {}: {off:.2e}",
                method,
                slot.name
            );
        }
    }
}

/// In class `mlx` a bf16 model computes in bf16: near, and not the same.
#[test]
fn class_mlx_computes_in_the_models_type() {
    let mut of = trained("qwen3-bf16", Method::Lora);
    let loss = |of: &Trained| {
        let net = TrainableModel::load(of, with_mlx("class mlx in bf16")?).unwrap();
        let at = values(&net, Method::Lora);
        Some(net.loss(&at, &both()).unwrap())
    };
    of.class = TrainingClass::MlxF32;
    let Some(exact) = loss(&of) else { return };
    of.class = TrainingClass::Mlx;
    let near = loss(&of).unwrap();
    assert!(
        near != exact && (near - exact).abs() < 0.05 * exact,
        "{near} {exact}"
    );
}

#[test]
fn families_without_gradients_are_refused_by_name() {
    for (model, family) in [
        ("lfm2-bf16", "lfm2"),
        ("deepseek-v32-sparse-bf16", "indexer"),
    ] {
        let error = TrainableModel::load(&trained(model, Method::Lora), Kernels::new(1).unwrap())
            .unwrap_err();
        assert!(error.to_string().contains(family), "{error}");
    }
    let mut bad = trained("llama-tied", Method::Lora);
    bad.targets.push("lm_head".to_owned());
    let error = TrainableModel::load(&bad, Kernels::new(1).unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("lm_head") && error.contains("q_proj"),
        "{error}"
    );
}

/// The last layers alone have adapters, and the others none.
#[test]
fn adapters_of_the_last_layers_alone() {
    let mut of = trained("qwen3-bf16", Method::Lora);
    of.layers = Some(1);
    let net = TrainableModel::load(&of, Kernels::new(1).unwrap()).unwrap();
    let last = net.config().layers.len() - 1;
    let prefix = format!("base_model.model.model.layers.{last}.");
    assert_eq!(net.layout().slots().len(), 14);
    assert!(
        net.layout()
            .slots()
            .iter()
            .all(|slot| slot.name.starts_with(&prefix))
    );
    of.layers = Some(99);
    let error = TrainableModel::load(&of, Kernels::new(1).unwrap()).unwrap_err();
    assert!(error.to_string().contains("--layers is 99"), "{error}");
    of.layers = None;
    of.dropout = 1.0;
    let error = TrainableModel::load(&of, Kernels::new(1).unwrap()).unwrap_err();
    assert!(error.to_string().contains("--dropout is 1"), "{error}");
}

/// peft's files are read, and go through the other forms and back without a change.
#[test]
fn adapters_keep_their_bytes_through_all_forms() {
    let from = golden().join("train/adapter");
    let (adapter, form) = Adapter::read(&from).unwrap();
    assert_eq!((form, adapter.rank, adapter.scale()), (Form::Peft, 2, 2.0));
    assert_eq!(adapter.pairs().len(), 21);
    let folder = tempfile::tempdir().unwrap();
    adapter
        .write(&folder.path().join("mlx"), Form::Mlx)
        .unwrap();
    let (back, form) = Adapter::read(&folder.path().join("mlx/adapters.safetensors")).unwrap();
    assert_eq!(form, Form::Mlx);
    let source = ModelSource::open(&golden().join("hf/llama-tied")).unwrap();
    let base = Base::of(&Config::read(&source).unwrap());
    back.write_gguf(&folder.path().join("gguf"), base).unwrap();
    let (back, form) = Adapter::read(&folder.path().join("gguf")).unwrap();
    assert_eq!((form, back.scale()), (Form::Gguf, 2.0));
    back.write(&folder.path().join("peft"), Form::Peft).unwrap();
    let read = |path: PathBuf| {
        let file = Safetensors::open(path.join("adapter_model.safetensors")).unwrap();
        let of = |info: &paceline_weights::safetensors::TensorInfo| {
            (
                info.name().to_owned(),
                (info.shape().to_vec(), file.bytes_of(info).to_vec()),
            )
        };
        file.tensors().map(of).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(read(from), read(folder.path().join("peft")));
}
