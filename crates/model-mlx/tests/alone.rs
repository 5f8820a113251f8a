//! Single matrices on MLX, as training has them: rows in another order, as stored or unpacked, and
//! types that MLX has no form for.

use paceline_base::BlockType;
use paceline_mlx::{Dtype, Library};
use paceline_model::{Config, LayerRole, ModelFamily, ModelSource, Role};
use paceline_model_mlx::{MlxForm, MlxMatrix};

use crate::common::tiny::Tiny;

const FORM: MlxForm<'static> = MlxForm {
    dtype: Dtype::F32,
    unpacked: false,
    order: None,
};

#[test]
fn a_matrix_has_its_rows_in_the_order_that_is_asked_for() {
    let Some(library) = crate::library("matrices on mlx alone") else {
        return;
    };
    let library = Library::load(&library).unwrap();
    let stream = library.stream(library.best_device().unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    for block_type in [BlockType::F16, BlockType::Q4_1, BlockType::Q8_0] {
        Tiny::new(ModelFamily::Llama, block_type).write(&path);
        let source = ModelSource::open(&path).unwrap();
        let config = Config::read(&source).unwrap();
        let (n, cols) = (
            config.layers[0].heads * config.layers[0].head_dim,
            config.width,
        );
        let at = (Role::Layer(0, LayerRole::Query), [n, cols]);
        let one = |i: usize| if i.is_multiple_of(cols + 1) { 1.0 } else { 0.0 };
        let ones: Vec<f32> = (0..cols * cols).map(one).collect();
        let ones = stream
            .array_f32(&ones, &[cols as i32, cols as i32])
            .unwrap();
        // (cols, n): all values, exactly.
        let values = |form: MlxForm<'_>| {
            let matrix = MlxMatrix::load(&stream, (&source, &config), at, form).unwrap();
            let rows = matrix.apply(&stream, &ones).unwrap();
            let rows = stream.rows_f32(&rows).unwrap();
            stream.eval([&rows]).unwrap();
            rows.as_f32().unwrap().to_vec()
        };
        let order: Vec<u32> = (0..n as u32).rev().collect();
        let turned = MlxForm {
            order: Some(&order),
            ..FORM
        };
        let unpacked = MlxForm {
            unpacked: true,
            ..turned
        };
        let (plain, turned, unpacked) = (values(FORM), values(turned), values(unpacked));
        for (i, value) in turned.iter().enumerate() {
            let (col, row) = (i / n, i % n);
            assert_eq!(*value, plain[col * n + n - 1 - row], "{block_type} {i}");
            let off = (value - unpacked[i]).abs();
            assert!(off < 1e-5, "{block_type} {i}: {value} {}", unpacked[i]);
        }
        assert!(plain.iter().any(|value| *value != plain[0]), "{block_type}");
    }
}

/// Known from the file's header, without MLX.
#[test]
fn a_type_without_a_form_is_refused_by_name_unless_it_is_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    Tiny::new(ModelFamily::Llama, BlockType::Q6_K).write(&path);
    let source = ModelSource::open(&path).unwrap();
    let config = Config::read(&source).unwrap();
    let shape = [config.width, config.layers[0].ffn];
    let at = (Role::Layer(0, LayerRole::Down), shape);
    let error = MlxMatrix::planned((&source, &config), at, FORM).unwrap_err();
    let told = error.to_string();
    assert!(told.starts_with("mlx has no form for Q6_K"), "{told}");
    let unpacked = MlxForm {
        unpacked: true,
        ..FORM
    };
    let bytes = MlxMatrix::planned((&source, &config), at, unpacked).unwrap();
    assert_eq!(bytes, (shape[0] * shape[1] * 4) as u64);
}
