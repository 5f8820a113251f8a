//! Plans survive the encoding, and hostile ones are refused by name.

use super::*;
use crate::{ForbiddenTokens, TopLogits, WindowPool};

const LIMITS: PlanLimits<'_> = PlanLimits {
    rows: 300,
    logit_rows: 8,
    sequences: 4,
    context: 400,
    pages: 20,
    windows: &[WindowPool {
        every: 1,
        back: 70,
        pages: 20,
    }],
    vocab: 1000,
    adapters: 2,
};

fn sequence<'a>(tokens: &'a [u32], position: usize, pages: &'a [u32]) -> BatchSequence<'a> {
    BatchSequence::plain(tokens, position, pages, Logits::Last)
}

fn top_logits() -> Logits {
    Logits::Top(TopLogits {
        n: 40_000,
        within: -20,
    })
}

fn written(sequences: &[BatchSequence<'_>]) -> Vec<u32> {
    let mut words = vec![9; 5];
    StepPlan::write(&Batch { sequences }, &mut words);
    words
}

#[test]
fn a_plan_says_what_was_written() {
    let long: Vec<u32> = (0..280).collect();
    let mut second = sequence(&[7], 130, &[4, 5, 6]);
    second.logits = Logits::All;
    second.adapter = 2;
    let mut best = sequence(&[5], 63, &[18]);
    best.logits = Logits::Best;
    let mut guessed = [best; 2];
    (guessed[0].logits, guessed[1].logits) = (Logits::AllBest, top_logits().of_all_rows());
    let mut top = sequence(&[6], 62, &[17]);
    top.logits = top_logits();
    let mut drawn = best;
    drawn.logits = Logits::Drawn(TokenDraw {
        temperature: 0.7,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        seed: u64::MAX - 5,
        draws: 1 << 40,
        forbidden: ForbiddenTokens::new(&[7, 999]).unwrap(),
    });
    let cases: [&[BatchSequence<'_>]; 4] = [
        &guessed,
        &[sequence(&[999], 63, &[19]), drawn, best, top],
        &[sequence(&long, 0, &[0, 1, 2, 3, 4]), second],
        &[],
    ];
    for (case, header_only) in cases.into_iter().zip([true, true, false, true]) {
        let words = written(case);
        assert_eq!(words.len() == HEADER_WORDS, header_only);
        assert_eq!(StepPlan::len_of(&words).unwrap(), words.len());
        let plan = StepPlan::read(&words, &LIMITS).unwrap().unwrap();
        let read: Vec<_> = plan.batch(&words, &[]).collect();
        assert_eq!(format!("{read:?}"), format!("{case:?}"));
    }
}

#[test]
fn pages_behind_the_last_position_are_not_sent() {
    let words = written(&[sequence(&[1, 2], 62, &[3, 9, 9, 9])]);
    let plan = StepPlan::read(&words, &LIMITS).unwrap().unwrap();
    assert_eq!(plan.batch(&words, &[]).next().unwrap().pages, [3]);
}

#[test]
fn a_sign_of_life_computes_nothing() {
    let mut words = Vec::new();
    StepPlan::write_idle(&mut words);
    assert!(StepPlan::read(&words, &LIMITS).unwrap().is_none());
}

#[test]
fn plans_that_do_not_fit_name_what_does_not() {
    let good = || written(&[sequence(&[1, 2], 0, &[3])]);
    for (at, value, name) in [
        (0, u32::MAX, "words"),
        (1, 77, "kind"),
        (2, 5, "sequences"),
        (2, u32::MAX, "sequences"),
        (3, 2, "windows"),
        (3, u32::MAX, "windows"),
        (4, 301, "rows"),
        (4, 0, "rows of a sequence"),
        (4, u32::MAX, "rows"),
        (5, 399, "positions"),
        (5, 70, "pages needed"),
        (5, u32::MAX, "position"),
        (6, 5, "logits"),
        (6, 6, "logits"),
        (6, 0x0001_0007, "logits"),
        (6, 0x0001_0001, "logits"),
        (7, 3, "adapter"),
        (8, 21, "pages"),
        (8, 0, "pages needed"),
        (9, 1000, "token"),
        (11, 20, "page"),
    ] {
        let mut words = good();
        words[at] = value;
        let error = StepPlan::len_of(&words).and_then(|_| StepPlan::read(&words, &LIMITS));
        let Err(Error::Plan { what, .. }) = error else {
            panic!("word {at} = {value}: {error:?}");
        };
        assert_eq!(what, name, "word {at} = {value}");
    }
}

#[test]
fn windows_have_the_pages_that_rows_look_at() {
    let window = |first_page, pages| WindowPages { first_page, pages };
    for (first, pages, refused) in [
        (2, &[5, 0][..], None),
        (1, &[1, 5, 0], None),
        (3, &[5], Some("first page")),
        (2, &[5], Some("pages needed")),
        (2, &[5, 20], Some("page of a window")),
        (0, &[0; 21], Some("pages of a window")),
    ] {
        // Positions 200 and 201 read from position 131 on.
        let mut sequence = sequence(&[1, 2], 200, &[3, 4, 19, 6]);
        let windows = [window(first, pages)];
        sequence.windows = &windows;
        let words = written(&[sequence]);
        let plan = StepPlan::read(&words, &LIMITS);
        let what = plan.as_ref().err().map(|error| match error {
            Error::Plan { what, .. } => *what,
            other => panic!("{other}"),
        });
        assert_eq!(what, refused, "{first} {pages:?}");
        if let Ok(Some(plan)) = plan {
            assert_eq!(plan.windows(&words).collect::<Vec<_>>(), windows);
        }
    }
}

proptest::proptest! {
    /// Every sequence of words is refused or fits; nothing panics.
    #[test]
    fn random_words_never_panic(
        head in proptest::collection::vec(0..6u32, 24),
        tail in proptest::collection::vec(0..1200u32, HEADER_WORDS - 24),
    ) {
        let mut words = head;
        words.extend(tail);
        words[1] = STEP;
        words[3] %= 2;
        if let Ok(Some(plan)) = StepPlan::read(&words, &LIMITS) {
            let windows: Vec<_> = plan.windows(&words).collect();
            let rows: usize = plan.batch(&words, &windows).map(|s| s.tokens.len()).sum();
            proptest::prop_assert!(rows <= LIMITS.rows);
        }
    }
}
