//! Writes GGUF files, for tests and fuzz seeds.
//!
//! Checks nothing: a test that wants a broken file gets one. Panics only when a file cannot be
//! written.

use std::path::Path;

use paceline_base::BlockType;

use super::{Array, MetadataValue};

/// A GGUF file in the making; builder methods take and give the value.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    version: u32,
    alignment: u64,
    entries: Vec<(String, MetadataValue)>,
    tensors: Vec<RawTensor>,
}

#[derive(Clone, Debug)]
struct RawTensor {
    name: String,
    /// Innermost first, as in the file.
    dims: Vec<u64>,
    type_id: u32,
    bytes: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufWriter {
    /// An empty file of version 3 with the default alignment of 32.
    pub fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            entries: Vec::new(),
            tensors: Vec::new(),
        }
    }

    /// Sets the version number; the layout of 2 and 3 is the same.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets the alignment and writes it as `general.alignment`.
    #[must_use]
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment.into();
        self.meta("general.alignment", alignment)
    }

    /// Adds a metadata entry.
    #[must_use]
    pub fn meta(mut self, key: &str, value: impl Into<MetadataValue>) -> Self {
        self.entries.push((key.to_owned(), value.into()));
        self
    }

    /// Adds a tensor; `shape` is outermost first, `bytes` are its blocks as stored.
    #[must_use]
    pub fn tensor(
        self,
        name: &str,
        block_type: BlockType,
        shape: &[usize],
        bytes: impl Into<Vec<u8>>,
    ) -> Self {
        let number = block_type.to_gguf().expect("a GGUF type");
        self.raw_tensor(name, number, shape, bytes)
    }

    /// Adds a tensor of any storage type number.
    #[must_use]
    pub fn raw_tensor(
        mut self,
        name: &str,
        type_id: u32,
        shape: &[usize],
        bytes: impl Into<Vec<u8>>,
    ) -> Self {
        let dims = shape.iter().rev().map(|&n| n as u64).collect();
        self.tensors.push(RawTensor {
            name: name.to_owned(),
            dims,
            type_id,
            bytes: bytes.into(),
        });
        self
    }

    /// Adds an F32 tensor.
    #[must_use]
    pub fn f32s(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, BlockType::F32, shape, bytes)
    }

    /// The header alone, up to but without the padding before the data.
    pub fn header_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            put_string(&mut out, key);
            out.extend(value.value_type().id().to_le_bytes());
            put_value(&mut out, value);
        }
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            put_string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (tensor.bytes.len() as u64).next_multiple_of(self.alignment);
        }
        out
    }

    /// The whole file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.header_bytes();
        for tensor in &self.tensors {
            self.pad(&mut out);
            out.extend(&tensor.bytes);
        }
        self.pad(&mut out);
        out
    }

    fn pad(&self, out: &mut Vec<u8>) {
        let alignment = usize::try_from(self.alignment).expect("alignments of tests are small");
        out.resize(out.len().next_multiple_of(alignment), 0);
    }

    /// Writes the file.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) {
        std::fs::write(path, self.to_bytes()).expect("the test's folder is writable");
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &MetadataValue) {
    match value {
        MetadataValue::U8(v) => out.push(*v),
        MetadataValue::I8(v) => out.extend(v.to_le_bytes()),
        MetadataValue::U16(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I16(v) => out.extend(v.to_le_bytes()),
        MetadataValue::U32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::F32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::Bool(v) => out.push((*v).into()),
        MetadataValue::String(v) => put_string(out, v),
        MetadataValue::Array(v) => put_array(out, v),
        MetadataValue::U64(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I64(v) => out.extend(v.to_le_bytes()),
        MetadataValue::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend(array.element_type().id().to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => out.extend(v),
        Array::I8(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U16(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I16(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::Bool(v) => v.iter().for_each(|x| out.push((*x).into())),
        Array::String(v) => v.iter().for_each(|x| put_string(out, x)),
        Array::Array(v) => v.iter().for_each(|x| put_array(out, x)),
        Array::U64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
    }
}

/// Conversions from Rust types, so that tests need not name the variants.
macro_rules! from {
    ($($t:ty => $make:expr;)*) => {
        $(impl From<$t> for MetadataValue {
            fn from(value: $t) -> Self {
                $make(value)
            }
        })*
    };
}

from! {
    u8 => Self::U8;
    u16 => Self::U16;
    u32 => Self::U32;
    u64 => Self::U64;
    i32 => Self::I32;
    i64 => Self::I64;
    f32 => Self::F32;
    f64 => Self::F64;
    bool => Self::Bool;
    String => Self::String;
    &str => |v: &str| Self::String(v.to_owned());
    Array => Self::Array;
    Vec<String> => |v| Self::Array(Array::String(v));
    Vec<f32> => |v| Self::Array(Array::F32(v));
    Vec<i32> => |v| Self::Array(Array::I32(v));
    Vec<u32> => |v| Self::Array(Array::U32(v));
    Vec<bool> => |v| Self::Array(Array::Bool(v));
}

impl<const N: usize> From<[&str; N]> for MetadataValue {
    fn from(value: [&str; N]) -> Self {
        Self::Array(Array::String(value.map(str::to_owned).into()))
    }
}
