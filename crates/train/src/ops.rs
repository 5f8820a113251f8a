//! Operations of layers between products, row by row, and their gradients.
//!
//! Everything is plain f32 arithmetic, multiplications and additions apart, in an order that the
//! code says. The compiler vectorises it, and must not change its bits.

use libm::sqrtf;
use paceline_model::CLAMP_SLOPE;

/// Lanes of the partial sums over a row. Part of the definition of [`dot`].
const LANES: usize = 16;

/// e to the power of `x`: the polynomial of Cephes (Moshier 1992), without fused operations.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.33;
    const HIGHEST: f32 = 88.37;
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: leaves the integer in the low mantissa bits
    const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(LOWEST, HIGHEST);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.987_569_2e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let p = p * (r * r) + r + 1.0;
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x >= LOWEST { scaled } else { 0.0 }
}

/// The sum of products: sixteen partial sums by index modulo 16, then those by halves.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    lanes(a, b, |a, b| a * b)
}

/// The sum of the elements, in the order of [`dot`].
pub(crate) fn sum(a: &[f32]) -> f32 {
    lanes(a, a, |a, _| a)
}

fn lanes(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (a_blocks, b_blocks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a_blocks.remainder(), b_blocks.remainder());
    for (a, b) in a_blocks.zip(b_blocks) {
        for i in 0..LANES {
            sums[i] += f(a[i], b[i]);
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += f(*a, *b);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// An RMS norm: `y = x r (w + offset)`, `r = 1 / sqrt(mean(x^2) + eps)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm<'a> {
    pub(crate) weight: &'a [f32],
    pub(crate) offset: f32,
    pub(crate) eps: f32,
}

impl Norm<'_> {
    fn inverse(&self, x: &[f32]) -> f32 {
        1.0 / sqrtf(dot(x, x) / x.len() as f32 + self.eps)
    }

    /// x (n,) -> y (n,)
    pub(crate) fn forward(&self, x: &[f32], y: &mut [f32]) {
        let r = self.inverse(x);
        for ((y, x), w) in y.iter_mut().zip(x).zip(self.weight) {
            *y = x * r * (w + self.offset);
        }
    }

    /// Adds to `dx` what `dy` gives: `r (dy w) - x r^3 / n * sum(dy w x)`. With `dw`, adds to it
    /// `dy x r`.
    pub(crate) fn backward(&self, x: &[f32], dy: &[f32], dx: &mut [f32], dw: Option<&mut [f32]>) {
        let r = self.inverse(x);
        let scaled: Vec<f32> = dy
            .iter()
            .zip(self.weight)
            .map(|(d, w)| d * (w + self.offset))
            .collect();
        let factor = dot(&scaled, x) * r * r * r / x.len() as f32;
        for ((dx, g), x) in dx.iter_mut().zip(&scaled).zip(x) {
            *dx += r * g - x * factor;
        }
        for (dw, (dy, x)) in dw.into_iter().flatten().zip(dy.iter().zip(x)) {
            *dw += dy * (x * r);
        }
    }
}

/// Turns a head's halves by `angles` (cos, sin), or back.
pub(crate) fn rotate(head: &mut [f32], angles: &[(f32, f32)], back: bool) {
    let half = head.len() / 2;
    let (left, right) = head.split_at_mut(half);
    for ((a, b), (cos, sin)) in left.iter_mut().zip(right).zip(angles) {
        let sin = if back { -sin } else { *sin };
        let (x, y) = (*a, *b);
        *a = x * cos - y * sin;
        *b = x * sin + y * cos;
    }
}

/// Turns neighbours by `angles` (cos, sin), or back.
pub(crate) fn rotate_neighbours(head: &mut [f32], angles: &[(f32, f32)], back: bool) {
    for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(angles) {
        let sin = if back { -sin } else { *sin };
        let (x, y) = (pair[0], pair[1]);
        pair[0] = x * cos - y * sin;
        pair[1] = x * sin + y * cos;
    }
}

/// The function on the gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Gate {
    Silu,
    GeluTanh,
    /// That of gpt-oss: `g / (1 + exp(-1.702 g)) * (u + 1)`, g up to this limit and u within it.
    Clamped(f32),
}

/// sqrt(2 / pi) and the cubic factor of GELU's tanh form.
const GELU: (f32, f32) = (0.797_884_6, 0.044_715);

impl Gate {
    /// The value and its derivative.
    #[inline(always)]
    fn at(self, g: f32) -> (f32, f32) {
        match self {
            Self::Silu => {
                let s = 1.0 / (1.0 + exp(-g));
                (g * s, s * (1.0 + g * (1.0 - s)))
            }
            Self::GeluTanh => {
                let z = GELU.0 * (g + GELU.1 * g * g * g);
                let s = 1.0 / (1.0 + exp(-2.0 * z)); // (1 + tanh z) / 2
                let slope = GELU.0 * (1.0 + 3.0 * GELU.1 * g * g);
                (g * s, s + g * 2.0 * s * (1.0 - s) * slope)
            }
            Self::Clamped(limit) => {
                let inside = if g <= limit { 1.0 } else { 0.0 };
                let g = g.min(limit);
                let s = 1.0 / (1.0 + exp(-CLAMP_SLOPE * g));
                (g * s, s * (1.0 + CLAMP_SLOPE * g * (1.0 - s)) * inside)
            }
        }
    }

    /// The factor that `up` becomes, and its derivative.
    #[inline(always)]
    fn factor(self, u: f32) -> (f32, f32) {
        match self {
            Self::Clamped(limit) => {
                let inside = if u.abs() <= limit { 1.0 } else { 0.0 };
                (u.clamp(-limit, limit) + 1.0, inside)
            }
            _ => (u, 1.0),
        }
    }

    /// A loop for each kind, which the compiler vectorises: one over all took 7 % of a step's time.
    pub(crate) fn forward(self, gate: &[f32], up: &[f32], hidden: &mut [f32]) {
        match self {
            Self::Silu => Self::Silu.each_forward(gate, up, hidden),
            Self::GeluTanh => Self::GeluTanh.each_forward(gate, up, hidden),
            Self::Clamped(limit) => Self::Clamped(limit).each_forward(gate, up, hidden),
        }
    }

    #[inline(always)]
    fn each_forward(self, gate: &[f32], up: &[f32], hidden: &mut [f32]) {
        for ((h, g), u) in hidden.iter_mut().zip(gate).zip(up) {
            *h = self.at(*g).0 * self.factor(*u).0;
        }
    }

    /// Replaces gate and up by their gradients.
    pub(crate) fn backward(self, gate: &mut [f32], up: &mut [f32], d: &[f32]) {
        match self {
            Self::Silu => Self::Silu.each_backward(gate, up, d),
            Self::GeluTanh => Self::GeluTanh.each_backward(gate, up, d),
            Self::Clamped(limit) => Self::Clamped(limit).each_backward(gate, up, d),
        }
    }

    #[inline(always)]
    fn each_backward(self, gate: &mut [f32], up: &mut [f32], d: &[f32]) {
        for ((g, u), d) in gate.iter_mut().zip(up).zip(d) {
            let (value, slope) = self.at(*g);
            let (factor, inside) = self.factor(*u);
            *g = d * factor * slope;
            *u = d * value * inside;
        }
    }
}

/// Scores of one query -> their softmax, in place. Scores are multiplied by `scale` first.
pub(crate) fn softmax(scores: &mut [f32], scale: f32) {
    let largest = scores.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    for score in scores.iter_mut() {
        *score = exp((*score - largest) * scale);
    }
    let total = sum(scores);
    for score in scores {
        *score /= total;
    }
}

/// The same with a score of the head itself, which is not multiplied. Gives its share.
pub(crate) fn softmax_with(sink: f32, scores: &mut [f32], scale: f32) -> f32 {
    let largest = scores.iter().fold(sink, |a, b| a.max(*b * scale));
    for score in scores.iter_mut() {
        *score = exp(*score * scale - largest);
    }
    let own = exp(sink - largest);
    let total = sum(scores) + own;
    for score in scores {
        *score /= total;
    }
    own / total
}

/// 1 / (1 + e^-x)
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The negative log likelihood of `target`; `logits` become the gradient, times `weight`.
pub(crate) fn cross_entropy(logits: &mut [f32], target: usize, weight: f32) -> f64 {
    /// Terms of a partial sum: the rest of it is done in f64.
    const BLOCK: usize = 512;
    let largest = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let wanted = f64::from(logits[target]) - f64::from(largest);
    let mut total = 0.0f64;
    for block in logits.chunks_mut(BLOCK) {
        for logit in block.iter_mut() {
            *logit = exp(*logit - largest);
        }
        total += f64::from(sum(block));
    }
    let factor = (f64::from(weight) / total) as f32;
    for logit in logits.iter_mut() {
        *logit *= factor;
    }
    logits[target] -= weight;
    libm::log(total) - wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_and_dies_out() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let exact = libm::exp(f64::from(x));
            let off = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(off < 2.5e-7, "{x}: {off}");
        }
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn gates_have_the_slopes_of_their_values() {
        for gate in [Gate::Silu, Gate::GeluTanh, Gate::Clamped(9.0)] {
            for i in -40..40 {
                let (x, h) = (i as f32 / 10.0, 1e-2);
                let (up, down) = (gate.at(x + h).0, gate.at(x - h).0);
                let (_, slope) = gate.at(x);
                assert!(
                    (slope - (up - down) / (2.0 * h)).abs() < 2e-4,
                    "{gate:?} {x}"
                );
            }
        }
    }

    #[test]
    fn a_row_turns_back() {
        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut head, &[(0.6, 0.8), (0.8, 0.6)], false);
        assert_eq!(head[0], 1.0 * 0.6 - 3.0 * 0.8);
        rotate(&mut head, &[(0.6, 0.8), (0.8, 0.6)], true);
        assert!((head[3] - 4.0).abs() < 1e-6);
    }

    #[test]
    fn the_gradient_of_the_loss_sums_to_nothing() {
        let mut logits = [1.0, 2.0, 3.0];
        let loss = cross_entropy(&mut logits, 1, 1.0);
        let exact = (1.0f64.exp() + 2.0f64.exp() + 3.0f64.exp()).ln() - 2.0;
        assert!((loss - exact).abs() < 1e-6);
        assert!(logits.iter().sum::<f32>().abs() < 1e-6 && logits[1] < 0.0);
    }
}
