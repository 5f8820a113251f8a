//! The matrix products of a rank's part of some layers, in a step's order. They measure
//! tensor-parallel ranks, together with the exchanges between them.

use std::time::Instant;

use paceline_base::KernelClass;
use paceline_model::{Activation, Config, LeafCut};
use paceline_tensor::{Activations, Kernels, MAX_PRODUCTS, PackedMatrix, Precision, Product};

use super::layers::{Expert, Half, ProbeWeights, ProductGroup, RankLayer};
use super::probe::{PROMPT_ROWS, timed};

/// The mean of `of` over `layers`, weighted by the layers they represent.
fn mean_of(layers: &[RankLayer], mut of: impl FnMut(&RankLayer) -> f64) -> f64 {
    let (mut sum, mut all) = (0.0, 0.0);
    for layer in layers {
        sum += layer.weight * of(layer);
        all += layer.weight;
    }
    sum / f64::max(all, 1.0)
}

/// Seconds of a layer's products, for one row or a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProductTime {
    /// Without experts, including the exchanges.
    pub(super) common: f64,
    /// For a rank's average number of a row's experts.
    pub(super) experts: f64,
}

impl ProductTime {
    pub(super) fn all(self) -> f64 {
        self.common + self.experts
    }
}

struct ProductInput {
    /// Columns, and columns of a leaf.
    of: (usize, usize),
    x: Activations,
}

/// Buffers of a rank's products.
pub(super) struct ProductBuffers<'k> {
    kernels: &'k Kernels,
    /// Numbers of a row of the residual stream.
    width: usize,
    activation: Activation,
    /// The residual stream's input is first.
    inputs: Vec<ProductInput>,
    /// The outputs of products.
    room: Vec<f32>,
    /// Buffer of an all-reduce.
    sum: Vec<f32>,
    logits: Vec<f32>,
}

impl<'k> ProductBuffers<'k> {
    /// Allocates the buffers for the layers of `weights`.
    pub(super) fn new(
        config: &Config,
        class: KernelClass,
        kernels: &'k Kernels,
        weights: &ProbeWeights,
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

    pub(super) fn head(&mut self, weights: &ProbeWeights) {
        let out = &mut self.logits[..weights.head.rows()];
        let product = alone(&weights.head, out);
        self.kernels.products(&self.inputs[0].x, [product]);
    }

    /// The first `n` logits of the last [`head`](Self::head); `n` is at most its number of rows.
    pub(super) fn logits(&mut self, n: usize) -> &mut [f32] {
        &mut self.logits[..n]
    }

    /// Prepares for `rows` rows.
    fn resize(&mut self, rows: usize) {
        for ProductInput { x, .. } in &mut self.inputs {
            x.resize(rows);
            self.kernels.fill_rows(x, |_, row| row.fill(0.5));
        }
    }

    /// Runs the products of `layers` for `rows` rows, experts included; every expert gets all rows.
    /// After each half of a layer it calls `between` with the buffer of that half's sum, which has
    /// this rank's roots. Returns the seconds of a mean layer.
    pub(super) fn products(
        &mut self,
        layers: &[RankLayer],
        rows: usize,
        mut between: impl FnMut(&LeafCut, &mut [f32]),
    ) -> ProductTime {
        self.resize(rows);
        let mut experts = 0.0;
        let mut all = 0.0;
        let common = mean_of(layers, |layer| {
            let took = self.layer(layer, rows, &mut between);
            experts += layer.weight * took.experts;
            all += layer.weight;
            took.common
        });
        ProductTime {
            common,
            experts: experts / f64::max(all, 1.0),
        }
    }

    fn layer(
        &mut self,
        layer: &RankLayer,
        rows: usize,
        between: &mut impl FnMut(&LeafCut, &mut [f32]),
    ) -> ProductTime {
        let began = Instant::now();
        self.half(&layer.attention, rows, between);
        let halfway = began.elapsed().as_secs_f64();
        let experts = timed(|| {
            for expert in &layer.experts {
                self.expert(expert, rows);
            }
        });
        let rest = timed(|| self.half(&layer.feed_forward, rows, between));
        ProductTime {
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
        // A layer of one part, as Nemotron-H's are, has no sum in the other half.
        if half.cut.all_roots() > 0 {
            between(&half.cut, sum);
        }
    }

    /// An expert on `rows` rows, as the model computes it.
    fn expert(&mut self, Expert { wide, down }: &Expert, rows: usize) {
        let (kernels, activation) = (self.kernels, self.activation);
        let n = rows * wide[0].rows();
        let (outs, out) = self.room.split_at_mut(n * wide.len());
        let (gates, ups) = outs.split_at_mut(n);
        let x = place(&self.inputs, (wide[0].cols(), 0));
        let both = [&mut *gates, &mut *ups].into_iter().zip(wide);
        kernels.products(&self.inputs[x].x, both.map(|(out, own)| alone(own, out)));
        let at = place(&self.inputs, (down.cols(), 0));
        let ffn = down.cols();
        kernels.fill_rows(&mut self.inputs[at].x, |i, row| {
            let own = i * ffn..(i + 1) * ffn;
            match activation {
                // The bounds of the latter cost about as much.
                Activation::Silu | Activation::Situ { .. } => {
                    kernels.silu_mul(&gates[own.clone()], &ups[own], row)
                }
                Activation::GeluTanh => kernels.gelu_mul(&gates[own.clone()], &ups[own], row),
                Activation::ReluSquared => {
                    let above = |x: &f32| x.max(0.0);
                    let both = row.iter_mut().zip(gates[own].iter().map(above));
                    both.for_each(|(out, x)| *out = x * x);
                }
            }
        });
        let out = alone(down, &mut out[..rows * down.rows()]);
        kernels.products(&self.inputs[at].x, [out]);
    }
}

/// One for each input width of the products of `layers`, and for the residual stream.
fn inputs(config: &Config, class: KernelClass, layers: &[RankLayer]) -> Vec<ProductInput> {
    let precision = (class != KernelClass::CpuF32).then_some(Precision::of(class));
    let jobs = layers.iter().flat_map(RankLayer::jobs).map(|job| job.input);
    let experts = layers.iter().flat_map(|layer| &layer.experts);
    let experts = experts.flat_map(|own| [(own.wide[0].cols(), 0), (own.down.cols(), 0)]);
    let mut inputs: Vec<ProductInput> = Vec::new();
    for of in std::iter::once((config.width, 0))
        .chain(jobs)
        .chain(experts)
    {
        if inputs.iter().all(|input| input.of != of) {
            // Widths that are not multiples of 32 have float weights, which need no integer input.
            let precision = precision.filter(|_| of.0.is_multiple_of(32));
            let x = Activations::new(PROMPT_ROWS, of.0, of.1, precision);
            inputs.push(ProductInput { of, x });
        }
    }
    inputs
}

/// The index of the input with these columns and columns of a leaf.
fn place(inputs: &[ProductInput], of: (usize, usize)) -> usize {
    let found = inputs.iter().position(|input| input.of == of);
    found.expect("an input for each job was made")
}

/// The largest number of outputs per row of any group or expert.
fn outputs(layers: &[RankLayer]) -> usize {
    let jobs = layers
        .iter()
        .flat_map(RankLayer::jobs)
        .map(ProductGroup::outputs);
    let experts = layers.iter().flat_map(|layer| &layer.experts);
    let rows = |own: &Expert| {
        own.wide
            .iter()
            .chain([&own.down])
            .map(PackedMatrix::rows)
            .sum()
    };
    let experts = experts.map(rows);
    jobs.chain(experts).max().unwrap_or(0)
}

/// A product with all columns of an input.
fn alone<'a>(weights: &'a PackedMatrix, out: &'a mut [f32]) -> Product<'a> {
    Product {
        weights,
        first_col: 0,
        out,
    }
}

/// Multiplies x by all of `matrices`, into consecutive parts of `context_size`.
fn multiply(
    kernels: &Kernels,
    x: &Activations,
    matrices: &[(usize, PackedMatrix)],
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
