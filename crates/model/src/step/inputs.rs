//! Quantised input buffers of a product whose width differs between layers.

use paceline_tensor::Activations;

use super::rows::activations;
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::Summed;

/// Inputs of one product in each layer; layers of equal width share a buffer.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) buffers: Vec<Activations>,
    /// Buffer index of each layer.
    of: Vec<usize>,
}

impl Inputs {
    /// For the product of each layer, in order, with the cut of its sum.
    pub(super) fn new<'a>(
        model: &Model,
        rows: usize,
        products: impl Iterator<Item = (Option<&'a Summed>, &'a LeafCut)> + Clone,
    ) -> Self {
        let width = |cut: &LeafCut| (cut.columns().len(), cut.leaf_cols);
        let mut widths: Vec<(usize, usize)> = Vec::new();
        let of = products.clone().map(|(sum, cut)| {
            if sum.is_none() {
                return usize::MAX; // a layer with experts has its buffers elsewhere
            }
            let known = widths.iter().position(|known| *known == width(cut));
            known.unwrap_or_else(|| {
                widths.push(width(cut));
                widths.len() - 1
            })
        });
        let of = of.collect();
        let buffer = |wanted: &(usize, usize)| {
            let alike = products.clone().filter(|(_, cut)| width(cut) == *wanted);
            let matrices = alike.filter_map(|(sum, _)| sum).flat_map(Summed::matrices);
            activations(model, rows, wanted.0, matrices)
        };
        let buffers = widths.iter().map(buffer).collect();
        Self { buffers, of }
    }

    /// Buffer of this rank's layer `held`, counted from its first.
    pub(super) fn of(&mut self, held: usize) -> &mut Activations {
        &mut self.buffers[self.of[held]]
    }
}
