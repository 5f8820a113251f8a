//! Quantised inputs of products whose width differs from layer to layer.

use paceline_tensor::Activations;

use super::activations;
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::Summed;

/// Inputs of a product of each layer: one buffer for all layers whose inputs are as wide.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) buffers: Vec<Activations>,
    /// The buffer of each layer.
    of: Vec<usize>,
}

impl Inputs {
    /// For the products of all layers, in order, each with the cut of its sum.
    pub(super) fn new<'a>(
        model: &Model,
        rows: usize,
        products: impl Iterator<Item = (Option<&'a Summed>, &'a LeafCut)> + Clone,
    ) -> Self {
        let width = |cut: &LeafCut| (cut.columns().len(), cut.leaf_cols);
        let mut widths: Vec<(usize, usize)> = Vec::new();
        let of = products.clone().map(|(sum, cut)| {
            if sum.is_none() {
                return usize::MAX; // its layer has experts, and buffers elsewhere
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

    /// The buffer of the layer that this rank holds in place `held`.
    pub(super) fn of(&mut self, held: usize) -> &mut Activations {
        &mut self.buffers[self.of[held]]
    }
}
