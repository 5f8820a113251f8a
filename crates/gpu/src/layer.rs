//! An experiment, compiled for tests only: one layer of a llama on a graphics processor with the
//! bits of class `cpu`. docs/decisions.md says what it showed.
//!
//! WGSL promises no rounding of floats: compilers may reorder, fuse and flush. So every sum of
//! products is one of integers, and every rounding is done by integers (`wgsl/single.wgsl`). Floats
//! hold integers below 2^24 at most, which are exact in any order.
//!
//! - [`Session`] runs the kernels of `wgsl/layer.wgsl`, which documents shapes.
//! - `cases` has inputs; `tensor` records the outcomes of class `cpu` for them.
//! - `rates` measures on a card, where there is one.

use std::collections::BTreeMap;

use wgpu::{Buffer, ComputePipeline};

use crate::device::{Gpu, Kernel, KernelDispatch};
use crate::kernels::{FLOAT, bytes_of_words};
use cases::{EPS, FFN, HEAD, HEADS, KV_HEADS, Kind, LayerCase, Stored, UNIT, WIDTH};

#[expect(dead_code, reason = "the rest serves the test of tensor")]
mod cases;
mod rates;
mod tests;

const SINGLE: &str = include_str!("wgsl/single.wgsl");
const LAYER: &str = include_str!("wgsl/layer.wgsl");

/// Rows of weights that are interleaved, and threads of a workgroup.
const BLOCK: usize = 64;

/// Activation rows of a workgroup.
const TILE: usize = 8;

/// How integers are multiplied: constant `FORM` of the kernels.
#[derive(Clone, Copy, Debug)]
enum Form {
    Dot4,
    Integer,
    Float,
}

impl Form {
    const ALL: [Self; 3] = [Self::Dot4, Self::Integer, Self::Float];
}

/// Declarations before the kernels.
fn head(kind: Kind, form: Form) -> String {
    let four = kind == Kind::Four;
    format!("const FOUR = {four};\nconst FORM = {}u;\n", form as u32)
}

/// Recorded outcomes by case.
type Record = BTreeMap<String, String>;

/// A matrix on the device.
struct Linear {
    stored: Stored,
    weights: Buffer,
    factors: Buffer,
}

impl Linear {
    fn new(gpu: &Gpu, stored: Stored, record: &Record) -> Self {
        let [weights, factors] = packed(&stored, record).map(|words| bytes_of_words(&words));
        Self {
            stored,
            weights: gpu.filled(&weights).unwrap(),
            factors: gpu.filled(&factors).unwrap(),
        }
    }
}

/// Weights and factors as the kernels read them, of the steps and scales that `record` has.
fn packed(stored: &Stored, record: &Record) -> [Vec<u32>; 2] {
    let (blocks, chunks) = (stored.rows.div_ceil(BLOCK), stored.cols / 32);
    let units = stored.cols.div_ceil(UNIT);
    let words = if stored.kind == Kind::Eight { 8 } else { 4 };
    let mut weights = vec![0; blocks * chunks * words * BLOCK];
    let mut factors = vec![0; blocks * (chunks + units) * BLOCK];
    for (row, unit) in (0..stored.rows).flat_map(|row| (0..units).map(move |unit| (row, unit))) {
        let (block, lane) = (row / BLOCK, row % BLOCK);
        let (header, integers) = stored.unit(row, unit);
        let count = (chunks - 8 * unit).min(8);
        let line = &record[&format!("unit {} {header} {count}", stored.kind.name())];
        let mut fields = line.split(' ');
        let step = u32::from_str_radix(fields.next().unwrap(), 16).unwrap();
        factors[(blocks * chunks + block * units + unit) * BLOCK + lane] = step;
        let mut integer = || fields.next().unwrap().parse::<i32>().unwrap() as u32 & 0xffff;
        for chunk in 0..count {
            let place = block * chunks + 8 * unit + chunk;
            factors[place * BLOCK + lane] = integer() | integer() << 16;
            for word in 0..words {
                let bytes = std::array::from_fn(|i| match stored.kind {
                    Kind::Eight => integers[32 * chunk + 4 * word + i],
                    Kind::Four => {
                        // Two chunks share bytes in a file.
                        let pair = &integers[chunk / 2 * 32..];
                        let nibble = |k: usize| pair[k] >> (4 * (chunk % 2)) & 15;
                        nibble(4 * word + i) | nibble(16 + 4 * word + i) << 4
                    }
                });
                weights[(place * words + word) * BLOCK + lane] = u32::from_le_bytes(bytes);
            }
        }
    }
    [weights, factors]
}

/// Columns that share a scale of activations: as many as divide 256 and the leaf.
fn span(leaf: usize) -> usize {
    let divides = |span: &usize| leaf.is_multiple_of(*span);
    std::iter::successors(Some(UNIT), |span| Some(span / 2))
        .find(divides)
        .unwrap()
}

fn bits(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// A kernel with its buffers.
#[derive(Clone)]
struct Step {
    pipeline: ComputePipeline,
    buffers: Vec<(u32, Buffer)>,
    groups: usize,
}

/// Kernels that run in order when a buffer is read.
struct Session<'a> {
    gpu: &'a Gpu,
    form: Form,
    steps: Vec<Step>,
}

impl<'a> Session<'a> {
    const fn new(gpu: &'a Gpu, form: Form) -> Self {
        let steps = Vec::new();
        Self { gpu, form, steps }
    }

    fn filled(&self, values: &[f32]) -> Buffer {
        self.gpu.filled(&bits(values)).unwrap()
    }

    fn room(&self, words: usize) -> Buffer {
        self.gpu.room(4 * words as u64).unwrap()
    }

    /// Adds a kernel. `buffers` are the result and the inputs, with their bindings.
    fn add(
        &mut self,
        (entry, kind): (&str, Kind),
        params: &[usize],
        buffers: &[(u32, &Buffer)],
        groups: usize,
    ) {
        let head = head(kind, self.form);
        let text = [&head, FLOAT, SINGLE, LAYER];
        let text = &text[..];
        let pipeline = self.gpu.pipeline(Kernel { entry, text }).unwrap();
        let params: Vec<u32> = params.iter().map(|param| *param as u32).collect();
        let params = self.gpu.filled(&bytes_of_words(&params)).unwrap();
        let inputs = buffers
            .iter()
            .map(|(binding, buffer)| (*binding, (*buffer).clone()));
        let buffers = [(0, params)].into_iter().chain(inputs).collect();
        self.steps.push(Step {
            pipeline,
            buffers,
            groups,
        });
    }

    /// Runs the kernels, and reads `result`.
    fn read(&mut self, result: &Buffer) -> Vec<f32> {
        let _turn = self.gpu.turn();
        let done = self.room(1);
        let bound: Vec<Vec<(u32, &Buffer)>> = self
            .steps
            .iter()
            .map(|step| {
                let buffers = step
                    .buffers
                    .iter()
                    .map(|(binding, buffer)| (*binding, buffer));
                buffers.chain([(1, &done)]).collect()
            })
            .collect();
        let steps: Vec<KernelDispatch<'_>> = self
            .steps
            .iter()
            .zip(&bound)
            .map(|(step, buffers)| KernelDispatch {
                pipeline: &step.pipeline,
                buffers,
                groups: step.groups as u32,
            })
            .collect();
        let bytes = self.gpu.execute(&steps, &done, result).unwrap();
        self.steps.clear();
        let words = bytes.as_chunks().0.iter();
        words.map(|word| f32::from_le_bytes(*word)).collect()
    }

    /// x (T, C) -> norm(x) (T, C), C being the model's width.
    fn norm(&mut self, x: &Buffer, weight: &Buffer, rows: usize) -> Buffer {
        let out = self.room(rows * WIDTH);
        let params = [WIDTH, bits_of(WIDTH as f32), bits_of(EPS)];
        self.add(
            ("norm", Kind::Eight),
            &params,
            &[(2, &out), (3, x), (4, weight)],
            rows,
        );
        out
    }

    /// x (T, columns) -> quantised rows.
    fn quantise(&mut self, x: &Buffer, rows: usize, (cols, leaf): (usize, usize)) -> Buffer {
        let spans = cols.div_ceil(span(leaf));
        let out = self.room(rows * (cols / 2 + cols + cols / 32 + spans));
        let groups = (rows * spans).div_ceil(BLOCK);
        let params = [cols, span(leaf), rows];
        self.add(
            ("quantise", Kind::Eight),
            &params,
            &[(2, &out), (3, x)],
            groups,
        );
        out
    }

    /// Quantised rows -> (T, R), or `sum` with the product added.
    fn product(
        &mut self,
        linear: &Linear,
        x: &Buffer,
        rows: usize,
        sum: Option<&Buffer>,
    ) -> Buffer {
        let Stored {
            kind,
            rows: r,
            cols,
            leaf,
            ..
        } = linear.stored;
        let span = span(leaf);
        let spans = cols.div_ceil(span);
        let scratch = self.room(rows * spans * r);
        let groups = r.div_ceil(BLOCK) * spans * rows.div_ceil(TILE);
        let buffers = [
            (2, &scratch),
            (3, &linear.weights),
            (4, &linear.factors),
            (5, x),
        ];
        self.add(("dots", kind), &[r, cols, span, rows], &buffers, groups);
        let out = sum.cloned().unwrap_or_else(|| self.room(rows * r));
        let leaf_spans = if leaf == 0 { spans } else { leaf / span };
        let params = [r, cols, span, rows, leaf_spans, usize::from(sum.is_some())];
        let buffers = [(2, &out), (3, &scratch), (5, x)];
        self.add(
            ("combine", kind),
            &params,
            &buffers,
            (r * rows).div_ceil(BLOCK),
        );
        out
    }

    fn rotate(&mut self, x: &Buffer, angles: &Buffer, (rows, heads): (usize, usize), by: f32) {
        let pairs = rows * heads * HEAD / 2;
        let params = [pairs, heads, bits_of(by)];
        let buffers = [(2, x), (4, angles)];
        self.add(
            ("rotate", Kind::Eight),
            &params,
            &buffers,
            pairs.div_ceil(BLOCK),
        );
    }

    /// Cached and new rows as halves.
    fn cache(&mut self, case: &LayerCase, old: &[f32], new: &Buffer) -> Buffer {
        let row = KV_HEADS * HEAD / 2;
        let seen = case.position + case.rows;
        let out = self.room(seen * row);
        let old = (!old.is_empty()).then(|| self.filled(old));
        let parts = [
            (old.as_ref(), 0..case.position),
            (Some(new), case.position..seen),
        ];
        for (from, positions) in parts {
            let Some(from) = from else { continue };
            let (words, first) = (positions.len() * row, positions.start * row);
            let buffers = [(2, &out), (3, from)];
            let groups = words.div_ceil(BLOCK);
            self.add(("store", Kind::Eight), &[words, first], &buffers, groups);
        }
        out
    }
}

const fn bits_of(x: f32) -> usize {
    x.to_bits() as usize
}

/// A layer on the device.
struct Layer {
    norms: [Buffer; 2],
    linears: [Linear; 7],
}

impl Layer {
    fn new(gpu: &Gpu, record: &Record) -> Self {
        Self {
            norms: cases::norms().map(|weights| gpu.filled(&bits(&weights)).unwrap()),
            linears: cases::matrices().map(|stored| Linear::new(gpu, stored, record)),
        }
    }

    /// The residual behind the layer, and the new keys and values.
    fn step(&self, gpu: &Gpu, case: &LayerCase) -> [Vec<f32>; 3] {
        let mut on = Session::new(gpu, Form::Dot4);
        let rows = case.rows;
        let [query, key, value, output, gate, up, down] = &self.linears;
        let residual = on.filled(&case.residual);
        let flat: Vec<f32> = case
            .angles
            .iter()
            .flat_map(|(cos, sin)| [*cos, *sin])
            .collect();
        let angles = on.filled(&flat);

        let x = on.norm(&residual, &self.norms[0], rows);
        let x = on.quantise(&x, rows, (WIDTH, 0));
        let [q, k, v] = [query, key, value].map(|linear| on.product(linear, &x, rows, None));
        on.rotate(&q, &angles, (rows, HEADS), 1.0 / (HEAD as f32).sqrt());
        on.rotate(&k, &angles, (rows, KV_HEADS), 1.0);
        let [keys, values] =
            [(&case.keys, &k), (&case.values, &v)].map(|(old, new)| on.cache(case, old, new));
        let attended = on.room(rows * HEADS * HEAD);
        let params = [case.position, HEADS, KV_HEADS];
        let buffers = [(2, &attended), (3, &q), (4, &keys), (5, &values)];
        on.add(("attend", Kind::Eight), &params, &buffers, rows * HEADS);
        let x = on.quantise(&attended, rows, (HEADS * HEAD, HEAD));
        on.product(output, &x, rows, Some(&residual));

        let x = on.norm(&residual, &self.norms[1], rows);
        let x = on.quantise(&x, rows, (WIDTH, 0));
        let [gates, ups] = [gate, up].map(|linear| on.product(linear, &x, rows, None));
        let hidden = on.room(rows * FFN);
        let buffers = [(2, &hidden), (3, &gates), (4, &ups)];
        on.add(
            ("gated", Kind::Eight),
            &[rows * FFN],
            &buffers,
            (rows * FFN).div_ceil(BLOCK),
        );
        let x = on.quantise(&hidden, rows, (FFN, cases::FFN_LEAF));
        on.product(down, &x, rows, Some(&residual));
        [residual, k, v].map(|buffer| on.read(&buffer))
    }
}
