//! Expected number of experts that a step touches, and imbalance between ranks.

/// Distinct experts that `rows` tokens touch of `experts`, when each picks `active` different ones
/// at random: E (1 - (1 - A/E)^rows). Real routers are more uneven, which touches fewer.
pub fn touched(experts: f64, active: f64, rows: f64) -> f64 {
    experts * (1.0 - (1.0 - active / experts).powf(rows))
}

/// Expected largest number of the `active` experts of one token that fall on one of `ranks` equal
/// ranks. Routing is without replacement, so the numbers are multivariate hypergeometric.
///
/// E[max] = sum over k of P(max > k). P(max <= k) counts choices with at most k on each rank: the
/// coefficient of x^A in (sum_{j<=k} C(E/P, j) x^j)^P, over C(E, A). Where P does not divide E the
/// larger ranks are taken for all.
/// The last rank also has the `shared` experts of every token.
pub fn busiest((experts, active, shared): (u32, u32, u32), ranks: u32) -> f64 {
    if ranks <= 1 {
        return f64::from(active) + f64::from(shared);
    }
    if active > EXACT_MAX {
        return roughly_busiest((experts, active, shared), ranks);
    }
    let per_rank = experts.div_ceil(ranks);
    let ways = |k: u32| -> f64 {
        let last = k.checked_sub(shared);
        last.map_or(0.0, |last| at_most(per_rank, active, (ranks, k), last))
    };
    let most = active.saturating_add(shared);
    let all = ways(most);
    // Fewer than `shared` the last rank never has.
    let more = (shared..most).map(|k| 1.0 - ways(k) / all);
    f64::from(shared) + more.sum::<f64>()
}

/// Most active experts that are counted exactly, which takes their cube for each rank: ten times
/// those of published models.
const EXACT_MAX: u32 = 128;

/// An estimate of the largest of P normal numbers: their mean and `sqrt(2 ln P)` deviations. The
/// average of the last rank is returned where that is more.
fn roughly_busiest((experts, active, shared): (u32, u32, u32), ranks: u32) -> f64 {
    let (e, a, p) = (f64::from(experts), f64::from(active), f64::from(ranks));
    let left = (e - a) / (e - 1.0).max(1.0);
    let variance = a / p * (1.0 - 1.0 / p) * left;
    let most = a / p + (2.0 * p.ln() * variance.max(0.0)).sqrt();
    most.max(a / p + f64::from(shared))
        .min(a + f64::from(shared))
}

/// The coefficient of x^active in (sum_{j <= k} C(n, j) x^j)^(ranks - 1) times the same sum to
/// `last`, scaled to stay finite.
fn at_most(n: u32, active: u32, (ranks, k): (u32, u32), last: u32) -> f64 {
    let a = active as usize;
    // C(n, j) / n^j keeps the numbers near 1 / j!; the scale n^active is the same for every k.
    let mut choose = vec![1.0];
    for j in 1..=active.min(k).min(n) {
        let before = choose[j as usize - 1];
        choose.push(before * f64::from(n - j + 1) / (f64::from(j) * f64::from(n)));
    }
    let mut poly = vec![0.0; a + 1];
    poly[0] = 1.0;
    for rank in 1..=ranks {
        if rank == ranks {
            choose.truncate(last as usize + 1);
        }
        let mut next = vec![0.0; a + 1];
        for (i, &p) in poly.iter().enumerate() {
            for (j, &c) in choose.iter().enumerate().take(a + 1 - i) {
                next[i + j] += p * c;
            }
        }
        poly = next;
    }
    poly[a]
}

/// Load of the busiest of `ranks` as a multiple of the average load, for `rows` tokens at a time.
/// The first argument counts experts, active ones and shared ones; the last rank has the shared
/// ones.
///
/// For one row it is exact. The excess of a sum of `rows` independent draws over its mean grows
/// with the square root. Relative to the mean, the excess falls with it.
pub fn imbalance((experts, active, shared): (u32, u32, u32), ranks: u32, rows: f64) -> f64 {
    let each = f64::from(ranks.max(1));
    let (active_each, shared_each) = (f64::from(active) / each, f64::from(shared));
    let mean = active_each + shared_each / each;
    let one = busiest((experts, active, shared), ranks) / mean;
    // The extra load of the last rank does not fade with rows.
    let last = if ranks > 1 {
        (active_each + shared_each) / mean
    } else {
        1.0
    };
    (1.0 + (one - 1.0) / rows.max(1.0).sqrt()).max(last)
}

/// Rows that experts compute for `rows` tokens when each expert's rows are padded to whole tiles.
/// With A of E experts active, it is E times the expectation of tile * ceil(n / tile). The number n
/// is binomial(rows, A/E). llama.cpp's Metal and CUDA kernels for mixtures (`mul_mm_id`) work on
/// tiles of 32 rows. Few rows are computed faster without tiles; the caller chooses.
pub fn padded_rows(experts: u32, active: u32, rows: u32) -> f64 {
    const TILE: f64 = 32.0;
    let (e, p) = (f64::from(experts), f64::from(active) / f64::from(experts));
    let all = f64::from(rows) * f64::from(active);
    if p >= 1.0 {
        return all;
    }
    let mut chance = (1.0 - p).powf(f64::from(rows));
    if chance <= 0.0 {
        // With many rows per expert, padding is half a tile on average.
        return all + e * TILE / 2.0;
    }
    let mut expected = 0.0;
    for n in 1..=rows {
        chance *= f64::from(rows - n + 1) / f64::from(n) * p / (1.0 - p);
        expected += chance * TILE * (f64::from(n) / TILE).ceil();
    }
    e * expected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_rank_follows_the_hypergeometric_law() {
        // 16 experts, 4 picked. Two ranks of 8: C(16,4) = 1820 choices; 784 are 2+2, 896 are 3+1,
        // 140 are 4+0. Four ranks of 4: 256 one each, 192 with a three, 4 with a four.
        let two = (2.0 * 784.0 + 3.0 * 896.0 + 4.0 * 140.0) / 1820.0;
        let four = (256.0 + 2.0 * 1368.0 + 3.0 * 192.0 + 4.0 * 4.0) / 1820.0;
        for (ranks, expected) in [(1, 4.0), (2, two), (4, four), (16, 1.0)] {
            let got = busiest((16, 4, 0), ranks);
            assert!(
                (got - expected).abs() < 1e-9,
                "{ranks}: {got}, not {expected}"
            );
        }
    }

    /// 16 experts, 8 on each of two ranks, 4 active; the second rank has a shared one too. Among
    /// the 1820 choices 70 have none on the first rank, 448 one, 784 two, 448 three and 70 four.
    #[test]
    fn a_shared_expert_is_one_more_of_the_last_rank() {
        let expected = (70.0 * 5.0 + 448.0 * 4.0 + 784.0 * 3.0 + 448.0 * 3.0 + 70.0 * 4.0) / 1820.0;
        let got = busiest((16, 4, 1), 2);
        assert!((got - expected).abs() < 1e-9, "{got}, not {expected}");
        assert_eq!(busiest((16, 4, 1), 1), 5.0);
        assert!(
            (busiest((16, 4, 9), 2) - 11.0).abs() < 1e-9,
            "2 of 4 and the shared ones"
        );
        // With many rows the last rank still has 2 + 1 experts of each, where the mean is 2.5.
        assert!((imbalance((16, 4, 1), 2, 1e9) - 1.2).abs() < 1e-9);
    }

    /// Qwen3-30B-A3B over two ranks: sum of max(i, 8 - i) C(64, i) C(64, 8 - i) over C(128, 8).
    #[test]
    fn the_busier_of_two_ranks_has_five_of_eight() {
        let got = busiest((128, 8, 0), 2);
        assert!((got - 5.058_881).abs() < 1e-6, "{got}");
    }

    #[test]
    fn absurdly_many_experts_are_answered_at_once_and_within_bounds() {
        let just = busiest((1 << 14, EXACT_MAX, 0), 8);
        let above = busiest((1 << 14, EXACT_MAX + 1, 0), 8);
        assert!((above / just - 1.0).abs() < 0.12, "{just} and {above}");
        let all = busiest((1 << 14, 1 << 14, 1 << 14), 64);
        assert!(all <= f64::from(1 << 15) && all >= 16_640.0, "{all}");
        assert_eq!(busiest((1, 1, 0), 1000), 1.0);
    }

    #[test]
    fn imbalance_fades_with_rows() {
        let deepseek = (256, 8, 0);
        let one = imbalance(deepseek, 4, 1.0);
        assert!(one > 1.5 && one < 2.1, "{one}");
        assert!(imbalance(deepseek, 4, 64.0) < 1.15);
        assert_eq!(imbalance(deepseek, 1, 1.0), 1.0);
    }

    #[test]
    fn touched_experts_saturate() {
        assert!((touched(256.0, 8.0, 1.0) - 8.0).abs() < 1e-9);
        assert!(touched(256.0, 8.0, 32.0) < 256.0);
        assert!((touched(256.0, 8.0, 1e6) - 256.0).abs() < 1e-6);
    }

    #[test]
    fn padding_doubles_work_at_half_a_tile() {
        // 512 tokens over 256 experts with 8 each: 16 rows per expert on average.
        let padded = padded_rows(256, 8, 512) / (512.0 * 8.0);
        assert!((1.9..2.3).contains(&padded), "{padded}");
        assert!((padded_rows(256, 8, 1) - 8.0 * 32.0).abs() < 1e-9);
        assert_eq!(padded_rows(4, 4, 512), 2048.0);
        let many = padded_rows(16, 4, 100_000) / 400_000.0;
        assert!((1.0..1.01).contains(&many), "{many}");
    }
}
