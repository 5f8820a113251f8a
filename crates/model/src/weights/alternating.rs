//! Weights of alternating residual streams (Gemma 3n); whole on every rank.

use paceline_tensor::PackedMatrix;

use super::loader::ShardLoader;
use crate::role::StreamPart;
use crate::{Error, LayerRole, Role};

/// A layer's map of S streams, and the low-rank path parallel to its attention.
#[derive(Debug)]
pub(crate) struct Alternation {
    /// `(C,)`: norm of the router's input, divided by C.
    pub(crate) router_norm: Vec<f32>,
    /// `(S, C)`, in f32.
    pub(crate) router: PackedMatrix,
    /// `(S, S, S)`: target stream, source stream, output of the router.
    pub(crate) predict: Vec<f32>,
    /// `(S, S)`: stream, output of the router.
    pub(crate) correct: Vec<f32>,
    /// `(C,)`: factors of the first stream for the per-layer embeddings.
    pub(crate) scale: Vec<f32>,
    /// `(R, C)`
    pub(crate) laurel_down: PackedMatrix,
    /// `(C, R)`
    pub(crate) laurel_up: PackedMatrix,
    /// `(C,)`
    pub(crate) laurel_norm: Vec<f32>,
}

impl Alternation {
    pub(crate) fn bytes(&self) -> u64 {
        let all = self.of_width().into_iter().chain([&self.laurel_up]);
        all.map(|matrix| matrix.bytes().0).sum()
    }

    /// Matrices whose input is as wide as a stream.
    pub(crate) const fn of_width(&self) -> [&PackedMatrix; 2] {
        [&self.router, &self.laurel_down]
    }
}

impl ShardLoader<'_> {
    pub(super) fn alternation(&self, layer: usize) -> Result<Alternation, Error> {
        let of = self.config.streams.expect("the model has streams");
        let (n, rank, width) = (of.count, of.rank, self.config.width);
        let role = |part| Role::Layer(layer, part);
        let stream = |part| role(LayerRole::AttentionStreams(part));
        let mut router_norm = self.names.norm(stream(StreamPart::RouterNorm), width)?;
        let part = 1.0 / width as f32;
        router_norm.iter_mut().for_each(|x| *x *= part);
        Ok(Alternation {
            router_norm,
            router: self.whole(stream(StreamPart::Router), [n, width], true)?,
            predict: self.floats(stream(StreamPart::Predict), [n * n, n])?,
            correct: self.floats(stream(StreamPart::Correct), [n, n])?,
            scale: self.names.finite(stream(StreamPart::OutputScale), width)?,
            laurel_down: self.whole(role(LayerRole::LaurelDown), [rank, width], false)?,
            laurel_up: self.whole(role(LayerRole::LaurelUp), [width, rank], false)?,
            laurel_norm: self.names.norm(role(LayerRole::LaurelNorm), width)?,
        })
    }

    /// The matrices `(C, C)` between one stream and the further ones, by `part`; empty in other
    /// models.
    pub(super) fn stream_ends(
        &self,
        part: impl Fn(usize) -> StreamPart,
    ) -> Result<Vec<PackedMatrix>, Error> {
        let (of, width) = (self.config.streams, self.config.width);
        let further = 1..of.map_or(1, |of| of.count);
        let matrix = |i: usize| self.whole(Role::Streams(part(i - 1)), [width, width], false);
        further.map(matrix).collect()
    }

    /// A small matrix as floats, row by row.
    pub(super) fn floats(&self, role: Role, [rows, cols]: [usize; 2]) -> Result<Vec<f32>, Error> {
        let stored = self.names.as_stored(role, [rows, cols])?;
        let mut out = vec![0.0; rows * cols];
        let each = out.chunks_exact_mut(cols).zip(0..);
        each.for_each(|(out, row)| stored.row(row, out));
        Ok(out)
    }
}
