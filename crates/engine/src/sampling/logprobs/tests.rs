//! Log-probabilities against their definition in f64.

use paceline_tensor::InstructionSet;
use proptest::prelude::*;

use super::*;
use crate::MAX_LOGPROBS;

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

fn kernels() -> Kernels {
    Kernels::with_set(*InstructionSet::available().last().unwrap(), 1).unwrap()
}

fn run(kernels: &Kernels, logits: &[f32], token: u32, n: usize) -> TokenLogprobs {
    logprobs(kernels, logits, token, n, &mut Scratch::new(logits.len()))
}

/// The definition, with the whole vocabulary sorted.
fn reference(logits: &[f32], n: usize) -> (Vec<f64>, Vec<u32>) {
    let x: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|x| (x - largest).exp()).sum();
    let all = x.iter().map(|x| x - largest - sum.ln()).collect();
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Stable: the lower id stays first.
    order.sort_by(|a, b| x[*b as usize].partial_cmp(&x[*a as usize]).unwrap());
    order.truncate(n);
    (all, order)
}

fn logits() -> impl Strategy<Value = Vec<f32>> {
    let smooth = prop::collection::vec(-30f32..30.0, 1..400);
    // Many equal values, of both zeros.
    let ties = prop::collection::vec((-2i8..3).prop_map(|x| f32::from(x) * -0.5), 1..400);
    let wide = prop::collection::vec(-3e38f32..3e38, 1..40);
    prop_oneof![smooth, ties, wide]
}

proptest! {
    #[test]
    fn equals_the_reference(logits in logits(), token in 0..1000usize, n in 0..=MAX_LOGPROBS) {
        let token = token % logits.len();
        let (all, order) = reference(&logits, n);
        let near = |got: f32, expected: f64| {
            let expected = expected.max(f64::from(LEAST));
            (f64::from(got) - expected).abs() <= 2e-6 + 1e-6 * expected.abs()
        };
        for set in InstructionSet::available() {
            let kernels = Kernels::with_set(set, 1).unwrap();
            let got = run(&kernels, &logits, token as u32, n);
            prop_assert!(near(got.logprob, all[token]), "{} {}", got.logprob, all[token]);
            let ids: Vec<u32> = got.top.iter().map(|(id, _)| *id).collect();
            prop_assert_eq!(&ids, &order);
            for (id, logprob) in &got.top {
                prop_assert!(near(*logprob, all[*id as usize]), "{} of {}", logprob, id);
                if *id as usize == token {
                    prop_assert_eq!(logprob.to_bits(), got.logprob.to_bits());
                }
            }
        }
    }
}

#[test]
fn large_vocabularies_and_all_instruction_sets() {
    // Long enough that the threshold over chunks of 64 selects the candidates.
    let logits: Vec<f32> = (0..50_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 20) as f32)
        .collect();
    let (all, order) = reference(&logits, MAX_LOGPROBS);
    let results = InstructionSet::available().into_iter().map(|set| {
        let kernels = Kernels::with_set(set, 1).unwrap();
        let got = run(&kernels, &logits, 777, MAX_LOGPROBS);
        assert!((f64::from(got.logprob) - all[777]).abs() < 1e-5);
        let ids: Vec<u32> = got.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, order);
        let bits: Vec<u32> = got.top.iter().map(|(_, p)| p.to_bits()).collect();
        (got.logprob.to_bits(), bits)
    });
    let results: Vec<_> = results.collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn edges_are_finite() {
    type Case<'a> = (&'a [f32], u32, f32, &'a [(u32, f32)]);
    let half = 0.5f32.ln();
    let cases: [Case; 9] = [
        (&[3.0], 0, 0.0, &[(0, 0.0)]),
        (&[-0.0, 0.0], 1, half, &[(0, half), (1, half)]),
        (&[0.0, -50_000.0], 1, LEAST, &[(0, 0.0), (1, LEAST)]),
        (&[0.0, -INF], 1, LEAST, &[(0, 0.0), (1, LEAST)]),
        (&[0.0, NAN, 0.0], 1, LEAST, &[(0, half), (2, half)]),
        (
            &[INF, 1.0, INF],
            0,
            half,
            &[(0, half), (2, half), (1, LEAST)],
        ),
        (&[-INF, -INF], 1, half, &[(0, half), (1, half)]),
        (&[NAN, NAN], 1, LEAST, &[]),
        (&[-3e38, 3e38], 0, LEAST, &[(1, 0.0), (0, LEAST)]),
    ];
    for (logits, token, logprob, top) in cases {
        let got = run(&kernels(), logits, token, MAX_LOGPROBS);
        assert_eq!((got.logprob, &*got.top), (logprob, top), "{logits:?}");
        assert!(got.logprob.is_sign_positive() || got.logprob < 0.0, "no -0");
        let none = run(&kernels(), logits, token, 0);
        assert_eq!((none.logprob, &*none.top), (logprob, &[] as &[_]));
    }
}
