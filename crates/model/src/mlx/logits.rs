//! The logits of a step on the device, and the part of them that goes to the host.
//!
//! ```text
//! rows ask for      (R, V) on the device                     bytes of a row to the host
//! the largest       argmax: its place and logit              8
//! the n largest     argpartition: places and logits          8 for each of n + n/4 + 17
//! all               (R, V) in f32                            4 V
//! ```
//!
//! A row whose largest logits do not show that they suffice goes to the host whole: where all
//! logits are equal, for example. Logits that stay on the device are NaN on the host, as other
//! ranks' are ([`candidates`](crate::candidates)). Sampling chooses the same token then.

use paceline_mlx::{Array, Dtype, Stream};

use crate::Error;
use crate::candidates::LogitExtent;

/// Logits of a step, perhaps still being computed.
#[derive(Debug)]
pub(super) struct StepLogits {
    /// `(R, V)`, as the head gave them.
    all: Array,
    sent: Sent,
}

/// Arrays that go to the host.
#[derive(Debug)]
enum Sent {
    /// `(R, V)` in f32, rows one after the other.
    Whole(Array),
    Largest(Largest),
}

/// The largest logits of each row.
#[derive(Debug)]
struct Largest {
    /// `(R, n)`
    places: Array,
    /// `(R, n)` in f32
    logits: Array,
    extents: Vec<LogitExtent>,
}

impl StepLogits {
    /// Of rows `(R, V)` that need `extents`.
    pub(super) fn new(
        stream: &Stream,
        all: Array,
        extents: Vec<LogitExtent>,
    ) -> Result<Self, Error> {
        let probes: Option<Vec<usize>> = extents.iter().map(|extent| extent.probe()).collect();
        let (most, vocab) = (probes.and_then(|n| n.into_iter().max()), all.shape()[1]);
        let sent = match most.map(|n| n as i32) {
            Some(n) if 2 * n < vocab => Sent::Largest(Largest::new(stream, &all, n, extents)?),
            _ => Sent::Whole(stream.rows_f32(&all)?),
        };
        Ok(Self { all, sent })
    }

    /// The arrays that [`read`](Self::read) reads once they are evaluated.
    pub(super) fn arrays(&self) -> Vec<&Array> {
        match &self.sent {
            Sent::Whole(all) => vec![all],
            Sent::Largest(largest) => vec![&largest.places, &largest.logits],
        }
    }

    /// Tokens `(R,)` of the rows, where each is that of the largest logit.
    pub(super) fn greedy(&self, stream: &Stream) -> Result<Option<Array>, Error> {
        match &self.sent {
            Sent::Largest(largest) if largest.places.shape()[1] == 1 => {
                Ok(Some(stream.reshape(&largest.places, &[-1])?))
            }
            _ => Ok(None),
        }
    }

    /// The same tokens on the host, once they are evaluated.
    pub(super) fn greedy_tokens(&self) -> Result<Vec<u32>, Error> {
        match &self.sent {
            Sent::Largest(largest) => Ok(largest.places.to_u32()?),
            Sent::Whole(_) => Ok(Vec::new()),
        }
    }

    /// Copies evaluated logits into `rows`, `(R, V)`. Returns the bytes that came from the device.
    pub(super) fn read(&self, stream: &Stream, rows: &mut Vec<f32>) -> Result<u64, Error> {
        rows.clear();
        let largest = match &self.sent {
            Sent::Whole(all) => {
                rows.extend_from_slice(all.as_f32()?);
                return Ok(all.n_bytes());
            }
            Sent::Largest(largest) => largest,
        };
        let vocab = self.all.shape()[1] as usize;
        rows.resize(largest.extents.len() * vocab, f32::NAN);
        let (places, logits) = (largest.places.to_u32()?, largest.logits.as_f32()?);
        let n = largest.places.shape()[1] as usize;
        let each = places.chunks_exact(n).zip(logits.chunks_exact(n));
        let mut bytes = 8 * places.len() as u64;
        for (i, (places, logits)) in each.enumerate() {
            let row = &mut rows[i * vocab..(i + 1) * vocab];
            if !largest.extents[i].is_covered(logits) {
                let whole = self.row(stream, i as i32)?;
                row.copy_from_slice(whole.as_f32()?);
                bytes += whole.n_bytes();
                continue;
            }
            for (place, logit) in places.iter().zip(logits) {
                row[*place as usize] = *logit;
            }
        }
        Ok(bytes)
    }

    /// Row `i`, evaluated.
    fn row(&self, stream: &Stream, i: i32) -> Result<Array, Error> {
        let vocab = self.all.shape()[1];
        let row = stream.rows_f32(&stream.slice(&self.all, &[i, 0], &[i + 1, vocab])?)?;
        stream.eval([&row])?;
        Ok(row)
    }
}

impl Largest {
    /// The `n` largest of each row of `all`.
    fn new(stream: &Stream, all: &Array, n: i32, extents: Vec<LogitExtent>) -> Result<Self, Error> {
        let places = match n {
            1 => stream.argmax(all, 1)?,
            n => {
                let order = stream.argpartition(&stream.negative(all)?, n - 1, 1)?;
                let rows = all.shape()[0];
                stream.contiguous(&stream.slice(&order, &[0, 0], &[rows, n])?)?
            }
        };
        let logits = stream.take_along(all, &places, 1)?;
        let logits = stream.contiguous(&stream.astype(&logits, Dtype::F32)?)?;
        Ok(Self {
            places,
            logits,
            extents,
        })
    }
}

#[cfg(test)]
mod tests {
    use paceline_base::SplitMix64;

    use super::*;
    use crate::TopLogits;

    /// Rows with ties, among them the largest, and rows without numbers.
    #[test]
    fn the_largest_logits_are_those_of_whole_rows() {
        const VOCAB: usize = 300;
        let Some(path) = std::env::var_os("PACELINE_MLXC") else {
            return eprintln!("SKIPPED logits of mlx: PACELINE_MLXC names no libmlxc");
        };
        let library = paceline_mlx::Library::load(path.as_ref()).unwrap();
        let stream = library.stream(paceline_mlx::DeviceKind::Cpu).unwrap();
        let mut random = SplitMix64::new(7);
        let mut rows: Vec<f32> = (0..5 * VOCAB)
            .map(|_| random.below(4000) as f32 / 1000.0)
            .collect();
        rows[VOCAB..2 * VOCAB].fill(1.5);
        rows[2 * VOCAB..3 * VOCAB].fill(f32::NAN);
        rows[3 * VOCAB..4 * VOCAB].fill(f32::NEG_INFINITY);
        let top = |n, within| LogitExtent::Top(TopLogits { n, within });
        for extent in [LogitExtent::Best, top(1, -10), top(20, -10), top(5, 0)] {
            let all = stream.array_f32(&rows, &[5, VOCAB as i32]).unwrap();
            let logits = StepLogits::new(&stream, all, vec![extent; 5]).unwrap();
            stream.eval(logits.arrays()).unwrap();
            let mut got = Vec::new();
            let bytes = logits.read(&stream, &mut got).unwrap();
            for (row, got) in rows.chunks(VOCAB).zip(got.chunks(VOCAB)) {
                let parts = [0..0, 0..VOCAB];
                let expected = crate::candidates::gathered(row, &parts, extent);
                for (expected, got) in expected.iter().zip(got) {
                    let is_needed = !expected.is_nan();
                    let is_same = got.to_bits() == expected.to_bits();
                    assert!(is_same || !is_needed, "{extent:?}: {got} for {expected}");
                }
            }
            let most = extent.probe().unwrap() as u64;
            assert!(bytes >= 5 * 8 * most && bytes < 4 * rows.len() as u64);
        }
    }
}
