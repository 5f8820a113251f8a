//! Tests of `machines.rs`.

use std::collections::BTreeMap;
use std::path::Path;

use paceline_cluster::nodes::agent::{DeviceRates, EngineDevice, FormRates};
use paceline_comm::Backend;
use paceline_model::ModelSource;

use super::super::facts::FactsStore;
use super::super::probe::StepMeasurements;
use super::super::{Forecast, Setting};
use super::*;

/// A small model, and a forecast by which a layer's products take 10 ms.
fn forecast() -> (Config, Forecast) {
    forecast_of("llama-rope3-sharded")
}

/// As [`forecast`], of the model in a folder of golden ones.
fn forecast_of(folder: &str) -> (Config, Forecast) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/hf");
    let source = ModelSource::open(&golden.join(folder)).unwrap();
    let mut config = Config::read(&source).unwrap();
    for layer in &mut config.layers {
        layer.ffn = 64 * config.ffn_leaf; // as much as can be shared
        if let Some(experts) = &mut layer.experts {
            experts.width *= 1024; // many against a program
        }
    }
    config.layers = config.layers.iter().cycle().take(8).copied().collect();
    let measured = StepMeasurements {
        products: 1e-2,
        other: 1e-5,
        key: 1e-8,
        head: 1e-2,
        step: 1e-5,
        few_row: 1e-2,
        prompt_row: 1e-2,
        experts: 0.0,
        few_expert: 0.0,
        prompt_expert: 1e-3,
    };
    let setting = Setting {
        source: &source,
        config: &config,
        class: KernelClass::Cpu,
        threads: 1,
        backend: Backend::Tcp,
    };
    let facts = FactsStore::nowhere();
    let forecast = Forecast::of(facts, setting, measured, BTreeMap::new(), None);
    (config, forecast)
}

/// Machines like this one, with this round trip between each two of them.
fn machines(of_rank: &[usize], round_trip: f64) -> Machines {
    let n = of_rank.iter().max().map_or(0, |last| last + 1);
    let machine = |i: usize| RemoteMachine {
        name: format!("n{i}"),
        memory: Bytes(1 << 30),
        reads: 1.0,
        computes: 1.0,
        device: None,
    };
    let pairs = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
    let way = |(a, b)| MachineLink {
        a,
        b,
        round_trip,
        bytes_per_s: 1e9,
    };
    Machines {
        all: (0..n).map(machine).collect(),
        on_mlx: vec![false; n],
        wide: false,
        of_rank: of_rank.to_vec(),
        ways: pairs.map(way).collect(),
    }
}

fn first(round_trip: f64) -> String {
    let (config, forecast) = forecast();
    let machines = machines(&[0, 1], round_trip);
    let (ranked, refused) = forecast.ranked(&config, SplitKind::Auto, &machines);
    assert!(ranked.len() == 2 && refused.is_empty(), "{refused:?}");
    let tok_s = |i: usize| ranked[i].prediction.decode_tok_s;
    assert!(tok_s(0) >= tok_s(1));
    ranked[0].split.to_string()
}

#[test]
fn predictions_over_machines_are_corrected_by_what_is_seen() {
    let (config, mut forecast) = forecast();
    let machines = machines(&[0, 1], 1e-4);
    let said = |forecast: &Forecast| {
        let (ranked, _) = forecast.ranked(&config, SplitKind::Auto, &machines);
        ranked
    };
    let before = said(&forecast);
    assert_eq!(
        (before[0].split.to_string().as_str(), before[0].load_s),
        ("tensor", None)
    );
    let (tensor, tok_s) = (before[0].split.clone(), before[0].prediction.decode_tok_s);
    for _ in 0..2 {
        forecast.learn_across(&config, (&tensor, &machines), tok_s / 4.0);
    }
    forecast.loaded_across(&config, (&tensor, &machines), 8.0);
    let after = said(&forecast);
    assert_eq!(
        after[0].split, before[1].split,
        "the other split is faster now"
    );
    let corrected = after[1].prediction.decode_tok_s;
    assert!(
        (corrected / tok_s * 4.0 - 1.0).abs() < 1e-9,
        "{corrected} {tok_s}"
    );
    assert_eq!(after[1].load_s, Some(8.0));
    assert!(
        (after[0].load_s.unwrap() - 8.0).abs() < 1e-6,
        "equal parts, as fast a load"
    );
}

#[test]
fn an_open_split_is_a_pipeline_over_long_links() {
    assert_eq!(first(1e-4), "tensor");
    assert_eq!(first(0.1), "pipeline");
    // The direction still fits when a single node is left.
    let (config, _) = forecast();
    for kind in [SplitKind::Tensor, SplitKind::Pipeline] {
        assert!(Split::plan(&config, kind, 1, &[]).is_ok(), "{kind}");
    }
}

/// Machines with GPUs, each `faster` times as fast as the processor of [`forecast`]; `crossing`
/// is in seconds.
fn on_gpus(
    (config, forecast): (&Config, &Forecast),
    n: usize,
    (faster, crossing): (f64, f64),
) -> Machines {
    let ranks: Vec<usize> = (0..n).collect();
    let mut all = machines(&ranks, 1e-5);
    for machine in &mut all.all {
        machine.device = gpu(forecast, faster, crossing);
        assert!(forecast.is_faster_on_mlx(config, machine));
    }
    all.on_mlx = vec![true; n];
    all
}

fn gpu(forecast: &Forecast, faster: f64, crossing: f64) -> Option<RemoteDevice> {
    let own = forecast.node(0, (1.0, 1.0), forecast.prompt_row());
    let bits = forecast.shape.bits.rest;
    let form = |held| FormRates {
        bits: held,
        wide: held == 32,
        reads: (faster * own.bandwidth * f64::from(held) / bits) as u64,
        computes: 1 << 40,
    };
    let device = EngineDevice {
        backend: "metal".to_owned(),
        rates: Some(DeviceRates {
            forms: [5, 9, 16, 32].map(form).to_vec(),
            operation_ns: 100,
            crossing_ns: (crossing * 1e9) as u64,
        }),
        ..EngineDevice::default()
    };
    DeviceSpeed::of(&device).map(|speed| RemoteDevice {
        speed,
        memory: Bytes(1 << 30),
    })
}

#[test]
fn a_split_crosses_to_the_device_as_seldom_as_that_is_dear() {
    let (config, forecast) = forecast();
    let layers = config.layers.len();
    for (crossing, first) in [(4e-6, "tensor"), (150e-6, "pipeline")] {
        // A layer takes 0.1 ms.
        let machines = on_gpus((&config, &forecast), 2, (100.0, crossing));
        let (ranked, refused) = forecast.ranked(&config, SplitKind::Auto, &machines);
        assert!(ranked.len() == 2 && refused.is_empty(), "{refused:?}");
        assert_eq!(ranked[0].split.to_string(), first, "{crossing}");
        for it in &ranked {
            let expected = match &*it.split.to_string() {
                "tensor" => 2 * layers + 1,
                _ => 2,
            };
            assert_eq!(it.crossings.count, expected);
            let seconds = it.crossings.seconds / expected as f64;
            assert!((seconds / crossing - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn unlike_engines_form_a_pipeline_with_more_of_the_model_on_the_faster() {
    let (config, forecast) = forecast();
    let mut machines = on_gpus((&config, &forecast), 2, (2.0, 1e-6));
    machines.on_mlx[1] = false;
    let (ranked, refused) = forecast.ranked(&config, SplitKind::Auto, &machines);
    assert!(refused.is_empty(), "{refused:?}");
    let [only] = &ranked[..] else {
        panic!("{ranked:?}")
    };
    assert_eq!(only.split.to_string(), "pipeline");
    assert!(only.shares[0] > 3 * only.shares[1] / 2, "{:?}", only.shares);
    let (ranked, refused) = forecast.ranked(&config, SplitKind::Tensor, &machines);
    assert!(ranked.is_empty());
    assert!(matches!(refused[..], [(_, Error::MixedStage { .. })]));
    // A device that is waited for too long is left alone.
    let mut slow = machines.all.remove(0);
    slow.device = gpu(&forecast, 2.0, 10.0);
    assert!(!forecast.is_faster_on_mlx(&config, &slow));
}

#[test]
fn ranks_share_the_machine_that_they_run_on() {
    let (config, forecast) = forecast();
    let speed = |of_rank: &[usize]| {
        let kind = SplitKind::Tensor;
        let split = Split::plan(&config, kind, of_rank.len() as u32, &[]).unwrap();
        let said = forecast.across(&config, &split, &machines(of_rank, 1e-4));
        let said = said.unwrap();
        assert_eq!(said.nodes.len(), of_rank.len(), "a part for each rank");
        said.decode_tok_s
    };
    let (apart, together) = (speed(&[0, 1]), speed(&[0, 0]));
    assert!(together < apart, "{together} and {apart} tokens/s");
}

#[test]
fn what_fits_comes_first() {
    let mut all = [(false, 9.0), (true, 1.0), (true, 2.0)];
    all.sort_by(|a, b| best_first(*a, *b));
    assert_eq!(all, [(true, 2.0), (true, 1.0), (false, 9.0)]);
}

/// An answer within one limit of memory tells how often steps choose the same experts, and so what
/// answers within another give. Machines without a disk's rate are predicted as before.
#[test]
fn streamed_experts_are_reused_as_answers_show() {
    let (config, without) = forecast_of("qwen3moe-bf16");
    let machines = machines(&[0], 1e-4);
    let split = Split::whole(&config);
    let said = |own: &Forecast| own.across(&config, &split, &machines).unwrap().decode_tok_s;
    let within = |forecast: &Forecast, mib: u64| {
        let mut forecast = forecast.clone();
        forecast.stream(Bytes(mib << 20));
        forecast
    };
    let whole = said(&without);
    assert_eq!(said(&within(&without, 300)), whole, "no rate is known");
    let mut with = without;
    with.facts.set_disk(1e9);
    let speeds = (256..1000).map(|mib| (mib, said(&within(&with, mib))));
    let speeds: Vec<_> = speeds.collect();
    // Limits within which a part of the experts fits.
    let is_part = |speed: f64| speeds[0].1 < speed && speed < 0.99 * whole;
    let parts: Vec<_> = speeds.iter().filter(|(_, speed)| is_part(*speed)).collect();
    let [(few, slow), (many, fast)] = [parts[parts.len() / 4], parts[parts.len() / 2]];
    assert!(slow < fast, "{parts:?}");
    let (mut learns, measured) = (within(&with, *few), 0.7 * slow + 0.3 * fast);
    let mut fastest = learns.clone();
    assert!(learns.lacks_reuse(&config, &split));
    learns.learn_across(&config, (&split, &machines), measured);
    fastest.learn_across(&config, (&split, &machines), 10.0 * whole);
    let lack = [&learns, &fastest].map(|own| own.lacks_reuse(&config, &split));
    assert_eq!(lack, [false; 2], "the latter has the most reuse");
    assert!((said(&learns) / measured - 1.0).abs() < 0.01);
    with.facts = learns.facts;
    let better = said(&within(&with, *many));
    assert!(*fast < better && better < whole, "{fast} {better} {whole}");
}
