//! Rows of a step that lie in one page, for one value head. They read the state and the rows before
//! them, and each adds a difference.

use super::{CHANNELS, PAIR, ROWS, StateRule, ValueHead};
use crate::attention::PAGE;
use crate::delta::Chains;
use crate::kv::DeltaHead;

/// Products of each row's query, then of its key, with the keys of its page.
type Scores = [[[f32; PAGE]; ROWS]; 2];

/// Rows of a step that lie in one page, for one value head.
pub(super) struct PageSegment<'a> {
    pub(super) head: &'a ValueHead<'a>,
    /// `(rows, channels)`, all of the batch, convolved.
    pub(super) mixed: &'a [f32],
    /// The first row in the batch.
    pub(super) t: usize,
    /// Rows, 1 to [`ROWS`].
    pub(super) n: usize,
    /// Place of the first row in the page.
    pub(super) slot: usize,
    /// Keys of the page, `(D, PAGE)`.
    pub(super) keys: *const f32,
    /// State, differences and sums of decays of the page.
    pub(super) part: DeltaHead,
    /// Differences of these rows, `(n, E)`.
    pub(super) fresh: *mut f32,
    /// Results of these rows, `(n, E)`, each `stride` behind the one before.
    pub(super) outs: *mut f32,
    pub(super) stride: usize,
}

impl PageSegment<'_> {
    /// Adds the rows to the state and reads them, in order.
    pub(super) fn compute(&self) {
        let (head, end) = (self.head, self.slot + self.n);
        let mut scores: Scores = [[[0.0; PAGE]; ROWS]; 2];
        // SAFETY: this task alone has this head of the page and of these rows; keys of the page's
        // positions were written before.
        unsafe {
            let sums = std::slice::from_raw_parts_mut(self.part.sums, PAGE * head.shape.decays);
            head.sum_decays(sums, self.slot..end, self.t);
            match head.step.rule {
                StateRule::Channels => {
                    (0..self.n).for_each(|i| self.read_decayed(i, sums, &mut scores))
                }
                StateRule::Difference if self.n == 1 && head.shape.value_dim <= PAIR => {
                    self.read_one(&mut scores);
                }
                _ => self.read(&mut scores),
            }
            for i in 0..self.n {
                self.row(i, sums, &mut scores);
            }
        }
    }

    /// First channels of the query and of the key.
    fn channels(&self) -> [usize; 2] {
        let (shape, key_head) = (self.head.shape, self.head.step.key_heads[self.head.head]);
        [key_head, shape.key_heads + key_head].map(|head| head * shape.head_dim)
    }

    /// Each row's elements from channel `first` on, with the keys of the page.
    fn with_keys(&self, first: usize, acc: *mut f32) -> Chains {
        let shape = self.head.shape;
        Chains {
            coefficients: self.mixed[self.t * shape.channels() + first..].as_ptr(),
            coefficient_stride: shape.channels(),
            x: self.keys,
            x_stride: PAGE,
            count: shape.head_dim,
            acc,
            acc_stride: PAGE,
            rows: self.n,
            width: (self.slot + self.n).next_multiple_of(16),
        }
    }

    /// The same with the state.
    fn with_state(&self, first: usize, (acc, acc_stride): (*mut f32, usize)) -> Chains {
        let e = self.head.shape.value_dim;
        Chains {
            x: self.part.state,
            x_stride: e,
            acc_stride,
            width: e,
            ..self.with_keys(first, acc)
        }
    }

    /// Values that a single row's query and key read, both at once: keys and state go by once.
    ///
    /// # Safety
    /// See [`compute`](Self::compute).
    unsafe fn read_one(&self, scores: &mut Scores) {
        let ([query, key], e) = (self.channels(), self.head.shape.value_dim);
        let both = |chains: Chains| Chains {
            coefficient_stride: key - query,
            rows: 2,
            ..chains
        };
        let mut pair = [[0.0f32; PAIR]; 2];
        let read = (pair.as_mut_ptr().cast(), PAIR);
        let kernels = self.head.kernels;
        // SAFETY: by the caller's promise.
        unsafe {
            kernels.accumulate(Chains {
                acc_stride: ROWS * PAGE,
                ..both(self.with_keys(query, scores.as_mut_ptr().cast()))
            });
            kernels.accumulate(both(self.with_state(query, read)));
            for (to, from) in [self.outs, self.fresh].into_iter().zip(&pair) {
                std::slice::from_raw_parts_mut(to, e).copy_from_slice(&from[..e]);
            }
        }
    }

    /// Values that the rows' queries read, then those of their keys. Those of the page's keys go to
    /// `scores`, those of the state to where results and differences will lie.
    ///
    /// # Safety
    /// See [`compute`](Self::compute).
    unsafe fn read(&self, scores: &mut Scores) {
        let e = self.head.shape.value_dim;
        let reads = [(self.outs, self.stride), (self.fresh, e)];
        // Reads by keys matter only where they are subtracted.
        let reads = match self.head.step.rule {
            StateRule::Sum => &reads[..1],
            _ => &reads[..],
        };
        let parts = self.channels().into_iter().zip(reads).zip(scores);
        for ((first, &(acc, stride)), scores) in parts {
            // SAFETY: by the caller's promise.
            unsafe {
                for i in 0..self.n {
                    std::slice::from_raw_parts_mut(acc.add(i * stride), e).fill(0.0);
                }
                let kernels = self.head.kernels;
                kernels.accumulate(self.with_keys(first, scores.as_mut_ptr().cast()));
                kernels.accumulate(self.with_state(first, (acc, stride)));
            }
        }
    }

    /// As [`read`](Self::read), of row `i`, where each element of a key has decays of its own:
    /// what is read has decayed.
    ///
    /// # Safety
    /// See [`compute`](Self::compute).
    unsafe fn read_decayed(&self, i: usize, sums: &[f64], scores: &mut Scores) {
        let (head, e, at) = (self.head, self.head.shape.value_dim, self.slot + i);
        let [query, key] = self.channels();
        let row = &self.mixed[(self.t + i) * head.shape.channels()..];
        let reads = [(self.outs, self.stride), (self.fresh, e)];
        let (mut keys, mut far) = ([[0.0f32; PAGE]; CHANNELS], [[0.0f32; CHANNELS]; 2]);
        // SAFETY: by the caller's promise; blocks of 16 elements are within heads.
        unsafe {
            for (to, stride) in reads {
                std::slice::from_raw_parts_mut(to.add(i * stride), e).fill(0.0);
            }
            for first in (0..head.shape.head_dim).step_by(CHANNELS) {
                for (j, keys) in keys.iter_mut().enumerate() {
                    let d = first + j;
                    let all = head.weights(&sums[d * PAGE..][..=at], keys);
                    let own = std::slice::from_raw_parts(self.keys.add(d * PAGE), at + 1);
                    keys.iter_mut().zip(own).for_each(|(x, key)| *x *= key);
                    (far[0][j], far[1][j]) = (all * row[query + d], all * row[key + d]);
                }
                head.kernels.accumulate(Chains {
                    coefficients: row[query + first..].as_ptr(),
                    coefficient_stride: key - query,
                    x: keys.as_ptr().cast(),
                    count: CHANNELS,
                    acc: scores[0][i].as_mut_ptr(),
                    acc_stride: ROWS * PAGE,
                    rows: 2,
                    width: (at + 1).next_multiple_of(16),
                    ..self.with_keys(query, std::ptr::null_mut())
                });
                for (far, (to, stride)) in far.iter().zip(reads) {
                    head.kernels.accumulate(Chains {
                        coefficients: far.as_ptr(),
                        x: self.part.state.add(first * e).cast_const(),
                        count: CHANNELS,
                        rows: 1,
                        ..self.with_state(query, (to.add(i * stride), stride))
                    });
                }
            }
        }
    }

    /// The difference that row `i` takes in, then its result; `sums` are those of the page.
    ///
    /// # Safety
    /// See [`compute`](Self::compute); the rows before are complete, and what this one reads of
    /// keys and state is there.
    unsafe fn row(&self, i: usize, sums: &[f64], scores: &mut Scores) {
        let (head, e, at) = (self.head, self.head.shape.value_dim, self.slot + i);
        let (mut weights, mut far) = ([0.0f32; PAGE], 1.0);
        if head.step.rule != StateRule::Channels {
            far = head.weights(&sums[..=at], &mut weights);
            for scores in scores.iter_mut() {
                let pairs = scores[i][..=at].iter_mut().zip(&weights);
                pairs.for_each(|(score, weight)| *score *= weight);
            }
        }
        let step = head.step.steps[(self.t + i) * head.shape.heads + head.head];
        let subtracts = head.step.rule != StateRule::Sum;
        // SAFETY: by the caller's promise.
        unsafe {
            let delta = std::slice::from_raw_parts_mut(self.fresh.add(i * e), e);
            if subtracts {
                delta.iter_mut().for_each(|x| *x *= far);
                head.add_deltas(&scores[1][i], self.part.deltas, at, delta);
            } else {
                delta.fill(0.0);
            }
            let pairs = delta.iter_mut().zip(self.values(i));
            pairs.for_each(|(delta, v)| *delta = step * (v - *delta));
            let out = std::slice::from_raw_parts_mut(self.outs.add(i * self.stride), e);
            out.iter_mut().for_each(|x| *x *= far);
            head.add_deltas(&scores[0][i], self.part.deltas, at + 1, out);
            if let Some(skip) = head.step.skip.get(head.head) {
                let pairs = out.iter_mut().zip(self.values(i));
                pairs.for_each(|(out, v)| *out += skip * v);
            }
        }
    }

    /// The value of row `i`, `(E,)`.
    fn values(&self, i: usize) -> &[f32] {
        let (shape, head) = (self.head.shape, self.head.head);
        let first = 2 * shape.key_heads * shape.head_dim + head * shape.value_dim;
        &self.mixed[(self.t + i) * shape.channels() + first..][..shape.value_dim]
    }
}
