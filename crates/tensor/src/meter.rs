//! Time of products, for measurements of a model's own steps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Adds up the time of products while it is on. Off, it costs a relaxed load and a branch each. One
/// thread at a time calls the kernels of a meter that is on.
#[derive(Debug, Default)]
pub struct Meter {
    is_on: AtomicBool,
    /// Whether products are counted by [`experts`](Self::experts).
    in_experts: AtomicBool,
    common_ns: AtomicU64,
    experts_ns: AtomicU64,
}

/// Seconds of products.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Metered {
    /// Seconds of products outside of experts.
    pub common: f64,
    /// Seconds of experts, including the work between their products.
    pub experts: f64,
}

impl Meter {
    /// Begins to count, from 0, or ends it.
    pub fn turn(&self, is_on: bool) {
        self.drain();
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// The times since the last call; resets them.
    pub fn drain(&self) -> Metered {
        let seconds = |ns: &AtomicU64| ns.swap(0, Ordering::Relaxed) as f64 * 1e-9;
        Metered {
            common: seconds(&self.common_ns),
            experts: seconds(&self.experts_ns),
        }
    }

    /// Does the `work` of experts, and counts it as theirs.
    pub fn experts<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some(began) = self.begin() else {
            return work();
        };
        self.in_experts.store(true, Ordering::Relaxed);
        let done = work();
        self.in_experts.store(false, Ordering::Relaxed);
        add(&self.experts_ns, began);
        done
    }

    /// The start of something that counts by itself.
    pub(crate) fn begin(&self) -> Option<Instant> {
        let counts = self.is_on.load(Ordering::Relaxed) && !self.in_experts.load(Ordering::Relaxed);
        counts.then(Instant::now)
    }

    /// The end of products.
    pub(crate) fn end(&self, began: Option<Instant>) {
        if let Some(began) = began {
            add(&self.common_ns, began);
        }
    }
}

fn add(to: &AtomicU64, began: Instant) {
    to.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn products_of_experts_count_once_and_none_count_while_it_is_off() {
        let meter = Meter::default();
        // A product of a second.
        let product = || {
            let began = meter.begin();
            meter.end(began.map(|began| began - Duration::from_secs(1)));
        };
        product();
        assert_eq!(meter.drain(), Metered::default());
        meter.turn(true);
        meter.experts(product);
        let of_experts = meter.drain();
        assert!(of_experts.common == 0.0 && of_experts.experts > 0.0);
        product();
        let common = meter.drain();
        assert!(common.common >= 1.0 && common.experts == 0.0);
    }
}
