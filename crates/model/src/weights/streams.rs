//! Weights of the mix of residual streams; whole on every rank.

use paceline_tensor::PackedMatrix;

use super::ShardLoader;
use crate::role::StreamPart;
use crate::{Error, LayerRole, Role};

/// A mix of S streams. Its matrices have rank R.
#[derive(Debug)]
pub(crate) struct StreamMix {
    /// `(S C,)`: norms of the streams.
    pub(crate) norm: Vec<f32>,
    /// `(R, S C)`
    pub(crate) down: PackedMatrix,
    /// `(S C, R)`
    pub(crate) up: PackedMatrix,
    /// `(S, S C)`, in f32; `None` before the output head.
    pub(crate) inject: Option<PackedMatrix>,
}

impl StreamMix {
    pub(crate) fn bytes(&self) -> u64 {
        let all = self.of_normed().chain([&self.up]);
        all.map(|matrix| matrix.bytes().0).sum()
    }

    /// Matrices whose input is all streams.
    pub(crate) fn of_normed(&self) -> impl Iterator<Item = &PackedMatrix> {
        [&self.down].into_iter().chain(&self.inject)
    }
}

impl ShardLoader<'_> {
    /// The mixes before the halves of a layer; `None` in models of one stream.
    pub(super) fn layer_streams(&self, layer: usize) -> Result<Option<[StreamMix; 2]>, Error> {
        if self.config.streams.is_none() {
            return Ok(None);
        }
        let role = |part| Role::Layer(layer, part);
        Ok(Some([
            self.stream_mix(|part| role(LayerRole::AttentionStreams(part)), true)?,
            self.stream_mix(|part| role(LayerRole::FfnStreams(part)), true)?,
        ]))
    }

    /// The mix before the output head; `None` in models of one stream.
    pub(crate) fn head_streams(&self) -> Result<Option<StreamMix>, Error> {
        let streams = self.config.streams;
        let mix = streams.map(|_| self.stream_mix(Role::Streams, false));
        mix.transpose()
    }

    fn stream_mix(
        &self,
        role: impl Fn(StreamPart) -> Role,
        injects: bool,
    ) -> Result<StreamMix, Error> {
        let of = self.config.streams.expect("the model has streams");
        let all = of.count * self.config.width;
        let whole = |part, shape, as_f32| self.whole(role(part), shape, as_f32);
        let inject = injects.then(|| whole(StreamPart::Inject, [of.count, all], true));
        Ok(StreamMix {
            norm: self.names.norm(role(StreamPart::Norm), all)?,
            down: whole(StreamPart::Down, [of.rank, all], false)?,
            up: whole(StreamPart::Up, [all, of.rank], false)?,
            inject: inject.transpose()?,
        })
    }
}
