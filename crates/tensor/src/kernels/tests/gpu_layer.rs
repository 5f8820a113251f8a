//! A layer by class `cpu`, as the graphics kernels in `gpu` must compute it: their tests read the
//! outcomes recorded here. The order of the operations is that of `model/src/step.rs`.

use std::collections::BTreeMap;
use std::path::Path;

use super::*;
use crate::storage::units::Unit;
use crate::vector;
use cases::{FFN, FFN_LEAF, HEAD, HEADS, KV_HEADS, Kind, LayerCase, Stored, WIDTH, digest};

#[path = "../../../../gpu/src/layer/cases.rs"]
mod cases;

const fn block_type(kind: Kind) -> BlockType {
    match kind {
        Kind::Eight => BlockType::Q8_0,
        Kind::Four => BlockType::Q4_K,
    }
}

/// A matrix with the kernels that multiply it.
struct Linear {
    leaf: usize,
    packed: PackedMatrix,
}

impl Linear {
    fn new(kernels: &Kernels, stored: &Stored) -> Self {
        let bytes = stored.bytes();
        let matrix = StoredMatrix {
            block_type: block_type(stored.kind),
            rows: stored.rows,
            cols: stored.cols,
            bytes: &bytes,
        };
        let options = PackOptions {
            leaf_cols: stored.leaf,
            as_f32: false,
        };
        let packed = PackedMatrix::new(matrix, options, kernels.pool()).unwrap();
        let leaf = stored.leaf;
        Self { leaf, packed }
    }

    /// x (rows, cols) -> (rows, outputs).
    fn product(&self, kernels: &Kernels, x: &[f32]) -> Vec<f32> {
        let cols = self.packed.cols();
        let rows = x.len() / cols;
        let mut acts = Activations::new(rows, cols, self.leaf, Some(Precision::Fifteen));
        kernels.fill_rows(&mut acts, |t, row| {
            row.copy_from_slice(&x[t * cols..][..cols])
        });
        let mut out = vec![0.0; rows * self.packed.rows()];
        let weights = &self.packed;
        let first_col = 0;
        kernels.products(
            &acts,
            [Product {
                weights,
                first_col,
                out: &mut out,
            }],
        );
        out
    }
}

struct Layer {
    kernels: Kernels,
    norms: [Vec<f32>; 2],
    linears: [Linear; 7],
}

impl Layer {
    fn new() -> Self {
        let kernels = Kernels::new(1).unwrap();
        let linears = cases::matrices().map(|stored| Linear::new(&kernels, &stored));
        let norms = cases::norms();
        Self {
            kernels,
            norms,
            linears,
        }
    }

    fn normed(&self, which: usize, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        for (x, out) in x.chunks(WIDTH).zip(out.chunks_mut(WIDTH)) {
            self.kernels
                .rms_norm(x, &self.norms[which], cases::EPS, out);
        }
        out
    }

    /// The residual behind the layer, and the new keys and values.
    fn step(&self, case: &LayerCase) -> [Vec<f32>; 3] {
        let kernels = &self.kernels;
        let [query, key, value, output, gate, up, down] = self
            .linears
            .each_ref()
            .map(|linear| |x: &[f32]| linear.product(kernels, x));
        let x = self.normed(0, &case.residual);
        let (mut q, mut k, v) = (query(&x), key(&x), value(&x));
        for (t, angles) in case.angles.chunks(HEAD / 2).enumerate() {
            let q = &mut q[t * HEADS * HEAD..][..HEADS * HEAD];
            kernels.rope(q, HEAD, angles, RopePairs::Adjacent);
            q.iter_mut().for_each(|q| *q *= 1.0 / (HEAD as f32).sqrt());
            let k = &mut k[t * KV_HEADS * HEAD..][..KV_HEADS * HEAD];
            kernels.rope(k, HEAD, angles, RopePairs::Adjacent);
        }
        let attended = attend(case, &q, [&k, &v]);
        let mut residual = case.residual.clone();
        vector::add_assign(&mut residual, &output(&attended));
        let x = self.normed(1, &residual);
        let mut hidden = vec![0.0; case.rows * FFN];
        kernels.silu_mul(&gate(&x), &up(&x), &mut hidden);
        vector::add_assign(&mut residual, &down(&hidden));
        [residual, k, v]
    }
}

/// Attention of all heads over cached and new rows, which the cache holds as halves.
fn attend(case: &LayerCase, q: &[f32], new: [&[f32]; 2]) -> Vec<f32> {
    let half = |x: &f32| f16::from_f32(*x).to_f32();
    let [keys, values] = [(&case.keys, new[0]), (&case.values, new[1])]
        .map(|(cached, new)| cached.iter().chain(new).map(half).collect::<Vec<f32>>());
    let mut out = Vec::new();
    for (i, query) in q.chunks(HEAD).enumerate() {
        let (t, head) = (i / HEADS, i % HEADS / (HEADS / KV_HEADS));
        let seen = case.position + t + 1;
        let [keys, values] = [&keys, &values].map(|all| {
            let rows = all.chunks(KV_HEADS * HEAD).take(seen);
            rows.map(|row| &row[head * HEAD..][..HEAD])
                .collect::<Vec<_>>()
        });
        out.extend(naive::attention(query, &keys, &values, usize::MAX, None));
    }
    out
}

/// A unit's step, and the scale and min of each chunk.
fn unit(kind: Kind, header: usize, chunks: usize) -> String {
    let stored = Stored {
        kind,
        rows: 1,
        cols: 32 * chunks,
        leaf: 0,
        headers: 1,
        seed: 0,
    };
    let mut row = stored.bytes();
    let scales = cases::header(kind, header);
    match kind {
        Kind::Four => row[..16].copy_from_slice(&scales),
        Kind::Eight => {
            for (block, scale) in row.chunks_mut(34).zip(scales.chunks(2)) {
                block[..2].copy_from_slice(scale);
            }
        }
    }
    let unit = Unit::of(block_type(kind), &row, 0);
    let mut text = format!("{:08x}", unit.step.to_bits());
    for factors in &unit.factors {
        text += &format!(" {} {}", factors.scale[0], factors.min[0]);
    }
    text
}

/// All cases, or those that the gate computes.
fn outcomes(all: bool) -> BTreeMap<String, String> {
    let mut lines = BTreeMap::new();
    for kind in Kind::ALL {
        for header in 0..cases::HEADERS {
            let chunks = if kind == Kind::Eight {
                &[2, 8][..]
            } else {
                &[8]
            };
            for &chunks in chunks {
                let key = format!("unit {} {header} {chunks}", kind.name());
                lines.insert(key, unit(kind, header, chunks));
            }
        }
    }
    let mut note = |key: String, digest: u64| lines.insert(key, format!("{digest:016x}"));
    let exps: Vec<f32> = cases::exponents().into_iter().map(naive::exp).collect();
    note("exp".to_owned(), digest(&exps));
    let layer = Layer::new();
    for (kind, leaf) in Kind::ALL
        .into_iter()
        .flat_map(|kind| [(kind, 0), (kind, FFN_LEAF)])
    {
        let stored = cases::product_matrix(kind, leaf);
        let linear = Linear::new(&layer.kernels, &stored);
        for rows in cases::PRODUCT_ROWS {
            let x: Vec<f32> = (0..rows as u64)
                .flat_map(|row| cases::activations(row, stored.cols))
                .collect();
            let key = format!("product {} {leaf} {rows}", kind.name());
            note(key, digest(&linear.product(&layer.kernels, &x)));
        }
    }
    let count = |[most, some]: [usize; 2]| if all { most } else { some };
    let decodes = (0..count(cases::DECODES)).map(|i| ("decode", i, LayerCase::decode(i)));
    let prompts = (0..count(cases::PROMPTS)).map(|i| ("prompt", i, LayerCase::prompt(i)));
    for (name, i, case) in decodes.chain(prompts) {
        let key = format!("{name} {i}");
        note(key, digest(layer.step(&case).iter().flatten()));
    }
    lines
}

fn path() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(cases::RECORD)
}

#[test]
fn recorded_layers_are_those_of_class_cpu() {
    if !path().exists() {
        record_layers();
        panic!("{} was missing and is recorded now", path().display());
    }
    let text = std::fs::read_to_string(path()).unwrap();
    let recorded: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .collect();
    for (key, value) in outcomes(paceline_base::testing::long()) {
        assert_eq!(recorded.get(&key[..]), Some(&&value[..]), "{key}");
    }
}

/// Records all outcomes, after a change of class `cpu`.
fn record_layers() {
    let lines = outcomes(true).into_iter();
    let text: String = lines
        .map(|(key, value)| format!("{key}\t{value}\n"))
        .collect();
    std::fs::write(path(), text).unwrap();
}
