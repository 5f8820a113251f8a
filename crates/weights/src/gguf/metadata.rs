//! The key-value half of a GGUF header.

use super::{Array, Error, MetadataValue};
use crate::name_index::NameIndex;

/// Metadata of a model, in file order; keys are unique.
///
/// Each getter has a form that wants the key (`u32`) and one that gives `None` when the key is
/// absent (`opt_u32`). Both refuse a value of another type: a wrong type is a broken file, not an
/// absent value. Writers disagree on the width of integers, so every non-negative integer type is
/// accepted where it fits.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, MetadataValue)>,
    index: NameIndex,
}

fn key_of(entry: &(String, MetadataValue)) -> &str {
    &entry.0
}

impl Metadata {
    /// Metadata from entries in order.
    ///
    /// # Errors
    /// [`Error::DuplicateKey`].
    pub fn from_entries(entries: Vec<(String, MetadataValue)>) -> Result<Self, Error> {
        match NameIndex::new(&entries, key_of) {
            Ok(index) => Ok(Self { entries, index }),
            Err(at) => Err(Error::DuplicateKey {
                key: entries[at].0.clone(),
            }),
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &MetadataValue)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    /// The value of `key`, of any type.
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.index
            .find(&self.entries, key_of, key)
            .map(|(_, value)| value)
    }

    /// Applies `convert` to the value of `key`; `expected` names the type for the error.
    fn opt<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a MetadataValue) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(Error::WrongType {
                key: key.to_owned(),
                expected,
                got: value.describe(),
            }),
        }
    }
}

/// Declares `opt_name` (absent is `None`) and `name` (absent is an error) for one type.
macro_rules! getters {
    ($($what:literal, $opt:ident, $name:ident -> $t:ty, $expected:literal, $convert:expr;)*) => {
        impl Metadata {
            $(
                #[doc = concat!("The ", $what, " under `key`, `None` when the key is absent.")]
                ///
                /// # Errors
                /// [`Error::WrongType`].
                pub fn $opt(&self, key: &str) -> Result<Option<$t>, Error> {
                    self.opt(key, $expected, $convert)
                }

                #[doc = concat!("The ", $what, " under `key`.")]
                ///
                /// # Errors
                /// [`Error::MissingKey`], [`Error::WrongType`].
                pub fn $name(&self, key: &str) -> Result<$t, Error> {
                    self.$opt(key)?.ok_or_else(|| Error::MissingKey { key: key.to_owned() })
                }
            )*
        }
    };
}

getters! {
    "string", opt_str, str -> &str, "string",
        |v| if let MetadataValue::String(s) = v { Some(s.as_str()) } else { None };
    "truth value", opt_bool, bool -> bool, "bool",
        |v| if let MetadataValue::Bool(b) = v { Some(*b) } else { None };
    "integer of any type", opt_u64, u64 -> u64, "non-negative integer", MetadataValue::as_u64;
    "integer of any type that fits 32 bits", opt_u32, u32 -> u32,
        "non-negative integer below 2^32", |v| v.as_u64()?.try_into().ok();
    "float (`f64` is rounded)", opt_f32, f32 -> f32, "f32 or f64", |v| match *v {
            MetadataValue::F32(x) => Some(x),
            MetadataValue::F64(x) => Some(x as f32),
            _ => None,
        };
    "array", opt_array, array -> &Array, "array",
        |v| if let MetadataValue::Array(a) = v { Some(a) } else { None };
    "array of strings", opt_strs, strs -> &[String], "array of string",
        |v| if let MetadataValue::Array(Array::String(a)) = v { Some(a.as_slice()) } else { None };
    "array of `f32`", opt_f32s, f32s -> &[f32], "array of f32",
        |v| if let MetadataValue::Array(Array::F32(a)) = v { Some(a.as_slice()) } else { None };
    "array of `i32`", opt_i32s, i32s -> &[i32], "array of i32",
        |v| if let MetadataValue::Array(Array::I32(a)) = v { Some(a.as_slice()) } else { None };
    "array of truth values", opt_bools, bools -> &[bool], "array of bool",
        |v| if let MetadataValue::Array(Array::Bool(a)) = v { Some(a.as_slice()) } else { None };
    "array of integers of any type (a copy)", opt_u64s, u64s -> Vec<u64>,
        "array of non-negative integers",
        |v| if let MetadataValue::Array(a) = v { a.to_u64s() } else { None };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Metadata {
        let entry = |key: &str, value| (key.to_owned(), value);
        Metadata::from_entries(vec![
            entry("name", MetadataValue::String("tiny".into())),
            entry("layers", MetadataValue::I32(30)),
            entry("minus", MetadataValue::I8(-1)),
            entry("big", MetadataValue::U64(1 << 32)),
            entry("eps", MetadataValue::F64(1e-5)),
            entry("flag", MetadataValue::Bool(true)),
            entry(
                "tokens",
                MetadataValue::Array(Array::String(vec!["a".into()])),
            ),
            entry("scores", MetadataValue::Array(Array::F32(vec![0.5]))),
            entry("heads", MetadataValue::Array(Array::U16(vec![9, 3]))),
        ])
        .unwrap()
    }

    #[test]
    fn getters_convert_and_keep_order() {
        let m = sample();
        assert_eq!(m.str("name").unwrap(), "tiny");
        assert_eq!(m.u32("layers").unwrap(), 30);
        assert_eq!(m.u64("big").unwrap(), 1 << 32);
        assert_eq!(m.f32("eps").unwrap(), 1e-5);
        assert!(m.bool("flag").unwrap());
        assert_eq!(m.strs("tokens").unwrap(), ["a"]);
        assert_eq!(m.f32s("scores").unwrap(), [0.5]);
        assert_eq!(m.u64s("heads").unwrap(), [9, 3]);
        assert_eq!(m.array("heads").unwrap().len(), 2);
        assert_eq!(m.opt_str("absent").unwrap(), None);
        assert_eq!(m.iter().next().unwrap().0, "name");
        assert_eq!((m.len(), m.is_empty()), (9, false));
    }

    #[test]
    fn errors_name_key_and_types() {
        let m = sample();
        for (error, text) in [
            (
                m.str("absent").unwrap_err(),
                "metadata key absent is missing",
            ),
            (
                m.opt_str("layers").unwrap_err(),
                "metadata key layers: expected string, got i32",
            ),
            (
                m.u64("minus").unwrap_err(),
                "metadata key minus: expected non-negative integer, got negative i8",
            ),
            (
                m.u32("big").unwrap_err(),
                "metadata key big: expected non-negative integer below 2^32, got u64",
            ),
            (
                m.i32s("tokens").unwrap_err(),
                "metadata key tokens: expected array of i32, got array of string",
            ),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn duplicate_keys_are_refused() {
        let twice = vec![
            ("k".to_owned(), MetadataValue::U8(0)),
            ("k".to_owned(), MetadataValue::U8(0)),
        ];
        let error = Metadata::from_entries(twice).unwrap_err();
        assert_eq!(error.to_string(), "metadata key k occurs twice");
    }
}
