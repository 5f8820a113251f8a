//! Weights of several residual streams; whole on every rank.
//!
//! Letters: S streams of C elements, R the rank of a gated mix or of the path parallel to
//! attention.

use paceline_mlx::Array;
use paceline_model::{Config, Error, LayerRole, Role, StreamPart, StreamRule};

use super::super::matrix::Linear;
use super::Loader;

/// A layer's weights, before attention and before the feed-forward.
#[derive(Debug)]
pub(crate) enum LayerStreams {
    Gated(Box<[StreamMix; 2]>),
    Alternating(Box<Alternation>),
    Constrained(Box<[ConstrainedMix; 2]>),
    /// `(C, 1)` each, in f32: a stream's score is the product with its norm.
    Attended([Array; 2]),
}

/// Weights before the output head.
#[derive(Debug)]
pub(crate) enum HeadStreams {
    Gated(Box<StreamMix>),
    /// `(C, C)` of each stream but the first.
    Alternating(Vec<Linear>),
    /// `None` for the mean, and for the weights of the last half.
    Constrained(Option<Box<ConstrainedMix>>),
    /// `(C, 1)`, as in layers.
    Attended(Array),
}

/// A mix of gated streams.
#[derive(Debug)]
pub(crate) struct StreamMix {
    /// `(1, S, C)`, in f32.
    pub(crate) norm: Array,
    /// `(R, S C)`
    pub(crate) down: Linear,
    /// `(S C, R)`
    pub(crate) up: Linear,
    /// `(S C, S)`, in f32; `None` before the output head.
    pub(crate) inject: Option<Array>,
}

/// Weights of constrained streams: n is 2 S + S S before a half, S before the output head.
#[derive(Debug)]
pub(crate) struct ConstrainedMix {
    /// `(S C, n)`, in f32.
    pub(crate) matrix: Array,
    /// `(n,)` each, in f32: bias and factor.
    pub(crate) base: Array,
    pub(crate) scale: Array,
}

/// A layer's map of alternating streams, and the low-rank path parallel to its attention.
#[derive(Debug)]
pub(crate) struct Alternation {
    /// `(C,)`: norm of the router's input, divided by C.
    pub(crate) router_norm: Array,
    /// `(C, S)`, in f32.
    pub(crate) router: Array,
    /// `(S, S S)`, in f32: from the router to target streams of source streams.
    pub(crate) predict: Array,
    /// `(S, S)`, in f32: from the router to streams.
    pub(crate) correct: Array,
    /// `(C,)`: factors of the first stream for the layer's own embeddings.
    pub(crate) scale: Array,
    /// `(R, C)` and `(C, R)`
    pub(crate) laurel: [Linear; 2],
    /// `(C,)`
    pub(crate) laurel_norm: Array,
}

impl StreamMix {
    fn arrays(&self) -> Vec<&Array> {
        let linears = [&self.down, &self.up].into_iter().flat_map(Linear::arrays);
        linears.chain([&self.norm]).chain(&self.inject).collect()
    }
}

impl ConstrainedMix {
    const fn arrays(&self) -> [&Array; 3] {
        [&self.matrix, &self.base, &self.scale]
    }
}

impl Alternation {
    fn arrays(&self) -> Vec<&Array> {
        let own = [
            &self.router_norm,
            &self.router,
            &self.predict,
            &self.correct,
            &self.scale,
            &self.laurel_norm,
        ];
        let laurel = self.laurel.iter().flat_map(Linear::arrays);
        laurel.chain(own).collect()
    }
}

impl LayerStreams {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Gated(mixes) => mixes.iter().flat_map(StreamMix::arrays).collect(),
            Self::Alternating(own) => own.arrays(),
            Self::Constrained(mixes) => {
                let mixes = mixes.iter();
                mixes.flat_map(ConstrainedMix::arrays).collect()
            }
            Self::Attended(scores) => scores.iter().collect(),
        }
    }

    /// # Panics
    /// If the streams are others.
    pub(crate) fn alternation(&self) -> &Alternation {
        match self {
            Self::Alternating(own) => own,
            other => panic!("{other:?}"),
        }
    }
}

impl HeadStreams {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Gated(mix) => mix.arrays(),
            Self::Alternating(ends) => ends.iter().flat_map(Linear::arrays).collect(),
            Self::Constrained(mix) => {
                let mix = mix.iter();
                mix.flat_map(|mix| mix.arrays()).collect()
            }
            Self::Attended(scores) => vec![scores],
        }
    }
}

/// Matrices of streams that a rank holds: of `layer`, or at the ends of the model. A rank that
/// `embeds` has the embedding's, the last one the output head's.
pub(super) fn stream_matrices(
    c: &Config,
    layer: Option<usize>,
    [embeds, has_head]: [bool; 2],
) -> Vec<(Role, [usize; 2])> {
    let Some(of) = c.streams else {
        return Vec::new();
    };
    let (n, rank, width, all) = (of.count, of.rank, c.width, c.residual_width());
    let gated = |role: &dyn Fn(StreamPart) -> Role, injects: bool| {
        let mut own = vec![
            (role(StreamPart::Down), [rank, all]),
            (role(StreamPart::Up), [all, rank]),
        ];
        own.extend(injects.then(|| (role(StreamPart::Inject), [n, all])));
        own
    };
    let Some(layer) = layer else {
        let ends = |part: fn(usize) -> StreamPart| {
            (1..n).map(move |i| (Role::Streams(part(i - 1)), [width, width]))
        };
        return match of.rule {
            StreamRule::Alternating => {
                let first = ends(StreamPart::Expand).filter(|_| embeds);
                let last = ends(StreamPart::Collapse).filter(|_| has_head);
                first.chain(last).collect()
            }
            StreamRule::Gated if has_head => gated(&Role::Streams, false),
            _ => Vec::new(),
        };
    };
    let halves = [LayerRole::AttentionStreams, LayerRole::FfnStreams];
    match of.rule {
        StreamRule::Gated => {
            let half = |part: fn(StreamPart) -> LayerRole| {
                gated(&|own| Role::Layer(layer, part(own)), true)
            };
            halves.into_iter().flat_map(half).collect()
        }
        StreamRule::Constrained(_) => {
            let each = (2 + n) * n;
            let role = |part: fn(StreamPart) -> LayerRole| part(StreamPart::Weigh);
            let own = halves.map(|part| (Role::Layer(layer, role(part)), [each, all]));
            own.to_vec()
        }
        StreamRule::Alternating => vec![
            (Role::Layer(layer, LayerRole::LaurelDown), [rank, width]),
            (Role::Layer(layer, LayerRole::LaurelUp), [width, rank]),
        ],
        StreamRule::Attended { .. } => Vec::new(),
    }
}

impl Loader<'_> {
    /// The streams of a layer; `None` in models of one stream.
    pub(super) fn layer_streams(&self, layer: usize) -> Result<Option<LayerStreams>, Error> {
        let Some(of) = self.config.streams else {
            return Ok(None);
        };
        let attention = |part| Role::Layer(layer, LayerRole::AttentionStreams(part));
        let ffn = |part| Role::Layer(layer, LayerRole::FfnStreams(part));
        Ok(Some(match of.rule {
            StreamRule::Gated => LayerStreams::Gated(Box::new([
                self.stream_mix(attention, true)?,
                self.stream_mix(ffn, true)?,
            ])),
            StreamRule::Alternating => {
                LayerStreams::Alternating(Box::new(self.alternation(layer)?))
            }
            StreamRule::Constrained(_) => LayerStreams::Constrained(Box::new([
                self.constrained_mix(attention, 2 + of.count)?,
                self.constrained_mix(ffn, 2 + of.count)?,
            ])),
            StreamRule::Attended { .. } => {
                LayerStreams::Attended([self.stream_scores(attention)?, self.stream_scores(ffn)?])
            }
        }))
    }

    /// The streams before the output head; `None` in models of one stream.
    pub(super) fn head_streams(&self) -> Result<Option<HeadStreams>, Error> {
        let Some(of) = self.config.streams.filter(|_| self.shard.has_head()) else {
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
                let mix = || self.constrained_mix(Role::Streams, 1);
                let mix = constraint.weighs_head.then(mix).transpose()?;
                HeadStreams::Constrained(mix.map(Box::new))
            }
            StreamRule::Attended { .. } => {
                HeadStreams::Attended(self.stream_scores(Role::Streams)?)
            }
        }))
    }

    /// Matrices `(C, C)` from the embedding to each stream but the first; empty where all streams
    /// begin as the embedding, and in later stages.
    pub(super) fn first_streams(&self) -> Result<Vec<Linear>, Error> {
        match self.config.streams.map(|of| of.rule) {
            Some(StreamRule::Alternating) if self.shard.embeds() => {
                self.stream_ends(StreamPart::Expand)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// A matrix of all streams or of one, in any form.
    fn whole(&self, role: Role, shape: [usize; 2]) -> Result<Linear, Error> {
        self.rows(role, shape, 0..shape[0])
    }

    /// A matrix `shape` in f32, transposed.
    fn across(&self, role: Role, shape: [usize; 2]) -> Result<Array, Error> {
        self.wide_rows(role, shape, std::slice::from_ref(&(0..shape[0])))
    }

    fn stream_mix(
        &self,
        role: impl Fn(StreamPart) -> Role,
        injects: bool,
    ) -> Result<StreamMix, Error> {
        let of = self.config.streams.expect("the model has streams");
        let (n, all) = (of.count, self.config.residual_width());
        let norm = self.wide(&self.names.norm(role(StreamPart::Norm), all)?)?;
        let shape = [1, n as i32, self.config.width as i32];
        let inject = injects.then(|| self.across(role(StreamPart::Inject), [n, all]));
        Ok(StreamMix {
            norm: self.stream.reshape(&norm, &shape)?,
            down: self.whole(role(StreamPart::Down), [of.rank, all])?,
            up: self.whole(role(StreamPart::Up), [all, of.rank])?,
            inject: inject.transpose()?,
        })
    }

    /// Weights of `parts` times S values: one kind of S before the output head, else three of S, S
    /// and S S.
    fn constrained_mix(
        &self,
        role: impl Fn(StreamPart) -> Role,
        parts: usize,
    ) -> Result<ConstrainedMix, Error> {
        let of = self.config.streams.expect("the model has streams");
        let (kinds, rows) = (parts.min(3), parts * of.count);
        let scale = self.names.finite(role(StreamPart::WeighScale), kinds)?;
        let scale: Vec<f32> = (0..rows).map(|i| scale[(i / of.count).min(2)]).collect();
        let base = self.names.finite(role(StreamPart::WeighBias), rows)?;
        let shape = [rows, self.config.residual_width()];
        Ok(ConstrainedMix {
            matrix: self.across(role(StreamPart::Weigh), shape)?,
            base: self.wide(&base)?,
            scale: self.wide(&scale)?,
        })
    }

    fn alternation(&self, layer: usize) -> Result<Alternation, Error> {
        let of = self.config.streams.expect("the model has streams");
        let (n, rank, width) = (of.count, of.rank, self.config.width);
        let role = |part| Role::Layer(layer, part);
        let stream = |part| role(LayerRole::AttentionStreams(part));
        let mut router_norm = self.names.norm(stream(StreamPart::RouterNorm), width)?;
        router_norm.iter_mut().for_each(|x| *x /= width as f32);
        Ok(Alternation {
            router_norm: self.wide(&router_norm)?,
            router: self.across(stream(StreamPart::Router), [n, width])?,
            predict: self.across(stream(StreamPart::Predict), [n * n, n])?,
            correct: self.across(stream(StreamPart::Correct), [n, n])?,
            scale: self.floats(&self.names.finite(stream(StreamPart::OutputScale), width)?)?,
            laurel: [
                self.whole(role(LayerRole::LaurelDown), [rank, width])?,
                self.whole(role(LayerRole::LaurelUp), [width, rank])?,
            ],
            laurel_norm: self.norm(role(LayerRole::LaurelNorm), width)?,
        })
    }

    /// The matrices between one stream and the further ones, by `part`.
    fn stream_ends(&self, part: impl Fn(usize) -> StreamPart) -> Result<Vec<Linear>, Error> {
        let (of, width) = (self.config.streams, self.config.width);
        let further = 1..of.map_or(1, |of| of.count);
        let matrix = |i: usize| self.whole(Role::Streams(part(i - 1)), [width, width]);
        further.map(matrix).collect()
    }

    /// Scores of attended streams, with the weights of the norm before them.
    fn stream_scores(&self, role: impl Fn(StreamPart) -> Role) -> Result<Array, Error> {
        let width = self.config.width;
        let scores = self.across(role(StreamPart::Scores), [1, width])?;
        let norm = self.wide(&self.names.norm(role(StreamPart::ScoreNorm), width)?)?;
        let norm = self.stream.reshape(&norm, &[width as i32, 1])?;
        Ok(self.stream.multiply(&scores, &norm)?)
    }
}
