//! Chooses a placement.

/// `total` dealt in proportion to `weights` by largest remainder; ties go to the first.
pub fn shares(total: u32, weights: &[f64]) -> Vec<u32> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|w| f64::from(total) * w / sum).collect();
    let mut counts: Vec<u32> = exact.iter().map(|x| x.floor() as u32).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    let rest = |i: usize| exact[i] - exact[i].floor();
    order.sort_by(|&a, &b| rest(b).total_cmp(&rest(a)).then(a.cmp(&b)));
    let missing = total.saturating_sub(counts.iter().sum()) as usize;
    for &i in order.iter().take(missing) {
        counts[i] += 1;
    }
    counts
}
