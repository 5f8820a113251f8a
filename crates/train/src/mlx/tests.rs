//! Layer by layer against the whole graph.

use std::path::PathBuf;

use paceline_base::testing::from_package;
use paceline_mlx::{Array, DeviceKind as Kind};
use paceline_model::Error;
use paceline_model::adapter::files::TARGETS;
use paceline_model_mlx::MlxPlaces;
use paceline_tensor::Kernels;

use super::device::{LayerJob, MlxThread};
use super::graph::slots::{self, TensorSlot};
use crate::class::{Means, TrainingClass};
use crate::net::{Leaf, TrainableModel, Trained};
use crate::params::Lora;
use crate::weights::Method;

fn net(library: PathBuf) -> TrainableModel {
    let golden = from_package(env!("CARGO_MANIFEST_DIR"), "../../tests-data/golden");
    let trained = Trained {
        model: golden.join("mlx/llama-4bit"),
        method: Method::Qlora,
        lora: Lora {
            rank: 2,
            alpha: 4.0,
        },
        targets: TARGETS.map(|(_, _, name)| name.to_owned()).to_vec(),
        layers: None,
        dropout: 0.0,
        balance: 0.0,
        class: TrainingClass::MlxF32,
    };
    let means = Means {
        kernels: Kernels::new(1).unwrap(),
        mlx: MlxPlaces {
            explicit: Some(library),
            ..MlxPlaces::default()
        },
    };
    TrainableModel::load(&trained, means).unwrap()
}

/// Loss and gradient of one `mlx_vjp` over all layers and the head; `x` are the tokens' rows.
fn whole(
    device: &MlxThread,
    (x, leaf): (&[f32], &Leaf),
    values: &[f32],
) -> Result<(f64, Vec<f32>), Error> {
    let (loaded, stream) = (device.loaded()?, &device.stream);
    let layers: Vec<Vec<TensorSlot>> = loaded.weights.layers.iter().map(slots::of_layer).collect();
    let slots: Vec<TensorSlot> = layers.iter().flatten().cloned().collect();
    let parts = &loaded.weights.parts.values[1..];
    let places = layers.iter().zip(parts).flat_map(|(slots, part)| {
        let place = |slot: &TensorSlot| part.start + slot.range.start..part.start + slot.range.end;
        slots.iter().map(place)
    });
    let places: Vec<_> = places.collect();
    let own: Vec<Vec<f32>> = places
        .iter()
        .map(|place| values[place.clone()].to_vec())
        .collect();
    let inputs = device.inputs(x, &slots, &own)?;
    let targets: Vec<u32> = leaf.targets.iter().flatten().copied().collect();
    let targets = stream.array_u32(&targets, &[targets.len() as i32, 1])?;
    let function = |inputs: &[Array]| {
        let (mut x, mut first) = (inputs[0].clone(), 1);
        for (layer, slots) in layers.iter().enumerate() {
            let job = LayerJob {
                layer,
                lengths: leaf.lengths.clone(),
                x: Vec::new(),
                values: Vec::new(),
                dropout: None,
            };
            let mut own = vec![x];
            own.extend_from_slice(&inputs[first..first + slots.len()]);
            x = loaded.layer(stream, &job, slots, &own)?;
            first += slots.len();
        }
        let graph = loaded.graph(stream, None, (&[], &[]));
        let losses = graph.losses(loaded.weights.head(), loaded.head(), (&x, &targets))?;
        Ok::<_, paceline_mlx::Error>(vec![losses])
    };
    let n = leaf.tokens.len();
    let weight = vec![1.0 / leaf.judged() as f32; n];
    let weight = stream.array_f32(&weight, &[n as i32, 1])?;
    let primals: Vec<&Array> = inputs.iter().collect();
    let (losses, gradients) = stream.vjp(&function, &primals, &[&weight])?;
    let all: Vec<&Array> = losses.iter().chain(&gradients[1..]).collect();
    let mut all = device.read(1, &all)?.into_iter();
    let losses = all.next().unwrap_or_default();
    let loss = losses.iter().map(|loss| f64::from(*loss)).sum();
    let mut grads = vec![0.0; values.len()];
    for (place, own) in places.into_iter().zip(all) {
        grads[place].copy_from_slice(&own);
    }
    Ok((loss, grads))
}

/// The same bits: each layer's gradient is of the same operations on the same values. A GPU that
/// does not repeat its own is only near.
#[test]
fn layer_by_layer_has_the_bits_of_the_whole_graph() {
    let Some(library) = std::env::var_os("PACELINE_MLXC") else {
        let none = "PACELINE_MLXC names no libmlxc (cargo xtask mlx)";
        return eprintln!("SKIPPED layers on mlx against the whole graph: {none}");
    };
    let net = net(library.into());
    let tokens: Vec<u32> = (0..24).map(|i| (7 + 31 * i + i * i) % 300).collect();
    let leaf = Leaf {
        targets: tokens[1..].iter().map(|token| Some(*token)).collect(),
        tokens: tokens[..23].to_vec(),
        lengths: vec![9, 14],
    };
    let values: Vec<f32> = (0..net.layout().len())
        .map(|i| ((i * 37) % 1021) as f32 / 5105.0 - 0.1)
        .collect();
    let (loss, grads) = net.gradient(&values, &leaf, leaf.judged()).unwrap();
    let x = net.embedded(&values, &leaf);
    let mlx = net.on_mlx().unwrap();
    let at = (leaf, values);
    let work = move |device: &mut MlxThread| {
        let (leaf, values) = at;
        let is_cpu = device.stream.device() == Kind::Cpu;
        let of_whole = whole(device, (&x, &leaf), &values)?;
        Ok::<_, Error>((of_whole, device.repeats()?, is_cpu))
    };
    let done = mlx.host.call(work, || ()).unwrap();
    let ((whole_loss, whole_grads), repeats, is_cpu) = done.unwrap();
    assert!(repeats || !is_cpu, "a layer's gradient, twice");
    assert!(
        (loss - whole_loss).abs() < 1e-6 * loss,
        "{loss} {whole_loss}"
    );
    if repeats {
        assert!(
            grads == whole_grads,
            "gradients of layers, and of the whole"
        );
    }
    let off = grads.iter().zip(&whole_grads).map(|(a, b)| (a - b).abs());
    let largest = whole_grads.iter().fold(0.0f32, |most, g| most.max(g.abs()));
    let off = off.fold(0.0, f32::max);
    assert!(largest > 0.0 && off < 1e-4 * largest, "{off} of {largest}");
}
