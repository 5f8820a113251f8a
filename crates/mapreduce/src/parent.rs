//! Access of a worker to its parent's file over the control channel, where they share no folder.
//!
//! The worker sends rows of a result to the parent, which writes them.

use std::sync::Arc;

use paceline_cluster::Control;

use crate::messages::{FromWorker, PackedPartial, ToWorker};
use crate::{Dtype, Error, Sink};

/// The worker's end of its control channel.
pub(crate) type ParentChannel = Arc<Control<ToWorker, FromWorker>>;

/// Bytes of values in a message: 1.4 MB as text. A connection of 2 Mbit/s moves that within the 10
/// s that a parent waits for a message to be read. A whole number of values of any type.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// First byte of values as they are, and of differences.
const PLAIN: u8 = 0;
const DIFFERENCES: u8 = 1;

/// A job's exchange with the worker's parent: sends results.
#[derive(Debug)]
pub struct ParentConnection {
    channel: ParentChannel,
    job: u64,
    /// Type of the values that are written.
    dtype: Dtype,
}

impl ParentConnection {
    pub(crate) const fn new(channel: ParentChannel, job: u64, dtype: Dtype) -> Self {
        Self {
            channel,
            job,
            dtype,
        }
    }
}

impl Sink for ParentConnection {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn write_bytes(&self, first_row: u64, bytes: &[u8]) -> Result<(), Error> {
        let rows = PIECE_BYTES / self.dtype.bytes();
        for (first_row, piece) in (first_row..).step_by(rows).zip(bytes.chunks(PIECE_BYTES)) {
            self.channel.send(&FromWorker::Rows {
                job: self.job,
                first_row,
                values: PackedPartial(pack(piece, self.dtype.bytes())),
            })?;
        }
        Ok(())
    }
}

/// Values of `width` bytes for a message: as they are, or as differences of neighbours in 7 bits a
/// byte where that is shorter. Sorted numbers have small ones: of 10^8 random f64, half the bytes.
pub(crate) fn pack(bytes: &[u8], width: usize) -> Vec<u8> {
    let mut packed = Vec::with_capacity(bytes.len() + 1);
    packed.push(DIFFERENCES);
    let mut last = 0;
    for value in bytes.chunks_exact(width) {
        let value = number(value);
        let difference = value.wrapping_sub(last) as i64;
        // The sign as the lowest bit, so that small negative differences are short too.
        let mut rest = (difference << 1 ^ difference >> 63) as u64;
        while rest >= 0x80 {
            packed.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        packed.push(rest as u8);
        last = value;
        if packed.len() > bytes.len() {
            packed.clear();
            packed.push(PLAIN);
            packed.extend_from_slice(bytes);
            break;
        }
    }
    packed
}

/// The values of [`pack`]; `None` for bytes that it does not give, or more values than a message
/// has.
pub(crate) fn unpack(packed: &[u8], width: usize) -> Option<Vec<u8>> {
    let (kind, rest) = packed.split_first()?;
    match *kind {
        PLAIN => Some(rest.to_vec()).filter(|it| it.len().is_multiple_of(width)),
        DIFFERENCES => {
            let mut bytes = Vec::with_capacity(rest.len());
            let (mut last, mut number, mut shift) = (0u64, 0u64, 0);
            for byte in rest {
                number |= u64::from(byte & 0x7f).checked_shl(shift)?;
                shift += 7;
                if byte & 0x80 != 0 {
                    continue;
                }
                last = last.wrapping_add(number >> 1 ^ (number & 1).wrapping_neg());
                bytes.extend_from_slice(&last.to_le_bytes()[..width]);
                (number, shift) = (0, 0);
            }
            (shift == 0 && bytes.len() <= PIECE_BYTES).then_some(bytes)
        }
        _ => None,
    }
}

/// The number of at most 8 bytes, little-endian.
fn number(value: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..value.len()].copy_from_slice(value);
    u64::from_le_bytes(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_and_lies_do_not() {
        let sorted: Vec<u8> = (0..1000u64)
            .flat_map(|i| (i * i * 37).to_le_bytes())
            .collect();
        let mixed: Vec<u8> = (0..1000u32)
            .flat_map(|i| i.wrapping_mul(0x9E37_79B9).to_le_bytes())
            .collect();
        let extreme: Vec<u8> = [0, u64::MAX, 1, 1 << 63].map(u64::to_le_bytes).concat();
        for (bytes, width) in [
            (&sorted, 8),
            (&mixed, 4),
            (&mixed, 1),
            (&mixed, 2),
            (&extreme, 8),
        ] {
            let packed = pack(bytes, width);
            assert!(packed.len() <= bytes.len() + 1);
            assert_eq!(unpack(&packed, width).as_ref(), Some(bytes), "{width}");
        }
        assert!(pack(&sorted, 8).len() < 3 * 1000);
        assert_eq!(unpack(&pack(&[], 8), 8), Some(Vec::new()));
        let endless = [&[DIFFERENCES][..], &[0x80; 11]].concat();
        let many = [&[DIFFERENCES][..], &vec![0; (PIECE_BYTES >> 3) + 1]].concat();
        for lie in [
            &[][..],
            &[2],
            &[PLAIN, 1, 2],
            &[DIFFERENCES, 0x80],
            &endless,
            &many,
        ] {
            assert_eq!(unpack(lie, 8), None);
        }
    }
}
