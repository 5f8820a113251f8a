//! Forwards lines to the sink, on a thread that may block.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread::Builder;
use std::time::Duration;

use paceline_base::Rank;

use super::LineSink;

/// Most queued lines. Exceeded only by a flooding child or a blocked sink. Then lines are dropped
/// and counted, since logging must not stop the work.
const LINES_MAX: usize = 1024;

/// How long the shutdown waits for the sink to take the queued lines.
pub(super) const FLUSH_LIMIT: Duration = Duration::from_millis(200);

/// Sends lines to the sink's thread.
pub(super) struct Forward {
    lines: Option<SyncSender<(Rank, String)>>,
    /// Closed when the sink has everything.
    done: Receiver<()>,
    /// How long the shutdown waits for that.
    flush: Duration,
    left_out: Vec<u64>,
}

impl Forward {
    /// Starts the thread for this many ranks; `flush` limits the shutdown's wait.
    pub(super) fn start(
        sink: Option<LineSink>,
        ranks: usize,
        flush: Duration,
    ) -> std::io::Result<Self> {
        let (lines, waiting) = sync_channel::<(Rank, String)>(LINES_MAX);
        let (alive, done) = channel::<()>();
        let lines = match sink {
            None => None,
            Some(mut sink) => {
                let run = move || {
                    let _alive = alive;
                    for (rank, line) in waiting {
                        sink(rank, &line);
                    }
                };
                Builder::new().name("lines".to_owned()).spawn(run)?;
                Some(lines)
            }
        };
        Ok(Self {
            lines,
            done,
            flush,
            left_out: vec![0; ranks],
        })
    }

    /// Queues a line, or counts it as dropped. Never waits.
    pub(super) fn line(&mut self, rank: Rank, line: &str) {
        let Some(lines) = &self.lines else { return };
        let left_out = &mut self.left_out[rank.0 as usize];
        if *left_out > 0 {
            let note = format!("({left_out} lines were left out here)");
            if lines.try_send((rank, note)).is_ok() {
                *left_out = 0;
            }
        }
        if let Err(TrySendError::Full(_)) = lines.try_send((rank, line.to_owned())) {
            *left_out += 1;
        }
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        if self.lines.take().is_some() {
            let _ = self.done.recv_timeout(self.flush);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use paceline_base::testing::Stopwatch;

    use super::*;

    #[test]
    fn lines_arrive_before_the_end() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&seen);
        let sink: LineSink =
            Box::new(move |rank, line| kept.lock().unwrap().push(format!("{rank}: {line}")));
        let mut forward = Forward::start(Some(sink), 2, Duration::from_secs(60)).unwrap();
        forward.line(Rank(0), "a");
        forward.line(Rank(1), "");
        let watch = Stopwatch::start();
        drop(forward);
        // As soon as a monitor's end needs it, less what the machine withheld.
        assert!(watch.elapsed() < FLUSH_LIMIT);
        assert_eq!(*seen.lock().unwrap(), ["rank 0: a", "rank 1: "]);
        Forward::start(None, 1, FLUSH_LIMIT)
            .unwrap()
            .line(Rank(0), "nobody listens");
    }

    #[test]
    fn a_sink_that_is_held_up_holds_up_nobody() {
        let (open, gate) = sync_channel::<()>(0);
        let (say, said) = channel();
        let sink: LineSink = Box::new(move |_, line| {
            let _ = gate.recv();
            say.send(line.to_owned()).unwrap();
        });
        let mut forward = Forward::start(Some(sink), 1, FLUSH_LIMIT).unwrap();
        for i in 0..LINES_MAX + 10 {
            forward.line(Rank(0), &i.to_string());
        }
        drop(open);
        let expected = said.recv().unwrap();
        assert_eq!(expected, "0");
        while forward.left_out[0] > 0 {
            forward.line(Rank(0), "after");
            std::thread::yield_now();
        }
        drop(forward);
        let rest: Vec<String> = said.into_iter().collect();
        assert!(
            rest.iter()
                .any(|line| line.ends_with("lines were left out here)"))
        );
        assert_eq!(rest.last().map(String::as_str), Some("after"));
    }
}
