//! Soft caps: of the logits (Gemma 4), and of gates (Kimi K3).

use paceline_tensor::Kernels;
use paceline_tensor::pool::DisjointMut;

/// Values per task: a vocabulary of 262,144 is 64 tasks.
const RUN: usize = 4096;

/// `z = cap * tanh(z / cap)`, with `tanh y = (1 - e) / (1 + e)` and `e = exp(-2 |y|)`.
pub(super) fn softcap(kernels: &Kernels, cap: f32, logits: &mut [f32]) {
    let n = logits.len();
    let (whole, rest) = logits.split_at_mut(n / RUN * RUN);
    let parts = DisjointMut::new(whole, RUN);
    kernels.for_rows(n / RUN, |i| {
        // SAFETY: each run is visited once.
        bound(kernels, cap, unsafe { parts.part(i) });
    });
    bound(kernels, cap, rest);
}

/// As [`softcap`], by one thread.
pub(super) fn bound(kernels: &Kernels, cap: f32, logits: &mut [f32]) {
    const LANES: usize = 64;
    let (mut size, mut exp) = ([0.0; LANES], [0.0; LANES]);
    for part in logits.chunks_mut(LANES) {
        let n = part.len();
        let sizes = size.iter_mut().zip(&*part);
        sizes.for_each(|(size, z)| *size = (z / cap).abs());
        kernels.exp_scaled(&size[..n], 0.0, -2.0, &mut exp[..n]);
        for (z, e) in part.iter_mut().zip(&exp) {
            *z = (cap * ((1.0 - e) / (1.0 + e))).copysign(*z);
        }
    }
}

/// `out = cap * tanh(x / cap)`, to some units in the last place. [`bound`] is not for small x,
/// where `1 - e` cancels; Kimi K3 norms sums of such products.
pub(super) fn bound_gates(kernels: &Kernels, cap: f32, x: &[f32], out: &mut [f32]) {
    /// Here both ways are off by some 1e-7 of the result.
    const SMALL: f32 = 0.15;
    out.copy_from_slice(x);
    bound(kernels, cap, out);
    for (out, x) in out.iter_mut().zip(x) {
        let y = x / cap;
        if y.abs() < SMALL {
            let s = y * y;
            *out = x * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{bound_gates, softcap};
    use paceline_tensor::Kernels;

    #[test]
    fn it_is_the_hyperbolic_tangent() {
        let kernels = Kernels::new(2).unwrap();
        let logits: Vec<f32> = (-9000..9000).map(|i| i as f32 * 0.017).collect();
        let mut capped = logits.clone();
        softcap(&kernels, 30.0, &mut capped);
        for (z, got) in logits.iter().zip(&capped) {
            let expected = 30.0 * (f64::from(*z) / 30.0).tanh();
            let distance = (f64::from(*got) - expected).abs();
            assert!(distance < 1e-5, "{z}: {got}, expected {expected}");
        }
        assert_eq!(capped[9000], 0.0);
        let gates: Vec<f32> = (1..2000).map(|i| 1.01f32.powi(i - 1500)).collect();
        bound_gates(&kernels, 4.0, &gates, &mut capped[..gates.len()]);
        for (x, got) in gates.iter().zip(&capped) {
            let expected = 4.0 * (f64::from(*x) / 4.0).tanh();
            let distance = (f64::from(*got) / expected - 1.0).abs();
            assert!(distance < 1e-6, "{x}: {got}, expected {expected}");
        }
    }
}
