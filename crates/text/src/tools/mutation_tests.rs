//! Responses cut, doubled and mixed by seeds. For any text, parsers neither panic nor depend on the
//! fragments, and every reported call has JSON arguments.

use std::sync::Arc;

use super::recording_tests::{Recorded, recorded};
use super::response::tests as regions;
use super::tests::{ParsedCalls, cases, outcome};
use super::*;
use paceline_base::testing::long;

/// Seeds of a run. A thousand take about a second; a long run, minutes.
const SEEDS: u64 = 4000;
const LONG_SEEDS: u64 = 200_000;

/// Texts that separate or quote in some form, besides those of the answers.
const MARKS: [&str; 12] = [
    "<think>", "</think>", "<", "{", "}", "\"", "\\", "\n", "é", "<|end|>", "</", "[",
];

/// SplitMix64 (Steele, Lea, Flood 2014).
struct MutationRng(u64);

impl MutationRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is 1 or more.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }

    /// A border between two characters of `text`.
    fn place(&mut self, text: &str) -> usize {
        let mut at = self.below(text.len() + 1);
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        at
    }

    /// Two borders in order.
    fn span(&mut self, text: &str) -> (usize, usize) {
        let (a, b) = (self.place(text), self.place(text));
        (a.min(b), a.max(b))
    }

    /// `text` after one change.
    fn changed(&mut self, text: &str, answers: &[&str]) -> String {
        let (from, to) = self.span(text);
        match self.below(6) {
            0 => [&text[..from], &text[to..]].concat(),
            1 => [&text[..to], &text[from..]].concat(),
            2 => text[..to].to_owned(),
            3 => [&text[..from], self.pick(&MARKS), &text[from..]].concat(),
            4 => {
                let other = self.pick(answers);
                let (start, end) = self.span(other);
                [&text[..from], &other[start..end], &text[to..]].concat()
            }
            _ => [text, self.pick(answers)].concat(),
        }
    }

    /// `text` in up to 8 pieces.
    fn cut<'a>(&mut self, text: &'a str) -> Vec<&'a str> {
        let mut places: Vec<usize> = (0..self.below(8)).map(|_| self.place(text)).collect();
        places.extend([0, text.len()]);
        places.sort_unstable();
        places
            .windows(2)
            .map(|pair| &text[pair[0]..pair[1]])
            .collect()
    }
}

type Make<'a> = Box<dyn Fn(ReaderOptions) -> ToolCallParser + 'a>;

/// Parsers of every family and of every response template, behind ends of prompts.
fn readers(recorded: &Recorded) -> Vec<Make<'_>> {
    let tools = &recorded.tools;
    let mut readers: Vec<Make<'_>> = Vec::new();
    for case in recorded.cases.iter().filter(|case| case.name == "three") {
        let syntax = Syntax::of_source(&case.template);
        readers.push(Box::new(move |options| {
            syntax.reader_after(&case.prompt, tools, options)
        }));
    }
    for template in recorded.responses.values() {
        let template = Arc::new(ResponseTemplate::read(template).unwrap());
        readers.push(Box::new(move |options| {
            template.reader_after("", tools, options)
        }));
    }
    for case in cases() {
        let syntax = Syntax::of_source(case.template);
        readers.push(Box::new(move |options| {
            syntax.reader_after(case.prompt, tools, options)
        }));
    }
    for case in regions::cases() {
        let template = Arc::new(ResponseTemplate::read(&case.template).unwrap());
        readers.push(Box::new(move |options| {
            template.reader_after(case.prompt, tools, options)
        }));
    }
    readers
}

#[test]
fn changed_answers_do_not_depend_on_their_pieces() {
    let recorded = recorded();
    let mut answers: Vec<&str> = recorded.cases.iter().map(|case| &*case.answer).collect();
    answers.extend(cases().iter().map(|case| case.answer));
    answers.extend(regions::cases().iter().map(|case| case.answer));
    let readers = readers(&recorded);
    let seeds = if long() { LONG_SEEDS } else { SEEDS };
    for seed in 0..seeds {
        let mut random = MutationRng(seed);
        let mut text = random.pick(&answers).to_owned();
        for _ in 0..=random.below(4) {
            text = random.changed(&text, &answers);
        }
        let make = &readers[random.below(readers.len())];
        let options = ReaderOptions {
            holds_calls: random.below(2) == 0,
            id_seed: seed,
        };
        let read = |pieces: &[&str]| ParsedCalls {
            withdrawn: 0,
            ..outcome(make(options), pieces)
        };
        let whole = read(&[&text]);
        let cut = read(&random.cut(&text));
        assert_eq!(cut, whole, "seed {seed}: {text:?}");
        let one_by_one: Vec<String> = text.chars().map(String::from).collect();
        let one_by_one: Vec<&str> = one_by_one.iter().map(String::as_str).collect();
        let letters = read(&one_by_one);
        assert_eq!(letters, whole, "seed {seed}: {text:?}");
    }
}
