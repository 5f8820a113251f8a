//! The bias that the tokens before add to a draft token's logits, so that tokens of a block fit
//! each other.
//!
//! ```text
//! token before --table--> e (R)    h (C): the normed place    s (R): state, 0 before the block
//! vanilla    W e
//! gated      W (g e)         g = sigmoid(gate [h e])
//! rnn        W tanh(o)       [g c o] = joint [s e h];   s = g s + (1 - g) tanh(c), with sigmoid(g)
//! ```

use paceline_tensor::{Activations, Kernels, PackedMatrix};
use serde_json::{Value, json};

use crate::draft_head::rows::product;
use crate::eagle::{HeadReader, MAX_SIZE, wrong};
use crate::weights::StoredTensor;
use crate::{Error, HeadConfig};

/// The form of a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkovKind {
    Vanilla,
    Gated,
    Rnn,
}

/// The form and the rank R of the bias in a `config.json`; `None` without.
pub(super) fn of_config(json: &Value) -> Result<Option<(MarkovKind, usize)>, Error> {
    let (kind, rank) = (&json["markov_head_type"], &json["markov_rank"]);
    if rank.is_null() || *rank == json!(0) {
        return Ok(None);
    }
    let kind = match kind.as_str() {
        Some("gated") => MarkovKind::Gated,
        Some("rnn") => MarkovKind::Rnn,
        Some("vanilla") => MarkovKind::Vanilla,
        None if kind.is_null() => MarkovKind::Vanilla,
        _ => return Err(wrong("markov_head_type", kind, "vanilla, gated or rnn")),
    };
    let fits = rank.as_u64().filter(|n| (1..=MAX_SIZE).contains(n));
    let rank_of = fits.ok_or_else(|| wrong("markov_rank", rank, format!("1 to {MAX_SIZE}")))?;
    Ok(Some((kind, rank_of as usize)))
}

/// The weights of a bias.
#[derive(Debug)]
pub(super) struct Markov {
    kind: MarkovKind,
    /// `(vocabulary of the model, R)` and `(draft vocabulary, R)`
    table: StoredTensor,
    output: PackedMatrix,
    /// `(R, C + R)` and `(R,)` with a gate, `(3 R, 2 R + C)` and `(3 R,)` with a state.
    mix: Option<(PackedMatrix, Vec<f32>)>,
}

impl Markov {
    pub(super) fn read(
        reader: HeadReader<'_>,
        (kind, rank): (MarkovKind, usize),
        shape: &HeadConfig,
        vocab: usize,
    ) -> Result<Self, Error> {
        let name = |stem: &str| format!("markov_head.{stem}");
        let mix = |stem: &str, rows, cols| {
            let bias = reader.folder.tensor(&name(&format!("{stem}.bias")))?;
            let matrix = reader.matrix(&name(stem), rows, cols)?;
            Ok::<_, Error>((matrix, crate::weights::vector(&bias, rows)?))
        };
        let c = shape.width;
        Ok(Self {
            kind,
            table: StoredTensor::Whole(reader.tensor(&name("markov_w1"), &[vocab, rank])?),
            output: reader.matrix(&name("markov_w2"), shape.draft_vocab, rank)?,
            mix: match kind {
                MarkovKind::Vanilla => None,
                MarkovKind::Gated => Some(mix("gate_proj", rank, c + rank)?),
                MarkovKind::Rnn => Some(mix("joint_proj", 3 * rank, 2 * rank + c)?),
            },
        })
    }

    pub(super) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let mix = self.mix.as_ref().map(|(matrix, _)| matrix);
        [&self.output].into_iter().chain(mix)
    }

    pub(super) const fn has_state(&self) -> bool {
        matches!(self.kind, MarkovKind::Rnn)
    }
}

/// Buffers of a bias, for one block at a time.
#[derive(Debug)]
pub(super) struct MarkovRow {
    /// `(1, R)`, `(1, columns of the mix)`, quantised
    before: Activations,
    mixed: Option<Activations>,
    /// `(R,)` or `(3 R,)`: sums of the mix.
    gates: Vec<f32>,
    /// `(R,)`
    state: Vec<f32>,
    /// `(draft vocabulary,)`
    bias: Vec<f32>,
}

impl MarkovRow {
    /// `row` makes a buffer of one row for products with a matrix.
    pub(super) fn new(of: &Markov, row: impl Fn(&PackedMatrix) -> Activations) -> Self {
        let mix = of.mix.as_ref().map(|(matrix, _)| matrix);
        Self {
            before: row(&of.output),
            mixed: mix.map(row),
            gates: vec![0.0; mix.map_or(0, PackedMatrix::rows)],
            state: vec![0.0; of.output.cols()],
            bias: vec![0.0; of.output.rows()],
        }
    }

    /// Begins a block.
    pub(super) fn begin(&mut self) {
        self.state.fill(0.0);
    }

    /// The bias of the place whose normed residual is `hidden` `(C,)`, after the token `previous`.
    pub(super) fn bias(
        &mut self,
        of: &Markov,
        kernels: &Kernels,
        (previous, hidden): (u32, &[f32]),
    ) -> &mut [f32] {
        of.table.row(previous, self.before.values_mut());
        if let (Some((matrix, bias)), Some(mixed)) = (&of.mix, &mut self.mixed) {
            let (e, s) = (self.before.values(), &self.state[..]);
            let parts: &[&[f32]] = match of.kind {
                MarkovKind::Rnn => &[s, e, hidden],
                _ => &[hidden, e],
            };
            let values = parts.iter().flat_map(|part| part.iter());
            mixed
                .values_mut()
                .iter_mut()
                .zip(values)
                .for_each(|(to, x)| *to = *x);
            kernels.quantise(mixed);
            kernels.products(mixed, [product(&mut self.gates, matrix, 1)]);
            self.gates.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            self.mix(of.kind);
        }
        kernels.quantise(&mut self.before);
        kernels.products(&self.before, [product(&mut self.bias, &of.output, 1)]);
        &mut self.bias
    }

    /// Applies the gates: to the token's row, or to the state, which replaces that row.
    fn mix(&mut self, kind: MarkovKind) {
        let (rank, e) = (self.state.len(), self.before.values_mut());
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let (gates, rest) = self.gates.split_at(rank);
        for (r, gate) in gates.iter().map(|x| sigmoid(*x)).enumerate() {
            if kind == MarkovKind::Gated {
                e[r] *= gate;
                continue;
            }
            self.state[r] = gate * self.state[r] + (1.0 - gate) * rest[r].tanh();
            e[r] = rest[rank + r].tanh();
        }
    }
}
