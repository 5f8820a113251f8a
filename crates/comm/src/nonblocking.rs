//! Nonblocking calls: a group whose calls run on other threads and are waited for later.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::locks::lock;
use crate::{Error, Group};

type QueuedCall = Box<dyn FnOnce(&dyn Group) + Send>;

/// A group whose calls start now and are waited for later.
///
/// Collectives run in the order in which they were started, on one thread of their own. Several can
/// be in flight, and all ranks still make them in the same order. Each message runs on its own
/// thread, concurrently with collectives and other messages, so a blocked receive delays nothing
/// else. A call owns its buffers and returns them with its result.
///
/// ```
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
/// use paceline_comm::{NonblockingCalls, Deadline, Reduce, local};
///
/// let by = Deadline::at(Instant::now() + Duration::from_secs(5));
/// let threads: Vec<_> = local::ranks(2).into_iter().map(|group| std::thread::spawn(move || {
///     let ahead = NonblockingCalls::new(Arc::new(group));
///     let mut sums = Vec::new();
///     for value in [1_i32, 10] {
///         sums.push(ahead.start(move |group| {
///             let mut data = [value; 3];
///             group.all_reduce(&mut data, Reduce::Sum, by).map(|()| data)
///         }));
///     }
///     sums.into_iter().map(|sum| sum.wait()).collect::<Vec<_>>()
/// })).collect();
/// for thread in threads {
///     assert_eq!(thread.join().unwrap(), [Ok([2; 3]), Ok([20; 3])]);
/// }
/// ```
#[derive(Debug)]
pub struct NonblockingCalls {
    group: Arc<dyn Group>,
    jobs: Mutex<Sender<QueuedCall>>,
}

/// A call in flight. Dropping the handle detaches the call: it still runs, and its result is lost.
#[derive(Debug)]
pub struct PendingCall<R> {
    result: Receiver<R>,
    early: Option<R>,
}

impl NonblockingCalls {
    /// Starts the thread for collectives. It ends after all started calls when this is dropped.
    pub fn new(group: Arc<dyn Group>) -> Self {
        let (jobs, queue) = channel::<QueuedCall>();
        let own = Arc::clone(&group);
        thread::spawn(move || queue.into_iter().for_each(|job| job(&*own)));
        let jobs = Mutex::new(jobs);
        Self { group, jobs }
    }

    /// The group, for blocking calls. A blocking collective must not run while others are in
    /// flight.
    pub fn group(&self) -> &dyn Group {
        &*self.group
    }

    /// Starts collectives; `work` carries their deadlines. All ranks start the same in the same
    /// order.
    pub fn start<R: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Group) -> Result<R, Error> + Send + 'static,
    ) -> PendingCall<Result<R, Error>> {
        let (result, handle) = handle();
        let job: QueuedCall = Box::new(move |group| drop(result.send(work(group))));
        let jobs = lock(&self.jobs);
        // The thread lives as long as this value, unless a job panicked: then `wait` reports it.
        let _ = jobs.send(job);
        handle
    }

    /// Starts a send or a receive; `work` carries its deadline.
    pub fn start_message<R: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Group) -> Result<R, Error> + Send + 'static,
    ) -> PendingCall<Result<R, Error>> {
        let (result, handle) = handle();
        let group = Arc::clone(&self.group);
        thread::spawn(move || drop(result.send(work(&*group))));
        handle
    }
}

fn handle<R>() -> (Sender<R>, PendingCall<R>) {
    let (sender, result) = channel();
    let early = None;
    (sender, PendingCall { result, early })
}

impl<R> PendingCall<R> {
    /// Whether `wait` would return at once.
    pub fn is_done(&mut self) -> bool {
        if self.early.is_none() {
            match self.result.try_recv() {
                Ok(result) => self.early = Some(result),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => {}
            }
        }
        true
    }

    /// The call's result. Blocks no longer than the call's own deadline.
    ///
    /// # Panics
    /// If the call panicked.
    pub fn wait(self) -> R {
        let late = || self.result.recv().expect("a call ends with a result");
        self.early.unwrap_or_else(late)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use paceline_base::Rank;

    use super::*;
    use crate::{Deadline, local, testing};

    #[test]
    fn receives_may_be_started_before_sends_in_any_order() {
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        let got = testing::on_threads(local::ranks(2), move |group| {
            let ahead = NonblockingCalls::new(Arc::new(group));
            let peer = Rank(1 - ahead.group().rank().0);
            let receives = [5, 4, 3].map(|tag| {
                ahead.start_message(move |group| group.recv_like(&[0_u32; 2], peer, tag, by))
            });
            let barrier = ahead.start(move |group| group.barrier(by));
            let sends = [3, 4, 5].map(|tag| {
                ahead.start_message(move |group| group.send(&[tag, tag], peer, tag, by))
            });
            sends.into_iter().for_each(|send| send.wait().unwrap());
            let got = receives.map(|receive| receive.wait().unwrap());
            barrier.wait().unwrap();
            let mut last = ahead.start(move |group| group.barrier(by));
            while !last.is_done() {
                thread::yield_now();
            }
            last.wait().unwrap();
            got
        });
        assert_eq!(got, vec![[vec![5, 5], vec![4, 4], vec![3, 3]]; 2]);
    }
}
