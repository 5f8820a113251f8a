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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_the_round_that_others_took_least_from() {
        let kernels = Kernels::new(1).unwrap();
        // Each look at the clock takes 60 ms; another program has the machine for 10 s at first.
        let looks = std::cell::Cell::new(0.0);
        let clock = || {
            looks.set(looks.get() + 1.0);
            looks.get() * 0.06 + if looks.get() > 1.0 { 10.0 } else { 0.0 }
        };
        let rate = measured_flops(&kernels, &clock);
        let flop = 2.0 * 256.0 * 1536.0 * 576.0;
        assert!((rate / (flop / 0.06) - 1.0).abs() < 1e-6, "{rate}");
    }

    #[test]
    fn a_step_faster_than_the_measured_rate_has_no_share() {
        assert_eq!(flop_share(1e9, 2e9, 1.0), Some(0.5));
        assert_eq!(flop_share(2e9, 2e9, 1.0), Some(1.0));
        assert_eq!(flop_share(3.28e9, 2e9, 1.0), None, "164 %");
        assert_eq!(flop_share(1e9, 0.0, 1.0), None);
        assert_eq!(flop_share(1e9, 2e9, 0.0), None);
    }
}
