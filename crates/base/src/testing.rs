//! Test support: whether slow tests run, and a stopwatch that excludes the time in which the
//! process waits for a core.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Once};
use std::thread;
use std::time::{Duration, Instant};

/// Sleep interval of the ruler thread.
const NAP: Duration = Duration::from_millis(2);

/// The longest nap of an idle machine: timers and a switch of tasks take some tenths of a
/// millisecond. Time of a nap beyond it was withheld from this process.
const NAP_MAX: Duration = Duration::from_millis(5);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);
/// Microseconds from [`START`] to the begin of the current nap.
static NAPS_SINCE: AtomicU64 = AtomicU64::new(0);
/// Microseconds beyond [`NAP_MAX`] of all earlier naps.
static WITHHELD: AtomicU64 = AtomicU64::new(0);

/// A path relative to a package's folder: `CARGO_MANIFEST_DIR` of this process, or `built`, that of
/// the compiler. So a test program also runs on a machine with the repository elsewhere.
pub fn from_package(built: &str, path: &str) -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR");
    Path::new(&folder.unwrap_or_else(|| built.into())).join(path)
}

/// Measures elapsed time without the time in which this process waited for a core. So a time limit
/// for an idle machine also holds on a busy one. On an idle machine nothing is subtracted.
///
/// The ruler is a thread that sleeps, yields, and measures how late it wakes up. It detects threads
/// that wait for a core, not threads that share one. Yields are included because ranks that wait
/// for each other yield. A scheduler may make a yielding thread wait for a time slice of every
/// computing thread.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    since: Instant,
    withheld: Duration,
}

impl Stopwatch {
    /// Starts now; the first one of a process also starts the ruler.
    pub fn start() -> Self {
        static RULER: Once = Once::new();
        RULER.call_once(|| {
            NAPS_SINCE.store(micros(Instant::now()), Ordering::Relaxed);
            thread::spawn(measure);
        });
        let since = Instant::now();
        let withheld = withheld(since);
        Self { since, withheld }
    }

    /// Time since the start in which a runnable thread had a core.
    pub fn elapsed(&self) -> Duration {
        self.without_withheld(self.since.elapsed())
    }

    /// Subtracts the withheld time since the start from `took`, a duration measured by another
    /// clock.
    pub fn without_withheld(&self, took: Duration) -> Duration {
        let gone = withheld(Instant::now()).saturating_sub(self.withheld);
        took.saturating_sub(gone)
    }
}

fn micros(at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(*START).as_micros()).unwrap_or(u64::MAX)
}

/// Time withheld until `now`, with the current nap.
fn withheld(now: Instant) -> Duration {
    let before = WITHHELD.load(Ordering::Acquire);
    let nap = micros(now).saturating_sub(NAPS_SINCE.load(Ordering::Acquire));
    Duration::from_micros(before + beyond(nap))
}

fn beyond(nap: u64) -> u64 {
    nap.saturating_sub(u64::try_from(NAP_MAX.as_micros()).unwrap_or(u64::MAX))
}

fn measure() {
    loop {
        let began = micros(Instant::now());
        NAPS_SINCE.store(began, Ordering::Release);
        thread::sleep(NAP);
        thread::yield_now();
        let nap = micros(Instant::now()).saturating_sub(began);
        WITHHELD.fetch_add(beyond(nap), Ordering::AcqRel);
    }
}

/// Whether slow tests run too: `PACELINE_TEST_LONG=1`, set by `cargo xtask test --long`.
pub fn long() -> bool {
    std::env::var_os("PACELINE_TEST_LONG").is_some_and(|value| value == "1")
}

/// Number of random mutations that a test tries: `few`, or 10,000 with the slow tests.
/// `PACELINE_MUTATIONS` overrides it.
///
/// # Panics
/// If that is no number.
pub fn mutations(few: u64) -> u64 {
    let asked = std::env::var("PACELINE_MUTATIONS").ok();
    let asked = asked.map(|count| count.parse().expect("PACELINE_MUTATIONS is a number"));
    asked.unwrap_or(if long() { 10_000 } else { few })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine under any load, it counts at most the elapsed time; and work is not withheld
    /// time.
    #[test]
    fn what_passes_is_counted_once() {
        // The wall clock first: time between the two starts counts for the wall clock only.
        let (wall, watch) = (Instant::now(), Stopwatch::start());
        thread::sleep(Duration::from_millis(100));
        let counted = watch.elapsed();
        assert!(counted <= wall.elapsed(), "{counted:?}");
        assert!(watch.elapsed() >= counted / 2, "it goes on");
    }

    #[test]
    fn a_long_nap_is_withheld_but_for_what_an_idle_one_takes() {
        assert_eq!(
            [0, 2000, 5000, 6000, 2_000_000].map(beyond),
            [0, 0, 0, 1000, 1_995_000]
        );
    }
}
