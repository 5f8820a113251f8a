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
    /// As `Gated`.
    Constrained(Box<[ConstrainedMix; 2]>),
    /// `(C,)` each, as `Gated`: a stream's score is the product with its norm.
    Attended([Vec<f32>; 2]),
}

/// From several residual streams to the input of the output head.
#[derive(Debug)]
pub(crate) enum HeadStreams {
    Gated(Box<StreamMix>),
    /// `(C, C)` of each stream but the first.
    Alternating(Vec<PackedMatrix>),
    /// `None` for the mean.
    Constrained(Option<Box<ConstrainedMix>>),
    /// `(C,)`, as in layers.
    Attended(Vec<f32>),
}

/// Weights of constrained streams: before a half, or before the output head.
#[derive(Debug)]
pub(crate) struct ConstrainedMix {
    /// `(2 S + S S, S C)` or `(S, S C)`, in f32.
    pub(crate) matrix: PackedMatrix,
    /// `(2 S + S S,)` or `(S,)`
    pub(crate) base: Vec<f32>,
    /// `(3,)` or `(1,)`
    pub(crate) scale: Vec<f32>,
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
            Self::Constrained(mixes) => mixes.iter().map(|mix| mix.matrix.bytes().0).sum(),
            Self::Attended(_) => 0,
        }
    }

    /// The mixes before both halves.
    pub(crate) fn mixes(&self) -> &[StreamMix] {
        match self {
            Self::Gated(mixes) => &mixes[..],
            _ => &[],
        }
    }

    /// The weights before both halves.
    pub(crate) fn constrained(&self) -> &[ConstrainedMix] {
        match self {
            Self::Constrained(mixes) => &mixes[..],
            _ => &[],
        }
    }

    /// Scores of attended streams before both halves.
    ///
    /// # Panics
    /// If they are others.
    pub(crate) fn scores(&self) -> &[Vec<f32>; 2] {
        match self {
            Self::Attended(scores) => scores,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) const fn alternation(&self) -> Option<&Alternation> {
        match self {
            Self::Alternating(own) => Some(own),
            _ => None,
        }
    }
}

impl HeadStreams {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Gated(mix) => mix.bytes(),
            Self::Alternating(ends) => ends.iter().map(|matrix| matrix.bytes().0).sum(),
            Self::Constrained(mix) => mix.as_ref().map_or(0, |mix| mix.matrix.bytes().0),
            Self::Attended(_) => 0,
        }
    }

    pub(crate) fn mix(&self) -> Option<&StreamMix> {
        match self {
            Self::Gated(mix) => Some(mix),
            _ => None,
        }
    }

    pub(crate) fn constrained(&self) -> Option<&ConstrainedMix> {
        match self {
            Self::Constrained(mix) => mix.as_deref(),
            _ => None,
        }
    }

    /// Matrices whose input is as wide as a stream.
    pub(crate) fn of_width(&self) -> &[PackedMatrix] {
        match self {
            Self::Alternating(ends) => ends,
            _ => &[],
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
            StreamRule::Constrained(_) => {
                let lens = ((2 + of.count) * of.count, 3);
                LayerStreams::Constrained(Box::new([
                    self.constrained_mix(|part| role(LayerRole::AttentionStreams(part)), lens)?,
                    self.constrained_mix(|part| role(LayerRole::FfnStreams(part)), lens)?,
                ]))
            }
            StreamRule::Attended { .. } => LayerStreams::Attended([
                self.stream_scores(|part| role(LayerRole::AttentionStreams(part)))?,
                self.stream_scores(|part| role(LayerRole::FfnStreams(part)))?,
            ]),
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
            StreamRule::Constrained(constraint) => {
                let mix = || self.constrained_mix(Role::Streams, (of.count, 1));
                let mix = constraint.weighs_head.then(mix).transpose()?;
                HeadStreams::Constrained(mix.map(Box::new))
            }
            StreamRule::Attended { .. } => {
                HeadStreams::Attended(self.stream_scores(Role::Streams)?)
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

    /// `rows` weights of `kinds` kinds.
    fn constrained_mix(
        &self,
        role: impl Fn(StreamPart) -> Role,
        (rows, kinds): (usize, usize),
    ) -> Result<ConstrainedMix, Error> {
        let shape = [rows, self.config.residual_width()];
        Ok(ConstrainedMix {
            matrix: self.whole(role(StreamPart::Weigh), shape, true)?,
            base: self.names.finite(role(StreamPart::WeighBias), rows)?,
            scale: self.names.finite(role(StreamPart::WeighScale), kinds)?,
        })
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

    /// Scores of attended streams, with the weights of the norm before them.
    fn stream_scores(&self, role: impl Fn(StreamPart) -> Role) -> Result<Vec<f32>, Error> {
        let width = self.config.width;
        let mut scores = self.floats(role(StreamPart::Scores), [1, width])?;
        let norm = self.names.norm(role(StreamPart::ScoreNorm), width)?;
        scores.iter_mut().zip(norm).for_each(|(x, norm)| *x *= norm);
        Ok(scores)
    }
}
