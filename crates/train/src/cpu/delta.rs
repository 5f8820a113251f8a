//! A gated delta net in place of attention, and its gradients. Each head has a state that is read
//! and written row by row.
//!
//! ```text
//! x (T, C) -> mixed (T, 2 K D + H E) -> convolution over rows, silu -> q, k (T, K, D), v (T, H, E)
//! q, k of length 1, q over the root of D
//! b = sigmoid(step x)   g = -exp(scale) softplus(decay x + bias)
//! S *= exp(g)   d = b (v - S^T k)   S += k d^T   o = S^T q   attended = norm(o) silu(gate x)
//! ```
//!
//! T tokens, C width, K key heads with D elements, H value heads with E. Source: Yang, Kautz and
//! Hatamizadeh 2024; `modeling_qwen3_5.py` of transformers.

use paceline_model::{DeltaNet, HeadOrder, LayerShape};

use super::{Cpu, KEY, QUERY, VALUE};
use crate::ops::{self, Norm};
use crate::pool;
use crate::rows::LeafRows;
use crate::weights::{DeltaWeights, LayerWeights, VectorParameter};

/// Added to the sum of squares that queries and keys are divided by: transformers' `l2norm`.
const LENGTH_EPS: f32 = 1e-6;

/// From here on softplus is its argument, as in transformers.
const SOFTPLUS_MAX: f32 = 20.0;

/// A layer's delta net over a leaf.
#[derive(Clone, Copy)]
pub(crate) struct DeltaLayer<'a> {
    pub(crate) net: DeltaNet,
    pub(crate) shape: LayerShape,
    pub(crate) weights: (&'a LayerWeights, &'a DeltaWeights),
    pub(crate) rows: &'a LeafRows,
}

/// Values that the forward pass leaves for the backward one.
#[derive(Debug)]
pub(crate) struct DeltaKept {
    /// (T, channels): the input of the convolution, and its result before silu.
    mixed: Vec<f32>,
    convolved: Vec<f32>,
    /// (T, H E)
    gate: Vec<f32>,
    /// (T, H): before their functions.
    step: Vec<f32>,
    decay: Vec<f32>,
    /// (T, H E): what the states gave.
    read: Vec<f32>,
}

/// A head's rows of one sequence: q and k of length 1 (n, D), v (n, E), b and exp(g) (n,).
struct DeltaHeads {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    b: Vec<f32>,
    alpha: Vec<f32>,
}

/// Gradients of them; `g` of the logarithm of the decay.
struct HeadGradients {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    b: Vec<f32>,
    g: Vec<f32>,
}

impl Cpu<'_> {
    /// x (T, C) -> attended (T, H E)
    pub(super) fn delta_net(
        &self,
        at: DeltaLayer<'_>,
        params: &[f32],
        x: &[f32],
    ) -> (Vec<f32>, DeltaKept) {
        let (w, own) = at.weights;
        let mixed = self.linear(&w.matrices[QUERY], params, x);
        let convolved = at.convolve(own.conv.get(params), &mixed);
        let gate = self.linear(&w.matrices[KEY], params, x);
        let step = self.linear(&w.matrices[VALUE], params, x);
        let decay = self.linear(&own.decay, params, x);
        let read = vec![0.0; gate.len()];
        let mut kept = DeltaKept {
            mixed,
            convolved,
            gate,
            step,
            decay,
            read,
        };
        let tasks = at.tasks();
        let parts = pool::map(self.kernels.pool(), tasks.len(), |i| {
            let (first, n, head) = tasks[i];
            let rows = at.head_rows((first, n, head), params, &kept);
            at.run(&rows, n, None)
        });
        let (heads, e) = (at.shape.heads, at.shape.value_dim);
        for ((first, _, head), part) in tasks.iter().zip(&parts) {
            for (t, own) in part.chunks(e).enumerate() {
                kept.read[((first + t) * heads + head) * e..][..e].copy_from_slice(own);
            }
        }
        let mut attended = vec![0.0; kept.read.len()];
        let norm = self.delta_norm(&own.norm, params);
        let rows = kept.read.chunks(e).zip(kept.gate.chunks(e));
        for (out, (read, gate)) in attended.chunks_mut(e).zip(rows) {
            norm.forward(read, out);
            let both = out.iter_mut().zip(gate);
            both.for_each(|(out, gate)| *out *= gate * ops::sigmoid(*gate));
        }
        (attended, kept)
    }

    fn delta_norm<'a>(&self, weight: &'a VectorParameter, params: &'a [f32]) -> Norm<'a> {
        Norm {
            weight: weight.get(params),
            offset: 0.0,
            eps: self.config.norm_eps,
        }
    }

    /// d attended (T, H E) -> dx (T, C), at the input `x`.
    pub(super) fn delta_net_back(
        &self,
        at: DeltaLayer<'_>,
        params: &[f32],
        (x, kept, d_attended): (&[f32], &DeltaKept, &[f32]),
        grads: &mut [f32],
    ) -> Vec<f32> {
        let (w, own) = at.weights;
        let [d_read, d_gate] = self.ungate((&own.norm, kept), params, d_attended, grads);
        let tasks = at.tasks();
        let parts = pool::map(self.kernels.pool(), tasks.len(), |i| {
            let (first, n, head) = tasks[i];
            let rows = at.head_rows((first, n, head), params, kept);
            at.run_back(&rows, n, &at.of_head(&d_read, (first, n, head)))
        });
        let mut d_active = vec![0.0; kept.convolved.len()];
        let [mut d_step, mut d_decay] = [0, 1].map(|_| vec![0.0; kept.step.len()]);
        let scale = own.scale.get(params);
        let mut d_scale = vec![0.0; scale.len()];
        for ((first, n, head), part) in tasks.iter().zip(&parts) {
            at.add_back((*first, *n, *head), part, kept, &mut d_active);
            let factor = -ops::exp(scale[*head]);
            let bias = own.bias.get(params)[*head];
            for t in 0..*n {
                let place = (first + t) * at.shape.heads + head;
                let b = ops::sigmoid(kept.step[place]);
                d_step[place] = part.b[t] * b * (1.0 - b);
                let input = kept.decay[place] + bias;
                d_scale[*head] += part.g[t] * factor * softplus(input);
                d_decay[place] = part.g[t] * factor * ops::sigmoid(input);
            }
        }
        add_to(own.scale.grads(grads), &d_scale);
        if let Some(d_bias) = own.bias.grads(grads) {
            d_decay
                .chunks(at.shape.heads)
                .for_each(|row| add_to(Some(&mut *d_bias), row));
        }
        let both = d_active.iter_mut().zip(&kept.convolved);
        both.for_each(|(d, x)| {
            let s = ops::sigmoid(*x);
            *d *= s * (1.0 + x * (1.0 - s));
        });
        let taps = own.conv.get(params);
        let d_mixed = at.convolve_back((taps, &kept.mixed), &d_active, own.conv.grads(grads));
        let mut dx = vec![0.0; x.len()];
        self.linear_back(
            (&w.matrices[QUERY], x),
            params,
            &d_mixed,
            (&mut dx, false),
            grads,
        );
        self.linear_back(
            (&w.matrices[KEY], x),
            params,
            &d_gate,
            (&mut dx, true),
            grads,
        );
        self.linear_back(
            (&w.matrices[VALUE], x),
            params,
            &d_step,
            (&mut dx, true),
            grads,
        );
        self.linear_back((&own.decay, x), params, &d_decay, (&mut dx, true), grads);
        dx
    }

    /// d attended (T, H E) -> d read, d gate (T, H E)
    fn ungate(
        &self,
        (weight, kept): (&VectorParameter, &DeltaKept),
        params: &[f32],
        d_attended: &[f32],
        grads: &mut [f32],
    ) -> [Vec<f32>; 2] {
        let norm = self.delta_norm(weight, params);
        let e = norm.weight.len();
        let [mut d_read, mut d_gate] = [0, 1].map(|_| vec![0.0; d_attended.len()]);
        let (mut normed, mut d_normed, mut dw) = (vec![0.0; e], vec![0.0; e], vec![0.0; e]);
        for (at, d) in d_attended.chunks(e).enumerate() {
            let at = at * e..(at + 1) * e;
            norm.forward(&kept.read[at.clone()], &mut normed);
            for i in 0..e {
                let gate = kept.gate[at.start + i];
                let s = ops::sigmoid(gate);
                d_normed[i] = d[i] * gate * s;
                d_gate[at.start + i] = d[i] * normed[i] * s * (1.0 + gate * (1.0 - s));
            }
            let read = &kept.read[at.clone()];
            norm.backward(read, &d_normed, &mut d_read[at], Some(&mut dw));
        }
        add_to(weight.grads(grads), &dw);
        [d_read, d_gate]
    }
}

impl DeltaLayer<'_> {
    /// First row and length of each sequence, with each head.
    fn tasks(&self) -> Vec<(usize, usize, usize)> {
        let heads = self.shape.heads;
        let of = |(first, n)| (0..heads).map(move |head| (first, n, head));
        self.rows.sequences().flat_map(of).collect()
    }

    const fn channels(&self) -> usize {
        let keys = self.shape.kv_heads * self.shape.head_dim;
        2 * keys + self.shape.heads * self.shape.value_dim
    }

    /// Where queries, keys and values of a head begin among the channels.
    const fn places(&self, head: usize) -> [usize; 3] {
        let (kv, d) = (self.shape.kv_heads, self.shape.head_dim);
        let of = match self.net.order {
            HeadOrder::Grouped => head / (self.shape.heads / kv),
            HeadOrder::Interleaved => head % kv,
        };
        [
            of * d,
            (kv + of) * d,
            2 * kv * d + head * self.shape.value_dim,
        ]
    }

    /// The sum over each channel's last inputs; the newest has the last tap.
    fn convolve(&self, taps: &[f32], x: &[f32]) -> Vec<f32> {
        let (channels, n_taps) = (self.channels(), self.net.taps);
        let mut y = vec![0.0; x.len()];
        for (first, n) in self.rows.sequences() {
            for t in 0..n {
                let out = &mut y[(first + t) * channels..][..channels];
                for back in (0..n_taps.min(t + 1)).rev() {
                    let from = &x[(first + t - back) * channels..][..channels];
                    let tap = n_taps - 1 - back;
                    for (c, (out, x)) in out.iter_mut().zip(from).enumerate() {
                        *out += taps[c * n_taps + tap] * x;
                    }
                }
            }
        }
        y
    }

    fn convolve_back(
        &self,
        (taps, x): (&[f32], &[f32]),
        dy: &[f32],
        mut d_taps: Option<&mut [f32]>,
    ) -> Vec<f32> {
        let (channels, n_taps) = (self.channels(), self.net.taps);
        let mut dx = vec![0.0; x.len()];
        for (first, n) in self.rows.sequences() {
            for t in 0..n {
                let dy = &dy[(first + t) * channels..][..channels];
                for back in (0..n_taps.min(t + 1)).rev() {
                    let (at, tap) = ((first + t - back) * channels, n_taps - 1 - back);
                    for (c, dy) in dy.iter().enumerate() {
                        dx[at + c] += taps[c * n_taps + tap] * dy;
                        if let Some(d_taps) = &mut d_taps {
                            d_taps[c * n_taps + tap] += x[at + c] * dy;
                        }
                    }
                }
            }
        }
        dx
    }

    /// (n, E) of a head's rows.
    fn of_head(&self, x: &[f32], (first, n, head): (usize, usize, usize)) -> Vec<f32> {
        let (heads, e) = (self.shape.heads, self.shape.value_dim);
        let row = |t: usize| &x[((first + t) * heads + head) * e..][..e];
        (0..n).flat_map(row).copied().collect()
    }

    fn head_rows(
        &self,
        (first, n, head): (usize, usize, usize),
        params: &[f32],
        kept: &DeltaKept,
    ) -> DeltaHeads {
        let (own, channels) = (self.weights.1, self.channels());
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        let active = |t: usize, from: usize, len: usize| {
            let x = &kept.convolved[(first + t) * channels + from..][..len];
            let x = x.iter().map(|x| x * ops::sigmoid(*x));
            x.collect::<Vec<f32>>()
        };
        let [q, k, v] = self.places(head);
        let factor = 1.0 / libm::sqrtf(d as f32);
        let unit = |t: usize, from: usize, factor: f32| {
            let mut x = active(t, from, d);
            let r = factor / libm::sqrtf(ops::dot(&x, &x) + LENGTH_EPS);
            x.iter_mut().for_each(|x| *x *= r);
            x
        };
        let scale = -ops::exp(own.scale.get(params)[head]);
        let bias = own.bias.get(params)[head];
        let place = |t: usize| (first + t) * self.shape.heads + head;
        DeltaHeads {
            q: (0..n).flat_map(|t| unit(t, q, factor)).collect(),
            k: (0..n).flat_map(|t| unit(t, k, 1.0)).collect(),
            v: (0..n).flat_map(|t| active(t, v, e)).collect(),
            b: (0..n).map(|t| ops::sigmoid(kept.step[place(t)])).collect(),
            alpha: (0..n)
                .map(|t| ops::exp(scale * softplus(kept.decay[place(t)] + bias)))
                .collect(),
        }
    }

    /// Outputs of a head (n, E). `states` get its state (D, E) behind each row.
    fn run(&self, rows: &DeltaHeads, n: usize, mut states: Option<&mut Vec<f32>>) -> Vec<f32> {
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        let (mut out, mut state) = (vec![0.0; n * e], vec![0.0; d * e]);
        for t in 0..n {
            let (q, k) = (&rows.q[t * d..][..d], &rows.k[t * d..][..d]);
            state.iter_mut().for_each(|s| *s *= rows.alpha[t]);
            let delta = self.delta(rows, t, &read(&state, k, e));
            for (row, k) in state.chunks_mut(e).zip(k) {
                row.iter_mut().zip(&delta).for_each(|(s, d)| *s += k * d);
            }
            out[t * e..][..e].copy_from_slice(&read(&state, q, e));
            if let Some(states) = &mut states {
                states.extend_from_slice(&state);
            }
        }
        out
    }

    /// The update by row `t`: b (v - p).
    fn delta(&self, rows: &DeltaHeads, t: usize, p: &[f32]) -> Vec<f32> {
        let e = self.shape.value_dim;
        let v = rows.v[t * e..][..e].iter().zip(p);
        v.map(|(v, p)| rows.b[t] * (v - p)).collect()
    }

    /// d read (n, E) -> the gradients of a head's rows.
    fn run_back(&self, rows: &DeltaHeads, n: usize, d_out: &[f32]) -> HeadGradients {
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        let mut states = Vec::with_capacity(n * d * e);
        self.run(rows, n, Some(&mut states));
        let mut found = HeadGradients {
            q: vec![0.0; n * d],
            k: vec![0.0; n * d],
            v: vec![0.0; n * e],
            b: vec![0.0; n],
            g: vec![0.0; n],
        };
        let (none, mut d_state) = (vec![0.0; d * e], vec![0.0; d * e]);
        for t in (0..n).rev() {
            let (q, k) = (&rows.q[t * d..][..d], &rows.k[t * d..][..d]);
            let (now, d_out) = (&states[t * d * e..][..d * e], &d_out[t * e..][..e]);
            let before = match t {
                0 => none.as_slice(),
                _ => &states[(t - 1) * d * e..][..d * e],
            };
            let decayed: Vec<f32> = before.iter().map(|s| s * rows.alpha[t]).collect();
            write(&mut d_state, q, d_out);
            for (i, row) in now.chunks(e).enumerate() {
                found.q[t * d + i] = ops::dot(row, d_out);
            }
            let p = read(&decayed, k, e);
            let delta = self.delta(rows, t, &p);
            let d_delta = read(&d_state, k, e);
            let mut d_p = vec![0.0; e];
            for j in 0..e {
                found.v[t * e + j] = rows.b[t] * d_delta[j];
                found.b[t] += d_delta[j] * (rows.v[t * e + j] - p[j]);
                d_p[j] = -rows.b[t] * d_delta[j];
            }
            for (i, (d_row, row)) in d_state.chunks(e).zip(decayed.chunks(e)).enumerate() {
                found.k[t * d + i] = ops::dot(d_row, &delta) + ops::dot(row, &d_p);
            }
            write(&mut d_state, k, &d_p);
            found.g[t] = ops::dot(&d_state, &decayed);
            d_state.iter_mut().for_each(|s| *s *= rows.alpha[t]);
        }
        found
    }

    /// Adds a head's gradients to those of the channels behind silu.
    fn add_back(
        &self,
        (first, n, head): (usize, usize, usize),
        part: &HeadGradients,
        kept: &DeltaKept,
        d_active: &mut [f32],
    ) {
        let (d, e, channels) = (self.shape.head_dim, self.shape.value_dim, self.channels());
        let [q, k, v] = self.places(head);
        let factor = 1.0 / libm::sqrtf(d as f32);
        for t in 0..n {
            let row = (first + t) * channels;
            for (from, factor, dy) in [(q, factor, &part.q), (k, 1.0, &part.k)] {
                let dy = &dy[t * d..][..d];
                let x = kept.convolved[row + from..][..d].iter();
                let x: Vec<f32> = x.map(|x| x * ops::sigmoid(*x)).collect();
                let r = 1.0 / libm::sqrtf(ops::dot(&x, &x) + LENGTH_EPS);
                let along = ops::dot(&x, dy) * r * r * r;
                let place = d_active[row + from..][..d].iter_mut();
                place.zip(x.iter().zip(dy)).for_each(|(place, (x, dy))| {
                    *place += factor * (r * dy - x * along);
                });
            }
            let place = d_active[row + v..][..e].iter_mut();
            place
                .zip(&part.v[t * e..])
                .for_each(|(place, dv)| *place += dv);
        }
    }
}

/// S^T x: (E,)
fn read(state: &[f32], x: &[f32], e: usize) -> Vec<f32> {
    let mut sum = vec![0.0; e];
    for (row, x) in state.chunks(e).zip(x) {
        sum.iter_mut().zip(row).for_each(|(sum, s)| *sum += x * s);
    }
    sum
}

/// S += x y^T
fn write(state: &mut [f32], x: &[f32], y: &[f32]) {
    for (row, x) in state.chunks_mut(y.len()).zip(x) {
        row.iter_mut().zip(y).for_each(|(s, y)| *s += x * y);
    }
}

/// ln(1 + e^x)
fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_MAX {
        return x;
    }
    libm::log1p(libm::exp(f64::from(x))) as f32
}

fn add_to(sum: Option<&mut [f32]>, x: &[f32]) {
    let sum = sum.into_iter().flatten();
    sum.zip(x).for_each(|(sum, x)| *sum += x);
}
