//! Weights of residual streams; whole on every rank.

use paceline_tensor::PackedMatrix;

use super::alternating::Alternation;
use super::loader::ShardLoader;
use crate::config::StreamRule;
use crate::role::StreamPart;
use crate::{Error, LayerRole, Role};

/// A layer's weights of several residual streams.
#[derive(Debug)]
pub(crate) enum LayerStreams {
    /// Before attention and before the feed-forward.
    Gated(Box<[StreamMix; 2]>),
    Alternating(Box<Alternation>),
}

/// From several residual streams to the input of the output head.
#[derive(Debug)]
pub(crate) enum HeadStreams {
    Gated(Box<StreamMix>),
    /// `(C, C)` of each stream but the first.
    Alternating(Vec<PackedMatrix>),
}

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

impl LayerStreams {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Gated(mixes) => mixes.iter().map(StreamMix::bytes).sum(),
            Self::Alternating(own) => own.bytes(),
        }
    }

    /// The mixes before both halves.
    pub(crate) fn mixes(&self) -> &[StreamMix] {
        match self {
            Self::Gated(mixes) => &mixes[..],
            Self::Alternating(_) => &[],
        }
    }

    pub(crate) const fn alternation(&self) -> Option<&Alternation> {
        match self {
            Self::Alternating(own) => Some(own),
            Self::Gated(_) => None,
        }
    }
}

impl HeadStreams {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Gated(mix) => mix.bytes(),
            Self::Alternating(ends) => ends.iter().map(|matrix| matrix.bytes().0).sum(),
        }
    }

    pub(crate) fn mix(&self) -> Option<&StreamMix> {
        match self {
            Self::Gated(mix) => Some(mix),
            Self::Alternating(_) => None,
        }
    }

    /// Matrices whose input is as wide as a stream.
    pub(crate) fn of_width(&self) -> &[PackedMatrix] {
        match self {
            Self::Gated(_) => &[],
            Self::Alternating(ends) => ends,
        }
    }
}

impl StreamMix {
    fn bytes(&self) -> u64 {
        let all = self.of_normed().chain([&self.up]);
        all.map(|matrix| matrix.bytes().0).sum()
    }

    /// Matrices whose input is all streams.
    pub(crate) fn of_normed(&self) -> impl Iterator<Item = &PackedMatrix> {
        [&self.down].into_iter().chain(&self.inject)
    }
}

impl ShardLoader<'_> {
    /// The streams of a layer; `None` in models of one stream.
    pub(super) fn layer_streams(&self, layer: usize) -> Result<Option<LayerStreams>, Error> {
        let role = |part| Role::Layer(layer, part);
        let Some(of) = self.config.streams else {
            return Ok(None);
        };
        Ok(Some(match of.rule {
            StreamRule::Gated => LayerStreams::Gated(Box::new([
                self.stream_mix(|part| role(LayerRole::AttentionStreams(part)), true)?,
                self.stream_mix(|part| role(LayerRole::FfnStreams(part)), true)?,
            ])),
            StreamRule::Alternating => {
                LayerStreams::Alternating(Box::new(self.alternation(layer)?))
            }
        }))
    }

    /// The streams before the output head; `None` in models of one stream.
    pub(crate) fn head_streams(&self) -> Result<Option<HeadStreams>, Error> {
        let Some(of) = self.config.streams else {
            return Ok(None);
        };
        Ok(Some(match of.rule {
            StreamRule::Gated => {
                HeadStreams::Gated(Box::new(self.stream_mix(Role::Streams, false)?))
            }
            StreamRule::Alternating => {
                HeadStreams::Alternating(self.stream_ends(StreamPart::Collapse)?)
            }
        }))
    }

    /// Matrices `(C, C)` from the embedding to each stream but the first; empty where all streams
    /// begin as the embedding.
    pub(crate) fn first_streams(&self) -> Result<Vec<PackedMatrix>, Error> {
        match self.config.streams.map(|of| of.rule) {
            Some(StreamRule::Alternating) if self.shard.embeds() => {
                self.stream_ends(StreamPart::Expand)
            }
            _ => Ok(Vec::new()),
        }
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
