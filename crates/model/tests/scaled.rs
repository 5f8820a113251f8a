//! Folders with FP8, NVFP4 and other types with scales: against recorded values
//! (`tests-data/golden/scaled`, made by `scripts/golden/scaled.py`), and as models.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::Path;

use crate::common::runner::Runner;
use crate::common::scaled::{Layout, write, write_published, write_values};
use crate::common::schedule::bits;
use crate::common::tiny::Tiny;
use crate::common::{check_values, decoded, golden, kernels, load};
use paceline_base::{BlockType, KernelClass};
use paceline_model::{LayerRole, ModelFamily, ModelSource, Role, shape};
use paceline_weights::hf::HfFolder;

/// ml_dtypes gives the same numbers, to the bit but for the sign of zero.
#[test]
fn every_layout_decodes_as_recorded() {
    let folder = HfFolder::open(golden("scaled")).unwrap();
    let names = folder.names();
    let layouts: Vec<&str> = names
        .filter_map(|name| name.strip_suffix(".values"))
        .collect();
    assert_eq!(layouts.len(), 15);
    for layout in layouts {
        let (_, got) = check_values(&folder, layout);
        // Rows from within a tile on have the scales of the whole.
        let parts = folder.quantised(layout).unwrap().unwrap();
        let part = parts.row_range(29..37).unwrap().joined().unwrap();
        assert_eq!(decoded(&part), got[29 * 96..37 * 96], "{layout}");
    }
}

#[test]
fn a_folder_with_scales_has_the_logits_of_its_values() {
    let dir = tempfile::tempdir().unwrap();
    let (scaled, plain) = (dir.path().join("scaled"), dir.path().join("plain"));
    use Layout::{Fp8Rows, Fp8Tiles, Int4, Mxfp8, Nvfp4};
    // The integers of `Int4` are computed as such in class `cpu`.
    let all = [Nvfp4, Fp8Tiles, Fp8Rows, Mxfp8, Int4];
    for (class, layouts) in [(KernelClass::Cpu, &all[..4]), (KernelClass::CpuF32, &all)] {
        write(&scaled, layouts);
        write_values(&plain, &scaled);
        assert_same_logits([&scaled, &plain], class, &class.to_string());
    }
}

fn assert_same_logits(folders: [&Path; 2], class: KernelClass, name: &str) {
    let tokens: Vec<u32> = (0..70).map(|i| i * 37 % 300).collect();
    let logits = |path: &Path| {
        let mut runner = Runner::new(load(path, class, &kernels()), tokens.len());
        runner.all(&tokens).concat()
    };
    let [got, want] = folders.map(logits);
    assert!(got.iter().all(|x| x.is_finite()), "{name}");
    assert!(bits(&got) == bits(&want), "{name}: logits differ");
}

/// Published forms: DeepSeek V4 Flash and Base, V4.1 Flash, Kimi K3, GLM 5.3 Flash FP8, MiniMax M3
/// MXFP8, Qwen 3.8 Flash Next FP8.
#[test]
fn published_forms_have_the_logits_of_their_values() {
    use Layout::{Fp8Tiles, HalfTiles, InverseMxfp8, Mxfp4, NamedMxfp4, NamedTiles, PowerTiles};
    let deepseek = [
        (".ffn.experts.", NamedMxfp4),
        (".attn.w", PowerTiles),
        (".indexer.wq_b", PowerTiles),
        (".shared_experts.", PowerTiles),
    ];
    let base = deepseek.map(|(part, _)| (part, NamedTiles));
    let kimi = [(".experts.", Mxfp4)];
    let [glm, minimax, qwen] = [Fp8Tiles, InverseMxfp8, HalfTiles]
        .map(|layout| ["_proj", ".experts."].map(|part| (part, layout)));
    let dir = tempfile::tempdir().unwrap();
    let [scaled, plain] = ["scaled", "plain"].map(|name| dir.path().join(name));
    for (name, layouts) in [
        ("deepseek-v4-bf16", &deepseek[..]),
        ("deepseek-v4-bf16", &base),
        ("deepseek-v41-bf16", &deepseek),
        ("kimi-k3-bf16", &kimi),
        ("glm5-next-bf16", &glm),
        ("minimax-m3-bf16", &minimax),
        ("minimax-m3-blocks-bf16", &minimax),
        ("qwen4-ngrams-bf16", &qwen),
    ] {
        write_published(name, &scaled, layouts);
        write_values(&plain, &scaled);
        assert_same_logits([&scaled, &plain], KernelClass::CpuF32, name);
    }
}

/// The embeddings stay in the file, and its header has no share in memory.
#[test]
fn plans_have_the_bytes_that_matrices_with_scales_take() {
    for layout in [Layout::Nvfp4, Layout::Fp8Tiles, Layout::Fp8Rows] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[layout]);
        let planned = shape::from_files(dir.path(), None).unwrap().weight_bytes();
        let folder = HfFolder::open(dir.path()).unwrap();
        let embeddings = folder.info("model.embed_tokens.weight").unwrap().range();
        let header: usize = folder.contents().map(|(_, header)| header).sum();
        let model = load(dir.path(), KernelClass::Cpu, &kernels());
        let taken = model.weight_bytes().0 as f64;
        let ratio = (planned - (embeddings.len() + header) as f64) / taken;
        assert!((0.95..1.05).contains(&ratio), "{layout:?}: {ratio}");
    }
}

/// llama.cpp multiplies a product with a matrix of NVFP4 by the tensor `.scale` next to it.
#[test]
fn a_factor_beside_nvfp4_multiplies_its_scales() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let weight = |factors: &[f32], part| {
        let mut file = Tiny::new(ModelFamily::Mixtral, BlockType::NVFP4).file();
        if !factors.is_empty() {
            file.put_f32("blk.0.attn_q.scale", &factors[..1]);
            file.put_f32("blk.0.ffn_up_exps.scale", factors);
        }
        file.write(&path);
        let source = ModelSource::open(&path).unwrap();
        source.weight(ModelFamily::Mixtral, Role::Layer(0, part))
    };
    let nth = paceline_model::Nth { index: 2, of: 7 };
    let factors: Vec<f32> = (0..7).map(|i| 0.75 + i as f32).collect();
    for (part, factor) in [(LayerRole::Query, 0.75), (LayerRole::ExpertUp(nth), 2.75)] {
        let plain = decoded(&weight(&[], part).unwrap());
        let scaled = weight(&factors, part).unwrap();
        assert_eq!(scaled.block_type, BlockType::FP4);
        let want: Vec<f32> = plain.iter().map(|x| x * factor).collect();
        assert_eq!(decoded(&scaled), want, "{part:?}");
    }
    let error = weight(&factors[..6], LayerRole::ExpertUp(nth)).unwrap_err();
    let expected = "tensor blk.0.ffn_up_exps.scale: shape [6], expected [7]";
    assert_eq!(error.to_string(), expected);
}
