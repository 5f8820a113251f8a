//! The rate of this machine's products.

use paceline_tensor::Kernels;
use paceline_tensor::chain::{ProductOutput, Sizes, Strided};

/// Rounds in which the rate of products is measured. The best counts: other programs take time from
/// some of them.
const ROUNDS: u32 = 4;

/// Seconds of a round: several products on the slowest machines at hand.
const ROUND_S: f64 = 0.05;

/// Operations a second of the products of training, by `clock`: some tenths of a second.
pub fn measured_flops(kernels: &Kernels, clock: &dyn Fn() -> f64) -> f64 {
    let sizes = Sizes {
        m: 256,
        n: 1536,
        k: 576,
    };
    let (a, b) = (vec![1.0; sizes.m * sizes.k], vec![1.0; sizes.k * sizes.n]);
    let mut c = vec![0.0; sizes.m * sizes.n];
    let flop = 2.0 * (sizes.m * sizes.n * sizes.k) as f64;
    let rounds = (0..ROUNDS).map(|_| {
        let (start, mut times) = (clock(), 0);
        loop {
            let at = ProductOutput::rows(&mut c, sizes.n);
            let (a, b) = (Strided::rows(&a, sizes.k), Strided::rows(&b, sizes.k));
            kernels.chains(sizes, a, b.t(), at);
            times += 1;
            let took = clock() - start;
            if took >= ROUND_S {
                break flop * f64::from(times) / took;
            }
        }
    });
    rounds.fold(0.0, f64::max)
}

/// Share of `flops`, operations a second that were measured before, that a step of `flop`
/// operations reached. `None` where the rate is not known. A step that is faster was computed with
/// more of the machine than the measurement: then it is not known either.
pub(crate) fn flop_share(flop: f64, flops: f64, step_s: f64) -> Option<f64> {
    let share = flop / (flops * step_s);
    (flops > 0.0 && share <= 1.0).then_some(share)
}
