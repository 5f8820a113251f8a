//! The thread that MLX computes on, and the watch over its evaluations.
//!
//! MLX's arrays and queues belong to one thread, and a GPU that hangs never lets that thread go. So
//! everything of MLX lives on a thread of its own, which runs the closures that it is given. A
//! caller that waits for it checks now and then how long the evaluation under way has taken. After
//! a limit the caller gives up with an error that names it.
//!
//! A thread that hangs is left behind: the process is to end then. MLX waits for its devices when a
//! process ends in order. So a process that has not ended some time later is ended without that
//! wait.

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_model::Error;

/// How often a waiting caller looks at the watch.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Longest wait for a thread that was told to end: it frees arrays.
const END_LIMIT: Duration = Duration::from_secs(5);

/// When waiting for an evaluation is over.
#[derive(Clone, Debug)]
pub struct EvaluationLimits {
    /// Of evaluations before any was measured: one that takes longer is slow or hangs.
    pub limit: Duration,
    /// Time to report the hang before the process is ended. `None`: the process is not ended.
    pub last_words: Option<Duration>,
    /// As [`LibraryPaths::hang_note`](paceline_mlx::LibraryPaths::hang_note).
    pub hang_note: Option<PathBuf>,
}

/// Shortest limit, where evaluations were measured: other programs may hold a device so long.
const LEAST: Duration = Duration::from_secs(10);

/// The same of a device with fast waits, which may be wedged. Metal itself ends a command buffer
/// after some 5 s.
const LEAST_FAST: Duration = Duration::from_secs(5);

/// The same of evaluations before any was measured. The longest there should be takes half of it:
/// see [`MlxOptions::PATIENCE`](super::MlxOptions::PATIENCE).
const FIRST_FAST: Duration = Duration::from_secs(60);

/// Factor over the times of earlier evaluations from which one counts as hung instead of slow. A
/// device that another program shares, or that is hot, is some three times as slow.
const SLOWER: u32 = 20;

/// The same of a device with fast waits. On a busy processor evaluations take a second, and a wedge
/// is to be found before a client gives up. A wrong guess costs the fast waits.
const SLOWER_FAST: u32 = 5;

/// Evaluations that are remembered.
const KNOWN: usize = 8;

/// Tells how long an evaluation has been under way, and how long it may be.
#[derive(Clone, Debug)]
pub struct Watch {
    state: Arc<Mutex<State>>,
    /// Of evaluations before any was measured.
    limit: Duration,
    least: Duration,
    slower: u32,
}

#[derive(Debug, Default)]
struct State {
    /// When the evaluation that is under way began, and its rows.
    since: Option<(Instant, usize)>,
    /// Rows and times of the last evaluations, but the first, which compiles kernels.
    known: VecDeque<(usize, Duration)>,
    is_warm: bool,
}

impl State {
    /// The longest that `rows` rows should take, by the evaluations that are known: a row costs at
    /// most what it costs alone.
    fn expected(&self, rows: usize) -> Option<Duration> {
        let times = self.known.iter().map(|(known, time)| {
            let more = (rows as f64 / *known as f64).max(1.0);
            time.mul_f64(more)
        });
        times.max()
    }

    fn end(&mut self) {
        let Some((start, rows)) = self.since.take() else {
            return;
        };
        if self.is_warm {
            self.known.push_back((rows.max(1), start.elapsed()));
            while self.known.len() > KNOWN {
                self.known.pop_front();
            }
        }
        self.is_warm = true;
    }
}

impl Watch {
    fn new(limits: &EvaluationLimits) -> Self {
        let (limit, least, slower) = match limits.hang_note {
            Some(_) => (limits.limit.min(FIRST_FAST), LEAST_FAST, SLOWER_FAST),
            None => (limits.limit, LEAST, SLOWER),
        };
        Self {
            state: Arc::default(),
            limit,
            least,
            slower,
        }
    }

    /// Runs `evaluate` on `rows` rows under the watch. The limit of an evaluation follows from its
    /// rows and the times of the last ones.
    pub fn during<T>(&self, rows: usize, evaluate: impl FnOnce() -> T) -> T {
        lock(&self.state).since = Some((Instant::now(), rows));
        let value = evaluate();
        lock(&self.state).end();
        value
    }

    /// As [`during`](Self::during), of a part of an evaluation: a copy, or a submission that waits
    /// for the device. Its time is not remembered.
    pub(super) fn during_part<T>(&self, rows: usize, part: impl FnOnce() -> T) -> T {
        lock(&self.state).since = Some((Instant::now(), rows));
        let value = part();
        lock(&self.state).since = None;
        value
    }

    /// # Errors
    /// [`Error::Hung`] when an evaluation takes too long.
    fn check(&self) -> Result<(), Error> {
        let state = lock(&self.state);
        let Some((start, rows)) = state.since else {
            return Ok(());
        };
        let usual = state.expected(rows);
        let limit = usual.map_or(self.limit, |usual| {
            (usual * self.slower).max(self.least.min(self.limit))
        });
        if start.elapsed() <= limit {
            return Ok(());
        }
        Err(Error::Hung { limit, usual })
    }
}

type Work<S> = Box<dyn FnOnce(&mut S) + Send>;

/// A thread with a state of its own. Dropping it ends the thread once it has done its work.
pub struct Host<S> {
    /// `None` while it is dropped.
    work: Option<Sender<Work<S>>>,
    /// Receives a message when the thread has ended.
    ended: Mutex<Receiver<()>>,
    watch: Watch,
    last_words: Option<Duration>,
    hang_note: Option<PathBuf>,
    hung: Once,
}

impl<S> fmt::Debug for Host<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host, {:?}", self.watch)
    }
}

impl<S: 'static> Host<S> {
    /// Starts a thread whose state `make` makes, on it.
    ///
    /// # Errors
    /// Errors of `make`; [`Error::Thread`].
    pub fn start<M>(patience: EvaluationLimits, make: M) -> Result<Self, Error>
    where
        M: FnOnce(Watch) -> Result<S, Error> + Send + 'static,
    {
        let watch = Watch::new(&patience);
        let (work, jobs) = channel::<Work<S>>();
        let (made, hear) = channel();
        let (end, ended) = channel();
        let own = watch.clone();
        let thread = std::thread::Builder::new().name("mlx".to_owned());
        let run = move || {
            match make(own) {
                Ok(mut state) => {
                    let _ = made.send(Ok(())); // nobody waits only if the caller is gone
                    jobs.into_iter().for_each(|job| job(&mut state));
                }
                Err(error) => drop(made.send(Err(error))),
            }
            let _ = end.send(());
        };
        thread.spawn(run).map_err(Error::Thread)?;
        let host = Self {
            work: Some(work),
            ended: Mutex::new(ended),
            watch,
            last_words: patience.last_words,
            hang_note: patience.hang_note,
            hung: Once::new(),
        };
        host.wait(&hear, || ())??;
        Ok(host)
    }

    /// Has `work` done on the thread and waits for it; `meanwhile` is called now and then.
    ///
    /// # Errors
    /// [`Error::Hung`]; [`Error::Gone`] when the thread panicked.
    pub fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut S) -> T + Send + 'static,
        meanwhile: impl FnMut(),
    ) -> Result<T, Error> {
        let (sender, receiver) = channel();
        self.post(move |state| {
            let _ = sender.send(work(state)); // nobody waits after a hang
        })?;
        self.wait(&receiver, meanwhile)
    }

    /// Has `work` done on the thread without waiting for it. The next call waits, since work is
    /// done in order.
    ///
    /// # Errors
    /// [`Error::Gone`] when the thread panicked.
    pub fn post(&self, work: impl FnOnce(&mut S) + Send + 'static) -> Result<(), Error> {
        let queue = self.work.as_ref().ok_or(Error::Gone)?;
        queue.send(Box::new(work)).map_err(|_| Error::Gone)
    }

    fn wait<T>(&self, receiver: &Receiver<T>, mut meanwhile: impl FnMut()) -> Result<T, Error> {
        loop {
            match receiver.recv_timeout(LOOK_EVERY) {
                Ok(value) => {
                    meanwhile();
                    return Ok(value);
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Gone),
                Err(RecvTimeoutError::Timeout) => {
                    meanwhile();
                    self.watch.check().inspect_err(|error| {
                        self.note(error);
                        self.end_later();
                    })?;
                }
            }
        }
    }

    /// Notes a hang for later processes, which wait without the hazard.
    fn note(&self, error: &Error) {
        if let Some(path) = &self.hang_note {
            // The error itself is returned in any case.
            let _ = std::fs::write(path, format!("{error}\n"));
        }
    }

    /// Whether a caller has given up waiting.
    pub fn is_hung(&self) -> bool {
        self.hung.is_completed()
    }

    /// Has the process ended if it is still there when its last words are said.
    fn end_later(&self) {
        let Some(last_words) = self.last_words else {
            return;
        };
        self.hung.call_once(|| {
            let end = move || {
                std::thread::sleep(last_words);
                paceline_mlx::end_process(1)
            };
            let thread = std::thread::Builder::new().name("mlx-end".to_owned());
            // A system that starts no thread is not helped by ending the process at once.
            let _ = thread.spawn(end);
        });
    }
}

impl<S> Drop for Host<S> {
    fn drop(&mut self) {
        self.work = None;
        let ended = self.ended.get_mut();
        let ended = ended.unwrap_or_else(std::sync::PoisonError::into_inner);
        // The library's own threads must not be asked to compute while the process ends. A thread
        // that hangs is not waited for.
        let start = Instant::now();
        while start.elapsed() < END_LIMIT && self.watch.check().is_ok() {
            if !matches!(
                ended.recv_timeout(LOOK_EVERY),
                Err(RecvTimeoutError::Timeout)
            ) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn patience(limit: Duration) -> EvaluationLimits {
        EvaluationLimits {
            limit,
            last_words: None,
            hang_note: None,
        }
    }

    fn host(limit: Duration) -> Host<Vec<u32>> {
        Host::start(patience(limit), |_| Ok(Vec::new())).unwrap()
    }

    #[test]
    fn work_is_done_in_order_on_one_thread() {
        let host = host(LONG);
        for i in 0..10 {
            host.call(move |list| list.push(i), || ()).unwrap();
        }
        let list = host.call(|list| list.clone(), || ()).unwrap();
        assert_eq!(list, (0..10).collect::<Vec<_>>());
        let name = |_: &mut _| std::thread::current().name().map(str::to_owned);
        assert_eq!(host.call(name, || ()).unwrap().as_deref(), Some("mlx"));
    }

    #[test]
    fn an_evaluation_that_hangs_is_told_by_name() {
        let host = host(Duration::ZERO);
        let (hold, held) = channel::<()>();
        let watch = host.watch.clone();
        let hang = move |_: &mut _| watch.during(1, || held.recv().is_ok());
        let error = host.call(hang, || ()).unwrap_err();
        assert!(matches!(error, Error::Hung { .. }), "{error}");
        assert!(error.to_string().contains("slow or hangs"), "{error}");
        drop(host);
        drop(hold);
    }

    /// Of evaluations whose times are known: the limit follows the rows, and the first one, which
    /// compiles kernels, does not count.
    #[test]
    fn the_limit_follows_what_was_measured() {
        let ms = Duration::from_millis;
        let mut state = State {
            since: Some((Instant::now() - ms(90_000), 1)),
            ..State::default()
        };
        state.end();
        assert_eq!(state.expected(1), None);
        state.known.extend([(512, ms(2000)), (1, ms(30))]);
        assert_eq!(state.expected(1), Some(ms(2000)));
        assert_eq!(state.expected(512), Some(ms(512 * 30)));
        for _ in 0..KNOWN {
            state.since = Some((Instant::now(), 1));
            state.end();
        }
        assert_eq!(state.known.len(), KNOWN);
        assert!(state.expected(1) < Some(ms(2000)));

        let watch = Watch::new(&patience(Duration::from_secs(300)));
        *lock(&watch.state) = State {
            since: Some((Instant::now() - ms(11_000), 1)),
            known: VecDeque::from([(1, ms(30))]),
            is_warm: true,
        };
        let error = watch.check().unwrap_err().to_string();
        assert!(error.starts_with("mlx hangs"), "{error}");
        lock(&watch.state).known[0].1 = ms(1000);
        watch.check().unwrap();
    }

    #[test]
    fn what_is_not_evaluated_may_take_its_time() {
        let host = host(Duration::ZERO);
        let wait = |_: &mut _| std::thread::sleep(3 * LOOK_EVERY);
        host.call(wait, || ()).unwrap();
    }

    #[test]
    fn a_panic_does_not_hang_those_who_wait() {
        let host = host(LONG);
        let error = host.call(|_| panic!("on purpose"), || ()).unwrap_err();
        assert!(matches!(error, Error::Gone), "{error}");
        assert!(matches!(host.call(|_| (), || ()), Err(Error::Gone)));
    }

    #[test]
    fn a_state_that_cannot_be_made_is_an_error() {
        let error = Host::<()>::start(patience(LONG), |_| Err(Error::Gone)).unwrap_err();
        assert!(matches!(error, Error::Gone));
    }
}
