//! Comparing logits.

/// Index of the largest value, the first of equals.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// The largest value less the second largest.
pub(crate) fn gap(logits: &[f32]) -> f32 {
    let best = argmax(logits) as usize;
    let others = logits.iter().enumerate().filter(|(i, _)| *i != best);
    let second = others.fold(f32::NEG_INFINITY, |m, (_, &x)| m.max(x));
    logits[best] - second
}

/// Natural logarithm of the probability of `token`.
pub(crate) fn log_probability(logits: &[f32], token: u32) -> f64 {
    let largest = f64::from(logits[argmax(logits) as usize]);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    f64::from(logits[token as usize]) - largest - sum.ln()
}

/// The largest of some distances; infinite when one is not a number, so that no bound holds.
pub(crate) fn largest(distances: impl IntoIterator<Item = f64>) -> f64 {
    let not_nan = |d: f64| if d.is_nan() { f64::INFINITY } else { d };
    distances.into_iter().map(not_nan).fold(0.0, f64::max)
}

/// Largest distance of two equally long lists.
pub(crate) fn max_abs_diff(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    largest(a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())))
}

/// Root of the mean square of `a - b`, in units of that of `b`.
pub(crate) fn relative_rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

/// The largest distance of rows of logits, at most `tolerance`. Where the first and the second of
/// an expected row are further apart than twice that, the first agrees.
pub(crate) fn worst_within(
    what: &str,
    got: &[Vec<f32>],
    expected: &[Vec<f32>],
    tolerance: f64,
) -> f64 {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (position, (got, expected)) in got.iter().zip(expected).enumerate() {
        let distance = max_abs_diff(got, expected);
        assert!(
            distance <= tolerance,
            "{what}, position {position}: logits {distance:.3e} apart, at most {tolerance:.3e}"
        );
        if f64::from(gap(expected)) > 2.0 * tolerance {
            assert_eq!(argmax(got), argmax(expected), "{what}, position {position}");
        }
    }
    largest(got.iter().zip(expected).map(|(a, b)| max_abs_diff(a, b)))
}
