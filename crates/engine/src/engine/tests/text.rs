//! Text at the end of an answer, with parts that are held back.

use super::requests::{SAMPLED, request};
use super::tiny::{END, TinyModel, VOCAB};
use crate::sampling::ChosenToken;
use crate::sequence::Sequence;
use crate::{Event, Finish, GenerationRequest, SequenceId};

/// Texts of the events and the reason, for an answer of `tokens`; the last token is the last one
/// allowed.
fn answer(tiny: &TinyModel, tokens: &[u32], stop: &[&str]) -> (Vec<String>, Option<Finish>) {
    let request = GenerationRequest {
        stop: stop.iter().map(|s| (*s).to_owned()).collect(),
        logprobs: None,
        ..request(vec![1], tokens.len(), SAMPLED)
    };
    let mut sequence = Sequence::new(SequenceId(1), request, None, 100).unwrap();
    let mut events = Vec::new();
    let mut given = tokens.iter();
    while !events.last().is_some_and(Event::is_last) {
        let logprobs = None;
        let choice = given.next().map(|&token| ChosenToken { token, logprobs });
        let choice = choice.ok_or(Finish::Length);
        sequence.accept(choice, &tiny.tokenizer, &mut events);
    }
    assert_eq!(given.next(), None, "ended earlier: {events:?}");
    let (mut texts, mut finish) = (Vec::new(), None);
    for event in events {
        match event.reply {
            crate::Reply::Token { text, .. } => texts.push(text),
            crate::Reply::Finished { text, reason, .. } => {
                texts.push(text);
                finish = Some(reason);
            }
            _ => {}
        }
    }
    (texts, finish)
}

/// Tokens and stop strings; texts and reason.
type Case<'a> = (&'a [u32], &'a [&'a str], &'a [&'a str], Finish);

#[test]
fn what_is_held_back_comes_out_at_the_end() {
    use Finish::{EndOfText, Length, Stop};
    let tiny = TinyModel::new(1);
    // Bytes of the character 中. The first two are also one token.
    let (a, b, c, e4, b8, ad) = (0, 1, 2, 14, 15, 16);
    let ab = tiny.encode("ab")[0];
    let cases: [Case; 17] = [
        (&[], &[], &[""], Length),
        (&[a], &[], &["a", ""], Length),
        (&[a, END], &[], &["a", "", ""], EndOfText),
        (&[END], &["x"], &["", ""], EndOfText),
        (&[e4, b8, ad], &[], &["", "", "中", ""], Length),
        (&[e4, b8], &[], &["", "", "\u{fffd}"], Length),
        (&[e4, END], &[], &["", "", "\u{fffd}"], EndOfText),
        (&[e4, a], &[], &["", "\u{fffd}a", ""], Length),
        // Stop strings: at the first token, at the very last, in part, in the middle of a token.
        (&[a], &["a"], &["", ""], Stop(0)),
        (&[c, a, b], &["x", "ab"], &["c", "", "", ""], Stop(1)),
        (&[c, a], &["ab"], &["c", "", "a"], Length),
        (&[a, END], &["ab"], &["", "", "a"], EndOfText),
        (&[c, ab], &["b"], &["c", "a", ""], Stop(0)),
        (&[e4, b8, ad], &["中"], &["", "", "", ""], Stop(0)),
        // Only the end decides: the longer one could still have started earlier.
        (&[ab, c], &["abcd", "bc"], &["", "", "a"], Stop(1)),
        (&[ab, c, END], &["abcd", "bc"], &["", "", "", "a"], Stop(1)),
        // Completed by the end: a partial character.
        (&[a, e4], &["a\u{fffd}"], &["", "", ""], Stop(0)),
    ];
    for (tokens, stop, texts, finish) in cases {
        let (got, reason) = answer(&tiny, tokens, stop);
        assert_eq!(got, texts, "{tokens:?} {stop:?}");
        assert_eq!(reason, Some(finish), "{tokens:?} {stop:?}");
    }
}

#[test]
fn a_row_without_a_token_adds_no_text() {
    let tiny = TinyModel::new(1);
    assert_eq!(tiny.tokenizer.token_bytes(VOCAB as u32 - 1), None);
    let (texts, finish) = answer(&tiny, &[0, VOCAB as u32 - 1, 1], &["ab"]);
    assert_eq!(texts, ["", "", "", ""]);
    assert_eq!(finish, Some(Finish::Stop(0)));
}
