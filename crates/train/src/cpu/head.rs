//! The output head, its loss and their gradients.

use super::Cpu;
use crate::error::Error;
use crate::rows::{BlockSums, LeafRows};
use crate::{ops, pool};

/// Rows whose logits are there at once: 48 MiB for a vocabulary of 49,152.
pub(crate) const HEAD_ROWS: usize = 256;

impl Cpu<'_> {
    /// [`head`](Self::head) of the rows of a leaf that are here, block by block. The loss is of
    /// all rows. `targets` are those of the leaf.
    ///
    /// # Errors
    /// [`Error::Comm`] of ranks with other blocks.
    pub(crate) fn head_rows(
        &self,
        params: [&[f32]; 2],
        rows: &LeafRows,
        (x, targets): (&[f32], &[Option<u32>]),
        weight: f32,
        grads: Option<[&mut [f32]; 2]>,
    ) -> Result<(f64, Vec<f32>), Error> {
        let mut sums = grads.map(|both| both.map(|sum| BlockSums::new(rows, sum)));
        let (mut losses, mut dx) = (Vec::new(), Vec::new());
        for (nth, block) in rows.own().enumerate() {
            let x = block.of(x, self.config.width);
            let first = block.first();
            let targets = &targets[first..first + block.here.len()];
            let (loss, d) = match &mut sums {
                None => self.head(params, x, targets, weight, None),
                Some([of_norm, of_head]) => of_norm.add(nth, |norm| {
                    of_head.add(nth, |head| {
                        self.head(params, x, targets, weight, Some([norm, head]))
                    })
                }),
            };
            losses.push(loss);
            dx.extend(d);
        }
        sums.into_iter().flatten().try_for_each(BlockSums::finish)?;
        Ok((rows.sum(losses)?, dx))
    }

    /// The head and its loss over the rows that have a target. Gives the sum of their negative log
    /// likelihoods, and with `grads` the gradient of that sum times `weight` at `x` (T, C).
    /// `params` and `grads` are of the norm before the head, and of the head.
    fn head(
        &self,
        params: [&[f32]; 2],
        x: &[f32],
        targets: &[Option<u32>],
        weight: f32,
        mut grads: Option<[&mut [f32]; 2]>,
    ) -> (f64, Vec<f32>) {
        let c = self.config.width;
        let mut dx = vec![0.0; if grads.is_some() { x.len() } else { 0 }];
        let wanted = targets.iter().enumerate();
        let wanted: Vec<(usize, usize)> = wanted
            .filter_map(|(row, t)| t.map(|t| (row, t as usize)))
            .collect();
        let mut loss = 0.0;
        for block in wanted.chunks(HEAD_ROWS) {
            let rows: Vec<f32> = block
                .iter()
                .flat_map(|(row, _)| x[row * c..][..c].iter().copied())
                .collect();
            let (norm, matrix) = self.weights.head();
            let normed = self.norm(norm, params[0], &rows);
            let mut logits = self.linear(matrix, params[1], &normed);
            let losses = pool::chunks_map(
                self.kernels.pool(),
                &mut logits,
                self.config.vocab,
                |i, logits| ops::cross_entropy(logits, block[i].1, weight),
            );
            loss = losses.iter().fold(loss, |sum, loss| sum + loss);
            let Some([of_norm, of_head]) = &mut grads else {
                continue;
            };
            let mut d_normed = vec![0.0; rows.len()];
            let at = (matrix, normed.as_slice());
            self.linear_back(at, params[1], &logits, (&mut d_normed, false), of_head);
            let mut d_rows = vec![0.0; rows.len()];
            self.norm_back(norm, params[0], (&rows, &d_normed), &mut d_rows, of_norm);
            for ((row, _), d) in block.iter().zip(d_rows.chunks(c)) {
                dx[row * c..][..c].copy_from_slice(d);
            }
        }
        (loss, dx)
    }
}
