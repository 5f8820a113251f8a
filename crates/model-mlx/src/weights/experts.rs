//! The router of a layer, and this rank's experts as stacks of matrices.

use std::cell::RefCell;
use std::ops::Range;

use paceline_mlx::{Array, DeviceKind, Dtype};
use paceline_model::{Error, Gating, LayerRole, Nth, Role};

use super::super::matrix::{Linear, Matrix};
use super::{Loader, Slots};

/// A matrix of experts: the role of the nth one, and its shape.
type Part = (fn(Nth) -> LayerRole, [usize; 2]);

/// The router, and a rank's experts. E experts, N of them held, F their width.
#[derive(Debug)]
pub(crate) struct Experts {
    /// `(C, E)`, in f32, and its bias.
    pub(crate) router: Linear,
    /// `(E,)`, in f32: added to weights for the choice alone.
    pub(crate) choice: Option<Array>,
    /// `(vocabulary, used experts)`, where tokens choose.
    pub(crate) table: Option<Array>,
    /// `(C,)`: the norm of what goes into the router, where that is not what goes into experts.
    pub(crate) router_norm: Option<Array>,
    /// `(E,)`, in f32: factors of weights.
    pub(crate) scales: Option<Array>,
    /// Experts that are chosen from, held by this rank.
    pub(crate) held: Range<usize>,
    /// None where it holds none, or has slots.
    pub(crate) routed: Option<Routed>,
    /// Where memory is limited.
    pub(crate) slots: Option<RefCell<Slots>>,
    /// Where this rank has it.
    pub(crate) shared: Option<Shared>,
    /// `None` where experts read and write whole rows.
    pub(crate) compression: Option<Compression>,
}

/// Matrices around experts of compressed rows, whole on every rank. L elements of such a row.
#[derive(Debug)]
pub(crate) struct Compression {
    /// `(L, C)`
    pub(crate) down: Linear,
    /// `(L,)`: the norm of the sum over experts.
    pub(crate) norm: Option<Array>,
    /// `(C, L)`
    pub(crate) up: Linear,
}

/// Experts that are chosen from, as stacks of N matrices.
#[derive(Debug)]
pub(crate) struct Routed {
    pub(crate) gate: Stack,
    /// None in families without gates.
    pub(crate) up: Option<Stack>,
    pub(crate) down: Stack,
}

impl Routed {
    pub(super) fn stacks(&self) -> impl Iterator<Item = &Stack> {
        [&self.gate].into_iter().chain(&self.up).chain([&self.down])
    }

    pub(super) fn stacks_mut(&mut self) -> impl Iterator<Item = &mut Stack> {
        let Self { gate, up, down } = self;
        [gate].into_iter().chain(up).chain([down])
    }
}

/// Matrices of experts, with their biases `(N, out)` where they have some.
#[derive(Debug)]
pub(crate) struct Stack {
    pub(crate) matrices: Matrix,
    pub(crate) biases: Option<Array>,
}

/// The expert of every row.
#[derive(Debug)]
pub(crate) struct Shared {
    /// `(C, 1)`, in f32; none where its weight is 1.
    pub(crate) router: Option<Array>,
    pub(crate) gate: Linear,
    /// None in families without gates.
    pub(crate) up: Option<Linear>,
    pub(crate) down: Linear,
}

impl Stack {
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.matrices.arrays().into_iter().chain(&self.biases)
    }
}

impl Experts {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let vectors = [&self.choice, &self.table, &self.router_norm, &self.scales];
        let stacks = self.routed.iter();
        let stacks = stacks.flat_map(Routed::stacks);
        let shared = self.shared.iter();
        let shared = shared.flat_map(|own| {
            let linears = [&own.gate].into_iter().chain(&own.up);
            let linears = linears.chain([&own.down]);
            linears.flat_map(Linear::arrays).chain(&own.router)
        });
        let around = self.compression.iter().flat_map(|own| {
            let linears = [&own.down, &own.up].into_iter();
            linears.flat_map(Linear::arrays).chain(&own.norm)
        });
        let router = self.router.arrays().chain(around);
        let all = router.chain(vectors.into_iter().flatten());
        all.chain(stacks.flat_map(Stack::arrays))
            .chain(shared)
            .collect()
    }
}

impl Experts {
    /// Bytes of the slots.
    pub(super) fn slot_bytes(&self) -> u64 {
        let slots = self.slots.as_ref().map(RefCell::borrow);
        slots.map_or(0, |slots| slots.arrays().map(Array::n_bytes).sum())
    }
}

impl Loader<'_> {
    pub(super) fn experts(
        &self,
        layer: usize,
        of: paceline_model::Experts,
    ) -> Result<Experts, Error> {
        let role = |part| Role::Layer(layer, part);
        let mine = self.shard.layer(layer).ffn();
        let held = mine.start.min(of.count)..mine.end.min(of.count);
        let vector = |there: bool, part| {
            let values = there.then(|| self.names.finite(role(part), of.count));
            let values = values.transpose()?;
            values.map(|values| self.wide(&values)).transpose()
        };
        let table = || {
            let table = self.names.expert_table(layer, of)?;
            let sizes = [self.config.vocab as i32, of.used as i32];
            Ok::<_, Error>(self.stream.array_u32(&table, &sizes)?)
        };
        let bias = self.names.bias(role(LayerRole::Router), of.count)?;
        let norm = of.scaled.then(|| self.names.router_norm(layer));
        let norm = norm.transpose()?.map(|norm| self.floats(&norm));
        let shared = (mine.end > of.count).then(|| self.shared(layer, of));
        let slots = self.files.slots.filter(|slots| *slots < held.len());
        let first = held.start..slots.map_or(held.end, |slots| held.start + slots);
        let routed = (!held.is_empty()).then(|| self.routed(layer, of, &first));
        let (routed, slots) = match (routed.transpose()?, slots) {
            (Some(routed), Some(_)) => {
                let slots = Slots::new(self.files, layer, (routed, first));
                (None, Some(RefCell::new(slots)))
            }
            (routed, _) => (routed, None),
        };
        Ok(Experts {
            router: Linear {
                matrix: Matrix::Float(self.router(role(LayerRole::Router), of.count)?),
                bias: bias.map(|bias| self.wide(&bias)).transpose()?,
            },
            choice: vector(of.corrected, LayerRole::RouterChoice)?,
            table: (of.gating == Gating::OfToken).then(table).transpose()?,
            router_norm: norm.transpose()?,
            scales: vector(of.scaled, LayerRole::ExpertScales)?,
            routed,
            slots,
            held,
            shared: shared.transpose()?,
            compression: self.compression(layer, of)?,
        })
    }

    fn compression(
        &self,
        layer: usize,
        of: paceline_model::Experts,
    ) -> Result<Option<Compression>, Error> {
        let Some(compressed) = of.compressed else {
            return Ok(None);
        };
        let (width, row) = (self.config.width, compressed.width);
        let role = |part| Role::Layer(layer, part);
        let norm = || self.norm(role(LayerRole::ExpertsNorm), row);
        Ok(Some(Compression {
            down: self.rows(role(LayerRole::ExpertsDown), [row, width], 0..row)?,
            norm: compressed.normed.then(norm).transpose()?,
            up: self.rows(role(LayerRole::ExpertsUp), [width, row], 0..width)?,
        }))
    }

    /// A router's `rows` rows across, in f32 as on the CPU.
    fn router(&self, role: Role, rows: usize) -> Result<Array, Error> {
        let shape = [rows, self.config.width];
        self.names.check_router(role, shape)?;
        self.wide_rows(role, shape, std::slice::from_ref(&(0..rows)))
    }

    fn shared(&self, layer: usize, of: paceline_model::Experts) -> Result<Shared, Error> {
        let (width, ffn) = (self.config.width, of.shared);
        let linear =
            |part, shape: [usize; 2]| self.rows(Role::Layer(layer, part), shape, 0..shape[0]);
        let router = of.shared_gate;
        let router = router.then(|| self.router(Role::Layer(layer, LayerRole::SharedRouter), 1));
        Ok(Shared {
            router: router.transpose()?,
            gate: linear(LayerRole::SharedGate, [ffn, width])?,
            up: self.gated(|| linear(LayerRole::SharedUp, [ffn, width]))?,
            down: linear(LayerRole::SharedDown, [width, ffn])?,
        })
    }

    fn routed(
        &self,
        layer: usize,
        of: paceline_model::Experts,
        held: &Range<usize>,
    ) -> Result<Routed, Error> {
        let (gate, up, down) = self.parts(of);
        let stack = |part| self.stack(layer, part, of.count, held);
        Ok(Routed {
            gate: stack(gate)?,
            up: up.map(stack).transpose()?,
            down: stack(down)?,
        })
    }

    /// Gate, up and down of an expert, as stacks take them.
    pub(super) fn expert(&self, layer: usize, index: usize) -> Result<Vec<Matrix>, Error> {
        let of = self.config.layers[layer].experts;
        let of = of.expect("the layer has experts");
        let nth = Nth {
            index,
            of: of.count,
        };
        let (gate, up, down) = self.parts(of);
        let parts = [gate].into_iter().chain(up).chain([down]);
        parts.map(|part| self.of_expert(layer, part, nth)).collect()
    }

    /// Roles and shapes of gate, up and down; no up in families without gates.
    fn parts(&self, of: paceline_model::Experts) -> (Part, Option<Part>, Part) {
        let (width, ffn) = (of.row_width(self.config.width), of.width);
        let up: Part = (LayerRole::ExpertUp, [ffn, width]);
        (
            (LayerRole::ExpertGate, [ffn, width]),
            self.config.family.has_gates().then_some(up),
            (LayerRole::ExpertDown, [width, ffn]),
        )
    }

    fn of_expert(&self, layer: usize, (part, shape): Part, nth: Nth) -> Result<Matrix, Error> {
        let role = Role::Layer(layer, part(nth));
        self.gathered_form(self.matrix(role, shape, 0..shape[0], 0..shape[1])?)
    }

    /// The matrices `held` of `count` experts.
    fn stack(
        &self,
        layer: usize,
        (part, shape): Part,
        count: usize,
        held: &Range<usize>,
    ) -> Result<Stack, Error> {
        let nth = |index| Nth { index, of: count };
        let matrix = |place| self.of_expert(layer, (part, shape), nth(held.start + place));
        let biases = held.clone().map(|index| {
            let role = Role::Layer(layer, part(nth(index)));
            self.names.expert_bias(role, nth(index), shape[0])
        });
        // All experts have one, or none has.
        let biases = biases.collect::<Result<Option<Vec<_>>, Error>>()?;
        let biases = biases.map(|rows| {
            let sizes = [held.len() as i32, shape[0] as i32];
            let biases = self.floats(&rows.concat())?;
            Ok::<_, Error>(self.stream.reshape(&biases, &sizes)?)
        });
        Ok(Stack {
            matrices: Matrix::gathered(self.stream, held.len(), matrix, |all| self.eval(all))?,
            biases: biases.transpose()?,
        })
    }

    /// A matrix as gathered products take it: MLX's CPU has them of `f32` only.
    fn gathered_form(&self, matrix: Matrix) -> Result<Matrix, Error> {
        match matrix {
            Matrix::Float(across) if matches!(self.stream.device(), DeviceKind::Cpu) => {
                let wide = self.stream.astype(&across, Dtype::F32)?;
                self.kept.borrow_mut().push(across);
                Ok(Matrix::Float(wide))
            }
            other => Ok(other),
        }
    }

    /// A vector in f32.
    pub(super) fn wide(&self, values: &[f32]) -> Result<Array, Error> {
        Ok(self.stream.array_f32(values, &[values.len() as i32])?)
    }
}
