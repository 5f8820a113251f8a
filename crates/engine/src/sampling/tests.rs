//! The sampler against a plain reference in f64, and its guarantees about random numbers.

use paceline_tensor::InstructionSet;

use super::*;

/// Inputs of the sampler besides its own state.
struct SamplerFixture {
    kernels: Kernels,
    scratch: Scratch,
}

impl SamplerFixture {
    fn new(vocab: usize) -> Self {
        Self::with_set(*InstructionSet::available().last().unwrap(), vocab)
    }

    fn with_set(set: InstructionSet, vocab: usize) -> Self {
        Self {
            kernels: Kernels::with_set(set, 1).unwrap(),
            scratch: Scratch::new(vocab),
        }
    }

    fn sample(&mut self, sampler: &mut Sampler, logits: &[f32], history: History<'_>) -> u32 {
        let mut logits = logits.to_vec();
        sampler.sample(&self.kernels, &mut logits, history, &mut self.scratch)
    }

    /// The weights from which a token is drawn.
    fn weights(&mut self, params: &SamplingParams, logits: &[f32], history: History<'_>) -> &[f32] {
        self.sample(&mut Sampler::new(params.clone()).unwrap(), logits, history);
        &self.scratch.weights
    }
}

const NO_HISTORY: History<'static> = (&[], 0);

/// Sampling at temperature 1 without filters.
const PLAIN: SamplingParams = SamplingParams {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    penalty_window: 64,
    seed: 0,
    logit_bias: Vec::new(),
    order: TemperatureOrder::First,
};

/// [`PLAIN`] with a change.
fn plain(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = PLAIN;
    change(&mut params);
    params
}

/// The definition: the probability of every token, 0 for excluded ones.
fn reference(p: &SamplingParams, logits: &[f32], (tokens, prompt_len): History<'_>) -> Vec<f64> {
    let mut x: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
    for (token, bias) in &p.logit_bias {
        x[*token as usize] += f64::from(*bias);
    }
    let recent = &tokens[tokens.len().saturating_sub(p.penalty_window)..];
    for (token, x) in x.iter_mut().enumerate() {
        let penalty = f64::from(p.repetition_penalty);
        if recent.contains(&(token as u32)) {
            *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
        }
        let generated = tokens[prompt_len..].iter();
        let n = generated.filter(|t| **t as usize == token).count();
        if n > 0 {
            *x -= f64::from(p.presence_penalty) + f64::from(p.frequency_penalty) * n as f64;
        }
    }
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight = |temperature: f32| move |x: &f64| ((x - largest) / f64::from(temperature)).exp();
    let drawn: Vec<f64> = x.iter().map(weight(p.temperature)).collect();
    let weights: Vec<f64> = match p.order {
        TemperatureOrder::First => drawn.clone(),
        TemperatureOrder::Last => x.iter().map(weight(1.0)).collect(),
    };
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
    if p.top_k > 0 {
        order.truncate(p.top_k);
    }
    if p.top_p < 1.0 {
        let all: f64 = order.iter().map(|i| weights[*i]).sum();
        let mut sum = 0.0;
        let is_missing = |i: &usize| {
            let missing = sum < f64::from(p.top_p) * all;
            sum += weights[*i];
            missing
        };
        let n = order.iter().copied().take_while(is_missing).count();
        order.truncate(n);
    }
    order.retain(|i| weights[*i] >= f64::from(p.min_p));
    let all: f64 = order.iter().map(|i| drawn[*i]).sum();
    let is_in = |i: &usize| order.contains(i);
    let weight = |i| if is_in(&i) { drawn[i] / all } else { 0.0 };
    (0..weights.len()).map(weight).collect()
}

/// `n` logits of a bell curve of standard deviation 2.
fn random_logits(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut unit = || (rng.next_u64() >> 40) as f32 / (1u64 << 24) as f32;
    let bell = |_| 2.0 * ((0..12).map(|_| unit()).sum::<f32>() - 6.0);
    (0..n).map(bell).collect()
}

/// Every combination of filters and penalties.
fn all_params() -> Vec<SamplingParams> {
    let mut all = Vec::new();
    for temperature in [0.3, 1.0, 2.0] {
        for top_k in [0, 1, 2, 7, 1000] {
            for top_p in [0.1, 0.5, 0.95, 1.0] {
                for min_p in [0.0, 0.05, 0.5, 1.0] {
                    let mut of = plain(|p| {
                        (p.temperature, p.top_k) = (temperature, top_k);
                        (p.top_p, p.min_p) = (top_p, min_p);
                    });
                    all.push(of.clone());
                    (of.repetition_penalty, of.presence_penalty) = (1.3, 0.5);
                    (of.frequency_penalty, of.penalty_window) = (-0.25, 5);
                    all.push(of.clone());
                    let mut last = of.clone();
                    of.logit_bias = vec![(0, 1.5), (1, -0.75), (4, 2.0)];
                    last.order = TemperatureOrder::Last;
                    all.extend([of, last]);
                }
            }
        }
    }
    all
}

#[test]
fn what_may_be_drawn_equals_the_reference() {
    for (vocab, seed) in [(1, 1), (2, 2), (5, 3), (63, 4), (64, 5), (65, 6), (700, 7)] {
        let logits = random_logits(vocab, seed);
        let history: Vec<u32> = (0..12).map(|i| i * i % vocab as u32).collect();
        let mut bench = SamplerFixture::new(vocab);
        for mut params in all_params() {
            let is_known = |(token, _): &(u32, f32)| (*token as usize) < vocab;
            params.logit_bias.retain(is_known);
            let expected = reference(&params, &logits, (&history, 4));
            let weights = bench.weights(&params, &logits, (&history, 4));
            let all = total(weights);
            for (token, (weight, expected)) in weights.iter().zip(expected).enumerate() {
                let got = f64::from(*weight) / all;
                let is_near = (got - expected).abs() <= 1e-5 * expected;
                assert!(
                    is_near && (got > 0.0) == (expected > 0.0),
                    "token {token} of {vocab}: {got}, expected {expected}, {params:?}"
                );
            }
        }
    }
}

/// Sum over the tokens of (observed - expected)^2 / expected.
fn chi_square(counts: &[u32], expected: &[f64]) -> f64 {
    let n = f64::from(counts.iter().sum::<u32>());
    let term = |(&got, p): (&u32, &f64)| match *p > 0.0 {
        true => (f64::from(got) - n * p).powi(2) / (n * p),
        false if got == 0 => 0.0,
        false => f64::INFINITY,
    };
    counts.iter().zip(expected).map(term).sum()
}

#[test]
fn draws_are_distributed_as_the_reference() {
    // A chi-square of 5 degrees of freedom exceeds this once in a million.
    const LIMIT: f64 = 37.0;
    const DRAWS: u64 = 20_000;
    let logits = [0.3, -1.0, 1.7, 0.0, 0.9, -0.4];
    let history: History<'_> = (&[2, 2, 4, 1], 1);
    let cases = [
        PLAIN,
        plain(|p| p.temperature = 0.6),
        plain(|p| (p.temperature, p.top_k) = (3.0, 4)),
        plain(|p| p.top_p = 0.8),
        plain(|p| p.min_p = 0.2),
        plain(|p| p.repetition_penalty = 1.5),
        plain(|p| (p.presence_penalty, p.frequency_penalty) = (0.7, 0.3)),
        plain(|p| p.logit_bias = vec![(1, 1.8), (2, -100.0), (5, 0.4)]),
    ];
    let mut bench = SamplerFixture::new(logits.len());
    for params in cases {
        let expected = reference(&params, &logits, history);
        let mut sampler = Sampler::new(params.clone()).unwrap();
        let (mut of_one_seed, mut of_seeds) = ([0; 6], [0; 6]);
        for seed in 0..DRAWS {
            of_one_seed[bench.sample(&mut sampler, &logits, history) as usize] += 1;
            let params = params.clone();
            let mut fresh = Sampler::new(SamplingParams { seed, ..params }).unwrap();
            of_seeds[bench.sample(&mut fresh, &logits, history) as usize] += 1;
        }
        for counts in [of_one_seed, of_seeds] {
            let distance = chi_square(&counts, &expected);
            assert!(
                distance < LIMIT,
                "{distance}: {counts:?}, {expected:?}, {params:?}"
            );
        }
    }
}

#[test]
fn greedy_takes_the_first_of_the_largest_and_never_nan() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let mut long = vec![-1.0; 200];
    (long[70], long[130], long[199]) = (2.0, 2.0, NAN);
    let cases: [(&[f32], u32); 12] = [
        (&[1.0], 0),
        (&[0.0, 3.0, 3.0, 1.0], 1),
        (&[-0.0, 0.0], 0),
        (&[NAN, 1.0, 1.0], 1),
        (&[1.0, NAN, 2.0], 2),
        (&[2.0, NAN], 0),
        (&[NAN, NAN], 0),
        (&[NAN, -INF], 1),
        (&[-INF, -INF], 0),
        (&[0.0, INF, INF], 1),
        (&[INF, NAN], 0),
        (&long, 70),
    ];
    for (logits, expected) in cases {
        // Greedy by temperature 0, and by a temperature whose inverse overflows.
        for temperature in [0.0, -0.0, 1e-40] {
            let params = plain(|p| p.temperature = temperature);
            let mut sampler = Sampler::new(params).unwrap();
            let mut bench = SamplerFixture::new(logits.len());
            let got = bench.sample(&mut sampler, logits, NO_HISTORY);
            assert_eq!(got, expected, "{logits:?} at {temperature}");
            assert_eq!(sampler.draws, 0, "no random number is taken");
        }
    }
}

#[test]
fn logits_that_are_no_numbers_are_drawn_only_for_want_of_others() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let cases: [(&[f32], &[u32]); 6] = [
        (&[NAN, 0.0, NAN, 0.1], &[1, 3]),
        (&[-INF, 0.0], &[1]),
        (&[-INF, -INF], &[0]),
        (&[NAN, NAN], &[0]),
        (&[0.0, INF, INF], &[1]),
        (&[-3e38, 3e38], &[1]),
    ];
    for (logits, allowed) in cases {
        let cut = plain(|p| (p.top_k, p.top_p, p.min_p) = (2, 0.99, 0.1));
        for params in [PLAIN, cut] {
            let mut sampler = Sampler::new(params.clone()).unwrap();
            let mut bench = SamplerFixture::new(logits.len());
            let mut draw = |_| bench.sample(&mut sampler, logits, NO_HISTORY);
            let mut seen: Vec<u32> = (0..100).map(&mut draw).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, allowed, "{logits:?} {params:?}");
        }
    }
}

#[test]
fn parameters_out_of_range_are_named() {
    const INFINITY: f32 = f32::INFINITY;
    const REPETITION: &str = "repetition_penalty";
    const PRESENCE: &str = "presence_penalty";
    const FREQUENCY: &str = "frequency_penalty";
    type Set = fn(&mut SamplingParams, f32);
    let repetitions = [0.0, -1.0, 1001.0];
    let cases: [(&str, Set, &[f32]); 6] = [
        ("temperature", |p, x| p.temperature = x, &[-0.1, INFINITY]),
        ("top_p", |p, x| p.top_p = x, &[0.0, -0.5, 1.01]),
        ("min_p", |p, x| p.min_p = x, &[-0.01, 1.01]),
        (REPETITION, |p, x| p.repetition_penalty = x, &repetitions),
        (PRESENCE, |p, x| p.presence_penalty = x, &[-2.1, 2.1]),
        (FREQUENCY, |p, x| p.frequency_penalty = x, &[-2.1, 2.1]),
    ];
    for (name, set, values) in cases {
        for value in values.iter().copied().chain([f32::NAN, -INFINITY]) {
            let mut params = PLAIN;
            set(&mut params, value);
            let error = params.check().unwrap_err();
            assert_eq!(error.name, name);
            let said = format!("{name} is {value}, expected ");
            assert!(error.to_string().starts_with(&said));
            assert_eq!(Sampler::new(params).unwrap_err().name, name);
        }
    }
    for params in all_params() {
        params.check().unwrap();
    }
}

#[test]
fn what_is_wrong_with_a_bias_is_said() {
    let all = |n| (0..n).map(|token| (token, 1.0)).collect::<Vec<_>>();
    let (most, low) = (MAX_LOGIT_BIAS as u32, f32::NEG_INFINITY);
    let outside = "has token 2000, which is outside the vocabulary of 2000";
    let cases: [(&[(u32, f32)], &str); 9] = [
        (&[], ""),
        (&[(0, 100.0), (1999, -100.0), (7, 0.0)], ""),
        (&all(most), ""),
        (&all(most + 1), "has 1025 tokens, expected at most 1024"),
        (&[(0, 1.0), (2000, 1.0)], outside),
        (&[(3, 100.5)], "of token 3 is 100.5, expected -100 to 100"),
        (&[(3, f32::NAN)], "of token 3 is NaN, expected -100 to 100"),
        (&[(3, low)], "of token 3 is -inf, expected -100 to 100"),
        (&[(9, 1.0), (3, 1.0), (9, 1.0)], "has token 9 twice"),
    ];
    for (bias, expected) in cases {
        let logit_bias = bias.to_vec();
        let params = plain(|p| p.logit_bias = logit_bias);
        let said = params.check_bias(2000).err().map(|error| error.to_string());
        let expected = (!expected.is_empty()).then(|| format!("logit_bias {expected}"));
        assert_eq!(said, expected);
    }
}

#[test]
fn a_bias_decides_before_anything_else() {
    let logits = [0.0, 1.0, -1.0, 0.5];
    let history: History<'_> = (&[2, 2], 0);
    let greedy = |logit_bias: &[(u32, f32)], repetition_penalty| {
        let params = SamplingParams {
            logit_bias: logit_bias.to_vec(),
            repetition_penalty,
            ..SamplingParams::default()
        };
        let mut sampler = Sampler::new(params).unwrap();
        SamplerFixture::new(4).sample(&mut sampler, &logits, history)
    };
    assert_eq!(greedy(&[], 1.0), 1);
    assert_eq!(greedy(&[(1, -100.0)], 1.0), 3);
    assert_eq!(greedy(&[(3, 0.5)], 1.0), 1, "the first of two equal ones");
    assert_eq!(greedy(&[(3, 0.6)], 1.0), 3);
    // Before the penalty: (-1 + 4) / 4 = 0.75 is above 1 - 0.4; after it, it would be -4 + 4.
    assert_eq!(greedy(&[(2, 4.0), (1, -0.4)], 4.0), 2);
}

/// `n` tokens drawn one after the other.
fn draw(bench: &mut SamplerFixture, sampler: &mut Sampler, logits: &[f32], n: usize) -> Vec<u32> {
    let sample = |_| bench.sample(sampler, logits, NO_HISTORY);
    (0..n).map(sample).collect()
}

#[test]
fn a_seed_gives_the_same_tokens_for_ever() {
    // Recorded from this code's first version: a change breaks answers whose seeds users have
    // noted.
    let recorded: [(u64, [u32; 12]); 3] = [
        (0, [36, 86, 37, 69, 17, 39, 6, 28, 3, 44, 41, 58]),
        (42, [58, 16, 37, 25, 14, 37, 19, 88, 36, 59, 8, 39]),
        (u64::MAX, [36, 78, 93, 70, 84, 99, 57, 29, 84, 9, 9, 87]),
    ];
    let logits: Vec<f32> = (0..100).map(|i| (i % 10) as f32 * 0.25).collect();
    let mut bench = SamplerFixture::new(logits.len());
    for (seed, expected) in recorded {
        let mut sampler = Sampler::new(SamplingParams { seed, ..PLAIN }).unwrap();
        let drawn = draw(&mut bench, &mut sampler, &logits, 12);
        assert_eq!(drawn, expected, "seed {seed}");
    }
}

#[test]
fn a_sampler_goes_on_where_it_was_serialised() {
    let logits = random_logits(50, 9);
    let mut bench = SamplerFixture::new(logits.len());
    let params = plain(|p| (p.top_p, p.seed) = (0.9, 7));
    for n in [0, 1, 2, 3, 17, 100] {
        let mut sampler = Sampler::new(params.clone()).unwrap();
        draw(&mut bench, &mut sampler, &logits, n);
        let text = serde_json::to_string(&sampler).unwrap();
        let mut from_text: Sampler = serde_json::from_str(&text).unwrap();
        let value = serde_json::to_value(&sampler).unwrap();
        let mut from_value: Sampler = serde_json::from_value(value).unwrap();
        let expected = draw(&mut bench, &mut sampler, &logits, 50);
        assert_eq!(draw(&mut bench, &mut from_text, &logits, 50), expected);
        assert_eq!(draw(&mut bench, &mut from_value, &logits, 50), expected);
    }
}

#[test]
fn a_serialised_sampler_is_checked() {
    let sampler = Sampler::new(PLAIN).unwrap();
    let mut value = serde_json::to_value(&sampler).unwrap();
    value["params"]["min_p"] = 2.0.into();
    let error = serde_json::from_value::<Sampler>(value.clone()).unwrap_err();
    assert_eq!(error.to_string(), "min_p is 2, expected 0 to 1");
    value["params"]["min_p"] = 0.0.into();
    value["draws"] = u64::MAX.into();
    let mut forged: Sampler = serde_json::from_value(value).unwrap();
    draw(&mut SamplerFixture::new(3), &mut forged, &[0.0; 3], 3);
}

#[test]
fn top_p_of_a_flat_distribution_takes_the_share_it_says() {
    let n = 50_000;
    let mut bench = SamplerFixture::new(n);
    let shares = [(0.5, 25_000), (0.25, 12_500), (1.0 / 64.0, 782)];
    for (top_p, kept) in shares.into_iter().chain([(0.000_01, 1)]) {
        let params = SamplingParams { top_p, ..PLAIN };
        let weights = bench.weights(&params, &vec![0.5; n], NO_HISTORY);
        let expected: Vec<f32> = (0..n).map(|i| f32::from(i < kept)).collect();
        assert!(weights == expected, "top-p {top_p}: equals by their ids");
    }
    // More than the first cut, and nearly all.
    for top_p in [0.9, 0.999, 0.999_999_9] {
        let logits = random_logits(n, 11);
        let params = plain(|p| (p.temperature, p.top_p) = (5.0, top_p));
        let weights = bench.weights(&params, &logits, NO_HISTORY).to_vec();
        let whole = bench.weights(&plain(|p| p.temperature = 5.0), &logits, NO_HISTORY);
        let wanted = f64::from(top_p) * total(whole);
        let kept = weights.iter().copied().filter(|w| *w > 0.0);
        let least = kept.fold(1.0, f32::min);
        let all = total(&weights);
        assert!(all >= wanted * (1.0 - 1e-9), "top-p {top_p}");
        assert!(
            all - f64::from(least) < wanted,
            "{top_p}: one less would do"
        );
        let mut pairs = weights.iter().zip(whole);
        assert!(pairs.all(|(w, all)| (*w > 0.0) == (*all >= least)));
    }
}

#[test]
fn log_probabilities_are_of_the_logits_as_they_came() {
    let logits = random_logits(300, 3);
    let history: History<'_> = (&[5, 9, 5, 7], 1);
    let asked = |logprobs| SamplingInputs {
        history,
        mask: None,
        logprobs,
    };
    let mut bench = SamplerFixture::new(logits.len());
    let plain = {
        let SamplerFixture { kernels, scratch } = &mut bench;
        logprobs::logprobs(kernels, &logits, 9, 3, scratch)
    };
    for params in all_params() {
        // Changes the chosen token, and the logits of seen tokens.
        let params = SamplingParams {
            logit_bias: vec![(9, 100.0), (8, -3.0)],
            ..params
        };
        let mut sampler = Sampler::new(params.clone()).unwrap();
        let token = bench.sample(&mut sampler.clone(), &logits, history);
        assert_eq!(token, 9);
        let SamplerFixture { kernels, scratch } = &mut bench;
        let mut copy = logits.clone();
        let choice = sampler.choose(kernels, &mut copy, asked(Some(3)), scratch);
        let logprobs = Some(plain.clone());
        assert_eq!(choice, ChosenToken { token, logprobs }, "{params:?}");
        let choice = sampler.choose(kernels, &mut logits.clone(), asked(None), scratch);
        assert_eq!(choice.logprobs, None);
    }
}

#[test]
fn a_mask_is_never_left() {
    let vocab = 300;
    for params in all_params() {
        let mut sampler = Sampler::new(params).unwrap();
        let mut bench = SamplerFixture::new(vocab);
        for seed in 0..40 {
            let mut logits = random_logits(vocab, seed);
            let token = |i| ((i * 67 + seed * 13) % 300) as u32;
            let allowed: Vec<u32> = (0..1 + seed % 5).map(token).collect();
            let mut mask = SimpleVob::alloc(vocab);
            allowed.iter().for_each(|token| mask.allow_token(*token));
            if seed % 7 == 0 {
                let impossible = allowed.iter().map(|token| *token as usize);
                impossible.for_each(|token| logits[token] = f32::NEG_INFINITY);
            }
            let asked = SamplingInputs {
                history: (&[5, 9, 5, 7], 1),
                mask: Some(&mask),
                logprobs: None,
            };
            let SamplerFixture { kernels, scratch } = &mut bench;
            let choice = sampler.choose(kernels, &mut logits, asked, scratch);
            assert!(allowed.contains(&choice.token), "{choice:?} of {allowed:?}");
        }
    }
}

#[test]
fn instruction_sets_change_nothing() {
    let mut logits = random_logits(3000, 5);
    (logits[3], logits[17], logits[2999]) = (f32::NAN, f32::NEG_INFINITY, f32::NAN);
    let history: Vec<u32> = (0..200).map(|i| i * 7 % 3000).collect();
    let cases = [
        PLAIN,
        plain(|p| (p.temperature, p.top_p) = (0.7, 0.9)),
        plain(|p| (p.top_k, p.min_p, p.repetition_penalty) = (40, 0.02, 1.1)),
    ];
    for params in cases {
        let run = |set| {
            let mut bench = SamplerFixture::with_set(set, logits.len());
            let mut sampler = Sampler::new(params.clone()).unwrap();
            let mut sample = |_| bench.sample(&mut sampler, &logits, (&history, 50));
            let tokens: Vec<u32> = (0..50).map(&mut sample).collect();
            let bits: Vec<u32> = bench.scratch.weights.iter().map(|w| w.to_bits()).collect();
            (tokens, bits)
        };
        let mut results = InstructionSet::available().into_iter().map(run);
        let first = results.next().unwrap();
        assert!(results.all(|result| result == first), "{params:?}");
    }
}

/// The candidates of ranks suffice, for requests of every kind.
#[test]
fn ranks_send_no_more_logits_than_decide() {
    let top = |n, within| Logits::Top(TopLogits { n, within });
    let sampled = |temperature, top_k| plain(|p| (p.temperature, p.top_k) = (temperature, top_k));
    for (params, wanted) in [
        (SamplingParams::default(), Logits::Best),
        (sampled(0.0, 40), Logits::Best),
        (sampled(1.0, 40), top(40, -10)),
        (sampled(1e-40, 40), top(40, -10)),
        (sampled(1.1, 1), top(1, -9)),
        (sampled(16.0, 65_535), top(65_535, -6)),
        (sampled(16.5, 40), Logits::Last),
        (sampled(1.0, 65_536), Logits::Last),
        (PLAIN, Logits::Last),
    ] {
        assert_eq!(params.wanted(0), wanted, "{params:?}");
        let changes: [fn(&mut SamplingParams); 4] = [
            |p| p.repetition_penalty = 1.1,
            |p| p.presence_penalty = 0.1,
            |p| p.frequency_penalty = -0.1,
            |p| p.logit_bias = vec![(3, -1.0)],
        ];
        for change in changes {
            let mut params = params.clone();
            change(&mut params);
            assert_eq!(params.wanted(0), Logits::Last);
        }
    }
    // All forbidden tokens may have larger logits than the allowed ones.
    for (params, wanted) in [
        (SamplingParams::default(), top(4, -10)),
        (sampled(2.0, 40), top(43, -9)),
        (sampled(1.0, 65_535), Logits::Last),
        (sampled(1.0, usize::MAX), Logits::Last),
        (PLAIN, Logits::Last),
    ] {
        assert_eq!(params.wanted(3), wanted, "{params:?}");
    }
}

/// Logits that are spread, rounded with many equal ones, adjacent in f32, or not finite.
fn awkward_logits(kind: usize, n: usize, seed: u64) -> Vec<f32> {
    let mut logits = random_logits(n, seed);
    match kind {
        0 => {}
        1 => logits.iter_mut().for_each(|x| *x = (*x * 4.).round() / 4.),
        // Some are 3 plus a few units in the last place, with often equal weights at temperatures
        // from 1 on.
        2 => (0..).zip(&mut logits).for_each(|(i, x)| {
            let near = 3.0 + ((i * 2_654_435_761_u64 + seed) % 8) as f32 * 2f32.powi(-22);
            *x = if i % 61 == 0 { near } else { *x - 20.0 };
        }),
        3 => (0..).zip(&mut logits).for_each(|(i, x)| {
            let odd = [*x, f32::NAN, f32::NEG_INFINITY, *x * 30.0];
            *x = odd[(i * 7 + seed as usize) % 4];
        }),
        _ => logits.fill(1.5),
    }
    logits
}

/// With 1 to 4 ranks, the leader draws from the same weights, to the bit, as from all logits, also
/// with forbidden tokens.
#[test]
fn the_largest_logits_of_ranks_give_the_tokens_of_all_logits() {
    const N: usize = 900;
    let ends: [&[usize]; 4] = [&[N], &[500, N], &[100, 350, N], &[225, 450, 675, N]];
    let parts_to = |ends: &[usize]| {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let parts = starts.zip(ends).map(|(start, end)| start..*end);
        parts.collect::<Vec<_>>()
    };
    let (mut fewer, mut bench) = (0, SamplerFixture::new(N));
    for seed in 0..6 {
        for kind in 0..5 {
            let logits = awkward_logits(kind, N, seed);
            let greedy = SamplingParams::default();
            let forbidden: &[usize] = if seed % 2 == 0 { &[] } else { &[0, 183, 600] };
            for params in all_params().into_iter().chain([greedy]) {
                let params = SamplingParams { seed, ..params };
                let Logits::Top(top) = params.wanted(forbidden.len()) else {
                    continue;
                };
                let mut run = |logits: &[f32]| {
                    let mut logits = logits.to_vec();
                    let none = f32::NEG_INFINITY;
                    forbidden.iter().for_each(|i| logits[*i] = none);
                    let mut sampler = Sampler::new(params.clone()).unwrap();
                    let mut sample = |_| bench.sample(&mut sampler, &logits, NO_HISTORY);
                    let tokens: Vec<u32> = (0..3).map(&mut sample).collect();
                    let weights = bench.scratch.weights.iter();
                    (tokens, weights.map(|w| w.to_bits()).collect::<Vec<_>>())
                };
                let whole = run(&logits);
                for parts in ends.map(parts_to) {
                    let came = paceline_model::testing::gathered(&logits, &parts, top);
                    let n = came.iter().filter(|logit| !logit.is_nan()).count();
                    let all = logits.iter().filter(|logit| !logit.is_nan()).count();
                    assert!(n == all || parts.len() > 1);
                    fewer += usize::from(n < all);
                    assert!(run(&came) == whole, "{kind} {seed} {params:?} {parts:?}");
                }
            }
        }
    }
    assert!(fewer > 1000, "{fewer} rows were not sent whole");
}
