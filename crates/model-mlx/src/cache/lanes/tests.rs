//! Sequences that begin, share pages and end at random, in lanes and in pages.

use paceline_base::SplitMix64;
use paceline_mlx::{DeviceKind, Dtype, Library};

use super::super::{LayerSizes, Shape, Span};
use super::*;

const PAGES: usize = 24;

/// A sequence, whose keys are numbers.
#[derive(Clone, Default)]
struct Sequence {
    pages: Vec<u32>,
    keys: Vec<f32>,
}

impl Sequence {
    fn rows(&self, position: usize) -> AttentionRows<'_> {
        AttentionRows {
            rows: self.keys.len() - position,
            position,
            pages: &self.pages,
            first_page: 0,
        }
    }
}

/// Sequences that begin, share pages, end and leave their pages to others.
struct Schedule {
    random: SplitMix64,
    stream: Stream,
    cache: Cache,
    /// How many sequences have each page.
    users: [usize; PAGES],
    sequences: Vec<Sequence>,
    has_lanes: u64,
}

impl Schedule {
    fn new(library: &Library, seed: u64) -> Self {
        let stream = library.stream(DeviceKind::Cpu).unwrap();
        let sizes = LayerSizes::Rows {
            heads: 2,
            key: 1,
            value: 1,
        };
        let shape = Shape {
            layers: vec![(sizes, PAGES)],
            dtype: Dtype::F32,
            bits: None,
        };
        let mut cache = Cache::new(&stream, &shape).unwrap();
        cache.allow_lanes(LaneLimits {
            layers: vec![true],
            rings: vec![None],
            lanes: 4,
            bytes: u64::MAX,
        });
        Self {
            random: SplitMix64::new(seed),
            stream,
            cache,
            users: [0; PAGES],
            sequences: Vec::new(),
            has_lanes: 0,
        }
    }

    /// Begins a sequence, perhaps on full pages of another.
    fn begin(&mut self) {
        let mut new = Sequence::default();
        if self.random.below(2) == 0 && !self.sequences.is_empty() {
            let from = self.random.below(self.sequences.len());
            let from = &self.sequences[from];
            let pages = from.keys.len() / PAGE;
            new.pages = from.pages[..pages].to_vec();
            new.keys = from.keys[..pages * PAGE].to_vec();
            new.pages
                .iter()
                .for_each(|page| self.users[*page as usize] += 1);
        }
        self.sequences.push(new);
    }

    fn end(&mut self, i: usize) {
        let ended = self.sequences.remove(i);
        ended
            .pages
            .iter()
            .for_each(|page| self.users[*page as usize] -= 1);
    }

    /// Gives sequence `i` new keys and the pages for them; `false` without such pages.
    fn grow(&mut self, i: usize) -> bool {
        let n = match self.random.below(4) {
            0 => 1 + self.random.below(100),
            _ => 1,
        };
        let sequence = &mut self.sequences[i];
        while sequence.pages.len() * PAGE < sequence.keys.len() + n {
            let free = (0..PAGES).filter(|page| self.users[*page] == 0);
            let free: Vec<usize> = free.collect();
            let Some(page) = free.get(self.random.below(free.len().max(1))) else {
                return false;
            };
            self.users[*page] = 1;
            sequence.pages.push(*page as u32);
        }
        let keys = (0..n).map(|_| self.random.below(1 << 20) as f32);
        sequence.keys.extend(keys);
        true
    }

    /// Writes the keys of a step and reads all keys of its sequences.
    fn step(&mut self) {
        if self.sequences.len() < 4 && (self.sequences.is_empty() || self.random.below(8) == 0) {
            self.begin();
        }
        let mut step = Vec::new();
        for i in (0..self.sequences.len()).rev() {
            let position = self.sequences[i].keys.len();
            if self.random.below(40) == 0 || self.random.below(8) > 0 && !self.grow(i) {
                self.end(i);
                step.iter_mut().for_each(|(later, _)| *later -= 1);
            } else if self.sequences[i].keys.len() > position {
                step.push((i, position));
            }
        }
        // Memory for lanes comes and goes.
        let bytes = [0, 20_000, u64::MAX][self.random.below(3).min(self.random.below(20))];
        self.cache.lanes.limits.bytes = if self.random.below(30) == 0 {
            bytes
        } else {
            u64::MAX
        };
        let all = &self.sequences;
        let rows: Vec<_> = step.iter().map(|(i, at)| all[*i].rows(*at)).collect();
        let lanes = self.cache.lanes_of(&self.stream, &rows).unwrap();
        self.has_lanes += lanes.iter().flatten().count() as u64;
        let parts = rows.iter().zip(&lanes);
        let spans = parts.map(|(rows, lane)| Span::new(&self.stream, rows, None, *lane));
        let spans: Vec<Span> = spans.collect::<Result<_, _>>().unwrap();
        for ((i, position), span) in step.iter().zip(&spans) {
            let new = keys_of(&self.stream, &all[*i].keys[*position..]);
            self.cache
                .write(&self.stream, 0, span, [&new, &new])
                .unwrap();
        }
        for ((i, _), span) in step.iter().zip(&spans) {
            let [keys, values] = self.cache.read(&self.stream, 0, &span.view).unwrap();
            check(&self.stream, &keys, &all[*i].keys);
            check(&self.stream, &values, &all[*i].keys);
        }
        self.stream.eval(self.cache.arrays()).unwrap();
    }

    /// Compares the pages of a sequence with its keys.
    fn read_pages(&mut self) {
        let Some(sequence) = self.sequences.last().filter(|s| !s.keys.is_empty()) else {
            return;
        };
        self.cache.settle(&self.stream, &sequence.pages).unwrap();
        let rows = AttentionRows {
            rows: sequence.keys.len(),
            ..sequence.rows(0)
        };
        let span = Span::new(&self.stream, &rows, None, None).unwrap();
        let [keys, _] = self.cache.read(&self.stream, 0, &span.view).unwrap();
        check(&self.stream, &keys, &sequence.keys);
    }
}

/// `keys` in both heads: `(1, 2, rows, 1)`.
fn keys_of(stream: &Stream, keys: &[f32]) -> Array {
    let both = [keys, keys].concat();
    stream
        .array_f32(&both, &[1, 2, keys.len() as i32, 1])
        .unwrap()
}

fn check(stream: &Stream, got: &Array, keys: &[f32]) {
    let got = stream.rows_f32(got).unwrap();
    stream.eval([&got]).unwrap();
    assert_eq!(got.as_f32().unwrap(), [keys, keys].concat());
}

#[test]
fn sequences_read_what_they_wrote_in_lanes_and_in_pages() {
    let Some(stream) = crate::test_stream("lanes of mlx") else {
        return;
    };
    for seed in 0..6 {
        let mut schedule = Schedule::new(stream.library(), seed);
        for step in 0..300 {
            schedule.step();
            if step % 20 == 0 {
                schedule.read_pages();
            }
        }
        assert!(
            schedule.has_lanes > 150,
            "seed {seed}: {}",
            schedule.has_lanes
        );
    }
}
