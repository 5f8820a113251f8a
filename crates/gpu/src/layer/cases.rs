//! Inputs of the layer's tests, from seeds. `tensor` compiles this file too. Its test
//! `kernels/tests/gpu_layer.rs` computes the same cases by class `cpu`, and records the outcomes in
//! `tests-data/golden/gpu-layer.tsv`. The tests here read that file.

use paceline_base::SplitMix64;

/// Recorded outcomes, relative to a crate's folder.
pub(crate) const RECORD: &str = "../../tests-data/golden/gpu-layer.tsv";

/// Shape of SmolLM2 135M: width, heads, KV heads, head size, feed-forward width.
pub(crate) const WIDTH: usize = 576;
pub(crate) const HEADS: usize = 9;
pub(crate) const KV_HEADS: usize = 3;
pub(crate) const HEAD: usize = 64;
pub(crate) const FFN: usize = 1536;
pub(crate) const EPS: f32 = 1e-5;

/// Columns of a leaf of the feed-forward's sum.
pub(crate) const FFN_LEAF: usize = 128;

/// Columns that share a step.
pub(crate) const UNIT: usize = 256;

/// Headers of units from which matrices choose: as in trained weights, then any finite ones.
pub(crate) const MILD: usize = 32;
pub(crate) const HEADERS: usize = 64;

/// Recorded decode steps and prompts of 64 rows, and how many of them a test computes by default.
pub(crate) const DECODES: [usize; 2] = [1000, 12];
pub(crate) const PROMPTS: [usize; 2] = [16, 1];
pub(crate) const PROMPT_ROWS: usize = 64;

/// Activation rows of recorded products, and rows and columns of their matrices.
pub(crate) const PRODUCT_ROWS: [usize; 3] = [1, 8, 512];
pub(crate) const PRODUCT: [usize; 2] = [64, 512];

/// Storage type of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Eight,
    Four,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Eight, Self::Four];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Eight => "q8_0",
            Self::Four => "q4_k",
        }
    }
}

/// The scales of a unit: eight halves (Q8_0), or two and twelve packed bytes (Q4_K).
pub(crate) fn header(kind: Kind, index: usize) -> [u8; 16] {
    let mut random = SplitMix64::new(index as u64);
    let mut bytes = [0; 16];
    bytes.fill_with(|| random.next() as u8);
    let halves = if kind == Kind::Eight { 8 } else { 2 };
    for (i, pair) in bytes.as_chunks_mut::<2>().0[..halves]
        .iter_mut()
        .enumerate()
    {
        let half = match (index < MILD, kind, i) {
            (true, Kind::Eight, _) => 0x0900 + random.below(0x500), // about 1e-4
            (true, Kind::Four, 0) => 0x0480 + random.below(0x300),
            (true, Kind::Four, _) => 0x1000 + random.below(0x400),
            (false, ..) if random.below(5) == 0 => 0,
            (false, ..) => random.below(0x7c00) | random.below(2) << 15,
        };
        *pair = (half as u16).to_le_bytes();
    }
    bytes
}

/// A random matrix as a GGUF file holds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    pub(crate) kind: Kind,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Columns of a leaf of its sums; 0 for whole rows.
    pub(crate) leaf: usize,
    /// Number of headers that it may have.
    pub(crate) headers: usize,
    pub(crate) seed: u64,
}

impl Stored {
    /// Header and integers of unit `unit` of a row.
    pub(crate) fn unit(&self, row: usize, unit: usize) -> (usize, Vec<u8>) {
        let place = (row << 8 | unit) as u64;
        let mut random = SplitMix64::new(self.seed << 32 ^ place);
        let header = random.below(self.headers);
        let columns = (self.cols - unit * UNIT).min(UNIT);
        let bytes = if self.kind == Kind::Eight {
            columns
        } else {
            columns / 2
        };
        let words = (0..bytes / 8).flat_map(|_| random.next().to_le_bytes());
        (header, words.collect())
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for row in 0..self.rows {
            for unit in 0..self.cols.div_ceil(UNIT) {
                let (index, integers) = self.unit(row, unit);
                let header = header(self.kind, index);
                match self.kind {
                    Kind::Four => all.extend(header.iter().chain(&integers)),
                    Kind::Eight => {
                        for (scale, block) in header.chunks(2).zip(integers.chunks(32)) {
                            all.extend(scale.iter().chain(block));
                        }
                    }
                }
            }
        }
        all
    }
}

/// The layer's matrices: query, key, value, attention output, gate, up, down.
pub(crate) fn matrices() -> [Stored; 7] {
    let (all, kv) = (HEADS * HEAD, KV_HEADS * HEAD);
    let shapes = [
        (all, WIDTH, 0),
        (kv, WIDTH, 0),
        (kv, WIDTH, 0),
        (WIDTH, all, HEAD),
        (FFN, WIDTH, 0),
        (FFN, WIDTH, 0),
        (WIDTH, FFN, FFN_LEAF),
    ];
    let mut seed = 100;
    shapes.map(|(rows, cols, leaf)| {
        seed += 1;
        let (kind, headers) = (Kind::Eight, MILD);
        Stored {
            kind,
            rows,
            cols,
            leaf,
            headers,
            seed,
        }
    })
}

/// The matrix of the recorded products.
pub(crate) const fn product_matrix(kind: Kind, leaf: usize) -> Stored {
    let ([rows, cols], headers, seed) = (PRODUCT, HEADERS, 7);
    Stored {
        kind,
        rows,
        cols,
        leaf,
        headers,
        seed,
    }
}

/// The weights of both norms.
pub(crate) fn norms() -> [Vec<f32>; 2] {
    [1, 2].map(|seed| floats(&mut SplitMix64::new(seed), WIDTH, 1.5))
}

/// `n` numbers within ±`scale`.
fn floats(random: &mut SplitMix64, n: usize, scale: f32) -> Vec<f32> {
    let one = |_| (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(one).map(|x| x * scale).collect()
}

/// `n` activations: of one magnitude; all denormal; of any magnitude up to 2^100; mostly zeros.
pub(crate) fn activations(seed: u64, n: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed ^ 0xac71);
    let style = random.below(8);
    let scale = (random.below(21) as f32 - 10.0).exp2();
    let mut one = || {
        let bits = random.next() as u32;
        let (sign, fraction) = (bits & 1 << 31, bits & 0x7f_ffff);
        match style {
            0 => f32::from_bits(sign | fraction),
            1 => f32::from_bits(sign | (random.below(227) as u32) << 23 | fraction),
            2 if random.below(20) > 0 => f32::from_bits(sign),
            _ => f32::from_bits(sign | 0x3f80_0000 | fraction) * scale - scale,
        }
    };
    (0..n).map(|_| one()).collect()
}

/// Numbers to take the exponential of: around 0, at the ends of the range, beyond, and tiny.
pub(crate) fn exponents() -> Vec<f32> {
    let mut random = SplitMix64::new(5);
    let mut all = vec![
        0.0,
        -0.0,
        -87.33,
        88.37,
        -1e30,
        1e30,
        f32::NEG_INFINITY,
        f32::MAX,
    ];
    all.extend(floats(&mut random, 796, 90.0));
    all.extend(floats(&mut random, 98, 1.0));
    all.extend(activations(0, 98));
    all
}

/// A step of one sequence through the layer: rows at consecutive positions behind cached ones.
#[derive(Debug)]
pub(crate) struct LayerCase {
    pub(crate) rows: usize,
    /// Position of the first row: as many are cached.
    pub(crate) position: usize,
    /// `(rows, WIDTH)`.
    pub(crate) residual: Vec<f32>,
    /// `(position, KV_HEADS * HEAD)` each, before they become halves.
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    /// `(rows, HEAD / 2)`: cosine and sine; any two numbers will do.
    pub(crate) angles: Vec<(f32, f32)>,
}

impl LayerCase {
    /// A decode step at a position of the first three pages.
    pub(crate) fn decode(index: usize) -> Self {
        let position = SplitMix64::new(index as u64).below(160);
        Self::new(index as u64, 1, position)
    }

    /// A prompt of 64 rows; odd ones stand behind cached rows, across two pages.
    pub(crate) fn prompt(index: usize) -> Self {
        Self::new(1 << 20 | index as u64, PROMPT_ROWS, index % 2 * 37)
    }

    fn new(seed: u64, rows: usize, position: usize) -> Self {
        let mut random = SplitMix64::new(seed ^ 0x1a7e5);
        let kv = position * KV_HEADS * HEAD;
        let mut cached = |scale| {
            let mut all = floats(&mut random, kv, scale);
            // Some become denormal halves, some zeros.
            all.iter_mut().step_by(7).for_each(|x| *x *= 1e-6);
            all
        };
        let (keys, values) = (cached(4.0), cached(1.0));
        let angles = floats(&mut random, rows * HEAD, 1.0);
        let rows_of = |row| activations(seed << 8 | row as u64, WIDTH);
        Self {
            rows,
            position,
            residual: (0..rows).flat_map(rows_of).collect(),
            keys,
            values,
            angles: angles
                .as_chunks::<2>()
                .0
                .iter()
                .map(|&[c, s]| (c, s))
                .collect(),
        }
    }
}

/// Hash of the bits, FNV-1a by words; all NaN count as one.
pub(crate) fn digest<'a>(values: impl IntoIterator<Item = &'a f32>) -> u64 {
    values
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, value| {
            let bits = if value.is_nan() {
                0x7fc0_0000
            } else {
                value.to_bits()
            };
            (hash ^ u64::from(bits)).wrapping_mul(0x100_0000_01b3)
        })
}
