//! The header of a safetensors file, read and checked as a whole.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Error, TensorInfo};
use crate::LooksLike;
use crate::name_index::NameIndex;

/// Bytes of the header's length at the start of the file.
const LENGTH_BYTES: usize = 8;

/// Longest header (`MAX_HEADER_SIZE` of the `safetensors` crate).
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Most dimensions of a tensor. The format has no limit; weights of transformers have up to 4,
/// convolutions 5, and the limit bounds memory for a hostile shape.
const MAX_DIMS: usize = 8;

/// Entry of the header that holds free text instead of a tensor.
const FREE_TEXT: &str = "__metadata__";

/// Everything that a file says before its data.
#[derive(Clone, Debug)]
pub struct Header {
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) index: NameIndex,
}

impl Header {
    /// Reads the header of `file`, the bytes of a whole file, and checks it against its length.
    ///
    /// Pure. Time and memory are proportional to the header, up to n log n in the number of names.
    ///
    /// # Errors
    /// Every [`Error`] but those about files and about what paceline reads.
    pub fn parse(file: &[u8]) -> Result<Self, Error> {
        let (json, data) = split(file)?;
        let RawHeader { mut entries } = serde_json::from_slice(json)?;
        entries.sort_by_key(|(_, raw)| raw.data_offsets);
        let data_start = file.len() - data.len();
        let expected = contiguous_end(&entries)?.saturating_add(data_start as u64);
        if expected != file.len() as u64 {
            return Err(Error::Length {
                expected,
                actual: file.len() as u64,
            });
        }
        let tensors: Vec<_> = entries
            .into_iter()
            .map(|e| checked(e, data_start))
            .collect::<Result<_, _>>()?;
        let index = NameIndex::new(&tensors, TensorInfo::name).map_err(|at| {
            serde_json::Error::custom(format_args!("tensor {} occurs twice", tensors[at].name))
        })?;
        Ok(Self { tensors, index })
    }

    /// All tensors, in the order of their data.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }
}

/// Header text and data of a file.
fn split(file: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let looks_like = LooksLike::of(file);
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(Error::NotSafetensors { looks_like });
    };
    let header_bytes = u64::from_le_bytes(*length);
    if rest.first().is_some_and(|&b| b != b'{') || header_bytes == 0 {
        return Err(Error::NotSafetensors { looks_like });
    }
    if header_bytes > MAX_HEADER_BYTES {
        return Err(Error::HeaderTooLong {
            header_bytes,
            max: MAX_HEADER_BYTES,
        });
    }
    let at = usize::try_from(header_bytes).ok();
    at.and_then(|at| rest.split_at_checked(at))
        .ok_or(Error::HeaderPastEnd {
            header_bytes,
            file_bytes: file.len() as u64,
        })
}

/// Checks that each entry begins where the one before ends; the end of the last.
fn contiguous_end(sorted: &[(String, RawTensor)]) -> Result<u64, Error> {
    let mut expected = 0;
    for (name, raw) in sorted {
        let [start, end] = raw.data_offsets;
        if end < start {
            return Err(Error::Reversed {
                tensor: name.clone(),
                start,
                end,
            });
        }
        if start != expected {
            return Err(Error::NotContiguous {
                tensor: name.clone(),
                start,
                expected,
            });
        }
        expected = end;
    }
    Ok(expected)
}

/// Checks shape against size, for an entry that lies in the file.
fn checked((name, raw): (String, RawTensor), data_start: usize) -> Result<TensorInfo, Error> {
    let [start, end] = raw.data_offsets;
    let Some((shape, values)) = checked_shape(&raw.shape.0) else {
        return Err(Error::Shape {
            tensor: name,
            shape: raw.shape.0,
        });
    };
    if let Some(bits) = bits_per_value(&raw.dtype) {
        let expected = (values as u64).saturating_mul(bits) / 8;
        if end - start != expected {
            let dtype = raw.dtype;
            return Err(Error::SizeMismatch {
                tensor: name,
                dtype,
                shape,
                start,
                end,
                expected,
            });
        }
    }
    let place = |offset: u64| data_start + offset as usize; // fits: the end is the file's length
    Ok(TensorInfo {
        name,
        dtype: raw.dtype,
        shape,
        range: place(start)..place(end),
    })
}

/// The sizes as the machine's integers and their product, when that fits.
fn checked_shape(sizes: &[u64]) -> Option<(Vec<usize>, usize)> {
    let shape: Vec<usize> = sizes
        .iter()
        .map(|&n| n.try_into().ok())
        .collect::<Option<_>>()?;
    let values = shape
        .iter()
        .try_fold(1_usize, |product, &n| product.checked_mul(n))?;
    Some((shape, values))
}

/// Bits of one value (`Dtype::bitsize` of the `safetensors` crate). `None` for dtypes that are
/// newer than this list. Their size is then not checked, and no caller can read them.
fn bits_per_value(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F64" | "I64" | "U64" | "C64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => 8,
        _ => return None,
    })
}

/// The header as written, in file order; names may still repeat.
struct RawHeader {
    entries: Vec<(String, RawTensor)>,
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: RawShape,
    data_offsets: [u64; 2],
}

struct RawShape(Vec<u64>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor names to dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == FREE_TEXT {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader { entries })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl<'de> Deserialize<'de> for RawShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = RawShape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMS} sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawShape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = seq.next_element()? {
                    if sizes.len() == MAX_DIMS {
                        return Err(A::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    sizes.push(size);
                }
                Ok(RawShape(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}
