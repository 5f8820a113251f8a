//! SmolLM2 and Gemma 3 on 256 tokens of Austen against llama.cpp and a numpy reference
//! (`tests-data/golden/llama_cpp`, `tests-data/golden/numpy`).
//!
//! Three recorded readings of each text. Two round activations to f32 only: llama.cpp on *widened*
//! weights, and numpy. The third is llama.cpp on the weights *as stored*. It rounds activations to
//! 8 bits, as our class `cpu-q8` does in runs of its own.
//!
//! Where first and second logit nearly tie, that changes the winner. On 256 positions llama.cpp as
//! stored agrees with itself on widened weights at 253 (SmolLM2) and 246 (Gemma). So an exact
//! engine misses 98 % of the latter.
//!
//! The bar of 98 % therefore stands over all positions against the widened run, and for SmolLM2
//! against the stored one as well. For Gemma as stored it stands over the positions that are no
//! near tie. Every position where winners differ is printed.

#![allow(clippy::print_stdout, reason = "figures, shown by --nocapture")]

use std::path::Path;

use crate::common::compare::{argmax, gap, largest, log_probability};
use crate::common::runner::Runner;
use crate::common::{golden_json, ids, kernels, load, number, numbers, test_model};
use paceline_base::KernelClass;
use paceline_base::testing::long;
use paceline_model::Model;
use paceline_tensor::KvType;
use serde_json::Value;

/// Part of the positions whose winners agree, at least.
const TOP1_BAR: f64 = 0.98;

/// Distance of the mean negative log-likelihoods, at most, nats.
const NLL_BAR: f64 = 0.02;

/// [`NLL_BAR`] of keys and values in `q4`: SmolLM2 is 0.023 off here, and 0.024 in numpy over 1536
/// tokens of Emma.
const KV_Q4_NLL_BAR: f64 = 0.04;

/// [`TOP1_BAR`] of `q4`, where it is no near tie; SmolLM2 agrees at 232 of all 256 positions.
const KV_Q4_TOP1_BAR: f64 = 0.9;

/// A position is a near tie when first and second logit of the widened run are not further apart
/// than this. Largest gap on these texts that class `cpu-q8` turned over: 0.18 (SmolLM2, position
/// 6); that llama.cpp as stored turned over: 0.37 (Gemma, position 31).
const NEAR_TIE: f64 = 0.2;

/// Readings of an engine after each token of a text.
#[derive(Debug)]
struct Reading {
    /// Mean of `nlls`.
    nll: f64,
    /// Of each token after the first, nats.
    nlls: Vec<f64>,
    /// Winner after each token.
    argmax: Vec<u32>,
    /// First less second logit there.
    gaps: Vec<f64>,
}

impl Reading {
    fn golden(json: &Value) -> Self {
        Self {
            nll: number(json, &["nll"]),
            nlls: numbers(json, "nlls"),
            argmax: ids(json, "argmax"),
            gaps: numbers(json, "gaps"),
        }
    }

    fn ours(path: &Path, class: KernelClass, tokens: &[u32]) -> Self {
        Self::of(load(path, class, &kernels()), tokens)
    }

    fn of(model: Model, tokens: &[u32]) -> Self {
        let mut runner = Runner::new(model, tokens.len());
        let (mut nlls, mut argmaxes, mut gaps) = (Vec::new(), Vec::new(), Vec::new());
        runner.each(tokens, |t, logits| {
            argmaxes.push(argmax(logits));
            gaps.push(gap(logits).into());
            let next = tokens.get(t + 1);
            nlls.extend(next.map(|&id| -log_probability(logits, id)));
        });
        let nll = nlls.iter().sum::<f64>() / nlls.len() as f64;
        Self {
            nll,
            nlls,
            argmax: argmaxes,
            gaps,
        }
    }
}

/// The recorded readings of a model's text.
#[derive(Debug)]
struct Golden {
    tokens: Vec<u32>,
    stored: Reading,
    widened: Reading,
    numpy: Reading,
}

impl Golden {
    fn read(name: &str) -> Self {
        let stored = golden_json(&format!("llama_cpp/{name}.json"));
        let widened = golden_json(&format!("llama_cpp/{name}-f32.json"));
        let numpy = golden_json(&format!("numpy/{name}.json"));
        let tokens = ids(&stored, "tokens");
        assert_eq!(tokens.len(), 256);
        assert_eq!(ids(&widened, "tokens"), tokens);
        assert_eq!(ids(&numpy, "tokens"), tokens);
        let [stored, widened, numpy] = [stored, widened, numpy].map(|json| Reading::golden(&json));
        Self {
            tokens,
            stored,
            widened,
            numpy,
        }
    }
}

/// How two readings of one text differ.
#[derive(Debug)]
struct Difference {
    positions: usize,
    /// Positions where the winners differ.
    winners: Vec<usize>,
    /// Ours less theirs.
    nll: f64,
    /// Largest distance of a single token's.
    nll_worst: f64,
}

impl Difference {
    /// Compares, and prints the figures and every position where the winners differ.
    fn print(title: &str, ours: &Reading, theirs: &Reading) -> Self {
        let positions = ours.argmax.len();
        let differ = |t: &usize| ours.argmax[*t] != theirs.argmax[*t];
        let winners = (0..positions).filter(differ).collect();
        let pairs = ours.nlls.iter().zip(&theirs.nlls);
        let nll_worst = largest(pairs.map(|(a, b)| (a - b).abs()));
        let nll = ours.nll - theirs.nll;
        let difference = Self {
            positions,
            winners,
            nll,
            nll_worst,
        };
        let part = difference.agreement(|_| true);
        println!(
            "{title}: top-1 {}/{positions} ({:.2} %), mean NLL {:.5} and {:.5} ({nll:+.5}), \
             largest distance of one {nll_worst:.5}",
            positions - difference.winners.len(),
            100.0 * part,
            ours.nll,
            theirs.nll,
        );
        for &t in &difference.winners {
            println!(
                "    position {t}: winner {} by {:.3}, theirs {} by {:.3}",
                ours.argmax[t], ours.gaps[t], theirs.argmax[t], theirs.gaps[t]
            );
        }
        difference
    }

    /// Part of the positions that `count` whose winners agree.
    fn agreement(&self, count: impl Fn(usize) -> bool) -> f64 {
        let all = (0..self.positions).filter(|&t| count(t)).count();
        let differ = self.winners.iter().filter(|&&t| count(t)).count();
        1.0 - differ as f64 / all as f64
    }
}

/// Class `cpu-f32` is numpy's function: both round in f32 only. Single tokens up to 3e-5 apart, of
/// which six digits were recorded.
fn check_f32(path: &Path, name: &str, golden: &Golden) {
    let ours = Reading::ours(path, KernelClass::CpuF32, &golden.tokens);
    let numpy = Difference::print(&format!("{name} cpu-f32, numpy"), &ours, &golden.numpy);
    let is_same = numpy.winners.is_empty() && numpy.nll_worst <= 2e-4;
    assert!(is_same, "{numpy:?}");
    check_widened(name, KernelClass::CpuF32, golden, &ours);
}

/// Class `cpu` answers as if nothing were rounded. Against llama.cpp as stored, `all` says whether
/// the bar stands over all positions or over those that are no near tie.
fn check_cpu(path: &Path, name: &str, golden: &Golden, all: bool) {
    let ours = Reading::ours(path, KernelClass::Cpu, &golden.tokens);
    check_widened(name, KernelClass::Cpu, golden, &ours);
    check_stored(name, KernelClass::Cpu, golden, &ours, all);
}

/// Quantised keys and values: what they cost compared with those of the class, in f16.
fn check_kv_quantised(path: &Path, name: &str, golden: &Golden) {
    for (kv, top1, nll) in [
        (KvType::Q8, TOP1_BAR, NLL_BAR / 10.0),
        (KvType::Q4, KV_Q4_TOP1_BAR, KV_Q4_NLL_BAR),
    ] {
        let model = load(path, KernelClass::Cpu, &kernels()).with_kv(kv);
        let ours = Reading::of(model, &golden.tokens);
        let title = format!("{name} cpu with kv {}, llama.cpp widened", kv.name());
        let widened = Difference::print(&title, &ours, &golden.widened);
        let decided = |t: usize| golden.widened.gaps[t] > NEAR_TIE;
        assert!(widened.agreement(decided) >= top1, "{kv:?} {widened:?}");
        assert!(widened.nll.abs() <= nll, "{kv:?} {widened:?}");
    }
}

/// Class `cpu-q8` rounds as llama.cpp as stored does, but other runs of values. Both turn near ties
/// over, each its own, so that [`TOP1_BAR`] is for positions that are none. Of all 256 positions
/// SmolLM2 agrees at 250 with llama.cpp as stored. That run agrees at 253 with itself widened.
fn check_q8(path: &Path, name: &str, golden: &Golden) {
    let ours = Reading::ours(path, KernelClass::CpuQ8, &golden.tokens);
    check_stored(name, KernelClass::CpuQ8, golden, &ours, false);
    let title = format!("{name} cpu-q8, llama.cpp widened");
    let widened = Difference::print(&title, &ours, &golden.widened);
    let decided = |t: usize| golden.widened.gaps[t] > NEAR_TIE;
    assert_eq!(widened.agreement(decided), 1.0, "{widened:?}");
    assert!(widened.nll.abs() <= NLL_BAR, "{widened:?}");
}

/// llama.cpp on widened weights keeps keys and values in f16, as class `cpu`; single tokens up to
/// 0.013 apart, the mean 5e-5.
fn check_widened(name: &str, class: KernelClass, golden: &Golden, ours: &Reading) {
    let title = format!("{name} {class}, llama.cpp widened");
    let widened = Difference::print(&title, ours, &golden.widened);
    assert!(widened.agreement(|_| true) >= TOP1_BAR, "{widened:?}");
    assert!(widened.nll.abs() <= NLL_BAR / 20.0, "{widened:?}");
}

fn check_stored(name: &str, class: KernelClass, golden: &Golden, ours: &Reading, all: bool) {
    let title = format!("{name} {class}, llama.cpp as stored");
    let stored = Difference::print(&title, ours, &golden.stored);
    let decided = |t: usize| golden.widened.gaps[t] > NEAR_TIE;
    let clear = 100.0 * stored.agreement(decided);
    println!("    where it is no near tie {clear:.2} %");
    let part = stored.agreement(|t| all || decided(t));
    assert!(part >= TOP1_BAR, "{stored:?}");
    assert!(stored.nll.abs() <= NLL_BAR, "{stored:?}");
}

#[test]
fn smollm2() {
    let Some(path) = test_model("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf") else {
        return;
    };
    let golden = Golden::read("smollm2");
    check_cpu(&path, "smollm2", &golden, true);
    check_q8(&path, "smollm2", &golden);
    check_kv_quantised(&path, "smollm2", &golden);
    check_f32(&path, "smollm2", &golden);
}

/// Roundings to 8 bits are left to SmolLM2, but for a long run.
#[test]
fn gemma3() {
    let Some(path) = test_model("gemma3", "gemma-3-270m-q4_k_m.gguf") else {
        return;
    };
    let golden = Golden::read("gemma3");
    check_cpu(&path, "gemma3", &golden, false);
    check_f32(&path, "gemma3", &golden);
    if long() {
        check_q8(&path, "gemma3", &golden);
        check_kv_quantised(&path, "gemma3", &golden);
    }
}
