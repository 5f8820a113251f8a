//! Random schedules: what a server might do with some sequences, checked to the bit.

use std::fmt;

use paceline_base::SplitMix64;
use paceline_model::{Batch, BatchSequence, BatchSize, Logits, Model, Workspace};
use paceline_tensor::{KvCache, PAGE};

/// Bits of the logits after each token of a sequence.
pub(crate) type Expected = Vec<Vec<u32>>;

pub(crate) fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// How many rows of a sequence come in one step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chunks {
    /// This many while there are.
    Always(usize),
    /// A single row, the most, or any number between.
    UpTo(usize),
}

/// Actions of a schedule and how often it takes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mix {
    /// Most sequences in a step.
    pub(crate) sequences: usize,
    /// Rows of each.
    pub(crate) chunks: Chunks,
    /// One of this many steps, on average, loses the pages of a sequence; 0 for never.
    pub(crate) evict_every: usize,
}

/// A sequence on its way through a schedule.
#[derive(Debug)]
struct Sequence<'a> {
    tokens: &'a [u32],
    expected: &'a Expected,
    /// Tokens that were computed since it last began.
    done: usize,
    pages: Vec<u32>,
}

/// A sequence's part of a step.
#[derive(Clone, Copy)]
struct Part {
    sequence: usize,
    position: usize,
    rows: usize,
    logits: Logits,
}

/// Rows of tokens as `sequence:position+rows`, for messages.
impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}+{}", self.sequence, self.position, self.rows)
    }
}

/// Logits that a step of [`Chunks::UpTo`] asks for, all of them half of the time.
const KINDS: [Logits; 4] = [Logits::All, Logits::All, Logits::Last, Logits::None];

/// A server that does what the dice say.
pub(crate) struct Schedule<'a> {
    model: &'a Model,
    mix: Mix,
    random: SplitMix64,
    sequences: Vec<Sequence<'a>>,
    cache: KvCache,
    /// Pages that no sequence has, in no order.
    free: Vec<u32>,
    ws: Workspace,
}

impl<'a> Schedule<'a> {
    /// For `sequences` of tokens and what must follow each.
    pub(crate) fn new(
        model: &'a Model,
        mix: Mix,
        sequences: impl IntoIterator<Item = (&'a [u32], &'a Expected)>,
        seed: u64,
    ) -> Self {
        let sequences: Vec<Sequence<'_>> = sequences
            .into_iter()
            .map(|(tokens, expected)| Sequence {
                tokens,
                expected,
                done: 0,
                pages: Vec::new(),
            })
            .collect();
        let pages: usize = sequences
            .iter()
            .map(|s| s.tokens.len().div_ceil(PAGE))
            .sum();
        let context = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        let (Chunks::Always(chunk) | Chunks::UpTo(chunk)) = mix.chunks;
        let rows = mix.sequences * chunk;
        let mut random = SplitMix64::new(seed);
        let mut free: Vec<u32> = (0..pages as u32).collect();
        random.shuffle(&mut free);
        // How attention is cut depends on how much room there is for partial results.
        let room = context * [1, 4][random.below(2)];
        let size = BatchSize {
            rows,
            logit_rows: rows,
            sequences: mix.sequences,
            context: room,
        };
        Self {
            model,
            mix,
            random,
            sequences,
            cache: soiled_cache(model, pages),
            free,
            ws: Workspace::new(model, size),
        }
    }

    /// Steps until every sequence has reached its end.
    ///
    /// # Panics
    /// With `title` and the step, at the first logit that has other bits than expected.
    pub(crate) fn run(&mut self, title: &str) {
        for step in 0.. {
            let parts = self.choose();
            if parts.is_empty() {
                return;
            }
            self.step(&parts, &format!("{title}, step {step}"));
            if self.mix.evict_every > 0 && self.random.below(self.mix.evict_every) == 0 {
                self.evict();
            }
        }
    }

    /// Some of the sequences that are not at their end, in any order, each with a decode row or a
    /// chunk.
    fn choose(&mut self) -> Vec<Part> {
        let open = |i: &usize| self.sequences[*i].done < self.sequences[*i].tokens.len();
        let mut chosen: Vec<usize> = (0..self.sequences.len()).filter(open).collect();
        self.random.shuffle(&mut chosen);
        let most = chosen.len().min(self.mix.sequences);
        if most > 0 {
            chosen.truncate(1 + self.random.below(most));
        }
        chosen.into_iter().map(|i| self.part(i)).collect()
    }

    fn part(&mut self, sequence: usize) -> Part {
        let s = &self.sequences[sequence];
        let (rows, logits) = match self.mix.chunks {
            Chunks::Always(rows) => (rows, Logits::All),
            Chunks::UpTo(most) => {
                let rows = [1, most, 1 + self.random.below(most)][self.random.below(3)];
                (rows, KINDS[self.random.below(KINDS.len())])
            }
        };
        let rows = rows.min(s.tokens.len() - s.done);
        Part {
            sequence,
            position: s.done,
            rows,
            logits,
        }
    }

    fn step(&mut self, parts: &[Part], title: &str) {
        for part in parts {
            let s = &mut self.sequences[part.sequence];
            let pages = (part.position + part.rows).div_ceil(PAGE) - s.pages.len();
            s.pages.extend(self.free.drain(self.free.len() - pages..));
            s.done += part.rows;
        }
        let batch: Vec<BatchSequence<'_>> = parts
            .iter()
            .map(|part| {
                let s = &self.sequences[part.sequence];
                BatchSequence::plain(
                    &s.tokens[part.position..part.position + part.rows],
                    part.position,
                    &s.pages,
                    part.logits,
                )
            })
            .collect();
        let rows = self
            .model
            .forward(&Batch::new(&batch), &mut self.ws, &mut self.cache)
            .unwrap();
        self.check(parts, rows, title);
    }

    /// Compares the rows of logits of a step.
    fn check(&mut self, parts: &[Part], rows: usize, title: &str) {
        let mut row = 0;
        for part in parts {
            let end = part.position + part.rows;
            for position in end - part.logits.rows(part.rows)..end {
                let got = self.ws.logits_mut(row, self.model.config().vocab);
                let expected = &self.sequences[part.sequence].expected[position];
                assert!(
                    bits(got) == *expected,
                    "{title}, rows {parts:?}: sequence {}, position {position} has other bits",
                    part.sequence
                );
                row += 1;
            }
        }
        assert_eq!(row, rows, "{title}: rows of logits");
    }

    /// Takes the pages of some sequence, which has to begin again.
    fn evict(&mut self) {
        let i = self.random.below(self.sequences.len());
        let s = &mut self.sequences[i];
        if s.done < s.tokens.len() {
            s.done = 0;
            self.free.append(&mut s.pages);
            self.random.shuffle(&mut self.free);
        }
    }
}

/// A cache of this many pages, full of NaN: what was there before must not matter.
fn soiled_cache(model: &Model, pages: usize) -> KvCache {
    let mut cache = model.whole_cache(pages * PAGE).unwrap();
    cache.soil();
    cache
}
