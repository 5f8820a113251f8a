//! The monitor thread: starts children, reads from them, measures their silence and reaps them.

use std::os::unix::net::UnixStream;
use std::process::{ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::{AwakeTime, Rank, lock};
use paceline_process::{LineBuffer, LineTail, Process};
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::clock::{SilenceClock, StopStage};
use super::sink::{FLUSH_LIMIT, Forward};
use super::{ChildChange, Report, WorkerSpec, WorkersShared};
use crate::channel::{WorkerSocket, read_now, wait_for};
use crate::queue::Queue;
use crate::wire::Assembler;
use crate::{Error, Garbage};

/// Poll interval of silent children. An exit shows at once on the channel; this detects those whose
/// channel is held open by another process, or is not read.
const PAUSE: Duration = Duration::from_millis(50);

/// Poll interval during an exit: a channel closes shortly before its process is gone.
const PAUSE_ENDING: Duration = Duration::from_millis(2);

/// Most silence counted in one turn: several turns' worth, in case they are slow. See [`Awake`].
const AWAKE_MAX: Duration = Duration::from_millis(200);

/// Time limit from the end of a channel to the exit of its process.
const CLOSED_LIMIT: Duration = Duration::from_secs(1);

/// Time limit from SIGKILL to giving up. See [`Process`]'s drop.
const KILLED_LIMIT: Duration = Duration::from_secs(5);

/// Bytes per read: a quarter of what a Unix socket holds by default on Linux.
const READ_BYTES: usize = 64 << 10;

/// Reads from one source in one turn, so that a flood does not hide the others.
const READS_PER_TURN: usize = 16;

/// Most reads from a source whose process has exited: many times the capacity of sockets and pipes.
/// The source ends by itself unless another process writes there too.
const READS_AT_END: usize = 256;

pub(super) struct Monitor {
    workers: Vec<MonitoredChild>,
    queue: Arc<Queue<Report>>,
    orders: Arc<WorkersShared>,
    wake: UnixStream,
    /// The specification; its sink was moved out.
    spec: WorkerSpec,
    forward: Forward,
    stopping: Option<(Instant, StopStage)>,
    buffer: Vec<u8>,
}

/// The monitor's state of a child.
struct MonitoredChild {
    rank: Rank,
    process: Process,
    ended: bool,
    channel: Arc<WorkerSocket>,
    hearing: Hearing,
    lines: Assembler,
    clock: SilenceClock,
    /// Until its first byte: how long it was in the stopped state.
    unborn: Option<Duration>,
    stderr: Option<ChildStderr>,
    text: LineBuffer,
    tail: LineTail,
}

/// Read state of a child's channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hearing {
    Open,
    /// Closed this long ago.
    Closed(Duration),
    /// Invalid data.
    Lost,
}

impl Monitor {
    /// Starts all children; kills those that were started when one cannot be.
    pub(super) fn start(
        mut spec: WorkerSpec,
        queue: Arc<Queue<Report>>,
        orders: Arc<WorkersShared>,
        wake: UnixStream,
    ) -> Result<Self, Error> {
        let sink = Forward::start(spec.on_line.take(), spec.args.len(), FLUSH_LIMIT);
        let forward = sink.map_err(|source| Error::Resource {
            what: "a thread",
            source,
        })?;
        if let Some(sandbox) = spec.sandbox {
            // Children inherit this thread's rights; it does not need more itself.
            sandbox.enter_with(&spec.writable);
        }
        let ranks = (0..).map(Rank).take(spec.args.len());
        let workers = ranks.map(|rank| MonitoredChild::start(&spec, rank));
        Ok(Self {
            workers: workers.collect::<Result<_, Error>>()?,
            queue,
            orders,
            wake,
            spec,
            forward,
            stopping: None,
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Channels and process ids, by rank.
    pub(super) fn children(&self) -> Vec<(Arc<WorkerSocket>, u32)> {
        let child = |worker: &MonitoredChild| (Arc::clone(&worker.channel), worker.process.id());
        self.workers.iter().map(child).collect()
    }

    /// Runs until an order to stop, and then until no child is left.
    pub(super) fn run(&mut self) {
        let mut now = Instant::now();
        let mut awake = AwakeTime::new(now, AWAKE_MAX);
        while !self.is_over(now) {
            self.wait();
            now = Instant::now();
            let passed = awake.tick(now);
            self.hear();
            for worker in &mut self.workers {
                worker.reap(&self.queue, &mut self.forward, &mut self.buffer);
                worker.judge(passed, self.spec.limits.silence, &self.queue);
            }
            self.change();
            self.run_orders(now);
        }
    }

    /// Executes a pending order to kill or replace a child.
    fn change(&mut self) {
        let Some(order) = lock(&self.orders.state).change.take() else {
            return;
        };
        if self.stopping.is_some() {
            return; // the caller sees the dropped sender
        }
        let index = order.rank.0 as usize;
        self.workers[index].kill();
        self.queue.reset(index);
        let done = match order.change {
            ChildChange::Kill => Ok(None),
            ChildChange::Replace => MonitoredChild::start(&self.spec, order.rank).map(|worker| {
                let child = (Arc::clone(&worker.channel), worker.process.id());
                self.workers[index] = worker;
                Some(child)
            }),
        };
        let _ = order.answer.send(done); // its caller waits
    }

    fn is_over(&self, now: Instant) -> bool {
        match self.stopping {
            None => false,
            Some((since, stage)) => {
                let patience = self
                    .orders
                    .stop()
                    .unwrap_or_default()
                    .saturating_add(KILLED_LIMIT);
                let given_up = stage == StopStage::Killed && now - since > patience;
                given_up || self.workers.iter().all(|worker| worker.ended)
            }
        }
    }

    /// Waits for input or the next poll.
    fn wait(&self) {
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        for worker in self.workers.iter().filter(|worker| !worker.ended) {
            if worker.is_heard(&self.queue) {
                fds.push(PollFd::new(&*worker.channel, PollFlags::IN));
            }
            let stderr = worker.stderr.iter();
            fds.extend(stderr.map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        }
        let mut running = self
            .workers
            .iter()
            .filter(|worker| !worker.ended)
            .peekable();
        let pause = if running.peek().is_none() && self.stopping.is_none() {
            None
        } else if self.stopping.is_some() || running.any(MonitoredChild::is_ending) {
            Some(PAUSE_ENDING)
        } else {
            Some(PAUSE)
        };
        wait_for(&mut fds, pause);
    }

    /// Reads all available input.
    fn hear(&mut self) {
        while let Ok(Some(1..)) = read_now(&mut &self.wake, &mut self.buffer) {}
        for worker in self.workers.iter_mut().filter(|worker| !worker.ended) {
            for _ in 0..READS_PER_TURN {
                if !worker.is_heard(&self.queue) {
                    break;
                }
                if !worker.hear(&self.queue, &mut self.buffer) {
                    break;
                }
                if worker.hearing == Hearing::Open {
                    worker.clock.heard(self.spec.limits.silence);
                    worker.unborn = None;
                }
            }
            worker.hear_stderr(READS_PER_TURN, &mut self.forward, &mut self.buffer);
        }
    }

    /// Executes the due stage of stopping.
    fn run_orders(&mut self, now: Instant) {
        let Some(grace) = self.orders.stop() else {
            return;
        };
        let (since, done) = match self.stopping {
            Some((since, done)) => (since, Some(done)),
            None => (now, None),
        };
        let due = StopStage::due(now - since, grace);
        if done != Some(due) {
            for worker in self.workers.iter().filter(|worker| !worker.ended) {
                worker.end(due);
            }
        }
        self.stopping = Some((since, due));
    }
}

impl MonitoredChild {
    fn start(spec: &WorkerSpec, rank: Rank) -> Result<Self, Error> {
        let resource = |what| move |source| Error::Resource { what, source };
        let (channel, theirs) = WorkerSocket::pair(rank).map_err(resource("a control channel"))?;
        let mut command = Command::new(&spec.program);
        if spec.env_alone {
            command.env_clear();
        }
        command
            .args(&spec.args[rank.0 as usize])
            .envs(spec.env.iter().map(|(name, value)| (name, value)))
            .stdin(std::os::fd::OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut process = Process::start(&mut command).map_err(|source| Error::Start {
            rank,
            program: spec.program.clone(),
            source,
        })?;
        let stderr = process.take_stderr();
        if let Some(pipe) = &stderr {
            let set = rustix::io::ioctl_fionbio(pipe, true);
            set.map_err(|errno| resource("a pipe that does not block")(errno.into()))?;
        }
        Ok(Self {
            rank,
            process,
            ended: false,
            channel: Arc::new(channel),
            hearing: Hearing::Open,
            lines: Assembler::new(),
            clock: SilenceClock::new(spec.limits.start),
            unborn: Some(Duration::ZERO),
            stderr,
            text: LineBuffer::default(),
            tail: LineTail::default(),
        })
    }

    fn index(&self) -> usize {
        self.rank.0 as usize
    }

    /// Whether its channel is read at present.
    fn is_heard(&self, queue: &Queue<Report>) -> bool {
        let index = self.index();
        self.hearing == Hearing::Open && !queue.is_full(index) && !queue.is_muted(index)
    }

    /// Whether its channel has ended, so that its exit is due.
    fn is_ending(&self) -> bool {
        matches!(self.hearing, Hearing::Closed(_))
    }

    /// Reads once from its channel. False when there was nothing.
    fn hear(&mut self, queue: &Queue<Report>, buffer: &mut [u8]) -> bool {
        match self.channel.read(buffer) {
            None => return false,
            Some(0) => self.hearing = Hearing::Closed(Duration::ZERO),
            Some(count) => {
                let (rank, index) = (self.rank, self.index());
                let push = |line: Vec<u8>| {
                    queue.push(index, line.len(), Report::Line { rank, line });
                };
                if let Err(garbage) = self.lines.feed(&buffer[..count], push) {
                    self.lose(garbage, queue);
                }
            }
        }
        true
    }

    fn lose(&mut self, garbage: Garbage, queue: &Queue<Report>) {
        self.hearing = Hearing::Lost;
        let rank = self.rank;
        queue.push_verdict(self.index(), Report::Garbled { rank, garbage });
    }

    fn hear_stderr(&mut self, reads: usize, forward: &mut Forward, buffer: &mut [u8]) {
        for _ in 0..reads {
            let Some(pipe) = &mut self.stderr else { return };
            let (rank, tail) = (self.rank, &mut self.tail);
            let mut each = |line: &str| {
                tail.push(line);
                forward.line(rank, line);
            };
            match read_now(pipe, buffer) {
                Ok(None) => return,
                Ok(Some(count @ 1..)) => self.text.feed(&buffer[..count], each),
                Ok(Some(0)) | Err(_) => {
                    self.text.finish(&mut each);
                    self.stderr = None;
                }
            }
        }
    }

    /// If it has exited: reads the rest, reaps it and reports.
    fn reap(&mut self, queue: &Queue<Report>, forward: &mut Forward, buffer: &mut [u8]) {
        if self.ended || !self.process.has_ended() {
            return;
        }
        let mut reads = 0;
        while self.hearing == Hearing::Open && reads < READS_AT_END && self.hear(queue, buffer) {
            reads += 1;
        }
        self.hear_stderr(READS_AT_END, forward, buffer);
        if self.stderr.take().is_some() {
            let tail = &mut self.tail;
            self.text.finish(|line| {
                tail.push(line);
                forward.line(self.rank, line);
            });
        }
        self.ended = true;
        self.channel.close();
        let report = Report::Exited {
            rank: self.rank,
            ending: self.process.reap(),
            tail: std::mem::take(&mut self.tail).into_lines(),
        };
        queue.push_verdict(self.index(), report);
    }

    /// Measures its silence, or how long its channel is closed. `limit` is the silence allowed
    /// after the start.
    fn judge(&mut self, awake: Duration, limit: Duration, queue: &Queue<Report>) {
        if self.ended {
            return;
        }
        if let Hearing::Closed(since) = self.hearing {
            self.hearing = Hearing::Closed(since + awake);
            if since + awake >= CLOSED_LIMIT {
                let limit = CLOSED_LIMIT;
                self.lose(Garbage::Closed { limit }, queue);
            }
            return;
        }
        // A child that is not read does not count as silent.
        if !self.is_heard(queue) {
            return;
        }
        self.look_at_start(awake, limit);
        if let Some(silence) = self.clock.pass(awake) {
            let rank = self.rank;
            queue.push(self.index(), 0, Report::Silent { rank, silence });
        }
    }

    /// A start may take long. A stopped process does not start, so it gets the limit of a started
    /// one.
    fn look_at_start(&mut self, awake: Duration, limit: Duration) {
        let Some(stopped) = self.unborn else { return };
        let stopped = if self.process.is_stopped() {
            stopped + awake
        } else {
            Duration::ZERO
        };
        self.unborn = Some(stopped);
        if stopped >= limit {
            self.clock.run_out();
        }
    }

    /// Ends it now, without a report.
    fn kill(&mut self) {
        self.channel.close();
        self.process.kill();
        self.stderr = None;
        self.ended = true;
    }

    /// Executes a stage of stopping on it.
    fn end(&self, stage: StopStage) {
        match stage {
            // A child without heartbeats will not react.
            _ if self.clock.is_accused() => self.process.signal(Signal::KILL),
            StopStage::Asked => self.channel.close(),
            StopStage::Terminated => self.process.signal(Signal::TERM),
            StopStage::Killed => self.process.signal(Signal::KILL),
        }
    }
}
