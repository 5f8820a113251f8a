//! Metadata values: the thirteen types of the format.

paceline_base::named_enum! {
    /// Type of a metadata value or of the elements of an array (`enum gguf_type` in `gguf.h`), at
    /// the position of its number in a file.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[allow(missing_docs, reason = "the names are the format's own")]
    pub enum ValueType {
        U8 = "u8",
        I8 = "i8",
        U16 = "u16",
        I16 = "i16",
        U32 = "u32",
        I32 = "i32",
        F32 = "f32",
        Bool = "bool",
        String = "string",
        Array = "array",
        U64 = "u64",
        I64 = "i64",
        F64 = "f64",
    }
}

impl ValueType {
    /// The type with this number in a file.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// The number of this type in a file.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The least bytes that one value takes in a file: a string has a length of 8 bytes, an array
    /// a type and a count.
    pub const fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum MetadataValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl MetadataValue {
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The value of any integer type, when it is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// For error messages: the type, with the sign or the element type where that is the point.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Array(array) => format!("array of {}", array.element_type()),
            Self::I8(_) | Self::I16(_) | Self::I32(_) | Self::I64(_) if self.as_u64().is_none() => {
                format!("negative {}", self.value_type())
            }
            _ => self.value_type().to_string(),
        }
    }
}

/// An array value; all elements have one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Array {
    pub fn element_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as unsigned integers, when they are of an integer type and none is negative.
    pub fn to_u64s(&self) -> Option<Vec<u64>> {
        fn all<T: Copy + TryInto<u64>>(v: &[T]) -> Option<Vec<u64>> {
            v.iter().map(|&x| x.try_into().ok()).collect()
        }
        match self {
            Self::U8(v) => all(v),
            Self::U16(v) => all(v),
            Self::U32(v) => all(v),
            Self::U64(v) => Some(v.clone()),
            Self::I8(v) => all(v),
            Self::I16(v) => all(v),
            Self::I32(v) => all(v),
            Self::I64(v) => all(v),
            _ => None,
        }
    }
}
