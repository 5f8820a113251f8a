//! The header of NumPy's `.npy` files, versions 1 to 3.
//!
//! Reads the literal that NumPy writes with its keys in any order, and nothing else: neither
//! expressions nor structured types nor Python objects. It looks like this:
//! `{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }`.
//! Source: NumPy Enhancement Proposal 1 and `numpy/lib/format.py`.

use crate::Dtype;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Longest header in bytes. NumPy's are 128 bytes and its own limit is 10,000.
pub const HEADER_BYTES_MAX: usize = 64 << 10;

/// Most axes, as in NumPy 2.
const AXES_MAX: usize = 64;

/// Contents of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type of the values.
    pub dtype: Dtype,
    /// Length of each axis; values lie in C order.
    pub shape: Vec<u64>,
    /// Bytes before the first value.
    pub data_at: u64,
}

/// Why a file is no array that can be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NpyError {
    #[error("no .npy file: it is empty")]
    Empty,
    #[error("an archive (.npz), expected one .npy file: unpack it")]
    Archive,
    #[error("no .npy file: it does not begin with \\x93NUMPY")]
    Magic,
    #[error("version {0}, expected 1, 2 or 3")]
    Version(u8),
    /// The header is longer than the file, or than any real one.
    #[error("a header of {bytes} bytes, expected at most {max}")]
    Long {
        bytes: u64,
        /// The bytes that are there, or allowed.
        max: u64,
    },
    #[error("malformed header at byte {at}: expected {expected}")]
    Malformed { at: usize, expected: &'static str },
    #[error("big-endian values of type {0:?}, expected little-endian ones")]
    BigEndian(String),
    #[error(
        "values of type {0:?}, expected floats of 2 to 8 bytes, integers of 1 to 8, or bfloat16 \
         by this name"
    )]
    Type(String),
    #[error("Fortran order, expected C order")]
    Fortran,
    #[error("the shape is too large")]
    Shape,
    #[error("{got} bytes of values, expected {expected}")]
    Length {
        /// The bytes that are there.
        got: u64,
        /// Bytes that the shape requires.
        expected: u64,
    },
}

/// Reads the header of a file of `file_bytes` bytes that begins with `head`, which has the whole
/// header or the first [`HEADER_BYTES_MAX`] + 12 bytes.
///
/// # Errors
/// The problem of the file, also when it is longer or shorter than its shape requires.
pub fn parse(head: &[u8], file_bytes: u64) -> Result<Header, NpyError> {
    let rest = head.strip_prefix(MAGIC).ok_or(match head {
        [] => NpyError::Empty,
        [b'P', b'K', 3 | 5, ..] => NpyError::Archive,
        _ => NpyError::Magic,
    })?;
    let (bytes, start) = match rest {
        [1, _, a, b, ..] => (u64::from(u16::from_le_bytes([*a, *b])), 10),
        [2 | 3, _, a, b, c, d, ..] => (u64::from(u32::from_le_bytes([*a, *b, *c, *d])), 12),
        [version, ..] if !(1..=3).contains(version) => return Err(NpyError::Version(*version)),
        _ => return Err(NpyError::Magic),
    };
    let max = (head.len() - start).min(HEADER_BYTES_MAX) as u64;
    if bytes > max {
        return Err(NpyError::Long { bytes, max });
    }
    let text = &head[start..start + bytes as usize];
    let mut header = Literal { text, at: 0 }.header()?;
    header.data_at = start as u64 + bytes;
    let count = header
        .shape
        .iter()
        .try_fold(1u64, |n, axis| n.checked_mul(*axis));
    let expected = count.and_then(|n| n.checked_mul(header.dtype.bytes() as u64));
    let expected = expected
        .filter(|n| *n <= i64::MAX as u64)
        .ok_or(NpyError::Shape)?;
    match file_bytes.saturating_sub(header.data_at) {
        got if got == expected => Ok(header),
        got => Err(NpyError::Length { got, expected }),
    }
}

/// The header of a file with these values, as NumPy writes it: version 1, a multiple of 64 bytes.
///
/// # Panics
/// If the shape has more than [`AXES_MAX`] axes.
pub fn write(dtype: Dtype, shape: &[u64]) -> Vec<u8> {
    assert!(shape.len() <= AXES_MAX, "{} axes", shape.len());
    let axes: String = shape.iter().map(|axis| format!("{axis}, ")).collect();
    let axes = match shape {
        [_] => axes.trim_end(),
        _ => axes.trim_end_matches(", "),
    };
    let descr = dtype.descr();
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({axes}), }}");
    let length = (10 + text.len() + 1).next_multiple_of(64) - 10;
    let mut bytes = [MAGIC, &[1, 0], &(length as u16).to_le_bytes()].concat();
    bytes.extend(format!("{text:<width$}\n", width = length - 1).bytes());
    bytes
}

/// A Python literal that is read from left to right.
struct Literal<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Literal<'a> {
    fn header(mut self) -> Result<Header, NpyError> {
        let (mut dtype, mut fortran, mut shape) = (None, None, None);
        self.take(b"{", "{")?;
        while self.take(b"}", "}").is_err() {
            let key = self.string()?;
            self.take(b":", ":")?;
            match key {
                "descr" => {
                    let descr = self.string()?;
                    let unknown = || match descr.starts_with('>') {
                        true => NpyError::BigEndian(descr.to_owned()),
                        false => NpyError::Type(descr.to_owned()),
                    };
                    dtype = Some(Dtype::from_descr(descr).ok_or_else(unknown)?);
                }
                "fortran_order" => fortran = Some(self.boolean()?),
                "shape" => shape = Some(self.axes()?),
                _ => return Err(self.malformed("descr, fortran_order or shape")),
            }
            if self.take(b",", ",").is_err() {
                self.take(b"}", "} or ,")?;
                break;
            }
        }
        self.spaces();
        if self.at != self.text.len() {
            return Err(self.malformed("the end"));
        }
        let (Some(dtype), Some(fortran), Some(shape)) = (dtype, fortran, shape) else {
            return Err(self.malformed("descr, fortran_order and shape"));
        };
        if fortran && shape.len() > 1 {
            return Err(NpyError::Fortran);
        }
        let data_at = 0;
        Ok(Header {
            dtype,
            shape,
            data_at,
        })
    }

    const fn malformed(&self, expected: &'static str) -> NpyError {
        let at = self.at;
        NpyError::Malformed { at, expected }
    }

    fn spaces(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.iter().take_while(|c| c.is_ascii_whitespace()).count();
    }

    fn take(&mut self, token: &[u8], expected: &'static str) -> Result<(), NpyError> {
        self.spaces();
        if !self.text[self.at..].starts_with(token) {
            return Err(self.malformed(expected));
        }
        self.at += token.len();
        Ok(())
    }

    /// A quoted string without escapes.
    fn string(&mut self) -> Result<&'a str, NpyError> {
        self.spaces();
        let text = self.text;
        let quote = match text.get(self.at) {
            Some(quote @ (b'\'' | b'"')) => *quote,
            _ => return Err(self.malformed("a string")),
        };
        let rest = &text[self.at + 1..];
        let end = rest.iter().position(|c| *c == quote);
        let string = end
            .map(|end| &rest[..end])
            .filter(|s| s.is_ascii() && !s.contains(&b'\\'));
        let string = string.ok_or_else(|| self.malformed("a string"))?;
        self.at += string.len() + 2;
        Ok(std::str::from_utf8(string).expect("it is ASCII"))
    }

    fn boolean(&mut self) -> Result<bool, NpyError> {
        if self.take(b"True", "").is_ok() {
            return Ok(true);
        }
        self.take(b"False", "True or False").map(|()| false)
    }

    fn axes(&mut self) -> Result<Vec<u64>, NpyError> {
        self.take(b"(", "(")?;
        let mut axes = Vec::new();
        while self.take(b")", ")").is_err() {
            if axes.len() == AXES_MAX {
                return Err(NpyError::Shape);
            }
            axes.push(self.number()?);
            if self.take(b",", ",").is_err() {
                self.take(b")", ") or ,")?;
                break;
            }
        }
        Ok(axes)
    }

    /// A length: digits, with the `L` of Python 2 on Windows, or as `np.int64(3)`, which NumPy 2
    /// wrote for its own integers.
    fn number(&mut self) -> Result<u64, NpyError> {
        let is_call = self.take_call();
        let number = self.digits()?;
        let _ = self.take(b"L", "");
        if is_call {
            self.take(b")", ")")?;
        }
        Ok(number)
    }

    /// `np.int64(` or the like; whether it was there.
    fn take_call(&mut self) -> bool {
        self.spaces();
        let rest = &self.text[self.at..];
        let name = ["np.", "numpy."].iter().find_map(|package| {
            let name = rest.strip_prefix(package.as_bytes())?;
            let name = name
                .strip_prefix(b"u")
                .unwrap_or(name)
                .strip_prefix(b"int")?;
            let digits = name.iter().take_while(|c| c.is_ascii_digit()).count();
            name[digits..].strip_prefix(b"(")
        });
        let Some(left) = name else { return false };
        self.at = self.text.len() - left.len();
        true
    }

    fn digits(&mut self) -> Result<u64, NpyError> {
        self.spaces();
        let rest = &self.text[self.at..];
        let digits = rest.iter().take_while(|c| c.is_ascii_digit()).count();
        if digits == 0 {
            return Err(self.malformed("a length"));
        }
        let text = std::str::from_utf8(&rest[..digits]).expect("digits are ASCII");
        let number = text.parse().map_err(|_| NpyError::Shape)?;
        self.at += digits;
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, values: usize) -> Vec<u8> {
        let length = header.len() as u16;
        let mut bytes = [MAGIC, &[1, 0], &length.to_le_bytes(), header.as_bytes()].concat();
        bytes.extend(std::iter::repeat_n(0, values));
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Header, NpyError> {
        parse(bytes, bytes.len() as u64)
    }

    #[test]
    fn headers_of_numpy_are_read_and_written() {
        let header = "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }          \n";
        let got = read(&file(header, 24)).unwrap();
        assert_eq!((got.dtype, &got.shape[..]), (Dtype::F64, &[3][..]));
        for (dtype, shape) in [
            (Dtype::F64, &[][..]),
            (Dtype::U8, &[7]),
            (Dtype::I16, &[2, 3, 4]),
            (Dtype::Bool, &[0, 5]),
        ] {
            let mut bytes = write(dtype, shape);
            assert_eq!(bytes.len() % 64, 0);
            let count: u64 = shape.iter().product();
            bytes.resize(bytes.len() + count as usize * dtype.bytes(), 0);
            let got = read(&bytes).unwrap();
            assert_eq!((got.dtype, &got.shape[..]), (dtype, shape));
        }
        for shape in [
            "(3L,)",
            "(np.int64(3),)",
            "(1L, np.uint32(3))",
            "(numpy.int64(3), 1)",
        ] {
            let header = format!("{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}");
            let got = read(&file(&header, 24)).unwrap();
            assert_eq!(got.shape.iter().product::<u64>(), 3, "{shape}");
        }
        let tight = "{\"shape\":(2,4),'fortran_order':False,'descr':\"|i1\"}";
        assert_eq!(read(&file(tight, 8)).unwrap().shape, [2, 4]);
    }

    #[test]
    fn bad_headers_are_refused_by_name() {
        let header = |descr: &str, fortran: &str, shape: &str| {
            format!("{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}")
        };
        for (header, said) in [
            (
                header("'<f8'", "False", "(4,)"),
                "24 bytes of values, expected 32",
            ),
            (
                header("'<f8'", "False", "(2,)"),
                "24 bytes of values, expected 16",
            ),
            (header("'>f8'", "False", "(3,)"), "big-endian"),
            (header("'<V2'", "False", "(3,)"), "bfloat16 by this name"),
            (header("'<f8'", "False", "(np.float64(3),)"), "a length"),
            (header("'<f8'", "False", "(np.int64(3,)"), "expected )"),
            (header("'|O'", "False", "(3,)"), "values of type \"|O\""),
            (
                header("[('a', '<f8')]", "False", "(3,)"),
                "expected a string",
            ),
            (header("'<f8'", "True", "(3, 1)"), "Fortran"),
            (header("'<f8'", "0", "(3,)"), "True or False"),
            (header("'<f8'", "False", "(-3,)"), "a length"),
            (
                header("'<f8'", "False", "(4294967296, 4294967296)"),
                "too large",
            ),
            (
                header("'<f8'", "False", "(99999999999999999999,)"),
                "too large",
            ),
            (header("'<f8'", "False", "(3"), "expected a length"),
            (header("'<f8'", "False", "3"), "expected ("),
            (
                header("'<f8'", "False", &format!("({})", "1,".repeat(65))),
                "too large",
            ),
            ("{'descr': '<f8', 'shape': (3,)}".into(), "and shape"),
            (
                "{'evil': '<f8', 'shape': (3,)}".into(),
                "descr, fortran_order or shape",
            ),
            ("__import__('os')".into(), "expected {"),
            (header("'<f8'", "False", "(3,)") + "x", "the end"),
            (header("'<f8", "False", "(3,)"), "values of type"),
            (String::new(), "expected {"),
        ] {
            let got = read(&file(&header, 24)).unwrap_err().to_string();
            assert!(got.contains(said), "{header}: {got}");
        }
        assert_eq!(read(b"PK\x03\x04"), Err(NpyError::Archive));
        assert_eq!(read(b""), Err(NpyError::Empty));
        assert_eq!(read(b"\x80\x04\x95"), Err(NpyError::Magic));
        assert_eq!(read(b"\x93NUMPY\x01"), Err(NpyError::Magic));
        assert_eq!(read(b"\x93NUMPY\x09\0\0\0\0\0"), Err(NpyError::Version(9)));
        let long = b"\x93NUMPY\x02\0\xff\xff\xff\xff{";
        assert!(matches!(read(long), Err(NpyError::Long { .. })));
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let good = write(Dtype::F64, &[3]);
        for at in 0..good.len() {
            for byte in [0, b'\'', b'(', b'9', 0xff] {
                let mut bytes = good.clone();
                bytes[at] = byte;
                let _ = read(&bytes);
                let _ = read(&bytes[..at]);
            }
        }
    }
}
