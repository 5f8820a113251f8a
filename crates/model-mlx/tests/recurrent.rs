//! Layers with states and with convolutions: guesses that turn out wrong leave nothing behind.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]
#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::sync::Arc;

use crate::common::compare::relative_rms;
use crate::common::runner::Runner;
use crate::common::{golden, golden_json, ids};
use crate::{apart, mlx};
use paceline_base::KernelClass;

/// Rows that are taken back are computed anew: a state is that of what came after. So it is for
/// every rule of a state and for a convolution.
#[test]
fn rows_can_be_taken_back() {
    let Some(library) = apart("recurrent::rows_can_be_taken_back") else {
        return;
    };
    for name in [
        "qwen35-bf16",
        "kimi-linear-bf16",
        "nemotron-h-bf16",
        "lfm2-bf16",
    ] {
        let tokens = ids(&golden_json(&format!("hf/{name}.golden.json")), "prompt");
        let path = golden(&format!("hf/{name}"));
        let model = mlx(&library, &path, KernelClass::MlxF32);
        let expected = Runner::of(Arc::clone(&model), tokens.len()).all(&tokens);
        let mut runner = Runner::on_pages(Arc::clone(&model), tokens.len(), vec![2, 0, 1]);
        runner.last(&tokens[..60], 0);
        // Guesses over the end of a page, all of them wrong.
        runner.last(&[1, 2, 3, 4, 5, 6, 7], 60);
        for (from, to) in [(60, 63), (63, 64), (64, 66), (66, tokens.len())] {
            let row = runner.last(&tokens[from..to], from);
            let far = relative_rms(&row, &expected[to - 1]);
            println!("{name}: rows {from} to {to} within {far:.1e}");
            assert!(far < 1e-4, "{name}: rows {from} to {to}: {far:.1e}");
        }
    }
}
