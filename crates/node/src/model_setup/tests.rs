//! Tests of `model_setup.rs`.

use super::*;

/// A small model over two nodes, and the bytes of its files.
fn over_two(kind: SplitKind) -> (u64, PreparedModel) {
    prepared("llama-rope3-sharded", KernelClass::Cpu, kind)
}

fn prepared(name: &str, class: KernelClass, kind: SplitKind) -> (u64, PreparedModel) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = folder.join("../../tests-data/golden/hf").join(name);
    let source = Arc::new(ModelSource::open(&folder).unwrap());
    let all = source.file_bytes().0;
    let options = Options {
        classes: Classes::same(class, 2),
        threads: 1,
        kv: None,
        nodes: 2,
        kind,
        shares: Vec::new(),
        backend: Backend::Any,
        probed: Backend::Tcp,
    };
    let sizes = |_: &Config| EngineConfig::single("m", 256);
    (all, PreparedModel::new(source, options, sizes).unwrap())
}

#[test]
fn a_prediction_layer_of_the_own_files_is_used_unasked_on_the_cpu() {
    let layer = "glm4moe-bf16-mtp.gguf";
    for (name, (class, drafts), is_used) in [
        (layer, (KernelClass::Cpu, 0), true),
        ("qwen3next-bf16-mtp", (KernelClass::CpuF32, 0), true),
        (layer, (KernelClass::Mlx, 0), false),
        (layer, (KernelClass::Mlx, 3), true),
        ("llama-rope3-sharded", (KernelClass::Cpu, 0), false),
    ] {
        let mut model = prepared(name, class, SplitKind::Pipeline).1;
        model.engine.drafts = drafts;
        let got = model.guess_with_own_layer().unwrap();
        assert_eq!(got, is_used, "{name} {class}");
        assert_eq!(model.has_draft(), is_used);
        assert_eq!(model.engine.drafts > 0, is_used);
    }
}

#[test]
fn each_rank_reads_its_layers_and_ends() {
    let (all, prepared) = over_two(SplitKind::Pipeline);
    let [first, second] = prepared.bytes_by_rank()[..] else {
        panic!("two ranks");
    };
    // All but the headers, whose share is a few hundredths here.
    assert!((all / 20 * 19..all).contains(&(first + second)), "{all}");
    assert!(first.min(second) > all / 4, "{first} {second}");
    let [one, two] = over_two(SplitKind::Tensor).1.bytes_by_rank()[..] else {
        panic!("two ranks");
    };
    assert_eq!(one, two);
    assert!((all / 20 * 9..=all / 2).contains(&one), "{one} of {all}");
}

#[test]
fn a_split_is_left_for_one_with_fewer_exchanges_alone() {
    use SplitKind::{Pipeline, Tensor};
    let rivals = |kind, predicted: &[(SplitKind, f64)]| {
        let mut prepared = over_two(kind).1;
        prepared.steer_among(predicted);
        let cuts = prepared.cuts();
        assert_eq!(best(&cuts), 0, "it begins with its own");
        let others = cuts[1..].iter();
        others
            .map(|cut| cut.split.to_string())
            .collect::<Vec<String>>()
    };
    let both = |tensor, pipeline| [(Tensor, tensor), (Pipeline, pipeline)];
    assert_eq!(rivals(Tensor, &both(20.0, 9.0)), ["pipeline"]);
    assert_eq!(rivals(Pipeline, &both(9.0, 20.0)), [""; 0]);
    assert_eq!(rivals(Tensor, &[(Pipeline, 9.0)]), [""; 0]);
    assert_eq!(rivals(Tensor, &[]), [""; 0]);
}
