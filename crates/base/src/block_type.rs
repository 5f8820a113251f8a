//! Storage types of numbers in model files.

use std::fmt;

/// Storage type of a tensor, as the GGUF format and MLX name them.
///
/// A *block* is the smallest run of values along a row that can be decoded alone:
/// [`len`](Self::len) values in [`bytes`](Self::bytes) bytes. Floats are blocks of one value.
/// Byte layouts: `ggml/src/ggml-common.h` of llama.cpp; decoded in `paceline-tensor::stored`.
///
/// The types from `AFFINE2_F16` on are those of MLX's folders, where integers, scales and biases
/// are separate tensors. A block here is 32 columns of all three, joined when the model is opened
/// (`paceline-formats::mlx`). `MXFP4` has the order of nibbles of MLX and Hugging Face,
/// `MXFP4_SPLIT` that of GGUF files. Both are computed as [`MXFP4`](Self::MXFP4).
///
/// The types behind `MXFP4_SPLIT` are [decoded](Self::is_decoded). `FP8` and `FP4` are those of
/// safetensors, joined by `paceline-formats::scaled`. A block is 32 columns of E4M3 with a scale in
/// f32, or of E2M1 with two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(
    missing_docs,
    non_camel_case_types,
    reason = "the names are the formats' own"
)]
pub enum BlockType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    AFFINE2_F16,
    AFFINE2_BF16,
    AFFINE3_F16,
    AFFINE3_BF16,
    AFFINE4_F16,
    AFFINE4_BF16,
    AFFINE5_F16,
    AFFINE5_BF16,
    AFFINE6_F16,
    AFFINE6_BF16,
    AFFINE8_F16,
    AFFINE8_BF16,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    MXFP4,
    MXFP4_SPLIT,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    NVFP4,
    FP8,
    FP4,
}

/// A GGUF type number that paceline does not support.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("storage type {name} (GGUF type number {id}) is not supported")]
pub struct UnknownBlockType {
    /// The number in the file.
    pub id: u32,
    /// Its name in llama.cpp, or `unknown`.
    pub name: &'static str,
}

impl BlockType {
    /// Every supported type.
    pub const ALL: [Self; 41] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::AFFINE2_F16,
        Self::AFFINE2_BF16,
        Self::AFFINE3_F16,
        Self::AFFINE3_BF16,
        Self::AFFINE4_F16,
        Self::AFFINE4_BF16,
        Self::AFFINE5_F16,
        Self::AFFINE5_BF16,
        Self::AFFINE6_F16,
        Self::AFFINE6_BF16,
        Self::AFFINE8_F16,
        Self::AFFINE8_BF16,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ2_S,
        Self::IQ3_XXS,
        Self::IQ3_S,
        Self::MXFP4,
        Self::MXFP4_SPLIT,
        Self::IQ1_S,
        Self::IQ1_M,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::NVFP4,
        Self::FP8,
        Self::FP4,
    ];

    /// The types that GGUF files have.
    pub const GGUF: [Self; 26] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::MXFP4_SPLIT,
        Self::IQ1_S,
        Self::IQ1_M,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ2_S,
        Self::IQ3_XXS,
        Self::IQ3_S,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::NVFP4,
    ];

    /// Number of types with kernels of their own: the first of [`ALL`](Self::ALL).
    pub const COMPUTED: usize = Self::MXFP4 as usize + 1;

    /// The type that kernels compute with: of another one a matrix is repacked to it, or decoded.
    #[must_use]
    pub const fn computed(self) -> Self {
        match self {
            Self::MXFP4_SPLIT => Self::MXFP4,
            decoded if decoded.is_decoded() => Self::F32,
            other => other,
        }
    }

    /// Whether kernels decode a matrix of this type to f32 as they need it: products are those of
    /// f32 weights. All but `FP8` stay as stored.
    pub const fn is_decoded(self) -> bool {
        self as usize > Self::MXFP4_SPLIT as usize
    }

    /// The name used by GGUF tools, for example `Q4_K`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2_K => "Q2_K",
            Self::Q3_K => "Q3_K",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
            Self::IQ4_NL => "IQ4_NL",
            Self::IQ4_XS => "IQ4_XS",
            Self::AFFINE2_F16 => "AFFINE2_F16",
            Self::AFFINE2_BF16 => "AFFINE2_BF16",
            Self::AFFINE3_F16 => "AFFINE3_F16",
            Self::AFFINE3_BF16 => "AFFINE3_BF16",
            Self::AFFINE4_F16 => "AFFINE4_F16",
            Self::AFFINE4_BF16 => "AFFINE4_BF16",
            Self::AFFINE5_F16 => "AFFINE5_F16",
            Self::AFFINE5_BF16 => "AFFINE5_BF16",
            Self::AFFINE6_F16 => "AFFINE6_F16",
            Self::AFFINE6_BF16 => "AFFINE6_BF16",
            Self::AFFINE8_F16 => "AFFINE8_F16",
            Self::AFFINE8_BF16 => "AFFINE8_BF16",
            Self::MXFP4 | Self::MXFP4_SPLIT => "MXFP4",
            Self::IQ1_S => "IQ1_S",
            Self::IQ1_M => "IQ1_M",
            Self::IQ2_XXS => "IQ2_XXS",
            Self::IQ2_XS => "IQ2_XS",
            Self::IQ2_S => "IQ2_S",
            Self::IQ3_XXS => "IQ3_XXS",
            Self::IQ3_S => "IQ3_S",
            Self::TQ1_0 => "TQ1_0",
            Self::TQ2_0 => "TQ2_0",
            Self::NVFP4 => "NVFP4",
            Self::FP8 => "FP8",
            Self::FP4 => "FP4",
        }
    }

    /// Values in one block.
    #[allow(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub const fn len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K | Self::IQ4_XS => 256,
            Self::IQ1_S | Self::IQ1_M | Self::IQ2_XXS | Self::IQ2_XS | Self::IQ2_S => 256,
            Self::IQ3_XXS | Self::IQ3_S | Self::TQ1_0 | Self::TQ2_0 => 256,
            Self::NVFP4 => 64,
            _ => 32,
        }
    }

    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::IQ4_XS => 136,
            Self::AFFINE2_F16 | Self::AFFINE2_BF16 => 12,
            Self::AFFINE3_F16 | Self::AFFINE3_BF16 => 16,
            Self::AFFINE4_F16 | Self::AFFINE4_BF16 => 20,
            Self::AFFINE5_F16 | Self::AFFINE5_BF16 => 24,
            Self::AFFINE6_F16 | Self::AFFINE6_BF16 => 28,
            Self::AFFINE8_F16 | Self::AFFINE8_BF16 => 36,
            Self::MXFP4 | Self::MXFP4_SPLIT => 17,
            Self::IQ1_S => 50,
            Self::IQ1_M => 56,
            Self::IQ2_XXS | Self::TQ2_0 => 66,
            Self::IQ2_XS => 74,
            Self::IQ2_S => 82,
            Self::IQ3_XXS => 98,
            Self::IQ3_S => 110,
            Self::TQ1_0 => 54,
            Self::NVFP4 | Self::FP8 => 36,
            Self::FP4 => 24,
        }
    }

    /// Bytes of a row of `cols` values; `None` when `cols` is not a whole number of blocks or the
    /// size overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.len()) {
            return None;
        }
        (cols / self.len()).checked_mul(self.bytes())
    }

    /// Whether values are plain floats (no block scale).
    pub const fn is_float(self) -> bool {
        self.len() == 1
    }

    /// The type with this number in a GGUF tensor table (`enum ggml_type` in `ggml.h`).
    ///
    /// # Errors
    /// [`UnknownBlockType`] names the type that the number stands for in llama.cpp.
    pub const fn from_gguf(id: u32) -> Result<Self, UnknownBlockType> {
        Ok(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2_K,
            11 => Self::Q3_K,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            20 => Self::IQ4_NL,
            23 => Self::IQ4_XS,
            30 => Self::BF16,
            39 => Self::MXFP4_SPLIT,
            16 => Self::IQ2_XXS,
            17 => Self::IQ2_XS,
            18 => Self::IQ3_XXS,
            19 => Self::IQ1_S,
            21 => Self::IQ3_S,
            22 => Self::IQ2_S,
            29 => Self::IQ1_M,
            34 => Self::TQ1_0,
            35 => Self::TQ2_0,
            40 => Self::NVFP4,
            _ => {
                return Err(UnknownBlockType {
                    id,
                    name: unsupported_name(id),
                });
            }
        })
    }

    /// The number of this type in a GGUF tensor table; `None` for the types of folders.
    pub const fn to_gguf(self) -> Option<u32> {
        Some(match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2_K => 10,
            Self::Q3_K => 11,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
            Self::IQ4_NL => 20,
            Self::IQ4_XS => 23,
            Self::BF16 => 30,
            Self::MXFP4_SPLIT => 39,
            Self::IQ2_XXS => 16,
            Self::IQ2_XS => 17,
            Self::IQ3_XXS => 18,
            Self::IQ1_S => 19,
            Self::IQ3_S => 21,
            Self::IQ2_S => 22,
            Self::IQ1_M => 29,
            Self::TQ1_0 => 34,
            Self::TQ2_0 => 35,
            Self::NVFP4 => 40,
            _ => return None,
        })
    }

    /// Affine integers of `bits` bits, as MLX has them, with scales and biases of type `scales`;
    /// `None` where there is no such type.
    pub const fn affine(bits: u32, scales: Self) -> Option<Self> {
        Some(match (bits, scales) {
            (2, Self::F16) => Self::AFFINE2_F16,
            (2, Self::BF16) => Self::AFFINE2_BF16,
            (3, Self::F16) => Self::AFFINE3_F16,
            (3, Self::BF16) => Self::AFFINE3_BF16,
            (4, Self::F16) => Self::AFFINE4_F16,
            (4, Self::BF16) => Self::AFFINE4_BF16,
            (5, Self::F16) => Self::AFFINE5_F16,
            (5, Self::BF16) => Self::AFFINE5_BF16,
            (6, Self::F16) => Self::AFFINE6_F16,
            (6, Self::BF16) => Self::AFFINE6_BF16,
            (8, Self::F16) => Self::AFFINE8_F16,
            (8, Self::BF16) => Self::AFFINE8_BF16,
            _ => return None,
        })
    }

    /// Bits of an affine integer; `None` for all other types.
    pub const fn affine_bits(self) -> Option<u32> {
        Some(match self {
            Self::AFFINE2_F16 | Self::AFFINE2_BF16 => 2,
            Self::AFFINE3_F16 | Self::AFFINE3_BF16 => 3,
            Self::AFFINE4_F16 | Self::AFFINE4_BF16 => 4,
            Self::AFFINE5_F16 | Self::AFFINE5_BF16 => 5,
            Self::AFFINE6_F16 | Self::AFFINE6_BF16 => 6,
            Self::AFFINE8_F16 | Self::AFFINE8_BF16 => 8,
            _ => return None,
        })
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Names of the llama.cpp types that paceline refuses.
const fn unsupported_name(id: u32) -> &'static str {
    match id {
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gguf_numbers_round_trip() {
        for t in BlockType::GGUF {
            let number = t.to_gguf().expect("a number");
            assert_eq!(BlockType::from_gguf(number), Ok(t));
        }
        let others = BlockType::ALL.into_iter();
        let mut others = others.filter(|t| !BlockType::GGUF.contains(t));
        assert!(others.all(|t| t.to_gguf().is_none()));
    }

    #[test]
    fn types_are_in_the_order_of_their_numbers() {
        for (i, t) in BlockType::ALL.into_iter().enumerate() {
            assert_eq!(t as usize, i, "{t}"); // tables of kernels are indexed so
        }
    }

    #[test]
    fn affine_types_are_found_by_bits_and_scales() {
        for bits in [2, 3, 4, 5, 6, 8] {
            for scales in [BlockType::F16, BlockType::BF16] {
                let t = BlockType::affine(bits, scales).expect("a type");
                assert_eq!(t.name(), format!("AFFINE{bits}_{scales}"));
                assert_eq!(t.affine_bits(), Some(bits));
                assert_eq!((t.len(), t.bytes()), (32, 4 + 4 * bits as usize));
            }
        }
        assert_eq!(BlockType::affine(7, BlockType::F16), None);
        assert_eq!(BlockType::affine(4, BlockType::F32), None);
        assert_eq!(BlockType::MXFP4.affine_bits(), None);
    }

    #[test]
    fn others_are_refused_by_name() {
        let error = BlockType::from_gguf(15).unwrap_err();
        assert_eq!(
            error.to_string(),
            "storage type Q8_K (GGUF type number 15) is not supported"
        );
        assert_eq!(BlockType::from_gguf(999).unwrap_err().name, "unknown");
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(BlockType::Q4_1.row_bytes(576), Some(360));
        assert_eq!(BlockType::Q4_K.row_bytes(576), None);
        assert_eq!(BlockType::F32.row_bytes(usize::MAX), None);
    }
}
