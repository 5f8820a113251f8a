//! Reads the pieces of a GGUF header from a slice, checking each against the bytes that are left.

use super::{Array, Error, MetadataValue, ValueType};

/// Longest key or tensor name: `docs/gguf.md` allows keys of 2^16 - 1 bytes; llama.cpp's limit for
/// tensor names is 64, some forks have more.
const MAX_NAME_BYTES: u64 = u16::MAX as u64;

/// Most elements of one array. The largest seen is a list of 514,906 merges. The limit of 2^24
/// leaves room for vocabularies 30 times as large. It bounds an array of strings to 400 MB of
/// pointers.
const MAX_ARRAY_LEN: u64 = 1 << 24;

/// Deepest nesting of arrays. No known writer nests at all and llama.cpp refuses it; the limit
/// bounds the recursion.
const MAX_ARRAY_DEPTH: usize = 4;

/// A position in the bytes of a file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Offset of the next byte.
    pub(super) fn offset(&self) -> u64 {
        self.at as u64
    }

    /// The next `len` bytes; `what` names them for the error.
    pub(super) fn take(&mut self, len: u64, what: &'static str) -> Result<&'a [u8], Error> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(len).ok().and_then(|len| rest.get(..len)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => Err(Error::HeaderPastEnd {
                what,
                offset: self.offset(),
                needed: len,
                file_bytes: self.bytes.len() as u64,
            }),
        }
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        let taken = self.take(N as u64, what)?;
        Ok(taken
            .try_into()
            .expect("take gives as many bytes as asked for"))
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `min_bytes` each: at most `max`, and as many as the
    /// rest of the file can hold.
    pub(super) fn count(
        &mut self,
        what: &'static str,
        min_bytes: usize,
        max: u64,
    ) -> Result<usize, Error> {
        let count = self.u64(what)?;
        self.fits(count, what, min_bytes)?;
        if count > max {
            return Err(Error::TooMany { what, count, max });
        }
        Ok(usize::try_from(count).expect("a count that fits the file fits the machine"))
    }

    /// Checks that `count` things of at least `min_bytes` each fit the rest of the file.
    pub(super) fn fits(
        &self,
        count: u64,
        what: &'static str,
        min_bytes: usize,
    ) -> Result<(), Error> {
        let needed = count.saturating_mul(min_bytes as u64);
        let file_bytes = self.bytes.len() as u64;
        if needed > file_bytes - self.offset() {
            return Err(Error::HeaderPastEnd {
                what,
                offset: self.offset(),
                needed,
                file_bytes,
            });
        }
        Ok(())
    }

    /// A string of any length.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a str, Error> {
        let len = self.u64(what)?;
        let offset = self.offset();
        let bytes = self.take(len, what)?;
        str::from_utf8(bytes).map_err(|_| Error::NotUtf8 { what, offset })
    }

    /// A key or tensor name: a string of 1 byte to 2^16 - 1 bytes.
    pub(super) fn name(&mut self, what: &'static str) -> Result<&'a str, Error> {
        let offset = self.offset();
        let name = self.string(what)?;
        match name.len() as u64 {
            1..=MAX_NAME_BYTES => Ok(name),
            len => Err(Error::NameLength {
                what,
                offset,
                len,
                max: MAX_NAME_BYTES,
            }),
        }
    }

    fn bool(&mut self) -> Result<bool, Error> {
        let offset = self.offset();
        match self.array::<1>("bool")? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => Err(Error::InvalidBool { offset, byte }),
        }
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, Error> {
        let id = self.u32("value type")?;
        ValueType::from_id(id).ok_or_else(|| Error::UnknownValueType {
            key: key.to_owned(),
            id,
        })
    }

    /// The type and the value of the metadata entry `key`.
    pub(super) fn value(&mut self, key: &str) -> Result<MetadataValue, Error> {
        const WHAT: &str = "metadata value";
        Ok(match self.value_type(key)? {
            ValueType::U8 => MetadataValue::U8(u8::from_le_bytes(self.array(WHAT)?)),
            ValueType::I8 => MetadataValue::I8(i8::from_le_bytes(self.array(WHAT)?)),
            ValueType::U16 => MetadataValue::U16(u16::from_le_bytes(self.array(WHAT)?)),
            ValueType::I16 => MetadataValue::I16(i16::from_le_bytes(self.array(WHAT)?)),
            ValueType::U32 => MetadataValue::U32(self.u32(WHAT)?),
            ValueType::I32 => MetadataValue::I32(i32::from_le_bytes(self.array(WHAT)?)),
            ValueType::F32 => MetadataValue::F32(f32::from_le_bytes(self.array(WHAT)?)),
            ValueType::Bool => MetadataValue::Bool(self.bool()?),
            ValueType::String => MetadataValue::String(self.string(WHAT)?.to_owned()),
            ValueType::Array => MetadataValue::Array(self.array_value(key, 1)?),
            ValueType::U64 => MetadataValue::U64(self.u64(WHAT)?),
            ValueType::I64 => MetadataValue::I64(i64::from_le_bytes(self.array(WHAT)?)),
            ValueType::F64 => MetadataValue::F64(f64::from_le_bytes(self.array(WHAT)?)),
        })
    }

    /// Element type, count and elements of an array at nesting level `depth` (from 1).
    fn array_value(&mut self, key: &str, depth: usize) -> Result<Array, Error> {
        if depth > MAX_ARRAY_DEPTH {
            return Err(Error::TooDeep {
                key: key.to_owned(),
                max: MAX_ARRAY_DEPTH,
            });
        }
        let element = self.value_type(key)?;
        let len = self.count("array", element.min_bytes(), MAX_ARRAY_LEN)?;
        Ok(match element {
            ValueType::U8 => Array::U8(self.numbers(len, u8::from_le_bytes)?),
            ValueType::I8 => Array::I8(self.numbers(len, i8::from_le_bytes)?),
            ValueType::U16 => Array::U16(self.numbers(len, u16::from_le_bytes)?),
            ValueType::I16 => Array::I16(self.numbers(len, i16::from_le_bytes)?),
            ValueType::U32 => Array::U32(self.numbers(len, u32::from_le_bytes)?),
            ValueType::I32 => Array::I32(self.numbers(len, i32::from_le_bytes)?),
            ValueType::F32 => Array::F32(self.numbers(len, f32::from_le_bytes)?),
            ValueType::U64 => Array::U64(self.numbers(len, u64::from_le_bytes)?),
            ValueType::I64 => Array::I64(self.numbers(len, i64::from_le_bytes)?),
            ValueType::F64 => Array::F64(self.numbers(len, f64::from_le_bytes)?),
            ValueType::Bool => Array::Bool(self.each(len, Self::bool)?),
            ValueType::String => {
                Array::String(self.each(len, |c| c.string("array element").map(str::to_owned))?)
            }
            ValueType::Array => Array::Array(self.each(len, |c| c.array_value(key, depth + 1))?),
        })
    }

    /// `len` numbers of `N` bytes, whose presence was checked.
    fn numbers<T, const N: usize>(
        &mut self,
        len: usize,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Error> {
        let bytes = self.take((len * N) as u64, "array")?;
        Ok(bytes
            .as_chunks::<N>()
            .0
            .iter()
            .map(|&chunk| decode(chunk))
            .collect())
    }

    /// `len` elements read one by one, whose minimum size was checked.
    fn each<T>(
        &mut self,
        len: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let mut out = Vec::with_capacity(len);
        for _ in 0..len {
            out.push(read(self)?);
        }
        Ok(out)
    }
}
