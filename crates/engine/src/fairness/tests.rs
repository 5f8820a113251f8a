//! Rows of simulated clients, and times of simulated machines.

use proptest::prelude::*;

use super::*;

/// Sequences of these clients that all want rows and had none.
fn wishes(clients: &[u64]) -> Vec<RowDemand> {
    let wish = |client: &u64| RowDemand {
        client: *client,
        wants: true,
        is_under_way: false,
        ticket: 1,
    };
    clients.iter().map(wish).collect()
}

/// Indices of the granted sequences.
fn granted(wishes: &[RowDemand], beyond: usize) -> Vec<usize> {
    let granted = grant(wishes, |_| beyond);
    (0..wishes.len()).filter(|at| granted[*at]).collect()
}

#[test]
fn clients_with_as_many_streams_have_all_rows() {
    for clients in [&[][..], &[7, 7, 7], &[1, 2, 3], &[1, 2, 2, 1]] {
        let all: Vec<usize> = (0..clients.len()).collect();
        assert_eq!(granted(&wishes(clients), 0), all, "{clients:?}");
    }
}

#[test]
fn rows_beyond_the_equal_ones_are_bounded() {
    let clients = [9, 9, 9, 1, 9, 2, 2];
    let mut all = wishes(&clients);
    assert_eq!(granted(&all, 0), [0, 3, 5]);
    // Round by round: the second row of client 2 before the third of client 9.
    assert_eq!(granted(&all, 2), [0, 1, 3, 5, 6]);
    assert_eq!(granted(&all, usize::MAX), [0, 1, 2, 3, 4, 5, 6]);
    all[4].ticket = 0;
    assert_eq!(granted(&all, 0), [3, 4, 5], "its last row came first");
    // In-flight rows count as the client's first.
    (all[2].wants, all[2].is_under_way) = (false, true);
    assert_eq!(granted(&all, 0), [2, 3, 5]);
    all[3].wants = false; // nothing to do
    assert_eq!(granted(&all, 0), [2, 4, 5, 6], "two each of two clients");
}

proptest! {
    /// Every stream of a client with `n` has a row in one of `n` steps.
    #[test]
    fn nothing_starves(
        clients in prop::collection::vec(0..5u64, 1..40), beyond in 0..6usize,
    ) {
        let mut all = wishes(&clients);
        let mut withheld = vec![0; all.len()];
        for step in 0..100 {
            let granted = grant(&all, |_| beyond);
            for (at, granted) in granted.into_iter().enumerate() {
                if granted {
                    (all[at].ticket, withheld[at]) = (2 + step, 0);
                } else {
                    withheld[at] += 1;
                }
                let own = all.iter().filter(|other| other.client == all[at].client).count();
                prop_assert!(withheld[at] < own, "{:?} of {own}", all[at]);
            }
        }
    }

    /// The factor is respected and used on a machine with equal row costs.
    #[test]
    fn steps_take_what_the_factor_allows(
        step_ms in 1.0..100.0f64, row in 0.02..0.3f64, equal in 2..8usize, streams in 20..60usize,
    ) {
        let seconds = |rows: usize| step_ms / 1e3 * (1.0 + row * rows as f64);
        let mut leeway = RowCostModel::default();
        let mut most = 0;
        for step in 0..100 {
            let rows = streams.min(equal + leeway.beyond(equal));
            if step >= 2 * PROBE_EVERY {
                most = most.max(rows);
                let factor = seconds(rows) / seconds(equal);
                prop_assert!(factor < FACTOR + 1e-3, "{rows} rows take {factor} times as long");
            }
            leeway.record(Some(rows), Duration::from_secs_f64(seconds(rows)));
        }
        let next = seconds(most + 1) / seconds(equal);
        prop_assert!(most == streams || next > FACTOR - 1e-3, "{most} rows of {streams}: {next}");
    }
}

#[test]
fn rows_that_cost_nothing_are_not_bounded() {
    let mut leeway = RowCostModel::default();
    assert_eq!(leeway.beyond(3), 3, "nothing is known: twice as many");
    for rows in [3, 6, 3, 6, 28] {
        leeway.record(Some(rows), Duration::from_millis(10));
    }
    assert!(leeway.beyond(3) > 1000, "{leeway:?}");
}

/// One delayed step, and one whose rows carry no information.
#[test]
fn one_step_changes_little() {
    let mut leeway = RowCostModel::default();
    let time = |rows: usize| Duration::from_micros(20_000 + 1000 * rows as u64);
    for step in 0..100 {
        let rows = if step % 10 == 0 { 5 } else { 11 };
        leeway.record(Some(rows), time(rows));
    }
    let before = leeway.beyond(5);
    assert_eq!(before, 6);
    leeway.record(Some(11), Duration::from_secs(5));
    leeway.record(None, Duration::from_secs(5));
    let after = leeway.beyond(5);
    assert!((3..=9).contains(&after), "{after}");
}
