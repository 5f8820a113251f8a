//! The constants come from the `fit` rows alone, and the held-out rows keep the bars.

use paceline_plan::published::{BUILTIN, Published};
use paceline_plan::validate::{Report, validate};
use paceline_plan::{Calibration, fit::fit};

fn published() -> Published {
    Published::from_toml(BUILTIN, "published.toml").expect("the rows in the tree read")
}

fn report() -> Report {
    let constants = Calibration::builtin().expect("the constants in the tree read");
    validate(&published(), &constants).expect("the catalogue in the tree reads")
}

#[test]
fn the_constants_in_the_tree_are_those_that_the_fit_rows_give() {
    let kept = Calibration::builtin().unwrap();
    // Held-out rows are thrown away before the fit, so that they cannot have a say.
    let mut rows = published();
    rows.rows.retain(|row| row.split == "fit");
    let fitted = fit(&rows, &kept).unwrap();
    for (kept, fitted) in kept.parameters().zip(fitted.parameters()) {
        let ratio = kept.value / fitted.value;
        assert!(
            (0.995..1.005).contains(&ratio),
            "{}: {} {}",
            kept.name,
            kept.value,
            fitted.value
        );
    }
}

#[test]
fn complete_held_out_rows_of_high_confidence_keep_the_bars() {
    let report = report();
    let set = report
        .sets
        .iter()
        .find(|set| set.name == "held_out, high")
        .unwrap();
    assert_eq!((set.rows, set.skipped), (16, 0));
    assert!(set.median <= 0.10, "median {}", set.median);
    assert!(set.worst <= 2.0, "worst ratio {}", set.worst);
}

#[test]
fn every_complete_row_is_predicted() {
    for scored in report().rows.iter().filter(|scored| scored.row.complete) {
        assert!(scored.said.is_ok(), "{}: {:?}", scored.row.id, scored.said);
    }
}

#[test]
fn published_orders_are_mostly_kept() {
    let report = report();
    let kept = report
        .orderings
        .iter()
        .filter(|o| o.predicted > 1.0)
        .count();
    assert!(
        kept * 10 >= report.orderings.len() * 7,
        "{kept} of {}",
        report.orderings.len()
    );
}

#[test]
#[ignore = "prints the constants for data/calibration.toml"]
fn print_fitted() {
    let mut rows = published();
    rows.rows.retain(|row| row.split == "fit");
    for p in fit(&rows, &Calibration::builtin().unwrap())
        .unwrap()
        .parameters()
    {
        println!("{} {:.4e}", p.name, p.value);
    }
}
