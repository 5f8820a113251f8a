//! Budgets on simulated machines, and their division among prompts.

use proptest::prelude::*;

use super::*;

fn rows(decoding: usize, prompt: usize) -> Composition {
    Composition {
        decoding,
        prompt,
        drafted: 0,
    }
}

/// A machine whose steps take `step_s + decoding x answer_s`, and with prompt rows `mix_s` and
/// `row_s` a row more.
#[derive(Clone, Copy, Debug)]
struct StepTimeModel {
    step_s: f64,
    answer_s: f64,
    mix_s: f64,
    row_s: f64,
}

const MACHINE: StepTimeModel = StepTimeModel {
    step_s: 0.02,
    answer_s: 0.001,
    mix_s: 0.004,
    row_s: 0.0005,
};

impl StepTimeModel {
    fn time(self, step: Composition) -> f64 {
        let rows = step.prompt as f64;
        let mix = if step.prompt > 0 { self.mix_s } else { 0.0 };
        self.step_s + step.decoding as f64 * self.answer_s + mix + rows * self.row_s
    }
}

fn machines() -> impl Strategy<Value = StepTimeModel> {
    // Of a row: on one thread two thirds were measured.
    let parts = (1.0..100.0f64, 0.0..0.5, 0.0..0.5, 0.01..1.0);
    parts.prop_map(|(ms, answer, mix, row)| StepTimeModel {
        step_s: ms / 1e3,
        answer_s: ms * answer / 1e3,
        mix_s: ms * mix / 1e3,
        row_s: ms * row / 1e3,
    })
}

/// Steps with `decoding` rows during an endless prompt; the rows and duration of each.
fn steps(
    pacer: &mut PrefillBudget,
    machine: StepTimeModel,
    decoding: usize,
    n: usize,
) -> Vec<(usize, f64)> {
    let step = |_| {
        let prompt = pacer.budget(decoding, 512);
        let step = rows(decoding, prompt);
        let seconds = machine.time(step);
        pacer.record(step, Duration::from_secs_f64(seconds));
        (prompt, seconds)
    };
    (0..n).map(step).collect()
}

/// A budget after one step of prompts only, as before an engine's first answer.
fn begun(pace: StepTimeTarget, machine: StepTimeModel) -> PrefillBudget {
    let mut pacer = PrefillBudget::new(pace);
    let first = rows(0, 100);
    pacer.record(first, Duration::from_secs_f64(machine.time(first)));
    pacer
}

proptest! {
    /// The target holds from the first mixed step on, within 10 %, and its time is used.
    #[test]
    fn answers_keep_their_pace(machine in machines(), decoding in 1..32usize) {
        let mut pacer = begun(StepTimeTarget::Auto, machine);
        let base = machine.time(rows(decoding, 0));
        let steps = steps(&mut pacer, machine, decoding, 60);
        prop_assert!(steps[..PROBES].iter().all(|(rows, _)| *rows == 0));
        for (rows, seconds) in &steps[PROBES..] {
            prop_assert!(*rows == LEAST_ROWS || *seconds < 2.75 * base, "{rows} {seconds} {base}");
        }
        for (rows, seconds) in &steps[40..] {
            let more = machine.row_s * 2.0 * TILE as f64; // rounding, twice
            let uses = seconds + more > 2.3 * base || *rows == 512;
            prop_assert!(uses, "{rows} rows take {seconds}, without them {base}");
        }
    }

    /// Prompts get rows even if a step without prompts takes longer than the target.
    #[test]
    fn no_prompt_starves(machine in machines(), decoding in 1..32usize) {
        let mut pacer = begun(StepTimeTarget::Millis(1), machine);
        let steps = steps(&mut pacer, machine, decoding, 20);
        prop_assert!(steps[PROBES..].iter().all(|(rows, _)| *rows >= LEAST_ROWS));
    }

    #[test]
    fn shares_fit_and_use_the_budget(
        left in prop::collection::vec(2..5000usize, 0..9), budget in 0..600usize,
    ) {
        let rows = share(&left, budget);
        prop_assert_eq!(rows.len(), left.len());
        prop_assert!(rows.iter().zip(&left).all(|(rows, left)| rows <= left));
        let all: usize = left.iter().sum();
        prop_assert_eq!(rows.iter().sum::<usize>(), budget.min(all));
        if let (Some(rows), Some(left)) = (rows.first(), left.first()) {
            prop_assert!(*rows >= budget.div_ceil(2).min(*left), "the oldest gets half");
        }
    }
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    assert_eq!(share(&[4000, 3000, 20], 64), [44, 0, 20]);
    assert_eq!(share(&[4000, 3000, 200], 64), [32, 0, 32]);
    assert_eq!(share(&[20, 3000], 64), [20, 44]);
    assert_eq!(share(&[], 64), [0; 0]);
}

#[test]
fn milliseconds_are_kept() {
    let mut pacer = begun(StepTimeTarget::Millis(100), MACHINE);
    let steps = steps(&mut pacer, MACHINE, 4, 40);
    let (rows, seconds) = steps[39];
    // 24 ms without prompts, 4 ms more with some: 144 rows would fill the remaining 72 ms. One tile
    // below that, a further tile looks too expensive by the 4 ms.
    assert_eq!((rows, (seconds * 1e3).round() as u64), (128, 92));
}

/// A step delayed by seconds costs at most some steps of small budgets.
#[test]
fn one_delayed_step_changes_little() {
    let mut pacer = begun(StepTimeTarget::Auto, MACHINE);
    let usual = steps(&mut pacer, MACHINE, 4, 40)[39].0;
    let step = rows(4, usual);
    pacer.record(step, Duration::from_secs(5));
    let after = steps(&mut pacer, MACHINE, 4, 10);
    assert!(after[0].0 >= usual / 2, "{after:?} after {usual}");
    assert_eq!(after[9].0, usual);
}

#[test]
fn without_times_or_a_pace_prompts_get_all_room() {
    let told = |pace| {
        let mut pacer = PrefillBudget::new(pace);
        pacer.record(rows(1, 0), Duration::from_millis(10));
        pacer
    };
    assert_eq!(PrefillBudget::new(StepTimeTarget::Auto).budget(3, 509), 509);
    assert_eq!(told(StepTimeTarget::Off).budget(3, 509), 509);
    assert_eq!(told(StepTimeTarget::Auto).budget(0, 512), 512);
    // Steps of three are measured first.
    assert_eq!(told(StepTimeTarget::Auto).budget(3, 509), 0);
}

#[test]
fn paces_are_read_and_shown() {
    for text in ["auto", "off", "1", "60000"] {
        assert_eq!(text.parse::<StepTimeTarget>().unwrap().to_string(), text);
    }
    for text in " 0 60001 -5 fast 1.5 99999999999999999999".split(' ') {
        let error = text.parse::<StepTimeTarget>().unwrap_err().to_string();
        let expected = "expected `auto`, `off` or milliseconds from 1 to 60000";
        assert_eq!(error, format!("pace is {text:?}, {expected}"));
    }
}
