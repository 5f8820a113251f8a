//! The machines of a plan against a hosted API that asks a price for each token.

use serde_json::{Value, json};

use crate::check::finite_in;
use crate::report::or_dash;
use crate::{Error, Prediction};

/// Seconds of a mean month.
const MONTH: f64 = 86_400.0 * 365.25 / 12.0;

/// When machines have cost as little as a hosted API.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BreakEven {
    /// Answer tokens that cost the price of the machines there.
    pub(super) tokens: f64,
    /// Months in which the machines give these tokens, without a pause.
    pub(super) months: f64,
}

/// The break-even at `usd` dollars for a million answer tokens; `None` where a price is not known.
pub(super) fn break_even(said: &Prediction, usd: f64) -> Option<BreakEven> {
    let tokens = said.price_usd? / usd * 1e6;
    Some(BreakEven {
        tokens,
        months: tokens / said.throughput_tok_s / MONTH,
    })
}

/// Refuses prices that no API asks.
pub(super) fn check(usd: f64) -> Result<(), Error> {
    let field = "dollars for a million tokens";
    finite_in("a hosted API", field, usd, 1e-6, 1e6, "0.000001 to 1000000")
}

/// Electricity for a million tokens.
fn kwh(said: &Prediction) -> Option<f64> {
    said.joules_per_token.map(|joules| joules * 1e6 / 3.6e6)
}

/// Lines of a plan's figures. Electricity is apart, since its price is the user's.
pub(super) fn rows(said: &Prediction, usd: f64) -> [(&'static str, String); 2] {
    let even = break_even(said, usd);
    let tokens = or_dash(even.map(|even| even.tokens / 1e6), 0);
    let months = or_dash(even.map(|even| even.months), 1);
    let even = format!("{tokens} million tokens, {months} months without a pause");
    let power = format!("{} kWh a million tokens", or_dash(kwh(said), 1));
    [("break-even, hosted", even), ("  electricity", power)]
}

/// The same for programs.
pub(super) fn json(said: &Prediction, usd: f64) -> Value {
    let even = break_even(said, usd);
    json!({
        "usd_per_million_tokens": usd,
        "break_even_tokens": even.map(|even| even.tokens),
        "break_even_months": even.map(|even| even.months),
        "kwh_per_million_tokens": kwh(said),
    })
}
