//! Runs of pages, and the growth and bytes of a cache.

use paceline_base::SplitMix64;
use paceline_tensor::AttentionRows;

use super::*;

/// The rows `new` of a sequence with `pages`, which begin with its page `first_page`.
fn rows(pages: &[u32], first_page: usize, new: Range<usize>) -> AttentionRows<'_> {
    AttentionRows {
        rows: new.len(),
        position: new.start,
        pages,
        first_page,
    }
}

#[test]
fn pages_that_follow_one_another_are_one_run() {
    let whole = |range: Range<usize>| vec![range];
    let runs =
        |pages, positions: Range<usize>| super::runs(&rows(pages, 0, positions.clone()), positions);
    assert_eq!(runs(&[0, 1, 2], 0..192), whole(0..192));
    assert_eq!(runs(&[5, 6], 63..65), whole(383..385));
    assert_eq!(runs(&[3], 7..8), whole(199..200));
    assert!(runs(&[3], 7..7).is_empty());
    assert_eq!(runs(&[1, 0, 3], 60..130), [124..128, 0..64, 192..194]);
    let released = rows(&[9, 2], 5, 389..390);
    assert_eq!(super::runs(&released, 330..390), [586..640, 128..134]);
}

/// A schedule: sequences over the free pages of a cache.
struct Schedule {
    random: SplitMix64,
    free: Vec<u32>,
    sequences: Vec<Sequence>,
    /// Pages that no row sees any more are free again.
    window: Option<usize>,
}

#[derive(Clone, Default)]
struct Sequence {
    first_page: usize,
    pages: Vec<u32>,
    end: usize,
}

impl Schedule {
    fn new(seed: u64, pages: usize, window: Option<usize>) -> Self {
        let mut random = SplitMix64::new(seed);
        let sequences = vec![Sequence::default(); 1 + random.below(8)];
        let mut free: Vec<u32> = (0..pages as u32).rev().collect();
        if random.below(2) == 0 {
            random.shuffle(&mut free);
        }
        Self {
            random,
            free,
            sequences,
            window,
        }
    }

    /// A sequence's step, a chunk of a prompt or one position: its state and new positions.
    /// Where no page is free it ends instead, and the next one takes its place.
    fn step(&mut self) -> Option<(Sequence, Range<usize>)> {
        let i = self.random.below(self.sequences.len());
        let n = match self.random.below(4) {
            0 => 1 + self.random.below(512),
            _ => 1,
        };
        let sequence = &mut self.sequences[i];
        let new = sequence.end..sequence.end + n;
        let first = seen(&new, self.window).start / PAGE;
        let released = first - sequence.first_page;
        self.free.extend(sequence.pages.drain(..released));
        sequence.first_page = first;
        let wanted = new.end.div_ceil(PAGE) - first - sequence.pages.len();
        if wanted > self.free.len() || self.random.below(64) == 0 {
            self.free.append(&mut sequence.pages);
            *sequence = Sequence::default();
            return None;
        }
        let taken = self.free.drain(self.free.len() - wanted..).rev();
        sequence.pages.extend(taken);
        sequence.end = new.end;
        Some((sequence.clone(), new))
    }
}

/// MLX on CUDA reads a slice of a whole multiple of 256 rows as if it began at row 0. The
/// arrays grow from a few pages to all that a cache may have.
#[test]
fn no_slice_for_attention_starts_within_a_buffer_like_mlx_lms() {
    let mut trapped = 0;
    for seed in 0..200 {
        let mut random = SplitMix64::new(seed);
        let pages = 4 * (1 + random.below(128)) - random.below(2) * random.below(4);
        let released = [None, Some(300)][random.below(2)];
        let mut schedule = Schedule::new(seed, pages, released);
        let mut held = pages.min(1 + random.below(8));
        for (sequence, new) in (0..200).filter_map(|_| schedule.step()) {
            let of = rows(&sequence.pages, sequence.first_page, new.clone());
            let written = runs(&of, new.clone());
            let needed = written.iter().map(|run| run.end).max().unwrap();
            held = grown(rows_of(held), needed, pages).unwrap_or(held);
            assert!(held <= pages, "seed {seed}: {held} pages");
            assert!(needed <= rows_of(held), "seed {seed}: {held} pages");
            for window in [released, Some(128), Some(300)] {
                let runs = runs(&of, seen(&new, window));
                let [run] = &runs[..] else { continue };
                let (begins, rows) = (run.start, rows_of(held));
                assert!(run.end <= pages * PAGE, "seed {seed}: {run:?}");
                assert!(
                    begins == 0 || !rows.is_multiple_of(256),
                    "seed {seed}: rows {run:?} of {rows}"
                );
                trapped += usize::from(
                    begins > 0 && run.len() >= 256 && (held * PAGE).is_multiple_of(256),
                );
            }
        }
    }
    assert!(trapped > 100, "{trapped} slices would be misread");
}

const ROWS: LayerSizes = LayerSizes::Rows {
    heads: 1,
    key: 2,
    value: 2,
};
const LATENT: LayerSizes = LayerSizes::Latent {
    key: 2,
    value: 1,
    index: 0,
};

/// The arrays themselves, and rows behind the first page as they come back.
#[test]
fn arrays_have_the_rows_of_their_shape() {
    let Some(stream) = crate::test_stream("rows of an mlx cache") else {
        return;
    };
    let shape = Shape {
        layers: vec![(ROWS, 8), (LATENT, 4)],
        dtype: Dtype::F32,
        bits: None,
    };
    let mut cache = Cache::new(&stream, &shape).unwrap();
    let lengths = |cache: &Cache| -> Vec<i32> {
        let arrays = cache.arrays();
        arrays.iter().map(|array| array.shape()[2]).collect()
    };
    assert_eq!(lengths(&cache), [9 * 64, 9 * 64, 5 * 64]);
    let bytes: u64 = cache.arrays().iter().map(|array| array.n_bytes()).sum();
    assert_eq!(bytes, shape.bytes());

    let values: Vec<f32> = (0..600).map(|i| i as f32).collect();
    let new = stream.array_f32(&values, &[1, 1, 300, 2]).unwrap();
    let span = Span::new(&stream, &rows(&[3, 4, 5, 6, 7], 0, 0..300), None, None).unwrap();
    cache.write(&stream, 0, &span, [&new, &new]).unwrap();
    let [keys, _] = cache.read(&stream, 0, &span.view).unwrap();
    let keys = stream.rows_f32(&keys).unwrap();
    stream.eval([&keys]).unwrap();
    assert_eq!(keys.as_f32().unwrap(), values);
    assert_eq!(lengths(&cache), [9 * 64, 9 * 64, 5 * 64]);
}

/// Pages behind the first ones take memory when they are needed, and the rows before stay.
#[test]
fn a_cache_grows_to_the_pages_that_are_written() {
    let Some(stream) = crate::test_stream("growth of an mlx cache") else {
        return;
    };
    let shape = Shape {
        layers: vec![(LATENT, 1000), (ROWS, 100)],
        dtype: Dtype::F32,
        bits: None,
    };
    let mut cache = Cache::new(&stream, &shape).unwrap();
    let values: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let new = stream.array_f32(&values, &[1, 1, 64, 2]).unwrap();
    let span = |page| Span::new(&stream, &rows(&[page], 0, 0..64), None, None).unwrap();
    // A page more where they would be a multiple of 256 rows.
    for (page, pages) in [(3, 129), (128, 129), (129, 258), (300, 517), (999, 1001)] {
        let span = span(page);
        let growth = cache.growth(|layer| [span.end(), 0][layer]);
        cache.grow(&stream, &growth).unwrap();
        cache.write_latent(&stream, 0, &span, &new).unwrap();
        let lengths = cache.arrays().into_iter().map(|array| array.shape()[2]);
        let lengths: Vec<i32> = lengths.collect();
        assert_eq!(lengths, [pages * 64, 101 * 64, 101 * 64], "page {page}");
    }
    for page in [3, 128, 129, 300, 999] {
        let [keys, _] = cache.read(&stream, 0, &span(page).view).unwrap();
        let keys = stream.rows_f32(&keys).unwrap();
        stream.eval([&keys]).unwrap();
        assert_eq!(keys.as_f32().unwrap(), values, "page {page}");
    }
}

#[test]
fn a_cache_counts_its_bytes() {
    let rows = LayerSizes::Rows {
        heads: 2,
        key: 16,
        value: 32,
    };
    let latent = LayerSizes::Latent {
        key: 48,
        value: 32,
        index: 0,
    };
    let of = StateSizes {
        heads: 4,
        key_heads: 2,
        key: 16,
        value: 32,
        decays: 16,
    };
    let recurrent = |state| {
        let channels = 192;
        LayerSizes::Recurrent(RecurrentSizes { channels, state })
    };
    let shape = Shape {
        layers: vec![
            (rows, 5),
            (LayerSizes::Nothing, 5),
            (latent, 2),
            (recurrent(Some(of)), 3),
            (recurrent(None), 2),
        ],
        dtype: Dtype::BF16,
        bits: None,
    };
    let positions = 64 * 2 * (5 * 2 * (16 + 32) + 2 * 48);
    let net = 3 * 4 * (4 * 16 * 32 + 64 * (192 + 2 * 16 + 4 * 32 + 4 * 16));
    let conv = 2 * 4 * 64 * 192;
    assert_eq!(shape.bytes(), positions + net + conv);
}
