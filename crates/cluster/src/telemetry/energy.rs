//! Energy and price of tokens.

use serde::Serialize;

/// Joules of a kilowatt-hour.
const JOULES_PER_KWH: f64 = 3.6e6;

/// Current energy and price of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Energy {
    /// Power of all machines that compute.
    pub watts: f64,
    pub joules_per_token: f64,
    /// Price of a million tokens, in the currency of the price of a kilowatt-hour.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_per_million: Option<f64>,
}

impl Energy {
    /// For machines that use `watts` for `tok_s` tokens a second, at `per_kwh` per kilowatt-hour;
    /// `None` while no tokens are generated.
    pub fn of(watts: f64, tok_s: f64, per_kwh: Option<f64>) -> Option<Self> {
        let joules_per_token = watts / tok_s;
        let is_known = tok_s > 0.0 && joules_per_token.is_finite();
        is_known.then(|| Self {
            watts,
            joules_per_token,
            cost_per_million: per_kwh.map(|price| joules_per_token * 1e6 / JOULES_PER_KWH * price),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kilowatt_hour_is_counted_right() {
        let energy = Energy::of(36.0, 10.0, Some(0.3)).unwrap();
        assert_eq!(energy.joules_per_token, 3.6);
        // 3.6 J x 1e6 are one kilowatt-hour.
        assert!((energy.cost_per_million.unwrap() - 0.3).abs() < 1e-12);
        assert_eq!(Energy::of(36.0, 0.0, None), None);
        assert_eq!(Energy::of(f64::NAN, 1.0, None), None);
    }
}
