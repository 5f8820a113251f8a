//! For tests: whether the slow proofs are wanted, and a clock that stands still while the process
//! waits for a core.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Once};
use std::thread;
use std::time::{Duration, Instant};

/// How long the ruler sleeps at a time.
const NAP: Duration = Duration::from_millis(2);

/// The longest nap of an idle machine: timers and a switch of tasks take some tenths of a
/// millisecond. Time of a nap beyond it was withheld from this process.
const NAP_MAX: Duration = Duration::from_millis(5);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);
/// Microseconds after [`START`] at which the nap under way began.
static NAPS_SINCE: AtomicU64 = AtomicU64::new(0);
/// Microseconds that naps before it took beyond [`NAP_MAX`].
static WITHHELD: AtomicU64 = AtomicU64::new(0);

/// Measures elapsed time, less the time in which this process waited for a core. A time limit made
/// for an idle machine therefore holds on a busy machine too. On an idle machine nothing is
/// subtracted.
///
/// The ruler is a thread that sleeps and yields, and looks how late it goes on. It sees that
/// threads wait for a core, not that those which have one share it. Yields are seen because ranks
/// that wait for each other yield. A scheduler may let a thread that yields wait for a time slice
/// of every thread that computes.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    since: Instant,
    withheld: Duration,
}

impl Stopwatch {
    /// Starts now; the first one of a process starts the ruler too.
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

    /// Time since the start in which a thread that wanted a core had one.
    pub fn elapsed(&self) -> Duration {
        self.without_withheld(self.since.elapsed())
    }

    /// Subtracts from `took`, measured otherwise since the start, the time withheld since then.
    pub fn without_withheld(&self, took: Duration) -> Duration {
        let gone = withheld(Instant::now()).saturating_sub(self.withheld);
        took.saturating_sub(gone)
    }
}

fn micros(at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(*START).as_micros()).unwrap_or(u64::MAX)
}

/// Time withheld until `now`, with the nap under way.
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

/// Whether the slow proofs run too: `PACELINE_TEST_LONG=1`, which `cargo xtask test --long` sets.
pub fn long() -> bool {
    std::env::var_os("PACELINE_TEST_LONG").is_some_and(|value| value == "1")
}

/// Inputs changed at random that a test tries: `few`, or 10,000 with the slow proofs. The variable
/// `PACELINE_MUTATIONS` asks for another number of them.
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

    /// However busy the machine is, no more than what passes; and work is no time withheld.
    #[test]
    fn what_passes_is_counted_once() {
        // The wall's clock first: what passes between the two starts is the wall's alone.
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
