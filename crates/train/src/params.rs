//! The vector of all trained values: its layout and its initial values.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::random;

/// A trained tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterSlot {
    /// Its name in files: PEFT's for adapters, Hugging Face's for whole models.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Range in the vector of trained values.
    pub range: Range<usize>,
}

/// Layout of trained tensors in one vector, in order of layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    slots: Vec<ParameterSlot>,
    len: usize,
}

impl Layout {
    /// Appends a tensor.
    pub(crate) fn add(&mut self, name: String, shape: Vec<usize>) -> Range<usize> {
        let range = self.len..self.len + shape.iter().product::<usize>();
        self.len = range.end;
        let slot = ParameterSlot {
            name,
            shape,
            range: range.clone(),
        };
        self.slots.push(slot);
        range
    }

    /// The tensors, without gaps.
    pub fn slots(&self) -> &[ParameterSlot] {
        &self.slots
    }

    /// Number of trained values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is trained.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The adapter of every matrix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lora {
    /// Inner dimension of the pair.
    pub rank: usize,
    /// The pair is multiplied by `alpha / rank`.
    pub alpha: f32,
}

impl Lora {
    /// Factor of the pair's product.
    pub fn scale(self) -> f32 {
        self.alpha / self.rank as f32
    }
}

/// The first values of an adapter, as PEFT has them: A even in `-1 / sqrt(in)..1 / sqrt(in)`, B 0.
pub(crate) fn first_values(layout: &Layout, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; layout.len()];
    for (number, slot) in layout.slots().iter().enumerate() {
        if !slot.name.ends_with("lora_A.weight") {
            continue;
        }
        let bound = 1.0 / libm::sqrt(slot.shape[1] as f64);
        for (i, value) in values[slot.range.clone()].iter_mut().enumerate() {
            let key = [seed, random::INIT, number as u64, i as u64];
            *value = ((random::unit(key) * 2.0 - 1.0) * bound) as f32;
        }
    }
    values
}
