//! Experts that a folder holds in one tensor, as gpt-oss does: in MXFP4 by pieces, or as floats
//! whose rows are inputs.
//!
//! ```text
//! NAME_blocks   U8 (experts, outputs, inputs / 32, 16)   neighbours in a byte, low nibble first
//! NAME_scales   U8 (experts, outputs, inputs / 32)       e8m0
//! NAME          floats (experts, inputs, outputs)
//! ```
//!
//! DBRX has no size of the experts: `(experts inputs, outputs)`.
//!
//! Folders that MLX wrote have all experts in one quantised matrix with a size more in front.
//!
//! Outputs of gate and up take turns, so a matrix is every second of them
//! (`modeling_gpt_oss.py`, `integrations/mxfp4.py` of transformers).

use paceline_base::BlockType;

use super::{Error, HfFolder};
use crate::mlx::{Quantised, UncheckedTensor};
use crate::tensor::{MappedBytes, Tensor};

/// Bytes of the values of a block.
const VALUES: usize = 16;

/// Selects a part of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackSlice {
    pub index: usize,
    /// Experts in the stack.
    pub of: usize,
    /// The first of its outputs.
    pub first: usize,
    /// From one output to the next.
    pub step: usize,
}

impl StackSlice {
    /// All outputs of an expert.
    pub const fn whole(index: usize, of: usize) -> Self {
        Self {
            index,
            of,
            first: 0,
            step: 1,
        }
    }
}

impl HfFolder {
    /// A matrix `(outputs, inputs)` of one expert of the stack `name`, joined in memory.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::QuantisedDtype`], [`Error::Stack`], [`Error::Memory`];
    /// [`Error::Weights`] for floats of a type that paceline does not read.
    pub fn stacked(&self, name: &str, wanted: StackSlice) -> Result<Tensor, Error> {
        match self.part(&format!("{name}_blocks")) {
            Some(blocks) => self.stacked_mxfp4(name, &blocks, wanted),
            None => self.stacked_floats(name, wanted),
        }
    }

    /// Like [`expert_stack`](Self::stacked) for floats `(experts inputs, outputs)`, one expert
    /// after the other.
    ///
    /// # Errors
    /// The errors of [`expert_stack`](Self::stacked).
    pub fn stacked_rows(&self, name: &str, wanted: StackSlice) -> Result<Tensor, Error> {
        let stack = self.tensor(name)?;
        let shape = match stack.shape[..] {
            [rows, outputs] if wanted.of > 0 && rows.is_multiple_of(wanted.of) => {
                [wanted.of, rows / wanted.of, outputs]
            }
            _ => {
                let expected = "two sizes, the first of as many experts as config.json says";
                return Err(self.stack(name.to_owned(), &stack.shape, expected));
            }
        };
        self.turned(&stack, shape, wanted)
    }

    /// The quantised matrix of expert `index` of `of` in the module `module`, which holds all of
    /// them; `None` when that has no scales. Copies no weights.
    ///
    /// # Errors
    /// The errors of [`quantised`](Self::quantised); [`Error::Stack`].
    pub fn quantised_expert(
        &self,
        module: &str,
        index: usize,
        of: usize,
    ) -> Result<Option<Quantised>, Error> {
        self.quantised_by(module, |name| {
            let Some(mut part) = self.part(name) else {
                return Ok(None);
            };
            if part.shape.len() != 3 || part.shape[0] != of || index >= of {
                let expected = "as many experts as config.json says, of two sizes each";
                return Err(self.stack(name.to_owned(), &part.shape, expected));
            }
            part.shape.remove(0);
            let each = part.bytes.len() / of;
            let own = part.bytes.slice(index * each..(index + 1) * each);
            part.bytes = own.expect("a part of it");
            Ok(Some(part))
        })
    }

    fn stacked_mxfp4(
        &self,
        name: &str,
        blocks: &UncheckedTensor,
        wanted: StackSlice,
    ) -> Result<Tensor, Error> {
        let scales_name = format!("{name}_scales");
        let scales = self
            .part(&scales_name)
            .ok_or_else(|| Error::MissingTensor {
                path: self.path.clone(),
                tensor: scales_name.clone(),
            })?;
        let name = format!("{name}_blocks");
        for (part, tensor) in [(blocks, &name), (&scales, &scales_name)] {
            if part.dtype != "U8" {
                return Err(Error::QuantisedDtype {
                    path: self.path.clone(),
                    tensor: tensor.clone(),
                    dtype: part.dtype.clone(),
                    expected: "U8",
                });
            }
        }
        let [experts, outputs, groups, VALUES] = blocks.shape[..] else {
            return Err(self.stack(name, &blocks.shape, "four sizes, the last of them 16"));
        };
        if scales.shape != [experts, outputs, groups] {
            return Err(self.stack(
                scales_name,
                &scales.shape,
                "those of the blocks but the last",
            ));
        }
        let rows = self.rows_of(&name, &blocks.shape, [experts, outputs], wanted)?;
        let [values, scales] = [&blocks.bytes, &scales.bytes].map(|it| of_expert(it, wanted));
        let (values, scales) = (values?, scales?);
        let size = BlockType::MXFP4.bytes();
        let fill = |out: &mut [u8]| {
            for (i, block) in out.chunks_exact_mut(size).enumerate() {
                let row = wanted.first + i / groups * wanted.step;
                let at = row * groups + i % groups;
                block[0] = scales[at];
                block[1..].copy_from_slice(&values[at * VALUES..][..VALUES]);
            }
        };
        let shape = [rows, groups * 2 * VALUES];
        self.filled(name, BlockType::MXFP4, shape, rows * groups * size, fill)
    }

    fn stacked_floats(&self, name: &str, wanted: StackSlice) -> Result<Tensor, Error> {
        let stack = self.tensor(name)?;
        let [experts, inputs, outputs] = stack.shape[..] else {
            return Err(self.stack(name.to_owned(), &stack.shape, "three sizes"));
        };
        self.turned(&stack, [experts, inputs, outputs], wanted)
    }

    /// A matrix `(outputs, inputs)` of `stack`, whose rows are inputs.
    fn turned(
        &self,
        stack: &Tensor,
        [experts, inputs, outputs]: [usize; 3],
        wanted: StackSlice,
    ) -> Result<Tensor, Error> {
        let rows = self.rows_of(&stack.name, &stack.shape, [experts, outputs], wanted)?;
        let (size, values) = (stack.block_type.bytes(), of_expert(&stack.bytes, wanted)?);
        let fill = |out: &mut [u8]| {
            for (i, value) in out.chunks_exact_mut(size).enumerate() {
                let (row, col) = (i / inputs, i % inputs);
                let at = col * outputs + wanted.first + row * wanted.step;
                value.copy_from_slice(&values[at * size..][..size]);
            }
        };
        let bytes = rows * inputs * size;
        self.filled(
            stack.name.clone(),
            stack.block_type,
            [rows, inputs],
            bytes,
            fill,
        )
    }

    /// Outputs of a matrix, of a stack of `experts` with `outputs` each.
    fn rows_of(
        &self,
        name: &str,
        shape: &[usize],
        [experts, outputs]: [usize; 2],
        wanted: StackSlice,
    ) -> Result<usize, Error> {
        if experts != wanted.of || wanted.index >= experts {
            return Err(self.stack(
                name.to_owned(),
                shape,
                "as many experts as config.json says",
            ));
        }
        if !outputs.is_multiple_of(wanted.step) || wanted.first >= wanted.step {
            return Err(self.stack(name.to_owned(), shape, "as many rows of gates as of ups"));
        }
        Ok(outputs / wanted.step)
    }

    fn filled(
        &self,
        name: String,
        block_type: BlockType,
        shape: [usize; 2],
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Tensor, Error> {
        let bytes = MappedBytes::filled(len, fill);
        Ok(Tensor {
            bytes: bytes.map_err(|error| Error::Memory {
                tensor: name.clone(),
                error,
            })?,
            name,
            block_type,
            shape: shape.to_vec(),
        })
    }

    fn stack(&self, tensor: String, got: &[usize], expected: &'static str) -> Error {
        Error::Stack {
            path: self.path.clone(),
            tensor,
            got: got.to_vec(),
            expected,
        }
    }
}

/// The bytes of one expert of a stack. Waits until they have arrived.
fn of_expert(stack: &MappedBytes, wanted: StackSlice) -> Result<MappedBytes, Error> {
    let each = stack.len() / wanted.of;
    let own = stack.slice(wanted.index * each..(wanted.index + 1) * each);
    Ok(own.expect("the index was checked").arrived()?)
}
