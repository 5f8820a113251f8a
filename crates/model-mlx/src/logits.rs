//! The logits of a step on the device, and the part of them that goes to the host.
//!
//! ```text
//! rows ask for      (R, V) on the device                     bytes of a row to the host
//! the largest       argmax: its place and logit              8
//! the n largest     argpartition: places and logits          8 for each of n + n/4 + 17
//! a drawn token     the token, its logit and the largest     12
//! all               (R, V) in f32                            4 V
//! ```
//!
//! A row whose largest logits do not show that they suffice goes to the host whole: where all
//! logits are equal, for example. Logits that stay on the device are NaN on the host, as other
//! ranks' are ([`gathered`](paceline_model::backend::gathered)). Sampling chooses the same token
//! then.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::backend::LogitExtent;
use paceline_model::{Error, Logits, TokenDraw};

use super::draw::DrawnTokens;

/// Logits of a step, perhaps still being computed.
#[derive(Debug)]
pub(super) struct StepLogits {
    /// `(R, V)`, as the head gave them.
    all: Array,
    /// The rows whose tokens are drawn, in ascending order, as those of `others` are.
    drawn: Option<(Vec<usize>, DrawnTokens)>,
    others: Option<(Vec<usize>, Sent)>,
    /// `(T, captures C)` in f32, of the same step.
    captured: Option<Array>,
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
    /// Of rows `(R, V)` for these `requests`.
    pub(super) fn new(stream: &Stream, all: Array, requests: &[Logits]) -> Result<Self, Error> {
        let has_draws = requests.iter().any(|r| matches!(r, Logits::Drawn(_)));
        let draw_of = |request: &Logits| match request {
            Logits::Drawn(draw) => Some(*draw),
            Logits::Best | Logits::AllBest if has_draws => Some(TokenDraw::LARGEST),
            _ => None,
        };
        let draws: Vec<TokenDraw> = requests.iter().filter_map(draw_of).collect();
        let rows = |is_drawn: bool| {
            let rows = requests.iter().enumerate();
            let own = rows.filter(|(_, request)| draw_of(request).is_some() == is_drawn);
            own.map(|(row, _)| row).collect::<Vec<_>>()
        };
        let part = |rows: &[usize]| match rows.len() == requests.len() {
            true => Ok(all.clone()),
            false => {
                let places: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
                let places = stream.array_u32(&places, &[rows.len() as i32])?;
                Ok::<_, Error>(stream.take(&all, &places, 0)?)
            }
        };
        let (drawn, others) = (rows(true), rows(false));
        let drawn = (!drawn.is_empty()).then(|| {
            let tokens = DrawnTokens::new(stream, &part(&drawn)?, &draws)?;
            Ok::<_, Error>((drawn, tokens))
        });
        let others = (!others.is_empty()).then(|| {
            let extents = others.iter().map(|row| requests[*row].extent());
            let sent = Sent::new(stream, &part(&others)?, extents.collect())?;
            Ok::<_, Error>((others, sent))
        });
        let (drawn, others) = (drawn.transpose()?, others.transpose()?);
        Ok(Self {
            all,
            drawn,
            others,
            captured: None,
        })
    }

    /// The same, with captured rows of its step.
    pub(super) fn with_captured(self, captured: Option<Array>) -> Self {
        Self { captured, ..self }
    }

    /// Copies evaluated captured rows into `out`.
    pub(super) fn read_captured(&self, out: &mut Vec<f32>) -> Result<(), Error> {
        out.clear();
        if let Some(captured) = &self.captured {
            out.extend_from_slice(captured.as_f32()?);
        }
        Ok(())
    }

    /// The arrays that [`read`](Self::read) reads once they are evaluated.
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let drawn = self.drawn.iter().flat_map(|(_, drawn)| drawn.arrays());
        let others = self.others.iter().flat_map(|(_, sent)| sent.arrays());
        drawn.chain(others).chain(&self.captured).collect()
    }

    /// Tokens `(R, 1)` of the rows, where the device has those of all: drawn ones, or each that of
    /// the largest logit.
    fn all_tokens(&self) -> Option<&Array> {
        match (&self.drawn, &self.others) {
            (Some((_, drawn)), None) => Some(&drawn.tokens),
            (None, Some((_, Sent::Largest(largest)))) => {
                Some(&largest.places).filter(|places| places.shape()[1] == 1)
            }
            _ => None,
        }
    }

    /// The same, `(R,)`.
    pub(super) fn tokens(&self, stream: &Stream) -> Result<Option<Array>, Error> {
        let tokens = self.all_tokens();
        let tokens = tokens.map(|tokens| stream.reshape(tokens, &[-1]));
        Ok(tokens.transpose()?)
    }

    /// The same tokens on the host, once they are evaluated.
    pub(super) fn host_tokens(&self) -> Result<Vec<u32>, Error> {
        let tokens = self.all_tokens().map(Array::to_u32);
        Ok(tokens.transpose()?.unwrap_or_default())
    }

    /// The place and the value of each row's largest logit, once they are evaluated; `None` where
    /// more goes to the host.
    pub(super) fn largest(&self) -> Result<Option<Vec<(u32, f32)>>, Error> {
        let (None, Some((_, Sent::Largest(largest)))) = (&self.drawn, &self.others) else {
            return Ok(None);
        };
        let (places, logits) = (largest.places.to_u32()?, largest.logits.as_f32()?);
        let each = places.into_iter().zip(logits.iter().copied());
        Ok((largest.places.shape()[1] == 1).then(|| each.collect()))
    }

    /// Copies evaluated logits into `rows`, `(R, V)`. Returns the bytes that came from the device.
    pub(super) fn read(&self, stream: &Stream, rows: &mut Vec<f32>) -> Result<u64, Error> {
        let shape = self.all.shape();
        let (n, vocab) = (shape[0] as usize, shape[1] as usize);
        rows.clear();
        if let (None, Some((_, Sent::Whole(all)))) = (&self.drawn, &self.others) {
            rows.extend_from_slice(all.as_f32()?);
            return Ok(all.n_bytes());
        }
        rows.resize(n * vocab, f32::NAN);
        let mut bytes = 0;
        let mut missing = Vec::new();
        if let Some((places, drawn)) = &self.drawn {
            bytes += drawn.n_bytes();
            for (row, logit) in places.iter().zip(drawn.read()?) {
                match logit {
                    Some((token, logit)) => rows[row * vocab + token as usize] = logit,
                    None => missing.push(*row),
                }
            }
        }
        if let Some((places, sent)) = &self.others {
            bytes += sent.n_bytes();
            missing.extend(sent.read(places, rows, vocab)?);
        }
        for row in missing {
            let whole = self.row(stream, row as i32)?;
            rows[row * vocab..][..vocab].copy_from_slice(whole.as_f32()?);
            bytes += whole.n_bytes();
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

impl Sent {
    /// Of rows `(R, V)` that need `extents`.
    fn new(stream: &Stream, all: &Array, extents: Vec<LogitExtent>) -> Result<Self, Error> {
        let probes: Option<Vec<usize>> = extents.iter().map(|extent| extent.probe()).collect();
        let (most, vocab) = (probes.and_then(|n| n.into_iter().max()), all.shape()[1]);
        Ok(match most.map(|n| n as i32) {
            Some(n) if 2 * n < vocab => Self::Largest(Largest::new(stream, all, n, extents)?),
            _ => Self::Whole(stream.rows_f32(all)?),
        })
    }

    fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Whole(all) => vec![all],
            Self::Largest(largest) => vec![&largest.places, &largest.logits],
        }
    }

    fn n_bytes(&self) -> u64 {
        self.arrays().into_iter().map(Array::n_bytes).sum()
    }

    /// Writes the logits to the rows `places` of `rows (R, V)`. Returns those of them that are
    /// needed whole.
    fn read(&self, places: &[usize], rows: &mut [f32], vocab: usize) -> Result<Vec<usize>, Error> {
        let mut missing = Vec::new();
        match self {
            Self::Whole(all) => {
                let each = all.as_f32()?.chunks_exact(vocab).zip(places);
                each.for_each(|(logits, at)| rows[at * vocab..][..vocab].copy_from_slice(logits));
            }
            Self::Largest(largest) => {
                let (tokens, logits) = (largest.places.to_u32()?, largest.logits.as_f32()?);
                let n = largest.places.shape()[1] as usize;
                let each = tokens.chunks_exact(n).zip(logits.chunks_exact(n));
                for (i, (tokens, logits)) in each.enumerate() {
                    if !largest.extents[i].is_covered(logits) {
                        missing.push(places[i]);
                        continue;
                    }
                    let row = &mut rows[places[i] * vocab..][..vocab];
                    let each = tokens.iter().zip(logits);
                    each.for_each(|(token, logit)| row[*token as usize] = *logit);
                }
            }
        }
        Ok(missing)
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
    use paceline_model::TopLogits;

    /// Rows with ties, among them the largest, and rows without numbers.
    #[test]
    fn the_largest_logits_are_those_of_whole_rows() {
        const VOCAB: usize = 300;
        let Some(stream) = crate::test_stream("logits of mlx") else {
            return;
        };
        let mut random = SplitMix64::new(7);
        let mut rows: Vec<f32> = (0..5 * VOCAB)
            .map(|_| random.below(4000) as f32 / 1000.0)
            .collect();
        rows[VOCAB..2 * VOCAB].fill(1.5);
        rows[2 * VOCAB..3 * VOCAB].fill(f32::NAN);
        rows[3 * VOCAB..4 * VOCAB].fill(f32::NEG_INFINITY);
        let top = |n, within| Logits::Top(TopLogits { n, within });
        for request in [Logits::Best, top(1, -10), top(20, -10), top(5, 0)] {
            let extent = request.extent();
            let all = stream.array_f32(&rows, &[5, VOCAB as i32]).unwrap();
            let logits = StepLogits::new(&stream, all, &[request; 5]).unwrap();
            stream.eval(logits.arrays()).unwrap();
            let mut got = Vec::new();
            let bytes = logits.read(&stream, &mut got).unwrap();
            for (row, got) in rows.chunks(VOCAB).zip(got.chunks(VOCAB)) {
                let parts = [0..0, 0..VOCAB];
                let expected = paceline_model::backend::gathered(row, &parts, extent);
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
    /// Rows that are drawn between others.
    #[test]
    fn each_row_gets_what_it_asks_for() {
        const VOCAB: usize = 300;
        let Some(stream) = crate::test_stream("rows of mlx") else {
            return;
        };
        let mut rows: Vec<f32> = (0..5 * VOCAB).map(|i| (i * 37 % 301) as f32).collect();
        rows[3 * VOCAB] = f32::NAN;
        let drawn = Logits::Drawn(TokenDraw {
            temperature: 1e-3,
            ..TokenDraw::LARGEST
        });
        let all = stream.array_f32(&rows, &[5, VOCAB as i32]).unwrap();
        let requests = [Logits::Last, drawn, Logits::Best, drawn, Logits::Last];
        let logits = StepLogits::new(&stream, all, &requests).unwrap();
        assert!(logits.tokens(&stream).unwrap().is_none());
        stream.eval(logits.arrays()).unwrap();
        let mut got = Vec::new();
        let bytes = logits.read(&stream, &mut got).unwrap();
        assert_eq!(bytes, 3 * 12 + 3 * 4 * VOCAB as u64);
        for (i, (row, got)) in rows.chunks(VOCAB).zip(got.chunks(VOCAB)).enumerate() {
            let is_whole = [0, 3, 4].contains(&i);
            let largest = row.iter().copied().fold(0.0, f32::max);
            for (expected, got) in row.iter().zip(got) {
                let is_sent = is_whole || *expected == largest;
                assert_eq!(got.is_nan(), !is_sent || expected.is_nan(), "row {i}");
                assert!(got.is_nan() || got == expected, "row {i}");
            }
        }
    }
}
