//! Invariants of the prefix cache, and random calls.

use proptest::prelude::*;

use super::*;

impl Pages {
    /// Checks all invariants between calls; `owners` are all sequences with pages.
    pub(crate) fn check<'a>(&self, owners: impl Iterator<Item = (&'a SequencePages, &'a [u32])>) {
        let mut users = vec![0; self.pages.len()];
        for (owned, computed) in owners {
            assert!(owned.n_known <= owned.len() && owned.n_known * PAGE <= computed.len());
            self.check_held(owned, computed.len());
            owned.pages.iter().for_each(|p| users[*p as usize] += 1);
            self.check_tokens(owned, computed);
        }
        let mut spare = vec![0; self.pages.len()];
        let unused = self.unused.values().chain(&self.free);
        unused.for_each(|p| spare[*p as usize] += 1);
        let is_free = |p: usize| self.free.contains(&(p as u32));
        for (p, page) in self.pages.iter().enumerate() {
            assert_eq!(page.users, users[p], "users of page {p}");
            assert_eq!(spare[p], usize::from(page.users == 0), "page {p}");
            assert!(page.known.is_some() || page.users <= 1, "page {p}");
            if let Some(known) = &page.known {
                assert!(!is_free(p), "page {p} is known and free");
                assert_eq!(self.known[&known.key], p as u32);
                self.check_before(page, known);
            }
        }
        let n_known = self.pages.iter().filter(|p| p.known.is_some()).count();
        assert_eq!(self.known.len(), n_known);
        (0..self.windows.len()).for_each(|i| self.check_window(i));
    }

    /// A sequence has the window pages that its next row reads. Each is cached with its
    /// full-attention page.
    fn check_held(&self, owned: &SequencePages, computed: usize) {
        for (i, held) in owned.windows().enumerate() {
            let window = &self.windows[i];
            assert_eq!(held.first_page + held.pages.len(), owned.len());
            assert!(held.first_page <= window.first_page(computed), "{i}");
            for (page, all) in held.pages.iter().zip(&owned.pages[held.first_page..]) {
                let slot = &window.slots[*page as usize];
                assert!(slot.users > 0 && slot.of.is_none_or(|of| of == *all));
            }
        }
    }

    /// Each window page is free, owned, or cached and unused, consistently on both sides.
    fn check_window(&self, i: usize) {
        let window = &self.windows[i];
        let mut spare = vec![0; window.slots.len()];
        let unused = window.unused.values().chain(&window.free);
        unused.for_each(|p| spare[*p as usize] += 1);
        for (p, slot) in window.slots.iter().enumerate() {
            let page = p as u32;
            let is_spare = usize::from(slot.users == 0);
            assert_eq!(spare[p], is_spare, "page {p} of window {i}");
            assert!(slot.of.is_none() || !window.free.contains(&page));
            if let Some(of) = slot.of {
                let all = &self.pages[of as usize];
                assert_eq!(all.known.as_ref().unwrap().windows[i], Some(page));
                assert!(slot.users <= all.users);
            }
        }
        let known = self.pages.iter().filter_map(|page| page.known.as_ref());
        let n_known = known.filter(|known| known.windows[i].is_some()).count();
        let n_slots = window.slots.iter().filter(|slot| slot.of.is_some()).count();
        assert_eq!(n_known, n_slots);
    }

    /// The cached pages of a sequence match its tokens.
    fn check_tokens(&self, owned: &SequencePages, computed: &[u32]) {
        let mut before = owned.root;
        for (page, tokens) in owned.pages.iter().zip(computed.chunks(PAGE)) {
            let Some(known) = &self.pages[*page as usize].known else {
                break;
            };
            assert_eq!(&known.key.tokens[..], tokens);
            let key = known.key.before;
            let is_private = (FIRST_PRIVATE..=FIRST_PRIVATE + self.clock).contains(&key);
            assert!(key == before || is_private, "{key} after {before}");
            before = known.number;
        }
        assert_eq!(before, owned.last_known);
    }

    /// The predecessor of a cached page is cached, has no fewer users, and is evicted later.
    fn check_before(&self, page: &PageSlot, known: &CachedContents) {
        let number = known.key.before;
        let is_before = |p: &&PageSlot| p.known.as_ref().is_some_and(|k| k.number == number);
        if number == 0 || number > self.clock {
            return; // the root of sequences, without an adapter or with one
        }
        let before = self.pages.iter().find(is_before).expect("it is known");
        assert!(before.users >= page.users);
        let it = before.known.as_ref().unwrap();
        let later = (it.rank, it.since) > (known.rank, known.since);
        assert!(before.users > 0 || later, "{it:?} goes before {known:?}");
    }

    /// Pages without cached contents.
    pub(crate) fn n_free(&self) -> usize {
        self.free.len()
    }
}

/// Pages of `tokens` that a sequence would find.
fn found(pages: &Pages, tokens: &[u32]) -> usize {
    let mut pages = pages.clone();
    pages.reuse(tokens, &mut SequencePages::default()) / PAGE
}

fn tokens(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| i * 7 + seed).collect()
}

/// A sequence with all of `tokens` computed.
fn computed(pages: &mut Pages, tokens: &[u32]) -> (SequencePages, usize) {
    let mut owned = SequencePages::default();
    let reused = pages.reuse(tokens, &mut owned);
    assert!(pages.grow(&mut owned, tokens.len().div_ceil(PAGE)));
    pages.register(tokens, &mut owned);
    pages.check([(&owned, tokens)].into_iter());
    (owned, reused)
}

#[test]
fn a_free_page_has_one_owner() {
    let mut pages = Pages::new(5, &[]);
    let (mut a, mut b) = (SequencePages::default(), SequencePages::default());
    assert!(pages.grow(&mut a, 2) && pages.grow(&mut b, 3));
    assert_eq!((a.pages(), b.pages()), (&[0, 1][..], &[2, 3, 4][..]));
    assert!(!pages.grow(&mut a, 3), "none left");
    assert_eq!(a.len(), 2, "nothing was taken");
    pages.release(&mut b);
    assert!(pages.grow(&mut a, 5) && pages.available() == 0);
    let mut all = a.pages().to_vec();
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3, 4]);
}

#[test]
fn what_is_reused_leaves_a_token_to_compute() {
    // (earlier tokens, tokens now, whether they are the same, reused tokens)
    let cases = [
        (1, 1, true, 0),
        (PAGE - 1, PAGE, true, 0),
        (PAGE, PAGE, true, 0),
        (PAGE, PAGE + 1, true, PAGE),
        (PAGE, 3 * PAGE, true, PAGE),
        (2 * PAGE, 2 * PAGE, true, PAGE),
        (3 * PAGE + 5, 3 * PAGE + 6, true, 3 * PAGE),
        (3 * PAGE + 5, PAGE + 2, true, PAGE),
        (3 * PAGE, 3 * PAGE, false, 0),
    ];
    for (before, now, same, expected) in cases {
        let mut pages = Pages::new(10, &[]);
        let (mut owned, _) = computed(&mut pages, &tokens(before, 1));
        pages.release(&mut owned);
        let (_, reused) = computed(&mut pages, &tokens(now, 1 + u32::from(!same)));
        assert_eq!(reused, expected, "{before} {now} {same}");
    }
}

#[test]
fn what_took_long_to_compute_is_kept_longer_but_not_for_ever() {
    let mut pages = Pages::new(4, &[]);
    let read = |pages: &mut Pages, tokens: &[u32], cost| {
        pages.set_cost(cost);
        let (mut owned, reused) = computed(pages, tokens);
        pages.release(&mut owned);
        reused
    };
    let dear = tokens(2 * PAGE, 1);
    read(&mut pages, &dear, 1000);
    for seed in 2..10 {
        assert_eq!(read(&mut pages, &tokens(2 * PAGE, 1000 * seed), 10), 0);
    }
    assert_eq!(read(&mut pages, &dear, 1000), PAGE, "all but the last");
    for seed in 10..220 {
        read(&mut pages, &tokens(2 * PAGE, 1000 * seed), 10);
    }
    assert_eq!(read(&mut pages, &dear, 1000), 0);
}

#[test]
fn a_page_is_known_with_what_is_before_it_only() {
    let mut pages = Pages::new(10, &[]);
    let first = tokens(3 * PAGE, 1);
    let (mut owned, _) = computed(&mut pages, &first);
    pages.release(&mut owned);
    // The same second page after another first page.
    let mut other = first.clone();
    other[PAGE - 1] += 1;
    let (mut owned, reused) = computed(&mut pages, &other);
    assert_eq!(reused, 0);
    pages.release(&mut owned);
    // The same first page.
    let mut other = first;
    other[2 * PAGE - 1] += 1;
    assert_eq!(computed(&mut pages, &other).1, PAGE);
}

#[test]
fn sequences_that_compute_the_same_share_it_afterwards() {
    let mut pages = Pages::new(6, &[]);
    let all = tokens(2 * PAGE + 3, 1);
    let (mut a, mut b) = (SequencePages::default(), SequencePages::default());
    assert!(pages.grow(&mut a, 3) && pages.grow(&mut b, 3));
    assert_eq!(pages.available(), 0);
    pages.register(&all, &mut a);
    pages.register(&all[..PAGE + 1], &mut b);
    assert_eq!(pages.available(), 1, "one page is shared");
    pages.register(&all, &mut b);
    assert_eq!(a.pages()[..2], b.pages()[..2]);
    assert_eq!(pages.available(), 2);
    pages.check([(&a, &*all), (&b, &*all)].into_iter());
    pages.release(&mut a);
    assert_eq!(pages.available(), 3, "the other one still has them");
    pages.release(&mut b);
    assert_eq!((pages.available(), pages.n_free()), (6, 4));
}

#[test]
fn what_was_unused_longest_is_forgotten_first_and_ends_before_beginnings() {
    let mut pages = Pages::new(6, &[]);
    let (old, new) = (tokens(3 * PAGE, 1), tokens(3 * PAGE, 2));
    for all in [&old, &new, &old] {
        let (mut owned, _) = computed(&mut pages, all);
        pages.release(&mut owned);
    }
    // `new` is the older one now. Its last page is evicted first.
    for (needed, of_old, of_new) in [(1, 3, 2), (2, 3, 1), (3, 3, 0), (4, 2, 0), (6, 0, 0)] {
        let mut pages = pages.clone();
        assert!(pages.grow(&mut SequencePages::default(), needed));
        let known = [&old, &new].map(|all| found(&pages, &[all, &[0][..]].concat()));
        assert_eq!(known, [of_old, of_new], "{needed}");
    }
}

/// Released pages are found again only as far as the windows reach back.
#[test]
fn windows_let_pages_go_and_known_ones_stay_until_they_are_needed() {
    let (back, pages, every) = (PAGE + 1, 4, 1);
    let mut pages = Pages::new(20, &[WindowPool { back, pages, every }]);
    let all = tokens(8 * PAGE, 1);
    let mut owned = SequencePages::default();
    for i in 1..=8 {
        assert!(pages.grow(&mut owned, i), "two of four pages at a time");
        pages.register(&all[..i * PAGE], &mut owned);
        pages.release_windows(&mut owned, i * PAGE, 0);
        pages.check([(&owned, &all[..i * PAGE])].into_iter());
        let held = owned.windows().next().unwrap();
        assert_eq!((held.first_page, held.pages.len()), (i - 1, 1));
    }
    pages.release(&mut owned);
    // Pages 4 to 8 of the window remain: a row at the beginning of page i reads page i - 1.
    let ends = [8 * PAGE, 6 * PAGE + 1, 5 * PAGE, 4 * PAGE + 1];
    assert_eq!(ends.map(|n| found(&pages, &all[..n])), [7, 6, 0, 0]);
}

/// Few states stay: some at regular distances, those at the end of the prompt, and at the end of a
/// sequence. A sequence that starts from a retained state does not remove it.
#[test]
fn states_are_saved_at_ends_of_prompts_and_now_and_then() {
    let (back, pages, every) = (PAGE + 1, 12, 8);
    let mut pages = Pages::new(60, &[WindowPool { back, pages, every }]);
    let all = tokens(25 * PAGE, 1);
    let prompt = 20 * PAGE + 10;
    let mut owned = SequencePages::default();
    let read = |pages: &mut Pages, owned: &mut SequencePages, from: usize, end: usize| {
        for i in from + 1..=end {
            assert!(pages.grow(owned, i));
            pages.register(&all[..i * PAGE], owned);
            pages.release_windows(owned, i * PAGE, prompt);
            pages.check([(&*owned, &all[..i * PAGE])].into_iter());
        }
    };
    read(&mut pages, &mut owned, 0, 23);
    pages.release(&mut owned);
    let known = [24, 23, 22, 21, 20, 19, 18, 12, 8, 7].map(|i| found(&pages, &all[..i * PAGE + 1]));
    assert_eq!(known, [23, 23, 20, 20, 20, 19, 16, 8, 8, 0]);
    let mut again = SequencePages::default();
    assert_eq!(pages.reuse(&all[..19 * PAGE + 1], &mut again), 19 * PAGE);
    read(&mut pages, &mut again, 19, 22);
    pages.release(&mut again);
    assert_eq!(found(&pages, &all[..19 * PAGE + 1]), 19);
}

/// Sequences start, grow and end. There are few kinds of tokens, so that prefixes are often equal.
#[derive(Clone, Copy, Debug)]
enum PageCall {
    Begin {
        kind: u32,
        branch: usize,
        len: usize,
    },
    Grow {
        sequence: usize,
        by: usize,
    },
    End {
        sequence: usize,
    },
}

fn calls() -> impl Strategy<Value = Vec<PageCall>> {
    let begin = (0..3u32, 0..4usize, 1..5 * PAGE);
    let call = prop_oneof![
        3 => begin.prop_map(|(kind, branch, len)| PageCall::Begin { kind, branch, len }),
        3 => (0..9usize, 1..2 * PAGE).prop_map(|(sequence, by)| PageCall::Grow { sequence, by }),
        3 => (0..9usize).prop_map(|sequence| PageCall::End { sequence }),
    ];
    prop::collection::vec(call, 1..80)
}

/// Tokens of a kind that diverge from the common prefix at their own page.
fn branching(kind: u32, branch: usize, len: usize) -> Vec<u32> {
    let mut all = tokens(len, kind);
    let at = (branch * PAGE).min(len);
    all[at..].iter_mut().for_each(|t| *t += branch as u32);
    all
}

proptest! {
    #[test]
    fn invariants_hold_whatever_is_done(calls in calls(), n in 4..20usize, few in 1..20usize) {
        let window = |back, pages, every| WindowPool { back, pages, every };
        let windows = [window(100, few.min(n), 1), window(2, n, 1), window(PAGE + 1, n, 3)];
        let mut pages = Pages::new(n, &windows);
        // Computed tokens and all tokens.
        let mut running: Vec<(SequencePages, usize, Vec<u32>)> = Vec::new();
        for call in calls {
            match call {
                PageCall::Begin { kind, branch, len } => {
                    let (mut owned, all) = (SequencePages::default(), branching(kind, branch, len));
                    let reused = pages.reuse(&all, &mut owned);
                    prop_assert!(reused < len && reused == owned.len() * PAGE);
                    running.push((owned, reused, all));
                }
                PageCall::Grow { sequence, by } if !running.is_empty() => {
                    let at = sequence % running.len();
                    let (owned, computed, all) = &mut running[at];
                    let wanted = (*computed + by).min(all.len());
                    let (before, missing) = (pages.available(), wanted.div_ceil(PAGE));
                    let more = missing.saturating_sub(owned.len());
                    let grows = pages.grow(owned, missing);
                    prop_assert!(!grows || more <= before);
                    prop_assert!(grows || more > before || few < n, "enough windows");
                    if grows {
                        *computed = wanted;
                        pages.set_cost(by as u64 % 4 * 1000);
                        pages.register(&all[..wanted], owned);
                        pages.release_windows(owned, wanted, all.len() / 2);
                    }
                }
                PageCall::End { sequence } if !running.is_empty() => {
                    let n = running.len();
                    let (mut owned, ..) = running.remove(sequence % n);
                    pages.release(&mut owned);
                }
                PageCall::Grow { .. } | PageCall::End { .. } => {}
            }
            pages.check(running.iter().map(|(owned, computed, all)| (owned, &all[..*computed])));
        }
        running.iter_mut().for_each(|(owned, ..)| pages.release(owned));
        prop_assert_eq!(pages.available(), n);
        let available: Vec<usize> = pages.windows.iter().map(|w| w.available()).collect();
        prop_assert_eq!(available, [few.min(n), n, n]);
    }
}
