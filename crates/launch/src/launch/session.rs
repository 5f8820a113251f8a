//! Runs a launch: its processes and pipes. `run` feeds events to the state machine in
//! `state_machine` and executes its actions. It starts one host agent for each host and one session
//! for each rank.

use std::io::{Read, Write};
use std::process::ChildStdin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_process::{Ending, LineBuffer, LineTail, Process, Signal};

use super::output::{LineRouter, Output, OutputStream};
use super::state_machine::{Event, LaunchMachine, SessionAction};
use super::{Error, Launch, Notice, Streams, script};
use crate::marks::{Marks, StreamPart, token};
use crate::remote::{Sharing, SshClient, start};

/// Polling interval for ended processes and time limits.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Interval of heartbeats to a host agent; [`script::SILENCE_S`] is 24 of them.
const BEAT_EVERY: Duration = Duration::from_secs(5);

/// How long to wait for the last output of an ended session, and for host agents to clean up.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A host agent waits up to 2 s for ended programs before it kills them.
const KEEPER_LIMIT: Duration = Duration::from_secs(5);

/// Most queued events; readers block beyond that.
const EVENTS_MAX: usize = 256;

/// Runs the program on all ranks to its end.
///
/// `cancelled` is polled every 20 ms. Once it is true, all ranks are ended, by SIGINT first. Blocks
/// until all have ended.
///
/// # Errors
/// The first failure. Nothing runs any more then either, unless a host is lost: programs there end
/// by themselves.
pub fn run(
    launch: &Launch,
    reach: &SshClient,
    streams: Streams,
    cancelled: &dyn Fn() -> bool,
    notice: &mut dyn FnMut(Notice),
) -> Result<(), Error> {
    let mut sessions = Sessions::new(launch, reach, streams);
    let hosts = sessions.hosts.clone();
    let mut course = LaunchMachine::new(hosts, &sessions.host_of, launch.limits, Instant::now());
    sessions.start_agents()?;
    let mut is_told = false;
    while !course.is_over() {
        let mut events = sessions.wait();
        if !is_told && cancelled() {
            is_told = true;
            events.push(Event::Cancel);
        }
        for event in events {
            let orders = course.step(Instant::now(), event);
            sessions.apply(orders)?;
        }
        let orders = course.tick(Instant::now());
        sessions.apply(orders)?;
        course.take_notices().into_iter().for_each(&mut *notice);
    }
    sessions.finish();
    course.outcome()
}

struct HostAgent {
    process: Process,
    /// `None` once it has ended or was released.
    lifeline: Option<ChildStdin>,
    said: Arc<Mutex<LineTail>>,
    /// Reads its standard error into `said`.
    reader: JoinHandle<()>,
    folder: Arc<Mutex<String>>,
    ended: Option<Instant>,
    is_lost: bool,
}

struct RankSession {
    process: Process,
    stdin: Option<ChildStdin>,
    readers: [JoinHandle<()>; 2],
    group: Arc<Mutex<String>>,
    ended: Option<Instant>,
    is_closed: bool,
}

struct Sessions<'a> {
    launch: &'a Launch,
    reach: &'a SshClient,
    token: String,
    hosts: Vec<String>,
    host_of: Vec<usize>,
    keepers: Vec<HostAgent>,
    ranks: Vec<Option<RankSession>>,
    output: Arc<Output>,
    output_gone: Arc<AtomicBool>,
    input: Option<Box<dyn Read + Send>>,
    sender: SyncSender<Event>,
    events: Receiver<Event>,
    beaten: Instant,
}

impl<'a> Sessions<'a> {
    fn new(launch: &'a Launch, reach: &'a SshClient, streams: Streams) -> Self {
        let mut hosts: Vec<String> = Vec::new();
        let index = |rank: &super::RankPlan| {
            let known = hosts.iter().position(|host| *host == rank.host);
            known.unwrap_or_else(|| {
                hosts.push(rank.host.clone());
                hosts.len() - 1
            })
        };
        let host_of = launch.ranks.iter().map(index).collect();
        let (sender, events) = sync_channel(EVENTS_MAX);
        Self {
            launch,
            reach,
            token: token(),
            hosts,
            host_of,
            keepers: Vec::new(),
            ranks: launch.ranks.iter().map(|_| None).collect(),
            output: Arc::new(Output::new(streams.output, streams.errors)),
            output_gone: Arc::default(),
            input: Some(streams.input),
            sender,
            events,
            beaten: Instant::now(),
        }
    }

    fn start_agents(&mut self) -> Result<(), Error> {
        for (number, host) in self.hosts.iter().enumerate() {
            let mut command = self.reach.shell(host, Sharing::Leads(number));
            let (mut process, mut lifeline) = start(&mut command)?;
            let said = Arc::default();
            let reader = note_errors(&mut process, &said);
            let folder = Arc::default();
            self.read_keeper(number, &mut process, &folder);
            // A failed write means that the agent has ended, which `wait` reports.
            let _ = lifeline.write_all(script::host_agent(&self.token).as_bytes());
            self.keepers.push(HostAgent {
                process,
                lifeline: Some(lifeline),
                said,
                reader,
                folder,
                ended: None,
                is_lost: false,
            });
        }
        Ok(())
    }

    fn read_keeper(&self, number: usize, process: &mut Process, folder: &Arc<Mutex<String>>) {
        let (sender, folder) = (self.sender.clone(), Arc::clone(folder));
        let each = move |piece: StreamPart<'_>| {
            let event = match piece {
                StreamPart::Mark(words) => match words.split_once(' ') {
                    Some(("ready", path)) => {
                        path.clone_into(&mut lock(&folder));
                        Some(Event::HostReady(number))
                    }
                    Some(("added", rank)) => rank.parse().ok().map(Event::Guarded),
                    _ => None,
                },
                // A login shell's greeting.
                StreamPart::Text(_) => None,
            };
            event.map(|event| sender.send(event));
        };
        let stdout = process.take_stdout().expect("standard output was piped");
        read_pieces(stdout, Marks::new(&self.token), each);
    }

    fn apply(&mut self, orders: Vec<SessionAction>) -> Result<(), Error> {
        let starts_all = orders
            .iter()
            .any(|order| matches!(order, SessionAction::Go(_)));
        for order in orders {
            match order {
                SessionAction::Start(host) => self.start_ranks(host)?,
                SessionAction::Guard(rank) => {
                    let group = self.group(rank);
                    self.send_to_agent(rank, &format!("add {group} {rank}"));
                }
                SessionAction::Go(rank) => {
                    if let Some(stdin) = self.stdin(rank) {
                        // A failed write means that the shell has ended, which `wait` reports.
                        let _ = stdin.write_all(b"go\n");
                    }
                }
                SessionAction::Release(rank) => {
                    let group = self.group(rank);
                    self.send_to_agent(rank, &format!("del {group}"));
                }
                SessionAction::Signal(rank, signal) => {
                    let group = self.group(rank);
                    let name = match signal {
                        Signal::INT => "INT",
                        Signal::KILL => "KILL",
                        _ => "TERM",
                    };
                    self.send_to_agent(rank, &format!("{name} {group}"));
                }
                SessionAction::Abandon(rank) => {
                    if let Some(session) = &mut self.ranks[rank] {
                        session.stdin = None;
                        session.process.signal(Signal::KILL);
                    }
                }
            }
        }
        if starts_all {
            self.pump();
        }
        Ok(())
    }

    fn group(&self, rank: usize) -> String {
        let session = self.ranks[rank].as_ref();
        session.map_or_else(String::new, |session| lock(&session.group).clone())
    }

    fn stdin(&mut self, rank: usize) -> Option<&mut ChildStdin> {
        self.ranks[rank].as_mut()?.stdin.as_mut()
    }

    fn send_to_agent(&mut self, rank: usize, words: &str) {
        self.keepers[self.host_of[rank]].send_words(words);
    }

    fn start_ranks(&mut self, host: usize) -> Result<(), Error> {
        let folder = lock(&self.keepers[host].folder).clone();
        let ranks = (0..self.ranks.len()).filter(|rank| self.host_of[*rank] == host);
        for rank in ranks.collect::<Vec<_>>() {
            let mut command = self.reach.shell(&self.hosts[host], Sharing::Joins(host));
            let (mut process, mut stdin) = start(&mut command)?;
            let group = Arc::default();
            let readers = [
                self.read_output(rank, &mut process, &group),
                self.read_errors(rank, &mut process),
            ];
            let script = script::rank(self.launch, rank, &self.token, &folder);
            let _ = stdin.write_all(script.as_bytes());
            self.ranks[rank] = Some(RankSession {
                process,
                stdin: Some(stdin),
                readers,
                group,
                ended: None,
                is_closed: false,
            });
        }
        Ok(())
    }

    fn read_output(
        &self,
        rank: usize,
        process: &mut Process,
        group: &Arc<Mutex<String>>,
    ) -> JoinHandle<()> {
        let (sender, group) = (self.sender.clone(), Arc::clone(group));
        let mut printer = self.printer(OutputStream::Out, rank);
        let mut is_ready = false;
        let each = move |piece: StreamPart<'_>| {
            let event = match piece {
                // Output of a login shell before the mark is not the program's.
                StreamPart::Text(bytes) => {
                    if is_ready {
                        printer.feed(bytes);
                    }
                    None
                }
                StreamPart::Mark("shared") => Some(Event::Shared(rank)),
                StreamPart::Mark(words) => match words.split_once(' ') {
                    Some(("ready", number)) => {
                        is_ready = true;
                        number.clone_into(&mut lock(&group));
                        Some(Event::Ready(rank))
                    }
                    Some(("exit", code)) => code.parse().ok().map(|code| Event::Exited(rank, code)),
                    _ => None,
                },
            };
            event.map(|event| sender.send(event));
        };
        let stdout = process.take_stdout().expect("standard output was piped");
        read_pieces(stdout, Marks::new(&self.token), each)
    }

    fn read_errors(&self, rank: usize, process: &mut Process) -> JoinHandle<()> {
        let mut printer = self.printer(OutputStream::Errors, rank);
        let stderr = process.take_stderr().expect("standard error was piped");
        thread::spawn(move || read(stderr, |bytes| printer.feed(bytes)))
    }

    fn printer(&self, stream: OutputStream, rank: usize) -> Printer {
        let rank = Rank(u32::try_from(rank).expect("hostfiles have at most 4096 hosts"));
        Printer {
            sorter: LineRouter::new(self.launch.tags, rank),
            stream,
            output: Arc::clone(&self.output),
            gone: Arc::clone(&self.output_gone),
        }
    }

    /// Forwards standard input, in a thread.
    fn pump(&mut self) {
        let mut reached = Vec::new();
        for (rank, session) in self.ranks.iter_mut().enumerate() {
            let stdin = session.as_mut().and_then(|session| session.stdin.take());
            reached.extend(stdin.filter(|_| self.launch.stdin.reaches(rank)));
        }
        let Some(mut input) = self.input.take() else {
            return;
        };
        if reached.is_empty() {
            return;
        }
        // Left behind at the end: a thread that reads from a terminal cannot be woken.
        thread::spawn(move || {
            let mut buffer = [0; 8192];
            while let Ok(count @ 1..) = input.read(&mut buffer) {
                reached.retain_mut(|stdin| stdin.write_all(&buffer[..count]).is_ok());
                if reached.is_empty() {
                    break;
                }
            }
        });
    }

    /// Waits up to one interval; returns the events since the last call.
    fn wait(&mut self) -> Vec<Event> {
        let mut events = match self.events.recv_timeout(LOOK_EVERY) {
            Ok(event) => vec![event],
            Err(RecvTimeoutError::Timeout) => Vec::new(),
            Err(RecvTimeoutError::Disconnected) => unreachable!("this side has a sender too"),
        };
        if self.beaten.elapsed() >= BEAT_EVERY {
            self.beaten = Instant::now();
            self.keepers
                .iter_mut()
                .for_each(|keeper| keeper.send_words("beat"));
        }
        // In this order: a session counts as closed only when all of its output was read, and its
        // last events are then handled next.
        let mut closed: Vec<Event> = Vec::new();
        for (number, keeper) in self.keepers.iter_mut().enumerate() {
            closed.extend(keeper.lost().map(|why| Event::HostLost(number, why)));
        }
        for (rank, session) in self.ranks.iter_mut().enumerate() {
            // The loss of a host causes the end of its sessions, so it is reported first.
            if self.keepers[self.host_of[rank]].is_ending() {
                continue;
            }
            let ending = session.as_mut().and_then(RankSession::closed);
            closed.extend(ending.map(|ending| Event::Closed(rank, ending)));
        }
        events.extend(self.events.try_iter());
        events.extend(closed);
        if self.output_gone.swap(false, Ordering::Relaxed) {
            events.push(Event::OutputGone);
        }
        events
    }

    /// Lets the host agents clean up.
    fn finish(mut self) {
        self.keepers
            .iter_mut()
            .for_each(|keeper| keeper.lifeline = None);
        // An agent that was never ready has nothing to clean up, and may never end by itself.
        self.keepers
            .retain(|keeper| !lock(&keeper.folder).is_empty());
        let start = Instant::now();
        let ended = |keeper: &mut HostAgent| keeper.process.has_ended();
        while !self.keepers.iter_mut().all(ended) && start.elapsed() < KEEPER_LIMIT {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl HostAgent {
    fn send_words(&mut self, words: &str) {
        if let Some(lifeline) = &mut self.lifeline {
            // A failed write means that the agent has ended, which `wait` reports.
            let _ = lifeline.write_all(format!("{words}\n").as_bytes());
        }
    }

    /// Whether it has ended without a report by [`lost`](Self::lost).
    fn is_ending(&self) -> bool {
        self.ended.is_some() && !self.is_lost
    }

    /// Why it ended, reported once, after its standard error was read.
    fn lost(&mut self) -> Option<String> {
        if self.is_lost || !self.process.has_ended() {
            return None;
        }
        let since = *self.ended.get_or_insert_with(Instant::now);
        if !self.reader.is_finished() && since.elapsed() < LAST_WORDS {
            return None;
        }
        self.is_lost = true;
        self.lifeline = None;
        let ending = self.process.reap();
        let said = std::mem::take(&mut *lock(&self.said)).into_lines();
        let last = said.into_iter().rev().find(|line| !line.trim().is_empty());
        Some(last.unwrap_or_else(|| format!("its shell {ending}")))
    }
}

impl RankSession {
    /// How it ended, reported once, after its output was read.
    fn closed(&mut self) -> Option<Ending> {
        if self.is_closed || !self.process.has_ended() {
            return None;
        }
        let since = *self.ended.get_or_insert_with(Instant::now);
        let all_read = self.readers.iter().all(JoinHandle::is_finished);
        if !all_read && since.elapsed() < LAST_WORDS {
            return None;
        }
        self.is_closed = true;
        Some(self.process.reap())
    }
}

/// Prints the lines of a stream.
struct Printer {
    sorter: LineRouter,
    stream: OutputStream,
    output: Arc<Output>,
    gone: Arc<AtomicBool>,
}

impl Printer {
    fn feed(&mut self, bytes: &[u8]) {
        let (output, gone, stream) = (&self.output, &self.gone, self.stream);
        self.sorter.feed(bytes, |rank, line| {
            let written = output.line(stream, rank, line);
            note_gone(written, stream, gone);
        });
    }
}

impl Drop for Printer {
    /// Prints the last line, if it has no newline.
    fn drop(&mut self) {
        let (output, gone, stream) = (&self.output, &self.gone, self.stream);
        self.sorter.finish(|rank, line| {
            let written = output.line(stream, rank, line);
            note_gone(written, stream, gone);
        });
    }
}

/// A closed standard error is no failure.
fn note_gone(written: std::io::Result<()>, stream: OutputStream, gone: &AtomicBool) {
    if written.is_err() && stream == OutputStream::Out {
        gone.store(true, Ordering::Relaxed);
    }
}

fn read(mut stream: impl Read, mut each: impl FnMut(&[u8])) {
    let mut buffer = [0; 8192];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => each(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
}

fn read_pieces(
    stream: impl Read + Send + 'static,
    mut marks: Marks,
    mut each: impl FnMut(StreamPart<'_>) + Send + 'static,
) -> JoinHandle<()> {
    thread::spawn(move || {
        read(stream, |bytes| marks.feed(bytes, &mut each));
        marks.finish(&mut each);
    })
}

/// Keeps the last lines of a process's standard error, in a thread that ends with it.
fn note_errors(process: &mut Process, said: &Arc<Mutex<LineTail>>) -> JoinHandle<()> {
    let stderr = process.take_stderr().expect("standard error was piped");
    let said = Arc::clone(said);
    let mut lines = LineBuffer::default();
    thread::spawn(move || {
        read(stderr, |bytes| {
            lines.feed(bytes, |line| lock(&said).push(line))
        });
    })
}
