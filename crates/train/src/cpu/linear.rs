//! A matrix with its adapter: `y = x W^T + s (x A^T) B^T + bias`, and its gradients.

use std::borrow::Cow;

use paceline_tensor::chain::{ProductOutput, Sizes, Strided};

use super::Cpu;
use crate::pool;
use crate::weights::{AdapterFactors, Matrix, MatrixStorage};

impl Cpu<'_> {
    /// x (T, in) -> y (T, out): the chain over W's columns continues over the rank.
    pub(crate) fn linear(&self, matrix: &Matrix, params: &[f32], x: &[f32]) -> Vec<f32> {
        let (out, cols) = (matrix.rows, matrix.cols);
        let m = x.len() / cols;
        let mut y = vec![0.0; m * out];
        matrix.tiles(params, self.kernels, |rows, tile| {
            let sizes = Sizes {
                m,
                n: rows.len(),
                k: cols,
            };
            let at = ProductOutput {
                values: &mut y[rows.start.min(m * out)..],
                stride: out,
                goes_on: false,
            };
            self.kernels.chains(
                sizes,
                Strided::rows(x, cols),
                Strided::rows(tile, cols).t(),
                at,
            );
        });
        if let Some(pair) = &matrix.pair {
            let x = self.inputs(pair, x, cols);
            let (u, r) = self.inner(pair, params, &x, cols);
            let b = Strided::rows(&params[pair.b.clone()], r).t();
            let sizes = Sizes { m, n: out, k: r };
            self.kernels.chains(
                sizes,
                Strided::rows(&u, r),
                b,
                ProductOutput::rows(&mut y, out).more(),
            );
        }
        if let Some(bias) = &matrix.bias {
            for y in y.chunks_mut(out) {
                y.iter_mut()
                    .zip(bias.get(params))
                    .for_each(|(y, b)| *y += b);
            }
        }
        y
    }

    /// The inputs of a pair: those of its matrix, but for those that chance leaves out.
    fn inputs<'x>(&self, pair: &AdapterFactors, x: &'x [f32], cols: usize) -> Cow<'x, [f32]> {
        let Some(dropout) = self.dropout else {
            return Cow::Borrowed(x);
        };
        let mut x = x.to_vec();
        pool::chunks(self.kernels.pool(), &mut x, cols, |row, x| {
            dropout.apply(pair.number, row, x);
        });
        Cow::Owned(x)
    }

    /// s x A^T (T, r), and r; x as [`inputs`](Self::inputs) gives it.
    fn inner(
        &self,
        pair: &AdapterFactors,
        params: &[f32],
        x: &[f32],
        cols: usize,
    ) -> (Vec<f32>, usize) {
        let (m, r) = (x.len() / cols, pair.a.len() / cols);
        let mut u = vec![0.0; m * r];
        let a = Strided::rows(&params[pair.a.clone()], cols).t();
        let sizes = Sizes { m, n: r, k: cols };
        self.kernels.chains(
            sizes,
            Strided::rows(x, cols),
            a,
            ProductOutput::rows(&mut u, r),
        );
        u.iter_mut().for_each(|u| *u *= self.scale);
        (u, r)
    }

    /// dy (T, out) at the input x (T, in) -> dx (T, in), which starts at 0 or at the given values.
    /// The chain over W's rows continues over the rank. Adds the gradients of trained values to
    /// `grads`.
    pub(crate) fn linear_back(
        &self,
        (matrix, x): (&Matrix, &[f32]),
        params: &[f32],
        dy: &[f32],
        (dx, goes_on): (&mut [f32], bool),
        grads: &mut [f32],
    ) {
        let (out, cols) = (matrix.rows, matrix.cols);
        let m = x.len() / cols;
        matrix.tiles(params, self.kernels, |rows, tile| {
            let sizes = Sizes {
                m,
                n: cols,
                k: rows.len(),
            };
            let dy = Strided {
                values: &dy[rows.start..],
                row: out,
                col: 1,
            };
            let goes_on = goes_on || rows.start > 0;
            let at = ProductOutput {
                values: &mut *dx,
                stride: cols,
                goes_on,
            };
            self.kernels
                .chains(sizes, dy, Strided::rows(tile, cols), at);
        });
        if let Some(pair) = &matrix.pair {
            self.pair_back((matrix, pair, x), params, dy, dx, grads);
        }
        if let MatrixStorage::Trained(range) = &matrix.kept {
            let sizes = Sizes {
                m: out,
                n: cols,
                k: m,
            };
            let at = ProductOutput::rows(&mut grads[range.clone()], cols).more();
            self.kernels.chains(
                sizes,
                Strided::rows(dy, out).t(),
                Strided::rows(x, cols),
                at,
            );
        }
        if let Some(db) = matrix.bias.as_ref().and_then(|bias| bias.grads(grads)) {
            for dy in dy.chunks(out) {
                db.iter_mut().zip(dy).for_each(|(db, dy)| *db += dy);
            }
        }
    }

    /// dB = dy^T (s u), dA = (s dy B)^T x, and what the pair adds to dx.
    fn pair_back(
        &self,
        (matrix, pair, x): (&Matrix, &AdapterFactors, &[f32]),
        params: &[f32],
        dy: &[f32],
        dx: &mut [f32],
        grads: &mut [f32],
    ) {
        let (out, cols) = (matrix.rows, matrix.cols);
        let x = self.inputs(pair, x, cols);
        let (u, r) = self.inner(pair, params, &x, cols);
        let m = x.len() / cols;
        let dy = Strided::rows(dy, out);
        // Shape (r, out), so that lanes run along the long side.
        let mut db = vec![0.0; r * out];
        let at = ProductOutput::rows(&mut db, out);
        self.kernels.chains(
            Sizes { m: r, n: out, k: m },
            Strided::rows(&u, r).t(),
            dy,
            at,
        );
        for (i, grad) in grads[pair.b.clone()].iter_mut().enumerate() {
            *grad += db[i % r * out + i / r];
        }
        let mut du = vec![0.0; m * r];
        let b = Strided::rows(&params[pair.b.clone()], r);
        self.kernels.chains(
            Sizes { m, n: r, k: out },
            dy,
            b,
            ProductOutput::rows(&mut du, r),
        );
        du.iter_mut().for_each(|du| *du *= self.scale);
        let du = Strided::rows(&du, r);
        let at = ProductOutput::rows(&mut grads[pair.a.clone()], cols).more();
        self.kernels.chains(
            Sizes {
                m: r,
                n: cols,
                k: m,
            },
            du.t(),
            Strided::rows(&x, cols),
            at,
        );
        let a = Strided::rows(&params[pair.a.clone()], cols);
        let sizes = Sizes { m, n: cols, k: r };
        let Some(dropout) = self.dropout else {
            let at = ProductOutput::rows(dx, cols).more();
            return self.kernels.chains(sizes, du, a, at);
        };
        let mut through = vec![0.0; m * cols];
        let at = ProductOutput::rows(&mut through, cols);
        self.kernels.chains(sizes, du, a, at);
        pool::chunks(self.kernels.pool(), dx, cols, |row, dx| {
            dropout.add(pair.number, row, &through[row * cols..], dx);
        });
    }
}
