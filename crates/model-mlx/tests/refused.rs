//! Models and splits that MLX does not compute are refused by name. Errors of classes and families
//! follow from the file's header, without MLX.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::Path;
use std::sync::Arc;

use crate::common::tiny::Tiny;
use crate::common::{golden, kernels, try_load};
use crate::{NOT_ON_MLX, library, load_first, options, try_mlx};
use paceline_base::{BlockType, KernelClass};
use paceline_model::{Config, Error, ModelFamily, ModelSource, Split};

#[test]
fn classes_and_families_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let refused = |path: &Path, class| {
        let nowhere = options(Path::new("/none"), class);
        try_mlx(path, nowhere).unwrap_err().to_string()
    };
    Tiny::new(ModelFamily::Llama, BlockType::Q8_0).write(&path);
    let told = "kernel class cpu is not one of engine mlx";
    assert_eq!(refused(&path, KernelClass::Cpu), told);
    let told = "kernel class mlx is not one of engine cpu";
    let error = try_load(&path, KernelClass::Mlx, &kernels()).unwrap_err();
    assert_eq!(error.to_string(), told);
    assert!(refused(&path, KernelClass::Mlx).contains("in /none"));
    for name in NOT_ON_MLX {
        let error = refused(&golden(&format!("hf/{name}")), KernelClass::Mlx);
        let told = "engine mlx does not compute ";
        assert!(error.starts_with(told), "{name}: {error}");
    }
    for family in ModelFamily::ALL {
        let is_written = family.has_gguf() && family != ModelFamily::Gemma3n; // no streams in Tiny
        if ModelFamily::DENSE.contains(&family) || !is_written {
            continue;
        }
        Tiny::new(family, BlockType::Q8_0).write(&path);
        let error = refused(&path, KernelClass::MlxExact);
        let told = format!(
            "kernel class mlx-exact does not compute models of the family {}, whose",
            family.name()
        );
        assert!(error.starts_with(&told), "{error}");
    }
}

/// Groups of 64 values, and heads of 16: ranks' columns end within a group.
#[test]
fn a_split_within_a_group_is_refused_by_name() {
    let Some(library) = library("a split of mlx within a group") else {
        return;
    };
    let path = golden("mlx/llama-4bit");
    let source = Arc::new(ModelSource::open(&path).unwrap());
    let config = Config::read(&source).unwrap();
    for (kind, ranks, is_refused) in [("tensor", 2, true), ("pipeline", 2, false)] {
        let split = Split::plan(&config, kind.parse().unwrap(), ranks, &[]).unwrap();
        let options = options(&library, KernelClass::MlxF32);
        let source = Arc::clone(&source);
        let loaded = load_first(source, &split, options);
        let error = loaded.err();
        let is_it = matches!(error, Some(Error::CutGroup { group: 64, .. }));
        assert_eq!(is_it, is_refused, "{kind}: {error:?}");
    }
}
