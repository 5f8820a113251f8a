//! The products of a rank's part of some layers, in a step's order. Ranks that each have a part of
//! every matrix are measured by them, with the exchanges between these ranks.

use std::time::Instant;

use paceline_base::KernelClass;
use paceline_model::{Activation, Config, LeafCut};
use paceline_tensor::{Activations, Kernels, MAX_PRODUCTS, Packed, Precision, Product};

use super::layers::{Expert, Half, Job, Layer, Weights};
use super::probe::{PROMPT_ROWS, timed};

/// The mean over the layers that `layers` stand for.
fn mean_of(layers: &[Layer], mut of: impl FnMut(&Layer) -> f64) -> f64 {
    let (mut sum, mut all) = (0.0, 0.0);
    for layer in layers {
        sum += layer.weight * of(layer);
        all += layer.weight;
    }
    sum / f64::max(all, 1.0)
}

/// Seconds of a layer's products, by one row or several together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Took {
    /// Without experts, with what came between.
    pub(super) common: f64,
    /// Of as many experts as a rank has of a row's on average.
    pub(super) experts: f64,
}

impl Took {
    pub(super) fn all(self) -> f64 {
        self.common + self.experts
    }
}

/// What products of a width read.
struct Input {
    /// Columns, and those of a leaf.
    of: (usize, usize),
    x: Activations,
}

/// Buffers of a rank's products.
pub(super) struct Step<'k> {
    kernels: &'k Kernels,
    /// Numbers of a row of the residual stream.
    width: usize,
    activation: Activation,
    /// The residual's first.
    inputs: Vec<Input>,
    /// What products give.
    room: Vec<f32>,
    /// Room for a sum over ranks.
    sum: Vec<f32>,
    logits: Vec<f32>,
}

impl<'k> Step<'k> {
    /// For the layers of `weights`.
    pub(super) fn new(
        config: &Config,
        class: KernelClass,
        kernels: &'k Kernels,
        weights: &Weights,
    ) -> Self {
        let halves = || {
            let layers = weights.layers.iter();
            layers.flat_map(|layer| [&layer.attention, &layer.feed_forward])
        };
        let roots = halves().map(|half| half.cut.all_roots()).max();
        let rows = PROMPT_ROWS;
        Self {
            kernels,
            width: config.width,
            activation: config.activation,
            inputs: inputs(config, class, &weights.layers),
            room: vec![0.5; rows * outputs(&weights.layers)],
            sum: vec![0.5; roots.unwrap_or(0) * rows * config.width],
            logits: vec![0.5; config.vocab],
        }
    }

    pub(super) fn head(&mut self, weights: &Weights) {
        let out = &mut self.logits[..weights.head.rows()];
        let product = alone(&weights.head, out);
        self.kernels.products(&self.inputs[0].x, [product]);
    }

    /// So many of the logits that [`head`](Self::head) left, at most as many as there are rows.
    pub(super) fn logits(&mut self, n: usize) -> &mut [f32] {
        &mut self.logits[..n]
    }

    /// Prepares for `rows` rows.
    fn resize(&mut self, rows: usize) {
        for Input { x, .. } in &mut self.inputs {
            x.resize(rows);
            self.kernels.fill_rows(x, |_, row| row.fill(0.5));
        }
    }

    /// Runs the products of `layers` for `rows` rows, and what experts do with theirs. After each
    /// half of a layer comes `between`. It gets the room of that half's sum, in which this rank's
    /// roots are. Every expert has all rows. Returns the seconds of a mean layer.
    pub(super) fn products(
        &mut self,
        layers: &[Layer],
        rows: usize,
        mut between: impl FnMut(&LeafCut, &mut [f32]),
    ) -> Took {
        self.resize(rows);
        let mut experts = 0.0;
        let mut all = 0.0;
        let common = mean_of(layers, |layer| {
            let took = self.layer(layer, rows, &mut between);
            experts += layer.weight * took.experts;
            all += layer.weight;
            took.common
        });
        Took {
            common,
            experts: experts / f64::max(all, 1.0),
        }
    }

    fn layer(
        &mut self,
        layer: &Layer,
        rows: usize,
        between: &mut impl FnMut(&LeafCut, &mut [f32]),
    ) -> Took {
        let began = Instant::now();
        self.half(&layer.attention, rows, between);
        let halfway = began.elapsed().as_secs_f64();
        let experts = timed(|| {
            for expert in &layer.experts {
                self.expert(expert, rows);
            }
        });
        let rest = timed(|| self.half(&layer.feed_forward, rows, between));
        Took {
            common: halfway + rest,
            experts: experts * layer.even,
        }
    }

    fn half(&mut self, half: &Half, rows: usize, between: &mut impl FnMut(&LeafCut, &mut [f32])) {
        for job in &half.jobs {
            let x = &self.inputs[place(&self.inputs, job.input)].x;
            multiply(self.kernels, x, &job.matrices, &mut self.room);
        }
        let n = rows * self.width;
        let sum = &mut self.sum[..half.cut.all_roots() * n];
        let first = half.cut.roots_before() * n;
        let own = &mut sum[first..first + half.roots * n];
        if half.sum.matrices.is_empty() {
            own.fill(0.5); // sums of sums would grow
        } else {
            let x = &self.inputs[place(&self.inputs, half.sum.input)].x;
            multiply(self.kernels, x, &half.sum.matrices, own);
        }
        between(&half.cut, sum);
    }

    /// An expert on `rows` rows, as the model computes it.
    fn expert(&mut self, [gate, up, down]: &Expert, rows: usize) {
        let (kernels, activation) = (self.kernels, self.activation);
        let n = rows * gate.rows();
        let (wide, out) = self.room.split_at_mut(n + rows * up.rows());
        let (gates, ups) = wide.split_at_mut(n);
        let x = place(&self.inputs, (gate.cols(), 0));
        let both = [alone(gate, &mut *gates), alone(up, &mut *ups)];
        kernels.products(&self.inputs[x].x, both);
        let at = place(&self.inputs, (down.cols(), 0));
        let ffn = down.cols();
        kernels.fill_rows(&mut self.inputs[at].x, |i, row| {
            let own = i * ffn..(i + 1) * ffn;
            match activation {
                Activation::Silu => kernels.silu_mul(&gates[own.clone()], &ups[own], row),
                Activation::GeluTanh => kernels.gelu_mul(&gates[own.clone()], &ups[own], row),
            }
        });
        let out = alone(down, &mut out[..rows * down.rows()]);
        kernels.products(&self.inputs[at].x, [out]);
    }
}

/// One for each width that products of `layers` read, and for the residual.
fn inputs(config: &Config, class: KernelClass, layers: &[Layer]) -> Vec<Input> {
    let precision = (class != KernelClass::CpuF32).then_some(Precision::of(class));
    let jobs = layers.iter().flat_map(Layer::jobs).map(|job| job.input);
    let experts = layers.iter().flat_map(|layer| &layer.experts);
    let experts = experts.flat_map(|[gate, _, down]| [(gate.cols(), 0), (down.cols(), 0)]);
    let mut inputs: Vec<Input> = Vec::new();
    for of in std::iter::once((config.width, 0))
        .chain(jobs)
        .chain(experts)
    {
        if inputs.iter().all(|input| input.of != of) {
            // Widths that are no whole runs of 32 have float weights, which read no integers.
            let precision = precision.filter(|_| of.0.is_multiple_of(32));
            let x = Activations::new(PROMPT_ROWS, of.0, of.1, precision);
            inputs.push(Input { of, x });
        }
    }
    inputs
}

/// The place of the input of so many columns and columns of a leaf.
fn place(inputs: &[Input], of: (usize, usize)) -> usize {
    let found = inputs.iter().position(|input| input.of == of);
    found.expect("an input for each job was made")
}

/// The most numbers that a row of an input gives in any job or expert.
fn outputs(layers: &[Layer]) -> usize {
    let jobs = layers.iter().flat_map(Layer::jobs).map(Job::outputs);
    let experts = layers.iter().flat_map(|layer| &layer.experts);
    let experts = experts.map(|expert| expert.iter().map(Packed::rows).sum());
    jobs.chain(experts).max().unwrap_or(0)
}

/// A product with all columns of an input.
fn alone<'a>(weights: &'a Packed, out: &'a mut [f32]) -> Product<'a> {
    Product {
        weights,
        first_col: 0,
        out,
    }
}

/// x by all of `matrices`, one behind the other in `room`.
fn multiply(
    kernels: &Kernels,
    x: &Activations,
    matrices: &[(usize, Packed)],
    mut room: &mut [f32],
) {
    for some in matrices.chunks(MAX_PRODUCTS) {
        let mut products = Vec::with_capacity(some.len());
        for (first_col, weights) in some {
            let (out, rest) = room.split_at_mut(x.rows() * weights.rows());
            room = rest;
            products.push(Product {
                weights,
                first_col: *first_col,
                out,
            });
        }
        kernels.products(x, products);
    }
}
